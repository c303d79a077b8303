//! Every message that the two sides can send: its tag, what is in it, and its layout.
//!
//! [`Message`] comes first. What it carries follows in the order of a sync: the offer of a generation, what a replica
//! reports when it joins, how far it is, what is still to come, and what a source reports to `remora status`.

use std::fmt;

use remora_redis::ReplId;
use remora_wire::codec::{Bytes, Codec, List, Malformed, Maybe, Name, Reader, Text, TooLarge};
use remora_wire::{codes, record};
use serde::{Serialize, Serializer};

use crate::base::Base;
use crate::bounds::{
    self, Digits, DigitsIfKnown, MAX_ADDRESS_BYTES, MAX_CLIENT_PAYLOAD_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES, MAX_PROTECTION_BYTES, MAX_REPLICAS, MAX_SEAL_BYTES, MAX_STANDBYS, MAX_TEXT_BYTES, MAX_WHY_BYTES,
    MAX_ZONE_BYTES,
};

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
    /// Standby → source: the joins of this session are those of a source that copies this one's snapshots. No snapshot
    /// is taken for it.
    StandBy {
        /// Address and port at which it serves readers, as in [`Relays::serves_at`].
        serves_at: String,
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
    /// Source → replica: where other sources of the same snapshots serve. Sent behind an offer, and when they change.
    Standbys {
        /// Their addresses and ports. At most [`MAX_STANDBYS`].
        addresses: Vec<String>,
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
            Message::StandBy { serves_at } => Name::<MAX_ADDRESS_BYTES>::put(serves_at, out)?,
            Message::Standbys { addresses } => Standbys::put(addresses, out)?,
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
            tag::STAND_BY => Message::StandBy { serves_at: Name::<MAX_ADDRESS_BYTES>::take(from)? },
            tag::STANDBYS => Message::Standbys { addresses: Standbys::take(from)? },
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
            Message::StandBy { .. } => tag::STAND_BY,
            Message::Standbys { .. } => tag::STANDBYS,
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
            Message::StandBy { .. } => "StandBy",
            Message::Standbys { .. } => "Standbys",
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
    pub(super) const STAND_BY: u8 = 0x28;

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
    pub(super) const STANDBYS: u8 = 0x4a;
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

// Where a generation's tables are and how to reach them. Also why there is no offer: waiting and refusals.

/// A generation and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The generation's number, unique for the source.
    pub generation: u64,
    /// The primary's replication id. `None` only in an offer without tables, if the primary did not report one.
    pub replid: Option<ReplId>,
    /// The history that this one continues, as far as the server reports it.
    pub former: Option<Former>,
    /// Replication offset of the last byte that the snapshot contains. In an offer without tables, the server's.
    pub offset: u64,
    /// The snapshot's table.
    pub snapshot: TableOffer,
    /// The journal's table. It begins with the byte after `offset`.
    pub journal: TableOffer,
    /// The address of the primary that the replica's server will follow after the hand-off.
    pub primary: Announce,
    /// Kind and version of the primary, as "redis 7.0.15".
    pub server: String,
    /// The run id of the captured server, from `INFO`; empty if it does not report one.
    pub run_id: String,
    /// A number that the source's process has drawn when it started. A source that was started again has another one.
    pub process: u64,
    /// Size of the primary's replication backlog, in bytes.
    pub backlog_bytes: u64,
    /// Growth of the primary's replication offset, in bytes per second. Together with the backlog it says how long a
    /// hand-off may take.
    pub write_rate: u64,
    /// The replica to read the snapshot's slots from; `None`: the source.
    pub upstream: Option<Upstream>,
    /// What may make this sync fail although nothing forbids it, for people; empty if nothing is known.
    pub warning: String,
    /// Why no snapshot of the captured server can be taken now, for people: it has no link to its own primary, it
    /// loads, or it does not answer. Empty if nothing stands in the way.
    pub obstacle: String,
    /// What a snapshot of the captured server would be; `None` from a source that does not know it.
    pub terms: Option<Terms>,
}

record!(Offer {
    generation: u64,
    replid: DigitsIfKnown,
    former: Maybe<Former>,
    offset: u64,
    snapshot: TableOffer,
    journal: TableOffer,
    primary: Announce,
    server: Name<MAX_NAME_BYTES>,
    run_id: Name<MAX_NAME_BYTES>,
    process: u64,
    backlog_bytes: u64,
    write_rate: u64,
    upstream: Maybe<Upstream>,
    warning: Text<MAX_TEXT_BYTES>,
    obstacle: Text<MAX_TEXT_BYTES>,
    terms: Maybe<Terms>,
});

/// What a replica that joins now gets, and what it costs the captured server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of the snapshot: of the present one, or as many as the server's memory suggests.
    pub snapshot_bytes: u64,
    /// Bytes of the source's memory for it.
    pub ring_bytes: u64,
    /// Whether slots of that memory are reused, so that no replica can join late.
    pub windowed: bool,
    /// Whether the present snapshot serves, and the server does not fork.
    pub held: bool,
    /// Whether other hosts read sealed tables.
    pub sealed: bool,
    /// Seconds that the server waits before it forks; 0 if it does not wait, or does not say.
    pub fork_delay_seconds: u64,
    /// Whether the source does without that wait (`--tune-server`).
    pub tunes_server: bool,
    /// Whether the obstacle stays until an administrator changes the server.
    pub is_refused: bool,
    /// Whether the source offers shared memory to readers on its host.
    pub offers_shm: bool,
    /// Whether the source offers reads over RDMA.
    pub offers_verbs: bool,
    /// From what it is made.
    pub base: Base,
}

