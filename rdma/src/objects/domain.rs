//! Protection domains, and the memory that is registered in them.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use remora_memory::Memory;

use crate::device::Device;
use crate::library::{check_pointer, warn_on_failure};
use crate::{Error, bindings as ffi};

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
