//! The plots, as SVG: lines with dots, one per method, in colours that stay the same from plot to plot.

use std::path::Path;

use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::Plot;
use super::tables::{Cell, cells, groups, order, sizes};
use crate::Spread;
use crate::suite::feel::name_of;
use crate::suite::{Kept, feel, scaling, syncs};
use crate::sync::{Method, Result};

/// One line: its name, its colour, its points.
struct Line {
    name: &'static str,
    colour: RGBColor,
    points: Vec<(f64, f64)>,
}

/// One plot.
struct Picture<'a> {
    title: &'a str,
    x: &'a str,
    y: &'a str,
    /// Powers of ten at even distances.
    is_log_x: bool,
    is_log_y: bool,
    lines: Vec<Line>,
}

/// Time and bytes against the number of replicas, for each network.
///
/// # Errors
/// A file could not be written.
pub fn sync(runs: &[&Kept<syncs::Point>], folder: &Path) -> Result<Vec<Plot>> {
    let mut plots = Vec::new();
    for group in groups(runs).iter().filter(|group| group.numbers().len() > 1) {
        let lines = |figure: fn(&syncs::Point) -> f64| {
            let line = |method: Method| {
                let at = |replicas| Some((replicas as f64, group.spread(method, replicas, figure)?.median));
                Line::of(Some(method), group.numbers().into_iter().filter_map(at).collect())
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

/// The 99th percentile against the number of replicas, for each group of clients.
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
            // Without replicas all methods are the same.
            let points = of().filter(|cell| cell.first.method.is_none_or(|other| other == method));
            let points: Vec<(f64, f64)> =
                points.map(|cell| (cell.first.replicas as f64, cell.median(|point| point.felt.p99))).collect();
            (points.len() > 1).then(|| Line::of(Some(method), points))
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

/// Seconds against the size of the data set, and of the values.
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
            (points.len() > 1).then(|| Line::of(Some(method), points))
        };
        let lines: Vec<Line> = order().filter_map(line).collect();
        if lines.is_empty() {
            continue;
        }
        let mut picture = Picture::new(title, x, if grows == "size" { "seconds" } else { "seconds per GiB" }, lines);
        picture.is_log_x = grows == "value";
        plots.push(picture.draw(folder, &format!("scaling-{grows}.svg"))?);
    }
    Ok(plots)
}

impl Line {
    fn of(method: Option<Method>, mut points: Vec<(f64, f64)>) -> Line {
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        let place = order().position(|other| Some(other) == method).unwrap_or_default();
        Line { name: name_of(method), colour: COLOURS.get(place).copied().unwrap_or(BLACK), points }
    }
}

impl<'a> Picture<'a> {
    fn new(title: &'a str, x: &'a str, y: &'a str, lines: Vec<Line>) -> Picture<'a> {
        Picture { title, x, y, is_log_x: false, is_log_y: false, lines }
    }

    fn draw(&self, folder: &Path, file: &str) -> Result<Plot> {
        let path = folder.join(file);
        let (x, y) = (self.range(|point| point.0, self.is_log_x), self.range(|point| point.1, self.is_log_y));
        let area = SVGBackend::new(&path, SIZE).into_drawing_area();
        let drawn =
            area.fill(&WHITE).map_err(|error| error.to_string()).and_then(|()| match (self.is_log_x, self.is_log_y) {
                (false, false) => self.lines_on(&area, x.0..x.1, y.0..y.1),
                (true, false) => self.lines_on(&area, (x.0..x.1).log_scale(), y.0..y.1),
                (false, true) => self.lines_on(&area, x.0..x.1, (y.0..y.1).log_scale()),
                (true, true) => self.lines_on(&area, (x.0..x.1).log_scale(), (y.0..y.1).log_scale()),
            });
        drawn
            .and_then(|()| area.present().map_err(|error| error.to_string()))
            .map_err(|error| format!("could not draw {}: {error}", path.display()))?;
        Ok((self.title.to_owned(), file.to_owned()))
    }

    fn lines_on<X, Y>(
        &self,
        area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
        x: X,
        y: Y,
    ) -> std::result::Result<(), String>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let told = |error: DrawingAreaErrorKind<_>| error.to_string();
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, ("sans-serif", 16))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)
            .map_err(told)?;
        chart.configure_mesh().x_desc(self.x).y_desc(self.y).light_line_style(WHITE).draw().map_err(told)?;
        for Line { name, colour, points } in &self.lines {
            let (colour, style) = (*colour, colour.stroke_width(2));
            chart
                .draw_series(LineSeries::new(points.iter().copied(), style))
                .map_err(told)?
                .label(*name)
                .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
            let dots = points.iter().map(|point| Circle::new(*point, 3, colour.filled()));
            chart.draw_series(dots).map_err(told)?;
        }
        let mut labels = chart.configure_series_labels();
        let labels = labels
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3));
        labels.draw().map_err(told)
    }

    /// From 0, or on a scale of powers from a bit below the least, to a bit above the most.
    fn range(&self, figure: fn(&(f64, f64)) -> f64, is_log: bool) -> (f64, f64) {
        let figures =
            || self.lines.iter().flat_map(|line| &line.points).map(figure).filter(|figure| figure.is_finite());
        let most = figures().reduce(f64::max).unwrap_or(1.0).max(1e-6);
        let least = figures().reduce(f64::min).unwrap_or(0.0);
        if is_log { ((least * 0.7).max(most * 1e-9), most * 1.5) } else { (0.0, most * 1.08) }
    }
}

/// A file's name out of words.
fn slug(words: &str) -> String {
    let plain = words.to_lowercase().replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
    plain.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
}

/// Width and height in pixels.
const SIZE: (u32, u32) = (760, 420);

/// In the order of the methods: theirs grey to black, the copiers brown, ours in colour. A method beyond them is black.
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
