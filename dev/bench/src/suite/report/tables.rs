//! The tables, as Markdown, from kept figures.

use std::fmt::Write as _;
use std::path::Path;

use clap::ValueEnum;

use super::Figure;
use crate::suite::{Kept, feel, name_of, syncs};
use crate::sync::Method;
use crate::{Spread, Target, cell, equality, least, memory_of_each};

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
        Spread::of(self.of(method, replicas).map(figure))
    }

    fn of(&self, method: Method, replicas: usize) -> impl Iterator<Item = &syncs::Point> {
        self.points.iter().copied().filter(move |point| point.method == method && point.replicas == replicas)
    }

    pub(super) fn seconds(&self, method: Method, replicas: usize) -> Option<Spread> {
        self.spread(method, replicas, |point| point.seconds)
    }

    /// The server's own replication with the shortest time.
    pub(super) fn best_own(&self, replicas: usize) -> Option<Method> {
        let own = self.methods().into_iter().filter(|method| method.is_own());
        least(own, |method| self.seconds(*method, replicas))
    }

    /// Our method with the shortest time, beside those of whole syncs: not a late joiner, and none that is disturbed.
    pub(super) fn best_ours(&self, replicas: usize) -> Option<Method> {
        let whole =
            |method: &Method| method.is_ours() && method.joins().is_none() && *method != Method::RemoraRelayKilled;
        least(self.methods().into_iter().filter(whole), |method| self.seconds(*method, replicas))
    }

    /// The method's name in tables. Agents with relay had memory for the whole data set in runs that do not record
    /// their memory, and have the default in later runs: these are two configurations.
    pub(super) fn name(&self, method: Method) -> String {
        let mut of = self.points.iter().filter(|point| point.method == method);
        let roomy = method.serves_peers() == Some(true) && of.any(|point| point.agent_memory.is_empty());
        if roomy { format!("{}, memory for all", method.name()) } else { method.name().to_owned() }
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
                    cell(self.spread(method, replicas, figure), |spread| spread.median(digits))
                };
                let of = || self.of(method, replicas);
                let source_cpu = Spread::of(of().filter_map(|point| point.source_cpu).filter(|_| method.is_ours()));
                let ratio = best.map_or("–".to_owned(), |best| format!("{:.2}", last.median / best.median));
                let _ = writeln!(
                    out,
                    "| {replicas} | {} | {} | {ratio} | {} | {} / {} / {} / {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                    self.name(method),
                    last.range(),
                    median(|point| point.first_seconds, 2),
                    median(|point| point.snapshot, 2),
                    median(|point| point.transfer, 2),
                    median(|point| point.load, 2),
                    median(|point| point.catch_up, 2),
                    median(|point| point.sent as f64 / 1e6, 0),
                    median(|point| point.sent as f64 / point.bytes as f64, 2),
                    median(|point| point.primary_cpu, 2),
                    cell(source_cpu, |spread| spread.median(2)),
                    median(|point| point.peak_memory as f64 / f64::from(1 << 20), 0),
                    median(|point| point.source_memory as f64 / f64::from(1 << 20), 0),
                    memory_of_each(of().map(|point| &point.agent_memory)),
                    equality(of().map(|point| point.equal)),
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

// What clients noticed, as Markdown, and beside the server's own replication: the figures, the tables and the targets
// compare the same cells.

/// What clients noticed under the same circumstances, round by round.
pub(super) struct Cell<'a> {
    /// The run's label.
    pub(super) label: &'a str,
    pub(super) first: &'a feel::Point,
    pub(super) points: Vec<&'a feel::Point>,
}

