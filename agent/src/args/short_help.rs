//! The short help, `-h`: what most runs need, a line or two for each option, on one screen. `--help` explains all.

use clap::{Arg, Command};

/// The options that `-h` shows of a command that has many. The others are for rare days.
const EVERYDAY: &[(&str, &[&str])] = &[
    (
        "source",
        &[
            "server",
            "sentinel",
            "sentinel-name",
            "password-file",
            "listen",
            "token-file",
            "memory",
            "tune-server",
            "announce",
            "state-dir",
            "upload-limit",
            "security",
            "metrics",
        ],
    ),
    (
        "replica",
        &[
            "server",
            "password-file",
            "source",
            "token-file",
            "transport",
            "retry-for",
            "dry-run",
            "replace",
            "stay",
            "delivery",
            "memory",
            "state-dir",
            "security",
            "explain",
        ],
    ),
    (
        "attend",
        &[
            "server",
            "password-file",
            "source",
            "sources",
            "token-file",
            "primary-port",
            "sentinel",
            "sentinel-name",
            "retry-for",
            "memory",
            "security",
            "metrics",
        ],
    ),
    (
        "fetch",
        &["source", "token-file", "to", "replace", "owner", "transport", "retry-for", "write-replicaof", "security"],
    ),
    ("backup", &["source", "token-file", "to", "keep", "encrypt-to", "journal", "retry-for", "security", "metrics"]),
    ("verify", &["primary", "primary-password-file", "replica", "replica-password-file", "tls-ca", "digest", "json"]),
    (
        "migrate",
        &[
            "from",
            "from-password-file",
            "to",
            "to-password-file",
            "dry-run",
            "replace",
            "leave-out",
            "source",
            "tls-ca",
        ],
    ),
    (
        "switch",
        &["from", "from-password-file", "to", "to-password-file", "dry-run", "max-pause", "hook", "close-clients"],
    ),
    ("load", &["server", "password-file", "keys", "value-size", "type", "expire", "db"]),
    ("probe", &["source", "token-file", "transport", "sizes", "depths", "time", "security", "json"]),
    ("plan", &["server", "password-file", "replicas", "rate", "security", "json"]),
];

/// Options of every command that `-h` leaves out. They are in each `--help`.
const OF_EVERY_COMMAND: &[&str] = &["log-level", "log-json", "config", "quiet"];

/// Shortens `-h` of each command: the options of every day, and of each the first sentence.
pub(super) fn shorten(mut definition: Command) -> Command {
    let names: Vec<String> = definition.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    for name in names {
        let shown = EVERYDAY.iter().find(|(command, _)| *command == name).map(|(_, options)| *options);
        definition = definition.mut_subcommand(name, |command| shorten_one(command, shown));
    }
    definition.mut_args(|option| hidden(option, None))
}

fn shorten_one(command: Command, shown: Option<&'static [&'static str]>) -> Command {
    let more = command.get_arguments().filter(|option| !is_shown(option, shown)).count();
    let command = command.mut_args(|option| in_short(hidden(option, shown)));
    match more {
        0 => command,
        _ => command.after_help(format!("{more} more options, examples and exit codes: --help")),
    }
}

fn hidden(option: Arg, shown: Option<&[&str]>) -> Arg {
    let is_hidden = !is_shown(&option, shown);
    option.hide_short_help(is_hidden)
}

fn is_shown(option: &Arg, shown: Option<&[&str]>) -> bool {
    let Some(name) = option.get_long() else { return true };
    match shown {
        Some(shown) => shown.contains(&name),
        None => !OF_EVERY_COMMAND.contains(&name),
    }
}

/// The first sentence in `-h`, and all of the text in `--help`.
fn in_short(option: Arg) -> Arg {
    let Some(whole) = option.get_help().map(ToString::to_string) else { return option };
    let Some((first, _)) = whole.split_once(". ") else { return option };
    let short = first.to_owned();
    match option.get_long_help() {
        Some(_) => option.help(short),
        None => option.help(short).long_help(whole),
    }
}

#[cfg(test)]
mod tests {
    use super::super::definition;
    use super::*;

    /// Lines of a terminal that is not small.
    const SCREEN: usize = 48;

    #[test]
    fn the_short_help_of_each_command_fits_a_screen() {
        for command in definition().get_subcommands_mut() {
            let page = command.render_help().to_string();
            let lines = page.lines().count();
            assert!(lines <= SCREEN, "{} lines: {page}", lines);
        }
    }

    #[test]
    fn what_the_short_help_shows_exists_and_includes_what_is_required() {
        let definition = definition();
        for (name, shown) in EVERYDAY {
            let Some(command) = definition.find_subcommand(name) else { panic!("no command {name}") };
            let has = |option: &str| command.get_arguments().any(|argument| argument.get_long() == Some(option));
            shown.iter().for_each(|option| assert!(has(option), "{name} has no --{option}"));
            let required = command.get_arguments().filter(|argument| argument.is_required_set());
            required.for_each(|argument| assert!(is_shown(argument, Some(shown)), "{name}: {argument}"));
        }
    }

    #[test]
    fn the_long_help_has_all_options_and_the_whole_text() {
        let mut definition = definition();
        let Some(replica) = definition.find_subcommand_mut("replica") else { panic!("no command replica") };
        let (short, long) = (replica.render_help().to_string(), replica.render_long_help().to_string());
        for option in ["--rdma-queue-depth", "--tls-pin", "--linger"] {
            assert!(!short.contains(option) && long.contains(option), "{option}");
        }
        assert!(short.contains("--source <HOST:PORT>") && short.contains("more options"), "{short}");
    }
}
