//! Recovery: a new store, and the copy that a store has.
//!
//! ```text
//!   sync everything ─▶ superblock ─▶ extents into memory ─▶ records, in order, up to the first bytes that are not one
//!     ─▶ what is behind it is cleared ─▶ a new segment says how the copy stands ─▶ superblock
//! ```
//!
//! The sync comes first: an error that no earlier process was told is told to this one, before it reads from the page
//! cache what is not durable.
//!
//! The blocks of a copy in a file: the checkpoint that moves them there from the journal, and the scrub that
//! reads them all.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags, flock, renameat_with};

use super::journal::{
    CHANGE_BYTES, Due, HEAD_BYTES, Head, Journal, LAYOUT_VERSION, MAX_HEAD_BYTES, MAX_RECORD_BYTES, SLOT_BYTES,
    Superblock, UNIT, write_superblock,
};
use super::{Failure, Files, Folder, Name};
use crate::layout::{ENTRY_BYTES, Entry, Layout, Store};
use crate::rules::{Standing, State};
use crate::shape::{BLOCK_BYTES, Shape, VolumeId};

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
fn make_extents(files: &impl Files, shape: Shape) -> Result<(), Failure> {
    let length = length(Layout::of(shape));
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
    load(&*files, memory);
    let end = replay(&*files, superblock, memory)?;
    let Some(standing) = end.standing else {
        return Err(Failure::damaged(&*files, Name::Segment(superblock.base), "its first record is damaged"));
    };
    let known = end.known_synced.max(superblock.synced);
    #[cfg(test)]
    let known = if crate::rules::Mutant::RotIsTheEnd.is_active() { 0 } else { known };
    let is_same_system = !superblock.is_clean && superblock.boot == boot;
    let is_torn = !is_same_system
        || is_beginning(&*files, end.segment, end.at, end.last)?
            && is_beginning(&*files, end.segment + 1, 0, end.last)?;
    #[cfg(test)]
    let is_torn = is_torn || crate::rules::Mutant::RotIsTorn.is_active();
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
    if crate::rules::Mutant::TailNotCleared.is_active() {
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
fn is_beginning(files: &impl Files, segment: u64, at: u64, last: u64) -> Result<bool, Failure> {
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
        write(&*self.files, Layout::of(self.shape), batch)
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

/// Root: the folder of a server's stores: one folder for each copy, and a lock, so that no two servers share them.
#[derive(Debug)]
pub(crate) struct Root {
    path: PathBuf,
    /// Of the system that runs.
    boot: [u8; 16],
    /// Locked until it is dropped.
    _lock: File,
}

impl Root {
    /// Opens the folder, or makes it.
    ///
    /// # Errors
    /// It cannot be used, or another server uses it.
    pub(crate) fn open(path: &Path) -> io::Result<Root> {
        let failed = |what: &str, error: io::Error| {
            io::Error::new(error.kind(), format!("{what} {}: {error}; use another folder for --store", path.display()))
        };
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|error| failed("cannot make the folder", error))?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        let lock = options.open(path.join("lock")).map_err(|error| failed("cannot use the folder", error))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| failed("cannot lock the folder", io::Error::other("another server has its stores there")))?;
        let root = Root { path: path.into(), boot: boot(), _lock: lock };
        root.clear_growths().map_err(|error| failed("cannot use the folder", error))?;
        Ok(root)
    }

    /// Removes what copies have left whose growth was interrupted.
    fn clear_growths(&self) -> io::Result<()> {
        self.sync()?; // the names that are seen are those that stay
        for entry in std::fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            if name.to_str().and_then(|name| name.strip_suffix(GROWTH)).and_then(volume).is_some() {
                std::fs::remove_dir_all(self.path.join(name))?;
            }
        }
        Ok(())
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The system that runs: another one after each boot.
    pub(crate) fn boot(&self) -> [u8; 16] {
        self.boot
    }

    /// The stores that are there.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(crate) fn stores(&self) -> io::Result<Vec<(VolumeId, Folder)>> {
        let mut stores = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let volume = entry.file_name().to_str().and_then(volume);
            if let Some(volume) = volume.filter(|_| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
                stores.push((volume, Folder::at(&entry.path())));
            }
        }
        stores.sort_unstable_by_key(|(volume, _)| *volume);
        Ok(stores)
    }

    /// An empty folder for a copy. What is there, of a copy that was lost, is removed.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub(crate) fn make(&self, volume: VolumeId) -> io::Result<Folder> {
        self.make_at(&self.path.join(volume.to_string()))
    }

    fn make_at(&self, path: &Path) -> io::Result<Folder> {
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(path)?;
        File::open(&self.path)?.sync_all()?;
        Ok(Folder::at(path))
    }

    /// An empty folder for a copy as it will be when it has grown.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub(crate) fn make_growth(&self, volume: VolumeId) -> io::Result<Folder> {
        self.make_at(&self.growth(volume))
    }

    /// The growth takes the place of the copy, which is removed. A power cut leaves one of the two.
    ///
    /// # Errors
    /// The folders keep their names.
    pub(crate) fn exchange(&self, volume: VolumeId, copy: &Folder, growth: &Folder) -> io::Result<()> {
        let (path, beside) = (self.path.join(volume.to_string()), self.growth(volume));
        renameat_with(CWD, &path, CWD, &beside, RenameFlags::EXCHANGE)?;
        copy.moved(beside);
        growth.moved(path);
        Ok(())
    }

    /// Returns when the names of the folders are durable.
    ///
    /// # Errors
    /// It is not known which names are.
    pub(crate) fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    /// Removes the folder of a growth, or of the copy whose place it has taken. One that stays is removed when the root
    /// is opened again.
    pub(crate) fn remove_growth(&self, volume: VolumeId) {
        let path = self.growth(volume);
        if let Err(error) = std::fs::remove_dir_all(&path) {
            let path = path.display();
            tracing::warn!(%path, %error, "a folder that is not needed any more cannot be removed");
        }
    }

    fn growth(&self, volume: VolumeId) -> PathBuf {
        self.path.join(format!("{volume}{GROWTH}"))
    }

    /// Removes the folder of a copy that is forgotten. Returns whether there was one. A folder of this name that has
    /// the store of another volume is left alone.
    ///
    /// # Errors
    /// It cannot be removed. The text names it.
    pub(crate) fn remove_all(&self, volume: VolumeId) -> io::Result<bool> {
        let path = self.path.join(volume.to_string());
        let failed = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let is_other = superblock(&Folder::at(&path)).is_ok_and(|found| found.shape.volume() != volume);
        if is_other {
            return Ok(false);
        }
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            removed => removed.map_err(failed)?,
        }
        File::open(&self.path).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(true)
    }

    /// Removes the folder of a copy that was not made, as far as that is possible.
    pub(crate) fn remove(&self, volume: VolumeId) {
        let _ = std::fs::remove_dir_all(self.path.join(volume.to_string()));
    }
}

