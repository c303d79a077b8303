//! Follower: the files of a volume on a host that only reads. It reads one copy, one-sided, and costs the writer
//! nothing.
//!
//! ```text
//!   read:  names ──▶ blocks ──▶ is one newer than the names? ── no ──▶ done
//!            ▲                          │ yes
//!            ╰── has it changed? ◀── look: the log, and then the head
//! ```
//!
//! A copy is a prefix of what the writer says, at every moment, and each block comes with the write that it is of. A
//! *look* reads the log to its end. It notes before which write had been applied; the names then have every change up
//! to that write, as the copy had all of the log up to there. The head is read after the log: if it still names that
//! area, the area was not used again before the log was read.
//!
//! Bytes are read by the places that the names tell. If no block is newer than the names, all of them are the file's:
//! what gives a cluster to another file is written before the other file's data, or together with it. Nothing else is
//! read then. Otherwise a look follows that begins after the blocks were read, and if it finds that the file has other
//! places now, its bytes are read once more. One look serves all reads that have got their blocks before it began.
//!
//! Threads read side by side. The names are locked while they are asked or changed, and not while anything is fetched.
//!
//! A file that was removed is read for as long as no other file has a cluster of it, if its blocks are no newer than a
//! moment at which it was there: long writes reach their blocks before the names tell whose they are.
//!
//! What is seen may be not acknowledged yet. If its writer dies, the next one may undo it. Then the history of the copy
//! is another one, and all names are read again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use remora_volume::reader::{Blocks, BlocksError, Seen};
use remora_volume::rules::{Generation, Version};
use remora_volume::shape::BLOCK_BYTES;

use crate::FilesError;
#[cfg(test)]
use crate::Mutant;
use crate::disk::{Piece, blocks_of, clusters_of, pieces};
use crate::names::layout::{Geometry, Head};
use crate::names::log::Malformed;
use crate::names::{self, Attr, Listed, NamesError, Run, Usage, View};

/// The files of a volume, as one copy has them.
pub struct Follower {
    blocks: Box<dyn Blocks>,
    names: RwLock<Names>,
    /// Held during a look.
    looks: Mutex<Looks>,
    /// How many looks were begun.
    begun: AtomicU64,
    /// The last write that was seen to be applied.
    applied: AtomicU64,
    began: Instant,
}

/// Names that were read.
struct Names {
    view: View,
    history: Generation,
    /// The view has every change up to this write.
    through: Version,
}

#[derive(Default)]
struct Looks {
    /// The number of the last one that has succeeded.
    done: u64,
}

/// Why a look at the log ended early.
enum Stop {
    /// The names must be read from the beginning.
    Anew,
    Error(FilesError),
}

impl From<BlocksError> for Stop {
    fn from(error: BlocksError) -> Stop {
        Stop::Error(FilesError::Blocks(error.to_string()))
    }
}

/// Where a file was when its bytes were read.
struct Place {
    size: u64,
    runs: Vec<Run>,
    geometry: Geometry,
    history: Generation,
    /// Of a file that was removed: a moment at which it was there.
    through: Version,
    is_removed: bool,
}

impl Place {
    /// Whether bytes that were read by this place are the file's if it is there now. A file that has become longer
    /// still has these blocks.
    fn is_still(&self, now: &Place) -> bool {
        !now.is_removed && now.runs == self.runs && now.size >= self.size && now.history == self.history
    }
}

