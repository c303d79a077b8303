//! What two ends of an RDMA link say to each other, as bytes. Pure.
//!
//! A *letter* is one SEND: a head of 16 bytes, then what its kind says.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 1 | kind: 0 bytes of the stream, 1 an offer, 2 a word (the head alone) |
//! | 1 | 1 | flags: bit 0, the sender has no credit left; bit 1, it asks for unused credits back |
//! | 2 | 2 | words heard, modulo 65536 |
//! | 4 | 4 | credits given to the receiver of this letter |
//! | 8 | 4 | credits that its sender gives back unused |
//! | 12 | 4 | offers that its sender has read |
//!
//! All counts are since the link began, modulo their width, so that the newest letter makes all before it superfluous.
//! An offer goes on with the key (4), the length (4) and the address (8) of bytes of the stream that are to be read.
//!
//! The *hello* goes with the call and its answer: `RMsgRdm` and the version, 1; the bytes of a letter, 4; the first credits, 4.
//!
//! Whatever a peer says that no peer of ours would is [`Violation`], which says what it was.

/// The head of a letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Head {
    pub(super) kind: Kind,
    /// The sender has no credit left, and may have more to say.
    pub(super) short: bool,
    /// The sender asks for credits back.
    pub(super) request_credits: bool,
    pub(super) controls_received: u16,
    pub(super) given: u32,
    pub(super) back: u32,
    pub(super) read: u32,
}

/// What a letter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Kind {
    Bytes,
    Rendezvous,
    #[default]
    Control,
}

/// What stands behind the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// From [`HEAD_BYTES`] to the letter's end.
    Bytes,
    Rendezvous(Rendezvous),
    Control,
}

/// Where bytes of the stream lie, to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rendezvous {
    pub(super) key: u32,
    pub(super) length: u32,
    pub(super) address: u64,
}

/// The words of the call and of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// The longest letter that the speaker has room for, head included.
    pub(super) message_bytes: u32,
    /// The credits that the listener has from the beginning.
    pub(super) credits: u32,
}

/// What a peer says that no peer of ours would.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    // -- Hellos. --
    #[error("it does not greet as we do, or in another version")]
    Hello,
    #[error("it has room for messages of {0} bytes, which is less than {MIN_MESSAGE_BYTES}")]
    MessageBytes(u32),
    #[error("it gives {0} credits at the beginning, which is more than {MAX_CREDITS}")]
    FirstCredits(u32),

    // -- Letters by themselves. --
    #[error("a message of {0} bytes, less than a head")]
    NoHead(u32),
    #[error("a message of kind {0}")]
    Kind(u8),
    #[error("a message with the flags {0:#04x}")]
    Flags(u8),
    #[error("a u32_at of {0} bytes, where it is a head alone")]
    ControlBytes(u32),
    #[error("an rendezvous in a message of {0} bytes")]
    RendezvousBytes(u32),
    #[error("an rendezvous of {0} bytes, where 1 to {MAX_RENDEZVOUS_BYTES} may be")]
    RendezvousLength(u32),

    // -- Letters after those before them; the numbers are what is more than the last time. --
    #[error("it gives {0} credits where we have {1}, and more than {MAX_CREDITS} nobody gives")]
    Given(u32, u32),
    #[error("it gives back {0} credits where it has {1}")]
    Back(u32, u32),
    #[error("it has read {0} pending_rendezvous where {1} are unread")]
    Read(u32, u32),
    #[error("it has heard {0} controls where {1} are unacknowledged")]
    Acknowledged(u16, u16),
    #[error("a message that it had no credit for")]
    NoCredit,
    #[error("an rendezvous while {0} are unread")]
    TooManyRendezvous(u32),
    #[error("a u32_at while {0} are unacknowledged")]
    TooManyControls(u16),
}

/// Opens a letter of so many bytes, of which these are the first; what is behind its end is not looked at.
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

    /// The connection manager fills up with zeros, so that more may follow.
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

/// As much of a letter as has to be looked at before one knows what it is.
pub(super) const START_BYTES: usize = HEAD_BYTES + RENDEZVOUS_BYTES;

/// The shortest letters that anybody may have room for: an offer and some greeting fit.
pub(super) const MIN_MESSAGE_BYTES: u32 = 256;

/// More credits than this nobody gives: a peer that says so does not count as we do.
pub(super) const MAX_CREDITS: u32 = 4096;

/// The longest piece of the stream that is offered and read at once, part of the protocol: large enough that a READ's round trip
/// is little beside it, small enough that several are under way in one message.
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
        fn any_head_is_one_or_wrong_and_says_itself_again(bytes: [u8; HEAD_BYTES]) {
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
    fn what_is_wrong_with_a_letter_is_named() {
        let start = |kind: u8, flags: u8, length: u32| {
            let mut start = [0; START_BYTES];
            (start[0], start[1]) = (kind, flags);
            start[HEAD_BYTES..].copy_from_slice(&Rendezvous { key: 1, length, address: 2 }.encode());
            start
        };
        let violation =
            |kind, flags, announced, length| open(&start(kind, flags, announced), length).unwrap_err().to_string();
        assert_eq!(violation(0, 0, 1, 15), "a message of 15 bytes, less than a head");
        assert_eq!(violation(3, 0, 1, 16), "a message of kind 3");
        assert_eq!(violation(0, 4, 1, 16), "a message with the flags 0x04");
        assert_eq!(violation(2, 0, 1, 17), "a u32_at of 17 bytes, where it is a head alone");
        assert_eq!(violation(1, 0, 1, 33), "an rendezvous in a message of 33 bytes");
        assert_eq!(violation(1, 0, 0, 32), "an rendezvous of 0 bytes, where 1 to 262144 may be");
        assert_eq!(
            violation(1, 0, MAX_RENDEZVOUS_BYTES + 1, 32),
            "an rendezvous of 262145 bytes, where 1 to 262144 may be"
        );
        assert!(open(&start(1, 3, MAX_RENDEZVOUS_BYTES), 32).is_ok() && open(&start(0, 0, 0), 8192).is_ok());
    }
}
