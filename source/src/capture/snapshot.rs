//! The snapshot's bytes: from the connection into slots of the table.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::client::{Channel, EofMark, Options};
use remora_table::{Identity, Kind, Method, Origin, SnapshotSealer, SnapshotWriter, State};

use super::psync_link::{Announced, Opening, PsyncLink, Received, Socket, is_same_history, out_of_place};
use super::stream::{self, Follower, Following, Journal};
use super::{Capture, CaptureError, CaptureEvent, Plan};
use crate::captured::OutputBuffer;
use crate::compression::{Policy, Processors, World};
use crate::gauge::Gauge;
use crate::options::Compress;
use remora_base::mutation::Mutation;
use remora_base::units::Moment;
use remora_process::exit::Failure;
use remora_process::rdb_file::RdbFile;
use remora_process::rdb_file::StoredStream;
use remora_server::Facts;

/// Pause of a writer whose ring is full, before it checks again whether a slot was retired.
const RETIRE_POLL: Duration = Duration::from_micros(500);

/// A read of fewer bytes is followed by a pause. A reader that is woken for every few kilobytes takes the processor
/// from the server's child, which writes them: measured, 20,000 times in one gigabyte, for a tenth of the whole time.
const WORTHWHILE_BYTES: usize = 512 * 1024;

/// The pause: the time in which a fast server sends [`WORTHWHILE_BYTES`], and longer for a slow one. The socket buffer
/// holds more than arrives in this time.
const PAUSE: Duration = Duration::from_micros(300);
const PAUSE_LONG: Duration = Duration::from_millis(1);

/// The phase of a capture that this module is about, for its errors.
pub(super) const DURING: &str = "snapshot";

/// The length in bytes of the mark that ends an `$EOF:` payload.
pub(super) const MARK_BYTES: u32 = 40;

impl Capture {
    /// Creates the tables, and reports that replicas may read them.
    pub(super) fn begin(&self, announced: &Announced) -> Result<(Taking<'_>, Option<Journal>), CaptureError> {
        let Announced { replid, offset, payload, .. } = announced;
        let (memory, geometry) = &self.plan.snapshot;
        let hold_back = if matches!(payload, Payload::Mark(_)) { MARK_BYTES } else { 0 };
        let identity = self.identity(Kind::Snapshot, *replid, *offset);
        let writer = SnapshotWriter::create(memory.clone(), *geometry, identity, hold_back)?;
        let Begun { journal, sealing } = self.begun(*replid, *offset)?;
        if let Payload::Length(bytes) = payload {
            self.plan.gauge.announced(*bytes);
        }
        Ok((Taking::new(self, writer, sealing), journal))
    }

    /// The snapshot's table exists: creates the journal, unless another capture writes one, begins to seal, and reports
    /// that replicas may read.
    pub(super) fn begun(&self, replid: ReplId, offset: u64) -> Result<Begun, CaptureError> {
        self.plan.tuning.end(&self.plan.runtime);
        self.check_imports()?;
        let journal = Journal::create(&self.plan, &self.identity(Kind::Journal, replid, offset))?;
        let sealing = Sealing::begin(&self.plan, self.identity(Kind::Snapshot, replid, offset))?;
        self.plan.gauge.snapshot_began(replid, offset, journal.is_some());
        self.report(CaptureEvent::Started { generation: self.plan.generation, replid, offset });
        Ok(Begun { journal, sealing })
    }

    /// The error of a snapshot that the server sends before the stream, on one connection: if the link broke because
    /// the server held back too much of the stream, the error says so.
    pub(super) fn explained(&self, error: CaptureError) -> CaptureError {
        let is_broken = matches!(error, CaptureError::Link { during: DURING, .. });
        if !is_broken || self.plan.journal.is_none() {
            return error;
        }
        let took = self.plan.gauge.capture_time();
        let asked = self.wait_for(async {
            let mut client = self.plan.server.connect().await?;
            let facts = Facts::read(&mut client).await?;
            let buffer = OutputBuffer::read(&mut client, &facts).await;
            Ok((facts.offset.unwrap_or(0), buffer))
        });
        let Ok((offset, buffer)) = asked else { return error };
        let held = offset.saturating_sub(self.plan.gauge.snapshot_offset());
        match buffer.reached(held, took) {
            Some(limit) => CaptureError::OutputBuffer { held, took, limit },
            None => error,
        }
    }

    pub(super) fn identity(&self, kind: Kind, replid: ReplId, first_offset: u64) -> Identity {
        Identity { kind, origin: Origin { generation: self.plan.generation, history: replid, offset: first_offset } }
    }
}

/// What begins with a snapshot.
pub(super) struct Begun {
    /// `None` if another capture follows the stream.
    pub(super) journal: Option<Journal>,
    /// `None` if replicas on other hosts read the plain table.
    pub(super) sealing: Option<Sealing>,
}

