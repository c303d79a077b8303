//! Shared receive queues.

use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use super::{Domain, Registration};
use crate::{
    Error, bindings as ffi,
    library::{check_code, check_pointer, warn_on_failure},
};

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
