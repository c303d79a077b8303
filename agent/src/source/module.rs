//! The source's side of the module: arms it, and follows what the server's fork child writes into our table.
//!
//! ```text
//!   no module, or not to be used ─────────────────────────────────────────────┐
//!   arm refused, another child came first (three times) ──────────────────────┤
//!                                                                             ▼
//!   ask ──▶ arm: walk ──▶ almost empty PSYNC ──▶ begun, same offset ──▶ …   capture by PSYNC alone
//!      └──▶ arm: ease ──▶ capture by PSYNC, the child doesn't compress          ▲
//!                                                   └─ failed half-way: the next attempt, for a while, ┘
//! ```
//!
//! What the server says in `+FULLRESYNC` decides: the child tells on the board which offset of which history it walks, and only if both are
//! the same is the table this snapshot. The same offset of the same history is the same data, whatever the child was forked for.
//!
//! Two processes must never write one table: a writer claims its memory, and the claim ends with the writer's life, however that
//! ends. So whoever writes next waits for the claim ([`claim`]) first.

use std::fmt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::{Claim, Handover, Memory, shm::Place};
use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::client::{self, Client as Handshake, EofMark, Event as PsyncEvent};
use remora_redis::rdb::Head;
use remora_redis::resp::{self, Frame};
use remora_table::board::{Order, Stage, Work};
use remora_table::{Board, Identity, JournalWriter, Kind, State};

use super::capture::{self, CaptureEvent, Fault, MARK_LENGTH, Plan, SILENCE_LIMIT, Stream};
use super::wire::{Received, Wire};
use crate::cli::ModuleCapture;
use crate::library;
use crate::server::{Client, Facts, RefusalKind, Role, ServerError};
use crate::units::Size;

/// In which way a snapshot comes from the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Way {
    /// As replicas get it.
    #[default]
    Psync,
    /// As replicas get it, but not compressed.
    Eased,
    /// Written into our table by the server's child.
    Walked,
}

impl Way {
    pub(super) const ALL: [Way; 3] = [Way::Psync, Way::Eased, Way::Walked];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Psync => "psync",
            Way::Eased => "psync, not compressed by the module",
            Way::Walked => "the module",
        })
    }
}

/// What may be asked of a module, and what was learnt of it.
pub(crate) struct Rules {
    choice: ModuleCapture,
    /// An empty path: the library beside this program.
    load: Option<PathBuf>,
    place: Place,
    /// Until when it isn't asked again, as it has failed.
    distrusted: Mutex<Option<Instant>>,
}

impl Rules {
    pub(super) fn new(choice: ModuleCapture, load: Option<PathBuf>, folder: Option<PathBuf>) -> Rules {
        let place = folder.map_or(Place::Abstract, Place::Folder);
        Rules { choice, load, place, distrusted: Mutex::new(None) }
    }

    fn distrust(&self) {
        *self.distrusted() = Some(Instant::now() + DISTRUST);
    }

    fn is_distrusted(&self) -> bool {
        self.distrusted().is_some_and(|until| Instant::now() < until)
    }

