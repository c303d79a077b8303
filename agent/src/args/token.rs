//! The arguments of `remora token`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::exit::{self, Code};

/// The arguments of `remora token`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct TokenCommandArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: TokenAction,
}

/// The subcommands of `remora token`.
#[derive(Clone, Debug, Subcommand)]
pub enum TokenAction {
    /// Write a new random token into a file that only its owner can read.
    New {
        /// The file, which must not exist yet; `-` for stdout.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Write a new key of a source into a file that only its owner can read, and print the public half, which replicas
    /// are given by --source-key.
    Identity {
        /// The file, which must not exist yet.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

const ABOUT: &str = "\
Makes the secret that a source and its replicas share.

The token has 256 random bits from the system, as 64 hexadecimal digits. Copy the file to the other hosts over a channel that you \
trust, such as ssh. The agents refuse a token file that other users can read or change, and a token that is short or repeats few bytes.";

fn more() -> String {
    format!(
        "\
Examples:
  remora token new token
  A key by which replicas know their source, though others hold the token too:
    remora token identity source.key
  As a secret of another system:
    remora token new - | kubectl create secret generic remora --from-file=token=/dev/stdin

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Local])
    )
}
