//! A bound on messages and bytes under way. Taking a share returns a [`Permit`], which gives the share back when
//! dropped. A caller that finds no room can leave a waker.
//!
//! One message is always let in when nothing is under way, however long it is: a bound below one message would block
//! for ever.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The bound, shared by everything that it counts.
pub struct Throttle {
    max_messages: u64,
    max_bytes: AtomicU64,
    /// Messages in the upper bits, bytes in the lower [`BYTE_BITS`]: both are taken and given back in one step.
    under_way: AtomicU64,
    /// The number of wakers, which is read without the lock whenever a share is given back.
    waiting: AtomicUsize,
    waiters: Mutex<Vec<Waker>>,
}

/// Called once when a share was given back.
pub type Waker = Box<dyn FnOnce() + Send>;

impl Throttle {
    /// A throttle that admits at most that many messages and bytes at once.
    pub fn new(max_messages: usize, max_bytes: usize) -> Arc<Throttle> {
        Arc::new(Throttle {
            max_messages: max_messages.min(MAX_MESSAGES) as u64,
            max_bytes: AtomicU64::new(max_bytes.min(MAX_BYTES) as u64),
            under_way: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            waiters: Mutex::default(),
        })
    }

    /// Takes a share for one message of `bytes`, if there is room.
    pub fn take(self: &Arc<Throttle>, bytes: usize) -> Option<Permit> {
        let share = ONE_MESSAGE + bytes.min(MAX_BYTES) as u64;
        let taken = self.under_way.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |held| {
            let (messages, bytes) = ((held + share) >> BYTE_BITS, (held + share) & (ONE_MESSAGE - 1));
            let fits = messages <= self.max_messages && bytes <= self.max_bytes.load(Ordering::Relaxed);
            (fits || held == 0).then_some(held + share)
        });
        taken.is_ok().then(|| Permit { throttle: Arc::clone(self), share })
    }

    /// Like [`Throttle::take`]. If there is no room, `waker` is called once there may be; another caller may be faster.
    pub fn take_or_wait(self: &Arc<Throttle>, bytes: usize, waker: impl FnOnce() + Send + 'static) -> Option<Permit> {
        if let Some(permit) = self.take(bytes) {
            return Some(permit);
        }
        self.lock().push(Box::new(waker));
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // A share that was given back between the two attempts has called no waker: try again.
        self.take(bytes) // if this succeeds, the waker is called for nothing: harmless and rare
    }

    /// Changes the bound on bytes. What is under way stays so; a smaller bound counts for what follows.
    pub fn resize(&self, max_bytes: usize) {
        let before = self.max_bytes.swap(max_bytes.min(MAX_BYTES) as u64, Ordering::SeqCst);
        if max_bytes as u64 > before {
            self.wake();
        }
    }

    /// The bound on bytes.
    pub fn max_bytes(&self) -> usize {
        self.max_bytes.load(Ordering::Relaxed) as usize
    }

    /// Messages and bytes under way.
    pub fn under_way(&self) -> (usize, usize) {
        let held = self.under_way.load(Ordering::SeqCst);
        ((held >> BYTE_BITS) as usize, (held & (ONE_MESSAGE - 1)) as usize)
    }

    fn give_back(&self, share: u64) {
        self.under_way.fetch_sub(share, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        let wakers = {
            let mut waiters = self.lock();
            self.waiting.store(0, Ordering::SeqCst);
            std::mem::take(&mut *waiters)
        };
        wakers.into_iter().for_each(|waker| waker());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Waker>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Throttle {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (messages, bytes) = self.under_way();
        let (max_messages, max_bytes) = (self.max_messages, self.max_bytes.load(Ordering::Relaxed));
        write!(to, "Throttle({messages}/{max_messages} messages, {bytes}/{max_bytes} bytes)")
    }
}

/// The share of one message, until dropped.
pub struct Permit {
    throttle: Arc<Throttle>,
    share: u64,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.throttle.give_back(self.share);
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Permit({} bytes)", self.share & (ONE_MESSAGE - 1))
    }
}

const BYTE_BITS: u32 = 40;
const ONE_MESSAGE: u64 = 1 << BYTE_BITS;
/// Larger bounds count as these: 8 million messages, 512 GiB. Half of what the bits hold, so that one more always fits.
const MAX_MESSAGES: usize = (1 << (u64::BITS - BYTE_BITS)) / 2;
const MAX_BYTES: usize = 1 << (BYTE_BITS - 1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_given_back_can_be_taken_again() {
        let throttle = Throttle::new(2, 100);
        let first = throttle.take(60);
        assert!(first.is_some());
        assert!(throttle.take(41).is_none(), "too many bytes");
        let second = throttle.take(40);
        assert!(second.is_some());
        assert!(throttle.take(0).is_none(), "too many messages");
        drop(first);
        assert!(throttle.take(60).is_some());
        drop(second);
        assert_eq!(throttle.under_way(), (0, 0));
    }

    #[test]
    fn a_bound_can_be_changed_and_a_larger_one_wakes() {
        let throttle = Throttle::new(5, 100);
        let held = throttle.take(80);
        throttle.resize(50);
        assert!(throttle.take(1).is_none(), "more is under way than the new bound");
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        let wake = move || _ = count.fetch_add(1, Ordering::SeqCst);
        assert!(throttle.take_or_wait(60, wake).is_none());
        throttle.resize(140);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(throttle.take(60).is_some());
        drop(held);
    }

    #[test]
    fn one_message_always_gets_in() {
        let throttle = Throttle::new(2, 100);
        assert!(throttle.take(1000).is_some());
    }

    #[test]
    fn a_waiter_is_woken_when_a_share_is_given_back() {
        let throttle = Throttle::new(1, 100);
        let held = throttle.take(1);
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        assert!(
            throttle
                .take_or_wait(1, move || {
                    count.fetch_add(1, Ordering::SeqCst);
                })
                .is_none()
        );
        assert_eq!(woken.load(Ordering::SeqCst), 0);
        drop(held);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(throttle.take(1).is_some());
    }
}
