//! Switched: two servers that `remora switch` makes change their roles, under faults, in the model's time.
//!
//! ```text
//!   seed ──▶ World: two servers, clients that write, cuts, crashes, a Sentinel ◀── orders ── Exchange: the product's
//!                └── answers, lost and late ones too ───────────────────────────────────────▶┘
//!      the agent is killed at a step, and the command runs again
//! ```
//!
//! The product's parts are what decides: [`Exchange`], and [`judge`], by which a run finds out where a former one has
//! ended. A data set is the list of its writes, and an offset is its length. Messages take their time. A cut holds them
//! back or drops them, and what a run has sent may arrive after its death.
//!
//! What must hold: see [`World::check`], [`World::reports`] and [`World::at_the_end`].

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use remora_fabric::sim::Random;
use remora_redis::ReplId;

use crate::server::{Backlog, Facts, Link, Role};
use crate::switch::exchange::{
    Answer, End, Exchange, Follower, Mark, NOWHERE, Open, Order, Position, Seen, Side, Step, Why, closes_predecessors,
};
use crate::switch::exchange::{Standing, judge};

/// All times are in microseconds of the model.
const MILLI: u64 = 1_000;
const SECOND: u64 = 1_000_000;

/// The faults end at a moment up to this.
const FAULTS_UNTIL: u64 = 4 * SECOND;
/// An agent gives up an order after that, as in the product.
const ANSWER_LIMIT: u64 = 3 * SECOND;
/// How long writes may wait.
const MAX_PAUSE: u64 = 2 * SECOND;
/// A client that gets no answer goes to the other server.
const CLIENT_LIMIT: u64 = 2_500 * MILLI;
/// Clients find the new primary within that, once it is one.
const SETTLES: u64 = 5 * SECOND;
/// Within that a switch that was called again is over.
const FINISHES: u64 = 8 * SECOND;
/// What befalls a run next, after it has sent an order to follow.
const STANDS_STILL: u64 = u64::MAX - 1;
/// How often the command may be called after the faults until its work is done.
const MOST_RUNS: u32 = 12;
/// Nothing lasts longer.
const RUNS_UNTIL: u64 = 400 * SECOND;

/// Who is connected: the two servers by their numbers, and these.
const AGENT: usize = 2;
const CLIENT: usize = AGENT + AGENTS;

/// Agents that may be at work at the same time, on hosts of their own.
const AGENTS: usize = 2;

const OLD: usize = 0;
const NEW: usize = 1;

#[derive(Clone, Debug)]
struct Server {
    is_up: bool,
    /// Grows with each start.
    run: u64,
    is_primary: bool,
    /// It follows the other one.
    follows: bool,
    /// The mark of the run that had it step down last.
    mark: Mark,
    /// What its configuration file says of that.
    starts_as_primary: bool,
    history: u64,
    former: Option<(u64, usize)>,
    /// Its writes in their order; 0 for what is in the stream and is no write.
    log: Vec<u64>,
    paused_until: u64,
    waiting: Vec<(usize, u64)>,
    /// Its link to the other one, as a replica, and when its last message arrives.
    link: Option<(u64, u64)>,
    /// Orders by older connections than this are not carried out.
    fence: u64,
    started: u64,
}

impl Server {
    fn position(&self) -> Position {
        Position { history: replid(self.history), offset: self.log.len() as u64 }
    }

    fn seen(&self) -> Seen {
        let role = if self.is_primary { Role::Primary } else { Role::Replica };
        let (is_linked, mark) =
            (!self.is_primary && self.link.is_some(), (!self.is_primary && !self.follows).then_some(self.mark));
        Seen { role: Some(role), at: Some(self.position()), is_linked, mark, by: 0 }
    }
}

fn replid(history: u64) -> ReplId {
    // The digits of a history that is not zero are always a replid.
    format!("{history:040x}").parse().unwrap_or_else(|_| unreachable!())
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// To a server, by this connection of the agent.
    Order {
        connection: Connection,
        token: u64,
        order: Order,
    },
    /// To the agent.
    Answer {
        token: u64,
        answer: Answer,
        facts: bool,
    },
    Write {
        client: usize,
        id: u64,
    },
    Written {
        client: usize,
        id: u64,
        is_done: bool,
    },
    /// A piece of the stream by this link, to the replica.
    Stream {
        link: u64,
        at: usize,
        id: u64,
    },
}

#[derive(Clone, Copy, Debug)]
enum Happens {
    Arrives {
        from: usize,
        to: usize,
        what: What,
    },
    Writes(usize),
    GivesUp {
        client: usize,
        id: u64,
    },
    Pings,
    Links(usize),
    Restarts(usize),
    PauseEnds(usize),
    Fault,
    Heals(usize, usize),
    AgentRuns(usize),
    Waited(u64),
    Unanswered(u64),
    /// A run that stood still sends its order.
    Sends(u64, Order),
    Signal(usize),
    Sentinel,
    SentinelCorrects,
    Over,
}

/// A connection of the agent to a server.
#[derive(Clone, Copy, Debug)]
struct Connection {
    id: u64,
    /// The agent.
    from: usize,
    /// The run of the server that has accepted it.
    to_run: u64,
}