    /// A lock whose holders only assign.
    fn distrusted(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.distrusted.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Takes the snapshot in the best way there is. As for [`capture::take_snapshot`], which it ends in where there is no better one.
pub(super) fn take_snapshot(plan: &Plan) -> Result<Stream, Fault> {
    let claim = claim(plan)?;
    plan.gauge.comes_by(Way::Psync);
    let Some((mut client, work, role)) = choose(plan) else { return capture::take_snapshot(plan) };
    let outcome = match work {
        Work::Ease => ease(plan, &mut client),
        Work::Walk => {
            // The child will claim it.
            drop(claim);
            walk_with_patience(plan, &mut client, role)
        }
    };
    match outcome {
        Ok(done) => Ok(done),
        Err(Setback::Before(why) | Setback::OtherChild(why)) => {
            tracing::warn!(%why, "the module could not take the snapshot; it comes by psync");
            let _claim = self::claim(plan)?;
            plan.gauge.comes_by(Way::Psync);
            capture::take_snapshot(plan)
        }
        Err(Setback::Final(fault)) => {
            // A link that breaks now may be the work of the module too: a child that needs too much memory takes it with it.
            if matches!(fault, Fault::Module(_) | Fault::Link { .. }) {
                plan.module.distrust();
            }
            Err(fault)
        }
    }
}

/// How an attempt with the module can end badly.
enum Setback {
    /// Before anybody was told of a snapshot: another way may be taken without anybody noticing.
    Before(String),
    /// As above: the child that used the arming was forked for something else. It may go better at once.
    OtherChild(String),
    /// For good.
    Final(Fault),
}

impl From<Fault> for Setback {
    fn from(fault: Fault) -> Setback {
        Setback::Final(fault)
    }
}

fn before(why: impl fmt::Display) -> Setback {
    Setback::Before(why.to_string())
}

/// The right to write the snapshot's memory, once no child of the server holds it any more.
fn claim(plan: &Plan) -> Result<Claim, Fault> {
    let began = Instant::now();
    loop {
        if let Some(claim) = plan.snapshot.0.claim().map_err(remora_table::Error::from)? {
            return Ok(claim);
        }
        if plan.stop.load(Ordering::Relaxed) {
            return Err(Fault::Stopped);
        }
        if began.elapsed() > CLAIM_LIMIT {
            let text = format!("a child of the server still writes our table after {} s", CLAIM_LIMIT.as_secs());
            return Err(Fault::Module(text));
        }
        thread::sleep(POLL);
    }
}

// ---- What there is, and what is best ----

/// A connection to a server that has the module, what it shall do, and what it is to others; `None` for the way without it.
fn choose(plan: &Plan) -> Option<(Client, Work, Option<Role>)> {
    let rules = &plan.module;
    if rules.choice == ModuleCapture::Off {
        return None;
    }
    if rules.is_distrusted() {
        tracing::info!("the module has failed lately and is not asked");
        return None;
    }
    let asked = plan.runtime.block_on(async {
        let mut client = plan.server.connect().await?;
        let known = find_module(&mut client, rules).await?;
        let facts = Facts::read(&mut client).await?;
        Ok::<_, ServerError>((client, known, facts))
    });
    let (client, known, facts) = match asked {
        Ok(asked) => asked,
        Err(error) => {
            tracing::warn!(%error, "whether the server has the module can't be told");
            return None;
        }
    };
    if !known {
        return None;
    }
    let work = best(rules.choice, &facts, plan.reader_version.is_some());
    tracing::info!(?work, keys = facts.keys(), average = %Size::bytes(average(&facts)), "the server has the module");
    Some((client, work, facts.role))
}

/// Whether the server has a module that we understand; it is loaded first if that is wished.
async fn find_module(client: &mut Client, rules: &Rules) -> Result<bool, ServerError> {
    let mut answer = client.command(&["REMORA.STATUS"]).await;
    if let (Err(error), Some(path)) = (&answer, &rules.load)
        && error.refusal() == Some(RefusalKind::Unknown)
    {
        load(client, path).await;
        answer = client.command(&["REMORA.STATUS"]).await;
    }
    match answer {
        Ok(frame) => {
            let protocol = field(&frame, b"protocol");
            let understood = protocol.as_deref() == Some(PROTOCOL);
            if !understood {
                tracing::warn!(theirs = ?protocol, ours = PROTOCOL, "the server's module is of another version: upgrade the older of the two");
            }
            Ok(understood)
        }
        Err(error) if error.refusal() == Some(RefusalKind::Unknown) => Ok(false),
        Err(error) if error.refusal() == Some(RefusalKind::NoPerm) => {
            tracing::warn!(
                "the server may have the module, but our user may not ask it: +remora.status +remora.arm +remora.disarm"
            );
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

async fn load(client: &mut Client, path: &std::path::Path) {
    let path = match path.as_os_str().is_empty() {
        false => path.to_owned(),
        true => match library::find() {
            Ok(path) => path,
            Err(failure) => return tracing::warn!(%failure, "the module is not loaded"),
        },
    };
    match client.command(&["MODULE", "LOAD", &path.display().to_string()]).await {
        Ok(_) => tracing::info!(path = %path.display(), "the server has loaded the module"),
        Err(error) => tracing::warn!(%error, path = %path.display(), "the server does not load the module"),
    }
}

/// A value out of a list of names and values, as `REMORA.STATUS` answers.
pub(crate) fn field(frame: &Frame, name: &[u8]) -> Option<String> {
    let Frame::Array(items) = frame else { return None };
    let pair = items.chunks(2).find(|pair| matches!(pair, [Frame::Bulk(found), _] if found == name))?;
    match pair {
        [_, Frame::Bulk(value)] => Some(String::from_utf8_lossy(value).into_owned()),
        _ => None,
    }
}

/// What costs the server less. A walk writes the newest format that the server knows: where older readers wait, the server must write.
fn best(choice: ModuleCapture, facts: &Facts, own_format: bool) -> Work {
    if facts.own_format().is_some() && !own_format {
        return Work::Ease;
    }
    match choice {
        ModuleCapture::Walk => Work::Walk,
        ModuleCapture::Server | ModuleCapture::Off => Work::Ease,
        ModuleCapture::Auto if average(facts) >= WALK_FROM_BYTES => Work::Walk,
        ModuleCapture::Auto => Work::Ease,
    }
}

/// Bytes of data for each key; 0 where there is none.
fn average(facts: &Facts) -> u64 {
    facts.used_memory_dataset.unwrap_or(0).checked_div(facts.keys()).unwrap_or(0)
}

// ---- Arming ----

/// The module is armed, until this is dropped.
struct Armed<'p> {
    board: Board,
    plan: &'p Plan,
    client: &'p mut Client,
}

impl<'p> Armed<'p> {
    fn new(plan: &'p Plan, client: &'p mut Client, work: Work) -> Result<Armed<'p>, Setback> {
        let (table, geometry) = &plan.snapshot;
        let board = Board::create(Order { work, generation: plan.generation, geometry: *geometry }).map_err(before)?;
        hand_over(plan, client, &board, table)?;
        Ok(Armed { board, plan, client })
    }

    /// Runs `work` while somebody beats on the board, and passes on in both directions what stands there and in the gauge. `live`:
    /// from when on the gauge is this snapshot's.
    fn attended<T>(&self, live: &AtomicBool, work: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| attend(self.plan, &self.board, live, &over));
            let done = work();
            over.store(true, Ordering::Relaxed);
            done
        })
    }
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        self.board.cancel();
        let generation = self.plan.generation.to_string();
        let disarmed = self.plan.runtime.block_on(self.client.command(&["REMORA.DISARM", &generation]));
        if let Err(error) = disarmed {
            tracing::debug!(%error, "the module was not disarmed; it forgets by itself");
        }
    }
}

