//! The help of a command, in three parts.
//!
//! - `-h` has what most runs need, a line or two for each option, on one screen.
//! - `--help` has what an operator may have to decide, with all of its text.
//! - `remora config rare COMMAND` has what is for rare days. Its place is the configuration file, with a comment that
//!   says why; docs/reference/configuration.md has the table. Man pages and completions have all options.

use crate::units::counted;
use clap::{Arg, ArgAction, Command};

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
    ("plan", &["server", "data", "password-file", "replicas", "rate", "security", "json"]),
];

/// Options for rare days, with the day. They are rare for each command that has them.
pub(crate) const RARE: &[(&str, &[&str])] = &[
    ("a single TCP connection does not fill the link", &["lanes"]),
    (
        "an RDMA network has several ports, lossless classes, or spreads its load by flow",
        &["rdma-port", "rdma-traffic-class", "rdma-service-level", "rdma-queue-pairs"],
    ),
    (
        "a card is tuned, by the figures of `remora probe`",
        &["rdma-queue-depth", "rdma-reads", "rdma-piece", "rdma-completion"],
    ),
    ("a host has several RDMA devices, and the agent does not choose the right one", &["rdma-device", "rdma-address"]),
    ("a transport that works must not be used", &["no-shm", "no-rdma"]),
    (
        "one authority has signed certificates for others than these agents",
        &["peer-name", "source-name", "lender-name", "replica-name", "monitor-name", "probe-name"],
    ),
    ("no authority has signed a server's certificate, or it is for another name", &["tls-pin", "tls-server-name"]),
    ("one who holds the token must not be able to pose as the source", &["identity", "source-key", "expect-primary"]),
    (
        "the Sentinels have a login or TLS of their own",
        &[
            "sentinel-user",
            "sentinel-password-file",
            "sentinel-tls-ca",
            "sentinel-tls-cert",
            "sentinel-tls-key",
            "sentinel-tls-server-name",
            "sentinel-tls-pin",
        ],
    ),
    ("a sync takes longer than Sentinel waits, and no agent attends the server", &["extend-failover-timeout"]),
    (
        "a failed sync must leave its server in another state, or the server's configuration file must name its new primary",
        &["on-failure", "rewrite-config"],
    ),
    ("a server needs very long for a restart on its file", &["restart-limit"]),
    ("port 7380 is taken", &["listen-port"]),
    ("a firewall lets replicas reach each other at one port only", &["peer-listen"]),
    ("replicas stand in several racks or regions", &["zone"]),
    ("the status must show a replica under another name than its address", &["name"]),
    (
        "a link is shared with others, and the automatic limit does not suffice",
        &["upload-limit-per-peer", "download-limit"],
    ),
    ("the agents must choose otherwise which replica reads from which", &["serve-peers", "no-serve-peers", "linger"]),
    (
        "the server asks clients of the link for certificates, or reaches the agent at another address only",
        &["link-client-ca"],
    ),
    ("a second source must go on when the first dies", &["standby-of", "fork-after"]),
    (
        "a backup can spare the primary a fork",
        &[
            "base",
            "base-identity",
            "base-spool",
            "base-s3-endpoint",
            "base-s3-region",
            "base-s3-credentials-file",
            "base-s3-allow-http",
        ],
    ),
    ("someone looks for a fault of the module or of fast keys", &["module-load", "module-walk-from", "fast-keys"]),
    ("the server's user cannot reach the usual folder", &["module-socket-folder"]),
    ("the source's memory must be divided differently", &["journal-memory", "slot-size"]),
    (
        "replicas fail in a loop or read too slowly, and the default limits do not fit",
        &["fork-interval", "stall-timeout"],
    ),
    ("subscribers may get messages twice", &["repeat-messages"]),
    ("the system's congestion control of TCP does not suit the link", &["tcp-congestion"]),
    ("very many, or very few, commands are written", &["file-size"]),
];

