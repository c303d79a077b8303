//! What protects the connections between agents: control connections and data lanes.
//!
//! With [`Mode::Token`], and by default with every address that is not loopback, connections have TLS 1.3, and
//! identities come from the token. The end that listens makes a certificate when it starts, and the end that connects
//! does not check whose it is. The proofs inside depend on the TLS session instead
//! ([`remora_messenger::stack::Link::channel_binding`]), so an attacker in the middle, who has two sessions, fails
//! them.
//!
//! With [`Mode::Mtls`] both ends present certificates and check those of the other end ([`Certificates`]).
//!
//! Data lanes have no TLS. Their proofs derive from a conversation, and what they carry to other hosts is sealed.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use rcgen::{CertificateParams, KeyPair, PKCS_ED25519};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_name};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
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
use remora_fabric::TransportKind;
use remora_process::events;
use remora_process::exit::Failure;
use remora_protocol::Message;
use remora_wire::token;

/// What protects the connections between agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Only the proofs and seals of the control connection: the data can be read and changed on the network.
    None,
    /// TLS 1.3, authenticated by the token.
    Token,
    /// TLS 1.3 with certificates of both ends, and by the token where one is given.
    Mtls,
}

/// What must protect the connections of an agent. The default depends on the other end's address: nothing for loopback,
/// which no other host can read, and TLS for every other address.
#[derive(Clone, Debug, Default)]
pub struct Security {
    mode: Option<Mode>,
    /// Connections to other hosts without TLS are meant.
    plaintext_network: bool,
    /// For [`Mode::Mtls`] only.
    certificates: Option<Arc<Certificates>>,
    names: PeerNames,
    /// The key that this end proves where it listens, for [`Mode::Token`] and the default.
    identity: Option<Arc<Identity>>,
}

/// The names that the certificates of other ends must be for, in place of the addresses by which they are reached.
#[derive(Clone, Debug, Default)]
struct PeerNames {
    source: Option<String>,
    lender: Option<String>,
    /// Of both, where they have no name of their own here.
    both: Option<String>,
}

impl Security {
    /// What `--security` and `--plaintext-network` say, without certificates.
    pub fn new(mode: Option<Mode>, plaintext_network: bool) -> Security {
        Security { mode, plaintext_network, ..Security::default() }
    }

    /// TLS with these certificates for every address.
    pub fn mtls(certificates: Certificates, peer_name: Option<String>) -> Security {
        let certificates = Some(Arc::new(certificates));
        let names = PeerNames { both: peer_name, ..PeerNames::default() };
        Security { mode: Some(Mode::Mtls), certificates, names, ..Security::default() }
    }

    /// The same, where this end proves that key.
    #[must_use]
    pub fn with_identity(self, identity: Identity) -> Security {
        Security { identity: Some(Arc::new(identity)), ..self }
    }

    /// The same, where the certificate of a source must be for that name, if there is one.
    #[must_use]
    pub fn with_source_name(mut self, name: Option<String>) -> Security {
        self.names.source = name;
        self
    }

    /// The same, where the certificate of a replica that lends slots must be for that name.
    #[must_use]
    pub fn with_lender_name(mut self, name: String) -> Security {
        self.names.lender = Some(name);
        self
    }

    /// The certificates of this end, if it has any.
    pub fn certificates(&self) -> Option<&Arc<Certificates>> {
        self.certificates.as_ref()
    }

    /// The name that the certificate of a source must be for if it is reached by this host name or address; `None`:
    /// names are not checked.
    pub(super) fn name_of_source(&self, host: &str) -> Option<String> {
        self.name(self.names.source.as_deref(), host)
    }

    /// The same of a replica that lends slots.
    pub(super) fn name_of_lender(&self, host: &str) -> Option<String> {
        self.name(self.names.lender.as_deref(), host)
    }

    fn name(&self, own: Option<&str>, host: &str) -> Option<String> {
        let name = own.or(self.names.both.as_deref()).unwrap_or(host);
        self.certificates.as_ref().map(|_| name.to_owned())
    }

    /// The name that all peers' certificates must be for, if an option gives it.
    pub fn given_name(&self) -> Option<String> {
        self.names.both.clone()
    }

    /// Whether connections between this end and that address have TLS.
    pub fn needs_tls(&self, address: IpAddr) -> bool {
        match self.mode {
            Some(Mode::None) => false,
            Some(Mode::Token | Mode::Mtls) => true,
            None => !is_loopback(address),
        }
    }

    /// Whether the other end may decide that a connection has TLS, because no option does.
    pub(super) fn may_choose(&self) -> bool {
        self.mode.is_none()
    }

