//! The command line: the arguments of every command, and its help pages.
//!
//! Each command has a help page: what it does, examples, exit codes, ACL rules. Nothing here runs a command:
//! [`crate::commands`] does.

mod cluster;
mod connections;
mod fetch;
mod help;
mod inspect;
mod replica;
mod source;
mod volume;

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
pub use remora_server::HostPort;

pub use self::cluster::{
    ClusterAction, ClusterArgs, ClusterBackupArgs, ClusterMigrateArgs, ClusterPlanArgs, ClusterSourcesArgs,
    ClusterStatusArgs, ClusterSyncArgs, DigestUse, EndsArgs, MigrateArgs, Renew, SwitchArgs, VerifyArgs,
};
pub use self::connections::{
    LenderNameArgs, LinkTlsArgs, MetricsArgs, MetricsFileArgs, MonitorNameArgs, PeerArgs, RdmaEndArgs, RdmaOfferArgs,
    RdmaReadArgs, ReplicaNameArgs, SecurityArgs, SentinelArgs, ServerArgs, SourceKeyArgs, TlsArgs,
};
pub use self::fetch::{
    BackupArgs, ClusterNodeArgs, FetchArgs, PassOnArgs, RestoreArgs, SnapshotAction, SnapshotArgs, SnapshotFromArgs,
    SnapshotMountArgs,
};
pub(crate) use self::help::{in_our_words, rare_of};
pub use self::inspect::{
    AskArgs, ConfigAction, ConfigArgs, DevicesArgs, GenerateArgs, Generated, LayoutArgs, LoadArgs, ModuleArgs,
    ModuleQuestion, PlanArgs, PlannedSecurity, ProbeArgs, ReadArgs, ReadyArgs, StatusArgs, TokenAction,
    TokenCommandArgs, ValueType,
};
pub use self::replica::{
    AddArgs, AttendArgs, DeliveryArgs, InterceptAction, InterceptArgs, InterceptPortArgs, LendArgs, ModuleLoad,
    PRIMARY_PORT, RelayArgs, ReplicaArgs, ShowArgs,
};
pub use self::source::{BaseArgs, CapturedArgs, FastKeys, SourceArgs, StoreArgs, TuneArgs, WalkArgs};
pub use self::volume::{
    CreateArgs, FormatArgs, GrowArgs, MountArgs, NbdArgs, NbdTlsArgs, RemoveArgs, RepairArgs, ScrubArgs, ServeArgs,
    VolumeAction, VolumeArgs, VolumeSecurityArgs, VolumeStatusArgs, WaysArgs, WriterArgs,
};
use crate::exit::Code;

/// Exact replicas of a Redis or Valkey server, any number of them from one snapshot.
#[derive(Clone, Debug, Parser)]
#[command(name = "remora", version, max_term_width = 100, long_about = ABOUT, after_long_help = overview())]
pub struct Cli {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub global: GlobalArgs,

    #[command(subcommand)]
    #[allow(missing_docs)]
    pub command: Command,
}

/// Options of a crate below, which a command line can give. They are stated there, and have no words of clap.
pub trait OnCommandLine {
    /// What clap parses.
    type Args: clap::Args;

    /// The options that it stands for.
    fn of(args: Self::Args) -> Self;
}

/// Such options, among the arguments of a command: clap parses its words for them, and nothing else sees these.
#[derive(Clone, Debug, Default)]
pub struct Plain<O>(O);

impl<O: Clone> Plain<O> {
    /// The options alone.
    pub(crate) fn plain(&self) -> O {
        self.0.clone()
    }
}

impl<O> From<O> for Plain<O> {
    fn from(options: O) -> Plain<O> {
        Plain(options)
    }
}

impl<O> std::ops::Deref for Plain<O> {
    type Target = O;

    fn deref(&self) -> &O {
        &self.0
    }
}

impl<O> std::ops::DerefMut for Plain<O> {
    fn deref_mut(&mut self) -> &mut O {
        &mut self.0
    }
}

impl<O: OnCommandLine> clap::FromArgMatches for Plain<O> {
    fn from_arg_matches(matches: &clap::ArgMatches) -> Result<Plain<O>, clap::Error> {
        O::Args::from_arg_matches(matches).map(|args| Plain(O::of(args)))
    }

