//! What passes between a replica and its source: an attacker on the way, what other hosts can read of it, and peers of
//! another program.
//!
//! The attacker is a proxy that changes, cuts, repeats or swaps what the source sends. It knows neither the token nor the
//! key of the tables. These tests need root, for network namespaces.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, assert_untouched, ends, fill, fill_keys, number, primary, primary as quick_primary, says,
    steady_writer, succeeds,
};
use remora_agent::conversation::Token;
use remora_fabric::memory::crc;
use remora_fabric::tcp::LANE_MAGIC;
use remora_lab::server::wait_until;
use remora_lab::{Agent, Host, Kind, Net, Server, assert_same_data, require};
use remora_messenger::handshake::{self, Versions};
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Keyring, Message, Messenger, Options, Policy};
use remora_protocol::{Message as Words, NEWEST_VERSION, OLDEST_VERSION, StatusReport, Totals};

/// What is done to the bytes from the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// A bit is turned.
    Change,
    /// The connection ends.
    Cut,
    /// A piece arrives twice.
    Repeat,
    /// The two halves of a piece change places.
    Swap,
}

/// Which connections are attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Conversations,
    Lanes,
}

/// An attack on pieces of what arrives behind this byte of a connection.
#[derive(Clone, Copy, Debug)]
struct Attack {
    target: Target,
    deed: Deed,
    at: usize,
}

/// Without end.
const ALWAYS: u32 = u32::MAX;

/// What the proxy's threads share.
struct Shared {
    host: Host,
    source: SocketAddr,
    /// The attack, and on how many pieces.
    attack: Mutex<Option<(Attack, u32)>>,
    /// Attacks so far.
    done: AtomicU32,
    over: AtomicBool,
}

/// A running proxy.
struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on that host at the source's port: the source's keys name no host, so lanes lead to where the conversation
    /// does.
    fn start(host: &Host, source: SocketAddr, attack: Option<(Attack, u32)>) -> Proxy {
        let address = SocketAddr::new(host.address(), source.port());
        let listener = host.within(|| TcpListener::bind(address)).unwrap().unwrap();
        let (host, attack) = (host.clone(), Mutex::new(attack));
        let shared = Arc::new(Shared { host, source, attack, done: AtomicU32::new(0), over: AtomicBool::new(false) });
        let ours = shared.clone();
        let accepting = thread::spawn(move || {
            for reader in listener.incoming().flatten() {
                if ours.over.load(Ordering::Relaxed) {
                    return;
                }
                let ours = ours.clone();
                thread::spawn(move || join(&reader, &ours));
            }
        });
        Proxy { address, shared, accepting: Some(accepting) }
    }

    /// Attacks one more piece, of connections that are open already too.
    fn attack(&self, attack: Attack) {
        *self.shared.attack.lock().unwrap() = Some((attack, 1));
    }

    fn attacks(&self) -> u32 {
        self.shared.done.load(Ordering::Relaxed)
    }

    /// Waits until there have been that many attacks on what the agent receives.
    fn wait_for_attacks(&self, count: u32, agent: &Agent) {
        wait_until("the attack", LONG, || {
            let done = self.attacks();
            Ok(if done >= count { Ok(()) } else { Err(format!("{done} attacks; {}", agent.output())) })
        })
        .unwrap();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        let _ = self.shared.host.within(|| TcpStream::connect(self.address));
        self.accepting.take().map(JoinHandle::join);
    }
}

impl Shared {
    /// The attack, if it fits and is not over.
    fn next(&self, fits: impl Fn(&Attack) -> bool) -> Option<Attack> {
        let mut attack = self.attack.lock().unwrap();
        let (attack, left) = attack.as_mut().filter(|(attack, left)| *left > 0 && fits(attack))?;
        *left -= 1;
        self.done.fetch_add(1, Ordering::Relaxed);
        Some(*attack)
    }
}

