//! The source's end: its regions, readers and devices, and the thread that admits readers. No thread sends bytes: the
//! card does.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_rdma::bindings as ffi;
use remora_rdma::cm::{Event, Events, Id, ReadDepths};
use remora_rdma::device::{Alarm, Device, NO_QUEUE_PAIR};
use remora_rdma::objects::{
    Access, Capacity, Channel, Completed, Completions, Domain, NO_RIGHTS, QueuePair, Registration,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

use super::{Grant, INCOMING, OUTGOING, Verbs, VerbsOptions, buffer};
use crate::admission::{self, Admission, Format, Grants, Hello, Limits, PROOF_BYTES, Refusal, Source, Verdict};
use crate::{Denial, Error, Exporter, Memory, RegionId, RegionKey, Regions, Secret, TransportKind, verbs};

// The source's end: which regions there are and who may read them. The thread that talks to readers is in `serve`. No
// thread sends bytes: the card does.

/// Exports memory by RDMA. Dropping it closes all connections and ends its thread.
pub struct VerbsExporter {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    devices: Vec<String>,
    owner: Option<JoinHandle<()>>,
}

impl VerbsExporter {
    /// Listens at each of `addresses`, by the device that the address belongs to; an unspecified address stands for all
    /// devices. Port 0 selects a free port. Several addresses are several ports that a reader may use in parallel.
    ///
    /// # Errors
    /// [`Error::NoRdma`], with what is missing; [`Error::Unreachable`] for an address that belongs to no RDMA device;
    /// [`Error::Misuse`] for options out of range.
    pub fn listen(options: VerbsOptions, addresses: &[SocketAddr]) -> Result<VerbsExporter, Error> {
        options.check()?;
        if addresses.is_empty() || addresses.len() > verbs::MAX_ADDRESSES {
            return Err(Error::Misuse("RDMA addresses: give 1 to 8"));
        }
        let devices = Device::all()?;
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("creating an eventfd"))?;
        let events = Events::new()?;
        let (mut listeners, mut bound) = (Vec::new(), Vec::new());
        for address in addresses {
            let id = Id::new(&events)?;
            let port = id.listen(*address).map_err(|source| unreachable(*address, source))?;
            bound.push(SocketAddr::new(address.ip(), port));
            listeners.push(id);
        }
        let contexts = contexts(&listeners, devices)?;
        for context in &contexts {
            let device = context.device();
            permit(device.name(), device.is_iwarp(), options.iwarp)?;
        }
        let listeners = bound.iter().zip(listeners).map(|(address, id)| Listener::new(*address, id)).collect();
        let names = contexts.iter().map(|context| context.device().name().to_owned()).collect();
        let server = Server::new(options, events, listeners, contexts);
        let shared = Arc::new(Shared { server: Mutex::new(server), stop });
        let mut exporter = VerbsExporter { shared, addresses: bound, devices: names, owner: None };
        exporter.owner = Some(start(exporter.shared.clone())?);
        Ok(exporter)
    }

    /// The addresses that it listens at.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The names of the devices that it serves by.
    pub fn devices(&self) -> &[String] {
        &self.devices
    }

    /// The devices, for tests of failures.
    #[cfg(test)]
    pub(super) fn raw_devices(&self) -> Vec<Arc<Device>> {
        self.shared.server().domains().iter().map(|domain| domain.device().clone()).collect()
    }

    /// Number of connections, including those in the handshake.
    pub fn connections(&self) -> usize {
        self.shared.server().readers()
    }

    /// Registers with every device, without holding the lock, as it may take long.
    fn register(&self, memory: &Arc<Memory>) -> Result<Exported, Error> {
        let domains = self.shared.server().domains();
        Exported::to(&domains, memory)
    }
}

impl Exporter for VerbsExporter {
    fn kind(&self) -> TransportKind {
        TransportKind::Verbs
    }

    fn export(&self, id: RegionId, memory: Arc<Memory>) -> Result<(), Error> {
        let cached = self.shared.server().regions.cached(&memory);
        let exported = match cached {
            Some(exported) => exported,
            None => self.register(&memory)?,
        };
        self.shared.server().regions.export(id, exported)
    }

    /// Registers `memory` now and keeps it registered until it is [forgotten](Exporter::forget), so that exporting it
    /// is fast. Backs all of it with pages, which stay in place.
    ///
    /// # Errors
    /// [`Error::NoRdma`] if the locked-memory limit is too low; [`Error::System`].
    fn prepare(&self, memory: &Arc<Memory>) -> Result<(), Error> {
        if self.shared.server().regions.cached(memory).is_some() {
            return Ok(());
        }
        let exported = self.register(memory)?;
        self.shared.server().regions.cache(exported);
        Ok(())
    }

