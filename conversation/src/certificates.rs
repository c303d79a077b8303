//! The certificates of `--security mtls`: the agent's own, and the authorities that sign those of its peers.
//!
//! Both ends of a connection present a certificate and check that of the other end. The end that connects also checks
//! the name in it. A [`Certificates`] is shared by all connections of an agent, so that they use new files as soon as
//! these have been read again.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use remora_protocol::Message;
use remora_wire::secret_file;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::{Resumption, verify_server_name};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError,
    RootCertStore, ServerConfig, SignatureScheme,
};

use remora_base::x509;
use remora_process::events;
use remora_process::exit::Failure;

/// The PEM files of an agent.
#[derive(Clone, Debug)]
pub struct CertificateFiles {
    /// The agent's certificate, then those between it and its authority.
    pub chain: PathBuf,
    /// The private key of the first one.
    pub key: PathBuf,
    /// The authorities that are trusted. Several, while one replaces another.
    pub authorities: PathBuf,
    /// The options that name the three files, for errors.
    pub options: [&'static str; 3],
}

/// The options of `--security mtls`.
pub const MTLS_OPTIONS: [&str; 3] = ["--cert", "--key", "--ca"];

/// The certificates in use.
#[derive(Debug)]
pub struct Certificates {
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
    pub fn read(files: CertificateFiles, roles: CertificateRoles) -> Result<Certificates, Failure> {
        let configs = Mutex::new(Configs::read(&files, &roles)?);
        Ok(Certificates { files, roles, configs })
    }

