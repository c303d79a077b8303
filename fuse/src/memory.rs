//! Memory: a file system in this process's memory. For tests, and to measure what the kernel's part costs.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::abi::ROOT;
use crate::answer::{
    Answer, Attributes, Created, Data, DirectoryEntry, Done, Entry, FileKind, KnownAttributes, Listing, ListingPlus,
    Opened, Position, Statistics, Target, Timestamp, Written,
};
use crate::file_system::FileSystem;
use crate::request::{
    Allocate, Caller, Close, Create, Fsync, GetAttributes, Link, Lookup, MakeDirectory, MakeNode, NewTime, Open, Read,
    ReadDirectory, Remove, Rename, RenameHow, Seek, SetAttributes, Symlink, Write,
};

/// Files in memory. Handles are not needed: an inode stays as long as the kernel knows it.
pub struct MemoryFileSystem {
    names: RwLock<Names>,
    /// For how long the kernel may believe what it was told.
    valid: Duration,
    next: AtomicU64,
}

impl MemoryFileSystem {
    /// An empty one. The kernel may use for so long what it was told, without asking again.
    pub fn new(valid: Duration) -> MemoryFileSystem {
        let caller = Caller { uid: 0, gid: 0, pid: 0 };
        let body = Body::Directory { entries: BTreeMap::new(), parent: ROOT };
        let root = Inode { lookups: 1, ..inode(ROOT, FileKind::Directory, 0o755, caller, body) };
        MemoryFileSystem { names: RwLock::new(HashMap::from([(ROOT, root)])), valid, next: AtomicU64::new(ROOT + 1) }
    }

    /// How many inodes there are, with the root.
    pub fn inodes(&self) -> usize {
        self.names().len()
    }

    /// Changes a file behind the kernel's back. Its length stays.
    ///
    /// # Errors
    /// `ENOENT` if it is not in the root.
    pub fn change(&self, name: &[u8], fill: u8) -> Result<u64, Errno> {
        let names = self.names();
        let node = *entries(&names, ROOT)?.get(name).ok_or(Errno::NOENT)?;
        write(content(&names, node)?).bytes.fill(fill);
        Ok(node)
    }

    /// Makes a file behind the kernel's back, in the root.
    pub fn add(&self, name: &[u8]) {
        let mut names = self.names_mut();
        let made = self.make_file(&mut names, (ROOT, name), 0o644, Caller { uid: 0, gid: 0, pid: 0 });
        if let Ok(Entry { attributes: Some(Attributes { node, .. }), .. }) = made {
            names.entry(node).and_modify(|inode| inode.lookups -= 1);
        }
    }

    /// How long a file in the root is.
    ///
    /// # Errors
    /// `ENOENT` if it is not there.
    pub fn length(&self, name: &[u8]) -> Result<usize, Errno> {
        let names = self.names();
        let node = *entries(&names, ROOT)?.get(name).ok_or(Errno::NOENT)?;
        Ok(read(content(&names, node)?).bytes.len())
    }

    fn names(&self) -> RwLockReadGuard<'_, Names> {
        self.names.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn names_mut(&self) -> RwLockWriteGuard<'_, Names> {
        self.names.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel knows the inode once more.
    fn entry(&self, names: &mut Names, node: u64) -> Result<Entry, Errno> {
        let inode = names.get_mut(&node).ok_or(Errno::STALE)?;
        inode.lookups += 1;
        let (name_valid, attributes_valid) = (self.valid, self.valid);
        Ok(Entry { attributes: Some(attributes(inode)), generation: 0, name_valid, attributes_valid })
    }

    fn known(&self, names: &Names, node: u64) -> Result<KnownAttributes, Errno> {
        let inode = names.get(&node).ok_or(Errno::STALE)?;
        Ok(KnownAttributes { attributes: attributes(inode), valid: self.valid })
    }

    /// Finds a name, and counts it.
    pub fn find(&self, asked: Lookup<'_>) -> Result<Entry, Errno> {
        let mut names = self.names_mut();
        match entries(&names, asked.parent)?.get(asked.name).copied() {
            Some(node) => self.entry(&mut names, node),
            None => Ok(Entry::absent(self.valid)),
        }
    }

