//! The structure of the workspace, drawn and checked.
//!
//! ```text
//!   cargo metadata ──▶ workspace: crates, drawn from the top floor down
//!   sources ──syn──▶ modules ──▶ imports: file ──▶ file, by the items it names ──▶ rooms: no circles
//! ```
//!
//! - `rooms`: import circles.
//! - `workspace`, `modules`, `imports`: what it reads.
//!
//! A crate of its own, so that the check is built in seconds: it depends on none of the crates that it reads.

#![forbid(unsafe_code)]

mod imports;
mod modules;
mod rooms;
mod workspace;

use imports::Imports;
use modules::Modules;

/// The result of a check: an error is the text to print.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Draws the crates, and checks the files of each. `print_ties`: also prints every tie between two files.
///
/// # Errors
/// The import circles; a source that cannot be read.
pub fn check(print_ties: bool) -> Result<()> {
    let workspace = workspace::read()?;
    println!("{}", workspace::drawing(&workspace.members));
    let mut circles = Vec::new();
    for target in workspace.members.iter().flat_map(|member| &member.targets) {
        let imports = Imports::of(&Modules::read(target, &workspace.root)?);
        if print_ties {
            print!("{imports}");
        }
        circles.extend(rooms::circles(&imports));
    }
    if circles.is_empty() {
        return Ok(());
    }
    let many = if circles.len() == 1 { "" } else { "s" };
    Err(format!("{} import circle{many} among the files of a crate:\n{}", circles.len(), circles.join("\n\n")).into())
}
