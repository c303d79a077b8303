//! Words: what the files say, as the kernel is told, and the other way round.

use std::time::Duration;

use remora_fuse::reply::{Attributes, Entry, FileKind, KnownAttributes, Statistics, Timestamp};
use remora_fuse::request::NewTime;

use crate::names::{self, Attr, Kind, SetTime, Usage};
use crate::shape::BLOCK_BYTES;

/// What a name stands for. The kernel may use it for as long as it is `valid`.
pub(super) fn entry(attr: &Attr, valid: Duration) -> Entry {
    Entry { attributes: Some(attributes(attr)), generation: 0, name_valid: valid, attributes_valid: valid }
}

/// What is known of an inode. The kernel may use it for as long as it is `valid`.
pub(super) fn known(attr: &Attr, valid: Duration) -> KnownAttributes {
    KnownAttributes { attributes: attributes(attr), valid }
}

fn attributes(attr: &Attr) -> Attributes {
    let names::Attributes { mode, uid, gid, accessed, modified, changed } = attr.attributes;
    Attributes {
        node: attr.ino,
        kind: file_kind(attr.kind),
        permissions: mode.into(),
        links: attr.links,
        uid,
        gid,
        size: attr.size,
        blocks: attr.blocks,
        block_bytes: BLOCK_BYTES as u32,
        accessed: timestamp(accessed),
        modified: timestamp(modified),
        changed: timestamp(changed),
    }
}

/// The kernel's word for it.
pub(super) fn file_kind(kind: Kind) -> FileKind {
    match kind {
        Kind::File => FileKind::File,
        Kind::Directory => FileKind::Directory,
        Kind::Symlink => FileKind::Symlink,
        Kind::Fifo => FileKind::Pipe,
        Kind::Socket => FileKind::Socket,
    }
}

/// Permissions, with the bits for set-user-id, set-group-id and sticky.
pub(super) fn mode(permissions: u32) -> u16 {
    (permissions & 0o7777) as u16
}

fn timestamp(nanoseconds: i64) -> Timestamp {
    let second = NANOSECONDS;
    Timestamp { seconds: nanoseconds.div_euclid(second), nanoseconds: nanoseconds.rem_euclid(second) as u32 }
}

/// Times that do not fit are the first or the last that do, some 292 years from 1970.
pub(super) fn time_to_set(time: NewTime) -> SetTime {
    match time {
        NewTime::Now => SetTime::Now,
        NewTime::At(Timestamp { seconds, nanoseconds }) => {
            SetTime::To(seconds.saturating_mul(NANOSECONDS).saturating_add(nanoseconds.into()))
        }
    }
}

/// How much is used.
pub(super) fn statistics(usage: &Usage) -> Statistics {
    Statistics {
        block_bytes: BLOCK_BYTES as u32,
        blocks: usage.blocks,
        free_blocks: usage.free_blocks,
        available_blocks: usage.free_blocks,
        files: usage.inodes.saturating_add(usage.free_inodes),
        free_files: usage.free_inodes,
        name_bytes: u32::try_from(usage.name_bytes).unwrap_or(u32::MAX),
    }
}

const NANOSECONDS: i64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_and_beyond_what_is_kept_are_told_apart() {
        let back = |nanoseconds| time_to_set(NewTime::At(timestamp(nanoseconds)));
        for nanoseconds in [0, 1, -1, 1_700_000_000_123_456_789, -1_500_000_000, i64::MIN + NANOSECONDS, i64::MAX] {
            assert_eq!(back(nanoseconds), SetTime::To(nanoseconds), "{nanoseconds}");
        }
        assert_eq!(timestamp(-1), Timestamp { seconds: -1, nanoseconds: 999_999_999 });
        let far = NewTime::At(Timestamp { seconds: i64::MAX, nanoseconds: 5 });
        assert_eq!(time_to_set(far), SetTime::To(i64::MAX));
    }
}
