//! `remora cluster sync`: nodes that become replicas, or take their data anew, some at a time.
//!
//! ```text
//!   survey, sources, new nodes ──▶ program ── shown, agreed to ──▶ turns ──▶ node, node, …
//!                                                                    ▲        │ meet, replicate, watch
//!                               is the cluster well? is there proof? ┴────────╯
//! ```
//!
//! - First the command, and whether a copy came from the source, or was a full copy of the primary's.
//! - Then one node, from its first command until it is in step.
//! - Then the program: which node goes to which shard, and whose turn it is. Pure.
//!
//! The data come through `remora attend` beside each node, which this command does not see. So the first node goes
//! alone, until its source shows that it reads there; and a full copy of a primary's own ends the work. Nothing is
//! kept: a command that was interrupted is started again, and finds in the cluster what is left to do.

use std::collections::VecDeque;
use std::fmt;
use std::io::{BufRead, IsTerminal, Write};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinSet;

use super::plan::{self, Plan, Seen, Sources, aligned};
use super::survey::Survey;
use crate::args::{ClusterSyncArgs, HostPort, Renew};
use crate::cluster::nodes::Node;
use crate::cluster::survey::{Member, Shard, nodes_of};
use crate::conversation::tokens::Credentials;
use crate::exit::{Code, Failure};
use crate::progress::{self, Meter, Unit};
use crate::server::{Facts, Role, Server, ServerError, Task};
use crate::signals::Signals;
use crate::units::{Size, counted, readable};
use remora_process::blocking;
use remora_redis::info::Info;

/// How long the cluster may be unwell before the work ends. A fail-over takes a few seconds.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// How long news of a replica may take to reach the node that is asked. Gossip takes about a second.
const GOSSIP_LIMIT: Duration = Duration::from_secs(30);

/// Interval at which it is looked whether the next node may begin.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What became of one node.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    node: String,
    id: String,
    slots: String,
    primary: String,
    source: String,
    seconds: f64,
    /// Bytes of memory that its data take.
    data_bytes: u64,
}

/// Runs `remora cluster sync`.
///
/// # Errors
/// The cluster is not well, a node is not suitable, a node does not get in step, or a primary has served a full copy.
pub(super) async fn run(args: ClusterSyncArgs) -> Result<(), Failure> {
    let credentials = plan::credentials(&args.sources)?;
    let server = args.sources.server.open(Task::Cluster)?;
    let survey = Survey::take(&server).await?;
    let sources = plan::ask(&args.sources, &credentials, &survey).await;
    let mut newcomers = Vec::new();
    for place in &args.add {
        newcomers.push(ask(&server.at(&place.host, place.port), place, &survey).await?);
    }
    let program = Program::of(&survey, newcomers, &args.renew)?;
    ready(&Plan::of(&survey, &sources), &program)?;
    for job in &program.jobs {
        source_for(job, &survey, &sources)?;
    }
    progress::say(table(&program, &survey, &sources).trim_end());
    if program.jobs.is_empty() {
        progress::say("nothing is left to do");
        return print(&args, &[]);
    }
    let yes = args.yes;
    blocking(move || agree(yes)).await?;
    let mut signals = Signals::catch()?;
    let pace = Pace { at_once: args.at_once, per_shard: args.per_shard, stalled_after: args.stalled_after };
    let mut work = Work::new(pace, server, credentials, survey, sources, program);
    let outcome = tokio::select! {
        outcome = work.run() => outcome,
        signal = signals.next() => Err(Failure::new(
            Code::Interrupted,
            format!("stopped by {signal}; nodes that have begun go on by themselves, and the same command goes on here"),
        )),
    };
    print(&args, &work.done)?;
    outcome
}

/// # Errors
/// The cluster is not well, or a shard that gets a replica has no source.
pub(super) fn ready(plan: &Plan, program: &Program) -> Result<(), Failure> {
    if let Some(problem) = plan.problems.first() {
        return Err(Failure::refused(format!("the cluster is not well: {problem}")));
    }
    for row in program.jobs.iter().filter_map(|job| plan.shards.get(job.shard)) {
        if !row.not_ready_because.is_empty() {
            return Err(Failure::refused(format!("{}: {}", row.primary, row.not_ready_because)));
        }
    }
    Ok(())
}

/// The source that a node is to read from.
///
/// # Errors
/// The only source is the one beside the node itself.
pub(super) fn source_for<'a>(job: &Job, survey: &Survey, sources: &'a Sources) -> Result<&'a Seen, Failure> {
    let shard = survey.shards.get(job.shard);
    let source = shard.and_then(|shard| sources.beside_others_than(shard, job.loses.as_deref()));
    source.ok_or_else(|| {
        Failure::refused(format!(
            "the only source with the data of {} is beside this server, which would throw them away: start another one beside \
             its primary or beside another replica, and give it to remora attend",
            job.node
        ))
    })
}

