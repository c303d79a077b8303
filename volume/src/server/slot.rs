//! Slot: one volume at this server. The copy's rules, its blocks and its connections are behind one lock, so that calls
//! take place one after the other, each as a whole.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_fabric::RegionId;
use remora_messenger::{Connection, Pool};

use super::kept::{Kept, Scrubbing, Stores, Waiter};
use super::{Budget, Exports, Grant, refuse};
use crate::disk::journal::{Superblock, Sync};
use crate::disk::recovery::{self, Batch, Checkpoint, Findings, Growth};
use crate::disk::{Failure, Folder};
use crate::layout::{Damaged, Entry, Layout, Need, Store, sums};
use crate::rules::{Copy, Holder, Refusal, Standing, Version};
use crate::server;
use crate::shape::{BLOCK_BYTES, Opened, Shape, Size};
use crate::wire::{Call, Cause, MOST_BLOCKS, Mode, Reply, Room, Run, Status, newest};

/// See the module's text.
pub(super) struct Slot {
    state: Mutex<State>,
    /// A write was applied, or the catch-up has another writer.
    changed: Condvar,
}

/// What the lock guards.
pub(super) struct State {
    shape: Shape,
    /// The blocks that the copy had before a growth that is not agreed ([`crate::shape`]).
    former: Option<u64>,
    copy: Copy,
    /// `None`: this server has no copy, or has forgotten it.
    store: Option<Store>,
    /// What it keeps of the copy in files; `None`: nothing.
    kept: Option<Kept>,
    /// The memory of the store.
    grant: Option<Grant>,
    /// The name by which the store can be read; `None` if it cannot.
    region: Option<RegionId>,
    sessions: Vec<Session>,
    /// Catch-ups that were begun. Only the last one counts.
    catch_ups: u64,
    /// Blocks that the catch-up under way has compared.
    compared: Option<u64>,
    scrubbing: Scrubbing,
    /// Memory for the blocks of answers.
    answered: Arc<Pool>,
    /// A thread copies its blocks into a larger copy. Meanwhile it has no connections.
    is_growing: bool,
}

struct Session {
    connection: Connection,
    mode: Mode,
    writer: u64,
    /// When its last call arrived.
    heard: Instant,
    /// Whether it may read a region as long as the server obeys its writer.
    reads: bool,
}

/// What a call can use of the host.
#[derive(Clone, Copy)]
pub(super) struct Means<'a> {
    /// What the writer may have under way.
    pub(super) room: Room,
    pub(super) budget: &'a Arc<Budget>,
    pub(super) exports: &'a Exports,
    /// `None`: copies are in memory only.
    pub(super) stores: Option<&'a Arc<Stores>>,
}