/// Options that a command needs unless another one takes their place. clap leaves them out of the usage line.
const NEEDED_UNLESS: &[(&str, &[&str])] = &[
    ("source", &["server", "token-file"]),
    ("replica", &["token-file"]),
    ("attend", &["token-file"]),
    ("fetch", &["token-file"]),
    ("backup", &["token-file"]),
    ("status", &["token-file"]),
    ("probe", &["token-file"]),
];

/// Options that `-h` leaves out of a command below another one, besides those for rare days.
const SELDOM: &[&str] =
    &["user", "tls-cert", "tls-key", "plaintext-network", "cert", "key", "ca", "source-name", "no-ring"];

/// Options of every command that `-h` leaves out. They are in each `--help`.
const OF_EVERY_COMMAND: &[&str] = &["log-level", "log-json", "config", "quiet"];

/// The day on which this option is needed, and its name, if that is a rare day.
fn rare_day(option: &Arg) -> Option<(&'static str, &'static str)> {
    let name = option.get_long().filter(|_| !option.is_required_set())?;
    RARE.iter().find_map(|(day, options)| Some((*day, *options.iter().find(|option| **option == name)?)))
}

/// The options of a command that are for rare days, each with all of its text and the day; `None` if it has none.
pub(crate) fn rare_of(command: &Command) -> Option<Command> {
    let rare: Vec<Arg> = command
        .get_arguments()
        .filter_map(|option| {
            let (day, name) = rare_day(option)?;
            let whole = option.get_long_help().or(option.get_help())?.to_string();
            let defaults: Vec<_> = option.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
            let default =
                if defaults.is_empty() { String::new() } else { format!(" [default: {}]", defaults.join(" ")) };
            let text = format!("{}.{default}\n\nFor a day on which {day}.", whole.trim_end_matches('.'));
            // What it needs or excludes stands with the command.
            let mut shown = Arg::new(name).long(name).long_help(text);
            if let Some(values) = option.get_value_names().filter(|_| option.get_action().takes_values()) {
                shown = shown.value_names(values.to_vec());
            } else {
                shown = shown.action(ArgAction::SetTrue);
            }
            Some(shown)
        })
        .collect();
    (!rare.is_empty()).then(|| Command::new("rare").disable_help_flag(true).help_template("{options}").args(rare))
}

/// Divides the help of each command: `-h` has the options of every day, and of each the first sentence; `--help` has
/// all but those for rare days.
pub(super) fn in_three_parts(mut definition: Command) -> Command {
    let names: Vec<String> = definition.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    for name in names {
        let shown = EVERYDAY.iter().find(|(command, _)| *command == name).map(|(_, options)| *options);
        definition =
            definition.mut_subcommand(name, |command| shorten_one(command, shown).mut_subcommands(shorten_one_below));
    }
    definition.mut_args(|option| hidden(option, None))
}

/// A command below another one, whose `--help` has all of its options.
fn shorten_one_below(command: Command) -> Command {
    let is_more = |option: &Arg| {
        let seldom = option.get_long().filter(|_| !option.is_required_set()).is_some_and(|name| SELDOM.contains(&name));
        seldom || rare_day(option).is_some()
    };
    let more = command.get_arguments().filter(|option| is_more(option)).count();
    let command = command.mut_args(|option| {
        let is_more = is_more(&option);
        in_short(option).hide_short_help(is_more)
    });
    with_more(with_help(command), more).mut_subcommands(shorten_one_below)
}

/// Whoever reads the page of `-h` knows `-h`: only the page of `--help` has it.
fn with_help(command: Command) -> Command {
    let help = Arg::new("help").short('h').long("help").action(ArgAction::Help).hide_short_help(true);
    command.disable_help_flag(true).arg(help.help("Print help: with -h what most runs need, with --help all of it"))
}

/// Says where the rest is.
fn with_more(command: Command, more: usize) -> Command {
    match more {
        0 => command.after_help("Examples and exit codes: --help"),
        1 => command.after_help("1 more option, examples and exit codes: --help"),
        _ => command.after_help(format!("{more} more options, examples and exit codes: --help")),
    }
}

