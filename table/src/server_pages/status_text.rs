//! A sentence in shared memory: its length, then its bytes. One process writes it, another reads it; a page that either end may
//! have spoilt gives at most the bytes that there is room for.

use std::sync::atomic::Ordering::{Acquire, Release};

use remora_fabric::{Memory, View};

/// Where a sentence lies: at a multiple of eight, eight bytes of length and then the text.
#[derive(Clone, Copy)]
pub(crate) struct StatusText {
    /// Bytes from the start of the memory.
    pub(crate) at: u64,
    /// Bytes of the text, at most.
    pub(crate) most: usize,
}

impl StatusText {
    /// Writes it, cut between letters to what fits. Whoever sees its length sees its bytes.
    pub(crate) fn write(self, memory: &Memory, sentence: &str) {
        let mut length = sentence.len().min(self.most);
        while !sentence.is_char_boundary(length) {
            length -= 1;
        }
        let text = sentence.as_bytes().get(..length).unwrap_or_default();
        let written =
            memory.write(self.at + 8, text).and_then(|()| memory.store_u64(self.at, text.len() as u64, Release));
        debug_assert!(written.is_ok(), "a sentence inside the page");
    }

    /// Reads it; `None` if there is none.
    pub(crate) fn read(self, memory: &View) -> Option<String> {
        let length = usize::try_from(memory.load_u64(self.at, Acquire).ok()?).unwrap_or(0).min(self.most);
        let mut text = vec![0; length];
        memory.read(self.at + 8, &mut text).ok()?;
        (length > 0).then(|| String::from_utf8_lossy(&text).into_owned())
    }
}
