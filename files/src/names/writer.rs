//! Writer: the names of a volume as its one writer has them.
//!
//! A change is made in steps: [`Names::prepare`], any of the operations, [`Names::commit`], [`Names::step`]. What they
//! return is written in that order, and what `commit` returns together with the data that it is about.

use std::collections::BTreeSet;

use remora_volume::shape::BLOCK_BYTES;

use super::clusters::{Clusters, Run, Runs, Space};
use super::inode::{
    self, Acl, Attr, Attributes, Body, CAPABILITIES, Inode, Kind, MOST_LINKS, MOST_TARGET_BYTES, MOST_XATTR_BYTES,
    Namespace, SET_GROUP_ID, Xattrs, is_xattr_name, without_set_id,
};
use super::layout::{Area, CLUSTER_BYTES, Geometry, Head};
use super::log::{
    BlocksToWrite, Log, LogReader, MOST_FRAME_BYTES, MOST_NAME_BYTES, MOST_PUT_OFF, Malformed, Next, ROOM_OF_A_CHANGE,
    Record, is_name,
};
use super::tree::{
    CHUNK_BYTES, Image, Late, New, NewKind, ROOT, RUN_BYTES, Rename, SetAttributes, SetTime, SetXattr, SetXattrHow,
    Tree, entry_bytes, xattr_bytes,
};
use super::{MOST_FILE_BYTES, MOST_FILE_CLUSTERS, MOST_INODES, NamesError};

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Names {
    tree: Tree,
    head: Head,
    log: Log,
    image: Option<Image>,
    /// Records of the next frame.
    pending: Vec<Record>,
    /// The first of them, so many, are put off: they get a frame of their own before it.
    put_off: usize,
    /// Bytes of the log for which no part of an image was written.
    owed: u64,
    /// Files whose times are newer in memory than in the log.
    touched: BTreeSet<u64>,
    /// Files that were made without a name, and may get one.
    linkable: BTreeSet<u64>,
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
    CHUNK_BYTES + LONGEST_STEP_BYTES as usize + 3 * MOST_FRAME_BYTES + 2 * remora_volume::shape::BLOCK_BYTES;

impl Names {
    /// The blocks that make an empty file system, in their order, whose root is like this.
    pub fn format(geometry: Geometry, root: &New, now: i64) -> Vec<BlocksToWrite> {
        let New { mode, uid, gid, .. } = *root;
        let mode = mode & Attributes::MODE;
        let attributes = Attributes { mode, uid, gid, accessed: now, modified: now, changed: now };
        let made = Record::Made { ino: ROOT, kind: Kind::Directory, attributes, device: 0, target: Box::default() };
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
        let larger = head.geometry.of_larger(blocks);
        if let Some(larger) = larger.filter(|larger| larger.clusters() > head.geometry.clusters()) {
            tree.clusters.grow(larger.clusters());
            head.geometry = larger;
        }
        (tree.now_ms, tree.late) = (Some(0), None);
        Ok(Names {
            tree,
            head,
            log,
            image: None,
            pending: Vec::new(),
            put_off: 0,
            owed: 0,
            touched: BTreeSet::new(),
            linkable: BTreeSet::new(),
        })
    }

    /// Begins to move the names to larger areas, if the volume has grown and so many free clusters are neighbours.
    /// Nothing else must be done until [`Names::go_on_to_move`] has said that they have moved.
    pub fn begin_to_move(&mut self) -> bool {
        let larger = self.head.geometry.wants_room().and_then(|count| {
            let space = self.tree.clusters.find_last(count)?;
            let larger = self.head.geometry.moved(space.at, space.count)?;
            self.tree.clusters.take(space).then_some(larger)
        });
        let Some(larger) = larger else { return false };
        self.head.last_lap += 1;
        self.image = Some(Image::new(larger, Area::FIRST, self.head.last_lap));
        true
    }

    /// What is to be written next, in this order, and whether that was all. A crash before the last block leaves the
    /// names where they were.
    pub fn go_on_to_move(&mut self) -> (Vec<BlocksToWrite>, bool) {
        let (mut writes, before) = (Vec::new(), self.head.geometry);
        // Frames that an interrupted move of before has left have another lap.
        if self.image.as_ref().is_some_and(Image::is_new) {
            writes.push(BlocksToWrite { first: 0, data: self.head.to_block() });
        }
        #[cfg(test)]
        let early = self.image.as_ref().map(|image| Head { geometry: image.geometry(), ..self.head });
        let is_left = self.write_image(LONG_STEP_BYTES, &mut writes);
        #[cfg(test)]
        if crate::Mutant::HeadBeforeItsAreas.is_active()
            && let Some(head) = early
        {
            writes.insert(0, BlocksToWrite { first: 0, data: head.to_block() });
        }
        if !is_left && let Some((at, count)) = before.clusters_of_areas() {
            self.tree.clusters.give_later(Space { at, count }, self.tree.now_ms.unwrap_or_default());
        }
        (writes, !is_left)
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
        if let Record::Gone { ino } = record {
            self.linkable.remove(&ino);
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

    /// Whether [`Names::settle`] has something to write of this file.
    pub fn is_unsettled(&self, ino: u64) -> bool {
        self.touched.contains(&ino)
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

    /// Before a change: makes room for its frame, and for one before it. Usually there is some, and nothing is to be
    /// written.
    pub fn prepare(&mut self) -> Vec<BlocksToWrite> {
        let mut writes = Vec::new();
        if self.keeps_its_log() {
            return writes; // there was room when something was put off
        }
        // The second time is for an image that had become longer than it must be.
        for _ in 0..3 {
            if self.log.room() >= ROOM_OF_A_CHANGE {
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
        let (before, change) = self.pending.split_at(self.put_off);
        for records in [before, change].into_iter().filter(|records| !records.is_empty()) {
            self.owed += self.log.append(records);
        }
        self.pending.clear();
        self.put_off = 0;
        Some(self.log.take(false))
    }

    /// Instead of [`Names::commit`], after a change that nobody waits for: if it has only ended inodes, that is written
    /// with the next change. If the writer dies before, the next one ends them. `false`: it is to be committed.
    pub fn put_off(&mut self) -> bool {
        let is_end = |record: &Record| matches!(record, Record::Gone { .. });
        let may_wait = self.pending.len() <= MOST_PUT_OFF && self.pending.iter().all(is_end);
        self.put_off = if may_wait { self.pending.len() } else { self.put_off };
        may_wait
    }

    /// After a change was submitted: the next blocks of an image, if one is to be written.
    pub fn step(&mut self) -> Vec<BlocksToWrite> {
        let mut writes = Vec::new();
        if self.keeps_its_log() {
            return writes;
        }
        if self.image.is_some() || self.log.at() >= self.head.geometry.image_begins_at() {
            let bytes = (self.owed * PACE).clamp(LEAST_STEP_BYTES, LONGEST_STEP_BYTES);
            self.owed = self.owed.saturating_sub(bytes / PACE);
            self.write_image(bytes, &mut writes);
        } else {
            self.owed = 0;
        }
        writes
    }

    /// Whether no image may take the place of the log now: it knows of what was put off, so a log behind it could not
    /// have that any more.
    fn keeps_its_log(&self) -> bool {
        #[cfg(test)]
        if crate::Mutant::PutOffPastTheImage.is_active() {
            return false;
        }
        self.put_off > 0
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

    /// What an entry stands for.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, NamesError> {
        self.tree().lookup(parent, name)
    }

    /// What is known of an inode.
    ///
    /// # Errors
    /// [`NamesError::Stale`].
    pub fn attr(&self, ino: u64) -> Result<Attr, NamesError> {
        Ok(self.tree().inode_of(ino)?.attr(ino))
    }

    /// Makes an inode, and a name for it.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn create(&mut self, parent: u64, name: &[u8], new: New, now: i64) -> Result<Attr, NamesError> {
        self.check_new_name(parent, name)?;
        let ino = self.make(parent, new, Some(name), now)?;
        self.record(Record::Named { parent, ino, time: now, name: name.into() })?;
        self.attr(ino)
    }

    /// Makes a file without a name, which is held once. If `is_linkable`, [`Names::link`] gives it one.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn create_unnamed(&mut self, parent: u64, new: New, is_linkable: bool, now: i64) -> Result<Attr, NamesError> {
        let inode = self.tree().inode_of(parent)?;
        if inode.kind() != Kind::Directory {
            return Err(NamesError::NotADirectory);
        }
        if inode.names == 0 {
            return Err(NamesError::NotFound);
        }
        let ino = self.make(parent, new, None, now)?;
        if is_linkable {
            self.linkable.insert(ino);
        }
        self.hold(ino)
    }

    /// Makes an inode in a directory, for which there is room with this name. Returns its number.
    fn make(&mut self, parent: u64, new: New, name: Option<&[u8]>, now: i64) -> Result<u64, NamesError> {
        let New { kind, mode, uid, mut gid, umask } = new;
        let (kind, device, target) = match kind {
            NewKind::File => (Kind::File, 0, Vec::new()),
            NewKind::Directory => (Kind::Directory, 0, Vec::new()),
            NewKind::Symlink(target) => (Kind::Symlink, 0, target),
            NewKind::Fifo => (Kind::Fifo, 0, Vec::new()),
            NewKind::Socket => (Kind::Socket, 0, Vec::new()),
            NewKind::CharacterDevice(device) => (Kind::CharacterDevice, device, Vec::new()),
            NewKind::BlockDevice(device) => (Kind::BlockDevice, device, Vec::new()),
        };
        let directory = self.tree().inode_of(parent)?;
        let default = directory.xattr(inode::DEFAULT).filter(|_| kind != Kind::Symlink).and_then(Acl::parse);
        let (mut mode, mut xattrs) = (mode & !umask, Vec::new());
        if let Some(default) = default {
            let (inherited, access) = default.inherited(new.mode);
            mode = inherited;
            xattrs.extend(access.map(|access| (inode::ACCESS, access.to_value())));
            xattrs.extend((kind == Kind::Directory).then(|| (inode::DEFAULT, default.to_value())));
        }
        let directory = directory.attributes;
        if kind == Kind::Symlink && !(1..=MOST_TARGET_BYTES).contains(&target.len()) {
            return Err(NamesError::TargetTooLong);
        }
        if target.contains(&0) {
            return Err(NamesError::Invalid);
        }
        if directory.mode & SET_GROUP_ID != 0 {
            gid = directory.gid;
            if kind == Kind::Directory {
                mode |= SET_GROUP_ID;
            }
        }
        let mode = mode & Attributes::MODE;
        let attributes = Attributes { mode, uid, gid, accessed: now, modified: now, changed: now };
        let ino = self.tree().next;
        let made = Record::Made { ino, kind, attributes, device, target: target.into() };
        let xattrs_bytes = xattrs.iter().map(|(name, value)| xattr_bytes(name, value)).sum::<u64>();
        self.check_room(made.bytes() as u64 + RUN_BYTES + xattrs_bytes + name.map_or(0, entry_bytes))?;
        if self.tree().inodes.len() as u64 >= MOST_INODES {
            return Err(NamesError::NoSpace);
        }
        if xattrs_bytes > MOST_XATTR_BYTES as u64 {
            return Err(NamesError::XattrsTooLong);
        }
        self.record(made)?;
        for (name, value) in xattrs {
            self.record(Record::Xattr { ino, name: name.into(), value: value.into() })?;
        }
        Ok(ino)
    }

    /// Makes another name for an inode.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn link(&mut self, ino: u64, parent: u64, name: &[u8], now: i64) -> Result<Attr, NamesError> {
        let inode = self.tree().inode_of(ino)?;
        match inode.kind() {
            Kind::Directory => return Err(NamesError::LinkOfDirectory),
            _ if inode.names == 0 && !self.linkable.contains(&ino) => return Err(NamesError::NotFound),
            _ if inode.names >= MOST_LINKS => return Err(NamesError::TooManyLinks),
            _ => {}
        }
        self.check_new_name(parent, name)?;
        self.check_room(entry_bytes(name))?;
        self.record(Record::Named { parent, ino, time: now, name: name.into() })?;
        self.linkable.remove(&ino);
        self.attr(ino)
    }

    /// Removes a name of what is not a directory.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn unlink(&mut self, parent: u64, name: &[u8], now: i64) -> Result<(), NamesError> {
        let found = self.entry(parent, name)?;
        if found.kind == Kind::Directory {
            return Err(NamesError::IsADirectory);
        }
        self.remove_name(parent, name, found.ino, now)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn rmdir(&mut self, parent: u64, name: &[u8], now: i64) -> Result<(), NamesError> {
        let found = self.entry(parent, name)?;
        let Body::Directory(directory) = &self.tree().inode_of(found.ino)?.body else {
            return Err(NamesError::NotADirectory);
        };
        if directory.len() > 0 {
            return Err(NamesError::NotEmpty);
        }
        self.remove_name(parent, name, found.ino, now)
    }

    /// Renames an entry, and leaves a whiteout of this owner and group where it was.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn rename_to_whiteout(
        &mut self,
        (parent, name): (u64, &[u8]),
        to: (u64, &[u8]),
        how: Rename,
        (uid, gid): (u32, u32),
        now: i64,
    ) -> Result<(), NamesError> {
        if how == Rename::Exchange {
            return Err(NamesError::Invalid);
        }
        let whiteout = New { kind: NewKind::CharacterDevice(0), mode: 0, uid, gid, umask: 0 };
        self.check_room(WHITEOUT_BYTES + entry_bytes(name))?;
        if self.tree().inodes.len() as u64 >= MOST_INODES {
            return Err(NamesError::NoSpace);
        }
        let moved = self.entry(parent, name)?;
        self.rename((parent, name), to, how, now)?;
        // Two names of one inode: nothing was renamed.
        if self.lookup(parent, name).is_ok_and(|found| found.ino == moved.ino) {
            return Ok(());
        }
        let ino = self.make(parent, whiteout, Some(name), now)?;
        self.record(Record::Named { parent, ino, time: now, name: name.into() })
    }

    /// Renames an entry.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn rename(
        &mut self,
        (parent, name): (u64, &[u8]),
        (to, to_name): (u64, &[u8]),
        how: Rename,
        now: i64,
    ) -> Result<(), NamesError> {
        let moved = self.entry(parent, name)?;
        let replaced = match self.entry(to, to_name) {
            Err(NamesError::NotFound) => {
                self.check_new_name(to, to_name)?;
                None
            }
            found => Some(found?),
        };
        let within =
            |names: &Names, at, attr: Attr| attr.kind == Kind::Directory && names.tree().is_within(at, attr.ino);
        if within(self, to, moved) {
            return Err(NamesError::WithinItself);
        }
        let is_longer = to_name.len() > name.len();
        if is_longer {
            self.check_room((to_name.len() - name.len()) as u64)?;
        }
        match (how, replaced) {
            (Rename::NoReplace, Some(_)) => return Err(NamesError::Exists),
            (Rename::Exchange, None) => return Err(NamesError::NotFound),
            // Two names of one inode, or the same one.
            (_, Some(replaced)) if replaced.ino == moved.ino => return Ok(()),
            (Rename::Exchange, Some(replaced)) => {
                if within(self, parent, replaced) {
                    return Err(NamesError::WithinItself);
                }
                self.record(Record::Unnamed { parent, ino: moved.ino, time: now, name: name.into() })?;
                self.record(Record::Unnamed { parent: to, ino: replaced.ino, time: now, name: to_name.into() })?;
                self.record(Record::Named { parent: to, ino: moved.ino, time: now, name: to_name.into() })?;
                return self.record(Record::Named { parent, ino: replaced.ino, time: now, name: name.into() });
            }
            (_, Some(replaced)) => self.check_replaced(moved, replaced)?,
            (_, None) => {}
        }
        if let Some(replaced) = replaced {
            self.remove_name(to, to_name, replaced.ino, now)?;
        }
        self.record(Record::Unnamed { parent, ino: moved.ino, time: now, name: name.into() })?;
        self.record(Record::Named { parent: to, ino: moved.ino, time: now, name: to_name.into() })
    }

    /// Whether one may take the other's name.
    fn check_replaced(&self, moved: Attr, replaced: Attr) -> Result<(), NamesError> {
        match (moved.kind, &self.tree().inode_of(replaced.ino)?.body) {
            (Kind::Directory, Body::Directory(directory)) if directory.len() > 0 => Err(NamesError::NotEmpty),
            (Kind::Directory, Body::Directory(_)) => Ok(()),
            (Kind::Directory, _) => Err(NamesError::NotADirectory),
            (_, Body::Directory(_)) => Err(NamesError::IsADirectory),
            _ => Ok(()),
        }
    }

    /// Sets what is to be set.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn set(&mut self, ino: u64, set: SetAttributes, now: i64) -> Result<(), NamesError> {
        let before = self.tree().inode_of(ino)?.attributes;
        let time = |time: Option<SetTime>, before| match time {
            None => before,
            Some(SetTime::Now) => now,
            Some(SetTime::To(time)) => time.max(i64::MIN + 1),
        };
        let mode = set.mode.unwrap_or(before.mode) & Attributes::MODE;
        if let Some(access) = set.mode.and_then(|mode| self.access_acl(ino, mode)) {
            self.record(Record::Xattr { ino, name: inode::ACCESS.into(), value: access.to_value().into() })?;
        }
        if set.uid.is_some() || set.gid.is_some() {
            self.drop_capabilities(ino)?;
        }
        let attributes = Attributes {
            mode: if set.drops_set_id { without_set_id(mode) } else { mode },
            uid: set.uid.unwrap_or(before.uid),
            gid: set.gid.unwrap_or(before.gid),
            accessed: time(set.accessed, before.accessed),
            modified: time(set.modified, before.modified),
            changed: now,
        };
        self.record(Record::Set { ino, attributes })
    }

    /// The ACL of an inode, as it is with these permission bits. `None`: it has none.
    fn access_acl(&self, ino: u64, mode: u16) -> Option<Acl> {
        let access = self.tree().get(ino)?.xattr(inode::ACCESS).and_then(Acl::parse)?;
        Some(access.with_mode(mode))
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn xattr(&self, ino: u64, name: &[u8]) -> Result<&[u8], NamesError> {
        namespace(name)?;
        self.tree().inode_of(ino)?.xattr(name).ok_or(NamesError::NoXattr)
    }

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// [`NamesError::Stale`].
    pub fn xattrs(&self, ino: u64) -> Result<impl Iterator<Item = &[u8]>, NamesError> {
        Ok(self.tree().inode_of(ino)?.xattrs().map(|(name, _)| name))
    }

    /// Sets an extended attribute. An ACL changes the permission bits as well, and if it says no more than they do, it
    /// is not kept.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn set_xattr(&mut self, ino: u64, set: SetXattr, now: i64) -> Result<(), NamesError> {
        let SetXattr { name, mut value, how, drops_set_group_id } = set;
        let inode = self.tree().inode_of(ino)?;
        let (kind, mut attributes) = (inode.kind(), Attributes { changed: now, ..inode.attributes });
        let namespace = namespace(&name)?;
        let before = inode.xattr(&name).map(|before| xattr_bytes(&name, before));
        match how {
            SetXattrHow::Create if before.is_some() => return Err(NamesError::Exists),
            SetXattrHow::Replace if before.is_none() => return Err(NamesError::NoXattr),
            _ => {}
        }
        let mut is_kept = true;
        if let Namespace::AccessAcl | Namespace::DefaultAcl = namespace {
            let list = Acl::parse(&value).ok_or(NamesError::Invalid)?;
            match (namespace, kind) {
                (_, Kind::Symlink) => return Err(NamesError::XattrNamespace),
                (Namespace::DefaultAcl, Kind::Directory) => {}
                (Namespace::DefaultAcl, _) => return Err(NamesError::DefaultAcl),
                _ => {
                    is_kept = !list.is_only_mode();
                    attributes.mode = attributes.mode & !0o777 | list.mode();
                    if drops_set_group_id {
                        attributes.mode &= !SET_GROUP_ID;
                    }
                }
            }
            value = list.to_value().into();
        }
        if is_kept {
            let none = Xattrs::default();
            if inode.xattrs.as_deref().unwrap_or(&none).bytes_with(&name, &value) > MOST_XATTR_BYTES {
                return Err(NamesError::XattrsTooLong);
            }
            let bytes = xattr_bytes(&name, &value);
            self.check_room_if(
                bytes.saturating_sub(before.unwrap_or(0)),
                before.is_some_and(|before| bytes <= before),
            )?;
            self.record(Record::Xattr { ino, name, value })?;
        } else if before.is_some() {
            self.record(Record::NoXattr { ino, name })?;
        }
        self.record(Record::Set { ino, attributes })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn remove_xattr(&mut self, ino: u64, name: &[u8], now: i64) -> Result<(), NamesError> {
        let namespace = namespace(name)?;
        match self.xattr(ino, name) {
            // An ACL says no more than the permission bits then, as is wanted.
            Err(NamesError::NoXattr) if matches!(namespace, Namespace::AccessAcl | Namespace::DefaultAcl) => {
                return Ok(());
            }
            found => _ = found?,
        }
        let attributes = Attributes { changed: now, ..self.tree().inode_of(ino)?.attributes };
        self.record(Record::NoXattr { ino, name: name.into() })?;
        self.record(Record::Set { ino, attributes })
    }

    /// Before the contents of a file change, or its owner: what it was permitted to do as a program does not hold for
    /// another one.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn drop_capabilities(&mut self, ino: u64) -> Result<(), NamesError> {
        match self.xattr(ino, CAPABILITIES) {
            Ok(_) => self.record(Record::NoXattr { ino, name: CAPABILITIES.into() }),
            Err(_) => Ok(()),
        }
    }

    /// The size of a file, and the clusters that it has of these ones.
    ///
    /// # Errors
    /// [`NamesError::Stale`], [`NamesError::NotAFile`].
    pub fn file(&self, ino: u64, clusters: std::ops::Range<u64>) -> Result<(u64, Vec<Run>), NamesError> {
        let (size, runs) = self.tree().file(ino)?;
        Ok((size, runs.within(clusters).collect()))
    }

    /// How many of these clusters a file lacks.
    ///
    /// # Errors
    /// [`NamesError::Stale`], [`NamesError::NotAFile`].
    pub fn lacks(&self, ino: u64, clusters: std::ops::Range<u64>) -> Result<u64, NamesError> {
        let (_, runs) = self.tree().file(ino)?;
        Ok(runs.holes(clusters).iter().map(|hole| hole.end - hole.start).sum())
    }

    /// Gives a file the clusters that it lacks of these ones, at most [`MOST_ALLOCATED`]. Returns the new ones.
    ///
    /// # Errors
    /// [`NamesError::NoSpace`]: not all of them are free. Nothing has changed.
    pub fn allocate(&mut self, ino: u64, clusters: std::ops::Range<u64>) -> Result<Vec<Run>, NamesError> {
        if clusters.end > MOST_FILE_CLUSTERS {
            return Err(NamesError::FileTooLong);
        }
        let (_, runs) = self.tree().file(ino)?;
        let holes = runs.holes(clusters);
        let needed: u64 = holes.iter().map(|hole| hole.end - hole.start).sum();
        if needed == 0 {
            return Ok(Vec::new());
        }
        self.end_rests(needed);
        if u64::from(self.tree().clusters.ready()) < needed {
            return Err(NamesError::NoSpace);
        }
        self.check_room(needed * RUN_BYTES)?;
        let mut new = Vec::new();
        for hole in holes {
            let mut at = hole.start;
            while at < hole.end {
                let before = self.tree().file(ino)?.1.before(at);
                let goal = before.and_then(|run| run.at.checked_add(run.count));
                let wanted = (hole.end - at) as u32; // MOST_FILE_CLUSTERS
                let space = self.clusters().find(goal, wanted).ok_or(NamesError::NoSpace)?;
                let run = Run { first: at as u32, at: space.at, count: space.count };
                self.record(Record::Mapped { ino, run })?;
                new.push(run);
                at = run.clusters().end;
            }
        }
        Ok(new)
    }

    /// Sets the size of a file. Clusters behind its end are free.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn resize(&mut self, ino: u64, size: u64, now: i64) -> Result<(), NamesError> {
        if size > MOST_FILE_BYTES {
            return Err(NamesError::FileTooLong);
        }
        self.tree().file(ino)?;
        self.unmap(ino, size.div_ceil(CLUSTER_BYTES)..MOST_FILE_CLUSTERS)?;
        self.record(Record::Sized { ino, size, time: now })
    }

    /// A file was written up to this byte.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn written(&mut self, ino: u64, end: u64, now: i64) -> Result<(), NamesError> {
        let (size, _) = self.tree().file(ino)?;
        if end > size {
            return self.record(Record::Sized { ino, size: end, time: now });
        }
        self.touch(ino, now)
    }

    /// Frees the clusters that a file has of these ones.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn unmap(&mut self, ino: u64, clusters: std::ops::Range<u64>) -> Result<(), NamesError> {
        let (_, runs) = self.tree().file(ino)?;
        let mut there = runs.within(clusters);
        let (Some(first), last) = (there.next(), there.last()) else { return Ok(()) };
        let end = last.unwrap_or(first).clusters().end;
        // A hole in the middle of a run makes two of it.
        self.check_room_if(RUN_BYTES, first.clusters().end >= end)?;
        let (first, count) = (first.first, (end - u64::from(first.first)) as u32);
        self.record(Record::Unmapped { ino, first, count })
    }

    /// Counts a use of an inode. While it is held it stays, also without a name.
    ///
    /// # Errors
    /// [`NamesError::Stale`].
    pub fn hold(&mut self, ino: u64) -> Result<Attr, NamesError> {
        let inode = self.inode(ino)?;
        inode.holds = inode.holds.saturating_add(1);
        Ok(inode.attr(ino))
    }

    /// Whether an inode is there and in use.
    pub fn is_held(&self, ino: u64) -> bool {
        self.tree().get(ino).is_some_and(|inode| inode.holds > 0)
    }

    /// Gives uses back. An inode that is not held and has no name is gone.
    ///
    /// # Errors
    /// [`NamesError::Stale`].
    pub fn release(&mut self, ino: u64, count: u32) -> Result<(), NamesError> {
        let inode = self.inode(ino)?;
        inode.holds = inode.holds.saturating_sub(count);
        self.end_if_unused(ino)
    }

    /// Removes inodes that no name stands for, up to `most` of them: those that a program had open when the writer
    /// died. Returns whether there may be more.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn remove_orphans(&mut self, most: usize) -> Result<bool, NamesError> {
        let inodes = self.tree().inodes.iter();
        let orphans = inodes.filter(|(ino, inode)| **ino != ROOT && inode.names == 0 && inode.holds == 0);
        let orphans: Vec<u64> = orphans.map(|(ino, _)| *ino).take(most).collect();
        orphans.iter().try_for_each(|ino| self.end_if_unused(*ino))?;
        Ok(orphans.len() == most)
    }

    fn end_if_unused(&mut self, ino: u64) -> Result<(), NamesError> {
        let inode = self.inode(ino)?;
        if inode.names == 0 && inode.holds == 0 { self.record(Record::Gone { ino }) } else { Ok(()) }
    }

    fn remove_name(&mut self, parent: u64, name: &[u8], ino: u64, now: i64) -> Result<(), NamesError> {
        self.record(Record::Unnamed { parent, ino, time: now, name: name.into() })?;
        self.end_if_unused(ino)
    }

    /// What an entry stands for that is to be changed. `.` and `..` are not.
    fn entry(&self, parent: u64, name: &[u8]) -> Result<Attr, NamesError> {
        let found = self.lookup(parent, name)?;
        if is_name(name) { Ok(found) } else { Err(NamesError::Invalid) }
    }

    /// Whether a directory can have this entry, which it does not have.
    fn check_new_name(&self, parent: u64, name: &[u8]) -> Result<(), NamesError> {
        if name.len() > MOST_NAME_BYTES {
            return Err(NamesError::NameTooLong);
        }
        let inode = self.tree().inode_of(parent)?;
        let Body::Directory(directory) = &inode.body else { return Err(NamesError::NotADirectory) };
        if directory.find(name).is_some() || name == b"." || name == b".." {
            return Err(NamesError::Exists);
        }
        match () {
            () if inode.names == 0 => Err(NamesError::NotFound), // it was removed
            () if !is_name(name) => Err(NamesError::Invalid),
            () if directory.key(name).is_none() => Err(NamesError::NoSpace),
            () => Ok(()),
        }
    }
}

