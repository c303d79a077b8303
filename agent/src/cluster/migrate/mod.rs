//! `remora cluster migrate`: a cluster moves to new nodes, shard by shard, and back.
//!
//! ```text
//!   look ──▶ decide ──▶ wait │ set │ copy │ compare │ fail over │ forget ──╮
//!     ▲                                                                   │      done, or stopped: how far it is
//!     ╰───────────────────────────────────────────────────────────────────┴────▶
//! ```
//!
//! - [`decide`]: what is to be done next. Pure. **Start here.**
//! - Here: the loop, one fail-over, and how nodes leave. Then what is decided on: the cluster, as all of its nodes see
//!   it, and their settings; and which new node takes which shard, and why not. The copies are those of [`sync`].
//!
//! Nothing is kept: the cluster itself says how far it is. So a command that was ended, by whatever, is started again.

mod decide;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use decide::{Node as Seat, Setting, Settings, Shard};
use serde::Serialize;

use self::decide::{Goal, Past, Seen, Side, Step};
use super::plan::{self, Plan};
use super::survey::Survey;
use super::sync::{self, Newcomer, Outcome, Pace, Program, Work};
use crate::args::{ClusterMigrateArgs, EndsArgs, HostPort};
use crate::cluster::nodes::Node;
use crate::cluster::plan::{Sources, aligned};
use crate::cluster::survey::{Member, nodes_of};
use crate::cluster::sync::{What, source_for};
use crate::exit::{Code, Failure};
use crate::progress;
use crate::server::{Client, Facts, Family, Role, Server, ServerError, Task, Version};
use crate::signals::Signals;
use crate::units::{Size, counted};
use remora_process::blocking;
use remora_replica::{LeftOut, payload};

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
                refuse(&server, &survey, &newcomers, &program, &args.leave_out).await?;
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
                        set(&self.server, &setting).await?;
                        progress::say(&format!("{}: {} {:?}", setting.node, setting.name, setting.value));
                    }
                }
                Step::Copy => self.copy().await?,
                Step::Compare { shard, node } => self.compare(shard, &node.place).await?,
                Step::FailOver { shard, node } => {
                    let Some(shard) = self.seen.shards.get(shard) else { continue };
                    let done = fail_over(&self.server, shard, &node).await?;
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
                    forget(&self.server, &self.seen, &nodes).await?;
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
            shards: shards(&self.seen),
        }
    }
}

