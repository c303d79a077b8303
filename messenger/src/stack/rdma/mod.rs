//! RDMA: messages by SEND, large pieces by READ, on reliable-connected queue pairs (InfiniBand, RoCE).
//!
//! ```text
//!   sender's memory                                                   receiver's memory
//!   ┌────────┐ small: in the request itself                           ┌──────────┐ shared receive queue:
//!   │ sends  │──── SEND: a message of up to 8 KiB ───────────────────▶│ receives │ messages of any link
//!   └────────┘     head: credits, acknowledgements, finished READs    └────┬─────┘
//!   ┌────────┐──── SEND: "bytes of the stream are here" (rendezvous) ─▶    │ copied out, then posted again,
//!   │exported│═══════════════ READ, 256 KiB at a time ═══════════════▶┌────▼─────┐ and a credit given for it
//!   └────────┘     allowed from the first rendezvous on               │ landing  │
//!                                                                     └──────────┘
//! ```
//!
//! - `credits`: flow control, what has arrived, and the bytes of messages. Pure. **Start here.**
//! - this file: one device with its shared receives, the requests on its queues, and the deferred destruction of queue
//!   pairs; and its pools of registered memory, bounded, growing and shrinking.
//! - `link`: a connection, as a worker sees it, what it is yet to send, and the listener.
//!
//! Invariants:
//!
//! - **No receiver is overrun.** A message is sent only for a credit, and a credit is given only for a posted receive.
//!   The card's "receiver not ready" remains as a safety net, with a bound, and does not occur.
//! - **Credits follow the need.** A sender that spends its last credit says so, and the receiver posts more receives
//!   for it while the pool lasts. A receiver that runs out asks sleeping links to return unused credits. Returned
//!   receives leave the queue by use, as a posted receive cannot be withdrawn.
//! - **The depth of a queue does not depend on the number of buffers**: the first is per link, the second per device.
//! - **Any worker can serve a link**: its completion queue, its channel and its descriptor are its own.
//! - **A retired queue pair is destroyed before its memory is reused**: it is set to the error state, the receives that
//!   it took from the shared queue are counted back, and then it is destroyed, at the latest by a worker's
//!   timer.
//! - Bytes are copied once into registered memory and once out of it. Owners send from and receive into ordinary
//!   memory; registering it for each message would cost more than the copy, up to about 100 KiB.

mod credits;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod link;

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use credits::MAX_RENDEZVOUS_BYTES;
use remora_memory::{Memory, Pages};
use remora_rdma::duplex::{Completion, Connection as RdmaConnection, DeviceContext, Devices, DuplexOptions, Region};

pub use link::{RdmaLink, RdmaListener};

/// Settings of a messenger's RDMA links. Memory is locked, and counted per device.
#[derive(Debug, Clone)]
pub struct RdmaOptions {
    /// The local address, which selects the device's port where there are several. `None`: the system chooses.
    pub local: Option<IpAddr>,
    /// Size of a message, in bytes, 256 to 65536: the receive buffers, and the most that one SEND carries.
    pub message_bytes: u32,
    /// Messages that a peer may send on a new link before the first credits arrive, 1 to 4096.
    pub initial_credits: u32,
    /// Greatest number of credits of a link that asks for more.
    pub max_credits: u32,
    /// Memory for received messages, in bytes, at most.
    pub receive_bytes: u64,
    /// Memory for messages to be sent, in bytes, at most.
    pub send_bytes: u64,
    /// Memory that peers read, in bytes, at most; and as much again for what this end reads.
    pub rendezvous_bytes: u64,
    /// Pieces of at least this size are read by the peer (rendezvous); smaller ones go in messages.
    pub rendezvous_from_bytes: usize,
    /// Queue depth, inline bytes, retries.
    pub wires: DuplexOptions,
}

impl Default for RdmaOptions {
    fn default() -> RdmaOptions {
        RdmaOptions {
            local: None,
            // Two pages: a message of 4 KiB and its head in one SEND.
            message_bytes: 8 << 10,
            initial_credits: 8,
            // 2 MiB under way: 160 µs of a 100 Gb/s link.
            max_credits: 256,
            receive_bytes: 128 << 20,
            send_bytes: 32 << 20,
            rendezvous_bytes: 32 << 20,
            // Eight messages: from there on the round trip of a rendezvous costs less than their heads and completions.
            rendezvous_from_bytes: 64 << 10,
            wires: DuplexOptions::default(),
        }
    }
}

