//! A volume as a block device, by the NBD protocol.
//!
//! Blocks of 4 KiB. A write is answered when as many copies as must hold it have applied it, and a flush when every
//! write before it is. Zeros and trims are writes of zeros, for which no bytes are sent. Every block keeps its place in
//! the memory and the store of each copy, so holes give none of it away, and `NO_HOLE` asks for nothing more. In block
//! status, such blocks and those that were never written are holes. What is longer than one write of the volume is
//! several: if this process dies, a part of it may be there, as with any disk.
//!
//! Clients are told of blocks of 4 KiB. Some send smaller requests all the same: old kernels, firmware, `nbd-client`
//! before 3.25 with its 512 bytes. Any bytes are served: a change of a part of a block reads the block first, and is
//! then a write of all of it. Meanwhile the change has claimed the block, and every other one that touches it waits, so
//! parts of one block undo nothing of each other. A trim of a part of a block does nothing to that part.
//!
//! A read of blocks that are in memory of this host, and have no write under way, is answered at once by the
//! connection's thread. Everything else is answered by the volume's.
//!
//! When the volume has ended, requests fail with `ESHUTDOWN`, and the reason is logged once.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use remora_nbd::device::{Answer, Later, Payload};
use remora_nbd::protocol::extent_flags::{HOLE, ZERO};
use remora_nbd::protocol::{Errno, Extent, Failure};
use remora_nbd::request::Zero;
use remora_nbd::server::{Bound, StartError};
use remora_nbd::{Address, Device, Geometry, Offer, Server, ServerOptions};

use crate::client::{Error, LEAST_SUBMITTED_BYTES, Request, Volume, is_set};
use crate::shape::BLOCK_BYTES;
use crate::wire::{MOST_BLOCKS, MOST_ENTRIES, Run};

/// A volume that is served. When it is dropped, connections end first, and then the volume.
pub struct VolumeServer {
    device: Arc<VolumeDevice>,
    /// `None` while it is dropped.
    server: Option<Server>,
}

impl VolumeServer {
    /// Serves a volume under this name.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(volume: Volume, name: &str, options: &ServerOptions) -> Result<VolumeServer, StartError> {
        let bound = Bound::new(options)?;
        VolumeServer::serve(volume, name, bound)
    }

    /// Serves it at a place where it listens already.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn serve(volume: Volume, name: &str, bound: Bound) -> Result<VolumeServer, StartError> {
        let device = Arc::new(VolumeDevice::new(volume));
        let shape = device.volume.shape();
        let copies = shape.copies().number();
        let description = format!("a volume of {} blocks of {BLOCK_BYTES} bytes, {copies} copies", shape.blocks());
        let offer = Offer { name: name.to_owned(), description, device: Arc::clone(&device) as Arc<dyn Device> };
        let server = Some(Server::serve(vec![offer], bound)?);
        Ok(VolumeServer { device, server })
    }

    /// Where it listens.
    pub fn address(&self) -> Option<&Address> {
        self.server.as_ref().map(Server::address)
    }

    /// The volume.
    pub fn volume(&self) -> &Volume {
        &self.device.volume
    }
}

impl Drop for VolumeServer {
    fn drop(&mut self) {
        // A connection may wait for a volume that waits for its servers.
        self.device.close();
        self.server = None;
    }
}

/// A volume as a device.
pub struct VolumeDevice {
    volume: Volume,
    shared: Arc<Shared>,
    claims: Claims,
}

/// What requests under way have in common.
#[derive(Default)]
struct Shared {
    /// Bytes of parts that were submitted and are not done.
    under_way: Mutex<usize>,
    changed: Condvar,
    is_closed: AtomicBool,
    /// The volume's end was logged.
    is_told: AtomicBool,
}

impl VolumeDevice {
    /// The device. Nothing else submits requests to its volume.
    pub fn new(volume: Volume) -> VolumeDevice {
        VolumeDevice { volume, shared: Arc::default(), claims: Claims::default() }
    }

