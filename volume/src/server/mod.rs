//! Server: lends the memory of its host to volumes. It obeys the rules of [`crate::rules`], and knows no other server
//! until a writer names one from which a copy takes what it lacks.
//!
//! ```text
//!   messenger's workers ── Host: which connection is for which volume
//!                            │
//!                            ▼ one lock per volume
//!                          Slot: the copy's rules, its store, its connections ◀── Borrower: a thread per catch-up
//! ```
//!
//! - `host`: connections, the memory that volumes share, and what clients ask of a volume without opening it; and the
//!   threads that sync, make checkpoints, and scrub.
//! - `slot`: one volume. Every call of a connection is done here, in order, and answered; and the steps of its
//!   failures, reads, catch-up and scrub. At its end: its growth into a larger one.
//! - Here: the regions of copies, readable for their writers, also by RDMA (`Exports`).
//! - `kept`: a copy's store, who waits for it, and how far its scrub is.
//! - `puller`: takes large writes out of their writer's memory, or out of another server's, and what writers may have
//!   under way; and the borrower, which brings a copy up to date from another server.
//!
//! Who ends what: the [`Server`] its messenger's workers, the threads of borrowers, pullers and growth, and the
//! keeper's; its exports the one that registers. A borrower ends by itself when its copy is whole, or when its writer's
//! connection is over; a puller with that connection; growth when the copy is the larger one.
//!
//! The writers of the volumes, and hosts that only read, read the regions of copies without asking. A writer that asks
//! gets a grant for its connection, with the keys of its copy's region. The secret of the grant is derived from the key
//! of the connection's session, and so known to the two ends only. The grant is withdrawn when the connection is over,
//! or when the server promises to obey another writer: a reader over a network is cut off then, and one on this host
//! reads so in the region's line. The grant of a client that only reads ends with its connection.

mod host;
mod kept;
mod puller;
mod slot;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fmt, io};

use bytes::Bytes;
use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, RegionId, Regions, TransportKind};
use remora_messenger::{Address, Connection, Messenger};

use crate::link::{self, Rdma, Security};
use crate::shape::VolumeId;
use crate::wire::{Cause, Reply, Status, Used};
use host::Host;

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Bytes of memory for copies.
    pub memory: u64,
    /// Bytes that all writers together may have under way here: at least 4 MiB for each.
    pub staging: u64,
    /// What protects connections, to clients and between servers.
    pub security: Security,
    /// Threads that serve connections.
    pub workers: usize,
    /// Whether clients on this host may read copies in place.
    pub shm: bool,
    /// The port at which clients on other hosts may read copies without asking, at the server's address; 0 is any port.
    /// `None`: they ask. These reads are neither encrypted nor authenticated, except that the reader proves its right.
    pub lanes: Option<u16>,
    /// By which devices copies may be read by RDMA. These reads are protected as those at `lanes`. All of `memory` that
    /// is used for copies stays in the host's memory then.
    pub rdma: Rdma,
    /// The folder for the copies' stores: what a server has there it has again after it was started again. `None`: the
    /// copies end with the server.
    pub store: Option<PathBuf>,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            memory: MEMORY_BYTES,
            staging: STAGING_BYTES,
            security: Security::default(),
            workers: WORKERS,
            shm: true,
            lanes: None,
            rdma: Rdma::default(),
            store: None,
        }
    }
}

/// A running server. Dropping it ends it, and with it the copies that have no store.
#[derive(Debug)]
pub struct Server {
    host: Arc<Host>,
    messenger: Option<Messenger>,
    address: Address,
    keepers: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// The address cannot be listened at, the system provides no thread, or the stores cannot be used.
    /// [`io::ErrorKind::Unsupported`]: RDMA cannot be offered as [`ServerOptions::rdma`] says.
    pub fn start(address: &Address, options: &ServerOptions) -> io::Result<Server> {
        let host = Host::new(options, Exports::open(address, options)?)?;
        let settings = link::options(&options.security, options.workers, MAX_SESSIONS);
        let messenger = Messenger::new(link::server_policy(), &settings, Arc::<Host>::clone(&host))?;
        let address = messenger.listen(address)?;
        let keepers = host::start(&host)?;
        Ok(Server { host, messenger: Some(messenger), address, keepers })
    }

