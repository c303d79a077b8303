//! Mass replacement: a cluster of three shards, whose six replicas all lose their data at the same moment. Each node is
//! on a host of its own, with a cable of a given rate.
//!
//! ```text
//!   primary 1 ══ cable ══╗                        each replica is killed, and starts again without data:
//!   primary 2 ══ cable ══╬═ switch ═╦═ cable ══ replica 1.1   own replication: its primary copies its data
//!   primary 3 ══ cable ══╝          ╠═ cable ══ replica 1.2   Remora: `remora attend` beside it, `remora source` beside
//!                                   ╚═ …                      the primary, and the replicas of a shard feed each other
//! ```
//!
//! The end is the same for every way: each replica's link is up, its primary lists it as `online`, and it has reached
//! the primary's offset of that moment. What went out of the primaries' hosts is counted at their cables.

use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remora_lab::net::Traffic;
use remora_lab::sentinel::{Cluster, Shard};
use remora_lab::server::wait_until;
use remora_lab::{BitRate, Host, Kind, Net, Server, Shape, compare, scratch};
use tempfile::TempDir;

use crate::sync::{Method, Program, Result, Running, Source};

/// Shards of the cluster.
pub const SHARDS: usize = 3;

/// Replicas of each shard.
pub const REPLICAS: usize = 2;

/// By which way the replicas get their data again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// The servers' own replication with default settings.
    OwnDefault,
    /// Own replication without disk, delay and compression, and each primary waits until both replicas ask.
    OwnBest,
    /// As [`Way::OwnBest`], with two channels (Valkey).
    OwnDual,
    /// `remora attend` beside servers with default settings, and a source that changes two settings of its primary for
    /// the moment of the fork (`--tune-server`).
    RemoraDefault,
    /// `remora attend` beside servers with the settings of [`Way::OwnBest`].
    RemoraBest,
    /// As [`Way::RemoraBest`], encrypted as it is between hosts by default.
    RemoraSealed,
}

impl Way {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Way::OwnDefault => "replication, defaults",
            Way::OwnBest => "replication, tuned",
            Way::OwnDual => "replication, tuned, dual channel",
            Way::RemoraDefault => "Remora attend, defaults, tuned",
            Way::RemoraBest => "Remora attend, best",
            Way::RemoraSealed => "Remora attend, best, sealed",
        }
    }

    /// Whether it is a way of Remora.
    pub fn is_ours(self) -> bool {
        matches!(self, Way::RemoraDefault | Way::RemoraBest | Way::RemoraSealed)
    }

    /// Whether servers of this kind have it.
    pub fn applies(self, kind: Kind) -> bool {
        self != Way::OwnDual || kind == Kind::Valkey9
    }

    /// The method whose settings the primaries get, and that whose settings the replicas get.
    fn methods(self) -> (Method, Method) {
        match self {
            Way::OwnDefault => (Method::OwnDefault, Method::OwnDefault),
            Way::OwnBest => (Method::OwnTogether, Method::OwnTogether),
            Way::OwnDual => (Method::OwnDual, Method::OwnDual),
            Way::RemoraDefault => (Method::RemoraTuned, Method::OwnDefault),
            Way::RemoraBest => (Method::RemoraRelay, Method::OwnBest),
            Way::RemoraSealed => (Method::RemoraRelaySealed, Method::OwnBest),
        }
    }
}

/// What one replacement took.
#[derive(Clone, Copy, Debug)]
pub struct Replaced {
    /// Seconds from the start of the six servers until the last of them is in step.
    pub seconds: f64,
    /// Bytes out of the primary's host, for the shard with the most.
    pub sent: u64,
    /// Forks of the primary, for the shard with the most.
    pub forks: u64,
    /// Full copies that the primary has begun (`sync_full`), for the shard with the most.
    pub full_copies: u64,
    /// Processor seconds of all primaries.
    pub primaries_cpu: f64,
    /// Processor seconds of all agents.
    pub agents_cpu: f64,
}

/// The cluster with its data.
pub struct Mass {
    program: Program,
    cluster: Cluster,
    /// Bytes of the values of a shard, about.
    bytes: u64,
    rate: BitRate,
    folders: Vec<TempDir>,
}