impl RdmaOptions {
    fn check(&self) -> io::Result<()> {
        let fits = |fits: bool, sentence: &'static str| {
            if fits { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, sentence)) }
        };
        fits((256..=65_536).contains(&self.message_bytes), "RDMA messages: choose 256 to 65536 bytes")?;
        let shortest = credits::START_BYTES as u32;
        fits(
            self.wires.inline_bytes >= shortest,
            "RDMA inline bytes: choose at least 32, which control messages and rendezvous need",
        )?;
        let most = credits::MAX_CREDITS;
        fits((1..=most).contains(&self.initial_credits), "initial RDMA credits: choose 1 to 4096")?;
        fits(
            (self.initial_credits..=most).contains(&self.max_credits),
            "greatest RDMA credits: choose the initial ones to 4096",
        )
    }
}

/// The RDMA part of a messenger.
pub(super) fn context(options: &RdmaOptions) -> io::Result<Arc<RdmaContext>> {
    options.check()?;
    let stations = Devices::new(options.wires.clone())?;
    Ok(RdmaContext::new(options.clone(), Arc::new(stations)))
}

// One device and what all links on it share: pools of registered memory, the shared receive queue, and the retired
// queue pairs.
//
// Invariant of the receives that are posted with the device:
//
// ```text
//   posted = credits of all peers + receives for their control messages + surplus
// ```
//
// A posted receive cannot be withdrawn. What a link no longer needs stays as *surplus* until another link needs it, or
// until a used receive is not posted again. The receives of a link that ends become surplus too, but not at once: its
// queue pair may have taken one from the queue and not reported it yet. So the queue pair is *retired* for some time
// (below), in the error state, while its completions are counted; then it is destroyed, and only then is the
// memory reused that its requests named. Workers do this by their timers, so it happens without any traffic.

/// The devices of a messenger.
pub(in crate::stack) struct RdmaContext {
    options: RdmaOptions,
    stations: Arc<Devices>,
    known: Mutex<Vec<Arc<Device>>>,
    /// Retired queue pairs of all devices. Read without a lock.
    retired_count: Arc<AtomicUsize>,
}

/// A device, as the links on it share it.
struct Device {
    station: Arc<DeviceContext>,
    receives: Arc<Pool<Region>>,
    /// Messages to be sent.
    sends: Arc<Pool<Region>>,
    /// Memory that peers read.
    exported: Arc<Pool<Region>>,
    /// Memory that this end reads into.
    landing: Arc<Pool<Region>>,
    count: Mutex<Count>,
    /// A link wanted more receives than there is memory for.
    starved: AtomicBool,
    retired: Mutex<RetiredQueue<Retired>>,
    retired_count: Arc<AtomicUsize>,
}

/// Counts of receives; see the module's documentation.
#[derive(Default)]
struct Count {
    posted: u32,
    surplus: u32,
}

/// A link that has ended. Field order matters when dropped: the queue pair before the memory that its requests may
/// name.
struct Retired {
    wire: RdmaConnection,
    memory: Vec<Chunk>,
    /// Receives that were posted for it and have not completed.
    receives: u32,
}

impl RdmaContext {
    fn new(options: RdmaOptions, stations: Arc<Devices>) -> Arc<RdmaContext> {
        Arc::new(RdmaContext { options, stations, known: Mutex::default(), retired_count: Arc::default() })
    }

    /// Destroys retired queue pairs that are due, of all devices. Returns when to call again, if any are left.
    pub(in crate::stack) fn tend(&self) -> Option<Instant> {
        if self.retired_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        known.iter().filter_map(|device| device.tend()).min()
    }

    /// The device of a station.
    fn of(&self, station: &Arc<DeviceContext>) -> Arc<Device> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = known.iter().find(|device| Arc::ptr_eq(&device.station, station)) {
            return device.clone();
        }
        let device = Arc::new(Device::new(station, &self.options, &self.retired_count));
        known.push(device.clone());
        device
    }
}

