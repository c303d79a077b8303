//! The connection manager: addresses, connecting, accepting, and how a queue pair gets connected. The messages that are
//! exchanged meanwhile are the callers'.
//!
//! This crate creates queue pairs itself, not by `rdma_create_qp`, and changes their states itself with the attributes
//! that the manager provides; rdma_create_qp(3) allows that. So the rights of the other end are set *before* the pair
//! is connected (none), and each connection has its own time-out and retries.
//!
//! ```text
//!   reader                                                              source
//!   resolve_address, resolve_route        which device, which port
//!   pair: INIT;  connect ─────────────── REQ, Hello ──────────────────▶ Request: pair: INIT, RTR, RTS; accept
//!   Response: pair: RTR, RTS; establish ◀─ REP, Challenge ─────────────
//!                        ───────────────── RTU ───────────────────────▶ Established
//! ```
//! On iWARP the card itself performs the steps after INIT, and the reader's first event is `Established`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    ptr::{NonNull, null_mut},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    bindings as ffi,
    device::Device,
    library::{Library, check_code, check_pointer, library, set_nonblocking},
    objects::{QueuePair, no_attributes},
};
use remora_memory::wait_readable;

use crate::Error;

/// An event channel, on which events of several ids arrive.
pub struct Events {
    raw: NonNull<ffi::rdma_event_channel>,
    library: &'static Library,
}

// SAFETY: The channel is a descriptor and is not bound to a thread.
unsafe impl Send for Events {}
// SAFETY: Two threads that take events at the same time get different events: the kernel returns each event once.
unsafe impl Sync for Events {}

/// An event of an id. Everything is copied out of the library's event, which is acknowledged.
pub struct Event {
    /// The id that the event belongs to, as [`Id::name`] returns it.
    pub of: usize,
    /// The kind of event.
    pub kind: ffi::rdma_cm_event_type,
    /// The reason, for failures.
    pub status: i32,
    /// The private data that the other end sent, padded with zeros.
    pub message: Vec<u8>,
    /// READs that this end may have outstanding at the other end.
    pub initiator_depth: u8,
    /// READs that the other end wants to have outstanding at this end.
    pub responder_resources: u8,
    /// The new id of a request to connect. Dropping it refuses the request.
    request: Option<Id>,
}

impl Events {
    /// A new channel, whose descriptor does not block.
    ///
    /// # Errors
    /// [`Error::NoRdma`], with what is missing; [`Error::System`].
    pub fn new() -> Result<Arc<Events>, Error> {
        let library = library()?;
        // SAFETY: The call has no preconditions.
        let raw = check_pointer(unsafe { (library.manager.rdma_create_event_channel)() });
        let raw = raw.map_err(|error| crate::library::diagnose(&error))?;
        let events = Events { raw, library };
        set_nonblocking(events.as_fd())?;
        Ok(Arc::new(events))
    }

    /// The next event, if there is one. Never blocks.
    pub fn next(self: &Arc<Self>) -> Option<Event> {
        let mut raw = null_mut();
        // SAFETY: The channel exists and does not block. The pointer is written to a local variable.
        if unsafe { (self.library.manager.rdma_get_cm_event)(self.raw.as_ptr(), &mut raw) } != 0 {
            return None;
        }
        let raw = NonNull::new(raw)?;
        // SAFETY: The event lives until it is acknowledged, below. It was just taken, and is copied once.
        let event = unsafe { Event::copy(raw, self) };
        // SAFETY: The event was just taken and is acknowledged once. `copy` keeps no pointer into it.
        let code = unsafe { (self.library.manager.rdma_ack_cm_event)(raw.as_ptr()) };
        debug_assert_eq!(code, 0, "an event that was taken can be acknowledged");
        Some(event)
    }

    /// The next event, waited for until `deadline`; `None` if there is none until then.
    ///
    /// # Errors
    /// [`Error::Memory`] if the wait fails.
    pub fn wait(self: &Arc<Self>, deadline: Instant) -> Result<Option<Event>, Error> {
        loop {
            if let Some(event) = self.next() {
                return Ok(Some(event));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            wait_readable(self.as_fd(), left)?;
        }
    }

    /// The name of an event, for messages.
    pub fn name_of(&self, kind: ffi::rdma_cm_event_type) -> &'static str {
        self.library.event_name(kind)
    }
}

