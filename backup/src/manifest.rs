//! Manifest: what a backup is, as a small JSON file beside it.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::options::Pass;
use remora_base::files::{self, PRIVATE};
use remora_base::units::Moment;
use remora_process::checked_json::{self, Checksum};
use remora_process::exit::{Code, Failure};
use remora_process::rdb_file::RdbFile;

/// What the field `format` says.
const FORMAT: &str = "remora backup";

/// The version that this program writes, and the newest that it reads. From 2 on, manifests have a checksum, and the
/// lists and command files of their folders too.
const VERSION: u32 = 2;

/// The first version with checksums.
const CHECKED: u32 = 2;

/// The manifest in a folder with commands.
pub(crate) const IN_FOLDER: &str = "backup.json";

/// Bytes of a manifest that are read at most: one with a thousand databases has 20 KiB.
const BYTES_MAX: u64 = 4 << 20;

/// What a backup is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: String,
    version: u32,
    pub(crate) kind: Kind,
    /// The file or folder, beside the manifest or around it.
    pub(crate) name: String,
    pub(crate) replid: String,
    /// The last byte of the stream that the snapshot holds.
    pub(crate) offset: u64,
    pub(crate) server: String,
    pub(crate) rdb_version: u32,
    /// When the server began to write the snapshot, by its own clock.
    pub(crate) taken: String,
    pub(crate) taken_seconds: Moment,
    pub(crate) bytes: u64,
    /// Of the snapshot, as at the end of an RDB file.
    pub(crate) crc64: String,
    /// Keys of each database; missing if the snapshot has types that this program does not know.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) keys: Option<BTreeMap<u64, u64>>,
    /// The source from which it was read.
    pub(crate) source: String,
    /// Of which time before the snapshot there are no commands, although there is an earlier backup with commands.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) gap: Option<Gap>,
    /// The object with the snapshot, if the backup is one of an archive.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) stored: Option<Stored>,
}

/// An object of an archive, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stored {
    /// Its key, below the archive's prefix.
    pub(crate) object: String,
    pub(crate) bytes: u64,
    /// Of all its bytes.
    pub(crate) crc64: String,
    /// The format in which it is encrypted; missing if it is not.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) encryption: Option<String>,
}

/// A time of which nothing can be restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gap {
    /// The earlier backup.
    pub(crate) after: String,
    /// The last byte of its stream that it has, in its own history.
    pub(crate) after_offset: u64,
    pub(crate) because: String,
}

/// What a backup consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// An RDB file.
    Snapshot,
    /// A folder with a snapshot and the commands since.
    Journal,
}

/// What becomes of a damaged manifest where all backups of a place are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damaged {
    /// It is an error: another backup would be taken for the newest one.
    Refused,
    /// A warning names it. A new backup can be made beside it.
    Skipped,
}

impl Damaged {
    /// What was read; `None` if it is damaged and skipped.
    ///
    /// # Errors
    /// It is damaged, and that is an error.
    pub(crate) fn of<T>(self, read: Result<T, Failure>) -> Result<Option<T>, Failure> {
        match (self, read) {
            (_, Ok(read)) => Ok(Some(read)),
            (Damaged::Skipped, Err(failure)) if failure.code == Code::Refused => {
                tracing::warn!("{failure}");
                Ok(None)
            }
            (_, Err(failure)) => Err(failure),
        }
    }
}

/// Reads a snapshot to its end, and compares it with the manifest that speaks of it, if there is one.
///
/// # Errors
/// It cannot be read, is not an RDB file, or is damaged; or its manifest is.
pub fn checked_snapshot(path: &Path) -> Result<RdbFile, Failure> {
    let rdb = RdbFile::read(path)?;
    let Some((file, manifest)) = Manifest::of_snapshot(path)? else { return Ok(rdb) };
    let (crc, is_right) = (format!("{:016x}", rdb.crc), rdb.bytes == manifest.bytes);
    if is_right && crc == manifest.crc64 {
        return Ok(rdb);
    }
    Err(Failure::refused(format!(
        "{} is damaged, or another file than the one of its manifest {}: it has {} bytes and the CRC-64 {crc}, and {} and {} are \
         noted there",
        path.display(),
        file.display(),
        rdb.bytes,
        manifest.bytes,
        manifest.crc64
    )))
}

