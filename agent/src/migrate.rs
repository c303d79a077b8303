//! `remora migrate`: a server of another family or version becomes an exact replica.
//!
//! ```text
//!   differences ── what differs between the two servers is said; nothing is changed
//!       │
//!   agents ─── remora source (for the old primary) ══▶ remora replica --convert (for the new server)   processes of ours
//!       │         └─ skipped if the new server follows the old one already
//!   verify ─── all data of both are compared
//!       │
//!   ready: remora switch
//! ```
//!
//! The two ends are processes, as when they are started by hand: each has its own log, signals and guard, and a failure
//! of one ends with its own exit code.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use remora_redis::resp::Frame;
use remora_wire::printable;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::args::{GlobalArgs, HostPort, MigrateArgs, TokenAction, TokenCommandArgs};
use crate::exit::{Code, Failure};
use crate::server::{Client, Facts, Role, ServerError, ServerUrl, Task};
use crate::signals::{CHILD_OF, Signals, until_signal};
use crate::units::{Size, counted};
use crate::{events, progress};

/// Runs `remora migrate`.
///
/// # Errors
/// The servers are not suitable, or the sync or the comparison failed. The message says in which state the new server
/// is.
pub async fn run(args: MigrateArgs, global: &GlobalArgs) -> Result<(), Failure> {
    let follows = until_signal(look(&args), ": nothing was changed").await?;
    let (from, to) = (&args.ends.from, &args.ends.to);
    match follows {
        true => tracing::info!("{to} follows {from} already: no sync is needed"),
        false => {
            let mut signals = Signals::catch()?;
            let agents = Agents::start(&args, global, &mut signals).await?;
            agents.finish(&mut signals).await?;
        }
    }
    if args.dry_run {
        return Ok(());
    }
    if !args.no_verify {
        let compared = crate::tools::verify(args.ends.comparison(RETRY), false);
        until_signal(compared, &format!(": {to} follows {from}, and was not compared to its end")).await?;
    }
    progress::print_line(&format!(
        "{to} is an exact replica of {from}, and follows it\nnext: remora switch --from {from} --to {to}"
    ))
}

/// Says what differs between the two servers, and whether the new one follows the old one already.
async fn look(args: &MigrateArgs) -> Result<bool, Failure> {
    let (from, to) = (args.ends.open_from(Task::Source)?, args.ends.open_to(Task::Replica)?);
    let (mut old, mut new) = tokio::try_join!(from.connect(), to.connect())?;
    let (of_old, of_new) = (Facts::read(&mut old).await?, Facts::read(&mut new).await?);
    if of_old.run_id.is_some() && of_old.run_id == of_new.run_id {
        return Err(Failure::refused(format!("{} and {} are the same server", from.url(), to.url())));
    }
    progress::say(&format!("from {} ({}), {}", from.url(), of_old.name(), counted(of_old.keys(), "key")));
    progress::say(&format!("to   {} ({}), {}", to.url(), of_new.name(), counted(of_new.keys(), "key")));
    for line in between(&mut old, &mut new, &of_old, &of_new).await? {
        progress::say(&format!("     {line}"));
    }
    Ok(follows(&of_old, &of_new))
}

/// Whether a server is a replica of another one, and in step with it.
fn follows(old: &Facts, new: &Facts) -> bool {
    let is_linked = new.link.as_ref().is_some_and(|link| link.up == Some(true) && link.syncing != Some(true));
    new.role == Some(Role::Replica) && is_linked && old.replid.is_some() && old.replid == new.replid
}

/// How an agent has ended, as this command's end.
fn ended(code: Option<i32>, who: &str) -> Result<(), Failure> {
    match code {
        Some(0) => Ok(()),
        Some(number) => {
            let known = Code::ALL.into_iter().find(|code| i32::from(code.number()) == number);
            Err(Failure::new(known.unwrap_or(Code::Local), format!("{who} has failed; its reason stands above")))
        }
        None => Err(Failure::local(format!("{who} was killed by a signal"))),
    }
}

/// How long the comparison waits for a server that does not answer.
const RETRY: Duration = Duration::from_secs(300);

// The two agents, as processes of this program.

/// How long a source may take until it listens. It waits for its server for five minutes itself.
const READY_LIMIT: Duration = Duration::from_secs(330);

/// How long an agent may take to end after it was told to.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Pause between two looks whether an agent has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Both agents at work.
struct Agents {
    source: Option<Source>,
    replica: Process,
}

/// A source that was started here.
struct Source {
    process: Process,
    /// Where it listens.
    address: String,
    /// Holds its token.
    folder: TempDir,
}