impl Mass {
    /// Starts the cluster, and fills it with random values of [`VALUE_BYTES`].
    ///
    /// # Errors
    /// The process is not root, the kernel lacks a feature, or a server or the agent's program does not start.
    pub fn set(program: &Program, kind: Kind, rate: BitRate, mebibytes: usize) -> Result<Mass> {
        let net = Net::new()?;
        let nodes = 1 + REPLICAS;
        let hosts: Vec<Host> =
            (0..SHARDS * nodes).map(|number| net.host(&name(number))).collect::<remora_lab::Result<_>>()?;
        let cluster = Cluster::start(SHARDS, REPLICAS, |shard, node| {
            let host = hosts.get(shard * nodes + node).unwrap_or(&hosts[0]);
            let builder = Server::builder(kind).cluster().on(host).start_time(LOAD_TIME);
            let builder = builder.config("repl-backlog-size", "64mb").config("cluster-node-timeout", 60_000);
            if node == 0 { builder.start() } else { builder.as_user(SERVER_USER).start() }
        })?;
        let keys = (mebibytes << 20) * SHARDS / VALUE_BYTES;
        cluster.fill(keys, VALUE_BYTES, DATA_SEED)?;
        for host in &hosts {
            host.shape(Shape::bits(rate.0))?;
        }
        for replica in cluster.replicas() {
            program.intercept(replica, SERVER_USER)?;
        }
        let folders = (0..SHARDS).map(|_| scratch::folder("mass")).collect::<remora_lab::Result<_>>()?;
        Ok(Mass { program: program.clone(), cluster, bytes: (mebibytes as u64) << 20, rate, folders })
    }

    /// Seconds that one copy of a shard's data needs at least to leave the primary's host.
    pub fn floor(&self) -> f64 {
        self.bytes as f64 / (self.rate.0 as f64 / 8.0)
    }

    /// Bytes of the values of a shard, about.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A server's name and version.
    pub fn version(&self) -> Result<String> {
        Ok(self.cluster.shards[0].primary.version()?)
    }

    /// All six replicas lose their data, and get them again by this way.
    pub fn replace(&mut self, way: Way) -> Result<Replaced> {
        self.rest()?;
        let (of_primary, of_replica) = way.methods();
        let kind = self.cluster.shards[0].primary.kind();
        let mut former = Vec::new();
        for shard in &self.cluster.shards {
            for (name, value) in of_primary.primary_settings(kind, REPLICAS) {
                former.push((&shard.primary, name, shard.primary.configured(name)?));
                shard.primary.configure(name, &value)?;
            }
            for replica in &shard.replicas {
                // For the server that starts again: in its configuration file.
                for (name, value) in of_replica.replica_settings(kind) {
                    former.push((replica, name, replica.configured(name)?));
                    replica.configure(name, &value)?;
                }
                replica.client()?.ok(&["CONFIG", "REWRITE"])?;
            }
        }
        let former: Vec<(std::net::SocketAddr, &'static str, String)> =
            former.into_iter().map(|(server, name, value)| (server.address(), name, value)).collect();
        let agents = if way.is_ours() { Some(Agents::start(self, of_primary)?) } else { None };
        let outcome = self.measure(agents.as_ref());
        drop(agents);
        for (address, name, value) in former.into_iter().rev() {
            if let Some(server) = self.cluster.nodes().find(|node| node.address() == address) {
                server.configure(name, &value)?;
            }
        }
        outcome
    }

    fn measure(&mut self, agents: Option<&Agents>) -> Result<Replaced> {
        let before = self.cluster.shards.iter().map(Counted::of).collect::<Result<Vec<_>>>()?;
        let agents_before = agents.map_or(Ok(0.0), Agents::cpu)?;
        let began = Instant::now();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for Shard { primary, replicas } in &mut self.cluster.shards {
                let primary = &*primary;
                threads.extend(replicas.iter_mut().map(|replica| {
                    scope.spawn(move || {
                        lose_the_file(replica)?;
                        replica.restart()?;
                        in_step(primary, replica)
                    })
                }));
            }
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a replacing thread panicked")?)
        })?;
        let seconds = began.elapsed().as_secs_f64();
        let agents_cpu = agents.map_or(Ok(0.0), Agents::cpu)? - agents_before;
        let mut replaced = Replaced { seconds, sent: 0, forks: 0, full_copies: 0, primaries_cpu: 0.0, agents_cpu };
        for (shard, before) in self.cluster.shards.iter().zip(before) {
            let now = Counted::of(shard)?;
            replaced.sent = replaced.sent.max(now.traffic.since(before.traffic).sent);
            replaced.forks = replaced.forks.max(now.forks - before.forks);
            replaced.full_copies = replaced.full_copies.max(now.full_copies - before.full_copies);
            replaced.primaries_cpu += now.cpu - before.cpu;
        }
        Ok(replaced)
    }

    /// Compares each replica with its primary, by digest.
    pub fn compare(&self) -> Result<()> {
        for Shard { primary, replicas } in &self.cluster.shards {
            for replica in replicas {
                compare::same_data(primary, replica, COMPARE_TIME)?;
            }
        }
        Ok(())
    }

    /// Waits until each primary has its two replicas and no source, and no child.
    fn rest(&self) -> Result<()> {
        for Shard { primary, .. } in &self.cluster.shards {
            let mut client = primary.client()?;
            wait_until("a primary to be idle", REST_TIME, || {
                let (replication, persistence) = (client.info("replication")?, client.info("persistence")?);
                let replicas: Option<usize> = replication.number("connected_slaves");
                let child = persistence.number::<u32>("rdb_bgsave_in_progress");
                Ok(if (replicas, child) == (Some(REPLICAS), Some(0)) { Ok(()) } else { Err(format!("{replicas:?}")) })
            })?;
        }
        Ok(())
    }
}