impl Follower {
    /// Reads all names.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn open(blocks: Box<dyn Blocks>) -> Result<Follower, FilesError> {
        let applied = AtomicU64::new(Version::NONE.word());
        let names = RwLock::new(load(&*blocks, &applied)?);
        let (looks, begun) = (Mutex::default(), AtomicU64::new(0));
        Ok(Follower { blocks, names, looks, begun, applied, began: Instant::now() })
    }

    /// Reads what has changed. Returns whether anything has.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn poll(&self) -> Result<bool, FilesError> {
        self.look(&mut self.looks())
    }

    fn looks(&self) -> MutexGuard<'_, Looks> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A look that has begun after this call did, perhaps by another thread.
    fn look_after(&self) -> Result<(), FilesError> {
        let begun = self.begun.load(Ordering::Acquire);
        let mut looks = self.looks();
        if looks.done > begun { Ok(()) } else { self.look(&mut looks).map(drop) }
    }

    fn look(&self, looks: &mut Looks) -> Result<bool, FilesError> {
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let mut names = write(&self.names);
        let moment = names.through.word();
        names.view.tick(self.began.elapsed().as_millis() as u64, moment); // five hundred million years fit
        drop(names);
        let looked = match follow(&*self.blocks, &self.names, &self.applied) {
            Ok(has_changed) => Ok(has_changed),
            Err(Stop::Error(error)) => Err(error),
            // Until all names are read, those of before are shown.
            Err(Stop::Anew) => load(&*self.blocks, &self.applied).map(|names| {
                *write(&self.names) = names;
                true
            }),
        };
        if looked.is_ok() {
            looks.done = number;
        }
        looked
    }

    /// What an entry of a directory stands for.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, FilesError> {
        Ok(self.names().view.lookup(parent, name)?)
    }

    /// What is known of an inode.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn getattr(&self, ino: u64) -> Result<Attr, FilesError> {
        Ok(self.names().view.attr(ino)?)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn readlink(&self, ino: u64) -> Result<Vec<u8>, FilesError> {
        Ok(self.names().view.target(ino)?.to_vec())
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn getxattr(&self, ino: u64, name: &[u8]) -> Result<Vec<u8>, FilesError> {
        Ok(self.names().view.xattr(ino, name)?.to_vec())
    }

    /// The names of all extended attributes, as [`crate::Files::listxattr`] has them.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn listxattr(&self, ino: u64, with_trusted: bool) -> Result<Vec<u8>, FilesError> {
        Ok(names::list_of(self.names().view.xattrs(ino)?, with_trusted))
    }

    /// Entries of a directory behind the position `after`, until `each` says `false`.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn readdir(&self, ino: u64, after: u64, each: impl FnMut(Listed<'_>) -> bool) -> Result<(), FilesError> {
        Ok(self.names().view.list(ino, after, each)?)
    }

    /// How much of the volume is used.
    pub fn statfs(&self) -> Usage {
        self.names().view.usage()
    }

    fn names(&self) -> RwLockReadGuard<'_, Names> {
        read(&self.names)
    }

    /// Reads bytes; less at the end of the file. They are of the file as it was at the last look, or later.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn read(&self, ino: u64, offset: u64, length: u32) -> Result<Vec<u8>, FilesError> {
        let asked = offset..offset.saturating_add(length.into());
        for _ in 0..TRIES {
            let before = self.place_of(ino, &asked)?;
            let range = asked.start.min(before.size)..asked.end.min(before.size);
            let blocks = blocks_of(&range);
            let mut data = vec![0; ((blocks.end - blocks.start) as usize) * BLOCK_BYTES];
            let (mut is_of_one_history, mut newest) = (true, Version::NONE);
            for Piece { first, count, at } in pieces(before.geometry, &before.runs, blocks.clone()) {
                let start = (first - blocks.start) as usize * BLOCK_BYTES;
                let Some(at) = at else { continue };
                let into = &mut data[start..start + count as usize * BLOCK_BYTES];
                let seen = again(|| self.blocks.read(at, into), &self.applied)
                    .map_err(|error| FilesError::Blocks(error.to_string()))?;
                is_of_one_history &= seen.history() == before.history;
                newest = newest.max(seen.newest);
            }
            let is_good = is_of_one_history && newest <= before.through || {
                if before.is_removed {
                    return Err(NamesError::Stale(ino).into());
                }
                self.look_after()?;
                before.is_still(&self.place_of(ino, &asked)?) && is_of_one_history
            };
            if is_good {
                let skipped = (range.start % BLOCK_BYTES as u64) as usize;
                data.truncate(skipped + (range.end - range.start) as usize);
                data.drain(..skipped.min(data.len()));
                return Ok(data);
            }
        }
        Err(FilesError::Blocks(format!("inode {ino} was changed each of the {TRIES} times that it was read")))
    }

    fn place_of(&self, ino: u64, bytes: &std::ops::Range<u64>) -> Result<Place, NamesError> {
        let Names { view, history, through } = &*self.names();
        let (size, runs) = view.file(ino, clusters_of(&blocks_of(bytes)))?;
        let removed = view.removed_after(ino).map(|moment| Version::from_word(moment).unwrap_or(Version::NONE));
        #[cfg(test)]
        let removed = removed.map(|moment| if Mutant::RemovedIsThere.is_active() { *through } else { moment });
        let (through, is_removed) = (removed.unwrap_or(*through), removed.is_some());
        Ok(Place { size, runs, geometry: view.head().geometry, history: *history, through, is_removed })
    }
}

fn read(names: &RwLock<Names>) -> RwLockReadGuard<'_, Names> {
    names.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(names: &RwLock<Names>) -> RwLockWriteGuard<'_, Names> {
    names.write().unwrap_or_else(PoisonError::into_inner)
}

