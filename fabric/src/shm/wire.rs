//! The messages of this transport: bytes in, bytes out, no I/O. One message is one packet (SOCK_SEQPACKET), so there is
//! no framing. Numbers are little endian.
//!
//! ```text
//!  hello      reader → source   magic 8 │ version 2 │ zero 6 │ session 8 │ generation 8 │ region 4 │ zero 4 │ nonce 32
//!  challenge  source → reader   status 1 │ zero 1 │ version 2 │ zero 4 │ nonce 32
//!  proof      reader → source   HMAC 32                      over hello ‖ challenge, label READER
//!  welcome    source → reader   status 1 │ zero 7 │ length 8 │ HMAC 32       label SOURCE; the memfd is attached if the status is 0
//!  farewell   source → reader   status 1                     at any time after the welcome; the end of the connection follows
//! ```
//!
//! Status 0 is success; any other is the code of a [`Denial`]. There is one version, 1. A source that receives another
//! version answers with its own in a challenge and hangs up, so that the reader can name both.

use crate::{
    auth::{NONCE_BYTES, PROOF_BYTES},
    error::{Denial, Error},
    lane_handshake::{Format, Hello, Refusal},
    memory::local::PACKET_MAX_BYTES,
    region::{RegionId, TransportKind},
};

/// First bytes of every hello.
const MAGIC: [u8; 8] = *b"RMRA-shm";
/// The only version.
pub(super) const VERSION: u16 = 1;

/// The handshake of this transport. A grant is the region's length.
pub(crate) struct Shm;

impl Format for Shm {
    const READER: &'static [u8] = b"remora shm 1 reader";
    const SOURCE: &'static [u8] = b"remora shm 1 source";
    const HELLO_BYTES: usize = 40 + NONCE_BYTES;
    const CHALLENGE_BYTES: usize = 8 + NONCE_BYTES;
    type Grant = u64;

    fn hello(hello: &Hello) -> Vec<u8> {
        let mut bytes = [0; Shm::HELLO_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&hello.session.to_le_bytes());
        bytes[24..32].copy_from_slice(&hello.id.generation.to_le_bytes());
        bytes[32..36].copy_from_slice(&hello.id.region.to_le_bytes());
        bytes[40..72].copy_from_slice(&hello.nonce);
        bytes.to_vec()
    }

    fn parse_hello(packet: &[u8]) -> Result<Hello, Error> {
        let bytes: &[u8; Shm::HELLO_BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a hello of the wrong length"))?;
        if bytes[0..8] != MAGIC {
            return Err(Error::Protocol("a hello that is not of a Remora reader"));
        }
        check_version(u16::from_le_bytes(part(bytes, 8)))?;
        Ok(Hello {
            lane: 0,
            session: u64::from_le_bytes(part(bytes, 16)),
            id: RegionId {
                generation: u64::from_le_bytes(part(bytes, 24)),
                region: u32::from_le_bytes(part(bytes, 32)),
            },
            nonce: part(bytes, 40),
        })
    }

    fn challenge(nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
        challenge(0, nonce)
    }

    /// Checks the version first: nothing after the first four bytes means anything in another version.
    fn parse_challenge(packet: &[u8]) -> Result<(), Error> {
        let bytes: &[u8; Shm::CHALLENGE_BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a challenge of the wrong length"))?;
        check_version(u16::from_le_bytes(part(bytes, 2)))?;
        check_status(bytes[0])
    }

    fn refusal(why: Refusal) -> Option<Vec<u8>> {
        match why {
            Refusal::Denied(denial) => Some(challenge(denial.code(), &[0; NONCE_BYTES])),
            Refusal::Version => Some(challenge(0, &[0; NONCE_BYTES])),
            Refusal::Malformed => None,
        }
    }

    fn welcome(length: &u64, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
        welcome(0, *length, proof)
    }

    fn denial(denial: Denial) -> Vec<u8> {
        welcome(denial.code(), 0, &[0; PROOF_BYTES])
    }

    fn parse_welcome(packet: &[u8]) -> Result<(u64, [u8; PROOF_BYTES]), Error> {
        let bytes: &[u8; WELCOME_BYTES] =
            packet.try_into().map_err(|_| Error::Protocol("a welcome of the wrong length"))?;
        check_status(bytes[0])?;
        Ok((u64::from_le_bytes(part(bytes, 8)), part(bytes, 16)))
    }
}

fn challenge(status: u8, nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
    let mut bytes = [0; Shm::CHALLENGE_BYTES];
    bytes[0] = status;
    bytes[2..4].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..40].copy_from_slice(nonce);
    bytes.to_vec()
}

fn welcome(status: u8, length: u64, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
    let mut bytes = [0; WELCOME_BYTES];
    bytes[0] = status;
    bytes[8..16].copy_from_slice(&length.to_le_bytes());
    bytes[16..48].copy_from_slice(proof);
    bytes.to_vec()
}

fn check_version(theirs: u16) -> Result<(), Error> {
    if theirs == VERSION { Ok(()) } else { Err(Error::Version { kind: TransportKind::Shm, theirs, ours: VERSION }) }
}

fn check_status(status: u8) -> Result<(), Error> {
    match status {
        0 => Ok(()),
        code => Err(Denial::from_code(code).map_or(Error::Protocol("a refusal for an unknown reason"), Error::Refused)),
    }
}

/// The source's last message on a connection.
pub(super) fn farewell(denial: Denial) -> [u8; FAREWELL_BYTES] {
    [denial.code()]
}

/// The reason in a farewell; `None` if it is not valid.
pub(super) fn farewell_reason(packet: &[u8]) -> Option<Denial> {
    match packet {
        [code] => Denial::from_code(*code),
        _ => None,
    }
}

/// For the fuzz target: a farewell that is valid survives encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_farewell(packet: &[u8]) {
    if let Some(denial) = farewell_reason(packet) {
        assert_eq!(farewell(denial), packet);
    }
}

