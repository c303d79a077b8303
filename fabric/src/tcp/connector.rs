//! Makes connections: connects the lanes and shakes hands on each. Reads are in `peer`.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use rustls::{ClientConfig, pki_types::ServerName};

use super::{
    TcpOptions, TcpPeer, handshake::HelloSent, key, lane::Lane, socket, socket::Deadline, stream::Stream,
    stream::TlsStream,
};
use crate::{Connector, Error, Memory, Peer, RegionKey, Secret, TransportKind, auth, lane_handshake::Hello};

/// Connects to sources over TCP.
pub struct TcpConnector {
    options: TcpOptions,
    fallback_host: Option<SocketAddr>,
    tls: Option<Arc<ClientConfig>>,
    server_name: Option<ServerName<'static>>,
}

impl TcpConnector {
    /// A connector. `fallback_host` is the address by which the messenger reached the source; it replaces the host in
    /// keys that name none. Its port is not used.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options out of range.
    pub fn new(options: TcpOptions, fallback_host: Option<SocketAddr>) -> Result<TcpConnector, Error> {
        options.check()?;
        Ok(TcpConnector { options, fallback_host, tls: None, server_name: None })
    }

    /// Uses TLS 1.3 on every lane. The source's certificate must be for `name`, or without one for the address that is
    /// connected to, if the configuration checks names. The proofs of a lane depend on its TLS session, so a
    /// configuration need not check certificates.
    #[must_use]
    pub fn with_tls(self, config: Arc<ClientConfig>, name: Option<ServerName<'static>>) -> TcpConnector {
        TcpConnector { tls: Some(config), server_name: name, ..self }
    }

    /// As [`Connector::connect`], but returns the [`TcpPeer`] itself.
    ///
    /// # Errors
    /// Those of [`Connector::connect`].
    pub fn open(&self, key: &RegionKey, session: u64, secret: &Secret, sink: Arc<Memory>) -> Result<TcpPeer, Error> {
        let address = key::address(key, self.fallback_host)?;
        let streams = self.dial(address)?;
        self.shake_hands(&streams, key, session, secret)?;
        let lanes = streams.into_iter().map(Lane::new).collect::<io::Result<_>>();
        let lanes = lanes.map_err(Error::system("making a lane non-blocking"))?;
        TcpPeer::new(key.id(), sink, lanes, &self.options)
    }

    fn dial(&self, address: SocketAddr) -> Result<Vec<Box<dyn Stream>>, Error> {
        let deadline = Deadline::after(self.options.connect_timeout);
        let mut streams: Vec<Box<dyn Stream>> = Vec::new();
        for _ in 0..self.options.lanes {
            let stream =
                TcpStream::connect_timeout(&address, deadline.left()?).map_err(|source| match source.kind() {
                    io::ErrorKind::TimedOut => {
                        Error::TimedOut { what: "the source's data port", after: self.options.connect_timeout }
                    }
                    _ => Error::Unreachable { what: format!("the source's data port at {address}"), source },
                })?;
            socket::prepare(&stream, &self.options)?;
            streams.push(match &self.tls {
                None => Box::new(stream),
                Some(config) => {
                    let name = self.server_name.clone().unwrap_or(ServerName::IpAddress(address.ip().into()));
                    Box::new(TlsStream::client(stream, config.clone(), name)?)
                }
            });
        }
        Ok(streams)
    }

    /// Each step is done on all lanes before the next step, so that the round trips overlap.
    fn shake_hands(
        &self,
        streams: &[Box<dyn Stream>],
        key: &RegionKey,
        session: u64,
        secret: &Secret,
    ) -> Result<(), Error> {
        let deadline = Deadline::after(self.options.handshake_timeout);
        let mut greeted = Vec::new();
        for (lane, stream) in (0u8..).zip(streams) {
            let hello = Hello { lane, session, id: key.id(), nonce: auth::nonce()? };
            greeted.push(HelloSent::hello(&**stream, deadline, &hello)?);
        }
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