    /// Where it listens, with the port that the system chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// How its copy of a volume stands; `None` if it holds none.
    pub fn standing(&self, volume: VolumeId) -> Option<crate::rules::Standing> {
        self.host.standing(volume)
    }

    /// Bytes that writers may have under way here at present, and the most that it ever was.
    pub fn staging(&self) -> (u64, u64) {
        self.host.staging()
    }

    /// How each of its copies stands. What is used of the server is in [`Server::used`], not here.
    pub fn statuses(&self) -> Vec<(VolumeId, Status)> {
        self.host.statuses()
    }

    /// What copies and writers use of its memory, and what writers may have under way.
    pub fn used(&self) -> (Used, Used) {
        self.host.used()
    }

    /// Ends all connections and threads.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.host.stop();
        drop(self.messenger.take()); // no call arrives after this, so no further borrower begins
        self.host.join();
        for keeper in self.keepers.drain(..) {
            let _ = keeper.join(); // a panic was reported where it happened
        }
        self.host.close_stores();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// A modest part of a server's memory. Operators give more.
const MEMORY_BYTES: u64 = 1 << 30;

/// Eight writers with all the room that one can have, or 64 with the least.
const STAGING_BYTES: u64 = 256 << 20;

/// One does checksums while another one receives.
const WORKERS: usize = 2;

/// A volume has one writer and at most four borrowers: enough for some hundred volumes.
const MAX_SESSIONS: usize = 1024;

/// Budget: the memory of a server that copies may take.
#[derive(Debug)]
struct Budget {
    left: Mutex<u64>,
    most: u64,
}

/// A part of the budget, until dropped.
#[derive(Debug)]
struct Grant {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    fn new(bytes: u64) -> Arc<Budget> {
        Arc::new(Budget { left: Mutex::new(bytes), most: bytes })
    }

    /// Takes a part, if so much is left.
    fn take(self: &Arc<Budget>, bytes: u64) -> Option<Grant> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.checked_sub(bytes)?;
        Some(Grant { budget: Arc::clone(self), bytes })
    }

    /// How much of it was taken.
    fn used(&self) -> Used {
        let left = *self.left.lock().unwrap_or_else(PoisonError::into_inner);
        Used { bytes: self.most - left, most: self.most }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        *self.budget.left.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
    }
}

// Answers: how a client is answered, and what happens to one that cannot be.

