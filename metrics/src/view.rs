//! View: what people are shown of a report: its names, states and units, each decided once. The screen (`remora status
//! --watch`) and the page (`--metrics`) draw a view; the table, which says more, takes its words from here too.

use std::collections::HashMap;
use std::time::Duration;

use remora_protocol::{
    Advance, Base, BaseKind, GenerationState, GenerationStatus, Phase, ReplicaStatus, Saving, StatusReport,
    UploadStatus,
};
use serde::Serialize;

use remora_base::units::{Size, counted, readable};
use remora_process::progress::{self, Unit};
use remora_process::progress::{known, share};

/// A report for people.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct View {
    /// The source's agent and the server that it captures, in one line.
    pub source: String,
    /// What the source has, in the order in which it is shown.
    pub facts: Vec<Fact>,
    /// Why the last snapshot failed; empty if it did not. Not on the page: the text is the server's, and the port of
    /// the page is open.
    #[serde(skip)]
    pub failure: String,
    /// All that have joined.
    pub replicas: Vec<Row>,
    /// What all replicas read per second.
    pub reading: Rate,
}

/// One fact about the source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fact {
    /// What it is about.
    pub name: &'static str,
    /// What is looked for first: a figure, or a state.
    pub value: String,
    /// The rest of the sentence, or empty.
    pub more: String,
    /// The part of its limit that is used, 0 to 1; `None` for what has no limit.
    pub share: Option<Share>,
}

/// A part of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Share {
    /// 0 to 1.
    pub of_one: f64,
    /// How near the limit is.
    pub level: Level,
}

/// How near to its limit something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Far from the limit.
    Low,
    /// More than [`HIGH`].
    High,
    /// More than [`FULL`].
    Full,
}

/// A rate, as a number and as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rate {
    /// For a script.
    pub bytes_per_second: u64,
    /// For people.
    pub text: String,
}

/// One replica.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its session, which tells replicas of one name apart.
    pub session: u64,
    /// The name by which it appears.
    pub name: String,
    /// How far its sync is.
    pub phase: Phase,
    /// The part of the snapshot that it holds, 0 to 1.
    pub share: f64,
    /// How much of the snapshot it has.
    pub percent: String,
    /// How fast it gets it.
    pub rate: String,
    /// How long it needs.
    pub left: String,
    /// How far behind the stream it is.
    pub lag: String,
    /// The transport by which it reads.
    pub by: String,
    /// The replica that it reads from, or the source.
    pub from: String,
    /// How long ago it joined.
    pub joined: String,
    /// How long nothing was heard of it.
    pub silent: String,
    /// Whether its last message is older than [`SILENT`].
    pub is_silent: bool,
}

/// The heads of the replicas' table, in the order of a row's fields.
pub const HEADS: [&str; 10] =
    ["replica", "phase", "of the snapshot", "rate", "left", "lag", "by", "from", "joined", "silent"];

/// Above this part of a limit a bar is yellow.
const HIGH: f64 = 0.7;

/// Above this part of a limit a bar is red.
const FULL: f64 = 0.9;

/// Replicas report several times a second. One that has not for this long hangs, or its host is gone.
const SILENT: Duration = Duration::from_secs(10);

/// What stands where nothing is known yet.
const UNKNOWN: &str = "–";

impl View {
    /// The view of this report.
    pub fn of(report: &StatusReport) -> View {
        let mut facts = Vec::new();
        match &report.generation {
            None => {
                let [value, more] = no_snapshot(report);
                facts.push(Fact::new("snapshot", value, more));
            }
            Some(generation) => facts.extend(tables(generation, &report.replicas)),
        }
        let [from, more] = base(&report.base);
        facts.push(Fact::new("base", from, more));
        let [taken, rest] = totals(report);
        facts.push(Fact::new("so far", taken, rest));
        if let Some(measured) = measured_upload(report) {
            let [value, more] = upload(measured);
            facts.push(Fact::new("upload", value, more));
        }
        let names: HashMap<u64, &str> =
            report.replicas.iter().map(|replica| (replica.session, replica.name.as_str())).collect();
        let rows = report.replicas.iter().map(|replica| Row::of(replica, &names));
        let total = report.replicas.iter().map(|replica| replica.advance.rate_bytes_per_s).fold(0, u64::saturating_add);
        View {
            source: source(report),
            facts,
            failure: report.last_failure.clone(),
            replicas: rows.collect(),
            reading: Rate { bytes_per_second: total, text: progress::rate(total) },
        }
    }
}

