//! Capture: the primary's side of replication, laid into tables.
//!
//! One thread speaks PSYNC to the server. The snapshot's bytes go from the socket straight into slots of the snapshot
//! table (one `recv`, no buffer between); what follows goes on as the stream, into the journal.
//!
//! ```text
//!            first capture                                a later one, while the stream lives
//!   connect ── PSYNC ? -1 ──▶ +FULLRESYNC          connect ── REPLCONF rdb-only ── PSYNC ? -1 ──▶ +FULLRESYNC
//!      RDB bytes ──▶ snapshot table                   RDB bytes ──▶ snapshot table
//!      stream    ──▶ journal (until stopped)          close: the journal already holds what follows
//! ```
//!
//! Where the server offers it (Valkey's dual channel), the first capture takes two connections: the forked child writes the
//! snapshot into one by itself, which spares the server's main thread a copy of it, and the stream flows over the other from
//! the beginning.
//!
//! ```text
//!   connect ── PSYNC ? -1 ──▶ +DUALCHANNELSYNC ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ▶ PSYNC <replid> <offset + 1> ──▶ +CONTINUE
//!                 connect ── SYNC ──▶ offset, replid, RDB bytes ──▶ snapshot table      stream ──▶ journal
//! ```
//!
//! There is one stream for any number of snapshots: replication offsets are absolute, so a snapshot taken later joins
//! the same journal at its own offset.
//!
//! A journal holds one history. When the server continues a broken stream under another replid (`+CONTINUE <new replid>`: it was
//! promoted, follows another primary, or was shut down and started again), the stream ends before a byte of the new history is
//! appended.
//!
//! It decides nothing: which capture runs when is the business of [`super::owner`]. It ends when its `stop` is set, within
//! one [`TICK`], or when the primary ends it.

mod join;
mod socket;
mod with_module;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_redis::psync::Payload;
use remora_redis::psync::client::{self, Channel, Client, EofMark, Event as PsyncEvent};
use remora_redis::{Refusal, ReplId};
use remora_table::{Geometry, Identity, JournalWriter, Kind, SnapshotWriter, State};
use tokio::sync::mpsc::UnboundedSender;

use self::socket::{Received, Wire};
use super::gauge::Gauge;
use crate::backoff::Backoff;
use crate::server::{Server, ServerError, Task};

pub(crate) use self::with_module::{Rules as ModuleRules, Way};

/// What one capture thread is given.
#[derive(Clone)]
pub(crate) struct Plan {
    /// The number of the snapshot that it makes.
    pub(crate) generation: u64,
    /// Whom it asks.
    pub(crate) server: Server,
    /// The version of server that the snapshot is for, where that makes a difference; one that all read without it.
    pub(crate) reader_version: Option<String>,
    /// Where the snapshot goes.
    pub(crate) snapshot: (Arc<Memory>, Geometry),
    /// Whether its slots may never be used again: then it fails where it would have to.
    pub(crate) retained: bool,
    /// Where the stream goes; `None` when another thread already follows it.
    pub(crate) journal: Option<(Arc<Memory>, Geometry)>,
    /// What may be asked of a module in the server.
    pub(crate) module: Arc<ModuleRules>,
    /// What the others may see of it while it runs.
    pub(crate) gauge: Arc<Gauge>,
    /// What it tells the owner: a handful of events in its life.
    pub(crate) events: UnboundedSender<CaptureEvent>,
    /// Set by the owner to end it.
    pub(crate) stop: Arc<AtomicBool>,
    /// For the asynchronous parts of connecting (name look-up, TLS).
    pub(crate) runtime: tokio::runtime::Handle,
}

/// What a capture thread tells the owner.
#[derive(Debug)]
pub(crate) enum CaptureEvent {
    /// The primary has forked: the snapshot will hold everything up to `offset`.
    Started { generation: u64, replid: ReplId, offset: u64 },
    /// The snapshot is whole.
    Completed { generation: u64, bytes: u64 },
    /// The snapshot will never be whole.
    Failed { generation: u64, fault: Fault },
    /// The stream broke and was taken up again at the next byte: nothing was lost.
    StreamResumed,
    /// The server offers to continue the stream under another replid. The journal ends at `at`, the last byte it holds of the
    /// old history; nothing of the new one was appended.
    HistoryChanged { generation: u64, from: ReplId, to: ReplId, at: u64 },
    /// The stream can't be taken up at the next byte: the journal ends here.
    StreamLost { text: String },
}

