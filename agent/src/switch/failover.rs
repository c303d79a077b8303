//! The switch itself: `FAILOVER` at the old primary, and what both servers say until it is over.

use std::time::Duration;

use remora_redis::info::Info;
use tokio::time::{Instant, sleep};

use super::standing::Ready;
use crate::{
    exit::{Code, Failure},
    server::{Client, Facts, Role, ServerError},
    signals::Signals,
};

/// How often the servers are asked. `INFO replication` costs some tens of microseconds.
const POLL: Duration = Duration::from_millis(2);

/// How long the old primary may take to tell the new one to be the primary, after it has stepped down. It connects,
/// logs in and sends one command.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// How long the old primary may take to continue, after the new one was promoted.
const FOLLOW_LIMIT: Duration = Duration::from_secs(30);

/// How long no server takes writes after a handshake that was given up, so that the end of it that is still on its way
/// arrives before.
const SETTLE: Duration = Duration::from_millis(500);

/// How often a replica tells its primary how far it is: in the `replicationCron` of Redis and Valkey.
const ACK_PERIOD: Duration = Duration::from_millis(1_000);

/// How long before that the switch begins. A server's timer is some ten milliseconds late under load.
const ACK_LEAD: Duration = Duration::from_millis(30);

/// How long the switch waits to learn that moment.
const ACK_LIMIT: Duration = Duration::from_millis(1_500);

/// Where a failover is, by what the old primary says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It waits until the replica has all writes.
    Waits,
    /// It has stepped down, and tells the replica.
    HandsOver,
    /// The replica was told, and has agreed.
    Done,
    /// It is the primary as before.
    Undone,
}

impl Stage {
    /// Takes it from `INFO replication`.
    fn of(info: &Info) -> Stage {
        let is_replica = Facts::from_info(info).role == Some(Role::Replica);
        match info.get("master_failover_state") {
            Some("waiting-for-sync") => Stage::Waits,
            Some("failover-in-progress") => Stage::HandsOver,
            _ if is_replica => Stage::Done,
            _ => Stage::Undone,
        }
    }
}

/// Switches, and returns how long no server accepted writes.
///
/// A signal ends nothing here. The old primary may have told the new one already to be the primary, and to take a
/// `FAILOVER` back then makes two of them. The servers end it by themselves within the time that they were given.
///
/// # Errors
/// It did not happen; the message says what state the servers are in.
pub(super) async fn perform(ready: &mut Ready, limit: Duration, signals: &mut Signals) -> Result<Duration, Failure> {
    tokio::select! {
        waited = await_moment(ready) => waited?,
        name = signals.next() => {
            return Err(Failure::new(Code::Interrupted, format!("stopped by {name}: nothing was changed")));
        }
    }
    let began = Instant::now();
    begin(ready, limit).await?;
    let until = began + limit + HANDSHAKE_LIMIT;
    let mut signal = None;
    loop {
        let info = ready.old.info("replication").await.map_err(|error| unknown(ready, &error))?;
        match Stage::of(&info) {
            Stage::Done => break,
            Stage::Undone => return Err(undone(ready, limit, signal)),
            Stage::HandsOver if Instant::now() >= until => {
                take_back(ready).await?;
                break;
            }
            Stage::Waits | Stage::HandsOver => {}
        }
        tokio::select! {
            () = sleep(POLL) => {}
            name = signals.next() => signal = Some(name),
        }
    }
    let pause = await_promotion(ready, began).await?;
    if let Some(name) = signal {
        tracing::warn!("{name} came too late to stop the switch");
    }
    await_follower(ready).await;
    Ok(pause)
}

/// Waits until the replica is about to tell how far it is. The old primary steps down when it has heard that the
/// replica has everything, and writes wait for that word; a replica gives it once a second.
async fn await_moment(ready: &mut Ready) -> Result<(), Failure> {
    let until = Instant::now() + ACK_LIMIT;
    let mut before = None;
    while Instant::now() < until {
        let info = ready.old.info("replication").await?;
        let told = info.replicas().find(|replica| (&replica.ip, replica.port) == (&ready.listed.0, ready.listed.1));
        let told = told.map(|replica| replica.offset);
        if told.is_some() && told == info.number("master_repl_offset") {
            return Ok(()); // no client writes
        }
        if before.is_some_and(|before| before != told) {
            sleep(ACK_PERIOD - ACK_LEAD).await;
            return Ok(());
        }
        before = Some(told);
        sleep(POLL).await;
    }
    Ok(())
}

/// Has the old primary begin. A replica that is not in step is its own reason to refuse.
async fn begin(ready: &mut Ready, limit: Duration) -> Result<(), Failure> {
    let (port, milliseconds) = (ready.listed.1.to_string(), limit.as_millis().max(1).to_string());
    let words = ["FAILOVER", "TO", &ready.listed.0, &port, "TIMEOUT", &milliseconds];
    match ready.old.command(&words).await {
        Ok(_) => Ok(()),
        Err(ServerError::Refused { text, .. }) if text.starts_with("ERR FAILOVER") => {
            let old = ready.old.server().url();
            Err(Failure::new(Code::NotSwitched, format!("{old} refuses the switch, and goes on as it was: {text}")))
        }
        Err(error) if error.refusal().is_some() => Err(error.into()),
        // It may have got the command.
        Err(error) => Err(unknown(ready, &error)),
    }
}

