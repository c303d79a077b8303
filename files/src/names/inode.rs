//! Inodes, the entries of directories that lead to them, and their extended attributes.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};

use super::clusters::Runs;

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

/// The most bytes of an attribute's name, as the kernel has it.
pub const MOST_XATTR_NAME_BYTES: usize = 255;

/// The most bytes of all extended attributes of an inode: names, values, and `EACH_BYTES` for each. It is ext4's
/// bound for blocks of 8 KiB, and what a directory gives to a new one fits one frame of the log.
pub const MOST_XATTR_BYTES: usize = 7680;

/// By name, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Xattrs(BTreeMap<Box<[u8]>, Box<[u8]>>);

impl Xattrs {
    pub(super) fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.0.get(name).map(Box::as_ref)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the value that it had before.
    pub(super) fn set(&mut self, name: &[u8], value: &[u8]) -> Option<Box<[u8]>> {
        self.0.insert(name.into(), value.into())
    }

    /// Returns the value that it had.
    pub(super) fn remove(&mut self, name: &[u8]) -> Option<Box<[u8]>> {
        self.0.remove(name)
    }

    /// What they count if this one is set: see [`MOST_XATTR_BYTES`].
    pub(super) fn bytes_with(&self, name: &[u8], value: &[u8]) -> usize {
        let each = |name: &[u8], value: &[u8]| name.len() + value.len() + EACH_BYTES;
        let others = self.iter().filter(|(other, _)| *other != name).map(|(name, value)| each(name, value));
        each(name, value) + others.sum::<usize>()
    }
}

/// Whether this can be the name of an extended attribute.
pub(super) fn is_xattr_name(name: &[u8]) -> bool {
    (1..=MOST_XATTR_NAME_BYTES).contains(&name.len()) && !name.contains(&0)
}

/// Capabilities of a program, which end when it is changed.
pub(super) const CAPABILITIES: &[u8] = b"security.capability";

/// Attributes that only the system's administrator sees.
pub const TRUSTED: &[u8] = b"trusted.";

/// Names of extended attributes, each with a zero behind it.
pub(crate) fn list_of<'a>(names: impl Iterator<Item = &'a [u8]>, with_trusted: bool) -> Vec<u8> {
    let shown = names.filter(|name| with_trusted || !name.starts_with(TRUSTED));
    shown.flat_map(|name| name.iter().copied().chain([0])).collect()
}

pub(super) const SET_GROUP_ID: u16 = 0o2000;

const SET_USER_ID: u16 = 0o4000;

/// Permissions of a file that was changed by one who may not leave its set-id bits. Without execution by the group, the
/// bit for the group means something else.
pub(super) fn without_set_id(mode: u16) -> u16 {
    let group = if mode & GROUP_EXECUTES != 0 { SET_GROUP_ID } else { 0 };
    mode & !(SET_USER_ID | group)
}

const GROUP_EXECUTES: u16 = 0o010;

/// What an extended attribute is for, as the beginning of its name says it.
pub(super) enum Namespace {
    /// Checked by the kernel alone.
    Opaque,
    /// An ACL by which permissions are checked.
    AccessAcl,
    /// An ACL for what is made in a directory.
    DefaultAcl,
}

impl Namespace {
    /// `None`: there are no such attributes. The kernel has checked what follows the beginning.
    pub(super) fn of(name: &[u8]) -> Option<Namespace> {
        match name {
            ACCESS => Some(Namespace::AccessAcl),
            DEFAULT => Some(Namespace::DefaultAcl),
            _ if [&b"user."[..], TRUSTED, b"security."].iter().any(|first| name.starts_with(first)) => {
                Some(Namespace::Opaque)
            }
            _ => None,
        }
    }
}

// ACLs: access control lists as POSIX 1003.1e has them, and how they and the permission bits of a file follow each
// other.
//
// The kernel checks permissions by them. It gets and sets them as two extended attributes, whose format is its own: a
// version of 4 bytes, and for each entry a tag of 2 bytes, permissions of 2 and an ID of 4. All of it is
// little-endian.

