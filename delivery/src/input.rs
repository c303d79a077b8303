//! Input: what the delivery reads: the feed of a snapshot and a journal, the copy that outlives a feed, and the spool.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_redis::aof::{Foreign, Known, Unfit};
use remora_table::{Chunk, Seal, Slot};
use rustix::event::PollFlags;

use super::payload::{Piece, Used};
use super::{Demand, Wait};
use remora_reader::feed::Position;
use remora_reader::feed::{Feed, Pumped, SnapshotFeed};
use remora_reader::parts::FeedError;
use remora_reader::parts::Meter;
use remora_reader::relay::reader::{Lost, ReadFrom, RelayReader};
use remora_reader::spool::{SnapshotId, Spool};

/// The first and the longest pause between two polls of an idle journal. They bound the lag that polling adds. A longer
/// pause costs less of both ends' processors; the journal is looked at again at once while it brings something.
const PACE_FIRST: Duration = Duration::from_micros(100);
const PACE_LAST: Duration = Duration::from_millis(2);

/// The longest pause between two polls of the journal while slots of the snapshot are missing. The server can take
/// nothing of the stream yet, so the journal is read only to keep up with it. At [`PACE_LAST`] eight readers cost the
/// source half a processor second within twenty. [`pace_before`] makes it shorter for a journal that could be overrun.
const PACE_BEFORE: Duration = Duration::from_millis(200);

/// Bytes of the stream in a second that must not overrun the journal in such a pause: more than a primary replicates.
const FASTEST_STREAM: u64 = 2_000_000_000;

/// Interval at which a journal that is not read is looked at: too much of it waits for the server. A second of warning
/// less matters little to a transfer that takes minutes.
const LOOK_PACE: Duration = Duration::from_millis(250);

/// Interval at which a snapshot that is still being written is polled.
const SNAPSHOT_PACE: Duration = Duration::from_micros(500);

/// What the delivery reads: the feed, the copy that outlives it, and the spool.
pub(super) struct Input {
    folder: Option<PathBuf>,
    meter: Arc<Meter>,
    feed: Option<Box<Feed>>,
    /// The copy of an ended feed. Other replicas may still read it, and the next feed continues it.
    kept: Option<Box<RelayReader>>,
    spool: Option<Spool>,
    /// The slots that an earlier agent has left, until a snapshot begins.
    found: Option<Spool>,
    /// Why a slot of the spool cannot be used.
    fault: Option<String>,
    /// Whether the whole snapshot has arrived.
    fetched: bool,
    snapshot_due: Instant,
    journal_due: Instant,
    journal_pace: Duration,
}

/// Why the input cannot continue.
pub(super) enum InputError {
    /// Another feed is needed.
    Feed(FeedError),
    /// The spool cannot be used: the text says why and what to do.
    Spool(String),
}

/// The result of reading the snapshot.
#[derive(Default)]
pub(super) struct Fetched {
    pub(super) moved: bool,
    /// The upstream replica was lost; the feed goes on.
    pub(super) lost: Option<Lost>,
    /// The last slot has arrived.
    pub(super) all: bool,
}

impl Input {
    pub(super) fn new(now: Instant, folder: Option<PathBuf>, found: Option<Spool>, meter: Arc<Meter>) -> Input {
        Input {
            folder,
            meter,
            feed: None,
            kept: None,
            spool: None,
            found,
            fault: None,
            fetched: false,
            snapshot_due: now,
            journal_due: now,
            journal_pace: PACE_FIRST,
        }
    }

    pub(super) fn has_feed(&self) -> bool {
        self.feed.is_some()
    }

    pub(super) fn spool(&self) -> Option<&Spool> {
        self.spool.as_ref()
    }

    pub(super) fn is_fetched(&self) -> bool {
        self.fetched
    }

    /// Whether all slots below this one are the whole snapshot.
    pub(super) fn is_whole_at(&self, number: u64) -> bool {
        self.fetched && number >= self.meter.slots_total.get()
    }

    /// The snapshot has no bytes at all. No server makes such a snapshot, but it would be complete.
    pub(super) fn is_empty(&self) -> bool {
        self.fetched && self.meter.slots_total.get() == 0
    }

    /// The snapshot of the present feed.
    fn snapshot(&mut self) -> Option<&mut SnapshotFeed> {
        self.feed.as_mut()?.snapshot.as_mut()
    }

    /// The memory of the copy, if there is one.
    pub(super) fn copy(&self) -> Option<Arc<Memory>> {
        let of_feed = self.feed.as_ref().and_then(|feed| match &feed.snapshot {
            Some(SnapshotFeed::RelayReader(relayed)) => Some(&**relayed),
            _ => None,
        });
        of_feed.or(self.kept.as_deref()).map(|relayed| relayed.memory().clone())
    }

