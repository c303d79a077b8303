//! What can go wrong outside a single read, sorted by who can act on it. (The fate of a read is [`ReadError`].)

use std::{fmt, io, time::Duration};

use crate::{
    memory,
    region::{KeyError, RegionId, TransportKind, WrongTransport},
};

/// An error of the fabric. A bug of ours is a panic, not one of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // -- The caller used us wrongly: change the call. --
    /// A range that does not lie inside the memory.
    #[error("{length} bytes at offset {offset} do not lie inside a memory of {size} bytes")]
    OutOfBounds {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// Bytes there are.
        size: u64,
    },
    /// An argument that makes no sense here.
    #[error("{0}")]
    Misuse(&'static str),
    /// The region is already lent out under this name.
    #[error("region {0} is exported already: revoke it first, or use a new generation")]
    AlreadyExported(RegionId),
    /// The region isn't lent out (any more).
    #[error("region {0} is not exported here")]
    NotExported(RegionId),

    // -- The other end is different from what we need: choose another transport, or another source. --
    /// A key of one transport was given to another.
    #[error("a {given} key was given to the {wanted} transport")]
    WrongTransport {
        /// The transport that was asked.
        wanted: TransportKind,
        /// The transport that made the key.
        given: TransportKind,
    },
    /// The key names memory of another host, which only a network transport can read.
    #[error("the memory is not on the same host (boot id {theirs}, ours is {ours}): use tcp")]
    NotThisHost {
        /// Boot id in the key.
        theirs: String,
        /// Boot id of this host.
        ours: String,
    },
    /// The other end speaks a version that we don't.
    #[error("the source speaks version {theirs} of the {kind} lane, we speak {ours}: upgrade the older one")]
    Version {
        /// Which transport.
        kind: TransportKind,
        /// Their version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },

    // -- The other end refused us, or is gone: ask the messenger for a new key, or for a grant. --
    /// The exporter knows us, or doesn't, and said no.
    #[error("the source refused the connection: {0}")]
    Refused(Denial),
    /// Nobody there.
    #[error("cannot reach {what}: {source}")]
    Unreachable {
        /// The address, in words.
        what: String,
        /// Why.
        source: io::Error,
    },
    /// The other end was silent for too long.
    #[error("{what} did not answer within {after:?}")]
    TimedOut {
        /// Who, in words.
        what: &'static str,
        /// How long we waited.
        after: Duration,
    },
    /// The connection has ended; the peer gives no more completions and takes no more reads.
    #[error("the peer is retired: {0}")]
    Retired(ReadError),

    // -- The other end misbehaved: distrust it. --
    /// It sent what the protocol does not know.
    #[error("the other end broke the protocol: {0}")]
    Protocol(&'static str),
    /// It could not prove that it holds the session's secret.
    #[error("the source could not prove that it knows this session: something else answers at its address")]
    Impostor,
    /// A key whose bytes no exporter of ours made.
    #[error("malformed region key: {0}")]
    Key(#[from] KeyError),
    /// Memory that was handed over and can't be used, above all because it could shrink.
    #[error(transparent)]
    Memory(memory::Error),

    // -- The system refused: its administrator can act. --
    /// RDMA is not to be had on this machine, or not as much of it as is needed.
    #[error("RDMA is not available: {what}; to use it, {cure}")]
    NoRdma {
        /// What is missing.
        what: String,
        /// What to do about it.
        cure: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What we wanted, in words.
        what: &'static str,
        /// What it said.
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
    /// For `map_err`: wraps what the system said with what we wanted of it.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { what, source: source.into() }
    }
}

/// For the calls that answer with `io::Result`: misuse becomes `InvalidInput`, with the same sentence.
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

/// Why a read gave nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum ReadError {
    /// The source said no.
    #[error("denied: {0}")]
    Denied(Denial),
    /// The source, or the way to it, is gone.
    #[error("the source is gone")]
    PeerGone,
    /// No answer in time.
    #[error("the source did not answer in time")]
    TimedOut,
    /// We closed the connection ourselves.
    #[error("cancelled by this end")]
    Cancelled,
}

impl ReadError {
    /// Whether the peer goes on after this; everything else retires it.
    pub fn is_survivable(self) -> bool {
        self == ReadError::Denied(Denial::OutOfBounds)
    }
}

/// Why a source says no. The numbers travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Denial {
    /// The range does not lie inside the region.
    OutOfBounds = 1,
    /// The region exists, but of another generation.
    Stale = 2,
    /// The region was taken back while we were connected to it.
    Revoked = 3,
    /// No such region.
    Unknown = 4,
    /// No grant for this session, or a wrong proof of it.
    NotGranted = 5,
    /// The source has as many connections as it will hold.
    Busy = 6,
}

impl Denial {
    /// The reason behind a number from outside; `None` for one that we don't know.
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

    /// The number that travels.
    pub fn code(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Denial::OutOfBounds => "the range does not lie inside the region",
            Denial::Stale => "the region is of another generation: ask for a new key",
            Denial::Revoked => "the region was taken back: ask for a new key",
            Denial::Unknown => "no such region: ask for a new key",
            Denial::NotGranted => "this session has no grant, or could not prove it",
            Denial::Busy => "the source has too many connections: try again later",
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
