//! Keeper: the two threads of a server with stores. One syncs, for every answer that waits at once. The other one moves
//! blocks from the journals to the extents. Neither holds a copy's lock while it waits for the device.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use super::host::Host;
use super::kept::{SYNC_EVERY, Stores};
use super::slot::{Slot, State};
use crate::disk::files::Failure;

/// Syncs until the server ends.
pub(super) fn sync(host: &Host, stores: &Stores) {
    while !host.is_stopping() {
        stores.wait(SYNC_EVERY);
        for slot in host.slots() {
            sync_one(&slot);
        }
    }
}

fn sync_one(slot: &Slot) {
    let mut state = slot.lock();
    let Some(kept) = state.kept() else { return };
    let number = kept.number();
    let Some(sync) = kept.begin_sync(Instant::now()) else { return };
    drop(state);
    let result = sync.run();
    let mut state = slot.lock();
    if state.kept().is_none_or(|kept| kept.number() != number) {
        return; // it was lost meanwhile
    }
    match result {
        Ok(()) => state.synced(&sync),
        Err(failure) => state.lose(&failure),
    }
}

/// Makes checkpoints until the server ends.
pub(super) fn checkpoint(host: &Host) {
    while !host.is_stopping() {
        for slot in host.slots() {
            checkpoint_one(host, &slot);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// A checkpoint, if one is due.
fn checkpoint_one(host: &Host, slot: &Slot) {
    let mut state = slot.lock();
    let Some(kept) = state.kept() else { return };
    let (number, begun) = (kept.number(), kept.begin_checkpoint());
    let Some((mut checkpoint, superblock)) = begun else { return };
    drop(state);
    // The copy's lock, as long as the store is the same.
    let lock = || -> Option<MutexGuard<'_, State>> {
        let mut state = slot.lock();
        let is_same = !host.is_stopping() && state.kept().is_some_and(|kept| kept.number() == number);
        is_same.then_some(state)
    };
    let began = Instant::now();
    let mut copy = || -> Result<Option<()>, Failure> {
        checkpoint.announce(superblock)?;
        loop {
            let Some(state) = lock() else { return Ok(None) };
            let batch = state.next_batch(&mut checkpoint);
            drop(state);
            if batch.is_empty() {
                break;
            }
            checkpoint.write(&batch)?;
        }
        let Some(event) = lock().and_then(|mut state| state.kept().map(|kept| kept.want_sync())) else {
            return Ok(None);
        };
        loop {
            let Some(mut state) = lock() else { return Ok(None) };
            if state.kept().is_some_and(|kept| kept.is_synced(event)) {
                break;
            }
            drop(state);
            std::thread::sleep(SYNC_PAUSE);
        }
        checkpoint.sync()?;
        let superblock = lock().and_then(|mut state| state.kept().map(|kept| checkpoint.superblock(kept.journal())));
        superblock.map(|superblock| checkpoint.complete(superblock)).transpose()
    };
    let result = copy();
    let Some(mut state) = lock() else { return };
    match (result, state.kept()) {
        (Ok(_), Some(kept)) => {
            checkpoint.end(kept.journal());
            tracing::debug!(took = ?began.elapsed(), "a checkpoint of a copy");
        }
        (Err(failure @ Failure::Full { .. }), Some(kept)) => {
            tracing::warn!(%failure, "a checkpoint was given up: the journal grows until the next one");
            checkpoint.give_up(kept.journal());
        }
        (Err(failure), _) => state.lose(&failure),
        (Ok(_), None) => {}
    }
}

/// Threads of the keeper.
pub(super) fn start(host: &Arc<Host>, stores: &Arc<Stores>) -> std::io::Result<[std::thread::JoinHandle<()>; 2]> {
    let (syncing, shared, stores) = (Arc::clone(host), Arc::clone(host), Arc::clone(stores));
    let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| std::thread::Builder::new().name(name.into()).spawn(run);
    let sync = spawn("volume-sync", Box::new(move || sync(&syncing, &stores)))?;
    match spawn("volume-checkpoint", Box::new(move || checkpoint(&shared))) {
        Ok(checkpoint) => Ok([sync, checkpoint]),
        Err(error) => {
            host.stop();
            let _ = sync.join(); // a panic was reported where it happened
            Err(error)
        }
    }
}

impl Host {
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping().load(Ordering::Acquire)
    }
}

/// How often the checkpoints' thread looks whether one is due: a segment takes longer to fill.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// While a checkpoint waits for a sync, which takes some of these.
const SYNC_PAUSE: Duration = Duration::from_millis(2);
