//! Send and receive, step by step: what an RDMA connection consists of, shown with one message that fits and one that
//! is too long.
//!
//! The one-sided transport uses READs, for which the other end posts nothing. Messages are used by its handshake, and
//! by most other programs. `rdma/examples/send_recv.rs` runs this code. Nothing else depends on it.
//!
//! ```text
//!   listener                                              caller
//!   protection domain, completion queue, queue pair       the same, of its own
//!   memory region; post_receive: room for 64 bytes        memory region with a message in it
//!        ◀──────────────── connect, accept ──────────────────
//!        ◀──────────────── SEND, 23 bytes ───────────────────  post_send
//!   completion: 23 bytes received                         completion: sent (that is: acknowledged by the other card)
//!        ◀──────────────── SEND, 100 bytes ──────────────────  post_send
//!   completion: a local error (each device has its own)   completion: a remote error
//! ```

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    bindings as ffi,
    cm::{ConnectOptions, Event, Events, Id, ReadDepths, resolve},
    library::status_name,
    objects::{Access, Capacity, Channel, Completed, Completions, Domain, NO_RIGHTS, QueuePair, Registration},
};
use remora_memory::{Memory, Pages, wait_readable};

use crate::Error;

/// Runs the walk-through between two addresses of RDMA devices of this machine, which may be the same. Passes a
/// description of each step to `tell`.
///
/// # Errors
/// [`Error::NoRdma`], or any step that fails. The two failed completions at the end are expected and not reported as
/// errors.
pub fn send_and_receive(listener: IpAddr, caller: IpAddr, mut tell: impl FnMut(String)) -> Result<(), Error> {
    let Connected { near, far, call, answer } = connect(listener, caller, &mut tell)?;

    // 6. A message: bytes in a registered region, a work request that names them, and a completion on each side.
    near.region.memory().write(0, MESSAGE)?;
    near.pair.post_send(SEND, &near.region, 0, MESSAGE.len() as u32)?;
    let sent = near.completion()?;
    let received = far.completion()?;
    tell(format!("the caller's request {} completed: {}", sent.name, status_name(sent.status)));
    let mut bytes = vec![0; received.length as usize];
    far.region.memory().read(0, &mut bytes)?;
    tell(format!("the listener's request {} completed: {:?}", received.name, String::from_utf8_lossy(&bytes)));
    if bytes != MESSAGE {
        return Err(Error::Protocol("another message arrived than was sent"));
    }

    // 7. A message that is longer than its receive buffer. Both sides get an error, and both queue pairs fail: an error
    //    on a reliable connection ends it, and requests posted after that are flushed.
    near.pair.post_send(SEND, &near.region, 0, 100)?;
    let (short, long) = (far.completion()?, near.completion()?);
    tell(format!("a message of 100 bytes into room for {ROOM}: the listener has {:?},", status_name(short.status)));
    tell(format!("the caller {:?}", status_name(long.status)));
    if short.status == ffi::IBV_WC_SUCCESS || long.status == ffi::IBV_WC_SUCCESS {
        return Err(Error::Protocol("a message that was too long got through"));
    }
    call.disconnect();
    answer.disconnect();
    Ok(())
}

/// Both sides of a connection, and their ids.
struct Connected {
    near: Side,
    far: Side,
    call: Id,
    answer: Id,
}

/// The first five steps: a connection.
fn connect(listener: IpAddr, caller: IpAddr, tell: &mut impl FnMut(String)) -> Result<Connected, Error> {
    let options = ConnectOptions::default();

    // 1. The listener. Events of the connection manager arrive on a channel; an id is one end of a connection, or a
    //    listener.
    let listening = Events::new()?;
    let listener_id = Id::new(&listening)?;
    let port = listener_id.listen(SocketAddr::new(listener, 0)).map_err(Error::system("listening"))?;
    tell(format!("listening at {listener}, port {port} of the RDMA port space"));

    // 2. The caller resolves the device and the route, and creates its objects on that device.
    let calling = Events::new()?;
    let call = Id::new(&calling)?;
    let deadline = Instant::now() + PATIENCE;
    resolve(&calling, &call, Some(caller), SocketAddr::new(listener, port), deadline, PATIENCE)?;
    call.resolve_route(PATIENCE).map_err(Error::system("resolving"))?;
    expect(&calling, ffi::RDMA_CM_EVENT_ROUTE_RESOLVED)?;
    let near = Side::new(&call)?;
    tell(format!("the caller's route is by {}", near.pair.domain().device().name()));

    // 3. It connects. Its queue pair must be initialised first, because the request carries the pair's number.
    call.initialise(&near.pair, NO_RIGHTS)?;
    call.connect(&near.pair, ReadDepths::default(), b"hello", &options).map_err(Error::system("connecting"))?;

    // 4. The listener receives the request: a new id, the caller's private data (padded with zeros), and the device
    //    that it arrived on.
    let request = expect(&listening, ffi::RDMA_CM_EVENT_CONNECT_REQUEST)?;
    let (answer, request) = request.into_request().ok_or(Error::Protocol("no request to connect"))?;
    tell(format!("a request came, with {} bytes of private data", request.message.len()));
    let far = Side::new(&answer)?;
    answer.initialise(&far.pair, NO_RIGHTS)?;
    // Receives are posted before any message can arrive: the card rejects a SEND that finds none, and the sender must
    // repeat it.
    far.pair.post_receive(RECEIVE, &far.region, 0, ROOM)?;
    far.pair.post_receive(RECEIVE, &far.region, u64::from(ROOM), ROOM)?;
    // Ready to receive, ready to send; then accept.
    answer.ready(&far.pair, ReadDepths::default(), &options)?;
    answer.accept(&far.pair, ReadDepths::default(), b"", &options).map_err(Error::system("accepting"))?;

    // 5. The caller receives the acceptance and makes its queue pair ready in turn. `establish` completes the three-way
    //    exchange.
    expect(&calling, ffi::RDMA_CM_EVENT_CONNECT_RESPONSE)?;
    call.ready(&near.pair, ReadDepths::default(), &options)?;
    call.establish().map_err(Error::system("establishing"))?;
    expect(&listening, ffi::RDMA_CM_EVENT_ESTABLISHED)?;
    tell("connected".into());
    Ok(Connected { near, far, call, answer })
}

