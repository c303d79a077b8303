//! Host: finds the volume of a connection, and shares the memory among volumes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use bytes::Bytes;
use remora_fabric::TransportKind;
use remora_messenger::error::LinkError;
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Refusal};

use super::kept::{Kept, SYNC_EVERY, Stores};
use super::puller::{Borrower, Puller, Pulling, Staging};
use super::slot::{self, Asked, Done, GROWS, Growing, Larger, Means, NO_WRITER, Slot, millis, no_memory};
use super::{Budget, Exports, ONLY_LOANS, ONLY_READS, ServerOptions, answer, refuse};
use crate::disk::journal::write_superblock;
use crate::disk::recovery::{self, Findings};
use crate::disk::{Failure, Files, Name};
use crate::layout::{Layout, Store};
use crate::link::{self, AT_WORK, LEAST_ROOM, MOST_ROOM, Rdma, Security};
use crate::rules::{Copy, Standing, State};
use crate::shape::{Opened, Shape, VolumeId};
use crate::wire::{Call, Cause, Mode, Reply, Room, Status, Used};

/// See the module's text.
pub(super) struct Host {
    slots: Mutex<HashMap<VolumeId, Arc<Slot>>>,
    /// The volume of each connection, by the connection's number.
    connections: Mutex<HashMap<u64, Arc<Slot>>>,
    /// What writers may have under way here.
    staging: Mutex<Staging>,
    budget: Arc<Budget>,
    exports: Arc<Exports>,
    /// `None`: copies are in memory only.
    stores: Option<Arc<Stores>>,
    security: Security,
    /// The transports by which this server reads memory elsewhere, and its devices for it.
    transports: &'static [TransportKind],
    rdma: Rdma,
    is_stopping: Arc<AtomicBool>,
    /// Borrowers, those that pull, and those that let a copy grow.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Those that pull, by the numbers of their writers' connections.
    pullers: Mutex<HashMap<u64, Arc<Puller>>>,
    /// Itself, for threads.
    me: Weak<Host>,
}

impl Host {
    /// With the copies that are in its stores.
    pub(super) fn new(options: &ServerOptions, exports: Exports) -> io::Result<Arc<Host>> {
        let stores = options.store.as_deref().map(Stores::open).transpose()?;
        let host = Arc::new_cyclic(|me| Host {
            slots: Mutex::default(),
            connections: Mutex::default(),
            staging: Mutex::new(Staging::new(options.staging)),
            budget: Budget::new(options.memory),
            exports: Arc::new(exports),
            stores,
            security: options.security.clone(),
            transports: transports(options.shm),
            rdma: options.rdma.clone(),
            is_stopping: Arc::default(),
            threads: Mutex::default(),
            pullers: Mutex::default(),
            me: Weak::clone(me),
        });
        if let Some(stores) = &host.stores {
            host.recover(stores)?;
            host.exports.wait();
        }
        Ok(host)
    }

    /// Brings the copies of the stores into memory. A store that cannot be believed is one that this server has not.
    fn recover(&self, stores: &Arc<Stores>) -> io::Result<()> {
        for (volume, folder) in stores.found()? {
            let path = folder.folder().display().to_string();
            let shape = match recovery::superblock(&folder) {
                Ok(superblock) if superblock.shape.volume() == volume => superblock.shape,
                Ok(_) => {
                    tracing::error!(path, "the folder has the store of another volume: it is left alone");
                    continue;
                }
                Err(failure) => {
                    tracing::error!(path, %failure, "{LOST}");
                    continue;
                }
            };
            let grant = self.budget.take(Layout::of(shape).length());
            let grant = grant.ok_or_else(|| io::Error::other(format!("no memory for the copy in {path}: {MORE}")))?;
            let memory = Store::create(shape).map_err(|error| io::Error::other(error.to_string()))?;
            match stores.recover(folder, &memory) {
                Ok((kept, standing, is_cut)) => {
                    let copy = Copy::recovered(standing, is_cut);
                    let slot = Slot::recovered(memory, grant, kept, copy, &self.exports);
                    lock(&self.slots).insert(volume, Arc::new(slot));
                }
                // With space it would be found: it must not count as lost.
                Err(failure @ Failure::Full { .. }) => return Err(io::Error::other(failure.to_string())),
                Err(failure) => tracing::error!(path, %failure, "{LOST}"),
            }
        }
        Ok(())
    }