    fn forget(&self, memory: &Arc<Memory>) {
        let forgotten = self.shared.server().regions.forget(memory);
        // Without holding the lock: removing a registration unpins all its pages.
        drop(forgotten);
    }

    /// When this returns, the connections are closed and with them the right to read. The registration is removed,
    /// unless it was [prepared](Exporter::prepare) for the next region of the same memory.
    fn revoke(&self, id: RegionId) {
        let region = self.shared.server().revoke(id);
        // Without holding the lock: removing a registration unpins all its pages.
        drop(region);
    }

    fn grant(&self, session: u64, secret: Secret, regions: Regions) {
        self.shared.server().grant(session, secret, regions);
    }

    fn withdraw(&self, session: u64) {
        self.shared.server().withdraw(session);
    }

    fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
        let length = self.shared.server().region_length(id).ok_or(Error::NotExported(id))?;
        verbs::region_key(id, length, &self.addresses)
    }

    /// Always 0: the readers' cards read the memory, without a trace here.
    fn bytes_served(&self) -> u64 {
        0
    }
}

impl Drop for VerbsExporter {
    fn drop(&mut self) {
        if rustix::io::write(self.shared.stop.as_fd(), &1u64.to_ne_bytes()).is_err() {
            tracing::error!("the thread of a verbs exporter cannot be stopped");
        }
        if self.owner.take().is_some_and(|owner| owner.join().is_err()) {
            tracing::error!("the thread of a verbs exporter has panicked");
        }
        self.shared.server().close();
    }
}

/// The devices that the listeners use: those of their addresses, or all.
fn contexts(listeners: &[Id], all: Vec<Arc<Device>>) -> Result<Vec<DeviceContext>, Error> {
    let mut devices: Vec<Arc<Device>> = Vec::new();
    let wanted = if listeners.iter().all(Id::has_device) {
        listeners.iter().map(Id::device).collect::<Result<_, _>>()?
    } else {
        all
    };
    for device in wanted {
        if !devices.iter().any(|known| Arc::ptr_eq(known, &device)) {
            devices.push(device);
        }
    }
    if devices.is_empty() {
        return Err(Error::NoRdma {
            what: "this machine has no RDMA device".into(),
            cure: "run `remora devices`".into(),
        });
    }
    devices.iter().map(DeviceContext::new).collect()
}

/// Fails for an iWARP device that the caller has not asked for.
fn permit(device: &str, is_iwarp: bool, asked: bool) -> Result<(), Error> {
    if !is_iwarp || asked {
        return Ok(());
    }
    Err(Error::NoRdma {
        what: format!("{device} is an iWARP device, on which a connection can read before it proves its session"),
        cure: format!("to use it on a network without strangers, name it: --rdma-device {device}"),
    })
}

fn unreachable(address: SocketAddr, source: std::io::Error) -> Error {
    Error::Unreachable { what: format!("an RDMA device with the address {address}"), source }
}

// The regions, grants, readers and devices of one exporter: what the exporter and its thread share. No byte of a
// region passes through here.
//
// ```text
//   request ─▶ AwaitingProof ── proof is right, region exists ─▶ Reading ── closed, revoked, withdrawn ─▶ (dropped)
//                 │                                                                                          ▲
//                 └── wrong, or too late ─▶ Refused (the denial is being sent) ── sent ──────────────────────┘
// ```
//
// What is true at every moment:
//
// - A reader's queue pair has rights to the source's memory only in the stage `Reading`: with a grant for its region,
//   which is exported. The card knows keys only, no grants: see the parent's text.
// - A reader's connection has one receive posted (the proof) and sends at most one message (the welcome): two
//   completions, for which its queue has room.
// - A reader's connection in another stage has a deadline, and one of the places in [`Unproved`].
// - A failed device has no context, no readers and no registrations here. Its addresses are listened at again as soon
//   as possible.

/// What the exporter and its thread share.
pub(super) struct Shared {
    /// Behind a lock, and not owned by the thread, so that `revoke` has closed the connections when it returns. The
    /// calls under the lock create and destroy objects; none waits for another end.
    pub(super) server: Mutex<Server>,
    /// Written once, to end the thread.
    pub(super) stop: OwnedFd,
}

