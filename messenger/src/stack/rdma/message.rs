//! The bytes that two ends of an RDMA link exchange. Pure.
//!
//! A *message* is one SEND: a head of 16 bytes, then what its kind says.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 1 | kind: 0 bytes of the stream, 1 a rendezvous, 2 a control message (the head alone) |
//! | 1 | 1 | flags: bit 0, the sender has no credit left; bit 1, it asks for unused credits (a credit request) |
//! | 2 | 2 | control messages received, modulo 65536 |
//! | 4 | 4 | credits given to the receiver of this message |
//! | 8 | 4 | credits that its sender returns unused |
//! | 12 | 4 | rendezvous that its sender has read |
//!
//! All counts are totals of the link, modulo their width: the newest message replaces all earlier ones. A rendezvous
//! continues with the key (4), the length (4) and the address (8) of bytes of the stream, which the receiver reads.
//!
//! The *Hello* is part of the connect and of its answer: `RMsgRdm` and the version, 1; the size of a message, 4; the
//! first credits, 4.
//!
//! Any protocol violation by the peer is a [`Violation`].

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
pub(super) const MIN_MESSAGE_BYTES: u32 = 256;

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

    use proptest::prelude::*;

    use super::*;

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
