//! The messages of a connection's handshake, pure. Who sends them when is `handshake`'s.
//!
//! The first two travel as the connection manager's private data, of which the reader's end has room for 56 bytes and which arrives
//! filled up with zeros: hence magic, version and length at the front. The other two are sent over the connection itself.
//!
//! ```text
//!   reader                                    source
//!     │ ── Hello      56, in REQ ─────────────▶ │   who, which region, a nonce
//!     │ ◀── Challenge 40, in REP ────────────── │   the other nonce      (or Refusal, 12, in REJ)
//!     │ ── proof      32, SEND ───────────────▶ │   HMAC of both
//!     │ ◀── Welcome   64, SEND ──────────────── │   key, base and length of the region, the source's own HMAC; or why not
//!     │ ══ READ ══════════════════════════════▶ │   (no processor of the source takes part any more)
//! ```
//!
//! All integers are little-endian. What travels later is RDMA's own.

use crate::{
    Denial, Error, RegionId, TransportKind,
    auth::{NONCE_BYTES, PROOF_BYTES},
};

/// Bytes of the reader's nonce: what is left of the private data. 192 bits never meet again either.
pub(super) const READER_NONCE_BYTES: usize = 24;

/// The reader's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) session: u64,
    pub(super) id: RegionId,
    /// Which of the reader's queue pairs this is, from 0; for the source's log only.
    pub(super) lane: u8,
    pub(super) nonce: [u8; READER_NONCE_BYTES],
}

impl Hello {
    pub(super) const BYTES: usize = 56;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut at = opening(&mut out);
        put(&mut out, &mut at, &self.session.to_le_bytes());
        put(&mut out, &mut at, &self.id.generation.to_le_bytes());
        put(&mut out, &mut at, &self.id.region.to_le_bytes());
        put(&mut out, &mut at, &[self.lane, 0, 0, 0]);
        put(&mut out, &mut at, &self.nonce);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Hello, Garbled> {
        let mut rest = opened(bytes, Self::BYTES)?;
        let session = u64::from_le_bytes(take(&mut rest)?);
        let generation = u64::from_le_bytes(take(&mut rest)?);
        let region = u32::from_le_bytes(take(&mut rest)?);
        let [lane, ..] = take::<4>(&mut rest)?;
        let nonce = take(&mut rest)?;
        Ok(Hello { session, id: RegionId { generation, region }, lane, nonce })
    }
}

/// The source's answer: prove yourself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Challenge {
    pub(super) nonce: [u8; NONCE_BYTES],
}

impl Challenge {
    pub(super) const BYTES: usize = 40;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut at = opening(&mut out);
        put(&mut out, &mut at, &self.nonce);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Challenge, Garbled> {
        let mut rest = opened(bytes, Self::BYTES)?;
        Ok(Challenge { nonce: take(&mut rest)? })
    }
}

/// ... or: go away, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// For this reason.
    Denied(Denial),
    /// It could not make sense of the hello.
    Malformed,
}

impl Refusal {
    pub(super) const BYTES: usize = 12;

    pub(super) fn encode(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut at = opening(&mut out);
        let code = match self {
            Refusal::Denied(denial) => denial.code().into(),
            Refusal::Malformed => MALFORMED,
        };
        put(&mut out, &mut at, &u32::to_le_bytes(code));
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Refusal, Garbled> {
        let mut rest = opened(bytes, Self::BYTES)?;
        match u32::from_le_bytes(take(&mut rest)?) {
            MALFORMED => Ok(Refusal::Malformed),
            code => denial(code).map(Refusal::Denied),
        }
    }
}

/// The source's verdict on the proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    /// Why not, where it is none; the other fields are zero then.
    pub(super) denied: Option<Denial>,
    /// The key to name in a READ.
    pub(super) key: u32,
    /// The address of the region's first byte, as a READ names it.
    pub(super) base: u64,
    /// Bytes of the region.
    pub(super) length: u64,
    /// The source's own proof.
    pub(super) proof: [u8; PROOF_BYTES],
}

impl Welcome {
    pub(super) const BYTES: usize = 64;

    pub(super) fn denial(denial: Denial) -> Welcome {
        Welcome { denied: Some(denial), key: 0, base: 0, length: 0, proof: [0; PROOF_BYTES] }
    }

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut at = opening(&mut out);
        put(&mut out, &mut at, &u32::to_le_bytes(self.denied.map_or(0, |denial| denial.code().into())));
        put(&mut out, &mut at, &self.key.to_le_bytes());
        put(&mut out, &mut at, &self.base.to_le_bytes());
        put(&mut out, &mut at, &self.length.to_le_bytes());
        put(&mut out, &mut at, &self.proof);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Welcome, Garbled> {
        let mut rest = opened(bytes, Self::BYTES)?;
        let denied = match u32::from_le_bytes(take(&mut rest)?) {
            0 => None,
            code => Some(denial(code)?),
        };
        let key = u32::from_le_bytes(take(&mut rest)?);
        let base = u64::from_le_bytes(take(&mut rest)?);
        let length = u64::from_le_bytes(take(&mut rest)?);
        Ok(Welcome { denied, key, base, length, proof: take(&mut rest)? })
    }
}