/// What is counted at a primary.
struct Counted {
    traffic: Traffic,
    forks: u64,
    full_copies: u64,
    cpu: f64,
}

impl Counted {
    fn of(shard: &Shard) -> Result<Counted> {
        let (primary, stats) = (&shard.primary, shard.primary.info("stats")?);
        let number = |name: &str| stats.number(name).ok_or(format!("no {name} in INFO"));
        let host = primary.host().ok_or("a primary without a host")?;
        let (forks, full_copies) = (number("total_forks")?, number("sync_full")?);
        Ok(Counted { traffic: host.traffic()?, forks, full_copies, cpu: primary.cpu_seconds()? })
    }
}

/// A source beside each primary, and an agent beside each replica.
struct Agents {
    attending: Vec<Running>,
    sources: Vec<Source>,
}

impl Agents {
    fn start(mass: &Mass, method: Method) -> Result<Agents> {
        let (shards, folders) = (&mass.cluster.shards, &mass.folders);
        let source = |(shard, folder): (&Shard, &TempDir)| {
            Source::start_by(method, &mass.program, &shard.primary, folder.path(), mass.bytes, None)
        };
        let sources: Vec<Source> = shards.iter().zip(folders).map(source).collect::<Result<_>>()?;
        let ports: Vec<u16> = mass.cluster.nodes().map(Server::port).collect();
        let memory = mass.bytes * MEMORY_FACTOR;
        let mut attending = Vec::new();
        for (shard, source) in shards.iter().zip(&sources) {
            for replica in &shard.replicas {
                attending.push(mass.program.attend(replica, source, &ports, memory)?);
            }
        }
        Ok(Agents { attending, sources })
    }

    fn cpu(&self) -> Result<f64> {
        let attending = self.attending.iter().map(Running::cpu);
        attending.chain(self.sources.iter().map(Source::cpu)).sum()
    }
}

/// Removes the file that a full copy has left: a server that starts on it goes on from there.
fn lose_the_file(replica: &Server) -> Result<()> {
    match std::fs::remove_file(replica.folder().join("dump.rdb")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Waits until the replica follows its primary by itself, and has reached it.
fn in_step(primary: &Server, replica: &Server) -> Result<()> {
    let (mut there, mut here) = (primary.client()?, replica.client()?);
    let mut goal = None;
    wait_until("a replica to be in step", LOAD_TIME, || {
        let own = here.info("replication")?;
        let info = there.info("replication")?;
        let is_listed = info.replicas().any(|listed| listed.port == replica.port() && listed.state == "online");
        let (is_up, reached) = (own.get("master_link_status") == Some("up"), own.number::<u64>("slave_repl_offset"));
        if !(is_listed && is_up) {
            return Ok(Err(format!("listed: {is_listed}, up: {is_up}")));
        }
        let goal = *goal.get_or_insert(info.number::<u64>("master_repl_offset"));
        Ok(if reached >= goal { Ok(()) } else { Err(format!("{reached:?} of {goal:?}")) })
    })?;
    Ok(())
}

fn name(number: usize) -> String {
    let (shard, node) = (number / (1 + REPLICAS) + 1, number % (1 + REPLICAS));
    if node == 0 { format!("primary {shard}") } else { format!("replica {shard}.{node}") }
}

/// The case of a kept figure: of which server, and what it is.
pub fn case(kind: Kind, what: &str) -> String {
    format!("{kind}: {what}")
}

/// What is kept of each replacement.
pub const SECONDS: &str = "seconds until all are in step";
/// See [`SECONDS`]; for the shard with the most, as the following ones are.
pub const COPIES: &str = "data sets out of a primary's host";
/// See [`SECONDS`].
pub const FORKS: &str = "forks of a primary";
/// See [`SECONDS`].
pub const FULL: &str = "full copies of a primary (sync_full)";

/// Bytes of a value.
pub const VALUE_BYTES: usize = 128 << 10;

/// The user of the replicas' servers; the agents are root's.
const SERVER_USER: u32 = 65_534;

/// Every run has the same data.
const DATA_SEED: u64 = 19;

/// Memory of an agent in data sets of a shard: three quarters of it hold slots, and a sealed snapshot needs more.
const MEMORY_FACTOR: u64 = 2;

/// Time limit for a server that gets its data again.
const LOAD_TIME: Duration = Duration::from_secs(600);

/// Time limit for a comparison.
const COMPARE_TIME: Duration = Duration::from_secs(120);

/// Time limit for a primary to lose the replica that its source was.
const REST_TIME: Duration = Duration::from_secs(120);
