//! Flow control: the credits of both directions of a link. Pure; the link asks before it posts, and reports what
//! arrives.
//!
//! A *credit* is a receive that the peer has posted for us. Messages with bytes and rendezvous spend one. A *control
//! message*, which is a head alone, spends none: each end keeps [`CONTROL_RECEIVES`] receives for the control messages
//! of the other.
//!
//! ```text
//!   sender                                          receiver
//!   available = given − spent − back                out = given − taken − back: receives posted for the sender
//!      │ spends the last: "short" ───────────────▶  window grows, if there is memory: given += more
//!      │ ◀──────────────── credit request ─────────  another link is short of memory
//!      └ returns what it does not need: back += n ──▶ out falls: n receives are free for other links
//! ```
//!
//! Invariants, whatever arrives and in whichever order messages are written:
//!
//! - Messages under way never exceed the receives posted for them: "receiver not ready" does not occur.
//! - At most [`MAX_UNACKNOWLEDGED`] control messages of one end are unacknowledged, and one more that only
//!   acknowledges. So control messages are bounded, and two ends that wait for each other's acknowledgement both get
//!   it.
//! - At most [`MAX_RENDEZVOUS`] rendezvous are unread. The credit of a rendezvous returns at once, so this bounds what
//!   a peer makes us keep.
//! - A count that decreases or is too far ahead, and a message without a credit or beyond a bound, is a [`Violation`].

use std::collections::VecDeque;
use std::io;

use super::Chunk;

/// The credits of both directions.
#[derive(Debug)]
pub(super) struct Credits {
    // As a sender: what the peer has given us.
    received_credits: u32,
    spent: u32,
    returned: u32,
    controls_sent: u16,
    controls_acknowledged: u16,
    rendezvous_sent: u32,
    rendezvous_done: u32,
    // As a receiver: what we have given the peer.
    given: u32,
    taken: u32,
    peer_gave_back: u32,
    controls_received: u16,
    rendezvous_received: u32,
    rendezvous_read: u32,
    wants_credits: bool,
    // What of it the peer has been told.
    reported_given: u32,
    reported_back: u32,
    reported_read: u32,
    reported_controls: u16,
    reported_request: bool,
    /// The peer had no credit left when it sent its last message.
    peer_is_short: bool,
}

/// What a message of the peer means for the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Update {
    /// The peer has more to send than it has credits: give it more, if there is memory.
    pub(super) short: bool,
    /// Receives that were posted for the peer and are free now.
    pub(super) freed: u32,
    /// Rendezvous of ours, the oldest first, that the peer has read.
    pub(super) read: u32,
}

impl Credits {
    /// The state at the beginning, with the credits of both Hellos.
    pub(super) fn new(received_credits: u32, given: u32) -> Credits {
        Credits {
            received_credits,
            spent: 0,
            returned: 0,
            controls_sent: 0,
            controls_acknowledged: 0,
            rendezvous_sent: 0,
            rendezvous_done: 0,
            given,
            taken: 0,
            peer_gave_back: 0,
            controls_received: 0,
            rendezvous_received: 0,
            rendezvous_read: 0,
            wants_credits: false,
            reported_given: given,
            reported_back: 0,
            reported_read: 0,
            reported_controls: 0,
            reported_request: false,
            peer_is_short: false,
        }
    }

    /// Messages that we may send.
    pub(super) fn available(&self) -> u32 {
        self.received_credits.wrapping_sub(self.spent).wrapping_sub(self.returned)
    }

    /// Receives that are posted for the peer and not used.
    pub(super) fn out(&self) -> u32 {
        self.given.wrapping_sub(self.taken).wrapping_sub(self.peer_gave_back)
    }

    /// Whether further large pieces wait for the peer to read earlier ones. Messages would be slower.
    pub(super) fn awaits_reads(&self) -> bool {
        self.pending_rendezvous() >= MAX_RENDEZVOUS
    }

    /// Rendezvous of ours that the peer has not read.
    pub(super) fn pending_rendezvous(&self) -> u32 {
        self.rendezvous_sent.wrapping_sub(self.rendezvous_done)
    }

    /// Spends a credit for a message of that kind. There must be one.
    pub(super) fn spend(&mut self, kind: Kind) -> Head {
        debug_assert!(self.available() > 0 && kind != Kind::Control, "asked before");
        self.spent = self.spent.wrapping_add(1);
        self.rendezvous_sent = self.rendezvous_sent.wrapping_add(u32::from(kind == Kind::Rendezvous));
        self.head(kind)
    }

