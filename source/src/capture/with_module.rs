//! A capture with the module in the server: arms the module, and follows what the server's fork child writes into the
//! table; or, without a fork, takes what the module's sweep through the keys sends from the server's own process.
//!
//! ```text
//!   no module, or not to be used ────────────────────────────────────────────┐
//!   arm refused ─────────────────────────────────────────────────────────────┤
//!                                                                            ▼
//!   ask ──▶ arm: walk ──▶ PSYNC ──▶ the child asks ──▶ it may ──▶ long strings from it, behind them the rest by PSYNC
//!      │                               └─ it declines ────────▶ capture by PSYNC alone
//!      └──▶ arm: ease ──▶ capture by PSYNC, the child does not compress         ▲
//!                          the walk failed: the next attempts, for some minutes, ┘
//! ```
//!
//! The strings that the child writes into the source's table are missing from what its server saves. So the child may
//! begin only if no other client receives that snapshot. **The capture gives the permission.** It does so when
//! `+FULLRESYNC` has arrived over its own connection with the replid and the offset that the child reports, and if that
//! connection still waits when the child asks. Then the child was forked for this capture
//! (`module/src/capture/mod.rs` has the rest of the argument). Bytes that arrive before the child has answered
//! belong to a complete snapshot.
//!
//! Two processes must never write one table. A writer claims its memory, and the claim ends with the writing process,
//! however that ends. So the next writer first waits for the claim ([`Capture::claim`]).
//!
//! ```text
//!   a primary without a backlog ─── PSYNC ? -1, and away before the server forks for it ──▶ it has one
//!   REMORA.SWEEP, a socket ──▶ replid, offset                                  refused: its fork takes the snapshot
//!   PSYNC replid offset+1 ──▶ +CONTINUE ──────────────────────────────▶ journal
//!   the socket: records … the mark of the end ────────────────────────▶ slots of the table
//! ```
//!
//! `module/src/sweep/` has the other end, and says when a server is not swept. A sweep that fails after the snapshot
//! was offered to replicas fails that snapshot; the next one is taken by a fork.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use remora_base::units::Size;
use remora_fabric::{Claim, Handover, Memory};
use remora_protocol::sweep::Frames;
use remora_redis::psync::Payload;
use remora_redis::psync::client::{Channel, EofMark, Event as PsyncEvent, Options};
use remora_redis::rdb::{Head, OPCODE_EOF, magic};
use remora_redis::resp::Frame;
use remora_redis::{ReplId, resp};
use remora_server::module::{Offer, field};
use remora_server::{Client, Facts, Role, ServerError, module};
use remora_table::server_pages::{Order, Stage, Work, WriterStatus};
use remora_table::{CapturePage, Kind, SnapshotWriter};

use super::method::{Method, Task, average};
use super::psync_link::{PsyncLink, Socket, broken, is_same_history};
use super::snapshot::{Begun, DURING, MARK_BYTES, Sealing, Taking, pause_after};
use super::stream::{Follower, Following};
use super::{Capture, CaptureError, CaptureEvent, SILENCE_LIMIT, TICK};
use crate::options::ModuleCapture;
use crate::tables::expected;

/// How an attempt with the module fails.
pub(super) enum ModuleError {
    /// Before the capture reported a snapshot: it can take the snapshot in another way.
    BeforeSnapshot(String),
    /// The capture fails.
    Final(CaptureError),
}

impl From<CaptureError> for ModuleError {
    fn from(error: CaptureError) -> ModuleError {
        ModuleError::Final(error)
    }
}

pub(super) fn before(why: impl fmt::Display) -> ModuleError {
    ModuleError::BeforeSnapshot(why.to_string())
}

/// What the module of a server is to do.
struct Chosen {
    client: Client,
    work: Work,
    /// For the walks: the size in bytes from which a string is written.
    least_bytes: u64,
    /// Whether the server is a primary or a replica itself.
    role: Option<Role>,
    /// For the walks: an upper estimate of the snapshot's size in bytes.
    expected: u64,
}

impl Capture {
    /// Takes the snapshot in the best way that there is: as a copy, from what is stored, or from the server.
    pub(super) fn take_snapshot(&self) -> Result<Following, CaptureError> {
        (self.plan.prepare)();
        let claim = self.claim()?;
        let gauge = &self.plan.gauge;
        gauge.set_method(Method::Psync);
        gauge.set_no_fast_keys("");
        if let Some(first) = &self.plan.first {
            return self.take_copy(first);
        }
        if let Some(file) = &self.plan.file {
            return self.take_file(file);
        }
        self.take_best(|| self.take_by_a_fork(claim))
    }

    /// Takes the snapshot from the server, which forks for it.
    fn take_by_a_fork(&self, claim: Claim) -> Result<Following, CaptureError> {
        let gauge = &self.plan.gauge;
        gauge.set_method(Method::Psync);
        self.wait_for(async {
            self.plan.tuning.change(&self.plan.server).await;
            Ok(())
        })?;
        let mut chosen = match self.choose() {
            Ok(chosen) => chosen,
            Err(why) => {
                gauge.set_no_fast_keys(why);
                return self.take_plain_snapshot();
            }
        };
        let outcome = match chosen.work {
            Work::Ease => self.ease(&mut chosen),
            Work::Walk | Work::FastWalk => {
                // The child will claim the memory.
                drop(claim);
                self.walk(&mut chosen)
            }
        };
        match outcome {
            Ok(done) => Ok(done),
            Err(ModuleError::BeforeSnapshot(why)) => {
                tracing::warn!(%why, "the module could not take the snapshot; taking it by PSYNC");
                let _claim = self.claim()?;
                gauge.set_method(Method::Psync);
                gauge.set_no_fast_keys(why);
                self.take_plain_snapshot()
            }
            Err(ModuleError::Final(error)) => {
                // The module may also be why the link broke: if the child needs too much memory, the system kills the
                // server.
                if matches!(error, CaptureError::Module(_) | CaptureError::Link { .. }) {
                    self.report(CaptureEvent::ModuleFailed);
                }
                Err(error)
            }
        }
    }

