//! One thread, one reactor, and all that lives on it: links ([`line`]), sessions, their timers. Nothing here waits but for
//! the descriptor of epoll, and no lock is held while anything is done.
//!
//! ```text
//!            ┌──────────────────────────── a turn ────────────────────────────────┐
//!   epoll ──▶│ a line is readable: receive, find frames, dispatch each message    │──▶ Dispatcher (the owner's code)
//!            │   … then settle its session: letters ─▶ frames ─▶ one vectored send│
//!   inbox ──▶│ commands of other threads: flush, connect, adopt a link, …         │
//!   timers ─▶│ sessions and lines whose time has come                             │
//!            └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Whatever the owner sends while a message is dispatched lies in the letter box until the messages that came together are
//! all dispatched, and then goes in one system call. A single message goes at once.

mod line;
mod places;
mod spin;
mod timers;

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

pub(crate) use line::Manners;
pub(crate) use spin::Spin;

use crate::buffer::Buffer;
use crate::connection::{Connection, NOWHERE, Queued};
use crate::error::Broken;
use crate::frame::{NO_BODIES, Preamble, Step};
use crate::handshake::Established;
use crate::message::{Arrival, Delivery};
use crate::messenger::Common;
use crate::registry::Name;
use crate::session::{Action, LinkId, News, Outgoing, Place, Said, Session, Verdict};
use crate::signal::{Label, MESSAGE, Open, Refusal, Signal};
use crate::stack::{Link, Listener};
use crate::throttle::{Permit, Throttle};
use line::{Coming, Interest, Line, Phase};
use places::{Key, Places};
use timers::Timers;

/// What others want of a worker.
pub(crate) enum Command {
    /// These are the workers of the messenger, in order.
    Meet(Vec<Arc<Inbox>>),
    /// Accept there.
    Listen(Box<dyn Listener>),
    /// Begin that session.
    Connect(Connection),
    /// Its letter box is no longer empty.
    Flush(Connection),
    /// End it when all is said.
    Close(Connection),
    /// End it.
    Abort(Connection),
    /// Break its link.
    Cut(Connection),
    /// A link that somebody has called us on.
    Take(Box<Line>),
    /// A link that means a session of this worker.
    Adopt(Box<Line>, Open, Connection),
    /// There may be room for what that line holds back.
    Room(Key),
    /// End.
    Stop,
}

/// Where commands are left for a worker.
pub(crate) struct Inbox {
    commands: Mutex<Vec<Command>>,
    /// Whether there are any: looked at without the lock.
    waiting: AtomicBool,
    /// Whether the worker sleeps, or is about to: who leaves something must ring.
    asleep: AtomicBool,
    bell: OwnedFd,
}

impl Inbox {
    fn new() -> io::Result<Inbox> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Inbox { commands: Mutex::default(), waiting: false.into(), asleep: false.into(), bell })
    }

    /// Leaves a command, and rings if the worker sleeps.
    pub(crate) fn post(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.waiting.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes()); // it fails only when it has been rung 2^64 times
        }
    }

    fn take(&self, into: &mut Vec<Command>) {
        // The look before the exchange: as a rule there is nothing, and this is asked after each event.
        if self.waiting.load(Ordering::Acquire) && self.waiting.swap(false, Ordering::SeqCst) {
            std::mem::swap(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner), into);
        }
    }
}

/// A running worker.
pub(crate) struct Handle {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    pub(crate) fn start(index: usize, common: &Arc<Common>) -> io::Result<Handle> {
        let inbox = Arc::new(Inbox::new()?);
        let mut worker = Worker::new(Arc::clone(common), Arc::clone(&inbox))?;
        let name = format!("messenger-{index}");
        let thread = thread::Builder::new().name(name).spawn(move || worker.run())?;
        Ok(Handle { inbox, thread: Some(thread) })
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Waits for its end; nothing to wait for if it is the one that asks.
    pub(crate) fn join(&mut self) {
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != thread::current().id()) {
            let _ = thread.join(); // its panic has been reported by the panic hook
        }
    }
}

/// A session and what belongs to it on this worker.
struct Talk {
    session: Session<Queued>,
    connection: Connection,
    /// What it has received and its owner has not let go.
    receive: Arc<Throttle>,
    /// The line that serves it.
    line: Option<Key>,
    /// By which it is found.
    names: Vec<Name>,
    timer: Option<Instant>,
}

/// Whom a timer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Whom {
    Talk(Key),
    Line(Key),
    /// What transports have put off.
    Stacks,
}

struct Worker {
    common: Arc<Common>,
    inbox: Arc<Inbox>,
    colleagues: Vec<Arc<Inbox>>,
    epoll: OwnedFd,
    listeners: Vec<Box<dyn Listener>>,
    lines: Places<Line>,
    talks: Places<Talk>,
    timers: Timers<Whom>,
    /// When transports are to be looked after.
    tends_at: Option<Instant>,
    /// Rings when a timer is due, and when it is set to.
    alarm: OwnedFd,
    alarm_at: Option<Instant>,
    /// Lines of stacks that can be looked at without a system call.
    glanceable: Vec<Key>,
    /// Lines without a session, that others opened.
    strangers: usize,
    /// Received bytes on their way into frames; one for all lines, as only one is read at a time.
    buffer: Vec<u8>,
    letters: VecDeque<Queued>,
    now: Instant,
    stopping: bool,
}

