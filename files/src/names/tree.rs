//! The tree of names, what a change of it changes, and why a change is refused.
//!
//! Its *image* is everything that the names are, written into the other area a part at a time while they change. It
//! goes through the inodes in the order of their numbers. A change of what it has passed is written into it as well, in
//! its turn; a change of what it has not passed will be found there. So at its end it is what the names are.

use std::collections::{BTreeMap, VecDeque};

use rustix::io::Errno;

use super::clusters::{Clusters, REST_MS, Run, Space};
use super::inode::{Attributes, Body, Inode, Kind, MOST_LINKS, MOST_TARGET_BYTES, MOST_XATTR_BYTES, Xattrs};
use super::layout::{Area, Geometry, Head};
use super::log::{BlocksToWrite, Log, MOST_NAME_BYTES, Malformed, NO_TIME, Record};

/// The number of the root.
pub const ROOT: u64 = 1;

/// All inodes, directories and clusters in memory, as the records make them.
///
/// Changes of this program and what is read from a volume go the same way, [`Tree::apply`]. So what is read is what was
/// in memory. A record that does not fit is refused, and leaves everything as it was. What is always true once an image
/// is complete:
///
/// 1. A cluster belongs to one file at most.
/// 2. An inode has as many names as there are entries that stand for it, and every entry stands for an inode.
/// 3. Each directory but the root has one name, or none and is empty; and from each a way of parents leads to the root.
///
/// An image is written while names change. While it is read, entries may stand for inodes that come later. The second
/// and third sentence are checked at its end.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub(super) inodes: BTreeMap<u64, Box<Inode>>,
    pub(super) clusters: Clusters,
    /// The lowest number that no inode ever had.
    pub(super) next: u64,
    /// Bytes that an image takes, without frames.
    image_bytes: u64,
    is_complete: bool,
    /// The time of the last change, in milliseconds. `None`: what is freed needs no rest.
    pub(super) now_ms: Option<u64>,
    /// Files that were removed, for one who follows.
    pub(super) late: Option<Late>,
}

/// The two trees have the same inodes and entries. Which of them are held, and what rests, is not compared.
impl PartialEq for Tree {
    fn eq(&self, other: &Tree) -> bool {
        let is_same = |one: &Inode, other: &Inode| {
            (&one.attributes, one.names, &one.body, &one.xattrs)
                == (&other.attributes, other.names, &other.body, &other.xattrs)
        };
        self.next == other.next
            && self.clusters.free() == other.clusters.free()
            && self.image_bytes == other.image_bytes
            && self.inodes.len() == other.inodes.len()
            && self.inodes.iter().zip(&other.inodes).all(|(one, other)| one.0 == other.0 && is_same(one.1, other.1))
    }
}

/// The record that makes an inode, without what is in it.
pub(super) fn made(ino: u64, inode: &Inode) -> Record {
    let target = match &inode.body {
        Body::Symlink(target) => target.clone(),
        _ => Box::default(),
    };
    Record::Made { ino, kind: inode.kind(), attributes: inode.attributes, device: inode.device(), target }
}

/// Bytes of an inode in an image with its extended attributes, beside its entries and runs.
fn made_bytes(ino: u64, inode: &Inode) -> u64 {
    let xattrs = inode.xattrs().map(|(name, value)| xattr_bytes(name, value));
    (made(ino, inode).bytes() + SIZED_BYTES) as u64 + xattrs.sum::<u64>()
}

/// Bytes of an extended attribute in an image.
pub(super) fn xattr_bytes(name: &[u8], value: &[u8]) -> u64 {
    (12 + name.len() + value.len()) as u64
}

/// Bytes of a file's size in an image.
const SIZED_BYTES: usize = 25;

/// Bytes of a run in an image.
pub(super) const RUN_BYTES: u64 = 21;

/// Bytes of an entry in an image.
pub(super) fn entry_bytes(name: &[u8]) -> u64 {
    26 + name.len() as u64
}

/// Whether the clusters of areas are kept from files.
fn areas_are_no_files() -> bool {
    #[cfg(test)]
    if crate::Mutant::AreasAreFree.is_active() {
        return false;
    }
    true
}