/// A snapshot that is being written. Its table is aborted when this is dropped, unless the snapshot was completed.
pub(super) struct Taking<'c> {
    capture: &'c Capture,
    writer: SnapshotWriter,
    sealing: Option<Sealing>,
    is_complete: bool,
}

impl<'c> Taking<'c> {
    pub(super) fn new(capture: &'c Capture, writer: SnapshotWriter, sealing: Option<Sealing>) -> Taking<'c> {
        Taking { capture, writer, sealing, is_complete: false }
    }

    /// Seals the snapshot without its last `trim` bytes, and reports it to the source's loop.
    pub(super) fn complete(mut self, trim: u64) -> Result<(), CaptureError> {
        let sealing = self.sealing.take();
        self.complete_as(trim, || sealing.map_or(Ok(()), Sealing::finish))
    }

    /// The same for a snapshot that this thread seals: `seal` does the rest of it.
    pub(super) fn complete_with(self, seal: impl FnOnce() -> Result<(), CaptureError>) -> Result<(), CaptureError> {
        self.complete_as(0, seal)
    }

    fn complete_as(mut self, trim: u64, seal: impl FnOnce() -> Result<(), CaptureError>) -> Result<(), CaptureError> {
        let bytes = self.writer.finish(trim)?;
        seal()?;
        self.is_complete = true;
        let plan = &self.capture.plan;
        plan.gauge.snapshot_at(&self.writer);
        plan.gauge.snapshot_ended(State::Sealed);
        self.capture.report(CaptureEvent::Completed { generation: plan.generation, bytes });
        Ok(())
    }

    /// Appends all of `bytes`. If the ring is full it waits for the readers.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
        let mut rest = bytes;
        loop {
            let taken = self.writer.append(rest)?;
            rest = &rest[taken..];
            self.show();
            if rest.is_empty() {
                return Ok(());
            }
            self.capture.stop.check()?;
            self.wait_for_room()?;
        }
    }

    /// Receives the payload, completes the snapshot, and returns the connection.
    pub(super) fn fill(mut self, announced: Announced) -> Result<Socket, CaptureError> {
        let Announced { mut socket, payload, .. } = announced;
        let trim = self.receive(&mut socket, &payload)?;
        self.complete(trim)?;
        Ok(socket)
    }

    /// Receives the payload. Returns how many bytes at its end do not belong to the snapshot.
    fn receive(&mut self, socket: &mut Socket, payload: &Payload) -> Result<u64, CaptureError> {
        let capture = self.capture;
        let memory = &capture.plan.snapshot.0;
        let mut intake = Intake::new(payload);
        let mut silence = capture.silence(DURING);
        while !intake.is_over() {
            capture.stop.check()?;
            let Some(received) = intake.read(socket, memory, &mut self.writer)? else {
                self.wait_for_room()?;
                silence.restart();
                continue;
            };
            let Some(n) = silence.check(received)? else { continue };
            self.show();
            if !intake.is_over() {
                pause_after(n);
            }
        }
        Ok(intake.trim())
    }

    /// The ring is full: retires the slots that the machine allows to be reused, or waits a moment for the readers.
    /// Fails if no slot may be reused.
    fn wait_for_room(&mut self) -> Result<(), CaptureError> {
        let plan = &self.capture.plan;
        if plan.retained {
            return Err(CaptureError::Outgrown);
        }
        let below = plan.gauge.retire_below();
        if below > self.writer.retired() {
            self.writer.retire(below);
            self.show();
        } else {
            plan.gauge.writer_waits();
            std::thread::sleep(RETIRE_POLL);
        }
        Ok(())
    }

    /// Shows in the gauge how far the writer is.
    fn show(&self) {
        self.capture.plan.gauge.snapshot_at(&self.writer);
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        if !self.is_complete {
            self.writer.abort();
        }
    }
}

/// Where a payload ends.
enum End {
    /// After this many more bytes.
    Length(u64),
    /// After the mark.
    Mark(EofMark),
    Reached,
}

/// Receives one payload straight into the slots of a table, and takes nothing of what follows it on the connection.
pub struct Intake {
    end: End,
    trim: u64,
}

impl Intake {
    /// The beginning of a payload that was announced so.
    pub fn new(payload: &Payload) -> Intake {
        match payload {
            Payload::Length(0) => Intake { end: End::Reached, trim: 0 },
            Payload::Length(length) => Intake { end: End::Length(*length), trim: 0 },
            Payload::Mark(mark) => Intake { end: End::Mark(EofMark::new(*mark)), trim: u64::from(MARK_BYTES) },
        }
    }

    /// Whether the payload's last byte has been received.
    pub fn is_over(&self) -> bool {
        matches!(self.end, End::Reached)
    }

    /// How many of the bytes that were received do not belong to the snapshot: the mark.
    pub fn trim(&self) -> u64 {
        self.trim
    }

