//! Proofs and nonces of data connections: a keyed hash over a transcript. No I/O; `lane_handshake` says which messages
//! are exchanged.
//!
//! The secret is never sent. Each proof is made under a label that says which end signs.

use remora_wire::token;
pub use remora_wire::token::PROOF_BYTES;

use crate::{error::Error, memory, region::Secret};

/// Bytes of a nonce: as many as the hash has, so that nonces do not repeat.
pub const NONCE_BYTES: usize = 32;

/// HMAC over `label` and `transcript`, keyed by `secret`: proves knowledge of the secret and of the transcript. `label`
/// says which end signs.
pub fn prove(secret: &Secret, label: &[u8], transcript: &[u8]) -> [u8; PROOF_BYTES] {
    token::proof(secret, &[&length_of(label), label, transcript])
}

/// Whether [`prove`] makes `proof` of the same secret, label and transcript. Takes constant time.
#[must_use]
pub fn verify(secret: &Secret, label: &[u8], transcript: &[u8], proof: &[u8; PROOF_BYTES]) -> bool {
    token::verify(secret, &[&length_of(label), label, transcript], proof)
}

/// As [`verify`], for a secret that may not exist. Then the result is `false`, after the same time as for a wrong
/// proof, so that an outsider cannot find out which sessions exist.
#[must_use]
pub fn verify_known(secret: Option<&Secret>, label: &[u8], transcript: &[u8], proof: &[u8; PROOF_BYTES]) -> bool {
    let fits = verify(secret.unwrap_or(&[0; 32]), label, transcript, proof);
    fits && secret.is_some()
}

/// A nonce: random bytes from the system.
///
/// # Errors
/// [`Error::System`] if the system provides none.
pub fn nonce() -> Result<[u8; NONCE_BYTES], Error> {
    let mut nonce = [0; NONCE_BYTES];
    memory::local::random(&mut nonce)?;
    Ok(nonce)
}

/// The length of a label, which comes first, so that no other label and transcript have the same input.
fn length_of(label: &[u8]) -> [u8; 8] {
    (label.len() as u64).to_le_bytes()
}

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
