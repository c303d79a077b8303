//! The process around one command: parses the command line, starts logging and the runtime, runs the command, and
//! reports how it ended.
//!
//! ```text
//!   parse ──▶ logging, progress ──▶ runtime ──▶ one command's run(args) ──▶ Ok: 0 │ Failure: a sentence on stderr, its code
//! ```

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::FromArgMatches;
use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};
use tracing_subscriber::EnvFilter;

use crate::args::{self, Cli, Command, GlobalArgs, LogLevel};
use crate::config::Words;
use crate::exit::{Code, Failure};
use crate::signals::{self, until_signal};
use crate::{events, host, progress};

/// Runs the whole process: parses, runs, and reports how it ended.
pub fn main() -> ExitCode {
    // Help, version and usage errors end the process here, with status 0 or 2.
    let (cli, foreign) = parse();
    progress::configure(cli.global.quiet);
    start_logging(&cli.global);
    for variable in foreign {
        tracing::debug!("{variable} is Kubernetes' variable of a Service, and no option");
    }
    protect_memory();
    signals::end_with_parent();
    raise_descriptor_limit();
    match run(cli.command, &cli.global) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            progress::say(&format!("remora: {failure}"));
            failure.into()
        }
    }
}

/// The arguments, from the command line, the environment and the configuration file, and the variables that are no
/// options although they have the name of one. Ends the process if there is nothing to run.
fn parse() -> (Cli, Vec<String>) {
    let definition = args::definition();
    let words = match Words::complete(&definition, std::env::args_os().collect(), |name| std::env::var_os(name)) {
        Ok(words) => words,
        Err(failure) => {
            progress::say(&format!("remora: {failure}"));
            std::process::exit(failure.code.number().into());
        }
    };
    let parsed = definition.try_get_matches_from(&words.words).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = parsed.unwrap_or_else(|error| {
        let origins = words.origins(&error.to_string());
        if error.use_stderr() && !origins.is_empty() {
            let _ = print(&error); // without a terminal there is no one to tell
            progress::say(&format!("\n{origins}"));
            std::process::exit(error.exit_code());
        }
        // Help and version are results. Usage errors go to stderr, which may be gone.
        let is_lost = print(&error).and_then(|()| std::io::stdout().flush()).is_err() && !error.use_stderr();
        std::process::exit(if is_lost { Code::Local.number().into() } else { error.exit_code() })
    });
    (cli, words.foreign)
}

/// Prints help, the version, or what is wrong with a command line.
fn print(error: &clap::Error) -> std::io::Result<()> {
    if !error.use_stderr() {
        return error.print();
    }
    let shown = error.render();
    let is_coloured = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let text = if is_coloured { shown.ansi().to_string() } else { shown.to_string() };
    std::io::stderr().write_all(crate::args::in_our_words(&text).as_bytes())
}

/// Keeps other processes of this user from reading the process's memory and descriptors, by ptrace(2) or /proc, and the
/// system from writing a core dump. Both would contain the data set and the token. Root still has access.
fn protect_memory() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "other processes of this user can read this process's memory");
    }
}

/// Raises the soft limit of open descriptors to the hard limit. The usual soft limit of 1024 exists for programs that
/// use select(2), and a source with many replicas needs more: a few for each replica and each of its lanes.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!(%error, "the limit of open descriptors stays at {:?}", limit.current);
    }
}

fn run(command: Command, global: &GlobalArgs) -> Result<(), Failure> {
    host::check_threads()?;
    if !matches!(command, Command::Source(_)) {
        refuse_passed_descriptors()?;
    }
    // Two threads: one may be busy with a large value while the other answers heartbeats. The data lanes have threads
    // of their own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::local(format!("cannot start the threads of this command: {error}; raise the limits of this user (ulimit -u, ulimit -n)")))?;
    let outcome = runtime.block_on(dispatch(command, global));
    // Threads that wait in a blocking call must not delay the end of the process.
    runtime.shutdown_background();
    outcome
}

