//! The options that say what protects the connections between agents.

use std::path::PathBuf;

use clap::Args;
use rustls::pki_types::ServerName;

use crate::conversation::certificate_roles::CertificateRoles;
use crate::conversation::certificates::{CertificateFiles, Certificates, MTLS_OPTIONS};
use crate::conversation::tokens::Credentials;
use crate::conversation::{Mode, Security, SourceKey};
use crate::exit::{Code, Failure};

/// What protects the connections between agents.
#[derive(Clone, Debug, Args)]
pub struct SecurityArgs {
    /// What protects the connections between agents. `token`: TLS 1.3, authenticated by the token, and tables that are
    /// encrypted once for all replicas on other hosts. `mtls`: the same with certificates of both ends (--cert, --key,
    /// --ca), and with a token only if one is given. `none`: the data can be read and changed on the network. Default:
    /// `token` for every address that is not loopback, `none` for loopback.
    #[arg(long, value_name = "HOW", help_heading = "Security")]
    pub security: Option<Mode>,

    /// With `--security none`: allow addresses that are not loopback, and RDMA without encryption. A host that can read
    /// the network's packets can then read the data, and one that can change them can change a value without notice.
    #[arg(long, help_heading = "Security")]
    pub plaintext_network: bool,

    /// For `mtls`: the certificate of this agent (PEM), then those between it and its authority. It must be valid for
    /// servers at a source and a replica that lends slots, and for clients at every other command and a replica.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub cert: Option<PathBuf>,

    /// For `mtls`: the private key (PEM) of that certificate, which other users may not read.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub key: Option<PathBuf>,

    /// For `mtls`: the certificates (PEM) of the authorities that sign those of all agents. Give several in one file
    /// while one replaces another. Commands that serve read the three files again on SIGHUP.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub ca: Option<PathBuf>,

    /// For `mtls`: the name that the certificates of source and lending replicas must be for, where no option names
    /// that of the one or the other. Default: the host in --source, and the IP address of a replica that lends slots.
    #[arg(long, value_name = "NAME", help_heading = "Security")]
    pub peer_name: Option<String>,
}

/// Which source a command expects.
#[derive(Clone, Debug, Args)]
pub struct SourceKeyArgs {
    /// The key that the source must hold, as `remora source --identity` logs it: 64 hexadecimal digits. A holder of the
    /// token without that key cannot pose as the source. The conversation has TLS then, on loopback too.
    #[arg(long, value_name = "KEY", help_heading = "Security")]
    pub source_key: Option<SourceKey>,

    /// For `mtls`: the name that the source's certificate must be for. Default: that of --peer-name, or the host in
    /// --source. If no other agent's certificate is for this name, none of them can pose as the source.
    #[arg(long, value_name = "NAME", value_parser = parse_name_of_peer, help_heading = "Security")]
    pub source_name: Option<String>,
}

/// Which replicas a replica reads from.
#[derive(Clone, Debug, Default, Args)]
pub struct LenderNameArgs {
    /// For `mtls`: the name that the certificates of replicas that lend slots to this one must be for. Default: that of
    /// --peer-name, or the IP address of the replica.
    #[arg(long, value_name = "NAME", value_parser = parse_name_of_peer, help_heading = "Security")]
    pub lender_name: Option<String>,
}

impl LenderNameArgs {
    /// Adds the name to what the other options say.
    ///
    /// # Errors
    /// These are not for certificates.
    pub(crate) fn apply(&self, given: &SecurityArgs, security: Security) -> Result<Security, Failure> {
        match (&self.lender_name, given.security) {
            (None, _) => Ok(security),
            (Some(name), Some(Mode::Mtls)) => Ok(security.with_lender_name(name.clone())),
            _ => usage("--lender-name goes with --security mtls only"),
        }
    }
}

/// Which certificates may become replicas.
#[derive(Clone, Debug, Default, Args)]
pub struct ReplicaNameArgs {
    /// For `mtls`: a name (DNS or IP address) in the certificates of replicas: only these may read the data. May be
    /// repeated. Default: every certificate that an authority in --ca has signed.
    #[arg(long = "replica-name", value_name = "NAME", value_parser = parse_certificate_name, help_heading = "Security")]
    pub replica_names: Vec<ServerName<'static>>,
}