fn table(program: &Program, survey: &Survey, sources: &Sources) -> String {
    let mut rows = vec![["NODE", "WHAT", "SLOTS", "PRIMARY", "SOURCE", "DATA"].map(str::to_owned)];
    let mut notes = program.notes.clone();
    for job in &program.jobs {
        let Some(shard) = survey.shards.get(job.shard) else { continue };
        let data = shard.primary.facts.as_ref().ok().and_then(|facts| facts.used_memory_dataset);
        rows.push([
            job.node.to_string(),
            job.what.to_string(),
            shard.slots(),
            shard.primary.node.address(),
            source_for(job, survey, sources).map_or_else(|_| "-".to_owned(), |seen| seen.address.to_string()),
            data.map_or_else(|| "-".to_owned(), |bytes| Size::bytes(bytes).to_string()),
        ]);
        if job.what == What::Renew && shard.replicas.len() == 1 {
            notes.push(format!("{} has no other replica meanwhile", shard.primary.node.address()));
        }
    }
    let mut text = if rows.len() > 1 { aligned(&rows) } else { String::new() };
    for note in notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

/// # Errors
/// The operator does not agree, or cannot be asked.
pub(super) fn agree(yes: bool) -> Result<(), Failure> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(Failure::refused("nothing was changed; --yes carries this plan out"));
    }
    let no_answer = |error: std::io::Error| {
        Failure::local(format!("the answer cannot be read: {error}; give --yes where nobody can answer"))
    };
    let mut answer = String::new();
    // A terminal that is gone is noticed by the read.
    let _ = write!(std::io::stderr(), "Carry it out? [y/N] ");
    std::io::stdin().lock().read_line(&mut answer).map_err(no_answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::refused("nothing was changed")),
    }
}

fn print(args: &ClusterSyncArgs, done: &[Outcome]) -> Result<(), Failure> {
    if args.json {
        progress::print_json(done)?;
    }
    Ok(())
}

/// A node at work.
struct Running {
    job: Job,
    /// As things stood when it began.
    before: Counts,
}

/// How many nodes work at once, and how long one may show no progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) at_once: u8,
    pub(super) per_shard: u8,
    pub(super) stalled_after: Duration,
}

/// The work, once it is agreed to.
pub(super) struct Work {
    server: Server,
    credentials: Credentials,
    limits: Limits,
    /// Of the moment of the plan.
    survey: Survey,
    sources: Sources,
    turns: Turns,
    pub(super) done: Vec<Outcome>,
}

impl Work {
    pub(super) fn new(
        pace: Pace,
        server: Server,
        credentials: Credentials,
        survey: Survey,
        sources: Sources,
        program: Program,
    ) -> Work {
        // The node that was named may be one that leaves the cluster for a moment.
        let server = match survey.shards.first() {
            Some(shard) => server.at(&shard.primary.node.host, shard.primary.node.port),
            None => server,
        };
        let turns = Turns::new(program.jobs, pace.at_once.into(), pace.per_shard.into());
        let limits = Limits { stalled_after: pace.stalled_after };
        Work { server, credentials, limits, survey, sources, turns, done: Vec::new() }
    }

    /// # Errors
    /// The first failure of a node. No node begins after it; those at work are waited for.
    pub(super) async fn run(&mut self) -> Result<(), Failure> {
        let (mut nodes, mut failed) = (JoinSet::new(), None);
        let mut first: Option<Running> = None;
        let began = Instant::now();
        loop {
            while failed.is_none()
                && let Some(job) = self.turns.next()
            {
                match self.begin(&job, &mut nodes).await {
                    Ok(running) => _ = first.get_or_insert(running),
                    Err(failure) => failed = Some(failure),
                }
            }
            tokio::select! {
                ended = nodes.join_next() => match ended {
                    None => break,
                    Some(ended) => {
                        let ended = ended.unwrap_or_else(|error| Err(Failure::local(format!("a task failed: {error}"))));
                        if let Err(failure) = self.ended(ended).await {
                            failed = failed.or(Some(failure));
                        }
                    }
                },
                () = tokio::time::sleep(LOOK_EVERY), if !self.turns.has_proof() => {
                    if let Some(first) = &first
                        && self.is_read(first).await
                    {
                        self.turns.prove();
                    }
                }
            }
        }
        self.until_all_know().await;
        let replicas = counted(self.done.len(), "replica");
        progress::say(&format!("{replicas} in step after {}", readable(began.elapsed())));
        failed.map_or(Ok(()), Err)
    }

