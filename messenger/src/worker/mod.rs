//! One thread with one reactor, and everything that lives on it: links, sessions and their timers. The thread waits
//! only in epoll, and holds no lock while it calls the owner. While it sleeps, a thread that sends may use its tables.
//!
//! ```text
//!            ┌──────────────────────────── a turn ────────────────────────────────┐
//!   epoll ──▶│ a link is readable: receive, find frames, dispatch each message    │──▶ Dispatcher (the owner's code)
//!            │   … then settle its session: messages ─▶ frames ─▶ one vectored send│
//!   inbox ──▶│ commands of other threads: flush, connect, adopt a link, …         │
//!   timers ─▶│ sessions and links whose time has come                             │
//!            └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! What the owner sends while a message is dispatched stays in the connection's queue until all messages that came
//! together are dispatched, and then goes in one system call. A single message goes at once.
//!
//! - this file: the thread, one turn after the other; commands of other threads, and how these send while it sleeps;
//!   epoll, and how long to poll. **Start here.**
//! - `tables`: what happens between links and sessions: from bytes to messages, and back.
//! - `links`: the table of links, and the listeners that they come from; the state of one link, keys, timers, and how
//!   links end.

mod links;
mod tables;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::connection::{Common, Connection, Mailbox, Polling, Request};
use crate::frame::Open;
use crate::session::{LocalEnd, Session};
use crate::stack::{Address, Listener};
pub(crate) use links::LinkState;
use links::{
    ACCEPTS_PER_TURN, Accepted, Acceptor, Interest, LEAVING_LIMIT, LEAVING_PACE, LinkKey, LinkTable, SessionKey,
};
use tables::Tables;

/// A running worker.
pub(crate) struct Handle {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    pub(crate) fn start(index: usize, common: &Arc<Common>) -> io::Result<Handle> {
        let inbox = Arc::new(Inbox::new(index)?);
        let (worker, tables) = Worker::new(Arc::clone(common), Arc::clone(&inbox))?;
        let name = format!("messenger-{index}");
        let thread = thread::Builder::new().name(name).spawn(move || worker.run(tables))?;
        Ok(Handle { inbox, thread: Some(thread) })
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Waits for the thread's end, unless this is the thread.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != thread::current().id()) {
            let _ = thread.join(); // its panic has been reported by the panic hook
        }
    }
}

/// What everything on a worker refers to.
struct Context {
    common: Arc<Common>,
    inbox: Arc<Inbox>,
    /// All workers of the messenger, by their numbers.
    workers: Vec<Arc<Inbox>>,
    /// The time of this turn.
    now: Instant,
}

impl Context {
    /// Whether sessions are between peers, which may both call.
    fn is_peer(&self) -> bool {
        self.common.policy.standby && !self.common.policy.server
    }

    /// What a session says of this end.
    fn local_end(&self, can_call: bool) -> LocalEnd {
        let address = self.common.address.lock().unwrap_or_else(PoisonError::into_inner);
        let address = address.as_ref().and_then(Address::socket_address);
        LocalEnd { entity: self.common.entity, address, can_call }
    }
}

struct Worker {
    desk: Arc<Desk>,
    sleeper: Sleeper,
    acceptor: Acceptor,
    /// When transports want to be looked after.
    tend_at: Option<Instant>,
    is_stopping: bool,
}

impl Worker {
    fn new(common: Arc<Common>, inbox: Arc<Inbox>) -> io::Result<(Worker, Box<Tables>)> {
        let (desk, reactor) = (Arc::<Desk>::default(), Reactor::new(Arc::clone(&inbox))?);
        inbox.set_desk(Arc::<Desk>::clone(&desk));
        let (sleeper, links) = (reactor.sleeper(), LinkTable::new(reactor));
        let cx = Context { common, inbox, workers: Vec::new(), now: Instant::now() };
        let tables = Box::new(Tables::new(cx, links));
        Ok((Worker { desk, sleeper, acceptor: Acceptor::default(), tend_at: None, is_stopping: false }, tables))
    }

