//! Append-only files: commands one behind the other, with lines of notes between them, and the manifest that names the
//! files of one data set.
//!
//! ```text
//!   appendonly.aof.manifest        file appendonly.aof.1.base.rdb seq 1 type b       a snapshot
//!                                  file appendonly.aof.1.incr.aof seq 1 type i       commands since
//!
//!   *2 $6 SELECT $1 3 │ #TS:1764114301 │ *3 $3 SET … │ *1 $5 MULTI │ *3 … │ *1 $4 EXEC │ #… │ *3 …
//!                     ▲                              ▲             no border          ▲    ▲
//!                     ╰───────────── borders: a file that ends here is whole ─────────┴────╯
//! ```
//!
//! - [`Walker`]: finds the ends of commands and transactions as bytes arrive, and holds none of the values. It reads
//!   files, and the replication stream, which has the same form without notes. **Start here.**
//! - [`Watch`]: finds the commands of a stream that must not be applied late.
//! - [`Foreign`]: finds the commands of a stream that a server does not know.
//! - [`Manifest`]: the list of files, as Redis 7 and Valkey write it.
//!
//! Not here: what a command does. Only `SELECT`, `MULTI`, `EXEC`, the commands without an effect on data, and those
//! that act on more than data are told apart, by the table of [`commands`].

mod watch;

use std::fmt;
use std::ops::Range;

use crate::commands::{self, Effect, Expiry, Late, Times};
use crate::info;

pub use watch::{Foreign, Known, Seen, Unfit, Watch};

/// What a note begins with that says at which second the commands behind it were run.
pub const TIME_NOTE: &[u8] = b"#TS:";

/// The files of a data set, in the order in which a server loads them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The base, if there is one, and then the commands since, file by file. Never a file of the history.
    pub files: Vec<NamedFile>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFile {
    /// Its name in the folder of the manifest.
    pub name: String,
    /// Its number among the files of its kind.
    pub number: u64,
    /// What it is.
    pub kind: FileKind,
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A snapshot, or commands that make all of the data.
    Base,
    /// Commands since.
    Incremental,
}

/// The text is not a manifest of which a server would load all files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the manifest {what}: {found:?}")]
pub struct ManifestError {
    /// Its number, from 1 on.
    pub line: usize,
    /// What is wrong with it.
    pub what: &'static str,
    /// What stands there.
    pub found: String,
}

/// The most files of a manifest. A server that cannot rewrite makes one every minute at most: this is a month of them.
const FILES_MAX: usize = 50_000;

impl Manifest {
    /// Reads what a server or [`Manifest`]'s text says. Files of the history are left out.
    ///
    /// # Errors
    /// [`ManifestError`]: a server would not load it either, or a name leads out of the folder.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        let mut files: Vec<NamedFile> = Vec::new();
        for (number, line) in (1..).zip(bytes.split(|byte| *byte == b'\n')) {
            let error = |what: &'static str| ManifestError { line: number, what, found: info::excerpt(line) };
            let line_text = std::str::from_utf8(line).map_err(|_| error("is not text"))?.trim_end_matches('\r');
            if line_text.is_empty() || line_text.starts_with('#') {
                continue;
            }
            let words = words(line_text).ok_or_else(|| error("has a name in quotes that does not end"))?;
            let value = |name: &str| {
                let pair = words.chunks_exact(2).find(|pair| pair[0].eq_ignore_ascii_case(name));
                pair.map(|pair| pair[1].as_str())
            };
            let name = value("file").filter(|name| !name.is_empty()).ok_or_else(|| error("names no file"))?;
            if name.contains('/') || name == "." || name == ".." || name.contains('\0') {
                return Err(error("names a file outside of its folder"));
            }
            let sequence = value("seq").and_then(|seq| info::decimal_u64(seq.as_bytes()));
            let sequence = sequence.filter(|seq| *seq > 0).ok_or_else(|| error("has no number"))?;
            let kind = match value("type") {
                Some("b") if files.is_empty() => FileKind::Base,
                Some("b") => return Err(error("has a base that is not the first file")),
                Some("i") => FileKind::Incremental,
                Some("h") => continue,
                _ => return Err(error("has no type that is known")),
            };
            let before = files.last().filter(|last| last.kind == FileKind::Incremental);
            if before.is_some_and(|before| sequence <= before.number) {
                return Err(error("is not in the order of the numbers"));
            }
            if files.len() == FILES_MAX {
                return Err(error("is one too many"));
            }
            files.push(NamedFile { name: name.to_owned(), number: sequence, kind });
        }
        Ok(Manifest { files })
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            let kind = if file.kind == FileKind::Base { 'b' } else { 'i' };
            let name = match file.name.contains([' ', '"', '\\']) {
                true => format!("\"{}\"", file.name.replace('\\', "\\\\").replace('"', "\\\"")),
                false => file.name.clone(),
            };
            writeln!(f, "file {name} seq {} type {kind}", file.number)?;
        }
        Ok(())
    }
}

