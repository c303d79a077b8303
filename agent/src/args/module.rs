//! `remora module`: what can be typed.

use clap::{Args, Subcommand};

use crate::exit::{self, Code};

/// The arguments of `remora module`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct ModuleArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub question: ModuleQuestion,
}

/// What may be asked.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum ModuleQuestion {
    /// Print where the library lies, for `loadmodule` in a server's configuration, or `MODULE LOAD`.
    Path,
}

const ABOUT: &str = "\
Say where the module for servers lies.

A server that has loaded libremora_module.so gives its snapshot at a fraction of the cost, and takes one in without a socket in \
between. Without it everything works as well, slower. The library is looked for beside this program, and then in ../lib/remora.";

fn more() -> String {
    format!(
        "\
Examples:
  In the server's configuration:
    loadmodule /usr/lib/remora/libremora_module.so
  Into a running server that allows it (enable-module-command):
    redis-cli MODULE LOAD \"$(remora module path)\"

{}",
        exit::help_table(&[Code::Usage, Code::Local])
    )
}
