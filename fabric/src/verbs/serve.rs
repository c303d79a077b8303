//! The source's house: regions, grants, and the guests that read; and the thread that lets them in and out. No byte of a region passes
//! through here.
//!
//! ```text
//!   request ─▶ Proving ── proof is right, region is there ─▶ In ── gone, revoked, withdrawn ─▶ (dropped)
//!                 │                                                                               ▲
//!                 └── wrong, or too late ─▶ Leaving (the denial is on its way) ── sent ───────────┘
//! ```
//!
//! What is true at every moment:
//!
//! - A guest's queue pair has rights over the source's memory only while it is `In`: with a grant, and a region that is exported.
//! - A guest has one receive posted (its proof) and sends at most one message (its welcome): two completions, for which its queue has
//!   room.
//! - A guest that is not `In` has a deadline.

use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::{
    VerbsOptions, bindings as ffi,
    cm::{Event, Events, Id, Terms},
    device::{Alarm, Device},
    exporter::Shared,
    handshake::{End, INCOMING, OUTGOING, Transcript, letter},
    objects::{Access, Capacity, Channel, Completed, Completions, Domain, QueuePair, Registration},
    wire::{Challenge, Garbled, Hello, Refusal, Welcome},
};
use crate::{
    Denial, Error, Memory, RegionId, Secret,
    auth::{self, PROOF_BYTES},
};

/// Memory that one device may read.
pub(super) type Registered = Arc<Registration>;

/// Tells a device of memory that readers may read.
pub(super) fn register(domain: &Arc<Domain>, memory: &Arc<Memory>) -> Result<Registered, Error> {
    Registration::new(domain, memory, Access::RemoteRead)
}

/// A device that guests come by.
pub(super) struct Station {
    domain: Arc<Domain>,
    channel: Arc<Channel>,
}

impl Station {
    pub(super) fn new(device: &Arc<Device>) -> Result<Station, Error> {
        Ok(Station { domain: Domain::new(device)?, channel: Channel::new(device)? })
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        self.domain.device()
    }
}

/// See the head of the file.
pub(super) struct House {
    options: VerbsOptions,
    /// By the name of the id that its connection has.
    guests: HashMap<usize, Guest>,
    regions: HashMap<RegionId, Vec<Registered>>,
    /// Registered for longer than one region.
    kept: Vec<Vec<Registered>>,
    grants: HashMap<u64, Secret>,
    stations: Vec<Station>,
    /// Only held: closing them ends the listening.
    listeners: Vec<Id>,
    events: Arc<Events>,
}

/// A reader's connection. Fields go in this order: the queue pair before what it stands on.
struct Guest {
    pair: QueuePair,
    id: Id,
    letter: Arc<Registration>,
    alarm: Arc<Alarm>,
    hello: Hello,
    transcript: Transcript,
    stage: Stage,
}

enum Stage {
    Proving { until: Instant },
    Leaving { until: Instant },
    In,
}

impl House {
    pub(super) fn new(options: VerbsOptions, events: Arc<Events>, listeners: Vec<Id>, stations: Vec<Station>) -> House {
        House {
            options,
            guests: HashMap::new(),
            regions: HashMap::new(),
            kept: Vec::new(),
            grants: HashMap::new(),
            stations,
            listeners,
            events,
        }
    }

    // ---- what the exporter is told ----

    pub(super) fn guests(&self) -> usize {
        self.guests.len()
    }

    pub(super) fn domains(&self) -> Vec<Arc<Domain>> {
        self.stations.iter().map(|station| station.domain.clone()).collect()
    }

    pub(super) fn keep(&mut self, registrations: Vec<Registered>) {
        self.kept.push(registrations);
    }

    pub(super) fn kept(&self, memory: &Arc<Memory>) -> Option<Vec<Registered>> {
        let is_of = |registrations: &&Vec<Registered>| {
            registrations.first().is_some_and(|registration| Arc::ptr_eq(registration.memory(), memory))
        };
        self.kept.iter().find(is_of).cloned()
    }

    pub(super) fn export(&mut self, id: RegionId, registrations: Vec<Registered>) -> Result<(), Error> {
        if self.regions.contains_key(&id) {
            return Err(Error::AlreadyExported(id));
        }
        self.regions.insert(id, registrations);
        Ok(())
    }