    pub(super) fn stores(&self) -> Option<&Arc<Stores>> {
        self.stores.as_ref()
    }

    pub(super) fn slots(&self) -> Vec<Arc<Slot>> {
        lock(&self.slots).values().cloned().collect()
    }

    /// Leaves the stores in peace. No call arrives any more.
    pub(super) fn close_stores(&self) {
        for slot in self.slots() {
            let mut state = slot.lock();
            if let Some(Err(failure)) = state.kept().map(Kept::close) {
                state.lose(&failure);
            }
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    pub(super) fn standing(&self, volume: VolumeId) -> Option<Standing> {
        let slot = lock(&self.slots).get(&volume).cloned();
        slot.map(|slot| slot.lock().standing())
    }

    /// Tells the threads to end.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
    }

    /// Waits for the threads, which were told to end.
    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            let _ = thread.join(); // a panic was reported where it happened
        }
    }

    pub(super) fn staging(&self) -> (u64, u64) {
        lock(&self.staging).held()
    }

    /// What a writer is told with each answer.
    fn room(&self, connection: &Connection) -> Room {
        Room { bytes: lock(&self.staging).told(connection.id()), writes: MOST_ROOM.writes }
    }

    /// A writer asks how much it may have under way. That concerns no volume.
    fn window(&self, connection: &Connection, wants: Room, obeys: Room) {
        let held = lock(&self.staging).ask(connection.id(), wants.bytes, obeys.bytes);
        match held {
            Some(bytes) => {
                let room = Room { bytes, writes: wants.writes.clamp(1, MOST_ROOM.writes) };
                answer(connection, &Reply::Granted(room), Bytes::new());
            }
            None => refuse(connection, Cause::Misuse, "this connection is not a writer's"),
        }
    }

    /// What the copies and the writers use.
    pub(super) fn used(&self) -> (Used, Used) {
        (self.budget.used(), lock(&self.staging).used())
    }

    pub(super) fn exports(&self) -> &Exports {
        &self.exports
    }

    fn slot_of(&self, volume: VolumeId) -> Option<Arc<Slot>> {
        lock(&self.slots).get(&volume).cloned()
    }

    /// The slot of a volume. A volume that is not known here gets one.
    fn slot_or_unknown(&self, shape: Shape) -> Arc<Slot> {
        let mut slots = lock(&self.slots);
        Arc::clone(slots.entry(shape.volume()).or_insert_with(|| Arc::new(Slot::unknown(shape))))
    }

    /// Notes that a connection is for this volume. `false`: it is for one already.
    pub(super) fn connect(&self, connection: &Connection, slot: &Arc<Slot>) -> bool {
        lock(&self.connections).insert(connection.id(), Arc::clone(slot)).is_none()
    }

    fn open(&self, connection: &Connection, shape: Shape, mode: Mode, writer: u64) {
        let slot = self.slot_or_unknown(shape);
        if !self.connect(connection, &slot) {
            return refuse(connection, Cause::Misuse, "the connection is open already");
        }
        let state = slot.lock();
        if state.shape() != shape {
            let may_go_back = mode == Mode::Write && !state.is_growing();
            return match state.opened_with(shape) {
                Opened::GoesBack if may_go_back => self.go_back(connection, &slot, state, shape, writer),
                _ => refuse(connection, Cause::Shape, other_shape(&state, shape)),
            };
        }
        self.open_copy(connection, state, mode, writer);
    }

    /// The copy has grown, and its volume has the former size: it goes back, and then the writer has it open.
    fn go_back(
        &self,
        connection: &Connection,
        slot: &Arc<Slot>,
        mut state: MutexGuard<'_, slot::State>,
        shape: Shape,
        writer: u64,
    ) {
        match self.larger(shape) {
            Ok(smaller) => {
                tracing::warn!(volume = %shape.volume(), "a copy has a size that was never agreed: it goes back");
                state.begin_growth(self.exports());
                drop(state);
                self.begin_growing(connection, Arc::clone(slot), smaller, Some(writer));
            }
            Err(why) => refuse(connection, Cause::Shape, &why),
        }
    }

    /// The copy has the size that a writer has asked for.
    fn go_on_to_open(&self, connection: &Connection, slot: &Arc<Slot>, writer: u64) {
        let state = slot.lock();
        // With the copy's lock held: if the connection ends now, what ends it waits until it is in the copy's list.
        if lock(&self.connections).contains_key(&connection.id()) {
            self.open_copy(connection, state, Mode::Write, writer);
        }
    }

    fn open_copy(&self, connection: &Connection, mut state: MutexGuard<'_, slot::State>, mode: Mode, writer: u64) {
        if state.is_growing() {
            return refuse(connection, Cause::InUse, GROWS);
        }
        if mode == Mode::Write && !lock(&self.staging).enter(connection.id()) {
            return refuse(connection, Cause::NoMemory, NO_STAGING);
        }
        if mode == Mode::Read && state.readers() >= MOST_READERS {
            return refuse(connection, Cause::NoMemory, &format!("{MOST_READERS} hosts read this copy already"));
        }
        let replaced = state.open(connection, mode, writer, &self.exports);
        let writer_silent = state.writer_silent(writer).map(millis);
        let (standing, room) = (state.standing(), LEAST_ROOM);
        answer(connection, &Reply::Standing { standing, room, writer_silent }, Bytes::new());
        drop(state);
        for earlier in replaced {
            tracing::info!(peer = %earlier.peer(), "a writer has a newer connection: the earlier one is ended");
            earlier.abort();
        }
    }

    fn create(&self, connection: &Connection, shape: Shape) {
        let slot = self.slot_or_unknown(shape);
        let mut state = slot.lock();
        if state.shape() != shape {
            return refuse(connection, Cause::Shape, OTHER_SHAPE);
        }
        let done = state.create(&self.budget, &self.exports, self.stores.as_ref());
        let is_unused = state.is_unused();
        drop(state);
        if is_unused {
            self.forget(shape.volume(), &slot);
        }
        self.done(connection, done);
    }

    /// Forgets a volume that was unused, if it still is.
    pub(super) fn forget(&self, volume: VolumeId, slot: &Arc<Slot>) {
        let mut slots = lock(&self.slots);
        if slots.get(&volume).is_some_and(|known| Arc::ptr_eq(known, slot)) && slot.lock().is_unused() {
            slots.remove(&volume);
        }
    }

    pub(super) fn done(&self, connection: &Connection, done: Done) {
        match done {
            Done::Answer(reply, data) => answer(connection, &reply, data),
            Done::Refused(cause, text) => refuse(connection, cause, &text),
            Done::Later | Done::Borrow { .. } => {}
        }
    }

    /// Everything but the first call of a connection.
    pub(super) fn call(&self, connection: &Connection, call: Call, data: &[u8]) {
        let Some(slot) = lock(&self.connections).get(&connection.id()).cloned() else {
            return refuse(connection, Cause::Misuse, "the first message of a connection must be Open");
        };
        let mut state = slot.lock();
        if !state.has(connection) {
            return; // it was replaced by a newer connection, and is about to end
        }
        // Answered with the lock held: answers leave in the order of what they report.
        let (room, stores) = (self.room(connection), self.stores.as_ref());
        let means = Means { room, budget: &self.budget, exports: &self.exports, stores };
        if let Call::Follow(holder) = call {
            let puller = state.connection_of(holder).and_then(|writer| lock(&self.pullers).get(&writer).cloned());
            let followed = state.follow(connection, puller.and_then(|puller| puller.follow()), &self.exports);
            return self.done(connection, followed);
        }
        let done = state.execute(connection, call, data, means);
        if state.standing().state == State::Behind {
            slot.notify();
        }
        match done {
            Done::Borrow { number, holder, since, lender } => {
                drop(state);
                let Ok(lender) = lender.parse::<Address>() else {
                    return refuse(connection, Cause::Misuse, "the lender's address is not an address");
                };
                let writer = connection.clone();
                let (security, is_stopping) = (self.security.clone(), Arc::clone(&self.is_stopping));
                let borrower = Borrower { slot, number, holder, since, lender, writer, security, is_stopping };
                self.begin("volume-borrower", connection, || borrower.run());
            }
            done => self.done(connection, done),
        }
    }

    /// Begins a thread for a client. Returns whether there is one: else the client was refused.
    fn begin(&self, name: &str, client: &Connection, does: impl FnOnce() + Send + 'static) -> bool {
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        match std::thread::Builder::new().name(name.into()).spawn(does) {
            Ok(thread) => {
                threads.push(thread);
                true
            }
            Err(error) => {
                refuse(client, Cause::NoMemory, &format!("no thread: {error}"));
                false
            }
        }
    }

    /// Memory, and a store if this server has stores, for a copy that has grown.
    pub(super) fn larger(&self, shape: Shape) -> Result<Larger, String> {
        Larger::new(shape, &self.budget, self.stores.as_ref())
    }

    /// Whether there is memory for a copy of this shape, and space in the stores, beside what there is.
    fn could_have(&self, shape: Shape) -> Result<(), String> {
        let bytes = Layout::of(shape).length();
        if self.budget.take(bytes).is_none() {
            return Err(no_memory(bytes));
        }
        self.stores.as_ref().map_or(Ok(()), |stores| stores.has_space(bytes))
    }

    /// Begins to copy a copy into a larger one.
    fn begin_growing(&self, client: &Connection, slot: Arc<Slot>, larger: Larger, opener: Option<u64>) {
        let (of_thread, connection) = (Arc::clone(&slot), client.clone());
        let (host, is_stopping) = (self.me.upgrade(), Arc::clone(&self.is_stopping));
        let growing = Growing { slot: of_thread, larger, connection, opener, is_stopping };
        let begun = self.begin("volume-growing", client, move || {
            if let Some(host) = host {
                growing.run(host.exports(), |client, slot, writer| host.go_on_to_open(client, slot, writer));
            }
        });
        if !begun {
            slot.lock().end_growth();
        }
    }

    /// A writer offers its outbox.
    fn offer(&self, connection: &Connection, session: u64, keys: Vec<Vec<u8>>) {
        let slot = lock(&self.connections).get(&connection.id()).cloned();
        let shape = slot.map(|slot| slot.lock().shape());
        let mut pullers = lock(&self.pullers);
        let Some(shape) = shape.filter(|_| !pullers.contains_key(&connection.id())) else {
            return refuse(connection, Cause::Misuse, "an outbox is offered once, on a connection that is open");
        };
        let (Some(host), Ok(puller)) = (self.me.upgrade(), Puller::new(&self.budget)) else {
            return answer(connection, &Reply::Reached { pulls: false, lends: false }, Bytes::new());
        };
        let puller = Arc::new(puller);
        pullers.insert(connection.id(), Arc::clone(&puller));
        let writer = connection.clone();
        let pulling = Pulling {
            puller,
            connection: connection.clone(),
            shape,
            session,
            keys,
            security: self.security.clone(),
            transports: self.transports,
            rdma: self.rdma.clone(),
            exports: Arc::clone(&self.exports),
            is_stopping: Arc::clone(&self.is_stopping),
            call: Box::new(move |call, data| host.call(&writer, call, data)),
        };
        self.begin("volume-puller", connection, || pulling.run());
    }

    /// A call that takes place after the earlier ones of its connection.
    fn in_order(&self, connection: &Connection, call: Call, delivery: Delivery) {
        let puller = lock(&self.pullers).get(&connection.id()).cloned();
        let now = match puller {
            Some(puller) => puller.queued(call, delivery),
            None if matches!(call, Call::Pull { .. }) => {
                return refuse(connection, Cause::Misuse, "a write can be pulled once an outbox was offered");
            }
            None => Some((call, delivery)),
        };
        if let Some((call, delivery)) = now {
            self.call(connection, call, &delivery.data);
        }
    }

    /// What a connection is for that asks nothing of the server itself: one for reading, or for loans. `None`: it is a
    /// writer's, or has opened no volume.
    fn only_for(&self, connection: &Connection) -> Option<&'static str> {
        let slot = lock(&self.connections).get(&connection.id()).cloned()?;
        let state = slot.lock();
        let purposes = [(Mode::Read, ONLY_READS), (Mode::Borrow, ONLY_LOANS)];
        purposes.into_iter().find(|(mode, _)| state.is_for(connection, *mode)).map(|(_, only)| only)
    }

    /// A call that is done by the server, and not by one of its copies.
    fn of_server(&self, connection: &Connection, call: Call) {
        if let Some(only) = self.only_for(connection) {
            return refuse(connection, Cause::Misuse, only);
        }
        match call {
            Call::Create { shape } => self.create(connection, shape),
            Call::Status { shape } => self.status(connection, shape),
            Call::Scrub { shape } => self.scrub(connection, shape),
            Call::Remove { shape, takes_over } => self.remove(connection, shape, takes_over),
            Call::Grow { shape, takes_over } => self.grow(connection, shape, takes_over, Asked::Do),
            Call::MayGrow { shape, takes_over } => self.grow(connection, shape, takes_over, Asked::Could),
            Call::Agree { shape } => self.agree(connection, shape),
            Call::Window { wants, obeys } => self.window(connection, wants, obeys),
            Call::Offer { session, keys } => self.offer(connection, session, keys),
            _ => {} // the others are a copy's
        }
    }

    fn ended(&self, connection: &Connection) {
        lock(&self.staging).leave(connection.id());
        if let Some(puller) = lock(&self.pullers).remove(&connection.id()) {
            puller.end();
        }
        let Some(slot) = lock(&self.connections).remove(&connection.id()) else { return };
        let mut slots = lock(&self.slots);
        let mut state = slot.lock();
        state.end(connection, &self.exports);
        if state.is_unused() {
            slots.remove(&state.shape().volume());
        }
    }

    /// How the copy of a volume stands, and what is used of the server. It may have none.
    pub(super) fn status(&self, connection: &Connection, shape: Shape) {
        let of_copy = match self.slot_of(shape.volume()) {
            Some(slot) => {
                let state = slot.lock();
                if state.shape() != shape {
                    return refuse(connection, Cause::Shape, other_shape(&state, shape));
                }
                state.status()
            }
            None => Status::default(),
        };
        let (memory, staging) = self.used();
        answer(connection, &Reply::Status(Box::new(Status { memory, staging, ..of_copy })), Bytes::new());
    }

    /// How each copy stands that there is.
    pub(super) fn statuses(&self) -> Vec<(VolumeId, Status)> {
        let slots = self.slots();
        let of = |slot: &Arc<Slot>| {
            let state = slot.lock();
            state.is_there().then(|| (state.shape().volume(), state.status()))
        };
        slots.iter().filter_map(of).collect()
    }

    /// Has the copy scrubbed. The keeper's thread answers.
    pub(super) fn scrub(&self, connection: &Connection, shape: Shape) {
        let Some(slot) = self.slot_of(shape.volume()) else {
            return refuse(connection, Cause::OutOfStep, "the server has no copy of this volume");
        };
        if !self.connect(connection, &slot) {
            return refuse(connection, Cause::Misuse, "the connection is open already");
        }
        let mut state = slot.lock();
        if state.shape() != shape {
            return refuse(connection, Cause::Shape, OTHER_SHAPE);
        }
        let done = state.ask_for_scrub(connection);
        drop(state);
        self.done(connection, done);
    }

    /// Whether no writer is at work with the copy, or the client consents. Otherwise the client is refused.
    fn is_free(&self, connection: &Connection, state: &slot::State, takes_over: bool) -> bool {
        if state.is_growing() {
            refuse(connection, Cause::InUse, GROWS);
            return false;
        }
        let silent = state.writer_silent(NO_WRITER).filter(|silent| !takes_over && *silent < AT_WORK);
        if let Some(silent) = silent {
            let text = format!("a writer is at work, heard {} ms ago: the copy is left alone", silent.as_millis());
            refuse(connection, Cause::InUse, &text);
        }
        silent.is_none()
    }

    /// Copies the copy into a larger one, or into a smaller one if its size was never agreed: the way back from a size
    /// that not all servers have. A thread does it, and answers. If that is only asked, nothing changes.
    pub(super) fn grow(&self, connection: &Connection, shape: Shape, takes_over: bool, asked: Asked) {
        let slot = self.slot_or_unknown(shape);
        let mut state = slot.lock();
        let had = state.shape();
        if had.copies() != shape.copies() {
            return refuse(connection, Cause::Shape, "the volume has another number of copies here");
        }
        let may_shrink = state.size().may_become(shape.blocks()) && !state.has_written_from(shape.blocks());
        if had.blocks() > shape.blocks() && !may_shrink {
            return refuse(connection, Cause::Shape, "the volume is larger here, and a writer has used it so");
        }
        if had != shape && !self.is_free(connection, &state, takes_over) {
            return;
        }
        if had == shape || !state.is_there() {
            let is_there = state.is_there();
            if !is_there && asked != Asked::Could {
                state.reshape(shape);
            }
            let is_unused = state.is_unused();
            drop(state);
            if is_unused {
                self.forget(shape.volume(), &slot);
            }
            return answer(connection, &Reply::Grown { is_there }, Bytes::new());
        }
        if asked == Asked::Could {
            let could = self.could_have(shape);
            drop(state);
            return match could {
                Ok(()) => answer(connection, &Reply::Grown { is_there: true }, Bytes::new()),
                Err(why) => refuse(connection, Cause::NoMemory, &why),
            };
        }
        let larger = match self.larger(shape) {
            Ok(larger) => larger,
            Err(why) => return refuse(connection, Cause::NoMemory, &why),
        };
        state.begin_growth(self.exports());
        drop(state);
        self.begin_growing(connection, slot, larger, None);
    }

    /// The command that has made the volume larger has written its size into its file.
    fn agree(&self, connection: &Connection, shape: Shape) {
        let Some(slot) = self.slot_of(shape.volume()) else {
            return answer(connection, &Reply::Grown { is_there: false }, Bytes::new());
        };
        let mut state = slot.lock();
        if state.shape() != shape {
            return refuse(connection, Cause::Shape, OTHER_SHAPE);
        }
        match state.agree() {
            Ok(()) => answer(connection, &Reply::Grown { is_there: state.is_there() }, Bytes::new()),
            Err(done) => self.done(connection, done),
        }
    }

    /// Forgets the copy, and removes its store.
    pub(super) fn remove(&self, connection: &Connection, shape: Shape, takes_over: bool) {
        let slot = self.slot_or_unknown(shape);
        let mut state = slot.lock();
        if state.shape() != shape {
            return refuse(connection, Cause::Shape, OTHER_SHAPE);
        }
        if !self.is_free(connection, &state, takes_over) {
            return;
        }
        let was_there = state.remove(self.exports());
        // With the lock held: no new copy gets a folder meanwhile.
        let removed = self.stores().map_or(Ok(false), |stores| stores.remove(shape.volume()));
        let is_unused = state.is_unused();
        drop(state);
        if is_unused {
            self.forget(shape.volume(), &slot);
        }
        match removed {
            Ok(had_folder) => {
                answer(connection, &Reply::Removed { was_there: was_there || had_folder }, Bytes::new());
            }
            Err(error) => {
                tracing::error!(%error, "the store of a copy that is forgotten is left: remove it by hand");
                let text = format!("the copy is forgotten, and what is left of its store cannot be removed: {error}");
                refuse(connection, Cause::Lost, &text);
            }
        }
    }
}