impl Fact {
    fn new(name: &'static str, value: impl Into<String>, more: impl Into<String>) -> Fact {
        Fact { name, value: value.into(), more: more.into(), share: None }
    }

    fn with_share(self, part: u64, whole: u64) -> Fact {
        Fact { share: Some(Share::of(part, whole)), ..self }
    }
}

impl Share {
    fn of(part: u64, whole: u64) -> Share {
        let of_one = (part as f64 / whole.max(1) as f64).min(1.0);
        let level = match of_one {
            part if part > FULL => Level::Full,
            part if part > HIGH => Level::High,
            _ => Level::Low,
        };
        Share { of_one, level }
    }
}

impl Row {
    fn of(replica: &ReplicaStatus, names: &HashMap<u64, &str>) -> Row {
        let from = replica.reads_from.and_then(|session| names.get(&session).copied()).unwrap_or("source");
        let by = if replica.transport.is_empty() { UNKNOWN } else { &replica.transport };
        Row {
            session: replica.session,
            name: replica.name.clone(),
            phase: replica.phase,
            share: replica.advance.ratio().unwrap_or(0.0),
            percent: percent(replica),
            rate: reading(replica),
            left: left(replica),
            lag: lag(replica),
            by: by.to_owned(),
            from: from.to_owned(),
            joined: seconds(replica.joined_seconds),
            silent: seconds(replica.silent_seconds),
            is_silent: replica.silent_seconds > SILENT.as_secs(),
        }
    }
}

/// The facts about the two tables.
fn tables(generation: &GenerationStatus, replicas: &[ReplicaStatus]) -> Vec<Fact> {
    let windowed = if generation.windowed { ", windowed" } else { "" };
    let age = seconds(generation.age_seconds);
    let [value, how] = snapshot(generation);
    let (state, how) = (state(generation.state), if how.is_empty() { how } else { format!("{how}, ") });
    let more = format!("{how}{state}{windowed}, by {}, {age} old", generation.capture);
    let share = generation.advance.ratio().filter(|_| generation.state == GenerationState::Capturing);
    let share = share.map(|of_one| Share { of_one, level: Level::Low });
    let held = held(generation);
    let (used, limit) = (generation.memory_bytes, generation.memory_limit);
    let mut facts = vec![
        Fact { share, ..Fact::new("snapshot", value, more) },
        Fact::new("stream", format!("{} held", Size::bytes(held)), format!("to offset {}", generation.offset_now)),
        Fact::new("memory", in_use(generation), "").with_share(used, limit),
    ];
    if generation.stored_bytes > 0 && generation.stored_bytes < generation.snapshot_bytes {
        // The reason, which the table has, is not for the page.
        let method = generation.compression.split(':').next().unwrap_or_default();
        let part = 100.0 * generation.stored_bytes as f64 / generation.snapshot_bytes as f64;
        facts.insert(1, Fact::new("compressed", method, format!("{part:.1} % of the snapshot is stored")));
    }
    if let Some(most) = replicas.iter().filter_map(|replica| behind(replica, generation)).max()
        && held > 0
    {
        let value = format!("{} behind", Size::bytes(most));
        facts.push(match has_dropped(generation) {
            true => Fact::new("journal", value, "the slowest replica; at the end of the bar it loses its place")
                .with_share(most, held),
            false => Fact::new("journal", value, "the slowest replica; nothing has been dropped"),
        });
    }
    facts
}

/// Whether the journal no longer has all that followed the snapshot. Until then no replica can lose its place.
fn has_dropped(generation: &GenerationStatus) -> bool {
    generation.journal_first > generation.offset_start.saturating_add(1)
}

/// How much of the journal a replica still needs; `None` while it waits for a snapshot.
fn behind(replica: &ReplicaStatus, generation: &GenerationStatus) -> Option<u64> {
    match replica.applied_offset {
        _ if replica.phase == Phase::Waiting => None,
        // Its server has not loaded yet, and then needs all that follows the snapshot.
        0 => Some(generation.journal_end.saturating_sub(generation.offset_start)),
        _ => Some(replica.journal_lag_bytes),
    }
}

// ---- words that the table has in common with these two ----

/// The source and its server, in one line.
pub fn source(report: &StatusReport) -> String {
    format!("remora {} of {} ({})", report.source, report.server, report.role)
}

