//! Holders of the token that ask for too much, by intent or by bad luck. The primary pays little for it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use remora_agent::conversation::{Connection, Options, Token, connect, derive};
use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Denial, Error, Memory, Pages, Peer, RegionKey, TransportKind};
use remora_lab::{Server, assert_same_data, require};
use remora_protocol::{Join, Message, Offer, Resume, WaitCause};
use tokio::runtime::Runtime;

use crate::kit::{LONG, Source, at_once, fill, fill_keys, primary};

/// Questions that a holder asks in a row.
const QUESTIONS: u64 = 2000;

/// The most commands that these questions may cost the primary: those of a few batches, and the source's own.
const COMMANDS: u64 = 150;

/// How often a server has executed `INFO`.
fn infos(server: &Server) -> u64 {
    let info = server.info("commandstats").unwrap();
    let line = info.get("cmdstat_info").unwrap_or("calls=0,");
    line.strip_prefix("calls=").and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap()
}

/// A connection with the token of the replicas.
async fn authenticated(source: &Source) -> Connection {
    let token = Token::read_file(source.token()).unwrap();
    connect(&source.address.to_string(), &token, &Options::default()).await.unwrap()
}

/// Sends a question [`QUESTIONS`] times, and returns the number of answers, the last of which came a second ago.
async fn ask(source: &Source, question: &Message) -> usize {
    let (sender, mut receiver) = authenticated(source).await.split();
    let answers = tokio::spawn(async move {
        let mut answers = 0;
        while let Ok(Ok(_)) = tokio::time::timeout(Duration::from_secs(1), receiver.receive()).await {
            answers += 1;
        }
        answers
    });
    for _ in 0..QUESTIONS {
        // The source closes the connection of a peer that reads slower than it asks.
        if sender.send(question.clone()).await.is_err() {
            break;
        }
    }
    answers.await.unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn questions_without_end_cost_the_primary_few_commands_and_the_last_one_is_answered() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        fill_keys(&primary, 100, "value");
        let source = Source::start(&primary, &["--eager"]);
        let plan =
            Join { name: "plan".into(), server: "Valkey 9.1".into(), resume: None, plan_only: true, relays: None };
        for question in [Message::HandOffQuery { generation: 0, offset: 7 }, Message::Join(plan)] {
            let before = infos(&primary);
            let answers = Runtime::new().unwrap().block_on(ask(&source, &question));
            assert!(answers > 0, "no answer to {}", question.name());
            let cost = infos(&primary) - before;
            println!("{QUESTIONS} times {} cost the primary {cost} times INFO", question.name());
            assert!(cost <= COMMANDS, "{QUESTIONS} times {} cost the primary {cost} times INFO", question.name());
        }
        let replica = Server::start(kind).unwrap();
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
    }
}

/// The report names every replica, so it is not made for each question.
#[test]
fn a_peer_that_asks_for_the_status_without_end_gets_twenty_reports_a_second() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    let source = Source::start(&primary, &[]);
    let began = Instant::now();
    let answers = Runtime::new().unwrap().block_on(ask(&source, &Message::StatusQuery));
    let most = began.elapsed().as_millis() / 50 + 2;
    assert!(answers >= 2, "the first question, and those that came after it");
    assert!(answers as u128 <= most, "{answers} answers, and {most} would be allowed");
    source.stop();
}

/// Connections that a lender serves at a time.
const SEATS: usize = 8;