/// Whether a backup may be called so: it begins with a moment.
pub(crate) fn is_name(name: &str) -> bool {
    let (moment, rest) = name.split_once('-').unwrap_or_default();
    Moment::from_compact(moment).is_some() && !rest.contains('/')
}

impl Manifest {
    /// What this snapshot is. `server`: kind and version, as the source says.
    pub(crate) fn of(kind: Kind, rdb: &RdbFile, server: &str, source: String) -> Manifest {
        let replid = rdb.replid.clone();
        let short = replid.get(..8).unwrap_or("unknown");
        let base = format!("{}-{short}-{}", rdb.taken.compact(), rdb.offset);
        let name = if kind == Kind::Snapshot { format!("{base}.rdb") } else { base };
        Manifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            kind,
            name,
            replid,
            offset: rdb.offset,
            server: server.to_owned(),
            rdb_version: rdb.version,
            taken: rdb.taken.to_string(),
            taken_seconds: rdb.taken,
            bytes: rdb.bytes,
            crc64: format!("{:016x}", rdb.crc),
            keys: rdb.keys.clone(),
            source,
            gap: None,
            stored: None,
        }
    }

    /// Reads a manifest; `None` if the file is missing or another program wrote it.
    ///
    /// # Errors
    /// It is damaged, or cannot be read.
    pub(crate) fn read(file: &Path) -> Result<Option<Manifest>, Failure> {
        let unreadable = |error: io::Error| Failure::refused(format!("{} cannot be read: {error}", file.display()));
        let opened = match File::open(file) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            opened => opened.map_err(unreadable)?,
        };
        let mut bytes = Vec::new();
        opened.take(BYTES_MAX).read_to_end(&mut bytes).map_err(unreadable)?;
        let name =
            |path: Option<&Path>| path.and_then(Path::file_name).and_then(|name| name.to_str().map(str::to_owned));
        let called = match name(Some(file)) {
            Some(called) if called == IN_FOLDER => name(file.parent()),
            called => called.and_then(|called| called.strip_suffix(".json").map(str::to_owned)),
        };
        Manifest::parse(&bytes, called.as_deref().unwrap_or_default(), &file.display())
    }

    /// The manifest in these bytes of a file or an object that belongs to a backup of this name; `None` if another
    /// program wrote them. `place`: where they are, for messages.
    ///
    /// # Errors
    /// They are damaged, or of a newer program.
    pub(crate) fn parse(bytes: &[u8], name: &str, place: &dyn fmt::Display) -> Result<Option<Manifest>, Failure> {
        let damaged = |what: &dyn fmt::Display| {
            let advice = "remove it with its backup, or name another backup";
            Failure::refused(format!("the manifest {place} is damaged: {what}; {advice}"))
        };
        let checksum = checked_json::check(bytes);
        let manifest: Manifest = match serde_json::from_slice(bytes) {
            Ok(manifest) => manifest,
            // Files with such names are ours.
            Err(error) if is_name(name) || checksum != Checksum::Missing => return Err(damaged(&error)),
            Err(_) => return Ok(None),
        };
        if checksum == Checksum::Wrong || checksum == Checksum::Missing && manifest.is_checked() {
            return Err(damaged(&"its checksum does not match"));
        }
        if manifest.version > VERSION {
            let text = format!("the manifest {place} is of version {}, which a newer remora reads", manifest.version);
            return Err(Failure::refused(text));
        }
        let has_name = !manifest.name.is_empty() && !manifest.name.contains('/') && !manifest.name.starts_with('.');
        match manifest.format == FORMAT && has_name {
            true => Ok(Some(manifest)),
            false if is_name(name) => Err(damaged(&"it does not say what it is")),
            false => Ok(None),
        }
    }

    /// The manifest that speaks of this snapshot, and where it is: beside an RDB file, or above the folder of an
    /// append-only file.
    ///
    /// # Errors
    /// It is damaged.
    pub(crate) fn of_snapshot(rdb: &Path) -> Result<Option<(PathBuf, Manifest)>, Failure> {
        let folder = rdb.parent().filter(|folder| folder.file_name().is_some_and(|name| name == "appendonlydir"));
        let above = folder.and_then(Path::parent).map(|above| (above.join(IN_FOLDER), Kind::Journal));
        let (file, kind) = above.unwrap_or_else(|| (rdb.with_extension("json"), Kind::Snapshot));
        let manifest = Manifest::read(&file)?.filter(|manifest| manifest.kind == kind);
        Ok(manifest.map(|manifest| (file, manifest)))
    }

    /// Whether the list and the files of commands of its folder have checksums.
    pub(crate) fn is_checked(&self) -> bool {
        self.version >= CHECKED
    }

    /// Writes it, as a whole.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(&self, to: &Path) -> Result<(), Failure> {
        Ok(files::write(to, &self.to_json()?, &PRIVATE)?)
    }

    /// The same of the snapshot alone.
    pub(crate) fn of_the_snapshot(&self) -> Manifest {
        Manifest { kind: Kind::Snapshot, ..self.clone() }
    }

    /// Its text.
    ///
    /// # Errors
    /// It has none; that would be a bug.
    pub(crate) fn to_json(&self) -> Result<Vec<u8>, Failure> {
        checked_json::to_json(self).map_err(|error| Failure::local(error.to_string()))
    }

    fn order(&self) -> (Moment, u64, &str) {
        (self.taken_seconds, self.offset, &self.name)
    }
}

