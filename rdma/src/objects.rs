//! The objects of libibverbs, each with one owner that frees it: domains, registrations, completion queues, queue
//! pairs.
//!
//! ```text
//!   Device ◀── Domain ◀── Registration ──▶ Memory        an arrow is an Arc: no object is freed before its users
//!     ▲           ▲
//!     └ Channel ◀─┴─ Completions ◀── QueuePair
//! ```
//!
//! The SAFETY comments rely on this: *a pointer in one of these structs came from the library, is not null, and is
//! freed exactly once, in `drop`, after everything made from it*. The library's functions may be called by several
//! threads on the same object (ibv_get_device_list(3) and "Thread safety" of rdma-core), which is why all types are
//! `Send` and `Sync`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use remora_memory::Memory;

use crate::bindings as ffi;
use crate::device::Device;
use crate::library::{Error, check_code, check_pointer, set_nonblocking, warn_on_failure};

// Protection domains, and the memory that is registered in them.

/// A protection domain. Queue pairs in a domain can use the registrations of the same domain only.
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
        // SAFETY: The context is open as long as the process lives.
        let raw = check_pointer(unsafe { (device.library().verbs.ibv_alloc_pd)(device.context()) });
        let raw = raw.map_err(Error::system("creating a protection domain"))?;
        Ok(Arc::new(Domain { raw, device: device.clone() }))
    }

    /// The device that it belongs to.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The library's pointer, valid as long as this object.
    pub(crate) fn raw(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: See the docs of the parent module. Everything made from the domain held an Arc and is dropped.
        let code = unsafe { (self.device.library().verbs.ibv_dealloc_pd)(self.raw.as_ptr()) };
        warn_on_failure(code, "a protection domain");
    }
}

// SAFETY: The object behind the pointer is not bound to a thread.
unsafe impl Send for Domain {}

// SAFETY: The library locks where two threads use one object.
unsafe impl Sync for Domain {}

/// Rights to registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The other end may read it. No card may write it.
    RemoteRead,
    /// This card may write received bytes to it. The other end has no rights.
    Landing,
}

/// Memory registered with a card. Its pages stay in place until this is dropped.
pub struct Registration {
    raw: NonNull<ffi::ibv_mr>,
    /// The address by which the card knows the first byte.
    base: u64,
    domain: Arc<Domain>,
    memory: Arc<Memory>,
}