record!(Terms {
    snapshot_bytes: u64,
    ring_bytes: u64,
    windowed: bool,
    held: bool,
    sealed: bool,
    fork_delay_seconds: u64,
    tunes_server: bool,
    is_refused: bool,
    offers_shm: bool,
    offers_verbs: bool,
    base: Base,
});

/// A history that a server has left for another one, which is the same up to some byte (`master_replid2` and
/// `second_repl_offset`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Former {
    /// Its replication id.
    pub replid: ReplId,
    /// Replication offset of the first byte that it does not have in common with the present history.
    pub end: u64,
}

record!(Former { replid: Digits, end: u64 });

/// The shape of one table, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableOffer {
    /// The generation in the table's superblock. A journal outlives the snapshot that it began with.
    pub generation: u64,
    /// The replication offset in the table's superblock: the one of the snapshot that it began with.
    pub first_offset: u64,
    /// Size of a slot, in bytes.
    pub slot_size: u32,
    /// Number of slots in the ring.
    pub slots: u32,
    /// The memory of a published slot never changes, not even after this generation ends: readers may use slots in
    /// place, for as long as they like.
    pub retained: bool,
    /// One key per transport that both ends support; opaque to this protocol. At most [`MAX_KEYS`] of at most
    /// [`MAX_KEY_BYTES`].
    pub keys: Vec<Vec<u8>>,
    /// The number of an algorithm and the secret of the table's keys, if the transports to other hosts export a sealed
    /// table; otherwise empty. Only an encrypted connection carries it.
    pub seal: Vec<u8>,
    /// Whether the transports to other hosts export a table whose slots may be compressed.
    pub compressed: bool,
}

record!(TableOffer {
    generation: u64,
    first_offset: u64,
    slot_size: u32,
    slots: u32,
    retained: bool,
    keys: Keys,
    seal: Bytes<MAX_SEAL_BYTES>,
    compressed: bool,
});

/// The primary's address, as far as the source knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announce {
    /// The host that the replica's server must use. Empty: the host by which the replica reached the source.
    pub host: String,
    /// The port that it must use.
    pub port: u16,
    /// Whether that port speaks TLS to replicas.
    pub tls: bool,
    /// The address by which the source reaches the primary, for messages to people.
    pub source_sees_as: String,
}

record!(Announce {
    host: Name<MAX_ADDRESS_BYTES>,
    port: u16,
    tls: bool,
    source_sees_as: Name<MAX_ADDRESS_BYTES>,
});

/// Why a source has no offer yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitCause {
    /// A snapshot is being prepared; an offer follows.
    NotYet,
    /// Other replicas still read the present snapshot; the next one follows it.
    Busy,
    /// The last attempt to take a snapshot failed. The source tries again.
    LastAttemptFailed,
    /// No snapshot of the captured server can be taken now: it has no link to its own primary, it loads, or it does not
    /// answer.
    CutOff,
    /// As many replicas load the present snapshot as the source lets load at once. The turn of this one comes.
    Turn,
}