    /// Waits until no child of the server writes the snapshot's memory, and claims it.
    fn claim(&self) -> Result<Claim, CaptureError> {
        let began = Instant::now();
        loop {
            if let Some(claim) = self.plan.snapshot.0.claim().map_err(remora_table::Error::from)? {
                return Ok(claim);
            }
            self.stop.check()?;
            if began.elapsed() > CLAIM_LIMIT {
                let text =
                    format!("a child of the server still writes the source's table after {} s", CLAIM_LIMIT.as_secs());
                return Err(CaptureError::Module(text));
            }
            thread::sleep(POLL);
        }
    }

    /// Backs the first `bytes` of the snapshot's slots with pages. A page counts for the control group of the process
    /// that touches it first. If that were the server's child, the source's table would count against the memory limit
    /// of the server's container.
    fn touch(&self, bytes: u64) -> Result<(), remora_table::Error> {
        let (memory, geometry) = &self.plan.snapshot;
        let end = geometry.data_offset().saturating_add(bytes);
        Ok(memory.prefault(0..end.min(memory.length()))?)
    }

    /// Finds the module, and decides what it is to do.
    ///
    /// # Errors
    /// Why the capture does without it.
    fn choose(&self) -> Result<Chosen, String> {
        let rules = &self.plan.module;
        if rules.choice == ModuleCapture::Off {
            return Err("--module-capture is off".into());
        }
        if self.plan.module_failed_lately {
            tracing::info!("the module failed a short time ago; taking the snapshot without it");
            return Err("the module failed a short time ago".into());
        }
        let asked = self.wait_for(async {
            let mut client = self.plan.server.connect().await?;
            let offer = module::find(&mut client, rules.load.as_deref()).await?;
            let facts = Facts::read(&mut client).await?;
            Ok((client, offer, facts))
        });
        let (client, offer, facts) = match asked {
            Ok(asked) => asked,
            Err(error) => {
                if !matches!(error, CaptureError::Stopped | CaptureError::ServerEnds) {
                    tracing::warn!(%error, "cannot determine whether the server has loaded the module");
                }
                return Err(format!("it is not known whether the server has the module: {error}"));
            }
        };
        let Offer { fast_capture, saves_to_files } = offer.ok_or("the server has no module of this version")?;
        if saves_to_files {
            tracing::info!("{SAVES_TO_FILES}; the module leaves that to the server");
            return Err(SAVES_TO_FILES.into());
        }
        let Task { work, least_bytes } = rules.task(&facts, self.plan.reader_version.is_some(), fast_capture.is_ok());
        if work != Work::FastWalk {
            self.plan.gauge.set_no_fast_keys(fast_capture.err().unwrap_or_else(|| rules.no_fast_walk(&facts)));
        }
        let (average, long) = (Size::bytes(average(&facts)), Size::bytes(least_bytes));
        tracing::info!(?work, keys = facts.keys(), %average, %long, "the server has the module");
        let expected = expected(&facts, self.plan.snapshot.1);
        Ok(Chosen { client, work, least_bytes, role: facts.role, expected })
    }

    /// The server writes the snapshot, and the module keeps it from compressing.
    fn ease(&self, chosen: &mut Chosen) -> Result<Following, ModuleError> {
        let armed = Armed::new(self, chosen)?;
        // The capture itself fills the gauge, so nothing of the page goes there.
        let done = armed.attended(&Mutex::new(false), || self.take_plain_snapshot())?;
        match armed.page.stage() {
            Stage::Done => {}
            Stage::Armed => {
                tracing::warn!("the module was not loaded when the server forked; the snapshot may be compressed");
            }
            Stage::Asking | Stage::Begun | Stage::Declined | Stage::Failed => {
                tracing::warn!(why = %armed.page.status_text(), "the module did not keep the server from compressing");
            }
        }
        Ok(done)
    }

    /// The server's child writes the long strings, and the server the rest.
    fn walk(&self, chosen: &mut Chosen) -> Result<Following, ModuleError> {
        // A primary's stream begins with a SELECT. A replica forwards its primary's stream unchanged, so there the
        // database counts.
        let counts = chosen.role == Some(Role::Replica);
        let work = chosen.work;
        self.touch(chosen.expected).map_err(before)?;
        let armed = Armed::new(self, chosen)?;
        let live = Mutex::new(false);
        armed.attended(&live, || {
            let mut link = self.handshake_for_snapshot(self.options(Channel::Whole))?;
            let (replid, offset) = resync(&mut link)?;
            if let Decided::Untouched(payload) = armed.may_begin(&mut link, replid, offset)? {
                return Ok(armed.untouched(link, payload, replid, offset)?);
            }
            self.plan.gauge.set_method(if work == Work::FastWalk { Method::FastWalked } else { Method::Walked });
            let Begun { journal, sealing } = self.begun(replid, offset)?;
            *lock(&live) = true;
            let payload = armed.first_byte(&mut link);
            *lock(&live) = false;
            let written = armed.walked()?;
            let mut socket = link.into_socket();
            let _claim = self.claim()?;
            let point = armed.page.fork_point().map_err(CaptureError::from)?;
            let database = point.filter(|_| counts).map(|point| point.database);
            let expected = Expected { payload: payload?, written, database };
            let rest = self.receive_rest(&mut socket, &expected, sealing);
            rest.map_err(|error| self.explained(error))?;
            Ok(match journal {
                Some(journal) => Following::ThisThread(Box::new(Follower::new(self, socket, journal))),
                None => Following::AnotherCapture,
            })
        })
    }
}

