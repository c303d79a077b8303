//! Import circles: files of one crate that name each other's items.
//!
//! A file and the files in the folder below it are parent and child, and may import each other. Every other pair of
//! files may be connected in one direction only: then a file can be read after those that it imports, and be moved with
//! them.
//!
//! Not seen: names inside macro calls (`tracing::info!`), and methods called on a value whose type is not named.

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use crate::imports::Imports;

/// The circles among the files of one crate, a few lines for each.
pub(crate) fn circles(imports: &Imports) -> Vec<String> {
    let graph: DiGraphMap<&str, ()> =
        imports.ties().filter(|(from, to, _)| !are_kin(from, to)).map(|(from, to, _)| (from, to, ())).collect();
    let circles = tarjan_scc(&graph).into_iter().filter(|files| files.len() > 1);
    let texts = circles.map(|files| {
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
    let mut texts: Vec<String> = texts.collect();
    texts.sort();
    texts
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
    use crate::modules::Modules;

    /// Reads a crate of these files.
    fn circles_in(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let modules = Modules::read(&folder.path().join("src/lib.rs"), folder.path()).unwrap();
        circles(&Imports::of(&modules))
    }

    const ROOT: (&str, &str) = ("src/lib.rs", "mod a; mod b; mod c;");

    #[test]
    fn two_files_that_name_each_other_are_a_circle() {
        let found = circles_in(&[
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
        let found = circles_in(&[
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
        let found = circles_in(&[
            ROOT,
            ("src/a.rs", "pub mod child; pub struct A; use self::child::Child;"),
            ("src/a/child.rs", "pub struct Child(super::A);"),
            ("src/b.rs", "pub struct B; #[cfg(test)] mod tests { use crate::c::C; }"),
            ("src/c.rs", "pub struct C(crate::b::B);"),
        ]);
        assert_eq!(found, Vec::<String>::new());
    }
}