/// Reads all names, from the beginning.
fn load(blocks: &dyn Blocks, applied: &AtomicU64) -> Result<Names, FilesError> {
    for _ in 0..TRIES {
        let loaded = read_head(blocks, applied).and_then(|(head, history)| {
            let names = RwLock::new(Names { view: View::new(head).keeping_removed(), history, through: Version::NONE });
            follow(blocks, &names, applied)?;
            Ok(names.into_inner().unwrap_or_else(PoisonError::into_inner))
        });
        match loaded {
            Ok(names) if names.view.is_complete() => return Ok(names),
            Ok(_) | Err(Stop::Anew) => std::thread::sleep(PAUSE),
            Err(Stop::Error(error)) => return Err(error),
        }
    }
    Err(FilesError::Damaged(NEVER_STILL))
}

/// Reads up to the end of the log, and goes on behind images that were made meanwhile. Returns whether there was
/// anything. One thread at a time.
fn follow(blocks: &dyn Blocks, names: &RwLock<Names>, applied: &AtomicU64) -> Result<bool, Stop> {
    // What is applied now: everything up to there is in the log that is read after this.
    read_head(blocks, applied)?;
    let through = Version::from_word(applied.load(Ordering::Acquire)).unwrap_or(Version::NONE);
    let mut has_changed = false;
    for _ in 0..TRIES {
        has_changed |= catch_up(blocks, names, applied)?;
        // After the log: see the module's text.
        let (head, history) = read_head(blocks, applied)?;
        let mut names = write(names);
        if history != names.history || head.geometry != names.view.head().geometry {
            return Err(Stop::Anew);
        }
        if head.lap == names.view.head().lap {
            names.through = names.through.max(through);
            return Ok(has_changed);
        }
        // The log that was followed is at its end, unless its area is used for the next image already.
        if !names.view.is_followed_by(&head) {
            return Err(Stop::Anew);
        }
        names.view.go_on(head);
    }
    Err(Stop::Anew)
}

/// Reads up to the end of the log in one area. Returns whether there was anything.
fn catch_up(blocks: &dyn Blocks, names: &RwLock<Names>, applied: &AtomicU64) -> Result<bool, Stop> {
    let (before, history) = {
        let mut names = write(names);
        names.view.look_again();
        (names.view.position(), names.history)
    };
    let (mut tries, mut count) = (0, FIRST_BLOCKS);
    loop {
        let (first, most) = read(names).view.wants();
        let mut found = vec![0; most.min(count) as usize * BLOCK_BYTES];
        if !found.is_empty() && again(|| blocks.read(first, &mut found), applied)?.history() != history {
            return Err(Stop::Anew);
        }
        let mut names = write(names);
        match names.view.push(&found) {
            Ok(false) => return Ok(names.view.position() != before),
            Ok(true) if found.is_empty() => return Err(Stop::Anew),
            Ok(true) => count = MORE_BLOCKS,
            // A frame of several blocks was read while it was written, or the area is used anew.
            Err(_) if tries < TRIES_OF_A_FRAME => {
                tries += 1;
                names.view.look_again();
                drop(names);
                std::thread::sleep(PAUSE);
            }
            Err(_) => return Err(Stop::Anew),
        }
    }
}

/// The head, and the history to which it belongs.
fn read_head(blocks: &dyn Blocks, applied: &AtomicU64) -> Result<(Head, Generation), Stop> {
    let mut block = vec![0; BLOCK_BYTES];
    let seen = again(|| blocks.read(0, &mut block), applied)?;
    match Head::parse(&block) {
        Ok(head) => Ok((head, seen.history())),
        Err(error) => Err(Stop::Error(error.into())),
    }
}

/// Reads again what was being written, and notes what is applied.
fn again(mut read: impl FnMut() -> Result<Seen, BlocksError>, applied: &AtomicU64) -> Result<Seen, BlocksError> {
    let mut tries = 0;
    loop {
        match read() {
            Err(BlocksError::Again(_)) if tries < TRIES => {
                tries += 1;
                std::thread::sleep(PAUSE);
            }
            result => {
                return result.inspect(|seen| _ = applied.fetch_max(seen.applied.word(), Ordering::AcqRel));
            }
        }
    }
}

const NEVER_STILL: Malformed = Malformed("the log: it was being changed each time that it was read, or it");

/// How often something is read that was changed meanwhile.
const TRIES: u32 = 100;

/// How often a frame is read that is not one. A write takes less than a millisecond.
const TRIES_OF_A_FRAME: u32 = 8;

/// Between two of these.
const PAUSE: Duration = Duration::from_millis(2);

/// Blocks of the log that are read at first: usually less was written since the last look.
const FIRST_BLOCKS: u64 = 4;

/// Blocks of the log that are read after that.
const MORE_BLOCKS: u64 = 256;
