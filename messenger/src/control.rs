//! The agents' control conversation. This file is its vocabulary: every message that the two ends can say, and its layout
//! inside a frame. The files below it: [`session`] (the
//! greeting, pure, which is the layer's too) in its own [`frame`]s, [`connection`] (the conversation on the message layer).
//!
//! ```text
//!   replica (client)                                              source (server)
//!        │  MAGIC, Hello{versions, features, nonce}                     │
//!        ├─────────────────────────────────────────────────────────────▶│
//!        │  MAGIC, Challenge{version, versions, features, nonce, session}
//!        │◀─────────────────────────────────────────────────────────────┤
//!        │  Proof = HMAC(token, "client", all of the above)             │   nothing secret has crossed,
//!        ├─────────────────────────────────────────────────────────────▶│   and nothing worth having is
//!        │  Proof = HMAC(token, "server", all of the above)             │   said before both proofs hold
//!        │◀─────────────────────────────────────────────────────────────┤
//!        │                                                              │
//!        │  Join, Progress, HandOffQuery, StatusQuery, Leave            │   messages of the layer, in a lossy
//!        ├═════════════════════════════════════════════════════════════▶│   session: every frame bears a MAC
//!        │  Waiting, Offer, HandOffAnswer, GenerationGone, Status, …    │   over direction, sequence and
//!        │◀═════════════════════════════════════════════════════════════┤   content; pings when all is quiet
//! ```
//!
//! A replica that passes its slots on ([`Relays`]) is a server in the same way, to the replicas that the source sends to it: these
//! say [`Message::ReadPeer`], and it answers with a [`Message::PeerOffer`].
//!
//! `docs/protocol.md` describes every byte, and what this protects against and what not.
//!
//! A message is one message of the layer: its tag is the kind, its fields are the front, one behind the other in the order in which
//! they stand here ([`crate::frame`] for what is around them). Every list, name and text has a bound. A kind that we do not
//! know means that the peer is newer and ignored our version; a payload that ends early or late is garbled.
//!
//! Versions of the layout, newest first:
//!
//! - 2: on the message layer. Heartbeat is gone, as the layer pings.
//! - 1: the same messages in frames of their own.
//!
//! What these messages do *not* carry: slots, journal bytes, secrets. A region key says where memory lies; reading it takes
//! a secret that both ends derive from the session's key ([`crate::control::derive()`]).

pub mod connection;
pub mod error;

use std::fmt;

use remora_wire::codec::{Bytes, Codec, List, Malformed, Maybe, Name, Reader, Text, TooLarge};
use remora_wire::{codes, record};
use serde::Serialize;

pub use connection::{Connection, Endpoint, Options, Receiver, Sender, connect, turn_away};
pub use error::{Error, Fault};
pub use remora_wire::{Token, derive};

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
        /// What is waited for, for people.
        reason: String,
        /// How long it has been waited for, in seconds.
        seconds: u64,
    },
    /// Source → replica: there is a generation, and here it lies. Again with other contents when there is a newer one.
    Offer(Offer),
    /// Source → replica: the answer to [`Message::HandOffQuery`].
    HandOffAnswer {
        /// Whether the primary's backlog reaches back to the byte behind the offset asked about.
        covered: bool,
        /// Replication offset of the oldest byte in the primary's backlog.
        backlog_first: u64,
        /// Replication offset of the newest byte in it.
        backlog_end: u64,
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
    /// Source → replica: no. The source closes the connection behind it. A [`crate::control::Receiver`] gives it as
    /// [`Fault::Refused`], never as a message.
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
            Message::Waiting { reason, seconds } => {
                Sentence::put(reason, out)?;
                u64::put(seconds, out)?;
            }
            Message::Offer(offer) => Offer::put(offer, out)?,
            Message::HandOffAnswer { covered, backlog_first, backlog_end, text } => {
                bool::put(covered, out)?;
                u64::put(backlog_first, out)?;
                u64::put(backlog_end, out)?;
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
            tag::WAITING => Message::Waiting { reason: Sentence::take(from)?, seconds: u64::take(from)? },
            tag::OFFER => Message::Offer(Offer::take(from)?),
            tag::HAND_OFF_ANSWER => Message::HandOffAnswer {
                covered: bool::take(from)?,
                backlog_first: u64::take(from)?,
                backlog_end: u64::take(from)?,
                text: Sentence::take(from)?,
            },
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

/// What a replica's agent says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// How the replica is called in status reports; at most [`MAX_NAME_BYTES`].
    pub name: String,
    /// Its server's kind and version, as "valkey 9.1.2".
    pub server: String,
    /// Transports it can read by, best first, numbered as the fabric numbers them; at most [`MAX_TRANSPORTS`].
    pub transports: Vec<u8>,
    /// What it holds already from before a cut.
    pub resume: Option<Resume>,
    /// Whether it goes on following through the source for ever, instead of handing over to the primary.
    pub stay: bool,
    /// It only wants to know what an offer would say: no snapshot is taken for it, and the offer's tables are empty.
    pub plan_only: bool,
    /// It can read from other replicas, and perhaps be read; none: it reads from the source alone.
    pub relays: Option<Relays>,
}

/// How a replica takes part in passing slots on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relays {
    /// Address and port at which others may read its slots, as "10.0.0.7:41234"; an unspecified host stands for the one that the source
    /// sees it by. Empty: it does not serve.
    pub serves_at: String,
    /// Where it stands, in words of its operator's; at most [`MAX_ZONE_BYTES`]. Replicas of one zone rather read from each other.
    pub zone: String,
}

