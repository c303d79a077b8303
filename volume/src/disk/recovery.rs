//! Recovery: a new store, and the copy that a store has.
//!
//! ```text
//!   sync everything ─▶ superblock ─▶ extents into memory ─▶ records, in order, up to the first bytes that are not one
//!     ─▶ what is behind it is cleared ─▶ a new segment says how the copy stands ─▶ superblock
//! ```
//!
//! The sync comes first: an error that no earlier process was told is told to this one, before it reads from the page
//! cache what is not durable.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::checkpoint::{self, Batch};
use super::files::{Failure, Files, Name};
use super::journal::{Journal, write_superblock};
use super::record::{
    CHANGE_BYTES, HEAD_BYTES, Head, LAYOUT_VERSION, MAX_HEAD_BYTES, MAX_RECORD_BYTES, SLOT_BYTES, Superblock, UNIT,
};
use crate::layout::Layout;
use crate::message::{Standing, State};
use crate::shape::{BLOCK_BYTES, Shape};
use crate::store::Store;

/// A copy that was found.
#[derive(Debug)]
pub(crate) struct Found<F> {
    pub(crate) journal: Journal<F>,
    /// How it stands. If blocks of it are missing, it is behind.
    pub(crate) standing: Standing,
    /// The power was cut, and may have taken events that were not synced.
    pub(crate) is_cut: bool,
    /// What was wrong, for the log.
    pub(crate) lacks: Option<String>,
    /// The last event that was found.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(crate) last: u64,
}

/// Makes a store of a copy that stands like this, with no block written.
///
/// # Errors
/// [`Failure`].
pub(crate) fn create<F: Files>(
    files: Arc<F>,
    shape: Shape,
    length: u64,
    (store, boot): (u64, [u8; 16]),
    standing: Standing,
) -> Result<Journal<F>, Failure> {
    make_extents(&*files, shape)?;
    complete(files, shape, length, (store, boot), standing, (1, 0, None))
}

/// Makes the extents of a new store, with no block written.
///
/// # Errors
/// [`Failure`].
pub(super) fn make_extents(files: &impl Files, shape: Shape) -> Result<(), Failure> {
    let length = checkpoint::length(Layout::of(shape));
    files.create(Name::Extents, length).map_err(|error| Failure::of(files, Name::Extents, &error))
}

/// Makes a store of a copy that stands like this, out of its extents. The journal begins with this segment.
///
/// # Errors
/// [`Failure`].
pub(super) fn complete<F: Files>(
    files: Arc<F>,
    shape: Shape,
    length: u64,
    (store, boot): (u64, [u8; 16]),
    standing: Standing,
    (base, scrubbed, former): (u64, u64, Option<u64>),
) -> Result<Journal<F>, Failure> {
    let failed = |name| {
        let files = Arc::clone(&files);
        move |error| Failure::of(&*files, name, &error)
    };
    files.create(Name::Superblock, 2 * SLOT_BYTES as u64).map_err(failed(Name::Superblock))?;
    let (is_clean, is_lost) = (false, false);
    let superblock =
        Superblock { counter: 1, store, shape, base, synced: 0, boot, is_clean, is_lost, scrubbed, former };
    let journal = Journal::begin(Arc::clone(&files), superblock, length, base, (0, 1), standing, BTreeSet::new())?;
    files.sync(Name::Extents).map_err(failed(Name::Extents))?;
    // Last: before it there is no store.
    write_superblock(&*files, superblock)?;
    files.sync_folder().map_err(failed(Name::Superblock))?;
    Ok(journal)
}

/// Of which volume a store is.
///
/// # Errors
/// It cannot be read, or has no superblock.
pub(crate) fn superblock(files: &impl Files) -> Result<Superblock, Failure> {
    let mut bytes = vec![0; 2 * SLOT_BYTES];
    let read = files.read(Name::Superblock, 0, &mut bytes);
    let has = read.map_err(|error| Failure::of(files, Name::Superblock, &error))?;
    let bytes = &bytes[..has];
    Superblock::newest(bytes).ok_or_else(|| {
        let why = Superblock::other_layout(bytes).map_or("it is damaged".to_owned(), |layout| {
            format!(
                "it has layout {layout}, and this release reads {LAYOUT_VERSION}: serve it with the release that wrote it; a \
                 writer that takes this server back replaces it"
            )
        });
        Failure::damaged(files, Name::Superblock, &why)
    })
}

