//! The three traits of every transport, and their vocabulary. No transport is implemented here.
//!
//! ```text
//!   source                               reader
//!   Exporter::export(id, memory)
//!   Exporter::grant(session, secret, regions)
//!   Exporter::key(id) ─────messenger───▶ Connector::connect(key, session, secret, sink)
//!                                          └▶ Peer   post_read ─▶ … ─▶ poll
//!                                                      ▲                 │ Ok: bytes have arrived in the sink
//!                                                      └─ at most depth ─┘ OutOfBounds: this read only
//!   revoke, withdraw, drop ─────────────────────────────────────────────▶ any other error: the peer is retired
//! ```
//!
//! What is true of every [`Peer`]:
//!
//! - Each accepted read gets exactly one [`Completion`], in any order, also when the connection fails or is closed.
//! - A completion means that the bytes have arrived, not that they are consistent: they may have been taken at
//!   different moments of a memory that is being written. The layer above detects that.
//! - A failed read may have written any part of its place in the sink.
//! - Any [`ReadError`] but `Denied(OutOfBounds)` retires the peer: outstanding reads fail, [`Peer::poll`] returns those
//!   failures, and after that `poll` and `post_read` return [`Error::Retired`]. To recover, get a new peer through the
//!   messenger.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use crate::admission::Regions;
use crate::error::{Denial, Error, ReadError};
use crate::memory::{self, Memory, View};
use crate::region::{RegionId, RegionKey, Secret, TransportKind};

pub use remora_memory::wait_readable;

/// The source's end of a transport: exports regions to sessions that have a grant. Dropping it closes all its
/// connections.
pub trait Exporter: Send + Sync {
    /// The transport.
    fn kind(&self) -> TransportKind;

    /// Makes `memory` readable under the name `id`, for every session that has a grant for it.
    ///
    /// # Errors
    /// [`Error::AlreadyExported`] if the name is in use.
    fn export(&self, id: RegionId, memory: Arc<Memory>) -> Result<(), Error>;

    /// Readies memory that will be exported, so that [`export`](Exporter::export) is quick. It may take as long as to
    /// touch all of the memory. Does nothing if the transport needs no preparation.
    ///
    /// # Errors
    /// As for [`export`](Exporter::export).
    fn prepare(&self, _memory: &Arc<Memory>) -> Result<(), Error> {
        Ok(())
    }

    /// Lets go of memory that was [prepared](Exporter::prepare) and will not be exported again. Regions that are
    /// exported stay so until they are revoked.
    fn forget(&self, _memory: &Arc<Memory>) {}

    /// Revokes a region. Reads in flight fail with `Denied(Revoked)`, or with `PeerGone` if the reason cannot be sent;
    /// the connections that read the region are closed. Does nothing if the region is not exported.
    fn revoke(&self, id: RegionId);

    /// Lets a session that proves knowledge of `secret` read these regions, which need not be exported yet. A second
    /// grant replaces the first: connections that it would not admit are closed.
    fn grant(&self, session: u64, secret: Secret, regions: Regions);

    /// Revokes the grant and closes the session's connections.
    fn withdraw(&self, session: u64);

    /// The key of a region, for the messenger to send to a session.
    ///
    /// # Errors
    /// [`Error::NotExported`].
    fn key(&self, id: RegionId) -> Result<RegionKey, Error>;

    /// Bytes sent so far, as far as this end can know: shared memory is read without its owner noticing.
    fn bytes_served(&self) -> u64;
}

/// The reader's end of a transport.
pub trait Connector: Send + Sync {
    /// The transport.
    fn kind(&self) -> TransportKind;

    /// Connects to the region of `key` as `session`; reads are written to `sink`. Blocks until its time-out at most.
    ///
    /// # Errors
    /// [`Error::WrongTransport`], [`Error::Key`], [`Error::NotThisHost`]: the key is not for this connector.
    /// [`Error::Unreachable`], [`Error::TimedOut`]: no source answers. [`Error::Refused`]: there is no grant for this
    /// region (`NotGranted`, also for a wrong secret; the two are not told apart), the key is of another generation
    /// (`Stale`), or the region does not exist (`Unknown`).
    fn connect(
        &self,
        key: &RegionKey,
        session: u64,
        secret: &Secret,
        sink: Arc<Memory>,
    ) -> Result<Box<dyn Peer>, Error>;
}

/// A connection to one region. It has one owner and no lock: it may move between threads but not be shared.
pub trait Peer: Send {
    /// Maximum number of outstanding reads.
    fn depth(&self) -> usize;

    /// Posts as many of `reads` as there is room for, from the front, and returns their number. 0 means that the queue
    /// is full: poll first.
    ///
    /// A range outside the region is accepted and completes with `Denied(OutOfBounds)`, because the source checks it. A
    /// read of 0 bytes completes with 0.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if a place in the sink does not exist (nothing is accepted), [`Error::Retired`].
    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error>;

    /// Appends the completions that have arrived and returns their number. It never blocks, and does a bounded amount
    /// of work per call.
    ///
    /// # Errors
    /// [`Error::Retired`], once the connection has ended and its last completion was returned.
    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error>;

    /// Sleeps until [`poll`](Peer::poll) should be called, or `timeout` has passed. May wake early.
    ///
    /// # Errors
    /// [`Error::System`] if the system call fails.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        wait_readable(self.arm(), timeout)?;
        Ok(())
    }

    /// A descriptor that is readable while [`poll`](Peer::poll) has something to do or to report. It may be readable
    /// without need, but is always readable when something is pending. It is the same for the life of the peer.
    fn arm(&mut self) -> BorrowedFd<'_>;

    /// The region itself, if it can be read in place. Keep polling: the connection reports when the region is revoked.
    fn view(&self) -> Option<Arc<View>>;

    /// Ends the connection: outstanding reads complete with `Cancelled`. A second call does nothing. Dropping closes.
    fn close(&mut self);
}

