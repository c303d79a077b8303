//! Operations: what can be done to names, as POSIX and Linux say it. Each is checked first, and changes everything or
//! nothing. Permissions are the kernel's.

use super::change::{New, NewKind, Rename, SetAttributes, SetTime};
use super::error::NamesError;
use super::inode::{Attr, Attributes, Body, Kind, MOST_LINKS, MOST_TARGET_BYTES};
use super::layout::CLUSTER_BYTES;
use super::record::{MOST_NAME_BYTES, Record, is_name};
use super::runs::Run;
use super::tree::{ROOT, RUN_BYTES, entry_bytes};
use super::writer::Names;
use super::{MOST_FILE_BYTES, MOST_FILE_CLUSTERS, MOST_INODES};

const SET_GROUP_ID: u16 = 0o2000;

impl Names {
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
        let New { kind, mut mode, uid, mut gid } = new;
        let directory = self.tree().inode_of(parent)?.attributes;
        self.check_new_name(parent, name)?;
        let (kind, target) = match kind {
            NewKind::File => (Kind::File, Vec::new()),
            NewKind::Directory => (Kind::Directory, Vec::new()),
            NewKind::Symlink(target) => (Kind::Symlink, target),
            NewKind::Fifo => (Kind::Fifo, Vec::new()),
            NewKind::Socket => (Kind::Socket, Vec::new()),
        };
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
        let made = Record::Made { ino, kind, attributes, target: target.into() };
        self.check_room(made.bytes() as u64 + RUN_BYTES + entry_bytes(name))?;
        if self.tree().inodes.len() as u64 >= MOST_INODES {
            return Err(NamesError::NoSpace);
        }
        self.record(made)?;
        self.record(Record::Named { parent, ino, time: now, name: name.into() })?;
        self.attr(ino)
    }

    /// Makes another name for an inode.
    ///
    /// # Errors
    /// [`NamesError`].
    pub fn link(&mut self, ino: u64, parent: u64, name: &[u8], now: i64) -> Result<Attr, NamesError> {
        let inode = self.tree().inode_of(ino)?;
        match inode.kind() {
            Kind::Directory => return Err(NamesError::LinkOfDirectory),
            _ if inode.names == 0 => return Err(NamesError::NotFound),
            _ if inode.names >= MOST_LINKS => return Err(NamesError::TooManyLinks),
            _ => {}
        }
        self.check_new_name(parent, name)?;
        self.check_room(entry_bytes(name))?;
        self.record(Record::Named { parent, ino, time: now, name: name.into() })?;
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
        let attributes = Attributes {
            mode: set.mode.unwrap_or(before.mode) & Attributes::MODE,
            uid: set.uid.unwrap_or(before.uid),
            gid: set.gid.unwrap_or(before.gid),
            accessed: time(set.accessed, before.accessed),
            modified: time(set.modified, before.modified),
            changed: now,
        };
        self.record(Record::Set { ino, attributes })
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

/// Clusters that a file gets at a time: so many new runs fit a frame.
pub const MOST_ALLOCATED: u64 = 256;

const _: () = assert!(MOST_ALLOCATED * RUN_BYTES + 1024 <= super::record::MOST_FRAME_BYTES as u64);
