//! One node, from its first command until it is in step with its primary.
//!
//! ```text
//!   CLUSTER RESET SOFT (renew) ──▶ CLUSTER MEET ──▶ CLUSTER REPLICATE ──▶ watch: INFO of the node and its primary
//! ```
//!
//! The servers themselves refuse what would lose data: `CLUSTER RESET` of a primary with keys, `CLUSTER REPLICATE` of a
//! node with keys or slots.

use std::time::{Duration, Instant};

use remora_redis::info::Info;

use super::program::{Job, Newcomer, What};
use crate::args::HostPort;
use crate::cluster::nodes::Node;
use crate::cluster::survey::{Survey, nodes_of};
use crate::exit::{Code, Failure};
use crate::progress::{Meter, Unit};
use crate::server::{Facts, Role, Server, ServerError};

/// Interval at which a node is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long a node may take to know the primary that it was told to meet. Gossip takes about a second.
const MEET_LIMIT: Duration = Duration::from_secs(60);

/// How often it is told again meanwhile: a server forgets a node that has not answered within its
/// cluster-node-timeout. While it waits for the answer, another `MEET` changes nothing.
const MEET_AGAIN: Duration = Duration::from_secs(5);

/// How long a link that is up must stay so, where the primary lists the node under another address.
const STEADY: Duration = Duration::from_secs(15);

/// Bounds of one node's work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// How long it may show no progress.
    pub(super) stalled_after: Duration,
}

/// A node in step.
#[derive(Clone, Debug)]
pub(super) struct InStep {
    /// Host and port of the primary that it follows.
    pub(super) primary: (String, u16),
    /// Bytes of memory that its data take.
    pub(super) data_bytes: u64,
}

/// Asks a node that is to be added how it stands.
///
/// # Errors
/// It does not answer.
pub(in crate::cluster) async fn ask(server: &Server, place: &HostPort, survey: &Survey) -> Result<Newcomer, Failure> {
    let mut client = server.connect().await?;
    let facts = Facts::read(&mut client).await?;
    if facts.cluster_enabled != Some(true) {
        return Err(Failure::refused(format!("{place} is not in cluster mode (cluster-enabled no)")));
    }
    if facts.loading == Some(true) {
        // An earlier run may have got it so far. It answers nothing about the cluster meanwhile, and the others hear of
        // its new role only afterwards. Its link says which primary it follows.
        let at = |host: &str, port: u16| {
            survey.members().map(|member| &member.node).find(|node| node.host == host && node.port == port)
        };
        let own = at(&place.host, place.port).cloned().ok_or_else(|| {
            Failure::passing(Code::Server, format!("{place} is loading its data, and the cluster does not know it"))
        })?;
        let primary = facts.link.as_ref().and_then(|link| at(&link.host, link.port)).map(|node| node.id.clone());
        let own = Node { primary: primary.or(own.primary), ..own };
        return Ok(Newcomer { place: place.clone(), own, known: Vec::new(), facts });
    }
    let known = nodes_of(&mut client).await?;
    let own = known.iter().find(|node| node.has("myself")).cloned();
    let own = own.ok_or_else(|| Failure::new(Code::Server, format!("{place} does not name itself (CLUSTER NODES)")))?;
    Ok(Newcomer { place: place.clone(), own, known, facts })
}

/// Makes the node a replica of this primary, and waits until it is in step.
///
/// # Errors
/// It refuses a command, is promoted meanwhile, or shows no progress for too long.
pub(super) async fn bring(
    server: &Server,
    job: &Job,
    primary: &Node,
    total: Option<u64>,
    limits: Limits,
) -> Result<InStep, Failure> {
    if job.what == What::Renew {
        server.connect().await?.command(&["CLUSTER", "RESET", "SOFT"]).await?;
    }
    if job.what != What::Watch {
        meet(server, job, primary).await?;
    }
    let mut watch = Watch::new(job, total, limits);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if let Some(in_step) = watch.look(server).await? {
            watch.meter.finish();
            return Ok(in_step);
        }
    }
}

