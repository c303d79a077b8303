//! A page as blocks: what is run, where, and what it prints.

use std::fs;

use remora_lab::server::project_root;

/// A fenced block of a page.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Block {
    /// The line of its fence in the page, counted from 1.
    pub(super) line: usize,
    pub(super) text: String,
    pub(super) use_: Use,
    /// The host that its mark names: where it is run, or whose agents print it.
    pub(super) host: Option<String>,
    /// The user who runs it; `None` for root.
    pub(super) user: Option<u32>,
}

/// What becomes of a block.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Use {
    /// Its commands end one after the other.
    Run,
    /// The last of its commands stays until the page is over.
    Stays,
    /// It is what the block before it prints.
    Output,
    /// It is not run, for this reason.
    NotRun(String),
}

/// The blocks of a page of the project, or what is wrong with one.
pub(super) fn read(page: &str) -> Result<Vec<Block>, String> {
    let text = fs::read_to_string(project_root().join(page)).map_err(|error| format!("{page}: {error}"))?;
    blocks(&text).map_err(|(line, fault)| format!("{page}:{line}: {fault}"))
}

fn blocks(text: &str) -> Result<Vec<Block>, (usize, String)> {
    let (mut blocks, mut marks) = (Vec::<Block>::new(), Vec::new());
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if let Some(mark) = line.strip_prefix("<!-- ").and_then(|mark| mark.strip_suffix(" -->")) {
            marks.push(mark);
        } else if let Some(language) = line.trim_start().strip_prefix("```") {
            let inside = lines.by_ref().map(|(_, line)| line).take_while(|line| line.trim() != "```");
            let text: String = inside.flat_map(|line| [line, "\n"]).collect();
            let block = Block { line: at + 1, text, use_: Use::Run, host: None, user: None };
            let block = block.marked(language, &marks, blocks.last()).map_err(|fault| (at + 1, fault))?;
            blocks.push(block);
            marks.clear();
        } else {
            marks.clear();
        }
    }
    Ok(blocks)
}

impl Block {
    fn marked(mut self, language: &str, marks: &[&str], before: Option<&Block>) -> Result<Block, String> {
        for mark in marks {
            if let Some(reason) = mark.strip_prefix("not run:") {
                if reason.trim().is_empty() {
                    return Err("`not run` needs a reason".into());
                }
                self.use_ = Use::NotRun(reason.trim().into());
                return Ok(self);
            }
            for word in mark.split(", ") {
                match word.split_once(' ') {
                    None if word == "stays" => self.use_ = Use::Stays,
                    Some(("at", host)) => self.host = Some(host.into()),
                    Some(("as", user)) => self.user = Some(user.parse().map_err(|_| format!("{user} is no user id"))?),
                    _ => return Err(format!("the mark {word:?} is not known")),
                }
            }
        }
        match (language, before) {
            ("sh", _) => {}
            ("text", Some(Block { use_: Use::NotRun(reason), .. })) if self.host.is_none() => {
                self.use_ = Use::NotRun(reason.clone());
            }
            ("text", Some(_)) => self.use_ = Use::Output,
            _ => {
                return Err("a block begins with ```sh and is run, or with ```text and is what the block before it \
                            prints, or has the mark <!-- not run: REASON -->"
                    .into());
            }
        }
        Ok(self)
    }

    /// Its commands as a shell reads them, each with its line in the page.
    pub(super) fn commands(&self) -> Vec<(usize, String)> {
        let (mut commands, mut lines) = (Vec::new(), (self.line + 1..).zip(self.text.lines()));
        while let Some((at, line)) = lines.next() {
            if line.trim().is_empty() || line.trim_start().starts_with('#') {
                continue;
            }
            let (mut command, mut last) = (line.to_owned(), line);
            while last.ends_with('\\') {
                let Some((_, next)) = lines.next() else { break };
                last = next;
                command += &format!("\n{next}");
            }
            if let Some(end) = end_of_document(last) {
                for (_, next) in lines.by_ref() {
                    command += &format!("\n{next}");
                    if next == end {
                        break;
                    }
                }
            }
            commands.push((at, command));
        }
        commands
    }
}

/// The word that ends the document which begins in the next line (`cat > FILE <<'END'`).
fn end_of_document(line: &str) -> Option<String> {
    let (_, word) = line.split_once("<<")?;
    let word: String = word.trim_start_matches('\'').chars().take_while(char::is_ascii_alphanumeric).collect();
    (!word.is_empty()).then_some(word)
}

/// What is compared of a line: its words, with each number, id and time as `0`, each unit as `size` or `time`, and each
/// family of servers as `Server`. Addresses stay as they are.
fn normal(line: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        let after_number = words.last().is_some_and(|before| before.ends_with('0'));
        words.push(if after_number { unit(word) } else { None }.unwrap_or_else(|| normal_word(word)));
    }
    words.join(" ")
}

/// The kind of a unit, with what stands behind it.
fn unit(word: &str) -> Option<String> {
    let length = word.find(|letter: char| !letter.is_alphabetic()).unwrap_or(word.len());
    let (unit, rest) = word.split_at(length);
    match unit {
        "B" | "KiB" | "MiB" | "GiB" | "TiB" => Some(format!("size{rest}")),
        "µs" | "ms" | "s" | "min" | "h" => Some(format!("time{rest}")),
        _ => None,
    }
}