    /// Reads slots from this source or peer from now on, if they go into a copy.
    pub(super) fn read_from(&mut self, now: Instant, from: ReadFrom) {
        let of_feed = self.feed.as_mut().and_then(|feed| feed.snapshot.as_mut()?.relayed());
        if let Some(relayed) = of_feed.or(self.kept.as_deref_mut()) {
            relayed.read_from(now, from);
        }
    }

    // ---- feeds come and go ----

    /// Begins another snapshot.
    ///
    /// # Errors
    /// The spool cannot be used: the text says why and what to do.
    pub(super) fn begin_snapshot(&mut self, id: &SnapshotId, seal: Option<Arc<Seal>>) -> Result<(), String> {
        self.fetched = false;
        self.count_from_nothing();
        self.meter.slots_total.set(0);
        self.meter.stream_fetched.set(id.origin.offset);
        self.meter.stream_delivered.set(id.origin.offset);
        if let Some(folder) = &self.folder {
            // To open a spool reads all that it holds: not again for what was read already.
            let ready = self.spool.take().or(self.found.take()).filter(|spool| spool.snapshot() == *id);
            let ready = ready.and_then(|spool| spool.with_seal(seal.clone()));
            let spool = match ready {
                Some(spool) => spool,
                None => Spool::open(folder, id, seal).map_err(|cause| spool_error(folder, &cause))?,
            };
            for number in 0..spool.held_below() {
                self.meter.bytes_fetched.add(spool.get(number).map_or(0, |held| u64::from(held.length)));
            }
            self.meter.slots_held.set(spool.held_below());
            self.meter.slots_below.set(spool.held_below());
            self.spool = Some(spool);
        }
        Ok(())
    }

    /// Reads from this feed, from the slot and offset that the delivery has reached.
    pub(super) fn attach(&mut self, now: Instant, mut feed: Box<Feed>, at: &Position) -> Result<(), FeedError> {
        self.keep_the_copy(now);
        if !at.loaded {
            // Without a spool all slots below the next one have gone to the server. With one they may have to go again.
            let held = self.spool.as_ref().map(Spool::held).unwrap_or_default();
            let first = if self.spool.is_some() { 0 } else { at.next_slot };
            let held = move |number: u64| held.contains(&number);
            feed.begin_snapshot(now, first, held, self.kept.take(), self.spool.is_some())?;
        }
        feed.begin_journal(at.next_byte)?;
        self.feed = Some(feed);
        (self.journal_due, self.snapshot_due) = (now, now);
        Ok(())
    }

    /// Ends the feed and keeps its copy.
    pub(super) fn lose_feed(&mut self, now: Instant) {
        self.keep_the_copy(now);
        self.feed = None;
    }

    /// Starts over: the server needs the whole snapshot again, and the slots it had are not kept.
    pub(super) fn begin_again(&mut self, now: Instant) {
        self.keep_the_copy(now);
        // The server may still read what it was lent: only a copy that never writes a slot twice can be used again.
        self.kept = self.kept.take().and_then(|mut kept| kept.rewind().then_some(kept));
        self.feed = None;
        self.fetched = false;
        self.count_from_nothing();
    }

    /// Notes that the server has the whole snapshot. From now on only the journal is read.
    pub(super) fn end_snapshot(&mut self, now: Instant) {
        self.keep_the_copy(now);
        if let Some(feed) = &mut self.feed {
            feed.snapshot = None;
        }
        self.meter.slots_below.set(u64::MAX);
    }

    /// Removes the spool if the sync is done.
    pub(super) fn remove_spool_if(&mut self, done: bool) {
        if let Some(spool) = self.spool.take_if(|_| done) {
            let _ = spool.remove();
        }
    }

    fn keep_the_copy(&mut self, now: Instant) {
        let relayed = self.feed.as_mut().and_then(|feed| feed.snapshot.take()?.into_relayed(now));
        if relayed.is_some() {
            self.kept = relayed;
        }
    }

    fn count_from_nothing(&self) {
        self.meter.slots_below.set(0);
        self.meter.slots_held.set(0);
        self.meter.bytes_fetched.set(0);
        self.meter.bytes_delivered.set(0);
    }

    // ---- slots ----

