//! Outstanding reads of a network transport: which reads, in how many parts, and when a byte last arrived. Shared by
//! the transports that split reads and send requests.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use crate::{Completion, Denial, Error, Memory, ReadError, ReadRequest, memory};

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