codes!(WaitCause is "cause of waiting" {
    0 => NotYet,
    1 => Busy,
    2 => LastAttemptFailed,
    3 => CutOff,
    4 => Turn,
});

/// Why a source refuses a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// It serves as many replicas as its limit allows.
    Busy,
    /// It is stopping.
    Stopping,
    /// The replica held up the others. It must start over.
    Stalled,
    /// The server refuses the capture: its settings or the user's permissions must change first.
    PrimaryRefuses,
    /// The journal does not reach back to the replica's offset: it must follow the primary itself, or load a new
    /// snapshot.
    HistoryGone,
    /// The peer's token does not permit the request.
    NotPermitted,
}

impl RefusalCode {
    /// Whether the same request may be granted later.
    pub fn may_pass(self) -> bool {
        match self {
            RefusalCode::Busy | RefusalCode::Stopping | RefusalCode::Stalled => true,
            RefusalCode::PrimaryRefuses | RefusalCode::HistoryGone | RefusalCode::NotPermitted => false,
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
            RefusalCode::NotPermitted => "not permitted",
        })
    }
}

codes!(RefusalCode is "refusal" {
    0 => Busy,
    1 => Stopping,
    2 => Stalled,
    3 => PrimaryRefuses,
    4 => HistoryGone,
    5 => NotPermitted,
});

/// The addresses of standbys.
type Standbys = List<Name<MAX_ADDRESS_BYTES>, MAX_STANDBYS>;

/// The keys of a region, one per transport.
pub(crate) type Keys = List<Bytes<MAX_KEY_BYTES>, MAX_KEYS>;

// What a replica's agent reports about itself when it connects.

/// What a replica's agent reports about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// The replica's name in status reports; at most [`MAX_NAME_BYTES`]. `:PORT` stands for that port of the host by
    /// which the source sees it, and an empty name for the address of the connection.
    pub name: String,
    /// Kind and version of its server, as "valkey 9.1.2".
    pub server: String,
    /// What it still holds from before its connection broke.
    pub resume: Option<Resume>,
    /// It only asks what an offer would contain: no snapshot is taken for it, and the offer's tables are empty.
    pub plan_only: bool,
    /// The operator's name for its location; at most [`MAX_ZONE_BYTES`]. Empty: none. Replicas prefer upstreams in the
    /// same zone, and take turns (`--at-once`) with those of the same zone.
    pub zone: String,
    /// How it takes part in relaying; `None`: it reads from the source alone.
    pub relays: Option<Relays>,
}

record!(Join {
    name: Name<MAX_NAME_BYTES>,
    server: Name<MAX_NAME_BYTES>,
    resume: Maybe<Resume>,
    plan_only: bool,
    zone: Name<MAX_ZONE_BYTES>,
    relays: Maybe<Relays>,
});

/// How a replica takes part in relaying slots to other replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relays {
    /// Address and port at which others may read its slots, as "10.0.0.7:41234". An unspecified host stands for the one
    /// that the source sees it by. Empty: it does not serve.
    pub serves_at: String,
}

record!(Relays { serves_at: Name<MAX_ADDRESS_BYTES> });

/// A replica that another replica is assigned to read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Its session with the source, which identifies it.
    pub session: u64,
    /// Its name.
    pub name: String,
    /// Address and port at which it serves.
    pub address: String,
}

record!(Upstream { session: u64, name: Name<MAX_NAME_BYTES>, address: Name<MAX_ADDRESS_BYTES> });

/// What a replica holds of a generation that it joined earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// The generation. Useful only while the source still has it.
    pub generation: u64,
    /// Number of slots that it holds without a gap from the first one, verified. It may hold others; it reads the ones
    /// it lacks.
    pub held_slots: u64,
    /// Its server has loaded the whole snapshot: it needs only the stream, from `next_byte` on.
    pub loaded: bool,
    /// The replication id of the history that it follows.
    pub replid: ReplId,
    /// Replication offset of the next byte of the stream that it needs.
    pub next_byte: u64,
}

record!(Resume { generation: u64, held_slots: u64, loaded: bool, replid: Digits, next_byte: u64 });

// What a replica is doing, how far it is, and how it ended.