impl Dispatcher for Host {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        match link::decode_call(&delivery) {
            Ok(Call::Open { shape, mode, writer }) => self.open(connection, shape, mode, writer),
            Ok(
                call @ (Call::Create { .. }
                | Call::Status { .. }
                | Call::Scrub { .. }
                | Call::Remove { .. }
                | Call::Grow { .. }
                | Call::MayGrow { .. }
                | Call::Agree { .. }
                | Call::Window { .. }
                | Call::Offer { .. }),
            ) => self.of_server(connection, call),
            Ok(call) => self.in_order(connection, call, delivery),
            Err(error) => refuse(connection, Cause::Misuse, &error.to_string()),
        }
    }

    fn reset(&self, connection: &Connection, _: usize, _: bool) {
        self.ended(connection);
    }

    fn closed(&self, connection: &Connection) {
        self.ended(connection);
    }

    fn refused(&self, connection: &Connection, _: Refusal) {
        self.ended(connection);
    }

    fn rejected(&self, peer: &Address, why: &LinkError) {
        tracing::info!(%peer, %why, "a connection was rejected");
    }
}

/// The transports by which a server reads, nearest first.
fn transports(shm: bool) -> &'static [TransportKind] {
    const ALL: &[TransportKind] = &[TransportKind::Shm, TransportKind::Verbs, TransportKind::Tcp];
    if shm { ALL } else { &ALL[1..] }
}

