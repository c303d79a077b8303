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
//! First the command line, then its requests and their answers, then the hosts and what runs on them.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;
use std::{process, thread};

use remora_agent::units::Size;
use remora_bench::suite::ServerChoice;
use remora_bench::sync::{Program, Result};
use remora_lab::{Agent, BitRate, Host, Kind, Loss, Net, Server, Shape, scratch};
use serde::{Deserialize, Serialize};

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
            return crate::process::or_run(move || {
                put_up(&Plan {
                    replicas: up.replicas,
                    rate: up.rate,
                    kind: up.server.kind(),
                    values: up.size.get().div_ceil(1 << 20).max(1),
                    agents: !up.no_agents,
                })
            });
        }
        Command::Run { host, command } => return run_there(&host, &command),
        Command::Hosts => Request::Hosts,
        Command::Cut { host } => Request::Cut(host),
        Command::Heal { host } => Request::Heal(host),
        Command::Slow { host, rate } => Request::Slow(host, rate.0.map(|rate| rate.0)),
        Command::Lossy { host, percent } => Request::Lossy(host, percent.0),
        Command::Down => Request::Down,
    };
    print!("{}", ask(&request)?);
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

// One line to the process that holds the hosts, and its answer. Both are JSON, over an abstract unix socket.

/// A command to that process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Request {
    Hosts,
    Cut(String),
    Heal(String),
    /// Bits per second; `None` for no limit.
    Slow(String, Option<u64>),
    /// Percentage.
    Lossy(String, f64),
    /// Asks for the path of the host's network namespace.
    Where(String),
    Down,
}

/// The answer: text for the user, or the path that [`Request::Where`] asks for.
type Answer = std::result::Result<String, String>;

/// Sends a command and waits for the answer.
fn ask(request: &Request) -> Result<String> {
    let missing = |error| format!("no test network is running here ({error}); start one with `xtask net up`, as root");
    let mut line = UnixStream::connect_addr(&name()?).map_err(missing)?;
    line.set_read_timeout(Some(ANSWER_TIME))?;
    writeln!(line, "{}", serde_json::to_string(request)?)?;
    let mut answer = String::new();
    line.read_to_string(&mut answer).map_err(|error| {
        format!("no answer within {ANSWER_TIME:?} ({error}): the network may still be starting; the command may still be executed")
    })?;
    let answer: Answer =
        serde_json::from_str(&answer).map_err(|error| format!("invalid answer {answer:?}: {error}"))?;
    Ok(answer?)
}

/// Runs a command on the host, with this process's input and output.
fn run_there(host: &str, command: &[String]) -> Result<()> {
    let path = ask(&Request::Where(host.into()))?;
    let status = process::Command::new("nsenter").arg(format!("--net={path}")).arg("--").args(command).status();
    let status = status.map_err(|error| format!("the program nsenter (package util-linux): {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{} on {host}: {status}", command.join(" ")).into()) }
}

/// Where commands are accepted.
struct CommandListener(UnixListener);

impl CommandListener {
    /// Fails if a test network is already running on this machine.
    fn open() -> Result<CommandListener> {
        let taken = |error| {
            format!("cannot accept commands ({error}): is another `xtask net up` running? `xtask net down` ends it")
        };
        let listener = UnixListener::bind_addr(&name()?).map_err(taken)?;
        listener.set_nonblocking(true)?;
        Ok(CommandListener(listener))
    }