/// Drives the handshake to `+FULLRESYNC`, just after which the server forks.
fn resync(link: &mut PsyncLink) -> Result<(ReplId, u64), CaptureError> {
    match link.next_event()? {
        PsyncEvent::FullResync { replid, offset } => Ok((replid, offset)),
        other => Err(broken(format!("the server answered with {other:?} where a snapshot was requested"))),
    }
}

/// Where a snapshot is due: its announcement.
fn payload_of(event: PsyncEvent) -> Result<Payload, CaptureError> {
    match event {
        PsyncEvent::Payload(payload) => Ok(payload),
        other => Err(broken(format!("the server sent {other:?} where a snapshot was due"))),
    }
}

/// What became of the child that was to write.
enum Decided {
    Begun,
    /// It has taken nothing out of what the server saves; what the server has announced of it so far.
    Untouched(Option<Payload>),
}

/// The armed module. It is disarmed when this is dropped.
struct Armed<'c> {
    page: CapturePage,
    capture: &'c Capture,
    client: &'c mut Client,
}

impl<'c> Armed<'c> {
    fn new(capture: &'c Capture, chosen: &'c mut Chosen) -> Result<Armed<'c>, ModuleError> {
        let (table, geometry) = &capture.plan.snapshot;
        let Chosen { client, work, least_bytes, .. } = chosen;
        let (work, least_bytes) = (*work, *least_bytes);
        let order = Order { work, generation: capture.plan.generation, geometry: *geometry, least_bytes };
        let page = CapturePage::create(order).map_err(before)?;
        let mut armed = Armed { page, capture, client };
        armed.hand_over(table)?;
        Ok(armed)
    }

    /// Offers page and table at a local socket, and tells the module its address.
    fn hand_over(&mut self, table: &Memory) -> Result<(), ModuleError> {
        let plan = &self.capture.plan;
        let handover = Handover::bind(&plan.module.place).map_err(before)?;
        let (address, secret) = (handover.address(), handover.secret());
        let descriptors = [self.page.memory().as_fd(), table.as_fd()];
        let command = ["REMORA.ARM", &address, &secret];
        let (given, told) = thread::scope(|scope| {
            let giver = scope.spawn(|| handover.give(&descriptors, HANDOVER_LIMIT));
            let told = plan.runtime.block_on(self.client.command(&command));
            (giver.join(), told)
        });
        told.map_err(before)?;
        match given {
            Ok(given) => given.map_err(before),
            Err(_) => Err(before("handing the table over panicked")),
        }
    }

    /// Runs `work` while a thread attends to the page. `live` says from when on the figures on the page belong to this
    /// snapshot.
    fn attended<T>(&self, live: &Mutex<bool>, work: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        let (capture, page) = (self.capture, &self.page);
        thread::scope(|scope| {
            scope.spawn(|| capture.attend(page, live, &over));
            // The scope waits for that thread, also after a panic.
            let _over = SetOnDrop(&over);
            work()
        })
    }

    /// Permits the child to begin if it was forked for this capture, and waits until it has begun or declined.
    ///
    /// It also looks at the connection meanwhile. A child reports before the server sends the first byte of what it
    /// saves, so a snapshot that arrives without a report is complete.
    fn may_begin(&self, link: &mut PsyncLink, replid: ReplId, offset: u64) -> Result<Decided, ModuleError> {
        let page = &self.page;
        let asked = Instant::now();
        loop {
            match page.stage() {
                Stage::Armed => {
                    if let Some(event) = link.next_event_at_once()? {
                        let payload = payload_of(event)?;
                        tracing::info!("the module did not report after the fork; the server has sent its snapshot");
                        return Ok(Decided::Untouched(Some(payload)));
                    }
                }
                Stage::Asking => match page.fork_point() {
                    Ok(Some(point)) if (point.history, point.offset) == (replid, offset) => {
                        link.still_waits()?;
                        page.permit();
                    }
                    Ok(_) => page.cancel(),
                    Err(error) => {
                        tracing::warn!(%error, "the module asks for an invalid snapshot; the server takes it");
                        page.cancel();
                    }
                },
                Stage::Begun | Stage::Done | Stage::Failed => return Ok(Decided::Begun),
                Stage::Declined => {
                    let why = page.status_text();
                    tracing::info!(%why, "the module leaves the snapshot to the server");
                    self.capture.plan.gauge.set_no_fast_keys(why);
                    return Ok(Decided::Untouched(None));
                }
            }
            self.capture.stop.check()?;
            if asked.elapsed() > BEGIN_LIMIT {
                let limit = BEGIN_LIMIT.as_secs();
                tracing::info!(limit, "the module did not report within the limit after the fork");
                return Ok(Decided::Untouched(None));
            }
            thread::sleep(POLL_QUICKLY);
        }
    }

    /// The child has declined, so that the server saves everything. `payload`: it has announced its snapshot already.
    fn untouched(
        &self,
        mut link: PsyncLink,
        payload: Option<Payload>,
        replid: ReplId,
        offset: u64,
    ) -> Result<Following, CaptureError> {
        let payload = payload.map_or_else(|| self.first_byte(&mut link), Ok)?;
        // The child writes its stage before its server sends the first byte. If the child has begun, that snapshot is
        // incomplete.
        if matches!(self.page.stage(), Stage::Begun | Stage::Done | Stage::Failed) {
            return Err(CaptureError::Module("its child began long after the server had forked".into()));
        }
        let _claim = self.capture.claim()?;
        self.capture.take_announced(link.announced(replid, offset, payload))
    }

    /// Waits for the snapshot's first byte, which follows the child's walk. The server may be silent as long as the
    /// child makes progress.
    fn first_byte(&self, link: &mut PsyncLink) -> Result<Payload, CaptureError> {
        let mut pulse = Pulse::of(&self.page);
        payload_of(link.next_event_while(|| pulse.beats(&self.page))?)
    }

    /// What the child has written. The server has sent its first byte or has given up, so the child must have ended its
    /// walk.
    fn walked(&self) -> Result<WriterStatus, CaptureError> {
        let Armed { page, capture, .. } = self;
        if page.stage() == Stage::Done {
            let written = page.writer_status();
            capture.plan.gauge.snapshot_written(&written);
            tracing::debug!(
                strings = written.keys,
                micros = written.took_micros,
                waits = written.waits,
                "the child has ended its walk"
            );
            return Ok(written);
        }
        if capture.has_outgrown(page) {
            return Err(CaptureError::Outgrown);
        }
        capture.stop.check()?;
        Err(CaptureError::Module(page.status_text()))
    }
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        self.page.cancel();
        let plan = &self.capture.plan;
        let generation = plan.generation.to_string();
        let disarmed = plan.runtime.block_on(self.client.command(&["REMORA.DISARM", &generation]));
        if let Err(error) = disarmed {
            tracing::debug!(%error, "the module was not disarmed; it disarms itself after a time");
        }
    }
}

