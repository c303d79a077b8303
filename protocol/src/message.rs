//! Every message that the two sides can send, its tag and its layout.

use std::fmt;

use remora_wire::codec::{Codec, Malformed, Maybe, Name, Reader, Text, TooLarge};

use crate::ahead::Expected;
use crate::bounds::{MAX_CLIENT_PAYLOAD_BYTES, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES, MAX_TEXT_BYTES};
use crate::join::{Join, Upstream};
use crate::offer::{Keys, Offer, RefusalCode, TableOffer, WaitCause};
use crate::progress::{LossCause, Outcome, Progress};
use crate::status::StatusReport;

/// A message from one side to the other.
// A few messages a second, moved and not copied: the difference in size between the variants does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Replica → source: requests the data set. The first message of a replica.
    Join(Join),
    /// Replica → source: the replica's progress. Sent at every change that matters, a few times a second.
    Progress(Progress),
    /// Replica → source: the replica's server has applied the stream up to `offset`. Asks whether the primary would
    /// continue from there.
    HandOffQuery {
        /// The generation that the replica was loaded from.
        generation: u64,
        /// Replication offset of the last byte that the server has applied.
        offset: u64,
    },
    /// Replica → source: the replica leaves, with this result. The source forgets it at once. A replica whose
    /// connection merely closes may come back.
    Leave {
        /// The result, for programs.
        outcome: Outcome,
        /// The result, for people.
        text: String,
    },
    /// A replica or `remora status` → source: requests a report.
    StatusQuery,
    /// `remora probe` → source: requests memory to measure with.
    ProbeQuery,
    /// Replica → source: the replica cannot read from that peer any more. The source answers with another
    /// [`Message::ReadFrom`].
    PeerLost {
        /// The generation that the replica read.
        generation: u64,
        /// The peer's session with the source.
        session: u64,
        /// The reason, for programs.
        cause: LossCause,
        /// The reason, for people.
        text: String,
    },
    /// Replica → another replica: requests to read its slots of that generation, as the source has assigned.
    ReadPeer {
        /// The generation to read.
        generation: u64,
        /// The reader's name; at most [`MAX_NAME_BYTES`].
        name: String,
    },

    /// Source → replica: there is no offer yet.
    Waiting {
        /// The reason, for programs.
        cause: WaitCause,
        /// The reason, for people.
        text: String,
    },
    /// Source → replica: a generation and where it is. Sent again when there is a newer one.
    Offer(Offer),
    /// Source → replica: what the source expects of the snapshot that the replica reads or waits for. Sent behind an
    /// offer, and at most once a second while the snapshot is taken.
    Expected(Expected),
    /// Source → replica: the answer to [`Message::HandOffQuery`].
    HandOffAnswer {
        /// Whether the primary's backlog holds the byte after the offset asked about, with room for the time that a
        /// hand-off takes.
        covered: bool,
        /// If it does not: what to change, for people.
        text: String,
    },
    /// Source → replica: the generation has ended. The replica drops what it has read of it; another [`Message::Offer`]
    /// follows.
    GenerationGone {
        /// The generation that has ended.
        generation: u64,
        /// The reason, for people.
        text: String,
    },
    /// Source → replica: a refusal, after which the source closes the connection. The agents' conversation reports it
    /// as an error, never as a message.
    Refused {
        /// The reason, for programs.
        code: RefusalCode,
        /// The reason, for people.
        text: String,
    },
    /// Source → the peer that asked: the answer to [`Message::StatusQuery`].
    Status(StatusReport),
    /// Source → the peer that asked: the answer to [`Message::ProbeQuery`]. The memory holds no data, and is exported
    /// until the session ends.
    ProbeOffer {
        /// One key per transport that the source offers, as in a [`TableOffer`].
        keys: Vec<Vec<u8>>,
    },
    /// Source → replica: read the slots from there from now on. Reads that are under way from elsewhere may be
    /// abandoned.
    ReadFrom {
        /// The generation to read.
        generation: u64,
        /// The peer to read from; `None`: the source itself.
        upstream: Option<Upstream>,
    },
    /// Replica → another replica: where its slots are. Sent again when the rate changes.
    PeerOffer {
        /// The generation of the slots.
        generation: u64,
        /// The replica's copy of the source's snapshot. It may have another number of slots.
        table: TableOffer,
        /// Bytes per second that this reader may read; 0: no limit.
        rate: u64,
    },
}

impl Message {
    /// Appends the payload to `out` and returns the message's tag.
    ///
    /// # Errors
    /// [`TooLarge`]: a list or a name exceeds its bound. Texts are truncated instead.
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
            Message::Expected(expected) => Expected::put(expected, out)?,
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

    /// Decodes what [`Message::encode`] wrote.
    ///
    /// # Errors
    /// [`DecodeError::UnknownMessage`]: the tag belongs to a later version. [`DecodeError::Malformed`]: the payload
    /// does not match the tag.
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
            tag::EXPECTED => Message::Expected(Expected::take(from)?),
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

    /// The message's tag: its kind on the message layer.
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
            Message::Expected(_) => tag::EXPECTED,
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

    /// The message's name in logs.
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
            Message::Expected(_) => "Expected",
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

    /// Whether that side may send this message.
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
    /// The tag belongs to a later version of the protocol.
    #[error("message of unknown kind {tag:#04x}: the peer is newer; upgrade this end")]
    UnknownMessage {
        /// The message's tag.
        tag: u8,
    },
    /// The payload does not match the tag.
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

/// An explanation for people.
type Sentence = Text<MAX_TEXT_BYTES>;

/// The tags. Those below 0x10 belong to the handshake.
mod tag {
    pub(super) const JOIN: u8 = 0x20;
    pub(super) const PROGRESS: u8 = 0x21;
    pub(super) const HAND_OFF_QUERY: u8 = 0x22;
    pub(super) const LEAVE: u8 = 0x23;
    pub(super) const STATUS_QUERY: u8 = 0x24;
    pub(super) const PROBE_QUERY: u8 = 0x25;
    pub(super) const PEER_LOST: u8 = 0x26;
    pub(super) const READ_PEER: u8 = 0x27;

    /// The first tag of the messages that only a server sends: a source, or a replica that others read from.
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
    pub(super) const EXPECTED: u8 = 0x49;
}

// Every message that keeps the bounds fits into one frame.
const _: () = {
    let most = MAX_PAYLOAD_BYTES as usize;
    assert!(StatusReport::MAX_BYTES <= most);
    assert!(Offer::MAX_BYTES <= most);
    assert!(Expected::MAX_BYTES <= most);
    assert!(Keys::MAX_BYTES <= most);
    let most = MAX_CLIENT_PAYLOAD_BYTES as usize;
    assert!(Join::MAX_BYTES <= most);
    assert!(Progress::MAX_BYTES <= most);
    assert!(Sentence::MAX_BYTES + 32 <= most); // the small messages: a text and at most three numbers
};
