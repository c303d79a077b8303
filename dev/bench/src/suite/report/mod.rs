//! `remora-bench report`: writes tables and plots from kept runs into the benchmarks page.
//!
//! The page is written by hand, except for the text between two comments of a name:
//!
//! ```text
//!   <!-- begin sync -->      tables and plots, written by every `remora-bench report`
//!   <!-- end sync -->
//! ```
//!
//! The newest kept run of each label is shown; runs of different labels are shown beside each other.
//!
//! - [`tables`]: Markdown, the targets, and whether they were reached. [`plots`]: SVG. Mass replacement has both here.

pub mod plots;
pub mod tables;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use plots::{figure, slug};

use super::{Kept, feel, syncs, volume};
use crate::bars::{Bar, Chart, Family, Group};
use crate::mass::{COPIES, FORKS, FULL, SECONDS, Way};
use crate::sync::Result;
use crate::{Run, Sample, Spread, cell, distinct, least, suite};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Folder of the kept runs.
    #[arg(long, default_value = "bench/runs")]
    pub runs: PathBuf,
    /// The page to update.
    #[arg(long, default_value = "bench/report.md")]
    pub page: PathBuf,
    /// The page for readers, which shows one figure.
    #[arg(long, default_value = "docs/measured.md")]
    pub measured: PathBuf,
    /// Folder for the plots, beside the page.
    #[arg(long, default_value = "docs/plots")]
    pub plots: PathBuf,
}

/// Runs the subcommand.
pub fn run(options: &Options) -> Result<bool> {
    let page = fs::read_to_string(&options.page)
        .map_err(|error| format!("could not read {}: {error}", options.page.display()))?;
    fs::create_dir_all(&options.plots)?;
    let section = Section::new(options);

    let runs = suite::newest::<feel::Point>(&options.runs, "feel")?;
    let figures = plots::feel(&bare(&runs), &options.plots)?;
    let page = splice(&page, "feel", &section.text(&runs, tables::felt(&bare(&runs)), &figures))?;
    let felt = runs;

    let runs = suite::newest_of::<Run>(&options.runs, "mass_replacement")?;
    let page = splice(&page, "mass", &section.of_mass(&runs, &options.plots)?)?;

    let runs = suite::newest::<volume::Point>(&options.runs, "volume")?;
    let figures = plots::volume(&bare(&runs), &options.plots)?;
    let page = splice(&page, "volume", &section.text(&runs, volume::tables(&bare(&runs)), &figures))?;

    let runs = suite::newest::<syncs::Point>(&options.runs, "sync")?;
    let figures = plots::sync(&bare(&runs), &options.plots)?;
    let tables = tables::sync(&bare(&runs), &figures, &section.to_plots);
    let page = splice(&page, "sync", &section.text(&runs, tables, &[]))?;
    if let Some(figure) = plots::headline(&bare(&runs), &options.plots)? {
        let measured = fs::read_to_string(&options.measured)?;
        let to_plots = way(options.measured.parent().unwrap_or(Path::new("")), &options.plots);
        fs::write(&options.measured, splice(&measured, "figure", &figure.image(&to_plots))?)?;
    }
    let page = splice(&page, "targets", &tables::table(&bare(&runs), &bare(&felt)))?;

    fs::write(&options.page, page)?;
    println!("{} shows the newest of {}", options.page.display(), options.runs.display());
    Ok(true)
}

/// What the parts of the page need.
struct Section {
    /// Paths from the page's folder to the runs and the plots.
    to_runs: PathBuf,
    to_plots: PathBuf,
}

/// A figure that was drawn.
pub struct Figure {
    /// Its title.
    pub title: String,
    /// All that it shows, as words and numbers.
    pub words: String,
    /// The name of its file.
    pub file: String,
    /// What it shows, in one sentence without a full stop.
    pub sentence: String,
}

impl Figure {
    /// The figure as Markdown, for a page from which this is the way to the plots.
    fn image(&self, to_plots: &Path) -> String {
        let words = self.words.replace(['[', ']'], "");
        format!("![{words}]({}/{})", to_plots.display(), self.file)
    }
}

impl Section {
    fn new(options: &Options) -> Section {
        let folder = options.page.parent().unwrap_or(Path::new(""));
        Section { to_runs: way(folder, &options.runs), to_plots: way(folder, &options.plots) }
    }

    /// Plots, tables, links to the runs, and the runs' notes.
    fn text<P>(&self, runs: &[(PathBuf, Kept<P>)], tables: String, figures: &[Figure]) -> String {
        self.of(runs.iter().map(|(folder, kept)| (folder.as_path(), &kept.run)).collect(), tables, figures)
    }

    /// The same of mass replacement, with the figures drawn.
    fn of_mass(&self, runs: &[(PathBuf, Run)], plots: &Path) -> Result<String> {
        let (mut tables, mut figures) = (String::from(EXPLAINED), Vec::new());
        for (folder, run) in runs {
            let label = suite::label(folder, "mass_replacement");
            tables += &mass_tables(run, &label);
            figures.extend(mass_figures(run, &label, plots)?);
        }
        Ok(self.of(runs.iter().map(|(folder, run)| (folder.as_path(), run)).collect(), tables, &figures))
    }

    fn of(&self, runs: Vec<(&Path, &Run)>, tables: String, figures: &[Figure]) -> String {
        if runs.is_empty() {
            return "Not measured yet.".into();
        }
        let mut text = String::new();
        for Figure { words, file, .. } in figures {
            text += &format!("![{words}]({}/{file})\n", self.to_plots.display());
        }
        text += &format!("{tables}\nRaw data, machine and settings:");
        for (folder, _) in &runs {
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            text += &format!(" [{name}]({}/{name}/README.md)", self.to_runs.display());
        }
        text += "\n";
        for (folder, run) in runs {
            let name = folder.file_name().unwrap_or_default().to_string_lossy();
            for note in &run.notes {
                text += &format!("\n> {name}: {note}\n");
            }
        }
        text
    }
}

