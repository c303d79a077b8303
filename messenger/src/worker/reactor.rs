//! What a worker sleeps on: one epoll instance with an eventfd for other threads, a timerfd, listeners and links.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::inbox::Inbox;
use super::keys::LinkKey;
use super::link::Interest;

/// See the module's documentation.
pub(super) struct Reactor {
    epoll: Arc<OwnedFd>,
    /// The inbox, whose eventfd is watched.
    inbox: Arc<Inbox>,
    timerfd: OwnedFd,
    /// When the timerfd fires, if it is set.
    timer_at: Option<Instant>,
}

/// Waits for what a reactor watches.
pub(super) struct Sleeper(Arc<OwnedFd>);

impl Sleeper {
    /// Waits for events, for ever without a limit. An interrupted wait returns none.
    pub(super) fn wait(&self, events: &mut Vec<epoll::Event>, limit: Option<Duration>) {
        let limit = limit.map(timespec);
        events.clear();
        let _ = epoll::wait(&self.0, rustix::buffer::spare_capacity(events), limit.as_ref());
    }
}

/// An event that the worker has to handle.
pub(super) enum Ready {
    /// The listener of that index has connections to accept.
    Listener(usize),
    /// That link is ready: to be read, unless `readable` is false.
    Link { key: LinkKey, readable: bool },
}

impl Reactor {
    pub(super) fn new(inbox: Arc<Inbox>) -> io::Result<Reactor> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&epoll, inbox.waker(), epoll::EventData::new_u64(WAKER), epoll::EventFlags::IN)?;
        let timerfd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &timerfd, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
        Ok(Reactor { epoll, inbox, timerfd, timer_at: None })
    }

    pub(super) fn add_listener(&self, index: usize, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(LISTENERS + index as u64);
        Ok(epoll::add(&self.epoll, descriptor, data, epoll::EventFlags::IN)?)
    }

    pub(super) fn add_link(&self, key: LinkKey, descriptor: BorrowedFd<'_>, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, descriptor, epoll::EventData::new_u64(key.id().0), flags(interest))?)
    }

    pub(super) fn change_link(&self, key: LinkKey, descriptor: BorrowedFd<'_>, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, descriptor, epoll::EventData::new_u64(key.id().0), flags(interest))?)
    }

    pub(super) fn remove_link(&self, descriptor: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, descriptor); // epoll has already forgotten a closed descriptor
    }

    /// What waits for its events, also while the reactor is elsewhere.
    pub(super) fn sleeper(&self) -> Sleeper {
        Sleeper(Arc::clone(&self.epoll))
    }

    /// Makes sure that the timerfd fires no later than `next`. A timeout of epoll would serve too, but the system would
    /// set and unset a clock for each sleep; the first timer changes some times a second at most.
    pub(super) fn set_timer(&mut self, next: Instant) {
        if self.timer_at.is_some_and(|at| at <= next) {
            return;
        }
        let left = next.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)); // 0 would unset it
        let once = Itimerspec { it_interval: Timespec::default(), it_value: timespec(left) };
        match timerfd_settime(&self.timerfd, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.timer_at = Some(next),
            Err(error) => tracing::error!(%error, "timerfd_settime failed; timers will fire late"),
        }
    }

    /// Decodes an event. Those of the eventfd and the timerfd are handled here: they only end a wait.
    pub(super) fn decode(&mut self, event: epoll::Event) -> Option<Ready> {
        let (data, flags) = (event.data, event.flags); // the struct is packed
        match data.u64() {
            WAKER => {
                let _ = rustix::io::read(self.inbox.waker().as_fd(), &mut [0; 8]);
                None
            }
            TIMER => {
                let _ = rustix::io::read(&self.timerfd, &mut [0; 8]);
                self.timer_at = None;
                None
            }
            listener if listener >= LISTENERS => Some(Ready::Listener((listener - LISTENERS) as usize)),
            link => Some(Ready::Link { key: LinkKey::from_raw(link), readable: flags != epoll::EventFlags::OUT }),
        }
    }
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN, interest.readable);
    flags.set(epoll::EventFlags::OUT, interest.writable);
    flags
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}

// The data of epoll events. Keys of links are below: one would have to be reused 2^30 times to reach `LISTENERS`.
const WAKER: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;
const LISTENERS: u64 = 1 << 63;

/// Events taken from epoll at once.
pub(super) const EVENTS_PER_TURN: usize = 256;
