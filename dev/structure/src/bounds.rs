//! Bounds on what one file holds: it can be read in one sitting, it is a whole idea, and its comments are not too wide.
//!
//! Only product code counts: not test modules, and not generated files. A file out of the bounds on purpose says why at
//! its head, after [`LARGER`] or [`ALONE`]. The face of a folder (`mod.rs`, `lib.rs`, `main.rs`) may be short.
//!
//! There is no bound on the fields and methods of a type. It was met by cutting a type's `impl` over several files, and
//! then a reader had to put it together again.

use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{Attribute, Item, visit};

use crate::modules::{Modules, Source, is_for_tests};

/// Most lines of product code in a file.
const MAX_LINES: usize = 1200;
/// Least lines of product code in a file that is not the face of a folder. What is shorter belongs to its caller.
const MIN_LINES: usize = 60;

/// Begins the comment that says why a file has more than [`MAX_LINES`].
pub(crate) const LARGER: &str = "// Larger than the bound:";
/// Begins the comment that says why a file has fewer than [`MIN_LINES`].
pub(crate) const ALONE: &str = "// Stands alone:";

/// How generated files begin.
const GENERATED: &str = "/* automatically generated";

/// The files of one crate that are out of a bound, a line for each.
pub(crate) fn check(modules: &Modules) -> Vec<String> {
    let written = modules.files().filter(|(_, source)| !source.text.starts_with(GENERATED));
    written.filter_map(|(file, source)| fault(file, source)).collect()
}

fn fault(file: &str, source: &Source) -> Option<String> {
    let lines = product_lines(source);
    if lines > MAX_LINES && !is_marked(&source.text, LARGER) {
        return Some(format!("{file}: {lines} lines of product code, at most {MAX_LINES}"));
    }
    let name = file.rsplit('/').next().unwrap_or(file);
    let may_be_short = ["mod.rs", "lib.rs", "main.rs"].contains(&name);
    (lines < MIN_LINES && !may_be_short && !is_marked(&source.text, ALONE))
        .then(|| format!("{file}: {lines} lines of product code, at least {MIN_LINES}"))
}

/// Lines of a file without those of items that exist in tests only.
fn product_lines(source: &Source) -> usize {
    let mut tests = Tests::default();
    tests.visit_file(&source.parsed);
    source.text.lines().count().saturating_sub(tests.lines)
}

/// Counts the lines of items that exist in tests only.
#[derive(Default)]
struct Tests {
    lines: usize,
}

impl Tests {
    /// Counts the item if it is for tests. Returns whether it is.
    fn count(&mut self, attributes: &[Attribute], item: &impl Spanned) -> bool {
        let is_test = is_for_tests(attributes);
        if is_test {
            let span = item.span();
            self.lines += span.end().line + 1 - span.start().line;
        }
        is_test
    }
}

impl<'ast> Visit<'ast> for Tests {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes: &[Attribute] = match item {
            Item::Const(item) => &item.attrs,
            Item::Enum(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Macro(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Trait(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &[],
        };
        if !self.count(attributes, item) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, method: &'ast syn::ImplItemFn) {
        self.count(&method.attrs, method);
    }
}

/// Whether the head of a file, which ends where its code begins, has the marker with a reason.
fn is_marked(text: &str, marker: &str) -> bool {
    let is_head = |line: &&str| {
        let line = line.trim();
        line.is_empty() || line.starts_with("//") || line.starts_with("#!")
    };
    let has_reason = |line: &str| line.trim().strip_prefix(marker).is_some_and(|reason| !reason.trim().is_empty());
    text.lines().take_while(is_head).any(has_reason)
}

// How wide comments are: stable rustfmt leaves them as they are. A line of prose in a comment has at most [`MAX_WIDTH`]
// characters, as code has. Drawings and tables may be wider: what is between fences, and rows of tables.

/// The widest line of prose, in characters: `max_width` of rustfmt.toml.
const MAX_WIDTH: usize = 120;

/// The comments of one crate that are too wide, a line for each.
pub(crate) fn check_comments(modules: &Modules) -> Vec<String> {
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

    use std::fs;

    use super::*;

    /// What is out of the bounds in a crate of `lib.rs`, which only declares the other file, and this `other.rs`.
    fn found(other: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("lib.rs"), "mod other;\n").unwrap();
        fs::write(folder.path().join("other.rs"), other).unwrap();
        check(&Modules::read(&folder.path().join("lib.rs"), folder.path()).unwrap())
    }

    fn lines(count: usize) -> String {
        "const _: () = ();\n".repeat(count)
    }

    #[test]
    fn a_long_file_and_a_short_one_are_found_and_tests_do_not_count() {
        assert_eq!(found(&lines(MAX_LINES)), [""; 0]);
        assert_eq!(found(&lines(1201)), ["other.rs: 1201 lines of product code, at most 1200"]);
        assert_eq!(found(&lines(MIN_LINES)), [""; 0]);
        assert_eq!(found(&lines(59)), ["other.rs: 59 lines of product code, at least 60"]);
        let tests = |count| format!("#[cfg(test)]\nmod tests {{\n{}}}\n", lines(count));
        assert_eq!(found(&(lines(MAX_LINES) + &tests(50))), [""; 0]);
        assert_eq!(found(&(lines(59) + &tests(50))).len(), 1);
    }

    #[test]
    fn a_file_that_says_why_may_be_long_or_short_and_one_that_gives_no_reason_may_not() {
        for (marker, count) in [(LARGER, 1300), (ALONE, 10)] {
            assert_eq!(found(&format!("//! Docs.\n{marker} one table.\n\n{}", lines(count))), [""; 0]);
            assert_eq!(found(&format!("{marker}\n{}", lines(count))).len(), 1);
            assert_eq!(found(&format!("{}{marker} one table.\n", lines(count))).len(), 1, "not at the head");
        }
        assert_eq!(found(&format!("{LARGER} one table.\n{}", lines(10))).len(), 1, "the other marker");
    }

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