/// The runs without their folders.
fn bare<P>(runs: &[(PathBuf, Kept<P>)]) -> Vec<&Kept<P>> {
    runs.iter().map(|(_, kept)| kept).collect()
}

/// The path from a folder to a file, both relative to the same place, without `..` inside them.
fn way(from: &Path, to: &Path) -> PathBuf {
    let shared = from.components().zip(to.components()).take_while(|(one, other)| one == other).count();
    let up = from.components().skip(shared).map(|_| "..");
    up.map(PathBuf::from).chain(to.components().skip(shared).map(|part| PathBuf::from(part.as_os_str()))).collect()
}

/// Replaces the text between the comments of that name.
fn splice(page: &str, name: &str, text: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"));
    let cut = || {
        let (head, rest) = page.split_once(&begin)?;
        let (_, tail) = rest.split_once(&end)?;
        Some(format!("{head}{begin}\n{}\n{end}{tail}", text.trim_end().to_owned() + "\n"))
    };
    cut().ok_or_else(|| format!("the page lacks the lines {begin:?} and {end:?}").into())
}

// Mass replacement ([`crate::mass`]): a table and a figure for each server of a kept run.

/// The figures of one server.
struct Of<'a> {
    run: &'a Run,
    /// The server's kind, as the cases name it.
    server: &'a str,
}

/// One table for each server.
pub fn mass_tables(run: &Run, label: &str) -> String {
    let mut out = String::new();
    for of in servers(run) {
        let label = if label.is_empty() { String::new() } else { format!(", run {label}") };
        let _ = writeln!(out, "\n### All replicas of a cluster at once: {}{label}\n\n{HEAD}", of.server);
        for way in of.ways() {
            let value = |what| cell(of.spread(way, what), Spread::range);
            let whole = |what| cell(of.spread(way, what), Spread::whole);
            let cpu = |seconds: fn(&Sample) -> f64| {
                cell(Spread::of(of.samples(way, SECONDS).map(seconds)), |spread| spread.median(2))
            };
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                way.name(),
                value(SECONDS),
                cell(of.ratio(way), Spread::range),
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
pub fn mass_figures(run: &Run, label: &str, folder: &Path) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for of in servers(run) {
        let bar = |way: Way| {
            let seconds = of.spread(way, SECONDS)?;
            let ratio = of.ratio(way).map_or(String::new(), |ratio| format!("{:.2}, ", ratio.median));
            let copies = of.spread(way, COPIES);
            let copies = copies.map_or(String::new(), |copies| format!("{:.2} × data, ", copies.median));
            let forks = cell(of.spread(way, FORKS), Spread::whole);
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
    let named = run.samples.iter().filter_map(|sample| Some(sample.case.split_once(": ")?.0));
    distinct(named).into_iter().map(|server| Of { run, server }).collect()
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
        let best = least(own, |way| self.spread(*way, SECONDS))?;
        let rounds = |way| self.samples(way, SECONDS).map(|sample| (sample.round, sample.value)).collect::<Vec<_>>();
        Spread::of_ratios(rounds(way), rounds(best))
    }
}

const EXPLAINED: &str = "\
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

    #[test]
    fn text_written_by_hand_stays() {
        let page = "# Words\n<!-- begin sync -->\nold\n<!-- end sync -->\nmore words\n";
        let new = splice(page, "sync", "new\n").unwrap();
        assert_eq!(new, "# Words\n<!-- begin sync -->\n\nnew\n\n<!-- end sync -->\nmore words\n");
        assert_eq!(splice(&new, "sync", "new\n").unwrap(), new);
        assert!(splice(page, "feel", "new\n").is_err());
    }

    #[test]
    fn links_lead_from_the_page_to_the_runs() {
        assert_eq!(way(Path::new("docs"), Path::new("bench/runs")), Path::new("../bench/runs"));
        assert_eq!(way(Path::new("docs"), Path::new("docs/plots")), Path::new("plots"));
    }

    fn run() -> Run {
        let mut run = Run::new("mass_replacement", "see the case");
        for (round, slow) in [1.0, 2.0].into_iter().enumerate() {
            for (way, seconds, copies, forks) in
                [(Way::OwnDefault, 12.0, 2.0, 2.0), (Way::OwnBest, 8.0, 2.0, 1.0), (Way::RemoraBest, 4.0, 1.0, 1.0)]
            {
                for (what, value) in [(SECONDS, slow * seconds), (COPIES, copies), (FORKS, forks), (FULL, copies)] {
                    let sample = Sample::new(way.name(), case(Kind::Valkey9, what), round, value);
                    run.samples.push(sample.cost(0.25, 1.5, 1.0));
                }
            }
        }
        run
    }

    #[test]
    fn each_way_is_compared_with_the_best_of_its_own_in_the_same_round() {
        let table = mass_tables(&run(), "");
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
        let figures = mass_figures(&run(), "again", folder.path()).unwrap();
        assert_eq!(figures.len(), 1);
        let words = &figures[0].words;
        assert!(words.contains("Remora attend, best 6.00 s (0.50, 1.00 × data, 1)"), "{words}");
        let svg = std::fs::read_to_string(folder.path().join(&figures[0].file)).unwrap();
        assert!(figures[0].file.ends_with("-again.svg") && svg.contains(Way::OwnBest.name()));
    }
}
