//! How long to wait before the next attempt to connect.

use std::time::Duration;

use crate::policy::Policy;

/// Attempts that failed in a row. Pauses double, and vary at random.
pub(super) struct Retries {
    failures: u32,
    jitter: u64,
}

impl Retries {
    /// `seed`: any number that differs between sessions.
    pub(super) fn new(seed: u64) -> Retries {
        Retries { failures: 0, jitter: seed | 1 }
    }

    /// An attempt has succeeded.
    pub(super) fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// An attempt has failed. Returns how long to wait before the next one.
    pub(super) fn failed(&mut self, policy: &Policy) -> Duration {
        self.failures += 1;
        let doubled = policy.first_pause * 2u32.saturating_pow(self.failures.min(20) - 1);
        let pause = doubled.min(policy.longest_pause);
        pause / 2 + pause.mul_f64(self.random() / 2.0)
    }

    /// A number from 0 to 1 (xorshift): enough to keep sessions that broke together from connecting together.
    fn random(&mut self) -> f64 {
        self.jitter ^= self.jitter << 13;
        self.jitter ^= self.jitter >> 7;
        self.jitter ^= self.jitter << 17;
        (self.jitter >> 11) as f64 / (1u64 << 53) as f64
    }
}
