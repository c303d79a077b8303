//! A volume as one file in a directory, for a loop device and any file system of the kernel on it.
//!
//! Nothing of it is in the page cache of this mount: the file system on it has its own.

use std::sync::Weak;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use remora_fuse::answer::{
    Attributes, Created, Data, DirectoryEntry, Done, Entry, FileKind, KnownAttributes, Listing, Opened, Reply,
    Statistics, Timestamp, Written,
};
use remora_fuse::request::{
    Allocate, Create, Fsync, GetAttributes, Link, Lookup, MakeDirectory, MakeNode, Open, Read, ReadDirectory, Remove,
    Rename, SetAttributes, Symlink, Write,
};
use remora_fuse::{Answer, Errno, FileSystem, ROOT, Waiter, Waits};
use remora_volume::shape::BLOCK_BYTES;

use super::{KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, say};
use crate::{FilesError, Image};

/// The image, as the kernel asks for it. It holds it weakly: it is dropped by its owner alone.
pub(super) struct ServedImage {
    image: Weak<Image>,
    size: u64,
    owner: (u32, u32),
    /// When it was mounted: it has no other times.
    since: Duration,
    waits: Waits,
}

impl ServedImage {
    pub(super) fn new(image: Weak<Image>, size: u64, waits: Waits) -> ServedImage {
        let owner = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        ServedImage { image, size, owner, since, waits }
    }

    /// Answers when the volume does, unless the process is killed before.
    fn later<R: Reply + 'static>(&self, answer: Answer<'_, R>, ask: impl FnOnce(&Image, Waiter<R>)) {
        match self.image.upgrade() {
            Some(image) => ask(&image, self.waits.wait(answer.later(), || {})),
            None => answer.fail(Errno::IO),
        }
    }

    fn attributes(&self, node: u64) -> Result<Attributes, Errno> {
        let time = Timestamp { seconds: self.since.as_secs().cast_signed(), nanoseconds: self.since.subsec_nanos() };
        let (kind, permissions, links, size) = match node {
            ROOT => (FileKind::Directory, 0o700, 2, 0),
            FILE => (FileKind::File, 0o600, 1, self.size),
            _ => return Err(Errno::STALE),
        };
        Ok(Attributes {
            node,
            kind,
            permissions,
            links,
            uid: self.owner.0,
            gid: self.owner.1,
            size,
            blocks: size / 512,
            block_bytes: BLOCK_BYTES as u32,
            device: 0,
            accessed: time,
            modified: time,
            changed: time,
        })
    }

    fn known(&self, node: u64) -> Result<KnownAttributes, Errno> {
        Ok(KnownAttributes { attributes: self.attributes(node)?, valid: VALID })
    }
}

/// Requests that would change the directory, which has this one file.
macro_rules! refused {
    ($($method:ident($asked:ty) -> $reply:ty;)*) => {$(
        fn $method(&self, _: $asked, answer: Answer<'_, $reply>) {
            answer.fail(Errno::PERM);
        }
    )*};
}

impl FileSystem for ServedImage {
    refused! {
        symlink(Symlink<'_>) -> Entry;
        make_node(MakeNode<'_>) -> Entry;
        make_directory(MakeDirectory<'_>) -> Entry;
        link(Link<'_>) -> Entry;
        create(Create<'_>) -> Created;
        unlink(Remove<'_>) -> Done;
        remove_directory(Remove<'_>) -> Done;
        rename(Rename<'_>) -> Done;
    }

    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        let node = match (asked.parent, asked.name) {
            (ROOT, name) if name == NAME => Ok(FILE),
            _ => Err(Errno::NOENT),
        };
        let found = node.and_then(|node| self.attributes(node));
        answer.result(found.map(|attributes| Entry {
            attributes: Some(attributes),
            generation: 0,
            name_valid: VALID,
            attributes_valid: VALID,
        }));
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        answer.result(self.known(asked.node));
    }

    /// Its size is the volume's. What else is set does not matter to a block device.
    fn set_attributes(&self, asked: SetAttributes, answer: Answer<'_, KnownAttributes>) {
        match asked.size {
            Some(size) if size != self.size => answer.fail(Errno::PERM),
            _ => answer.result(self.known(asked.node)),
        }
    }

    fn open(&self, asked: Open, answer: Answer<'_, Opened>) {
        match asked.flags.truncates() {
            true => answer.fail(Errno::PERM),
            false => answer.give(OPENED),
        }
    }

    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        self.later(answer, |image, later| {
            image.read(asked.offset, asked.size, |read| _ = say(later, read.map(Data)));
        });
    }

    fn write(&self, asked: Write<'_>, answer: Answer<'_, Written>) {
        let Write { offset, data, .. } = asked;
        self.later(answer, |image, later| {
            let data = data.into_bytes();
            let written = Written(u32::try_from(data.len()).unwrap_or(u32::MAX));
            image.write(offset, data, move |result| _ = say(later, result.map(|()| written)));
        });
    }

    fn fsync(&self, _: Fsync, answer: Answer<'_, Done>) {
        self.later(answer, |image, later| image.flush(|result| _ = say(later, result.map(|()| Done))));
    }

    fn allocate(&self, asked: Allocate, answer: Answer<'_, Done>) {
        let Allocate { offset, length, mode, .. } = asked;
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= self.size);
        match mode {
            mode if mode == PUNCH_HOLE | KEEP_SIZE || mode == ZERO_RANGE | KEEP_SIZE => {}
            0 | KEEP_SIZE if is_inside => return answer.give(Done), // it has all of its space
            ZERO_RANGE if is_inside => {}
            _ => return answer.fail(Errno::OPNOTSUPP),
        }
        self.later(answer, |image, later| {
            image.zero(offset, length, |result: Result<(), FilesError>| _ = say(later, result.map(|()| Done)));
        });
    }

    fn read_directory(&self, asked: ReadDirectory, answer: Answer<'_, Listing>) {
        let mut listing = answer.listing();
        let entries =
            [(ROOT, FileKind::Directory, &b"."[..]), (ROOT, FileKind::Directory, b".."), (FILE, FileKind::File, NAME)];
        for (offset, (node, kind, name)) in (1..).zip(entries).skip(usize::try_from(asked.offset).unwrap_or(usize::MAX))
        {
            if !listing.push(&DirectoryEntry { node, kind, name, offset }) {
                break;
            }
        }
        answer.give(listing);
    }

    fn interrupt(&self, _: u64) {
        self.waits.interrupt();
    }

    fn statistics(&self, _: u64, answer: Answer<'_, Statistics>) {
        answer.give(Statistics {
            block_bytes: BLOCK_BYTES as u32,
            blocks: self.size / BLOCK_BYTES as u64,
            free_blocks: 0,
            available_blocks: 0,
            files: 1,
            free_files: 0,
            name_bytes: 255,
        });
    }
}

/// Past the page cache, and by several processes at a time: as a disk.
const OPENED: Opened = Opened {
    handle: 0,
    direct: true,
    keeps_cache: false,
    parallel_direct_writes: true,
    without_flush: true,
    caches_directory: false,
};

/// The file.
const NAME: &[u8] = b"image";
const FILE: u64 = 2;

/// How long the kernel may use what it was told: nothing of it changes.
const VALID: Duration = Duration::from_secs(3600);
