//! Slot: one volume at this server. The copy's rules, its blocks and its connections are behind one lock, so that calls
//! take place one after the other, each as a whole.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use remora_fabric::RegionId;
use remora_messenger::Connection;

use super::budget::{Budget, Grant};
use super::exports::Exports;
use crate::copy::{Copy, Refusal};
use crate::layout::{Entry, Layout};
use crate::message::{Holder, Standing};
use crate::shape::{BLOCK_BYTES, Shape};
use crate::store::{Damaged, Store, sums};
use crate::version::Version;
use crate::wire::{Call, Cause, Mode, Reply, Room, Run};

/// See the module's text.
pub(super) struct Slot {
    state: Mutex<State>,
    /// A write was applied, or the catch-up has another writer.
    changed: Condvar,
}

/// What the lock guards.
pub(super) struct State {
    shape: Shape,
    copy: Copy,
    /// `None`: this server has no copy, or has forgotten it.
    store: Option<Store>,
    /// The memory of the store.
    grant: Option<Grant>,
    /// The name by which the store can be read; `None` if it cannot.
    region: Option<RegionId>,
    sessions: Vec<Session>,
    /// Catch-ups that were begun. Only the last one counts.
    catch_ups: u64,
}

struct Session {
    connection: Connection,
    mode: Mode,
    writer: u64,
    /// Whether it may read the region.
    reads: bool,
}

/// What a call can use of the host.
#[derive(Clone, Copy)]
pub(super) struct Means<'a> {
    /// What the writer may have under way.
    pub(super) room: Room,
    pub(super) budget: &'a Arc<Budget>,
    pub(super) exports: &'a Exports,
}

/// What follows from a call.
pub(super) enum Done {
    /// It is answered.
    Answer(Reply, Bytes),
    /// It is refused, and its connection ended.
    Refused(Cause, String),
    /// A borrower must be started. It answers.
    Borrow { number: u64, holder: Holder, since: Version, lender: String },
}

/// Why a borrower must end.
pub(super) enum Abandoned {
    /// Its writer has gone or has begun another catch-up, or the server obeys another writer.
    Replaced,
}

impl From<Refusal> for Done {
    fn from(refusal: Refusal) -> Done {
        match refusal {
            Refusal::Fenced { by } => Done::Answer(Reply::Fenced { by }, Bytes::new()),
            Refusal::OutOfStep => Done::Refused(Cause::OutOfStep, refusal.to_string()),
        }
    }
}

impl Slot {
    /// A volume of which this server has no copy.
    pub(super) fn unknown(shape: Shape) -> Slot {
        let (copy, sessions) = (Copy::default(), Vec::new());
        let state = State { shape, copy, store: None, grant: None, region: None, sessions, catch_ups: 0 };
        Slot { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a write, for up to `limit`.
    pub(super) fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, limit).map_or_else(|error| error.into_inner().0, |(state, _)| state)
    }

    /// Wakes the borrower that waits.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }
}

impl State {
    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    pub(super) fn standing(&self) -> Standing {
        self.copy.standing()
    }

    /// Whether the volume can be forgotten.
    pub(super) fn is_unused(&self) -> bool {
        self.store.is_none() && self.sessions.is_empty()
    }

    // ---- connections ----

    /// Adds a connection. Returns those that it replaces: earlier ones of the same writer, whose calls must not take
    /// place after those of the new one.
    pub(super) fn open(
        &mut self,
        connection: &Connection,
        mode: Mode,
        writer: u64,
        exports: &Exports,
    ) -> Vec<Connection> {
        let is_replaced =
            |session: &mut Session| mode == Mode::Write && session.mode == Mode::Write && session.writer == writer;
        let replaced: Vec<_> = self.sessions.extract_if(.., is_replaced).map(|session| session.connection).collect();
        replaced.iter().for_each(|earlier| exports.withdraw(earlier));
        self.sessions.push(Session { connection: connection.clone(), mode, writer, reads: false });
        replaced
    }

    /// Whether a connection is open and was not replaced.
    pub(super) fn has(&self, connection: &Connection) -> bool {
        self.mode(connection).is_some()
    }

