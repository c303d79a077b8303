//! The figures, as bars: what syncs take, what clients feel, and what files of a volume do.

use std::path::Path;

use clap::ValueEnum;

use super::Figure;
use super::tables::{self, Cell, cells, groups};
use crate::Spread;
use crate::bars::{self, Bar, Chart, Family};
use crate::suite::volume::cases::{Case, Cell as FileCell, Figures, Pattern, Subject};
use crate::suite::{Kept, feel, name_of, syncs, volume};
use crate::sync::{Method, Result};

/// Draws the seconds of each method for each number of replicas, one figure for each group that the tables have.
pub fn sync(runs: &[&Kept<syncs::Point>], folder: &Path) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for group in groups(runs) {
        let name = slug(&format!("{} {} {} {}", group.server, group.network, group.bytes >> 20, group.label));
        let chart = Chart {
            title: format!("Seconds until the last replica: {}", group.title()),
            unit: "s",
            notes: "ratio to the best of its own, MB out of the primary's host",
            groups: group.numbers().into_iter().map(|replicas| of_replicas(&group, replicas)).collect(),
        };
        figures.push(figure(&chart, folder, format!("sync-{name}.svg"), sentence(&group).unwrap_or_default())?);
    }
    Ok(figures)
}

/// Draws one figure for the page of readers: the server's own replication and ours over the number of replicas, of the
/// largest data over the slowest cable that was measured with several numbers of replicas. Runs that compare
/// compression have data of their own, and are left out.
pub fn headline(runs: &[&Kept<syncs::Point>], folder: &Path) -> Result<Option<Figure>> {
    let all = groups(runs);
    let compresses = |group: &tables::Group<'_>| group.points.iter().any(|point| point.method == Method::OwnCompressed);
    let over_a_cable =
        |group: &&tables::Group<'_>| group.network != "loopback" && compared(group).len() > 1 && !compresses(group);
    // In tens of MB/s: iperf3's figure differs a little from run to run.
    let rate = |group: &tables::Group<'_>| (group.link.unwrap_or(f64::INFINITY) / 1e7).round();
    let group = all.iter().filter(over_a_cable).max_by(|one, other| {
        let by_data = one.bytes.cmp(&other.bytes);
        by_data.then(rate(other).total_cmp(&rate(one))).then(compared(one).len().cmp(&compared(other).len()))
    });
    let Some(group) = group.or(all.last()) else { return Ok(None) };
    let numbers = compared(group);
    let Some(ours) = numbers.last().and_then(|most| group.best_ours(*most)) else { return Ok(None) };
    let family = group.server.split(' ').next().unwrap_or_default();
    let named = |bar: Bar| {
        let name = if bar.family == Family::Own { format!("{family}'s replication, tuned") } else { "Remora".into() };
        Bar { name, ..bar }
    };
    let bars = |replicas| {
        let methods = group.best_own(replicas).into_iter().chain([ours]);
        let bars = methods.filter_map(|method| bar(group, method, replicas)).map(named).collect();
        bars::Group { title: replicas_of(replicas), bars }
    };
    let chart = Chart {
        title: format!("Seconds until the last replica: {}", group.title()),
        unit: "s",
        notes: "ratio, MB out of the primary's host",
        groups: numbers.into_iter().map(bars).collect(),
    };
    figure(&chart, folder, "headline.svg".into(), sentence(group).unwrap_or_default()).map(Some)
}

pub(super) fn figure(chart: &Chart, folder: &Path, file: String, sentence: String) -> Result<Figure> {
    chart.draw(&folder.join(&file)).map_err(|error| format!("could not draw {file}: {error}"))?;
    Ok(Figure { title: chart.title.clone(), words: chart.words(), file, sentence })
}

fn of_replicas(group: &tables::Group<'_>, replicas: usize) -> bars::Group {
    let bars = group.methods().into_iter().filter_map(|method| bar(group, method, replicas)).collect();
    bars::Group { title: replicas_of(replicas), bars }
}

