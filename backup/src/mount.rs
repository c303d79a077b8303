//! Mount: a source's snapshot as a file that can be read while it arrives.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use remora_fabric::View;
use remora_fuse as fuse;
use remora_fuse::answer::{
    Attributes, Data, DirectoryEntry, Entry, FileKind, KnownAttributes, Listing, Opened, Statistics, Timestamp,
};
use remora_fuse::request::{GetAttributes, Lookup, Open, Read, ReadDirectory};
use remora_fuse::{Answer, Errno, FileSystem, Later, ROOT, Session, SessionOptions, StartError};
use remora_table::{Origin, Slot};

use crate::options::MountOptions;
use crate::receiving::{Keeper, Reached, Stage, Target};
use crate::receiving::{Reception, end, outcome};
use remora_process::blocking;
use remora_process::events;
use remora_process::exit::Failure;
use remora_process::signals::Signals;
use remora_reader::spool::{Held, SnapshotId};

/// What the mounts are called.
const SUBTYPE: &str = "remora-snapshot";

/// How often it is looked whether the file is still mounted.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Shows a source's snapshot as a file, until a signal, or until the file is unmounted.
///
/// # Errors
/// The source cannot be reached or refuses, the bytes cannot be kept, or the directory cannot be mounted at or is in
/// use at the end.
pub async fn run(options: MountOptions) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let shelf = Arc::new(Shelf::new(&options.spool));
    let source = options.from.read.source.to_string();
    let Reception { mut running, stop, mut begun } =
        Reception::start(&options.from, Arc::clone(&shelf) as Arc<dyn Target>, false, None)?;
    let mut received = None;
    // What there is is mounted: until then there is nothing to see, and an error is simply the command's.
    tokio::select! {
        done = &mut running, if received.is_none() => received = Some(outcome(done).map(|_| ())?),
        _ = begun.wait_for(|begun| *begun) => {}
        signal = signals.next() => {
            tracing::info!("stopped by {signal}: nothing was mounted");
            return end(running, &stop).await;
        }
    }
    let session = SessionOptions {
        mount: fuse::MountOptions { source, subtype: SUBTYPE.into(), read_only: true, other_users: false },
        ring: options.ring,
        ..SessionOptions::default()
    };
    let (served, directory) = (Arc::new(Served::new(Arc::clone(&shelf))), options.directory.clone());
    let failure = |error: StartError| Failure::local(error.to_string());
    let mounted = blocking(move || Session::start(&directory, served, &session).map_err(failure)).await?;
    let directory = options.directory.display();
    tracing::info!(event = events::SNAPSHOT_MOUNTED, %directory, transport = ?mounted.transport(), "{FILE_NAME} is there");
    let failed = loop {
        tokio::select! {
            done = &mut running, if received.is_none() => match outcome(done) {
                Ok(_) => received = Some(()),
                Err(failure) => break Some(failure),
            },
            signal = signals.next() => {
                tracing::info!("stopped by {signal}: unmounting");
                break None;
            }
            () = tokio::time::sleep(LOOK_AGAIN) => {
                if mounted.wait(Duration::ZERO) {
                    tracing::info!(%directory, "unmounted");
                    break None;
                }
            }
        }
    };
    // Readers that wait are told before the file goes.
    shelf.all().iter().for_each(|kept| kept.lose());
    let left = if received.is_none() && failed.is_none() { end(running, &stop).await } else { Ok(()) };
    let unmounted = blocking(move || mounted.end().map_err(|error| Failure::local(error.to_string()))).await;
    failed.map_or(left.and(unmounted), Err)
}

// Shelf: the snapshots of one mount. One of them is `dump.rdb`; older ones stay for those that have them open.
//
// Each snapshot is an inode of its own. So a process that has opened one never reads a byte of the next.

/// The snapshots of one mount, by their inodes.
pub(crate) struct Shelf {
    folder: PathBuf,
    state: Mutex<ShelfState>,
}

struct ShelfState {
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
    pub(crate) fn new(folder: &Path) -> Shelf {
        let state = ShelfState { present: None, books: BTreeMap::new(), last: ROOT };
        Shelf { folder: folder.to_owned(), state: Mutex::new(state) }
    }

