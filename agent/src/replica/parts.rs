//! Parts: the connections that a feed is made of, why one ends, and the memory of a peer that is mapped here.

use std::sync::Arc;

use remora_fabric::{Memory, Peer, View};
use remora_table::{Expectation, Geometry, SinkLayout};

/// Why a feed ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum FeedError {
    /// The table says so: overrun, aborted, corrupt, of another generation.
    #[error(transparent)]
    Table(#[from] remora_table::Error),
}

/// What the control hands over.
pub(super) struct Parts {
    pub(super) snapshot: Option<Part>,
    pub(super) journal: Part,
}

/// One connection and what is expected behind it.
pub(super) struct Part {
    pub(super) peer: Box<dyn Peer>,
    pub(super) sink: Arc<Memory>,
    pub(super) layout: SinkLayout,
    pub(super) expect: Expectation,
    /// A snapshot's slots may be used where the source has them. (A journal's records are copied out in any case.)
    pub(super) in_place: bool,
    /// The slots go into a copy, out of which others read on.
    pub(super) copy: Option<CopyPlan>,
}

/// What becomes a copy in the part's sink.
#[derive(Clone, Copy)]
pub(super) struct CopyPlan {
    /// Its shape.
    pub(super) own: Geometry,
    /// Bytes per second that may come in all; 0: any number.
    pub(super) download_rate: u64,
    /// The source keeps all slots.
    pub(super) retained: bool,
}

/// The memory that a peer reads, where it is mapped here and slots are copied out of it.
pub(super) struct Mapped {
    view: Option<Arc<View>>,
    /// Bytes copied out of it since its pages were forgotten.
    copied: u64,
}

/// Bytes of another process's memory that may be mapped here at a time: they count as memory of this process, which has a limit. Large,
/// since a page that is read again in the next round of a window has to be mapped again.
const MAPPED_LIMIT: u64 = 16 << 20;

impl Mapped {
    pub(super) fn new(view: Option<Arc<View>>) -> Mapped {
        Mapped { view, copied: 0 }
    }

    /// Notes that `bytes` more bytes were copied out of it.
    pub(super) fn copied(&mut self, bytes: u64) {
        self.copied += bytes;
        if let Some(view) = self.view.as_ref().filter(|_| self.copied >= MAPPED_LIMIT) {
            view.forget(0..view.length());
            self.copied = 0;
        }
    }
}
