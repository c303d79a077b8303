//! The chaos: random load, and full copy after full copy while links are killed and agents stand still; after each,
//! every key is compared by its value.
//!
//! ```text
//!   writers ──▶ primary ◀── source ──▶ attend ──▶ A      copies again and again; links killed, agents stopped
//!                              │──▶ replicas that serve each other ──▶ B, C, D
//!                              │──▶ replica, late ──▶ E
//!                              └──▶ backup --journal ── restore --until a moment ──▶ F
//! ```
//!
//! What the soak does not look for: its data are large, its primaries save without a disk, and it compares digests.
//! Here half of the primaries save to disk, half of the data sets are so small that a snapshot and the first writes
//! arrive together, and what is compared are the values themselves (`remora_lab::compare`). A round is one draw of all
//! that:
//!
//! In this order: what a round draws, its writers, and the servers and agents and what happens to them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fmt, thread};

use remora_bench::sync::Result;
use remora_lab::compare::{Contents, differences_of};
use remora_lab::server::{Builder, wait_until};
use remora_lab::{
    Agent, Client, Host, Kind, Net, Random, Server, Workload, fill_every_type, random, scratch, workload,
};
use rustix::process::Signal;

use crate::demo::Which;
use crate::process;
use crate::process::Screen;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// How many rounds to play.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,

    /// Begin no round after this many minutes.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,

    /// Seed of the first round; the next one has the next. Default: a random one, which is printed.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Which servers to use. Both: in turn.
    #[arg(long, value_name = "WHICH", default_value = "both")]
    server: Which,

    /// After a finding, go on with the next round.
    #[arg(long)]
    keep_going: bool,
}

/// What rounds have done.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Servers that were compared with their primary, or with what it held, key by key.
    compared: u64,
    /// Keys of these comparisons.
    keys: u64,
    /// Full copies that `attend` began from the source.
    served: u64,
    /// Commands that were written.
    commands: u64,
}

/// Plays the rounds.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err("namespaces, rules and users of servers need root".into());
    }
    let begun = Instant::now();
    let screen = Screen::new();
    let kinds = options.server.kinds();
    let program = screen.build_for(&kinds)?;
    let first = options.seed.unwrap_or_else(|| random::seed("chaos"));
    let (mut totals, mut findings, mut played) = (Totals::default(), Vec::new(), 0);
    for (number, kind) in (0..options.rounds).zip(kinds.iter().copied().cycle()) {
        if begun.elapsed() > Duration::from_secs(options.minutes * 60) {
            screen.say(&format!("{} minutes are over", options.minutes));
            break;
        }
        let seed = first.wrapping_add(number);
        let mut random = Random::new(seed);
        let plan = Plan::draw(kind, &mut random);
        screen.say(&format!("round {}: seed {seed}, {plan}", number + 1));
        let round_begun = Instant::now();
        let folder = scratch::folder("chaos")?;
        let outcome = Round::start(program.path(), folder.path(), &plan)
            .and_then(|round| round.play(&mut random, &screen, &mut totals));
        process::fail_if_stopped()?;
        played += 1;
        match outcome {
            Ok(said) => screen.say(&format!("  exact: {said}; {:.0} s", round_begun.elapsed().as_secs_f64())),
            Err(error) => {
                let kept = folder.keep();
                let finding = format!(
                    "FINDING in round {}, {plan}: {error}\n  again: make chaos ARGS=\"--rounds 1 --seed {seed} --server {}\"; folder {}",
                    number + 1,
                    plan.server(),
                    kept.display()
                );
                screen.say(&finding);
                findings.push(finding);
                if !options.keep_going {
                    break;
                }
            }
        }
    }
    println!(
        "{played} rounds from seed {first}: {} comparisons of {} keys, {} full copies begun from a source through attend, {} commands, {} \
         findings; {:.1} minutes",
        totals.compared,
        totals.keys,
        totals.served,
        totals.commands,
        findings.len(),
        begun.elapsed().as_secs_f64() / 60.0
    );
    match findings.len() {
        0 => Ok(()),
        count => Err(format!("{count} findings, described above").into()),
    }
}

// What a round draws: its servers, their settings and their data.

/// One draw.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    /// The primary saves to disk before it sends (`repl-diskless-sync no`).
    pub(crate) to_disk: bool,
    pub(crate) data: Data,
    /// Which have the module: the primary, the others.
    pub(crate) modules: [bool; 2],
    /// How replicas load (`repl-diskless-load`).
    pub(crate) load: &'static str,
    /// Valkey's replication over two channels.
    pub(crate) dual_channel: bool,
    /// The primary's backlog.
    pub(crate) backlog: &'static str,
    /// Microseconds that the primary's child takes for each key.
    pub(crate) save_delay: u64,
    /// Full copies of A.
    pub(crate) copies: u64,
    /// The writers' seed.
    pub(crate) seed: u64,
}

/// How much there is to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    /// A dozen keys: the snapshot is below the 16 KiB of a socket's first read, and the first writes arrive with it.
    Small,
    /// Every type, some hundred keys of each.
    Every,
    /// The same, beside megabytes of small values.
    Middle,
}

