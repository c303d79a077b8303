//! What a session may read: what the source has offered to it, and nothing else. The keys of regions protect nothing:
//! each attacker here has the token, a session of its own, and the keys that another session was offered.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use remora_agent::conversation::{Connection, Options, Token, connect, derive};
use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Denial, Error, Memory, Pages, Peer, RegionKey, TransportKind};
use remora_lab::{Server, assert_same_data, require};
use remora_protocol::{Join, Message, Offer, Resume, WaitCause};
use tokio::runtime::Runtime;

use crate::kit::{LONG, Source, fill_keys, primary};

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
