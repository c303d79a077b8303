//! The agents' conversation uses only the message layer: a plain messenger that knows only the protocol's messages can
//! talk to both agents, and a peer with the older framing gets a refusal.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use remora_agent::conversation::Token;
use remora_fabric::memory::crc;
use remora_lab::server::wait_until;
use remora_lab::{Kind, Server, assert_same_data, require};
use remora_messenger::handshake::{self, Versions};
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Keyring, Message, Messenger, Options, Policy};
use remora_protocol::{Message as Words, NEWEST_VERSION, OLDEST_VERSION, StatusReport, Totals};
use rustix::process::Signal;

use crate::kit::{LONG, Stage, fill, primary as quick_primary, says, succeeds};

fn plain(stage: &Stage) -> Options {
    Options {
        keys: Some(Arc::new(Keyring::only(Arc::new(Token::read_file(&stage.token).unwrap())))),
        versions: Versions { oldest: OLDEST_VERSION, newest: NEWEST_VERSION },
        ..Options::default()
    }
}

fn encoded(words: &Words) -> Message {
    let mut payload = Vec::new();
    let tag = words.encode(&mut payload).unwrap();
    Message::new(0, tag.into(), payload)
}

fn decoded(delivery: &Delivery) -> Words {
    Words::decode(u8::try_from(delivery.kind).unwrap(), &delivery.front).unwrap()
}

struct Asker(mpsc::Sender<Words>);

impl Dispatcher for Asker {
    fn message(&self, _: &Connection, delivery: Delivery) {
        let _ = self.0.send(decoded(&delivery));
    }
}

/// Answers a status query as a source without a snapshot would.
#[derive(Default)]
struct Pretender(Mutex<Vec<Words>>);

impl Dispatcher for Pretender {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        self.0.lock().unwrap().push(decoded(&delivery));
        let report = StatusReport {
            source: "a plain messenger".into(),
            server: "redis://unknown".into(),
            role: "no role".into(),
            generation: None,
            base: remora_protocol::Base::default(),
            preparing: String::new(),
            saving: None,
            replicas: Vec::new(),
            totals: Totals { snapshots_taken: 7, ..Totals::default() },
            last_failure: String::new(),
            upload: None,
        };
        connection.send(encoded(&Words::Status(report))).unwrap();
    }
}

#[test]
fn a_plain_messenger_asks_a_source_and_is_answered() {
    let Some(_) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(Kind::Redis7).unwrap());
    let source = stage.source(&primary.url(), &["--no-shm"]);
    let (answers, answered) = mpsc::channel();
    let messenger = Messenger::new(Policy::lossy_client(), &plain(&stage), Arc::new(Asker(answers))).unwrap();
    let connection = messenger.connect(&Address::Tcp(source.address));
    for _ in 0..3 {
        connection.send(encoded(&Words::StatusQuery)).unwrap();
        let Words::Status(report) = answered.recv_timeout(LONG).unwrap() else {
            panic!("another answer");
        };
        assert_eq!((report.replicas.len(), report.generation), (0, None));
        assert!(report.server.contains(&primary.port().to_string()), "{}", report.server);
    }
    source.stop();
}

/// Stops reading with its first message.
struct Stuck(Mutex<mpsc::Receiver<()>>);

impl Dispatcher for Stuck {
    fn message(&self, _: &Connection, _: Delivery) {
        let _ = self.0.lock().unwrap().recv();
    }
}

/// A replica whose offer was dropped because its queue was full would wait for it without end.
#[test]
fn a_peer_that_reads_nothing_is_cut_off_when_its_queue_is_full() {
    let Some(_) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(Kind::Redis7).unwrap());
    let mut source = stage.source(&primary.url(), &["--no-shm"]);
    let (unblock, blocked) = mpsc::channel();
    let stuck = Arc::new(Stuck(Mutex::new(blocked)));
    let messenger = Messenger::new(Policy::lossy_client(), &plain(&stage), stuck).unwrap();
    let connection = messenger.connect(&Address::Tcp(source.address));
    let over = Arc::new(AtomicBool::new(false));
    let stop = over.clone();
    let asking = std::thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            if connection.send(encoded(&Words::ProbeQuery)).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let cut = source.agent.wait_for_line("closing its connection", LONG);
    over.store(true, Ordering::Relaxed);
    drop(unblock);
    asking.join().unwrap();
    cut.unwrap();
    // Others are served.
    let (address, token) = (source.address.to_string(), stage.token.display().to_string());
    says(&stage.end(&["status", "--source", &address, "--token-file", &token], 0), &["snapshot"]);
    source.stop();
}

