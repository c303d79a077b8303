//! Manifest: what a backup is, as a small JSON file beside it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::moment::Moment;
use super::rdb_file::RdbFile;
use crate::exit::Failure;
use crate::snapshot::beside;
use crate::snapshot::fetch::PRIVATE;

/// What the field `format` says.
const FORMAT: &str = "remora backup";

/// The version that this program writes, and the newest that it reads.
const VERSION: u32 = 1;

/// Bytes of a manifest that are read at most: one with a thousand databases has 20 KiB.
const BYTES_MAX: u64 = 4 << 20;

/// What a backup is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: String,
    version: u32,
    pub(super) kind: Kind,
    /// The file or folder, beside the manifest or around it.
    pub(super) name: String,
    pub(super) replid: String,
    /// The last byte of the stream that the snapshot holds.
    pub(super) offset: u64,
    pub(super) server: String,
    pub(super) rdb_version: u32,
    /// When the server began to write the snapshot, by its own clock.
    pub(super) taken: String,
    pub(super) taken_seconds: Moment,
    pub(super) bytes: u64,
    /// Of the snapshot, as at the end of an RDB file.
    pub(super) crc64: String,
    /// Keys of each database; missing if the snapshot has types that this program does not know.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) keys: Option<BTreeMap<u64, u64>>,
    /// The source from which it was read.
    pub(super) source: String,
    /// Of which time before the snapshot there are no commands, although there is an earlier backup with commands.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) gap: Option<Gap>,
    /// The object with the snapshot, if the backup is one of an archive.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) stored: Option<Stored>,
}

/// An object of an archive, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stored {
    /// Its key, below the archive's prefix.
    pub(super) object: String,
    pub(super) bytes: u64,
    /// Of all its bytes.
    pub(super) crc64: String,
    /// The format in which it is encrypted; missing if it is not.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) encryption: Option<String>,
}

/// A time of which nothing can be restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Gap {
    /// The earlier backup.
    pub(super) after: String,
    /// The last byte of its stream that it has, in its own history.
    pub(super) after_offset: u64,
    pub(super) because: String,
}

/// What a backup consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// An RDB file.
    Snapshot,
    /// A folder with a snapshot and the commands since.
    Journal,
}

impl Manifest {
    /// What this snapshot is. `server`: kind and version, as the source says.
    pub(super) fn of(kind: Kind, rdb: &RdbFile, server: &str, source: String) -> Manifest {
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

    /// Reads a manifest; `None` if another program wrote the file.
    pub(super) fn read(file: &Path) -> Option<Manifest> {
        let mut bytes = Vec::new();
        File::open(file).ok()?.take(BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Manifest::parse(&bytes)
    }

    /// The manifest in these bytes; `None` if another program wrote them.
    pub(super) fn parse(bytes: &[u8]) -> Option<Manifest> {
        let manifest: Manifest = serde_json::from_slice(bytes).ok()?;
        let is_name = !manifest.name.is_empty() && !manifest.name.contains('/') && !manifest.name.starts_with('.');
        (manifest.format == FORMAT && manifest.version <= VERSION && is_name).then_some(manifest)
    }

    /// Writes it, as a whole.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&self, to: &Path) -> Result<(), Failure> {
        beside::write(to, &self.to_json()?, &PRIVATE)
    }

    /// Its text.
    ///
    /// # Errors
    /// It has none; that would be a bug.
    pub(super) fn to_json(&self) -> Result<Vec<u8>, Failure> {
        let mut json = serde_json::to_vec_pretty(self).map_err(|error| Failure::local(error.to_string()))?;
        json.push(b'\n');
        Ok(json)
    }

    /// By which backups are sorted: the oldest is the least.
    pub(super) fn order(&self) -> (Moment, u64, &str) {
        (self.taken_seconds, self.offset, &self.name)
    }
}