    fn make(
        &self,
        names: &mut Names,
        (parent, name): (u64, &[u8]),
        (kind, permissions, caller): (FileKind, u32, Caller),
        body: Body,
    ) -> Result<Entry, Errno> {
        if entries(names, parent)?.contains_key(name) {
            return Err(Errno::EXIST);
        }
        let above = names.get(&parent).ok_or(Errno::STALE)?.attributes;
        if above.links == 0 {
            return Err(Errno::NOENT);
        }
        let mut caller = caller;
        let mut permissions = permissions;
        // As in most file systems: a directory with this bit gives its group, and the bit to directories.
        if above.permissions & SETGID != 0 {
            caller.gid = above.gid;
            permissions |= if kind == FileKind::Directory { SETGID } else { 0 };
        }
        let node = self.next.fetch_add(1, Ordering::Relaxed);
        names.insert(node, inode(node, kind, permissions, caller, body));
        entries_mut(names, parent)?.insert(name.to_vec(), node);
        if kind == FileKind::Directory {
            links(names, parent, 1);
        }
        touch(names, parent);
        self.entry(names, node)
    }

    fn make_file(&self, names: &mut Names, at: (u64, &[u8]), permissions: u32, caller: Caller) -> Result<Entry, Errno> {
        let body = Body::File(Arc::new(RwLock::new(Content { bytes: Vec::new(), modified: now() })));
        self.make(names, at, (FileKind::File, permissions, caller), body)
    }

    fn removed(&self, asked: Remove<'_>, is_directory: bool) -> Result<(), Errno> {
        let mut names = self.names_mut();
        let node = *entries(&names, asked.parent)?.get(asked.name).ok_or(Errno::NOENT)?;
        check_replaced(&names, node, is_directory)?;
        entries_mut(&mut names, asked.parent)?.remove(asked.name);
        unlinked(&mut names, asked.parent, node);
        touch(&mut names, asked.parent);
        Ok(())
    }

    fn renamed(&self, asked: Rename<'_>) -> Result<(), Errno> {
        if asked.leaves_whiteout {
            return Err(Errno::INVAL);
        }
        let mut names = self.names_mut();
        let node = *entries(&names, asked.parent)?.get(asked.name).ok_or(Errno::NOENT)?;
        let other = entries(&names, asked.new_parent)?.get(asked.new_name).copied();
        match (asked.how, other) {
            (RenameHow::NoReplace, Some(_)) => return Err(Errno::EXIST),
            (RenameHow::Exchange, None) => return Err(Errno::NOENT),
            (_, Some(other)) if other == node => return Ok(()),
            (RenameHow::Replace, Some(other)) => {
                check_replaced(&names, other, is_directory(&names, node))?;
                entries_mut(&mut names, asked.new_parent)?.remove(asked.new_name);
                unlinked(&mut names, asked.new_parent, other);
            }
            _ => {}
        }
        entries_mut(&mut names, asked.parent)?.remove(asked.name);
        entries_mut(&mut names, asked.new_parent)?.insert(asked.new_name.to_vec(), node);
        moved(&mut names, node, asked.parent, asked.new_parent);
        if let (RenameHow::Exchange, Some(other)) = (asked.how, other) {
            entries_mut(&mut names, asked.parent)?.insert(asked.name.to_vec(), other);
            moved(&mut names, other, asked.new_parent, asked.parent);
        }
        [asked.parent, asked.new_parent, node].iter().for_each(|node| touch(&mut names, *node));
        Ok(())
    }

    fn linked(&self, asked: Link<'_>) -> Result<Entry, Errno> {
        let mut names = self.names_mut();
        if entries(&names, asked.parent)?.contains_key(asked.name) {
            return Err(Errno::EXIST);
        }
        if is_directory(&names, asked.node) {
            return Err(Errno::PERM);
        }
        entries_mut(&mut names, asked.parent)?.insert(asked.name.to_vec(), asked.node);
        links(&mut names, asked.node, 1);
        [asked.parent, asked.node].iter().for_each(|node| touch(&mut names, *node));
        self.entry(&mut names, asked.node)
    }