/// Offers board and table at a local socket, and tells the module where.
fn hand_over(plan: &Plan, client: &mut Client, board: &Board, table: &Memory) -> Result<(), Setback> {
    let handover = Handover::bind(&plan.module.place).map_err(before)?;
    let (address, secret) = (handover.address(), handover.secret());
    let descriptors = [board.memory().as_fd(), table.as_fd()];
    let command = ["REMORA.ARM", &address, &secret];
    let (given, told) = thread::scope(|scope| {
        let giver = scope.spawn(|| handover.give(&descriptors, HANDOVER_LIMIT));
        let told = plan.runtime.block_on(client.command(&command));
        (giver.join(), told)
    });
    told.map_err(before)?;
    match given {
        Ok(given) => given.map_err(before),
        Err(_) => Err(before("handing the table over panicked")),
    }
}

fn attend(plan: &Plan, board: &Board, live: &AtomicBool, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        board.beat();
        if plan.stop.load(Ordering::Relaxed) {
            board.cancel();
        }
        if board.order().work == Work::Ease && board.stage() == Stage::Done {
            plan.gauge.comes_by(Way::Eased);
        }
        if live.load(Ordering::Acquire) {
            if has_outgrown(plan, board) {
                board.cancel();
            }
            if !plan.retained {
                board.allow_retiring(plan.gauge.retire_below());
            }
            plan.gauge.snapshot_told(&board.told());
        }
        thread::sleep(POLL);
    }
}