    pub(super) fn revoke(&mut self, id: RegionId) -> Option<Vec<Registered>> {
        self.cut(|guest| guest.hello.id == id);
        self.regions.remove(&id)
    }

    pub(super) fn grant(&mut self, session: u64, secret: Secret) {
        self.grants.insert(session, secret);
    }

    pub(super) fn withdraw(&mut self, session: u64) {
        self.grants.remove(&session);
        self.cut(|guest| guest.hello.session == session);
    }

    pub(super) fn region_length(&self, id: RegionId) -> Option<u64> {
        self.regions.get(&id)?.first().map(|registration| registration.memory().length())
    }

    /// The end of everything; nothing is let in any more.
    pub(super) fn close(&mut self) {
        self.listeners.clear();
        self.grants.clear();
        self.cut(|_| true);
        self.regions.clear();
        self.kept.clear();
    }

    // ---- guests come ----

    /// Deals with everything the connection manager has to say.
    fn hear(&mut self) {
        while let Some(event) = self.events.next() {
            match event.kind {
                ffi::RDMA_CM_EVENT_CONNECT_REQUEST => {
                    if let Some((id, request)) = event.into_request(&self.events) {
                        self.receive(id, &request);
                    }
                }
                ffi::RDMA_CM_EVENT_ESTABLISHED => tracing::trace!("a reader's connection is established"),
                ffi::RDMA_CM_EVENT_DISCONNECTED
                | ffi::RDMA_CM_EVENT_CONNECT_ERROR
                | ffi::RDMA_CM_EVENT_UNREACHABLE
                | ffi::RDMA_CM_EVENT_REJECTED
                | ffi::RDMA_CM_EVENT_ADDR_CHANGE
                | ffi::RDMA_CM_EVENT_TIMEWAIT_EXIT => self.forget(event.of, &self.events.name_of(event.kind)),
                ffi::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    tracing::error!("an RDMA device is being removed: its readers are cut off");
                    self.forget(event.of, "its device is being removed");
                }
                other => tracing::debug!(event = self.events.name_of(other), "an event without use"),
            }
        }
    }

    fn receive(&mut self, id: Id, request: &Event) {
        let hello = match self.judge(request) {
            Ok(hello) => hello,
            Err(refusal) => return turn_away(&id, refusal),
        };
        match self.open(id, request, hello) {
            Ok(guest) => drop(self.guests.insert(guest.id.name(), guest)),
            Err(error) => tracing::warn!(%error, "a reader's RDMA connection can't be made"),
        }
    }

    /// Whether this request makes sense and there is room for it.
    fn judge(&self, request: &Event) -> Result<Hello, Refusal> {
        let hello = Hello::decode(&request.message).map_err(|garbled: Garbled| {
            tracing::debug!(?garbled, "a stranger's request to connect");
            Refusal::Malformed
        })?;
        let unproved = self.guests.values().filter(|guest| !matches!(guest.stage, Stage::In)).count();
        match self.guests.len() < self.options.connections && unproved < MAX_UNPROVED {
            true => Ok(hello),
            false => Err(Refusal::Denied(Denial::Busy)),
        }
    }

    /// Makes the source's end of the connection, without any rights, and accepts. What fails is dropped, which refuses.
    fn open(&self, id: Id, request: &Event, hello: Hello) -> Result<Guest, Error> {
        let device = id.device()?;
        let station = self.stations.iter().find(|station| Arc::ptr_eq(station.device(), &device));
        let Some(station) = station else {
            turn_away(&id, Refusal::Denied(Denial::Busy));
            return Err(Error::Misuse("a request came by a device that memory is not registered with"));
        };
        let letter = letter(&station.domain)?;
        let completions = Completions::new(&station.channel, GUEST_COMPLETIONS)?;
        let pair = QueuePair::new(&station.domain, &completions, Capacity { send: 1, receive: 1 })?;
        let alarm = Alarm::new()?;
        device.watch(pair.name(), &alarm);
        let limit = u8::try_from(device.attributes().max_qp_rd_atom).unwrap_or(u8::MAX);
        let depth = request.responder_resources.min(self.options.reads_in_flight).min(limit).max(1);
        let terms = Terms { initiator_depth: 0, responder_resources: depth };
        // An iWARP card connects by itself and takes no other rights later. There the region's key alone keeps strangers out.
        let rights = if device.is_iwarp() { ffi::IBV_ACCESS_REMOTE_READ } else { NOTHING };
        id.initialise(&pair, rights)?;
        pair.post_receive(PROOF, &letter, INCOMING, PROOF_BYTES as u32)?;
        completions.arm()?;
        if !device.is_iwarp() {
            id.ready(&pair, terms, &self.options)?;
            // Some managers' attributes come with rights.
            pair.allow(NOTHING)?;
        }
        let challenge = Challenge { nonce: auth::nonce()? };
        id.accept(&pair, terms, &challenge.encode(), &self.options)
            .map_err(Error::system("accepting a reader's RDMA connection"))?;
        let transcript = Transcript::new(&hello, &challenge);
        let stage = Stage::Proving { until: Instant::now() + self.options.handshake_timeout };
        Ok(Guest { pair, id, letter, alarm, hello, transcript, stage })
    }

    /// Deals with whatever has completed on a queue.
    fn completed(&mut self, queue: usize) {
        let mut found = self.guests.iter().filter(|(_, guest)| guest.pair.completions().name() == queue);
        let Some((&name, guest)) = found.next() else { return };
        let mut done = Vec::new();
        // Armed first and polled then: what comes between is announced.
        let alive = guest.pair.completions().arm().and_then(|()| guest.pair.completions().poll(&mut done));
        if let Err(error) = alive {
            return self.forget(name, &error.to_string());
        }
        for completed in done {
            self.settle(name, completed);
        }
    }

    fn settle(&mut self, name: usize, completed: Completed) {
        if completed.status != ffi::IBV_WC_SUCCESS {
            return self.forget(name, "a message did not get through");
        }
        match (completed.name, self.guests.get(&name).map(|guest| &guest.stage)) {
            (PROOF, Some(Stage::Proving { .. })) => self.proved(name, completed.length),
            (WELCOME, Some(Stage::Leaving { .. })) => self.forget(name, "it was refused"),
            _ => {}
        }
    }

    /// A proof has come: lets the guest in, or says why not.
    fn proved(&mut self, name: usize, length: u32) {
        let Some(guest) = self.guests.get(&name) else { return };
        let admitted = self.admit(guest, length);
        let welcome = match &admitted {
            Ok(welcome) => *welcome,
            Err(denial) => Welcome::denial(*denial),
        };
        let until = Instant::now() + self.options.handshake_timeout;
        let Some(guest) = self.guests.get_mut(&name) else { return };
        guest.stage = if admitted.is_ok() { Stage::In } else { Stage::Leaving { until } };
        if let Err(error) = guest.answer(&welcome) {
            tracing::warn!(%error, "a reader can't be answered");
            self.forget(name, "it can't be answered");
        }
    }

    fn admit(&self, guest: &Guest, length: u32) -> Result<Welcome, Denial> {
        let secret = self.grants.get(&guest.hello.session);
        let mut proof = [0; PROOF_BYTES];
        let read = guest.letter.memory().read(INCOMING, &mut proof);
        let proved = guest.transcript.is_proved(End::Reader, secret, &proof);
        let Some(secret) = secret.filter(|_| proved && read.is_ok() && length as usize == PROOF_BYTES) else {
            return Err(Denial::NotGranted);
        };
        let id = guest.hello.id;
        let Some(registrations) = self.regions.get(&id) else {
            let is_stale = self.regions.keys().any(|known| known.region == id.region);
            return Err(if is_stale { Denial::Stale } else { Denial::Unknown });
        };
        let of_session =
            |other: &&Guest| other.hello.session == guest.hello.session && matches!(other.stage, Stage::In);
        if self.guests.values().filter(of_session).count() >= MAX_CONNECTIONS_PER_SESSION {
            return Err(Denial::Busy);
        }
        let device = guest.pair.domain().device();
        let mut here = registrations.iter().filter(|registration| Arc::ptr_eq(registration.domain().device(), device));
        let registration = here.next().ok_or(Denial::Unknown)?;
        if !device.is_iwarp() && guest.pair.allow(ffi::IBV_ACCESS_REMOTE_READ).is_err() {
            return Err(Denial::Busy);
        }
        tracing::debug!(session = guest.hello.session, region = %id, lane = guest.hello.lane, "a queue pair is open");
        Ok(Welcome {
            denied: None,
            key: registration.remote_key(),
            base: registration.remote_base(),
            length: registration.memory().length(),
            proof: guest.transcript.prove(End::Source, secret),
        })
    }

    // ---- guests go ----

    fn forget(&mut self, name: usize, why: &str) {
        if let Some(guest) = self.guests.remove(&name) {
            tracing::debug!(session = guest.hello.session, region = %guest.hello.id, why, "a queue pair has ended");
            guest.id.disconnect();
        }
    }

    fn cut(&mut self, which: impl Fn(&Guest) -> bool) {
        for (_, guest) in self.guests.extract_if(|_, guest| which(guest)) {
            // First the news, then the end: a reader that is told does not have to find out by its retries.
            guest.id.disconnect();
        }
    }

    /// Cuts those that are too late or whose queue pair has failed; says when the next will be too late.
    fn sweep(&mut self) -> Option<Instant> {
        let now = Instant::now();
        self.cut(|guest| guest.alarm.has_rung() || guest.stage.until().is_some_and(|until| until <= now));
        self.guests.values().filter_map(|guest| guest.stage.until()).min()
    }
}

