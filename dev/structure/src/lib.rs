//! The structure of the workspace, drawn and checked.
//!
//! ```text
//!   cargo metadata ──▶ workspace: crates, drawn from the top floor down
//!   sources ──syn──▶ modules ──▶ imports: file ──▶ file, by the items it names ──▶ rooms: no circles
//!                       ├──────▶ bounds: lines of a file
//!                       └──────▶ style: width of comments
//!   lock files, cargo metadata ──▶ dependencies: sources, licences and versions of other crates
//!   Markdown, and names of pages in sources ──▶ links: each leads somewhere
//! ```
//!
//! - `rooms`: import circles. `bounds`: long files, and short ones. `style`: what rustfmt does not check.
//! - `dependencies`: where crates of others come from, and under which licence. `links`: the links of the pages.
//! - `workspace`, `modules`, `imports`: shared by these.
//!
//! This is a separate crate, so that the check is built in seconds: it depends on none of the crates that it reads.

#![forbid(unsafe_code)]

mod bounds;
mod dependencies;
mod imports;
mod links;
mod modules;
mod style;
mod workspace;

use std::path::Path;

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
        styles.extend(style::check(&modules));
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
    let unfit = unfit_dependencies(&workspace.root)?;
    if !unfit.is_empty() {
        failures.push(format!("{}:\n{}", count(&unfit, "fault of dependencies"), unfit.join("\n")));
    }
    let broken = links::check(&workspace.root)?;
    if !broken.is_empty() {
        failures.push(format!("{}:\n{}", count(&broken, "broken link"), broken.join("\n")));
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n\n").into()) }
}

/// What is wrong with the crates of others, those of the fuzz targets included.
fn unfit_dependencies(root: &Path) -> Result<Vec<String>> {
    let mut unfit = dependencies::check_licences(&workspace::licences()?);
    let read = |file| Ok::<_, std::io::Error>((file, std::fs::read_to_string(root.join(file))?));
    let (programs, fuzzed) = (read("Cargo.lock")?, read("dev/fuzz/Cargo.lock")?);
    for (file, text) in [&programs, &fuzzed] {
        unfit.extend(dependencies::check_lock(file, text));
    }
    unfit.extend(dependencies::check_same((programs.0, &programs.1), (fuzzed.0, &fuzzed.1)));
    Ok(unfit)
}

fn count(things: &[String], name: &str) -> String {
    format!("{} {name}{}", things.len(), if things.len() == 1 { "" } else { "s" })
}
