//! The reader's end: it resolves a route, connects queue pairs and shakes hands, distributes reads over them, limits
//! their number and their time, and waits.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_rdma::cm::{Event, Events, Id, ReadDepths, failed, is_end, resolve, unreachable};
use remora_rdma::device::{Alarm, Device};
use remora_rdma::objects::{
    Access, BATCH, Batch, Capacity, Channel, Completed, Completions, Domain, QueuePair, Registration, RemoteRead,
};
use remora_rdma::{bindings as ffi, status_name};
use rustix::event::{EventfdFlags, epoll, eventfd};

use super::{
    CompletionMode, INCOMING, MAX_SCATTER, OUTGOING, TRIAL, TRIAL_BYTES, Verbs, VerbsOptions, WELCOME_BYTES, buffer,
};
use crate::admission::{self, Format, Hello, PROOF_BYTES, Reader, Refusal};
use crate::transport::{self, Slots, StallTimer, wait_readable};
use crate::{
    Completion, Connector, Denial, Error, Memory, Peer, ReadError, ReadRequest, RegionKey, Secret, TransportKind, View,
    memory, verbs,
};

// Resolves a route, connects a queue pair, shakes hands, and does one READ to see that it works.
// Each step has a time limit. Reads are in `peer` and `lane`.

/// Connects to sources by RDMA.
pub struct VerbsConnector {
    options: VerbsOptions,
    fallback_host: Option<SocketAddr>,
    local: Vec<IpAddr>,
}

impl VerbsConnector {
    /// A connector. `fallback_host` is the address by which the messenger reached the source; it replaces the host in
    /// keys that name none. `local` are addresses of this host whose devices are to be used; without any, the system's
    /// routes decide. Queue pairs alternate over them, and over the addresses of the source.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options out of range; [`Error::NoRdma`], with what is missing.
    pub fn new(
        options: VerbsOptions,
        fallback_host: Option<SocketAddr>,
        local: Vec<IpAddr>,
    ) -> Result<VerbsConnector, Error> {
        options.check()?;
        if Device::all()?.is_empty() {
            return Err(remora_rdma::no_device().into());
        }
        Ok(VerbsConnector { options, fallback_host, local })
    }

    /// As [`Connector::connect`], but returns the [`VerbsPeer`] itself.
    ///
    /// # Errors
    /// Those of [`Connector::connect`]; [`Error::NoRdma`].
    pub fn open(&self, key: &RegionKey, session: u64, secret: &Secret, sink: Arc<Memory>) -> Result<VerbsPeer, Error> {
        let addresses = verbs::addresses_in(key, self.fallback_host)?;
        let routes = routes(usize::from(self.options.queue_pairs), &self.local, &addresses);
        let mut sinks: Vec<Arc<Registration>> = Vec::new();
        let (mut lanes, mut last) = (Vec::new(), None);
        let mut closed: Vec<(Option<IpAddr>, SocketAddr)> = Vec::new();
        for (number, route) in (0..).zip(routes) {
            if closed.contains(&route) {
                continue;
            }
            match self.lane(number, route, key, session, secret, (&mut sinks, &sink)) {
                Ok(lane) => lanes.push(lane),
                // The answer would be the same by any other route.
                Err(error) if is_final(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!(local = ?route.0, source = %route.1, %error, "cannot connect a queue pair by this route");
                    closed.push(route);
                    last = Some(error);
                }
            }
        }
        match last {
            Some(error) if lanes.is_empty() => Err(error),
            _ => VerbsPeer::new(key.length(), sink, lanes, &self.options),
        }
    }

    /// Makes one queue pair that is ready to read.
    fn lane(
        &self,
        number: u8,
        (local, remote): (Option<IpAddr>, SocketAddr),
        key: &RegionKey,
        session: u64,
        secret: &Secret,
        (sinks, sink): (&mut Vec<Arc<Registration>>, &Arc<Memory>),
    ) -> Result<Lane, Error> {
        let route = Route::find(&self.options, local, remote)?;
        let sink = sink_at(sinks, &route.device, sink)?;
        let hello = Hello { session, id: key.id(), lane: number, nonce: admission::nonce()? };
        route.connect(&hello, sink)?.shake_hands(secret, key.length())
    }
}

impl Connector for VerbsConnector {
    fn kind(&self) -> TransportKind {
        TransportKind::Verbs
    }

    /// In addition to what every transport checks, one READ has succeeded when this returns.
    fn connect(
        &self,
        key: &RegionKey,
        session: u64,
        secret: &Secret,
        sink: Arc<Memory>,
    ) -> Result<Box<dyn Peer>, Error> {
        Ok(Box::new(self.open(key, session, secret, sink)?))
    }
}