/// Whether the child would have to use a slot again whose readers were promised that it stays.
fn has_outgrown(plan: &Plan, board: &Board) -> bool {
    plan.retained && board.told().waits > 0
}

// ---- The server writes, and does not compress ----

fn ease(plan: &Plan, client: &mut Client) -> Result<Stream, Setback> {
    let armed = Armed::new(plan, client, Work::Ease)?;
    // The gauge is the capture's own: nothing of the board goes there.
    let done = armed.attended(&AtomicBool::new(false), || capture::take_snapshot(plan))?;
    match armed.board.stage() {
        Stage::Done => {}
        Stage::Armed => {
            tracing::warn!("the module was not there when the server forked; the snapshot may be compressed")
        }
        Stage::Begun | Stage::Failed => {
            tracing::warn!(why = %armed.board.sentence(), "the module did not keep the server from compressing");
        }
    }
    Ok(done)
}

// ---- The server's child writes ----

/// A child that came first (another replica's, a save) has used up the arming: arms again, a few times.
fn walk_with_patience(plan: &Plan, client: &mut Client, role: Option<Role>) -> Result<Stream, Setback> {
    let mut last = String::new();
    for attempt in 1..=ATTEMPTS {
        match walk(plan, client, role) {
            Err(Setback::OtherChild(why)) => {
                tracing::info!(attempt, %why, "the module's walk was not for this snapshot");
                last = why;
            }
            other => return other,
        }
        // The child may still be there; the next one needs the claim, and so do we if we give up.
        drop(claim(plan)?);
    }
    Err(Setback::Before(last))
}

fn walk(plan: &Plan, client: &mut Client, role: Option<Role>) -> Result<Stream, Setback> {
    let armed = Armed::new(plan, client, Work::Walk)?;
    let live = AtomicBool::new(false);
    armed.attended(&live, || {
        let mut sync = AlmostEmptySync::ask(plan)?;
        let (replid, offset) = sync.resync(plan)?;
        let journal = begun(plan, &armed.board, replid, offset)?;
        live.store(true, Ordering::Release);
        let head = sync.payload(plan, &armed.board)?;
        finished(plan, &armed.board, &head, role)?;
        Ok(journal.map_or(Stream::Elsewhere, |journal| Stream::Next(sync.wire, Box::new(journal))))
    })
}

/// Waits until the child has begun, and makes sure that it writes what the server has promised. Tells the owner.
fn begun(plan: &Plan, board: &Board, replid: ReplId, offset: u64) -> Result<Option<JournalWriter>, Setback> {
    let asked = Instant::now();
    while board.stage() == Stage::Armed {
        if plan.stop.load(Ordering::Relaxed) {
            return Err(Fault::Stopped.into());
        }
        if asked.elapsed() > BEGIN_LIMIT {
            return Err(before(format!("the server's child did not begin within {} s", BEGIN_LIMIT.as_secs())));
        }
        thread::sleep(POLL_QUICKLY);
    }
    if board.stage() == Stage::Failed {
        return Err(before(board.sentence()));
    }
    let origin = board.origin().ok_or_else(|| before("the board does not say what it is of"))?;
    if (&origin.replid, origin.offset) != (replid.as_bytes(), offset) {
        board.cancel();
        let text = format!("another child came first: it is at offset {}, the snapshot at {offset}", origin.offset);
        return Err(Setback::OtherChild(text));
    }
    let identity =
        Identity { generation: plan.generation, kind: Kind::Journal, replid: *replid.as_bytes(), first_offset: offset };
    let journal = match &plan.journal {
        Some((memory, geometry)) => {
            Some(JournalWriter::create(memory.clone(), *geometry, identity).map_err(Fault::from)?)
        }
        None => None,
    };
    plan.gauge.snapshot_began(replid, offset, journal.is_some());
    plan.gauge.comes_by(Way::Walked);
    let _ = plan.events.send(CaptureEvent::Started { generation: plan.generation, replid, offset });
    Ok(journal)
}

