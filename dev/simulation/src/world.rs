//! World: time, the network and the servers of one schedule, and what replicas were promised. Everything in it follows
//! from one seed.
//!
//! Messages of one connection keep their order; those of different connections overtake each other. What falls on the
//! same microsecond happens in an order that the seed decides.
//!
//! A replica that is told to go to its primary is continued there. What the model servers really keep says whether such
//! a promise was true when it was given, and was kept ([`Promises`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use remora_fabric::sim::Random;
use remora_redis::info::Info;
use remora_redis::resp::{CommandDecoder, Limits};
use remora_redis::{ReplId, resp};
use remora_replica::parts::driver::PIN_SIZES;
use remora_server::simulated::ServerEnd;
use remora_server::{Facts, Position};
use remora_source::parts::CaptureEvent;

use super::memory::Memories;
use super::oracle::{Oracle, Truth};
use super::plan::{Act, UNREST};
use super::server::{Changed, Server, Session, Step, Traits};
use super::wire::{Address, Conn, Effect, End, Host, Keeper, Message, ServerId, Timer};

/// Lines of the log that a finding shows.
const LOG_LINES: usize = 300;

/// How long a connection attempt takes that finds no way.
const NO_WAY: Duration = Duration::from_secs(2);

/// How much longer everything takes between hosts whose link is slow.
const SLOW: Duration = Duration::from_millis(700);

/// See [`World::calm_factor`].
const CALM_FACTOR: u32 = 3;

/// What happens at a time.
#[derive(Debug)]
pub(super) enum Event {
    Message {
        conn: Conn,
        side: usize,
        message: Message,
    },
    Ended {
        conn: Conn,
        side: usize,
    },
    Server(ServerId, Timer),
    /// A connection attempt arrives.
    Dialed {
        from: End,
        to: Address,
        attempt: u64,
    },
    /// It found no way.
    NotDialed {
        from: End,
        attempt: u64,
    },
    /// The server executes the next command of a client.
    Command {
        client: u64,
    },
    Answer {
        client: u64,
        bytes: Vec<u8>,
    },
    /// An agent's own time: see the agents for the numbers.
    Replica(usize, u64),
    Source(usize, u64),
    /// A link that pins is to be looked at, by its number.
    Pin(Keeper, u64),
    /// The next thing that the operator does.
    Operator(usize),
    /// The clients of the primaries write.
    Write,
}

/// A connection between two ends.
struct Connection {
    ends: [End; 2],
    /// When the last thing arrives at each end.
    last: [Duration; 2],
    open: [bool; 2],
    /// It was cut, and what is under way does not arrive.
    is_lost: bool,
}

/// A client's connection to a server, on which commands are sent.
pub(super) struct Client {
    end: ServerEnd,
    /// The agent, if one opened it.
    pub(super) agent: Option<usize>,
    pub(super) server: ServerId,
    session: Session,
    decoder: CommandDecoder,
    waiting: VecDeque<Vec<Vec<u8>>>,
    is_busy: bool,
    used: Duration,
}

/// A change that a client made.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) agent: Option<usize>,
    pub(super) server: ServerId,
    pub(super) command: String,
    pub(super) changed: Changed,
}

/// See the module's text.
// Larger than the bound: the clock, the network and the servers, which every actor of a schedule shares.
pub(super) struct World {
    pub(super) now: Duration,
    began: Instant,
    queue: Queue<Event>,
    ties: Random,
    pub(super) draw: Random,
    pub(super) servers: Vec<Server>,
    /// A primary with a data set of its own, which no server is to get.
    pub(super) foreign: Option<ServerId>,
    pub(super) oracle: Oracle,
    pub(super) memories: Memories,
    pub(super) late: Truth,
    pub(super) promises: Promises,
    conns: BTreeMap<Conn, Connection>,
    clients: BTreeMap<u64, Client>,
    next_number: u64,
    /// Pairs of hosts between which nothing gets through, until that time.
    cuts: Vec<(Host, Host, Duration)>,
    /// The same for pairs between which everything takes [`SLOW`] longer.
    slow: Vec<(Host, Host, Duration)>,
    /// The place of each source.
    pub(super) places: Vec<usize>,
    /// An empty list, which is used again and again.
    effects: Vec<Effect>,
    /// Until when a server does nothing.
    blocked: BTreeMap<ServerId, Duration>,
    pub(super) changes: Vec<Change>,
    /// Servers to which something was done since the last check.
    pub(super) touched: BTreeSet<ServerId>,
    /// Jobs on servers that were begun.
    pub(super) jobs: Vec<(ServerId, String)>,
    pub(super) counts: BTreeMap<String, u64>,
    log: Option<VecDeque<String>>,
}

