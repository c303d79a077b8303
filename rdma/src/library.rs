//! libibverbs and librdmacm, opened at run time: a table of their functions, or an error that says what is missing.
//!
//! If the program were linked to them, it would not start where they are not installed. They are opened on first use
//! and never closed: they start no threads, but the device drivers that they load do not support unloading.
//!
//! Required are functions of the versions `IBVERBS_1.1` and `RDMACM_1.0`, which every rdma-core since 2010 has, and
//! `rdma_establish` and `rdma_init_qp_attr` (`RDMACM_1.2`, rdma-core 22 of 2018). Newer functions are optional.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use libloading::Library as Handle;

use crate::bindings as ffi;

/// Declares a struct of function pointers, and how to fill it from an open library.
macro_rules! functions {
    ($(#[$about:meta])* $name:ident { required { $($function:ident: fn($($argument:ty),*) $(-> $result:ty)?;)* } optional { $($maybe:ident: fn($($margument:ty),*) $(-> $mresult:ty)?;)* } }) => {
        $(#[$about])*
        pub(crate) struct $name {
            $(pub(crate) $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(#[allow(dead_code)] pub(crate) $maybe: Option<unsafe extern "C" fn($($margument),*) $(-> $mresult)?>,)*
        }

        impl $name {
            fn fill(handle: &Handle) -> Result<$name, libloading::Error> {
                Ok($name {
                    $(
                        // SAFETY: The symbol, if it exists, is the function of that name in rdma-core's stable
                        // interface. The type is that of its declaration in the headers from which the bindings were
                        // generated.
                        $function: unsafe { *handle.get(concat!(stringify!($function), "\0").as_bytes())? },
                    )*
                    $(
                        // SAFETY: As above; a missing function is not an error.
                        $maybe: unsafe { handle.get(concat!(stringify!($maybe), "\0").as_bytes()) }.ok().map(|symbol| *symbol),
                    )*
                })
            }
        }
    };
}

functions! {
    /// Functions of libibverbs: devices, memory, queues.
    Verbs {
        required {
            ibv_get_device_name: fn(*mut ffi::ibv_device) -> *const c_char;
        ibv_query_device: fn(*mut ffi::ibv_context, *mut ffi::ibv_device_attr) -> c_int;
        ibv_alloc_pd: fn(*mut ffi::ibv_context) -> *mut ffi::ibv_pd;
        ibv_dealloc_pd: fn(*mut ffi::ibv_pd) -> c_int;
        ibv_reg_mr: fn(*mut ffi::ibv_pd, *mut c_void, usize, c_int) -> *mut ffi::ibv_mr;
        ibv_dereg_mr: fn(*mut ffi::ibv_mr) -> c_int;
        ibv_create_comp_channel: fn(*mut ffi::ibv_context) -> *mut ffi::ibv_comp_channel;
        ibv_destroy_comp_channel: fn(*mut ffi::ibv_comp_channel) -> c_int;
        ibv_create_cq: fn(*mut ffi::ibv_context, c_int, *mut c_void, *mut ffi::ibv_comp_channel, c_int) -> *mut ffi::ibv_cq;
        ibv_destroy_cq: fn(*mut ffi::ibv_cq) -> c_int;
        ibv_get_cq_event: fn(*mut ffi::ibv_comp_channel, *mut *mut ffi::ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut ffi::ibv_cq, u32);
        ibv_create_qp: fn(*mut ffi::ibv_pd, *mut ffi::ibv_qp_init_attr) -> *mut ffi::ibv_qp;
        ibv_modify_qp: fn(*mut ffi::ibv_qp, *mut ffi::ibv_qp_attr, c_int) -> c_int;
        ibv_destroy_qp: fn(*mut ffi::ibv_qp) -> c_int;
        ibv_create_srq: fn(*mut ffi::ibv_pd, *mut ffi::ibv_srq_init_attr) -> *mut ffi::ibv_srq;
        ibv_destroy_srq: fn(*mut ffi::ibv_srq) -> c_int;
        ibv_get_async_event: fn(*mut ffi::ibv_context, *mut ffi::ibv_async_event) -> c_int;
        ibv_ack_async_event: fn(*mut ffi::ibv_async_event);
        ibv_wc_status_str: fn(ffi::ibv_wc_status) -> *const c_char;
        ibv_event_type_str: fn(ffi::ibv_event_type) -> *const c_char;
        }
        optional {
            ibv_reg_mr_iova2: fn(*mut ffi::ibv_pd, *mut c_void, usize, u64, u32) -> *mut ffi::ibv_mr;
            ibv_is_fork_initialized: fn() -> ffi::ibv_fork_status;
            ibv_query_qp: fn(*mut ffi::ibv_qp, *mut ffi::ibv_qp_attr, c_int, *mut ffi::ibv_qp_init_attr) -> c_int;
        }
    }
}

functions! {
    /// Functions of librdmacm: addresses and connections.
    Manager {
        required {
            rdma_create_event_channel: fn() -> *mut ffi::rdma_event_channel;
        rdma_destroy_event_channel: fn(*mut ffi::rdma_event_channel);
        rdma_get_devices: fn(*mut c_int) -> *mut *mut ffi::ibv_context;
        rdma_free_devices: fn(*mut *mut ffi::ibv_context);
        rdma_create_id: fn(*mut ffi::rdma_event_channel, *mut *mut ffi::rdma_cm_id, *mut c_void, ffi::rdma_port_space) -> c_int;
        rdma_destroy_id: fn(*mut ffi::rdma_cm_id) -> c_int;
        rdma_migrate_id: fn(*mut ffi::rdma_cm_id, *mut ffi::rdma_event_channel) -> c_int;
        rdma_bind_addr: fn(*mut ffi::rdma_cm_id, *mut libc::sockaddr) -> c_int;
        rdma_listen: fn(*mut ffi::rdma_cm_id, c_int) -> c_int;
        rdma_get_src_port: fn(*mut ffi::rdma_cm_id) -> u16;
        rdma_resolve_addr: fn(*mut ffi::rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        rdma_resolve_route: fn(*mut ffi::rdma_cm_id, c_int) -> c_int;
        rdma_set_option: fn(*mut ffi::rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
        rdma_init_qp_attr: fn(*mut ffi::rdma_cm_id, *mut ffi::ibv_qp_attr, *mut c_int) -> c_int;
        rdma_connect: fn(*mut ffi::rdma_cm_id, *mut ffi::rdma_conn_param) -> c_int;
        rdma_establish: fn(*mut ffi::rdma_cm_id) -> c_int;
        rdma_accept: fn(*mut ffi::rdma_cm_id, *mut ffi::rdma_conn_param) -> c_int;
        rdma_reject: fn(*mut ffi::rdma_cm_id, *const c_void, u8) -> c_int;
        rdma_disconnect: fn(*mut ffi::rdma_cm_id) -> c_int;
        rdma_get_cm_event: fn(*mut ffi::rdma_event_channel, *mut *mut ffi::rdma_cm_event) -> c_int;
        rdma_ack_cm_event: fn(*mut ffi::rdma_cm_event) -> c_int;
        rdma_event_str: fn(ffi::rdma_cm_event_type) -> *const c_char;
        }
        optional {}
    }
}

/// The functions of both libraries.
pub(crate) struct Library {
    pub(crate) verbs: Verbs,
    pub(crate) manager: Manager,
}

/// The libraries, opened by the first call.
///
/// # Errors
/// [`Error::NoRdma`] if they are not installed, too old, or disabled by [`DISABLE`].
pub(crate) fn library() -> Result<&'static Library, Error> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    if std::env::var_os(DISABLE).is_some_and(|value| !value.is_empty() && value != "0") {
        return Err(Error::NoRdma { what: format!("it is disabled by {DISABLE}"), cure: "unset that variable".into() });
    }
    LIBRARY.get_or_init(|| open().map_err(|error| error.to_string())).as_ref().map_err(|what| Error::NoRdma {
        what: what.clone(),
        cure: "install rdma-core's libraries (Debian: libibverbs1 librdmacm1 ibverbs-providers; \
               Red Hat: libibverbs librdmacm)"
            .into(),
    })
}

fn open() -> Result<Library, libloading::Error> {
    // The handle is leaked, so that the function pointers stay valid for the life of the process. SAFETY: Opening runs
    // the library's initialisers. Those of rdma-core register fork handlers and read environment variables.
    let verbs = Box::leak(Box::new(unsafe { Handle::new("libibverbs.so.1") }?));
    // SAFETY: As above; librdmacm has no initialisers beyond those of libibverbs.
    let manager = Box::leak(Box::new(unsafe { Handle::new("librdmacm.so.1") }?));
    Ok(Library { verbs: Verbs::fill(verbs)?, manager: Manager::fill(manager)? })
}

/// Environment variable that disables RDMA, if it is set to anything but `0`.
pub const DISABLE: &str = "REMORA_RDMA_DISABLE";

impl Library {
    /// The name of a work completion's status.
    fn status_name(&'static self, status: ffi::ibv_wc_status) -> &'static str {
        // SAFETY: The function takes any number, and returns a string constant or null.
        let name = unsafe { (self.verbs.ibv_wc_status_str)(status) };
        // SAFETY: A constant of the library, or null.
        unsafe { constant(name) }
    }

    /// The name of an asynchronous event of a device.
    pub(crate) fn async_event_name(&'static self, event: ffi::ibv_event_type) -> &'static str {
        // SAFETY: The function takes any number, and returns a string constant or null.
        let name = unsafe { (self.verbs.ibv_event_type_str)(event) };
        // SAFETY: A constant of the library, or null.
        unsafe { constant(name) }
    }

    /// The name of an event of the connection manager.
    pub(crate) fn event_name(&'static self, event: ffi::rdma_cm_event_type) -> &'static str {
        // SAFETY: The function takes any number, and returns a string constant or null.
        let name = unsafe { (self.manager.rdma_event_str)(event) };
        // SAFETY: A constant of the library, or null.
        unsafe { constant(name) }
    }
}

/// The name of a work completion's status; "unknown" without the library.
pub fn status_name(status: ffi::ibv_wc_status) -> &'static str {
    library().map_or("unknown", |library| library.status_name(status))
}

/// A string constant of a library.
///
/// # Safety
/// `pointer` is null, or points to a zero-terminated constant of a library that [`library`] has opened. The libraries
/// are never closed, so that the constant lives as long as the process.
unsafe fn constant(pointer: *const c_char) -> &'static str {
    if pointer.is_null() {
        return "unknown";
    }
    // SAFETY: Not null, as just checked; the caller guarantees the rest.
    unsafe { CStr::from_ptr(pointer) }.to_str().unwrap_or("unknown")
}

/// Converts the result of a call that returns an error number, or -1 with the error number in `errno`.
pub(crate) fn check_code(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // librdmacm returns -1 and sets errno; most functions of libibverbs return the error number.
        -1 => Err(io::Error::last_os_error()),
        number => Err(io::Error::from_raw_os_error(number.abs())),
    }
}

/// Converts the result of a call that returns null with the error number in `errno`.
pub(crate) fn check_pointer<T>(pointer: *mut T) -> io::Result<std::ptr::NonNull<T>> {
    std::ptr::NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

/// A copy of a library's string.
///
/// # Safety
/// `pointer` is null, or points to a zero-terminated string that lives during the call.
pub(crate) unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::from("unknown");
    }
    // SAFETY: Not null, as just checked; the caller guarantees the rest.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// Makes a descriptor of the library non-blocking.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Error> {
    rustix::io::ioctl_fionbio(fd, true).map_err(Error::system("making a descriptor of an RDMA device non-blocking"))
}

/// Logs a failure to free an object. It fails only if the device is gone, or if objects are freed in the wrong order,
/// which is a bug.
pub(crate) fn warn_on_failure(code: i32, what: &str) {
    if let Err(error) = check_code(code) {
        tracing::warn!(%error, "cannot free {what}");
    }
}

// What can go wrong with RDMA, sorted by who can act on it, and why there is none on a machine.

/// An error of the RDMA libraries, devices and connections.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid argument, or a call in the wrong state: change the call.
    #[error("{0}")]
    Misuse(&'static str),
    /// A range outside its memory, or memory that cannot be created.
    #[error(transparent)]
    Memory(#[from] remora_memory::Error),
    /// The other end refused the connection, or its address is not reachable by RDMA.
    #[error("cannot reach {what}: {source}")]
    Unreachable {
        /// The other end.
        what: String,
        /// The reason.
        source: io::Error,
    },
    /// The other end, or the network, did not answer in time.
    #[error("{what} did not answer within {after:?}")]
    TimedOut {
        /// What did not answer.
        what: &'static str,
        /// The time limit.
        after: Duration,
    },
    /// The other end violated the protocol.
    #[error("the other end broke the protocol: {0}")]
    Protocol(&'static str),
    /// RDMA is not available on this machine, or a limit of it is too low.
    #[error("RDMA is not available: {what}; to use it, {cure}")]
    NoRdma {
        /// What is missing.
        what: String,
        /// How to provide it.
        cure: String,
    },
    /// A call to the system, to a library or to a device driver failed.
    #[error("{what}: {source}")]
    System {
        /// What the call was for.
        what: &'static str,
        /// What the system reports.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: adds what the call was for to what the system reports.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { what, source: source.into() }
    }
}

/// For calls that return `io::Result`: keeps the error as the source of the new one.
impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let kind = match error {
            Error::Memory(error) => return error.into(),
            Error::System { ref source, .. } | Error::Unreachable { ref source, .. } => source.kind(),
            Error::TimedOut { .. } => io::ErrorKind::TimedOut,
            Error::Protocol(_) => io::ErrorKind::InvalidData,
            Error::Misuse(_) | Error::NoRdma { .. } => io::ErrorKind::InvalidInput,
        };
        io::Error::new(kind, error)
    }
}

// Why RDMA is not available on this machine, and what to do about it.

/// The error for a machine whose library and kernel support RDMA, but which has no device.
pub fn no_device() -> Error {
    Error::NoRdma {
        what: "this machine has no RDMA device".into(),
        cure: "install a card and load its driver; or try it in software: \
               `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`"
            .into(),
    }
}

/// Finds out why the connection manager does not work. The checks are in the order in which an administrator would make
/// them.
pub(crate) fn diagnose(error: &io::Error) -> Error {
    let folder = Path::new("/dev/infiniband");
    let (what, cure) = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => (
            "no permission to open /dev/infiniband/*".to_owned(),
            "give this user access to these devices (a udev rule, the group `rdma`, or a device plug-in for a container)",
        ),
        _ if !Path::new("/sys/class/infiniband").exists() => (
            "this kernel does not support RDMA (no /sys/class/infiniband)".to_owned(),
            "load the driver of the card, or `modprobe rdma_rxe` for RDMA in software; \
             a kernel without CONFIG_INFINIBAND does not support it",
        ),
        _ if !folder.join("rdma_cm").exists() => (
            "/dev/infiniband/rdma_cm does not exist".to_owned(),
            "`modprobe rdma_ucm`; in a container, pass this device through",
        ),
        _ if fs::read_dir("/sys/class/infiniband").into_iter().flatten().count() == 0 => return no_device(),
        _ => (format!("the connection manager failed: {error}"), "check `rdma link` and the kernel's log"),
    };
    Error::NoRdma { what, cure: cure.into() }
}