    /// The slot of this number, if it has arrived.
    pub(super) fn next_piece(&mut self, number: u64) -> Option<Piece> {
        if let Some(spool) = &self.spool {
            let held = spool.get(number)?;
            return match spool.opened(&held) {
                Ok(None) => Some(Piece::Spooled(held)),
                Ok(Some(bytes)) => Some(Piece::Opened(bytes)),
                Err(cause) => {
                    self.fault = Some(self.folder.as_deref().map_or(cause.to_string(), |at| spool_error(at, &cause)));
                    None
                }
            };
        }
        let slot = self.next_slot()?;
        assert_eq!(slot.number, number, "the reader gives slots in order, from the first that was asked for");
        Some(Piece::Fresh(slot))
    }

    /// The next slot that has arrived.
    pub(super) fn next_slot(&mut self) -> Option<Slot> {
        let snapshot = self.feed.as_mut()?.snapshot.as_mut()?;
        let slot = snapshot.next_slot()?;
        snapshot.count(&slot, &self.meter);
        Some(slot)
    }

    /// Releases a slot that the server has read. Fails if the source overwrote the slot while it was in use.
    pub(super) fn used(&mut self, used: Used) -> Result<(), FeedError> {
        let Used { slot, alone } = used;
        if alone {
            return Ok(slot.release_alone()?);
        }
        let number = slot.number;
        if let Some(snapshot) = self.snapshot() {
            snapshot.release(slot)?;
        }
        let below = &self.meter.slots_below;
        below.set(below.get().max(number + 1));
        Ok(())
    }

    /// Releases a slot that is not needed any more. Whether it was overwritten does not matter.
    pub(super) fn give_back(&mut self, slot: Slot) {
        let _ = match self.snapshot() {
            Some(snapshot) => snapshot.release(slot),
            None => slot.release_alone(),
        };
    }

    // ---- reading ----

    /// Reads what has arrived of the snapshot.
    pub(super) fn fetch_snapshot(&mut self, now: Instant) -> Result<Fetched, InputError> {
        if let Some(text) = self.fault.take() {
            return Err(InputError::Spool(text));
        }
        let Some(snapshot) = self.feed.as_mut().and_then(|feed| feed.snapshot.as_mut()) else {
            return Ok(Fetched::default());
        };
        if snapshot.is_idle() && now < self.snapshot_due {
            return Ok(Fetched::default());
        }
        self.snapshot_due = now + SNAPSHOT_PACE;
        let Pumped { mut moved, lost } = snapshot.pump(now).map_err(InputError::Feed)?;
        let progress = snapshot.progress();
        let meter = &self.meter;
        if let Some(relayed) = snapshot.relayed() {
            relayed.show(meter);
        }
        meter.bytes_known.set(progress.bytes_known);
        meter.slots_total.set(progress.end.unwrap_or(0));
        if let Some(spool) = &mut self.spool {
            while let Some(slot) = snapshot.next_slot() {
                meter.bytes_fetched.add(u64::from(slot.length));
                spool_slot(spool, snapshot, slot, self.folder.as_deref())?;
                meter.slots_held.add(1);
                meter.slots_below.set(spool.held_below());
                moved = true;
            }
        }
        let all = !self.fetched && snapshot.is_fetched();
        self.fetched |= all;
        if all {
            self.journal_due = now;
        }
        Ok(Fetched { moved: moved || lost.is_some(), lost, all })
    }

    /// Reads what has arrived of the journal. Returns the offset of the next byte, if anything arrived.
    pub(super) fn fetch_journal(&mut self, now: Instant, stream: &mut Stream) -> Result<Option<u64>, FeedError> {
        let Some(feed) = &mut self.feed else { return Ok(None) };
        let Some(journal) = &mut feed.journal else { return Ok(None) };
        if stream.is_full() {
            self.meter.stream_paused.set(1);
            if now >= self.journal_due {
                self.journal_due = now + LOOK_PACE;
                if let Some(room) = journal.look()? {
                    self.meter.journal_left.set(room.left);
                    self.meter.journal_written.set(room.written);
                }
            }
            return Ok(None);
        }
        if journal.is_idle() && now < self.journal_due {
            return Ok(None);
        }
        journal.pump()?;
        self.meter.stream_paused.set(0);
        let (mut next, mut took) = (None, 0);
        while let Some(chunk) = journal.reader.next_chunk() {
            let length = chunk.bytes.len() as u64;
            next = Some(chunk.offset + length);
            took += length;
            stream.push(chunk);
        }
        if let Some(next) = next {
            self.meter.stream_fetched.set(next - 1);
        }
        if let Some(relayed) = feed.snapshot.as_mut().and_then(SnapshotFeed::relayed) {
            relayed.stream_took(took);
        }
        self.journal_pace = if next.is_some() { PACE_FIRST } else { (self.journal_pace * 2).min(PACE_LAST) };
        let awaits_slots = feed.snapshot.as_ref().is_some_and(|snapshot| !snapshot.is_fetched());
        self.journal_due = now + if awaits_slots { pace_before(journal.bytes) } else { self.journal_pace };
        Ok(next)
    }