/// Makes the node know the primary, and follow it.
async fn meet(server: &Server, job: &Job, primary: &Node) -> Result<(), Failure> {
    let mut client = server.connect().await?;
    let (port, bus) = (primary.port.to_string(), primary.bus_port.to_string());
    let until = Instant::now() + MEET_LIMIT;
    let mut again = Instant::now();
    loop {
        if Instant::now() >= again {
            client.command(&["CLUSTER", "MEET", &primary.host, &port, &bus]).await?;
            again = Instant::now() + MEET_AGAIN;
        }
        // Refused until the primary has answered: "Unknown node".
        let refused = match client.command(&["CLUSTER", "REPLICATE", &primary.id]).await {
            Ok(_) => return Ok(()),
            Err(error @ ServerError::Refused { .. }) => Failure::from(error),
            Err(error) => return Err(error.into()),
        };
        if !refused.message.contains("nknown node") {
            return Err(refused);
        }
        if Instant::now() >= until {
            let text = format!(
                "{} does not get to know {} within {} s: can it reach its bus port {bus}?",
                job.node,
                primary.address(),
                MEET_LIMIT.as_secs()
            );
            return Err(Failure::new(Code::SyncFailed, text));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What a look at a node is compared with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Progress {
    up: Option<bool>,
    syncing: Option<bool>,
    loading: Option<bool>,
    offset: Option<u64>,
    keys: u64,
    /// The most MiB of memory so far: what is freed again is no progress.
    memory: u64,
}

struct Watch<'a> {
    job: &'a Job,
    limits: Limits,
    meter: Meter,
    progress: Progress,
    changed: Instant,
    up_since: Option<Instant>,
}

impl<'a> Watch<'a> {
    fn new(job: &'a Job, total: Option<u64>, limits: Limits) -> Watch<'a> {
        let meter = Meter::start(job.node.to_string(), Unit::Bytes, total);
        Watch { job, limits, meter, progress: Progress::default(), changed: Instant::now(), up_since: None }
    }

    /// Looks at the node once. `None`: it is not in step yet.
    async fn look(&mut self, server: &Server) -> Result<Option<InStep>, Failure> {
        let facts = match async { Facts::read(&mut server.connect().await?).await }.await {
            Ok(facts) => facts,
            // A server that has begun to load, or that is busy, may not answer for a moment.
            Err(error) => return self.stalls(&error.to_string()).map(|()| None),
        };
        if facts.role == Some(Role::Primary) {
            let text = format!("{} has become a primary: a fail-over has promoted it", self.job.node);
            return Err(Failure::new(Code::SyncFailed, text));
        }
        let link = facts.link.as_ref();
        let progress = Progress {
            up: link.and_then(|link| link.up),
            syncing: link.and_then(|link| link.syncing),
            loading: facts.loading,
            offset: facts.offset,
            keys: facts.keys(),
            memory: self.progress.memory.max(facts.used_memory.unwrap_or(0) >> 20),
        };
        if progress != self.progress {
            (self.progress, self.changed) = (progress, Instant::now());
        }
        let data_bytes = facts.used_memory_dataset.unwrap_or(0);
        self.meter.set(data_bytes);
        let is_up = self.progress.up == Some(true) && self.progress.syncing != Some(true);
        let Some(link) = link.filter(|_| is_up && facts.loading != Some(true)) else {
            self.up_since = None;
            return self.stalls("its link is not up").map(|()| None);
        };
        let since = *self.up_since.get_or_insert_with(Instant::now);
        let primary = server.at(&link.host, link.port);
        let info = match async { primary.connect().await?.info("replication").await }.await {
            Ok(info) => info,
            Err(error) => return self.stalls(&error.to_string()).map(|()| None),
        };
        let follows = Facts::from_info(&info).replid == facts.replid;
        if follows && (is_listed(&info, &self.job.node) || since.elapsed() >= STEADY) {
            self.meter.set_total(data_bytes);
            return Ok(Some(InStep { primary: (link.host.clone(), link.port), data_bytes }));
        }
        self.stalls("its primary does not list it").map(|()| None)
    }

    /// # Errors
    /// Nothing has changed for too long.
    fn stalls(&self, why: &str) -> Result<(), Failure> {
        if self.changed.elapsed() < self.limits.stalled_after {
            return Ok(());
        }
        let text = format!(
            "{} shows no progress for {} s ({why}); it goes on by itself, and its log says more",
            self.job.node,
            self.limits.stalled_after.as_secs()
        );
        Err(Failure::new(Code::SyncFailed, text))
    }
}

/// Whether the primary has a link to this node: and not only the agent beside it, which plays the primary for a while.
fn is_listed(info: &Info, node: &HostPort) -> bool {
    info.replicas().any(|replica| replica.port == node.port && replica.ip == node.host && replica.state == "online")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_is_listed_by_its_own_port_and_once_it_is_online() {
        let info = |line: &str| Info::parse(format!("role:master\r\nslave0:{line}\r\n").as_bytes());
        let node = HostPort { host: "10.0.0.9".into(), port: 6379 };
        assert!(is_listed(&info("ip=10.0.0.9,port=6379,state=online,offset=1,lag=0"), &node));
        assert!(!is_listed(&info("ip=10.0.0.9,port=6379,state=wait_bgsave,offset=0,lag=0"), &node));
        assert!(!is_listed(&info("ip=10.0.0.8,port=6379,state=online,offset=1,lag=0"), &node));
        assert!(!is_listed(&info("ip=10.0.0.9,port=0,state=online,offset=1,lag=0"), &node));
    }
}
