//! Options from a configuration file and from the environment.
//!
//! ```text
//!   words of the command line ──clap, leniently──▶ the command, and the options that are there
//!                                                        │  each other option of it:
//!                       REMORA_<OPTION> ──── else ──── the file (--config, REMORA_CONFIG)
//!                                                        ▼
//!                     the words and `--option=value` for each ──clap──▶ arguments
//! ```
//!
//! So each value is checked as if it stood on the command line, and there is no second list of options. The command
//! line wins over the environment, and the environment over the file.

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml_edit::{Document, Item, Table, Value};

use crate::args::{self, ConfigAction, ConfigArgs};
use crate::exit::{Code, Failure};
use crate::progress;

/// What the name of an environment variable begins with.
const PREFIX: &str = "REMORA_";

/// The option that names the file.
const CONFIG: &str = "config";

/// The words of a command line, with the options that the environment and the file add to it.
pub(crate) struct Words {
    /// For clap.
    pub(crate) words: Vec<OsString>,
    /// The added options, and where each comes from.
    added: Vec<(String, String)>,
    /// Variables of Kubernetes that have an option's name.
    pub(crate) foreign: Vec<String>,
}

impl Words {
    /// Completes the words of a command line, the program's name first.
    ///
    /// # Errors
    /// The file cannot be read, or has something that is not an option of the command.
    pub(crate) fn complete(
        definition: &Command,
        words: Vec<OsString>,
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Words, Failure> {
        // Mistakes are found when the completed words are parsed.
        let lenient = definition.clone().ignore_errors(true).try_get_matches_from(&words);
        let Ok(matches) = lenient else { return Ok(Words { words, added: Vec::new(), foreign: Vec::new() }) };
        let (path, command, matches) = chosen(definition, &matches);
        let named = matches.try_get_one::<std::path::PathBuf>(CONFIG).ok().flatten().cloned();
        let named = named.or_else(|| environment(&variable(CONFIG)).filter(|name| !name.is_empty()).map(Into::into));
        let file = named.map(|path| File::read(&path)).transpose()?;
        let given = match &file {
            Some(file) => file.options(definition, &path)?,
            None => Vec::new(),
        };
        let (mut added, mut foreign) = (Vec::new(), Vec::new());
        let mut more: Vec<OsString> = Vec::new();
        for option in options(definition, command) {
            let Some(name) = option.get_long() else { continue };
            let on_the_line = matches.try_contains_id(option.get_id().as_str()).is_ok()
                && matches.value_source(option.get_id().as_str()) == Some(ValueSource::CommandLine);
            if on_the_line || name == CONFIG {
                continue;
            }
            let variable = variable(name);
            let mut given_there = environment(&variable);
            if given_there.take_if(|value| is_of_kubernetes(&variable, value)).is_some() {
                foreign.push(variable.clone());
            }
            let (values, from) = match given_there {
                Some(value) => (of_environment(option, &variable, &value)?, variable),
                None => match given.iter().find(|given| given.name == name) {
                    Some(given) => (given.words(option)?, given.place.clone()),
                    None => continue,
                },
            };
            if !values.is_empty() {
                added.push((name.to_owned(), from));
                more.extend(values);
            }
        }
        let mut words = words;
        let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
        words.splice(end..end, more);
        Ok(Words { words, added, foreign })
    }

    /// Where the options come from that this text of an error names; empty if all stand on the command line.
    pub(crate) fn origins(&self, text: &str) -> String {
        let named = |name: &str| {
            let option = format!("--{name}");
            text.match_indices(&option).any(|(at, _)| {
                let next = text[at + option.len()..].chars().next();
                next.is_none_or(|next| next != '-' && !next.is_alphanumeric())
            })
        };
        let named = self.added.iter().filter(|(name, _)| named(name));
        let lines: Vec<String> = named.map(|(name, from)| format!("--{name} comes from {from}")).collect();
        lines.join("; ")
    }
}

/// The command that the words choose: its names, itself, and what was found for it.
fn chosen<'a>(definition: &'a Command, matches: &'a ArgMatches) -> (Vec<String>, &'a Command, &'a ArgMatches) {
    let (mut path, mut command, mut matches) = (Vec::new(), definition, matches);
    while let Some((name, inner)) = matches.subcommand() {
        let Some(next) = command.find_subcommand(name) else { break };
        path.push(next.get_name().to_owned());
        (command, matches) = (next, inner);
    }
    (path, command, matches)
}

