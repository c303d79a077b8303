//! The numbers of a source's regions: each generation has both.

/// The region number of the snapshot.
pub(super) const SNAPSHOT_REGION: u32 = 0;
/// The region number of the journal.
pub(super) const JOURNAL_REGION: u32 = 1;
