//! The tables, as Markdown, from kept figures.

use std::fmt::Write as _;
use std::path::Path;

use clap::ValueEnum;

use super::Figure;
use crate::suite::{Kept, conversations, devices, points, scaling, syncs};
use crate::sync::Method;
use crate::{Spread, memory_of_each};

/// Figures that are compared with one another: of one server, one network, one size, one run.
pub(super) struct Group<'a> {
    /// The run's label.
    pub(super) label: &'a str,
    pub(super) server: &'a str,
    pub(super) network: &'a str,
    pub(super) bytes: u64,
    /// What the values are, if they are not the usual ones.
    pub(super) content: &'a str,
    /// The rate measured by iperf3, in bytes per second.
    pub(super) link: Option<f64>,
    pub(super) points: Vec<&'a syncs::Point>,
}

/// The groups of these runs.
pub(super) fn groups<'a>(runs: &[&'a Kept<syncs::Point>]) -> Vec<Group<'a>> {
    let mut all: Vec<Group<'a>> = Vec::new();
    for kept in runs {
        let mut groups: Vec<Group<'a>> = Vec::new();
        for point in &kept.points {
            let is_it = |group: &&mut Group<'_>| {
                let is_same_data = group.bytes == point.bytes && group.content == point.content;
                group.server == point.server && group.network == point.network && is_same_data
            };
            if let Some(group) = groups.iter_mut().find(is_it) {
                group.points.push(point);
                continue;
            }
            let link = kept.links.iter().rfind(|link| link.network == point.network).map(|link| link.bytes_per_second);
            let (server, network) = (point.server.as_str(), point.network.as_str());
            let (bytes, content) = (point.bytes, point.content.as_str());
            groups.push(Group { label: &kept.label, server, network, bytes, content, link, points: vec![point] });
        }
        all.extend(groups);
    }
    all.sort_by_key(|group| (group.server, group.network, std::cmp::Reverse(group.bytes), group.label));
    all
}