/// The caller's card writes into memory of the listener that is registered for reading only, and the listener's queue
/// pair has all rights. Returns how the request has completed, and whether the memory is unchanged.
///
/// # Errors
/// As [`send_and_receive`].
#[cfg(feature = "testing")]
pub fn write_to_readable_memory(listener: IpAddr, caller: IpAddr) -> Result<(ffi::ibv_wc_status, bool), Error> {
    let Connected { near, far, .. } = connect(listener, caller, &mut |_| {})?;
    let readable = Arc::new(Memory::create("readable", 4096, Pages::Small)?);
    let region = Registration::new(far.pair.domain(), &readable, Access::RemoteRead)?;
    far.pair.allow(ffi::IBV_ACCESS_REMOTE_READ | ffi::IBV_ACCESS_REMOTE_WRITE)?;
    let before = readable.crc32c(0..4096)?;
    near.region.memory().write(0, MESSAGE)?;
    let (address, key) = (region.remote_base(), region.remote_key());
    let write = crate::objects::RemoteRead { name: SEND, address, key, length: MESSAGE.len() as u32, offset: 0 };
    near.pair.post_write(&write, &near.region)?;
    let status = near.completion()?.status;
    Ok((status, readable.crc32c(0..4096)? == before))
}

/// The objects of one side on its device. Fields are dropped in this order: the queue pair first.
struct Side {
    pair: QueuePair,
    region: Arc<Registration>,
    completions: Arc<Completions>,
    channel: Arc<Channel>,
}

impl Side {
    fn new(id: &Id) -> Result<Side, Error> {
        let device = id.device()?;
        let domain = Domain::new(&device)?;
        let memory = Arc::new(Memory::create("walkthrough", 4096, Pages::Small)?);
        // The other end gets no rights to it: this card places messages where this end's receive requests say.
        let region = Registration::new(&domain, &memory, Access::Landing)?;
        let channel = Channel::new(&device)?;
        let completions = Completions::new(&channel, 8)?;
        let pair = QueuePair::new(&domain, &completions, Capacity { send: 2, receive: 2 })?;
        Ok(Side { pair, region, completions, channel })
    }

    /// The next completion. It arms first, polls second and sleeps last, so that no completion is missed.
    fn completion(&self) -> Result<Completed, Error> {
        let deadline = Instant::now() + PATIENCE;
        let mut done = Vec::new();
        loop {
            self.completions.arm()?;
            self.completions.poll(&mut done)?;
            if let Some(first) = done.first() {
                return Ok(*first);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut { what: "a work request", after: PATIENCE });
            }
            wait_readable(std::os::fd::AsFd::as_fd(&*self.channel), left)?;
            while self.channel.next().is_some() {}
        }
    }
}

fn expect(events: &Arc<Events>, wanted: ffi::rdma_cm_event_type) -> Result<Event, Error> {
    let event = events.wait(Instant::now() + PATIENCE)?;
    let event = event.ok_or(Error::TimedOut { what: "the connection manager", after: PATIENCE })?;
    match event.kind == wanted {
        true => Ok(event),
        false => Err(Error::system("connecting")(std::io::Error::other(events.name_of(event.kind)))),
    }
}

const MESSAGE: &[u8] = b"one message, both sides";

/// Names of the work requests, which their completions return.
const SEND: u64 = 1;
const RECEIVE: u64 = 2;

/// Bytes of one receive buffer.
const ROOM: u32 = 64;

/// Time limit of each step, for an emulated machine that is busy.
const PATIENCE: Duration = Duration::from_secs(20);
