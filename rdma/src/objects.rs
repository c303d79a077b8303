//! What libibverbs hands out, each with one owner that gives it back: domains, registrations, completion queues, queue pairs.
//!
//! ```text
//!   Device ◀── Domain ◀── Registration ──▶ Memory        an arrow is an Arc: nothing goes before what stands on it
//!     ▲           ▲
//!     └ Channel ◀─┴─ Completions ◀── QueuePair
//! ```
//!
//! All unsafe calls on these objects stand here and in `cm`. What the comments lean on: *a pointer in one of these structs came from
//! the library, is not null, and is given back exactly once, in `drop`, after everything made from it*. The library's functions may be
//! called from several threads at once on the same object (ibv_get_device_list(3) and "Thread safety" of rdma-core), which is why all
//! are `Send` and `Sync`.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd},
    ptr::{NonNull, null_mut},
    sync::Arc,
};

use crate::{
    bindings as ffi,
    device::Device,
    duplex::SharedReceives,
    library::{done, made},
};
use remora_memory::Memory;

use crate::Error;

/// Asserts what the head of this file says of threads, once per type.
macro_rules! shared_between_threads {
    ($($type:ty)*) => { $(
        // SAFETY: The object behind the pointer is not tied to a thread.
        unsafe impl Send for $type {}
        // SAFETY: The library takes its own locks where two threads use one object.
        unsafe impl Sync for $type {}
    )* };
}

shared_between_threads!(Domain Registration Channel Completions QueuePair);

/// A protection domain: queue pairs in it can use the registrations in it, and no others.
pub struct Domain {
    raw: NonNull<ffi::ibv_pd>,
    device: Arc<Device>,
}

impl Domain {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(device: &Arc<Device>) -> Result<Arc<Domain>, Error> {
        // SAFETY: The context is open for as long as the process lives.
        let raw = made(unsafe { (device.library().verbs.ibv_alloc_pd)(device.context()) });
        let raw = raw.map_err(Error::system("making a protection domain"))?;
        Ok(Arc::new(Domain { raw, device: device.clone() }))
    }

    /// The device that it belongs to.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: See the head of the file; whatever was made from it holds an Arc and is gone.
        let code = unsafe { (self.device.library().verbs.ibv_dealloc_pd)(self.raw.as_ptr()) };
        complain(code, "a protection domain");
    }
}

/// What the other end of a queue pair may do by it: nothing.
pub const NO_RIGHTS: u32 = 0;

/// What others may do with registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The other end may read it; nobody may write it by way of the card.
    RemoteRead,
    /// What we read from others lands in it; the other end may do nothing with it.
    Landing,
}

/// Memory that the card has been told of: its pages stay where they are until this is dropped.
pub struct Registration {
    raw: NonNull<ffi::ibv_mr>,
    /// The address that the card knows the memory's first byte by.
    base: u64,
    domain: Arc<Domain>,
    memory: Arc<Memory>,
}

impl Registration {
    /// Registers all of `memory`, which backs it with pages wherever it had none.
    ///
    /// # Errors
    /// [`Error::NoRdma`] for a locked-memory limit that is too low; [`Error::System`].
    pub fn new(domain: &Arc<Domain>, memory: &Arc<Memory>, access: Access) -> Result<Arc<Registration>, Error> {
        // The library checks access flags against each other: remote rights but reading would need local writing.
        let flags = match access {
            Access::RemoteRead => ffi::IBV_ACCESS_REMOTE_READ,
            Access::Landing => ffi::IBV_ACCESS_LOCAL_WRITE,
        };
        let (address, length) = (memory.base_address(), memory.length() as usize);
        let verbs = &domain.device.library().verbs;
        let (raw, base) = match verbs.ibv_reg_mr_iova2 {
            Some(register) if access == Access::RemoteRead => {
                // SAFETY: Address and length are those of a mapping that the struct keeps alive until after deregistration. It is
                // shared memory, so that a fork of this process copies nothing of it. The card only reads it.
                (
                    unsafe { register(domain.raw.as_ptr(), address.as_ptr().cast(), length, ZERO_BASED, flags) },
                    ZERO_BASED,
                )
            }
            _ => {
                // SAFETY: As above. What the card writes lands in shared memory, of which no references exist.
                let raw =
                    unsafe { (verbs.ibv_reg_mr)(domain.raw.as_ptr(), address.as_ptr().cast(), length, flags as i32) };
                (raw, address.as_ptr() as u64)
            }
        };
        let raw = made(raw).map_err(|error| registration_failed(error, length))?;
        Ok(Arc::new(Registration { raw, base, domain: domain.clone(), memory: memory.clone() }))
    }