/// Refuses descriptors of a service manager: a command that takes none would listen elsewhere, and its clients would
/// wait at the manager's socket for ever.
fn refuse_passed_descriptors() -> Result<(), Failure> {
    match remora_fabric::memory::local::passed() {
        0 => Ok(()),
        count => Err(Failure::refused(format!(
            "the service manager passed {count} descriptors (LISTEN_FDS), and only remora source takes one: remove the socket unit of \
             this service, and give the address to listen on by an option"
        ))),
    }
}

/// Whether a command stays until it is told to end, or leaves something half done if it is ended: a SIGHUP must not.
fn stays(command: &Command) -> bool {
    match command {
        Command::Status(args) => args.watch.is_some(),
        Command::Ready(args) => args.watch.is_some(),
        Command::Source(_) | Command::Replica(_) | Command::Attend(_) | Command::Fetch(_) | Command::Backup(_) => true,
        Command::Cluster(_) | Command::Snapshot(_) | Command::Volume(_) | Command::Switch(_) | Command::Migrate(_) => {
            true
        }
        _ => false,
    }
}

async fn dispatch(command: Command, global: &GlobalArgs) -> Result<(), Failure> {
    // Before a command has any files that it could read again, too.
    let _ignored = stays(&command).then(signals::hangups).transpose()?;
    match command {
        // Source and replica have something to clean up when they are stopped, so they catch signals themselves.
        Command::Source(args) => crate::source::run(args.options(remora_backup::checked_snapshot)?).await,
        Command::Replica(args) => crate::replicas::replica(args).await,
        Command::Attend(args) => crate::replicas::attend(args).await,
        Command::Intercept(args) => crate::replicas::intercept(args).await,
        Command::Status(args) => until_signal(crate::status::run(args), "").await,
        Command::Devices(args) => crate::transports::print_report(args.json),
        Command::Plan(args) => until_signal(crate::plan::run(args), "").await,
        Command::Probe(args) => {
            until_signal(crate::probe::run(args), ": the figures measured so far are not shown").await
        }
        Command::Verify(args) => {
            until_signal(crate::tools::verify(args.options(), args.json), ": nothing was changed on the servers").await
        }
        Command::Ready(args) => until_signal(crate::probe::run_ready(args), "").await,
        Command::Switch(args) => crate::switch::run(args).await,
        Command::Migrate(args) => crate::migrate::run(args, global).await,
        Command::Load(args) => until_signal(crate::load::run(args), ": the keys written so far are still there").await,
        Command::Module(args) => crate::tools::module(&args).await,
        Command::Token(args) => crate::tools::token(&args),
        // Servers and clients of volumes, and mounts, catch signals themselves.
        Command::Fetch(args) => crate::backup::fetch(args).await,
        Command::Backup(args) => crate::backup::backup(args).await,
        Command::Restore(args) => crate::backup::restore(args).await,
        Command::Cluster(args) => crate::cluster::run(args).await,
        Command::Snapshot(args) => crate::backup::snapshot(args).await,
        Command::Volume(args) => crate::volume::run(args).await,
        Command::Config(args) => crate::config::run(&args),
        Command::Generate(args) => crate::tools::generate(&args),
    }
}

fn start_logging(global: &GlobalArgs) {
    let level = if global.quiet { LogLevel::Warn.min_with(global.log_level) } else { global.log_level };
    // The client of object stores tells of each of its tries, in its own words: what matters is said here.
    let usual = || EnvFilter::new(format!("{},object_store=warn", level.name()));
    let filter = EnvFilter::try_from_env("REMORA_LOG").unwrap_or_else(|_| usual());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| progress::LogWriter);
    // It would tell of them by `eprintln!`, which panics where stderr is what failed.
    let builder = builder.log_internal_errors(false);
    // This fails only if logging has been set up already, as in tests that share a process.
    let _ = match global.log_json {
        true => builder.json().flatten_event(true).try_init(),
        false => {
            let builder = builder.fmt_fields(events::ForPeople::from_environment());
            builder.with_target(false).with_ansi(std::io::stderr().is_terminal()).try_init()
        }
    };
}
