//! `xtask layout`: finds the layout of a server's build by watching it, for `module/builds/`.
//!
//! `remora module layout` does the same for users, and keeps what it finds by the build's id. A build in that folder is
//! known by its SHA-256, and nobody has to look for it.

// Stands alone: one command, as each file here; the search is in the crate `layout`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use clap::Args;
use remora_bench::sync::Result;
use remora_layout::names::Table;
use remora_layout::search::{Wanted, find};

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The server's program, or a script that becomes it by `exec`.
    program: PathBuf,
    /// Which package the program is from, for the first line of the file.
    #[arg(long, value_name = "WORDS")]
    package: String,
    /// The file to write; standard output without it.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let text = format!("# {}\n{}", options.package, learn(&options.program)?);
    match &options.out {
        None => print!("{text}"),
        Some(path) => fs::write(path, text)
            .map_err(|error| format!("the layout was not written to {}: {error}", path.display()))?,
    }
    Ok(())
}

/// The lines of the layout of that program, as files of `module/builds/` have them.
pub(crate) fn learn(program: &Path) -> Result<String> {
    let stop = AtomicBool::new(false);
    let found = find(&Wanted { program, called: None, debug_file: None, stop: &stop })?;
    if found.names != Table::Dynamic {
        return Err("the program does not show its functions: it was linked without -rdynamic".into());
    }
    // What follows from the program's SHA-256.
    let lines = found.text.lines().filter(|line| !line.starts_with("build = ") && !line.starts_with("names = "));
    Ok(lines.map(|line| format!("{line}\n")).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    /// The kept files are of several builds; those of the lab's servers are found by watching them.
    #[test]
    #[ignore = "long: make test-all"]
    fn the_layouts_of_the_labs_servers_are_found_again() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../module/builds");
        let kept: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
            .map(|text| text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect())
            .collect();
        for kind in remora_lab::require::kinds() {
            let learned = super::learn(&kind.binary().unwrap()).unwrap();
            assert!(kept.contains(&learned), "{kind}: no file of module/builds has\n{learned}");
        }
    }
}
