//! The sealed tables, which replicas on other hosts read: ciphertext of the plain tables, in memory of their own.
//! Not here: the thread that fills them ([`super::capture`]).

use std::sync::Arc;

use remora_fabric::{Memory, RegionId};
use remora_table::{Algorithm, SealKey};
use remora_wire::derive;

use crate::exit::Failure;

/// The memory of the sealed tables, of the same shapes as the plain ones, and the secret of their keys.
pub(super) struct SealedTables {
    pub(super) snapshot: Arc<Memory>,
    pub(super) journal: Arc<Memory>,
    /// Drawn when the source starts.
    secret: [u8; SealKey::SECRET_BYTES],
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
        let mut secret = [0; SealKey::SECRET_BYTES];
        let drawn = getrandom::fill(&mut secret);
        drawn.map_err(|error| Failure::local(format!("no random bytes for the keys of the tables: {error}")))?;
        Ok(SealedTables { snapshot, journal, secret, algorithm: Algorithm::best() })
    }

    /// The key of a table. No two generations share a number, so no key is used for two tables.
    pub(super) fn key(&self, id: RegionId) -> SealKey {
        let mut label = [0; 12];
        label[..8].copy_from_slice(&id.generation.to_le_bytes());
        label[8..].copy_from_slice(&id.region.to_le_bytes());
        SealKey::new(self.algorithm, derive(&self.secret, &label))
    }

    /// The table with this number in this memory, for its capture.
    pub(super) fn table(&self, id: RegionId, memory: &Arc<Memory>) -> SealedTable {
        SealedTable { memory: memory.clone(), key: self.key(id) }
    }
}
