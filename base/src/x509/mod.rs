//! Certificates (X.509), as far as a sentence about one needs them, and their fingerprints.
//!
//! rustls decides whether a certificate is accepted, and says little about why not. This module shows what a person has
//! to know: the names, the times, who has signed it. Nothing is accepted because of what is read here, except that
//! `remora_server` compares the times and the purpose of a certificate that the operator has named as trusted.
//!
//! - [`Certificate`] reads a certificate; it returns `None` for other bytes, and never panics.
//! - [`Fingerprint`] is what `--tls-pin` compares.
//! - [`words`] turns errors of TLS into sentences.

pub mod words;

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate, X509Name};

/// The SHA-256 of a whole certificate, as `openssl x509 -fingerprint -sha256` prints it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// That of a certificate.
    pub fn of(certificate: &[u8]) -> Fingerprint {
        Fingerprint(Sha256::digest(certificate).into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(to, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, to)
    }
}

impl FromStr for Fingerprint {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Fingerprint, &'static str> {
        const WRONG: &str = "expected sha256: and 64 hexadecimal digits, with or without colons between them, as `openssl x509 -noout \
            -fingerprint -sha256 -in FILE` prints them";
        let small = text.to_ascii_lowercase();
        let digits =
            ["sha256:", "sha256 fingerprint="].iter().find_map(|prefix| small.strip_prefix(prefix)).ok_or(WRONG)?;
        let pairs: Vec<&str> = match digits.contains(':') {
            true => digits.split(':').collect(),
            false => (0..digits.len()).step_by(2).map(|at| digits.get(at..at + 2).unwrap_or_default()).collect(),
        };
        let mut bytes = [0; 32];
        if pairs.len() != bytes.len() {
            return Err(WRONG);
        }
        for (byte, pair) in bytes.iter_mut().zip(pairs) {
            let is_hex = pair.len() == 2 && pair.bytes().all(|digit| digit.is_ascii_hexdigit());
            *byte = u8::from_str_radix(pair, 16).ok().filter(|_| is_hex).ok_or(WRONG)?;
        }
        Ok(Fingerprint(bytes))
    }
}

/// What a certificate says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificate {
    /// 1, or 3 with extensions.
    pub version: u8,
    /// Whose it is, and who has signed it, as the certificate writes them.
    pub subject: Vec<u8>,
    /// The name of who has signed it, as DER: chains are compared by it.
    pub issuer: Vec<u8>,
    /// The common name of its holder.
    pub common_name: Option<String>,
    /// The common name of who has signed it.
    pub issuer_name: Option<String>,
    /// From when to when it is valid, in seconds of Unix time.
    pub not_before: i64,
    /// The last second of its time.
    pub not_after: i64,
    /// The names and addresses of the subjectAltName.
    pub names: Vec<String>,
    /// Whether it is that of an authority.
    pub is_authority: bool,
    /// Whether it may be a server's: it says nothing of purposes, or names this one.
    pub is_for_servers: bool,
    /// Its public key, as a SubjectPublicKeyInfo.
    pub key: Vec<u8>,
}

/// More names than a sentence has room for.
const NAMES_MAX: usize = 8;

impl Certificate {
    /// Reads a certificate. `None` if the bytes are none.
    pub fn read(bytes: &[u8]) -> Option<Certificate> {
        let (_, read) = X509Certificate::from_der(bytes).ok()?;
        let purposes = read.extended_key_usage().ok().flatten();
        let alternatives = read.subject_alternative_name().ok().flatten();
        let names = alternatives.iter().flat_map(|names| &names.value.general_names);
        Some(Certificate {
            version: u8::try_from(read.version().0).ok()?.checked_add(1)?,
            subject: read.subject().as_raw().to_vec(),
            issuer: read.issuer().as_raw().to_vec(),
            common_name: common_name(read.subject()),
            issuer_name: common_name(read.issuer()),
            not_before: read.validity().not_before.timestamp(),
            not_after: read.validity().not_after.timestamp(),
            names: names.filter_map(alternative).collect(),
            is_authority: read.is_ca(),
            is_for_servers: purposes.is_none_or(|purposes| purposes.value.any || purposes.value.server_auth),
            key: read.public_key().raw.to_vec(),
        })
    }

