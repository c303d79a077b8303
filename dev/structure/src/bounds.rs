//! Bounds on what one file and one type hold: a file can be read in one sitting, and a type has one job.
//!
//! Only product code counts: not test modules, and not generated files. A file or a type that exceeds a bound on
//! purpose says why, after [`MARKER`]: at the head of the file, or right above the type.

use std::collections::{BTreeMap, BTreeSet};

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Fields, ImplItem, Item};

use crate::imports::definition;
use crate::modules::{Modules, Names, Source, is_for_tests};

/// Lines of product code in a file.
const MAX_LINES: usize = 600;
/// Fields of a struct, or of one variant of an enum.
const MAX_FIELDS: usize = 20;
/// Methods of a type: the sum over its inherent impls.
const MAX_METHODS: usize = 25;

/// Begins the comment that says why a bound is exceeded.
pub(crate) const MARKER: &str = "// Larger than the bound:";

/// How generated files begin.
const GENERATED: &str = "/* automatically generated";

/// What may exceed a bound for now: a file, or a file and a type (`a.rs::Type`). The replica is being cut by type;
/// until that is done, a comment there would give no reason.
const KNOWN: &[&str] = &["agent/src/replica/driver/server/mod.rs::Keeper"];

/// What exceeds a bound in some crates.
#[derive(Default)]
pub(crate) struct Exceeded {
    /// A line for each file and type.
    pub(crate) found: Vec<String>,
    /// What was left out because it is in [`KNOWN`].
    known: BTreeSet<&'static str>,
}

impl Exceeded {
    /// Whether it is known. Notes that it is still needed there.
    fn is_known(&mut self, name: &str) -> bool {
        let known = KNOWN.iter().find(|known| **known == name);
        self.known.extend(known);
        known.is_some()
    }

    /// What is in [`KNOWN`] and exceeds no bound any more.
    pub(crate) fn obsolete(&self) -> impl Iterator<Item = &'static str> {
        KNOWN.iter().copied().filter(|known| !self.known.contains(known))
    }
}

/// Adds what exceeds a bound in one crate.
pub(crate) fn check(modules: &Modules, exceeded: &mut Exceeded) {
    let mut types: BTreeMap<Names, Type> = BTreeMap::new();
    for (file, source) in written(modules) {
        let lines = product_lines(source);
        if lines > MAX_LINES && !is_marked_file(&source.text) && !exceeded.is_known(file) {
            exceeded.found.push(format!("{file}: {lines} lines of product code, at most {MAX_LINES}"));
        }
        add_types(&mut types, &source.path, &source.parsed.items, file, &source.text);
    }
    for (_, source) in written(modules) {
        add_methods(&mut types, modules, &source.path, &source.parsed.items);
    }
    for (path, of) in &types {
        let name = path.last().map_or("", String::as_str);
        let is_large = of.fields > MAX_FIELDS || of.methods > MAX_METHODS;
        if !is_large || of.is_marked || exceeded.is_known(&format!("{}::{name}", of.file)) {
            continue;
        }
        let at = format!("{}:{}: {name}", of.file, of.line);
        if of.fields > MAX_FIELDS {
            exceeded.found.push(format!("{at} has {} fields, at most {MAX_FIELDS}", of.fields));
        }
        if of.methods > MAX_METHODS {
            exceeded.found.push(format!("{at} has {} methods, at most {MAX_METHODS}", of.methods));
        }
    }
}

/// A struct or an enum.
struct Type {
    file: String,
    line: usize,
    is_marked: bool,
    fields: usize,
    methods: usize,
}

/// The files that a person has written.
fn written(modules: &Modules) -> impl Iterator<Item = (&str, &Source)> {
    modules.files().filter(|(_, source)| !source.text.starts_with(GENERATED))
}

/// Adds the types that a module defines.
fn add_types(types: &mut BTreeMap<Names, Type>, at: &Names, items: &[Item], file: &str, text: &str) {
    for item in items {
        let (attributes, name, fields) = match item {
            Item::Struct(item) => (&item.attrs, &item.ident, item.fields.len()),
            Item::Enum(item) => {
                let widest = item.variants.iter().map(|variant| Fields::len(&variant.fields)).max();
                (&item.attrs, &item.ident, widest.unwrap_or(0))
            }
            Item::Mod(inner) if !is_for_tests(&inner.attrs) => {
                if let Some((_, items)) = &inner.content {
                    add_types(types, &below(at, &inner.ident.to_string()), items, file, text);
                }
                continue;
            }
            _ => continue,
        };
        if !is_for_tests(attributes) {
            let (first, line) = (item.span().start().line, name.span().start().line);
            let is_marked = is_marked_type(text, first, line);
            let of = Type { file: file.to_string(), line, is_marked, fields, methods: 0 };
            types.insert(below(at, &name.to_string()), of);
        }
    }
}

/// Counts the methods of a module's inherent impls.
fn add_methods(types: &mut BTreeMap<Names, Type>, modules: &Modules, at: &Names, items: &[Item]) {
    for item in items {
        match item {
            Item::Mod(inner) if !is_for_tests(&inner.attrs) => {
                if let Some((_, items)) = &inner.content {
                    add_methods(types, modules, &below(at, &inner.ident.to_string()), items);
                }
            }
            Item::Impl(block) if block.trait_.is_none() && !is_for_tests(&block.attrs) => {
                let syn::Type::Path(of) = &*block.self_ty else { continue };
                let named = of.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
                let is_method = |item: &&ImplItem| matches!(item, ImplItem::Fn(method) if !is_for_tests(&method.attrs));
                if let Some(of) = resolve(modules, at, &named).and_then(|path| types.get_mut(&path)) {
                    of.methods += block.items.iter().filter(is_method).count();
                }
            }
            _ => {}
        }
    }
}

