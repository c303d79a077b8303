//! The scene: one primary with data, on which trials run one after the other.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remora_lab::net::Traffic;
use remora_lab::server::{module_words, wait_until};
use remora_lab::workload::{MIX_BYTES, Options, Workload, fill_every_type, fill_mix};
use remora_lab::{BitRate, Builder, Client, Error, Host, Kind, Net, Server, compare, process, scratch};
use serde::Serialize;
use tempfile::TempDir;

use super::agents::{Lost, Program, Show, Source, Watch};
use super::method::{Copied, Method, Pace, Setting};
use super::summary::{Outcome, Phases, Summary};
use super::{Result, agents, method};
use crate::processors::{self, Role};
use crate::{Background, cpu};

/// The data of a primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of keys.
    pub keys: u64,
    /// Bytes of each string; not for the mix.
    pub value_bytes: u64,
    /// What the keys hold.
    pub content: Content,
}

/// What the keys of a primary hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Strings of random bytes.
    Strings,
    /// Strings of JSON records.
    Json,
    /// The same, and a small set of every type in 16 databases.
    StringsAndEveryType,
    /// Small values of all types ([`fill_mix`]).
    Mix,
}

impl Shape {
    /// Bytes of all values.
    pub fn bytes(&self) -> u64 {
        let each = if self.content == Content::Mix { MIX_BYTES } else { self.value_bytes };
        self.keys.saturating_mul(each)
    }
}

/// The parameters of a trial.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// The method.
    pub method: Method,
    /// Number of replicas.
    pub replicas: usize,
    /// Commands per second with which a writer changes the primary meanwhile: of every kind, in all databases, the same
    /// sequence for every trial.
    pub writes: Option<u64>,
    /// Whether the replicas are compared with the primary afterwards.
    pub compare: bool,
}

/// When a benchmark compares the replicas with the primary, which takes seconds each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compare {
    /// In the first round.
    First,
    /// In every round.
    Every,
    /// Never.
    Never,
}

impl Compare {
    /// Whether the replicas of this round are compared; rounds count from 0.
    pub fn is_due(self, round: usize) -> bool {
        match self {
            Compare::First => round == 0,
            Compare::Every => true,
            Compare::Never => false,
        }
    }
}

/// A primary with data, on which trials run; see the module's documentation.
pub struct Scene {
    program: Program,
    place: Place,
    shape: Shape,
    primary: Server,
    /// Values to restore after a trial.
    changed: Vec<Setting>,
    source: Option<Source>,
    /// The method for which the source was started.
    source_of: Option<Method>,
    folder: TempDir,
}

impl Scene {
    /// Starts a primary with default settings on this machine's loopback, and fills it.
    pub fn set(program: &Program, kind: Kind, shape: Shape) -> Result<Scene> {
        Scene::at(&Place::loopback(), program, kind, shape)
    }

    /// Starts a primary with default settings there, and fills it.
    pub fn at(place: &Place, program: &Program, kind: Kind, shape: Shape) -> Result<Scene> {
        // Our module is loaded for the trials that need it. On a separate host a server has no loopback clients.
        let who = if place.primary().is_some() { "yes" } else { "local" };
        let builder = Server::builder(kind).config("enable-module-command", who);
        let primary = processors::on(Role::Primary, || on(builder, place.primary()).start())?;
        match shape.content {
            Content::Strings => program.load(&primary, shape.keys, shape.value_bytes, false)?,
            Content::Json => program.load(&primary, shape.keys, shape.value_bytes, true)?,
            Content::StringsAndEveryType => {
                program.load(&primary, shape.keys, shape.value_bytes, false)?;
                fill_every_type(&mut primary.client()?, DATA_SEED)?;
            }
            Content::Mix => fill_mix(&mut primary.client()?, shape.keys, DATA_SEED)?,
        }
        let folder = scratch::folder("scene")?;
        Ok(Scene {
            program: program.clone(),
            place: place.clone(),
            shape,
            primary,
            changed: Vec::new(),
            source: None,
            source_of: None,
            folder,
        })
    }

    /// The data of the primary.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The primary.
    pub fn primary(&self) -> &Server {
        &self.primary
    }