impl Shared {
    /// Locks the server. A panic leaves it valid, because each method changes one thing.
    pub(super) fn server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory that one device's readers may read.
pub(super) type Registered = Arc<Registration>;

/// Registers memory with a device, for readers.
fn register(domain: &Arc<Domain>, memory: &Arc<Memory>) -> Result<Registered, Error> {
    Ok(Registration::new(domain, memory, Access::RemoteRead)?)
}

/// Exported memory, and its registration with each working device.
#[derive(Clone)]
pub(super) struct Exported {
    memory: Arc<Memory>,
    registrations: Vec<Registered>,
}

impl Exported {
    /// Registers `memory` with devices. A device that fails meanwhile is skipped.
    pub(super) fn to(domains: &[Arc<Domain>], memory: &Arc<Memory>) -> Result<Exported, Error> {
        let mut registrations = Vec::new();
        for domain in domains {
            match register(domain, memory) {
                Ok(registration) => registrations.push(registration),
                Err(error) => {
                    domain.device().handle_events();
                    if !domain.device().has_failed() {
                        return Err(error);
                    }
                }
            }
        }
        Ok(Exported { memory: memory.clone(), registrations })
    }

    fn at(&self, device: &Arc<Device>) -> Option<&Registered> {
        self.registrations.iter().find(|registration| Arc::ptr_eq(registration.domain().device(), device))
    }
}

/// An address that readers connect to.
pub(super) struct Listener {
    /// With the assigned port, which the keys name.
    address: SocketAddr,
    /// `None` while its device is removed.
    id: Option<Id>,
    /// When to listen again, while its device is removed.
    again: Instant,
}

impl Listener {
    pub(super) fn new(address: SocketAddr, id: Id) -> Listener {
        Listener { address, id: Some(id), again: Instant::now() }
    }

    fn lose(&mut self) {
        if self.id.take().is_some() {
            tracing::warn!(address = %self.address, "not listening at this RDMA address until its device is back");
            self.again = Instant::now() + LISTEN_PACE;
        }
    }
}

/// A device that serves readers.
pub(super) struct DeviceContext {
    domain: Arc<Domain>,
    channel: Arc<Channel>,
    /// Triggered when the device fails.
    alarm: Arc<Alarm>,
}

impl DeviceContext {
    pub(super) fn new(device: &Arc<Device>) -> Result<DeviceContext, Error> {
        let context =
            DeviceContext { domain: Domain::new(device)?, channel: Channel::new(device)?, alarm: Alarm::new()? };
        device.watch(NO_QUEUE_PAIR, &context.alarm);
        Ok(context)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        self.domain.device()
    }
}

/// Memory that is registered with the devices.
#[derive(Default)]
pub(super) struct RegisteredRegions {
    /// What readers may read.
    open: HashMap<RegionId, Exported>,
    /// Memory that stays registered between regions.
    cached: Vec<Exported>,
}

impl RegisteredRegions {
    /// Keeps memory registered, whether it is exported or not.
    fn cache(&mut self, exported: Exported) {
        self.cached.push(exported);
    }

    /// Stops keeping memory registered, and returns its registrations. Regions of it stay open.
    pub(super) fn forget(&mut self, memory: &Arc<Memory>) -> Vec<Exported> {
        self.cached.extract_if(.., |exported| Arc::ptr_eq(&exported.memory, memory)).collect()
    }

    /// The registrations of memory that is kept registered.
    fn cached(&self, memory: &Arc<Memory>) -> Option<Exported> {
        self.cached.iter().find(|exported| Arc::ptr_eq(&exported.memory, memory)).cloned()
    }

    /// Makes memory readable as that region.
    pub(super) fn export(&mut self, id: RegionId, exported: Exported) -> Result<(), Error> {
        if self.open.contains_key(&id) {
            return Err(Error::AlreadyExported(id));
        }
        self.open.insert(id, exported);
        Ok(())
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut Exported> {
        self.open.values_mut().chain(&mut self.cached)
    }
}

/// Regions, grants, and reader connections.
pub(super) struct Server {
    options: VerbsOptions,
    /// By the name of each connection's id.
    readers: HashMap<usize, ReaderConnection>,
    /// Those of them that are not in the stage `Reading`.
    unproved: Unproved,
    pub(super) regions: RegisteredRegions,
    grants: Grants,
    contexts: Vec<DeviceContext>,
    listeners: Vec<Listener>,
    pub(super) events: Arc<Events>,
}

/// A reader's connection. Fields are dropped in this order: the queue pair first.
struct ReaderConnection {
    pair: QueuePair,
    id: Id,
    buffer: Arc<Registration>,
    alarm: Arc<Alarm>,
    handshake: Source<Verbs>,
    stage: Stage,
}

enum Stage {
    AwaitingProof { until: Instant },
    Refused { until: Instant },
    Reading,
}

impl Server {
    pub(super) fn new(
        options: VerbsOptions,
        events: Arc<Events>,
        listeners: Vec<Listener>,
        contexts: Vec<DeviceContext>,
    ) -> Server {
        Server {
            options,
            readers: HashMap::new(),
            unproved: Unproved::new(),
            regions: RegisteredRegions::default(),
            grants: Grants::default(),
            contexts,
            listeners,
            events,
        }
    }