/// Asks the new nodes.
async fn newcomers(args: &ClusterMigrateArgs, server: &Server, survey: &Survey) -> Result<Vec<Newcomer>, Failure> {
    let mut newcomers = Vec::new();
    for place in &args.to {
        newcomers.push(sync::ask(&server.at(&place.host, place.port), place, survey).await?);
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

// One step at a time: a setting, a fail-over, and how nodes leave.

/// How often the nodes are asked during a fail-over. `INFO replication` costs some tens of microseconds.
const POLL: Duration = Duration::from_millis(5);

/// How long the servers try a fail-over that a client has asked for: `CLUSTER_MF_TIMEOUT` in their cluster.h.
const SERVERS_LIMIT: Duration = Duration::from_secs(5);

/// Where that can be set (Valkey 9), in milliseconds.
const LIMIT_SETTING: &str = "cluster-manual-failover-timeout";

/// How much later than that a promotion is still waited for.
const MARGIN: Duration = Duration::from_secs(5);

/// How long the old primary may take to follow the new one.
const FOLLOW_LIMIT: Duration = Duration::from_secs(30);

/// A shard that has failed over.
#[derive(Clone, Debug, Serialize)]
struct FailedOver {
    slots: String,
    from: String,
    to: String,
    /// From the command to the promotion.
    seconds: f64,
}

/// Makes a setting.
///
/// # Errors
/// The node refuses it.
async fn set(server: &Server, setting: &Setting) -> Result<(), Failure> {
    let mut client = server.at(&setting.node.host, setting.node.port).connect().await?;
    Ok(client.config_set(setting.name, &setting.value).await?)
}

/// Has a replica take its primary's place, and waits until that one follows it.
///
/// # Errors
/// It did not take it, or the old primary has taken a full copy. The message says who serves the shard.
async fn fail_over(server: &Server, shard: &Shard, node: &Seat) -> Result<FailedOver, Failure> {
    let (old, new) = (&shard.primary.place, &node.place);
    let mut at_new = server.at(&new.host, new.port).connect().await?;
    let limit = at_new.config_get(LIMIT_SETTING).await.ok().flatten();
    let limit = limit.and_then(|text| text.parse().ok()).map_or(SERVERS_LIMIT, Duration::from_millis);
    let copies = full_copies(server, new).await?;
    let began = Instant::now();
    at_new.command(&["CLUSTER", "FAILOVER"]).await.map_err(|error| {
        Failure::from(error).and(&format!("{new} refuses the fail-over, and {old} serves {} as before", shard.slots))
    })?;
    loop {
        match at_new.info("replication").await {
            Ok(info) if Facts::from_info(&info).role == Some(Role::Primary) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "asking again");
                if let Ok(client) = server.at(&new.host, new.port).connect().await {
                    at_new = client;
                }
            }
        }
        if began.elapsed() >= limit + MARGIN {
            let text = format!(
                "{new} has not taken {} over within {} s, and {old} serves them as before: the log of {new} says why (nodes \
                 do not vote for a new primary in the place of one that was replaced less than two cluster-node-timeouts ago)",
                shard.slots,
                (limit + MARGIN).as_secs()
            );
            return Err(Failure::new(Code::NotSwitched, text));
        }
        tokio::time::sleep(POLL).await;
    }
    let seconds = began.elapsed().as_secs_f64();
    let until = Instant::now() + FOLLOW_LIMIT;
    while !follows(server, old, new).await {
        if Instant::now() >= until {
            let text = format!(
                "{new} serves {}, and {old} does not follow it within {} s: its log says why",
                shard.slots,
                FOLLOW_LIMIT.as_secs()
            );
            return Err(Failure::new(Code::SyncFailed, text));
        }
        tokio::time::sleep(10 * POLL).await;
    }
    let copied = full_copies(server, new).await?.saturating_sub(copies);
    if copied > 0 {
        let text = format!(
            "{new} serves {}, and has sent {copied} full copies since: {old} or another replica could not go on where it was",
            shard.slots
        );
        return Err(Failure::new(Code::SyncFailed, text));
    }
    Ok(FailedOver { slots: shard.slots.clone(), from: old.to_string(), to: new.to_string(), seconds })
}

async fn full_copies(server: &Server, at: &HostPort) -> Result<u64, ServerError> {
    let info = server.at(&at.host, at.port).connect().await?.info("stats").await?;
    Ok(info.number("sync_full").unwrap_or(0))
}

/// Whether a node is a replica in step with another one.
async fn follows(server: &Server, old: &HostPort, new: &HostPort) -> bool {
    let facts = async |at: &HostPort| {
        let info = server.at(&at.host, at.port).connect().await?.info("replication").await?;
        Ok::<_, ServerError>(Facts::from_info(&info))
    };
    let (Ok(of_old), Ok(of_new)) = (facts(old).await, facts(new).await) else { return false };
    let is_up = of_old.link.as_ref().is_some_and(|link| link.up == Some(true) && link.syncing != Some(true));
    of_old.role == Some(Role::Replica) && is_up && of_old.replid == of_new.replid
}