/// From what a replica is made that joins now, and the rest of the sentence.
pub fn base(base: &Base) -> [String; 2] {
    let what = if base.place.is_empty() { base.kind.words().to_owned() } else { base.place.clone() };
    let behind = || {
        let age = readable(Duration::from_secs(base.age_seconds));
        format!("{age} old, {} of stream behind it", Size::bytes(base.stream_bytes))
    };
    let mut more = match base.kind {
        BaseKind::Snapshot | BaseKind::Backup | BaseKind::File => behind(),
        BaseKind::Copy | BaseKind::Sweep => "without a fork".to_owned(),
        BaseKind::Fork => "which forks for it".to_owned(),
        BaseKind::None => "replicas that join wait".to_owned(),
    };
    if !base.passed_over.is_empty() {
        more.push_str(&format!("; not {}", base.passed_over));
    }
    [what, more]
}

/// What a source without a snapshot waits for.
pub fn no_snapshot(report: &StatusReport) -> [String; 2] {
    match report.saving {
        _ if !report.preparing.is_empty() => {
            ["none".to_owned(), format!("{}; replicas that join wait for it", report.preparing)]
        }
        None => ["none".to_owned(), "the source takes one when a replica joins".to_owned()],
        Some(saving) => {
            ["requested".to_owned(), format!("the server has saved {} to a file, which comes first", saved(saving))]
        }
    }
}

/// What a server has saved.
pub fn saved(saving: Saving) -> String {
    let permille = share(saving.keys, known(saving.keys_total)).unwrap_or(0);
    format!("{} of {}", progress::percent(permille), counted(saving.keys_total, "key"))
}

/// How much of the snapshot there is; and, while it is taken, how far it is, how fast it comes and how long the rest
/// takes.
pub fn snapshot(generation: &GenerationStatus) -> [String; 2] {
    let received = Size::bytes(generation.snapshot_bytes).to_string();
    if generation.state == GenerationState::Complete {
        return [received, String::new()];
    }
    let Advance { percent_permille, rate_bytes_per_s, left_seconds } = generation.advance;
    let value = match progress::of_length(generation.length, Unit::Bytes) {
        None => received,
        Some(of) => format!("{received} {of}"),
    };
    let left = left_seconds.map(|seconds| progress::time_left(Duration::from_secs(seconds)));
    let how = [percent_permille.map(progress::percent), Some(progress::rate(rate_bytes_per_s)), left];
    let how: Vec<String> = how.into_iter().flatten().collect();
    [value, how.join(", ")]
}

/// The state of a snapshot, in a word.
pub fn state(state: GenerationState) -> &'static str {
    match state {
        GenerationState::Capturing => "being taken",
        GenerationState::Complete => "whole",
    }
}

/// Bytes of the stream in the journal.
pub fn held(generation: &GenerationStatus) -> u64 {
    generation.journal_end.saturating_sub(generation.journal_first)
}

/// The memory that the tables use.
pub fn in_use(generation: &GenerationStatus) -> String {
    format!("{} of {} in use", Size::bytes(generation.memory_bytes), Size::bytes(generation.memory_limit))
}

/// What was done since the source started: the snapshots, and the rest of the sentence.
pub fn totals(report: &StatusReport) -> [String; 2] {
    let totals = &report.totals;
    let failed = match totals.snapshots_failed {
        0 => String::new(),
        failed => format!("{failed} failed, "),
    };
    let rest = format!(
        "{failed}{} done, {} served over the network",
        counted(totals.replicas_done, "replica"),
        Size::bytes(totals.bytes_served)
    );
    [format!("{} taken", counted(totals.snapshots_taken, "snapshot")), rest]
}

/// What data pass over, in the words of people, by a transport's name.
pub fn medium(transport: &str) -> &str {
    match transport {
        "shm" => "shared memory",
        "verbs" => "RDMA",
        "tcp" => "TCP",
        other => other,
    }
}

/// The background transfer over TCP, once there has been one: before that its rate is a first guess, which looks like a
/// limit.
pub fn measured_upload(report: &StatusReport) -> Option<&UploadStatus> {
    report.upload.as_ref().filter(|_| report.totals.bytes_served > 0)
}

/// What the background transfer over TCP does: its rate, and the rest of the sentence.
pub fn upload(upload: &UploadStatus) -> [String; 2] {
    let UploadStatus { bytes_per_second, queueing_micros, yields } = *upload;
    let why = if yields { "because other traffic fills the network link, " } else { "" };
    let millis = queueing_micros as f64 / 1000.0;
    [format!("up to {}", progress::rate(bytes_per_second)), format!("{why}in the background; {millis:.1} ms of queue")]
}

