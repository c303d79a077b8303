//! `xtask messages`: writes every sentence that `remora` can say to a person into one file, for a review.
//!
//! A sentence is a string literal of the agent's sources with at least three words; tests and help texts are left out.
//! `{…}` stands for what is only known when it is said.

use std::fmt::Write as _;
use std::fs;
use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::str::Chars;

use clap::Args;
use remora_bench::sync::Result;
use remora_lab::server::project_root;

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The file to write.
    #[arg(default_value = "target/messages.md")]
    to: PathBuf,
}

/// Folders and files that say nothing to a person.
const LEFT_OUT: [&str; 8] = [
    "simulated.rs",
    "tests",
    "tests.rs",
    "question_tests.rs",
    "fuzzing.rs",
    "mutation.rs",
    "replay.rs",
    // The layouts of C structures, which bindgen writes.
    "types.rs",
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = project_root();
    let mut files = Vec::new();
    for folder in folders(&root)? {
        collect(&folder, &mut files)?;
    }
    files.sort();
    let (mut page, mut count) = ("# Messages\n".to_owned(), 0);
    for file in files {
        let text = fs::read_to_string(&file)?;
        let found = sentences(&text);
        if found.is_empty() {
            continue;
        }
        write!(page, "\n## {}\n\n", file.strip_prefix(&root)?.display())?;
        for (line, sentence) in found {
            writeln!(page, "- {line}: {sentence}")?;
            count += 1;
        }
    }
    fs::write(root.join(&options.to), page)?;
    println!("{}: {count} sentences", options.to.display());
    Ok(())
}

/// The sources of each crate beside this one's folder: what they say, a person can meet.
fn folders(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root)? {
        let crate_folder = entry?.path();
        let sources = crate_folder.join("src");
        if crate_folder.join("Cargo.toml").is_file() && sources.is_dir() {
            found.push(sources);
        }
    }
    Ok(found)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if LEFT_OUT.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            collect(&path, files)?;
        } else if name.ends_with(".rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// The sentences of a file, with their lines.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let (mut found, mut line, mut bytes) = (Vec::new(), 1, product.chars().peekable());
    let mut begin_of_line = true;
    while let Some(char) = bytes.next() {
        match char {
            '\n' => {
                (line, begin_of_line) = (line + 1, true);
                continue;
            }
            // A comment, or the help of an option.
            '/' if bytes.peek() == Some(&'/') => while bytes.next_if(|next| *next != '\n').is_some() {},
            '\'' => skip_character(&mut bytes),
            '"' => {
                let (begin, mut sentence) = (line, String::new());
                while let Some(next) = bytes.next_if(|next| *next != '"') {
                    line += usize::from(next == '\n');
                    match next {
                        '\\' => match bytes.next() {
                            // The sentence goes on in the next line.
                            Some('\n') => {
                                line += 1;
                                while bytes.next_if(|next| next.is_whitespace() && *next != '\n').is_some() {}
                            }
                            Some('n') => sentence.push(' '),
                            Some(other) => sentence.push(other),
                            None => {}
                        },
                        '\n' => sentence.push(' '),
                        next => sentence.push(next),
                    }
                }
                bytes.next();
                if sentence.split_whitespace().count() >= 3 {
                    found.push((begin, sentence));
                }
            }
            char if begin_of_line && char.is_whitespace() => continue,
            _ => {}
        }
        begin_of_line = false;
    }
    found
}

/// Skips a character behind its first quote, which may be a quote too; a lifetime stays.
fn skip_character(bytes: &mut Peekable<Chars>) {
    if bytes.next_if_eq(&'\\').is_some() || bytes.peek() == Some(&'"') {
        bytes.next();
        bytes.next_if_eq(&'\'');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_are_found_and_comments_names_and_tests_are_not() {
        let source = r#"
/// A comment with "quoted words in it".
fn f(a: &'static str) -> char {
    #[error("the server {0} is away: \
             it may come")]
    let x = ('"', '\'', "name", "one \"two\" three");
}
#[cfg(test)]
mod tests { const X: &str = "not one of them"; }
"#;
        let expected = [(4, "the server {0} is away: it may come".to_owned()), (6, "one \"two\" three".to_owned())];
        assert_eq!(sentences(source), expected);
    }
}
