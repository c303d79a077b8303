//! The source's side of the module: arms it, and follows what the server's fork child writes into our table.
//!
//! ```text
//!   no module, or not to be used ───────────────────────────────────────────┐
//!   arm refused ─────────────────────────────────────────────────────────────┤
//!                                                                            ▼
//!   ask ──▶ arm: walk ──▶ PSYNC ──▶ the child asks ──▶ it may ──▶ long strings from it, behind them the rest by PSYNC
//!      │                               └─ it declines ────────▶ capture by PSYNC alone
//!      └──▶ arm: ease ──▶ capture by PSYNC, the child doesn't compress          ▲
//!                            walk failed half-way: the next attempt, for a while, ┘
//! ```
//!
//! What the child writes into our table it takes out of what its server saves, so it may begin only if no other client gets that. **The
//! permission is ours to give**: when `+FULLRESYNC` has come over our connection and says what the child says of itself, replid and
//! offset, and our connection still stands when the child asks, it is the one that was forked for us (`module/src/capture/exclusive.rs` has the rest of the argument). Whatever arrives before the
//! child has answered, arrives whole.
//!
//! Two processes must never write one table: a writer claims its memory, and the claim ends with the writer's life, however that
//! ends. So the next writer waits for the claim ([`claim`]) first.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::{Claim, Handover, Memory};
use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::client::{self, Event as PsyncEvent};
use remora_table::server_pages::capture_page::{Order, Stage, Work, WriterStatus};
use remora_table::{CapturePage, Identity, JournalWriter, Kind, Origin};

use super::join;
use super::method::{Way, average, best, long_from};
use super::plan::{CaptureEvent, Fault, Plan, SILENCE_LIMIT, Stops};
use super::psync_link::{PsyncLink, broken, is_patient};
use super::without_module::{self, Stream};
use crate::args::ModuleCapture;
use crate::server::{Client, Facts, Role, ServerError, module};
use crate::units::Size;

/// Takes the snapshot in the best way there is. As for [`without_module::take_snapshot`], which it ends in where there is no better one.
pub(super) fn take_snapshot(plan: &Plan) -> Result<Stream, Fault> {
    let claim = claim(plan)?;
    plan.gauge.comes_by(Way::Psync);
    let Some(mut chosen) = choose(plan) else { return without_module::take_snapshot(plan) };
    let outcome = match chosen.work {
        Work::Ease => ease(plan, &mut chosen),
        Work::Walk => {
            // The child will claim it.
            drop(claim);
            walk(plan, &mut chosen)
        }
    };
    match outcome {
        Ok(done) => Ok(done),
        Err(Setback::Before(why)) => {
            tracing::warn!(%why, "the module could not take the snapshot; it comes by psync");
            let _claim = self::claim(plan)?;
            plan.gauge.comes_by(Way::Psync);
            without_module::take_snapshot(plan)
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

/// What the module of a server shall do.
struct Chosen {
    client: Client,
    work: Work,
    /// For [`Work::Walk`]: bytes from which on a string is long.
    least_bytes: u64,
    /// What the server is to others.
    role: Option<Role>,
}

/// `None` for the way without it.
fn choose(plan: &Plan) -> Option<Chosen> {
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
        let known = module::find(&mut client, rules.load.as_deref()).await?;
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
    let least_bytes = rules.walk_from.unwrap_or_else(|| long_from(&facts));
    let work = best(rules.choice, &facts, plan.reader_version.is_some(), least_bytes);
    let (average, long) = (Size::bytes(average(&facts)), Size::bytes(least_bytes));
    tracing::info!(?work, keys = facts.keys(), %average, %long, "the server has the module");
    Some(Chosen { client, work, least_bytes, role: facts.role })
}

// ---- Arming ----

/// The module is armed, until this is dropped.
struct Armed<'p> {
    page: CapturePage,
    plan: &'p Plan,
    client: &'p mut Client,
}

impl<'p> Armed<'p> {
    fn new(plan: &'p Plan, chosen: &'p mut Chosen) -> Result<Armed<'p>, Setback> {
        let (table, geometry) = &plan.snapshot;
        let Chosen { client, work, least_bytes, .. } = chosen;
        let (work, least_bytes) = (*work, *least_bytes);
        let order = Order { work, generation: plan.generation, geometry: *geometry, least_bytes };
        let page = CapturePage::create(order).map_err(before)?;
        hand_over(plan, client, &page, table)?;
        Ok(Armed { page, plan, client })
    }

    /// Runs `work` while a thread beats on the page, and passes on in both directions what stands there and in the gauge. `live`:
    /// from when on the gauge is this snapshot's.
    fn attended<T>(&self, live: &AtomicBool, work: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| attend(self.plan, &self.page, live, &over));
            let done = work();
            over.store(true, Ordering::Relaxed);
            done
        })
    }
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        self.page.cancel();
        let generation = self.plan.generation.to_string();
        let disarmed = self.plan.runtime.block_on(self.client.command(&["REMORA.DISARM", &generation]));
        if let Err(error) = disarmed {
            tracing::debug!(%error, "the module was not disarmed; it forgets by itself");
        }
    }
}