impl Registration {
    /// Registers all of `memory`, which backs it with pages.
    ///
    /// # Errors
    /// [`Error::NoRdma`] if the locked-memory limit is too low; [`Error::System`].
    pub fn new(domain: &Arc<Domain>, memory: &Arc<Memory>, access: Access) -> Result<Arc<Registration>, Error> {
        // The library checks the combination: remote rights other than reading would require local writing.
        let flags = match access {
            Access::RemoteRead => ffi::IBV_ACCESS_REMOTE_READ,
            Access::Landing => ffi::IBV_ACCESS_LOCAL_WRITE,
        };
        let (address, length) = (memory.base_address(), memory.length() as usize);
        let verbs = &domain.device().library().verbs;
        let (raw, base) = match verbs.ibv_reg_mr_iova2 {
            Some(register) if access == Access::RemoteRead => {
                // SAFETY: Address and length are those of a mapping that the struct keeps until after deregistration.
                // The mapping is shared memory, so that a fork of this process copies nothing of it. The card only
                // reads it.
                (unsafe { register(domain.raw(), address.as_ptr().cast(), length, ZERO_BASED, flags) }, ZERO_BASED)
            }
            _ => {
                // SAFETY: As above. The card writes to shared memory, to which no references exist.
                let raw = unsafe { (verbs.ibv_reg_mr)(domain.raw(), address.as_ptr().cast(), length, flags as i32) };
                (raw, address.as_ptr() as u64)
            }
        };
        let raw = check_pointer(raw).map_err(|error| registration_failed(error, length))?;
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

    /// The key that the other end names to read the memory.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: The struct behind the pointer exists until `drop`, and the library does not change it.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// The address that the other end names for the first byte.
    pub fn remote_base(&self) -> u64 {
        self.base
    }

    /// A segment for a work request. The card may write there, so the range is checked.
    ///
    /// # Errors
    /// [`remora_memory::Error::OutOfBounds`].
    pub(crate) fn piece(&self, offset: u64, length: u32) -> Result<ffi::ibv_sge, Error> {
        remora_memory::check(offset, length.into(), self.memory.length())?;
        // SAFETY: As in `remote_key`.
        let lkey = unsafe { self.raw.as_ref() }.lkey;
        // Keys refer to the address at which the memory was registered, for local and remote requests.
        Ok(ffi::ibv_sge { addr: self.base + offset, length, lkey })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: See the docs of the parent module. Queue pairs that used it may still exist: the card then rejects
        // their requests.
        let code = unsafe { (self.domain.device().library().verbs.ibv_dereg_mr)(self.raw.as_ptr()) };
        warn_on_failure(code, "a memory registration");
    }
}

/// The remote address of a region's first byte, if the library can set one. Offsets then are addresses, and the other
/// end does not learn where the memory is in this process.
const ZERO_BASED: u64 = 0;

fn registration_failed(error: io::Error, length: usize) -> Error {
    if error.raw_os_error() != Some(libc::ENOMEM) {
        return Error::system("registering memory with the RDMA device")(error);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let limit = limit.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    Error::NoRdma {
        what: format!("{length} bytes of memory cannot be locked (the locked-memory limit is {limit})"),
        cure: "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in the systemd unit of the service or of the \
               container runtime, or give the capability CAP_IPC_LOCK"
            .into(),
    }
}

// SAFETY: The object behind the pointer is not bound to a thread.
unsafe impl Send for Registration {}

// SAFETY: The library locks where two threads use one object.
unsafe impl Sync for Registration {}

// Completion queues, and the channels that announce completions.

/// A completion channel: its descriptor becomes readable when an armed completion queue gets a completion.
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
        // SAFETY: The context is open as long as the process lives.
        let raw = check_pointer(unsafe { (device.library().verbs.ibv_create_comp_channel)(device.context()) });
        let raw = raw.map_err(Error::system("creating a completion channel"))?;
        let channel = Channel { raw, device: device.clone() };
        set_nonblocking(channel.as_fd())?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Takes one event, if there is one, and returns the name of the queue it is for ([`Completions::name`]).
    pub fn next(&self) -> Option<usize> {
        let verbs = &self.device.library().verbs;
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: Both pointers are to local variables. The channel's descriptor does not block.
        if unsafe { (verbs.ibv_get_cq_event)(self.raw.as_ptr(), &mut queue, &mut context) } != 0 {
            return None;
        }
        // SAFETY: The queue exists: destroying a queue waits until its events are acknowledged, and this acknowledges
        // one.
        unsafe { (verbs.ibv_ack_cq_events)(queue, 1) };
        Some(queue as usize)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The struct behind the pointer exists until `drop`.
        let fd = unsafe { self.raw.as_ref() }.fd;
        // SAFETY: The descriptor is open until the channel is destroyed.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: See the docs of the parent module.
        let code = unsafe { (self.device.library().verbs.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
        warn_on_failure(code, "a completion channel");
    }
}

/// A completion queue.
pub struct Completions {
    raw: NonNull<ffi::ibv_cq>,
    channel: Arc<Channel>,
}

/// The result of a work request.
#[derive(Clone, Copy, Debug)]
pub struct Completed {
    /// The name of the request.
    pub name: u64,
    /// `IBV_WC_SUCCESS`, or the reason of the failure.
    pub status: ffi::ibv_wc_status,
    /// Bytes received, for a receive that succeeded.
    pub length: u32,
}

impl Completed {
    /// Reads an entry that a driver has written.
    fn read(entry: &MaybeUninit<ffi::ibv_wc>) -> Completed {
        let entry = entry.as_ptr();
        // SAFETY: The entry is aligned and borrowed. Drivers set `wr_id` in each entry that they report. No reference
        // is made to the other fields, which drivers may leave unchanged.
        let name = unsafe { (*entry).wr_id };
        // SAFETY: As above, for `status`.
        let status = unsafe { (*entry).status };
        let length = if status == ffi::IBV_WC_SUCCESS {
            // SAFETY: As above; `byte_len` is set in each entry that reports a success.
            unsafe { (*entry).byte_len }
        } else {
            0
        };
        Completed { name, status, length }
    }
}

impl Completions {
    /// A queue with room for `entries`. If it overflows, completions are lost and the queue fails. Owners therefore
    /// count their requests.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(channel: &Arc<Channel>, entries: u32) -> Result<Arc<Completions>, Error> {
        let (device, entries) = (channel.device(), i32::try_from(entries).unwrap_or(i32::MAX));
        // SAFETY: The context and the channel exist as long as this object, which holds them. 0 is the completion
        // vector that every device has.
        let raw = unsafe {
            (device.library().verbs.ibv_create_cq)(device.context(), entries, null_mut(), channel.raw.as_ptr(), 0)
        };
        let raw = check_pointer(raw).map_err(Error::system("creating a completion queue"))?;
        Ok(Arc::new(Completions { raw, channel: channel.clone() }))
    }

    /// The library's pointer, valid as long as this object.
    pub(crate) fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// The identity of this queue in [`Channel::next`].
    pub fn name(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    /// Makes the channel's descriptor readable at the next completion. Completions that are already in the queue do not
    /// count: poll once more after arming.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn arm(&self) -> Result<(), Error> {
        let ops = &self.channel.device().operations();
        let Some(arm) = ops.req_notify_cq else {
            return Err(Error::Misuse("the device does not announce completions"));
        };
        // SAFETY: The queue exists. 0 means any completion, not only solicited ones.
        check_code(unsafe { arm(self.raw.as_ptr(), 0) }).map_err(Error::system("arming a completion queue"))
    }

    /// Takes up to [`BATCH`] completions.
    ///
    /// # Errors
    /// [`Error::System`] if the queue has overflowed or the device is gone.
    pub fn poll(&self, into: &mut Vec<Completed>) -> Result<usize, Error> {
        let ops = &self.channel.device().operations();
        let Some(poll) = ops.poll_cq else { return Err(Error::Misuse("the device does not support polling")) };
        let mut entries = [const { MaybeUninit::<ffi::ibv_wc>::zeroed() }; BATCH];
        // SAFETY: The queue exists. There is room for BATCH entries, and the driver writes as many as it returns.
        let count = unsafe { poll(self.raw.as_ptr(), BATCH as i32, entries.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| {
            Error::system("polling a completion queue")(io::Error::other(
                "the queue has overflowed or the device is gone",
            ))
        })?;
        for entry in entries.iter().take(count) {
            into.push(Completed::read(entry));
        }
        Ok(count)
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: See the docs of the parent module. No queue pair uses the queue, and each event was acknowledged when
        // it was taken.
        let code = unsafe { (self.channel.device().library().verbs.ibv_destroy_cq)(self.raw.as_ptr()) };
        warn_on_failure(code, "a completion queue");
    }
}

/// Requests posted, and completions taken, by one call: enough to make the call cheap per request, few enough for the
/// stack.
pub const BATCH: usize = 16;

// SAFETY: The object behind the pointer is not bound to a thread.
unsafe impl Send for Channel {}
// SAFETY: The library locks where two threads use one object.
unsafe impl Sync for Channel {}
// SAFETY: The object behind the pointer is not bound to a thread.
unsafe impl Send for Completions {}
// SAFETY: The library locks where two threads use one object.
unsafe impl Sync for Completions {}

// Queue pairs: their states, the requests posted on them, several READs in one call, and receive queues that pairs
// share.

/// No rights for the other end of a queue pair.
pub const NO_RIGHTS: u32 = 0;

/// Sizes of the two queues of a pair.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Sends and READs that may be posted and not completed.
    pub send: u32,
    /// Receives that may be posted and not completed.
    pub receive: u32,
}

/// A reliable-connected queue pair. Dropping it ends the connection immediately: after that the card accesses no memory
/// on its behalf.
pub struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    domain: Arc<Domain>,
    completions: Arc<Completions>,
    /// The shared receive queue, if receives are not posted on the pair itself.
    _receives: Option<Arc<SharedReceives>>,
    /// Maximum size of inline data, as the device has reported.
    inline: u32,
}

/// Options of a pair: the one-sided transport uses `scatter`, connections for messages use the others.
#[derive(Clone)]
pub(crate) struct PairOptions {
    /// The shared receive queue.
    pub(crate) receives: Option<Arc<SharedReceives>>,
    /// Maximum size of inline data to ask for.
    pub(crate) inline: u32,
    /// Only requests that ask for it are signaled; failures always are.
    pub(crate) quiet: bool,
    /// Segments that one request may name.
    pub(crate) scatter: u32,
}

impl Default for PairOptions {
    fn default() -> PairOptions {
        PairOptions { receives: None, inline: 0, quiet: false, scatter: 1 }
    }
}

impl QueuePair {
    /// A pair whose requests are all signaled, into `completions`.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(domain: &Arc<Domain>, completions: &Arc<Completions>, capacity: Capacity) -> Result<QueuePair, Error> {
        QueuePair::with_options(domain, completions, capacity, PairOptions::default())
    }

