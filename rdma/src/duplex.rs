//! Two-sided RDMA: connections on which both ends send. What is sent, how much may be in flight, and which memory
//! receives it is decided by the caller, the messenger. Tables are not read this way, but one-sidedly.
//!
//! ```text
//!   Listener ─ next_call ▶ Request ── accept ──▶ Connection ◀── call ── Devices
//!                                            │ one queue pair, one completion queue, one descriptor
//!                             SharedReceives │ one per DeviceContext, that is: per device and owner
//!                                  ▲         ▼
//!                                  └──── Region: registered memory
//! ```
//!
//! - A [`Connection`] has its own completion queue and event channel. Any one thread can serve it, and it can move to
//!   another thread. (Ceph's RDMA messenger has one queue for all connections and a thread that sorts completions, so
//!   that each message changes threads.)
//! - Receives are shared ([`DeviceContext::post_receive`]): a posted receive serves a message of any connection. A
//!   completion on one connection may therefore name a buffer that was posted for another.
//! - No call waits, except dropping a [`Connection`], which waits until the card has released its memory.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_memory::Memory;
use rustix::event::{Timespec, epoll};

use crate::bindings as ffi;
use crate::cm::{ConnectOptions, Event, Events, Id, ReadDepths, is_end};
use crate::device::{Alarm, Device};
use crate::library::{Error, status_name};
use crate::objects::{
    Access, Capacity, Channel, Completed, Completions, Domain, NO_RIGHTS, PairOptions, QueuePair, Registration,
    RemoteRead, SharedReceives,
};

/// Options of connections. The limits of a card lower the numbers.
#[derive(Clone, Debug)]
pub struct DuplexOptions {
    /// Requests that may be posted on a connection and not completed. It need not match the number of buffers: a queue
    /// as deep as a pool of buffers would cost each connection the pool's size in queue entries.
    pub queue_depth: u32,
    /// Receives that may be posted per device.
    pub receives: u32,
    /// Maximum size of inline data, which needs no buffer and no fetch by the card. A card that allows less gets less;
    /// see [`Connection::inline_bytes`].
    pub inline_bytes: u32,
    /// READs in flight per connection, in each direction.
    pub reads_in_flight: u8,
    /// Retries of a message that finds no receive posted, 0 to 6. With credits there is always one, so that this only
    /// covers a faulty peer. 7 would mean unlimited.
    pub rnr_retries: u8,
    /// The card retransmits what is not acknowledged after 4.096 µs × 2^this, 8 to 24.
    pub ack_timeout: u8,
    /// Number of retransmissions, 1 to 6.
    pub retries: u8,
}

impl Default for DuplexOptions {
    fn default() -> DuplexOptions {
        let one_sided = ConnectOptions::default();
        DuplexOptions {
            queue_depth: 128,
            receives: 16_384,
            inline_bytes: 220,
            reads_in_flight: 4,
            rnr_retries: 3,
            ack_timeout: one_sided.ack_timeout,
            retries: one_sided.retries,
        }
    }
}

impl DuplexOptions {
    fn check(&self) -> Result<(), Error> {
        let fits = |fits: bool, sentence: &'static str| if fits { Ok(()) } else { Err(Error::Misuse(sentence)) };
        fits((4..=16_384).contains(&self.queue_depth), "queue depth: choose 4 to 16384 requests")?;
        fits((8..=1 << 20).contains(&self.receives), "receives: choose 8 to 1048576")?;
        fits(self.inline_bytes <= 1024, "inline bytes: choose at most 1024")?;
        fits((1..=16).contains(&self.reads_in_flight), "READs in flight: choose 1 to 16")?;
        fits(self.rnr_retries <= 6, "retries where no receive is posted: choose 0 to 6")?;
        fits((8..=24).contains(&self.ack_timeout), "acknowledgement time-out: choose 8 to 24")?;
        fits((1..=6).contains(&self.retries), "retries: choose 1 to 6")
    }