impl Tree {
    /// Without a root, before an image.
    pub(super) fn new(geometry: Geometry) -> Tree {
        let mut clusters = Clusters::new(geometry.clusters());
        if let Some((at, count)) = geometry.clusters_of_areas().filter(|_| areas_are_no_files()) {
            clusters.take(Space { at, count }); // nothing else was taken
        }
        Tree {
            inodes: BTreeMap::new(),
            clusters,
            next: ROOT,
            image_bytes: 0,
            is_complete: false,
            now_ms: None,
            late: None,
        }
    }

    /// Whether the image was read to its end.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    pub(super) fn image_bytes(&self) -> u64 {
        self.image_bytes
    }

    pub(super) fn get(&self, ino: u64) -> Option<&Inode> {
        self.inodes.get(&ino).map(Box::as_ref)
    }

    /// Carries out a record.
    ///
    /// # Errors
    /// [`Malformed`]: it does not fit. Nothing has changed.
    pub(super) fn apply(&mut self, record: &Record) -> Result<(), Malformed> {
        match record {
            Record::Made { ino, kind, attributes, device, target } => {
                self.make(*ino, Inode::new(*kind, *attributes, *device, target.clone()))
            }
            Record::Gone { ino } => self.remove(*ino),
            Record::Named { parent, ino, time, name } => self.add_name(*parent, *ino, *time, name),
            Record::Unnamed { parent, ino, time, name } => self.remove_name(*parent, *ino, *time, name),
            Record::Set { ino, attributes } => {
                self.inode(*ino)?.attributes = *attributes;
                Ok(())
            }
            Record::Sized { ino, size, time } => self.resize(*ino, *size, *time),
            Record::Mapped { ino, run } => self.map(*ino, *run),
            Record::Unmapped { ino, first, count } => self.unmap(*ino, *first, *count),
            Record::Xattr { ino, name, value } => self.set_xattr(*ino, name, value),
            Record::NoXattr { ino, name } => self.remove_xattr(*ino, name),
            Record::Complete { next } => self.complete(*next),
        }
    }

    fn inode(&mut self, ino: u64) -> Result<&mut Inode, Malformed> {
        self.inodes.get_mut(&ino).map(Box::as_mut).ok_or(NO_INODE)
    }

    fn make(&mut self, ino: u64, inode: Inode) -> Result<(), Malformed> {
        let is_new = if self.is_complete { ino >= self.next } else { ino >= ROOT && !self.inodes.contains_key(&ino) };
        if !is_new || ino == u64::MAX || (ino == ROOT && inode.kind() != Kind::Directory) {
            return Err(Malformed("the number of a new inode"));
        }
        if self.inodes.len() as u64 >= super::MOST_INODES {
            return Err(Malformed("the number of inodes"));
        }
        self.image_bytes += made_bytes(ino, &inode);
        self.inodes.insert(ino, Box::new(inode));
        self.next = self.next.max(ino + 1);
        Ok(())
    }

    fn set_xattr(&mut self, ino: u64, name: &[u8], value: &[u8]) -> Result<(), Malformed> {
        let inode = self.inode(ino)?;
        let bytes = inode
            .xattrs
            .as_ref()
            .map_or_else(|| Xattrs::default().bytes_with(name, value), |xattrs| xattrs.bytes_with(name, value));
        if bytes > MOST_XATTR_BYTES {
            return Err(Malformed("the extended attributes of an inode"));
        }
        let before = inode.xattrs.get_or_insert_default().set(name, value);
        self.image_bytes += xattr_bytes(name, value);
        self.image_bytes -= before.map_or(0, |before| xattr_bytes(name, &before));
        Ok(())
    }

    fn remove_xattr(&mut self, ino: u64, name: &[u8]) -> Result<(), Malformed> {
        let inode = self.inode(ino)?;
        let before = inode.xattrs.as_mut().and_then(|xattrs| xattrs.remove(name));
        let before = before.ok_or(Malformed("the end of an extended attribute that an inode does not have"))?;
        if inode.xattrs.as_ref().is_some_and(|xattrs| xattrs.is_empty()) {
            inode.xattrs = None;
        }
        self.image_bytes -= xattr_bytes(name, &before);
        Ok(())
    }

    fn remove(&mut self, ino: u64) -> Result<(), Malformed> {
        let inode = self.get(ino).ok_or(NO_INODE)?;
        let is_empty = !matches!(&inode.body, Body::Directory(directory) if directory.len() > 0);
        if ino == ROOT || inode.names > 0 || !is_empty {
            return Err(Malformed("the end of an inode that has a name"));
        }
        self.image_bytes -= made_bytes(ino, inode);
        if let Some(inode) = self.inodes.remove(&ino) {
            if let Body::File { runs, .. } = &inode.body {
                self.image_bytes -= runs.as_slice().len() as u64 * RUN_BYTES;
                runs.as_slice().iter().for_each(|run| self.free(run.space()));
            }
            if let Some(late) = &mut self.late {
                late.keep(ino, inode);
            }
        }
        Ok(())
    }

    fn free(&mut self, space: Space) {
        match self.now_ms {
            Some(now_ms) => self.clusters.give_later(space, now_ms),
            None => self.clusters.give(space),
        }
    }

    fn add_name(&mut self, parent: u64, ino: u64, time: i64, name: &[u8]) -> Result<(), Malformed> {
        let is_directory = match self.get(ino) {
            Some(inode) if self.is_complete => {
                let is_directory = inode.kind() == Kind::Directory;
                let is_full = if is_directory { inode.names > 0 } else { inode.names >= MOST_LINKS };
                if is_full || ino == ROOT || (is_directory && self.is_within(parent, ino)) {
                    return Err(Malformed("another name of an inode"));
                }
                is_directory
            }
            None if self.is_complete => return Err(NO_INODE),
            _ => false, // found at the end of the image
        };
        let is_complete = self.is_complete;
        let inode = self.inode(parent)?;
        let has_name = inode.names > 0 || parent == ROOT || !is_complete;
        let Body::Directory(directory) = &mut inode.body else { return Err(NO_DIRECTORY) };
        if !has_name || !directory.add(name.into(), ino) {
            return Err(Malformed("a name that a directory cannot have"));
        }
        if is_directory {
            directory.count_directory(true);
        }
        touch(&mut inode.attributes, time);
        self.image_bytes += entry_bytes(name);
        if let Some(child) = self.inodes.get_mut(&ino) {
            if is_complete {
                child.names += 1;
            }
            if let Body::Directory(directory) = &mut child.body {
                directory.parent = parent;
            }
            if time != NO_TIME {
                child.attributes.changed = time;
            }
        }
        Ok(())
    }

    fn remove_name(&mut self, parent: u64, ino: u64, time: i64, name: &[u8]) -> Result<(), Malformed> {
        let is_complete = self.is_complete;
        let is_directory = is_complete && self.get(ino).is_some_and(|inode| inode.kind() == Kind::Directory);
        let inode = self.inode(parent)?;
        let Body::Directory(directory) = &mut inode.body else { return Err(NO_DIRECTORY) };
        if !directory.remove(name, ino) {
            return Err(Malformed("the end of a name that a directory does not have"));
        }
        if is_directory {
            directory.count_directory(false);
        }
        touch(&mut inode.attributes, time);
        self.image_bytes -= entry_bytes(name);
        if let Some(child) = self.inodes.get_mut(&ino) {
            if is_complete {
                child.names -= 1;
            }
            if let Body::Directory(directory) = &mut child.body {
                directory.parent = 0;
            }
            if time != NO_TIME {
                child.attributes.changed = time;
            }
        }
        Ok(())
    }

    /// Whether the way from `ino` to the root leads over `over`.
    pub(super) fn is_within(&self, ino: u64, over: u64) -> bool {
        // A directory without entries has none within. This spares the walk for new ones.
        if ino != over
            && matches!(self.get(over).map(|inode| &inode.body), Some(Body::Directory(over)) if over.len() == 0)
        {
            return false;
        }
        let mut at = ino;
        while at != over {
            match self.get(at).map(|inode| &inode.body) {
                Some(Body::Directory(directory)) if at != ROOT => at = directory.parent,
                _ => return false,
            }
        }
        true
    }

    fn resize(&mut self, ino: u64, size: u64, time: i64) -> Result<(), Malformed> {
        let inode = self.inode(ino)?;
        let Body::File { size: now, .. } = &mut inode.body else { return Err(NO_FILE) };
        if size > super::MOST_FILE_BYTES {
            return Err(Malformed("the size of a file"));
        }
        *now = size;
        touch(&mut inode.attributes, time);
        Ok(())
    }

    fn map(&mut self, ino: u64, run: Run) -> Result<(), Malformed> {
        let Some(inode) = self.inodes.get_mut(&ino) else { return Err(NO_INODE) };
        let Body::File { runs, .. } = &mut inode.body else { return Err(NO_FILE) };
        let is_valid = run.count > 0 && run.clusters().end <= super::MOST_FILE_CLUSTERS;
        let before = runs.as_slice().len() as u64;
        // Both are done, or neither.
        if !is_valid || !runs.holes(run.clusters()).eq(&[run.clusters()]) || !self.clusters.take(run.space()) {
            return Err(Malformed("clusters of a file, which are used or not there"));
        }
        runs.add(run);
        if let Some(late) = &mut self.late {
            late.taken(run.space());
        }
        self.image_bytes = self.image_bytes + runs.as_slice().len() as u64 * RUN_BYTES - before * RUN_BYTES;
        Ok(())
    }

    fn unmap(&mut self, ino: u64, first: u32, count: u32) -> Result<(), Malformed> {
        let inode = self.inode(ino)?;
        let Body::File { runs, .. } = &mut inode.body else { return Err(NO_FILE) };
        let before = runs.as_slice().len() as u64;
        let freed = runs.remove(u64::from(first)..u64::from(first) + u64::from(count));
        let after = runs.as_slice().len() as u64;
        self.image_bytes = self.image_bytes + after * RUN_BYTES - before * RUN_BYTES;
        freed.into_iter().for_each(|run| self.free(run.space()));
        Ok(())
    }

    /// The image was read: counts names, and checks what is always true.
    fn complete(&mut self, next: u64) -> Result<(), Malformed> {
        let is_first = !self.is_complete && next >= self.next && next < u64::MAX;
        if !is_first || self.get(ROOT).is_none() {
            return Err(Malformed("the end of an image"));
        }
        let mut entries = Vec::new();
        for (parent, inode) in &self.inodes {
            if let Body::Directory(directory) = &inode.body {
                entries.extend(directory.after(0).map(|(_, entry)| (*parent, entry.ino)));
            }
        }
        for (parent, ino) in entries {
            let child = self.inode(ino)?;
            child.names += 1;
            let most = if child.kind() == Kind::Directory { 1 } else { MOST_LINKS };
            if ino == ROOT || child.names > most {
                return Err(Malformed("the number of an inode's names"));
            }
            if let Body::Directory(directory) = &mut child.body {
                directory.parent = parent;
                if let Body::Directory(directory) = &mut self.inode(parent)?.body {
                    directory.count_directory(true);
                }
            }
        }
        let root = self.inode(ROOT)?;
        root.names = 1;
        if let Body::Directory(directory) = &mut root.body {
            directory.parent = ROOT;
        }
        self.check_ways()?;
        (self.next, self.is_complete) = (next, true);
        Ok(())
    }

    /// Whether the root leads to each directory that has a name, and those without one are empty. Each has one name at
    /// most, so those that the root does not lead to are a circle.
    fn check_ways(&self) -> Result<(), Malformed> {
        let mut named = 0;
        for inode in self.inodes.values() {
            if let Body::Directory(directory) = &inode.body {
                named += usize::from(inode.names > 0);
                if inode.names == 0 && directory.len() > 0 {
                    return Err(Malformed("a directory with entries and without a name"));
                }
            }
        }
        let (mut open, mut reached) = (vec![ROOT], 0);
        while let Some(ino) = open.pop() {
            if let Some(Body::Directory(directory)) = self.get(ino).map(|inode| &inode.body) {
                reached += 1;
                open.extend(directory.after(0).map(|(_, entry)| entry.ino));
            }
        }
        if reached == named { Ok(()) } else { Err(Malformed("a directory that is within itself")) }
    }
}