/// Offers page and table at a local socket, and tells the module where.
fn hand_over(plan: &Plan, client: &mut Client, page: &CapturePage, table: &Memory) -> Result<(), Setback> {
    let handover = Handover::bind(&plan.module.place).map_err(before)?;
    let (address, secret) = (handover.address(), handover.secret());
    let descriptors = [page.memory().as_fd(), table.as_fd()];
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

fn attend(plan: &Plan, page: &CapturePage, live: &AtomicBool, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        page.beat();
        if plan.stop.load(Ordering::Relaxed) {
            page.cancel();
        }
        if page.order().work == Work::Ease && page.stage() == Stage::Done {
            plan.gauge.comes_by(Way::Eased);
        }
        if live.load(Ordering::Acquire) {
            if has_outgrown(plan, page) {
                page.cancel();
            }
            if !plan.retained {
                page.allow_retiring(plan.gauge.retire_below());
            }
            plan.gauge.snapshot_told(&page.writer_status());
        }
        thread::sleep(POLL);
    }
}

/// Whether the child would have to use a slot again whose readers were promised that it stays.
fn has_outgrown(plan: &Plan, page: &CapturePage) -> bool {
    plan.retained && page.writer_status().waits > 0
}

// ---- The server writes, and does not compress ----

fn ease(plan: &Plan, chosen: &mut Chosen) -> Result<Stream, Setback> {
    let armed = Armed::new(plan, chosen)?;
    // The gauge is the capture's own: nothing of the page goes there.
    let done = armed.attended(&AtomicBool::new(false), || without_module::take_snapshot(plan))?;
    match armed.page.stage() {
        Stage::Done => {}
        Stage::Armed => {
            tracing::warn!("the module was not there when the server forked; the snapshot may be compressed")
        }
        Stage::Asking | Stage::Begun | Stage::Declined | Stage::Failed => {
            tracing::warn!(why = %armed.page.status_text(), "the module did not keep the server from compressing");
        }
    }
    Ok(done)
}

// ---- The server's child writes the long strings ----

fn walk(plan: &Plan, chosen: &mut Chosen) -> Result<Stream, Setback> {
    // The stream of a primary begins by selecting a database. A replica forwards its primary's stream unchanged, so this database counts.
    let counts = chosen.role == Some(Role::Replica);
    let armed = Armed::new(plan, chosen)?;
    let live = AtomicBool::new(false);
    armed.attended(&live, || {
        let options = client::Options { rdb_version: plan.reader_version.clone(), ..Default::default() };
        let mut sync = PsyncLink::for_snapshot(plan, options)?;
        let (replid, offset) = resync(plan, &mut sync)?;
        if !may_begin(plan, &armed.page, &mut sync, replid, offset)? {
            return Ok(untouched(plan, &armed.page, sync, replid, offset)?);
        }
        let journal = begun(plan, replid, offset)?;
        live.store(true, Ordering::Release);
        let payload = first_byte(plan, &mut sync, &armed.page);
        live.store(false, Ordering::Release);
        let told = walked(plan, &armed.page)?;
        let (mut wire, early) = sync.into_parts();
        let _claim = claim(plan)?;
        let database = armed.page.fork_point().map_err(Fault::from)?.filter(|_| counts).map(|point| point.database);
        let expected = join::Expected { payload: payload?, told, database };
        join::receive(plan, &mut wire, &expected, &early)?;
        Ok(journal.map_or(Stream::Elsewhere, |journal| Stream::Next(wire, Box::new(journal))))
    })
}