impl Device {
    fn new(station: &Arc<DeviceContext>, options: &RdmaOptions, retired_count: &Arc<AtomicUsize>) -> Device {
        let pool = |chunk_bytes: u32, max_bytes: u64, name: &'static str, exported: bool| {
            let station = station.clone();
            Pool::new(
                chunk_bytes,
                max_bytes,
                Box::new(move |bytes| {
                    let memory = Arc::new(Memory::create(name, bytes, Pages::Small)?);
                    Ok(station.register(&memory, exported)?)
                }),
            )
        };
        Device {
            station: station.clone(),
            receives: pool(options.message_bytes, options.receive_bytes, "remora-receives", false),
            sends: pool(options.message_bytes, options.send_bytes, "remora-sends", false),
            exported: pool(MAX_RENDEZVOUS_BYTES, options.rendezvous_bytes, "remora-exported", true),
            landing: pool(MAX_RENDEZVOUS_BYTES, options.rendezvous_bytes, "remora-landing", false),
            count: Mutex::default(),
            starved: AtomicBool::new(false),
            retired: Mutex::default(),
            retired_count: retired_count.clone(),
        }
    }

    /// Reserves up to `wanted` receives for a link. Returns how many.
    fn reserve(&self, wanted: u32) -> io::Result<u32> {
        self.tend();
        let mut got = {
            let mut count = self.count();
            let got = wanted.min(count.surplus);
            count.surplus -= got;
            got
        };
        while got < wanted {
            match self.post_one_more() {
                Ok(true) => got += 1,
                Ok(false) => break,
                Err(error) => {
                    self.release(got);
                    return Err(error);
                }
            }
        }
        self.starved.store(got < wanted, Ordering::Relaxed);
        Ok(got)
    }

    /// Posts one more receive, if there is memory and the device has room. The count is not locked meanwhile: memory
    /// may have to be registered, and every message that arrives needs the count.
    fn post_one_more(&self) -> io::Result<bool> {
        if self.count().posted >= self.station.most_receives() {
            return Ok(false);
        }
        let Some(chunk) = self.receives.take()? else { return Ok(false) };
        let mut count = self.count();
        if count.posted >= self.station.most_receives() {
            return Ok(false); // another thread was faster
        }
        self.post(chunk, &mut count)?;
        Ok(true)
    }

    /// Makes receives of a link surplus.
    fn release(&self, receives: u32) {
        self.count().surplus += receives;
    }

    /// Posts a message's memory again once it was read, or releases it where a surplus receive replaces it.
    fn post_again(&self, chunk: Chunk) -> io::Result<()> {
        let mut count = self.count();
        if count.surplus > 0 {
            count.surplus -= 1;
            return Ok(());
        }
        self.post(chunk, &mut count)
    }

    fn post(&self, chunk: Chunk, count: &mut Count) -> io::Result<()> {
        let (region, offset) = (chunk.region().clone(), chunk.offset());
        let number = chunk.give_away();
        if let Err(error) = self.station.post_receive(RECEIVE | number, &region, offset, self.receives.chunk_bytes()) {
            drop(self.receives.take_back(number));
            return Err(error.into());
        }
        count.posted += 1;
        Ok(())
    }

    /// Takes the memory of a completed receive.
    fn received(&self, done: &Completion) -> Option<Chunk> {
        let chunk = self.receives.take_back(done.name & !RECEIVE)?;
        self.count().posted -= 1;
        Some(chunk)
    }

    /// Whether a link needs receives that other links do not use.
    fn is_starved(&self) -> bool {
        self.starved.load(Ordering::Relaxed)
    }

    /// Retires a link. Its worker's timer destroys it once the card no longer uses it.
    fn retire(&self, mut link: Retired) {
        link.wire.end();
        self.retired_count.fetch_add(1, Ordering::Release);
        self.retired().push(Instant::now(), link);
        self.tend();
    }

    /// Destroys retired queue pairs that are due. Returns when to call again, if any are left.
    fn tend(&self) -> Option<Instant> {
        let (expired, next) = {
            let mut retired = self.retired(); // unlocked before anything is destroyed, which is a system call
            (retired.take_expired(Instant::now()), retired.next())
        };
        self.retired_count.fetch_sub(expired.len(), Ordering::Release);
        for mut link in expired {
            let mut done = Vec::new();
            while link.wire.poll(&mut done).is_ok_and(|count| count > 0) {}
            let seen =
                done.iter().filter(|done| done.name & RECEIVE != 0).filter_map(|done| self.received(done)).count();
            let Retired { wire, memory, receives, .. } = link;
            drop(wire);
            drop(memory); // only now: the card no longer knows it
            self.release(receives.saturating_sub(seen as u32));
        }
        next
    }

    fn retired(&self) -> MutexGuard<'_, RetiredQueue<Retired>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self) -> MutexGuard<'_, Count> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An eventfd that pools write to.