    // ---- calls of the exporter ----

    pub(super) fn readers(&self) -> usize {
        self.readers.len()
    }

    fn domains(&self) -> Vec<Arc<Domain>> {
        self.contexts.iter().map(|context| context.domain.clone()).collect()
    }

    pub(super) fn revoke(&mut self, id: RegionId) -> Option<Exported> {
        self.cut(|reader| reader.handshake.hello().id == id);
        self.regions.open.remove(&id)
    }

    pub(super) fn grant(&mut self, session: u64, secret: Secret, regions: Regions) {
        let closes = self.grants.insert(session, secret, regions);
        self.cut(|reader| reader.handshake.hello().session == session && closes(reader.handshake.hello().id));
    }

    pub(super) fn withdraw(&mut self, session: u64) {
        self.grants.remove(session);
        self.cut(|reader| reader.handshake.hello().session == session);
    }

    /// Length of a region, if readers can connect.
    pub(super) fn region_length(&self, id: RegionId) -> Option<u64> {
        let is_open = self.listeners.iter().any(|listener| listener.id.is_some());
        self.regions.open.get(&id).filter(|_| is_open).map(|exported| exported.memory.length())
    }

    /// What becomes readable on events, for each working device.
    pub(super) fn watched(&self) -> Vec<(Arc<Channel>, Arc<Device>, Arc<Alarm>)> {
        let of = |context: &DeviceContext| (context.channel.clone(), context.device().clone(), context.alarm.clone());
        self.contexts.iter().map(of).collect()
    }

    /// Closes everything; no reader is admitted after that.
    pub(super) fn close(&mut self) {
        self.listeners.clear();
        self.grants = Grants::default();
        self.cut(|_| true);
        self.regions = RegisteredRegions::default();
    }

    // ---- new readers ----

    /// Handles all events of the connection manager.
    fn on_events(&mut self) {
        while let Some(event) = self.events.next() {
            match event.kind {
                ffi::RDMA_CM_EVENT_CONNECT_REQUEST => {
                    if let Some((id, request)) = event.into_request() {
                        self.receive(id, &request);
                    }
                }
                ffi::RDMA_CM_EVENT_ESTABLISHED => tracing::trace!("a reader's connection is established"),
                ffi::RDMA_CM_EVENT_DISCONNECTED
                | ffi::RDMA_CM_EVENT_CONNECT_ERROR
                | ffi::RDMA_CM_EVENT_UNREACHABLE
                | ffi::RDMA_CM_EVENT_REJECTED
                | ffi::RDMA_CM_EVENT_ADDR_CHANGE
                | ffi::RDMA_CM_EVENT_TIMEWAIT_EXIT => self.forget(event.of, self.events.name_of(event.kind)),
                // Reported for each connection and each listener of the device.
                ffi::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    self.forget(event.of, "its device is being removed");
                    let is_it = |listener: &&mut Listener| listener.id.as_ref().is_some_and(|id| id.name() == event.of);
                    if let Some(listener) = self.listeners.iter_mut().find(is_it) {
                        if let Some(Ok(device)) = listener.id.as_ref().map(Id::device) {
                            device.mark_failed();
                        }
                        listener.lose();
                    }
                }
                other => {
                    tracing::debug!(event = self.events.name_of(other), "ignoring an event of the connection manager")
                }
            }
        }
    }

