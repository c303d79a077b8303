//! Random numbers that follow from a seed: pauses that differ between agents, and test runs that repeat.
// Stands alone: one generator, which knows nothing of its users.

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