/// The options of a command, with those of every command.
fn options<'a>(definition: &'a Command, command: &'a Command) -> impl Iterator<Item = &'a Arg> {
    let global = definition.get_arguments().filter(|option| option.is_global_set());
    let is_root = std::ptr::eq(definition, command);
    let own = command.get_arguments().filter(move |option| !is_root || !option.is_global_set());
    own.filter(|option| !is_help(option)).chain(global)
}

fn is_help(option: &Arg) -> bool {
    use ArgAction::{Help, HelpLong, HelpShort, Version};
    matches!(option.get_action(), Help | HelpShort | HelpLong | Version)
}

/// The environment variable of an option.
fn variable(name: &str) -> String {
    format!("{PREFIX}{}", name.replace('-', "_").to_uppercase())
}

/// Whether this is a variable that Kubernetes sets in every container for a Service of the namespace: one that is
/// called `remora-source` has `REMORA_SOURCE_PORT=tcp://10.0.0.1:7379`. No option has such a value.
fn is_of_kubernetes(variable: &str, value: &OsStr) -> bool {
    let Some((protocol, address)) = value.to_str().and_then(|value| value.split_once("://")) else { return false };
    let is_named = variable.ends_with("_PORT") || variable.contains("_PORT_");
    is_named && ["tcp", "udp", "sctp"].contains(&protocol) && address.parse::<SocketAddr>().is_ok()
}

/// The words for an option with this value of an environment variable.
fn of_environment(option: &Arg, variable: &str, value: &OsStr) -> Result<Vec<OsString>, Failure> {
    if !matches!(option.get_action(), ArgAction::SetTrue) {
        return Ok(vec![word(option, value)]);
    }
    match value.to_str() {
        Some("1" | "true" | "yes" | "on") => Ok(vec![flag(option)]),
        Some("" | "0" | "false" | "no" | "off") => Ok(Vec::new()),
        _ => {
            let text = format!("{variable} is {}: give 1 or 0 (true, yes, on; false, no, off)", value.display());
            Err(Failure::new(Code::Usage, text))
        }
    }
}

fn flag(option: &Arg) -> OsString {
    format!("--{}", option.get_long().unwrap_or_default()).into()
}

fn word(option: &Arg, value: &OsStr) -> OsString {
    let mut word = flag(option);
    word.push("=");
    word.push(value);
    word
}

/// The names of a file, for messages.
fn shown(path: &Path) -> String {
    path.display().to_string()
}

// `remora config check`: whether a file's options are ones that the commands take.

/// Runs `remora config`.
///
/// # Errors
/// The file cannot be read, or a command refuses what it says.
pub fn run(args: &ConfigArgs) -> Result<(), Failure> {
    match &args.action {
        ConfigAction::Check { file } => check(file),
        ConfigAction::Rare { of } => explain_rare(of),
    }
}

/// Prints the options of a command that are for rare days.
fn explain_rare(of: &str) -> Result<(), Failure> {
    let definition = args::definition();
    let command = definition
        .find_subcommand(of)
        .ok_or_else(|| Failure::new(Code::Usage, format!("there is no command {of}: `remora --help` lists them")))?;
    match args::rare_of(command) {
        Some(mut rare) => progress::print_line(rare.render_long_help().to_string().trim_end()),
        None => progress::print_line(&format!("remora {of} --help has all options of this command")),
    }
}

