//! Kept: the store of one copy, and who waits for it; and what the stores of a server share.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_messenger::Connection;

use crate::disk::journal::{Journal, Superblock, Sync, write_superblock};
use crate::disk::recovery::{self, Batch, Checkpoint, Found, Growth, Root};
use crate::disk::{Failure, Folder, Name};
use crate::layout::{Entry, Layout, Store};
use crate::rules::{Holder, Standing, Tail, Version};
use crate::shape::{Shape, VolumeId};
use crate::wire::{Findings, Room};

/// The folder of a server's stores.
#[derive(Debug)]
pub(super) struct Stores {
    root: Root,
    /// A client waits for a sync.
    is_awaited: Mutex<bool>,
    awaited: Condvar,
}

impl Stores {
    pub(super) fn open(path: &Path) -> io::Result<Arc<Stores>> {
        let root = Root::open(path)?;
        Ok(Arc::new(Stores { root, is_awaited: Mutex::new(false), awaited: Condvar::new() }))
    }

    /// The stores that are there.
    pub(super) fn found(&self) -> io::Result<Vec<(VolumeId, Folder)>> {
        self.root.stores()
    }

    /// A new store for a copy without any written block.
    pub(super) fn make(self: &Arc<Stores>, shape: Shape, standing: Standing) -> Result<Kept, String> {
        let folder = self
            .root
            .make(shape.volume())
            .map_err(|error| format!("no folder for the copy in {}: {error}", self.root.path().display()))?;
        let files = Arc::new(folder);
        let length = Journal::<Folder>::segment_bytes(Layout::of(shape));
        let number = getrandom::u64().map_err(|error| error.to_string())?;
        let made = recovery::create(Arc::clone(&files), shape, length, (number, self.root.boot()), standing);
        let journal = made.map_err(|failure| {
            self.root.remove(shape.volume());
            failure.to_string()
        })?;
        Ok(Kept::new(self, files, journal, number, standing))
    }

    /// The copy in a folder. Its blocks go to this memory.
    pub(super) fn recover(
        self: &Arc<Stores>,
        folder: Folder,
        memory: &Store,
    ) -> Result<(Kept, Standing, bool), Failure> {
        let files = Arc::new(folder);
        let length = Journal::<Folder>::segment_bytes(memory.layout());
        let Found { journal, standing, is_cut, lacks, last } =
            recovery::recover(Arc::clone(&files), self.root.boot(), length, memory)?;
        let volume = memory.shape().volume();
        match lacks {
            Some(why) => tracing::error!(%volume, why, "the store of a copy is damaged: the copy must be taken back"),
            None => tracing::info!(%volume, applied = %standing.applied, last, is_cut, "a copy was found in its store"),
        }
        let number = getrandom::u64().unwrap_or_default();
        Ok((Kept::new(self, files, journal, number, standing), standing, is_cut))
    }

    /// Whether the device has space for the extents of a copy of this length.
    pub(super) fn has_space(&self, bytes: u64) -> Result<(), String> {
        let path = self.root.path();
        let failed = |why: &dyn std::fmt::Display| format!("the store {}: {why}", path.display());
        let found = rustix::fs::statvfs(path).map_err(|error| failed(&error))?;
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        if free < bytes {
            return Err(failed(&format!("{bytes} bytes are needed beside the copy as it is, and {free} are free")));
        }
        Ok(())
    }

    /// Begins the store of a copy that becomes larger.
    pub(super) fn begin_growth(&self, shape: Shape) -> Result<Growth<Folder>, String> {
        let folder = self.root.make_growth(shape.volume());
        let folder = folder.map_err(|error| format!("no folder beside the copy's: {error}"))?;
        Growth::begin(folder, shape).map_err(|failure| {
            self.root.remove_growth(shape.volume());
            failure.to_string()
        })
    }

    /// Removes the folder beside the copy's: a growth that is given up, or the store whose place one has taken.
    pub(super) fn end_growth(&self, volume: VolumeId) {
        self.root.remove_growth(volume);
    }