    /// As [`QueuePair::new`], with READs that may be scattered over `scatter` segments.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn scattering(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        capacity: Capacity,
        scatter: u32,
    ) -> Result<QueuePair, Error> {
        QueuePair::with_options(domain, completions, capacity, PairOptions { scatter, ..PairOptions::default() })
    }

    /// As [`QueuePair::new`], with options.
    pub(crate) fn with_options(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        capacity: Capacity,
        with_options: PairOptions,
    ) -> Result<QueuePair, Error> {
        let mut wanted = ffi::ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: completions.raw(),
            recv_cq: completions.raw(),
            srq: with_options.receives.as_ref().map_or(null_mut(), |receives| receives.raw()),
            cap: ffi::ibv_qp_cap {
                max_send_wr: capacity.send,
                max_recv_wr: capacity.receive,
                max_send_sge: with_options.scatter,
                max_recv_sge: 1,
                max_inline_data: with_options.inline,
            },
            qp_type: ffi::IBV_QPT_RC,
            sq_sig_all: i32::from(!with_options.quiet),
        };
        // SAFETY: Domain, queue and shared receives exist as long as this object, which holds them; all attributes are
        // set.
        let raw = unsafe { (domain.device().library().verbs.ibv_create_qp)(domain.raw(), &mut wanted) };
        let raw = check_pointer(raw).map_err(Error::system("creating a queue pair"))?;
        let inline = wanted.cap.max_inline_data;
        let (domain, completions) = (domain.clone(), completions.clone());
        Ok(QueuePair { raw, domain, completions, _receives: with_options.receives, inline })
    }

    /// Maximum size of inline data: what was asked for, or what the device made of it.
    pub(crate) fn inline(&self) -> u32 {
        self.inline
    }

    /// The pair's number, which the other end addresses.
    pub fn number(&self) -> u32 {
        // SAFETY: The struct behind the pointer exists until `drop`, and its number never changes.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// The identity of this pair in asynchronous events.
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
        // SAFETY: The pair exists. The library reads the attributes that the mask names, which are plain numbers.
        let code = unsafe { (self.domain.device().library().verbs.ibv_modify_qp)(self.raw.as_ptr(), attributes, mask) };
        check_code(code).map_err(Error::system("changing a queue pair's state"))
    }

    /// The card's attributes of the pair.
    #[cfg(feature = "testing")]
    pub fn attributes(&self, mask: u32) -> ffi::ibv_qp_attr {
        let mut attributes = no_attributes();
        // SAFETY: Numbers and pointers: all zero bytes are valid, and the library writes it in full.
        let mut made: ffi::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        let query = self.domain.device().library().verbs.ibv_query_qp.expect("every library has it");
        // SAFETY: The pair exists; both places are ours.
        let code = unsafe { query(self.raw.as_ptr(), &mut attributes, mask as i32, &mut made) };
        assert_eq!(code, 0);
        attributes
    }

    /// Sets the rights of the other end, for all keys.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn allow(&self, access: u32) -> Result<(), Error> {
        let mut attributes = no_attributes();
        attributes.qp_access_flags = access;
        self.modify(&mut attributes, ffi::IBV_QP_ACCESS_FLAGS as i32)
    }

    /// Posts a READ into `sink`. The caller keeps count of the room in the queue.
    ///
    /// # Errors
    /// [`remora_memory::Error::OutOfBounds`]; [`Error::System`].
    pub fn post_read(&self, read: &RemoteRead, sink: &Registration) -> Result<(), Error> {
        let mut batch = Batch::default();
        batch.add(read, sink)?;
        self.post_reads(&mut batch)
    }

    /// Posts a batch of READs and empties it. The caller keeps count of the room in the queue. After an error it is
    /// unknown which READs were posted.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn post_reads(&self, batch: &mut Batch) -> Result<(), Error> {
        let first = batch.link();
        let posted = if first.is_null() { Ok(()) } else { self.post_list(first) };
        batch.clear();
        posted
    }

    /// Posts a message from registered memory. The caller does not change the bytes until the request has completed.
    ///
    /// # Errors
    /// [`remora_memory::Error::OutOfBounds`]; [`Error::System`].
    pub fn post_send(&self, name: u64, buffer: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let mut piece = buffer.piece(offset, length)?;
        self.post(&mut work(name, &mut piece, ffi::IBV_WR_SEND))
    }

    /// As [`QueuePair::post_send`], on a pair without automatic signals: signaled only if `shown`.
    pub(crate) fn post_unsignaled_send(
        &self,
        name: u64,
        buffer: &Registration,
        offset: u64,
        length: u32,
        shown: bool,
    ) -> Result<(), Error> {
        let mut piece = buffer.piece(offset, length)?;
        let mut request = work(name, &mut piece, ffi::IBV_WR_SEND);
        request.send_flags = signal(shown);
        self.post(&mut request)
    }

    /// Posts a message as inline data, at most as long as was asked for when the pair was made. The caller may reuse
    /// the bytes immediately.
    pub(crate) fn post_inline_send(&self, name: u64, bytes: &[u8], shown: bool) -> Result<(), Error> {
        let length = u32::try_from(bytes.len()).map_err(|_| Error::Misuse("too long for inline data"))?;
        let mut piece = ffi::ibv_sge { addr: bytes.as_ptr() as u64, length, lkey: 0 };
        let mut request = work(name, &mut piece, ffi::IBV_WR_SEND);
        request.send_flags = signal(shown) | ffi::IBV_SEND_INLINE;
        self.post(&mut request)
    }

    /// As [`QueuePair::post_read`], on a pair without automatic signals: signaled.
    pub(crate) fn post_signaled_read(&self, read: &RemoteRead, sink: &Registration) -> Result<(), Error> {
        let mut piece = sink.piece(read.offset, read.length)?;
        let mut request = work(read.name, &mut piece, ffi::IBV_WR_RDMA_READ);
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: read.address, rkey: read.key };
        request.send_flags = signal(true);
        self.post(&mut request)
    }

    /// Posts a WRITE from registered memory to the other end's, for tests in which the other end refuses it: the
    /// product has no WRITE. `write` names the place there and the offset here.
    ///
    /// # Errors
    /// As [`QueuePair::post_read`].
    #[cfg(feature = "testing")]
    pub fn post_write(&self, write: &RemoteRead, from: &Registration) -> Result<(), Error> {
        let mut piece = from.piece(write.offset, write.length)?;
        let mut request = work(write.name, &mut piece, ffi::IBV_WR_RDMA_WRITE);
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: write.address, rkey: write.key };
        self.post(&mut request)
    }

    /// Moves the pair to the error state: posted requests are flushed, and complete with an error.
    pub(crate) fn fail(&self) {
        let mut attributes = no_attributes();
        attributes.qp_state = ffi::IBV_QPS_ERR;
        // Fails if the card has already moved the pair to the error state.
        let _ = self.modify(&mut attributes, ffi::IBV_QP_STATE as i32);
    }

    fn post(&self, request: &mut ffi::ibv_send_wr) -> Result<(), Error> {
        self.post_list(request)
    }

    /// Posts a linked list of requests.
    fn post_list(&self, first: *mut ffi::ibv_send_wr) -> Result<(), Error> {
        let Some(post) = self.domain.device().operations().post_send else {
            return Err(Error::Misuse("the device accepts no work requests"));
        };
        let mut failed = null_mut();
        // SAFETY: The pair exists. Requests and their segments are complete, and are read during the call only, during
        // which they do not move. The memory of a segment is registered in this pair's domain, and its owner keeps it
        // until the request has completed or the pair is dropped; inline data is read during the call only.
        check_code(unsafe { post(self.raw.as_ptr(), first, &mut failed) })
            .map_err(Error::system("posting a work request"))
    }

    /// Posts a receive for one message.
    ///
    /// # Errors
    /// [`remora_memory::Error::OutOfBounds`]; [`Error::System`].
    pub fn post_receive(&self, name: u64, buffer: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let Some(post) = self.domain.device().operations().post_recv else {
            return Err(Error::Misuse("the device accepts no receive requests"));
        };
        let mut piece = buffer.piece(offset, length)?;
        let mut request = ffi::ibv_recv_wr { wr_id: name, next: null_mut(), sg_list: &mut piece, num_sge: 1 };
        let mut failed = null_mut();
        // SAFETY: As for `post_list`. The card writes at most `length` bytes into shared memory, to which no references
        // exist.
        check_code(unsafe { post(self.raw.as_ptr(), &mut request, &mut failed) })
            .map_err(Error::system("posting a receive request"))
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: See the docs of the parent module. The call returns only when the card has finished with the pair.
        let code = unsafe { (self.domain.device().library().verbs.ibv_destroy_qp)(self.raw.as_ptr()) };
        warn_on_failure(code, "a queue pair");
    }
}