/// One call of the command.
struct Run {
    exchange: Option<Exchange>,
    /// It has the ends exchanged: the old server is to become the primary.
    turned: bool,
    mark: Mark,
    looked: [bool; 2],
    /// What the last step waits for.
    token: u64,
    waits_for: Option<Order>,
    connections: [Option<Connection>; 2],
    orders: u64,
    /// The orders at which it is killed, and at which something else befalls it.
    dies_at: Option<u64>,
    troubled_at: Option<u64>,
    /// Its last order to release the pause was answered.
    released: bool,
    /// Another one was at work meanwhile, and may be ahead of what it says at its end.
    is_disturbed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Client {
    at: usize,
    writes: Option<u64>,
}

/// A run of the model, and what it found.
pub(super) struct World {
    draw: Random,
    began: Instant,
    now: u64,
    next: u64,
    queue: BTreeMap<(u64, u64), Happens>,
    servers: [Server; 2],
    cut_until: BTreeMap<(usize, usize), u64>,
    clients: [Client; 2],
    every: u64,
    acknowledged: Vec<u64>,
    last_acknowledged: u64,
    /// Of two agents, of which the second one is there in some schedules only.
    runs: [Option<Run>; AGENTS],
    marks: Mark,
    runs_after_faults: u32,
    is_over: bool,
    faults_until: u64,
    /// Servers keep the links of their replicas when they become one.
    keeps_links: bool,
    /// Both note their roles.
    notes_roles: bool,
    /// What befalls the first run at a step where it matters most.
    theme: u64,
    /// The second agent wants the opposite.
    opposite: bool,
    /// A server has forgotten its role, or a Sentinel has changed one: what follows is not the switch's.
    excused: bool,
    by_sentinel: bool,
    /// The second agent was at work, and wanted the opposite.
    is_opposed: bool,
    /// A primary was restarted, and began another history.
    began_another: bool,
    pub(super) counts: BTreeMap<&'static str, u64>,
    pub(super) finding: Option<String>,
    pub(super) log: Vec<String>,
}

/// Plays the schedule of a seed.
pub(super) fn play(seed: u64) -> World {
    let mut world = World::new(seed);
    while world.finding.is_none() && !world.is_over {
        let Some((&at, &happens)) = world.queue.first_key_value() else { break };
        world.queue.remove(&at);
        if at.0 > RUNS_UNTIL {
            world.finds("the command does not come to an end");
            break;
        }
        world.now = at.0;
        world.happens(happens);
        world.check();
    }
    world.at_the_end();
    world
}

impl World {
    fn new(seed: u64) -> World {
        let mut draw = Random::new(seed);
        let server = |is_primary| Server {
            is_up: true,
            run: 0,
            is_primary,
            follows: !is_primary,
            mark: 0,
            starts_as_primary: is_primary,
            history: 1,
            former: None,
            log: Vec::new(),
            paused_until: 0,
            waiting: Vec::new(),
            link: None,
            fence: 0,
            started: 0,
        };
        let client = Client { at: OLD, writes: None };
        let every = MILLI * (2 + draw.below(20));
        let faults_until = 1 + draw.below(FAULTS_UNTIL);
        let (keeps_links, notes_roles, theme) = (draw.below(2) == 0, draw.below(4) != 0, draw.below(8));
        let notes_roles = notes_roles && !matches!(theme, 3 | 4);
        let opposite = draw.below(2) == 0;
        let mut world = World {
            draw,
            began: Instant::now(),
            now: 0,
            next: 1,
            queue: BTreeMap::new(),
            servers: [server(true), server(false)],
            cut_until: BTreeMap::new(),
            clients: [client; 2],
            every,
            acknowledged: Vec::new(),
            last_acknowledged: 0,
            runs: [const { None }; AGENTS],
            marks: 0,
            runs_after_faults: 0,
            is_over: false,
            faults_until,
            keeps_links,
            notes_roles,
            theme,
            opposite,
            excused: false,
            by_sentinel: false,
            is_opposed: false,
            began_another: false,
            counts: BTreeMap::new(),
            finding: None,
            log: Vec::new(),
        };
        world.links(NEW);
        (0..2).for_each(|client| world.after(1 + client as u64, Happens::Writes(client)));
        world.after(SECOND, Happens::Pings);
        let begins = world.draw.below(200 * MILLI);
        world.after(begins, Happens::AgentRuns(0));
        if world.draw.below(2) == 0 {
            let delay = begins + world.either(2, 20 * MILLI, 2 * SECOND);
            world.after(delay, Happens::AgentRuns(1));
        }
        if world.draw.below(4) != 0 {
            let delay = begins + world.draw.below(50 * MILLI);
            world.after(delay, Happens::Fault);
        }
        if world.draw.below(8) == 0 {
            let delay = begins + world.draw.below(2 * SECOND);
            world.after(delay, Happens::Sentinel);
        }
        world
    }

    fn after(&mut self, delay: u64, happens: Happens) {
        self.next += 1;
        self.queue.insert((self.now + delay, self.next), happens);
    }

    /// A number below the first bound once in so many times, else one below the second.
    fn either(&mut self, times: u64, bound: u64, other: u64) -> u64 {
        let bound = if self.draw.below(times) == 0 { bound } else { other };
        self.draw.below(bound)
    }

    fn instant(&self) -> Instant {
        self.began + Duration::from_micros(self.now)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
        self.note(what);
    }

    fn note(&mut self, what: &str) {
        self.log.push(format!("{:>9} {what}", self.now));
    }

    fn finds(&mut self, what: &str) {
        self.finding.get_or_insert_with(|| format!("at {} µs: {what}", self.now));
    }