    /// Waits until the node that is asked for the cluster has heard of the new replicas, as the next command needs.
    async fn until_all_know(&self) {
        let until = Instant::now() + GOSSIP_LIMIT;
        loop {
            let Ok(survey) = Survey::take(&self.server).await else { return };
            let is_replica = |id: &String| {
                survey.shards.iter().flat_map(|shard| &shard.replicas).any(|member| member.node.id == *id)
            };
            let Some(unknown) = self.done.iter().find(|outcome| !is_replica(&outcome.id)) else { return };
            if Instant::now() >= until {
                progress::say(&format!(
                    "note: {} has not heard yet that {} is a replica",
                    self.server.url(),
                    unknown.node
                ));
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Begins a node, if the cluster is well.
    async fn begin(&self, job: &Job, nodes: &mut JoinSet<Result<Ended, Failure>>) -> Result<Running, Failure> {
        let now = self.settled().await?;
        let planned = self.survey.shards.get(job.shard).map(super::survey::Shard::slots);
        // A fail-over has given the slots another primary. If slots have moved, the plan is not what was agreed to.
        let shard = now.shards.iter().find(|shard| Some(shard.slots()) == planned).ok_or_else(|| {
            Failure::refused(format!(
                "slots have moved since the plan was made: {} has not begun; start again",
                job.node
            ))
        })?;
        let source = source_for(job, &self.survey, &self.sources)?.clone();
        let primary = shard.primary.node.clone();
        let before = count(&self.server.at(&primary.host, primary.port), &source, &self.credentials).await?;
        let server = self.server.at(&job.node.host, job.node.port);
        let (job, limits, at_begin) = (job.clone(), self.limits, before.clone());
        let total = shard.primary.facts.as_ref().ok().and_then(|facts| facts.used_memory_dataset);
        let running = Running { job: job.clone(), before };
        nodes.spawn(async move {
            let began = Instant::now();
            let in_step = bring(&server, &job, &primary, total, limits).await?;
            Ok(Ended { job, in_step, before: at_begin, took: began.elapsed() })
        });
        Ok(running)
    }

    /// The cluster, once it is well.
    async fn settled(&self) -> Result<Survey, Failure> {
        let until = Instant::now() + SETTLE_LIMIT;
        loop {
            let problem = match Survey::take(&self.server).await {
                Ok(survey) => match survey.problems.first() {
                    None => return Ok(survey),
                    Some(problem) => Failure::refused(format!("the cluster is not well: {problem}")),
                },
                Err(failure) => failure,
            };
            if Instant::now() >= until {
                return Err(problem);
            }
            tracing::debug!("{problem}; looking again");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Whether the node that went first reads from its source.
    async fn is_read(&self, first: &Running) -> bool {
        let Ok(source) = source_for(&first.job, &self.survey, &self.sources) else { return false };
        sessions(source, &self.credentials).await.is_some_and(|now| now > first.before.sessions)
    }

    /// Takes down what became of a node.
    async fn ended(&mut self, ended: Result<Ended, Failure>) -> Result<(), Failure> {
        let Ended { job, in_step, before, took } = ended?;
        self.turns.ended(job.shard);
        let source = source_for(&job, &self.survey, &self.sources)?.clone();
        let primary = self.server.at(&before.primary.0, before.primary.1);
        let native = full_copies_since(&before, &primary, &source, &self.credentials).await?;
        if native > 0 {
            let text = format!(
                "{} is in step, but its primary {} has served a full copy itself (sync_full): is remora attend beside the node, with \
                 --primary-port {}, and do the rules of remora intercept stand?",
                job.node,
                primary.url(),
                before.primary.1
            );
            return Err(Failure::new(Code::SyncFailed, text));
        }
        self.turns.prove();
        progress::say(&format!(
            "{} follows {}:{}: {} in {}",
            job.node,
            in_step.primary.0,
            in_step.primary.1,
            Size::bytes(in_step.data_bytes),
            readable(took)
        ));
        self.done.push(Outcome {
            node: job.node.to_string(),
            id: job.id,
            slots: self.survey.shards.get(job.shard).map(super::survey::Shard::slots).unwrap_or_default(),
            primary: format!("{}:{}", in_step.primary.0, in_step.primary.1),
            source: source.address.to_string(),
            seconds: took.as_secs_f64(),
            data_bytes: in_step.data_bytes,
        });
        Ok(())
    }
}

/// A node that is in step.
struct Ended {
    job: Job,
    in_step: InStep,
    before: Counts,
    took: Duration,
}

// Whether a copy came from the source. A primary counts the full copies that it has begun (`sync_full`); those that
// its source has taken as snapshots are not the nodes'.

/// How often, and after which pause, a count that is too high is looked at again: a snapshot that the source has just
/// begun is counted by the primary first.
const LOOKS: u32 = 10;

const PAUSE: Duration = Duration::from_secs(1);

/// How things stand at a primary and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Counts {
    /// Host and port of the primary.
    primary: (String, u16),
    /// The run of the primary that has counted.
    run_id: Option<String>,
    full_copies: u64,
    /// Snapshots that the source has taken of this primary, also those that failed.
    snapshots: u64,
    /// Replicas that read from the source, or have done so.
    sessions: u64,
}

/// Counts.
///
/// # Errors
/// The primary or the source does not answer.
async fn count(primary: &Server, source: &Seen, credentials: &Credentials) -> Result<Counts, Failure> {
    let status = plan::source_status(&source.address, credentials).await?;
    let read = async {
        let info = primary.connect().await?.info("").await?;
        let facts = Facts::from_info(&info);
        Ok::<_, ServerError>((facts.run_id, info.number("sync_full").unwrap_or(0)))
    };
    let (run_id, full_copies) = read.await?;
    let (host, port) = primary.url().host_and_port().unwrap_or_default();
    let is_beside = status.role == "primary";
    let taken = status.totals.snapshots_taken.saturating_add(status.totals.snapshots_failed);
    Ok(Counts {
        primary: (host.to_owned(), port),
        run_id,
        full_copies,
        snapshots: if is_beside { taken } else { 0 },
        sessions: sessions_of(&status),
    })
}

/// Replicas that read from the source, or have done so. `None`: it does not answer.
async fn sessions(source: &Seen, credentials: &Credentials) -> Option<u64> {
    plan::source_status(&source.address, credentials).await.ok().map(|status| sessions_of(&status))
}

fn sessions_of(status: &remora_protocol::StatusReport) -> u64 {
    let now = u64::try_from(status.replicas.len()).unwrap_or(u64::MAX);
    status.totals.replicas_done.saturating_add(now)
}

/// Full copies that the primary has served since then, besides the source's. A primary that was restarted or replaced
/// counts anew, and says nothing.
///
/// # Errors
/// The source does not answer.
async fn full_copies_since(
    before: &Counts,
    primary: &Server,
    source: &Seen,
    credentials: &Credentials,
) -> Result<u64, Failure> {
    let mut seen = 0;
    for look in 0..LOOKS {
        if look > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        // A primary that is gone has been replaced.
        let Ok(now) = count(primary, source, credentials).await else { return Ok(0) };
        seen = before.until(&now);
        if seen == 0 {
            break;
        }
    }
    Ok(seen)
}

impl Counts {
    fn until(&self, now: &Counts) -> u64 {
        if self.run_id != now.run_id {
            return 0;
        }
        let full = now.full_copies.saturating_sub(self.full_copies);
        full.saturating_sub(now.snapshots.saturating_sub(self.snapshots))
    }
}

// One node, from its first command until it is in step with its primary.
//
// ```text
//   CLUSTER RESET SOFT (renew) ──▶ CLUSTER MEET ──▶ CLUSTER REPLICATE ──▶ watch: INFO of the node and its primary
// ```
//
// The servers themselves refuse what would lose data: `CLUSTER RESET` of a primary with keys, `CLUSTER REPLICATE` of a
// node with keys or slots.

/// Interval at which a node is looked at.
const LOOK_AT_NODE_EVERY: Duration = Duration::from_millis(500);

/// How long a node may take to know the primary that it was told to meet. Gossip takes about a second.
const MEET_LIMIT: Duration = Duration::from_secs(60);

/// How often it is told again meanwhile: a server forgets a node that has not answered within its
/// cluster-node-timeout. While it waits for the answer, another `MEET` changes nothing.
const MEET_AGAIN: Duration = Duration::from_secs(5);

/// How long a link that is up must stay so, where the primary lists the node under another address.
const STEADY: Duration = Duration::from_secs(15);

/// Bounds of one node's work.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// How long it may show no progress.
    stalled_after: Duration,
}

/// A node in step.
#[derive(Clone, Debug)]
struct InStep {
    /// Host and port of the primary that it follows.
    primary: (String, u16),
    /// Bytes of memory that its data take.
    data_bytes: u64,
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
async fn bring(
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
        tokio::time::sleep(LOOK_AT_NODE_EVERY).await;
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
        tokio::time::sleep(LOOK_AT_NODE_EVERY).await;
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

// Program: which node becomes a replica of which shard, and whose turn it is. Pure.

/// A node that is to be added, as it stands.
#[derive(Clone, Debug)]
pub(in crate::cluster) struct Newcomer {
    /// Where it was asked.
    pub(in crate::cluster) place: HostPort,
    /// Its own line, and those of the nodes that it knows.
    pub(in crate::cluster) own: Node,
    pub(in crate::cluster) known: Vec<Node>,
    pub(in crate::cluster) facts: Facts,
}

/// What a node is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cluster) enum What {
    /// It becomes a replica.
    Join,
    /// It throws its data away, and becomes a replica of its shard again.
    Renew,
    /// It is a replica already, and not in step yet.
    Watch,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            What::Join => "becomes a replica",
            What::Renew => "takes its data anew",
            What::Watch => "goes on",
        })
    }
}

/// One node's work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cluster) struct Job {
    pub(in crate::cluster) node: HostPort,
    pub(in crate::cluster) id: String,
    pub(in crate::cluster) what: What,
    /// The number of its shard in the survey.
    pub(in crate::cluster) shard: usize,
    /// The run of the server that throws its data away: a source beside it cannot give them back.
    pub(in crate::cluster) loses: Option<String>,
}

