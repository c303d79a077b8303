//! Which source a command reads, and how.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{HostPort, RdmaRead};
use crate::units::parse_duration;

/// Which source a command reads, and how.
#[derive(Clone, Debug, Args)]
pub struct ReadArgs {
    /// Host and port of the source agent.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Source")]
    pub source: HostPort,

    /// How to read the source's memory: `shm` if both agents share a host, `verbs` (RDMA) or `tcp` between hosts;
    /// `auto` uses the first of these over which a read works, and reports which one and why.
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "Source")]
    pub transport: TransportChoice,

    /// TCP connections for reading. More than one helps if a single connection does not fill the link. Several take a
    /// larger share of the link from other traffic: clients of the primary on other hosts wait longer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4), help_heading = "Source")]
    pub lanes: u8,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaRead,

    /// How long to retry while the source or the server is unreachable, with growing pauses. `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Source")]
    pub retry_for: Duration,
}

/// The transport to read over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportChoice {
    /// The first that works, the fastest first.
    Auto,
    /// Shared memory of this host.
    Shm,
    /// RDMA.
    #[value(alias = "rdma")]
    Verbs,
    /// TCP.
    Tcp,
}
