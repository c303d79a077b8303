//! One device and what all links on it share: pools of registered memory, the shared receives, and the graves.
//!
//! The sum that is kept, of receives that are posted with the device:
//!
//! ```text
//!   posted = credits of all peers + room for their words + surplus
//! ```
//!
//! A receive cannot be called back from a card, so what a link no longer needs stays as *surplus*, until another link needs it, or
//! until one that was used is not posted again. A link that ends leaves all of its own so, but not at once: its queue pair may have
//! taken one out of the queue without having told yet. So it lies in its *grave* for some time (`graves`), failed, where whatever it
//! still has to tell is counted; then it is destroyed, and only then is memory that it may have named used again. Workers look after
//! graves by their timers, so that this happens though nobody calls or is called any more.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use remora_memory::{Memory, Pages};
use remora_rdma::duplex::{
    Completion as Done, Connection as Wire, DeviceContext as Station, Devices as Stations, Region,
};

use super::RdmaOptions;
use super::graves::Graves;
use super::letter::BULK_BYTES;
use super::pool::{self, Pool};

/// A piece of registered memory.
pub(super) type Chunk = pool::Chunk<Region>;

/// The devices of a messenger.
pub(in crate::stack) struct Sites {
    pub(super) options: RdmaOptions,
    pub(super) stations: Arc<Stations>,
    known: Mutex<Vec<Arc<Site>>>,
    /// Graves of all sites, to be looked at without a lock.
    lying: Arc<AtomicUsize>,
}

/// See the head of the file.
pub(super) struct Site {
    station: Arc<Station>,
    receives: Arc<Pool<Region>>,
    /// Letters on their way out.
    pub(super) sends: Arc<Pool<Region>>,
    /// What peers read.
    pub(super) lent: Arc<Pool<Region>>,
    /// Where we read to.
    pub(super) landing: Arc<Pool<Region>>,
    count: Mutex<Count>,
    /// Somebody wanted more receives than there is memory for.
    hungry: AtomicBool,
    graves: Mutex<Graves<Grave>>,
    lying: Arc<AtomicUsize>,
}

/// Receives, as the head of the file counts them.
#[derive(Default)]
struct Count {
    posted: u32,
    surplus: u32,
}

/// A link that has ended. Fields go in this order, should they go together: the queue pair before the memory that it may name.
pub(super) struct Grave {
    pub(super) wire: Wire,
    pub(super) memory: Vec<Chunk>,
    /// Receives that were posted on its behalf and not seen again.
    pub(super) receives: u32,
}

impl Sites {
    pub(super) fn new(options: RdmaOptions, stations: Arc<Stations>) -> Arc<Sites> {
        Arc::new(Sites { options, stations, known: Mutex::default(), lying: Arc::default() })
    }

    /// Ends graves that have lain long enough, of all devices; when to do so again, if any are left.
    pub(in crate::stack) fn tend(&self) -> Option<Instant> {
        if self.lying.load(Ordering::Acquire) == 0 {
            return None;
        }
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        known.iter().filter_map(|site| site.tend()).min()
    }

    /// The site of a device.
    pub(super) fn of(&self, station: &Arc<Station>) -> Arc<Site> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(site) = known.iter().find(|site| Arc::ptr_eq(&site.station, station)) {
            return site.clone();
        }
        let site = Arc::new(Site::new(station, &self.options, &self.lying));
        known.push(site.clone());
        site
    }
}

impl Site {
    fn new(station: &Arc<Station>, options: &RdmaOptions, lying: &Arc<AtomicUsize>) -> Site {
        let pool = |chunk_bytes: u32, most_bytes: u64, name: &'static str, lent: bool| {
            let station = station.clone();
            Pool::new(
                chunk_bytes,
                most_bytes,
                Box::new(move |bytes| {
                    let memory = Arc::new(Memory::create(name, bytes, Pages::Small)?);
                    Ok(station.register(&memory, lent)?)
                }),
            )
        };
        Site {
            station: station.clone(),
            receives: pool(options.letter_bytes, options.receive_bytes, "remora-receives", false),
            sends: pool(options.letter_bytes, options.send_bytes, "remora-sends", false),
            lent: pool(BULK_BYTES, options.bulk_bytes, "remora-lent", true),
            landing: pool(BULK_BYTES, options.bulk_bytes, "remora-landing", false),
            count: Mutex::default(),
            hungry: AtomicBool::new(false),
            graves: Mutex::default(),
            lying: lying.clone(),
        }
    }

    /// Sees to it that so many receives more are there for a link, or as many as can be had.
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
        self.hungry.store(got < wanted, Ordering::Relaxed);
        Ok(got)
    }

    /// Posts one receive more, if there is memory and the device has room. Memory may have to be registered, so the count is not
    /// locked meanwhile: each letter that comes needs it.
    fn post_one_more(&self) -> io::Result<bool> {
        if self.count().posted >= self.station.most_receives() {
            return Ok(false);
        }
        let Some(chunk) = self.receives.take()? else { return Ok(false) };
        let mut count = self.count();
        if count.posted >= self.station.most_receives() {
            return Ok(false); // somebody else was faster
        }
        self.post(chunk, &mut count)?;
        Ok(true)
    }

    /// So many receives that a link had are anybody's.
    pub(super) fn release(&self, receives: u32) {
        self.count().surplus += receives;
    }

    /// A letter was read: its memory is posted again, or let go where another receive can stand for it.
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

    /// The memory of a receive that has completed.
    pub(super) fn received(&self, done: &Done) -> Option<Chunk> {
        let chunk = self.receives.take_back(done.name & !RECEIVE)?;
        self.count().posted -= 1;
        Some(chunk)
    }

    /// Whether somebody needs receives that others do not use.
    pub(super) fn is_hungry(&self) -> bool {
        self.hungry.load(Ordering::Relaxed)
    }

    /// Lays a link to rest. Called by workers only, whose timers then look after it.
    pub(super) fn bury(&self, mut grave: Grave) {
        grave.wire.end();
        self.lying.fetch_add(1, Ordering::Release);
        self.graves().lay(Instant::now(), grave);
        self.tend();
    }

    /// Ends those that have lain long enough; when to look again, if any are left.
    fn tend(&self) -> Option<Instant> {
        let (over, next) = {
            let mut graves = self.graves(); // let go before anything is destroyed, which is a system call
            (graves.take_over(Instant::now()), graves.next())
        };
        self.lying.fetch_sub(over.len(), Ordering::Release);
        for mut grave in over {
            let mut done = Vec::new();
            while grave.wire.poll(&mut done).is_ok_and(|count| count > 0) {}
            let seen =
                done.iter().filter(|done| done.name & RECEIVE != 0).filter_map(|done| self.received(done)).count();
            let Grave { wire, memory, receives, .. } = grave;
            drop(wire);
            drop(memory); // not before: now no card knows it
            self.release(receives.saturating_sub(seen as u32));
        }
        next
    }

    fn graves(&self) -> MutexGuard<'_, Graves<Grave>> {
        self.graves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self) -> MutexGuard<'_, Count> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An eventfd that pools ring.
pub(super) type Bell = Arc<OwnedFd>;

/// Set in the names of receives, and in no other's.
pub(super) const RECEIVE: u64 = 1 << 63;