    /// Reads once into the writer's free space. `None` if it has none.
    pub fn read(
        &mut self,
        socket: &mut Socket,
        memory: &Memory,
        writer: &mut SnapshotWriter,
    ) -> Result<Option<io::Result<Received>>, CaptureError> {
        let Some(space) = writer.space() else { return Ok(None) };
        let room = match self.end {
            // The bytes behind the last one are the stream's.
            End::Length(left) => left.min(space.end - space.start),
            // The server sends nothing behind the mark before it has an acknowledgement.
            End::Mark(_) | End::Reached => space.end - space.start,
        };
        let received = socket.receive_into(memory, space.start, room as usize);
        if let Ok(Received::Bytes(n)) = received {
            let is_over = match &mut self.end {
                End::Length(left) => {
                    *left -= n as u64;
                    *left == 0
                }
                End::Mark(mark) => mark_seen(mark, memory, space.start, n)?,
                End::Reached => true,
            };
            if is_over {
                self.end = End::Reached;
                if Mutation::AheadDropped.is_active() {
                    socket.take(socket.ahead().len());
                }
            }
            writer.advance(n as u64)?;
        }
        Ok(Some(received))
    }
}

/// Pauses after a read of `read` bytes if they were few, so that the next read returns more.
pub(super) fn pause_after(read: usize) {
    if read < WORTHWHILE_BYTES {
        std::thread::sleep(if read < WORTHWHILE_BYTES / 8 { PAUSE_LONG } else { PAUSE });
    }
}

/// Whether the last bytes that were received are the payload's mark.
fn mark_seen(mark: &mut EofMark, memory: &Memory, start: u64, received: usize) -> Result<bool, CaptureError> {
    let mut tail = [0; MARK_BYTES as usize];
    let n = received.min(tail.len());
    let at = start + (received - n) as u64;
    memory.read(at, &mut tail[..n]).map_err(remora_table::Error::from)?;
    Ok(mark.observe(&tail[..n], received))
}

// The thread that compresses and seals a snapshot while this process or a child of the server writes it.

/// Pause before the plain table is looked at again. A fast server fills a slot of 4 MiB in two milliseconds.
const SEALING_PAUSE: Duration = Duration::from_micros(500);

/// A snapshot that is being sealed. If it is dropped before its end, its table is aborted.
pub(super) struct Sealing {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), remora_table::Error>>>,
}

impl Sealing {
    /// Creates the table of the snapshot for other hosts, if the plan has one, and begins to fill it. The plain table
    /// must exist, and replicas must not be able to read the other one yet.
    pub(super) fn begin(plan: &Plan, identity: Identity) -> Result<Option<Sealing>, CaptureError> {
        let Some(remote) = &plan.remote else {
            plan.gauge.not_compressed();
            return Ok(None);
        };
        let ((plain, geometry), memory, choice) = (plan.snapshot.clone(), remote.memory.clone(), remote.compress);
        let sealer = match &remote.key {
            Some(key) if choice == Compress::Off => SnapshotSealer::create(plain, memory, geometry, identity, key)?,
            key => SnapshotSealer::create_compressed(plain, memory, geometry, identity, key.as_ref())?,
        };
        plan.gauge.sealing_begins();
        let (over, gauge) = (Arc::new(AtomicBool::new(false)), plan.gauge.clone());
        let stop = over.clone();
        let thread = std::thread::Builder::new().name("seal".into()).spawn(move || seal(sealer, choice, &gauge, &stop));
        let thread = thread.map_err(|cause| CaptureError::Link {
            during: "snapshot",
            cause: format!("no thread to seal it: {cause}"),
        })?;
        Ok(Some(Sealing { over, thread: Some(thread) }))
    }

    /// The snapshot is complete: waits until all of it is sealed. At most the last slots are not yet.
    pub(super) fn finish(mut self) -> Result<(), CaptureError> {
        match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => Ok(()),
            Some(Ok(Err(error))) => Err(error.into()),
            Some(Err(_)) => Err(CaptureError::Panicked("the thread that seals it panicked".into())),
        }
    }
}

impl Drop for Sealing {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its result no longer matters: the snapshot failed.
            let _ = thread.join();
        }
    }
}

/// Decides how slots are compressed, and shows it.
struct Compressing<'g> {
    policy: Policy,
    processors: Processors,
    gauge: &'g Gauge,
    /// The method that was logged last.
    logged: Option<Method>,
}

impl Compressing<'_> {
    /// How the next slot is compressed.
    fn next(&mut self, now: Instant) -> Option<Method> {
        let world = World { link: self.gauge.link(), spare: self.processors.spare(now) };
        self.policy.next(&world)
    }

    /// A slot was stored.
    fn stored(&mut self, sealer: &mut SnapshotSealer, took: Duration) {
        let Some(slot) = sealer.take_stored() else { return };
        self.policy.stored(slot, took);
        // Slots of a trial say nothing of what comes of it.
        let method = self.policy.method();
        self.gauge.stored(self.policy.stored_bytes(), method.is_some(), self.policy.text());
        if self.logged != method && slot.wanted == method {
            tracing::info!(compression = %self.policy.text(), "slots for other hosts are compressed in another way from now on");
            self.logged = method;
        }
    }
}

