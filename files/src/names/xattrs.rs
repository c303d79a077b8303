//! Xattrs: the extended attributes of an inode.

use std::collections::BTreeMap;

/// The most bytes of an attribute's name, as the kernel has it.
pub const MOST_XATTR_NAME_BYTES: usize = 255;

/// The most bytes of all extended attributes of an inode: names, values, and `EACH_BYTES` for each. It is ext4's
/// bound for blocks of 8 KiB, and what a directory gives to a new one fits one frame of the log.
pub const MOST_XATTR_BYTES: usize = 7680;

/// What each attribute counts beside its name and its value.
const EACH_BYTES: usize = 8;

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

const VERSION: u32 = 2;

const ENTRY_BYTES: usize = 8;

// Tags, in the order in which entries are.

const OWNER: u16 = 1;

const USER: u16 = 2;

const OWNING_GROUP: u16 = 4;

const GROUP: u16 = 8;

const MASK: u16 = 0x10;

const OTHER: u16 = 0x20;

/// A list: entries for the owner, the owning group and all others; and if there are entries of other users and groups,
/// a mask, which bounds them and the owning group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Acl(Vec<Entry>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
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
        let entries: Vec<Entry> = rest.chunks_exact(ENTRY_BYTES).map(Entry::parse).collect();
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
        for Entry { tag, permissions, id } in &self.0 {
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
        let changed = |entry: &Entry| match self.class(entry) {
            Some(class) => Entry { permissions: permissions(entry.permissions, mode >> class.shift() & 7), ..*entry },
            None => *entry,
        };
        Acl(self.0.iter().map(changed).collect())
    }

    /// Whose permission bits the entry's are.
    fn class(&self, entry: &Entry) -> Option<Class> {
        match entry.tag {
            OWNER => Some(Class::Owner),
            MASK => Some(Class::Group),
            OWNING_GROUP if self.0.iter().all(|entry| entry.tag != MASK) => Some(Class::Group),
            OTHER => Some(Class::Other),
            _ => None,
        }
    }
}

impl Entry {
    fn parse(bytes: &[u8]) -> Entry {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Entry { tag: word(0), permissions: word(2), id: u32::from(word(4)) | u32::from(word(6)) << 16 }
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

    /// A list of these tags and permissions. Users and groups have the number of their place.
    pub(in crate::names) fn list(entries: &[(u16, u16)]) -> Vec<u8> {
        let entry = |(id, (tag, permissions)): (u32, &(u16, u16))| Entry { tag: *tag, permissions: *permissions, id };
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