/// A replica's progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The generation that all other fields are about.
    pub generation: u64,
    /// What the replica is doing.
    pub phase: Phase,
    /// The transport it reads over, as the fabric numbers them; `None` before it reads.
    pub transport: Option<u8>,
    /// Why no better transport is used; empty if none is better.
    pub transport_why: String,
    /// Why its server does not load small values in the fast way; empty if it does, or if that is not decided yet.
    pub no_fast_keys: String,
    /// It will never need slots below this number again: they may be retired.
    pub slots_below: u64,
    /// Slots of the snapshot that it holds.
    pub slots_held: u64,
    /// Bytes of the snapshot that it holds.
    pub bytes: u64,
    /// Replication offset that its server has acknowledged.
    pub applied_offset: u64,
    /// What it reads from other replicas and serves to them; `None`: it does not take part in relaying.
    pub relaying: Option<Relaying>,
}

record!(Progress {
    generation: u64,
    phase: Phase,
    transport: Maybe<u8>,
    transport_why: Text<MAX_WHY_BYTES>,
    no_fast_keys: Text<MAX_WHY_BYTES>,
    slots_below: u64,
    slots_held: u64,
    bytes: u64,
    applied_offset: u64,
    relaying: Maybe<Relaying>,
});

/// Where a replica reads its slots from, and which ones others may read from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Relaying {
    /// The session of the replica that it reads from; `None`: the source.
    pub reads_from: Option<u64>,
    /// The oldest slot that it holds.
    pub oldest: u64,
    /// The end of the slots that it holds: it has all from `oldest` up to, but not including, this one.
    pub held: u64,
    /// It waits for its own server or its own limits, and not for its upstream.
    pub is_full: bool,
}

record!(Relaying { reads_from: Maybe<u64>, oldest: u64, held: u64, is_full: bool });

/// What a replica is doing, in the order in which a sync passes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// There is nothing to read yet.
    Waiting,
    /// Slots are read over the fabric.
    Transfer,
    /// All slots are here, and the server is still loading them.
    Load,
    /// The server applies the journal up to the present.
    CatchUp,
    /// The server is being pointed at the primary.
    HandOff,
    /// The server follows the primary through the agents, permanently (`--stay`).
    Stay,
    /// The server is an ordinary replica of the primary.
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

codes!(Phase is "phase" {
    0 => Waiting,
    1 => Transfer,
    2 => Load,
    3 => CatchUp,
    4 => HandOff,
    5 => Stay,
    6 => Done,
});

/// The result of a replica that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Its server is an ordinary replica of the primary.
    HandedOver,
    /// The agent was stopped.
    Stopped,
    /// The sync failed.
    Failed,
}

codes!(Outcome is "outcome" {
    0 => HandedOver,
    1 => Stopped,
    2 => Failed,
});

/// Why a replica cannot read from another one any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LossCause {
    /// The peer has gone, or does not answer.
    Gone,
    /// The peer's bytes are not the source's.
    Lied,
    /// The peer no longer holds the slot that is needed next.
    Passed,
    /// The peer refuses: it has too many readers, or does not have the snapshot.
    Refused,
}

codes!(LossCause is "cause of a loss" {
    0 => Gone,
    1 => Lied,
    2 => Passed,
    3 => Refused,
});

// What is still to come of a snapshot or of a transfer of it, and how soon.

/// How far a transfer is, how fast it is, and how long the rest takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Advance {
    /// The share of the whole that has arrived, in thousandths. 1000 only if all has arrived. `None` while the length
    /// of the whole is not even estimated.
    pub percent_permille: Option<u16>,
    /// Bytes that arrive per second.
    pub rate_bytes_per_s: u64,
    /// Seconds until the rest has arrived at that rate. `None` if nothing arrives, or if the rest is not known.
    pub left_seconds: Option<u64>,
}

impl Advance {
    /// The share of the whole that has arrived, from 0 to 1. `None` while the length of the whole is unknown.
    pub fn ratio(&self) -> Option<f64> {
        self.percent_permille.map(|permille| f64::from(permille) / 1000.0)
    }
}

record!(Advance { percent_permille: Maybe<u16>, rate_bytes_per_s: u64, left_seconds: Maybe<u64> });

