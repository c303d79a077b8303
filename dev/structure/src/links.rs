//! The links of the pages: each relative link, and each anchor, of the Markdown files leads somewhere, and so does each
//! page that a source, a unit or a file of alerts names. A source that a page names is there. The site shows every page
//! of `docs/`.
//!
//! The bounds of the pages: the bytes of all of `docs/`, and the length of those that are read from beginning to end.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

/// Folders that hold no pages of ours: what is built, what is fetched, and the raw data of kept runs.
const SKIPPED: [&str; 4] = ["target", ".cache", ".git", "bench/runs"];

/// The kinds of files, besides Markdown, in which a page of `docs/` may be named.
const SOURCES: [&str; 8] = ["rs", "toml", "yml", "yaml", "json", "service", "txt", "sh"];

/// Where a page tells what was: a source that it names may be gone.
const HISTORY: &str = "docs/decisions";

/// This file, whose tests name pages that are not there.
const ITSELF: &str = "dev/structure/src/links.rs";

/// Every broken link of the folder's pages, and every name of a page that is not there, a line for each.
pub(crate) fn check(root: &Path) -> io::Result<Vec<String>> {
    let mut files = BTreeSet::new();
    walk(root, Path::new(""), &mut files)?;
    let mut pages = BTreeMap::new();
    for file in files.iter().filter(|file| kind(file) == "md") {
        pages.insert(file.clone(), Page::read(&fs::read_to_string(root.join(file))?));
    }
    let mut broken = Vec::new();
    for (file, page) in &pages {
        for (line, target) in &page.links {
            if let Some(why) = fault(root, &pages, file, target) {
                broken.push(format!("{}:{line}: {target}: {why}", file.display()));
            }
        }
    }
    for (file, page) in pages.iter().filter(|(file, _)| !file.starts_with(HISTORY)) {
        for (line, source) in page.sources.iter().filter(|(_, source)| !files.iter().any(|file| file.ends_with(source)))
        {
            broken.push(format!("{}:{line}: {source}: no such source", file.display()));
        }
    }
    let site = Path::new("docs/SUMMARY.md");
    if let Some(summary) = pages.get(site) {
        let shown: BTreeSet<PathBuf> =
            summary.links.iter().filter_map(|(_, target)| plain(&Path::new("docs").join(target))).collect();
        let hidden = pages.keys().filter(|page| page.starts_with("docs") && *page != site && !shown.contains(*page));
        broken.extend(hidden.map(|page| format!("{}: docs/SUMMARY.md does not show it", page.display())));
    }
    let is_source = |file: &&PathBuf| SOURCES.contains(&kind(file)) || file.ends_with("Makefile");
    for file in files.iter().filter(is_source).filter(|file| !file.ends_with(ITSELF)) {
        let Ok(text) = fs::read_to_string(root.join(file)) else { continue };
        for (at, line) in text.lines().enumerate() {
            for target in named(line) {
                if let Some(why) = fault(root, &pages, Path::new("README.md"), target) {
                    broken.push(format!("{}:{}: {target}: {why}", file.display(), at + 1));
                }
            }
        }
    }
    Ok(broken)
}

/// All files below the folder, relative to the root.
pub(crate) fn walk(root: &Path, folder: &Path, files: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        let is_skipped = SKIPPED.iter().any(|skipped| path == Path::new(skipped) || path.ends_with("target"));
        let file_type = entry.file_type()?;
        if file_type.is_dir() && !is_skipped {
            walk(root, &path, files)?;
        } else if file_type.is_file() {
            files.insert(path);
        }
    }
    Ok(())
}

/// What stands behind the last dot of the file's name.
pub(crate) fn kind(file: &Path) -> &str {
    file.extension().and_then(|kind| kind.to_str()).unwrap_or_default()
}

/// Every bound that a page does not keep, a line for each.
pub(crate) fn check_pages(root: &Path) -> io::Result<Vec<String>> {
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

/// Why a link of that page leads nowhere; `None` if it leads somewhere.
fn fault(root: &Path, pages: &BTreeMap<PathBuf, Page>, page: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let file = match path {
        "" => Some(page.to_owned()),
        path => plain(&page.parent().unwrap_or(Path::new("")).join(path)),
    };
    let Some(file) = file else { return Some("leads out of the project".into()) };
    if !root.join(&file).exists() {
        return Some("no such file".into());
    }
    let anchor = anchor?;
    match pages.get(&file) {
        Some(page) if !page.anchors.contains(anchor) => Some(format!("{} has no such heading", file.display())),
        _ => None,
    }
}

/// The path without `.` and `..`; `None` if it leads out of the project.
fn plain(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir if !plain.pop() => return None,
            Component::ParentDir | Component::CurDir => {}
            part => plain.push(part),
        }
    }
    Some(plain)
}

/// The pages below `docs/` that a line names, with their anchors.
fn named(line: &str) -> Vec<&str> {
    let is_of_a_name = |letter: char| letter.is_ascii_alphanumeric() || "/-_.#".contains(letter);
    let starts = line.match_indices("docs/").map(|(at, _)| at);
    let fresh = starts.filter(|&at| !line[..at].ends_with(|letter: char| is_of_a_name(letter)));
    let names = fresh.map(|at| {
        let rest = &line[at..];
        let end = rest.find(|letter| !is_of_a_name(letter)).unwrap_or(rest.len());
        rest[..end].trim_end_matches(['.', '#'])
    });
    names.filter(|name| name.ends_with(".md") || name.contains(".md#")).collect()
}

