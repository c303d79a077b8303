//! The load page: a page of shared memory beside another memory, on which the process that *reads* that memory counts
//! its progress.
//!
//! The agent hands memory to a server, and tells it by other means which bytes to take; the server counts on the load
//! page what it has read. A count means that everything up to it has been read: only then may the agent verify that the
//! bytes were still right, and reuse their place. Not here: the memory itself, and what is counted.
//!
//! ```text
//!    0  magic, version      written once, by the agent
//!   64  done                by the reader of the memory: a count that only grows
//!   72  status text         length, text: why nothing more will be read
//! ```

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use remora_fabric::{Memory, Pages};

use super::StatusText;
use crate::error::Error;

/// Bytes of a load page.
pub const LOAD_PAGE_BYTES: u64 = 4096;

/// One load page, as mapped by either end.
#[derive(Debug)]
pub struct LoadPage {
    memory: Memory,
}

impl LoadPage {
    /// Creates a page with a count of 0.
    ///
    /// # Errors
    /// [`Error::Memory`] if the memory can't be allocated.
    pub fn create() -> Result<LoadPage, Error> {
        let memory = Memory::create("remora-load-page", LOAD_PAGE_BYTES, Pages::Small)?;
        memory.store_u64(MAGIC_AT, MAGIC, Release)?;
        memory.store_u64(VERSION_AT, VERSION, Release)?;
        Ok(LoadPage { memory })
    }

    /// Opens the page that was handed over.
    ///
    /// # Errors
    /// [`Error::Layout`] if it is not a load page, or has another version.
    pub fn adopt(memory: Memory) -> Result<LoadPage, Error> {
        if memory.length() < LOAD_PAGE_BYTES || memory.load_u64(MAGIC_AT, Acquire)? != MAGIC {
            return Err(Error::Layout("not a load page: its first bytes are not the magic, or it is too short".into()));
        }
        match memory.load_u64(VERSION_AT, Acquire)? {
            VERSION => Ok(LoadPage { memory }),
            other => Err(Error::Layout(format!(
                "the load page has version {other}, this reader knows {VERSION}: upgrade the older of the two"
            ))),
        }
    }

    /// The page, for handing it over.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    // --- The reader's side: one process, one thread ---------------------------------------------------------------

    /// Counts one more: nothing of it will be read again.
    pub fn count(&self) {
        self.store(DONE_AT, self.load(DONE_AT, Relaxed).wrapping_add(1));
    }

    /// Records that nothing more will be read, with the reason (truncated to the space on the page). The first reason
    /// stays.
    pub fn refuse(&self, text: &str) {
        if self.load(STATUS_TEXT_AT, Relaxed) != 0 {
            return;
        }
        STATUS_TEXT.write(&self.memory, text);
    }

    // --- The agent's side --------------------------------------------------------------------------------

    /// The count. Everything that the reader read for it was read before.
    pub fn done(&self) -> u64 {
        self.load(DONE_AT, Acquire)
    }

    /// Why nothing more will be read; `None` if there is no such reason.
    pub fn refusal(&self) -> Option<String> {
        STATUS_TEXT.read(&self.memory)
    }

    fn load(&self, at: u64, order: Ordering) -> u64 {
        // Inside the page, at a multiple of eight: checked when the page was created, so this can't fail.
        self.memory.load_u64(at, order).unwrap_or(0)
    }

    fn store(&self, at: u64, word: u64) {
        // As in `load`.
        let stored = self.memory.store_u64(at, word, Release);
        debug_assert!(stored.is_ok(), "a word of the page");
    }
}

/// `REMORATY`, in memory order.
const MAGIC: u64 = u64::from_le_bytes(*b"REMORATY");
const VERSION: u64 = 1;

const MAGIC_AT: u64 = 0;
const VERSION_AT: u64 = 8;
const DONE_AT: u64 = 64;
const STATUS_TEXT_AT: u64 = 72;
/// Maximum length of a status text, in bytes: enough for one of our sentences that quotes a long one of a server's.
const STATUS_TEXT_BYTES: usize = 1024;
const STATUS_TEXT: StatusText = StatusText { at: STATUS_TEXT_AT, most: STATUS_TEXT_BYTES };

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Both ends of one page, each with a mapping of its own.
    fn ends() -> (LoadPage, LoadPage) {
        let ours = LoadPage::create().unwrap();
        let descriptor = ours.memory().as_fd().try_clone_to_owned().unwrap();
        let theirs = LoadPage::adopt(Memory::adopt(descriptor, LOAD_PAGE_BYTES).unwrap()).unwrap();
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
        reader.refuse(&"é".repeat(STATUS_TEXT_BYTES));
        reader.refuse("another");
        assert_eq!(watcher.refusal().unwrap(), "é".repeat(STATUS_TEXT_BYTES / 2));
    }

    #[test]
    fn memory_that_is_not_a_load_page_is_refused() {
        let other = Memory::create("other", LOAD_PAGE_BYTES, Pages::Small).unwrap();
        assert!(matches!(LoadPage::adopt(other), Err(Error::Layout(_))));
        let newer = LoadPage::create().unwrap();
        newer.store(VERSION_AT, VERSION + 1);
        assert!(LoadPage::adopt(newer.memory).unwrap_err().to_string().contains("upgrade the older"));
    }
}
