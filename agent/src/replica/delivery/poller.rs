//! Poller: the descriptors that the delivery's thread waits on, and which of them are tried afterwards.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

/// Interval at which all descriptors are tried while the loop is too busy to wait on them.
const LOOK_PACE: Duration = Duration::from_millis(1);

/// The longest sleep, should every descriptor be silent.
const SLEEP_LIMIT: Duration = Duration::from_millis(500);

/// The shortest sleep: less than the system needs to wake a thread.
const SLEEP_LEAST: Duration = Duration::from_micros(20);

/// Descriptors that may have something to read. A try that finds nothing costs a system call, and `accept` even creates
/// a socket first: so only those are tried that poll(2) has found ready, and all of them now and then.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Readiness {
    pub(super) waker: bool,
    pub(super) candidates: bool,
    pub(super) link: bool,
    looked: Instant,
}

impl Readiness {
    pub(super) fn all(now: Instant) -> Readiness {
        Readiness { waker: true, candidates: true, link: true, looked: now }
    }

    /// Marks all descriptors as ready if none was waited on for long.
    pub(super) fn look(&mut self, now: Instant) {
        if now.duration_since(self.looked) >= LOOK_PACE {
            *self = Readiness::all(now);
        }
    }

    /// The result of a wait.
    pub(super) fn after(now: Instant, waker: bool, candidates: bool, link: bool) -> Readiness {
        Readiness { waker, candidates, link, looked: now }
    }
}

/// What the link needs from the input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// The link has something to write.
    pub(super) is_full: bool,
    /// The link pauses although there is something to write.
    pub(super) is_paused: bool,
    /// The link has no slot to write.
    pub(super) wants_slots: bool,
}

/// Descriptors to wait on, up to a time.
pub(super) struct Wait<'a> {
    now: Instant,
    until: Instant,
    fds: Vec<(BorrowedFd<'a>, PollFlags)>,
}

/// A descriptor among those that are waited on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(usize);

impl<'a> Wait<'a> {
    pub(super) fn new(now: Instant) -> Wait<'a> {
        Wait { now, until: now + SLEEP_LIMIT, fds: Vec::new() }
    }

    pub(super) fn now(&self) -> Instant {
        self.now
    }

    /// Ends the wait at this time.
    pub(super) fn until(&mut self, at: Instant) {
        self.until = self.until.min(at);
    }

    pub(super) fn add(&mut self, fd: BorrowedFd<'a>, events: PollFlags) -> Place {
        self.fds.push((fd, events));
        Place(self.fds.len() - 1)
    }

    /// Waits. After an interruption the loop checks everything again, as after any wait.
    pub(super) fn poll(self) -> Ready {
        let timeout = self.timeout();
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
        let mut fds: Vec<PollFd<'_>> = self.fds.iter().map(|(fd, events)| PollFd::new(fd, *events)).collect();
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        Ready(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    fn timeout(&self) -> Duration {
        self.until.saturating_duration_since(self.now).max(SLEEP_LEAST)
    }
}

/// The descriptors that a wait found ready.
pub(super) struct Ready(Vec<bool>);

impl Ready {
    pub(super) fn has(&self, place: Place) -> bool {
        self.0.get(place.0).is_some_and(|ready| *ready)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_earliest_deadline_bounds_the_wait_and_a_past_one_does_not_spin() {
        let now = Instant::now();
        let mut wait = Wait::new(now);
        assert_eq!(wait.timeout(), SLEEP_LIMIT);
        wait.until(now + Duration::from_millis(7));
        wait.until(now + Duration::from_millis(9));
        assert_eq!(wait.timeout(), Duration::from_millis(7));
        wait.until(now);
        assert_eq!(wait.timeout(), SLEEP_LEAST);
    }

    #[test]
    fn only_what_has_something_is_ready() {
        let ((one, mut far), (other, _kept)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        far.write_all(b"x").unwrap();
        let mut wait = Wait::new(Instant::now());
        let (with, without) = (wait.add(one.as_fd(), PollFlags::IN), wait.add(other.as_fd(), PollFlags::IN));
        let ready = wait.poll();
        assert!(ready.has(with) && !ready.has(without));
    }

    #[test]
    fn everything_is_tried_again_after_a_while_without_a_wait() {
        let now = Instant::now();
        let mut readiness = Readiness::after(now, false, false, false);
        readiness.look(now + LOOK_PACE / 2);
        assert_eq!(readiness, Readiness::after(now, false, false, false));
        readiness.look(now + LOOK_PACE);
        assert_eq!(readiness, Readiness::all(now + LOOK_PACE));
    }
}
