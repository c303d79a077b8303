//! READs of the other end's memory, several to a call.

use std::ptr::null_mut;

use super::Registration;
use crate::{Error, bindings as ffi};

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
    /// Whether there is no read in it.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Reads in it.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Adds a read.
    ///
    /// # Errors
    /// [`remora_memory::Error::OutOfBounds`] if its place is not inside the sink; the batch is as before.
    pub fn add(&mut self, read: &RemoteRead, sink: &Registration) -> Result<(), Error> {
        let place = sink.piece(read.offset, read.length)?;
        let mut request = empty_request(read.name, ffi::IBV_WR_RDMA_READ);
        request.wr.rdma = ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: read.address, rkey: read.key };
        request.num_sge = 1;
        self.requests.push(request);
        self.places.push(place);
        Ok(())
    }

    /// Extends the last read by `length` bytes, which land at `offset`.
    ///
    /// # Errors
    /// [`remora_memory::Error::OutOfBounds`] if the place is not inside the sink, [`Error::Misuse`] if there is no read; the batch is
    /// as before.
    pub fn extend(&mut self, sink: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let place = sink.piece(offset, length)?;
        let Some(request) = self.requests.last_mut() else { return Err(Error::Misuse("no read to extend")) };
        request.num_sge += 1;
        self.places.push(place);
        Ok(())
    }

    /// Links the requests to one another and to their places; gives the first.
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

/// A request that names no memory yet.
pub(super) fn empty_request(name: u64, operation: ffi::ibv_wr_opcode) -> ffi::ibv_send_wr {
    // SAFETY: Numbers, pointers and unions of them: all zero bytes are a valid, empty request.
    let mut request: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
    request.wr_id = name;
    request.opcode = operation;
    request
}
