//! Guard: a process of this program that outlives a killed agent, and gives its server the login to its primary back.
//!
//! ```text
//!   agent ── starts ──▶ guard: reads a pipe, and nothing else
//!   agent ends: the pipe ends ──▶ the record names no login ─────────────────────────▶ ends
//!                                 the server has no password of its own ─────────────▶ puts masterauth back, ends
//!                                 it has one, and still follows the link that is gone ▶ looks again, each second
//!                                 it follows another server ─────────────────────────▶ puts masterauth back, ends
//! ```
//!
//! While a server follows the link, its `masterauth` is the [link's secret](super::link_login). An agent that is killed
//! leaves it there, and then the server can follow no primary: each refuses the login. The next agent puts the setting
//! back; without one, the guard does. A password of the server's own stays away from the link's address, where any
//! process may listen by now.
//!
//! Only this setting is put back. A server that holds half a data set must not save it over its file. Decision 25 says
//! why this is a process.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::record::Record;
use crate::args::ReplicaArgs;
use crate::exit::{Code, Failure};
use crate::server::{Facts, Task};
use crate::signals::{CHILD_OF, Signals};

/// The variable by which the agent's program knows that it is to be the guard. Its value is the agent's process id.
const VARIABLE: &str = "REMORA_GUARD_OF";

/// The guard's name in a list of processes.
const NAME: &str = "remora-guard";

/// Variables that are for the agent only: of the service manager, and of a command that has started the agent. The
/// guard must outlive that one too.
const OF_THE_AGENT: [&str; 5] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", CHILD_OF];

/// Pause between two looks at the server.
const PACE: Duration = Duration::from_secs(1);

/// How long the guard looks for a server that does not answer. One that comes back later has restarted, and has the
/// password of its configuration.
const SILENCE_LIMIT: Duration = Duration::from_secs(120);

/// How long the guard waits for someone to point the server at another primary. Longer than a night.
const WATCH_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// Set where this process is the command `remora replica`, so that its arguments are a guard's. A test that runs an
/// agent is not.
static IS_COMMAND: AtomicBool = AtomicBool::new(false);

/// Notes that this process is the command `remora replica`.
pub(crate) fn this_is_the_command() {
    IS_COMMAND.store(true, Ordering::Relaxed);
}

/// The agent's end of the pipe. The guard acts when it is closed: by its drop, or by the agent's end.
pub(super) struct Guard(#[allow(dead_code)] Child); // held for its pipe

impl Guard {
    /// Starts a guard with this process's own arguments. `None` if the system starts none: the next agent puts the
    /// setting back.
    pub(super) fn start() -> Option<Guard> {
        if !IS_COMMAND.load(Ordering::Relaxed) {
            return None;
        }
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).args(std::env::args_os().skip(1)).env(VARIABLE, std::process::id().to_string());
        OF_THE_AGENT.iter().for_each(|name| _ = command.env_remove(name));
        // A signal to the agent's group is not for the guard. Who reads the agent's output waits for the agent only.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        match command.spawn() {
            Ok(child) => Some(Guard(child)),
            Err(error) => {
                tracing::debug!(%error, "no guard for the server's masterauth could be started");
                None
            }
        }
    }
}

/// Whether this process was started as a guard.
pub(crate) fn is_asked() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// What a look has found.
enum Found {
    /// Nothing is left to do.
    Done,
    /// The server still follows the link, and has a password of its own.
    AtTheLink,
}

/// Runs a guard to its end.
///
/// # Errors
/// Signals cannot be caught.
pub(crate) async fn run(args: ReplicaArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let mut ended = tokio::task::spawn_blocking(|| {
        // Nothing is ever written to the pipe.
        let _ = std::io::stdin().read(&mut [0]);
    });
    loop {
        tokio::select! {
            _ = &mut ended => break,
            _ = signals.next() => {} // the agent was asked to stop, and may not live to do it
        }
    }
    let began = Instant::now();
    let mut answered = began;
    while answered.elapsed() < SILENCE_LIMIT && began.elapsed() < WATCH_LIMIT {
        match look(&args).await {
            Ok(Found::Done) => return Ok(()),
            Ok(Found::AtTheLink) => answered = Instant::now(),
            Err(failure) => tracing::debug!("{failure}"),
        }
        tokio::select! {
            () = tokio::time::sleep(PACE) => {}
            _ = signals.next() => return Ok(()),
        }
    }
    Ok(())
}

async fn look(args: &ReplicaArgs) -> Result<Found, Failure> {
    let server = args.server.open(Task::Replica)?;
    let (state_dir, url) = (args.state_dir.as_deref(), server.url().to_string());
    let record = Record::open(state_dir, &url)?;
    if !record.has_login() {
        return Ok(Found::Done);
    }
    let mut client = server.connect().await?;
    let facts = Facts::read(&mut client).await?;
    let is_at_the_link = facts.link.as_ref().is_some_and(|link| record.is_our_link(&link.host, link.port));
    if is_at_the_link && record.has_password() {
        return Ok(Found::AtTheLink);
    }
    let mut record = match Record::claim(state_dir, &url) {
        Ok(record) => record,
        // Another agent works on the server, and has put the setting back or needs it.
        Err(failure) if failure.code == Code::Refused => return Ok(Found::Done),
        Err(failure) => return Err(failure),
    };
    record.put_the_login_back(&mut client).await?;
    // The file stays for the next agent: it also says which primary the server followed before.
    record.save_if_stale();
    Ok(Found::Done)
}