impl World {
    pub(super) fn new(seed: u64, began: Instant, with_log: bool) -> World {
        World {
            now: Duration::ZERO,
            began,
            queue: Queue::new(),
            ties: Random::split(seed, 1),
            draw: Random::split(seed, 2),
            servers: Vec::new(),
            foreign: None,
            oracle: Oracle::default(),
            memories: Memories::default(),
            late: Truth::default(),
            promises: Promises::default(),
            conns: BTreeMap::new(),
            clients: BTreeMap::new(),
            next_number: 1,
            cuts: Vec::new(),
            slow: Vec::new(),
            places: Vec::new(),
            effects: Vec::new(),
            blocked: BTreeMap::new(),
            changes: Vec::new(),
            touched: BTreeSet::new(),
            jobs: Vec::new(),
            counts: BTreeMap::new(),
            log: with_log.then(VecDeque::new),
        }
    }

    // ---- time ----

    pub(super) fn instant(&self) -> Instant {
        self.began + self.now
    }

    /// The time in this world of an instant.
    pub(super) fn time_of(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.began)
    }

    pub(super) fn at(&mut self, time: Duration, event: Event) {
        let tie = self.ties.next();
        self.queue.add(time.max(self.now), tie, event);
    }

    /// As [`World::at`], and in the order of the calls.
    pub(super) fn in_order_at(&mut self, time: Duration, event: Event) {
        self.queue.add(time.max(self.now), 0, event);
    }

    pub(super) fn after(&mut self, pause: Duration, event: Event) {
        self.at(self.now + pause, event);
    }

    /// By how much longer the pauses are of what happens all the time. After the unrest the servers only get in step.
    pub(super) fn calm_factor(&self) -> u32 {
        if self.now < UNREST { 1 } else { CALM_FACTOR }
    }

    pub(super) fn next_time(&self) -> Option<Duration> {
        self.queue.next_time()
    }

    /// The next event that is due at this time.
    pub(super) fn next_event(&mut self, until: Duration) -> Option<Event> {
        if self.next_time()? > until {
            return None;
        }
        let (time, event) = self.queue.pop()?;
        self.now = self.now.max(time);
        Some(event)
    }

    // ---- chance ----

    /// True once in `number` draws, on average.
    pub(super) fn one_in(&mut self, number: u64) -> bool {
        self.draw.below(number) == 0
    }

    /// A time of up to this many milliseconds.
    pub(super) fn millis(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.draw.below(most * 1000))
    }

    // ---- the log ----

    pub(super) fn count(&mut self, what: &str) {
        match self.counts.get_mut(what) {
            Some(count) => *count += 1,
            None => {
                self.counts.insert(what.to_string(), 1);
            }
        }
    }

    pub(super) fn log(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(log) = &mut self.log {
            log.push_back(format!("{:>10.4} {}", now.as_secs_f64(), line()));
            if log.len() > LOG_LINES {
                log.pop_front();
            }
        }
    }

    pub(super) fn log_text(&self) -> String {
        let lines = self.log.iter().flatten();
        lines.fold(String::new(), |text, line| text + line + "\n")
    }

    // ---- servers ----

    pub(super) fn add_server(&mut self, traits: Traits) {
        let (id, seed) = (traits.id, self.draw.next());
        let mut step = Step { oracle: &mut self.oracle, effects: Vec::new() };
        let server = Server::start(traits, seed, &mut step);
        let effects = step.effects;
        self.servers.push(server);
        self.carry_out(id, effects);
    }

    pub(super) fn server(&self, id: ServerId) -> &Server {
        &self.servers[id.0]
    }

    /// The server at an address.
    pub(super) fn server_at(&self, address: &Address) -> Option<ServerId> {
        self.servers.iter().find(|server| server.traits.address == *address).map(|server| server.traits.id)
    }

    /// Does something with a server, and carries out what follows.
    pub(super) fn on<T>(&mut self, id: ServerId, what: impl FnOnce(&mut Server, &mut Step<'_>) -> T) -> T {
        let mut step = Step { oracle: &mut self.oracle, effects: std::mem::take(&mut self.effects) };
        let done = what(&mut self.servers[id.0], &mut step);
        self.touched.insert(id);
        let effects = step.effects;
        self.carry_out(id, effects);
        done
    }

    fn carry_out(&mut self, id: ServerId, mut effects: Vec<Effect>) {
        for effect in effects.drain(..) {
            match effect {
                Effect::Send(conn, message) => self.send(conn, End::Server(id), message),
                Effect::Close(conn) => self.close(conn, End::Server(id)),
                Effect::Dial { to, attempt } => self.dial(End::Server(id), to, attempt),
                Effect::After(pause, timer) => self.after(pause, Event::Server(id, timer)),
                Effect::Block(time) => {
                    self.blocked.insert(id, self.now + time);
                }
                Effect::NotContinued(conn) => {
                    let ends = self.conns.get(&conn).map(|connection| connection.ends);
                    let other = ends.and_then(|ends| ends.into_iter().find(|end| *end != End::Server(id)));
                    if let Some(asks) = other {
                        self.promises.not_continued(self.now, &self.servers[id.0], conn, asks);
                    }
                }
                Effect::Overflowed(_) => self.promises.disturbed(self.now),
            }
        }
        self.effects = effects;
    }

    /// A link asks this server to be continued so that it pins.
    pub(super) fn pin_asked(&mut self, conn: Conn, server: ServerId) {
        self.promises.pin_asked(conn, self.now, &self.servers[server.0]);
    }

    /// A server is told that it can go to this primary.
    /// How a primary is now for a replica at this position; `is_paused`: it has refused a pin, and is not asked again.
    pub(super) fn promise(&self, primary: ServerId, at: &Position, is_paused: bool) -> Promise {
        let (server, next) = (self.server(primary), at.offset + 1);
        let (first, end) = server.backlog_range().unwrap_or((u64::MAX, 0));
        let size = server.traits.backlog_bytes as u64;
        let is_large = size >= PIN_SIZES.least_backlog && server.traits.shares_its_buffer;
        let surely = first.max((end + size / 8).saturating_sub(size));
        let was_kept = next >= server.kept_from();
        let is_firm = next >= surely.saturating_add(PIN_SIZES.firm);
        let is_possible = is_large && is_firm && !is_paused;
        Promise { primary, replid: server.replid, at: self.now, next, end, was_kept, is_possible }
    }

    pub(super) fn promised(&mut self, to: ServerId, primary: ServerId, promise: Promise) {
        self.promises.given(to, promise, &self.servers[primary.0]);
    }

    /// Until when a server does nothing.
    pub(super) fn blocked(&self, id: ServerId) -> Option<Duration> {
        self.blocked.get(&id).copied().filter(|&until| until > self.now)
    }

    /// Ends the process of a server.
    pub(super) fn stop_server(&mut self, id: ServerId, saves: bool) {
        self.servers[id.0].stop(saves);
        self.blocked.remove(&id);
        self.end_all(End::Server(id));
        self.clients.retain(|_, client| client.server != id);
    }

    // ---- connections ----

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(super) fn latency(&mut self) -> Duration {
        let most = if self.one_in(50) { 300 } else { 4 };
        self.millis(most)
    }

    /// When something that one end sends now arrives at the other.
    fn arrival(&mut self, from: End, to: End) -> Duration {
        let latency = self.latency();
        let (a, b) = (self.host(from), self.host(to));
        let healed = self.cut_until(a, b).unwrap_or(self.now);
        let slow = if self.is_slow(a, b) { SLOW } else { Duration::ZERO };
        self.now.max(healed) + latency + slow
    }

    pub(super) fn host(&self, end: End) -> Host {
        end.host(&self.places)
    }

    pub(super) fn slow(&mut self, a: Host, b: Host, time: Duration) {
        let until = self.now + time;
        self.promises.disturbed(until);
        self.slow.push((a, b, until));
    }

    pub(super) fn is_slow(&self, a: Host, b: Host) -> bool {
        let is_it =
            |&(c, d, until): &(Host, Host, Duration)| ((a, b) == (c, d) || (a, b) == (d, c)) && until > self.now;
        self.slow.iter().any(is_it)
    }

    pub(super) fn cut(&mut self, a: Host, b: Host, time: Duration) {
        let until = self.now + time;
        self.promises.disturbed(until);
        self.cuts.push((a, b, until));
    }

    pub(super) fn heal(&mut self) {
        self.cuts.clear();
        self.slow.clear();
    }

    pub(super) fn cut_until(&self, a: Host, b: Host) -> Option<Duration> {
        let is_it =
            |&&(c, d, until): &&(Host, Host, Duration)| ((a, b) == (c, d) || (a, b) == (d, c)) && until > self.now;
        self.cuts.iter().filter(is_it).map(|&(.., until)| until).max()
    }

    pub(super) fn dial(&mut self, from: End, to: Address, attempt: u64) {
        let latency = self.latency();
        self.after(latency, Event::Dialed { from, to, attempt });
    }

    /// Connects two ends; `None` if they are cut off from each other, after the time that takes.
    pub(super) fn connect(&mut self, from: End, to: End) -> Result<Conn, Duration> {
        if self.cut_until(self.host(from), self.host(to)).is_some() {
            return Err(NO_WAY);
        }
        let conn = Conn(self.number());
        let now = self.now;
        self.conns.insert(conn, Connection { ends: [from, to], last: [now; 2], open: [true; 2], is_lost: false });
        Ok(conn)
    }

    fn side_of(&self, conn: Conn, end: End) -> Option<usize> {
        let connection = self.conns.get(&conn)?;
        (0..2).find(|&side| connection.ends[side] == end && connection.open[side])
    }

    fn deliver(&mut self, conn: Conn, to: usize, event: Event) {
        let Some(connection) = self.conns.get(&conn) else { return };
        let (from, end) = (connection.ends[1 - to], connection.ends[to]);
        let arrival = self.arrival(from, end);
        let Some(connection) = self.conns.get_mut(&conn) else { return };
        let at = arrival.max(connection.last[to] + Duration::from_micros(1));
        connection.last[to] = at;
        self.at(at, event);
    }

    pub(super) fn send(&mut self, conn: Conn, from: End, message: Message) {
        if let Some(side) = self.side_of(conn, from) {
            self.deliver(conn, 1 - side, Event::Message { conn, side: 1 - side, message });
        }
    }

    /// Closes a connection at one end. What was sent before arrives.
    pub(super) fn close(&mut self, conn: Conn, from: End) {
        let Some(side) = self.side_of(conn, from) else { return };
        if let Some(connection) = self.conns.get_mut(&conn) {
            connection.open[side] = false;
        }
        self.deliver(conn, 1 - side, Event::Ended { conn, side: 1 - side });
    }

    /// Breaks a connection: both ends notice. What is under way arrives before, or never.
    pub(super) fn cut_connection(&mut self, conn: Conn) {
        let is_lost = self.one_in(2);
        self.cut_with(conn, is_lost);
    }

    /// Breaks the links of a server to agents. What is under way is lost.
    pub(super) fn lose_links(&mut self, id: ServerId) {
        let is_link =
            |connection: &Connection| connection.ends.iter().any(|end| matches!(end, End::Link(_, of) if *of == id));
        let open = self.open_connections();
        let links = open.into_iter().filter(|conn| self.conns.get(conn).is_some_and(is_link));
        let links: Vec<Conn> = links.collect();
        links.into_iter().for_each(|conn| self.cut_with(conn, true));
    }

    fn cut_with(&mut self, conn: Conn, is_lost: bool) {
        self.conns.get_mut(&conn).into_iter().for_each(|connection| connection.is_lost = is_lost);
        for side in 0..2 {
            self.deliver(conn, side, Event::Ended { conn, side });
        }
    }

    /// Closes all connections of an end.
    pub(super) fn end_all(&mut self, end: End) {
        let of_it = self.conns.iter().filter(|(_, connection)| connection.ends.contains(&end));
        let of_it: Vec<Conn> = of_it.map(|(&conn, _)| conn).collect();
        of_it.into_iter().for_each(|conn| self.close(conn, end));
    }

    /// The open connections.
    pub(super) fn open_connections(&self) -> Vec<Conn> {
        let open = self.conns.iter().filter(|(_, connection)| connection.open == [true; 2]);
        open.map(|(&conn, _)| conn).collect()
    }

    /// An end of a connection.
    pub(super) fn end(&self, conn: Conn, side: usize) -> Option<End> {
        self.conns.get(&conn).map(|connection| connection.ends[side])
    }

    /// The end at which something arrives, unless it has closed the connection.
    pub(super) fn arrives(&mut self, conn: Conn, side: usize, is_end: bool) -> Option<End> {
        let connection = self.conns.get_mut(&conn)?;
        let is_there = connection.open[side] && (is_end || !connection.is_lost);
        let end = is_there.then_some(connection.ends[side]);
        if is_end {
            connection.open[side] = false;
        }
        if connection.open == [false; 2] {
            self.conns.remove(&conn);
        }
        end
    }

    // ---- clients ----

    pub(super) fn add_client(&mut self, end: ServerEnd, agent: Option<usize>, server: ServerId) {
        let number = self.number();
        let client = Client {
            end,
            agent,
            server,
            session: Session::default(),
            decoder: CommandDecoder::new(Limits::default()),
            waiting: VecDeque::new(),
            is_busy: false,
            used: self.now,
        };
        self.clients.insert(number, client);
    }

    /// Reads what clients have written.
    pub(super) fn read_clients(&mut self) {
        let mut ready = Vec::new();
        let mut gone = Vec::new();
        for (&number, client) in &mut self.clients {
            client.decoder.feed(&client.end.take());
            while let Ok(Some(command)) = client.decoder.next_command() {
                client.waiting.push_back(command);
            }
            if !client.is_busy && !client.waiting.is_empty() {
                client.is_busy = true;
                ready.push(number);
            } else if client.end.client_is_gone() && client.waiting.is_empty() && !client.is_busy {
                gone.push(number);
            }
        }
        gone.iter().for_each(|number| drop(self.clients.remove(number)));
        for client in ready {
            let pause = self.millis(2);
            self.after(pause, Event::Command { client });
        }
    }

    /// The server executes the next command of a client.
    pub(super) fn execute(&mut self, number: u64) {
        let Some(client) = self.clients.get(&number) else { return };
        let (id, agent) = (client.server, client.agent);
        if let Some(until) = self.blocked(id) {
            return self.in_order_at(until, Event::Command { client: number });
        }
        let Some(mut client) = self.clients.remove(&number) else { return };
        let Some(command) = client.waiting.pop_front() else { return };
        client.used = self.now;
        let (frame, changes) = self.on(id, |server, step| server.command(&mut client.session, &command, step));
        self.clients.insert(number, client);
        let words: Vec<_> = command.iter().map(|word| String::from_utf8_lossy(word)).collect();
        // A password is another one in each run.
        let shown = if words.iter().any(|word| *word == "masterauth") { 3 } else { words.len() };
        let text = words[..shown.min(words.len())].join(" ");
        self.log(|| format!("server {} executes {text} of {agent:?}: {}", id.0, short(&frame)));
        for changed in changes {
            let command = text.clone();
            self.changes.push(Change { agent, server: id, command, changed });
        }
        let mut bytes = Vec::new();
        resp::encode(&mut bytes, &frame);
        let ready = self.blocked(id).unwrap_or(self.now);
        let pause = self.millis(2);
        self.at(ready + pause, Event::Answer { client: number, bytes });
    }

    pub(super) fn answer(&mut self, number: u64, bytes: &[u8]) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        client.end.give(bytes);
        client.used = self.now;
        client.is_busy = false;
        self.read_clients();
    }

    /// Closes clients that were idle for too long.
    pub(super) fn close_idle(&mut self, id: ServerId) {
        let (limit, now) = (self.server(id).traits.idle_limit, self.now);
        if !limit.is_zero() {
            self.clients.retain(|_, client| client.server != id || client.is_busy || now < client.used + limit);
        }
    }

    /// Closes all clients of an agent on a server.
    pub(super) fn kill_clients(&mut self, agent: usize) {
        self.clients.retain(|_, client| client.agent != Some(agent));
    }
}

