//! What `up` starts: hosts, a filled primary with its source, empty servers with their replica agents. It stays and
//! executes commands.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use remora_bench::sync::{Program, Result};
use remora_lab::{Agent, BitRate, Host, Kind, Loss, Net, Server, Shape, scratch};

use super::control::{CommandListener, Request};

/// What to start.
pub(super) struct Plan {
    pub(super) replicas: u8,
    pub(super) rate: BitRate,
    pub(super) kind: Kind,
    /// In MiB.
    pub(super) values: u64,
    pub(super) agents: bool,
}

/// Starts everything, and executes commands until one of them ends it.
pub(super) fn put_up(plan: &Plan) -> Result<()> {
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
        let mut command = Command::new(program.path());
        let listen = format!("{}:{SOURCE_PORT}", source.host.address());
        command.args(["source", "--server", &source.server.url(), "--listen", &listen, "--token-file"]).arg(&token);
        command.args(["--memory", &format!("{}MiB", 2 * values + 256)]);
        source.host.enter(&mut command)?;
        let mut agent = Agent::run(command)?;
        agent.wait_for_line("listening=", START_TIME)?;
        source.agent = Some(agent);
        for place in rest {
            let mut command = Command::new(program.path());
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

    use super::super::control::Answer;
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
        let asking = thread::spawn(|| {
            super::super::control::ask(&Request::Slow("a".into(), None)).map_err(|error| error.to_string())
        });
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
