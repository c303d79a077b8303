//! Makes connections: resolves a route, connects a queue pair, shakes hands, and does one READ to see that it works.
//! Each step has a time limit. Reads are in `peer` and `lane`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use remora_rdma::{
    bindings as ffi,
    cm::{Event, Events, Id, ReadDepths, failed, is_end, resolve, unreachable},
    device::{Alarm, Device},
    objects::{Access, Capacity, Channel, Completed, Completions, Domain, QueuePair, Registration, RemoteRead},
};

use super::{
    MAX_SCATTER, VerbsOptions, VerbsPeer,
    handshake::{INCOMING, OUTGOING, TRIAL, TRIAL_BYTES, buffer},
    key,
    lane::{Lane, Parts, Remote},
    wire::{self, Verbs, WELCOME_BYTES},
};
use crate::{
    Connector, Denial, Error, Memory, Peer, RegionKey, Secret, TransportKind,
    auth::{self, PROOF_BYTES},
    lane_handshake::{Format, Hello, Reader, Refusal},
    transport::wait_readable,
};

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
        let addresses = key::addresses(key, self.fallback_host)?;
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
        let hello = Hello { session, id: key.id(), lane: number, nonce: auth::nonce()? };
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
    let hello = Hello { session: 0, id, lane: 0, nonce: auth::nonce()? };
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
    match wire::decode_refusal(&event.message) {
        Ok(Refusal::Denied(denial)) => Error::Refused(denial),
        Ok(Refusal::Malformed | Refusal::Version) => Error::Protocol("the source could not parse our hello"),
        Err(wire::Malformed::Magic) => unreachable(remote, io::ErrorKind::ConnectionRefused.into()).into(),
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
