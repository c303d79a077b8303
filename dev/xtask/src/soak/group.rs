//! The servers of a group, and the writer.
//!
//! ```text
//!   left host                                            right host
//!     A   primary or standby ◀──servers' replication──▶    B   standby or primary
//!     C   replica by Remora                                D   replica by Remora
//!     N   another primary, to which keys are moved
//! ```

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use remora_bench::sync::Result;
use remora_lab::workload::Options;
use remora_lab::{Agent, Host, Kind, Net, Random, Server, Workload, fill_every_type, process, scratch};
use rustix::process::Signal;
use tempfile::TempDir;

use super::script::{How, Plan, STALL_TIMEOUT, Seat, Transport, Who};
use super::{History, Totals};

/// The servers and the writer.
pub(super) struct Group {
    hosts: Option<[Host; 2]>,
    /// A and B.
    pair: [Server; 2],
    /// Which of the two is the primary.
    primary: usize,
    /// C and D.
    replicas: [Server; 2],
    neighbor: Server,
    writer: Option<Workload>,
    writes_per_second: u64,
    /// Commands of the writers that have ended.
    commands: u64,
}

/// What a server says about its replication.
#[derive(Debug)]
pub(super) struct Standing {
    /// It is a replica.
    pub(super) is_replica: bool,
    /// `host:port` of the primary that it follows; empty if it follows none.
    pub(super) follows: String,
    /// Its link is up.
    pub(super) is_up: bool,
}

impl Group {
    /// Starts the servers, B as a replica of A. Without rights to make network namespaces, all of them are on this
    /// machine's loopback.
    pub(super) fn start(kind: Kind, plan: &Plan, writes_per_second: u64) -> Result<Group> {
        let hosts = Net::new()
            .ok()
            .map(|net| Ok::<_, remora_lab::Error>([net.host("left")?, net.host("right")?]))
            .transpose()?;
        // With `load`: a server that Remora makes a replica of, and how it loads.
        let server = |side: usize, module: bool, load: Option<&str>| -> Result<Server> {
            let mut builder = Server::builder(kind)
                .config("repl-diskless-sync-delay", 0)
                .config("repl-backlog-size", plan.backlog)
                .config("repl-timeout", plan.repl_timeout)
                .config("repl-ping-replica-period", 2)
                .config("repl-diskless-load", load.unwrap_or("disabled"))
                .config("key-load-delay", load.map_or(0, |_| plan.load_delay))
                .config("loading-process-events-interval-bytes", 64 << 10);
            // Not C and D: they can follow a server that is a replica, and a Valkey that takes a full copy of a replica
            // over two channels differs from it (dev/testing.md, at its end).
            if plan.dual_channel && load.is_none() {
                builder = builder.config("dual-channel-replication-enabled", "yes");
            }
            if let Some(hosts) = &hosts {
                builder = builder.on(&hosts[side]);
            }
            if module {
                builder = builder.module("")?;
            }
            Ok(builder.start()?)
        };
        let ([a, b, c, d], [load_c, load_d]) = (plan.modules, plan.diskless_load);
        let pair = [server(0, a, None)?, server(1, b, None)?];
        let replicas = [server(0, c, Some(load_c))?, server(1, d, Some(load_d))?];
        let neighbor = server(0, false, None)?;
        pair[1].replicate(&pair[0])?;
        Ok(Group { hosts, pair, primary: 0, replicas, neighbor, writer: None, writes_per_second, commands: 0 })
    }

    /// Whether the two hosts have a network between them that can be cut.
    pub(super) fn has_network(&self) -> bool {
        self.hosts.is_some()
    }

    /// Cuts the cable of the right host, or connects it again.
    pub(super) fn cut(&self, cut: bool) -> Result<()> {
        let Some([_, right]) = &self.hosts else { return Ok(()) };
        Ok(if cut { right.cut() } else { right.heal() }?)
    }

    /// The server that is this at the moment.
    pub(super) fn server(&self, who: Who) -> &Server {
        match who {
            Who::Primary => &self.pair[self.primary],
            Who::Standby => &self.pair[1 - self.primary],
            Who::Seat(seat) => &self.replicas[seat.index()],
        }
    }