    /// Runs a trial on fresh replica servers.
    pub fn play(&mut self, trial: &Trial, show: &Show<'_>) -> Result<Outcome> {
        self.play_then(trial, show, &mut |_| Ok(()))
    }

    /// As [`Scene::play`]. `then` is called when the sync has been measured, and before the replicas are compared: the
    /// caller ends its own writers there.
    pub fn play_then(
        &mut self,
        trial: &Trial,
        show: &Show<'_>,
        then: &mut dyn FnMut(&Outcome) -> Result<()>,
    ) -> Result<Outcome> {
        if let Some(first) = trial.method.joins().filter(|first| self.source_of != Some(*first)) {
            self.play(&Trial { method: first, compare: false, ..*trial }, show)?;
        }
        self.prepare(trial)?;
        let mut replicas = self.empty_servers(trial)?;
        if trial.method.is_ours() && self.source.is_none() {
            let (folder, bytes, cable) = (self.folder.path(), self.shape.bytes(), self.place.cable());
            let start = || Source::start_by(trial.method, &self.program, &self.primary, folder, bytes, cable);
            let source = processors::on(Role::Source, start)?;
            (self.source, self.source_of) = (Some(source), Some(trial.method));
        }
        touch_memory(self.shape.bytes().saturating_mul(trial.replicas as u64));
        let began = Instant::now();
        let writer = trial.writes.map(|rate| self.writer(rate)).transpose()?;
        let ready_cpu = self.source.as_ref().map_or(Ok(0.0), Source::cpu)?;
        let mut meter = Meter::begin(&self.primary, &replicas, self.late_source_cpu(trial)?, ready_cpu)?;
        let mut took = match trial.method {
            Method::Copier => self.by_copier(&replicas, Pace::Pipelined)?,
            Method::CopierOneByOne => self.by_copier(&replicas, Pace::OneByOne)?,
            Method::RdbFile => self.by_rdb_file(trial, &mut replicas, &mut meter, show)?,
            Method::RedisShake => self.by_shake(&mut replicas)?,
            method if method.is_own() => self.by_themselves(trial, &replicas, show)?,
            _ => self.by_remora(trial, &replicas, show)?,
        };
        let killed = took.killed.take();
        let mut outcome = meter.end(trial, took, self.source.as_ref())?;
        if let Some(writer) = writer {
            outcome.writes_per_second = writer.stop()?.commands as f64 / began.elapsed().as_secs_f64();
        }
        then(&outcome)?;
        if trial.compare {
            // A killed agent left a server without its data.
            let whole = replicas.iter().enumerate().filter(|(number, _)| Some(*number) != killed);
            self.compare(trial, whole.map(|(_, replica)| replica), &mut outcome)?;
        }
        Ok(outcome)
    }

    /// Waits until the primary has no replicas, then applies the settings of the method.
    fn prepare(&mut self, trial: &Trial) -> Result<()> {
        if trial.method.joins().is_none() {
            (self.source, self.source_of) = (None, None);
        }
        for (name, value) in std::mem::take(&mut self.changed).into_iter().rev() {
            self.primary.configure(name, &value)?;
        }
        for (name, value) in trial.method.primary_settings(self.primary.kind(), trial.replicas) {
            self.changed.push((name, self.primary.configured(name)?));
            self.primary.configure(name, &value)?;
        }
        // For a late joiner, the source itself is the one replica that stays.
        let left = u32::from(trial.method.joins().is_some());
        let mut client = self.primary.client()?;
        wait_until("the primary to be idle", REST_TIME, || {
            let connected = client.info("replication")?.number::<u32>("connected_slaves");
            Ok(match (connected, has_child(&mut client)?) {
                (Some(count), false) if count <= left => Ok(()),
                state => Err(format!("replicas and child: {state:?}")),
            })
        })?;
        self.change_module(trial.method.has_module())
    }

    /// Makes the primary load our module for capture, or unload it. The part that loads snapshots cannot be unloaded.
    fn change_module(&self, wanted: bool) -> Result<()> {
        let mut client = self.primary.client()?;
        let has = client.list(&["REMORA.HELP"]).is_ok();
        if wanted && !has {
            let words = module_words("capture-only")?;
            let command: Vec<&str> = ["MODULE", "LOAD"].into_iter().chain(words.iter().map(String::as_str)).collect();
            client.ok(&command)?;
        }
        if has && !wanted {
            client.ok(&["MODULE", "UNLOAD", "remora"])?;
        }
        Ok(())
    }