    fn run(mut self, mut tables: Box<Tables>) {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        let mut spin = Spin::new(tables.cx.common.polling);
        while !self.is_stopping {
            tables = self.wait(tables, &mut events, &mut spin);
            tables.cx.now = Instant::now();
            for event in events.drain(..) {
                self.handle(&mut tables, event);
                self.execute_commands(&mut tables);
            }
            self.execute_commands(&mut tables);
            self.handle_timers(&mut tables);
        }
        self.stop(&mut tables);
    }

    /// Waits until there is something to do: polls for as long as that pays, then sleeps.
    fn wait(&self, mut tables: Box<Tables>, events: &mut Vec<epoll::Event>, spin: &mut Spin) -> Box<Tables> {
        spin.begin(tables.cx.now);
        loop {
            if poll_ready(&mut tables) {
                spin.paid();
                return tables;
            }
            if !spin.goes_on() {
                return self.sleep(tables, events);
            }
            if !spin.asks_the_system(tables.links.polled() == 0) {
                std::hint::spin_loop();
                continue;
            }
            self.sleeper.wait(events, Some(Duration::ZERO));
            if !events.is_empty() {
                spin.paid();
                return tables;
            }
            tables.cx.now = Instant::now();
            if self.next_timer(&tables).is_some_and(|next| next <= tables.cx.now) {
                return tables;
            }
        }
    }

    /// Sleeps until there is something to do. Meanwhile the tables are on the desk.
    fn sleep(&self, mut tables: Box<Tables>, events: &mut Vec<epoll::Event>) -> Box<Tables> {
        let something_came = tables.links.arm();
        if tables.cx.inbox.fall_asleep() && !something_came {
            if let Some(next) = self.next_timer(&tables) {
                tables.links.reactor.set_timer(next);
            }
            self.desk.lay(tables);
            self.sleeper.wait(events, None);
            tables = self.desk.take().unwrap_or_else(|| unreachable!("only the worker takes its tables"));
        }
        tables.cx.inbox.wake_up();
        tables.links.disarm();
        tables
    }

    fn handle(&mut self, tables: &mut Tables, event: epoll::Event) {
        match tables.links.reactor.decode(event) {
            Some(Ready::Listener(index)) => self.accept(tables, index),
            Some(Ready::Link { key, readable }) => tables.serve(key, readable),
            None => {}
        }
    }

    fn accept(&mut self, tables: &mut Tables, index: usize) {
        for _ in 0..ACCEPTS_PER_TURN {
            match self.acceptor.accept(index, &tables.cx) {
                Some(Accepted::Here(link)) => tables.take(*link),
                Some(Accepted::Elsewhere) => {}
                None => return,
            }
        }
    }

    fn execute_commands(&mut self, tables: &mut Tables) {
        let mut commands = Vec::new();
        tables.cx.inbox.take(&mut commands);
        commands.into_iter().for_each(|command| self.execute(tables, command));
    }

    fn execute(&mut self, tables: &mut Tables, command: Command) {
        match command {
            Command::Request(Request::Flush(connection)) => tables.settle(SessionKey::of(&connection)),
            Command::Room(link) => tables.make_room(link),
            Command::Connect(connection) => tables.connect(connection),
            Command::Take(link) => tables.take(*link),
            Command::Adopt(link, open, connection) => tables.adopt_from_elsewhere(*link, open, &connection),
            Command::Request(Request::Close(connection)) => {
                tables.with_session(SessionKey::of(&connection), Session::close);
            }
            Command::Request(Request::Abort(connection)) => {
                tables.with_session(SessionKey::of(&connection), Session::abort);
            }
            Command::Request(Request::Cut(connection)) => tables.cut(SessionKey::of(&connection)),
            Command::Listen(listener) => self.acceptor.listen(listener, &tables.links.reactor),
            Command::Workers(workers) => tables.cx.workers = workers,
            Command::Stop => self.is_stopping = true,
        }
    }

