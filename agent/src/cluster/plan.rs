//! `remora cluster plan`: what is there for each shard, and whether replicas of it can be made now.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use remora_protocol::{Join, Message, Offer, StatusReport};
use serde::Serialize;
use tokio::task::JoinSet;

use super::survey::{Shard, Survey};
use crate::args::{ClusterPlanArgs, ClusterSourcesArgs, ClusterStatusArgs, HostPort};
use crate::conversation::Error;
use crate::conversation::tokens::Credentials;
use crate::exit::{Code, Failure};
use crate::reader::source::join;
use crate::server::{Facts, Task};
use crate::units::{Size, counted, readable};
use crate::{progress, status};
use remora_replica::prepared::BACKLOG_SECONDS;

/// The plan of a cluster.
#[derive(Debug, Serialize)]
pub(super) struct Plan {
    /// Why the cluster should be left alone now.
    pub(super) problems: Vec<String>,
    pub(super) shards: Vec<Row>,
    /// What else was found that a reader should know.
    pub(super) notes: Vec<String>,
}

/// A shard.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) slots: String,
    pub(super) primary: String,
    pub(super) primary_id: String,
    /// `Valkey 9.1.2`
    pub(super) primary_server: Option<String>,
    /// Bytes of memory that its data take at the primary.
    pub(super) data_bytes: Option<u64>,
    pub(super) replicas: Vec<ReplicaRow>,
    pub(super) source: Option<String>,
    /// Bytes of the snapshot that the source has.
    pub(super) snapshot_bytes: Option<u64>,
    pub(super) snapshot_age_seconds: Option<u64>,
    pub(super) backlog_bytes: Option<u64>,
    pub(super) write_rate: Option<u64>,
    /// Why no replica can be made of it now; empty if one can.
    pub(super) not_ready_because: String,
    /// What may go wrong.
    pub(super) warning: String,
}

/// A replica.
#[derive(Debug, Serialize)]
pub(super) struct ReplicaRow {
    pub(super) address: String,
    pub(super) id: String,
    /// `Redis 8.2.3`
    pub(super) server: Option<String>,
    /// `in step`, `takes a full copy`, `its link is down`, or why it does not answer.
    pub(super) state: String,
}

/// Runs `remora cluster plan`.
///
/// # Errors
/// The cluster cannot be asked, or one of its shards is not ready.
pub(super) async fn run(args: ClusterPlanArgs) -> Result<(), Failure> {
    let credentials = credentials(&args.sources)?;
    let survey = Survey::take(&args.sources.server.open(Task::Cluster)?).await?;
    let sources = ask(&args.sources, &credentials, &survey).await;
    let plan = Plan::of(&survey, &sources);
    let told = match args.json {
        true => progress::print_json(&plan),
        false => progress::print(&plan.table()),
    };
    plan.verdict().and(told)
}

impl Plan {
    pub(super) fn of(survey: &Survey, sources: &Sources) -> Plan {
        let mut notes: Vec<String> = sources.silent.iter().map(|(_, failure)| failure.to_string()).collect();
        for seen in sources.elsewhere(&survey.shards) {
            notes.push(format!("the source {} is beside a server of no shard: {}", seen.address, seen.status.server));
        }
        let shards = survey.shards.iter().map(|shard| Row::of(shard, sources)).collect();
        Plan { problems: survey.problems.clone(), shards, notes }
    }

    /// # Errors
    /// The cluster should be left alone, or a shard is not ready.
    pub(super) fn verdict(&self) -> Result<(), Failure> {
        let waiting: Vec<&Row> = self.shards.iter().filter(|row| !row.not_ready_because.is_empty()).collect();
        match (self.problems.first(), waiting.first()) {
            (Some(problem), _) => Err(Failure::refused(format!("the cluster is not well: {problem}"))),
            (None, Some(row)) => Err(Failure::refused(format!(
                "{} of {} shards are not ready; {}: {}",
                waiting.len(),
                self.shards.len(),
                row.primary,
                row.not_ready_because
            ))),
            (None, None) => Ok(()),
        }
    }