/// The attribute by which permissions are checked.
pub(super) const ACCESS: &[u8] = b"system.posix_acl_access";

/// The attribute of a directory that new files in it get.
pub(super) const DEFAULT: &[u8] = b"system.posix_acl_default";

/// A list: entries for the owner, the owning group and all others; and if there are entries of other users and groups,
/// a mask, which bounds them and the owning group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Acl(Vec<AclEntry>);

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

/// What each attribute counts beside its name and its value.
const EACH_BYTES: usize = 8;

const VERSION: u32 = 2;

const ENTRY_BYTES: usize = 8;

// Tags, in the order in which entries are.

const OWNER: u16 = 1;

const USER: u16 = 2;

const OWNING_GROUP: u16 = 4;

const GROUP: u16 = 8;

const MASK: u16 = 0x10;

const OTHER: u16 = 0x20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    permissions: u16,
    id: u32,
}

impl Acl {
    /// Reads the value of an attribute. `None`: it is not a list.
    pub(super) fn parse(value: &[u8]) -> Option<Acl> {
        let (version, rest) = value.split_first_chunk()?;
        if u32::from_le_bytes(*version) != VERSION || !rest.len().is_multiple_of(ENTRY_BYTES) {
            return None;
        }
        let entries: Vec<AclEntry> = rest.chunks_exact(ENTRY_BYTES).map(AclEntry::parse).collect();
        let count = |tag: u16| entries.iter().filter(|entry| entry.tag == tag).count();
        let known = [OWNER, USER, OWNING_GROUP, GROUP, MASK, OTHER];
        let is_valid = entries.iter().all(|entry| entry.permissions <= 7 && known.contains(&entry.tag))
            && entries.is_sorted_by_key(|entry| entry.tag)
            && [OWNER, OWNING_GROUP, OTHER].iter().all(|tag| count(*tag) == 1)
            && count(MASK) <= 1
            && (count(MASK) == 1 || count(USER) + count(GROUP) == 0);
        is_valid.then_some(Acl(entries))
    }

