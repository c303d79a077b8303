//! `remora cluster migrate`: a cluster moves to new nodes, shard by shard, and back.
//!
//! ```text
//!   look ──▶ decide ──▶ wait │ set │ copy │ compare │ fail over │ forget ──╮
//!     ▲                                                                   │      done, or stopped: how far it is
//!     ╰───────────────────────────────────────────────────────────────────┴────▶
//! ```
//!
//! - [`decide`]: what is to be done next. Pure. **Start here.**
//! - [`look`](mod@look): what it decides on: the cluster, as all of its nodes see it, and their settings.
//! - [`act`]: one fail-over, and how nodes leave. The copies are those of [`sync`].
//! - [`mapped`]: which new node takes which shard, and why not.
//!
//! Nothing is kept: the cluster itself says how far it is. So a command that was ended, by whatever, is started again.

mod act;
mod decide;
mod look;
mod mapped;

use std::time::{Duration, Instant};

use serde::Serialize;

use self::act::FailedOver;
use self::decide::{Goal, Past, Seen, Side, Step};
use self::look::look;
use self::mapped::{Map, PlannedShard};
use super::plan::{self, Plan};
use super::survey::Survey;
use super::sync::program::{Newcomer, Program};
use super::sync::{self, Outcome, Pace, Work, node};
use crate::args::{ClusterMigrateArgs, EndsArgs, HostPort};
use crate::exit::{Code, Failure};
use crate::progress;
use crate::server::{Server, Task};
use crate::signals::Signals;
use crate::tasks::blocking;
use crate::units::counted;

/// How long the work may wait, for whatever reasons, before it ends. A fail-over takes a few seconds, gossip one.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);

/// How often it is looked.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long the comparison waits for a server that does not answer.
const RETRY: Duration = Duration::from_secs(60);

/// Runs `remora cluster migrate`.
///
/// # Errors
/// The plan cannot be carried out, or a step of it failed. The message says how far the cluster is.
pub(super) async fn run(args: ClusterMigrateArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let planned = tokio::select! {
        planned = Migration::plan(&args) => planned?,
        signal = signals.next() => {
            return Err(Failure::new(Code::Interrupted, format!("stopped by {signal}: nothing was changed")));
        }
    };
    let (mut migration, map) = planned;
    if args.dry_run {
        return match args.json {
            true => progress::print_json(&map),
            false => progress::print(&map.table()),
        };
    }
    progress::say(map.table().trim_end());
    let has_nothing_to_do = decide::next(migration.goal, &migration.seen, &migration.past) == Step::Done;
    if !has_nothing_to_do {
        let yes = args.yes;
        blocking(move || sync::agree(yes)).await?;
    }
    let outcome = tokio::select! {
        outcome = migration.run() => outcome,
        signal = signals.next() => Err(Failure::new(
            Code::Interrupted,
            format!("stopped by {signal}; the servers finish what they have begun"),
        )),
    };
    let outcome = outcome.map_err(|failure| failure.and(&migration.how_far()));
    let told = match args.json {
        true => progress::print_json(&migration.report(outcome.is_ok())),
        false if outcome.is_ok() => progress::print_line(&migration.end()),
        false => Ok(()),
    };
    outcome.and(told)
}

/// What was done, for `--json`.
#[derive(Debug, Serialize)]
struct Report<'a> {
    is_done: bool,
    old_serve: usize,
    new_serve: usize,
    copies: &'a [Outcome],
    compared: &'a [Compared],
    fail_overs: &'a [FailedOver],
    forgotten: &'a [String],
    shards: Vec<PlannedShard>,
}

/// A shard whose data are the same at both nodes.
#[derive(Debug, Serialize)]
struct Compared {
    slots: String,
    keys: u64,
}

/// The work.
struct Migration<'a> {
    args: &'a ClusterMigrateArgs,
    /// Any node that stays.
    server: Server,
    goal: Goal,
    newcomers: Vec<Newcomer>,
    /// The last look.
    survey: Survey,
    seen: Seen,
    past: Past,
    copies: Vec<Outcome>,
    compared: Vec<Compared>,
    fail_overs: Vec<FailedOver>,
    forgotten: Vec<String>,
}