fn short(frame: &resp::Frame) -> String {
    let text = format!("{frame:?}");
    match frame {
        resp::Frame::Simple(text) | resp::Frame::Error(text) => String::from_utf8_lossy(text).into_owned(),
        _ if text.len() > 60 => "...".to_string(),
        _ => text,
    }
}

/// The beginning of a thing's text, for the log.
pub(super) fn shown(thing: &impl std::fmt::Debug) -> String {
    format!("{thing:?}").chars().take(160).collect()
}

/// What a server says of itself.
pub(super) fn facts(world: &World, id: ServerId) -> Facts {
    Facts::from_info(&Info::parse(world.server(id).info().as_bytes()))
}

/// A capture's event, as it is counted.
pub(super) fn event_name(event: &CaptureEvent) -> &'static str {
    match event {
        CaptureEvent::Forked { .. } => "forked",
        CaptureEvent::Started { .. } => "started",
        CaptureEvent::Completed { .. } => "completed",
        CaptureEvent::FromBase { .. } => "from a base",
        CaptureEvent::BaseTried { .. } => "base tried",
        CaptureEvent::ModuleFailed => "module failed",
        CaptureEvent::SweepFailed => "sweep failed",
        CaptureEvent::Failed { .. } => "failed",
        CaptureEvent::StreamResumed => "stream resumed",
        CaptureEvent::HistoryChanged { .. } => "history changed",
        CaptureEvent::StreamLost { .. } => "stream lost",
    }
}