impl Event {
    /// Copies an event out, and takes over the id that a request to connect brings.
    ///
    /// # Safety
    /// `raw` is an event of `events` that is not acknowledged yet, and is copied for the first time.
    unsafe fn copy(raw: NonNull<ffi::rdma_cm_event>, events: &Arc<Events>) -> Event {
        // SAFETY: The event lives until it is acknowledged, and the library does not change it.
        let event = unsafe { raw.as_ref() };
        // SAFETY: All ids here are connected ones (RDMA_PS_TCP), for which `conn` is the valid part of the union. For
        // events without parameters the library leaves it zero.
        let param = unsafe { &event.param.conn };
        let message = match NonNull::new(param.private_data.cast_mut().cast::<u8>()) {
            // SAFETY: If the pointer is not null, it points to that many bytes, until the event is acknowledged.
            Some(data) => unsafe { std::slice::from_raw_parts(data.as_ptr(), param.private_data_len.into()) }.to_vec(),
            None => Vec::new(),
        };
        Event {
            of: event.id as usize,
            kind: event.event,
            status: event.status,
            message,
            initiator_depth: param.initiator_depth,
            responder_resources: param.responder_resources,
            request: match event.event {
                ffi::RDMA_CM_EVENT_CONNECT_REQUEST => {
                    NonNull::new(event.id).map(|raw| Id { raw, events: events.clone() })
                }
                _ => None,
            },
        }
    }

    /// Splits a connection request into its id and what the other end sent. `None` for any other event.
    pub fn into_request(mut self) -> Option<(Id, Event)> {
        let id = self.request.take()?;
        Some((id, self))
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The struct behind the pointer exists until `drop`.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: The descriptor is open until the channel is destroyed.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: Every id on the channel held an Arc and is dropped; every event was acknowledged when it was taken.
        unsafe { (self.library.manager.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// How a connection is made, besides its [`ReadDepths`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// The card retransmits what is not acknowledged after 4.096 µs × 2^this.
    pub ack_timeout: u8,
    /// Number of retransmissions before the connection ends.
    pub retries: u8,
    /// The InfiniBand service level; `None` leaves what the subnet manager or the traffic class has assigned.
    pub service_level: Option<u8>,
}

impl Default for ConnectOptions {
    fn default() -> ConnectOptions {
        // Half a second, seven times: a dead connection is found after 4 s (15 s on cards that wait four times as
        // long). A network that reroutes, or a machine that is busy for a moment, is not mistaken for a dead one.
        ConnectOptions { ack_timeout: 17, retries: 6, service_level: None }
    }
}

/// One end of a connection, or a listener. Dropping it frees its address; its queue pair must be dropped before.
pub struct Id {
    raw: NonNull<ffi::rdma_cm_id>,
    events: Arc<Events>,
}

// SAFETY: An id is not bound to a thread.
unsafe impl Send for Id {}
// SAFETY: The library locks where two threads use one id.
unsafe impl Sync for Id {}

/// Outstanding READs that one end offers and asks for when it connects or accepts.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadDepths {
    /// READs that this end will have outstanding at the other end.
    pub initiator_depth: u8,
    /// READs of the other end that this end serves at the same time.
    pub responder_resources: u8,
}

impl Id {
    /// A new id, whose events arrive on `events`.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(events: &Arc<Events>) -> Result<Id, Error> {
        let mut raw = null_mut();
        // SAFETY: The channel exists as long as the id, which holds it. The pointer is written to a local variable.
        let code = unsafe {
            (events.library.manager.rdma_create_id)(events.raw.as_ptr(), &mut raw, null_mut(), ffi::RDMA_PS_TCP)
        };
        check_code(code).map_err(Error::system("creating an RDMA endpoint"))?;
        let raw = NonNull::new(raw).ok_or(Error::Misuse("the connection manager returned no endpoint"))?;
        Ok(Id { raw, events: events.clone() })
    }

    /// Moves the id to another event channel. Events that have arrived were acknowledged when they were taken, or are
    /// lost.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn migrate(&mut self, events: &Arc<Events>) -> Result<(), Error> {
        // SAFETY: Id and channel exist. The id held the old channel until now and holds the new one from here on.
        let code = unsafe { (events.library.manager.rdma_migrate_id)(self.raw.as_ptr(), events.raw.as_ptr()) };
        check_code(code).map_err(Error::system("moving an RDMA endpoint to its own channel"))?;
        self.events = events.clone();
        Ok(())
    }

