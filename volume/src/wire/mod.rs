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
//! │ ◀── Promised · Progress, Whole · Written · Confirmed · Data · Mapped · Attached · Granted · Reached · Fenced ·
//! Refused
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
//! Here: what calls and replies consist of. `call`: what clients ask, and what servers answer.
//!
//! The kind of a message is its kind at the messenger, its fields are the front, and blocks are the data. A message
//! that says something else than its data is malformed: what decodes can be done without further checks of lengths.
//! Nothing here knows the volume's size.

mod call;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(test)]
mod tests;

use remora_wire::codec::{Codec, List, Maybe, Reader};
use remora_wire::{Malformed, TooLarge, codes, record};

use crate::layout::{Entry, ZEROS_CRC};
#[cfg(test)]
use crate::mutant::Mutant;
use crate::rules::{Generation, Holder, Standing, State, Version};
use crate::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
pub use call::{Call, Reply};

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