    /// The earliest timer of all.
    fn next_timer(&self, tables: &Tables) -> Option<Instant> {
        let (sessions, links) = (tables.sessions.next_timer(), tables.links.next_timer());
        [sessions, links, self.tend_at].into_iter().flatten().min()
    }

    fn handle_timers(&mut self, tables: &mut Tables) {
        tables.handle_timers();
        self.tend_at = self.tend_at.filter(|at| *at > tables.cx.now);
        // Also where a link has ended in this turn, and nothing else may happen for hours.
        if self.tend_at.is_none() {
            self.tend_at = tables.cx.common.stacks.tend();
        }
    }

    /// Ends every session, and tells its owner. Then waits, not for long, until the peers of closed sessions have
    /// everything.
    fn stop(&self, tables: &mut Tables) {
        for key in tables.sessions.keys() {
            tables.with_session(key, Session::abort);
        }
        let until = Instant::now() + LEAVING_LIMIT;
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        loop {
            let leaving = tables.links.leaving();
            tables.cx.now = Instant::now();
            if leaving.is_empty() || tables.cx.now >= until {
                return;
            }
            self.sleeper.wait(&mut events, Some(LEAVING_PACE));
            leaving.into_iter().for_each(|key| tables.serve(key, true));
        }
    }
}

/// Serves polled links that have something, and returns whether there was something to do, commands included.
///
/// Links are served at the time of the last turn or system call: a few dozen microseconds old at most, where the
/// clock itself would cost a twentieth of a round trip.
fn poll_ready(tables: &mut Tables) -> bool {
    if tables.cx.inbox.is_waiting() {
        return true;
    }
    let mut found = false;
    for index in 0..tables.links.polled() {
        if let Some(key) = tables.links.poll_ready(index) {
            tables.serve(key, true);
            found = true;
        }
    }
    found
}

/// What a peer without a session has failed to do.
const OPENING: &str = "greet and open a session";

// What other threads ask of a worker, and how they wake it.

/// A request to a worker.
pub(crate) enum Command {
    /// The workers of the messenger, in order.
    Workers(Vec<Arc<Inbox>>),
    /// Accept connections there.
    Listen(Box<dyn Listener>),
    /// Begin that session.
    Connect(Connection),
    /// What a connection asks for.
    Request(Request),
    /// Serve a link that a peer opened, with the handshake begun.
    Take(Box<LinkState>),
    /// Serve a link whose peer has named a session of this worker.
    Adopt(Box<LinkState>, Open, Connection),
    /// There may be room for the message that blocks that link.
    Room(LinkKey),
    /// End the thread.
    Stop,
}

/// Sends in the calling thread, while the worker sleeps.
trait SendsNow: Send + Sync {
    /// Sends what the connection has queued. `false`: the worker must. Calls no owner, and never waits.
    fn send_now(&self, connection: &Connection) -> bool;
}

/// The queue of a worker's commands. Any thread may post; only the worker takes.
pub(crate) struct Inbox {
    /// The worker's number in its messenger.
    worker: usize,
    commands: Mutex<Vec<Command>>,
    /// Whether there are commands. Read without the lock.
    waiting: AtomicBool,
    /// Whether the worker sleeps, or is about to: a thread that posts must wake it.
    asleep: AtomicBool,
    waker: OwnedFd,
    /// What can send while the worker sleeps.
    desk: OnceLock<Arc<dyn SendsNow>>,
}

