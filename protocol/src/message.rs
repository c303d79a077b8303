//! Every message that the two sides can send, its tag and its layout.

use std::fmt;

use remora_wire::codec::{Codec, Malformed, Maybe, Name, Reader, Text, TooLarge};

use crate::bounds::{MAX_NAME_BYTES, MAX_PAYLOAD_BYTES, MAX_TEXT_BYTES};
use crate::join::{Join, Upstream};
use crate::offer::{Keys, Offer, RefusalCode, TableOffer, WaitCause};
use crate::progress::{LossCause, Outcome, Progress};
use crate::status::StatusReport;

/// Something that one end tells the other.
// A few a second, and moved rather than copied: the difference in size between the variants costs nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Replica → source: I want the data set. The first message of a replica.
    Join(Join),
    /// Replica → source: how far I have come; at every change worth telling, a few times a second.
    Progress(Progress),
    /// Replica → source: my server has applied the stream up to `offset`; would the primary go on with it from there?
    HandOffQuery {
        /// The generation that the replica was filled from.
        generation: u64,
        /// Replication offset of the last byte applied.
        offset: u64,
    },
    /// Replica → source: I go, and this is how it ended. The source forgets the replica at once; a connection that merely
    /// closes is one that may come back.
    Leave {
        /// How it ended, for programs.
        outcome: Outcome,
        /// How it ended, for people.
        text: String,
    },
    /// Either a replica or `remora status` → source: how are things?
    StatusQuery,
    /// `remora probe` → source: lend me memory to measure by.
    ProbeQuery,
    /// Replica → source: I can't read from that peer any more. Another [`Message::ReadFrom`] will follow.
    PeerLost {
        /// The generation that was read.
        generation: u64,
        /// The peer's session with the source.
        session: u64,
        /// What is wrong with it, for programs.
        cause: LossCause,
        /// What is wrong with it, for people.
        text: String,
    },
    /// Replica → another replica: I was sent to read your slots of that generation.
    ReadPeer {
        /// The generation.
        generation: u64,
        /// How the reader is called; at most [`MAX_NAME_BYTES`].
        name: String,
    },

    /// Source → replica: not yet, and why.
    Waiting {
        /// What the source waits for, for programs.
        cause: WaitCause,
        /// The same for people.
        text: String,
    },
    /// Source → replica: there is a generation, and here it lies. Again with other contents when there is a newer one.
    Offer(Offer),
    /// Source → replica: the answer to [`Message::HandOffQuery`].
    HandOffAnswer {
        /// Whether the primary's backlog reaches back to the byte behind the offset asked about.
        covered: bool,
        /// What to do or to raise when it is not covered, for people.
        text: String,
    },
    /// Source → replica: this generation is no more. Drop what was read of it; another [`Message::Offer`] will follow.
    GenerationGone {
        /// Which.
        generation: u64,
        /// Why, for people.
        text: String,
    },
    /// Source → replica: no. The source closes the connection behind it. The agents' conversation reports
    /// it as an error, never as a message.
    Refused {
        /// Why, for programs.
        code: RefusalCode,
        /// Why, for people.
        text: String,
    },
    /// Source → whoever asked: the answer to [`Message::StatusQuery`].
    Status(StatusReport),
    /// Source → whoever asked: the answer to [`Message::ProbeQuery`]. What is lent holds nothing of value, and until the session ends.
    ProbeOffer {
        /// One key per transport that the source offers, as in a [`TableOffer`].
        keys: Vec<Vec<u8>>,
    },
    /// Source → replica: take the slots from there from now on. What is on its way from elsewhere need not be waited for.
    ReadFrom {
        /// The generation that this is about.
        generation: u64,
        /// From whom; none: from the source itself.
        upstream: Option<Upstream>,
    },
    /// Replica → another replica: here my slots lie. Again with another rate when that changes.
    PeerOffer {
        /// The generation.
        generation: u64,
        /// The copy: of the source's snapshot, but with a number of slots of its own.
        table: TableOffer,
        /// Bytes per second that this reader may take; 0: as many as it can.
        rate: u64,
    },
}