    fn empty_servers(&self, trial: &Trial) -> Result<Vec<Server>> {
        let kind = self.primary.kind();
        if trial.replicas > self.place.room() {
            return Err(format!("{} replicas, but hosts for {} only", trial.replicas, self.place.room()).into());
        }
        let server = |number| {
            let settings = trial.method.replica_settings(kind).into_iter();
            let builder = settings.fold(Server::builder(kind), |builder, (name, value)| builder.config(name, value));
            let builder =
                if trial.method == Method::RdbFile { builder.start_time(method::LONGEST_START) } else { builder };
            let builder = if trial.method.has_module() { builder.module("")? } else { builder };
            processors::on(Role::Server(number, trial.replicas), || on(builder, self.place.replica(number)).start())
        };
        Ok((0..trial.replicas).map(server).collect::<remora_lab::Result<_>>()?)
    }

    fn writer(&self, rate: u64) -> Result<Workload> {
        // No command that empties databases: all methods must find the same amount of data.
        let options = Options { flush: false, big_bytes: 0, ..Options::seeded(WRITER_SEED).rate(rate) };
        Ok(Workload::start(self.primary.client()?, options)?)
    }

    /// What the source used before a late joiner: that was for the earlier replicas.
    fn late_source_cpu(&self, trial: &Trial) -> Result<f64> {
        match &self.source {
            Some(source) if trial.method.joins().is_some() => source.cpu(),
            _ => Ok(0.0),
        }
    }

    fn by_themselves(&self, trial: &Trial, replicas: &[Server], show: &Show<'_>) -> Result<Took> {
        // Connections first, so that the replicas get the command at the same time.
        let clients: Vec<Client> = replicas.iter().map(Server::client).collect::<remora_lab::Result<_>>()?;
        let address = self.primary.address();
        let begun = Instant::now();
        for mut client in clients {
            client.ok(&["REPLICAOF", &address.ip().to_string(), &address.port().to_string()])?;
        }
        let phases =
            self.watch(trial, replicas, begun, show, &|| Ok(()), &Lost::none())?.into_iter().flatten().collect();
        Ok(Took { phases, ..Took::new(begun) })
    }

    fn by_remora(&self, trial: &Trial, replicas: &[Server], show: &Show<'_>) -> Result<Took> {
        let source = self.source.as_ref().ok_or("no source runs")?;
        let begun = Instant::now();
        let start = |(number, server): (usize, &Server)| {
            let name = format!("replica-{}", number + 1);
            let start = || self.program.replica(server, source, trial.method, &name);
            processors::on(Role::Agent(number, trial.replicas), start)
        };
        let agents: Vec<agents::Replica> = replicas.iter().enumerate().map(start).collect::<Result<_>>()?;
        let agents = Mutex::new(agents);
        let check = |lost: &Lost| {
            let mut agents = agents.lock().unwrap_or_else(PoisonError::into_inner);
            for (_, agent) in agents.iter_mut().enumerate().filter(|(number, _)| !lost.is(*number)) {
                if let Some(output) = agent.has_failed()? {
                    return Err(format!("remora replica failed:\n{output}").into());
                }
            }
            Ok(())
        };
        let lost = &Lost::none();
        let seen = thread::scope(|scope| {
            let kill = |number: usize| {
                let mut agents = agents.lock().unwrap_or_else(PoisonError::into_inner);
                agents.get_mut(number).ok_or("no such replica")?.kill()
            };
            let loses = trial.method == Method::RemoraRelayKilled;
            let losing = loses.then(|| scope.spawn(move || lost.lose_a_relay(source, kill)));
            let seen = self.watch(trial, replicas, begun, show, &|| check(lost), lost);
            lost.call_off();
            let killed =
                losing.map_or(Ok(Ok(())), |thread| thread.join().map_err(|_| "the killing thread panicked"))?;
            killed.and(seen)
        })?;
        if trial.method == Method::RemoraRelayKilled && !lost.is_anybody() {
            return Err("no replica lent slots in the middle of its work, so none was killed".into());
        }
        let mut took = Took { killed: seen.iter().position(Option::is_none), ..Took::new(begun) };
        for (agent, seen) in agents.into_inner().unwrap_or_else(PoisonError::into_inner).iter_mut().zip(seen) {
            took.agent_memory.push(agent.peak_memory());
            let Some(seen) = seen else { continue };
            let (summary, cpu): (Summary, f64) = agent.finish()?;
            took.agents_cpu += cpu;
            took.phases.push(Phases::of_agent(&summary, seen.sum()));
        }
        Ok(took)
    }