    /// The value of an attribute.
    pub(super) fn to_value(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for AclEntry { tag, permissions, id } in &self.0 {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&permissions.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    /// Whether it says no more than permission bits do.
    pub(super) fn is_only_mode(&self) -> bool {
        self.0.len() == 3
    }

    /// The permission bits that are shown with it: those of the group are the mask's.
    pub(super) fn mode(&self) -> u16 {
        let class = |class: Class| {
            let entry = self.0.iter().find(|entry| self.class(entry) == Some(class));
            entry.map_or(0, |entry| entry.permissions << class.shift())
        };
        class(Class::Owner) | class(Class::Group) | class(Class::Other)
    }

    /// With these permission bits: `chmod` was called.
    pub(super) fn with_mode(&self, mode: u16) -> Acl {
        self.with(|_, bits| bits, mode)
    }

    /// What a new file gets in a directory of which this is the default list, if a process asks for this mode: its
    /// mode, and its list if that says more.
    pub(super) fn inherited(&self, mode: u16) -> (u16, Option<Acl>) {
        let list = self.with(|permissions, bits| permissions & bits, mode);
        (mode & !0o777 | list.mode(), Some(list).filter(|list| !list.is_only_mode()))
    }

    fn with(&self, permissions: impl Fn(u16, u16) -> u16, mode: u16) -> Acl {
        let changed = |entry: &AclEntry| match self.class(entry) {
            Some(class) => {
                AclEntry { permissions: permissions(entry.permissions, mode >> class.shift() & 7), ..*entry }
            }
            None => *entry,
        };
        Acl(self.0.iter().map(changed).collect())
    }

    /// Whose permission bits the entry's are.
    fn class(&self, entry: &AclEntry) -> Option<Class> {
        match entry.tag {
            OWNER => Some(Class::Owner),
            MASK => Some(Class::Group),
            OWNING_GROUP if self.0.iter().all(|entry| entry.tag != MASK) => Some(Class::Group),
            OTHER => Some(Class::Other),
            _ => None,
        }
    }
}

impl AclEntry {
    fn parse(bytes: &[u8]) -> AclEntry {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        AclEntry { tag: word(0), permissions: word(2), id: u32::from(word(4)) | u32::from(word(6)) << 16 }
    }
}

/// Three of the permission bits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Owner,
    Group,
    Other,
}

impl Class {
    fn shift(self) -> u16 {
        match self {
            Class::Owner => 6,
            Class::Group => 3,
            Class::Other => 0,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]

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

    /// A list of these tags and permissions. Users and groups have the number of their place.
    pub(in crate::names) fn list(entries: &[(u16, u16)]) -> Vec<u8> {
        let entry =
            |(id, (tag, permissions)): (u32, &(u16, u16))| AclEntry { tag: *tag, permissions: *permissions, id };
        Acl((1000..).zip(entries).map(entry).collect()).to_value()
    }

    #[test]
    fn lists_come_back_and_what_is_none_is_refused() {
        let good = list(&[(OWNER, 7), (USER, 6), (USER, 0), (OWNING_GROUP, 5), (GROUP, 7), (MASK, 4), (OTHER, 1)]);
        let acl = Acl::parse(&good).unwrap();
        assert_eq!((acl.to_value(), acl.is_only_mode(), acl.mode()), (good.clone(), false, 0o741));
        let plain = Acl::parse(&list(&[(OWNER, 6), (OWNING_GROUP, 4), (OTHER, 0)])).unwrap();
        assert_eq!((plain.is_only_mode(), plain.mode()), (true, 0o640));
        for bad in [
            list(&[]),
            list(&[(OWNER, 7), (OWNING_GROUP, 5)]),
            list(&[(OWNER, 7), (OWNER, 7), (OWNING_GROUP, 5), (OTHER, 1)]),
            list(&[(OWNER, 8), (OWNING_GROUP, 5), (OTHER, 1)]),
            list(&[(OWNING_GROUP, 5), (OWNER, 7), (OTHER, 1)]),
            list(&[(OWNER, 7), (USER, 7), (OWNING_GROUP, 5), (OTHER, 1)]),
            list(&[(OWNER, 7), (OWNING_GROUP, 5), (MASK, 1), (MASK, 1), (OTHER, 1)]),
            list(&[(OWNER, 7), (OWNING_GROUP, 5), (OTHER, 1), (0x40, 1)]),
            good[..good.len() - 1].to_vec(),
            [&[1], &good[1..]].concat(),
            vec![2, 0, 0],
        ] {
            assert_eq!(Acl::parse(&bad), None, "{bad:?}");
        }
    }

    #[test]
    fn chmod_changes_the_mask_and_not_the_owning_group() {
        let acl = Acl::parse(&list(&[(OWNER, 7), (USER, 6), (OWNING_GROUP, 5), (MASK, 7), (OTHER, 5)])).unwrap();
        let changed = acl.with_mode(0o640);
        assert_eq!(changed.to_value(), list(&[(OWNER, 6), (USER, 6), (OWNING_GROUP, 5), (MASK, 4), (OTHER, 0)]));
        let plain = Acl::parse(&list(&[(OWNER, 6), (OWNING_GROUP, 4), (OTHER, 0)])).unwrap();
        assert_eq!(plain.with_mode(0o751).mode(), 0o751);
    }

    #[test]
    fn new_files_get_no_more_than_the_process_asks_for() {
        let default = Acl::parse(&list(&[(OWNER, 7), (USER, 6), (OWNING_GROUP, 5), (MASK, 7), (OTHER, 5)])).unwrap();
        let (mode, list_of_it) = default.inherited(0o2640);
        let expected = list(&[(OWNER, 6), (USER, 6), (OWNING_GROUP, 5), (MASK, 4), (OTHER, 0)]);
        assert_eq!((mode, list_of_it.unwrap().to_value()), (0o2640, expected));
        let plain = Acl::parse(&list(&[(OWNER, 6), (OWNING_GROUP, 4), (OTHER, 4)])).unwrap();
        assert_eq!(plain.inherited(0o666), (0o644, None));
    }
}