impl Message {
    /// Appends the payload and gives the frame's tag.
    ///
    /// # Errors
    /// [`TooLarge`]: a list or a name is beyond its bound. Texts are cut instead.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<u8, TooLarge> {
        match self {
            Message::StatusQuery | Message::ProbeQuery => {}
            Message::Join(join) => Join::put(join, out)?,
            Message::Progress(progress) => Progress::put(progress, out)?,
            Message::HandOffQuery { generation, offset } => {
                u64::put(generation, out)?;
                u64::put(offset, out)?;
            }
            Message::Leave { outcome, text } => {
                Outcome::put(outcome, out)?;
                Sentence::put(text, out)?;
            }
            Message::Waiting { cause, text } => {
                WaitCause::put(cause, out)?;
                Sentence::put(text, out)?;
            }
            Message::Offer(offer) => Offer::put(offer, out)?,
            Message::HandOffAnswer { covered, text } => {
                bool::put(covered, out)?;
                Sentence::put(text, out)?;
            }
            Message::GenerationGone { generation, text } => {
                u64::put(generation, out)?;
                Sentence::put(text, out)?;
            }
            Message::Refused { code, text } => {
                RefusalCode::put(code, out)?;
                Sentence::put(text, out)?;
            }
            Message::Status(report) => StatusReport::put(report, out)?,
            Message::ProbeOffer { keys } => Keys::put(keys, out)?,
            Message::PeerLost { generation, session, cause, text } => {
                u64::put(generation, out)?;
                u64::put(session, out)?;
                LossCause::put(cause, out)?;
                Sentence::put(text, out)?;
            }
            Message::ReadPeer { generation, name } => {
                u64::put(generation, out)?;
                Name::<MAX_NAME_BYTES>::put(name, out)?;
            }
            Message::ReadFrom { generation, upstream } => {
                u64::put(generation, out)?;
                Maybe::<Upstream>::put(upstream, out)?;
            }
            Message::PeerOffer { generation, table, rate } => {
                u64::put(generation, out)?;
                TableOffer::put(table, out)?;
                u64::put(rate, out)?;
            }
        }
        Ok(self.tag())
    }

    /// Reads what [`Message::encode`] wrote.
    ///
    /// # Errors
    /// [`DecodeError::UnknownMessage`] for a tag of a later version, [`DecodeError::Malformed`] for a payload that is not what
    /// the tag says.
    pub fn decode(tag: u8, payload: &[u8]) -> Result<Message, DecodeError> {
        let mut from = Reader::new(payload);
        let message = Message::take(tag, &mut from)?;
        from.finish()?;
        Ok(message)
    }

    fn take(tag: u8, from: &mut Reader<'_>) -> Result<Message, DecodeError> {
        Ok(match tag {
            tag::JOIN => Message::Join(Join::take(from)?),
            tag::PROGRESS => Message::Progress(Progress::take(from)?),
            tag::HAND_OFF_QUERY => Message::HandOffQuery { generation: u64::take(from)?, offset: u64::take(from)? },
            tag::LEAVE => Message::Leave { outcome: Outcome::take(from)?, text: Sentence::take(from)? },
            tag::STATUS_QUERY => Message::StatusQuery,
            tag::PROBE_QUERY => Message::ProbeQuery,
            tag::WAITING => Message::Waiting { cause: WaitCause::take(from)?, text: Sentence::take(from)? },
            tag::OFFER => Message::Offer(Offer::take(from)?),
            tag::HAND_OFF_ANSWER => Message::HandOffAnswer { covered: bool::take(from)?, text: Sentence::take(from)? },
            tag::GENERATION_GONE => {
                Message::GenerationGone { generation: u64::take(from)?, text: Sentence::take(from)? }
            }
            tag::REFUSED => Message::Refused { code: RefusalCode::take(from)?, text: Sentence::take(from)? },
            tag::STATUS => Message::Status(StatusReport::take(from)?),
            tag::PROBE_OFFER => Message::ProbeOffer { keys: Keys::take(from)? },
            tag::PEER_LOST => Message::PeerLost {
                generation: u64::take(from)?,
                session: u64::take(from)?,
                cause: LossCause::take(from)?,
                text: Sentence::take(from)?,
            },
            tag::READ_PEER => {
                Message::ReadPeer { generation: u64::take(from)?, name: Name::<MAX_NAME_BYTES>::take(from)? }
            }
            tag::READ_FROM => {
                Message::ReadFrom { generation: u64::take(from)?, upstream: Maybe::<Upstream>::take(from)? }
            }
            tag::PEER_OFFER => Message::PeerOffer {
                generation: u64::take(from)?,
                table: TableOffer::take(from)?,
                rate: u64::take(from)?,
            },
            tag => return Err(DecodeError::UnknownMessage { tag }),
        })
    }

    /// The tag of the frame that carries it.
    pub fn tag(&self) -> u8 {
        match self {
            Message::Join(_) => tag::JOIN,
            Message::Progress(_) => tag::PROGRESS,
            Message::HandOffQuery { .. } => tag::HAND_OFF_QUERY,
            Message::Leave { .. } => tag::LEAVE,
            Message::StatusQuery => tag::STATUS_QUERY,
            Message::ProbeQuery => tag::PROBE_QUERY,
            Message::Waiting { .. } => tag::WAITING,
            Message::Offer(_) => tag::OFFER,
            Message::HandOffAnswer { .. } => tag::HAND_OFF_ANSWER,
            Message::GenerationGone { .. } => tag::GENERATION_GONE,
            Message::Refused { .. } => tag::REFUSED,
            Message::Status(_) => tag::STATUS,
            Message::ProbeOffer { .. } => tag::PROBE_OFFER,
            Message::PeerLost { .. } => tag::PEER_LOST,
            Message::ReadPeer { .. } => tag::READ_PEER,
            Message::ReadFrom { .. } => tag::READ_FROM,
            Message::PeerOffer { .. } => tag::PEER_OFFER,
        }
    }

    /// Its name in logs.
    pub fn name(&self) -> &'static str {
        match self {
            Message::Join(_) => "Join",
            Message::Progress(_) => "Progress",
            Message::HandOffQuery { .. } => "HandOffQuery",
            Message::Leave { .. } => "Leave",
            Message::StatusQuery => "StatusQuery",
            Message::ProbeQuery => "ProbeQuery",
            Message::Waiting { .. } => "Waiting",
            Message::Offer(_) => "Offer",
            Message::HandOffAnswer { .. } => "HandOffAnswer",
            Message::GenerationGone { .. } => "GenerationGone",
            Message::Refused { .. } => "Refused",
            Message::Status(_) => "Status",
            Message::ProbeOffer { .. } => "ProbeOffer",
            Message::PeerLost { .. } => "PeerLost",
            Message::ReadPeer { .. } => "ReadPeer",
            Message::ReadFrom { .. } => "ReadFrom",
            Message::PeerOffer { .. } => "PeerOffer",
        }
    }

    /// Whether that end has any business saying this.
    pub fn may_come_from(&self, side: Side) -> bool {
        match self.tag() {
            tag if tag < tag::FIRST_OF_SOURCE => side == Side::Client,
            _ => side == Side::Server,
        }
    }
}

