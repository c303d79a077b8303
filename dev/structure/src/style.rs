//! The style that no other tool checks: how wide comments are. Stable rustfmt leaves comments as they are.
//!
//! A line of prose in a comment has at most [`MAX_WIDTH`] characters, as code has. Drawings and tables may be wider:
//! what is between fences, and rows of tables.

use crate::modules::{Modules, Source};

/// The widest line of prose, in characters: `max_width` of rustfmt.toml.
const MAX_WIDTH: usize = 120;

/// The comments of one crate that are too wide, a line for each.
pub(crate) fn check(modules: &Modules) -> Vec<String> {
    let wide = |(file, source)| {
        too_wide(source).map(move |line| format!("{file}:{line}: a comment wider than {MAX_WIDTH} characters"))
    };
    modules.files().flat_map(wide).collect()
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
        Source { text: text.to_string(), parsed: syn::parse_file(text).unwrap() }
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
}