    /// A control message, if there is something to report that no message has carried, and a control message is
    /// allowed.
    pub(super) fn control(&mut self) -> Option<Head> {
        let unacknowledged = self.controls_sent.wrapping_sub(self.controls_acknowledged);
        let must_acknowledge = self.controls_received.wrapping_sub(self.reported_controls) >= ACKNOWLEDGE_AFTER;
        let is_due = must_acknowledge || self.must_report();
        let may = unacknowledged < MAX_UNACKNOWLEDGED || (must_acknowledge && unacknowledged == MAX_UNACKNOWLEDGED);
        if !is_due || !may {
            return None;
        }
        self.controls_sent = self.controls_sent.wrapping_add(1);
        Some(self.head(Kind::Control))
    }

    /// Whether the peer may wait for something that it has not been told.
    fn must_report(&self) -> bool {
        let unreported = self.given.wrapping_sub(self.reported_given);
        let has = self.out().wrapping_sub(unreported);
        let is_much = unreported > 0 && (self.peer_is_short || has <= unreported);
        is_much
            || self.reported_read != self.rendezvous_read
            || self.reported_back != self.returned
            || self.reported_request != self.wants_credits
    }

    fn head(&mut self, kind: Kind) -> Head {
        if self.reported_given != self.given {
            self.peer_is_short = false;
        }
        self.reported_given = self.given;
        self.reported_back = self.returned;
        self.reported_read = self.rendezvous_read;
        self.reported_controls = self.controls_received;
        self.reported_request = self.wants_credits;
        Head {
            kind,
            short: self.available() == 0,
            request_credits: self.wants_credits,
            controls_received: self.controls_received,
            given: self.given,
            back: self.returned,
            read: self.rendezvous_read,
        }
    }

    /// Handles the head of a received message. A violation changes nothing.
    pub(super) fn receive_message(&mut self, head: &Head) -> Result<Update, Violation> {
        let more = head.given.wrapping_sub(self.received_credits);
        let back = head.back.wrapping_sub(self.peer_gave_back);
        let read = head.read.wrapping_sub(self.rendezvous_done);
        let heard = head.controls_received.wrapping_sub(self.controls_acknowledged);
        let is_word = head.kind == Kind::Control;
        let is_offer = head.kind == Kind::Rendezvous;
        let (available, pending_rendezvous) = (self.available(), self.pending_rendezvous());
        let unacknowledged = self.controls_sent.wrapping_sub(self.controls_acknowledged);
        // The peer knows at most what it has been told.
        let unreported_controls = self.controls_received.wrapping_sub(self.reported_controls);
        let unreported_rendezvous = self.rendezvous_received.wrapping_sub(self.reported_read);
        let out = self.out().checked_sub(u32::from(!is_word)).ok_or(Violation::NoCredit)?;
        let sound = |is_sound: bool, violation: Violation| if is_sound { Ok(()) } else { Err(violation) };
        sound(more <= MAX_CREDITS && available + more <= MAX_CREDITS, Violation::Given(more, available))?;
        sound(back <= out, Violation::Back(back, out))?;
        sound(read <= pending_rendezvous, Violation::Read(read, pending_rendezvous))?;
        sound(heard <= unacknowledged, Violation::Acknowledged(heard, unacknowledged))?;
        sound(
            !is_word || unreported_controls < CONTROL_RECEIVES as u16,
            Violation::TooManyControls(unreported_controls),
        )?;
        sound(
            !is_offer || unreported_rendezvous < MAX_RENDEZVOUS,
            Violation::TooManyRendezvous(unreported_rendezvous),
        )?;
        self.received_credits = head.given;
        self.peer_gave_back = head.back;
        self.rendezvous_done = head.read;
        self.controls_acknowledged = head.controls_received;
        self.taken = self.taken.wrapping_add(u32::from(!is_word));
        self.controls_received = self.controls_received.wrapping_add(u16::from(is_word));
        self.rendezvous_received = self.rendezvous_received.wrapping_add(u32::from(is_offer));
        self.peer_is_short |= head.short;
        if head.request_credits {
            self.give_back();
        }
        Ok(Update { short: head.short, freed: back, read })
    }

    /// Notes that `more` receives are posted for the peer.
    pub(super) fn give(&mut self, more: u32) {
        self.given = self.given.wrapping_add(more);
    }

