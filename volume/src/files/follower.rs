//! Follower: the files of a volume on a host that only reads. It reads one copy, one-sided, and costs the writer
//! nothing.
//!
//! A copy is a prefix of what the writer says, at every moment. So after a read of the data, the log of the same copy
//! tells whether the blocks still belonged to the file: what gives a cluster to another file is written before the
//! other file's data. The log is therefore read again after the data, and the data once more if it has changed.
//!
//! What is seen may be not acknowledged yet. If its writer dies, the next one may undo it. Then the history of the copy
//! is another one, and all names are read again.

use std::time::Duration;

use crate::message::State;
use crate::names::layout::Head;
use crate::names::record::Malformed;
use crate::names::{Attr, Listed, NamesError, Run, Usage, View};
use crate::reader::{Found, InPlace, ReaderError};
use crate::shape::BLOCK_BYTES;
use crate::version::Version;

use super::FilesError;
use super::parts::{Piece, blocks_of, clusters_of, pieces};

/// Why blocks were not read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BlocksError {
    /// They were being written, or the copy is not a prefix at present. They can be read again.
    #[error("{0}")]
    Again(String),
    /// The copy cannot be read any more.
    #[error("{0}")]
    Failed(String),
}

/// The blocks of one copy, read one-sided. Each block is one that was written. What is read later is not older.
pub trait Blocks: Send {
    /// Reads whole blocks. Returns the history to which they belong: another number says that writes which were read
    /// before may be undone.
    ///
    /// # Errors
    /// [`BlocksError`].
    fn read(&mut self, first: u64, into: &mut [u8]) -> Result<u64, BlocksError>;
}

/// A copy of this host.
impl Blocks for InPlace {
    fn read(&mut self, first: u64, into: &mut [u8]) -> Result<u64, BlocksError> {
        history_of(self.blocks(first, into))
    }
}

fn history_of(found: Result<Found, ReaderError>) -> Result<u64, BlocksError> {
    let Found { line, .. } = found.map_err(|error| match error {
        ReaderError::Torn { .. } | ReaderError::TornLine => BlocksError::Again(error.to_string()),
        error => BlocksError::Failed(error.to_string()),
    })?;
    // A copy that is behind takes blocks in any order.
    if line.state != State::Whole {
        return Err(BlocksError::Again("the copy is behind: its server takes what it lacks".into()));
    }
    Ok(history(line.applied))
}

/// The history to which a whole copy belongs that has applied this write. A writer's first word is at every copy before
/// anything of it is, and after all that it undoes.
pub(crate) fn history(applied: Version) -> u64 {
    applied.generation().number().into()
}

/// The files of a volume, as one copy has them.
pub struct Follower {
    blocks: Box<dyn Blocks>,
    view: View,
    history: u64,
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

impl Follower {
    /// Reads all names.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn open(mut blocks: Box<dyn Blocks>) -> Result<Follower, FilesError> {
        let (head, history) = match read_head(&mut *blocks) {
            Ok(found) => found,
            Err(Stop::Anew) => return Err(FilesError::Damaged(NEVER_STILL)),
            Err(Stop::Error(error)) => return Err(error),
        };
        let mut follower = Follower { blocks, view: View::new(head), history };
        follower.load()?;
        Ok(follower)
    }

