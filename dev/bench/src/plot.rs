//! One plot: lines with dots over two axes, drawn as SVG. The caller chooses the content, the colours and the range of
//! the axes.

use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

/// One line: its name, its colour, its points.
pub(crate) struct Line<'a> {
    pub(crate) name: &'a str,
    pub(crate) colour: RGBColor,
    pub(crate) points: Vec<(f64, f64)>,
}

/// The labels of an axis.
pub(crate) struct Axis<'a> {
    pub(crate) name: &'a str,
    pub(crate) range: Range<f64>,
    /// Powers of this base at even distances; `None` for a linear axis.
    pub(crate) powers_of: Option<f64>,
}

/// One plot.
pub(crate) struct Picture<'a> {
    pub(crate) title: &'a str,
    pub(crate) x: Axis<'a>,
    pub(crate) y: Axis<'a>,
    pub(crate) lines: Vec<Line<'a>>,
}

/// Width and height in pixels.
const SIZE: (u32, u32) = (760, 420);

impl Picture<'_> {
    /// Draws the plot into that file.
    ///
    /// # Errors
    /// A sentence: the file could not be written.
    pub(crate) fn draw(&self, path: &Path) -> Result<(), String> {
        let failed = |error: &dyn Display| format!("could not draw {}: {error}", path.display());
        let area = SVGBackend::new(path, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(|error| failed(&error))?;
        let (x, y) = (self.x.range.clone(), self.y.range.clone());
        let drawn = match (self.x.powers_of, self.y.powers_of) {
            (None, None) => self.lines_on(&area, x, y),
            (Some(base), None) => self.lines_on(&area, x.log_scale().base(base), y),
            (None, Some(base)) => self.lines_on(&area, x, y.log_scale().base(base)),
            (Some(base), Some(other)) => self.lines_on(&area, x.log_scale().base(base), y.log_scale().base(other)),
        };
        drawn.map_err(|error| failed(&error))?;
        area.present().map_err(|error| failed(&error))
    }

    fn lines_on<X, Y>(&self, area: &DrawingArea<SVGBackend<'_>, Shift>, x: X, y: Y) -> Result<(), String>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let as_text = |error: DrawingAreaErrorKind<_>| error.to_string();
        let mut chart = ChartBuilder::on(area)
            .caption(self.title, ("sans-serif", 16))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(x, y)
            .map_err(as_text)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc(self.x.name).y_desc(self.y.name).light_line_style(WHITE);
        if self.y.powers_of == Some(10.0) {
            mesh.y_label_formatter(&decimal_step);
        }
        mesh.draw().map_err(as_text)?;
        drop(mesh);
        for Line { name, colour, points } in &self.lines {
            let (colour, style) = (*colour, colour.stroke_width(2));
            chart
                .draw_series(LineSeries::new(points.iter().copied(), style))
                .map_err(as_text)?
                .label(*name)
                .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
            let dots = points.iter().map(|point| Circle::new(*point, 3, colour.filled()));
            chart.draw_series(dots).map_err(as_text)?;
        }
        let mut labels = chart.configure_series_labels();
        let labels = labels
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3));
        labels.draw().map_err(as_text)
    }
}

/// The label of a place on a logarithmic axis: 1, 2 and 5 of each power of ten. The others would lie over one another.
fn decimal_step(place: &f64) -> String {
    let lead = place / 10f64.powf(place.log10().floor());
    let is_step = [1.0, 2.0, 5.0, 10.0].iter().any(|step| (lead - step).abs() < 1e-6);
    if is_step { place.to_string() } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logarithmic_axis_has_labels_that_do_not_lie_over_one_another() {
        let labels = [0.5, 1.0, 3.0, 20.0, 900.0, 9000.0, 10000.0].map(|place| decimal_step(&place));
        assert_eq!(labels, ["0.5", "1", "", "20", "", "", "10000"]);
    }
}