    /// Notes that a rendezvous of the peer is read.
    pub(super) fn finish_read(&mut self) {
        self.rendezvous_read = self.rendezvous_read.wrapping_add(1);
    }

    /// Sets whether to ask the peer for unused credits.
    pub(super) fn request_credits(&mut self, wanted: bool) {
        self.wants_credits = wanted;
    }

    fn give_back(&mut self) {
        let unneeded = self.available().saturating_sub(KEPT_CREDITS);
        self.returned = self.returned.wrapping_add(unneeded);
    }
}

/// Control messages of one end that the other may not have acknowledged.
const MAX_UNACKNOWLEDGED: u16 = 4;

/// After this many control messages one is sent to acknowledge them, if no other message has.
const ACKNOWLEDGE_AFTER: u16 = 2;

/// Receives that each end keeps posted for the other's control messages: the unacknowledged ones, and one that
/// acknowledges.
pub(super) const CONTROL_RECEIVES: u32 = MAX_UNACKNOWLEDGED as u32 + 1;

/// Rendezvous of one end that the other may not have read; part of the protocol: a megabyte under way.
pub(super) const MAX_RENDEZVOUS: u32 = 4;

/// Credits that an end keeps when it is asked to return them: enough to send something at once.
const KEPT_CREDITS: u32 = 2;

// What has arrived on a link and was not received by its owner, in the order of the stream.

/// The pieces of the stream that the owner has not received.
#[derive(Default)]
pub(super) struct Arrivals {
    pieces: VecDeque<Piece>,
    /// READs under way.
    reads: u32,
}

/// A piece of the stream.
enum Piece {
    /// Bytes `at..end` of a message.
    Message { chunk: Chunk, at: u32, end: u32 },
    /// The peer has announced the bytes; the READ is not posted.
    Rendezvous(Rendezvous),
    /// The READ is under way.
    Reading { length: u32 },
    /// Bytes `at..end` of what was read.
    Read { chunk: Chunk, at: u32, end: u32 },
}

/// The place of an announced piece.
pub(super) struct Place(usize);

impl Arrivals {
    /// Bytes `at..end` of a message have arrived.
    pub(super) fn push_message(&mut self, chunk: Chunk, at: u32, end: u32) {
        self.pieces.push_back(Piece::Message { chunk, at, end });
    }

    /// The peer has announced a piece.
    pub(super) fn announce(&mut self, rendezvous: Rendezvous) {
        self.pieces.push_back(Piece::Rendezvous(rendezvous));
    }

    /// The next announced piece; `None` if there is none, or if the link has reached its limits of READs and of memory.
    pub(super) fn next_announced(&self) -> Option<(Place, Rendezvous)> {
        if self.reads >= MAX_READS {
            return None;
        }
        let announced = |(at, piece): (usize, &Piece)| match piece {
            Piece::Rendezvous(rendezvous) => Some((Place(at), *rendezvous)),
            _ => None,
        };
        let found = self.pieces.iter().enumerate().find_map(announced)?;
        let held = |piece: &&Piece| matches!(piece, Piece::Reading { .. } | Piece::Read { .. });
        (self.pieces.iter().filter(held).count() < MAX_READ_PIECES).then_some(found)
    }

    /// The READ of the piece at that place was posted.
    pub(super) fn begin_read(&mut self, Place(at): Place) {
        if let Some(piece) = self.pieces.get_mut(at)
            && let Piece::Rendezvous(rendezvous) = *piece
        {
            *piece = Piece::Reading { length: rendezvous.length };
            self.reads += 1;
        }
    }

    /// The oldest READ is complete. Returns whether one was under way.
    pub(super) fn finish_read(&mut self, chunk: Chunk) -> bool {
        let mut reading = self.pieces.iter_mut().filter(|piece| matches!(piece, Piece::Reading { .. }));
        let Some(piece) = reading.next() else { return false };
        if let Piece::Reading { length } = *piece {
            *piece = Piece::Read { chunk, at: 0, end: length };
            self.reads -= 1;
        }
        true
    }

    /// Copies bytes out of the first piece. Returns how many, and the memory of a message that is received whole.
    pub(super) fn copy(&mut self, into: &mut [u8]) -> io::Result<(usize, Option<Chunk>)> {
        let (chunk, at, end) = match self.pieces.front_mut() {
            Some(Piece::Message { chunk, at, end } | Piece::Read { chunk, at, end }) => (chunk, at, end),
            _ => return Ok((0, None)),
        };
        let count = into.len().min((*end - *at) as usize);
        chunk.region().memory().read(chunk.offset() + u64::from(*at), &mut into[..count])?;
        *at += count as u32;
        if *at == *end
            && let Some(Piece::Message { chunk, .. }) = self.pieces.pop_front()
        {
            return Ok((count, Some(chunk)));
        }
        Ok((count, None))
    }

