//! Meter: the delivery's progress, for the progress bar, the source and the hand-off.
//!
//! Plain atomics, all written by the delivery thread, and one text, which the server's keeper writes. Bytes and slots
//! count the snapshot; offsets are replication offsets.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Counters that the delivery thread writes and other tasks read.
#[derive(Default)]
pub(super) struct Meter {
    /// Slots that have arrived and match their checksums.
    pub(super) slots_held: Count,
    /// The first slot that is still needed from the source.
    pub(super) slots_below: Count,
    /// Bytes of the snapshot that have arrived.
    pub(super) bytes_fetched: Count,
    /// Bytes of the snapshot given to the server.
    pub(super) bytes_delivered: Count,
    /// Bytes of all payloads that the server was given, their headers included. Never set back.
    pub(super) bytes_given: Count,
    /// 1 once the server was given the end of a payload. Never set back.
    pub(super) end_given: Count,
    /// Bytes that the source has published so far.
    pub(super) bytes_known: Count,
    /// Slots of the whole snapshot; 0 while unknown.
    pub(super) slots_total: Count,
    /// 1 once the server's module was given memory.
    pub(super) by_module: Count,
    /// Bytes that it loaded from there.
    pub(super) referred: Count,
    /// Why the server does not load in the fast way; empty if it does, or if that is not decided yet.
    no_fast_keys: Mutex<String>,
    /// The oldest slot of a copy that others may read.
    pub(super) copy_oldest: Count,
    /// 1 while a copy waits for its own server.
    pub(super) copy_full: Count,
    /// The session of the replica that slots come from; 0: from the source.
    pub(super) reads_from: Count,
    /// The last byte of the stream that has arrived.
    pub(super) stream_fetched: Count,
    /// 1 while the stream is not read, because too much of it waits for the server: its end is not known then.
    pub(super) stream_paused: Count,
    /// The last byte of the stream given to the server.
    pub(super) stream_delivered: Count,
    /// The last byte of the stream that the server acknowledged.
    pub(super) acknowledged: Count,
    /// Connections to the link's port that were closed before they had logged in.
    pub(super) strangers: Count,
}

impl Meter {
    /// Why the server does not load in the fast way; empty if it does.
    pub(super) fn set_no_fast_keys(&self, why: &str) {
        why.clone_into(&mut self.no_fast_keys.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn no_fast_keys(&self) -> String {
        self.no_fast_keys.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts bytes of a payload that the server was given, and returns their number.
    pub(super) fn give(&self, bytes: usize) -> usize {
        self.bytes_given.add(bytes as u64);
        bytes
    }
}

/// A number with one writer.
#[derive(Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(super) fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    pub(super) fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }
}
