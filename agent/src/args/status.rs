//! The arguments of `remora status`.

use std::time::Duration;

use clap::Args;

use super::AskArgs;
use crate::{
    exit::{self, Code},
    units::parse_duration,
};

/// The arguments of `remora status`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct StatusArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ask: AskArgs,

    /// Print one JSON object instead of the table.
    #[arg(long)]
    pub json: bool,

    /// Show it anew every TIME (default: one second), until stopped: on a terminal as a screen, which `q` ends, and
    /// otherwise as text.
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s", value_parser = parse_duration)]
    pub watch: Option<Duration>,
}

const ABOUT: &str = "\
Shows what a source holds and which replicas read it: the snapshot's generation, offset, bytes, memory and age, and for every joined \
replica its phase, percent, rate and lag.";

fn more() -> String {
    format!(
        "\
Examples:
  Once, as a table:
    remora status --source 10.0.0.5:7379 --token-file token
  Every five seconds:
    remora status --source 10.0.0.5:7379 --token-file token --watch 5s
  For a script:
    remora status --source 10.0.0.5:7379 --token-file token --json

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Source, Code::Interrupted])
    )
}
