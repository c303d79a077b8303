//! Exports: the regions of copies, as the writers of the volumes, and hosts that only read, read them without asking.
//!
//! A writer that asks gets a grant for its connection, with the keys of its copy's region. The secret of the grant is
//! derived from the key of the connection's session, and so known to the two ends only. The grant is withdrawn when the
//! connection is over, or when the server promises to obey another writer: a reader over a network is cut off then,
//! and one on this host reads so in the region's line. The grant of a client that only reads ends with its connection.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fmt, io};

use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, RegionId, Regions, TransportKind};
use remora_messenger::{Address, Connection};

use super::ServerOptions;
use crate::link;

/// See the module's text.
pub(super) struct Exports {
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
    pub(super) fn open(address: &Address, options: &ServerOptions) -> io::Result<Exports> {
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
    pub(super) fn wait(&self) {
        if self.registering.as_ref().is_some_and(|registering| !registering.wait(REGISTERED_WITHIN)) {
            tracing::warn!("memory is not yet registered for RDMA after {REGISTERED_WITHIN:?}: until then clients ask");
        }
    }

    /// Makes a region readable for those that have a grant; by RDMA a little later. `None`: no transport can. For
    /// calls, which must not wait.
    pub(super) fn export(&self, memory: &Arc<Memory>) -> Option<RegionId> {
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
    pub(super) fn export_and_wait(&self, memory: &Arc<Memory>) -> Option<RegionId> {
        let id = RegionId { generation: self.regions.fetch_add(1, Ordering::Relaxed), region: 0 };
        let exported = self.exporters.iter().filter(|exporter| export(&***exporter, id, memory)).count();
        (exported > 0).then_some(id)
    }

    /// Ends what [`Exports::export`] began.
    pub(super) fn revoke(&self, region: RegionId) {
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
    pub(super) fn grant(&self, connection: &Connection, region: RegionId) -> Vec<Vec<u8>> {
        let Some(secret) = link::region_secret(connection) else { return Vec::new() };
        for exporter in &self.exporters {
            exporter.grant(connection.id(), secret, Regions::only([region]));
        }
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(region).ok());
        keys.map(|key| key.as_bytes().to_vec()).collect()
    }

    /// The client of a connection must not read any more. It may never have had a grant.
    pub(super) fn withdraw(&self, connection: &Connection) {
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
pub(super) struct Registering {
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
    pub(super) fn start(exporter: Arc<dyn Exporter>) -> io::Result<Registering> {
        let shared = Arc::new(Shared { exporter, queue: Mutex::default(), changed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("volume-registrar".into()).spawn(move || of_thread.run())?;
        Ok(Registering { shared, thread: Some(thread) })
    }

    /// Makes memory readable, soon.
    pub(super) fn export(&self, id: RegionId, memory: &Arc<Memory>) {
        self.shared.add(Task::Export(id, Arc::clone(memory)));
    }

    /// Ends what [`Registering::export`] began, or will. Nothing is left of it once the thread has come to this.
    pub(super) fn revoke(&self, id: RegionId) {
        self.shared.add(Task::Revoke(id));
    }

    /// Waits until everything so far is done, but not longer than `limit`. Returns whether it is.
    pub(super) fn wait(&self, limit: Duration) -> bool {
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
mod tests {
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
