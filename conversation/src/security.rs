//! What protects the connections between agents: control connections and data lanes.
//!
//! With [`Mode::Token`], and by default with every address that is not loopback, connections have TLS 1.3, and
//! identities come from the token. The end that listens makes a certificate when it starts, and the end that connects
//! does not check whose it is. The proofs inside depend on the TLS session instead
//! ([`remora_messenger::stack::Link::channel_binding`]), so an attacker in the middle, who has two sessions, fails
//! them.
//!
//! With [`Mode::Mtls`] both ends present certificates and check those of the other end ([`super::certificates`]).
//!
//! Data lanes have no TLS. Their proofs derive from a conversation, and what they carry to other hosts is sealed.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair, PKCS_ED25519};
use remora_fabric::TransportKind;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme};

use super::certificates::{self, Certificates, read_secret};
use remora_process::exit::Failure;

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
        certificates::of_client(&mut config);
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
        certificates::of_port(&mut config);
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
}
