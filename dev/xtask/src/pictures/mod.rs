//! Pictures: those of the manual that show the program, made anew from the program itself.
//!
//! - [`page`]: the page of `--metrics` in a real browser, while three replicas read.
//! - [`session`]: the five minutes of `README.md`, run and recorded as an asciicast; [`terminal`] draws
//!   such a [`cast`].
//!
//! Tests check that the kept recording has the commands of `README.md`, and that the kept drawing is that of the
//! recording.

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
    /// The five minutes of README.md, recorded and drawn.
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