    fn changed(&self, asked: SetAttributes) -> Result<KnownAttributes, Errno> {
        let mut names = self.names_mut();
        let at = |time| match time {
            NewTime::Now => now(),
            NewTime::At(time) => time,
        };
        if let Some(size) = asked.size {
            resize(&names, asked.node, size)?;
        }
        if let (Some(modified), Ok(content)) = (asked.modified, content(&names, asked.node)) {
            write(content).modified = at(modified);
        }
        let inode = names.get_mut(&asked.node).ok_or(Errno::STALE)?;
        let of = &mut inode.attributes;
        of.permissions = asked.permissions.unwrap_or(of.permissions);
        of.uid = asked.uid.unwrap_or(of.uid);
        of.gid = asked.gid.unwrap_or(of.gid);
        of.accessed = asked.accessed.map_or(of.accessed, at);
        of.modified = asked.modified.map_or(of.modified, at);
        of.changed = asked.changed.unwrap_or_else(now);
        self.known(&names, asked.node)
    }

    fn opened(&self, asked: Open) -> Result<Opened, Errno> {
        let names = self.names();
        if asked.flags.truncates() {
            resize(&names, asked.node, 0)?;
        }
        Ok(OPENED)
    }

    fn created(&self, asked: Create<'_>) -> Result<Created, Errno> {
        let mut names = self.names_mut();
        let found = entries(&names, asked.parent)?.get(asked.name).copied();
        let entry = match found {
            Some(_) if asked.flags.is_exclusive() => return Err(Errno::EXIST),
            Some(node) => {
                if asked.flags.truncates() {
                    resize(&names, node, 0)?;
                }
                self.entry(&mut names, node)?
            }
            None => self.make_file(&mut names, (asked.parent, asked.name), asked.permissions, asked.caller)?,
        };
        Ok(Created { entry, opened: OPENED })
    }

    fn written(&self, asked: &Write<'_>) -> Result<Written, Errno> {
        let content = Arc::clone(content(&self.names(), asked.node)?);
        let mut content = write(&content);
        let (start, data) = (asked.offset as usize, asked.data.bytes());
        let end = start.checked_add(data.len()).filter(|end| *end <= MOST_FILE_BYTES).ok_or(Errno::FBIG)?;
        if content.bytes.len() < end {
            content.bytes.resize(end, 0);
        }
        content.bytes[start..end].copy_from_slice(&data);
        content.modified = now();
        Ok(Written(data.len() as u32))
    }

    fn list(
        &self,
        asked: &ReadDirectory,
        mut push: impl FnMut(&mut Names, &DirectoryEntry<'_>) -> bool,
    ) -> Result<(), Errno> {
        let mut names = self.names_mut();
        let Some(Inode { body: Body::Directory { entries, parent }, .. }) = names.get(&asked.node) else {
            return Err(Errno::NOTDIR);
        };
        // An offset is that of the inode behind: names that come and go meanwhile do not move the others.
        let dots = [(&b"."[..], asked.node, 1), (&b".."[..], *parent, 2)];
        let mut all: Vec<(Vec<u8>, u64, u64)> = dots.map(|(name, node, at)| (name.to_vec(), node, at)).to_vec();
        let mut named: Vec<_> = entries.iter().map(|(name, node)| (name.clone(), *node, *node + 2)).collect();
        named.sort_by_key(|(_, _, at)| *at);
        all.extend(named);
        for (name, node, offset) in all.into_iter().filter(|(_, _, at)| *at > asked.offset) {
            let kind = names.get(&node).map_or(FileKind::Directory, |inode| inode.attributes.kind);
            if !push(&mut names, &DirectoryEntry { node, kind, name: &name, offset }) {
                break;
            }
        }
        Ok(())
    }

    fn allocated(&self, asked: Allocate) -> Result<(), Errno> {
        let content = Arc::clone(content(&self.names(), asked.node)?);
        let mut content = write(&content);
        let end = (asked.offset + asked.length) as usize;
        if end > MOST_FILE_BYTES {
            return Err(Errno::FBIG);
        }
        let mode = FallocateFlags::from_bits_retain(asked.mode);
        let length = content.bytes.len();
        if mode == FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE {
            let range = (asked.offset as usize).min(length)..end.min(length);
            content.bytes[range].fill(0);
        } else if !mode.is_empty() && mode != FallocateFlags::KEEP_SIZE {
            return Err(Errno::OPNOTSUPP);
        } else if mode.is_empty() && length < end {
            content.bytes.resize(end, 0);
        }
        content.modified = now();
        Ok(())
    }
}

impl FileSystem for MemoryFileSystem {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        answer.result(self.find(asked));
    }