/// All of it, in its order.
#[derive(Debug)]
pub(in crate::cluster) struct Program {
    pub(in crate::cluster) jobs: Vec<Job>,
    /// What needs nothing, and why.
    pub(in crate::cluster) notes: Vec<String>,
    /// The named nodes that follow the primary of a shard, or are to do so: their ids, and the numbers of the shards.
    pub(in crate::cluster) following: Vec<(String, usize)>,
    placing: Placing,
}

/// Which shard a node goes to that has none yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placing {
    /// The one with the fewest replicas.
    Fewest,
    /// One that no other named node has.
    OneEach,
}

impl Program {
    /// # Errors
    /// A node cannot become a replica, or there is no such replica.
    pub(in crate::cluster) fn of(
        survey: &Survey,
        newcomers: Vec<Newcomer>,
        renew: &[Renew],
    ) -> Result<Program, Failure> {
        Program::placing(Placing::Fewest, survey, newcomers, renew)
    }

    /// The program of nodes that are to take the shards over, one each. One that serves a shard already has it.
    ///
    /// # Errors
    /// A node cannot become a replica, or there are more nodes than shards.
    pub(in crate::cluster) fn one_each(survey: &Survey, newcomers: Vec<Newcomer>) -> Result<Program, Failure> {
        Program::placing(Placing::OneEach, survey, newcomers, &[])
    }