/// Why a capture ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// The server did not let us in, or did not do what was asked.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The server answered the handshake with something else than a snapshot.
    #[error("the server's answer to the replication handshake: {}{}", .0, rules_for(.0))]
    Psync(#[from] client::Error),
    /// The link to the server broke.
    #[error("the link to the server broke during the {during}: {cause}")]
    Link { during: &'static str, cause: String },
    /// The module in the server did not do what it was armed for. The next attempt does without it.
    #[error("the module in the server: {0}")]
    Module(String),
    /// The server no longer has the byte that we need next.
    #[error("the server's backlog no longer reaches back to where the stream broke, or its history is another one")]
    HistoryGone,
    /// The server has the byte that we need next, but calls its history by another replid from there on: it was promoted,
    /// follows another primary, or was shut down and started again.
    #[error("the server's history changed from {from} to {to} after offset {at}")]
    HistoryChanged { from: ReplId, to: ReplId, at: u64 },
    /// The snapshot is larger than was expected, and its readers rely on memory that is never used again.
    #[error(
        "the snapshot is larger than the server's INFO (used_memory_dataset) let expect; taking another through a window"
    )]
    Outgrown,
    /// The table refused: a mistake of ours.
    #[error(transparent)]
    Table(#[from] remora_table::Error),
    /// The owner asked for it.
    #[error("stopped")]
    Stopped,
}

impl Fault {
    /// Whether asking the same server again may go better.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Fault::Server(error) => error.is_passing(),
            Fault::Psync(error) => error.is_temporary(),
            Fault::Link { .. } | Fault::Outgrown | Fault::Module(_) | Fault::HistoryChanged { .. } => true,
            Fault::HistoryGone | Fault::Table(_) | Fault::Stopped => false,
        }
    }
}

/// The rules that a server's user lacks who was refused for want of one.
fn rules_for(error: &client::Error) -> String {
    match error {
        client::Error::Refused(Refusal::NoPerm { .. }) => {
            format!("; {} needs these rules: {}", Task::Source.command(), Task::Source.rules())
        }
        _ => String::new(),
    }
}

/// Where the stream is when a snapshot is whole.
pub(super) enum Stream {
    /// Another capture follows it.
    Elsewhere,
    /// It comes next, over this connection.
    Next(Wire, Box<JournalWriter>),
    /// It has flowed from the beginning, and goes on.
    Flows(JoinHandle<()>),
}

/// Runs one capture to its end; meant to be the body of a thread.
pub(crate) fn run(plan: Plan) {
    let generation = plan.generation;
    match with_module::take_snapshot(&plan) {
        Ok(Stream::Elsewhere) => {}
        Ok(Stream::Next(wire, mut journal)) => follow(&plan, wire, &mut journal, Stops::of(&plan)),
        Ok(Stream::Flows(thread)) => {
            let _ = thread.join();
        }
        Err(fault) => {
            plan.gauge.snapshot_ended(State::Aborted);
            let _ = plan.events.send(CaptureEvent::Failed { generation, fault });
        }
    }
}

/// How often a waiting thread looks at its stop flag: the bound on how long stopping takes.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// The longest silence of the server in a handshake or a snapshot. Servers send a newline each second while they
/// prepare one, and give up themselves after `repl-timeout`, 60 s by default.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// How long a full ring waits before it looks again whether a slot was retired.
const RETIRE_POLL: Duration = Duration::from_micros(500);

/// A read of less than this is followed by a pause. A reader that is woken for every few kilobytes takes the processor from the
/// server's child that writes them: twenty thousand times in one gigabyte, measured, for a tenth of the whole time.
const WORTHWHILE: usize = 512 * 1024;

/// How long: what a quick server needs for [`WORTHWHILE`] bytes, and longer where it is a slow one. Its socket holds more than
/// comes in that time.
const PAUSE: Duration = Duration::from_micros(300);
const PAUSE_LONG: Duration = Duration::from_millis(1);

/// The length of the mark that ends an `$EOF:` payload.
pub(super) const MARK_LENGTH: u32 = 40;

/// Bytes that one read of the stream takes at most: a few of the server's 16 KiB writes at once.
const STREAM_READ: usize = 256 * 1024;

