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
            super::acl::ACCESS => Some(Namespace::AccessAcl),
            super::acl::DEFAULT => Some(Namespace::DefaultAcl),
            _ if [&b"user."[..], TRUSTED, b"security."].iter().any(|first| name.starts_with(first)) => {
                Some(Namespace::Opaque)
            }
            _ => None,
        }
    }
}