    fn placing(
        placing: Placing,
        survey: &Survey,
        newcomers: Vec<Newcomer>,
        renew: &[Renew],
    ) -> Result<Program, Failure> {
        let mut program = Program { jobs: Vec::new(), notes: Vec::new(), following: Vec::new(), placing };
        // Those that have a shard count where the others are placed.
        let (following, joining): (Vec<_>, Vec<_>) = newcomers
            .into_iter()
            .partition(|newcomer| newcomer.own.primary.is_some() || !newcomer.own.slots.is_empty());
        for newcomer in following.into_iter().chain(joining) {
            program.add(survey, newcomer)?;
        }
        for wanted in renew {
            program.renew(survey, wanted)?;
        }
        // Shards take turns, so that those of one do not wait for each other while others have none.
        let mut earlier = vec![0_usize; survey.shards.len()];
        let mut ranked: Vec<(usize, Job)> = Vec::new();
        for job in std::mem::take(&mut program.jobs) {
            let Some(count) = earlier.get_mut(job.shard) else { continue };
            ranked.push((*count, job));
            *count += 1;
        }
        let in_step = |job: &Job| survey.shards.get(job.shard).map_or(0, |shard| standing(shard).count());
        ranked.sort_by_key(|(turn, job)| (*turn, in_step(job), job.shard));
        let jobs = ranked.into_iter().map(|(_, job)| job).collect();
        Ok(Program { jobs, ..program })
    }

