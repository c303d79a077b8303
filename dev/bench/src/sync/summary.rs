//! The summary of many outcomes: a table per server, shape and number of replicas, and whether the targets are met.
//!
//! Ratios are of one round: each method against the best of the server's own replication, which is the one with the
//! least median.

use std::fmt::Write as _;
use std::time::Instant;

use remora_lab::Kind;
use serde::{Deserialize, Serialize};

use super::Method;
use crate::{Spread, Target, cell, distinct, equality, least, memory_of_each};

/// One outcome with its circumstances.
#[derive(Clone, Debug, Serialize)]
pub struct Taken {
    /// Name and version of the server.
    pub server: String,
    /// Kind of the server.
    #[serde(skip)]
    pub kind: Kind,
    /// Name of the shape of the data.
    pub shape: String,
    /// The round, from 0.
    pub round: usize,
    /// The outcome.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// All outcomes of a run.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Samples(pub Vec<Taken>);

/// Outcomes that are compared with one another.
struct Group<'a> {
    kind: Kind,
    title: String,
    shape: &'a str,
    replicas: usize,
    taken: Vec<&'a Taken>,
}

/// A figure of an outcome.
type Figure = fn(&Outcome) -> f64;

/// A target.
struct Promise {
    what: &'static str,
    target: Target,
    ratio: Option<Spread>,
}

impl Samples {
    /// The tables, as Markdown.
    pub fn summary(&self) -> String {
        let mut out = String::from(EXPLAINED);
        for group in self.groups() {
            group.summarise(&mut out);
        }
        out
    }

    /// Whether these samples meet all targets that they cover, and all replicas were equal.
    pub fn keep_promises(&self) -> bool {
        let is_equal = |taken: &Taken| taken.outcome.equal != Some(false);
        self.0.iter().all(is_equal) && self.groups().iter().flat_map(Group::promises).all(|promise| promise.is_kept())
    }

    fn groups(&self) -> Vec<Group<'_>> {
        let mut groups: Vec<Group<'_>> = Vec::new();
        for taken in &self.0 {
            let replicas = taken.outcome.replicas;
            let title = format!("{}, {}, N = {replicas}", taken.server, taken.shape);
            match groups.iter_mut().find(|group| group.title == title) {
                Some(group) => group.taken.push(taken),
                None => {
                    groups.push(Group { kind: taken.kind, title, shape: &taken.shape, replicas, taken: vec![taken] })
                }
            }
        }
        groups
    }
}

