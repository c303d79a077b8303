//! What a reader expects of a table, and whether the table agrees.

use crate::{
    error::Error,
    layout::{Geometry, HEAD_BYTES, Head, Identity, Kind},
    origin::Origin,
};

/// The content of the source's offer. A reader trusts nothing in the memory before it has found the same there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expectation {
    /// Where the table offered begins.
    pub origin: Origin,
    /// The shape offered: all addresses are computed from it.
    pub geometry: Geometry,
}

impl Expectation {
    /// Whether these first bytes of a memory are those of the expected table.
    pub(crate) fn check(&self, bytes: &[u8; HEAD_BYTES], kind: Kind) -> Result<(), Error> {
        let found = Head::parse(bytes)?;
        let want = Head { identity: Identity { kind, origin: self.origin }, geometry: self.geometry };
        if found == want {
            return Ok(());
        }
        Err(Error::WrongGeneration { want: describe(&want), got: describe(&found) })
    }
}

fn describe(head: &Head) -> String {
    let Identity { kind, origin } = &head.identity;
    let Geometry { slot_size, slots } = head.geometry;
    format!("{kind:?} {origin} ({slots} slots of {slot_size} bytes)")
}