    /// The part that the connection manager takes.
    fn connecting(&self) -> ConnectOptions {
        ConnectOptions { ack_timeout: self.ack_timeout, retries: self.retries, ..ConnectOptions::default() }
    }
}

/// The devices of one owner's connections, opened as needed.
pub struct Devices {
    options: DuplexOptions,
    known: Mutex<Vec<Arc<DeviceContext>>>,
}

impl Devices {
    /// # Errors
    /// [`Error::Misuse`] for a number out of its range.
    pub fn new(options: DuplexOptions) -> Result<Devices, Error> {
        options.check()?;
        Ok(Devices { options, known: Mutex::default() })
    }

    /// The options of connections.
    pub fn options(&self) -> &DuplexOptions {
        &self.options
    }

    fn on(&self, device: &Arc<Device>) -> Result<Arc<DeviceContext>, Error> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(station) = known.iter().find(|station| Arc::ptr_eq(station.domain.device(), device)) {
            return Ok(station.clone());
        }
        let station = Arc::new(DeviceContext::new(device, &self.options)?);
        known.push(station.clone());
        Ok(station)
    }
}

/// One device of one owner: a protection domain, and the receives that its connections share.
pub struct DeviceContext {
    receives: Arc<SharedReceives>,
    domain: Arc<Domain>,
    inline: Inline,
}

impl DeviceContext {
    fn new(device: &Arc<Device>, options: &DuplexOptions) -> Result<DeviceContext, Error> {
        let domain = Domain::new(device)?;
        let receives = SharedReceives::new(&domain, options.receives)?;
        Ok(DeviceContext { receives, domain, inline: Inline::new(options.inline_bytes) })
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        self.domain.device().name()
    }

    /// Receives that may be posted at the same time.
    pub fn most_receives(&self) -> u32 {
        self.receives.room()
    }

    /// Registers all of `memory` with the device. If `exported`, the other ends of connections that [allow
    /// it](Connection::allow_reads) may read it, and it cannot be received into; otherwise this end receives into it
    /// and sends from it.
    ///
    /// # Errors
    /// [`Error::NoRdma`] if the locked-memory limit is too low; [`Error::System`].
    pub fn register(&self, memory: &Arc<Memory>, exported: bool) -> Result<Region, Error> {
        let access = if exported { Access::RemoteRead } else { Access::Landing };
        Registration::new(&self.domain, memory, access).map(Region)
    }

    /// Posts a receive for one message of any connection. The caller posts no more than
    /// [`DeviceContext::most_receives`], and does not use the bytes until the completion of that name.
    ///
    /// # Errors
    /// [`Error::Memory`] if the range is out of bounds; [`Error::System`].
    pub fn post_receive(&self, name: u64, region: &Region, offset: u64, length: u32) -> Result<(), Error> {
        region.check(offset, length)?;
        self.receives.post(name, &region.0, offset, length)
    }
}

/// Registered memory. Dropping it removes the registration; requests that still name it fail.
#[derive(Clone)]
pub struct Region(Arc<Registration>);

impl Region {
    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        self.0.memory()
    }

    /// What the other end names to read it: the key, and the address of its first byte.
    pub fn remote(&self) -> (u32, u64) {
        (self.0.remote_key(), self.0.remote_base())
    }

    fn check(&self, offset: u64, length: u32) -> Result<(), Error> {
        Ok(remora_memory::check(offset, length.into(), self.0.memory().length())?)
    }
}

/// A device's descriptor, readable when it has asynchronous events; see [`Connection::look`].
fn watched(device: &Device) -> std::os::fd::BorrowedFd<'_> {
    device.as_fd()
}

// How many bytes of inline data a device allows. No device reports this in advance: it answers when a queue pair is
// made, or refuses to make one. So smaller sizes are tried until one succeeds, and the result is kept for later pairs.
// Pure.

/// The size that a device is known to allow.
struct Inline(AtomicU32);

impl Inline {
    /// Starts with the wanted size.
    fn new(wanted: u32) -> Inline {
        Inline(AtomicU32::new(wanted))
    }