/// The routes of `count` queue pairs: they alternate over the source's addresses, and over the local ones.
fn routes(count: usize, local: &[IpAddr], remote: &[SocketAddr]) -> Vec<(Option<IpAddr>, SocketAddr)> {
    let mut locals = local.iter().copied().map(Some).cycle();
    let remotes = remote.iter().copied().cycle();
    remotes.take(count).map(|remote| (locals.next().flatten(), remote)).collect()
}

/// Whether the source has answered, or this machine lacks something: another port would not help.
fn is_final(error: &Error) -> bool {
    !matches!(error, Error::Unreachable { .. } | Error::TimedOut { .. })
}

/// The sink's registration with a device: one per device and peer.
fn sink_at(
    known: &mut Vec<Arc<Registration>>,
    device: &Arc<Device>,
    sink: &Arc<Memory>,
) -> Result<Arc<Registration>, Error> {
    if let Some(sink) = known.iter().find(|sink| Arc::ptr_eq(sink.domain().device(), device)) {
        return Ok(sink.clone());
    }
    let registered = Registration::new(&Domain::new(device)?, sink, Access::Landing)?;
    known.push(registered.clone());
    Ok(registered)
}

/// A device and a route to the source.
struct Route<'a> {
    options: &'a VerbsOptions,
    deadline: Instant,
    remote: SocketAddr,
    device: Arc<Device>,
    id: Id,
    events: Arc<Events>,
}

impl<'a> Route<'a> {
    fn find(options: &'a VerbsOptions, local: Option<IpAddr>, remote: SocketAddr) -> Result<Route<'a>, Error> {
        let deadline = Instant::now() + options.connect_timeout;
        let events = Events::new()?;
        let id = Id::new(&events)?;
        if let Some(class) = options.traffic_class {
            id.set_traffic_class(class)?;
        }
        resolve(&events, &id, local, remote, deadline, options.connect_timeout)?;
        id.resolve_route(options.connect_timeout).map_err(|source| unreachable(remote, source))?;
        expect(&events, ffi::RDMA_CM_EVENT_ROUTE_RESOLVED, deadline, remote, options)?;
        let device = id.device()?;
        Ok(Route { options, deadline, remote, device, id, events })
    }

    /// Connects a queue pair to the source.
    fn connect(self, hello: &Hello, sink: Arc<Registration>) -> Result<Connected<'a>, Error> {
        let domain = sink.domain();
        let channel = Channel::new(&self.device)?;
        let limit = u32::try_from(self.device.attributes().max_qp_wr).unwrap_or(1).max(2);
        let queue_depth = self.options.queue_depth.min(limit - 1);
        // Room in the completion queue for every request that may be posted: the pieces, the proof, the welcome.
        let completions = Completions::new(&channel, queue_depth + HANDSHAKE_COMPLETIONS)?;
        let scatter = u32::try_from(self.device.attributes().max_sge_rd).unwrap_or(1).clamp(1, MAX_SCATTER);
        let capacity = Capacity { send: queue_depth + 1, receive: 1 };
        let pair = QueuePair::scattering(domain, &completions, capacity, scatter)?;
        let buffer = buffer(domain)?;
        let alarm = Alarm::new()?;
        self.device.watch(pair.name(), &alarm);
        self.id.initialise(&pair, 0)?;
        pair.post_receive(WELCOME, &buffer, INCOMING, WELCOME_BYTES as u32)?;
        let own = u8::try_from(self.device.attributes().max_qp_init_rd_atom).unwrap_or(u8::MAX).max(1);
        let mut depths = ReadDepths { initiator_depth: own.min(self.options.reads_in_flight), responder_resources: 0 };
        let (reader, hello) = Reader::hello(hello);
        let connect = self.id.connect(&pair, depths, &hello, &self.options.connecting());
        connect.map_err(|source| unreachable(self.remote, source))?;
        let event = self.answer()?;
        Verbs::parse_challenge(&event.message)?;
        if event.kind == ffi::RDMA_CM_EVENT_CONNECT_RESPONSE {
            // The source may grant fewer READs than were asked for, but never more.
            depths.initiator_depth = depths.initiator_depth.min(event.initiator_depth).max(1);
            self.id.ready(&pair, depths, &self.options.connecting())?;
            self.id.establish().map_err(Error::system("establishing an RDMA connection"))?;
        }
        let parts = Parts { pair, channel, completions, buffer, alarm, sink, queue_depth, scatter };
        Ok(Connected { route: self, parts, reader, challenge: event.message, reads_in_flight: depths.initiator_depth })
    }

    /// Waits for the source's answer to the connection request.
    fn answer(&self) -> Result<Event, Error> {
        loop {
            let event = self
                .events
                .wait(self.deadline)?
                .ok_or_else(|| timed_out(self.options, "the source, asked for an RDMA connection,"))?;
            match event.kind {
                ffi::RDMA_CM_EVENT_CONNECT_RESPONSE | ffi::RDMA_CM_EVENT_ESTABLISHED => return Ok(event),
                ffi::RDMA_CM_EVENT_REJECTED => return Err(rejected(&event, self.remote)),
                ffi::RDMA_CM_EVENT_TIMEWAIT_EXIT => {}
                _ => return Err(failed(&self.events, &event, self.remote).into()),
            }
        }
    }
}

