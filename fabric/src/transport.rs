//! The three traits of every transport, and the words they share. No transport is written here.
//!
//! ```text
//!   source                               reader
//!   Exporter::export(id, memory)
//!   Exporter::grant(session, secret)
//!   Exporter::key(id) ─────messenger───▶ Connector::connect(key, session, secret, sink)
//!                                          └▶ Peer   post_read ─▶ … ─▶ poll
//!                                                      ▲                 │ Ok: bytes have arrived in the sink
//!                                                      └─ at most depth ─┘ OutOfBounds: this read only
//!   revoke, withdraw, drop ─────────────────────────────────────────────▶ any other error: the peer is retired
//! ```
//!
//! What is true of every [`Peer`]:
//!
//! - Each accepted read gets exactly one [`Completion`], in any order, also when the connection fails or is closed.
//! - A completion means "the bytes have arrived", never "the bytes are consistent": they may have been taken at different
//!   moments of a memory that is being written to. That is for the layer above to find out.
//! - A failed read may have written any part of its place in the sink.
//! - Any [`ReadError`] but `Denied(OutOfBounds)` retires the peer: what is outstanding fails, [`Peer::poll`] hands those failures
//!   out, and from then on `poll` and `post_read` answer [`Error::Retired`]. Recovery is a new peer, by way of the messenger.

use std::{fmt, os::fd::BorrowedFd, sync::Arc, time::Duration};

pub use remora_memory::wait_readable;

use crate::{
    error::Error,
    memory::{Memory, View},
    region::{RegionId, RegionKey, Secret, TransportKind},
};

/// The source's end of a transport: lends regions out, to granted sessions only. Dropping it cuts all its connections.
pub trait Exporter: Send + Sync {
    /// Which transport this is.
    fn kind(&self) -> TransportKind;

    /// Makes `memory` readable, under the name `id`, for every session that has a grant.
    ///
    /// # Errors
    /// [`Error::AlreadyExported`] if the name is in use.
    fn export(&self, id: RegionId, memory: Arc<Memory>) -> Result<(), Error>;

    /// Takes the region back. Reads in flight fail with `Denied(Revoked)` or, where the news can't be told, `PeerGone`; the
    /// connections that read it are cut. Nothing happens if it isn't exported.
    fn revoke(&self, id: RegionId);

    /// This session may read every exported region, if it proves that it knows `secret`. A second grant replaces the secret.
    fn grant(&self, session: u64, secret: Secret);

    /// ... no longer; its connections are closed.
    fn withdraw(&self, session: u64);

    /// Where and what: bytes for the messenger to carry to a session.
    ///
    /// # Errors
    /// [`Error::NotExported`].
    fn key(&self, id: RegionId) -> Result<RegionKey, Error>;

    /// Bytes given out so far, as far as this end can know (a shared memory is read without its owner noticing).
    fn bytes_served(&self) -> u64;
}

/// The reader's end of a transport.
pub trait Connector: Send + Sync {
    /// Which transport this is.
    fn kind(&self) -> TransportKind;

    /// Connects to the region behind `key` as `session`; what is read lands in `sink`. Blocks, no longer than its time-out.
    ///
    /// # Errors
    /// [`Error::WrongTransport`], [`Error::Key`], [`Error::NotThisHost`]: not a key for this connector.
    /// [`Error::Unreachable`], [`Error::TimedOut`]: nobody there. [`Error::Refused`]: without grant (`NotGranted`, also for a wrong
    /// secret: which of the two is not told), of another generation (`Stale`), no such region (`Unknown`).
    fn connect(
        &self,
        key: &RegionKey,
        session: u64,
        secret: &Secret,
        sink: Arc<Memory>,
    ) -> Result<Box<dyn Peer>, Error>;
}

/// A connection to one region. One owner, no lock: it may move between threads but not be shared.
pub trait Peer: Send {
    /// Reads that may be outstanding at once.
    fn depth(&self) -> usize;

    /// Posts the first reads of `reads` that find room and says how many those were; 0 means full: poll first.
    ///
    /// A range outside the region is the business of the far end: it is accepted and completes with `Denied(OutOfBounds)`.
    /// A read of no bytes completes with 0.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if a place in the sink does not exist (nothing is accepted then), [`Error::Retired`].
    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error>;

    /// Appends what has completed and says how many that were. Never blocks, and does a bounded amount of work per call.
    ///
    /// # Errors
    /// [`Error::Retired`], once the connection has ended and its last completion has been handed out.
    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error>;

    /// Sleeps until [`poll`](Peer::poll) should be called, or until `timeout` is over. May wake too early.
    ///
    /// # Errors
    /// [`Error::System`] if the system can't wait.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        wait_readable(self.arm(), timeout)?;
        Ok(())
    }

    /// A descriptor that is readable while [`poll`](Peer::poll) has something to do or to say. It may be so without need;
    /// it is never silent when something waits. Stays the same for the life of the peer.
    fn arm(&mut self) -> BorrowedFd<'_>;

    /// The region itself, where it can be read in place. The connection still says when it is over: keep polling.
    fn view(&self) -> Option<Arc<View>>;

    /// Ends the connection: what is outstanding completes with `Cancelled`. A second call does nothing. Dropping closes.
    fn close(&mut self);
}

/// One read to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The caller's own name for it, given back in the completion. Need not be unique.
    pub tag: u64,
    /// First byte wanted, in the region.
    pub offset: u64,
    /// Bytes wanted.
    pub length: u32,
    /// Where the first byte lands, in the sink.
    pub sink_offset: u64,
}

/// The end of one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The name the caller gave it.
    pub tag: u64,
    /// Bytes that have arrived: all that were asked for.
    pub result: Result<u32, ReadError>,
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