    /// Every block is in the growth, and the copy stands like this: it takes the place of the earlier store.
    /// [`Failure::Lost`]: neither of the two is to be believed.
    pub(super) fn complete_growth(
        self: &Arc<Stores>,
        growth: &Growth<Folder>,
        earlier: &Kept,
        standing: Standing,
        former: Option<u64>,
    ) -> Result<Kept, Failure> {
        let volume = growth.shape().volume();
        let number = getrandom::u64().unwrap_or_default();
        let full = |why: String| Failure::Full { path: self.root.path().display().to_string(), why };
        // Nothing counts yet: whatever fails here has changed nothing.
        let made = growth.complete((number, self.root.boot()), &earlier.journal, standing, former);
        let mut journal = made.map_err(|failure| full(failure.to_string()))?;
        let exchanged = self.root.exchange(volume, &earlier.files, growth.files());
        exchanged.map_err(|error| full(format!("two folders cannot change their names: {error}")))?;
        if let Err(error) = self.root.sync() {
            journal.lose();
            return Err(Failure::of_sync(&**growth.files(), Name::Superblock, &error));
        }
        Ok(Kept::new(self, Arc::clone(growth.files()), journal, number, standing))
    }

    /// Removes the folder of a copy that is forgotten. Returns whether there was one.
    pub(super) fn remove(&self, volume: VolumeId) -> io::Result<bool> {
        self.root.remove_all(volume)
    }

    /// A sync is wanted at once.
    pub(super) fn wake(&self) {
        *self.is_awaited.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.awaited.notify_one();
    }

    /// Waits until a sync is wanted, for up to `limit`.
    pub(super) fn wait(&self, limit: Duration) {
        let mut is_awaited = self.is_awaited.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_awaited {
            is_awaited = match self.awaited.wait_timeout(is_awaited, limit) {
                Ok((guard, _)) => guard,
                Err(error) => error.into_inner().0,
            };
        }
        *is_awaited = false;
    }
}

/// An answer that waits until everything so far is durable.
pub(super) struct Waiter {
    pub(super) connection: Connection,
    pub(super) holder: Holder,
    pub(super) is_promise: bool,
    pub(super) room: Room,
}

/// The store of one copy. The copy's lock guards it.
pub(super) struct Kept {
    stores: Arc<Stores>,
    files: Arc<Folder>,
    journal: Journal<Folder>,
    tail: Tail<Waiter>,
    /// A store that is made again has another one.
    number: u64,
    /// When the last sync began.
    synced_at: Instant,
    /// When the last one was done.
    done_at: Instant,
    /// A checkpoint waits for a sync.
    is_wanted: bool,
}