impl Group<'_> {
    /// Numbers of replicas, ascending.
    pub(super) fn numbers(&self) -> Vec<usize> {
        let mut numbers: Vec<usize> = self.points.iter().map(|point| point.replicas).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Methods, in the order of all tables.
    pub(super) fn methods(&self) -> Vec<Method> {
        order().filter(|method| self.points.iter().any(|point| point.method == *method)).collect()
    }

    pub(super) fn spread(
        &self,
        method: Method,
        replicas: usize,
        figure: impl Fn(&syncs::Point) -> f64,
    ) -> Option<Spread> {
        let of = self.points.iter().filter(|point| point.method == method && point.replicas == replicas);
        Spread::of(of.map(|point| figure(point)))
    }

    pub(super) fn seconds(&self, method: Method, replicas: usize) -> Option<Spread> {
        self.spread(method, replicas, |point| point.seconds)
    }

    /// The server's own replication with the shortest time.
    pub(super) fn best_own(&self, replicas: usize) -> Option<Method> {
        let own = self.methods().into_iter().filter(|method| method.is_own());
        let medians = own.filter_map(|method| Some((method, self.seconds(method, replicas)?.median)));
        medians.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(method, _)| method)
    }

    /// Our method with the shortest time, beside those of whole syncs: not a late joiner, and none that is disturbed.
    pub(super) fn best_ours(&self, replicas: usize) -> Option<Method> {
        let whole =
            |method: &Method| method.is_ours() && method.joins().is_none() && *method != Method::RemoraRelayKilled;
        let ours = self.methods().into_iter().filter(whole);
        let medians = ours.filter_map(|method| Some((method, self.seconds(method, replicas)?.median)));
        medians.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(method, _)| method)
    }

    /// The method's name in tables. Agents with relay had memory for the whole data set in runs that do not record
    /// their memory, and have the default in later runs: these are two configurations.
    pub(super) fn name(&self, method: Method) -> String {
        let mut of = self.points.iter().filter(|point| point.method == method);
        let roomy = method.serves_peers() == Some(true) && of.any(|point| point.agent_memory.is_empty());
        if roomy { format!("{}, memory for all", method.name()) } else { method.name().to_owned() }
    }

    /// Peak memory of the replica agents in MiB.
    fn agent_memory(&self, method: Method, replicas: usize) -> String {
        let of = self.points.iter().filter(|point| point.method == method && point.replicas == replicas);
        memory_of_each(of.map(|point| &point.agent_memory))
    }

    /// The median of the source agent's processor seconds.
    fn source_cpu(&self, method: Method, replicas: usize) -> String {
        let of = self.points.iter().filter(|point| point.method == method && point.replicas == replicas);
        let spread = method.is_ours().then(|| Spread::of(of.filter_map(|point| point.source_cpu))).flatten();
        spread.map_or("–".to_owned(), |spread| format!("{:.2}", spread.median))
    }

    fn equality(&self, method: Method, replicas: usize) -> &'static str {
        let of = self.points.iter().filter(|point| point.method == method && point.replicas == replicas);
        equality(of.map(|point| point.equal))
    }

    pub(super) fn title(&self) -> String {
        let link = self.link.map_or(String::new(), |rate| format!(" (iperf3: {:.1} MB/s)", rate / 1e6));
        let label = if self.label.is_empty() { String::new() } else { format!(", run {}", self.label) };
        let content = if self.content.is_empty() { String::new() } else { format!(" of {}", self.content) };
        let mib = self.bytes as f64 / f64::from(1 << 20);
        format!("{}, {}{link}, {mib:.0} MiB{content}{label}", self.server, self.network)
    }

    fn table(&self, out: &mut String, figure: Option<&Figure>, to_plots: &Path) {
        let _ = writeln!(out, "\n### {}\n", self.title());
        if let Some(figure) = figure {
            let _ = writeln!(out, "{}\n", figure.image(to_plots));
        }
        let _ = writeln!(out, "{SYNC_HEAD}");
        for replicas in self.numbers() {
            let best = self.best_own(replicas).and_then(|best| self.seconds(best, replicas));
            for method in self.methods() {
                let Some(last) = self.seconds(method, replicas) else { continue };
                let median = |figure: fn(&syncs::Point) -> f64, digits: usize| {
                    let spread = self.spread(method, replicas, figure);
                    spread.map_or("–".to_owned(), |spread| format!("{:.digits$}", spread.median))
                };
                let ratio = best.map_or("–".to_owned(), |best| format!("{:.2}", last.median / best.median));
                let _ = writeln!(
                    out,
                    "| {replicas} | {} | {} | {ratio} | {} | {} / {} / {} / {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                    self.name(method),
                    with_range(last),
                    median(|point| point.first_seconds, 2),
                    median(|point| point.snapshot, 2),
                    median(|point| point.transfer, 2),
                    median(|point| point.load, 2),
                    median(|point| point.catch_up, 2),
                    median(|point| point.sent as f64 / 1e6, 0),
                    median(|point| point.sent as f64 / point.bytes as f64, 2),
                    median(|point| point.primary_cpu, 2),
                    self.source_cpu(method, replicas),
                    median(|point| point.peak_memory as f64 / f64::from(1 << 20), 0),
                    median(|point| point.source_memory as f64 / f64::from(1 << 20), 0),
                    self.agent_memory(method, replicas),
                    self.equality(method, replicas),
                );
            }
        }
    }
}

/// The contents, the figures and the tables of `sync`. `figures`: one for each group, in their order.
pub fn sync(runs: &[&Kept<syncs::Point>], figures: &[Figure], to_plots: &Path) -> String {
    let groups = groups(runs);
    let mut out = if figures.is_empty() { String::new() } else { String::from("\nWhat the figures show:\n\n") };
    for (group, figure) in groups.iter().zip(figures) {
        let _ = writeln!(out, "- [{}](#{}): {}.", group.title(), anchor(&group.title()), figure.sentence);
    }
    if !figures.is_empty() {
        out.push('\n');
    }
    out.push_str(SYNC_EXPLAINED);
    for (place, group) in groups.iter().enumerate() {
        group.table(&mut out, figures.get(place), to_plots);
    }
    out
}

