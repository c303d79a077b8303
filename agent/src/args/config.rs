//! The arguments of `remora config`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::exit::{self, Code};

/// The arguments of `remora config`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct ConfigArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: ConfigAction,
}

/// What to do with a file.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigAction {
    /// Check the options of every command in a file. Nothing is opened or started.
    Check {
        /// The file.
        file: PathBuf,
    },
}

const ABOUT: &str = "\
The configuration file of every command: --config FILE, or REMORA_CONFIG.

It is TOML. The options of a command stand in a table with its name, under their long names; those of every command stand \
above. An option may also be in the environment: --token-file is REMORA_TOKEN_FILE. The command line wins over the environment, and the \
environment over the file.";

fn more() -> String {
    format!(
        "\
A file:
  log-level = \"info\"

  [source]
  server = \"redis://127.0.0.1:6379\"
  listen = \"10.0.0.5:7379\"
  token-file = [\"/etc/remora/token\"]
  tune-server = true

  [volume.serve]
  memory = \"64GiB\"

Examples:
  remora config check /etc/remora/remora.toml
  remora source --config /etc/remora/remora.toml --max-replicas 8

{}",
        exit::help_table(&[Code::Usage])
    )
}