fn shorten_one(command: Command, shown: Option<&'static [&'static str]>) -> Command {
    let rare = command.get_arguments().filter(|option| rare_day(option).is_some()).count();
    let is_more = |option: &&Arg| !is_shown(option, shown) && rare_day(option).is_none();
    let more = command.get_arguments().filter(is_more).count();
    let command = match NEEDED_UNLESS.iter().find(|(name, _)| *name == command.get_name()) {
        Some((name, needed)) => {
            let usage = usage(&command, needed);
            command.override_usage(format!("remora {name} [OPTIONS]{usage}"))
        }
        None => command,
    };
    let command = command.mut_args(|option| in_short(hidden(option, shown)));
    let of_rare_days = format!("{} for rare days: remora config rare {}", counted(rare, "option"), command.get_name());
    let long = command.get_after_long_help().map(ToString::to_string);
    let command = match (rare, long) {
        (0, _) => command,
        (_, Some(long)) => command.after_long_help(format!("{of_rare_days}\n\n{long}")),
        (_, None) => command.after_long_help(of_rare_days),
    };
    with_more(with_help(command), more)
}

/// The options without which the command does not run, as its usage line has them.
fn usage(command: &Command, needed: &[&str]) -> String {
    let is_needed =
        |option: &&Arg| option.is_required_set() || option.get_long().is_some_and(|name| needed.contains(&name));
    let shown = command.get_arguments().filter(is_needed).map(|option| {
        let name = option.get_long().unwrap_or_default();
        let value = option.get_value_names().and_then(<[_]>::first).map_or("", |value| value.as_str());
        match name {
            // A source has one of the two.
            "server" if !option.is_required_set() => format!(" <--{name} <{value}>|--sentinel <HOST:PORT,…>>"),
            _ => format!(" --{name} <{value}>"),
        }
    });
    shown.collect()
}