    fn watch(
        &self,
        trial: &Trial,
        replicas: &[Server],
        begun: Instant,
        show: &Show<'_>,
        check: &(dyn Fn() -> Result<()> + Sync),
        lost: &Lost,
    ) -> Result<Vec<Option<Phases>>> {
        let loads_while_receiving = trial.method.loads_while_receiving();
        Watch { primary: &self.primary, replicas, begun, loads_while_receiving, show, check, lost }.until_all_in_step()
    }

    fn by_copier(&self, replicas: &[Server], pace: Pace) -> Result<Took> {
        let before = cpu::of_self()?;
        let begun = Instant::now();
        let copied = method::copy(&self.primary, replicas, pace)?;
        let phases = |copied: &Copied| Phases { transfer: copied.took.as_secs_f64(), ..Phases::default() };
        let phases = copied.iter().map(phases).collect();
        Ok(Took { phases, agents_cpu: (cpu::of_self()? - before).as_secs_f64(), ..Took::new(begun) })
    }

    fn by_rdb_file(&self, trial: &Trial, replicas: &mut [Server], meter: &mut Meter, show: &Show<'_>) -> Result<Took> {
        let begun = Instant::now();
        let made = method::by_rdb_file(&self.primary, replicas, begun)?;
        // The processes that were measured before have ended.
        meter.replicas_started_again(replicas)?;
        let seen = self.watch(trial, replicas, begun, show, &|| Ok(()), &Lost::none())?;
        let phases = seen.iter().flatten().zip(&made).map(|(seen, made)| Phases {
            snapshot: 0.0,
            transfer: made.arrived.as_secs_f64(),
            load: (made.loaded - made.arrived).as_secs_f64(),
            catch_up: (seen.sum() - made.loaded.as_secs_f64()).max(0.0),
        });
        let phases = phases.collect();
        Ok(Took { phases, agents_cpu: made.iter().map(|made| made.cpu).sum(), ..Took::new(begun) })
    }

    fn by_shake(&self, replicas: &mut [Server]) -> Result<Took> {
        let begun = Instant::now();
        let made = method::by_shake(&self.primary, replicas, begun)?;
        let phases = made.iter().map(|made| Phases { transfer: made.loaded.as_secs_f64(), ..Phases::default() });
        let phases = phases.collect();
        Ok(Took { phases, agents_cpu: made.iter().map(|made| made.cpu).sum(), ..Took::new(begun) })
    }

    fn compare<'s>(
        &self,
        trial: &Trial,
        replicas: impl Iterator<Item = &'s Server>,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let replicas: Vec<&Server> = replicas.collect();
        if trial.method.only_copies() {
            let digest = self.primary.digest()?;
            for replica in replicas {
                if replica.digest()? != digest {
                    outcome.differences.push(format!("{replica}: the digests differ"));
                }
            }
        } else {
            for compared in compare::same_data_in_all(&self.primary, &replicas, COMPARE_TIME)? {
                outcome.differences.extend(difference(compared)?);
            }
        }
        outcome.equal = Some(outcome.differences.is_empty());
        Ok(())
    }
}