    fn update_from_arg_matches(&mut self, matches: &clap::ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<O: OnCommandLine> clap::Args for Plain<O> {
    fn augment_args(command: clap::Command) -> clap::Command {
        O::Args::augment_args(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        O::Args::augment_args_for_update(command)
    }

    fn group_id() -> Option<clap::Id> {
        O::Args::group_id()
    }
}

/// Options of every command.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct GlobalArgs {
    /// What to log on stderr. The environment variable REMORA_LOG can hold a filter such as
    /// `info,remora_replica=debug` instead.
    #[arg(long, global = true, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,

    /// Log one JSON object per line, for log collectors. Its field `event` names what has happened.
    #[arg(long, global = true)]
    pub log_json: bool,

    /// File with options (`remora config --help`). The command line wins over the environment, and the environment over
    /// the file.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<std::path::PathBuf>,

    /// Show no progress, and only warnings and errors.
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

impl GlobalArgs {
    /// The options as words of a command line, for another agent that logs to the same place.
    pub(crate) fn words(&self) -> Vec<OsString> {
        let flags = [(self.log_json, "--log-json"), (self.quiet, "--quiet")];
        let flags = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag.into());
        let level = ["--log-level".into(), self.log_level.name().into()];
        level.into_iter().chain(flags).chain(self.config_words()).collect()
    }

    /// As [`GlobalArgs::words`], of the configuration file alone.
    pub(crate) fn config_words(&self) -> Vec<OsString> {
        self.config.iter().flat_map(|file| ["--config".into(), file.into()]).collect()
    }
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
#[allow(clippy::large_enum_variant)] // one per process, moved twice
pub enum Command {
    #[command(about = "Take a snapshot of a server and serve it to replica agents")]
    #[allow(missing_docs)]
    Source(SourceArgs),
    #[command(about = "Make a server an exact replica, from a source's snapshot")]
    #[allow(missing_docs)]
    Replica(ReplicaArgs),
    #[command(about = "Stay beside a server, and make each of its full copies a cheap one")]
    #[allow(missing_docs)]
    Attend(AttendArgs),
    #[command(about = "The rules that send a server's connections to remora attend")]
    #[allow(missing_docs)]
    Intercept(InterceptArgs),
    #[command(about = "Show a source's snapshot and the replicas that read it")]
    #[allow(missing_docs)]
    Status(StatusArgs),
    #[command(about = "Show the transports of this host: RDMA devices, shared memory, TCP")]
    #[allow(missing_docs)]
    Devices(DevicesArgs),
    #[command(about = "Say what replicas of a primary will need: memory, backlog, time")]
    #[allow(missing_docs)]
    Plan(PlanArgs),
    #[command(about = "Measure the latency and bandwidth of each transport to a source")]
    #[allow(missing_docs)]
    Probe(ProbeArgs),
    #[command(about = "Compare the data of two servers completely")]
    #[allow(missing_docs)]
    Verify(VerifyArgs),
    #[command(about = "Say whether a server is ready for work, by the exit code", visible_alias = "wait")]
    #[allow(missing_docs)]
    Ready(ReadyArgs),
    #[command(about = "Make a server of another family or version an exact replica")]
    #[allow(missing_docs)]
    Migrate(MigrateArgs),
    #[command(about = "Promote a replica, and make its primary follow it")]
    #[allow(missing_docs)]
    Switch(SwitchArgs),
    #[command(about = "The shards of a cluster, and the sources beside them")]
    #[allow(missing_docs)]
    Cluster(ClusterArgs),
    #[command(about = "Fill a server with test data")]
    #[allow(missing_docs)]
    Load(LoadArgs),
    #[command(about = "The module for servers: its path, and layouts of builds")]
    #[allow(missing_docs)]
    Module(ModuleArgs),
    #[command(about = "Make the secret that a source and its replicas share")]
    #[allow(missing_docs)]
    Token(TokenCommandArgs),
    #[command(about = "Block devices in the memory of other hosts")]
    #[allow(missing_docs)]
    Volume(VolumeArgs),
    #[command(about = "Fetch a source's snapshot as an RDB file")]
    #[allow(missing_docs)]
    Fetch(FetchArgs),
    #[command(about = "Back a source's data up: a snapshot, and the writes since")]
    #[allow(missing_docs)]
    Backup(BackupArgs),
    #[command(about = "Check a backup, and lay out what a server starts on")]
    #[allow(missing_docs)]
    Restore(RestoreArgs),
    #[command(about = "A source's snapshot as a mounted file")]
    #[allow(missing_docs)]
    Snapshot(SnapshotArgs),
    #[command(about = "Check a configuration file")]
    #[allow(missing_docs)]
    Config(ConfigArgs),
    #[command(about = "Write shell completions or man pages")]
    #[allow(missing_docs)]
    Generate(GenerateArgs),
}

/// The levels of logging.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// The level's name in filters.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    /// The quieter one of the two.
    pub(crate) fn min_with(self, other: Self) -> Self {
        if (self as u8) < (other as u8) { self } else { other }
    }
}

/// An address to listen on. The system's own sentence does not say what one looks like.
pub(crate) fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected ADDR:PORT, as in 10.0.0.5:7379 or [::1]:7379; a name is not an address".into())
}

/// An address of this host.
pub(crate) fn parse_ip(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| "expected an IP address, as in 10.0.0.5 or fd00::1, without a port".into())
}

/// The words that an option takes: each with what its help page says of it, and what it means. One without a sentence
/// is taken and not shown.
pub(crate) type Words<T, const N: usize> = [(&'static str, &'static str, T); N];

/// Parses one of these words. The meanings are types of crates that know no command line.
pub(crate) fn one_of<T, const N: usize>(words: Words<T, N>) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let shown = words.map(|(word, help, _)| match help {
        "" => PossibleValue::new(word).hide(true),
        help => PossibleValue::new(word).help(help),
    });
    PossibleValuesParser::new(shown).try_map(move |given| {
        let known = words.iter().find(|(word, ..)| *word == given);
        known.map(|(.., meaning)| *meaning).ok_or("it has no meaning")
    })
}