impl Cell<'_> {
    pub(super) fn median(&self, figure: impl Fn(&feel::Point) -> f64) -> f64 {
        Spread::of(self.points.iter().map(|point| figure(point))).map_or(f64::NAN, |spread| spread.median)
    }

    /// The ratios to another cell's, round by round.
    fn beside(&self, other: &Cell<'_>, figure: fn(&feel::Point) -> f64) -> Option<Spread> {
        let rounds = |cell: &Cell<'_>| cell.points.iter().map(|point| (point.round, figure(point))).collect::<Vec<_>>();
        Spread::of_ratios(rounds(self), rounds(other))
    }

    fn is_beside(&self, other: &Cell<'_>) -> bool {
        let key = |point: &feel::Point| {
            let feel::Point { server, network, clients, bytes, asked, replicas, .. } = point;
            (server.clone(), network.clone(), clients.clone(), *bytes, *asked, *replicas)
        };
        self.label == other.label && key(self.first) == key(other.first)
    }

    /// Beside it, the cell of the server's own replication with the least 99th percentile.
    pub(super) fn best_own<'c, 'a>(&self, cells: &'c [Cell<'a>]) -> Option<&'c Cell<'a>> {
        let own = cells.iter().filter(|cell| cell.is_beside(self) && cell.first.method.is_some_and(Method::is_own));
        own.min_by(|one, other| one.p99().total_cmp(&other.p99()))
    }

    /// The other cell without an upload limit, if this one has one.
    pub(super) fn unlimited<'c, 'a>(&self, cells: &'c [Cell<'a>]) -> Option<&'c Cell<'a>> {
        let method = self.first.method.and_then(Method::unlimited)?;
        cells.iter().find(|cell| cell.is_beside(self) && cell.first.method == Some(method))
    }

    /// The median of the 99th percentiles.
    pub(super) fn p99(&self) -> f64 {
        self.median(|point| point.felt.p99)
    }

    /// The 99th percentile beside that of the server's own best; empty without one.
    pub(super) fn ratio(&self, cells: &[Cell<'_>]) -> String {
        self.best_own(cells).map_or(String::new(), |own| format!("{:.2}", self.p99() / own.p99()))
    }
}

/// All cells of these runs, by server, network, clients, number of replicas, method.
pub(super) fn cells<'a>(runs: &[&'a Kept<feel::Point>]) -> Vec<Cell<'a>> {
    let mut all: Vec<Cell<'a>> = Vec::new();
    for kept in runs {
        let mut cells: Vec<Cell<'a>> = Vec::new();
        for point in &kept.points {
            match cells.iter_mut().find(|cell| cell_key(cell.first) == cell_key(point)) {
                Some(cell) => cell.points.push(point),
                None => cells.push(Cell { label: &kept.label, first: point, points: vec![point] }),
            }
        }
        all.extend(cells);
    }
    let place = |method: Option<Method>| method.and_then(|method| order().position(|other| other == method));
    all.sort_by_key(|cell| {
        let point = cell.first;
        (&point.server, &point.network, cell.label, &point.clients, point.bytes, point.replicas, place(point.method))
    });
    all
}

type CellKey<'a> = (&'a str, &'a str, &'a str, u64, u64, usize, Option<Method>);

fn cell_key(point: &feel::Point) -> CellKey<'_> {
    let feel::Point { server, network, clients, bytes, asked, replicas, method, .. } = point;
    (server, network, clients, *bytes, *asked, *replicas, *method)
}

/// The tables of `feel`.
pub fn felt(runs: &[&Kept<feel::Point>]) -> String {
    let mut out = String::from(FEEL_EXPLAINED);
    let mut title = String::new();
    let cells = cells(runs);
    for cell in &cells {
        let feel::Point { server, network, clients, bytes, asked, method, replicas, .. } = cell.first;
        let mib = *bytes as f64 / f64::from(1 << 20);
        let label = if cell.label.is_empty() { String::new() } else { format!(", run {}", cell.label) };
        let this =
            format!("{server}, {network}, {mib:.0} MiB, {clients} clients sending {asked} commands a second{label}");
        if title != this {
            let _ = writeln!(out, "\n### {this}\n\n{FEEL_HEAD}");
            title = this;
        }
        let memory = cell.points.iter().filter_map(|point| Some(point.source_memory? as f64 / f64::from(1 << 20)));
        let _ = writeln!(
            out,
            "| {replicas} | {} | {:.2} | {:.0} | {:.2} | {:.2} | {} | {:.2} | {:.1} | {} | {} |",
            name_of(*method),
            cell.median(|point| point.seconds),
            cell.median(|point| point.felt.per_second),
            cell.median(|point| point.felt.p50),
            cell.p99(),
            Some(cell.ratio(&cells)).filter(|ratio| !ratio.is_empty()).unwrap_or("–".into()),
            cell.median(|point| point.felt.p999),
            cell.median(|point| point.felt.most),
            crate::cell(Spread::of(memory), |spread| spread.median(0)),
            memory_of_each(cell.points.iter().map(|point| &point.agent_memory)),
        );
    }
    out
}

const FEEL_EXPLAINED: &str = "\
GETs, and one SET in ten commands, of 1 KiB at a steady rate, from before the first replica began until the last had caught up; medians
over the rounds. A command that was due while the previous one was unanswered counts from when it was due. *ratio*: of the 99th percentile, to
that of the server's own method with the least one at the same N. *MiB*: peak memory of the source agent and of each replica agent (in the round in which they had most together; –: not recorded).
";

const FEEL_HEAD: &str = "\
| N | while | sync s | answered/s | p50 ms | p99 ms | ratio | p99.9 ms | most ms | source MiB | replica agents MiB |
|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|";

