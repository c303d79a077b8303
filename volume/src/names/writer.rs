//! Writer: the names of a volume as its one writer has them.
//!
//! A change is made in steps: [`Names::prepare`], any of the operations, [`Names::commit`], [`Names::step`]. What they
//! return is written in that order, and what `commit` returns together with the data that it is about.

use std::collections::BTreeSet;

use super::NamesError;
use super::change::New;
use super::clusters::Clusters;
use super::image::Image;
use super::inode::{Attributes, Inode, Kind};
use super::layout::{Area, Geometry, Head};
use super::log::{BlocksToWrite, Log};
use super::record::{FRAME_HEAD_BYTES, MOST_FRAME_BYTES, Malformed, Record};
use super::tree::{ROOT, Tree};
use super::view::{Listed, Usage, View};

// Larger than the bound: what can be done to names is here and in `operations`.
/// See the module's text.
#[derive(Clone, Debug)]
pub struct Names {
    tree: Tree,
    head: Head,
    log: Log,
    image: Option<Image>,
    /// Records of the next frame.
    pending: Vec<Record>,
    /// Bytes of the log for which no part of an image was written.
    owed: u64,
    /// Files whose times are newer in memory than in the log.
    touched: BTreeSet<u64>,
}

/// For each byte of the log, so many bytes of an image are written meanwhile: it is complete before the last quarter
/// of the area is full.
const PACE: u64 = 8;

/// The least that is written of an image at a time.
const LEAST_STEP_BYTES: u64 = 4 << 10;

/// The most that is written of an image at a time. What is owed beyond that is written with the next frames.
const LONGEST_STEP_BYTES: u64 = 32 << 10;

/// The most that [`Names::step`] returns, in bytes. On average it is no more than 32 KiB.
pub const MOST_STEP_BYTES: usize =
    super::image::CHUNK_BYTES + LONGEST_STEP_BYTES as usize + 3 * MOST_FRAME_BYTES + 2 * crate::shape::BLOCK_BYTES;

impl Names {
    /// The blocks that make an empty file system, in their order, whose root is like this.
    pub fn format(geometry: Geometry, root: &New, now: i64) -> Vec<BlocksToWrite> {
        let New { mode, uid, gid, .. } = *root;
        let mode = mode & Attributes::MODE;
        let attributes = Attributes { mode, uid, gid, accessed: now, modified: now, changed: now };
        let made = Record::Made { ino: ROOT, kind: Kind::Directory, attributes, target: Box::default() };
        let mut log = Log::new(geometry, Area::FIRST, 1);
        log.append(&[made, Record::Complete { next: ROOT + 1 }]);
        let image_bytes = log.at();
        let head = Head { geometry, area: Area::FIRST, lap: 1, last_lap: 1, image_bytes, first: 1 };
        vec![log.take(false), BlocksToWrite { first: 0, data: head.to_block() }]
    }

    /// What was read, up to the end of the log. If the volume has more blocks now, they are used.
    ///
    /// # Errors
    /// [`Malformed`]: it was not read to the end.
    pub fn of(view: View, blocks: u64) -> Result<Names, Malformed> {
        let View { mut tree, reader, mut head } = view;
        if !tree.is_complete() {
            return Err(Malformed("the image: it was not read to its end"));
        }
        let log = Log::behind(head.geometry, head.area, &reader);
        let larger = Geometry::with_area(blocks, head.geometry.area());
        if let Some(larger) = larger.filter(|larger| larger.clusters() > head.geometry.clusters()) {
            tree.clusters.grow(larger.clusters());
            head.geometry = larger;
        }
        tree.now_ms = Some(0);
        Ok(Names { tree, head, log, image: None, pending: Vec::new(), owed: 0, touched: BTreeSet::new() })
    }

    /// The head as it is, to be written if the volume has grown.
    pub fn head(&self) -> Head {
        self.head
    }

    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(super) fn clusters(&mut self) -> &mut Clusters {
        &mut self.tree.clusters
    }

    pub(super) fn inode(&mut self, ino: u64) -> Result<&mut Inode, NamesError> {
        self.tree.inodes.get_mut(&ino).map(Box::as_mut).ok_or(NamesError::Stale(ino))
    }

    /// So much time has passed, by a clock that does not jump.
    pub fn tick(&mut self, now_ms: u64) {
        self.tree.now_ms = Some(now_ms);
        self.end_rests(0);
    }

    /// Lets clusters be used again that have rested; and, if fewer than `needed` are free, others that no read is of.
    pub(super) fn end_rests(&mut self, needed: u64) {
        let now_ms = self.tree.now_ms.unwrap_or_default();
        self.tree.clusters.end_rests(needed, now_ms);
    }

    /// A read of a file's clusters begins. Until [`Names::end_read`] none of them is used for another file.
    pub fn begin_read(&mut self) -> u64 {
        self.tree.clusters.begin_read()
    }

    /// The read is over that has begun with this number.
    pub fn end_read(&mut self, number: u64) {
        self.tree.clusters.end_read(number);
    }

    /// Whether there may be more free clusters once a read is over.
    pub fn has_clusters_that_are_read(&self) -> bool {
        self.tree.clusters.wait_for_reads()
    }

