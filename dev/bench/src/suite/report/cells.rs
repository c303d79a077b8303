//! What clients noticed, as Markdown, and beside the server's own replication: the figures, the tables and the targets
//! compare the same cells.

use std::fmt::Write as _;

use super::tables::order;
use crate::suite::points::name_of;
use crate::suite::{Kept, feel};
use crate::sync::Method;
use crate::{Spread, memory_of_each};

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
pub fn table(runs: &[&Kept<feel::Point>]) -> String {
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
            Spread::of(cell.points.iter().filter_map(|point| Some(point.source_memory? as f64 / f64::from(1 << 20))))
                .map_or("–".to_owned(), |spread| format!("{:.0}", spread.median)),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::suite::load::ClientLatency;

    fn point(method: Option<Method>, p99: f64) -> feel::Point {
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
            point(None, 0.1),
            point(Some(Method::OwnBest), 4.0),
            point(Some(Method::OwnTogether), 5.0),
            point(Some(Method::RemoraTcp), 8.0),
            point(Some(Method::RemoraTcpAuto), 1.0),
        ];
        let mut other = Kept::begin("feel", None);
        other.points = vec![point(Some(Method::OwnBest), 1.0)];
        let runs = [&other, &kept];
        let cells = cells(&runs);
        let auto = cells.iter().find(|cell| cell.first.method == Some(Method::RemoraTcpAuto)).unwrap();
        assert_eq!(auto.ratio(&cells), "0.25");
        assert_eq!(auto.unlimited(&cells).unwrap().p99(), 8.0);
        let table = table(&runs);
        let line = |name: &str| table.lines().rfind(|line| line.contains(name)).unwrap();
        assert!(line("Remora tcp, best, upload auto").contains("| 1.00 | 0.25 |"), "{table}");
        assert!(line("no sync").contains("| 0.10 | – |"), "{table}");
        assert!(table.contains("far clients sending 2000 commands a second, run polite"), "{table}");
    }
}
