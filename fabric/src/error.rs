//! Errors, sorted by who can act on them: those outside a single read ([`Error`]), and the result of a read
//! ([`ReadError`]).

use std::{fmt, io, time::Duration};

use crate::{
    memory,
    region::{KeyError, RegionId, TransportKind, WrongTransport},
};

/// An error of the fabric. Bugs are panics instead.
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
    /// An invalid argument.
    #[error("{0}")]
    Misuse(&'static str),
    /// A region of this name is exported already.
    #[error("region {0} is already exported: revoke it first, or use a new generation")]
    AlreadyExported(RegionId),
    /// No region of this name is exported.
    #[error("region {0} is not exported here")]
    NotExported(RegionId),

    // -- The other end differs from what is needed: choose another transport, or another source. --
    /// A key of one transport was given to another.
    #[error("a {given} key was given to the {wanted} transport")]
    WrongTransport {
        /// The transport that was asked.
        wanted: TransportKind,
        /// The transport that made the key.
        given: TransportKind,
    },
    /// The key names memory of another host, which only a network transport can read.
    #[error("the memory is not on the same host (its boot id is {theirs}, this host's is {ours}): use tcp")]
    NotThisHost {
        /// Boot id in the key.
        theirs: String,
        /// Boot id of this host.
        ours: String,
    },
    /// The other end uses another version of the protocol.
    #[error(
        "the source uses version {theirs} of the {kind} protocol, this build version {ours}: upgrade the older one"
    )]
    Version {
        /// Which transport.
        kind: TransportKind,
        /// Their version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },

    // -- The other end refused, or is gone: ask the messenger for a new key, or for a grant. --
    /// The source refused the connection.
    #[error("the source refused the connection: {0}")]
    Refused(Denial),
    /// No source listens at the address.
    #[error("cannot reach {what}: {source}")]
    Unreachable {
        /// The address.
        what: String,
        /// The reason.
        source: io::Error,
    },
    /// The other end did not answer in time.
    #[error("{what} did not answer within {after:?}")]
    TimedOut {
        /// Which end did not answer.
        what: &'static str,
        /// The time limit.
        after: Duration,
    },
    /// The connection has ended; the peer accepts no reads and returns no completions.
    #[error("the peer is retired: {0}")]
    Retired(ReadError),

    // -- The other end misbehaved: distrust it. --
    /// The other end violated the protocol.
    #[error("the other end broke the protocol: {0}")]
    Protocol(&'static str),
    /// The source could not prove that it knows the session's secret.
    #[error("the source could not prove that it knows this session: another process answers at its address")]
    Impostor,
    /// The bytes are not a valid region key.
    #[error("malformed region key: {0}")]
    Key(#[from] KeyError),
    /// Memory that was received cannot be used, for example because it could shrink.
    #[error(transparent)]
    Memory(memory::Error),

    // -- The system: its administrator can act. --
    /// RDMA is not available on this machine, or a limit of it is too low.
    #[error("RDMA is not available: {what}; to use it, {cure}")]
    NoRdma {
        /// What is missing.
        what: String,
        /// How to provide it.
        cure: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What the call was for.
        what: &'static str,
        /// What the system reports.
        source: io::Error,
    },
}

impl From<WrongTransport> for Error {
    fn from(WrongTransport { wanted, given }: WrongTransport) -> Error {
        Error::WrongTransport { wanted, given }
    }
}

impl From<memory::Error> for Error {
    fn from(error: memory::Error) -> Error {
        match error {
            memory::Error::OutOfBounds { offset, length, size } => Error::OutOfBounds { offset, length, size },
            memory::Error::Misuse(what) => Error::Misuse(what),
            memory::Error::Unreachable { what, source } => Error::Unreachable { what, source },
            memory::Error::TimedOut { what, after } => Error::TimedOut { what, after },
            memory::Error::Protocol(what) => Error::Protocol(what),
            memory::Error::System { what, source } => Error::System { what, source },
            other => Error::Memory(other),
        }
    }
}

#[cfg(feature = "verbs")]
impl From<remora_rdma::Error> for Error {
    fn from(error: remora_rdma::Error) -> Error {
        use remora_rdma::Error as Rdma;
        match error {
            Rdma::Misuse(what) => Error::Misuse(what),
            Rdma::Memory(error) => error.into(),
            Rdma::Unreachable { what, source } => Error::Unreachable { what, source },
            Rdma::TimedOut { what, after } => Error::TimedOut { what, after },
            Rdma::Protocol(what) => Error::Protocol(what),
            Rdma::NoRdma { what, cure } => Error::NoRdma { what, cure },
            Rdma::System { what, source } => Error::System { what, source },
            other => Error::System { what: "RDMA", source: other.into() },
        }
    }
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
        let kind = match &error {
            Error::System { source, .. } | Error::Unreachable { source, .. } => source.kind(),
            Error::TimedOut { .. } => io::ErrorKind::TimedOut,
            Error::Refused(_) | Error::Impostor => io::ErrorKind::PermissionDenied,
            Error::Retired(_) => io::ErrorKind::ConnectionAborted,
            Error::Protocol(_) | Error::Key(_) | Error::Version { .. } => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::InvalidInput,
        };
        io::Error::new(kind, error)
    }
}

/// Why a read failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ReadError {
    /// The source refused it.
    #[error("denied: {0}")]
    Denied(Denial),
    /// The source has gone, or the connection to it.
    #[error("the source has gone")]
    PeerGone,
    /// The source did not answer in time.
    #[error("the source did not answer in time")]
    TimedOut,
    /// This end closed the connection.
    #[error("cancelled by this end")]
    Cancelled,
}

