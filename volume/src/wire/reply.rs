//! Reply: what a server answers.

use remora_wire::TooLarge;
use remora_wire::codec::{Bytes, Codec, List, Maybe, Reader, Text};

use super::{
    Cause, DecodeError, Findings, MAX_KEY_BYTES, MAX_MAP_BYTES, MAX_TEXT_BYTES, MOST_ENTRIES, MOST_KEYS, Room, Status,
    expect,
};
use crate::layout::Entry;
use crate::message::Standing;
use crate::version::{Generation, Version};

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
type Keys = List<Bytes<MAX_KEY_BYTES>, MOST_KEYS>;
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
