//! The certificates of `--security mtls`: the agent's own, and the authorities that sign those of its peers.
//!
//! Both ends of a connection present a certificate and check that of the other end. The end that connects also checks
//! the name in it. A [`Certificates`] is shared by all connections of an agent, so that they use new files as soon as
//! these have been read again.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use remora_wire::secret_file;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};

use super::certificate_roles::{CertificateRoles, NoRole, WithRole};
use super::control_tls;
use super::role::Role;
use crate::events;
use crate::exit::Failure;
use crate::x509::words;

/// The PEM files of an agent.
#[derive(Clone, Debug)]
pub(crate) struct CertificateFiles {
    /// The agent's certificate, then those between it and its authority.
    pub(crate) chain: PathBuf,
    /// The private key of the first one.
    pub(crate) key: PathBuf,
    /// The authorities that are trusted. Several, while one replaces another.
    pub(crate) authorities: PathBuf,
    /// The options that name the three files, for errors.
    pub(crate) options: [&'static str; 3],
}

/// The options of `--security mtls`.
pub(crate) const MTLS_OPTIONS: [&str; 3] = ["--cert", "--key", "--ca"];

/// The certificates in use.
#[derive(Debug)]
pub(crate) struct Certificates {
    files: CertificateFiles,
    roles: CertificateRoles,
    configs: Mutex<Configs>,
}

/// What the files make.
#[derive(Clone, Debug)]
struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Certificates {
    /// Reads the files. Where this end listens, peers have these roles.
    ///
    /// # Errors
    /// A file cannot be used, the key is not that of the certificate, or the certificate is not valid now.
    pub(crate) fn read(files: CertificateFiles, roles: CertificateRoles) -> Result<Certificates, Failure> {
        let configs = Mutex::new(Configs::read(&files, &roles)?);
        Ok(Certificates { files, roles, configs })
    }

    /// Reads the files again, and logs the outcome. New connections use them; those that are open go on. If a file
    /// cannot be used, what was read before stays in use.
    pub(crate) fn read_again(&self) {
        match Configs::read(&self.files, &self.roles) {
            Ok(configs) => {
                *self.configs.lock().unwrap_or_else(PoisonError::into_inner) = configs;
                tracing::info!(event = events::CERTIFICATES_REREAD, "certificate files read again");
            }
            Err(error) => {
                tracing::error!(event = events::CERTIFICATES_KEPT, %error, "the certificates read before stay in use")
            }
        }
    }

    /// The configuration for connecting.
    pub(crate) fn client(&self) -> Arc<ClientConfig> {
        self.configs().client
    }

    /// The configuration of a port.
    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        self.configs().server
    }

    /// What a peer with this certificate may ask for.
    pub(super) fn role_of(&self, certificate: Option<&[u8]>) -> Role {
        let certificate = certificate.map(CertificateDer::from);
        certificate.and_then(|certificate| self.roles.role_of(&certificate)).unwrap_or(Role::Monitor)
    }

