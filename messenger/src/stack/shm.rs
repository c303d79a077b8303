//! Shared memory of one host: two rings, and a unix socket as the waker.
//!
//! ```text
//!     our memory (we write, the peer maps it read-only)         the peer's (it writes, we map it read-only)
//!   ┌────────────┬────────────┬────────┬───────┬─────────────┐   ┌──────────┬──────────┬────────┬───────┬──────────────┐
//!   │ produced   │ consumed   │ asleep │ short │ ring        │   │ produced │ consumed │ asleep │ short │ ring         │
//!   │ of our ring│ of theirs  │        │       │ 1 MiB       │   │          │          │        │       │              │
//!   └────────────┴────────────┴────────┴───────┴─────────────┘   └──────────┴──────────┴────────┴───────┴──────────────┘
//!                     └──────── a byte on the socket, only when the other end sleeps ────────┘
//! ```
//!
//! - Each end writes only its own memory, so neither can damage what the other relies on. What an end reads in the
//!   other's memory is checked: a counter more than a ring ahead is a violation. The ring's size is the credit, so a
//!   receiver is never overrun.
//! - Both memories are handed over once, as descriptors on the socket, before the first byte.
//! - Before an end sleeps it announces that (`asleep`, a number that grows with each sleep) and checks once more. An
//!   end that produces, or consumes for an end that is `short` of room, reads `asleep` afterwards and wakes the peer
//!   once per sleep. Each of the two stores is sequentially consistent with the load after it, so that at least one end
//!   sees the other's.
//! - The socket also reports the end of the peer's process.
//! - A listener accepts connections of its own user, of root, and of the group that may enter the socket's folder. What
//!   a peer sends cannot block a thread: descriptors other than the peer's memory, and connections, are closed on a
//!   thread of their own.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use remora_memory::local::{self, Admits, PeerSocket};
use remora_memory::{Memory, Pages, View};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::{Address, Link, Listener};

/// A connection by shared memory.
pub struct ShmLink {
    socket: PeerSocket,
    path: PathBuf,
    ours: Memory,
    /// The peer's memory, once it was handed over.
    theirs: Option<View>,
    produced: u64,
    consumed: u64,
    /// How far the peer had consumed when we last read its counter. Reading it costs both ends: the counter's cache
    /// line travels here, and back for the next count.
    seen_consumed: u64,
    /// How often this end has slept: its last announcement.
    sleeps: u64,
    /// This end has slept since the socket was last read.
    slept: bool,
    /// Not everything could be sent: the peer wakes this end when there is room.
    short: bool,
    /// The peer's sleep that it was last woken from.
    rung: u64,
    ended: bool,
}

impl ShmLink {
    /// Connects to the socket at that path, and hands over this end's memory.
    pub(super) fn call(path: &Path) -> io::Result<ShmLink> {
        let socket = socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        ShmLink::over(socket.into(), path)
    }

    fn over(socket: PeerSocket, path: &Path) -> io::Result<ShmLink> {
        let ours = Memory::create("remora-messenger", RING_AT + RING_BYTES, Pages::Small)?;
        hand_over(&socket, ours.reopen_read_only()?.as_fd())?;
        Ok(ShmLink {
            socket,
            path: path.to_owned(),
            ours,
            theirs: None,
            produced: 0,
            consumed: 0,
            seen_consumed: 0,
            sleeps: 0,
            slept: true,
            short: false,
            rung: 0,
            ended: false,
        })
    }

    /// Receives the peer's memory: the first packet on the socket.
    fn meet(&mut self) -> io::Result<()> {
        if self.theirs.is_none() {
            let memory = be_handed(&self.socket)?;
            self.theirs = Some(View::open(memory, RING_AT + RING_BYTES)?);
        }
        Ok(())
    }

    fn said(&self, at: u64, order: Ordering) -> io::Result<u64> {
        let theirs = self.theirs.as_ref().ok_or(io::ErrorKind::WouldBlock)?;
        Ok(theirs.load_u64(at, order)?)
    }

    /// Bytes that may be produced now.
    fn room(&self) -> io::Result<u64> {
        let under_way = self.produced.wrapping_sub(self.said(CONSUMED_AT, Ordering::SeqCst)?);
        RING_BYTES.checked_sub(under_way).ok_or_else(broken)
    }

    /// Bytes that may be produced: `wanted`, if that is known without reading the peer's counter; otherwise what the
    /// counter says.
    fn room_for(&mut self, wanted: u64) -> io::Result<u64> {
        let known = RING_BYTES - self.produced.wrapping_sub(self.seen_consumed);
        if known >= wanted {
            return Ok(known);
        }
        let room = self.room()?;
        self.seen_consumed = self.produced.wrapping_sub(RING_BYTES - room);
        Ok(room)
    }