    fn receive(&mut self, id: Id, request: &Event) {
        let nonce = match admission::nonce() {
            Ok(nonce) => nonce,
            Err(error) => return tracing::error!(%error, "cannot accept a reader's RDMA connection"),
        };
        let (handshake, challenge) = match Source::challenge(&request.message, &nonce) {
            Ok(begun) => begun,
            Err(rejected) => {
                tracing::debug!(error = %rejected.error, "a connection request was rejected");
                return refuse(&id, rejected.answer);
            }
        };
        let (name, peer) = (id.name(), id.peer().map(|address| address.ip()));
        let has_room = self.readers.len() < self.options.connections;
        match if has_room { self.unproved.enter(Instant::now(), name, peer) } else { Err(Denial::Busy) } {
            Ok(oldest) => oldest.into_iter().for_each(|oldest| self.forget(oldest, "a newer one has its place")),
            Err(denial) => return refuse(&id, Verbs::refusal(Refusal::Denied(denial))),
        }
        match self.open(id, request, handshake, &challenge) {
            Ok(reader) => drop(self.readers.insert(name, reader)),
            Err(error) => {
                self.unproved.leave(name);
                tracing::warn!(%error, "cannot accept a reader's RDMA connection");
            }
        }
    }

    /// Makes the source's end of the connection, without rights, and accepts. On failure the connection is dropped,
    /// which refuses it.
    fn open(
        &mut self,
        id: Id,
        request: &Event,
        handshake: Source<Verbs>,
        challenge: &[u8],
    ) -> Result<ReaderConnection, Error> {
        let device = id.device()?;
        if let Err(error) = self.adopt(&device) {
            refuse(&id, Verbs::refusal(Refusal::Denied(Denial::Busy)));
            return Err(error);
        }
        let context = self.contexts.iter().find(|context| Arc::ptr_eq(context.device(), &device));
        let context = context.ok_or(Error::Misuse("a request arrived on a device that is not used"))?;
        let buffer = buffer(&context.domain)?;
        let completions = Completions::new(&context.channel, READER_COMPLETIONS)?;
        let pair = QueuePair::new(&context.domain, &completions, Capacity { send: 1, receive: 1 })?;
        let alarm = Alarm::new()?;
        device.watch(pair.name(), &alarm);
        let limit = u8::try_from(device.attributes().max_qp_rd_atom).unwrap_or(u8::MAX);
        let depth = request.responder_resources.min(self.options.reads_in_flight).min(limit).max(1);
        let depths = ReadDepths { initiator_depth: 0, responder_resources: depth };
        // An iWARP card connects by itself and takes no other rights later. There the region's key alone protects it.
        let rights = if device.is_iwarp() { ffi::IBV_ACCESS_REMOTE_READ } else { NO_RIGHTS };
        id.initialise(&pair, rights)?;
        pair.post_receive(PROOF, &buffer, INCOMING, PROOF_BYTES as u32)?;
        completions.arm()?;
        if !device.is_iwarp() {
            id.ready(&pair, depths, &self.options.connecting())?;
            // Some connection managers' attributes include rights.
            pair.allow(NO_RIGHTS)?;
        }
        id.accept(&pair, depths, challenge, &self.options.connecting())
            .map_err(Error::system("accepting a reader's RDMA connection"))?;
        let stage = Stage::AwaitingProof { until: Instant::now() + self.options.handshake_timeout };
        Ok(ReaderConnection { pair, id, buffer, alarm, handshake, stage })
    }

    /// Handles the completions of a queue.
    pub(super) fn completed(&mut self, queue: usize) {
        let mut found = self.readers.iter().filter(|(_, reader)| reader.pair.completions().name() == queue);
        let Some((&name, reader)) = found.next() else { return };
        let mut done = Vec::new();
        // Armed first and polled second, so that a completion in between is announced.
        let polled = reader.pair.completions().arm().and_then(|()| reader.pair.completions().poll(&mut done));
        if let Err(error) = polled {
            return self.forget(name, &error.to_string());
        }
        for completed in done {
            self.settle(name, completed);
        }
    }

    fn settle(&mut self, name: usize, completed: Completed) {
        if completed.status != ffi::IBV_WC_SUCCESS {
            return self.forget(name, "a message could not be sent");
        }
        match (completed.name, self.readers.get(&name).map(|reader| &reader.stage)) {
            (PROOF, Some(Stage::AwaitingProof { .. })) => self.proved(name, completed.length),
            (WELCOME, Some(Stage::Refused { .. })) => self.forget(name, "it was refused"),
            _ => {}
        }
    }