    /// From now on, no call waits for the volume, and every request fails.
    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::Release);
        let under_way = self.shared.under_way();
        self.shared.changed.notify_all();
        drop(under_way);
    }

    /// Submits the parts of one change, and then a flush if it must be safe. `later` is answered after the last one.
    fn change(&self, parts: impl ExactSizeIterator<Item = Request>, fua: bool, later: Later) {
        if let Err(error) = self.volume.has_space() {
            return later.fail(&self.shared.failure(&error));
        }
        let number = parts.len();
        let joined = Joined::new(number + usize::from(fua), Asked::Done, later, &self.shared);
        for (part, request) in parts.enumerate() {
            self.submit(part, request, &joined);
        }
        // It is submitted after the parts, so it is done when they are.
        if fua {
            self.submit(number, Request::Flush, &joined);
        }
    }

    fn submit(&self, part: usize, request: Request, joined: &Arc<Joined>) {
        let bytes = match &request {
            Request::Write { data, .. } => data.len(),
            Request::Read(run) => run.count as usize * BLOCK_BYTES,
            Request::Zero(_) => ZEROS_COUNT_AS,
            Request::Map(_) | Request::Flush => 0,
        };
        if !self.shared.wait_for_room(bytes, &self.volume) {
            return joined.completed(part, Err(Error::Closed));
        }
        let done = Arc::clone(joined);
        let submitted = self.volume.submit(request, move |result| {
            done.shared.done(bytes);
            done.completed(part, result);
        });
        if let Err(error) = submitted {
            self.shared.done(bytes);
            joined.completed(part, Err(error));
        }
    }

    /// Blocks that the connection's own thread finds in memory of this host: no other thread is woken for them.
    fn read_here(&self, first: u64, count: u64) -> Option<Bytes> {
        let count = u32::try_from(count).ok().filter(|count| *count as usize <= MOST_BLOCKS)?;
        if self.shared.is_closed.load(Ordering::Acquire) {
            return None;
        }
        // What is wrong with it is said when it is submitted.
        self.volume.try_read(Run { first, count }).ok().flatten()
    }

    /// The bytes of a change, with what else is in the first and in the last of their blocks. To be called with these
    /// blocks claimed.
    fn around(&self, at: u64, data: Bytes) -> Result<Bytes, Error> {
        let end = at + data.len() as u64;
        if is_whole(at) && is_whole(end) {
            return Ok(data);
        }
        let blocks = touched(at, data.len() as u64);
        let mut whole = BytesMut::zeroed((blocks.end - blocks.start) as usize * BLOCK_BYTES);
        let (first, last) = (blocks.start, blocks.end - 1);
        if !is_whole(at) || first == last {
            whole[..BLOCK_BYTES].copy_from_slice(&self.block_now(first)?);
        }
        if first != last && !is_whole(end) {
            let from = whole.len() - BLOCK_BYTES;
            whole[from..].copy_from_slice(&self.block_now(last)?);
        }
        let from = within(at);
        whole[from..from + data.len()].copy_from_slice(&data);
        Ok(whole.freeze())
    }

    /// What a block holds after every change that was submitted. Waits for it.
    fn block_now(&self, first: u64) -> Result<Bytes, Error> {
        if let Some(here) = self.read_here(first, 1) {
            return Ok(here);
        }
        if !self.shared.wait_for_room(BLOCK_BYTES, &self.volume) {
            return Err(Error::Closed);
        }
        let (told, is_told) = mpsc::sync_channel(1);
        let shared = Arc::clone(&self.shared);
        let submitted = self.volume.submit(Request::Read(Run { first, count: 1 }), move |result| {
            shared.done(BLOCK_BYTES);
            let _ = told.send(result); // the device may be closed
        });
        if let Err(error) = submitted {
            self.shared.done(BLOCK_BYTES);
            return Err(error);
        }
        loop {
            match is_told.recv_timeout(LOOK_AGAIN) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) if !self.shared.is_closed.load(Ordering::Acquire) => {}
                Err(_) => return Err(Error::Closed),
            }
        }
    }

    /// Makes bytes zeros; of whole blocks, none is sent.
    fn zeros(&self, at: u64, length: u32, fua: bool, answer: Answer<'_>) {
        let end = at + u64::from(length);
        let (later, _claim) = (answer.later(), self.claims.claim(touched(at, length.into())));
        let whole = at.div_ceil(BLOCK)..end / BLOCK;
        // Less than a block on each side, or less than two blocks at all.
        let edges = match whole.is_empty() {
            true => [at..end, end..end],
            false => [at..whole.start * BLOCK, whole.end * BLOCK..end],
        };
        let mut parts = Vec::new();
        for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
            let zeros = Bytes::from(vec![0; (edge.end - edge.start) as usize]);
            match self.around(edge.start, zeros) {
                Ok(whole) => parts.push(Request::write(block(edge.start), whole)),
                Err(error) => return later.fail(&self.shared.failure(&error)),
            }
        }
        parts.extend(runs(whole, MOST_ENTRIES as u32).map(Request::Zero));
        self.change(parts.into_iter(), fua, later);
    }
}