    fn forget(&self, node: u64, lookups: u64) {
        let mut names = self.names_mut();
        if let Some(inode) = names.get_mut(&node) {
            inode.lookups = inode.lookups.saturating_sub(lookups);
        }
        reap(&mut names, node);
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        answer.result(self.known(&self.names(), asked.node));
    }

    fn set_attributes(&self, asked: SetAttributes, answer: Answer<'_, KnownAttributes>) {
        answer.result(self.changed(asked));
    }

    fn read_link(&self, node: u64, answer: Answer<'_, Target>) {
        match self.names().get(&node) {
            Some(Inode { body: Body::Symlink(target), .. }) => answer.give(Target(target.clone())),
            _ => answer.fail(Errno::INVAL),
        }
    }

    fn symlink(&self, asked: Symlink<'_>, answer: Answer<'_, Entry>) {
        let body = Body::Symlink(Bytes::copy_from_slice(asked.target));
        let what = (FileKind::Symlink, 0o777, asked.caller);
        answer.result(self.make(&mut self.names_mut(), (asked.parent, asked.name), what, body));
    }

    fn make_node(&self, asked: MakeNode<'_>, answer: Answer<'_, Entry>) {
        if asked.kind != FileKind::File {
            return answer.fail(Errno::PERM);
        }
        let at = (asked.parent, asked.name);
        answer.result(self.make_file(&mut self.names_mut(), at, asked.permissions, asked.caller));
    }

    fn make_directory(&self, asked: MakeDirectory<'_>, answer: Answer<'_, Entry>) {
        let body = Body::Directory { entries: BTreeMap::new(), parent: asked.parent };
        let what = (FileKind::Directory, asked.permissions, asked.caller);
        answer.result(self.make(&mut self.names_mut(), (asked.parent, asked.name), what, body));
    }

    fn unlink(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        answer.result(self.removed(asked, false).map(|()| Done));
    }

    fn remove_directory(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        answer.result(self.removed(asked, true).map(|()| Done));
    }

    fn rename(&self, asked: Rename<'_>, answer: Answer<'_, Done>) {
        answer.result(self.renamed(asked).map(|()| Done));
    }

    fn link(&self, asked: Link<'_>, answer: Answer<'_, Entry>) {
        answer.result(self.linked(asked));
    }

    fn create(&self, asked: Create<'_>, answer: Answer<'_, Created>) {
        answer.result(self.created(asked));
    }