fn touch(attributes: &mut Attributes, time: i64) {
    if time != NO_TIME {
        (attributes.modified, attributes.changed) = (time, time);
    }
}

const NO_INODE: Malformed = Malformed("the number of an inode");

const NO_DIRECTORY: Malformed = Malformed("an entry of an inode that is not a directory");

const NO_FILE: Malformed = Malformed("a change of an inode that is not a file");

// What is asked of names.

/// An inode to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct New {
    /// What it is.
    pub kind: NewKind,
    /// Its permissions.
    pub mode: u16,
    /// Its owner.
    pub uid: u32,
    /// Its group. In a directory with the set-group-id bit it is the directory's.
    pub gid: u32,
    /// Permissions that it does not get, unless the directory has a default ACL, whose permissions then bound it.
    pub umask: u16,
}

/// The root of a new file system.
impl Default for New {
    fn default() -> New {
        New { kind: NewKind::Directory, mode: 0o755, uid: 0, gid: 0, umask: 0 }
    }
}

/// What an inode to be made is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewKind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link with this target.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// The name of a socket.
    Socket,
    /// A device of this number.
    CharacterDevice(u32),
    /// A device of this number.
    BlockDevice(u32),
}

/// How an entry is renamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rename {
    /// What has the new name loses it.
    #[default]
    Replace,
    /// It fails if something has the new name.
    NoReplace,
    /// The two change places.
    Exchange,
}

