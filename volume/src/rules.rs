//! The order of all writes, what a writer and the servers say to each other about it, and what a server promises,
//! applies and refuses.
//!
//! A test can take rules out, one at a time (`Mutant`). The schedules must find each one missing.

#[cfg(test)]
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;

// Version: the place of a write among all writes of a volume.

/// Bits of a version that count the writes of one generation: 200 days at a million writes a second.
const COUNTER_BITS: u32 = 44;

/// Bits of a version for its generation: half a million writers. The highest bit of the word is left free: in the
/// entry of a block it says that the block is being written.
const GENERATION_BITS: u32 = u64::BITS - 1 - COUNTER_BITS;

/// A writer's turn. A later writer has a higher generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(u32);

impl Generation {
    /// Before the first writer.
    pub const NONE: Generation = Generation(0);

    /// The last one: a version has 19 bits for it.
    pub const LAST: Generation = Generation((1 << GENERATION_BITS) - 1);

    /// The generation after this one; `None` after the last.
    pub fn next(self) -> Option<Generation> {
        (self < Generation::LAST).then_some(Generation(self.0 + 1))
    }

    /// Its number, for memory and messages.
    pub fn number(self) -> u32 {
        self.0
    }

    /// The generation of a number; `None` if it is too high.
    pub fn from_number(number: u32) -> Option<Generation> {
        (number <= Generation::LAST.0).then_some(Generation(number))
    }

    /// The version with which this generation begins.
    pub fn start(self) -> Version {
        Version(u64::from(self.0) << COUNTER_BITS)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The place of a write: the generation of its writer, and its number among the writes of that generation. Versions are
/// ordered as the writes are.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u64);

impl Version {
    /// Before the first write.
    pub const NONE: Version = Version(0);

    /// Its word, for memory and messages. The highest bit is 0.
    pub fn word(self) -> u64 {
        self.0
    }

    /// The version of a word; `None` if the highest bit is set.
    pub fn from_word(word: u64) -> Option<Version> {
        (word >> (u64::BITS - 1) == 0).then_some(Version(word))
    }

    /// The generation of the writer.
    pub fn generation(self) -> Generation {
        Generation((self.0 >> COUNTER_BITS) as u32)
    }

    /// The number of the write in its generation; 0 before the first.
    pub fn counter(self) -> u64 {
        self.0 & ((1 << COUNTER_BITS) - 1)
    }

    /// The next write of the same writer; `None` if its generation has no more numbers.
    pub fn next(self) -> Option<Version> {
        let next = Version(self.0.checked_add(1)?);
        (next.generation() == self.generation()).then_some(next)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation(), self.counter())
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

// Messages: what a writer asks of the servers, and what they answer. Blocks and their places are not modelled here.

/// The number of a server of a volume, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(pub usize);

/// A writer, as servers know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its turn.
    pub generation: Generation,
    /// A random number of its process. Two writers that chose the same generation differ in it.
    pub writer: u64,
}

/// What a copy holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Nothing: its server is new, or has lost its memory. It does not remember what it promised.
    #[default]
    Empty,
    /// It lacks writes.
    Behind,
    /// Every write up to `applied`, and none behind it.
    Whole,
}

/// What a server says of its copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What the copy holds.
    pub state: State,
    /// The writer that the server obeys.
    pub promised: Option<Holder>,
    /// The highest version at which the copy ever was whole. It keeps that while it is behind.
    pub claim: Version,
    /// The last write that was applied.
    pub applied: Version,
    /// The server's power was cut, and with it went what its store had not synced: the copy is a prefix, and may lack
    /// writes that it has answered. Until a writer that has said so writes.
    pub is_cut: bool,
}

impl Standing {
    /// Whether the server remembers what it promised.
    pub fn remembers(&self) -> bool {
        self.state != State::Empty
    }
}

