//! The messages between clients and servers: what a client asks, and what a server answers.

use remora_wire::TooLarge;
use remora_wire::codec::{Bytes, Codec, List, Maybe, Name, Reader, Text};

use super::{
    Cause, DecodeError, Findings, MAX_ADDRESS_BYTES, MAX_KEY_BYTES, MAX_MAP_BYTES, MAX_TEXT_BYTES, MOST_BLOCKS,
    MOST_ENTRIES, MOST_KEYS, MOST_RUNS, Mode, Room, Run, Status, bounded, expect,
};
use crate::layout::Entry;
use crate::rules::{Generation, Holder, Standing, Version};
use crate::shape::Shape;

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// The first message of a connection: which volume, and what for. Answered by [`super::Reply::Standing`].
    Open {
        /// The volume.
        shape: Shape,
        /// What the connection is for.
        mode: Mode,
        /// The client's random number. A later connection of it replaces an earlier one.
        writer: u64,
    },
    /// Make an empty copy of a new volume. Answered by [`super::Reply::Created`].
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
    /// See [`crate::rules::Request::Read`]. Answered by [`super::Reply::Data`].
    Read {
        /// Who asks.
        holder: Holder,
        /// The number of the read.
        number: u64,
        /// The blocks.
        run: Run,
    },
    /// As [`Call::Read`], but which of the blocks are zeros is all that is wanted. Answered by
    /// [`super::Reply::Mapped`].
    Map {
        /// Who asks.
        holder: Holder,
        /// The number of the read.
        number: u64,
        /// The blocks.
        run: Run,
    },
    /// The entries of these blocks, of a copy that has applied `since`. Answered by [`super::Reply::Lent`].
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
    /// May this writer read the copy's region? Answered by [`super::Reply::Attached`].
    Attach(Holder),
    /// How much may be under way? Answered by [`super::Reply::Granted`]. A client has one such question at a time.
    Window {
        /// What would be of use.
        wants: Room,
        /// What the client does not exceed until it is answered.
        obeys: Room,
    },
    /// Can the server read the writer's outbox? Answered by [`super::Reply::Reached`], once for each connection.
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
    /// [`super::Reply::Attached`].
    Follow(Holder),
    /// How do the copy and its server stand? Answered by [`super::Reply::Status`], also by a server without a copy.
    Status {
        /// The volume.
        shape: Shape,
    },
    /// Read every block of the copy and check it. Answered by [`super::Reply::Scrubbing`] from time to time, and at the
    /// end.
    Scrub {
        /// The volume.
        shape: Shape,
    },
    /// Forget the copy, and remove its store. Answered by [`super::Reply::Removed`].
    Remove {
        /// The volume.
        shape: Shape,
        /// Whether the copy is removed although a writer is at work.
        takes_over: bool,
    },
    /// Become the copy of a larger volume. Answered by [`super::Reply::Progress`] from time to time, and by
    /// [`super::Reply::Grown`] at the end. A copy whose size was never agreed may become smaller so.
    Grow {
        /// The volume as it is to be.
        shape: Shape,
        /// Whether the copy grows although a writer is at work.
        takes_over: bool,
    },
    /// Could the copy become that of this volume? Changes nothing. Answered by [`super::Reply::Grown`] at once.
    MayGrow {
        /// The volume as it would be.
        shape: Shape,
        /// Whether it could although a writer is at work.
        takes_over: bool,
    },
    /// The size of this volume is agreed: no copy of it goes back to the former one. Answered by
    /// [`super::Reply::Grown`].
    Agree {
        /// The volume as it is.
        shape: Shape,
    },
    /// May this client, which only reads, read the copy's region? Answered by [`super::Reply::Attached`], without keys
    /// if there is no copy.
    Look,
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
    pub(super) fn blocks(&self) -> usize {
        match self {
            Call::Write { sums, .. } => sums.len(),
            _ => 0,
        }
    }
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To [`super::Call::Open`].
    Standing {
        /// How the copy stands.
        standing: Standing,
        /// What the client may have under way.
        room: Room,
        /// Milliseconds since the writer that the server obeys has said something. `None`: it is not connected here, or
        /// it is the client itself.
        writer_silent: Option<u32>,
    },
    /// To [`super::Call::Create`].
    Created,
    /// To [`super::Call::Promise`].
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
    /// To [`super::Call::Read`]. The data are the blocks.
    Data {
        /// The number of the read.
        number: u64,
        /// An entry for each block.
        entries: Vec<Entry>,
    },
    /// To [`super::Call::Lend`]. The data are the blocks, or nothing.
    Lent {
        /// What the lender had applied.
        applied: Version,
        /// An entry for each block.
        entries: Vec<Entry>,
    },
    /// To [`super::Call::Attach`] and [`super::Call::Follow`]. While this connection lasts and the server obeys its
    /// writer, the region can be read.
    Attached {
        /// The reader's name at the server's exporters.
        session: u64,
        /// The region's keys, one for each transport over which it can be read: [`remora_fabric::RegionKey`].
        keys: Vec<Vec<u8>>,
    },
    /// To [`super::Call::Window`].
    Granted(Room),
    /// To [`super::Call::Offer`].
    Reached {
        /// Whether the server can pull from the outbox.
        pulls: bool,
        /// Whether other servers can follow it.
        lends: bool,
    },
    /// To [`super::Call::Status`].
    Status(Box<Status>),
    /// To [`super::Call::Scrub`].
    Scrubbing(Findings),
    /// To [`super::Call::Remove`].
    Removed {
        /// Whether the server had a copy.
        was_there: bool,
    },
    /// To [`super::Call::Grow`].
    Grown {
        /// Whether the server has a copy.
        is_there: bool,
    },
    /// To [`super::Call::Map`].
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
