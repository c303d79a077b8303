//! The files of a volume that this process has open for writing: what can be asked of them, and what is changed.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::core::{self, Core, check_end};
use crate::disk::{CHANGE_BYTES, Content, Disk};
use crate::names::layout::{CLUSTER_BLOCKS, CLUSTER_BYTES};
use crate::names::{self, Attr, Listed, MOST_ALLOCATED, NamesError, New, Rename, SetAttributes, SetXattr, Usage};
use crate::{FilesError, MOST_WRITE_BYTES};

/// Room that a read takes beside its bytes, so that not too many short ones are under way.
const READ_BYTES: usize = 12 << 10;

/// What space is given to a file, or taken from it, in a range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocate {
    /// It has clusters there. Its size stays.
    Keep,
    /// It has clusters there, and is at least as long.
    Grow,
    /// It has zeros there, and as few clusters as possible. Its size stays.
    Punch,
    /// It has zeros there, and clusters. Its size stays.
    ZeroKeep,
    /// It has zeros there, and clusters, and is at least as long.
    ZeroGrow,
}

/// When the process is answered whose bytes are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answered {
    /// Before this file system saw them.
    Before,
    /// When they are on their way, as far as the window permits it.
    OnItsWay,
    /// When as many copies as must hold them have them.
    Acknowledged,
}

/// The files of a volume that this process has open for writing. It is dropped by a thread that is not the disk's: what
/// completions own must not own it.
pub struct Files {
    core: Arc<Core>,
    /// The core has it too, but does not keep it.
    _disk: Arc<dyn Disk>,
}

impl Files {
    /// Makes an empty file system, and waits until it is flushed.
    ///
    /// # Errors
    /// [`FilesError::Occupied`] if the beginning of the volume is not zeros, unless that is to be overwritten.
    pub fn format(disk: &dyn Disk, root: &New, force: bool) -> Result<(), FilesError> {
        core::format(disk, root, force)
    }

    /// Opens the files of a volume. Reads all names, and waits for them.
    ///
    /// # Errors
    /// [`FilesError::Head`] if there is something else, and [`FilesError::Damaged`] if they contradict themselves.
    pub fn open(disk: Arc<dyn Disk>) -> Result<Files, FilesError> {
        Files::open_ahead(disk, 0)
    }

    /// The same. Of what is written by [`Files::write_ahead`], `ahead` bytes may be answered and not acknowledged.
    ///
    /// # Errors
    /// As for [`Files::open`].
    pub fn open_ahead(disk: Arc<dyn Disk>, ahead: usize) -> Result<Files, FilesError> {
        let (names, writes) = core::open(&disk)?;
        core::write_all(&*disk, writes)?;
        Ok(Files { core: Arc::new(Core::new(names, &disk, ahead)), _disk: disk })
    }