impl Group<'_> {
    fn summarise(&self, out: &mut String) {
        let _ = writeln!(out, "\n## {}\n\n{HEAD}", self.title);
        let best = self.best_own(|outcome| outcome.seconds);
        for method in self.methods() {
            let Some(wall) = self.spread(method, |outcome| outcome.seconds) else { continue };
            let median = |figure: fn(&Outcome) -> f64| cell(self.spread(method, figure), |spread| spread.median(2));
            let ratio = best.and_then(|best| self.ratio(method, best, |outcome| outcome.seconds));
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                method.name(),
                wall.range(),
                cell(ratio, Spread::range),
                median(|outcome| outcome.primary_cpu),
                median(|outcome| outcome.replica_cpu.iter().sum::<f64>() / outcome.replica_cpu.len().max(1) as f64),
                median(|outcome| outcome.agents_cpu),
                median(|outcome| outcome.phases.snapshot),
                median(|outcome| outcome.phases.transfer),
                median(|outcome| outcome.phases.load),
                median(|outcome| outcome.phases.catch_up),
                median(|outcome| outcome.primary_bytes as f64 / 1e6),
                cell(self.spread(method, |outcome| outcome.full_copies as f64), Spread::whole),
                median(|outcome| outcome.child_memory as f64 / 1e6),
                median(|outcome| outcome.child_seconds),
                median(|outcome| mean(&outcome.replica_memory) / 1e6),
                median(|outcome| outcome.source_memory as f64 / MIB),
                memory_of_each(self.of(method).map(|taken| &taken.outcome.agent_memory)),
                equality(self.of(method).map(|taken| taken.outcome.equal)),
            );
        }
        for promise in self.promises() {
            let _ = writeln!(out, "\n> {}", promise.words());
        }
    }

    /// Methods in the order of their first outcome.
    fn methods(&self) -> Vec<Method> {
        distinct(self.taken.iter().map(|taken| taken.outcome.method))
    }

    fn of(&self, method: Method) -> impl Iterator<Item = &Taken> {
        self.taken.iter().copied().filter(move |taken| taken.outcome.method == method)
    }

    fn spread(&self, method: Method, figure: impl Fn(&Outcome) -> f64) -> Option<Spread> {
        Spread::of(self.of(method).map(|taken| figure(&taken.outcome)))
    }

    /// The server's own method with the least median.
    fn best_own(&self, figure: impl Fn(&Outcome) -> f64 + Copy) -> Option<Method> {
        let own = self.methods().into_iter().filter(|method| method.is_own());
        least(own, |method| self.spread(*method, figure))
    }

    /// Ratios of the rounds that have both.
    fn ratio(&self, ours: Method, rival: Method, figure: impl Fn(&Outcome) -> f64 + Copy) -> Option<Spread> {
        let rounds = |method| self.of(method).map(move |taken| (taken.round, figure(&taken.outcome)));
        Spread::of_ratios(rounds(ours), rounds(rival))
    }

    fn promises(&self) -> Vec<Promise> {
        use Method::{
            OwnBest, OwnDefault, RemoraLate, RemoraModule, RemoraModuleLate, RemoraShm, RemoraTcp, RemoraTuned,
        };
        let wall: Figure = |outcome| outcome.seconds;
        let cpu: Figure = |outcome| outcome.primary_cpu;
        let (shm, tcp) = match (self.kind, self.replicas) {
            (Kind::Valkey9, 1) => (1.2, 1.4),
            (Kind::Redis7, 1) => (1.05, 1.2),
            _ => (1.0, 1.0),
        };
        // `None`: beside the best of the server's own by that figure.
        let mut wanted: Vec<(&'static str, Method, Option<Method>, f64, Figure)> = vec![
            ("wall time by shm beside the best of its own", RemoraShm, None, shm, wall),
            ("wall time by tcp beside the best of its own", RemoraTcp, None, tcp, wall),
            ("a late joiner's processor time at the primary beside one of its own", RemoraLate, None, LATE_MOST, cpu),
        ];
        let of_this = |of: &&ModulePromise| (of.shape, of.kind, of.replicas) == (self.shape, self.kind, self.replicas);
        for of in MODULE.iter().filter(of_this) {
            let what = "the primary's processor time with the module beside the least of its own";
            wanted.push(("wall time with the module beside the best of its own", RemoraModule, None, of.wall, wall));
            wanted.push((what, RemoraModule, None, of.cpu, cpu));
        }
        for (_, most) in DEFAULTS.iter().filter(|(shape, _)| *shape == self.shape) {
            let what = "wall time with the module beside the servers' own defaults";
            wanted.push((what, RemoraModule, Some(OwnDefault), *most, wall));
        }
        if self.shape == TUNED_SHAPE && self.replicas == TUNED_REPLICAS {
            let what = "wall time of a tuned server with default settings beside its own replication with them";
            wanted.push((what, RemoraTuned, Some(OwnDefault), TUNED_MOST, wall));
        }
        let child: Figure = |outcome| outcome.child_memory as f64;
        let what = "memory that the fork child copies with the module beside the least of its own";
        wanted.push((what, RemoraModule, None, CHILD_MOST, child));
        let memory: Figure = |outcome| mean(&outcome.replica_memory);
        let what = "memory of a replica's server with the module beside one that loaded by itself";
        wanted.push((what, RemoraModule, Some(OwnBest), MEMORY_MOST, memory));
        let what = "wall time of a late joiner with the module beside the best of its own";
        wanted.push((what, RemoraModuleLate, None, LATE_MODULE_WALL_MOST, wall));
        let what = "a late joiner's processor time at the primary, with the module, beside one of its own";
        wanted.push((what, RemoraModuleLate, None, LATE_MOST, cpu));
        let promise = |(what, method, rival, most, figure): (_, Method, Option<Method>, f64, Figure)| {
            let rival = rival.or_else(|| self.best_own(figure))?;
            let are_there = self.of(method).next().is_some() && self.of(rival).next().is_some();
            are_there.then(|| Promise { what, target: Target::most(most), ratio: self.ratio(method, rival, figure) })
        };
        wanted.into_iter().filter_map(promise).collect()
    }
}