/// A message of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// How does the copy stand? Answered by [`Answer::Standing`].
    Ask,
    /// Obey no writer of a lower generation any more. Answered by [`Answer::Promised`].
    Promise(Holder),
    /// The copy lacks writes: take the blocks that differ from a copy that has applied `since`, and apply what is
    /// written from then on. Answered by [`Answer::Whole`] at its end.
    CatchUp {
        /// Who asks.
        holder: Holder,
        /// The server that lends its blocks.
        lender: ServerId,
        /// The last version before the writes that follow.
        since: Version,
    },
    /// The copy is whole, and the holder's first write follows. Answered by [`Answer::Written`].
    Mark {
        /// Who asks.
        holder: Holder,
        /// The generation may begin without what was lost with the power of servers: [`Standing::is_cut`].
        may_lack_tail: bool,
    },
    /// Apply this write. Answered by [`Answer::Written`].
    Write {
        /// Who writes.
        holder: Holder,
        /// The next version of the holder.
        version: Version,
    },
    /// Answer once everything that was applied is durable. Answered by [`Answer::Written`].
    Flush(Holder),
    /// Does the server still obey the holder? Answered by [`Answer::Confirmed`].
    Confirm {
        /// Who asks.
        holder: Holder,
        /// The number of the question.
        question: u64,
    },
    /// What is in these blocks? Answered by [`Answer::Read`]. A server answers in order, so a read returns every write
    /// that was sent before it.
    Read {
        /// Who asks.
        holder: Holder,
        /// The number of the read.
        number: u64,
    },
}

/// An answer of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Request::Ask`].
    Standing(Standing),
    /// To [`Request::Promise`].
    Promised(Standing),
    /// The server obeys another writer.
    Fenced {
        /// Its generation.
        by: Generation,
    },
    /// The copy has caught up, and is whole up to this version.
    Whole {
        /// The last write that was applied.
        applied: Version,
    },
    /// Every write up to this version was applied.
    Written {
        /// The last write that was applied.
        applied: Version,
        /// The copy is whole up to this version whatever happens to its server's process and power. A copy that has no
        /// store says what it has applied: it gets no safer.
        durable: Version,
    },
    /// To [`Request::Confirm`].
    Confirmed {
        /// The number of the question.
        question: u64,
    },
    /// To [`Request::Read`].
    Read {
        /// The number of the read.
        number: u64,
        /// The last write of any of the blocks.
        newest: Version,
    },
}

// Copy: the rules of a server. Whom it obeys, which writes it applies, and when its copy is whole.
//
// ```text
//            CatchUp                     all blocks were compared, and what the lender
//   Empty ─────────────▶ Behind ───────▶ had applied is applied ───────▶ Whole ── Write ──▶ Whole
//                          ▲                                                │
//                          ╰──────────────────── CatchUp ───────────────────╯
// ```

/// Why a server does not do what a writer asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It obeys another writer.
    #[error("the server obeys the writer of generation {by}")]
    Fenced {
        /// That writer's generation.
        by: Generation,
    },
    /// The copy cannot do that in its state, or writes are missing before this one. The writer must take the copy back.
    #[error("the copy is not where the writer takes it to be")]
    OutOfStep,
}

/// A catch-up under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CatchUp {
    holder: Holder,
    /// The highest version that the lender had applied when blocks were taken from it.
    seen: Version,
}

/// The state of one copy. The blocks are elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copy {
    standing: Standing,
    catch_up: Option<CatchUp>,
}

impl Copy {
    /// A copy of a volume that was just created, without any write.
    pub fn created() -> Copy {
        Copy { standing: Standing { state: State::Whole, ..Standing::default() }, catch_up: None }
    }

    /// A copy that a server finds in its store. `is_cut`: what was not synced may be missing.
    pub fn recovered(standing: Standing, is_cut: bool) -> Copy {
        let is_cut = is_cut || standing.is_cut;
        #[cfg(test)]
        let is_cut = is_cut && !Mutant::CutUnsaid.is_active();
        Copy { standing: Standing { is_cut, ..standing }, catch_up: None }
    }

