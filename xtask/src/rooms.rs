//! The structure of the workspace: the dependencies between crates, and the files of a crate that import each other in a circle.
//!
//! ```text
//!   cargo metadata ──▶ crates, drawn from the top floor down
//!   sources ──syn──▶ [`modules`] ──▶ [`imports`]: file ──▶ file, by the items it names ──▶ circles: the check fails
//! ```
//!
//! A file and the files in the folder below it are parent and child, and may import each other. Every other pair of files may be
//! connected in one direction only: then a file can be read after those that it imports, and be moved with them.
//!
//! Not seen: names inside macro calls (`tracing::info!`), and methods called on a value whose type is not named.

mod imports;
mod modules;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;
use remora_bench::sync::Result;
use serde::Deserialize;

use self::imports::Imports;
use self::modules::Modules;

/// Arguments of `cargo xtask rooms`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Also print every import between files.
    #[arg(long)]
    ties: bool,
}

/// Draws the crates, and fails if files of one crate import each other in a circle.
pub(crate) fn run(options: &Options) -> Result<()> {
    let crates = workspace()?;
    println!("{}", drawing(&crates));
    let mut circles = Vec::new();
    for member in &crates {
        for target in &member.targets {
            let modules = Modules::read(target)?;
            let imports = Imports::of(&modules);
            if options.ties {
                print!("{imports}");
            }
            circles.extend(found(&imports));
        }
    }
    match circles.len() {
        0 => Ok(()),
        n => Err(format!("{n} import circle{}:\n{}", if n == 1 { "" } else { "s" }, circles.join("\n\n")).into()),
    }
}

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

/// The crates of the workspace, by folder.
pub(crate) fn workspace() -> Result<Vec<Member>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--locked", "--format-version", "1"])
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout)?;
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
    Ok(members)
}

/// The crates, top floor first. Each depends on crates of lower floors only, since cargo forbids cycles.
fn drawing(crates: &[Member]) -> String {
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

/// The circles among the files of one crate, a few lines for each.
fn found(imports: &Imports) -> Vec<String> {
    let graph: DiGraphMap<&str, ()> =
        imports.ties().filter(|(from, to, _)| !are_kin(from, to)).map(|(from, to, _)| (from, to, ())).collect();
    let circles = tarjan_scc(&graph).into_iter().filter(|files| files.len() > 1);
    let told = circles.map(|files| {
        let inside = |file: &str| files.contains(&file);
        let ties = imports.ties().filter(|(from, to, _)| inside(from) && inside(to) && !are_kin(from, to));
        let lines = ties.map(|(from, to, names)| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            format!("  {from} -> {to}: {}", names.join(", "))
        });
        let mut lines: Vec<String> = lines.collect();
        lines.sort();
        lines.join("\n")
    });
    let mut told: Vec<String> = told.collect();
    told.sort();
    told
}

/// Whether one file is the parent of the other: `a.rs` or `a/mod.rs` of the files in `a/`.
fn are_kin(one: &str, other: &str) -> bool {
    let is_above = |parent: &str, child: &str| {
        let stem = parent.strip_suffix("/mod.rs").or_else(|| parent.strip_suffix("/lib.rs"));
        let stem = stem.or_else(|| parent.strip_suffix("/main.rs")).or_else(|| parent.strip_suffix(".rs"));
        stem.is_some_and(|stem| child.strip_prefix(stem).is_some_and(|rest| rest.starts_with('/')))
    };
    is_above(one, other) || is_above(other, one)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;

    /// Reads a crate of these files.
    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let modules = Modules::read(&folder.path().join("src/lib.rs")).unwrap();
        found(&Imports::of(&modules))
    }

    const ROOT: (&str, &str) = ("src/lib.rs", "mod a; mod b; mod c;");

    #[test]
    fn two_files_that_name_each_other_are_a_circle() {
        let found = circles(&[
            ROOT,
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            ("src/b.rs", "pub struct B; pub fn f() -> super::a::A { super::a::A }"),
            ("src/c.rs", "use crate::{a::A, b::B};"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("a.rs -> ") && found[0].contains("b.rs: B") && !found[0].contains("c.rs"),
            "{found:?}"
        );
    }

    #[test]
    fn a_circle_through_a_third_file_and_a_re_export_is_seen() {
        let found = circles(&[
            ROOT,
            ("src/a.rs", "use crate::b::B; pub struct A;"),
            ("src/b.rs", "mod inner; pub use self::inner::B;"),
            ("src/b/inner.rs", "use crate::c; pub struct B(c::C);"),
            ("src/c.rs", "pub struct C(crate::a::A);"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("inner.rs -> ") && !found[0].contains("b.rs ->"), "{found:?}");
    }

    #[test]
    fn parents_and_children_may_name_each_other_and_tests_are_left_out() {
        let found = circles(&[
            ROOT,
            ("src/a.rs", "pub mod child; pub struct A; use self::child::Child;"),
            ("src/a/child.rs", "pub struct Child(super::A);"),
            ("src/b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::c::C; }"),
            ("src/c.rs", "pub struct C(crate::b::B);"),
        ]);
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn what_the_architecture_page_says_each_folder_stands_on_is_what_cargo_says() {
        let page = include_str!("../../ARCHITECTURE.md");
        let rows: Vec<Vec<&str>> = page
            .lines()
            .filter(|line| line.starts_with("| `") && line.contains("/` | "))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
            .collect();
        let members = workspace().unwrap();
        for member in &members {
            let row = rows.iter().find(|row| row[0] == format!("`{}/`", member.folder));
            let row = row.unwrap_or_else(|| panic!("ARCHITECTURE.md has no row for {}/", member.folder));
            assert_eq!(row[1], member.name, "the package of {}/", member.folder);
            let told: BTreeSet<String> = match row[3] {
                "nothing of ours" => BTreeSet::new(),
                list => list.split(',').map(|folder| folder.trim().to_string()).collect(),
            };
            assert_eq!(told, member.stands_on, "the row of {}/ in ARCHITECTURE.md", member.folder);
        }
    }
}
