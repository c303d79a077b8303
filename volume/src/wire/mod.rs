//! Wire: the messages between clients and servers, as the messenger carries them.
//!
//! ```text
//!   client (writer)                                   server
//!     │ Open{shape, Write, writer} ──────────────────▶ │        one connection, one volume
//!     │ ◀───────────────────── Standing{standing, room} │
//!     │ Promise · CatchUp · Mark · Write · Confirm ───▶ │        handled in order, and so answered;
//!     │ Zero ─────────────────────────────────────────▶ │        a write without bytes
//!     │ Read, Map ────────────────────────────────────▶ │        a read sees every write before it
//!     │ Attach ───────────────────────────────────────▶ │        from then on it may read the region, too
//!     │ Window ───────────────────────────────────────▶ │        how much may be under way
//!     │ Offer, Pull ──────────────────────────────────▶ │        it takes a write's blocks from the writer's memory
//!     │ ◀── Promised · Progress, Whole · Written · Confirmed · Data · Mapped · Attached · Granted · Reached · Fenced
//!     │ ◀── Refused
//!
//!   client (server whose copy is behind)              server (lender)
//!     │ Open{shape, Borrow, …}, Lend ────────────────▶ │
//!     │ ◀────────────────────────────── Standing, Lent │
//!
//!   client (server that takes bytes along a chain)    server before it in the chain
//!     │ Open{shape, Borrow, …}, Follow ──────────────▶ │
//!     │ ◀────────────────────────── Standing, Attached │
//!
//!   client (a host that only reads)                   server
//!     │ Open{shape, Read, …}, Look ──────────────────▶ │        from then on it may read the region, and only that
//!     │ ◀────────────────────────── Standing, Attached │
//!
//!   client (a command)                                server
//!     │ Create, Status, Scrub, Remove or Grow ───────▶ │        a question about a volume, without opening it
//!     │ ◀──── Created · Status · Scrubbing, … · Removed │
//!     │ ◀─────────────────────────── Progress, … · Grown │
//! ```
//!
//! The kind of a message is its kind at the messenger, its fields are the front, and blocks are the data. A message
//! that says something else than its data is malformed: what decodes can be done without further checks of lengths.
//! Nothing here knows the volume's size.

#[cfg(test)]
mod tests;

use remora_wire::codec::{Bytes, Codec, List, Maybe, Name, Reader, Text};
use remora_wire::{Malformed, TooLarge, codes, record};

use crate::layout::{Entry, ZEROS_CRC};
use crate::rules::{Generation, Holder, Standing, State, Version};
use crate::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};

#[cfg(test)]
use crate::rules::Mutant;

/// The version of these messages, for the messenger's handshake.
pub const VERSION: u16 = 6;

/// The most blocks in the data of a message: 4 MiB. Enough that heads cost nothing, and little enough that a message
/// delays the next one by milliseconds only.
pub const MOST_BLOCKS: usize = 1024;

/// The most runs of blocks of a write: a file's data, its name, and what lies between.
pub const MOST_RUNS: usize = 16;

/// The most entries that are lent at once, and blocks that are zeroed or mapped at once: those of 64 MiB. A count has
/// 16 bits.
pub const MOST_ENTRIES: usize = 16 * 1024;

/// Longest address of a server, in bytes: a host name has at most 253, a port 5, and its transport some more.
pub const MAX_ADDRESS_BYTES: usize = 280;

/// Longest explanation, in bytes. A longer one is truncated.
pub const MAX_TEXT_BYTES: usize = 400;

/// Longest key of a region, in bytes: the fabric's own bound.
pub const MAX_KEY_BYTES: usize = 512;

/// The most keys of a region: one for each transport of the fabric.
pub const MOST_KEYS: usize = 4;

/// Bits for the most blocks that are mapped at once, in bytes.
pub const MAX_MAP_BYTES: usize = MOST_ENTRIES / 8;

/// The longest front, in bytes.
pub const MAX_FRONT_BYTES: usize = 64 + List::<Entry, MOST_ENTRIES>::MAX_BYTES;

/// The longest data, in bytes.
pub const MAX_DATA_BYTES: usize = MOST_BLOCKS * BLOCK_BYTES;