impl<'a> Migration<'a> {
    /// Looks at everything, and changes nothing.
    async fn plan(args: &'a ClusterMigrateArgs) -> Result<(Migration<'a>, Map), Failure> {
        let goal = Goal { to: if args.back { Side::Old } else { Side::New }, forget: args.forget };
        let named = args.sources.server.open(Task::Cluster)?;
        // The node that was named may have left the cluster; on the other ways the new nodes are in it.
        let server = match (goal, args.to.first()) {
            (Goal { to: Side::New, forget: true }, Some(first)) => named.at(&first.host, first.port),
            _ => named,
        };
        // A command that was ended in the middle of a fail-over, or after a node has joined, is started again.
        let began = Instant::now();
        let (newcomers, survey, seen) = loop {
            let survey = Survey::take(&server).await?;
            let newcomers = newcomers(args, &server, &survey).await?;
            let look = look(&server, &newcomers, goal.to == Side::New && !goal.forget).await?;
            match &look.seen.trouble {
                Some(problem) if began.elapsed() >= args.well_within => {
                    return Err(Failure::refused(format!("the cluster is not well: {problem}")));
                }
                Some(problem) => tracing::debug!("{problem}; looking again"),
                None => break (newcomers, look.survey, look.seen),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        };
        let past = Past { compares_nothing: args.no_verify, ..Past::default() };
        let map = match goal {
            Goal { to: Side::New, forget: false } => {
                let program = program(&survey, newcomers.clone())?;
                mapped::refuse(&server, &survey, &newcomers, &program, &args.leave_out).await?;
                let credentials = plan::credentials(&args.sources)?;
                let sources = plan::ask(&args.sources, &credentials, &survey).await;
                sync::ready(&Plan::of(&survey, &sources), &program)?;
                for job in &program.jobs {
                    sync::source_for(job, &survey, &sources)?;
                }
                Map::there(&seen, &survey, &newcomers, &program, &sources)
            }
            _ => Map::of(goal, &seen),
        };
        if let Step::Stop(why) = decide::next(goal, &seen, &Past { has_copied: true, ..past.clone() }) {
            return Err(Failure::refused(why));
        }
        let (copies, compared, fail_overs, forgotten) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let migration =
            Migration { args, server, goal, newcomers, survey, seen, past, copies, compared, fail_overs, forgotten };
        Ok((migration, map))
    }

    /// # Errors
    /// The first doubt.
    async fn run(&mut self) -> Result<(), Failure> {
        let mut waits: Option<(String, Instant)> = None;
        loop {
            let step = decide::next(self.goal, &self.seen, &self.past);
            if !matches!(step, Step::Wait(_)) {
                waits = None;
            }
            match step {
                Step::Done => return Ok(()),
                Step::Stop(why) => return Err(Failure::new(Code::SyncFailed, why)),
                Step::Wait(why) => {
                    let (what, since) = waits.get_or_insert_with(|| (why.clone(), Instant::now()));
                    if *what != why {
                        tracing::debug!("waiting: {why}");
                        what.clone_from(&why);
                    }
                    if since.elapsed() >= SETTLE_LIMIT {
                        let seconds = SETTLE_LIMIT.as_secs();
                        return Err(Failure::new(Code::SyncFailed, format!("{why}, for {seconds} s")));
                    }
                }
                Step::Set(settings) => {
                    for setting in settings {
                        act::set(&self.server, &setting).await?;
                        progress::say(&format!("{}: {} {:?}", setting.node, setting.name, setting.value));
                    }
                }
                Step::Copy => self.copy().await?,
                Step::Compare { shard, node } => self.compare(shard, &node.place).await?,
                Step::FailOver { shard, node } => {
                    let Some(shard) = self.seen.shards.get(shard) else { continue };
                    let done = act::fail_over(&self.server, shard, &node).await?;
                    progress::say(&format!(
                        "{} serves {} after {:.0} ms, and {} follows it without a full copy",
                        done.to,
                        done.slots,
                        done.seconds * 1000.0,
                        done.from
                    ));
                    self.fail_overs.push(done);
                }
                Step::Forget(nodes) => {
                    // A node that stays is asked from now on.
                    if let Some(shard) = self.seen.shards.first() {
                        self.server = self.server.at(&shard.primary.place.host, shard.primary.place.port);
                    }
                    act::forget(&self.server, &self.seen, &nodes).await?;
                    let gone = nodes.iter().map(|node| node.place.to_string());
                    progress::say(&format!("forgotten: {}", gone.clone().collect::<Vec<_>>().join(", ")));
                    self.forgotten.extend(gone);
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
            self.look_again().await?;
        }
    }

    /// Looks until the cluster can be asked.
    async fn look_again(&mut self) -> Result<(), Failure> {
        let until = Instant::now() + SETTLE_LIMIT;
        let joins = self.goal.to == Side::New && !self.goal.forget;
        loop {
            match look(&self.server, &self.newcomers, joins).await {
                Ok(look) => {
                    (self.survey, self.seen) = (look.survey, look.seen);
                    return Ok(());
                }
                Err(failure) if Instant::now() >= until => return Err(failure),
                Err(failure) => tracing::debug!("{failure}; looking again"),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn copy(&mut self) -> Result<(), Failure> {
        let args = self.args;
        let credentials = plan::credentials(&args.sources)?;
        let survey = Survey::take(&self.server).await?;
        let sources = plan::ask(&args.sources, &credentials, &survey).await;
        self.newcomers = newcomers(args, &self.server, &survey).await?;
        let program = program(&survey, self.newcomers.clone())?;
        sync::ready(&Plan::of(&survey, &sources), &program)?;
        let pace = Pace { at_once: args.at_once, per_shard: 1, stalled_after: args.stalled_after };
        let mut work = Work::new(pace, self.server.clone(), credentials, survey, sources, program);
        let outcome = work.run().await;
        self.copies.append(&mut work.done);
        self.past.has_copied = true;
        outcome
    }

    async fn compare(&mut self, number: usize, replica: &HostPort) -> Result<(), Failure> {
        let Some(shard) = self.seen.shards.get(number) else { return Ok(()) };
        let login = &self.args.sources.server;
        let url = |place: &HostPort| self.server.at(&place.host, place.port).url().clone();
        let ends = EndsArgs {
            from: url(&shard.primary.place),
            from_user: login.user.clone(),
            from_password_file: login.password_file.clone(),
            to: url(replica),
            to_user: login.user.clone(),
            to_password_file: login.password_file.clone(),
            tls: login.tls.clone(),
        };
        let slots = shard.slots.clone();
        let compared = remora_verify::compare(&ends.comparison(RETRY)).await;
        let same = compared.and_then(|report| report.verdict().map(|()| report.keys()));
        let keys = same.map_err(|failure| {
            failure.and(&format!("{replica} does not take the slots {slots} over from {}", shard.primary.place))
        })?;
        progress::say(&format!("{replica} has the same {} as {}", counted(keys, "key"), shard.primary.place));
        self.past.compared.insert(slots.clone());
        self.compared.push(Compared { slots, keys });
        Ok(())
    }

    /// How far the cluster is, and which command comes next.
    fn how_far(&self) -> String {
        let (new, all) = (self.seen.served_by(Side::New), self.seen.shards.len());
        let other = if self.args.back { "without --back it goes there" } else { "with --back it goes back" };
        format!(
            "{new} of {all} shards were served by new nodes at the last look; the same command goes on, and {other}"
        )
    }

    /// The last words of a run that has done everything.
    fn end(&self) -> String {
        let all = match self.seen.shards.len() {
            1 => "the shard".to_owned(),
            count => format!("all {count} shards"),
        };
        let (whose, others) = if self.args.back { ("old", "new") } else { ("new", "old") };
        match (self.args.forget, self.args.back) {
            (true, _) => {
                format!("the {whose} nodes serve {all}, and the {others} ones have left the cluster")
            }
            (false, false) => format!(
                "the new nodes serve {all}, and the old ones follow them\n\
                 next: the same command with --back goes back, with --forget the old nodes leave the cluster"
            ),
            (false, true) => format!(
                "the old nodes serve {all}, and the new ones follow them\n\
                 next: the same command without --back goes there, with --back --forget the new nodes leave the cluster"
            ),
        }
    }

    fn report(&self, is_done: bool) -> Report<'_> {
        Report {
            is_done,
            old_serve: self.seen.served_by(Side::Old),
            new_serve: self.seen.served_by(Side::New),
            copies: &self.copies,
            compared: &self.compared,
            fail_overs: &self.fail_overs,
            forgotten: &self.forgotten,
            shards: mapped::shards(&self.seen),
        }
    }
}

/// Asks the new nodes.
async fn newcomers(args: &ClusterMigrateArgs, server: &Server, survey: &Survey) -> Result<Vec<Newcomer>, Failure> {
    let mut newcomers = Vec::new();
    for place in &args.to {
        newcomers.push(node::ask(&server.at(&place.host, place.port), place, survey).await?);
    }
    Ok(newcomers)
}

/// Which new node takes which shard.
///
/// # Errors
/// A node is not suitable, or a shard has none.
fn program(survey: &Survey, newcomers: Vec<Newcomer>) -> Result<Program, Failure> {
    let program = Program::one_each(survey, newcomers)?;
    let has_none = |number: &usize| !program.following.iter().any(|(_, shard)| shard == number);
    let without = (0..survey.shards.len()).find(has_none).and_then(|number| survey.shards.get(number));
    match without {
        Some(shard) => Err(Failure::refused(format!(
            "no new node is left for {} (slots {}): name one for each of the {} shards in --to",
            shard.primary.node.address(),
            shard.slots(),
            survey.shards.len()
        ))),
        None => Ok(program),
    }
}
