//! What can go wrong with shared memory and with handing it over, sorted by who can act on it.

use std::{io, time::Duration};

/// An error of shared memory, or of the local sockets that hand it over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // -- The caller: change the call. --
    /// A range that is not inside the memory.
    #[error("{length} bytes at offset {offset} are outside a memory of {size} bytes")]
    OutOfBounds {
        /// First byte of the range.
        offset: u64,
        /// Bytes in the range.
        length: u64,
        /// Bytes in the memory.
        size: u64,
    },
    /// An atomic access at an offset that is not a multiple of its size.
    #[error("offset {offset} is not a multiple of {align}, as atomic access requires")]
    Unaligned {
        /// The offset.
        offset: u64,
        /// The required alignment, in bytes.
        align: u64,
    },
    /// An invalid argument.
    #[error("{0}")]
    Misuse(&'static str),

    // -- The other process: check its address, or distrust it. --
    /// No process listens at the address.
    #[error("cannot reach {what}: {source}")]
    Unreachable {
        /// The address.
        what: String,
        /// What the system reports.
        source: io::Error,
    },
    /// The other process did not answer in time.
    #[error("{what} did not answer within {after:?}")]
    TimedOut {
        /// Which end did not answer.
        what: &'static str,
        /// The time limit.
        after: Duration,
    },
    /// The other process violated the protocol.
    #[error("the other end broke the protocol: {0}")]
    Protocol(&'static str),
    /// The memory received could shrink: an access beyond its new end would kill this process.
    #[error("the memory received cannot be mapped safely: {0}")]
    Unsealed(&'static str),

    // -- The system: its administrator can act. --
    /// A system call failed.
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
    pub fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { what, source: source.into() }
    }
}

/// For calls that return `io::Result`: keeps the error as the source of the new one.
impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::System { source, .. } | Error::Unreachable { source, .. } => source.kind(),
            Error::TimedOut { .. } => io::ErrorKind::TimedOut,
            Error::Protocol(_) => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::InvalidInput,
        };
        io::Error::new(kind, error)
    }
}