/// What links need of a page.
#[derive(Default)]
struct Page {
    /// The anchors of its headings, as forges and mdBook make them.
    anchors: BTreeSet<String>,
    /// Its links, with their lines.
    links: Vec<(usize, String)>,
    /// The sources that it names as code, with their lines: the ends of their paths.
    sources: Vec<(usize, String)>,
}

impl Page {
    fn read(text: &str) -> Page {
        let mut page = Page::default();
        let mut in_fence = false;
        for (at, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_fence = !in_fence;
            } else if !in_fence {
                page.line(at + 1, line);
            }
        }
        page
    }

    fn line(&mut self, number: usize, line: &str) {
        let depth = line.bytes().take_while(|&byte| byte == b'#').count();
        if (1..=6).contains(&depth) && line[depth..].starts_with(' ') {
            let name = slug(&without_targets(&line[depth..]));
            let again = (1..).map(|count| format!("{name}-{count}"));
            let fresh = [name.clone()].into_iter().chain(again).find(|name| !self.anchors.contains(name));
            self.anchors.extend(fresh);
        }
        let is_of_a_path = |letter: char| letter.is_ascii_alphanumeric() || "/_-.".contains(letter);
        let code = line.split('`').skip(1).step_by(2);
        let sources = code.filter(|code| code.ends_with(".rs") && code.chars().all(is_of_a_path));
        self.sources.extend(sources.map(|source| (number, source.to_owned())));
        let words = without_code(line);
        for (at, _) in words.match_indices("](") {
            let target = words[at + 2..].split([')', ' ']).next().unwrap_or_default();
            self.links.push((number, target.to_owned()));
        }
        for start in ["src=\"", "srcset=\"", "href=\""] {
            for (at, _) in words.match_indices(start) {
                let target = words[at + start.len()..].split('"').next().unwrap_or_default();
                self.links.push((number, target.to_owned()));
            }
        }
    }
}

/// A heading as the name of its anchor.
fn slug(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|&letter| letter.is_alphanumeric() || " -_".contains(letter));
    kept.flat_map(char::to_lowercase).map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

/// The line without the targets of its links.
fn without_targets(line: &str) -> String {
    let mut parts = line.split("](");
    let mut words = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        words += part.split_once(')').map_or("", |(_, rest)| rest);
    }
    words
}

/// The line without what stands between backquotes. A link around code keeps its target.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// The bytes of all pages below `docs/`, but for the site's contents: what one person can read in an afternoon, and
/// search without getting lost.
const DOCS_BYTES: usize = 350_000;

/// The bytes of the README: some three screens.
const README_BYTES: usize = 6_000;

/// The lines of the README.
const README_LINES: usize = 120;

/// The lines of a page that a reader works through from its beginning to its end.
const PAGE_LINES: usize = 150;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn links_and_anchors_that_lead_nowhere_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("README.md", "# One\n[a](docs/a.md#two-words) [b](docs/b.md) `[c](c.md)`\n```\n[d](d.md)\n```\n");
        write(
            "docs/a.md",
            "## `Two` words\n## Two words\n[up](../README.md#one) [self](#two-words-1) [x](#x) [out](../../b.md)\n",
        );
        write("module/README.md", "`src/lib.rs` `lib.rs` `b.rs` `*.rs` `a lib.rs`\n");
        write("docs/decisions/1.md", "`gone.rs`\n");
        write("src/lib.rs", "// docs/a.md, docs/gone.md and docs/a.md#no.\n");
        write("target/doc.md", "[e](e.md)\n");
        let broken = check(folder.path()).unwrap();
        let expected = [
            "README.md:2: docs/b.md: no such file",
            "docs/a.md:3: #x: docs/a.md has no such heading",
            "docs/a.md:3: ../../b.md: leads out of the project",
            "module/README.md:1: b.rs: no such source",
            "src/lib.rs:1: docs/gone.md: no such file",
            "src/lib.rs:1: docs/a.md#no: docs/a.md has no such heading",
        ];
        assert_eq!(broken, expected);
    }

    #[test]
    fn every_link_of_the_project_leads_somewhere() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
        assert_eq!(check(&root).unwrap().join("\n"), "");
    }

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
        assert_eq!(check_pages(folder.path()).unwrap(), [""; 0]);
        write("README.md", &format!("{}{}", "\n".repeat(README_LINES), "x".repeat(README_BYTES)));
        write(concat!("docs", "/how-to/a.md"), &"x\n".repeat(PAGE_LINES + 1));
        write(concat!("docs", "/reference/a.md"), &"x".repeat(DOCS_BYTES));
        let expected = [
            "README.md: 121 lines, and it may have 120",
            "README.md: 6120 bytes, and it may have 6000",
            concat!("docs", "/how-to/a.md: 151 lines, and it may have 150"),
            "docs: 350302 bytes in all, and they may have 350000: say each thing once",
        ];
        assert_eq!(check_pages(folder.path()).unwrap(), expected);
    }

    #[test]
    fn the_projects_pages_keep_their_bounds() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
        assert_eq!(check_pages(&root).unwrap().join("\n"), "");
    }
}