fn check(file: &Path) -> Result<(), Failure> {
    let definition = args::definition();
    let read = File::read(file)?;
    // A table that is no command has its line.
    read.options(&definition, &[])?;
    let commands = read.commands(&definition);
    if commands.is_empty() {
        let text = format!("{} has options of no command: give them in tables such as [source]", file.display());
        return Err(Failure::new(Code::Usage, text));
    }
    let mut wrong = 0;
    for path in &commands {
        let name = path.join(" ");
        let mut words: Vec<OsString> = vec![definition.get_name().into()];
        words.extend(path.iter().map(OsString::from));
        words.extend(["--config".into(), file.into()]);
        // The environment of this shell is not that of the service.
        let words = Words::complete(&definition, words, |_| None)?;
        let count = match words.added.len() {
            1 => "1 option".to_owned(),
            count => format!("{count} options"),
        };
        match definition.clone().try_get_matches_from(&words.words) {
            Ok(_) => progress::print_line(&format!("remora {name}: {count}, complete"))?,
            // The rest may stand on the command line of the service.
            Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => {
                progress::print_line(&format!(
                    "remora {name}: {count}; the command line or the environment must add more:\n{}",
                    indented(&error.to_string())
                ))?;
            }
            Err(error) => {
                wrong += 1;
                let text = crate::args::in_our_words(&error.to_string());
                progress::say(&format!("remora {name}: {}", text.lines().next().unwrap_or_default()));
                progress::say(&format!("  {}", words.origins(&text)));
            }
        }
    }
    match wrong {
        0 => Ok(()),
        _ => Err(Failure::new(Code::Usage, format!("{} is not valid", file.display()))),
    }
}

/// The lines of an error that name what is missing.
fn indented(text: &str) -> String {
    let lines = text.lines().skip(1).take_while(|line| !line.is_empty());
    lines.map(|line| format!("  {}", line.trim())).collect::<Vec<_>>().join("\n")
}

// A configuration file: TOML, with a table for each command and the long names of its options as keys.

/// Bytes of a file at most. One with every option of every command has some ten thousand.
const FILE_LIMIT: u64 = 1 << 20;

/// A file that is TOML.
pub(crate) struct File {
    path: PathBuf,
    document: Document<String>,
}

/// An option in a file.
pub(crate) struct Given {
    pub(crate) name: String,
    /// The file and the line.
    pub(crate) place: String,
    value: Value,
}

impl File {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or is not TOML.
    pub(crate) fn read(path: &Path) -> Result<File, Failure> {
        let refused = |text: String| Failure::new(Code::Usage, text);
        let unreadable = |cause| refused(format!("the configuration file {} cannot be read: {cause}", shown(path)));
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(unreadable)?;
        std::io::Read::read_to_string(&mut std::io::Read::take(file, FILE_LIMIT + 1), &mut text).map_err(unreadable)?;
        if text.len() as u64 > FILE_LIMIT {
            return Err(refused(format!("the configuration file {} has more than {FILE_LIMIT} bytes", shown(path))));
        }
        let document = Document::parse(text.clone()).map_err(|error| {
            let at = line(&text, error.span().map_or(0, |span| span.start));
            refused(format!("{}:{at}: this is not TOML: {}", shown(path), error.message()))
        })?;
        Ok(File { path: path.to_owned(), document })
    }

    /// The options for the command of that path, and for every command.
    ///
    /// # Errors
    /// A key is not one of its options.
    fn options(&self, definition: &Command, path: &[String]) -> Result<Vec<Given>, Failure> {
        let mut all = self.of_table(self.document.as_table(), definition, definition, true)?;
        let (mut table, mut command) = (self.document.as_table(), definition);
        for name in path {
            let Some(next) = command.find_subcommand(name) else { return Ok(all) };
            let Some(item) = table.get(name) else { return Ok(all) };
            table = item.as_table().ok_or_else(|| self.not_a_table(table, name))?;
            command = next;
            if command.has_subcommands() {
                self.of_table(table, definition, command, true)?;
            }
        }
        if !path.is_empty() && !command.has_subcommands() {
            // Those of the command itself come first: it may have an option of every command, too.
            let mut own = self.of_table(table, definition, command, false)?;
            own.append(&mut all);
            all = own;
        }
        Ok(all)
    }

    /// The commands that have a table, each as its path.
    fn commands(&self, definition: &Command) -> Vec<Vec<String>> {
        let mut found = Vec::new();
        walk(self.document.as_table(), definition, &mut Vec::new(), &mut found);
        found
    }