/// A connection to a source that has sent a challenge.
struct Connected<'a> {
    route: Route<'a>,
    parts: Parts,
    reader: Reader<Verbs>,
    /// The source's answer, as the connection manager delivered it.
    challenge: Vec<u8>,
    reads_in_flight: u8,
}

impl Connected<'_> {
    /// Proves the session, checks the source's proof, and tries one READ.
    fn shake_hands(self, secret: &Secret, length: u64) -> Result<Lane, Error> {
        let Connected { route, parts, reader, challenge, reads_in_flight } = self;
        let deadline = Instant::now() + route.options.handshake_timeout;
        let buffer_memory = parts.buffer.memory();
        let (reader, proof) = reader.prove(&challenge, secret)?;
        buffer_memory.write(OUTGOING, &proof)?;
        parts.pair.post_send(HELLO, &parts.buffer, OUTGOING, PROOF_BYTES as u32)?;
        let received = await_completion(&parts, &route.events, WELCOME, deadline, route.options.handshake_timeout)?;
        let mut bytes = [0; WELCOME_BYTES];
        buffer_memory.read(INCOMING, &mut bytes)?;
        let grant = reader.finish(bytes.get(..received.length as usize).unwrap_or_default())?;
        if grant.length != length {
            return Err(Error::Protocol("the length of the region differs from its key"));
        }
        let remote = Remote { key: grant.key, base: grant.base };
        let trial = RemoteRead {
            name: TRIAL_READ,
            address: remote.base,
            key: remote.key,
            length: TRIAL_BYTES.min(length) as u32,
            offset: TRIAL,
        };
        parts.pair.post_read(&trial, &parts.buffer)?;
        await_completion(&parts, &route.events, TRIAL_READ, deadline, route.options.handshake_timeout)?;
        tracing::debug!(device = route.device.name(), source = %route.remote, reads_in_flight, "a queue pair is connected");
        Ok(Lane::new(parts, route.id, route.events, remote, route.options.piece_bytes))
    }
}

/// The status of a READ with the right key on a connection that has proved nothing.
#[cfg(test)]
pub(super) fn read_without_proof(
    options: &VerbsOptions,
    local: IpAddr,
    source: SocketAddr,
    id: crate::RegionId,
    remote: Remote,
) -> Result<ffi::ibv_wc_status, Error> {
    let route = Route::find(options, Some(local), source)?;
    let sink = Arc::new(Memory::create("unproved", 4096, crate::Pages::Small)?);
    let sink = Registration::new(&Domain::new(&route.device)?, &sink, Access::Landing)?;
    let hello = Hello { session: 0, id, lane: 0, nonce: admission::nonce()? };
    let connected = route.connect(&hello, sink)?;
    let guess = RemoteRead { name: TRIAL_READ, address: remote.base, key: remote.key, length: 64, offset: TRIAL };
    connected.parts.pair.post_read(&guess, &connected.parts.buffer)?;
    let (deadline, mut done) = (Instant::now() + options.handshake_timeout, Vec::new());
    while Instant::now() < deadline {
        connected.parts.completions.poll(&mut done)?;
        if let Some(completed) = done.iter().find(|completed| completed.name == TRIAL_READ) {
            return Ok(completed.status);
        }
        std::thread::sleep(SLICE);
    }
    Err(Error::TimedOut { what: "the guessed READ", after: options.handshake_timeout })
}

/// Waits until the request named `name` has completed, and ignores earlier ones.
fn await_completion(
    parts: &Parts,
    events: &Arc<Events>,
    name: u64,
    deadline: Instant,
    limit: Duration,
) -> Result<Completed, Error> {
    let mut done = Vec::new();
    loop {
        // Looked at before the queue: a source sends its denial before it closes the connection. If the connection has
        // ended by now, the denial is already in the queue.
        let has_ended = parts.alarm.is_triggered() || matches!(events.next(), Some(event) if is_end(&event));
        parts.completions.arm()?;
        parts.completions.poll(&mut done)?;
        for completed in done.drain(..) {
            if completed.status != ffi::IBV_WC_SUCCESS {
                return Err(Error::Unreachable {
                    what: "the source by RDMA".into(),
                    source: io::Error::other(format!("work completion status {}", completed.status)),
                });
            }
            if completed.name == name {
                return Ok(completed);
            }
        }
        if has_ended {
            return Err(Error::Refused(Denial::NotGranted));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::TimedOut { what: "the source's answer by RDMA", after: limit });
        }
        // In slices, because the end of the connection is reported on another descriptor.
        wait_readable(std::os::fd::AsFd::as_fd(&*parts.channel), left.min(SLICE))?;
        while parts.channel.next().is_some() {}
    }
}

