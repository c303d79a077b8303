//! Which sessions may read which regions of an exporter, and the proofs that a data connection belongs to a session.
//! Every transport asks here when it admits a connection, which reads one region. Pure.

use std::collections::{BTreeSet, HashMap};

use remora_wire::token;
pub use remora_wire::token::PROOF_BYTES;

use crate::error::Error;
use crate::{Denial, RegionId, Secret, memory};

/// The regions that a session may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Regions {
    /// Each region that is exported now or later.
    All,
    /// These.
    Only(BTreeSet<RegionId>),
}

impl Regions {
    /// These regions and no others.
    pub fn only(regions: impl IntoIterator<Item = RegionId>) -> Regions {
        Regions::Only(regions.into_iter().collect())
    }

    /// Whether this region is one of them.
    pub fn cover(&self, id: RegionId) -> bool {
        match self {
            Regions::All => true,
            Regions::Only(regions) => regions.contains(&id),
        }
    }
}

/// The grants of an exporter: at most one for each session.
#[derive(Debug, Default)]
pub(crate) struct Grants(HashMap<u64, Grant>);

#[derive(Debug)]
struct Grant {
    secret: Secret,
    regions: Regions,
}

impl Grants {
    /// Replaces the session's grant. Returns which of the session's connections the new one would not admit, by their
    /// region: the caller closes them.
    pub(crate) fn insert(
        &mut self,
        session: u64,
        secret: Secret,
        regions: Regions,
    ) -> impl Fn(RegionId) -> bool + use<> {
        let before = self.0.insert(session, Grant { secret, regions: regions.clone() });
        let is_other_secret = before.is_some_and(|before| before.secret != secret);
        move |id| is_other_secret || !regions.cover(id)
    }

    /// Ends the session's grant. The caller closes its connections.
    pub(crate) fn remove(&mut self, session: u64) {
        self.0.remove(&session);
    }

    /// The secret that the session must prove.
    pub(crate) fn secret(&self, session: u64) -> Option<&Secret> {
        self.0.get(&session).map(|grant| &grant.secret)
    }

    /// Whether the session, which has proved its secret, may read this region. Asked before it is told whether the
    /// region exists.
    ///
    /// # Errors
    /// [`Denial::Stale`] if it may read the region of another generation, [`Denial::NotGranted`] otherwise.
    pub(crate) fn permit(&self, session: u64, id: RegionId) -> Result<(), Denial> {
        match self.0.get(&session).map(|grant| &grant.regions) {
            Some(regions) if regions.cover(id) => Ok(()),
            Some(Regions::Only(regions)) if regions.iter().any(|other| other.region == id.region) => Err(Denial::Stale),
            _ => Err(Denial::NotGranted),
        }
    }
}

// Proofs and nonces of data connections: a keyed hash over a transcript. No I/O; `lane_handshake` says which messages
// are exchanged.
//
// The secret is never sent. Each proof is made under a label that says which end signs.

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

    fn id(generation: u64, region: u32) -> RegionId {
        RegionId { generation, region }
    }

    #[test]
    fn a_session_may_read_what_its_last_grant_names_and_nothing_else() {
        let mut grants = Grants::default();
        assert_eq!((grants.secret(1), grants.permit(1, id(7, 0))), (None, Err(Denial::NotGranted)));
        let _ = grants.insert(1, [1; 32], Regions::only([id(7, 0), id(3, 1)]));
        let _ = grants.insert(2, [2; 32], Regions::All);
        for allowed in [id(7, 0), id(3, 1)] {
            assert_eq!(grants.permit(1, allowed), Ok(()));
        }
        assert_eq!(grants.permit(1, id(6, 0)), Err(Denial::Stale), "a key of an earlier generation");
        assert_eq!(grants.permit(1, id(7, 2)), Err(Denial::NotGranted));
        assert_eq!(grants.permit(2, id(7, 2)), Ok(()));
        let _ = grants.insert(1, [1; 32], Regions::only([id(8, 2)]));
        assert_eq!((grants.permit(1, id(7, 0)), grants.permit(1, id(8, 2))), (Err(Denial::NotGranted), Ok(())));
        grants.remove(1);
        assert_eq!(grants.permit(1, id(8, 2)), Err(Denial::NotGranted));
        assert_eq!(grants.permit(2, id(8, 2)), Ok(()));
    }

    #[test]
    fn a_new_grant_closes_the_connections_that_it_would_not_admit() {
        let mut grants = Grants::default();
        let closes = grants.insert(1, [1; 32], Regions::All);
        assert!(!closes(id(7, 0)));
        let closes = grants.insert(1, [1; 32], Regions::only([id(7, 0)]));
        assert!(!closes(id(7, 0)) && closes(id(7, 1)));
        let closes = grants.insert(1, [2; 32], Regions::only([id(7, 0)]));
        assert!(closes(id(7, 0)), "they have proved another secret");
    }

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