/// Sorts backups, the oldest first: by the time at which they were taken, and those of one history by their offsets,
/// which grow also if a clock goes back.
pub(crate) fn oldest_first<T>(mut all: Vec<T>, of: impl Fn(&T) -> &Manifest) -> Vec<T> {
    all.sort_by(|one, other| of(one).order().cmp(&of(other).order()));
    let mut places: BTreeMap<(Kind, &str), Vec<usize>> = BTreeMap::new();
    for (place, backup) in all.iter().enumerate() {
        places.entry((of(backup).kind, &of(backup).replid)).or_default().push(place);
    }
    // Each history keeps its places.
    let mut moves = Vec::new();
    for places in places.into_values() {
        let mut sorted = places.clone();
        sorted.sort_by_key(|place| of(&all[*place]).offset);
        moves.extend(places.into_iter().zip(sorted));
    }
    moves.sort_unstable();
    let mut all: Vec<Option<T>> = all.into_iter().map(Some).collect();
    moves.into_iter().filter_map(|(_, from)| all.get_mut(from)?.take()).collect()
}

/// What comes behind a backup, after a time of which nothing can be restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Behind {
    /// The next backup.
    name: String,
    /// When its snapshot was taken.
    begins: Moment,
    because: String,
}

impl Behind {
    /// Refuses a moment behind the last one of the backup at `place`.
    ///
    /// # Errors
    /// It is one.
    pub(crate) fn refuse(&self, until: Moment, last: Moment, place: &dyn fmt::Display) -> Result<(), Failure> {
        let Behind { name, begins, because } = self;
        if until <= last || until >= *begins {
            return Ok(());
        }
        Err(Failure::refused(format!(
            "nothing is known of the moment {until}: {place} ends at {last}, and the next backup, {name}, begins at {begins} ({because}); give \
             --until {last} for the data before that gap"
        )))
    }
}

