//! A chart of bars, drawn as SVG: one bar a figure, its name before it and its number behind it, in groups.
//!
//! ```text
//!   Title
//!   3 replicas
//!     replication, tuned  ████████████████████├─┤  24.61 s
//!     Remora tcp, relay   ███████├┤                 8.47 s   0.34
//! ```
//!
//! Each bar has its name beside it, so a reader needs neither a legend nor colours to tell them apart. Colours follow
//! the reader's light or dark background, which a drawing library with fixed colours cannot do.

use std::fmt::Write as _;
use std::path::Path;

use crate::Spread;

/// Whose figure it is, which decides the colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// The servers' own replication.
    Own,
    /// Ours.
    Ours,
    /// Another tool.
    Other,
}

/// One figure.
pub struct Bar {
    /// What stands before the bar.
    pub name: String,
    /// Whose it is.
    pub family: Family,
    /// How long it is, and the ends of its whisker.
    pub figure: Spread,
    /// What stands behind the number.
    pub note: String,
}

/// Bars that are compared with one another.
pub struct Group {
    /// What stands above them.
    pub title: String,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

/// A chart.
pub struct Chart {
    /// What stands at the top.
    pub title: String,
    /// What the numbers are: `s`.
    pub unit: &'static str,
    /// What stands above the notes.
    pub notes: &'static str,
    /// From top to bottom.
    pub groups: Vec<Group>,
}

/// In pixels.
const WIDTH: f64 = 920.0;
const ROW: f64 = 22.0;
const HEAD: f64 = 30.0;
const MARGIN: f64 = 14.0;
/// Between a bar and what stands beside it.
const GAP: f64 = 8.0;
/// A letter of names, numbers and notes on average, in DejaVu Sans: of the usual fonts that are `system-ui` somewhere,
/// it has the widest.
const LETTER: f64 = 7.6;
/// The shortest that the longest bar may be.
const LEAST: f64 = 120.0;
/// Letters of the title in one line, in that font.
const TITLE_LETTERS: usize = 90;

/// Characters of the longest bar on a terminal.
const COLUMNS: f64 = 40.0;

/// Colours for light and dark backgrounds. Those of the families differ in brightness too.
const STYLE: &str = "\
    text{font:13px system-ui,sans-serif;fill:#1f2328}\
    .title{font-weight:600;font-size:15px}.group{font-weight:600}.note{fill:#59636e}\
    .page{fill:#ffffff}.own{fill:#8c959f}.ours{fill:#0969da}.other{fill:#bf8700}.whisker{stroke:#1f2328;stroke-width:1.5}\
    @media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.page{fill:#0d1117}\
    .own{fill:#6e7681}.ours{fill:#4493f8}.other{fill:#d29922}.whisker{stroke:#e6edf3}}";

/// Figures that are further apart than this are drawn on a logarithmic scale: on a linear one the longest bar makes
/// one pixel of the others.
const APART: f64 = 60.0;

/// What the title says of such a scale.
const LOGARITHMIC: &str = " (logarithmic scale)";

/// How long a bar is.
#[derive(Clone, Copy, Debug)]
enum Scale {
    /// Pixels for each unit.
    Linear(f64),
    /// The figure of a bar without a length, and pixels for each factor of e.
    Logarithmic { floor: f64, pixels: f64 },
}

impl Scale {
    fn of(figures: impl Iterator<Item = Spread> + Clone, length: f64) -> Scale {
        let finite = |figure: &f64| figure.is_finite() && *figure > 0.0;
        let most = figures.clone().map(|figure| figure.high).filter(finite).fold(f64::MIN_POSITIVE, f64::max);
        let least = figures.map(|figure| figure.median).filter(finite).fold(most, f64::min);
        if most / least <= APART {
            return Scale::Linear(length / most);
        }
        // The power of ten below the least, so that its bar has a length.
        let floor = 10_f64.powf((least / 2.0).log10().floor());
        Scale::Logarithmic { floor, pixels: length / (most / floor).ln() }
    }

    fn pixels(self, figure: f64) -> f64 {
        match self {
            Scale::Linear(pixels) => figure * pixels,
            Scale::Logarithmic { floor, pixels } => (figure.max(floor) / floor).ln() * pixels,
        }
    }
}

impl Chart {
    /// Draws the chart into that file.
    pub fn draw(&self, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.svg())
    }

    /// What the chart shows, as one line of words and numbers.
    pub fn words(&self) -> String {
        let bar = |bar: &Bar| {
            let note = if bar.note.is_empty() { String::new() } else { format!(" ({})", bar.note) };
            format!("{} {}{note}", bar.name, self.number(bar.figure.median))
        };
        let group =
            |group: &Group| format!("{}: {}", group.title, group.bars.iter().map(bar).collect::<Vec<_>>().join(", "));
        format!("{}. {}", self.title, self.groups.iter().map(group).collect::<Vec<_>>().join("; "))
    }