/// The server's part is over; so must the child's be.
fn finished(plan: &Plan, board: &Board, head: &Head, role: Option<Role>) -> Result<(), Setback> {
    if board.stage() != Stage::Done && has_outgrown(plan, board) {
        return Err(Fault::Outgrown.into());
    }
    if board.stage() != Stage::Done {
        return Err(Fault::Module(board.sentence()).into());
    }
    let origin = board.origin().ok_or_else(|| Fault::Module("the board has lost what it is of".into()))?;
    // The stream of a primary begins by selecting a database. A replica passes its primary's on as it comes, so that this one counts.
    let begins_in = head.stream_db().filter(|_| role == Some(Role::Replica));
    if begins_in.is_some_and(|database| database != origin.database) {
        let text = format!(
            "it wrote that the stream begins in database {}, the server says {:?}",
            origin.database,
            head.stream_db()
        );
        return Err(Fault::Module(text).into());
    }
    let told = board.told();
    plan.gauge.snapshot_told(&told);
    plan.gauge.snapshot_ended(State::Sealed);
    tracing::debug!(keys = told.keys, micros = told.took_micros, waits = told.waits, "the child has walked");
    let _ = plan.events.send(CaptureEvent::Completed { generation: plan.generation, bytes: told.received });
    Ok(())
}

/// A sync that asks for functions only: the server forks, and sends some hundred bytes and then the stream.
struct AlmostEmptySync {
    wire: Wire,
    machine: Handshake,
    /// Read, and not yet used.
    early: Vec<u8>,
}

impl AlmostEmptySync {
    fn ask(plan: &Plan) -> Result<AlmostEmptySync, Setback> {
        let mut wire = capture::connect(plan)?;
        say(&mut wire, &["REPLCONF", "rdb-filter-only", "functions"])?;
        if plan.journal.is_none() {
            capture::ask_for_snapshot_alone(&mut wire)?;
        }
        // Valkey makes syncs of one fork only for those who name the same version.
        let options = client::Options { rdb_version: plan.reader_version.clone(), ..Default::default() };
        Ok(AlmostEmptySync { wire, machine: Handshake::new(options), early: Vec::new() })
    }

    /// Drives the handshake to `+FULLRESYNC`, at which the server forks.
    fn resync(&mut self, plan: &Plan) -> Result<(ReplId, u64), Setback> {
        match self.next_event(plan, |heard| heard.elapsed() < SILENCE_LIMIT)? {
            PsyncEvent::FullResync { replid, offset } => Ok((replid, offset)),
            other => Err(before(format!("the server answered an almost empty sync with {other:?}"))),
        }
    }

