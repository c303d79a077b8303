//! The plots, as SVG: lines with dots, one per method, in colours that stay the same from plot to plot.

use std::path::Path;

use clap::ValueEnum;
use plotters::style::{BLACK, RGBColor};

use super::Plot;
use super::tables::{Cell, cells, groups, order, sizes};
use crate::Spread;
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
    /// Powers of ten at even distances.
    is_log_x: bool,
    is_log_y: bool,
    lines: Vec<Line<'static>>,
}

/// Draws time and bytes against the number of replicas, for each network.
///
/// # Errors
/// A file could not be written.
pub fn sync(runs: &[&Kept<syncs::Point>], folder: &Path) -> Result<Vec<Plot>> {
    let mut plots = Vec::new();
    for group in groups(runs).iter().filter(|group| group.numbers().len() > 1) {
        let lines = |figure: fn(&syncs::Point) -> f64| {
            let line = |method: Method| {
                let at = |replicas| Some((replicas as f64, group.spread(method, replicas, figure)?.median));
                line_of(Some(method), group.numbers().into_iter().filter_map(at).collect())
            };
            group.methods().into_iter().map(line).collect()
        };
        let name = slug(&format!("{} {} {} {}", group.server, group.network, group.bytes >> 20, group.label));
        let title = format!("Seconds until the last replica: {}", group.title());
        let seconds = Picture::new(&title, "replicas", "seconds", lines(|point| point.seconds));
        plots.push(seconds.draw(folder, &format!("sync-seconds-{name}.svg"))?);
        let title = format!("MB out of the primary's host: {}", group.title());
        let sent = Picture::new(&title, "replicas", "MB", lines(|point| point.sent as f64 / 1e6));
        plots.push(sent.draw(folder, &format!("sync-sent-{name}.svg"))?);
    }
    Ok(plots)
}

/// Draws the 99th percentile against the number of replicas, for each group of clients.
///
/// # Errors
/// A file could not be written.
pub fn feel(runs: &[&Kept<feel::Point>], folder: &Path) -> Result<Vec<Plot>> {
    let cells = cells(runs);
    let key = |cell: &Cell<'_>| {
        let feel::Point { server, network, clients, .. } = cell.first;
        [server.clone(), network.clone(), clients.clone(), cell.label.to_owned()]
    };
    let mut groups: Vec<[String; 4]> = cells.iter().map(key).collect();
    groups.dedup();
    let mut plots = Vec::new();
    for group in groups {
        let of = || cells.iter().filter(|cell| key(cell) == group);
        let [server, network, clients, label] = &group;
        let line = |method: Method| {
            // Without replicas all methods are equal.
            let points = of().filter(|cell| cell.first.method.is_none_or(|other| other == method));
            let points: Vec<(f64, f64)> =
                points.map(|cell| (cell.first.replicas as f64, cell.median(|point| point.felt.p99))).collect();
            (points.len() > 1).then(|| line_of(Some(method), points))
        };
        let title = format!("99th percentile of what {clients} clients wait: {server}, {network}");
        let mut picture = Picture::new(&title, "replicas being made", "ms", order().filter_map(line).collect());
        picture.is_log_y = true;
        plots.push(
            picture.draw(folder, &format!("feel-{}.svg", slug(&format!("{server} {network} {clients} {label}"))))?,
        );
    }
    Ok(plots)
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
        let x = self.axis(self.x, |point| point.0, self.is_log_x);
        let y = self.axis(self.y, |point| point.1, self.is_log_y);
        plot::Picture { title: self.title, x, y, lines: self.lines }.draw(&folder.join(file))?;
        Ok((self.title.to_owned(), file.to_owned()))
    }

    /// An axis from 0, or a logarithmic one from a bit below the least value to a bit above the greatest.
    fn axis(&self, name: &'a str, figure: fn(&(f64, f64)) -> f64, is_log: bool) -> Axis<'a> {
        let figures =
            || self.lines.iter().flat_map(|line| &line.points).map(figure).filter(|figure| figure.is_finite());
        let most = figures().reduce(f64::max).unwrap_or(1.0).max(1e-6);
        let least = figures().reduce(f64::min).unwrap_or(0.0);
        let range = if is_log { (least * 0.7).max(most * 1e-9)..most * 1.5 } else { 0.0..most * 1.08 };
        Axis { name, range, powers_of: is_log.then_some(10.0) }
    }
}

/// A file name from words.
fn slug(words: &str) -> String {
    let plain = words.to_lowercase().replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
    plain.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
}

/// Colours in the order of the methods: the servers' own grey to black, the copiers brown, ours in colour. Further
/// methods are black.
const COLOURS: [RGBColor; 13] = [
    RGBColor(190, 190, 190),
    RGBColor(130, 130, 130),
    RGBColor(80, 80, 80),
    RGBColor(0, 0, 0),
    RGBColor(150, 100, 40),
    RGBColor(205, 170, 120),
    RGBColor(120, 200, 120),
    RGBColor(40, 140, 60),
    RGBColor(60, 110, 220),
    RGBColor(220, 40, 60),
    RGBColor(240, 140, 40),
    RGBColor(150, 60, 200),
    RGBColor(150, 210, 60),
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
    fn a_plot_has_a_line_with_its_name_for_every_method() {
        let folder = tempfile::tempdir().unwrap();
        let points = [Method::OwnBest, Method::RemoraRelay]
            .into_iter()
            .flat_map(|method| [1, 3].map(|replicas| point(method, replicas, 0, replicas as f64, 5)))
            .collect();
        let plots = sync(&[&kept(points)], folder.path()).unwrap();
        assert_eq!(plots.len(), 2);
        let svg = std::fs::read_to_string(folder.path().join(&plots[0].1)).unwrap();
        for name in [Method::OwnBest.name(), Method::RemoraRelay.name(), "seconds"] {
            assert!(svg.contains(name), "{name} is missing");
        }
        let red = "#DC283C";
        assert!(svg.contains(red), "the line with relay is not in its colour");
    }

    #[test]
    fn names_of_files_are_plain() {
        assert_eq!(slug("Valkey 9.1 (9.1.2), 1 Gb/s"), "valkey-9-1-9-1-2-1-gb-s");
    }
}