    /// The snapshot that is `dump.rdb`, and its inode.
    pub(crate) fn shown(&self) -> Option<(u64, Arc<Kept>)> {
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
    pub(crate) fn at(&self, node: u64) -> Option<Arc<Kept>> {
        self.state().books.get(&node).map(|book| Arc::clone(&book.kept))
    }

    /// All that are there.
    pub(crate) fn all(&self) -> Vec<Arc<Kept>> {
        self.state().books.values().map(|book| Arc::clone(&book.kept)).collect()
    }

    /// The kernel has looked this inode up.
    pub(crate) fn look_up(&self, node: u64) {
        if let Some(book) = self.state().books.get_mut(&node) {
            book.lookups += 1;
        }
    }

    /// The kernel forgets this number of lookups.
    pub(crate) fn forget(&self, node: u64, lookups: u64) {
        let mut state = self.state();
        if let Some(book) = state.books.get_mut(&node) {
            book.lookups = book.lookups.saturating_sub(lookups);
            state.tidy();
        }
    }

    /// The numbers are right after every statement, so a panic elsewhere does not invalidate them.
    fn state(&self) -> MutexGuard<'_, ShelfState> {
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

impl ShelfState {
    /// Gives the room of old snapshots back that the kernel does not know any more.
    fn tidy(&mut self) {
        let present = self.present;
        self.books.retain(|node, book| Some(*node) == present || book.lookups > 0);
    }
}

// Kept: the bytes of one snapshot, as they arrive, in a file without a name. Readers of what has not arrived wait.
//
// ```text
//   0 ────────── arrived ─────────────────────────────── end
//   read at once │ a reader waits: bytes, the end, or that no more will come
// ```
//
// The file has no name, so nothing of it is left when this process ends, however it ends.

/// The bytes of one snapshot, as they arrive.
pub(crate) struct Kept {
    pub(crate) origin: Origin,
    /// When it began to arrive.
    pub(crate) begun: SystemTime,
    file: File,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes that have arrived, and the slots that they came in.
    arrived: u64,
    slots: u64,
    stage: Stage,
    waiting: Vec<Waiting>,
    /// Readers that were interrupted before they waited.
    interrupted: VecDeque<u64>,
}

/// What a reader finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// This number of bytes from where it reads.
    Bytes(u64),
    End,
    /// They will never come.
    Lost,
    Interrupted,
}

struct Waiting {
    /// The number of the request.
    reader: u64,
    at: u64,
    tell: Tell,
}

type Tell = Box<dyn FnOnce(Found) + Send>;

/// Interruptions that are remembered. An interruption of a request that was answered already is one, and stays until
/// this many others have come: more than the requests that the kernel has under way.
const MOST_INTERRUPTED: usize = 1024;

impl Kept {
    /// An empty one, whose bytes will be in this folder's file system.
    pub(crate) fn new(folder: &Path, origin: Origin) -> io::Result<Kept> {
        let file = tempfile::tempfile_in(folder)?;
        Ok(Kept { origin, begun: SystemTime::now(), file, state: Mutex::default() })
    }

    /// Writes the bytes of the next slot.
    fn write(&self, view: &View, offset: u64, length: u32) -> io::Result<()> {
        let (at, mut done) = (self.reached().bytes, 0);
        while done < u64::from(length) {
            let left = (u64::from(length) - done) as usize;
            done += view.write_at(&self.file, at + done, offset + done, left)? as u64;
        }
        Ok(())
    }

    /// Another slot of this length is there.
    fn grow(&self, length: u32) {
        self.change(|state| {
            state.arrived += u64::from(length);
            state.slots += 1;
        });
    }

    /// Tells what there is at this byte, as soon as there is something. `reader` is a number of the caller.
    pub(crate) fn when_there(&self, reader: u64, at: u64, tell: Tell) {
        let mut state = self.state();
        let interrupted = state.interrupted.iter().position(|number| *number == reader);
        let interrupted = interrupted.map(|index| _ = state.interrupted.remove(index));
        let found = state.find(at).or(interrupted.map(|()| Found::Interrupted));
        match found {
            Some(found) => {
                drop(state);
                tell(found);
            }
            None => state.waiting.push(Waiting { reader, at, tell }),
        }
    }

