//! The messages between two ends of a shared memory: bytes in, bytes out, no I/O. One message is one packet (SOCK_SEQPACKET), so there
//! is no framing. Numbers are little endian: both ends are one machine, but not one byte of doubt is worth the saving.
//!
//! ```text
//!  hello      reader → source   magic 8 │ version 2 │ zero 6 │ session 8 │ generation 8 │ region 4 │ zero 4 │ nonce 32
//!  challenge  source → reader   status 1 │ zero 1 │ version 2 │ zero 4 │ nonce 32
//!  proof      reader → source   HMAC 32                      over hello ‖ challenge, label READER
//!  welcome    source → reader   status 1 │ zero 7 │ length 8 │ HMAC 32       label SOURCE; the memfd rides along if the status is 0
//!  farewell   source → reader   status 1                     at any time after the welcome; the end of the connection follows
//! ```
//!
//! A status of 0 is good; any other is the code of a [`Denial`]. One version only, so far: 1.

use crate::{
    auth::{NONCE_BYTES, PROOF_BYTES},
    error::{Denial, Error},
    memory::local::PACKET_MAX_BYTES,
    region::{RegionId, TransportKind},
};

/// First bytes of every hello.
pub(super) const MAGIC: [u8; 8] = *b"RMRA-shm";
/// The only version there is.
pub(super) const VERSION: u16 = 1;
/// Labels of the two proofs.
pub(super) const READER: &[u8] = b"remora shm 1 reader";
pub(super) const SOURCE: &[u8] = b"remora shm 1 source";

/// "I am this session and want that region."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u16,
    pub(super) session: u64,
    pub(super) id: RegionId,
    pub(super) nonce: [u8; NONCE_BYTES],
}

impl Hello {
    pub(super) const BYTES: usize = 72;

    pub(super) fn encode(&self) -> [u8; Hello::BYTES] {
        let mut bytes = [0; Hello::BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.session.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.id.generation.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.id.region.to_le_bytes());
        bytes[40..72].copy_from_slice(&self.nonce);
        bytes
    }

    /// The version is for the caller to judge: he may answer with his own.
    pub(super) fn decode(packet: &[u8]) -> Result<Hello, Error> {
        let bytes: &[u8; Hello::BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a hello of the wrong length"))?;
        if bytes[0..8] != MAGIC {
            return Err(Error::Protocol("a hello of something else than a Remora reader"));
        }
        Ok(Hello {
            version: u16::from_le_bytes(part(bytes, 8)),
            session: u64::from_le_bytes(part(bytes, 16)),
            id: RegionId {
                generation: u64::from_le_bytes(part(bytes, 24)),
                region: u32::from_le_bytes(part(bytes, 32)),
            },
            nonce: part(bytes, 40),
        })
    }
}

/// "Prove it", or why there is no point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Challenge {
    pub(super) refusal: Option<Denial>,
    pub(super) version: u16,
    pub(super) nonce: [u8; NONCE_BYTES],
}

impl Challenge {
    pub(super) const BYTES: usize = 40;

    pub(super) fn encode(&self) -> [u8; Challenge::BYTES] {
        let mut bytes = [0; Challenge::BYTES];
        bytes[0] = status(self.refusal);
        bytes[2..4].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..40].copy_from_slice(&self.nonce);
        bytes
    }

    /// Judges the version too: nothing after the first four bytes means anything in another one.
    pub(super) fn decode(packet: &[u8]) -> Result<Challenge, Error> {
        let bytes: &[u8; Challenge::BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a challenge of the wrong length"))?;
        let version = u16::from_le_bytes(part(bytes, 2));
        if version != VERSION {
            return Err(Error::Version { kind: TransportKind::Shm, theirs: version, ours: VERSION });
        }
        Ok(Challenge { refusal: refusal(bytes[0])?, version, nonce: part(bytes, 8) })
    }
}

