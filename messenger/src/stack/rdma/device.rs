//! One device and what all links on it share: pools of registered memory, the shared receive queue, and the retired
//! queue pairs.
//!
//! Invariant of the receives that are posted with the device:
//!
//! ```text
//!   posted = credits of all peers + receives for their control messages + surplus
//! ```
//!
//! A posted receive cannot be withdrawn. What a link no longer needs stays as *surplus* until another link needs it, or
//! until a used receive is not posted again. The receives of a link that ends become surplus too, but not at once: its
//! queue pair may have taken one from the queue and not reported it yet. So the queue pair is *retired* for some time
//! (below), in the error state, while its completions are counted; then it is destroyed, and only then is the
//! memory reused that its requests named. Workers do this by their timers, so it happens without any traffic.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_memory::{Memory, Pages};
use remora_rdma::duplex::{Completion, Connection as RdmaConnection, DeviceContext, Devices, Region};

use super::RdmaOptions;
use super::message::MAX_RENDEZVOUS_BYTES;
use super::pool::{self, Pool};

/// A chunk of registered memory.
pub(super) type Chunk = pool::Chunk<Region>;

/// The devices of a messenger.
pub(in crate::stack) struct RdmaContext {
    pub(super) options: RdmaOptions,
    pub(super) stations: Arc<Devices>,
    known: Mutex<Vec<Arc<Device>>>,
    /// Retired queue pairs of all devices. Read without a lock.
    retired_count: Arc<AtomicUsize>,
}

/// A device, as the links on it share it.
pub(super) struct Device {
    station: Arc<DeviceContext>,
    receives: Arc<Pool<Region>>,
    /// Messages to be sent.
    pub(super) sends: Arc<Pool<Region>>,
    /// Memory that peers read.
    pub(super) exported: Arc<Pool<Region>>,
    /// Memory that this end reads into.
    pub(super) landing: Arc<Pool<Region>>,
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
pub(super) struct Retired {
    pub(super) wire: RdmaConnection,
    pub(super) memory: Vec<Chunk>,
    /// Receives that were posted for it and have not completed.
    pub(super) receives: u32,
}

impl RdmaContext {
    pub(super) fn new(options: RdmaOptions, stations: Arc<Devices>) -> Arc<RdmaContext> {
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
    pub(super) fn of(&self, station: &Arc<DeviceContext>) -> Arc<Device> {
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
    pub(super) fn reserve(&self, wanted: u32) -> io::Result<u32> {
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
    pub(super) fn release(&self, receives: u32) {
        self.count().surplus += receives;
    }

    /// Posts a message's memory again once it was read, or releases it where a surplus receive replaces it.
    pub(super) fn post_again(&self, chunk: Chunk) -> io::Result<()> {
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
    pub(super) fn received(&self, done: &Completion) -> Option<Chunk> {
        let chunk = self.receives.take_back(done.name & !RECEIVE)?;
        self.count().posted -= 1;
        Some(chunk)
    }

    /// Whether a link needs receives that other links do not use.
    pub(super) fn is_starved(&self) -> bool {
        self.starved.load(Ordering::Relaxed)
    }

    /// Retires a link. Its worker's timer destroys it once the card no longer uses it.
    pub(super) fn retire(&self, mut link: Retired) {
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
pub(super) type Waker = Arc<OwnedFd>;

/// Set in the ids of receives only.
pub(super) const RECEIVE: u64 = 1 << 63;

// The requests of a link that are on the card's queue.

/// Requests on the queue, the oldest first: a card completes them in this order.
#[derive(Default)]
pub(super) struct Requests {
    posted: VecDeque<Posted>,
    last_name: u64,
    /// Requests posted since the last signaled one.
    unsignaled: u32,
}

/// A request on the queue.
pub(super) struct Posted {
    name: u64,
    /// The memory that it uses.
    pub(super) memory: Option<Chunk>,
    pub(super) is_read: bool,
}

impl Requests {
    /// Whether the queue, which takes `depth` requests, takes another one.
    pub(super) fn has_room(&self, depth: u32) -> bool {
        self.posted.len() < depth as usize
    }

    /// A name for the next request.
    pub(super) fn name(&mut self) -> u64 {
        self.last_name += 1;
        self.last_name
    }

    /// Whether the next message is signaled: if memory waits for its completion, and regularly, so that the queue,
    /// which takes `depth` requests, empties.
    pub(super) fn is_signaled(&mut self, has_memory: bool, depth: u32) -> bool {
        let signaled = has_memory || self.unsignaled + 1 >= depth / SIGNALED_PER_QUEUE;
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        signaled
    }

    /// Notes a message that was posted, and the memory that it uses.
    pub(super) fn post_send(&mut self, name: u64, memory: Option<Chunk>) {
        self.posted.push_back(Posted { name, memory, is_read: false });
    }

    /// Notes a READ that was posted into `memory`. It is signaled.
    pub(super) fn post_read(&mut self, name: u64, memory: Chunk) {
        self.posted.push_back(Posted { name, memory: Some(memory), is_read: true });
        self.unsignaled = 0;
    }

    /// Takes the oldest request, if the completion of `name` completes it too.
    pub(super) fn pop_completed(&mut self, name: u64) -> Option<Posted> {
        let is_completed = self.posted.front().is_some_and(|posted| posted.name <= name);
        if is_completed { self.posted.pop_front() } else { None }
    }

    /// The memory of all requests. The queue must be retired with it.
    pub(super) fn take_memory(&mut self) -> impl Iterator<Item = Chunk> {
        self.posted.drain(..).filter_map(|posted| posted.memory)
    }
}

/// Signaled requests per turn of a queue, among messages that need no signal.
const SIGNALED_PER_QUEUE: u32 = 4;

// Deferred destruction of queue pairs. Pure: `device` adds entries, and a worker's timer says when to look.

/// Entries, each kept for [`RETIRE_TIME`], oldest first.
#[derive(Debug)]
pub(super) struct RetiredQueue<G>(VecDeque<(Instant, G)>);

impl<G> Default for RetiredQueue<G> {
    fn default() -> RetiredQueue<G> {
        RetiredQueue(VecDeque::new())
    }
}

impl<G> RetiredQueue<G> {
    pub(super) fn push(&mut self, now: Instant, link: G) {
        self.0.push_back((now + RETIRE_TIME, link));
    }

    /// When to look again; `None` if there are no entries.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.front().map(|(expired, _)| *expired)
    }

    /// Takes the entries whose time is over.
    pub(super) fn take_expired(&mut self, now: Instant) -> Vec<G> {
        let count = self.0.iter().take_while(|(expired, _)| *expired <= now).count();
        self.0.drain(..count).map(|(_, link)| link).collect()
    }
}

/// Long after this time a card has flushed a queue pair in the error state.
const RETIRE_TIME: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
}
