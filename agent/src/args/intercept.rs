//! The arguments of `remora intercept`.

use clap::{Args, Subcommand};

use super::attend::LISTEN_PORT;
use crate::exit::{self, Code};

/// The arguments of `remora intercept`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct InterceptArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: InterceptAction,
}

/// What to do with the rules.
#[derive(Clone, Debug, Subcommand)]
pub enum InterceptAction {
    /// Make the rules, or replace them.
    Add(AddArgs),
    /// Remove the rules.
    Remove(InterceptPortArgs),
    /// Show the rules, and the entries of the agents that ask for connections.
    Show(ShowArgs),
}

/// Which rules to make.
#[derive(Clone, Debug, Args)]
pub struct AddArgs {
    /// The number of the user that the server runs as. Its connections are meant.
    #[arg(long, value_name = "UID")]
    pub server_uid: u32,

    /// The number of the user that `remora attend` runs as, which must be another one.
    #[arg(long, value_name = "UID")]
    pub agent_uid: u32,

    /// The port of `remora attend`: its --listen-port.
    #[arg(long, value_name = "PORT", default_value_t = LISTEN_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub listen_port: u16,
}

/// Which rules to remove.
#[derive(Clone, Debug, Args)]
pub struct InterceptPortArgs {
    /// The port of `remora attend`: its --listen-port.
    #[arg(long, value_name = "PORT", default_value_t = LISTEN_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub listen_port: u16,
}

/// `remora intercept show` has no options.
#[derive(Clone, Copy, Debug, Args)]
pub struct ShowArgs {}

const ABOUT: &str = "\
The rules by which a server's own connections to its primary come to `remora attend`.

The command needs CAP_NET_ADMIN in the network namespace of the server, and the program nft; `remora attend` needs neither. The rules \
change nothing unless the agent asks for connections each second. So they can stay, and a server whose agent has ended goes to its \
primary by itself, after three seconds at the latest.";

fn more() -> String {
    format!(
        "\
Examples:
  Once, at the start of a host or in an init container:
    remora intercept add --server-uid 999 --agent-uid 998
  See them, and whether an agent asks for connections:
    remora intercept show
  Remove them:
    remora intercept remove

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Local])
    )
}