/// Seals slot after slot until the snapshot is complete or aborted, or `stop` is set.
fn seal(
    mut sealer: SnapshotSealer,
    choice: Compress,
    gauge: &Gauge,
    stop: &AtomicBool,
) -> Result<(), remora_table::Error> {
    let (policy, processors) = (Policy::new(choice), Processors::default());
    let mut compressing = Compressing { policy, processors, gauge, logged: None };
    while sealer.state() == State::Open {
        let began = Instant::now();
        sealer.compress_with(compressing.next(began));
        match sealer.pump() {
            Ok(true) => {
                compressing.stored(&mut sealer, began.elapsed());
                gauge.sealed(sealer.sealed_slots());
            }
            Ok(false) if stop.load(Ordering::Relaxed) => sealer.abort(),
            Ok(false) => std::thread::sleep(SEALING_PAUSE),
            Err(error) => {
                sealer.abort();
                tracing::error!(%error, "the snapshot cannot be sealed");
                // The writer must not wait for slots that are never sealed. It learns of this when it is done.
                gauge.sealed(u64::MAX);
                return Err(error);
            }
        }
    }
    Ok(())
}

// The snapshot as the server sends it to its replicas, over one connection or two.

/// How the server sends a snapshot and the stream.
enum Opened {
    /// One after the other, over one connection.
    One(Announced),
    /// Both at once, over two connections.
    Two { snapshot: Announced, stream: Socket },
}

impl Capture {
    /// Takes the snapshot as the server sends it to its replicas.
    pub(super) fn take_plain_snapshot(&self) -> Result<Following, CaptureError> {
        match self.open()? {
            Opened::One(announced) => self.take_announced(announced),
            Opened::Two { snapshot, stream } => self.take_both(snapshot, stream),
        }
    }

    /// Takes the snapshot. The stream follows over the same connection.
    pub(super) fn take_announced(&self, announced: Announced) -> Result<Following, CaptureError> {
        let (taking, journal) = self.begin(&announced)?;
        let socket = taking.fill(announced).map_err(|error| self.explained(error))?;
        Ok(match journal {
            Some(journal) => Following::ThisThread(Box::new(Follower::new(self, socket, journal))),
            None => Following::AnotherCapture,
        })
    }

    /// Takes the snapshot, while another thread follows the stream. A stream without its snapshot is of no use, so that
    /// thread has ended when this fails.
    fn take_both(&self, announced: Announced, stream: Socket) -> Result<Following, CaptureError> {
        let (taking, journal) = self.begin(&announced)?;
        let Some(journal) = journal else { return Ok(Following::AnotherCapture) };
        self.beside_the_stream(stream, journal, || taking.fill(announced).map(drop))
    }

    /// Runs `fill` while another thread follows the stream. That thread has ended when this fails.
    pub(super) fn beside_the_stream(
        &self,
        stream: Socket,
        journal: Journal,
        fill: impl FnOnce() -> Result<(), CaptureError>,
    ) -> Result<Following, CaptureError> {
        let abandoned = Arc::new(AtomicBool::new(false));
        let follower = Follower::new(self, stream, journal).until(abandoned.clone());
        let capture = self.clone();
        let following = thread::Builder::new().name("stream".into()).spawn(move || capture.follow(|| follower.run()));
        let following = following.map_err(|cause| CaptureError::Link {
            during: stream::DURING,
            cause: format!("no thread for it: {cause}"),
        })?;
        if let Err(error) = fill() {
            abandoned.store(true, Ordering::Relaxed);
            let _ = following.join();
            return Err(error);
        }
        Ok(Following::OwnThread(following))
    }

    /// Requests a snapshot, and the stream if no other capture follows it.
    fn open(&self) -> Result<Opened, CaptureError> {
        if self.plan.journal.is_none() {
            return Ok(Opened::One(self.open_one()?));
        }
        let mut link = self.handshake(self.options(Channel::WholeOrStream))?;
        match link.opening()? {
            Opening::Full { replid, offset, payload } => Ok(Opened::One(link.announced(replid, offset, payload))),
            Opening::TwoChannels => match self.open_second(link) {
                // The user may lack the ACL rule for SYNC, which only the second channel needs.
                Err(error @ CaptureError::Psync(_)) if !error.is_transient() => {
                    tracing::info!(%error, "the server refused a second channel; using one connection for snapshot and stream");
                    Ok(Opened::One(self.open_one()?))
                }
                opened => opened,
            },
            Opening::Continue { .. } | Opening::Channel { .. } => Err(out_of_place("to continue")),
        }
    }