    /// What the server says of it.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Obeys no writer below this one any more. A generation is promised to one writer only: the versions of two would
    /// be the same for different writes.
    ///
    /// # Errors
    /// The server has promised to obey another writer.
    pub fn promise(&mut self, holder: Holder) -> Result<Standing, Refusal> {
        self.obey(holder)?;
        Ok(self.standing)
    }

    /// Whether the server obeys this writer.
    ///
    /// # Errors
    /// It obeys another one.
    pub fn confirm(&self, holder: Holder) -> Result<(), Refusal> {
        #[cfg(test)]
        if Mutant::NothingPromised.is_active() {
            return Ok(());
        }
        match self.standing.promised {
            Some(promised) if promised == holder => Ok(()),
            Some(Holder { generation: by, .. }) => Err(Refusal::Fenced { by }),
            None => Err(Refusal::OutOfStep),
        }
    }

    fn obey(&mut self, holder: Holder) -> Result<(), Refusal> {
        if let Some(promised) = self.standing.promised
            && promised != holder
        {
            let is_newer = holder.generation > promised.generation;
            #[cfg(test)]
            let is_newer = is_newer
                || Mutant::NothingPromised.is_active()
                || (Mutant::GenerationShared.is_active() && holder.generation == promised.generation);
            if !is_newer {
                return Err(Refusal::Fenced { by: promised.generation });
            }
        }
        if self.standing.promised != Some(holder) {
            self.standing.promised = Some(holder);
            // What another writer has begun is not finished under this one.
            self.catch_up = None;
        }
        Ok(())
    }

    /// Begins to catch up: the copy is behind, and gets every write after `since`.
    ///
    /// # Errors
    /// The server obeys another writer.
    pub fn begin_catch_up(&mut self, holder: Holder, since: Version) -> Result<(), Refusal> {
        self.obey(holder)?;
        self.standing.state = State::Behind;
        self.standing.applied = since;
        #[cfg(test)]
        if Mutant::ClaimForgotten.is_active() {
            self.standing.claim = Version::NONE;
        }
        self.catch_up = Some(CatchUp { holder, seen: since });
        Ok(())
    }

    /// Whether this copy can lend blocks to one that gets every write after `since`: what is not sent there must be
    /// applied here. Returns the version up to which it is whole.
    ///
    /// # Errors
    /// It obeys another writer, or is not whole up to `since`.
    pub fn lend(&self, holder: Holder, since: Version) -> Result<Version, Refusal> {
        self.confirm(holder)?;
        let has_it = self.standing.applied >= since;
        #[cfg(test)]
        let has_it = has_it || Mutant::LenderTooEarly.is_active();
        if self.standing.state != State::Whole || !has_it {
            return Err(Refusal::OutOfStep);
        }
        Ok(self.standing.applied)
    }

    /// Whether a block of the lender, which is whole up to `applied`, replaces ours. A block that the present writer
    /// wrote later stays; anything else becomes the lender's, also if ours has the higher version: that is then the
    /// write of an earlier writer that was neither acknowledged nor read.
    ///
    /// # Errors
    /// No catch-up is under way.
    pub fn takes(&mut self, ours: Version, theirs: Version, applied: Version) -> Result<bool, Refusal> {
        let catch_up = self.catch_up.as_mut().ok_or(Refusal::OutOfStep)?;
        catch_up.seen = catch_up.seen.max(applied);
        let is_newer = ours.generation() == catch_up.holder.generation && ours > theirs;
        Ok(!is_newer)
    }

    /// All blocks were compared. Returns whether the copy is whole: if a lent block can be of a write that was not
    /// applied here yet, it will be after that write.
    pub fn try_complete(&mut self) -> bool {
        let Some(CatchUp { seen, .. }) = self.catch_up else { return false };
        let is_whole = self.standing.applied >= seen;
        #[cfg(test)]
        let is_whole = is_whole || Mutant::WholeTooEarly.is_active();
        if is_whole {
            self.catch_up = None;
            self.standing.state = State::Whole;
            self.raise_claim();
        }
        is_whole
    }