/// What of an inode is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// Its permissions.
    pub mode: Option<u16>,
    /// Its owner.
    pub uid: Option<u32>,
    /// Its group.
    pub gid: Option<u32>,
    /// When it was read.
    pub accessed: Option<SetTime>,
    /// When its contents were changed.
    pub modified: Option<SetTime>,
    /// The set-user-id bit goes, and so does the set-group-id bit if the group can execute it.
    pub drops_set_id: bool,
}

/// An extended attribute to be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetXattr {
    /// Its name.
    pub name: Box<[u8]>,
    /// Its value.
    pub value: Box<[u8]>,
    /// Whether it must be there.
    pub how: SetXattrHow,
    /// If it is an ACL, the set-group-id bit goes.
    pub drops_set_group_id: bool,
}

/// Whether an extended attribute must be there before it is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SetXattrHow {
    /// It may be.
    #[default]
    Any,
    /// It must not be.
    Create,
    /// It must be.
    Replace,
}

/// A time that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The present one.
    Now,
    /// This one, in nanoseconds since 1970.
    To(i64),
}

// Why something cannot be done to names.

/// Why something was not done. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamesError {
    /// There is no such name; or the directory was removed.
    #[error("no such file or directory")]
    NotFound,
    /// There is no inode of this number.
    #[error("inode {0} does not exist any more")]
    Stale(u64),
    /// There is such a name.
    #[error("the name exists")]
    Exists,
    /// It must be a directory.
    #[error("not a directory")]
    NotADirectory,
    /// It must not be a directory.
    #[error("is a directory")]
    IsADirectory,
    /// It must be a file.
    #[error("not a file")]
    NotAFile,
    /// A directory with entries cannot be removed.
    #[error("the directory is not empty")]
    NotEmpty,
    /// A directory cannot be moved into itself.
    #[error("a directory cannot be moved into itself")]
    WithinItself,
    /// A directory has one name.
    #[error("a directory has one name")]
    LinkOfDirectory,
    /// The inode has the most names.
    #[error("an inode has at most {MOST_LINKS} names")]
    TooManyLinks,
    /// The name is too long.
    #[error("a name has at most {MOST_NAME_BYTES} bytes")]
    NameTooLong,
    /// The target is too long.
    #[error("the target of a link has 1 to {MOST_TARGET_BYTES} bytes")]
    TargetTooLong,
    /// Not a name, or not a range of bytes.
    #[error("the name or the range is not valid")]
    Invalid,
    /// The file would be too long.
    #[error("a file has at most {} bytes", super::MOST_FILE_BYTES)]
    FileTooLong,
    /// The inode does not have this extended attribute.
    #[error("no such extended attribute")]
    NoXattr,
    /// There are no extended attributes of such names.
    #[error("extended attributes have names of user, trusted, security, or of POSIX ACLs")]
    XattrNamespace,
    /// An ACL for what is made in a directory belongs to a directory.
    #[error("only a directory has a default ACL")]
    DefaultAcl,
    /// The inode's extended attributes would be too long.
    #[error("the extended attributes of an inode have at most {MOST_XATTR_BYTES} bytes together")]
    XattrsTooLong,
    /// No cluster is free, or the areas have no room for more names.
    #[error("no space is left in the volume")]
    NoSpace,
    /// What is in memory does not permit what was checked before: a bug.
    #[error("{0}: this is a bug")]
    Bug(Malformed),
}

