//! `remora switch`: a replica becomes the primary, and its primary follows it.
//!
//! ```text
//!   standing ── both servers are looked at, nothing is changed ──▶ refused │ dry run: what would happen │ done already
//!       │
//!   failover ── FAILOVER TO replica at the old primary: it pauses writes, waits for the replica, and steps down
//!       │          └─ not in time, or a signal: the old primary goes on, nothing is changed
//!   hook ─── leads clients to the new primary
//!       │
//!   the old one's clients are closed, if that is wanted
//! ```
//!
//! The order is the servers' own: the old primary steps down *before* the new one is promoted, and takes its place back
//! if the new one refuses. A command that is killed leaves no pause behind, since the pause ends by the time that the
//! server was given.

mod failover;
mod hook;
mod standing;

use std::time::Duration;

use serde::Serialize;

use self::standing::{Found, Ready};
use crate::{
    args::SwitchArgs,
    exit::{Code, Failure},
    progress,
    server::{Role, ServerError, Task},
    signals::Signals,
};

/// Runs `remora switch`.
///
/// # Errors
/// The servers are not as they must be, or the switch did not happen. The message says where writes go.
pub async fn run(args: SwitchArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let looked = tokio::select! {
        found = standing::look(&args) => found?,
        name = signals.next() => {
            return Err(Failure::new(Code::Interrupted, format!("stopped by {name}: nothing was changed")));
        }
    };
    let mut ready = match looked {
        Found::Already(text) => return progress::print_line(&text),
        Found::Ready(ready) => *ready,
    };
    if args.dry_run {
        return progress::print_line(&ready.would());
    }
    let pause = failover::perform(&mut ready, args.max_pause, &mut signals).await?;
    let report = Report::of(&mut ready, pause).await;
    tracing::info!("{} is the primary, and {} follows it", report.new, report.old);
    if args.rewrite_config {
        rewrite_config(&mut ready).await;
    }
    let mut led = match &args.hook {
        Some(program) => hook::run(program, args.hook_timeout, (&report.old, &report.new)).await,
        None => Ok(()),
    };
    if led.is_ok() && args.close_clients {
        led = close_clients(&mut ready).await;
    }
    let told = match args.json {
        true => progress::print_line(&serde_json::to_string(&report).unwrap_or_default()),
        false => progress::print_line(&report.text()),
    };
    led.map_err(|why| hook_failed(&report, &why)).and(told)
}

fn hook_failed(report: &Report, why: &str) -> Failure {
    let text = format!(
        "the switch is done: {} is the primary; but {why}, so clients may still be at {}: lead them by hand, or switch back",
        report.new, report.old
    );
    Failure::new(Code::HookFailed, text)
}

/// Has both servers note their roles. One that cannot is named; the switch is done.
async fn rewrite_config(ready: &mut Ready) {
    for server in [&mut ready.old, &mut ready.new] {
        if let Err(error) = server.command(&["CONFIG", "REWRITE"]).await {
            tracing::warn!(%error, "{} has not noted its role: a restart undoes it", server.server().url());
        }
    }
}

/// Closes the connections of clients at the old primary, unless somebody has made it the primary again meanwhile.
async fn close_clients(ready: &mut Ready) -> Result<(), String> {
    let failed = |error: ServerError| format!("its clients' connections could not be closed ({error})");
    if failover::role_of(&mut ready.old).await.map_err(failed)? != Some(Role::Replica) {
        return Err("the old one is no replica any more, and the connections of its clients were left alone".into());
    }
    let closed = ready.old.command(&["CLIENT", "KILL", "TYPE", "normal"]).await.map_err(failed)?;
    tracing::info!(
        "{} connections of clients were closed at {}",
        closed.as_int().unwrap_or(0),
        ready.old.server().url()
    );
    Ok(())
}

/// What a switch has done.
#[derive(Debug, Serialize)]
struct Report {
    /// The address of the old primary.
    old: String,
    /// The address of the new one.
    new: String,
    /// Seconds during which the old primary accepted no writes and the new one not yet.
    pause_seconds: f64,
    /// Whether the old primary has continued at its offset: it needed no full copy. `None` if that is not known.
    continued: Option<bool>,
}

impl Report {
    async fn of(ready: &mut Ready, pause: Duration) -> Report {
        let copies = standing::full_copies(&mut ready.new).await;
        Report {
            old: ready.old.server().url().to_string(),
            new: ready.new.server().url().to_string(),
            pause_seconds: pause.as_secs_f64(),
            continued: copies.zip(ready.full_copies).map(|(now, before)| now == before),
        }
    }

    fn text(&self) -> String {
        let Report { old, new, pause_seconds, continued } = self;
        let how = match continued {
            Some(true) => " without a full copy",
            Some(false) => " after a full copy: the new one's backlog did not reach back to the switch",
            None => "",
        };
        format!(
            "{new} is the primary since a pause of {:.0} ms; {old} follows it{how}\nback: remora switch --from {new} --to {old}",
            pause_seconds * 1000.0
        )
    }
}

/// What the connections are for.
const TASK: Task = Task::Switch;
