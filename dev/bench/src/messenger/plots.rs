//! Requests a second and their time over the number of connections, as SVG: one line with dots per subject.

use std::io;
use std::path::{Path, PathBuf};

use plotters::style::RGBColor;

use super::Case;
use crate::plot::{self, Axis};

/// A median.
#[derive(Clone, Debug)]
pub struct Point {
    /// The subject.
    pub subject: String,
    /// The case.
    pub case: Case,
    /// Requests a second.
    pub rate: f64,
    /// The median latency, in µs; 0 if a tool does not report it.
    pub p50: f64,
}

/// Draws two plots for each size and depth that was measured with several numbers of connections. Returns the files'
/// names.
///
/// # Errors
/// A file cannot be written.
pub fn draw(points: &[Point], folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut drawn = Vec::new();
    let mut shapes: Vec<(usize, usize)> = points.iter().map(|point| (point.case.request, point.case.depth)).collect();
    shapes.sort_unstable();
    shapes.dedup();
    for (request, depth) in shapes {
        let of_shape = points.iter().filter(|point| (point.case.request, point.case.depth) == (request, depth));
        let of_shape: Vec<&Point> = of_shape.collect();
        let title = format!("{} requests, {depth} under way on each connection", crate::bytes(request as u64));
        let name = |what: &str| folder.join(format!("{what}-{request}-{depth}.svg"));
        let rate = lines(&of_shape, |point| point.rate / 1e3);
        drawn.extend(picture(name("rate"), &title, "thousand/s", rate)?);
        let latency = lines(&of_shape, |point| point.p50);
        drawn.extend(picture(name("latency"), &title, "µs, median", latency)?);
    }
    Ok(drawn)
}

/// A subject and its points, by the number of connections.
type Line<'a> = (&'a str, Vec<(f64, f64)>);

/// The lines of the subjects that have at least two points with figures.
fn lines<'a>(points: &[&'a Point], figure: fn(&Point) -> f64) -> Vec<Line<'a>> {
    let mut lines: Vec<Line<'a>> = Vec::new();
    for point in points.iter().filter(|point| figure(point) > 0.0) {
        let at = (point.case.connections as f64, figure(point));
        match lines.iter_mut().find(|(subject, _)| *subject == point.subject) {
            Some((_, line)) => line.push(at),
            None => lines.push((&point.subject, vec![at])),
        }
    }
    lines.retain(|(_, line)| line.len() > 1);
    lines.iter_mut().for_each(|(_, line)| line.sort_by(|one, other| one.0.total_cmp(&other.0)));
    lines
}

fn picture(path: PathBuf, title: &str, y: &str, lines: Vec<Line<'_>>) -> io::Result<Option<PathBuf>> {
    if lines.is_empty() {
        return Ok(None);
    }
    let most = |of: fn(&(f64, f64)) -> f64| lines.iter().flat_map(|(_, line)| line).map(of).fold(1e-6, f64::max);
    let x = Axis { name: "connections", range: 0.8..most(|point| point.0) * 1.2, powers_of: Some(2.0) };
    let y = Axis { name: y, range: 0.0..most(|point| point.1) * 1.1, powers_of: None };
    let coloured = lines.into_iter().zip(COLOURS.into_iter().cycle());
    let lines = coloured.map(|((name, points), colour)| plot::Line { name, colour, points }).collect();
    plot::Picture { title, x, y, lines }.draw(&path).map_err(io::Error::other)?;
    Ok(Some(path))
}

/// The colours also differ in brightness, for readers who distinguish few colours.
const COLOURS: [RGBColor; 7] = [
    RGBColor(200, 30, 60),
    RGBColor(0, 0, 0),
    RGBColor(60, 110, 220),
    RGBColor(240, 150, 40),
    RGBColor(40, 140, 60),
    RGBColor(150, 60, 200),
    RGBColor(140, 140, 140),
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn point(subject: &str, connections: usize, rate: f64, p50: f64) -> Point {
        let case = Case { connections, depth: 1, request: 64, reply: 64 };
        Point { subject: subject.to_owned(), case, rate, p50 }
    }

    #[test]
    fn subjects_with_several_numbers_of_connections_have_lines_and_those_without_figures_none() {
        let folder = tempfile::tempdir().unwrap();
        let points = [
            point("ours", 16, 200_000.0, 80.0),
            point("ours", 1, 50_000.0, 20.0),
            point("a tool", 1, 40_000.0, 0.0),
            point("a tool", 16, 90_000.0, 0.0),
            point("alone", 1, 70_000.0, 9.0),
        ];
        draw(&points, folder.path()).unwrap();
        let file = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let (rate, latency) = (file("rate-64-1.svg"), file("latency-64-1.svg"));
        assert!(rate.contains("ours") && rate.contains("a tool") && !rate.contains("alone"));
        assert!(latency.contains("ours") && !latency.contains("a tool"));
        let borrowed: Vec<&Point> = points.iter().collect();
        assert_eq!(lines(&borrowed, |point| point.rate)[0].1, [(1.0, 50_000.0), (16.0, 200_000.0)]);
    }
}