/// Answers. A client that does not read its answers is disconnected.
fn answer(connection: &Connection, reply: &Reply, data: Bytes) {
    let sent = match link::reply(reply, data) {
        Ok(message) => connection.send(message).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = sent {
        tracing::info!(peer = %connection.peer(), %error, "a client could not be answered: its connection is ended");
        connection.abort();
    }
}

/// Refuses, and ends the connection: what its client sends further builds on what was refused.
fn refuse(connection: &Connection, cause: Cause, text: &str) {
    tracing::debug!(peer = %connection.peer(), ?cause, text, "refused");
    answer(connection, &Reply::Refused { cause, text: text.into() }, Bytes::new());
    connection.close();
}

/// What a connection for reading is told that asks for anything else.
const ONLY_READS: &str = "this connection is for reading the copy's region";

/// What a connection for loans is told that asks for anything else.
const ONLY_LOANS: &str = "this connection is for loans";

/// See the module's text.
struct Exports {
    exporters: Vec<Arc<dyn Exporter>>,
    /// Of the one that exports by RDMA, if there is one.
    registering: Option<Registering>,
    /// Regions that were exported. No name is used twice.
    regions: AtomicU64,
}

impl Exports {
    /// Opens the transports. One that this host does not have is left out: clients ask instead.
    ///
    /// # Errors
    /// [`ServerOptions::rdma`] names addresses at which RDMA cannot be offered.
    fn open(address: &Address, options: &ServerOptions) -> io::Result<Exports> {
        let mut exporters: Vec<Arc<dyn Exporter>> = Vec::new();
        if options.shm {
            match ShmExporter::bind(ShmOptions::default()) {
                Ok(shm) => exporters.push(Arc::new(shm)),
                Err(error) => tracing::warn!(%error, "no shared memory for the volumes of this host"),
            }
        }
        if let (Some(port), Some(address)) = (options.lanes, link::socket_address(address)) {
            match tcp(SocketAddr::new(address.ip(), port)) {
                Ok(tcp) => exporters.push(Arc::new(tcp)),
                Err(error) => tracing::warn!(%error, port, "no port for one-sided reads: clients ask instead"),
            }
        }
        let rdma = options.rdma.exporter().map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error))?;
        let rdma: Option<Arc<dyn Exporter>> = rdma.map(Arc::from);
        let registering = rdma.clone().map(Registering::start).transpose()?;
        exporters.extend(rdma);
        Ok(Exports { exporters, registering, regions: AtomicU64::new(0) })
    }

    /// Waits until everything that was exported can be read by RDMA, for [`REGISTERED_WITHIN`] at most. For the start
    /// of a server: nothing else waits.
    fn wait(&self) {
        if self.registering.as_ref().is_some_and(|registering| !registering.wait(REGISTERED_WITHIN)) {
            tracing::warn!("memory is not yet registered for RDMA after {REGISTERED_WITHIN:?}: until then clients ask");
        }
    }

    /// Makes a region readable for those that have a grant; by RDMA a little later. `None`: no transport can. For
    /// calls, which must not wait.
    fn export(&self, memory: &Arc<Memory>) -> Option<RegionId> {
        let id = RegionId { generation: self.regions.fetch_add(1, Ordering::Relaxed), region: 0 };
        let mut is_exported = self.registering.is_some();
        if let Some(registering) = &self.registering {
            registering.export(id, memory);
        }
        for exporter in self.at_once() {
            is_exported |= export(&**exporter, id, memory);
        }
        is_exported.then_some(id)
    }

    /// As [`Exports::export`], but when it returns, the region can be read by RDMA as well. For threads that may wait.
    fn export_and_wait(&self, memory: &Arc<Memory>) -> Option<RegionId> {
        let id = RegionId { generation: self.regions.fetch_add(1, Ordering::Relaxed), region: 0 };
        let exported = self.exporters.iter().filter(|exporter| export(&***exporter, id, memory)).count();
        (exported > 0).then_some(id)
    }

    /// Ends what [`Exports::export`] began.
    fn revoke(&self, region: RegionId) {
        if let Some(registering) = &self.registering {
            registering.revoke(region);
        }
        self.at_once().for_each(|exporter| exporter.revoke(region));
    }

    /// The exporters that need no registration.
    fn at_once(&self) -> impl Iterator<Item = &Arc<dyn Exporter>> {
        self.exporters.iter().filter(|exporter| exporter.kind() != TransportKind::Verbs)
    }

    /// Lets the client of a connection read. Returns the keys of the region, one for each transport.
    fn grant(&self, connection: &Connection, region: RegionId) -> Vec<Vec<u8>> {
        let Some(secret) = link::region_secret(connection) else { return Vec::new() };
        for exporter in &self.exporters {
            exporter.grant(connection.id(), secret, Regions::only([region]));
        }
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(region).ok());
        keys.map(|key| key.as_bytes().to_vec()).collect()
    }

    /// The client of a connection must not read any more. It may never have had a grant.
    fn withdraw(&self, connection: &Connection) {
        self.exporters.iter().for_each(|exporter| exporter.withdraw(connection.id()));
    }
}

/// Returns whether it can be read.
fn export(exporter: &dyn Exporter, id: RegionId, memory: &Arc<Memory>) -> bool {
    let exported = exporter.export(id, Arc::clone(memory));
    if let Err(error) = &exported {
        tracing::warn!(transport = %exporter.kind(), %error, "memory cannot be read over this transport");
    }
    exported.is_ok()
}

fn tcp(at: SocketAddr) -> Result<TcpExporter, String> {
    let exporter = TcpExporter::new(TcpOptions::default(), None).map_err(|error| error.to_string())?;
    exporter.listen(at).map_err(|error| error.to_string())?;
    Ok(exporter)
}

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.exporters.iter().map(|exporter| exporter.kind())).finish()
    }
}

/// A terabyte, at some tenths of a second for each GiB.
const REGISTERED_WITHIN: Duration = Duration::from_secs(300);

/// Memory is made readable by RDMA in a thread of its own. All of its pages must be there for the card,
/// and stay in place. That takes some tenths of a second for each GiB, so no call waits for it.
///
/// ```text
///   export(id), revoke(id) ──▶ queue ──▶ thread: one after the other, in their order ──▶ Exporter
/// ```
///
/// A region has a key once it is registered. Readers that come earlier read it by another transport, or ask. The owner
/// ends the thread by dropping this: what waits is left out, and what has begun is waited for.
struct Registering {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    exporter: Arc<dyn Exporter>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Task>,
    /// The thread does the task before these.
    is_busy: bool,
    is_over: bool,
}