type Waker = Arc<OwnedFd>;

/// Set in the ids of receives only.
const RECEIVE: u64 = 1 << 63;

// The requests of a link that are on the card's queue.

/// Requests on the queue, the oldest first: a card completes them in this order.
#[derive(Default)]
struct Requests {
    posted: VecDeque<Posted>,
    last_name: u64,
    /// Requests posted since the last signaled one.
    unsignaled: u32,
}

/// A request on the queue.
struct Posted {
    name: u64,
    /// The memory that it uses.
    memory: Option<Chunk>,
    is_read: bool,
}

impl Requests {
    /// Whether the queue, which takes `depth` requests, takes another one.
    fn has_room(&self, depth: u32) -> bool {
        self.posted.len() < depth as usize
    }

    /// A name for the next request.
    fn name(&mut self) -> u64 {
        self.last_name += 1;
        self.last_name
    }

    /// Whether the next message is signaled: if memory waits for its completion, and regularly, so that the queue,
    /// which takes `depth` requests, empties.
    fn is_signaled(&mut self, has_memory: bool, depth: u32) -> bool {
        let signaled = has_memory || self.unsignaled + 1 >= depth / SIGNALED_PER_QUEUE;
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        signaled
    }

    /// Notes a message that was posted, and the memory that it uses.
    fn post_send(&mut self, name: u64, memory: Option<Chunk>) {
        self.posted.push_back(Posted { name, memory, is_read: false });
    }

    /// Notes a READ that was posted into `memory`. It is signaled.
    fn post_read(&mut self, name: u64, memory: Chunk) {
        self.posted.push_back(Posted { name, memory: Some(memory), is_read: true });
        self.unsignaled = 0;
    }

    /// Takes the oldest request, if the completion of `name` completes it too.
    fn pop_completed(&mut self, name: u64) -> Option<Posted> {
        let is_completed = self.posted.front().is_some_and(|posted| posted.name <= name);
        if is_completed { self.posted.pop_front() } else { None }
    }

    /// The memory of all requests. The queue must be retired with it.
    fn take_memory(&mut self) -> impl Iterator<Item = Chunk> {
        self.posted.drain(..).filter_map(|posted| posted.memory)
    }
}

/// Signaled requests per turn of a queue, among messages that need no signal.
const SIGNALED_PER_QUEUE: u32 = 4;

// Deferred destruction of queue pairs. Pure: `device` adds entries, and a worker's timer says when to look.

/// Entries, each kept for [`RETIRE_TIME`], oldest first.
#[derive(Debug)]
struct RetiredQueue<G>(VecDeque<(Instant, G)>);

impl<G> Default for RetiredQueue<G> {
    fn default() -> RetiredQueue<G> {
        RetiredQueue(VecDeque::new())
    }
}

impl<G> RetiredQueue<G> {
    fn push(&mut self, now: Instant, link: G) {
        self.0.push_back((now + RETIRE_TIME, link));
    }

    /// When to look again; `None` if there are no entries.
    fn next(&self) -> Option<Instant> {
        self.0.front().map(|(expired, _)| *expired)
    }

    /// Takes the entries whose time is over.
    fn take_expired(&mut self, now: Instant) -> Vec<G> {
        let count = self.0.iter().take_while(|(expired, _)| *expired <= now).count();
        self.0.drain(..count).map(|(_, link)| link).collect()
    }
}

/// Long after this time a card has flushed a queue pair in the error state.
const RETIRE_TIME: Duration = Duration::from_millis(200);

