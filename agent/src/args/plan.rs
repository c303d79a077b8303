//! The arguments of `remora plan`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::server::ServerArgs;
use crate::{
    exit::{self, Code},
    server::Task,
    units::{Size, parse_bit_rate, parse_duration},
};

/// The arguments of `remora plan`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct PlanArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub server: ServerArgs,

    /// How many replicas are to be made at once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub replicas: u32,

    /// How fast the network is between the source's host and the replicas': `10Gbit/s`, `1Gbit/s`, `200Mbit/s`, or
    /// bytes per second as `100MiB`. Default: faster than the servers.
    #[arg(long, alias = "link", value_name = "RATE", value_parser = parse_bit_rate)]
    pub rate: Option<Size>,

    /// The `--memory` that the source will get. Default: the source's own default. The memory that holds the whole
    /// snapshot is printed in any case.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub memory: Size,

    /// The `--journal-memory` that the source will get. Default: a quarter of the memory.
    #[arg(long, value_name = "SIZE")]
    pub journal_memory: Option<Size>,

    /// The `--security` of the agents: `none` if all of them are on one host or the network needs no encryption, and
    /// otherwise `token` or `mtls`, where the source holds everything twice, in plain and sealed.
    #[arg(long, value_name = "HOW", default_value = "token")]
    pub security: PlannedSecurity,

    /// Bytes per second that clients write to the primary. Default: measured.
    #[arg(long, value_name = "SIZE")]
    pub write_rate: Option<Size>,

    /// How long to measure what clients write.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = parse_duration, conflicts_with = "write_rate")]
    pub measure: Duration,

    /// Print the plan as JSON.
    #[arg(long)]
    pub json: bool,
}

/// What protects the connections between agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlannedSecurity {
    /// Nothing.
    None,
    /// A token.
    Token,
    /// Certificates.
    Mtls,
}

const ABOUT: &str = "\
Says what replicas of a primary need and cost: memory, backlog, and time.

It asks the primary for its facts and changes nothing. The figures come from the functions by which the agents divide their memory and \
decide; they are estimates of what is not known before, such as the size of the snapshot. remora replica --dry-run says the same of one \
replica and a source that is there, and tries the way to it.";

fn more() -> String {
    format!(
        "\
Examples:
  Three replicas over 10 Gbit/s:
    remora plan --server redis://10.0.0.5:6379 --replicas 3 --rate 10Gbit/s
  What a source with 64 GiB can do, for clients that write 20 MiB each second:
    remora plan --server redis://10.0.0.5:6379 --memory 64GiB --write-rate 20MiB

{}
{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Server, Code::Interrupted]),
        Task::Plan.help()
    )
}