enum Task {
    Export(RegionId, Arc<Memory>),
    Revoke(RegionId),
}

impl Registering {
    fn start(exporter: Arc<dyn Exporter>) -> io::Result<Registering> {
        let shared = Arc::new(Shared { exporter, queue: Mutex::default(), changed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("volume-registrar".into()).spawn(move || of_thread.run())?;
        Ok(Registering { shared, thread: Some(thread) })
    }

    /// Makes memory readable, soon.
    fn export(&self, id: RegionId, memory: &Arc<Memory>) {
        self.shared.add(Task::Export(id, Arc::clone(memory)));
    }

    /// Ends what [`Registering::export`] began, or will. Nothing is left of it once the thread has come to this.
    fn revoke(&self, id: RegionId) {
        self.shared.add(Task::Revoke(id));
    }

    /// Waits until everything so far is done, but not longer than `limit`. Returns whether it is.
    fn wait(&self, limit: Duration) -> bool {
        let is_at_work = |queue: &mut Queue| queue.is_busy || !queue.waiting.is_empty();
        let waited = self.shared.changed.wait_timeout_while(self.shared.queue(), limit, is_at_work);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !is_at_work(&mut queue)
    }
}

impl Drop for Registering {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.waiting.clear();
        queue.is_over = true;
        self.shared.changed.notify_all();
        drop(queue);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was reported where it happened
        }
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, task: Task) {
        self.queue().waiting.push_back(task);
        self.changed.notify_all();
    }

    /// The thread.
    fn run(&self) {
        while let Some(task) = self.next() {
            match task {
                Task::Export(id, memory) => {
                    let bytes = memory.length();
                    match self.exporter.export(id, memory) {
                        Ok(()) => tracing::info!(region = %id, bytes, "memory is registered for RDMA"),
                        Err(error) => {
                            tracing::warn!(region = %id, bytes, %error, "memory cannot be read by RDMA");
                        }
                    }
                }
                Task::Revoke(id) => self.exporter.revoke(id),
            }
        }
    }

