//! Pair: servers whose messages arrive at once and in order, for tests.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use super::*;

/// Two or three servers whose messages arrive at once and in order.
pub(crate) struct Pair {
    pub(crate) servers: Vec<Server>,
    pub(super) oracle: Oracle,
    timers: VecDeque<(usize, Timer)>,
    conns: BTreeMap<Conn, (usize, usize)>,
    next: u64,
}

pub(crate) fn address(number: usize) -> Address {
    Address { host: format!("10.0.0.{number}"), port: 6379 }
}

fn traits(number: usize, backlog_bytes: usize) -> Traits {
    Traits {
        id: ServerId(number),
        address: address(number),
        valkey: false,
        module: false,
        backlog_bytes,
        shares_its_buffer: true,
        output_limit: 10_000,
        idle_limit: Duration::ZERO,
        follows: None,
        pace: Duration::from_millis(1),
        slots: 6,
        saves_to_file: number == 1,
        lacks_a_command: false,
    }
}

impl Pair {
    pub(crate) fn new(number: usize, backlog_bytes: usize) -> Pair {
        let mut oracle = Oracle::default();
        let mut timers = VecDeque::new();
        let servers = (0..number).map(|number| {
            let mut step = Step { oracle: &mut oracle, effects: Vec::new() };
            let server = Server::start(traits(number, backlog_bytes), number as u64, &mut step);
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
    pub(crate) fn on(&mut self, at: usize, what: impl FnOnce(&mut Server, &mut Step<'_>)) {
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
            Effect::Block(_) | Effect::NotContinued(_) | Effect::Overflowed(_) => {}
        }
    }

    /// Lets every timer come a number of times.
    pub(crate) fn settle(&mut self) {
        for _ in 0..100 {
            if let Some((at, timer)) = self.timers.pop_front() {
                self.on(at, |server, step| server.timer(timer, step));
            }
        }
    }

    pub(crate) fn write(&mut self, at: usize, number: usize) {
        for n in 0..number {
            self.on(at, |server, step| server.write(&[10, 1, n as u8, 7, 7, 7, 7, 7, 7, 7], step));
        }
    }

    pub(crate) fn follow(&mut self, at: usize, to: Option<usize>) {
        self.on(at, |server, step| server.replicaof(to.map(address), step));
        self.settle();
    }

    /// Ends the process of a server, and all its connections.
    pub(crate) fn stop(&mut self, at: usize, saves: bool) {
        self.servers[at].stop(saves);
        let ended: Vec<Conn> =
            self.conns.iter().filter(|(_, ends)| ends.0 == at || ends.1 == at).map(|(&conn, _)| conn).collect();
        for conn in ended {
            let (a, b) = self.conns.remove(&conn).unwrap();
            self.on(if a == at { b } else { a }, |server, step| server.closed(conn, step));
        }
    }

    pub(crate) fn is_in_step(&self, at: usize, with: usize) -> bool {
        let (replica, primary) = (&self.servers[at], &self.servers[with]);
        replica.is_up()
            && (replica.replid, replica.offset, replica.content) == (primary.replid, primary.offset, primary.content)
            && self.oracle.expected(replica.replid, replica.offset) == Some(replica.content)
    }
}