impl Device for VolumeDevice {
    fn geometry(&self) -> Geometry {
        let size = self.volume.shape().blocks() * BLOCK_BYTES as u64;
        Geometry { accepted: 1, fast_zero: true, has_status: true, ..Geometry::of_blocks(size, BLOCK_BYTES as u32) }
    }

    fn read(&self, at: u64, length: u32, answer: Answer<'_>) {
        let (blocks, asked) = (touched(at, length.into()), within(at)..within(at) + length as usize);
        if let Some(data) = self.read_here(blocks.start, blocks.end - blocks.start) {
            return answer.data(|sink| sink.put(&data[asked]));
        }
        let parts = runs(blocks, MOST_BLOCKS as u32);
        let joined = Joined::new(parts.len(), Asked::Bytes(asked), answer.later(), &self.shared);
        for (part, run) in parts.enumerate() {
            self.submit(part, Request::Read(run), &joined);
        }
    }

    fn write(&self, at: u64, data: Payload<'_>, fua: bool, answer: Answer<'_>) {
        let data = data.into_bytes();
        let blocks = touched(at, data.len() as u64);
        let (later, _claim) = (answer.later(), self.claims.claim(blocks.clone()));
        let data = match self.around(at, data) {
            Ok(data) => data,
            Err(error) => return later.fail(&self.shared.failure(&error)),
        };
        let from = blocks.start;
        let parts = runs(blocks, MOST_BLOCKS as u32).map(|run| {
            let start = (run.first - from) as usize * BLOCK_BYTES;
            Request::write(run.first, data.slice(start..start + run.count as usize * BLOCK_BYTES))
        });
        self.change(parts, fua, later);
    }

    fn zero(&self, at: u64, length: u32, how: Zero, answer: Answer<'_>) {
        self.zeros(at, length, how.fua, answer);
    }

    fn trim(&self, at: u64, length: u32, fua: bool, answer: Answer<'_>) {
        let whole = at.div_ceil(BLOCK)..(at + u64::from(length)) / BLOCK;
        let (later, _claim) = (answer.later(), self.claims.claim(whole.start..whole.end.max(whole.start)));
        if whole.is_empty() && !fua {
            return later.done();
        }
        self.change(runs(whole, MOST_ENTRIES as u32).map(Request::Zero), fua, later);
    }

    fn flush(&self, answer: Answer<'_>) {
        let joined = Joined::new(1, Asked::Done, answer.later(), &self.shared);
        self.submit(0, Request::Flush, &joined);
    }

    /// Of the first blocks, as many as the servers say at once. The client asks again behind them.
    fn status(&self, at: u64, length: u32, answer: Answer<'_>) {
        let Run { first, count } = runs(touched(at, length.into()), MOST_ENTRIES as u32).next().unwrap_or(NO_BLOCKS);
        let joined = Joined::new(1, Asked::Holes { count, skipped: within(at) as u32 }, answer.later(), &self.shared);
        self.submit(0, Request::Map(Run { first, count }), &joined);
    }
}

impl Shared {
    /// Waits until this number of bytes may be submitted. The volume itself then never makes its caller wait, which
    /// could not be ended. Returns whether requests are submitted at all.
    fn wait_for_room(&self, bytes: usize, volume: &Volume) -> bool {
        let is_closed = || self.is_closed.load(Ordering::Acquire);
        let mut under_way = self.under_way();
        // A volume that has ended answers at once.
        while !is_closed() && *under_way + bytes > MOST_BYTES && volume.end().is_none() {
            let waited = self.changed.wait_timeout(under_way, LOOK_AGAIN);
            under_way = waited.map_or_else(|poison| poison.into_inner().0, |(under_way, _)| under_way);
        }
        if is_closed() {
            return false;
        }
        *under_way += bytes;
        true
    }

    fn done(&self, bytes: usize) {
        *self.under_way() -= bytes;
        self.changed.notify_one();
    }

    fn under_way(&self) -> MutexGuard<'_, usize> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a client is told, and, the first time that the volume has ended, the log.
    fn failure(&self, error: &Error) -> Failure {
        let errno = match error {
            Error::Ended(_) | Error::Closed => Errno::Shutdown,
            Error::OutOfBounds { .. } | Error::Misuse => Errno::Invalid,
            Error::NoSpace { .. } => Errno::NoSpace,
            _ => Errno::Io,
        };
        if matches!(error, Error::Ended(_)) && !self.is_told.swap(true, Ordering::Relaxed) {
            tracing::error!("NBD clients get no answer from this volume any more: {error}");
        }
        Failure::new(errno, error.to_string())
    }
}

