//! What carries a lane: a socket, or TLS on it. The owner provides rustls's configurations; which ends need TLS is its
//! decision.
//!
//! TLS copies and encrypts every byte, so a plain lane keeps its own way of sending and receiving large pieces
//! ([`Stream::tls`] is `None` for it).
//!
//! The peer's certificate is not all that protects a lane: the proofs of its handshake depend on the TLS session
//! ([`bound_secret`]). An attacker in the middle who terminates TLS at both ends has two sessions, so the proofs are
//! invalid.

use std::{
    cell::RefCell,
    io::{self, Read, Write},
    net::TcpStream,
    os::fd::AsFd,
    sync::Arc,
    time::Instant,
};

use remora_wire::derive;
use rustix::net::SendFlags;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ProtocolVersion, ServerConfig, ServerConnection};

use crate::{Error, Secret};

/// A lane's connection. It follows the socket's time-outs, and its non-blocking mode.
pub(super) trait Stream: Send {
    /// The socket, for its options and to shut it down.
    fn socket(&self) -> &TcpStream;

    /// Receives bytes; 0 is the end. With TLS, `Interrupted` means that a part of a record has arrived.
    fn receive(&self, into: &mut [u8]) -> io::Result<usize>;

    /// Sends bytes from the front, and returns how many. With `more`, other bytes follow at once.
    fn send(&self, bytes: &[u8], more: bool) -> io::Result<usize>;

    /// TLS, if the lane has it.
    fn tls(&self) -> Option<&TlsStream> {
        None
    }
}

impl Stream for TcpStream {
    fn socket(&self) -> &TcpStream {
        self
    }

    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut stream = self;
        stream.read(into)
    }

    fn send(&self, bytes: &[u8], more: bool) -> io::Result<usize> {
        let flags = if more { SendFlags::MORE } else { SendFlags::empty() };
        Ok(rustix::net::send(self.as_fd(), bytes, flags | SendFlags::NOSIGNAL)?)
    }
}

impl Stream for Arc<TcpStream> {
    fn socket(&self) -> &TcpStream {
        self
    }

    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        Stream::receive(&**self, into)
    }

    fn send(&self, bytes: &[u8], more: bool) -> io::Result<usize> {
        Stream::send(&**self, bytes, more)
    }
}

/// TLS on a socket.
pub(super) struct TlsStream {
    socket: Arc<TcpStream>,
    session: RefCell<Session>,
}

struct Session {
    tls: Connection,
    /// Bytes of the socket that rustls has not taken yet: `begin..end`.
    encrypted: Box<[u8]>,
    begin: usize,
    end: usize,
}

impl TlsStream {
    /// The reader's end. Nothing is sent yet.
    pub(super) fn client(
        socket: TcpStream,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<TlsStream, Error> {
        let tls = ClientConnection::new(config, name).map_err(failed)?;
        Ok(TlsStream::new(Arc::new(socket), tls.into()))
    }

    /// The source's end.
    pub(super) fn server(socket: Arc<TcpStream>, config: Arc<ServerConfig>) -> Result<TlsStream, Error> {
        let tls = ServerConnection::new(config).map_err(failed)?;
        Ok(TlsStream::new(socket, tls.into()))
    }

    fn new(socket: Arc<TcpStream>, tls: Connection) -> TlsStream {
        let encrypted = vec![0; ENCRYPTED_BYTES].into();
        TlsStream { socket, session: RefCell::new(Session { tls, encrypted, begin: 0, end: 0 }) }
    }

    /// Receives decrypted bytes from what this end already holds. `WouldBlock`: it holds none.
    pub(super) fn receive_held(&self, into: &mut [u8]) -> io::Result<usize> {
        self.session.borrow_mut().take(into, &self.socket)
    }

    /// Whether encrypted bytes wait for room in the socket.
    pub(super) fn has_unsent(&self) -> bool {
        self.session.borrow().tls.wants_write()
    }

    /// Sends encrypted bytes that wait.
    pub(super) fn push(&self) -> io::Result<()> {
        self.session.borrow_mut().push(&self.socket)
    }

    /// The value that only the two ends of this TLS session share (RFC 9266).
    fn binding(&self) -> Result<[u8; 32], Error> {
        let session = self.session.borrow();
        if session.tls.protocol_version() != Some(ProtocolVersion::TLSv1_3) {
            return Err(Error::Protocol("it does not speak TLS 1.3"));
        }
        session.tls.export_keying_material([0; 32], b"EXPORTER-Channel-Binding", None).map_err(failed)
    }
}

impl Stream for TlsStream {
    fn socket(&self) -> &TcpStream {
        &self.socket
    }

    fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        let mut session = self.session.borrow_mut();
        match session.take(into, &self.socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            taken => return taken,
        }
        if session.fill(&self.socket)? == 0 {
            return Ok(0);
        }
        match session.take(into, &self.socket) {
            // The caller decides whether there is time for another wait on the socket.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::ErrorKind::Interrupted.into()),
            taken => taken,
        }
    }

    fn send(&self, bytes: &[u8], more: bool) -> io::Result<usize> {
        let mut session = self.session.borrow_mut();
        let mut taken = session.tls.writer().write(bytes)?;
        if taken == 0 {
            session.push(&self.socket)?;
            taken = session.tls.writer().write(bytes)?;
        }
        if !more || taken < bytes.len() {
            match session.push(&self.socket) {
                // The bytes that were taken are sent by a later call.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                pushed => pushed?,
            }
        }
        if taken == 0 && !bytes.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(taken) }
    }

    fn tls(&self) -> Option<&TlsStream> {
        Some(self)
    }
}

impl Session {
    /// Receives encrypted bytes from the socket, once. Only when all former ones have been decrypted.
    fn fill(&mut self, mut socket: &TcpStream) -> io::Result<usize> {
        (self.begin, self.end) = (0, 0);
        self.end = socket.read(&mut self.encrypted)?;
        Ok(self.end)
    }

    /// Takes decrypted bytes, and decrypts what is needed for that; `WouldBlock` if the bytes held are no whole record.
    fn take(&mut self, into: &mut [u8], socket: &TcpStream) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                taken => return taken,
            }
            let mut rest = self.encrypted.get(self.begin..self.end).unwrap_or_default();
            if rest.is_empty() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.begin += self.tls.read_tls(&mut rest)?;
            let processed = self.tls.process_new_packets();
            // Answers of TLS itself, an alert among them. The next call of `push` sends what the socket does not take.
            let pushed = self.push(socket);
            processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            match pushed {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                pushed => pushed?,
            }
        }
    }

    /// Sends encrypted bytes. `WouldBlock` if some are left when the socket takes no more, or took too long for them.
    fn push(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        let began = Instant::now();
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            // A blocking socket may take a few bytes at the end of each time-out.
            if self.tls.wants_write() && socket.write_timeout()?.is_some_and(|limit| began.elapsed() >= limit) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        Ok(())
    }
}

/// The secret that a lane's proofs use: with TLS, it depends on the TLS session too. Bytes must have been received.
pub(super) fn bound_secret(stream: &dyn Stream, secret: &Secret) -> Result<Secret, Error> {
    let Some(tls) = stream.tls() else { return Ok(*secret) };
    let binding = tls.binding()?;
    Ok(derive(secret, &[LABEL_CHANNEL, &binding[..]].concat()))
}

fn failed(error: rustls::Error) -> Error {
    Error::System { what: "TLS on a data lane", source: io::Error::other(error) }
}

/// Comes before the binding in the label of a lane's secret.
const LABEL_CHANNEL: &[u8] = b"tls-exporter\0";

/// Encrypted bytes received by one system call, per lane: as many as rustls decrypts to four of the longest records.
const ENCRYPTED_BYTES: usize = 64 << 10;