/// A replica that another one is sent to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Its session with the source: its name in what the two say of it.
    pub session: u64,
    /// How it is called.
    pub name: String,
    /// Where it serves: address and port.
    pub address: String,
}

/// Where a replica takes its slots from, and what others may take from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Relaying {
    /// The session of the replica that it reads from; none: it reads from the source.
    pub reads_from: Option<u64>,
    /// The oldest slot that it holds.
    pub oldest: u64,
    /// It holds all slots from there up to this number.
    pub held: u64,
    /// It waits for its own server or its own limits, not for whom it reads from.
    pub is_full: bool,
}

/// Why a replica can't read from another any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LossCause {
    /// It is gone, or does not answer.
    Gone,
    /// Its bytes are not the source's.
    Lied,
    /// It no longer holds what is wanted next.
    Passed,
    /// It does not let us read: it has too many readers, or no such snapshot.
    Refused,
}

/// What a replica holds of a generation that it began earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// The generation; worth something only while the source still has it.
    pub generation: u64,
    /// How many of its slots it holds without a gap from the first, checked. It may hold others; those that it lacks it reads.
    pub held_slots: u64,
    /// Its server has loaded the whole snapshot: it needs the stream only, from `next_byte` on.
    pub loaded: bool,
    /// The history that it is part of, as 40 hexadecimal digits.
    pub replid: [u8; 40],
    /// Replication offset of the next byte of the stream that it needs.
    pub next_byte: u64,
}

/// How far a replica has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The generation that all of this speaks of.
    pub generation: u64,
    /// What it is doing.
    pub phase: Phase,
    /// The transport it reads by, numbered as the fabric numbers them; none before it reads.
    pub transport: Option<u8>,
    /// Why it reads by no better one; empty if there is none.
    pub transport_why: String,
    /// It never needs slots below this number again: they may be retired.
    pub slots_below: u64,
    /// Slots of the snapshot that it holds.
    pub slots_held: u64,
    /// Bytes of the snapshot that it holds.
    pub bytes: u64,
    /// Bytes of the journal that it has taken.
    pub journal_offset: u64,
    /// Replication offset that its server has acknowledged.
    pub applied_offset: u64,
    /// What it takes from others and lends to them; none: it takes no part in that.
    pub relaying: Option<Relaying>,
}

/// What a replica is doing, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Nothing to read yet.
    Waiting,
    /// Slots cross the fabric.
    Transfer,
    /// All slots are here; the server is still loading them.
    Load,
    /// The server applies the journal up to the present.
    CatchUp,
    /// The server is being pointed at the primary.
    HandOff,
    /// The server follows through the agents, for good.
    Stay,
    /// The server is an ordinary replica.
    Done,
}

impl fmt::Display for Phase {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.pad(match self {
            Phase::Waiting => "waiting",
            Phase::Transfer => "transfer",
            Phase::Load => "load",
            Phase::CatchUp => "catch-up",
            Phase::HandOff => "hand-off",
            Phase::Stay => "stay",
            Phase::Done => "done",
        })
    }
}

/// How it ended for a replica that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Its server is an ordinary replica of the primary.
    HandedOver,
    /// Somebody stopped the agent.
    Stopped,
    /// It could not be done.
    Failed,
}