    /// Carries out a record, and writes it with the next [`Names::commit`].
    pub(super) fn record(&mut self, record: Record) -> Result<(), NamesError> {
        let set = self.image.as_mut().map(|image| image.change(&self.tree, &record));
        if let Err(why) = self.tree.apply(&record) {
            debug_assert!(false, "{why}: {record:?}");
            return Err(NamesError::Bug(why));
        }
        if let (Some(image), Some(set)) = (&mut self.image, set) {
            image.set(&self.tree, set);
        }
        if matches!(record, Record::Set { .. } | Record::Sized { .. } | Record::Gone { .. }) {
            self.touched.remove(&record.subject());
        }
        self.pending.push(record);
        Ok(())
    }

    /// A file was changed in place. That is written later, with [`Names::settle`]: otherwise every such change would
    /// take a block of the log.
    pub(super) fn touch(&mut self, ino: u64, now: i64) -> Result<(), NamesError> {
        let inode = self.inode(ino)?;
        (inode.attributes.modified, inode.attributes.changed) = (now, now);
        self.touched.insert(ino);
        Ok(())
    }

    /// Writes times of a file that are newer in memory.
    ///
    /// # Errors
    /// [`NamesError::Bug`].
    pub fn settle(&mut self, ino: u64) -> Result<(), NamesError> {
        if !self.touched.remove(&ino) {
            return Ok(());
        }
        let attributes = self.tree.inode_of(ino)?.attributes;
        self.record(Record::Set { ino, attributes })
    }

    /// The next file that [`Names::settle`] is for.
    pub fn unsettled(&self) -> Option<u64> {
        self.touched.first().copied()
    }

    /// Whether an image has room for this number of bytes more.
    pub(super) fn check_room(&self, bytes: u64) -> Result<(), NamesError> {
        let is_room = self.tree.image_bytes() + bytes <= self.head.geometry.image_limit();
        if is_room { Ok(()) } else { Err(NamesError::NoSpace) }
    }

    /// As [`Names::check_room`], unless `is_needless`.
    pub(super) fn check_room_if(&self, bytes: u64, is_needless: bool) -> Result<(), NamesError> {
        if is_needless { Ok(()) } else { self.check_room(bytes) }
    }

    /// Before a change: makes room for its frame. Usually there is some, and nothing is to be written.
    pub fn prepare(&mut self) -> Vec<BlocksToWrite> {
        let mut writes = Vec::new();
        // The second time is for an image that had become longer than it must be.
        for _ in 0..3 {
            if self.log.room() >= (MOST_FRAME_BYTES + FRAME_HEAD_BYTES) as u64 {
                break;
            }
            while self.write_image(LONG_STEP_BYTES, &mut writes) {}
        }
        writes
    }

    /// Writes all of an image at once.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn write_whole_image(&mut self) -> Vec<BlocksToWrite> {
        let mut writes = Vec::new();
        while self.write_image(LONG_STEP_BYTES, &mut writes) {}
        writes
    }

    /// The blocks of the log for what has changed; `None` if nothing has.
    pub fn commit(&mut self) -> Option<BlocksToWrite> {
        if self.pending.is_empty() {
            return None;
        }
        self.owed += self.log.append(&self.pending);
        self.pending.clear();
        Some(self.log.take(false))
    }

    /// After a change was submitted: the next blocks of an image, if one is to be written.
    pub fn step(&mut self) -> Vec<BlocksToWrite> {
        let mut writes = Vec::new();
        if self.image.is_some() || self.log.at() >= self.head.geometry.image_begins_at() {
            let bytes = (self.owed * PACE).clamp(LEAST_STEP_BYTES, LONGEST_STEP_BYTES);
            self.owed = self.owed.saturating_sub(bytes / PACE);
            self.write_image(bytes, &mut writes);
        } else {
            self.owed = 0;
        }
        writes
    }

    /// Writes so much of an image, or begins one. Returns whether something of it is left.
    fn write_image(&mut self, bytes: u64, writes: &mut Vec<BlocksToWrite>) -> bool {
        if self.image.as_ref().is_some_and(Image::is_too_long) {
            self.image = None;
        }
        let image = self.image.get_or_insert_with(|| {
            // No frame that was written in this lap before is there.
            self.head.last_lap += 1;
            writes.push(BlocksToWrite { first: 0, data: self.head.to_block() });
            Image::new(self.head.geometry, self.head.area.other(), self.head.last_lap)
        });
        let is_done = image.step(&self.tree, bytes);
        writes.extend(image.take());
        if !is_done {
            return true;
        }
        if let Some(image) = self.image.take() {
            let (blocks, log, head) = image.finish(&self.tree, &self.head, self.log.number());
            writes.push(blocks);
            writes.push(BlocksToWrite { first: 0, data: head.to_block() });
            (self.log, self.head) = (log, head);
        }
        false
    }

    /// The target of a link.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn target(&self, ino: u64) -> Result<&[u8], NamesError> {
        self.tree.target(ino)
    }

    /// Entries of a directory behind a position, until `each` says `false`.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn list(&self, ino: u64, after: u64, each: impl FnMut(Listed<'_>) -> bool) -> Result<(), NamesError> {
        self.tree.list(ino, after, each)
    }

    /// How much is used.
    pub fn usage(&self) -> Usage {
        self.tree.usage(self.head.geometry.image_limit())
    }
}

/// An image that is needed at once is written in steps of this number of bytes.
const LONG_STEP_BYTES: u64 = 256 << 10;