/// How a replica differs from its primary, or that it does not become equal in time; `None` if it is equal.
fn difference(compared: remora_lab::Result<compare::Agreement>) -> Result<Option<String>> {
    match compared {
        Ok(_) => Ok(None),
        Err(error @ (Error::Different(_) | Error::TooLate { .. })) => Ok(Some(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// The costs that a method reports itself.
struct Took {
    begun: Instant,
    /// Phases of each replica.
    phases: Vec<Phases>,
    agents_cpu: f64,
    /// Peak memory of each replica agent, in bytes.
    agent_memory: Vec<u64>,
    /// The replica whose agent was killed, counted from 0.
    killed: Option<usize>,
}

impl Took {
    fn new(begun: Instant) -> Took {
        Took { begun, phases: Vec::new(), agents_cpu: 0.0, agent_memory: Vec::new(), killed: None }
    }
}

/// The costs of all servers, before and after.
struct Meter {
    primary: (Client, Costs),
    replicas: Vec<(Client, Costs)>,
    source_cpu: f64,
    source_ready_cpu: f64,
    peak: Background<u64>,
    child: Background<Duration>,
    cable: Option<(Host, Traffic)>,
}

impl Meter {
    fn begin(primary: &Server, replicas: &[Server], source_cpu: f64, source_ready_cpu: f64) -> Result<Meter> {
        let read = |server: &Server| -> Result<(Client, Costs)> {
            let mut client = server.client()?;
            let costs = Costs::read(&mut client)?;
            Ok((client, costs))
        };
        let cable = |host: &Host| -> Result<(Host, Traffic)> { Ok((host.clone(), host.traffic()?)) };
        Ok(Meter {
            primary: read(primary)?,
            replicas: replicas.iter().map(read).collect::<Result<_>>()?,
            source_cpu,
            source_ready_cpu,
            peak: watch_memory(primary.pid()),
            child: agents::watch_children(primary.pid()),
            cable: primary.host().map(cable).transpose()?,
        })
    }

    /// The replicas' servers are new processes: their costs are counted from the start of those.
    fn replicas_started_again(&mut self, replicas: &[Server]) -> Result<()> {
        let again = |server: &Server| -> Result<(Client, Costs)> { Ok((server.client()?, Costs::default())) };
        self.replicas = replicas.iter().map(again).collect::<Result<_>>()?;
        Ok(())
    }

    fn end(&mut self, trial: &Trial, took: Took, source: Option<&Source>) -> Result<Outcome> {
        let peak = self.peak.end().unwrap_or_default();
        let host_bytes = self.cable.as_ref().map(|(host, before)| Ok::<_, Error>(host.traffic()?.since(*before).sent));
        let mut replicas = Vec::new();
        for (client, before) in &mut self.replicas {
            replicas.push(Costs::read(client)?.since(*before));
        }
        let mut replica_memory = Vec::new();
        for (client, _) in &mut self.replicas {
            replica_memory.push(client.info("memory")?.number("used_memory").unwrap_or_default());
        }
        let (client, before) = &mut self.primary;
        // A child counts once it has ended and its parent has noticed.
        while has_child(client)? {
            thread::sleep(CHILD_POLL);
        }
        let primary = Costs::read(client)?.since(*before);
        let source_cpu = source.map_or(Ok(0.0), Source::cpu)? - self.source_cpu;
        let last = took.phases.iter().max_by(|one, other| one.sum().total_cmp(&other.sum())).copied();
        let phases = last.unwrap_or_default();
        // With two channels the child sends by itself and the primary does not count it; this counts what its replicas
        // received.
        let received = if trial.method.is_ours() { 0 } else { replicas.iter().map(|costs| costs.received).sum() };
        Ok(Outcome {
            method: trial.method,
            replicas: trial.replicas,
            seconds: phases.sum(),
            first_seconds: took.phases.iter().map(Phases::sum).reduce(f64::min).unwrap_or_default(),
            window: Some((took.begun, took.begun + Duration::from_secs_f64(phases.sum()))),
            primary_cpu: primary.cpu,
            replica_cpu: replicas.iter().map(|costs| costs.cpu).collect(),
            agents_cpu: took.agents_cpu + source_cpu,
            source_cpu,
            source_ready_cpu: self.source_ready_cpu - self.source_cpu,
            phases,
            primary_bytes: primary.sent.max(received),
            host_bytes: host_bytes.transpose()?,
            full_copies: primary.full_copies,
            peak_memory: peak + primary.copied,
            child_memory: primary.copied,
            child_seconds: self.child.end().unwrap_or_default().as_secs_f64(),
            replica_memory,
            writes_per_second: 0.0,
            source_memory: source.map_or(0, Source::peak_memory),
            agent_memory: took.agent_memory,
            equal: None,
            differences: Vec::new(),
        })
    }
}

fn has_child(client: &mut Client) -> remora_lab::Result<bool> {
    Ok(client.info("persistence")?.get("rdb_bgsave_in_progress") != Some("0"))
}

/// Takes one and a half times that much memory from the system, touches it and frees it: the memory that the replicas
/// will need.
///
/// In a virtual machine, the first touch of a page that the host has not provided yet, or has taken back, costs
/// microseconds. Without this, the cost hits the process that takes memory last: the replica of the method that has
/// just reserved memory for its source.
fn touch_memory(bytes: u64) {
    // Never so much that the system would have to kill a process.
    let wanted = bytes.saturating_add(bytes / 2).min(available_memory().unwrap_or(0) / 4 * 3);
    let length = usize::try_from(wanted).unwrap_or(0);
    let mut memory = vec![0u8; length];
    for byte in memory.iter_mut().step_by(PAGE) {
        *byte = 1;
    }
    std::hint::black_box(&memory);
}

/// The memory that the system could provide now, in bytes; `None` if unknown.
pub(crate) fn available_memory() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The smallest page of memory that systems have, in bytes.
const PAGE: usize = 4096;

/// Seed of the data, the same for every scene.
const DATA_SEED: u64 = 1;

/// Seed of the writes, the same for every trial.
const WRITER_SEED: u64 = 2;

/// How long a primary may take to notice that its replicas have gone and to reap its child.
const REST_TIME: Duration = Duration::from_secs(60);

/// How long a replica may take to become equal to its primary, digests included.
const COMPARE_TIME: Duration = Duration::from_secs(120);

/// Interval between checks whether a primary's child has ended.
const CHILD_POLL: Duration = Duration::from_millis(10);

// Where a scene runs: on this machine's loopback, or on the hosts of a test network with cables of a given rate.

/// One host for the primary, one for each replica, one for the primary's clients; or loopback without hosts.
#[derive(Clone, Debug, Default)]
pub struct Place {
    hosts: Option<Hosts>,
}

#[derive(Clone, Debug)]
struct Hosts {
    primary: Host,
    client: Host,
    replicas: Vec<Host>,
    rate: BitRate,
}

impl Place {
    /// Everything on this machine's loopback.
    pub fn loopback() -> Place {
        Place::default()
    }

    /// A network with a cable of this rate for every host, with room for `replicas` replicas.
    ///
    /// # Errors
    /// The process is not root, or the kernel lacks a feature; the error names it.
    pub fn network(rate: BitRate, replicas: usize) -> Result<Place> {
        let net = Net::new()?;
        Place::hosts(rate, replicas, |name, _| net.host(name))
    }

    /// The same, with half of the machine's processors for the primary's host and its clients', and the other half for
    /// all replicas, so that a replica's work takes no processor time from the primary, as with separate machines.
    pub fn network_apart(rate: BitRate, replicas: usize) -> Result<Place> {
        let all = std::thread::available_parallelism()?.get();
        let (net, half) = (Net::new()?, all / 2);
        if half == 0 {
            return Err("one processor can't be shared out among hosts: give --shared-processors".into());
        }
        Place::hosts(rate, replicas, |name, is_replica| net.host_on(name, if is_replica { half..all } else { 0..half }))
    }

    /// Makes all hosts use this congestion control, by its kernel name. Nothing on loopback.
    pub fn congestion(&self, name: &str) -> Result<()> {
        let Some(Hosts { primary, client, replicas, .. }) = &self.hosts else { return Ok(()) };
        for host in [primary, client].into_iter().chain(replicas) {
            host.within(|| std::fs::write(CONGESTION, name))??;
        }
        Ok(())
    }

    /// Creates the hosts with `host`, which gets a name and whether it is a replica's host.
    fn hosts(rate: BitRate, replicas: usize, make: impl Fn(&str, bool) -> remora_lab::Result<Host>) -> Result<Place> {
        let host = |name: &str, is_replica| -> Result<Host> {
            let host = make(name, is_replica)?;
            host.shape(remora_lab::Shape::bits(rate.0))?;
            Ok(host)
        };
        let (primary, client) = (host("primary", false)?, host("client", false)?);
        let replicas = (1..=replicas).map(|number| host(&format!("replica-{number}"), true)).collect::<Result<_>>()?;
        Ok(Place { hosts: Some(Hosts { primary, client, replicas, rate }) })
    }

    /// Bytes per second that each host's cable carries, including all headers; `None` on loopback.
    pub fn cable(&self) -> Option<u64> {
        self.hosts.as_ref().map(|hosts| hosts.rate.0 / 8)
    }

    /// The primary's host.
    pub fn primary(&self) -> Option<&Host> {
        self.hosts.as_ref().map(|hosts| &hosts.primary)
    }

    /// The host of the primary's clients.
    pub fn client(&self) -> Option<&Host> {
        self.hosts.as_ref().map(|hosts| &hosts.client)
    }

    /// The host of a replica, counted from 0.
    pub fn replica(&self, number: usize) -> Option<&Host> {
        self.hosts.as_ref().and_then(|hosts| hosts.replicas.get(number))
    }

    /// The number of replicas for which it has room.
    pub fn room(&self) -> usize {
        self.hosts.as_ref().map_or(usize::MAX, |hosts| hosts.replicas.len())
    }
}

/// The congestion control of new connections in the network namespace of the thread that opens it.
const CONGESTION: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// Makes a server run on that host.
pub(super) fn on(builder: Builder, host: Option<&Host>) -> Builder {
    match host {
        Some(host) => builder.on(host),
        None => builder,
    }
}

// What a server has used so far, as it reports itself: processor time to the microsecond, bytes.

/// Counters that are read before and after; the difference is the cost.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Costs {
    /// Processor seconds, including those of ended children.
    pub(crate) cpu: f64,
    /// Bytes sent.
    pub(crate) sent: u64,
    /// Bytes received from a primary.
    pub(crate) received: u64,
    /// Children forked.
    pub(crate) forks: u64,
    /// Full copies that replicas asked for and got (`sync_full`).
    pub(crate) full_copies: u64,
    /// Bytes that the last child and its parent have copied on write.
    pub(crate) copied: u64,
}

impl Costs {
    pub(crate) fn read(client: &mut Client) -> Result<Costs> {
        let text = client.bytes(&["INFO", "cpu", "stats", "persistence"])?.unwrap_or_default();
        let info = remora_redis::info::Info::parse(&text);
        let seconds = |name| info.number::<f64>(name).unwrap_or_default();
        Ok(Costs {
            cpu: CPU_FIELDS.into_iter().map(seconds).sum(),
            sent: info.number("total_net_output_bytes").unwrap_or_default(),
            received: info.number("total_net_repl_input_bytes").unwrap_or_default(),
            forks: info.number("total_forks").unwrap_or_default(),
            full_copies: info.number("sync_full").unwrap_or_default(),
            copied: info.number("rdb_last_cow_size").unwrap_or_default(),
        })
    }

    pub(crate) fn since(self, before: Costs) -> Costs {
        Costs {
            cpu: self.cpu - before.cpu,
            sent: self.sent.saturating_sub(before.sent),
            received: self.received.saturating_sub(before.received),
            forks: self.forks.saturating_sub(before.forks),
            full_copies: self.full_copies.saturating_sub(before.full_copies),
            // This counter is not a sum but the value of the last child: zero if none was forked meanwhile.
            copied: if self.forks > before.forks { self.copied } else { 0 },
        }
    }
}

const CPU_FIELDS: [&str; 4] = ["used_cpu_user", "used_cpu_sys", "used_cpu_user_children", "used_cpu_sys_children"];

// The peak of a server's private memory during a period.

/// Samples a process's private memory (`RssAnon`) until ended. It does not include what a fork child copies; the server
/// counts that itself (`rdb_last_cow_size`).
fn watch_memory(pid: u32) -> Background<u64> {
    Background::start(move |is_over| {
        let mut most = 0;
        while !is_over.load(Ordering::Relaxed) {
            // A server that has ended was sampled before.
            most = most.max(process::private_memory(pid).unwrap_or_default());
            thread::sleep(LOOK_EVERY);
        }
        most
    })
}

/// Reading one line of /proc costs microseconds; an output buffer grows for seconds.
const LOOK_EVERY: Duration = Duration::from_millis(25);