impl Agents {
    /// Starts a source, if none is named, and a replica agent that reads from it.
    async fn start(args: &MigrateArgs, global: &GlobalArgs, signals: &mut Signals) -> Result<Agents, Failure> {
        let source = match &args.source {
            Some(_) => None,
            None => Some(Source::start(args, global, signals).await?),
        };
        let mut command = agent("replica");
        command.args(global.words());
        let ends = &args.ends;
        server_words(&mut command, &ends.to, ends.to_user.as_deref(), &ends.to_password_file, args);
        match (&source, &args.source, &args.token_file) {
            (Some(source), ..) => {
                command.args(["--source", &source.address, "--token-file"]).arg(source.folder.path().join(TOKEN));
            }
            (None, Some(address), Some(file)) => {
                command.args(["--source", &address.to_string(), "--token-file"]).arg(file);
            }
            (None, ..) => return Err(Failure::new(Code::Usage, "--source goes with --token-file")),
        }
        // The user has named the primary: it is the right one.
        if let Some(primary) = host_port(&ends.from) {
            command.args(["--expect-primary", &primary]);
        }
        command.args(["--convert", "--memory", &args.memory.get().to_string()]);
        for what in &args.leave_out {
            command.args(["--leave-out", what.word()]);
        }
        for (is_asked, option) in [(args.replace, "--replace"), (args.dry_run, "--dry-run")] {
            if is_asked {
                command.arg(option);
            }
        }
        Ok(Agents { source, replica: Process::spawn(&mut command, "the replica agent")? })
    }

    /// Waits for the end of the replica agent, and ends the source. A signal is passed on.
    async fn finish(mut self, signals: &mut Signals) -> Result<(), Failure> {
        let status = loop {
            tokio::select! {
                status = self.replica.wait() => break status?,
                name = signals.next() => {
                    tracing::info!("{name}: the replica agent is told to end");
                    self.replica.signal(Signal::TERM);
                }
            }
        };
        if let Some(source) = self.source.take() {
            source.stop().await?;
        }
        ended(status.code(), "the replica agent")
    }
}

impl Source {
    async fn start(args: &MigrateArgs, global: &GlobalArgs, signals: &mut Signals) -> Result<Source, Failure> {
        let no_folder = |error| Failure::local(format!("no folder for the token could be made: {error}"));
        let folder = tempfile::Builder::new().prefix("remora-migrate-").tempdir().map_err(no_folder)?;
        let token = folder.path().join(TOKEN);
        crate::tools::token(&TokenCommandArgs { action: TokenAction::New { file: token.clone() } })?;
        let mut command = agent("source");
        // Its log is read here, and says where it listens, whatever the user wants to see.
        command.args(global.config_words()).env("REMORA_LOG", "info");
        let ends = &args.ends;
        server_words(&mut command, &ends.from, ends.from_user.as_deref(), &ends.from_password_file, args);
        command.args(["--listen", "127.0.0.1:0", "--log-json", "--token-file"]).arg(&token);
        command.args(["--memory", &args.source_memory.get().to_string()]);
        if let Some(primary) = host_port(&ends.from) {
            command.args(["--announce", &primary]);
        }
        command.stderr(Stdio::piped());
        let mut process = Process::spawn(&mut command, "the source")?;
        let (tell, told) = oneshot::channel();
        if let Some(log) = process.child.stderr.take() {
            // It ends with the source.
            let reader = std::thread::Builder::new().name("source-log".into()).spawn(move || read_log(log, tell));
            reader.map_err(|error| {
                Failure::local(format!(
                    "no thread could be started: {error}; raise the limit of this user's processes (ulimit -u)"
                ))
            })?;
        }
        let address = tokio::select! {
            // The other end is dropped when the log ends.
            address = timeout(READY_LIMIT, told) => address.ok().and_then(Result::ok),
            name = signals.next() => {
                return Err(Failure::new(Code::Interrupted, format!("stopped by {name}: nothing was changed")));
            }
        };
        match address {
            Some(address) => Ok(Source { process, address, folder }),
            None => {
                process.signal(Signal::TERM);
                let status = process.end_within(END_LIMIT).await?;
                ended(status.code().filter(|code| *code != 0), "the source")?;
                Err(Failure::new(
                    Code::Source,
                    format!(
                        "the source did not begin to listen within {} s: its lines above say why",
                        READY_LIMIT.as_secs()
                    ),
                ))
            }
        }
    }

    async fn stop(mut self) -> Result<(), Failure> {
        self.process.signal(Signal::TERM);
        self.process.end_within(END_LIMIT).await.map(drop)
    }
}