fn work(name: u64, piece: &mut ffi::ibv_sge, operation: ffi::ibv_wr_opcode) -> ffi::ibv_send_wr {
    let mut request = empty_request(name, operation);
    request.sg_list = piece;
    request.num_sge = 1;
    request
}

/// The flag that makes the card signal a request.
fn signal(shown: bool) -> u32 {
    if shown { ffi::IBV_SEND_SIGNALED } else { 0 }
}

/// Attributes of a queue pair, all zero. Only those that a mask names are used.
pub(crate) fn no_attributes() -> ffi::ibv_qp_attr {
    // SAFETY: A struct of plain numbers, for which all zero bytes are valid.
    unsafe { std::mem::zeroed() }
}

// SAFETY: The object behind the pointer is not bound to a thread.
unsafe impl Send for QueuePair {}

// SAFETY: The library locks where two threads use one object.
unsafe impl Sync for QueuePair {}

// READs of the other end's memory, several per call.

/// A READ to be posted.
#[derive(Clone, Copy, Debug)]
pub struct RemoteRead {
    /// The name that the completion returns.
    pub name: u64,
    /// Address of the first byte, as the other end's card knows it.
    pub address: u64,
    /// The other end's key.
    pub key: u32,
    /// Number of bytes.
    pub length: u32,
    /// Offset in the sink where the first byte is written.
    pub offset: u64,
}

