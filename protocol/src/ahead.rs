//! Ahead: what is still to come of a snapshot or of a transfer of it, and how soon.

use remora_wire::codec::Maybe;
use remora_wire::{codes, record};
use serde::Serialize;

/// How far a transfer is, how fast it is, and how long the rest takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Advance {
    /// The share of the whole that has arrived, in thousandths. 1000 only if all has arrived. `None` while the length
    /// of the whole is not even estimated.
    pub percent_permille: Option<u16>,
    /// Bytes that arrive per second.
    pub rate_bytes_per_s: u64,
    /// Seconds until the rest has arrived at that rate. `None` if nothing arrives, or if the rest is not known.
    pub left_seconds: Option<u64>,
}

impl Advance {
    /// The share of the whole that has arrived, from 0 to 1. `None` while the length of the whole is unknown.
    pub fn ratio(&self) -> Option<f64> {
        self.percent_permille.map(|permille| f64::from(permille) / 1000.0)
    }
}

record!(Advance { percent_permille: Maybe<u16>, rate_bytes_per_s: u64, left_seconds: Maybe<u64> });

/// The length of a snapshot, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Length {
    /// Bytes of the whole snapshot; 0 if nothing is known.
    pub bytes: u64,
    /// What that follows from.
    pub basis: Basis,
}

record!(Length { bytes: u64, basis: Basis });

/// What the length of a snapshot follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// Nothing: the length is not known.
    #[default]
    Unknown,
    /// The memory that the data set takes: a snapshot is hardly ever longer, and often much shorter.
    Memory,
    /// The length of the last snapshot, and how the data set has grown since.
    Former,
    /// The bytes of the keys that the server has saved so far, and the number of all keys.
    Keys,
    /// The whole snapshot has arrived at the source, or its length was announced.
    Known,
}

codes!(Basis is "basis of a length" {
    0 => Unknown,
    1 => Memory,
    2 => Former,
    3 => Keys,
    4 => Known,
});

/// How far the server is that saves its data set for a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Saving {
    /// Keys that it has saved.
    pub keys: u64,
    /// Keys that it had when it began.
    pub keys_total: u64,
}

record!(Saving { keys: u64, keys_total: u64 });

/// What a source expects of the snapshot that it takes, or has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Expected {
    /// The generation of the snapshot.
    pub generation: u64,
    /// Its length.
    pub length: Length,
    /// How far the server is; `None` while it does not save, or does not say.
    pub saving: Option<Saving>,
}

record!(Expected { generation: u64, length: Length, saving: Maybe<Saving> });