/// Why bytes are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A message of a later version.
    #[error("a message of the unknown kind {tag:#04x}: the peer is newer; upgrade this end")]
    UnknownMessage {
        /// The message's tag.
        tag: u8,
    },
    /// The payload is not what its tag says.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// One of the two sides of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The side that connected: a replica's agent, or `remora status`.
    Client,
    /// The side that listened: a source's agent, or a replica's agent that others read from.
    Server,
}

impl Side {
    /// The other side.
    pub fn peer(self) -> Side {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.pad(match self {
            Side::Client => "replica",
            Side::Server => "source",
        })
    }
}

/// For people: an explanation with an address or two in it.
type Sentence = Text<MAX_TEXT_BYTES>;

/// Tags below 0x10 belong to the handshake.
mod tag {
    pub(super) const JOIN: u8 = 0x20;
    pub(super) const PROGRESS: u8 = 0x21;
    pub(super) const HAND_OFF_QUERY: u8 = 0x22;
    pub(super) const LEAVE: u8 = 0x23;
    pub(super) const STATUS_QUERY: u8 = 0x24;
    pub(super) const PROBE_QUERY: u8 = 0x25;
    pub(super) const PEER_LOST: u8 = 0x26;
    pub(super) const READ_PEER: u8 = 0x27;

    /// What only a server says, a source or a replica that is read, begins here.
    pub(super) const FIRST_OF_SOURCE: u8 = 0x40;
    pub(super) const WAITING: u8 = 0x40;
    pub(super) const OFFER: u8 = 0x41;
    pub(super) const HAND_OFF_ANSWER: u8 = 0x42;
    pub(super) const GENERATION_GONE: u8 = 0x43;
    pub(super) const REFUSED: u8 = 0x44;
    pub(super) const STATUS: u8 = 0x45;
    pub(super) const PROBE_OFFER: u8 = 0x46;
    pub(super) const READ_FROM: u8 = 0x47;
    pub(super) const PEER_OFFER: u8 = 0x48;
}

// The bounds above admit no message that a frame cannot carry.
const _: () = {
    let most = MAX_PAYLOAD_BYTES as usize;
    assert!(StatusReport::MOST <= most);
    assert!(Offer::MOST <= most);
    assert!(Join::MOST <= most);
    assert!(Progress::MOST <= most);
    assert!(Keys::MOST <= most);
    assert!(Sentence::MOST + 32 <= most); // the small ones: a sentence and at most three numbers
};
