//! Pictures: those of the manual that show the program, made anew from the program itself.
//!
//! - [`page`]: the page of `--metrics` in a real browser, while three replicas read.
//! - [`session`]: the first part of `docs/tutorial.md`, run and recorded as an asciicast; [`terminal`] draws
//!   such a [`cast`].
//!
//! Tests check what needs no servers: that the kept recording has the commands of the tutorial and the kept drawing is
//! that of the recording, that the page's files are those of its pictures, that the plots are those of the kept runs,
//! and that every picture that a page names is there.

mod cast;
mod page;
mod session;
mod terminal;

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use remora_bench::sync::{Program, Result};
use remora_lab::server::project_root;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Make these only.
    #[arg(long, value_delimiter = ',', default_value = "page,session")]
    only: Vec<Which>,

    /// The folder for the pictures; without it that of the manual.
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
}

/// A picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// The page of `--metrics`, light and dark.
    Page,
    /// The first part of the tutorial, recorded and drawn.
    Session,
    /// The drawing of the kept recording, which is not made anew.
    Drawing,
}

/// Makes the pictures.
pub(crate) fn run(options: &Options) -> Result<()> {
    let folder = options.to.clone().unwrap_or_else(|| project_root().join("docs/pictures"));
    std::fs::create_dir_all(&folder)?;
    for which in &options.only {
        match which {
            Which::Page => page::take(&Program::build()?, &folder)?,
            Which::Session => session::record(&Program::build()?, &folder)?,
            Which::Drawing => session::draw(&folder)?,
        }
    }
    Ok(())
}

/// Says what was made, and fails if it is too large for a repository.
fn made(path: &Path, most: u64) -> Result<()> {
    let bytes = std::fs::metadata(path)?.len();
    println!("{}: {} KB", path.display(), bytes.div_ceil(1000));
    match bytes <= most {
        true => Ok(()),
        false => Err(format!("{} has more than {most} bytes", path.display()).into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeSet;
    use std::fs;

    use remora_bench::suite::report;
    use remora_lab::scratch;

    use super::*;

    /// The pages that show pictures.
    fn pages() -> Vec<PathBuf> {
        let mut pages = vec![project_root().join("README.md"), project_root().join("bench/report.md")];
        let mut folders = vec![project_root().join("docs")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|kind| kind == "md") {
                    pages.push(path);
                }
            }
        }
        pages
    }

    /// The pictures that a text names, in Markdown or HTML.
    fn named(text: &str) -> Vec<&str> {
        let words = text.split(['(', ')', '"', '\n']);
        words.filter(|word| [".svg", ".png"].iter().any(|end| word.ends_with(end)) && !word.contains(' ')).collect()
    }

    #[test]
    fn pictures_are_found_in_markdown_and_html() {
        let text = "![Words (two)](a/b.svg) and [a link](c.md)\n<img src=\"d.png\" alt=\"of e.png\">";
        assert_eq!(named(text), ["a/b.svg", "d.png"]);
    }

    #[test]
    fn every_picture_that_a_page_names_is_there_and_none_is_left_over() {
        let mut shown = BTreeSet::new();
        for page in pages() {
            let text = fs::read_to_string(&page).unwrap();
            for name in named(&text) {
                let path = page.parent().unwrap().join(name);
                let path = path.canonicalize().unwrap_or_else(|error| panic!("{}: {name}: {error}", page.display()));
                shown.insert(path);
            }
        }
        assert!(shown.len() > 30, "{shown:?}");
        for folder in ["docs/pictures", "docs/plots"] {
            for entry in fs::read_dir(project_root().join(folder)).unwrap() {
                let path = entry.unwrap().path().canonicalize().unwrap();
                let is_picture = path.extension().is_some_and(|kind| kind == "svg" || kind == "png");
                assert!(!is_picture || shown.contains(&path), "no page shows {}", path.display());
            }
        }
    }

    #[test]
    fn the_plots_are_those_of_the_kept_runs() {
        let (root, scratch) = (project_root(), scratch::folder("plots").unwrap());
        let copy = |path: &str| scratch.path().join(path);
        fs::create_dir_all(copy("docs/plots")).unwrap();
        fs::create_dir_all(copy("bench")).unwrap();
        std::os::unix::fs::symlink(root.join("bench/runs"), copy("bench/runs")).unwrap();
        for page in ["docs/measured.md", "bench/report.md"] {
            fs::copy(root.join(page), copy(page)).unwrap();
        }
        let options = report::Options {
            runs: copy("bench/runs"),
            page: copy("bench/report.md"),
            measured: copy("docs/measured.md"),
            plots: copy("docs/plots"),
        };
        assert!(report::run(&options).unwrap());
        let how = "run `cargo run -p remora-bench --bin remora-bench -- report`";
        for page in ["docs/measured.md", "bench/report.md"] {
            let made = fs::read_to_string(copy(page)).unwrap().replace(&format!("{}/", scratch.path().display()), "");
            assert!(made == fs::read_to_string(root.join(page)).unwrap(), "{page} has other figures: {how}");
        }
        let mut plots = 0;
        for entry in fs::read_dir(copy("docs/plots")).unwrap() {
            let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
            let kept = fs::read(root.join("docs/plots").join(&name)).unwrap_or_default();
            assert!(fs::read(path).unwrap() == kept, "docs/plots/{} is another plot: {how}", name.display());
            plots += 1;
        }
        assert!(plots > 20, "{plots} plots");
    }

    #[test]
    fn a_picture_that_is_too_large_for_the_repository_is_an_error() {
        let folder = scratch::folder("made").unwrap();
        let path = folder.path().join("picture");
        fs::write(&path, [0; 1000]).unwrap();
        assert!(made(&path, 1000).is_ok());
        let why = made(&path, 999).unwrap_err().to_string();
        assert!(why.contains("999") && why.contains("picture"), "{why}");
    }
}
