//! What peers may ask for by the names in their certificates, with `--security mtls`.
//!
//! A port checks a peer's certificate in two steps: an authority has signed it (rustls), and it is for a name with a
//! role. Which role that is, the conversation asks again once the handshake is complete.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, OtherError, SignatureScheme};

use super::role::Role;

/// The names that give certificates a role.
#[derive(Clone, Debug, Default)]
pub(crate) struct CertificateRoles {
    /// Of replicas; empty: every certificate that has no other role.
    pub(crate) replicas: Vec<ServerName<'static>>,
    /// Of those that may measure.
    pub(crate) probers: Vec<ServerName<'static>>,
    /// Of monitors.
    pub(crate) monitors: Vec<ServerName<'static>>,
}

impl CertificateRoles {
    /// Whether no name has a role.
    pub(crate) fn is_empty(&self) -> bool {
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
