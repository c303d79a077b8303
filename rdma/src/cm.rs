//! The connection manager: addresses, connecting, accepting, and how a queue pair comes to be connected. What is said in the process
//! is `handshake`'s.
//!
//! Queue pairs are made by us and not by `rdma_create_qp`, and led through their states by us, with the attributes that the manager
//! gives: rdma_create_qp(3) allows that. It lets us say what the other end may do *before* it is connected (nothing), and set the
//! time-out and the retries of each connection.
//!
//! ```text
//!   reader                                                              source
//!   resolve_address, resolve_route        which device, which port
//!   pair: INIT;  connect ─────────────── REQ, Hello ──────────────────▶ Request: pair: INIT, RTR, RTS; accept
//!   Response: pair: RTR, RTS; establish ◀─ REP, Challenge ─────────────
//!                        ───────────────── RTU ───────────────────────▶ Established
//! ```
//! (On iWARP the card itself does what follows INIT, and the reader's first news is `Established`.)

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

/// Where events of several ids arrive.
pub struct Events {
    raw: NonNull<ffi::rdma_event_channel>,
    library: &'static Library,
}

// SAFETY: The channel is a descriptor and is not tied to a thread.
unsafe impl Send for Events {}
// SAFETY: Two threads that take events at once get different ones: the kernel hands each out once.
unsafe impl Sync for Events {}