    /// The chart for a terminal, in lines of a usual width.
    pub fn text(&self) -> String {
        let bars = || self.groups.iter().flat_map(|group| &group.bars);
        let names = bars().map(|bar| bar.name.chars().count()).max().unwrap_or(0);
        let most =
            bars().map(|bar| bar.figure.median).filter(|most| most.is_finite()).fold(f64::MIN_POSITIVE, f64::max);
        let mut out = format!("{}\n", self.title);
        for group in &self.groups {
            let _ = writeln!(out, "  {}", group.title);
            for bar in &group.bars {
                let columns = (bar.figure.median / most * COLUMNS).round().max(1.0) as usize;
                let (name, number) = (&bar.name, self.number(bar.figure.median));
                let line = format!("    {name:<names$}  {} {number}  {}", "█".repeat(columns), bar.note);
                let _ = writeln!(out, "{}", line.trim_end());
            }
        }
        out
    }

    fn number(&self, figure: f64) -> String {
        let digits = if figure < 9.995 {
            2
        } else if figure < 99.95 {
            1
        } else {
            0
        };
        format!("{figure:.digits$} {}", self.unit)
    }

    fn svg(&self) -> String {
        let rows: usize = self.groups.iter().map(|group| group.bars.len()).sum();
        let (left, length) = self.across();
        let scale = Scale::of(self.groups.iter().flat_map(|group| &group.bars).map(|bar| bar.figure), length);
        let title = self.title_lines(scale);
        let above = HEAD + (title.len() - 1) as f64 * ROW;
        let height = 2.0 * MARGIN + above + self.groups.len() as f64 * HEAD + rows as f64 * ROW;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\
             <title>{}</title><style>{STYLE}</style><rect class=\"page\" width=\"100%\" height=\"100%\"/>\n",
            escaped(&self.words())
        );
        let mut y = MARGIN + ROW / 2.0;
        for (place, line) in title.iter().enumerate() {
            text(&mut out, "title", MARGIN, y + place as f64 * ROW, "start", line);
        }
        y += above;
        for group in &self.groups {
            text(&mut out, "group", MARGIN, y, "start", &group.title);
            text(&mut out, "note", WIDTH - MARGIN, y, "end", self.notes);
            y += ROW;
            for bar in &group.bars {
                self.bar(&mut out, bar, y, left, scale);
                y += ROW;
            }
            y += HEAD - ROW;
        }
        out.push_str("</svg>\n");
        out
    }

    /// Where bars begin, behind the longest name, and how long the longest may be, before its number and its note.
    fn across(&self) -> (f64, f64) {
        let longest = |letters: fn(&Chart, &Bar) -> usize| {
            let bars = self.groups.iter().flat_map(|group| &group.bars);
            bars.map(|bar| letters(self, bar)).max().unwrap_or(0) as f64 * LETTER
        };
        let left = MARGIN + longest(|_, bar| bar.name.chars().count()) + GAP;
        let beside = longest(|chart, bar| chart.number(bar.figure.median).chars().count() + bar.note.chars().count());
        (left, (WIDTH - left - 2.0 * GAP - beside - MARGIN).max(LEAST))
    }

    /// The title in as many lines as it needs: a long one is broken behind what it is about.
    fn title_lines(&self, scale: Scale) -> Vec<String> {
        let suffix = if matches!(scale, Scale::Logarithmic { .. }) { LOGARITHMIC } else { "" };
        let title = format!("{}{suffix}", self.title);
        match title.split_once(": ") {
            Some((about, of)) if title.chars().count() > TITLE_LETTERS => vec![format!("{about}:"), of.to_owned()],
            _ => vec![title],
        }
    }

    fn bar(&self, out: &mut String, bar: &Bar, y: f64, left: f64, scale: Scale) {
        let Spread { median, low, high, .. } = bar.figure;
        let class = match bar.family {
            Family::Own => "own",
            Family::Ours => "ours",
            Family::Other => "other",
        };
        text(out, "name", left - GAP, y, "end", &bar.name);
        let (width, top, thick) = (scale.pixels(median).max(1.0), y - ROW / 2.0 + 3.0, ROW - 6.0);
        let _ = writeln!(
            out,
            "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{thick:.1}\" rx=\"2\"/>"
        );
        let (from, to) = (left + scale.pixels(low), left + scale.pixels(high));
        if to - from >= 2.0 {
            let lines = [(from, y, to, y), (from, y - 4.0, from, y + 4.0), (to, y - 4.0, to, y + 4.0)];
            for (x1, y1, x2, y2) in lines {
                let _ = writeln!(
                    out,
                    "<line class=\"whisker\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
                );
            }
        }
        text(out, "number", left + width.max(to - left) + GAP, y, "start", &self.number(median));
        text(out, "note", WIDTH - MARGIN, y, "end", &bar.note);
    }
}