/// Why a received message is not one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Its kind is unknown.
    #[error("a message has the unknown kind {0}: use the same release on all hosts")]
    Kind(u16),
    /// Its fields are malformed.
    #[error("a message is malformed: {0}")]
    Malformed(#[from] Malformed),
    /// Its data are not the blocks that its fields speak of.
    #[error("a message has {found} bytes of blocks, and its fields speak of {said} blocks")]
    Data {
        /// Bytes of data.
        found: usize,
        /// Blocks that the fields speak of.
        said: usize,
    },
}

/// Checks that a run has a block, and no more than that many.
fn bounded(run: Run, limit: usize) -> Result<Run, Malformed> {
    match run.count as usize {
        0 => Err(Malformed::Invalid { what: "run of blocks" }),
        count if count > limit => Err(Malformed::Excess { count, limit }),
        _ => Ok(run),
    }
}

/// Checks that the data are this number of blocks.
fn expect(found: usize, said: usize) -> Result<(), DecodeError> {
    let is_so = said <= MOST_BLOCKS && found == said * BLOCK_BYTES;
    if is_so { Ok(()) } else { Err(DecodeError::Data { found, said }) }
}

// Fields: the encodings of what messages consist of.

/// Neighbouring blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first one.
    pub first: u64,
    /// How many.
    pub count: u32,
}

record!(Run { first: u64, count: u32 });

impl Run {
    /// The blocks' numbers. A run that goes beyond the last number ends there.
    pub fn blocks(self) -> std::ops::Range<u64> {
        self.first..self.first.saturating_add(u64::from(self.count))
    }
}

/// How much a writer may have sent and not yet heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes of blocks.
    pub bytes: u64,
    /// Messages.
    pub writes: u32,
}

record!(Room { bytes: u64, writes: u32 });

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Its client opens the volume, writes and reads.
    Write,
    /// Its client is a server that takes blocks which its own copy lacks.
    Borrow,
    /// Its client reads the copy's region, and asks nothing else.
    Read,
}

codes!(Mode is "mode" { 1 => Write, 2 => Borrow, 3 => Read });

/// Why a server does not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The copy is not where the client takes it to be.
    OutOfStep,
    /// The lender has not yet applied what the borrower is not sent: ask again.
    NotYet,
    /// It has a volume of this identity with another shape, or has it already.
    Shape,
    /// It has no memory for the copy.
    NoMemory,
    /// A block is damaged, where it is or on its way.
    Damaged,
    /// The request is not one for this connection, or not within its bounds.
    Misuse,
    /// Its store has failed, and the copy with it; or the copy was removed.
    Lost,
    /// A writer is at work.
    InUse,
}

codes!(Cause is "cause" {
    1 => OutOfStep, 2 => NotYet, 3 => Shape, 4 => NoMemory, 5 => Damaged, 6 => Misuse, 7 => Lost, 8 => InUse
});

/// How much of something is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Bytes that are used.
    pub bytes: u64,
    /// Bytes that there are.
    pub most: u64,
}

record!(Used { bytes: u64, most: u64 });

/// What a server says of a copy and of itself to someone who watches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// How the copy stands.
    pub standing: Standing,
    /// The copy is whole up to this version whatever happens to its server.
    pub durable: Version,
    /// Whether the copy has a store.
    pub has_store: bool,
    /// Milliseconds since the writer that the server obeys has said something. `None`: it is not connected here.
    pub writer_silent: Option<u32>,
    /// Blocks that the catch-up under way has compared. `None`: none is under way.
    pub compared: Option<u64>,
    /// Blocks that the scrub under way has read. `None`: none is under way.
    pub scrubbed: Option<u64>,
    /// The server's memory for copies and stagings, of all volumes.
    pub memory: Used,
    /// What all writers together may have under way at the server.
    pub staging: Used,
}

record!(Status {
    standing: Standing,
    durable: Version,
    has_store: bool,
    writer_silent: Maybe<u32>,
    compared: Maybe<u64>,
    scrubbed: Maybe<u64>,
    memory: Used,
    staging: Used,
});

/// What a scrub has found so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Blocks that were read.
    pub read: u64,
    /// Blocks that were damaged in the store, and were written again out of memory.
    pub repaired: u64,
    /// Blocks that are damaged in memory. The copy is behind, and takes them from another one when a writer takes it
    /// back.
    pub damaged: u64,
    /// Whether all blocks were read.
    pub is_complete: bool,
}

record!(Findings { read: u64, repaired: u64, damaged: u64, is_complete: bool });