const MORE: &str = "give the server at least as much as before";

/// Hosts that read a copy at once. Each takes a place at an exporter, which has 256, and leaves the others to writers
/// and servers.
const MOST_READERS: usize = 128;

const NO_STAGING: &str = "the server has as many writers as its memory for writes under way permits: give it more";

const OTHER_SHAPE: &str = "the volume has another size, or another number of copies, here: if it was made larger, \
     take its file from the host where it was, and run remora volume grow again if that was interrupted";

/// Why a copy of another size is not shown.
fn other_shape(state: &slot::State, shape: Shape) -> &'static str {
    match state.opened_with(shape) {
        Opened::GoesBack => "the copy has grown, and that was never agreed: the next writer has it go back",
        _ => OTHER_SHAPE,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Host({} volumes)", lock(&self.slots).len())
    }
}

/// What the log says of a store that cannot be believed.
const LOST: &str =
    "a copy is lost; the next writer, or remora volume repair, gives this server one out of the other copies";

// Keeper: the threads that keep copies right. One scrubs, and with stores moves blocks from the journals to the
// extents. With stores, another one syncs, for every answer that waits at once. Neither holds a copy's lock while it
// waits for the device.

/// Syncs until the server ends.
pub(super) fn sync(host: &Host, stores: &Stores) {
    while !host.is_stopping() {
        stores.wait(SYNC_EVERY);
        for slot in host.slots() {
            sync_one(&slot);
        }
    }
}