    fn happens(&mut self, happens: Happens) {
        match happens {
            Happens::Arrives { from, to, what } => self.arrives(from, to, what),
            Happens::Writes(client) => self.writes(client),
            Happens::GivesUp { client, id } if self.clients[client].writes == Some(id) => self.goes_on(client, true),
            Happens::GivesUp { .. } => {}
            Happens::Pings => {
                self.after(SECOND, Happens::Pings);
                for at in [OLD, NEW] {
                    if self.servers[at].is_primary && self.servers[at].is_up {
                        self.appends(at, 0);
                    }
                }
            }
            Happens::Links(server) => self.links(server),
            Happens::Restarts(server) => self.restarts(server),
            Happens::PauseEnds(server) => self.serves_waiting(server),
            Happens::Fault => self.fault(),
            Happens::Heals(one, other) => _ = self.cut_until.remove(&(one, other)),
            Happens::AgentRuns(agent) => self.agent_runs(agent),
            Happens::Waited(token) => self.hears(token, Answer::Waited),
            Happens::Unanswered(token) => self.is_unanswered(token),
            Happens::Sends(token, order) => self.orders(token, order),
            Happens::Signal(agent) => {
                if let Some(exchange) = self.runs[agent].as_mut().and_then(|run| run.exchange.as_mut()) {
                    exchange.signal();
                    self.count("a signal");
                }
            }
            Happens::Sentinel => self.sentinel_promotes(),
            Happens::SentinelCorrects => self.sentinel_corrects(),
            Happens::Over if self.runs.iter().any(Option::is_some) => self.after(SECOND, Happens::Over),
            Happens::Over => match self.ended_between() {
                Some(agent) => {
                    self.after(0, Happens::AgentRuns(agent));
                    self.after(FINISHES, Happens::Over);
                }
                None => self.is_over = true,
            },
        }
    }

    // Messages.

    fn cut(&self, one: usize, other: usize) -> Option<u64> {
        self.cut_until.get(&(one.min(other), one.max(other))).copied()
    }

    fn sends(&mut self, from: usize, to: usize, what: What) {
        let delay = 50 + self.either(10, 5 * MILLI, 500);
        self.after(delay, Happens::Arrives { from, to, what });
    }

    fn arrives(&mut self, from: usize, to: usize, what: What) {
        if let Some(until) = self.cut(from, to) {
            // The system of the sender tries again until the cut is over, or gives up.
            if self.draw.below(2) == 0 {
                let delay = until.saturating_sub(self.now) + 1 + self.draw.below(SECOND);
                self.after(delay, Happens::Arrives { from, to, what });
            } else if let What::Stream { link, .. } = what {
                self.breaks(to, link);
            }
            return;
        }
        if to < AGENT && !self.servers[to].is_up {
            return;
        }
        match what {
            What::Order { connection, token, order } => self.is_told(to, connection, token, order),
            What::Answer { token, answer, facts } if facts => self.looks_on(token, from, answer),
            What::Answer { token, answer, .. } => self.hears(token, answer),
            What::Write { client, id } => self.is_written(to, client, id),
            What::Written { client, id, is_done } if self.clients[client].writes == Some(id) => {
                if is_done {
                    self.acknowledged.push(id);
                    self.last_acknowledged = self.now;
                }
                self.goes_on(client, !is_done);
            }
            What::Written { .. } => {}
            What::Stream { link, at, id } => self.takes(to, link, at, id),
        }
    }

    // Clients.

    fn writes(&mut self, client: usize) {
        self.next += 1;
        let (id, at) = (self.next, self.clients[client].at);
        self.clients[client].writes = Some(id);
        self.after(CLIENT_LIMIT, Happens::GivesUp { client, id });
        self.sends(CLIENT, at, What::Write { client, id });
    }

    fn goes_on(&mut self, client: usize, elsewhere: bool) {
        let one = &mut self.clients[client];
        one.writes = None;
        if elsewhere {
            one.at = 1 - one.at;
        }
        let every = if self.now < self.faults_until { self.every } else { 5 * self.every };
        let delay = if elsewhere { 5 * MILLI } else { every };
        let delay = 1 + self.draw.below(2 * delay);
        self.after(delay, Happens::Writes(client));
    }

    fn is_written(&mut self, at: usize, client: usize, id: u64) {
        let server = &mut self.servers[at];
        if server.is_primary && self.now < server.paused_until {
            return server.waiting.push((client, id));
        }
        let is_done = server.is_primary;
        if is_done {
            self.appends(at, id);
        }
        self.sends(at, CLIENT, What::Written { client, id, is_done });
    }

    fn serves_waiting(&mut self, at: usize) {
        if self.now >= self.servers[at].paused_until {
            let waiting = std::mem::take(&mut self.servers[at].waiting);
            waiting.into_iter().for_each(|(client, id)| self.is_written(at, client, id));
        }
    }

    // Servers.

    fn appends(&mut self, at: usize, id: u64) {
        let server = &mut self.servers[at];
        server.log.push(id);
        let index = server.log.len() - 1;
        self.streams(at, 1 - at, index);
    }

    /// Sends a piece of the stream to a replica that is linked.
    fn streams(&mut self, from: usize, to: usize, at: usize) {
        let id = self.servers[from].log[at];
        let delay = 50 + self.draw.below(500);
        let Some((link, last)) = &mut self.servers[to].link else { return };
        // A connection keeps the order.
        *last = (*last + 1).max(self.now + delay);
        let (link, delay) = (*link, *last - self.now);
        self.after(delay, Happens::Arrives { from, to, what: What::Stream { link, at, id } });
    }

