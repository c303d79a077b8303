//! Errors of TLS in words: what is wrong with which certificate, and what to do. A library's own text is never shown.

use std::fmt;
use std::io;

use rustls::pki_types::pem;
use rustls::{AlertDescription, CertificateError, Error, InconsistentKeys};

use super::{Certificate, Fingerprint, date};

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
