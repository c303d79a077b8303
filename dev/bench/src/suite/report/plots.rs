//! The figures, as SVG: bars for syncs and what clients feel; lines with dots over sizes and jobs, in colours that stay
//! the same from plot to plot.

use std::path::Path;

use clap::ValueEnum;
use plotters::style::{BLACK, RGBColor};

use super::cells::{Cell, cells};
use super::tables::{self, groups, order, sizes};
use super::{Figure, Plot};
use crate::Spread;
use crate::bars::{self, Bar, Chart, Family};
use crate::plot::{self, Axis, Line};
use crate::suite::points::name_of;
use crate::suite::volume::cases::{Case, Cell as FileCell, Figures, Pattern, Subject};
use crate::suite::{Kept, feel, scaling, syncs, volume};
use crate::sync::{Method, Result};

/// A plot before it is drawn.
struct Picture<'a> {
    title: &'a str,
    x: &'a str,
    y: &'a str,
    /// Powers of two at even distances.
    is_log_x: bool,
    /// Powers of ten at even distances.
    is_log_y: bool,
    lines: Vec<Line<'static>>,
}

/// Draws the seconds of each method for each number of replicas, one figure for each group that the tables have.
///
/// # Errors
/// A file could not be written.
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
///
/// # Errors
/// A file could not be written.
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
///
/// # Errors
/// A file could not be written.
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

/// Draws seconds against the size of the data set, and of the values.
///
/// # Errors
/// A file could not be written.
pub fn scaling(runs: &[&Kept<scaling::Point>], folder: &Path) -> Result<Vec<Plot>> {
    let Some(newest) = runs.last() else { return Ok(Vec::new()) };
    let gib = f64::from(1 << 30);
    let mut plots = Vec::new();
    for (grows, title, x) in [
        ("size", "Seconds against the size of the data set", "GiB"),
        ("value", "Seconds per GiB against the size of the values", "bytes of a value"),
    ] {
        let points: Vec<&scaling::Point> = newest.points.iter().filter(|point| point.grows == grows).collect();
        let line = |method: Method| {
            let at = |(bytes, value_bytes): (u64, u64)| {
                let of = points.iter().filter(|p| (p.bytes, p.value_bytes, p.method) == (bytes, value_bytes, method));
                let seconds = Spread::of(of.map(|point| point.seconds))?.median;
                let size = bytes as f64 / gib;
                Some(if grows == "size" { (size, seconds) } else { (value_bytes as f64, seconds / size) })
            };
            let points: Vec<(f64, f64)> = sizes(&points).into_iter().filter_map(at).collect();
            (points.len() > 1).then(|| line_of(Some(method), points))
        };
        let lines: Vec<Line<'static>> = order().filter_map(line).collect();
        if lines.is_empty() {
            continue;
        }
        let mut picture = Picture::new(title, x, if grows == "size" { "seconds" } else { "seconds per GiB" }, lines);
        picture.is_log_x = grows == "value";
        plots.push(picture.draw(folder, &format!("scaling-{grows}.svg"))?);
    }
    Ok(plots)
}

/// Draws MB/s against the number of jobs, for small and large requests past the page cache.
///
/// # Errors
/// A file could not be written.
pub fn volume(runs: &[&Kept<volume::Point>], folder: &Path) -> Result<Vec<Plot>> {
    // The newest that is not of an emulated machine alone.
    let is_of_this = |kept: &&&Kept<volume::Point>| {
        kept.points.iter().any(|point| {
            let of = Subject::value_variants().iter().find(|subject| subject.name() == point.subject);
            of.is_some_and(|subject| !subject.is_emulated())
        })
    };
    let Some(newest) = runs.iter().rfind(is_of_this) else { return Ok(Vec::new()) };
    let figures = Figures(&newest.points);
    let mut plots = Vec::new();
    for (pattern, block) in [
        (Pattern::Randread, 4 << 10),
        (Pattern::Randwrite, 4 << 10),
        (Pattern::Read, 1 << 20),
        (Pattern::Write, 1 << 20),
    ] {
        let line = |(place, subject): (usize, &Subject)| {
            let at = |jobs: u32| {
                let case = Case::Files(FileCell { direct: true, pattern, block, jobs }).to_string();
                Some((f64::from(jobs), figures.spread(subject.name(), &case)?.median))
            };
            let points: Vec<(f64, f64)> = (1..=MOST_JOBS).filter_map(at).collect();
            let colour = SUBJECT_COLOURS.get(place).copied().unwrap_or(BLACK);
            (points.len() > 1).then(|| Line { name: subject.name(), colour, points })
        };
        let lines: Vec<Line<'static>> = Subject::value_variants().iter().enumerate().filter_map(line).collect();
        if lines.is_empty() {
            continue;
        }
        let title = format!("MB/s, {} {}, direct", pattern.word(), crate::bytes(block));
        let mut picture = Picture::new(&title, "jobs", "MB/s", lines);
        (picture.is_log_x, picture.is_log_y) = (true, true);
        plots.push(
            picture.draw(folder, &format!("volume-{}.svg", slug(&format!("{} {}", pattern.word(), block >> 10))))?,
        );
    }
    Ok(plots)
}

