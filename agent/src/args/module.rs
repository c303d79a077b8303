//! The arguments of `remora module`.

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

/// The subcommands of `remora module`.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum ModuleQuestion {
    /// Print the path of the library, for `loadmodule` in a server's configuration, or `MODULE LOAD`.
    Path,
}

const ABOUT: &str = "\
Print the path of the module for servers.

A server with libremora_module.so writes its snapshot at a fraction of the cost, and loads one without a socket in between. Without \
the module everything works too, but slower. Remora looks for the library beside this program, and then in ../lib/remora.";

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