    fn mode(&self, connection: &Connection) -> Option<Mode> {
        self.sessions.iter().find(|session| session.connection == *connection).map(|session| session.mode)
    }

    /// Removes a connection.
    pub(super) fn end(&mut self, connection: &Connection, exports: &Exports) {
        exports.withdraw(connection);
        self.sessions.retain(|session| session.connection != *connection);
    }

    /// Lets a writer that the server obeys read the region of the copy.
    fn attach(&mut self, connection: &Connection, holder: Holder, exports: &Exports) -> Result<Done, Refusal> {
        self.copy.confirm(holder)?;
        let session = self.sessions.iter_mut().find(|session| session.connection == *connection);
        let keys = match (session, self.region) {
            (Some(session), Some(region)) if session.writer == holder.writer => {
                session.reads = true;
                exports.grant(connection, region)
            }
            _ => Vec::new(),
        };
        Ok(answer(Reply::Attached { session: connection.id(), keys }))
    }

    /// The number of the connection of a writer that the server obeys.
    pub(super) fn connection_of(&self, holder: Holder) -> Option<u64> {
        self.copy.confirm(holder).ok()?;
        let is_its = |session: &&Session| session.mode == Mode::Write && session.writer == holder.writer;
        self.sessions.iter().find(is_its).map(|session| session.connection.id())
    }

    /// Lets another server read the staging of a writer that both obey.
    pub(super) fn follow(&mut self, connection: &Connection, staging: Option<RegionId>, exports: &Exports) -> Done {
        let session = self.sessions.iter_mut().find(|session| session.connection == *connection);
        let (Some(session), Some(staging)) = (session, staging) else {
            return Done::Refused(Cause::OutOfStep, "the server pulls no writes of this writer".into());
        };
        session.reads = true;
        answer(Reply::Attached { session: connection.id(), keys: exports.grant(connection, staging) })
    }

    /// Takes the region from writers that the server does not obey any more.
    fn detach(&mut self, exports: &Exports) {
        let obeyed = self.copy.standing().promised.map(|holder| holder.writer);
        for session in self.sessions.iter_mut().filter(|session| session.reads && Some(session.writer) != obeyed) {
            session.reads = false;
            exports.withdraw(&session.connection);
        }
    }

    // ---- the copy ----

    /// Makes the copy of a new volume.
    pub(super) fn create(&mut self, budget: &Arc<Budget>, exports: &Exports) -> Done {
        if self.store.is_some() {
            return Done::Refused(Cause::Shape, "the server has a copy of this volume already".into());
        }
        if let Err(text) = self.allocate(budget, exports) {
            return Done::Refused(Cause::NoMemory, text);
        }
        self.copy = Copy::created();
        self.say();
        answer(Reply::Created)
    }

    /// Makes memory for a copy that this server does not have.
    fn allocate(&mut self, budget: &Arc<Budget>, exports: &Exports) -> Result<(), String> {
        let grant = budget.take(Layout::of(self.shape).length()).ok_or(NO_MEMORY)?;
        let store = Store::create(self.shape).map_err(|error| error.to_string())?;
        self.region = exports.export(store.memory());
        (self.store, self.grant) = (Some(store), Some(grant));
        Ok(())
    }

    /// Writes how the copy stands into its region.
    fn say(&self) {
        if let Some(store) = &self.store {
            store.set_line(self.copy.standing());
        }
    }