impl Guest {
    fn answer(&self, welcome: &Welcome) -> Result<(), Error> {
        self.letter.memory().write(OUTGOING, &welcome.encode())?;
        self.pair.post_send(WELCOME, &self.letter, OUTGOING, Welcome::BYTES as u32)
    }
}

impl Stage {
    fn until(&self) -> Option<Instant> {
        match self {
            Stage::Proving { until } | Stage::Leaving { until } => Some(*until),
            Stage::In => None,
        }
    }
}

fn turn_away(id: &Id, refusal: Refusal) {
    if let Err(error) = id.reject(&refusal.encode()) {
        tracing::debug!(%error, "a request to connect can't be refused");
    }
}

/// Starts the thread; it ends when `stop` is written.
pub(super) fn start(shared: Arc<Shared>) -> Result<JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name("verbs-exporter".into())
        .spawn(move || serve(&shared))
        .map_err(Error::system("starting the thread of a verbs exporter"))
}

fn serve(shared: &Shared) {
    let (events, stations) = {
        let house = shared.house();
        let of = |station: &Station| (station.channel.clone(), station.device().clone());
        (house.events.clone(), house.stations.iter().map(of).collect::<Vec<_>>())
    };
    let mut next_deadline = None;
    loop {
        let mut fds: Vec<BorrowedFd<'_>> = vec![shared.stop.as_fd(), events.as_fd()];
        fds.extend(stations.iter().flat_map(|(channel, device)| [channel.as_fd(), device.as_fd()]));
        if wait(&fds, next_deadline) {
            return;
        }
        let mut house = shared.house();
        house.hear();
        for (channel, device) in &stations {
            device.attend();
            while let Some(queue) = channel.next() {
                house.completed(queue);
            }
        }
        next_deadline = house.sweep();
    }
}

/// Sleeps until something may have happened. Says whether that is the end.
fn wait(fds: &[BorrowedFd<'_>], until: Option<Instant>) -> bool {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let left = until.map_or(LONGEST_SLEEP, |until| until.saturating_duration_since(Instant::now()).min(LONGEST_SLEEP));
    let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    // Interrupted or not: everything is looked at again.
    let _ = rustix::event::poll(&mut polled, Some(&left));
    polled.first().is_some_and(|stop| stop.revents().contains(PollFlags::IN))
}

/// Names of a guest's two work requests.
const PROOF: u64 = 1;
const WELCOME: u64 = 2;

/// One receive and one send, and as many again.
const GUEST_COMPLETIONS: u32 = 4;

/// No rights at all.
const NOTHING: u32 = 0;

/// Connections that have not proved anything yet, so that a stranger can't keep out those who have a grant: each lives no longer than
/// the handshake time-out.
const MAX_UNPROVED: usize = 64;

/// Connections per session: 2 regions × 8 queue pairs, twice, because a reader may come back before its old ones are found dead.
const MAX_CONNECTIONS_PER_SESSION: usize = 32;

/// Bound of one sleep, should every descriptor be silent.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);