    /// Whether there are bytes to receive.
    pub(super) fn are_here(&self) -> bool {
        matches!(self.pieces.front(), Some(Piece::Message { .. } | Piece::Read { .. }))
    }

    /// Number of messages whose memory is held.
    pub(super) fn messages(&self) -> u32 {
        self.pieces.iter().filter(|piece| matches!(piece, Piece::Message { .. })).count() as u32
    }

    /// Gives all memory back.
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
    }
}

/// READs under way per link: enough that one is under way while another is copied out.
const MAX_READS: u32 = 4;

/// Pieces per link that are read or being read, and not yet received by the owner: 2 MiB. An owner that receives
/// nothing must not take the memory that other links read into.
const MAX_READ_PIECES: usize = 8;

// The bytes that two ends of an RDMA link exchange. Pure.
//
// A *message* is one SEND: a head of 16 bytes, then what its kind says.
//
// | at | bytes | what |
// |---|---|---|
// | 0 | 1 | kind: 0 bytes of the stream, 1 a rendezvous, 2 a control message (the head alone) |
// | 1 | 1 | flags: bit 0, the sender has no credit left; bit 1, it asks for unused credits (a credit request) |
// | 2 | 2 | control messages received, modulo 65536 |
// | 4 | 4 | credits given to the receiver of this message |
// | 8 | 4 | credits that its sender returns unused |
// | 12 | 4 | rendezvous that its sender has read |
//
// All counts are totals of the link, modulo their width: the newest message replaces all earlier ones. A rendezvous
// continues with the key (4), the length (4) and the address (8) of bytes of the stream, which the receiver reads.
//
// The *Hello* is part of the connect and of its answer: `RMsgRdm` and the version, 1; the size of a message, 4; the
// first credits, 4.
//
// Any protocol violation by the peer is a [`Violation`].

/// The head of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Head {
    pub(super) kind: Kind,
    /// The sender has no credit left, and may have more to send.
    pub(super) short: bool,
    /// The sender asks for unused credits.
    pub(super) request_credits: bool,
    pub(super) controls_received: u16,
    pub(super) given: u32,
    pub(super) back: u32,
    pub(super) read: u32,
}

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Kind {
    Bytes,
    Rendezvous,
    #[default]
    Control,
}

/// What follows the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// Bytes of the stream, from [`HEAD_BYTES`] to the message's end.
    Bytes,
    Rendezvous(Rendezvous),
    Control,
}

/// Where bytes of the stream are, for the peer to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rendezvous {
    pub(super) key: u32,
    pub(super) length: u32,
    pub(super) address: u64,
}

/// The private data of the connect and of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// Size of the sender's receive buffers, in bytes: the longest message that it accepts, head included.
    pub(super) message_bytes: u32,
    /// The credits that the receiver has at the beginning.
    pub(super) credits: u32,
}

/// A violation of the protocol by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    // In a Hello.
    #[error("its Hello is of another protocol or version")]
    Hello,
    #[error("it accepts messages of {0} bytes; the minimum is {MIN_MESSAGE_BYTES}")]
    MessageBytes(u32),
    #[error("it gives {0} credits at the beginning; the limit is {MAX_CREDITS}")]
    FirstCredits(u32),

    // In a message by itself.
    #[error("a message of {0} bytes is shorter than a head")]
    NoHead(u32),
    #[error("a message of unknown kind {0}")]
    Kind(u8),
    #[error("a message with unknown flags {0:#04x}")]
    Flags(u8),
    #[error("a control message of {0} bytes; it must be a head alone")]
    ControlBytes(u32),
    #[error("a rendezvous in a message of {0} bytes; it must have {START_BYTES}")]
    RendezvousBytes(u32),
    #[error("a rendezvous of {0} bytes; the limit is {MAX_RENDEZVOUS_BYTES}, and the minimum 1")]
    RendezvousLength(u32),

    // In the sequence of messages. Counts are the increase since the last message.
    #[error("it gives {0} credits more to our {1}; the limit is {MAX_CREDITS}")]
    Given(u32, u32),
    #[error("it returns {0} credits, but has only {1}")]
    Back(u32, u32),
    #[error("it has read {0} rendezvous, but only {1} are unread")]
    Read(u32, u32),
    #[error("it acknowledges {0} control messages, but only {1} are outstanding")]
    Acknowledged(u16, u16),
    #[error("a message without a credit")]
    NoCredit,
    #[error("a rendezvous while {0} are unread")]
    TooManyRendezvous(u32),
    #[error("a control message while {0} are unacknowledged")]
    TooManyControls(u16),
}