/// An image that is needed at once is written in steps of this number of bytes.
const LONG_STEP_BYTES: u64 = 256 << 10;

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed<'a> {
    /// Its name.
    pub name: &'a [u8],
    /// What it stands for.
    pub ino: u64,
    /// What that is.
    pub kind: Kind,
    /// Its position, for the next call. It stays the same while other entries come and go.
    pub cookie: u64,
}

/// How much of a volume is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Blocks for files.
    pub blocks: u64,
    /// Those that no file has.
    pub free_blocks: u64,
    /// Inodes there are.
    pub inodes: u64,
    /// About how many more there can be.
    pub free_inodes: u64,
    /// The most bytes of a name.
    pub name_bytes: usize,
}

impl Inode {
    fn file(&self) -> Result<(u64, &Runs), NamesError> {
        match &self.body {
            Body::File { size, runs } => Ok((*size, runs)),
            Body::Directory(_) => Err(NamesError::IsADirectory),
            _ => Err(NamesError::NotAFile),
        }
    }
}

/// What names in memory are asked.
impl Tree {
    pub(super) fn inode_of(&self, ino: u64) -> Result<&Inode, NamesError> {
        self.get(ino).ok_or(NamesError::Stale(ino))
    }

    pub(super) fn file(&self, ino: u64) -> Result<(u64, &Runs), NamesError> {
        self.inode_of(ino)?.file()
    }