/// The definition of the whole command line, for completions, man pages and tests.
pub fn definition() -> clap::Command {
    help::in_three_parts(Cli::command())
}

const ABOUT: &str = "\
Exact replicas of a Redis or Valkey server, any number of them from one snapshot.

A `remora source` beside the primary takes one snapshot into memory that others may read, and the stream of writes that \
follows it. A `remora replica` beside each new replica reads both - through shared memory on the same host, by RDMA or TCP \
between hosts -, loads its unmodified server from them, and hands that server over to its own replication at the exact offset. It \
is then an ordinary replica, and Remora is out of the way.";

fn overview() -> String {
    format!(
        "\
Two servers, one host, in five lines:
  remora token new token
  remora source --server redis://127.0.0.1:6379 --token-file token &
  remora replica --server redis://127.0.0.1:6380 --source 127.0.0.1:7379 --token-file token
  remora verify --primary redis://127.0.0.1:6379 --replica redis://127.0.0.1:6380
  remora status --source 127.0.0.1:7379 --token-file token

`remora help COMMAND` shows the page of a command.

{}",
        crate::exit::help_table(&Code::ALL)
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    #[test]
    fn the_definition_contradicts_itself_nowhere() {
        definition().debug_assert();
    }

    #[test]
    fn every_command_has_a_page_with_examples_and_exit_codes() {
        for command in definition().get_subcommands_mut() {
            let page = command.render_long_help().to_string();
            assert!(page.contains("Examples:"), "{} has no examples", command.get_name());
            assert!(page.contains("Exit codes:"), "{} has no exit codes", command.get_name());
        }
    }

    /// The README and the pages below `docs/`.
    fn pages() -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let (mut pages, mut folders) = (vec![root.join("README.md")], vec![root.join("docs")]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.extension() {
                    _ if path.is_dir() => folders.push(path),
                    Some(kind) if kind == "md" => pages.push(path),
                    _ => {}
                }
            }
        }
        pages
    }

    #[test]
    fn no_page_has_a_command_or_an_option_that_does_not_exist() {
        let mut root = definition();
        root.build();
        let (mut wrong, mut seen) = (Vec::new(), 0);
        for page in pages() {
            let text = fs::read_to_string(&page).unwrap().replace("\\\n", " ");
            for (place, block) in text.split("```").enumerate() {
                let lines = if place % 2 == 1 { block.lines() } else { "".lines() };
                for line in lines.filter_map(|line| line.trim_start().strip_prefix("remora ")) {
                    let words: Vec<&str> = line.split(['|', ';', '#']).next().unwrap().split_whitespace().collect();
                    let (mut command, mut names) = (&root, 0);
                    while let Some(next) = words.get(names).and_then(|word| command.find_subcommand(word)) {
                        (command, names) = (next, names + 1);
                    }
                    let has = |option: &str| command.get_arguments().any(|known| known.get_long() == Some(option));
                    let options = words[names..].iter().filter_map(|word| word.strip_prefix("--"));
                    let options = options.map(|option| option.split('=').next().unwrap());
                    let unknown: Vec<&str> = options.filter(|option| !has(option)).collect();
                    if names == 0 || !unknown.is_empty() {
                        wrong.push(format!("{}: remora {line}: {unknown:?}", page.display()));
                    }
                    seen += 1;
                }
            }
        }
        assert_eq!(wrong.join("\n"), "");
        assert!(seen > 50, "{seen} commands");
    }

    #[test]
    fn rdma_is_a_name_of_verbs_wherever_a_transport_is_chosen() {
        let (mut commands, mut seen) = (vec![definition()], 0);
        while let Some(command) = commands.pop() {
            for option in command.get_arguments() {
                let values = option.get_possible_values();
                let takes = |word: &str| values.iter().any(|value| value.get_name() == word);
                assert_eq!(takes("verbs"), takes("rdma"), "{}: --{option:?}", command.get_name());
                seen += usize::from(takes("rdma"));
            }
            commands.extend(command.get_subcommands().cloned());
        }
        assert!(seen >= 6, "{seen} options");
    }

    #[test]
    fn no_option_takes_a_password() {
        for command in definition().get_subcommands() {
            for argument in command.get_arguments() {
                let name = argument.get_id().as_str();
                assert!(!name.contains("password") || name.ends_with("file"), "{name}");
            }
        }
    }

    #[test]
    fn a_host_and_a_port_are_both_needed() {
        assert_eq!("db1:6379".parse::<HostPort>().unwrap(), HostPort { host: "db1".into(), port: 6379 });
        assert_eq!("[::1]:80".parse::<HostPort>().unwrap().to_string(), "[::1]:80");
        for wrong in ["db1", "[::1]", "::1", "db1:", "db1:0", "db1:80/2", ":80", "user@db1:80", "redis://db1:80"] {
            assert!(wrong.parse::<HostPort>().is_err(), "{wrong}");
        }
    }
}
