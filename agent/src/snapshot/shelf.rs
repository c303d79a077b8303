//! Shelf: the snapshots of one mount. One of them is `dump.rdb`; older ones stay for those that have them open.
//!
//! Each snapshot is an inode of its own. So a process that has opened one never reads a byte of the next.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use remora_fuse::ROOT;
use remora_table::Origin;

use super::kept::Kept;
use super::target::{Keeper, Target};
use crate::exit::Failure;
use crate::replica::spool::SnapshotId;

/// The snapshots of one mount, by their inodes.
pub(super) struct Shelf {
    folder: PathBuf,
    state: Mutex<State>,
}

struct State {
    /// The inode that is `dump.rdb`.
    present: Option<u64>,
    books: BTreeMap<u64, Book>,
    /// The last inode that was given.
    last: u64,
}

struct Book {
    kept: Arc<Kept>,
    /// How often the kernel has looked it up and not forgotten it.
    lookups: u64,
}

impl Shelf {
    /// Without a snapshot. Their bytes will be in this folder's file system.
    pub(super) fn new(folder: &Path) -> Shelf {
        let state = State { present: None, books: BTreeMap::new(), last: ROOT };
        Shelf { folder: folder.to_owned(), state: Mutex::new(state) }
    }

    /// The snapshot that is `dump.rdb`, and its inode.
    pub(super) fn shown(&self) -> Option<(u64, Arc<Kept>)> {
        let state = self.state();
        let node = state.present?;
        state.books.get(&node).map(|book| (node, Arc::clone(&book.kept)))
    }

    /// A new and empty snapshot becomes `dump.rdb`. What has not arrived of the one before will not come.
    fn show(&self, origin: Origin) -> io::Result<Arc<Kept>> {
        let kept = Arc::new(Kept::new(&self.folder, origin)?);
        let mut state = self.state();
        let before = state.present.and_then(|node| state.books.get(&node).map(|book| Arc::clone(&book.kept)));
        state.last += 1;
        let node = state.last;
        state.present = Some(node);
        state.books.insert(node, Book { kept: Arc::clone(&kept), lookups: 0 });
        state.tidy();
        drop(state);
        if let Some(before) = before {
            before.lose();
        }
        Ok(kept)
    }

    /// The snapshot with this inode.
    pub(super) fn at(&self, node: u64) -> Option<Arc<Kept>> {
        self.state().books.get(&node).map(|book| Arc::clone(&book.kept))
    }

    /// All that are there.
    pub(super) fn all(&self) -> Vec<Arc<Kept>> {
        self.state().books.values().map(|book| Arc::clone(&book.kept)).collect()
    }

    /// The kernel has looked this inode up.
    pub(super) fn look_up(&self, node: u64) {
        if let Some(book) = self.state().books.get_mut(&node) {
            book.lookups += 1;
        }
    }

    /// The kernel forgets this number of lookups.
    pub(super) fn forget(&self, node: u64, lookups: u64) {
        let mut state = self.state();
        if let Some(book) = state.books.get_mut(&node) {
            book.lookups = book.lookups.saturating_sub(lookups);
            state.tidy();
        }
    }

    /// The numbers are right after every statement, so a panic elsewhere does not invalidate them.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Target for Shelf {
    fn present(&self) -> Option<Arc<dyn Keeper>> {
        self.shown().map(|(_, kept)| kept as Arc<dyn Keeper>)
    }

    fn put(&self, snapshot: SnapshotId) -> io::Result<Arc<dyn Keeper>> {
        self.show(snapshot.origin).map(|kept| kept as Arc<dyn Keeper>)
    }

    fn folder(&self) -> &Path {
        &self.folder
    }

    fn failure(&self, error: &io::Error) -> Failure {
        let folder = self.folder.display();
        Failure::local(format!(
            "the snapshot cannot be kept in {folder}: {error}; name a folder with room for all of it by --spool"
        ))
    }
}

impl State {
    /// Gives the room of old snapshots back that the kernel does not know any more.
    fn tidy(&mut self) {
        let present = self.present;
        self.books.retain(|node, book| Some(*node) == present || book.lookups > 0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::kept::Found;
    use super::*;

    #[test]
    fn an_old_snapshot_stays_for_those_that_have_it_and_gets_nothing_of_the_next() {
        let origin = |generation| Origin { generation, history: "a".repeat(40).parse().unwrap(), offset: 0 };
        let shelf = Shelf::new(Path::new("/tmp"));
        assert!(shelf.shown().is_none());
        shelf.show(origin(1)).unwrap();
        let (first, _) = shelf.shown().unwrap();
        shelf.look_up(first);
        shelf.look_up(first);
        shelf.show(origin(2)).unwrap();
        let (second, kept) = shelf.shown().unwrap();
        assert!(second != first && kept.origin.generation == 2);
        assert_eq!(shelf.at(first).unwrap().find(0), Some(Found::Lost));
        assert_eq!(kept.find(0), None, "it may still come");
        shelf.forget(first, 1);
        assert!(shelf.at(first).is_some(), "the kernel knows it by another lookup");
        shelf.forget(first, 1);
        assert!(shelf.at(first).is_none() && shelf.at(second).is_some());
        shelf.forget(second, 1);
        assert_eq!(shelf.all().len(), 1, "dump.rdb itself stays");
    }
}