#[test]
fn remora_status_asks_a_plain_messenger_and_takes_its_answer() {
    let stage = Stage::new();
    let pretender = Arc::new(Pretender::default());
    let messenger = Messenger::new(Policy::stateless_server(), &plain(&stage), pretender.clone()).unwrap();
    let address = messenger.listen(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap().to_string();
    let token = stage.token.display().to_string();
    let source = address.trim_start_matches("tcp:");
    let said = stage.end(&["status", "--json", "--source", source, "--token-file", &token], 0);
    says(&said, &["a plain messenger", "redis://unknown", "\"snapshots_taken\":7"]);
    assert_eq!(*pretender.0.lock().unwrap(), [Words::StatusQuery]);
}

/// Sends a hello of version 1, as agents sent it before they used the message layer. The answer names the supported
/// versions.
#[test]
fn a_peer_with_only_the_older_framing_is_refused_with_the_versions() {
    let Some(_) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(Kind::Redis7).unwrap());
    let mut source = stage.source(&primary.url(), &["--no-shm"]);
    let mut stream = TcpStream::connect(source.address).unwrap();
    let mut hello = b"REMORA\r\nRm\x01\0".to_vec();
    let payload = [&1u16.to_le_bytes()[..], &1u16.to_le_bytes(), &[0; 8], &[3; 32]].concat();
    hello.extend((payload.len() as u32).to_le_bytes());
    hello.extend(crc::crc32c(&hello[8..]).to_le_bytes());
    hello.extend(&payload);
    hello.extend(crc::crc32c(&payload).to_le_bytes());
    stream.write_all(&hello).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    // Magic, preamble, and a refusal: no common version, and those that there are.
    let versions = [OLDEST_VERSION, NEWEST_VERSION].map(u16::to_le_bytes).concat();
    assert_eq!(answer.get(20..25), Some(&[&[1], &versions[..]].concat()[..]), "{answer:?}");
    let line = format!("speaks version 1 of the control protocol, this end {NEWEST_VERSION}");
    source.agent.wait_for_line(&line, LONG).unwrap();
    source.stop();
}

/// The signal arrives while the source waits for its server, long before it is ready.
#[test]
fn a_source_that_is_stopped_while_it_starts_ends_with_status_0() {
    let stage = Stage::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = format!("redis://{}", silent.local_addr().unwrap());
    let token = stage.token.display().to_string();
    let args = ["source", "--server", &server, "--listen", "127.0.0.1:0", "--token-file", &token];
    let mut agent = stage.start(None, &args);
    let _connection = silent.accept().unwrap();
    agent.signal(Signal::TERM).unwrap();
    agent.wait_for_success(LONG).unwrap();
    assert!(agent.output().contains("stopped by SIGTERM before the source was ready"), "{}", agent.output());
}

/// A listener at a source's address that answers every connection with a refusal, as a host on the way could.
struct Refuser {
    calls: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Refuser {
    fn start(address: SocketAddr) -> Refuser {
        let listener = TcpListener::bind(address).unwrap();
        let (calls, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (counted, stopped) = (calls.clone(), stop.clone());
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let mut stream = stream.unwrap();
                let versions = Versions { oldest: OLDEST_VERSION, newest: NEWEST_VERSION };
                let _ = stream.write_all(&handshake::refuse(WRONG_TOKEN, "", versions));
                let _ = stream.shutdown(std::net::Shutdown::Write);
                let _ = stream.read_to_end(&mut Vec::new());
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Refuser { calls, stop, thread: Some(thread) }
    }

    fn stop(mut self, address: SocketAddr) {
        self.stop.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(address));
        self.thread.take().unwrap().join().unwrap();
    }
}

/// The code of a refusal that says that the caller's token is wrong.
const WRONG_TOKEN: u8 = 2;

#[test]
#[ignore = "long: make test-all"]
fn a_refusal_without_a_proof_does_not_end_a_sync_that_is_under_way() {
    for kind in require::kinds() {
        let (stage, primary, replica) =
            (Stage::new(), quick_primary(kind).start().unwrap(), Server::start(kind).unwrap());
        fill(&primary, 24, 9);
        let mut source = stage.source(&primary.url(), &["--no-shm"]);
        let address = source.address;
        // Only an agent that may read from other replicas keeps a limit, and none does by --transport auto on one host.
        let mut agent = stage.replica(&replica.url(), address, &["--transport", "tcp", "--download-limit", "4MiB"]);
        source.wait_for_slots(&mut agent, 16);
        source.agent.kill().unwrap();
        let refuser = Refuser::start(address);
        wait_until("two refused attempts", LONG, || {
            let calls = refuser.calls.load(Ordering::Relaxed);
            Ok(if calls >= 2 { Ok(()) } else { Err(format!("{calls} calls")) })
        })
        .unwrap();
        refuser.stop(address);
        assert!(agent.ended().unwrap().is_none(), "the agent ended:\n{}", agent.output());
        let _source = stage.source_at(&address.to_string(), None, &primary.url(), &["--no-shm"]);
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
    }
}
