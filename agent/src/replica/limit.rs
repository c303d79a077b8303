//! Limit: how many bytes may be asked for now, so that no more than so many a second come in the long run. Pure: it is told the time.
//!
//! A limit is kept by whoever *reads*: a one-sided read is not noticed by the one that is read, so that nobody else could keep it.
//! Bytes that come without asking (the stream, which always goes first) are taken off as well, below zero if need be; what may
//! wait then waits.

use std::time::{Duration, Instant};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Limit {
    /// Bytes per second; 0: no limit.
    rate: u64,
    /// Bytes that may be asked for; below 0 what was asked for too much.
    tokens: f64,
    last: Instant,
}

/// How long a limit saves up what was not used: what was missed while nothing was to be had is not made up for in a burst.
const SAVED: Duration = Duration::from_millis(100);

impl Limit {
    pub(super) fn new(now: Instant, rate: u64) -> Limit {
        Limit { rate, tokens: 0.0, last: now }
    }

    /// There is one.
    pub(super) fn is_set(&self) -> bool {
        self.rate > 0
    }

    pub(super) fn set_rate(&mut self, rate: u64) {
        self.rate = rate;
    }

    /// Bytes that may be asked for now: ask while it is above 0, and [`spend`](Self::spend) what was asked for.
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

    /// So many bytes were asked for, or came.
    pub(super) fn spend(&mut self, bytes: u64) {
        if self.rate > 0 {
            self.tokens -= bytes as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes got in ten seconds by one who asks for a piece whenever it may, every millisecond.
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