/// Tells the address once the source listens, and passes on what people should read.
fn read_log(log: impl std::io::Read, tell: oneshot::Sender<String>) {
    let mut tell = Some(tell);
    for line in BufReader::new(log).lines().map_while(Result::ok) {
        let Ok(said) = serde_json::from_str::<Value>(&line) else {
            // Its last words.
            tracing::warn!("source: {line}");
            continue;
        };
        let text = said["message"].as_str().unwrap_or_default();
        match said["level"].as_str() {
            Some("ERROR" | "WARN") => tracing::warn!("source: {text}"),
            _ => tracing::debug!("source: {text}"),
        }
        if let (Some(events::SOURCE_READY), Some(address)) = (said["event"].as_str(), said["listening"].as_str())
            && let Some(tell) = tell.take()
        {
            let _ = tell.send(address.to_owned()); // a command that does not wait any more needs no address
        }
    }
}

/// A process that ends with its owner.
struct Process {
    child: Child,
    name: &'static str,
    status: Option<ExitStatus>,
}

impl Process {
    fn spawn(command: &mut Command, name: &'static str) -> Result<Process, Failure> {
        let child = command.spawn().map_err(|error| Failure::local(format!("{name} could not be started: {error}")))?;
        Ok(Process { child, name, status: None })
    }