codes!(State is "state" { 0 => Empty, 1 => Behind, 2 => Whole });

record!(Holder { generation: Generation, writer: u64 });

record!(Standing { state: State, promised: Maybe<Holder>, claim: Version, applied: Version, is_cut: bool });

impl Codec for Generation {
    type Value = Generation;
    const MAX_BYTES: usize = 4;

    fn put(value: &Generation, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        u32::put(&value.number(), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<Generation, Malformed> {
        Generation::from_number(u32::take(from)?).ok_or(Malformed::Invalid { what: "generation" })
    }
}

impl Codec for Version {
    type Value = Version;
    const MAX_BYTES: usize = 8;

    fn put(value: &Version, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        u64::put(&value.word(), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<Version, Malformed> {
        Version::from_word(u64::take(from)?).ok_or(Malformed::Invalid { what: "version" })
    }
}

/// The version 8, whose highest bit says that the block is zeros, and the checksum 4.
impl Codec for Entry {
    type Value = Entry;
    const MAX_BYTES: usize = 8 + 4;

    fn put(value: &Entry, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        u64::put(&(value.version.word() | if value.is_zero { ZERO } else { 0 }), out)?;
        u32::put(&value.crc, out)
    }

    fn take(from: &mut Reader<'_>) -> Result<Entry, Malformed> {
        let (word, crc) = (u64::take(from)?, u32::take(from)?);
        let entry = match (Version::from_word(word), Version::from_word(word & !ZERO)) {
            (Some(version), _) => Some(Entry::of(version, crc)),
            (None, Some(version)) => {
                Some(Entry::zeros(version)).filter(|_| version != Version::NONE && crc == ZEROS_CRC)
            }
            (None, None) => None,
        };
        entry.ok_or(Malformed::Invalid { what: "entry of a block" })
    }
}

/// Bit of an entry's version in a message: the block is zeros.
const ZERO: u64 = 1 << 63;

/// The identity 16, the number of blocks 8, the numbers of copies and of those that hold a write, 1 each.
impl Codec for Shape {
    type Value = Shape;
    const MAX_BYTES: usize = 16 + 8 + 1 + 1;

    fn put(value: &Shape, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        <[u8; 16]>::put(&value.volume().0, out)?;
        u64::put(&value.blocks(), out)?;
        for count in [value.copies().number(), value.copies().hold()] {
            u8::put(&(count as u8), out)?; // at most `Copies::MOST`
        }
        Ok(())
    }

    fn take(from: &mut Reader<'_>) -> Result<Shape, Malformed> {
        let (volume, blocks) = (VolumeId(<[u8; 16]>::take(from)?), u64::take(from)?);
        let (number, hold) = (u8::take(from)?, u8::take(from)?);
        let copies = Copies::new(number.into(), hold.into());
        copies
            .and_then(|copies| Shape::new(volume, blocks, copies))
            .ok_or(Malformed::Invalid { what: "volume's shape" })
    }
}

const _: () = assert!(Copies::MOST <= u8::MAX as usize);

// Overlap: what requests of several blocks have in common. The rules know writes and reads by number only. Which write
// a read must return, a client asks here.

/// Whether two runs have a block in common.
pub(crate) fn overlap(one: Run, other: Run) -> bool {
    #[cfg(test)]
    if Mutant::OverlapOfFirst.is_active() {
        return other.blocks().contains(&one.first);
    }
    one.first < other.blocks().end && other.first < one.blocks().end
}

/// The last one of these writes, given in their order, that has changed a block of a run.
pub(crate) fn last_write_of<'a>(
    run: Run,
    writes: impl DoubleEndedIterator<Item = (Version, &'a [Run])>,
) -> Option<Version> {
    let changes = |runs: &[Run]| {
        #[cfg(test)]
        if Mutant::FirstRunOnly.is_active() {
            return runs.first().is_some_and(|first| overlap(run, *first));
        }
        runs.iter().any(|other| overlap(run, *other))
    };
    writes.rev().find(|(_, runs)| changes(runs)).map(|(version, _)| version)
}

/// The last write of any of the blocks of which these versions are.
pub(crate) fn newest(versions: impl IntoIterator<Item = Version>) -> Version {
    let mut versions = versions.into_iter();
    #[cfg(test)]
    if Mutant::NewestOfFirst.is_active() {
        return versions.next().unwrap_or_default();
    }
    let first = versions.next().unwrap_or_default();
    versions.fold(first, Version::max)
}

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// The first message of a connection: which volume, and what for. Answered by [`Reply::Standing`].
    Open {
        /// The volume.
        shape: Shape,
        /// What the connection is for.
        mode: Mode,
        /// The client's random number. A later connection of it replaces an earlier one.
        writer: u64,
    },
    /// Make an empty copy of a new volume. Answered by [`Reply::Created`].
    Create {
        /// The volume.
        shape: Shape,
    },
    /// See [`crate::rules::Request::Promise`].
    Promise(Holder),
    /// See [`crate::rules::Request::CatchUp`].
    CatchUp {
        /// Who asks.
        holder: Holder,
        /// The last version before the writes that follow.
        since: Version,
        /// The address of the lender.
        lender: String,
    },
    /// See [`crate::rules::Request::Mark`].
    Mark {
        /// Who asks.
        holder: Holder,
        /// Whether the generation may begin without a tail.
        may_lack_tail: bool,
    },
    /// See [`crate::rules::Request::Write`]. The data are the blocks, run by run.
    Write {
        /// Who writes.
        holder: Holder,
        /// The next version of the holder.
        version: Version,
        /// Where the blocks belong.
        runs: Vec<Run>,
        /// The CRC-32C of each block.
        sums: Vec<u32>,
    },
    /// As [`Call::Write`], without data: the blocks become zeros.
    Zero {
        /// Who writes.
        holder: Holder,
        /// The next version of the holder.
        version: Version,
        /// The blocks.
        run: Run,
    },
    /// See [`crate::rules::Request::Flush`].
    Flush(Holder),
    /// See [`crate::rules::Request::Confirm`].
    Confirm {
        /// Who asks.
        holder: Holder,
        /// The number of the question.
        question: u64,
    },
    /// See [`crate::rules::Request::Read`]. Answered by [`Reply::Data`].
    Read {
        /// Who asks.
        holder: Holder,
        /// The number of the read.
        number: u64,
        /// The blocks.
        run: Run,
    },
    /// As [`Call::Read`], but which of the blocks are zeros is all that is wanted. Answered by
    /// [`Reply::Mapped`].
    Map {
        /// Who asks.
        holder: Holder,
        /// The number of the read.
        number: u64,
        /// The blocks.
        run: Run,
    },
    /// The entries of these blocks, of a copy that has applied `since`. Answered by [`Reply::Lent`].
    Lend {
        /// The writer that has asked the borrower to catch up.
        holder: Holder,
        /// What the lender must have applied.
        since: Version,
        /// The blocks.
        run: Run,
        /// Whether the blocks themselves are wanted.
        with_blocks: bool,
    },
    /// May this writer read the copy's region? Answered by [`Reply::Attached`].
    Attach(Holder),
    /// How much may be under way? Answered by [`Reply::Granted`]. A client has one such question at a time.
    Window {
        /// What would be of use.
        wants: Room,
        /// What the client does not exceed until it is answered.
        obeys: Room,
    },
    /// Can the server read the writer's outbox? Answered by [`Reply::Reached`], once for each connection.
    Offer {
        /// The server's name at the writer's exporters.
        session: u64,
        /// The outbox's keys, one for each transport.
        keys: Vec<Vec<u8>>,
    },
    /// As [`Call::Write`], without data: the blocks are in the writer's outbox.
    Pull {
        /// Who writes.
        holder: Holder,
        /// The next version of the holder.
        version: Version,
        /// Where the blocks belong.
        runs: Vec<Run>,
        /// The CRC-32C of each block.
        sums: Vec<u32>,
        /// Where in the outbox they are. A server's staging has them at the same place.
        at: u64,
        /// The address of a server out of whose staging they can be taken instead; empty: none.
        source: String,
    },
    /// May this server read the staging into which that one pulls the writes of this writer? Answered by
    /// [`Reply::Attached`].
    Follow(Holder),
    /// How do the copy and its server stand? Answered by [`Reply::Status`], also by a server without a copy.
    Status {
        /// The volume.
        shape: Shape,
    },
    /// Read every block of the copy and check it. Answered by [`Reply::Scrubbing`] from time to time, and at the
    /// end.
    Scrub {
        /// The volume.
        shape: Shape,
    },
    /// Forget the copy, and remove its store. Answered by [`Reply::Removed`].
    Remove {
        /// The volume.
        shape: Shape,
        /// Whether the copy is removed although a writer is at work.
        takes_over: bool,
    },
    /// Become the copy of a larger volume. Answered by [`Reply::Progress`] from time to time, and by
    /// [`Reply::Grown`] at the end. A copy whose size was never agreed may become smaller so.
    Grow {
        /// The volume as it is to be.
        shape: Shape,
        /// Whether the copy grows although a writer is at work.
        takes_over: bool,
    },
    /// Could the copy become that of this volume? Changes nothing. Answered by [`Reply::Grown`] at once.
    MayGrow {
        /// The volume as it would be.
        shape: Shape,
        /// Whether it could although a writer is at work.
        takes_over: bool,
    },
    /// The size of this volume is agreed: no copy of it goes back to the former one. Answered by
    /// [`Reply::Grown`].
    Agree {
        /// The volume as it is.
        shape: Shape,
    },
    /// May this client, which only reads, read the copy's region? Answered by [`Reply::Attached`], without keys
    /// if there is no copy.
    Look,
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To [`Call::Open`].
    Standing {
        /// How the copy stands.
        standing: Standing,
        /// What the client may have under way.
        room: Room,
        /// Milliseconds since the writer that the server obeys has said something. `None`: it is not connected here, or
        /// it is the client itself.
        writer_silent: Option<u32>,
    },
    /// To [`Call::Create`].
    Created,
    /// To [`Call::Promise`].
    Promised(Standing),
    /// The server obeys another writer.
    Fenced {
        /// Its generation.
        by: Generation,
    },
    /// A catch-up goes on. Sent from time to time, so that the writer sees that the server lives.
    Progress {
        /// Blocks that were compared.
        compared: u64,
    },
    /// See [`crate::rules::Answer::Whole`].
    Whole {
        /// The last write that was applied.
        applied: Version,
    },
    /// See [`crate::rules::Answer::Written`].
    Written {
        /// The last write that was applied.
        applied: Version,
        /// The copy is whole up to this version whatever happens to its server.
        durable: Version,
        /// What the client may have under way. Less than was granted: the server asks for some of it back. More is
        /// granted to a question only.
        room: Room,
    },
    /// See [`crate::rules::Answer::Confirmed`].
    Confirmed {
        /// The number of the question.
        question: u64,
    },
    /// To [`Call::Read`]. The data are the blocks.
    Data {
        /// The number of the read.
        number: u64,
        /// An entry for each block.
        entries: Vec<Entry>,
    },
    /// To [`Call::Lend`]. The data are the blocks, or nothing.
    Lent {
        /// What the lender had applied.
        applied: Version,
        /// An entry for each block.
        entries: Vec<Entry>,
    },
    /// To [`Call::Attach`] and [`Call::Follow`]. While this connection lasts and the server obeys its
    /// writer, the region can be read.
    Attached {
        /// The reader's name at the server's exporters.
        session: u64,
        /// The region's keys, one for each transport over which it can be read: [`remora_fabric::RegionKey`].
        keys: Vec<Vec<u8>>,
    },
    /// To [`Call::Window`].
    Granted(Room),
    /// To [`Call::Offer`].
    Reached {
        /// Whether the server can pull from the outbox.
        pulls: bool,
        /// Whether other servers can follow it.
        lends: bool,
    },
    /// To [`Call::Status`].
    Status(Box<Status>),
    /// To [`Call::Scrub`].
    Scrubbing(Findings),
    /// To [`Call::Remove`].
    Removed {
        /// Whether the server had a copy.
        was_there: bool,
    },
    /// To [`Call::Grow`].
    Grown {
        /// Whether the server has a copy.
        is_there: bool,
    },
    /// To [`Call::Map`].
    Mapped {
        /// The number of the read.
        number: u64,
        /// The last write of any of the blocks.
        newest: Version,
        /// A bit for each block, the lowest one first: it has no bytes, and reads as zeros.
        zeros: Vec<u8>,
    },
    /// The server does not do it.
    Refused {
        /// The reason, for programs.
        cause: Cause,
        /// The reason, for people.
        text: String,
    },
}

type Runs = List<Run, MOST_RUNS>;

type Sums = List<u32, MOST_BLOCKS>;

type Keys = List<Bytes<MAX_KEY_BYTES>, MOST_KEYS>;

type Address = Name<MAX_ADDRESS_BYTES>;

impl Call {
    /// Appends the fields to `out` and returns the kind.
    ///
    /// # Errors
    /// [`TooLarge`]: a list or an address exceeds its bound.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<u16, TooLarge> {
        Ok(match self {
            Call::Open { shape, mode, writer } => {
                Shape::put(shape, out)?;
                Mode::put(mode, out)?;
                u64::put(writer, out)?;
                1
            }
            Call::Create { shape } => {
                Shape::put(shape, out)?;
                2
            }
            Call::Promise(holder) => {
                Holder::put(holder, out)?;
                3
            }
            Call::CatchUp { holder, since, lender } => {
                Holder::put(holder, out)?;
                Version::put(since, out)?;
                Address::put(lender, out)?;
                4
            }
            Call::Mark { holder, may_lack_tail } => {
                Holder::put(holder, out)?;
                bool::put(may_lack_tail, out)?;
                5
            }
            Call::Write { holder, version, runs, sums } => {
                Holder::put(holder, out)?;
                Version::put(version, out)?;
                Runs::put(runs, out)?;
                Sums::put(sums, out)?;
                6
            }
            Call::Confirm { holder, question } => {
                Holder::put(holder, out)?;
                u64::put(question, out)?;
                7
            }
            Call::Read { holder, number, run } => {
                Holder::put(holder, out)?;
                u64::put(number, out)?;
                Run::put(run, out)?;
                8
            }
            Call::Lend { holder, since, run, with_blocks } => {
                Holder::put(holder, out)?;
                Version::put(since, out)?;
                Run::put(run, out)?;
                bool::put(with_blocks, out)?;
                9
            }
            Call::Attach(holder) => {
                Holder::put(holder, out)?;
                10
            }
            Call::Window { wants, obeys } => {
                Room::put(wants, out)?;
                Room::put(obeys, out)?;
                11
            }
            Call::Flush(holder) => {
                Holder::put(holder, out)?;
                12
            }
            Call::Offer { session, keys } => {
                u64::put(session, out)?;
                Keys::put(keys, out)?;
                13
            }
            Call::Pull { holder, version, runs, sums, at, source } => {
                Holder::put(holder, out)?;
                Version::put(version, out)?;
                Runs::put(runs, out)?;
                Sums::put(sums, out)?;
                u64::put(at, out)?;
                Address::put(source, out)?;
                14
            }
            Call::Follow(holder) => {
                Holder::put(holder, out)?;
                15
            }
            Call::Status { shape } => {
                Shape::put(shape, out)?;
                16
            }
            Call::Scrub { shape } => {
                Shape::put(shape, out)?;
                17
            }
            Call::Remove { shape, takes_over } => {
                Shape::put(shape, out)?;
                bool::put(takes_over, out)?;
                19
            }
            Call::Zero { holder, version, run } => {
                Holder::put(holder, out)?;
                Version::put(version, out)?;
                Run::put(run, out)?;
                20
            }
            Call::Map { holder, number, run } => {
                Holder::put(holder, out)?;
                u64::put(number, out)?;
                Run::put(run, out)?;
                21
            }
            Call::Grow { shape, takes_over } => {
                Shape::put(shape, out)?;
                bool::put(takes_over, out)?;
                22
            }
            Call::Look => 23,
            Call::MayGrow { shape, takes_over } => {
                Shape::put(shape, out)?;
                bool::put(takes_over, out)?;
                24
            }
            Call::Agree { shape } => {
                Shape::put(shape, out)?;
                26
            }
        })
    }

    /// Reads a message of a client that has `data` bytes of blocks.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn decode(kind: u16, front: &[u8], data: usize) -> Result<Call, DecodeError> {
        let mut reader = Reader::new(front);
        let from = &mut reader;
        let call = match kind {
            1 => Call::Open { shape: Shape::take(from)?, mode: Mode::take(from)?, writer: u64::take(from)? },
            2 => Call::Create { shape: Shape::take(from)? },
            3 => Call::Promise(Holder::take(from)?),
            4 => {
                Call::CatchUp { holder: Holder::take(from)?, since: Version::take(from)?, lender: Address::take(from)? }
            }
            5 => Call::Mark { holder: Holder::take(from)?, may_lack_tail: bool::take(from)? },
            6 => Call::Write {
                holder: Holder::take(from)?,
                version: Version::take(from)?,
                runs: Runs::take(from)?,
                sums: Sums::take(from)?,
            },
            7 => Call::Confirm { holder: Holder::take(from)?, question: u64::take(from)? },
            8 => Call::Read {
                holder: Holder::take(from)?,
                number: u64::take(from)?,
                run: bounded(Run::take(from)?, MOST_BLOCKS)?,
            },
            9 => {
                let (holder, since) = (Holder::take(from)?, Version::take(from)?);
                let (run, with_blocks) = (Run::take(from)?, bool::take(from)?);
                let run = bounded(run, if with_blocks { MOST_BLOCKS } else { MOST_ENTRIES })?;
                Call::Lend { holder, since, run, with_blocks }
            }
            10 => Call::Attach(Holder::take(from)?),
            11 => Call::Window { wants: Room::take(from)?, obeys: Room::take(from)? },
            12 => Call::Flush(Holder::take(from)?),
            13 => Call::Offer { session: u64::take(from)?, keys: Keys::take(from)? },
            14 => Call::Pull {
                holder: Holder::take(from)?,
                version: Version::take(from)?,
                runs: Runs::take(from)?,
                sums: Sums::take(from)?,
                at: u64::take(from)?,
                source: Address::take(from)?,
            },
            15 => Call::Follow(Holder::take(from)?),
            16 => Call::Status { shape: Shape::take(from)? },
            17 => Call::Scrub { shape: Shape::take(from)? },
            19 => Call::Remove { shape: Shape::take(from)?, takes_over: bool::take(from)? },
            20 => Call::Zero {
                holder: Holder::take(from)?,
                version: Version::take(from)?,
                run: bounded(Run::take(from)?, MOST_ENTRIES)?,
            },
            21 => Call::Map {
                holder: Holder::take(from)?,
                number: u64::take(from)?,
                run: bounded(Run::take(from)?, MOST_ENTRIES)?,
            },
            22 => Call::Grow { shape: Shape::take(from)?, takes_over: bool::take(from)? },
            23 => Call::Look,
            24 => Call::MayGrow { shape: Shape::take(from)?, takes_over: bool::take(from)? },
            // 25 was to go back from a size, which 22 does too.
            26 => Call::Agree { shape: Shape::take(from)? },
            kind => return Err(DecodeError::Kind(kind)),
        };
        reader.finish()?;
        if let Call::Write { runs, sums, .. } | Call::Pull { runs, sums, .. } = &call {
            let said = runs.iter().map(|run| run.count as usize).sum();
            if said != sums.len() || runs.is_empty() || runs.iter().any(|run| run.count == 0) {
                return Err(DecodeError::Data { found: data, said });
            }
        }
        expect(data, call.blocks())?;
        Ok(call)
    }

    /// The blocks that its data hold.
    fn blocks(&self) -> usize {
        match self {
            Call::Write { sums, .. } => sums.len(),
            _ => 0,
        }
    }
}

type Entries = List<Entry, MOST_ENTRIES>;

type Zeros = Bytes<MAX_MAP_BYTES>;

type Sentence = Text<MAX_TEXT_BYTES>;

impl Reply {
    /// Appends the fields to `out` and returns the kind.
    ///
    /// # Errors
    /// [`TooLarge`]: a list exceeds its bound.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<u16, TooLarge> {
        Ok(match self {
            Reply::Standing { standing, room, writer_silent } => {
                Standing::put(standing, out)?;
                Room::put(room, out)?;
                Maybe::<u32>::put(writer_silent, out)?;
                33
            }
            Reply::Created => 34,
            Reply::Promised(standing) => {
                Standing::put(standing, out)?;
                35
            }
            Reply::Fenced { by } => {
                Generation::put(by, out)?;
                36
            }
            Reply::Progress { compared } => {
                u64::put(compared, out)?;
                37
            }
            Reply::Whole { applied } => {
                Version::put(applied, out)?;
                38
            }
            Reply::Written { applied, durable, room } => {
                Version::put(applied, out)?;
                Version::put(durable, out)?;
                Room::put(room, out)?;
                39
            }
            Reply::Confirmed { question } => {
                u64::put(question, out)?;
                40
            }
            Reply::Data { number, entries } => {
                u64::put(number, out)?;
                Entries::put(entries, out)?;
                41
            }
            Reply::Lent { applied, entries } => {
                Version::put(applied, out)?;
                Entries::put(entries, out)?;
                42
            }
            Reply::Refused { cause, text } => {
                Cause::put(cause, out)?;
                Sentence::put(text, out)?;
                43
            }
            Reply::Attached { session, keys } => {
                u64::put(session, out)?;
                Keys::put(keys, out)?;
                44
            }
            Reply::Granted(room) => {
                Room::put(room, out)?;
                45
            }
            Reply::Reached { pulls, lends } => {
                bool::put(pulls, out)?;
                bool::put(lends, out)?;
                46
            }
            Reply::Status(status) => {
                Status::put(status, out)?;
                47
            }
            Reply::Scrubbing(findings) => {
                Findings::put(findings, out)?;
                48
            }
            Reply::Removed { was_there } => {
                bool::put(was_there, out)?;
                49
            }
            Reply::Mapped { number, newest, zeros } => {
                u64::put(number, out)?;
                Version::put(newest, out)?;
                Zeros::put(zeros, out)?;
                50
            }
            Reply::Grown { is_there } => {
                bool::put(is_there, out)?;
                51
            }
        })
    }