    /// The registered memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The domain that it is registered in.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// What a remote end has to name to read it.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: The struct behind the pointer lives until `drop`, and the library does not change it.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// The address that a remote end has to name for the first byte.
    pub fn remote_base(&self) -> u64 {
        self.base
    }

    /// A piece of it for a work request of ours, which the caller has checked to lie inside.
    pub(crate) fn piece(&self, offset: u64, length: u32) -> ffi::ibv_sge {
        debug_assert!(offset + u64::from(length) <= self.memory.length(), "pieces are checked before they are posted");
        // SAFETY: As in `remote_key`.
        let lkey = unsafe { self.raw.as_ref() }.lkey;
        // Keys know the memory by the address that it was registered at, our own work requests' as well as others'.
        ffi::ibv_sge { addr: self.base + offset, length, lkey }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: See the head of the file. Queue pairs that used it may still exist: the card then refuses their requests.
        let code = unsafe { (self.domain.device.library().verbs.ibv_dereg_mr)(self.raw.as_ptr()) };
        complain(code, "a memory registration");
    }
}

/// The remote address of a region's first byte, where the library can set one: offsets then are addresses, and nobody is told where
/// in our address space anything lies.
const ZERO_BASED: u64 = 0;

fn registration_failed(error: io::Error, length: usize) -> Error {
    if error.raw_os_error() != Some(libc::ENOMEM) {
        return Error::system("registering memory with the RDMA device")(error);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let limit = limit.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    Error::NoRdma {
        what: format!("{length} bytes of memory can't be locked (the locked-memory limit is {limit})"),
        cure: "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in the systemd unit of the service or of the \
               container runtime, or give the capability CAP_IPC_LOCK"
            .into(),
    }
}

/// A descriptor that becomes readable when an armed completion queue has something.
pub struct Channel {
    raw: NonNull<ffi::ibv_comp_channel>,
    device: Arc<Device>,
}

impl Channel {
    /// A new channel, whose descriptor does not block.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(device: &Arc<Device>) -> Result<Arc<Channel>, Error> {
        // SAFETY: The context is open for as long as the process lives.
        let raw = made(unsafe { (device.library().verbs.ibv_create_comp_channel)(device.context()) });
        let raw = raw.map_err(Error::system("making a completion channel"))?;
        let channel = Channel { raw, device: device.clone() };
        never_block(channel.as_fd())?;
        Ok(Arc::new(channel))
    }

    /// Takes one event out, if there is one, and says which queue has something: its [`Completions::name`].
    pub fn next(&self) -> Option<usize> {
        let verbs = &self.device.library().verbs;
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: Both pointers are to places of ours. The channel's descriptor does not block.
        if unsafe { (verbs.ibv_get_cq_event)(self.raw.as_ptr(), &mut queue, &mut context) } != 0 {
            return None;
        }
        // SAFETY: The queue exists: destroying one waits for its events to be acknowledged, which this is.
        unsafe { (verbs.ibv_ack_cq_events)(queue, 1) };
        Some(queue as usize)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The struct behind the pointer lives until `drop`.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: The descriptor is open until the channel is destroyed.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: See the head of the file.
        let code = unsafe { (self.device.library().verbs.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
        complain(code, "a completion channel");
    }
}

/// A completion queue.
pub struct Completions {
    raw: NonNull<ffi::ibv_cq>,
    channel: Arc<Channel>,
}

/// How one work request ended.
#[derive(Clone, Copy, Debug)]
pub struct Completed {
    /// The name that the request was given.
    pub name: u64,
    /// `IBV_WC_SUCCESS` or why not.
    pub status: ffi::ibv_wc_status,
    /// Bytes received, where it was a receive.
    pub length: u32,
}

impl Completions {
    /// A queue with room for `entries`. Beyond it completions are lost and the queue is dead, so the owners count their requests.
    pub fn new(channel: &Arc<Channel>, entries: u32) -> Result<Arc<Completions>, Error> {
        let (device, entries) = (&channel.device, i32::try_from(entries).unwrap_or(i32::MAX));
        // SAFETY: The context and the channel exist as long as this object, which holds them. 0 is the completion vector that every
        // device has.
        let raw = unsafe {
            (device.library().verbs.ibv_create_cq)(device.context(), entries, null_mut(), channel.raw.as_ptr(), 0)
        };
        let raw = made(raw).map_err(Error::system("making a completion queue"))?;
        Ok(Arc::new(Completions { raw, channel: channel.clone() }))
    }

    /// What [`Channel::next`] calls it.
    pub fn name(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// The next completion that comes makes the channel's descriptor readable. What is in the queue already does not: poll once more.
    pub fn arm(&self) -> Result<(), Error> {
        let ops = &self.channel.device.operations();
        let Some(arm) = ops.req_notify_cq else { return Err(Error::Misuse("the device can't announce completions")) };
        // SAFETY: The queue exists. 0: any completion, not only solicited ones.
        done(unsafe { arm(self.raw.as_ptr(), 0) }).map_err(Error::system("arming a completion queue"))
    }

    /// Takes up to [`BATCH`] completions out.
    pub fn poll(&self, into: &mut Vec<Completed>) -> Result<usize, Error> {
        let ops = &self.channel.device.operations();
        let Some(poll) = ops.poll_cq else { return Err(Error::Misuse("the device can't be polled")) };
        let mut entries = [const { MaybeUninit::<ffi::ibv_wc>::uninit() }; BATCH];
        // SAFETY: The queue exists; there is room for BATCH entries, of which the driver writes as many as it says.
        let count = unsafe { poll(self.raw.as_ptr(), BATCH as i32, entries.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| {
            Error::system("polling a completion queue")(io::Error::other(
                "the queue has overflowed or the device is gone",
            ))
        })?;
        for entry in entries.iter().take(count) {
            // SAFETY: Among the first `count`, which the driver has written: all fields are plain numbers, of which only those are
            // looked at that are valid whatever the status (`wr_id`, `status`), and `byte_len`, which then may mean nothing.
            let entry = unsafe { entry.assume_init_ref() };
            into.push(Completed { name: entry.wr_id, status: entry.status, length: entry.byte_len });
        }
        Ok(count)
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: See the head of the file; no queue pair uses it, and each event was acknowledged where it was taken.
        let code = unsafe { (self.channel.device.library().verbs.ibv_destroy_cq)(self.raw.as_ptr()) };
        complain(code, "a completion queue");
    }
}

/// Requests posted, and completions taken out, by one call: enough that the call is cheap for each, little enough for the stack.
pub const BATCH: usize = 16;

/// How large the two queues of a pair are.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Sends and reads that may be posted and not completed.
    pub send: u32,
    /// Receives.
    pub receive: u32,
}

/// A reliable-connected queue pair. Dropping it ends the connection at once: after that the card touches no memory on its behalf.
pub struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    domain: Arc<Domain>,
    completions: Arc<Completions>,
    /// Where its receives are posted, if not on itself.
    _receives: Option<Arc<SharedReceives>>,
    /// Bytes that a request may carry in itself, as the device has answered.
    inline: u32,
}

/// What a pair may have besides: scattered reads one of the transport, the rest one for messages.
#[derive(Clone)]
pub(crate) struct Sharing {
    /// Receives come from here.
    pub(crate) receives: Option<Arc<SharedReceives>>,
    /// Bytes that a request may carry in itself.
    pub(crate) inline: u32,
    /// Only requests that ask for it complete visibly (those that fail always do).
    pub(crate) quiet: bool,
    /// Places that one request may name.
    pub(crate) scatter: u32,
}

impl Default for Sharing {
    fn default() -> Sharing {
        Sharing { receives: None, inline: 0, quiet: false, scatter: 1 }
    }
}

/// One read, to be posted.
#[derive(Clone, Copy, Debug)]
pub struct RemoteRead {
    /// Comes back in the completion.
    pub name: u64,
    /// Where it begins, as the other end's card knows it.
    pub address: u64,
    /// The other end's key.
    pub key: u32,
    /// Bytes.
    pub length: u32,
    /// Where they land.
    pub offset: u64,
}

/// Reads that are handed to the card by one call, and so by one ring of its doorbell. Kept by its owner from call to call, as the card's
/// own format wants some 200 bytes for each.
#[derive(Default)]
pub struct Batch {
    requests: Vec<ffi::ibv_send_wr>,
    /// Of all requests, one after the other.
    places: Vec<ffi::ibv_sge>,
}

// SAFETY: The pointers in it are set and followed within one call of `post_reads`, and lead into its own lists.
unsafe impl Send for Batch {}

impl Batch {
    /// Reads in it.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Adds a read, of whose place the caller has checked that it lies inside.
    pub fn add(&mut self, read: &RemoteRead, sink: &Registration) {
        let mut request = unplaced(read.name, ffi::IBV_WR_RDMA_READ);
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: read.address, rkey: read.key };
        self.requests.push(request);
        self.extend(sink, read.offset, read.length);
    }

    /// The read added last goes on for `length` bytes, which land at `offset`, where the caller has checked as well.
    pub fn extend(&mut self, sink: &Registration, offset: u64, length: u32) {
        let Some(request) = self.requests.last_mut() else { return };
        request.num_sge += 1;
        self.places.push(sink.piece(offset, length));
    }

    /// Links the requests to one another and to their places; gives the first.
    fn link(&mut self) -> *mut ffi::ibv_send_wr {
        let (mut next, mut places) = (null_mut(), self.places.as_mut_slice());
        for request in self.requests.iter_mut().rev() {
            let before = places.len().saturating_sub(usize::try_from(request.num_sge).unwrap_or(0));
            let (others, own) = std::mem::take(&mut places).split_at_mut(before);
            (places, request.sg_list) = (others, own.as_mut_ptr());
            request.next = next;
            next = request;
        }
        next
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.places.clear();
    }
}

impl QueuePair {
    /// Every request on it completes visibly, into `completions`.
    pub fn new(domain: &Arc<Domain>, completions: &Arc<Completions>, capacity: Capacity) -> Result<QueuePair, Error> {
        QueuePair::sharing(domain, completions, capacity, Sharing::default())
    }

    /// ... one read on which may be scattered over so many places.
    pub fn scattering(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        capacity: Capacity,
        scatter: u32,
    ) -> Result<QueuePair, Error> {
        QueuePair::sharing(domain, completions, capacity, Sharing { scatter, ..Sharing::default() })
    }

    /// As [`QueuePair::new`], with what `sharing` says.
    pub(crate) fn sharing(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        capacity: Capacity,
        sharing: Sharing,
    ) -> Result<QueuePair, Error> {
        let mut wanted = ffi::ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: completions.raw.as_ptr(),
            recv_cq: completions.raw.as_ptr(),
            srq: sharing.receives.as_ref().map_or(null_mut(), |receives| receives.raw()),
            cap: ffi::ibv_qp_cap {
                max_send_wr: capacity.send,
                max_recv_wr: capacity.receive,
                max_send_sge: sharing.scatter,
                max_recv_sge: 1,
                max_inline_data: sharing.inline,
            },
            qp_type: ffi::IBV_QPT_RC,
            sq_sig_all: i32::from(!sharing.quiet),
        };
        // SAFETY: Domain, queue and shared receives exist as long as this object, which holds them; the attributes are written in full.
        let raw = unsafe { (domain.device.library().verbs.ibv_create_qp)(domain.raw.as_ptr(), &mut wanted) };
        let raw = made(raw).map_err(Error::system("making a queue pair"))?;
        let inline = wanted.cap.max_inline_data;
        let (domain, completions) = (domain.clone(), completions.clone());
        Ok(QueuePair { raw, domain, completions, _receives: sharing.receives, inline })
    }

    /// Bytes that a request may carry in itself: what was asked for, or what the device makes of it.
    pub(crate) fn inline(&self) -> u32 {
        self.inline
    }

    /// The pair's number, which the other end addresses.
    pub fn number(&self) -> u32 {
        // SAFETY: The struct behind the pointer lives until `drop`, and its number never changes.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// What asynchronous events call it.
    pub fn name(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// The queue that its requests complete into.
    pub fn completions(&self) -> &Arc<Completions> {
        &self.completions
    }

    /// The domain that it belongs to.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Changes the attributes that `mask` names.
    pub(crate) fn modify(&self, attributes: &mut ffi::ibv_qp_attr, mask: i32) -> Result<(), Error> {
        // SAFETY: The pair exists; the library reads the attributes that the mask names, all of which are plain numbers.
        let code = unsafe { (self.domain.device.library().verbs.ibv_modify_qp)(self.raw.as_ptr(), attributes, mask) };
        done(code).map_err(Error::system("changing a queue pair's state"))
    }

    /// What the card says of it, for tests.
    #[cfg(feature = "testing")]
    pub fn attributes(&self, mask: u32) -> ffi::ibv_qp_attr {
        let mut attributes = no_attributes();
        // SAFETY: Numbers and pointers: all zero bytes are valid, and the library writes it in full.
        let mut made: ffi::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        let query = self.domain.device.library().verbs.ibv_query_qp.expect("every library has it");
        // SAFETY: The pair exists; both places are ours.
        let code = unsafe { query(self.raw.as_ptr(), &mut attributes, mask as i32, &mut made) };
        assert_eq!(code, 0);
        attributes
    }

    /// What the other end may do by way of this pair, whatever keys it knows.
    pub fn allow(&self, access: u32) -> Result<(), Error> {
        let mut attributes = no_attributes();
        attributes.qp_access_flags = access;
        self.modify(&mut attributes, ffi::IBV_QP_ACCESS_FLAGS as i32)
    }

    /// Posts a read into `sink`. The caller has checked that its place lies inside, and that the queue has room.
    pub fn post_read(&self, read: &RemoteRead, sink: &Registration) -> Result<(), Error> {
        let mut batch = Batch::default();
        batch.add(read, sink);
        self.post_reads(&mut batch)
    }

    /// Posts a batch of reads, for which the queue has room, and empties it. After an error it is not known which of them were posted.
    pub fn post_reads(&self, batch: &mut Batch) -> Result<(), Error> {
        let first = batch.link();
        let posted = if first.is_null() { Ok(()) } else { self.post_list(first) };
        batch.clear();
        posted
    }

    /// Posts a message out of registered memory. The caller keeps those bytes as they are until it completes.
    pub fn post_send(&self, name: u64, letter: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let mut piece = letter.piece(offset, length);
        self.post(&mut work(name, &mut piece, ffi::IBV_WR_SEND))
    }

    /// As [`QueuePair::post_send`], on a quiet pair: completes visibly only if `shown`.
    pub(crate) fn post_quiet_send(
        &self,
        name: u64,
        letter: &Registration,
        offset: u64,
        length: u32,
        shown: bool,
    ) -> Result<(), Error> {
        let mut piece = letter.piece(offset, length);
        let mut request = work(name, &mut piece, ffi::IBV_WR_SEND);
        request.send_flags = signal(shown);
        self.post(&mut request)
    }

    /// Posts a message that the request itself carries: the bytes are the caller's again at once. No more of them than were asked
    /// for when the pair was made.
    pub(crate) fn post_inline_send(&self, name: u64, bytes: &[u8], shown: bool) -> Result<(), Error> {
        let length = u32::try_from(bytes.len()).map_err(|_| Error::Misuse("too long for a request to carry"))?;
        let mut piece = ffi::ibv_sge { addr: bytes.as_ptr() as u64, length, lkey: 0 };
        let mut request = work(name, &mut piece, ffi::IBV_WR_SEND);
        request.send_flags = signal(shown) | ffi::IBV_SEND_INLINE;
        self.post(&mut request)
    }

    /// As [`QueuePair::post_read`], on a quiet pair: completes visibly.
    pub(crate) fn post_shown_read(&self, read: &RemoteRead, sink: &Registration) -> Result<(), Error> {
        let mut piece = sink.piece(read.offset, read.length);
        let mut request = work(read.name, &mut piece, ffi::IBV_WR_RDMA_READ);
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: read.address, rkey: read.key };
        request.send_flags = signal(true);
        self.post(&mut request)
    }

    /// Ends all work: what is posted is flushed, and completes so.
    pub(crate) fn fail(&self) {
        let mut attributes = no_attributes();
        attributes.qp_state = ffi::IBV_QPS_ERR;
        // A pair that the card has failed already need not be told.
        let _ = self.modify(&mut attributes, ffi::IBV_QP_STATE as i32);
    }

    fn post(&self, request: &mut ffi::ibv_send_wr) -> Result<(), Error> {
        self.post_list(request)
    }

    /// Posts the list of requests that begins with `first`.
    fn post_list(&self, first: *mut ffi::ibv_send_wr) -> Result<(), Error> {
        let Some(post) = self.domain.device.operations().post_send else {
            return Err(Error::Misuse("the device takes no work requests"));
        };
        let mut failed = null_mut();
        // SAFETY: The pair exists. Requests and the lists of their places are whole, and read during the call only, in which they stay
        // where they are. The memory that a place names is registered in this pair's domain, and its owner keeps it until the request
        // has completed or the pair is gone; or the request carries the bytes, and then they are read during the call only.
        done(unsafe { post(self.raw.as_ptr(), first, &mut failed) }).map_err(Error::system("posting a work request"))
    }

    /// Posts room for one message of the other end.
    pub fn post_receive(&self, name: u64, letter: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let Some(post) = self.domain.device.operations().post_recv else {
            return Err(Error::Misuse("the device takes no receive requests"));
        };
        let mut piece = letter.piece(offset, length);
        let mut request = ffi::ibv_recv_wr { wr_id: name, next: null_mut(), sg_list: &mut piece, num_sge: 1 };
        let mut failed = null_mut();
        // SAFETY: As for `post`; the card writes at most `length` bytes there, into shared memory of which no references exist.
        done(unsafe { post(self.raw.as_ptr(), &mut request, &mut failed) })
            .map_err(Error::system("posting a receive request"))
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: See the head of the file. Returns only when the card has finished with it.
        let code = unsafe { (self.domain.device.library().verbs.ibv_destroy_qp)(self.raw.as_ptr()) };
        complain(code, "a queue pair");
    }
}

fn work(name: u64, piece: &mut ffi::ibv_sge, operation: ffi::ibv_wr_opcode) -> ffi::ibv_send_wr {
    let mut request = unplaced(name, operation);
    request.sg_list = piece;
    request.num_sge = 1;
    request
}

/// A request that names no memory yet.
fn unplaced(name: u64, operation: ffi::ibv_wr_opcode) -> ffi::ibv_send_wr {
    // SAFETY: Numbers, pointers and unions of them: all zero bytes are a valid, empty request.
    let mut request: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
    request.wr_id = name;
    request.opcode = operation;
    request
}

/// The flag by which a request on a quiet pair completes visibly.
fn signal(shown: bool) -> u32 {
    if shown { ffi::IBV_SEND_SIGNALED } else { 0 }
}

/// Attributes of a queue pair, all zero: only those count that a mask names.
pub(crate) fn no_attributes() -> ffi::ibv_qp_attr {
    // SAFETY: A struct of plain numbers, for which all zero bytes are valid.
    unsafe { std::mem::zeroed() }
}

/// The library's descriptors block unless told otherwise.
pub(crate) fn never_block(fd: BorrowedFd<'_>) -> Result<(), Error> {
    rustix::io::ioctl_fionbio(fd, true).map_err(Error::system("making a descriptor of the RDMA device non-blocking"))
}

/// Giving something back can fail only if the device is gone, or by a mistake of ours about the order.
fn complain(code: i32, what: &str) {
    if let Err(error) = done(code) {
        tracing::warn!(%error, "giving back {what}");
    }
}