    fn open(&self, asked: Open, answer: Answer<'_, Opened>) {
        answer.result(self.opened(asked));
    }

    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        let content = match content(&self.names(), asked.node) {
            Ok(content) => Arc::clone(content),
            Err(errno) => return answer.fail(errno),
        };
        let content = content.read().unwrap_or_else(PoisonError::into_inner);
        let start = (asked.offset as usize).min(content.bytes.len());
        let end = (start + asked.size as usize).min(content.bytes.len());
        answer.fill(|sink| sink.put(&content.bytes[start..end]));
    }

    fn write(&self, asked: Write<'_>, answer: Answer<'_, Written>) {
        answer.result(self.written(&asked));
    }

    fn flush(&self, _: Close, answer: Answer<'_, Done>) {
        answer.give(Done);
    }

    fn fsync(&self, _: Fsync, answer: Answer<'_, Done>) {
        answer.give(Done);
    }

    fn open_directory(&self, _: Open, answer: Answer<'_, Opened>) {
        answer.give(Opened::default());
    }

    fn read_directory(&self, asked: ReadDirectory, answer: Answer<'_, Listing>) {
        let mut listing = answer.listing();
        let result = self.list(&asked, |_, entry| listing.push(entry));
        answer.result(result.map(|()| listing));
    }

    fn read_directory_plus(&self, asked: ReadDirectory, answer: Answer<'_, ListingPlus>) {
        let mut listing = answer.listing();
        let result = self.list(&asked, |names, entry| {
            let is_dots = matches!(entry.name, b"." | b"..");
            let known = if is_dots { None } else { self.entry(names, entry.node).ok() };
            let has_room = listing.push(entry, known.as_ref());
            if let (false, Some(_), Some(inode)) = (has_room, known, names.get_mut(&entry.node)) {
                inode.lookups -= 1;
            }
            has_room
        });
        answer.result(result.map(|()| listing));
    }

    fn fsync_directory(&self, _: Fsync, answer: Answer<'_, Done>) {
        answer.give(Done);
    }

    fn statistics(&self, _: u64, answer: Answer<'_, Statistics>) {
        let free = Statistics { block_bytes: 4096, blocks: 1 << 20, free_blocks: 1 << 19, ..Statistics::default() };
        let files = self.inodes() as u64;
        answer.give(Statistics {
            available_blocks: 1 << 19,
            files: files + (1 << 20),
            free_files: 1 << 20,
            name_bytes: 255,
            ..free
        });
    }

    fn allocate(&self, asked: Allocate, answer: Answer<'_, Done>) {
        answer.result(self.allocated(asked).map(|()| Done));
    }

    fn seek(&self, asked: Seek, answer: Answer<'_, Position>) {
        let length = match content(&self.names(), asked.node) {
            Ok(content) => read(content).bytes.len() as u64,
            Err(errno) => return answer.fail(errno),
        };
        match (asked.offset < length, asked.for_data) {
            (false, _) => answer.fail(Errno::NXIO),
            (true, true) => answer.give(Position(asked.offset)),
            (true, false) => answer.give(Position(length)),
        }
    }
}

/// Files are opened so that direct writes may be under way at a time, and what is cached stays.
const OPENED: Opened = Opened {
    handle: 0,
    direct: false,
    keeps_cache: true,
    parallel_direct_writes: true,
    without_flush: false,
    caches_directory: false,
};

const SETGID: u32 = 0o2000;

// Names: the inodes of a file system in memory, and what holds between them.

/// All inodes by number.
type Names = HashMap<u64, Inode>;

struct Inode {
    attributes: Attributes,
    /// How often the kernel knows it.
    lookups: u64,
    body: Body,
}

enum Body {
    File(Arc<RwLock<Content>>),
    Directory { entries: BTreeMap<Vec<u8>, u64>, parent: u64 },
    Symlink(Bytes),
}

struct Content {
    bytes: Vec<u8>,
    modified: Timestamp,
}

fn inode(node: u64, kind: FileKind, permissions: u32, caller: Caller, body: Body) -> Inode {
    let links = if kind == FileKind::Directory { 2 } else { 1 };
    let size = match &body {
        Body::Symlink(target) => target.len() as u64,
        _ => 0,
    };
    let (accessed, modified, changed) = (now(), now(), now());
    let Caller { uid, gid, .. } = caller;
    let (blocks, block_bytes, device) = (0, 4096, 0);
    let attributes = Attributes {
        node,
        kind,
        permissions,
        links,
        uid,
        gid,
        size,
        blocks,
        block_bytes,
        device,
        accessed,
        modified,
        changed,
    };
    Inode { attributes, lookups: 0, body }
}