fn normal_word(word: &str) -> String {
    let value = word.rsplit('=').next().unwrap_or(word).trim_matches(|letter: char| !letter.is_alphanumeric());
    let host = value.rsplit_once("://").map_or(value, |(_, rest)| rest);
    if host.split(':').next().is_some_and(|host| host.parse::<std::net::Ipv4Addr>().is_ok()) {
        return word.to_owned();
    }
    let mut text = String::new();
    let mut rest = word;
    while let Some(letter) = rest.chars().next() {
        let length = rest.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(rest.len());
        let (run, behind) = rest.split_at(length.max(letter.len_utf8()));
        rest = behind;
        let is_id = run.len() >= ID_DIGITS && run.bytes().all(|digit| digit.is_ascii_hexdigit());
        match run {
            "Redis" | "Valkey" | "redis" | "valkey" => text += "Server",
            _ if is_id => text += "0",
            _ => {
                for letter in run.chars() {
                    let letter = if letter.is_ascii_digit() { '0' } else { letter };
                    if letter != '0' || !text.ends_with('0') {
                        text.push(letter);
                    }
                }
            }
        }
    }
    while text.contains("0.0") {
        text = text.replace("0.0", "0");
    }
    text
}

/// Replication ids, names of backups: words of at least 8 hexadecimal digits.
const ID_DIGITS: usize = 8;

/// Stands in a page for any lines, and at the end of a line for any words.
const ANYTHING: &str = "…";

/// Whether `said` has the lines that the page expects, one after the other. Before and behind them may be others, and so
/// may where the page has `…`. A line of the log may be without its time in the page.
pub(super) fn has(said: &str, expected: &str) -> bool {
    let said: Vec<String> = said.lines().map(normal).filter(|line| !line.is_empty()).collect();
    let mut rest = &said[..];
    let mut expected = expected.lines().map(str::trim).filter(|line| !line.is_empty()).peekable();
    while expected.peek().is_some() {
        let part: Vec<&str> = expected.by_ref().take_while(|line| *line != ANYTHING).collect();
        if part.is_empty() {
            continue;
        }
        let Some(at) = rest.windows(part.len()).position(|lines| lines.iter().zip(&part).all(is_line)) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    true
}

fn is_line((said, expected): (&String, &&str)) -> bool {
    let (begun, open) = expected.strip_suffix(ANYTHING).map_or((*expected, false), |begun| (begun, true));
    let wanted = normal(begun);
    let said = match ["INFO ", "WARN "].into_iter().find(|level| wanted.starts_with(level)) {
        Some(level) => said.find(level).map_or(&**said, |at| &said[at..]),
        None => said,
    };
    if open { said.starts_with(&wanted) } else { said == wanted }
}

#[test]
fn blocks_have_marks_and_documents_are_one_command() {
    let page = "Words.\n\n<!-- at 10.0.0.5, stays -->\n<!-- as 998 -->\n```sh\n# remark\ncat > a <<'END'\nb\nEND\n\nrun \\\n  \
                more\n```\n\n```text\nsaid\n```\n<!-- not run: needs a card -->\n```\nrdma\n```\n";
    let blocks = blocks(page).unwrap();
    let first = &blocks[0];
    assert_eq!((first.line, first.host.as_deref(), first.user), (5, Some("10.0.0.5"), Some(998)));
    assert_eq!(first.commands(), [(7, "cat > a <<'END'\nb\nEND".into()), (11, "run \\\n  more".into())]);
    let uses: Vec<Use> = blocks.into_iter().map(|block| block.use_).collect();
    assert_eq!(uses, [Use::Stays, Use::Output, Use::NotRun("needs a card".into())]);
}

#[test]
fn a_block_without_a_mark_or_a_language_is_refused() {
    for (page, line, fault) in [
        ("```\nls\n```\n", 1, "begins with ```sh"),
        ("```text\nsaid\n```\n", 1, "begins with ```sh"),
        ("\n<!-- not run: -->\n```\nls\n```\n", 3, "a reason"),
        ("<!-- on 10.0.0.1 -->\n```sh\nls\n```\n", 2, "not known"),
    ] {
        let (at, said) = blocks(page).unwrap_err();
        assert!(at == line && said.contains(fault), "{page}: {at}: {said}");
    }
}

#[test]
fn output_is_compared_without_its_numbers() {
    let said = "noise\n2026-11-29T04:00:00Z  INFO source ready listening=10.0.0.5:7379 memory=2 GiB\nnoise\n\
                replica of 10.0.0.5:6379 at bbf17eefbd02111a7f9c7e96cabf2ed1c5f57dba:14\n  transfer  3.715 s  20.5 MiB/s\nend";
    assert!(has(said, "INFO source ready listening=10.0.0.5:7379 memory=512 MiB\n"));
    assert!(has(
        said,
        "replica of 10.0.0.5:6379 at 0bf17eefbd02111a7f9c7e96cabf2ed1c5f57dba:7\ntransfer 0.2 ms 1 GiB/s"
    ));
    assert!(has(said, "INFO source ready …\n…\nend\n"));
    for wrong in ["INFO source ready", "replica of 10.0.0.9:6379 at 0:14", "transfer 1 MiB 1 MiB/s", "end\nnoise"] {
        assert!(!has(said, wrong), "{wrong}");
    }
    assert_eq!(normal("s3://b/20261128T132128Z-17362e90-0: of Redis 7.0.15"), "s0://b/0T0Z-0-0: of Server 0");
}