    fn configs(&self) -> Configs {
        self.configs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Configs {
    fn read(files: &CertificateFiles, roles: &CertificateRoles) -> Result<Configs, Failure> {
        let CertificateFiles { chain: chain_file, key: key_file, authorities, options } = files;
        let [chain_option, key_option, authorities_option] = *options;
        let chain = certificates(chain_file, chain_option)?;
        let key = private_key(key_file, key_option)?;
        let roots = Arc::new(roots(authorities, authorities_option)?);
        let provider = Arc::new(ring::default_provider());
        check_pair(files, &chain, &key, &provider)?;
        let unusable = |error: &dyn std::fmt::Display| unusable(authorities, authorities_option, error);
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let clients = clients.map_err(|error| unusable(&error))?;
        match clients.verify_client_cert(&chain[0], &chain[1..], UnixTime::now()) {
            Err(rustls::Error::InvalidCertificate(why)) if is_untimely(&why) => {
                return Err(self::unusable(chain_file, chain_option, &words::plainly(&why)));
            }
            // Peers may trust other authorities than this end does, as while one replaces another.
            Err(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
                tracing::warn!(
                    "no authority in {} ({authorities_option}) has signed the certificate in {} ({chain_option}): \
                     peers with the same authorities refuse it",
                    authorities.display(),
                    chain_file.display()
                );
            }
            _ => {}
        }
        let not_set_up = |error: rustls::Error| Failure::local(format!("TLS cannot be set up: {error}"));
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(not_set_up)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(|error| self::unusable(chain_file, chain_option, &words::of_pair(&error)))?;
        control_tls::of_client(&mut client);
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(not_set_up)?
            .with_client_cert_verifier(Arc::new(WithRole::new(clients, roles.clone())))
            .with_single_cert(chain, key)
            .map_err(|error| self::unusable(chain_file, chain_option, &words::of_pair(&error)))?;
        control_tls::of_port(&mut server);
        Ok(Configs { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn certificates(path: &Path, option: &str) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let unusable = |error: &dyn std::fmt::Display| unusable(path, option, error);
    let mut bytes = Vec::new();
    let file = File::open(path).map(|file| file.take(FILE_BYTES as u64 + 1));
    file.and_then(|mut file| file.read_to_end(&mut bytes)).map_err(|error| unusable(&error))?;
    if bytes.len() > FILE_BYTES {
        return Err(unusable(&TOO_LONG));
    }
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let read = read.map_err(|error| unusable(&words::of_file(&error, &bytes, "certificate")))?;
    if read.is_empty() {
        let none = rustls::pki_types::pem::Error::NoItemsFound;
        return Err(unusable(&words::of_file(&none, &bytes, "certificate")));
    }
    Ok(read)
}

fn private_key(path: &Path, option: &str) -> Result<PrivateKeyDer<'static>, Failure> {
    let text = read_secret(path, option)?;
    PrivateKeyDer::from_pem_slice(&text)
        .map_err(|error| unusable(path, option, &words::of_file(&error, &text, "private key")))
}

/// Reads a file with a private key.
///
/// # Errors
/// The file cannot be read, is too long, or other users could have read or changed it.
pub(super) fn read_secret(path: &Path, option: &str) -> Result<Vec<u8>, Failure> {
    let unusable = |error: &dyn std::fmt::Display| unusable(path, option, error);
    let bytes = secret_file::read(path, FILE_BYTES + 1).map_err(|error| unusable(&error))?;
    if bytes.len() > FILE_BYTES { Err(unusable(&TOO_LONG)) } else { Ok(bytes) }
}

fn roots(path: &Path, option: &str) -> Result<RootCertStore, Failure> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, option)? {
        roots.add(certificate).map_err(|error| unusable(path, option, &words::of_pair(&error)))?;
    }
    Ok(roots)
}

fn check_pair(
    files: &CertificateFiles,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
    provider: &CryptoProvider,
) -> Result<(), Failure> {
    match CertifiedKey::from_der(chain.to_vec(), key.clone_key(), provider) {
        Ok(_) => Ok(()),
        Err(rustls::Error::InconsistentKeys(_)) => Err(Failure::refused(format!(
            "the private key in {} ({}) is not that of the certificate in {} ({}): give the two files that were made \
             together",
            files.key.display(),
            files.options[1],
            files.chain.display(),
            files.options[0]
        ))),
        Err(error) => Err(unusable(&files.key, files.options[1], &words::of_pair(&error))),
    }
}

fn unusable(path: &Path, option: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::refused(format!("the file {} ({option}) cannot be used: {error}", path.display()))
}

fn is_untimely(error: &CertificateError) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(error, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
}

/// What an error of TLS says about certificates, after the peer's name; `None` if it is about something else.
pub(super) fn explain(error: &std::io::Error) -> Option<String> {
    use CertificateError as C;
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    Some(match error {
        rustls::Error::InvalidCertificate(why) => match why {
            C::UnknownIssuer => "presents a certificate that no authority in --ca has signed; does it have \
                --security mtls, and a certificate of the same authority?"
                .to_owned(),
            C::NotValidForName | C::NotValidForNameContext { .. } => {
                format!(
                    "presents a certificate for another name ({why}): give --source by a name in it, or the name that it must have \
                     by --source-name, --lender-name or --peer-name"
                )
            }
            C::ApplicationVerificationFailure => {
                "is not the source of --source-key: it holds another key, or none (remora source --identity FILE)"
                    .to_owned()
            }
            why if is_untimely(why) => format!("presents a certificate that is not valid now ({why}): renew it"),
            C::Other(why) if (*why.0).is::<NoRole>() => {
                format!("presents a certificate that cannot be accepted: {}", why.0)
            }
            why => format!(
                "presents a certificate that cannot be accepted: {}; give each agent a certificate of its own, signed by the authority \
                 in --ca",
                words::plainly(why)
            ),
        },
        rustls::Error::NoCertificatesPresented => {
            "presents no certificate: start it with --security mtls, --cert and --key".to_owned()
        }
        rustls::Error::AlertReceived(alert) => alerted(*alert)?.to_owned(),
        _ => return None,
    })
}

/// What the peer's alert says about this end's certificate.
fn alerted(alert: AlertDescription) -> Option<&'static str> {
    use AlertDescription as A;
    Some(match alert {
        A::CertificateRequired => "requires a certificate of this end: give --security mtls, --cert and --key",
        A::CertificateExpired => "refuses the certificate of this end (--cert), which is not valid now: renew it",
        A::UnknownCA => "refuses the certificate of this end (--cert): no authority that it trusts has signed it",
        A::BadCertificate
        | A::UnsupportedCertificate
        | A::CertificateRevoked
        | A::CertificateUnknown
        | A::AccessDenied => "refuses the certificate of this end (--cert): its log says why",
        _ => return None,
    })
}

/// The longest file, in bytes. Hundreds of certificates fit; a longer file is some other file.
const FILE_BYTES: usize = 1 << 20;
const TOO_LONG: &str = "it is longer than 1 MiB, which no file of keys or certificates is";