    /// Whether it has signed itself, as it says.
    pub fn is_self_signed(&self) -> bool {
        self.subject == self.issuer
    }

    /// The names in it, for a sentence.
    pub fn named(&self) -> String {
        let mut text = self.names.iter().take(NAMES_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
        if self.names.len() > NAMES_MAX {
            text.push_str(&format!(" and {} more", self.names.len() - NAMES_MAX));
        }
        text
    }
}

fn common_name(name: &X509Name<'_>) -> Option<String> {
    let value = name.iter_common_name().next()?.as_slice();
    Some(String::from_utf8_lossy(value).into_owned())
}

/// A name or an address of the subjectAltName.
fn alternative(name: &GeneralName<'_>) -> Option<String> {
    match *name {
        GeneralName::DNSName(name) => Some(name.to_owned()),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
            let v6 = <[u8; 16]>::try_from(bytes).map(IpAddr::from);
            v4.or(v6).ok().map(|address| address.to_string())
        }
        _ => None,
    }
}

/// The calendar's date of a time, as `2026-11-27`.
fn date(unix: i64) -> String {
    OffsetDateTime::from_unix_timestamp(unix).map_or_else(|_| unix.to_string(), |time| time.date().to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};

    use super::*;

    fn made(change: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
        let mut params =
            CertificateParams::new(["db1.example".to_owned(), "10.0.0.1".to_owned(), "::1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "one");
        change(&mut params);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn a_certificate_says_its_names_its_times_and_its_purpose() {
        let read = Certificate::read(&made(|params| {
            params.not_before = rcgen::date_time_ymd(2020, 2, 29);
            params.not_after = rcgen::date_time_ymd(2049, 12, 31);
        }))
        .unwrap();
        assert_eq!((read.version, read.named().as_str()), (3, "db1.example, 10.0.0.1, ::1"));
        assert_eq!(read.common_name.as_deref(), Some("one"));
        assert_eq!((read.not_before, read.not_after), (1_582_934_400, 2_524_521_600));
        assert!(read.is_self_signed() && !read.is_authority && read.is_for_servers);
        let of_authority = made(|params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
        assert!(Certificate::read(&of_authority).unwrap().is_authority);
        let for_clients = made(|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]);
        assert!(!Certificate::read(&for_clients).unwrap().is_for_servers);
        let late = made(|params| params.not_after = rcgen::date_time_ymd(2050, 1, 1));
        assert_eq!(Certificate::read(&late).unwrap().not_after, 2_524_608_000);
    }

    #[test]
    fn a_fingerprint_is_read_as_openssl_prints_it_and_nothing_else_is() {
        let fingerprint = Fingerprint::of(b"a certificate");
        let plain = fingerprint.to_string();
        let digits = plain.strip_prefix("sha256:").unwrap().to_uppercase();
        let pairs: Vec<&str> = (0..32).map(|at| &digits[2 * at..2 * at + 2]).collect();
        for text in [plain.clone(), format!("SHA256:{digits}"), format!("sha256 Fingerprint={}", pairs.join(":"))] {
            assert_eq!(text.parse(), Ok(fingerprint), "{text}");
        }
        let short = &plain[..plain.len() - 2];
        for text in [
            "",
            "sha256:",
            &digits,
            short,
            &format!("{plain}00"),
            &plain.replace('a', "g"),
            &format!("sha1:{digits}"),
            &format!("sha256:{}", "é".repeat(32)),
            "sha256:1:2",
        ] {
            // Without the digit that was replaced it is still itself.
            if text != plain {
                assert!(text.parse::<Fingerprint>().is_err(), "{text}");
            }
        }
    }

    proptest! {
        #[test]
        fn bytes_that_are_no_certificate_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Certificate::read(&bytes);
        }

        #[test]
        fn a_damaged_certificate_does_not_panic(at in 0_usize..300, to in any::<u8>(), end in 0_usize..400) {
            let mut bytes = made(|_| {});
            if let Some(byte) = bytes.get_mut(at) {
                *byte = to;
            }
            bytes.truncate(end);
            let _ = Certificate::read(&bytes);
        }
    }
}