// The targets, and whether they were reached: ratios within one run, as medians over its rounds.

/// One target and its ratios.
struct Row {
    what: String,
    where_: String,
    ratio: Spread,
    target: Target,
}

/// All targets for which these runs have figures, as a table.
pub(super) fn table(syncs: &[&Kept<syncs::Point>], felt: &[&Kept<feel::Point>]) -> String {
    let mut out =
        String::from("| target | where | bound | reached: median (least–most) | |\n|---|---|---:|---:|---|\n");
    let mut targets: Vec<Row> =
        groups(syncs).iter().filter(|group| group.is_shaped()).flat_map(Group::targets).collect();
    targets.extend(groups(syncs).iter().flat_map(Group::of_sealing));
    targets.extend(groups(syncs).iter().flat_map(Group::of_uploads));
    targets.extend(groups(syncs).iter().flat_map(Group::of_compression));
    targets.extend(of_feeling(&cells(felt)));
    for Row { what, where_, ratio, target } in targets {
        let verdict = if target.is_met(Some(ratio)) { "reached" } else { "**not reached**" };
        let Spread { median, low, high } = ratio;
        let _ = writeln!(out, "| {what} | {where_} | {target} | {median:.3} ({low:.3}–{high:.3}) | {verdict} |");
    }
    out
}

impl Group<'_> {
    fn is_shaped(&self) -> bool {
        self.network != "loopback"
    }

    fn targets(&self) -> Vec<Row> {
        let mut targets = Vec::new();
        let mut add = |what: String, ratio: Option<Spread>, target: Target| {
            targets.extend(ratio.map(|ratio| Row { what, where_: self.title(), ratio, target }));
        };
        let relay = self.name(Method::RemoraRelay).replace("Remora tcp, ", "");
        for (replicas, most) in FLAT {
            let flat = self.ratio((Method::RemoraRelay, replicas), (Method::RemoraRelay, 1), |point| point.seconds);
            add(format!("{replicas} replicas against one, with {relay}"), flat, Target::most(most));
            let sent = self.spread(Method::RemoraRelay, replicas, |point| point.sent as f64 / point.bytes as f64);
            add(
                format!("{replicas} replicas with {relay}: bytes out of the host, × data"),
                sent,
                Target::most(SENT_MOST),
            );
        }
        let killed = self.ratio((Method::RemoraRelayKilled, 3), (Method::RemoraRelay, 3), |point| point.seconds);
        add(
            format!("3 replicas with {relay}, one killed in the middle, against undisturbed"),
            killed,
            Target::most(KILLED_MOST),
        );
        let best = self.best_own(3);
        let against = best.and_then(|best| self.ratio((Method::RemoraRelay, 3), (best, 3), |point| point.seconds));
        add(format!("3 replicas with {relay} against the server's own best"), against, Target::most(OWN_MOST));
        // A single replica behaves the same with relay and without; the figures of both count.
        for method in [Method::RemoraTcp, Method::RemoraRelay] {
            let rate = |point: &syncs::Point| point.bytes as f64 / point.transfer;
            let share = self.link.and_then(|link| self.spread(method, 1, |point| rate(point) / link));
            add(
                format!("1 replica, {}: share of iperf3's rate while transferring", self.name(method)),
                share,
                Target::least(LINK_LEAST),
            );
        }
        targets
    }

    /// Encryption: against the same method without it, and what a further replica costs the source.
    fn of_sealing(&self) -> Vec<Row> {
        let (sealed, plain) = (Method::RemoraTcpSealed, Method::RemoraTcp);
        let most = if self.is_shaped() { SEALED_MOST } else { SEALED_LOOPBACK_MOST };
        let against = self.against("1 replica, sealed, against plaintext".into(), (sealed, plain), 1, most);
        let of = |replicas| self.of(Method::RemoraRelaySealed, replicas);
        let more = of(8).filter_map(|many| {
            let one = of(1).find(|one| one.round == many.round)?;
            let gibibytes = many.bytes as f64 / f64::from(1 << 30);
            let used = |point: &syncs::Point| Some(point.source_cpu? - point.source_ready_cpu.unwrap_or_default());
            Some((used(many)? - used(one)?) / gibibytes)
        });
        let more = Spread::of(more).map(|ratio| Row {
            what:
                "processor seconds of the source from when it is ready, for 8 replicas, sealed, with relay, beyond those for one, for each GiB"
                    .into(),
            where_: self.title(),
            ratio,
            target: Target::most(FURTHER_CPU_MOST),
        });
        against.into_iter().chain(more).collect()
    }

    /// What the default upload limit costs where nothing else is sent.
    fn of_uploads(&self) -> Vec<Row> {
        let (auto, unlimited) = (Method::RemoraRelayAuto, Method::RemoraRelay);
        let against = |replicas| {
            let plural = if replicas == 1 { "" } else { "s" };
            let what =
                format!("time of {replicas} replica{plural} on an idle link, {}, against no upload limit", auto.name());
            self.against(what, (auto, unlimited), replicas, AUTO_TIME_MOST)
        };
        [1, 3].into_iter().filter_map(against).collect()
    }

    /// Compression: of records in JSON, which runs with the servers' own compression have, and of values that do not
    /// shrink.
    fn of_compression(&self) -> Vec<Row> {
        let shrinks = self.points.iter().any(|point| point.method == Method::OwnCompressed);
        let (methods, most) = match shrinks {
            true => (&[Method::RemoraRelayLz4, Method::RemoraRelayZstd][..], COMPRESSED_MOST),
            false => (&[Method::RemoraRelaySealed][..], NOT_COMPRESSED_MOST),
        };
        let (plain, data) = (Method::RemoraRelayUncompressed, if shrinks { "JSON" } else { "random values" });
        let against = |&method: &Method| {
            let what = format!("3 replicas of {data}, {}, against {}", method.name(), plain.name());
            self.against(what, (method, plain), 3, most)
        };
        methods.iter().filter_map(against).collect()
    }

    /// The target that a method takes at most this multiple of another one's time.
    fn against(&self, what: String, (ours, other): (Method, Method), replicas: usize, most: f64) -> Option<Row> {
        let ratio = self.ratio((ours, replicas), (other, replicas), |point| point.seconds)?;
        Some(Row { what, where_: self.title(), ratio, target: Target::most(most) })
    }

    /// The ratios of the rounds that have both.
    fn ratio(
        &self,
        ours: (Method, usize),
        rival: (Method, usize),
        figure: impl Fn(&syncs::Point) -> f64,
    ) -> Option<Spread> {
        let rounds = |(method, replicas)| self.of(method, replicas).map(|point| (point.round, figure(point)));
        Spread::of_ratios(rounds(ours), rounds(rival))
    }
}