/// Decodes a message of `length` bytes, of which `start` are the first. Bytes after its end are ignored.
pub(super) fn open(start: &[u8; START_BYTES], length: u32) -> Result<(Head, Body), Violation> {
    if (length as usize) < HEAD_BYTES {
        return Err(Violation::NoHead(length));
    }
    let (mut head, mut behind) = ([0; HEAD_BYTES], [0; RENDEZVOUS_BYTES]);
    head.copy_from_slice(&start[..HEAD_BYTES]);
    behind.copy_from_slice(&start[HEAD_BYTES..]);
    let head = Head::decode(&head)?;
    let body = match head.kind {
        Kind::Bytes => Body::Bytes,
        Kind::Control if length as usize == HEAD_BYTES => Body::Control,
        Kind::Control => return Err(Violation::ControlBytes(length)),
        Kind::Rendezvous if length as usize == START_BYTES => Body::Rendezvous(Rendezvous::decode(&behind)),
        Kind::Rendezvous => return Err(Violation::RendezvousBytes(length)),
    };
    match body {
        Body::Rendezvous(rendezvous) if !(1..=MAX_RENDEZVOUS_BYTES).contains(&rendezvous.length) => {
            Err(Violation::RendezvousLength(rendezvous.length))
        }
        body => Ok((head, body)),
    }
}

impl Head {
    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[0] = match self.kind {
            Kind::Bytes => 0,
            Kind::Rendezvous => 1,
            Kind::Control => 2,
        };
        bytes[1] = u8::from(self.short) * SHORT + u8::from(self.request_credits) * CREDIT_REQUEST;
        bytes[2..4].copy_from_slice(&self.controls_received.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.given.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.back.to_le_bytes());
        bytes[12..].copy_from_slice(&self.read.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Head, Violation> {
        let kind = match bytes[0] {
            0 => Kind::Bytes,
            1 => Kind::Rendezvous,
            2 => Kind::Control,
            other => return Err(Violation::Kind(other)),
        };
        if bytes[1] & !(SHORT | CREDIT_REQUEST) != 0 {
            return Err(Violation::Flags(bytes[1]));
        }
        Ok(Head {
            kind,
            short: bytes[1] & SHORT != 0,
            request_credits: bytes[1] & CREDIT_REQUEST != 0,
            controls_received: u16::from_le_bytes([bytes[2], bytes[3]]),
            given: u32_at(bytes, 4),
            back: u32_at(bytes, 8),
            read: u32_at(bytes, 12),
        })
    }
}

impl Rendezvous {
    pub(super) fn encode(&self) -> [u8; RENDEZVOUS_BYTES] {
        let mut bytes = [0; RENDEZVOUS_BYTES];
        bytes[..4].copy_from_slice(&self.key.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..].copy_from_slice(&self.address.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; RENDEZVOUS_BYTES]) -> Rendezvous {
        let address = u64::from(u32_at(bytes, 8)) | u64::from(u32_at(bytes, 12)) << 32;
        Rendezvous { key: u32_at(bytes, 0), length: u32_at(bytes, 4), address }
    }
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.message_bytes.to_le_bytes());
        bytes[12..].copy_from_slice(&self.credits.to_le_bytes());
        bytes
    }

    /// The connection manager pads the private data with zeros, so bytes may follow.
    pub(super) fn decode(bytes: &[u8]) -> Result<Hello, Violation> {
        let bytes = bytes.first_chunk::<HELLO_BYTES>().filter(|bytes| bytes[..8] == MAGIC).ok_or(Violation::Hello)?;
        let hello = Hello { message_bytes: u32_at(bytes, 8), credits: u32_at(bytes, 12) };
        if hello.message_bytes < MIN_MESSAGE_BYTES {
            return Err(Violation::MessageBytes(hello.message_bytes));
        }
        if hello.credits > MAX_CREDITS {
            return Err(Violation::FirstCredits(hello.credits));
        }
        Ok(hello)
    }
}

