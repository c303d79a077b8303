//! A volume as a block device, by the NBD protocol.
//!
//! Blocks of 4 KiB. A write is answered when as many copies as must hold it have applied it, and a flush when every
//! write before it is. Zeros and trims are writes of zeros, for which no bytes are sent. Every block keeps its place in
//! the memory and the store of each copy, so holes give none of it away, and `NO_HOLE` asks for nothing more. In block
//! status, such blocks and those that were never written are holes. What is longer than one write of the volume is
//! several: if this process dies, a part of it may be there, as with any disk.
//!
//! A read of blocks that are in memory of this host, and have no write under way, is answered at once by the
//! connection's thread. Everything else is answered by the volume's.
//!
//! When the volume has ended, requests fail with `ESHUTDOWN`, and the reason is logged once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
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
        VolumeDevice { volume, shared: Arc::default() }
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

    fn zeros(&self, at: u64, length: u32, fua: bool, answer: Answer<'_>) {
        let parts = runs(at, length, MOST_ENTRIES as u32).map(Request::Zero);
        self.change(parts, fua, answer.later());
    }
}

impl Device for VolumeDevice {
    fn geometry(&self) -> Geometry {
        let size = self.volume.shape().blocks() * BLOCK_BYTES as u64;
        Geometry { fast_zero: true, has_status: true, ..Geometry::of_blocks(size, BLOCK_BYTES as u32) }
    }

    fn read(&self, at: u64, length: u32, answer: Answer<'_>) {
        let (first, count) = (block(at), block(length.into()));
        if let Some(data) = self.read_here(first, count) {
            return answer.data(|sink| sink.put(&data));
        }
        let parts = runs(at, length, MOST_BLOCKS as u32);
        let joined = Joined::new(parts.len(), Asked::Blocks, answer.later(), &self.shared);
        for (part, run) in parts.enumerate() {
            self.submit(part, Request::Read(run), &joined);
        }
    }

    fn write(&self, at: u64, data: Payload<'_>, fua: bool, answer: Answer<'_>) {
        let data = data.into_bytes();
        let parts = runs(at, data.len() as u32, MOST_BLOCKS as u32).map(|run| {
            let start = (run.first * BLOCK_BYTES as u64 - at) as usize;
            Request::write(run.first, data.slice(start..start + run.count as usize * BLOCK_BYTES))
        });
        self.change(parts, fua, answer.later());
    }

    fn zero(&self, at: u64, length: u32, how: Zero, answer: Answer<'_>) {
        self.zeros(at, length, how.fua, answer);
    }

    fn trim(&self, at: u64, length: u32, fua: bool, answer: Answer<'_>) {
        self.zeros(at, length, fua, answer);
    }

    fn flush(&self, answer: Answer<'_>) {
        let joined = Joined::new(1, Asked::Done, answer.later(), &self.shared);
        self.submit(0, Request::Flush, &joined);
    }

    /// Of the first blocks, as many as the servers say at once. The client asks again behind them.
    fn status(&self, at: u64, length: u32, answer: Answer<'_>) {
        let count = (length / BLOCK_BYTES as u32).min(MOST_ENTRIES as u32);
        let joined = Joined::new(1, Asked::Holes(count), answer.later(), &self.shared);
        self.submit(0, Request::Map(Run { first: block(at), count }), &joined);
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
#[derive(Clone, Copy)]
enum Asked {
    /// That it is done.
    Done,
    /// Blocks.
    Blocks,
    /// Which of this number of blocks are holes.
    Holes(u32),
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
        match (error, later, self.asked) {
            (None, Some(later), Asked::Blocks) => later.data(data),
            (None, Some(later), Asked::Holes(count)) => later.extents(extents(data.first(), count)),
            (None, Some(later), Asked::Done) => later.done(),
            (Some(error), Some(later), _) => later.fail(&self.shared.failure(&error)),
            (_, None, _) => {}
        }
    }
}

/// The block at which a byte is, or the blocks of a number of bytes. Requests are of whole blocks.
fn block(bytes: u64) -> u64 {
    bytes / BLOCK_BYTES as u64
}

/// A request's blocks as runs of at most `most` blocks.
fn runs(at: u64, length: u32, most: u32) -> impl ExactSizeIterator<Item = Run> {
    let (first, count) = (block(at), length / BLOCK_BYTES as u32);
    (0..count.div_ceil(most))
        .map(move |part| Run { first: first + u64::from(part * most), count: most.min(count - part * most) })
}

/// What the bits of a map say.
fn extents(bits: Option<&Bytes>, count: u32) -> impl Iterator<Item = Extent> {
    let bits = bits.cloned().unwrap_or_default();
    (0..count as usize).map(move |block| {
        let flags = if is_set(&bits, block) { HOLE | ZERO } else { 0 };
        Extent { length: BLOCK_BYTES as u32, flags }
    })
}

/// What a write of zeros counts as, in bytes: so many are submitted at a time that no call waits for the volume.
const ZEROS_COUNT_AS: usize = 64 << 10;

/// Bytes that are submitted at a time: less than what the volume takes without waiting.
const MOST_BYTES: usize = 24 << 20;

const _: () = assert!(MOST_BYTES >= MOST_BLOCKS * BLOCK_BYTES && MOST_BYTES < LEAST_SUBMITTED_BYTES);

/// How often a call that waits checks whether the volume has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