    /// The address of the other end; `None` before it is known.
    pub fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: The struct exists until `drop`, and no reference to it is made. The address is set before the id is
        // returned or routed, and does not change after that.
        let address = unsafe { (*self.raw.as_ptr()).route.addr.__bindgen_anon_2 };
        // SAFETY: A union of socket addresses as large as its largest, all of it initialised by the library, which
        // zeroes ids.
        let words = unsafe { address.dst_storage }._bindgen_opaque_blob;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let port = u16::from_be_bytes([*bytes.get(2)?, *bytes.get(3)?]);
        match i32::from(u16::from_ne_bytes([*bytes.first()?, *bytes.get(1)?])) {
            libc::AF_INET => Some((<[u8; 4]>::try_from(bytes.get(4..8)?).ok()?, port).into()),
            libc::AF_INET6 => Some((<[u8; 16]>::try_from(bytes.get(8..24)?).ok()?, port).into()),
            _ => None,
        }
    }

    /// The identity of this id in [`Event::of`].
    pub fn name(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// The device that the address resolved to.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the id is not bound to a device.
    pub fn device(&self) -> Result<Arc<Device>, Error> {
        // SAFETY: The context of an id is null, or a device that the connection manager has opened and keeps open.
        unsafe { Device::of(self.context()) }
    }

    /// Whether the id is bound to one device. A listener at an unspecified address is bound to none.
    pub fn has_device(&self) -> bool {
        !self.context().is_null()
    }

    fn context(&self) -> *mut ffi::ibv_context {
        // SAFETY: The struct exists until `drop`. Only this field is read, without a reference, as the library may
        // write other fields. It writes this field while it handles a call on this id or an event of its channel, which
        // the id's owner does not do at the same time.
        unsafe { (*self.raw.as_ptr()).verbs }
    }

    /// Listens at `address`, and returns the port. Port 0 selects a free one.
    ///
    /// # Errors
    /// What the system reports.
    pub fn listen(&self, address: SocketAddr) -> io::Result<u16> {
        let mut place = Address::from(address);
        let manager = &self.events.library.manager;
        // SAFETY: The id exists. The address is a local variable, as long as its family requires.
        check_code(unsafe { (manager.rdma_bind_addr)(self.raw.as_ptr(), place.raw()) })?;
        // SAFETY: The id exists.
        check_code(unsafe { (manager.rdma_listen)(self.raw.as_ptr(), BACKLOG) })?;
        // SAFETY: The id exists and is bound.
        Ok(u16::from_be(unsafe { (manager.rdma_get_src_port)(self.raw.as_ptr()) }))
    }

    /// Binds the id to an address of this host, and returns the device and port that have the address.
    ///
    /// # Errors
    /// [`Error::System`] if no RDMA device has the address.
    pub fn bind(&self, address: SocketAddr) -> Result<(Arc<Device>, u8), Error> {
        let mut place = Address::from(address);
        // SAFETY: The id exists. The address is a local variable, as long as its family requires.
        let bound = check_code(unsafe { (self.events.library.manager.rdma_bind_addr)(self.raw.as_ptr(), place.raw()) });
        bound.map_err(Error::system("binding an RDMA endpoint to an address"))?;
        // SAFETY: The struct exists until `drop`; the library wrote this field in the call above.
        let port = unsafe { (*self.raw.as_ptr()).port_num };
        Ok((self.device()?, port))
    }

    /// Sets the traffic class of the connection to be made.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn set_traffic_class(&self, class: u8) -> Result<(), Error> {
        let mut value = class;
        // SAFETY: The option is one byte, a local variable that is read during the call.
        let code = unsafe {
            (self.events.library.manager.rdma_set_option)(
                self.raw.as_ptr(),
                ffi::RDMA_OPTION_ID as i32,
                ffi::RDMA_OPTION_ID_TOS as i32,
                (&raw mut value).cast(),
                size_of::<u8>(),
            )
        };
        check_code(code).map_err(Error::system("setting the traffic class"))
    }

    /// Starts to resolve `remote`, from the address `local` if it is given. An event reports the result.
    ///
    /// # Errors
    /// What the system reports.
    pub fn resolve_address(&self, local: Option<IpAddr>, remote: SocketAddr, within: Duration) -> io::Result<()> {
        let mut local = local.map(|host| Address::from(SocketAddr::new(host, 0)));
        let mut remote = Address::from(remote);
        let local = local.as_mut().map_or(null_mut(), Address::raw);
        // SAFETY: The id exists. The addresses are local variables (or null for any), as long as their families
        // require.
        check_code(unsafe {
            (self.events.library.manager.rdma_resolve_addr)(self.raw.as_ptr(), local, remote.raw(), millis(within))
        })
    }

    /// Starts to resolve the route, after the address. An event reports the result.
    ///
    /// # Errors
    /// What the system reports.
    pub fn resolve_route(&self, within: Duration) -> io::Result<()> {
        // SAFETY: The id exists.
        check_code(unsafe { (self.events.library.manager.rdma_resolve_route)(self.raw.as_ptr(), millis(within)) })
    }

    /// Starts to connect. An event reports the result.
    ///
    /// # Errors
    /// What the system reports.
    pub fn connect(
        &self,
        pair: &QueuePair,
        depths: ReadDepths,
        message: &[u8],
        options: &ConnectOptions,
    ) -> io::Result<()> {
        let mut param = parameters(pair, depths, message, options);
        // SAFETY: The id exists and has a route; parameters and message are read during the call.
        check_code(unsafe { (self.events.library.manager.rdma_connect)(self.raw.as_ptr(), &mut param) })
    }

    /// Confirms the connection, after the other end has accepted and the queue pair is ready.
    ///
    /// # Errors
    /// What the system reports.
    pub fn establish(&self) -> io::Result<()> {
        // SAFETY: The id exists, has no queue pair of the manager's own, and the other end has accepted.
        check_code(unsafe { (self.events.library.manager.rdma_establish)(self.raw.as_ptr()) })
    }

    /// Accepts a connection request.
    ///
    /// # Errors
    /// What the system reports.
    pub fn accept(
        &self,
        pair: &QueuePair,
        depths: ReadDepths,
        message: &[u8],
        options: &ConnectOptions,
    ) -> io::Result<()> {
        let mut param = parameters(pair, depths, message, options);
        // SAFETY: The id exists and came with a request; parameters and message are read during the call.
        check_code(unsafe { (self.events.library.manager.rdma_accept)(self.raw.as_ptr(), &mut param) })
    }

    /// Rejects a connection request.
    ///
    /// # Errors
    /// What the system reports.
    pub fn reject(&self, message: &[u8]) -> io::Result<()> {
        let length = u8::try_from(message.len()).unwrap_or(u8::MAX);
        // SAFETY: The id exists and came with a request; `length` is at most the length of the message.
        check_code(unsafe {
            (self.events.library.manager.rdma_reject)(self.raw.as_ptr(), message.as_ptr().cast(), length)
        })
    }

    /// Notifies the other end that the connection is closed, if it is connected.
    pub fn disconnect(&self) {
        // SAFETY: The id exists. If it is not connected, the call fails, and nothing needs to be done.
        let _ = unsafe { (self.events.library.manager.rdma_disconnect)(self.raw.as_ptr()) };
    }

    /// First step of a queue pair (INIT): binds it to this id's port and sets the rights of the other end.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn initialise(&self, pair: &QueuePair, access: u32) -> Result<(), Error> {
        self.step(pair, ffi::IBV_QPS_INIT, |attributes| attributes.qp_access_flags = access)
    }

    /// Second and third step of a queue pair (RTR, RTS): it can receive and send.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn ready(&self, pair: &QueuePair, depths: ReadDepths, options: &ConnectOptions) -> Result<(), Error> {
        self.ready_to_retry(pair, depths, options, RNR_RETRIES)
    }

    /// As [`Id::ready`], with a number of retries for a message that finds no receive posted.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn ready_to_retry(
        &self,
        pair: &QueuePair,
        depths: ReadDepths,
        options: &ConnectOptions,
        rnr_retries: u8,
    ) -> Result<(), Error> {
        self.step(pair, ffi::IBV_QPS_RTR, |attributes| {
            attributes.max_dest_rd_atomic = depths.responder_resources;
            // The manager's value came from the subnet manager, or from the traffic class.
            attributes.ah_attr.sl = options.service_level.unwrap_or(attributes.ah_attr.sl);
        })?;
        self.step(pair, ffi::IBV_QPS_RTS, |attributes| {
            attributes.max_rd_atomic = depths.initiator_depth;
            attributes.timeout = options.ack_timeout;
            attributes.retry_cnt = options.retries;
            attributes.rnr_retry = rnr_retries;
        })
    }

    /// One change of state, with the manager's attributes after `change`.
    fn step(
        &self,
        pair: &QueuePair,
        state: ffi::ibv_qp_state,
        change: impl FnOnce(&mut ffi::ibv_qp_attr),
    ) -> Result<(), Error> {
        let mut attributes = no_attributes();
        attributes.qp_state = state;
        let mut mask = 0;
        // SAFETY: The id exists. Attributes and mask are local variables.
        let code =
            unsafe { (self.events.library.manager.rdma_init_qp_attr)(self.raw.as_ptr(), &mut attributes, &mut mask) };
        check_code(code).map_err(Error::system("querying the attributes to connect a queue pair"))?;
        change(&mut attributes);
        // Some kernels set bits that belong to no attribute; rdma-core clears the same ones in rdma_accept.
        pair.modify(&mut attributes, mask & !UNKNOWN_ATTRIBUTES)
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: See the docs of `objects`: made by the library, freed once. Its events were acknowledged when they
        // were taken.
        if unsafe { (self.events.library.manager.rdma_destroy_id)(self.raw.as_ptr()) } != 0 {
            tracing::warn!(error = %io::Error::last_os_error(), "cannot free an RDMA endpoint");
        }
    }
}