    /// Reads what has changed. Returns whether anything has.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn poll(&mut self) -> Result<bool, FilesError> {
        match self.follow() {
            Ok(has_changed) => Ok(has_changed),
            Err(Stop::Error(error)) => Err(error),
            Err(Stop::Anew) => self.load().map(|()| true),
        }
    }

    /// Reads all names, from the beginning. Until all of them are read, those of before are shown.
    fn load(&mut self) -> Result<(), FilesError> {
        let empty = View::new(*self.view.head());
        let (names, history) = (std::mem::replace(&mut self.view, empty), self.history);
        let loaded = self.load_here();
        if loaded.is_err() {
            (self.view, self.history) = (names, history);
        }
        loaded
    }

    /// As [`Follower::load`]. After an error, the names are half read.
    fn load_here(&mut self) -> Result<(), FilesError> {
        for _ in 0..TRIES {
            let loaded = read_head(&mut *self.blocks).and_then(|(head, history)| {
                (self.view, self.history) = (View::new(head), history);
                self.catch_up()
            });
            match loaded {
                Ok(_) if self.view.is_complete() => return Ok(()),
                Ok(_) | Err(Stop::Anew) => std::thread::sleep(PAUSE),
                Err(Stop::Error(error)) => return Err(error),
            }
        }
        Err(FilesError::Damaged(NEVER_STILL))
    }

    fn follow(&mut self) -> Result<bool, Stop> {
        let (head, history) = read_head(&mut *self.blocks)?;
        if history != self.history || head.geometry != self.view.head().geometry {
            return Err(Stop::Anew);
        }
        let has_changed = self.catch_up()?;
        if head.lap == self.view.head().lap {
            return Ok(has_changed);
        }
        // The log that was followed is at its end, unless its area is used for the next image already.
        if !self.view.go_on(head) {
            return Err(Stop::Anew);
        }
        Ok(self.catch_up()? || has_changed)
    }

    /// Reads up to the end of the log. Returns whether there was anything.
    fn catch_up(&mut self) -> Result<bool, Stop> {
        let before = self.view.position();
        let (mut tries, mut count) = (0, FIRST_BLOCKS);
        self.view.look_again();
        loop {
            let (first, most) = self.view.wants();
            let mut blocks = vec![0; most.min(count) as usize * BLOCK_BYTES];
            if !blocks.is_empty() {
                self.read_blocks(first, &mut blocks)?;
            }
            match self.view.push(&blocks) {
                Ok(false) => return Ok(self.view.position() != before),
                Ok(true) if blocks.is_empty() => return Err(Stop::Anew),
                Ok(true) => count = MORE_BLOCKS,
                // A frame of several blocks was read while it was written, or the area is used anew.
                Err(_) if tries < TRIES_OF_A_FRAME => {
                    tries += 1;
                    self.view.look_again();
                    std::thread::sleep(PAUSE);
                }
                Err(_) => return Err(Stop::Anew),
            }
        }
    }

    fn read_blocks(&mut self, first: u64, into: &mut [u8]) -> Result<(), Stop> {
        let history = again(|| self.blocks.read(first, into))?;
        if history == self.history { Ok(()) } else { Err(Stop::Anew) }
    }

    /// What an entry of a directory stands for.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, FilesError> {
        Ok(self.view.lookup(parent, name)?)
    }

    /// What is known of an inode.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn getattr(&self, ino: u64) -> Result<Attr, FilesError> {
        Ok(self.view.attr(ino)?)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn readlink(&self, ino: u64) -> Result<Vec<u8>, FilesError> {
        Ok(self.view.target(ino)?.to_vec())
    }

    /// Entries of a directory behind the position `after`, until `each` says `false`.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn readdir(&self, ino: u64, after: u64, each: impl FnMut(Listed<'_>) -> bool) -> Result<(), FilesError> {
        Ok(self.view.list(ino, after, each)?)
    }

    /// How much of the volume is used.
    pub fn statfs(&self) -> Usage {
        self.view.usage()
    }

    /// Reads bytes; less at the end of the file. They are of a file that was there after this call began.
    ///
    /// # Errors
    /// [`FilesError`].
    pub fn read(&mut self, ino: u64, offset: u64, length: u32) -> Result<Vec<u8>, FilesError> {
        let asked = offset..offset.saturating_add(length.into());
        for _ in 0..TRIES {
            let before = self.place_of(ino, &asked)?;
            let (size, runs) = &before;
            let range = asked.start.min(*size)..asked.end.min(*size);
            let blocks = blocks_of(&range);
            let mut data = vec![0; ((blocks.end - blocks.start) as usize) * BLOCK_BYTES];
            let mut is_of_one_history = true;
            for Piece { first, count, at } in pieces(self.view.head().geometry, runs, blocks.clone()) {
                let start = (first - blocks.start) as usize * BLOCK_BYTES;
                let Some(at) = at else { continue };
                match self.read_blocks(at, &mut data[start..start + count as usize * BLOCK_BYTES]) {
                    Ok(()) => {}
                    Err(Stop::Anew) => is_of_one_history = false,
                    Err(Stop::Error(error)) => return Err(error),
                }
            }
            self.poll()?;
            // A file that has become longer still has these blocks.
            let after = self.place_of(ino, &asked)?;
            if is_of_one_history && after.1 == before.1 && after.0 >= before.0 {
                let skipped = (range.start % BLOCK_BYTES as u64) as usize;
                data.truncate(skipped + (range.end - range.start) as usize);
                data.drain(..skipped.min(data.len()));
                return Ok(data);
            }
        }
        Err(FilesError::Blocks(format!("inode {ino} was changed each of the {TRIES} times that it was read")))
    }

    fn place_of(&self, ino: u64, bytes: &std::ops::Range<u64>) -> Result<(u64, Vec<Run>), NamesError> {
        self.view.file(ino, clusters_of(&blocks_of(bytes)))
    }
}

/// The head, and the history to which it belongs.
fn read_head(blocks: &mut dyn Blocks) -> Result<(Head, u64), Stop> {
    let mut block = vec![0; BLOCK_BYTES];
    let history = again(|| blocks.read(0, &mut block))?;
    match Head::parse(&block) {
        Ok(head) => Ok((head, history)),
        Err(error) => Err(Stop::Error(error.into())),
    }
}

/// Reads again what was being written.
fn again(mut read: impl FnMut() -> Result<u64, BlocksError>) -> Result<u64, BlocksError> {
    let mut tries = 0;
    loop {
        match read() {
            Err(BlocksError::Again(_)) if tries < TRIES => {
                tries += 1;
                std::thread::sleep(PAUSE);
            }
            result => return result,
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