/// What the name of a growth's folder ends with.
const GROWTH: &str = ".grown";

/// The volume of a folder's name.
fn volume(name: &str) -> Option<VolumeId> {
    let is_name = name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit() && !byte.is_ascii_uppercase());
    let number = u128::from_str_radix(name, 16).ok().filter(|_| is_name)?;
    Some(VolumeId(number.to_be_bytes()))
}

/// The system that runs. If it does not say, each process counts as another one: after each a tail may be missing.
fn boot() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32);
    number.map(u128::to_be_bytes).unwrap_or_else(|| {
        let mut bytes = [0; 16];
        let _ = getrandom::fill(&mut bytes);
        bytes
    })
}

/// Moves blocks from the journal's segments to the extents, so that the segments can be removed.
///
/// ```text
///   a segment begins ─▶ everything before it is synced, and the superblock says so ─▶ blocks, out of memory, to the
///     extents ─▶ everything so far is synced ─▶ extents synced ─▶ superblock: the segment is the first needed
///     ─▶ older ones removed
/// ```
///
/// A block that was changed since the segment began is left out: it is in a segment that stays. So the extents never
/// hold a block that is newer than what is durable of the journal, and a block that is torn there is in the segments.
#[derive(Debug)]
pub(crate) struct Checkpoint<F> {
    files: Arc<F>,
    layout: Layout,
    /// The first segment that is needed before, and after.
    old: u64,
    base: u64,
    left: BTreeSet<u64>,
    /// What was written, in case the checkpoint is given up.
    done: BTreeSet<u64>,
}