fn expect(
    events: &Arc<Events>,
    wanted: ffi::rdma_cm_event_type,
    deadline: Instant,
    remote: SocketAddr,
    options: &VerbsOptions,
) -> Result<(), Error> {
    let event = events.wait(deadline)?.ok_or_else(|| timed_out(options, "the search for a route to the source"))?;
    if event.kind == wanted { Ok(()) } else { Err(failed(events, &event, remote).into()) }
}

fn timed_out(options: &VerbsOptions, what: &'static str) -> Error {
    Error::TimedOut { what, after: options.connect_timeout }
}

/// The error for a rejected request. A refusal of the source says why; any other rejection means that no source listens
/// there.
fn rejected(event: &Event, remote: SocketAddr) -> Error {
    match verbs::decode_refusal(&event.message) {
        Ok(Refusal::Denied(denial)) => Error::Refused(denial),
        Ok(Refusal::Malformed | Refusal::Version) => Error::Protocol("the source could not parse our hello"),
        Err(verbs::Malformed::Magic) => unreachable(remote, io::ErrorKind::ConnectionRefused.into()).into(),
        Err(malformed) => malformed.into(),
    }
}

/// Names of the handshake's work requests. Reads are named by their slots' numbers, which are smaller.
const HELLO: u64 = u64::MAX;

const WELCOME: u64 = u64::MAX - 1;

const TRIAL_READ: u64 = u64::MAX - 2;

/// The proof, the welcome, the trial READ, and one spare.
const HANDSHAKE_COMPLETIONS: u32 = 4;

/// How long one descriptor is waited for before the other is checked.
const SLICE: Duration = Duration::from_millis(20);

// The reader's connection to one region: distributes reads over its queue pairs, limits their number and their time,
// and waits. It works on the caller's thread.
//
// ```text
//            post_read                                                   poll
//   reads ──▶ slot ──▶ pieces ──▶ lanes ═══ READ ═══▶ the card ──▶ lanes ──▶ slot ──▶ completion
//     │       └─ as many as the depth                                         └─ free again
//     └─ outside the region, or empty: answered here, since the card would end the connection for it
// ```
//
// The descriptor of [`Peer::arm`] is an epoll instance over completion channels, connections, devices, one timer, and
// an eventfd for what is known already. Completions that are found while it is armed are kept in `found`.

/// A [`Peer`] over RDMA, made by [`VerbsConnector`].
pub struct VerbsPeer {
    /// Length of the region in bytes.
    length: u64,
    sink: Arc<Memory>,
    lanes: Vec<Lane>,
    slots: Slots,
    piece_bytes: u32,
    mode: CompletionMode,
    poll_time: Duration,
    readiness: OwnedFd,
    known: OwnedFd,
    is_known: bool,
    found: Vec<Completion>,
    /// Polls since the clock was read, and the time when events were last checked.
    polls: u32,
    looked: Instant,
    armed: bool,
    stall: StallTimer,
    retired: Option<ReadError>,
}