/// The newest of these backups, the oldest of which is first, that is not of a later moment, and what is behind it
/// after a gap. `pass`: before or after the clock went back, if it did between backups.
///
/// # Errors
/// The moment is both before and after that, and `pass` does not say which one is meant.
pub(crate) fn newest_until<T>(
    all: Vec<T>,
    of: impl Fn(&T) -> &Manifest,
    until: Option<Moment>,
    pass: Option<Pass>,
) -> Result<Option<(T, Option<Behind>)>, Failure> {
    let Some(until) = until else { return Ok(all.into_iter().next_back().map(|newest| (newest, None))) };
    let is_later = |backup: &T| of(backup).taken_seconds > until;
    let Some(last) = all.iter().rposition(|backup| !is_later(backup)) else { return Ok(None) };
    let history = |backup: &T| (of(backup).kind, of(backup).replid.clone());
    let meant = all.get(last).map(history);
    // Within a history, what stands before was taken before, whatever its time says.
    let later = all.iter().take(last).position(|backup| is_later(backup) && Some(history(backup)) == meant);
    let chosen = match (later, pass) {
        (None, _) | (Some(_), Some(Pass::Last)) => Some(last),
        (Some(later), Some(Pass::First)) => all.iter().take(later).rposition(|backup| !is_later(backup)),
        (Some(later), None) => {
            let names = [later, last].map(|at| all.get(at).map_or("", |backup| of(backup).name.as_str()));
            return Err(Failure::refused(format!(
                "the moment {until} is there twice: the clock of the host that wrote the backups went back between {} and {}. Give \
                 --until-pass first for the data before it went back, or --until-pass last for those after",
                names[0], names[1]
            )));
        }
    };
    let Some(chosen) = chosen else { return Ok(None) };
    let name = all.get(chosen).map(|backup| of(backup).name.clone());
    let behind = all.iter().map(&of).find_map(|manifest| {
        let gap = manifest.gap.as_ref().filter(|gap| Some(&gap.after) == name.as_ref())?;
        Some(Behind { name: manifest.name.clone(), begins: manifest.taken_seconds, because: gap.because.clone() })
    });
    Ok(all.into_iter().nth(chosen).map(|backup| (backup, behind)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::rdb::Writer;

    use super::*;

    const NAME: &str = "20261125T234500Z-8c1c6b2f-307366";

    #[test]
    fn a_name_begins_with_a_moment() {
        assert!(is_name(NAME) && is_name(&format!("{NAME}-2")));
        for other in ["notes", "2026-8c1c6b2f-307366", "20261125T234500Z", "20261125T234500Z-a/b", ""] {
            assert!(!is_name(other), "{other}");
        }
    }

    #[test]
    fn every_changed_byte_of_a_manifest_and_of_a_snapshot_without_a_checksum_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let rdb = folder.path().join(format!("{NAME}.rdb"));
        let mut writer = Writer::new(11);
        writer.aux("ctime", "1795650300").string("key", "value", None);
        let mut bytes = writer.finish();
        let body = bytes.len() - 8;
        bytes[body..].fill(0);
        std::fs::write(&rdb, &bytes).unwrap();
        let manifest = Manifest::of(Kind::Snapshot, &RdbFile::read(&rdb).unwrap(), "redis 7.0.15", "h:1".into());
        let json = rdb.with_extension("json");
        Manifest { name: format!("{NAME}.rdb"), ..manifest }.write(&json).unwrap();
        checked_snapshot(&rdb).unwrap();
        for file in [&rdb, &json] {
            let whole = std::fs::read(file).unwrap();
            for at in 0..whole.len() {
                let mut changed = whole.clone();
                changed[at] ^= 1;
                std::fs::write(file, &changed).unwrap();
                let error = checked_snapshot(&rdb).unwrap_err();
                assert!(error.message.contains(file.to_str().unwrap()), "byte {at}: {error}");
            }
            std::fs::write(file, &whole).unwrap();
        }
        checked_snapshot(&rdb).unwrap();
    }

    #[test]
    fn a_moment_that_backups_have_twice_is_refused_until_it_is_said_which_one_is_meant() {
        let backup = |(taken, offset, history): (u64, u64, &str)| {
            let text = format!(
                r#"{{"format": "remora backup", "version": 1, "kind": "snapshot", "name": "{taken}", "replid": "{history}",
                    "offset": {offset}, "server": "s", "rdb_version": 11, "taken": "", "taken_seconds": {taken}, "bytes": 9,
                    "crc64": "0", "source": "h"}}"#
            );
            Manifest::parse(text.as_bytes(), NAME, &"here").unwrap().unwrap()
        };
        let chosen = |all: &[(u64, u64, &str)], until: Option<u64>, pass| {
            let all = oldest_first(all.iter().copied().map(backup).collect(), |manifest| manifest);
            let chosen = newest_until(all, |manifest| manifest, until.map(Moment::seconds), pass);
            chosen.map(|chosen| chosen.map(|(manifest, _)| manifest.offset)).map_err(|failure| failure.message)
        };
        let (first, last) = (Some(Pass::First), Some(Pass::Last));
        // The clock went back between the third and the fourth one.
        let back = [(1000, 1, "a"), (3000, 2, "a"), (5000, 3, "a"), (2000, 4, "a"), (4000, 5, "a"), (6000, 6, "a")];
        for pass in [None, first, last] {
            assert_eq!(chosen(&back, Some(999), pass), Ok(None));
            assert_eq!(chosen(&back, Some(1500), pass), Ok(Some(1)));
            assert_eq!(chosen(&back, Some(5500), pass), Ok(Some(5)));
            assert_eq!(chosen(&back, None, pass), Ok(Some(6)));
        }
        for (until, before, after) in [(2000, 1, 4), (3500, 2, 4), (4500, 2, 5)] {
            let refused = chosen(&back, Some(until), None).unwrap_err();
            assert!(refused.contains("is there twice") && refused.contains("--until-pass last"), "{refused}");
            assert_eq!(chosen(&back, Some(until), first), Ok(Some(before)), "{until}");
            assert_eq!(chosen(&back, Some(until), last), Ok(Some(after)), "{until}");
        }
        // Offsets of another history say nothing.
        let others = [(1000, 50, "a"), (2000, 10, "b"), (3000, 40, "c")];
        assert_eq!(chosen(&others, Some(2500), None), Ok(Some(10)));
    }

    #[test]
    fn a_moment_in_a_gap_is_refused() {
        let backup = |name: &str, taken: u64, after: Option<&str>| {
            let text = format!(
                r#"{{"format": "remora backup", "version": 1, "kind": "journal", "name": "{name}", "replid": "a", "offset": {taken},
                    "server": "s", "rdb_version": 11, "taken": "", "taken_seconds": {taken}, "bytes": 9, "crc64": "0",
                    "source": "h"}}"#
            );
            let gap =
                after.map(|after| Gap { after: after.to_owned(), after_offset: 1, because: "it was away".to_owned() });
            Manifest { gap, ..Manifest::parse(text.as_bytes(), NAME, &"here").unwrap().unwrap() }
        };
        let all = || vec![backup("a", 1000, None), backup("b", 2000, Some("a")), backup("c", 3000, None)];
        let behind =
            |until| newest_until(all(), |manifest| manifest, Some(Moment::seconds(until)), None).unwrap().unwrap();
        let (chosen, gap) = behind(1500);
        assert_eq!(chosen.name, "a");
        let refused = |until, last| {
            let refused = gap.as_ref().unwrap().refuse(Moment::seconds(until), Moment::seconds(last), &"backups/a");
            refused.map_err(|failure| failure.message)
        };
        assert_eq!((refused(1400, 1400), refused(1399, 1400), refused(2000, 1400)), (Ok(()), Ok(()), Ok(())));
        let text = refused(1500, 1400).unwrap_err();
        assert!(
            text.contains("backups/a ends at 1970") && text.contains("b, begins at") && text.contains("--until 1970"),
            "{text}"
        );
        // The end of one whole folder is the beginning of the next.
        assert_eq!((behind(2500).1, behind(3500).1), (None, None));
    }

    #[test]
    fn manifests_of_older_programs_and_files_of_others_are_read_as_before() {
        let text = |version: u32| {
            format!(
                r#"{{"format": "remora backup", "version": {version}, "kind": "snapshot", "name": "{NAME}.rdb", "replid": "a",
                    "offset": 1, "server": "s", "rdb_version": 11, "taken": "", "taken_seconds": 1, "bytes": 9, "crc64": "0",
                    "source": "h"}}"#
            )
        };
        assert!(Manifest::parse(text(1).as_bytes(), NAME, &"here").unwrap().is_some());
        assert!(Manifest::parse(text(2).as_bytes(), NAME, &"here").unwrap_err().message.contains("damaged"));
        assert!(Manifest::parse(text(3).as_bytes(), NAME, &"here").is_err());
        assert!(Manifest::parse(b"{}", "notes", &"here").unwrap().is_none());
        assert!(Manifest::parse(b"", NAME, &"here").is_err());
    }
}
