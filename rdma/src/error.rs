//! What can go wrong with RDMA, sorted by who can act on it.

use std::{io, time::Duration};

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