    /// What an entry of a directory stands for.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, FilesError> {
        Ok(self.core.state().names.lookup(parent, name)?)
    }

    /// What is known of an inode.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn getattr(&self, ino: u64) -> Result<Attr, FilesError> {
        Ok(self.core.state().names.attr(ino)?)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn readlink(&self, ino: u64) -> Result<Vec<u8>, FilesError> {
        Ok(self.core.state().names.target(ino)?.to_vec())
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn getxattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>, FilesError> {
        Ok(self.core.state().names.xattr(ino, name)?.to_vec())
    }

    /// The names of all extended attributes, each with a zero behind it; those of `trusted` only if that is wanted.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn listxattr(&self, ino: u64, with_trusted: bool) -> Result<Vec<u8>, FilesError> {
        Ok(names::list_of(self.core.state().names.xattrs(ino)?, with_trusted))
    }

    /// Sets an extended attribute.
    pub fn setxattr(&self, ino: u64, set: SetXattr, done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| Ok(names.set_xattr(ino, set, now)?));
    }

    /// Removes an extended attribute.
    pub fn removexattr(&self, ino: u64, name: &[u8], done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| Ok(names.remove_xattr(ino, name, now)?));
    }

    /// Entries of a directory behind the position `after`, until `each` says `false`: `.` and `..` first, at 1 and 2.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn readdir(&self, ino: u64, after: u64, each: impl FnMut(Listed<'_>) -> bool) -> Result<(), FilesError> {
        Ok(self.core.state().names.list(ino, after, each)?)
    }

    /// How much of the volume is used.
    pub fn statfs(&self) -> Usage {
        self.core.state().names.usage()
    }

    /// Counts a use of an inode: an open file, or what the kernel knows. While it is held it stays, also without a
    /// name.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn hold(&self, ino: u64) -> Result<Attr, FilesError> {
        Ok(self.core.state().names.hold(ino)?)
    }

    /// Gives uses back. An inode that is not held and has no name is gone, which is written with the next change. Times
    /// that are only in memory are written. Nothing waits for that.
    pub fn release(&self, ino: u64, count: u32) {
        let caller = self.core.caller(CHANGE_BYTES, |_| {});
        self.core.change_later(caller, |names| {
            names.release(ino, count)?;
            names.settle(ino)
        });
        self.core.forget(ino);
    }

    /// Makes an inode with a name. It is held once if that is wanted.
    pub fn create(
        &self,
        parent: u64,
        name: &[u8],
        new: New,
        held: bool,
        done: impl FnOnce(Result<Attr, FilesError>) + Send + 'static,
    ) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| {
            let attr = names.create(parent, name, new, now)?;
            if held {
                names.hold(attr.ino)?;
            }
            Ok(attr)
        });
    }

    /// Makes a file without a name, which is held once.
    pub fn create_unnamed(
        &self,
        parent: u64,
        new: New,
        is_linkable: bool,
        done: impl FnOnce(Result<Attr, FilesError>) + Send + 'static,
    ) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| Ok(names.create_unnamed(parent, new, is_linkable, now)?));
    }

    /// Makes another name for an inode.
    pub fn link(
        &self,
        ino: u64,
        parent: u64,
        name: &[u8],
        done: impl FnOnce(Result<Attr, FilesError>) + Send + 'static,
    ) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| Ok(names.link(ino, parent, name, now)?));
    }

    /// Removes a name of what is not a directory.
    pub fn unlink(&self, parent: u64, name: &[u8], done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| Ok(names.unlink(parent, name, now)?));
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, parent: u64, name: &[u8], done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| Ok(names.rmdir(parent, name, now)?));
    }

    /// Renames an entry.
    pub fn rename(
        &self,
        (parent, name): (u64, &[u8]),
        (to, to_name): (u64, &[u8]),
        how: Rename,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| Ok(names.rename((parent, name), (to, to_name), how, now)?));
    }

    /// Renames an entry, and leaves a whiteout of this owner and group where it was.
    pub fn rename_to_whiteout(
        &self,
        (parent, name): (u64, &[u8]),
        (to, to_name): (u64, &[u8]),
        how: Rename,
        owner: (u32, u32),
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.change(caller, |names, now| {
            Ok(names.rename_to_whiteout((parent, name), (to, to_name), how, owner, now)?)
        });
    }

    /// Sets attributes, and the size if there is one. What they are then is asked with [`Files::getattr`].
    pub fn setattr(
        &self,
        ino: u64,
        size: Option<u64>,
        set: SetAttributes,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        match size {
            Some(size) => self.core.change_content(Content::Resize { ino, size, set }, caller),
            None => self.core.change(caller, |names, now| Ok(names.set(ino, set, now)?)),
        }
    }

    /// Writes all of these bytes, at most [`MOST_WRITE_BYTES`].
    pub fn write(
        &self,
        ino: u64,
        offset: u64,
        data: Bytes,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        self.write_by(ino, (offset, data), Answered::Acknowledged, done);
    }

    /// As [`Files::write`], but answered when it is on its way, as long as the window of [`Files::open_ahead`] permits
    /// it. It has its space and its place in the log then, and is carried out in its order. Only the end of the volume
    /// can make it fail afterwards, and that fails every later flush.
    pub fn write_ahead(
        &self,
        ino: u64,
        offset: u64,
        data: Bytes,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        self.write_by(ino, (offset, data), Answered::OnItsWay, done);
    }

    /// As [`Files::write_ahead`], of bytes that a page cache has accepted before: mapped memory. If they are refused,
    /// later writes and flushes of the file are refused as well, until it is cut before these bytes or closed
    /// ([`Files::closed`]).
    pub fn write_back(
        &self,
        ino: u64,
        offset: u64,
        data: Bytes,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        self.write_by(ino, (offset, data), Answered::Before, done);
    }

    fn write_by(
        &self,
        ino: u64,
        (offset, data): (u64, Bytes),
        answered: Answered,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        let is_cached = answered == Answered::Before;
        if data.len() > MOST_WRITE_BYTES {
            return done(Err(FilesError::Length));
        }
        if let Err(error) = check_end(offset, data.len() as u64) {
            if is_cached {
                self.core.state().refused.note(ino, offset, &error);
            }
            return done(Err(error));
        }
        if data.is_empty() {
            return done(Ok(()));
        }
        let caller = self.core.caller(CHANGE_BYTES + data.len(), done);
        let caller = if answered == Answered::Acknowledged { caller } else { caller.ahead(data.len()) };
        self.core.change_content(Content::Write { ino, offset, data, is_cached }, caller);
    }

    /// Reads bytes, into pieces that follow each other; less at the end of the file. At once if they are in memory of
    /// this host.
    pub fn read(
        &self,
        ino: u64,
        offset: u64,
        length: u32,
        done: impl FnOnce(Result<Vec<Bytes>, FilesError>) + Send + 'static,
    ) {
        if length as usize > MOST_WRITE_BYTES {
            return done(Err(FilesError::Length));
        }
        let range = offset..offset.saturating_add(length.into());
        let caller = self.core.caller(READ_BYTES + length as usize, done);
        self.core.read(ino, range, caller);
    }

    /// Gives space to a file, or takes it. A long range is several changes: if the writer dies, a part of it may be
    /// done.
    pub fn fallocate(
        &self,
        ino: u64,
        offset: u64,
        length: u64,
        how: Allocate,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        let end = match check_end(offset, length) {
            Ok(_) if length == 0 => return done(Err(FilesError::Length)),
            Ok(end) => end,
            Err(error) => return done(Err(error)),
        };
        let clusters = offset / CLUSTER_BYTES..end.div_ceil(CLUSTER_BYTES);
        let punches = matches!(how, Allocate::Punch | Allocate::ZeroKeep | Allocate::ZeroGrow);
        // Zeros take the clusters of the range again that they free.
        if how != Allocate::Punch
            && let Err(error) = self.check_space(ino, clusters.clone())
        {
            return done(Err(error));
        }
        let mut parts = Vec::new();
        if punches {
            parts.push(Content::Punch { ino, range: offset..end });
        }
        if how != Allocate::Punch {
            let size = if matches!(how, Allocate::Grow | Allocate::ZeroGrow) { end } else { 0 };
            let starts = clusters.clone().step_by(MOST_ALLOCATED as usize);
            parts.extend(starts.map(|start| {
                let end = clusters.end.min(start + MOST_ALLOCATED);
                let size = if end == clusters.end { size } else { 0 };
                Content::Allocate { ino, clusters: start..end, size }
            }));
        }
        self.core.change_several(parts, done);
    }

    /// Whether there are clusters for all that a file lacks of these ones.
    fn check_space(&self, ino: u64, clusters: Range<u64>) -> Result<(), FilesError> {
        let names = &self.core.state().names;
        let free = names.usage().free_blocks / CLUSTER_BLOCKS;
        if names.lacks(ino, clusters)? > free { Err(NamesError::NoSpace.into()) } else { Ok(()) }
    }

    /// Where at or behind an offset a file has data, or with `hole` a hole. `None`: there is none up to its end, which
    /// counts as a hole.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn seek(&self, ino: u64, offset: u64, hole: bool) -> Result<Option<u64>, FilesError> {
        let names = &self.core.state().names;
        let (size, runs) = names.file(ino, offset / CLUSTER_BYTES..u64::MAX)?;
        if offset >= size {
            return Ok(None);
        }
        let mut at = offset;
        for run in runs {
            let bytes = run.clusters().start * CLUSTER_BYTES..run.clusters().end * CLUSTER_BYTES;
            match hole {
                false => return Ok(Some(at.max(bytes.start)).filter(|at| *at < size)),
                true if at < bytes.start => break,
                true => at = bytes.end,
            }
        }
        Ok(hole.then_some(at.min(size)))
    }

    /// Waits until all that was acknowledged is as safe as the volume makes it. Times that are only in memory are
    /// written before, unless the data alone matter.
    pub fn fsync(&self, ino: u64, data_only: bool, done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.flush(caller, |names, refused| {
            refused.check(ino)?;
            if !data_only {
                names.settle(ino)?;
            }
            Ok(())
        });
    }

    /// The same for all files.
    pub fn sync(&self, done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        while let Some(ino) = self.next_unsettled() {
            let caller = self.core.caller(CHANGE_BYTES, |_| {});
            self.core.change(caller, |names, _| Ok(names.settle(ino)?));
        }
        let caller = self.core.caller(CHANGE_BYTES, done);
        self.core.flush(caller, |_, _| Ok(()));
    }

    /// Waits until everything is acknowledged that was answered early: a descriptor of this file is closed.
    pub fn acknowledged(&self, ino: u64, done: impl FnOnce(Result<(), FilesError>) + Send + 'static) {
        if let Err(error) = self.core.state().refused.check(ino) {
            return done(Err(error));
        }
        self.core.ahead.wait(Box::new(done));
    }

    /// No process has this file open any more: what was refused of it is forgotten, and times that are only in memory
    /// are written. Nothing waits for that.
    pub fn closed(&self, ino: u64) {
        let mut state = self.core.state();
        state.refused.forget(ino);
        let is_unsettled = state.names.is_unsettled(ino);
        drop(state);
        if is_unsettled {
            let caller = self.core.caller(CHANGE_BYTES, |_| {});
            self.core.change_later(caller, |names| names.settle(ino));
        }
    }

    /// From now on no call waits for the disk, and every call fails. For an end that cannot wait for a volume which
    /// waits for its servers.
    pub fn close(&self) {
        self.core.close();
    }

    fn next_unsettled(&self) -> Option<u64> {
        let state = self.core.state();
        self.core.check_space().ok().and_then(|()| state.names.unsettled())
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.core.close();
    }
}