/// Where a generation lies and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Its number, unique for the source.
    pub generation: u64,
    /// The primary's replication id, as 40 hexadecimal digits.
    pub replid: [u8; 40],
    /// Replication offset of the last byte that the snapshot contains.
    pub offset: u64,
    /// The snapshot's table.
    pub snapshot: TableOffer,
    /// The journal's table, which begins with the byte behind `offset`.
    pub journal: TableOffer,
    /// Where the true primary is.
    pub primary: Announce,
    /// The primary's kind and version, as "redis 7.0.15".
    pub server: String,
    /// The name that the server which is captured has given this run of itself, as `INFO` tells it; empty if it doesn't.
    pub run_id: String,
    /// Size of the primary's replication backlog, in bytes.
    pub backlog_bytes: u64,
    /// How fast its replication offset grows, in bytes per second: with the backlog this says how long a hand-off may take.
    pub write_rate: u64,
    /// From whom to take the snapshot's slots; none: from the source's table.
    pub upstream: Option<Upstream>,
}

/// One table: its shape, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableOffer {
    /// The generation in the table's superblock. A journal outlives the snapshot that it was begun with.
    pub generation: u64,
    /// The replication offset in the table's superblock: that of the snapshot with which it began.
    pub first_offset: u64,
    /// Bytes in a slot.
    pub slot_size: u32,
    /// Slots in the ring.
    pub slots: u32,
    /// The promise that the memory of a slot never gets other bytes once it is published, not even after this generation:
    /// the slots may be used where they lie, for as long as one likes.
    pub retained: bool,
    /// One key per transport that both ends know; opaque here. At most [`MAX_KEYS`] of at most [`MAX_KEY_BYTES`].
    pub keys: Vec<Vec<u8>>,
}

/// The true primary's address, as far as the source can know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announce {
    /// The host that a replica's server must use. Empty: the host by which the replica reached the source.
    pub host: String,
    /// The port that it must use.
    pub port: u16,
    /// Whether that port speaks TLS to replicas.
    pub tls: bool,
    /// The address by which the source itself reaches the server, for messages to people.
    pub source_sees_as: String,
}

/// Why a source says no.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// It serves as many replicas as it may.
    Busy,
    /// It is being stopped.
    Stopping,
    /// The replica held up the others; it alone must begin again.
    Stalled,
    /// The server refuses to be captured: somebody must change its settings or its permissions.
    PrimaryRefuses,
    /// The journal does not reach back to where the replica is: nothing but the primary itself, or a new snapshot, helps.
    HistoryGone,
}

impl RefusalCode {
    /// Whether the same request may be granted later.
    pub fn may_pass(self) -> bool {
        match self {
            RefusalCode::Busy | RefusalCode::Stopping | RefusalCode::Stalled => true,
            RefusalCode::PrimaryRefuses | RefusalCode::HistoryGone => false,
        }
    }
}

impl fmt::Display for RefusalCode {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            RefusalCode::Busy => "busy",
            RefusalCode::Stopping => "stopping",
            RefusalCode::Stalled => "stalled",
            RefusalCode::PrimaryRefuses => "the primary refuses",
            RefusalCode::HistoryGone => "history gone",
        })
    }
}

/// All that a source knows, for `remora status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StatusReport {
    /// Version of the source's agent.
    pub source: String,
    /// Address of the server that it captures from.
    pub server: String,
    /// That server's role: "primary", or "replica of HOST:PORT".
    pub role: String,
    /// The generation that replicas are served from.
    pub generation: Option<GenerationStatus>,
    /// Whoever has joined; at most [`MAX_REPLICAS`].
    pub replicas: Vec<ReplicaStatus>,
    /// Sums since the source began.
    pub totals: Totals,
}

