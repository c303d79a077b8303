//! The crates of others: where they come from, under which licence, and in how many versions.
//!
//! Known vulnerabilities are not looked for here: that needs a database, see `dev/audit`.

use std::collections::{BTreeMap, BTreeSet};

use crate::workspace::Licensed;

/// The registry that every crate of others comes from.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Licences under which we use crates. All of them permit use in closed and open programs, and ask for a notice only.
const LICENCES: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Crates in several incompatible versions, and the reason. Each version is built, and each has to be kept free of
/// known faults.
const SEVERAL: &[(&str, &str)] = &[
    ("base64", "age uses 0.21, the PEM of certificates and object_store 0.23"),
    ("bit-vec", "proptest uses two, in tests only"),
    ("block-buffer", "digest 0.10 uses 0.10, 0.11 uses 0.12"),
    ("chacha20", "age uses 0.9, random numbers 0.10"),
    ("cpufeatures", "sha2 0.10 uses 0.2, random numbers of tests 0.3"),
    ("crypto-common", "digest 0.10 uses 0.1, 0.11 uses 0.2"),
    ("digest", "sha2 and hmac use 0.10, md-5 of object_store and the texts of age 0.11"),
    ("foldhash", "petgraph's tables use 0.1, ratatui's 0.2"),
    ("getrandom", "ring uses 0.2, we use 0.3, tests and tempfile 0.4"),
    ("hashbrown", "petgraph uses 0.15, indexmap 0.17; both in tools"),
    ("itertools", "ratatui uses 0.14, object_store 0.15"),
    ("md-5", "object_store uses 0.11, the S3 server of the tests 0.10"),
    ("quick-xml", "object_store uses 0.41, the S3 server of the tests 0.37"),
    ("r-efi", "two versions of getrandom use it, on UEFI only"),
    ("rand", "age uses 0.8, object_store and tests 0.10"),
    ("rand_core", "two versions of rand use it"),
    ("rustc-hash", "the texts of age use 1 and 2"),
    ("self_cell", "the texts of age use 0.10, which is 1 under another name"),
    ("sha2", "age and we use 0.10, the embedded texts of age 0.11"),
    ("syn", "derive macros change to 3 one after the other; none is part of the programs"),
    ("synstructure", "derive macros change to 0.14 one after the other; none is part of the programs"),
    ("thiserror", "the texts of age use 1"),
    ("thiserror-impl", "two versions of thiserror use it"),
    ("windows-sys", "on Windows only, where Remora does not run"),
];

/// What is wrong with the crates in the text of a lock file, one line each. `file` is its name.
pub(crate) fn check_lock(file: &str, text: &str) -> Vec<String> {
    let locked = read_lock(text);
    let mut wrong = Vec::new();
    let mut versions: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for Locked { name, version, source, has_checksum } in &locked {
        let Some(source) = source else { continue }; // a crate of this repository
        if *source != REGISTRY {
            wrong.push(format!("{file}: {name} {version} comes from {source}; use crates.io only"));
        } else if !has_checksum {
            wrong.push(format!("{file}: {name} {version} has no checksum"));
        }
        versions.entry(name).or_default().insert(compatible(version));
    }
    for (name, versions) in versions {
        if versions.len() > 1 && !SEVERAL.iter().any(|(known, _)| *known == name) {
            let list: Vec<String> = versions.into_iter().collect();
            wrong.push(format!(
                "{file}: {name} is there in the versions {}; use one, or note the reason in SEVERAL of dev/structure/src/dependencies.rs",
                list.join(", ")
            ));
        }
    }
    wrong
}

/// The crates of others that `other` locks in a version that `first` has not, though it has the crate, one line each.
/// Both are the name and the text of a lock file. A fuzz target in another workspace says something about a program
/// only if both are built of the same code.
pub(crate) fn check_same(first: (&str, &str), other: (&str, &str)) -> Vec<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for Locked { name, version, .. } in read_lock(first.1) {
        versions.entry(name).or_default().insert(version);
    }
    let mut wrong = Vec::new();
    for Locked { name, version, .. } in read_lock(other.1) {
        if let Some(known) = versions.get(name)
            && !known.contains(version)
        {
            let known: Vec<&str> = known.iter().copied().collect();
            wrong.push(format!(
                "{}: {name} is there in the version {version}, but {} has {}; change it with `cargo update --precise`",
                other.0,
                first.0,
                known.join(" and ")
            ));
        }
    }
    wrong
}

/// The crates whose licence is not in [`LICENCES`], one line each.
pub(crate) fn check_licences(crates: &[Licensed]) -> Vec<String> {
    let unfit = crates.iter().filter(|one| !one.licence.as_deref().is_some_and(is_allowed));
    let line = |Licensed { name, licence }: &Licensed| {
        let licence = licence.as_deref().unwrap_or("none in its manifest");
        format!(
            "{name} has the licence {licence}; do not use it, or add the licence in dev/structure/src/dependencies.rs"
        )
    };
    unfit.map(line).collect()
}

/// One entry of a lock file.
struct Locked<'a> {
    name: &'a str,
    version: &'a str,
    source: Option<&'a str>,
    has_checksum: bool,
}

/// The entries of a lock file. Cargo writes one field on each line.
fn read_lock(text: &str) -> Vec<Locked<'_>> {
    let read = |entry| {
        let field = |name: &str| -> Option<&str> {
            let lines = str::lines(entry);
            let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(" = \"")?.strip_suffix('"'));
            values.next()
        };
        let (name, version) = (field("name")?, field("version")?);
        Some(Locked { name, version, source: field("source"), has_checksum: field("checksum").is_some() })
    };
    text.split("[[package]]").filter_map(read).collect()
}

