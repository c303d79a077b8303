//! Mutation: known faults that a test can put back into the product, one at a time.
//!
//! Each hook stands where the product decides, and no release build contains it. The simulation must find
//! every one of them: see `dev/testing.md`.

use std::cell::Cell;

/// A fault that the product once had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// The server is emptied while its replication position is still valid: a primary then continues an empty server.
    PositionKept,
    /// The primary's promotion is undone: the agent changes the server's primary without a look at the present one.
    NoLook,
    /// `+CONTINUE` with another replid is taken for the same history.
    OtherHistoryIgnored,
    /// A control connection that the server has closed is used on.
    ClosedConnectionKept,
    /// The hand-off ends the full copy that the server takes by itself.
    FullCopyAborted,
    /// The delivery ends a payload when the next slot has not arrived yet.
    PayloadEndedEarly,
    /// The delivery continues a server that asks for another offset than the one that it would send next.
    OffsetIgnored,
    /// What the source has said about where slots are read is forgotten when the tables of an offer are connected.
    AssignmentForgotten,
    /// A source of another data set is taken in a later conversation.
    ForeignSourceTaken,
    /// A fork is counted when the first byte of its snapshot arrives.
    ForkFromTheFirstByte,
    /// The age of a snapshot counts from its request, also for replicas that waited for it.
    AgeFromTheRequest,
    /// The delivery sends the stream behind the mark before the server's first ACK.
    StreamBeforeTheAck,
    /// The capture drops what it has read together with a snapshot and lies behind it: the first bytes of the stream.
    AheadDropped,
    /// A sync is called done though the server has counted commands that it could not execute.
    ErrorsUnheard,
    /// A snapshot is given to a replica that joins after a command which must not be applied late.
    LateCommandsServed,
    /// An offer that comes while the server is on its way to the primary is dropped, and awaited for ever.
    OfferForgotten,
    /// A backlog is believed that holds more than its size, because a replica was not sent its bytes yet.
    OverfullBelieved,
    /// The estimate alone says that a primary covers a replica.
    PinNotOpened,
    /// What is pinned for a replica is released while that is on its way to its primary.
    PinClosedEarly,
    /// A connection that the primary serves through `remora attend` is ended as soon as the link is up.
    HandedBackUncovered,
    /// A sync of `remora attend` gets the connection by which its server asks another primary.
    AnotherPrimaryGiven,
    /// A server that does not reach its primary by itself is waited for without a limit.
    DirectForEver,
    /// A server whose primary was replaced, and that no Sentinel knows, is left waiting for the former one.
    AstrayLeft,
    /// A turn (`--at-once`) does not end when the server has loaded.
    TurnKept,
    /// A standby copies a snapshot whose history its server does not have.
    AnyHistoryCopied,
    /// A standby has the server continue the stream where the server is, not where the copied part ends.
    CopyLeavesAGap,
    /// A standby asks for the stream without a look at whether the server has it.
    CopyUnasked,
    /// A standby's own snapshots are numbered on from the number of the copy, as those of the first source are.
    CopyNumbersOn,
    /// A copy takes the place of a snapshot that replicas still read.
    CopyOverReaders,
    /// A standby takes a snapshot of its own as soon as a replica waits.
    StandbyForksAtOnce,
    /// A first source takes a snapshot because a standby waits for one.
    ForkForAStandby,
    /// A reader that has several sources tries one.
    OneSourceTried,
    /// The hand-off asks the source that the agent has moved to, though that captures another server.
    FirstPlanBelieved,
    /// A replica that waits for its turn goes to the end of the queue when its connection breaks.
    PlaceLost,
    /// Every replica that waits is given a turn when one is free.
    TurnsUncounted,
    /// A replica that needs the stream only, or the rest of its slots, waits for a turn.
    TurnForAll,
    /// The turn of a replica that takes nothing any more is kept.
    StalledTurnKept,
    /// A standby takes a turn, and waits for one.
    StandbyTakesTurn,
    /// All zones together have the turns of one.
    ZonesShareTurns,
    /// A replica that waits for a turn of its zone holds up those of other zones that joined after it.
    ZoneHeldUp,
    /// A replica that names no zone takes no turn.
    ZonelessTakeNoTurn,
    /// The one that joined last has the next turn.
    LastComesFirst,
    /// Agents that lost the same thing come back at the same time.
    NoJitter,
    /// Each replica gets a snapshot of its own.
    SnapshotNotShared,
    /// The primary is asked for another stream with each snapshot.
    StreamForEach,
    /// The first source that has the right history serves, also one beside a server that stands still.
    FirstSourceKept,
    /// `remora switch` promotes a server that is behind the one that has stepped down.
    BehindPromoted,
    /// What the old primary held a moment before it stepped down is taken for what it held then.
    OldOffsetBelieved,
    /// The new server is promoted before the old primary has stepped down.
    PromotedFirst,
    /// A switch that fails leaves the old primary a replica.
    TakeBackForgotten,
    /// A switch that fails leaves the pause of writes.
    ReleaseForgotten,
    /// The old primary is made one again although the order to promote the new one may have arrived.
    TakenBackAfterPromotion,
    /// A switch that goes on where another has ended makes the old one the primary, whatever the new one holds.
    AheadTakenBack,
    /// An old primary that has forgotten its new role is left as it is.
    ForgottenRoleLeft,
    /// A switch has the old one follow although a switch back has made it the primary.
    SuccessorDemoted,
    /// What a former switch has sent is carried out while another one goes on.
    PredecessorHeard,
    /// A switch makes an old primary one again that another switch has taken over.
    MarkIgnored,
}

thread_local! {
    static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
}

impl Mutation {
    /// Whether this fault is put back in this thread. Never in a release build, where the hook compiles to nothing.
    pub fn is_active(self) -> bool {
        cfg!(debug_assertions) && ACTIVE.get() == Some(self)
    }

    /// Puts this fault back in this thread, or none.
    pub fn set(mutation: Option<Mutation>) {
        ACTIVE.set(mutation);
    }
}