fn parameters(pair: &QueuePair, depths: ReadDepths, message: &[u8], options: &ConnectOptions) -> ffi::rdma_conn_param {
    ffi::rdma_conn_param {
        private_data: message.as_ptr().cast(),
        private_data_len: u8::try_from(message.len()).unwrap_or(u8::MAX),
        responder_resources: depths.responder_resources,
        initiator_depth: depths.initiator_depth,
        flow_control: 1,
        retry_count: options.retries,
        rnr_retry_count: RNR_RETRIES,
        srq: 0,
        qp_num: pair.number(),
    }
}

/// Whether an event ends an established connection.
pub fn is_end(event: &Event) -> bool {
    !matches!(event.kind, ffi::RDMA_CM_EVENT_ESTABLISHED | ffi::RDMA_CM_EVENT_CONNECT_RESPONSE)
}

/// Finds the device and the neighbour for an address before `deadline`; `limit` is the whole time, for the error.
///
/// It asks in slices, of which the first are short. Linux 6.1 was seen to look again for a neighbour only when the time
/// given to the call had passed, even if the network's answer had arrived long before.
///
/// # Errors
/// [`Error::Unreachable`], [`Error::TimedOut`].
pub fn resolve(
    events: &Arc<Events>,
    id: &Id,
    local: Option<IpAddr>,
    remote: SocketAddr,
    deadline: Instant,
    limit: Duration,
) -> Result<(), Error> {
    let timed_out = || Error::TimedOut { what: NEIGHBOUR, after: limit };
    let mut slice = FIRST_RESOLVE;
    loop {
        id.resolve_address(local, remote, slice).map_err(|source| unreachable(remote, source))?;
        let event = events.wait(deadline)?.ok_or_else(timed_out)?;
        match event.kind {
            ffi::RDMA_CM_EVENT_ADDR_RESOLVED => return Ok(()),
            ffi::RDMA_CM_EVENT_ADDR_ERROR if event.status == -libc::ETIMEDOUT => {
                if Instant::now() >= deadline {
                    return Err(timed_out());
                }
            }
            _ => return Err(failed(events, &event, remote)),
        }
        slice = (slice * 2).min(LAST_RESOLVE);
    }
}

