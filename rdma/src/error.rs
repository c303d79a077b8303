//! What can go wrong with RDMA, sorted by who can act on it, and why there is none on a machine.

use std::path::Path;
use std::time::Duration;
use std::{fs, io};

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
