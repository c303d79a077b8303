//! Delivery by file: the snapshot becomes the server's RDB file, and the server is restarted on it.
//!
//! ```text
//!   preflight ──▶ fetch ──▶ no saves (CONFIG SET save "") ──▶ file in its place ──▶ restart ──▶ loads ──▶ +CONTINUE
//!   nothing is    beside     the server must not write over it     the former one     the operator's    in step:
//!   touched       its place  when it ends                          stays beside       command           saves as before
//! ```
//!
//! - [`file`](mod@file) proves that the server's file is here, and that the server will load it, as a replica.
//! - This file also runs the command that restarts the server, and waits for the server.
//!
//! What must hold:
//! - Before the file has its place, a failure leaves the server as it was.
//! - The record names the file before it has its place. An agent that is killed leaves a server that the next one
//!   takes up: also one that is away.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{Gid, Mode, Uid};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;
use tokio::time::Instant;

use super::exact::{self, Exactness};
use super::preflight::{Primary, REWRITE, refuse_without_turning_saves_off, saves_stay_on};
use super::prepared::{Prepared, Suits};
use super::record::{Placed, Record, SAVE};
use super::report;
use crate::options::Options;
use crate::preflight::path_of;
use remora_backup::fetch::{self, Whole};
use remora_backup::{FetchOptions, PassOn, ReplicaOf, SnapshotFrom};
use remora_base::files::Placing;
use remora_base::units::{Size, readable};
use remora_conversation::tokens::TokenFiles;
use remora_delivery::link;
use remora_metrics::Scrapes;
use remora_process::exit::{Code, Failure, Patience};
use remora_process::signals::{Signals, until_signal};
use remora_process::{blocking, progress};
use remora_protocol::Offer;
use remora_reader::data_set::DataSet;
use remora_server::{Client, Configuration, Facts, Kept, Role, Server, ServerError, Task};
use remora_table::Origin;

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
pub(super) async fn run(options: Options, tokens: TokenFiles) -> Result<(), Failure> {
    let Some(command) = options.delivery.restart_command.clone() else {
        return Err(Failure::new(Code::Usage, "--delivery file needs --restart-command"));
    };
    if options.stay {
        return Err(Failure::new(Code::Usage, "--stay goes with --delivery link only"));
    }
    match until_signal(prepare(options, tokens, command), ": the server was not touched").await? {
        Some(delivery) => delivery.run().await,
        None => Ok(()),
    }
}

