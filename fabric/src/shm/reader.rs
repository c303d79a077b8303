//! The reader's end: it connects, gets the memory itself, and copies out of it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::{BootId, Shm};
use crate::admission::{Hello, Reader};
use crate::error::{Denial, Error, ReadError};
use crate::memory::local::{self, Packet};
use crate::memory::{self, Memory, View, wait_readable};
use crate::region::{RegionKey, Secret, TransportKind};
use crate::transport::{Completion, Connector, Peer, ReadRequest};
use crate::{admission, shm};

// The reader's end: makes connections. Reads are in `peer`.

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
        let address = shm::address_in(key, &BootId::of_this_host()?)?;
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
        let (reader, hello) =
            Reader::<Shm>::hello(&Hello { lane: 0, session, id: key.id(), nonce: admission::nonce()? });
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

// The reader's data path: a queue of copies, made in `poll`. The connection only reports when the region is revoked.
//
// Copies are made in [`Peer::poll`] and not when they are posted, so that both calls take a bounded time. A reader
// that posts and does not poll delays no other reader.

/// A connection to one region in shared memory.
pub struct ShmPeer {
    socket: OwnedFd,
    view: Arc<View>,
    sink: Arc<Memory>,
    /// Posted and not completed, oldest first.
    queue: VecDeque<ReadRequest>,
    /// Bytes of the oldest read that have been copied.
    copied: u32,
    /// Why the peer is retired, if it is.
    retired: Option<ReadError>,
    signal: Signal,
}

impl ShmPeer {
    pub(super) fn new(socket: OwnedFd, view: Arc<View>, sink: Arc<Memory>) -> Result<ShmPeer, Error> {
        let signal = Signal::new(&socket)?;
        Ok(ShmPeer { socket, view, sink, queue: VecDeque::with_capacity(DEPTH), copied: 0, retired: None, signal })
    }

    /// Whether `poll` has something to do or to report that the socket does not show.
    fn has_work(&self) -> bool {
        !self.queue.is_empty() || self.retired.is_some()
    }

    /// Checks whether the source has ended the connection.
    fn check_connection(&mut self) {
        // One byte more than a farewell, so that a longer packet is not mistaken for one.
        let mut packet = [0; shm::FAREWELL_BYTES + 1];
        // Without room for descriptors: this is asked at every poll, and costs half without.
        let end = match rustix::net::recv(&self.socket, &mut packet, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok((length, _)) => shm::farewell_reason(packet.get(..length).unwrap_or_default())
                .map_or(ReadError::PeerGone, ReadError::Denied),
            Err(_) => ReadError::PeerGone,
        };
        self.retired.get_or_insert(end);
    }

    /// Copies up to the limit of one call, oldest read first.
    fn copy(&mut self, completions: &mut Vec<Completion>) {
        let mut budget = COPY_PER_POLL_BYTES;
        while budget > 0 {
            let Some(&read) = self.queue.front() else { return };
            match self.copy_some(&read, budget) {
                Ok(bytes) => {
                    // An empty read counts as one byte, so that the budget bounds the number of reads.
                    budget = budget.saturating_sub(bytes.max(1));
                    self.copied += bytes;
                    if self.copied == read.length {
                        self.complete(&read, Ok(read.length), completions);
                    }
                }
                Err(denial) => {
                    budget -= 1;
                    self.complete(&read, Err(ReadError::Denied(denial)), completions);
                }
            }
        }
    }

    /// Copies up to `budget` bytes of one read and returns their number.
    fn copy_some(&self, read: &ReadRequest, budget: u32) -> Result<u32, Denial> {
        memory::check(read.offset, u64::from(read.length), self.view.length()).map_err(|_| Denial::OutOfBounds)?;
        let length = budget.min(read.length - self.copied);
        let (from, to) = (read.offset + u64::from(self.copied), read.sink_offset + u64::from(self.copied));
        // The place in the sink was checked when the read was posted, so this does not fail.
        self.view.copy_to(from..from + u64::from(length), &self.sink, to).map_err(|_| Denial::OutOfBounds)?;
        Ok(length)
    }

