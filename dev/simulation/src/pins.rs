//! Pins: the links by which an agent has a primary keep what a replica needs on its way there. What is pinned, and what
//! a replica is answered, the product decides (`server::pins::rules`); the links are this world's.
//!
//! ```text
//!   question ──▶ Book::ask ── Open ──▶ dial ──▶ INFO, PSYNC ──▶ +CONTINUE, or not ──▶ Book::opened ──▶ answer
//!                                                                    └──▶ held, and looked at every LOOK_EVERY
//! ```

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::{Rc, Weak};
use std::time::Duration;

use super::wire::{Ask, Conn, End, Host, Keeper, Message, ServerId};
use super::world::Promise;
use super::world::{Event, World, facts};
use remora_replica::parts::driver::PIN_SIZES;
use remora_server::pins::{Book, Bounds, Extent, KEEP_LIMIT, Link, Next, NoPin, Pin, Released, Request};
use remora_server::{Facts, OutputLimit, Position};

/// How often it is looked how much a link holds back: half as often as in the product.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long the server may take to answer, as in the product.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The book's handle of a link. A link whose handle is gone is closed.
#[derive(Debug)]
struct Line(Rc<Cell<bool>>);

impl Link for Line {
    fn is_open(&self) -> bool {
        self.0.get()
    }
}

/// A link that pins.
struct Held {
    conn: Conn,
    bounds: Bounds,
    is_open: Weak<Cell<bool>>,
}

/// A question for which a pin is being opened.
struct Opening<K> {
    key: K,
    at: Position,
    facts: Facts,
    request: Request,
    number: u64,
    conn: Option<Conn>,
    extent: Option<Extent>,
    promise: Promise,
}

/// The answer to a replica; the error says why not. And what the world was when it asked.
pub(super) struct Answer<K> {
    pub(super) key: K,
    pub(super) outcome: Result<(), String>,
    pub(super) promise: Promise,
}

/// The pins of an agent at one server. `K`: who asks.
pub(super) struct Pinning<K> {
    keeper: Keeper,
    server: ServerId,
    book: Book<Line>,
    waiting: VecDeque<(K, Position)>,
    opening: Option<Opening<K>>,
    held: BTreeMap<u64, Held>,
    last_number: u64,
    answers: Vec<Answer<K>>,
}

/// What the world tells an agent's pins.
pub(super) trait Pins {
    /// A link was dialed, or could not be.
    fn dialed(&mut self, world: &mut World, number: u64, conn: Option<Conn>);
    fn receive(&mut self, world: &mut World, number: u64, message: Message);
    /// A link was closed at its other end.
    fn closed(&mut self, world: &mut World, number: u64);
    /// The time for an answer is over, or a look at a link is due.
    fn wake(&mut self, world: &mut World, number: u64);
}

impl<K: Copy + PartialEq> Pinning<K> {
    pub(super) fn new(keeper: Keeper, server: ServerId) -> Pinning<K> {
        Pinning {
            keeper,
            server,
            book: Book::new(PIN_SIZES),
            waiting: VecDeque::new(),
            opening: None,
            held: BTreeMap::new(),
            last_number: 0,
            answers: Vec::new(),
        }
    }

    pub(super) fn server(&self) -> ServerId {
        self.server
    }

    /// Asks whether a replica can go; a later question of the same one replaces one that waits.
    pub(super) fn ask(&mut self, world: &mut World, key: K, at: Position) {
        self.waiting.retain(|(waits, _)| *waits != key);
        self.waiting.push_back((key, at));
        self.go_on(world);
    }

    /// The answers since the last call.
    pub(super) fn take_answers(&mut self) -> Vec<Answer<K>> {
        std::mem::take(&mut self.answers)
    }

    /// No replica is on its way any more.
    pub(super) fn release(&mut self, world: &mut World) {
        self.book.release();
        self.close_released(world);
    }

    /// The agent has ended.
    pub(super) fn end(&mut self, world: &mut World) {
        self.waiting.clear();
        if let Some(Opening { number, .. }) = self.opening.take() {
            world.end_all(self.line(number));
        }
        self.release(world);
    }

    fn line(&self, number: u64) -> End {
        End::Pin(self.keeper, number)
    }

    /// What the server says, if it can be reached.
    fn look(&self, world: &World) -> Option<Facts> {
        let (from, server) = (world.host(self.line(0)), world.server(self.server));
        let is_cut = world.cut_until(from, Host::Server(self.server)).is_some();
        (server.alive && !is_cut).then(|| facts(world, self.server))
    }

    fn go_on(&mut self, world: &mut World) {
        while self.opening.is_none()
            && let Some((key, at)) = self.waiting.pop_front()
        {
            let promise = world.promise(self.server, &at, self.book.is_paused(world.instant()));
            match self.look(world) {
                Some(facts) => {
                    let next = self.book.ask(world.instant(), &facts, &at);
                    self.follow(world, (key, at, facts, promise), next);
                }
                None => {
                    let outcome = Err("the primary does not answer".into());
                    self.answers.push(Answer { key, outcome, promise });
                }
            }
        }
        self.close_released(world);
    }

    fn follow(&mut self, world: &mut World, (key, at, facts, promise): (K, Position, Facts, Promise), next: Next) {
        match next {
            Next::Answer(outcome) => self.answers.push(Answer { key, outcome, promise }),
            Next::Open(request) => {
                self.last_number += 1;
                let number = self.last_number;
                let opening = Opening { key, at, facts, request, number, conn: None, extent: None, promise };
                self.opening = Some(opening);
                let to = world.server(self.server).traits.address.clone();
                world.dial(self.line(number), to, number);
                world.after(ANSWER_LIMIT, Event::Pin(self.keeper, number));
            }
        }
    }