// Registered memory in chunks of one size: a pool that grows by slabs up to a bound, and gives unused slabs back.
//
// Registering costs a system call and locks pages, so it is done for many chunks at once; and only a whole slab can be
// given back. Chunks are taken from the lowest slab that has any, so that the highest ones become unused.
//
// Memory is registered without the lock, so that a thread that finds a chunk does not wait for one that finds none. A
// slab that is being registered counts as present, so that concurrent threads do not exceed the bound.
//
// A dropped chunk returns to the pool. A chunk that a card still uses is [given away](Chunk::give_away) by its number,
// and taken back by it.

/// Registers a slab of that many bytes.
type Make<R> = Box<dyn Fn(u64) -> io::Result<R> + Send + Sync>;

/// A pool of registered memory. `R` is a registered region.
struct Pool<R> {
    chunk_bytes: u32,
    chunks_per_slab: u32,
    max_slabs: usize,
    make: Make<R>,
    slabs: Mutex<Slabs<R>>,
    /// Notified when a slab was registered, or could not be.
    grown: Condvar,
}

struct Slabs<R> {
    slabs: Vec<Option<Slab<R>>>,
    /// Slabs that are being registered.
    growing: usize,
    /// Wakers of links that found no chunk. Called when a chunk returns or a slab was registered.
    waiting: Vec<Weak<OwnedFd>>,
    /// Wakers of links that wait for a slab. Called also when it could not be registered: these links have not tried
    /// themselves.
    waiting_for_slab: Vec<Weak<OwnedFd>>,
}

struct Slab<R> {
    region: Arc<R>,
    free: Vec<u32>,
}

/// A chunk of a slab.
struct Chunk<R = Region> {
    pool: Option<Arc<Pool<R>>>,
    region: Arc<R>,
    slab: u32,
    index: u32,
}

impl<R> Pool<R> {
    /// A pool of at most about `max_bytes`, in chunks of `chunk_bytes`.
    fn new(chunk_bytes: u32, max_bytes: u64, make: Make<R>) -> Arc<Pool<R>> {
        let chunks_per_slab = (SLAB_BYTES / chunk_bytes.max(1)).max(4);
        let max_slabs = (max_bytes / (u64::from(chunks_per_slab) * u64::from(chunk_bytes))).max(1) as usize;
        let slabs =
            Mutex::new(Slabs { slabs: Vec::new(), growing: 0, waiting: Vec::new(), waiting_for_slab: Vec::new() });
        Arc::new(Pool { chunk_bytes, chunks_per_slab, max_slabs, make, slabs, grown: Condvar::new() })
    }

    fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Takes a chunk, registering a slab if necessary. Blocks where another thread registers the last slab.
    ///
    /// # Errors
    /// A slab cannot be registered, and there is no other whose chunks could return.
    fn take(self: &Arc<Self>) -> io::Result<Option<Chunk<R>>> {
        self.take_or(None)
    }

    /// Like [`Pool::take`], but never blocks for another thread. If there is no chunk, `waker` is written to when one
    /// may be there.
    fn take_or_wake(self: &Arc<Self>, waker: &Arc<OwnedFd>) -> io::Result<Option<Chunk<R>>> {
        self.take_or(Some(waker))
    }

    fn take_or(self: &Arc<Self>, waker: Option<&Arc<OwnedFd>>) -> io::Result<Option<Chunk<R>>> {
        let mut slabs = self.lock();
        let mut has_failed = false;
        loop {
            if let Some(chunk) = self.pick(&mut slabs) {
                return Ok(Some(chunk));
            }
            if !has_failed && slabs.len() + slabs.growing < self.max_slabs {
                slabs.growing += 1;
                drop(slabs);
                let made = self.grow();
                slabs = self.lock();
                has_failed = made.is_err(); // other threads may have taken all of it: then one more
                match made {
                    Ok(()) => {}
                    Err(error) if slabs.len() + slabs.growing == 0 => return Err(error),
                    Err(error) => {
                        tracing::warn!(%error, "cannot register more memory; continuing with what is registered")
                    }
                }
                continue;
            }
            match waker {
                None if slabs.growing > 0 => slabs = self.grown.wait(slabs).unwrap_or_else(PoisonError::into_inner),
                None => return Ok(None),
                Some(waker) => {
                    // A waker is registered once, however often its link asks.
                    let waker = Arc::downgrade(waker);
                    let waits_for_slab = !has_failed && slabs.growing > 0;
                    let list = if waits_for_slab { &mut slabs.waiting_for_slab } else { &mut slabs.waiting };
                    if !list.iter().any(|other| other.ptr_eq(&waker)) {
                        list.push(waker);
                    }
                    return Ok(None);
                }
            }
        }
    }

