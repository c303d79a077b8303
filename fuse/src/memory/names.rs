//! Names: the inodes of a file system in memory, and what holds between them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::SystemTime;

use bytes::Bytes;
use rustix::io::Errno;

use crate::reply::{Attributes, FileKind, Timestamp};
use crate::request::Caller;

/// All inodes by number.
pub(super) type Names = HashMap<u64, Inode>;

pub(super) struct Inode {
    pub(super) attributes: Attributes,
    /// How often the kernel knows it.
    pub(super) lookups: u64,
    pub(super) body: Body,
}

pub(super) enum Body {
    File(Arc<RwLock<Content>>),
    Directory { entries: BTreeMap<Vec<u8>, u64>, parent: u64 },
    Symlink(Bytes),
}

pub(super) struct Content {
    pub(super) bytes: Vec<u8>,
    pub(super) modified: Timestamp,
}

pub(super) fn inode(node: u64, kind: FileKind, permissions: u32, caller: Caller, body: Body) -> Inode {
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

pub(super) fn attributes(inode: &Inode) -> Attributes {
    let mut of = inode.attributes;
    if let Body::File(content) = &inode.body {
        let content = read(content);
        (of.size, of.modified) = (content.bytes.len() as u64, content.modified);
        of.blocks = of.size.div_ceil(512);
        of.changed = of.changed.max(of.modified);
    }
    of
}

pub(super) fn entries(names: &Names, node: u64) -> Result<&BTreeMap<Vec<u8>, u64>, Errno> {
    match names.get(&node) {
        Some(Inode { body: Body::Directory { entries, .. }, .. }) => Ok(entries),
        Some(_) => Err(Errno::NOTDIR),
        None => Err(Errno::STALE),
    }
}

pub(super) fn entries_mut(names: &mut Names, node: u64) -> Result<&mut BTreeMap<Vec<u8>, u64>, Errno> {
    match names.get_mut(&node) {
        Some(Inode { body: Body::Directory { entries, .. }, .. }) => Ok(entries),
        Some(_) => Err(Errno::NOTDIR),
        None => Err(Errno::STALE),
    }
}

pub(super) fn content(names: &Names, node: u64) -> Result<&Arc<RwLock<Content>>, Errno> {
    match names.get(&node) {
        Some(Inode { body: Body::File(content), .. }) => Ok(content),
        Some(_) => Err(Errno::ISDIR),
        None => Err(Errno::STALE),
    }
}

pub(super) fn read(content: &RwLock<Content>) -> RwLockReadGuard<'_, Content> {
    content.read().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn write(content: &RwLock<Content>) -> RwLockWriteGuard<'_, Content> {
    content.write().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn resize(names: &Names, node: u64, size: u64) -> Result<(), Errno> {
    let size = usize::try_from(size).ok().filter(|size| *size <= MOST_FILE_BYTES).ok_or(Errno::FBIG)?;
    let mut content = write(content(names, node)?);
    content.bytes.resize(size, 0);
    content.modified = now();
    Ok(())
}

pub(super) fn is_directory(names: &Names, node: u64) -> bool {
    entries(names, node).is_ok()
}

/// Whether a name may be removed or replaced by a directory, or by something else.
pub(super) fn check_replaced(names: &Names, node: u64, by_directory: bool) -> Result<(), Errno> {
    match (entries(names, node), by_directory) {
        (Ok(_), false) => Err(Errno::ISDIR),
        (Err(_), true) => Err(Errno::NOTDIR),
        (Ok(entries), true) if !entries.is_empty() => Err(Errno::NOTEMPTY),
        _ => Ok(()),
    }
}

pub(super) fn links(names: &mut Names, node: u64, more: i32) {
    if let Some(inode) = names.get_mut(&node) {
        inode.attributes.links = inode.attributes.links.saturating_add_signed(more);
    }
}

/// A name of the inode is gone.
pub(super) fn unlinked(names: &mut Names, parent: u64, node: u64) {
    if is_directory(names, node) {
        links(names, parent, -1);
        links(names, node, -2);
    } else {
        links(names, node, -1);
    }
    touch(names, node);
    reap(names, node);
}

pub(super) fn moved(names: &mut Names, node: u64, from: u64, to: u64) {
    if let Some(Inode { body: Body::Directory { parent, .. }, .. }) = names.get_mut(&node) {
        *parent = to;
        links(names, from, -1);
        links(names, to, 1);
    }
}

/// An inode without names that the kernel does not know is gone.
pub(super) fn reap(names: &mut Names, node: u64) {
    if names.get(&node).is_some_and(|inode| inode.attributes.links == 0 && inode.lookups == 0) {
        names.remove(&node);
    }
}

pub(super) fn touch(names: &mut Names, node: u64) {
    if let Some(inode) = names.get_mut(&node) {
        inode.attributes.changed = now();
        if inode.attributes.kind == FileKind::Directory {
            inode.attributes.modified = inode.attributes.changed;
        }
    }
}

pub(super) fn now() -> Timestamp {
    SystemTime::now().into()
}

/// A file's bytes at most: 1 GiB, as they are in memory.
pub(super) const MOST_FILE_BYTES: usize = 1 << 30;
