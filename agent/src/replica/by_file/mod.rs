//! Delivery by file: the snapshot becomes the server's RDB file, and the server is restarted on it.
//!
//! ```text
//!   preflight ──▶ fetch ──▶ no saves (CONFIG SET save "") ──▶ file in its place ──▶ restart ──▶ loads ──▶ +CONTINUE
//!   nothing is    beside     the server must not write over it     the former one     the operator's    in step:
//!   touched       its place  when it ends                          stays beside       command           saves as before
//! ```
//!
//! - [`place`] proves that the server's file is here; [`fitness`] that the server will load it, as a replica.
//! - [`restart`] runs the command, and [`back`] waits for the server.
//!
//! What must hold:
//! - Before the file has its place, a failure leaves the server as it was.
//! - The record names the file before it has its place. An agent that is killed leaves a server that the next one
//!   takes up: also one that is away.

mod back;
mod fitness;
mod place;
mod restart;

use std::path::PathBuf;
use std::time::Duration;

use remora_table::Origin;
use serde::Serialize;
use tokio::time::Instant;

use self::back::Back;
use self::place::Place;
use super::data_set::DataSet;
use super::exact::{self, Exactness};
use super::forecast;
use super::needs::{REWRITE, refuse_without_turning_saves_off, saves_stay_on};
use super::preflight::Primary;
use super::prepared::{Prepared, Suits};
use super::record::{Placed, Record, SAVE};
use crate::args::{FetchArgs, PassOnArgs, ReplicaArgs, SnapshotFromArgs};
use crate::conversation::tokens::{Credentials, TokenFiles};
use crate::exit::{Code, Failure};
use crate::metrics::Scrapes;
use crate::patience::Patience;
use crate::progress;
use crate::server::{Client, Facts, Kept, Server, ServerError, Task};
use crate::signals::{Signals, until_signal};
use crate::snapshot::fetch::{self, Whole};
use crate::tasks::blocking;
use crate::units::Size;

/// Bytes of a snapshot that a server loads in a second, at least. Large values take a tenth of the time.
const LOAD_RATE: u64 = 64 << 20;

/// The part of a restart that does not depend on the data.
const RESTART_TIME: Duration = Duration::from_secs(3);

/// How long a server that was away may take to answer after its restart.
const AWAY_LIMIT: Duration = Duration::from_secs(60);

/// How long the primary keeps what the server needs while that is away, at most.
const PIN_LIMIT: Duration = Duration::from_secs(600);

/// A part of that time: for a save that is under way, and for the server's way back to its primary.
const PIN_MARGIN: Duration = Duration::from_secs(60);

/// How long a save that the server has begun may take.
const SAVE_LIMIT: Duration = Duration::from_secs(600);

/// Pause between two looks whether it has ended.
const SAVE_LOOK: Duration = Duration::from_millis(50);

/// Runs a replica agent that delivers by file.
///
/// # Errors
/// Why the server is not in step on the snapshot; the message says in which state it was left.
pub(super) async fn run(args: ReplicaArgs, tokens: TokenFiles) -> Result<(), Failure> {
    let Some(command) = args.by.restart_command.clone() else {
        return Err(Failure::new(Code::Usage, "--delivery file needs --restart-command"));
    };
    if args.stay {
        return Err(Failure::new(Code::Usage, "--stay goes with --delivery link only"));
    }
    let credentials = tokens.credentials(args.peers.expected.source_key);
    match until_signal(prepare(args, credentials, command), ": the server was not touched").await? {
        Some(delivery) => delivery.run().await,
        None => Ok(()),
    }
}

/// A delivery before its first change.
struct Delivery {
    args: ReplicaArgs,
    command: String,
    server: Server,
    client: Client,
    record: Record,
    /// What the server said of itself.
    facts: Facts,
    primary: Primary,
    data_set: DataSet,
    place: Place,
    began: Instant,
}

