//! A small data centre on one machine: a primary's host and replicas' hosts, each on a cable that can be cut, slowed
//! and made lossy.
//!
//! ```text
//!   terminal 1                                      terminal 2
//!   xtask net up --replicas 3 --rate 1gbit          xtask net cut replica-2         xtask net heal replica-2
//!     hosts, servers, agents; stays                 xtask net slow replica-1 100mbit, or free
//!     until Ctrl-C; leaves nothing behind             xtask net lossy primary 1.5     (percent, each way; 0: none)
//!                  ▲                                xtask net hosts                 xtask net run primary redis-cli -h …
//!                  └────── one line, over a socket ───┘                               xtask net down
//! ```
//!
//! Needs root. The process of `up` alone holds the hosts: they, their servers and agents end with it, also after `kill
//! -9`, because namespaces and cables have no names that could be left behind. The socket that the other commands use
//! has no name in the file system either.
//!
//! - [`hosts`]: the hosts and what runs on them. [`control`]: the requests of the command line and their answers.

mod control;
mod hosts;

use remora_agent::units::Size;
use remora_bench::suite::ServerChoice;
use remora_bench::sync::Result;
use remora_lab::{BitRate, Loss};

use self::control::Request;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Start hosts, servers and agents, and keep them until stopped.
    Up(Up),
    /// Show the hosts, their addresses and cables.
    Hosts,
    /// Cut a host's cable: packets vanish in both directions.
    Cut {
        /// Name of the host.
        host: String,
    },
    /// Connect the cable again.
    Heal {
        /// Name of the host.
        host: String,
    },
    /// Set the rate of a host's cable, in both directions.
    Slow {
        /// Name of the host.
        host: String,
        /// Such as 100mbit or 1gbit; `free` for no limit.
        #[arg(value_parser = rate)]
        rate: Rate,
    },
    /// Let a host's cable lose packets, in both directions.
    Lossy {
        /// Name of the host.
        host: String,
        /// Percentage of packets lost, each way; 0 for none.
        #[arg(value_parser = loss)]
        percent: Percent,
    },
    /// Run a command on a host.
    Run {
        /// Name of the host.
        host: String,
        /// The command and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// End what `up` has started.
    Down,
}

/// What `up` starts.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Up {
    /// Number of replica hosts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=64))]
    replicas: u8,
    /// Rate of every cable, both ways: 100mbit, 1gbit, 10gbit.
    #[arg(long, default_value = "1gbit")]
    rate: BitRate,
    /// Which servers to use.
    #[arg(long, default_value = "redis")]
    server: ServerChoice,
    /// Size of the data in the primary, in values of 1 MiB.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    size: Size,
    /// Start hosts and servers only; start the agents yourself with `net run`.
    #[arg(long)]
    no_agents: bool,
}

/// A rate, or no limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate(Option<BitRate>);

/// A loss in percent, with a precision of hundredths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Percent(f64);

/// Runs the command.
pub(crate) fn run(command: Command) -> Result<()> {
    let request = match command {
        Command::Up(up) => {
            return crate::stop::or_run(move || {
                hosts::put_up(&hosts::Plan {
                    replicas: up.replicas,
                    rate: up.rate,
                    kind: up.server.kind(),
                    values: up.size.get().div_ceil(1 << 20).max(1),
                    agents: !up.no_agents,
                })
            });
        }
        Command::Run { host, command } => return control::run_there(&host, &command),
        Command::Hosts => Request::Hosts,
        Command::Cut { host } => Request::Cut(host),
        Command::Heal { host } => Request::Heal(host),
        Command::Slow { host, rate } => Request::Slow(host, rate.0.map(|rate| rate.0)),
        Command::Lossy { host, percent } => Request::Lossy(host, percent.0),
        Command::Down => Request::Down,
    };
    print!("{}", control::ask(&request)?);
    Ok(())
}

fn rate(text: &str) -> std::result::Result<Rate, String> {
    if text == "free" { Ok(Rate(None)) } else { text.parse().map(|rate| Rate(Some(rate))) }
}

fn loss(text: &str) -> std::result::Result<Percent, String> {
    let percent = text.trim_end_matches('%').parse::<f64>().ok().filter(|percent| Loss::percent(*percent).is_some());
    percent.map(Percent).ok_or_else(|| format!("{text:?} is not a percentage from 0 to 100"))
}

fn size(text: &str) -> std::result::Result<Size, String> {
    text.parse().map_err(|error: remora_agent::units::UnitError| error.to_string())
}
