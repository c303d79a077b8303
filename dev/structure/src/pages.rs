//! The bounds of the pages: the bytes of all of `docs/`, and the length of those that are read from beginning to end.

// Stands alone: it reads the pages' sizes, and `links` what stands in them.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use crate::links::{kind, walk};

/// The bytes of all pages below `docs/`, but for the site's contents: what one person can read in an afternoon, and
/// search without getting lost.
const DOCS_BYTES: usize = 350_000;

/// The bytes of the README: some three screens.
const README_BYTES: usize = 6_000;

/// The lines of the README.
const README_LINES: usize = 120;

/// The lines of a page that a reader works through from its beginning to its end.
const PAGE_LINES: usize = 150;

/// Every bound that a page does not keep, a line for each.
pub(crate) fn check(root: &Path) -> io::Result<Vec<String>> {
    let mut files = BTreeSet::new();
    walk(root, Path::new(""), &mut files)?;
    let (mut broken, mut of_docs) = (Vec::new(), 0);
    for file in files.iter().filter(|file| kind(file) == "md") {
        let is_readme = file == Path::new("README.md");
        if !is_readme && !file.starts_with("docs") {
            continue;
        }
        let text = fs::read_to_string(root.join(file))?;
        let (bytes, lines) = (text.len(), text.lines().count());
        let most_lines = match file {
            _ if is_readme => README_LINES,
            file if file.starts_with("docs/how-to") || file == Path::new("docs/measured.md") => PAGE_LINES,
            _ => usize::MAX,
        };
        if lines > most_lines {
            broken.push(format!("{}: {lines} lines, and it may have {most_lines}", file.display()));
        }
        if is_readme && bytes > README_BYTES {
            broken.push(format!("{}: {bytes} bytes, and it may have {README_BYTES}", file.display()));
        }
        of_docs += if is_readme || file == Path::new("docs/SUMMARY.md") { 0 } else { bytes };
    }
    if of_docs > DOCS_BYTES {
        broken.push(format!("docs: {of_docs} bytes in all, and they may have {DOCS_BYTES}: say each thing once"));
    }
    Ok(broken)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn pages_out_of_a_bound_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("README.md", &"x".repeat(README_BYTES));
        write(concat!("docs", "/how-to/a.md"), &"x\n".repeat(PAGE_LINES));
        write(concat!("docs", "/reference/a.md"), &"x\n".repeat(PAGE_LINES + 1));
        write("docs/plots/a.svg", &"x".repeat(DOCS_BYTES));
        write("module/README.md", &"x".repeat(DOCS_BYTES));
        assert_eq!(check(folder.path()).unwrap(), [""; 0]);
        write("README.md", &format!("{}{}", "\n".repeat(README_LINES), "x".repeat(README_BYTES)));
        write(concat!("docs", "/how-to/a.md"), &"x\n".repeat(PAGE_LINES + 1));
        write(concat!("docs", "/reference/a.md"), &"x".repeat(DOCS_BYTES));
        let expected = [
            "README.md: 121 lines, and it may have 120",
            "README.md: 6120 bytes, and it may have 6000",
            concat!("docs", "/how-to/a.md: 151 lines, and it may have 150"),
            "docs: 350302 bytes in all, and they may have 350000: say each thing once",
        ];
        assert_eq!(check(folder.path()).unwrap(), expected);
    }

    #[test]
    fn the_projects_pages_keep_their_bounds() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
        assert_eq!(check(&root).unwrap().join("\n"), "");
    }
}
