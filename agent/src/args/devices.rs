//! The arguments of `remora devices`.

use clap::Args;

use crate::exit::{self, Code};

/// The arguments of `remora devices`.
#[derive(Clone, Copy, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct DevicesArgs {
    /// Print one JSON object instead of the text.
    #[arg(long)]
    pub json: bool,
}

const ABOUT: &str = "\
Shows the transports over which this host can read the memory of other agents: its RDMA devices with their ports, addresses and \
limits, shared memory, and TCP with its congestion control. For each it prints a verdict: ready, or what is missing and how to get \
it. It opens no connection and changes nothing.";

fn more() -> String {
    format!(
        "\
Examples:
  See whether RDMA would be used, and why not:
    remora devices
  For a script (exit code 0 whatever there is):
    remora devices --json

{}",
        exit::help_table(&[Code::Usage])
    )
}