/// Which certificates may ask for the status, or measure, and no more.
#[derive(Clone, Debug, Default, Args)]
pub struct MonitorNameArgs {
    /// For `mtls`: a name (DNS or IP address) in the certificates of monitors: `remora status` with such a certificate
    /// gets the status, and every other request is refused. May be repeated.
    #[arg(long = "monitor-name", value_name = "NAME", value_parser = parse_certificate_name, help_heading = "Security")]
    pub monitor_names: Vec<ServerName<'static>>,

    /// For `mtls`: a name (DNS or IP address) in the certificates of those who measure: `remora probe` and `remora
    /// status` work with such a certificate, and every other request is refused. May be repeated.
    #[arg(long = "probe-name", value_name = "NAME", value_parser = parse_certificate_name, help_heading = "Security")]
    pub probe_names: Vec<ServerName<'static>>,
}

fn parse_certificate_name(text: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(text.to_owned()).map_err(|_| "is neither a DNS name nor an IP address".to_owned())
}

/// The same, as an option for the end that connects.
fn parse_name_of_peer(text: &str) -> Result<String, String> {
    parse_certificate_name(text).map(|_| text.to_owned())
}

impl SecurityArgs {
    /// What the options say, for an end that expects this source, and where certificates have these roles.
    ///
    /// # Errors
    /// As [`SecurityArgs::open`].
    pub(crate) fn open_for(&self, source: &SourceKeyArgs, roles: CertificateRoles) -> Result<Security, Failure> {
        match (source.source_key, self.security) {
            (Some(_), Some(Mode::None)) => usage("--source-key needs TLS: omit --security none"),
            (Some(_), Some(Mode::Mtls)) => {
                usage("--source-key goes with the token; --security mtls checks certificates")
            }
            (None, mode) if source.source_name.is_some() && mode != Some(Mode::Mtls) => {
                usage("--source-name goes with --security mtls only")
            }
            _ => Ok(self.open(roles)?.with_source_name(source.source_name.clone())),
        }
    }

    /// What proves a command to this source that asks, and lends nothing.
    ///
    /// # Errors
    /// As [`SecurityArgs::open_for`], or the token cannot be used.
    pub(crate) fn credentials(
        &self,
        token_file: Option<&PathBuf>,
        source: &SourceKeyArgs,
    ) -> Result<Credentials, Failure> {
        let security = self.open_for(source, CertificateRoles::default())?;
        Credentials::read(token_file, security, source.source_key)
    }

    /// What the options say.
    ///
    /// # Errors
    /// They contradict each other, or a file cannot be used.
    pub(crate) fn open(&self, roles: CertificateRoles) -> Result<Security, Failure> {
        if !roles.is_empty() && self.security != Some(Mode::Mtls) {
            return usage("--replica-name, --probe-name and --monitor-name go with --security mtls only");
        }
        match (self.security, &self.cert, &self.key, &self.ca) {
            (Some(Mode::Mtls), Some(cert), Some(key), Some(ca)) => {
                if self.plaintext_network {
                    return usage(PLAINTEXT_ALONE);
                }
                let (chain, key, authorities) = (cert.clone(), key.clone(), ca.clone());
                let files = CertificateFiles { chain, key, authorities, options: MTLS_OPTIONS };
                Ok(Security::mtls(Certificates::read(files, roles)?, self.peer_name.clone()))
            }
            (Some(Mode::Mtls), ..) => usage("--security mtls needs --cert, --key and --ca"),
            (_, None, None, None) if self.peer_name.is_none() => {
                if self.plaintext_network && self.security != Some(Mode::None) {
                    return usage(PLAINTEXT_ALONE);
                }
                Ok(Security::new(self.security, self.plaintext_network))
            }
            _ => usage("--cert, --key, --ca and --peer-name go with --security mtls only"),
        }
    }
}

const PLAINTEXT_ALONE: &str = "--plaintext-network goes with --security none only: give both or neither";

fn usage<T>(text: &str) -> Result<T, Failure> {
    Err(Failure::new(Code::Usage, text))
}
