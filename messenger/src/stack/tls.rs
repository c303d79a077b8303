//! TLS 1.3 over TCP: the secure mode. It encrypts, which seals do not, and peers may authenticate by certificates. The
//! layer's handshake runs inside; where TLS authenticates both ends, seals may be left out
//! ([`crate::Options::sealed`]). The proofs of the handshake are bound to the TLS session ([`Link::channel_binding`]),
//! so ends that share a token need no certificates that the other end can check.
//!
//! A worker must know two things that a socket does not have:
//!
//! - The link may hold back encrypted bytes, because the socket took no more: [`Link::has_unsent`].
//! - Decrypted bytes could stay in the link, where epoll does not see them. So no more is decrypted than the receiver
//!   has room for at once (`ONE_READ_BYTES`), and nothing stays.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ProtocolVersion, ServerConfig, ServerConnection};

use super::{Address, Link, Listener, TcpLink, TcpListener};
use crate::handshake::BINDING_BYTES;

/// Settings of `tls:` addresses. The owner chooses certificates, authorities and versions in rustls's own
/// configurations.
#[derive(Debug, Clone, Default)]
pub struct TlsOptions {
    /// For connecting.
    pub client: Option<TlsConfig<ClientConfig>>,
    /// The name that the server's certificate must be for; `None`: the address that is connected to.
    pub server_name: Option<String>,
    /// For listening.
    pub server: Option<TlsConfig<ServerConfig>>,
}

/// A configuration of rustls. The owner is asked for every connection, so it may replace its certificates; connections
/// that are open go on.
pub struct TlsConfig<C>(Arc<dyn Fn() -> Arc<C> + Send + Sync>);

impl<C> TlsConfig<C> {
    /// `config` is called for each connection, by a thread of the messenger. It must not wait.
    pub fn new(config: impl Fn() -> Arc<C> + Send + Sync + 'static) -> TlsConfig<C> {
        TlsConfig(Arc::new(config))
    }

    /// For a connection that begins now.
    pub fn current(&self) -> Arc<C> {
        (self.0)()
    }
}

impl<C: Send + Sync + 'static> From<Arc<C>> for TlsConfig<C> {
    /// The same for every connection.
    fn from(config: Arc<C>) -> TlsConfig<C> {
        TlsConfig::new(move || Arc::clone(&config))
    }
}

impl<C> Clone for TlsConfig<C> {
    fn clone(&self) -> TlsConfig<C> {
        TlsConfig(Arc::clone(&self.0))
    }
}

impl<C> fmt::Debug for TlsConfig<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsConfig").finish_non_exhaustive()
    }
}

/// A TCP connection with TLS.
pub struct TlsLink {
    tcp: TcpLink,
    tls: Connection,
    /// The peer has closed the connection, with or without a close_notify.
    ended: bool,
    /// An error that came after received bytes; returned by the next call.
    broke: Option<io::Error>,
}

impl TlsLink {
    pub(super) fn call(options: &TlsOptions, peer: SocketAddr) -> io::Result<TlsLink> {
        let config = options.client.as_ref().ok_or_else(|| missing("connect", "client"))?.current();
        let name = match &options.server_name {
            Some(name) => ServerName::try_from(name.clone()).map_err(io::Error::other)?,
            None => ServerName::IpAddress(peer.ip().into()),
        };
        let tls = ClientConnection::new(config, name).map_err(io::Error::other)?;
        Ok(TlsLink { tcp: TcpLink::call(peer)?, tls: tls.into(), ended: false, broke: None })
    }

    pub(crate) fn accept(tcp: TcpLink, config: &Arc<ServerConfig>) -> io::Result<TlsLink> {
        let tls = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
        Ok(TlsLink { tcp, tls: tls.into(), ended: false, broke: None })
    }

