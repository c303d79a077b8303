//! Lane: a connection to a region at the other end of a messenger's connection, over the nearest transport.

use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Memory, Peer, RegionKey, Secret, TransportKind};
use remora_messenger::Connection;

use crate::link;
use crate::rdma::{Rdma, Reading};

/// How a region is connected to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane<'a> {
    /// The transports that may be used, nearest first.
    pub(crate) transports: &'a [TransportKind],
    /// By which devices RDMA is used.
    pub(crate) rdma: &'a Rdma,
    /// How long the region must be.
    pub(crate) length: u64,
    /// Reads under way.
    pub(crate) depth: usize,
    /// Longest time for the connection.
    pub(crate) connect_limit: Duration,
    /// Longest time without a byte while a read is under way.
    pub(crate) read_limit: Duration,
}

/// A connection.
pub(crate) struct Laid {
    pub(crate) peer: Box<dyn Peer>,
    pub(crate) transport: TransportKind,
    /// Why nearer transports were passed over; empty if none was.
    pub(crate) why: String,
    /// How long it took to connect by that transport.
    pub(crate) took: Duration,
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
    ) -> Result<Laid, String> {
        let secret = link::region_secret(connection).ok_or("the connection has not begun")?;
        let keys: Vec<RegionKey> = keys.iter().filter_map(|key| RegionKey::from_bytes(key.clone()).ok()).collect();
        let mut why = Vec::new();
        for kind in self.transports {
            let began = Instant::now();
            match self.connect_by(*kind, connection, (session, &secret, &keys), sink) {
                Ok(peer) => {
                    return Ok(Laid { peer, transport: *kind, why: why.join("; "), took: began.elapsed() });
                }
                Err(error) => why.push(format!("{kind}: {error}")),
            }
        }
        Err(why.join("; "))
    }

    fn connect_by(
        &self,
        kind: TransportKind,
        connection: &Connection,
        (session, secret, keys): (u64, &Secret, &[RegionKey]),
        sink: &Arc<Memory>,
    ) -> Result<Box<dyn Peer>, String> {
        let key = keys.iter().find(|key| key.transport() == kind).ok_or("the other end does not offer it")?;
        if key.length() != self.length {
            return Err(format!("the region has {} bytes, and {} were expected", key.length(), self.length));
        }
        let peer = self.connector(kind, connection)?.connect(key, session, secret, Arc::clone(sink));
        peer.map_err(|error| error.to_string())
    }

    fn connector(&self, kind: TransportKind, connection: &Connection) -> Result<Box<dyn Connector>, String> {
        let Lane { depth, connect_limit, read_limit, .. } = *self;
        let host = link::socket_address(connection.peer());
        match kind {
            TransportKind::Shm => Ok(Box::new(ShmConnector::with_timeout(connect_limit))),
            TransportKind::Verbs => self.rdma.connector(Reading { host, depth, connect_limit, read_limit }),
            _ => {
                let options = TcpOptions {
                    depth,
                    connect_timeout: connect_limit,
                    handshake_timeout: connect_limit,
                    stall_timeout: read_limit,
                    ..TcpOptions::default()
                };
                let tcp = TcpConnector::new(options, host);
                tcp.map(|tcp| Box::new(tcp) as Box<dyn Connector>).map_err(|error| error.to_string())
            }
        }
    }
}
