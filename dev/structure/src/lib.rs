//! The structure of the workspace, drawn and checked.
//!
//! ```text
//!   cargo metadata ──▶ workspace: crates, drawn from the top floor down
//!   sources ──syn──▶ modules ──▶ imports: file ──▶ file, by the items it names ──▶ rooms: no circles
//!                       └──────▶ bounds: lines of a file, width of comments
//!   lock files ──▶ workspace: what is fuzzed is built of the versions that ship
//!   Markdown, and names of pages in sources ──▶ links: each leads somewhere
//!   README, docs/ ──▶ pages: bytes and lines
//! ```
//!
//! - `rooms`: import circles. `bounds`: long files, short ones, and wide comments, which rustfmt does not check.
//! - `links`: the links of the pages. `pages`: how long they may be.
//! - `workspace`, `modules`, `imports`: shared by these.
//!
//! Where crates of others come from, and under which licence, cargo-deny checks (`deny.toml`).
//!
//! This is a separate crate, so that the check is built in seconds: it depends on none of the crates that it reads.

#![forbid(unsafe_code)]

mod bounds;
mod imports;
mod links;
mod modules;
mod workspace;

use imports::Imports;
use modules::Modules;

/// The result of a check: an error is the text to print.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Draws the crates, and checks the files of each. `print_ties`: also prints every import between two files.
///
/// # Errors
/// The import circles, every file that is out of a bound or of style; a source that cannot be read.
pub fn check(print_ties: bool) -> Result<()> {
    let workspace = workspace::read()?;
    println!("{}", workspace::drawing(&workspace.members));
    let (mut circles, mut styles, mut unbounded) = (Vec::new(), Vec::new(), Vec::new());
    for target in workspace.members.iter().flat_map(|member| &member.targets) {
        let modules = Modules::read(target, &workspace.root)?;
        let imports = Imports::of(&modules);
        if print_ties {
            print!("{imports}");
        }
        circles.extend(imports::circles(&imports));
        unbounded.extend(bounds::check(&modules));
        styles.extend(bounds::check_comments(&modules));
    }
    let mut failures = Vec::new();
    if !circles.is_empty() {
        failures.push(format!(
            "{} among the files of a crate:\n{}",
            count(&circles, "import circle"),
            circles.join("\n\n")
        ));
    }
    if !unbounded.is_empty() {
        failures.push(format!(
            "{} out of bounds; cut it where an idea ends, merge it with its caller, or put `{} <reason>` or `{} <reason>` at its head:\n{}",
            count(&unbounded, "file"),
            bounds::LARGER,
            bounds::ALONE,
            unbounded.join("\n")
        ));
    }
    if !styles.is_empty() {
        failures.push(format!("{}:\n{}", count(&styles, "place out of style"), styles.join("\n")));
    }
    let (ours, fuzzed) = ("Cargo.lock", "dev/fuzz/Cargo.lock");
    let read = |file| std::fs::read_to_string(workspace.root.join(file));
    let differing = workspace::differently_locked((ours, &read(ours)?), (fuzzed, &read(fuzzed)?));
    if !differing.is_empty() {
        failures.push(format!("{}:\n{}", count(&differing, "fault of lock files"), differing.join("\n")));
    }
    let broken = links::check(&workspace.root)?;
    if !broken.is_empty() {
        failures.push(format!("{}:\n{}", count(&broken, "broken link"), broken.join("\n")));
    }
    let long = links::check_pages(&workspace.root)?;
    if !long.is_empty() {
        failures.push(format!("{}:\n{}", count(&long, "long page"), long.join("\n")));
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n\n").into()) }
}

fn count(things: &[String], name: &str) -> String {
    format!("{} {name}{}", things.len(), if things.len() == 1 { "" } else { "s" })
}
