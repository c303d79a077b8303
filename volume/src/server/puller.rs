//! What a server takes from others: the blocks of large writes, and those that a copy lacks.
//!
//! The puller takes the blocks of a writer's large writes out of its outbox, or out of the staging of the server before
//! this one in a chain, and counts how much each writer may have under way here.
//!
//! The borrower brings a copy that is behind up to date, from the copy of another server, while the writer goes on.
//!
//! ```text
//!   for each 64 MiB:   Lend entries ──▶ compare with ours ──▶ Lend the blocks that differ ──▶ take them
//!   then:              wait until every write that the lender had applied is applied here too ──▶ whole
//! ```
//!
//! It is a thread of its own, as it waits for the lender. It holds the volume's lock only to compare and to take. It
//! ends when the copy is whole, when its writer's connection is over or has begun another catch-up, or when the lender
//! fails: then the writer is refused, and takes the copy back from another lender.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_fabric::{Memory, Pages, Peer, ReadRequest, RegionId, TransportKind};
use remora_messenger::{Address, Buffer, Connection, Delivery};

use super::slot::{Abandoned, Slot};
use super::{Budget, Exports, Grant, answer, refuse};
use crate::layout::{Entry, sums};
use crate::link::{
    Caller, LEAST_ROOM, LOOK_AGAIN, Laid, Lane, MOST_ROOM, PROGRESS_AT, REACH_LIMIT, REGION_BYTES, Rdma, SEEN_AT,
    Security, has_place,
};
use crate::reader::fetch;
use crate::rules::{Generation, Holder, Version};
use crate::shape::{BLOCK_BYTES, Shape};
use crate::wire::{Call, Cause, MOST_ENTRIES, Mode, Reply, Run, Used};

/// What the host and the thread share.
pub(super) struct Puller {
    queue: Mutex<Queue>,
    changed: Condvar,
    is_over: AtomicBool,
    /// Whether other servers read the staging.
    is_followed: AtomicBool,
    staging: Arc<Memory>,
    /// Its name for other servers, once they can read it.
    region: OnceLock<RegionId>,
    _grant: Grant,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Call, Delivery)>,
    /// The thread does the call before these.
    is_busy: bool,
}

impl Puller {
    pub(super) fn new(budget: &Arc<Budget>) -> Result<Puller, String> {
        let grant = budget.take(REGION_BYTES).ok_or("the server has no memory left to pull into")?;
        let staging = Memory::create("remora-volume-staging", REGION_BYTES, Pages::Small);
        let staging = Arc::new(staging.map_err(|error| error.to_string())?);
        Ok(Puller {
            queue: Mutex::default(),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
            is_followed: AtomicBool::new(false),
            region: OnceLock::new(),
            staging,
            _grant: grant,
        })
    }

    /// Takes a call that must wait. Returns one that need not.
    pub(super) fn queued(&self, call: Call, delivery: Delivery) -> Option<(Call, Delivery)> {
        let mut queue = self.queue();
        let waits = queue.is_busy || !queue.waiting.is_empty() || matches!(call, Call::Pull { .. });
        if !waits {
            return Some((call, delivery));
        }
        // Bounded by the messenger: what waits here keeps its share of what the connection may have received.
        queue.waiting.push_back((call, delivery));
        self.changed.notify_one();
        None
    }

    /// Another server is about to read the staging.
    pub(super) fn follow(&self) -> Option<RegionId> {
        self.is_followed.store(true, Ordering::Release);
        self.region.get().copied()
    }

    /// The connection is over.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.queue().waiting.clear();
        self.changed.notify_all();
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next call that waits; `None` at the end.
    fn next(&self, goes_on: impl Fn() -> bool) -> Option<(Call, Delivery)> {
        let mut queue = self.queue();
        queue.is_busy = false;
        while goes_on() {
            if let Some(next) = queue.waiting.pop_front() {
                queue.is_busy = true;
                return Some(next);
            }
            queue = self.changed.wait_timeout(queue, LOOK_AGAIN).map_or_else(|e| e.into_inner().0, |(queue, _)| queue);
        }
        None
    }
}