/// What ends a capture: the owner's word, and for a stream beside a snapshot the snapshot's failure.
#[derive(Clone, Copy)]
struct Stops<'a> {
    plan: &'a AtomicBool,
    abandoned: Option<&'a AtomicBool>,
}

impl<'a> Stops<'a> {
    fn of(plan: &'a Plan) -> Stops<'a> {
        Stops { plan: &plan.stop, abandoned: None }
    }

    fn set(self) -> bool {
        self.plan.load(Ordering::Relaxed) || self.abandoned.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

/// A snapshot that the server has announced.
pub(super) struct Announced {
    pub(super) wire: Wire,
    pub(super) replid: ReplId,
    pub(super) offset: u64,
    pub(super) payload: Payload,
    /// What was read beyond the handshake.
    pub(super) early: Vec<u8>,
}

/// How the server serves us.
enum Opened {
    /// Snapshot and stream one after the other.
    One(Announced),
    /// Both at once.
    Two { snapshot: Announced, stream: Wire },
}

/// Asks for a snapshot.
fn open(plan: &Plan) -> Result<Opened, Fault> {
    if plan.journal.is_none() {
        let mut wire = connect(plan)?;
        ask_for_snapshot_alone(&mut wire)?;
        return Ok(Opened::One(announced(plan, wire, Channel::Whole)?));
    }
    let mut wire = connect(plan)?;
    let mut machine = Client::new(options(plan, Channel::WholeOrStream));
    match shake(&mut wire, &mut machine, Stops::of(plan))? {
        (Opening::Full { replid, offset, payload }, early) => {
            Ok(Opened::One(Announced { wire, replid, offset, payload, early }))
        }
        (Opening::TwoChannels, _) => match open_second(plan, wire) {
            // The user may lack the rule for SYNC, which only the second channel needs.
            Err(Fault::Psync(error)) if !error.is_temporary() => {
                tracing::info!(%error, "the server's second channel is not open to us; taking all over one");
                Ok(Opened::One(announced(plan, connect(plan)?, Channel::Whole)?))
            }
            opened => opened,
        },
        (Opening::Continue { .. } | Opening::Channel { .. }, _) => Err(out_of_place("to continue")),
    }
}

/// Takes the snapshot over a second connection, and the first one for the stream from the byte after it.
fn open_second(plan: &Plan, mut stream: Wire) -> Result<Opened, Fault> {
    let (snapshot, client) = {
        let mut wire = connect(plan)?;
        let mut machine = Client::new(options(plan, Channel::Snapshot));
        match shake(&mut wire, &mut machine, Stops::of(plan))? {
            (Opening::Channel { replid, offset, payload, client }, early) => {
                (Announced { wire, replid, offset, payload, early }, client)
            }
            _ => return Err(out_of_place("something else than a channel")),
        }
    };
    let (replid, offset) = (snapshot.replid, snapshot.offset);
    let channel = Channel::Stream { snapshot_client: client };
    let resume = Some((replid, offset + 1));
    let mut machine = Client::new(client::Options { resume, channel, ..Default::default() });
    match shake(&mut stream, &mut machine, Stops::of(plan))? {
        (Opening::Continue { replid: now }, early) => {
            is_same_history(replid, now, offset)?;
            stream.push_back(early);
            Ok(Opened::Two { snapshot, stream })
        }
        _ => Err(out_of_place("another snapshot")),
    }
}

/// Fails unless the server continues the history that was asked for. From one that continues under another replid, bytes of its new history
/// would follow: they must not get into a journal of the old one.
fn is_same_history(asked: ReplId, answered: ReplId, at: u64) -> Result<(), Fault> {
    if asked == answered { Ok(()) } else { Err(Fault::HistoryChanged { from: asked, to: answered, at }) }
}

fn announced(plan: &Plan, mut wire: Wire, channel: Channel) -> Result<Announced, Fault> {
    let mut machine = Client::new(options(plan, channel));
    match shake(&mut wire, &mut machine, Stops::of(plan))? {
        (Opening::Full { replid, offset, payload }, early) => Ok(Announced { wire, replid, offset, payload, early }),
        _ => Err(out_of_place("to continue")),
    }
}

fn options(plan: &Plan, channel: Channel) -> client::Options {
    client::Options { rdb_version: plan.reader_version.clone(), channel, ..Default::default() }
}

fn out_of_place(what: &str) -> Fault {
    let cause = format!("the server offered {what} where a snapshot was asked for");
    Fault::Link { during: "handshake", cause }
}

/// The snapshot to its last byte, as the server gives it to replicas.
pub(super) fn take_snapshot(plan: &Plan) -> Result<Stream, Fault> {
    match open(plan)? {
        Opened::One(asked) => take_first(plan, asked),
        Opened::Two { snapshot, stream } => take_both(plan, snapshot, stream),
    }
}

/// The snapshot, whose connection then goes on as the stream.
pub(super) fn take_first(plan: &Plan, asked: Announced) -> Result<Stream, Fault> {
    let (mut snapshot, journal) = begin(plan, &asked)?;
    let wire = fill(plan, asked, &mut snapshot)?;
    Ok(journal.map_or(Stream::Elsewhere, |journal| Stream::Next(wire, Box::new(journal))))
}

/// The snapshot, and the stream beside it on a thread of its own. A stream without its snapshot is of no use to anyone, and has
/// ended when this fails.
fn take_both(plan: &Plan, asked: Announced, stream: Wire) -> Result<Stream, Fault> {
    let (mut snapshot, journal) = begin(plan, &asked)?;
    let Some(mut journal) = journal else { return Ok(Stream::Elsewhere) };
    let abandoned = Arc::new(AtomicBool::new(false));
    let (own, gives_up) = (plan.clone(), abandoned.clone());
    let following = std::thread::Builder::new().name("stream".into()).spawn(move || {
        let stop = Stops { plan: &own.stop, abandoned: Some(&gives_up) };
        follow(&own, stream, &mut journal, stop);
    });
    let no_thread = |cause| Fault::Link { during: "stream", cause: format!("no thread for it: {cause}") };
    let following = following.map_err(no_thread)?;
    let taken = fill(plan, asked, &mut snapshot);
    if taken.is_err() {
        abandoned.store(true, Ordering::Relaxed);
        let _ = following.join();
        return taken.map(|_| Stream::Elsewhere);
    }
    Ok(Stream::Flows(following))
}

/// Makes the tables and tells that they are there to be read.
fn begin(plan: &Plan, asked: &Announced) -> Result<(SnapshotWriter, Option<JournalWriter>), Fault> {
    let Announced { replid, offset, payload, .. } = asked;
    let identity =
        |kind| Identity { generation: plan.generation, kind, replid: *replid.as_bytes(), first_offset: *offset };
    let (memory, geometry) = &plan.snapshot;
    let hold_back = if matches!(payload, Payload::Mark(_)) { MARK_LENGTH } else { 0 };
    let snapshot = SnapshotWriter::create(memory.clone(), *geometry, identity(Kind::Snapshot), hold_back)?;
    let journal = match &plan.journal {
        Some((memory, geometry)) => Some(JournalWriter::create(memory.clone(), *geometry, identity(Kind::Journal))?),
        None => None,
    };
    plan.gauge.snapshot_began(*replid, *offset, journal.is_some());
    let (generation, replid, offset) = (plan.generation, *replid, *offset);
    let _ = plan.events.send(CaptureEvent::Started { generation, replid, offset });
    Ok((snapshot, journal))
}

/// Takes the payload, and gives back the connection it came by.
fn fill(plan: &Plan, asked: Announced, snapshot: &mut SnapshotWriter) -> Result<Wire, Fault> {
    let Announced { mut wire, payload, early, .. } = asked;
    match receive_payload(plan, &mut wire, snapshot, &payload, &early) {
        Ok(bytes) => {
            plan.gauge.snapshot_ended(State::Sealed);
            let _ = plan.events.send(CaptureEvent::Completed { generation: plan.generation, bytes });
            Ok(wire)
        }
        Err(fault) => {
            snapshot.abort();
            Err(fault)
        }
    }
}

pub(super) fn connect(plan: &Plan) -> Result<Wire, Fault> {
    let stream = plan.runtime.block_on(async {
        let client = plan.server.connect().await?;
        Ok::<_, ServerError>(client.into_stream().0)
    })?;
    Wire::new(stream, plan.runtime.clone(), TICK)
        .map_err(|cause| Fault::Link { during: "handshake", cause: cause.to_string() })
}

/// `REPLCONF rdb-only 1`: the server then ends the connection after the snapshot and counts no further replica of its
/// stream. Servers before 7.0 don't know it and answer an error, which changes nothing: we close the connection ourselves.
pub(super) fn ask_for_snapshot_alone(wire: &mut Wire) -> Result<(), Fault> {
    let mut command = Vec::new();
    remora_redis::resp::command(&mut command, &["REPLCONF", "rdb-only", "1"]);
    let link = |cause: io::Error| Fault::Link { during: "handshake", cause: cause.to_string() };
    wire.write_all(&command).map_err(link)?;
    let mut answer = Vec::new();
    let began = Instant::now();
    let mut buffer = [0; 512];
    while !answer.ends_with(b"\r\n") {
        match wire.read(&mut buffer).map_err(link)? {
            Received::Bytes(n) => answer.extend_from_slice(&buffer[..n]),
            Received::Idle if began.elapsed() < SILENCE_LIMIT && answer.len() < buffer.len() => {}
            Received::Idle | Received::End => {
                let cause = "no answer to REPLCONF rdb-only".into();
                return Err(Fault::Link { during: "handshake", cause });
            }
        }
    }
    Ok(())
}

/// How many bytes have come; `None` while the server, last heard at `heard`, may still be silent.
pub(super) fn came(
    received: io::Result<Received>,
    heard: Instant,
    during: &'static str,
) -> Result<Option<usize>, Fault> {
    let cause = match received {
        Ok(Received::Bytes(n)) => return Ok(Some(n)),
        Ok(Received::Idle) if heard.elapsed() < SILENCE_LIMIT => return Ok(None),
        Ok(Received::Idle) => format!("nothing came for {} s", SILENCE_LIMIT.as_secs()),
        Ok(Received::End) => "the server closed it; its log says why".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Fault::Link { during, cause })
}

/// How the server answered `PSYNC`. The replid of `Continue` is that of the history from there on.
enum Opening {
    Full { replid: ReplId, offset: u64, payload: Payload },
    Channel { replid: ReplId, offset: u64, payload: Payload, client: u64 },
    TwoChannels,
    Continue { replid: ReplId },
}

/// Drives the handshake to its end. Gives back what was read beyond it.
fn shake(wire: &mut Wire, machine: &mut Client, stop: Stops<'_>) -> Result<(Opening, Vec<u8>), Fault> {
    let link = |cause: io::Error| Fault::Link { during: "handshake", cause: cause.to_string() };
    let mut heard = Instant::now();
    let mut identity = None;
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let output = machine.take_output();
        if !output.is_empty() {
            wire.write_all(&output).map_err(link)?;
        }
        if stop.set() {
            return Err(Fault::Stopped);
        }
        let Some(read) = came(wire.read(&mut buffer), heard, "handshake")? else { continue };
        heard = Instant::now();
        let used = machine.handle_input(&buffer[..read])?;
        while let Some(event) = machine.poll_event() {
            let opening = match event {
                PsyncEvent::FullResync { replid, offset } => {
                    identity = Some((replid, offset, None));
                    continue;
                }
                PsyncEvent::Channel { replid, offset, client } => {
                    identity = Some((replid, offset, Some(client)));
                    continue;
                }
                PsyncEvent::Payload(payload) => identity.map(|(replid, offset, client)| match client {
                    None => Opening::Full { replid, offset, payload },
                    Some(client) => Opening::Channel { replid, offset, payload, client },
                }),
                PsyncEvent::TwoChannels => Some(Opening::TwoChannels),
                PsyncEvent::Continue { replid } => Some(Opening::Continue { replid }),
                PsyncEvent::Handshaken | PsyncEvent::KeepAlive => continue,
            };
            if let Some(opening) = opening {
                return Ok((opening, buffer[used..read].to_vec()));
            }
        }
    }
}

/// Where a payload ends: known beforehand, or recognised.
enum End {
    Length(u64),
    Mark(EofMark),
}

/// The payload, straight into slots. Returns the length of the RDB, in bytes.
fn receive_payload(
    plan: &Plan,
    wire: &mut Wire,
    snapshot: &mut SnapshotWriter,
    payload: &Payload,
    early: &[u8],
) -> Result<u64, Fault> {
    let memory = &plan.snapshot.0;
    let (mut end, trim) = match payload {
        Payload::Length(length) => (End::Length(*length), 0),
        Payload::Mark(mark) => (End::Mark(EofMark::new(*mark)), u64::from(MARK_LENGTH)),
    };
    let mut early = early;
    let mut heard = Instant::now();
    let mut done = matches!(end, End::Length(0));
    while !done {
        if plan.stop.load(Ordering::Relaxed) {
            return Err(Fault::Stopped);
        }
        let Some(space) = snapshot.space() else {
            if plan.retained {
                return Err(Fault::Outgrown);
            }
            wait_for_room(plan, snapshot);
            heard = Instant::now();
            continue;
        };
        let room = match end {
            End::Length(left) => left.min(space.end - space.start),
            End::Mark(_) => space.end - space.start,
        };
        let received = if early.is_empty() {
            wire.receive_into(memory, space.start, room as usize)
        } else {
            let n = early.len().min(room as usize);
            memory.write(space.start, &early[..n]).map_err(remora_table::Error::from)?;
            early = &early[n..];
            Ok(Received::Bytes(n))
        };
        let Some(n) = came(received, heard, "snapshot")? else { continue };
        heard = Instant::now();
        done = match &mut end {
            End::Length(left) => {
                *left -= n as u64;
                *left == 0
            }
            End::Mark(mark) => mark_seen(mark, memory, space.start, n)?,
        };
        snapshot.advance(n as u64)?;
        plan.gauge.snapshot_at(snapshot);
        if !done {
            pause_after(n);
        }
    }
    let length = snapshot.finish(trim)?;
    plan.gauge.snapshot_at(snapshot);
    Ok(length)
}

/// A read of so many bytes is done; the next shall be worth it.
pub(super) fn pause_after(read: usize) {
    if read < WORTHWHILE {
        std::thread::sleep(if read < WORTHWHILE / 8 { PAUSE_LONG } else { PAUSE });
    }
}

/// The ring is full: takes over what readers have passed, or waits a moment for them.
pub(super) fn wait_for_room(plan: &Plan, snapshot: &mut SnapshotWriter) {
    let below = plan.gauge.retire_below();
    if below > snapshot.retired() {
        snapshot.retire(below);
        plan.gauge.snapshot_at(snapshot);
    } else {
        plan.gauge.writer_waits();
        std::thread::sleep(RETIRE_POLL);
    }
}

/// Looks at the last bytes that landed whether they are the payload's end.
fn mark_seen(mark: &mut EofMark, memory: &Memory, start: u64, landed: usize) -> Result<bool, Fault> {
    let mut tail = [0; MARK_LENGTH as usize];
    let n = landed.min(tail.len());
    let at = start + (landed - n) as u64;
    memory.read(at, &mut tail[..n]).map_err(remora_table::Error::from)?;
    Ok(mark.observe(&tail[..n], landed))
}

/// Writes the stream into the journal until it is stopped, lost for good, or continued under another replid. A broken link is taken up
/// at the next byte.
fn follow(plan: &Plan, wire: Wire, journal: &mut JournalWriter, stop: Stops<'_>) {
    let mut wire = wire;
    let mut backoff = Backoff::from_system();
    loop {
        let broke = match pour(plan, &mut wire, journal, stop) {
            Ok(()) | Err(Fault::Stopped) => return journal.abort(),
            Err(fault) => fault,
        };
        tracing::warn!(%broke, offset = journal.end_offset(), "the stream broke; taking it up at the next byte");
        match reconnect(plan, journal, &mut backoff, stop) {
            Ok(again) => {
                wire = again;
                backoff.reset();
                let _ = plan.events.send(CaptureEvent::StreamResumed);
            }
            Err(Fault::HistoryChanged { from, to, at }) => {
                // The journal is not aborted: it holds all of the old history that we got, and replicas may still read it.
                let generation = plan.generation;
                let _ = plan.events.send(CaptureEvent::HistoryChanged { generation, from, to, at });
                return;
            }
            Err(fault) => {
                journal.abort();
                let text = format!("{broke}; then: {fault}");
                let _ = plan.events.send(CaptureEvent::StreamLost { text });
                return;
            }
        }
    }
}

/// Pours the stream into the journal. `Ok` is never reached but by `stop`.
fn pour(plan: &Plan, wire: &mut Wire, journal: &mut JournalWriter, stop: Stops<'_>) -> Result<(), Fault> {
    let during = "stream";
    let link = |cause: io::Error| Fault::Link { during, cause: cause.to_string() };
    let mut buffer = vec![0; STREAM_READ];
    let mut acks = AckClock::new(plan.gauge.snapshot_offset());
    let mut heard = Instant::now();
    loop {
        if stop.set() {
            return Err(Fault::Stopped);
        }
        if let Some(ack) = acks.due(Instant::now()) {
            wire.write_all(&ack).map_err(link)?;
        }
        // The primary sends a PING every `repl-ping-replica-period`, 10 s by default.
        if let Some(n) = came(wire.read(&mut buffer), heard, during)? {
            journal.append(&buffer[..n])?;
            plan.gauge.journal_at(journal.first_offset(), journal.end_offset() - 1);
            heard = Instant::now();
            acks.stream_came();
        }
    }
}

/// How long a broken stream is tried again before the journal is given up: servers keep their backlog far longer, but
/// replicas should not wait for ever to learn that they must start again.
const RESUME_LIMIT: Duration = Duration::from_secs(60);

fn reconnect(plan: &Plan, journal: &JournalWriter, backoff: &mut Backoff, stop: Stops<'_>) -> Result<Wire, Fault> {
    let began = Instant::now();
    loop {
        let tried = try_reconnect(plan, journal, stop);
        match tried {
            // The next attempt would be answered alike.
            Err(fault @ Fault::HistoryChanged { .. }) => return Err(fault),
            Err(fault) if fault.is_transient() && began.elapsed() < RESUME_LIMIT => {
                tracing::debug!(%fault, "the stream can't be taken up yet");
                let pause = backoff.next();
                let until = Instant::now() + pause;
                while Instant::now() < until {
                    if stop.set() {
                        return Err(Fault::Stopped);
                    }
                    std::thread::sleep(TICK.min(pause));
                }
            }
            other => return other,
        }
    }
}

fn try_reconnect(plan: &Plan, journal: &JournalWriter, stop: Stops<'_>) -> Result<Wire, Fault> {
    let mut wire = connect(plan)?;
    let replid = plan.gauge.replid().ok_or(Fault::Stopped)?;
    let options = client::Options { resume: Some((replid, journal.end_offset())), ..Default::default() };
    let mut machine = Client::new(options);
    match shake(&mut wire, &mut machine, stop)? {
        (Opening::Continue { replid: now }, early) => {
            is_same_history(replid, now, journal.end_offset() - 1)?;
            wire.push_back(early);
            Ok(wire)
        }
        _ => Err(Fault::HistoryGone),
    }
}

/// When to tell the primary that we are here.
///
/// The primary puts the stream on only at an ACK that arrives *after* it has reaped its child, and one sent too early is lost:
/// so they come quickly until the first byte of the stream does, then once a second, as replicas do.
///
/// The offset acknowledged is always that of the snapshot. A source is no durable copy of anything: an ACK that followed
/// the stream would let `WAIT` count it as one.
struct AckClock {
    offset: u64,
    last: Option<Instant>,
    began: Instant,
    came: bool,
}

impl AckClock {
    const EVERY: Duration = Duration::from_secs(1);
    const EAGER_FOR: Duration = Duration::from_secs(5);

    fn new(offset: u64) -> Self {
        AckClock { offset, last: None, began: Instant::now(), came: false }
    }

    fn stream_came(&mut self) {
        self.came = true;
    }

    fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        let eager = !self.came && now.duration_since(self.began) < Self::EAGER_FOR;
        let every = if eager { TICK } else { Self::EVERY };
        if self.last.is_some_and(|last| now.duration_since(last) < every) {
            return None;
        }
        self.last = Some(now);
        let mut bytes = Vec::new();
        client::ack(&mut bytes, self.offset);
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acks_come_quickly_until_the_stream_does_and_never_move() {
        let mut clock = AckClock::new(77);
        let now = Instant::now();
        let first = clock.due(now).expect("the first is due at once");
        assert!(first.windows(2).any(|w| w == b"77"));
        assert!(clock.due(now).is_none());
        assert!(clock.due(now + TICK).is_some());
        clock.stream_came();
        assert!(clock.due(now + TICK * 2).is_none());
        assert_eq!(clock.due(now + TICK + AckClock::EVERY), Some(first));
    }
}
