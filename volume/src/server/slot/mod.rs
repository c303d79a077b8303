//! Slot: one volume at this server. The copy's rules, its blocks and its connections are behind one lock, so that calls
//! take place one after the other, each as a whole.

mod catch_up;
mod failing;
mod grow;
mod reading;
mod scrub;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_fabric::RegionId;
use remora_messenger::{Connection, Pool};

pub(in crate::server) use self::catch_up::Abandoned;
pub(in crate::server) use self::grow::GROWS;
use super::answers;
use super::budget::{Budget, Grant};
use super::exports::Exports;
use super::kept::{Kept, Stores, Waiter};
use super::scrubbing::Scrubbing;
use crate::copy::{Copy, Refusal};
use crate::disk::checkpoint::{Batch, Checkpoint};
use crate::disk::files::Failure;
use crate::disk::folder::Folder;
use crate::disk::journal::Sync;
use crate::layout::{Entry, Layout};
use crate::message::{Holder, Standing};
use crate::overlap::newest;
use crate::shape::{BLOCK_BYTES, Shape};
use crate::store::{Store, sums};
use crate::version::Version;
use crate::wire::{Call, Cause, Mode, Reply, Room, Run, Status};

/// See the module's text.
pub(super) struct Slot {
    state: Mutex<State>,
    /// A write was applied, or the catch-up has another writer.
    changed: Condvar,
}

/// What the lock guards.
// Larger than the bound: a method for each call, for each of the store, and for each connection.
pub(super) struct State {
    shape: Shape,
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
        let answered = Pool::new(reading::IDLE_BYTES);
        let state = State {
            shape,
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
        self.scrubbing = Scrubbing::new();
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
            _ if mode == Some(Mode::Read) => return Done::Refused(Cause::Misuse, answers::ONLY_READS.into()),
            Call::Lend { holder, since, run, with_blocks } => self.lend(holder, since, run, with_blocks),
            _ if mode != Some(Mode::Write) => {
                return Done::Refused(Cause::Misuse, answers::ONLY_LOANS.into());
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
            | Call::GoBack { .. }
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
                Done::Answer(reply, data) => answers::answer(&waiter.connection, &reply, data),
                Done::Refused(cause, text) => answers::refuse(&waiter.connection, cause, &text),
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
