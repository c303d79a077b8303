//! Pacer: when the next bytes may leave, so that all lanes of an exporter send no more than so many a second, in small pieces one
//! after the other. What a cable can carry and is given in time waits nowhere: a rate a little below the cable's keeps its queue short for
//! everybody else on it. Pure but for [`Pacer::wait`]: it is told the time.

use std::{
    num::NonZeroU64,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Pacer {
    /// Bytes per second.
    rate: NonZeroU64,
    /// When all that was let go so far has left at that rate. `None`: nothing was.
    free_at: Mutex<Option<Instant>>,
    /// Nobody need wait any more.
    over: AtomicBool,
}

impl Pacer {
    pub(super) fn new(rate: NonZeroU64) -> Pacer {
        Pacer { rate, free_at: Mutex::new(None), over: AtomicBool::new(false) }
    }

    /// Bytes that go together.
    pub(super) fn piece(&self) -> usize {
        let bytes = u128::from(self.rate.get()) * PIECE_TIME.as_micros() / 1_000_000;
        (bytes as usize).clamp(LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
    }

    /// Takes a turn for so many bytes; how long to wait before they may leave. Turns are served in the order in which they are taken.
    fn reserve(&self, now: Instant, bytes: usize) -> Duration {
        // Every statement leaves it true.
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(SAVED).unwrap_or(now);
        let begins = free_at.map_or(now, |free_at| free_at.max(earliest));
        *free_at = Some(begins + Duration::from_secs_f64(bytes as f64 / self.rate.get() as f64));
        begins.saturating_duration_since(now)
    }

    /// Whoever waits stops waiting, soon, and nobody waits any more.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Waits until so many bytes may leave, or `cancelled` says meanwhile that it makes no difference any more; whether the time has come.
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

/// What goes together takes so long at the rate: nobody behind it waits for longer.
const PIECE_TIME: Duration = Duration::from_micros(500);

/// ... but no less than two packets, which a card would rather have together,
const LEAST_PIECE_BYTES: usize = 4 << 10;

/// ... nor more than is cut off for a region that may be revoked.
const MOST_PIECE_BYTES: usize = 1 << 20;

/// Time that was missed and is made up for: a thread wakes a little later than it wanted to. More would be a burst.
const SAVED: Duration = Duration::from_millis(1);

/// How often one who waits looks whether there is still something to wait for.
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
        /// Whoever takes turns, however late he wakes: in no stretch of time more leaves than the rate, one piece and what is saved allow.
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
    fn one_who_is_always_a_little_late_still_gets_the_rate() {
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
    fn one_who_gives_up_does_not_wait_for_his_turn() {
        let pacer = pacer(1);
        assert!(pacer.wait(1 << 20, || false), "the first may go at once");
        assert!(!pacer.wait(1, || true));
        pacer.end();
        assert!(!pacer.wait(1, || false));
    }
}