/// Joins a connection with one to the source, until one of the two ends.
fn join(reader: &TcpStream, shared: &Arc<Shared>) {
    let mut first = [0; LANE_MAGIC.len()];
    let Ok(Ok(source)) = shared.host.within(|| TcpStream::connect(shared.source)) else { return };
    let Ok(_) = (&mut &*reader).read_exact(&mut first) else { return };
    let target = if first == LANE_MAGIC { Target::Lanes } else { Target::Conversations };
    if (&source).write_all(&first).is_err() {
        return;
    }
    thread::scope(|threads| {
        threads.spawn(|| pass(reader, &source, |_| true));
        let mut passed = 0;
        pass(&source, reader, |piece| {
            passed += piece.len();
            let fits = |attack: &Attack| attack.target == target && passed > attack.at && piece.len() > 1;
            let Some(attack) = shared.next(fits) else { return true };
            let length = piece.len();
            match attack.deed {
                // The last byte: what arrives behind it does not say whether it is right.
                Deed::Change => piece[length - 1] ^= 0x10,
                Deed::Cut => return false,
                Deed::Repeat => piece.extend_from_within(..),
                Deed::Swap => piece.rotate_left(length / 2),
            }
            true
        });
    });
}

/// Passes bytes on, after `attack` has seen them, until it says that this is the end.
fn pass(mut from: &TcpStream, mut to: &TcpStream, mut attack: impl FnMut(&mut Vec<u8>) -> bool) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut piece = buffer[..count].to_vec();
        if !attack(&mut piece) || to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}

/// A primary with its source, a host for the proxy, and one for the replicas.
struct Scene {
    primary: Server,
    source: Source,
    between: Host,
    there: Host,
    kind: Kind,
    stage: Stage,
    _net: Net,
}

impl Scene {
    fn new(keys: usize) -> Option<Scene> {
        require::namespaces()?;
        let kind = require::redis()?;
        let (stage, net) = (Stage::new(), Net::new().unwrap());
        let [here, between, there] = ["source", "proxy", "replica"].map(|name| net.host(name).unwrap());
        let primary = primary(kind).on(&here).start().unwrap();
        fill_keys(&primary, keys, &"a value ".repeat(100));
        let url = primary.url();
        let mut source =
            stage.source_at("0.0.0.0:0", Some(&here), &url, &["--announce", url.strip_prefix("redis://")?]);
        source.address.set_ip(here.address());
        Some(Scene { primary, source, between, there, kind, stage, _net: net })
    }

    fn server(&self) -> Server {
        Server::builder(self.kind).on(&self.there).start().unwrap()
    }

    fn proxy(&self, attack: Option<(Attack, u32)>) -> Proxy {
        Proxy::start(&self.between, self.source.address, attack)
    }

    /// A replica agent behind the proxy.
    fn replica(&self, server: &Server, proxy: &Proxy, more: &[&str]) -> Agent {
        self.stage.replica_on(&self.there, &server.url(), proxy.address, more)
    }
}

/// Values of some 10 MB in 160 slots.
const KEYS: usize = 12_000;

/// An attack on one lane, in its handshake, head, line, entries or slots: the sync goes on with the next lane.
#[test]
#[ignore = "long: make test-all"]
fn a_sync_goes_on_exactly_after_an_attack_on_one_of_its_lanes() {
    let Some(scene) = Scene::new(KEYS) else { return };
    let mut interrupted = 0;
    for deed in [Deed::Change, Deed::Cut, Deed::Repeat, Deed::Swap] {
        for at in [0, 300, 5_000, 3_000_000] {
            let attack = Attack { target: Target::Lanes, deed, at };
            let (server, proxy) = (scene.server(), scene.proxy(Some((attack, 1))));
            let mut agent = scene.replica(&server, &proxy, &[]);
            agent.wait_for_success(LONG).unwrap();
            assert!(proxy.attacks() > 0, "{attack:?} did not take place");
            assert_same_data(&scene.primary, &server);
            interrupted += usize::from(agent.output().contains("trying again in"));
        }
    }
    // A byte that was changed once is right when it is read again, over the same lane.
    assert!(interrupted >= 12, "{interrupted} of 16 attacks cost the lane");
}

