//! What a reader expects of a table, and whether the table agrees.

use crate::{
    error::Error,
    layout::{Geometry, HEAD_BYTES, Head, Identity, Kind},
};

/// The content of the source's offer. A reader trusts nothing in the memory before it has found the same there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expectation {
    /// The generation offered.
    pub generation: u64,
    /// The shape offered: all addresses are computed from it.
    pub geometry: Geometry,
    /// The replication id offered.
    pub replid: [u8; 40],
    /// The replication offset of the snapshot.
    pub first_offset: u64,
}

impl Expectation {
    /// Whether these first bytes of a memory are those of the expected table.
    pub(crate) fn check(&self, bytes: &[u8; HEAD_BYTES], kind: Kind) -> Result<(), Error> {
        let found = Head::parse(bytes)?;
        let want = Head { identity: self.identity(kind), geometry: self.geometry };
        if found == want {
            return Ok(());
        }
        Err(Error::WrongGeneration { want: describe(&want), got: describe(&found) })
    }

    fn identity(&self, kind: Kind) -> Identity {
        Identity { generation: self.generation, kind, replid: self.replid, first_offset: self.first_offset }
    }
}

fn describe(head: &Head) -> String {
    let Identity { generation, kind, replid, first_offset } = &head.identity;
    let Geometry { slot_size, slots } = head.geometry;
    let replid = String::from_utf8_lossy(replid);
    format!("{kind:?} {generation} of {replid}:{first_offset} ({slots} slots of {slot_size} bytes)")
}