fn sync_one(slot: &Slot) {
    let mut state = slot.lock();
    let Some(kept) = state.kept() else { return };
    let number = kept.number();
    let Some(sync) = kept.begin_sync(Instant::now()) else { return };
    drop(state);
    let result = sync.run();
    let mut state = slot.lock();
    if state.kept().is_none_or(|kept| kept.number() != number) {
        return; // it was lost meanwhile
    }
    match result {
        Ok(()) => state.synced(&sync),
        Err(failure) => state.lose(&failure),
    }
}

/// Scrubs until the server ends, and makes checkpoints between.
pub(super) fn keep(host: &Host) {
    let mut next_round = Instant::now();
    while !host.is_stopping() {
        let now = Instant::now();
        let is_round = now >= next_round;
        if is_round {
            next_round = now + LOOK_AGAIN;
        }
        let mut is_asked = false;
        for slot in host.slots() {
            if is_round {
                checkpoint_one(host, &slot);
                say_synced(&slot);
            }
            is_asked |= scrub_some(&slot, is_round);
        }
        std::thread::sleep(if is_asked { PIECE_PAUSE } else { LOOK_AGAIN });
    }
}

/// A checkpoint, if one is due.
fn checkpoint_one(host: &Host, slot: &Slot) {
    let mut state = slot.lock();
    let Some(kept) = state.kept() else { return };
    let (number, begun) = (kept.number(), kept.begin_checkpoint());
    let Some((mut checkpoint, superblock)) = begun else { return };
    drop(state);
    // The copy's lock, as long as the store is the same.
    let lock = || -> Option<MutexGuard<'_, slot::State>> {
        let mut state = slot.lock();
        let is_same = !host.is_stopping() && state.kept().is_some_and(|kept| kept.number() == number);
        is_same.then_some(state)
    };
    let began = Instant::now();
    let mut copy = || -> Result<Option<()>, Failure> {
        checkpoint.announce(superblock)?;
        loop {
            let Some(state) = lock() else { return Ok(None) };
            let batch = state.next_batch(&mut checkpoint);
            drop(state);
            if batch.is_empty() {
                break;
            }
            checkpoint.write(&batch)?;
        }
        let Some(event) = lock().and_then(|mut state| state.kept().map(|kept| kept.want_sync())) else {
            return Ok(None);
        };
        loop {
            let Some(mut state) = lock() else { return Ok(None) };
            if state.kept().is_some_and(|kept| kept.is_synced(event)) {
                break;
            }
            drop(state);
            std::thread::sleep(SYNC_PAUSE);
        }
        checkpoint.sync()?;
        let superblock = lock().and_then(|mut state| state.kept().map(|kept| checkpoint.superblock(kept.journal())));
        superblock.map(|superblock| checkpoint.complete(superblock)).transpose()
    };
    let result = copy();
    let Some(mut state) = lock() else { return };
    match (result, state.kept()) {
        (Ok(_), Some(kept)) => {
            checkpoint.end(kept.journal());
            tracing::debug!(took = ?began.elapsed(), "a checkpoint of a copy");
        }
        (Err(failure @ Failure::Full { .. }), Some(kept)) => {
            tracing::warn!(%failure, "a checkpoint was given up: the journal grows until the next one");
            checkpoint.give_up(kept.journal());
        }
        (Err(failure), _) => state.lose(&failure),
        (Ok(_), None) => {}
    }
}