/// When something happens: its time, a number that decides between things of one time, and the number of the call.
type When = (Duration, u64, u64);

/// Things to happen. They are large, so that only their places are sorted.
pub(super) struct Queue<T> {
    order: BTreeMap<When, usize>,
    things: Vec<Option<T>>,
    free: Vec<usize>,
    calls: u64,
}

impl<T> Queue<T> {
    pub(super) fn new() -> Queue<T> {
        Queue { order: BTreeMap::new(), things: Vec::new(), free: Vec::new(), calls: 0 }
    }

    /// Adds a thing. Of two at one time, the one with the smaller `tie` is the first, and else the one that came first.
    pub(super) fn add(&mut self, time: Duration, tie: u64, thing: T) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.things.push(None);
            self.things.len() - 1
        });
        self.things[place] = Some(thing);
        self.calls += 1;
        self.order.insert((time, tie, self.calls), place);
    }

    /// The time of the next thing.
    pub(super) fn next_time(&self) -> Option<Duration> {
        self.order.first_key_value().map(|(&(time, ..), _)| time)
    }

    /// Takes the next thing.
    pub(super) fn pop(&mut self) -> Option<(Duration, T)> {
        let ((time, ..), place) = self.order.pop_first()?;
        self.free.push(place);
        self.things[place].take().map(|thing| (time, thing))
    }
}