impl Inbox {
    fn new(worker: usize) -> io::Result<Inbox> {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Inbox {
            worker,
            commands: Mutex::default(),
            waiting: false.into(),
            asleep: false.into(),
            waker,
            desk: OnceLock::new(),
        })
    }

    /// What can send while the worker sleeps. Set once.
    fn set_desk(&self, desk: Arc<dyn SendsNow>) {
        let _ = self.desk.set(desk);
    }

    /// Queues a command, and wakes the worker if it sleeps.
    pub(crate) fn post(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.waiting.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes()); // fails only when the counter is full
        }
    }

    /// Whether there are commands.
    fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Moves the commands to `into`, which must be empty.
    fn take(&self, into: &mut Vec<Command>) {
        // A load before the exchange: usually there is nothing, and this is called after each event.
        if self.is_waiting() && self.waiting.swap(false, Ordering::SeqCst) {
            std::mem::swap(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner), into);
        }
    }

    /// Announces that the worker is about to sleep. Returns whether it may: no command came before the announcement.
    fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        !self.waiting.load(Ordering::SeqCst)
    }

    /// Announces that the worker is awake.
    fn wake_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// The eventfd that wakes the worker.
    fn waker(&self) -> &OwnedFd {
        &self.waker
    }
}

impl Mailbox for Inbox {
    fn worker(&self) -> usize {
        self.worker
    }

    fn request(&self, request: Request) {
        let is_sent = match &request {
            Request::Flush(connection) if self.asleep.load(Ordering::SeqCst) => {
                self.desk.get().is_some_and(|desk| desk.send_now(connection))
            }
            _ => false,
        };
        if !is_sent {
            self.post(Command::Request(request));
        }
    }
}

// Where a worker leaves its tables while it sleeps: a thread that sends finds them there, and sends by itself what is
// the only message under way. To wake the worker for it would take longer than everything else that a small request
// costs.
//
// Messages that follow each other go by the worker: it sends many of them in one system call.

/// See the module's documentation. Empty while the worker is awake, and after its end.
#[derive(Default)]
struct Desk(Mutex<Option<Box<Tables>>>);

impl Desk {
    /// The worker is about to sleep.
    fn lay(&self, tables: Box<Tables>) {
        *self.lock() = Some(tables);
    }

