//! `remora switch`: a replica becomes the primary, and its primary follows it.
//!
//! ```text
//!   look ── both servers are looked at, nothing is changed ──▶ refused │ dry run: what would happen │ done already
//!     │
//!   sentinels ── the new one becomes the best replica, if Sentinels watch the old one
//!     │
//!   exchange ── the old primary pauses writes, and steps down; the new one is promoted when it holds all writes
//!     │            └─ not in time, or a signal: the old primary goes on
//!   sentinels ── name the new primary
//!     │
//!   hook ─── leads clients to the new primary
//!     │
//!   the old one's clients are closed, if that is wanted
//! ```
//!
//! - [`exchange`]: the order of the steps, and what is undone. Pure, and played by the simulation. **Start here.**
//! - [`orders`]: carries them out.
//! - [`look`](mod@look): what both servers must be before.
//! - [`sentinels`]: the primary's name at its Sentinels.
//!
//! A command that is killed leaves no pause behind, since the pause ends by the time that the server was given. Where
//! it stood, the servers say: the same command goes on there.

mod exchange;
mod look;
#[cfg(test)]
mod model;
mod orders;
mod sentinels;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};

use self::exchange::{End, Follower, Open, Seen, Side, Why};
use self::look::{Found, full_copies, look};
use self::orders::{Outcome, Ready, perform};
use self::sentinels::Name;
use crate::args::SwitchArgs;
use crate::exit::{Code, Failure};
use crate::progress;
use crate::server::{Role, ServerError, Task};
use crate::signals::Signals;
use crate::units::counted;

/// What the connections are for.
const TASK: Task = Task::Switch;

/// Runs `remora switch`.
///
/// # Errors
/// The servers are not as they must be, or the switch did not happen. The message says where writes go.
pub async fn run(args: SwitchArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let looked = tokio::select! {
        found = look(&args) => found?,
        name = signals.next() => {
            return Err(Failure::new(Code::Interrupted, format!("stopped by {name}: nothing was changed")));
        }
    };
    let (mut ready, is_done) = match looked {
        // A former run may have ended before its clients were led.
        Found::Switched(ready) => (*ready, true),
        Found::Ready(ready) => (*ready, false),
    };
    let mut name = match args.sentinel.open()? {
        Some(sentinels) => Some(Name::look(sentinels, &mut ready).await?),
        None => None,
    };
    if is_done {
        let (old, new) = ready.urls();
        progress::print_line(&format!("{new} is the primary already, and {old} follows it"))?;
        if args.dry_run {
            return Ok(());
        }
        prepare(&mut name, &mut ready, &mut signals).await?;
        return finish(&args, &mut ready, &mut name).await;
    }
    if args.dry_run {
        let moves = name.as_ref().map_or_else(String::new, |name| format!("; {} would move with it", name.name()));
        return progress::print_line(&format!("{}{moves}", ready.would()));
    }
    for side in [Side::Old, Side::New] {
        ready.told(side).take_over().await?;
    }
    prepare(&mut name, &mut ready, &mut signals).await?;
    let outcome = perform(&mut ready, args.max_pause, &mut signals).await;
    // If it is open which one is the primary, the Sentinels may decide, and must choose the new one.
    if let (Some(name), End::Undone { .. }) = (&mut name, &outcome.end) {
        name.set_back(&mut ready.new, false).await;
    }
    let (pause, follows) = switched(&ready.urls(), args.max_pause, outcome)?;
    let mut report = Report::of(&mut ready, pause, follows).await;
    tracing::info!("{} is the primary, and {} {}", report.new, report.old, report.how_the_old_one_follows());
    let led = finish(&args, &mut ready, &mut name).await;
    report.sentinel_name = name.filter(Name::is_moved).map(|name| name.name().to_owned());
    let told = match args.json {
        true => progress::print_json(&report),
        false => progress::print_line(&report.text()),
    };
    led.and(told)
}