    /// Requests snapshot and stream over one connection.
    fn open_one(&self) -> Result<Announced, CaptureError> {
        let mut link = self.handshake_for_snapshot(self.options(Channel::Whole))?;
        match link.opening()? {
            Opening::Full { replid, offset, payload } => Ok(link.announced(replid, offset, payload)),
            _ => Err(out_of_place("to continue")),
        }
    }

    /// Requests the snapshot over a second connection, and the stream from the byte after it over the first one.
    fn open_second(&self, stream: PsyncLink) -> Result<Opened, CaptureError> {
        let mut link = self.handshake(self.options(Channel::Snapshot))?;
        let (snapshot, client) = match link.opening()? {
            Opening::Channel { replid, offset, payload, client } => (link.announced(replid, offset, payload), client),
            _ => return Err(out_of_place("something else than a channel")),
        };
        let (replid, offset) = (snapshot.replid, snapshot.offset);
        let channel = Channel::Stream { snapshot_client: client };
        let mut stream = stream.again(Options { resume: Some((replid, offset + 1)), channel, ..Options::default() });
        let now = stream.continued()?.ok_or_else(|| out_of_place("another snapshot"))?;
        is_same_history(replid, now, offset)?;
        Ok(Opened::Two { snapshot, stream: stream.into_socket() })
    }

    /// The options of a handshake for a snapshot.
    pub(super) fn options(&self, channel: Channel) -> Options {
        Options { rdb_version: self.plan.reader_version.clone(), channel, ..Options::default() }
    }
}

// The snapshot from a file that some server has written, and the stream behind it from the server that is followed.
//
// ```text
//   dump.rdb: repl-id, repl-offset ──▶ does the server's backlog reach back to there? ── no: refused, nothing is asked for
//        │                                    │ yes
//        ▼ bytes                              ▼ PSYNC <repl-id> <repl-offset + 1> ──▶ +CONTINUE
//   snapshot table                          journal
// ```
//
// The server is asked by `INFO` first: a `PSYNC` that it cannot continue would have it take a snapshot. Where the
// beginning of the stream is stored too, the journal has it first, and the server is asked for what is behind that.

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// How much the clocks of two hosts may differ, where their time is kept by any means.
const CLOCKS_DIFFER: Duration = Duration::from_secs(60);

const A_DAY: Duration = Duration::from_secs(24 * 3600);

impl Capture {
    /// Takes the snapshot from a file, and the stream behind it from the server.
    pub(super) fn take_file(&self, file: &SnapshotFile) -> Result<Following, CaptureError> {
        let opened = self.open_file(file)?;
        self.take_opened(file, opened)
    }

    /// Opens a file, and the stream behind it, unless another capture follows that.
    pub(super) fn open_file(&self, file: &SnapshotFile) -> Result<OpenedFile, CaptureError> {
        let SnapshotFile { path, replid, offset, .. } = file;
        let end = file.end();
        let unreadable =
            |error: std::io::Error| CaptureError::File(format!("{} cannot be read: {error}", path.display()));
        let input = File::open(path).map_err(unreadable)?;
        let (first, _) = self.plan.gauge.journal();
        let socket = match self.plan.journal {
            // Another capture follows the stream.
            None if first > offset + 1 => {
                let text =
                    format!("the journal does not reach back to the offset {offset} of {} any more", path.display());
                return Err(CaptureError::File(text));
            }
            None if self.plan.gauge.reading().first_state.is_some() => {
                let text = format!(
                    "the stream behind {} has commands that must not be applied late (expiries that count from the moment of the \
                     command, or changes of the cluster's slots): restart the source with a newer file, or without one",
                    path.display()
                );
                return Err(CaptureError::File(text));
            }
            None => None,
            Some(_) => {
                let facts = self.wait_for(async { Facts::read(&mut self.plan.server.connect().await?).await })?;
                file.check(&facts).map_err(CaptureError::File)?;
                let resume = Some((*replid, end + 1));
                let mut link = self.handshake(Options { resume, ..Options::default() })?;
                let now = link.continued()?.ok_or(CaptureError::HistoryGone)?;
                is_same_history(*replid, now, end)?;
                Some(link.into_socket())
            }
        };
        Ok(OpenedFile { input, socket })
    }

    /// Takes the snapshot from a file that is open.
    pub(super) fn take_opened(&self, file: &SnapshotFile, opened: OpenedFile) -> Result<Following, CaptureError> {
        let OpenedFile { mut input, socket } = opened;
        let SnapshotFile { replid, offset, .. } = file;
        let (memory, geometry) = &self.plan.snapshot;
        let identity = self.identity(Kind::Snapshot, *replid, *offset);
        let writer = SnapshotWriter::create(memory.clone(), *geometry, identity, 0)?;
        let Begun { journal, sealing } = self.begun(*replid, *offset)?;
        self.plan.gauge.announced(file.bytes);
        let mut taking = Taking::new(self, writer, sealing);
        let journal = journal.map(|mut journal| {
            // When the server has written what is behind the snapshot is not known. It was after that.
            journal.written_since(file.taken_at(Instant::now(), Moment::now()));
            journal
        });
        let (Some(socket), Some(mut journal)) = (socket, journal) else {
            taking.append_file(&mut input, file)?;
            taking.complete(0)?;
            return Ok(Following::AnotherCapture);
        };
        if let Some(stream) = &file.stream {
            self.append_stored(&mut journal, stream).inspect_err(|_| journal.abort())?;
        }
        self.beside_the_stream(socket, journal, || {
            taking.append_file(&mut input, file)?;
            taking.complete(0)
        })
    }

