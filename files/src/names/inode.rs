//! Inodes, and the entries of directories that lead to them.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};

use super::clusters::Runs;
use super::xattrs::Xattrs;

// A file, a directory or a link as it is in memory.

/// The most bytes of a link's target: a path, as Linux takes it, without its zero.
pub const MOST_TARGET_BYTES: usize = 4095;

/// The most names of an inode: as on ext4, and no program counts further.
pub const MOST_LINKS: u32 = 65_000;

/// What an inode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe, which the kernel of each host has for itself.
    Fifo,
    /// The name of a Unix socket.
    Socket,
    /// A device, which the kernel of each host has for itself. Of number 0 it is a whiteout: it says in a layer of an
    /// overlay that a name is not there.
    CharacterDevice,
    /// A device, which the kernel of each host has for itself.
    BlockDevice,
}

impl Kind {
    /// The bits of `st_mode`, which the log has too, without their twelve zeros.
    pub(super) fn code(self) -> u8 {
        match self {
            Kind::Fifo => 0o1,
            Kind::Directory => 0o4,
            Kind::File => 0o10,
            Kind::Symlink => 0o12,
            Kind::Socket => 0o14,
            Kind::CharacterDevice => 0o2,
            Kind::BlockDevice => 0o6,
        }
    }

    pub(super) fn of_code(code: u8) -> Option<Kind> {
        let kinds = [Kind::File, Kind::Directory, Kind::Symlink, Kind::Fifo, Kind::Socket];
        let devices = [Kind::CharacterDevice, Kind::BlockDevice];
        kinds.into_iter().chain(devices).find(|kind| kind.code() == code)
    }

    pub(super) fn is_device(self) -> bool {
        matches!(self, Kind::CharacterDevice | Kind::BlockDevice)
    }

    /// Its bits of `st_mode`.
    pub fn mode(self) -> u32 {
        u32::from(self.code()) << 12
    }
}

/// What `chmod`, `chown` and `utimensat` set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Permissions, with the bits for set-user-id, set-group-id and sticky.
    pub mode: u16,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// When it was last read, in nanoseconds since 1970. Reading does not change it.
    pub accessed: i64,
    /// When its contents were last changed.
    pub modified: i64,
    /// When anything of it was last changed.
    pub changed: i64,
}

impl Attributes {
    /// The bits of a mode.
    pub const MODE: u16 = 0o7777;
}

/// What is known of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Its number.
    pub ino: u64,
    /// What it is.
    pub kind: Kind,
    /// How many names it has; of a directory, two and one for each directory in it.
    pub links: u32,
    /// Bytes of a file, or of a link's target.
    pub size: u64,
    /// Blocks of 512 bytes that it takes.
    pub blocks: u64,
    /// The number of a device; otherwise 0.
    pub device: u32,
    /// The rest.
    pub attributes: Attributes,
}

/// An inode in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    pub(super) attributes: Attributes,
    /// Names that stand for it.
    pub(super) names: u32,
    /// How often it is held. While it is, it stays without a name.
    pub(super) holds: u32,
    /// `None`: it has none.
    pub(super) xattrs: Option<Box<Xattrs>>,
    pub(super) body: Body,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    File { size: u64, runs: Runs },
    Directory(Directory),
    Symlink(Box<[u8]>),
    Other { kind: Kind, device: u32 },
}

impl Inode {
    pub(super) fn new(kind: Kind, attributes: Attributes, device: u32, target: Box<[u8]>) -> Inode {
        let body = match kind {
            Kind::File => Body::File { size: 0, runs: Runs::None },
            Kind::Directory => Body::Directory(Directory::default()),
            Kind::Symlink => Body::Symlink(target),
            Kind::Fifo | Kind::Socket | Kind::CharacterDevice | Kind::BlockDevice => Body::Other { kind, device },
        };
        Inode { attributes, names: 0, holds: 0, xattrs: None, body }
    }

    pub(super) fn kind(&self) -> Kind {
        match &self.body {
            Body::File { .. } => Kind::File,
            Body::Directory(_) => Kind::Directory,
            Body::Symlink(_) => Kind::Symlink,
            Body::Other { kind, .. } => *kind,
        }
    }

    /// The number of a device; otherwise 0.
    pub(super) fn device(&self) -> u32 {
        match self.body {
            Body::Other { device, .. } => device,
            _ => 0,
        }
    }

    /// The value of an extended attribute.
    pub(super) fn xattr(&self, name: &[u8]) -> Option<&[u8]> {
        self.xattrs.as_ref()?.get(name)
    }