    fn takes(&mut self, to: usize, link: u64, at: usize, id: u64) {
        let server = &mut self.servers[to];
        if server.link.is_none_or(|(now, _)| now != link) {
            return;
        }
        if at == server.log.len() {
            server.log.push(id);
        } else {
            self.breaks(to, link);
        }
    }

    fn breaks(&mut self, server: usize, link: u64) {
        if self.servers[server].link.is_some_and(|(now, _)| now == link) {
            self.unlinks(server);
        }
    }

    fn unlinks(&mut self, server: usize) {
        self.servers[server].link = None;
        let delay = 1 + self.draw.below(SECOND);
        self.after(delay, Happens::Links(server));
    }

    /// A replica asks the other server for its stream.
    fn links(&mut self, at: usize) {
        let from = 1 - at;
        let server = &self.servers[at];
        if server.is_primary || !server.follows || !server.is_up || server.link.is_some() {
            return;
        }
        if self.cut(at, from).is_some() || !self.servers[from].is_up || !self.servers[from].is_primary {
            let delay = 100 * MILLI + self.draw.below(SECOND);
            return self.after(delay, Happens::Links(at));
        }
        let (primary, replica) = (&self.servers[from], &self.servers[at]);
        let (history, held) = (replica.history, replica.log.len());
        let continues = (primary.history == history && held <= primary.log.len())
            || primary.former.is_some_and(|(former, end)| former == history && held <= end);
        let is_prefix = primary.log.get(..held).is_some_and(|begin| *begin == replica.log[..]);
        let (log, history, former) = (primary.log.clone(), primary.history, primary.former);
        if continues && !is_prefix && !self.excused {
            return self.finds("a server continues another one whose data are not its own");
        }
        self.next += 1;
        let link = (self.next, self.now);
        let replica = &mut self.servers[at];
        (replica.history, replica.former, replica.link) = (history, former, Some(link));
        if continues && is_prefix {
            (held..log.len()).for_each(|index| self.streams(from, at, index));
        } else {
            replica.log = log;
            self.count("a full copy");
        }
    }

    fn becomes_replica(&mut self, at: usize, follows: bool) {
        (self.servers[at].is_primary, self.servers[at].follows) = (false, follows);
        if !self.keeps_links {
            self.leaves(1 - at);
        }
        self.unlinks(at);
    }

    fn becomes_primary(&mut self, at: usize) {
        self.next += 1;
        let history = self.next;
        let server = &mut self.servers[at];
        server.former = Some((server.history, server.log.len()));
        (server.history, server.is_primary, server.link) = (history, true, None);
        self.leaves(1 - at);
    }

    /// A replica loses its link, and comes again.
    fn leaves(&mut self, replica: usize) {
        if self.servers[replica].link.is_some() {
            self.unlinks(replica);
        }
    }

    fn notes(&mut self, at: usize) {
        if self.notes_roles {
            self.servers[at].starts_as_primary = self.servers[at].is_primary;
        }
    }

    fn crashes(&mut self, at: usize) {
        if !self.servers[at].is_up {
            return;
        }
        self.count("a server crashes");
        let server = &mut self.servers[at];
        (server.is_up, server.link, server.paused_until) = (false, None, 0);
        server.waiting.clear();
        self.leaves(1 - at);
        let delay = MILLI + self.draw.below(2 * SECOND);
        self.after(delay, Happens::Restarts(at));
    }

    fn restarts(&mut self, at: usize) {
        self.next += 1;
        let (history, now) = (self.next, self.now);
        let server = &mut self.servers[at];
        (server.is_up, server.run, server.fence, server.started) = (true, server.run + 1, 0, now);
        if server.is_primary != server.starts_as_primary {
            server.is_primary = server.starts_as_primary;
            self.excused = true;
            self.count("a server has forgotten its role");
        }
        let server = &mut self.servers[at];
        if server.is_primary {
            (server.history, server.former) = (history, None);
            self.began_another = true;
        }
        self.links(at);
    }

    /// A server gets an order.
    fn is_told(&mut self, at: usize, connection: Connection, token: u64, order: Order) {
        let server = &mut self.servers[at];
        if connection.to_run != server.run || connection.id < server.fence {
            // The server's system answers that there is no such connection, if it can be heard.
            if self.draw.below(2) == 0 {
                self.after(500, Happens::Unanswered(token));
            }
            return self.count("an order dies with its connection");
        }
        if closes_predecessors() {
            server.fence = connection.id;
        }
        let answer = match order {
            Order::Look(_) => Answer::Seen(Seen { by: connection.id, ..server.seen() }),
            Order::Pause => {
                server.paused_until = server.paused_until.max(self.now + MAX_PAUSE);
                let delay = server.paused_until - self.now;
                self.after(delay, Happens::PauseEnds(at));
                Answer::Done
            }
            Order::Release => {
                server.paused_until = self.now;
                self.serves_waiting(at);
                Answer::Done
            }
            Order::StepDown(mark) => {
                let before = server.seen();
                server.mark = mark;
                self.becomes_replica(at, false);
                self.notes(at);
                Answer::SteppedDown(before)
            }
            Order::Follow => {
                self.becomes_replica(at, true);
                self.notes(at);
                Answer::Done
            }
            Order::Promote | Order::TakeBack => {
                if !server.is_primary {
                    self.becomes_primary(at);
                    self.notes(at);
                }
                Answer::Done
            }
        };
        if !matches!(order, Order::Look(_)) {
            self.note(&format!("{order:?} is carried out at {at}, at {}", self.servers[at].log.len()));
        }
        let facts =
            self.whose(token).and_then(|agent| self.runs[agent].as_ref()).is_some_and(|run| run.exchange.is_none());
        self.sends(at, connection.from, What::Answer { token, answer, facts });
    }