    /// Sends encrypted bytes, as far as the socket takes them.
    fn push(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket(&mut self.tcp)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Encrypts and sends bytes from the front of `piece`, for as long as the socket takes them. Returns how many.
    fn encrypt(&mut self, piece: &[u8]) -> io::Result<usize> {
        let mut taken = 0;
        while taken < piece.len() && !self.has_unsent() {
            let count = self.tls.writer().write(&piece[taken..])?;
            taken += count;
            self.push()?;
            if count == 0 {
                break; // the buffer of encrypted bytes is full
            }
        }
        Ok(taken)
    }

    /// Receives and decrypts one read's worth. Returns whether there was anything.
    fn pull(&mut self) -> io::Result<bool> {
        if self.ended || !self.tls.wants_read() {
            return Ok(false);
        }
        match self.tls.read_tls(&mut Socket(&mut self.tcp)) {
            Ok(0) => self.ended = true,
            Ok(_) => {
                if let Err(error) = self.tls.process_new_packets() {
                    let _ = self.push(); // the alert, if it can be sent at once
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Takes decrypted bytes, if there are any.
    fn take(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.tls.reader().read(into) {
            Ok(0) => {
                self.ended = true;
                Ok(0)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            // Cut off without a close_notify: the frames inside show whether bytes are missing.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            taken => taken,
        }
    }

    /// Fills the buffers as far as there are bytes, and counts them.
    fn fill(&mut self, into: &mut [IoSliceMut<'_>], received: &mut usize) -> io::Result<()> {
        let mut left: usize = into.iter().map(|piece| piece.len()).sum();
        let mut pieces = into.iter_mut();
        let (mut piece, mut at) = (pieces.next(), 0);
        while let Some(current) = &mut piece {
            if at == current.len() {
                (piece, at) = (pieces.next(), 0);
                continue;
            }
            let count = self.take(&mut current[at..])?;
            (at, *received, left) = (at + count, *received + count, left - count);
            let may_pull = *received == 0 || left >= ONE_READ_BYTES;
            if count == 0 && !(may_pull && self.pull()?) {
                break;
            }
        }
        Ok(())
    }
}

impl Link for TlsLink {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.tcp.descriptor()
    }

    fn finish_call(&mut self) -> io::Result<()> {
        self.tcp.finish_call()
    }

    fn send(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        self.push()?;
        let mut sent = 0;
        for piece in bytes {
            let count = self.encrypt(piece)?;
            sent += count;
            if count < piece.len() {
                break;
            }
        }
        let nothing = sent == 0 && bytes.iter().any(|piece| !piece.is_empty());
        if nothing { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if let Some(error) = self.broke.take() {
            return Err(error);
        }
        let mut received = 0;
        // Answers of TLS itself go out at once.
        match self.fill(into, &mut received).and_then(|()| self.push()) {
            // The bytes before the error belong to the caller.
            Err(error) if received > 0 => self.broke = Some(error),
            filled => filled?,
        }
        if received == 0 && !self.ended { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(received) }
    }

    fn peer(&self) -> Address {
        match self.tcp.peer() {
            Address::Tcp(peer) => Address::Tls(peer),
            other => other,
        }
    }

    fn channel_binding(&self) -> io::Result<Option<[u8; BINDING_BYTES]>> {
        if self.tls.protocol_version() != Some(ProtocolVersion::TLSv1_3) {
            // Without the extended master secret, two sessions of TLS 1.2 can be made to share this value.
            let text = "the peer speaks TLS 1.2: a link needs TLS 1.3, which binds the proofs to it";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let exported = self.tls.export_keying_material([0; BINDING_BYTES], BINDING_LABEL, None);
        exported.map(Some).map_err(io::Error::other)
    }

    fn peer_certificate(&self) -> Option<&[u8]> {
        self.tls.peer_certificates()?.first().map(AsRef::as_ref)
    }

    fn local(&self) -> Option<SocketAddr> {
        self.tcp.local()
    }

    fn has_unsent(&self) -> bool {
        self.tls.wants_write()
    }
}

impl Drop for TlsLink {
    /// Sends a close_notify, if it can be sent at once. A stranger who has not finished the TLS handshake gets nothing.
    fn drop(&mut self) {
        if !self.tls.is_handshaking() {
            self.tls.send_close_notify();
            let _ = self.push();
        }
    }
}

/// A listening TCP socket for TLS.
pub struct TlsListener {
    tcp: TcpListener,
    config: TlsConfig<ServerConfig>,
}

impl TlsListener {
    pub(super) fn bind(options: &TlsOptions, address: SocketAddr) -> io::Result<TlsListener> {
        let config = options.server.clone().ok_or_else(|| missing("listen", "server"))?;
        Ok(TlsListener { tcp: TcpListener::bind(address)?, config })
    }
}

impl Listener for TlsListener {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.tcp.descriptor()
    }

    fn accept(&mut self) -> io::Result<Box<dyn Link>> {
        Ok(Box::new(TlsLink::accept(self.tcp.take()?, &self.config.current())?))
    }

    fn address(&self) -> Address {
        match self.tcp.address() {
            Address::Tcp(address) => Address::Tls(address),
            other => other,
        }
    }
}

/// The socket, as rustls wants it.
struct Socket<'a>(&'a mut TcpLink);

impl Read for Socket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.receive(&mut [IoSliceMut::new(into)])
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.send(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn missing(what: &str, which: &str) -> io::Error {
    let text = format!("no TLS configuration to {what} with: set Options::tls.{which}");
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// The exporter's label, by RFC 9266. That RFC passes an empty context, which is the same as none in TLS 1.3.
const BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";

/// More than one read of the socket can decrypt to: the rest of a record, and what rustls reads at once; two of the
/// longest records.
const ONE_READ_BYTES: usize = 2 * 16_384;