impl VerbsPeer {
    /// A peer over lanes whose handshake is complete.
    pub(super) fn new(
        length: u64,
        sink: Arc<Memory>,
        lanes: Vec<Lane>,
        options: &VerbsOptions,
    ) -> Result<VerbsPeer, Error> {
        let readiness =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("creating an epoll instance"))?;
        let known =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("creating an eventfd"))?;
        let stall = StallTimer::new(options.stall_timeout)?;
        let watch = |fd: BorrowedFd<'_>| {
            match epoll::add(&readiness, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN) {
                // Two lanes use one device.
                Err(rustix::io::Errno::EXIST) => Ok(()),
                other => other.map_err(Error::system("watching an RDMA connection")),
            }
        };
        watch(known.as_fd())?;
        watch(stall.as_fd())?;
        for lane in &lanes {
            lane.descriptors().into_iter().try_for_each(watch)?;
            watch(lane.device().as_fd())?;
        }
        Ok(VerbsPeer {
            length,
            sink,
            lanes,
            slots: Slots::new(options.depth),
            piece_bytes: options.piece_bytes,
            mode: options.completion,
            poll_time: options.poll_time,
            readiness,
            known,
            is_known: false,
            found: Vec::new(),
            polls: 0,
            looked: Instant::now(),
            armed: false,
            stall,
            retired: None,
        })
    }

    /// The names of the devices that it reads by, one per queue pair.
    pub fn devices(&self) -> Vec<String> {
        self.lanes.iter().map(|lane| lane.device().name().to_owned()).collect()
    }

    /// Changes the length that reads are checked against, for tests of the source's card.
    #[cfg(test)]
    pub(super) fn set_length(&mut self, length: u64) {
        self.length = length;
    }

    /// Makes the remote keys invalid, for tests.
    #[cfg(test)]
    pub(super) fn spoil_keys(&mut self) {
        self.lanes.iter_mut().for_each(Lane::spoil_key);
    }

    /// Posts a WRITE of the sink's bytes to the same place in the region, for tests.
    #[cfg(test)]
    pub(super) fn post_write(&mut self, offset: u64, length: u32) {
        self.lanes[0].post_write(offset, length);
    }

    /// Requests that its queue pairs have posted.
    #[cfg(test)]
    pub(super) fn requests_posted(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.requests_posted).sum()
    }

    /// The card's attributes of its first queue pair.
    #[cfg(test)]
    pub(super) fn attributes(&self, mask: u32) -> remora_rdma::bindings::ibv_qp_attr {
        self.lanes[0].pair().attributes(mask)
    }

    /// What the READs of its first queue pair name.
    #[cfg(test)]
    pub(super) fn remote(&self) -> Remote {
        self.lanes[0].remote()
    }

    /// Splits a read into pieces, and gives each to the lane with the fewest outstanding bytes.
    fn ask(&mut self, slot: usize, read: &ReadRequest) -> u32 {
        let mut pieces = 0;
        for (begin, length) in cut(read.length, self.piece_bytes) {
            let piece = Piece { slot, offset: read.offset + begin, length, sink_offset: read.sink_offset + begin };
            let Some(lane) = self.lanes.iter_mut().min_by_key(|lane| lane.outstanding()) else { break };
            lane.ask(piece);
            pieces += 1;
        }
        pieces
    }

    fn flush(&mut self) -> Result<(), ReadError> {
        self.lanes.iter_mut().try_for_each(Lane::flush)
    }

    /// Takes completions of each lane into `found`, and posts the pieces for which there is room now.
    fn receive(&mut self) -> Result<usize, ReadError> {
        let VerbsPeer { lanes, slots, found, stall, .. } = self;
        let mut came = 0;
        for lane in lanes.iter_mut() {
            let count = lane.receive(POLL_BUDGET, |slot| found.extend(slots.part_done(slot, Ok(()))))?;
            if count > 0 {
                stall.progress();
                lane.flush()?;
            }
            came += count;
        }
        Ok(came)
    }

    /// Takes completions, and now and then checks everything else. System calls in each poll, and even reading the
    /// clock, would cost more than the poll itself.
    fn work(&mut self) -> Result<(), ReadError> {
        let came = self.receive()?;
        self.polls += 1;
        if self.armed || self.polls >= POLLS_PER_CLOCK { self.look(came) } else { Ok(()) }
    }

    /// Handles events, if the caller has slept for them or enough time has passed, and detects stalls.
    fn look(&mut self, came: usize) -> Result<(), ReadError> {
        self.polls = 0;
        let now = Instant::now();
        let pace = if came == 0 { LOOK_PACE } else { LOOK_AT_LEAST };
        if std::mem::take(&mut self.armed) || now.duration_since(self.looked) >= pace {
            self.looked = now;
            self.lanes.iter().try_for_each(Lane::look)?;
        }
        self.stall.check_at(now, !self.slots.is_empty())
    }

    /// Works, and retires the peer on failure.
    fn work_or_retire(&mut self) {
        if self.retired.is_none()
            && let Err(error) = self.work()
        {
            self.retire(error);
        }
    }

    /// Polls for a while, if the mode says so and reads are outstanding; then arms the completion queues.
    fn prepare_to_sleep(&mut self) -> Result<(), ReadError> {
        self.stall.settle();
        if self.mode == CompletionMode::PollThenArm && !self.slots.is_empty() {
            let until = Instant::now() + self.poll_time;
            let mut polls = 0_u32;
            while self.found.is_empty() && (!polls.is_multiple_of(POLLS_PER_CLOCK) || Instant::now() < until) {
                self.receive()?;
                polls += 1;
                std::hint::spin_loop();
            }
        }
        if self.found.is_empty() {
            self.lanes.iter().try_for_each(Lane::arm)?;
            self.armed = true;
            // Completions that arrived before the queue was armed are not announced.
            self.receive()?;
        }
        Ok(())
    }

    /// Whether the caller already has something to take. If not, it may sleep: everything that arrives is announced.
    fn knows_something(&mut self) -> bool {
        if self.retired.is_none()
            && self.found.is_empty()
            && let Err(error) = self.prepare_to_sleep()
        {
            self.retire(error);
        }
        self.retired.is_some() || !self.found.is_empty()
    }

    /// Polls until there is a completion or the time is over, for the mode that never sleeps.
    fn spin(&mut self, timeout: Duration) {
        let (mut begun, mut polls) = (None, 0_u32);
        loop {
            self.work_or_retire();
            polls += 1;
            let over =
                polls.is_multiple_of(POLLS_PER_CLOCK) && begun.get_or_insert_with(Instant::now).elapsed() >= timeout;
            if over || timeout.is_zero() || !self.found.is_empty() || self.retired.is_some() {
                return;
            }
            // For machines with fewer processors than pollers; rarely, because a yield costs more than a poll.
            if polls.is_multiple_of(POLLS_PER_YIELD) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }

    /// Makes the eventfd readable if something is known already.
    fn show(&mut self, is_known: bool) {
        if self.is_known == is_known {
            return;
        }
        self.is_known = is_known;
        // Neither can fail: the counter is 0 or 1.
        if is_known {
            let _ = rustix::io::write(&self.known, &1u64.to_ne_bytes());
        } else {
            let _ = rustix::io::read(&self.known, &mut [0; 8]);
        }
    }

    /// Retires the peer with `error` and destroys the queue pairs.
    fn retire(&mut self, error: ReadError) {
        if self.retired.is_none() {
            self.retired = Some(error);
            self.lanes.iter_mut().for_each(Lane::end);
            self.found.extend(self.slots.fail_all(error));
        }
    }

    /// Answers reads that no card can do: a range outside the region, or an empty one.
    fn judge(&self, read: &ReadRequest) -> Option<Completion> {
        let result = match memory::check(read.offset, read.length.into(), self.length) {
            Err(_) => Err(ReadError::Denied(Denial::OutOfBounds)),
            Ok(()) if read.length == 0 => Ok(0),
            Ok(()) => return None,
        };
        Some(Completion { tag: read.tag, result })
    }
}

