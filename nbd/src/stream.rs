//! Stream: a connected socket, with TLS or without. One thread receives. Another one may send meanwhile.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};
use rustls::{ServerConfig, ServerConnection};

/// A connection's bytes.
pub(crate) struct Stream {
    socket: Arc<OwnedFd>,
    tls: Option<Tls>,
}

/// Received bytes are decrypted and sent ones encrypted under a lock. The lock is not held while the socket waits.
struct Tls {
    connection: Mutex<ServerConnection>,
    arrived: Mutex<Arrived>,
}

/// Encrypted bytes that have arrived: `bytes[start..end]`. Only the receiving thread locks it.
struct Arrived {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Stream {
    /// The bytes of a socket as they are.
    pub(crate) fn plain(socket: Arc<OwnedFd>) -> Stream {
        Stream { socket, tls: None }
    }

    /// Starts TLS on a socket, at whose other end a client does the same.
    pub(crate) fn encrypted(socket: Arc<OwnedFd>, config: Arc<ServerConfig>, until: Instant) -> io::Result<Stream> {
        let mut connection = ServerConnection::new(config).map_err(io::Error::other)?;
        while connection.is_handshaking() {
            limit_receive(&socket, until)?;
            if connection.wants_write() {
                connection.write_tls(&mut Socket(&socket))?;
            } else if connection.read_tls(&mut Socket(&socket))? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            } else if let Err(error) = connection.process_new_packets() {
                let _ = connection.write_tls(&mut Socket(&socket)); // the alert says why; the error is reported here
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
        // What is sent is bounded by its sender.
        connection.set_buffer_limit(None);
        let arrived = Arrived { bytes: vec![0; ARRIVED_BYTES].into(), start: 0, end: 0 };
        let tls = Tls { connection: Mutex::new(connection), arrived: Mutex::new(arrived) };
        let stream = Stream { socket, tls: Some(tls) };
        stream.send(&[])?; // the rest of the handshake: tickets
        Ok(stream)
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// From now on, waiting for bytes ends at this time; `None`: it does not end.
    pub(crate) fn receive_until(&self, until: Option<Instant>) -> io::Result<()> {
        match until {
            Some(until) => limit_receive(&self.socket, until),
            None => Ok(set_socket_timeout(&*self.socket, Timeout::Recv, None)?),
        }
    }

    /// Receives some bytes, and waits for the first one. 0: the peer has closed the connection.
    pub(crate) fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            None => receive(&self.socket, into, RecvFlags::empty()),
            Some(tls) => tls.receive(&self.socket, into),
        }
    }

    /// Receives what has arrived: `None` if that is nothing. Only of a plain stream.
    pub(crate) fn receive_now(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        match receive(&self.socket, into, RecvFlags::DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            other => other.map(Some),
        }
    }

    /// As [`Stream::receive`], behind what is there, and no more than the vector's capacity. Nothing is written twice.
    pub(crate) fn receive_behind(&self, into: &mut Vec<u8>) -> io::Result<usize> {
        if let Some(tls) = &self.tls {
            let (filled, most) = (into.len(), into.capacity().min(into.len() + ARRIVED_BYTES));
            into.resize(most, 0);
            let received = tls.receive(&self.socket, &mut into[filled..]);
            into.truncate(filled + received.as_ref().copied().unwrap_or(0));
            return received;
        }
        loop {
            match rustix::net::recv(&*self.socket, rustix::buffer::spare_capacity(into), RecvFlags::empty()) {
                Err(Errno::INTR) => {}
                other => return Ok(other?.1),
            }
        }
    }

    /// Sends all of it.
    pub(crate) fn send(&self, pieces: &[&[u8]]) -> io::Result<()> {
        let Some(tls) = &self.tls else { return send_all(&self.socket, pieces) };
        let mut sealed = Vec::new();
        for part in pieces.iter().flat_map(|piece| piece.chunks(SEALED_BYTES)) {
            tls.seal(part, &mut sealed)?;
            if sealed.len() >= SEALED_BYTES {
                send_all(&self.socket, &[&sealed])?;
                sealed.clear();
            }
        }
        tls.seal(&[], &mut sealed)?;
        send_all(&self.socket, &[&sealed])
    }

    /// Sends what the socket takes at once, and returns how many bytes that was. Only of a plain stream.
    pub(crate) fn send_now(&self, pieces: &[&[u8]]) -> io::Result<usize> {
        match send_some(&self.socket, pieces, SendFlags::DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            other => other,
        }
    }