/// A flag that is held only for a moment.
fn lock(flag: &Mutex<bool>) -> MutexGuard<'_, bool> {
    flag.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets a flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Capture {
    /// Beats on the page, passes the machine's decisions to it and the child's figures to the gauge, until `over` is
    /// set.
    fn attend(&self, page: &CapturePage, live: &Mutex<bool>, over: &AtomicBool) {
        let plan = &self.plan;
        while !over.load(Ordering::Relaxed) {
            page.beat();
            if self.stop.is_set() {
                page.cancel();
            }
            if page.order().work == Work::Ease && page.stage() == Stage::Done {
                plan.gauge.set_method(Method::Eased);
            }
            if *lock(live) {
                if self.has_outgrown(page) {
                    page.cancel();
                }
                if !plan.retained {
                    page.allow_retiring(plan.gauge.retire_below());
                }
                self.touch_ahead(page.writer_status().received);
            }
            // Not after the child's end: what the source itself has written since would be shown no more.
            let still = lock(live);
            if *still {
                plan.gauge.snapshot_written(&page.writer_status());
            }
            drop(still);
            thread::sleep(POLL);
        }
    }

    /// Backs the pages that the child will write next, if the snapshot is larger than it was expected to be.
    fn touch_ahead(&self, received: u64) {
        let (memory, geometry) = &self.plan.snapshot;
        let start = geometry.data_offset().saturating_add(received).min(memory.length());
        // The child touches what cannot be touched here. Pages below the highest one that was touched cost nothing.
        let _ = memory.prefault(start..start.saturating_add(TOUCH_AHEAD_BYTES).min(memory.length()));
    }

    /// Whether the child would have to reuse a slot, although readers were promised that none is reused.
    fn has_outgrown(&self, page: &CapturePage) -> bool {
        self.plan.retained && page.writer_status().waits > 0
    }
}

/// Detects whether the child still makes progress.
struct Pulse {
    beat: u64,
    since: Instant,
}

impl Pulse {
    fn of(page: &CapturePage) -> Pulse {
        Pulse { beat: page.writer_beat(), since: Instant::now() }
    }

    /// Whether the child's beat has changed within [`SILENCE_LIMIT`]. A child that waits for readers beats too.
    fn beats(&mut self, page: &CapturePage) -> bool {
        let beat = page.writer_beat();
        if beat != self.beat {
            *self = Pulse { beat, since: Instant::now() };
        }
        self.since.elapsed() < SILENCE_LIMIT
    }
}

/// How long the module may take to fetch what is offered. The module itself gives up after a quarter of a second.
pub(super) const HANDOVER_LIMIT: Duration = Duration::from_secs(2);

/// How long the server's child may take from `+FULLRESYNC` to its first report: a fork, and what other modules do
/// there.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);

/// How long a cancelled child may take to end. It checks at each value, and at each 8 KiB of small ones.
const CLAIM_LIMIT: Duration = Duration::from_secs(10);

/// How far ahead of the child pages are touched: many times more than it writes between two looks.
const TOUCH_AHEAD_BYTES: u64 = 32 << 20;

/// Why the module takes no part in a snapshot that goes to a file: other replicas may join that sync later.
const SAVES_TO_FILES: &str = "the server writes snapshots of syncs to a file first (repl-diskless-sync no)";

/// How often progress is passed on and slots are released.
const POLL: Duration = Duration::from_millis(2);

/// How often the capture checks whether the child has begun. Replicas wait for that.
const POLL_QUICKLY: Duration = Duration::from_micros(100);

// Joins what the server saves to the strings that its child has written into the source's table.
//
// Each part is a snapshot of its own. A snapshot may repeat its fields, its databases and their sizes. So one snapshot
// is made of both parts by leaving out the bytes that may occur only once:
//
// ```text
//   the child's   REDIS0011 fields │ database, long strings … │
//   the server's  ─────────         fields, functions, database, everything else … FF  ────────   ────
//                 magic: left out                                                      checksum    mark
//                                                                                      → zeros     left out
// ```
//
// The server's checksum covers its own bytes alone. Zeros mean that the snapshot has no checksum; the table has one
// for each slot.