    pub(super) fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, NamesError> {
        let inode = self.inode_of(parent)?;
        let Body::Directory(directory) = &inode.body else { return Err(NamesError::NotADirectory) };
        if name.len() > MOST_NAME_BYTES {
            return Err(NamesError::NameTooLong);
        }
        let ino = match name {
            b"." => parent,
            b".." if directory.parent == 0 => return Err(NamesError::NotFound),
            b".." => directory.parent,
            _ => directory.find(name).ok_or(NamesError::NotFound)?,
        };
        Ok(self.inode_of(ino)?.attr(ino))
    }

    pub(super) fn target(&self, ino: u64) -> Result<&[u8], NamesError> {
        match &self.inode_of(ino)?.body {
            Body::Symlink(target) => Ok(target),
            _ => Err(NamesError::Invalid),
        }
    }

    pub(super) fn list(
        &self,
        ino: u64,
        after: u64,
        mut each: impl FnMut(Listed<'_>) -> bool,
    ) -> Result<(), NamesError> {
        let Body::Directory(directory) = &self.inode_of(ino)?.body else { return Err(NamesError::NotADirectory) };
        let parent = if directory.parent == 0 { ino } else { directory.parent };
        for (cookie, name, ino) in [(1, &b"."[..], ino), (2, b"..", parent)] {
            if after < cookie && !each(Listed { name, ino, kind: Kind::Directory, cookie }) {
                return Ok(());
            }
        }
        for (cookie, entry) in directory.after(after) {
            let kind = self.inode_of(entry.ino)?.kind();
            if !each(Listed { name: &entry.name, ino: entry.ino, kind, cookie }) {
                break;
            }
        }
        Ok(())
    }

    pub(super) fn usage(&self, image_limit: u64) -> Usage {
        let blocks = |clusters: u32| u64::from(clusters) * super::layout::CLUSTER_BLOCKS;
        let inodes = self.inodes.len() as u64;
        let room = image_limit.saturating_sub(self.image_bytes()) / TYPICAL_BYTES;
        Usage {
            blocks: blocks(self.clusters.number()),
            free_blocks: blocks(self.clusters.free()),
            inodes,
            free_inodes: room.min(MOST_INODES.saturating_sub(inodes)),
            name_bytes: MOST_NAME_BYTES,
        }
    }
}

/// Bytes of a file with a short name in an image.
const TYPICAL_BYTES: u64 = 128;

/// Names as they are read from a volume. The writer begins with one, and a reader follows the log with one.
#[derive(Clone, Debug)]
pub struct View {
    pub(super) tree: Tree,
    pub(super) reader: LogReader,
    pub(super) head: Head,
}

impl View {
    /// Before anything of the area was read that the head names.
    pub fn new(head: Head) -> View {
        View { tree: Tree::new(head.geometry), reader: LogReader::new(&head), head }
    }

