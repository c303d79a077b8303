//! Reading: bytes of files, out of the disk.
//!
//! Where the blocks are is looked up under the lock. Until the read is over, no cluster that is freed meanwhile is
//! given to another file. A read returns every write that was acknowledged before it began.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::core::{Caller, Core};
use super::error::FilesError;
use super::parts::{BLOCK, Piece, blocks_of, clusters_of, pieces, zeros};
use crate::client::{self, Request};
use crate::shape::BLOCK_BYTES;
use crate::wire::{MOST_BLOCKS, Run};

/// What is read: pieces, one after the other.
pub(super) type Pieces = Vec<Bytes>;

/// A part of a read: zeros, or blocks of the disk.
#[derive(Clone, Copy)]
enum Part {
    Zeros(u64),
    Blocks(Run),
}

fn parts(pieces: &[Piece]) -> Vec<Part> {
    let mut parts = Vec::with_capacity(pieces.len());
    for Piece { count, at, .. } in pieces {
        match at {
            None => parts.push(Part::Zeros(*count)),
            Some(at) => {
                let runs = (0..*count).step_by(MOST_BLOCKS);
                parts.extend(runs.map(|skipped| {
                    let count = (*count - skipped).min(MOST_BLOCKS as u64) as u32;
                    Part::Blocks(Run { first: at + skipped, count })
                }));
            }
        }
    }
    parts
}

/// The bytes of a range, out of the blocks in which it is.
fn cut(parts: &[Part], read: Vec<Bytes>, range: &Range<u64>) -> Pieces {
    let mut skipped = (range.start % BLOCK) as usize;
    let mut left = (range.end - range.start) as usize;
    let mut found = Vec::with_capacity(parts.len());
    for (part, data) in parts.iter().zip(read) {
        let length = match part {
            Part::Zeros(count) => (*count * BLOCK) as usize,
            Part::Blocks(run) => run.count as usize * BLOCK_BYTES,
        };
        let take = (length - skipped).min(left);
        match part {
            Part::Zeros(_) => found.extend(zeros(take)),
            Part::Blocks(_) => found.push(data.slice(skipped..skipped + take)),
        }
        (skipped, left) = (0, left - take);
    }
    found
}

/// A read that waits for the disk.
struct Pending {
    parts: Vec<Part>,
    range: Range<u64>,
    read: Vec<Bytes>,
    left: usize,
    error: Option<client::Error>,
    caller: Option<Caller<Pieces>>,
}

impl Core {
    /// Reads bytes of a file, as far as it has them.
    pub(super) fn read(self: &Arc<Core>, ino: u64, range: Range<u64>, caller: Caller<Pieces>) {
        let mut state = self.state();
        let found = self.check().and_then(|()| {
            let blocks = blocks_of(&range);
            let (size, runs) = state.names.file(ino, clusters_of(&blocks))?;
            let range = range.start.min(size)..range.end.min(size);
            Ok((pieces(state.names.head().geometry, &runs, blocks_of(&range)), range))
        });
        let (pieces, range) = match found {
            Ok((pieces, range)) if !range.is_empty() => (pieces, range),
            found => {
                drop(state);
                return caller.tell(found.map(|_| Vec::new()));
            }
        };
        let parts = parts(&pieces);
        let number = state.names.begin_read();
        let left = parts.iter().filter(|part| matches!(part, Part::Blocks(_))).count();
        // A write that is on its way to the disk is perhaps the one that has made the file longer. Holes need no disk.
        if left == 0 || self.has_submitted_all() {
            drop(state);
            if let Some(read) = self.read_here(&parts) {
                self.end_read(number);
                return caller.tell(Ok(cut(&parts, read, &range)));
            }
            state = self.state();
        }
        let read = vec![Bytes::new(); parts.len()];
        let asked = parts.clone();
        let pending = Pending { parts, range, read, left, error: None, caller: Some(caller) };
        let pending = Arc::new(Mutex::new(pending));
        for (place, part) in asked.into_iter().enumerate() {
            let Part::Blocks(run) = part else { continue };
            let (core, pending) = (Arc::downgrade(self), Arc::clone(&pending));
            let done = move |result| {
                let Some(last) = arrived(&pending, place, result) else { return };
                if let Some(core) = core.upgrade() {
                    core.visit(|| core.end_read(number));
                }
                last();
            };
            self.put_for(Request::Read(run), Box::new(done));
        }
        drop(state);
        self.submit();
    }

    /// All of them, if this thread can have them at once.
    fn read_here(&self, parts: &[Part]) -> Option<Vec<Bytes>> {
        let read = |part: &Part| match part {
            Part::Zeros(_) => Some(Bytes::new()),
            Part::Blocks(run) => self.try_read(*run),
        };
        parts.iter().map(read).collect()
    }
}

/// A part has arrived. After the last one: what tells the caller.
fn arrived(
    pending: &Mutex<Pending>,
    place: usize,
    result: Result<Bytes, client::Error>,
) -> Option<impl FnOnce() + use<>> {
    let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
    match result {
        Ok(data) => pending.read[place] = data,
        Err(error) => pending.error = Some(error),
    }
    pending.left -= 1;
    if pending.left > 0 {
        return None;
    }
    let (caller, error) = (pending.caller.take()?, pending.error.take());
    let (parts, read) = (std::mem::take(&mut pending.parts), std::mem::take(&mut pending.read));
    let range = pending.range.clone();
    Some(move || {
        let result = error.map_or_else(|| Ok(cut(&parts, read, &range)), |error| Err(FilesError::Disk(error)));
        caller.tell(result);
    })
}
