//! Pages of shared memory on which an agent and our module in a server exchange orders and progress.
//!
//! ```text
//!   source agent  ── capture page ── the server's fork child, which writes long strings into the snapshot's table
//!   replica agent ── load page ───── the server, which loads long strings out of the agent's memory
//! ```
//!
//! * [`capture_page`]: what the fork child is to write where, and how far it is.
//! * [`load_page`]: how many references into the memory the server has used.
//! * `status_text`: a text on either page.
//!
//! Not here: how a page reaches the other process (`remora_fabric::Handover`).

pub mod capture_page;
pub mod load_page;

use std::sync::atomic::Ordering::{Acquire, Release};

use remora_fabric::{Memory, View};

// A text in shared memory: its length, then its bytes. One process writes it, another reads it. If either end has
// corrupted the page, the reader gets at most the bytes that there is space for.

/// The place of a text: at a multiple of eight, eight bytes of length and then the text.
#[derive(Clone, Copy)]
pub(crate) struct StatusText {
    /// Bytes from the start of the memory.
    pub(crate) at: u64,
    /// Maximum length of the text, in bytes.
    pub(crate) most: usize,
}

impl StatusText {
    /// Writes the text, truncated between characters to the space. A reader that sees the length also sees the bytes.
    pub(crate) fn write(self, memory: &Memory, text: &str) {
        let mut length = text.len().min(self.most);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        let bytes = text.as_bytes().get(..length).unwrap_or_default();
        let written =
            memory.write(self.at + 8, bytes).and_then(|()| memory.store_u64(self.at, bytes.len() as u64, Release));
        debug_assert!(written.is_ok(), "a text inside the page");
    }

    /// Reads the text; `None` if there is none.
    pub(crate) fn read(self, memory: &View) -> Option<String> {
        let length = usize::try_from(memory.load_u64(self.at, Acquire).ok()?).unwrap_or(0).min(self.most);
        let mut text = vec![0; length];
        memory.read(self.at + 8, &mut text).ok()?;
        (length > 0).then(|| String::from_utf8_lossy(&text).into_owned())
    }
}