    /// Handles a proof: admits the reader, or refuses it with a reason.
    fn proved(&mut self, name: usize, length: u32) {
        let Some(reader) = self.readers.get(&name) else { return };
        let admitted = self.admit(reader, length);
        let is_in = admitted.is_ok();
        let answer = admitted.unwrap_or_else(Verbs::denial);
        let until = Instant::now() + self.options.handshake_timeout;
        if is_in {
            self.unproved.leave(name);
        }
        let Some(reader) = self.readers.get_mut(&name) else { return };
        reader.stage = if is_in { Stage::Reading } else { Stage::Refused { until } };
        if let Err(error) = reader.answer(&answer) {
            tracing::warn!(%error, "cannot answer a reader");
            self.forget(name, "it could not be answered");
        }
    }

    /// Checks the proof, and gives the queue pair the right to read. Returns the welcome for the reader.
    fn admit(&self, reader: &ReaderConnection, length: u32) -> Result<Vec<u8>, Denial> {
        let &Hello { session, id, lane, .. } = reader.handshake.hello();
        let mut proof = [0; PROOF_BYTES];
        let read = reader.buffer.memory().read(INCOMING, &mut proof);
        let proved = reader.handshake.examine(&proof, self.grants.secret(session))?;
        self.grants.permit(session, id)?;
        if read.is_err() || length as usize != PROOF_BYTES {
            return Err(Denial::NotGranted);
        }
        let Some(exported) = self.regions.open.get(&id) else {
            let is_stale = self.regions.open.keys().any(|known| known.region == id.region);
            return Err(if is_stale { Denial::Stale } else { Denial::Unknown });
        };
        let of_session = |other: &&ReaderConnection| {
            other.handshake.hello().session == session && matches!(other.stage, Stage::Reading)
        };
        if self.readers.values().filter(of_session).count() >= MAX_CONNECTIONS_PER_SESSION {
            return Err(Denial::Busy);
        }
        let device = reader.pair.domain().device();
        let registration = exported.at(device).ok_or(Denial::Unknown)?;
        if !device.is_iwarp() && reader.pair.allow(ffi::IBV_ACCESS_REMOTE_READ).is_err() {
            return Err(Denial::Busy);
        }
        tracing::debug!(session, region = %id, lane, "a queue pair is open");
        Ok(proved.welcome(&Grant {
            key: registration.remote_key(),
            base: registration.remote_base(),
            length: registration.memory().length(),
        }))
    }

    // ---- closing connections ----

    fn forget(&mut self, name: usize, why: &str) {
        if let Some(reader) = self.readers.remove(&name) {
            self.unproved.leave(name);
            tracing::debug!(session = reader.handshake.hello().session, region = %reader.handshake.hello().id, why, "a queue pair has ended");
            reader.id.disconnect();
        }
    }

    fn cut(&mut self, which: impl Fn(&ReaderConnection) -> bool) {
        for (name, reader) in self.readers.extract_if(|_, reader| which(reader)) {
            self.unproved.leave(name);
            // Notifies the reader first, so that it need not find out by its retries.
            reader.id.disconnect();
        }
    }

    /// Closes connections that are late or whose queue pair has failed, and handles failed devices. Returns when to
    /// call it again.
    fn sweep(&mut self) -> Option<Instant> {
        let now = Instant::now();
        self.cut(|reader| reader.alarm.is_triggered() || reader.stage.until().is_some_and(|until| until <= now));
        self.drop_failed_devices();
        self.listen_again(now);
        let tries = self.listeners.iter().filter(|listener| listener.id.is_none()).map(|listener| listener.again);
        self.readers.values().filter_map(|reader| reader.stage.until()).chain(tries).min()
    }

    // ---- failed and new devices ----

    /// Drops what was made on failed devices. Regions stay exported by the other devices.
    fn drop_failed_devices(&mut self) {
        if !self.contexts.iter().any(|context| context.device().has_failed()) {
            return;
        }
        let is_alive = |registration: &Registered| !registration.domain().device().has_failed();
        self.regions.iter_mut().for_each(|exported| exported.registrations.retain(is_alive));
        self.contexts.retain(|context| !context.device().has_failed());
        for listener in &mut self.listeners {
            let device = listener.id.as_ref().filter(|id| id.has_device()).map(Id::device);
            if device.is_some_and(|device| device.is_ok_and(|device| device.has_failed())) {
                listener.lose();
            }
        }
    }

