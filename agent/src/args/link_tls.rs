//! The options for a server that speaks TLS to its primary: towards it the agent is a TLS server.

use std::path::PathBuf;

use clap::Args;

/// With which certificate the agent plays a primary.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Link to the server")]
pub struct LinkTlsArgs {
    /// Certificate chain (PEM) of the agent for a server with `tls-replication yes`.
    #[arg(long, value_name = "FILE", requires = "link_key")]
    pub link_cert: Option<PathBuf>,

    /// The private key (PEM) of that certificate.
    #[arg(long, value_name = "FILE", requires = "link_cert")]
    pub link_key: Option<PathBuf>,

    /// Certificates (PEM) of the authorities that must have signed the server's own certificate. Without this option
    /// the agent asks the server for none.
    #[arg(long, value_name = "FILE", requires = "link_cert")]
    pub link_client_ca: Option<PathBuf>,
}
