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

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use remora_redis::info::{Info, Replica};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::args::{HostPort, SwitchArgs};
use crate::exit::{Code, Failure};
use crate::progress;
use crate::server::own_changes::{Counted, OwnChanges};
use crate::server::permission::{Permission, TO_REPLICATE};
use crate::server::{Client, Credentials, Facts, Password, Role, Server, ServerError, Task, Version};
use crate::signals::Signals;

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
    let mut ready = match looked {
        Found::Already(text) => return progress::print_line(&text),
        Found::Ready(ready) => *ready,
    };
    if args.dry_run {
        return progress::print_line(&ready.would());
    }
    let pause = perform(&mut ready, args.max_pause, &mut signals).await?;
    let report = Report::of(&mut ready, pause).await;
    tracing::info!("{} is the primary, and {} follows it", report.new, report.old);
    if args.rewrite_config {
        rewrite_config(&mut ready).await;
    }
    let mut led = match &args.hook {
        Some(program) => run_hook(program, args.hook_timeout, (&report.old, &report.new)).await,
        None => Ok(()),
    };
    if led.is_ok() && args.close_clients {
        led = close_clients(&mut ready).await;
    }
    let told = match args.json {
        true => progress::print_json(&report),
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
    if role_of(&mut ready.old).await.map_err(failed)? != Some(Role::Replica) {
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
        let copies = full_copies(&mut ready.new).await;
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

// The switch itself: `FAILOVER` at the old primary, and what both servers say until it is over.

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
async fn perform(ready: &mut Ready, limit: Duration, signals: &mut Signals) -> Result<Duration, Failure> {
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
async fn role_of(server: &mut Client) -> Result<Option<Role>, ServerError> {
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

// What both servers must be before a switch: nothing is changed here.

/// The first version with `FAILOVER`, and with a pause of writes alone.
const FIRST: Version = Version { major: 6, minor: 2, patch: 0 };

/// The channel by which Sentinels find each other: each of them subscribes to it at each server that it watches.
const SENTINELS: &str = "__sentinel__:hello";

/// What a look at both servers has found.
enum Found {
    /// They stand as after a switch. The text says so.
    Already(String),
    Ready(Box<Ready>),
}

/// Two servers that can change their roles.
struct Ready {
    old: Client,
    new: Client,
    /// The new one, as the old one lists it among its replicas.
    listed: (String, u16),
    /// Full copies that the new one has served, before.
    full_copies: Option<u64>,
    /// Bytes that the new one has yet to execute.
    behind: u64,
}

impl Ready {
    /// What a switch would do.
    fn would(&self) -> String {
        let (old, new) = (self.old.server().url(), self.new.server().url());
        format!(
            "{new} can become the primary in the place of {old}, which lists it as {}:{}; it is {} bytes of the stream behind; \
             nothing was changed",
            self.listed.0, self.listed.1, self.behind
        )
    }
}

/// Looks at both servers.
///
/// # Errors
/// A server cannot be asked, or they cannot change their roles: [`Code::Refused`], with what to do.
async fn look(args: &SwitchArgs) -> Result<Found, Failure> {
    let (from, to) = (args.ends.open_from(TASK)?, args.ends.open_to(TASK)?);
    let (mut old, mut new) = tokio::try_join!(from.connect(), to.connect())?;
    let before = old.info("").await?;
    let (of_old, of_new) = (Facts::from_info(&before), Facts::read(&mut new).await?);
    match judge(&of_old, &of_new) {
        Standing::Switched => {
            return Ok(Found::Already(format!("{} is the primary already, and {} follows it", to.url(), from.url())));
        }
        Standing::Ready => {}
        Standing::Refused(why) => {
            let text = format!("{} cannot take the place of {}: {why}", to.url(), from.url());
            return Err(Failure::refused(text));
        }
        Standing::Later(why) => {
            let text = format!("{} cannot take the place of {} now: {why}; nothing was changed", to.url(), from.url());
            return Err(Failure::new(Code::NotSwitched, text));
        }
    }
    refuse_sentinels(&mut old).await?;
    refuse_an_inexact_replica(&mut new).await?;
    let ports = ports_of(&mut new, &of_new).await?;
    let listed = match &args.to_address {
        Some(HostPort { host, port }) => (host.clone(), *port),
        None => {
            let is_direct = follows_directly(&from, &of_old, &of_new).await;
            listed(&before, &ports, &addresses(args.ends.to.host_and_port()).await, is_direct)
                .map_err(|why| Failure::refused(format!("{} {why}", from.url())))?
        }
    };
    check_login(&mut old, &to, &of_new, &listed).await?;
    let full_copies = full_copies(&mut new).await;
    let behind = of_old.offset.unwrap_or(0).saturating_sub(of_new.offset.unwrap_or(0));
    Ok(Found::Ready(Box::new(Ready { old, new, listed, full_copies, behind })))
}

/// Full copies that a server has served since its start; `None` if it does not tell.
async fn full_copies(server: &mut Client) -> Option<u64> {
    server.info("stats").await.ok()?.number("sync_full")
}

/// How two servers stand to each other.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    Ready,
    /// As after a switch.
    Switched,
    /// Not without a change by someone.
    Refused(String),
    /// Not now.
    Later(String),
}

/// Decides by what the servers say of themselves.
fn judge(old: &Facts, new: &Facts) -> Standing {
    let refused = |why: &str| Standing::Refused(why.to_owned());
    let same_history = old.replid.is_some() && old.replid == new.replid;
    if old.run_id.is_some() && old.run_id == new.run_id {
        return refused("both addresses lead to the same server");
    }
    if old.cluster_enabled == Some(true) || new.cluster_enabled == Some(true) {
        return refused("they are in cluster mode: send CLUSTER FAILOVER to the new one");
    }
    match (old.role, new.role) {
        (Some(Role::Primary), Some(Role::Replica)) => {}
        (Some(Role::Replica), Some(Role::Primary)) if same_history => return Standing::Switched,
        (Some(Role::Replica), _) => return refused("the old one is no primary"),
        _ => return refused("it is not its replica: make it one (remora migrate, remora replica)"),
    }
    if [old, new].into_iter().any(|facts| facts.version.is_some() && !facts.has_redis(FIRST)) {
        return refused("both must be Redis 6.2 or later, or Valkey, which have the command FAILOVER");
    }
    let link = new.link.as_ref();
    if new.loading == Some(true) || link.is_some_and(|link| link.syncing == Some(true)) {
        return Standing::Later("it is taking a full copy".into());
    }
    if link.is_none_or(|link| link.up != Some(true)) {
        return Standing::Later("its link to its primary is down".into());
    }
    if !same_history {
        return refused("it follows another primary");
    }
    if !new.backlog.is_some_and(|backlog| backlog.active) {
        return refused("it keeps no backlog, so the old one could not follow it without a full copy");
    }
    Standing::Ready
}

/// Sentinels would undo the switch, or promote a third server.
async fn refuse_sentinels(old: &mut Client) -> Result<(), Failure> {
    let url = old.server().url().to_string();
    match old.command(&["PUBSUB", "NUMSUB", SENTINELS]).await {
        Ok(answer) => match answer.as_array().and_then(|words| words.get(1)?.as_int()) {
            Some(count) if count > 0 => Err(Failure::refused(format!(
                "Sentinels watch {url} ({count} subscribers of {SENTINELS}): set replica-priority 0 at all its other replicas, and \
                 send SENTINEL FAILOVER to a Sentinel"
            ))),
            _ => Ok(()),
        },
        Err(error) if error.refusal().is_some() => {
            tracing::warn!("whether Sentinels watch {url} is not known ({error}); they would undo the switch");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses a replica that does not hold what its primary holds.
async fn refuse_an_inexact_replica(new: &mut Client) -> Result<(), Failure> {
    let (counted, own) = (Counted::read(new).await?, OwnChanges::read(new).await?);
    let url = new.server().url();
    if let Some(errors) = counted.unexpected.filter(|errors| *errors > 0) {
        return Err(Failure::refused(format!(
            "{url} could not execute {errors} of its primary's commands (unexpected_error_replies; its log names them): compare the \
             two with remora verify; if they are the same, send it CONFIG RESETSTAT, else make it a replica again"
        )));
    }
    if own.as_ref().is_some_and(|own| own.is_writable) {
        return Err(Failure::refused(format!(
            "clients may write to {url} although it is a replica (replica-read-only no): set it to yes there, and compare the two \
             with remora verify"
        )));
    }
    if let Some(keys) = counted.evicted.filter(|keys| *keys > 0) {
        tracing::warn!("{url} has removed {keys} keys since its start because its memory was full");
    }
    Ok(())
}

/// Whether a replica is known to follow the old primary itself, and not another one of its replicas: the address that
/// it follows leads there.
async fn follows_directly(from: &Server, old: &Facts, new: &Facts) -> bool {
    let Some(link) = &new.link else { return false };
    if from.url().host_and_port() == Some((link.host.as_str(), link.port)) {
        return true;
    }
    let asked = async { Facts::read(&mut from.at(&link.host, link.port).connect().await?).await };
    let asked: Result<Facts, ServerError> = asked.await;
    // An address that leads nowhere from here proves nothing.
    asked.is_ok_and(|facts| facts.run_id.is_some() && facts.run_id == old.run_id)
}

/// The ports under which a primary may list this server.
async fn ports_of(new: &mut Client, facts: &Facts) -> Result<Vec<u16>, Failure> {
    let announced = match new.config_get("replica-announce-port").await {
        Ok(port) => port.and_then(|port| port.parse().ok()).filter(|port| *port != 0),
        Err(error) if error.refusal().is_some() => None,
        Err(error) => return Err(error.into()),
    };
    Ok([announced, facts.tcp_port, facts.tls_port].into_iter().flatten().collect())
}

/// A host's name, and the addresses that it leads to.
async fn addresses(place: Option<(&str, u16)>) -> Vec<String> {
    let Some((host, port)) = place else { return Vec::new() };
    let found = tokio::net::lookup_host((host, port)).await.into_iter().flatten();
    found.map(|address| address.ip().to_string()).chain([host.to_owned()]).collect()
}

/// The replica with one of these ports and addresses, as its primary lists it. One that is listed with another address
/// is it if `is_direct` and there is no other: its primary may see it behind a translation of addresses.
fn listed(info: &Info, ports: &[u16], hosts: &[String], is_direct: bool) -> Result<(String, u16), String> {
    let with_port: Vec<Replica> = info.replicas().filter(|replica| ports.contains(&replica.port)).collect();
    let here: Vec<&Replica> = with_port.iter().filter(|replica| hosts.contains(&replica.ip)).collect();
    match (&here[..], &with_port[..]) {
        ([one], _) => Ok((one.ip.clone(), one.port)),
        ([], [one]) if is_direct => Ok((one.ip.clone(), one.port)),
        ([], [] | [_]) => Err(format!(
            "lists no replica at {hosts:?} with the port {ports:?} (INFO replication): the new one may follow another replica; if \
             it follows this one, name it with --to-address as it is listed"
        )),
        _ => Err("lists several replicas with that port: name the new one with --to-address as it is listed".into()),
    }
}

/// Checks that the old primary's login for replication (`masteruser`, `masterauth`) is valid at the new one. Without it
/// the old primary could not follow.
async fn check_login(old: &mut Client, to: &Server, new: &Facts, listed: &(String, u16)) -> Result<(), Failure> {
    let (user, password) = match (old.config_bytes("masteruser").await, old.config_bytes("masterauth").await) {
        (Ok(user), Ok(password)) => (user, password),
        (Err(error), _) | (_, Err(error)) if error.refusal().is_some() => {
            tracing::warn!(
                "whether {} may log in at {} to follow it is not known: it does not tell its masterauth (CONFIG GET)",
                old.server().url(),
                to.url()
            );
            return Ok(());
        }
        (Err(error), _) | (_, Err(error)) => return Err(error.into()),
    };
    let given = |value: Option<Vec<u8>>| value.filter(|value| !value.is_empty());
    let password = given(password).map(Password::new);
    let credentials = Credentials { user: given(user).filter(|_| password.is_some()), password };
    let refused = |why: String| {
        Failure::refused(format!(
            "{} could not follow {}:{}: {why}; set masteruser and masterauth there first",
            old.server().url(),
            listed.0,
            listed.1
        ))
    };
    let mut client = match to.with_login(credentials).connect().await {
        Ok(client) => client,
        Err(error) if error.refusal().is_some() => return Err(refused(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    for needed in TO_REPLICATE {
        if let Permission::Refused(error) = needed.ask(&mut client, new).await? {
            return Err(refused(error.to_string()));
        }
    }
    Ok(())
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
    use crate::server::{Backlog, Link};

    #[test]
    fn the_stage_follows_from_what_the_old_primary_says() {
        let stage = |text: &str| Stage::of(&Info::parse(text.as_bytes()));
        assert_eq!(stage("role:master\r\nmaster_failover_state:waiting-for-sync\r\n"), Stage::Waits);
        assert_eq!(stage("role:slave\r\nmaster_failover_state:failover-in-progress\r\n"), Stage::HandsOver);
        assert_eq!(stage("role:slave\r\nmaster_failover_state:no-failover\r\n"), Stage::Done);
        assert_eq!(stage("role:master\r\nmaster_failover_state:no-failover\r\n"), Stage::Undone);
    }

    fn pair() -> (Facts, Facts) {
        let replid = "dc4a64ca756501f822cac70337e6c3488b20932f".parse().ok();
        let of =
            |role, run_id: &str| Facts { role: Some(role), run_id: Some(run_id.into()), replid, ..Facts::default() };
        let link = Link { host: "a".into(), port: 1, up: Some(true), syncing: Some(false) };
        let backlog = Backlog { active: true, size: 1 << 20, first: 1, held: 0 };
        let new = Facts { link: Some(link), backlog: Some(backlog), ..of(Role::Replica, "new") };
        (of(Role::Primary, "old"), new)
    }

    #[test]
    fn two_servers_that_can_change_their_roles_are_told_from_others() {
        let (old, new) = pair();
        assert_eq!(judge(&old, &new), Standing::Ready);
        assert_eq!(judge(&new, &old), Standing::Switched);
        assert!(matches!(judge(&old, &old), Standing::Refused(why) if why.contains("same server")));
        type Change = fn(&mut Facts, &mut Facts);
        let changed: [(Change, &str); 6] = [
            (|old, _| old.cluster_enabled = Some(true), "CLUSTER FAILOVER"),
            (|_, new| new.role = Some(Role::Primary), "not its replica"),
            (|old, _| old.role = Some(Role::Replica), "no primary"),
            (|_, new| new.replid = None, "another primary"),
            (|_, new| new.backlog = None, "no backlog"),
            (|old, _| old.version = "6.0.16".parse().ok(), "6.2 or later"),
        ];
        for (change, words) in changed {
            let (mut old, mut new) = pair();
            change(&mut old, &mut new);
            assert!(matches!(judge(&old, &new), Standing::Refused(why) if why.contains(words)), "{words}");
        }
        for change in [|link: &mut Link| link.up = Some(false), |link: &mut Link| link.syncing = Some(true)] {
            let (old, mut new) = pair();
            change(new.link.as_mut().unwrap());
            assert!(matches!(judge(&old, &new), Standing::Later(_)));
        }
    }

    #[test]
    fn the_new_primary_is_found_among_the_replicas_by_its_port_and_address() {
        let info = Info::parse(
            b"slave0:ip=10.0.0.1,port=6379,state=online,offset=1,lag=0\r\nslave1:ip=10.0.0.2,port=6379,state=online,offset=1,lag=0\r\n\
              slave2:ip=10.0.0.3,port=6380,state=online,offset=1,lag=0\r\n",
        );
        let hosts = |hosts: &[&str]| hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>();
        assert_eq!(listed(&info, &[6379], &hosts(&["10.0.0.2"]), false).unwrap(), ("10.0.0.2".into(), 6379));
        assert_eq!(listed(&info, &[6380, 6390], &hosts(&["127.0.0.1"]), true).unwrap(), ("10.0.0.3".into(), 6380));
        assert!(listed(&info, &[6380], &hosts(&["127.0.0.1"]), false).unwrap_err().contains("another replica"));
        assert!(listed(&info, &[6379], &hosts(&["127.0.0.1"]), true).unwrap_err().contains("several"));
        assert!(listed(&info, &[7000], &hosts(&["10.0.0.1"]), true).unwrap_err().contains("lists no replica"));
    }

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
