//! Sealing: what readers on other hosts are given is ciphertext, made once for any number of them.
//!
//! ```text
//!   key of the generation (in the offer) ─ HKDF ─┬─▶ key of the cipher:  slots, records     one per table
//!     ╰ kind, generation, offset, replid ────────╯─▶ key of the MAC:     line, entries
//!
//!   slot i:             nonce "slot" ‖ i        additional data: kind, length, i, generation, offset, replid
//!   record at offset o: nonce "strm" ‖ o        additional data: kind, length, o, generation, offset, replid, and how it is
//!                                               compressed, which the entry says of a slot
//! ```
//!
//! A nonce never occurs twice under one key: the number of a slot counts on when its place is reused, each slot is
//! sealed once, and no two bytes of a journal have the same offset. A key belongs to one table of one generation.
//!
//! Not here: where tags and digests are in a table (`layout`), and how readers get the key (the agents).

use std::fmt;

use ring::{aead, hkdf, hmac};

use crate::{error::Error, identity::Identity};

/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;
/// Bytes of the digest of a slot: the first half of BLAKE3. A lender would have to find other bytes with a given
/// digest, which takes 2^128 attempts. It cannot choose two slots with the same digest beforehand, which would take
/// 2^64, because the digest is that of the ciphertext under a key that does not exist yet.
pub const DIGEST_BYTES: usize = 16;

/// How a table is sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// AES-256-GCM.
    Aes256Gcm,
    /// ChaCha20-Poly1305.
    ChaCha20Poly1305,
}

impl Algorithm {
    /// The faster one on this processor.
    pub fn best() -> Algorithm {
        #[cfg(target_arch = "x86_64")]
        let has_aes = std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
        #[cfg(target_arch = "aarch64")]
        let has_aes = std::arch::is_aarch64_feature_detected!("aes");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let has_aes = false;
        if has_aes { Algorithm::Aes256Gcm } else { Algorithm::ChaCha20Poly1305 }
    }

    /// Its number in heads and offers. 0 is a table that is not sealed.
    pub(crate) fn code(self) -> u32 {
        match self {
            Algorithm::Aes256Gcm => 1,
            Algorithm::ChaCha20Poly1305 => 2,
        }
    }

    pub(crate) fn from_code(code: u32) -> Result<Algorithm, Error> {
        match code {
            1 => Ok(Algorithm::Aes256Gcm),
            2 => Ok(Algorithm::ChaCha20Poly1305),
            other => Err(Error::Layout(format!(
                "the table is sealed by algorithm {other}, which this program does not know: use the same release on \
                 both ends"
            ))),
        }
    }

    fn cipher(self) -> &'static aead::Algorithm {
        match self {
            Algorithm::Aes256Gcm => &aead::AES_256_GCM,
            Algorithm::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        }
    }
}

/// The secret from which the keys of a table are derived. Who has it can read and forge the table.
#[derive(Clone, PartialEq, Eq)]
pub struct SealKey {
    algorithm: Algorithm,
    secret: [u8; Self::SECRET_BYTES],
}

impl SealKey {
    /// Bytes of the secret.
    pub const SECRET_BYTES: usize = 32;
    /// Bytes of a key in an offer: the algorithm's number, and the secret.
    pub const BYTES: usize = 1 + Self::SECRET_BYTES;

    /// A key with this secret, which must be random and must not be used for another table.
    pub fn new(algorithm: Algorithm, secret: [u8; Self::SECRET_BYTES]) -> SealKey {
        SealKey { algorithm, secret }
    }

    /// The key as bytes, for an offer.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        // Both codes fit a byte.
        bytes[0] = self.algorithm.code() as u8;
        bytes[1..].copy_from_slice(&self.secret);
        bytes
    }

    /// The key in an offer.
    ///
    /// # Errors
    /// [`Error::Layout`]: the algorithm is not known, or the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<SealKey, Error> {
        let (&code, secret) = bytes.split_first().unwrap_or((&0, &[]));
        let algorithm = Algorithm::from_code(u32::from(code))?;
        let secret = secret.try_into().map_err(|_| {
            Error::Layout(format!("the key of a sealed table has {} bytes, not {}", secret.len(), Self::SECRET_BYTES))
        })?;
        Ok(SealKey { algorithm, secret })
    }
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealKey({:?})", self.algorithm)
    }
}