    /// Calls `make` with a size until it succeeds, and returns its result and the allowed size. `make` returns the size
    /// that the device reports.
    ///
    /// # Errors
    /// The first refusal, if `make` fails without inline data too; any error that does not concern the size.
    fn settle<T>(&self, device: &str, mut make: impl FnMut(u32) -> Result<(T, u32), Error>) -> Result<(T, u32), Error> {
        let known = self.0.load(Ordering::Relaxed);
        let (mut asked, mut first) = (known, None);
        loop {
            match make(asked) {
                // Some devices round up. More than the wanted size is not used.
                Ok((made, answered)) => {
                    let allowed = answered.min(known);
                    if self.0.fetch_min(allowed, Ordering::Relaxed) > allowed {
                        let text = "an RDMA device allows less inline data than was asked for";
                        tracing::info!(device, asked = known, allowed, "{text}");
                    }
                    return Ok((made, allowed));
                }
                Err(error) if asked > 0 && is_too_much(&error) => {
                    asked = lower(asked);
                    first.get_or_insert(error);
                }
                // The size was not the reason: report the first refusal.
                Err(error) => return Err(first.filter(|_| is_too_much(&error)).unwrap_or(error)),
            }
        }
    }
}

/// The error that devices return for too much inline data, and for some other reasons.
fn is_too_much(error: &Error) -> bool {
    matches!(error, Error::System { source, .. } if source.kind() == io::ErrorKind::InvalidInput)
}

fn lower(asked: u32) -> u32 {
    if asked > LEAST_BYTES { (asked / 2).max(LEAST_BYTES) } else { 0 }
}

/// Below this size, 0 is tried next: few messages are shorter.
const LEAST_BYTES: u32 = 32;

// A two-sided connection, from the call to its end.
//
// ```text
//   call ─▶ Looking ─▶ Routing ─▶ Routed ── connect ─▶ Connecting ─▶ Up ─▶ (an error)
//           address     route     (receives are posted here)           ▲
//                                            accept ─▶ Accepting ──────┘
// ```

/// A connection on which both ends send. Dropping it ends the connection. When the drop returns, the card no longer
/// accesses memory that was given to it for this connection, except shared receives.
pub struct Connection {
    /// Declared first, so that the queue pair is dropped before the objects that it uses.
    linked: Option<Linked>,
    id: Id,
    events: Arc<Events>,
    stations: Arc<Devices>,
    readiness: OwnedFd,
    stage: Stage,
    remote: SocketAddr,
    local: Option<IpAddr>,
    begun: Instant,
    answer: Vec<u8>,
    armed: bool,
    taken: Vec<Completed>,
}

struct Linked {
    pair: QueuePair,
    completions: Arc<Completions>,
    channel: Arc<Channel>,
    alarm: Arc<Alarm>,
    station: Arc<DeviceContext>,
    queue_depth: u32,
    /// Maximum size of inline data.
    inline: u32,
    depths: ReadDepths,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Looking { slice: Duration },
    Routing,
    Routed,
    Connecting,
    Accepting,
    Up,
}

/// Progress of connecting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait until the descriptor is readable.
    Pending,
    /// The device is known: post receives there, then call [`Connection::connect`].
    Routed,
    /// Both ends can send.
    Up,
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The name that the request was given.
    pub name: u64,
    /// Bytes received, for a receive.
    pub length: u32,
    /// Whether the request succeeded. If not, the connection has ended.
    pub well: bool,
}

