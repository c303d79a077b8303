//! Here: reads that the caller's own thread answers, out of memory of this host. They wake no other thread.
//!
//! The driver knows which writes are under way, and this thread does not. So it is stricter:
//!
//! 1. None of the blocks has a write under way that is not acknowledged. Writes are counted where they are submitted,
//!    by groups of blocks; two groups may share a counter.
//! 2. The copy has applied everything that is acknowledged: its line is read, and then the blocks. So it holds every
//!    write of these blocks that was submitted before.
//! 3. The rest is as for the driver's own looks: the line is read again after the blocks, and says that the server
//!    obeys this writer; and every write that is returned is acknowledged.
//!
//! Otherwise the driver reads. It is the one who finds that a later writer has come.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytes::Bytes;

use super::buffers::Buffers;
use crate::message::{Holder, ServerId};
use crate::reader::InPlace;
use crate::shape::BLOCK_BYTES;
use crate::version::Version;
use crate::wire::Run;
use crate::writer::{Seen, may_be_given_out};

/// See the module's text.
pub(super) struct Here {
    /// Writes that are submitted and not acknowledged, by group of blocks.
    under_way: Box<[AtomicU32]>,
    /// The last write that is acknowledged, as a word. Set before any caller learns of it.
    acknowledged: AtomicU64,
    regions: RwLock<Vec<Open>>,
    buffers: Arc<Buffers>,
}

struct Open {
    server: ServerId,
    holder: Holder,
    reader: Arc<InPlace>,
}

impl Here {
    /// Blocks of `run`, if this thread can read them now.
    pub(super) fn read(&self, run: Run) -> Option<Bytes> {
        // Held until the end: what is closed is not read any more.
        let regions = self.regions();
        if regions.is_empty() || !self.is_quiet(run) {
            return None;
        }
        let acknowledged = Version::from_word(self.acknowledged.load(Ordering::SeqCst))?;
        let mut data = self.buffers.take(run.count as usize * BLOCK_BYTES);
        let is_read = |Open { reader, holder, .. }: &Open| {
            let Ok(before) = reader.line() else { return false };
            if before.applied < acknowledged {
                return false;
            }
            let found = reader.blocks(run.first, data.as_mut());
            let seen = found.map(|found| Seen { newest: found.newest(), line: found.line });
            seen.is_ok_and(|seen| may_be_given_out(*holder, acknowledged, before, seen))
        };
        let is_read = regions.iter().any(is_read);
        is_read.then(|| data.into_bytes())
    }

    /// Whether no write of these blocks is under way.
    fn is_quiet(&self, run: Run) -> bool {
        groups(run).all(|group| self.counter(group).is_some_and(|count| count.load(Ordering::SeqCst) == 0))
    }

    fn counter(&self, group: u64) -> Option<&AtomicU32> {
        // Multiplied, so that neighbours are spread, and neighbours of different files seldom meet.
        let place = group.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - PLACES_BITS);
        self.under_way.get(place as usize)
    }

    /// Everything up to this write is acknowledged. Call it before any caller learns of it.
    pub(super) fn acknowledged(&self, through: Version) {
        self.acknowledged.store(through.word(), Ordering::SeqCst);
    }

    /// A region can be read.
    pub(super) fn open(&self, server: ServerId, holder: Holder, reader: Arc<InPlace>) {
        self.regions_mut().push(Open { server, holder, reader });
    }

    /// The region of a server must not be read any more.
    pub(super) fn close(&self, server: ServerId) {
        self.regions_mut().retain(|open| open.server != server);
    }

    /// No region must be read any more.
    pub(super) fn close_all(&self) {
        self.regions_mut().clear();
    }

    fn regions(&self) -> RwLockReadGuard<'_, Vec<Open>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions_mut(&self) -> RwLockWriteGuard<'_, Vec<Open>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Here {
    fn default() -> Here {
        let under_way = (0..1 << PLACES_BITS).map(|_| AtomicU32::new(0)).collect();
        Here { under_way, acknowledged: AtomicU64::new(0), regions: RwLock::default(), buffers: Arc::default() }
    }
}

/// A write under way, until it is dropped.
pub(super) struct UnderWay {
    here: Arc<Here>,
    runs: Vec<Run>,
}

impl UnderWay {
    /// A write of these blocks is about to be submitted.
    pub(super) fn new(here: &Arc<Here>, runs: Vec<Run>) -> UnderWay {
        let write = UnderWay { here: Arc::clone(here), runs };
        write.counters().for_each(|count| _ = count.fetch_add(1, Ordering::SeqCst));
        write
    }

    fn counters(&self) -> impl Iterator<Item = &AtomicU32> {
        self.runs.iter().flat_map(|run| groups(*run)).filter_map(|group| self.here.counter(group))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.counters().for_each(|count| _ = count.fetch_sub(1, Ordering::SeqCst));
    }
}

/// The groups of a run's blocks.
fn groups(run: Run) -> impl Iterator<Item = u64> {
    let blocks = run.blocks();
    blocks.start / GROUP..blocks.end.div_ceil(GROUP)
}

/// Blocks of a group: a long request has at most 65 groups, or 1025 without bytes, and a short one disturbs few blocks.
const GROUP: u64 = 16;

/// Counters: 4096, so that as many writes as can be under way seldom meet a read of other blocks. 16 KiB.
const PLACES_BITS: u32 = 12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_quiet_while_no_write_of_their_group_is_under_way() {
        let here = Arc::new(Here::default());
        let run = |first, count| Run { first, count };
        let writes = [vec![run(100, 1), run(1000, 17)], vec![run(100, 1)]].map(|runs| UnderWay::new(&here, runs));
        assert!(!here.is_quiet(run(100, 1)) && !here.is_quiet(run(0, 1024)) && !here.is_quiet(run(1016, 1)));
        assert!(here.is_quiet(run(5000, 1)));
        let [first, second] = writes;
        drop(first);
        assert!(!here.is_quiet(run(100, 1)) && here.is_quiet(run(1000, 17)));
        drop(second);
        assert!(here.is_quiet(run(0, 1024)) && here.is_quiet(run(u64::MAX - 1, 1)));
        assert!(here.under_way.iter().all(|count| count.load(Ordering::Relaxed) == 0));
    }
}