    // The agent.

    /// The agent that waits for the answer with this token.
    fn whose(&self, token: u64) -> Option<usize> {
        self.runs.iter().position(|run| run.as_ref().is_some_and(|run| run.token == token))
    }

    fn agent_runs(&mut self, who: usize) {
        if self.runs[who].is_some() {
            return;
        }
        if who == 0 && self.now > self.faults_until + SECOND && self.cut_until.is_empty() {
            self.runs_after_faults += 1;
            if self.runs_after_faults > MOST_RUNS {
                if !self.excused {
                    self.finds("the command is called again and again, and neither finishes nor undoes");
                }
                return self.after(0, Happens::Over);
            }
        }
        let dies_at = (self.now <= self.faults_until && self.draw.below(2) == 0).then(|| 1 + self.draw.below(14));
        let troubled_at = (self.now <= self.faults_until && self.draw.below(2) == 0).then(|| 1 + self.draw.below(12));
        let (waits_for, connections) = (None, [None; 2]);
        self.next += 1;
        let token = self.next;
        let (exchange, looked, turned) = (None, [false; 2], who == 1 && self.opposite);
        self.marks += 1;
        let mark = self.marks;
        self.runs[who] = Some(Run {
            exchange,
            turned,
            mark,
            looked,
            token,
            waits_for,
            connections,
            orders: 0,
            dies_at,
            troubled_at,
            released: false,
            is_disturbed: false,
        });
        self.is_opposed |= turned;
        if self.runs.iter().all(Option::is_some) {
            self.count(if self.opposite {
                "two opposite switches at the same time"
            } else {
                "two switches at the same time"
            });
            self.runs.iter_mut().flatten().for_each(|run| run.is_disturbed = true);
        }
        if self.draw.below(10) == 0 {
            let delay = self.draw.below(10 * MILLI);
            self.after(delay, Happens::Signal(who));
        }
        self.after(ANSWER_LIMIT, Happens::Unanswered(token));
        for side in [Side::Old, Side::New] {
            self.tells(token, Order::Look(side));
        }
    }

    /// The server that an agent means by a side.
    fn at(&self, who: usize, side: Side) -> usize {
        let turned = self.runs[who].as_ref().is_some_and(|run| run.turned);
        usize::from((side == Side::New) != turned)
    }

    /// Sends an order, over a new connection if there is none. Returns whether the server can be reached at all.
    fn tells(&mut self, token: u64, order: Order) -> bool {
        let Some(who) = self.whose(token) else { return false };
        let (at, from) = (self.at(who, order.to()), AGENT + who);
        let (run, is_up, is_cut) = (self.servers[at].run, self.servers[at].is_up, self.cut(from, at).is_some());
        self.next += 1;
        let id = self.next;
        let Some(agent) = &mut self.runs[who] else { return false };
        let connection = match agent.connections[at] {
            Some(connection) if connection.to_run == run && is_up => connection,
            _ if is_up && !is_cut && !order.changes_a_role() => {
                *agent.connections[at].insert(Connection { id, from, to_run: run })
            }
            _ => {
                agent.connections[at] = None;
                return false;
            }
        };
        self.sends(from, at, What::Order { connection, token, order });
        true
    }

    /// Both servers have been looked at, or one of them has.
    fn looks_on(&mut self, token: u64, from: usize, _: Answer) {
        let Some(who) = self.whose(token) else { return };
        let Some(run) = self.runs[who].as_mut().filter(|run| run.exchange.is_none()) else { return };
        run.looked[from] = true;
        let mark = run.mark;
        if run.looked != [true; 2] {
            return;
        }
        let [at_old, at_new] = [Side::Old, Side::New].map(|side| self.at(who, side));
        let (old, new) = (self.facts(at_old), self.facts(at_new));
        let old_follows = !self.servers[at_old].is_primary && self.servers[at_old].follows;
        let standing = judge(&old, &new, old_follows);
        let limit = Duration::from_micros(MAX_PAUSE);
        let (exchange, step) = match standing {
            Standing::Ready => Exchange::begin(self.instant(), limit, mark),
            Standing::Between => {
                self.count("a run goes on where another has ended");
                Exchange::resume(self.instant(), limit, mark)
            }
            Standing::Switched => {
                self.count("it is done already");
                return self.is_done(who);
            }
            Standing::Refused(_) | Standing::Later(_) => {
                self.count("a run is refused");
                let other = &self.servers[at_new];
                if self.opposite && who == 0 && !other.is_primary && !other.follows {
                    return self.finishes_the_other(who);
                }
                return self.runs_again(who);
            }
        };
        if let Some(run) = &mut self.runs[who] {
            run.exchange = Some(exchange);
        }
        self.steps(who, step);
    }

    fn facts(&self, at: usize) -> Facts {
        let server = &self.servers[at];
        let seen = server.seen();
        let (host, port) = if server.follows { ("other", 6379) } else { (NOWHERE, server.mark) };
        let link = Link { host: host.into(), port, up: Some(seen.is_linked), syncing: Some(false) };
        Facts {
            role: seen.role,
            run_id: Some(format!("{at} {}", server.run)),
            replid: Some(replid(server.history)),
            former: server.former.map(|(history, end)| (replid(history), end as u64 + 1)),
            offset: Some(server.log.len() as u64),
            link: (!server.is_primary).then_some(link),
            backlog: Some(Backlog { active: true, size: 1 << 20, first: 1, held: 0 }),
            ..Facts::default()
        }
    }

