//! The arguments of `remora generate`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use clap_complete::Shell;

use crate::exit::{self, Code};

/// The arguments of `remora generate`.
#[derive(Clone, Debug, Args)]
#[command(long_about = "Writes shell completions or man pages, made from the same definitions as the help pages.", after_long_help = more())]
pub struct GenerateArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub what: Generated,
}

/// What to generate.
#[derive(Clone, Debug, Subcommand)]
pub enum Generated {
    /// Print the completions of a shell to stdout.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write one man page per command into a folder, which is created if it does not exist.
    Man {
        /// The folder.
        directory: PathBuf,
    },
}

fn more() -> String {
    format!(
        "\
Examples:
  remora generate completions bash > /etc/bash_completion.d/remora
  remora generate completions zsh > ~/.zfunc/_remora
  remora generate man /usr/local/share/man/man1

{}",
        exit::help_table(&[Code::Usage, Code::Local])
    )
}