    /// Files that are removed stay for a while, for those who have them open.
    pub fn keeping_removed(mut self) -> View {
        self.tree.late = Some(Late::default());
        self
    }

    /// So much time has passed, by a clock that does not jump. What is read from now on was written after this moment:
    /// files that it removes were there then.
    pub fn tick(&mut self, now_ms: u64, moment: u64) {
        if let Some(late) = &mut self.tree.late {
            late.tick(now_ms, moment);
        }
    }

    /// If a file was removed and is kept: a moment at which it was there.
    pub fn removed_after(&self, ino: u64) -> Option<u64> {
        let is_there = self.tree.get(ino).is_some();
        self.late(ino).filter(|_| !is_there).map(|(_, moment)| moment)
    }

    fn late(&self, ino: u64) -> Option<(&Inode, u64)> {
        self.tree.late.as_ref().and_then(|late| late.get(ino))
    }

    /// An inode, or a file that was removed.
    fn inode_or_removed(&self, ino: u64) -> Result<&Inode, NamesError> {
        let found = self.tree.get(ino).or_else(|| self.late(ino).map(|(inode, _)| inode));
        found.ok_or(NamesError::Stale(ino))
    }

    /// Which head it is of.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The blocks of the volume that are needed next: the first one, and how many there are up to the area's end.
    pub fn wants(&self) -> (u64, u64) {
        let (first, count) = self.reader.wants();
        (self.head.geometry.area_at(self.head.area) + first, count)
    }

