//! Layout: the keys of an archive's objects, and what the short ones hold.
//!
//! ```text
//!   20261125T234500Z-8c1c6b2f-307366.json                    the manifest, last: without it there is no backup
//!   20261125T234500Z-8c1c6b2f-307366.rdb                     a snapshot; `.rdb.age`, and so on, if it is encrypted
//!   20261125T234500Z-8c1c6b2f-307366/base.rdb                the snapshot of a backup with commands
//!   20261125T234500Z-8c1c6b2f-307366/commands/00000001-…     the commands since, in segments that never change
//!   20261125T234500Z-8c1c6b2f-307366/commands.json           how many segments there are, and how far they reach
//!   .remora-unfinished/20261125T234500Z-8c1c6b2f-307366      the backup arrives, or is being removed
//!   .remora-writer                                           which command writes here
//! ```

use serde::{Deserialize, Serialize};

use super::super::manifest::{Damaged, Kind, Manifest, is_name, oldest_first};
use super::super::moment::Moment;
use super::super::sealing::ENDING;
use super::super::store::{Object, Store, get};
use crate::checked_json::{self, Checksum};
use crate::exit::Failure;

/// Where it is noted that a backup arrives, or is being removed.
pub(super) const UNFINISHED: &str = ".remora-unfinished";

/// Which command writes.
pub(super) const WRITER: &str = ".remora-writer";

/// How far the segments of a backup reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Reached {
    /// How many segments there are.
    pub(in super::super) segments: u64,
    /// The last byte of the stream in them.
    pub(in super::super) offset: u64,
    /// The database that is selected there.
    pub(in super::super) database: u64,
    /// The last second that was noted.
    pub(in super::super) noted_seconds: Moment,
    /// From 2 on, the object has a checksum.
    #[serde(default)]
    pub(super) version: u32,
}

/// The version of the object that this program writes.
const REACHED_VERSION: u32 = 2;

impl Reached {
    /// The same with the version and its checksum, as it is stored.
    ///
    /// # Errors
    /// It has no text; that would be a bug.
    pub(super) fn to_json(&self) -> Result<Vec<u8>, Failure> {
        let stored = Reached { version: REACHED_VERSION, ..self.clone() };
        checked_json::to_json(&stored).map_err(|error| Failure::local(error.to_string()))
    }

    fn parse(bytes: &[u8]) -> Result<Reached, String> {
        let read: Reached = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        match checked_json::check(bytes) {
            Checksum::Right => Ok(read),
            Checksum::Missing if read.version < REACHED_VERSION => Ok(read),
            Checksum::Missing | Checksum::Wrong => Err("its checksum does not match".to_owned()),
        }
    }
}

/// A segment, as its key says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Segment {
    pub(in super::super) key: String,
    /// From 1 on, without a gap.
    pub(in super::super) number: u64,
    /// The second in which it was begun: no command in it is of an earlier one.
    pub(in super::super) begun: Moment,
    /// Checksum of the object.
    pub(in super::super) crc: u64,
    pub(in super::super) bytes: u64,
}

pub(super) fn manifest_key(name: &str) -> String {
    format!("{name}.json")
}

/// The key of a backup's snapshot.
pub(super) fn snapshot_key(name: &str, kind: Kind, is_sealed: bool) -> String {
    let ending = ending(is_sealed);
    match kind {
        Kind::Snapshot => format!("{name}.rdb{ending}"),
        Kind::Journal => format!("{name}/base.rdb{ending}"),
    }
}

fn ending(is_sealed: bool) -> &'static str {
    if is_sealed { ENDING } else { "" }
}

pub(super) fn reached_key(name: &str) -> String {
    format!("{name}/commands.json")
}

pub(super) fn segment_key(name: &str, number: u64, begun: Moment, crc: u64, is_sealed: bool) -> String {
    format!("{name}/commands/{number:08}-{}-{crc:016x}.aof{}", begun.compact(), ending(is_sealed))
}

impl Segment {
    /// Reads a key; `None` if it is of another object.
    fn of(object: Object) -> Option<Segment> {
        let file = object.key.rsplit('/').next()?;
        let file = file.strip_suffix(ENDING).unwrap_or(file).strip_suffix(".aof")?;
        let (number, rest) = file.split_once('-')?;
        let (begun, crc) = rest.split_once('-')?;
        let (number, crc) = (number.parse().ok()?, u64::from_str_radix(crc, 16).ok()?);
        let begun = Moment::from_compact(begun)?;
        Some(Segment { number, begun, crc, bytes: object.bytes, key: object.key })
    }
}

/// The segments of a backup, in order.
pub(in super::super) fn segments(store: &dyn Store, name: &str) -> Result<Vec<Segment>, Failure> {
    let mut all: Vec<Segment> = store.list(&format!("{name}/commands"))?.into_iter().filter_map(Segment::of).collect();
    all.sort_by_key(|segment| segment.number);
    Ok(all)
}

/// How far the segments of a backup reach.
///
/// # Errors
/// The object is missing or damaged.
pub(in super::super) fn reached(store: &dyn Store, name: &str) -> Result<Reached, Failure> {
    let key = reached_key(name);
    let bytes = get(store, &key)?.ok_or_else(|| missing(store, &key))?;
    Reached::parse(&bytes).map_err(|error| Failure::refused(format!("{} is damaged: {error}", store.address(&key))))
}

/// What is said of an object that must be there.
pub(in super::super) fn missing(store: &dyn Store, key: &str) -> Failure {
    Failure::refused(format!("{} is missing: the backup is damaged", store.address(key)))
}

/// The backups in a store, the oldest first. `damaged`: what becomes of a manifest that is damaged.
///
/// # Errors
/// The store cannot be read, or a manifest is damaged and that is an error.
pub(in super::super) fn list(store: &dyn Store, damaged: Damaged) -> Result<Vec<Manifest>, Failure> {
    let mut all = Vec::new();
    for Object { key, .. } in store.list("")? {
        let Some(name) = key.strip_suffix(".json").filter(|name| is_name(name)) else { continue };
        all.extend(damaged.of(read(store, name))?.flatten());
    }
    Ok(oldest_first(all, |manifest| manifest))
}

/// The backup of this name.
///
/// # Errors
/// The store cannot be read, or the manifest is damaged.
pub(in super::super) fn read(store: &dyn Store, name: &str) -> Result<Option<Manifest>, Failure> {
    let key = manifest_key(name);
    let Some(bytes) = get(store, &key)? else { return Ok(None) };
    let manifest = Manifest::parse(&bytes, name, &store.address(&key))?;
    Ok(manifest.filter(|manifest| manifest.stored.is_some() && manifest.name == name))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_key_says_what_a_segment_is() {
        let begun = Moment::seconds(1_795_650_300);
        for (is_sealed, ending) in [(false, ""), (true, ".age")] {
            let key = segment_key("20261125T234500Z-8c1c6b2f-307366", 42, begun, 0xAB, is_sealed);
            let wanted = format!("/commands/00000042-20261125T234500Z-00000000000000ab.aof{ending}");
            assert!(key.ends_with(&wanted), "{key}");
            let segment = Segment::of(Object { key: key.clone(), bytes: 9 }).unwrap();
            assert_eq!(segment, Segment { key, number: 42, begun, crc: 0xAB, bytes: 9 });
        }
        for other in ["a/commands/x.aof", "a/commands/1-2-3", "a/commands/1-20261125T234500Z-zz.aof"] {
            assert_eq!(Segment::of(Object { key: other.into(), bytes: 9 }), None, "{other}");
        }
    }
}