    /// Listens again at addresses of removed devices. A device that was reset or reinserted is a new one, normally with
    /// the same address, which readers' keys name.
    fn listen_again(&mut self, now: Instant) {
        for number in 0..self.listeners.len() {
            let Some(lost) =
                self.listeners.get(number).filter(|listener| listener.id.is_none() && listener.again <= now)
            else {
                continue;
            };
            let address = lost.address;
            let opened = self.open_again(address);
            let Some(listener) = self.listeners.get_mut(number) else { continue };
            match opened {
                Ok(id) => {
                    tracing::info!(%address, "listening at this RDMA address again");
                    listener.id = Some(id);
                }
                Err(error) => {
                    tracing::debug!(%address, %error, "cannot listen at this RDMA address yet");
                    listener.again = now + LISTEN_PACE;
                }
            }
        }
    }

    fn open_again(&mut self, address: SocketAddr) -> Result<Id, Error> {
        let id = Id::new(&self.events)?;
        id.listen(address).map_err(Error::system("listening at an RDMA address again"))?;
        if id.has_device() {
            self.adopt(&id.device()?)?;
        }
        Ok(id)
    }

    /// Starts to serve by a device, and registers all exported memory with it.
    fn adopt(&mut self, device: &Arc<Device>) -> Result<(), Error> {
        if self.contexts.iter().any(|context| Arc::ptr_eq(context.device(), device)) {
            return Ok(());
        }
        if device.has_failed() {
            return Err(Error::Misuse("a request arrived on a device that has failed"));
        }
        let context = DeviceContext::new(device)?;
        let mut registered: Vec<Registered> = Vec::new();
        for exported in self.regions.iter_mut() {
            let known = registered.iter().find(|registration| Arc::ptr_eq(registration.memory(), &exported.memory));
            let registration = match known {
                Some(registration) => registration.clone(),
                None => register(&context.domain, &exported.memory)?,
            };
            registered.push(registration.clone());
            exported.registrations.push(registration);
        }
        tracing::info!(device = device.name(), "serving by this RDMA device");
        self.contexts.push(context);
        Ok(())
    }
}

impl ReaderConnection {
    fn answer(&self, welcome: &[u8]) -> Result<(), Error> {
        self.buffer.memory().write(OUTGOING, welcome)?;
        Ok(self.pair.post_send(WELCOME, &self.buffer, OUTGOING, welcome.len() as u32)?)
    }
}

impl Stage {
    fn until(&self) -> Option<Instant> {
        match self {
            Stage::AwaitingProof { until } | Stage::Refused { until } => Some(*until),
            Stage::Reading => None,
        }
    }
}

/// Rejects a connection request.
fn refuse(id: &Id, answer: Option<Vec<u8>>) {
    if let Err(error) = id.reject(&answer.unwrap_or_default()) {
        tracing::debug!(%error, "cannot refuse a connection request");
    }
}

/// Names of a reader's two work requests.
const PROOF: u64 = 1;

const WELCOME: u64 = 2;

/// Completions per reader: one receive and one send, doubled.
const READER_COMPLETIONS: u32 = 4;

/// Connections per session: 2 regions × 8 queue pairs, twice, because a reader may reconnect before its old ones are
/// found closed.
const MAX_CONNECTIONS_PER_SESSION: usize = 32;

/// Interval of listening again at an address whose device was removed: a reset takes a second or more.
const LISTEN_PACE: Duration = Duration::from_secs(1);

// The connections at the source that have not proved a session yet: how many there may be, and which one gives way.

/// Connections without a proof, by the name of each connection's id.
pub(super) struct Unproved {
    admission: Admission,
    /// The place of each connection.
    places: HashMap<usize, u64>,
}

impl Unproved {
    pub(super) fn new() -> Unproved {
        Unproved { admission: Admission::new(LIMITS), places: HashMap::new() }
    }

    /// Finds a place for the connection `name` from this address. Returns the name of the connection that the caller
    /// has to close for it, if there is one.
    ///
    /// All connections whose address is not known share the places of one address.
    ///
    /// # Errors
    /// [`Denial::Busy`] if there is no place.
    pub(super) fn enter(&mut self, now: Instant, name: usize, peer: Option<IpAddr>) -> Result<Option<usize>, Denial> {
        let peer = peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let Verdict::Admitted { place, instead } = self.admission.admit(now, peer) else { return Err(Denial::Busy) };
        let gives_way = self.places.iter().find_map(|(&name, &of)| (Some(of) == instead).then_some(name));
        self.places.retain(|_, of| Some(*of) != instead);
        self.places.insert(name, place);
        Ok(gives_way)
    }