    /// These blocks of the volume are the next ones. Returns whether more are needed. If not, all that was written is
    /// read.
    ///
    /// # Errors
    /// [`Malformed`]: what was read is damaged. Or, unless the reader is the writer, it was read in the middle of a
    /// write: call [`View::look_again`].
    pub fn push(&mut self, blocks: &[u8]) -> Result<bool, Malformed> {
        debug_assert!(blocks.len().is_multiple_of(BLOCK_BYTES), "whole blocks");
        self.reader.push(blocks);
        loop {
            match self.reader.next()? {
                Next::Records(records) => records.iter().try_for_each(|record| self.tree.apply(record))?,
                Next::More => return Ok(true),
                Next::End => return Ok(false),
            }
            if self.tree.is_complete() != self.reader.number().is_some() {
                return Err(Malformed("the end of an image"));
            }
        }
    }

    /// Whether the image was read, and all that the log says is of it.
    pub fn is_complete(&self) -> bool {
        self.tree.is_complete()
    }

    /// How far it was read: the use of the area, and the place in it.
    pub fn position(&self) -> (u64, u64) {
        (self.head.lap, self.reader.at())
    }

    /// Forgets the blocks behind the last frame: they may have been changed, and are wanted again.
    pub fn look_again(&mut self) {
        self.reader.look_again();
    }

