//! Generates bytes that look like data, faster than any server stores them.
//!
//! xoshiro256++ (Blackman and Vigna), eight bytes per step, seeded through SplitMix64 as its authors advise. It is not
//! for secrets.

/// The bytes of one key. The stream is the same for the same seed and key.
#[derive(Clone, Debug)]
pub(super) struct Content {
    state: [u64; 4],
    compressible: bool,
}

impl Content {
    /// The stream of key `number` for `seed`.
    pub(super) fn of(seed: u64, number: u64, compressible: bool) -> Self {
        let mut mixer = seed ^ number.wrapping_mul(GOLDEN_RATIO).rotate_left(32);
        // Each word is from a step of its own, so they are never all zero: the generator cannot leave that state.
        let state = [(); 4].map(|()| split_mix(&mut mixer));
        Self { state, compressible }
    }

    /// The next random number.
    pub(super) fn next(&mut self) -> u64 {
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

    /// Fills `buffer` with the next bytes.
    pub(super) fn fill(&mut self, buffer: &mut [u8]) {
        match self.compressible {
            false => self.fill_random(buffer),
            true => self.fill_repeating(buffer),
        }
    }

    fn fill_random(&mut self, buffer: &mut [u8]) {
        let mut words = buffer.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        let rest = words.into_remainder();
        let last = self.next().to_le_bytes();
        rest.iter_mut().zip(last).for_each(|(to, from)| *to = from);
    }

    fn fill_repeating(&mut self, buffer: &mut [u8]) {
        for block in buffer.chunks_mut(PATTERN_BYTES * PATTERN_REPEATS) {
            let mut pattern = [0; PATTERN_BYTES];
            self.fill_random(&mut pattern);
            block.iter_mut().zip(pattern.iter().cycle()).for_each(|(to, from)| *to = *from);
        }
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(GOLDEN_RATIO);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// The servers' compressor (LZF) writes a pattern of 16 bytes as 17 bytes and each run of repetitions as 3: 20 of 80
/// bytes, a quarter.
const PATTERN_BYTES: usize = 16;
const PATTERN_REPEATS: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(seed: u64, number: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        Content::of(seed, number, false).fill(&mut bytes);
        bytes
    }

    #[test]
    fn the_same_seed_and_key_give_the_same_bytes_and_others_give_others() {
        assert_eq!(bytes(1, 7, 100), bytes(1, 7, 100));
        assert_ne!(bytes(1, 7, 100), bytes(1, 8, 100));
        assert_ne!(bytes(1, 7, 100), bytes(2, 7, 100));
    }

    #[test]
    fn the_generator_is_the_published_one() {
        // First outputs of the authors' C code for the state 1, 2, 3, 4.
        let mut content = Content { state: [1, 2, 3, 4], compressible: false };
        let numbers = [(); 3].map(|()| content.next());
        assert_eq!(numbers, [41_943_041, 58_720_359, 3_588_806_011_781_223]);
    }

    #[test]
    fn random_bytes_take_every_value_about_equally() {
        let mut counts = [0u32; 256];
        bytes(3, 3, 256 * 1000).into_iter().for_each(|byte| counts[usize::from(byte)] += 1);
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }

    #[test]
    fn compressible_bytes_repeat_and_differ_from_block_to_block() {
        let mut bytes = [0; 160];
        Content::of(1, 1, true).fill(&mut bytes);
        assert_eq!(bytes[..16], bytes[64..80]);
        assert_ne!(bytes[..16], bytes[80..96]);
    }
}