/// The words of a line, which may be in quotes. `None`: a quote does not end.
fn words(line: &str) -> Option<Vec<String>> {
    let (mut words, mut rest) = (Vec::new(), line.trim_start());
    while !rest.is_empty() {
        let mut word = String::new();
        if let Some(quoted) = rest.strip_prefix('"') {
            let mut characters = quoted.char_indices();
            let end = loop {
                match characters.next()? {
                    (at, '"') => break at,
                    (_, '\\') => word.push(characters.next()?.1),
                    (_, other) => word.push(other),
                }
            };
            rest = quoted.get(end + 1..).unwrap_or_default();
        } else {
            let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
            word.push_str(&rest[..end]);
            rest = &rest[end..];
        }
        words.push(word);
        rest = rest.trim_start();
    }
    Some(words)
}

// Walker: finds the borders between commands, without holding what is between them.

/// What the walker found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// The name of a command is known. The rest of the command follows.
    Verb(Verb),
    /// A command has ended.
    Command {
        /// Which one.
        verb: Verb,
        /// Where it is, in bytes from the start.
        bytes: Range<u64>,
    },
    /// A line that begins with `#`, without its end.
    Note(Vec<u8>),
}

/// Commands that are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// `PING` and `REPLCONF`: between a primary and its replicas.
    Link,
    /// `PUBLISH` and `SPUBLISH`: for subscribers. No data is changed.
    Publish,
    /// `CLUSTER SETSLOT` and others that change the map of the cluster.
    Cluster,
    /// `SELECT`.
    Select,
    /// `MULTI`: a transaction begins.
    Multi,
    /// `EXEC`: it ends.
    Exec,
    /// Any other one.
    Other,
}

impl Verb {
    /// Whether data can be changed by it, or the meaning of commands behind it: a backup needs it.
    pub fn has_effect(self) -> bool {
        !matches!(self, Verb::Link | Verb::Publish | Verb::Cluster)
    }
}

/// A time in a command that counts from the moment at which it is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relative<'a> {
    /// The key that expires. `None`: several keys do, or fields of a hash, or the key is longer than [`KEY_BYTES_MAX`].
    pub key: Option<&'a [u8]>,
    /// The time in milliseconds. `None`: the argument is not a number, and the command fails.
    pub milliseconds: Option<i64>,
}

/// The bytes are not commands. The position is that of the command or note in which that shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WalkError {
    /// Where the command or note begins.
    pub at: u64,
    /// What is wrong with it.
    pub what: &'static str,
    /// What stands there.
    pub found: String,
}

impl fmt::Display for WalkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WalkError { at, what, found } = self;
        write!(f, "the command at byte {at} is damaged: {what} reads {found:?}")
    }
}

impl std::error::Error for WalkError {}

/// A walk over commands. See the module docs.
#[derive(Debug)]
pub struct Walker {
    has_notes: bool,
    state: State,
    /// Position of the next byte.
    at: u64,
    /// Where the present command or note begins.
    begins: u64,
    /// The present line, as far as it has arrived.
    line: Vec<u8>,
    /// The present argument, if it is looked at.
    short: Vec<u8>,
    looks: bool,
    argument: u64,
    arguments: u64,
    verb: Verb,
    command: Present,
    /// The key of the present command, if it may get a time. Only where `keeps_keys`.
    key: Vec<u8>,
    keeps_keys: bool,
    /// The words of the present command, if it is one of [`WORDS_OF`] and `keeps_words`.
    words: Vec<Vec<u8>>,
    keeps_words: bool,
    in_transaction: bool,
    /// The end of the last command or note outside a transaction.
    border: u64,
    database: u64,
    /// How many databases a server needs for what has ended.
    databases: u64,
}