    /// Whether everything was read that is in the image which this head names.
    pub fn is_followed_by(&self, head: &Head) -> bool {
        self.reader.number() == Some(head.first) && self.head.geometry == head.geometry
    }

    /// There is a new image, and a log behind it. If everything before was read, it goes on there. Otherwise it begins
    /// again: then `false`.
    pub fn go_on(&mut self, head: Head) -> bool {
        let is_next = self.is_followed_by(&head);
        if is_next {
            self.reader = LogReader::behind_image(&head);
            self.head = head;
        } else {
            *self = View::new(head);
        }
        is_next
    }

    /// What an entry stands for.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, NamesError> {
        self.tree.lookup(parent, name)
    }

    /// What is known of an inode.
    ///
    /// # Errors
    /// [`NamesError::Stale`].
    pub fn attr(&self, ino: u64) -> Result<Attr, NamesError> {
        Ok(self.inode_or_removed(ino)?.attr(ino))
    }

    /// The target of a link.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn target(&self, ino: u64) -> Result<&[u8], NamesError> {
        self.tree.target(ino)
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn xattr(&self, ino: u64, name: &[u8]) -> Result<&[u8], NamesError> {
        namespace(name)?;
        self.inode_or_removed(ino)?.xattr(name).ok_or(NamesError::NoXattr)
    }

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// [`NamesError::Stale`].
    pub fn xattrs(&self, ino: u64) -> Result<impl Iterator<Item = &[u8]>, NamesError> {
        Ok(self.inode_or_removed(ino)?.xattrs().map(|(name, _)| name))
    }