    /// Notes that the writer's generation begins here.
    ///
    /// # Errors
    /// The server obeys another writer, or the copy is not whole.
    pub fn mark(&mut self, holder: Holder, may_lack_tail: bool) -> Result<Version, Refusal> {
        self.confirm(holder)?;
        let start = holder.generation.start();
        if self.standing.state != State::Whole || self.standing.applied > start {
            return Err(Refusal::OutOfStep);
        }
        self.standing.applied = start;
        // This writer may end before it has said so. Then the next one must.
        self.standing.is_cut = may_lack_tail;
        self.raise_claim();
        Ok(start)
    }

    /// Notes that the next write of this writer is being applied.
    ///
    /// # Errors
    /// The server obeys another writer, or writes before this one are missing.
    pub fn write(&mut self, holder: Holder, version: Version) -> Result<(), Refusal> {
        self.confirm(holder)?;
        let takes_writes = self.standing.state == State::Whole || self.catch_up.is_some();
        let is_next = self.standing.applied.next() == Some(version);
        #[cfg(test)]
        let is_next = is_next || Mutant::NotMarked.is_active() || Mutant::NothingPromised.is_active();
        if !takes_writes || !is_next {
            return Err(Refusal::OutOfStep);
        }
        self.standing.applied = version;
        if self.standing.state == State::Whole {
            self.standing.is_cut = false; // its writer has said what may be missing before it wrote
            self.raise_claim();
        }
        Ok(())
    }

    /// Whether this writer may read the copy's blocks.
    ///
    /// # Errors
    /// The server obeys another writer, or the copy is not whole.
    pub fn read(&self, holder: Holder) -> Result<(), Refusal> {
        self.confirm(holder)?;
        let is_whole = self.standing.state == State::Whole;
        #[cfg(test)]
        let is_whole = is_whole || Mutant::ReadBehind.is_active();
        if is_whole { Ok(()) } else { Err(Refusal::OutOfStep) }
    }

    /// A block of the copy is damaged: it lacks the write of that block, and is behind until it is taken back.
    pub fn damaged(&mut self) {
        self.standing.state = State::Behind;
        self.catch_up = None;
    }

    fn raise_claim(&mut self) {
        self.standing.claim = self.standing.claim.max(self.standing.applied);
    }
}

/// What a copy has done and its store has not made durable yet.
///
/// Everything that changes a copy is an event in its journal, in order. So what a power cut leaves is the copy as it
/// was after one of them, at or after the last one that was synced. What must not be undone is answered once it is.
/// `W` is what waits for an event to be durable.
#[derive(Debug)]
pub(crate) struct Tail<W> {
    /// Events so far, and those of them that are durable.
    appended: u64,
    synced: u64,
    /// Up to where the copy is whole after each event that is not durable.
    whole: VecDeque<(u64, Version)>,
    durable: Version,
    waiting: VecDeque<(u64, W)>,
}

impl<W> Tail<W> {
    /// Everything up to this event is durable, and leaves the copy like this.
    pub(crate) fn at(event: u64, standing: Standing) -> Tail<W> {
        let durable = if standing.state == State::Whole { standing.applied } else { Version::NONE };
        Tail { appended: event, synced: event, whole: VecDeque::new(), durable, waiting: VecDeque::new() }
    }

    /// An event was appended. Events have ascending numbers.
    pub(crate) fn append(&mut self, event: u64, standing: Standing) {
        debug_assert!(event > self.appended, "event {event} after {}", self.appended);
        self.appended = event;
        if standing.state == State::Whole {
            self.whole.push_back((self.appended, standing.applied));
        } else {
            // It is whole again only after a later event, which is not durable.
            self.whole.clear();
            self.durable = Version::NONE;
        }
    }

