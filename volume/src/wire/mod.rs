//! Wire: the messages between clients and servers, as the messenger carries them.
//!
//! ```text
//!   client (writer)                                   server
//!     │ Open{shape, Write, writer} ──────────────────▶ │        one connection, one volume
//!     │ ◀───────────────────── Standing{standing, room} │
//!     │ Promise · CatchUp · Mark · Write · Confirm ───▶ │        handled in order, and so answered;
//!     │ Read ─────────────────────────────────────────▶ │        a read sees every write before it
//!     │ Attach ───────────────────────────────────────▶ │        from then on it may read the region, too
//!     │ Window ───────────────────────────────────────▶ │        how much may be under way
//!     │ Offer, Pull ──────────────────────────────────▶ │        it takes a write's blocks from the writer's memory
//!     │ ◀── Promised · Progress, Whole · Written · Confirmed · Data · Attached · Granted · Reached · Fenced · Refused
//!
//!   client (server whose copy is behind)              server (lender)
//!     │ Open{shape, Borrow, …}, Lend ────────────────▶ │
//!     │ ◀────────────────────────────── Standing, Lent │
//!
//!   client (server that takes bytes along a chain)    server before it in the chain
//!     │ Open{shape, Borrow, …}, Follow ──────────────▶ │
//!     │ ◀────────────────────────── Standing, Attached │
//! ```
//!
//! The kind of a message is its kind at the messenger, its fields are the front, and blocks are the data. A message
//! that says something else than its data is malformed: what decodes can be done without further checks of lengths.
//! Nothing here knows the volume's size.

mod fields;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(test)]
mod tests;

use remora_wire::codec::{Bytes, Codec, List, Maybe, Name, Reader, Text};
use remora_wire::{Malformed, TooLarge};

pub use self::fields::{Cause, Mode, Room, Run};
use crate::layout::Entry;
use crate::message::{Holder, Standing};
use crate::shape::{BLOCK_BYTES, Shape};
use crate::version::{Generation, Version};

/// The version of these messages, for the messenger's handshake.
pub const VERSION: u16 = 3;

/// The most blocks in the data of a message: 4 MiB. Enough that heads cost nothing, and little enough that a message
/// delays the next one by milliseconds only.
pub const MOST_BLOCKS: usize = 1024;

/// The most runs of blocks of a write: a file's data, its name, and what lies between.
pub const MOST_RUNS: usize = 16;

/// The most entries that are lent at once: those of 64 MiB. A count has 16 bits.
pub const MOST_ENTRIES: usize = 16 * 1024;

/// Longest address of a server, in bytes: a host name has at most 253, a port 5, and its transport some more.
pub const MAX_ADDRESS_BYTES: usize = 280;

/// Longest explanation, in bytes. A longer one is truncated.
pub const MAX_TEXT_BYTES: usize = 400;

/// Longest key of a region, in bytes: the fabric's own bound.
pub const MAX_KEY_BYTES: usize = 512;

/// The most keys of a region: one for each transport of the fabric.
pub const MOST_KEYS: usize = 4;

/// The longest front, in bytes.
pub const MAX_FRONT_BYTES: usize = 64 + List::<Entry, MOST_ENTRIES>::MAX_BYTES;

/// The longest data, in bytes.
pub const MAX_DATA_BYTES: usize = MOST_BLOCKS * BLOCK_BYTES;

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
    /// See [`crate::message::Request::Promise`].
    Promise(Holder),
    /// See [`crate::message::Request::CatchUp`].
    CatchUp {
        /// Who asks.
        holder: Holder,
        /// The last version before the writes that follow.
        since: Version,
        /// The address of the lender.
        lender: String,
    },
    /// See [`crate::message::Request::Mark`].
    Mark {
        /// Who asks.
        holder: Holder,
        /// Whether the generation may begin without a tail.
        may_lack_tail: bool,
    },
    /// See [`crate::message::Request::Write`]. The data are the blocks, run by run.
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
    /// See [`crate::message::Request::Flush`].
    Flush(Holder),
    /// See [`crate::message::Request::Confirm`].
    Confirm {
        /// Who asks.
        holder: Holder,
        /// The number of the question.
        question: u64,
    },
    /// See [`crate::message::Request::Read`]. Answered by [`Reply::Data`].
    Read {
        /// Who asks.
        holder: Holder,
        /// The number of the read.
        number: u64,
        /// The blocks.
        run: Run,
    },
    /// The entries of these blocks, of a copy that has applied `since`. Answered by [`Reply::Lent`].
    Lend {
        /// The writer for whom the borrower catches up.
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
    /// See [`crate::message::Answer::Whole`].
    Whole {
        /// The last write that was applied.
        applied: Version,
    },
    /// See [`crate::message::Answer::Written`].
    Written {
        /// The last write that was applied.
        applied: Version,
        /// The copy is whole up to this version whatever happens to its server.
        durable: Version,
        /// What the client may have under way. Less than was granted: the server asks for some of it back. More is
        /// granted to a question only.
        room: Room,
    },
    /// See [`crate::message::Answer::Confirmed`].
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
    /// To [`Call::Attach`] and [`Call::Follow`]. While this connection lasts and the server obeys its writer, the
    /// region can be read.
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
    /// The server does not do it.
    Refused {
        /// The reason, for programs.
        cause: Cause,
        /// The reason, for people.
        text: String,
    },
}

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

type Runs = List<Run, MOST_RUNS>;
type Sums = List<u32, MOST_BLOCKS>;
type Entries = List<Entry, MOST_ENTRIES>;
type Keys = List<Bytes<MAX_KEY_BYTES>, MOST_KEYS>;
type Sentence = Text<MAX_TEXT_BYTES>;
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

/// Checks that a run has a block, and no more than that many.
fn bounded(run: Run, limit: usize) -> Result<Run, Malformed> {
    match run.count as usize {
        0 => Err(Malformed::Invalid { what: "run of blocks" }),
        count if count > limit => Err(Malformed::Excess { count, limit }),
        _ => Ok(run),
    }
}

/// Checks that the data are so many blocks.
fn expect(found: usize, said: usize) -> Result<(), DecodeError> {
    let is_so = said <= MOST_BLOCKS && found == said * BLOCK_BYTES;
    if is_so { Ok(()) } else { Err(DecodeError::Data { found, said }) }
}