    fn add(&mut self, survey: &Survey, newcomer: Newcomer) -> Result<(), Failure> {
        let Newcomer { place, own, known, facts } = newcomer;
        let refused = |why: String| Err(Failure::refused(format!("{place} cannot become a replica: {why}")));
        if facts.cluster_enabled != Some(true) {
            return refused("it is not in cluster mode (cluster-enabled no)".into());
        }
        if self.following.iter().any(|(id, _)| *id == own.id) {
            return refused("it is named twice".into());
        }
        // It is what it says itself: others may not have heard of it yet.
        if let Some(primary) = &own.primary {
            let Some(shard) = survey.shards.iter().position(|shard| shard.primary.node.id == *primary) else {
                return refused(format!("it follows {primary}, which is no primary of this cluster"));
            };
            self.following.push((own.id.clone(), shard));
            let link = facts.link.as_ref();
            let is_up = link.is_some_and(|link| link.up == Some(true) && link.syncing != Some(true));
            let primary = survey.shards.get(shard).map(|shard| shard.primary.node.address()).unwrap_or_default();
            match is_up {
                true => self.notes.push(format!("{place} follows {primary} already")),
                false => self.jobs.push(Job { node: place, id: own.id, what: What::Watch, shard, loses: None }),
            }
            return Ok(());
        }
        let serves = survey.shards.iter().position(|shard| shard.primary.node.id == own.id);
        if let (Placing::OneEach, Some(shard)) = (self.placing, serves) {
            self.notes.push(format!("{place} serves {} already", slots_of(&own)));
            self.following.push((own.id, shard));
            return Ok(());
        }
        if !own.slots.is_empty() {
            return refused("it is a primary with slots".into());
        }
        if facts.keys() > 0 {
            return refused(format!(
                "it holds {}: FLUSHALL and CLUSTER RESET make it empty",
                counted(facts.keys(), "key")
            ));
        }
        let is_ours = |node: &Node| survey.members().any(|member| member.node.id == node.id);
        if known.iter().any(|node| node.id != own.id && !node.has("handshake") && !is_ours(node)) {
            return refused("it knows nodes of another cluster: CLUSTER RESET makes it forget them".into());
        }
        let shard = self.place_for(survey, &own).ok_or_else(|| match self.placing {
            Placing::Fewest => Failure::refused("the cluster has no shard"),
            Placing::OneEach => Failure::refused(format!(
                "{place} is one too many, as each of the {} shards has a new node: remora cluster sync --add makes further replicas \
                 afterwards",
                survey.shards.len()
            )),
        })?;
        self.following.push((own.id.clone(), shard));
        self.jobs.push(Job { node: place, id: own.id, what: What::Join, shard, loses: None });
        Ok(())
    }

    /// The shard with the fewest replicas; of several, one without a node on the same host.
    fn place_for(&self, survey: &Survey, own: &Node) -> Option<usize> {
        // The cluster may not have heard of a new replica yet.
        let is_counted = |id: &String, shard: usize| {
            survey.shards.get(shard).is_some_and(|shard| standing(shard).any(|member| member.node.id == *id))
        };
        let taken = |wanted: usize| self.following.iter().any(|(_, shard)| *shard == wanted);
        let planned = |wanted: usize| {
            self.following.iter().filter(|(id, shard)| *shard == wanted && !is_counted(id, wanted)).count()
        };
        let is_free = |number: usize| self.placing == Placing::Fewest || !taken(number);
        let shards = survey.shards.iter().enumerate().filter(|(number, _)| is_free(*number));
        let rank = |(number, shard): (usize, &Shard)| {
            let shares_host = shard.members().any(|member| member.node.host == own.host);
            (standing(shard).count() + planned(number), shares_host, number)
        };
        shards.map(rank).min().map(|(_, _, number)| number)
    }

    fn renew(&mut self, survey: &Survey, wanted: &Renew) -> Result<(), Failure> {
        let mut found = false;
        for (number, shard) in survey.shards.iter().enumerate() {
            for Member { node, facts } in shard.replicas.iter().filter(|member| wanted.names(&member.node)) {
                found = true;
                let facts = match facts {
                    Ok(facts) => facts,
                    Err(why) => {
                        let text = format!("the replica {} does not answer: {why}", node.address());
                        return Err(Failure::refused(text));
                    }
                };
                if self.jobs.iter().any(|job| job.id == node.id) {
                    continue;
                }
                let place = HostPort { host: node.host.clone(), port: node.port };
                let loses = facts.run_id.clone();
                self.jobs.push(Job { node: place, id: node.id.clone(), what: What::Renew, shard: number, loses });
            }
        }
        match found || *wanted == Renew::All {
            true => Ok(()),
            false => Err(Failure::refused(format!(
                "the cluster has no replica {wanted}; if it was one and lost its shard in an interrupted run, give its \
                 address to --add"
            ))),
        }
    }
}

