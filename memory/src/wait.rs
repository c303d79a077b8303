//! Waiting for descriptors, with a bound.

use std::{
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::Error;

/// Sleeps until `fd` is readable (`true`) or `timeout` has passed (`false`). A signal does not end the wait.
///
/// # Errors
/// [`Error::System`] if `poll(2)` fails.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> Result<bool, Error> {
    wait_readable_any(std::iter::once(fd), timeout)
}

/// Sleeps until one of the descriptors is readable, as [`wait_readable`].
pub(crate) fn wait_readable_any<'f>(
    fds: impl Iterator<Item = BorrowedFd<'f>>,
    timeout: Duration,
) -> Result<bool, Error> {
    let mut polled: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    // A longer time-out would not fit a timespec or an Instant.
    let deadline = Instant::now() + timeout.min(LONGEST_WAIT);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timespec = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut polled, Some(&timespec)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(Error::system("waiting for a descriptor")(errno)),
        }
    }
}

/// Longest single wait: one day, so that no arithmetic on time can overflow. The caller wakes and waits again.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
