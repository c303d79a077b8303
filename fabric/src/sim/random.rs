//! The random numbers of the simulation: SplitMix64. They never change, because a seed that is written down in a test
//! must mean the same run after every upgrade. Not for secrets.

use std::ops::RangeInclusive;

use super::faults::Chance;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// The stream of `number` among those that share a seed.
    pub fn split(seed: u64, number: u64) -> Random {
        Random::new(Random::new(seed ^ number.wrapping_mul(GOLDEN_GAMMA)).next())
    }

    /// The next number.
    #[allow(clippy::should_implement_trait)] // an iterator that never ends would need an unwrap at each use
    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of a 128-bit product: even enough for tests, and without a division.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in a range; its start if the range is empty.
    pub fn within(&mut self, range: &RangeInclusive<u32>) -> u32 {
        let span = u64::from(range.end().saturating_sub(*range.start()));
        range.start().saturating_add(self.below(span + 1) as u32)
    }

    /// Draws whether an event of this probability happens.
    pub fn happens(&mut self, chance: Chance) -> bool {
        self.below(u64::from(Chance::ALWAYS.0)) < u64::from(chance.0)
    }

    /// Shuffles a slice.
    pub fn shuffle<T>(&mut self, things: &mut [T]) {
        for end in (1..things.len()).rev() {
            things.swap(end, self.below(end as u64 + 1) as usize);
        }
    }

    /// Fills `bytes` with random ones.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let random = self.next().to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }
}

/// 2^64 divided by the golden ratio: SplitMix64's step.
const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_splitmix64_for_ever() {
        // The reference implementation's first outputs for the seed 1234567.
        let mut random = Random::new(1_234_567);
        assert_eq!(
            [random.next(), random.next(), random.next()],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn what_never_happens_never_does_and_what_always_happens_always_does() {
        let mut random = Random::new(1);
        for _ in 0..1000 {
            assert!(!random.happens(Chance::NEVER));
            assert!(random.happens(Chance::ALWAYS));
            assert!((3..=5).contains(&random.within(&(3..=5))));
            assert!(random.below(7) < 7);
        }
    }

    #[test]
    fn a_shuffle_loses_nothing() {
        let mut things: Vec<u32> = (0..100).collect();
        Random::new(2).shuffle(&mut things);
        assert_ne!(things, (0..100).collect::<Vec<_>>());
        things.sort_unstable();
        assert_eq!(things, (0..100).collect::<Vec<_>>());
    }
}