    /// What there is at this byte; `None`: nothing yet.
    pub(crate) fn find(&self, at: u64) -> Option<Found> {
        self.state().find(at)
    }

    /// A reader waits no longer.
    pub(crate) fn interrupt(&self, reader: u64) {
        let mut state = self.state();
        let Some(index) = state.waiting.iter().position(|waiting| waiting.reader == reader) else {
            state.interrupted.push_back(reader);
            if state.interrupted.len() > MOST_INTERRUPTED {
                state.interrupted.pop_front();
            }
            return;
        };
        let waiting = state.waiting.swap_remove(index);
        drop(state);
        (waiting.tell)(Found::Interrupted);
    }

    /// Bytes that have arrived.
    pub(crate) fn read(&self, at: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        let mut told = Vec::new();
        for waiting in std::mem::take(&mut state.waiting) {
            match state.find(waiting.at) {
                Some(found) => told.push((waiting.tell, found)),
                None => state.waiting.push(waiting),
            }
        }
        drop(state);
        told.into_iter().for_each(|(tell, found)| tell(found));
    }

    /// The numbers are right after every statement, so a panic elsewhere does not invalidate them.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for Kept {
    fn origin(&self) -> Origin {
        self.origin
    }

    fn reached(&self) -> Reached {
        let State { arrived, slots, stage, .. } = *self.state();
        Reached { bytes: arrived, slots, stage }
    }

    fn keep(&self, slot: &Slot) -> io::Result<Held> {
        let (view, range) = slot.bytes();
        self.write(view, range.start, slot.length)?;
        Ok(Held::plain(slot.number, slot.length, 0)) // whose checksum this file has no use for
    }

    fn add(&self, held: Held) -> io::Result<()> {
        self.grow(held.length);
        Ok(())
    }

    fn complete(&self) -> io::Result<()> {
        self.change(|state| state.stage = Stage::Whole);
        Ok(())
    }

    fn lose(&self) {
        self.change(|state| {
            if state.stage == Stage::Arriving {
                state.stage = Stage::Lost;
            }
        });
    }
}

impl State {
    fn find(&self, at: u64) -> Option<Found> {
        match self.stage {
            _ if at < self.arrived => Some(Found::Bytes(self.arrived - at)),
            Stage::Arriving => None,
            Stage::Whole => Some(Found::End),
            Stage::Lost => Some(Found::Lost),
        }
    }
}

// The snapshots as a file system: one directory, with `dump.rdb` in it, that can only be read.
//
// While a snapshot arrives, a read of what is not there yet waits, and the file is read around the page cache: the
// cache would take the length of the moment for its end. `stat(2)` shows what has arrived, in whole pages, so that a
// page that is mapped into memory has all of its bytes.

/// The name of the file.
pub const FILE_NAME: &str = "dump.rdb";

/// The snapshots as the kernel asks for them.
pub(crate) struct Served {
    shelf: Arc<Shelf>,
    begun: SystemTime,
    owner: (u32, u32),
}

impl Served {
    /// The snapshots of this shelf, which belong to the user of this process.
    pub(crate) fn new(shelf: Arc<Shelf>) -> Served {
        let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Served { shelf, begun: SystemTime::now(), owner }
    }

    fn attributes(&self, node: u64) -> Result<KnownAttributes, Errno> {
        if node == ROOT {
            return Ok(KnownAttributes { attributes: self.directory(), valid: FOR_EVER });
        }
        let kept = self.shelf.at(node).ok_or(Errno::STALE)?;
        let Reached { bytes, stage, .. } = kept.reached();
        let (size, valid) = match stage {
            Stage::Whole => (bytes, FOR_EVER),
            Stage::Arriving | Stage::Lost => (bytes - bytes % PAGE, Duration::ZERO),
        };
        let attributes = Attributes { node, kind: FileKind::File, permissions: 0o400, ..self.directory() };
        let time = Timestamp::from(kept.begun);
        let times = Attributes { accessed: time, modified: time, changed: time, ..attributes };
        let attributes = Attributes { links: 1, size, blocks: size.div_ceil(SECTOR), ..times };
        Ok(KnownAttributes { attributes, valid })
    }

