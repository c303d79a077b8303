//! File: the slots of a snapshot beside the file that they become.
//!
//! ```text
//!   /data/.dump.rdb.remora/      a state folder, as a replica's --state-dir: slots, held, origin.json
//!   /data/dump.rdb               its file `slots`, renamed once it is whole, checked and on the disk
//! ```
//!
//! The slots lie in the folder's file as in the snapshot, one behind the other. So the file is the snapshot, and a
//! fetch that is started again goes on behind the slots that are there and right.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::beside::{self, Placing};
use super::target::{Keeper, Reached, Stage, Target};
use crate::exit::Failure;
use crate::replica::private::{Claim, Folder};
use crate::replica::spool::{Held, SnapshotId, Spool};
use remora_redis::rdb::crc64;
use remora_table::{Origin, Slot};

/// A file that a snapshot becomes.
pub(super) struct FileTarget {
    to: PathBuf,
    /// Where its slots are until then.
    folder: PathBuf,
    present: Mutex<Option<Arc<Partial>>>,
    _claim: Claim,
}

/// The slots of one snapshot.
struct Partial {
    snapshot: SnapshotId,
    state: Mutex<State>,
}

struct State {
    spool: Spool,
    bytes: u64,
    stage: Stage,
}

/// Bytes that are read at a time for the checksum.
const PIECE: usize = 1 << 20;

/// The checksum at the end of an RDB file.
const CHECKSUM_BYTES: u64 = 8;

impl FileTarget {
    /// Finds what an earlier fetch has left, and reads all of it to check it.
    ///
    /// # Errors
    /// There is a file already and it is not to be replaced, another fetch is at work, or the folder cannot be used.
    pub(super) fn open(to: &Path, replaces: bool) -> Result<FileTarget, Failure> {
        let Some(name) = to.file_name() else {
            return Err(Failure::refused(format!("{} is not the name of a file", to.display())));
        };
        if !replaces && to.symlink_metadata().is_ok() {
            return Err(Failure::refused(format!("{} exists; replace it by --replace", to.display())));
        }
        let folder = to.with_file_name(format!(".{}.remora", name.to_string_lossy()));
        let unusable = |error: io::Error| {
            Failure::local(format!("{} cannot be used for the slots that arrive: {error}", folder.display()))
        };
        let claim = Folder::open(&folder).and_then(|folder| folder.claim()).map_err(unusable)?;
        let Some(claim) = claim else {
            let text = format!("another remora fetch writes {}; wait for it, or end it", to.display());
            return Err(Failure::refused(text));
        };
        let found = Spool::find(&folder).map(|spool| Arc::new(Partial::new(spool)));
        Ok(FileTarget { to: to.to_owned(), folder, present: Mutex::new(found), _claim: claim })
    }

    /// Where the slots are, and what is known of them.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The slots, which become the file.
    pub(super) fn slots(&self) -> PathBuf {
        self.folder.join("slots")
    }

    /// Puts the file in its place, with its name on the disk, and removes the folder.
    ///
    /// # Errors
    /// The owner or the name cannot be given to it, or another file has the name by now.
    pub(super) fn place(self, how: &Placing) -> Result<(), Failure> {
        let slots = self.slots();
        let opened = File::open(&slots);
        let file = opened
            .map_err(|error| Failure::local(format!("{}: its slots cannot be opened: {error}", self.to.display())))?;
        beside::put(&file, &slots, &self.to, how)?;
        // It holds records of slots only; if it cannot be removed, the next fetch begins anew.
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            tracing::warn!("{} cannot be removed: {error}", self.folder.display());
        }
        Ok(())
    }

    fn present(&self) -> MutexGuard<'_, Option<Arc<Partial>>> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target for FileTarget {
    fn present(&self) -> Option<Arc<dyn Keeper>> {
        self.present().clone().map(|partial| partial as Arc<dyn Keeper>)
    }

    fn put(&self, snapshot: SnapshotId) -> io::Result<Arc<dyn Keeper>> {
        let mut present = self.present();
        // Its files are closed before they are used for another one.
        if let Some(before) = present.take_if(|partial| partial.snapshot != snapshot) {
            before.lose();
        }
        let partial = match &*present {
            Some(partial) if partial.state().stage == Stage::Arriving => Arc::clone(partial),
            _ => Arc::new(Partial::new(Spool::open(&self.folder, &snapshot, None)?)),
        };
        *present = Some(Arc::clone(&partial));
        Ok(partial)
    }

    fn folder(&self) -> &Path {
        &self.folder
    }

    fn failure(&self, error: &io::Error) -> Failure {
        let folder = self.folder.display();
        match error.kind() {
            io::ErrorKind::InvalidData => Failure::local(format!("{}: {error}", self.to.display())),
            _ => Failure::local(format!(
                "the slots cannot be written into {folder}: {error}; make room there for the whole snapshot"
            )),
        }
    }
}

