//! Pauses between attempts.

use std::time::Duration;

/// Pauses that double from 100 ms to 5 s. Each is drawn between half and the whole of its length, so that many agents
/// that lost the same server do not return at the same time.
///
/// The draws follow from the seed alone. A state machine that is given a `Backoff` stays a pure function of its events.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    next: Duration,
    state: u64,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(100);
    const LAST: Duration = Duration::from_secs(5);

    /// The same seed gives the same pauses.
    pub(crate) fn seeded(seed: u64) -> Backoff {
        Backoff { next: Self::FIRST, state: seed }
    }

    /// Draws the seed from the system's random numbers. Without them it uses the time, which differs between agents as
    /// well.
    pub(crate) fn from_system() -> Backoff {
        let mut seed = [0; 8];
        if getrandom::fill(&mut seed).is_err() {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            seed = (now.as_nanos() as u64).to_le_bytes();
        }
        Backoff::seeded(u64::from_le_bytes(seed))
    }

    /// The pause before the next attempt.
    pub(crate) fn next(&mut self) -> Duration {
        let whole = self.next;
        self.next = (whole * 2).min(Self::LAST);
        let part = (self.draw() >> 11) as f64 / (1_u64 << 53) as f64;
        whole.mul_f64(0.5 + part / 2.0)
    }

    /// An attempt has succeeded: the next pause is a short one again.
    pub(crate) fn reset(&mut self) {
        self.next = Self::FIRST;
    }

    /// SplitMix64.
    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_a_bound_and_are_never_shorter_than_half() {
        for seed in 0..50 {
            let mut backoff = Backoff::seeded(seed);
            let mut whole = Backoff::FIRST;
            for _ in 0..12 {
                let pause = backoff.next();
                assert!(pause >= whole / 2 && pause <= whole, "{pause:?} of {whole:?}");
                whole = (whole * 2).min(Backoff::LAST);
            }
            assert_eq!(whole, Backoff::LAST);
            backoff.reset();
            assert!(backoff.next() <= Backoff::FIRST);
        }
    }

    #[test]
    fn pauses_follow_from_the_seed_alone() {
        let pauses = |seed| {
            let mut backoff = Backoff::seeded(seed);
            std::array::from_fn::<_, 8, _>(|_| backoff.next())
        };
        assert_eq!(pauses(7), pauses(7));
        assert_ne!(pauses(7), pauses(8));
    }
}