    /// Puts the stored beginning of the stream into the journal. It was checked when it was written there, and must end
    /// where the server goes on.
    fn append_stored(&self, journal: &mut Journal, stream: &StoredStream) -> Result<(), CaptureError> {
        let failed = |what: &dyn std::fmt::Display| CaptureError::File(format!("{}: {what}", stream.path.display()));
        let mut input = File::open(&stream.path).map_err(|error| failed(&error))?;
        let mut piece = vec![0; PIECE];
        loop {
            self.stop.check()?;
            match input.read(&mut piece) {
                Ok(0) if journal.end_offset() == stream.end + 1 => return Ok(()),
                Ok(0) => return Err(failed(&"it is not as long as it was")),
                Ok(length) => journal.append(piece.get(..length).unwrap_or_default(), &self.plan.gauge)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(&error)),
            }
        }
    }
}

/// A file that is open, and what comes behind it.
pub(super) struct OpenedFile {
    input: File,
    /// `None` if another capture follows the stream.
    socket: Option<Socket>,
}

/// A time before anything that still plays a part. A host that has just started has no such time: then its first one,
/// nearly.
pub(super) fn long_ago(now: Instant) -> Instant {
    (0..32_u32).find_map(|halves| now.checked_sub(A_DAY / 2_u32.saturating_pow(halves))).unwrap_or(now)
}

impl Taking<'_> {
    /// Appends all of a file, which must have the length that it had when it was checked.
    fn append_file(&mut self, input: &mut File, file: &SnapshotFile) -> Result<(), CaptureError> {
        let failed = |what: &dyn std::fmt::Display| CaptureError::File(format!("{}: {what}", file.path.display()));
        let (mut piece, mut read) = (vec![0; PIECE], 0);
        loop {
            let length = match input.read(&mut piece) {
                Ok(0) if read == file.bytes => return Ok(()),
                Ok(0) => return Err(failed(&"it is shorter than it was")),
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed(&error)),
            };
            read += length as u64;
            if read > file.bytes {
                return Err(failed(&"it is longer than it was"));
            }
            self.append(piece.get(..length).unwrap_or_default())?;
        }
    }
}

// A file that has a snapshot which some server has written.

/// A snapshot in a file.
#[derive(Debug)]
pub(crate) struct SnapshotFile {
    pub(super) path: PathBuf,
    /// The history that it belongs to.
    pub(super) replid: ReplId,
    /// The last byte of the stream that it holds.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// When it was taken.
    taken: Moment,
    /// The beginning of the stream behind it.
    stream: Option<StoredStream>,
}

impl SnapshotFile {
    /// The snapshot that was found in this file.
    ///
    /// # Errors
    /// It does not say where in which history it was taken.
    pub(crate) fn of(path: &Path, rdb: &RdbFile) -> Result<SnapshotFile, Failure> {
        let Ok(replid) = rdb.replid.parse() else {
            return Err(Failure::refused(format!(
                "{} does not say to which replication history it belongs (repl-id, repl-offset): a server writes that only \
                 while it is a replica, or has replicas or a backlog",
                path.display()
            )));
        };
        Ok(SnapshotFile {
            path: path.to_owned(),
            replid,
            offset: rdb.offset,
            bytes: rdb.bytes,
            taken: rdb.taken,
            stream: None,
        })
    }

    /// The same with the beginning of the stream behind it, in a file of its own.
    pub(super) fn with_stream(self, stream: Option<StoredStream>) -> SnapshotFile {
        SnapshotFile { stream, ..self }
    }

    /// The last byte of the stream that is in files.
    fn end(&self) -> u64 {
        self.stream.as_ref().map_or(self.offset, |stream| stream.end)
    }

    /// When it was taken.
    pub(crate) fn taken(&self) -> Moment {
        self.taken
    }

    /// The latest time before which nothing behind it was written, as far as the clocks of two hosts can say it.
    fn taken_at(&self, now: Instant, moment: Moment) -> Instant {
        let age =
            moment.get().checked_sub(self.taken.get()).map(|seconds| Duration::from_secs(seconds) + CLOCKS_DIFFER);
        age.and_then(|age| now.checked_sub(age)).unwrap_or_else(|| long_ago(now))
    }

    /// Where it is, for people.
    pub(crate) fn place(&self) -> String {
        self.path.display().to_string()
    }

