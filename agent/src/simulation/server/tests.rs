#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use super::serve::Answer;
use super::*;

/// Two or three servers whose messages arrive at once and in order.
struct Pair {
    servers: Vec<Server>,
    oracle: Oracle,
    timers: VecDeque<(usize, Timer)>,
    conns: BTreeMap<Conn, (usize, usize)>,
    next: u64,
}

fn address(number: usize) -> Address {
    Address { host: format!("10.0.0.{number}"), port: 6379 }
}

fn traits(number: usize) -> Traits {
    Traits {
        id: ServerId(number),
        address: address(number),
        valkey: false,
        module: false,
        backlog_bytes: 1000,
        output_limit: 10_000,
        idle_limit: Duration::ZERO,
        follows: None,
        pace: Duration::from_millis(1),
        slots: 6,
    }
}

impl Pair {
    fn new(number: usize) -> Pair {
        let mut oracle = Oracle::default();
        let mut timers = VecDeque::new();
        let servers = (0..number).map(|number| {
            let mut step = Step { oracle: &mut oracle, effects: Vec::new() };
            let server = Server::start(traits(number), number as u64, &mut step);
            timers.extend(step.effects.into_iter().filter_map(|effect| match effect {
                Effect::After(_, timer) => Some((number, timer)),
                _ => None,
            }));
            server
        });
        let servers = servers.collect();
        Pair { servers, oracle, timers, conns: BTreeMap::new(), next: 1 }
    }

    /// Does something with one server, and carries out what follows from it.
    fn on(&mut self, at: usize, what: impl FnOnce(&mut Server, &mut Step<'_>)) {
        let mut step = Step { oracle: &mut self.oracle, effects: Vec::new() };
        what(&mut self.servers[at], &mut step);
        for effect in step.effects {
            self.perform(at, effect);
        }
    }

    fn perform(&mut self, at: usize, effect: Effect) {
        let other = |(a, b): (usize, usize)| if a == at { b } else { a };
        match effect {
            Effect::Send(conn, message) => {
                if let Some(&ends) = self.conns.get(&conn) {
                    self.on(other(ends), |server, step| server.receive(conn, message, step));
                }
            }
            Effect::Close(conn) => {
                if let Some(ends) = self.conns.remove(&conn) {
                    self.on(other(ends), |server, step| server.closed(conn, step));
                }
            }
            Effect::Dial { to, attempt } => {
                let peer = self.servers.iter().position(|server| server.traits.address == to && server.alive);
                let conn = peer.map(|peer| {
                    self.next += 1;
                    self.conns.insert(Conn(self.next), (at, peer));
                    Conn(self.next)
                });
                self.on(at, |server, step| server.dialed(attempt, conn, step));
            }
            Effect::After(_, timer) => self.timers.push_back((at, timer)),
            Effect::Block(_) => {}
        }
    }

    /// Lets every timer come a number of times.
    fn settle(&mut self) {
        for _ in 0..100 {
            if let Some((at, timer)) = self.timers.pop_front() {
                self.on(at, |server, step| server.timer(timer, step));
            }
        }
    }

    fn write(&mut self, at: usize, number: usize) {
        for n in 0..number {
            self.on(at, |server, step| server.write(&[10, 1, n as u8, 7, 7, 7, 7, 7, 7, 7], step));
        }
    }

    fn follow(&mut self, at: usize, to: Option<usize>) {
        self.on(at, |server, step| server.replicaof(to.map(address), step));
        self.settle();
    }

    /// Ends the process of a server, and all its connections.
    fn stop(&mut self, at: usize, saves: bool) {
        self.servers[at].stop(saves);
        let ended: Vec<Conn> =
            self.conns.iter().filter(|(_, ends)| ends.0 == at || ends.1 == at).map(|(&conn, _)| conn).collect();
        for conn in ended {
            let (a, b) = self.conns.remove(&conn).unwrap();
            self.on(if a == at { b } else { a }, |server, step| server.closed(conn, step));
        }
    }

    fn is_in_step(&self, at: usize, with: usize) -> bool {
        let (replica, primary) = (&self.servers[at], &self.servers[with]);
        replica.is_up()
            && (replica.replid, replica.offset, replica.content) == (primary.replid, primary.offset, primary.content)
            && self.oracle.expected(replica.replid, replica.offset) == Some(replica.content)
    }
}

#[test]
fn a_replica_gets_a_snapshot_and_then_the_stream() {
    let mut pair = Pair::new(2);
    pair.write(0, 3);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    pair.write(0, 20);
    assert!(pair.is_in_step(1, 0));
    assert_eq!((pair.servers[0].offset, pair.servers[1].full_copies), (200, (0, 1)));
}

#[test]
fn a_replica_that_comes_back_goes_on_where_it_was_if_the_backlog_reaches_back() {
    let mut pair = Pair::new(2);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    pair.follow(1, Some(7));
    pair.write(0, 50);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[0].full_copies.0, 1);
    pair.follow(1, Some(7));
    pair.write(0, 101);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[0].full_copies.0, 2, "the backlog was overrun");
}

#[test]
fn a_server_that_was_emptied_is_continued_unless_its_position_was_made_worthless() {
    let mut pair = Pair::new(2);
    pair.write(0, 3);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    pair.follow(1, Some(7));
    pair.servers[1].content = Content::EMPTY;
    pair.follow(1, Some(0));
    assert!(pair.servers[1].is_up() && !pair.is_in_step(1, 0), "the fault of a server emptied by a module");
    pair.follow(1, Some(7));
    pair.follow(1, None);
    pair.servers[1].content = Content::EMPTY;
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
}

#[test]
fn a_primary_that_was_shut_down_cleanly_goes_on_under_another_replid() {
    let mut pair = Pair::new(2);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    let before = pair.servers[0].replid;
    pair.stop(0, true);
    pair.on(0, Server::restart);
    assert_eq!(pair.servers[0].answer(Some((before, 51))), Answer::Continue);
    assert_eq!(pair.servers[0].answer(Some((before, 50))), Answer::Full, "no backlog outlives the process");
    pair.settle();
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[1].former, Some((before, 51)));
    assert_eq!(pair.servers[1].full_copies, (0, 1));
    pair.write(0, 5);
    assert!(pair.is_in_step(1, 0));
    pair.stop(0, false);
    pair.on(0, Server::restart);
    pair.settle();
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[1].full_copies, (0, 2), "a killed primary has lost what it wrote");
}

#[test]
fn a_promoted_server_goes_on_with_the_former_history_up_to_its_promotion() {
    let mut pair = Pair::new(3);
    pair.follow(1, Some(0));
    pair.follow(2, Some(1));
    pair.write(0, 5);
    assert!(pair.is_in_step(2, 0));
    let before = pair.servers[0].replid;
    pair.follow(1, None);
    assert_eq!(pair.servers[1].former, Some((before, 51)));
    pair.write(1, 2);
    pair.write(0, 3);
    assert_eq!(pair.servers[1].answer(Some((before, 51))), Answer::Continue);
    assert_eq!(pair.servers[1].answer(Some((before, 61))), Answer::Full);
    pair.settle();
    assert!(pair.is_in_step(2, 1) && pair.servers[2].full_copies.1 == 1);
    pair.follow(0, Some(1));
    assert!(pair.is_in_step(0, 1) && pair.servers[0].full_copies.1 == 1, "its writes are in no history of the other");
}