/// Gives up a handshake that does not end: the old primary takes its place back. `Ok` if the new one is the primary
/// nevertheless, and the old one follows it now.
///
/// The new one may have been told, and not have answered yet. So it must answer here, as one that stands still could be
/// promoted when it wakes; and writes stay paused at the old one until what is on its way has arrived. (Redis 6.2 has
/// one pause for all purposes, which ends with the `FAILOVER`.)
async fn take_back(ready: &mut Ready) -> Result<(), Failure> {
    let (old, new) = (ready.old.server().url().to_string(), ready.new.server().url().to_string());
    let left_alone = |why: String| {
        let text = format!(
            "{old} has stepped down and cannot tell {new} to be the primary, and this is not taken back, since {why}: writes wait \
             at {old}. If {new} stays a replica, send FAILOVER ABORT to {old}"
        );
        Failure::new(Code::NotSwitched, text)
    };
    if let Err(error) = role_of(&mut ready.new).await {
        return Err(left_alone(format!("{new} does not answer and may be promoted when it does ({error})")));
    }
    let pause = (2 * SETTLE).as_millis().to_string();
    if let Err(error) = ready.old.command(&["CLIENT", "PAUSE", &pause, "WRITE"]).await {
        return Err(left_alone(format!("writes could not be paused ({error})")));
    }
    match ready.old.command(&["FAILOVER", "ABORT"]).await {
        Ok(_) => {}
        // It has ended by itself.
        Err(error) if error.refusal().is_some() => tracing::debug!(%error, "nothing to take back"),
        Err(error) => return Err(unknown(ready, &error)),
    }
    sleep(SETTLE).await;
    if role_of(&mut ready.new).await? == Some(Role::Primary) {
        let (host, port) = (ready.listed.0.clone(), ready.listed.1.to_string());
        ready.old.command(&["REPLICAOF", &host, &port]).await?;
        return Ok(());
    }
    ready.old.command(&["CLIENT", "UNPAUSE"]).await?;
    let text = format!(
        "{old} could not tell {new} to be the primary within {} s, and is the primary as before: look at its log, and at its \
         masteruser and masterauth",
        HANDSHAKE_LIMIT.as_secs()
    );
    Err(Failure::new(Code::NotSwitched, text))
}

/// Whether a server is a primary or a replica now.
pub(super) async fn role_of(server: &mut Client) -> Result<Option<Role>, ServerError> {
    Ok(Facts::from_info(&server.info("replication").await?).role)
}

fn undone(ready: &Ready, limit: Duration, signal: Option<&str>) -> Failure {
    let (old, new) = (ready.old.server().url(), ready.new.server().url());
    let why = format!(
        "{new} did not have all writes within {} s, or refused to be the primary (the log of {old} says which): {old} is the primary as before, and takes \
         writes",
        limit.as_secs_f64()
    );
    match signal {
        Some(name) => Failure::new(Code::Interrupted, format!("stopped by {name}; {why}")),
        None => {
            let text = format!("{why}; try again when less is written, or with a longer --max-pause");
            Failure::new(Code::NotSwitched, text)
        }
    }
}

fn unknown(ready: &Ready, error: &ServerError) -> Failure {
    Failure::new(
        Code::Server,
        format!(
            "{error}; whether {} has become the primary is not known: ask both servers for INFO replication",
            ready.new.server().url()
        ),
    )
}

/// Waits until the new server says that it is the primary. The old one has stepped down.
async fn await_promotion(ready: &mut Ready, began: Instant) -> Result<Duration, Failure> {
    let until = Instant::now() + HANDSHAKE_LIMIT;
    loop {
        let facts = Facts::from_info(&ready.new.info("replication").await.map_err(|error| unknown(ready, &error))?);
        if facts.role == Some(Role::Primary) {
            return Ok(began.elapsed());
        }
        if Instant::now() >= until {
            let (old, new) = (ready.old.server().url(), ready.new.server().url());
            let text = format!(
                "{old} has stepped down, and {new} is no primary: send REPLICAOF NO ONE to the one that is to take writes"
            );
            return Err(Failure::new(Code::NotSwitched, text));
        }
        sleep(POLL).await;
    }
}

/// Waits until the old primary is a replica in step. The switch is done, so whatever happens to it is a warning:
/// clients must be led to the new one.
async fn await_follower(ready: &mut Ready) {
    let until = Instant::now() + FOLLOW_LIMIT;
    let why = loop {
        match ready.old.info("replication").await {
            Ok(info) if Facts::from_info(&info).link.is_some_and(|link| link.up == Some(true)) => return,
            Ok(_) if Instant::now() < until => sleep(POLL).await,
            Ok(_) => break format!("its link is not up after {} s", FOLLOW_LIMIT.as_secs()),
            Err(error) => break error.to_string(),
        }
    };
    tracing::warn!("{} does not follow {} yet: {why}", ready.old.server().url(), ready.new.server().url());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stage_follows_from_what_the_old_primary_says() {
        let stage = |text: &str| Stage::of(&Info::parse(text.as_bytes()));
        assert_eq!(stage("role:master\r\nmaster_failover_state:waiting-for-sync\r\n"), Stage::Waits);
        assert_eq!(stage("role:slave\r\nmaster_failover_state:failover-in-progress\r\n"), Stage::HandsOver);
        assert_eq!(stage("role:slave\r\nmaster_failover_state:no-failover\r\n"), Stage::Done);
        assert_eq!(stage("role:master\r\nmaster_failover_state:no-failover\r\n"), Stage::Undone);
    }
}
