//! A rate limit for all lanes of an exporter together: it decides when the next bytes may be sent, in small pieces. A
//! rate slightly below that of the link keeps its queue short for all other traffic. Pure except [`Pacer::wait`]: the
//! time is an argument.

use std::{
    num::NonZeroU64,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Spaces pieces in time, so that their rate stays below a limit.
#[derive(Debug)]
pub(super) struct Pacer {
    /// Bytes per second.
    rate: NonZeroU64,
    /// When everything admitted so far has been sent at that rate; `None` if nothing was.
    free_at: Mutex<Option<Instant>>,
    /// Set when the exporter ends: no lane waits after that.
    over: AtomicBool,
}

impl Pacer {
    pub(super) fn new(rate: NonZeroU64) -> Pacer {
        Pacer { rate, free_at: Mutex::new(None), over: AtomicBool::new(false) }
    }

    /// Bytes per piece.
    pub(super) fn piece(&self) -> usize {
        let bytes = u128::from(self.rate.get()) * PIECE_TIME.as_micros() / 1_000_000;
        (bytes as usize).clamp(LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
    }

    /// Reserves the time to send `bytes`, and returns how long to wait before. Reservations are served in order.
    fn reserve(&self, now: Instant, bytes: usize) -> Duration {
        // The value is valid after every statement.
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(SAVED).unwrap_or(now);
        let begins = free_at.map_or(now, |free_at| free_at.max(earliest));
        *free_at = Some(begins + Duration::from_secs_f64(bytes as f64 / self.rate.get() as f64));
        begins.saturating_duration_since(now)
    }

    /// Ends all waits soon, and makes further ones return immediately.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Waits until `bytes` may be sent, or `cancelled` returns true. Returns whether they may be sent.
    pub(super) fn wait(&self, bytes: usize, cancelled: impl Fn() -> bool) -> bool {
        let now = Instant::now();
        let until = now + self.reserve(now, bytes);
        loop {
            if cancelled() || self.over.load(Ordering::Relaxed) {
                return false;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(LOOK_TIME));
        }
    }
}

/// Time that one piece takes at the rate: no other sender waits longer behind it.
const PIECE_TIME: Duration = Duration::from_micros(500);

/// Minimum size of a piece: two packets, which network cards send more efficiently together.
const LEAST_PIECE_BYTES: usize = 4 << 10;

/// Maximum size of a piece: that of an answer, after which a revoked region is noticed.
const MOST_PIECE_BYTES: usize = 1 << 20;

/// Time that may be caught up on, because threads wake slightly late. More would be a burst.
const SAVED: Duration = Duration::from_millis(1);

/// Interval at which a waiting lane checks whether to give up.
const LOOK_TIME: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn pacer(rate: u64) -> Pacer {
        Pacer::new(NonZeroU64::new(rate).unwrap())
    }

    proptest! {
        /// However late a sender wakes: in no stretch of time is more sent than the rate, one piece and the saved time
        /// allow.
        #[test]
        fn no_more_leaves_than_the_rate(
            rate in 100_000u64..1_000_000_000,
            late in proptest::collection::vec(0u64..5_000, 2..200),
        ) {
            let pacer = pacer(rate);
            let piece = pacer.piece();
            let mut now = Instant::now();
            let mut left: Vec<Instant> = Vec::new();
            for late in late {
                now += pacer.reserve(now, piece) + Duration::from_micros(late);
                left.push(now);
            }
            for first in 0..left.len() {
                for last in first..left.len() {
                    let bytes = (last - first) * piece;
                    let time = left[last] - left[first] + SAVED + Duration::from_millis(5);
                    prop_assert!(bytes as f64 <= rate as f64 * time.as_secs_f64() + 1.0);
                }
            }
        }
    }

    #[test]
    fn a_sender_that_is_always_slightly_late_still_gets_the_rate() {
        let pacer = pacer(100_000_000);
        let (start, piece) = (Instant::now(), pacer.piece());
        let mut now = start;
        for _ in 0..1000 {
            let wait = pacer.reserve(now, piece);
            now += if wait.is_zero() { Duration::ZERO } else { wait + Duration::from_micros(80) };
        }
        let rate = (1000 * piece) as f64 / (now - start).as_secs_f64();
        assert!((0.99e8..1.01e8).contains(&rate), "{rate}");
    }

    #[test]
    fn pieces_are_short_in_time() {
        assert_eq!(pacer(64 << 10).piece(), LEAST_PIECE_BYTES);
        assert_eq!(pacer(100_000_000).piece(), 50_000);
        assert_eq!(pacer(u64::MAX).piece(), MOST_PIECE_BYTES);
    }

    #[test]
    fn a_cancelled_wait_returns_immediately() {
        let pacer = pacer(1);
        assert!(pacer.wait(1 << 20, || false), "the first may go at once");
        assert!(!pacer.wait(1, || true));
        pacer.end();
        assert!(!pacer.wait(1, || false));
    }
}
