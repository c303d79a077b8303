//! What an agent shows to those who watch it.

use std::net::SocketAddr;

use clap::Args;

/// What an agent shows to those who watch it.
#[derive(Clone, Debug, Default, Args)]
pub struct MetricsArgs {
    /// Serve metrics for Prometheus at this address (`/metrics`), and the answers for probes (`/healthz`, `/readyz`).
    /// They name servers and replicas with their addresses, and hold no data; the port asks for no password.
    #[arg(long, value_name = "ADDR:PORT", help_heading = "Metrics")]
    pub metrics: Option<SocketAddr>,
}
