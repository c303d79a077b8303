//! The targets, and whether they were reached: ratios within one run, as medians over its rounds.

use std::fmt::Write as _;

use super::tables::{Cell, Group, cells, groups};
use crate::suite::{Kept, feel, syncs};
use crate::sync::Method;
use crate::{Spread, Target};

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
        let of = |replicas: usize| {
            self.points
                .iter()
                .filter(move |point| point.method == Method::RemoraRelaySealed && point.replicas == replicas)
        };
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
        let of = |(method, replicas): (Method, usize)| {
            self.points.iter().filter(move |point| point.method == method && point.replicas == replicas)
        };
        let rival_in = |round| of(rival).find(|point| point.round == round).map(|point| figure(point));
        Spread::of(of(ours).filter_map(|point| Some(figure(point) / rival_in(point.round)?)))
    }
}

/// The 99th percentile that clients see while three replicas are made, ours against the best of the server's own
/// replication.
fn of_feeling(cells: &[Cell<'_>]) -> Vec<Row> {
    let is_ours = |cell: &&Cell<'_>| cell.first.replicas == 3 && cell.first.method.is_some_and(Method::is_ours);
    let target = |ours: &Cell<'_>| {
        let best = ours.best_own(cells)?;
        let in_round = |round| best.points.iter().find(|point| point.round == round).map(|point| point.felt.p99);
        let ratios = ours.points.iter().filter_map(|point| Some(point.felt.p99 / in_round(point.round)?));
        let feel::Point { server, network, clients, .. } = ours.first;
        let method = ours.first.method.map_or("", Method::name);
        let is_auto = ours.first.method.is_some_and(Method::is_upload_auto) && clients == "far";
        Some(Row {
            what: format!("p99 while 3 replicas sync, {method}, against the best of the server's own methods"),
            where_: format!("{server}, {network}, {clients} clients{}", label(ours)),
            ratio: Spread::of(ratios)?,
            target: Target::most(if is_auto { FELT_AUTO_MOST } else { FELT_MOST }),
        })
    };
    let is_far_auto =
        |cell: &&Cell<'_>| cell.first.clients == "far" && cell.first.method.is_some_and(Method::is_upload_auto);
    let price = |auto: &Cell<'_>| {
        let other = auto.unlimited(cells)?;
        let in_round = |round| other.points.iter().find(|point| point.round == round).map(|point| point.seconds);
        let ratios = auto.points.iter().filter_map(|point| Some(point.seconds / in_round(point.round)?));
        let feel::Point { server, network, replicas, .. } = auto.first;
        let method = auto.first.method.map_or("", Method::name);
        Some(Row {
            what: format!("time of {replicas} replicas beside clients, {method}, against no upload limit"),
            where_: format!("{server}, {network}{}", label(auto)),
            ratio: Spread::of(ratios)?,
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
mod tests {
    use super::super::tables::tests::{kept, point};
    use super::*;

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