    /// Which servers serve, where there are several kinds: the cluster is on its way from one to the other.
    fn kinds(&self) -> Option<String> {
        let count = |servers: &mut dyn Iterator<Item = &Option<String>>| {
            let mut counts = BTreeMap::new();
            servers.flatten().for_each(|server| *counts.entry(server.clone()).or_insert(0) += 1);
            counts
        };
        let serving = count(&mut self.shards.iter().map(|row| &row.primary_server));
        let following = count(&mut self.shards.iter().flat_map(|row| &row.replicas).map(|replica| &replica.server));
        if serving.keys().chain(following.keys()).collect::<BTreeSet<_>>().len() < 2 {
            return None;
        }
        let named = |counts: &BTreeMap<String, usize>| {
            counts.iter().map(|(server, count)| format!("{count} {server}")).collect::<Vec<_>>().join(", ")
        };
        Some(format!("{} shards are served by {}; replicas: {}", self.shards.len(), named(&serving), named(&following)))
    }

    fn table(&self) -> String {
        let replicas: usize = self.shards.iter().map(|row| row.replicas.len()).sum();
        let mut text =
            format!("cluster    {}, {}\n", counted(self.shards.len(), "shard"), counted(replicas, "replica"));
        self.kinds().iter().for_each(|kinds| text.push_str(&format!("servers    {kinds}\n")));
        for problem in &self.problems {
            text.push_str(&format!("not well   {problem}\n"));
        }
        for note in &self.notes {
            text.push_str(&format!("note       {note}\n"));
        }
        let head = ["SLOTS", "PRIMARY", "DATA", "SOURCE", "SNAPSHOT", "BACKLOG", "VERDICT"];
        let mut rows = vec![head.map(str::to_owned)];
        rows.extend(self.shards.iter().map(Row::cells));
        text.push('\n');
        text.push_str(&aligned(&rows));
        for row in self.shards.iter().filter(|row| !row.replicas.is_empty()) {
            text.push_str(&format!("\nreplicas of {}\n", row.primary));
            row.replicas.iter().for_each(|replica| {
                text.push_str(&format!("  {}  {}\n", replica.address, replica.state));
            });
        }
        text
    }
}

impl Row {
    fn of(shard: &Shard, sources: &Sources) -> Row {
        let source = sources.beside(shard);
        let primary = shard.primary.facts.as_ref();
        let plan = source.map(|seen| &seen.plan);
        let snapshot = source.and_then(|seen| seen.status.generation.as_ref());
        // The backlog of the primary counts, and the source may be beside a replica.
        let backlog = primary.ok().and_then(|facts| facts.backlog).map(|backlog| backlog.size);
        let write_rate = plan.map(|plan| plan.write_rate);
        Row {
            slots: shard.slots(),
            primary: shard.primary.node.address(),
            primary_id: shard.primary.node.id.clone(),
            primary_server: primary.ok().map(Facts::name),
            data_bytes: primary.ok().and_then(|facts| facts.used_memory_dataset),
            replicas: shard.replicas.iter().map(|member| replica_row(shard, member)).collect(),
            source: source.map(|seen| seen.address.to_string()),
            snapshot_bytes: snapshot.map(|snapshot| snapshot.snapshot_bytes),
            snapshot_age_seconds: snapshot.map(|snapshot| snapshot.age_seconds),
            backlog_bytes: backlog,
            write_rate,
            not_ready_because: match (primary, source) {
                (Err(why), _) => why.clone(),
                (Ok(_), None) => "no source has its history: start remora source beside one of its servers".into(),
                (Ok(_), Some(_)) => String::new(),
            },
            warning: warning(backlog, write_rate, plan.map(|plan| plan.warning.as_str())),
        }
    }

