//! Proofs of possession: HMAC-SHA256, keyed by a secret, over a label and a transcript; and keys derived from a
//! session's key.
//!
//! A label says what an HMAC is for. Each label ends with its only zero byte, so no label is a prefix of another one
//! and no two purposes can be given the same input.

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Length of a proof and of a key, in bytes.
pub const PROOF_BYTES: usize = 32;

/// Computes the HMAC of `parts`, one after the other, keyed by `secret`.
///
/// It proves knowledge of `secret` and of all of `parts`.
pub fn proof(secret: &[u8], parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
    keyed(secret, parts).finalize().into_bytes().into()
}

/// Returns whether `candidate` is the proof over `parts`. The time it takes does not depend on the bytes compared.
pub fn verify(secret: &[u8], parts: &[&[u8]], candidate: &[u8]) -> bool {
    keyed(secret, parts).verify_slice(candidate).is_ok()
}

/// Derives another key from a session's key. Neither the session's key nor the key of another label can be computed
/// from it.
pub fn derive(session_key: &[u8; PROOF_BYTES], label: &[u8]) -> [u8; PROOF_BYTES] {
    proof(session_key, &[LABEL_DERIVE, label])
}

fn keyed(secret: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut hmac = <Hmac<Sha256> as Mac>::new_from_slice(secret).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| hmac.update(part));
    hmac
}

const LABEL_DERIVE: &[u8] = b"remora control: derived key\0";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_secret_and_its_parts_only() {
        let made = proof(b"secret", &[b"label\0", b"transcript"]);
        assert!(verify(b"secret", &[b"label\0", b"transcript"], &made));
        assert!(!verify(b"other", &[b"label\0", b"transcript"], &made));
        assert!(!verify(b"secret", &[b"other\0", b"transcript"], &made));
        assert!(!verify(b"secret", &[b"label\0", b"transcript"], &made[..31]));
    }

    #[test]
    fn a_key_derived_for_one_purpose_is_not_the_key_of_another() {
        let key = [7; 32];
        let keys = [derive(&key, b"lane"), derive(&key, b"lanes"), derive(&[8; 32], b"lane"), key];
        for (index, one) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(one));
        }
        assert_eq!(derive(&key, b"lane"), derive(&key, b"lane"));
    }
}