    // ---- waiting ----

    pub(super) fn feed(&self) -> Option<&Feed> {
        self.feed.as_deref()
    }

    /// Whether a read of the feed is under way.
    #[cfg(test)]
    pub(super) fn is_reading(&self) -> bool {
        let Some(feed) = &self.feed else { return false };
        let snapshot = feed.snapshot.as_ref().is_some_and(|snapshot| !snapshot.is_fetched() && !snapshot.is_idle());
        snapshot || feed.journal.as_ref().is_some_and(|journal| !journal.is_idle())
    }

    /// Adds the descriptors and deadlines that can bring more. `stream_is_full` says that the journal is not read for
    /// now.
    pub(super) fn wait<'a>(&'a mut self, wait: &mut Wait<'a>, demand: Demand, stream_is_full: bool) {
        let has_spool = self.spool.is_some();
        let Some(feed) = &mut self.feed else { return };
        let Feed { snapshot, journal, .. } = &mut **feed;
        if let Some(snapshot) = snapshot.as_mut().filter(|snapshot| !snapshot.is_fetched()) {
            match snapshot {
                // During a pause, arrivals can wait as well. Other replicas that read here wait two milliseconds at
                // most.
                _ if demand.is_paused => {}
                SnapshotFeed::RelayReader(relayed) => {
                    // Other replicas wait for these slots even if this server reads nothing.
                    let due = if relayed.is_idle() { Some(self.snapshot_due) } else { relayed.due(wait.now()) };
                    if let Some(due) = due {
                        wait.until(due);
                    }
                    for fd in relayed.arms() {
                        wait.add(fd, PollFlags::IN);
                    }
                }
                SnapshotFeed::Direct(_) if snapshot.is_idle() => {
                    if demand.wants_slots || has_spool {
                        wait.until(self.snapshot_due);
                    }
                }
                SnapshotFeed::Direct(direct) => {
                    wait.add(direct.arm(), PollFlags::IN);
                }
            }
        }
        let Some(journal) = journal else { return };
        if stream_is_full {
            wait.until(self.journal_due);
        } else if journal.is_idle() {
            // While the server's socket is full, the stream can wait. The payload goes first.
            wait.until(if demand.is_full { wait.now() + PACE_LAST } else { self.journal_due });
        } else {
            wait.add(journal.arm(), PollFlags::IN);
        }
    }
}

/// The pause between two polls of a journal of this length while slots are missing: the fastest stream fills half of
/// it at most.
fn pace_before(journal_bytes: u64) -> Duration {
    Duration::from_secs_f64(journal_bytes as f64 / 2.0 / FASTEST_STREAM as f64).clamp(PACE_LAST, PACE_BEFORE)
}

/// Stores one slot. The slot counts as held only after a second check that the source has not overwritten it.
fn spool_slot(
    spool: &mut Spool,
    snapshot: &mut SnapshotFeed,
    slot: Slot,
    folder: Option<&Path>,
) -> Result<(), InputError> {
    let crc = slot.crc().map_err(|error| InputError::Feed(error.into()))?;
    let error = |cause: io::Error| match folder {
        Some(folder) => InputError::Spool(spool_error(folder, &cause)),
        None => InputError::Spool(cause.to_string()),
    };
    let held = spool.store(&slot, crc).map_err(error)?;
    snapshot.release(slot).map_err(|error| InputError::Feed(error.into()))?;
    spool.remember(held).map_err(error)
}

fn spool_error(folder: &Path, cause: &io::Error) -> String {
    let cure = match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room there for the whole snapshot, name another --state-dir, or leave it out"
        }
        _ => "check the folder and its file system",
    };
    format!("the state directory {} can't be used: {cause}; {cure}", folder.display())
}

// Stream: bytes of the primary's replication stream that have arrived and that the server has not been given.

/// Bytes of the replication stream that wait for the server. Chunks follow one another without a gap.
pub(super) struct Stream {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    /// Bytes that may wait. What the last turn has read comes on top: at most what the journal's buffers hold.
    limit: usize,
    /// Looks for what the server does not know.
    foreign: Option<Foreign>,
    /// What ends the stream.
    unfit: Option<Unfit>,
}

/// The result of a write.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrote {
    pub(super) bytes: usize,
    /// Offset of the last of them.
    pub(super) last: u64,
}