impl Plan {
    pub(crate) fn draw(kind: Kind, random: &mut Random) -> Plan {
        let data = pick(random, &[Data::Small, Data::Small, Data::Every, Data::Middle]);
        Plan {
            kind,
            to_disk: random.one_in(2),
            data,
            modules: [random.one_in(3), random.one_in(3)],
            load: pick(random, &LOADS),
            dual_channel: kind == Kind::Valkey9 && random.one_in(2),
            // A small one makes hand-offs wait until the writers pause; see the load's rate.
            backlog: pick(random, &BACKLOGS),
            // A snapshot of some tenths of a second: there is time for writes and for disturbances.
            save_delay: if data == Data::Small { random.between(5_000, 50_000) } else { 20 },
            copies: random.between(3, 6),
            seed: random.word(),
        }
    }

    /// The word of `--server`.
    pub(crate) fn server(&self) -> &'static str {
        match self.kind {
            Kind::Redis7 => "redis",
            Kind::Valkey9 => "valkey",
        }
    }
}

/// The values of `repl-diskless-load`.
const LOADS: [&str; 3] = ["disabled", "swapdb", "on-empty-db"];

/// Sizes of a backlog.
const BACKLOGS: [&str; 2] = ["1mb", "16mb"];

/// One of these.
fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.to_disk { "to disk" } else { "diskless" };
        let modules = match self.modules {
            [false, false] => "no module",
            [true, false] => "module in the primary",
            [false, true] => "module in the replicas",
            [true, true] => "module everywhere",
        };
        let dual = if self.dual_channel { ", dual channel" } else { "" };
        let Plan { kind, data, load, backlog, copies, save_delay, .. } = self;
        write!(
            f,
            "{kind} {how}{dual}, {data:?} data ({save_delay} us a key), {modules}, load {load}, backlog {backlog}, {copies} copies"
        )
    }
}

// The writers of a round.

/// Writers, until they are stopped.
pub(crate) enum Load {
    /// Every kind of write.
    Every(Workload),
    /// A dozen keys that stay small.
    Small(Small),
}

impl Load {
    /// Starts writing.
    pub(crate) fn start(primary: &Server, plan: &Plan, seed: u64) -> Result<Load> {
        Ok(match plan.data {
            Data::Small => Load::Small(Small::start(primary.client()?, seed)),
            Data::Every | Data::Middle => {
                let options =
                    workload::Options { big_bytes: 0, pipeline: 16, ..workload::Options::seeded(seed) }.rate(RATE);
                Load::Every(Workload::start(primary.client()?, options)?)
            }
        })
    }

    /// Stops; all that was written has been answered. Returns how many commands there were.
    pub(crate) fn stop(self) -> Result<u64> {
        match self {
            Load::Every(workload) => Ok(workload.stop()?.commands),
            Load::Small(small) => small.stop(),
        }
    }
}

/// A writer of small keys.
pub(crate) struct Small {
    stop: Arc<AtomicBool>,
    writer: Option<JoinHandle<Result<u64>>>,
}

impl Small {
    fn start(mut client: Client, seed: u64) -> Small {
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let writer = thread::spawn(move || {
            let (mut random, mut commands) = (Random::new(seed), 0);
            while !is_stopped.load(Ordering::Relaxed) {
                let batch: Vec<Vec<String>> = (0..random.between(1, 40)).map(|_| small(&mut random)).collect();
                commands += client.pipeline(&batch)?.len() as u64;
                thread::sleep(Duration::from_micros(random.below(LONGEST_PAUSE_US)));
            }
            Ok(commands)
        });
        Small { stop, writer: Some(writer) }
    }

    fn stop(mut self) -> Result<u64> {
        self.halt().unwrap_or(Ok(0))
    }

    fn halt(&mut self) -> Option<Result<u64>> {
        self.stop.store(true, Ordering::Relaxed);
        Some(self.writer.take()?.join().unwrap_or_else(|_| Err("the writer's thread panicked".into())))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = self.halt();
    }
}

/// A command none of whose effects may be lost, doubled or moved: counters, and lists that say who came when.
fn small(random: &mut Random) -> Vec<String> {
    let key = random.below(4);
    let words = match random.below(8) {
        // As long as `SELECT 0`, which a replica executes for nothing.
        0..4 => format!("INCR a{key}a"),
        4 => format!("INCRBYFLOAT f{key} 0.5"),
        5 => format!("RPUSH l{key} {:x}", random.below(1 << 16)),
        6 => format!("LTRIM l{key} -20 -1"),
        _ if random.one_in(4) => format!("SELECT {}", random.below(3)),
        _ => format!("SETRANGE s{key} {} {:x}", random.below(60), random.below(1 << 16)),
    };
    words.split(' ').map(str::to_owned).collect()
}

/// Commands per second: a hand-off through a backlog of a megabyte is possible under them.
const RATE: u64 = 1500;

/// Pause between two batches: the load has gaps, so that the border of a snapshot falls into one now and then.
const LONGEST_PAUSE_US: u64 = 20_000;

// One round: its servers, its agents, and what happens to them.

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
        let found = differences_of(&here, &there, MOST_SHOWN);
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
        let found = differences_of(then, &now, MOST_SHOWN);
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