impl Request {
    /// Accepts the request. `answer` is at most 196 bytes for the caller.
    ///
    /// # Errors
    /// [`Error::System`] if the connection cannot be made.
    pub fn accept(self, answer: &[u8]) -> Result<Connection, Error> {
        let Request { id, events, event, station, stations } = self;
        let remote = id.peer().unwrap_or_else(|| SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0));
        let mut connection = Connection::new(id, events, stations, Stage::Accepting, remote, None)?;
        let mut depths = depths(&station, connection.stations.options());
        depths.initiator_depth = depths.initiator_depth.min(event.initiator_depth);
        depths.responder_resources = depths.responder_resources.min(event.responder_resources);
        let linked = Linked::new(&connection, station, depths)?;
        let options = connection.stations.options();
        connection.id.ready_to_retry(&linked.pair, depths, &options.connecting(), options.rnr_retries)?;
        linked.pair.allow(NO_RIGHTS)?; // some managers' attributes come with rights
        let accepted = connection.id.accept(&linked.pair, depths, answer, &options.connecting());
        accepted.map_err(Error::system("accepting an RDMA connection"))?;
        connection.linked = Some(linked);
        Ok(connection)
    }

    /// What the caller sent with the request, padded with zeros by the connection manager.
    pub fn hello(&self) -> &[u8] {
        &self.event.message
    }

    /// The device that the request arrived on. Post receives there before accepting.
    pub fn station(&self) -> &Arc<DeviceContext> {
        &self.station
    }

    /// Refuses the request, with a reason for the caller.
    pub fn refuse(self, why: &[u8]) {
        let _ = self.id.reject(why); // it is refused by being dropped as well
    }
}

impl Linked {
    /// Creates the queue pair, in its first state.
    fn new(connection: &Connection, station: Arc<DeviceContext>, depths: ReadDepths) -> Result<Linked, Error> {
        let (options, device) = (connection.stations.options(), station.domain.device());
        let most = u32::try_from(device.attributes().max_qp_wr).unwrap_or(u32::MAX);
        let queue_depth = options.queue_depth.min(most);
        let channel = Channel::new(device)?;
        // Room for each request that may be posted, and for each shared receive, as all of them may complete here.
        let most = u32::try_from(device.attributes().max_cqe).unwrap_or(u32::MAX);
        let completions =
            Completions::new(&channel, (queue_depth + station.receives.room().min(MOST_RECEIVED)).min(most))?;
        let receives = Some(station.receives.clone());
        let with_options = PairOptions { receives, quiet: true, ..PairOptions::default() };
        let capacity = Capacity { send: queue_depth, receive: 0 };
        let (pair, inline) = station.inline.settle(device.name(), |inline| {
            let with_options = PairOptions { inline, ..with_options.clone() };
            let pair = QueuePair::with_options(&station.domain, &completions, capacity, with_options)?;
            let answered = pair.inline();
            Ok((pair, answered))
        })?;
        let alarm = Alarm::new()?;
        device.watch(pair.name(), &alarm);
        connection.id.initialise(&pair, NO_RIGHTS)?;
        connection.watch(channel.as_fd(), COMPLETIONS)?;
        connection.watch(alarm.as_fd(), ALARM)?;
        connection.watch(watched(device), DEVICE)?;
        Ok(Linked { pair, completions, channel, alarm, station, queue_depth, inline, depths })
    }
}

impl Connection {
    /// Starts to connect, from the address `local` if it is given.
    ///
    /// # Errors
    /// [`Error::NoRdma`]; [`Error::Unreachable`].
    pub fn call(devices: &Arc<Devices>, local: Option<IpAddr>, remote: SocketAddr) -> Result<Connection, Error> {
        let events = Events::new()?;
        let id = Id::new(&events)?;
        let connection =
            Connection::new(id, events, devices.clone(), Stage::Looking { slice: FIRST_SLICE }, remote, local)?;
        connection.id.resolve_address(local, remote, FIRST_SLICE).map_err(|source| connection.unreachable(source))?;
        Ok(connection)
    }

