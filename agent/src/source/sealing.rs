//! The tables that replicas on other hosts read instead of the plain ones, in memory of their own: ciphertext,
//! compressed slots, or both. Not here: the thread that fills them ([`super::capture`]).

use std::sync::Arc;

use remora_fabric::{Memory, RegionId};
use remora_table::{Algorithm, SealKey};
use remora_wire::derive;

use super::regions::SNAPSHOT_REGION;
use crate::args::CompressChoice;
use crate::exit::Failure;

/// The memory of these tables, of the same shapes as the plain ones.
pub(super) struct RemoteTables {
    pub(super) snapshot: Arc<Memory>,
    /// If they are ciphertext.
    pub(super) seals: Option<Seals>,
    /// Whether slots may be compressed, and how.
    pub(super) compress: CompressChoice,
}

/// The journal as ciphertext, and the secret of the keys.
pub(super) struct Seals {
    pub(super) journal: Arc<Memory>,
    /// Drawn when the source starts, or that of a snapshot that a former process has left.
    snapshot_secret: [u8; SealKey::SECRET_BYTES],
    /// Drawn when the source starts.
    journal_secret: [u8; SealKey::SECRET_BYTES],
    algorithm: Algorithm,
}

/// A snapshot for replicas on other hosts, as its capture needs it.
#[derive(Clone)]
pub(crate) struct RemoteTable {
    pub(crate) memory: Arc<Memory>,
    /// If it is ciphertext: of this generation only.
    pub(crate) key: Option<SealKey>,
    pub(crate) compress: CompressChoice,
}

/// A sealed journal as its writer needs it.
#[derive(Clone)]
pub(crate) struct SealedTable {
    pub(crate) memory: Arc<Memory>,
    /// Of this generation only.
    pub(crate) key: SealKey,
    /// Whether records may be compressed.
    pub(crate) compressed: bool,
}

impl RemoteTables {
    /// The key of a table, if it is sealed. No two generations share a number, so no key is used for two tables.
    pub(super) fn key(&self, id: RegionId) -> Option<SealKey> {
        self.seals.as_ref().map(|seals| seals.key(id))
    }

    /// The memory of the journal, if it is another one than that of the plain one.
    pub(super) fn journal(&self) -> Option<&Arc<Memory>> {
        self.seals.as_ref().map(|seals| &seals.journal)
    }

    /// The secret of the snapshot's keys, if it is sealed, for a process that goes on with it.
    pub(super) fn snapshot_secret(&self) -> Option<[u8; SealKey::SECRET_BYTES]> {
        self.seals.as_ref().map(|seals| seals.snapshot_secret)
    }

    /// The snapshot with this number, for its capture.
    pub(super) fn snapshot_table(&self, id: RegionId) -> RemoteTable {
        RemoteTable { memory: self.snapshot.clone(), key: self.key(id), compress: self.compress }
    }

    /// The journal with this number, for its capture, if it is sealed.
    pub(super) fn journal_table(&self, id: RegionId) -> Option<SealedTable> {
        let seals = self.seals.as_ref()?;
        let compressed = self.compress != CompressChoice::Off;
        Some(SealedTable { memory: seals.journal.clone(), key: seals.key(id), compressed })
    }
}

impl Seals {
    pub(super) fn new(journal: Arc<Memory>) -> Result<Seals, Failure> {
        let secret = || {
            let mut secret = [0; SealKey::SECRET_BYTES];
            let drawn = getrandom::fill(&mut secret);
            drawn.map_err(|error| Failure::local(format!("no random bytes for the keys of the tables: {error}")))?;
            Ok::<_, Failure>(secret)
        };
        let (snapshot_secret, journal_secret) = (secret()?, secret()?);
        Ok(Seals { journal, snapshot_secret, journal_secret, algorithm: Algorithm::best() })
    }

    /// The snapshot was sealed by a former process.
    pub(super) fn set_snapshot_secret(&mut self, secret: [u8; SealKey::SECRET_BYTES]) {
        self.snapshot_secret = secret;
    }

    fn key(&self, id: RegionId) -> SealKey {
        let mut label = [0; 12];
        label[..8].copy_from_slice(&id.generation.to_le_bytes());
        label[8..].copy_from_slice(&id.region.to_le_bytes());
        let secret = if id.region == SNAPSHOT_REGION { &self.snapshot_secret } else { &self.journal_secret };
        SealKey::new(self.algorithm, derive(secret, &label))
    }
}
