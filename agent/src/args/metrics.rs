//! What an agent shows to those who watch it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;

/// What an agent shows to those who watch it.
#[derive(Clone, Debug, Default, Args)]
pub struct MetricsArgs {
    /// Serve metrics for Prometheus at this address (`/metrics`), the answers for probes (`/healthz`, `/readyz`), and a
    /// page for people (`/`). They name servers and replicas with their addresses, and hold no data; the port asks for
    /// no password.
    #[arg(long, value_name = "ADDR:PORT", help_heading = "Metrics")]
    pub metrics: Option<SocketAddr>,
}

/// The metrics of an agent that ends.
#[derive(Clone, Debug, Default, Args)]
pub struct MetricsFileArgs {
    /// Write metrics into this file, for the textfile collector of node_exporter: every 15 s, and at the end with the
    /// exit code. Its name must end with `.prom`. It replaces an earlier one as a whole, and every user can read it.
    #[arg(long, value_name = "FILE.prom", value_parser = parse_file, help_heading = "Metrics")]
    pub metrics_file: Option<PathBuf>,
}

/// What node_exporter does not read would be missed too late.
fn parse_file(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    match path.extension().is_some_and(|end| end == "prom") {
        true => Ok(path.to_owned()),
        false => Err("the name must end with .prom, or node_exporter does not read the file".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_node_exporter_ignores_is_refused() {
        assert_eq!(parse_file("/a/b.prom").as_deref(), Ok(Path::new("/a/b.prom")));
        for wrong in ["/a/b", "b.txt", ".prom", ""] {
            assert!(parse_file(wrong).is_err(), "{wrong}");
        }
    }
}