/// A text whose middle is at this height; nothing without words.
fn text(out: &mut String, class: &str, x: f64, y: f64, anchor: &str, words: &str) {
    if words.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" dominant-baseline=\"central\">{}</text>",
        escaped(words)
    );
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn bar(name: &str, family: Family, figures: &[f64], note: &str) -> Bar {
        Bar { name: name.into(), family, figure: Spread::of(figures.iter().copied()).unwrap(), note: note.into() }
    }

    fn chart() -> Chart {
        let bars = vec![
            bar("tuned", Family::Own, &[24.0, 25.0, 26.0], "1.00"),
            bar("ours <fast>", Family::Ours, &[8.0, 8.5, 8.5], "0.34"),
        ];
        let groups = vec![Group { title: "3 replicas".into(), bars }];
        Chart { title: "Seconds & more".into(), unit: "s", notes: "of own", groups }
    }

    /// The number of an attribute in a line.
    fn attribute(line: &str, name: &str) -> f64 {
        let rest = line.split_once(&format!(" {name}=\"")).unwrap().1;
        rest.split_once('"').unwrap().0.parse().unwrap()
    }

    #[test]
    fn bars_are_as_long_as_their_figures_and_stay_on_the_page() {
        let svg = chart().svg();
        let line =
            |class: &str| svg.lines().find(|line| line.starts_with(&format!("<rect class=\"{class}\""))).unwrap();
        let (own, ours) = (attribute(line("own"), "width"), attribute(line("ours"), "width"));
        assert!((ours / own - 8.5 / 25.0).abs() < 0.01, "{own} {ours}");
        for text in svg.lines().filter(|line| line.starts_with("<text")) {
            let (x, y) = (attribute(text, "x"), attribute(text, "y"));
            assert!((0.0..=WIDTH).contains(&x) && y > 0.0 && y < attribute(&svg, "height"), "{text}");
        }
        // The longest bar, its whisker and its number end before the notes.
        let (left, longest) = chart().across();
        assert!(own < longest && left + longest + 11.0 * LETTER < WIDTH, "{left} {longest}");
        assert!(svg.contains("ours &lt;fast&gt;") && svg.contains("25.0 s") && svg.contains("8.50 s"));
        assert!(svg.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn figures_far_apart_are_drawn_on_a_logarithmic_scale() {
        let mut chart = chart();
        chart.groups[0].bars[0].figure = Spread::of([11_921.0]).unwrap();
        let svg = chart.svg();
        let width = |class: &str| {
            let begin = format!("<rect class=\"{class}\"");
            attribute(svg.lines().find(|line| line.starts_with(&begin)).unwrap(), "width")
        };
        // Four powers of ten from 1 to 11,921, and not quite one to 8.5.
        assert!((width("ours") / width("own") - 8.5_f64.ln() / 11_921_f64.ln()).abs() < 0.01, "{svg}");
        assert!(svg.contains("Seconds &amp; more (logarithmic scale)"));
    }

    #[test]
    fn rows_are_below_one_another() {
        let svg = chart().svg();
        let heights: Vec<f64> = svg
            .lines()
            .filter(|line| {
                line.starts_with("<text class=\"title\"")
                    || line.starts_with("<text class=\"group\"")
                    || line.starts_with("<text class=\"name\"")
            })
            .map(|line| attribute(line, "y"))
            .collect();
        assert_eq!(heights.len(), 4);
        assert!(heights.windows(2).all(|pair| pair[1] - pair[0] >= ROW - 0.1), "{heights:?}");
    }

    #[test]
    fn a_long_title_has_two_lines_and_long_names_have_room() {
        let mut chart = chart();
        let (left, longest) = chart.across();
        chart.title = format!("Seconds: of {}", "a".repeat(TITLE_LETTERS));
        chart.groups[0].bars[0].name = "n".repeat(40);
        let svg = chart.svg();
        let titles: Vec<&str> = svg.lines().filter(|line| line.starts_with("<text class=\"title\"")).collect();
        assert!(titles.len() == 2 && titles[0].contains(">Seconds:<"), "{titles:?}");
        assert_eq!(attribute(titles[1], "y") - attribute(titles[0], "y"), ROW);
        let wide = chart.across();
        assert!((wide.0 - left - 29.0 * LETTER).abs() < 1e-9 && wide.0 + wide.1 <= left + longest + 1e-9, "{wide:?}");
    }

    #[test]
    fn a_terminal_shows_the_same_bars() {
        let text = chart().text();
        let bar = |name: &str| text.lines().find(|line| line.contains(name)).unwrap().matches('█').count();
        assert_eq!((bar("tuned"), bar("ours <fast>")), (40, 14), "{text}");
        assert!(text.contains("25.0 s  1.00"), "{text}");
    }

    #[test]
    fn the_words_have_every_number() {
        assert_eq!(chart().words(), "Seconds & more. 3 replicas: tuned 25.0 s (1.00), ours <fast> 8.50 s (0.34)");
    }
}
