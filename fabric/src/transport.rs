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

use std::{os::fd::BorrowedFd, sync::Arc, time::Duration};

pub use remora_memory::wait_readable;

use crate::{
    error::{Error, ReadError},
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
