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
//! - [`tables`], [`mass`]: Markdown. [`targets`]: the targets, and whether they were reached. [`plots`]:
//!   SVG.

pub mod mass;
pub mod plots;
pub mod tables;
pub mod targets;

use std::fs;
use std::path::{Path, PathBuf};

use super::kept::{self, Kept};
use super::{feel, syncs, volume};
use crate::Run;
use crate::sync::Result;

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
///
/// # Errors
/// A kept run cannot be read, a file not be written, or the page lacks a pair of comments.
pub fn run(options: &Options) -> Result<bool> {
    let page = fs::read_to_string(&options.page)
        .map_err(|error| format!("could not read {}: {error}", options.page.display()))?;
    fs::create_dir_all(&options.plots)?;
    let section = Section::new(options);

    let runs = kept::newest::<feel::Point>(&options.runs, "feel")?;
    let figures = plots::feel(&bare(&runs), &options.plots)?;
    let plots: Vec<Plot> = figures.into_iter().map(|figure| (figure.words, figure.file)).collect();
    let page = splice(&page, "feel", &section.text(&runs, tables::felt(&bare(&runs)), &plots))?;
    let felt = runs;

    let runs = kept::newest_of::<Run>(&options.runs, "mass_replacement")?;
    let page = splice(&page, "mass", &section.of_mass(&runs, &options.plots)?)?;

    let runs = kept::newest::<volume::Point>(&options.runs, "volume")?;
    let figures = plots::volume(&bare(&runs), &options.plots)?;
    let plots: Vec<Plot> = figures.into_iter().map(|figure| (figure.words, figure.file)).collect();
    let page = splice(&page, "volume", &section.text(&runs, volume::tables::tables(&bare(&runs)), &plots))?;

    let runs = kept::newest::<syncs::Point>(&options.runs, "sync")?;
    let figures = plots::sync(&bare(&runs), &options.plots)?;
    let tables = tables::sync(&bare(&runs), &figures, &section.to_plots);
    let page = splice(&page, "sync", &section.text(&runs, tables, &[]))?;
    if let Some(figure) = plots::headline(&bare(&runs), &options.plots)? {
        let measured = fs::read_to_string(&options.measured)?;
        let to_plots = way(options.measured.parent().unwrap_or(Path::new("")), &options.plots);
        fs::write(&options.measured, splice(&measured, "figure", &figure.image(&to_plots))?)?;
    }
    let page = splice(&page, "targets", &targets::table(&bare(&runs), &bare(&felt)))?;

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

/// A plot's title and the name of its file.
pub type Plot = (String, String);

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
    fn text<P>(&self, runs: &[(PathBuf, Kept<P>)], tables: String, plots: &[Plot]) -> String {
        self.of(runs.iter().map(|(folder, kept)| (folder.as_path(), &kept.run)).collect(), tables, plots)
    }

    /// The same of mass replacement, with the figures drawn.
    fn of_mass(&self, runs: &[(PathBuf, Run)], plots: &Path) -> Result<String> {
        let (mut tables, mut figures) = (String::from(mass::EXPLAINED), Vec::new());
        for (folder, run) in runs {
            let label = kept::label(folder, "mass_replacement");
            tables += &mass::tables(run, &label);
            figures.extend(mass::figures(run, &label, plots)?.into_iter().map(|figure| (figure.words, figure.file)));
        }
        Ok(self.of(runs.iter().map(|(folder, run)| (folder.as_path(), run)).collect(), tables, &figures))
    }

    fn of(&self, runs: Vec<(&Path, &Run)>, tables: String, plots: &[Plot]) -> String {
        if runs.is_empty() {
            return "Not measured yet.".into();
        }
        let mut text = String::new();
        for (title, file) in plots {
            text += &format!("![{title}]({}/{file})\n", self.to_plots.display());
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

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
}