    fn complete(&mut self, read: &ReadRequest, result: Result<u32, ReadError>, completions: &mut Vec<Completion>) {
        self.queue.pop_front();
        self.copied = 0;
        completions.push(Completion { tag: read.tag, result });
    }
}

impl Peer for ShmPeer {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        if let Some(end) = self.retired {
            return Err(Error::Retired(end));
        }
        for read in reads {
            memory::check(read.sink_offset, u64::from(read.length), self.sink.length())?;
        }
        let accepted = reads.len().min(DEPTH - self.queue.len());
        self.queue.extend(reads.iter().take(accepted));
        self.signal.set(self.has_work());
        Ok(accepted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        let before = completions.len();
        // First, so that no bytes are returned after the region was seen to be revoked.
        self.check_connection();
        match self.retired {
            None => self.copy(completions),
            Some(end) => {
                completions.extend(self.queue.drain(..).map(|read| Completion { tag: read.tag, result: Err(end) }));
            }
        }
        self.signal.set(self.has_work());
        match (completions.len() - before, self.retired) {
            (0, Some(end)) => Err(Error::Retired(end)),
            (count, _) => Ok(count),
        }
    }

    /// Avoids the upkeep of the [`Peer::arm`] signal for callers that only wait.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        if self.has_work() {
            return Ok(());
        }
        wait_readable(self.socket.as_fd(), timeout)?;
        Ok(())
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        self.signal.watched = true;
        self.signal.set(!self.queue.is_empty() || self.retired.is_some());
        self.signal.both.as_fd()
    }

    fn view(&self) -> Option<Arc<View>> {
        Some(self.view.clone())
    }

    fn close(&mut self) {
        if self.retired.is_none() {
            self.retired = Some(ReadError::Cancelled);
            // The source drops the connection now, and not only when this value is dropped.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
            self.signal.set(true);
        }
    }
}

/// The descriptor of [`Peer::arm`]: readable while there is work, or news on the socket.
///
/// ```text
///   work: an eventfd, 1 or 0 ─┐
///                             ├─▶ both: an epoll descriptor, readable if one of them is
///   the connection ───────────┘
/// ```
struct Signal {
    work: OwnedFd,
    both: OwnedFd,
    /// Whether `work` is readable at present.
    shows: bool,
    /// Whether the caller has asked for the descriptor. Before that it is not kept up to date, which saves two system
    /// calls per batch.
    watched: bool,
}

impl Signal {
    fn new(socket: &OwnedFd) -> Result<Signal, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let work = eventfd(0, flags).map_err(Error::system("creating an eventfd"))?;
        let both = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("creating an epoll instance"))?;
        for fd in [&work, socket] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&both, fd, data, epoll::EventFlags::IN).map_err(Error::system("watching a descriptor"))?;
        }
        Ok(Signal { work, both, shows: false, watched: false })
    }

    /// Makes `work` readable or not.
    fn set(&mut self, has_work: bool) {
        if !self.watched || self.shows == has_work {
            return;
        }
        let done = if has_work {
            rustix::io::write(&self.work, &1u64.to_ne_bytes())
        } else {
            rustix::io::read(&self.work, &mut [0u8; 8])
        };
        // An eventfd that holds 0 can always be written, and one that holds 1 can always be read.
        debug_assert_eq!(done, Ok(8));
        self.shows = has_work;
    }
}

/// Maximum number of outstanding reads. They only take space in the queue; more would bring nothing.
const DEPTH: usize = 64;

/// Bytes copied per call of `poll`: half a millisecond, or a few milliseconds if each page is accessed for the first
/// time.
const COPY_PER_POLL_BYTES: u32 = 4 << 20;