    fn new(
        id: Id,
        events: Arc<Events>,
        stations: Arc<Devices>,
        stage: Stage,
        remote: SocketAddr,
        local: Option<IpAddr>,
    ) -> Result<Connection, Error> {
        let readiness = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("creating an epoll"))?;
        let connection = Connection {
            linked: None,
            id,
            events,
            stations,
            readiness,
            stage,
            remote,
            local,
            begun: Instant::now(),
            answer: Vec::new(),
            armed: false,
            taken: Vec::new(),
        };
        connection.watch(connection.events.as_fd(), EVENTS)?;
        Ok(connection)
    }

    /// Adds a descriptor to those that make this connection's descriptor readable. [`Connection::look`] reports it.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn watch_also(&self, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.watch(fd, ALSO)
    }

    fn watch(&self, fd: BorrowedFd<'_>, which: u64) -> Result<(), Error> {
        let data = epoll::EventData::new_u64(which);
        epoll::add(&self.readiness, fd, data, epoll::EventFlags::IN)
            .map_err(Error::system("watching an RDMA connection"))
    }

    /// Address of the other end.
    pub fn peer(&self) -> SocketAddr {
        self.remote
    }

    /// The device of this connection.
    ///
    /// # Errors
    /// [`Error::Misuse`] before the connection is [routed](Step::Routed).
    pub fn station(&self) -> Result<Arc<DeviceContext>, Error> {
        match &self.linked {
            Some(linked) => Ok(linked.station.clone()),
            None => self.stations.on(&self.id.device()?),
        }
    }

    /// Requests that may be posted and not completed.
    pub fn queue_depth(&self) -> u32 {
        self.linked.as_ref().map_or(0, |linked| linked.queue_depth)
    }

    /// Maximum size of inline data: that of the options, or less if the card allows less.
    pub fn inline_bytes(&self) -> u32 {
        self.linked.as_ref().map_or(0, |linked| linked.inline)
    }

    /// The other end's answer to the connection request, padded with zeros.
    pub fn answer(&self) -> &[u8] {
        &self.answer
    }

    /// Whether both ends can send.
    pub fn is_up(&self) -> bool {
        self.stage == Stage::Up
    }

    /// Continues to connect. Call it when the descriptor is readable, until it returns [`Step::Up`].
    ///
    /// # Errors
    /// The connection cannot be made.
    pub fn advance(&mut self) -> Result<Step, Error> {
        while self.stage != Stage::Up && self.stage != Stage::Routed {
            let Some(event) = self.events.next() else { return Ok(Step::Pending) };
            self.on_event(&event)?;
        }
        Ok(if self.stage == Stage::Up { Step::Up } else { Step::Routed })
    }

    fn on_event(&mut self, event: &Event) -> Result<(), Error> {
        self.stage = match (self.stage, event.kind) {
            (Stage::Looking { .. }, ffi::RDMA_CM_EVENT_ADDR_RESOLVED) => {
                self.id.resolve_route(LOOKING_LIMIT).map_err(|source| self.unreachable(source))?;
                Stage::Routing
            }
            // In slices, as in `cm::resolve`: some kernels look again only when the time given to the call has passed.
            (Stage::Looking { slice }, ffi::RDMA_CM_EVENT_ADDR_ERROR)
                if event.status == -libc::ETIMEDOUT && self.begun.elapsed() < LOOKING_LIMIT =>
            {
                let slice = (slice * 2).min(LAST_SLICE);
                let again = self.id.resolve_address(self.local, self.remote, slice);
                again.map_err(|source| self.unreachable(source))?;
                Stage::Looking { slice }
            }
            (Stage::Routing, ffi::RDMA_CM_EVENT_ROUTE_RESOLVED) => Stage::Routed,
            (Stage::Connecting, ffi::RDMA_CM_EVENT_CONNECT_RESPONSE) => self.establish(event)?,
            (Stage::Accepting | Stage::Connecting, ffi::RDMA_CM_EVENT_ESTABLISHED) => Stage::Up,
            (_, ffi::RDMA_CM_EVENT_REJECTED) => {
                return Err(self.unreachable(io::ErrorKind::ConnectionRefused.into()));
            }
            (stage, ffi::RDMA_CM_EVENT_TIMEWAIT_EXIT) => stage,
            _ => {
                let name = self.events.name_of(event.kind);
                return Err(self.unreachable(io::Error::other(format!("{name}, status {}", event.status))));
            }
        };
        Ok(())
    }

    /// Sends the connection request, with at most 56 bytes for the other end. Receives must be posted before.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Unreachable`].
    pub fn connect(&mut self, hello: &[u8]) -> Result<(), Error> {
        let station = self.station()?;
        let depths = depths(&station, self.stations.options());
        let linked = Linked::new(self, station, depths)?;
        let connected = self.id.connect(&linked.pair, depths, hello, &self.stations.options().connecting());
        connected.map_err(|source| self.unreachable(source))?;
        self.linked = Some(linked);
        self.stage = Stage::Connecting;
        Ok(())
    }

    fn establish(&mut self, event: &Event) -> Result<Stage, Error> {
        let Some(linked) = &mut self.linked else {
            return Err(Error::Misuse("an answer without a connection request"));
        };
        linked.depths.initiator_depth = linked.depths.initiator_depth.min(event.initiator_depth).max(1);
        let options = self.stations.options();
        self.id.ready_to_retry(&linked.pair, linked.depths, &options.connecting(), options.rnr_retries)?;
        linked.pair.allow(NO_RIGHTS)?;
        self.id.establish().map_err(Error::system("establishing an RDMA connection"))?;
        self.answer.clone_from(&event.message);
        Ok(Stage::Up)
    }

    /// Gives the other end the right to read regions that are registered as exported.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn allow_reads(&self) -> Result<(), Error> {
        self.linked()?.pair.allow(ffi::IBV_ACCESS_REMOTE_READ)
    }

    /// Posts a message from registered memory, which must not change until this or a later request has completed. The
    /// caller counts posted requests. Signaled only if `shown`; failures always are.
    ///
    /// # Errors
    /// [`Error::Memory`] if the range is out of bounds; [`Error::System`].
    pub fn send(&self, name: u64, region: &Region, offset: u64, length: u32, shown: bool) -> Result<(), Error> {
        region.check(offset, length)?;
        self.linked()?.pair.post_unsignaled_send(name, &region.0, offset, length, shown)
    }

    /// Posts a short message as inline data.
    ///
    /// # Errors
    /// As [`Connection::send`]; [`Error::Misuse`] if it is longer than [`Connection::inline_bytes`].
    pub fn send_inline(&self, name: u64, bytes: &[u8], shown: bool) -> Result<(), Error> {
        let linked = self.linked()?;
        if bytes.len() > linked.inline as usize {
            return Err(Error::Misuse("the message is longer than the maximum inline size"));
        }
        linked.pair.post_inline_send(name, bytes, shown)
    }

    /// Posts a READ of the other end's memory into `region`. It is signaled.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn read(
        &self,
        name: u64,
        (key, address): (u32, u64),
        region: &Region,
        offset: u64,
        length: u32,
    ) -> Result<(), Error> {
        region.check(offset, length)?;
        self.linked()?.pair.post_signaled_read(&RemoteRead { name, address, key, length, offset }, &region.0)
    }

    /// Takes completions, without a system call.
    ///
    /// # Errors
    /// [`Error::System`] if the completion queue has failed.
    pub fn poll(&mut self, into: &mut Vec<Completion>) -> Result<usize, Error> {
        let Some(linked) = &self.linked else { return Ok(0) };
        self.taken.clear();
        linked.completions.poll(&mut self.taken)?;
        // The other end's first message may arrive before the event that reports the connection.
        let succeeded = self.taken.iter().any(|completed| completed.status == ffi::IBV_WC_SUCCESS);
        if succeeded && self.stage == Stage::Accepting {
            self.stage = Stage::Up;
        }
        for completed in &self.taken {
            let well = completed.status == ffi::IBV_WC_SUCCESS;
            if !well && completed.status != ffi::IBV_WC_WR_FLUSH_ERR {
                let why = status_name(completed.status);
                tracing::debug!(peer = %self.remote, why, "an RDMA request has failed");
            }
            into.push(Completion { name: completed.name, length: completed.length, well });
        }
        Ok(self.taken.len())
    }

    /// Makes the descriptor readable at the next completion. Completions that have arrived before do not count: poll
    /// once more after arming.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn arm(&mut self) -> Result<(), Error> {
        if let Some(linked) = &self.linked
            && !self.armed
        {
            linked.completions.arm()?;
            self.armed = true;
        }
        Ok(())
    }

    /// Handles what made the descriptor readable, except completions, which [`Connection::poll`] takes. Returns whether
    /// the descriptor of [`Connection::watch_also`] is readable.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn look(&mut self) -> Result<bool, Error> {
        let (mut ready, mut also) = (Vec::with_capacity(WATCHED), false);
        let _ = epoll::wait(&self.readiness, rustix::buffer::spare_capacity(&mut ready), Some(&Timespec::default()));
        for event in ready {
            match (event.data.u64(), &self.linked) {
                (COMPLETIONS, Some(linked)) => {
                    while linked.channel.next().is_some() {}
                    self.armed = false;
                }
                (DEVICE, Some(linked)) => linked.station.domain.device().handle_events(),
                (EVENTS, _) if self.stage != Stage::Up => drop(self.advance()?),
                (EVENTS, _) => self.check_end()?,
                (ALSO, _) => also = true,
                _ => {}
            }
        }
        if self.linked.as_ref().is_some_and(|linked| linked.alarm.is_triggered()) {
            return Err(over());
        }
        Ok(also)
    }

    fn check_end(&self) -> Result<(), Error> {
        while let Some(event) = self.events.next() {
            if is_end(&event) {
                return Err(over());
            }
        }
        Ok(())
    }

    /// Ends the connection: notifies the other end, and flushes posted requests. Completions can still be polled.
    pub fn end(&mut self) {
        if let Some(linked) = &self.linked {
            self.id.disconnect();
            linked.pair.fail();
        }
    }

    fn linked(&self) -> Result<&Linked, Error> {
        self.linked.as_ref().ok_or(Error::Misuse("the RDMA connection is not established yet"))
    }

    fn unreachable(&self, source: io::Error) -> Error {
        Error::Unreachable { what: format!("{} by RDMA", self.remote), source }
    }
}