    fn next(&self) -> Option<Task> {
        let mut queue = self.queue();
        queue.is_busy = false;
        self.changed.notify_all();
        while !queue.is_over {
            if let Some(task) = queue.waiting.pop_front() {
                queue.is_busy = true;
                return Some(task);
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

#[cfg(test)]
mod export_tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc::{self, Receiver, Sender};

    use remora_fabric::{Error, Pages, RegionKey, Regions, Secret, TransportKind};

    use super::*;

    /// An exporter whose registrations last until they are let go on.
    struct Slow {
        goes_on: Mutex<Receiver<()>>,
        done: Sender<(&'static str, u64)>,
    }

    impl Exporter for Slow {
        fn kind(&self) -> TransportKind {
            TransportKind::Verbs
        }

        fn export(&self, id: RegionId, _: Arc<Memory>) -> Result<(), Error> {
            self.goes_on.lock().unwrap().recv().unwrap();
            self.done.send(("export", id.generation)).unwrap();
            Ok(())
        }

        fn revoke(&self, id: RegionId) {
            self.done.send(("revoke", id.generation)).unwrap();
        }

        fn grant(&self, _: u64, _: Secret, _: Regions) {}

        fn withdraw(&self, _: u64) {}

        fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
            Err(Error::NotExported(id))
        }

        fn bytes_served(&self) -> u64 {
            0
        }
    }

    #[test]
    fn no_caller_waits_for_a_registration_and_what_is_revoked_meanwhile_is_revoked_after_it() {
        let ((go_on, goes_on), (done, what)) = (mpsc::channel(), mpsc::channel());
        let slow = Arc::new(Slow { goes_on: Mutex::new(goes_on), done });
        let registering = Registering::start(slow).unwrap();
        let memory = Arc::new(Memory::create("test", 4096, Pages::Small).unwrap());
        let id = |generation| RegionId { generation, region: 0 };
        registering.export(id(1), &memory);
        registering.revoke(id(1));
        registering.export(id(2), &memory);
        assert!(what.try_recv().is_err(), "nothing is registered yet, and no call has waited");
        assert!(!registering.wait(Duration::from_millis(1)), "it has a bound");
        (0..2).for_each(|_| go_on.send(()).unwrap());
        assert!(registering.wait(Duration::from_secs(30)));
        let all: Vec<_> = what.try_iter().collect();
        assert_eq!(all, [("export", 1), ("revoke", 1), ("export", 2)]);
        go_on.send(()).unwrap();
        registering.export(id(3), &memory);
        drop(registering); // it ends its thread, or this test does not
    }
}

/// Servers whose devices fail, or whose memory and files change by themselves; and questions about copies which the
/// tests can change: scrubs, what is said of a catch-up, a removal.
#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::{Arc, Mutex, PoisonError};
    use std::time::{Duration, Instant};

    use remora_messenger::Address;

    use super::slot::Slot;
    use super::{Budget, Server, ServerOptions, Used};
    use crate::client::{ClientOptions, Volume, new_id};
    use crate::disk::failing;
    use crate::link::{Caller, Security};
    use crate::rules::{ServerId, State};
    use crate::shape::{BLOCK_BYTES, Copies, Shape};
    use crate::wire::{Call, Cause, Findings, Reply};

    /// Which folder fails is said for the process.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    fn start(address: &str, store: &Path) -> Server {
        let options = ServerOptions { store: Some(store.into()), shm: false, ..ServerOptions::default() };
        Server::start(&address.parse().unwrap(), &options).unwrap()
    }

    fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !holds() {
            assert!(Instant::now() < deadline, "not within 30 s: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    struct Scene {
        folder: tempfile::TempDir,
        shape: Shape,
        servers: Vec<Option<Server>>,
        addresses: Vec<Address>,
    }

    impl Scene {
        fn new() -> Scene {
            let folder = tempfile::tempdir().unwrap();
            let shape = Shape::new(new_id().unwrap(), 500, Copies::new(3, 2).unwrap()).unwrap();
            let store = |number: usize| folder.path().join(number.to_string());
            let servers: Vec<_> = (0..3).map(|number| start("tcp:127.0.0.1:0", &store(number))).collect();
            let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
            Volume::create(shape, &addresses, &ClientOptions::default()).unwrap();
            Scene { folder, shape, servers: servers.into_iter().map(Some).collect(), addresses }
        }

        fn open(&self) -> Volume {
            Volume::open(self.shape, &self.addresses, &ClientOptions::default()).unwrap()
        }

        fn state(&self, number: usize) -> State {
            let standing = self.servers[number].as_ref().and_then(|server| server.standing(self.shape.volume()));
            standing.unwrap_or_default().state
        }
    }

    fn write(volume: &Volume, number: u8) {
        volume.write(0, vec![number; 200 * BLOCK_BYTES]).unwrap();
        volume.flush().unwrap();
    }

    #[test]
    fn a_copy_whose_sync_fails_is_lost_and_not_believed_by_the_next_process_and_taken_back() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scene = Scene::new();
        let volume = scene.open();
        write(&volume, 1);
        failing::set(Some(&scene.folder.path().join("0")));
        write(&volume, 2); // the others are enough
        until("the copy is lost", || scene.state(0) == State::Empty);
        // As long as the device fails, no store can be made.
        write(&volume, 3);
        assert_eq!(scene.state(0), State::Empty);
        scene.servers[0].take().unwrap().stop();
        failing::set(None);
        // In the files is what the page cache has, and looks whole.
        scene.servers[0] = Some(start(&scene.addresses[0].to_string(), &scene.folder.path().join("0")));
        assert_ne!(scene.state(0), State::Whole);
        until("the copy is taken back", || {
            volume.write(300, vec![9; BLOCK_BYTES]).unwrap();
            scene.state(0) == State::Whole
        });
        // It alone is left, with one more.
        scene.servers[1].take().unwrap().stop();
        write(&volume, 4);
        assert_eq!(volume.read(7, 1).unwrap()[..], [4; BLOCK_BYTES]);
    }

    #[test]
    fn a_scrub_repairs_a_store_out_of_memory_and_a_copy_whose_memory_is_damaged_is_taken_back() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scene = Scene::new();
        let volume = scene.open();
        write(&volume, 1);
        let host = std::sync::Arc::clone(&scene.servers[0].as_ref().unwrap().host);
        let slot = host.slots().pop().unwrap();
        let scrubbed = || slot.lock().kept().map_or(0, |kept| kept.journal().scrubbed());
        until("the first scrub is complete", || scrubbed() > 0);
        // The memory of a block changes by itself, and the next scrub is due.
        let damage = |block: u64| {
            let mut state = slot.lock();
            let (kept, memory) = state.kept_and_memory().unwrap();
            memory.place(block, &[7; BLOCK_BYTES]);
            kept.journal().next_superblock(|superblock| superblock.scrubbed = 0);
        };
        damage(42);
        until("the scrub has found it", || slot.lock().standing().state != State::Whole || scrubbed() > 0);
        until("the copy is taken back", || {
            volume.write(300, vec![9; BLOCK_BYTES]).unwrap();
            scene.state(0) == State::Whole && scrubbed() > 0
        });
        let mut bytes = vec![0; BLOCK_BYTES];
        let read = slot.lock().kept_and_memory().unwrap().1.get(42, &mut bytes).is_ok();
        assert!(read && bytes == [1; BLOCK_BYTES]);

        // After a restart the blocks are in the extents. One changes there.
        drop((volume, slot, host));
        for restart in 0..2 {
            scene.servers[0].take().unwrap().stop();
            let store = scene.folder.path().join("0");
            if restart == 1 {
                let path = store.join(scene.shape.volume().to_string()).join("extents");
                let mut extents = std::fs::read(&path).unwrap();
                let at = extents.windows(512).rposition(|window| window == [1; 512]).unwrap();
                extents[at] ^= 1;
                std::fs::write(&path, extents).unwrap();
            }
            scene.servers[0] = Some(start(&scene.addresses[0].to_string(), &store));
            if restart == 0 {
                let folder = store.join(scene.shape.volume().to_string());
                until("a checkpoint", || std::fs::read_dir(&folder).unwrap().count() == 3);
                repairs(&scene, &folder.join("extents"));
            }
        }
        assert_eq!(scene.state(0), State::Behind);
        let volume = scene.open();
        assert_eq!(scene.state(0), State::Whole, "it was taken back before the generation began");
        assert_eq!(volume.read(42, 1).unwrap()[..], [1; BLOCK_BYTES]);
    }

