//! A process without the token at the port that a relay listens on.

use std::net::SocketAddr;
use std::sync::Arc;

use remora_agent::conversation::{self, Options, Token};
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Error, Memory, Pages, RegionId, RegionKey, TransportKind};
use remora_lab::scratch;
use tokio::runtime::Runtime;

/// Asserts that neither a control connection with another token nor a data lane without a grant is accepted.
pub(crate) fn has_no_success(door: SocketAddr, generation: u64) {
    let folder = scratch::folder("stranger").unwrap();
    let token = Token::read_file(scratch::token_file(folder.path()).unwrap()).unwrap();
    let connected = Runtime::new()
        .unwrap()
        .block_on(async { conversation::connect(&door.to_string(), &token, &Options::default()).await.map(drop) });
    let refused = connected.unwrap_err().to_string();
    assert!(refused.contains("token"), "{refused}");

    // The key of a region is not secret. Any region number: the relay's own, and those that it does not have.
    let connector = TcpConnector::new(TcpOptions::default(), None).unwrap();
    for region in 0..4 {
        let mut address = vec![1, 4];
        address.extend(door.port().to_le_bytes());
        let SocketAddr::V4(host) = door else { panic!("{door} is not an IPv4 address") };
        address.extend(host.ip().octets());
        address.resize(20, 0);
        let id = RegionId { generation, region };
        let key = RegionKey::new(TransportKind::Tcp, id, 4096, &address).unwrap();
        let sink = Arc::new(Memory::create("stranger", 4096, Pages::Small).unwrap());
        for session in 0..3 {
            let refused = connector.connect(&key, session, &[0x5e; 32], sink.clone()).err().unwrap();
            assert!(matches!(refused, Error::Refused(_)), "{refused}");
        }
    }
}