    /// The almost empty snapshot, which comes after the child's walk. The server may be silent for as long as that takes.
    fn payload(&mut self, plan: &Plan, board: &Board) -> Result<Head, Setback> {
        let mut pulse = Pulse::of(board);
        let payload = match self.next_event(plan, |_| pulse.is_felt(board))? {
            PsyncEvent::Payload(payload) => payload,
            other => return Err(link(format!("the server sent {other:?} where a snapshot was due")).into()),
        };
        let mut bytes = std::mem::take(&mut self.early);
        let mut mark = match payload {
            Payload::Mark(mark) => EofMark::new(mark),
            // Filtered snapshots go to sockets only, hence by mark.
            Payload::Length(_) => return Err(link("the server sent a snapshot of a known length".into()).into()),
        };
        let mut seen = 0;
        let mut heard = Instant::now();
        loop {
            let fresh = bytes.get(seen..).unwrap_or_default();
            let tail = fresh.get(fresh.len().saturating_sub(MARK_LENGTH as usize)..).unwrap_or_default();
            if !fresh.is_empty() && mark.observe(tail, fresh.len()) {
                break;
            }
            seen = bytes.len();
            if seen > ALMOST_EMPTY_LIMIT {
                let text =
                    format!("the almost empty snapshot has more than {}", Size::bytes(ALMOST_EMPTY_LIMIT as u64));
                return Err(link(text).into());
            }
            self.read(plan, &mut bytes, &mut heard, |heard| heard.elapsed() < SILENCE_LIMIT)?;
        }
        match Head::parse(&bytes) {
            Ok(Some((head, _))) => Ok(head),
            Ok(None) => Err(link("the almost empty snapshot is cut off".into()).into()),
            Err(error) => Err(link(error.to_string()).into()),
        }
    }

    /// The next event but those that only say that the server lives.
    fn next_event(&mut self, plan: &Plan, mut patient: impl FnMut(Instant) -> bool) -> Result<PsyncEvent, Setback> {
        let mut heard = Instant::now();
        loop {
            while let Some(event) = self.machine.poll_event() {
                if !matches!(event, PsyncEvent::KeepAlive | PsyncEvent::Handshaken) {
                    return Ok(event);
                }
            }
            let output = self.machine.take_output();
            if !output.is_empty() {
                self.wire.write_all(&output).map_err(|cause| link(cause.to_string()))?;
            }
            let mut bytes = std::mem::take(&mut self.early);
            if bytes.is_empty() {
                self.read(plan, &mut bytes, &mut heard, &mut patient)?;
            }
            let used = self.machine.handle_input(&bytes).map_err(Fault::from)?;
            self.early = bytes.split_off(used);
        }
    }

    /// Adds what comes; at most one wait of a tick.
    fn read(
        &mut self,
        plan: &Plan,
        bytes: &mut Vec<u8>,
        heard: &mut Instant,
        mut patient: impl FnMut(Instant) -> bool,
    ) -> Result<(), Setback> {
        if plan.stop.load(Ordering::Relaxed) {
            return Err(Fault::Stopped.into());
        }
        let mut buffer = [0; 16 * 1024];
        match self.wire.read(&mut buffer).map_err(|cause| link(cause.to_string()))? {
            Received::Bytes(n) => {
                bytes.extend_from_slice(&buffer[..n]);
                *heard = Instant::now();
                Ok(())
            }
            Received::Idle if patient(*heard) => Ok(()),
            Received::Idle => Err(link(format!("nothing came for {} s", SILENCE_LIMIT.as_secs())).into()),
            Received::End => Err(link("the server closed it; its log says why".into()).into()),
        }
    }
}

fn link(cause: String) -> Fault {
    Fault::Link { during: "almost empty sync", cause }
}

/// Says one `REPLCONF` and waits for its `+OK`.
fn say(wire: &mut Wire, command: &[&str]) -> Result<(), Setback> {
    let mut bytes = Vec::new();
    resp::command(&mut bytes, command);
    wire.write_all(&bytes).map_err(before)?;
    let mut answer = Vec::new();
    let mut buffer = [0; 512];
    let began = Instant::now();
    while !answer.ends_with(b"\r\n") {
        match wire.read(&mut buffer).map_err(before)? {
            Received::Bytes(n) => answer.extend_from_slice(&buffer[..n]),
            Received::Idle if began.elapsed() < SILENCE_LIMIT && answer.len() < buffer.len() => {}
            Received::Idle | Received::End => return Err(before(format!("no answer to {}", command.join(" ")))),
        }
    }
    if answer == b"+OK\r\n" { Ok(()) } else { Err(before(format!("{}: {}", command.join(" "), answer.escape_ascii()))) }
}

/// Whether the child still moves.
struct Pulse {
    beat: u64,
    felt: Instant,
}