impl Partial {
    fn new(spool: Spool) -> Partial {
        let bytes = (0..spool.held_below()).filter_map(|number| spool.get(number)).map(|held| u64::from(held.length));
        let bytes = bytes.sum();
        Partial { snapshot: spool.snapshot(), state: Mutex::new(State { spool, bytes, stage: Stage::Arriving }) }
    }

    /// What it has is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for Partial {
    fn origin(&self) -> Origin {
        self.snapshot.origin
    }

    fn reached(&self) -> Reached {
        let state = self.state();
        Reached { bytes: state.bytes, slots: state.spool.held_below(), stage: state.stage }
    }

    fn keep(&self, slot: &Slot) -> io::Result<Held> {
        let crc = slot.crc().map_err(io::Error::other)?;
        self.state().spool.store(slot, crc)
    }

    fn add(&self, held: Held) -> io::Result<()> {
        let mut state = self.state();
        state.spool.remember(held)?;
        state.bytes += u64::from(held.length);
        Ok(())
    }

    fn complete(&self) -> io::Result<()> {
        let (file, bytes) = {
            let state = self.state();
            (state.spool.file().try_clone()?, state.bytes)
        };
        file.set_len(bytes)?;
        check_or_add(&file, bytes)?;
        file.sync_all()?;
        self.state().stage = Stage::Whole;
        Ok(())
    }

    fn lose(&self) {
        let mut state = self.state();
        if state.stage == Stage::Arriving {
            state.stage = Stage::Lost;
        }
    }
}

/// Reads the whole file, and compares its checksum with the one at its end. A server with `rdbchecksum no` writes zero
/// there. Each slot was checked by a checksum of its own, so the file gets the right one, by which any server finds
/// what changes later.
fn check_or_add(file: &File, bytes: u64) -> io::Result<()> {
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let Some(end) = bytes.checked_sub(CHECKSUM_BYTES) else {
        return Err(invalid(format!("an RDB file of {bytes} bytes has no checksum")));
    };
    let (mut at, mut crc, mut piece) = (0, 0, vec![0; PIECE]);
    while at < end {
        let length = (end - at).min(PIECE as u64) as usize;
        let piece = piece.get_mut(..length).unwrap_or_default();
        file.read_exact_at(piece, at)?;
        crc = crc64(crc, piece);
        at += length as u64;
    }
    let mut wanted = [0; CHECKSUM_BYTES as usize];
    file.read_exact_at(&mut wanted, end)?;
    match u64::from_le_bytes(wanted) {
        0 => file.write_all_at(&crc.to_le_bytes(), end),
        wanted if wanted == crc => Ok(()),
        wanted => Err(invalid(format!(
            "its checksum is {crc:016x}, and {wanted:016x} at its end; it was not put in place; fetch it again, and \
             report it if that happens twice"
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_with_another_checksum_is_found_and_one_without_gets_it() {
        let file = tempfile::tempfile().unwrap();
        let body: Vec<u8> = (0..3_000_000_u32).map(|at| (at * 7) as u8).collect();
        file.write_all_at(&body, 0).unwrap();
        let (right, end) = (crc64(0, &body), body.len() as u64);
        let length = end + CHECKSUM_BYTES;
        for (checksum, is_right) in [(right, true), (right + 1, false), (0, true)] {
            file.write_all_at(&checksum.to_le_bytes(), end).unwrap();
            assert_eq!(check_or_add(&file, length).is_ok(), is_right, "{checksum:x}");
            let mut stored = [0; CHECKSUM_BYTES as usize];
            file.read_exact_at(&mut stored, end).unwrap();
            assert_eq!(u64::from_le_bytes(stored), if is_right { right } else { checksum });
        }
        file.write_all_at(&[!body[0]], 0).unwrap();
        assert!(check_or_add(&file, length).is_err(), "a byte was changed later");
        assert!(check_or_add(&file, 7).is_err());
    }

    #[test]
    fn a_name_that_exists_and_a_second_fetch_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("dump.rdb");
        let first = FileTarget::open(&to, false).unwrap();
        let again = FileTarget::open(&to, false).err().unwrap();
        assert!(again.to_string().contains("another remora fetch"), "{again}");
        drop(first);
        std::fs::write(&to, "there").unwrap();
        let exists = FileTarget::open(&to, false).err().unwrap();
        assert!(exists.to_string().contains("--replace"), "{exists}");
        assert!(FileTarget::open(&to, true).is_ok());
    }
}