/// Does a call, with its blocks.
pub(super) type Perform = dyn Fn(Call, &[u8]) + Send;

/// The thread.
pub(super) struct Pulling {
    pub(super) puller: Arc<Puller>,
    /// The writer's connection, and the volume that it has open.
    pub(super) connection: Connection,
    pub(super) shape: Shape,
    /// This server's name at the writer's exporters, and the keys of the outbox.
    pub(super) session: u64,
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) security: Security,
    /// The transports by which this server reads memory elsewhere.
    pub(super) transports: &'static [TransportKind],
    pub(super) rdma: Rdma,
    pub(super) exports: Arc<Exports>,
    pub(super) is_stopping: Arc<AtomicBool>,
    pub(super) call: Box<Perform>,
}

/// A write whose blocks are elsewhere.
struct Pull<'a> {
    holder: Holder,
    version: Version,
    sums: &'a [u32],
    at: u64,
    source: &'a str,
}

impl Pulling {
    pub(super) fn run(self) {
        // Here, and not by the call that begins this: the staging is registered for RDMA.
        let region = self.exports.export_and_wait(&self.puller.staging);
        if let Some(region) = region {
            let _ = self.puller.region.set(region); // nothing else sets it
        }
        self.serve();
        if let Some(region) = region {
            self.exports.revoke(region);
        }
    }

    fn serve(&self) {
        let laid = self.lane().connect(&self.connection, (self.session, &self.keys), &self.puller.staging);
        let writer = self.connection.peer();
        match &laid {
            Ok(Laid { transport, why, .. }) => {
                tracing::info!(peer = %writer, %transport, why, "a writer's large writes are pulled");
            }
            Err(why) => tracing::info!(peer = %writer, why, "a writer's outbox cannot be reached: it writes inline"),
        }
        let peer = laid.map(|laid| laid.peer);
        let lends = peer.is_ok() && self.puller.region.get().is_some();
        answer(&self.connection, &Reply::Reached { pulls: peer.is_ok(), lends }, Bytes::new());
        let Ok(mut peer) = peer else { return self.refuse_all() };
        let (mut upstream, mut data) = (Upstream::default(), Vec::new());
        while let Some((call, delivery)) = self.puller.next(|| self.goes_on()) {
            let Call::Pull { holder, version, runs, sums, at, source } = call else {
                (self.call)(call, &delivery.data);
                continue;
            };
            let pull = Pull { holder, version, sums: &sums, at, source: &source };
            match self.pull(&mut *peer, &mut upstream, &pull, &mut data) {
                Ok(()) => (self.call)(Call::Write { holder, version, runs, sums }, &data),
                Err((cause, text)) => {
                    refuse(&self.connection, cause, &text);
                    return self.refuse_all();
                }
            }
        }
    }