impl Kept {
    fn new(
        stores: &Arc<Stores>,
        files: Arc<Folder>,
        journal: Journal<Folder>,
        number: u64,
        standing: Standing,
    ) -> Kept {
        let tail = Tail::at(journal.appended(), standing);
        let (stores, now) = (Arc::clone(stores), Instant::now());
        Kept { stores, files, journal, tail, number, synced_at: now, done_at: now, is_wanted: false }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The blocks before a growth that is not agreed.
    pub(super) fn former(&self) -> Option<u64> {
        self.journal.former()
    }

    /// The size is agreed: no later process goes back from it.
    pub(super) fn agree(&mut self) -> Result<(), Failure> {
        write_superblock(&*self.files, self.journal.next_superblock(|superblock| superblock.former = None))
    }

    /// Up to which version the copy is whole whatever happens.
    pub(super) fn durable(&self) -> Version {
        self.tail.durable()
    }

    /// Appends an event.
    pub(super) fn append(
        &mut self,
        standing: Standing,
        changes: &[(u64, Entry)],
        blocks: &[&[u8]],
    ) -> Result<(), Failure> {
        let event = self.journal.append(standing, changes, blocks)?;
        self.tail.append(event, standing);
        Ok(())
    }

    /// This waits until everything so far is durable. `Some`: it is.
    pub(super) fn wait(&mut self, waiter: Waiter) -> Option<Waiter> {
        let ready = self.tail.wait(waiter);
        if ready.is_none() {
            self.stores.wake();
        }
        ready
    }

    /// What must be synced now: at once if an answer waits, and else after a while.
    pub(super) fn begin_sync(&mut self, now: Instant) -> Option<Sync<Folder>> {
        let is_due = now.saturating_duration_since(self.synced_at) >= SYNC_EVERY;
        if !is_due && !self.is_wanted && !self.tail.is_awaited() {
            return None;
        }
        (self.synced_at, self.is_wanted) = (now, false);
        self.journal.begin_sync()
    }

    /// It was synced. Returns those that waited for it.
    pub(super) fn synced(&mut self, sync: &Sync<Folder>) -> Vec<Waiter> {
        self.done_at = Instant::now();
        self.journal.synced(sync);
        self.tail.sync(sync.through)
    }

    /// The superblock that says what is durable, if nothing was written for a while and no record says it.
    pub(super) fn say_synced(&mut self, now: Instant) -> Option<Superblock> {
        let is_due = self.journal.is_unsaid() && now.saturating_duration_since(self.done_at) >= SAY_AFTER;
        is_due.then(|| self.journal.next_superblock(|_| {}))
    }

    /// Those that wait, and will not be answered.
    pub(super) fn lose(&mut self) {
        self.journal.lose();
    }

    // ---- checkpoints ----

    pub(super) fn begin_checkpoint(&mut self) -> Option<(Checkpoint<Folder>, Superblock)> {
        self.journal.begin_checkpoint()
    }

    pub(super) fn next_batch(&self, checkpoint: &mut Checkpoint<Folder>, store: &Store) -> Batch {
        checkpoint.next(&self.journal, store)
    }

    /// The last event. [`Kept::is_synced`] will hold soon.
    pub(super) fn want_sync(&mut self) -> u64 {
        self.is_wanted = true;
        self.stores.wake();
        self.journal.appended()
    }

    pub(super) fn is_synced(&self, event: u64) -> bool {
        self.journal.is_synced(event)
    }

    pub(super) fn journal(&mut self) -> &mut Journal<Folder> {
        &mut self.journal
    }

    // ---- scrubs ----

    pub(super) fn files(&self) -> &Arc<Folder> {
        &self.files
    }

    /// Whether the last scrub is a day ago.
    pub(super) fn is_scrub_due(&self, now: u64) -> bool {
        is_scrub_due(self.journal.scrubbed(), now)
    }

    /// All blocks were read: this superblock says so.
    pub(super) fn scrubbed(&mut self, now: u64) -> Superblock {
        self.journal.next_superblock(|superblock| superblock.scrubbed = now)
    }

    /// The server ends in peace. No event follows.
    pub(super) fn close(&mut self) -> Result<(), Failure> {
        if let Some(sync) = self.journal.begin_sync() {
            sync.run()?;
            self.synced(&sync);
        }
        let superblock = self.journal.next_superblock(|superblock| superblock.is_clean = true);
        write_superblock(&*self.files, superblock)
    }
}

/// Whether a copy is to be scrubbed at `now` that was last scrubbed at `last`, in seconds of the wall clock. A clock
/// that was set back says that `last` is still to come: how long ago it was is not known, so the copy is scrubbed.
fn is_scrub_due(last: u64, now: u64) -> bool {
    now.checked_sub(last).is_none_or(|since| since >= SCRUB_EVERY.as_secs())
}

/// What was answered is durable after this and one sync, although no client has asked for it.
pub(super) const SYNC_EVERY: Duration = Duration::from_millis(100);

/// After this time without a write, the superblock says what is durable. One more write and sync of a page; a writer
/// that pauses for less has its next record say it.
const SAY_AFTER: Duration = Duration::from_millis(500);

/// Scrubbing: how far the scrub of a copy is, and which client waits for it.
///
/// A copy is scrubbed once a day, slowly. A client that asks for it begins it anew, and it goes on as fast as the host
/// permits: one client at a time.
pub(super) struct Scrubbing {
    /// The block at which it goes on. `None`: none is under way.
    next: Option<u64>,
    findings: Findings,
    /// The client that waits for it, and when it was last told.
    asker: Option<(Connection, Instant)>,
    /// When the last one was complete, or the copy was made.
    ended: Instant,
}

impl Scrubbing {
    pub(super) fn new() -> Scrubbing {
        Scrubbing { next: None, findings: Findings::default(), asker: None, ended: Instant::now() }
    }

    /// A client wants to know what a scrub finds from now on. `false`: another one waits for its own.
    pub(super) fn ask(&mut self, connection: &Connection) -> bool {
        if self.asker.is_some() {
            return false;
        }
        self.asker = Some((connection.clone(), Instant::now()));
        (self.next, self.findings) = (Some(0), Findings::default());
        true
    }

    /// Whether a client waits.
    pub(super) fn is_asked(&self) -> bool {
        self.asker.is_some()
    }

    /// A connection is over.
    pub(super) fn leave(&mut self, connection: &Connection) {
        if self.asker.as_ref().is_some_and(|(asker, _)| asker == connection) {
            self.asker = None;
        }
    }

    /// The copy is gone. Returns the client that waits.
    pub(super) fn end(&mut self) -> Option<Connection> {
        self.next = None;
        self.asker.take().map(|(asker, _)| asker)
    }

    /// How many blocks were read. `None`: no scrub is under way.
    pub(super) fn under_way(&self) -> Option<u64> {
        self.next
    }

    /// Whether a copy that keeps no time of its own is to be scrubbed: the process has not ended since the last one.
    pub(super) fn is_due(&self) -> bool {
        self.ended.elapsed() >= SCRUB_EVERY
    }

