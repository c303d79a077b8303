//! Run: one schedule, from its seed to its end, and many of them on one thread or on several.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use remora_base::mutation::Mutation;
use remora_base::pace::Random;
use remora_server::simulated;
use remora_server::simulated::{SimulatedStream, Wanted};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::check::Watch;
use super::memory::Tables;
use super::pins::Pins;
use super::plan::{FIRST_REPLICA, PRIMARY, Plan, SECOND, address};
use super::replica_agent::{Done, ReplicaAgent};
use super::server::Traits;
use super::source_agent::SourceAgent;
use super::wire::{Conn, End, Keeper, Message, ServerId, Timer, place_of};
use super::world::{Event, World};

/// The simulated time after which a schedule that does not end is a finding of its own.
const TIME_LIMIT: Duration = Duration::from_secs(1200);

/// What came of a schedule.
#[derive(Debug)]
pub(super) struct Outcome {
    /// What did not hold.
    pub(super) finding: Option<String>,
    /// What was reached, and how often.
    pub(super) counts: BTreeMap<String, u64>,
    /// The last events, if they were to be kept.
    pub(super) log: String,
}

/// A whole schedule.
pub(super) struct Simulation {
    pub(super) plan: Plan,
    pub(super) world: World,
    pub(super) sources: Vec<SourceAgent>,
    pub(super) replicas: Vec<ReplicaAgent>,
    pub(super) watch: Watch,
    pub(super) folder: PathBuf,
    pub(super) is_over: bool,
    pub(super) finding: Option<String>,
    /// Connections that find no way, and are not refused either.
    hanging: Vec<oneshot::Sender<SimulatedStream>>,
}