    /// The options in one table. `has_commands`: tables of commands stand beside them.
    fn of_table(
        &self,
        table: &Table,
        definition: &Command,
        command: &Command,
        has_commands: bool,
    ) -> Result<Vec<Given>, Failure> {
        let mut all = Vec::new();
        for (name, item) in table {
            if has_commands && item.is_table() && command.find_subcommand(name).is_some() {
                continue;
            }
            let place = self.place(table, name);
            let known = |option: &&Arg| option.get_long() == Some(name) && !is_help(option);
            if options(definition, command).find(known).is_none() {
                return Err(unknown(&place, name, definition, command, has_commands));
            }
            let Some(value) = item.as_value() else {
                let text = format!("{place}: {name} is a table; an option has a value or a list of values");
                return Err(Failure::new(Code::Usage, text));
            };
            all.push(Given { name: name.to_owned(), place, value: value.clone() });
        }
        Ok(all)
    }

    fn not_a_table(&self, table: &Table, name: &str) -> Failure {
        let text = format!("{}: {name} is a command: give its options in a table, [{name}]", self.place(table, name));
        Failure::new(Code::Usage, text)
    }

    /// Where a key stands.
    fn place(&self, table: &Table, name: &str) -> String {
        let at = table.key(name).and_then(toml_edit::Key::span).map_or(0, |span| span.start);
        format!("{}:{}", shown(&self.path), line(self.document.raw(), at))
    }
}

impl Given {
    /// The words for the option.
    ///
    /// # Errors
    /// The value has a wrong type.
    fn words(&self, option: &Arg) -> Result<Vec<OsString>, Failure> {
        let wrong = |wanted: &str| Failure::new(Code::Usage, format!("{}: {} takes {wanted}", self.place, self.name));
        if matches!(option.get_action(), ArgAction::SetTrue) {
            return match self.value.as_bool() {
                Some(true) => Ok(vec![flag(option)]),
                Some(false) => Ok(Vec::new()),
                None => Err(wrong("true or false")),
            };
        }
        let may_be_empty = option.get_num_args().is_some_and(|values| values.min_values() == 0);
        if let (Some(is_given), true) = (self.value.as_bool(), may_be_empty) {
            return Ok(if is_given { vec![flag(option)] } else { Vec::new() });
        }
        let scalar = |value: &Value| match value {
            Value::String(text) => Some(OsString::from(text.value())),
            Value::Integer(number) => Some(number.value().to_string().into()),
            Value::Float(number) => Some(number.value().to_string().into()),
            _ => None,
        };
        let Value::Array(list) = &self.value else {
            let value = scalar(&self.value).ok_or_else(|| wrong("a text or a number"))?;
            return Ok(vec![word(option, &value)]);
        };
        let values: Option<Vec<OsString>> = list.iter().map(scalar).collect();
        let values = values.ok_or_else(|| wrong("texts or numbers"))?;
        match (option.get_action(), option.get_value_delimiter()) {
            (ArgAction::Append, _) => Ok(values.iter().map(|value| word(option, value)).collect()),
            (_, Some(delimiter)) => {
                let joined = values.join(OsString::from(delimiter.to_string()).as_os_str());
                Ok(vec![word(option, &joined)])
            }
            _ => Err(wrong("one value, not a list")),
        }
    }
}

fn walk(table: &Table, command: &Command, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    for (name, item) in table {
        let (Item::Table(table), Some(next)) = (item, command.find_subcommand(name)) else { continue };
        path.push(next.get_name().to_owned());
        if next.has_subcommands() {
            walk(table, next, path, found);
        } else {
            found.push(path.clone());
        }
        path.pop();
    }
}

/// The error for a key that is not an option, with the one that is most like it.
fn unknown(place: &str, name: &str, definition: &Command, command: &Command, has_commands: bool) -> Failure {
    let commands = command.get_subcommands().map(Command::get_name).filter(|_| has_commands);
    let known = options(definition, command).filter_map(Arg::get_long).chain(commands);
    let nearest = known.map(|known| (distance(name, known), known)).min();
    let hint = match nearest {
        Some((distance, known)) if distance <= LIKE => format!("; did you mean {known}?"),
        _ => String::new(),
    };
    let is_what = match command.get_name() {
        "remora" => "is neither a command nor an option of every command".to_owned(),
        of => format!("is not an option of remora {of}"),
    };
    Failure::new(Code::Usage, format!("{place}: {name} {is_what}{hint}"))
}