/// Finds out all that can be known before the server is touched. `None` if nothing is left to do.
async fn prepare(args: ReplicaArgs, credentials: Credentials, command: String) -> Result<Option<Delivery>, Failure> {
    let began = Instant::now();
    let left = take_up(&args, &command).await?;
    // What a server holds that was restarted on our file is ours to replace.
    let looks = ReplicaArgs { replace: args.replace || left.is_some(), ..args.clone() };
    let prepared = Prepared::of(&looks, &credentials, Suits::Any).await?;
    let Prepared { server, mut client, mut record, target, plan, primary, data_set, reading, unchecked, .. } = prepared;
    let facts = target.facts.clone();
    if let Some(left) = left.filter(|left| left.run_id != facts.run_id && !args.dry_run) {
        // It was restarted since, and may be on its way.
        match back::in_step(&server, left.run_id.as_deref()).await {
            Ok((_, now)) if now.replid.is_some() && now.replid == plan.replid => {
                finish(&mut client, &mut record).await;
                let (url, host, port) = (server.url(), &primary.host, primary.port);
                progress::say(&format!(
                    "{url} was restarted on the file of an earlier run, and is in step with {host}:{port}"
                ));
                return Ok(None);
            }
            Ok(_) => tracing::warn!("the server is in step with another primary; the snapshot is delivered once more"),
            Err(why) => tracing::warn!("{why}; the snapshot is delivered once more"),
        }
    }
    if target.unfinished {
        return Err(Failure::refused(format!(
            "the server {} follows the link of an agent that has ended: a delivery by link puts it in order",
            server.url()
        )));
    }
    fitness::refuse_what_would_not_load(&args, &mut client, &facts, &primary, &plan).await?;
    refuse_without_turning_saves_off(&mut client, &facts).await?;
    let place = Place::find(&mut client, &facts).await?;
    if args.dry_run {
        let verdict = format!(
            "{} ({}) can be restarted on {} and go on as a replica of {}:{} ({}); nothing was touched",
            server.url(),
            facts.name(),
            place.file.display(),
            primary.host,
            primary.port,
            plan.server
        );
        return forecast::tell(&args, verdict, &plan, primary.facts.as_ref(), (reading, unchecked)).map(|()| None);
    }
    Ok(Some(Delivery { args, command, server, client, record, facts, primary, data_set, place, began }))
}

/// What an agent before us has put in place without seeing the server in step. If the server is away, it is restarted.
async fn take_up(args: &ReplicaArgs, command: &str) -> Result<Option<Placed>, Failure> {
    let server = args.server.open(Task::Replica)?;
    let record = Record::open(args.state_dir.as_deref(), &server.url().to_string())?;
    let Some(placed) = record.placed() else { return Ok(None) };
    tracing::info!(
        file = %placed.file.display(),
        "an earlier run has put this file in place, and ended before the server was in step"
    );
    let failed = |why: String| Failure::new(Code::Server, why);
    if !back::loaded(&server).await.map_err(failed)? && !args.dry_run {
        restart::run(command, args.by.restart_limit).await.map_err(failed)?;
        let mut patience = Patience::new(AWAY_LIMIT, "after --restart-command");
        patience.keep_trying(async || Ok(server.connect().await?)).await?;
        back::loaded(&server).await.map_err(failed)?;
    }
    Ok(Some(placed.clone()))
}

/// How the file came to its place.
struct Delivered {
    summary: fetch::Summary,
    placed: Placed,
    fetched: Instant,
    full_copies: Option<u64>,
}