/// What was received is not this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Garbled {
    /// It does not begin as ours.
    Magic,
    /// It is ours, of another version.
    Version(u16),
    /// It is shorter than it says, or than it must be.
    Length,
    /// A reason that we don't know.
    Denial,
}

impl From<Garbled> for Error {
    fn from(garbled: Garbled) -> Error {
        Error::Protocol(match garbled {
            Garbled::Version(theirs) => {
                return Error::Version { kind: TransportKind::Verbs, theirs, ours: VERSION };
            }
            Garbled::Magic => "its message is not that of a Remora connection",
            Garbled::Length => "its message is too short",
            Garbled::Denial => "it refuses for a reason without meaning",
        })
    }
}

/// First bytes of every message.
const MAGIC: [u8; 4] = *b"RMRV";

/// The version this file describes.
const VERSION: u16 = 1;

/// Outside the numbers of [`Denial`], which fit into a byte.
const MALFORMED: u32 = 0x100;

/// Writes magic, version and the message's length; says where to go on.
fn opening<const N: usize>(out: &mut [u8; N]) -> usize {
    let mut at = 0;
    put(out, &mut at, &MAGIC);
    put(out, &mut at, &VERSION.to_le_bytes());
    put(out, &mut at, &(N as u16).to_le_bytes());
    at
}

fn put(out: &mut [u8], at: &mut usize, bytes: &[u8]) {
    if let Some(place) = out.get_mut(*at..*at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
    *at += bytes.len();
}

/// Checks magic, version and length; gives what follows, without what the manager has filled up.
fn opened(bytes: &[u8], wanted: usize) -> Result<&[u8], Garbled> {
    let mut rest = bytes;
    if take::<4>(&mut rest).map_err(|_| Garbled::Magic)? != MAGIC {
        return Err(Garbled::Magic);
    }
    let version = u16::from_le_bytes(take(&mut rest)?);
    if version != VERSION {
        return Err(Garbled::Version(version));
    }
    let length = usize::from(u16::from_le_bytes(take(&mut rest)?));
    if length != wanted {
        return Err(Garbled::Length);
    }
    bytes.get(bytes.len() - rest.len()..wanted).ok_or(Garbled::Length)
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Garbled> {
    let (taken, after) = rest.split_first_chunk().ok_or(Garbled::Length)?;
    *rest = after;
    Ok(*taken)
}

fn denial(code: u32) -> Result<Denial, Garbled> {
    u8::try_from(code).ok().and_then(Denial::from_code).ok_or(Garbled::Denial)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    /// As the manager delivers it.
    fn padded(bytes: &[u8]) -> Vec<u8> {
        let mut long = bytes.to_vec();
        long.resize(196, 0);
        long
    }

    proptest! {
        #[test]
        fn messages_come_back_out_of_their_bytes_though_filled_up_with_zeros(
            session: u64, generation: u64, region: u32, lane: u8, key: u32, base: u64, length: u64,
            reader: [u8; READER_NONCE_BYTES], nonce: [u8; 32],
        ) {
            let hello = Hello { session, id: RegionId { generation, region }, lane, nonce: reader };
            prop_assert_eq!(Hello::decode(&padded(&hello.encode())), Ok(hello));
            let challenge = Challenge { nonce };
            prop_assert_eq!(Challenge::decode(&padded(&challenge.encode())), Ok(challenge));
            for denied in [None, Some(Denial::Stale)] {
                let welcome = Welcome { denied, key, base, length, proof: nonce };
                prop_assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
            }
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error_but_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Hello::decode(&bytes), Challenge::decode(&bytes), Refusal::decode(&bytes), Welcome::decode(&bytes));
        }
    }

    #[test]
    fn what_is_cut_short_or_of_another_version_is_told_apart() {
        let hello = Hello { session: 1, id: RegionId { generation: 2, region: 3 }, lane: 0, nonce: [4; 24] }.encode();
        assert_eq!(Hello::decode(&hello[..55]), Err(Garbled::Length));
        assert_eq!(Hello::decode(b"RMR"), Err(Garbled::Magic));
        let mut other = hello;
        other[4] = 9;
        assert_eq!(Hello::decode(&other), Err(Garbled::Version(9)));
        assert_eq!(Challenge::decode(&hello), Err(Garbled::Length), "one kind is not taken for another");
    }

    #[test]
    fn every_refusal_keeps_its_reason() {
        for refusal in [Refusal::Malformed, Refusal::Denied(Denial::Busy), Refusal::Denied(Denial::NotGranted)] {
            assert_eq!(Refusal::decode(&padded(&refusal.encode())), Ok(refusal));
        }
    }
}