    /// The blocks that are to be read now, of all blocks of the copy.
    pub(super) fn next_piece(&mut self, blocks: u64, is_due: bool) -> Option<Range<u64>> {
        if self.next.is_none() && is_due {
            (self.next, self.findings) = (Some(0), Findings::default());
        }
        self.next.map(|next| next..blocks.min(next + READ_AT_ONCE))
    }

    /// The blocks of `piece` were read, and this was found. Returns whether all blocks of the copy were read, and the
    /// client that is to be told.
    pub(super) fn read(
        &mut self,
        piece: &Range<u64>,
        blocks: u64,
        (repaired, damaged): (usize, usize),
    ) -> (bool, Option<(Connection, Findings)>) {
        if self.next != Some(piece.start) {
            return (false, None); // it was begun anew meanwhile
        }
        let is_complete = piece.end >= blocks;
        let Findings { repaired: were_repaired, damaged: were_damaged, .. } = self.findings;
        self.findings = Findings {
            read: piece.end,
            repaired: were_repaired + repaired as u64,
            damaged: were_damaged + damaged as u64,
            is_complete,
        };
        self.next = (!is_complete).then_some(piece.end);
        if is_complete {
            self.ended = Instant::now();
            return (true, self.asker.take().map(|(asker, _)| (asker, self.findings)));
        }
        let due = self.asker.as_mut().filter(|(_, told)| told.elapsed() >= TELL_EVERY);
        let told = due.map(|(asker, told)| {
            *told = Instant::now();
            asker.clone()
        });
        (false, told.map(|asker| (asker, self.findings)))
    }
}

/// A copy is scrubbed once a day.
const SCRUB_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// 1 MiB, ten times a second if no client waits: a copy of 1 GiB in 100 seconds.
const READ_AT_ONCE: u64 = 256;

/// How often a client that waits is told how far it is.
const TELL_EVERY: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::link::{Caller, Security};

    #[test]
    fn a_copy_is_scrubbed_once_a_day_and_after_the_clock_was_set_back() {
        let (day, last) = (SCRUB_EVERY.as_secs(), 1_000_000_000);
        assert!(!is_scrub_due(last, last));
        assert!(!is_scrub_due(last, last + day - 1));
        assert!(is_scrub_due(last, last + day));
        assert!(is_scrub_due(last, last - 1));
        assert!(is_scrub_due(0, last), "it was never scrubbed");
    }

    #[test]
    fn a_scrub_reads_every_block_once_and_then_waits_for_its_day() {
        let mut scrubbing = Scrubbing::new();
        assert_eq!(scrubbing.next_piece(600, false), None);
        let mut pieces = Vec::new();
        while let Some(piece) = scrubbing.next_piece(600, pieces.is_empty()) {
            let (is_complete, told) = scrubbing.read(&piece, 600, (1, 2));
            assert!(told.is_none() && is_complete == (piece.end == 600));
            pieces.push(piece);
        }
        assert_eq!(pieces, [0..256, 256..512, 512..600]);
        assert_eq!(scrubbing.findings, Findings { read: 600, repaired: 3, damaged: 6, is_complete: true });
        assert!(!scrubbing.is_due() && scrubbing.under_way().is_none());
    }

    #[test]
    fn a_scrub_is_for_one_client_at_a_time_and_goes_on_without_one_that_has_gone() {
        let client = || Caller::connect(&"tcp:127.0.0.1:1".parse().unwrap(), &Security::default()).unwrap();
        let (one, other) = (client(), client());
        let mut scrubbing = Scrubbing::new();
        assert!(scrubbing.ask(one.connection()) && !scrubbing.ask(other.connection()));
        let piece = scrubbing.next_piece(600, false).unwrap();
        assert!(!scrubbing.read(&piece, 600, (0, 1)).0);
        scrubbing.leave(other.connection());
        assert!(scrubbing.is_asked());
        scrubbing.leave(one.connection());
        let begun = scrubbing.next_piece(600, false).unwrap();
        assert!(!scrubbing.is_asked() && begun == (256..512));
        // The next client's begins anew. A piece of the former one does not count for it.
        assert!(scrubbing.ask(other.connection()));
        assert_eq!(scrubbing.read(&begun, 600, (0, 5)), (false, None));
        let mut last = (false, None);
        while let Some(piece) = scrubbing.next_piece(600, false) {
            last = scrubbing.read(&piece, 600, (0, 0));
        }
        let found = Findings { read: 600, is_complete: true, ..Findings::default() };
        assert_eq!(last, (true, Some((other.connection().clone(), found))));
    }
}
