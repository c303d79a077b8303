//! Certificates (X.509), as far as a sentence about one needs them, and their fingerprints.
//!
//! rustls decides whether a certificate is accepted, and says little about why not. This module shows what a person has
//! to know: the names, the times, who has signed it. Nothing is accepted because of what is read here, except that
//! `remora_server` compares the times and the purpose of a certificate that the operator has named as trusted.
//!
//! - [`Certificate`] reads a certificate; it returns `None` for other bytes, and never panics.
//! - [`Fingerprint`] is what `--tls-pin` compares.
//! - Errors of TLS become sentences: what is wrong with which certificate, and what to do. A library's own text is
//!   never shown.

use std::net::IpAddr;
use std::str::FromStr;
use std::{fmt, io};

use rustls::pki_types::pem;
use rustls::{AlertDescription, CertificateError, Error, InconsistentKeys};
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

/// Why a certificate is not accepted, as the end of a sentence that begins with it. rustls carries it.
#[derive(Debug)]
pub struct Unfit(pub String);

impl fmt::Display for Unfit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

impl std::error::Error for Unfit {}

/// What a server's certificate was checked against.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The name that it must be for.
    pub name: String,
    /// The file of `--tls-ca`; `None`: the system's authorities.
    pub authorities: Option<String>,
    /// What the options' names begin with, between `--` and `tls-`.
    pub prefix: &'static str,
}

impl Asked {
    fn option(&self, name: &str) -> String {
        format!("--{}tls-{name}", self.prefix)
    }

    fn trusted(&self) -> String {
        match &self.authorities {
            Some(file) => format!("{file} ({})", self.option("ca")),
            None => format!("the certificate authorities of this machine (no {} is given)", self.option("ca")),
        }
    }

    /// How to trust this very certificate.
    fn pin(&self, certificate: &[u8]) -> String {
        format!(
            "trust it by {} {}, if `openssl x509 -noout -fingerprint -sha256 -in FILE` prints the same for the server's tls-cert-file",
            self.option("pin"),
            Fingerprint::of(certificate)
        )
    }

    /// Why rustls does not accept this certificate of a server, which has sent this number of others with it.
    pub fn why_not(&self, error: &Error, certificate: &[u8], others: usize) -> String {
        use CertificateError as C;
        let pin = self.pin(certificate);
        let Some(read) = Certificate::read(certificate) else { return format!("cannot be read as X.509: {pin}") };
        // The first thing to say, whatever rustls has looked at first.
        if read.version < 3 {
            return format!(
                "is of the old form X.509 v{}, which has no room for host names (`openssl x509 -req` makes it without -extfile): make one \
                 with subjectAltName={}, or {pin}",
                read.version,
                alt_name(&self.name)
            );
        }
        let Error::InvalidCertificate(why) = error else { return format!("cannot be checked: {pin}") };
        match why {
            C::Expired | C::ExpiredContext { .. } => {
                format!("has expired on {}: renew it", date(read.not_after))
            }
            C::NotValidYet | C::NotValidYetContext { .. } => format!(
                "is valid from {} on only: check the clocks of this host and of the one that made it",
                date(read.not_before)
            ),
            C::NotValidForName | C::NotValidForNameContext { .. } if read.names.is_empty() => {
                let own = read.common_name.as_deref().unwrap_or("none");
                format!(
                    "names no host: it has no subjectAltName, and its common name ({own}) is not looked at; make one with \
                     subjectAltName={}, or {pin}",
                    alt_name(&self.name)
                )
            }
            C::NotValidForName | C::NotValidForNameContext { .. } => format!(
                "is for {}, and not for {}: connect by a name in it, give that name by {}, or {pin}",
                read.named(),
                self.name,
                self.option("server-name")
            ),
            C::InvalidPurpose | C::InvalidPurposeContext { .. } => {
                format!("may not be a server's (its extendedKeyUsage lacks serverAuth): make one that may, or {pin}")
            }
            C::UnknownIssuer | C::Other(_) if read.is_self_signed() => format!(
                "is signed by itself and is not in {}: give its file by {}, or {pin}",
                self.trusted(),
                self.option("ca")
            ),
            C::UnknownIssuer => {
                let sent = match others {
                    0 => "the server sends no certificate beside its own",
                    _ => "nor do those that the server sends beside it lead there",
                };
                format!(
                    "is signed by \"{}\", which is not in {}, and {sent}: give the authority's certificate by {}, and let tls-cert-file on \
                     the server hold its own certificate and then those in between; or {pin}",
                    read.issuer_name.as_deref().unwrap_or("?"),
                    self.trusted(),
                    self.option("ca")
                )
            }
            C::BadSignature => format!(
                "is not signed by the authority in {}, though that has the name of its signer: the authority was made anew; give the new \
                 one by {}",
                self.trusted(),
                self.option("ca")
            ),
            C::Other(_) if read.is_authority => format!(
                "is that of an authority (CA:TRUE): if it is the server's own, give its file by {}, or {pin}",
                self.option("ca")
            ),
            C::Revoked => "was revoked: renew it".to_owned(),
            other => format!("cannot be used ({}): make another one, or {pin}", plainly(other)),
        }
    }