/// Plays the schedule of a seed; `with_log`: keeps the last events.
pub(super) fn play(seed: u64, mutation: Option<Mutation>, with_log: bool) -> Outcome {
    static RUNS: AtomicU64 = AtomicU64::new(0);
    let number = RUNS.fetch_add(1, Ordering::Relaxed);
    let memory = PathBuf::from("/dev/shm");
    let base = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let folder = base.join(format!("remora-simulation-{}-{number}", std::process::id()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let Ok(runtime) = runtime else { unreachable!("a runtime without a driver for I/O needs nothing of the system") };
    let wanted = simulated::open();
    Mutation::set(mutation);
    let outcome = runtime.block_on(async {
        let mut simulation = Simulation::new(seed, folder.clone(), with_log);
        simulation.run(wanted).await;
        let mut log = String::new();
        if with_log {
            let _ = writeln!(log, "seed {seed}: {:?}", simulation.plan);
            log.push_str(&simulation.world.log_text());
        }
        Outcome { finding: simulation.finding.take(), counts: std::mem::take(&mut simulation.world.counts), log }
    });
    drop(runtime);
    Mutation::set(None);
    simulated::close();
    let _ = std::fs::remove_dir_all(&folder);
    outcome
}

impl Simulation {
    fn new(seed: u64, folder: PathBuf, with_log: bool) -> Simulation {
        let plan = Plan::of(seed);
        let mut world = World::new(seed, Instant::now().into_std(), with_log);
        if plan.has_a_real_delivery() {
            world.memories.real = Some(Tables::new(seed));
        }
        let mut simulation = Simulation {
            plan,
            world,
            sources: Vec::new(),
            replicas: Vec::new(),
            watch: Watch::default(),
            folder,
            is_over: false,
            finding: None,
            hanging: Vec::new(),
        };
        simulation.build();
        simulation
    }

    fn build(&mut self) {
        let plan = self.plan.clone();
        let traits = |id: ServerId| Traits {
            id,
            address: address(id),
            valkey: false,
            module: false,
            backlog_bytes: plan.backlog,
            shares_its_buffer: !(plan.private_buffers && [PRIMARY, SECOND].contains(&id)),
            output_limit: plan.output_limit,
            idle_limit: Duration::ZERO,
            follows: (id == SECOND).then(|| address(PRIMARY)),
            pace: plan.pace,
            slots: plan.slots,
            saves_to_file: plan.saves_to_file,
            lacks_a_command: false,
        };
        self.world.add_server(traits(PRIMARY));
        self.world.add_server(traits(SECOND));
        for (replica, number) in plan.replicas.iter().zip(FIRST_REPLICA..) {
            let id = ServerId(number);
            let own = Traits {
                valkey: replica.valkey,
                module: replica.module,
                idle_limit: replica.idle_limit,
                pace: replica.pace,
                lacks_a_command: replica.lacks_a_command,
                ..traits(id)
            };
            self.world.add_server(own);
            if replica.has_keys {
                self.world.on(id, |server, step| server.write(&[9, 1, 2, 3, 4, 5, 6, 7, 8], step));
            }
            if replica.follows_before {
                self.world.on(id, |server, step| server.replicaof(Some(address(PRIMARY)), step));
            }
        }
        if plan.foreign {
            let id = ServerId(FIRST_REPLICA + plan.replicas.len());
            self.world.add_server(traits(id));
            self.world.foreign = Some(id);
            (0..3).for_each(|number| {
                self.world.on(id, |server, step| server.write(&[8, 7, 7, 7, 7, 7, 7, number], step))
            });
        }
        for (number, &(time, _)) in plan.acts.iter().enumerate() {
            self.world.at(time, Event::Operator(number));
        }
        self.world.at(Duration::ZERO, Event::Write);
    }

    async fn run(&mut self, mut wanted: UnboundedReceiver<Wanted>) {
        let start = Instant::now();
        let mut elapsed = Duration::ZERO;
        while !self.is_over && self.finding.is_none() {
            while let Some(event) = self.world.next_event(elapsed) {
                self.happen(event);
                if self.is_over || self.finding.is_some() {
                    return;
                }
            }
            let Some(next) = self.world.next_time() else { return };
            if next > TIME_LIMIT {
                self.finding = Some(format!("the schedule does not end within {TIME_LIMIT:?} of its time"));
                return;
            }
            if self.replicas.iter().all(ReplicaAgent::rests) {
                // No task has anything to do before the next event, so that the runtime is not asked.
                elapsed = runtime_time(next);
                continue;
            }
            if let Some(behind) = elapsed.checked_sub(start.elapsed()).filter(|behind| !behind.is_zero()) {
                tokio::time::advance(behind).await;
            }
            let woken = tokio::select! {
                biased;
                Some(wanted) = wanted.recv() => Woken::Wanted(wanted),
                (agent, done) = reports(&mut self.replicas) => Woken::Done(agent, Box::new(done)),
                () = tokio::time::sleep_until(start + next) => {
                    elapsed = start.elapsed();
                    self.replicas.iter_mut().for_each(ReplicaAgent::settle);
                    continue;
                }
            };
            elapsed = start.elapsed();
            self.world.now = self.world.now.max(elapsed);
            match woken {
                Woken::Wanted(Wanted::Attention) => self.world.read_clients(),
                Woken::Wanted(Wanted::Connection { host, port, answer }) => self.wants_client(&host, port, answer),
                Woken::Done(agent, done) => self.replicas[agent].done(&mut self.world, *done),
            }
            self.check();
        }
    }

    // ---- clients of servers ----

    /// An agent connects to a server as a client. Its own server it knows by the name `beside-` and a number.
    fn wants_client(&mut self, host: &str, port: u16, answer: oneshot::Sender<SimulatedStream>) {
        let beside = host.strip_prefix("beside-").and_then(|number| number.parse().ok()).map(ServerId);
        let by_address = || {
            self.world
                .servers
                .iter()
                .find(|server| server.traits.address.host == host && server.traits.address.port == port)
        };
        let id = beside.or_else(|| by_address().map(|server| server.traits.id));
        let Some(id) = id.filter(|&id| self.world.server(id).alive) else { return };
        let agent = beside
            .and_then(|id| self.replicas.iter().rposition(|agent| agent.options.server == id && agent.is_running()));
        if beside.is_none() && self.world.one_in(40) {
            return self.hanging.push(answer);
        }
        let Some((stream, end)) = simulated::pipe() else { return };
        self.world.add_client(end, agent, id);
        let _ = answer.send(stream);
    }

    // ---- events ----

    fn happen(&mut self, event: Event) {
        match event {
            Event::Message { conn, side, message } => self.message(conn, side, message),
            Event::Ended { conn, side } => {
                // It does not overtake what waits for a server that does nothing now.
                if let Some(End::Server(id)) = self.world.end(conn, side)
                    && let Some(until) = self.world.blocked(id)
                {
                    return self.world.in_order_at(until, Event::Ended { conn, side });
                }
                if let Some(end) = self.world.arrives(conn, side, true) {
                    self.ended(conn, end);
                }
            }
            Event::Server(id, timer) => {
                if matches!(timer, Timer::Cron { .. }) {
                    self.world.close_idle(id);
                }
                self.world.on(id, |server, step| server.timer(timer, step));
            }
            Event::Dialed { from, to, attempt } => {
                let target = self.listener(&to);
                match target.map(|target| self.world.connect(from, target)) {
                    Some(Ok(conn)) => self.dialed(from, attempt, target, Some(conn)),
                    Some(Err(pause)) => self.world.after(pause, Event::NotDialed { from, attempt }),
                    None => self.dialed(from, attempt, None, None),
                }
            }
            Event::NotDialed { from, attempt } => self.dialed(from, attempt, None, None),
            Event::Command { client } => self.world.execute(client),
            Event::Answer { client, bytes } => self.world.answer(client, &bytes),
            Event::Replica(agent, number) => self.replicas[agent].wake(&mut self.world, number),
            Event::Source(source, number) => self.sources[source].wake(&mut self.world, number),
            Event::Pin(keeper, number) => self.pins(keeper, |pins, world| pins.wake(world, number)),
            Event::Operator(number) => self.operate(number),
            Event::Write => self.writes(),
        }
        self.check();
    }

    /// Who listens at an address.
    fn listener(&self, to: &super::wire::Address) -> Option<End> {
        if let Some(place) = place_of(to) {
            let source = self.sources.iter().rfind(|source| source.is_running && source.options.place == place)?;
            return Some(End::Source(source.index));
        }
        let server = self.world.servers.iter().find(|server| server.traits.address == *to && server.alive);
        if let Some(server) = server {
            return Some(End::Server(server.traits.id));
        }
        let agent = self.replicas.iter().find(|agent| agent.link == *to && agent.has_a_port())?;
        Some(End::Link(agent.index, agent.options.server))
    }

    /// A connection attempt has ended; with a connection, or without.
    fn dialed(&mut self, from: End, attempt: u64, to: Option<End>, conn: Option<Conn>) {
        let world = &mut self.world;
        let mut source = 0;
        if let (Some(End::Source(index)), Some(conn)) = (to, conn) {
            source = index;
            self.sources[index].accept(world, conn);
        }
        match from {
            End::Server(id) => world.on(id, |server, step| server.dialed(attempt, conn, step)),
            End::Replica(agent, _) => self.replicas[agent].dialed(world, attempt, source, conn),
            End::Capture(of, job) => self.sources[of].dialed(world, job, conn),
            End::Standby(of) => self.sources[of].dialed_the_first(world, attempt, source, conn),
            End::Pin(keeper, number) => self.pins(keeper, |pins, world| pins.dialed(world, number, conn)),
            End::Link(..) | End::Source(_) => {}
        }
    }

    /// Tells an agent's pins something.
    fn pins(&mut self, keeper: Keeper, tell: impl FnOnce(&mut dyn Pins, &mut World)) {
        match keeper {
            Keeper::Source(source) => self.sources[source].with_pins(&mut self.world, tell),
            Keeper::Replica(agent, _) => self.replicas[agent].with_pins(&mut self.world, tell),
        }
    }

    fn message(&mut self, conn: Conn, side: usize, message: Message) {
        let Some(end) = self.world.arrives(conn, side, false) else { return };
        let world = &mut self.world;
        match (end, message) {
            (End::Server(id), message) => match world.blocked(id) {
                Some(until) => world.in_order_at(until, Event::Message { conn, side, message }),
                None => world.on(id, |server, step| server.receive(conn, message, step)),
            },
            (End::Link(agent, _), message) => self.replicas[agent].receive(world, conn, message),
            (End::Replica(agent, _), Message::Agents(said)) => self.replicas[agent].said(world, conn, *said),
            (End::Source(source), Message::Agents(said)) => self.sources[source].said(world, conn, *said),
            (End::Standby(source), Message::Agents(said)) => self.sources[source].the_first_says(world, conn, *said),
            (End::Capture(source, job), message) => self.sources[source].receive(world, job, conn, message),
            (End::Pin(keeper, number), message) => {
                self.pins(keeper, |pins, world| pins.receive(world, number, message))
            }
            (End::Replica(..) | End::Source(_) | End::Standby(_), _) => {}
        }
    }

    fn ended(&mut self, conn: Conn, end: End) {
        let world = &mut self.world;
        match end {
            End::Server(id) => world.on(id, |server, step| server.closed(conn, step)),
            End::Link(agent, _) => self.replicas[agent].link_closed(world, conn),
            End::Replica(agent, _) => self.replicas[agent].session_closed(world, conn),
            End::Source(source) => self.sources[source].left(world, conn),
            End::Standby(source) => self.sources[source].lost_the_first(world, conn, "the conversation has ended"),
            End::Capture(source, job) => self.sources[source].closed(world, job, conn),
            End::Pin(keeper, number) => self.pins(keeper, |pins, world| pins.closed(world, number)),
        }
    }

    // ---- checks ----

    fn check(&mut self) {
        let changes = std::mem::take(&mut self.world.changes);
        for change in &changes {
            if let Err(text) = self.watch.changed(&self.world, &self.replicas, change) {
                return self.found(text);
            }
        }
        self.spring_traps();
        if let Err(text) = Watch::servers(&mut self.world) {
            return self.found(text);
        }
        if let Some(text) = self.world.late.finding.take().or_else(|| self.world.promises.finding.take()) {
            return self.found(text);
        }
        if let Err(text) = Watch::memory(&self.world, &self.replicas) {
            return self.found(text);
        }
        if let Some(text) = self.sources.iter_mut().find_map(|source| source.finding.take()) {
            return self.found(text);
        }
        if let Err(text) = self.watch.agents(&self.world, &self.replicas) {
            self.found(text);
        }
    }

    pub(super) fn found(&mut self, text: String) {
        self.world.log(|| format!("FOUND {text}"));
        self.finding.get_or_insert(text);
    }
}

/// The time at which the runtime ends a pause: whole milliseconds.
fn runtime_time(time: Duration) -> Duration {
    Duration::from_millis(time.as_nanos().div_ceil(1_000_000) as u64)
}

enum Woken {
    Wanted(Wanted),
    Done(usize, Box<Done>),
}

/// The next thing that a task of an agent has done.
async fn reports(agents: &mut [ReplicaAgent]) -> (usize, Done) {
    std::future::poll_fn(|cx| {
        for (number, agent) in agents.iter_mut().enumerate() {
            if let Poll::Ready(done) = agent.poll(cx) {
                return Poll::Ready((number, done));
            }
        }
        Poll::Pending
    })
    .await
}

/// Findings after which it ends early: the first ones say enough.
const FINDINGS: usize = 10;

/// How often the progress is shown.
const SHOW_EVERY: Duration = Duration::from_secs(60);

/// How much is played. The first limit that is reached ends the run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time.
    pub time: Duration,
    /// The number of schedules.
    pub schedules: u64,
    /// Whether each schedule is played twice. One that is not the same both times is a finding.
    pub twice: bool,
    /// The number of threads. They take the seeds from one stream, so that the number does not decide what is played.
    pub jobs: usize,
}

/// What came of many schedules.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// How many ran.
    pub schedules: u64,
    /// How long they took.
    pub took: Duration,
    /// What they reached, and how often.
    pub reached: BTreeMap<String, u64>,
    /// Seeds whose schedules violated what must hold, and how.
    pub findings: Vec<(u64, String)>,
}

