//! Random numbers that a seed reproduces: workloads and data sets are replayed with it.
//!
//! Not for secrets: [`crate::scratch::token_file`] asks the system for those.

/// xoshiro256++ by Blackman and Vigna: small, fast, and random enough that a compressor finds nothing.
#[derive(Clone, Debug)]
pub struct Random {
    state: [u64; 4],
}

impl Random {
    /// The sequence of this seed.
    pub fn new(seed: u64) -> Random {
        // The four words come from splitmix64, as its authors advise: they are never all zero.
        let mut word = seed;
        Random {
            state: std::array::from_fn(|_| {
                word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut mixed = word;
                mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                mixed ^ (mixed >> 31)
            }),
        }
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// A number below `bound` (0 if `bound` is 0). The bias of the multiplication is too small for any test here.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// True once in `times` calls, on average.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Incompressible bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.word().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }
}

/// The seed of this run: `REMORA_SEED` if set, else a new one. It is printed, so that a failure can be replayed.
pub fn seed(what: &str) -> u64 {
    let seed = std::env::var(SEED_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok())
        .or_else(|| getrandom::u64().ok())
        .unwrap_or_default();
    eprintln!("{what}: {SEED_VARIABLE}={seed}");
    seed
}

/// The environment variable that replays a run.
const SEED_VARIABLE: &str = "REMORA_SEED";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_sequence_again_and_another_seed_another() {
        let run = |seed| Random::new(seed).bytes(100);
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
        assert_eq!(run(7).len(), 100);
    }

    #[test]
    fn bounds_hold_and_both_ends_occur() {
        let mut random = Random::new(1);
        let drawn: Vec<u64> = (0..1000).map(|_| random.between(3, 6)).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&3), Some(&6)));
        assert_eq!(random.below(0), 0);
    }
}
