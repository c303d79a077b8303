//! Pacer: when to write again to a socket that was full.
//!
//! A socket becomes writable for every few kilobytes that its reader took. A writer that writes each time takes the
//! processor from the reader that it feeds: on two cores a server was interrupted 9,000 times while it loaded one
//! gigabyte, and used half as much processor time again. So the writer pauses for about as long as the reader needs for
//! [`WORTHWHILE`] bytes, and never so long that the socket runs empty.
//!
//! ```text
//!   full ── pause ──▶ write until full again: how much went in?
//!     ▲                  less than worthwhile ──▶ pause twice as long
//!     └──────────────────  nearly all it holds ──▶ pause half as long
//! ```

use std::time::{Duration, Instant};

/// Decides when to write again to a socket that was full.
#[derive(Debug, Default)]
pub(super) struct Pacer {
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
    pub(super) fn full(&mut self, now: Instant, written: u64, held: u64) {
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
    pub(super) fn until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
