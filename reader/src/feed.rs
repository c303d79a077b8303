//! Feed: a snapshot and a journal of a source, each behind its own peer, ready to be read.
//!
//! The driver makes the connections, which can take a while; the delivery reads from them. A feed that fails is dropped
//! as a whole; the next one begins where the delivery is.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use remora_fabric::{Memory, Peer};
use remora_table::{JournalReader, Progress, Room, Seal, Slot, SnapshotCopy, SnapshotReader};

use crate::parts::Meter;
use crate::parts::{FeedError, Mapped, Parts};
use crate::relay::reader::{Lost, RelayReader};
use crate::spool;

/// Where the next feed must begin.
#[derive(Clone, Debug, Default)]
pub struct Position {
    /// The snapshot that slots were read from.
    pub snapshot: Option<spool::SnapshotId>,
    /// The first slot that is still needed.
    pub next_slot: u64,
    /// The next byte of the stream that is needed; 0 before the first feed.
    pub next_byte: u64,
    /// The server holds the whole snapshot: only the stream is needed.
    pub loaded: bool,
    /// The memory of the copy that the next feed can continue.
    pub copy: Option<Arc<Memory>>,
}

/// A snapshot and a journal of one source, and the connections through which they are read.
pub struct Feed {
    /// Which snapshot it is.
    pub id: spool::SnapshotId,
    /// The snapshot, until it has been read.
    pub snapshot: Option<SnapshotFeed>,
    /// The journal.
    pub journal: Option<JournalFeed>,
    /// Connections without a reader so far.
    pub parts: Option<Parts>,
}

impl Feed {
    /// Nothing of it has been read.
    pub fn new(id: spool::SnapshotId, parts: Parts) -> Feed {
        Feed { id, snapshot: None, journal: None, parts: Some(parts) }
    }

    /// What the slots of the snapshot are sealed with, before its reader is created.
    pub fn seal(&self) -> Option<Arc<Seal>> {
        self.parts.as_ref()?.snapshot.as_ref()?.expect.seal.clone()
    }

    /// Creates the reader of the snapshot, from slot `first` on, without the slots that are `held`. `kept` is the copy
    /// of a former feed, which is continued if it is in the same memory. With `spools`, slots are kept in files.
    pub fn begin_snapshot(
        &mut self,
        now: Instant,
        first: u64,
        held: impl Fn(u64) -> bool + Send + 'static,
        kept: Option<Box<RelayReader>>,
        spools: bool,
    ) -> Result<(), FeedError> {
        let Some(part) = self.parts.as_mut().and_then(|parts| parts.snapshot.take()) else { return Ok(()) };
        if let Some(plan) = part.copy {
            let mut kept = kept.filter(|kept| Arc::ptr_eq(kept.memory(), &part.sink));
            let goes_on = kept.as_mut().is_some_and(|kept| kept.resume_at(first));
            let relayed = match kept.filter(|_| goes_on) {
                Some(mut kept) => {
                    kept.reconnect(part.peer);
                    kept
                }
                None => {
                    let copy = SnapshotCopy::create(part.sink, plan.own, part.expect, first)?;
                    Box::new(RelayReader::new(now, copy, part.peer, plan))
                }
            };
            self.snapshot = Some(SnapshotFeed::RelayReader(relayed));
            return Ok(());
        }
        let have = move |number: u64| number < first || held(number);
        // A view is only read in place where the source retains what it publishes.
        let (in_place, mapped) = match part.peer.view() {
            Some(view) if part.in_place => (Some(view), None),
            copied_from => (None, copied_from),
        };
        let reader = SnapshotReader::new(in_place, part.sink, part.layout, part.expect, have)?;
        let reader = reader.unchanging().keeping_encoded(spools);
        let direct = Direct { reader, peer: part.peer, mapped: Mapped::new(mapped) };
        self.snapshot = Some(SnapshotFeed::Direct(Box::new(direct)));
        Ok(())
    }

    /// Creates the reader of the journal, from stream offset `next_byte` on.
    pub fn begin_journal(&mut self, next_byte: u64) -> Result<(), FeedError> {
        let Some(Parts { journal: part, backlog, .. }) = self.parts.take() else { return Ok(()) };
        let bytes = part.expect.geometry.memory_len();
        let reader = JournalReader::new(part.peer.view(), part.sink, part.layout, part.expect, next_byte)?;
        self.journal = Some(JournalFeed { reader, peer: part.peer, bytes, backlog });
        Ok(())
    }
}

/// The reader of the snapshot.
pub enum SnapshotFeed {
    /// From the source's table, into buffers or without a copy.
    Direct(Box<Direct>),
    /// Into a copy from which other replicas read.
    RelayReader(Box<RelayReader>),
}