    /// Entries of a directory behind a position, until `each` says `false`.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn list(&self, ino: u64, after: u64, each: impl FnMut(Listed<'_>) -> bool) -> Result<(), NamesError> {
        self.tree.list(ino, after, each)
    }

    /// The size of a file, and the clusters that it has of these ones.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn file(&self, ino: u64, clusters: std::ops::Range<u64>) -> Result<(u64, Vec<Run>), NamesError> {
        let (size, runs) = self.inode_or_removed(ino)?.file()?;
        Ok((size, runs.within(clusters).collect()))
    }

    /// How much is used.
    pub fn usage(&self) -> Usage {
        self.tree.usage(self.head.geometry.image_limit())
    }
}

const _: () = assert!(ROOT == 1); // as FUSE has it

// What can be done to names, as POSIX and Linux say it. Each is checked first, and changes everything or
// nothing. Permissions are the kernel's.

/// Bytes of a whiteout in an image, without its name: no more than these.
const WHITEOUT_BYTES: u64 = 128;

/// What an extended attribute is for. The name is checked.
fn namespace(name: &[u8]) -> Result<Namespace, NamesError> {
    let namespace = Namespace::of(name).ok_or(NamesError::XattrNamespace)?;
    let is_empty = [&b"user."[..], b"trusted.", b"security."].contains(&name);
    if is_xattr_name(name) && !is_empty { Ok(namespace) } else { Err(NamesError::Invalid) }
}

/// Clusters that a file gets at a time: so many new runs fit a frame.
pub const MOST_ALLOCATED: u64 = 256;

const _: () = assert!(MOST_ALLOCATED * RUN_BYTES + 1024 <= super::log::MOST_FRAME_BYTES as u64);
