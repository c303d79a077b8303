//! The crates of the workspace, as cargo describes them, and the lock files.

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
    let metadata = ask()?;
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

fn ask() -> Result<Metadata> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--locked", "--format-version", "1", "--no-deps", "--offline"])
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The crates of others that `other` locks in a version that `first` has not, though it has the crate, one line each.
/// Both are the name and the text of a lock file. A fuzz target in another workspace says something about a program
/// only if both are built of the same code.
pub(crate) fn differently_locked(first: (&str, &str), other: (&str, &str)) -> Vec<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for Locked { name, version, .. } in read_lock(first.1) {
        versions.entry(name).or_default().insert(version);
    }
    let mut wrong = Vec::new();
    for Locked { name, version, .. } in read_lock(other.1) {
        if let Some(known) = versions.get(name)
            && !known.contains(version)
        {
            let known: Vec<&str> = known.iter().copied().collect();
            wrong.push(format!(
                "{}: {name} is there in the version {version}, but {} has {}; change it with `cargo update --precise`",
                other.0,
                first.0,
                known.join(" and ")
            ));
        }
    }
    wrong
}

/// One entry of a lock file.
struct Locked<'a> {
    name: &'a str,
    version: &'a str,
}

/// The entries of a lock file. Cargo writes one field on each line.
fn read_lock(text: &str) -> Vec<Locked<'_>> {
    let read = |entry| {
        let field = |name: &str| -> Option<&str> {
            let lines = str::lines(entry);
            let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(" = \"")?.strip_suffix('"'));
            values.next()
        };
        Some(Locked { name: field("name")?, version: field("version")? })
    };
    text.split("[[package]]").filter_map(read).collect()
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

    fn locked(name: &str, version: &str) -> String {
        format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\ndependencies = [\n \"x\",\n]\n")
    }

    #[test]
    fn a_crate_in_both_lock_files_has_the_same_versions() {
        let first = locked("one", "1.9.0") + &locked("two", "0.2.0") + &locked("two", "0.3.1");
        let check = |other: &str| differently_locked(("first", &first), ("other", other));
        assert_eq!(check(&(locked("one", "1.9.0") + &locked("two", "0.3.1"))), Vec::<String>::new());
        assert_eq!(check(&locked("only here", "1.0.0")), Vec::<String>::new());
        let wrong = check(&(locked("one", "1.10.0") + &locked("two", "0.3.2")));
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong[0].starts_with("other: one is there in the version 1.10.0, but first has 1.9.0;"), "{wrong:?}");
        assert!(
            wrong[1].starts_with("other: two is there in the version 0.3.2, but first has 0.2.0 and 0.3.1;"),
            "{wrong:?}"
        );
    }
}