/// Seals and opens one table.
pub struct Seal {
    algorithm: Algorithm,
    cipher: aead::LessSafeKey,
    mac: hmac::Key,
    /// The part of the additional data that is the same for the whole table.
    context: [u8; CONTEXT_BYTES],
}

/// What the entry of a sealed slot says about it besides its length. Zeros in tables that are not sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SlotSeal {
    /// The cipher's tag.
    pub(crate) tag: [u8; TAG_BYTES],
    /// The digest of the ciphertext, by which readers check slots that come from a replica: the replica knows the key.
    pub(crate) digest: [u8; DIGEST_BYTES],
}

/// Bytes were not sealed by who has the key, or not for this place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Forged;

impl Seal {
    /// The seal of the table with this identity.
    ///
    /// # Errors
    /// [`Error::Misuse`], which would be a bug: the keys have the wrong length.
    pub fn new(key: &SealKey, identity: &Identity) -> Result<Seal, Error> {
        let context = context(key.algorithm, identity);
        let extracted = hkdf::Salt::new(hkdf::HKDF_SHA256, SALT).extract(&key.secret);
        let derive = |label: &[u8]| {
            let mut derived = [0; SealKey::SECRET_BYTES];
            let info = [label, &context];
            let filled = extracted.expand(&info, hkdf::HKDF_SHA256).and_then(|okm| okm.fill(&mut derived));
            filled.map(|()| derived).map_err(|_| Error::Misuse("a key of a sealed table has the wrong length"))
        };
        let cipher = aead::UnboundKey::new(key.algorithm.cipher(), &derive(b"cipher")?)
            .map_err(|_| Error::Misuse("a key of a sealed table has the wrong length"))?;
        let mac = hmac::Key::new(hmac::HMAC_SHA256, &derive(b"mac")?);
        Ok(Seal { algorithm: key.algorithm, cipher: aead::LessSafeKey::new(cipher), mac, context })
    }

    pub(crate) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Encrypts slot `number` in place. No slot may be sealed twice with different bytes.
    pub(crate) fn seal_slot(&self, number: u64, bytes: &mut [u8]) -> Result<SlotSeal, Error> {
        let tag = self.seal(SLOT, number, 0, bytes)?;
        Ok(SlotSeal { tag, digest: digest(bytes) })
    }

    /// Decrypts slot `number` in place. What is in `bytes` after a failure is not to be used.
    pub(crate) fn open_slot(&self, number: u64, seal: &SlotSeal, bytes: &mut [u8]) -> Result<(), Forged> {
        self.open(SLOT, number, 0, &seal.tag, bytes)
    }

    /// Encrypts slot `number` as the source did, for a reader that keeps it elsewhere, and returns the tag: the same
    /// plain bytes give the same ciphertext. `bytes` must be those of that slot.
    ///
    /// # Errors
    /// [`Error::Misuse`]: more bytes than any slot has.
    pub fn seal_kept(&self, number: u64, bytes: &mut [u8]) -> Result<[u8; TAG_BYTES], Error> {
        self.seal(SLOT, number, 0, bytes)
    }

    /// Decrypts slot `number`, which was kept elsewhere. What is in `bytes` after a failure is not to be used.
    ///
    /// # Errors
    /// [`Error::Forged`]: these are not the bytes that were kept.
    pub fn open_kept(&self, number: u64, tag: &[u8; TAG_BYTES], bytes: &mut [u8]) -> Result<(), Error> {
        self.open(SLOT, number, 0, tag, bytes).map_err(|_| Error::Forged { what: format!("slot {number}") })
    }

    /// Encrypts the record whose first byte has this replication offset, in place. `encoding`: how it is compressed.
    pub(crate) fn seal_record(&self, offset: u64, encoding: u8, bytes: &mut [u8]) -> Result<[u8; TAG_BYTES], Error> {
        self.seal(RECORD, offset, encoding, bytes)
    }

    /// Decrypts a record in place. What is in `bytes` after a failure is not to be used.
    pub(crate) fn open_record(
        &self,
        offset: u64,
        encoding: u8,
        tag: &[u8; TAG_BYTES],
        bytes: &mut [u8],
    ) -> Result<(), Forged> {
        self.open(RECORD, offset, encoding, tag, bytes)
    }

