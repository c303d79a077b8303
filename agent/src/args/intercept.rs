//! The arguments of `remora intercept`.

use clap::{Args, Subcommand};

use super::LISTEN_PORT;
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
    #[arg(long, value_name = "UID", required_unless_present = "server_cgroup", conflicts_with = "server_cgroup")]
    pub server_uid: Option<u32>,

    /// The control group (cgroup v2) that the server runs in, instead of its user, as in /proc/PID/cgroup. It must
    /// exist, and rules are for this very group: make them again when the service was restarted.
    #[arg(long, value_name = "PATH", value_parser = parse_cgroup)]
    pub server_cgroup: Option<Cgroup>,

    /// The number of the user that `remora attend` runs as, which must be another one than the server's.
    #[arg(long, value_name = "UID")]
    pub agent_uid: u32,

    /// The port of `remora attend`: its --listen-port.
    #[arg(long, value_name = "PORT", default_value_t = LISTEN_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub listen_port: u16,
}

/// A control group, by its path below the root of the hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup(String);

impl Cgroup {
    /// The path, without a slash at either end.
    pub fn path(&self) -> &str {
        &self.0
    }

    /// How deep it is: 1 is a group right below the root.
    pub fn level(&self) -> usize {
        self.0.split('/').count()
    }
}

fn parse_cgroup(text: &str) -> Result<Cgroup, String> {
    let path = text.strip_prefix("0::").unwrap_or(text).trim_matches('/');
    let is_name = |name: &str| {
        let printable = name.chars().all(|letter| letter.is_ascii_graphic() && letter != '"' && letter != '\\');
        !name.is_empty() && name != "." && name != ".." && printable
    };
    match path.split('/').all(is_name) && path.len() <= CGROUP_CHARS {
        true => Ok(Cgroup(path.to_owned())),
        false => Err("a control group is a path such as system.slice/redis-server.service".to_owned()),
    }
}

/// The longest path: nft takes no longer text.
const CGROUP_CHARS: usize = 255;

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
  For a service, by its control group, whatever user it runs as:
    remora intercept add --server-cgroup system.slice/redis-server.service --agent-uid 998
  See them, and whether an agent asks for connections:
    remora intercept show
  Remove them:
    remora intercept remove

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Local])
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_control_group_is_a_path_that_nft_can_be_given() {
        let table = [("system.slice/redis.service", 2), ("/a/", 1), ("0::/kubepods/pod-1/c@2", 3)];
        for (text, level) in table {
            assert_eq!(parse_cgroup(text).unwrap().level(), level, "{text}");
        }
        for wrong in ["", "/", "a//b", "a/../b", "a\" drop", "a\nb", "a b", "ü", &"a".repeat(256)] {
            assert!(parse_cgroup(wrong).is_err(), "{wrong}");
        }
    }
}
