//! Generates bytes that look like data, faster than any server stores them.
//!
//! xoshiro256++ (Blackman and Vigna), eight bytes per step, seeded through SplitMix64 as its authors advise. It is not
//! for secrets.

use std::fmt::Write;

/// What the bytes look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Random: nothing makes them smaller.
    Random,
    /// Patterns that repeat: the servers' own compressor makes a quarter of them.
    Repeating,
    /// Records as applications store them, in JSON.
    Json,
}

/// The bytes of one key. The stream is the same for the same seed and key.
#[derive(Clone, Debug)]
pub(super) struct Content {
    state: [u64; 4],
    look: Look,
    /// The record that is being written, and how much of it was.
    record: String,
    written: usize,
}

impl Content {
    /// The stream of key `number` for `seed`.
    pub(super) fn of(seed: u64, number: u64, look: Look) -> Self {
        let mut mixer = seed ^ number.wrapping_mul(GOLDEN_RATIO).rotate_left(32);
        // Each word is from a step of its own, so they are never all zero: the generator cannot leave that state.
        let state = [(); 4].map(|()| split_mix(&mut mixer));
        Self { state, look, record: String::new(), written: 0 }
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
        match self.look {
            Look::Random => self.fill_random(buffer),
            Look::Repeating => self.fill_repeating(buffer),
            Look::Json => self.fill_json(buffer),
        }
    }

    fn fill_json(&mut self, mut buffer: &mut [u8]) {
        while !buffer.is_empty() {
            if self.written == self.record.len() {
                self.next_record();
            }
            let rest = self.record.as_bytes().get(self.written..).unwrap_or_default();
            let length = rest.len().min(buffer.len());
            let (now, later) = buffer.split_at_mut(length);
            now.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            self.written += length;
            buffer = later;
        }
    }

    /// A record of some 250 bytes, a third of them as random as in an application: numbers, times, names, a session.
    fn next_record(&mut self) {
        let (id, session, when, amounts, words) = (self.next(), self.next(), self.next(), self.next(), self.next());
        let word = |at: u32| WORDS[(words >> (8 * at)) as usize % WORDS.len()];
        let part = |at: u32, below: u64| (when >> (8 * at) & 0xff) % below;
        self.record.clear();
        self.written = 0;
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.record,
            "{{\"id\":{},\"session\":\"{session:016x}\",\"name\":\"{} {}\",\"email\":\"{}.{}@example.org\",\"country\":\"{}\",\
             \"created\":\"2026-{:02}-{:02}T{:02}:{:02}:{:02}Z\",\"balance\":{}.{:02},\"visits\":{},\"active\":{},\
             \"tags\":[\"{}\",\"{}\"],\"address\":{{\"street\":\"{} street\",\"number\":{}}}}}",
            id % 10_000_000_000,
            word(0),
            word(1),
            word(0),
            word(1),
            COUNTRIES[(amounts >> 40) as usize % COUNTRIES.len()],
            1 + part(0, 12),
            1 + part(1, 28),
            part(2, 24),
            part(3, 60),
            part(4, 60),
            amounts % 100_000,
            (amounts >> 20) % 100,
            (amounts >> 30) % 1000,
            amounts >> 63 == 1,
            word(2),
            word(3),
            word(4),
            1 + part(5, 200),
        );
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

/// Words of names and tags.
const WORDS: [&str; 32] = [
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "hazel", "inlet", "jasper", "kestrel", "lagoon",
    "maple", "north", "ocean", "pepper", "quartz", "river", "summit", "tundra", "umber", "valley", "willow", "yarrow",
    "zephyr", "anchor", "beacon", "canyon", "drift", "estuary", "falcon", "glacier",
];

const COUNTRIES: [&str; 8] = ["AT", "BR", "CA", "DE", "FR", "IN", "JP", "ZA"];

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
        Content::of(seed, number, Look::Random).fill(&mut bytes);
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
        let mut content = Content { state: [1, 2, 3, 4], ..Content::of(0, 0, Look::Random) };
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
    fn records_are_json_and_the_same_however_they_are_cut() {
        let mut whole = vec![0; 3000];
        Content::of(1, 1, Look::Json).fill(&mut whole);
        let (mut content, mut cut) = (Content::of(1, 1, Look::Json), vec![0; 3000]);
        cut.chunks_mut(7).for_each(|piece| content.fill(piece));
        assert_eq!(whole, cut);
        let text = String::from_utf8(whole).expect("text");
        let records: Vec<&str> = text.lines().collect();
        assert!(records.len() > 8, "{text}");
        for record in &records[..records.len() - 1] {
            let read: serde_json::Value = serde_json::from_str(record).expect("a record");
            assert!(read["address"]["number"].as_u64() > Some(0), "{record}");
        }
    }

    #[test]
    fn compressible_bytes_repeat_and_differ_from_block_to_block() {
        let mut bytes = [0; 160];
        Content::of(1, 1, Look::Repeating).fill(&mut bytes);
        assert_eq!(bytes[..16], bytes[64..80]);
        assert_ne!(bytes[..16], bytes[80..96]);
    }
}