/// The anchor that Markdown's renderers give a heading.
fn anchor(heading: &str) -> String {
    let lower = heading.to_lowercase();
    lower
        .chars()
        .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// The table of `devices`.
pub fn devices(runs: &[&Kept<devices::Point>]) -> String {
    let mut out = String::from("| device | tool | MB/s: median | least | most |\n|---|---|---:|---:|---:|\n");
    let Some(newest) = runs.last() else { return out };
    let mut seen = Vec::new();
    for point in &newest.points {
        if seen.contains(&(&point.device, &point.tool)) {
            continue;
        }
        seen.push((&point.device, &point.tool));
        let same = |other: &&devices::Point| other.device == point.device && other.tool == point.tool;
        let Some(rate) = points::spread(&newest.points.iter().filter(same).collect::<Vec<_>>()) else { continue };
        let _ = writeln!(
            out,
            "| {} | {} | {:.1} | {:.1} | {:.1} |",
            point.device, point.tool, rate.median, rate.low, rate.high
        );
    }
    out
}

/// The tables of `scaling`.
pub fn scaling(runs: &[&Kept<scaling::Point>]) -> String {
    let mut out = String::from(SCALING_EXPLAINED);
    let Some(newest) = runs.last() else { return out };
    for (grows, title) in [("size", "The data set grows, in values of 1 MiB"), ("value", "The values grow")] {
        let points: Vec<&scaling::Point> = newest.points.iter().filter(|point| point.grows == grows).collect();
        let Some(server) = points.first().map(|point| &point.server) else { continue };
        let _ = writeln!(out, "\n### {server}, loopback, one replica: {title}\n\n{SCALING_HEAD}");
        for method in order() {
            for (bytes, value_bytes) in sizes(&points) {
                let of = || {
                    points
                        .iter()
                        .filter(|point| (point.bytes, point.value_bytes, point.method) == (bytes, value_bytes, method))
                };
                let Some(wall) = Spread::of(of().map(|point| point.seconds)) else { continue };
                let median = |figure: fn(&scaling::Point) -> f64| {
                    Spread::of(of().map(|point| figure(point))).map_or(f64::NAN, |spread| spread.median)
                };
                let gib = bytes as f64 / f64::from(1 << 30);
                let _ = writeln!(
                    out,
                    "| {} | {gib:.3} | {} | {} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} | {} |",
                    method.name(),
                    crate::bytes(value_bytes),
                    with_range(wall),
                    wall.median / gib,
                    median(|point| point.primary_cpu) / gib,
                    median(|point| point.others_cpu) / gib,
                    median(|point| point.peak_memory as f64 / f64::from(1 << 20)),
                    median(|point| point.source_memory as f64 / f64::from(1 << 20)),
                    memory_of_each(of().map(|point| &point.agent_memory)),
                );
            }
        }
        if grows == "size" {
            slopes(&mut out, &points);
        }
    }
    out
}

/// The table of `conversations`.
pub fn conversations(runs: &[&Kept<conversations::Point>]) -> String {
    let mut out = String::from(CONVERSATIONS_EXPLAINED);
    for kept in runs {
        let mut numbers: Vec<u32> = kept.points.iter().map(|point| point.replicas).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let Some(server) = kept.points.first().map(|point| &point.server) else { continue };
        let _ = writeln!(out, "\n### {server}, loopback\n\n{CONVERSATIONS_HEAD}");
        for replicas in numbers {
            let median = |figure: fn(&conversations::Point) -> f64| {
                let of = kept.points.iter().filter(|point| point.replicas == replicas);
                Spread::of(of.map(figure)).map_or(f64::NAN, |spread| spread.median)
            };
            let kib = |bytes: u64| bytes as f64 / 1024.0;
            let per_replica = median(|point| point.private.saturating_sub(point.private_before) as f64) / 1024.0;
            let _ = writeln!(
                out,
                "| {replicas} | {:.2} | {:.0} | {:.3} | {:.0} | {:.3} | {:.0} | {:.0} | {:.0} | {:.1} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} | {} |",
                median(|point| point.join_seconds),
                median(|point| point.receiving.reports),
                median(|point| point.receiving.cpu),
                median(|point| point.staying.reports),
                median(|point| point.staying.cpu),
                median(|point| point.descriptors as f64),
                median(|point| point.threads as f64),
                kib(median(|point| point.peak as f64) as u64) / 1024.0,
                per_replica / f64::from(replicas),
                median(|point| point.status_seconds) * 1000.0,
                median(|point| point.alone_seconds),
                median(|point| point.beside_seconds / point.alone_seconds),
                median(|point| point.beside_staying_seconds / point.alone_seconds),
                median(|point| point.leave_seconds),
                equality(kept.points.iter().filter(|point| point.replicas == replicas).map(|point| point.equal)),
            );
        }
    }
    out
}

/// Whether all replicas that were compared are equal, in the word of a table.
fn equality(looked: impl Iterator<Item = Option<bool>>) -> &'static str {
    match looked.flatten().reduce(|all, equal| all && equal) {
        None => "–",
        Some(true) => "yes",
        Some(false) => "**NO**",
    }
}