impl Peer for VerbsPeer {
    fn depth(&self) -> usize {
        self.slots.depth()
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        transport::admit(reads, &self.sink, self.retired, &self.slots, &mut self.stall)?;
        let mut accepted = 0;
        for read in reads {
            if self.found.len() >= self.slots.depth() {
                break;
            }
            if let Some(completion) = self.judge(read) {
                self.found.push(completion);
            } else {
                let Some(slot) = self.slots.take(read) else { break };
                let pieces = self.ask(slot, read);
                self.slots.set_parts(slot, pieces);
            }
            accepted += 1;
        }
        if let Err(error) = self.flush() {
            self.retire(error);
        }
        Ok(accepted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        // Completions that a wait has found are returned first: it has just checked everything.
        if self.found.is_empty() {
            self.work_or_retire();
        }
        let count = self.found.len();
        completions.append(&mut self.found);
        match self.retired {
            Some(error) if count == 0 => return Err(Error::Retired(error)),
            // It stays readable, because the end is still to be reported.
            Some(_) => self.show(true),
            None => self.show(false),
        }
        Ok(count)
    }

    /// Needs no system call if the completion has arrived, or arrives while polling.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        if self.mode == CompletionMode::Polling {
            self.spin(timeout);
        } else if !self.knows_something() {
            wait_readable(self.readiness.as_fd(), timeout)?;
        }
        Ok(())
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        // A caller that also sleeps on other descriptors cannot be kept from sleeping: in the mode that never sleeps,
        // it is woken immediately.
        let known = self.mode == CompletionMode::Polling || self.knows_something();
        self.show(known);
        self.readiness.as_fd()
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {
        self.retire(ReadError::Cancelled);
    }
}

impl Drop for VerbsPeer {
    fn drop(&mut self) {
        self.close();
    }
}

/// The pieces of a read of `length` bytes, as offset in the read and length.
fn cut(length: u32, piece_bytes: u32) -> impl Iterator<Item = (u64, u32)> {
    let begins = (0..length).step_by(piece_bytes.max(1) as usize);
    begins.map(move |begin| (begin.into(), (length - begin).min(piece_bytes)))
}

/// Completions that one poll takes from one lane: 16 MiB of whole pieces.
const POLL_BUDGET: usize = 64;

/// Polls of an idle queue between two reads of the clock: a microsecond or two, which is what reading the clock costs
/// if it is a device.
const POLLS_PER_CLOCK: u32 = 64;

/// Polls between two yields: some 100 µs, so that on a busy machine a system call is not part of every read.
const POLLS_PER_YIELD: u32 = 4096;

/// Intervals at which a poll without completions, and one with completions, checks connections and devices. It takes
/// three system calls, which must not be part of every read; a sleeping caller is woken for these events.
const LOOK_PACE: Duration = Duration::from_millis(1);

const LOOK_AT_LEAST: Duration = Duration::from_millis(5);

// The reader's data path: one queue pair, its credits, and the pieces that wait for credits. `peer` distributes reads
// over lanes and handles failures.
//
// ```text
//   ask ─▶ held ── as far as the credits allow ─▶ posted ═ READ ═▶ completion queue ─▶ receive ─▶ (a credit is free again)
//            └─ neighbours in the region become one READ, scattered over the sink
// ```
//
// A queue pair completes its requests in the order of posting, so `posted` is a queue. Several small requests are
// posted by one call, which writes to the card's doorbell once. Large ones are posted by a call each, because then the
// doorbell costs nothing in comparison, and because Soft-RoCE overflows a queue of its own when it gets 16 large READs
// at once.