impl Pulse {
    fn of(board: &Board) -> Pulse {
        Pulse { beat: board.writer_beat(), felt: Instant::now() }
    }

    /// True while the beat has changed within [`SILENCE_LIMIT`]. A child that waits for readers beats too.
    fn is_felt(&mut self, board: &Board) -> bool {
        let beat = board.writer_beat();
        if beat != self.beat {
            *self = Pulse { beat, felt: Instant::now() };
        }
        self.felt.elapsed() < SILENCE_LIMIT
    }
}

/// The version of what agent and module say to each other.
pub(crate) const PROTOCOL: &str = "1";

/// From this average size of a key's data on a walk costs the server less than its own saving. docs/decisions/0007-walk-or-ease.md has the
/// measurement.
const WALK_FROM_BYTES: u64 = 512;

/// How often a walk is tried that another child of the server comes before.
const ATTEMPTS: u32 = 3;

/// How long a module that has failed isn't asked again: long enough that replicas get their snapshots, short enough that a passing cause
/// doesn't cost a day.
const DISTRUST: Duration = Duration::from_secs(300);

/// How long the module may take to fetch what is offered; it gives up itself after a quarter of a second.
const HANDOVER_LIMIT: Duration = Duration::from_secs(2);

/// How long the server's child may take from `+FULLRESYNC` to its first word: a fork, and what other modules do there.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);

/// How long a child may take to end that isn't wanted any more. It looks at each value, and at each 8 KiB of small ones.
const CLAIM_LIMIT: Duration = Duration::from_secs(10);

/// How often progress is passed on, and slots are given free.
const POLL: Duration = Duration::from_millis(2);

/// How often it is looked whether the child has begun: replicas wait for that.
const POLL_QUICKLY: Duration = Duration::from_micros(100);

/// Bytes of an almost empty snapshot, at most: function libraries are the only thing in it that has a size.
const ALMOST_EMPTY_LIMIT: usize = 64 << 20;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::info::Info;

    use super::*;

    fn facts(keys: u64, dataset: u64, version: &str) -> Facts {
        let text = format!("{version}\r\nused_memory_dataset:{dataset}\r\ndb0:keys={keys},expires=0\r\n");
        Facts::from_info(&Info::parse(text.as_bytes()))
    }

    #[test]
    fn large_values_are_walked_and_small_ones_left_to_the_server() {
        let redis = "redis_version:7.0.15";
        assert_eq!(best(ModuleCapture::Auto, &facts(10, 10 << 20, redis), false), Work::Walk);
        assert_eq!(best(ModuleCapture::Auto, &facts(1 << 20, 100 << 20, redis), false), Work::Ease);
        assert_eq!(best(ModuleCapture::Auto, &facts(0, 1000, redis), false), Work::Ease);
        assert_eq!(best(ModuleCapture::Walk, &facts(1 << 20, 100 << 20, redis), false), Work::Walk);
        assert_eq!(best(ModuleCapture::Server, &facts(10, 10 << 20, redis), false), Work::Ease);
    }

    #[test]
    fn a_format_that_the_readers_do_not_know_is_not_walked() {
        let valkey = "server_name:valkey\r\nvalkey_version:9.1.2";
        assert_eq!(best(ModuleCapture::Walk, &facts(10, 10 << 20, valkey), false), Work::Ease);
        assert_eq!(best(ModuleCapture::Walk, &facts(10, 10 << 20, valkey), true), Work::Walk);
    }

    #[test]
    fn a_field_of_a_status_is_found_by_its_name() {
        let bulk = |text: &str| Frame::Bulk(text.as_bytes().to_vec());
        let status = Frame::Array(vec![bulk("version"), bulk("0.1.0"), bulk("protocol"), bulk("1")]);
        assert_eq!(field(&status, b"protocol").as_deref(), Some("1"));
        assert_eq!(field(&status, b"1"), None);
        assert_eq!(field(&Frame::Null, b"protocol"), None);
    }
}
