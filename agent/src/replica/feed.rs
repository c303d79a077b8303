//! Feed: a snapshot and a journal on some source, each behind a peer of its own, ready to be pumped.
//!
//! The control makes the connections (that may take a while), the delivery reads from them. A feed that fails is thrown away
//! whole; the next one begins where the delivery is.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use remora_fabric::{Memory, Peer, View};
use remora_table::{Expectation, JournalReader, SinkLayout, Slot, SnapshotReader};

use super::spool;

/// Why a feed ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum FeedError {
    /// The table says so: overrun, aborted, corrupt, of another generation.
    #[error(transparent)]
    Table(#[from] remora_table::Error),
}

/// See the module's text.
pub(super) struct Feed {
    /// Which snapshot it is.
    pub(super) origin: spool::Origin,
    /// The snapshot, until it has been read.
    pub(super) snapshot: Option<SnapshotFeed>,
    /// The journal.
    pub(super) journal: Option<JournalFeed>,
    /// Connections that no reader has been made for yet.
    pub(super) parts: Option<Parts>,
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
}

impl Feed {
    pub(super) fn new(origin: spool::Origin, parts: Parts) -> Feed {
        Feed { origin, snapshot: None, journal: None, parts: Some(parts) }
    }

    /// Makes the reader of the snapshot, from slot `first` on, without those that are `held`.
    pub(super) fn begin_snapshot(
        &mut self,
        first: u64,
        held: impl Fn(u64) -> bool + Send + 'static,
    ) -> Result<(), FeedError> {
        let Some(part) = self.parts.as_mut().and_then(|parts| parts.snapshot.take()) else { return Ok(()) };
        let have = move |number: u64| number < first || held(number);
        // A view is only read in place where the source retains what it publishes.
        let (in_place, mapped) = match part.peer.view() {
            Some(view) if part.in_place => (Some(view), None),
            copied_from => (None, copied_from),
        };
        let reader = SnapshotReader::new(in_place, part.sink, part.layout, part.expect, have)?.unchanging();
        self.snapshot = Some(SnapshotFeed { reader, peer: part.peer, mapped, copied: 0 });
        Ok(())
    }

    /// Makes the reader of the journal, from stream offset `next_byte` on.
    pub(super) fn begin_journal(&mut self, next_byte: u64) -> Result<(), FeedError> {
        let Some(Parts { journal: part, .. }) = self.parts.take() else { return Ok(()) };
        let reader = JournalReader::new(part.peer.view(), part.sink, part.layout, part.expect, next_byte)?;
        self.journal = Some(JournalFeed { reader, peer: part.peer });
        Ok(())
    }
}

/// The snapshot's reader and its peer.
pub(super) struct SnapshotFeed {
    pub(super) reader: SnapshotReader,
    peer: Box<dyn Peer>,
    /// The source's memory, where it is mapped here and slots are copied out of it.
    mapped: Option<Arc<View>>,
    /// Bytes copied out of it since its pages were forgotten.
    copied: u64,
}

/// Bytes of the source's memory that may be mapped here at a time: they count as memory of this process, which has a limit. Large,
/// since a page that is read again in the next round of a window has to be mapped again.
const MAPPED_LIMIT: u64 = 16 << 20;

impl SnapshotFeed {
    /// One turn of the reader.
    pub(super) fn pump(&mut self) -> Result<bool, FeedError> {
        let before = self.reader.progress();
        self.reader.pump(&mut *self.peer)?;
        Ok(self.reader.progress() != before)
    }

    /// The next slot that has come.
    pub(super) fn next_slot(&mut self) -> Option<Slot> {
        let slot = self.reader.next_slot()?;
        self.copied += u64::from(slot.length);
        if let Some(view) = self.mapped.as_ref().filter(|_| self.copied >= MAPPED_LIMIT) {
            view.forget(0..view.length());
            self.copied = 0;
        }
        Some(slot)
    }

    /// Nothing is on its way: only time can bring something new.
    pub(super) fn is_idle(&self) -> bool {
        self.reader.is_caught_up()
    }

    pub(super) fn arm(&mut self) -> BorrowedFd<'_> {
        self.peer.arm()
    }
}

/// The journal's reader and its peer.
pub(super) struct JournalFeed {
    pub(super) reader: JournalReader,
    peer: Box<dyn Peer>,
}

impl JournalFeed {
    /// One turn of the reader.
    pub(super) fn pump(&mut self) -> Result<(), FeedError> {
        Ok(self.reader.pump(&mut *self.peer)?)
    }

    /// Nothing is on its way: only time can bring something new.
    pub(super) fn is_idle(&self) -> bool {
        self.reader.is_caught_up()
    }

    pub(super) fn arm(&mut self) -> BorrowedFd<'_> {
        self.peer.arm()
    }
}