    /// Frees a connection's place, if it has one: it has proved its session, or has ended.
    pub(super) fn leave(&mut self, name: usize) {
        if let Some(place) = self.places.remove(&name) {
            self.admission.leave(place);
        }
    }
}

/// Connections without a proof. They can thus not exclude readers with a grant: each of them ends at the handshake
/// time-out. One address has half of them, enough for a reader that opens all its queue pairs again at once.
const LIMITS: Limits = Limits { total: 64, per_address: 32 };

// The source's thread: waits for events of connections and devices, and passes them to the server.

/// Starts the thread. It ends when `stop` is written.
pub(super) fn start(shared: Arc<Shared>) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name("verbs-exporter".into())
        .spawn(move || serve(&shared))
        .map_err(Error::system("starting the thread of a verbs exporter"))
}

fn serve(shared: &Shared) {
    let events = shared.server().events.clone();
    let mut next_deadline = None;
    loop {
        // Collected each time: the descriptors of a removed device would be readable forever.
        let contexts = shared.server().watched();
        let mut fds: Vec<BorrowedFd<'_>> = vec![shared.stop.as_fd(), events.as_fd()];
        fds.extend(
            contexts.iter().flat_map(|(channel, device, alarm)| [channel.as_fd(), device.as_fd(), alarm.as_fd()]),
        );
        if wait(&fds, next_deadline) {
            return;
        }
        let mut server = shared.server();
        server.on_events();
        for (channel, device, _) in &contexts {
            device.handle_events();
            while let Some(queue) = channel.next() {
                server.completed(queue);
            }
        }
        next_deadline = server.sweep();
    }
}

/// Sleeps until something may have happened. Returns whether the thread must end.
fn wait(fds: &[BorrowedFd<'_>], until: Option<Instant>) -> bool {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let left = until.map_or(LONGEST_SLEEP, |until| until.saturating_duration_since(Instant::now()).min(LONGEST_SLEEP));
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    // Interrupted or not, everything is checked again.
    let _ = rustix::event::poll(&mut polled, Some(&left));
    polled.first().is_some_and(|stop| stop.revents().contains(PollFlags::IN))
}

/// Longest sleep, if no descriptor becomes readable.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::admission::GRACE;

    #[test]
    fn an_iwarp_device_is_used_only_if_it_is_asked_for() {
        permit("mlx5_0", false, false).unwrap();
        permit("siw0", true, true).unwrap();
        let refused = permit("siw0", true, VerbsOptions::default().iwarp).unwrap_err().to_string();
        assert!(refused.contains("siw0 is an iWARP device") && refused.contains("--rdma-device siw0"), "{refused}");
    }

    fn host(number: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, number]))
    }

    #[test]
    fn connections_of_one_address_leave_places_for_others_and_the_oldest_gives_way() {
        let (mut unproved, start) = (Unproved::new(), Instant::now());
        for name in 0..LIMITS.per_address {
            assert_eq!(unproved.enter(start, name, host(1)), Ok(None));
        }
        assert_eq!(unproved.enter(start, 100, host(1)), Err(Denial::Busy));
        assert_eq!(unproved.enter(start, 101, host(2)), Ok(None));
        assert_eq!(unproved.enter(start + GRACE, 102, host(1)), Ok(Some(0)));
        assert_eq!(unproved.enter(start + GRACE, 103, host(1)), Ok(Some(1)));
    }

    #[test]
    fn a_flood_never_replaces_a_connection_of_another_address_or_one_that_has_left() {
        let (mut unproved, start) = (Unproved::new(), Instant::now());
        unproved.enter(start, 1, host(2)).unwrap();
        unproved.enter(start, 2, host(1)).unwrap();
        unproved.leave(2);
        let flood = (0..5000).map(|number| (number, start + GRACE * (number / 10)));
        let replaced: Vec<usize> =
            flood.filter_map(|(number, now)| unproved.enter(now, 10 + number as usize, host(1)).ok()?).collect();
        assert!(replaced.len() > 400 && replaced.iter().all(|&name| name >= 10), "{replaced:?}");
        assert_eq!(unproved.places.len(), unproved.admission.waiting());
    }

    #[test]
    fn connections_without_a_known_address_share_the_places_of_one() {
        let (mut unproved, start) = (Unproved::new(), Instant::now());
        for name in 0..LIMITS.per_address {
            assert_eq!(unproved.enter(start, name, None), Ok(None));
        }
        assert_eq!(unproved.enter(start, 100, None), Err(Denial::Busy));
        unproved.leave(7);
        assert_eq!(unproved.enter(start, 100, None), Ok(None));
    }
}
