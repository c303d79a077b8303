//! The style that no other tool checks: where a module with children stands, and how wide comments are.
//!
//! - A module with files below it is `name/mod.rs`, and never `name.rs` beside `name/`.
//! - A line of prose in a comment has at most [`MAX_WIDTH`] characters, as code has. Drawings and tables may be wider:
//!   what is between fences, and rows of tables.

use std::path::Path;

use crate::modules::{Modules, Source};

/// The widest line of prose, in characters: `max_width` of rustfmt.toml.
const MAX_WIDTH: usize = 120;

/// What is not in style in one crate, a line for each place. The files' names are relative to `root`.
pub(crate) fn check(modules: &Modules, root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for (file, source) in modules.files() {
        found.extend(beside_its_folder(root, file));
        found
            .extend(too_wide(source).map(|line| format!("{file}:{line}: a comment wider than {MAX_WIDTH} characters")));
    }
    found
}

/// A module file beside the folder of its children.
fn beside_its_folder(root: &Path, file: &str) -> Option<String> {
    let folder = file.strip_suffix(".rs")?;
    root.join(folder).is_dir().then(|| format!("{file}: stands beside its folder; move it to {folder}/mod.rs"))
}

/// The numbers of the lines of prose that are too wide.
fn too_wide(source: &Source) -> impl Iterator<Item = usize> {
    let mut in_fence = false;
    let lines = source.text.lines().enumerate();
    lines.filter_map(move |(at, line)| {
        let comment = line.trim_start().strip_prefix("//")?;
        let text = comment.trim_start_matches(['/', '!']).trim_start();
        if text.starts_with("```") {
            in_fence = !in_fence;
        }
        let is_prose = !in_fence && !text.starts_with('|');
        (is_prose && line.chars().count() > MAX_WIDTH).then_some(at + 1)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn source(text: &str) -> Source {
        Source { path: Vec::new(), text: text.to_string(), parsed: syn::parse_file(text).unwrap() }
    }

    #[test]
    fn only_prose_is_held_to_the_width() {
        let wide = "word ".repeat(30);
        let lines = |text: &str| too_wide(&source(text)).collect::<Vec<_>>();
        assert_eq!(lines(&format!("/// Short.\n/// {wide}\nfn f() {{}}\n")), [2]);
        assert_eq!(lines(&format!("fn f() {{\n    // {wide}\n}}\n")), [2]);
        assert_eq!(lines(&format!("//! ```text\n//! {wide}\n//! ```\n//! {wide}\n")), [4], "a drawing may be wide");
        assert_eq!(lines(&format!("//! | {wide} |\n")), [0; 0], "a table may be wide");
        assert_eq!(lines(&format!("const TEXT: &str = \"{wide}\";\n")), [0; 0], "code is rustfmt's");
        let drawn = format!("/// {}\nfn f() {{}}\n", "─".repeat(100));
        assert_eq!(lines(&drawn), [0; 0], "characters count, and not bytes");
    }

    #[test]
    fn a_module_file_beside_its_folder_is_found() {
        let folder = std::env::temp_dir().join(format!("remora-style-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("one")).unwrap();
        let beside = |file: &str| beside_its_folder(&folder, file);
        assert!(beside("one.rs").is_some_and(|text| text.ends_with("one/mod.rs")));
        assert_eq!((beside("other.rs"), beside("one/mod.rs")), (None, None));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