/// What is known of the present command beside its verb.
#[derive(Debug, Clone, Copy)]
enum Present {
    /// It may be applied late, or its name has not arrived.
    Any,
    /// `CLUSTER`: the next argument says what it is.
    Container,
    /// A message to a channel that has not arrived.
    Message,
    /// It must not be applied late.
    Late(Late),
    /// It may have a time.
    Times { times: Times, has_one_key: bool },
    /// It names databases, beside the one that is selected.
    Databases(Names),
}

/// Where a command names databases.
#[derive(Debug, Clone, Copy)]
enum Names {
    /// `MOVE key database`
    Second,
    /// `SWAPDB database database`
    Both,
    /// `COPY source destination DB database`. `is_next`: the word before the number was read.
    BehindWord { is_next: bool },
}

impl Names {
    /// Where that command names databases; `None` if it names none.
    fn of(name: &[u8]) -> Option<Names> {
        let all: [(&[u8], Names); 3] =
            [(b"MOVE", Names::Second), (b"SWAPDB", Names::Both), (b"COPY", Names::BehindWord { is_next: false })];
        all.into_iter().find(|(known, _)| name.eq_ignore_ascii_case(known)).map(|(_, names)| names)
    }

    fn looks_at(self, argument: u64) -> bool {
        match self {
            Names::Second => argument == 2,
            Names::Both => true,
            Names::BehindWord { .. } => argument > 2,
        }
    }

    /// Takes an argument that is looked at. Returns the database that it names.
    fn take(&mut self, short: &[u8]) -> Option<u64> {
        if let Names::BehindWord { is_next } = self
            && !std::mem::replace(is_next, short.eq_ignore_ascii_case(b"DB"))
        {
            return None;
        }
        info::decimal_u64(short).filter(|number| *number <= ARGUMENTS_MAX)
    }
}

/// The channel on which Sentinels tell each other what they know, every two seconds. An old message changes nothing: it
/// has a number by which they see that it is old.
const SENTINEL: &[u8] = b"__sentinel__:hello";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A line begins that is a note, or says how many arguments a command has.
    Begin,
    /// In a line that says the length of an argument.
    Length,
    /// In an argument of this length, of which some bytes are missing.
    Bulk { length: u64, left: u64 },
    /// In the two bytes after an argument.
    End { seen: u8 },
}

/// Longest line, in bytes: the servers' own limit for a note (`AOF_ANNOTATION_LINE_MAX_LEN`).
const LINE_BYTES_MAX: usize = 1024;

/// The most arguments of a command: the servers count them as signed 32-bit integers.
const ARGUMENTS_MAX: u64 = i32::MAX as u64;

/// The longest argument: as long as an offset can tell.
const ARGUMENT_BYTES_MAX: u64 = i64::MAX as u64;

/// Longest argument that is looked at: the name of a command, a word of its options, or a number.
pub const SHORT_BYTES_MAX: u64 = 20;

/// Longest key that is held for a command that may get a time.
pub const KEY_BYTES_MAX: u64 = 1 << 20;

/// Commands whose words are held where they are asked for: those with options that only some servers know.
const WORDS_OF: [&str; 4] = ["SET", "XADD", "XGROUP", "XTRIM"];

/// Words that are held of a command: all options of `SET` and `XTRIM`, and those of `XADD` before its fields.
const WORDS_MAX: u64 = 20;

/// Digits of the numbers that are read without a copy.
const QUICK_DIGITS: usize = 12;

impl Walker {
    /// At the first byte of an append-only file.
    pub fn of_file() -> Walker {
        Walker {
            has_notes: true,
            state: State::Begin,
            at: 0,
            begins: 0,
            line: Vec::new(),
            short: Vec::new(),
            looks: false,
            argument: 0,
            arguments: 0,
            verb: Verb::Other,
            command: Present::Any,
            key: Vec::new(),
            keeps_keys: false,
            words: Vec::new(),
            keeps_words: false,
            in_transaction: false,
            border: 0,
            database: 0,
            databases: 1,
        }
    }

    /// At the byte `at` of a replication stream, between two commands. `database`: the one that is selected there.
    pub fn of_stream(at: u64, database: u64) -> Walker {
        Walker { has_notes: false, at, begins: at, border: at, database, ..Walker::of_file() }
    }

    /// Holds the key of a command that may get a time, for [`Walker::relative`].
    pub fn keeping_keys(self) -> Walker {
        Walker { keeps_keys: true, ..self }
    }

    /// Holds the words of the commands that have options which only some servers know, for [`Walker::words`].
    pub fn keeping_words(self) -> Walker {
        Walker { keeps_words: true, ..self }
    }