    /// Bytes that may be consumed.
    fn available(&self) -> io::Result<u64> {
        let available = self.said(PRODUCED_AT, Ordering::SeqCst)?.wrapping_sub(self.consumed);
        if available > RING_BYTES { Err(broken()) } else { Ok(available) }
    }

    /// Wakes the peer if it sleeps and was not woken from this sleep yet.
    fn ring(&mut self) -> io::Result<()> {
        let sleep = self.said(ASLEEP_AT, Ordering::SeqCst)?;
        if sleep == 0 || sleep == self.rung {
            return Ok(());
        }
        self.rung = sleep;
        match rustix::net::send(&self.socket, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()), // a full socket wakes it as well
            Err(error) => Err(error.into()),
        }
    }

    /// Reads one byte off the socket: one per sleep. With another one the descriptor stays readable, and this is called
    /// again.
    fn hush(&mut self) -> io::Result<()> {
        self.slept = false;
        match local::receive(&self.socket) {
            Err(Errno::CONNRESET) => self.ended = true,
            Ok(packet) if packet.bytes().is_empty() => self.ended = true,
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn set_short(&mut self, short: bool) -> io::Result<()> {
        if self.short != short {
            self.short = short;
            self.ours.store_u64(SHORT_AT, u64::from(short), Ordering::SeqCst)?;
        }
        Ok(())
    }

    fn has_something(&self) -> io::Result<bool> {
        Ok(self.available()? > 0 || (self.short && self.room()? > 0))
    }
}

impl Link for ShmLink {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn finish_call(&mut self) -> io::Result<()> {
        Ok(()) // a unix socket connects at once or not at all
    }

    fn send(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        self.meet()?;
        let wanted = bytes.iter().map(|slice| slice.len() as u64).sum();
        let mut room = self.room_for(wanted)?;
        if room == 0 && wanted > 0 {
            self.set_short(true)?;
            room = self.room_for(wanted)?; // there may have been room before the announcement
            if room == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        self.set_short(false)?;
        let mut sent = 0;
        for slice in bytes {
            let length = slice.len().min((room as usize).saturating_sub(sent));
            for (at, range) in places(self.produced, length) {
                self.ours.write(at, &slice[range])?;
            }
            self.produced += length as u64;
            sent += length;
        }
        self.ours.store_u64(PRODUCED_AT, self.produced, Ordering::SeqCst)?;
        self.ring()?;
        Ok(sent)
    }

    fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.meet()?;
        let mut available = self.available()? as usize;
        if self.slept || available == 0 {
            self.hush()?;
            available = self.available()? as usize;
        }
        if available == 0 {
            return if self.ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let theirs = self.theirs.as_ref().ok_or(io::ErrorKind::WouldBlock)?;
        let mut received = 0;
        for piece in into {
            let length = piece.len().min(available - received);
            for (at, range) in places(self.consumed, length) {
                theirs.read(at, &mut piece[range])?;
            }
            self.consumed += length as u64;
            received += length;
        }
        self.ours.store_u64(CONSUMED_AT, self.consumed, Ordering::SeqCst)?;
        if self.said(SHORT_AT, Ordering::SeqCst)? != 0 {
            self.ring()?;
        }
        Ok(received)
    }

    fn peer(&self) -> Address {
        Address::Shm(self.path.clone())
    }

    fn poll_ready(&mut self) -> Option<bool> {
        Some(self.theirs.is_some() && self.has_something().unwrap_or(true)) // serving the link finds the error
    }

    fn arm(&mut self) -> bool {
        self.sleeps += 1;
        self.slept = true;
        let said = self.ours.store_u64(ASLEEP_AT, self.sleeps, Ordering::SeqCst);
        said.is_err() || (self.theirs.is_some() && self.has_something().unwrap_or(true))
    }

    fn disarm(&mut self) {
        // Fails only outside of the memory, where arming would have failed too.
        let _ = self.ours.store_u64(ASLEEP_AT, 0, Ordering::Release);
    }
}

/// Where `length` bytes of a stream are in a ring, from `position` on: one piece, or two where the ring wraps. The
/// range is the bytes'.
fn places(position: u64, length: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let at = position % RING_BYTES;
    let first = length.min((RING_BYTES - at) as usize);
    [(RING_AT + at, 0..first), (RING_AT, first..length)].into_iter().filter(|(_, range)| !range.is_empty())
}

/// A listening unix socket. Its file is removed with it.
pub struct ShmListener {
    listener: local::Listener,
    path: PathBuf,
    file: FileId,
}

/// Device and number of a file: which one a path stands for.
type FileId = (u64, u64);

fn file_id(path: &Path) -> io::Result<FileId> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

impl ShmListener {
    pub(super) fn bind(path: &Path) -> io::Result<ShmListener> {
        let socket = socket()?;
        let address = SocketAddrUnix::new(path)?;
        match rustix::net::bind(&socket, &address) {
            // The system refuses connections to files that are no sockets, too. Such a file is somebody's data.
            Err(Errno::ADDRINUSE) if !std::fs::symlink_metadata(path)?.file_type().is_socket() => {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is not a socket has this name"));
            }
            // No process listens at this file: its owner could not remove it.
            Err(Errno::ADDRINUSE) if rustix::net::connect(&self::socket()?, &address) == Err(Errno::CONNREFUSED) => {
                std::fs::remove_file(path)?;
                rustix::net::bind(&socket, &address)?;
            }
            other => other?,
        }
        let address = local::Address::File(path.as_os_str().as_bytes().to_vec());
        let listener = local::Listener::new(socket, address, Admits::Us, BACKLOG).map_err(io::Error::from);
        match listener.and_then(|listener| Ok((listener, file_id(path)?))) {
            Ok((listener, file)) => Ok(ShmListener { listener, path: path.to_owned(), file }),
            Err(error) => {
                let _ = std::fs::remove_file(path); // the file of this bind
                Err(error)
            }
        }
    }
}

impl Listener for ShmListener {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn accept(&mut self) -> io::Result<Box<dyn Link>> {
        let socket = self.listener.accept()?.ok_or(io::ErrorKind::WouldBlock)?;
        Ok(Box::new(ShmLink::over(socket, &self.path)?))
    }

    fn address(&self) -> Address {
        Address::Shm(self.path.clone())
    }
}

impl Drop for ShmListener {
    fn drop(&mut self) {
        // Another process may listen at the path by now, after somebody has removed this one's file.
        if file_id(&self.path).is_ok_and(|there| there == self.file) {
            let _ = std::fs::remove_file(&self.path); // the file may be gone already
        }
    }
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn hand_over(socket: &PeerSocket, memory: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let passengers = [memory];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&passengers)) {
        return Err(io::Error::other("no room for a descriptor beside a packet"));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&HELLO)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn be_handed(socket: &PeerSocket) -> io::Result<OwnedFd> {
    let mut packet = local::receive(socket)?;
    if packet.bytes().is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if packet.bytes() != HELLO {
        return Err(broken());
    }
    let memory = packet.take_descriptor().ok_or_else(broken)?;
    // Closing anything else could block this thread.
    if rustix::fs::fcntl_get_seals(&memory).is_err() {
        local::close_elsewhere(memory);
        return Err(broken());
    }
    Ok(memory)
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer violates the protocol of the rings, or has another version")
}

/// The first packet: the protocol, and its layout (the last byte).
const HELLO: [u8; 8] = *b"RMsgShm\x01";

/// Positions of what each end writes; a cache line each, as different processors read them.
const PRODUCED_AT: u64 = 0;
const CONSUMED_AT: u64 = 64;
const ASLEEP_AT: u64 = 128;
const SHORT_AT: u64 = 192;
const RING_AT: u64 = 4096;

/// Size of a ring: how far a sender may be ahead of its receiver. Half of a second-level cache, so that bytes are
/// consumed before they leave it.
const RING_BYTES: u64 = 1 << 20;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn pair() -> (ShmLink, Box<dyn Link>) {
        let folder =
            std::env::temp_dir().join(format!("remora-shm-{}-{:?}", std::process::id(), std::thread::current().id()));
        let mut listener = ShmListener::bind(&folder).unwrap();
        let link = ShmLink::call(&folder).unwrap();
        (link, listener.accept().unwrap())
    }

    fn would_block(result: io::Result<usize>) -> bool {
        result.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    #[test]
    fn bytes_cross_the_ring_in_order_and_a_full_ring_would_block() {
        let (mut one, mut other) = pair();
        let content: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
        let (mut sent, mut received) = (0, Vec::new());
        let mut blocked = 0;
        while received.len() < content.len() {
            match one.send(&[IoSlice::new(&content[sent..]), IoSlice::new(&[])]) {
                Ok(count) => sent += count,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    blocked += 1;
                }
            }
            let (mut first, mut second) = ([0; 100_000], [0; 77_777]);
            let count = other.receive(&mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)]).unwrap();
            received.extend_from_slice(&first[..count.min(first.len())]);
            received.extend_from_slice(&second[..count.saturating_sub(first.len())]);
            if sent == content.len() && received.len() < content.len() {
                continue;
            }
        }
        assert_eq!(received, content);
        assert!(blocked > 0 || sent == content.len());
        assert!(would_block(other.receive(&mut [IoSliceMut::new(&mut [0; 8])])));
    }

    #[test]
    fn a_sleeping_end_is_woken_once_and_an_awake_end_is_not() {
        let (mut one, mut other) = pair();
        one.send(&[IoSlice::new(b"x")]).unwrap();
        other.receive(&mut [IoSliceMut::new(&mut [0; 8])]).unwrap();
        let rings = |link: &dyn Link| rustix::io::ioctl_fionread(link.descriptor()).unwrap();
        one.send(&[IoSlice::new(b"x")]).unwrap();
        assert_eq!(rings(&*other), 0, "it was awake");
        other.receive(&mut [IoSliceMut::new(&mut [0; 8])]).unwrap();
        assert!(!other.arm());
        one.send(&[IoSlice::new(b"x")]).unwrap();
        one.send(&[IoSlice::new(b"x")]).unwrap();
        assert_eq!(rings(&*other), 1);
        assert!(other.arm(), "something came before it slept");
    }

    #[test]
    fn a_file_that_is_not_the_listeners_socket_is_left_alone() {
        let path = std::env::temp_dir().join(format!("remora-shm-file-{}", std::process::id()));
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(ShmListener::bind(&path).err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();
        let first = ShmListener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = ShmListener::bind(&path).unwrap();
        drop(first);
        ShmLink::call(&path).unwrap();
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn the_end_of_a_peer_follows_its_last_bytes() {
        let (mut one, mut other) = pair();
        one.send(&[IoSlice::new(b"last")]).unwrap();
        drop(one);
        let mut into = [0; 8];
        assert_eq!(other.receive(&mut [IoSliceMut::new(&mut into)]).unwrap(), 4);
        assert_eq!(other.receive(&mut [IoSliceMut::new(&mut into)]).unwrap(), 0);
    }

    #[test]
    fn a_counter_that_is_more_than_a_ring_ahead_is_a_broken_peer() {
        let (mut one, mut other) = pair();
        one.send(&[IoSlice::new(b"x")]).unwrap();
        one.ours.store_u64(PRODUCED_AT, RING_BYTES + 2, Ordering::SeqCst).unwrap();
        let error = other.receive(&mut [IoSliceMut::new(&mut [0; 8])]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    /// A TCP connection whose last `close` waits for minutes: it lingers, with bytes that its peer does not take.
    fn lingering() -> (OwnedFd, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut full = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let silent = listener.accept().unwrap().0;
        full.set_nonblocking(true).unwrap();
        while io::Write::write(&mut full, &[0; 1 << 16]).is_ok() {}
        let linger = Some(std::time::Duration::from_secs(60));
        rustix::net::sockopt::set_socket_linger(&full, linger).unwrap();
        full.set_nonblocking(false).unwrap();
        (full.into(), silent)
    }

    #[test]
    fn a_lingering_descriptor_of_a_peer_delays_no_other() {
        let path = std::env::temp_dir().join(format!("remora-shm-linger-{}", std::process::id()));
        let mut listener = ShmListener::bind(&path).unwrap();
        let mut silents = Vec::new();
        let mut attackers = Vec::new();
        // As the memory, as a wake-up, and with a packet that is never read.
        for packets in [1, 2] {
            let (full, silent) = lingering();
            let attacker = socket().unwrap();
            rustix::net::connect(&attacker, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            for _ in 0..packets {
                local::send(&attacker, &HELLO, Some(full.as_fd())).unwrap();
            }
            silents.push(silent);
            attackers.push(attacker);
        }
        let begun = std::time::Instant::now();
        for _ in 0..2 {
            let mut link = listener.accept().unwrap();
            assert!(link.receive(&mut [IoSliceMut::new(&mut [0; 8])]).is_err());
        }
        let mut one = ShmLink::call(&path).unwrap();
        let mut other = listener.accept().unwrap();
        one.send(&[IoSlice::new(b"x")]).unwrap();
        assert_eq!(other.receive(&mut [IoSliceMut::new(&mut [0; 8])]).unwrap(), 1);
        // The last `close` of what lingers takes a minute.
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    #[test]
    fn only_the_user_of_a_listener_may_connect() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("remora-shm-mode-{}", std::process::id()));
        let _listener = ShmListener::bind(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}