    /// What came of the pin that is being opened.
    fn opened(&mut self, world: &mut World, outcome: Result<Pin<Line>, NoPin>) {
        let Some(Opening { key, at, facts, request, number, promise, .. }) = self.opening.take() else { return };
        match &outcome {
            Ok(_) => world.count("pin: opened"),
            Err(NoPin::Refused { .. }) => world.count("pin: refused"),
            Err(NoPin::NotKept(_)) => world.count("pin: not kept"),
            Err(NoPin::Impossible(_)) => world.count("pin: impossible"),
            Err(NoPin::Unreachable(_)) => world.count("pin: unreachable"),
        }
        if outcome.is_err() {
            world.end_all(self.line(number));
        }
        let next = self.book.opened(world.instant(), &facts, &at, request, outcome);
        self.follow(world, (key, at, facts, promise), next);
        self.go_on(world);
    }

    fn refused(&mut self, world: &mut World, answer: &str) {
        let at = self.opening.as_ref().and_then(|opening| opening.extent).map_or(0, |extent| extent.from());
        let server = self.server.0.to_string();
        self.opened(world, Err(NoPin::Refused { server, at, answer: answer.to_string() }));
    }

    /// Closes the links that the book has dropped.
    fn close_released(&mut self, world: &mut World) {
        let dropped = self.held.iter().filter(|(_, held)| held.is_open.strong_count() == 0);
        let dropped: Vec<(u64, Conn)> = dropped.map(|(&number, held)| (number, held.conn)).collect();
        for (number, conn) in dropped {
            self.held.remove(&number);
            world.close(conn, self.line(number));
        }
    }
}

impl<K: Copy + PartialEq> Pins for Pinning<K> {
    fn dialed(&mut self, world: &mut World, number: u64, conn: Option<Conn>) {
        let opening = self.opening.as_mut().filter(|opening| opening.number == number && opening.conn.is_none());
        let (Some(opening), Some(conn)) = (opening, conn) else {
            let is_it = self.opening.as_ref().is_some_and(|opening| opening.number == number);
            conn.into_iter().for_each(|conn| world.close(conn, self.line(number)));
            if is_it {
                self.opened(world, Err(NoPin::Unreachable("no way".into())));
            }
            return;
        };
        opening.conn = Some(conn);
        let (history, at) = (opening.at.history, opening.request.at);
        let now = facts(world, self.server);
        match Extent::of(&now, history, at, self.book.sizes()) {
            Ok(extent) => {
                opening.extent = Some(extent);
                world.pin_asked(conn, self.server);
                let psync =
                    Message::Psync { history: Some((history, extent.from())), login: String::new(), ask: Ask::Unread };
                world.send(conn, End::Pin(self.keeper, number), psync);
            }
            Err(why) => self.opened(world, Err(why)),
        }
    }

    fn receive(&mut self, world: &mut World, number: u64, message: Message) {
        let Some(opening) = self.opening.as_ref().filter(|opening| opening.number == number) else { return };
        let (Some(conn), Some(extent)) = (opening.conn, opening.extent) else { return };
        match message {
            Message::Continue { .. } => {
                let is_open = Rc::new(Cell::new(true));
                let text = format!("slave {} 0 0", world.server(self.server).output_limit());
                let limit = OutputLimit::parse(&text).unwrap_or(OutputLimit::DEFAULT);
                let bounds = Bounds::of(world.instant(), extent, KEEP_LIMIT, &limit, self.book.sizes());
                self.held.insert(number, Held { conn, bounds, is_open: Rc::downgrade(&is_open) });
                world.after(LOOK_EVERY, Event::Pin(self.keeper, number));
                let pin = Pin::opened(world.instant(), extent, KEEP_LIMIT, Line(is_open));
                self.opened(world, Ok(pin));
            }
            Message::FullResync { .. } => self.refused(world, "+FULLRESYNC"),
            Message::Later => self.refused(world, "-NOMASTERLINK"),
            _ => {}
        }
    }

    fn closed(&mut self, world: &mut World, number: u64) {
        if self.opening.as_ref().is_some_and(|opening| opening.number == number) {
            return self.refused(world, "closed");
        }
        // The product does not notice it: the link is not read. The next look does.
        world.count("pin: closed by the server, or cut");
    }

    fn wake(&mut self, world: &mut World, number: u64) {
        if self.opening.as_ref().is_some_and(|opening| opening.number == number) {
            return self.refused(world, "nothing");
        }
        let Some(held) = self.held.get(&number) else { return };
        let now = world.instant();
        let released = match self.look(world) {
            Some(facts) => held.bounds.look(now, &facts),
            None => held.bounds.is_late(now).then_some(Released::Late),
        };
        match released {
            None => world.after(LOOK_EVERY, Event::Pin(self.keeper, number)),
            Some(why) => {
                world.count(match why {
                    Released::Late => "pin: its time was over",
                    Released::TooMuch(_) => "pin: it held back half of what the server permits",
                    Released::Lost => "pin: the server kept nothing for it",
                    Released::Ends => "pin: the server was shut down",
                });
                world.promises.disturbed(world.now);
                held.is_open.upgrade().iter().for_each(|is_open| is_open.set(false));
                self.held.remove(&number);
                world.end_all(self.line(number));
            }
        }
    }
}
