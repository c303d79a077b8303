//! Lane: a connection to a region at the other end of a messenger's connection, over the nearest transport.

use std::sync::Arc;
use std::time::Duration;

use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Memory, Peer, RegionKey, TransportKind};
use remora_messenger::Connection;

use crate::link;

/// How a region is connected to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane<'a> {
    /// The transports that may be used, nearest first.
    pub(crate) transports: &'a [TransportKind],
    /// How long the region must be.
    pub(crate) length: u64,
    /// Reads under way.
    pub(crate) depth: usize,
    /// Longest time for the connection.
    pub(crate) connect_limit: Duration,
    /// Longest time without a byte while a read is under way.
    pub(crate) read_limit: Duration,
}

impl Lane<'_> {
    /// Connects by the first transport by which it can. `session`: this end's name there. Reads arrive in `sink`.
    ///
    /// # Errors
    /// Why none of the transports can be used.
    pub(crate) fn connect(
        &self,
        connection: &Connection,
        (session, keys): (u64, &[Vec<u8>]),
        sink: &Arc<Memory>,
    ) -> Result<Box<dyn Peer>, String> {
        let secret = link::region_secret(connection).ok_or("the connection has not begun")?;
        let keys: Vec<RegionKey> = keys.iter().filter_map(|key| RegionKey::from_bytes(key.clone()).ok()).collect();
        let mut why = String::from("both ends have no transport in common");
        for kind in self.transports {
            let Some(key) = keys.iter().find(|key| key.transport() == *kind) else { continue };
            if key.length() != self.length {
                why = format!("{kind}: the region has {} bytes, and {} were expected", key.length(), self.length);
                continue;
            }
            let connected = self.connector(*kind, connection).and_then(|connector| {
                let peer = connector.connect(key, session, &secret, Arc::clone(sink));
                peer.map_err(|error| error.to_string())
            });
            match connected {
                Ok(peer) => return Ok(peer),
                Err(error) => why = format!("{kind}: {error}"),
            }
        }
        Err(why)
    }

    fn connector(&self, kind: TransportKind, connection: &Connection) -> Result<Box<dyn Connector>, String> {
        if kind == TransportKind::Shm {
            return Ok(Box::new(ShmConnector::with_timeout(self.connect_limit)));
        }
        let options = TcpOptions {
            depth: self.depth,
            connect_timeout: self.connect_limit,
            handshake_timeout: self.connect_limit,
            stall_timeout: self.read_limit,
            ..TcpOptions::default()
        };
        let tcp = TcpConnector::new(options, link::socket_address(connection.peer()));
        tcp.map(|tcp| Box::new(tcp) as Box<dyn Connector>).map_err(|error| error.to_string())
    }
}