/// Several requests with one answer.
struct Joined {
    asked: Asked,
    state: Mutex<State>,
    shared: Arc<Shared>,
}

/// What the answer is.
#[derive(Clone)]
enum Asked {
    /// That it is done.
    Done,
    /// These bytes of the blocks.
    Bytes(Range<usize>),
    /// Which of this number of blocks are holes, from so many bytes behind the beginning of the first one on.
    Holes { count: u32, skipped: u32 },
}

struct State {
    /// What each has read; empty for the others.
    data: Vec<Bytes>,
    left: usize,
    /// The first one.
    error: Option<Error>,
    later: Option<Later>,
}

impl Joined {
    fn new(parts: usize, asked: Asked, later: Later, shared: &Arc<Shared>) -> Arc<Joined> {
        let state = State { data: vec![Bytes::new(); parts], left: parts, error: None, later: Some(later) };
        Arc::new(Joined { asked, state: Mutex::new(state), shared: Arc::clone(shared) })
    }

    /// One of them is done.
    fn completed(&self, part: usize, result: Result<Bytes, Error>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.left -= 1;
        match (result, state.data.get_mut(part)) {
            (Ok(read), Some(data)) => *data = read,
            (Err(error), _) => _ = state.error.get_or_insert(error),
            _ => {}
        }
        if state.left > 0 {
            return;
        }
        let (data, error, later) = (std::mem::take(&mut state.data), state.error.take(), state.later.take());
        drop(state);
        match (error, later, self.asked.clone()) {
            (None, Some(later), Asked::Bytes(asked)) => later.data(cut(data, asked)),
            (None, Some(later), Asked::Holes { count, skipped }) => {
                later.extents(extents(data.first(), count, skipped));
            }
            (None, Some(later), Asked::Done) => later.done(),
            (Some(error), Some(later), _) => later.fail(&self.shared.failure(&error)),
            (_, None, _) => {}
        }
    }
}

/// Blocks that changes are about to change. Each is claimed from before its content is looked at until the change is
/// submitted: the volume keeps the order in which changes are submitted.
#[derive(Default)]
struct Claims {
    claimed: Mutex<Vec<Range<u64>>>,
    changed: Condvar,
}

/// Some claimed blocks. Dropping it lets the next one have them.
struct Claim<'a> {
    claims: &'a Claims,
    blocks: Range<u64>,
}

impl Claims {
    /// Waits until nobody has one of these blocks claimed: as long as another request takes to be submitted, which ends
    /// at the latest when the device is closed.
    fn claim(&self, blocks: Range<u64>) -> Claim<'_> {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        #[cfg(test)]
        let blocks = if crate::rules::Mutant::BlocksNotClaimed.is_active() { 0..0 } else { blocks };
        let has_common = |other: &Range<u64>| blocks.start.max(other.start) < blocks.end.min(other.end);
        while claimed.iter().any(has_common) {
            claimed = self.changed.wait(claimed).unwrap_or_else(PoisonError::into_inner);
        }
        claimed.push(blocks.clone());
        Claim { claims: self, blocks }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut claimed = self.claims.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = claimed.iter().position(|blocks| *blocks == self.blocks) {
            claimed.swap_remove(at);
        }
        drop(claimed);
        self.claims.changed.notify_all();
    }
}

/// The block at which a byte is.
fn block(at: u64) -> u64 {
    at / BLOCK
}

/// How far behind the beginning of its block a byte is.
fn within(at: u64) -> usize {
    (at % BLOCK) as usize
}

fn is_whole(at: u64) -> bool {
    within(at) == 0
}

/// The blocks in which bytes are.
fn touched(at: u64, length: u64) -> Range<u64> {
    block(at)..(at + length).div_ceil(BLOCK)
}

/// Blocks as runs of at most `most` blocks.
fn runs(blocks: Range<u64>, most: u32) -> impl ExactSizeIterator<Item = Run> {
    // A request has less than 2^32 bytes.
    let (first, count) = (blocks.start, blocks.end.saturating_sub(blocks.start) as u32);
    (0..count.div_ceil(most))
        .map(move |part| Run { first: first + u64::from(part * most), count: most.min(count - part * most) })
}