    fn directory(&self) -> Attributes {
        let time = Timestamp::from(self.begun);
        Attributes {
            node: ROOT,
            kind: FileKind::Directory,
            permissions: 0o500,
            links: 2,
            uid: self.owner.0,
            gid: self.owner.1,
            size: 0,
            blocks: 0,
            block_bytes: READ_BYTES,
            device: 0,
            accessed: time,
            modified: time,
            changed: time,
        }
    }
}

impl FileSystem for Served {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        let present = self.shelf.shown().filter(|_| asked.parent == ROOT && asked.name == FILE_NAME.as_bytes());
        let Some((node, _)) = present else { return answer.fail(Errno::NOENT) };
        match self.attributes(node) {
            Ok(known) => {
                self.shelf.look_up(node);
                answer.give(Entry {
                    attributes: Some(known.attributes),
                    generation: 0,
                    name_valid: known.valid,
                    attributes_valid: known.valid,
                });
            }
            Err(errno) => answer.fail(errno),
        }
    }

    fn forget(&self, node: u64, lookups: u64) {
        self.shelf.forget(node, lookups);
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        answer.result(self.attributes(asked.node));
    }

    fn open(&self, asked: Open, answer: Answer<'_, Opened>) {
        let Some(kept) = self.shelf.at(asked.node) else { return answer.fail(Errno::STALE) };
        let direct = kept.reached().stage != Stage::Whole;
        answer.give(Opened { direct, without_flush: true, ..Opened::default() });
    }

    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        let Some(kept) = self.shelf.at(asked.node) else { return answer.fail(Errno::STALE) };
        match kept.find(asked.offset) {
            Some(found) => answer.result(bytes(&kept, asked, found)),
            None => wait(&kept, asked, answer.unique(), answer.later()),
        }
    }

    fn read_directory(&self, asked: ReadDirectory, answer: Answer<'_, Listing>) {
        let mut listing = answer.listing();
        let file = self.shelf.shown().map(|(node, _)| (node, FileKind::File, FILE_NAME));
        let entries = [Some((ROOT, FileKind::Directory, ".")), Some((ROOT, FileKind::Directory, "..")), file];
        for (offset, (node, kind, name)) in (1..).zip(entries.into_iter().flatten()) {
            let entry = DirectoryEntry { node, kind, name: name.as_bytes(), offset };
            if offset > asked.offset && !listing.push(&entry) {
                break;
            }
        }
        answer.give(listing);
    }

    fn statistics(&self, _node: u64, answer: Answer<'_, Statistics>) {
        let bytes: u64 = self.shelf.all().iter().map(|kept| kept.reached().bytes).sum();
        let files = self.shelf.shown().map_or(1, |_| 2);
        let block_bytes = PAGE as u32;
        answer.give(Statistics {
            block_bytes,
            blocks: bytes.div_ceil(PAGE),
            files,
            name_bytes: 255,
            ..Statistics::default()
        });
    }

    fn interrupt(&self, unique: u64) {
        self.shelf.all().iter().for_each(|kept| kept.interrupt(unique));
    }

    fn destroy(&self) {
        self.shelf.all().iter().for_each(|kept| kept.lose());
    }
}

/// Answers as soon as there is something to read.
fn wait(kept: &Arc<Kept>, asked: Read, unique: u64, later: Later<Data>) {
    let kept_too = Arc::clone(kept);
    kept.when_there(unique, asked.offset, Box::new(move |found| later.result(bytes(&kept_too, asked, found))));
}

fn bytes(kept: &Kept, asked: Read, found: Found) -> Result<Data, Errno> {
    match found {
        Found::Bytes(there) => {
            let length = there.min(asked.size.into()) as usize;
            let read = kept.read(asked.offset, length);
            read.map(Data::from).map_err(|error: io::Error| {
                tracing::error!("the bytes of {FILE_NAME} that have arrived cannot be read: {error}");
                Errno::IO
            })
        }
        Found::End => Ok(Data::default()),
        Found::Lost => Err(Errno::IO),
        Found::Interrupted => Err(Errno::INTR),
    }
}