    fn cells(&self) -> [String; 7] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let age = self.snapshot_age_seconds.map(|seconds| readable(Duration::from_secs(seconds)));
        let snapshot = self.snapshot_bytes.zip(age).map(|(bytes, age)| format!("{}, {age} old", Size::bytes(bytes)));
        let backlog = self.backlog_bytes.map(|bytes| match self.write_rate {
            None | Some(0) => Size::bytes(bytes).to_string(),
            Some(rate) => format!("{}, {}", Size::bytes(bytes), readable(Duration::from_secs(bytes / rate))),
        });
        let verdict = match (self.not_ready_because.as_str(), self.warning.as_str()) {
            ("", "") => "ready".to_owned(),
            ("", warning) => format!("ready; {warning}"),
            (why, _) => why.to_owned(),
        };
        [
            self.slots.clone(),
            self.primary.clone(),
            or_dash(self.data_bytes.map(|bytes| Size::bytes(bytes).to_string())),
            or_dash(self.source.clone()),
            or_dash(snapshot),
            or_dash(backlog),
            verdict,
        ]
    }
}

fn warning(backlog: Option<u64>, write_rate: Option<u64>, of_source: Option<&str>) -> String {
    let seconds = backlog.zip(write_rate).and_then(|(backlog, rate)| backlog.checked_div(rate));
    match (seconds, of_source) {
        (Some(seconds), _) if seconds < BACKLOG_SECONDS => {
            format!("its backlog holds {seconds} s of writes: raise repl-backlog-size")
        }
        (_, Some(warning)) => warning.to_owned(),
        _ => String::new(),
    }
}

fn replica_row(shard: &Shard, member: &super::survey::Member) -> ReplicaRow {
    let history = shard.primary.facts.as_ref().ok().and_then(|facts| facts.replid);
    let state = match &member.facts {
        Err(why) => why.clone(),
        Ok(facts) => match &facts.link {
            _ if facts.loading == Some(true) => "loads its data".to_owned(),
            Some(link) if link.syncing == Some(true) => "takes a full copy".to_owned(),
            Some(link) if link.up == Some(true) && facts.replid == history => "in step".to_owned(),
            Some(link) if link.up == Some(true) => "follows another history".to_owned(),
            _ => "its link is down".to_owned(),
        },
    };
    let server = member.facts.as_ref().ok().map(Facts::name);
    ReplicaRow { address: member.node.address(), id: member.node.id.clone(), server, state }
}

/// Rows as columns that are as wide as they have to be. The last one has no end.
pub(super) fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

// Sources: which source agent is beside which shard.
//
// A source is asked what it would offer. The replication history in its answer is that of its server, which is a
// primary or one of its replicas. So addresses need not be compared, which differ by the network of who looks.

/// A source that has answered.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) address: HostPort,
    pub(super) plan: Offer,
    pub(super) status: StatusReport,
}

impl Seen {
    /// Whether its data are those of this primary: it has the same history, or sits beside it. A primary begins its
    /// first history when its first replica comes, which may be between the two questions.
    fn is_of(&self, primary: &Facts) -> bool {
        let same_history = primary.replid.is_some() && primary.replid == self.plan.replid;
        let same_server = !self.plan.run_id.is_empty() && primary.run_id.as_deref() == Some(self.plan.run_id.as_str());
        same_history || same_server
    }
}

/// What was found at the addresses.
#[derive(Debug, Default)]
pub(super) struct Sources {
    seen: Vec<Seen>,
    /// Addresses at which no source answers, and why.
    pub(super) silent: Vec<(HostPort, Failure)>,
}

/// How long a source may take to answer. It asks its server, which it waits for for three seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Reads what proves this command to the sources.
pub(super) fn credentials(args: &ClusterSourcesArgs) -> Result<Credentials, Failure> {
    args.security.credentials(args.token_file.as_ref(), &args.expected)
}

