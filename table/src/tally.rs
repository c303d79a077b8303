//! The tally: one page beside a memory on which the process that *reads* it says how far it is.
//!
//! The agent shows a server memory, and tells it by other means which bytes to take; the server counts on the tally what it has done.
//! Whoever has seen a count knows that everything up to it has been read, and may then look whether the bytes were still what they
//! should have been, and use their place again. Not here: the memory itself, and what is counted.
//!
//! ```text
//!    0  magic, version      written once, by whoever shows the memory
//!   64  done                by whoever reads it: a count that only grows
//!   72  a sentence          length, text: why it will do no more
//! ```

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use remora_fabric::{Memory, Pages};

use crate::error::Error;
use crate::sentence::Sentence;

/// Bytes of a tally.
pub const TALLY_BYTES: u64 = 4096;

/// One tally, as either end has it.
#[derive(Debug)]
pub struct Tally {
    memory: Memory,
}

impl Tally {
    /// A fresh one: nothing is done.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is no memory.
    pub fn create() -> Result<Tally, Error> {
        let memory = Memory::create("remora-tally", TALLY_BYTES, Pages::Small)?;
        memory.store_u64(MAGIC_AT, MAGIC, Release)?;
        memory.store_u64(VERSION_AT, VERSION, Release)?;
        Ok(Tally { memory })
    }

    /// The one that was handed over.
    ///
    /// # Errors
    /// [`Error::Layout`] if it is none, or of another version.
    pub fn adopt(memory: Memory) -> Result<Tally, Error> {
        if memory.length() < TALLY_BYTES || memory.load_u64(MAGIC_AT, Acquire)? != MAGIC {
            return Err(Error::Layout("what was handed over as a tally is none".into()));
        }
        match memory.load_u64(VERSION_AT, Acquire)? {
            VERSION => Ok(Tally { memory }),
            other => Err(Error::Layout(format!(
                "the tally is of version {other}, this reader knows {VERSION}: upgrade the older of the two"
            ))),
        }
    }

    /// The page, to be handed over.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    // --- The reader's side: one process, one thread ---------------------------------------------------------------

    /// One more is done: nothing of it will be read again.
    pub fn count(&self) {
        self.store(DONE_AT, self.load(DONE_AT, Relaxed).wrapping_add(1));
    }

    /// Nothing more will be done, and why. What is longer than the page has room for is cut; the first sentence stays.
    pub fn refuse(&self, sentence: &str) {
        if self.load(SENTENCE_AT, Relaxed) != 0 {
            return;
        }
        SENTENCE.write(&self.memory, sentence);
    }

    // --- The side of whoever shows the memory -----------------------------------------------------------------------

    /// How many are done. Whatever the reader read for them, it read before.
    pub fn done(&self) -> u64 {
        self.load(DONE_AT, Acquire)
    }

    /// Why nothing more will be done; `None` while all is well.
    pub fn refusal(&self) -> Option<String> {
        SENTENCE.read(&self.memory)
    }

    fn load(&self, at: u64, order: Ordering) -> u64 {
        // Inside the page, at a multiple of eight: checked when it was made, so that this can't fail.
        self.memory.load_u64(at, order).unwrap_or(0)
    }

    fn store(&self, at: u64, word: u64) {
        // As above.
        let stored = self.memory.store_u64(at, word, Release);
        debug_assert!(stored.is_ok(), "a word of the tally");
    }
}

/// `REMORATY`, as its bytes lie in memory.
const MAGIC: u64 = u64::from_le_bytes(*b"REMORATY");
const VERSION: u64 = 1;

const MAGIC_AT: u64 = 0;
const VERSION_AT: u64 = 8;
const DONE_AT: u64 = 64;
const SENTENCE_AT: u64 = 72;
/// Bytes of a sentence, at most: a long one of a server's within one of ours.
const SENTENCE_BYTES: usize = 1024;
const SENTENCE: Sentence = Sentence { at: SENTENCE_AT, most: SENTENCE_BYTES };

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Both ends of one tally, each with a mapping of its own.
    fn ends() -> (Tally, Tally) {
        let ours = Tally::create().unwrap();
        let descriptor = ours.memory().as_fd().try_clone_to_owned().unwrap();
        let theirs = Tally::adopt(Memory::adopt(descriptor, TALLY_BYTES).unwrap()).unwrap();
        (ours, theirs)
    }

    #[test]
    fn what_one_end_counts_the_other_sees() {
        let (watcher, reader) = ends();
        assert_eq!((watcher.done(), watcher.refusal()), (0, None));
        reader.count();
        reader.count();
        assert_eq!(watcher.done(), 2);
    }

    #[test]
    fn the_first_reason_stays_and_is_cut_to_what_fits() {
        let (watcher, reader) = ends();
        reader.refuse(&"é".repeat(SENTENCE_BYTES));
        reader.refuse("another");
        assert_eq!(watcher.refusal().unwrap(), "é".repeat(SENTENCE_BYTES / 2));
    }

    #[test]
    fn what_is_no_tally_is_refused() {
        let other = Memory::create("other", TALLY_BYTES, Pages::Small).unwrap();
        assert!(matches!(Tally::adopt(other), Err(Error::Layout(_))));
        let newer = Tally::create().unwrap();
        newer.store(VERSION_AT, VERSION + 1);
        assert!(Tally::adopt(newer.memory).unwrap_err().to_string().contains("upgrade the older"));
    }
}