/// Lets the child begin if it is the one that was forked for us, and waits until it has, or has declined.
fn may_begin(
    plan: &Plan,
    page: &CapturePage,
    sync: &mut PsyncLink,
    replid: ReplId,
    offset: u64,
) -> Result<bool, Setback> {
    let asked = Instant::now();
    loop {
        match page.stage() {
            Stage::Armed => {}
            Stage::Asking => match page.fork_point() {
                Ok(Some(point)) if (point.history, point.offset) == (replid, offset) => {
                    sync.still_waits()?;
                    page.permit();
                }
                Ok(_) => page.cancel(),
                Err(error) => {
                    tracing::warn!(%error, "the module asks for an invalid snapshot; the server takes it");
                    page.cancel();
                }
            },
            Stage::Begun | Stage::Done | Stage::Failed => return Ok(true),
            Stage::Declined => {
                tracing::info!(why = %page.status_text(), "the module leaves the snapshot to the server");
                return Ok(false);
            }
        }
        if plan.stop.load(Ordering::Relaxed) {
            return Err(Fault::Stopped.into());
        }
        if asked.elapsed() > BEGIN_LIMIT {
            let limit = BEGIN_LIMIT.as_secs();
            tracing::info!(limit, "the module was not there when the server forked, or said nothing");
            return Ok(false);
        }
        thread::sleep(POLL_QUICKLY);
    }
}

/// The child has declined, so that the server saves everything.
fn untouched(
    plan: &Plan,
    page: &CapturePage,
    mut sync: PsyncLink,
    replid: ReplId,
    offset: u64,
) -> Result<Stream, Fault> {
    let payload = first_byte(plan, &mut sync, page)?;
    // What the child has said stood there before its first byte came. One that has begun after all does not send the whole.
    if matches!(page.stage(), Stage::Begun | Stage::Done | Stage::Failed) {
        return Err(Fault::Module("its child began long after the server had forked".into()));
    }
    let _claim = claim(plan)?;
    without_module::take_first(plan, sync.announced(replid, offset, payload))
}

/// The child has begun: tells the owner, so that replicas may read.
fn begun(plan: &Plan, replid: ReplId, offset: u64) -> Result<Option<JournalWriter>, Fault> {
    let origin = Origin { generation: plan.generation, history: replid, offset };
    let identity = Identity { kind: Kind::Journal, origin };
    let journal = match &plan.journal {
        Some((memory, geometry)) => Some(JournalWriter::create(memory.clone(), *geometry, identity)?),
        None => None,
    };
    plan.gauge.snapshot_began(replid, offset, journal.is_some());
    plan.gauge.comes_by(Way::Walked);
    let _ = plan.events.send(CaptureEvent::Started { generation: plan.generation, replid, offset });
    Ok(journal)
}

/// The server goes on, or has given up; its child must have ended its walk.
fn walked(plan: &Plan, page: &CapturePage) -> Result<WriterStatus, Fault> {
    if page.stage() == Stage::Done {
        let told = page.writer_status();
        plan.gauge.snapshot_told(&told);
        tracing::debug!(strings = told.keys, micros = told.took_micros, waits = told.waits, "the child has walked");
        return Ok(told);
    }
    if has_outgrown(plan, page) {
        return Err(Fault::Outgrown);
    }
    if plan.stop.load(Ordering::Relaxed) {
        return Err(Fault::Stopped);
    }
    Err(Fault::Module(page.status_text()))
}

/// Drives the handshake to `+FULLRESYNC`, at which the server forks.
fn resync(plan: &Plan, sync: &mut PsyncLink) -> Result<(ReplId, u64), Fault> {
    match sync.next_event(Stops::of(plan), is_patient)? {
        PsyncEvent::FullResync { replid, offset } => Ok((replid, offset)),
        other => Err(broken(format!("the server answered with {other:?} where a snapshot was asked for"))),
    }
}

/// Waits for the snapshot's first byte, which comes after the child's walk. The server may be silent for as long as that takes.
fn first_byte(plan: &Plan, sync: &mut PsyncLink, page: &CapturePage) -> Result<Payload, Fault> {
    let mut pulse = Pulse::of(page);
    match sync.next_event(Stops::of(plan), |_| pulse.is_felt(page))? {
        PsyncEvent::Payload(payload) => Ok(payload),
        other => Err(broken(format!("the server sent {other:?} where a snapshot was due"))),
    }
}

/// Whether the child still moves.
struct Pulse {
    beat: u64,
    felt: Instant,
}

impl Pulse {
    fn of(page: &CapturePage) -> Pulse {
        Pulse { beat: page.writer_beat(), felt: Instant::now() }
    }

    /// True while the beat has changed within [`SILENCE_LIMIT`]. A child that waits for readers beats too.
    fn is_felt(&mut self, page: &CapturePage) -> bool {
        let beat = page.writer_beat();
        if beat != self.beat {
            *self = Pulse { beat, felt: Instant::now() };
        }
        self.felt.elapsed() < SILENCE_LIMIT
    }
}

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