impl Worker {
    fn new(common: Arc<Common>, inbox: Arc<Inbox>) -> io::Result<Worker> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &inbox.bell, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN)?;
        let alarm = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &alarm, epoll::EventData::new_u64(ALARM), epoll::EventFlags::IN)?;
        Ok(Worker {
            common,
            inbox,
            colleagues: Vec::new(),
            epoll,
            listeners: Vec::new(),
            lines: Places::default(),
            talks: Places::default(),
            timers: Timers::default(),
            tends_at: None,
            alarm,
            alarm_at: None,
            glanceable: Vec::new(),
            strangers: 0,
            buffer: vec![0; RECEIVE_BYTES],
            letters: VecDeque::new(),
            now: Instant::now(),
            stopping: false,
        })
    }

    fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        let mut spin = self.common.spin();
        while !self.stopping {
            self.wait(&mut events, &mut spin);
            self.now = Instant::now();
            for event in events.drain(..) {
                self.handle(event);
                self.obey();
            }
            self.obey();
            self.look_at_timers();
        }
        self.end();
    }

    /// Until there is something to do: looks around for as long as it pays, then sleeps.
    fn wait(&mut self, events: &mut Vec<epoll::Event>, spin: &mut Spin) {
        spin.begin(self.now);
        loop {
            if self.glance() {
                return spin.paid();
            }
            let looks = spin.goes_on();
            if looks && !spin.asks_the_system(self.glanceable.is_empty()) {
                std::hint::spin_loop();
                continue;
            }
            if looks {
                self.poll(events, Some(Duration::ZERO));
                if !events.is_empty() {
                    return spin.paid();
                }
                self.now = Instant::now();
                if self.timers.next().is_some_and(|next| next <= self.now) {
                    return;
                }
                continue;
            }
            return self.sleep(events);
        }
    }

    /// Whether somebody left a command, or a line that can be looked at has something: that is dealt with at once, at the time of the
    /// last turn or call (a few dozen microseconds old at most, where the clock itself would cost a twentieth of a round trip).
    fn glance(&mut self) -> bool {
        if self.inbox.waiting.load(Ordering::Acquire) {
            return true;
        }
        let mut found = false;
        for at in 0..self.glanceable.len() {
            let Some(&key) = self.glanceable.get(at) else { break };
            if self.lines.get_mut(key).is_some_and(Line::has_something) {
                self.serve(key, true);
                found = true;
            }
        }
        found
    }

    fn sleep(&mut self, events: &mut Vec<epoll::Event>) {
        let mut awaited = false;
        for at in 0..self.glanceable.len() {
            let Some(&key) = self.glanceable.get(at) else { break };
            awaited |= self.lines.get_mut(key).is_some_and(Line::arm);
        }
        self.inbox.asleep.store(true, Ordering::SeqCst);
        if !awaited && !self.inbox.waiting.load(Ordering::SeqCst) {
            self.set_alarm();
            self.poll(events, None);
        }
        self.inbox.asleep.store(false, Ordering::SeqCst);
        for at in 0..self.glanceable.len() {
            let Some(&key) = self.glanceable.get(at) else { break };
            if let Some(line) = self.lines.get_mut(key) {
                line.link.disarm();
            }
        }
    }

    /// Sees to it that the alarm rings no later than the first timer. A time-out of epoll would do too, but the system would
    /// set and unset a clock for each sleep; the first timer changes some times a second at most.
    fn set_alarm(&mut self) {
        let Some(next) = self.timers.next().filter(|next| self.alarm_at.is_none_or(|alarm| *next < alarm)) else {
            return;
        };
        let left = next.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1)); // 0 would unset it
        let it_value = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let once = Itimerspec { it_interval: Timespec::default(), it_value };
        match timerfd_settime(&self.alarm, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.alarm_at = Some(next),
            Err(error) => tracing::error!(%error, "the alarm cannot be set: timers are late"),
        }
    }

    fn poll(&self, events: &mut Vec<epoll::Event>, limit: Option<Duration>) {
        let limit =
            limit.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) });
        events.clear();
        // An interrupted wait is one in which nothing happened.
        let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), limit.as_ref());
    }

    fn handle(&mut self, event: epoll::Event) {
        let (data, flags) = (event.data, event.flags); // the struct is packed
        match data.u64() {
            BELL => {
                let _ = rustix::io::read(&self.inbox.bell, &mut [0; 8]);
            }
            ALARM => {
                let _ = rustix::io::read(&self.alarm, &mut [0; 8]);
                self.alarm_at = None;
            }
            listener if listener >= LISTENERS => self.accept((listener - LISTENERS) as usize),
            key => self.serve(Key(key), flags != epoll::EventFlags::OUT),
        }
    }

    /// A line has something to tell. Whatever breaks it is dealt with here.
    fn serve(&mut self, key: Key, readable: bool) {
        let Some(line) = self.lines.get_mut(key) else { return };
        let before = line.talk();
        let outcome = match &line.phase {
            Phase::Calling(talk) => {
                let talk = *talk;
                self.answered(key, talk)
            }
            Phase::Greeting { .. } => self.greet(key),
            Phase::Leaving => self.leave(key),
            Phase::Unbound | Phase::Serving(_) if readable => self.receive(key),
            Phase::Unbound | Phase::Serving(_) => Ok(()),
        };
        if let Err(broken) = outcome {
            self.give_up(key, broken);
        }
        match self.lines.get(key).and_then(Line::talk).or(before) {
            Some(talk) => self.settle(talk),
            None => self.flush_line(key),
        }
        self.ask_epoll(key);
    }

    fn answered(&mut self, key: Key, talk: Key) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        match line.link.finish_call() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            answered => answered.map_err(Broken::Unreachable)?,
        }
        line.greet(Some(talk), &self.common.manners, self.now)?;
        self.greet(key)
    }

    fn greet(&mut self, key: Key) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        let Some(established) = line.go_on_greeting()? else { return Ok(()) };
        self.greeted(key, established)
    }

    fn greeted(&mut self, key: Key, mut established: Established) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        line.settle_on(&mut established);
        match line.talk() {
            None => line.phase = Phase::Unbound,
            Some(caller) => {
                if let Some(talk) = self.talks.get_mut(caller) {
                    talk.session.link_up(LinkId(key.0), self.now);
                }
                self.settle(caller); // it takes the line, or hangs it up
            }
        }
        self.read_held(key)?;
        self.receive(key)
    }

    /// Receives and reads for as long as there is something, within a turn's share.
    fn receive(&mut self, key: Key) -> Result<(), Broken> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let outcome = self.receive_into(key, &mut buffer);
        self.buffer = buffer;
        outcome
    }

    fn receive_into(&mut self, key: Key, buffer: &mut [u8]) -> Result<(), Broken> {
        for _ in 0..RECEIVES_PER_TURN {
            let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
            if !line.wanted().readable {
                return Ok(());
            }
            let (received, room, landed) = match line.reader.landing() {
                Some(landing) => {
                    let direct = landing.len();
                    let mut pieces = [IoSliceMut::new(landing), IoSliceMut::new(buffer)];
                    (line.link.receive(&mut pieces), direct + RECEIVE_BYTES, direct)
                }
                None => (line.link.receive(&mut [IoSliceMut::new(buffer)]), RECEIVE_BYTES, 0),
            };
            let count = match received {
                Ok(0) => return Err(Broken::Ended),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Broken::Io(error)),
            };
            let direct = count.min(landed);
            line.reader.landed(direct);
            self.hear(key);
            self.read(key, &buffer[..count - direct])?;
            if count < room {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Bytes have come for a session: its owner may send, and need not tell us.
    fn hear(&mut self, key: Key) {
        let talk = self.lines.get(key).and_then(Line::talk);
        if let Some(talk) = talk.and_then(|talk| self.talks.get_mut(talk)) {
            talk.session.hear(self.now);
            talk.connection.expect_letters();
        }
    }

    /// Finds frames in bytes that have come.
    fn read(&mut self, key: Key, mut input: &[u8]) -> Result<(), Broken> {
        loop {
            let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
            match line.reader.next(&mut input)? {
                Step::Head(preamble) => self.head(key, preamble)?,
                Step::Whole => self.whole(key)?,
                Step::Hungry => {
                    line.held.extend_from_slice(input); // only if it is barred: otherwise nothing is left
                    return Ok(());
                }
            }
        }
    }

    fn read_held(&mut self, key: Key) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        let held = std::mem::take(&mut line.held);
        self.read(key, &held)
    }

    fn head(&mut self, key: Key, preamble: Preamble) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        if preamble.tag == MESSAGE {
            let label = Label::decode(line.reader.head())?;
            line.coming = Some(Coming::Barred(preamble, label));
            return self.admit(key);
        }
        let malformed = crate::frame::Malformed::Content { tag: preamble.tag };
        line.coming = Some(Coming::Signal(Signal::decode(preamble.tag, line.reader.head())?));
        line.reader.land(NO_BODIES).map_err(|_| Broken::Malformed(malformed)) // signals have no bodies
    }

    /// Gives a message memory to land in, if there is room for it; otherwise the line waits, and with it the peer.
    fn admit(&mut self, key: Key) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        let Some(Coming::Barred(preamble, label)) = &line.coming else { return Ok(()) };
        let (preamble, label) = (*preamble, *label);
        let Some(talk) = line.talk().and_then(|talk| self.talks.get(talk)) else {
            return Err(Broken::Violation(crate::session::Violation::OutOfTurn));
        };
        let (throttle, bytes) = (&talk.receive, preamble.body_bytes() as usize);
        let wait = || {
            let inbox = Arc::clone(&self.inbox);
            throttle.take_or_wait(bytes, move || inbox.post(Command::Room(key)))
        };
        let Some(permit) = throttle.take(bytes).or_else(wait) else { return Ok(()) };
        let alignment = preamble.data_alignment();
        let [front, middle, data] = preamble.bodies.map(|length| length as usize);
        let arrival = Arrival { transaction: label.transaction, kind: label.kind, bodies: preamble.bodies, alignment };
        let chosen = match data {
            0 => None,
            _ => self.common.dispatcher.memory(&talk.connection, &arrival).filter(|buffer| buffer.len() == data),
        };
        let take =
            |length, alignment| if length == 0 { Buffer::EMPTY } else { self.common.pool.take(length, alignment) };
        let data = chosen.unwrap_or_else(|| take(data, alignment));
        line.coming = Some(Coming::Message(label, permit));
        let landed = line.reader.land([take(front, 1), take(middle, 1), data]);
        landed.map_err(|_| Broken::Malformed(crate::frame::Malformed::Content { tag: preamble.tag }))
    }

    fn whole(&mut self, key: Key) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        match line.coming.take() {
            Some(Coming::Message(label, permit)) => self.deliver(key, &label, permit),
            Some(Coming::Signal(Signal::Open(open))) => self.opened_by(key, open),
            Some(Coming::Signal(signal)) => self.obey_signal(key, signal),
            Some(Coming::Barred(..)) | None => Ok(()),
        }
    }

    fn deliver(&mut self, key: Key, label: &Label, permit: Permit) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        let [front, middle, data] = line.reader.bodies();
        let Some(talk) = line.talk().and_then(|talk| self.talks.get_mut(talk)) else { return Ok(()) };
        if talk.session.handle_message(LinkId(key.0), label, self.now)? == Verdict::Deliver {
            let Label { number, transaction, kind, .. } = *label;
            let delivery = Delivery { transaction, kind, number, front, middle, data, permit: Some(permit) };
            self.common.dispatcher.message(&talk.connection, delivery);
        }
        Ok(())
    }

    fn obey_signal(&mut self, key: Key, signal: Signal) -> Result<(), Broken> {
        let Some(talk_key) = self.lines.get(key).and_then(Line::talk) else {
            return Err(Broken::Violation(crate::session::Violation::OutOfTurn));
        };
        let Some(talk) = self.talks.get_mut(talk_key) else { return Ok(()) };
        talk.session.handle_signal(LinkId(key.0), signal, self.now)?;
        if let Signal::Opened(open) = signal {
            self.meet(talk_key, &open);
        }
        self.act(talk_key);
        Ok(())
    }

    /// Somebody says which session a line is for: it is found, wherever it lives, or made here.
    fn opened_by(&mut self, key: Key, open: Open) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        if !matches!(line.phase, Phase::Unbound) {
            return Err(Broken::Violation(crate::session::Violation::OutOfTurn));
        }
        if open.entity == self.common.entity {
            line.say(Signal::Refused(Refusal::Oneself));
            return Ok(());
        }
        let common = Arc::clone(&self.common);
        let mut registry = common.registry();
        if let Some(connection) = registry.find(&open).cloned() {
            drop(registry);
            return self.hand_over(key, open, connection);
        }
        let answer = match () {
            () if open.to.is_some() => Some(Signal::Reset),
            () if !common.serving.load(Ordering::Acquire) => Some(Signal::Refused(Refusal::NotServing)),
            () if registry.sessions() >= common.most_sessions => Some(Signal::Refused(Refusal::Full)),
            () if open.lossy != common.policy.lossy => Some(Signal::Refused(Refusal::Policy)),
            () => None,
        };
        if let Some(answer) = answer {
            line.say(answer);
            return Ok(());
        }
        // A peer that listens can be called back, there and not where it happens to have called from.
        let is_peer = common.policy.standby && !common.policy.server;
        let back = open.address.filter(|_| is_peer).map(|address| line.link.peer().elsewhere(address));
        let can_call = back.is_some();
        let peer = back.unwrap_or_else(|| line.link.peer());
        let budget = Throttle::new(common.policy.send_messages, common.policy.send_bytes);
        let connection = Connection::new(peer, Arc::clone(&self.inbox), budget);
        let session = Session::called(common.policy.clone(), self.place(can_call), random_id(), self.now);
        let talk = self.begin(session, connection.clone(), Vec::new());
        if let Some(talk) = self.talks.get_mut(talk) {
            let names = [Name::Ours(talk.session.cookie().id), Name::Theirs(open.entity, open.from.id)];
            names.iter().for_each(|name| registry.enter(*name, &connection));
            talk.names.extend(names);
        }
        drop(registry);
        self.adopt(key, open, talk);
        Ok(())
    }

    /// A line means a session that may live on another worker.
    fn hand_over(&mut self, key: Key, open: Open, connection: Connection) -> Result<(), Broken> {
        if Arc::ptr_eq(connection.inbox(), &self.inbox) && connection.place() != NOWHERE {
            self.adopt(key, open, Key(connection.place()));
            return Ok(());
        }
        // To another worker, or to ourselves behind the command that begins the session. Between OPEN and its answer nothing
        // is under way, so the line moves without losing a byte.
        if let Some(line) = self.remove_line(key) {
            let inbox = Arc::clone(connection.inbox());
            inbox.post(Command::Adopt(Box::new(line), open, connection));
        }
        Ok(())
    }

    fn adopt(&mut self, line: Key, open: Open, talk: Key) {
        let Some(talking) = self.talks.get_mut(talk) else {
            if let Some(line) = self.lines.get_mut(line) {
                line.say(Signal::Reset);
            }
            return;
        };
        talking.session.handle_open(LinkId(line.0), open, self.now);
        if talking.session.is_ready() {
            self.meet(talk, &open);
        }
        self.settle(talk);
    }

    /// The peer has said who it is: it can be found by that from now on.
    fn meet(&mut self, key: Key, open: &Open) {
        let Some(talk) = self.talks.get_mut(key) else { return };
        let policy = &self.common.policy;
        let is_peer = policy.standby && !policy.server;
        let mut names = vec![Name::Theirs(open.entity, open.from.id)];
        names.extend(open.address.filter(|_| is_peer).map(Name::Address));
        names.retain(|name| !talk.names.contains(name));
        let mut registry = self.common.registry();
        names.iter().for_each(|name| registry.enter(*name, &talk.connection));
        talk.names.extend(names);
    }

    /// Performs what a session asks for.
    fn act(&mut self, key: Key) {
        while let Some(talk) = self.talks.get_mut(key) {
            let Some(action) = talk.session.poll_action() else { break };
            match action {
                Action::Call => self.call(key),
                Action::Adopt(link) => {
                    talk.line = Some(Key(link.0));
                    if let Some(line) = self.lines.get_mut(Key(link.0)) {
                        let was_stranger = matches!(line.phase, Phase::Unbound);
                        self.strangers = self.strangers.saturating_sub(usize::from(was_stranger));
                        line.phase = Phase::Serving(key);
                        line.deadline = None;
                        line.reader.set_limits(self.common.policy.limits);
                        if let Some(greeted) = line.greeted.take() {
                            talk.connection.set_greeted(*greeted);
                        }
                    }
                }
                Action::Hang(link) => {
                    if talk.line == Some(Key(link.0)) {
                        talk.line = None;
                    }
                    drop(self.remove_line(Key(link.0)));
                }
                Action::Answer(link, signal) => {
                    if let Some(line) = self.lines.get_mut(Key(link.0)) {
                        line.say(signal);
                    }
                    self.flush_line(Key(link.0));
                    self.ask_epoll(Key(link.0));
                }
                Action::Tell(news) => self.tell(key, news),
            }
        }
    }

    fn tell(&mut self, key: Key, news: News) {
        let Some(talk) = self.talks.get_mut(key) else { return };
        let (dispatcher, connection) = (&self.common.dispatcher, &talk.connection);
        // Who knows that it is over may send at once, from any thread, and has to be told so again.
        if news.is_last() {
            connection.set_over();
        }
        match news {
            News::Connected => {
                connection.set_ready(true);
                dispatcher.connected(connection);
            }
            News::Reset { unheard, goes_on } => {
                connection.set_ready(false);
                dispatcher.reset(connection, unheard, goes_on);
            }
            News::Closed => dispatcher.closed(connection),
            News::Refused(why) => dispatcher.refused(connection, why),
        }
    }

    fn call(&mut self, key: Key) {
        let Some(talk) = self.talks.get_mut(key) else { return };
        let deadline = self.now + self.common.policy.opening_limit;
        match self.common.stacks.call(talk.connection.peer()) {
            Ok(link) => {
                let line = Line::new(link, Phase::Calling(key), deadline);
                self.insert_line(line);
            }
            Err(error) => {
                tracing::debug!(peer = %talk.connection.peer(), %error, "cannot be called");
                talk.connection.set_broken(Arc::new(Broken::Unreachable(error)));
                talk.session.call_failed(self.now);
            }
        }
    }

    /// Moves letters to the session, performs what it wants, writes what it says, sends what is written.
    fn settle(&mut self, key: Key) {
        loop {
            let Some(talk) = self.talks.get_mut(key) else { return };
            talk.connection.take_letters(&mut self.letters);
            // It may be over: the owner is told by that, not by each letter.
            let _ = talk.session.send_all(&mut self.letters, self.now);
            self.act(key);
            match self.write(key) {
                Ok(true) => {}
                Ok(false) => break,
                Err((line, broken)) => {
                    self.give_up(line, broken);
                    break;
                }
            }
        }
        self.look_later(key);
    }

    /// Writes and sends a share; whether there may be more.
    fn write(&mut self, key: Key) -> Result<bool, (Key, Broken)> {
        let Some(talk) = self.talks.get_mut(key) else { return Ok(false) };
        let Some(line_key) = talk.line else { return Ok(false) };
        let Some(line) = self.lines.get_mut(line_key) else { return Ok(false) };
        let mut more = true;
        while more && line.writer.len() < WRITE_AHEAD_BYTES {
            match talk.session.poll_transmit() {
                Some(Outgoing::Signal(signal)) => line.say(signal),
                Some(Outgoing::Message { number, heard, message }) => {
                    let message = match message {
                        Said::Once(Queued { message, .. }) => message,
                        Said::Kept(Queued { message, .. }) => message.clone(),
                    };
                    let label = Label { number, heard, transaction: message.transaction, kind: message.kind };
                    let bodies = [message.front, message.middle, message.data];
                    line.writer.frame(MESSAGE, &label.encode(), bodies, usize::from(message.alignment));
                }
                None => more = false,
            }
        }
        let was_blocked = line.interest.writable;
        let flushed = line.flush(self.now).map_err(|broken| (line_key, broken))?;
        if flushed == was_blocked {
            self.ask_epoll(line_key);
        }
        Ok(flushed && more)
    }

    fn flush_line(&mut self, key: Key) {
        let flushed = self.lines.get_mut(key).map(|line| line.flush(self.now));
        if let Some(Err(broken)) = flushed {
            self.give_up(key, broken);
        }
    }

    fn leave(&mut self, key: Key) -> Result<(), Broken> {
        let Some(line) = self.lines.get_mut(key) else { return Ok(()) };
        if !line.flush(self.now)? {
            return Ok(());
        }
        // A socket closed with unread bytes in it would take back what it has yet to deliver: the peer closes first.
        let mut rest = [0; LEAVING_PIECE_BYTES];
        loop {
            match line.link.receive(&mut [IoSliceMut::new(&mut rest)]) {
                Ok(0) => return Err(Broken::Ended),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Broken::Io(error)),
            }
        }
    }

    /// A line is of no use any more: its session is told, and goes on without.
    fn give_up(&mut self, key: Key, broken: Broken) {
        let Some(line) = self.remove_line(key) else { return };
        tracing::debug!(peer = %line.link.peer(), %broken, "a link ends");
        if matches!(line.phase, Phase::Greeting { talk: None, .. } | Phase::Unbound) {
            return self.common.dispatcher.turned_away(&line.link.peer(), &broken);
        }
        let Some(talk_key) = line.talk() else { return };
        let Some(talk) = self.talks.get_mut(talk_key) else { return };
        talk.connection.set_broken(Arc::new(broken));
        match line.phase {
            Phase::Serving(_) => {
                if talk.line == Some(key) {
                    talk.line = None;
                    talk.connection.set_ready(false);
                }
                talk.session.link_down(LinkId(key.0), self.now);
            }
            _ => talk.session.call_failed(self.now),
        }
        self.settle(talk_key);
    }

    fn begin(&mut self, session: Session<Queued>, connection: Connection, names: Vec<Name>) -> Key {
        let receive = self.common.policy.throttle();
        let talk = Talk { session, connection: connection.clone(), receive, line: None, names, timer: None };
        let key = self.talks.insert(talk);
        connection.set_place(key.0);
        key
    }

    /// Ends a session that is over; otherwise sees to it that it is looked at in time.
    fn look_later(&mut self, key: Key) {
        let Some(talk) = self.talks.get_mut(key) else { return };
        if talk.session.is_closed() {
            return self.finish(key);
        }
        if let Some(next) = talk.session.deadline()
            && talk.timer.is_none_or(|timer| next < timer)
        {
            talk.timer = Some(next);
            self.timers.set(next, Whom::Talk(key));
        }
    }

    fn finish(&mut self, key: Key) {
        self.act(key);
        let Some(talk) = self.talks.remove(key) else { return };
        talk.connection.set_over();
        self.common.registry().leave(&talk.names, &talk.connection);
        let Some(line) = talk.line.and_then(|line| self.lines.get_mut(line)) else { return };
        line.phase = Phase::Leaving;
        line.deadline = Some(self.now + LEAVING_LIMIT);
        if let Some(line) = talk.line {
            self.serve(line, false);
        }
    }

    fn obey(&mut self) {
        let mut commands = Vec::new();
        self.inbox.take(&mut commands);
        commands.into_iter().for_each(|command| self.obey_one(command));
    }

    fn obey_one(&mut self, command: Command) {
        let place = |connection: &Connection| Key(connection.place());
        match command {
            Command::Flush(connection) => self.settle(place(&connection)),
            Command::Room(key) => self.make_room(key),
            Command::Connect(connection) => self.connect(connection),
            Command::Take(line) => self.take(*line),
            Command::Adopt(line, open, connection) => {
                self.strangers += 1;
                let key = self.insert_line(*line);
                if let Some(key) = key {
                    self.adopt(key, open, place(&connection));
                    self.flush_line(key);
                    self.ask_epoll(key);
                }
            }
            Command::Close(connection) => self.with_session(place(&connection), |session, _| session.close()),
            Command::Abort(connection) => self.with_session(place(&connection), |session, _| session.abort()),
            Command::Cut(connection) => {
                let line = self.talks.get(place(&connection)).and_then(|talk| talk.line);
                if let Some(line) = line {
                    self.give_up(line, Broken::Cut);
                }
            }
            Command::Listen(listener) => self.listen(listener),
            Command::Meet(colleagues) => self.colleagues = colleagues,
            Command::Stop => self.stopping = true,
        }
    }

    fn with_session(&mut self, key: Key, what: impl FnOnce(&mut Session<Queued>, Instant)) {
        let now = self.now;
        if let Some(talk) = self.talks.get_mut(key) {
            talk.connection.take_letters(&mut self.letters);
            let _ = talk.session.send_all(&mut self.letters, now); // what was taken before the end is said before it
            what(&mut talk.session, now);
        }
        self.settle(key);
    }

    fn make_room(&mut self, key: Key) {
        let outcome = self.admit(key);
        let is_in = |line: &Line| !matches!(line.coming, Some(Coming::Barred(..)));
        let outcome = match outcome {
            Ok(()) if self.lines.get(key).is_some_and(is_in) => {
                self.hear(key);
                self.read_held(key)
            }
            other => other,
        };
        match outcome {
            Ok(()) => self.serve(key, true),
            Err(broken) => self.give_up(key, broken),
        }
    }

    fn connect(&mut self, connection: Connection) {
        let policy = self.common.policy.clone();
        let is_peer = policy.standby && !policy.server;
        let session = Session::calling(policy, self.place(true), random_id(), self.now);
        let ours = Name::Ours(session.cookie().id);
        self.common.registry().enter(ours, &connection);
        let address = connection.peer().socket_address().filter(|_| is_peer).map(Name::Address);
        let names = [ours].into_iter().chain(address).collect();
        let key = self.begin(session, connection, names);
        self.settle(key);
    }

    fn place(&self, can_call: bool) -> Place {
        let address = self.common.address.lock().unwrap_or_else(PoisonError::into_inner);
        let address = address.as_ref().and_then(crate::stack::Address::socket_address);
        Place { entity: self.common.entity, address, can_call }
    }

    fn listen(&mut self, listener: Box<dyn Listener>) {
        let data = epoll::EventData::new_u64(LISTENERS + self.listeners.len() as u64);
        match epoll::add(&self.epoll, listener.descriptor(), data, epoll::EventFlags::IN) {
            Ok(()) => self.listeners.push(listener),
            Err(error) => tracing::error!(address = %listener.address(), %error, "cannot listen"),
        }
    }

    fn accept(&mut self, index: usize) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = self.listeners.get_mut(index) else { return };
            let link = match listener.accept() {
                Ok(link) => link,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return tracing::warn!(address = %listener.address(), %error, "cannot accept"),
            };
            let line = match stranger(link, &self.common, self.now) {
                Ok(line) => line,
                Err(broken) => return tracing::warn!(%broken, "cannot greet"),
            };
            let next = self.common.next_worker.fetch_add(1, Ordering::Relaxed);
            let colleague = self.colleagues.get(next % self.colleagues.len().max(1)).cloned();
            match colleague.filter(|colleague| !Arc::ptr_eq(colleague, &self.inbox)) {
                Some(colleague) => colleague.post(Command::Take(line)),
                None => self.take(*line),
            }
        }
    }

    /// A line that somebody else called us on. Too many that say nothing, and the next is not listened to.
    fn take(&mut self, line: Line) {
        if self.strangers >= self.common.most_strangers {
            let peer = line.link.peer();
            tracing::warn!(%peer, "too many have called and said nothing: not listened to");
            return self.common.dispatcher.turned_away(&peer, &Broken::Ended);
        }
        self.strangers += 1;
        if let Some(key) = self.insert_line(line) {
            self.serve(key, true);
        }
    }

    fn insert_line(&mut self, mut line: Line) -> Option<Key> {
        let can_be_glanced_at = line.glanceable;
        line.interest = line.wanted();
        line.timer = None;
        let key = self.lines.insert(line);
        let line = self.lines.get_mut(key)?;
        let data = epoll::EventData::new_u64(key.0);
        if let Err(error) = epoll::add(&self.epoll, line.link.descriptor(), data, flags(line.interest)) {
            self.give_up(key, Broken::Io(error.into()));
            return None;
        }
        if can_be_glanced_at {
            self.glanceable.push(key);
        }
        self.watch_line(key);
        Some(key)
    }

    fn remove_line(&mut self, key: Key) -> Option<Line> {
        let line = self.lines.remove(key)?;
        let was_stranger = match &line.phase {
            Phase::Unbound => true,
            Phase::Greeting { talk, .. } => talk.is_none(),
            _ => false,
        };
        self.strangers = self.strangers.saturating_sub(usize::from(was_stranger));
        let _ = epoll::delete(&self.epoll, line.link.descriptor()); // a closed descriptor has gone by itself
        self.glanceable.retain(|other| *other != key);
        Some(line)
    }

    /// Tells epoll what a line waits for, when that has changed.
    fn ask_epoll(&mut self, key: Key) {
        let Some(line) = self.lines.get_mut(key) else { return };
        let wanted = line.wanted();
        if line.interest != wanted {
            line.interest = wanted;
            let data = epoll::EventData::new_u64(key.0);
            if let Err(error) = epoll::modify(&self.epoll, line.link.descriptor(), data, flags(wanted)) {
                return self.give_up(key, Broken::Io(error.into()));
            }
        }
        self.watch_line(key);
    }

    fn watch_line(&mut self, key: Key) {
        let Some(line) = self.lines.get_mut(key) else { return };
        let stuck = line.stuck_since.map(|since| since + self.common.policy.silence_limit);
        let Some(next) = line.deadline.into_iter().chain(stuck).min() else { return };
        if line.timer.is_none_or(|timer| next < timer) {
            line.timer = Some(next);
            self.timers.set(next, Whom::Line(key));
        }
    }

    fn look_at_timers(&mut self) {
        while let Some((at, whom)) = self.timers.pop(self.now) {
            match whom {
                Whom::Talk(key) => {
                    let Some(talk) = self.talks.get_mut(key).filter(|talk| talk.timer == Some(at)) else { continue };
                    talk.timer = None;
                    let was_ready = talk.session.is_ready();
                    talk.session.handle_timeout(self.now);
                    if was_ready && !talk.session.has_link() {
                        talk.connection.set_broken(Arc::new(Broken::Silent));
                    } else if talk.session.is_closed() && talk.connection.broken().is_none() {
                        talk.connection.set_broken(Arc::new(Broken::TooSlow(OPENING)));
                    }
                    if self.is_barred(key) {
                        self.excuse(key);
                    }
                    self.settle(key);
                }
                Whom::Line(key) => self.look_at_line(key, at),
                Whom::Stacks => self.tends_at = None,
            }
        }
        // Also where a link has ended in this turn, and nothing else may happen for hours.
        if self.tends_at.is_none()
            && let Some(next) = self.common.stacks.tend()
        {
            self.tends_at = Some(next);
            self.timers.set(next, Whom::Stacks);
        }
        let meant = self.talks.len() + self.lines.len();
        let (talks, lines, tends_at) = (&self.talks, &self.lines, self.tends_at);
        self.timers.tidy(meant, |at, whom| match whom {
            Whom::Talk(key) => talks.get(key).is_some_and(|talk| talk.timer == Some(at)),
            Whom::Line(key) => lines.get(key).is_some_and(|line| line.timer == Some(at)),
            Whom::Stacks => tends_at == Some(at),
        });
    }

    /// Whether a session's line is not read because there is no room for what it brings.
    fn is_barred(&self, key: Key) -> bool {
        let line = self.talks.get(key).and_then(|talk| talk.line).and_then(|line| self.lines.get(line));
        line.is_some_and(|line| matches!(line.coming, Some(Coming::Barred(..))))
    }

    /// A peer that we do not listen to is not silent. It has just been pinged, by which it knows that we live.
    fn excuse(&mut self, key: Key) {
        if let Some(talk) = self.talks.get_mut(key) {
            talk.session.hear(self.now);
        }
    }

    fn look_at_line(&mut self, key: Key, at: Instant) {
        let Some(line) = self.lines.get_mut(key).filter(|line| line.timer == Some(at)) else { return };
        line.timer = None;
        let is_stuck = line.stuck_since.is_some_and(|since| since + self.common.policy.silence_limit <= self.now);
        if is_stuck {
            self.give_up(key, Broken::TooSlow("take what was sent"));
        } else if line.deadline.is_some_and(|deadline| deadline <= self.now) {
            self.give_up(key, Broken::TooSlow(OPENING));
        } else {
            self.watch_line(key);
        }
    }

    /// The messenger stops: every owner is told.
    fn end(&mut self) {
        for key in self.talks.keys() {
            self.with_session(key, |session, _| session.abort());
        }
        self.see_off();
    }

    /// Waits for the peers of sessions that were closed to have heard it; not for long.
    fn see_off(&mut self) {
        let until = Instant::now() + LEAVING_LIMIT;
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        loop {
            let keys = self.lines.keys();
            let is_leaving = |key: &Key| self.lines.get(*key).is_some_and(|line| matches!(line.phase, Phase::Leaving));
            let leaving: Vec<Key> = keys.into_iter().filter(is_leaving).collect();
            self.now = Instant::now();
            if leaving.is_empty() || self.now >= until {
                return;
            }
            self.poll(&mut events, Some(LEAVING_PACE));
            leaving.into_iter().for_each(|key| self.serve(key, true));
        }
    }
}