    fn lane(&self) -> Lane<'_> {
        Lane {
            transports: self.transports,
            rdma: &self.rdma,
            length: REGION_BYTES,
            depth: 4,
            connect_limit: REACH_LIMIT,
            read_limit: PULL_LIMIT,
        }
    }

    /// What arrives after a refusal is not done.
    fn refuse_all(&self) {
        while let Some((call, _)) = self.puller.next(|| self.goes_on()) {
            if matches!(call, Call::Pull { .. }) {
                return refuse(&self.connection, Cause::Misuse, "this server cannot read the writer's outbox");
            }
        }
    }

    fn goes_on(&self) -> bool {
        !self.puller.is_over.load(Ordering::Acquire) && !self.is_stopping.load(Ordering::Acquire)
    }

    /// Brings the blocks of a write into `data`. Those of the outbox are checked by the one who applies them.
    fn pull(
        &self,
        peer: &mut dyn Peer,
        upstream: &mut Upstream,
        pull: &Pull<'_>,
        data: &mut Vec<u8>,
    ) -> Result<(), (Cause, String)> {
        let (at, bytes) = (pull.at, pull.sums.len() * BLOCK_BYTES);
        if !has_place(at, bytes) {
            let text = format!("write {}: the outbox has no {bytes} bytes at {at}", pull.version);
            return Err((Cause::Misuse, text));
        }
        data.resize(bytes, 0);
        if !pull.source.is_empty() {
            match self.pull_along(upstream, pull, data) {
                Ok(()) => return Ok(()),
                Err(why) => tracing::info!(source = pull.source, why, "a write is pulled from its writer instead"),
            }
        }
        let failed = |error: &dyn std::fmt::Display| {
            (Cause::Damaged, format!("write {}: the outbox cannot be read: {error}", pull.version))
        };
        match peer.view() {
            Some(view) => {
                view.read(at, data).map_err(|error| failed(&error))?;
                if self.puller.is_followed.load(Ordering::Acquire) {
                    self.puller.staging.write(at, data).map_err(|error| failed(&error))?;
                }
            }
            None => {
                let request = ReadRequest { tag: 0, offset: at, length: bytes as u32, sink_offset: at };
                fetch(peer, &[request], PULL_LIMIT, || self.goes_on()).map_err(|error| failed(&error))?;
                self.puller.staging.read(at, data).map_err(|error| failed(&error))?;
            }
        }
        self.arrived(pull.version);
        Ok(())
    }

    /// Takes the blocks out of the staging of the server before this one.
    fn pull_along(&self, upstream: &mut Upstream, pull: &Pull<'_>, data: &mut [u8]) -> Result<(), String> {
        let from = upstream.at(pull.source, &|| self.link(pull))?;
        let staging = &self.puller.staging;
        let fetched = from.fetch(staging, pull.version, (pull.at, data.len() as u32), &|| self.goes_on());
        let checked = fetched.and_then(|()| {
            staging.read(pull.at, data).map_err(|error| error.to_string())?;
            let is_right = sums(data).eq(pull.sums.iter().copied());
            if is_right { Ok(()) } else { Err("the blocks there are not those of the write".to_owned()) }
        });
        match checked {
            Ok(()) => self.arrived(pull.version),
            Err(_) => upstream.failed(),
        }
        checked
    }

    fn link(&self, pull: &Pull<'_>) -> Result<Link, String> {
        let goes_on = || self.goes_on();
        Link::open(
            (self.shape, pull.holder),
            pull.source,
            &self.security,
            &self.lane(),
            (&self.puller.staging, &goes_on),
        )
    }

    /// Says to servers that follow that the blocks of a write are in the staging.
    fn arrived(&self, version: Version) {
        let said = self.puller.staging.store_u64(PROGRESS_AT, version.word().to_le(), Ordering::Release);
        debug_assert!(said.is_ok(), "a place in the staging: {said:?}");
    }
}

/// Longest time for a pull: below the time for which a writer waits for a server.
const PULL_LIMIT: Duration = Duration::from_secs(4);

/// The server before this one in a chain. It permits to read its staging, into which it pulls the same
/// writes.
///
/// ```text
///   Open{Borrow}, Follow ──▶ Attached{keys}      once
///   progress ≥ this write?                       read again after a pause, for up to WAIT_LIMIT
///   blocks, at the same place                    one read; the caller checks them
/// ```
///
/// A chain only saves bytes: if it fails, the blocks are pulled from their writer, and the chain is tried again later.
#[derive(Default)]
pub(super) struct Upstream {
    address: String,
    link: Option<Link>,
    /// After a failure it is not tried before.
    next_try: Option<Instant>,
}

/// A connection to it.
pub(super) struct Link {
    peer: Box<dyn Peer>,
    /// Keeps the grant.
    _caller: Caller,
}