impl NamesError {
    /// What the system calls it.
    pub fn errno(self) -> Errno {
        match self {
            NamesError::NotFound => Errno::NOENT,
            NamesError::Stale(_) => Errno::STALE,
            NamesError::Exists => Errno::EXIST,
            NamesError::NotADirectory => Errno::NOTDIR,
            NamesError::IsADirectory => Errno::ISDIR,
            NamesError::NotEmpty => Errno::NOTEMPTY,
            NamesError::WithinItself | NamesError::Invalid | NamesError::NotAFile => Errno::INVAL,
            NamesError::LinkOfDirectory => Errno::PERM,
            NamesError::TooManyLinks => Errno::MLINK,
            NamesError::NameTooLong | NamesError::TargetTooLong => Errno::NAMETOOLONG,
            NamesError::FileTooLong => Errno::FBIG,
            NamesError::NoXattr => Errno::NODATA,
            NamesError::XattrNamespace => Errno::OPNOTSUPP,
            NamesError::DefaultAcl => Errno::ACCESS,
            NamesError::NoSpace | NamesError::XattrsTooLong => Errno::NOSPC,
            NamesError::Bug(_) => Errno::IO,
        }
    }
}

/// Late: files that have been removed, and are still there for those who have them open on a host that follows.
///
/// The clusters of a removed file rest for a while ([`super::clusters`]), but are used at once if no others are
/// free. So a file is kept here until another one gets a cluster of it, and not for longer than the rest. A moment
/// is noted at which it was there with this content: what a reader finds in its blocks is the file's if no write
/// since then is in it.
#[derive(Clone, Debug, Default)]
pub(super) struct Late {
    files: BTreeMap<u64, File>,
    /// Whose clusters these are: the first one, how many, and the inode.
    spaces: BTreeMap<u32, (u32, u64)>,
    /// In the order in which they were removed.
    order: VecDeque<u64>,
    now_ms: u64,
    moment: u64,
}