/// A read to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The caller's name for it, returned in the completion. Need not be unique.
    pub tag: u64,
    /// Offset of the first byte, in the region.
    pub offset: u64,
    /// Number of bytes.
    pub length: u32,
    /// Offset in the sink for the first byte.
    pub sink_offset: u64,
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The caller's name for the read.
    pub tag: u64,
    /// Bytes that have arrived: all that were requested.
    pub result: Result<u32, ReadError>,
}

// Outstanding reads of a network transport: which reads, in how many parts, and when a byte last arrived. Shared by
// the transports that split reads and send requests.

/// Checks that every `post_read` starts with: the peer is not retired, and each place exists in the sink. Starts the
/// timer with the first read.
pub(crate) fn admit(
    reads: &[ReadRequest],
    sink: &Memory,
    retired: Option<ReadError>,
    slots: &Slots,
    stall: &mut StallTimer,
) -> Result<(), Error> {
    if let Some(error) = retired {
        return Err(Error::Retired(error));
    }
    for read in reads {
        memory::check(read.sink_offset, read.length.into(), sink.length())?;
    }
    if slots.is_empty() && !reads.is_empty() {
        stall.begin();
    }
    Ok(())
}

/// The outstanding reads.
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<usize>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    tag: u64,
    length: u32,
    /// Parts still to come; 0 means that the slot is free.
    parts: u32,
    denied: Option<Denial>,
}

impl Slots {
    pub(crate) fn new(depth: usize) -> Slots {
        Slots { slots: vec![Slot::default(); depth], free: (0..depth).rev().collect() }
    }

    pub(crate) fn depth(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    pub(crate) fn take(&mut self, read: &ReadRequest) -> Option<usize> {
        let number = self.free.pop()?;
        let slot = self.slots.get_mut(number)?;
        *slot = Slot { tag: read.tag, length: read.length, parts: 1, denied: None };
        Some(number)
    }

    pub(crate) fn set_parts(&mut self, number: usize, parts: u32) {
        if let Some(slot) = self.slots.get_mut(number) {
            slot.parts = parts;
        }
    }

    /// Records that one part has arrived or was denied. Returns the completion if it was the last part.
    pub(crate) fn part_done(&mut self, number: usize, result: Result<(), Denial>) -> Option<Completion> {
        let slot = self.slots.get_mut(number)?;
        slot.denied = slot.denied.or(result.err());
        slot.parts = slot.parts.saturating_sub(1);
        if slot.parts > 0 {
            return None;
        }
        self.free.push(number);
        let result = match slot.denied {
            None => Ok(slot.length),
            Some(denial) => Err(ReadError::Denied(denial)),
        };
        Some(Completion { tag: slot.tag, result })
    }

    /// Empties all slots; each read fails.
    pub(crate) fn fail_all(&mut self, error: ReadError) -> Vec<Completion> {
        let mut failed = Vec::new();
        for (number, slot) in self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.parts > 0) {
            slot.parts = 0;
            self.free.push(number);
            failed.push(Completion { tag: slot.tag, result: Err(error) });
        }
        failed
    }
}

/// Detects that no byte has arrived for too long, and then makes the descriptor of [`Peer::arm`] readable.
///
/// [`Peer::arm`]: crate::Peer::arm
///
/// The timer is set rarely: when reads become outstanding, and again after it has expired. Nor is the clock read for
/// each byte: progress is noted, and gets the time of the next [`settle`](StallTimer::settle), which is called before
/// each sleep.
pub(crate) struct StallTimer {
    fd: OwnedFd,
    after: Duration,
    /// Bytes have arrived since `last_progress` was set.
    progressed: bool,
    last_progress: Instant,
    expires: Option<Instant>,
}

impl StallTimer {
    pub(crate) fn new(after: Duration) -> Result<StallTimer, Error> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(Error::system("creating a timer"))?;
        Ok(StallTimer { fd, after, progressed: false, last_progress: Instant::now(), expires: None })
    }

    /// Reads are outstanding from now on.
    pub(crate) fn begin(&mut self) {
        self.progress();
        if self.expires.is_none() {
            self.settle();
            self.set(Some(self.last_progress + self.after));
        }
    }

    pub(crate) fn progress(&mut self) {
        self.progressed = true;
    }

    /// Gives noted progress the present time.
    pub(crate) fn settle(&mut self) {
        if std::mem::take(&mut self.progressed) {
            self.last_progress = Instant::now();
        }
    }

    /// Fails if reads have been outstanding for too long without a byte.
    pub(crate) fn check(&mut self, is_waiting: bool) -> Result<(), ReadError> {
        self.check_at(Instant::now(), is_waiting)
    }

    /// As [`check`](StallTimer::check), for a caller that has just read the clock.
    pub(crate) fn check_at(&mut self, now: Instant, is_waiting: bool) -> Result<(), ReadError> {
        if std::mem::take(&mut self.progressed) {
            self.last_progress = now;
        }
        let Some(expires) = self.expires else { return Ok(()) };
        if now < expires {
            return Ok(());
        }
        let due = self.last_progress + self.after;
        if is_waiting && due <= now {
            return Err(ReadError::TimedOut);
        }
        self.set(is_waiting.then_some(due));
        Ok(())
    }

    /// Sets or clears the timer, which also makes its descriptor unreadable.
    fn set(&mut self, at: Option<Instant>) {
        self.expires = at;
        let left =
            at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)));
        let value = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // Fails only with EINVAL (invalid timespec) or EBADF.
        let set = rustix::time::timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &once);
        debug_assert!(set.is_ok(), "timerfd_settime with a valid time");
    }
}

impl AsFd for StallTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