impl Promise {
    fn is_kept(&self) -> bool {
        self.target.is_met(self.ratio)
    }

    fn words(&self) -> String {
        let verdict = if self.is_kept() { "kept" } else { "**not kept**" };
        let ratio = self
            .ratio
            .map_or("–".to_owned(), |ratio| format!("{:.3} ({:.3}–{:.3})", ratio.median, ratio.low, ratio.high));
        format!("{}: {ratio}, promised {}: {verdict}", self.what, self.target)
    }
}

/// What a sync with the module may cost, as a share of the best of the server's own replication.
struct ModulePromise {
    shape: &'static str,
    kind: Kind,
    replicas: usize,
    wall: f64,
    cpu: f64,
}

const fn module(shape: &'static str, kind: Kind, replicas: usize, wall: f64, cpu: f64) -> ModulePromise {
    ModulePromise { shape, kind, replicas, wall, cpu }
}

/// Targets for the module at both ends.
const MODULE: [ModulePromise; 14] = [
    module("256 × 3.66 MiB", Kind::Valkey9, 1, 0.5, 0.3),
    module("256 × 3.66 MiB", Kind::Redis7, 1, 0.4, 0.3),
    module("256 × 3.66 MiB", Kind::Valkey9, 3, 0.35, 0.3),
    module("256 × 3.66 MiB", Kind::Redis7, 3, 0.3, 0.3),
    module("900 k × 1 KiB", Kind::Valkey9, 1, 0.6, 0.5),
    module("900 k × 1 KiB", Kind::Redis7, 1, 0.5, 0.5),
    module("900 k × 1 KiB", Kind::Valkey9, 3, 0.45, 0.35),
    module("900 k × 1 KiB", Kind::Redis7, 3, 0.4, 0.35),
    module("4 M × 100 B", Kind::Valkey9, 1, 0.45, 0.5),
    module("4 M × 100 B", Kind::Redis7, 1, 0.4, 0.5),
    module("4 M × 100 B", Kind::Valkey9, 3, 0.3, 0.35),
    module("4 M × 100 B", Kind::Redis7, 3, 0.3, 0.35),
    module("2 M of all types", Kind::Valkey9, 1, 0.75, 0.8),
    module("2 M of all types", Kind::Redis7, 1, 0.75, 0.8),
];

/// Targets for the module at both ends: the wall time as a share of that of the servers' own replication with default
/// settings, for each shape of the data.
const DEFAULTS: [(&str, f64); 3] = [("256 × 3.66 MiB", 0.1), ("900 k × 1 KiB", 0.3), ("4 M × 100 B", 0.8)];

/// Target: the wall time beside a server with default settings whose source has `--tune-server`, as a share of own
/// replication with default settings; for this shape and this number of replicas.
const TUNED_MOST: f64 = 0.35;
const TUNED_SHAPE: &str = "256 × 3.66 MiB";
const TUNED_REPLICAS: usize = 3;

/// Target: the memory that the fork child copies, as a share of what the server's own child copies.
const CHILD_MOST: f64 = 1.0;

const MIB: f64 = (1 << 20) as f64;

/// Target: the memory of a replica's server, as a share of that of one that loaded by itself.
const MEMORY_MOST: f64 = 1.02;

/// Target: the wall time of a late joiner with the module, as a share of an own sync.
const LATE_MODULE_WALL_MOST: f64 = 0.4;

fn mean(numbers: &[u64]) -> f64 {
    numbers.iter().sum::<u64>() as f64 / numbers.len().max(1) as f64
}

/// Target: the share of one own sync that a late joiner may cost the primary.
const LATE_MOST: f64 = 0.02;

const EXPLAINED: &str = "# full_sync (seconds)