/// What follows from a call.
pub(super) enum Done {
    /// It is answered.
    Answer(Reply, Bytes),
    /// It is refused, and its connection ended.
    Refused(Cause, String),
    /// It is answered when what it says is durable, or was answered.
    Later,
    /// A borrower must be started. It answers.
    Borrow { number: u64, holder: Holder, since: Version, lender: String },
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
        let (catch_ups, compared, scrubbing) = (0, None, Scrubbing::new());
        let (store, kept, grant, region, is_growing) = (None, None, None, None, false);
        let answered = Pool::new(IDLE_BYTES);
        let state = State {
            shape,
            former: None,
            copy,
            store,
            kept,
            grant,
            region,
            sessions,
            catch_ups,
            compared,
            scrubbing,
            answered,
            is_growing,
        };
        Slot { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// A volume whose copy was found in its store.
    pub(super) fn recovered(store: Store, grant: Grant, kept: Kept, copy: Copy, exports: &Exports) -> Slot {
        let slot = Slot::unknown(store.shape());
        let mut state = slot.lock();
        state.region = exports.export(store.memory());
        state.former = Size::kept(state.shape.blocks(), kept.former()).former();
        (state.copy, state.store, state.grant, state.kept) = (copy, Some(store), Some(grant), Some(kept));
        state.say();
        drop(state);
        slot
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

    /// The same, and what is under way.
    pub(super) fn status(&self) -> Status {
        Status {
            standing: self.standing(),
            durable: self.durable(),
            has_store: self.kept.is_some(),
            writer_silent: self.writer_silent(NO_WRITER).map(millis),
            compared: self.compared,
            scrubbed: self.scrubbing.under_way(),
            ..Status::default()
        }
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
        let heard = Instant::now();
        self.sessions.push(Session { connection: connection.clone(), mode, writer, heard, reads: false });
        replaced
    }

    /// How long the writer that the server obeys has been silent. `None`: it is not connected, or it is `asking`.
    pub(super) fn writer_silent(&self, asking: u64) -> Option<Duration> {
        let obeyed = self.copy.standing().promised?.writer;
        let of_it = |session: &&Session| session.mode == Mode::Write && session.writer == obeyed && obeyed != asking;
        self.sessions.iter().filter(of_it).map(|session| session.heard.elapsed()).min()
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
        self.scrubbing.leave(connection);
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

    /// Whether a connection is for this and nothing else.
    pub(super) fn is_for(&self, connection: &Connection, mode: Mode) -> bool {
        self.mode(connection) == Some(mode)
    }

    /// Connections of clients that only read.
    pub(super) fn readers(&self) -> usize {
        self.sessions.iter().filter(|session| session.mode == Mode::Read).count()
    }

    /// Lets a client that only reads read the region of the copy, whichever writer the server obeys.
    fn look(&mut self, connection: &Connection, exports: &Exports) -> Done {
        let keys = self.region.map(|region| exports.grant(connection, region)).unwrap_or_default();
        answer(Reply::Attached { session: connection.id(), keys })
    }

    /// Lets another server read the staging of a writer that both obey.
    pub(super) fn follow(&mut self, connection: &Connection, staging: Option<RegionId>, exports: &Exports) -> Done {
        if !self.is_for(connection, Mode::Borrow) {
            return Done::Refused(Cause::Misuse, "this connection is not for loans".into());
        }
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
    pub(super) fn create(&mut self, budget: &Arc<Budget>, exports: &Exports, stores: Option<&Arc<Stores>>) -> Done {
        if self.store.is_some() {
            return Done::Refused(Cause::Shape, "the server has a copy of this volume already".into());
        }
        let copy = Copy::created();
        if let Err(text) = self.allocate(copy.standing(), budget, exports, stores) {
            return Done::Refused(Cause::NoMemory, text);
        }
        self.copy = copy;
        self.say();
        answer(Reply::Created)
    }

    /// Makes memory for a copy that this server does not have, and a store that says that it stands like this.
    fn allocate(
        &mut self,
        standing: Standing,
        budget: &Arc<Budget>,
        exports: &Exports,
        stores: Option<&Arc<Stores>>,
    ) -> Result<(), String> {
        let grant = budget.take(Layout::of(self.shape).length()).ok_or(NO_MEMORY)?;
        let store = Store::create(self.shape).map_err(|error| error.to_string())?;
        self.kept = stores.map(|stores| stores.make(self.shape, standing)).transpose()?;
        self.region = exports.export(store.memory());
        (self.store, self.grant) = (Some(store), Some(grant));
        (self.scrubbing, self.former) = (Scrubbing::new(), None);
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
        let session = self.sessions.iter_mut().find(|session| session.connection == *connection);
        let mode = session.map(|session| {
            session.heard = Instant::now();
            session.mode
        });
        let done = match call {
            Call::Look if mode == Some(Mode::Read) => Ok(self.look(connection, exports)),
            _ if mode == Some(Mode::Read) => return Done::Refused(Cause::Misuse, server::ONLY_READS.into()),
            Call::Lend { holder, since, run, with_blocks } => self.lend(holder, since, run, with_blocks),
            _ if mode != Some(Mode::Write) => {
                return Done::Refused(Cause::Misuse, server::ONLY_LOANS.into());
            }
            Call::Promise(holder) => self.promise(connection, holder, room),
            Call::Mark { holder, may_lack_tail } => self.mark(connection, holder, may_lack_tail, room),
            Call::Flush(holder) => {
                self.copy.confirm(holder).map(|()| self.once_durable(connection, holder, false, room))
            }
            Call::Confirm { holder, question } => {
                self.copy.confirm(holder).map(|()| answer(Reply::Confirmed { question }))
            }
            Call::CatchUp { holder, since, lender } => self.begin_catch_up(holder, since, lender, means),
            Call::Write { holder, version, runs, sums } => self.write(holder, version, &runs, &sums, data, room),
            Call::Zero { holder, version, run } => self.zero(holder, version, run, room),
            Call::Read { holder, number, run } => self.read(holder, number, run),
            Call::Map { holder, number, run } => self.map(holder, number, run),
            Call::Attach(holder) => self.attach(connection, holder, exports),
            Call::Open { .. }
            | Call::Create { .. }
            | Call::Window { .. }
            | Call::Offer { .. }
            | Call::Pull { .. }
            | Call::Follow(_)
            | Call::Status { .. }
            | Call::Scrub { .. }
            | Call::Remove { .. }
            | Call::Grow { .. }
            | Call::MayGrow { .. }
            | Call::Agree { .. }
            | Call::Look => Ok(Done::Refused(Cause::Misuse, "not on this connection".into())),
        };
        self.say();
        self.detach(exports);
        done.unwrap_or_else(Done::from)
    }

    /// A server without a copy promises nothing: it could not remember it.
    fn promise(&mut self, connection: &Connection, holder: Holder, room: Room) -> Result<Done, Refusal> {
        if self.store.is_none() {
            return Err(Refusal::OutOfStep);
        }
        let mut next = self.copy;
        next.promise(holder)?;
        if let Err(done) = self.agree() {
            return Ok(done);
        }
        Ok(match self.commit(next, &[], &[]) {
            Ok(()) => self.once_durable(connection, holder, true, room),
            Err(done) => done,
        })
    }

    fn mark(&mut self, connection: &Connection, holder: Holder, may_lack: bool, room: Room) -> Result<Done, Refusal> {
        let mut next = self.copy;
        next.mark(holder, may_lack)?;
        Ok(match self.commit(next, &[], &[]) {
            Ok(()) => self.once_durable(connection, holder, false, room),
            Err(done) => done,
        })
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
        let mut next = self.copy;
        next.write(holder, version)?;
        let blocks = runs.iter().flat_map(|run| run.blocks());
        let changes: Vec<_> = blocks.zip(wanted).map(|(block, &crc)| (block, Entry::of(version, crc))).collect();
        if let Err(done) = self.commit(next, &changes, &[data]) {
            return Ok(done);
        }
        if let Some(store) = &self.store {
            for (&(block, entry), bytes) in changes.iter().zip(data.chunks_exact(BLOCK_BYTES)) {
                store.put(block, entry, bytes);
            }
        }
        Ok(answer(Reply::Written { applied: version, durable: self.durable(), room }))
    }

    /// Applies a write of zeros. The blocks' bytes stay: from now on their entries say that they are zeros.
    fn zero(&mut self, holder: Holder, version: Version, run: Run, room: Room) -> Result<Done, Refusal> {
        let Some(store) = &self.store else { return Err(Refusal::OutOfStep) };
        if !store.layout().has(run.first, run.count.into()) {
            return Ok(beyond_the_end());
        }
        let mut next = self.copy;
        next.write(holder, version)?;
        let changes: Vec<_> = run.blocks().map(|block| (block, Entry::zeros(version))).collect();
        if let Err(done) = self.commit(next, &changes, &[]) {
            return Ok(done);
        }
        if let Some(store) = &self.store {
            changes.iter().for_each(|&(block, entry)| store.put(block, entry, &[]));
        }
        Ok(answer(Reply::Written { applied: version, durable: self.durable(), room }))
    }

    /// Says which blocks are zeros.
    fn map(&mut self, holder: Holder, number: u64, run: Run) -> Result<Done, Refusal> {
        self.copy.read(holder)?;
        Ok(self.blocks(run, false).map_or_else(
            |done| done,
            |(entries, _)| {
                let newest = newest(entries.iter().map(|entry| entry.version));
                let byte = |entries: &[Entry]| {
                    (0..).zip(entries).fold(0, |bits, (bit, entry)| bits | u8::from(!entry.has_bytes()) << bit)
                };
                answer(Reply::Mapped { number, newest, zeros: entries.chunks(8).map(byte).collect() })
            },
        ))
    }

    /// A block is damaged: the copy is behind.
    pub(super) fn damaged(&mut self) {
        let mut next = self.copy;
        next.damaged();
        match self.commit(next, &[], &[]) {
            // If the store has no space for that, it has the block.
            Err(Done::Refused(..)) | Ok(()) => self.copy = next,
            Err(_) => {}
        }
    }

    // ---- the store ----

    /// The copy becomes this, with these blocks: first in the store. The blocks in memory are the caller's. `Err`: it
    /// does not become it.
    fn commit(&mut self, next: Copy, changes: &[(u64, Entry)], blocks: &[&[u8]]) -> Result<(), Done> {
        let is_event = !changes.is_empty() || next.standing() != self.copy.standing();
        if let Some(kept) = self.kept.as_mut().filter(|_| is_event) {
            match kept.append(next.standing(), changes, blocks) {
                Ok(()) => {}
                Err(failure @ Failure::Full { .. }) => {
                    tracing::error!(volume = %self.shape.volume(), %failure, "the copy was not changed");
                    return Err(Done::Refused(Cause::NoMemory, failure.to_string()));
                }
                Err(failure) => {
                    self.lose(&failure);
                    return Err(Done::Later);
                }
            }
        }
        self.copy = next;
        Ok(())
    }

    /// Up to which version the copy is whole whatever happens; without a store: what is applied.
    fn durable(&self) -> Version {
        self.kept.as_ref().map_or(self.copy.standing().applied, Kept::durable)
    }

    /// Answers once everything so far is durable.
    fn once_durable(&mut self, connection: &Connection, holder: Holder, is_promise: bool, room: Room) -> Done {
        let waiter = Waiter { connection: connection.clone(), holder, is_promise, room };
        let ready = match &mut self.kept {
            Some(kept) => kept.wait(waiter),
            None => Some(waiter),
        };
        ready.map_or(Done::Later, |waiter| self.reached(&waiter))
    }

    /// What is said now that it is durable. Another writer may have come since it was asked.
    fn reached(&self, waiter: &Waiter) -> Done {
        let standing = self.copy.standing();
        match self.copy.confirm(waiter.holder) {
            Ok(()) if waiter.is_promise => answer(Reply::Promised(standing)),
            Ok(()) => answer(Reply::Written { applied: standing.applied, durable: self.durable(), room: waiter.room }),
            Err(refusal) => Done::from(refusal),
        }
    }

    /// The store of the copy.
    pub(super) fn kept(&mut self) -> Option<&mut Kept> {
        self.kept.as_mut()
    }

    /// The store was synced: those that waited for it are answered.
    pub(super) fn synced(&mut self, sync: &Sync<Folder>) {
        let waiters = self.kept.as_mut().map(|kept| kept.synced(sync)).unwrap_or_default();
        for waiter in waiters.into_iter().filter(|waiter| self.has(&waiter.connection)) {
            match self.reached(&waiter) {
                Done::Answer(reply, data) => server::answer(&waiter.connection, &reply, data),
                Done::Refused(cause, text) => server::refuse(&waiter.connection, cause, &text),
                Done::Later | Done::Borrow { .. } => {}
            }
        }
    }

    /// The next blocks for the extents.
    pub(super) fn next_batch(&self, checkpoint: &mut Checkpoint<Folder>) -> Batch {
        let (Some(kept), Some(store)) = (&self.kept, &self.store) else { return Batch::new() };
        kept.next_batch(checkpoint, store)
    }

    /// The blocks in memory.
    #[cfg(test)]
    pub(super) fn memory(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// The store with the blocks in memory.
    pub(super) fn kept_and_memory(&mut self) -> Option<(&mut Kept, &Store)> {
        self.kept.as_mut().zip(self.store.as_ref())
    }

    /// A scrub has found damage. The writers are told, and take the copy back.
    pub(super) fn found_damaged(&mut self, blocks: &[u64]) {
        tracing::error!(volume = %self.shape.volume(), ?blocks, "blocks are damaged in memory: the copy is behind");
        self.damaged();
        self.say();
        for session in self.sessions.iter().filter(|session| session.mode == Mode::Write) {
            let text = format!("a scrub has found {} damaged blocks in the memory of this host", blocks.len());
            server::refuse(&session.connection, Cause::Damaged, &text);
        }
    }

    /// The store has failed, and the copy is lost with it: nothing of what it has promised can be kept. The server is
    /// one without a copy, until a writer gives it one.
    pub(super) fn lose(&mut self, failure: &Failure) {
        tracing::error!(volume = %self.shape.volume(), %failure, "the copy is lost");
        if let Some(kept) = &mut self.kept {
            kept.lose();
        }
        self.forget(&failure.to_string());
    }

    /// The copy is removed, because a client wants that. Its folder is the caller's. Returns whether there was a copy.
    pub(super) fn remove(&mut self, exports: &Exports) -> bool {
        let was_there = self.store.is_some();
        if let Some(region) = self.region {
            exports.revoke(region);
        }
        if let Some(kept) = &mut self.kept {
            kept.lose(); // what is left of it if the folder cannot be removed is not believed
        }
        if was_there {
            tracing::info!(volume = %self.shape.volume(), "a copy is removed: a client wants it");
            self.forget("the copy was removed");
        }
        was_there
    }

    /// This server has no copy any more. Its clients are told why.
    fn forget(&mut self, why: &str) {
        self.copy = Copy::default();
        self.say(); // its region may still be mapped
        (self.store, self.kept, self.grant, self.region) = (None, None, None, None);
        self.catch_ups += 1;
        self.compared = None;
        let asker = self.scrubbing.end();
        let connections = self.sessions.iter().map(|session| &session.connection).chain(&asker);
        connections.for_each(|connection| server::refuse(connection, Cause::Lost, why));
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
            // Not zeroed: each block is written as a whole, or nothing is answered.
            let mut bytes = self.answered.take(run.count as usize * BLOCK_BYTES, 1);
            let blocks = run.blocks().zip(bytes.chunks_exact_mut(BLOCK_BYTES));
            let entries: Result<Vec<Entry>, Damaged> = blocks.map(|(block, into)| store.get(block, into)).collect();
            entries.map(|entries| (entries, Bytes::from(bytes)))
        } else {
            let entries = run.blocks().map(|block| store.entry(block).ok_or(Damaged { block }));
            entries.collect::<Result<_, _>>().map(|entries| (entries, Bytes::new()))
        };
        taken.map_err(|damaged| {
            tracing::error!(volume = %self.shape.volume(), %damaged, "the copy must be taken back");
            self.damaged();
            Done::Refused(Cause::Damaged, damaged.to_string())
        })
    }

    /// A copy that is behind begins to take blocks; one that is not there is made first.
    fn begin_catch_up(
        &mut self,
        holder: Holder,
        since: Version,
        lender: String,
        means: Means<'_>,
    ) -> Result<Done, Refusal> {
        let mut next = self.copy;
        next.begin_catch_up(holder, since)?;
        if self.store.is_some() {
            if let Err(done) = self.commit(next, &[], &[]) {
                return Ok(done);
            }
        } else if let Err(text) = self.allocate(next.standing(), means.budget, means.exports, means.stores) {
            return Ok(Done::Refused(Cause::NoMemory, text));
        }
        self.copy = next;
        self.catch_ups += 1;
        self.compared = Some(0);
        Ok(Done::Borrow { number: self.catch_ups, holder, since, lender })
    }

    /// Whether this catch-up is the present one, and its writer is there.
    fn expect(&self, number: u64, writer: &Connection) -> Result<&Store, Abandoned> {
        let is_present = self.catch_ups == number && self.has(writer);
        self.store.as_ref().filter(|_| is_present).ok_or(Abandoned::Replaced)
    }

    /// Compares entries of the lender, which had applied `applied`, with those here. Returns the blocks that are
    /// needed. Blocks that are zeros there become so here: no bytes of them are needed.
    pub(super) fn compare(
        &mut self,
        (number, writer): (u64, &Connection),
        first: u64,
        theirs: &[Entry],
        applied: Version,
    ) -> Result<Vec<u64>, Abandoned> {
        self.expect(number, writer)?;
        let (mut needed, mut zeros) = (Vec::new(), Vec::new());
        for (block, &their) in (first..).zip(theirs) {
            let ours = self.store.as_ref().and_then(|store| store.entry(block));
            let is_taken = self.takes(ours, their, applied)?;
            match their.need(ours) {
                _ if !is_taken => {}
                Need::Nothing => {}
                Need::Entry => zeros.push((block, their)),
                Need::Block => needed.push(block),
            }
        }
        self.commit(self.copy, &zeros, &[]).map_err(Abandoned::from)?;
        for (block, entry) in zeros {
            if let Some(store) = &self.store {
                store.put(block, entry, &[]);
            }
        }
        self.compared = Some(first + theirs.len() as u64);
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
        let mut taken = Vec::new();
        for ((block, &their), bytes) in (first..).zip(theirs).zip(data.chunks_exact(BLOCK_BYTES)) {
            let ours = self.store.as_ref().and_then(|store| store.entry(block));
            if self.takes(ours, their, applied)? {
                taken.push((block, their, bytes));
            }
        }
        let changes: Vec<_> = taken.iter().map(|&(block, entry, _)| (block, entry)).collect();
        let with_bytes = taken.iter().filter(|(_, entry, _)| entry.has_bytes());
        let blocks: Vec<_> = with_bytes.map(|&(.., bytes)| bytes).collect();
        self.commit(self.copy, &changes, &blocks).map_err(Abandoned::from)?;
        for (block, entry, bytes) in taken {
            if let Some(store) = &self.store {
                store.put(block, entry, bytes);
            }
        }
        Ok(())
    }

    /// A catch-up is over, whatever became of it.
    pub(super) fn end_catch_up(&mut self, number: u64) {
        if self.catch_ups == number {
            self.compared = None;
        }
    }

    fn takes(&mut self, ours: Option<Entry>, theirs: Entry, applied: Version) -> Result<bool, Abandoned> {
        let ours = ours.map_or(Version::NONE, |entry| entry.version); // a damaged block is taken
        self.copy.takes(ours, theirs.version, applied).map_err(|_| Abandoned::Replaced)
    }

    /// All blocks were compared. Returns the version up to which the copy is whole, if it is.
    pub(super) fn try_complete(&mut self, number: u64, writer: &Connection) -> Result<Option<Version>, Abandoned> {
        self.expect(number, writer)?;
        let mut next = self.copy;
        if !next.try_complete() {
            return Ok(None);
        }
        self.commit(next, &[], &[]).map_err(Abandoned::from)?;
        self.say();
        self.compared = None;
        Ok(Some(self.copy.standing().applied))
    }

    /// A client wants a scrub. It is answered by the keeper's thread.
    pub(super) fn ask_for_scrub(&mut self, connection: &Connection) -> Done {
        if self.store.is_none() {
            return Done::Refused(Cause::OutOfStep, "the server has no copy of this volume".into());
        }
        if !self.scrubbing.ask(connection) {
            return Done::Refused(Cause::OutOfStep, "another client waits for a scrub of this copy: try again".into());
        }
        Done::Later
    }

    pub(super) fn is_scrub_asked(&self) -> bool {
        self.scrubbing.is_asked()
    }

    /// The blocks that are to be read now.
    pub(super) fn next_piece(&mut self, now: u64) -> Option<Range<u64>> {
        let blocks = self.store.as_ref()?.layout().blocks();
        let is_due = self.kept.as_ref().map_or_else(|| self.scrubbing.is_due(), |kept| kept.is_scrub_due(now));
        self.scrubbing.next_piece(blocks, is_due)
    }

    /// Reads these blocks in memory. Returns those that the extents must have, too.
    pub(super) fn scrub_memory(&mut self, piece: Range<u64>, findings: &mut Findings) -> Vec<u64> {
        let (Some(store), kept) = (&self.store, &mut self.kept) else { return Vec::new() };
        let journal = kept.as_mut().map(Kept::journal);
        let is_moved = |block| journal.as_ref().is_some_and(|journal| journal.is_moved(block));
        let moved = recovery::in_memory(is_moved, store, piece, findings);
        if !findings.damaged.is_empty() {
            self.found_damaged(&findings.damaged);
        }
        moved
    }

    /// This was found. At the end, the superblock says when that was.
    pub(super) fn scrubbed(&mut self, piece: &Range<u64>, findings: &Findings, now: u64) -> Option<Superblock> {
        let found = (findings.repaired.len(), findings.damaged.len());
        let (is_complete, told) = self.scrubbing.read(piece, self.shape.blocks(), found);
        if let Some((asker, findings)) = told {
            server::answer(&asker, &Reply::Scrubbing(findings), Bytes::new());
        }
        if !is_complete {
            return None;
        }
        tracing::info!(volume = %self.shape.volume(), "all blocks of a copy were read and checked");
        self.kept.as_mut().map(|kept| kept.scrubbed(now))
    }
}

fn answer(reply: Reply) -> Done {
    Done::Answer(reply, Bytes::new())
}

fn beyond_the_end() -> Done {
    Done::Refused(Cause::Misuse, "the volume ends before these blocks".into())
}

/// The milliseconds of a message.
pub(super) fn millis(time: Duration) -> u32 {
    time.as_millis().try_into().unwrap_or(u32::MAX)
}

/// A number that no writer is likely to have: of a client that does not write.
pub(super) const NO_WRITER: u64 = 0;

const NO_MEMORY: &str = "the server has no memory left for this copy: give it more, or choose another server";

/// Memory of answers that is kept for the next ones: that of the longest, or of four as the kernel asks for.
const IDLE_BYTES: usize = MOST_BLOCKS * BLOCK_BYTES;

/// Why a borrower must end.
pub(super) enum Abandoned {
    /// Its writer has gone or has begun another catch-up, or the server obeys another writer.
    Replaced,
    /// The store has no space for what it takes.
    Full(String),
}

impl From<Done> for Abandoned {
    fn from(done: Done) -> Abandoned {
        match done {
            Done::Refused(_, text) => Abandoned::Full(text),
            _ => Abandoned::Replaced,
        }
    }
}

// Growing: the copy becomes that of a larger volume, with every block, promise and claim that it has. The thread of a
// growth, below, calls these steps, with the lock held for one step at a time.
//
// While it grows, the copy has no connections but those that ask how it stands, so no write changes it.

impl State {
    /// Whether the copy grows at present.
    pub(in crate::server) fn is_growing(&self) -> bool {
        self.is_growing
    }

    /// Whether the server has a copy.
    pub(in crate::server) fn is_there(&self) -> bool {
        self.store.is_some()
    }

    /// Whether a block from this one on was ever written. Behind the end there is none.
    pub(in crate::server) fn has_written_from(&self, first: u64) -> bool {
        let Some(store) = &self.store else { return false };
        // A damaged entry may be of a write.
        (first..store.layout().blocks()).any(|block| store.entry(block).is_none_or(|entry| entry.is_written()))
    }

    /// Which size the copy has, and had.
    pub(in crate::server) fn size(&self) -> Size {
        Size::kept(self.shape.blocks(), self.former)
    }

    /// What a writer finds that opens the volume of this shape.
    pub(in crate::server) fn opened_with(&self, shape: Shape) -> Opened {
        if self.shape.copies() != shape.copies() {
            return Opened::Other;
        }
        match self.size().opened_with(shape.blocks()) {
            // It cannot have any: no writer was promised with the size that the copy has.
            Opened::GoesBack if self.has_written_from(shape.blocks()) => Opened::Other,
            opened => opened,
        }
    }

    /// The size that the copy has is agreed. Durable at once: it is not changed often.
    pub(in crate::server) fn agree(&mut self) -> Result<(), Done> {
        if self.former.is_none() {
            return Ok(());
        }
        let mut size = self.size();
        size.agree();
        self.former = size.former();
        if let Some(Err(failure)) = self.kept.as_mut().map(Kept::agree) {
            self.lose(&failure);
            return Err(Done::Later);
        }
        Ok(())
    }

    /// The volume has this shape, and no copy here.
    pub(in crate::server) fn reshape(&mut self, shape: Shape) {
        debug_assert!(self.store.is_none(), "a copy keeps its shape until all of its blocks were copied");
        (self.shape, self.former) = (shape, None);
    }

    /// Ends the connections, and lets none begin.
    pub(in crate::server) fn begin_growth(&mut self, exports: &Exports) {
        self.is_growing = true;
        self.catch_ups += 1;
        self.compared = None;
        for session in self.sessions.drain(..) {
            exports.withdraw(&session.connection);
            server::refuse(&session.connection, Cause::InUse, GROWS);
        }
    }

    /// Copies some blocks from `first` on into the larger copy. Returns those that its store needs, and where to go
    /// on; `None`: that was all, or there is no copy any more.
    pub(in crate::server) fn grow(&mut self, larger: &Store, first: u64) -> Option<(Batch, u64)> {
        let store = self.store.as_ref()?;
        let all = store.layout().blocks().min(larger.layout().blocks());
        let end = all.min(first + AT_ONCE);
        let (mut batch, mut bad) = (Batch::new(), Vec::new());
        for block in first..end {
            if store.entry(block).is_some_and(|entry| !entry.is_written()) {
                continue;
            }
            let mut bytes = vec![0; BLOCK_BYTES];
            match store.get(block, &mut bytes) {
                Ok(entry) => {
                    larger.put(block, entry, &bytes);
                    batch.push((block, entry, bytes));
                }
                Err(_) => {
                    larger.lack(block);
                    bad.push(block);
                }
            }
        }
        if !bad.is_empty() {
            self.found_damaged(&bad);
        }
        (first < end).then_some((batch, end))
    }

    /// The larger copy has every block: it takes the place of this one. Returns whether there is a copy.
    pub(in crate::server) fn complete_growth(&mut self, larger: Larger, exports: &Exports) -> Result<bool, Failure> {
        self.is_growing = false;
        let Some(store) = &self.store else { return Ok(false) };
        let former = self.size().becomes(larger.store.shape().blocks()).former();
        if let (Some(Beside { stores, growth }), Some(kept)) = (&larger.beside, &self.kept) {
            match stores.complete_growth(growth, kept, self.copy.standing(), former) {
                Ok(kept) => self.kept = Some(kept),
                Err(failure @ Failure::Full { .. }) => return Err(failure),
                Err(failure) => {
                    self.lose(&failure);
                    return Err(failure);
                }
            }
        }
        store.set_line(Standing::default()); // its region may still be mapped
        if let Some(region) = self.region.take() {
            exports.revoke(region);
        }
        self.region = exports.export(larger.store.memory());
        (self.shape, self.former) = (larger.store.shape(), former);
        (self.store, self.grant) = (Some(larger.store), Some(larger.grant));
        self.scrubbing = Scrubbing::new();
        self.say();
        Ok(true)
    }

    /// The growth was given up: the copy is as it was.
    pub(in crate::server) fn end_growth(&mut self) {
        self.is_growing = false;
    }
}

/// Blocks that are copied with the lock held at once: 1 MiB.
const AT_ONCE: u64 = 256;

/// Why a connection is ended or refused.
pub(in crate::server) const GROWS: &str =
    "the copy is about to become larger: try again when remora volume grow is over";

// Growing: the thread that copies a copy into a larger one, or back into a smaller one.
//
// Until the last block is copied the copy is as it was, and so it is if the server ends before: what is left in the
// folder of the stores is removed at the next start. The promise that it gave, the writes that it holds and what it
// claims to have held stay, so each rule holds between a copy that has grown and one that has not.

/// What is asked of a copy that could have another size.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// To take it.
    Do,
    /// Only whether it could.
    Could,
}

/// A copy that is larger, and lacks blocks still.
pub(super) struct Larger {
    pub(super) store: Store,
    pub(super) grant: Grant,
    /// `None`: it is in memory only.
    pub(super) beside: Option<Beside>,
}

/// The store of the larger copy. When this is dropped, the folder beside the copy's is removed, whichever of the two
/// stores is in it then. No other growth may begin before.
pub(super) struct Beside {
    pub(super) stores: Arc<Stores>,
    pub(super) growth: Growth<Folder>,
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.stores.end_growth(self.growth.shape().volume());
    }
}

impl Larger {
    /// Without a block.
    pub(super) fn new(shape: Shape, budget: &Arc<Budget>, stores: Option<&Arc<Stores>>) -> Result<Larger, String> {
        let bytes = Layout::of(shape).length();
        let grant = budget.take(bytes).ok_or_else(|| no_memory(bytes))?;
        let store = Store::create(shape).map_err(|error| error.to_string())?;
        let begin = |stores: &Arc<Stores>| {
            let growth = stores.begin_growth(shape)?;
            Ok::<_, String>(Beside { stores: Arc::clone(stores), growth })
        };
        Ok(Larger { store, grant, beside: stores.map(begin).transpose()? })
    }
}

/// Why a copy cannot have another size.
pub(super) fn no_memory(bytes: u64) -> String {
    format!("the server has no memory for {bytes} bytes beside the copy as it is: give it more, by --memory")
}

/// The thread.
pub(super) struct Growing {
    pub(super) slot: Arc<Slot>,
    pub(super) larger: Larger,
    /// Who is told.
    pub(super) connection: Connection,
    /// The copy goes back to the size with which this writer opens the volume on that connection.
    pub(super) opener: Option<u64>,
    pub(super) is_stopping: Arc<AtomicBool>,
}

impl Growing {
    /// `open`: opens the volume on the connection for the writer for which the copy goes back.
    pub(super) fn run(self, exports: &Exports, open: impl FnOnce(&Connection, &Arc<Slot>, u64)) {
        let Growing { slot, larger, connection, opener, is_stopping } = self;
        let (mut first, mut told) = (0, Instant::now());
        loop {
            // A command that was killed wants nothing any more.
            if is_stopping.load(Ordering::Acquire) || !connection.is_ready() {
                drop(larger);
                return slot.lock().end_growth();
            }
            let Some((batch, next)) = slot.lock().grow(&larger.store, first) else { break };
            let written = larger.beside.as_ref().map_or(Ok(()), |beside| beside.growth.write(&batch));
            if let Err(failure) = written {
                drop(larger);
                slot.lock().end_growth();
                return refuse(&connection, Cause::NoMemory, &failure.to_string());
            }
            first = next;
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                server::answer(&connection, &Reply::Progress { compared: first }, Bytes::new());
            }
        }
        let shape = larger.store.shape();
        let done = slot.lock().complete_growth(larger, exports);
        match done {
            Ok(is_there) => {
                tracing::info!(volume = %shape.volume(), blocks = shape.blocks(), "a copy has another size");
                match opener {
                    Some(writer) => open(&connection, &slot, writer),
                    None => server::answer(&connection, &Reply::Grown { is_there }, Bytes::new()),
                }
            }
            Err(failure) => refuse(&connection, Cause::NoMemory, &failure.to_string()),
        }
    }
}

/// How often the client is told how far it is.
const TELL_EVERY: Duration = Duration::from_millis(200);