    /// Answers the waiting commands of clients that are root. Waits at most [`ORDER_TIME`] for each.
    fn serve(&self, mut answer: impl FnMut(Request) -> Answer) -> Result<()> {
        loop {
            let mut line = match self.0.accept() {
                Ok((line, _)) => line,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            // A malformed or aborted command harms only its own client.
            let _ = serve_one(&mut line, &mut answer);
        }
    }
}

fn serve_one(line: &mut UnixStream, answer: &mut impl FnMut(Request) -> Answer) -> Result<()> {
    line.set_nonblocking(false)?;
    line.set_read_timeout(Some(ORDER_TIME))?;
    let peer = rustix::net::sockopt::socket_peercred(&*line)?;
    let answer = if peer.uid == rustix::process::geteuid() {
        let mut text = String::new();
        BufReader::new((&*line).take(LONGEST_ORDER)).read_line(&mut text)?;
        serde_json::from_str(&text).map_err(|error| format!("invalid command: {error}")).and_then(answer)
    } else {
        Err("only root can send commands".into())
    };
    line.write_all(serde_json::to_string(&answer)?.as_bytes())?;
    Ok(())
}

/// In Linux's abstract namespace: the name disappears with the process.
fn name() -> Result<SocketAddr> {
    Ok(SocketAddr::from_abstract_name(b"remora-test-network")?)
}

/// Time limit for an answer, which calls `ip` and `tc`.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Time limit for the line once its sender has connected.
const ORDER_TIME: Duration = Duration::from_millis(500);

/// Limit on the bytes of a line: a host's name and a number.
const LONGEST_ORDER: u64 = 4096;

// What `up` starts: hosts, a filled primary with its source, empty servers with their replica agents. It stays and
// executes commands.

/// What to start.
struct Plan {
    replicas: u8,
    rate: BitRate,
    kind: Kind,
    /// In MiB.
    values: u64,
    agents: bool,
}

/// Starts everything, and executes commands until one of them ends it.
fn put_up(plan: &Plan) -> Result<()> {
    let desk = CommandListener::open()?;
    let program = Program::build()?;
    let folder = scratch::folder("net")?;
    let net = Net::new()?;
    let names = (1..=plan.replicas).map(|number| format!("replica-{number}"));
    let mut network = TestNetwork { hosts: Vec::new(), is_over: false };
    for name in ["primary".to_owned()].into_iter().chain(names) {
        let host = net.host(&name)?;
        host.shape(Shape::bits(plan.rate.0))?;
        let server = Server::builder(plan.kind).on(&host).start()?;
        network.hosts.push(TestHost { host, server, agent: None, has_told: false, cable: Cable::new(plan.rate) });
    }
    program.load(&network.primary()?.server, plan.values, 1 << 20, false)?;
    if plan.agents {
        network.start_agents(&program, folder.path(), plan.values)?;
    }
    print!("{}", network.describe()?);
    println!("stop with Ctrl-C or `xtask net down`; `xtask net --help` lists the other commands");
    while !network.is_over {
        desk.serve(|request| network.execute(request).map_err(|error| error.to_string()))?;
        network.look_after()?;
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

struct TestNetwork {
    /// The primary first.
    hosts: Vec<TestHost>,
    is_over: bool,
}

/// One host and what runs on it.
struct TestHost {
    host: Host,
    server: Server,
    agent: Option<Agent>,
    /// Whether the output of its ended agent has been shown.
    has_told: bool,
    cable: Cable,
}

/// The present state of a cable.
struct Cable {
    rate: Option<BitRate>,
    percent: f64,
    is_cut: bool,
}

impl Cable {
    fn new(rate: BitRate) -> Cable {
        Cable { rate: Some(rate), percent: 0.0, is_cut: false }
    }

    fn words(&self) -> String {
        let rate = self.rate.map_or("free".to_owned(), |rate| rate.to_string());
        let loss = if self.percent > 0.0 { format!(", loses {} %", self.percent) } else { String::new() };
        format!("{rate}{loss}{}", if self.is_cut { ", CUT" } else { "" })
    }
}

impl TestNetwork {
    fn start_agents(&mut self, program: &Program, folder: &Path, values: u64) -> Result<()> {
        let token = scratch::token_file(folder)?;
        let (source, rest) = self.hosts.split_first_mut().ok_or("no hosts")?;
        let mut command = process::Command::new(program.path());
        let listen = format!("{}:{SOURCE_PORT}", source.host.address());
        command.args(["source", "--server", &source.server.url(), "--listen", &listen, "--token-file"]).arg(&token);
        command.args(["--memory", &format!("{}MiB", 2 * values + 256)]);
        source.host.enter(&mut command)?;
        let mut agent = Agent::run(command)?;
        agent.wait_for_line("listening=", START_TIME)?;
        source.agent = Some(agent);
        for place in rest {
            let mut command = process::Command::new(program.path());
            command.args(["replica", "--server", &place.server.url(), "--source", &listen]);
            command.args(["--transport", "tcp", "--name", place.host.name(), "--token-file"]).arg(&token);
            place.host.enter(&mut command)?;
            place.agent = Some(Agent::run(command)?);
        }
        println!("token: {}", token.display());
        Ok(())
    }

    fn primary(&self) -> Result<&TestHost> {
        Ok(self.hosts.first().ok_or("no hosts")?)
    }

    fn describe(&self) -> Result<String> {
        let mut text =
            String::from("host        server             cable                        sent MB  received MB\n");
        for TestHost { host, server, cable, .. } in &self.hosts {
            let traffic = host.traffic()?;
            let (sent, received) = (traffic.sent as f64 / 1e6, traffic.received as f64 / 1e6);
            let (name, address, cable) = (host.name(), server.address(), cable.words());
            let _ = writeln!(text, "{name:<11} {address:<18} {cable:<28} {sent:>7.1} {received:>12.1}");
        }
        Ok(text)
    }

    fn execute(&mut self, request: Request) -> Result<String> {
        match request {
            Request::Hosts => return self.describe(),
            Request::Where(name) => return Ok(self.test_host(&name)?.host.namespace_path()),
            Request::Down => self.is_over = true,
            Request::Cut(name) => {
                let place = self.test_host(&name)?;
                place.host.cut()?;
                place.cable.is_cut = true;
            }
            Request::Heal(name) => {
                let place = self.test_host(&name)?;
                place.host.heal()?;
                place.cable.is_cut = false;
            }
            Request::Slow(name, bits) => {
                let place = self.test_host(&name)?;
                place.host.shape(bits.map_or(Shape::default(), Shape::bits))?;
                place.cable.rate = bits.map(BitRate);
            }
            Request::Lossy(name, percent) => {
                let place = self.test_host(&name)?;
                place.host.lossy(Loss::percent(percent).ok_or("not a percentage from 0 to 100")?)?;
                place.cable.percent = percent;
            }
        }
        Ok(String::new())
    }

    fn test_host(&mut self, name: &str) -> Result<&mut TestHost> {
        let names: Vec<String> = self.hosts.iter().map(|place| place.host.name().to_owned()).collect();
        let found = self.hosts.iter_mut().find(|place| place.host.name() == name);
        Ok(found.ok_or_else(|| format!("no host {name:?}; there are {}", names.join(", ")))?)
    }

    /// Prints the output of an agent that has ended. If the primary or its source has ended, everything ends.
    fn look_after(&mut self) -> Result<()> {
        self.primary()?.server.client()?.text(&["PING"])?;
        for (number, place) in self.hosts.iter_mut().enumerate() {
            let Some(agent) = &mut place.agent else { continue };
            let Some(status) = agent.ended()? else { continue };
            if number == 0 {
                return Err(format!("the source has ended:\n{}", agent.output()).into());
            }
            if !place.has_told {
                place.has_told = true;
                let how = remora_lab::process::in_words(status);
                println!("{}: remora replica has ended ({how}):\n{}", place.host.name(), agent.output());
            }
        }
        Ok(())
    }
}

/// The default port of a source; on a separate host it is free.
const SOURCE_PORT: u16 = 7379;

/// The source touches its memory before it is ready.
const START_TIME: Duration = Duration::from_secs(60);

/// How often commands are accepted and agents are checked.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_lab::require;

    use super::*;

    #[test]
    fn a_host_does_as_it_is_told_and_says_so() {
        let Some(()) = require::shaping() else { return };
        let Some(()) = require::loss() else { return };
        let Some(kind) = require::redis() else { return };
        let host = Net::new().unwrap().host("primary").unwrap();
        let server = Server::builder(kind).on(&host).start().unwrap();
        let cable = Cable::new(BitRate(1_000_000_000));
        let mut network =
            TestNetwork { hosts: vec![TestHost { host, server, agent: None, has_told: false, cable }], is_over: false };
        let name = || "primary".to_owned();
        for request in [Request::Slow(name(), Some(100_000_000)), Request::Lossy(name(), 1.5), Request::Cut(name())] {
            network.execute(request).unwrap();
        }
        assert!(network.describe().unwrap().contains("100 Mb/s, loses 1.5 %, CUT"), "{}", network.describe().unwrap());
        for request in [Request::Slow(name(), None), Request::Lossy(name(), 0.0), Request::Heal(name())] {
            network.execute(request).unwrap();
        }
        assert!(network.describe().unwrap().contains(" free "), "{}", network.describe().unwrap());
        assert!(network.execute(Request::Cut("unknown".into())).unwrap_err().to_string().contains("there are primary"));
    }

    #[test]
    fn an_order_is_carried_out_and_answered_by_the_process_that_holds_the_hosts() {
        let desk = CommandListener::open().unwrap();
        let asking = thread::spawn(|| ask(&Request::Slow("a".into(), None)).map_err(|error| error.to_string()));
        let mut seen = Vec::new();
        while !asking.is_finished() {
            let answer = |request| -> Answer {
                seen.push(request);
                Ok("done\n".into())
            };
            desk.serve(answer).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(asking.join().unwrap(), Ok("done\n".to_owned()));
        assert_eq!(seen, [Request::Slow("a".into(), None)]);
        assert!(CommandListener::open().is_err(), "two processes accepted commands at once");
    }
}