/// The generation that a source holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GenerationStatus {
    /// Its number.
    pub generation: u64,
    /// The primary's replication id.
    pub replid: String,
    /// Replication offset of the snapshot.
    pub offset_start: u64,
    /// Replication offset of the newest byte in the journal.
    pub offset_now: u64,
    /// Whether its snapshot is whole.
    pub state: GenerationState,
    /// Bytes of the snapshot received so far.
    pub snapshot_bytes: u64,
    /// Slots in the snapshot's ring.
    pub slots: u64,
    /// Slots published so far.
    pub published_slots: u64,
    /// Slots that may be overwritten.
    pub retired_slots: u64,
    /// Whether slots are used again, so that nobody can join late.
    pub windowed: bool,
    /// Memory in use by both tables, in bytes.
    pub memory_bytes: u64,
    /// Memory that may be used, in bytes.
    pub memory_limit: u64,
    /// Seconds since the capture began.
    pub age_seconds: u64,
    /// Replication offset of the oldest byte in the journal.
    pub journal_first: u64,
    /// Replication offset behind the newest byte in the journal.
    pub journal_end: u64,
    /// How long the capture took, or has taken so far, in milliseconds.
    pub capture_millis: u64,
    /// In which way it comes from the server, in words.
    pub capture: String,
}

/// How far a snapshot has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GenerationState {
    /// The server is still sending it.
    Capturing,
    /// All of it is in the table.
    Complete,
    /// Given up.
    Aborted,
}

/// One replica, as the source sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplicaStatus {
    /// What it called itself.
    pub name: String,
    /// Where it called from.
    pub address: String,
    /// The transport it reads by, by name; empty before it reads.
    pub transport: String,
    /// Why it reads by no better one; empty if there is none.
    pub transport_why: String,
    /// What it is doing.
    pub phase: Phase,
    /// Slots of the snapshot that it holds.
    pub slots_held: u64,
    /// How much of the snapshot that is, in thousandths.
    pub percent_permille: u16,
    /// How fast it reads, in bytes per second.
    pub rate_bytes_per_s: u64,
    /// Bytes of the journal that its server has yet to apply.
    pub journal_lag_bytes: u64,
    /// Replication offset that its server has acknowledged.
    pub applied_offset: u64,
    /// Seconds since it joined.
    pub joined_seconds: u64,
    /// Seconds since it was last heard of.
    pub silent_seconds: u64,
    /// Its session: how others name it in `reads_from`.
    pub session: u64,
    /// The session of the replica that it takes slots from; none: the source.
    pub reads_from: Option<u64>,
    /// Whether others may read from it.
    pub serves: bool,
    /// The oldest slot that it holds for others.
    pub oldest_slot: u64,
    /// Where it stands, in words of its operator's.
    pub zone: String,
}

/// Sums since a source began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Totals {
    /// Snapshots taken from the server.
    pub snapshots_taken: u64,
    /// Replicas that left with success.
    pub replicas_done: u64,
    /// Bytes of tables read by replicas.
    pub bytes_served: u64,
}

// The layouts, fields in the order of the wire.

record!(Join {
    name: Name<MAX_NAME_BYTES>,
    server: Name<MAX_NAME_BYTES>,
    transports: List<u8, MAX_TRANSPORTS>,
    resume: Maybe<Resume>,
    stay: bool,
    plan_only: bool,
    relays: Maybe<Relays>,
});

record!(Relays { serves_at: Name<MAX_ADDRESS_BYTES>, zone: Name<MAX_ZONE_BYTES> });

record!(Upstream { session: u64, name: Name<MAX_NAME_BYTES>, address: Name<MAX_ADDRESS_BYTES> });

record!(Relaying { reads_from: Maybe<u64>, oldest: u64, held: u64, is_full: bool });

record!(Resume { generation: u64, held_slots: u64, loaded: bool, replid: [u8; 40], next_byte: u64 });

record!(Progress {
    generation: u64,
    phase: Phase,
    transport: Maybe<u8>,
    transport_why: Text<MAX_WHY_BYTES>,
    slots_below: u64,
    slots_held: u64,
    bytes: u64,
    journal_offset: u64,
    applied_offset: u64,
    relaying: Maybe<Relaying>,
});

record!(Offer {
    generation: u64,
    replid: [u8; 40],
    offset: u64,
    snapshot: TableOffer,
    journal: TableOffer,
    primary: Announce,
    server: Name<MAX_NAME_BYTES>,
    run_id: Name<MAX_NAME_BYTES>,
    backlog_bytes: u64,
    write_rate: u64,
    upstream: Maybe<Upstream>,
});

record!(TableOffer { generation: u64, first_offset: u64, slot_size: u32, slots: u32, retained: bool, keys: Keys });

record!(Announce {
    host: Name<MAX_ADDRESS_BYTES>,
    port: u16,
    tls: bool,
    source_sees_as: Name<MAX_ADDRESS_BYTES>,
});