    /// Ends both directions: every call that waits returns.
    pub(crate) fn shut_down(&self) {
        shut_down(&self.socket);
    }
}

/// Ends both directions of a connection.
pub(crate) fn shut_down(socket: &OwnedFd) {
    let _ = rustix::net::shutdown(socket, Shutdown::Both); // the peer may have done so
}

/// Limits each wait for the peer to take bytes.
pub(crate) fn limit_send(socket: &OwnedFd, limit: Duration) -> io::Result<()> {
    Ok(set_socket_timeout(socket, Timeout::Send, Some(limit))?)
}

fn limit_receive(socket: &OwnedFd, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(set_socket_timeout(socket, Timeout::Recv, Some(left.max(SHORTEST_WAIT)))?)
}

impl Tls {
    fn receive(&self, socket: &OwnedFd, into: &mut [u8]) -> io::Result<usize> {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let filled = self.open(&mut arrived, into)?;
            if let Some(filled) = filled {
                return Ok(filled);
            }
            arrived.start = 0;
            arrived.end = receive(socket, &mut arrived.bytes, RecvFlags::empty())?;
            if arrived.end == 0 {
                return Ok(0); // without a close_notify: what was sent is complete, since requests say their lengths
            }
        }
    }

    /// Decrypts what has arrived. `None`: more must arrive.
    fn open(&self, arrived: &mut Arrived, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut connection = self.connection();
        let mut filled = 0;
        loop {
            match connection.reader().read(&mut into[filled..]) {
                Ok(0) => return Ok(Some(filled)), // it is full, or the peer has closed the connection
                Ok(count) => filled += count,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                Err(_) if arrived.start == arrived.end => return Ok(if filled > 0 { Some(filled) } else { None }),
                Err(_) => {
                    arrived.start += connection.read_tls(&mut &arrived.bytes[arrived.start..arrived.end])?;
                    let opened = connection.process_new_packets();
                    opened.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                }
            }
        }
    }

    /// Encrypts, and appends what must be sent.
    fn seal(&self, plain: &[u8], sealed: &mut Vec<u8>) -> io::Result<()> {
        let mut connection = self.connection();
        connection.writer().write_all(plain)?;
        while connection.wants_write() {
            connection.write_tls(sealed)?;
        }
        Ok(())
    }

    fn connection(&self) -> MutexGuard<'_, ServerConnection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A socket as std's traits.
struct Socket<'a>(&'a OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        receive(self.0, into, RecvFlags::empty())
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        send_some(self.0, &[bytes], SendFlags::empty())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn receive(socket: &OwnedFd, into: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
    loop {
        match rustix::net::recv(socket, &mut *into, flags) {
            Err(Errno::INTR) => {}
            other => return Ok(other?.1),
        }
    }
}

fn send_some(socket: &OwnedFd, pieces: &[&[u8]], flags: SendFlags) -> io::Result<usize> {
    let flags = flags | SendFlags::NOSIGNAL;
    loop {
        let sent = match pieces {
            [piece] => rustix::net::send(socket, piece, flags),
            _ => {
                let slices: Vec<IoSlice<'_>> =
                    pieces.iter().take(MOST_SLICES).map(|piece| IoSlice::new(piece)).collect();
                rustix::net::sendmsg(socket, &slices, &mut SendAncillaryBuffer::default(), flags)
            }
        };
        match sent {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if !flags.contains(SendFlags::DONTWAIT) => return Err(io::ErrorKind::TimedOut.into()),
            other => return Ok(other?),
        }
    }
}

fn send_all(socket: &OwnedFd, pieces: &[&[u8]]) -> io::Result<()> {
    let mut rest: Vec<&[u8]> = pieces.iter().copied().filter(|piece| !piece.is_empty()).collect();
    let mut rest = &mut rest[..];
    while !rest.is_empty() {
        let mut sent = send_some(socket, rest, SendFlags::empty())?;
        let whole = rest.iter().take_while(|piece| take(&mut sent, piece.len())).count();
        rest = &mut rest[whole..];
        if let Some(first) = rest.first_mut() {
            *first = &first[sent..];
        }
    }
    Ok(())
}

/// Whether this number of bytes is a part of `sent`, which is then less by them.
fn take(sent: &mut usize, bytes: usize) -> bool {
    let is_whole = *sent >= bytes;
    *sent -= if is_whole { bytes } else { 0 };
    is_whole
}

/// Encrypted bytes of one call of the system: four records.
const ARRIVED_BYTES: usize = 64 << 10;

/// Encrypted bytes that are sent at once.
const SEALED_BYTES: usize = 256 << 10;

/// Pieces of one call of the system, which takes 1024.
const MOST_SLICES: usize = 512;

/// The system takes a time-out of zero for none.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

// The TLS configuration of a server.

/// What says how each connection is encrypted. The owner is asked for every connection, so it may replace its
/// certificates; connections that are open go on.
#[derive(Clone)]
pub struct TlsConfig(Arc<dyn Fn() -> Arc<ServerConfig> + Send + Sync>);

impl TlsConfig {
    /// `config` is called for each connection, by its thread.
    pub fn new(config: impl Fn() -> Arc<ServerConfig> + Send + Sync + 'static) -> TlsConfig {
        TlsConfig(Arc::new(config))
    }

    /// For a connection that begins now.
    pub(crate) fn current(&self) -> Arc<ServerConfig> {
        (self.0)()
    }
}

impl From<Arc<ServerConfig>> for TlsConfig {
    /// The same for every connection.
    fn from(config: Arc<ServerConfig>) -> TlsConfig {
        TlsConfig::new(move || Arc::clone(&config))
    }
}

impl fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsConfig").finish_non_exhaustive()
    }
}