/// Bytes of a farewell.
pub(super) const FAREWELL_BYTES: usize = 1;

/// Bytes of a welcome.
const WELCOME_BYTES: usize = 16 + PROOF_BYTES;

/// `N` bytes at an offset that the layouts above have inside `M`.
fn part<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

// A message that is too long must not fit a packet when it is cut off.
const _: () = assert!(PACKET_MAX_BYTES > Shm::HELLO_BYTES && PACKET_MAX_BYTES > WELCOME_BYTES);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn hello() -> Vec<u8> {
        Shm::hello(&Hello { lane: 0, session: 1, id: RegionId { generation: 1, region: 1 }, nonce: [0; 32] })
    }

    proptest! {
        #[test]
        fn messages_come_back_out_of_their_bytes(session: u64, generation: u64, region: u32, length: u64, nonce: [u8; 32], code in 1u8..7) {
            let hello = Hello { lane: 0, session, id: RegionId { generation, region }, nonce };
            prop_assert_eq!(Shm::parse_hello(&Shm::hello(&hello)).unwrap(), hello);
            prop_assert!(Shm::parse_challenge(&Shm::challenge(&nonce)).is_ok());
            prop_assert_eq!(Shm::parse_welcome(&Shm::welcome(&length, &nonce)).unwrap(), (length, nonce));
            let denial = Denial::from_code(code).unwrap();
            let refused = Shm::parse_challenge(&Shm::refusal(Refusal::Denied(denial)).unwrap());
            prop_assert!(matches!(refused, Err(Error::Refused(why)) if why == denial));
            let denied = Shm::parse_welcome(&Shm::denial(denial));
            prop_assert!(matches!(denied, Err(Error::Refused(why)) if why == denial));
        }

        #[test]
        fn any_packet_is_a_message_or_an_error_but_never_a_panic(packet in prop::collection::vec(any::<u8>(), 0..PACKET_MAX_BYTES)) {
            let _ = Shm::parse_hello(&packet);
            let _ = Shm::parse_challenge(&packet);
            let _ = Shm::parse_welcome(&packet);
            check_farewell(&packet);
        }
    }

    #[test]
    fn the_messages_are_these_bytes() {
        let id = RegionId { generation: 0x0102, region: 3 };
        let mut want = b"RMRA-shm\x01\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0\x03\0\0\0\0\0\0\0".to_vec();
        want.extend([7; 32]);
        assert_eq!(Shm::hello(&Hello { lane: 0, session: 5, id, nonce: [7; 32] }), want);
        assert_eq!(Shm::challenge(&[9; 32]), [&b"\0\0\x01\0\0\0\0\0"[..], &[9; 32]].concat());
        let busy = Shm::refusal(Refusal::Denied(Denial::Busy)).unwrap();
        assert_eq!(busy, [&b"\x06\0\x01\0\0\0\0\0"[..], &[0; 32]].concat());
        assert_eq!(Shm::welcome(&0x1_0000, &[8; 32]), [&b"\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0"[..], &[8; 32]].concat());
    }

    #[test]
    fn another_version_is_an_error_that_names_both() {
        let mut challenge = Shm::challenge(&[0; 32]);
        challenge[2] = 9;
        let error = Shm::parse_challenge(&challenge).unwrap_err();
        assert!(matches!(error, Error::Version { theirs: 9, ours: VERSION, .. }), "{error}");
        let mut hello = hello();
        hello[8] = 9;
        let error = Shm::parse_hello(&hello).unwrap_err();
        assert!(matches!(error, Error::Version { theirs: 9, ours: VERSION, .. }), "{error}");
        assert!(
            Shm::refusal(Refusal::Version).is_some_and(|answer| Shm::parse_challenge(&answer).is_ok()),
            "names ours"
        );
    }

    #[test]
    fn a_hello_without_the_magic_is_rejected() {
        let mut hello = hello();
        hello[0] ^= 1;
        assert!(matches!(Shm::parse_hello(&hello), Err(Error::Protocol(_))));
    }
}
