//! `remora devices`: what can be typed.

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
Shows what this machine can read another's memory by: its RDMA devices with their ports, addresses and limits, shared memory, and \
TCP with its congestion control; for each a verdict: ready, or what is missing and how to get it. Nothing is connected and nothing \
changed.";

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