impl Upstream {
    /// The connection to this server, made by `open` if there is none.
    pub(super) fn at(&mut self, address: &str, open: &dyn Fn() -> Result<Link, String>) -> Result<&mut Link, String> {
        if self.address != address {
            *self = Upstream { address: address.to_owned(), link: None, next_try: None };
        }
        if self.next_try.is_some_and(|at| Instant::now() < at) {
            return Err("it failed a moment ago".into());
        }
        if self.link.is_none() {
            self.next_try = Some(Instant::now() + PAUSE); // unless it can be opened
            self.link = Some(open()?);
            self.next_try = None;
        }
        self.link.as_mut().ok_or_else(|| "there is no connection".to_owned())
    }

    /// It could not be pulled from.
    pub(super) fn failed(&mut self) {
        (self.link, self.next_try) = (None, Some(Instant::now() + PAUSE));
    }
}

impl Link {
    /// Connects to the staging of a server. Reads arrive in `staging`.
    pub(super) fn open(
        (shape, holder): (Shape, Holder),
        address: &str,
        security: &Security,
        lane: &Lane<'_>,
        (staging, goes_on): (&Arc<Memory>, &dyn Fn() -> bool),
    ) -> Result<Link, String> {
        let address = address.parse::<Address>().map_err(|error| error.to_string())?;
        let caller = Caller::connect(&address, security)?;
        let ends = || if goes_on() { Ok(()) } else { Err("the writer has gone".to_owned()) };
        let open = Call::Open { shape, mode: Mode::Borrow, writer: holder.writer };
        match caller.ask(&open, REACH_LIMIT, ends)? {
            (Reply::Standing { .. }, _) => {}
            (reply, _) => return Err(unexpected(reply)),
        }
        match caller.ask(&Call::Follow(holder), REACH_LIMIT, ends)? {
            (Reply::Attached { session, keys }, _) => {
                let Laid { peer, transport, why, .. } = lane.connect(caller.connection(), (session, &keys), staging)?;
                tracing::info!(server = %address, %transport, why, "writes are pulled along a chain");
                Ok(Link { peer, _caller: caller })
            }
            (reply, _) => Err(unexpected(reply)),
        }
    }