/// How long a promise is kept, as far as nothing is disturbed: a little less than a pin lives at least.
const KEPT_FOR: Duration = Duration::from_secs(12);

/// What happened this long before can still have an effect: a message that is under way.
const MARGIN: Duration = Duration::from_secs(1);

/// What a replica was promised, and how the primary was then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promise {
    pub(super) primary: ServerId,
    pub(super) replid: ReplId,
    pub(super) at: Duration,
    pub(super) next: u64,
    pub(super) end: u64,
    /// The primary kept the replica's next byte, for longer than another link needs.
    pub(super) was_kept: bool,
    /// A pin was possible there.
    pub(super) is_possible: bool,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Promises {
    of: BTreeMap<ServerId, Promise>,
    /// Links that were to pin: when they asked, and where the server was.
    pins: BTreeMap<Conn, (Duration, ReplId, u64)>,
    /// When something last happened that can break a promise.
    disturbed: Duration,
    pub(super) finding: Option<String>,
}

impl Promises {
    /// A replica is told to go.
    pub(super) fn given(&mut self, to: ServerId, promise: Promise, primary: &Server) {
        if !promise.was_kept && promise.next < primary.kept_from() {
            self.finding.get_or_insert(format!(
                "server {} is told to go to its primary at offset {}, which the primary may drop at any moment: it keeps {} on",
                to.0,
                promise.next,
                primary.kept_from()
            ));
        }
        self.of.insert(to, promise);
    }

