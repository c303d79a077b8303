//! The sealed tables, which replicas on other hosts read: ciphertext of the plain tables, in memory of their own.
//! Not here: the thread that fills them ([`super::capture`]).

use std::sync::Arc;

use remora_fabric::{Memory, RegionId};
use remora_table::{Algorithm, SealKey};
use remora_wire::derive;

use super::regions::SNAPSHOT_REGION;
use crate::exit::Failure;

/// The memory of the sealed tables, of the same shapes as the plain ones, and the secrets of their keys.
pub(super) struct SealedTables {
    pub(super) snapshot: Arc<Memory>,
    pub(super) journal: Arc<Memory>,
    /// Drawn when the source starts, or that of a snapshot that a former process has left.
    snapshot_secret: [u8; SealKey::SECRET_BYTES],
    /// Drawn when the source starts.
    journal_secret: [u8; SealKey::SECRET_BYTES],
    algorithm: Algorithm,
}

/// A sealed table as its writer needs it.
#[derive(Clone)]
pub(crate) struct SealedTable {
    pub(crate) memory: Arc<Memory>,
    /// Of this generation only.
    pub(crate) key: SealKey,
}

impl SealedTables {
    pub(super) fn new(snapshot: Arc<Memory>, journal: Arc<Memory>) -> Result<SealedTables, Failure> {
        let secret = || {
            let mut secret = [0; SealKey::SECRET_BYTES];
            let drawn = getrandom::fill(&mut secret);
            drawn.map_err(|error| Failure::local(format!("no random bytes for the keys of the tables: {error}")))?;
            Ok::<_, Failure>(secret)
        };
        let (snapshot_secret, journal_secret) = (secret()?, secret()?);
        Ok(SealedTables { snapshot, journal, snapshot_secret, journal_secret, algorithm: Algorithm::best() })
    }

    /// The secret of the snapshot's keys, for a process that goes on with it.
    pub(super) fn snapshot_secret(&self) -> [u8; SealKey::SECRET_BYTES] {
        self.snapshot_secret
    }

    /// The snapshot was sealed by a former process.
    pub(super) fn set_snapshot_secret(&mut self, secret: [u8; SealKey::SECRET_BYTES]) {
        self.snapshot_secret = secret;
    }

    /// The key of a table. No two generations share a number, so no key is used for two tables.
    pub(super) fn key(&self, id: RegionId) -> SealKey {
        let mut label = [0; 12];
        label[..8].copy_from_slice(&id.generation.to_le_bytes());
        label[8..].copy_from_slice(&id.region.to_le_bytes());
        let secret = if id.region == SNAPSHOT_REGION { &self.snapshot_secret } else { &self.journal_secret };
        SealKey::new(self.algorithm, derive(secret, &label))
    }

    /// The table with this number in this memory, for its capture.
    pub(super) fn table(&self, id: RegionId, memory: &Arc<Memory>) -> SealedTable {
        SealedTable { memory: memory.clone(), key: self.key(id) }
    }
}