impl Delivery {
    async fn run(mut self) -> Result<(), Failure> {
        let mut signals = Signals::catch()?;
        let fetch = self.fetch_args();
        let whole = fetch::receive(&fetch, self.data_set.clone(), |_| {}, &mut Scrapes::default()).await?;
        // Until the server is in step, or is left otherwise.
        let _kept = self.keep(&fetch, &whole).await?;
        let stopped = |signal: &str| Failure::new(Code::Interrupted, format!("stopped by {signal}"));
        let quiet = tokio::select! {
            quiet = self.quieten() => quiet,
            signal = signals.next() => Err(stopped(signal)),
        };
        let delivered = match quiet {
            Ok(()) => self.put_in_place(&fetch, whole).await,
            Err(failure) => Err(failure),
        };
        let delivered = match delivered {
            Ok(delivered) => delivered,
            Err(failure) => return Err(self.left_as_it_was(failure).await),
        };
        let restarted = async {
            let restarting = Instant::now();
            restart::run(&self.command, self.args.by.restart_limit).await?;
            let (back, facts) = back::in_step(&self.server, self.facts.run_id.as_deref()).await?;
            Ok::<_, String>((restarting, back, facts))
        };
        let restarted = tokio::select! {
            restarted = restarted => restarted.map_err(|why| Failure::new(Code::SyncFailed, why)),
            signal = signals.next() => Err(stopped(signal).and("the restart command goes on")),
        };
        match restarted {
            Ok((restarting, back, facts)) => self.done(delivered, restarting, back, &facts).await,
            Err(failure) => Err(self.left_restarting(failure, &delivered.placed).await),
        }
    }

    /// Has the primary keep the stream from the snapshot's offset on while the server is away. Where that is not
    /// possible, its backlog must suffice.
    async fn keep(&self, fetch: &FetchArgs, whole: &Whole) -> Result<Option<Kept>, Failure> {
        let Origin { history, offset, .. } = whole.origin();
        // Sentinel would list the link that pins among the replicas, without an end.
        if self.primary.finding.is_none() {
            let time = (self.args.by.restart_limit + 2 * fetch.need + PIN_MARGIN).min(PIN_LIMIT);
            match Kept::after(&self.primary.as_server(), history, offset, time).await {
                Ok(kept) => {
                    let seconds = time.as_secs();
                    tracing::info!(
                        offset,
                        seconds,
                        "the primary keeps its stream from the snapshot on while the server is away"
                    );
                    return Ok(Some(kept));
                }
                Err(why) => tracing::info!(
                    "the primary's backlog must reach back to the snapshot while the server is away, as it cannot be pinned: {why}"
                ),
            }
        }
        whole.refuse_if_stale(fetch)?;
        Ok(None)
    }

    /// What is fetched, and where it goes.
    fn fetch_args(&self) -> FetchArgs {
        let (args, peers, place) = (&self.args, &self.args.peers, &self.place);
        let from = SnapshotFromArgs {
            read: args.read.clone(),
            token_file: args.token_files.first().cloned(),
            name: Some(peers.name.clone().unwrap_or_else(|| self.server.url().to_string())),
            security: peers.security.clone(),
            expected: peers.expected.clone(),
        };
        let bytes = self.primary.data().unwrap_or(0);
        let write_replicaof = args.by.write_replicaof.clone();
        FetchArgs {
            sentinel: peers.sentinel.clone(),
            owner: place.owner,
            mode: place.mode,
            // Decided when it is known whether the primary can be made to keep what the server needs.
            allow_stale: true,
            need: RESTART_TIME + Duration::from_secs(bytes / LOAD_RATE),
            write_replicaof,
            pass_on: PassOnArgs { relay: args.lend.relay.clone(), readers: peers.readers.clone(), memory: args.memory },
            alone: false,
            ..FetchArgs::of_a_backup(from, place.file.clone(), PathBuf::new())
        }
    }