/// The 99th percentile that clients see while three replicas are made, ours against the best of the server's own
/// replication.
fn of_feeling(cells: &[Cell<'_>]) -> Vec<Row> {
    let is_ours = |cell: &&Cell<'_>| cell.first.replicas == 3 && cell.first.method.is_some_and(Method::is_ours);
    let target = |ours: &Cell<'_>| {
        let best = ours.best_own(cells)?;
        let feel::Point { server, network, clients, .. } = ours.first;
        let method = ours.first.method.map_or("", Method::name);
        let is_auto = ours.first.method.is_some_and(Method::is_upload_auto) && clients == "far";
        Some(Row {
            what: format!("p99 while 3 replicas sync, {method}, against the best of the server's own methods"),
            where_: format!("{server}, {network}, {clients} clients{}", label(ours)),
            ratio: ours.beside(best, |point| point.felt.p99)?,
            target: Target::most(if is_auto { FELT_AUTO_MOST } else { FELT_MOST }),
        })
    };
    let is_far_auto =
        |cell: &&Cell<'_>| cell.first.clients == "far" && cell.first.method.is_some_and(Method::is_upload_auto);
    let price = |auto: &Cell<'_>| {
        let other = auto.unlimited(cells)?;
        let feel::Point { server, network, replicas, .. } = auto.first;
        let method = auto.first.method.map_or("", Method::name);
        Some(Row {
            what: format!("time of {replicas} replicas beside clients, {method}, against no upload limit"),
            where_: format!("{server}, {network}{}", label(auto)),
            ratio: auto.beside(other, |point| point.seconds)?,
            target: Target::most(AUTO_TIME_MOST),
        })
    };
    let felt = cells.iter().filter(is_ours).filter_map(target);
    felt.chain(cells.iter().filter(is_far_auto).filter_map(price)).collect()
}

fn label(cell: &Cell<'_>) -> String {
    if cell.label.is_empty() { String::new() } else { format!(", run {}", cell.label) }
}

/// Target: the time of one replica with sealed tables, in multiples of plaintext, over a cable.
const SEALED_MOST: f64 = 1.02;

/// The same over loopback, where the processors are the limit.
const SEALED_LOOPBACK_MOST: f64 = 1.25;

/// Target: processor seconds of the source for each GiB, for seven replicas more.
const FURTHER_CPU_MOST: f64 = 0.1;

/// Target: the time of N replicas, in multiples of the time of one.
const FLAT: [(usize, f64); 2] = [(3, 1.10), (8, 1.25)];

