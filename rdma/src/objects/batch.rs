//! READs of the other end's memory, several per call.

use std::ptr::null_mut;

use super::Registration;
use crate::{Error, bindings as ffi};

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
    pub(super) fn link(&mut self) -> *mut ffi::ibv_send_wr {
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

    pub(super) fn clear(&mut self) {
        self.requests.clear();
        self.places.clear();
    }
}

/// A request without segments.
pub(super) fn empty_request(name: u64, operation: ffi::ibv_wr_opcode) -> ffi::ibv_send_wr {
    // SAFETY: Numbers, pointers and unions of them: all zero bytes are a valid, empty request.
    let mut request: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
    request.wr_id = name;
    request.opcode = operation;
    request
}