/// Asks all sources, side by side.
pub(super) async fn ask(args: &ClusterSourcesArgs, credentials: &Credentials, survey: &Survey) -> Sources {
    let mut addresses = args.sources.clone();
    if let Some(port) = args.source_port {
        let members = survey.shards.iter().flat_map(Shard::members);
        addresses.extend(members.map(|member| HostPort { host: member.node.host.clone(), port }));
    }
    addresses.sort_by_key(ToString::to_string);
    addresses.dedup();
    let mut asking = JoinSet::new();
    for address in addresses {
        let credentials = credentials.clone();
        asking.spawn(async move {
            let asked = tokio::time::timeout(ANSWER_LIMIT, ask_one(&address, &credentials)).await;
            let asked = asked.unwrap_or_else(|_| Err(no_answer(&address)));
            (address, asked)
        });
    }
    let mut sources = Sources::default();
    while let Some(done) = asking.join_next().await {
        match done {
            Ok((address, Ok((plan, status)))) => sources.seen.push(Seen { address, plan, status }),
            Ok((address, Err(failure))) => sources.silent.push((address, failure)),
            Err(_) => {} // a panic was reported where it happened
        }
    }
    sources.seen.sort_by_key(|seen| seen.address.to_string());
    sources.silent.sort_by_key(|(address, _)| address.to_string());
    sources
}

async fn ask_one(address: &HostPort, credentials: &Credentials) -> Result<(Offer, StatusReport), Failure> {
    let mut connection = credentials.connect(&address.host, address.port).await.map_err(Error::of_source)?;
    let plan_only = Join { plan_only: true, ..join(Some("cluster"), "", None) };
    for question in [Message::StatusQuery, Message::Join(plan_only)] {
        connection.send(question).await.map_err(Error::of_source)?;
    }
    let (mut plan, mut status) = (None, None);
    loop {
        match connection.receive().await.map_err(Error::of_source)? {
            Message::Offer(offer) => plan = Some(offer),
            Message::Status(report) => status = Some(report),
            _ => {}
        }
        match (plan.take(), status.take()) {
            (Some(plan), Some(status)) => return Ok((plan, status)),
            (had_plan, had_status) => (plan, status) = (had_plan, had_status),
        }
    }
}

/// Asks a source how it stands.
///
/// # Errors
/// It cannot be reached, or does not answer.
pub(super) async fn source_status(address: &HostPort, credentials: &Credentials) -> Result<StatusReport, Failure> {
    let mut connection = credentials.connect(&address.host, address.port).await.map_err(Error::of_source)?;
    crate::status::ask(&mut connection, address).await
}

fn no_answer(address: &HostPort) -> Failure {
    let text = format!("the source {address} did not answer within {} s", ANSWER_LIMIT.as_secs());
    Failure::new(Code::Source, text)
}

impl Sources {
    /// The source beside a shard. Of several, one beside a replica: it costs the primary nothing.
    pub(super) fn beside(&self, shard: &Shard) -> Option<&Seen> {
        self.beside_others_than(shard, None)
    }

    /// The source beside a shard that is not beside the server with this run id.
    pub(super) fn beside_others_than(&self, shard: &Shard, run_id: Option<&str>) -> Option<&Seen> {
        let primary = shard.primary.facts.as_ref().ok()?;
        let is_meant = |seen: &&Seen| seen.is_of(primary) && run_id.is_none_or(|run_id| seen.plan.run_id != run_id);
        self.seen.iter().filter(is_meant).min_by_key(|seen| seen.status.role == "primary")
    }

    /// Sources whose server is in no shard that has answered.
    pub(super) fn elsewhere<'a>(&'a self, shards: &'a [Shard]) -> impl Iterator<Item = &'a Seen> {
        let is_in = |seen: &Seen, shard: &Shard| shard.primary.facts.as_ref().is_ok_and(|primary| seen.is_of(primary));
        self.seen.iter().filter(move |seen| !shards.iter().any(|shard| is_in(seen, shard)))
    }
}

// `remora cluster status`: what the sources of all shards hold, and which replicas read from them.