#[derive(Clone, Debug)]
struct File {
    inode: Box<Inode>,
    since_ms: u64,
    moment: u64,
}

/// Files that are kept at most. The oldest ones make room.
const MOST_FILES: usize = 1 << 16;

impl Late {
    /// So much time has passed. What is removed from now on was there at this moment.
    pub(super) fn tick(&mut self, now_ms: u64, moment: u64) {
        (self.now_ms, self.moment) = (now_ms, moment);
        while let Some(oldest) = self.order.front().copied() {
            let is_kept = self.files.get(&oldest).is_some_and(|file| now_ms.saturating_sub(file.since_ms) < REST_MS);
            if is_kept && self.order.len() <= MOST_FILES {
                return;
            }
            self.order.pop_front();
            self.forget(oldest);
        }
    }

    /// An inode is no more.
    pub(super) fn keep(&mut self, ino: u64, inode: Box<Inode>) {
        let Body::File { runs, .. } = &inode.body else { return };
        for space in runs.as_slice().iter().map(|run| run.space()) {
            self.spaces.insert(space.at, (space.count, ino));
        }
        self.files.insert(ino, File { inode, since_ms: self.now_ms, moment: self.moment });
        self.order.push_back(ino);
    }

    /// Another file has these clusters now.
    pub(super) fn taken(&mut self, space: Space) {
        let end = space.at.saturating_add(space.count);
        // Those of different files have no cluster in common, so the last one before the end is the last that can.
        while let Some((at, (count, ino))) = self.spaces.range(..end).next_back().map(|(at, of)| (*at, *of)) {
            if at + count <= space.at {
                return;
            }
            self.forget(ino);
        }
    }

    fn forget(&mut self, ino: u64) {
        let Some(File { inode, .. }) = self.files.remove(&ino) else { return };
        if let Body::File { runs, .. } = &inode.body {
            runs.as_slice().iter().for_each(|run| _ = self.spaces.remove(&run.space().at));
        }
    }

    /// A file that is kept, and a moment at which it was there.
    pub(super) fn get(&self, ino: u64) -> Option<(&Inode, u64)> {
        self.files.get(&ino).map(|file| (&*file.inode, file.moment))
    }
}

/// Bytes of records after which a frame of the image ends.
const FRAME_BYTES: usize = 4 << 10;

/// Whole blocks of the image are written when they have so many bytes.
pub(super) const CHUNK_BYTES: usize = 64 << 10;