/// What suits a reader: the longest request.
const READ_BYTES: u32 = remora_fuse::session::MOST_REQUEST_BYTES;

/// Bytes of a page of memory, which the size of a file that arrives is a multiple of. Larger pages exist on other
/// machines; a mapped page may have zeros at its end there while the file arrives.
const PAGE: u64 = 4096;

/// The unit of `st_blocks`.
const SECTOR: u64 = 512;

/// How long the kernel may use what does not change.
const FOR_EVER: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::{Arc, mpsc};

    use remora_fabric::{Memory, Pages};

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

    fn kept() -> Kept {
        let origin = Origin { generation: 1, history: "a".repeat(40).parse().unwrap(), offset: 7 };
        Kept::new(Path::new("/tmp"), origin).unwrap()
    }

    /// Adds a slot with these bytes.
    fn arrive(kept: &Kept, bytes: &[u8]) {
        let memory = Memory::create("slot", 4096, Pages::Small).unwrap();
        memory.write(100, bytes).unwrap();
        kept.write(&memory, 100, bytes.len() as u32).unwrap();
        kept.grow(bytes.len() as u32);
    }

    fn asks(kept: &Arc<Kept>, reader: u64, at: u64) -> mpsc::Receiver<Found> {
        let (tell, told) = mpsc::channel();
        kept.when_there(reader, at, Box::new(move |found| tell.send(found).unwrap()));
        told
    }

    #[test]
    fn bytes_that_have_arrived_are_read_and_readers_of_others_wait_for_them() {
        let kept = Arc::new(kept());
        let waits = asks(&kept, 1, 0);
        assert!(waits.try_recv().is_err());
        arrive(&kept, b"0123456789");
        assert_eq!(waits.try_recv(), Ok(Found::Bytes(10)));
        assert_eq!(asks(&kept, 2, 7).try_recv(), Ok(Found::Bytes(3)));
        assert_eq!(kept.read(7, 3).unwrap(), b"789");
        let (next, far) = (asks(&kept, 3, 10), asks(&kept, 4, 13));
        arrive(&kept, b"abc");
        assert_eq!(next.try_recv(), Ok(Found::Bytes(3)));
        assert!(far.try_recv().is_err());
        kept.complete().unwrap();
        assert_eq!(far.try_recv(), Ok(Found::End));
        assert_eq!(kept.read(5, 8).unwrap(), b"56789abc");
        assert_eq!(kept.reached(), Reached { bytes: 13, slots: 2, stage: Stage::Whole });
        kept.lose();
        assert_eq!(kept.find(13), Some(Found::End), "a whole snapshot cannot be lost");
    }

    #[test]
    fn readers_of_a_lost_snapshot_are_told_so_and_never_that_it_ends() {
        let kept = Arc::new(kept());
        arrive(&kept, b"half");
        let waits = asks(&kept, 1, 4);
        kept.lose();
        assert_eq!(waits.try_recv(), Ok(Found::Lost));
        assert_eq!(asks(&kept, 2, 1000).try_recv(), Ok(Found::Lost));
        assert_eq!(asks(&kept, 3, 0).try_recv(), Ok(Found::Bytes(4)), "what is there can be read");
    }

    #[test]
    fn an_interrupted_reader_waits_no_longer_whichever_comes_first() {
        let kept = Arc::new(kept());
        let (first, second) = (asks(&kept, 1, 0), asks(&kept, 2, 0));
        kept.interrupt(1);
        assert_eq!(first.try_recv(), Ok(Found::Interrupted));
        assert!(second.try_recv().is_err());
        kept.interrupt(3);
        assert_eq!(asks(&kept, 3, 0).try_recv(), Ok(Found::Interrupted));
        assert!(asks(&kept, 3, 0).try_recv().is_err(), "an interruption counts once");
        for reader in 100..100 + 2 * MOST_INTERRUPTED as u64 {
            kept.interrupt(reader);
        }
        assert_eq!(kept.state().interrupted.len(), MOST_INTERRUPTED);
    }
}