/// Readable on progress of connecting, at the end of the connection, and on completions once [armed](Connection::arm).
impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.end();
    }
}

fn over() -> Error {
    Error::Unreachable { what: "the other end".into(), source: io::ErrorKind::ConnectionReset.into() }
}

/// READs in flight that the device and the options allow, in each direction.
fn depths(station: &DeviceContext, options: &DuplexOptions) -> ReadDepths {
    let attributes = station.domain.device().attributes();
    let lower = |most: i32| options.reads_in_flight.min(u8::try_from(most).unwrap_or(u8::MAX)).max(1);
    ReadDepths {
        initiator_depth: lower(attributes.max_qp_init_rd_atom),
        responder_resources: lower(attributes.max_qp_rd_atom),
    }
}

/// Receive completions that may wait on one connection: more than the credits of any other end.
const MOST_RECEIVED: u32 = 4096;

/// Identities of the descriptors in the epoll instance.
const EVENTS: u64 = 0;

const COMPLETIONS: u64 = 1;

const ALARM: u64 = 2;

const DEVICE: u64 = 3;

const ALSO: u64 = 4;

const WATCHED: usize = 5;

/// Shortest and longest slice of resolving an address, and the limit of all: as in `cm`.
const FIRST_SLICE: Duration = Duration::from_millis(50);

