//! Meter: how far a transfer is, for the progress bar, the source and the hand-off.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

/// Counters that the thread which reads writes, and other tasks read. Bytes and slots count the snapshot; offsets are
/// replication offsets.
#[derive(Default)]
pub struct Meter {
    /// Slots that have arrived and match their checksums.
    pub slots_held: Count,
    /// The first slot that is still needed from the source.
    pub slots_below: Count,
    /// Bytes of the snapshot that have arrived.
    pub bytes_fetched: Count,
    /// Bytes of the snapshot given to the server.
    pub bytes_delivered: Count,
    /// Bytes of all payloads that the server was given, their headers included. Never set back.
    pub bytes_given: Count,
    /// 1 once the server was given the end of a payload. Never set back.
    pub end_given: Count,
    /// Bytes that the source has published so far.
    pub bytes_known: Count,
    /// Slots of the whole snapshot; 0 while unknown.
    pub slots_total: Count,
    /// 1 once the server's module was given memory.
    pub by_module: Count,
    /// Bytes that it loaded from there.
    pub referred: Count,
    /// Why the server does not load in the fast way; empty if it does, or if that is not decided yet.
    no_fast_keys: Mutex<String>,
    /// The oldest slot of a copy that others may read.
    pub copy_oldest: Count,
    /// 1 while a copy waits for its own server.
    pub copy_full: Count,
    /// The session of the replica that slots come from; 0: from the source.
    pub reads_from: Count,
    /// The last byte of the stream that has arrived.
    pub stream_fetched: Count,
    /// 1 while the stream is not read, because too much of it waits for the server: its end is not known then.
    pub stream_paused: Count,
    /// Bytes that the source can write to its journal until it overwrites what is needed next. As of the last look
    /// while the stream was not read; 0 before.
    pub journal_left: Count,
    /// What it has written by then since the journal began.
    pub journal_written: Count,
    /// The last byte of the stream given to the server.
    pub stream_delivered: Count,
    /// The last byte of the stream that the server acknowledged.
    pub acknowledged: Count,
    /// Connections to the link's port that were closed before they had logged in.
    pub strangers: Count,
}

impl Meter {
    /// Why the server does not load in the fast way; empty if it does.
    pub fn set_no_fast_keys(&self, why: &str) {
        why.clone_into(&mut self.no_fast_keys.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Why the server does not load in the fast way; empty if it does, or if that is not decided yet.
    pub fn no_fast_keys(&self) -> String {
        self.no_fast_keys.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts bytes of a payload that the server was given, and returns their number.
    pub fn give(&self, bytes: usize) -> usize {
        self.bytes_given.add(bytes as u64);
        bytes
    }
}

/// A number with one writer.
#[derive(Default)]
pub struct Count(AtomicU64);

impl Count {
    /// The number.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Sets the number.
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// Adds to the number.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }
}