/// Blocks with their entries.
pub(crate) type Batch = Vec<(u64, Entry, Vec<u8>)>;

impl<F: Files> Journal<F> {
    /// Begins a checkpoint, if one is due and can be. This superblock is to be written first.
    pub(crate) fn begin_checkpoint(&mut self) -> Option<(Checkpoint<F>, Superblock)> {
        let (files, layout, old) = (Arc::clone(self.files()), self.shape_layout(), self.base());
        let event = self.due()?.event;
        if !self.is_synced(event) {
            return None;
        }
        let Due { base, blocks, .. } = self.due()?;
        let left = blocks.take()?;
        let checkpoint = Checkpoint { files, layout, old, base: *base, left, done: BTreeSet::new() };
        Some((checkpoint, self.next_superblock(|_| {})))
    }
}

impl<F: Files> Checkpoint<F> {
    /// Says what is synced before the extents have a part of it: if a record of that is not readable any more, the
    /// journal is not taken to end there, with blocks in the extents that are newer. No lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn announce(&self, superblock: Superblock) -> Result<(), Failure> {
        write_superblock(&*self.files, superblock)
    }

    /// The next blocks; empty: that was all. To be called with the copy's lock held.
    pub(crate) fn next(&mut self, journal: &Journal<F>, store: &Store) -> Batch {
        let mut batch = Batch::new();
        while batch.len() < AT_ONCE as usize
            && let Some(block) = self.left.pop_first()
        {
            self.done.insert(block);
            if journal.is_dirty(block) {
                continue;
            }
            let mut bytes = vec![0; BLOCK_BYTES];
            // One that is damaged in memory is left as it is: the copy is behind, and takes it.
            if let Ok(entry) = store.get(block, &mut bytes) {
                batch.push((block, entry, bytes));
            }
        }
        batch
    }

    /// Writes them. It takes its time: no lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn write(&self, batch: &Batch) -> Result<(), Failure> {
        write(&*self.files, self.layout, batch)
    }

    /// Everything was written, and everything that was appended until then is synced. No lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn sync(&self) -> Result<(), Failure> {
        #[cfg(test)]
        if crate::rules::Mutant::ExtentsNotSynced.is_active() {
            return Ok(());
        }
        self.files.sync(Name::Extents).map_err(|error| Failure::of_sync(&*self.files, Name::Extents, &error))
    }

    /// The superblock that makes it count, after [`Checkpoint::sync`].
    pub(crate) fn superblock(&self, journal: &mut Journal<F>) -> Superblock {
        journal.next_superblock(|superblock| superblock.base = self.base)
    }

    /// Writes that, and removes the segments that are not needed any more. No lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn complete(&self, superblock: Superblock) -> Result<(), Failure> {
        write_superblock(&*self.files, superblock)?;
        for segment in self.old..self.base {
            // One that stays is removed by the next recovery.
            let _ = self.files.remove(Name::Segment(segment));
        }
        Ok(())
    }

    /// It is complete. To be called with the copy's lock held.
    pub(crate) fn end(self, journal: &mut Journal<F>) {
        journal.end_checkpoint(BTreeSet::new());
    }

    /// It is given up: the next one moves its blocks, too.
    pub(crate) fn give_up(mut self, journal: &mut Journal<F>) {
        self.done.append(&mut self.left);
        journal.end_checkpoint(self.done);
    }
}