/// Runs `remora cluster status`.
///
/// # Errors
/// The cluster cannot be asked.
pub(super) async fn status(args: ClusterStatusArgs) -> Result<(), Failure> {
    let (credentials, server) = (credentials(&args.sources)?, args.sources.server.open(Task::Cluster)?);
    loop {
        let survey = Survey::take(&server).await?;
        let sources = ask(&args.sources, &credentials, &survey).await;
        let plan = Plan::of(&survey, &sources);
        let mut text = String::new();
        plan.kinds().iter().for_each(|kinds| text.push_str(&format!("servers    {kinds}\n")));
        for problem in &plan.problems {
            text.push_str(&format!("not well   {problem}\n"));
        }
        for (shard, row) in survey.shards.iter().zip(&plan.shards) {
            let server = row.primary_server.as_ref().map_or_else(String::new, |server| format!(" ({server})"));
            text.push_str(&format!("shard      {} at {}{server}\n", row.slots, row.primary));
            match sources.beside(shard) {
                Some(seen) => text.push_str(&status::table(&seen.status)),
                None => text.push_str(&format!("source     {}\n", row.not_ready_because)),
            }
            for replica in &row.replicas {
                let server = replica.server.as_ref().map_or_else(String::new, |server| format!(" ({server})"));
                text.push_str(&format!("replica    {}{server}  {}\n", replica.address, replica.state));
            }
            text.push('\n');
        }
        for note in &plan.notes {
            text.push_str(&format!("note       {note}\n"));
        }
        progress::print(&text)?;
        let Some(pause) = args.watch else { return Ok(()) };
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(why: &str) -> Row {
        Row {
            slots: "0-16383".into(),
            primary: "10.0.0.1:6379".into(),
            primary_id: "a".repeat(40),
            primary_server: Some("Redis 8.2.3".into()),
            data_bytes: Some(1 << 30),
            replicas: Vec::new(),
            source: None,
            snapshot_bytes: None,
            snapshot_age_seconds: None,
            backlog_bytes: Some(1 << 20),
            write_rate: Some(1 << 10),
            not_ready_because: why.into(),
            warning: String::new(),
        }
    }

    fn plan(problems: &[&str], rows: Vec<Row>) -> Plan {
        let problems = problems.iter().map(|&problem| problem.to_owned()).collect();
        Plan { problems, shards: rows, notes: vec!["a note".into()] }
    }

    #[test]
    fn a_plan_is_refused_for_the_cluster_first_and_then_for_a_shard() {
        assert!(plan(&[], vec![row("")]).verdict().is_ok());
        let text = plan(&[], vec![row(""), row("no source")]).verdict().map_err(|failure| failure.message);
        assert_eq!(text, Err("1 of 2 shards are not ready; 10.0.0.1:6379: no source".into()));
        let text = plan(&["slot 7 moves"], vec![row("no source")]).verdict().map_err(|failure| failure.message);
        assert_eq!(text, Err("the cluster is not well: slot 7 moves".into()));
    }

    #[test]
    fn the_table_has_a_line_for_each_shard() {
        let table = plan(&[], vec![row(""), row("no source")]).table();
        for part in ["2 shards, 0 replicas", "note       a note", "VERDICT", "1 MiB, 17 min", "ready", "no source"] {
            assert!(table.contains(part), "{part}: {table}");
        }
    }

    #[test]
    fn servers_of_several_kinds_are_counted() {
        let replica = |server: &str| ReplicaRow {
            address: "10.0.0.2:6379".into(),
            id: "b".repeat(40),
            server: Some(server.into()),
            state: "in step".into(),
        };
        let with =
            |servers: &[&str]| Row { replicas: servers.iter().map(|server| replica(server)).collect(), ..row("") };
        assert_eq!(plan(&[], vec![row(""), with(&["Redis 8.2.3"])]).kinds(), None);
        let moved = Row { primary_server: Some("Valkey 9.1.2".into()), ..with(&["Redis 8.2.3"]) };
        let table = plan(&[], vec![moved, with(&["Valkey 9.1.2", "Redis 8.2.3"]), row("")]).table();
        let line = "servers    3 shards are served by 2 Redis 8.2.3, 1 Valkey 9.1.2; replicas: 2 Redis 8.2.3, 1 Valkey 9.1.2\n";
        assert!(table.contains(line), "{table}");
    }

    #[test]
    fn a_backlog_that_holds_few_seconds_is_warned_of() {
        assert!(warning(Some(1000), Some(500), None).contains("2 s of writes"));
        assert_eq!(warning(Some(1000), Some(0), Some("its own")), "its own");
        assert_eq!(warning(None, Some(5), None), "");
    }
}