    /// The first words of the command that has just ended, its name first, if it is one of those that
    /// [`Walker::keeping_words`] names. A word of more than [`SHORT_BYTES_MAX`] bytes is empty.
    pub fn words(&self) -> &[Vec<u8>] {
        &self.words
    }

    /// Why the command that has just ended must not be applied late; `None` if it may.
    pub fn late(&self) -> Option<Late> {
        match self.command {
            Present::Late(why) => Some(why),
            Present::Message => Some(Late::Message),
            Present::Container => Some(Late::State),
            Present::Times { times, .. } => times.found().map(|_| Late::State),
            Present::Any | Present::Databases(_) => None,
        }
    }

    /// The time in the command that has just ended which counts from the moment at which it is run.
    pub fn relative(&self) -> Option<Relative<'_>> {
        let Present::Times { times, has_one_key } = &self.command else { return None };
        let key = (*has_one_key && self.keeps_keys && self.key.len() as u64 <= KEY_BYTES_MAX).then_some(&self.key[..]);
        times.found().map(|time| Relative { key, milliseconds: time.milliseconds })
    }

    /// Position of the next byte.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Where the present command begins.
    pub fn begins(&self) -> u64 {
        self.begins
    }
    /// The name of the present command, just after [`Found::Verb`]; empty if it is longer than [`SHORT_BYTES_MAX`].
    pub fn name(&self) -> &[u8] {
        // The kind of this one is known with its second word only.
        if self.argument == 0 { &self.short } else { b"cluster" }
    }

    /// The end of the last command or note outside of a transaction: what is cut here is whole.
    pub fn border(&self) -> u64 {
        self.border
    }

    /// Whether the next byte begins a command or a note.
    pub fn is_between(&self) -> bool {
        self.state == State::Begin && self.line.is_empty()
    }

    /// Whether the commands before this byte have begun a transaction and not ended it.
    pub fn is_in_transaction(&self) -> bool {
        self.in_transaction
    }

    /// The database that commands use here.
    pub fn database(&self) -> u64 {
        self.database
    }

    /// How many databases a server needs for all that has been read.
    pub fn databases(&self) -> u64 {
        self.databases.max(self.database + 1)
    }

    /// Takes the next bytes: up to the first find, or all of them. Returns how many, and what was found.
    ///
    /// # Errors
    /// [`WalkError`]; nothing can be read after it.
    pub fn feed(&mut self, input: &[u8]) -> Result<(usize, Option<Found>), WalkError> {
        let mut taken = 0;
        while let Some(rest) = input.get(taken..).filter(|rest| !rest.is_empty()) {
            let (bytes, found) = match self.state {
                State::Begin | State::Length => match self.quick(rest) {
                    Some((bytes, number)) => (bytes, self.header(number)),
                    None => self.line(rest)?,
                },
                State::Bulk { length, left } => self.bulk(length, left, rest),
                State::End { seen: 0 } if rest.starts_with(b"\r\n") => {
                    self.at += 1;
                    let (bytes, found) = self.end(1, b'\n')?;
                    (bytes + 1, found)
                }
                State::End { seen } => self.end(seen, rest[0])?,
            };
            taken += bytes;
            if found.is_some() {
                return Ok((taken, found));
            }
        }
        Ok((taken, None))
    }

    /// Takes a line that is here as a whole and says a usual number. Returns its length and the number.
    fn quick(&mut self, rest: &[u8]) -> Option<(usize, u64)> {
        let mark = if self.state == State::Begin { b'*' } else { b'$' };
        if !self.line.is_empty() || rest.first() != Some(&mark) {
            return None;
        }
        let (mut number, mut at) = (0, 1);
        while let Some(digit) = rest.get(at).filter(|byte| byte.is_ascii_digit()) {
            number = number * 10 + u64::from(digit - b'0');
            at += 1;
            if at > QUICK_DIGITS {
                return None;
            }
        }
        let is_usual = rest.get(1).is_some_and(|first| *first != b'0' || at == 2) && at > 1;
        let may_be = if self.state == State::Begin { number > 0 && number <= ARGUMENTS_MAX } else { true };
        if !is_usual || !may_be || rest.get(at..at + 2) != Some(b"\r\n") {
            return None;
        }
        if self.state == State::Begin {
            self.begins = self.at;
        }
        self.at += at as u64 + 2;
        Some((at + 2, number))
    }

    /// Takes the number of a line: that of arguments, or the length of one.
    fn header(&mut self, number: u64) -> Option<Found> {
        if self.state == State::Begin {
            (self.argument, self.arguments, self.verb, self.command) = (0, number, Verb::Other, Present::Any);
            self.words.clear();
            self.state = State::Length;
            return None;
        }
        self.short.clear();
        self.looks = number <= SHORT_BYTES_MAX && (self.looks_at() || self.keeps_this_word());
        if self.argument == 1 {
            self.key.clear();
        }
        self.state = State::Bulk { length: number, left: number };
        if number == 0 {
            return self.argument_done(0);
        }
        (self.argument == 0 && number > SHORT_BYTES_MAX).then_some(Found::Verb(Verb::Other))
    }

    /// Whether the present argument is kept. Until its name is known, a command may be one of those that are.
    fn keeps_this_word(&self) -> bool {
        let is_one = || match self.words.first() {
            Some(name) => WORDS_OF.iter().any(|known| name.eq_ignore_ascii_case(known.as_bytes())),
            None => true,
        };
        self.keeps_words && self.argument < WORDS_MAX && is_one()
    }

    /// Whether the present argument is looked at, if it is short.
    fn looks_at(&self) -> bool {
        match (self.argument, &self.command) {
            (0, _) | (1, Present::Container | Present::Message) => true,
            (argument, Present::Times { times, .. }) => times.looks_at(argument),
            (argument, Present::Databases(names)) => names.looks_at(argument),
            (1, _) => self.verb == Verb::Select,
            _ => false,
        }
    }

    /// Takes bytes of a line, or all that is left of it.
    fn line(&mut self, rest: &[u8]) -> Result<(usize, Option<Found>), WalkError> {
        if self.state == State::Begin && self.line.is_empty() {
            self.begins = self.at;
        }
        let length = rest.iter().position(|byte| *byte == b'\n');
        let bytes = length.map_or(rest.len(), |length| length + 1);
        let room = LINE_BYTES_MAX - self.line.len();
        if bytes > room {
            let part = rest.get(..room).unwrap_or(rest).to_vec();
            return Err(self.error("a line without an end", &part));
        }
        self.line.extend_from_slice(rest.get(..bytes).unwrap_or(rest));
        self.at += bytes as u64;
        let first = self.line.first().copied();
        let may_begin = match self.state {
            State::Begin => first == Some(b'*') || (self.has_notes && first == Some(b'#')),
            _ => first == Some(b'$'),
        };
        if !may_begin {
            return Err(self.error("its first byte", &self.line.clone()));
        }
        if length.is_none() {
            return Ok((bytes, None));
        }
        let line = std::mem::take(&mut self.line);
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        if first == Some(b'#') {
            if !self.in_transaction {
                self.border = self.at;
            }
            return Ok((bytes, Some(Found::Note(text.to_vec()))));
        }
        let what = if self.state == State::Begin { "its number of arguments" } else { "the length of an argument" };
        let limit = if self.state == State::Begin { ARGUMENTS_MAX } else { ARGUMENT_BYTES_MAX };
        let number =
            text.get(1..).and_then(info::decimal_u64).filter(|number| *number <= limit && line.ends_with(b"\r\n"));
        let Some(number) = number else { return Err(self.error(what, &line)) };
        if self.state == State::Begin && number == 0 {
            return Err(self.error(what, &line));
        }
        Ok((bytes, self.header(number)))
    }

    /// Takes bytes of an argument.
    fn bulk(&mut self, length: u64, left: u64, rest: &[u8]) -> (usize, Option<Found>) {
        let bytes = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
        let part = rest.get(..bytes).unwrap_or_default();
        if self.looks {
            self.short.extend_from_slice(part);
        }
        if self.keeps_keys
            && self.argument == 1
            && length <= KEY_BYTES_MAX
            && matches!(self.command, Present::Times { has_one_key: true, .. })
        {
            self.key.extend_from_slice(part);
        }
        self.at += bytes as u64;
        let left = left - bytes as u64;
        self.state = State::Bulk { length, left };
        (bytes, if left == 0 { self.argument_done(length) } else { None })
    }

    /// All bytes of an argument are there.
    fn argument_done(&mut self, length: u64) -> Option<Found> {
        self.state = State::End { seen: 0 };
        let held = std::mem::take(&mut self.short);
        if self.keeps_this_word() {
            self.words.push(held.clone());
        }
        let found = self.looked_at((length <= SHORT_BYTES_MAX).then_some(&held[..]));
        self.short = held;
        found
    }

    /// Takes the present argument, if it is short.
    fn looked_at(&mut self, short: Option<&[u8]>) -> Option<Found> {
        match (self.argument, &mut self.command) {
            // A name that is longer than any of ours was known by its length.
            (0, _) => {
                self.named(short?);
                let is_open = matches!(self.command, Present::Container) && self.arguments > 1;
                (!is_open).then_some(Found::Verb(self.verb))
            }
            (1, Present::Container) => {
                let below = [b"cluster|", short.unwrap_or_default()].concat();
                if commands::find(&below).is_some_and(|known| known.effect == Effect::Data) {
                    (self.verb, self.command) = (Verb::Other, Present::Any);
                }
                Some(Found::Verb(self.verb))
            }
            (1, Present::Message) => {
                self.command = if short == Some(SENTINEL) { Present::Any } else { Present::Late(Late::Message) };
                None
            }
            (argument, Present::Times { times, .. }) => {
                if times.looks_at(argument) {
                    times.take(argument, short);
                }
                None
            }
            (argument, Present::Databases(names)) => {
                if let Some(database) = short.filter(|_| names.looks_at(argument)).and_then(|short| names.take(short)) {
                    self.databases = self.databases.max(database + 1);
                }
                None
            }
            _ => None,
        }
    }

    /// The name of the command is known.
    fn named(&mut self, name: &[u8]) {
        let is = |wanted: &str| name.eq_ignore_ascii_case(wanted.as_bytes());
        (self.verb, self.command) = match commands::find(name).map(|command| command.effect) {
            Some(Effect::Link) => (Verb::Link, Present::Any),
            Some(Effect::Publish) => (Verb::Publish, Present::Message),
            Some(Effect::Script) => (Verb::Other, Present::Late(Late::State)),
            Some(Effect::Expiry(form)) => {
                let has_one_key = form != Expiry::OptionsBehindPairs;
                (Verb::Other, Present::Times { times: Times::new(form), has_one_key })
            }
            Some(Effect::FieldExpiry(form)) => {
                (Verb::Other, Present::Times { times: Times::new(form), has_one_key: false })
            }
            Some(Effect::Frame) if is("SELECT") => (Verb::Select, Present::Any),
            Some(Effect::Frame) if is("MULTI") => (Verb::Multi, Present::Any),
            Some(Effect::Frame) => (Verb::Exec, Present::Any),
            Some(Effect::Data) => (Verb::Other, Names::of(name).map_or(Present::Any, Present::Databases)),
            Some(Effect::ScriptCache | Effect::Cluster) => (Verb::Other, Present::Any),
            None if is("CLUSTER") => (Verb::Cluster, Present::Container),
            None => (Verb::Other, Present::Any),
        };
    }

    /// Takes one of the two bytes after an argument.
    fn end(&mut self, seen: u8, byte: u8) -> Result<(usize, Option<Found>), WalkError> {
        if byte != b"\r\n"[usize::from(seen.min(1))] {
            return Err(self.error("the end of an argument", &[byte]));
        }
        self.at += 1;
        if seen == 0 {
            self.state = State::End { seen: 1 };
            return Ok((1, None));
        }
        if self.argument == 1 && self.verb == Verb::Select {
            let number = info::decimal_u64(&self.short).filter(|number| *number <= ARGUMENTS_MAX);
            self.databases = self.databases();
            self.database = number.ok_or_else(|| self.error("the number of a database", &self.short.clone()))?;
        }
        self.argument += 1;
        if self.argument < self.arguments {
            self.state = State::Length;
            return Ok((1, None));
        }
        self.state = State::Begin;
        match self.verb {
            Verb::Multi => self.in_transaction = true,
            Verb::Exec => self.in_transaction = false,
            _ => {}
        }
        if !self.in_transaction {
            self.border = self.at;
        }
        Ok((1, Some(Found::Command { verb: self.verb, bytes: self.begins..self.at })))
    }

    fn error(&self, what: &'static str, found: &[u8]) -> WalkError {
        WalkError { at: self.begins, what, found: info::excerpt(found) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::resp::command;

    fn file(name: &str, number: u64, kind: FileKind) -> NamedFile {
        NamedFile { name: name.to_owned(), number, kind }
    }

    #[test]
    fn what_servers_write_is_read() {
        let text =
            b"file appendonly.aof.2.base.rdb seq 2 type b\nfile appendonly.aof.1.incr.aof seq 1 type h\r\n# note\n\n\
            file \"my aof.5.incr.aof\" seq 5 type i startoffset 12\nfile a.6 seq 6 type i startoffset 3 endoffset 4\n";
        let wanted = Manifest {
            files: vec![
                file("appendonly.aof.2.base.rdb", 2, FileKind::Base),
                file("my aof.5.incr.aof", 5, FileKind::Incremental),
                file("a.6", 6, FileKind::Incremental),
            ],
        };
        assert_eq!(Manifest::parse(text), Ok(wanted.clone()));
        assert_eq!(Manifest::parse(wanted.to_string().as_bytes()), Ok(wanted));
        assert_eq!(Manifest::parse(b""), Ok(Manifest::default()));
    }

    #[test]
    fn what_no_server_loads_is_an_error_with_its_line() {
        for wrong in [
            "file ../dump.rdb seq 1 type b",
            "file .. seq 1 type b",
            "file a seq 0 type b",
            "file a seq x type i",
            "file a seq 1 type z",
            "file a seq 1",
            "seq 1 type i",
            "file \"a seq 1 type i",
            "file a seq 1 type i\nfile b seq 2 type b",
            "file a seq 2 type i\nfile b seq 2 type i",
            "\u{0}",
        ] {
            let error = Manifest::parse(format!("# first\n{wrong}\n").as_bytes()).unwrap_err();
            assert!(error.line >= 2, "{wrong}: {error}");
        }
        assert!(Manifest::parse(b"file \xFF seq 1 type b").is_err());
        let many: String = (1..=FILES_MAX + 1).map(|number| format!("file a seq {number} type i\n")).collect();
        assert!(Manifest::parse(many.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic_and_what_is_read_survives(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(manifest) = Manifest::parse(&bytes) {
                prop_assert_eq!(Manifest::parse(manifest.to_string().as_bytes()), Ok(manifest));
            }
        }
    }

    /// Everything that is found, whatever the pieces.
    fn walk(mut walker: Walker, bytes: &[u8], piece: usize) -> Result<(Vec<Found>, Walker), WalkError> {
        let mut all = Vec::new();
        for piece in bytes.chunks(piece) {
            let mut rest = piece;
            while !rest.is_empty() {
                let (taken, found) = walker.feed(rest)?;
                rest = &rest[taken..];
                all.extend(found);
            }
        }
        Ok((all, walker))
    }

    fn commands(all: &[&[&str]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        all.iter().for_each(|words| command(&mut bytes, words));
        bytes
    }

    fn verbs(found: &[Found]) -> Vec<Verb> {
        let verb = |found: &Found| match found {
            Found::Command { verb, .. } => Some(*verb),
            _ => None,
        };
        found.iter().filter_map(verb).collect()
    }

    #[test]
    fn commands_and_what_they_mean_are_found_however_they_arrive() {
        let bytes = commands(&[
            &["SELECT", "3"],
            &["ping"],
            &["SET", "a", ""],
            &["REPLCONF", "GETACK", "*"],
            &["SPUBLISH", "channel", "SELECT"],
            &["MULTI"],
            &["SELECT", "12"],
            &["", "an empty name"],
            &["a name that ends in PING"],
            &["EXEC"],
        ]);
        use Verb::{Exec, Link, Multi, Other, Publish, Select};
        for piece in 1..bytes.len() + 1 {
            let (found, walker) = walk(Walker::of_stream(100, 0), &bytes, piece).unwrap();
            assert_eq!(verbs(&found), [Select, Link, Other, Link, Publish, Multi, Select, Other, Other, Exec]);
            assert_eq!((walker.database(), walker.is_in_transaction(), walker.is_between()), (12, false, true));
            assert_eq!((walker.position(), walker.border()), (100 + bytes.len() as u64, 100 + bytes.len() as u64));
        }
        assert!([Select, Other, Multi, Exec].into_iter().all(Verb::has_effect));
        assert!(!Link.has_effect() && !Publish.has_effect());
    }

    #[test]
    fn the_border_is_before_a_transaction_that_has_not_ended_and_before_a_command_that_is_cut() {
        let first = commands(&[&["SET", "a", "b"]]);
        let open = commands(&[&["MULTI"], &["SET", "c", "d"]]);
        let bytes = [&first[..], b"#TS:7\r\n", &open, b"#TS:8\r\n"].concat();
        let (found, walker) = walk(Walker::of_file(), &bytes, 5).unwrap();
        assert_eq!(walker.border(), first.len() as u64 + 7);
        assert!(walker.is_in_transaction());
        assert_eq!(found[2], Found::Note(b"#TS:7".to_vec()));
        let (_, walker) = walk(Walker::of_file(), &[&first[..], b"*3\r\n$3\r\nSE"].concat(), 4).unwrap();
        assert_eq!((walker.border(), walker.is_between()), (first.len() as u64, false));
    }

    #[test]
    fn what_no_server_writes_is_an_error_with_its_place() {
        let good = commands(&[&["SET", "a", "b"]]);
        for wrong in [
            &b"+OK\r\n"[..],
            b"\n",
            b"*0\r\n",
            b"*-1\r\n",
            b"*1\n",
            b"*2147483648\r\n",
            b"*x\r\n",
            b"*1\r\n$-1\r\n",
            b"*1\r\n:1\r\n",
            b"*1\r\n$9223372036854775808\r\n",
            b"*1\r\n$1\r\nabc",
            b"*2\r\n$6\r\nSELECT\r\n$1\r\nx\r\n",
            b"*2\r\n$6\r\nSELECT\r\n$30\r\n000000000000000000000000000000\r\n",
        ] {
            let error = walk(Walker::of_file(), &[&good[..], wrong].concat(), 7).unwrap_err();
            assert_eq!(error.at, good.len() as u64, "{wrong:?}: {error}");
        }
        let endless = vec![b'1'; 2000];
        assert!(walk(Walker::of_file(), &[b"*", &endless[..]].concat(), 100).is_err());
        assert!(walk(Walker::of_file(), &[b"#", &endless[..]].concat(), 3000).is_err());
        assert!(walk(Walker::of_stream(0, 0), b"#TS:1\r\n", 100).is_err(), "a stream has no notes");
    }

    proptest! {
        #[test]
        fn any_commands_are_found_as_they_were_written(
            all in proptest::collection::vec(proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 1..5), 0..12),
            piece in 1_usize..90,
        ) {
            let (mut bytes, mut ends) = (Vec::new(), Vec::new());
            for words in all.iter().filter(|words| !words[0].eq_ignore_ascii_case(b"select")) {
                let begins = bytes.len() as u64;
                command(&mut bytes, words);
                ends.push(begins..bytes.len() as u64);
            }
            let (found, walker) = walk(Walker::of_file(), &bytes, piece).unwrap();
            let found = found.into_iter().filter_map(|found| match found {
                Found::Command { bytes, .. } => Some(bytes),
                _ => None,
            });
            prop_assert_eq!(found.collect::<Vec<_>>(), ends);
            prop_assert!(walker.is_between());
        }

        #[test]
        fn any_bytes_are_understood_the_same_however_they_are_cut(bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..20) {
            let bytes = [b"*1\r\n$4\r\nEXEC\r\n", &bytes[..]].concat();
            let end = |result: Result<(Vec<Found>, Walker), WalkError>| result.map(|(found, walker)| (found, walker.border()));
            let (one, other) = (end(walk(Walker::of_file(), &bytes, piece)), end(walk(Walker::of_file(), &bytes, bytes.len())));
            prop_assert_eq!(one.map_err(|error| error.at), other.map_err(|error| error.at));
        }
    }

    #[test]
    fn the_databases_that_commands_need_are_counted() {
        let needed = |commands: &[&[&str]]| {
            let mut bytes = Vec::new();
            commands.iter().for_each(|words| command(&mut bytes, words));
            let mut walker = Walker::of_stream(0, 0);
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (taken, _) = walker.feed(rest).unwrap();
                rest = &rest[taken..];
            }
            walker.databases()
        };
        assert_eq!(needed(&[]), 1);
        assert_eq!(needed(&[&["SELECT", "20"], &["SET", "a", "1"], &["SELECT", "3"]]), 21);
        assert_eq!(needed(&[&["SELECT", "3"], &["move", "30", "17"]]), 18);
        assert_eq!(needed(&[&["SWAPDB", "1", "18"], &["SWAPDB", "19", "2"]]), 20);
        assert_eq!(needed(&[&["COPY", "50", "60", "DB", "17", "REPLACE"]]), 18);
        assert_eq!(needed(&[&["COPY", "DB", "50", "REPLACE"], &["SET", "DB", "90"], &["HSET", "DB", "DB", "70"]]), 1);
    }
}