/// What the server's part must be like.
pub(super) struct Expected {
    /// How the server marks the end of its part.
    pub(super) payload: Payload,
    /// What the child has written.
    pub(super) written: WriterStatus,
    /// The database in which the stream begins, as the child reported it; `None` if it makes no difference. A primary's
    /// stream begins with a `SELECT`. A replica forwards its primary's stream unchanged, so there the database counts.
    pub(super) database: Option<u32>,
}

impl Capture {
    /// Receives the server's part, appends it to what the child has written, and completes the snapshot.
    pub(super) fn receive_rest(
        &self,
        socket: &mut Socket,
        expected: &Expected,
        sealing: Option<Sealing>,
    ) -> Result<(), CaptureError> {
        let (memory, geometry) = &self.plan.snapshot;
        let writer = SnapshotWriter::resume(memory.clone(), *geometry, expected.written.received)?;
        let mut taking = Taking::new(self, writer, sealing);
        self.append_rest(&mut taking, socket, expected)?;
        taking.complete(0)
    }

    fn append_rest(
        &self,
        taking: &mut Taking<'_>,
        socket: &mut Socket,
        expected: &Expected,
    ) -> Result<(), CaptureError> {
        let Payload::Mark(mark) = expected.payload else {
            let text = "the server sent its part from a file, which other clients may have received as well";
            return Err(CaptureError::Module(text.into()));
        };
        let mut joint = Joint::new(mark, expected)?;
        let mut buffer = vec![0; READ_BYTES];
        let mut silence = self.silence(DURING);
        let mut whole = false;
        while !whole {
            self.stop.check()?;
            let Some(n) = silence.check(socket.read(&mut buffer))? else { continue };
            whole = joint.take(&buffer[..n])?;
            taking.append(joint.ready())?;
            joint.taken();
            silence.restart();
            if !whole {
                pause_after(n);
            }
        }
        taking.append(&joint.end()?)
    }
}

/// The most bytes that one read takes. They are copied once more from the buffer, so it should fit in a second-level
/// cache.
const READ_BYTES: usize = 256 << 10;

/// Decides which bytes of the server's part go into the table. Pure.
struct Joint {
    mark: EofMark,
    /// The magic that both parts must have.
    magic: String,
    database: Option<u32>,
    /// The beginning of the server's part, until the whole head has arrived.
    head: Option<Vec<u8>>,
    /// Bytes that were received and not yet appended. The last of them may be the snapshot's end.
    held: Vec<u8>,
}

/// Bytes that end the server's part: the opcode, the checksum, and the mark of the sync.
const END_BYTES: usize = 1 + CHECKSUM_BYTES + MARK_BYTES as usize;
const CHECKSUM_BYTES: usize = 8;

impl Joint {
    /// # Errors
    /// The child reported a format that no snapshot has: its page is memory of the server's process.
    fn new(mark: [u8; MARK_BYTES as usize], expected: &Expected) -> Result<Joint, CaptureError> {
        let format = expected.written.format;
        let magic = u32::try_from(format).ok().and_then(magic);
        let magic = magic.ok_or_else(|| {
            CaptureError::Module(format!("its child reported the format {format}, which no snapshot has"))
        })?;
        let (mark, database) = (EofMark::new(mark), expected.database);
        Ok(Joint { mark, magic, database, head: Some(Vec::new()), held: Vec::new() })
    }

    /// Takes bytes that were received. True if they end the server's part.
    fn take(&mut self, bytes: &[u8]) -> Result<bool, CaptureError> {
        let tail = bytes.get(bytes.len().saturating_sub(MARK_BYTES as usize)..).unwrap_or_default();
        let whole = !bytes.is_empty() && self.mark.observe(tail, bytes.len());
        match &mut self.head {
            None => self.held.extend_from_slice(bytes),
            Some(head) => {
                head.extend_from_slice(bytes);
                self.read_head()?;
            }
        }
        if whole && self.head.is_some() {
            return Err(CaptureError::Module("the server's part of the snapshot has no head".into()));
        }
        Ok(whole)
    }

    /// Parses the head once it has arrived, and checks that it matches what the child has written.
    fn read_head(&mut self) -> Result<(), CaptureError> {
        let Some(bytes) = &self.head else { return Ok(()) };
        let parsed = Head::parse(bytes).map_err(|error| CaptureError::Module(error.to_string()))?;
        let Some((head, _)) = parsed else {
            if bytes.len() > Head::BYTES_MAX {
                return Err(CaptureError::Module("the head of the server's part has no end".into()));
            }
            return Ok(());
        };
        if !bytes.starts_with(self.magic.as_bytes()) {
            let server = String::from_utf8_lossy(bytes.get(..self.magic.len()).unwrap_or_default()).into_owned();
            let text = format!("its child wrote the format {}, the server {server}", self.magic);
            return Err(CaptureError::Module(text));
        }
        if self.database.is_some() && head.stream_db() != self.database {
            let (child, server) = (self.database, head.stream_db());
            let text = format!("its child wrote that the stream begins in database {child:?}, the server {server:?}");
            return Err(CaptureError::Module(text));
        }
        self.held.extend_from_slice(bytes.get(self.magic.len()..).unwrap_or_default());
        self.head = None;
        Ok(())
    }

    /// The bytes that can be appended: all but the last ones, which may be the end.
    fn ready(&self) -> &[u8] {
        self.held.get(..self.held.len().saturating_sub(END_BYTES)).unwrap_or_default()
    }

    /// Forgets the bytes of [`ready`](Self::ready), which have been appended.
    fn taken(&mut self) {
        let ready = self.ready().len();
        self.held.drain(..ready);
    }

    /// The end of the snapshot, with zeros for the checksum.
    fn end(&self) -> Result<[u8; 1 + CHECKSUM_BYTES], CaptureError> {
        if self.held.len() != END_BYTES || self.held.first() != Some(&OPCODE_EOF) {
            return Err(CaptureError::Module("the server's part of the snapshot does not end as one".into()));
        }
        let mut end = [0; 1 + CHECKSUM_BYTES];
        end[0] = OPCODE_EOF;
        Ok(end)
    }
}