#[test]
#[ignore = "long: make test-all"]
fn silent_holders_of_the_token_keep_the_seats_of_a_lender_for_ten_seconds_only() {
    let Some(kind) = require::redis() else { return };
    let (primary, server) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 100, "value");
    let source = Source::start(&primary, &["--no-shm"]);
    let mut lender = source.replica(&server, &["--stay", "--transport", "tcp"]);
    let line = lender.wait_for_event("serving", LONG).unwrap();
    let port = line.split("listening=").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap().to_owned();
    lender.wait_for_event("in_step", LONG).unwrap();
    let token = Token::read_file(source.token()).unwrap();
    let options = Options::default();
    Runtime::new().unwrap().block_on(async {
        let mut silent = Vec::new();
        for _ in 0..SEATS {
            silent.push(connect(&port, &token, &options).await.unwrap());
        }
        let hears = async |connection: &mut Connection| {
            tokio::time::timeout(Duration::from_secs(20), connection.receive()).await.expect("no answer in 20 s")
        };
        let began = Instant::now();
        let mut late = connect(&port, &token, &options).await.unwrap();
        let refused = hears(&mut late).await;
        assert!(refused.is_err_and(|error| error.to_string().contains("8 replicas read here")));
        for connection in &mut silent {
            let refused = hears(connection).await;
            assert!(refused.is_err_and(|error| error.to_string().contains("no request within 10 s")));
        }
        assert!(began.elapsed() > Duration::from_secs(8), "they were given {:?} only", began.elapsed());
        // The seats are free.
        let generation = source.generation();
        let mut reader = connect(&port, &token, &options).await.unwrap();
        reader.send(Message::ReadPeer { generation, name: "reader".into() }).await.unwrap();
        let offered = hears(&mut reader).await;
        assert!(matches!(offered, Ok(Message::PeerOffer { .. })), "{offered:?}");
    });
}

/// Snapshots that a source takes without a pause.
const AT_ONCE: u64 = 5;

#[test]
#[ignore = "long: make test-all"]
fn replicas_that_need_one_snapshot_after_the_other_wait_after_the_first_few_and_are_told_why() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).start().unwrap();
        fill(&primary, 40, 1);
        // Windowed: each replica that comes after the last one needs a snapshot of its own.
        let source = Source::start(&primary, &["--memory", "16MiB", "--fork-interval", "20s"]);
        let server = Server::start(kind).unwrap();
        for _ in 0..AT_ONCE {
            source.replicate(&server, &["--replace"]);
        }
        assert_eq!(source.snapshots_taken(), AT_ONCE);

        let began = Instant::now();
        let mut waiting = source.replica(&server, &["--replace", "--name", "sixth"]);
        let why = "5 snapshots in a short time";
        let status = source.wait_for_status("the replica to wait", |status| status["replicas"][0]["name"] == "sixth");
        assert!(status["replicas"][0]["transport_why"].as_str().unwrap().contains(why), "{status}");
        let drawn = source.drawn_status();
        assert!(drawn.contains("waits: the primary has forked"), "{drawn}");
        waiting.wait_for_success(LONG).unwrap();
        assert!(waiting.output().contains(why), "{}", waiting.output());
        assert!(began.elapsed() > Duration::from_secs(2), "it waited {:?} only", began.elapsed());
        assert_eq!(source.snapshots_taken(), AT_ONCE + 1);
        assert_same_data(&primary, &server);
    });
}

// What a session may read: what the source has offered to it, and nothing else. The keys of regions protect nothing:
// each attacker here has the token, a session of its own, and the keys that another session was offered.

/// A session of the test, with the token of the replicas.
struct Session {
    runtime: Runtime,
    connection: Connection,
    source: std::net::SocketAddr,
}

impl Session {
    fn new(source: &Source) -> Session {
        let (runtime, token) = (Runtime::new().unwrap(), Token::read_file(source.token()).unwrap());
        let connection = runtime.block_on(connect(&source.address.to_string(), &token, &Options::default())).unwrap();
        Session { runtime, connection, source: source.address }
    }

    fn send(&mut self, message: Message) {
        self.runtime.block_on(self.connection.send(message)).unwrap();
    }

    /// The next message that `wanted` accepts.
    fn receive<T>(&mut self, wanted: impl Fn(Message) -> Option<T>) -> T {
        let connection = &mut self.connection;
        let received = async {
            loop {
                if let Some(found) = wanted(connection.receive().await.unwrap()) {
                    return found;
                }
            }
        };
        self.runtime.block_on(async { tokio::time::timeout(LONG, received).await.unwrap() })
    }

    fn join(&mut self, resume: Option<Resume>) {
        let (name, server) = ("test".into(), "Redis 7.0".into());
        self.send(Message::Join(Join { name, server, resume, plan_only: false, relays: None }));
    }

    fn offer(&mut self) -> Offer {
        self.receive(|message| match message {
            Message::Offer(offer) => Some(offer),
            _ => None,
        })
    }