/// Has all other nodes forget these, and empties them.
///
/// # Errors
/// A node that stays refuses, or does not answer.
async fn forget(server: &Server, seen: &Seen, leaving: &[Seat]) -> Result<(), Failure> {
    let leaves = |node: &&Seat| leaving.iter().any(|leaving| leaving.id == node.id);
    for stays in seen.nodes().filter(|node| !leaves(node) && !node.is_lost) {
        let mut client = server.at(&stays.place.host, stays.place.port).connect().await?;
        for node in leaving {
            match client.command(&["CLUSTER", "FORGET", &node.id]).await {
                Ok(_) => {}
                // An earlier run has done it, or another node has told it.
                Err(ServerError::Refused { text, .. }) if text.contains("nknown node") => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    for node in leaving {
        // They refuse it as long as they are primaries with keys.
        let reset = async {
            let mut client = server.at(&node.place.host, node.place.port).connect().await?;
            client.command(&["CLUSTER", "RESET", "SOFT"]).await
        };
        if let Err(error) = reset.await {
            tracing::warn!("{} is forgotten, and was not emptied: {error}", node.place);
        }
    }
    Ok(())
}

// Looks at the cluster: its nodes and what they say of each other, and the settings that keep two families apart.

/// Redis from here on tells the other nodes its internal secret, as an extension of type 4 of the bus.
const SECRET_SINCE: Version = Version { major: 8, minor: 0, patch: 0 };

/// Valkey from here on takes an extension of type 4 for the address that clients should be given.
const ADDRESS_SINCE: Version = Version { major: 8, minor: 1, patch: 0 };

/// What a node tells the others as its name. An address is a name, too.
const NAME: &str = "cluster-announce-hostname";

/// What a node tells clients of the others: `ip` or `hostname`.
const TELLS: &str = "cluster-preferred-endpoint-type";

/// The cluster, and the new nodes.
struct Look {
    survey: Survey,
    seen: Seen,
}

/// What a node says that a survey does not ask for.
struct Answer {
    errors: u64,
    /// The other nodes, as it sees them.
    view: Vec<Node>,
    /// `None`: it has no such settings.
    settings: Option<(String, String)>,
}

/// Asks all nodes. `joins`: the new nodes that are not in the cluster are to join it.
///
/// # Errors
/// The cluster cannot be asked.
async fn look(server: &Server, newcomers: &[Newcomer], joins: bool) -> Result<Look, Failure> {
    let survey = Survey::take(server).await?;
    let new: BTreeSet<&str> = newcomers.iter().map(|newcomer| newcomer.own.id.as_str()).collect();
    let side = |id: &str| if new.contains(id) { Side::New } else { Side::Old };
    let (mut answers, mut silent) = (BTreeMap::new(), None);
    for Member { node, facts } in survey.shards.iter().map(|shard| &shard.primary) {
        silent =
            silent.or_else(|| facts.as_ref().err().map(|why| format!("{} does not answer: {why}", node.address())));
    }
    for member in survey.members().filter(|member| member.facts.is_ok() && !member.node.is_lost()) {
        let at = server.at(&member.node.host, member.node.port);
        match ask(&at).await {
            Ok(answer) => _ = answers.insert(member.node.id.as_str(), answer),
            Err(failure) => silent = silent.or_else(|| Some(failure.to_string())),
        }
    }
    let trouble = survey.problems.first().cloned().or(silent).or_else(|| disagreement(&survey, &answers));
    let settings = settings(server, &survey, if joins { newcomers } else { &[] }, &answers).await?;
    let seat = |member: &Member, primary: Option<&Member>| Seat {
        id: member.node.id.clone(),
        place: place(&member.node),
        side: side(&member.node.id),
        is_lost: member.node.is_lost(),
        behind: behind(member, primary),
        errors: answers.get(member.node.id.as_str()).map_or(0, |answer| answer.errors),
    };
    let shards = survey.shards.iter().map(|shard| Shard {
        slots: shard.slots(),
        primary: seat(&shard.primary, None),
        replicas: shard.replicas.iter().map(|replica| seat(replica, Some(&shard.primary))).collect(),
    });
    let seen = Seen {
        trouble,
        settings,
        shards: shards.collect(),
        others: survey.others.iter().map(|member| seat(member, None)).collect(),
    };
    Ok(Look { survey, seen })
}

/// Where a node is.
fn place(node: &Node) -> HostPort {
    HostPort { host: node.host.clone(), port: node.port }
}

async fn ask(server: &Server) -> Result<Answer, Failure> {
    let mut client = server.connect().await?;
    let errors = client.info("stats").await?.number("unexpected_error_replies").unwrap_or(0);
    let (view, settings) = (nodes_of(&mut client).await?, configured(&mut client).await?);
    Ok(Answer { errors, view, settings })
}

async fn configured(client: &mut Client) -> Result<Option<(String, String)>, Failure> {
    let name = client.config_get(NAME).await?;
    Ok(name.zip(client.config_get(TELLS).await?))
}

/// Why a node cannot take its primary's place, or does not serve.
fn behind(member: &Member, primary: Option<&Member>) -> Option<String> {
    let facts = match &member.facts {
        Ok(facts) => facts,
        Err(why) => return Some(why.clone()),
    };
    let primary = primary?;
    let history = primary.facts.as_ref().ok().and_then(|facts| facts.replid);
    match &facts.link {
        _ if facts.loading == Some(true) => Some("it loads its data".into()),
        Some(link) if link.syncing == Some(true) => Some("it takes a full copy".into()),
        Some(link) if link.up != Some(true) => Some("its link is down".into()),
        None => Some("it is no replica yet".into()),
        Some(_) if facts.replid != history => Some("it follows another history".into()),
        Some(_) => None,
    }
}

/// What a node sees otherwise than the survey. Votes count by what each node sees.
fn disagreement(survey: &Survey, answers: &BTreeMap<&str, Answer>) -> Option<String> {
    let known: BTreeSet<&str> = survey.members().map(|member| member.node.id.as_str()).collect();
    for member in survey.members() {
        let Some(answer) = answers.get(member.node.id.as_str()) else { continue };
        let who = member.node.address();
        for Member { node, .. } in survey.members().filter(|other| !other.node.is_lost()) {
            let same = |seen: &&Node| {
                seen.is_primary() == node.is_primary() && seen.primary == node.primary && seen.slots == node.slots
            };
            let seen = answer.view.iter().find(|seen| seen.id == node.id && !seen.is_lost());
            if seen.filter(same).is_none() {
                return Some(format!("{who} has not heard yet what {} is", node.address()));
            }
        }
        if let Some(seen) = answer.view.iter().find(|seen| !seen.is_lost() && !known.contains(seen.id.as_str())) {
            return Some(format!("{who} knows {}, and others do not", seen.address()));
        }
    }
    None
}

/// Whether nodes of both families would take each other's extensions of the bus for something else.
fn clashes<'a>(facts: impl Iterator<Item = &'a Facts>) -> bool {
    let (mut tells_secret, mut takes_address) = (false, false);
    for facts in facts {
        match facts.family {
            Family::Redis => tells_secret |= facts.version.is_some_and(|version| version >= SECRET_SINCE),
            Family::Valkey => takes_address |= facts.version.is_some_and(|version| version >= ADDRESS_SINCE),
        }
    }
    tells_secret && takes_address
}

async fn settings(
    server: &Server,
    survey: &Survey,
    newcomers: &[Newcomer],
    answers: &BTreeMap<&str, Answer>,
) -> Result<Settings, Failure> {
    let is_member = |id: &str| survey.members().any(|member| member.node.id == id);
    let members = survey.members().filter_map(|member| Some((&member.node, member.facts.as_ref().ok()?)));
    let outside = newcomers.iter().filter(|newcomer| !is_member(&newcomer.own.id));
    let mut all = Vec::new();
    for (node, facts) in members {
        let configured = answers.get(node.id.as_str()).and_then(|answer| answer.settings.clone());
        all.extend(configured.map(|configured| (place(node), facts.family, configured)));
    }
    let are_apart = !clashes(
        survey.members().filter_map(|member| member.facts.as_ref().ok()).chain(newcomers.iter().map(|n| &n.facts)),
    );
    if are_apart {
        let own = all.iter().filter(|(node, _, (name, _))| *name == node.host);
        return Ok(match own.flat_map(|(node, family, configured)| taken_back(node, *family, configured)).collect() {
            needless if Vec::is_empty(&needless) => Settings::Right,
            needless => Settings::Needless(needless),
        });
    }
    for newcomer in outside {
        let at = HostPort { host: newcomer.own.host.clone(), port: newcomer.place.port };
        let mut client = server.at(&newcomer.place.host, newcomer.place.port).connect().await?;
        all.extend(configured(&mut client).await?.map(|configured| (at, newcomer.facts.family, configured)));
    }
    if let Some((node, ..)) = all.iter().find(|(node, ..)| node.host.contains(':')) {
        return Err(Failure::refused(format!(
            "{node} has an address of IPv6: nodes of Redis from 8.0 on and of Valkey from 8.1 on understand each other only by names \
             ({NAME}), and an address of IPv6 is not a name: give each node a name, and set {TELLS} to hostname"
        )));
    }
    let setting = |node: &HostPort, name, value: &str| Setting { node: node.clone(), name, value: value.to_owned() };
    let unnamed = all.iter().filter(|(_, _, (name, _))| name.is_empty());
    let missing: Vec<Setting> = unnamed.map(|(node, ..)| setting(node, NAME, &node.host)).collect();
    if !missing.is_empty() {
        return Ok(Settings::Missing(missing));
    }
    for member in
        survey.members().filter(|member| member.facts.as_ref().is_ok_and(|facts| facts.family == Family::Valkey))
    {
        let Some(answer) = answers.get(member.node.id.as_str()) else { continue };
        let has_name = |id: &str| answer.view.iter().any(|seen| seen.id == id && seen.name.is_some());
        let is_named = |other: &&Member| other.node.is_lost() || has_name(&other.node.id);
        if let Some(other) = survey.members().find(|other| !is_named(other)) {
            let (who, of) = (member.node.address(), other.node.address());
            return Ok(Settings::NotHeardOf(format!("{who} has not heard yet of the name of {of}")));
        }
    }
    let by_address = all.iter().filter(|(_, family, (_, tells))| *family == Family::Valkey && tells != "hostname");
    let missing: Vec<Setting> = by_address.map(|(node, ..)| setting(node, TELLS, "hostname")).collect();
    Ok(if missing.is_empty() { Settings::Right } else { Settings::Missing(missing) })
}

/// What takes the settings of a node back that has its address for its name.
fn taken_back(node: &HostPort, family: Family, (_, tells): &(String, String)) -> Vec<Setting> {
    let setting = |name, value: &str| Setting { node: node.clone(), name, value: value.to_owned() };
    let told = (family == Family::Valkey && tells == "hostname").then(|| setting(TELLS, "ip"));
    told.into_iter().chain([setting(NAME, "")]).collect()
}

// The plan: which new node takes which shard, what will be done, and what speaks against it.

/// The plan.
#[derive(Debug, Serialize)]
struct Map {
    shards: Vec<PlannedShard>,
    /// Settings that are made at once; others follow when the nodes have heard of them.
    settings: Vec<Setting>,
    /// Nodes that leave the cluster.
    leave: Vec<String>,
    notes: Vec<String>,
}

/// A shard.
#[derive(Debug, Serialize)]
struct PlannedShard {
    slots: String,
    /// The node that serves it.
    serves: String,
    side: Side,
    /// The node that takes it.
    takes: Option<String>,
    /// What that one does before.
    first: String,
    data_bytes: Option<u64>,
}

/// The shards as they are.
fn shards(seen: &Seen) -> Vec<PlannedShard> {
    let shards = seen.shards.iter().map(|shard| PlannedShard {
        slots: shard.slots.clone(),
        serves: shard.primary.place.to_string(),
        side: shard.primary.side,
        takes: None,
        first: String::new(),
        data_bytes: None,
    });
    shards.collect()
}

impl Map {
    /// To the new nodes.
    fn there(seen: &Seen, survey: &Survey, newcomers: &[Newcomer], program: &Program, sources: &Sources) -> Map {
        let mut planned = shards(seen);
        for (id, number) in &program.following {
            let (Some(row), Some(shard)) = (planned.get_mut(*number), survey.shards.get(*number)) else { continue };
            let Some(newcomer) = newcomers.iter().find(|newcomer| newcomer.own.id == *id) else { continue };
            row.data_bytes = shard.primary.facts.as_ref().ok().and_then(|facts| facts.used_memory_dataset);
            row.takes = Some(format!("{} ({})", newcomer.place, newcomer.facts.name()));
            let job = program.jobs.iter().find(|job| job.id == *id);
            row.first = match job {
                Some(job) if job.what == What::Watch => "its copy is under way".into(),
                Some(job) => match source_for(job, survey, sources) {
                    Ok(source) => format!("a copy from {}", source.address),
                    Err(failure) => failure.message,
                },
                None if row.side == Side::New => "serves it".into(),
                None => "follows it".into(),
            };
        }
        let mut notes = absent(seen);
        let members = survey.members().filter_map(|member| member.facts.as_ref().ok());
        if clashes(members.chain(newcomers.iter().map(|newcomer| &newcomer.facts))) {
            notes.push(
                "names go around what Redis 8 and Valkey misunderstand of each other; do not restart a Valkey node before --forget \
                 (docs/how-to/migrate-cluster.md)"
                    .into(),
            );
        }
        Map { shards: planned, settings: missing(seen), leave: Vec::new(), notes }
    }

    /// Back, or what leaves.
    fn of(goal: Goal, seen: &Seen) -> Map {
        let mut planned = shards(seen);
        for (row, shard) in planned.iter_mut().zip(&seen.shards).filter(|(row, _)| row.side != goal.to) {
            row.takes = shard.candidate(goal.to).map(|node| node.place.to_string());
            row.first = "follows it".into();
        }
        let leaves = seen.nodes().filter(|node| goal.forget && node.side != goal.to);
        let leave = leaves.map(|node| node.place.to_string()).collect();
        Map { shards: planned, settings: missing(seen), leave, notes: absent(seen) }
    }

    fn table(&self) -> String {
        let mut rows = vec![["SLOTS", "SERVED BY", "DATA", "TO", "FIRST"].map(str::to_owned)];
        for row in &self.shards {
            let data = row.data_bytes.map_or_else(|| "-".to_owned(), |bytes| Size::bytes(bytes).to_string());
            let takes = row.takes.clone().unwrap_or_else(|| "-".to_owned());
            rows.push([row.slots.clone(), row.serves.clone(), data, takes, row.first.clone()]);
        }
        let mut text = aligned(&rows);
        for Setting { node, name, value } in &self.settings {
            text.push_str(&format!("setting: {node}: {name} {value:?}\n"));
        }
        if !self.leave.is_empty() {
            text.push_str(&format!("leave the cluster, and lose their data: {}\n", self.leave.join(", ")));
        }
        for note in &self.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        text
    }
}

/// The nodes that are lost, or do not follow.
fn absent(seen: &Seen) -> Vec<String> {
    let lost = seen.nodes().filter(|node| node.is_lost).map(|node| format!("{} is lost", node.place));
    let late = seen.shards.iter().flat_map(|shard| shard.replicas.iter().filter_map(|node| shard.late(node)));
    lost.chain(late).collect()
}

fn missing(seen: &Seen) -> Vec<Setting> {
    match &seen.settings {
        Settings::Missing(settings) | Settings::Needless(settings) => settings.clone(),
        Settings::Right | Settings::NotHeardOf(_) => Vec::new(),
    }
}

/// Refuses new nodes that cannot hold what their primaries hold, or do not know the commands that those have run.
///
/// # Errors
/// Why.
async fn refuse(
    server: &Server,
    survey: &Survey,
    newcomers: &[Newcomer],
    program: &Program,
    left_out: &[LeftOut],
) -> Result<(), Failure> {
    for job in program.jobs.iter().filter(|job| job.what == What::Join) {
        let Some(shard) = survey.shards.get(job.shard) else { continue };
        let Some(newcomer) = newcomers.iter().find(|newcomer| newcomer.own.id == job.id) else { continue };
        let (old, new) = (&shard.primary.node, &newcomer.place);
        let mut old = server.at(&old.host, old.port).connect().await?;
        let mut new = server.at(&new.host, new.port).connect().await?;
        payload::refuse(&mut old, &mut new, left_out).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(family: Family, major: u32, minor: u32) -> Facts {
        Facts { family, version: Some(Version { major, minor, patch: 0 }), ..Facts::default() }
    }

    #[test]
    fn only_redis_from_8_0_and_valkey_from_8_1_on_misunderstand_each_other() {
        let clash = |one: (u32, u32), other: (u32, u32)| {
            clashes([facts(Family::Redis, one.0, one.1), facts(Family::Valkey, other.0, other.1)].iter())
        };
        assert!(clash((8, 0), (8, 1)) && clash((8, 2), (9, 1)));
        assert!(!clash((7, 4), (9, 1)) && !clash((8, 2), (8, 0)));
        assert!(!clashes([facts(Family::Redis, 8, 2)].iter()));
    }

    #[test]
    fn what_was_set_is_taken_back() {
        let node = HostPort { host: "10.0.0.1".into(), port: 1 };
        let back = |family, tells: &str| {
            let taken = taken_back(&node, family, &("10.0.0.1".into(), tells.into()));
            taken.into_iter().map(|setting| (setting.name, setting.value)).collect::<Vec<_>>()
        };
        assert_eq!(back(Family::Redis, "ip"), [(NAME, String::new())]);
        assert_eq!(back(Family::Valkey, "hostname"), [(TELLS, "ip".to_owned()), (NAME, String::new())]);
    }
}