/// Of the bytes that these pieces are, those in this range.
fn cut(mut data: Vec<Bytes>, asked: Range<usize>) -> Vec<Bytes> {
    if let Some(first) = data.first_mut() {
        *first = first.slice(asked.start.min(first.len())..);
    }
    let mut left = asked.len();
    for piece in &mut data {
        piece.truncate(left);
        left -= piece.len();
    }
    data
}

/// What the bits of a map say.
fn extents(bits: Option<&Bytes>, count: u32, skipped: u32) -> impl Iterator<Item = Extent> {
    let bits = bits.cloned().unwrap_or_default();
    (0..count as usize).map(move |block| {
        let flags = if is_set(&bits, block) { HOLE | ZERO } else { 0 };
        Extent { length: BLOCK_BYTES as u32 - if block == 0 { skipped } else { 0 }, flags }
    })
}

/// Bytes of a block.
const BLOCK: u64 = BLOCK_BYTES as u64;

/// A run that no request has.
const NO_BLOCKS: Run = Run { first: 0, count: 0 };

/// What a write of zeros counts as, in bytes: so many are submitted at a time that no call waits for the volume.
const ZEROS_COUNT_AS: usize = 64 << 10;

/// Bytes that are submitted at a time: less than what the volume takes without waiting.
const MOST_BYTES: usize = 24 << 20;

const _: () = assert!(MOST_BYTES >= MOST_BLOCKS * BLOCK_BYTES && MOST_BYTES < LEAST_SUBMITTED_BYTES);

/// How often a call that waits checks whether the volume has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::RwLock;

    use super::*;
    use crate::rules::Mutant;

    /// Clients that change bytes of their own in two blocks, and read and write whole ones. Returns what is lost of it.
    fn lost(mutant: Option<Mutant>) -> usize {
        let (claims, blocks) = (Claims::default(), RwLock::new([[0_u8; 64]; 2]));
        std::thread::scope(|scope| {
            for client in 0..4_usize {
                let (claims, blocks) = (&claims, &blocks);
                scope.spawn(move || {
                    Mutant::set(mutant);
                    for at in (client..128).step_by(4) {
                        let number = at / 64;
                        let _claim = claims.claim(number as u64..number as u64 + 1);
                        let mut block = blocks.read().unwrap()[number];
                        std::thread::yield_now();
                        block[at % 64] = 1;
                        blocks.write().unwrap()[number] = block;
                    }
                });
            }
        });
        blocks.read().unwrap().iter().flatten().filter(|byte| **byte == 0).count()
    }

    #[test]
    fn parts_of_one_block_undo_nothing_of_each_other() {
        assert!((0..20).all(|_| lost(None) == 0));
        let is_found = (0..1000).any(|_| lost(Some(Mutant::BlocksNotClaimed)) > 0);
        assert!(is_found, "without claims something is lost");
    }

    #[test]
    fn a_claim_waits_only_for_those_that_have_a_block_in_common() {
        let claims = Claims::default();
        let (one, none, other) = (claims.claim(3..5), claims.claim(4..4), claims.claim(5..9));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| drop(claims.claim(0..4)));
            drop((none, other));
            drop(claims.claim(5..6));
            assert!(!waits.is_finished());
            drop(one);
            waits.join().unwrap();
        });
        assert!(claims.claimed.lock().unwrap().is_empty());
    }

    #[test]
    fn bytes_of_parts_of_blocks_are_cut_out_of_pieces() {
        let pieces = || vec![Bytes::from_static(b"abcd"), Bytes::from_static(b"efgh"), Bytes::from_static(b"ijkl")];
        for (from, to) in (0..4).flat_map(|from| (from..13).map(move |to| (from, to))) {
            assert_eq!(cut(pieces(), from..to).concat(), b"abcdefghijkl"[from..to], "{from}..{to}");
        }
        assert_eq!(touched(4095, 1), 0..1);
        assert_eq!(touched(4095, 2), 0..2);
        assert_eq!(runs(3..8, 2).map(|run| (run.first, run.count)).collect::<Vec<_>>(), [(3, 2), (5, 2), (7, 1)]);
        let bits = Bytes::from_static(&[0b101]);
        let said: Vec<_> = extents(Some(&bits), 3, 512).map(|extent| (extent.length, extent.flags != 0)).collect();
        assert_eq!(said, [(3584, true), (4096, false), (4096, true)]);
    }
}
