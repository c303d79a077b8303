//! Shell completions and man pages, made from the definition of the command line, so that they always agree with it.

use std::path::Path;

use crate::{
    args::{self, GenerateArgs, Generated},
    exit::Failure,
    progress,
};

/// Runs `remora generate`.
pub fn run(args: &GenerateArgs) -> Result<(), Failure> {
    match &args.what {
        Generated::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut args::definition(), NAME, &mut text);
            progress::print(&String::from_utf8_lossy(&text))
        }
        Generated::Man { directory } => write_man_pages(directory),
    }
}

fn write_man_pages(directory: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::local(format!("cannot write man pages to {}: {error}", directory.display()));
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(args::definition(), directory).map_err(failed)
}

const NAME: &str = "remora";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn there_is_a_man_page_for_every_command() {
        let folder = tempfile::tempdir().unwrap();
        write_man_pages(folder.path()).unwrap();
        for command in ["remora", "remora-source", "remora-replica", "remora-verify", "remora-load", "remora-status"] {
            let page = std::fs::read_to_string(folder.path().join(format!("{command}.1"))).unwrap();
            assert!(page.contains("Exit codes"), "{command}");
        }
    }

    #[test]
    fn completions_know_the_options() {
        let mut text = Vec::new();
        clap_complete::generate(clap_complete::Shell::Bash, &mut args::definition(), NAME, &mut text);
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("--token-file") && text.contains("--value-size"));
    }
}