    fn steps(&mut self, who: usize, step: Step) {
        self.next += 1;
        let token = self.next;
        let [old, new] = [Side::Old, Side::New].map(|side| self.at(who, side));
        let Some(run) = &mut self.runs[who] else { return };
        (run.token, run.waits_for) = (token, None);
        match step {
            Step::Wait(time) => {
                let delay = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
                self.after(delay, Happens::Waited(token));
            }
            Step::Do(order) => {
                run.orders += 1;
                (run.waits_for, run.released) = (Some(order), false);
                let (dies, is_troubled) = (run.dies_at == Some(run.orders), run.troubled_at == Some(run.orders));
                if is_troubled && self.trouble(who, order, token) {
                    return;
                }
                let lasts = MAX_PAUSE + self.draw.below(SECOND);
                match (order, self.theme) {
                    // The new server cannot be reached from when the old one has stepped down, or when it is promoted.
                    (Order::StepDown(_), 0) | (Order::Promote, 1) => {
                        self.theme = u64::MAX;
                        self.cuts_for(new, AGENT + who, lasts);
                    }
                    // The pause is over before the old one steps down, and the new one does not get what is written
                    // then.
                    (Order::StepDown(_), 2) => {
                        self.theme = u64::MAX;
                        self.cuts_for(OLD, NEW, lasts * 2);
                        return self.after(lasts, Happens::Sends(token, order));
                    }
                    // A server comes back without its new role.
                    (Order::Release, 3) => {
                        self.theme = u64::MAX;
                        self.crashes(old);
                    }
                    (Order::Follow, 4) => {
                        self.theme = u64::MAX;
                        self.crashes(new);
                        return self.dies(who);
                    }
                    // The agent stands still before it looks whether the old one follows.
                    (Order::Follow, 7) => self.theme = STANDS_STILL,
                    (Order::Look(Side::Old), STANDS_STILL) => {
                        self.theme = u64::MAX;
                        self.count("the agent stands still");
                        let delay = self.draw.below(4 * SECOND);
                        return self.after(delay, Happens::Sends(token, order));
                    }
                    // The agent of a switch back dies between its steps, and its operator does not call it again.
                    (Order::StepDown(_), 6) if self.runs[who].as_ref().is_some_and(|run| run.turned) => {
                        self.theme = u64::MAX;
                        self.orders(token, order);
                        self.count("the agent is killed");
                        self.runs[who] = None;
                        return;
                    }
                    _ => {}
                }
                // What is on its way then arrives when another run has begun.
                let dies = dies || (order == Order::TakeBack && self.is_lost_in_a_cut(who));
                if dies && self.draw.below(2) == 0 {
                    return self.dies(who);
                }
                self.orders(token, order);
                if dies {
                    self.dies(who);
                }
            }
            Step::End(end) => {
                self.note(&format!("{end:?}"));
                self.reports(who, end);
                match end {
                    End::Switched { .. } => self.is_done(who),
                    // What the two hold cannot be compared any more: the command says so, and an operator decides.
                    End::Open(Open::Apart) if self.began_another || self.excused => {
                        self.excused = true;
                        self.runs[who] = None;
                        self.after(0, Happens::Over);
                    }
                    _ => self.runs_again(who),
                }
            }
        }
    }

    fn orders(&mut self, token: u64, order: Order) {
        if self.whose(token).is_none() {
            return;
        }
        let is_sent = self.tells(token, order);
        // A server that is down refuses the connection at once; one that cannot be reached does nothing.
        let delay = if is_sent || self.draw.below(2) == 0 { ANSWER_LIMIT } else { MILLI };
        self.after(delay, Happens::Unanswered(token));
    }

    /// Something befalls a run just before it sends an order. Returns whether the order is sent later.
    fn trouble(&mut self, who: usize, order: Order, token: u64) -> bool {
        let at = self.at(who, order.to());
        match self.draw.below(8) {
            0 => self.crashes(at),
            1 => self.crashes(1 - at),
            2 | 3 => {
                // The agent stands still, or its host does.
                self.count("the agent stands still");
                let delay = self.draw.below(4 * SECOND);
                self.after(delay, Happens::Sends(token, order));
                return true;
            }
            4 => self.cuts(OLD, NEW),
            _ => self.cuts(at, AGENT + who),
        }
        false
    }

    fn is_lost_in_a_cut(&mut self, who: usize) -> bool {
        let is_lost = self.now <= self.faults_until + 4 * SECOND && self.draw.below(2) == 0;
        if is_lost {
            self.cuts(self.at(who, Side::Old), AGENT + who);
        }
        is_lost
    }

    fn hears(&mut self, token: u64, answer: Answer) {
        let now = self.instant();
        let Some(who) = self.whose(token) else { return };
        let Some(run) = &mut self.runs[who] else { return };
        run.released = run.waits_for == Some(Order::Release) && answer == Answer::Done;
        if let Some(exchange) = &mut run.exchange {
            let step = exchange.next(now, answer);
            self.steps(who, step);
        }
    }

    fn is_unanswered(&mut self, token: u64) {
        let Some(who) = self.whose(token) else { return };
        let waits_for = self.runs[who].as_ref().and_then(|run| run.waits_for);
        let at = waits_for.map_or(OLD, |order| self.at(who, order.to()));
        let Some(run) = &mut self.runs[who] else { return };
        match waits_for {
            Some(_) => {
                run.connections[at] = None;
                self.count("an order gets no answer");
                self.hears(token, Answer::Lost);
            }
            None => self.runs_again(who),
        }
    }