/// What a READ names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    /// The key of the region.
    pub(super) key: u32,
    /// The address of its first byte.
    pub(super) base: u64,
}

/// A piece of a read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The read of the peer that it belongs to.
    pub(super) slot: usize,
    /// Offset of the first byte, in the region.
    pub(super) offset: u64,
    /// Number of bytes.
    pub(super) length: u32,
    /// Offset in the sink for the first byte.
    pub(super) sink_offset: u64,
}

impl Piece {
    /// Offset of the byte after the piece. A range is checked before it is split, so that this does not overflow.
    fn end(&self) -> u64 {
        self.offset + u64::from(self.length)
    }
}

/// The parts of a lane.
pub(super) struct Parts {
    pub(super) pair: QueuePair,
    pub(super) channel: Arc<Channel>,
    pub(super) completions: Arc<Completions>,
    pub(super) buffer: Arc<Registration>,
    pub(super) alarm: Arc<Alarm>,
    pub(super) sink: Arc<Registration>,
    pub(super) queue_depth: u32,
    pub(super) scatter: u32,
}

/// A connection of a peer. Fields are dropped in this order: the queue pair first.
pub(super) struct Lane {
    /// `None` after the lane has ended; then no card writes to the sink.
    pair: Option<QueuePair>,
    id: Id,
    events: Arc<Events>,
    completions: Arc<Completions>,
    channel: Arc<Channel>,
    alarm: Arc<Alarm>,
    device: Arc<Device>,
    sink: Arc<Registration>,
    remote: Remote,
    /// Maximum number of segments of one READ.
    scatter: u32,
    /// Maximum size of one READ.
    longest: u32,
    credits: u32,
    batch: Batch,
    held: VecDeque<Piece>,
    /// Posted pieces, and the number of pieces of each posted request.
    posted: VecDeque<Piece>,
    requests: VecDeque<u32>,
    /// Requests posted since the lane was made.
    #[cfg(test)]
    pub(super) requests_posted: u64,
    /// Bytes requested that have not arrived.
    outstanding: u64,
    taken: Vec<Completed>,
}

impl Lane {
    /// A lane after its handshake, whose requests have all completed.
    pub(super) fn new(parts: Parts, id: Id, events: Arc<Events>, remote: Remote, longest: u32) -> Lane {
        let device = parts.sink.domain().device().clone();
        Lane {
            pair: Some(parts.pair),
            id,
            events,
            completions: parts.completions,
            channel: parts.channel,
            alarm: parts.alarm,
            device,
            sink: parts.sink,
            remote,
            scatter: parts.scatter,
            longest,
            credits: parts.queue_depth,
            batch: Batch::default(),
            held: VecDeque::new(),
            posted: VecDeque::new(),
            requests: VecDeque::new(),
            #[cfg(test)]
            requests_posted: 0,
            outstanding: 0,
            taken: Vec::new(),
        }
    }

    /// Descriptors that become readable when the lane has something to do.
    pub(super) fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [self.channel.as_fd(), self.events.as_fd(), self.alarm.as_fd()]
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// Makes the remote key invalid, for tests.
    #[cfg(test)]
    fn spoil_key(&mut self) {
        self.remote.key ^= 0x5555_5500;
    }

    /// Posts a WRITE of the sink's bytes to the same place in the region, for tests. It is a request without pieces.
    #[cfg(test)]
    pub(super) fn post_write(&mut self, offset: u64, length: u32) {
        let address = self.remote.base.wrapping_add(offset);
        let write = RemoteRead { name: 0, address, key: self.remote.key, length, offset };
        self.pair().post_write(&write, &self.sink).expect("the card accepts the request");
        self.requests.push_back(0);
    }

    #[cfg(test)]
    pub(super) fn pair(&self) -> &QueuePair {
        self.pair.as_ref().expect("a lane that has not ended has one")
    }

    #[cfg(test)]
    pub(super) fn remote(&self) -> Remote {
        self.remote
    }

    /// Queues a piece. [`Lane::flush`] posts it.
    pub(super) fn ask(&mut self, piece: Piece) {
        self.outstanding += u64::from(piece.length);
        self.held.push_back(piece);
    }

    /// Posts as many requests as the credits allow: small ones together, large ones one by one.
    pub(super) fn flush(&mut self) -> Result<(), ReadError> {
        while self.credits > 0 && !self.held.is_empty() {
            let mut bytes = 0;
            while self.credits > 0
                && self.batch.len() < BATCH
                && let Some(next) = self.held.front()
                && (bytes == 0 || bytes + next.length <= SMALL_BYTES)
            {
                bytes += self.gather()?;
            }
            let Some(pair) = &self.pair else { return Err(ReadError::PeerGone) };
            if let Err(error) = pair.post_reads(&mut self.batch) {
                tracing::warn!(device = self.device.name(), %error, "cannot post a READ");
                return Err(ReadError::PeerGone);
            }
        }
        Ok(())
    }

