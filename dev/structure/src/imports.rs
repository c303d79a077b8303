//! Which file names items of which: follows the paths of [`crate::modules`] to the files that define them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::modules::{Modules, Names};

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
    /// Its path from the crate's root.
    pub(crate) path: Names,
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
        let here = || Definition { file: &module.file, path: at.iter().cloned().chain([name.clone()]).collect() };
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