    /// Makes the server write no RDB file from now on.
    async fn quieten(&mut self) -> Result<(), Failure> {
        let url = self.server.url().to_string();
        if !self.client.is_usable() {
            self.client = self.server.connect().await?;
        }
        let now = Facts::read(&mut self.client).await?;
        if now.run_id != self.facts.run_id || now.link.as_ref().map(followed) != self.facts.link.as_ref().map(followed)
        {
            let text =
                format!("another client has restarted the server {url} or pointed it elsewhere during the fetch");
            return Err(Failure::new(Code::TakenOver, text));
        }
        if self.args.rewrite_config {
            // Before the saves are off, which must not get into the file.
            self.client.command(&REWRITE).await?;
            tracing::info!("the server has written its configuration file, with the primary that it follows");
        }
        if let Some(before) = self.client.config_bytes(SAVE).await?
            && !self.record.change(&mut self.client, SAVE, &before, b"").await?
        {
            return Err(saves_stay_on(self.server.url()));
        }
        let until = Instant::now() + SAVE_LIMIT;
        loop {
            let persistence = self.client.info("persistence").await?;
            if persistence.number::<u64>("rdb_bgsave_in_progress").unwrap_or(0) == 0 {
                return Ok(());
            }
            if Instant::now() >= until {
                let seconds = SAVE_LIMIT.as_secs();
                let text = format!("the server {url} is still saving by itself after {seconds} s: try again later");
                return Err(Failure::new(Code::Server, text));
            }
            tokio::time::sleep(SAVE_LOOK).await;
        }
    }

    async fn put_in_place(&mut self, fetch: &FetchArgs, whole: Whole) -> Result<Delivered, Failure> {
        let fetched = Instant::now();
        let full_copies = self.primary.full_copies().await;
        let (place, ours) = (self.place.clone(), self.record.placed().map(|placed| placed.inode));
        let former = blocking(move || place.keep_the_former(ours)).await?;
        let inode = place::inode(&whole.file()).unwrap_or(0);
        let run_id = self.facts.run_id.clone();
        let placed = Placed { file: self.place.file.clone(), inode, former, run_id };
        self.record.note_placed(Some(placed.clone()))?;
        let summary = whole.place(fetch).await?;
        let (file, offset) = (placed.file.display(), summary.offset);
        tracing::info!(%file, replid = summary.replid, offset, "the snapshot is in its place");
        Ok(Delivered { summary, placed, fetched, full_copies })
    }

    /// The file did not get its place.
    async fn left_as_it_was(&mut self, failure: Failure) -> Failure {
        let settings = match self.put_back().await {
            Ok(()) => "the server is as it was".to_owned(),
            Err(error) => format!("its saves are off ({error}); the next remora replica for it turns them on again"),
        };
        failure.and(&settings)
    }

    /// The file has its place, and the server was not seen in step on it.
    async fn left_restarting(&mut self, failure: Failure, placed: &Placed) -> Failure {
        let settings = match failure.code {
            // The restart goes on, and the server must not write over the file at its end.
            Code::Interrupted => "; its saves are off until its restart or the next run".to_owned(),
            _ => match self.put_back().await {
                Ok(()) => String::new(),
                Err(error) => format!("; its saves may be off ({error})"),
            },
        };
        let former = match &placed.former {
            Some(former) => format!("the former file is beside it as {}", former.display()),
            None => "there was no file before".to_owned(),
        };
        failure.and(&format!(
            "the snapshot is in its place, {}, and {former}; the same command again takes it up from here{settings}",
            placed.file.display()
        ))
    }

    async fn put_back(&mut self) -> Result<(), ServerError> {
        if !self.client.is_usable() {
            self.client = self.server.connect().await?;
        }
        self.record.put_back(&mut self.client).await
    }

