//! Makes connections: connects the lanes and shakes hands on each. Reads are in `peer`.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use super::{TcpOptions, TcpPeer, handshake::HelloSent, key, lane::Lane, socket, socket::Deadline};
use crate::{Connector, Error, Memory, Peer, RegionKey, Secret, TransportKind, auth, lane_handshake::Hello};

/// Connects to sources over TCP.
pub struct TcpConnector {
    options: TcpOptions,
    fallback_host: Option<SocketAddr>,
    check: Box<Check>,
}

/// Refuses addresses that lanes may not be connected to.
type Check = dyn Fn(SocketAddr) -> Result<(), Error> + Send + Sync;

impl TcpConnector {
    /// A connector. `fallback_host` is the address by which the messenger reached the source; it replaces the host in
    /// keys that name none. Its port is not used.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options out of range.
    pub fn new(options: TcpOptions, fallback_host: Option<SocketAddr>) -> Result<TcpConnector, Error> {
        options.check()?;
        Ok(TcpConnector { options, fallback_host, check: Box::new(|_| Ok(())) })
    }

    /// Connects to addresses only that `check` does not refuse. The address comes from the region's key, so it can be
    /// another one than that of the conversation. An error is that of [`Connector::connect`].
    #[must_use]
    pub fn with_check(self, check: impl Fn(SocketAddr) -> Result<(), Error> + Send + Sync + 'static) -> TcpConnector {
        TcpConnector { check: Box::new(check), ..self }
    }

    /// As [`Connector::connect`], but returns the [`TcpPeer`] itself.
    ///
    /// # Errors
    /// Those of [`Connector::connect`].
    pub fn open(&self, key: &RegionKey, session: u64, secret: &Secret, sink: Arc<Memory>) -> Result<TcpPeer, Error> {
        let address = key::address(key, self.fallback_host)?;
        (self.check)(address)?;
        let streams = self.dial(address)?;
        self.shake_hands(&streams, key, session, secret)?;
        let lanes = streams.into_iter().map(Lane::new).collect::<io::Result<_>>();
        let lanes = lanes.map_err(Error::system("making a lane non-blocking"))?;
        TcpPeer::new(key.id(), sink, lanes, &self.options)
    }

    fn dial(&self, address: SocketAddr) -> Result<Vec<TcpStream>, Error> {
        let deadline = Deadline::after(self.options.connect_timeout);
        let mut streams = Vec::new();
        for _ in 0..self.options.lanes {
            let stream =
                TcpStream::connect_timeout(&address, deadline.left()?).map_err(|source| match source.kind() {
                    io::ErrorKind::TimedOut => {
                        Error::TimedOut { what: "the source's data port", after: self.options.connect_timeout }
                    }
                    _ => Error::Unreachable { what: format!("the source's data port at {address}"), source },
                })?;
            socket::prepare(&stream, &self.options)?;
            streams.push(stream);
        }
        Ok(streams)
    }

    /// Each step is done on all lanes before the next step, so that the round trips overlap.
    fn shake_hands(&self, streams: &[TcpStream], key: &RegionKey, session: u64, secret: &Secret) -> Result<(), Error> {
        let deadline = Deadline::after(self.options.handshake_timeout);
        let hello = |(lane, stream)| {
            HelloSent::hello(stream, deadline, &Hello { lane, session, id: key.id(), nonce: auth::nonce()? })
        };
        let greeted: Vec<_> = (0u8..).zip(streams).map(hello).collect::<Result<_, Error>>()?;
        let answered: Vec<_> = greeted.into_iter().map(|lane| lane.prove(secret)).collect::<Result<_, _>>()?;
        for lane in answered {
            if lane.finish()? != key.length() {
                return Err(Error::Protocol("the length of the region differs from its key"));
            }
        }
        Ok(())
    }
}

impl Connector for TcpConnector {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn connect(
        &self,
        key: &RegionKey,
        session: u64,
        secret: &Secret,
        sink: Arc<Memory>,
    ) -> Result<Box<dyn Peer>, Error> {
        Ok(Box::new(self.open(key, session, secret, sink)?))
    }
}
