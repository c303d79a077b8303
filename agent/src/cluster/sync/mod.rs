//! `remora cluster sync`: nodes that become replicas, or take their data anew, some at a time.
//!
//! ```text
//!   survey, sources, new nodes ──▶ program ── shown, agreed to ──▶ turns ──▶ node, node, …
//!                                                                    ▲        │ meet, replicate, watch
//!                               is the cluster well? is there proof? ┴────────╯
//! ```
//!
//! - [`program`]: which node goes to which shard, and whose turn it is. Pure.
//! - [`node`]: one node, from its first command until it is in step.
//! - This file also knows whether a copy came from the source, or was a full copy of the primary's.
//!
//! The data come through `remora attend` beside each node, which this command does not see. So the first node goes
//! alone, until its source shows that it reads there; and a full copy of a primary's own ends the work. Nothing is
//! kept: a command that was interrupted is started again, and finds in the cluster what is left to do.

pub(super) mod node;
pub(super) mod program;

use std::io::{BufRead, IsTerminal, Write};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinSet;

use self::node::Limits;
use self::program::{Job, Program, Turns};
use super::plan::{self, Plan, Seen, Sources, aligned};
use super::survey::Survey;
use crate::args::ClusterSyncArgs;
use crate::conversation::tokens::Credentials;
use crate::exit::{Code, Failure};
use crate::progress;
use crate::server::{Facts, Server, ServerError, Task};
use crate::signals::Signals;
use crate::tasks::blocking;
use crate::units::{Size, counted, readable};

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
        newcomers.push(node::ask(&server.at(&place.host, place.port), place, &survey).await?);
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
        if job.what == program::What::Renew && shard.replicas.len() == 1 {
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
            let in_step = node::bring(&server, &job, &primary, total, limits).await?;
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
    in_step: node::InStep,
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