/// READs that are passed to the card by one call, and so by one write to its doorbell. The owner reuses it, because a
/// request takes some 200 bytes in the card's format.
#[derive(Default)]
pub struct Batch {
    requests: Vec<ffi::ibv_send_wr>,
    /// The segments of all requests, in their order.
    places: Vec<ffi::ibv_sge>,
}

// SAFETY: Pointers in it are set and used within one call of `post_reads`, and point into its own vectors.
unsafe impl Send for Batch {}

impl Batch {
    /// Whether it contains no READ.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Number of READs.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Adds a READ.
    ///
    /// # Errors
    /// [`remora_memory::Error::OutOfBounds`] if its place is outside the sink; the batch does not change.
    pub fn add(&mut self, read: &RemoteRead, sink: &Registration) -> Result<(), Error> {
        let place = sink.piece(read.offset, read.length)?;
        let mut request = empty_request(read.name, ffi::IBV_WR_RDMA_READ);
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: read.address, rkey: read.key };
        request.num_sge = 1;
        self.requests.push(request);
        self.places.push(place);
        Ok(())
    }

    /// Extends the last READ by `length` bytes, which are written at `offset` in the sink.
    ///
    /// # Errors
    /// [`remora_memory::Error::OutOfBounds`] if the place is outside the sink, [`Error::Misuse`] if the batch is empty;
    /// the batch does not change.
    pub fn extend(&mut self, sink: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let place = sink.piece(offset, length)?;
        let Some(request) = self.requests.last_mut() else { return Err(Error::Misuse("no read to extend")) };
        request.num_sge += 1;
        self.places.push(place);
        Ok(())
    }

    /// Links the requests to each other and to their segments, and returns the first.
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

