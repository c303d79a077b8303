//! Link: one connection from the replica's server to the agent, which acts as its primary. Never blocks; plain or TLS.
//!
//! It moves bytes. The [delivery](crate) gives them their meaning.

pub mod candidates;

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponseHeader, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr as Port};
use remora_fabric::View;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use remora_base::x509;
use remora_process::exit::Failure;

/// One connection from the replica's server, plain or TLS.
pub struct Link {
    socket: TcpStream,
    tls: Option<Box<ServerConnection>>,
    /// One piece of plain text on its way into TLS.
    piece: Vec<u8>,
    /// Bytes given to the socket since it was accepted.
    written: u64,
    /// How many of them the server has not read, if the kernel can tell.
    unread: Option<Unread>,
    /// What ends the connection with this link although another descriptor of it exists.
    _served: Option<Served>,
}

/// The service of a connection that the gate looks at too. Its end ends the connection towards the server, which the
/// end of one descriptor does not do while the gate has another one.
#[must_use = "the connection ends with it"]
pub struct Served(Arc<TcpStream>);

impl Served {
    /// Of this connection.
    pub fn new(connection: Arc<TcpStream>) -> Served {
        Served(connection)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // What was written before still arrives. An error means that the connection has ended already.
        let _ = self.0.shutdown(Shutdown::Write);
    }
}

/// Plain text that is given to TLS at once: a few records of 16 KiB. More would only wait in its buffer.
const TLS_PIECE: usize = 64 * 1024;

impl Link {
    /// Of a connection that was accepted.
    pub fn new(socket: TcpStream, peer: SocketAddr, tls: Option<&Arc<ServerConfig>>) -> io::Result<Link> {
        let tls = tls.map(|config| ServerConnection::new(config.clone()).map(Box::new));
        Link::of(socket, peer, tls.transpose().map_err(io::Error::other)?)
    }