/// Writes into the superblock what is durable, if no record says it.
fn say_synced(slot: &Slot) {
    let mut state = slot.lock();
    let Some(kept) = state.kept() else { return };
    let (number, files) = (kept.number(), Arc::clone(kept.files()));
    let Some(superblock) = kept.say_synced(Instant::now()) else { return };
    drop(state);
    if let Err(failure) = write_superblock(&*files, superblock) {
        let mut state = slot.lock();
        if state.kept().is_some_and(|kept| kept.number() == number) {
            state.lose(&failure);
        }
    }
}

/// Reads some blocks, if a scrub is due in this round, or a client waits for it. Returns whether one does.
fn scrub_some(slot: &Slot, is_round: bool) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut state = slot.lock();
    if !is_round && !state.is_scrub_asked() {
        return false;
    }
    let Some(piece) = state.next_piece(now) else { return false };
    let mut findings = Findings::default();
    let moved = state.scrub_memory(piece.clone(), &mut findings);
    let Some((kept, memory)) = state.kept_and_memory() else {
        state.scrubbed(&piece, &findings, now);
        return state.is_scrub_asked();
    };
    let (number, files, layout) = (kept.number(), Arc::clone(kept.files()), memory.layout());
    drop(state);
    let bad = recovery::in_extents(&*files, layout, &moved);
    let mut state = slot.lock();
    let Some((kept, memory)) = state.kept_and_memory().filter(|(kept, _)| kept.number() == number) else {
        return false; // it was lost meanwhile
    };
    let repaired = recovery::repair(kept.journal(), memory, &bad, &mut findings);
    if !findings.repaired.is_empty() {
        let blocks = &findings.repaired;
        tracing::error!(file = files.path(Name::Extents), ?blocks, "blocks were damaged in a store, and are repaired");
    }
    let superblock = state.scrubbed(&piece, &findings, now);
    let is_asked = state.is_scrub_asked();
    drop(state);
    let written = superblock.map(|superblock| write_superblock(&*files, superblock)).transpose();
    if let Err(failure) = repaired.and(written) {
        let mut state = slot.lock();
        if state.kept().is_some_and(|kept| kept.number() == number) {
            match failure {
                Failure::Full { .. } => tracing::warn!(%failure, "a damaged block could not be written again"),
                Failure::Lost { .. } => state.lose(&failure),
            }
        }
    }
    is_asked
}

/// Threads of the keeper: one that scrubs, and with stores one that syncs.
pub(super) fn start(host: &Arc<Host>) -> std::io::Result<Vec<JoinHandle<()>>> {
    let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| std::thread::Builder::new().name(name.into()).spawn(run);
    let shared = Arc::clone(host);
    let mut threads = vec![spawn("volume-keeper", Box::new(move || keep(&shared)))?];
    if let Some(stores) = host.stores() {
        let (shared, stores) = (Arc::clone(host), Arc::clone(stores));
        match spawn("volume-sync", Box::new(move || sync(&shared, &stores))) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                host.stop();
                for thread in threads {
                    let _ = thread.join(); // a panic was reported where it happened
                }
                return Err(error);
            }
        }
    }
    Ok(threads)
}

/// How often it is looked whether a checkpoint or a scrub is due: a segment takes longer to fill.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// While a checkpoint waits for a sync, which takes some of these.
const SYNC_PAUSE: Duration = Duration::from_millis(2);

/// Between two pieces of a scrub for which a client waits: writers get the copy's lock meanwhile.
const PIECE_PAUSE: Duration = Duration::from_millis(1);