    /// Does what a client asks.
    pub(super) fn execute(&mut self, connection: &Connection, call: Call, data: &[u8], means: Means<'_>) -> Done {
        let Means { room, exports, .. } = means;
        let mode = self.mode(connection);
        let done = match call {
            Call::Lend { holder, since, run, with_blocks } => self.lend(holder, since, run, with_blocks),
            _ if mode != Some(Mode::Write) => {
                return Done::Refused(Cause::Misuse, "this connection is for loans".into());
            }
            Call::Promise(holder) => self.promise(holder),
            Call::Mark { holder, may_lack_tail } => self
                .copy
                .mark(holder, may_lack_tail)
                .map(|applied| answer(Reply::Written { applied, durable: applied, room })),
            Call::Flush(holder) => self.copy.confirm(holder).map(|()| {
                let applied = self.copy.standing().applied;
                answer(Reply::Written { applied, durable: applied, room })
            }),
            Call::Confirm { holder, question } => {
                self.copy.confirm(holder).map(|()| answer(Reply::Confirmed { question }))
            }
            Call::CatchUp { holder, since, lender } => self.begin_catch_up(holder, since, lender, means),
            Call::Write { holder, version, runs, sums } => self.write(holder, version, &runs, &sums, data, room),
            Call::Read { holder, number, run } => self.read(holder, number, run),
            Call::Attach(holder) => self.attach(connection, holder, exports),
            Call::Open { .. }
            | Call::Create { .. }
            | Call::Window { .. }
            | Call::Offer { .. }
            | Call::Pull { .. }
            | Call::Follow(_) => Ok(Done::Refused(Cause::Misuse, "not on this connection".into())),
        };
        self.say();
        self.detach(exports);
        done.unwrap_or_else(Done::from)
    }

    /// A server without a copy promises nothing: it could not remember it.
    fn promise(&mut self, holder: Holder) -> Result<Done, Refusal> {
        if self.store.is_none() {
            return Err(Refusal::OutOfStep);
        }
        self.copy.promise(holder).map(|standing| answer(Reply::Promised(standing)))
    }

    fn begin_catch_up(
        &mut self,
        holder: Holder,
        since: Version,
        lender: String,
        means: Means<'_>,
    ) -> Result<Done, Refusal> {
        if self.store.is_none()
            && let Err(text) = self.allocate(means.budget, means.exports)
        {
            return Ok(Done::Refused(Cause::NoMemory, text));
        }
        self.copy.begin_catch_up(holder, since)?;
        self.catch_ups += 1;
        Ok(Done::Borrow { number: self.catch_ups, holder, since, lender })
    }

    /// Applies a write, all of it or nothing.
    fn write(
        &mut self,
        holder: Holder,
        version: Version,
        runs: &[Run],
        wanted: &[u32],
        data: &[u8],
        room: Room,
    ) -> Result<Done, Refusal> {
        let Some(store) = &self.store else { return Err(Refusal::OutOfStep) };
        if !runs.iter().all(|run| store.layout().has(run.first, run.count.into())) {
            return Ok(beyond_the_end());
        }
        let mut found = runs.iter().flat_map(|run| run.blocks()).zip(sums(data).zip(wanted));
        if let Some((block, _)) = found.find(|(_, (found, wanted))| found != *wanted) {
            let text = format!("block {block} of write {version} was damaged on its way");
            return Ok(Done::Refused(Cause::Damaged, text));
        }
        self.copy.write(holder, version)?;
        let blocks = runs.iter().flat_map(|run| run.blocks());
        for ((block, &crc), bytes) in blocks.zip(wanted).zip(data.chunks_exact(BLOCK_BYTES)) {
            store.put(block, Entry { version, crc }, bytes);
        }
        Ok(answer(Reply::Written { applied: version, durable: version, room }))
    }

    fn read(&mut self, holder: Holder, number: u64, run: Run) -> Result<Done, Refusal> {
        self.copy.read(holder)?;
        Ok(self
            .blocks(run, true)
            .map_or_else(|done| done, |(entries, blocks)| Done::Answer(Reply::Data { number, entries }, blocks)))
    }

    fn lend(&mut self, holder: Holder, since: Version, run: Run, with_blocks: bool) -> Result<Done, Refusal> {
        let applied = match self.copy.lend(holder, since) {
            Ok(applied) => applied,
            Err(Refusal::OutOfStep) => {
                let text = "the lender has not applied what the borrower needs".into();
                return Ok(answer(Reply::Refused { cause: Cause::NotYet, text }));
            }
            Err(refusal) => return Err(refusal),
        };
        Ok(self
            .blocks(run, with_blocks)
            .map_or_else(|done| done, |(entries, blocks)| Done::Answer(Reply::Lent { applied, entries }, blocks)))
    }

