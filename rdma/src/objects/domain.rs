//! Protection domains.

use std::{ptr::NonNull, sync::Arc};

use crate::{
    Error, bindings as ffi,
    device::Device,
    library::{check_pointer, warn_on_failure},
};

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