    pub(super) fn xattrs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.xattrs.iter().flat_map(|xattrs| xattrs.iter())
    }

    pub(super) fn attr(&self, ino: u64) -> Attr {
        let (links, size, clusters) = match &self.body {
            Body::File { size, runs } => (self.names, *size, runs.count()),
            Body::Directory(directory) if self.names > 0 => (2 + directory.directories(), 0, 0),
            Body::Directory(_) => (0, 0, 0),
            Body::Symlink(target) => (self.names, target.len() as u64, 0),
            Body::Other { .. } => (self.names, 0, 0),
        };
        let blocks = clusters * (super::layout::CLUSTER_BYTES / 512);
        Attr { ino, kind: self.kind(), links, size, blocks, device: self.device(), attributes: self.attributes }
    }
}

// Names, and what they stand for.
//
// An entry's key is a hash of its name. So a search compares numbers, and the key is a position for `readdir` that
// stays the same while other entries come and go. The lowest four bits tell entries with the same hash apart.

/// A directory in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Directory {
    /// The directory in which it is; 0: it has no name.
    pub(super) parent: u64,
    /// How many of the entries are directories.
    directories: u32,
    entries: BTreeMap<u64, Entry>,
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(super) ino: u64,
    pub(super) name: Box<[u8]>,
}

/// Entries of a directory whose names have the same hash, at most. The hash has 57 bits: two of them do not happen by
/// chance.
const MOST_ALIKE: u64 = 16;

/// Keys are above the positions of `.` and `..`, and below the sign of the kernel's offsets.
const KEY: u64 = 1 << 62;

/// Where entries of a name's hash are.
fn slots(name: &[u8]) -> std::ops::Range<u64> {
    let mut hasher = DefaultHasher::new(); // its keys are constants
    hasher.write(name);
    let first = (hasher.finish() >> 3) & !(KEY | (MOST_ALIKE - 1)) | KEY;
    first..first + MOST_ALIKE
}

impl Directory {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn directories(&self) -> u32 {
        self.directories
    }

    pub(super) fn find(&self, name: &[u8]) -> Option<u64> {
        self.place(name).map(|(_, entry)| entry.ino)
    }

    /// The key of an entry, or the one that it would get.
    pub(super) fn key(&self, name: &[u8]) -> Option<u64> {
        let found = self.place(name).map(|(key, _)| key);
        found.or_else(|| slots(name).find(|key| !self.entries.contains_key(key)))
    }

    fn place(&self, name: &[u8]) -> Option<(u64, &Entry)> {
        self.entries.range(slots(name)).find(|(_, entry)| *entry.name == *name).map(|(key, entry)| (*key, entry))
    }

    /// `false`: there is such an entry, or there is no room for it.
    pub(super) fn add(&mut self, name: Box<[u8]>, ino: u64) -> bool {
        if self.find(&name).is_some() {
            return false;
        }
        let Some(key) = self.key(&name) else { return false };
        self.entries.insert(key, Entry { ino, name });
        true
    }

    /// `false`: there is no such entry.
    pub(super) fn remove(&mut self, name: &[u8], ino: u64) -> bool {
        let place = self.place(name).filter(|(_, entry)| entry.ino == ino).map(|(key, _)| key);
        place.is_some_and(|key| self.entries.remove(&key).is_some())
    }

    /// One directory more or less is in it.
    pub(super) fn count_directory(&mut self, is_more: bool) {
        self.directories = if is_more { self.directories + 1 } else { self.directories.saturating_sub(1) };
    }

    /// Entries behind a key, in the order of keys.
    pub(super) fn after(&self, key: u64) -> impl Iterator<Item = (u64, &Entry)> {
        let from = key.saturating_add(1);
        self.entries.range(from..).map(|(key, entry)| (*key, entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_the_same_hash_are_told_apart() {
        let mut directory = Directory::default();
        let [one, two] = [&b"one"[..], b"two"];
        assert!(directory.add(one.into(), 2) && !directory.add(one.into(), 3));
        // As if "two" had the hash of "one".
        let first = slots(one).start;
        directory.entries.insert(first + 1, Entry { ino: 9, name: two.into() });
        assert_eq!((directory.find(one), directory.key(one), directory.len()), (Some(2), Some(first), 2));
        assert!(!directory.remove(one, 9) && directory.remove(one, 2) && !directory.remove(one, 2));
        assert_eq!(directory.key(one), Some(first));
        for slot in slots(one) {
            directory.entries.insert(slot, Entry { ino: slot, name: format!("{slot}").into_bytes().into() });
        }
        assert!(directory.key(one).is_none() && !directory.add(one.into(), 2), "no slot is left");
    }

    #[test]
    fn keys_are_positions_for_the_kernel() {
        for name in [&b"a"[..], b"dump.rdb", &[0xff; 255]] {
            let slots = slots(name);
            assert!(slots.start >= KEY && slots.end < 1 << 63 && slots.start.is_multiple_of(MOST_ALIKE));
        }
    }
}