fn u32_at(bytes: &[u8; 16], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(super) const HEAD_BYTES: usize = 16;
pub(super) const RENDEZVOUS_BYTES: usize = 16;
pub(super) const HELLO_BYTES: usize = 16;

/// The part of a message that says what it is.
pub(super) const START_BYTES: usize = HEAD_BYTES + RENDEZVOUS_BYTES;

/// The smallest messages that an end may accept: a rendezvous and a handshake's frame fit.
const MIN_MESSAGE_BYTES: u32 = 256;

/// No end gives more credits than this.
pub(super) const MAX_CREDITS: u32 = 4096;

/// The longest rendezvous, in bytes; part of the protocol. Large enough that the round trip of a READ is small beside
/// it, and small enough that several are under way for one message.
pub(super) const MAX_RENDEZVOUS_BYTES: u32 = 256 << 10;

const MAGIC: [u8; 8] = *b"RMsgRdm\x01";
const SHORT: u8 = 1;
const CREDIT_REQUEST: u8 = 2;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// One end of a simulated link: its credits, the messages on their way to it, and what it holds.
    struct End {
        credits: Credits,
        coming: VecDeque<Head>,
        /// Receives posted for messages and for control messages. A message uses one of them when it arrives.
        message_room: u32,
        control_room: u32,
        held: u32,
        to_send: u32,
        arrived: u32,
        window: u32,
    }

    impl End {
        fn new(window: u32) -> End {
            End {
                credits: Credits::new(window, window),
                coming: VecDeque::new(),
                message_room: window,
                control_room: CONTROL_RECEIVES,
                held: 0,
                to_send: 0,
                arrived: 0,
                window,
            }
        }

        fn send(&mut self, to: &mut End) {
            while self.to_send > 0 && self.credits.available() > 0 {
                self.to_send -= 1;
                to.coming.push_back(self.credits.spend(Kind::Bytes));
            }
            while let Some(control) = self.credits.control() {
                to.coming.push_back(control);
            }
        }

        fn receive(&mut self) {
            let Some(head) = self.coming.pop_front() else { return };
            // A message uses a receive when it arrives. There must be one, whichever kind it was posted for.
            assert!(self.message_room + self.control_room > 0, "receiver not ready");
            if head.kind == Kind::Control {
                self.control_room = self.control_room.checked_sub(1).expect("more controls than room");
            } else {
                self.message_room = self.message_room.checked_sub(1).expect("more messages than credits");
                self.held += 1;
                self.arrived += 1;
            }
            let update = self.credits.receive_message(&head).unwrap();
            if head.kind == Kind::Control {
                self.control_room += 1; // read and posted again at once
            }
            self.message_room -= update.freed;
            self.window -= update.freed;
            if update.short && self.window < 32 {
                self.window += 1;
                self.message_room += 1;
                self.credits.give(1);
            }
        }

        fn consume(&mut self, count: u32) {
            let count = count.min(self.held);
            self.held -= count;
            self.message_room += count;
            self.credits.give(count);
        }
    }

    #[derive(Debug, Clone)]
    enum Event {
        Send { end: usize, count: u32 },
        Deliver { end: usize, count: u32 },
        Consume { end: usize, count: u32 },
        Ease { end: usize, wanted: bool },
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            (0usize..2, 0u32..20).prop_map(|(end, count)| Event::Send { end, count }),
            (0usize..2, 0u32..20).prop_map(|(end, count)| Event::Deliver { end, count }),
            (0usize..2, 0u32..20).prop_map(|(end, count)| Event::Consume { end, count }),
            (0usize..2, any::<bool>()).prop_map(|(end, wanted)| Event::Ease { end, wanted }),
        ];
        proptest::collection::vec(event, 0..200)
    }

    fn speak(ends: &mut [End; 2]) {
        let [one, other] = ends;
        one.send(other);
        other.send(one);
    }

    proptest! {
        #[test]
        fn whatever_happens_no_receiver_is_overrun_and_in_the_end_everything_has_arrived(
            windows in (1u32..12, 1u32..12),
            events in events(),
        ) {
            let mut ends = [End::new(windows.0), End::new(windows.1)];
            ends[0].credits = Credits::new(windows.1, windows.0);
            ends[1].credits = Credits::new(windows.0, windows.1);
            let mut sent = [0, 0];
            for event in events {
                match event {
                    Event::Send { end, count } => {
                        ends[end].to_send += count;
                        sent[end] += count;
                    }
                    Event::Deliver { end, count } => (0..count).for_each(|_| ends[end].receive()),
                    Event::Consume { end, count } => ends[end].consume(count),
                    Event::Ease { end, wanted } => ends[end].credits.request_credits(wanted),
                }
                speak(&mut ends);
            }
            // Both ends read on: traffic ends, and everything has arrived.
            for _ in 0..10_000 {
                for end in &mut ends {
                    (0..8).for_each(|_| end.receive());
                    end.consume(u32::MAX);
                }
                speak(&mut ends);
            }
            prop_assert_eq!(ends[0].arrived, sent[1]);
            prop_assert_eq!(ends[1].arrived, sent[0]);
            prop_assert!(ends.iter().all(|end| end.coming.is_empty()), "controls without end");
        }

        #[test]
        fn no_head_makes_us_count_beyond_all_bounds(heads in proptest::collection::vec(any::<[u8; 16]>(), 1..50)) {
            let mut credits = Credits::new(8, 8);
            for bytes in heads {
                if let Ok(head) = Head::decode(&bytes)
                    && credits.receive_message(&head).is_err()
                {
                    break;
                }
                prop_assert!(credits.available() <= MAX_CREDITS && credits.out() <= 8);
            }
        }
    }

    #[test]
    fn a_peer_that_returns_more_credits_than_it_has_is_a_violation() {
        for (kind, back) in [(Kind::Bytes, u32::MAX), (Kind::Bytes, 8), (Kind::Control, 9), (Kind::Control, u32::MAX)] {
            let head = |back| Head { kind, back, given: 8, ..Head::default() };
            assert!(Credits::new(8, 8).receive_message(&head(back)).is_err(), "{kind:?} that gives back {back} of 8");
            assert!(Credits::new(8, 8).receive_message(&head(7)).is_ok(), "{kind:?} that gives back 7 of 8");
        }
    }

    #[test]
    fn an_end_returns_all_but_a_few_credits_on_request() {
        let (mut sender, mut receiver) = (Credits::new(20, 4), Credits::new(4, 20));
        receiver.request_credits(true);
        let asks = receiver.control().unwrap();
        assert!(asks.request_credits);
        sender.receive_message(&asks).unwrap();
        assert_eq!(sender.available(), KEPT_CREDITS);
        let answer = sender.control().unwrap();
        assert_eq!(receiver.receive_message(&answer).unwrap().freed, 20 - KEPT_CREDITS);
        assert_eq!(receiver.out(), KEPT_CREDITS);
    }

    #[test]
    fn a_rendezvous_counts_as_read_once_the_peer_reports_it() {
        let (mut sender, mut receiver) = (Credits::new(4, 4), Credits::new(4, 4));
        let rendezvous = sender.spend(Kind::Rendezvous);
        receiver.receive_message(&rendezvous).unwrap();
        assert_eq!(sender.pending_rendezvous(), 1);
        receiver.finish_read();
        let control = receiver.control().unwrap();
        assert_eq!(sender.receive_message(&control).unwrap().read, 1);
        assert_eq!(sender.pending_rendezvous(), 0);
        assert!(sender.receive_message(&Head { read: 2, ..control }).is_err());
    }

    #[test]
    fn a_violation_is_named_and_changes_nothing() {
        let mut credits = Credits::new(8, 2);
        let head = |kind, given| Head { kind, given, ..Head::default() };
        let violation = |credits: &mut Credits, head: Head| {
            let (available, out) = (credits.available(), credits.out());
            let violation = credits.receive_message(&head).unwrap_err();
            assert_eq!((credits.available(), credits.out()), (available, out), "{violation}");
            violation
        };
        assert_eq!(violation(&mut credits, head(Kind::Control, 7)), Violation::Given(u32::MAX, 8));
        assert_eq!(violation(&mut credits, head(Kind::Control, MAX_CREDITS + 1)), Violation::Given(MAX_CREDITS - 7, 8));
        assert_eq!(violation(&mut credits, Head { back: 2, ..head(Kind::Bytes, 8) }), Violation::Back(2, 1));
        assert_eq!(violation(&mut credits, Head { read: 1, ..head(Kind::Control, 8) }), Violation::Read(1, 0));
        assert_eq!(
            violation(&mut credits, Head { controls_received: 1, ..head(Kind::Control, 8) }),
            Violation::Acknowledged(1, 0)
        );
        (0..2).for_each(|_| assert!(credits.receive_message(&head(Kind::Bytes, 8)).is_ok()));
        assert_eq!(violation(&mut credits, head(Kind::Bytes, 8)), Violation::NoCredit);
    }

    /// Control messages cost no credit, and the credit of a rendezvous returns at once: without bounds of their own
    /// both would be unlimited.
    #[test]
    fn control_messages_and_rendezvous_beyond_their_bounds_are_violations() {
        let mut credits = Credits::new(8, 8);
        let head = |kind| Head { kind, given: 8, ..Head::default() };
        (0..CONTROL_RECEIVES).for_each(|_| assert!(credits.receive_message(&head(Kind::Control)).is_ok()));
        assert_eq!(credits.receive_message(&head(Kind::Control)), Err(Violation::TooManyControls(5)));
        assert_eq!(credits.control().unwrap().controls_received, 5);
        assert!(credits.receive_message(&head(Kind::Control)).is_ok());
        for _ in 0..MAX_RENDEZVOUS {
            assert!(credits.receive_message(&head(Kind::Rendezvous)).is_ok());
            credits.give(1);
        }
        assert_eq!(credits.receive_message(&head(Kind::Rendezvous)), Err(Violation::TooManyRendezvous(4)));
        credits.finish_read();
        assert!(credits.receive_message(&head(Kind::Rendezvous)).is_err(), "read, but the peer can't know");
        credits.spend(Kind::Bytes);
        assert!(credits.receive_message(&head(Kind::Rendezvous)).is_ok());
    }

    proptest! {
        #[test]
        fn heads_arrive_as_they_were_sent(kind in 0u8..3, short: bool, request_credits: bool, controls_received: u16, counts: [u32; 3]) {
            let kind = [Kind::Bytes, Kind::Rendezvous, Kind::Control][usize::from(kind)];
            let [given, back, read] = counts;
            let head = Head { kind, short, request_credits, controls_received, given, back, read };
            prop_assert_eq!(Head::decode(&head.encode()), Ok(head));
        }

        #[test]
        fn any_bytes_are_a_head_that_encodes_to_them_or_a_violation(bytes: [u8; HEAD_BYTES]) {
            if let Ok(head) = Head::decode(&bytes) {
                prop_assert_eq!(head.encode(), bytes);
            }
        }

        #[test]
        fn offers_arrive_as_they_were_sent(key: u32, length: u32, address: u64) {
            let rendezvous = Rendezvous { key, length, address };
            prop_assert_eq!(Rendezvous::decode(&rendezvous.encode()), rendezvous);
        }

        #[test]
        fn a_hello_that_is_not_ours_or_makes_no_sense_is_wrong(message_bytes: u32, credits: u32, violation in 0usize..8) {
            let mut bytes = Hello { message_bytes, credits }.encode();
            let is_sound = message_bytes >= MIN_MESSAGE_BYTES && credits <= MAX_CREDITS;
            prop_assert_eq!(Hello::decode(&bytes).is_ok(), is_sound);
            bytes[violation] ^= 1;
            prop_assert_eq!(Hello::decode(&bytes), Err(Violation::Hello));
        }
    }

    #[test]
    fn a_violation_in_a_message_is_named() {
        let start = |kind: u8, flags: u8, length: u32| {
            let mut start = [0; START_BYTES];
            (start[0], start[1]) = (kind, flags);
            start[HEAD_BYTES..].copy_from_slice(&Rendezvous { key: 1, length, address: 2 }.encode());
            start
        };
        let violation =
            |kind, flags, announced, length| open(&start(kind, flags, announced), length).unwrap_err().to_string();
        assert_eq!(violation(0, 0, 1, 15), "a message of 15 bytes is shorter than a head");
        assert_eq!(violation(3, 0, 1, 16), "a message of unknown kind 3");
        assert_eq!(violation(0, 4, 1, 16), "a message with unknown flags 0x04");
        assert_eq!(violation(2, 0, 1, 17), "a control message of 17 bytes; it must be a head alone");
        assert_eq!(violation(1, 0, 1, 33), "a rendezvous in a message of 33 bytes; it must have 32");
        assert_eq!(violation(1, 0, 0, 32), "a rendezvous of 0 bytes; the limit is 262144, and the minimum 1");
        assert_eq!(
            violation(1, 0, MAX_RENDEZVOUS_BYTES + 1, 32),
            "a rendezvous of 262145 bytes; the limit is 262144, and the minimum 1"
        );
        assert!(open(&start(1, 3, MAX_RENDEZVOUS_BYTES), 32).is_ok() && open(&start(0, 0, 0), 8192).is_ok());
    }
}
