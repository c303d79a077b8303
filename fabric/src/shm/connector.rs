//! The reader's end: makes connections. Reads are in `peer`.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    key::{self, BootId},
    peer::ShmPeer,
    wire::Shm,
};
use crate::{
    auth,
    error::Error,
    lane_handshake::{Hello, Reader},
    memory::{
        Memory, View,
        local::{self, Packet},
    },
    region::{RegionKey, Secret, TransportKind},
    transport::{Connector, Peer},
};

/// Connects to exporters of this host.
#[derive(Clone, Debug)]
pub struct ShmConnector {
    timeout: Duration,
}

impl ShmConnector {
    /// A connector with a time limit of five seconds for the whole handshake.
    pub fn new() -> ShmConnector {
        ShmConnector { timeout: DEFAULT_TIMEOUT }
    }

    /// A connector with another time limit for the whole handshake.
    pub fn with_timeout(timeout: Duration) -> ShmConnector {
        ShmConnector { timeout: timeout.min(super::LONGEST_TIMEOUT) }
    }
}

impl Default for ShmConnector {
    fn default() -> Self {
        ShmConnector::new()
    }
}

impl Connector for ShmConnector {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn connect(
        &self,
        key: &RegionKey,
        session: u64,
        secret: &Secret,
        sink: Arc<Memory>,
    ) -> Result<Box<dyn Peer>, Error> {
        let address = key::address(key, &BootId::of_this_host()?)?;
        let deadline = Instant::now() + self.timeout;
        let socket = local::connect(&address, deadline)?;
        let mut packet = Handshake { socket: &socket, secret, deadline, timeout: self.timeout }.run(key, session)?;
        let memory = packet.take_descriptor().ok_or(Error::Protocol("the welcome has no memory attached"))?;
        let view = View::open(memory, key.length())?;
        Ok(Box::new(ShmPeer::new(socket, Arc::new(view), sink)?))
    }
}

/// One handshake, at the reader's end.
struct Handshake<'a> {
    socket: &'a OwnedFd,
    secret: &'a Secret,
    deadline: Instant,
    timeout: Duration,
}

impl Handshake<'_> {
    /// Returns the packet of the welcome, proved to come from the source, to which the memory is attached.
    fn run(&self, key: &RegionKey, session: u64) -> Result<Packet, Error> {
        let (reader, hello) = Reader::<Shm>::hello(&Hello { lane: 0, session, id: key.id(), nonce: auth::nonce()? });
        // A source that is too busy may have hung up already. Its answer can still be received.
        let _ = local::send(self.socket, &hello, None);
        let (reader, proof) = reader.prove(self.receive()?.bytes(), self.secret)?;
        local::send(self.socket, &proof, None).map_err(Error::system("answering the source's challenge"))?;
        let packet = self.receive()?;
        if reader.finish(packet.bytes())? != key.length() {
            return Err(Error::Protocol("the length of the region differs from its key"));
        }
        Ok(packet)
    }

    fn receive(&self) -> Result<Packet, Error> {
        Ok(local::receive_by(self.socket, self.deadline, self.timeout)?)
    }
}

/// Time limit of the whole handshake, which takes microseconds; more on a machine that lacks processor time.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