/// A delivery before its first change.
struct Delivery {
    options: Options,
    tokens: TokenFiles,
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
async fn prepare(options: Options, tokens: TokenFiles, command: String) -> Result<Option<Delivery>, Failure> {
    let began = Instant::now();
    let credentials = tokens.credentials(options.source_key);
    let left = take_up(&options, &command).await?;
    // What a server holds that was restarted on our file is ours to replace.
    let looks = Options { replace: options.replace || left.is_some(), ..options.clone() };
    let prepared = Prepared::of(&looks, &credentials, Suits::Any).await?;
    let Prepared { server, mut client, mut record, target, plan, primary, data_set, reading, unchecked, .. } = prepared;
    let facts = target.facts.clone();
    if let Some(left) = left.filter(|left| left.run_id != facts.run_id && !options.dry_run) {
        // It was restarted since, and may be on its way.
        match in_step(&server, left.run_id.as_deref()).await {
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
    refuse_what_would_not_load(&options, &mut client, &facts, &primary, &plan).await?;
    refuse_without_turning_saves_off(&mut client, &facts).await?;
    let place = Place::find(&mut client, &facts).await?;
    if options.dry_run {
        let verdict = format!(
            "{} ({}) can be restarted on {} and go on as a replica of {}:{} ({}); nothing was touched",
            server.url(),
            facts.name(),
            place.file.display(),
            primary.host,
            primary.port,
            plan.server
        );
        return report::tell(&options, verdict, &plan, primary.facts.as_ref(), (reading, unchecked)).map(|()| None);
    }
    Ok(Some(Delivery { options, tokens, command, server, client, record, facts, primary, data_set, place, began }))
}

/// What an agent before us has put in place without seeing the server in step. If the server is away, it is restarted.
async fn take_up(options: &Options, command: &str) -> Result<Option<Placed>, Failure> {
    let server = options.server.open(Task::Replica)?;
    let record = Record::open(options.state_dir.as_deref(), &server.url().to_string())?;
    let Some(placed) = record.placed() else { return Ok(None) };
    tracing::info!(
        file = %placed.file.display(),
        "an earlier run has put this file in place, and ended before the server was in step"
    );
    let failed = |why: String| Failure::new(Code::Server, why);
    if !loaded(&server).await.map_err(failed)? && !options.dry_run {
        restart(command, options.delivery.restart_limit).await.map_err(failed)?;
        let mut patience = Patience::new(AWAY_LIMIT, "after --restart-command");
        patience.keep_trying(async || Ok(server.connect().await?)).await?;
        loaded(&server).await.map_err(failed)?;
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
        let fetch = self.fetched()?;
        let whole = fetch::receive(&fetch, |_| {}, &mut Scrapes::default()).await?;
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
            restart(&self.command, self.options.delivery.restart_limit).await?;
            let (back, facts) = in_step(&self.server, self.facts.run_id.as_deref()).await?;
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
    async fn keep(&self, fetch: &FetchOptions, whole: &Whole) -> Result<Option<Kept>, Failure> {
        let Origin { history, offset, .. } = whole.origin();
        // Sentinel would list the link that pins among the replicas, without an end.
        if self.primary.finding.is_none() {
            let time = (self.options.delivery.restart_limit + 2 * fetch.need + PIN_MARGIN).min(PIN_LIMIT);
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
    fn fetched(&self) -> Result<FetchOptions, Failure> {
        let (options, place) = (&self.options, &self.place);
        let file = options.delivery.write_replicaof.clone();
        let replicaof = file.map(|file| ReplicaOf { file, sentinels: options.sentinels.clone() });
        let from = SnapshotFrom {
            read: options.read.clone(),
            tokens: self.tokens.clone(),
            source_key: options.source_key,
            data_set: self.data_set.clone(),
            name: options.name.clone().unwrap_or_else(|| self.server.url().to_string()),
        };
        Ok(FetchOptions {
            pass_on: Some(PassOn { relay: options.relay.clone(), memory: options.memory }),
            placing: Placing { owner: place.owner, mode: place.mode, replaces: true },
            // Decided when it is known whether the primary can be made to keep what the server needs.
            allow_stale: true,
            need: RESTART_TIME + Duration::from_secs(self.primary.data().unwrap_or(0) / LOAD_RATE),
            replicaof,
            ..FetchOptions::new(from, place.file.clone())
        })
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
        if self.options.rewrite_config {
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

    async fn put_in_place(&mut self, fetch: &FetchOptions, whole: Whole) -> Result<Delivered, Failure> {
        let fetched = Instant::now();
        let full_copies = self.primary.full_copies().await;
        let (place, ours) = (self.place.clone(), self.record.placed().map(|placed| placed.inode));
        let former = blocking(move || place.keep_the_former(ours)).await?;
        let inode = inode(&whole.file()).unwrap_or(0);
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
        if inode(&placed.file) != Some(placed.inode) {
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
        report.show(&self.options)
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

fn followed(link: &remora_server::Link) -> (&str, u16) {
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
    fn show(&self, options: &Options) -> Result<(), Failure> {
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
        if options.explain {
            self.exact.lines().iter().for_each(|line| progress::say(line));
        }
        let Some(file) = &options.json else { return Ok(()) };
        let json = serde_json::to_vec_pretty(self).map_err(|error| Failure::local(error.to_string()))?;
        std::fs::write(file, json)
            .map_err(|error| Failure::local(format!("{} cannot be written: {error}", file.display())))
    }
}

// Restart: the operator's command that restarts the server.

/// Pause between two looks whether the command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Bytes of its output that are logged. A server that logs there would fill our log with its own.
const OUTPUT_BYTES: u64 = 64 << 10;

/// Bytes of its output that are read at a time, and logged as one line at most.
const LINE_BYTES: usize = 4096;

/// Runs the command, and logs its output line by line. The error says how it failed.
///
/// The command does not end with this agent: a server between its end and its next start would stay away. So its output
/// goes into a file without a name, and not into a pipe, whose end would end the command too.
async fn restart(command: &str, limit: Duration) -> Result<(), String> {
    tracing::info!("restarting the server: {command}");
    let command = command.to_owned();
    let ended = blocking(move || Ok(run_here(&command, limit))).await;
    ended.map_err(|failure| failure.to_string())?
}

fn run_here(command: &str, limit: Duration) -> Result<(), String> {
    let failed = |error: io::Error| format!("the restart command (--restart-command) cannot be run: {error}");
    let file = tempfile::tempfile().map_err(failed)?;
    let (out, errors) = (file.try_clone().map_err(failed)?, file.try_clone().map_err(failed)?);
    let started = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(errors)
        // Ctrl-C is for the agent.
        .process_group(0)
        .spawn();
    let mut child = started.map_err(failed)?;
    let (mut output, until) = (Output { file, read: 0 }, std::time::Instant::now() + limit);
    loop {
        let ended = child.try_wait().map_err(|error| format!("the restart command cannot be waited for: {error}"))?;
        output.log(ended.is_some());
        match ended {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("the restart command failed ({status}); its output is in the log")),
            None if std::time::Instant::now() >= until => {
                end(&child);
                return Err(format!(
                    "the restart command has not ended within {} (--restart-limit), and was told to; it must return when the \
                     server was started",
                    readable(limit)
                ));
            }
            None => std::thread::sleep(LOOK_EVERY),
        }
    }
}

/// Asks a command that has not been reaped, and all that it has started, to end.
fn end(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::TERM);
    }
}

/// The command's output.
struct Output {
    file: File,
    read: u64,
}

impl Output {
    /// Logs the lines that have come; at the end, the rest too.
    fn log(&mut self, is_last: bool) {
        let mut piece = [0; LINE_BYTES];
        while self.read < OUTPUT_BYTES {
            let piece = match self.file.read_at(&mut piece, self.read) {
                Ok(0) | Err(_) => return,
                Ok(bytes) => piece.get(..bytes).unwrap_or_default(),
            };
            let whole = piece.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
            let taken = match whole {
                Some(bytes) => bytes,
                None if is_last || piece.len() == LINE_BYTES => piece.len(),
                None => return,
            };
            for line in String::from_utf8_lossy(piece.get(..taken).unwrap_or_default()).lines() {
                tracing::info!("restart: {line}");
            }
            self.read += taken as u64;
        }
    }
}

// Back: a server that was restarted, until it is in step with its primary.
//
// ```text
//   away ──▶ another run ──▶ loading ──▶ link down ──▶ link up: in step
//                               │            ├──▶ takes a full copy ─┐
//                               │            └──▶ no primary ────────┴─▶ failed
//                               └── each step has a time of its own; loading has it as long as it goes on
// ```

/// How long the server may take for the next step: to end its former run, to answer again, to load the next bytes, to
/// get in step.
const STEP_LIMIT: Duration = Duration::from_secs(60);

/// How long a server may follow no primary: a node of a cluster is told by its own clock, ten times a second.
const ALONE_LIMIT: Duration = Duration::from_secs(5);

/// Pause between two looks.
const LOOK_AT_SERVER_EVERY: Duration = Duration::from_millis(20);

/// How long one look may take. A server that loads answers now and then.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// When a restarted server had come how far.
#[derive(Clone, Copy, Debug)]
struct Back {
    /// It was seen in its new run, after the restart began.
    answered: Instant,
    /// It was in step.
    in_step: Instant,
}

/// What one look has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Away(String),
    SameRun,
    /// This number of bytes is loaded.
    Loading(u64),
    /// The link to its primary is not up.
    Down,
    InStep,
    FullCopy,
    NoPrimary,
}

/// Waits until the server is in step in another run than `before`. The error says how it stands instead.
async fn in_step(server: &Server, before: Option<&str>) -> Result<(Back, Facts), String> {
    let (mut furthest, mut until, mut answered) = (Stage::SameRun.rank(), Instant::now() + STEP_LIMIT, None);
    let mut alone_since = None;
    loop {
        let (stage, facts) = match look(server).await {
            Ok((facts, loaded)) => (Stage::of(&facts, loaded, before), facts),
            Err(error) if error.is_passing() => (Stage::Away(error.to_string()), Facts::default()),
            Err(error) => return Err(error.to_string()),
        };
        let now = Instant::now();
        if !matches!(stage, Stage::Away(_) | Stage::SameRun) {
            answered.get_or_insert(now);
        }
        match (&stage, answered) {
            (Stage::InStep, Some(answered)) => return Ok((Back { answered, in_step: now }, facts)),
            (Stage::FullCopy, _) => return Err(stage.failure()),
            (Stage::NoPrimary, _) => {
                if now >= *alone_since.get_or_insert(now) + ALONE_LIMIT {
                    return Err(stage.failure());
                }
            }
            _ => alone_since = None,
        }
        // Only what was never reached before counts: a server that ends again and again is not on its way.
        if stage.rank() > furthest {
            (furthest, until) = (stage.rank(), now + STEP_LIMIT);
        } else if now >= until {
            return Err(stage.failure());
        }
        tokio::time::sleep(LOOK_AT_SERVER_EVERY).await;
    }
}

/// Waits until a server has loaded its data set. Returns whether it answers.
async fn loaded(server: &Server) -> Result<bool, String> {
    let (mut last, mut until) = (0, Instant::now() + STEP_LIMIT);
    loop {
        match look(server).await {
            Ok((facts, _)) if facts.loading != Some(true) => return Ok(true),
            Ok((_, loaded)) if loaded > last => (last, until) = (loaded, Instant::now() + STEP_LIMIT),
            Ok(_) => {}
            Err(error) if error.is_passing() => return Ok(false),
            Err(error) => return Err(error.to_string()),
        }
        if Instant::now() >= until {
            return Err(Stage::Loading(last).failure());
        }
        tokio::time::sleep(LOOK_AT_SERVER_EVERY).await;
    }
}

/// What a server says of itself, and the bytes that it has loaded.
async fn look(server: &Server) -> Result<(Facts, u64), ServerError> {
    let mut client = server.connect().await?;
    client.set_timeout(ANSWER_LIMIT);
    let info = client.info("").await?;
    Ok((Facts::from_info(&info), info.number("loading_loaded_bytes").unwrap_or(0)))
}

impl Stage {
    fn of(facts: &Facts, loaded: u64, before: Option<&str>) -> Stage {
        match &facts.link {
            _ if before.is_some() && facts.run_id.as_deref() == before => Stage::SameRun,
            _ if facts.loading == Some(true) => Stage::Loading(loaded),
            None => Stage::NoPrimary,
            Some(link) if link.syncing == Some(true) => Stage::FullCopy,
            Some(link) if link.up == Some(true) => Stage::InStep,
            Some(_) => Stage::Down,
        }
    }

    /// How far the server is.
    fn rank(&self) -> (u8, u64) {
        match self {
            Stage::SameRun => (0, 0),
            Stage::Away(_) => (1, 0),
            Stage::Loading(bytes) => (2, *bytes),
            Stage::NoPrimary => (3, 0),
            Stage::Down => (4, 0),
            Stage::FullCopy | Stage::InStep => (5, 0),
        }
    }

    /// Why nothing more is waited for.
    fn failure(&self) -> String {
        let seconds = STEP_LIMIT.as_secs();
        match self {
            Stage::FullCopy => {
                "the server does not go on where the snapshot ends: it is taking a full copy of its primary by \
                                itself; its log says why"
                    .to_owned()
            }
            Stage::NoPrimary => {
                "the server follows no primary after its restart, and serves the snapshot as a primary would: \
                                 make it follow one, and give its configuration a replicaof"
                    .to_owned()
            }
            Stage::Away(why) => format!("the server has not come back for {seconds} s: {why}"),
            Stage::SameRun => format!("the server has not been restarted within {seconds} s: it is the same run"),
            Stage::Loading(bytes) => format!("the server has loaded nothing more for {seconds} s, after {bytes} bytes"),
            Stage::Down | Stage::InStep => {
                format!("the server does not get in step with its primary within {seconds} s; the logs of both say why")
            }
        }
    }
}

// The server's RDB file: where it is on this host, and whether the server would load it and go on from there.

// Place: where a server on this host has its RDB file. It is proved, before anything is touched, that the server and
// the agent mean the same file.
//
// The server tells its process id, which is a number in its own container. So the other end of the agent's connection
// must be among the open files of that process here. The server works in its `dir`: that folder must be the one that
// the agent finds under the same name.

/// The mode of a file that was not there before.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// What is added to the name of the file that was there before.
const FORMER: &str = ".before-remora";

/// A server's RDB file, and its owner.
#[derive(Clone, Debug)]
struct Place {
    file: PathBuf,
    /// The server's user and group, if the agent's are others.
    owner: Option<(Uid, Gid)>,
    mode: Mode,
}

impl Place {
    /// Finds it.
    ///
    /// # Errors
    /// It cannot be shown that the server runs on this host and that its folder is here.
    async fn find(client: &mut Client, facts: &Facts) -> Result<Place, Failure> {
        let url = client.server().url().to_string();
        let elsewhere = |why: String| {
            Failure::refused(format!(
                "it cannot be shown that the server {url} runs on this host and has its file here: {why}. For --delivery file \
                 the agent runs beside the server, as root or as the server's user; where the server runs in a container, use \
                 remora fetch before it starts"
            ))
        };
        let process = facts.process_id.ok_or_else(|| elsewhere("it does not tell its process id".into()))?;
        is_at_the_other_end(client, process).map_err(&elsewhere)?;
        let unknown = |name: &str| Failure::refused(format!("the server {url} does not tell its setting {name}"));
        let folder = client.config_bytes("dir").await?.ok_or_else(|| unknown("dir"))?;
        let name = client.config_bytes("dbfilename").await?.ok_or_else(|| unknown("dbfilename"))?;
        let (folder, name) = (path_of(folder), path_of(name));
        is_same_folder(process, &folder).map_err(&elsewhere)?;
        let owner = owner_of(process).map_err(|error| elsewhere(format!("its user is not known: {error}")))?;
        let file = folder.join(name);
        let present = fs::symlink_metadata(&file).ok();
        let mode = present.map_or(MODE, |about| Mode::from_raw_mode(about.permissions().mode() & 0o777));
        let us = rustix::process::geteuid();
        if owner.0 != us && !us.is_root() {
            return Err(elsewhere(format!("it runs as user {}, and this agent as {}", owner.0.as_raw(), us.as_raw())));
        }
        Ok(Place { file, owner: (owner.0 != us).then_some(owner), mode })
    }

    /// Keeps the file that is there under another name as well, unless it is `ours`. Returns that name; `None` if there
    /// is no such file.
    ///
    /// # Errors
    /// The name cannot be given.
    fn keep_the_former(&self, ours: Option<u64>) -> Result<Option<PathBuf>, Failure> {
        let mut name = self.file.file_name().unwrap_or_default().to_owned();
        name.push(FORMER);
        let former = self.file.with_file_name(name);
        let failed = |error: io::Error| {
            let (file, former) = (self.file.display(), former.display());
            Failure::local(format!("{file} cannot be kept as {former}: {error}; nothing was put in its place"))
        };
        match inode(&self.file) {
            // A delivery before this one has kept the file.
            Some(inode) if Some(inode) == ours => return Ok(former.exists().then_some(former)),
            None => return Ok(None),
            Some(_) => {}
        }
        match fs::remove_file(&former) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        // A second name: the file is never without its own one.
        match fs::hard_link(&self.file, &former) {
            Ok(()) => Ok(Some(former)),
            Err(_) => fs::copy(&self.file, &former).map(|_| Some(former.clone())).map_err(failed),
        }
    }
}

/// A file's number in its file system; `None` if it is not there.
fn inode(file: &Path) -> Option<u64> {
    fs::symlink_metadata(file).ok().map(|about| about.ino())
}

/// Whether this process has the other end of the connection. The error says why that is not known.
fn is_at_the_other_end(client: &Client, process: u32) -> Result<(), String> {
    let another = || format!("its process {process} is another one here (a container, or a proxy in between?)");
    let (Some(here), Some(there)) = (client.local_addr(), client.peer_addr()) else {
        return match client.peer_process() {
            Some(other) if other == process => Ok(()),
            _ => Err(another()),
        };
    };
    let socket = link::inode(there, here);
    let socket = socket.map_err(|_| format!("the connection to {there} does not end on this host"))?;
    let socket = format!("socket:[{socket}]");
    let folder = format!("/proc/{process}/fd");
    let files = fs::read_dir(&folder).map_err(|error| format!("{folder} cannot be read: {error}"))?;
    let is_it = |file: fs::DirEntry| fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == socket.as_str());
    match files.flatten().any(is_it) {
        true => Ok(()),
        false => Err(another()),
    }
}

/// Whether the folder in which this process works is the one that has this name here.
fn is_same_folder(process: u32, folder: &Path) -> Result<(), String> {
    let name = folder.display();
    let works_in = fs::metadata(format!("/proc/{process}/cwd"))
        .map_err(|error| format!("the folder of its process {process} cannot be seen: {error}"))?;
    let here = fs::metadata(folder).map_err(|error| format!("its folder {name} cannot be seen: {error}"))?;
    match (works_in.dev(), works_in.ino()) == (here.dev(), here.ino()) {
        true => Ok(()),
        false => Err(format!("its folder {name} is another one here")),
    }
}

/// The user and the group as which this process makes files.
fn owner_of(process: u32) -> io::Result<(Uid, Gid)> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    // Real, effective, saved, and that of the file system.
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().nth(3)?.parse::<u32>().ok()
    };
    match (number("Uid:"), number("Gid:")) {
        (Some(user), Some(group)) => Ok((Uid::from_raw(user), Gid::from_raw(group))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

// Fitness: whether a server that is restarted on a file loads it, and goes on from there as a replica.
//
// Both servers decide that in `loadDataFromDisk` and `primaryTryPartialResynchronization`: no AOF, a replica while it
// loads, and a primary whose backlog reaches back. The last is asked by the fetch. What the restart command itself
// adds to the command line cannot be seen from here.

/// Refuses a server that would not.
async fn refuse_what_would_not_load(
    options: &Options,
    client: &mut Client,
    facts: &Facts,
    primary: &Primary,
    plan: &Offer,
) -> Result<(), Failure> {
    let url = client.server().url().to_string();
    if client.config_get("appendonly").await?.as_deref() == Some("yes") {
        return Err(Failure::refused(aof(&format!("the server {url}"))));
    }
    let followed = match &facts.link {
        Some(link) if facts.role == Some(Role::Replica) => primary.is_at(&link.host, link.port, plan).await,
        _ => false,
    };
    if facts.cluster_enabled == Some(true) {
        return cluster(client, options, followed, primary).await;
    }
    let file = client.info("server").await?.get("config_file").map(PathBuf::from).unwrap_or_default();
    let configuration = match file.as_os_str().is_empty() {
        true => Configuration::default(),
        false => Configuration::read(&file).map_err(|error| {
            Failure::refused(format!(
                "the configuration file {} of the server {url} cannot be read: {error}; what the server follows after a restart \
                 is not known",
                file.display()
            ))
        })?,
    };
    if configuration.is_yes("appendonly") {
        return Err(Failure::refused(aof(&file.display().to_string())));
    }
    check_the_place(client, &configuration, &file).await?;
    check_the_modules(&configuration, &file, primary)?;
    check_the_primary(options, &configuration, &file, followed, primary, plan).await
}

fn aof(who: &str) -> String {
    format!(
        "{who} has appendonly yes: after a restart the server would load its AOF, or nothing, and not an RDB file. Set appendonly \
         no there (and CONFIG SET appendonly yes when the server is in step), or use --delivery link or intercept"
    )
}

/// The primary that the server follows after its restart must be the right one.
async fn check_the_primary(
    options: &Options,
    configuration: &Configuration,
    file: &Path,
    followed: bool,
    primary: &Primary,
    plan: &Offer,
) -> Result<(), Failure> {
    let right = format!("{}:{}", primary.host, primary.port);
    if options.rewrite_config && !followed {
        return Err(Failure::refused(format!(
            "--rewrite-config would not write the primary {right}, which the server does not follow: use --write-replicaof with a \
             file that its configuration includes"
        )));
    }
    if options.rewrite_config {
        return Ok(());
    }
    if let Some(written) = &options.delivery.write_replicaof {
        let path = std::path::absolute(written).unwrap_or_else(|_| written.clone());
        if !configuration.includes(&path) {
            tracing::warn!(
                "the server's configuration file ({}) does not include {}: the restart command must name it (--include)",
                file.display(),
                path.display()
            );
        }
        return Ok(());
    }
    let advice = "--rewrite-config writes it for a server that follows its primary already; --write-replicaof FILE is for a file \
                  that the configuration includes";
    match configuration.primary() {
        Some((host, port)) if primary.is_at(host, port, plan).await => Ok(()),
        Some((host, port)) => Err(Failure::refused(format!(
            "{} has replicaof {host} {port}, and the source's primary is {right}: correct it, or {advice}",
            file.display()
        ))),
        None if !configuration.unread().is_empty() => {
            tracing::warn!(
                "{} has no replicaof, unless it is in one of {}, which were not read: without it the server would be a primary \
                 after its restart",
                file.display(),
                configuration.unread().join(", ")
            );
            Ok(())
        }
        None => {
            let who = match file.as_os_str().is_empty() {
                true => "the server has no configuration file".to_owned(),
                false => format!("{} has no replicaof", file.display()),
            };
            Err(Failure::refused(format!(
                "{who}: after a restart the server would be a primary with the data of the file, and not a replica of {right}; {advice}"
            )))
        }
    }
}

/// The file must be where the server looks for it after its restart.
async fn check_the_place(client: &mut Client, configuration: &Configuration, file: &Path) -> Result<(), Failure> {
    for name in ["dir", "dbfilename"] {
        let (now, then) = (client.config_get(name).await?, configuration.last(name).and_then(<[String]>::first));
        let (Some(now), Some(then)) = (now, then) else { continue };
        // A relative folder is relative to where the server was started.
        let is_known = name != "dir" || Path::new(then).is_absolute();
        let same = |one: &str, other: &str| match (std::fs::canonicalize(one), std::fs::canonicalize(other)) {
            (Ok(one), Ok(other)) => one == other,
            _ => one == other,
        };
        if is_known && !same(&now, then) {
            return Err(Failure::refused(format!(
                "the server has {name} {now}, and {} has {then}, where it would look for its file after a restart: make them the \
                 same",
                file.display()
            )));
        }
    }
    Ok(())
}

/// A module that was loaded by a command is not there after the restart, and its data would end the server.
fn check_the_modules(configuration: &Configuration, file: &Path, primary: &Primary) -> Result<(), Failure> {
    if !primary.has_modules_with_data() || configuration.last("loadmodule").is_some() {
        return Ok(());
    }
    Err(Failure::refused(format!(
        "the primary has modules that may have data, and {} has no loadmodule: after a restart the server could not load the file; \
         load its modules there",
        file.display()
    )))
}

/// A node of a cluster keeps what it follows in a file of its own.
async fn cluster(client: &mut Client, options: &Options, followed: bool, primary: &Primary) -> Result<(), Failure> {
    let url = client.server().url().to_string();
    if options.delivery.write_replicaof.is_some() {
        return Err(Failure::refused(format!(
            "the server {url} runs in cluster mode, where a configuration with replicaof does not start: omit --write-replicaof"
        )));
    }
    if !followed {
        return Err(Failure::refused(format!(
            "the node {url} does not follow the source's primary {}:{}, so it would take the slots of the file's keys for its own \
             after a restart: CLUSTER REPLICATE comes first",
            primary.host, primary.port
        )));
    }
    let databases = client.config_get("cluster-databases").await?.and_then(|count| count.parse::<u32>().ok());
    match databases {
        Some(2..) => Err(Failure::refused(format!(
            "the node {url} has several databases (cluster-databases): a node that starts on a file can take the stream for \
             database 0; use --delivery intercept"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remora_redis::info::Info;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn the_end_of_the_command_counts_and_not_that_of_what_it_has_started() {
        let began = std::time::Instant::now();
        run_here("echo out; echo err >&2; sleep 20 & exit 0", LONG).unwrap();
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    }

    #[test]
    fn a_command_that_fails_or_does_not_end_says_so() {
        assert!(run_here("exit 3", LONG).unwrap_err().contains("exit status: 3"));
        assert!(run_here("/nowhere/systemctl", LONG).unwrap_err().contains("127"));
        let said = run_here("sleep 30", Duration::from_millis(50)).unwrap_err();
        assert!(said.contains("--restart-limit"), "{said}");
        run_here("yes | head -n 100000", LONG).unwrap();
    }

    #[test]
    fn output_is_taken_line_by_line_and_its_rest_at_the_end() {
        let file = tempfile::tempfile().unwrap();
        let mut output = Output { file: file.try_clone().unwrap(), read: 0 };
        file.write_all_at(b"one\ntwo\nthr", 0).unwrap();
        output.log(false);
        assert_eq!(output.read, 8);
        file.write_all_at(b"ee", 11).unwrap();
        output.log(true);
        assert_eq!(output.read, 13);
        file.write_all_at(&vec![b'x'; 1 << 20], 13).unwrap();
        output.log(true);
        assert!((OUTPUT_BYTES..OUTPUT_BYTES + LINE_BYTES as u64).contains(&output.read), "{}", output.read);
    }

    #[test]
    fn what_a_server_says_of_itself_is_a_step_on_its_way() {
        let stage = |text: &str| Stage::of(&Facts::from_info(&Info::parse(text.as_bytes())), 7, Some("old"));
        let link = "run_id:new\nmaster_host:a\nmaster_port:1\n";
        for (text, wanted) in [
            ("run_id:old\nrole:master\n".to_owned(), Stage::SameRun),
            (format!("{link}loading:1\n"), Stage::Loading(7)),
            ("run_id:new\nrole:master\n".to_owned(), Stage::NoPrimary),
            (format!("{link}master_link_status:down\nmaster_sync_in_progress:0\n"), Stage::Down),
            (format!("{link}master_link_status:down\nmaster_sync_in_progress:1\n"), Stage::FullCopy),
            (format!("{link}master_link_status:up\nmaster_sync_in_progress:0\n"), Stage::InStep),
        ] {
            assert_eq!(stage(&text), wanted, "{text}");
        }
        let way = [Stage::SameRun, Stage::Away("x".into()), Stage::Loading(1), Stage::Loading(2), Stage::Down];
        assert!(way.windows(2).all(|two| two[0].rank() < two[1].rank()), "{way:?}");
    }

    #[test]
    fn this_process_works_in_its_folder_and_belongs_to_its_user() {
        let us = std::process::id();
        assert!(is_same_folder(us, &std::env::current_dir().unwrap()).is_ok());
        let other = tempfile::tempdir().unwrap();
        assert!(is_same_folder(us, other.path()).unwrap_err().contains("another one here"));
        assert!(is_same_folder(us, Path::new("/nowhere")).is_err());
        assert_eq!(owner_of(us).unwrap().0, rustix::process::geteuid());
    }

    #[test]
    fn the_former_file_is_kept_and_our_own_is_not_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place { file: folder.path().join("dump.rdb"), owner: None, mode: MODE };
        assert_eq!(place.keep_the_former(None).unwrap(), None, "there is none");
        fs::write(&place.file, "old").unwrap();
        let former = place.keep_the_former(None).unwrap().unwrap();
        assert_eq!(former, folder.path().join("dump.rdb.before-remora"));
        assert_eq!((fs::read(&former).unwrap(), fs::read(&place.file).unwrap()), (b"old".to_vec(), b"old".to_vec()));
        // The next agent, after ours was put in place.
        let fresh = folder.path().join("fresh");
        fs::write(&fresh, "ours").unwrap();
        fs::rename(&fresh, &place.file).unwrap();
        assert_eq!(place.keep_the_former(inode(&place.file)).unwrap(), Some(former.clone()));
        assert_eq!(fs::read(&former).unwrap(), b"old");
        assert_eq!(place.keep_the_former(None).unwrap(), Some(former.clone()), "the server's own again");
        assert_eq!(fs::read(&former).unwrap(), b"ours");
    }
}