/// "Here it is", or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    pub(super) refusal: Option<Denial>,
    pub(super) length: u64,
    pub(super) proof: [u8; PROOF_BYTES],
}

impl Welcome {
    pub(super) const BYTES: usize = 48;

    pub(super) fn encode(&self) -> [u8; Welcome::BYTES] {
        let mut bytes = [0; Welcome::BYTES];
        bytes[0] = status(self.refusal);
        bytes[8..16].copy_from_slice(&self.length.to_le_bytes());
        bytes[16..48].copy_from_slice(&self.proof);
        bytes
    }

    pub(super) fn decode(packet: &[u8]) -> Result<Welcome, Error> {
        let bytes: &[u8; Welcome::BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a welcome of the wrong length"))?;
        Ok(Welcome { refusal: refusal(bytes[0])?, length: u64::from_le_bytes(part(bytes, 8)), proof: part(bytes, 16) })
    }
}

/// "It is over, because".
pub(super) fn farewell(denial: Denial) -> [u8; FAREWELL_BYTES] {
    [denial.code()]
}

/// The reason in a farewell; `None` if it makes no sense.
pub(super) fn farewell_reason(packet: &[u8]) -> Option<Denial> {
    match packet {
        [code] => Denial::from_code(*code),
        _ => None,
    }
}

pub(super) const FAREWELL_BYTES: usize = 1;

fn status(refusal: Option<Denial>) -> u8 {
    refusal.map_or(0, Denial::code)
}

fn refusal(status: u8) -> Result<Option<Denial>, Error> {
    match status {
        0 => Ok(None),
        code => Denial::from_code(code).map(Some).ok_or(Error::Protocol("a refusal for an unknown reason")),
    }
}

/// `N` bytes at a place that the layouts above have inside `M`.
fn part<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

const _: () = {
    assert!(Hello::BYTES == 40 + NONCE_BYTES);
    assert!(Challenge::BYTES == 8 + NONCE_BYTES);
    assert!(Welcome::BYTES == 16 + PROOF_BYTES);
    assert!(PACKET_MAX_BYTES > Hello::BYTES && PACKET_MAX_BYTES > Welcome::BYTES);
};

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_come_back_out_of_their_bytes(session: u64, generation: u64, region: u32, length: u64, nonce: [u8; 32], code in 0u8..7) {
            let hello = Hello { version: VERSION, session, id: RegionId { generation, region }, nonce };
            prop_assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
            let challenge = Challenge { refusal: Denial::from_code(code), version: VERSION, nonce };
            prop_assert_eq!(Challenge::decode(&challenge.encode()).unwrap(), challenge);
            let welcome = Welcome { refusal: Denial::from_code(code), length, proof: nonce };
            prop_assert_eq!(Welcome::decode(&welcome.encode()).unwrap(), welcome);
        }

        #[test]
        fn any_packet_is_a_message_or_an_error_but_never_a_panic(packet in prop::collection::vec(any::<u8>(), 0..PACKET_MAX_BYTES)) {
            let _ = Hello::decode(&packet);
            let _ = Challenge::decode(&packet);
            let _ = Welcome::decode(&packet);
            let _ = farewell_reason(&packet);
        }
    }

    #[test]
    fn another_version_is_an_error_that_names_both() {
        let challenge = Challenge { refusal: None, version: 9, nonce: [0; 32] };
        let error = Challenge::decode(&challenge.encode()).unwrap_err();
        assert!(matches!(error, Error::Version { theirs: 9, ours: VERSION, .. }), "{error}");
    }

    #[test]
    fn a_stranger_is_told_from_a_reader_by_the_first_bytes() {
        let mut hello =
            Hello { version: VERSION, session: 1, id: RegionId { generation: 1, region: 1 }, nonce: [0; 32] }.encode();
        hello[0] ^= 1;
        assert!(matches!(Hello::decode(&hello), Err(Error::Protocol(_))));
    }
}