    /// Reads the files again, and logs the outcome. New connections use them; those that are open go on. If a file
    /// cannot be used, what was read before stays in use.
    pub fn read_again(&self) {
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
    pub fn client(&self) -> Arc<ClientConfig> {
        self.configs().client
    }

    /// The configuration of a port.
    pub fn server(&self) -> Arc<ServerConfig> {
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
                return Err(self::unusable(chain_file, chain_option, &x509::words::plainly(&why)));
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
            .map_err(|error| self::unusable(chain_file, chain_option, &x509::words::of_pair(&error)))?;
        of_client(&mut client);
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(not_set_up)?
            .with_client_cert_verifier(Arc::new(WithRole::new(clients, roles.clone())))
            .with_single_cert(chain, key)
            .map_err(|error| self::unusable(chain_file, chain_option, &x509::words::of_pair(&error)))?;
        of_port(&mut server);
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
    let read = read.map_err(|error| unusable(&x509::words::of_file(&error, &bytes, "certificate")))?;
    if read.is_empty() {
        let none = rustls::pki_types::pem::Error::NoItemsFound;
        return Err(unusable(&x509::words::of_file(&none, &bytes, "certificate")));
    }
    Ok(read)
}

fn private_key(path: &Path, option: &str) -> Result<PrivateKeyDer<'static>, Failure> {
    let text = read_secret(path, option)?;
    PrivateKeyDer::from_pem_slice(&text)
        .map_err(|error| unusable(path, option, &x509::words::of_file(&error, &text, "private key")))
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
        roots.add(certificate).map_err(|error| unusable(path, option, &x509::words::of_pair(&error)))?;
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
        Err(error) => Err(unusable(&files.key, files.options[1], &x509::words::of_pair(&error))),
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
                x509::words::plainly(why)
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

// What peers may ask for by the names in their certificates, with `--security mtls`.
//
// A port checks a peer's certificate in two steps: an authority has signed it (rustls), and it is for a name with a
// role. Which role that is, the conversation asks again once the handshake is complete.

/// The names that give certificates a role.
#[derive(Clone, Debug, Default)]
pub struct CertificateRoles {
    /// Of replicas; empty: every certificate that has no other role.
    pub replicas: Vec<ServerName<'static>>,
    /// Of those that may measure.
    pub probers: Vec<ServerName<'static>>,
    /// Of monitors.
    pub monitors: Vec<ServerName<'static>>,
}

impl CertificateRoles {
    /// Whether no name has a role.
    pub fn is_empty(&self) -> bool {
        [&self.replicas, &self.probers, &self.monitors].iter().all(|names| names.is_empty())
    }

    /// The role of a peer with this certificate, which an authority has signed; `None`: it has no name with a role. A
    /// certificate with names of several roles has the one that permits most.
    pub(super) fn role_of(&self, certificate: &CertificateDer<'_>) -> Option<Role> {
        let certificate = ParsedCertificate::try_from(certificate).ok()?;
        let is_for = |names: &[ServerName<'_>]| names.iter().any(|name| verify_server_name(&certificate, name).is_ok());
        if is_for(&self.replicas) {
            Some(Role::Replica)
        } else if is_for(&self.probers) {
            Some(Role::Probe)
        } else if is_for(&self.monitors) {
            Some(Role::Monitor)
        } else {
            self.replicas.is_empty().then_some(Role::Replica)
        }
    }
}

/// Accepts what `clients` does, if it has a role.
#[derive(Debug)]
pub(super) struct WithRole {
    clients: Arc<dyn ClientCertVerifier>,
    roles: CertificateRoles,
}

impl WithRole {
    pub(super) fn new(clients: Arc<dyn ClientCertVerifier>, roles: CertificateRoles) -> WithRole {
        WithRole { clients, roles }
    }
}

impl ClientCertVerifier for WithRole {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.clients.verify_client_cert(certificate, chain, now)?;
        match self.roles.role_of(certificate) {
            Some(_) => Ok(verified),
            None => Err(CertificateError::Other(OtherError(Arc::new(NoRole))).into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.clients.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.clients.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.clients.supported_verify_schemes()
    }
}

/// The certificate is for no name with a role.
#[derive(Debug)]
pub(super) struct NoRole;

impl fmt::Display for NoRole {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("it is for no name in --replica-name, --probe-name or --monitor-name")
    }
}

impl std::error::Error for NoRole {}

// Roles: what a peer may ask for.

/// What a peer may ask for. It follows from the token that the peer proved, and from the names in its certificate. Each
/// role permits what those before it permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The status, and nothing else. No byte of the data set is in it.
    Monitor,
    /// The status, and memory to measure the transports with. No byte of the data set is in either.
    Probe,
    /// Everything: the peer may become a replica.
    Replica,
}

impl Role {
    /// Whether a peer with this role may send this message.
    pub fn may_send(self, message: &Message) -> bool {
        match message {
            Message::StatusQuery | Message::Leave { .. } => true,
            Message::ProbeQuery => self >= Role::Probe,
            _ => self == Role::Replica,
        }
    }

    /// What the role permits, for a peer that asked for more.
    pub fn permits(self) -> &'static str {
        match self {
            Role::Monitor => "the status only",
            Role::Probe => "the status and measurements only",
            Role::Replica => "everything",
        }
    }

    /// The mark of a token with this role in a keyring.
    pub(super) fn mark(self) -> u16 {
        match self {
            Role::Replica => 0,
            Role::Monitor => 1,
            Role::Probe => 2,
        }
    }

    /// The role with this mark. A mark of no role permits the least.
    pub(super) fn of_mark(mark: u16) -> Role {
        [Role::Replica, Role::Probe].into_iter().find(|role| role.mark() == mark).unwrap_or(Role::Monitor)
    }

    /// What both roles permit.
    pub(super) fn and(self, other: Role) -> Role {
        self.min(other)
    }
}

// What all TLS connections between agents have in common. They carry conversations: data lanes have no TLS.

/// The ALPN protocol of conversations.
const PROTOCOL: &[u8] = b"remora/control";

/// The first byte of each TLS record that belongs to a handshake. Neither a conversation nor a lane begins with it.
pub(super) const FIRST_BYTE: u8 = 0x16;

/// Sets up an end that connects. No session is resumed: each one is proved anew.
pub(super) fn of_client(config: &mut ClientConfig) {
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.resumption = Resumption::disabled();
}

/// Sets up a port.
pub(super) fn of_port(config: &mut ServerConfig) {
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.send_tls13_tickets = 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLES: [Role; 3] = [Role::Monitor, Role::Probe, Role::Replica];

    #[test]
    fn a_role_permits_its_own_requests_and_those_of_the_roles_before_it() {
        let join = Message::HandOffQuery { generation: 1, offset: 1 };
        let permitted =
            |role: Role| [&Message::StatusQuery, &Message::ProbeQuery, &join].map(|message| role.may_send(message));
        assert_eq!(ROLES.map(permitted), [[true, false, false], [true, true, false], [true, true, true]]);
    }

    #[test]
    fn a_token_and_a_certificate_together_permit_what_both_do() {
        for (at, role) in ROLES.into_iter().enumerate() {
            assert_eq!(Role::of_mark(role.mark()), role);
            for (other_at, other) in ROLES.into_iter().enumerate() {
                assert_eq!(role.and(other), ROLES[at.min(other_at)]);
            }
        }
        assert_eq!(Role::of_mark(u16::MAX), Role::Monitor);
    }
}
