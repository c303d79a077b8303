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
//! Whatever a peer says that no peer of ours would is [`Wrong`], which says what it was.

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

/// What stands behind the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    /// From [`HEAD_BYTES`] to the letter's end.
    Bytes,
    Offer(Offer),
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

/// What a peer says that no peer of ours would.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Wrong {
    // -- Hellos. --
    #[error("it does not greet as we do, or in another version")]
    Hello,
    #[error("it has room for letters of {0} bytes, which is less than {LEAST_LETTER_BYTES}")]
    LetterBytes(u32),
    #[error("it gives {0} credits at the beginning, which is more than {MOST_CREDITS}")]
    FirstCredits(u32),

    // -- Letters by themselves. --
    #[error("a letter of {0} bytes, less than a head")]
    NoHead(u32),
    #[error("a letter of kind {0}")]
    Kind(u8),
    #[error("a letter with the flags {0:#04x}")]
    Flags(u8),
    #[error("a word of {0} bytes, where it is a head alone")]
    WordBytes(u32),
    #[error("an offer in a letter of {0} bytes")]
    OfferBytes(u32),
    #[error("an offer of {0} bytes, where 1 to {BULK_BYTES} may be")]
    OfferLength(u32),

    // -- Letters after those before them; the numbers are what is more than the last time. --
    #[error("it gives {0} credits where we have {1}, and more than {MOST_CREDITS} nobody gives")]
    Given(u32, u32),
    #[error("it gives back {0} credits where it has {1}")]
    Back(u32, u32),
    #[error("it has read {0} offers where {1} are unread")]
    Read(u32, u32),
    #[error("it has heard {0} words where {1} are unheard")]
    Heard(u16, u16),
    #[error("a letter that it had no credit for")]
    NoCredit,
    #[error("an offer while {0} are unread")]
    OneOfferTooMany(u32),
    #[error("a word while {0} are unheard")]
    OneWordTooMany(u16),
}

/// Opens a letter of so many bytes, of which these are the first; what is behind its end is not looked at.
pub(super) fn open(start: &[u8; START_BYTES], length: u32) -> Result<(Head, Body), Wrong> {
    if (length as usize) < HEAD_BYTES {
        return Err(Wrong::NoHead(length));
    }
    let (mut head, mut behind) = ([0; HEAD_BYTES], [0; OFFER_BYTES]);
    head.copy_from_slice(&start[..HEAD_BYTES]);
    behind.copy_from_slice(&start[HEAD_BYTES..]);
    let head = Head::decode(&head)?;
    let body = match head.kind {
        Kind::Bytes => Body::Bytes,
        Kind::Word if length as usize == HEAD_BYTES => Body::Word,
        Kind::Word => return Err(Wrong::WordBytes(length)),
        Kind::Offer if length as usize == START_BYTES => Body::Offer(Offer::decode(&behind)),
        Kind::Offer => return Err(Wrong::OfferBytes(length)),
    };
    match body {
        Body::Offer(offer) if !(1..=BULK_BYTES).contains(&offer.length) => Err(Wrong::OfferLength(offer.length)),
        body => Ok((head, body)),
    }
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

    pub(super) fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Head, Wrong> {
        let kind = match bytes[0] {
            0 => Kind::Bytes,
            1 => Kind::Offer,
            2 => Kind::Word,
            other => return Err(Wrong::Kind(other)),
        };
        if bytes[1] & !(SHORT | EASE) != 0 {
            return Err(Wrong::Flags(bytes[1]));
        }
        Ok(Head {
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

    /// The connection manager fills up with zeros, so that more may follow.
    pub(super) fn decode(bytes: &[u8]) -> Result<Hello, Wrong> {
        let bytes = bytes.first_chunk::<HELLO_BYTES>().filter(|bytes| bytes[..8] == MAGIC).ok_or(Wrong::Hello)?;
        let hello = Hello { letter_bytes: word(bytes, 8), credits: word(bytes, 12) };
        if hello.letter_bytes < LEAST_LETTER_BYTES {
            return Err(Wrong::LetterBytes(hello.letter_bytes));
        }
        if hello.credits > MOST_CREDITS {
            return Err(Wrong::FirstCredits(hello.credits));
        }
        Ok(hello)
    }
}

fn word(bytes: &[u8; 16], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(super) const HEAD_BYTES: usize = 16;
pub(super) const OFFER_BYTES: usize = 16;
pub(super) const HELLO_BYTES: usize = 16;

/// As much of a letter as has to be looked at before one knows what it is.
pub(super) const START_BYTES: usize = HEAD_BYTES + OFFER_BYTES;

/// The shortest letters that anybody may have room for: an offer and some greeting fit.
pub(super) const LEAST_LETTER_BYTES: u32 = 256;

/// More credits than this nobody gives: a peer that says so does not count as we do.
pub(super) const MOST_CREDITS: u32 = 4096;

/// The longest piece of the stream that is offered and read at once, part of the protocol: large enough that a READ's round trip
/// is little beside it, small enough that several are under way in one message.
pub(super) const BULK_BYTES: u32 = 256 << 10;

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
            let offer = Offer { key, length, address };
            prop_assert_eq!(Offer::decode(&offer.encode()), offer);
        }

        #[test]
        fn a_hello_that_is_not_ours_or_makes_no_sense_is_wrong(letter_bytes: u32, credits: u32, wrong in 0usize..8) {
            let mut bytes = Hello { letter_bytes, credits }.encode();
            let is_sound = letter_bytes >= LEAST_LETTER_BYTES && credits <= MOST_CREDITS;
            prop_assert_eq!(Hello::decode(&bytes).is_ok(), is_sound);
            bytes[wrong] ^= 1;
            prop_assert_eq!(Hello::decode(&bytes), Err(Wrong::Hello));
        }
    }

    #[test]
    fn what_is_wrong_with_a_letter_is_named() {
        let start = |kind: u8, flags: u8, length: u32| {
            let mut start = [0; START_BYTES];
            (start[0], start[1]) = (kind, flags);
            start[HEAD_BYTES..].copy_from_slice(&Offer { key: 1, length, address: 2 }.encode());
            start
        };
        let wrong = |kind, flags, offered, length| open(&start(kind, flags, offered), length).unwrap_err().to_string();
        assert_eq!(wrong(0, 0, 1, 15), "a letter of 15 bytes, less than a head");
        assert_eq!(wrong(3, 0, 1, 16), "a letter of kind 3");
        assert_eq!(wrong(0, 4, 1, 16), "a letter with the flags 0x04");
        assert_eq!(wrong(2, 0, 1, 17), "a word of 17 bytes, where it is a head alone");
        assert_eq!(wrong(1, 0, 1, 33), "an offer in a letter of 33 bytes");
        assert_eq!(wrong(1, 0, 0, 32), "an offer of 0 bytes, where 1 to 262144 may be");
        assert_eq!(wrong(1, 0, BULK_BYTES + 1, 32), "an offer of 262145 bytes, where 1 to 262144 may be");
        assert!(open(&start(1, 3, BULK_BYTES), 32).is_ok() && open(&start(0, 0, 0), 8192).is_ok());
    }
}