    /// A block changes in the extents of a server that runs: the next scrub writes it again, out of memory.
    fn repairs(scene: &Scene, extents: &Path) {
        let host = std::sync::Arc::clone(&scene.servers[0].as_ref().unwrap().host);
        let slot = host.slots().pop().unwrap();
        let before = std::fs::read(extents).unwrap();
        let at = before.windows(512).rposition(|window| window == [1; 512]).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(extents).unwrap();
        file.write_all_at(&[8], at as u64).unwrap();
        slot.lock().kept().unwrap().journal().next_superblock(|superblock| superblock.scrubbed = 0);
        until("the block is repaired", || std::fs::read(extents).unwrap() == before);
        assert_eq!(scene.state(0), State::Whole);
    }

    #[test]
    fn what_is_taken_is_missing_until_it_is_dropped() {
        let budget = Budget::new(10);
        let grant = budget.take(8);
        assert!(grant.is_some() && budget.take(3).is_none());
        assert_eq!(budget.used(), Used { bytes: 8, most: 10 });
        drop(grant);
        assert!(budget.take(10).is_some());
    }

    struct InMemory {
        shape: Shape,
        servers: Vec<Server>,
        addresses: Vec<Address>,
    }

    impl InMemory {
        fn new(blocks: u64) -> InMemory {
            let shape = Shape::new(new_id().unwrap(), blocks, Copies::new(3, 2).unwrap()).unwrap();
            let options = ServerOptions { shm: false, ..ServerOptions::default() };
            let start = |_| Server::start(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap();
            let servers: Vec<_> = (0..3).map(start).collect();
            let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
            Volume::create(shape, &addresses, &ClientOptions::default()).unwrap();
            InMemory { shape, servers, addresses }
        }

        fn slot(&self, number: usize) -> Arc<Slot> {
            self.servers[number].host.slots().pop().unwrap()
        }

        fn state(&self, number: usize) -> State {
            self.slot(number).lock().standing().state
        }

        fn scrub(&self) -> Vec<Findings> {
            let mut told = vec![0; 3];
            let found = Volume::scrub(self.shape, &self.addresses, &ClientOptions::default(), |server, findings| {
                assert!(findings.read >= told[server], "it goes forward");
                told[server] = findings.read;
            });
            assert_eq!(told, [self.shape.blocks(); 3]);
            found.unwrap().into_iter().map(Result::unwrap).collect()
        }
    }