    /// Registers a slab that is counted as growing, without the lock, and notifies waiters.
    fn grow(&self) -> io::Result<()> {
        let mut growing = Growing { pool: self, slab: None };
        let region = (self.make)(u64::from(self.chunks_per_slab) * u64::from(self.chunk_bytes))?;
        growing.slab = Some(Slab { region: Arc::new(region), free: (0..self.chunks_per_slab).rev().collect() });
        Ok(())
    }

    fn pick(self: &Arc<Self>, slabs: &mut Slabs<R>) -> Option<Chunk<R>> {
        let mut with_some = slabs.slabs.iter_mut().enumerate().filter_map(|(at, slab)| Some((at, slab.as_mut()?)));
        let (at, slab) = with_some.find(|(_, slab)| !slab.free.is_empty())?;
        let index = slab.free.pop()?;
        Some(Chunk { pool: Some(self.clone()), region: slab.region.clone(), slab: at as u32, index })
    }

    /// Takes back the chunk that was given away under this number. Once for each time it was given away.
    fn take_back(self: &Arc<Self>, number: u64) -> Option<Chunk<R>> {
        let (slab, index) = ((number >> 32) as u32, number as u32);
        let region = self.lock().slabs.get(slab as usize)?.as_ref()?.region.clone();
        Some(Chunk { pool: Some(self.clone()), region, slab, index })
    }

    fn put_back(&self, slab: u32, index: u32) {
        let mut slabs = self.lock();
        let mut waiting = std::mem::take(&mut slabs.waiting);
        waiting.append(&mut slabs.waiting_for_slab);
        let elsewhere: usize = slabs.slabs.iter().flatten().map(|slab| slab.free.len()).sum();
        let mut empty = None;
        if let Some(place) = slabs.slabs.get_mut(slab as usize)
            && let Some(home) = place
        {
            home.free.push(index);
            let is_unused = home.free.len() == self.chunks_per_slab as usize;
            // Half a slab stays free, so that a pool at the edge does not register and deregister all the time.
            let spare = elsewhere + 1 - home.free.len();
            if is_unused && spare >= self.chunks_per_slab as usize / 2 {
                empty = place.take();
            }
        }
        drop(slabs);
        drop(empty); // deregistering is a system call: not under the lock
        wake(waiting);
    }

    /// Number of slabs.
    #[cfg(test)]
    fn slabs(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Slabs<R>> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R> Slabs<R> {
    fn len(&self) -> usize {
        self.slabs.iter().flatten().count()
    }
}

/// A slab that is being registered. Dropping this ends the attempt, whatever its outcome.
struct Growing<'a, R> {
    pool: &'a Pool<R>,
    slab: Option<Slab<R>>,
}

impl<R> Drop for Growing<'_, R> {
    fn drop(&mut self) {
        let mut slabs = self.pool.lock();
        slabs.growing -= 1;
        let mut woken = std::mem::take(&mut slabs.waiting_for_slab);
        if let Some(slab) = self.slab.take() {
            woken.append(&mut slabs.waiting);
            match slabs.slabs.iter().position(Option::is_none) {
                Some(place) => slabs.slabs[place] = Some(slab),
                None => slabs.slabs.push(Some(slab)),
            }
        }
        drop(slabs);
        self.pool.grown.notify_all();
        wake(woken);
    }
}

fn wake(waiting: Vec<Weak<OwnedFd>>) {
    for waker in waiting.into_iter().filter_map(|waker| waker.upgrade()) {
        let _ = rustix::io::write(&*waker, &1u64.to_ne_bytes()); // fails only if the counter is full
    }
}

impl<R> Chunk<R> {
    /// The slab's memory.
    fn region(&self) -> &R {
        &self.region
    }

    /// Where the chunk begins in the slab.
    fn offset(&self) -> u64 {
        let bytes = self.pool.as_ref().map_or(0, |pool| pool.chunk_bytes);
        u64::from(self.index) * u64::from(bytes)
    }