/// The length of a snapshot, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Length {
    /// Bytes of the whole snapshot; 0 if nothing is known.
    pub bytes: u64,
    /// What that follows from.
    pub basis: Basis,
}

record!(Length { bytes: u64, basis: Basis });

/// What the length of a snapshot follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// Nothing: the length is not known.
    #[default]
    Unknown,
    /// The memory that the data set takes: a snapshot is hardly ever longer, and often much shorter.
    Memory,
    /// The length of the last snapshot, and how the data set has grown since.
    Former,
    /// The bytes of the keys that the server has saved so far, and the number of all keys.
    Keys,
    /// The whole snapshot has arrived at the source, or its length was announced.
    Known,
}

codes!(Basis is "basis of a length" {
    0 => Unknown,
    1 => Memory,
    2 => Former,
    3 => Keys,
    4 => Known,
});

/// How far the server is that saves its data set for a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Saving {
    /// Keys that it has saved.
    pub keys: u64,
    /// Keys that it had when it began.
    pub keys_total: u64,
}

record!(Saving { keys: u64, keys_total: u64 });

/// What a source expects of the snapshot that it takes, or has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Expected {
    /// The generation of the snapshot.
    pub generation: u64,
    /// Its length.
    pub length: Length,
    /// How far the server is; `None` while it does not save, or does not say.
    pub saving: Option<Saving>,
}

record!(Expected { generation: u64, length: Length, saving: Maybe<Saving> });

// What a source reports to `remora status`.

/// The state of a source, for `remora status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StatusReport {
    /// Version of the source's agent.
    pub source: String,
    /// Address of the server that is captured.
    pub server: String,
    /// Role of that server: "primary", or "replica of HOST:PORT".
    pub role: String,
    /// The generation that replicas are served from.
    pub generation: Option<GenerationStatus>,
    /// From what a replica is made that joins now.
    pub base: Base,
    /// What the source does before it can take its first snapshot; empty once it can.
    pub preparing: String,
    /// How far the server is that saves its data set for a snapshot; `None` while it does not save, or does not say.
    pub saving: Option<Saving>,
    /// The replicas that have joined; at most [`MAX_REPLICAS`].
    pub replicas: Vec<ReplicaStatus>,
    /// Totals since the source started.
    pub totals: Totals,
    /// Why the last snapshot failed; empty if it did not.
    pub last_failure: String,
    /// The background transfer over TCP; `None` if the source's upload has a fixed limit, or none.
    pub upload: Option<UploadStatus>,
}

record!(StatusReport {
    source: Name<MAX_NAME_BYTES>,
    server: Name<MAX_ADDRESS_BYTES>,
    role: Name<MAX_ADDRESS_BYTES>,
    generation: Maybe<GenerationStatus>,
    base: Base,
    preparing: Text<MAX_WHY_BYTES>,
    saving: Maybe<Saving>,
    replicas: List<ReplicaStatus, MAX_REPLICAS>,
    totals: Totals,
    last_failure: Text<MAX_TEXT_BYTES>,
    upload: Maybe<UploadStatus>,
});

/// What a background transfer does at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct UploadStatus {
    /// The rate at which it may send.
    pub bytes_per_second: u64,
    /// How long its bytes wait in the queue of the network link, in microseconds.
    pub queueing_micros: u64,
    /// Whether it sends less because others fill the link.
    pub yields: bool,
}

record!(UploadStatus { bytes_per_second: u64, queueing_micros: u64, yields: bool });