/// How long no server accepted writes, and whether the old primary follows; or why the roles were not changed.
fn switched((old, new): &(String, String), limit: Duration, outcome: Outcome) -> Result<(Duration, bool), Failure> {
    let Outcome { end, error, signal } = outcome;
    let because = error.map_or_else(String::new, |error| format!("{error}; "));
    let not_switched = |text: String| Err(Failure::new(Code::NotSwitched, text));
    match end {
        End::Switched { pause, follower } => {
            if let Some(name) = signal {
                tracing::warn!("{name} came too late to stop the switch");
            }
            match follower {
                Follower::InStep => {}
                Follower::NotYet => {
                    tracing::warn!("{old} does not follow {new} yet: its link is not up, and its log says why")
                }
                Follower::Lost => tracing::warn!(
                    "{because}whether {old} follows {new} is not known: if it comes back as a primary, send REPLICAOF to it"
                ),
            }
            Ok((pause, follower == Follower::InStep))
        }
        End::Undone { why: Why::Changed, stepped_down: false } => {
            not_switched(format!("somebody else has changed {old} or {new}, and they were left so: look at both"))
        }
        End::Undone { why, .. } => {
            let as_before = format!("{old} is the primary as before, and takes writes");
            match why {
                Why::Signal => {
                    let name = signal.unwrap_or("a signal");
                    Err(Failure::new(Code::Interrupted, format!("stopped by {name}; {as_before}")))
                }
                Why::NotInTime => not_switched(format!(
                    "{new} did not have all writes within {} s: {as_before}; try again when less is written, or with a longer \
                     --max-pause",
                    limit.as_secs_f64()
                )),
                Why::Lost(Side::Old) => {
                    not_switched(format!("{because}{as_before}, in {} s at the latest", limit.as_secs_f64()))
                }
                Why::Lost(Side::New) | Why::Refused(_) => not_switched(format!("{because}{as_before}")),
                Why::Changed => not_switched(format!("{new} was changed by somebody else: {as_before}")),
            }
        }
        End::Open(open) => {
            let again = "call the same command again, which finishes or undoes it";
            let (code, text) = match open {
                Open::StepDown => (
                    Code::Server,
                    format!("whether {old} has stepped down is not known, and {new} was not promoted: {again}"),
                ),
                Open::Promotion => (
                    Code::Server,
                    format!("{old} has stepped down, and whether {new} has become the primary is not known: {again}"),
                ),
                Open::TakeBack => (
                    Code::NotSwitched,
                    format!(
                        "{old} has stepped down, and could not be made the primary again; {new} was not promoted: {again}"
                    ),
                ),
                Open::Another => (
                    Code::NotSwitched,
                    format!(
                        "another switch, or somebody else, has changed {old} or {new} meanwhile, and decides which one is the primary: look \
                         at both"
                    ),
                ),
                Open::Apart => (
                    Code::NotSwitched,
                    format!(
                        "{old} has stepped down, and {new} does not hold what it does: somebody has changed them, or one was \
                         restarted; send REPLICAOF NO ONE to the one that is to take writes"
                    ),
                ),
            };
            Err(Failure::new(code, format!("{because}{text}")))
        }
    }
}

/// Makes the new one the best replica for the Sentinels, if there are some.
async fn prepare(name: &mut Option<Name>, ready: &mut Ready, signals: &mut Signals) -> Result<(), Failure> {
    let Some(name) = name else { return Ok(()) };
    let prepared = tokio::select! {
        prepared = name.make_best(&mut ready.new) => prepared,
        name = signals.next() => {
            Err(Failure::new(Code::Interrupted, format!("stopped by {name}: neither server has changed its role")))
        }
    };
    if prepared.is_err() {
        name.set_back(&mut ready.new, false).await;
    }
    prepared
}

/// What follows a switch: the Sentinels and the servers note the roles, and clients are led.
async fn finish(args: &SwitchArgs, ready: &mut Ready, name: &mut Option<Name>) -> Result<(), Failure> {
    let (old, new) = ready.urls();
    let mut led = Ok(());
    if let Some(name) = name {
        led = name.follow().await;
        // Where they have not moved the name, they may do it later, and must choose this one then.
        if led.is_ok() {
            name.set_back(&mut ready.new, true).await;
        }
    }
    if args.rewrite_config {
        rewrite_config(ready).await;
    }
    if let (Ok(()), Some(program)) = (&led, &args.hook) {
        led = run_hook(program, args.hook_timeout, (&old, &new)).await;
    }
    if led.is_ok() && args.close_clients {
        led = close_clients(ready).await;
    }
    led.map_err(|why| {
        let text = format!(
            "the switch is done: {new} is the primary; but {why}, so clients may still be at {old}: lead them by hand, or switch back"
        );
        Failure::new(Code::HookFailed, text)
    })
}

/// Has both servers note their roles. One that cannot is named; the switch is done.
async fn rewrite_config(ready: &mut Ready) {
    for side in [Side::Old, Side::New] {
        let told = ready.told(side);
        if let Err(error) = told.command(&["CONFIG", "REWRITE"]).await {
            tracing::warn!(%error, "{} has not noted its role: a restart undoes it", told.url());
        }
    }
}