/// The part of a version that all compatible versions share: `1` of 1.2.3, `0.3` of 0.3.4, `0.0.5` of 0.0.5.
fn compatible(version: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in version.split('.') {
        parts.push(part);
        if part != "0" {
            break;
        }
    }
    parts.join(".")
}

/// Whether [`LICENCES`] satisfies an SPDX expression. Before SPDX, crates wrote `/` for `OR`. Parentheses are supported
/// to any depth; an expression that cannot be read is not satisfied.
fn is_allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    either(&mut rest) == Some(true) && rest.is_empty()
}

fn either(words: &mut &[&str]) -> Option<bool> {
    let mut allowed = both(words)?;
    while let Some((&"OR", rest)) = words.split_first() {
        *words = rest;
        allowed |= both(words)?;
    }
    Some(allowed)
}

fn both(words: &mut &[&str]) -> Option<bool> {
    let mut allowed = licence(words)?;
    while let Some((&"AND", rest)) = words.split_first() {
        *words = rest;
        allowed &= licence(words)?;
    }
    Some(allowed)
}

fn licence(words: &mut &[&str]) -> Option<bool> {
    let (&first, rest) = words.split_first()?;
    *words = rest;
    if first == "(" {
        let allowed = either(words)?;
        let (&")", rest) = words.split_first()? else { return None };
        *words = rest;
        return Some(allowed);
    }
    let mut name = first.to_owned();
    if let [exception_follows, exception, rest @ ..] = *words
        && *exception_follows == "WITH"
    {
        name = format!("{first} WITH {exception}");
        *words = rest;
    }
    Some(LICENCES.contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, version: &str, more: &str) -> String {
        format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n{more}\n")
    }

    fn from_registry(name: &str, version: &str) -> String {
        entry(name, version, &format!("source = \"{REGISTRY}\"\nchecksum = \"abc\"\ndependencies = [\n \"x\",\n]\n"))
    }

    #[test]
    fn a_crate_from_elsewhere_or_without_a_checksum_is_named() {
        let good = entry("ours", "0.1.0", "") + &from_registry("one", "1.0.0") + &from_registry("other", "0.3.1");
        assert_eq!(check_lock("lock", &good), Vec::<String>::new());
        let git = entry("stray", "1.0.0", "source = \"git+https://example.com/stray#abc\"");
        let bare = entry("bare", "1.0.0", &format!("source = \"{REGISTRY}\""));
        let wrong = check_lock("lock", &(good + &git + &bare));
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong[0].contains("stray 1.0.0 comes from git+") && wrong[1].contains("bare 1.0.0 has no checksum"));
    }

    #[test]
    fn incompatible_versions_of_a_crate_need_a_reason() {
        let locked = |versions: &[&str]| -> Vec<String> {
            let text: String = versions.iter().map(|version| from_registry("twice", version)).collect();
            check_lock("lock", &text)
        };
        assert_eq!(locked(&["1.0.0", "1.2.0"]), Vec::<String>::new());
        assert_eq!(locked(&["0.3.1", "0.3.2"]), Vec::<String>::new());
        for two in [["1.0.0", "2.0.0"], ["0.3.1", "0.4.0"], ["0.0.1", "0.0.2"], ["0.9.0", "1.0.0"]] {
            assert!(locked(&two).concat().contains("twice"), "{two:?}");
        }
        let known = from_registry("syn", "2.0.0") + &from_registry("syn", "3.0.0");
        assert_eq!(check_lock("lock", &known), Vec::<String>::new());
    }

    #[test]
    fn a_crate_in_both_lock_files_has_the_same_versions() {
        let first = from_registry("one", "1.9.0") + &from_registry("two", "0.2.0") + &from_registry("two", "0.3.1");
        let check = |other: &str| check_same(("first", &first), ("other", other));
        assert_eq!(check(&(from_registry("one", "1.9.0") + &from_registry("two", "0.3.1"))), Vec::<String>::new());
        assert_eq!(check(&from_registry("only here", "1.0.0")), Vec::<String>::new());
        let wrong = check(&(from_registry("one", "1.10.0") + &from_registry("two", "0.3.2")));
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong[0].starts_with("other: one is there in the version 1.10.0, but first has 1.9.0;"), "{wrong:?}");
        assert!(
            wrong[1].starts_with("other: two is there in the version 0.3.2, but first has 0.2.0 and 0.3.1;"),
            "{wrong:?}"
        );
    }

    #[test]
    fn licences_are_read_as_expressions() {
        let allowed = [
            "MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 / MIT",
            "GPL-3.0 OR MIT",
            "Apache-2.0 AND ISC",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception",
            "LGPL-2.1 OR (MIT AND (ISC OR GPL-2.0))",
        ];
        for expression in allowed {
            assert!(is_allowed(expression), "{expression}");
        }
        let refused = [
            "",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "GPL-2.0 OR MIT AND GPL-3.0",
            "GPL-2.0 WITH LLVM-exception",
            "MIT OR",
            "(MIT",
            "MIT)",
            "MIT ISC",
            "MIT WITH",
        ];
        for expression in refused {
            assert!(!is_allowed(expression), "{expression}");
        }
    }

    #[test]
    fn a_crate_without_a_fit_licence_is_named() {
        let licensed =
            |name: &str, licence: Option<&str>| Licensed { name: name.into(), licence: licence.map(Into::into) };
        let crates = [licensed("good", Some("MIT")), licensed("silent", None), licensed("strict", Some("AGPL-3.0"))];
        let wrong = check_licences(&crates);
        assert_eq!(wrong.len(), 2, "{wrong:?}");
        assert!(wrong[0].contains("silent") && wrong[1].contains("strict has the licence AGPL-3.0"));
    }
}