fn attributes(inode: &Inode) -> Attributes {
    let mut of = inode.attributes;
    if let Body::File(content) = &inode.body {
        let content = read(content);
        (of.size, of.modified) = (content.bytes.len() as u64, content.modified);
        of.blocks = of.size.div_ceil(512);
        of.changed = of.changed.max(of.modified);
    }
    of
}

fn entries(names: &Names, node: u64) -> Result<&BTreeMap<Vec<u8>, u64>, Errno> {
    match names.get(&node) {
        Some(Inode { body: Body::Directory { entries, .. }, .. }) => Ok(entries),
        Some(_) => Err(Errno::NOTDIR),
        None => Err(Errno::STALE),
    }
}

fn entries_mut(names: &mut Names, node: u64) -> Result<&mut BTreeMap<Vec<u8>, u64>, Errno> {
    match names.get_mut(&node) {
        Some(Inode { body: Body::Directory { entries, .. }, .. }) => Ok(entries),
        Some(_) => Err(Errno::NOTDIR),
        None => Err(Errno::STALE),
    }
}

fn content(names: &Names, node: u64) -> Result<&Arc<RwLock<Content>>, Errno> {
    match names.get(&node) {
        Some(Inode { body: Body::File(content), .. }) => Ok(content),
        Some(_) => Err(Errno::ISDIR),
        None => Err(Errno::STALE),
    }
}

fn read(content: &RwLock<Content>) -> RwLockReadGuard<'_, Content> {
    content.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(content: &RwLock<Content>) -> RwLockWriteGuard<'_, Content> {
    content.write().unwrap_or_else(PoisonError::into_inner)
}

fn resize(names: &Names, node: u64, size: u64) -> Result<(), Errno> {
    let size = usize::try_from(size).ok().filter(|size| *size <= MOST_FILE_BYTES).ok_or(Errno::FBIG)?;
    let mut content = write(content(names, node)?);
    content.bytes.resize(size, 0);
    content.modified = now();
    Ok(())
}

fn is_directory(names: &Names, node: u64) -> bool {
    entries(names, node).is_ok()
}

/// Whether a name may be removed or replaced by a directory, or by something else.
fn check_replaced(names: &Names, node: u64, by_directory: bool) -> Result<(), Errno> {
    match (entries(names, node), by_directory) {
        (Ok(_), false) => Err(Errno::ISDIR),
        (Err(_), true) => Err(Errno::NOTDIR),
        (Ok(entries), true) if !entries.is_empty() => Err(Errno::NOTEMPTY),
        _ => Ok(()),
    }
}

fn links(names: &mut Names, node: u64, more: i32) {
    if let Some(inode) = names.get_mut(&node) {
        inode.attributes.links = inode.attributes.links.saturating_add_signed(more);
    }
}

/// A name of the inode is gone.
fn unlinked(names: &mut Names, parent: u64, node: u64) {
    if is_directory(names, node) {
        links(names, parent, -1);
        links(names, node, -2);
    } else {
        links(names, node, -1);
    }
    touch(names, node);
    reap(names, node);
}

fn moved(names: &mut Names, node: u64, from: u64, to: u64) {
    if let Some(Inode { body: Body::Directory { parent, .. }, .. }) = names.get_mut(&node) {
        *parent = to;
        links(names, from, -1);
        links(names, to, 1);
    }
}

/// An inode without names that the kernel does not know is gone.
fn reap(names: &mut Names, node: u64) {
    if names.get(&node).is_some_and(|inode| inode.attributes.links == 0 && inode.lookups == 0) {
        names.remove(&node);
    }
}

fn touch(names: &mut Names, node: u64) {
    if let Some(inode) = names.get_mut(&node) {
        inode.attributes.changed = now();
        if inode.attributes.kind == FileKind::Directory {
            inode.attributes.modified = inode.attributes.changed;
        }
    }
}

fn now() -> Timestamp {
    SystemTime::now().into()
}

/// A file's bytes at most: 1 GiB, as they are in memory.
const MOST_FILE_BYTES: usize = 1 << 30;