/// The generation that a source holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GenerationStatus {
    /// Its number.
    pub generation: u64,
    /// The primary's replication id.
    #[serde(serialize_with = "as_text")]
    pub replid: ReplId,
    /// Replication offset of the snapshot.
    pub offset_start: u64,
    /// Replication offset of the newest byte in the journal.
    pub offset_now: u64,
    /// Whether the snapshot is complete.
    pub state: GenerationState,
    /// Bytes of the snapshot received so far.
    pub snapshot_bytes: u64,
    /// The length of the whole snapshot, as far as it is known.
    pub length: Length,
    /// How far the capture is: the bytes that the source has received.
    #[serde(flatten)]
    pub advance: Advance,
    /// Slots in the snapshot's ring.
    pub slots: u64,
    /// Slots published so far.
    pub published_slots: u64,
    /// Slots that may be overwritten.
    pub retired_slots: u64,
    /// Whether slots are reused, so that no replica can join late.
    pub windowed: bool,
    /// Memory in use by both tables, in bytes.
    pub memory_bytes: u64,
    /// Limit of that memory, in bytes.
    pub memory_limit: u64,
    /// Seconds since the capture began.
    pub age_seconds: u64,
    /// Replication offset of the oldest byte in the journal.
    pub journal_first: u64,
    /// Replication offset after the newest byte in the journal.
    pub journal_end: u64,
    /// Duration of the capture so far, or in all once it is complete, in milliseconds.
    pub capture_millis: u64,
    /// The method of the capture, in words.
    pub capture: String,
    /// Why the server does not write small values in the fast way; empty if it does.
    pub no_fast_keys: String,
    /// Bytes that replicas on other hosts read for the slots published so far: fewer than those of the snapshot if
    /// slots are compressed.
    pub stored_bytes: u64,
    /// How slots are compressed for replicas on other hosts, and why.
    pub compression: String,
}

record!(GenerationStatus {
    generation: u64,
    replid: bounds::Text,
    offset_start: u64,
    offset_now: u64,
    state: GenerationState,
    snapshot_bytes: u64,
    length: Length,
    advance: Advance,
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
    no_fast_keys: Text<MAX_WHY_BYTES>,
    stored_bytes: u64,
    compression: Text<MAX_WHY_BYTES>,
});

/// Serializes a value as it is printed.
fn as_text<S: Serializer>(value: &ReplId, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// The state of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GenerationState {
    /// The server is still sending it.
    Capturing,
    /// All of it is in the table.
    Complete,
}

codes!(GenerationState is "state of a generation" {
    0 => Capturing,
    1 => Complete,
});

/// One replica, as the source sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplicaStatus {
    /// Its name, as it has reported it.
    pub name: String,
    /// The address that it connected from.
    pub address: String,
    /// Name of the transport it reads over; empty before it reads.
    pub transport: String,
    /// Why no better transport is used; empty if none is better.
    pub transport_why: String,
    /// Why its server does not load small values in the fast way; empty if it does, or if that is not decided yet.
    pub no_fast_keys: String,
    /// What protects the data that it reads, or before it reads what protects its conversation with the source.
    pub protection: String,
    /// What it is doing.
    pub phase: Phase,
    /// Slots of the snapshot that it holds.
    pub slots_held: u64,
    /// How far it is: the bytes of the snapshot that it holds. 1000 thousandths if it needs no more of it.
    #[serde(flatten)]
    pub advance: Advance,
    /// Bytes of the journal that its server has yet to apply.
    pub journal_lag_bytes: u64,
    /// Replication offset that its server has acknowledged.
    pub applied_offset: u64,
    /// Seconds since it joined.
    pub joined_seconds: u64,
    /// Seconds since its last message.
    pub silent_seconds: u64,
    /// Its session, which identifies it in `reads_from`.
    pub session: u64,
    /// The session of the replica that it reads slots from; `None`: the source.
    pub reads_from: Option<u64>,
    /// Whether others may read from it.
    pub serves: bool,
    /// The oldest slot that it holds for others.
    pub oldest_slot: u64,
    /// The operator's name for its location.
    pub zone: String,
}

record!(ReplicaStatus {
    name: Name<MAX_NAME_BYTES>,
    address: Name<MAX_ADDRESS_BYTES>,
    transport: Name<16>,
    transport_why: Text<MAX_WHY_BYTES>,
    no_fast_keys: Text<MAX_WHY_BYTES>,
    protection: Name<MAX_PROTECTION_BYTES>,
    phase: Phase,
    slots_held: u64,
    advance: Advance,
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

/// Totals since a source started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Totals {
    /// Snapshots taken from the server.
    pub snapshots_taken: u64,
    /// Attempts to take a snapshot that failed, before or after it began.
    pub snapshots_failed: u64,
    /// How often the server has forked for a snapshot, failed ones included.
    pub forks: u64,
    /// Replicas that finished successfully.
    pub replicas_done: u64,
    /// Bytes of tables that replicas have read.
    pub bytes_served: u64,
}

record!(Totals { snapshots_taken: u64, snapshots_failed: u64, forks: u64, replicas_done: u64, bytes_served: u64 });