/// Finds the copy again, and goes on with its journal. `memory` gets its blocks.
///
/// # Errors
/// Nothing of it can be believed.
pub(crate) fn recover<F: Files>(
    files: Arc<F>,
    boot: [u8; 16],
    length: u64,
    memory: &Store,
) -> Result<Found<F>, Failure> {
    let segments = files.segments().map_err(|error| Failure::of(&*files, Name::Segment(0), &error))?;
    for name in [Name::Superblock, Name::Extents].into_iter().chain(segments.iter().copied().map(Name::Segment)) {
        files.sync(name).map_err(|error| Failure::of_sync(&*files, name, &error))?;
    }
    files.sync_folder().map_err(|error| Failure::of_sync(&*files, Name::Superblock, &error))?;
    let superblock = superblock(&*files)?;
    if superblock.is_lost {
        return Err(Failure::damaged(&*files, Name::Superblock, "a write or a sync has failed earlier"));
    }
    checkpoint::load(&*files, memory);
    let end = replay(&*files, superblock, memory)?;
    let Some(standing) = end.standing else {
        return Err(Failure::damaged(&*files, Name::Segment(superblock.base), "its first record is damaged"));
    };
    let known = end.known_synced.max(superblock.synced);
    #[cfg(test)]
    let known = if crate::mutant::Mutant::RotIsTheEnd.is_active() { 0 } else { known };
    let is_same_system = !superblock.is_clean && superblock.boot == boot;
    let is_torn = !is_same_system
        || is_beginning(&*files, end.segment, end.at, end.last)?
            && is_beginning(&*files, end.segment + 1, 0, end.last)?;
    #[cfg(test)]
    let is_torn = is_torn || crate::mutant::Mutant::RotIsTorn.is_active();
    if known > end.last || !is_torn {
        // What the copy has promised and claimed may be among them, so it is not one that is behind. The files stay as
        // they are, and the next recovery says the same.
        let (first, last) = (end.last + 1, known.max(end.last + 1));
        let why =
            format!("events {first} to {last} were written, and are not readable any more: its bytes have changed");
        return Err(Failure::damaged(&*files, Name::Segment(end.segment), &why));
    }
    let missing = (0..memory.layout().blocks()).filter(|&block| memory.entry(block).is_none()).count();
    let lacks = (missing > 0).then(|| format!("{missing} blocks do not have their checksums"));
    let is_cut = !superblock.is_clean && superblock.boot != boot;
    let standing = Standing {
        state: if lacks.is_some() { State::Behind } else { standing.state },
        is_cut: standing.is_cut || is_cut,
        ..standing
    };
    cut_off(&*files, &segments, superblock.base, &end)?;
    let sequences = (end.last, end.last + 1);
    let mut journal =
        Journal::begin(Arc::clone(&files), superblock, length, end.segment + 1, sequences, standing, end.dirty)?;
    // Both slots: if one rots, the other must not say that the server had ended in peace.
    for _ in 0..2 {
        let superblock = journal.next_superblock(|superblock| (superblock.boot, superblock.is_clean) = (boot, false));
        write_superblock(&*files, superblock)?;
    }
    Ok(Found { journal, standing, is_cut, lacks, last: end.last })
}

/// Where the journal ends.
struct End {
    standing: Option<Standing>,
    last: u64,
    segment: u64,
    at: u64,
    /// Blocks that are newer than in the extents.
    dirty: BTreeSet<u64>,
    /// What readable records behind the end say was synced.
    known_synced: u64,
}

/// Brings what the journal holds into memory.
fn replay(files: &impl Files, superblock: Superblock, memory: &Store) -> Result<End, Failure> {
    let base = superblock.base;
    let mut end = End { standing: None, last: 0, segment: base, at: 0, dirty: BTreeSet::new(), known_synced: 0 };
    let (mut segment, mut at) = (base, 0);
    loop {
        match record(files, superblock.store, segment, at)? {
            Some((head, blocks)) if end.standing.is_none() || head.previous == end.last => {
                let Some(changes) = head.with_blocks(&blocks) else { break };
                if !changes.iter().all(|&(block, ..)| memory.layout().has(block, 1)) {
                    break;
                }
                for (block, entry, bytes) in changes {
                    memory.put(block, entry, bytes);
                    end.dirty.insert(block);
                }
                at += head.record_bytes() as u64;
                (end.standing, end.last, end.segment, end.at) = (Some(head.standing), head.sequence, segment, at);
            }
            // The next record may not have fitted.
            None if at > 0 => (segment, at) = (segment + 1, 0),
            _ => break,
        }
    }
    // Records behind the end, whose blocks may be missing.
    let mut from = end.at;
    for segment in end.segment.. {
        let Some(known) = known_synced(files, superblock.store, segment, from)? else { break };
        end.known_synced = end.known_synced.max(known);
        from = 0;
    }
    Ok(end)
}

