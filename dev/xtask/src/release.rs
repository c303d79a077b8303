//! `xtask release`: everything of a release but publishing it.
//!
//! ```text
//!   clean tree? newer version? changes written down? ──▶ programs that dist needs ──▶ .ci/run
//!     ──▶ version in Cargo.toml and both lock files, CHANGELOG: a date ──▶ commit and tag ──▶ xtask dist
//! ```
//!
//! A failure before the commit leaves all files as they were.

use std::fs;
use std::process::Command;

use clap::Args;
use remora_bench::sync::Result;

use crate::dist;
use crate::process::{cargo, said, succeed};

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The new version: three numbers with points between them.
    version: String,
    /// Do not run all checks and tests first: they passed on this very commit.
    #[arg(long)]
    checked: bool,
    #[command(flatten)]
    dist: dist::Options,
}

/// The heading of changes that are in no release.
const UNRELEASED: &str = "## Unreleased";

/// The files that a release changes.
const FILES: [&str; 4] = ["CHANGELOG.md", "Cargo.toml", "Cargo.lock", "dev/fuzz/Cargo.lock"];

/// The host of a repository that nobody has named yet.
const UNKNOWN_FORGE: &str = "forge.example";

pub(crate) fn run(options: &Options) -> Result<()> {
    let changed = said(Command::new("git").args(["status", "--porcelain"]))?;
    if !changed.is_empty() {
        return Err(format!("commit or remove these first:\n{changed}").into());
    }
    let (new, old) = (&options.version, env!("CARGO_PKG_VERSION"));
    if numbers(new)? <= numbers(old)? {
        return Err(format!("{new} is not newer than {old}").into());
    }
    let name = format!("v{new}");
    if !said(Command::new("git").args(["tag", "--list", &name]))?.is_empty() {
        return Err(format!("the tag {name} is there already: take another version").into());
    }
    if env!("CARGO_PKG_REPOSITORY").contains(UNKNOWN_FORGE) {
        let text = "write the address of the repository into Cargo.toml first (repository in [workspace.package]): \
            the crates, the formula for Homebrew and cargo binstall have it";
        return Err(text.into());
    }
    let today = said(Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    // All that can be refused is refused before hours of checks.
    let written = || -> Result<[String; 2]> {
        let changes = dated(&fs::read_to_string("CHANGELOG.md")?, new, &today)?;
        Ok([changes, versioned(&fs::read_to_string("Cargo.toml")?, old, new)?])
    };
    written()?;
    succeed(Command::new("dev/lab/setup/setup").arg("--dist"))?;
    if !options.checked {
        succeed(&mut Command::new(".ci/run"))?;
    }
    if let Err(error) = commit(new, written()?) {
        let restored = succeed(Command::new("git").args(["checkout", "--quiet", "--"]).args(FILES));
        let state = if restored.is_ok() { "is as it was" } else { "has changed files" };
        return Err(format!("{error}; the tree {state}").into());
    }
    succeed(Command::new("git").args(["tag", "--annotate", "--message", &format!("Remora {new}"), &name]))?;
    // By a build of the new version: this program has the old one's.
    let mut make = cargo();
    make.args(["run", "--quiet", "--locked", "-p", "xtask", "--", "dist"]).args(options.dist.arguments());
    succeed(&mut make)
        .map_err(|error| format!("{error}; the commit and {name} stay: call xtask dist when this is mended"))?;
    println!(
        "tagged {name}; to publish it: push the branch and the tag, and upload what is in {}",
        options.dist.out().display()
    );
    Ok(())
}

/// Writes the new version and its changes down, and commits them.
fn commit(new: &str, [changes, manifest]: [String; 2]) -> Result<()> {
    fs::write("CHANGELOG.md", changes)?;
    fs::write("Cargo.toml", manifest)?;
    for manifest in ["Cargo.toml", "dev/fuzz/Cargo.toml"] {
        succeed(cargo().args(["update", "--quiet", "--workspace", "--offline", "--manifest-path", manifest]))?;
    }
    succeed(Command::new("git").args(["commit", "--quiet", "--message", &format!("release: {new}"), "--"]).args(FILES))
}

/// The three numbers of a version.
fn numbers(version: &str) -> Result<[u64; 3]> {
    let parts: Vec<u64> = version
        .split('.')
        .map(str::parse)
        .collect::<std::result::Result<_, _>>()
        .map_err(|_| format!("{version} is not a version: three numbers with points between them"))?;
    let count = parts.len();
    parts.try_into().map_err(|_| format!("{version} has {count} numbers: a version has three").into())
}

/// The changes, with those that were in no release under this version.
fn dated(changes: &str, version: &str, date: &str) -> Result<String> {
    let (before, after) = changes.split_once(UNRELEASED).ok_or("CHANGELOG.md has no section of unreleased changes")?;
    let section = after.split("\n## ").next().unwrap_or_default();
    if section.trim().is_empty() {
        return Err("CHANGELOG.md has no unreleased changes".into());
    }
    Ok(format!("{before}{UNRELEASED}\n\n## {version} ({date}){after}"))
}

/// The workspace's manifest with the new version, also where crates that can be published name each other.
fn versioned(manifest: &str, old: &str, new: &str) -> Result<String> {
    let (from, to) =
        (format!("[workspace.package]\nversion = \"{old}\""), format!("[workspace.package]\nversion = \"{new}\""));
    if !manifest.contains(&from) {
        return Err(format!("Cargo.toml does not say that the version is {old}").into());
    }
    let manifest = manifest.replacen(&from, &to, 1);
    let (from, to) = (format!("\", version = \"{old}\" }}"), format!("\", version = \"{new}\" }}"));
    let line = |line: &str| if line.starts_with("remora-") { line.replace(&from, &to) } else { line.to_owned() };
    Ok(manifest.lines().map(line).collect::<Vec<_>>().join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert!(numbers("0.10.0").unwrap() > numbers("0.9.9").unwrap());
        for wrong in ["1.2", "1.2.3.4", "v1.2.3", "1.2.x", ""] {
            assert!(numbers(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn unreleased_changes_get_the_version_and_leave_an_empty_section() {
        let changes = "# Changelog\n\n## Unreleased\n\n- a change\n\n## 0.1.0 (2026-01-01)\n\n- older\n";
        let dated = dated(changes, "0.2.0", "2026-11-26").unwrap();
        let wanted =
            "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-11-26)\n\n- a change\n\n## 0.1.0 (2026-01-01)\n\n- older\n";
        assert_eq!(dated, wanted);
        assert!(super::dated(&dated, "0.3.0", "2026-11-27").is_err(), "nothing is left");
        assert!(super::dated("# Changelog\n", "0.3.0", "2026-11-27").is_err());
    }

    #[test]
    fn the_version_stands_in_the_workspaces_manifest_and_with_the_crates_that_can_be_published() {
        let manifest = include_str!("../../../Cargo.toml");
        let new = versioned(manifest, env!("CARGO_PKG_VERSION"), "77.0.1").unwrap();
        assert!(new.contains("\nversion = \"77.0.1\"\n"));
        assert!(new.contains("\nremora-redis = { path = \"redis\", version = \"77.0.1\" }\n"));
        assert_eq!(new.matches("77.0.1").count(), 8);
        assert_eq!(new.lines().count(), manifest.lines().count());
        assert!(versioned(&new, env!("CARGO_PKG_VERSION"), "78.0.0").is_err());
    }
}
