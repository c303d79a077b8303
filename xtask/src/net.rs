//! A small data centre on one machine: a primary's host and replicas' hosts, each on a cable that can be cut, slowed and made lossy.
//!
//! ```text
//!   terminal 1                                      terminal 2
//!   xtask net up --replicas 3 --rate 1gbit          xtask net cut replica-2         xtask net heal replica-2
//!     hosts, servers, agents; stays                 xtask net slow replica-1 100mbit, or free
//!     until Ctrl-C, and nothing is left             xtask net lossy primary 1.5     (percent, each way; 0: none)
//!                  ▲                                xtask net hosts                 xtask net run primary redis-cli -h …
//!                  └────── one line, by a socket ───┘                               xtask net down
//! ```
//!
//! Needs root. `up` alone holds the hosts: they, their servers and agents go with its process, also after `kill -9`, as nothing of it
//! has a name that could be left behind; the socket by which the others find it has none in the file system either.
//!
//! - [`stage`]: what `up` puts up. [`talk`]: the line and its answer.

mod stage;
mod talk;

use remora_agent::units::Size;
use remora_bench::suite::ServerChoice;
use remora_bench::sync::Result;
use remora_lab::{BitRate, Loss};

use self::talk::Order;

/// What can be typed.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Put up hosts, servers and agents, and stay until stopped.
    Up(Up),
    /// Show the hosts, their addresses and cables.
    Hosts,
    /// Pull a host's cable: packets vanish both ways.
    Cut {
        /// Name of the host.
        host: String,
    },
    /// Plug it in again.
    Heal {
        /// Name of the host.
        host: String,
    },
    /// Give a host's cable another rate, both ways.
    Slow {
        /// Name of the host.
        host: String,
        /// As 100mbit, 1gbit; `free` for as fast as this machine.
        #[arg(value_parser = rate)]
        rate: Rate,
    },
    /// Let a host's cable lose packets, both ways.
    Lossy {
        /// Name of the host.
        host: String,
        /// Percent of them, each way; 0 for none.
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
    /// End what `up` has put up.
    Down,
}

/// What is put up.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Up {
    /// How many replicas' hosts.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=64))]
    replicas: u8,
    /// Rate of every cable, both ways: 100mbit, 1gbit, 10gbit.
    #[arg(long, default_value = "1gbit")]
    rate: BitRate,
    /// Which servers.
    #[arg(long, default_value = "redis")]
    server: ServerChoice,
    /// How much data the primary is filled with, in values of 1 MiB.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    size: Size,
    /// Hosts and servers only: the agents are for you to start, by `net run`.
    #[arg(long)]
    no_agents: bool,
}

/// A rate or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate(Option<BitRate>);

/// Hundredths are enough.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Percent(f64);

/// Runs it.
pub(crate) fn run(command: Command) -> Result<()> {
    let order = match command {
        Command::Up(up) => {
            return crate::stop::or_run(move || {
                stage::put_up(&stage::Plan {
                    replicas: up.replicas,
                    rate: up.rate,
                    kind: up.server.kind(),
                    values: up.size.get().div_ceil(1 << 20).max(1),
                    agents: !up.no_agents,
                })
            });
        }
        Command::Run { host, command } => return talk::run_there(&host, &command),
        Command::Hosts => Order::Hosts,
        Command::Cut { host } => Order::Cut(host),
        Command::Heal { host } => Order::Heal(host),
        Command::Slow { host, rate } => Order::Slow(host, rate.0.map(|rate| rate.0)),
        Command::Lossy { host, percent } => Order::Lossy(host, percent.0),
        Command::Down => Order::Down,
    };
    print!("{}", talk::ask(&order)?);
    Ok(())
}

fn rate(text: &str) -> std::result::Result<Rate, String> {
    if text == "free" { Ok(Rate(None)) } else { text.parse().map(|rate| Rate(Some(rate))) }
}

fn loss(text: &str) -> std::result::Result<Percent, String> {
    let percent = text.trim_end_matches('%').parse::<f64>().ok().filter(|percent| Loss::percent(*percent).is_some());
    percent.map(Percent).ok_or_else(|| format!("{text:?} is no share of a hundred"))
}

fn size(text: &str) -> std::result::Result<Size, String> {
    text.parse().map_err(|error: remora_agent::units::UnitError| error.to_string())
}
