//! Limit: how many bytes the reader may request now to keep a rate in bytes per second. Pure: the caller hands the time
//! in.
//!
//! The reader keeps the limit: the end that is read does not notice a one-sided read. Bytes of the stream always go
//! first. They are subtracted as well, below zero if necessary, and slots then wait.

use std::time::{Duration, Instant};

/// A rate limit in bytes per second.
#[derive(Debug)]
pub(super) struct Limit {
    /// Bytes per second; 0: no limit.
    rate: u64,
    /// Bytes that can be requested; below 0: bytes that were requested beyond the limit.
    tokens: f64,
    last: Instant,
}

/// The time for which unused allowance accumulates: what was not used for longer is lost, and never becomes a burst.
const SAVED: Duration = Duration::from_millis(100);

impl Limit {
    pub(super) fn new(now: Instant, rate: u64) -> Limit {
        Limit { rate, tokens: 0.0, last: now }
    }

    /// Whether there is a limit.
    pub(super) fn is_set(&self) -> bool {
        self.rate > 0
    }

    pub(super) fn set_rate(&mut self, rate: u64) {
        self.rate = rate;
    }

    /// Bytes that can be requested now. The caller requests while this is above 0, and [`spend`](Self::spend)s what it
    /// requested.
    pub(super) fn allowance(&mut self, now: Instant) -> i64 {
        if self.rate == 0 {
            return i64::MAX;
        }
        let gained = now.duration_since(self.last).as_secs_f64() * self.rate as f64;
        let most = (SAVED.as_secs_f64() * self.rate as f64).max(1.0);
        self.tokens = (self.tokens + gained).min(most);
        self.last = now;
        self.tokens as i64
    }

    /// Subtracts bytes that were requested, or that arrived.
    pub(super) fn spend(&mut self, bytes: u64) {
        if self.rate > 0 {
            self.tokens -= bytes as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that a reader gets in ten seconds if it requests a piece each millisecond that the limit permits.
    fn run(rate: u64, piece: u64, stream: u64) -> u64 {
        let start = Instant::now();
        let mut limit = Limit::new(start, rate);
        let mut got = 0;
        for tick in 0..10_000 {
            limit.spend(stream / 1000);
            if limit.allowance(start + Duration::from_millis(tick)) > 0 {
                limit.spend(piece);
                got += piece;
            }
        }
        got
    }

    #[test]
    fn no_more_comes_than_the_rate_and_hardly_less() {
        for (rate, piece) in [(10_000_000, 1 << 20), (1_000_000, 1 << 20), (50_000_000, 65_536), (300_000, 4096)] {
            let got = run(rate, piece, 0);
            let want = rate * 10;
            assert!(got <= want + want / 20 + piece && got + want / 20 + piece >= want, "{got} of {want}");
        }
    }

    #[test]
    fn the_stream_comes_first_and_the_rest_gets_what_is_left() {
        let got = run(10_000_000, 65_536, 6_000_000);
        assert!((38_000_000..=42_000_000).contains(&got), "{got}");
        assert_eq!(run(10_000_000, 65_536, 12_000_000), 0, "the stream alone is beyond the limit");
    }

    #[test]
    fn without_a_rate_there_is_no_limit() {
        let now = Instant::now();
        let mut limit = Limit::new(now, 0);
        limit.spend(u64::MAX);
        assert_eq!(limit.allowance(now), i64::MAX);
    }
}
