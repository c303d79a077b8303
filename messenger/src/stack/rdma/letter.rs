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

/// The head of a letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Head {
    pub(super) kind: Kind,
    /// The sender has no credit left, and may have more to say.
    pub(super) short: bool,
    /// The sender asks for credits back.
    pub(super) ease: bool,
    pub(super) words_heard: u16,
    pub(super) given: u32,
    pub(super) back: u32,
    pub(super) read: u32,
}

/// What a letter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Kind {
    Bytes,
    Offer,
    #[default]
    Word,
}

/// Where bytes of the stream lie, to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) key: u32,
    pub(super) length: u32,
    pub(super) address: u64,
}

/// The words of the call and of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// The longest letter that the speaker has room for, head included.
    pub(super) letter_bytes: u32,
    /// The credits that the listener has from the beginning.
    pub(super) credits: u32,
}

impl Head {
    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[0] = match self.kind {
            Kind::Bytes => 0,
            Kind::Offer => 1,
            Kind::Word => 2,
        };
        bytes[1] = u8::from(self.short) * SHORT + u8::from(self.ease) * EASE;
        bytes[2..4].copy_from_slice(&self.words_heard.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.given.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.back.to_le_bytes());
        bytes[12..].copy_from_slice(&self.read.to_le_bytes());
        bytes
    }

    /// `None`: no peer of ours says this.
    pub(super) fn decode(bytes: &[u8; HEAD_BYTES]) -> Option<Head> {
        let kind = match bytes[0] {
            0 => Kind::Bytes,
            1 => Kind::Offer,
            2 => Kind::Word,
            _ => return None,
        };
        if bytes[1] & !(SHORT | EASE) != 0 {
            return None;
        }
        Some(Head {
            kind,
            short: bytes[1] & SHORT != 0,
            ease: bytes[1] & EASE != 0,
            words_heard: u16::from_le_bytes([bytes[2], bytes[3]]),
            given: word(bytes, 4),
            back: word(bytes, 8),
            read: word(bytes, 12),
        })
    }
}

impl Offer {
    pub(super) fn encode(&self) -> [u8; OFFER_BYTES] {
        let mut bytes = [0; OFFER_BYTES];
        bytes[..4].copy_from_slice(&self.key.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..].copy_from_slice(&self.address.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; OFFER_BYTES]) -> Offer {
        let address = u64::from(word(bytes, 8)) | u64::from(word(bytes, 12)) << 32;
        Offer { key: word(bytes, 0), length: word(bytes, 4), address }
    }
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.letter_bytes.to_le_bytes());
        bytes[12..].copy_from_slice(&self.credits.to_le_bytes());
        bytes
    }

    /// The connection manager fills up with zeros, so that more may follow. `None`: not one of us, or of another version.
    pub(super) fn decode(bytes: &[u8]) -> Option<Hello> {
        let bytes = bytes.first_chunk::<HELLO_BYTES>()?;
        let hello = Hello { letter_bytes: word(bytes, 8), credits: word(bytes, 12) };
        let is_sound = hello.letter_bytes >= LEAST_LETTER_BYTES && hello.credits <= MOST_CREDITS;
        (bytes[..8] == MAGIC && is_sound).then_some(hello)
    }
}

fn word(bytes: &[u8; 16], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(super) const HEAD_BYTES: usize = 16;
pub(super) const OFFER_BYTES: usize = 16;
pub(super) const HELLO_BYTES: usize = 16;

/// The shortest letters that anybody may have room for: an offer and some greeting fit.
pub(super) const LEAST_LETTER_BYTES: u32 = 256;

/// More credits than this nobody gives: a peer that says so does not count as we do.
pub(super) const MOST_CREDITS: u32 = 4096;

const MAGIC: [u8; 8] = *b"RMsgRdm\x01";
const SHORT: u8 = 1;
const EASE: u8 = 2;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn heads_arrive_as_they_were_sent(kind in 0u8..3, short: bool, ease: bool, words_heard: u16, counts: [u32; 3]) {
            let kind = [Kind::Bytes, Kind::Offer, Kind::Word][usize::from(kind)];
            let [given, back, read] = counts;
            let head = Head { kind, short, ease, words_heard, given, back, read };
            prop_assert_eq!(Head::decode(&head.encode()), Some(head));
        }

        #[test]
        fn any_head_is_one_or_none_and_says_itself_again(bytes: [u8; HEAD_BYTES]) {
            if let Some(head) = Head::decode(&bytes) {
                prop_assert_eq!(head.encode(), bytes);
            }
        }

        #[test]
        fn offers_arrive_as_they_were_sent(key: u32, length: u32, address: u64) {
            let offer = Offer { key, length, address };
            prop_assert_eq!(Offer::decode(&offer.encode()), offer);
        }

        #[test]
        fn a_hello_that_is_not_ours_or_makes_no_sense_is_none(letter_bytes: u32, credits: u32, wrong in 0usize..8) {
            let mut bytes = Hello { letter_bytes, credits }.encode();
            let is_sound = letter_bytes >= LEAST_LETTER_BYTES && credits <= MOST_CREDITS;
            prop_assert_eq!(Hello::decode(&bytes).is_some(), is_sound);
            bytes[wrong] ^= 1;
            prop_assert_eq!(Hello::decode(&bytes), None);
        }
    }
}
