//! The key of a source, by which replicas know it. The token cannot prove who is the source: every replica holds it.
//!
//! The source's certificate is made with this key, so TLS proves that the source holds it. The end that connects
//! compares the public half with the one that it was given, and with nothing else in the certificate. The proofs of
//! lanes derive from that conversation, so no other end can serve them.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use rcgen::{KeyPair, PKCS_ED25519};
use rustls::pki_types::CertificateDer;
use rustls::server::ParsedCertificate;

use super::certificates::read_secret;
use crate::exit::Failure;

/// The Ed25519 key of a source.
#[derive(Debug)]
pub(crate) struct Identity(KeyPair);

/// The public half of an [`Identity`]: 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceKey([u8; KEY_BYTES]);

impl Identity {
    /// Makes a new key.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub(crate) fn new() -> Result<Identity, Failure> {
        let made = KeyPair::generate_for(&PKCS_ED25519);
        made.map(Identity).map_err(|error| Failure::local(format!("cannot make a key: {error}")))
    }

    /// Reads the key from a PEM file.
    ///
    /// # Errors
    /// The file cannot be read, other users have access to it, or it does not hold an Ed25519 key.
    pub(crate) fn read(path: &Path) -> Result<Identity, Failure> {
        let text = read_secret(path, "--identity")?;
        let key = String::from_utf8(text).ok().and_then(|text| KeyPair::from_pem(&text).ok());
        key.filter(|key| key.is_compatible(&PKCS_ED25519)).map(Identity).ok_or_else(|| {
            let path = path.display();
            Failure::refused(format!(
                "the file {path} (--identity) holds no private Ed25519 key in PEM: make one by `remora token identity FILE`"
            ))
        })
    }

    /// The private key, as [`Identity::read`] reads it.
    pub(crate) fn to_pem(&self) -> String {
        self.0.serialize_pem()
    }

    /// The public half.
    pub(crate) fn public(&self) -> SourceKey {
        let mut public = [0; KEY_BYTES];
        public.copy_from_slice(self.0.public_key_raw());
        SourceKey(public)
    }

    /// The key, for a certificate.
    pub(super) fn key(&self) -> &KeyPair {
        &self.0
    }
}

impl SourceKey {
    /// Whether a certificate is for this key. Only TLS's handshake shows that the peer holds the private half.
    pub(super) fn is_of(&self, certificate: &CertificateDer<'_>) -> bool {
        let Ok(parsed) = ParsedCertificate::try_from(certificate) else { return false };
        parsed.subject_public_key_info().as_ref() == [SPKI_OF_ED25519, &self.0].concat()
    }
}

impl fmt::Display for SourceKey {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(to, "{byte:02x}"))
    }
}

impl FromStr for SourceKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<SourceKey, &'static str> {
        let wrong = "expected 64 hexadecimal digits, as the source logs them and `remora token identity` prints them";
        let is_hex = text.len() == 2 * KEY_BYTES && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let mut key = [0; KEY_BYTES];
        for (at, byte) in key.iter_mut().enumerate() {
            let digits = text.get(2 * at..2 * at + 2).filter(|_| is_hex).ok_or(wrong)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong)?;
        }
        Ok(SourceKey(key))
    }
}

/// Bytes of a public key of Ed25519.
const KEY_BYTES: usize = 32;

/// What comes before the key in its SubjectPublicKeyInfo (RFC 8410, section 4).
const SPKI_OF_ED25519: &[u8] = &[0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rcgen::CertificateParams;

    use super::*;

    #[test]
    fn a_certificate_is_of_the_key_that_made_it_and_of_no_other() {
        let [one, other] = [(); 2].map(|()| Identity::new().unwrap());
        let certificate = CertificateParams::new([]).unwrap().self_signed(one.key()).unwrap();
        assert!(one.public().is_of(certificate.der()));
        assert!(!other.public().is_of(certificate.der()));
        let usual = rcgen::generate_simple_self_signed([]).unwrap();
        assert!(!one.public().is_of(usual.cert.der()));
        assert!(!one.public().is_of(&CertificateDer::from(vec![1, 2, 3])));
    }

    #[test]
    fn a_public_key_is_written_in_hexadecimal_digits() {
        let key = Identity::new().unwrap().public();
        assert_eq!(key.to_string().parse(), Ok(key));
        for wrong in ["", "12", &"g".repeat(64), &"é".repeat(32), &"0".repeat(65)] {
            assert!(wrong.parse::<SourceKey>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_key_is_the_same_after_it_was_written_to_a_file() {
        let key = Identity::new().unwrap();
        let again = KeyPair::from_pem(&key.to_pem()).unwrap();
        assert_eq!(Identity(again).public(), key.public());
    }
}