/// An image that is being written.
#[derive(Clone, Debug)]
pub(super) struct Image {
    area: Area,
    /// Where the areas are when it is used.
    geometry: Geometry,
    log: Log,
    /// Records of the next frame, and their bytes.
    records: Vec<Record>,
    bytes: usize,
    /// Inodes before this one have been passed.
    at: u64,
    /// If this inode was begun: its entries, or clusters, before this one have been passed.
    part: Option<u64>,
}

impl Image {
    pub(super) fn new(geometry: Geometry, area: Area, lap: u64) -> Image {
        Image { area, geometry, log: Log::new(geometry, area, lap), records: Vec::new(), bytes: 0, at: 0, part: None }
    }

    /// Whether nothing of it was written.
    pub(super) fn is_new(&self) -> bool {
        self.at == 0 && self.part.is_none() && self.log.at() == 0
    }

    /// Where the areas are when it is used.
    #[cfg(test)]
    pub(super) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether an inode's attributes have been passed.
    fn has(&self, ino: u64) -> bool {
        ino < self.at || (ino == self.at && self.part.is_some())
    }

    /// Up to which entry or cluster an inode has been passed.
    fn passed(&self, ino: u64) -> u64 {
        match self.part {
            _ if ino < self.at => u64::MAX,
            Some(part) if ino == self.at => part,
            _ => 0,
        }
    }