    /// Reads a message of a server that has `data` bytes of blocks.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn decode(kind: u16, front: &[u8], data: usize) -> Result<Reply, DecodeError> {
        let mut reader = Reader::new(front);
        let from = &mut reader;
        let reply = match kind {
            33 => Reply::Standing {
                standing: Standing::take(from)?,
                room: Room::take(from)?,
                writer_silent: Maybe::<u32>::take(from)?,
            },
            34 => Reply::Created,
            35 => Reply::Promised(Standing::take(from)?),
            36 => Reply::Fenced { by: Generation::take(from)? },
            37 => Reply::Progress { compared: u64::take(from)? },
            38 => Reply::Whole { applied: Version::take(from)? },
            39 => {
                Reply::Written { applied: Version::take(from)?, durable: Version::take(from)?, room: Room::take(from)? }
            }
            40 => Reply::Confirmed { question: u64::take(from)? },
            41 => Reply::Data { number: u64::take(from)?, entries: Entries::take(from)? },
            42 => Reply::Lent { applied: Version::take(from)?, entries: Entries::take(from)? },
            43 => Reply::Refused { cause: Cause::take(from)?, text: Sentence::take(from)? },
            44 => Reply::Attached { session: u64::take(from)?, keys: Keys::take(from)? },
            45 => Reply::Granted(Room::take(from)?),
            46 => Reply::Reached { pulls: bool::take(from)?, lends: bool::take(from)? },
            47 => Reply::Status(Box::new(Status::take(from)?)),
            48 => Reply::Scrubbing(Findings::take(from)?),
            49 => Reply::Removed { was_there: bool::take(from)? },
            50 => Reply::Mapped { number: u64::take(from)?, newest: Version::take(from)?, zeros: Zeros::take(from)? },
            51 => Reply::Grown { is_there: bool::take(from)? },
            kind => return Err(DecodeError::Kind(kind)),
        };
        reader.finish()?;
        match &reply {
            Reply::Lent { .. } if data == 0 => {}
            Reply::Lent { entries, .. } | Reply::Data { entries, .. } => expect(data, entries.len())?,
            _ => expect(data, 0)?,
        }
        Ok(reply)
    }
}

#[cfg(any(test, feature = "fuzzing"))]
/// What the fuzz targets run, and `cargo test` on every seed: any bytes end in a value or an error.
pub mod fuzzing {
    use super::*;

    /// Decodes a message: two bytes are its kind, two say how many blocks its data are, the others are its front. What
    /// decodes must encode to the same bytes.
    pub fn message(bytes: &[u8]) {
        let Some((head, front)) = bytes.split_first_chunk::<4>() else { return };
        let kind = u16::from_le_bytes([head[0], head[1]]);
        let data = usize::from(u16::from_le_bytes([head[2], head[3]])) * BLOCK_BYTES;
        let mut again = Vec::new();
        if let Ok(call) = Call::decode(kind, front, data) {
            assert_eq!((call.encode(&mut again), again.as_slice()), (Ok(kind), front), "two encodings of {call:?}");
        }
        again.clear();
        if let Ok(reply) = Reply::decode(kind, front, data) {
            assert_eq!((reply.encode(&mut again), again.as_slice()), (Ok(kind), front), "two encodings of {reply:?}");
        }
    }
}