Medians over the rounds, in brackets the least and the greatest value. *ratio*: wall time of each round,
divided by that of the server's own method with the least median, in the same round. *CPU*: processor seconds of the primary with its children, of one replica on average, of all agents
together (the source's from its start, including the touching of its memory; for a copier, of its threads). The four phases are those
of the last replica and add up to its wall time. If the server loads while the bytes arrive, its loading is in *transfer*. Before each
trial, as much memory as its replicas will need is touched and freed, so that none of them pays for pages that the machine's host has
not provided yet. *full copies*: those that the primary was asked for and gave (`sync_full`). *child MB*: memory that the primary and its fork child had to copy, as the server reports it; *child s*: how long it had one; *replica MB*: memory that a replica's server
uses afterwards (`used_memory`), on average. *source MiB* and
*agents MiB*: peak memory of the source agent, which has memory for the whole snapshot, and of each replica agent, which has the default, in
the round in which they had most together (–: no agent).
";

const HEAD: &str = "| method | wall s | ratio | primary CPU | replica CPU | agents CPU | snapshot | transfer | load | catch-up | MB out of the primary | full copies | child MB | child s | replica MB | source MiB | agents MiB | equal |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|";

// The result of a trial.

/// One sync of N replicas by one method. All times are in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The method.
    pub method: Method,
    /// Number of replicas.
    pub replicas: usize,
    /// Wall time from the first REPLICAOF, or the start of the first `remora replica`, until the last replica had
    /// caught up.
    pub seconds: f64,
    /// Wall time until the first replica had caught up.
    pub first_seconds: f64,
    /// The moments between which the sync ran.
    #[serde(skip)]
    pub window: Option<(Instant, Instant)>,
    /// Processor time of the primary, including its fork children and the writer's commands.
    pub primary_cpu: f64,
    /// Processor time of each replica's server.
    pub replica_cpu: Vec<f64>,
    /// Processor time of the source agent from its start (including the touching of its memory) and of all replica
    /// agents; for a copier, that of its threads, and for a tool that of its processes.
    pub agents_cpu: f64,
    /// Processor time of the source agent, which [`Outcome::agents_cpu`] includes; 0 without a source.
    pub source_cpu: f64,
    /// The part of it that the source had used when it was ready: nearly all of it the first touch of its memory.
    pub source_ready_cpu: f64,
    /// The phases of the last replica.
    pub phases: Phases,
    /// Bytes that left the primary.
    pub primary_bytes: u64,
    /// Bytes that left the primary's host by its cable, all programs together, with TCP's headers; `None` on loopback.
    pub host_bytes: Option<u64>,
    /// Full copies that the primary's replicas, and the tools that act as one, asked for and got (`sync_full`).
    pub full_copies: u64,
    /// Peak of the primary's private memory, in bytes, and what its fork child had to copy.
    pub peak_memory: u64,
    /// What the primary and its fork child had to copy, in bytes, as the server reports it. 0 if none was forked.
    pub child_memory: u64,
    /// How long the primary had a fork child.
    pub child_seconds: f64,
    /// Memory that each replica's server uses afterwards (`used_memory`), in bytes.
    pub replica_memory: Vec<u64>,
    /// Commands per second that the writer achieved; 0 without a writer.
    pub writes_per_second: f64,
    /// Peak memory of the source agent, including its tables; 0 without a source.
    pub source_memory: u64,
    /// Peak memory of each replica agent, including the slots that it keeps for others, in bytes.
    pub agent_memory: Vec<u64>,
    /// Whether digest, replid, offset, functions and expiries of all replicas equal the primary's (for a copier: the
    /// digest only); `None` if that was not checked.
    pub equal: Option<bool>,
    /// The difference, if there is one.
    pub differences: Vec<String>,
}

impl Outcome {
    /// What a reader of the figures must know besides them: servers that did not continue from the file on which they
    /// started. The time of a second copy is part of theirs.
    pub fn remark(&self) -> Option<String> {
        let again = self.full_copies.saturating_sub(self.replicas as u64);
        (self.method == Method::RdbFile && again > 0).then(|| {
            format!("SECOND FULL COPY for {again} of {} servers that had started on their file", self.replicas)
        })
    }
}