/// The bar of a method, if it was measured.
fn bar(group: &tables::Group<'_>, method: Method, replicas: usize) -> Option<Bar> {
    let figure = group.seconds(method, replicas)?;
    let best = group.best_own(replicas).and_then(|best| group.seconds(best, replicas));
    let ratio = best.map_or(String::new(), |best| format!("{:.2}, ", figure.median / best.median));
    let sent = group.spread(method, replicas, |point| point.sent as f64 / 1e6).map_or(0.0, |spread| spread.median);
    Some(Bar { name: group.name(method), family: family(method), figure, note: format!("{ratio}{sent:.0} MB") })
}

fn family(method: Method) -> Family {
    match method {
        _ if method.is_own() => Family::Own,
        _ if method.is_ours() => Family::Ours,
        _ => Family::Other,
    }
}

fn replicas_of(count: usize) -> String {
    if count == 1 { "1 replica".to_owned() } else { format!("{count} replicas") }
}

/// The numbers of replicas with which both the server's own replication and ours were measured.
fn compared(group: &tables::Group<'_>) -> Vec<usize> {
    let both = |replicas: &usize| group.best_own(*replicas).is_some() && group.best_ours(*replicas).is_some();
    group.numbers().into_iter().filter(both).collect()
}

/// What a group shows, in one sentence.
fn sentence(group: &tables::Group<'_>) -> Option<String> {
    let Some(most) = compared(group).last().copied() else {
        let methods: Vec<String> = group.methods().into_iter().map(|method| group.name(method)).collect();
        return Some(format!("{} alone, without a comparison with the server's own replication", methods.join(", ")));
    };
    let (own, ours) = (group.best_own(most)?, group.best_ours(most)?);
    let (theirs, our) = (group.seconds(own, most)?.median, group.seconds(ours, most)?.median);
    Some(format!(
        "{} {} {our:.2} s by {}, {:.2} of the {theirs:.2} s of {}",
        replicas_of(most),
        if most == 1 { "takes" } else { "take" },
        group.name(ours),
        our / theirs,
        own.name()
    ))
}

/// Draws the 99th percentile for each number of replicas, for each group of clients.
pub fn feel(runs: &[&Kept<feel::Point>], folder: &Path) -> Result<Vec<Figure>> {
    let cells = cells(runs);
    let key = |cell: &Cell<'_>| {
        let feel::Point { server, network, clients, .. } = cell.first;
        [server.clone(), network.clone(), clients.clone(), cell.label.to_owned()]
    };
    let mut groups: Vec<[String; 4]> = cells.iter().map(key).collect();
    groups.dedup();
    let mut figures = Vec::new();
    for group in groups {
        let of: Vec<&Cell<'_>> = cells.iter().filter(|cell| key(cell) == group).collect();
        let [server, network, clients, label] = &group;
        let mut numbers: Vec<usize> = of.iter().map(|cell| cell.first.replicas).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let bars = |replicas: usize| {
            let bar = |cell: &&&Cell<'_>| {
                let figure = Spread::of(cell.points.iter().map(|point| point.felt.p99))?;
                let method = cell.first.method;
                let family = method.map_or(Family::Other, family);
                let seconds = cell.median(|point| point.seconds);
                let note = match cell.ratio(&cells) {
                    ratio if ratio.is_empty() => String::new(),
                    ratio => format!("{ratio}, {seconds:.1} s"),
                };
                Some(Bar { name: name_of(method).to_owned(), family, figure, note })
            };
            let bars: Vec<Bar> =
                of.iter().filter(|cell| cell.first.replicas == replicas).filter_map(|cell| bar(&cell)).collect();
            let title = if replicas == 0 { "no replica".to_owned() } else { replicas_of(replicas) };
            bars::Group { title, bars }
        };
        let chart = Chart {
            title: format!("99th percentile of what {clients} clients wait: {server}, {network}"),
            unit: "ms",
            notes: "ratio to the best of its own, s of the sync",
            groups: numbers.into_iter().map(bars).collect(),
        };
        let name = slug(&format!("{server} {network} {clients} {label}"));
        let sentence = format!("what {clients} clients of the primary wait while replicas are made");
        figures.push(figure(&chart, folder, format!("feel-{name}.svg"), sentence)?);
    }
    Ok(figures)
}

