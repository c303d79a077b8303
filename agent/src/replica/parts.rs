//! The connections of a feed, and how far a delivery is.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use remora_fabric::{Memory, Peer, View};
use remora_redis::ReplId;
use remora_table::{Expectation, Geometry, SinkLayout};

use super::exact::Exactness;

// Parts: the connections of a feed, why a feed ends, and the mapped memory of a peer.

/// Why a feed ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FeedError {
    /// The table was overrun, aborted, is corrupt, or belongs to another generation.
    #[error(transparent)]
    Table(#[from] remora_table::Error),
    /// The server has loaded a snapshot of a history that this feed does not continue.
    #[error("its stream is of the history {feed}, and the server has loaded {loaded}")]
    OtherHistory {
        /// The replid of the server's data.
        loaded: ReplId,
        /// The replid of the feed's stream.
        feed: ReplId,
    },
}

/// The connections of one offer.
pub(crate) struct Parts {
    pub(crate) snapshot: Option<Part>,
    pub(crate) journal: Part,
    /// Bytes of the primary's backlog. A server that has loaded can get from there what the journal has lost.
    pub(crate) backlog: u64,
}

/// One connection and the table that is expected there.
pub(crate) struct Part {
    pub(crate) peer: Box<dyn Peer>,
    pub(crate) sink: Arc<Memory>,
    pub(crate) layout: SinkLayout,
    pub(crate) expect: Expectation,
    /// Slots of a snapshot can be used in the source's memory. (Records of a journal are always copied.)
    pub(crate) in_place: bool,
    /// Set if slots go into a copy from which other replicas read.
    pub(crate) copy: Option<CopyPlan>,
}

/// The copy in the part's sink.
#[derive(Clone, Copy)]
pub(crate) struct CopyPlan {
    /// Its shape.
    pub(crate) own: Geometry,
    /// Bytes per second, for all connections; 0: no limit.
    pub(crate) download_rate: u64,
    /// The source keeps all slots.
    pub(crate) retained: bool,
}

/// The memory behind a peer, if it is mapped here and slots are copied from it.
pub(crate) struct Mapped {
    view: Option<Arc<View>>,
    /// Bytes copied since its pages were last unmapped.
    copied: u64,
}

/// Limit of another process's memory that is mapped here at a time: it counts as memory of this process. Large, since a
/// page of a window that is read again must be mapped again.
const MAPPED_LIMIT: u64 = 16 << 20;

impl Mapped {
    pub(crate) fn new(view: Option<Arc<View>>) -> Mapped {
        Mapped { view, copied: 0 }
    }

    /// Counts copied bytes.
    pub(crate) fn copied(&mut self, bytes: u64) {
        self.copied += bytes;
        if let Some(view) = self.view.as_ref().filter(|_| self.copied >= MAPPED_LIMIT) {
            view.forget(0..view.length());
            self.copied = 0;
        }
    }
}

// Meter: the delivery's progress, for the progress bar, the source and the hand-off.
//
// Plain atomics, all written by the delivery thread, and what the server's keeper writes: a text, and its
// findings. Bytes and slots count the snapshot; offsets are replication offsets.

/// Counters that the delivery thread writes and other tasks read.
// Larger than the bound: a field for each number that someone looks at.
#[derive(Default)]
pub(crate) struct Meter {
    /// Slots that have arrived and match their checksums.
    pub(crate) slots_held: Count,
    /// The first slot that is still needed from the source.
    pub(crate) slots_below: Count,
    /// Bytes of the snapshot that have arrived.
    pub(crate) bytes_fetched: Count,
    /// Bytes of the snapshot given to the server.
    pub(crate) bytes_delivered: Count,
    /// Bytes of all payloads that the server was given, their headers included. Never set back.
    pub(crate) bytes_given: Count,
    /// 1 once the server was given the end of a payload. Never set back.
    pub(crate) end_given: Count,
    /// Bytes that the source has published so far.
    pub(crate) bytes_known: Count,
    /// Slots of the whole snapshot; 0 while unknown.
    pub(crate) slots_total: Count,
    /// 1 once the server's module was given memory.
    pub(crate) by_module: Count,
    /// Bytes that it loaded from there.
    pub(crate) referred: Count,
    /// Why the server does not load in the fast way; empty if it does, or if that is not decided yet.
    no_fast_keys: Mutex<String>,
    /// What the server's keeper has found of the conditions of an exact replica.
    exactness: Mutex<Exactness>,
    /// The oldest slot of a copy that others may read.
    pub(crate) copy_oldest: Count,
    /// 1 while a copy waits for its own server.
    pub(crate) copy_full: Count,
    /// The session of the replica that slots come from; 0: from the source.
    pub(crate) reads_from: Count,
    /// The last byte of the stream that has arrived.
    pub(crate) stream_fetched: Count,
    /// 1 while the stream is not read, because too much of it waits for the server: its end is not known then.
    pub(crate) stream_paused: Count,
    /// Bytes that the source can write to its journal until it overwrites what is needed next, and what it has written
    /// by then since the journal began. As of the last look while the stream was not read; 0 before.
    pub(crate) journal_left: Count,
    pub(crate) journal_written: Count,
    /// The last byte of the stream given to the server.
    pub(crate) stream_delivered: Count,
    /// The last byte of the stream that the server acknowledged.
    pub(crate) acknowledged: Count,
    /// Connections to the link's port that were closed before they had logged in.
    pub(crate) strangers: Count,
}

impl Meter {
    pub(super) fn set_exactness(&self, found: Exactness) {
        *self.exactness.lock().unwrap_or_else(PoisonError::into_inner) = found;
    }

    pub(super) fn exactness(&self) -> Exactness {
        self.exactness.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why the server does not load in the fast way; empty if it does.
    pub(crate) fn set_no_fast_keys(&self, why: &str) {
        why.clone_into(&mut self.no_fast_keys.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn no_fast_keys(&self) -> String {
        self.no_fast_keys.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts bytes of a payload that the server was given, and returns their number.
    pub(crate) fn give(&self, bytes: usize) -> usize {
        self.bytes_given.add(bytes as u64);
        bytes
    }
}

/// A number with one writer.
#[derive(Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }
}