fn slopes(out: &mut String, points: &[&scaling::Point]) {
    for method in order() {
        let of: Vec<(f64, f64)> = (points.iter().filter(|point| point.method == method))
            .map(|point| (point.bytes as f64 / f64::from(1 << 30), point.seconds))
            .collect();
        let Some((slope, start)) = line_through(&of) else { continue };
        let _ = writeln!(out, "\n> {}: {start:.2} s and {slope:.2} s for each GiB (least squares)", method.name());
    }
}

/// Slope and intercept of the least-squares line; `None` for fewer than two different x values.
fn line_through(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let count = points.len() as f64;
    let (x, y) = (points.iter().map(|p| p.0).sum::<f64>() / count, points.iter().map(|p| p.1).sum::<f64>() / count);
    let spread: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    let together: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    (spread > 0.0).then(|| (together / spread, y - together / spread * x))
}

/// Sizes of data set and of values, ascending.
pub(super) fn sizes(points: &[&scaling::Point]) -> Vec<(u64, u64)> {
    let mut sizes: Vec<(u64, u64)> = points.iter().map(|point| (point.bytes, point.value_bytes)).collect();
    sizes.sort_unstable_by_key(|(bytes, value_bytes)| (*value_bytes, *bytes));
    sizes.dedup();
    sizes
}

fn with_range(spread: Spread) -> String {
    if spread.high - spread.low < 0.005 {
        return format!("{:.2}", spread.median);
    }
    format!("{:.2} ({:.2}–{:.2})", spread.median, spread.low, spread.high)
}

/// The order of methods in every table: the servers' own, the copiers, ours, as in their definition.
pub(super) fn order() -> impl Iterator<Item = Method> {
    Method::value_variants().iter().copied()
}

const SYNC_EXPLAINED: &str = "\
Medians over the rounds, in brackets the least and the greatest value. *ratio*: the median of *last replica s* divided by that of the
server's own method with the least median at the same N. The four phases (snapshot / transfer / load / catch-up) are those of the last replica and add up to its time. If the server loads
while the bytes arrive, its loading is in *transfer*. *out*: bytes out of the primary's host over its cable, of all programs (on loopback:
out of the primary's process), and as a multiple of the data set. *CPU*: of the primary and its fork child, and of the source agent from its start, with the first touch of its memory. *memory*: the peak of the
primary's private memory, of the source agent beside it, including its table, and of each replica agent, including the slots that it
keeps for others (in the round in which they had most together; of more than four agents the least, the greatest and the sum; –: not
recorded). *memory for all*: each replica agent had `--memory` for the whole data set and 256 MiB more; without
these words it had the default.
";

const SYNC_HEAD: &str = "\
| N | method | last replica s | ratio | first s | phases s | out MB | × data | primary CPU s | source CPU s | primary MiB | source MiB | replica agents MiB | equal |
|---:|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---|";

const SCALING_EXPLAINED: &str = "Medians over the rounds, in brackets the least and the greatest value. *others*: the replica's server and all agents. *MiB*: the peak of the primary's private memory, of the source agent and of the replica agent (the greatest of the rounds; –: not recorded).\n";

const SCALING_HEAD: &str = "\
| method | GiB | values of | wall s | s/GiB | primary CPU s/GiB | others CPU s/GiB | primary MiB | source MiB | replica agent MiB |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|";