/// The record at this place, with its blocks; `None` if there is none.
fn record(files: &impl Files, store: u64, segment: u64, at: u64) -> Result<Option<(Head, Vec<u8>)>, Failure> {
    let name = Name::Segment(segment);
    let read = |at, bytes: usize| {
        let mut into = vec![0; bytes];
        let has = files.read(name, at, &mut into).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(0),
            _ => Err(Failure::of(files, name, &error)),
        })?;
        into.truncate(has);
        Ok(into)
    };
    let Some((head, record)) = Head::lengths(&read(at, UNIT)?) else { return Ok(None) };
    let bytes = read(at, record)?;
    let parsed = Head::parse(&bytes).filter(|head| (head.store, head.segment) == (store, segment));
    Ok(parsed.filter(|_| bytes.len() == record).map(|parsed| (parsed, bytes[head..].to_vec())))
}

/// The highest event that a record of a segment, from an offset on, says was synced. `None`: there is no such segment.
fn known_synced(files: &impl Files, store: u64, segment: u64, from: u64) -> Result<Option<u64>, Failure> {
    let name = Name::Segment(segment);
    let (mut known, mut at) = (0, from);
    let mut window = vec![0; SCAN_BYTES + MAX_HEAD_BYTES];
    loop {
        let has = match files.read(name, at, &mut window) {
            Ok(has) => has,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::of(files, name, &error)),
        };
        let step = has.min(SCAN_BYTES);
        for start in (0..step).step_by(UNIT) {
            let head = Head::parse(&window[start..has]);
            if let Some(head) = head.filter(|head| (head.store, head.segment) == (store, segment)) {
                known = known.max(head.synced);
            }
        }
        if has <= SCAN_BYTES {
            return Ok(Some(known));
        }
        at += SCAN_BYTES as u64;
    }
}

/// Clears what is behind the end, so that no later recovery takes it for a part of the journal, and removes segments
/// that are not needed.
fn cut_off(files: &impl Files, segments: &[u64], base: u64, end: &End) -> Result<(), Failure> {
    let name = Name::Segment(end.segment);
    #[cfg(test)]
    if crate::mutant::Mutant::TailNotCleared.is_active() {
        return Ok(());
    }
    files.clear(name, end.at).map_err(|error| Failure::of_sync(files, name, &error))?;
    for &segment in segments.iter().filter(|&&segment| segment < base || segment > end.segment) {
        let name = Name::Segment(segment);
        files.remove(name).map_err(|error| Failure::of_sync(files, name, &error))?;
    }
    files.sync(name).map_err(|error| Failure::of_sync(files, name, &error))?;
    files.sync_folder().map_err(|error| Failure::of_sync(files, name, &error))
}

/// What is searched for records at once.
const SCAN_BYTES: usize = 1 << 20;

// Judges what is behind the end of a journal if its process has ended, and its system runs on.
//
// The page cache then has all that the process has written. A write that its end has interrupted left a beginning of
// a record: whole sectors, and zeros behind them. Anything else was a whole record, whose bytes have changed since.

/// Whether at this place is nothing, or what an interrupted write behind event `last` can have left.
pub(super) fn is_beginning(files: &impl Files, segment: u64, at: u64, last: u64) -> Result<bool, Failure> {
    let mut bytes = vec![0; MAX_RECORD_BYTES];
    match files.read(Name::Segment(segment), at, &mut bytes) {
        Ok(has) => bytes.truncate(has),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(Failure::of(files, Name::Segment(segment), &error)),
    }
    Ok(can_be_torn(&bytes, last))
}

fn can_be_torn(bytes: &[u8], last: u64) -> bool {
    let Some(end) = bytes.iter().rposition(|&byte| byte != 0) else { return true };
    // At least this many bytes were written.
    let written = (end + 1).next_multiple_of(UNIT);
    // The lengths are in the first sector.
    let Some((head_bytes, record_bytes)) = Head::lengths(bytes) else { return false };
    let Some(head) = Head::parse(bytes) else {
        // Fewer changes than it says, and zeros behind them: it is the number that has changed.
        let is_missing = |change: &[u8]| change.iter().all(|&byte| byte == 0);
        let has = bytes.get(HEAD_BYTES..written).unwrap_or_default();
        return written < head_bytes && !has.chunks_exact(CHANGE_BYTES).skip(1).any(is_missing);
    };
    let mut blocks = (head_bytes..).step_by(BLOCK_BYTES);
    let mut is_whole = bytes.len() >= record_bytes;
    for (_, entry) in head.changes.iter().filter(|(_, entry)| entry.has_bytes()) {
        let from = blocks.next().unwrap_or(record_bytes);
        let is_right = bytes.get(from..from + BLOCK_BYTES).is_some_and(|block| entry.is_of(block));
        if !is_right && from + BLOCK_BYTES <= written {
            return false;
        }
        is_whole &= is_right;
    }
    // A whole record is a part of the journal, or one before it has gone.
    !is_whole && head.previous == last
}