    async fn wait(&mut self) -> Result<ExitStatus, Failure> {
        loop {
            let failed = |error| Failure::local(format!("{} could not be waited for: {error}", self.name));
            self.status = self.child.try_wait().map_err(failed)?;
            if let Some(status) = self.status {
                return Ok(status);
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// Waits for its end, and kills it if it takes longer.
    async fn end_within(&mut self, limit: Duration) -> Result<ExitStatus, Failure> {
        if let Ok(ended) = timeout(limit, self.wait()).await {
            return ended;
        }
        tracing::warn!("{} did not end within {} s and is killed", self.name, limit.as_secs());
        let _ = self.child.kill(); // it may have ended meanwhile
        self.wait().await
    }

    fn signal(&self, signal: Signal) {
        // Until its end was seen, the number is its own.
        if let (None, Some(pid)) = (self.status, i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)) {
            let _ = kill_process(pid, signal); // it may have ended
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
    }
}

/// This program, as that agent.
fn agent(which: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg(which).env(CHILD_OF, std::process::id().to_string()).stdin(Stdio::null());
    command
}

fn server_words(
    command: &mut Command,
    url: &ServerUrl,
    user: Option<&str>,
    password: &Option<PathBuf>,
    args: &MigrateArgs,
) {
    command.args(["--server", &url.to_string()]);
    command.args(user.iter().flat_map(|user| ["--user", user]));
    if let Some(file) = password {
        command.arg("--password-file").arg(file);
    }
    if url.is_tls() {
        command.args(args.ends.tls.words());
    }
}

fn host_port(url: &ServerUrl) -> Option<String> {
    let (host, port) = url.host_and_port()?;
    Some(HostPort { host: host.to_owned(), port }.to_string())
}

/// The file with the token, in a folder of its own.
const TOKEN: &str = "token";

// What differs between two servers besides their data: a migration copies none of it.

/// Settings that every server has for itself, by the beginning of their names: addresses, files, secrets, its place in
/// a group, and the host's.
const OWN: [&str; 30] = [
    "aclfile",
    "appenddirname",
    "appendfilename",
    "bind",
    "cluster-",
    "daemonize",
    "dbfilename",
    "dir",
    "enable-",
    "ignore-warnings",
    "io-threads",
    "locale-collate",
    "logfile",
    "masterauth",
    "masteruser",
    "oom-score-adj",
    "pidfile",
    "port",
    "primaryauth",
    "primaryuser",
    "proc-title-template",
    "rdma-",
    "replica-announce",
    "replicaof",
    "requirepass",
    "server-cpulist",
    "slave-announce",
    "slaveof",
    "tls-",
    "unixsocket",
];

/// Settings that one line names at most; all are counted.
const NAMED: usize = 12;

/// The differences, a line for each kind.
///
/// # Errors
/// A connection failed. What a server does not tell is passed over.
async fn between(
    old: &mut Client,
    new: &mut Client,
    of_old: &Facts,
    of_new: &Facts,
) -> Result<Vec<String>, ServerError> {
    let mut lines = Vec::new();
    let missing = of_old.modules_missing_at(of_new);
    if !missing.is_empty() {
        lines.push(format!("modules that the new server lacks: {}", printable(&missing.join(", "))));
    }
    if let Some((data, limit)) = of_old.used_memory_dataset.zip(of_new.maxmemory).filter(|(_, limit)| *limit > 0)
        && data > limit
    {
        let (data, limit) = (Size::bytes(data), Size::bytes(limit));
        lines.push(format!(
            "maxmemory of the new server is {limit}, and the old one has {data} of data: raise it before a switch"
        ));
    }
    if let (Some(here), Some(there)) = (users(old).await?, users(new).await?) {
        let missing: Vec<_> = here.difference(&there).cloned().collect();
        if !missing.is_empty() {
            lines.push(format!("users that the new server lacks (ACL LIST, not copied): {}", shown(&missing)));
        }
    }
    if let (Some(here), Some(there)) = (settings(old).await?, settings(new).await?) {
        let other = differing(&here, &there);
        if !other.is_empty() {
            let differ =
                if other.len() == 1 { "1 setting differs".into() } else { format!("{} settings differ", other.len()) };
            lines.push(format!("{differ} (CONFIG GET *, not copied): {}", shown(&other)));
        }
    }
    Ok(lines)
}

async fn users(server: &mut Client) -> Result<Option<BTreeSet<String>>, ServerError> {
    let answer = optional(server.command(&["ACL", "USERS"]).await)?;
    Ok(answer.and_then(|answer| {
        Some(answer.as_array()?.iter().filter_map(|name| Some(printable(name.as_str()?).into_owned())).collect())
    }))
}

async fn settings(server: &mut Client) -> Result<Option<BTreeMap<String, String>>, ServerError> {
    let Some(answer) = optional(server.command(&["CONFIG", "GET", "*"]).await)? else { return Ok(None) };
    let words = answer.as_array().unwrap_or_default();
    let pair = |pair: &[Frame]| Some((pair.first()?.as_str()?.to_owned(), pair.get(1)?.as_str()?.to_owned()));
    Ok(Some(words.chunks_exact(2).filter_map(pair).collect()))
}

/// `None` if the server refuses to tell.
fn optional(answer: Result<Frame, ServerError>) -> Result<Option<Frame>, ServerError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.refusal().is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Settings that both have and that differ: name, old value, new value.
fn differing(here: &BTreeMap<String, String>, there: &BTreeMap<String, String>) -> Vec<String> {
    let is_own = |name: &str| OWN.iter().any(|own| name.starts_with(own));
    let both = here.iter().filter_map(|(name, value)| Some((name, value, there.get(name)?)));
    let other = both.filter(|(name, value, new)| value != new && !is_own(name));
    other.map(|(name, value, new)| format!("{name} {value:?} and {new:?}")).collect()
}

fn shown(names: &[String]) -> String {
    match names.len().checked_sub(NAMED) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names.get(..NAMED).unwrap_or_default().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Link;

    #[test]
    fn an_agents_code_is_the_commands() {
        assert_eq!(ended(Some(0), "it"), Ok(()));
        assert_eq!(ended(Some(6), "it").map_err(|failure| failure.code), Err(Code::SyncFailed));
        assert_eq!(ended(Some(101), "it").map_err(|failure| failure.code), Err(Code::Local));
        assert_eq!(ended(None, "it").map_err(|failure| failure.code), Err(Code::Local));
    }

    #[test]
    fn only_a_replica_in_step_follows() {
        let replid = "dc4a64ca756501f822cac70337e6c3488b20932f".parse().ok();
        let link = |up, syncing| Some(Link { host: "a".into(), port: 1, up: Some(up), syncing: Some(syncing) });
        let old = Facts { role: Some(Role::Primary), replid, ..Facts::default() };
        let new = |link| Facts { role: Some(Role::Replica), replid, link, ..Facts::default() };
        assert!(follows(&old, &new(link(true, false))));
        assert!(!follows(&old, &new(link(true, true))) && !follows(&old, &new(link(false, false))));
        assert!(!follows(&old, &old) && !follows(&Facts::default(), &new(link(true, false))));
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_setting_differs_if_both_have_it_and_it_is_no_servers_own() {
        let here =
            map(&[("maxmemory", "0"), ("port", "1"), ("requirepass", "secret"), ("only-here", "1"), ("hz", "10")]);
        let there = map(&[("maxmemory", "100"), ("port", "2"), ("requirepass", "other"), ("hz", "10")]);
        assert_eq!(differing(&here, &there), [r#"maxmemory "0" and "100""#]);
    }

    #[test]
    fn a_long_list_is_counted() {
        let names: Vec<String> = (0..15).map(|number| number.to_string()).collect();
        assert!(shown(&names).ends_with("11 and 3 more"), "{}", shown(&names));
        assert_eq!(shown(&names[..2]), "0, 1");
    }
}
