//! Registered memory in chunks of one size: a pool that grows by slabs up to a bound, and gives unused slabs back.
//!
//! Registering costs a system call and locks pages, so it is done for many chunks at once; and only a whole slab can be
//! given back. Chunks are taken from the lowest slab that has any, so that the highest ones become unused.
//!
//! Memory is registered without the lock, so that a thread that finds a chunk does not wait for one that finds none. A
//! slab that is being registered counts as present, so that concurrent threads do not exceed the bound.
//!
//! A dropped chunk returns to the pool. A chunk that a card still uses is [given away](Chunk::give_away) by its number,
//! and taken back by it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// Registers a slab of that many bytes.
type Make<R> = Box<dyn Fn(u64) -> io::Result<R> + Send + Sync>;

/// A pool of registered memory. `R` is a registered region.
pub(super) struct Pool<R> {
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
pub(super) struct Chunk<R> {
    pool: Option<Arc<Pool<R>>>,
    region: Arc<R>,
    slab: u32,
    index: u32,
}

impl<R> Pool<R> {
    /// A pool of at most about `max_bytes`, in chunks of `chunk_bytes`.
    pub(super) fn new(chunk_bytes: u32, max_bytes: u64, make: Make<R>) -> Arc<Pool<R>> {
        let chunks_per_slab = (SLAB_BYTES / chunk_bytes.max(1)).max(4);
        let max_slabs = (max_bytes / (u64::from(chunks_per_slab) * u64::from(chunk_bytes))).max(1) as usize;
        let slabs =
            Mutex::new(Slabs { slabs: Vec::new(), growing: 0, waiting: Vec::new(), waiting_for_slab: Vec::new() });
        Arc::new(Pool { chunk_bytes, chunks_per_slab, max_slabs, make, slabs, grown: Condvar::new() })
    }

    pub(super) fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Takes a chunk, registering a slab if necessary. Blocks where another thread registers the last slab.
    ///
    /// # Errors
    /// A slab cannot be registered, and there is no other whose chunks could return.
    pub(super) fn take(self: &Arc<Self>) -> io::Result<Option<Chunk<R>>> {
        self.take_or(None)
    }

    /// Like [`Pool::take`], but never blocks for another thread. If there is no chunk, `waker` is written to when one
    /// may be there.
    pub(super) fn take_or_wake(self: &Arc<Self>, waker: &Arc<OwnedFd>) -> io::Result<Option<Chunk<R>>> {
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
    pub(super) fn take_back(self: &Arc<Self>, number: u64) -> Option<Chunk<R>> {
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
    pub(super) fn region(&self) -> &R {
        &self.region
    }

    /// Where the chunk begins in the slab.
    pub(super) fn offset(&self) -> u64 {
        let bytes = self.pool.as_ref().map_or(0, |pool| pool.chunk_bytes);
        u64::from(self.index) * u64::from(bytes)
    }

    /// The chunk's number, by which [`Pool::take_back`] finds it. Until then the holder of the number owns it. Bit 63
    /// is never set.
    pub(super) fn give_away(mut self) -> u64 {
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