/// Target: bytes out of the primary's host, in multiples of the data set.
const SENT_MOST: f64 = 1.15;

/// Target: the time of the remaining replicas when a relay is killed, against three undisturbed replicas.
const KILLED_MOST: f64 = 1.15;

/// Target: three replicas, against the server's own best.
const OWN_MOST: f64 = 0.45;

/// Target: one replica's transfer, as a share of the rate that iperf3 measures.
const LINK_LEAST: f64 = 0.93;

/// Target: the 99th percentile of clients, against the server's own replication.
const FELT_MOST: f64 = 0.5;

/// Targets of compression by the agents: the time of three replicas, against that without it.
const COMPRESSED_MOST: f64 = 0.4;

const NOT_COMPRESSED_MOST: f64 = 1.02;

/// Targets of the default upload limit: the same for clients on other hosts, and the time, in multiples of that without
/// a limit.
const FELT_AUTO_MOST: f64 = 0.25;

const AUTO_TIME_MOST: f64 = 1.10;

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::suite::feel::ClientLatency;

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
        kept.links = vec![crate::suite::Link { network: "1 Gb/s".into(), bytes_per_second: 120e6 }];
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
        assert!(ends("| 3 | replication, tuned |", "| – | yes |"), "{table}");
    }

    #[test]
    fn replicas_that_differ_are_marked_clearly() {
        let mut wrong = point(Method::OwnBest, 1, 0, 8.0, 1);
        wrong.equal = Some(false);
        assert!(sync(&[&kept(vec![wrong])], &[], Path::new("")).contains("**NO**"));
    }

    fn felt_point(method: Option<Method>, p99: f64) -> feel::Point {
        feel::Point {
            server: "Valkey 9.1".into(),
            network: "1 Gb/s".into(),
            bytes: 1 << 30,
            clients: "far".into(),
            asked: 2000,
            method,
            replicas: if method.is_some() { 3 } else { 0 },
            round: 0,
            seconds: 9.0,
            felt: ClientLatency { p99, ..ClientLatency::default() },
            source_memory: None,
            agent_memory: Vec::new(),
            equal: None,
        }
    }

    #[test]
    fn what_clients_wait_is_compared_with_the_servers_own_best_of_the_same_run() {
        let mut kept = Kept::begin("feel", Some("polite"));
        kept.points = vec![
            felt_point(None, 0.1),
            felt_point(Some(Method::OwnBest), 4.0),
            felt_point(Some(Method::OwnTogether), 5.0),
            felt_point(Some(Method::RemoraTcp), 8.0),
            felt_point(Some(Method::RemoraTcpAuto), 1.0),
        ];
        let mut other = Kept::begin("feel", None);
        other.points = vec![felt_point(Some(Method::OwnBest), 1.0)];
        let runs = [&other, &kept];
        let cells = cells(&runs);
        let auto = cells.iter().find(|cell| cell.first.method == Some(Method::RemoraTcpAuto)).unwrap();
        assert_eq!(auto.ratio(&cells), "0.25");
        assert_eq!(auto.unlimited(&cells).unwrap().p99(), 8.0);
        let table = felt(&runs);
        let line = |name: &str| table.lines().rfind(|line| line.contains(name)).unwrap();
        assert!(line("Remora tcp, best, upload auto").contains("| 1.00 | 0.25 |"), "{table}");
        assert!(line("no sync").contains("| 0.10 | – |"), "{table}");
        assert!(table.contains("far clients sending 2000 commands a second, run polite"), "{table}");
    }

    #[test]
    fn ratios_are_of_one_round_and_checked_by_their_median() {
        let mut points = Vec::new();
        for (round, slow) in [1.0, 2.0, 4.0].into_iter().enumerate() {
            points.push(point(Method::RemoraRelay, 1, round, 10.0 * slow, 1_000_000_000));
            points.push(point(Method::RemoraRelay, 3, round, 10.9 * slow, 1_200_000_000));
            points.push(point(Method::OwnBest, 3, round, 30.0 * slow, 3_000_000_000));
        }
        let table = table(&[&kept(points)], &[]);
        let line = |what: &str| table.lines().find(|line| line.contains(what)).unwrap_or_default();
        assert!(line("3 replicas against one").ends_with("| ≤ 1.1 | 1.090 (1.090–1.090) | reached |"), "{table}");
        assert!(line("× data").contains("1.200") && line("× data").ends_with("**not reached** |"), "{table}");
        assert!(line("against the server's own best").contains("0.363"), "{table}");
        assert!(!table.contains("8 replicas"), "{table}");
    }
}