    fn dies(&mut self, who: usize) {
        self.count("the agent is killed");
        self.runs_again(who);
    }

    fn runs_again(&mut self, who: usize) {
        self.runs[who] = None;
        if who == 0 || self.now < self.faults_until {
            let delay = MILLI + self.draw.below(SECOND);
            self.after(delay, Happens::AgentRuns(who));
        }
    }

    /// The agent whose switch has left no primary, where the two want the opposite.
    fn ended_between(&self) -> Option<usize> {
        let is_left = self.is_opposed && !self.excused && !self.servers.iter().any(|server| server.is_primary);
        let stepped_down = |server: &Server| !server.is_primary && !server.follows;
        is_left.then(|| self.servers.iter().position(stepped_down)).flatten()
    }

    /// A switch the other way has ended between its steps, and the command has said that it is to be called again.
    fn finishes_the_other(&mut self, who: usize) {
        self.count("a switch the other way is finished first");
        self.runs[who] = None;
        let delay = MILLI + self.draw.below(SECOND);
        self.after(delay, Happens::AgentRuns(1 - who));
        self.after(delay + FINISHES, Happens::AgentRuns(who));
    }

    fn is_done(&mut self, who: usize) {
        self.runs[who] = None;
        if self.now < self.faults_until {
            return self.runs_again(who);
        }
        if who == 0 {
            // A link that was cut before the last fault may be away for longer.
            let links = self.cut_until.values().max().map_or(0, |until| until.saturating_sub(self.now));
            self.after(links + SETTLES, Happens::Over);
        }
    }

    // Faults.

    fn fault(&mut self) {
        if self.now > self.faults_until {
            return;
        }
        let delay = 1 + self.either(2, 20 * MILLI, 2 * SECOND);
        self.after(delay, Happens::Fault);
        match self.draw.below(8) {
            0 => self.crashes(OLD),
            1 => self.crashes(NEW),
            _ => {
                let agent = AGENT + usize::from(self.draw.below(4) == 0);
                let pairs = [(OLD, NEW), (OLD, agent), (NEW, agent), (OLD, CLIENT), (NEW, CLIENT)];
                let (one, other) = pairs[self.draw.below(5) as usize];
                self.cuts(one, other);
            }
        }
    }

    fn cuts(&mut self, one: usize, other: usize) {
        let lasts = MILLI + self.either(2, 50 * MILLI, 5 * SECOND);
        self.cuts_for(one, other, lasts);
    }

    fn cuts_for(&mut self, one: usize, other: usize, lasts: u64) {
        if self.cut(one, other).is_none() {
            self.count("a link is cut");
            self.cut_until.insert((one, other), self.now + lasts);
            self.after(lasts, Happens::Heals(one, other));
        }
    }

    /// A Sentinel believes that the old primary is dead.
    fn sentinel_promotes(&mut self) {
        if self.servers[NEW].is_up && !self.servers[NEW].is_primary {
            self.count("a Sentinel promotes the new one");
            (self.excused, self.by_sentinel) = (true, true);
            self.becomes_primary(NEW);
            self.servers[NEW].starts_as_primary = true;
            self.after(8 * SECOND, Happens::SentinelCorrects);
        }
    }

    fn sentinel_corrects(&mut self) {
        if self.servers[OLD].is_up && self.servers[OLD].is_primary && self.servers[NEW].is_primary {
            self.becomes_replica(OLD, true);
            self.servers[OLD].starts_as_primary = false;
        }
    }

    // What must hold.

    /// Never are there two primaries, whether they accept writes or not. Never do both follow each other: no command
    /// would go on from there.
    fn check(&mut self) {
        if self.servers.iter().all(|server| server.is_primary) && !self.excused {
            self.finds("both servers are primaries");
        }
        if self.servers.iter().all(|server| !server.is_primary && server.follows) && !self.excused {
            self.finds("the servers follow each other");
        }
    }

    /// What a run says at its end is true.
    fn reports(&mut self, who: usize, end: End) {
        let at = |side| self.at(who, side);
        let [old, new] = [Side::Old, Side::New].map(|side| &self.servers[at(side)]);
        let (released, is_disturbed) =
            self.runs[who].as_ref().map_or((false, false), |run| (run.released, run.is_disturbed));
        let waits = old.paused_until.saturating_sub(self.now);
        let finding = match end {
            End::Switched { .. } if !new.is_primary && !self.excused => {
                Some("a switch that is reported has not happened")
            }
            End::Switched { follower: Follower::NotYet, .. }
                if old.is_up && old.is_primary && old.started + 5 * SECOND < self.now =>
            {
                Some("a server that has forgotten that it has stepped down is left a primary")
            }
            End::Undone { why: Why::Changed, stepped_down: false } => None,
            End::Undone { .. } if !old.is_primary && !self.excused => Some("the old server is reported as the primary"),
            End::Undone { stepped_down: true, .. } if new.log.len() > old.log.len() && !self.by_sentinel => {
                Some("the old server is the primary again, and lacks what the new one has acknowledged")
            }
            End::Undone { .. } if waits > MAX_PAUSE => Some("writes wait for longer than they may"),
            End::Undone { why: Why::NotInTime | Why::Signal, .. }
                if old.is_up && !released && waits > 0 && self.cut(at(Side::Old), AGENT + who).is_none() =>
            {
                Some("writes wait though the switch was undone")
            }
            _ => None,
        };
        self.count(match end {
            End::Switched { .. } => "a switch",
            End::Undone { stepped_down: false, .. } => "a switch is undone before the old one has stepped down",
            End::Undone { stepped_down: true, .. } => "a switch is undone after the old one has stepped down",
            End::Open(_) => "a switch that is not known to be done",
        });
        if let Some(finding) = finding.filter(|_| !is_disturbed) {
            self.finds(finding);
        }
    }

