//! Growth: the store of a copy that becomes larger. It is made beside the one that counts, and takes its place at once.
//!
//! ```text
//!   extents with every block ─▶ journal, superblock, everything synced ─▶ the two folders change their names
//! ```
//!
//! Where blocks are in the extents depends on their number, so those of the smaller copy cannot be used.

use std::sync::Arc;

use super::checkpoint::Batch;
use super::extents;
use super::files::{Failure, Files};
use super::journal::Journal;
use super::recovery;
use crate::layout::Layout;
use crate::message::Standing;
use crate::shape::Shape;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Growth<F> {
    files: Arc<F>,
    shape: Shape,
}

impl<F: Files> Growth<F> {
    /// In an empty folder.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn begin(files: F, shape: Shape) -> Result<Growth<F>, Failure> {
        recovery::make_extents(&files, shape)?;
        Ok(Growth { files: Arc::new(files), shape })
    }

    /// The volume as it is to be.
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Its files.
    pub(crate) fn files(&self) -> &Arc<F> {
        &self.files
    }

    /// Writes these blocks, which ascend.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn write(&self, batch: &Batch) -> Result<(), Failure> {
        extents::write(&*self.files, Layout::of(self.shape), batch)
    }

    /// Every block was written, and the copy stands like this. Its segments have numbers that the earlier store's never
    /// had, so that a checkpoint of that one that is under way removes none of them.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn complete(
        &self,
        (number, boot): (u64, [u8; 16]),
        earlier: &Journal<F>,
        standing: Standing,
    ) -> Result<Journal<F>, Failure> {
        let length = Journal::<F>::segment_bytes(Layout::of(self.shape));
        let begins = (earlier.segment() + 1, earlier.scrubbed());
        recovery::complete(Arc::clone(&self.files), self.shape, length, (number, boot), standing, begins)
    }
}