    #[test]
    fn a_scrub_finds_damage_in_a_copy_in_memory_which_the_open_volume_takes_back() {
        let scene = InMemory::new(1000);
        let volume = Volume::open(scene.shape, &scene.addresses, &ClientOptions::default()).unwrap();
        volume.write(0, vec![1; 700 * BLOCK_BYTES]).unwrap();
        // All copies, not only as many as a write waits for.
        until("all have the write", || (0..3).all(|number| scene.slot(number).lock().standing().applied.counter() > 0));
        let well = Findings { read: 1000, repaired: 0, damaged: 0, is_complete: true };
        assert_eq!(scene.scrub(), [well; 3]);
        let damage = |number: usize, blocks: &[u64]| {
            let slot = scene.slot(number);
            let state = slot.lock();
            blocks.iter().for_each(|block| state.memory().unwrap().place(*block, &[7; BLOCK_BYTES]));
        };
        damage(1, &[3, 699]);
        let found = scene.scrub();
        assert_eq!(found, [well, Findings { damaged: 2, ..well }, well]);
        until("the copy is taken back", || scene.state(1) == State::Whole);
        assert_eq!(scene.scrub(), [well; 3]);

        // Without a writer it stays behind, and says so.
        drop(volume);
        damage(2, &[500]);
        assert_eq!(scene.scrub(), [well, well, Findings { damaged: 1, ..well }]);
        assert_eq!(scene.state(2), State::Behind);
        let _volume = Volume::open(scene.shape, &scene.addresses, &ClientOptions::default()).unwrap();
        until("the next writer takes it back", || scene.state(2) == State::Whole);
        assert_eq!(scene.scrub(), [well; 3]);
    }

    #[test]
    fn a_catch_up_is_seen_in_the_status_and_by_the_writer_until_the_copy_is_whole() {
        let scene = InMemory::new(1000);
        let volume = Volume::open(scene.shape, &scene.addresses, &ClientOptions::default()).unwrap();
        volume.write(0, vec![1; 700 * BLOCK_BYTES]).unwrap();
        until("all are members", || volume.members().len() == 3);
        let status = || {
            let statuses = Volume::statuses(scene.shape, &scene.addresses[..], &ClientOptions::default()).unwrap();
            statuses.into_iter().next().unwrap().unwrap()
        };
        assert_eq!((status().compared, volume.compared(ServerId(0))), (None, None));
        // No lender answers while its copy's lock is held.
        let lenders = [scene.slot(1), scene.slot(2)];
        let held = lenders.each_ref().map(|lender| lender.lock());
        scene.slot(0).lock().found_damaged(&[3]);
        let compared = || scene.slot(0).lock().status().compared;
        until("a catch-up has begun", || compared() == Some(0) && volume.compared(ServerId(0)) == Some(0));
        drop(held);
        until("the copy is taken back", || scene.state(0) == State::Whole && volume.members().len() == 3);
        assert_eq!((status().compared, volume.compared(ServerId(0))), (None, None));
    }

    #[test]
    fn a_server_refuses_to_remove_the_copy_of_a_writer_at_work_whatever_its_client_has_asked_before() {
        let scene = InMemory::new(100);
        let volume = Volume::open(scene.shape, &scene.addresses, &ClientOptions::default()).unwrap();
        volume.write(0, vec![1; BLOCK_BYTES]).unwrap();
        let ask = |takes_over| {
            let caller = Caller::connect(&scene.addresses[0], &Security::default()).unwrap();
            let call = Call::Remove { shape: scene.shape, takes_over };
            caller.ask::<String>(&call, Duration::from_secs(20), || Ok(())).unwrap().0
        };
        let refused = ask(false);
        assert!(matches!(refused, Reply::Refused { cause: Cause::InUse, .. }), "{refused:?}");
        assert_eq!(scene.state(0), State::Whole);
        assert_eq!(ask(true), Reply::Removed { was_there: true });
    }
}
