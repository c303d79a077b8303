//! A shared receive queue, with its owner; as the objects of `objects.rs`, whose head says what the comments here lean on.

use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use super::{Domain, Registration};
use crate::{
    Error, bindings as ffi,
    library::{check_code, check_pointer, warn_on_failure},
};

/// Receives of all queue pairs that were made with it.
pub(crate) struct SharedReceives {
    raw: NonNull<ffi::ibv_srq>,
    domain: Arc<Domain>,
    room: u32,
}

// SAFETY: A shared receive queue is not tied to a thread.
unsafe impl Send for SharedReceives {}
// SAFETY: The library takes its own locks where two threads post at once.
unsafe impl Sync for SharedReceives {}

impl SharedReceives {
    /// With room for so many, or as many as the device has.
    pub(crate) fn new(domain: &Arc<Domain>, wanted: u32) -> Result<Arc<SharedReceives>, Error> {
        let device = domain.device();
        let most = u32::try_from(device.attributes().max_srq_wr).unwrap_or(0);
        if most == 0 {
            return Err(Error::NoRdma {
                what: format!("{} has no shared receive queues", device.name()),
                cure: "use another device".into(),
            });
        }
        let room = wanted.min(most);
        let attributes = ffi::ibv_srq_attr { max_wr: room, max_sge: 1, srq_limit: 0 };
        let mut wanted = ffi::ibv_srq_init_attr { srq_context: null_mut(), attr: attributes };
        // SAFETY: The domain exists as long as this object, which holds it; the attributes are written in full.
        let raw = check_pointer(unsafe { (device.library().verbs.ibv_create_srq)(domain.raw(), &mut wanted) });
        let raw = raw.map_err(Error::system("making a shared receive queue"))?;
        Ok(Arc::new(SharedReceives { raw, domain: domain.clone(), room }))
    }

    /// For the making of queue pairs that hold this.
    pub(crate) fn raw(&self) -> *mut ffi::ibv_srq {
        self.raw.as_ptr()
    }

    pub(crate) fn room(&self) -> u32 {
        self.room
    }

    /// Posts one. The caller has checked that the piece lies inside, and counts what is posted.
    pub(crate) fn post(&self, name: u64, memory: &Registration, offset: u64, length: u32) -> Result<(), Error> {
        let Some(post) = self.domain.device().operations().post_srq_recv else {
            return Err(Error::Misuse("the device takes no shared receive requests"));
        };
        let mut piece = memory.piece(offset, length)?;
        let mut request = ffi::ibv_recv_wr { wr_id: name, next: null_mut(), sg_list: &mut piece, num_sge: 1 };
        let mut failed = null_mut();
        // SAFETY: The queue exists. Request and piece are read during the call only. The card writes at most `length` bytes into
        // shared memory of which no references exist, and which is registered in this queue's domain.
        check_code(unsafe { post(self.raw.as_ptr(), &mut request, &mut failed) })
            .map_err(Error::system("posting a shared receive request"))
    }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        // SAFETY: Made by the library, given back once; queue pairs that used it held an Arc and are gone.
        let code = unsafe { (self.domain.device().library().verbs.ibv_destroy_srq)(self.raw.as_ptr()) };
        warn_on_failure(code, "a shared receive queue");
    }
}
