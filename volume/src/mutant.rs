//! Mutants: rules that a test can take out, one at a time. The schedules must find each one missing.

use std::cell::Cell;

/// A rule that is taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A copy that caught up half forgets at which version it was whole.
    ClaimForgotten,
    /// Servers obey every writer.
    NothingPromised,
    /// A writer serves before the copies are marked with its generation.
    NotMarked,
    /// The promise of a server that has lost its memory counts.
    EmptyCounts,
    /// A server that has lost its memory is taken in although the others were not asked.
    NotConfirmed,
    /// A copy lends before it has applied what the borrower is not sent.
    LenderTooEarly,
    /// A copy is called whole before it has applied what its lender had applied.
    WholeTooEarly,
    /// A write is acknowledged at one copy less.
    AcknowledgedEarly,
    /// Two writers can have the same generation.
    GenerationShared,
    /// What was read is given out before it is acknowledged.
    ReadUnacknowledged,
    /// A copy that is behind is read.
    ReadBehind,
    /// A region is read although its copy may lack a write of the blocks.
    LookTooEarly,
    /// What was read out of a region counts, whomever its server obeys.
    LineIgnored,
    /// The line is read before the blocks.
    LineFirst,
    /// A read and a write have a block in common only if the first block of the one is in the other.
    OverlapOfFirst,
    /// Only the first run of a write counts.
    FirstRunOnly,
    /// The newest of several blocks is the first one.
    NewestOfFirst,
    /// A copy that catches up takes no zeros.
    ZerosNotTaken,
    /// A promise is answered before it is durable.
    PromiseNotDurable,
    /// A mark is answered before it is durable, as if it were.
    MarkNotDurable,
    /// A power cut takes the claim of a copy that is behind.
    ClaimNotDurable,
    /// What a copy has caught up counts as durable although its store has not said so.
    BehindCounts,
    /// A flush is completed when the writes are durable at one copy less.
    FlushedEarly,
    /// What is applied counts as durable at a copy with a store.
    AppliedIsDurable,
    /// A copy that may lack writes since its power was cut does not say so.
    CutUnsaid,
    /// A copy is whole in the store before its blocks are.
    WholeBeforeBlocks,
    /// A copy that refused a write is read as if it had applied it.
    FullCopyIsRead,
    /// Segments are removed before the extents are synced.
    ExtentsNotSynced,
    /// What is behind the end of the journal stays there.
    TailNotCleared,
    /// A record that was synced and is not readable is taken for the end of the journal.
    RotIsTheEnd,
    /// A record that was whole and has changed is taken for one that was torn.
    RotIsTorn,
    /// A store whose sync has failed is believed by the next process.
    LostIsBelieved,
    /// The name of a new segment is not made durable.
    NameNotSynced,
    /// An event has the number of one before that did not happen.
    NumberUsedAgain,
    /// A block of zeros in the extents is judged by its bytes, which are of a write before.
    ZerosAreJudged,
    /// A store does not keep which size its copy had before a growth that is not agreed.
    FormerSizeForgotten,
    /// A copy goes back from a size that a writer has used.
    GrowthNotAgreed,
    /// A change of a part of a block goes on while another one of the block is under way.
    BlocksNotClaimed,
    /// The command tells the servers that the size is agreed before it is in the volume's file.
    AgreedBeforeTheFile,
}

thread_local! {
    static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
}

impl Mutant {
    /// Whether only copies with a store obey the rule.
    pub(crate) fn is_about_stores(self) -> bool {
        use Mutant::{AppliedIsDurable, BehindCounts, ClaimNotDurable, CutUnsaid, FlushedEarly, MarkNotDurable};
        use Mutant::{PromiseNotDurable, WholeBeforeBlocks};
        matches!(self, PromiseNotDurable | MarkNotDurable | ClaimNotDurable | BehindCounts)
            || matches!(self, FlushedEarly | AppliedIsDurable | CutUnsaid | WholeBeforeBlocks)
    }

    /// Whether this rule is taken out in this thread.
    pub(crate) fn is_active(self) -> bool {
        ACTIVE.get() == Some(self)
    }

    /// Takes this rule out in this thread, or none.
    pub(crate) fn set(mutant: Option<Mutant>) {
        ACTIVE.set(mutant);
    }
}
