//! ACLs: access control lists as POSIX 1003.1e has them, and how they and the permission bits of a file follow each
//! other.
//!
//! The kernel checks permissions by them. It gets and sets them as two extended attributes, whose format is its own: a
//! version of 4 bytes, and for each entry a tag of 2 bytes, permissions of 2 and an ID of 4. All of it is
//! little-endian.

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
    pub(in super::super) fn list(entries: &[(u16, u16)]) -> Vec<u8> {
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
