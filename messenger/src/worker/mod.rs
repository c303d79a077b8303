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
//! - this file: the thread, one turn after the other. **Start here.**
//! - `tables`: what happens between links and sessions; `links`, `sessions`: the two tables, and `keys` their keys;
//!   `link`: the state of a link.
//! - `receive`, `transmit`: from bytes to messages, and back; `accept`: listeners; `shutdown`: how links end.
//! - `reactor`: epoll and what it watches besides; `inbox`: commands of other threads; `desk`: how they send while the
//!   worker sleeps; `timers`, `spin`: when to look, and how long.

mod accept;
mod desk;
mod inbox;
mod keys;
mod link;
mod links;
mod reactor;
mod receive;
mod sessions;
mod shutdown;
mod spin;
mod tables;
mod timers;
mod transmit;

use std::io;
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::epoll;

pub(crate) use self::inbox::{Command, Inbox};
pub(crate) use self::link::LinkState;

use self::accept::{ACCEPTS_PER_TURN, Accepted, Acceptor};
use self::desk::Desk;
use self::keys::SessionKey;
use self::links::LinkTable;
use self::reactor::{EVENTS_PER_TURN, Reactor, Ready, Sleeper};
use self::shutdown::{LEAVING_LIMIT, LEAVING_PACE};
use self::spin::Spin;
use self::tables::Tables;
use crate::common::Common;
use crate::connection::Request;
use crate::session::{LocalEnd, Session};
use crate::stack::Address;

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