    /// Opens a lane of this session to a region.
    fn lane(&self, key: &RegionKey) -> Result<Box<dyn Peer>, Error> {
        let secret = derive(&self.connection.session_key(), b"remora data lanes");
        let sink = Arc::new(Memory::create("test-sink", 1 << 20, Pages::Small).unwrap());
        let connector: Box<dyn Connector> = match key.transport() {
            TransportKind::Shm => Box::new(ShmConnector::new()),
            _ => Box::new(TcpConnector::new(TcpOptions::default(), Some(self.source)).unwrap()),
        };
        connector.connect(key, self.connection.session(), &secret, sink)
    }

    #[track_caller]
    fn is_not_granted(&self, keys: &[RegionKey]) {
        for key in keys {
            match self.lane(key) {
                Err(Error::Refused(Denial::NotGranted)) => {}
                Err(error) => panic!("{key}: {error}"),
                Ok(_) => panic!("{key}: a lane is open"),
            }
        }
    }
}

/// The keys for shared memory and TCP.
fn decoded(keys: &[Vec<u8>]) -> Vec<RegionKey> {
    let keys = keys.iter().map(|key| RegionKey::from_bytes(key.clone()).unwrap());
    let keys: Vec<RegionKey> = keys.filter(|key| key.transport() != TransportKind::Verbs).collect();
    assert_eq!(keys.len(), 2, "{keys:?}");
    keys
}

#[test]
#[ignore = "long: make test-all"]
fn neither_a_prober_nor_a_joiner_that_waits_opens_a_lane_to_a_table() {
    let Some(kind) = require::redis() else { return };
    let (primary, server) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 1_000, "confidential");
    let age = Duration::from_secs(2);
    let source = Source::start(&primary, &["--max-age", &format!("{}s", age.as_secs())]);

    // A reader of the snapshot, which keeps it there and reads nothing.
    let mut reader = Session::new(&source);
    reader.join(None);
    let offer = reader.offer();
    let (snapshot, journal) = (decoded(&offer.snapshot.keys), decoded(&offer.journal.keys));
    let tables = [&snapshot[..], &journal].concat();
    let lanes: Vec<Box<dyn Peer>> = tables.iter().map(|key| reader.lane(key).unwrap()).collect();

    let mut prober = Session::new(&source);
    prober.is_not_granted(&tables);
    prober.send(Message::ProbeQuery);
    let keys = prober.receive(|message| match message {
        Message::ProbeOffer { keys } => Some(keys),
        _ => None,
    });
    for key in &decoded(&keys) {
        drop(prober.lane(key).unwrap());
    }
    prober.is_not_granted(&tables);
    reader.is_not_granted(&decoded(&keys));

    // The snapshot is too old now for a joiner, and there is no other one while it is read.
    thread::sleep(age);
    let mut waiting = Session::new(&source);
    waiting.join(None);
    let cause = waiting.receive(|message| match message {
        Message::Waiting { cause, .. } => Some(cause),
        Message::Offer(_) => panic!("an offer"),
        _ => None,
    });
    assert_eq!(cause, WaitCause::Busy);
    waiting.is_not_granted(&tables);

    // With its offer, it may read the next snapshot, and the journal that it shares with the reader before it.
    drop((lanes, reader));
    let offer = waiting.offer();
    for key in decoded(&offer.snapshot.keys).iter().chain(&decoded(&offer.journal.keys)) {
        drop(waiting.lane(key).unwrap());
    }
    drop(waiting);
    source.replicate(&server, &[]);
    assert_same_data(&primary, &server);
}

#[test]
fn a_joiner_that_is_refused_opens_no_lane() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    fill_keys(&primary, 1_000, "confidential");
    let source = Source::start(&primary, &["--max-replicas", "1"]);
    let mut reader = Session::new(&source);
    reader.join(None);
    let tables = decoded(&reader.offer().snapshot.keys);
    let mut refused = Session::new(&source);
    refused.join(None);
    let error = refused.runtime.block_on(async { tokio::time::timeout(LONG, refused.connection.receive()).await });
    assert!(error.unwrap().unwrap_err().to_string().contains("--max-replicas"));
    refused.is_not_granted(&tables);
}