/// A request without segments.
fn empty_request(name: u64, operation: ffi::ibv_wr_opcode) -> ffi::ibv_send_wr {
    // SAFETY: Numbers, pointers and unions of them: all zero bytes are a valid, empty request.
    let mut request: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
    request.wr_id = name;
    request.opcode = operation;
    request
}

/// A shared receive queue, for all queue pairs that were made with it.
pub(crate) struct SharedReceives {
    raw: NonNull<ffi::ibv_srq>,
    domain: Arc<Domain>,
    room: u32,
}

// SAFETY: A shared receive queue is not bound to a thread.
unsafe impl Send for SharedReceives {}

// SAFETY: The library locks where two threads post at the same time.
unsafe impl Sync for SharedReceives {}

impl SharedReceives {
    /// A queue with room for `wanted` receives, or as many as the device allows.
    pub(crate) fn new(domain: &Arc<Domain>, wanted: u32) -> Result<Arc<SharedReceives>, Error> {
        let device = domain.device();
        let most = u32::try_from(device.attributes().max_srq_wr).unwrap_or(0);
        if most == 0 {
            return Err(Error::NoRdma {
                what: format!("{} does not support shared receive queues", device.name()),
                cure: "use another device".into(),
            });
        }
        let room = wanted.min(most);
        let attributes = ffi::ibv_srq_attr { max_wr: room, max_sge: 1, srq_limit: 0 };
        let mut wanted = ffi::ibv_srq_init_attr { srq_context: null_mut(), attr: attributes };
        // SAFETY: The domain exists as long as this object, which holds it; all attributes are set.
        let raw = check_pointer(unsafe { (device.library().verbs.ibv_create_srq)(domain.raw(), &mut wanted) });
        let raw = raw.map_err(Error::system("creating a shared receive queue"))?;
        Ok(Arc::new(SharedReceives { raw, domain: domain.clone(), room }))
    }