// The blocks of a copy and their entries in a file, as of the last checkpoint.
//
// ```text
// 0                              next multiple of 4096
// │ entries: 16 bytes each       │ blocks: 4096 bytes each │
// ```

/// The offset of a block's entry.
fn entry_at(block: u64) -> u64 {
    block * ENTRY_BYTES as u64
}

/// The offset of a block.
fn block_at(layout: Layout, block: u64) -> u64 {
    entry_at(layout.blocks()).next_multiple_of(BLOCK_BYTES as u64) + block * BLOCK_BYTES as u64
}

/// Bytes of the file.
pub(super) fn length(layout: Layout) -> u64 {
    block_at(layout, layout.blocks())
}

/// Writes these blocks, which ascend, neighbours at once. Of those that are zeros their entries only.
///
/// # Errors
/// [`Failure`].
pub(super) fn write(files: &impl Files, layout: Layout, blocks: &[(u64, Entry, Vec<u8>)]) -> Result<(), Failure> {
    let failed = |error| Failure::of(files, Name::Extents, &error);
    let is_one_run = |(block, entry, _): &(u64, Entry, _), (next, after, _): &(u64, Entry, _)| {
        block + 1 == *next && entry.has_bytes() == after.has_bytes()
    };
    for run in blocks.chunk_by(is_one_run) {
        let Some(&(first, one, _)) = run.first() else { continue };
        let words = run.iter().flat_map(|(_, entry, _)| entry.to_words());
        let entries: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let parts: Vec<&[u8]> = run.iter().map(|(.., bytes)| bytes.as_slice()).collect();
        if one.has_bytes() {
            files.write(Name::Extents, block_at(layout, first), &parts).map_err(failed)?;
        }
        files.write(Name::Extents, entry_at(first), &[&entries]).map_err(failed)?;
    }
    Ok(())
}

/// A block with its entry; no bytes if it is zeros.
pub(super) type Block = (Entry, Vec<u8>);

/// What is in the file for some blocks: `None` for one that has not its checksum.
pub(super) fn read(files: &impl Files, layout: Layout, first: u64, count: u64) -> Result<Vec<Option<Block>>, Failure> {
    let failed = |error| Failure::of(files, Name::Extents, &error);
    let mut entries = vec![0; count as usize * ENTRY_BYTES];
    let has = files.read(Name::Extents, entry_at(first), &mut entries).map_err(failed)?;
    let entries: Vec<_> = entries[..has].chunks_exact(ENTRY_BYTES).map(entry).collect();
    let mut blocks = vec![0; count as usize * BLOCK_BYTES];
    let is_any = entries.iter().any(|entry| entry.is_none_or(Entry::has_bytes));
    let has = match is_any {
        true => files.read(Name::Extents, block_at(layout, first), &mut blocks).map_err(failed)?,
        false => 0,
    };
    let mut found: Vec<_> = Vec::with_capacity(count as usize);
    for number in 0..count as usize {
        let bytes = blocks[..has].chunks_exact(BLOCK_BYTES).nth(number);
        let entry = entries.get(number).copied().flatten();
        #[cfg(test)]
        let entry = entry.map(|entry| match crate::rules::Mutant::ZerosAreJudged.is_active() {
            true => Entry { is_zero: false, ..entry },
            false => entry,
        });
        found.push(match entry {
            Some(entry) if !entry.has_bytes() => Some((entry, Vec::new())),
            Some(entry) => bytes.filter(|bytes| entry.is_of(bytes)).map(|bytes| (entry, bytes.to_vec())),
            None => None,
        });
    }
    Ok(found)
}

fn entry(bytes: &[u8]) -> Option<Entry> {
    bytes.first_chunk().and_then(Entry::from_bytes)
}

