//! What a reader expects of a table, and whether the table agrees.

use std::sync::Arc;

use crate::error::Error;
use crate::identity::Origin;
use crate::layout::{Geometry, HEAD_BYTES, Head, Identity, Kind};
use crate::seal::{Seal, SealKey};

/// The content of the source's offer. A reader trusts nothing in the memory before it has found the same there.
#[derive(Debug, Clone)]
pub struct Expectation {
    /// Where the table offered begins.
    pub origin: Origin,
    /// The shape offered: all addresses are computed from it.
    pub geometry: Geometry,
    /// How the table is opened; `None`: it is plain.
    pub seal: Option<Arc<Seal>>,
    /// Whether slots of the snapshot may be compressed.
    pub compressed: bool,
}

impl Expectation {
    /// A plain table.
    pub fn plain(origin: Origin, geometry: Geometry) -> Expectation {
        Expectation { origin, geometry, seal: None, compressed: false }
    }

    /// A table of this kind that is sealed with this key.
    ///
    /// # Errors
    /// As for [`Seal::new`].
    pub fn sealed(kind: Kind, origin: Origin, geometry: Geometry, key: &SealKey) -> Result<Expectation, Error> {
        let seal = Arc::new(Seal::new(key, &Identity { kind, origin })?);
        Ok(Expectation { origin, geometry, seal: Some(seal), compressed: false })
    }

    /// The same table, with slots that may be compressed.
    pub fn with_compressed_slots(self, compressed: bool) -> Expectation {
        Expectation { compressed, ..self }
    }

    /// Whether slots must be opened before they are used, so that they cannot be used where they are.
    pub fn needs_opening(&self) -> bool {
        self.seal.is_some() || self.compressed
    }

    pub(crate) fn seal(&self) -> Option<&Seal> {
        self.seal.as_deref()
    }

    /// Whether these first bytes of a memory are those of the expected table.
    pub(crate) fn check(&self, bytes: &[u8; HEAD_BYTES], kind: Kind) -> Result<(), Error> {
        let found = Head::parse(bytes)?;
        let algorithm = self.seal().map(Seal::algorithm);
        let identity = Identity { kind, origin: self.origin };
        let want = Head { identity, geometry: self.geometry, algorithm, compressed: self.compressed };
        if found == want {
            return Ok(());
        }
        Err(Error::WrongGeneration { want: describe(&want), got: describe(&found) })
    }
}

fn describe(head: &Head) -> String {
    let Identity { kind, origin } = &head.identity;
    let Geometry { slot_size, slots } = head.geometry;
    let sealed = head.algorithm.map_or(String::new(), |algorithm| format!(", sealed by {algorithm:?}"));
    let compressed = if head.compressed { ", compressed" } else { "" };
    format!("{kind:?} {origin} ({slots} slots of {slot_size} bytes{sealed}{compressed})")
}
