//! Seals: a keyed hash at the end of each frame, over its direction, its number and all its bytes. A checksum finds
//! accidental changes; a seal also finds deliberate ones. The key comes from the handshake ([`crate::handshake`]).

use hmac::{Hmac, Mac};
use sha2::Sha256;

use remora_wire::derive;

use crate::frame::{BODIES, Malformed};
use crate::handshake::Role;

/// A truncated HMAC-SHA256. With sixteen bytes a guess succeeds with probability 2^-128, and a wrong guess ends the
/// connection.
pub type Seal = [u8; SEAL_BYTES];

/// The seals of one direction of a connection, in order.
pub struct Seals {
    /// Keyed once: each frame's seal starts from a copy.
    key: Hmac<Sha256>,
    direction: u8,
    sequence: u64,
}

impl Seals {
    /// The seals of the frames that `sender` sends, for a key that only the two ends know.
    pub fn new(session_key: &[u8; 32], sender: Role) -> Seals {
        let (direction, label) = match sender {
            Role::Caller => (0, LABEL_CLIENT),
            Role::Called => (1, LABEL_SERVER),
        };
        let key =
            <Hmac<Sha256> as Mac>::new_from_slice(&derive(session_key, label)).expect("HMAC takes keys of any length");
        Seals { key, direction, sequence: 0 }
    }

    /// Computes the next frame's seal.
    pub fn next(&mut self, preamble: &[u8], head: &[u8], bodies: [&[u8]; BODIES]) -> Seal {
        let whole = self.hash(preamble, head, bodies).finalize().into_bytes();
        let mut seal = [0; SEAL_BYTES];
        seal.copy_from_slice(&whole[..SEAL_BYTES]);
        self.sequence += 1;
        seal
    }

    /// Checks the next frame's seal. The time it takes does not depend on the bytes compared.
    ///
    /// # Errors
    /// [`Malformed::Forged`].
    pub fn check(
        &mut self,
        seal: &[u8],
        preamble: &[u8],
        head: &[u8],
        bodies: [&[u8]; BODIES],
    ) -> Result<(), Malformed> {
        let forged = Malformed::Forged { sequence: self.sequence };
        if seal.len() != SEAL_BYTES {
            return Err(forged);
        }
        self.hash(preamble, head, bodies).verify_truncated_left(seal).map_err(|_| forged)?;
        self.sequence += 1;
        Ok(())
    }

    fn hash(&self, preamble: &[u8], head: &[u8], bodies: [&[u8]; BODIES]) -> Hmac<Sha256> {
        let mut hash = self.key.clone();
        hash.update(&[self.direction]);
        hash.update(&self.sequence.to_le_bytes());
        hash.update(preamble); // holds all lengths: the bytes that follow can be split in one way only
        hash.update(head);
        bodies.iter().for_each(|body| hash.update(body));
        hash
    }
}

/// Length of a seal, in bytes.
pub const SEAL_BYTES: usize = 16;

const LABEL_CLIENT: &[u8] = b"message seals of the client";
const LABEL_SERVER: &[u8] = b"message seals of the server";