// Slots that a server in cluster mode imports while a snapshot is taken.
//
// Valkey 9 moves slots as a whole (`CLUSTER MIGRATESLOTS`). A snapshot from the time of an import holds keys that do
// not belong to the server yet, and an opcode that only servers in cluster mode load. No such snapshot is used: none
// is requested during an import, and one is thrown away if an import has begun before the server forked. An import
// that begins later is in the stream, and replicas follow it.

const COMMAND: [&str; 2] = ["CLUSTER", "GETSLOTMIGRATIONS"];

/// The states of an import that is over.
const OVER: [&[u8]; 3] = [b"success", b"failed", b"cancelled"];

/// An import, as the server lists it.
#[derive(Debug, PartialEq, Eq)]
struct Import {
    name: Vec<u8>,
    slots: String,
    is_over: bool,
}

impl Capture {
    /// The capture, for a server that imports no slots now. It knows which imports are over.
    pub(super) fn without_imports(&self) -> Result<Capture, CaptureError> {
        let mut over = BTreeSet::new();
        for import in self.imports()? {
            if !import.is_over {
                return Err(CaptureError::ImportsSlots { slots: import.slots });
            }
            over.insert(import.name);
        }
        Ok(Capture { imports_over: over, ..self.clone() })
    }

    /// Fails if the server may have been importing slots when it forked. Called after it has forked.
    pub(super) fn check_imports(&self) -> Result<(), CaptureError> {
        match self.imports()?.into_iter().find(|import| !self.imports_over.contains(&import.name)) {
            Some(import) => Err(CaptureError::ImportsSlots { slots: import.slots }),
            None => Ok(()),
        }
    }

    fn imports(&self) -> Result<Vec<Import>, CaptureError> {
        if !self.plan.may_import_slots {
            return Ok(Vec::new());
        }
        self.wait_for(async {
            let mut client = self.plan.server.connect().await?;
            read(&mut client).await
        })
    }
}

async fn read(client: &mut Client) -> Result<Vec<Import>, ServerError> {
    let answer = client.command(&COMMAND).await?;
    parse(&answer).ok_or_else(|| client.unexpected(&COMMAND.join(" "), &answer))
}

/// The imports in the server's answer: a list of jobs, and each of them a list of names and values. `None` if it is
/// anything else.
fn parse(answer: &Frame) -> Option<Vec<Import>> {
    let Frame::Array(jobs) = answer else { return None };
    let mut imports = Vec::new();
    for job in jobs {
        let Frame::Array(fields) = job else { return None };
        let field = |wanted: &str| {
            fields.chunks_exact(2).find_map(|pair| match pair {
                [name, value] if name.as_bytes() == Some(wanted.as_bytes()) => value.as_bytes(),
                _ => None,
            })
        };
        if field("operation")? == b"IMPORT" {
            imports.push(Import {
                name: field("name")?.to_vec(),
                slots: String::from_utf8_lossy(field("slot_ranges")?).into_owned(),
                is_over: OVER.contains(&field("state")?),
            });
        }
    }
    Some(imports)
}

/// What a sweep's snapshot is of.
struct Moment {
    replid: ReplId,
    offset: u64,
    /// It was not earlier than this.
    began: Instant,
    /// What the module sends comes here.
    records: UnixStream,
}

impl Capture {
    /// Takes the snapshot by a sweep.
    pub(super) fn sweep(&self) -> Result<Following, ModuleError> {
        let moment = self.begin_sweep().map_err(untouched)?;
        let stream = self.stream_behind(&moment).map_err(untouched)?;
        let Moment { replid, offset, began, records } = moment;
        tracing::info!(%replid, offset, "the module sweeps the server, without a fork (experimental)");
        self.plan.gauge.set_method(Method::Swept);
        let (memory, geometry) = &self.plan.snapshot;
        let writer =
            SnapshotWriter::create(memory.clone(), *geometry, self.identity(Kind::Snapshot, replid, offset), 0)
                .map_err(CaptureError::from)?;
        let Begun { journal, sealing } = self.begun(replid, offset)?;
        let mut taking = Taking::new(self, writer, sealing);
        let fill = || {
            let keys = self.receive_records(records, &mut taking)?;
            tracing::debug!(keys, micros = began.elapsed().as_micros(), "the module has swept the server");
            taking.complete(0)
        };
        match (stream, journal) {
            (Some(socket), Some(mut journal)) => {
                journal.written_since(began);
                Ok(self.beside_the_stream(socket, journal, fill)?)
            }
            _ => {
                fill()?;
                Ok(Following::AnotherCapture)
            }
        }
    }