/// Closes the connections of clients at the old primary, unless somebody has made it the primary again meanwhile.
async fn close_clients(ready: &mut Ready) -> Result<(), String> {
    let failed = |error: ServerError| format!("its clients' connections could not be closed ({error})");
    let seen = Seen::of(&ready.old.info("replication").await.map_err(failed)?);
    if seen.role != Some(Role::Replica) {
        return Err("the old one is no replica any more, and the connections of its clients were left alone".into());
    }
    let closed = ready.old.command(&["CLIENT", "KILL", "TYPE", "normal"]).await.map_err(failed)?;
    tracing::info!("closed {} of clients at {}", counted(closed.as_int().unwrap_or(0), "connection"), ready.old.url());
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
    /// The other replicas of the old primary. They stay with it, unless Sentinels make them follow the new one.
    others: Vec<String>,
    /// The primary's name at the Sentinels, if it has moved.
    sentinel_name: Option<String>,
    /// Whether the old primary's link to the new one was up at the end.
    follows: bool,
    /// Whether the old primary has continued at its offset: it needed no full copy. `None` if that is not known.
    continued: Option<bool>,
}

impl Report {
    async fn of(ready: &mut Ready, pause: Duration, follows: bool) -> Report {
        let copies = full_copies(ready.new.info("stats").await);
        Report {
            old: ready.old.url().to_string(),
            new: ready.new.url().to_string(),
            others: ready.others.clone(),
            pause_seconds: pause.as_secs_f64(),
            sentinel_name: None,
            follows,
            continued: copies.zip(ready.full_copies).filter(|_| follows).map(|(now, before)| now == before),
        }
    }

    fn how_the_old_one_follows(&self) -> &'static str {
        match (self.follows, self.continued) {
            (false, _) => "does not follow it yet",
            (true, Some(true)) => "follows it without a full copy",
            (true, Some(false)) => {
                "follows it after a full copy: the new one's backlog did not reach back to the switch"
            }
            (true, None) => "follows it",
        }
    }

    fn text(&self) -> String {
        let Report { old, new, others, pause_seconds, sentinel_name, .. } = self;
        let how = self.how_the_old_one_follows();
        let named = sentinel_name.as_ref().map_or_else(String::new, |name| format!("\nit is {name} at the Sentinels"));
        let stay = match (&others[..], sentinel_name) {
            ([], _) => String::new(),
            (others, None) => format!("\nits other replicas stay behind it: {}", others.join(", ")),
            (others, Some(_)) => format!("\nthe Sentinels make the other replicas follow it: {}", others.join(", ")),
        };
        format!(
            "{new} is the primary since a pause of {:.0} ms; {old} {how}{named}{stay}\nback: remora switch --from {new} --to {old}",
            pause_seconds * 1000.0
        )
    }
}

// The program that leads clients to the new primary.

/// Pause between two looks whether the program has ended.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Runs the program with the addresses of the old and the new primary, and waits for its end. Its output is our stderr:
/// our stdout is for results.
///
/// # Errors
/// Why clients may not have been led there.
async fn run_hook(program: &Path, limit: Duration, (old, new): (&str, &str)) -> Result<(), String> {
    let named = format!("the hook {}", program.display());
    let mut command = Command::new(program);
    command.args([old, new]).stdin(Stdio::null()).stdout(std::io::stderr());
    let mut child = command.spawn().map_err(|error| format!("{named} could not be started ({error})"))?;
    let until = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("{named} has failed ({status})")),
            Err(error) => return Err(format!("{named} could not be waited for ({error})")),
            Ok(None) if Instant::now() >= until => {
                let _ = child.kill().and_then(|()| child.wait()); // it may have ended meanwhile
                let limit = limit.as_secs_f64();
                return Err(format!("{named} did not end within {limit} s and was killed (--hook-timeout)"));
            }
            Ok(None) => sleep(LOOK_EVERY).await,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    async fn ran(script: &str) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hook");
        let mut file = std::fs::File::options().create_new(true).write(true).mode(0o755).open(&program).unwrap();
        file.write_all(format!("#!/bin/sh\n{script}\n").as_bytes()).unwrap();
        drop(file);
        run_hook(&program, Duration::from_millis(300), ("redis://a:1", "redis://b:2")).await
    }

    #[tokio::test]
    async fn it_gets_both_addresses_and_its_failure_is_told() {
        assert_eq!(ran(r#"test "$1 $2" = "redis://a:1 redis://b:2""#).await, Ok(()));
        assert!(ran("exit 3").await.unwrap_err().contains("has failed (exit status: 3)"));
        assert!(ran("exec sleep 60").await.unwrap_err().contains("--hook-timeout"));
        let missing = run_hook(Path::new("/nowhere/hook"), Duration::from_secs(1), ("a", "b")).await;
        assert!(missing.unwrap_err().contains("could not be started"));
    }
}