    /// The history that it belongs to.
    pub(crate) fn history(&self) -> ReplId {
        self.replid
    }

    /// The last byte of the stream that it holds.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether the server would continue behind it, with room for what it writes in the meantime.
    ///
    /// # Errors
    /// It would not.
    pub(crate) fn check(&self, facts: &Facts) -> Result<(), String> {
        let covered = facts.covers(self.replid, self.end(), 0);
        covered.map_err(|text| {
            format!(
                "the server would not continue behind {} ({}:{}): {text}; take a newer file, or raise repl-backlog-size",
                self.path.display(),
                self.replid,
                self.end()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::thread::sleep;

    use remora_redis::psync::client::Options;

    use super::super::psync_link::Opening;
    use super::super::tests::{FULL, MARK, Primary, Rig, SLOT_BYTES, SLOTS, content, link_cause};
    use super::*;

    /// Bytes of three and a half slots.
    const SOME_BYTES: usize = SLOT_BYTES as usize * 7 / 2;

    /// Bytes of all slots.
    const RING_BYTES: usize = (SLOT_BYTES * SLOTS) as usize;

    /// Takes a snapshot whose `PSYNC` is answered, and then the bytes of `behind` sent in these pieces.
    fn take(rig: &Rig, behind: &[&[u8]], end: impl FnOnce(Primary) + Send) -> Result<(), CaptureError> {
        let script = |mut primary: Primary| {
            primary.converse(&FULL);
            for (number, piece) in (0..).zip(behind) {
                // The pause has the capture read the pieces one by one.
                sleep(Duration::from_millis(if number == 0 { 0 } else { 20 }));
                primary.try_send(piece);
            }
            end(primary);
        };
        rig.play(script, |capture, socket| {
            let mut link = capture.handshake_over(socket, Options::default());
            let Opening::Full { replid, offset, payload } = link.opening()? else { panic!("another opening") };
            let announced = link.announced(replid, offset, payload);
            let (taking, journal) = capture.begin(&announced)?;
            assert_eq!(journal.map(|journal| journal.end_offset()), Some(78));
            taking.fill(announced).map(drop)
        })
    }

    /// Checks that the snapshot was not published as complete.
    #[track_caller]
    fn is_aborted(rig: &mut Rig) {
        assert_eq!(rig.snapshot_state(), (State::Aborted, None));
        assert_eq!(rig.reported(), ["started at 77"]);
    }

    #[track_caller]
    fn is_sealed(rig: &mut Rig, bytes: &[u8]) {
        let length = bytes.len();
        assert_eq!(rig.snapshot_state(), (State::Sealed, Some(length as u64)));
        assert!(rig.snapshot_bytes(length) == bytes, "the table holds other bytes");
        assert!(rig.sealed_bytes() == bytes, "the sealed table holds other bytes");
        assert_eq!(rig.reported(), ["started at 77".to_owned(), format!("completed with {length} bytes")]);
    }

    #[test]
    fn a_payload_of_known_length_fills_the_table_to_its_last_byte() {
        let bytes = content(SOME_BYTES);
        let header = format!("${SOME_BYTES}\r\n");
        let mut rig = Rig::new();
        take(&rig, &[header.as_bytes(), &bytes[..5000], &bytes[5000..]], drop).unwrap();
        is_sealed(&mut rig, &bytes);

        // In one piece with its header, and the stream behind it.
        let mut rig = Rig::new();
        take(&rig, &[&[header.as_bytes(), &bytes].concat()], drop).unwrap();
        is_sealed(&mut rig, &bytes);

        let mut rig = Rig::new();
        take(&rig, &[b"$0\r\n"], drop).unwrap();
        is_sealed(&mut rig, &[]);
    }

    #[test]
    fn a_payload_with_a_mark_ends_before_the_mark() {
        let bytes = content(SOME_BYTES);
        let header = format!("$EOF:{MARK}\r\n");
        let (first, second) = MARK.as_bytes().split_at(13);
        let whole = [header.as_bytes(), &bytes, MARK.as_bytes()].concat();
        let cut = [header.as_bytes(), &bytes[..1], &bytes[1..9000], &bytes[9000..], first, second];
        for pieces in [&[whole.as_slice()][..], &cut] {
            let mut rig = Rig::new();
            take(&rig, pieces, drop).unwrap();
            is_sealed(&mut rig, &bytes);
        }
        let mut rig = Rig::new();
        take(&rig, &[header.as_bytes(), MARK.as_bytes()], drop).unwrap();
        is_sealed(&mut rig, &[]);
    }

    #[test]
    fn a_primary_that_closes_in_the_middle_leaves_an_aborted_table() {
        let bytes = content(SOME_BYTES);
        let length = format!("${}\r\n", SOME_BYTES + 1);
        let mark = format!("$EOF:{MARK}\r\n");
        let part_of_mark = &MARK.as_bytes()[..39];
        for pieces in [[length.as_bytes(), &bytes, b""], [mark.as_bytes(), &bytes, part_of_mark]] {
            let mut rig = Rig::new();
            let error = take(&rig, &pieces, drop).unwrap_err();
            assert!(link_cause(&error).contains("closed the connection"), "{error}");
            is_aborted(&mut rig);
        }
    }

    #[test]
    fn a_silent_primary_leaves_an_aborted_table() {
        let mut rig = Rig::new();
        rig.capture.silence_limit = Duration::from_millis(400);
        let error = take(&rig, &[b"$100\r\n", b"REDIS"], |mut primary| primary.drain()).unwrap_err();
        assert!(error.to_string().starts_with("the link to the server broke during the snapshot"), "{error}");
        assert!(link_cause(&error).contains("no byte arrived within"), "{error}");
        is_aborted(&mut rig);
    }

    #[test]
    fn a_stopped_snapshot_leaves_an_aborted_table() {
        let mut rig = Rig::new();
        let stop = rig.capture.plan.stop.clone();
        let stopping = |mut primary: Primary| {
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            primary.drain();
        };
        let error = take(&rig, &[b"$100\r\n", b"REDIS"], stopping).unwrap_err();
        assert!(matches!(error, CaptureError::Stopped));
        is_aborted(&mut rig);
    }

    #[test]
    fn a_retained_snapshot_that_outgrows_its_table_is_aborted() {
        let bytes = content(RING_BYTES + 1);
        let header = format!("${}\r\n", bytes.len());
        let mut rig = Rig::new();
        let error = take(&rig, &[header.as_bytes(), &bytes], |mut primary| primary.drain()).unwrap_err();
        assert!(matches!(error, CaptureError::Outgrown) && error.is_transient());
        is_aborted(&mut rig);

        // One byte less fits.
        let mut rig = Rig::new();
        let bytes = &bytes[..RING_BYTES];
        take(&rig, &[format!("${RING_BYTES}\r\n").as_bytes(), bytes], drop).unwrap();
        is_sealed(&mut rig, bytes);
    }

    #[test]
    fn a_windowed_snapshot_waits_for_its_readers_and_reuses_their_slots() {
        let bytes = content(RING_BYTES + SOME_BYTES);
        let header = format!("${}\r\n", bytes.len());
        let mut rig = Rig::new();
        rig.capture.plan.retained = false;
        rig.capture.silence_limit = Duration::from_millis(500);
        let gauge = rig.capture.plan.gauge.clone();
        let reading = |mut primary: Primary| {
            while gauge.reading().writer_waits == 0 {
                sleep(Duration::from_millis(1));
            }
            // To wait for readers is no silence of the server.
            sleep(Duration::from_millis(600));
            assert_eq!(gauge.retired_slots(), 0);
            gauge.allow_retiring(4);
            primary.drain();
        };
        take(&rig, &[header.as_bytes(), &bytes], reading).unwrap();
        assert_eq!(rig.snapshot_state(), (State::Sealed, Some(bytes.len() as u64)));
        assert_eq!(gauge.retired_slots(), 4);
        assert_eq!(rig.reported()[1], format!("completed with {} bytes", bytes.len()));
    }

    #[test]
    fn what_is_behind_a_file_is_as_old_as_the_file_may_be() {
        let now = Instant::now();
        let file = |taken| SnapshotFile {
            path: PathBuf::new(),
            replid: super::super::tests::history(),
            offset: 7,
            bytes: 1,
            taken: Moment::seconds(taken),
            stream: None,
        };
        let age = |taken| now.duration_since(file(taken).taken_at(now, Moment::seconds(10_000)));
        assert_eq!(age(9_990), Duration::from_secs(70));
        // A file of the future says nothing.
        assert_eq!(age(10_001), now.duration_since(long_ago(now)));
    }

    #[test]
    fn what_is_appended_is_all_there_and_an_incomplete_snapshot_is_aborted() {
        let bytes = content(SOME_BYTES);
        let mut rig = Rig::new();
        // Only the writer is tried here: no thread seals what it writes.
        (rig.capture.plan.remote, rig.capture.plan.sealed_journal) = (None, None);
        let (memory, geometry) = rig.capture.plan.snapshot.clone();
        let create = || {
            let replid = super::super::tests::history();
            let identity = rig.capture.identity(Kind::Snapshot, replid, 77);
            SnapshotWriter::create(memory.clone(), geometry, identity, 0).unwrap()
        };
        let mut taking = Taking::new(&rig.capture, create(), None);
        taking.append(&bytes).unwrap();
        drop(taking);
        assert_eq!(rig.snapshot_state(), (State::Aborted, None));
        let mut taking = Taking::new(&rig.capture, create(), None);
        taking.append(&bytes).unwrap();
        taking.complete(0).unwrap();
        assert_eq!(rig.snapshot_state(), (State::Sealed, Some(bytes.len() as u64)));
        assert!(rig.snapshot_bytes(bytes.len()) == bytes);
    }
}