/// `0-5460,5470`
fn slots_of(node: &Node) -> String {
    node.slots.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// The replicas of a shard that are not lost.
fn standing(shard: &Shard) -> impl Iterator<Item = &Member> {
    shard.replicas.iter().filter(|member| !member.node.is_lost() && !member.node.has("fail?"))
}

/// Whose turn it is.
#[derive(Debug)]
pub(in crate::cluster) struct Turns {
    waiting: VecDeque<Job>,
    /// The shards of those at work.
    running: Vec<usize>,
    at_once: usize,
    per_shard: usize,
    /// Whether a node has been seen to read from its source. Until then one goes alone.
    is_proven: bool,
}

impl Turns {
    pub(in crate::cluster) fn new(jobs: Vec<Job>, at_once: usize, per_shard: usize) -> Turns {
        Turns { waiting: jobs.into(), running: Vec::new(), at_once, per_shard, is_proven: false }
    }

    /// The next node that may begin.
    pub(in crate::cluster) fn next(&mut self) -> Option<Job> {
        let at_once = if self.is_proven { self.at_once } else { 1 };
        if self.running.len() >= at_once {
            return None;
        }
        let of_shard = |wanted: usize| self.running.iter().filter(|shard| **shard == wanted).count();
        let place = self.waiting.iter().position(|job| of_shard(job.shard) < self.per_shard)?;
        let job = self.waiting.remove(place)?;
        self.running.push(job.shard);
        Some(job)
    }

    pub(in crate::cluster) fn ended(&mut self, shard: usize) {
        if let Some(place) = self.running.iter().position(|running| *running == shard) {
            self.running.swap_remove(place);
        }
    }

    pub(in crate::cluster) fn prove(&mut self) {
        self.is_proven = true;
    }

    pub(in crate::cluster) fn has_proof(&self) -> bool {
        self.is_proven
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::cluster::nodes;
    use crate::cluster::survey::shards_of;

    #[test]
    fn a_full_copy_that_is_not_the_sources_is_the_primarys() {
        let at = |run: &str, full_copies, snapshots| Counts {
            primary: ("10.0.0.1".into(), 6379),
            run_id: Some(run.into()),
            full_copies,
            snapshots,
            sessions: 0,
        };
        assert_eq!(at("a", 5, 2).until(&at("a", 6, 3)), 0);
        assert_eq!(at("a", 5, 2).until(&at("a", 7, 3)), 1);
        assert_eq!(at("a", 5, 0).until(&at("a", 6, 0)), 1, "a source beside a replica takes none of the primary");
        assert_eq!(at("a", 5, 2).until(&at("b", 9, 2)), 0, "another run");
    }

    #[test]
    fn a_replica_is_listed_by_its_own_port_and_once_it_is_online() {
        let info = |line: &str| Info::parse(format!("role:master\r\nslave0:{line}\r\n").as_bytes());
        let node = HostPort { host: "10.0.0.9".into(), port: 6379 };
        assert!(is_listed(&info("ip=10.0.0.9,port=6379,state=online,offset=1,lag=0"), &node));
        assert!(!is_listed(&info("ip=10.0.0.9,port=6379,state=wait_bgsave,offset=0,lag=0"), &node));
        assert!(!is_listed(&info("ip=10.0.0.8,port=6379,state=online,offset=1,lag=0"), &node));
        assert!(!is_listed(&info("ip=10.0.0.9,port=0,state=online,offset=1,lag=0"), &node));
    }

    fn id(digit: char) -> String {
        digit.to_string().repeat(40)
    }

    /// Two shards: the first with a replica, the second with one that is lost.
    fn survey() -> Survey {
        let (a, b) = (id('a'), id('b'));
        let text = format!(
            "{a} 10.0.0.1:6379@16379 myself,master - 0 0 1 connected 0-7999\n\
             {b} 10.0.0.2:6379@16379 master - 0 0 2 connected 8000-16383\n\
             {} 10.0.0.3:6379@16379 slave {a} 0 0 1 connected\n\
             {} 10.0.0.4:6379@16379 slave,fail {b} 0 0 2 disconnected\n",
            id('c'),
            id('d')
        );
        let members = nodes::parse(&text).unwrap().into_iter();
        let (shards, others) = shards_of(members.map(|node| Member { node, facts: Ok(Facts::default()) }));
        Survey { shards, others, problems: Vec::new(), epoch: 2 }
    }

    fn newcomer(digit: char, port: u16) -> Newcomer {
        let text = format!("{} 10.0.0.9:{port}@1{port} myself,master - 0 0 0 connected\n", id(digit));
        let known = nodes::parse(&text).unwrap();
        let facts = Facts { cluster_enabled: Some(true), ..Facts::default() };
        Newcomer { place: HostPort { host: "10.0.0.9".into(), port }, own: known[0].clone(), known, facts }
    }

    fn shards(program: &Program) -> Vec<usize> {
        program.jobs.iter().map(|job| job.shard).collect()
    }

    #[test]
    fn new_nodes_go_where_replicas_are_missing_and_shards_without_one_come_first() {
        let nodes = vec![newcomer('1', 6001), newcomer('2', 6002), newcomer('3', 6003)];
        let program = Program::of(&survey(), nodes, &[]).unwrap();
        // The second shard has none, so it gets the first; then both have one.
        assert_eq!(shards(&program), [1, 0, 1]);
        assert!(program.jobs.iter().all(|job| job.what == What::Join));
    }

    #[test]
    fn a_node_that_cannot_become_a_replica_is_refused_with_the_reason() {
        let refused = |change: &dyn Fn(&mut Newcomer)| {
            let mut node = newcomer('1', 6001);
            change(&mut node);
            Program::of(&survey(), vec![node], &[]).unwrap_err().message
        };
        let text = refused(&|node| node.facts.cluster_enabled = Some(false));
        assert!(text.contains("not in cluster mode"), "{text}");
        let text = refused(&|node| node.own.slots = vec!["5".parse().unwrap()]);
        assert!(text.contains("a primary with slots"), "{text}");
        let text = refused(&|node| {
            node.facts.databases = vec![crate::server::Database { number: 0, keys: 7, expires: 0, field_expires: 0 }];
        });
        assert!(text.contains("it holds 7 keys"), "{text}");
        let text = refused(&|node| node.known.push(newcomer('7', 6007).own));
        assert!(text.contains("nodes of another cluster"), "{text}");
        let text = refused(&|node| node.own.primary = Some(id('7')));
        assert!(text.contains("no primary of this cluster"), "{text}");
        let twice = Program::of(&survey(), vec![newcomer('1', 6001), newcomer('1', 6001)], &[]);
        assert!(twice.unwrap_err().message.contains("named twice"));
    }

    #[test]
    fn what_an_earlier_run_has_done_is_not_done_again() {
        let mut done = newcomer('1', 6001);
        done.own.primary = Some(id('a'));
        let mut halfway = done.clone();
        let link = crate::server::Link { host: "10.0.0.1".into(), port: 6379, up: Some(true), syncing: Some(false) };
        done.facts.link = Some(link.clone());
        halfway.facts.link = Some(crate::server::Link { up: Some(false), syncing: Some(true), ..link });
        let program = Program::of(&survey(), vec![done], &[]).unwrap();
        assert!(program.jobs.is_empty() && program.notes[0].contains("already"), "{program:?}");
        let program = Program::of(&survey(), vec![halfway], &[]).unwrap();
        assert_eq!((program.jobs[0].what, program.jobs[0].shard), (What::Watch, 0));
        // One more: the first shard has two with the one halfway, and the second none.
        let mut halfway = newcomer('1', 6001);
        halfway.own.primary = Some(id('b'));
        let nodes = vec![newcomer('2', 6002), newcomer('3', 6003), halfway];
        assert_eq!(shards(&Program::of(&survey(), nodes, &[]).unwrap()), [1, 0, 1]);
    }

    #[test]
    fn replicas_are_renewed_by_name_and_an_unknown_name_is_refused() {
        let renew = |wanted: &str| Program::of(&survey(), Vec::new(), &[wanted.parse().unwrap()]);
        assert_eq!(shards(&renew("10.0.0.3:6379").unwrap()), [0]);
        assert_eq!(shards(&renew(&id('c')).unwrap()), [0]);
        assert_eq!(renew("all").unwrap().jobs.len(), 2);
        assert!(renew("10.0.0.1:6379").unwrap_err().message.contains("no replica 10.0.0.1:6379"));
    }

    #[test]
    fn one_goes_first_and_then_some_at_once_but_not_two_of_a_shard() {
        let job = |shard: usize| Job {
            shard,
            ..Program::of(&survey(), vec![newcomer('1', 6001)], &[]).unwrap().jobs[0].clone()
        };
        let mut turns = Turns::new([0, 0, 1, 2].map(job).to_vec(), 2, 1);
        assert_eq!(turns.next().map(|job| job.shard), Some(0));
        assert_eq!(turns.next(), None, "one alone, until there is proof");
        turns.prove();
        assert_eq!(turns.next().map(|job| job.shard), Some(1), "not the second one of the first shard");
        assert_eq!(turns.next(), None, "two at once");
        turns.ended(0);
        assert_eq!(turns.next().map(|job| job.shard), Some(0));
        turns.ended(1);
        assert_eq!(turns.next().map(|job| job.shard), Some(2));
        turns.ended(0);
        assert_eq!(turns.next(), None, "none is left");
    }
}