/// A link that somebody has called us on, with the greeting begun.
pub(crate) fn stranger(link: Box<dyn Link>, common: &Common, now: Instant) -> Result<Box<Line>, Broken> {
    let mut line = Box::new(Line::new(link, Phase::Unbound, now + common.policy.opening_limit));
    line.greet(None, &common.manners, now)?;
    Ok(line)
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN, interest.readable);
    flags.set(epoll::EventFlags::OUT, interest.writable);
    flags
}

fn random_id() -> u64 {
    let mut bytes = [0; 8];
    // Without random bytes no link would be greeted either; the number only has to be one of its own.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

/// What epoll gives back for the bell, the alarm and listeners; keys of lines stay below (their generation would have to pass 2^31).
const BELL: u64 = u64::MAX;
const ALARM: u64 = u64::MAX - 1;
const LISTENERS: u64 = 1 << 63;

/// One receive: enough for sixty messages of 4 KiB, small enough to stay in a second-level cache until they are read.
const RECEIVE_BYTES: usize = 256 * 1024;

/// Full receives of one line in a row, after which others have their turn: 4 MiB.
const RECEIVES_PER_TURN: usize = 16;

/// What is written before it is sent. The send buffer of a loopback connection takes about as much at once.
const WRITE_AHEAD_BYTES: usize = 256 * 1024;

/// Events taken from epoll at once.
const EVENTS_PER_TURN: usize = 256;

/// Calls accepted in a row.
const ACCEPTS_PER_TURN: usize = 64;

/// What peers that have no session yet are to do.
const OPENING: &str = "greet and open a session";

/// How long a last word may take to be sent.
const LEAVING_LIMIT: Duration = Duration::from_secs(1);

/// How often those are looked at who are yet to be seen off.
const LEAVING_PACE: Duration = Duration::from_millis(5);

/// One read of what a peer says to somebody who no longer listens.
const LEAVING_PIECE_BYTES: usize = 4096;