const LAST_SLICE: Duration = Duration::from_secs(1);

const LOOKING_LIMIT: Duration = Duration::from_secs(10);

// A connection request that a listener received.

/// A connection request. Dropping it refuses the request.
pub struct Request {
    id: Id,
    events: Arc<Events>,
    event: Event,
    station: Arc<DeviceContext>,
    stations: Arc<Devices>,
}

// Accepts two-sided connections.

/// A listener. Its descriptor is readable when a connection request may be waiting.
pub struct Listener {
    id: Id,
    events: Arc<Events>,
    stations: Arc<Devices>,
    address: SocketAddr,
}

impl Listener {
    /// Listens at an address of an RDMA device, or of all devices if the address is unspecified. Port 0 selects a free
    /// one.
    ///
    /// # Errors
    /// [`Error::NoRdma`]; [`Error::System`] if the address is in use, or belongs to no device.
    pub fn listen(stations: &Arc<Devices>, address: SocketAddr) -> Result<Listener, Error> {
        let events = Events::new()?;
        let id = Id::new(&events)?;
        let port = id.listen(address).map_err(Error::system("listening for RDMA connections"))?;
        let address = SocketAddr::new(address.ip(), port);
        Ok(Listener { id, events, stations: stations.clone(), address })
    }

    /// The address, with the port that was selected.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection request; `None` if there is none.
    ///
    /// # Errors
    /// The failure of one request, after which the listener can be used; [`Error::Unreachable`] if its device was
    /// removed.
    pub fn next_call(&mut self) -> Result<Option<Request>, Error> {
        while let Some(event) = self.events.next() {
            if event.kind == ffi::RDMA_CM_EVENT_DEVICE_REMOVAL && event.of == self.id.name() {
                return Err(Error::Unreachable {
                    what: format!("the RDMA device of {}", self.address),
                    source: std::io::ErrorKind::NotConnected.into(),
                });
            }
            if let Some((mut id, event)) = event.into_request() {
                let station = self.stations.on(&id.device()?)?;
                let events = Events::new()?;
                id.migrate(&events)?;
                return Ok(Some(Request { id, events, event, station, stations: self.stations.clone() }));
            }
        }
        Ok(None)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn refused(code: i32) -> Error {
        Error::System { what: "creating a queue pair", source: io::Error::from_raw_os_error(code) }
    }

    proptest! {
        #[test]
        fn a_card_that_refuses_too_much_gets_as_much_as_it_takes_and_is_asked_once_by_those_who_follow(
            wanted in 0u32..1025,
            most in 0u32..1025,
            rounds_to in prop::sample::select(vec![1u32, 16, 64]),
        ) {
            let inline = Inline::new(wanted);
            let mut calls = 0;
            let mut card = |asked: u32| {
                calls += 1;
                if asked > most { Err(refused(libc::EINVAL)) } else { Ok(((), asked.next_multiple_of(rounds_to).min(most))) }
            };
            let (_, allowed) = inline.settle("card", &mut card).unwrap();
            prop_assert!(allowed <= wanted.min(most));
            prop_assert!(2 * allowed + 1 >= wanted.min(most) || most < LEAST_BYTES);
            let again = inline.settle("card", &mut card).unwrap();
            prop_assert_eq!(again.1, allowed);
            prop_assert!(calls <= 8);
        }
    }

    #[test]
    fn a_card_that_answers_with_less_is_believed() {
        let inline = Inline::new(220);
        assert_eq!(inline.settle("card", |asked| Ok((asked, 64))).unwrap(), (220, 64));
        assert_eq!(inline.settle("card", |asked| Ok((asked, asked))).unwrap(), (64, 64));
    }

    #[test]
    fn what_fails_for_another_reason_fails_with_it_and_nothing_is_remembered() {
        let inline = Inline::new(220);
        let mut asked = Vec::new();
        let always = inline.settle::<()>("card", |bytes| {
            asked.push(bytes);
            Err(refused(libc::EINVAL))
        });
        assert!(always.unwrap_err().to_string().contains("creating a queue pair"));
        assert_eq!(asked, [220, 110, 55, 32, 0]);
        assert!(inline.settle::<()>("card", |_| Err(refused(libc::ENOMEM))).is_err());
        assert_eq!(inline.settle("card", |bytes| Ok(((), bytes))).unwrap().1, 220);
    }
}