/// Brings all blocks into the memory of a copy. Those that cannot be read, or have not their checksum, are marked as
/// missing there.
pub(super) fn load(files: &impl Files, store: &Store) {
    let layout = store.layout();
    let mut first = 0;
    while first < layout.blocks() {
        let count = (layout.blocks() - first).min(AT_ONCE);
        let found = read(files, layout, first, count).unwrap_or_else(|_| {
            // A sector that the device does not give back any more: the others are read.
            let one = |block| read(files, layout, block, 1).ok().and_then(|mut found| found.pop().flatten());
            (first..first + count).map(one).collect()
        });
        for (block, found) in (first..).zip(found) {
            match found {
                Some((entry, bytes)) if entry.is_written() => store.put(block, entry, &bytes),
                Some(_) => {}
                None => store.lack(block),
            }
        }
        first += count;
    }
}

/// Blocks that are read at once: 1 MiB.
pub(super) const AT_ONCE: u64 = 256;

// Reads every block of a copy, in memory and in the extents, so that damage is found while another copy can
// repair it. Beside checkpoints, never during one.

/// What was found in some blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Blocks that have not their checksums in the extents. They are written again, out of memory.
    pub(crate) repaired: Vec<u64>,
    /// Blocks that have not their checksums in memory: the copy lacks them from now on.
    pub(crate) damaged: Vec<u64>,
}

/// Blocks of which the extents must have the last write, out of these: `is_moved` says it of each. To be called with
/// the copy's lock held; the blocks that are damaged in memory are found here.
pub(crate) fn in_memory(
    is_moved: impl Fn(u64) -> bool,
    store: &Store,
    blocks: std::ops::Range<u64>,
    findings: &mut Findings,
) -> Vec<u64> {
    let mut bytes = vec![0; BLOCK_BYTES];
    let mut moved = Vec::new();
    for block in blocks {
        if store.entry(block).is_none() {
            continue; // the copy lacks it already, and is behind
        }
        match store.get(block, &mut bytes) {
            Ok(_) if is_moved(block) => moved.push(block),
            Ok(_) => {}
            Err(_) => findings.damaged.push(block),
        }
    }
    moved
}

/// Those of these blocks that the extents do not have. No lock should be held.
pub(crate) fn in_extents(files: &impl Files, layout: Layout, blocks: &[u64]) -> Vec<u64> {
    let mut bad = Vec::new();
    for run in blocks.chunk_by(|block, next| block + 1 == *next) {
        let Some(&first) = run.first() else { continue };
        match read(files, layout, first, run.len() as u64) {
            Ok(found) => bad.extend(run.iter().zip(found).filter(|(_, found)| found.is_none()).map(|(block, _)| block)),
            // A sector that the device does not give back: the others are read, and each that is not is written again.
            Err(_) => bad.extend(run.iter().filter(|&&block| {
                let one = read(files, layout, block, 1);
                one.ok().and_then(|mut found| found.pop().flatten()).is_none()
            })),
        }
    }
    bad
}

