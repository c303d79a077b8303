//! The regions, grants, readers and devices of one exporter: what the exporter and its thread share. No byte of a
//! region passes through here.
//!
//! ```text
//!   request ─▶ AwaitingProof ── proof is right, region exists ─▶ Reading ── closed, revoked, withdrawn ─▶ (dropped)
//!                 │                                                                                          ▲
//!                 └── wrong, or too late ─▶ Refused (the denial is being sent) ── sent ──────────────────────┘
//! ```
//!
//! What is true at every moment:
//!
//! - A reader's queue pair has rights to the source's memory only in the stage `Reading`: with a grant for its region,
//!   which is exported. The card knows keys only, no grants: see the parent's text.
//! - A reader's connection has one receive posted (the proof) and sends at most one message (the welcome): two
//!   completions, for which its queue has room.
//! - A reader's connection in another stage has a deadline, and one of the places in [`Unproved`].
//! - A failed device has no context, no readers and no registrations here. Its addresses are listened at again as soon
//!   as possible.

use std::{
    collections::HashMap,
    net::SocketAddr,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use remora_rdma::{
    bindings as ffi,
    cm::{Event, Events, Id, ReadDepths},
    device::{Alarm, Device, NO_QUEUE_PAIR},
    objects::{Access, Capacity, Channel, Completed, Completions, Domain, NO_RIGHTS, QueuePair, Registration},
};

use super::{
    VerbsOptions,
    handshake::{INCOMING, OUTGOING, buffer},
    unproved::Unproved,
    wire::{Grant, Verbs},
};
use crate::{
    Denial, Error, Memory, RegionId, Regions, Secret,
    auth::{self, PROOF_BYTES},
    grants::Grants,
    lane_handshake::{Format, Hello, Refusal, Source},
};

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
pub(super) fn register(domain: &Arc<Domain>, memory: &Arc<Memory>) -> Result<Registered, Error> {
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
    pub(super) fn cache(&mut self, exported: Exported) {
        self.cached.push(exported);
    }

    /// Stops keeping memory registered, and returns its registrations. Regions of it stay open.
    pub(super) fn forget(&mut self, memory: &Arc<Memory>) -> Vec<Exported> {
        self.cached.extract_if(.., |exported| Arc::ptr_eq(&exported.memory, memory)).collect()
    }

    /// The registrations of memory that is kept registered.
    pub(super) fn cached(&self, memory: &Arc<Memory>) -> Option<Exported> {
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

    pub(super) fn domains(&self) -> Vec<Arc<Domain>> {
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
    pub(super) fn on_events(&mut self) {
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
        let nonce = match auth::nonce() {
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
    pub(super) fn sweep(&mut self) -> Option<Instant> {
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