/// The snapshot's reader and its peer.
pub struct Direct {
    reader: SnapshotReader,
    peer: Box<dyn Peer>,
    mapped: Mapped,
}

impl Direct {
    fn next_slot(&mut self) -> Option<Slot> {
        let slot = self.reader.next_slot()?;
        self.mapped.copied(u64::from(slot.length));
        Some(slot)
    }

    /// Becomes readable when something has arrived.
    pub fn arm(&mut self) -> BorrowedFd<'_> {
        self.peer.arm()
    }
}

/// The result of a turn.
pub struct Pumped {
    /// More is known or has arrived.
    pub moved: bool,
    /// A peer was lost; the feed continues.
    pub lost: Option<Lost>,
}

impl SnapshotFeed {
    /// One turn of the reader.
    pub fn pump(&mut self, now: Instant) -> Result<Pumped, FeedError> {
        let before = self.progress();
        let lost = match self {
            SnapshotFeed::Direct(direct) => {
                direct.reader.pump(&mut *direct.peer)?;
                None
            }
            SnapshotFeed::RelayReader(relayed) => relayed.pump(now)?,
        };
        Ok(Pumped { moved: self.progress() != before, lost })
    }

    /// The next verified slot, in order of the stream.
    pub fn next_slot(&mut self) -> Option<Slot> {
        match self {
            SnapshotFeed::Direct(direct) => direct.next_slot(),
            SnapshotFeed::RelayReader(relayed) => relayed.next_slot(),
        }
    }

    /// Releases a slot after use. Fails if the source overwrote it meanwhile.
    pub fn release(&mut self, slot: Slot) -> Result<(), remora_table::Error> {
        match self {
            SnapshotFeed::Direct(direct) => direct.reader.release(slot),
            SnapshotFeed::RelayReader(relayed) => {
                relayed.release(slot);
                Ok(())
            }
        }
    }

    /// Counts a slot that has arrived.
    pub fn count(&self, slot: &Slot, meter: &Meter) {
        match self {
            SnapshotFeed::Direct(_) => {
                meter.slots_held.set(slot.number + 1);
                meter.bytes_fetched.add(u64::from(slot.length));
            }
            // A copy holds slots before the delivery takes them.
            SnapshotFeed::RelayReader(relayed) => relayed.show(meter),
        }
    }

    /// How far the reading is.
    pub fn progress(&self) -> Progress {
        match self {
            SnapshotFeed::Direct(direct) => direct.reader.progress(),
            SnapshotFeed::RelayReader(relayed) => relayed.progress(),
        }
    }

    /// Whether all slots have arrived.
    pub fn is_fetched(&self) -> bool {
        match self {
            SnapshotFeed::Direct(direct) => direct.reader.is_complete(),
            SnapshotFeed::RelayReader(relayed) => relayed.is_whole(),
        }
    }

    /// Whether no read is under way: only the source can bring something new.
    pub fn is_idle(&self) -> bool {
        match self {
            SnapshotFeed::Direct(direct) => direct.reader.is_caught_up(),
            SnapshotFeed::RelayReader(relayed) => relayed.is_idle(),
        }
    }

    /// The reader of a copy that others read too.
    pub fn relayed(&mut self) -> Option<&mut RelayReader> {
        match self {
            SnapshotFeed::Direct(_) => None,
            SnapshotFeed::RelayReader(relayed) => Some(relayed),
        }
    }

    /// The copy, which outlives the feed.
    pub fn into_relayed(self, now: Instant) -> Option<Box<RelayReader>> {
        match self {
            SnapshotFeed::Direct(_) => None,
            SnapshotFeed::RelayReader(mut relayed) => {
                relayed.disconnect(now);
                Some(relayed)
            }
        }
    }
}

/// The journal's reader and its peer.
pub struct JournalFeed {
    /// Reads its records.
    pub reader: JournalReader,
    peer: Box<dyn Peer>,
    /// Bytes of the journal's region.
    pub bytes: u64,
    /// Bytes of the primary's backlog.
    backlog: u64,
}

impl JournalFeed {
    /// One turn of the reader.
    pub fn pump(&mut self) -> Result<(), FeedError> {
        Ok(self.reader.pump(&mut *self.peer)?)
    }

    /// Looks how far the writer is from what is needed next, and takes nothing.
    /// The primary's backlog may have what the journal has not.
    pub fn look(&mut self) -> Result<Option<Room>, FeedError> {
        Ok(self.reader.look(&mut *self.peer, self.backlog)?)
    }

    /// Whether no read is under way: only the source can bring something new.
    pub fn is_idle(&self) -> bool {
        self.reader.is_caught_up()
    }

    /// Readable when more has arrived.
    pub fn arm(&mut self) -> BorrowedFd<'_> {
        self.peer.arm()
    }
}
