//! Trust: whether a server's certificate is accepted, and the sentence that says why not.
//!
//! ```text
//!   --tls-pin given ── one of them is its fingerprint ─▶ accepted            none ─▶ refused
//!   the certificate itself is in --tls-ca ── its time, purpose and name ────▶ accepted, also with CA:TRUE
//!   otherwise ── rustls: a chain to an authority, times, purpose and name ──▶ accepted
//! ```
//!
//! The name is the host of the address, or the one of `--tls-server-name`.
//!
//! The second way is that of OpenSSL, and so of the servers and their command line: who is named as trusted needs no
//! other authority. rustls alone refuses it if it may sign others (CA:TRUE), as `openssl req -x509` makes it.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme};

use remora_base::x509::words::{Asked, Unfit};
use remora_base::x509::{Certificate, Fingerprint};

/// Checks the certificates of servers.
#[derive(Debug)]
pub(super) struct Trust {
    /// If there are any, they alone decide.
    pins: Vec<Fingerprint>,
    /// The certificates of `--tls-ca`.
    named: Vec<CertificateDer<'static>>,
    chains: Option<Arc<WebPkiServerVerifier>>,
    /// The name of `--tls-server-name`. It also does for a server at another address, such as the primary: whoever has
    /// such a certificate is one of the servers that the user means.
    given: Option<ServerName<'static>>,
    algorithms: WebPkiSupportedAlgorithms,
    asked: Asked,
}

impl Trust {
    /// These fingerprints alone.
    pub(super) fn pinned(pins: &[Fingerprint], asked: Asked, provider: &CryptoProvider) -> Trust {
        let algorithms = provider.signature_verification_algorithms;
        Trust { pins: pins.to_vec(), named: Vec::new(), chains: None, given: None, algorithms, asked }
    }

    /// The authorities, and the certificates that were named as trusted.
    pub(super) fn of(
        roots: RootCertStore,
        named: Vec<CertificateDer<'static>>,
        given: Option<ServerName<'static>>,
        asked: Asked,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Trust, String> {
        let chains = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
        let chains = chains.map_err(|error| error.to_string())?;
        let algorithms = provider.signature_verification_algorithms;
        Ok(Trust { pins: Vec::new(), named, chains: Some(chains), given, algorithms, asked })
    }

    /// A certificate that was named itself: its time, its purpose and its name.
    fn check_named(&self, certificate: &CertificateDer<'_>, name: &ServerName<'_>, now: UnixTime) -> Result<(), Error> {
        let read = Certificate::read(certificate).ok_or(CertificateError::BadEncoding)?;
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        if now > read.not_after {
            return Err(CertificateError::Expired.into());
        }
        if now < read.not_before {
            return Err(CertificateError::NotValidYet.into());
        }
        if !read.is_for_servers {
            return Err(CertificateError::InvalidPurpose.into());
        }
        rustls::client::verify_server_name(&ParsedCertificate::try_from(certificate)?, name)
    }
}

fn is_about_the_name(error: &Error) -> bool {
    use CertificateError::{NotValidForName, NotValidForNameContext};
    matches!(error, Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }))
}

impl ServerCertVerifier for Trust {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let unfit = |text: String| CertificateError::Other(OtherError(Arc::new(Unfit(text)))).into();
        // The primary that a replica names is reached by another name than the options say.
        let asked = Asked { name: name.to_str().into_owned(), ..self.asked.clone() };
        let Some(chains) = &self.chains else {
            return match self.pins.contains(&Fingerprint::of(certificate)) {
                true => Ok(ServerCertVerified::assertion()),
                false => Err(unfit(asked.why_not_pinned(certificate))),
            };
        };
        let check = |name: &ServerName<'_>| match self.named.iter().any(|named| named == certificate) {
            true => self.check_named(certificate, name, now),
            false => chains.verify_server_cert(certificate, others, name, ocsp, now).map(drop),
        };
        let checked = check(name).or_else(|error| match &self.given {
            Some(given) if given != name && is_about_the_name(&error) => check(given).map_err(|_| error),
            _ => Err(error),
        });
        let why = |error| unfit(asked.why_not(&error, certificate, others.len()));
        checked.map(|()| ServerCertVerified::assertion()).map_err(why)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // A certificate with a fingerprint that was given may be of a form that rustls does not read (X.509 v1). The
        // server must have its key all the same.
        match Certificate::read(certificate).filter(|read| self.chains.is_none() && read.version < 3) {
            Some(read) => {
                let key = SubjectPublicKeyInfoDer::from(read.key);
                verify_tls13_signature_with_raw_key(message, &key, signed, &self.algorithms)
            }
            None => verify_tls13_signature(message, certificate, signed, &self.algorithms),
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
