//! Pace: how long to pause between attempts, how fast an offset grows, and random numbers that follow from a seed.
//! Pure: seed and time are handed in.

use std::time::{Duration, Instant};

use crate::mutation::Mutation;

/// Pauses that double from 100 ms to 5 s. Each is drawn between half and the whole of its length, so that many agents
/// that lost the same server do not return at the same time.
///
/// The draws follow from the seed alone. A state machine that is given a `Backoff` stays a pure function of its events.
#[derive(Clone, Debug)]
pub struct Backoff {
    next: Duration,
    draws: Random,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(100);
    const LAST: Duration = Duration::from_secs(5);

    /// The same seed gives the same pauses.
    pub fn seeded(seed: u64) -> Backoff {
        Backoff { next: Self::FIRST, draws: Random::seeded(seed) }
    }

    /// Draws the seed from the system's random numbers. Without them it uses the time, which differs between agents as
    /// well.
    pub fn from_system() -> Backoff {
        Backoff { next: Self::FIRST, draws: Random::from_system() }
    }

    /// The pause before the next attempt.
    #[allow(clippy::should_implement_trait, reason = "it has no end, and nobody collects pauses")]
    pub fn next(&mut self) -> Duration {
        let whole = self.next;
        self.next = (whole * 2).min(Self::LAST);
        if Mutation::NoJitter.is_active() {
            return whole;
        }
        whole.mul_f64(0.5 + self.draws.fraction() / 2.0)
    }

    /// An attempt has succeeded: the next pause is a short one again.
    pub fn reset(&mut self) {
        self.next = Self::FIRST;
    }
}

/// The last look at an offset.
#[derive(Debug, Default)]
pub struct Growth(Option<(Instant, u64)>);

impl Growth {
    /// The offset at the last look.
    pub fn last(&self) -> Option<u64> {
        self.0.map(|(_, offset)| offset)
    }

    /// Takes a look, and returns the bytes per second since the last one. `None` for the first look, and if the last
    /// one is less than `least` ago: it then stays the last one. An offset that became smaller has not grown: a server
    /// that restarted, or changed its history, may have a lower one.
    pub fn look(&mut self, now: Instant, offset: u64, least: Duration) -> Option<f64> {
        let Some((then, before)) = self.0 else {
            self.0 = Some((now, offset));
            return None;
        };
        let time = now.saturating_duration_since(then);
        if time < least {
            return None;
        }
        self.0 = Some((now, offset));
        Some(offset.saturating_sub(before) as f64 / time.as_secs_f64())
    }
}

// Random numbers that follow from a seed: pauses that differ between agents, and test runs that repeat.

/// Draws numbers by SplitMix64. The same seed gives the same numbers for ever, so a test can name a seed. They are no
/// secrets: nonces and keys come from the system.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Begins with this seed, which may be any number.
    pub const fn seeded(seed: u64) -> Random {
        Random(seed)
    }

    /// Draws the seed from the system's random numbers. Without them it uses the time, which differs between processes
    /// as well.
    pub fn from_system() -> Random {
        let mut seed = [0; 8];
        if getrandom::fill(&mut seed).is_err() {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            seed = (now.as_nanos() as u64).to_le_bytes();
        }
        Random(u64::from_le_bytes(seed))
    }

    /// Draws a number; all 64 bits are equally likely.
    pub const fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// All numbers that follow, as seeds for runs of a test.
    pub fn draws(mut self) -> impl Iterator<Item = u64> {
        std::iter::repeat_with(move || self.draw())
    }

    /// Draws a number from 0 up to 1, without 1: as many bits as a float has.
    pub fn fraction(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
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

    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        // The first ones of the reference program (Vigna) for the seed 1234567.
        let mut random = Random::seeded(1_234_567);
        let drawn = [(); 3].map(|()| random.draw());
        assert_eq!(drawn, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn a_fraction_is_below_one() {
        let mut random = Random::seeded(7);
        for _ in 0..1000 {
            assert!((0.0..1.0).contains(&random.fraction()));
        }
    }
}