    /// Whether connections between this end and that address may be made.
    ///
    /// # Errors
    /// They would have no TLS, and the address is not loopback. The text begins with a verb.
    pub fn check(&self, address: IpAddr) -> Result<(), &'static str> {
        let is_plain = !self.needs_tls(address) && !is_loopback(address);
        if is_plain && !self.plaintext_network { Err(PLAINTEXT_REFUSED) } else { Ok(()) }
    }

    /// Whether what a source with this address exports to other hosts is ciphertext. Then data lanes and RDMA need no
    /// protection of their own.
    pub fn seals_tables(&self, listen: IpAddr) -> bool {
        self.needs_tls(listen)
    }

    /// Whether data that are not sealed may be read from that address.
    pub fn permits_plain_data(&self, address: IpAddr) -> bool {
        let needs_tls = matches!(self.mode, Some(Mode::Token | Mode::Mtls));
        !needs_tls && (is_loopback(address) || self.plaintext_network)
    }

    /// Whether data that are not sealed may cross the network, by RDMA too.
    pub fn permits_plain_network(&self) -> bool {
        self.plaintext_network
    }

    /// The value of `--security` that other agents need for connections with TLS.
    pub(super) fn option(&self) -> &'static str {
        if self.certificates.is_some() { "mtls" } else { "token" }
    }

    /// What protects a connection with that address.
    pub(super) fn protection(&self, peer: IpAddr, is_tls: bool) -> Protection {
        match is_tls {
            true if self.certificates.is_some() => Protection::Certificates,
            true => Protection::Token,
            false if is_loopback(peer) => Protection::Loopback,
            false => Protection::Plaintext,
        }
    }

    /// What it is at a port with this address, for logs.
    pub fn text(&self, listen: IpAddr) -> &'static str {
        match self.mode {
            Some(Mode::None) => "none: the data are not encrypted",
            Some(Mode::Token) => "TLS 1.3, token",
            Some(Mode::Mtls) => "TLS 1.3, certificates",
            None if is_loopback(listen) => "plaintext on loopback",
            None => "TLS 1.3, token; plaintext on loopback",
        }
    }

    /// The configuration of control connections; `None` if none of them has TLS. The peer must hold that key, if one is
    /// given and certificates do not say who it is.
    ///
    /// # Errors
    /// rustls's cryptography does not provide TLS 1.3.
    pub fn client(&self, expected: Option<SourceKey>) -> Result<Option<Arc<ClientConfig>>, String> {
        if self.mode == Some(Mode::None) {
            return Ok(None);
        }
        if let Some(certificates) = &self.certificates {
            return Ok(Some(certificates.client()));
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = Arc::new(AnyCertificate { algorithms: provider.signature_verification_algorithms, expected });
        let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let config = config.map_err(|error| error.to_string())?;
        let mut config = config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
        of_client(&mut config);
        Ok(Some(Arc::new(config)))
    }

    /// The configuration of a port, with a new certificate unless there are [`Security::certificates`]; `None` if none
    /// of its connections has TLS.
    ///
    /// # Errors
    /// No certificate can be made.
    pub fn server(&self) -> Result<Option<Arc<ServerConfig>>, String> {
        if self.mode == Some(Mode::None) {
            return Ok(None);
        }
        if let Some(certificates) = &self.certificates {
            return Ok(Some(certificates.server()));
        }
        let failed = |error: &dyn std::fmt::Display| format!("cannot make a certificate for TLS: {error}");
        let throw_away;
        let key = match &self.identity {
            Some(identity) => identity.key(),
            None => {
                throw_away = KeyPair::generate().map_err(|error| failed(&error))?;
                &throw_away
            }
        };
        let made = CertificateParams::new([CERTIFICATE_NAME.to_owned()]).and_then(|params| params.self_signed(key));
        let made = made.map_err(|error| failed(&error))?;
        let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(|error| failed(&error))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .and_then(|config| config.with_no_client_auth().with_single_cert(vec![made.der().clone()], key));
        let mut config = config.map_err(|error| failed(&error))?;
        of_port(&mut config);
        Ok(Some(Arc::new(config)))
    }
}

/// Accepts every certificate, or every one of that key, and checks that the peer has its key. Who the peer is otherwise
/// follows from the proofs inside.
#[derive(Debug)]
struct AnyCertificate {
    algorithms: WebPkiSupportedAlgorithms,
    expected: Option<SourceKey>,
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.expected {
            Some(expected) if !expected.is_of(certificate) => {
                Err(CertificateError::ApplicationVerificationFailure.into())
            }
            _ => Ok(ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Why a connection is not made.
const PLAINTEXT_REFUSED: &str = "would send the data over the network without encryption, as --security none asks for: omit \
    --security for TLS, or add --plaintext-network if this is meant";

/// The name in the certificate, which no end checks.
const CERTIFICATE_NAME: &str = "remora";

// What protects the bytes of a connection, for logs and `remora status`.

/// What protects the bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// TLS 1.3; both ends have proved that they hold the token.
    Token,
    /// TLS 1.3; both ends have presented certificates.
    Certificates,
    /// The data are ciphertext. Their key came by TLS 1.3; both ends have proved that they hold the token.
    SealedByToken,
    /// The data are ciphertext. Their key came by TLS 1.3; both ends have presented certificates.
    SealedByCertificates,
    /// The bytes do not leave the host: both ends have loopback addresses. They can be those of a tunnel.
    Loopback,
    /// Nothing: the bytes can be read and changed on their way.
    Plaintext,
    /// The bytes do not leave the host: both ends share its memory.
    SharedMemory,
}

impl Protection {
    /// The protection of data that are read over this transport, in a session whose control connection has this one.
    /// `is_sealed`: other hosts read ciphertext. `peer`: the other end of the session. Data lanes have no TLS.
    pub fn of_data(self, transport: TransportKind, is_sealed: bool, peer: IpAddr) -> Protection {
        match (transport, self) {
            (TransportKind::Shm, _) => Protection::SharedMemory,
            (_, Protection::Token) if is_sealed => Protection::SealedByToken,
            (_, Protection::Certificates) if is_sealed => Protection::SealedByCertificates,
            (TransportKind::Tcp, _) if is_loopback(peer) => Protection::Loopback,
            _ => Protection::Plaintext,
        }
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Protection::Token => "TLS 1.3, token",
            Protection::Certificates => "TLS 1.3, certificates",
            Protection::SealedByToken => "sealed, TLS 1.3, token",
            Protection::SealedByCertificates => "sealed, TLS 1.3, certificates",
            Protection::Loopback => "plaintext on loopback",
            Protection::Plaintext => "plaintext",
            Protection::SharedMemory => "local: shared memory",
        })
    }
}