    /// Makes one request of the first held piece and of those after it that are its neighbours in the region. Returns
    /// its number of bytes.
    fn gather(&mut self) -> Result<u32, ReadError> {
        let Some(first) = self.held.pop_front() else { return Ok(0) };
        let read = RemoteRead {
            name: first.slot as u64,
            address: self.remote.base.wrapping_add(first.offset),
            key: self.remote.key,
            length: first.length,
            offset: first.sink_offset,
        };
        self.batch.add(&read, &self.sink).map_err(outside)?;
        self.posted.push_back(first);
        let (mut pieces, mut end, mut bytes) = (1, first.end(), first.length);
        while pieces < self.scatter
            && let Some(next) = self.held.front().copied()
            && next.offset == end
            && bytes + next.length <= self.longest.min(SMALL_BYTES)
        {
            self.held.pop_front();
            self.batch.extend(&self.sink, next.sink_offset, next.length).map_err(outside)?;
            self.posted.push_back(next);
            (pieces, end, bytes) = (pieces + 1, next.end(), bytes + next.length);
        }
        self.requests.push_back(pieces);
        self.credits -= 1;
        #[cfg(test)]
        {
            self.requests_posted += 1;
        }
        Ok(bytes)
    }

    /// Takes up to `budget` completions, and calls `done` with the slot of each piece that has arrived. Returns the
    /// number of completions.
    pub(super) fn receive(&mut self, budget: usize, mut done: impl FnMut(usize)) -> Result<usize, ReadError> {
        let mut came = 0;
        loop {
            self.taken.clear();
            let polled = self.completions.poll(&mut self.taken);
            let count = polled.map_err(|error| {
                tracing::warn!(device = self.device.name(), %error, "a queue pair has failed");
                ReadError::PeerGone
            })?;
            for completed in &self.taken {
                // Only requests of the handshake are not counted here, and they have completed.
                let Some(pieces) = self.requests.pop_front() else { continue };
                if completed.status != ffi::IBV_WC_SUCCESS {
                    return Err(self.failed(completed.status));
                }
                self.credits += 1;
                for piece in self.posted.drain(..(pieces as usize).min(self.posted.len())) {
                    self.outstanding -= u64::from(piece.length);
                    done(piece.slot);
                }
            }
            came += count;
            // Fewer than there was room for: the queue is empty.
            if count < BATCH || came >= budget {
                return Ok(came);
            }
        }
    }

    /// The error for the first request that failed. The others are flushed.
    fn failed(&self, status: ffi::ibv_wc_status) -> ReadError {
        tracing::info!(device = self.device.name(), status = status_name(status), "a READ has failed");
        match status {
            // Ranges are checked before they are posted: the key is no longer valid.
            ffi::IBV_WC_REM_ACCESS_ERR => ReadError::Denied(Denial::Revoked),
            _ => ReadError::PeerGone,
        }
    }

    /// Makes a descriptor readable at the next completion. Completions that have arrived before do not count.
    pub(super) fn arm(&self) -> Result<(), ReadError> {
        self.completions.arm().map_err(|_| ReadError::PeerGone)
    }

    /// Handles events other than completions: of the channel, of the device, and of the connection.
    pub(super) fn look(&self) -> Result<(), ReadError> {
        while self.channel.next().is_some() {}
        self.device.handle_events();
        while let Some(event) = self.events.next() {
            if is_end(&event) {
                tracing::debug!(event = self.events.name_of(event.kind), "the connection of a queue pair has ended");
                return Err(ReadError::PeerGone);
            }
        }
        if self.alarm.is_triggered() { Err(ReadError::PeerGone) } else { Ok(()) }
    }

    /// Ends the lane and notifies the source. When this returns, the card no longer accesses the sink.
    pub(super) fn end(&mut self) {
        if let Some(pair) = self.pair.take() {
            self.id.disconnect();
            drop(pair);
        }
        self.held.clear();
        self.posted.clear();
        self.requests.clear();
    }
}

/// A place outside the sink is a bug, because places are checked when reads are posted. The peer ends, and nothing is
/// written there.
fn outside(error: remora_rdma::Error) -> ReadError {
    tracing::error!(%error, "a READ would land outside its sink");
    ReadError::PeerGone
}

/// Maximum size of a request that is gathered from neighbours, and of all requests posted by one call. A 100 Gb/s link
/// takes 5 µs for it; a request and a write to the doorbell take a tenth of that each.
const SMALL_BYTES: u32 = 64 << 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_follow_one_another_and_make_the_whole(length in 1u32..100_000_000, piece in 1u32..2000) {
            let piece = piece * 4096;
            let mut next = 0;
            for (begin, length) in cut(length, piece) {
                prop_assert_eq!(begin, next);
                prop_assert!(length <= piece && length > 0);
                next += u64::from(length);
            }
            prop_assert_eq!(next, u64::from(length));
        }
    }
}
