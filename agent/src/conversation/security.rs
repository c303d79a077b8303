//! What protects the connections between agents: control connections and data lanes.
//!
//! With [`Security::Token`] every connection is TLS 1.3, and identities come from the token. The end that listens makes
//! a certificate when it starts, and the end that connects does not check whose it is. The proofs inside depend on the
//! TLS session instead ([`remora_messenger::stack::Link::channel_binding`]), so an attacker in the middle, who has two
//! sessions, fails them.
//!
//! The ALPN protocol tells control connections from data lanes: the listener reads it from the client's first message,
//! which it only peeks at.

use std::sync::Arc;

use clap::ValueEnum;
use remora_protocol::REFUSED_AS_BUSY;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::Acceptor;
use rustls::version::TLS13;
use rustls::{ClientConfig, DigitallySignedStruct, ServerConfig, SignatureScheme};

/// What protects the connections between agents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Security {
    /// Only the proofs and seals of the control connection: the data can be read and changed on the network.
    #[default]
    None,
    /// TLS 1.3, authenticated by the token.
    Token,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Messages between agents.
    Control,
    /// Bytes of the tables.
    Lane,
}

impl Purpose {
    fn protocol(self) -> &'static [u8] {
        match self {
            Purpose::Control => b"remora/control",
            Purpose::Lane => b"remora/lane",
        }
    }
}

/// The first message of a TLS client, as far as it has arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ClientHello {
    /// More bytes are needed.
    Incomplete,
    /// A connection for this purpose.
    For(Purpose),
}

impl Security {
    /// Whether connections have TLS.
    pub(crate) fn is_tls(self) -> bool {
        self == Security::Token
    }

    /// What it is, for logs.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Security::None => "none: the data are not encrypted",
            Security::Token => "TLS 1.3, authenticated by the token",
        }
    }

    /// The configuration of connections for this purpose; `None` without TLS.
    ///
    /// # Errors
    /// rustls's cryptography does not provide TLS 1.3.
    pub(crate) fn client(self, purpose: Purpose) -> Result<Option<Arc<ClientConfig>>, String> {
        if !self.is_tls() {
            return Ok(None);
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = Arc::new(AnyCertificate(provider.signature_verification_algorithms));
        let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let config = config.map_err(|error| error.to_string())?;
        let mut config = config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
        config.alpn_protocols = vec![purpose.protocol().to_vec()];
        config.resumption = Resumption::disabled();
        Ok(Some(Arc::new(config)))
    }

    /// The configuration of a port, with a new certificate; `None` without TLS.
    ///
    /// # Errors
    /// No certificate can be made.
    pub(crate) fn server(self) -> Result<Option<Arc<ServerConfig>>, String> {
        if !self.is_tls() {
            return Ok(None);
        }
        let failed = |error: &dyn std::fmt::Display| format!("cannot make a certificate for TLS: {error}");
        let made = rcgen::generate_simple_self_signed([CERTIFICATE_NAME.to_owned()]).map_err(|error| failed(&error))?;
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).map_err(|error| failed(&error))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .and_then(|config| config.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key));
        let mut config = config.map_err(|error| failed(&error))?;
        config.alpn_protocols = [Purpose::Control, Purpose::Lane].map(|purpose| purpose.protocol().to_vec()).into();
        config.send_tls13_tickets = 0;
        Ok(Some(Arc::new(config)))
    }
}

/// Whether these first bytes of a connection begin a record of TLS's handshake.
pub(super) fn begins_tls(bytes: &[u8]) -> bool {
    bytes.iter().zip([0x16, 0x03]).all(|(byte, expected)| *byte == expected) && !bytes.is_empty()
}

/// Reads the first bytes of a TLS client.
///
/// # Errors
/// Why they are not the beginning of a connection of an agent.
pub(super) fn read_client_hello(mut bytes: &[u8]) -> Result<ClientHello, String> {
    let mut acceptor = Acceptor::default();
    while !bytes.is_empty() {
        acceptor.read_tls(&mut bytes).map_err(|error| error.to_string())?;
    }
    let accepted = acceptor.accept().map_err(|(error, _)| format!("its TLS greeting is not valid: {error}"))?;
    let Some(accepted) = accepted else { return Ok(ClientHello::Incomplete) };
    let hello = accepted.client_hello();
    let mut protocols = hello.alpn().into_iter().flatten();
    let purpose = protocols
        .find_map(|name| [Purpose::Control, Purpose::Lane].into_iter().find(|purpose| purpose.protocol() == name));
    purpose.map(ClientHello::For).ok_or_else(|| "it speaks TLS, but it is not a Remora agent".to_owned())
}

/// Accepts every certificate, and checks that the peer has its key. Who the peer is follows from the proofs inside.
#[derive(Debug)]
struct AnyCertificate(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

/// The code of a refusal because the connection has no TLS. Callers show the text of codes that they do not know.
pub(super) const REFUSED_AS_PLAINTEXT: u8 = REFUSED_AS_BUSY + 1;

/// The name in the certificate, which no end checks.
const CERTIFICATE_NAME: &str = "remora";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustls::ClientConnection;

    use super::*;

    fn hello(purpose: Purpose) -> Vec<u8> {
        let config = Security::Token.client(purpose).unwrap().unwrap();
        let mut client = ClientConnection::new(config, ServerName::try_from("127.0.0.1").unwrap()).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_purpose_is_known_as_soon_as_the_first_message_is_there_and_not_before() {
        for purpose in [Purpose::Control, Purpose::Lane] {
            let bytes = hello(purpose);
            assert!(begins_tls(&bytes) && begins_tls(&bytes[..1]));
            for length in 0..bytes.len() {
                assert_eq!(read_client_hello(&bytes[..length]), Ok(ClientHello::Incomplete), "{length}");
            }
            assert_eq!(read_client_hello(&bytes), Ok(ClientHello::For(purpose)));
        }
        assert!(!begins_tls(b"") && !begins_tls(b"REMORA\r\n") && !begins_tls(&[0x16, 0x01]));
    }

    #[test]
    fn bytes_that_are_no_greeting_of_an_agent_are_refused() {
        assert!(read_client_hello(&[0x16, 0x03, 0x01, 0x00, 0x04, 0xff, 0x00, 0x00, 0x00]).is_err());
        let provider = Arc::new(ring::default_provider());
        let verifier = Arc::new(AnyCertificate(provider.signature_verification_algorithms));
        let config = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]).unwrap();
        let config = config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
        let mut client = ClientConnection::new(Arc::new(config), ServerName::try_from("a.host").unwrap()).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        assert!(read_client_hello(&bytes).unwrap_err().contains("not a Remora agent"));
    }
}