    /// Why the certificate of a server that no pin fits is not accepted.
    pub fn why_not_pinned(&self, certificate: &[u8]) -> String {
        format!(
            "has the fingerprint {}, and {} is given for another one: was it renewed?",
            Fingerprint::of(certificate),
            self.option("pin")
        )
    }
}

/// As `subjectAltName` is written for openssl.
fn alt_name(host: &str) -> String {
    match host.parse::<std::net::IpAddr>() {
        Ok(address) => format!("IP:{address}"),
        Err(_) => format!("DNS:{host}"),
    }
}

/// What else rustls may have against a certificate, in a few words.
pub fn plainly(error: &CertificateError) -> &'static str {
    use CertificateError as C;
    match error {
        C::BadEncoding => "it is damaged",
        C::Expired | C::ExpiredContext { .. } => "it has expired",
        C::NotValidYet | C::NotValidYetContext { .. } => "it is not valid yet",
        C::Revoked => "it was revoked",
        C::UnhandledCriticalExtension => "it has an extension that must be understood and is not known",
        C::UnknownIssuer => "no authority that is trusted has signed it",
        C::BadSignature => "its signature is wrong",
        C::NotValidForName | C::NotValidForNameContext { .. } => "it is for another name",
        C::InvalidPurpose | C::InvalidPurposeContext { .. } => "its extendedKeyUsage does not permit this use",
        C::Other(why) => match why.0.to_string().as_str() {
            "CaUsedAsEndEntity" => "it is that of an authority (CA:TRUE), and not of one host",
            "UnsupportedCertVersion" => "it is of the old form X.509 v1",
            "EndEntityUsedAsCa" => "one that is not an authority's has signed it",
            "PathLenConstraintViolated" => "its authority may not have others below it",
            "NameConstraintViolation" => "its authority may not sign this name",
            _ => "its form is not supported",
        },
        _ => {
            "its signature or its key is of a kind that is not accepted: RSA from 2048 bits on, P-256, P-384 and Ed25519 are, with SHA-2"
        }
    }
}