    /// Of a connection with what TLS knows of it, if it has any.
    fn of(socket: TcpStream, peer: SocketAddr, mut tls: Option<Box<ServerConnection>>) -> io::Result<Link> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        if peer.ip().is_loopback() {
            without_pacing(&socket);
        }
        if let Some(tls) = &mut tls {
            tls.set_buffer_limit(Some(2 * TLS_PIECE));
        }
        Ok(Link { socket, tls, piece: Vec::new(), written: 0, unread: None, _served: None })
    }

    /// Of a connection that the gate of an attending agent looks at too.
    pub fn intercepted(
        socket: TcpStream,
        peer: SocketAddr,
        tls: Option<Box<ServerConnection>>,
        served: Served,
    ) -> io::Result<Link> {
        Ok(Link { _served: Some(served), ..Link::of(socket, peer, tls)? })
    }

    /// Watches from now on what the server has not read, if the kernel can tell. Memory can be lent to the link then.
    pub fn look_at_what_is_unread(&mut self) {
        if self.tls.is_none() {
            self.unread = Unread::of(&self.socket).ok();
        }
    }

    /// Reads what is there: `None` if nothing is yet, 0 at the end of the stream.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(tls) = &mut self.tls else { return not_yet(self.socket.read(buffer)) };
        match tls.read_tls(&mut self.socket) {
            Ok(0) => return Ok(Some(0)),
            Ok(_) => {
                tls.process_new_packets().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            }
            Err(error) if is_not_yet(&error) => {}
            Err(error) => return Err(error),
        }
        not_yet(tls.reader().read(buffer))
    }

    /// Writes some of `bytes`: `None` if there is no room.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        let Some(tls) = &mut self.tls else {
            let wrote = self.socket.write(bytes);
            return self.count(wrote);
        };
        let taken = tls.writer().write(&bytes[..bytes.len().min(TLS_PIECE)])?;
        self.flush()?;
        Ok((taken > 0).then_some(taken))
    }

    /// Writes what waits in `out` behind `written`, and empties it at the end. `false`: some still waits.
    pub fn write_out(&mut self, out: &mut Vec<u8>, written: &mut usize) -> io::Result<bool> {
        while *written < out.len() {
            match self.write(&out[*written..])? {
                Some(n) => *written += n,
                None => return Ok(false),
            }
        }
        out.clear();
        *written = 0;
        self.flush()?;
        Ok(!self.wants_write())
    }

    /// Writes some of `length` bytes directly from a table's memory.
    pub fn write_view(&mut self, view: &View, offset: u64, length: usize) -> io::Result<Option<usize>> {
        if self.tls.is_none() {
            let wrote = view.send(&self.socket, offset, length);
            return self.count(wrote);
        }
        self.piece.resize(length.min(TLS_PIECE), 0);
        view.read(offset, &mut self.piece).map_err(io::Error::other)?;
        self.write_piece()
    }

    /// Whether memory can be lent to this link: it is plain, and the kernel tells what the server has read.
    pub fn borrows(&self) -> bool {
        self.unread.is_some()
    }

    /// Lends some of `length` bytes of a table's memory: no byte is copied before the server reads it. The bytes must
    /// not change until [`taken`](Self::taken) has passed the value of [`written`](Self::written) after this call.
    pub fn lend_view(&mut self, view: &View, offset: u64, length: usize) -> io::Result<Option<usize>> {
        let lent = view.send_file(&self.socket, offset, length);
        self.count(lent)
    }

    /// Bytes that went into the socket since the link was accepted.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// How many of them are certainly not read from our memory any more: the server has read them, or they were copied.
    pub fn taken(&mut self) -> io::Result<u64> {
        match &mut self.unread {
            Some(unread) => Ok(self.written.saturating_sub(unread.bytes()?)),
            None => Ok(self.written),
        }
    }

    /// Bytes that the socket holds and the server has not read; `None` if the kernel cannot tell.
    pub fn held(&mut self) -> Option<u64> {
        self.unread.as_mut()?.bytes().ok()
    }

    fn count(&mut self, wrote: io::Result<usize>) -> io::Result<Option<usize>> {
        let wrote = not_yet(wrote)?;
        self.written += wrote.unwrap_or(0) as u64;
        Ok(wrote)
    }

    /// Writes some of `length` bytes of a file.
    pub fn write_file(&mut self, file: &File, offset: u64, length: usize) -> io::Result<Option<usize>> {
        if self.tls.is_none() {
            let mut at = offset;
            let wrote = rustix::fs::sendfile(&self.socket, file, Some(&mut at), length);
            return self.count(wrote.map_err(io::Error::from));
        }
        self.piece.resize(length.min(TLS_PIECE), 0);
        rustix::io::pread(file, &mut self.piece[..], offset)?;
        self.write_piece()
    }

    fn write_piece(&mut self) -> io::Result<Option<usize>> {
        let piece = std::mem::take(&mut self.piece);
        let taken = self.write(&piece);
        self.piece = piece;
        taken
    }

    /// Sends what TLS still holds.
    pub fn flush(&mut self) -> io::Result<()> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        while tls.wants_write() {
            match tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if is_not_yet(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether TLS still holds bytes that only a flush sends.
    pub fn wants_write(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// The socket, for poll(2).
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Selects a congestion control without pacing for a server on this host. There is no network in between, and pacing
/// (bbr, the default of some systems) costs timers and a part of the throughput.
fn without_pacing(socket: &TcpStream) {
    let taken = UNPACED.iter().any(|name| rustix::net::sockopt::set_tcp_congestion(socket, name).is_ok());
    if !taken {
        tracing::debug!("the link keeps the system's congestion control");
    }
}

/// Congestion controls that do not pace; at least one of them is in every kernel and open to every user.
const UNPACED: [&str; 2] = ["cubic", "reno"];

fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn not_yet(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(error) if is_not_yet(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

// Unread: how many of the bytes that were given to a connection its other end has not read yet.
//
// The receiver reads bytes that were lent to a socket (`sendfile`) in its own time, and the lender must know when. A
// TCP acknowledgement does not tell: it means "queued at the receiver". On a connection within this host both queues
// are here, and the kernel reports their lengths (sock_diag(7), which `ss` uses).
//
// ```text
//   written ──▶ [ our send queue: not acknowledged ] ──▶ [ their receive queue: not read ] ──▶ read
// ```
//
// The send queue is asked for first. A byte that leaves it between the two questions is then counted in the receive
// queue or has been read: the answer can be too high, never too low.

/// A query for the bytes of a connection that its other end has not read.
pub struct Unread {
    system: Socket,
    ours: Vec<u8>,
    theirs: Vec<u8>,
}

/// Any socket with these addresses, whatever its number: INET_DIAG_NOCOOKIE.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// An answer about one socket: 72 bytes and a few attributes.
const ANSWER_BYTES: usize = 4096;

impl Unread {
    /// Of this connection; both its ends are on this host.
    ///
    /// # Errors
    /// `Unsupported` if an end is on another host; the kernel's error if it has no sock_diag.
    pub fn of(connection: &TcpStream) -> io::Result<Unread> {
        let (here, there) = (connection.local_addr()?, connection.peer_addr()?);
        if !here.ip().is_loopback() || !there.ip().is_loopback() {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        let mut unread = Unread { system: system()?, ours: question(here, there), theirs: question(there, here) };
        unread.bytes()?;
        Ok(unread)
    }

    /// An upper bound of the unread bytes at this moment.
    ///
    /// # Errors
    /// `NotFound` when the connection is gone.
    pub fn bytes(&mut self) -> io::Result<u64> {
        let unacknowledged = ask(&self.system, &self.ours)?.send_queue;
        let unread = ask(&self.system, &self.theirs)?.recv_queue;
        Ok(u64::from(unacknowledged) + u64::from(unread))
    }
}

/// The user whose process made or accepted the socket at `here` that is connected with `there`.
///
/// # Errors
/// `NotFound` if there is no such socket in this network namespace; the kernel's error if it has no sock_diag.
pub fn owner(here: SocketAddr, there: SocketAddr) -> io::Result<u32> {
    Ok(ask(&system()?, &question(here, there))?.uid)
}

/// The number of the socket at `here` that is connected with `there`, as `/proc/PID/fd` shows it.
///
/// # Errors
/// As [`owner`].
pub fn inode(here: SocketAddr, there: SocketAddr) -> io::Result<u32> {
    Ok(ask(&system()?, &question(here, there))?.inode)
}

/// A sock_diag(7) socket.
fn system() -> io::Result<Socket> {
    let mut system = Socket::new(NETLINK_SOCK_DIAG)?;
    system.bind_auto()?;
    system.connect(&Port::new(0, 0))?;
    // The answer is there when the question has been sent.
    system.set_non_blocking(true)?;
    Ok(system)
}

fn ask(system: &Socket, question: &[u8]) -> io::Result<InetResponseHeader> {
    system.send(question, 0)?;
    let mut answer = Vec::with_capacity(ANSWER_BYTES);
    system.recv(&mut answer, 0)?;
    let answer = NetlinkMessage::<SockDiagMessage>::deserialize(&answer).map_err(io::Error::other)?;
    match answer.payload {
        NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => Ok(response.header),
        NetlinkPayload::Error(error) => Err(error.to_io()),
        other => Err(io::Error::other(format!("the system answers {other:?} when asked about a socket"))),
    }
}

/// The question about the socket at `here` that is connected with `there`.
fn question(here: SocketAddr, there: SocketAddr) -> Vec<u8> {
    let request = InetRequest {
        family: if here.is_ipv4() { AF_INET } else { AF_INET6 },
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states: StateFlags::all(),
        socket_id: SocketId {
            source_port: here.port(),
            destination_port: there.port(),
            source_address: here.ip(),
            destination_address: there.ip(),
            interface_id: 0,
            cookie: NO_COOKIE,
        },
    };
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST;
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

// Pacer: when to write again to a socket that was full.
//
// A socket becomes writable for every few kilobytes that its reader took. A writer that writes each time takes the
// processor from the reader that it feeds: on two cores a server was interrupted 9,000 times while it loaded one
// gigabyte, and used half as much processor time again. So the writer pauses for about as long as the reader needs for
// [`WORTHWHILE`] bytes, and never so long that the socket runs empty.
//
// ```text
//   full ── pause ──▶ write until full again: how much went in?
//     ▲                  less than worthwhile ──▶ pause twice as long
//     └──────────────────  nearly all it holds ──▶ pause half as long
// ```

/// Decides when to write again to a socket that was full.
#[derive(Debug, Default)]
pub struct Pacer {
    pause: Duration,
    until: Option<Instant>,
    /// Bytes written and bytes held by the socket when it was last full.
    written: u64,
    held: u64,
}

/// Bytes that are worth interrupting the reader for.
const WORTHWHILE: u64 = 1 << 20;

/// The first pause, and the longest: the time in which a fast server reads two megabytes.
const FIRST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_millis(2);

impl Pacer {
    /// The socket is full: it has been given `written` bytes in all, and holds `held` of them.
    pub fn full(&mut self, now: Instant, written: u64, held: u64) {
        let burst = written - self.written;
        if burst > self.held / 4 * 3 {
            self.pause /= 2;
        } else if burst < WORTHWHILE {
            self.pause = (self.pause * 2).clamp(FIRST, LONGEST);
        }
        (self.written, self.held) = (written, held);
        self.until = Some(now + self.pause);
    }

    /// The end of the pause; `None`: write as soon as there is room.
    pub fn until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }
}

// TLS of the link, for servers that replicate by TLS only: towards such a server we are a TLS server.

/// With which certificate the agent plays a primary, for a server with `tls-replication yes`. Files in PEM.
#[derive(Clone, Debug, Default)]
pub struct LinkTls {
    /// The certificate chain.
    pub cert: Option<PathBuf>,
    /// The private key of that certificate.
    pub key: Option<PathBuf>,
    /// The authorities that must have signed the server's own certificate. `None`: it is asked for none.
    pub client_ca: Option<PathBuf>,
}

/// The configuration that the `--link-…` options describe, if they are given.
pub fn server_config(options: &LinkTls) -> Result<Option<Arc<ServerConfig>>, Failure> {
    let (Some(cert), Some(key)) = (&options.cert, &options.key) else { return Ok(None) };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::local(format!("TLS can't be set up: {error}")))?;
    let builder = match &options.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| unusable(path, &x509::of_pair(&error)))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| unusable(path, &error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let text = read(key)?;
    let private = PrivateKeyDer::from_pem_slice(&text);
    let private = private.map_err(|error| unusable(key, &x509::of_file(&error, &text, "private key")))?;
    let config = builder.with_single_cert(certificates(cert)?, private);
    let config = config.map_err(|error| unusable(cert, &x509::of_pair(&error)))?;
    Ok(Some(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let text = read(path)?;
    let read = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
    let read = read.and_then(|read| if read.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(read) });
    read.map_err(|error| unusable(path, &x509::of_file(&error, &text, "certificate")))
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| unusable(path, &error))
}

fn unusable(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::refused(format!("the file {} is of no use for TLS: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    fn connection(host: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn what_was_written_is_unread_until_it_was_read() {
        for host in ["127.0.0.1", "::1"] {
            let (mut near, mut far) = connection(host);
            let mut unread = Unread::of(&near).unwrap();
            assert_eq!(unread.bytes().unwrap(), 0);
            near.write_all(&[7; 10_000]).unwrap();
            assert_eq!(unread.bytes().unwrap(), 10_000);
            far.read_exact(&mut [0; 4_000]).unwrap();
            assert_eq!(unread.bytes().unwrap(), 6_000);
            far.read_exact(&mut [0; 6_000]).unwrap();
            assert_eq!(unread.bytes().unwrap(), 0);
        }
    }

    #[test]
    fn both_ends_of_a_connection_within_this_process_are_ours() {
        let (near, far) = connection("127.0.0.1");
        let (one, other) = (near.local_addr().unwrap(), far.local_addr().unwrap());
        let us = rustix::process::geteuid().as_raw();
        assert_eq!((owner(one, other).unwrap(), owner(other, one).unwrap()), (us, us));
        drop((near, far));
        assert_eq!(owner(other, one).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_connection_that_is_gone_has_no_answer() {
        let (near, far) = connection("127.0.0.1");
        let mut unread = Unread::of(&near).unwrap();
        drop((near, far));
        assert!(unread.bytes().is_err());
    }

    /// Simulates a reader of `rate` bytes per millisecond behind a socket of this capacity for a second. Gives back
    /// bytes read and writes.
    fn run(rate: u64, capacity: u64) -> (u64, u32) {
        let start = Instant::now();
        let (mut pacer, mut written, mut held, mut read, mut writes) = (Pacer::default(), 0, 0, 0, 0);
        for tick in 0..100_000 {
            let now = start + Duration::from_micros(10) * tick;
            let taken = held.min(rate / 100);
            held -= taken;
            read += taken;
            // What a socket calls room: a third of it.
            if pacer.until(now).is_none() && capacity - held >= capacity / 3 || held == 0 && pacer.until(now).is_none()
            {
                written += capacity - held;
                held = capacity;
                writes += 1;
                pacer.full(now, written, held);
            }
        }
        (read, writes)
    }

    #[test]
    fn a_fast_reader_is_kept_busy_and_seldom_interrupted() {
        for capacity in [256 << 10, 1 << 20, 6 << 20, 32 << 20] {
            let rate = 1_000_000;
            let (read, writes) = run(rate, capacity);
            assert!(read >= rate * 1000 / 100 * 98, "{capacity}: {read}");
            assert!(u64::from(writes) <= 2 * rate * 1000 / (capacity / 4).min(WORTHWHILE), "{capacity}: {writes}");
        }
    }

    #[test]
    fn a_slow_reader_is_looked_at_no_more_than_every_two_milliseconds() {
        let (_, writes) = run(1_000, 4 << 20);
        assert!(writes <= 520, "{writes}");
    }
}
