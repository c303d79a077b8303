//! Keeper: the threads that keep copies right. One scrubs, and with stores moves blocks from the journals to the
//! extents. With stores, another one syncs, for every answer that waits at once. Neither holds a copy's lock while it
//! waits for the device.

use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::host::Host;
use super::kept::{SYNC_EVERY, Stores};
use super::slot::{Slot, State};
use crate::disk::checkpoint::{self, Findings};
use crate::disk::files::{Failure, Files, Name};
use crate::disk::journal::write_superblock;

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

/// Scrubs until the server ends, and makes checkpoints between.
pub(super) fn keep(host: &Host) {
    let mut next_round = Instant::now();
    while !host.is_stopping() {
        let now = Instant::now();
        let is_round = now >= next_round;
        if is_round {
            next_round = now + LOOK_AGAIN;
        }
        let mut is_asked = false;
        for slot in host.slots() {
            if is_round {
                checkpoint_one(host, &slot);
                say_synced(&slot);
            }
            is_asked |= scrub_some(&slot, is_round);
        }
        std::thread::sleep(if is_asked { PIECE_PAUSE } else { LOOK_AGAIN });
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

/// Writes into the superblock what is durable, if no record says it.
fn say_synced(slot: &Slot) {
    let mut state = slot.lock();
    let Some(kept) = state.kept() else { return };
    let (number, files) = (kept.number(), Arc::clone(kept.files()));
    let Some(superblock) = kept.say_synced(Instant::now()) else { return };
    drop(state);
    if let Err(failure) = write_superblock(&*files, superblock) {
        let mut state = slot.lock();
        if state.kept().is_some_and(|kept| kept.number() == number) {
            state.lose(&failure);
        }
    }
}

/// Reads some blocks, if a scrub is due in this round, or a client waits for it. Returns whether one does.
fn scrub_some(slot: &Slot, is_round: bool) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut state = slot.lock();
    if !is_round && !state.is_scrub_asked() {
        return false;
    }
    let Some(piece) = state.next_piece(now) else { return false };
    let mut findings = Findings::default();
    let moved = state.scrub_memory(piece.clone(), &mut findings);
    let Some((kept, memory)) = state.kept_and_memory() else {
        state.scrubbed(&piece, &findings, now);
        return state.is_scrub_asked();
    };
    let (number, files, layout) = (kept.number(), Arc::clone(kept.files()), memory.layout());
    drop(state);
    let bad = checkpoint::in_extents(&*files, layout, &moved);
    let mut state = slot.lock();
    let Some((kept, memory)) = state.kept_and_memory().filter(|(kept, _)| kept.number() == number) else {
        return false; // it was lost meanwhile
    };
    let repaired = checkpoint::repair(kept.journal(), memory, &bad, &mut findings);
    if !findings.repaired.is_empty() {
        let blocks = &findings.repaired;
        tracing::error!(file = files.path(Name::Extents), ?blocks, "blocks were damaged in a store, and are repaired");
    }
    let superblock = state.scrubbed(&piece, &findings, now);
    let is_asked = state.is_scrub_asked();
    drop(state);
    let written = superblock.map(|superblock| write_superblock(&*files, superblock)).transpose();
    if let Err(failure) = repaired.and(written) {
        let mut state = slot.lock();
        if state.kept().is_some_and(|kept| kept.number() == number) {
            match failure {
                Failure::Full { .. } => tracing::warn!(%failure, "a damaged block could not be written again"),
                Failure::Lost { .. } => state.lose(&failure),
            }
        }
    }
    is_asked
}

/// Threads of the keeper: one that scrubs, and with stores one that syncs.
pub(super) fn start(host: &Arc<Host>) -> std::io::Result<Vec<JoinHandle<()>>> {
    let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| std::thread::Builder::new().name(name.into()).spawn(run);
    let shared = Arc::clone(host);
    let mut threads = vec![spawn("volume-keeper", Box::new(move || keep(&shared)))?];
    if let Some(stores) = host.stores() {
        let (shared, stores) = (Arc::clone(host), Arc::clone(stores));
        match spawn("volume-sync", Box::new(move || sync(&shared, &stores))) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                host.stop();
                for thread in threads {
                    let _ = thread.join(); // a panic was reported where it happened
                }
                return Err(error);
            }
        }
    }
    Ok(threads)
}

/// How often it is looked whether a checkpoint or a scrub is due: a segment takes longer to fill.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// While a checkpoint waits for a sync, which takes some of these.
const SYNC_PAUSE: Duration = Duration::from_millis(2);

/// Between two pieces of a scrub for which a client waits: writers get the copy's lock meanwhile.
const PIECE_PAUSE: Duration = Duration::from_millis(1);