const CONVERSATIONS_EXPLAINED: &str = "\
Medians over the rounds. *join*: from the first connect until the last conversation had the source's offer. *receiving*: each conversation reports
one more slot 20 times a second, as a replica does that receives; *staying*: it has nothing new to report, and does so twice a second. *CPU*: processor
seconds of the source per second. *peak MiB* includes the table; *KiB each*: private memory of the source for each conversation. *status*: the command
`remora status --json`, as a process. *alone*: a real replica over shared memory without the conversations; *beside*: the same with them, as a
multiple, while they are receiving and while they are staying. *leave*: until the source lists none of them. *equal*: the real replicas have the
primary's data (–: not compared).
";

const CONVERSATIONS_HEAD: &str = "\
| N | join s | receiving: reports/s | CPU s/s | staying: reports/s | CPU s/s | descriptors | threads | peak MiB | KiB each | status ms | alone s | beside receiving | beside staying | leave s | equal |
|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|";

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    pub(in super::super) fn point(
        method: Method,
        replicas: usize,
        round: usize,
        seconds: f64,
        sent: u64,
    ) -> syncs::Point {
        syncs::Point {
            server: "Valkey 9.1".into(),
            network: "1 Gb/s".into(),
            bytes: 1_000_000_000,
            content: String::new(),
            method,
            replicas,
            round,
            seconds,
            first_seconds: seconds,
            snapshot: 0.0,
            transfer: seconds,
            load: 0.0,
            catch_up: 0.0,
            sent,
            full_copies: None,
            primary_cpu: 1.0,
            replicas_cpu: 1.0,
            agents_cpu: 0.0,
            source_cpu: None,
            source_ready_cpu: None,
            peak_memory: 1 << 30,
            source_memory: 0,
            agent_memory: Vec::new(),
            equal: Some(true),
        }
    }

    pub(in super::super) fn kept(points: Vec<syncs::Point>) -> Kept<syncs::Point> {
        let mut kept = Kept::begin("sync", None);
        kept.points = points;
        kept.links = vec![crate::suite::network::Link { network: "1 Gb/s".into(), bytes_per_second: 120e6 }];
        kept
    }

    #[test]
    fn figures_of_different_runs_are_not_mixed() {
        let one = kept(vec![point(Method::OwnBest, 1, 0, 99.0, 1)]);
        let mut other = kept(vec![point(Method::OwnBest, 1, 0, 8.0, 1), point(Method::OwnBest, 1, 1, 9.0, 1)]);
        other.label = "again".into();
        let table = sync(&[&one, &other], &[], Path::new(""));
        assert!(table.contains("8.50 (8.00–9.00)") && table.contains("| 99.00 |"), "{table}");
        assert!(table.contains("1 Gb/s (iperf3: 120.0 MB/s), 954 MiB, run again"), "{table}");
    }

    #[test]
    fn the_memory_of_every_replica_agent_is_printed() {
        let with = |method, replicas, agents: &[u64]| syncs::Point {
            agent_memory: agents.iter().map(|mib| mib << 20).collect(),
            ..point(method, replicas, 0, 8.0, 1)
        };
        let eight = [70, 71, 72, 73, 74, 75, 76, 79];
        let points = vec![
            with(Method::RemoraTcp, 3, &[75, 70, 71]),
            with(Method::RemoraTcp, 8, &eight),
            point(Method::OwnBest, 3, 0, 9.0, 1),
        ];
        let table = sync(&[&kept(points)], &[], Path::new(""));
        let ends = |start: &str, end: &str| table.lines().any(|line| line.starts_with(start) && line.ends_with(end));
        assert!(ends("| 3 | Remora tcp, best |", "| 70, 71, 75 | yes |"), "{table}");
        assert!(ends("| 8 | Remora tcp, best |", "| 70–79, sum 590 | yes |"), "{table}");
        assert!(ends("| 3 | own, best |", "| – | yes |"), "{table}");
    }

    #[test]
    fn replicas_that_differ_are_marked_clearly() {
        let mut wrong = point(Method::OwnBest, 1, 0, 8.0, 1);
        wrong.equal = Some(false);
        assert!(sync(&[&kept(vec![wrong])], &[], Path::new("")).contains("**NO**"));
    }

    #[test]
    fn the_slope_of_a_line_is_found() {
        let (slope, start) = line_through(&[(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)]).unwrap();
        assert!((slope - 2.0).abs() < 1e-9 && (start - 1.0).abs() < 1e-9);
        assert_eq!(line_through(&[(1.0, 3.0), (1.0, 4.0)]), None);
    }
}
