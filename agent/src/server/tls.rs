//! TLS to a server: the trusted authorities, the client certificate, and the name expected of the server.
//!
//! This uses rustls with ring. Without `--tls-ca` the system's authorities are trusted. No option disables the check of
//! the server's certificate: to trust a server with a self-signed certificate, name that certificate as the CA.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};

use super::error::SetupError;

/// Files and names for TLS, as given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// Certificates of the authorities to trust, PEM; the system's if `None`.
    pub ca: Option<PathBuf>,
    /// The client certificate chain, PEM, for servers that ask for one.
    pub certificate: Option<PathBuf>,
    /// The private key of the client certificate, PEM.
    pub key: Option<PathBuf>,
    /// The name to expect in the server's certificate, if not the host of its address.
    pub server_name: Option<String>,
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
        ];
        given.into_iter().find(|(given, _)| *given).map(|(_, option)| format!("--{}tls-{option}", self.prefix))
    }

    /// Reads the files and sets up TLS for a server on `host`.
    pub(super) fn prepare(&self, host: &str) -> Result<TlsSetup, SetupError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| SetupError::Tls(error.to_string()))?
            .with_root_certificates(self.roots()?);
        let config = match (&self.certificate, &self.key) {
            (None, None) => builder.with_no_client_auth(),
            (Some(certificate), Some(key)) => {
                builder.with_client_auth_cert(read_certificates(certificate)?, read_key(key)?).map_err(|error| {
                    SetupError::Tls(format!("{} and {}: {error}", certificate.display(), key.display()))
                })?
            }
            (Some(_), None) => return Err(SetupError::Tls("--tls-cert needs --tls-key".into())),
            (None, Some(_)) => return Err(SetupError::Tls("--tls-key needs --tls-cert".into())),
        };
        let name = self.server_name.as_deref().unwrap_or(host).to_owned();
        let name = ServerName::try_from(name.clone()).map_err(|_| {
            SetupError::Tls(format!(
                "{name} is not a valid name of a server certificate; set another one with --tls-server-name"
            ))
        })?;
        Ok(TlsSetup { config: Arc::new(config), name })
    }

    fn roots(&self) -> Result<RootCertStore, SetupError> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            Some(path) => {
                for certificate in read_certificates(path)? {
                    roots.add(certificate).map_err(|error| SetupError::Tls(format!("{}: {error}", path.display())))?;
                }
            }
            None => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    return Err(SetupError::Tls(format!(
                        "the system has no trusted certificate authorities: give --{}tls-ca",
                        self.prefix
                    )));
                }
            }
        }
        Ok(roots)
    }
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, SetupError> {
    let text = read(path, "certificate file")?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match certificates {
        Ok(certificates) if certificates.is_empty() => {
            Err(SetupError::Empty { what: "certificate file", path: path.to_owned() })
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(SetupError::Tls(format!("{}: {error}", path.display()))),
    }
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, SetupError> {
    let text = read(path, "key file")?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| SetupError::Tls(format!("{}: {error}", path.display())))
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