    /// Sees to a backlog, and has the module begin.
    fn begin_sweep(&self) -> Result<Moment, CaptureError> {
        let (mut client, facts) = self.wait_for(async {
            let mut client = self.plan.server.connect().await?;
            let found = module::find(&mut client, self.plan.module.load.as_deref()).await?;
            let facts = Facts::read(&mut client).await?;
            Ok((found.map(|_| client), facts))
        })?;
        let client = client.as_mut().ok_or_else(|| refused("the server has no module of this version"))?;
        if facts.own_format().is_some() && self.plan.reader_version.is_none() {
            return Err(refused("readers wait that do not know the server's newest format"));
        }
        if facts.backlog.is_none_or(|backlog| !backlog.active) {
            self.make_backlog(client)?;
        }
        let (ours, theirs) = UnixStream::pair().map_err(broken)?;
        ours.set_read_timeout(Some(TICK)).map_err(broken)?;
        let asked = Instant::now();
        loop {
            let began = Instant::now();
            match self.ask(client, &theirs) {
                Ok((replid, offset)) => return Ok(Moment { replid, offset, began, records: ours }),
                // What is in the way passes by itself.
                Err(error) if error.to_string().contains("BUSY") && asked.elapsed() < BUSY_LIMIT => {
                    self.stop.check()?;
                    thread::sleep(BUSY_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Offers the socket once.
    fn ask(&self, client: &mut Client, theirs: &UnixStream) -> Result<(ReplId, u64), CaptureError> {
        let handover = Handover::bind(&self.plan.module.place).map_err(broken)?;
        let command = ["REMORA.SWEEP", &handover.address(), &handover.secret()];
        let descriptors = [theirs.as_fd()];
        let reply = thread::scope(|scope| {
            // A server that refuses does not take it.
            scope.spawn(|| handover.give(&descriptors, HANDOVER_LIMIT));
            let reply = self.plan.runtime.block_on(client.command_within(SWEEP_LIMIT, &command));
            if reply.is_err() {
                // Its thread need not wait for the rest of the time.
                let _ = remora_fabric::handover::take_socket(&handover.address(), &handover.secret(), HANDOVER_LIMIT);
            }
            reply
        })?;
        moment(&reply).ok_or_else(|| refused("the module's answer to REMORA.SWEEP has no replid and offset"))
    }

    /// A primary that never had a replica has no backlog. It makes one for a replica that asks for everything, and
    /// forks for it only after a delay. This one is gone by then.
    fn make_backlog(&self, client: &mut Client) -> Result<(), CaptureError> {
        let setting = |client: &mut Client, name| self.plan.runtime.block_on(client.config_get(name));
        let is_diskless = setting(client, "repl-diskless-sync")?.is_some_and(|value| value == "yes");
        let delays = setting(client, "repl-diskless-sync-delay")?.is_some_and(|value| value != "0");
        let waits = setting(client, "repl-diskless-sync-max-replicas")?.is_none_or(|value| value == "0");
        if !(is_diskless && delays && waits) {
            return Err(refused(
                "the server has no backlog, and would fork to get one (repl-diskless-sync no, a repl-diskless-sync-delay of 0, or \
                 repl-diskless-sync-max-replicas)",
            ));
        }
        let _asking = self.wait_for(async {
            let mut replica = self.plan.server.connect().await?;
            // Its answer must have gone before the server takes the next command.
            replica.command(&["REPLCONF", "capa", "eof", "capa", "psync2"]).await?;
            let mut request = Vec::new();
            resp::command(&mut request, &["PSYNC", "?", "-1"]);
            replica.send(&request).await?;
            Ok(replica)
        })?;
        let asked = Instant::now();
        loop {
            let facts = self.wait_for(async { Facts::read(client).await })?;
            if facts.backlog.is_some_and(|backlog| backlog.active) {
                return Ok(());
            }
            if asked.elapsed() > BACKLOG_LIMIT {
                return Err(refused("the server made no backlog"));
            }
            thread::sleep(BUSY_PAUSE);
        }
    }

    /// The stream from the moment on, unless another capture follows it.
    fn stream_behind(&self, moment: &Moment) -> Result<Option<Socket>, CaptureError> {
        if self.plan.journal.is_none() {
            return Ok(None);
        }
        let resume = Some((moment.replid, moment.offset + 1));
        let mut link = self.handshake(Options { resume, ..Options::default() })?;
        let now = link.continued()?.ok_or(CaptureError::HistoryGone)?;
        is_same_history(moment.replid, now, moment.offset)?;
        Ok(Some(link.into_socket()))
    }

    /// Appends what the module sends to the snapshot, until the mark of its end. Returns the number of keys.
    fn receive_records(&self, mut socket: UnixStream, taking: &mut Taking<'_>) -> Result<u64, CaptureError> {
        let (mut frames, mut buffer, mut records) = (Frames::default(), vec![0; READ_BYTES], Vec::new());
        let mut heard = Instant::now();
        loop {
            self.stop.check()?;
            let read = match socket.read(&mut buffer) {
                Ok(0) => return Err(CaptureError::Module(self.why_it_ended())),
                Ok(read) => read,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if heard.elapsed() > SILENCE_LIMIT {
                        return Err(CaptureError::Module("a sweep was silent for too long".into()));
                    }
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(CaptureError::Link { during: DURING, cause: error.to_string() }),
            };
            let end = frames.take(buffer.get(..read).unwrap_or_default(), |bytes| records.extend_from_slice(bytes));
            let end = end.map_err(|error| CaptureError::Module(format!("what it sends is no sweep: {error}")))?;
            taking.append(&records)?;
            records.clear();
            heard = Instant::now();
            if let Some(keys) = end {
                return Ok(keys);
            }
        }
    }

    /// Why the module has ended its sweep.
    fn why_it_ended(&self) -> String {
        let asked = self.wait_for(async { self.plan.server.connect().await?.info("remora").await });
        let why = asked.ok().and_then(|info| info.get("remora_sweep_error").map(str::to_owned));
        format!("the sweep ended before its end: {}", why.unwrap_or_else(|| "the server does not say why".into()))
    }
}

/// The sweep has not begun. A fork can take the snapshot, unless the capture is to stop.
fn untouched(error: CaptureError) -> ModuleError {
    match error {
        CaptureError::Stopped | CaptureError::ServerEnds => ModuleError::Final(error),
        CaptureError::Module(why) => before(why),
        error => before(error),
    }
}

fn refused(why: &str) -> CaptureError {
    CaptureError::Module(why.to_owned())
}

/// Replid and offset in the answer to `REMORA.SWEEP`.
fn moment(reply: &Frame) -> Option<(ReplId, u64)> {
    Some((field(reply, b"replid")?.parse().ok()?, field(reply, b"offset")?.parse().ok()?))
}

/// How long the server may take to begin: it looks at its commands and clients, and a pause of its clients (`CLIENT
/// PAUSE`) makes it wait.
const SWEEP_LIMIT: Duration = Duration::from_secs(5);

/// How long transactions and waiting clients may keep a sweep from beginning. Most transactions take a round trip.
const BUSY_LIMIT: Duration = Duration::from_secs(5);

/// How often the server is asked again.
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// How long the server may take to make a backlog: it does that when it reads the request.
const BACKLOG_LIMIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const MARK: [u8; 40] = *b"0123456789abcdef0123456789abcdef01234567";

    fn expected(format: u64, database: Option<u32>) -> Expected {
        Expected { payload: Payload::Mark(MARK), written: WriterStatus { format, ..WriterStatus::default() }, database }
    }

    /// What a server sends: magic, one field, `body`, the end.
    fn sent(body: &[u8]) -> Vec<u8> {
        [b"REDIS0010\xFA\x0erepl-stream-db\x013", body, b"\xFFchecksum", &MARK].concat()
    }

    fn joined(bytes: &[u8], cuts: &[usize], expected: &Expected) -> Result<Vec<u8>, CaptureError> {
        let mut joint = Joint::new(MARK, expected)?;
        let (mut out, mut rest, mut whole) = (Vec::new(), bytes, false);
        for cut in cuts.iter().copied().chain([usize::MAX]) {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            whole |= joint.take(now)?;
            out.extend_from_slice(joint.ready());
            joint.taken();
            rest = later;
        }
        assert!(whole, "the mark was not seen");
        out.extend_from_slice(&joint.end()?);
        Ok(out)
    }

    proptest! {
        #[test]
        fn however_it_is_cut_only_magic_checksum_and_mark_are_left_out(
            body in prop::collection::vec(0_u8..0xFA, 0..300),
            cuts in prop::collection::vec(0_usize..80, 0..12),
        ) {
            // A database after the head, so that the head has an end.
            let body = [b"\xFE\x00".as_slice(), &body].concat();
            let out = joined(&sent(&body), &cuts, &expected(10, Some(3))).unwrap();
            let wanted = [b"\xFA\x0erepl-stream-db\x013", &body[..], b"\xFF\0\0\0\0\0\0\0\0"].concat();
            prop_assert_eq!(out, wanted);
        }
    }

    #[test]
    fn a_format_that_no_snapshot_has_is_refused() {
        for format in [1000, 0x1_0000_000A, u64::MAX] {
            let error = joined(&sent(b"\xFE\0"), &[], &expected(format, None)).unwrap_err();
            assert!(error.to_string().contains(&format!("the format {format}")), "{error}");
        }
    }

    #[test]
    fn parts_that_do_not_belong_together_are_not_joined() {
        let bytes = sent(b"\xFE\0");
        let why = |expected| joined(&bytes, &[], &expected).unwrap_err().to_string();
        assert!(why(expected(11, None)).contains("REDIS0011"));
        assert!(why(expected(10, Some(4))).contains("database"));
        let mut cut = bytes.clone();
        cut.remove(bytes.len() - 45);
        assert!(joined(&cut, &[], &expected(10, None)).unwrap_err().to_string().contains("does not end"));
        let headless = [b"REDIS0010".as_slice(), &MARK].concat();
        assert!(joined(&headless, &[], &expected(10, None)).is_err());
    }

    fn job(fields: &[(&str, &str)]) -> Frame {
        let bulk = |text: &str| Frame::Bulk(text.into());
        Frame::Array(fields.iter().flat_map(|(name, value)| [bulk(name), bulk(value)]).collect())
    }

    fn named(name: &str, operation: &str, state: &str) -> Frame {
        job(&[("name", name), ("operation", operation), ("slot_ranges", "0-8000 9000"), ("state", state)])
    }

    #[test]
    fn imports_and_their_ends_are_read_and_exports_are_not() {
        let jobs = [
            named("a", "EXPORT", "snapshotting"),
            named("b", "IMPORT", "receiving-snapshot"),
            named("c", "IMPORT", "success"),
            named("d", "IMPORT", "a state of a later server"),
        ];
        let read = parse(&Frame::Array(jobs.into())).unwrap();
        let seen: Vec<_> = read.iter().map(|import| (import.name.as_slice(), import.is_over)).collect();
        assert_eq!(seen, [(b"b".as_slice(), false), (b"c", true), (b"d", false)]);
        assert_eq!(read[0].slots, "0-8000 9000");
    }

    #[test]
    fn another_answer_is_not_taken_for_a_list_without_imports() {
        assert_eq!(parse(&Frame::Array(Vec::new())), Some(Vec::new()));
        let wrong =
            [Frame::Integer(1), Frame::Array(vec![Frame::Integer(1)]), Frame::Array(vec![job(&[("name", "a")])])];
        for wrong in wrong {
            assert_eq!(parse(&wrong), None, "{wrong:?}");
        }
    }
}

#[cfg(test)]
mod sweep_tests {
    use super::*;

    #[test]
    fn a_moment_is_read_from_names_and_values() {
        let bulk = |text: &str| Frame::Bulk(text.into());
        let replid = "0123456789abcdef0123456789abcdef01234567";
        let reply = Frame::Array(vec![bulk("replid"), bulk(replid), bulk("offset"), bulk("77")]);
        assert_eq!(moment(&reply), Some((replid.parse().unwrap_or_else(|_| panic!("a replid")), 77)));
        assert_eq!(moment(&Frame::Array(vec![bulk("replid"), bulk(replid)])), None);
    }
}