/// The store of a copy that becomes larger. It is made beside the one that counts, and takes its place at once.
///
/// ```text
///   extents with every block ─▶ journal, superblock, everything synced ─▶ the two folders change their names
/// ```
///
/// Where blocks are in the extents depends on their number, so those of the smaller copy cannot be used.
#[derive(Debug)]
pub(crate) struct Growth<F> {
    files: Arc<F>,
    shape: Shape,
}

impl<F: Files> Growth<F> {
    /// In an empty folder.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn begin(files: F, shape: Shape) -> Result<Growth<F>, Failure> {
        make_extents(&files, shape)?;
        Ok(Growth { files: Arc::new(files), shape })
    }

    /// The volume as it is to be.
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Its files.
    pub(crate) fn files(&self) -> &Arc<F> {
        &self.files
    }

    /// Writes these blocks, which ascend.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn write(&self, batch: &Batch) -> Result<(), Failure> {
        checkpoint::write(&*self.files, Layout::of(self.shape), batch)
    }

    /// Every block was written, the copy stands like this, and has had the `former` size. Its segments have numbers
    /// that the earlier store's never had, so that a checkpoint of that one that is under way removes none of them.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn complete(
        &self,
        (number, boot): (u64, [u8; 16]),
        earlier: &Journal<F>,
        standing: Standing,
        former: Option<u64>,
    ) -> Result<Journal<F>, Failure> {
        let length = Journal::<F>::segment_bytes(Layout::of(self.shape));
        let begins = (earlier.segment() + 1, earlier.scrubbed(), former);
        complete(Arc::clone(&self.files), self.shape, length, (number, boot), standing, begins)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_fabric::memory::crc::crc32c;
    use remora_lab::Random;

    use super::*;
    use crate::layout::Entry;
    use crate::message::Standing;
    use crate::version::Generation;

    /// A record behind event 4, of some blocks, and zeros behind it.
    fn record(blocks: usize, zeros: usize) -> (Vec<u8>, usize) {
        let version = Generation::NONE.next().unwrap().start();
        let mut random = Random::new(7);
        let content: Vec<Vec<u8>> = (0..blocks).map(|_| random.bytes(BLOCK_BYTES)).collect();
        let entries = content.iter().map(|bytes| Entry::of(version, crc32c(bytes)));
        let zeros = (0..zeros).map(|_| Entry::zeros(version));
        let changes: Vec<_> = (0..).zip(entries.chain(zeros)).collect();
        let standing = Standing { applied: version, ..Standing::default() };
        let head = Head { store: 1, segment: 2, sequence: 5, previous: 4, synced: 3, standing, changes };
        let mut bytes = head.encode();
        bytes.extend(content.concat());
        let length = bytes.len();
        bytes.resize(length + 16 * UNIT, 0);
        (bytes, length)
    }

    #[test]
    fn every_beginning_of_whole_sectors_can_be_torn_and_a_whole_record_cannot() {
        assert!(can_be_torn(&[], 4) && can_be_torn(&[0; 9000], 4));
        for (blocks, zeros) in [(0, 0), (1, 0), (3, 2), (0, 100), (2, 60)] {
            let (whole, length) = record(blocks, zeros);
            assert!(!can_be_torn(&whole, 4), "it was there, and is not a part of the journal");
            for written in (0..length).step_by(UNIT) {
                let mut torn = whole.clone();
                torn[written..].fill(0);
                assert!(can_be_torn(&torn, 4), "{written} of {length}");
                assert!(written < 1024 + zeros * 24 || !can_be_torn(&torn, 3), "it follows another event");
            }
        }
    }

    #[test]
    fn a_record_with_a_changed_byte_is_not_taken_for_a_beginning() {
        for (blocks, zeros) in [(0, 0), (1, 0), (3, 2), (0, 100)] {
            let (whole, length) = record(blocks, zeros);
            for at in (0..length).filter(|at| *at < 1024 || at % 61 == 0) {
                let mut changed = whole.clone();
                changed[at] ^= 0x10;
                assert!(!can_be_torn(&changed, 4), "byte {at} of {length}");
            }
        }
    }
}