impl Summary {
    /// The number of schedules per second.
    pub fn rate(&self) -> f64 {
        self.schedules as f64 / self.took.as_secs_f64().max(f64::EPSILON)
    }
}

/// What the threads share.
struct Progress<S> {
    seeds: S,
    summary: Summary,
    shown: std::time::Instant,
}

/// Plays schedules whose seeds follow from `first`, until a limit is reached or enough was found. With `shows`, it
/// prints its progress once a minute, and the last events of each finding.
pub fn explore(limits: Limits, first: u64, shows: bool) -> Summary {
    let began = std::time::Instant::now();
    let seeds = Random::seeded(first).draws().take(usize::try_from(limits.schedules).unwrap_or(usize::MAX));
    let progress = Mutex::new(Progress { seeds, summary: Summary::default(), shown: began });
    std::thread::scope(|scope| {
        for _ in 1..limits.jobs {
            scope.spawn(|| work(limits, began, &progress, shows));
        }
        work(limits, began, &progress, shows);
    });
    let mut summary = progress.into_inner().unwrap_or_else(PoisonError::into_inner).summary;
    summary.took = began.elapsed();
    summary
}

/// Plays schedules on this thread.
fn work<S: Iterator<Item = u64>>(
    limits: Limits,
    began: std::time::Instant,
    progress: &Mutex<Progress<S>>,
    shows: bool,
) {
    let locked = || progress.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let mut progress = locked();
        if progress.summary.findings.len() >= FINDINGS || began.elapsed() >= limits.time {
            return;
        }
        let Some(seed) = progress.seeds.next() else { return };
        drop(progress);
        let mut outcome = play(seed, None, false);
        if limits.twice {
            outcome.finding = outcome.finding.or_else(|| difference(&outcome.counts, &play(seed, None, false).counts));
        }
        if shows && outcome.finding.is_some() {
            println!("{}", explain(seed));
        }
        let mut progress = locked();
        progress.summary.schedules += 1;
        for (what, count) in outcome.counts {
            *progress.summary.reached.entry(what).or_default() += count;
        }
        progress.summary.findings.extend(outcome.finding.map(|finding| (seed, finding)));
        if shows && progress.shown.elapsed() >= SHOW_EVERY {
            progress.shown = std::time::Instant::now();
            progress.summary.took = began.elapsed();
            let summary = &progress.summary;
            let (number, found) = (summary.schedules, summary.findings.len());
            println!("{number} schedules, {:.0} per second, {found} findings", summary.rate());
        }
    }
}

/// How the second play of a schedule differed from the first.
fn difference(first: &BTreeMap<String, u64>, second: &BTreeMap<String, u64>) -> Option<String> {
    let names = first.keys().chain(second.keys());
    let counts = |name: &String| (first.get(name).copied(), second.get(name).copied());
    let other = names.map(|name| (name, counts(name))).find(|(_, (one, two))| one != two);
    other.map(|(name, (one, two))| format!("the seed does not replay: {name} {one:?} times, and then {two:?} times"))
}

/// Plays the schedule of a seed again and says what it finds, with the last events.
pub fn explain(seed: u64) -> String {
    let outcome = play(seed, None, true);
    match outcome.finding {
        None => format!("REMORA_SIM_SEED={seed}: nothing is found"),
        Some(finding) => format!("{}\nREMORA_SIM_SEED={seed} runs it again: {finding}", outcome.log),
    }
}