/// The path, from the crate's root, of a type that the module `at` names.
fn resolve(modules: &Modules, at: &Names, named: &Names) -> Option<Names> {
    let module = modules.get(at)?;
    if let [name] = named.as_slice() {
        if module.defined.contains(name) {
            return Some(below(at, name));
        }
        if !module.imported.contains_key(name) {
            let through = |glob: &Names| {
                let path = definition(modules, at, &below(glob, name))?.path;
                modules.get(path.split_last()?.1)?.defined.contains(name).then_some(path)
            };
            return module.globs.iter().find_map(through);
        }
    }
    definition(modules, at, named).map(|definition| definition.path)
}

fn below(path: &Names, name: &str) -> Names {
    path.iter().cloned().chain([name.to_string()]).collect()
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

/// Whether a line is a comment that says why a bound is exceeded.
fn is_marker(line: &str) -> bool {
    line.trim().strip_prefix(MARKER).is_some_and(|reason| !reason.trim().is_empty())
}

/// Whether the head of a file, which ends where its code begins, has the marker.
fn is_marked_file(text: &str) -> bool {
    let is_head = |line: &&str| {
        let line = line.trim();
        line.is_empty() || line.starts_with("//") || line.starts_with("#!")
    };
    text.lines().take_while(is_head).any(is_marker)
}

/// Whether the marker is among the comments and attributes of the type that begins in line `first` and is named in
/// line `named`, counted from 1.
fn is_marked_type(text: &str, first: usize, named: usize) -> bool {
    let lines: Vec<&str> = text.lines().collect();
    let (above, rest) = lines.split_at((first - 1).min(lines.len()));
    let above = above.iter().rev().take_while(|line| line.trim().starts_with("//"));
    above.chain(rest.iter().take(named - first)).any(|line| is_marker(line))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;

    /// What exceeds a bound in a crate of this one file, or of two.
    fn found(text: &str, other: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("lib.rs"), text).unwrap();
        fs::write(folder.path().join("other.rs"), other).unwrap();
        let mut exceeded = Exceeded::default();
        check(&Modules::read(&folder.path().join("lib.rs"), folder.path()).unwrap(), &mut exceeded);
        exceeded.found
    }

    fn lines(count: usize) -> String {
        "const _: () = ();\n".repeat(count)
    }

    fn fields(count: usize) -> String {
        (0..count).map(|number| format!("    f{number}: u8,\n")).collect()
    }

    fn methods(count: usize) -> String {
        (0..count).map(|number| format!("    fn f{number}() {{}}\n")).collect()
    }

    #[test]
    fn a_long_file_is_found_and_its_tests_do_not_count() {
        assert_eq!(found(&lines(601), ""), ["lib.rs: 601 lines of product code, at most 600"]);
        let with_tests = format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", lines(600), lines(50));
        assert_eq!(found(&with_tests, ""), [""; 0]);
    }

    #[test]
    fn a_file_that_says_why_may_be_long_and_one_that_gives_no_reason_may_not() {
        let said = format!("//! Docs.\n{MARKER} one table.\n\n{}", lines(650));
        assert_eq!(found(&said, ""), [""; 0]);
        assert_eq!(found(&format!("{MARKER}\n{}", lines(650)), "").len(), 1);
        assert_eq!(found(&format!("{}{MARKER} one table.\n", lines(650)), "").len(), 1, "not at the head");
    }

    #[test]
    fn a_type_with_many_fields_is_found_unless_it_says_why() {
        let text = format!("#[derive(Debug)]\nstruct A {{\n{}}}\nenum B {{ C {{\n{}}} }}\n", fields(21), fields(20));
        assert_eq!(found(&text, ""), ["lib.rs:2: A has 21 fields, at most 20"]);
        assert_eq!(found(&format!("/// Docs.\n{MARKER} as in C.\n{text}"), ""), [""; 0]);
        assert_eq!(found(&format!("{MARKER} as in C.\n/// Docs.\n{text}"), ""), [""; 0]);
        assert_eq!(found(&format!("{MARKER} as in C.\nstruct Z;\n{text}"), "").len(), 1, "above another type");
    }

    #[test]
    fn methods_are_summed_over_the_inherent_impls_of_all_files() {
        let text = format!(
            "mod other;\nstruct A;\nimpl A {{\n{}}}\nimpl Clone for A {{ fn clone(&self) -> A {{ A }} }}\n",
            methods(20)
        );
        assert_eq!(found(&text, &format!("use super::A;\nimpl A {{\n{}}}\n", methods(5))), [""; 0]);
        let expected = ["lib.rs:2: A has 26 methods, at most 25"];
        for named in ["use super::A;\nimpl A", "impl super::A", "use super::*;\nimpl A", "use crate::A as B;\nimpl B"] {
            assert_eq!(found(&text, &format!("{named} {{\n{}}}\n", methods(6))), expected, "{named}");
        }
    }
}