    /// Something may break a promise.
    pub(super) fn disturbed(&mut self, until: Duration) {
        self.disturbed = self.disturbed.max(until);
    }

    /// The operator does something.
    pub(super) fn act(&mut self, now: Duration, act: Act) {
        let is_harmless = matches!(
            act,
            Act::StartAgent(_)
                | Act::BreakLane(_)
                | Act::Save(_)
                | Act::Burst
                | Act::LongWrite
                | Act::Flood
                | Act::FlushPrimary
                | Act::Look
                | Act::Final
        );
        if !is_harmless {
            self.disturbed(now);
        }
    }

    /// A link asks to be continued so that it pins.
    pub(super) fn pin_asked(&mut self, conn: Conn, now: Duration, server: &Server) {
        let end = server.backlog_range().map_or(0, |(_, end)| end);
        self.pins.insert(conn, (now, server.replid, end));
    }

    /// A server does not continue the one at the other end.
    pub(super) fn not_continued(&mut self, now: Duration, server: &Server, conn: Conn, asks: End) {
        let end = server.backlog_range().map_or(0, |(_, end)| end);
        let is_undisturbed = |since: Duration, replid: ReplId| {
            self.disturbed + MARGIN < since && server.replid == replid && server.follows.is_none()
        };
        let finding = match asks {
            End::Pin(..) => self.pins.get(&conn).and_then(|&(since, replid, before)| {
                let is_as_asked =
                    is_undisturbed(since, replid) && (end - before) <= server.traits.backlog_bytes as u64 / 8;
                is_as_asked
                    .then(|| "a link that was to pin asked for what the primary does not keep for certain".to_string())
            }),
            End::Server(replica) => self.of.get(&replica).and_then(|promise| {
                let written = end.saturating_sub(promise.end) + PIN_SIZES.prefill;
                let is_bounded = written < server.output_limit() as u64 / 2;
                let is_soon = now < promise.at + KEPT_FOR;
                let is_it = promise.primary == server.traits.id && promise.is_possible && is_bounded && is_soon;
                (is_it && is_undisturbed(promise.at, promise.replid)).then(|| {
                    format!(
                        "server {} was told at {:?} to go to its primary at offset {}, and takes a full copy there",
                        replica.0, promise.at, promise.next
                    )
                })
            }),
            _ => None,
        };
        self.finding = self.finding.take().or(finding);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn things_come_by_time_then_by_tie_then_in_the_order_of_the_calls() {
        let (mut queue, second) = (Queue::new(), Duration::from_secs(1));
        for (time, tie, thing) in [(2, 0, "e"), (1, 7, "d"), (1, 0, "a"), (1, 0, "b"), (1, 3, "c")] {
            queue.add(second * time, tie, thing);
        }
        assert_eq!(queue.next_time(), Some(second));
        let first: Vec<_> = (0..3).filter_map(|_| queue.pop()).map(|(_, thing)| thing).collect();
        assert_eq!(first, ["a", "b", "c"]);
        queue.add(second, 0, "again");
        assert_eq!(queue.pop(), Some((second, "again")));
        assert_eq!((queue.pop(), queue.pop()), (Some((second, "d")), Some((second * 2, "e"))));
        assert_eq!((queue.pop(), queue.next_time()), (None, None));
    }
}
