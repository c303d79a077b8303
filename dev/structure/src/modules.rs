//! The modules of one crate, as its sources declare them: their files, the items they name, and the
//! names they re-export.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, UseTree};

use crate::Result;

/// A path of names, as written: `["super", "a", "A"]`.
pub(crate) type Names = Vec<String>;

/// One module.
#[derive(Debug, Default)]
pub(crate) struct Module {
    /// The file that contains it.
    pub(crate) file: String,
    /// Names of its child modules.
    pub(crate) children: BTreeSet<String>,
    /// Names of the items that it defines.
    pub(crate) defined: BTreeSet<String>,
    /// Names that a `use` brings in: the name here, and its path.
    pub(crate) imported: BTreeMap<String, Names>,
    /// Paths of glob imports (`use a::*`).
    pub(crate) globs: Vec<Names>,
    /// Every path written in it, including its `use` lines.
    pub(crate) written: BTreeSet<Names>,
}

/// One file of a crate.
pub(crate) struct Source {
    pub(crate) text: String,
    pub(crate) parsed: syn::File,
}

/// The modules of a crate, by their path below its root, and the files that they are read from.
#[derive(Default)]
pub(crate) struct Modules {
    by_path: BTreeMap<Names, Module>,
    files: BTreeMap<String, Source>,
}

impl Modules {
    /// Reads the crate whose first file is `root`. Test modules are left out. Files are named by their path below
    /// `base`.
    pub(crate) fn read(root: &Path, base: &Path) -> Result<Modules> {
        let mut modules = Modules::default();
        let folder = root.parent().unwrap_or(root);
        Files { modules: &mut modules, base }.add_file(Vec::new(), root, folder)?;
        Ok(modules)
    }

    pub(crate) fn get(&self, path: &[String]) -> Option<&Module> {
        self.by_path.get(path)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Names, &Module)> {
        self.by_path.iter()
    }

    /// The files, by name.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &Source)> {
        self.files.iter().map(|(name, source)| (name.as_str(), source))
    }
}

/// Reads the files of a crate.
struct Files<'a> {
    modules: &'a mut Modules,
    base: &'a Path,
}

impl Files<'_> {
    /// Reads a file as the module `path`; the files of its children are in `folder`.
    fn add_file(&mut self, path: Names, file: &Path, folder: &Path) -> Result<()> {
        let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        let name = file.strip_prefix(self.base).unwrap_or(file).display().to_string();
        self.add(path, &name, &parsed.items, folder)?;
        self.modules.files.insert(name, Source { text, parsed });
        Ok(())
    }

    fn add(&mut self, path: Names, file: &str, items: &[Item], folder: &Path) -> Result<()> {
        let mut module = Module { file: file.to_string(), ..Module::default() };
        let mut below = Vec::new();
        for item in items {
            match item {
                Item::Mod(inner) if is_for_tests(&inner.attrs) => {}
                Item::Mod(inner) => {
                    module.children.insert(inner.ident.to_string());
                    below.push(inner);
                }
                item => {
                    module.defined.extend(name_of(item));
                    Reader { module: &mut module }.visit_item(item);
                }
            }
        }
        self.modules.by_path.insert(path.clone(), module);
        for inner in below {
            let name = inner.ident.to_string();
            let child: Names = path.iter().cloned().chain([name.clone()]).collect();
            match &inner.content {
                Some((_, items)) => self.add(child, file, items, &folder.join(&name))?,
                None => {
                    let (found, children) = place(inner, folder, &name)?;
                    self.add_file(child, &found, &children)?;
                }
            }
        }
        Ok(())
    }
}

/// The name under which other code can name an item, if it has one.
fn name_of(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

/// The file of a module that is declared in `folder`, and the folder of its children.
fn place(declared: &ItemMod, folder: &Path, name: &str) -> Result<(PathBuf, PathBuf)> {
    let given = declared.attrs.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    });
    if let Some(given) = given {
        let file = folder.join(given);
        let children = file.parent().unwrap_or(folder).to_path_buf();
        return Ok((file, children));
    }
    let children = folder.join(name);
    for file in [folder.join(format!("{name}.rs")), children.join("mod.rs")] {
        if file.is_file() {
            return Ok((file, children));
        }
    }
    Err(format!("the module {name} declared in {} has no file", folder.display()).into())
}

/// Whether an item exists in tests only: `#[cfg(test)]`, `#[cfg(all(test, …))]`, `#[test]`.
pub(crate) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let words = list.tokens.to_string();
            words.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "test") && !words.contains("not")
        }
        meta => meta.path().is_ident("test"),
    })
}

/// Collects the paths written in items.
struct Reader<'a> {
    module: &'a mut Module,
}

impl Reader<'_> {
    fn take(&mut self, tree: &UseTree, before: &Names) {
        let with = |name: String| before.iter().cloned().chain([name]).collect::<Names>();
        match tree {
            UseTree::Path(path) => self.take(&path.tree, &with(path.ident.to_string())),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.take(tree, before)),
            UseTree::Glob(_) => self.module.globs.push(before.clone()),
            UseTree::Name(name) if name.ident == "self" => self.import(before.last().cloned(), before.clone()),
            UseTree::Name(name) => self.import(Some(name.ident.to_string()), with(name.ident.to_string())),
            UseTree::Rename(name) if name.ident == "self" => self.import(Some(name.rename.to_string()), before.clone()),
            UseTree::Rename(name) => self.import(Some(name.rename.to_string()), with(name.ident.to_string())),
        }
    }

    fn import(&mut self, name: Option<String>, path: Names) {
        self.module.written.insert(path.clone());
        if let Some(name) = name {
            self.module.imported.insert(name, path);
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // A re-export of a child's names is not an import. Other re-exports are.
        let handed_on = !matches!(item.vis, syn::Visibility::Inherited);
        let before = self.module.written.clone();
        self.take(&item.tree, &Vec::new());
        if handed_on {
            self.module.written = before;
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.len() > 1 && path.leading_colon.is_none() {
            self.module.written.insert(names);
        }
        visit::visit_path(self, path);
    }

    fn visit_item_mod(&mut self, _: &'ast ItemMod) {
        // A module inside a function is too rare to follow.
    }
}
