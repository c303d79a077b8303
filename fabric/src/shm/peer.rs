//! The reader's data path: a queue of copies, done when they are polled for. The connection is only asked whether it still stands.
//!
//! Copies are done in [`Peer::poll`] and not at posting, so that both calls take a bounded time, and so that a reader that posts and
//! does not poll holds up nobody: the work is its own.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, epoll, eventfd},
    io::Errno,
    net::RecvFlags,
};

use super::wire;
use crate::{
    error::{Denial, Error, ReadError},
    memory::{self, Memory, View, wait_readable},
    transport::{Completion, Peer, ReadRequest},
};

/// A connection to one region in shared memory.
pub struct ShmPeer {
    socket: OwnedFd,
    view: Arc<View>,
    sink: Arc<Memory>,
    /// Posted and not completed, oldest first.
    queue: VecDeque<ReadRequest>,
    /// Bytes of the oldest that have been copied.
    copied: u32,
    /// Why it is over, once it is.
    retired: Option<ReadError>,
    signal: Signal,
}

impl ShmPeer {
    pub(super) fn new(socket: OwnedFd, view: Arc<View>, sink: Arc<Memory>) -> Result<ShmPeer, Error> {
        let signal = Signal::new(&socket)?;
        Ok(ShmPeer { socket, view, sink, queue: VecDeque::with_capacity(DEPTH), copied: 0, retired: None, signal })
    }

    /// Whether `poll` has something to do or to say that the socket doesn't show.
    fn has_work(&self) -> bool {
        !self.queue.is_empty() || self.retired.is_some()
    }

    /// Asks the connection whether it still stands.
    fn check_connection(&mut self) {
        // A byte more than a farewell has, so that a longer packet is not taken for one.
        let mut packet = [0; wire::FAREWELL_BYTES + 1];
        // Without room for descriptors: this is asked at every poll, and costs half without.
        let end = match rustix::net::recv(&self.socket, &mut packet, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok((length, _)) => wire::farewell_reason(packet.get(..length).unwrap_or_default())
                .map_or(ReadError::PeerGone, ReadError::Denied),
            Err(_) => ReadError::PeerGone,
        };
        self.retired.get_or_insert(end);
    }

    /// Copies for one call's worth of bytes, oldest first.
    fn copy(&mut self, completions: &mut Vec<Completion>) {
        let mut budget = COPY_PER_POLL_BYTES;
        while budget > 0 {
            let Some(&read) = self.queue.front() else { return };
            match self.copy_some(&read, budget) {
                Ok(bytes) => {
                    // A read of nothing still costs a turn, else `budget` would bound nothing.
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

    /// Copies up to `budget` bytes of one read and says how many.
    fn copy_some(&self, read: &ReadRequest, budget: u32) -> Result<u32, Denial> {
        memory::check(read.offset, u64::from(read.length), self.view.length()).map_err(|_| Denial::OutOfBounds)?;
        let length = budget.min(read.length - self.copied);
        let (from, to) = (read.offset + u64::from(self.copied), read.sink_offset + u64::from(self.copied));
        // The place in the sink was checked at posting, so that this can't fail.
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
        // First, so that nothing is handed out of a region after the news that it is revoked.
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

    /// Spares those who wait, rather than watch [`Peer::arm`] in a loop of their own, the upkeep of its signal.
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
            // The source forgets us at once, not only when this value is dropped.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
            self.signal.set(true);
        }
    }
}

/// What [`Peer::arm`] lends: a descriptor that is readable while there is work, or news on the socket.
///
/// ```text
///   work: an eventfd, 1 or 0 ─┐
///                             ├─▶ both: an epoll descriptor, readable if one of them is
///   the connection ───────────┘
/// ```
struct Signal {
    work: OwnedFd,
    both: OwnedFd,
    /// What `work` shows at present.
    shows: bool,
    /// Whether anybody looks. Until then it isn't kept up, which spares who only polls two system calls per batch.
    watched: bool,
}

impl Signal {
    fn new(socket: &OwnedFd) -> Result<Signal, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let work = eventfd(0, flags).map_err(Error::system("making an eventfd"))?;
        let both = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("making an epoll descriptor"))?;
        for fd in [&work, socket] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&both, fd, data, epoll::EventFlags::IN).map_err(Error::system("watching a descriptor"))?;
        }
        Ok(Signal { work, both, shows: false, watched: false })
    }

    /// Makes `work` show what there is.
    fn set(&mut self, has_work: bool) {
        if !self.watched || self.shows == has_work {
            return;
        }
        let done = if has_work {
            rustix::io::write(&self.work, &1u64.to_ne_bytes())
        } else {
            rustix::io::read(&self.work, &mut [0u8; 8])
        };
        // An eventfd that holds 0 can be written and one that holds 1 can be read, always.
        debug_assert_eq!(done, Ok(8));
        self.shows = has_work;
    }
}

/// Reads that may be outstanding. They cost nothing but their place here; more than a network's depth helps nobody.
const DEPTH: usize = 64;

/// Bytes copied per call of `poll`: half a millisecond, or some milliseconds where each page is touched for the first time.
const COPY_PER_POLL_BYTES: u32 = 4 << 20;