    /// The check of a line or an entry: the first 64 bits of an HMAC-SHA256. An attacker has one attempt for each read
    /// of a reader, and no way to try without it.
    pub(crate) fn mac(&self, label: &[u8], words: &[u64]) -> u64 {
        let mut context = hmac::Context::with_key(&self.mac);
        context.update(label);
        words.iter().for_each(|word| context.update(&word.to_le_bytes()));
        let mac = context.sign();
        let mut first = [0; 8];
        first.iter_mut().zip(mac.as_ref()).for_each(|(to, from)| *to = *from);
        u64::from_le_bytes(first)
    }

    fn seal(&self, domain: [u8; 4], number: u64, encoding: u8, bytes: &mut [u8]) -> Result<[u8; TAG_BYTES], Error> {
        let associated = aead::Aad::from(self.associated(number, bytes.len(), encoding));
        let sealed = self.cipher.seal_in_place_separate_tag(nonce(domain, number), associated, bytes);
        let sealed = sealed.map_err(|_| Error::Misuse("more bytes than a cipher seals at once"))?;
        let mut tag = [0; TAG_BYTES];
        tag.iter_mut().zip(sealed.as_ref()).for_each(|(to, from)| *to = *from);
        Ok(tag)
    }

    fn open(
        &self,
        domain: [u8; 4],
        number: u64,
        encoding: u8,
        tag: &[u8; TAG_BYTES],
        bytes: &mut [u8],
    ) -> Result<(), Forged> {
        let associated = aead::Aad::from(self.associated(number, bytes.len(), encoding));
        let tag = aead::Tag::from(*tag);
        let opened = self.cipher.open_in_place_separate_tag(nonce(domain, number), associated, tag, bytes, 0..);
        opened.map(drop).map_err(|_| Forged)
    }

    fn associated(&self, number: u64, length: usize, encoding: u8) -> [u8; CONTEXT_BYTES + 16] {
        let mut bytes = [0; CONTEXT_BYTES + 16];
        bytes[..CONTEXT_BYTES].copy_from_slice(&self.context);
        bytes[CONTEXT_BYTES..CONTEXT_BYTES + 8].copy_from_slice(&number.to_le_bytes());
        // No length needs the highest byte.
        let length = length as u64 | u64::from(encoding) << 56;
        bytes[CONTEXT_BYTES + 8..].copy_from_slice(&length.to_le_bytes());
        bytes
    }
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seal({:?})", self.algorithm)
    }
}

/// The digest of a sealed slot.
pub(crate) fn digest(ciphertext: &[u8]) -> [u8; DIGEST_BYTES] {
    let mut first = [0; DIGEST_BYTES];
    first.iter_mut().zip(blake3::hash(ciphertext).as_bytes()).for_each(|(to, from)| *to = *from);
    first
}

/// Distinguishes these keys from those of any other use of the secret, and of another version.
const SALT: &[u8] = b"remora sealed table 2";

/// The first bytes of a nonce: what the rest of it counts.
const SLOT: [u8; 4] = *b"slot";
const RECORD: [u8; 4] = *b"strm";

/// Bytes of the context: algorithm and kind, generation, offset, replid.
const CONTEXT_BYTES: usize = 4 + 4 + 8 + 8 + 40;

fn context(algorithm: Algorithm, identity: &Identity) -> [u8; CONTEXT_BYTES] {
    let mut bytes = [0; CONTEXT_BYTES];
    bytes[..4].copy_from_slice(&algorithm.code().to_le_bytes());
    bytes[4..8].copy_from_slice(&identity.kind.code().to_le_bytes());
    bytes[8..16].copy_from_slice(&identity.origin.generation.to_le_bytes());
    bytes[16..24].copy_from_slice(&identity.origin.offset.to_le_bytes());
    bytes[24..].copy_from_slice(identity.origin.history.as_bytes());
    bytes
}

fn nonce(domain: [u8; 4], number: u64) -> aead::Nonce {
    let mut bytes = [0; aead::NONCE_LEN];
    bytes[..4].copy_from_slice(&domain);
    bytes[4..].copy_from_slice(&number.to_le_bytes());
    aead::Nonce::assume_unique_for_key(bytes)
}