/// Whether only this host can reach the address.
pub(super) fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

// The key of a source, by which replicas know it. The token cannot prove who is the source: every replica holds it.
//
// The source's certificate is made with this key, so TLS proves that the source holds it. The end that connects
// compares the public half with the one that it was given, and with nothing else in the certificate. The proofs of
// lanes derive from that conversation, so no other end can serve them.

/// The Ed25519 key of a source.
#[derive(Debug)]
pub struct Identity(KeyPair);

/// The public half of an [`Identity`]: 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceKey([u8; KEY_BYTES]);

impl Identity {
    /// Makes a new key.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub fn new() -> Result<Identity, Failure> {
        let made = KeyPair::generate_for(&PKCS_ED25519);
        made.map(Identity).map_err(|error| Failure::local(format!("cannot make a key: {error}")))
    }

    /// Reads the key from a PEM file.
    ///
    /// # Errors
    /// The file cannot be read, other users have access to it, or it does not hold an Ed25519 key.
    pub fn read(path: &Path) -> Result<Identity, Failure> {
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
    pub fn to_pem(&self) -> String {
        self.0.serialize_pem()
    }

    /// The public half.
    pub fn public(&self) -> SourceKey {
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

// The certificates of `--security mtls`: the agent's own, and the authorities that sign those of its peers.
//
// Both ends of a connection present a certificate and check that of the other end. The end that connects also checks
// the name in it. A [`Certificates`] is shared by all connections of an agent, so that they use new files as soon as
// these have been read again.

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
        let untrusted = |error: &dyn std::fmt::Display| unusable(authorities, authorities_option, error);
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let clients = clients.map_err(|error| untrusted(&error))?;
        match clients.verify_client_cert(&chain[0], &chain[1..], UnixTime::now()) {
            Err(rustls::Error::InvalidCertificate(why)) if is_untimely(&why) => {
                return Err(unusable(chain_file, chain_option, &x509::plainly(&why)));
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
            .map_err(|error| unusable(chain_file, chain_option, &x509::of_pair(&error)))?;
        of_client(&mut client);
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(not_set_up)?
            .with_client_cert_verifier(Arc::new(WithRole::new(clients, roles.clone())))
            .with_single_cert(chain, key)
            .map_err(|error| unusable(chain_file, chain_option, &x509::of_pair(&error)))?;
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
    let read = read.map_err(|error| unusable(&x509::of_file(&error, &bytes, "certificate")))?;
    if read.is_empty() {
        let none = rustls::pki_types::pem::Error::NoItemsFound;
        return Err(unusable(&x509::of_file(&none, &bytes, "certificate")));
    }
    Ok(read)
}

fn private_key(path: &Path, option: &str) -> Result<PrivateKeyDer<'static>, Failure> {
    let text = read_secret(path, option)?;
    PrivateKeyDer::from_pem_slice(&text)
        .map_err(|error| unusable(path, option, &x509::of_file(&error, &text, "private key")))
}

/// Reads a file with a private key.
///
/// # Errors
/// The file cannot be read, is too long, or other users could have read or changed it.
pub(super) fn read_secret(path: &Path, option: &str) -> Result<Vec<u8>, Failure> {
    let unusable = |error: &dyn std::fmt::Display| unusable(path, option, error);
    let bytes = token::read(path, FILE_BYTES + 1).map_err(|error| unusable(&error))?;
    if bytes.len() > FILE_BYTES { Err(unusable(&TOO_LONG)) } else { Ok(bytes) }
}

fn roots(path: &Path, option: &str) -> Result<RootCertStore, Failure> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, option)? {
        roots.add(certificate).map_err(|error| unusable(path, option, &x509::of_pair(&error)))?;
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
        Err(error) => Err(unusable(&files.key, files.options[1], &x509::of_pair(&error))),
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
                x509::plainly(why)
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
