//! The formats of targets, and what a conversion says.

use std::collections::BTreeMap;

use super::super::input::{Stop, malformed};
use super::super::packed::Damaged;
use super::super::{Error, Head, Magic};

/// The version of the format that a server reads, which is the newest one that it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Format(pub(super) u32);

impl Format {
    /// Redis 5 and 6.
    pub const REDIS_6: Format = Format(9);
    /// Redis 7.0.
    pub const REDIS_7_0: Format = Format(10);
    /// Redis 7.2, and Valkey 7.2 to 8.1.
    pub const COMMON: Format = Format(11);
    /// Redis 7.4 to 8.4.
    pub const REDIS_7_4: Format = Format(12);
    /// Redis 8.6.
    pub const REDIS_8_6: Format = Format(13);
    /// Valkey 9.
    pub const VALKEY_9: Format = Format(80);

    /// The format of a server of this family and version, given as `(major, minor)`.
    pub fn of_server(is_valkey: bool, version: (u32, u32)) -> Format {
        match (is_valkey, version) {
            (true, (9.., _)) => Format::VALKEY_9,
            (true, _) | (false, (7, 2..4)) => Format::COMMON,
            (false, (..7, _)) => Format::REDIS_6,
            (false, (7, ..2)) => Format::REDIS_7_0,
            (false, (7, _) | (8, ..6)) => Format::REDIS_7_4,
            (false, _) => Format::REDIS_8_6,
        }
    }

    /// Whether a server that reads this format reads a snapshot that begins so, without conversion.
    pub fn reads(self, head: &Head) -> bool {
        match (self.family(), head.magic) {
            (Magic::Redis, Magic::Redis) => head.version <= self.0,
            (Magic::Valkey, Magic::Redis) => head.version <= Format::COMMON.0,
            (Magic::Valkey, Magic::Valkey) => true,
            (Magic::Redis, Magic::Valkey) => false,
        }
    }

    pub(super) fn family(self) -> Magic {
        if self >= Format::VALKEY_9 { Magic::Valkey } else { Magic::Redis }
    }

    /// Whether values of this type can be read.
    pub(super) fn knows(self, kind: u8) -> bool {
        match kind {
            ..=5 | 9..=15 => true,
            16..=19 => self >= Format::REDIS_7_0,
            20 | 21 => self >= Format::COMMON,
            22 => self.family() == Magic::Valkey,
            24 | 25 => self >= Format::REDIS_7_4 && self.family() == Magic::Redis,
            26 => self >= Format::REDIS_8_6 && self.family() == Magic::Redis,
            _ => false,
        }
    }

    pub(super) fn has_functions(self) -> bool {
        self >= Format::REDIS_7_0
    }
}

/// What is left out instead of refused, because a person has said so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// The times at which fields of hashes expire, for a server that knows none: such fields stay for ever.
    pub drop_field_expiry: bool,
    /// Keys of modules' types, and what modules wrote beside keys.
    pub skip_modules: bool,
    /// Libraries of functions, for a server that knows none.
    pub skip_functions: bool,
}

/// What a target can't hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Obstacle {
    /// Hashes whose fields expire.
    #[error("a hash whose fields expire")]
    FieldExpiry,
    /// A module's type, by its name.
    #[error("a value of the module type {0:?}")]
    Module(String),
    /// A library of functions.
    #[error("a library of functions")]
    Functions,
}

/// Why a conversion can't continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// The target has no form for this.
    #[error("{what} can't be given to the server{}", shown_key(key, *database))]
    Refused {
        /// What it is.
        what: Obstacle,
        /// The beginning of its key; empty if it is beside the keys.
        key: Vec<u8>,
        /// Its database.
        database: u64,
    },
    /// A type or an opcode of a server that is newer than this program, or that was never released.
    #[error("the snapshot holds something of an unknown type, {code}, at byte {at}{}", shown_key(key, *database))]
    Unknown {
        /// The number of the type.
        code: u8,
        /// Its position.
        at: u64,
        /// The key before it; empty if there is none.
        key: Vec<u8>,
        /// The database.
        database: u64,
    },
    /// No server writes this.
    #[error("byte {at}: {error}")]
    Damaged {
        /// The position.
        at: u64,
        /// What is wrong there.
        error: Error,
    },
}

fn shown_key(key: &[u8], database: u64) -> String {
    if key.is_empty() {
        String::new()
    } else {
        format!(" (key {:?} of database {database})", String::from_utf8_lossy(key))
    }
}

/// What a conversion has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// Keys that were read.
    pub keys: u64,
    /// Keys that were written in another type, by the numbers of both types.
    pub changed: BTreeMap<(u8, u8), u64>,
    /// What the target can't hold: how often, and the keys of the first ones.
    pub obstacles: BTreeMap<Obstacle, Obstacles>,
}

/// How often a snapshot holds something that its target can't hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Obstacles {
    /// How many keys; or libraries or fields beside keys.
    pub count: u64,
    /// The first [`SAMPLE_KEYS`] keys, with their databases.
    pub keys: Vec<(u64, Vec<u8>)>,
}

/// Keys that are named of each kind of obstacle.
pub const SAMPLE_KEYS: usize = 5;

/// Bytes of a key that a message shows.
pub(super) const SHOWN_KEY_BYTES: usize = 128;

/// Why an item was not parsed.
pub(super) enum Trouble {
    Stop(Stop),
    Unknown(u8),
    Refused(Obstacle),
}

impl From<Stop> for Trouble {
    fn from(stop: Stop) -> Trouble {
        Trouble::Stop(stop)
    }
}

impl From<Damaged> for Trouble {
    fn from(_: Damaged) -> Trouble {
        Trouble::Stop(malformed("a listpack"))
    }
}
