//! Parts: the connections of one offer, and why reading from them ends.

use std::sync::Arc;

use remora_fabric::{Memory, Peer, View};
use remora_redis::ReplId;
use remora_table::{Expectation, Geometry, SinkLayout};

/// Why a feed ended.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
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
pub struct Parts {
    /// The snapshot, if it is still needed.
    pub snapshot: Option<Part>,
    /// The stream behind it.
    pub journal: Part,
    /// Bytes of the primary's backlog. A server that has loaded can get from there what the journal has lost.
    pub backlog: u64,
}

/// One connection and the table that is expected there.
pub struct Part {
    /// Reads the table.
    pub peer: Box<dyn Peer>,
    /// Where slots arrive.
    pub sink: Arc<Memory>,
    /// How the sink is divided.
    pub layout: SinkLayout,
    /// What the table must be.
    pub expect: Expectation,
    /// Slots of a snapshot can be used in the source's memory. (Records of a journal are always copied.)
    pub in_place: bool,
    /// Set if slots go into a copy from which other replicas read.
    pub copy: Option<CopyPlan>,
}

/// The copy in the part's sink.
#[derive(Clone, Copy)]
pub struct CopyPlan {
    /// Its shape.
    pub own: Geometry,
    /// Bytes per second, for all connections; 0: no limit.
    pub download_rate: u64,
    /// The source keeps all slots.
    pub retained: bool,
}

/// The memory behind a peer, if it is mapped here and slots are copied from it.
pub struct Mapped {
    view: Option<Arc<View>>,
    /// Bytes copied since its pages were last unmapped.
    copied: u64,
}

/// Limit of another process's memory that is mapped here at a time: it counts as memory of this process. Large, since a
/// page of a window that is read again must be mapped again.
const MAPPED_LIMIT: u64 = 16 << 20;

impl Mapped {
    /// Nothing of it has been copied.
    pub fn new(view: Option<Arc<View>>) -> Mapped {
        Mapped { view, copied: 0 }
    }

    /// Counts copied bytes.
    pub fn copied(&mut self, bytes: u64) {
        self.copied += bytes;
        if let Some(view) = self.view.as_ref().filter(|_| self.copied >= MAPPED_LIMIT) {
            view.forget(0..view.length());
            self.copied = 0;
        }
    }
}
