//! Version: the place of a write among all writes of a volume.

use std::fmt;

/// Bits of a version that count the writes of one generation: 200 days at a million writes a second.
const COUNTER_BITS: u32 = 44;

/// Bits of a version for its generation: half a million writers. The highest bit of the word is left free: in the
/// entry of a block it says that the block is being written.
const GENERATION_BITS: u32 = u64::BITS - 1 - COUNTER_BITS;

/// A writer's turn. A later writer has a higher generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(u32);

impl Generation {
    /// Before the first writer.
    pub const NONE: Generation = Generation(0);

    /// The last one: a version has 19 bits for it.
    pub const LAST: Generation = Generation((1 << GENERATION_BITS) - 1);

    /// The generation after this one; `None` after the last.
    pub fn next(self) -> Option<Generation> {
        (self < Generation::LAST).then_some(Generation(self.0 + 1))
    }

    /// Its number, for memory and messages.
    pub fn number(self) -> u32 {
        self.0
    }

    /// The generation of a number; `None` if it is too high.
    pub fn from_number(number: u32) -> Option<Generation> {
        (number <= Generation::LAST.0).then_some(Generation(number))
    }

    /// The version with which this generation begins.
    pub fn start(self) -> Version {
        Version(u64::from(self.0) << COUNTER_BITS)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a write: the generation of its writer, and its number among the writes of that generation. Versions are
/// ordered as the writes are.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u64);

impl Version {
    /// Before the first write.
    pub const NONE: Version = Version(0);

    /// Its word, for memory and messages. The highest bit is 0.
    pub fn word(self) -> u64 {
        self.0
    }

    /// The version of a word; `None` if the highest bit is set.
    pub fn from_word(word: u64) -> Option<Version> {
        (word >> (u64::BITS - 1) == 0).then_some(Version(word))
    }

    /// The generation of the writer.
    pub fn generation(self) -> Generation {
        Generation((self.0 >> COUNTER_BITS) as u32)
    }

    /// The number of the write in its generation; 0 before the first.
    pub fn counter(self) -> u64 {
        self.0 & ((1 << COUNTER_BITS) - 1)
    }

    /// The next write of the same writer; `None` if its generation has no more numbers.
    pub fn next(self) -> Option<Version> {
        let next = Version(self.0.checked_add(1)?);
        (next.generation() == self.generation()).then_some(next)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation(), self.counter())
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_as_the_writes_are() {
        let first = Generation::NONE.next().unwrap_or_default();
        let second = first.next().unwrap_or_default();
        let one = first.start().next().unwrap_or_default();
        assert!(Version::NONE < first.start() && first.start() < one && one < second.start());
        assert_eq!((one.generation(), one.counter(), one.to_string()), (first, 1, "1.1".to_string()));
    }

    #[test]
    fn numbers_end_and_do_not_run_into_the_next_generation() {
        let last = Version(Generation(7).start().0 | ((1 << COUNTER_BITS) - 1));
        assert_eq!((last.generation(), last.next()), (Generation(7), None));
        assert_eq!(Generation::LAST.next(), None);
        assert_eq!(Generation::LAST.start().generation(), Generation::LAST);
        let last = Version(u64::MAX >> 1);
        assert_eq!((last.generation(), last.next()), (Generation::LAST, None));
    }

    #[test]
    fn the_highest_bit_of_a_word_is_free() {
        assert_eq!(Version::from_word(u64::MAX >> 1).map(Version::word), Some(u64::MAX >> 1));
        assert_eq!(Version::from_word(1 << 63), None);
        assert_eq!(Generation::from_number(Generation::LAST.number()), Some(Generation::LAST));
        assert_eq!(Generation::from_number(Generation::LAST.number() + 1), None);
    }
}