/// Every lane is attacked: the agent names the reason and gives up, and the server has none of the snapshot.
#[test]
fn an_attack_on_every_lane_ends_the_sync_with_its_name_and_leaves_the_server_empty() {
    let Some(scene) = Scene::new(KEYS) else { return };
    let attack = Attack { target: Target::Lanes, deed: Deed::Change, at: 5_000 };
    let (server, proxy) = (scene.server(), scene.proxy(Some((attack, ALWAYS))));
    let mut agent = scene.replica(&server, &proxy, &["--retry-for", "2s"]);
    let began = Instant::now();
    let said = ends(&mut agent, 5);
    assert!(began.elapsed() < LONG, "it took {:?}", began.elapsed());
    says(&said, &["tried for 2 s (--retry-for)"]);
    // A source sends small pieces at first, some of which are the head of an answer alone.
    let names = ["was changed on its way", "is damaged", "violated the protocol of a data lane"];
    assert!(names.iter().any(|name| said.contains(name)), "{said}");
    assert!(proxy.attacks() > 0);
    assert_eq!(server.client().unwrap().int(&["DBSIZE"]).unwrap(), 0, "{said}");
    scene.stage.replica_on(&scene.there, &server.url(), scene.source.address, &[]).wait_for_success(LONG).unwrap();
    assert_same_data(&scene.primary, &server);
}

/// The first conversation either begins or it does not, and then the agent ends and has touched nothing.
#[test]
#[ignore = "long: make test-all"]
fn an_attack_on_the_first_conversation_changes_no_message() {
    let Some(scene) = Scene::new(1_000) else { return };
    for deed in [Deed::Change, Deed::Cut, Deed::Repeat, Deed::Swap] {
        for at in [0, 1_200] {
            let attack = Attack { target: Target::Conversations, deed, at };
            let (server, proxy) = (scene.server(), scene.proxy(Some((attack, 1))));
            let mut agent = scene.replica(&server, &proxy, &[]);
            let status = agent.wait(LONG).unwrap();
            assert!(proxy.attacks() > 0, "{attack:?} did not take place");
            match status.code() {
                Some(0) => drop(assert_same_data(&scene.primary, &server)),
                Some(5) => assert_untouched(&server),
                _ => panic!("{attack:?}: {}", agent.output()),
            }
        }
    }
}