    /// What to write of this change, before it is carried out; and the inodes whose attributes must be written after.
    pub(super) fn change(&mut self, tree: &Tree, record: &Record) -> Vec<u64> {
        match record {
            Record::Named { parent, ino, name, .. } | Record::Unnamed { parent, ino, name, .. } => {
                let key = match tree.get(*parent).map(|inode| &inode.body) {
                    Some(Body::Directory(directory)) => directory.key(name).unwrap_or(u64::MAX),
                    _ => u64::MAX,
                };
                if key < self.passed(*parent) {
                    self.put(record.clone());
                    return Vec::new();
                }
                [*parent, *ino].into_iter().filter(|ino| self.has(*ino)).collect()
            }
            Record::Mapped { ino, run } => {
                let end = run.clusters().end.min(self.passed(*ino));
                if end > run.first.into() {
                    let run = Run { count: (end - u64::from(run.first)) as u32, ..*run };
                    self.put(Record::Mapped { ino: *ino, run });
                }
                Vec::new()
            }
            Record::Unmapped { ino, first, count } => {
                let end = (u64::from(*first) + u64::from(*count)).min(self.passed(*ino));
                if end > u64::from(*first) {
                    let count = (end - u64::from(*first)) as u32;
                    self.put(Record::Unmapped { ino: *ino, first: *first, count });
                }
                Vec::new()
            }
            Record::Gone { ino } | Record::Set { ino, .. } | Record::Sized { ino, .. } if self.has(*ino) => {
                self.put(record.clone());
                Vec::new()
            }
            Record::Xattr { ino, .. } | Record::NoXattr { ino, .. } if self.has(*ino) => {
                #[cfg(test)]
                if crate::Mutant::XattrsNotPassedOn.is_active() {
                    return Vec::new();
                }
                self.put(record.clone());
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// These inodes have other attributes now.
    pub(super) fn set(&mut self, tree: &Tree, inodes: Vec<u64>) {
        for ino in inodes {
            if let Some(inode) = tree.get(ino) {
                self.put(Record::Set { ino, attributes: inode.attributes });
            }
        }
    }

    fn put(&mut self, record: Record) {
        self.bytes += record.bytes();
        self.records.push(record);
        if self.bytes >= FRAME_BYTES {
            self.end_frame();
        }
    }

    fn end_frame(&mut self) {
        if !self.records.is_empty() {
            self.log.append(&self.records);
            self.records.clear();
            self.bytes = 0;
        }
    }

    /// Writes about this number of bytes of what follows. Returns whether nothing follows.
    pub(super) fn step(&mut self, tree: &Tree, bytes: u64) -> bool {
        let end = self.written() + bytes;
        while self.written() < end {
            let Some((ino, inode)) = tree.inodes.range(self.at..).next() else { return true };
            let ino = *ino;
            let part = match self.part {
                Some(part) if ino == self.at => part,
                _ => {
                    (self.at, self.part) = (ino, Some(0));
                    self.begin(ino, tree);
                    0
                }
            };
            let next = match &inode.body {
                Body::Directory(directory) => {
                    let next = directory.after(part.saturating_sub(1)).next();
                    next.map(|(key, entry)| {
                        let (ino, name) = (entry.ino, entry.name.clone());
                        (Record::Named { parent: self.at, ino, time: NO_TIME, name }, key + 1)
                    })
                }
                Body::File { runs, .. } => {
                    let next = runs.within(part..u64::MAX).next();
                    next.map(|run| (Record::Mapped { ino, run }, run.clusters().end))
                }
                _ => None,
            };
            match next {
                Some((record, part)) => {
                    self.put(record);
                    self.part = Some(part);
                }
                None => (self.at, self.part) = (ino + 1, None),
            }
        }
        false
    }

    /// Writes what an inode is, without what is in it.
    fn begin(&mut self, ino: u64, tree: &Tree) {
        let Some(inode) = tree.get(ino) else { return };
        self.put(made(ino, inode));
        inode
            .xattrs()
            .for_each(|(name, value)| self.put(Record::Xattr { ino, name: name.into(), value: value.into() }));
        if let Body::File { size: size @ 1.., .. } = inode.body {
            self.put(Record::Sized { ino, size, time: NO_TIME });
        }
    }

    fn written(&self) -> u64 {
        self.log.at() + self.bytes as u64
    }

    /// Whether an area has no room for much more of it. Then it is begun again.
    pub(super) fn is_too_long(&self) -> bool {
        self.log.room() < 2 * crate::names::log::MOST_FRAME_BYTES as u64
    }

    /// Blocks that can be written now; `None` until they are some.
    pub(super) fn take(&mut self) -> Option<BlocksToWrite> {
        (self.log.whole_bytes() >= CHUNK_BYTES).then(|| self.log.take(true))
    }

    /// The image is complete: its last blocks, the log behind it whose next frame has this number, and the head with
    /// which it is used.
    pub(super) fn finish(mut self, tree: &Tree, head: &Head, number: u64) -> (BlocksToWrite, Log, Head) {
        self.end_frame();
        self.log.append(&[Record::Complete { next: tree.next }]);
        let blocks = self.log.take(false);
        let image_bytes = self.log.at();
        self.log.continue_at(number);
        let last_lap = head.last_lap;
        let (geometry, area) = (self.geometry, self.area);
        let head = Head { geometry, area, lap: last_lap, last_lap, image_bytes, first: number };
        (blocks, self.log, head)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::names::clusters::{Run, Runs};
    use crate::names::inode::Attributes;

    fn file(runs: &[(u32, u32)]) -> Box<Inode> {
        let attributes = Attributes { mode: 0o600, uid: 0, gid: 0, accessed: 0, modified: 0, changed: 0 };
        let mut inode = Inode::new(crate::names::Kind::File, attributes, 0, Box::default());
        let mut all = Runs::None;
        for (first, (at, count)) in (0..).step_by(100).zip(runs) {
            assert!(all.add(Run { first, at: *at, count: *count }));
        }
        inode.body = Body::File { size: 1, runs: all };
        Box::new(inode)
    }

    #[test]
    fn a_removed_file_is_kept_until_a_cluster_of_it_is_used_or_its_time_is_over() {
        let mut late = Late::default();
        late.tick(1000, 7);
        late.keep(2, file(&[(10, 5), (40, 1)]));
        late.keep(3, file(&[(15, 5)]));
        late.keep(4, file(&[]));
        assert!((2..5).all(|ino| late.get(ino).unwrap().1 == 7));
        for space in [Space { at: 0, count: 10 }, Space { at: 20, count: 20 }, Space { at: 41, count: 9 }] {
            late.taken(space);
        }
        assert!(late.get(2).is_some() && late.get(3).is_some(), "their neighbours were used");
        late.taken(Space { at: 14, count: 1 });
        assert!(late.get(2).is_none() && late.get(3).is_some());
        late.taken(Space { at: 0, count: 100 });
        assert!(late.get(3).is_none() && late.spaces.is_empty());
        late.tick(1000 + REST_MS - 1, 8);
        assert!(late.get(4).is_some());
        late.tick(1000 + REST_MS, 9);
        assert!(late.get(4).is_none() && late.order.is_empty());
        for ino in 10..10 + MOST_FILES as u64 + 5 {
            late.keep(ino, file(&[]));
        }
        late.tick(1001 + REST_MS, 9);
        assert_eq!((late.files.len(), late.get(14).is_none(), late.get(15).is_some()), (MOST_FILES, true, true));
    }
}