fn hidden(option: Arg, shown: Option<&[&str]>) -> Arg {
    let is_hidden = !is_shown(&option, shown);
    let is_rare = rare_day(&option).is_some();
    option.hide_short_help(is_hidden || is_rare).hide_long_help(is_rare)
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

/// The sentences of Rust's library about numbers do not say what is expected.
pub(crate) fn in_our_words(text: &str) -> String {
    let number = "expected a whole number";
    let text = text
        .replace("invalid digit found in string", number)
        .replace("cannot parse integer from empty string", number)
        .replace("number too large to fit in target type", "the number is too large")
        .replace("number too small to fit in target type", "the number is too small");
    let Some((before, range)) = text.split_once(" is not in ") else { return text };
    let (range, after) = range.split_once('\n').unwrap_or((range, ""));
    let Some((least, most)) = range.split_once("..=") else { return text };
    let before = before.rsplit_once(": ").map_or(before, |(before, _)| before);
    format!("{before}: expected a number from {least} to {most}\n{after}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::definition;
    use super::*;

    /// Lines of a terminal that is not small, and its columns.
    const SCREEN: usize = 40;
    const COLUMNS: usize = 100;

    /// All commands, and those below them, with the options that they have from above.
    fn all_commands() -> Vec<Command> {
        let mut definition = definition();
        definition.build();
        let mut commands: Vec<Command> = definition.get_subcommands().cloned().collect();
        let mut at = 0;
        while let Some(command) = commands.get(at).cloned() {
            commands.extend(command.get_subcommands().filter(|below| below.get_name() != "help").cloned());
            at += 1;
        }
        commands
    }

    #[test]
    fn the_short_help_of_each_command_fits_a_screen() {
        let mut wrong = Vec::new();
        for command in all_commands() {
            let page = command.term_width(COLUMNS).render_help().to_string();
            let lines = page.lines().count();
            (lines > SCREEN).then(|| wrong.push(format!("{lines} lines:\n{page}")));
        }
        assert_eq!(wrong.join("\n"), "");
    }

    #[test]
    fn the_usage_of_each_command_names_the_options_without_which_it_does_not_run() {
        for (command, options) in [
            ("source", &["<--server <URL>|--sentinel <HOST:PORT,…>>", "--token-file <FILE>"][..]),
            ("replica", &["--server <URL>", "--source <HOST:PORT", "--token-file <FILE>"]),
            ("attend", &["--server <URL>", "--source <HOST:PORT", "--token-file <FILE>"]),
            ("backup", &["--source <HOST:PORT", "--token-file <FILE>", "--to <DIR|URL>"]),
            ("fetch", &["--source <HOST:PORT", "--token-file <FILE>", "--to <FILE>"]),
            ("status", &["--source <HOST:PORT", "--token-file <FILE>"]),
            ("probe", &["--source <HOST:PORT", "--token-file <FILE>"]),
        ] {
            let mut command = all_commands().into_iter().find(|known| known.get_name() == command).unwrap();
            let usage = command.render_usage().to_string();
            options.iter().for_each(|option| assert!(usage.contains(option), "{usage}"));
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
    fn each_option_is_in_the_short_help_the_long_one_or_the_one_for_rare_days() {
        let mut definition = definition();
        let Some(replica) = definition.find_subcommand_mut("replica") else { panic!("no command replica") };
        let (short, long) = (replica.render_help().to_string(), replica.render_long_help().to_string());
        let Some(mut rare) = rare_of(replica) else { panic!("none is rare") };
        let rare = rare.render_long_help().to_string();
        for option in ["--tls-ca <", "--upload-limit <", "--plaintext-network\n"] {
            assert!(!short.contains(option) && long.contains(option) && !rare.contains(option), "{option}");
        }
        for option in ["--rdma-queue-depth <N>", "--linger <TIME>", "--no-serve-peers\n"] {
            assert!(!short.contains(option) && !long.contains(option) && rare.contains(option), "{option}: {rare}");
        }
        assert!(short.contains("--source <HOST:PORT,…>") && short.contains("more options"), "{short}");
        assert!(long.contains("remora config rare replica") && rare.contains("For a day on which"), "{rare}");
    }

    #[test]
    fn no_command_shows_more_options_than_an_operator_can_read() {
        // With --help and the four options of every command. Of `remora replica`: 85 with those for rare days.
        const MOST: usize = 40;
        let mut wrong = Vec::new();
        for command in all_commands() {
            let shown = command.get_arguments().filter(|option| !option.is_hide_long_help_set()).count();
            (shown > MOST).then(|| wrong.push(format!("{} shows {shown} options", command.get_name())));
        }
        assert_eq!(wrong.join("\n"), "");
    }

    #[test]
    fn options_for_rare_days_exist_and_are_not_for_every_day() {
        let definition = definition();
        for option in RARE.iter().flat_map(|(_, options)| *options) {
            let mut commands = definition.get_subcommands();
            let has = |command: &Command| command.get_arguments().any(|argument| argument.get_long() == Some(option));
            assert!(commands.any(has), "no command has --{option}");
            assert!(!EVERYDAY.iter().any(|(_, shown)| shown.contains(option)), "--{option} is for every day too");
        }
    }

    /// The table in docs/reference/configuration.md. Change the page with it.
    #[test]
    fn the_page_of_the_configuration_file_has_the_options_for_rare_days() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/configuration.md");
        let page = std::fs::read_to_string(page).unwrap_or_default();
        for (day, options) in RARE {
            let options: Vec<String> = options.iter().map(|option| format!("`{option}`")).collect();
            let row = format!("| {day} | {} |", options.join(", "));
            assert!(page.contains(&row), "the page lacks this row:\n{row}");
        }
    }

    #[test]
    fn numbers_that_are_none_are_refused_in_our_words() {
        for (given, expected) in [
            (
                "error: x '--keys <N>': invalid digit found in string\n\nFor",
                "x '--keys <N>': expected a whole number\n\nFor",
            ),
            (
                "error: x '--lanes <N>': 0 is not in 1..=4\n\nFor",
                "x '--lanes <N>': expected a number from 1 to 4\n\nFor",
            ),
            ("the server is not in cluster mode\n", "the server is not in cluster mode\n"),
        ] {
            assert!(in_our_words(given).contains(expected), "{}", in_our_words(given));
        }
    }
}
