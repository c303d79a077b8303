//! Which file names items of which, and the circles among them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use crate::modules::{Modules, Names};

// Which file names items of which: follows the paths of [`crate::modules`] to the files that define them.

/// Limit on re-exports that lead from one to the next. More would be a circle, which the compiler refuses.
const HANDED_ON_LIMIT: usize = 16;

/// The imports between the files of one crate.
#[derive(Debug, Default)]
pub(crate) struct Imports {
    by_files: BTreeMap<(String, String), BTreeSet<String>>,
}

impl Imports {
    /// Follows every path of every module.
    pub(crate) fn of(modules: &Modules) -> Imports {
        let mut imports = Imports::default();
        for (path, module) in modules.iter() {
            for written in &module.written {
                let Some(definition) = definition(modules, path, written) else { continue };
                if *definition.file != module.file {
                    let files = (module.file.clone(), definition.file.to_string());
                    imports.by_files.entry(files).or_default().extend(written.last().cloned());
                }
            }
        }
        imports
    }

    /// From, to, and the imported names.
    pub(crate) fn ties(&self) -> impl Iterator<Item = (&str, &str, &BTreeSet<String>)> {
        self.by_files.iter().map(|((from, to), names)| (from.as_str(), to.as_str(), names))
    }
}

impl fmt::Display for Imports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (from, to, names) in self.ties() {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            writeln!(f, "{from} -> {to}: {}", names.join(", "))?;
        }
        Ok(())
    }
}

/// Where an item is defined.
pub(crate) struct Definition<'a> {
    /// The file that contains it.
    pub(crate) file: &'a str,
}

/// The item that a path written in the module `at` names. `None` for an item of another crate, and for a module itself.
pub(crate) fn definition<'a>(modules: &'a Modules, at: &Names, written: &Names) -> Option<Definition<'a>> {
    defined_at(modules, &absolute(modules, at, written)?, HANDED_ON_LIMIT)
}

/// A path written in the module `at`, from the crate's root. `None` if it leads out of the crate.
fn absolute(modules: &Modules, at: &Names, written: &Names) -> Option<Names> {
    let (first, rest) = written.split_first()?;
    let mut base = match first.as_str() {
        "crate" => Names::new(),
        "self" => at.clone(),
        "super" => at.split_last()?.1.to_vec(),
        name => {
            let module = modules.get(at)?;
            if module.children.contains(name) {
                at.iter().cloned().chain([name.to_string()]).collect()
            } else {
                // Another crate's name, unless a `use` of this module defines it.
                let stands_for = module.imported.get(name).filter(|path| path.first() != Some(first))?;
                absolute(modules, at, stands_for)?
            }
        }
    };
    for name in rest {
        match name.as_str() {
            "super" => drop(base.pop()?),
            name => base.push(name.to_string()),
        }
    }
    Some(base)
}

/// Follows an absolute path through at most `left` re-exports.
fn defined_at<'a>(modules: &'a Modules, path: &Names, left: usize) -> Option<Definition<'a>> {
    let left = left.checked_sub(1)?;
    let mut at = Names::new();
    for (depth, name) in path.iter().enumerate() {
        let module = modules.get(&at)?;
        if module.children.contains(name) {
            at.push(name.clone());
            continue;
        }
        let here = || Definition { file: &module.file };
        let rest = &path[depth + 1..];
        // A function and a module can have the same name: the last name of a path is the item, earlier names are
        // modules.
        if rest.is_empty() && module.defined.contains(name) {
            return Some(here());
        }
        if let Some(stands_for) = module.imported.get(name) {
            let onward = absolute(modules, &at, stands_for)?;
            let onward = onward.into_iter().chain(rest.iter().cloned()).collect();
            return defined_at(modules, &onward, left);
        }
        for glob in &module.globs {
            let Some(inside) = absolute(modules, &at, glob) else { continue };
            let holds = modules
                .get(&inside)
                .is_some_and(|module| module.children.contains(name) || module.imported.contains_key(name));
            if holds {
                let onward = inside.into_iter().chain(path[depth..].iter().cloned()).collect();
                return defined_at(modules, &onward, left);
            }
        }
        return Some(here());
    }
    None
}

// Import circles: files of one crate that name each other's items.
//
// A file and the files in the folder below it are parent and child, and may import each other. Every other pair of
// files may be connected in one direction only: then a file can be read after those that it imports, and be moved with
// them.
//
// Not seen: names inside macro calls (`tracing::info!`), and methods called on a value whose type is not named.

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