/// The error for an event that ends the attempt to reach `remote`.
pub fn failed(events: &Arc<Events>, event: &Event, remote: SocketAddr) -> Error {
    let code = event.status.unsigned_abs() as i32;
    // The status is an error number for some events, and a protocol reason for others.
    let why = if event.status < 0 { io::Error::from_raw_os_error(code).to_string() } else { format!("status {code}") };
    unreachable(remote, io::Error::other(format!("{}: {why}", events.name_of(event.kind))))
}

/// The error for an address that cannot be reached.
pub fn unreachable(remote: SocketAddr, source: io::Error) -> Error {
    Error::Unreachable { what: format!("the source by RDMA at {remote}"), source }
}

/// What did not answer when an address cannot be resolved.
const NEIGHBOUR: &str = "the network, resolving the source's RDMA address,";

/// Shortest and longest slice: far above the time of an answer, and about the interval at which the system asks again.
const FIRST_RESOLVE: Duration = Duration::from_millis(50);
const LAST_RESOLVE: Duration = Duration::from_secs(1);

/// Connection requests that can wait, as for a TCP listener.
const BACKLOG: i32 = 128;

/// Retries towards an end that has posted no receive: unlimited, which is what 7 means. Both ends post receives before
/// they connect, so that none is needed; an end that is gone is found by the other retries.
const RNR_RETRIES: u8 = 7;

/// Bits 21 to 23 of an attribute mask.
const UNKNOWN_ATTRIBUTES: i32 = 0xe0_0000;

fn millis(time: Duration) -> i32 {
    i32::try_from(time.as_millis()).unwrap_or(i32::MAX)
}

/// An address in the system's representation.
struct Address(socket2::SockAddr);

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address(address.into())
    }
}

impl Address {
    /// For calls that only read the address, although their declarations take a mutable pointer.
    fn raw(&mut self) -> *mut libc::sockaddr {
        self.0.as_ptr().cast::<libc::sockaddr>().cast_mut()
    }
}
