//! TLS to a server: the trusted authorities, the client certificate, and the name expected of the server.
//!
//! This uses rustls with ring. Without `--tls-ca` the system's authorities are trusted. No option disables the check of
//! the server's certificate: to trust a server with a self-signed certificate, name that certificate as the CA, or its
//! fingerprint. [`Trust`] decides.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem, pem::PemObject},
};

use super::error::SetupError;
use super::trust::Trust;
use remora_base::x509::Fingerprint;
use remora_base::x509::words::{self, Asked};

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
                    SetupError::Tls(format!("{certificate} ({cert}) and {key} ({of_key}): {}", words::of_pair(&error)))
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
                            words::of_pair(&error)
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
    SetupError::Tls(format!("the file {} cannot be used: {}", path.display(), words::of_file(error, text, wanted)))
}

fn read(path: &Path, what: &'static str) -> Result<Vec<u8>, SetupError> {
    std::fs::read(path).map_err(|cause| SetupError::File { what, path: path.to_owned(), cause })
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
