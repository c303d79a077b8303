//! Refused: files of which a page cache has accepted bytes that the volume has refused.
//!
//! The process that wrote them was answered before: it wrote to mapped memory. If what it writes next went on, the file
//! would have a hole among what it has written, and a later `fsync` would say that all is well. So nothing more of the
//! file is written or flushed until what was lost no longer matters: the file is cut before it, or no process has the
//! file open.

use std::collections::HashMap;

use super::error::FilesError;
use super::parts::Content;
#[cfg(test)]
use crate::mutant::Mutant;

/// See the module's text. One entry for each such file that is open.
#[derive(Default)]
pub(super) struct Refused(HashMap<u64, Lost>);

/// What a file lacks.
struct Lost {
    /// The first byte of it.
    first: u64,
    /// Why it was refused.
    error: FilesError,
}

impl Refused {
    /// A page cache is told that it cannot keep what it has accepted of a file, from this byte on.
    pub(super) fn note(&mut self, ino: u64, offset: u64, error: &FilesError) {
        let lost = self.0.entry(ino).or_insert_with(|| Lost { first: offset, error: error.clone() });
        lost.first = lost.first.min(offset);
    }

    /// The same, if this change is of such bytes.
    pub(super) fn note_write(&mut self, content: &Content, error: &FilesError) {
        if let Content::Write { ino, offset, is_cached: true, .. } = content {
            self.note(*ino, *offset, error);
        }
    }

    /// Whether a file can be written and flushed.
    ///
    /// # Errors
    /// Why its bytes were refused.
    pub(super) fn check(&self, ino: u64) -> Result<(), FilesError> {
        #[cfg(test)]
        if Mutant::RefusedOnce.is_active() {
            return Ok(());
        }
        self.0.get(&ino).map_or(Ok(()), |lost| Err(lost.error.clone()))
    }

    /// A file was cut to this size.
    pub(super) fn cut(&mut self, ino: u64, size: u64) {
        if self.0.get(&ino).is_some_and(|lost| size <= lost.first) {
            self.0.remove(&ino);
        }
    }

    /// No process has the file open.
    pub(super) fn forget(&mut self, ino: u64) {
        self.0.remove(&ino);
    }
}