impl Stream {
    /// `known`: what the server knows, if anything else must not reach it.
    pub(super) fn new(limit: usize, known: Option<Arc<Known>>) -> Stream {
        let foreign = known.map(|known| Foreign::new(0, known));
        Stream { chunks: VecDeque::new(), bytes: 0, limit, foreign, unfit: None }
    }

    /// What the server does not know, once all before it has been written.
    pub(super) fn unfit(&self) -> Option<&Unfit> {
        self.unfit.as_ref().filter(|_| self.chunks.is_empty())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Whether reading must pause.
    pub(super) fn is_full(&self) -> bool {
        self.bytes >= self.limit || self.unfit.is_some()
    }

    /// Offset of the first byte that waits.
    pub(super) fn first(&self) -> Option<u64> {
        self.chunks.front().map(|chunk| chunk.offset)
    }

    pub(super) fn push(&mut self, mut chunk: Chunk) {
        if self.unfit.is_some() {
            return;
        }
        if let Some(foreign) = &mut self.foreign {
            if foreign.position() != chunk.offset {
                foreign.go_to(chunk.offset);
            }
            self.unfit = foreign.feed(&chunk.bytes).err();
            if let Some(unfit) = &self.unfit {
                chunk.bytes.truncate(unfit.border().saturating_sub(chunk.offset) as usize);
            }
            if chunk.bytes.is_empty() {
                return;
            }
        }
        self.bytes += chunk.bytes.len();
        self.chunks.push_back(chunk);
    }

    pub(super) fn clear(&mut self) {
        self.chunks.clear();
        (self.bytes, self.unfit) = (0, None);
    }

    /// Hands the first chunk to `write`, which returns how much the socket took. `None` if nothing waits, or if there
    /// is no room.
    pub(super) fn write(
        &mut self,
        write: impl FnOnce(&[u8]) -> io::Result<Option<usize>>,
    ) -> io::Result<Option<Wrote>> {
        let Some(chunk) = self.chunks.front_mut() else { return Ok(None) };
        let Some(bytes) = write(&chunk.bytes)? else { return Ok(None) };
        self.bytes -= bytes;
        let last = (chunk.offset + bytes as u64).saturating_sub(1);
        if bytes == chunk.bytes.len() {
            self.chunks.pop_front();
        } else {
            chunk.bytes.drain(..bytes);
            chunk.offset += bytes as u64;
        }
        Ok(Some(Wrote { bytes, last }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_small_journal_is_polled_more_often_before_the_snapshot_is_here() {
        let millis = |bytes: u64| pace_before(bytes).as_millis();
        let paces = [4 << 20, 64 << 20, 256 << 20, 1 << 30].map(millis);
        assert_eq!(paces, [2, 16, 67, 200]);
    }

    fn stream() -> Stream {
        let mut stream = Stream::new(8, None);
        stream.push(Chunk { offset: 101, bytes: b"hello".to_vec() });
        stream.push(Chunk { offset: 106, bytes: b"world".to_vec() });
        stream
    }

    #[test]
    fn a_write_of_a_part_leaves_the_rest_at_its_offset() {
        let (mut stream, mut out) = (stream(), Vec::new());
        let mut take = |stream: &mut Stream, most: usize| {
            stream.write(|bytes| {
                let n = bytes.len().min(most);
                out.extend_from_slice(&bytes[..n]);
                Ok(Some(n))
            })
        };
        assert_eq!(take(&mut stream, 2).unwrap(), Some(Wrote { bytes: 2, last: 102 }));
        assert_eq!(stream.first(), Some(103));
        assert_eq!(take(&mut stream, 99).unwrap(), Some(Wrote { bytes: 3, last: 105 }));
        assert_eq!(take(&mut stream, 99).unwrap(), Some(Wrote { bytes: 5, last: 110 }));
        assert_eq!(take(&mut stream, 99).unwrap(), None);
        assert!(stream.is_empty());
        assert_eq!(out, b"helloworld");
    }

    #[test]
    fn without_room_nothing_is_lost() {
        let mut stream = stream();
        assert_eq!(stream.write(|_| Ok(None)).unwrap(), None);
        assert!(stream.write(|_| Err(io::ErrorKind::BrokenPipe.into())).is_err());
        assert_eq!(stream.first(), Some(101));
        assert!(stream.is_full());
    }

    #[test]
    fn what_was_written_makes_room_for_more() {
        let mut stream = stream();
        assert!(stream.is_full());
        stream.write(|bytes| Ok(Some(bytes.len()))).unwrap();
        assert!(!stream.is_full());
        stream.clear();
        assert!(stream.is_empty() && stream.first().is_none() && !stream.is_full());
    }
}