    /// The last event.
    #[cfg(test)]
    pub(crate) fn appended(&self) -> u64 {
        self.appended
    }

    /// The last event that is durable.
    #[cfg(test)]
    pub(crate) fn synced(&self) -> u64 {
        self.synced
    }

    /// Up to which version the copy is whole, whatever happens.
    pub(crate) fn durable(&self) -> Version {
        self.durable
    }

    /// This waits until everything that was appended is durable. `Some`: it is.
    pub(crate) fn wait(&mut self, what: W) -> Option<W> {
        if self.synced == self.appended {
            return Some(what);
        }
        self.waiting.push_back((self.appended, what));
        None
    }

    /// Whether something waits.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Every event up to this one is durable. Returns what has waited for that.
    pub(crate) fn sync(&mut self, through: u64) -> Vec<W> {
        self.synced = self.synced.max(through);
        while let Some(&(event, version)) = self.whole.front()
            && event <= through
        {
            self.whole.pop_front();
            self.durable = version;
        }
        let ready = self.waiting.iter().take_while(|(event, _)| *event <= through).count();
        self.waiting.drain(..ready).map(|(_, what)| what).collect()
    }
}

/// A rule that is taken out.
#[cfg(test)]
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

#[cfg(test)]
thread_local! {
    static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
}

#[cfg(test)]
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

#[cfg(test)]
mod tests {
    use super::{Generation, *};

    #[test]
    fn versions_are_ordered_as_the_writes_are() {
        let first = Generation::NONE.next().unwrap_or_default();
        let second = first.next().unwrap_or_default();
        let one = first.start().next().unwrap_or_default();
        assert!(Version::NONE < first.start() && first.start() < one && one < second.start());
        assert_eq!((one.generation(), one.counter(), one.to_string()), (first, 1, "1.1".to_string()));
    }

    #[test]
    fn numbers_end_and_do_not_run_into_the_next_generation() {
        let last = Version(Generation(7).start().0 | ((1 << COUNTER_BITS) - 1));
        assert_eq!((last.generation(), last.next()), (Generation(7), None));
        assert_eq!(Generation::LAST.next(), None);
        assert_eq!(Generation::LAST.start().generation(), Generation::LAST);
        let last = Version(u64::MAX >> 1);
        assert_eq!((last.generation(), last.next()), (Generation::LAST, None));
    }

    #[test]
    fn the_highest_bit_of_a_word_is_free() {
        assert_eq!(Version::from_word(u64::MAX >> 1).map(Version::word), Some(u64::MAX >> 1));
        assert_eq!(Version::from_word(1 << 63), None);
        assert_eq!(Generation::from_number(Generation::LAST.number()), Some(Generation::LAST));
        assert_eq!(Generation::from_number(Generation::LAST.number() + 1), None);
    }

    #[test]
    fn a_copy_is_durable_up_to_its_last_synced_event_since_it_is_whole() {
        let start = Generation::NONE.next().unwrap_or_default().start();
        let next = start.next().unwrap_or_default();
        let whole = |applied| Standing { state: State::Whole, applied, ..Standing::default() };
        let mut tail = Tail::at(4, whole(start));
        assert_eq!((tail.durable(), tail.wait("nothing")), (start, Some("nothing")));
        tail.append(6, whole(next));
        assert_eq!((tail.durable(), tail.wait("a flush")), (start, None));
        assert_eq!(tail.sync(5), Vec::<&str>::new());
        assert_eq!((tail.sync(6), tail.durable(), tail.is_awaited()), (vec!["a flush"], next, false));
        tail.append(7, Standing { state: State::Behind, ..whole(next) });
        assert_eq!(tail.durable(), Version::NONE);
        tail.append(9, whole(next));
        tail.sync(7);
        assert_eq!(tail.durable(), Version::NONE);
        tail.sync(9);
        assert_eq!((tail.durable(), tail.synced(), tail.appended()), (next, 9, 9));
    }
}