/// A replica that stays reads the journal while clients write, and reports its progress.
#[test]
#[ignore = "long: make test-all"]
fn an_attack_on_a_staying_replica_changes_no_command_and_no_message() {
    let Some(scene) = Scene::new(1_000) else { return };
    let (server, proxy) = (scene.server(), scene.proxy(None));
    let mut agent = scene.replica(&server, &proxy, &["--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    let writer = steady_writer(&scene.primary);
    let mut attacks = 0;
    for target in [Target::Lanes, Target::Conversations] {
        for deed in [Deed::Change, Deed::Swap, Deed::Repeat, Deed::Cut] {
            attacks += 1;
            proxy.attack(Attack { target, deed, at: 0 });
            proxy.wait_for_attacks(attacks, &agent);
            thread::sleep(Duration::from_secs(1));
        }
    }
    writer.stop().unwrap();
    assert_same_data(&scene.primary, &server);
    assert_eq!(number(&scene.primary, "sync_full"), 1, "{}", agent.output());
    agent.signal(Signal::TERM).unwrap();
    agent.wait_for_success(LONG).unwrap();
    assert_same_data(&scene.primary, &server);
}

// What another host of the network can read: everything that leaves a host is recorded, and searched for known keys,
// values and names. Needs root, for network namespaces, and tcpdump.

/// The keys of the snapshot and of the stream. Shorter than what servers compress.
const KEYS_ON_THE_WIRE: usize = 5_000;

/// What must not be readable, as it begins, and how often it was read.
const SECRETS: [&str; 5] = ["known-key-", "known-value-", "streamed-key-", "streamed-value-", "known-name"];

#[test]
fn by_default_a_listener_on_the_network_reads_no_key_no_value_and_no_name() {
    let Some((from_source, from_lender)) = overheard(&[], "sealed, TLS 1.3, token") else { return };
    assert_eq!((from_source, from_lender), ([0; 5], [0; 5]));
}

/// Shows that the other test would hear something.
#[test]
#[ignore = "long: make test-all"]
fn in_plaintext_a_listener_on_the_network_reads_all_of_them() {
    let Some((from_source, from_lender)) = overheard(&["--security", "none", "--plaintext-network"], "plaintext")
    else {
        return;
    };
    // Some are cut in two by the ends of packets.
    let most = KEYS_ON_THE_WIRE * 9 / 10;
    for heard in &from_source[..4] {
        assert!(*heard > most, "{from_source:?}");
    }
    assert!(from_lender[..2].iter().all(|heard| *heard > most), "{from_lender:?}");
    assert!(from_source[4] > 0 && from_lender[4] > 0, "{from_source:?}, {from_lender:?}");
}

/// Makes one replica of a source and one of that replica, each on a host of its own, and counts the secrets on the
/// cables of source and lender.
fn overheard(security: &[&str], protection: &str) -> Option<([usize; 5], [usize; 5])> {
    require::namespaces()?;
    require::tcpdump()?;
    let kind = require::redis()?;
    let (stage, net) = (Stage::new(), Net::new().unwrap());
    let [here, there, beyond] = ["primary", "lender", "reader"].map(|name| net.host(name).unwrap());
    let primary = primary(kind).on(&here).start().unwrap();
    let [lent, last] = [&there, &beyond].map(|host| Server::builder(kind).on(host).start().unwrap());
    set(&primary, "known");
    let recordings = [&here, &there].map(|host| Recording::start(host, &stage));

    let mut source = stage.source_on(&here, &primary.url(), security);
    // They stay: servers that follow the primary by themselves send what this test would hear.
    let replica = |host: &Host, server: &Server| {
        let options = [security, &["--stay", "--name", "known-name"]].concat();
        stage.replica_on(host, &server.url(), source.address, &options)
    };
    let mut lender = replica(&there, &lent);
    lender.wait_for_event("in_step", LONG).unwrap();
    let mut reader = replica(&beyond, &last);
    let read = reader.wait_for_event("upstream_read", LONG).unwrap();
    assert!(read.contains(&format!("protection={protection}")), "{read}");
    reader.wait_for_event("in_step", LONG).unwrap();
    set(&primary, "streamed");
    for server in [&lent, &last] {
        assert_same_data(&primary, server);
    }
    let heard = recordings.map(Recording::stop);
    for agent in [&mut reader, &mut lender, &mut source.agent] {
        agent.signal(Signal::TERM).unwrap();
        agent.wait(LONG).unwrap();
    }
    let [from_source, from_lender] = heard.map(|bytes| SECRETS.map(|secret| count(&bytes, secret)));
    Some((from_source, from_lender))
}

/// Sets keys whose names and values begin with this word.
fn set(server: &Server, word: &str) {
    let mut client = server.client().unwrap();
    for number in 0..KEYS {
        client.queue(&[
            b"SET".to_vec(),
            format!("{word}-key-{number}").into_bytes(),
            format!("{word}-value-{number}").into_bytes(),
        ]);
    }
    for _ in 0..KEYS {
        assert!(client.receive().unwrap().as_error().is_none());
    }
}

fn count(bytes: &[u8], word: &str) -> usize {
    bytes.windows(word.len()).filter(|window| *window == word.as_bytes()).count()
}

/// A running recording of everything on a host's cable.
struct Recording {
    tcpdump: Agent,
    file: PathBuf,
}

impl Recording {
    fn start(host: &Host, stage: &Stage) -> Recording {
        let file = stage.folder().join(format!("{}.pcap", host.name()));
        let mut tcpdump = Command::new("tcpdump");
        // Whole packets; a large buffer, so that none is missed; as root, who alone can write there.
        tcpdump.args(["-i", "eth0", "-s", "0", "-B", "65536", "-Z", "root", "-w"]).arg(&file);
        host.enter(&mut tcpdump).unwrap();
        let mut tcpdump = Agent::run(tcpdump).unwrap();
        tcpdump.wait_for_line("listening on", LONG).unwrap();
        Recording { tcpdump, file }
    }

    /// Ends the recording, and returns its bytes.
    fn stop(mut self) -> Vec<u8> {
        self.tcpdump.signal(Signal::INT).unwrap();
        self.tcpdump.wait_for_success(LONG).unwrap();
        let said = self.tcpdump.output();
        assert!(said.contains("\n0 packets dropped by kernel"), "{said}");
        std::fs::read(&self.file).unwrap()
    }
}

// The agents' conversation uses only the message layer: a plain messenger that knows only the protocol's messages can
// talk to both agents, and a peer with the older framing gets a refusal.

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