/// What went wrong in TLS with a server, as a sentence's end that begins with the server. `options`: what the names of
/// the options begin with.
pub fn with_server(cause: &io::Error, prefix: &str) -> String {
    let option = |name: &str| format!("--{prefix}tls-{name}");
    let Some(error) = cause.get_ref().and_then(|error| error.downcast_ref::<Error>()) else {
        return match cause.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "the server closed the connection during the TLS handshake: check that the port is its tls-port; its log says why"
                    .to_owned()
            }
            _ => format!("the TLS handshake failed: {cause}"),
        };
    };
    match error {
        Error::InvalidCertificate(CertificateError::Other(why)) if (*why.0).is::<Unfit>() => {
            format!("the certificate {}", why.0)
        }
        Error::InvalidCertificate(why) => format!("the certificate cannot be used: {}", plainly(why)),
        Error::AlertReceived(alert) => alerted(*alert, &option("cert"), &option("key")),
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } | Error::InappropriateHandshakeMessage { .. } => {
            "the port does not speak TLS: rediss:// needs the server's tls-port".to_owned()
        }
        Error::PeerIncompatible(_) => {
            "the server has no version of TLS, or no cipher, in common with this program (tls-protocols, tls-ciphers): TLS 1.2 or 1.3 is \
             needed"
                .to_owned()
        }
        Error::NoCertificatesPresented => "the server presents no certificate".to_owned(),
        Error::PeerMisbehaved(_) | Error::DecryptError => {
            "the server breaks the rules of TLS: is something between it and this host?".to_owned()
        }
        _ => "the TLS handshake failed: the server's log says why".to_owned(),
    }
}

/// What a server says by its alert.
fn alerted(alert: AlertDescription, certificate: &str, key: &str) -> String {
    use AlertDescription as A;
    match alert {
        A::CertificateRequired => {
            format!(
                "the server asks for a certificate of this end (tls-auth-clients yes): give {certificate} and {key}"
            )
        }
        A::HandshakeFailure => format!(
            "the server refuses the handshake: give {certificate} and {key} if it asks for a certificate (tls-auth-clients yes), and check \
             tls-ciphers"
        ),
        A::UnknownCA => format!(
            "the server does not accept the certificate in {certificate}: its tls-ca-cert-file must hold the authority that has signed it"
        ),
        A::CertificateExpired => {
            format!("the server says that the certificate in {certificate} is not valid now: renew it")
        }
        A::BadCertificate
        | A::UnsupportedCertificate
        | A::CertificateUnknown
        | A::CertificateRevoked
        | A::DecryptError
        | A::AccessDenied => format!("the server does not accept the certificate in {certificate}: its log says why"),
        A::ProtocolVersion => {
            "the server accepts no version of TLS that this program speaks (tls-protocols): 1.2 or 1.3 is needed"
                .to_owned()
        }
        A::UnrecognisedName => "the server does not know the name by which it was reached".to_owned(),
        _ => "the server ended the TLS handshake: its log says why".to_owned(),
    }
}

/// Why a file of certificates or keys cannot be used: its text in PEM is wrong. `wanted`: what it must hold.
pub fn of_file(error: &pem::Error, text: &[u8], wanted: &str) -> String {
    let holds = |words: &str| text.windows(words.len()).any(|part| part == words.as_bytes());
    match error {
        pem::Error::NoItemsFound if holds("ENCRYPTED") => {
            "its key is protected by a passphrase, which remora does not ask for: write it without one (openssl pkey -in FILE -out NEW, \
             readable by its owner alone)"
                .to_owned()
        }
        pem::Error::NoItemsFound if text.first() == Some(&0x30) => {
            format!("it holds no {wanted} in PEM; what it holds may be DER (openssl x509 or openssl pkey, with -inform der, writes PEM)")
        }
        pem::Error::NoItemsFound => format!("it holds no {wanted} in PEM"),
        pem::Error::Io(error) => error.to_string(),
        pem::Error::SectionTooLarge => "it is too long".to_owned(),
        _ => "its PEM is damaged: a line of it was lost or changed".to_owned(),
    }
}

/// Why certificate and key cannot be used together.
pub fn of_pair(error: &Error) -> String {
    match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            "the private key is not that of the certificate: give the two files that were made together".to_owned()
        }
        Error::InvalidCertificate(CertificateError::Other(why)) if why.0.to_string() == "UnsupportedCertVersion" => {
            "the certificate is of the old form X.509 v1: make one with extensions (openssl x509 -req … -extfile)"
                .to_owned()
        }
        Error::InvalidCertificate(why) => format!("the certificate cannot be used: {}", plainly(why)),
        _ => "the private key is of a kind that is not supported: RSA from 2048 bits on, P-256, P-384 and Ed25519 are"
            .to_owned(),
    }
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