    /// Reads the blocks of a write into the same place of this server's staging, once they are there.
    pub(super) fn fetch(
        &mut self,
        staging: &Memory,
        version: Version,
        (at, length): (u64, u32),
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), String> {
        let (deadline, mut pause) = (Instant::now() + WAIT_LIMIT, FIRST_PAUSE);
        let mut read = |request| {
            let left = deadline.saturating_duration_since(Instant::now());
            fetch(&mut *self.peer, &[request], left, goes_on).map_err(|error| error.to_string())
        };
        loop {
            read(ReadRequest { tag: 0, offset: PROGRESS_AT, length: 8, sink_offset: SEEN_AT })?;
            let mut word = [0; 8];
            staging.read(SEEN_AT, &mut word).map_err(|error| error.to_string())?;
            if u64::from_le_bytes(word) >= version.word() {
                return read(ReadRequest { tag: 0, offset: at, length, sink_offset: at });
            }
            if Instant::now() >= deadline {
                return Err(format!("it does not have write {version} after {WAIT_LIMIT:?}"));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

fn unexpected(reply: Reply) -> String {
    match reply {
        Reply::Refused { text, .. } => text,
        other => format!("an answer to another question: {other:?}"),
    }
}

/// Longest time in which a write must arrive along a chain, from when this server is ready for it. The longest write
/// takes 0.3 s over 100 Mbit/s, and a writer waits for several seconds.
const WAIT_LIMIT: Duration = Duration::from_secs(1);

/// Pauses between two looks at the progress: from a round trip to what is little beside the transfer of 1 MiB.
const FIRST_PAUSE: Duration = Duration::from_micros(100);

const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// How long a chain that has failed is not tried again. The writer leaves a dead server out meanwhile.
const PAUSE: Duration = Duration::from_secs(5);

/// How many bytes each writer may have under way here. Together never more than the server has for it.
///
/// ```text
///   writer                                  server
///     │ Window{wants, obeys} ─────────────▶ │ held := obeys; as much more as its fair share and the rest permit
///     │ ◀───────────────── Granted{room}    │
///     │ ◀── Written{…, room}, room < held   │ another writer is short: give some back
///     │ Window{wants, obeys: that room} ──▶ │ held := obeys, and now there is some for the other one
/// ```
///
/// What a writer *holds* is what it may have under way at most, whatever messages are on their way: it grows only with
/// an answer to the writer's question, of which there is one at a time, and shrinks only when the writer says so. The
/// *level* is the fair share: writers that want less than it get what they want, and the others get as much as it.
#[derive(Debug)]
pub(super) struct Staging {
    bytes: u64,
    /// By the numbers of their connections.
    writers: BTreeMap<u64, Writer>,
    /// The sum of what they hold, and its maximum so far.
    held: u64,
    most_held: u64,
    level: u64,
}

/// See the module's text.
pub(super) struct Borrower {
    pub(super) slot: Arc<Slot>,
    /// The number of this catch-up.
    pub(super) number: u64,
    pub(super) holder: Holder,
    /// What the lender must have applied.
    pub(super) since: Version,
    pub(super) lender: Address,
    /// The connection of the writer, which waits for the copy.
    pub(super) writer: Connection,
    pub(super) security: Security,
    pub(super) is_stopping: Arc<AtomicBool>,
}

#[derive(Clone, Copy, Debug)]
struct Writer {
    held: u64,
    wants: u64,
}

impl Staging {
    pub(super) fn new(bytes: u64) -> Staging {
        Staging { bytes, writers: BTreeMap::new(), held: 0, most_held: 0, level: MOST_ROOM.bytes }
    }

    /// Adds a writer, with the least that one can do with. `false`: there is not as much left.
    pub(super) fn enter(&mut self, writer: u64) -> bool {
        let least = LEAST_ROOM.bytes;
        let enters = self.held + least <= self.bytes && !self.writers.contains_key(&writer);
        if enters {
            self.writers.insert(writer, Writer { held: least, wants: least });
            self.changed();
        }
        enters
    }

    /// Removes a writer. It may never have been added.
    pub(super) fn leave(&mut self, writer: u64) {
        self.writers.remove(&writer);
        self.changed();
    }

    /// A writer wants so much, and has no more under way than it `obeys` until it is answered. Returns what it holds
    /// from now on; `None` if it is not known.
    pub(super) fn ask(&mut self, writer: u64, wants: u64, obeys: u64) -> Option<u64> {
        let (least, most) = (LEAST_ROOM.bytes, MOST_ROOM.bytes);
        let asking = self.writers.get_mut(&writer)?;
        asking.wants = wants.clamp(least, most);
        asking.held = asking.held.min(obeys.max(least));
        self.changed();
        let free = self.shared().saturating_sub(self.held);
        let level = self.level;
        let asking = self.writers.get_mut(&writer)?;
        let more = asking.wants.min(level).saturating_sub(asking.held).min(free);
        asking.held += more;
        let held = asking.held;
        self.changed();
        Some(held)
    }

    /// What a writer is told with each answer: less than it holds if another one is short.
    pub(super) fn told(&self, writer: u64) -> u64 {
        self.writers.get(&writer).map_or(LEAST_ROOM.bytes, |writer| writer.held.min(self.level))
    }

    /// What all writers together hold, and the most that they ever held.
    pub(super) fn held(&self) -> (u64, u64) {
        (self.held, self.most_held)
    }

    /// How much of it the writers hold.
    pub(super) fn used(&self) -> Used {
        Used { bytes: self.held, most: self.bytes }
    }

    /// What grants beyond the least are taken from. The rest is for writers that come.
    fn shared(&self) -> u64 {
        self.bytes - self.bytes / RESERVE
    }

    fn changed(&mut self) {
        self.held = self.writers.values().map(|writer| writer.held).sum();
        self.most_held = self.most_held.max(self.held);
        self.level = self.fair_share();
    }

    fn fair_share(&self) -> u64 {
        let mut wants: Vec<u64> = self.writers.values().map(|writer| writer.wants).collect();
        wants.sort_unstable();
        let mut left = self.shared();
        for (number, want) in wants.iter().enumerate() {
            let share = left / (wants.len() - number) as u64;
            if *want > share {
                return share.max(LEAST_ROOM.bytes);
            }
            left -= want;
        }
        MOST_ROOM.bytes
    }
}

/// A quarter is kept for writers that come: sixteen at once, of 256 MiB.
const RESERVE: u64 = 4;

/// Why a catch-up ends early.
enum Failure {
    /// See [`Abandoned`]; or this server ends.
    Abandoned,
    /// The lender obeys another writer.
    Fenced(Generation),
    /// The lender cannot lend.
    Lender(String),
    /// The store here has no space.
    Full(String),
}

impl From<String> for Failure {
    fn from(text: String) -> Failure {
        Failure::Lender(text)
    }
}

impl From<Abandoned> for Failure {
    fn from(abandoned: Abandoned) -> Failure {
        match abandoned {
            Abandoned::Replaced => Failure::Abandoned,
            Abandoned::Full(text) => Failure::Full(text),
        }
    }
}

impl Borrower {
    /// Catches up, and tells the writer.
    pub(super) fn run(self) {
        let began = Instant::now();
        let result = self.catch_up();
        self.slot.lock().end_catch_up(self.number);
        match result {
            Ok(blocks) => {
                tracing::info!(lender = %self.lender, blocks, took = ?began.elapsed(), "a copy has caught up")
            }
            Err(Failure::Abandoned) => tracing::debug!(lender = %self.lender, "a catch-up was abandoned"),
            Err(Failure::Fenced(by)) => answer(&self.writer, &Reply::Fenced { by }, Bytes::new()),
            Err(Failure::Full(text)) => refuse(&self.writer, Cause::NoMemory, &text),
            Err(Failure::Lender(text)) => {
                tracing::info!(lender = %self.lender, text, "a catch-up failed");
                refuse(&self.writer, Cause::OutOfStep, &format!("catching up from {}: {text}", self.lender));
            }
        }
    }

    /// Returns how many blocks were taken.
    fn catch_up(&self) -> Result<u64, Failure> {
        let shape = self.slot.lock().shape();
        let mut lender = Lender::connect(self)?;
        match lender.ask(&Call::Open { shape, mode: Mode::Borrow, writer: self.holder.writer })? {
            (Reply::Standing { .. }, _) => {}
            (reply, _) => return Err(failure_of(reply)),
        }
        let (mut first, mut taken) = (0, 0);
        while first < shape.blocks() {
            let count = (shape.blocks() - first).min(MOST_ENTRIES as u64) as u32;
            let (theirs, applied, _) = lender.borrow(Run { first, count }, false)?;
            let needed = self.slot.lock().compare((self.number, &self.writer), first, &theirs, applied)?;
            taken += needed.len() as u64;
            for run in runs(&needed, BORROWED_AT_ONCE) {
                let (theirs, applied, data) = lender.borrow(run, true)?;
                self.slot.lock().take((self.number, &self.writer), run.first, &theirs, applied, &data)?;
            }
            first += u64::from(count);
            lender.report.compared = first;
        }
        self.complete(&mut lender)?;
        Ok(taken)
    }

    /// Waits until what the lender had applied is applied here.
    fn complete(&self, lender: &mut Lender<'_>) -> Result<(), Failure> {
        let mut state = self.slot.lock();
        loop {
            if let Some(applied) = state.try_complete(self.number, &self.writer)? {
                // With the lock held: no answer to a later write overtakes this one.
                answer(&self.writer, &Reply::Whole { applied }, Bytes::new());
                return Ok(());
            }
            lender.report.due()?;
            state = self.slot.wait(state, LOOK_AGAIN);
        }
    }
}

/// Neighbouring blocks as runs of at most `most` blocks. `blocks` ascend.
fn runs(blocks: &[u64], most: u32) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &block in blocks {
        match runs.last_mut() {
            Some(run) if run.blocks().end == block && run.count < most => run.count += 1,
            _ => runs.push(Run { first: block, count: 1 }),
        }
    }
    runs
}

/// The connection to the lender. One question at a time.
struct Lender<'a> {
    borrower: &'a Borrower,
    caller: Caller,
    report: Report<'a>,
}

/// What the writer is told from time to time.
struct Report<'a> {
    borrower: &'a Borrower,
    compared: u64,
    reported: Instant,
}

impl<'a> Lender<'a> {
    fn connect(borrower: &'a Borrower) -> Result<Lender<'a>, Failure> {
        let caller = Caller::connect(&borrower.lender, &borrower.security)?;
        Ok(Lender { borrower, caller, report: Report { borrower, compared: 0, reported: Instant::now() } })
    }

    /// Entries of these blocks, what the lender had applied, and the blocks. Asks again while the lender has not
    /// applied what is needed.
    fn borrow(&mut self, run: Run, with_blocks: bool) -> Result<(Vec<Entry>, Version, Buffer), Failure> {
        let Borrower { holder, since, .. } = *self.borrower;
        let deadline = Instant::now() + LENDER_LIMIT;
        loop {
            match self.ask(&Call::Lend { holder, since, run, with_blocks })? {
                (Reply::Lent { applied, entries }, data) if fits(run, with_blocks, &entries, &data) => {
                    return Ok((entries, applied, data));
                }
                (Reply::Lent { .. }, _) => {
                    return Err(Failure::Lender("what it lent is not what was asked for".into()));
                }
                (Reply::Refused { text, .. }, _) if Instant::now() >= deadline => return Err(Failure::Lender(text)),
                (Reply::Refused { cause: Cause::NotYet, .. }, _) => std::thread::sleep(NOT_YET_PAUSE),
                (reply, _) => return Err(failure_of(reply)),
            }
        }
    }

    /// The answer to a question.
    fn ask(&mut self, call: &Call) -> Result<(Reply, Buffer), Failure> {
        self.caller.ask(call, LENDER_LIMIT, || self.report.due())
    }
}

impl Report<'_> {
    /// Says to the writer from time to time that the catch-up goes on, and checks whether it should.
    fn due(&mut self) -> Result<(), Failure> {
        if self.borrower.is_stopping.load(Ordering::Acquire) {
            return Err(Failure::Abandoned);
        }
        if self.reported.elapsed() >= REPORT_EVERY {
            self.reported = Instant::now();
            answer(&self.borrower.writer, &Reply::Progress { compared: self.compared }, Bytes::new());
        }
        Ok(())
    }
}

/// Whether a loan is what was asked for, and its blocks are those of its entries.
fn fits(run: Run, with_blocks: bool, entries: &[Entry], data: &[u8]) -> bool {
    let is_right = |(entry, crc): (&Entry, u32)| !entry.is_written() || entry.crc == crc;
    entries.len() == run.count as usize
        && (!with_blocks || data.len() == entries.len() * BLOCK_BYTES)
        && (!with_blocks || entries.iter().zip(sums(data)).all(is_right))
}

fn failure_of(reply: Reply) -> Failure {
    match reply {
        Reply::Fenced { by } => Failure::Fenced(by),
        other => Failure::Lender(unexpected(other)),
    }
}

/// Blocks in one loan, 1 MiB: the volume's locks at both ends are held for some tenths of a millisecond.
const BORROWED_AT_ONCE: u32 = 256;

/// Time limit for an answer of the lender, and for it to apply what the borrower is not sent. Below the time for which
/// a writer waits for a server.
const LENDER_LIMIT: Duration = Duration::from_secs(4);

/// Pause before a lender that is behind is asked again: some round trips.
const NOT_YET_PAUSE: Duration = Duration::from_millis(2);

/// Several times within the time for which a writer waits for a server.
const REPORT_EVERY: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_lone_writer_gets_what_it_wants_and_gives_back_what_another_one_lacks() {
        let mut staging = Staging::new(64 * MIB); // 48 shared
        assert!(staging.enter(1));
        assert_eq!((staging.told(1), staging.ask(1, 20 * MIB, 4 * MIB)), (4 * MIB, Some(20 * MIB)));
        assert_eq!(staging.ask(1, 1 << 40, 20 * MIB), Some(MOST_ROOM.bytes), "as much as a writer can have");
        assert!(staging.enter(2));
        assert_eq!(staging.told(1), MOST_ROOM.bytes, "the second one does not want more than the least");
        assert_eq!(staging.ask(2, 1 << 40, 4 * MIB), Some(16 * MIB), "what is left over");
        assert_eq!((staging.told(1), staging.told(2)), (24 * MIB, 16 * MIB));
        assert_eq!(staging.ask(1, 1 << 40, 24 * MIB), Some(24 * MIB));
        assert_eq!(staging.ask(2, 1 << 40, 16 * MIB), Some(24 * MIB), "both are equal");
        staging.leave(1);
        assert_eq!(staging.ask(2, 1 << 40, 24 * MIB), Some(MOST_ROOM.bytes));
        assert_eq!(staging.held(), (MOST_ROOM.bytes, 48 * MIB));
    }