    /// The worker is awake. Waits for a thread that sends.
    fn take(&self) -> Option<Box<Tables>> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<Tables>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SendsNow for Desk {
    fn send_now(&self, connection: &Connection) -> bool {
        let mut tables = match self.0.try_lock() {
            Ok(tables) => tables,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false, // the worker takes them, or another thread sends
        };
        let Some(tables) = tables.as_mut() else { return false };
        tables.cx.now = Instant::now();
        let (key, Tables { cx, links, sessions, transmitter, .. }) = (SessionKey::of(connection), &mut **tables);
        if !sessions.find(key).is_some_and(|entry| transmitter.send_now(entry, links, cx)) {
            return false;
        }
        sessions.schedule(key);
        // The worker has set the clock for what it knew of.
        if let Some(next) = [sessions.next_timer(), links.next_timer()].into_iter().flatten().min() {
            links.reactor.set_timer(next);
        }
        true
    }
}

// What a worker sleeps on: one epoll instance with an eventfd for other threads, a timerfd, listeners and links.

/// See the module's documentation.
struct Reactor {
    epoll: Arc<OwnedFd>,
    /// The inbox, whose eventfd is watched.
    inbox: Arc<Inbox>,
    timerfd: OwnedFd,
    /// When the timerfd fires, if it is set.
    timer_at: Option<Instant>,
}

/// Waits for what a reactor watches.
struct Sleeper(Arc<OwnedFd>);

impl Sleeper {
    /// Waits for events, for ever without a limit. An interrupted wait returns none.
    fn wait(&self, events: &mut Vec<epoll::Event>, limit: Option<Duration>) {
        let limit = limit.map(timespec);
        events.clear();
        let _ = epoll::wait(&self.0, rustix::buffer::spare_capacity(events), limit.as_ref());
    }
}

/// An event that the worker has to handle.
enum Ready {
    /// The listener of that index has connections to accept.
    Listener(usize),
    /// That link is ready: to be read, unless `readable` is false.
    Link { key: LinkKey, readable: bool },
}

impl Reactor {
    fn new(inbox: Arc<Inbox>) -> io::Result<Reactor> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&epoll, inbox.waker(), epoll::EventData::new_u64(WAKER), epoll::EventFlags::IN)?;
        let timerfd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &timerfd, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
        Ok(Reactor { epoll, inbox, timerfd, timer_at: None })
    }

    fn add_listener(&self, index: usize, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(LISTENERS + index as u64);
        Ok(epoll::add(&self.epoll, descriptor, data, epoll::EventFlags::IN)?)
    }

    fn add_link(&self, key: LinkKey, descriptor: BorrowedFd<'_>, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, descriptor, epoll::EventData::new_u64(key.id().0), flags(interest))?)
    }

    fn change_link(&self, key: LinkKey, descriptor: BorrowedFd<'_>, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, descriptor, epoll::EventData::new_u64(key.id().0), flags(interest))?)
    }

    fn remove_link(&self, descriptor: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, descriptor); // epoll has already forgotten a closed descriptor
    }

    /// What waits for its events, also while the reactor is elsewhere.
    fn sleeper(&self) -> Sleeper {
        Sleeper(Arc::clone(&self.epoll))
    }

    /// Makes sure that the timerfd fires no later than `next`. A timeout of epoll would serve too, but the system would
    /// set and unset a clock for each sleep; the first timer changes some times a second at most.
    fn set_timer(&mut self, next: Instant) {
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
    fn decode(&mut self, event: epoll::Event) -> Option<Ready> {
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
const EVENTS_PER_TURN: usize = 256;

// How long to poll before sleeping. Polling avoids the delay of the scheduler, and costs processor time that other
// processes may need. So it is off by default, and the adaptive kind stops where it rarely finds something.

/// The polling of one worker.
pub(crate) struct Spin {
    polling: Polling,
    until: Option<Instant>,
    /// Polls in this round.
    looks: u32,
    /// Share of recent rounds that found something, as a decaying average in 256ths.
    paying: u32,
    rounds: u32,
}

impl Spin {
    pub(crate) fn new(polling: Polling) -> Spin {
        Spin { polling, until: None, looks: 0, paying: 256, rounds: 0 }
    }

    /// Begins a round.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.looks = 0;
        self.rounds = self.rounds.wrapping_add(1);
        self.until = match self.polling {
            Polling::Adaptive(limit) if self.is_worth_it() => Some(now + limit.min(LONGEST)),
            _ => None,
        };
    }

    /// Whether to poll once more.
    pub(crate) fn goes_on(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        match (self.polling, self.until) {
            (Polling::Spin, _) => true,
            (_, None) => false,
            // Reading the clock costs as much as several polls.
            (_, Some(until)) if self.looks.is_multiple_of(LOOKS_PER_CLOCK) && Instant::now() >= until => {
                self.paying -= self.paying / 8;
                self.until = None;
                false
            }
            _ => true,
        }
    }

    /// Whether this poll should ask epoll, which is a system call. `only_way`: there is nothing else to poll.
    fn asks_the_system(&self, only_way: bool) -> bool {
        only_way || self.looks.is_multiple_of(LOOKS_PER_CALL)
    }

    /// Notes that the round found something.
    fn paid(&mut self) {
        if self.looks > 0 {
            self.paying += (256 - self.paying) / 8;
        }
    }

    /// Whether at least every fourth round found something. Sometimes a round is tried anyway.
    fn is_worth_it(&self) -> bool {
        self.paying >= 64 || self.rounds.is_multiple_of(ROUNDS_PER_TRIAL)
    }
}

/// The longest round. A worker that sleeps for longer gains nothing by waking faster.
const LONGEST: Duration = Duration::from_millis(10);

const LOOKS_PER_CLOCK: u32 = 16;

/// Sockets are polled once in this many polls of memory.
const LOOKS_PER_CALL: u32 = 256;

const ROUNDS_PER_TRIAL: u32 = 64;
