//! Mass replacement ([`crate::mass`]): a table and a figure for each server of a kept run.

use std::fmt::Write as _;
use std::path::Path;

use clap::ValueEnum;

use super::Figure;
use super::plots::{figure, slug};
use crate::bars::{Bar, Chart, Family, Group};
use crate::mass::{COPIES, FORKS, FULL, SECONDS, Way};
use crate::sync::Result;
use crate::{Run, Sample, Spread};

/// The figures of one server.
struct Of<'a> {
    run: &'a Run,
    /// The server's kind, as the cases name it.
    server: &'a str,
}

/// One table for each server.
pub fn tables(run: &Run, label: &str) -> String {
    let mut out = String::new();
    for of in servers(run) {
        let label = if label.is_empty() { String::new() } else { format!(", run {label}") };
        let _ = writeln!(out, "\n### All replicas of a cluster at once: {}{label}\n\n{HEAD}", of.server);
        for way in of.ways() {
            let value = |what| of.spread(way, what).map_or("–".to_owned(), range);
            let whole = |what| of.spread(way, what).map_or("–".to_owned(), whole);
            let cpu = |seconds: fn(&Sample) -> f64| {
                let spread = Spread::of(of.samples(way, SECONDS).map(seconds));
                spread.map_or("–".to_owned(), |spread| format!("{:.2}", spread.median))
            };
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                way.name(),
                value(SECONDS),
                of.ratio(way).map_or("–".to_owned(), range),
                value(COPIES),
                whole(FULL),
                whole(FORKS),
                cpu(|sample| sample.source_cpu_seconds),
                cpu(|sample| sample.reader_cpu_seconds),
            );
        }
    }
    out
}

/// Draws one figure for each server.
///
/// # Errors
/// A file could not be written.
pub fn figures(run: &Run, label: &str, folder: &Path) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for of in servers(run) {
        let bar = |way: Way| {
            let seconds = of.spread(way, SECONDS)?;
            let ratio = of.ratio(way).map_or(String::new(), |ratio| format!("{:.2}, ", ratio.median));
            let copies = of.spread(way, COPIES);
            let copies = copies.map_or(String::new(), |copies| format!("{:.2} × data, ", copies.median));
            let forks = of.spread(way, FORKS).map_or("–".to_owned(), whole);
            let family = if way.is_ours() { Family::Ours } else { Family::Own };
            Some(Bar { name: way.name().to_owned(), family, figure: seconds, note: format!("{ratio}{copies}{forks}") })
        };
        let bars = of.ways().into_iter().filter_map(bar).collect();
        let chart = Chart {
            title: format!("Seconds until six replicas that lost their data are in step: {}", of.server),
            unit: "s",
            notes: "ratio to the best of its own, out of a primary's host, its forks",
            groups: vec![Group { title: "3 shards with 2 replicas each".into(), bars }],
        };
        let sentence = "six replicas of a cluster get their data again".to_owned();
        let file = format!("mass-{}.svg", slug(&format!("{} {label}", of.server)));
        figures.push(figure(&chart, folder, file, sentence)?);
    }
    Ok(figures)
}

/// The servers of a run, in the order of their first figure.
fn servers(run: &Run) -> Vec<Of<'_>> {
    let mut servers: Vec<Of<'_>> = Vec::new();
    for server in run.samples.iter().filter_map(|sample| Some(sample.case.split_once(": ")?.0)) {
        if servers.iter().all(|other| other.server != server) {
            servers.push(Of { run, server });
        }
    }
    servers
}

