//! Hosts that only read: what their connections are for, and what is refused.

use std::sync::Arc;
use std::time::Duration;

use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Memory, Pages, RegionKey, TransportKind};
use remora_messenger::{Keyring, Token};
use remora_volume::Security;
use remora_volume::client::{Reads, Volume};
use remora_volume::read_only::{ReadOnly, ReadOnlyError, ReadOnlyOptions};
use remora_volume::server::ServerOptions;
use remora_volume::wire::{Call, Cause, Mode, Reply};
use remora_wire::derive;

use crate::calls::{Hand, calls_of, calls_of_server};
use crate::cluster::{Cluster, far_options, options, security, server_options, until};

fn reading(reads: Reads) -> ReadOnlyOptions {
    ReadOnlyOptions { security: security(), reads, limit: Duration::from_secs(2), ..ReadOnlyOptions::default() }
}

/// Servers that can be read in every way.
fn cluster(blocks: u64) -> Cluster {
    Cluster::with(3, 2, blocks, &ServerOptions { lanes: Some(0), ..server_options() })
}

#[test]
fn a_connection_for_reading_is_for_nothing_else() {
    let cluster = cluster(100);
    let volume = cluster.open().unwrap();
    volume.write(3, vec![7; 4096]).unwrap();
    let server = cluster.servers[0].as_ref().unwrap();
    let before = cluster.settled();
    let holder = before.promised.unwrap();
    let shape = cluster.shape;
    for (call, blocks) in calls_of(shape, holder).into_iter().chain(calls_of_server(shape)) {
        let hand = Hand::open(server, cluster.shape, Mode::Read);
        let text = hand.is_refused(&call, blocks, Cause::Misuse);
        let says_why =
            matches!(call, Call::Open { .. } | Call::Pull { .. } | Call::Follow(_)) || text.contains("is for reading");
        assert!(says_why, "{call:?}: {text}");
        // Also after it was granted the region.
        let hand = Hand::open(server, cluster.shape, Mode::Read);
        assert!(matches!(hand.ask(&Call::Look, 0), Some(Reply::Attached { .. })));
        hand.is_refused(&call, blocks, Cause::Misuse);
    }
    for mode in [Mode::Write, Mode::Borrow] {
        Hand::open(server, cluster.shape, mode).is_refused(&Call::Look, 0, Cause::Misuse);
    }
    assert_eq!(server.standing(cluster.shape.volume()).unwrap(), before);
    volume.write(3, vec![8; 4096]).unwrap();
    assert!(volume.end().is_none());
}

/// Another server borrows blocks by it, or follows the writer's chain.
#[test]
fn a_connection_for_loans_is_for_nothing_else() {
    let cluster = cluster(100);
    let volume = cluster.open().unwrap();
    volume.write(3, vec![7; 4096]).unwrap();
    let server = cluster.servers[0].as_ref().unwrap();
    let before = cluster.settled();
    let (shape, holder) = (cluster.shape, before.promised.unwrap());
    let is_for_it = |call: &Call| matches!(call, Call::Lend { .. } | Call::Follow(_));
    let calls = calls_of(shape, holder).into_iter().chain(calls_of_server(shape)).chain([(Call::Look, 0)]);
    for (call, blocks) in calls.filter(|(call, _)| !is_for_it(call)) {
        let hand = Hand::open(server, cluster.shape, Mode::Borrow);
        let text = hand.is_refused(&call, blocks, Cause::Misuse);
        let says_why = matches!(call, Call::Open { .. } | Call::Pull { .. }) || text.contains("is for loans");
        assert!(says_why, "{call:?}: {text}");
    }
    assert_eq!(server.standing(cluster.shape.volume()).unwrap(), before);
    volume.write(3, vec![8; 4096]).unwrap();
    assert!(volume.end().is_none());
}

/// Connects to the region of a server, as a reader's lane does.
fn connect(hand: &Hand, session: u64, keys: &[Vec<u8>]) -> Result<Box<dyn remora_fabric::Peer>, String> {
    let key = hand.connection.negotiated().unwrap().key;
    let secret = derive(&key, b"remora volume regions");
    let keys = keys.iter().map(|key| RegionKey::from_bytes(key.clone()).unwrap());
    let key = keys.into_iter().find(|key| key.transport() == TransportKind::Tcp).unwrap();
    let sink = Arc::new(Memory::create("test", 1 << 20, Pages::Small).unwrap());
    let connector = TcpConnector::new(TcpOptions::default(), Some("127.0.0.1:1".parse().unwrap())).unwrap();
    connector.connect(&key, session, &secret, sink).map_err(|error| error.to_string())
}

#[test]
fn a_grant_is_for_one_copy_and_ends_with_its_connection() {
    let cluster = Cluster::with(1, 1, 100, &far_options());
    let server = cluster.servers[0].as_ref().unwrap();
    let other = remora_volume::shape::Shape::new(
        remora_volume::client::new_id().unwrap(),
        100,
        remora_volume::shape::Copies::new(1, 1).unwrap(),
    )
    .unwrap();
    Volume::create(other, &cluster.addresses, &options()).unwrap();
    let look = |shape| {
        let hand = Hand::open(server, shape, Mode::Read);
        let Some(Reply::Attached { session, keys }) = hand.ask(&Call::Look, 0) else { panic!() };
        (hand, session, keys)
    };
    let (hand, session, keys) = look(cluster.shape);
    let (_hand_of_other, _, keys_of_other) = look(other);
    assert!(connect(&hand, session, &keys).is_ok());
    let refused = connect(&hand, session, &keys_of_other).err().unwrap();
    assert!(refused.contains("refused the connection"), "{refused}");
    // A later writer changes nothing; the connection's end does.
    drop(cluster.open().unwrap());
    let mut peer = connect(&hand, session, &keys).unwrap();
    hand.connection.close();
    until("the grant has ended", || connect(&hand, session, &keys).is_err());
    until("and with it what was connected", || peer.poll(&mut Vec::new()).is_err());
    // A volume that a server does not have is not read, and no connection is kept for it.
    let unknown =
        remora_volume::shape::Shape::new(remora_volume::client::new_id().unwrap(), 100, other.copies()).unwrap();
    let (_hand, _, keys) = look(unknown);
    assert!(keys.is_empty());
}

#[test]
#[ignore = "long: make test-all"]
fn what_cannot_be_read_is_said() {
    let cluster = Cluster::with(1, 1, 100, &ServerOptions { shm: false, ..server_options() });
    let open = |options: &ReadOnlyOptions| match ReadOnly::open(cluster.shape, &cluster.addresses, options) {
        Ok(_) => panic!("it was opened"),
        Err(error) => error,
    };
    let error = open(&reading(Reads::Anywhere));
    assert!(matches!(error, ReadOnlyError::NoCopy(_)) && error.to_string().contains("does not offer"), "{error}");
    assert!(matches!(open(&reading(Reads::Asked)), ReadOnlyError::NoWay));
    let token = Token::new(b"another token, 0123456789abcdefgh").unwrap();
    let stranger = Security { keys: Some(Arc::new(Keyring::only(Arc::new(token)))), ..Security::default() };
    let error = open(&ReadOnlyOptions { security: stranger, ..reading(Reads::Anywhere) });
    assert!(matches!(error, ReadOnlyError::NoCopy(_)), "{error}");
    assert!(error.to_string().contains("token"), "{error}");
}