impl ReadError {
    /// Whether the peer can be used after this error. Any other error retires it.
    pub fn is_survivable(self) -> bool {
        self == ReadError::Denied(Denial::OutOfBounds)
    }
}

/// Why a source refuses. The numbers are on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Denial {
    /// The range is not inside the region.
    OutOfBounds = 1,
    /// The region exists, but in another generation.
    Stale = 2,
    /// The region was revoked while the reader was connected.
    Revoked = 3,
    /// The region does not exist.
    Unknown = 4,
    /// The session has no grant for the region, or its proof is wrong.
    NotGranted = 5,
    /// The source has its maximum number of connections.
    Busy = 6,
}

impl Denial {
    /// The reason of a number; `None` if it is unknown.
    pub fn from_code(code: u8) -> Option<Denial> {
        match code {
            1 => Some(Denial::OutOfBounds),
            2 => Some(Denial::Stale),
            3 => Some(Denial::Revoked),
            4 => Some(Denial::Unknown),
            5 => Some(Denial::NotGranted),
            6 => Some(Denial::Busy),
            _ => None,
        }
    }

    /// The number on the wire.
    pub fn code(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Denial::OutOfBounds => "the range is outside the region",
            Denial::Stale => "the region belongs to another generation: ask for a new key",
            Denial::Revoked => "the region was revoked: ask for a new key",
            Denial::Unknown => "the region does not exist: ask for a new key",
            Denial::NotGranted => "the session has no grant for the region, or could not prove it",
            Denial::Busy => "the source has too many connections: retry later",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denials_keep_their_numbers() {
        for code in 0..=u8::MAX {
            if let Some(denial) = Denial::from_code(code) {
                assert_eq!(denial.code(), code);
            }
        }
        assert_eq!(Denial::from_code(0), None, "0 is a welcome on the wire");
    }

    #[test]
    fn only_a_range_outside_the_region_leaves_the_peer_alive() {
        assert!(ReadError::Denied(Denial::OutOfBounds).is_survivable());
        assert!(!ReadError::Denied(Denial::Revoked).is_survivable());
        assert!(!ReadError::PeerGone.is_survivable());
    }
}