impl Of<'_> {
    /// The ways that were measured, in the order of their definition.
    fn ways(&self) -> Vec<Way> {
        Way::value_variants().iter().copied().filter(|way| self.samples(*way, SECONDS).next().is_some()).collect()
    }

    fn samples(&self, way: Way, what: &str) -> impl Iterator<Item = &Sample> {
        let case = format!("{}: {what}", self.server);
        self.run.samples.iter().filter(move |sample| sample.subject == way.name() && sample.case == case)
    }

    fn spread(&self, way: Way, what: &str) -> Option<Spread> {
        Spread::of(self.samples(way, what).map(|sample| sample.value))
    }

    /// The seconds beside those of the server's own replication with the least median, round by round.
    fn ratio(&self, way: Way) -> Option<Spread> {
        let own = self.ways().into_iter().filter(|way| !way.is_ours());
        let medians = own.filter_map(|way| Some((way, self.spread(way, SECONDS)?.median)));
        let (best, _) = medians.min_by(|one, other| one.1.total_cmp(&other.1))?;
        let in_round = |round| self.samples(best, SECONDS).find(|sample| sample.round == round).map(|own| own.value);
        Spread::of(self.samples(way, SECONDS).filter_map(|sample| Some(sample.value / in_round(sample.round)?)))
    }
}

fn range(spread: Spread) -> String {
    if spread.high - spread.low < 0.005 {
        return format!("{:.2}", spread.median);
    }
    format!("{:.2} ({:.2}–{:.2})", spread.median, spread.low, spread.high)
}

/// A count, or the least and the greatest of the rounds.
fn whole(spread: Spread) -> String {
    if spread.low == spread.high {
        return format!("{:.0}", spread.median);
    }
    format!("{:.0}–{:.0}", spread.low, spread.high)
}

pub(super) const EXPLAINED: &str = "\
Medians over the rounds, in brackets the least and the greatest value. *ratio*: seconds divided by those of the server's own way with the least
median, in the same round. Data sets, full copies and forks are those of the primary that has the most; CPU is that of all primaries, and of all
agents, in seconds.
";

const HEAD: &str = "\
| way | seconds until all are in step | ratio | data sets out of a primary's host | full copies (`sync_full`) | forks | primaries CPU s | agents CPU s |
|---|---:|---:|---:|---:|---:|---:|---:|";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::mass::case;
    use remora_lab::Kind;

    fn run() -> Run {
        let mut run = Run::new("mass_replacement", "see the case");
        for (round, slow) in [1.0, 2.0].into_iter().enumerate() {
            for (way, seconds, copies, forks) in
                [(Way::OwnDefault, 12.0, 2.0, 2.0), (Way::OwnBest, 8.0, 2.0, 1.0), (Way::RemoraBest, 4.0, 1.0, 1.0)]
            {
                for (what, value) in [(SECONDS, slow * seconds), (COPIES, copies), (FORKS, forks), (FULL, copies)] {
                    run.samples.push(Sample {
                        subject: way.name().to_owned(),
                        case: case(Kind::Valkey9, what),
                        round,
                        value,
                        reader_cpu_seconds: 0.25,
                        source_cpu_seconds: 1.5,
                        gigabytes: 1.0,
                    });
                }
            }
        }
        run
    }

    #[test]
    fn each_way_is_compared_with_the_best_of_its_own_in_the_same_round() {
        let table = tables(&run(), "");
        let line = |way: Way| table.lines().find(|line| line.starts_with(&format!("| {} |", way.name()))).unwrap();
        assert_eq!(
            line(Way::RemoraBest),
            "| Remora attend, best | 6.00 (4.00–8.00) | 0.50 | 1.00 | 1 | 1 | 1.50 | 0.25 |",
            "{table}"
        );
        assert!(line(Way::OwnDefault).contains("| 1.50 | 2.00 | 2 | 2 |"), "{table}");
        assert!(table.contains(&format!("at once: {}", Kind::Valkey9)), "{table}");
    }

    #[test]
    fn the_figure_has_a_bar_for_each_way_with_its_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let figures = figures(&run(), "again", folder.path()).unwrap();
        assert_eq!(figures.len(), 1);
        let words = &figures[0].words;
        assert!(words.contains("Remora attend, best 6.00 s (0.50, 1.00 × data, 1)"), "{words}");
        let svg = std::fs::read_to_string(folder.path().join(&figures[0].file)).unwrap();
        assert!(figures[0].file.ends_with("-again.svg") && svg.contains(Way::OwnBest.name()));
    }
}