record!(StatusReport {
    source: Name<MAX_NAME_BYTES>,
    server: Name<MAX_ADDRESS_BYTES>,
    role: Name<MAX_ADDRESS_BYTES>,
    generation: Maybe<GenerationStatus>,
    replicas: List<ReplicaStatus, MAX_REPLICAS>,
    totals: Totals,
});

record!(GenerationStatus {
    generation: u64,
    replid: Name<40>,
    offset_start: u64,
    offset_now: u64,
    state: GenerationState,
    snapshot_bytes: u64,
    slots: u64,
    published_slots: u64,
    retired_slots: u64,
    windowed: bool,
    memory_bytes: u64,
    memory_limit: u64,
    age_seconds: u64,
    journal_first: u64,
    journal_end: u64,
    capture_millis: u64,
    capture: Name<MAX_NAME_BYTES>,
});

record!(ReplicaStatus {
    name: Name<MAX_NAME_BYTES>,
    address: Name<MAX_ADDRESS_BYTES>,
    transport: Name<16>,
    transport_why: Text<MAX_WHY_BYTES>,
    phase: Phase,
    slots_held: u64,
    percent_permille: u16,
    rate_bytes_per_s: u64,
    journal_lag_bytes: u64,
    applied_offset: u64,
    joined_seconds: u64,
    silent_seconds: u64,
    session: u64,
    reads_from: Maybe<u64>,
    serves: bool,
    oldest_slot: u64,
    zone: Name<MAX_ZONE_BYTES>,
});

record!(Totals { snapshots_taken: u64, replicas_done: u64, bytes_served: u64 });

codes!(Phase is "phase" {
    0 => Waiting,
    1 => Transfer,
    2 => Load,
    3 => CatchUp,
    4 => HandOff,
    5 => Stay,
    6 => Done,
});

codes!(Outcome is "outcome" {
    0 => HandedOver,
    1 => Stopped,
    2 => Failed,
});

codes!(LossCause is "cause of a loss" {
    0 => Gone,
    1 => Lied,
    2 => Passed,
    3 => Refused,
});

codes!(RefusalCode is "refusal" {
    0 => Busy,
    1 => Stopping,
    2 => Stalled,
    3 => PrimaryRefuses,
    4 => HistoryGone,
});

codes!(GenerationState is "state of a generation" {
    0 => Capturing,
    1 => Complete,
    2 => Aborted,
});

/// For people: an explanation with an address or two in it.
type Sentence = Text<MAX_TEXT_BYTES>;

/// Where a region lies, once per transport.
type Keys = List<Bytes<MAX_KEY_BYTES>, MAX_KEYS>;

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

/// The oldest version of this protocol that is spoken.
pub const OLDEST_VERSION: u16 = 2;

/// The newest version of this protocol that is spoken. The crate's documentation says what each one brought.
pub const NEWEST_VERSION: u16 = 2;

/// The code by which a server that has no room for another conversation refuses a connection in the greeting.
pub const REFUSED_AS_BUSY: u8 = 3;

/// The longest body of a message, in bytes. The longest message is a status that lists [`MAX_REPLICAS`] replicas; it is
/// asserted below that it fits.
pub const MAX_PAYLOAD_BYTES: u32 = 512 * 1024;

/// Longest name of a replica, of a server or of a version, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// Longest name of a zone, in bytes: a rack, a room, a region. Short, as a status report has one per replica.
pub const MAX_ZONE_BYTES: usize = 32;

/// Longest address, in bytes: a host name has 253 at most, a port 5, a socket's path 107, and a role some words around it.
pub const MAX_ADDRESS_BYTES: usize = 280;

/// Longest explanation, in bytes. What is beyond is cut off.
pub const MAX_TEXT_BYTES: usize = 1024;

/// Longest reason for a transport, in bytes. What is beyond is cut off. Short, as a status report has one per replica.
pub const MAX_WHY_BYTES: usize = 400;

/// Most transports in a [`Join`]. There are four.
pub const MAX_TRANSPORTS: usize = 8;

/// Most keys of one table: one per transport.
pub const MAX_KEYS: usize = 8;

/// Longest key of a region, in bytes: an address, a socket's name or a memory key, and some numbers.
pub const MAX_KEY_BYTES: usize = 1024;

/// Most replicas in one status report. A source that serves more lists the first of them.
pub const MAX_REPLICAS: usize = 512;

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

#[cfg(test)]
mod tests;