/// Something that happened to an id, copied out, so that nothing of it has to be acknowledged later.
pub struct Event {
    /// Whose it is: [`Id::name`].
    pub of: usize,
    /// What happened.
    pub kind: ffi::rdma_cm_event_type,
    /// Why, for those that are failures.
    pub status: i32,
    /// What the other end sent along; longer than it was, filled up with zeros.
    pub message: Vec<u8>,
    /// Reads that we may have outstanding at the other end.
    pub initiator_depth: u8,
    /// Reads that the other end wants to have outstanding here.
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
        // SAFETY: No conditions.
        let raw = check_pointer(unsafe { (library.manager.rdma_create_event_channel)() });
        let raw = raw.map_err(|error| crate::missing::diagnose(&error))?;
        let events = Events { raw, library };
        set_nonblocking(events.as_fd())?;
        Ok(Arc::new(events))
    }

    /// The next event, if there is one. Never blocks.
    pub fn next(self: &Arc<Self>) -> Option<Event> {
        let mut raw = null_mut();
        // SAFETY: The channel exists and does not block; the place for the pointer is ours.
        if unsafe { (self.library.manager.rdma_get_cm_event)(self.raw.as_ptr(), &mut raw) } != 0 {
            return None;
        }
        let raw = NonNull::new(raw)?;
        // SAFETY: The event lives until it is acknowledged, below. It was taken just now, and is copied once.
        let event = unsafe { Event::copy(raw, self) };
        // SAFETY: Taken just now, and acknowledged once. Nothing of it is kept: `copy` has copied.
        let code = unsafe { (self.library.manager.rdma_ack_cm_event)(raw.as_ptr()) };
        debug_assert_eq!(code, 0, "an event that was taken can be acknowledged");
        Some(event)
    }

    /// The next event, waited for until `deadline`.
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

    /// The event's name, for messages.
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
        // SAFETY: All ids here are of connected kind (RDMA_PS_TCP), for which `conn` is the valid part of the union; for events that
        // have no parameters the library leaves it zero.
        let param = unsafe { &event.param.conn };
        let message = match NonNull::new(param.private_data.cast_mut().cast::<u8>()) {
            // SAFETY: Where there is a pointer there are that many bytes behind it, until the event is acknowledged.
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

    /// Splits a request to connect into its id and what was said with it. `None` for any other event.
    pub fn into_request(mut self) -> Option<(Id, Event)> {
        let id = self.request.take()?;
        Some((id, self))
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The struct behind the pointer lives until `drop`.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: The descriptor is open until the channel is destroyed.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: Every id on it held an Arc and is gone; every event was acknowledged where it was taken.
        unsafe { (self.library.manager.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// How a connection is made, beside its [`ReadDepths`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// The card repeats what is not acknowledged after 4.096 µs × 2^this.
    pub ack_timeout: u8,
    /// How often it does so, before the connection is over.
    pub retries: u8,
    /// The InfiniBand service level; `None` leaves what the subnet manager or the traffic class has assigned.
    pub service_level: Option<u8>,
}

impl Default for ConnectOptions {
    fn default() -> ConnectOptions {
        // Half a second, seven times: a dead end is found after 4 s (15 on cards that take four times as long), and neither a network
        // that finds another way nor a machine that is busy for a moment is taken for one.
        ConnectOptions { ack_timeout: 17, retries: 6, service_level: None }
    }
}

/// One end of a connection, or a listener. Dropping it frees its address; the queue pair has to be gone by then.
pub struct Id {
    raw: NonNull<ffi::rdma_cm_id>,
    events: Arc<Events>,
}

// SAFETY: An id is not tied to a thread.
unsafe impl Send for Id {}
// SAFETY: The library takes its own locks where two threads use one id.
unsafe impl Sync for Id {}

/// What a connecting or accepting end says, besides its message.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadDepths {
    /// Reads that we will have outstanding at the other end.
    pub initiator_depth: u8,
    /// Reads of the other end that we will serve at once.
    pub responder_resources: u8,
}

impl Id {
    /// A new id, whose events arrive on `events`.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(events: &Arc<Events>) -> Result<Id, Error> {
        let mut raw = null_mut();
        // SAFETY: The channel exists as long as the id, which holds it; the place for the pointer is ours.
        let code = unsafe {
            (events.library.manager.rdma_create_id)(events.raw.as_ptr(), &mut raw, null_mut(), ffi::RDMA_PS_TCP)
        };
        check_code(code).map_err(Error::system("making an RDMA endpoint"))?;
        let raw = NonNull::new(raw).ok_or(Error::Misuse("the connection manager made an endpoint of nothing"))?;
        Ok(Id { raw, events: events.clone() })
    }

    /// Has its events come by another channel from now on. Those that have come were acknowledged where they were taken, or are lost.
    pub fn migrate(&mut self, events: &Arc<Events>) -> Result<(), Error> {
        // SAFETY: Id and channel exist; the id holds the new channel from here on, and the old one until now.
        let code = unsafe { (events.library.manager.rdma_migrate_id)(self.raw.as_ptr(), events.raw.as_ptr()) };
        check_code(code).map_err(Error::system("giving an RDMA endpoint a channel of its own"))?;
        self.events = events.clone();
        Ok(())
    }

    /// Where the other end is, once there is one.
    pub fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: The struct lives until `drop`, and no reference to it is made. The address is set before the id is handed out or
        // routed, and does not change after that.
        let address = unsafe { (*self.raw.as_ptr()).route.addr.__bindgen_anon_2 };
        // SAFETY: A union of socket addresses as large as its largest, all of it initialised by the library, which zeroes ids.
        let words = unsafe { address.dst_storage }._bindgen_opaque_blob;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let port = u16::from_be_bytes([*bytes.get(2)?, *bytes.get(3)?]);
        match i32::from(u16::from_ne_bytes([*bytes.first()?, *bytes.get(1)?])) {
            libc::AF_INET => Some((<[u8; 4]>::try_from(bytes.get(4..8)?).ok()?, port).into()),
            libc::AF_INET6 => Some((<[u8; 16]>::try_from(bytes.get(8..24)?).ok()?, port).into()),
            _ => None,
        }
    }

    /// What [`Event::of`] calls it.
    pub fn name(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// The device that the address has led to.
    ///
    /// # Errors
    /// [`Error::Misuse`] while it is bound to none.
    pub fn device(&self) -> Result<Arc<Device>, Error> {
        // SAFETY: The context of an id is null, or a device that the connection manager has opened and keeps open.
        unsafe { Device::of(self.context()) }
    }

    /// Whether it is bound to one device, and not to all.
    pub fn has_device(&self) -> bool {
        !self.context().is_null()
    }

    fn context(&self) -> *mut ffi::ibv_context {
        // SAFETY: The struct lives until `drop`. Only this field is read and no reference is made, as the library may write others. It
        // writes this one while it handles a call of ours on this id or an event of its channel, which its owner does not do meanwhile.
        unsafe { (*self.raw.as_ptr()).verbs }
    }

    /// Listens at `address`; says at which port, as 0 is a free one.
    pub fn listen(&self, address: SocketAddr) -> io::Result<u16> {
        let mut place = Address::from(address);
        let manager = &self.events.library.manager;
        // SAFETY: The id exists; the address is a place of ours, as long as its family says.
        check_code(unsafe { (manager.rdma_bind_addr)(self.raw.as_ptr(), place.raw()) })?;
        // SAFETY: The id exists.
        check_code(unsafe { (manager.rdma_listen)(self.raw.as_ptr(), BACKLOG) })?;
        // SAFETY: The id exists and is bound.
        Ok(u16::from_be(unsafe { (manager.rdma_get_src_port)(self.raw.as_ptr()) }))
    }

    /// Binds it to an address of this host; says which port of which device has it.
    pub fn bind(&self, address: SocketAddr) -> Result<(Arc<Device>, u8), Error> {
        let mut place = Address::from(address);
        // SAFETY: The id exists; the address is a place of ours, as long as its family says.
        let bound = check_code(unsafe { (self.events.library.manager.rdma_bind_addr)(self.raw.as_ptr(), place.raw()) });
        bound.map_err(Error::system("binding an RDMA endpoint to an address"))?;
        // SAFETY: The struct lives until `drop`; the library has written this field in the call just made.
        let port = unsafe { (*self.raw.as_ptr()).port_num };
        Ok((self.device()?, port))
    }

    /// Sets the traffic class of the connection to be made.
    pub fn set_traffic_class(&self, class: u8) -> Result<(), Error> {
        let mut value = class;
        // SAFETY: The option is one byte, which is ours and read during the call.
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

    /// Begins to look for the way to `remote`, from `local` where it is given.
    pub fn resolve_address(&self, local: Option<IpAddr>, remote: SocketAddr, within: Duration) -> io::Result<()> {
        let mut local = local.map(|host| Address::from(SocketAddr::new(host, 0)));
        let mut remote = Address::from(remote);
        let local = local.as_mut().map_or(null_mut(), Address::raw);
        // SAFETY: The id exists; the addresses are places of ours (or null for any), as long as their families say.
        check_code(unsafe {
            (self.events.library.manager.rdma_resolve_addr)(self.raw.as_ptr(), local, remote.raw(), millis(within))
        })
    }

    /// Begins to look for the route, once the address is resolved.
    pub fn resolve_route(&self, within: Duration) -> io::Result<()> {
        // SAFETY: The id exists.
        check_code(unsafe { (self.events.library.manager.rdma_resolve_route)(self.raw.as_ptr(), millis(within)) })
    }

    /// Begins to connect.
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

    /// Says that the queue pair is ready, once the other end has accepted.
    pub fn establish(&self) -> io::Result<()> {
        // SAFETY: The id exists, has no queue pair of the manager's own, and was told that the other end accepts.
        check_code(unsafe { (self.events.library.manager.rdma_establish)(self.raw.as_ptr()) })
    }

    /// Accepts a request to connect.
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

    /// Refuses a request to connect.
    pub fn reject(&self, message: &[u8]) -> io::Result<()> {
        let length = u8::try_from(message.len()).unwrap_or(u8::MAX);
        // SAFETY: The id exists and came with a request; `length` is at most the message's.
        check_code(unsafe {
            (self.events.library.manager.rdma_reject)(self.raw.as_ptr(), message.as_ptr().cast(), length)
        })
    }

    /// Tells the other end that the connection is over, as well as it goes.
    pub fn disconnect(&self) {
        // SAFETY: The id exists. One that isn't connected answers an error, which says nothing new.
        let _ = unsafe { (self.events.library.manager.rdma_disconnect)(self.raw.as_ptr()) };
    }

    /// The first step of a queue pair: bound to this id's port, with these rights for the other end.
    pub fn initialise(&self, pair: &QueuePair, access: u32) -> Result<(), Error> {
        self.step(pair, ffi::IBV_QPS_INIT, |attributes| attributes.qp_access_flags = access)
    }

    /// The second and the third: able to receive, able to send.
    pub fn ready(&self, pair: &QueuePair, depths: ReadDepths, options: &ConnectOptions) -> Result<(), Error> {
        self.ready_to_retry(pair, depths, options, RNR_RETRIES)
    }

    /// ... which sends again so often where the other end has no receive posted.
    pub fn ready_to_retry(
        &self,
        pair: &QueuePair,
        depths: ReadDepths,
        options: &ConnectOptions,
        rnr_retries: u8,
    ) -> Result<(), Error> {
        self.step(pair, ffi::IBV_QPS_RTR, |attributes| {
            attributes.max_dest_rd_atomic = depths.responder_resources;
            // What the manager has put there came from the subnet manager, or from the traffic class.
            attributes.ah_attr.sl = options.service_level.unwrap_or(attributes.ah_attr.sl);
        })?;
        self.step(pair, ffi::IBV_QPS_RTS, |attributes| {
            attributes.max_rd_atomic = depths.initiator_depth;
            attributes.timeout = options.ack_timeout;
            attributes.retry_cnt = options.retries;
            attributes.rnr_retry = rnr_retries;
        })
    }

    /// One step, with the manager's attributes as far as `change` leaves them.
    fn step(
        &self,
        pair: &QueuePair,
        state: ffi::ibv_qp_state,
        change: impl FnOnce(&mut ffi::ibv_qp_attr),
    ) -> Result<(), Error> {
        let mut attributes = no_attributes();
        attributes.qp_state = state;
        let mut mask = 0;
        // SAFETY: The id exists; attributes and mask are places of ours.
        let code =
            unsafe { (self.events.library.manager.rdma_init_qp_attr)(self.raw.as_ptr(), &mut attributes, &mut mask) };
        check_code(code).map_err(Error::system("asking how to connect a queue pair"))?;
        change(&mut attributes);
        // Some kernels set bits that no attribute has (rdma-core clears the same ones in its own rdma_accept).
        pair.modify(&mut attributes, mask & !UNKNOWN_ATTRIBUTES)
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: See the head of `objects`: made by the library, given back once. Its events were acknowledged where they were taken.
        if unsafe { (self.events.library.manager.rdma_destroy_id)(self.raw.as_ptr()) } != 0 {
            tracing::warn!(error = %io::Error::last_os_error(), "giving back an RDMA endpoint");
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

/// Whether this event is the end of a connection that was made.
pub fn is_end(event: &Event) -> bool {
    !matches!(event.kind, ffi::RDMA_CM_EVENT_ESTABLISHED | ffi::RDMA_CM_EVENT_CONNECT_RESPONSE)
}

/// Finds the device and the neighbour for an address, until `deadline`, which is `limit` after the beginning. In slices, of which the
/// first are short: kernels were seen (6.1) to look again for a neighbour that they had to ask the network for only when the time given
/// to this call was over, though its answer had long come.
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
    // The status is an error number for some events and a reason of the protocol for others.
    let why = if event.status < 0 { io::Error::from_raw_os_error(code).to_string() } else { format!("status {code}") };
    unreachable(remote, io::Error::other(format!("{}: {why}", events.name_of(event.kind))))
}

/// The error for an address that can't be reached.
pub fn unreachable(remote: SocketAddr, source: io::Error) -> Error {
    Error::Unreachable { what: format!("the source by RDMA at {remote}"), source }
}

/// What is silent when an address can't be found.
const NEIGHBOUR: &str = "the network, asked for the source's RDMA address,";

/// Slices of finding a neighbour: far above what an answer takes, and about as long as the system waits before it asks again.
const FIRST_RESOLVE: Duration = Duration::from_millis(50);
const LAST_RESOLVE: Duration = Duration::from_secs(1);

/// Requests to connect that may wait for us, as for a TCP listener.
const BACKLOG: i32 = 128;

/// Retries towards an end that has posted no receive: without end (7 means that). Both ends post theirs before they connect, so that
/// it does not happen; who is gone is found by the other retries.
const RNR_RETRIES: u8 = 7;

/// Bits 21 to 23 of an attribute mask.
const UNKNOWN_ATTRIBUTES: i32 = 0xe0_0000;

fn millis(time: Duration) -> i32 {
    i32::try_from(time.as_millis()).unwrap_or(i32::MAX)
}

/// An address as the system has it.
struct Address(socket2::SockAddr);

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address(address.into())
    }
}

impl Address {
    /// For calls that only read it, though their declarations have it mutable.
    fn raw(&mut self) -> *mut libc::sockaddr {
        self.0.as_ptr().cast::<libc::sockaddr>().cast_mut()
    }
}