    #[test]
    fn as_many_writers_enter_as_have_the_least() {
        let mut staging = Staging::new(17 * MIB);
        let entered = (0..10).filter(|writer| staging.enter(*writer)).count();
        assert_eq!(entered, 4);
        assert!(!staging.enter(0), "twice");
        assert_eq!(staging.ask(0, 1 << 40, 0), Some(4 * MIB), "there is no more");
        staging.leave(3);
        assert!(staging.enter(77) && !staging.enter(78));
        assert_eq!(staging.ask(99, 1, 1), None);
    }

    proptest! {
        /// Writers that do as they say never have more under way together than the server has.
        #[test]
        fn what_is_held_stays_within_the_budget(
            bytes in 4 * MIB..300 * MIB,
            steps in prop::collection::vec((0..12_u64, 0..5_u8, 0..80 * MIB), 1..200),
        ) {
            let mut staging = Staging::new(bytes);
            let mut obeyed: BTreeMap<u64, u64> = BTreeMap::new();
            for (writer, step, wants) in steps {
                match step {
                    0 if staging.enter(writer) => _ = obeyed.insert(writer, LEAST_ROOM.bytes),
                    1 => {
                        staging.leave(writer);
                        obeyed.remove(&writer);
                    }
                    _ => {
                        let Some(room) = obeyed.get_mut(&writer) else { continue };
                        *room = (*room).min(staging.told(writer));
                        *room = staging.ask(writer, wants, *room).unwrap();
                    }
                }
                prop_assert!(obeyed.values().sum::<u64>() <= bytes && staging.held().1 <= bytes);
                for (writer, room) in &obeyed {
                    prop_assert!(*room >= LEAST_ROOM.bytes && *room <= MOST_ROOM.bytes);
                    prop_assert!(staging.told(*writer) <= *room);
                }
            }
        }
    }

    #[test]
    fn neighbouring_blocks_are_one_run_up_to_the_bound() {
        let run = |first, count| Run { first, count };
        assert_eq!(runs(&[], 3), []);
        assert_eq!(runs(&[1, 2, 3, 4, 6, 9, 10], 3), [run(1, 3), run(4, 1), run(6, 1), run(9, 2)]);
    }
}
