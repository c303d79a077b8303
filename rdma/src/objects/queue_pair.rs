//! Queue pairs: their states, and the requests posted on them.

use std::{
    ptr::{NonNull, null_mut},
    sync::Arc,
};

use super::{Batch, Completions, Domain, Registration, RemoteRead, SharedReceives, batch::empty_request};
use crate::{
    Error, bindings as ffi,
    library::{check_code, check_pointer, warn_on_failure},
};

/// What the other end of a queue pair may do by it: nothing.
pub const NO_RIGHTS: u32 = 0;

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
pub(crate) struct PairOptions {
    /// Receives come from here.
    pub(crate) receives: Option<Arc<SharedReceives>>,
    /// Bytes that a request may carry in itself.
    pub(crate) inline: u32,
    /// Only requests that ask for it complete visibly (those that fail always do).
    pub(crate) quiet: bool,
    /// Places that one request may name.
    pub(crate) scatter: u32,
}

impl Default for PairOptions {
    fn default() -> PairOptions {
        PairOptions { receives: None, inline: 0, quiet: false, scatter: 1 }
    }
}

impl QueuePair {
    /// Every request on it completes visibly, into `completions`.
    pub fn new(domain: &Arc<Domain>, completions: &Arc<Completions>, capacity: Capacity) -> Result<QueuePair, Error> {
        QueuePair::with_options(domain, completions, capacity, PairOptions::default())
    }

    /// ... one read on which may be scattered over so many places.
    pub fn scattering(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        capacity: Capacity,
        scatter: u32,
    ) -> Result<QueuePair, Error> {
        QueuePair::with_options(domain, completions, capacity, PairOptions { scatter, ..PairOptions::default() })
    }

    /// As [`QueuePair::new`], with what `with_options` says.
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
        // SAFETY: Domain, queue and shared receives exist as long as this object, which holds them; the attributes are written in full.
        let raw = unsafe { (domain.device().library().verbs.ibv_create_qp)(domain.raw(), &mut wanted) };
        let raw = check_pointer(raw).map_err(Error::system("making a queue pair"))?;
        let inline = wanted.cap.max_inline_data;
        let (domain, completions) = (domain.clone(), completions.clone());
        Ok(QueuePair { raw, domain, completions, _receives: with_options.receives, inline })
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
        let code = unsafe { (self.domain.device().library().verbs.ibv_modify_qp)(self.raw.as_ptr(), attributes, mask) };
        check_code(code).map_err(Error::system("changing a queue pair's state"))
    }

    /// What the card says of it, for tests.
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

    /// What the other end may do by way of this pair, whatever keys it knows.
    pub fn allow(&self, access: u32) -> Result<(), Error> {
        let mut attributes = no_attributes();
        attributes.qp_access_flags = access;
        self.modify(&mut attributes, ffi::IBV_QP_ACCESS_FLAGS as i32)
    }

    /// Posts a read into `sink`. The caller has checked that its place lies inside, and that the queue has room.
    pub fn post_read(&self, read: &RemoteRead, sink: &Registration) -> Result<(), Error> {
        let mut batch = Batch::default();
        batch.add(read, sink)?;
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
    pub fn post_send(&self, name: u64, buffer: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let mut piece = buffer.piece(offset, length)?;
        self.post(&mut work(name, &mut piece, ffi::IBV_WR_SEND))
    }

    /// As [`QueuePair::post_send`], on a quiet pair: completes visibly only if `shown`.
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
    pub(crate) fn post_signaled_read(&self, read: &RemoteRead, sink: &Registration) -> Result<(), Error> {
        let mut piece = sink.piece(read.offset, read.length)?;
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
        let Some(post) = self.domain.device().operations().post_send else {
            return Err(Error::Misuse("the device takes no work requests"));
        };
        let mut failed = null_mut();
        // SAFETY: The pair exists. Requests and the lists of their places are whole, and read during the call only, in which they stay
        // where they are. The memory that a place names is registered in this pair's domain, and its owner keeps it until the request
        // has completed or the pair is gone; or the request carries the bytes, and then they are read during the call only.
        check_code(unsafe { post(self.raw.as_ptr(), first, &mut failed) })
            .map_err(Error::system("posting a work request"))
    }

    /// Posts room for one message of the other end.
    pub fn post_receive(&self, name: u64, buffer: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let Some(post) = self.domain.device().operations().post_recv else {
            return Err(Error::Misuse("the device takes no receive requests"));
        };
        let mut piece = buffer.piece(offset, length)?;
        let mut request = ffi::ibv_recv_wr { wr_id: name, next: null_mut(), sg_list: &mut piece, num_sge: 1 };
        let mut failed = null_mut();
        // SAFETY: As for `post`; the card writes at most `length` bytes there, into shared memory of which no references exist.
        check_code(unsafe { post(self.raw.as_ptr(), &mut request, &mut failed) })
            .map_err(Error::system("posting a receive request"))
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: See the head of the file. Returns only when the card has finished with it.
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

/// The flag by which a request on a quiet pair completes visibly.
fn signal(shown: bool) -> u32 {
    if shown { ffi::IBV_SEND_SIGNALED } else { 0 }
}

/// Attributes of a queue pair, all zero: only those count that a mask names.
pub(crate) fn no_attributes() -> ffi::ibv_qp_attr {
    // SAFETY: A struct of plain numbers, for which all zero bytes are valid.
    unsafe { std::mem::zeroed() }
}

// SAFETY: The object behind the pointer is not tied to a thread.
unsafe impl Send for QueuePair {}
// SAFETY: The library takes its own locks where two threads use one object.
unsafe impl Sync for QueuePair {}
