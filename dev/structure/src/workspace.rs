//! The crates of the workspace, as cargo describes them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::Result;

/// One crate of the workspace.
#[derive(Debug)]
pub(crate) struct Member {
    /// Its folder, relative to the workspace.
    pub(crate) folder: String,
    /// Its package name.
    pub(crate) name: String,
    /// The folders of the workspace's crates that it depends on, without those of its tests.
    pub(crate) stands_on: BTreeSet<String>,
    /// The first file of its library and of each of its programs.
    pub(crate) targets: Vec<PathBuf>,
}

/// The crates of the workspace, by folder.
pub(crate) struct Workspace {
    pub(crate) members: Vec<Member>,
    /// The folder of the workspace.
    pub(crate) root: PathBuf,
}

/// The parts of `cargo metadata` that are read here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_root: PathBuf,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    /// The registry; `None` for a package of this repository.
    source: Option<String>,
    license: Option<String>,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
    path: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    src_path: PathBuf,
}

/// Asks cargo for the workspace.
pub(crate) fn read() -> Result<Workspace> {
    let metadata = ask(&["--no-deps", "--offline"])?;
    let folder = |manifest: &Path| -> String {
        let folder = manifest.parent().unwrap_or(manifest);
        folder.strip_prefix(&metadata.workspace_root).unwrap_or(folder).display().to_string()
    };
    let folders: BTreeMap<&str, String> =
        metadata.packages.iter().map(|package| (package.name.as_str(), folder(&package.manifest_path))).collect();
    let member = |package: &Package| {
        let ours = package.dependencies.iter().filter(|on| on.path.is_some() && on.kind.as_deref() != Some("dev"));
        let is_code = |target: &&Target| {
            target.kind.iter().any(|kind| ["lib", "bin", "cdylib", "rlib", "proc-macro"].contains(&kind.as_str()))
        };
        Member {
            folder: folder(&package.manifest_path),
            name: package.name.clone(),
            stands_on: ours.filter_map(|on| folders.get(on.name.as_str()).cloned()).collect(),
            targets: package.targets.iter().filter(is_code).map(|target| target.src_path.clone()).collect(),
        }
    };
    let mut members: Vec<Member> = metadata.packages.iter().map(member).collect();
    members.sort_by(|one, other| one.folder.cmp(&other.folder));
    Ok(Workspace { members, root: metadata.workspace_root })
}

/// A crate of others, and its licence: an SPDX expression.
pub(crate) struct Licensed {
    pub(crate) name: String,
    pub(crate) licence: Option<String>,
}

/// The crates of others that are built on this platform. Cargo downloads what is missing.
pub(crate) fn licences() -> Result<Vec<Licensed>> {
    let version = Command::new("rustc").arg("-vV").output()?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let platform = version.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("rustc -vV names no host")?;
    let packages = ask(&["--filter-platform", platform])?.packages;
    let others = packages.into_iter().filter(|package| package.source.is_some());
    Ok(others.map(|package| Licensed { name: package.name, licence: package.license }).collect())
}

fn ask(options: &[&str]) -> Result<Metadata> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo).args(["metadata", "--locked", "--format-version", "1"]).args(options).output()?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The crates, top floor first. Each depends on crates of lower floors only, since cargo forbids cycles.
pub(crate) fn drawing(crates: &[Member]) -> String {
    let mut floors: BTreeMap<&str, usize> = BTreeMap::new();
    // There are at most as many floors as crates.
    for _ in crates {
        for member in crates {
            let below = member.stands_on.iter().filter_map(|folder| floors.get(folder.as_str()));
            let floor = below.max().map_or(0, |below| below + 1);
            floors.insert(&member.folder, floor);
        }
    }
    let mut rows: Vec<&Member> = crates.iter().collect();
    rows.sort_by_key(|member| (std::cmp::Reverse(floors.get(member.folder.as_str())), member.folder.clone()));
    let widest = |of: fn(&Member) -> &str| crates.iter().map(|member| of(member).len()).max().unwrap_or(0);
    let (folders, names) = (widest(|member| &member.folder), widest(|member| &member.name));
    let line = |member: &&Member| {
        let floor = floors.get(member.folder.as_str()).copied().unwrap_or(0);
        let below: Vec<&str> = member.stands_on.iter().map(String::as_str).collect();
        let line = format!("{floor}  {:<folders$}  {:<names$}  {}", member.folder, member.name, below.join(", "));
        line.trim_end().to_string()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_the_architecture_page_says_each_folder_stands_on_is_what_cargo_says() {
        let page = include_str!("../../../ARCHITECTURE.md");
        let rows: Vec<Vec<&str>> = page
            .lines()
            .filter(|line| line.starts_with("| `") && line.contains("/` | "))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
            .collect();
        let members = read().unwrap().members;
        for member in &members {
            let row = rows.iter().find(|row| row[0] == format!("`{}/`", member.folder));
            let row = row.unwrap_or_else(|| panic!("ARCHITECTURE.md has no row for {}/", member.folder));
            assert_eq!(row[1], member.name, "the package of {}/", member.folder);
            let listed: BTreeSet<String> = match row[3] {
                "nothing of ours" => BTreeSet::new(),
                list => list.split(',').map(|folder| folder.trim().to_string()).collect(),
            };
            assert_eq!(listed, member.stands_on, "the row of {}/ in ARCHITECTURE.md", member.folder);
        }
    }
}