/// Letters in which two names may differ for one to be meant for the other.
const LIKE: usize = 2;

/// How many letters must be added, removed or exchanged to make one word of the other (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let (mut diagonal, mut left) = (i, i + 1);
        row[0] = left;
        for (j, b) in other.iter().enumerate() {
            let changed = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            left = changed.min(diagonal + 1).min(left + 1);
            row[j + 1] = left;
        }
    }
    row[other.len()]
}

/// The line of a byte, from 1.
fn line(text: &str, at: usize) -> usize {
    1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::HashMap;

    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command as Chosen, definition};

    fn completed(file: &str, variables: &[(&str, &str)], line: &str) -> Result<Words, Failure> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("remora.toml");
        std::fs::write(&path, file).unwrap();
        let mut words: Vec<OsString> = line.split_whitespace().map(Into::into).collect();
        words.push("--config".into());
        words.push(path.into());
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        Words::complete(&definition(), words, |name| variables.get(name).map(Into::into))
    }

    fn parsed(file: &str, variables: &[(&str, &str)], line: &str) -> Cli {
        Cli::try_parse_from(completed(file, variables, line).unwrap().words).unwrap()
    }

    const FILE: &str = "
        log-level = 'debug'

        [source]
        server = 'redis://10.0.0.1:6379'
        token-file = ['one', 'two']
        max-replicas = 7
        eager = true
        no-shm = false
        load-module = true

        [volume.serve]
        memory = '1GiB'
    ";

    #[test]
    fn options_come_from_the_file_the_environment_and_the_line_in_rising_order() {
        let Chosen::Source(source) = parsed(FILE, &[], "remora source").command else { panic!("another command") };
        assert_eq!(source.captured.server.unwrap().to_string(), "redis://10.0.0.1:6379");
        assert_eq!(source.tokens.token_files, ["one", "two"].map(std::path::PathBuf::from));
        assert_eq!((source.max_replicas, source.eager, source.no_shm), (7, true, false));
        assert_eq!(source.load_module, Some("".into()));

        let variables =
            [("REMORA_MAX_REPLICAS", "8"), ("REMORA_EAGER", "no"), ("REMORA_NO_SHM", "1"), ("REMORA_ELSE", "x")];
        let Chosen::Source(source) = parsed(FILE, &variables, "remora source --max-replicas 9").command else {
            panic!("another command")
        };
        assert_eq!((source.max_replicas, source.eager, source.no_shm), (9, false, true));
    }

    #[test]
    fn options_of_every_command_stand_at_the_top() {
        let level = |line| parsed(FILE, &[], line).global.log_level.name();
        assert_eq!(level("remora source"), "debug");
        assert_eq!(level("remora --log-level warn source"), "warn");
        assert_eq!(level("remora source --log-level error"), "error");
    }

    #[test]
    fn what_is_no_option_is_refused_with_its_place() {
        let refused =
            |file: &str| completed(file, &[], "remora source").err().map(|failure| failure.to_string()).unwrap();
        let said = refused("[source]\nserver = 'redis://h:1'\nlisten-on = 'h:1'\n");
        assert!(said.contains("remora.toml:3: ") && said.contains("listen-on"), "{said}");
        let said = refused("[source]\nlistn = 'h:1'\n");
        assert!(said.contains("did you mean listen"), "{said}");
        let said = refused("[source]\neager = 'very'\n");
        assert!(said.contains(":2: ") && said.contains("true or false"), "{said}");
        let said = refused("[source]\nlisten = ['a', 'b']\n");
        assert!(said.contains(":2: ") && said.contains("one value"), "{said}");
        let said = refused("[source]\nlisten = {a = 1}\n");
        assert!(said.contains(":2: "), "{said}");
        let said = refused("[source\n");
        assert!(said.contains(":1: "), "{said}");
        let said = refused("quick = true\n");
        assert!(said.contains(":1: ") && said.contains("quick"), "{said}");
    }

    #[test]
    fn a_value_that_the_command_refuses_is_traced_to_its_place() {
        let words =
            completed("[source]\nserver = 'redis://h:1'\ntoken-file = 't'\nmax-replicas = 0\n", &[], "remora source");
        let words = words.unwrap();
        let error = Cli::try_parse_from(&words.words).unwrap_err().to_string();
        let origins = words.origins(&error);
        assert!(origins.starts_with("--max-replicas comes from ") && origins.ends_with("remora.toml:4"), "{origins}");
    }

    #[test]
    fn words_behind_two_dashes_stay_the_last_ones() {
        let words = completed("[source]\neager = true\n", &[], "remora source -- --config x").unwrap().words;
        let at = |word: &str| words.iter().position(|other| other == word);
        // The file is named behind the dashes there, so it is a plain word.
        assert_eq!(at("--eager"), None);
    }

    #[test]
    fn a_file_that_is_missing_is_named() {
        let words = vec!["remora".into(), "source".into(), "--config".into(), "/nowhere/remora.toml".into()];
        let failure = Words::complete(&definition(), words, |_| None).err().unwrap();
        assert!(failure.to_string().contains("/nowhere/remora.toml"), "{failure}");
    }

    #[test]
    fn variables_of_kubernetes_are_no_options_and_wrong_values_are_still_refused() {
        // What a container gets for Services that are called remora-source, remora-primary and remora.
        let variables = [
            ("REMORA_SOURCE_SERVICE_HOST", "10.0.0.1"),
            ("REMORA_SOURCE_SERVICE_PORT", "7379"),
            ("REMORA_SOURCE_PORT", "tcp://10.0.0.1:7379"),
            ("REMORA_SOURCE_PORT_7379_TCP", "tcp://10.0.0.1:7379"),
            ("REMORA_SOURCE_PORT_7379_TCP_PROTO", "tcp"),
            ("REMORA_PRIMARY_PORT", "tcp://[fd00::1]:6379"),
            ("REMORA_PORT", "udp://10.0.0.1:7379"),
            ("REMORA_LISTEN_PORT", "tcp://10.0.0.1:7379"),
        ];
        fn check(command: &Command, path: &str, variables: &[(&str, &str)]) {
            let words = completed("", variables, path).unwrap();
            assert_eq!(words.words.len(), path.split_whitespace().count() + 2, "{:?}", words.words);
            for name in &words.foreign {
                assert!(name.ends_with("_PORT"), "{name}");
            }
            command.get_subcommands().for_each(|next| {
                check(next, &format!("{path} {}", next.get_name()), variables);
            });
        }
        check(&definition(), "remora", &variables);
        let foreign = completed("", &variables, "remora attend").unwrap().foreign;
        assert_eq!(foreign, ["REMORA_LISTEN_PORT", "REMORA_PRIMARY_PORT"]);
        for wrong in ["tcp://10.0.0.1", "tcp:7379", "many", "http://10.0.0.1:7379", "70000"] {
            let words = completed("", &[("REMORA_PRIMARY_PORT", wrong)], "remora attend").unwrap();
            assert_eq!(words.origins("--primary-port"), "--primary-port comes from REMORA_PRIMARY_PORT", "{wrong}");
        }
        // The file counts instead.
        let words = completed("[attend]\nprimary-port = 7000\n", &variables, "remora attend").unwrap();
        assert!(words.words.contains(&"--primary-port=7000".into()), "{:?}", words.words);
    }

    #[test]
    fn no_two_options_of_a_command_have_one_variable() {
        fn check(definition: &Command, command: &Command) {
            let mut names: Vec<String> = options(definition, command).filter_map(Arg::get_long).map(variable).collect();
            let all = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), all, "{}", command.get_name());
            command.get_subcommands().for_each(|command| check(definition, command));
        }
        let definition = definition();
        check(&definition, &definition);
    }

    #[test]
    fn words_are_near_or_far() {
        assert_eq!((distance("listen", "listen"), distance("listn", "listen"), distance("", "ab")), (0, 1, 2));
        assert_eq!((distance("memroy", "memory"), distance("kitten", "sitting")), (2, 3));
    }

    #[test]
    fn lines_are_counted_from_one() {
        assert_eq!((line("a\nb\n", 0), line("a\nb\n", 2), line("a\nb\n", 9)), (1, 2, 3));
    }
}