    /// When all is over, the new server is the only primary, takes writes, and has all that were acknowledged. If
    /// another agent wanted the opposite, either of the two may be the primary.
    fn at_the_end(&mut self) {
        if self.finding.is_some() || self.excused {
            return;
        }
        let [mut old, mut new] = [&self.servers[OLD], &self.servers[NEW]];
        if self.is_opposed && old.is_primary {
            (old, new) = (new, old);
        }
        let has: std::collections::BTreeSet<u64> = new.log.iter().copied().collect();
        let lost = self.acknowledged.iter().filter(|id| !has.contains(id)).count();
        if lost > 0 {
            self.finds(&format!("{lost} acknowledged writes are lost"));
        } else if !new.is_primary || old.is_primary {
            self.finds("there is not one primary, the right one, in the end");
        } else if self.last_acknowledged + SETTLES < self.now + SECOND {
            self.finds("no writes are acknowledged in the end");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remora_base::mutation::Mutation;
    use remora_base::pace;

    /// Schedules that `make test` plays, and `make test-all`.
    const SCHEDULES: usize = 1_000;
    const MORE_SCHEDULES: usize = 10_000;

    /// How long the search for a fault may take. The schedules of half a minute's work last many minutes beside builds.
    const FOUND_WITHIN: Duration = Duration::from_secs(300);

    #[test]
    fn what_must_hold_of_a_switch_does_in_schedules_of_many_seeds() {
        what_must_hold_does(21, SCHEDULES);
    }

    #[test]
    #[ignore = "long: make test-all"]
    fn what_must_hold_of_a_switch_does_in_schedules_of_many_more_seeds() {
        what_must_hold_does(22, MORE_SCHEDULES);
    }

    fn what_must_hold_does(first: u64, schedules: usize) {
        let mut reached = BTreeMap::new();
        for seed in pace::Random::seeded(first).draws().take(schedules) {
            let world = play(seed);
            let last = world.log.len().saturating_sub(60);
            assert_eq!(world.finding, None, "seed {seed}:\n{}", world.log[last..].join("\n"));
            world.counts.iter().for_each(|(what, count)| *reached.entry(*what).or_insert(0) += count);
        }
        println!("{reached:#?}");
        let all = [
            "a switch",
            "a switch is undone before the old one has stepped down",
            "a switch is undone after the old one has stepped down",
            "a switch that is not known to be done",
            "a run goes on where another has ended",
            "it is done already",
            "the agent is killed",
            "the agent stands still",
            "a signal",
            "an order gets no answer",
            "an order dies with its connection",
            "a server has forgotten its role",
            "a Sentinel promotes the new one",
            "a full copy",
            "two switches at the same time",
            "two opposite switches at the same time",
            "a switch the other way is finished first",
        ];
        all.iter().for_each(|what| assert!(reached.contains_key(what), "{what} was not reached"));
    }

    #[track_caller]
    fn is_found(mutation: Mutation, as_what: &str) {
        let began = Instant::now();
        for (number, seed) in pace::Random::seeded(23).draws().enumerate() {
            Mutation::set(Some(mutation));
            let finding = play(seed).finding;
            Mutation::set(None);
            if let Some(finding) = finding.filter(|finding| finding.contains(as_what)) {
                return println!("{mutation:?} after {number} schedules: {finding}");
            }
            assert!(began.elapsed() < FOUND_WITHIN, "{mutation:?} was not found in {number} schedules");
        }
    }

    #[test]
    fn a_promotion_before_all_writes_are_there_is_found() {
        is_found(Mutation::BehindPromoted, "are lost");
    }

    #[test]
    fn a_pause_that_is_over_before_the_old_one_steps_down_is_found() {
        is_found(Mutation::OldOffsetBelieved, "are lost");
    }

    #[test]
    fn an_old_primary_that_is_one_after_the_promotion_is_found() {
        is_found(Mutation::PromotedFirst, "both servers are primaries");
        is_found(Mutation::ForgottenRoleLeft, "is left a primary");
    }

    #[test]
    fn a_primary_that_a_switch_back_has_made_and_that_is_made_to_follow_is_found() {
        is_found(Mutation::SuccessorDemoted, "follow each other");
    }

    #[test]
    fn what_is_not_undone_is_found() {
        is_found(Mutation::TakeBackForgotten, "is reported as the primary");
        is_found(Mutation::ReleaseForgotten, "though the switch was undone");
    }

    #[test]
    fn an_order_to_promote_that_arrives_late_is_found() {
        is_found(Mutation::TakenBackAfterPromotion, "both servers are primaries");
    }

    #[test]
    fn a_run_that_does_not_see_that_another_has_taken_over_is_found() {
        is_found(Mutation::MarkIgnored, "both servers are primaries");
    }

    #[test]
    fn a_second_run_that_promotes_once_more_is_found() {
        is_found(Mutation::AheadTakenBack, "lacks what the new one");
        is_found(Mutation::PredecessorHeard, "both servers are primaries");
    }
}
