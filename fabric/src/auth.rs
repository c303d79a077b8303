//! How a data connection proves its session: a challenge and a keyed hash. No I/O here, and no protocol of its own: each
//! transport has its own messages, and signs what both ends have said with these functions.
//!
//! ```text
//!   reader                                                   source
//!     │ hello {magic, version, session, region, nonce}         │
//!     │ ─────────────────────────────────────────────────────▶ │
//!     │                                     challenge {nonce}  │
//!     │ ◀───────────────────────────────────────────────────── │
//!     │ HMAC(secret, "reader" ‖ hello ‖ challenge)             │
//!     │ ─────────────────────────────────────────────────────▶ │  verify: only now is anything told
//!     │            HMAC(secret, "source" ‖ hello ‖ challenge)  │
//!     │ ◀───────────────────────────────────────────────────── │
//! ```
//!
//! The secret never travels. Both ends contribute a nonce, so that nothing recorded opens anything later; each signs under its
//! own label, so that neither can be made to answer its own question. The answer of the source is there because a reader
//! must not take memory, or a dataset, from whatever happens to sit at an address.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::{error::Error, memory, region::Secret};

/// Bytes of a proof: a whole HMAC-SHA256.
pub const PROOF_BYTES: usize = 32;

/// Bytes of a nonce: as many as the hash has, so that two never meet.
pub const NONCE_BYTES: usize = 32;

/// What proves to somebody who knows `secret` that its maker knows it too and has heard `transcript`. `label` says who signs.
pub fn prove(secret: &Secret, label: &[u8], transcript: &[u8]) -> [u8; PROOF_BYTES] {
    keyed(secret, label, transcript).finalize().into_bytes().into()
}

/// Whether `proof` was made by [`prove`] with the same three. Takes the same time whichever byte differs.
#[must_use]
pub fn verify(secret: &Secret, label: &[u8], transcript: &[u8], proof: &[u8; PROOF_BYTES]) -> bool {
    keyed(secret, label, transcript).verify_slice(proof).is_ok()
}

/// As [`verify`], where there may be no secret to verify with. The absence takes the same time as a wrong proof, so that an
/// outsider can't find out which sessions exist.
#[must_use]
pub fn verify_known(secret: Option<&Secret>, label: &[u8], transcript: &[u8], proof: &[u8; PROOF_BYTES]) -> bool {
    let fits = verify(secret.unwrap_or(&[0; 32]), label, transcript, proof);
    fits && secret.is_some()
}

/// Fresh random bytes from the system.
///
/// # Errors
/// [`Error::System`] if the system has none.
pub fn nonce() -> Result<[u8; NONCE_BYTES], Error> {
    let mut nonce = [0; NONCE_BYTES];
    memory::local::random(&mut nonce)?;
    Ok(nonce)
}

/// The label's length stands before it, so that no label and transcript can be mistaken for another such pair.
fn keyed(secret: &Secret, label: &[u8], transcript: &[u8]) -> Hmac<Sha256> {
    // HMAC itself fills a short key up with zeros to the hash's block; done here, no length is left that could be wrong.
    let mut key = [0; SHA256_BLOCK_BYTES];
    key[..secret.len()].copy_from_slice(secret);
    let mut mac = <Hmac<Sha256> as Mac>::new(&key.into());
    mac.update(&(label.len() as u64).to_le_bytes());
    mac.update(label);
    mac.update(transcript);
    mac
}

const SHA256_BLOCK_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_proof_fits_its_secret_label_and_transcript(secret: [u8; 32], label: Vec<u8>, transcript: Vec<u8>) {
            let proof = prove(&secret, &label, &transcript);
            prop_assert!(verify(&secret, &label, &transcript, &proof));
        }

        #[test]
        fn a_proof_with_one_bit_changed_anywhere_fits_no_more(secret: [u8; 32], transcript: [u8; 16], bit in 0usize..(32 + 16 + 32) * 8) {
            let mut all = Vec::new();
            all.extend_from_slice(&secret);
            all.extend_from_slice(&transcript);
            all.extend_from_slice(&prove(&secret, b"reader", &transcript));
            all[bit / 8] ^= 1 << (bit % 8);
            let secret: [u8; 32] = all[..32].try_into().unwrap();
            let proof: [u8; 32] = all[48..].try_into().unwrap();
            prop_assert!(!verify(&secret, b"reader", &all[32..48], &proof));
        }
    }

    #[test]
    fn bytes_can_not_wander_between_label_and_transcript() {
        let proof = prove(&[7; 32], b"read", b"er said");
        assert!(!verify(&[7; 32], b"reader", b" said", &proof));
    }

    #[test]
    fn without_a_secret_not_even_the_proof_of_zeros_fits() {
        let proof = prove(&[0; 32], b"reader", b"hello");
        assert!(!verify_known(None, b"reader", b"hello", &proof));
        assert!(verify_known(Some(&[0; 32]), b"reader", b"hello", &proof));
    }

    #[test]
    fn the_hash_is_hmac_sha256_as_everyone_knows_it() {
        // By `printf '\x06\0\0\0\0\0\0\0readerhello' | openssl dgst -sha256 -mac HMAC -macopt hexkey:0707…07`.
        let hex: String = prove(&[7; 32], b"reader", b"hello").iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "c65641450652fee48676893b4e7ac7b1f9fcb7d20fd9d6bb38a9f1c7c54f4a02");
    }

    #[test]
    fn no_two_nonces_are_alike() {
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