/// Draws MB/s for each number of jobs, for small and large requests past the page cache.
pub fn volume(runs: &[&Kept<volume::Point>], folder: &Path) -> Result<Vec<Figure>> {
    // The newest that is not of an emulated machine alone.
    let is_of_this = |kept: &&&Kept<volume::Point>| {
        kept.points.iter().any(|point| {
            let of = Subject::value_variants().iter().find(|subject| subject.name() == point.subject);
            of.is_some_and(|subject| !subject.is_emulated())
        })
    };
    let Some(newest) = runs.iter().rfind(is_of_this) else { return Ok(Vec::new()) };
    let measured = Figures(&newest.points);
    let mut figures = Vec::new();
    for (pattern, block) in [
        (Pattern::Randread, 4 << 10),
        (Pattern::Randwrite, 4 << 10),
        (Pattern::Read, 1 << 20),
        (Pattern::Write, 1 << 20),
    ] {
        let group = |jobs: u32| {
            let case = Case::Files(FileCell { direct: true, pattern, block, jobs }).to_string();
            let bar = |subject: &Subject| {
                let figure = measured.spread(subject.name(), &case)?;
                let family = if subject.name().starts_with("Remora") { Family::Ours } else { Family::Other };
                Some(Bar { name: subject.name().to_owned(), family, figure, note: String::new() })
            };
            let bars: Vec<Bar> = Subject::value_variants().iter().filter_map(bar).collect();
            let title = if jobs == 1 { "1 job".to_owned() } else { format!("{jobs} jobs") };
            (!bars.is_empty()).then_some(bars::Group { title, bars })
        };
        let groups: Vec<bars::Group> = (1..=MOST_JOBS).filter_map(group).collect();
        if groups.is_empty() {
            continue;
        }
        let title = format!("MB/s, {} {}, direct", pattern.word(), crate::bytes(block));
        let name = slug(&format!("{} {}", pattern.word(), block >> 10));
        let chart = Chart { title: title.clone(), unit: "MB/s", notes: "", groups };
        figures.push(figure(&chart, folder, format!("volume-{name}.svg"), title)?);
    }
    Ok(figures)
}

/// A file name from words.
pub(super) fn slug(words: &str) -> String {
    let plain = words.to_lowercase().replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
    plain.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
}

/// What the command line of `volume` takes.
const MOST_JOBS: u32 = 64;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::tables::tests::{kept, point};
    use super::*;

    #[test]
    fn a_figure_has_a_bar_with_its_name_for_every_method_and_says_what_it_shows() {
        let folder = tempfile::tempdir().unwrap();
        let points = [(Method::OwnBest, 2.0), (Method::RemoraRelay, 1.0)]
            .into_iter()
            .flat_map(|(method, pace)| [1, 3].map(|replicas| point(method, replicas, 0, pace * replicas as f64, 5)))
            .collect();
        let kept = kept(points);
        let figures = sync(&[&kept], folder.path()).unwrap();
        assert_eq!(figures.len(), 1);
        let svg = std::fs::read_to_string(folder.path().join(&figures[0].file)).unwrap();
        for name in [Method::OwnBest.name(), Method::RemoraRelay.name(), "3 replicas", "6.00 s"] {
            assert!(svg.contains(name), "{name} is missing");
        }
        let shows = &figures[0].sentence;
        assert!(
            shows.starts_with("3 replicas take 3.00 s by ")
                && shows.contains("0.50 of the 6.00 s of replication, tuned"),
            "{shows}"
        );
        let headline = headline(&[&kept], folder.path()).unwrap().unwrap();
        assert_eq!((headline.file.as_str(), &headline.sentence), ("headline.svg", shows));
    }

    #[test]
    fn names_of_files_are_plain() {
        assert_eq!(slug("Valkey 9.1 (9.1.2), 1 Gb/s"), "valkey-9-1-9-1-2-1-gb-s");
    }
}