fn line_of(method: Option<Method>, mut points: Vec<(f64, f64)>) -> Line<'static> {
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    let place = order().position(|other| Some(other) == method).unwrap_or_default();
    Line { name: name_of(method), colour: COLOURS.get(place).copied().unwrap_or(BLACK), points }
}

impl<'a> Picture<'a> {
    fn new(title: &'a str, x: &'a str, y: &'a str, lines: Vec<Line<'static>>) -> Picture<'a> {
        Picture { title, x, y, is_log_x: false, is_log_y: false, lines }
    }

    fn draw(self, folder: &Path, file: &str) -> Result<Plot> {
        let x = self.axis(self.x, |point| point.0, self.is_log_x.then_some(2.0));
        let y = self.axis(self.y, |point| point.1, self.is_log_y.then_some(10.0));
        plot::Picture { title: self.title, x, y, lines: self.lines }.draw(&folder.join(file))?;
        Ok((self.title.to_owned(), file.to_owned()))
    }

    /// An axis from 0, or a logarithmic one from a bit below the least value to a bit above the greatest.
    fn axis(&self, name: &'a str, figure: fn(&(f64, f64)) -> f64, powers_of: Option<f64>) -> Axis<'a> {
        let figures =
            || self.lines.iter().flat_map(|line| &line.points).map(figure).filter(|figure| figure.is_finite());
        let most = figures().reduce(f64::max).unwrap_or(1.0).max(1e-6);
        let least = figures().reduce(f64::min).unwrap_or(0.0);
        let range = if powers_of.is_some() { (least * 0.7).max(most * 1e-9)..most * 1.5 } else { 0.0..most * 1.08 };
        Axis { name, range, powers_of }
    }
}

/// A file name from words.
pub(super) fn slug(words: &str) -> String {
    let plain = words.to_lowercase().replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
    plain.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
}

/// Colours in the order of the methods, each with one of its own: the servers' own grey to black, the others in colour.
const COLOURS: [RGBColor; 28] = [
    RGBColor(190, 190, 190),
    RGBColor(130, 130, 130),
    RGBColor(80, 80, 80),
    RGBColor(0, 0, 0),
    RGBColor(160, 150, 130),
    RGBColor(150, 100, 40),
    RGBColor(205, 170, 120),
    RGBColor(100, 70, 70),
    RGBColor(185, 120, 100),
    RGBColor(120, 200, 120),
    RGBColor(20, 90, 40),
    RGBColor(40, 140, 60),
    RGBColor(60, 110, 220),
    RGBColor(220, 40, 60),
    RGBColor(90, 200, 240),
    RGBColor(255, 190, 150),
    RGBColor(240, 140, 40),
    RGBColor(150, 60, 200),
    RGBColor(150, 210, 60),
    RGBColor(0, 170, 180),
    RGBColor(230, 120, 170),
    RGBColor(120, 140, 220),
    RGBColor(110, 30, 50),
    RGBColor(200, 190, 40),
    RGBColor(30, 50, 110),
    RGBColor(180, 180, 230),
    RGBColor(80, 120, 120),
    RGBColor(170, 80, 110),
];

/// In the order of the subjects: ours in colour.
const SUBJECT_COLOURS: [RGBColor; 8] = [
    RGBColor(60, 110, 220),
    RGBColor(220, 40, 60),
    RGBColor(40, 140, 60),
    RGBColor(240, 140, 40),
    RGBColor(150, 100, 40),
    RGBColor(150, 60, 200),
    RGBColor(130, 130, 130),
    RGBColor(0, 0, 0),
];

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
            shows.starts_with("3 replicas take 3.00 s by ") && shows.contains("0.50 of the 6.00 s of own, best"),
            "{shows}"
        );
        let headline = headline(&[&kept], folder.path()).unwrap().unwrap();
        assert_eq!((headline.file.as_str(), &headline.sentence), ("headline.svg", shows));
    }

    #[test]
    fn every_method_has_a_colour_of_its_own() {
        let count = order().count();
        assert!(count <= COLOURS.len(), "{count} methods");
        for (place, colour) in COLOURS.iter().enumerate() {
            assert!(!COLOURS[..place].contains(colour), "{colour:?}");
        }
    }

    #[test]
    fn names_of_files_are_plain() {
        assert_eq!(slug("Valkey 9.1 (9.1.2), 1 Gb/s"), "valkey-9-1-9-1-2-1-gb-s");
    }
}