/// Writes blocks into the extents again, which are in memory and durable in no other file. To be called with the copy's
/// lock held: what changed since is left to the next checkpoint.
///
/// # Errors
/// [`Failure`].
pub(crate) fn repair<F: Files>(
    journal: &Journal<F>,
    store: &Store,
    blocks: &[u64],
    findings: &mut Findings,
) -> Result<(), Failure> {
    let mut batch = Vec::new();
    for &block in blocks.iter().filter(|&&block| journal.is_moved(block)) {
        let mut bytes = vec![0; BLOCK_BYTES];
        if let Ok(entry) = store.get(block, &mut bytes) {
            batch.push((block, entry, bytes));
            findings.repaired.push(block);
        }
    }
    if batch.is_empty() {
        return Ok(());
    }
    let files = &**journal.files();
    write(files, store.layout(), &batch)?;
    files.sync(Name::Extents).map_err(|error| Failure::of_sync(files, Name::Extents, &error))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    use remora_fabric::memory::crc::crc32c;
    use remora_lab::Random;

    use super::*;
    use crate::disk::{Failure, Files, Name};
    use crate::layout::Entry;
    use crate::layout::{Store, sums};
    use crate::rules::{Generation, Standing, State};
    use crate::shape::{BLOCK_BYTES, Copies, Shape};

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

    const VOLUME: VolumeId = VolumeId([0xab; 16]);

    /// Fits the longest record.
    const SEGMENT: u64 = 8 << 20;

    #[test]
    fn a_copy_in_a_folder_is_found_again_and_only_its_user_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stores");
        let root = Root::open(&path).unwrap();
        let refused = Root::open(&path).unwrap_err().to_string();
        assert!(refused.contains("another server has its stores there"), "{refused}");

        let shape = Shape::new(VOLUME, 100, Copies::new(3, 2).unwrap()).unwrap();
        let start = Generation::NONE.next().unwrap().start();
        let standing = Standing { state: State::Whole, claim: start, applied: start, ..Standing::default() };
        let files = Arc::new(root.make(VOLUME).unwrap());
        let mut journal = create(Arc::clone(&files), shape, SEGMENT, (7, root.boot()), standing).unwrap();
        let (version, bytes) = (start.next().unwrap(), vec![9; BLOCK_BYTES]);
        let entry = Entry::of(version, sums(&bytes).next().unwrap());
        let standing = Standing { applied: version, claim: version, ..standing };
        journal.append(standing, &[(42, entry)], &[&bytes]).unwrap();
        for name in ["", "superblock", "extents", "journal-1"] {
            let mode = std::fs::metadata(files.folder().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, if name.is_empty() { 0o700 } else { 0o600 }, "{name}");
        }
        drop((journal, files, root));

        let root = Root::open(&path).unwrap();
        let (volume, files) = root.stores().unwrap().pop().unwrap();
        let memory = Store::create(shape).unwrap();
        let found = recover(Arc::new(files), root.boot(), SEGMENT, &memory).unwrap();
        assert_eq!((volume, found.standing, found.is_cut, found.lacks), (VOLUME, standing, false, None));
        let mut read = vec![0; BLOCK_BYTES];
        assert_eq!((memory.get(42, &mut read), read), (Ok(entry), bytes));
    }

    #[test]
    fn a_store_of_an_earlier_layout_is_refused_with_both_layouts_named() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let shape = Shape::new(VOLUME, 100, Copies::new(3, 2).unwrap()).unwrap();
        let files = Arc::new(root.make(VOLUME).unwrap());
        create(Arc::clone(&files), shape, SEGMENT, (7, root.boot()), Standing::default()).unwrap();
        let path = files.folder().join("superblock");
        let mut slots = std::fs::read(&path).unwrap();
        for slot in slots.chunks_mut(4096).filter(|slot| slot[0] != 0) {
            slot[12..16].copy_from_slice(&1_u32.to_le_bytes());
            let check = crc32c(&slot[12..132]);
            slot[8..12].copy_from_slice(&check.to_le_bytes());
        }
        std::fs::write(&path, slots).unwrap();
        let why = superblock(&*files).unwrap_err().to_string();
        assert!(why.contains("it has layout 1, and this release reads 2") && why.contains("superblock"), "{why}");
    }

    #[test]
    fn a_link_in_a_folder_is_not_followed_and_a_file_that_is_missing_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let files = root.make(VOLUME).unwrap();
        let other = folder.path().join("other");
        std::fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, files.folder().join("extents")).unwrap();
        assert!(files.create(Name::Extents, 4096).is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"precious");
        let Err(Failure::Lost { path, .. }) = superblock(&files) else { panic!("there is none") };
        assert!(path.ends_with("superblock"), "{path}");
    }
}