    /// The entries of a run, and its blocks.
    fn blocks(&mut self, run: Run, with_blocks: bool) -> Result<(Vec<Entry>, Bytes), Done> {
        let Some(store) = &self.store else { return Err(Done::from(Refusal::OutOfStep)) };
        if !store.layout().has(run.first, run.count.into()) {
            return Err(beyond_the_end());
        }
        let taken = if with_blocks {
            let mut bytes = vec![0; run.count as usize * BLOCK_BYTES];
            let blocks = run.blocks().zip(bytes.chunks_exact_mut(BLOCK_BYTES));
            let entries: Result<Vec<Entry>, Damaged> = blocks.map(|(block, into)| store.get(block, into)).collect();
            entries.map(|entries| (entries, Bytes::from(bytes)))
        } else {
            let entries = run.blocks().map(|block| store.entry(block).ok_or(Damaged { block }));
            entries.collect::<Result<_, _>>().map(|entries| (entries, Bytes::new()))
        };
        taken.map_err(|damaged| {
            tracing::error!(volume = %self.shape.volume(), %damaged, "the copy must be taken back");
            self.copy.damaged();
            Done::Refused(Cause::Damaged, damaged.to_string())
        })
    }

    // ---- a catch-up ----

    /// Whether this catch-up is the present one, and its writer is there.
    fn expect(&self, number: u64, writer: &Connection) -> Result<&Store, Abandoned> {
        let is_present = self.catch_ups == number && self.has(writer);
        self.store.as_ref().filter(|_| is_present).ok_or(Abandoned::Replaced)
    }

    /// Compares entries of the lender, which had applied `applied`, with those here. Returns the blocks that are
    /// needed. Blocks that were never written there become so here.
    pub(super) fn compare(
        &mut self,
        (number, writer): (u64, &Connection),
        first: u64,
        theirs: &[Entry],
        applied: Version,
    ) -> Result<Vec<u64>, Abandoned> {
        self.expect(number, writer)?;
        let mut needed = Vec::new();
        for (block, &their) in (first..).zip(theirs) {
            let ours = self.store.as_ref().and_then(|store| store.entry(block));
            let is_taken = self.takes(ours, their, applied)?;
            if !is_taken || ours == Some(their) {
                continue;
            }
            match &self.store {
                Some(store) if !their.is_written() => store.put(block, their, &[0; BLOCK_BYTES]),
                _ => needed.push(block),
            }
        }
        Ok(needed)
    }

    /// Takes blocks of the lender, whose checksums are right.
    pub(super) fn take(
        &mut self,
        (number, writer): (u64, &Connection),
        first: u64,
        theirs: &[Entry],
        applied: Version,
        data: &[u8],
    ) -> Result<(), Abandoned> {
        self.expect(number, writer)?;
        for ((block, &their), bytes) in (first..).zip(theirs).zip(data.chunks_exact(BLOCK_BYTES)) {
            let ours = self.store.as_ref().and_then(|store| store.entry(block));
            if self.takes(ours, their, applied)?
                && let Some(store) = &self.store
            {
                store.put(block, their, bytes);
            }
        }
        Ok(())
    }

    fn takes(&mut self, ours: Option<Entry>, theirs: Entry, applied: Version) -> Result<bool, Abandoned> {
        let ours = ours.map_or(Version::NONE, |entry| entry.version); // a damaged block is taken
        self.copy.takes(ours, theirs.version, applied).map_err(|_| Abandoned::Replaced)
    }

    /// All blocks were compared. Returns the version up to which the copy is whole, if it is.
    pub(super) fn try_complete(&mut self, number: u64, writer: &Connection) -> Result<Option<Version>, Abandoned> {
        self.expect(number, writer)?;
        if !self.copy.try_complete() {
            return Ok(None);
        }
        self.say();
        Ok(Some(self.copy.standing().applied))
    }
}

fn answer(reply: Reply) -> Done {
    Done::Answer(reply, Bytes::new())
}

fn beyond_the_end() -> Done {
    Done::Refused(Cause::Misuse, "the volume ends before these blocks".into())
}

const NO_MEMORY: &str = "the server has no memory left for this copy: give it more, or choose another server";
