//! One round: its servers, its agents, and what happens to them.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use remora_bench::sync::Result;
use remora_lab::contents::{Contents, differences};
use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Host, Net, Random, Server, fill_every_type, scratch};
use rustix::process::Signal;

use super::Totals;
use super::load::Load;
use super::plan::{Data, Plan};
use crate::show::Screen;

/// A round that is being played. Dropping it ends its servers and agents.
pub(crate) struct Round<'p> {
    plan: &'p Plan,
    program: PathBuf,
    folder: PathBuf,
    token: PathBuf,
    /// One host, so that the rules are its own.
    host: Host,
    primary: Server,
    /// The server that is attended.
    attended: Server,
    source: Agent,
    attend: Agent,
    backup: Agent,
    load: Option<Load>,
    loads: u64,
    _net: Net,
}

impl<'p> Round<'p> {
    /// Starts servers, source, attend and backup, and fills the primary.
    pub(crate) fn start(program: &Path, folder: &Path, plan: &'p Plan) -> Result<Round<'p>> {
        let net = Net::new()?;
        let host = net.host("pod")?;
        let token = scratch::token_file(folder)?;
        let primary = server(plan, plan.modules[0])?
            .config("repl-diskless-sync", if plan.to_disk { "no" } else { "yes" })
            .config("rdb-key-save-delay", plan.save_delay)
            .on(&host)
            .start()?;
        let attended = server(plan, plan.modules[1])?.as_user(SERVER_USER).on(&host).start()?;
        fill(&primary, plan)?;
        let user = SERVER_USER.to_string();
        let rules = ["intercept", "add", "--server-uid", &user, "--agent-uid", "0", "--listen-port", LISTEN];
        start(program, folder, &host, &rules)?.wait_for_success(LONG)?;
        let (listen, secret) = (format!("{}:{SOURCE}", host.address()), token.display().to_string());
        let url = primary.url();
        let to_source = ["--source", &listen, "--token-file", &secret];
        let mut source = start(
            program,
            folder,
            &host,
            &[
                "source",
                "--server",
                &url,
                "--listen",
                &listen,
                "--token-file",
                &secret,
                "--no-rdma",
                "--memory",
                "256MiB",
            ],
        )?;
        source.wait_for_line("source ready", LONG)?;
        let (url, port) = (attended.url(), primary.port().to_string());
        let attending =
            ["attend", "--server", &url, "--listen-port", LISTEN, "--primary-port", &port, "--no-serve-peers"];
        let mut attend = start(program, folder, &host, &[&attending[..], &to_source].concat())?;
        attend.wait_for_line("attending", LONG)?;
        let to = folder.join("backup").display().to_string();
        std::fs::create_dir(&to)?;
        let backup = start(program, folder, &host, &[&["backup", "--journal", "--to", &to][..], &to_source].concat())?;
        Ok(Round {
            plan,
            program: program.to_owned(),
            folder: folder.to_owned(),
            token,
            host,
            primary,
            attended,
            source,
            attend,
            backup,
            load: None,
            loads: 0,
            _net: net,
        })
    }

    /// Plays it to its end, and says what was compared.
    pub(crate) fn play(mut self, random: &mut Random, screen: &Screen, totals: &mut Totals) -> Result<String> {
        let played = self.play_all(random, screen, totals);
        if played.is_err() {
            self.keep();
        }
        totals.served += self.attend.output().matches("the source serves it").count() as u64;
        played
    }

    fn play_all(&mut self, random: &mut Random, screen: &Screen, totals: &mut Totals) -> Result<String> {
        let mut said = Vec::new();
        let mut compared = |what: String, keys: usize| {
            totals.compared += 1;
            totals.keys += keys as u64;
            said.push(what);
        };
        for copy in 1..=self.plan.copies {
            let _busy = screen.busy(&format!("copy {copy} of A"));
            self.write()?;
            let disturbed = self.copy_of_attended(random)?;
            totals.commands += self.rest()?;
            let keys = self.compare(&self.attended, &format!("A after copy {copy} ({disturbed})"))?;
            compared(format!("A{copy}"), keys);
        }
        let _busy = screen.busy("replicas that serve each other, a moment, a late joiner, the backup");
        self.write()?;
        let relays = self.relays(random)?;
        totals.commands += self.rest()?;
        for (server, name) in relays.iter().zip(["B", "C", "D"]) {
            let keys = self.compare(server, name)?;
            compared(name.into(), keys);
        }
        let (moment, then) = self.moment()?;
        self.write()?;
        thread::sleep(Duration::from_millis(random.between(500, 4_000)));
        let late = self.replica(&["--transport", if random.one_in(2) { "tcp" } else { "auto" }])?;
        totals.commands += self.rest()?;
        let all = [
            (&self.attended, "A at the end"),
            (&late, "E"),
            (&relays[0], "B at the end"),
            (&relays[2], "D at the end"),
        ];
        for (server, name) in all {
            let keys = self.compare(server, name)?;
            compared(name.into(), keys);
        }
        let keys = self.restored(moment, &then)?;
        compared("the backup at a moment".into(), keys);
        for (agent, name) in [(&mut self.source, "the source"), (&mut self.attend, "attend")] {
            if let Some(status) = agent.ended()? {
                return Err(format!("{name} has ended by itself: {status}\n{}", agent.output()).into());
            }
        }
        Ok(said.join(", "))
    }

    /// The writers go on, with other commands.
    fn write(&mut self) -> Result<()> {
        self.loads += 1;
        self.load = Some(Load::start(&self.primary, self.plan, self.plan.seed.wrapping_add(self.loads))?);
        Ok(())
    }

    /// The writers stop.
    fn rest(&mut self) -> Result<u64> {
        self.load.take().map_or(Ok(0), Load::stop)
    }

    /// A full copy of A, while links are killed and agents stand still. Returns what was done to it.
    fn copy_of_attended(&mut self, random: &mut Random) -> Result<String> {
        let mut client = self.attended.client()?;
        client.ok(&["REPLICAOF", "NO", "ONE"])?;
        client.call(&["SET", "chaos", "a key that the primary has not"])?;
        client.ok(&["DEBUG", "CHANGE-REPL-ID"])?;
        self.attended.replicate(&self.primary)?;
        let mut done = Vec::new();
        for _ in 0..random.below(4) {
            let before = random.below(500);
            thread::sleep(Duration::from_millis(before));
            let pause = Duration::from_millis(random.below(400));
            done.push(match random.below(4) {
                0 => {
                    self.primary.client()?.call(&["CLIENT", "KILL", "TYPE", "replica"])?;
                    format!("{before} ms: links at the primary killed")
                }
                1 => {
                    client.call(&["CLIENT", "KILL", "TYPE", "master"])?;
                    format!("{before} ms: link at A killed")
                }
                2 => {
                    stand_still(&mut self.source, pause)?;
                    format!("{before} ms: source stopped for {pause:?}")
                }
                _ => {
                    stand_still(&mut self.attend, pause)?;
                    format!("{before} ms: attend stopped for {pause:?}")
                }
            });
        }
        self.attended.wait_for_link(LONG).map_err(|error| format!("A, {}: {error}", done.join(", ")))?;
        Ok(done.join(", "))
    }

    /// Three servers at once, whose agents serve each other.
    fn relays(&mut self, random: &mut Random) -> Result<[Server; 3]> {
        let servers = [self.fresh()?, self.fresh()?, self.fresh()?];
        let mut agents = Vec::new();
        for server in &servers {
            agents.push(self.replicate(server, &["--serve-peers", "--linger", "2s", "--transport", "tcp"])?);
            thread::sleep(Duration::from_millis(random.below(300)));
        }
        if random.one_in(2) {
            stand_still(&mut self.source, Duration::from_millis(random.below(400)))?;
        }
        for agent in &mut agents {
            agent.wait_for_success(LONG)?;
        }
        Ok(servers)
    }

    /// A server that an agent makes a replica, to its end.
    fn replica(&self, more: &[&str]) -> Result<Server> {
        let server = self.fresh()?;
        self.replicate(&server, more)?.wait_for_success(LONG)?;
        Ok(server)
    }

    fn replicate(&self, server: &Server, more: &[&str]) -> Result<Agent> {
        let (url, listen, secret) = (server.url(), self.source_address(), self.token.display().to_string());
        let args = ["replica", "--server", &url, "--source", &listen, "--token-file", &secret];
        start(&self.program, &self.folder, &self.host, &[&args[..], more].concat())
    }

    fn fresh(&self) -> Result<Server> {
        Ok(server(self.plan, self.plan.modules[1])?.on(&self.host).start()?)
    }

    fn source_address(&self) -> String {
        format!("{}:{SOURCE}", self.host.address())
    }

    /// Compares a server with the primary, value by value, once it has all that was written. Returns the number of
    /// keys.
    fn compare(&self, server: &Server, name: &str) -> Result<usize> {
        let (mut one, mut other) = (self.primary.client()?, server.client()?);
        let offset: u64 = one.info("replication")?.number("master_repl_offset").unwrap_or_default();
        let begun = Instant::now();
        wait_until("the replica to have all that was written", LONG, || {
            let info = other.info("replication")?;
            let link = info.get("master_link_status").unwrap_or("none");
            let at: u64 = info.number("slave_repl_offset").unwrap_or_default();
            let has_all = link == "up" && at >= offset;
            Ok(if has_all { Ok(()) } else { Err(format!("link {link}, at {at} of {offset}")) })
        })
        .map_err(|error| format!("{name}: {error}"))?;
        let (here, there) = (Contents::of(&mut one)?, Contents::of(&mut other)?);
        // A primary may keep a hash whose last field has expired (dev/testing.md): a hash without fields is absent.
        let found = differences(&here, &there, MOST_SHOWN);
        if found.is_empty() {
            return Ok(here.len());
        }
        let waited = begun.elapsed();
        let found = found.join("\n    ");
        Err(format!("{name} is not its primary's exact copy, {waited:?} after the last write:\n    {found}").into())
    }

    /// A moment between two seconds at which nothing is written, and what the primary held then.
    fn moment(&mut self) -> Result<(u64, Contents)> {
        next_second()?;
        let then = Contents::of(&mut self.primary.client()?)?;
        let second = next_second()? - 1;
        Ok((second, then))
    }

    /// Ends the backup, and compares what a server has of it at the moment with what the primary held then.
    fn restored(&mut self, moment: u64, then: &Contents) -> Result<usize> {
        // What the backup has not yet written is not lost by a signal.
        self.backup.signal(Signal::TERM)?;
        self.backup.wait_for_success(LONG)?;
        let (from, to) = (self.folder.join("backup"), self.folder.join("restored"));
        std::fs::create_dir(&to)?;
        let (from, to) = (from.display().to_string(), to.display().to_string());
        let args = ["restore", &from, "--until", &moment.to_string(), "--to", &to];
        start(&self.program, &self.folder, &self.host, &args)?.wait_for_success(LONG)?;
        // It deletes nothing by itself: it waits for a primary.
        let restored = Server::builder(self.plan.kind)
            .config("dir", &to)
            .config("appendonly", "yes")
            .config("replicaof", "127.0.0.1 1")
            .on(&self.host)
            .start()?;
        let now = Contents::of(&mut restored.client()?)?;
        let found = differences(then, &now, MOST_SHOWN);
        if found.is_empty() {
            return Ok(then.len());
        }
        Err(format!("what was restored until {moment} is not what the primary held:\n    {}", found.join("\n    "))
            .into())
    }

    /// Keeps the logs.
    fn keep(&self) {
        let logs = [
            ("source", self.source.output()),
            ("attend", self.attend.output()),
            ("backup", self.backup.output()),
            ("primary", self.primary.log()),
            ("A", self.attended.log()),
        ];
        for (name, text) in logs {
            // What is missing then is a log, not the finding.
            let _ = std::fs::write(self.folder.join(format!("{name}.log")), text);
        }
    }
}

/// A server of the round.
fn server(plan: &Plan, module: bool) -> Result<Builder> {
    let mut builder = Server::builder(plan.kind)
        .config("repl-diskless-sync-delay", 0)
        .config("repl-diskless-load", plan.load)
        .config("repl-backlog-size", plan.backlog)
        .config("repl-timeout", 10)
        .config("repl-ping-replica-period", 2);
    if plan.dual_channel {
        builder = builder.config("dual-channel-replication-enabled", "yes");
    }
    Ok(if module { builder.module("")? } else { builder })
}

fn fill(primary: &Server, plan: &Plan) -> Result<()> {
    let client = &mut primary.client()?;
    match plan.data {
        // The writers make what they need.
        Data::Small => {}
        Data::Every => drop(fill_every_type(client, plan.seed)?),
        Data::Middle => {
            fill_every_type(client, plan.seed)?;
            client.ok(&["SELECT", "0"])?;
            remora_lab::workload::fill_mix(client, MIX_KEYS, plan.seed)?;
        }
    }
    Ok(())
}

/// Starts `remora` on the round's host.
fn start(program: &Path, folder: &Path, host: &Host, args: &[&str]) -> Result<Agent> {
    let mut command = std::process::Command::new(program);
    command.args(args).env("XDG_RUNTIME_DIR", folder).env("XDG_STATE_HOME", folder);
    host.enter(&mut command)?;
    Ok(Agent::run(command)?)
}

/// Stops an agent for this time.
fn stand_still(agent: &mut Agent, time: Duration) -> Result<()> {
    agent.signal(Signal::STOP)?;
    thread::sleep(time);
    Ok(agent.signal(Signal::CONT)?)
}

/// Waits until the clock shows a later second, and returns it.
fn next_second() -> Result<u64> {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let before = now();
    wait_until("the next second", LONG, || Ok(if now() > before { Ok(()) } else { Err(String::new()) }))?;
    Ok(now())
}

/// The user of the attended server; the agents are root's.
const SERVER_USER: u32 = 65_534;

/// The ports of attend and of the source: each round has a namespace of its own.
const LISTEN: &str = "7380";
const SOURCE: u16 = 7379;

/// What only a broken machine exceeds.
const LONG: Duration = Duration::from_secs(120);

/// Small values of a middle data set: some ten megabytes.
const MIX_KEYS: u64 = 40_000;

/// Differences in a message.
const MOST_SHOWN: usize = 10;
