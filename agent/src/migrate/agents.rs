//! The two agents, as processes of this program.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::ended;
use crate::{
    args::{HostPort, MigrateArgs, TokenAction, TokenCommandArgs},
    events,
    exit::{Code, Failure},
    server::ServerUrl,
    signals::{CHILD_OF, Signals},
};

/// How long a source may take until it listens. It waits for its server for five minutes itself.
const READY_LIMIT: Duration = Duration::from_secs(330);

/// How long an agent may take to end after it was told to.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Pause between two looks whether an agent has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Both agents at work.
pub(super) struct Agents {
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
    pub(super) async fn start(args: &MigrateArgs, signals: &mut Signals) -> Result<Agents, Failure> {
        let source = match &args.source {
            Some(_) => None,
            None => Some(Source::start(args, signals).await?),
        };
        let mut command = agent("replica");
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
    pub(super) async fn finish(mut self, signals: &mut Signals) -> Result<(), Failure> {
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
    async fn start(args: &MigrateArgs, signals: &mut Signals) -> Result<Source, Failure> {
        let no_folder = |error| Failure::local(format!("no folder for the token could be made: {error}"));
        let folder = tempfile::Builder::new().prefix("remora-migrate-").tempdir().map_err(no_folder)?;
        let token = folder.path().join(TOKEN);
        crate::token::run(&TokenCommandArgs { action: TokenAction::New { file: token.clone() } })?;
        let mut command = agent("source");
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
            reader.map_err(|error| Failure::local(format!("no thread could be started: {error}")))?;
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
                Err(Failure::new(Code::Source, "the source did not begin to listen"))
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
        let fields = &said["fields"];
        let text = fields["message"].as_str().unwrap_or_default();
        match said["level"].as_str() {
            Some("ERROR" | "WARN") => tracing::warn!("source: {text}"),
            _ => tracing::debug!("source: {text}"),
        }
        if let (Some(events::SOURCE_READY), Some(address)) = (fields["event"].as_str(), fields["listening"].as_str())
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
