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

mod file;

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::Path;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

pub(crate) use self::file::File;
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
}