    /// The same, to end, start or freeze it.
    pub(super) fn server_mut(&mut self, who: Who) -> &mut Server {
        match who {
            Who::Primary => &mut self.pair[self.primary],
            Who::Standby => &mut self.pair[1 - self.primary],
            Who::Seat(seat) => &mut self.replicas[seat.index()],
        }
    }

    /// The standby is the primary from now on.
    pub(super) fn swap_roles(&mut self) {
        self.primary = 1 - self.primary;
    }

    /// The name of the server that is this at the moment.
    pub(super) fn name(&self, who: Who) -> &'static str {
        match (who, self.primary) {
            (Who::Primary, 0) | (Who::Standby, 1) => "A",
            (Who::Primary | Who::Standby, _) => "B",
            (Who::Seat(Seat::C), _) => "C",
            (Who::Seat(Seat::D), _) => "D",
        }
    }

    /// What a source beside the primary, or beside the standby, captures.
    pub(super) fn captured(&self, standby: bool) -> Captured<'_> {
        if standby {
            let announced = Some(self.server(Who::Primary));
            Captured { server: self.server(Who::Standby), side: 1 - self.primary, announced }
        } else {
            Captured { server: self.server(Who::Primary), side: self.primary, announced: None }
        }
    }

    /// What the server says about its replication.
    pub(super) fn standing(&self, who: Who) -> Result<Standing> {
        let info = self.server(who).info("replication")?;
        let of = |name: &str| info.get(name).unwrap_or_default().to_owned();
        let is_replica = of("role") == "slave";
        let follows = if is_replica { format!("{}:{}", of("master_host"), of("master_port")) } else { String::new() };
        Ok(Standing { is_replica, follows, is_up: of("master_link_status") == "up" })
    }

    /// Whether this is the address of one of the group's servers, and so not of an agent.
    pub(super) fn is_server(&self, address: &str) -> bool {
        self.pair.iter().chain(&self.replicas).any(|server| server.address().to_string() == address)
    }

    /// Sends a command. `false` if the server is loading and refuses it.
    pub(super) fn tell(&self, who: Who, command: &[&str]) -> Result<bool> {
        match self.server(who).client()?.call(command) {
            Ok(_) => Ok(true),
            Err(remora_lab::Error::Refused { reply, .. }) if reply.starts_with("LOADING") => Ok(false),
            Err(error) => Err(format!("{} ({who}): {error}", self.name(who)).into()),
        }
    }

    /// Makes a server follow the primary by the servers' own replication. `false` as for [`Group::tell`].
    pub(super) fn follow_primary(&self, who: Who) -> Result<bool> {
        let address = self.server(Who::Primary).address();
        self.tell(who, &["REPLICAOF", &address.ip().to_string(), &address.port().to_string()])
    }

    /// Fails if a server has ended by itself.
    pub(super) fn check_servers(&mut self) -> Result<()> {
        let Group { pair: [a, b], replicas: [c, d], neighbor, .. } = self;
        for (name, server) in [("A", a), ("B", b), ("C", c), ("D", d), ("N", neighbor)] {
            if let Some(status) = server.ended()? {
                let log = tail(&server.log());
                return Err(format!("{name}, {server}, ended by itself ({}):\n{log}", process::in_words(status)).into());
            }
        }
        Ok(())
    }

    /// Logs of the servers, with their names.
    pub(super) fn logs(&self) -> Vec<(&'static str, String)> {
        let [a, b] = &self.pair;
        let [c, d] = &self.replicas;
        [("A.log", a), ("B.log", b), ("C.log", c), ("D.log", d)]
            .into_iter()
            .map(|(name, server)| (name, server.log()))
            .collect()
    }

    /// Starts a writer on the primary, unless one is at work.
    pub(super) fn write(&mut self, random: &mut Random) -> Result<()> {
        // Drawn in any case, so that the script does not depend on whether a writer has ended.
        let seed = random.word();
        if self.writer.as_ref().is_some_and(|writer| !writer.is_over()) {
            return Ok(());
        }
        self.stop_writing();
        let options = Options { big_bytes: BIG_BYTES, ..Options::seeded(seed).rate(self.writes_per_second) };
        self.writer = Some(Workload::start(self.server(Who::Primary).client()?, options)?);
        Ok(())
    }

    /// Stops the writer. Its connection may have been broken by an event.
    pub(super) fn stop_writing(&mut self) {
        if let Some(writer) = self.writer.take() {
            self.commands += writer.commands();
            let _ = writer.stop();
        }
    }

    /// Commands written so far.
    pub(super) fn commands(&self) -> u64 {
        self.commands + self.writer.as_ref().map_or(0, Workload::commands)
    }

    /// Writes every type and long strings to the primary: enough that a snapshot takes a while, and that the module has
    /// work.
    pub(super) fn fill(&self, random: &mut Random) -> Result<()> {
        let mut client = self.server(Who::Primary).client()?;
        match fill_every_type(&mut client, random.word()) {
            // Streams do not take the same entries twice. What could be written has been.
            Ok(_) | Err(remora_lab::Error::Refused { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        for number in 0..LONG_STRINGS {
            let length = random.between(16 << 10, 1 << 20);
            let value = random.bytes(length as usize);
            client.ok(&[b"SET".as_slice(), format!("long:{number}").as_bytes(), &value])?;
        }
        Ok(())
    }

    /// Whether the primary lacks what [`Group::fill`] writes: it was killed or emptied since.
    pub(super) fn lacks_long_strings(&self) -> Result<bool> {
        let mut client = self.server(Who::Primary).client()?;
        Ok(client.int(&["EXISTS", "long:0"])? == 0)
    }

    /// Moves keys from the neighbor to the primary, and others back. Returns how many were moved.
    ///
    /// A key that is missing where it was expected is ignored: a primary that was killed has lost it.
    pub(super) fn reshard(&self, random: &mut Random) -> Result<u64> {
        let mut client = self.neighbor.client()?;
        for number in 0..MOVED_KEYS {
            let length = random.between(1, 32 << 10);
            let value = random.bytes(length as usize);
            client.call(&[b"SET".as_slice(), format!("moved:{number}").as_bytes(), &value, b"NX"])?;
        }
        let primary = self.server(Who::Primary);
        let there = self.migrate(&self.neighbor, primary, random)?;
        Ok(there + self.migrate(primary, &self.neighbor, random)?)
    }

    fn migrate(&self, from: &Server, to: &Server, random: &mut Random) -> Result<u64> {
        let mut client = from.client()?;
        client.timeout(MIGRATE_TIME)?;
        let (host, port) = (to.address().ip().to_string(), to.address().port().to_string());
        let mut moved = 0;
        for batch in 0..MOVED_KEYS / KEYS_PER_MOVE {
            // Half of the keys stay where they are.
            if random.one_in(2) {
                continue;
            }
            let keys = (batch * KEYS_PER_MOVE..(batch + 1) * KEYS_PER_MOVE).map(|number| format!("moved:{number}"));
            let head = ["MIGRATE", &host, &port, "", "0", MIGRATE_MILLISECONDS, "REPLACE", "KEYS"];
            let command: Vec<String> = head.into_iter().map(str::to_owned).chain(keys).collect();
            match client.call(&command) {
                Ok(_) => moved += KEYS_PER_MOVE,
                // The other server did not answer in time; both still run.
                Err(remora_lab::Error::Refused { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(moved)
    }
}

/// Length of the longest of the writer's big values: the writer must not fill a journal while a reader is frozen.
const BIG_BYTES: u64 = 1 << 20;

/// Strings that [`Group::fill`] writes, of half a MiB on average: a snapshot of some 30 MB.
const LONG_STRINGS: u64 = 48;

/// Keys that are moved between two primaries, and how many at once.
const MOVED_KEYS: u64 = 400;
const KEYS_PER_MOVE: u64 = 20;

/// The time that `MIGRATE` may take between two bytes.
const MIGRATE_MILLISECONDS: &str = "3000";

/// Time limit for the answer to a `MIGRATE`: one move and its time-out.
const MIGRATE_TIME: Duration = Duration::from_secs(30);

// The agents of a group: one `remora source`, up to one `remora replica` for each seat, and how they end.

/// The agents.
pub(super) struct Agents {
    program: PathBuf,
    /// Home of the agents: their token, state and sockets.
    home: TempDir,
    token: PathBuf,
    /// The port of a source on each of the two hosts. It stays the same, so replica agents find a source that was
    /// restarted.
    ports: [u16; 2],
    memory: &'static str,
    upload_limit: Option<&'static str>,
    state_dirs: [bool; 2],
    source: Option<SourceRun>,
    replicas: [Option<Run>; 2],
    ends: [Option<End>; 2],
    /// Number of processes started, for the names of their logs.
    started: u32,
}

/// The server that a source captures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Captured<'a> {
    /// The server.
    pub(super) server: &'a Server,
    /// Its host: 0 for the left one.
    pub(super) side: usize,
    /// The primary to announce, if the server is a replica of it.
    pub(super) announced: Option<&'a Server>,
}

struct SourceRun {
    agent: Agent,
    name: String,
    address: String,
    side: usize,
}

/// A `remora replica` that runs.
struct Run {
    agent: Agent,
    name: String,
    stay: bool,
    summary: PathBuf,
    /// When it was asked to stop.
    asked: Option<Instant>,
    killed: bool,
}

/// How a `remora replica` ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    /// The exit code or signal, in words.
    pub(super) how: String,
    /// The server can follow the link of the agent still: the agent was killed, or says that it could not tell the
    /// server anything.
    pub(super) may_leave_link: bool,
    /// A setting of the server can still have the agent's value, for the same reasons.
    pub(super) may_leave_settings: bool,
}

impl Agents {
    /// No agents yet, with an empty home. `program`: the path of `remora`.
    pub(super) fn new(program: &Path, plan: &Plan) -> Result<Agents> {
        let home = scratch::folder("soak-home")?;
        for side in SIDES {
            std::fs::create_dir(home.path().join(side))?;
        }
        let token = scratch::token_file(home.path())?;
        Ok(Agents {
            program: program.to_owned(),
            home,
            token,
            ports: [scratch::free_port()?, scratch::free_port()?],
            memory: plan.source_memory,
            upload_limit: plan.upload_limit,
            state_dirs: plan.state_dirs,
            source: None,
            replicas: [None, None],
            ends: [None, None],
            started: 0,
        })
    }

    /// Whether a source runs.
    pub(super) fn has_source(&self) -> bool {
        self.source.is_some()
    }

    /// Starts a source beside that server and waits until it is ready. A server that is loading refuses the source for
    /// a while.
    pub(super) fn start_source(&mut self, captured: Captured<'_>, history: &History<'_>) -> Result<()> {
        let listen = format!("{}:{}", captured.server.address().ip(), self.ports[captured.side]);
        let (token, url) = (self.token.display().to_string(), captured.server.url());
        let mut args = vec!["source", "--server", &url, "--listen", &listen, "--token-file", &token];
        args.extend(["--memory", self.memory, "--slot-size", "256KiB", "--stall-timeout", STALL_TIMEOUT]);
        // The script makes replicas come and fail far more often than operators do.
        args.extend(["--fork-interval", "0"]);
        if let Some(limit) = self.upload_limit {
            args.extend(["--upload-limit", limit]);
        }
        let announced = captured.announced.map(|primary| primary.address().to_string());
        if let Some(announced) = &announced {
            args.extend(["--announce", announced]);
        }
        let begun = Instant::now();
        loop {
            let name = self.next_name("source");
            let mut agent = Agent::run(self.command(captured.server.host(), captured.side, &args)?)?;
            let ready = agent.wait_for_line("source ready", READY_TIME);
            let Err(error) = ready else {
                self.source = Some(SourceRun { agent, name, address: listen, side: captured.side });
                return Ok(());
            };
            history.keep(&name, &agent.output());
            let code = agent.ended()?.and_then(|status| status.code());
            if !matches!(code, Some(3 | 4)) || begun.elapsed() > READY_TIME {
                return Err(format!("the source beside {} did not start: {error}", captured.server).into());
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Ends the source, if it runs.
    pub(super) fn end_source(&mut self, kill: bool, totals: &mut Totals, history: &History<'_>) -> Result<()> {
        let Some(mut source) = self.source.take() else { return Ok(()) };
        if kill {
            source.agent.kill()?;
        } else {
            source.agent.signal(Signal::TERM)?;
        }
        let status = source.agent.wait(STOP_TIME)?;
        let output = source.agent.output();
        history.keep(&source.name, &output);
        Totals::count(&mut totals.ends, format!("source: {}", process::in_words(status)));
        check_for_panics("the source", &output)?;
        if !kill && !status.success() {
            return Err(format!(
                "the source was stopped and ended with {}:\n{}",
                process::in_words(status),
                tail(&output)
            )
            .into());
        }
        Ok(())
    }

    /// Freezes the source or lets it continue, if it runs.
    pub(super) fn signal_source(&mut self, signal: Signal) -> Result<()> {
        Ok(self.source.as_mut().map_or(Ok(()), |source| source.agent.signal(signal))?)
    }

    /// Whether an agent runs for this seat.
    pub(super) fn runs(&self, seat: Seat) -> bool {
        self.replicas[seat.index()].is_some()
    }

    /// Whether the seat's agent was told to stay and says that its server is in step.
    pub(super) fn stays_in_step(&self, seat: Seat) -> bool {
        let run = self.replicas[seat.index()].as_ref().filter(|run| run.stay && run.asked.is_none());
        run.is_some_and(|run| run.agent.output().contains(IN_STEP))
    }

    /// How the last agent of this seat ended.
    pub(super) fn last_end(&self, seat: Seat) -> Option<&End> {
        self.ends[seat.index()].as_ref()
    }

    /// Starts an agent for this seat's server. There must be a source, and no other agent for the seat.
    pub(super) fn start(&mut self, seat: Seat, server: &Server, how: &How, history: &History<'_>) -> Result<()> {
        let source = self.source.as_ref().ok_or("a replica agent needs a source")?;
        let side = seat.index();
        let transport = match how.transport {
            Transport::Tcp => "tcp",
            Transport::Shm if source.side == side => "shm",
            Transport::Shm | Transport::Auto => "auto",
        };
        let (address, token, url) = (source.address.clone(), self.token.display().to_string(), server.url());
        let name = self.next_name(&format!("replica-{seat}"));
        let summary = history.path(&format!("{name}.json"));
        let summary_text = summary.display().to_string();
        let seat_name = seat.to_string();
        let mut args = vec!["replica", "--server", &url, "--source", &address, "--token-file", &token];
        args.extend(["--name", &seat_name, "--transport", transport, "--json", &summary_text]);
        args.extend(["--retry-for", RETRY_FOR, "--linger", "3s"]);
        let state = self.home.path().join(format!("state-{seat}")).display().to_string();
        match (self.state_dirs[side], how.relay) {
            (true, _) => args.extend(["--state-dir", &state]),
            (false, true) => args.push("--serve-peers"),
            (false, false) => {}
        }
        let flags = [
            (how.stay, "--stay"),
            (how.replace, "--replace"),
            (how.module_off, "--module-load=off"),
            (how.detached, "--on-failure=detached"),
        ];
        args.extend(flags.iter().filter(|(given, _)| *given).map(|(_, flag)| *flag));
        let agent = Agent::run(self.command(server.host(), side, &args)?)?;
        self.replicas[side] = Some(Run { agent, name, stay: how.stay, summary, asked: None, killed: false });
        Ok(())
    }

    /// Asks the seat's agent to stop, and does not wait.
    pub(super) fn stop(&mut self, seat: Seat) -> Result<()> {
        let Some(run) = &mut self.replicas[seat.index()] else { return Ok(()) };
        run.asked.get_or_insert_with(Instant::now);
        Ok(run.agent.signal(Signal::TERM)?)
    }

    /// Kills the seat's agent, if it runs. [`Agents::look`] notices its end.
    pub(super) fn kill(&mut self, seat: Seat) -> Result<()> {
        let Some(run) = &mut self.replicas[seat.index()] else { return Ok(()) };
        run.killed = true;
        Ok(run.agent.kill()?)
    }

    /// Sends a signal to the seat's agent, if it runs.
    pub(super) fn signal(&mut self, seat: Seat, signal: Signal) -> Result<()> {
        Ok(self.replicas[seat.index()].as_mut().map_or(Ok(()), |run| run.agent.signal(signal))?)
    }

    /// Looks for agents that have ended, and for those that should have.
    ///
    /// # Errors
    /// An agent ended as it must not, or did not end.
    pub(super) fn look(&mut self, totals: &mut Totals, history: &mut History<'_>) -> Result<()> {
        if let Some(source) = &mut self.source
            && let Some(status) = source.agent.ended()?
        {
            // Waits for the end of its output.
            source.agent.wait(STOP_TIME)?;
            let output = source.agent.output();
            history.keep(&source.name, &output);
            return Err(
                format!("the source ended by itself with {}:\n{}", process::in_words(status), tail(&output)).into()
            );
        }
        for seat in Seat::ALL {
            let Some(run) = &mut self.replicas[seat.index()] else { continue };
            if let Some(status) = run.agent.ended()? {
                run.agent.wait(STOP_TIME)?;
                let run = self.replicas[seat.index()].take().ok_or("the agent is gone")?;
                let before = self.ends[seat.index()].take();
                self.ends[seat.index()] = Some(ended(seat, &run, status, before, totals, history)?);
            } else if run.asked.is_some_and(|asked| asked.elapsed() > LONGEST_END) {
                let tail = tail(&run.agent.output());
                return Err(
                    format!("the agent of {seat} did not end within {LONGEST_END:?} after SIGTERM:\n{tail}").into()
                );
            }
        }
        Ok(())
    }

    /// Fails if an agent that runs has panicked.
    pub(super) fn check_for_panics(&self) -> Result<()> {
        if let Some(source) = &self.source {
            check_for_panics("the source", &source.agent.output())?;
        }
        let mut running = self.replicas.iter().flatten();
        running.try_for_each(|run| check_for_panics(&run.name, &run.agent.output()))
    }

    /// Keeps the output of the agents that run.
    pub(super) fn keep_outputs(&self, history: &History<'_>) {
        if let Some(source) = &self.source {
            history.keep(&source.name, &source.agent.output());
        }
        self.replicas.iter().flatten().for_each(|run| history.keep(&run.name, &run.agent.output()));
    }

    /// Runs `remora verify` on the host with this number and returns its exit status and its output.
    pub(super) fn verify(&self, primary: &Server, replica: &Server, more: &[&str]) -> Result<(ExitStatus, String)> {
        let (one, other) = (primary.url(), replica.url());
        let args = [&["verify", "--primary", &one, "--replica", &other], more].concat();
        let mut agent = Agent::run(self.command(replica.host(), 0, &args)?)?;
        let status = agent.wait(VERIFY_TIME)?;
        Ok((status, agent.output()))
    }

    fn command(&self, host: Option<&Host>, side: usize, args: &[&str]) -> Result<Command> {
        let mut command = Command::new(&self.program);
        command.args(args).env("XDG_STATE_HOME", self.home.path()).env_remove("REMORA_PASSWORD");
        // Hosts do not share folders.
        command.env("XDG_RUNTIME_DIR", self.home.path().join(SIDES[side]));
        command.env(
            "REMORA_LOG",
            "info,remora_agent=debug,remora_backup=debug,remora_reader=debug,remora_replica=debug,remora_server=debug,remora_source=debug",
        );
        if let Some(host) = host {
            host.enter(&mut command)?;
        }
        Ok(command)
    }

    fn next_name(&mut self, what: &str) -> String {
        self.started += 1;
        format!("{:03}-{what}", self.started)
    }
}

/// Judges the end of a replica agent.
fn ended(
    seat: Seat,
    run: &Run,
    status: ExitStatus,
    before: Option<End>,
    totals: &mut Totals,
    history: &mut History<'_>,
) -> Result<End> {
    let output = run.agent.output();
    history.keep(&run.name, &output);
    let how = process::in_words(status);
    let last = output.lines().next_back().unwrap_or_default();
    history.note(&format!(
        "  the agent of {seat} ended with {how}{}",
        if status.success() { String::new() } else { format!(": {last}") }
    ));
    Totals::count(&mut totals.ends, format!("replica: {how}"));
    check_for_panics(&run.name, &output)?;
    // A process that is asked to stop before its handler for the signal is in place has done nothing yet.
    let is_new = run.asked.is_some() && output.is_empty() && status.signal() == Some(Signal::TERM.as_raw());
    if !is_new && !is_documented(status, run.asked.is_some(), run.killed) {
        return Err(format!("the agent of {seat} must not end with {how}:\n{}", tail(&output)).into());
    }
    if status.success() || output.contains(IN_STEP) {
        let method = method_of(&run.summary).unwrap_or_else(|| "without a summary".into());
        Totals::count(&mut totals.syncs, format!("{}, {method}", if run.stay { "stay" } else { "once" }));
    }
    let says = |part: &str| output.contains(part);
    let was_left = run.killed || says("could not be told");
    // An agent that did not begin leaves the server as the one before left it.
    let before = before.filter(|_| !status.success() && !says(BEGUN));
    Ok(End {
        how,
        may_leave_link: was_left || before.as_ref().is_some_and(|end| end.may_leave_link),
        may_leave_settings: was_left
            || says("could not be put back")
            || before.is_some_and(|end| end.may_leave_settings),
    })
}

/// Whether docs/reference/exit-codes.md allows this end of a `remora replica`.
fn is_documented(status: ExitStatus, asked: bool, killed: bool) -> bool {
    match status.code() {
        Some(0 | 3 | 4 | 5 | 6 | 8 | 14) => true,
        Some(7) => asked,
        Some(_) => false,
        None => killed,
    }
}

/// Transport and delivery, from the summary that the agent has written.
fn method_of(summary: &Path) -> Option<String> {
    let summary: serde_json::Value = serde_json::from_slice(&std::fs::read(summary).ok()?).ok()?;
    Some(format!("{}, {}", summary["transport"].as_str()?, summary["delivery"].as_str()?))
}

fn check_for_panics(who: &str, output: &str) -> Result<()> {
    match output.lines().find(|line| line.contains("panicked at")) {
        Some(line) => Err(format!("{who} panicked: {line}\n{}", tail(output)).into()),
        None => Ok(()),
    }
}

/// The last lines of an output.
pub(super) fn tail(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

/// The folders of the two hosts.
const SIDES: [&str; 2] = ["left", "right"];

/// What a replica agent logs when its server is in step and it stays.
const IN_STEP: &str = "in step; staying";

/// What a replica agent logs when it has told its server to follow the link.
const BEGUN: &str = "follows our link";

/// `--retry-for` of the replica agents: longer than every fault of a script, shorter than the bound of a rest.
const RETRY_FOR: &str = "45s";

/// Time limit for a source that starts: it first touches its memory, and its server may be loading.
const READY_TIME: Duration = Duration::from_secs(60);

/// Time limit for a source that was asked to stop.
const STOP_TIME: Duration = Duration::from_secs(30);

/// Time limit for a replica agent that was asked to stop: the 75 s after which an agent ends in any case, and what a
/// frozen agent or server adds.
const LONGEST_END: Duration = Duration::from_secs(110);

/// Time limit for a `remora verify`.
const VERIFY_TIME: Duration = Duration::from_secs(180);

/// Interval between two tries to start a source.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Number of output lines in a finding.
const TAIL_LINES: usize = 25;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_documented_ends_are_accepted() {
        let exit = |code: i32| ExitStatus::from_raw(code << 8);
        for code in [0, 3, 4, 5, 6, 8, 14] {
            assert!(is_documented(exit(code), false, false), "{code}");
        }
        for code in [1, 2, 9, 13, 101, 134] {
            assert!(!is_documented(exit(code), true, true), "{code}");
        }
        assert!(is_documented(exit(7), true, false) && !is_documented(exit(7), false, false));
        assert!(
            is_documented(ExitStatus::from_raw(9), false, true)
                && !is_documented(ExitStatus::from_raw(11), true, false)
        );
    }

    #[test]
    fn a_panic_is_found_in_an_output() {
        assert!(check_for_panics("x", "all\nis well").is_ok());
        let error = check_for_panics("x", "a\nthread 'main' panicked at a.rs:1:\nb").map_err(|error| error.to_string());
        assert!(error.is_err_and(|error| error.contains("x panicked")));
    }
}
