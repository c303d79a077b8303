//! TLS to a server: the trusted authorities, the client certificate, and the name expected of the server.
//!
//! This uses rustls with ring. Without `--tls-ca` the system's authorities are trusted. No option disables the check of
//! the server's certificate: to trust a server with a self-signed certificate, name that certificate as the CA, or its
//! fingerprint. [`Trust`] decides, and says why not.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
};

use super::refusals::SetupError;

use remora_base::x509::{self, Asked, Certificate, Fingerprint, Unfit};

/// Files and names for TLS, as given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// Certificates of the authorities to trust, PEM; the system's if `None`.
    pub ca: Option<PathBuf>,
    /// The client certificate chain, PEM, for servers that ask for one.
    pub certificate: Option<PathBuf>,
    /// The private key of the client certificate, PEM.
    pub key: Option<PathBuf>,
    /// The name to expect in the server's certificate, if not the host of its address. A server at another address,
    /// such as the primary that a replica names, may have a certificate for this name or for its host.
    pub server_name: Option<String>,
    /// Fingerprints of servers' certificates. If there are any, they replace the check of name and authority.
    pub pins: Vec<Fingerprint>,
    /// What the options' names on the command line begin with, between `--` and `tls-`.
    pub prefix: &'static str,
}

/// A TLS configuration for any number of connections.
#[derive(Clone)]
pub(super) struct TlsSetup {
    pub(super) config: Arc<ClientConfig>,
    pub(super) name: ServerName<'static>,
}

impl TlsOptions {
    /// The first option that was given, for the message that it has no effect.
    pub(super) fn first_given(&self) -> Option<String> {
        let given = [
            (self.ca.is_some(), "ca"),
            (self.certificate.is_some(), "cert"),
            (self.key.is_some(), "key"),
            (self.server_name.is_some(), "server-name"),
            (!self.pins.is_empty(), "pin"),
        ];
        given.into_iter().find(|(given, _)| *given).map(|(_, option)| self.option(option))
    }

    /// Reads the files and sets up TLS for a server on `host`.
    pub(super) fn prepare(&self, host: &str) -> Result<TlsSetup, SetupError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let name = self.server_name.as_deref().unwrap_or(host).to_owned();
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| SetupError::Tls(error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(self.trust(&name, &provider)?));
        let config = match (&self.certificate, &self.key) {
            (None, None) => builder.with_no_client_auth(),
            (Some(certificate), Some(key)) => {
                builder.with_client_auth_cert(read_certificates(certificate)?, read_key(key)?).map_err(|error| {
                    let (certificate, key) = (certificate.display(), key.display());
                    let [cert, of_key] = ["cert", "key"].map(|name| self.option(name));
                    SetupError::Tls(format!("{certificate} ({cert}) and {key} ({of_key}): {}", x509::of_pair(&error)))
                })?
            }
            (Some(_), None) => {
                return Err(SetupError::Tls(format!("{} needs {}", self.option("cert"), self.option("key"))));
            }
            (None, Some(_)) => {
                return Err(SetupError::Tls(format!("{} needs {}", self.option("key"), self.option("cert"))));
            }
        };
        let name = ServerName::try_from(name.clone()).map_err(|_| {
            SetupError::Tls(format!(
                "{name} is not a valid name of a server certificate; set another one with {}",
                self.option("server-name")
            ))
        })?;
        Ok(TlsSetup { config: Arc::new(config), name })
    }

    fn option(&self, name: &str) -> String {
        format!("--{}tls-{name}", self.prefix)
    }

    /// What decides about the server's certificate.
    fn trust(&self, name: &str, provider: &Arc<CryptoProvider>) -> Result<Trust, SetupError> {
        let authorities = self.ca.as_ref().map(|path| path.display().to_string());
        let asked = Asked { name: name.to_owned(), authorities, prefix: self.prefix };
        if !self.pins.is_empty() {
            return Ok(Trust::pinned(&self.pins, asked, provider));
        }
        let (mut roots, mut named) = (RootCertStore::empty(), Vec::new());
        match &self.ca {
            Some(path) => {
                named = read_certificates(path)?;
                for certificate in &named {
                    roots.add(certificate.clone()).map_err(|error| {
                        SetupError::Tls(format!(
                            "{} ({}): {}",
                            path.display(),
                            self.option("ca"),
                            x509::of_pair(&error)
                        ))
                    })?;
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    return Err(SetupError::Tls(format!(
                        "the system has no trusted certificate authorities: give {}",
                        self.option("ca")
                    )));
                }
            }
        }
        // What is no name is refused where the connection's own name is made of it.
        let given = self.server_name.clone().and_then(|name| ServerName::try_from(name).ok());
        Trust::of(roots, named, given, asked, provider).map_err(SetupError::Tls)
    }
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, SetupError> {
    let text = read(path, "certificate file")?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let unusable = |error| of_file(path, &error, &text, "certificate");
    match certificates {
        Ok(certificates) if certificates.is_empty() && text.trim_ascii().is_empty() => {
            Err(SetupError::Empty { what: "certificate file", path: path.to_owned() })
        }
        Ok(certificates) if certificates.is_empty() => Err(unusable(pem::Error::NoItemsFound)),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(unusable(error)),
    }
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, SetupError> {
    let text = read(path, "key file")?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| of_file(path, &error, &text, "private key"))
}

fn of_file(path: &Path, error: &pem::Error, text: &[u8], wanted: &str) -> SetupError {
    SetupError::Tls(format!("the file {} cannot be used: {}", path.display(), x509::of_file(error, text, wanted)))
}

fn read(path: &Path, what: &'static str) -> Result<Vec<u8>, SetupError> {
    std::fs::read(path).map_err(|cause| SetupError::File { what, path: path.to_owned(), cause })
}

// Trust: whether a server's certificate is accepted, and the sentence that says why not.
//
// ```text
//   --tls-pin given ── one of them is its fingerprint ─▶ accepted            none ─▶ refused
//   the certificate itself is in --tls-ca ── its time, purpose and name ────▶ accepted, also with CA:TRUE
//   otherwise ── rustls: a chain to an authority, times, purpose and name ──▶ accepted
// ```
//
// The name is the host of the address, or the one of `--tls-server-name`.
//
// The second way is that of OpenSSL, and so of the servers and their command line: who is named as trusted needs no
// other authority. rustls alone refuses it if it may sign others (CA:TRUE), as `openssl req -x509` makes it.

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn half_a_client_certificate_is_refused_by_the_name_of_the_other_half() {
        let certified = rcgen::generate_simple_self_signed(["localhost".into()]).unwrap();
        let ca = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&ca, certified.cert.pem()).unwrap();
        let options =
            TlsOptions { ca: Some(ca.path().into()), certificate: Some(ca.path().into()), ..TlsOptions::default() };
        let error = options.prepare("localhost").err().unwrap().to_string();
        assert!(error.contains("--tls-key"), "{error}");
    }

    #[test]
    fn a_ca_file_without_certificates_is_refused() {
        let empty = tempfile::NamedTempFile::new().unwrap();
        let options = TlsOptions { ca: Some(empty.path().into()), ..TlsOptions::default() };
        assert!(matches!(options.prepare("localhost"), Err(SetupError::Empty { .. })));
    }

    #[test]
    fn a_missing_ca_file_is_named() {
        let options = TlsOptions { ca: Some("/nowhere/ca.pem".into()), ..TlsOptions::default() };
        let error = options.prepare("localhost").err().unwrap().to_string();
        assert!(error.contains("/nowhere/ca.pem"), "{error}");
    }
}