    /// The chunk's number, by which [`Pool::take_back`] finds it. Until then the holder of the number owns it. Bit 63
    /// is never set.
    fn give_away(mut self) -> u64 {
        self.pool = None;
        u64::from(self.slab) << 32 | u64::from(self.index)
    }
}

impl<R> Drop for Chunk<R> {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.put_back(self.slab, self.index);
        }
    }
}

/// Size of a slab, in bytes. Registering is a system call and a page table, which are small for a megabyte.
const SLAB_BYTES: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::{HashMap, HashSet};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use proptest::prelude::*;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    proptest! {
        /// A caller that looks only when told takes all entries eventually.
        #[test]
        fn a_caller_that_looks_when_told_takes_each_entry_once_and_in_time(pauses in proptest::collection::vec(0u64..500, 1..40)) {
            let mut retired = RetiredQueue::default();
            let mut now = Instant::now();
            let mut pushed = Vec::new();
            let mut out = Vec::new();
            let look = |retired: &mut RetiredQueue<usize>, until: Option<Instant>, out: &mut Vec<(usize, Instant)>| {
                while let Some(at) = retired.next().filter(|at| until.is_none_or(|until| *at <= until)) {
                    let expired = retired.take_expired(at);
                    assert!(!expired.is_empty(), "told to look for nothing");
                    out.extend(expired.into_iter().map(|link| (link, at)));
                }
            };
            for (link, pause) in pauses.iter().enumerate() {
                now += Duration::from_millis(*pause);
                look(&mut retired, Some(now), &mut out);
                retired.push(now, link);
                pushed.push((link, now + RETIRE_TIME));
            }
            look(&mut retired, None, &mut out);
            prop_assert_eq!(out, pushed);
            prop_assert!(retired.next().is_none());
        }
    }

    fn pool(chunk_bytes: u32, max_bytes: u64) -> Arc<Pool<()>> {
        Pool::new(chunk_bytes, max_bytes, Box::new(|_| Ok(())))
    }

    #[test]
    fn it_grows_to_its_bound_and_shrinks_when_chunks_come_back() {
        let pool = pool(256 << 10, 4 << 20);
        let mut chunks: Vec<_> = (0..16).map(|_| pool.take().unwrap().unwrap()).collect();
        assert!(pool.take().unwrap().is_none());
        assert_eq!(pool.slabs(), 4);
        chunks.truncate(2);
        assert_eq!(pool.slabs(), 1);
        drop(chunks);
        assert_eq!(pool.slabs(), 1, "the last stays in hand");
    }

    #[test]
    fn a_link_that_found_no_chunk_is_woken_when_one_returns() {
        let pool = pool(1 << 20, 4 << 20);
        let chunks: Vec<_> = (0..4).map(|_| pool.take().unwrap().unwrap()).collect();
        let waker = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        assert!(pool.take_or_wake(&waker).unwrap().is_none());
        assert!(rustix::io::read(&*waker, &mut [0; 8]).is_err());
        drop(chunks);
        assert!(rustix::io::read(&*waker, &mut [0; 8]).is_ok());
        assert!(pool.take().unwrap().is_some());
    }

    #[test]
    fn a_pool_that_could_never_register_reports_the_error() {
        let pool: Arc<Pool<()>> = Pool::new(4096, 1 << 20, Box::new(|_| Err(io::ErrorKind::OutOfMemory.into())));
        assert_eq!(pool.take().err().unwrap().kind(), io::ErrorKind::OutOfMemory);
    }

    /// A pool of two slabs of four chunks. Registering any slab but the first announces itself and waits.
    fn slow_pool() -> (Arc<Pool<()>>, mpsc::Receiver<()>, mpsc::Sender<io::Result<()>>) {
        let (begun, begins) = mpsc::channel();
        let (word, words) = mpsc::channel();
        let words = Mutex::new(words);
        let is_first = AtomicBool::new(true);
        let make = move |_| {
            if is_first.swap(false, Ordering::SeqCst) {
                return Ok(());
            }
            begun.send(()).unwrap();
            words.lock().unwrap().recv().unwrap()
        };
        (Pool::new(256 << 10, 2 << 20, Box::new(make)), begins, word)
    }

    #[test]
    fn while_a_slab_is_registered_others_take_returned_chunks_and_the_bound_holds() {
        let (pool, begins, word) = slow_pool();
        let mut chunks: Vec<_> = (0..4).map(|_| pool.take().unwrap().unwrap()).collect();
        let waker = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        thread::scope(|scope| {
            let grower = scope.spawn(|| pool.take().unwrap());
            begins.recv().unwrap();
            drop(chunks.pop());
            chunks.push(pool.take().unwrap().unwrap());
            assert!(pool.take_or_wake(&waker).unwrap().is_none());
            let waits = scope.spawn(|| pool.take().unwrap());
            assert!(begins.recv_timeout(Duration::from_millis(50)).is_err(), "a third slab of two");
            word.send(Ok(())).unwrap();
            assert!(grower.join().unwrap().is_some() && waits.join().unwrap().is_some());
        });
        assert!(rustix::io::read(&*waker, &mut [0; 8]).is_ok());
        assert_eq!(pool.slabs(), 2);
    }

    #[test]
    fn a_link_that_waited_for_a_slab_that_failed_tries_once_itself() {
        let (pool, begins, word) = slow_pool();
        let chunks: Vec<_> = (0..4).map(|_| pool.take().unwrap().unwrap()).collect();
        let [waits_for_slab, fails] = [(); 2].map(|()| Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        let rings = |waker: &OwnedFd| rustix::io::read(waker, &mut [0; 8]).is_ok();
        thread::scope(|scope| {
            let grower = scope.spawn(|| pool.take_or_wake(&fails).unwrap());
            begins.recv().unwrap();
            assert!(pool.take_or_wake(&waits_for_slab).unwrap().is_none() && !rings(&waits_for_slab));
            word.send(Err(io::ErrorKind::OutOfMemory.into())).unwrap();
            assert!(grower.join().unwrap().is_none());
            assert!(rings(&waits_for_slab) && !rings(&fails));
            word.send(Err(io::ErrorKind::OutOfMemory.into())).unwrap();
            assert!(pool.take_or_wake(&waits_for_slab).unwrap().is_none());
            assert!(!rings(&waits_for_slab) && !rings(&fails), "two that fail would wake for each other for ever");
        });
        drop(chunks);
        assert!(rings(&waits_for_slab) && rings(&fails));
    }

    #[test]
    fn concurrent_growth_reaches_the_bound_and_no_more() {
        let made = Arc::new(AtomicUsize::new(0));
        let counted = made.clone();
        let make = move |_| {
            thread::sleep(Duration::from_millis(2));
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        let pool: Arc<Pool<()>> = Pool::new(256 << 10, 4 << 20, Box::new(make));
        let taken: Vec<_> = thread::scope(|scope| {
            let takers: Vec<_> = (0..8).map(|_| scope.spawn(|| [(); 3].map(|()| pool.take().unwrap()))).collect();
            takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
        });
        assert_eq!(taken.iter().flatten().count(), 16);
        assert_eq!((made.load(Ordering::SeqCst), pool.slabs()), (4, 4));
    }

    proptest! {
        #[test]
        fn no_chunk_is_taken_twice(steps in proptest::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..300)) {
            let pool = pool(300 << 10, 3 << 20);
            let (mut held, mut away): (HashMap<u64, Chunk<()>>, Vec<u64>) = Default::default();
            for (step, which) in steps {
                match step {
                    0 | 1 => {
                        if let Some(chunk) = pool.take().unwrap() {
                            let number = u64::from(chunk.slab) << 32 | u64::from(chunk.index);
                            prop_assert!(!away.contains(&number));
                            prop_assert!(held.insert(number, chunk).is_none());
                        }
                    }
                    2 if !held.is_empty() => {
                        let number = *which.get(&held.keys().copied().collect::<Vec<_>>());
                        let chunk = held.remove(&number).unwrap();
                        if number % 2 == 0 { away.push(chunk.give_away()) }
                    }
                    3 if !away.is_empty() => {
                        let number = away.swap_remove(which.index(away.len()));
                        let back = pool.take_back(number).unwrap();
                        prop_assert_eq!(back.give_away(), number);
                        drop(pool.take_back(number));
                    }
                    _ => {}
                }
                let distinct: HashSet<_> = held.keys().chain(&away).collect();
                prop_assert_eq!(distinct.len(), held.len() + away.len());
            }
        }
    }
}