    /// The library's pointer, for queue pairs that hold this queue.
    pub(crate) fn raw(&self) -> *mut ffi::ibv_srq {
        self.raw.as_ptr()
    }

    pub(crate) fn room(&self) -> u32 {
        self.room
    }

    /// Posts a receive. The caller counts posted receives.
    pub(crate) fn post(&self, name: u64, memory: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let Some(post) = self.domain.device().operations().post_srq_recv else {
            return Err(Error::Misuse("the device accepts no shared receive requests"));
        };
        let mut piece = memory.piece(offset, length)?;
        let mut request = ffi::ibv_recv_wr { wr_id: name, next: null_mut(), sg_list: &mut piece, num_sge: 1 };
        let mut failed = null_mut();
        // SAFETY: The queue exists. Request and segment are read during the call only. The card writes at most `length`
        // bytes into shared memory to which no references exist, and which is registered in this queue's domain.
        check_code(unsafe { post(self.raw.as_ptr(), &mut request, &mut failed) })
            .map_err(Error::system("posting a shared receive request"))
    }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        // SAFETY: Made by the library, freed once. Queue pairs that used it held an Arc and are dropped.
        let code = unsafe { (self.domain.device().library().verbs.ibv_destroy_srq)(self.raw.as_ptr()) };
        warn_on_failure(code, "a shared receive queue");
    }
}