/// How much of the snapshot a replica has.
pub fn percent(replica: &ReplicaStatus) -> String {
    replica.advance.percent_permille.map_or_else(|| UNKNOWN.to_owned(), progress::percent)
}

/// How fast a replica reads the snapshot; nothing for one that does not.
pub fn reading(replica: &ReplicaStatus) -> String {
    match replica.phase {
        Phase::Transfer => progress::rate(replica.advance.rate_bytes_per_s),
        _ => UNKNOWN.to_owned(),
    }
}

/// How long a replica reads the rest.
pub fn left(replica: &ReplicaStatus) -> String {
    replica.advance.left_seconds.map_or_else(|| UNKNOWN.to_owned(), seconds)
}

/// How far the replica's server is behind. Before it has acknowledged an offset, that would be the whole history.
pub fn lag(replica: &ReplicaStatus) -> String {
    match replica.applied_offset {
        0 => UNKNOWN.to_owned(),
        _ => Size::bytes(replica.journal_lag_bytes).to_string(),
    }
}

/// A time for people.
pub fn seconds(seconds: u64) -> String {
    readable(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{replica, report};

    fn fact(view: &View, name: &str) -> Fact {
        view.facts.iter().find(|fact| fact.name == name).unwrap_or_else(|| panic!("no {name}: {view:?}")).clone()
    }

    #[test]
    fn the_journal_shows_the_slowest_replica_and_one_that_still_loads_needs_all_of_it() {
        let mut near = replica(1, "near", None);
        (near.applied_offset, near.journal_lag_bytes) = (4 << 20, 1 << 20);
        let waiting = ReplicaStatus { phase: Phase::Waiting, ..replica(2, "waiting", None) };
        let dropped = |replicas| {
            let mut report = report(replicas);
            report.generation.as_mut().expect("a snapshot").journal_first = 102;
            report
        };
        let whole = View::of(&report(vec![near.clone(), replica(3, "loading", None)]));
        assert_eq!(fact(&whole, "journal").share, None, "nothing can be lost yet");
        let view = View::of(&dropped(vec![near.clone(), waiting.clone()]));
        assert_eq!(fact(&view, "journal").value, "1 MiB behind");
        assert_eq!(fact(&view, "journal").share.map(|share| share.level), Some(Level::Low));
        let view = View::of(&dropped(vec![near, waiting, replica(3, "loading", None)]));
        assert_eq!(fact(&view, "journal").share.map(|share| (share.of_one, share.level)), Some((1.0, Level::Full)));
        assert_eq!((view.replicas[0].lag.as_str(), view.replicas[2].lag.as_str()), ("1 MiB", "–"));
    }

    #[test]
    fn the_text_of_a_failure_is_on_the_screen_and_not_on_the_page() {
        let mut failed = report(Vec::new());
        (failed.last_failure, failed.totals.snapshots_failed) = ("the server says: a secret".into(), 1);
        let view = View::of(&failed);
        assert!(view.failure.contains("a secret") && fact(&view, "so far").more.starts_with("1 failed, "));
        let page = serde_json::to_string(&view).expect("JSON");
        assert!(!page.contains("secret"), "{page}");
    }

    #[test]
    fn a_page_has_nothing_that_metrics_do_not_show() {
        let mut one = replica(1, "a", None);
        (one.transport_why, one.no_fast_keys, one.protection) =
            ("why-it-is-so".into(), "another-reason".into(), "its-protection".into());
        let report = report(vec![one]);
        let history = report.generation.as_ref().map(|generation| generation.replid.to_string()).expect("a snapshot");
        let page = serde_json::to_string(&View::of(&report)).expect("JSON");
        for hidden in ["why-it-is-so", "another-reason", "its-protection", &history] {
            assert!(!page.contains(hidden), "{hidden}: {page}");
        }
    }

    #[test]
    fn rates_are_added_and_a_silent_replica_is_marked() {
        let (mut one, mut other) = (replica(1, "a", None), replica(2, "b", Some(1)));
        (one.advance.rate_bytes_per_s, other.advance.rate_bytes_per_s, other.silent_seconds) = (1 << 20, 2 << 20, 11);
        let view = View::of(&report(vec![one, other]));
        assert_eq!(view.reading, Rate { bytes_per_second: 3 << 20, text: "3 MiB/s".into() });
        assert_eq!((view.replicas[0].is_silent, view.replicas[1].is_silent), (false, true));
        assert_eq!((view.replicas[0].from.as_str(), view.replicas[1].from.as_str()), ("source", "a"));
    }
}