    async fn done(
        mut self,
        delivered: Delivered,
        restarting: Instant,
        back: Back,
        facts: &Facts,
    ) -> Result<(), Failure> {
        let Delivered { summary, placed, fetched, full_copies } = delivered;
        if let (Some(before), Some(now)) = (full_copies, self.primary.full_copies().await)
            && now != before
        {
            tracing::warn!(
                "the primary has begun {} full copies meanwhile; the server was never seen to take one",
                now.saturating_sub(before)
            );
        }
        if place::inode(&placed.file) != Some(placed.inode) {
            tracing::warn!(
                file = %placed.file.display(),
                "another file is in its place by now: the server has saved its own data, at its end or since"
            );
        }
        self.client = self.server.connect().await?;
        finish(&mut self.client, &mut self.record).await;
        // It has counted from zero since its restart.
        let primary = self.primary.as_server();
        let found = exact::judge(&mut self.client, None, Some(&primary)).await?;
        let url = self.server.url().to_string();
        if let Err(failure) = found.outcome(&url) {
            found.lines().iter().for_each(|line| progress::say(line));
            return Err(failure.and("the server follows the primary"));
        }
        let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
        let report = Report {
            exact: found.proved(&summary.replid, summary.offset, facts.offset.unwrap_or(0)),
            server: url,
            primary: format!("{}:{}", self.primary.host, self.primary.port),
            replid: summary.replid.clone(),
            snapshot_offset: summary.offset,
            hand_off_offset: facts.offset.unwrap_or(0),
            delivery: "file",
            snapshot_bytes: summary.bytes,
            full_copies_before: full_copies,
            fetch_seconds: seconds(self.began, fetched),
            restart_seconds: seconds(restarting, back.answered),
            load_seconds: seconds(back.answered, back.in_step),
            total_seconds: seconds(self.began, back.in_step),
        };
        report.show(&self.args)
    }
}

/// The server is in step: what the delivery has changed is put back. The former file is of no more use.
async fn finish(client: &mut Client, record: &mut Record) {
    if let Err(error) = record.put_back(client).await {
        tracing::warn!("a setting of the server was not put back ({error}); the next remora replica for it does that");
    }
    if let Some(former) = record.placed().and_then(|placed| placed.former.clone())
        && let Err(error) = std::fs::remove_file(&former)
    {
        tracing::warn!("{} cannot be removed: {error}", former.display());
    }
    match record.note_placed(None) {
        Ok(()) => record.close(),
        Err(failure) => tracing::warn!("{failure}"),
    }
}

fn followed(link: &crate::server::Link) -> (&str, u16) {
    (&link.host, link.port)
}

/// The summary of a finished delivery. Seconds of wall time, one after the other.
#[derive(Debug, Serialize)]
struct Report {
    server: String,
    primary: String,
    replid: String,
    snapshot_offset: u64,
    /// Where the server was when it was first seen in step.
    hand_off_offset: u64,
    delivery: &'static str,
    snapshot_bytes: u64,
    /// How many full copies the primary had sent before the restart, if it told.
    full_copies_before: Option<u64>,
    /// Until the file was whole.
    fetch_seconds: f64,
    /// From the restart command until the server answered in another run.
    restart_seconds: f64,
    /// From then until it was in step.
    load_seconds: f64,
    total_seconds: f64,
    /// The conditions under which the server is called an exact replica, and what was found of each.
    exact: Exactness,
}

impl Report {
    fn show(&self, args: &ReplicaArgs) -> Result<(), Failure> {
        let line = |name: &str, seconds: f64, more: String| format!("  {name:<10} {seconds:>9.3} s  {more}");
        for line in [
            format!("{} is a replica of {} at {}:{}", self.server, self.primary, self.replid, self.hand_off_offset),
            line(
                "fetch",
                self.fetch_seconds,
                format!("{} at offset {}", Size::bytes(self.snapshot_bytes), self.snapshot_offset),
            ),
            line("restart", self.restart_seconds, "until it answered".to_owned()),
            line("load", self.load_seconds, "and in step by a partial resynchronisation".to_owned()),
            line("in all", self.total_seconds, String::new()),
        ] {
            progress::say(line.trim_end());
        }
        if args.explain {
            self.exact.lines().iter().for_each(|line| progress::say(line));
        }
        let Some(file) = &args.json else { return Ok(()) };
        let json = serde_json::to_vec_pretty(self).map_err(|error| Failure::local(error.to_string()))?;
        std::fs::write(file, json)
            .map_err(|error| Failure::local(format!("{} cannot be written: {error}", file.display())))
    }
}