/// Consecutive phases: their sum is the whole time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Phases {
    /// Until the snapshot's first bytes arrived: the start of the agent, delays, the fork.
    pub snapshot: f64,
    /// Until the last bytes had arrived. A server that loads meanwhile spends most of its loading here.
    pub transfer: f64,
    /// Until the server had loaded them.
    pub load: f64,
    /// Until it had caught up with the primary, including the hand-off.
    pub catch_up: f64,
}

impl Phases {
    /// From the summary of `remora replica --json`. The time before the agent started is added to its first phase.
    pub(crate) fn of_agent(summary: &Summary, whole: f64) -> Phases {
        let catch_up = summary.catch_up_seconds + summary.hand_off_seconds;
        let known = summary.transfer_seconds + summary.load_seconds + catch_up;
        Phases {
            snapshot: (whole - known).max(0.0),
            transfer: summary.transfer_seconds,
            load: summary.load_seconds,
            catch_up,
        }
    }

    /// The sum of all phases.
    pub fn sum(&self) -> f64 {
        self.snapshot + self.transfer + self.load + self.catch_up
    }
}

/// The needed parts of the summary that `remora replica --json` writes.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Summary {
    transfer_seconds: f64,
    load_seconds: f64,
    catch_up_seconds: f64,
    hand_off_seconds: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Phases;

    fn taken(method: Method, replicas: usize, round: usize, seconds: f64, primary_cpu: f64) -> Taken {
        let outcome = Outcome {
            method,
            replicas,
            seconds,
            first_seconds: seconds,
            window: None,
            primary_cpu,
            replica_cpu: vec![1.0; replicas],
            agents_cpu: 0.0,
            source_cpu: 0.0,
            source_ready_cpu: 0.0,
            phases: Phases { transfer: seconds, ..Phases::default() },
            primary_bytes: 1_000_000,
            host_bytes: None,
            full_copies: replicas as u64,
            peak_memory: 0,
            child_memory: 1 << 20,
            child_seconds: 0.5,
            replica_memory: vec![2_000_000; replicas],
            writes_per_second: 0.0,
            source_memory: 0,
            agent_memory: Vec::new(),
            equal: Some(true),
            differences: Vec::new(),
        };
        Taken { server: "Valkey 9".into(), kind: Kind::Valkey9, shape: "big".into(), round, outcome }
    }

    #[test]
    fn ours_is_compared_with_the_best_of_its_own_in_the_same_round() {
        let mut samples = Samples::default();
        for (round, speed) in [1.0, 2.0, 4.0].into_iter().enumerate() {
            samples.0.push(taken(Method::OwnDefault, 1, round, 9.0 * speed, 3.0));
            samples.0.push(taken(Method::OwnBest, 1, round, 2.0 * speed, 1.0));
            samples.0.push(taken(Method::Copier, 1, round, 0.1, 1.0));
            samples.0.push(taken(Method::RemoraShm, 1, round, 2.2 * speed, 1.0));
        }
        let groups = samples.groups();
        let ratio = groups.first().and_then(|group| group.ratio(Method::RemoraShm, Method::OwnBest, |o| o.seconds));
        assert!(ratio.is_some_and(|ratio| (ratio.low - 1.1).abs() < 1e-9 && (ratio.high - 1.1).abs() < 1e-9));
        assert!(samples.keep_promises());
        samples.0.push(taken(Method::RemoraTcp, 1, 0, 3.0, 1.0));
        assert!(!samples.keep_promises(), "1.5 times the server's own best exceeds the target of 1.4");
        assert!(samples.summary().contains("**not kept**"));
    }

    #[test]
    fn the_module_is_judged_by_its_own_targets() {
        let with_module = |seconds, cpu| {
            let mut samples =
                Samples(vec![taken(Method::OwnBest, 1, 0, 2.0, 1.0), taken(Method::RemoraModule, 1, 0, seconds, cpu)]);
            samples.0.iter_mut().for_each(|taken| taken.shape = "256 × 3.66 MiB".into());
            samples
        };
        assert!(with_module(0.9, 0.2).keep_promises());
        assert!(!with_module(1.1, 0.2).keep_promises(), "0.55 of the wall time exceeds 0.5");
        assert!(!with_module(0.9, 0.4).keep_promises(), "0.4 of the processor time exceeds 0.3");
    }

    #[test]
    fn the_module_is_judged_against_the_servers_defaults_and_by_its_childs_memory() {
        let with_module = |seconds, memory| {
            let mut samples = Samples(vec![
                taken(Method::OwnDefault, 1, 0, 10.0, 9.0),
                taken(Method::OwnBest, 1, 0, 3.0, 9.0),
                taken(Method::RemoraModule, 1, 0, seconds, 1.0),
            ]);
            samples.0.iter_mut().for_each(|taken| taken.shape = "256 × 3.66 MiB".into());
            samples.0.iter_mut().for_each(|taken| taken.outcome.child_memory = 400_000);
            samples.0[2].outcome.child_memory = memory;
            samples
        };
        assert!(with_module(0.9, 400_000).keep_promises());
        assert!(!with_module(1.1, 400_000).keep_promises(), "0.11 of the defaults' wall time exceeds 0.1");
        assert!(
            !with_module(0.9, 420_000).keep_promises(),
            "1.05 of the memory exceeds that of the server's own child"
        );
        let summary = with_module(0.9, 420_000).summary();
        assert!(summary.contains("beside the servers' own defaults: 0.090 (0.090–0.090), promised ≤ 0.1: kept"));
        assert!(summary.contains("1.050 (1.050–1.050), promised ≤ 1: **not kept**"), "{summary}");
    }

    #[test]
    fn the_memory_of_every_agent_is_in_the_table() {
        let mut three = taken(Method::RemoraTcp, 3, 0, 2.0, 1.0);
        three.outcome.agent_memory = vec![75 << 20, 70 << 20, 71 << 20];
        let summary = Samples(vec![three, taken(Method::OwnBest, 3, 0, 2.0, 1.0)]).summary();
        assert!(summary.contains("| 1.05 | 0.50 | 2.00 | 0.00 | 70, 71, 75 | yes |"), "{summary}");
        assert!(summary.contains("| 1.05 | 0.50 | 2.00 | 0.00 | – | yes |"), "{summary}");
    }

    #[test]
    fn a_late_joiner_that_costs_the_primary_too_much_misses_a_target() {
        let with_late =
            |cpu| Samples(vec![taken(Method::OwnBest, 1, 0, 2.0, 1.0), taken(Method::RemoraLate, 1, 0, 9.0, cpu)]);
        assert!(with_late(0.019).keep_promises());
        assert!(!with_late(0.021).keep_promises());
    }

    #[test]
    fn replicas_that_differ_fail_the_run() {
        let mut sample = taken(Method::OwnBest, 1, 0, 2.0, 1.0);
        sample.outcome.equal = Some(false);
        assert!(!Samples(vec![sample]).keep_promises());
    }

    #[test]
    fn a_server_that_did_not_continue_from_its_file_is_remarked() {
        let with = |method, full_copies| {
            let mut sample = taken(method, 3, 0, 2.0, 1.0);
            sample.outcome.full_copies = full_copies;
            sample.outcome.remark()
        };
        assert_eq!(with(Method::RdbFile, 3), None);
        let remark = with(Method::RdbFile, 5).unwrap_or_default();
        assert!(remark.starts_with("SECOND FULL COPY for 2 of 3 servers"), "{remark}");
        assert_eq!(with(Method::OwnBest, 5), None);
    }

    #[test]
    fn time_unknown_to_the_agent_is_added_to_its_first_phase() {
        let summary =
            Summary { transfer_seconds: 2.0, load_seconds: 0.5, catch_up_seconds: 0.25, hand_off_seconds: 0.25 };
        let phases = Phases::of_agent(&summary, 4.0);
        assert_eq!(phases, Phases { snapshot: 1.0, transfer: 2.0, load: 0.5, catch_up: 0.5 });
        assert_eq!(phases.sum(), 4.0);
    }
}
