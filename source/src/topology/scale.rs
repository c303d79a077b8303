//! Scale: a model of many replicas in racks, which drives the real [`Topology`]. Only for tests.
//!
//! Assumptions. The bytes are a fluid: each step divides the cables among the flows by max-min fair sharing, and a
//! replica holds at most what its upstream holds, less one slot and the delay of a hop. Each host has one network link
//! with the same rate in both directions, each rack one uplink; traffic within a rack uses no uplink. A host's servers,
//! processors and memory are never the limit. Nothing is lost on a cable. A replica that loses its upstream needs
//! [`RECONNECT`] for the next one; [`DELAY`] passes until a reader fetches a slot that its upstream has just received.

use std::fmt;

use super::*;

const GIB: f64 = (1_u64 << 30) as f64;

/// Bytes of a slot, the default of a source.
const SLOT: f64 = (1_u64 << 20) as f64;

/// Bytes per second of a cable of 1 Gb/s, less the headers.
const GIGABIT: f64 = 117e6;

/// Seconds of one step of the model.
const STEP: f64 = 0.25;

/// Seconds until a reader fetches a slot that its upstream has just received: a poll, and two round trips.
const DELAY: f64 = 0.001;

/// Seconds until a reader has connected to another upstream.
const RECONNECT: f64 = 0.3;

/// Seconds after which a model that has not ended is stopped.
const LIMIT: f64 = 3000.0;

/// Which replica reads from which other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Each replica feeds two others, in the order of the racks.
    Tree,
    /// The first replica of each rack reads from that of the rack before, and feeds a chain in its own rack.
    Heads,
    /// The topology decides and knows no racks.
    NoZones,
    /// The topology decides and knows the racks (`--zone`).
    Zones,
}

/// One run of the model.
#[derive(Clone, Debug)]
struct Plan {
    shape: Shape,
    replicas: usize,
    racks: usize,
    gibibytes: f64,
    /// Gb/s of the source's cable, of the hosts' cables (by turns), and of the uplinks.
    source: f64,
    hosts: Vec<f64>,
    uplink: f64,
    /// One in this number of hosts has a cable of a tenth of the rate; 0 for no host.
    slow_part: usize,
    /// One in this number joins when half of the time of one is over; 0 for no host.
    late_part: usize,
    /// One in this number ends in the middle, each at another time; half of them without closing a connection.
    dead_part: usize,
}

impl Plan {
    fn of(shape: Shape, replicas: usize, gibibytes: f64) -> Plan {
        let racks = 20;
        let (source, hosts, uplink) = (10.0, vec![10.0], 25.0);
        Plan { shape, replicas, racks, gibibytes, source, hosts, uplink, slow_part: 0, late_part: 0, dead_part: 0 }
    }
}

/// What a run has shown.
#[derive(Debug)]
struct Outcome {
    /// Seconds until the last replica that lives had everything; [`LIMIT`] if it never did.
    last: f64,
    /// The same, of the replicas that joined at the beginning and whose cables are not slower than the source's.
    regular: f64,
    /// Copies of the data set that left the source, and that the busiest uplink carried in one direction.
    from_source: f64,
    uplink: f64,
    /// Hops from the source to the deepest replica.
    depth: usize,
    /// Upstreams that replicas were assigned after their first one.
    moves: usize,
}

impl fmt::Display for Outcome {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { last, regular, from_source, uplink, depth, moves } = self;
        write!(to, "{last:7.1} s | {regular:7.1} s | {from_source:7.2} | {uplink:6.2} | {depth:5} | {moves:5}")
    }
}

struct Host {
    session: Session,
    rack: usize,
    rate: f64,
    joins: f64,
    dies: Option<f64>,
    from: Option<usize>,
    /// It fetches nothing before this time.
    connects: f64,
    has_joined: bool,
    is_dead: bool,
    held: f64,
    done: Option<f64>,
    flow: f64,
}

struct World {
    plan: Plan,
    hosts: Vec<Host>,
    topology: Topology,
    base: Instant,
    now: f64,
    total: f64,
    outcome: Outcome,
    uplinks: Vec<[f64; 2]>,
}

/// Pseudo-random numbers, the same in every run.
fn mixed(number: usize) -> u64 {
    let mut bits = (number as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits ^= bits >> 29;
    bits = bits.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^ (bits >> 32)
}

/// Whether this host is one of one in `part`. `salt` draws other hosts for each question.
fn is_one(number: usize, part: usize, salt: usize) -> bool {
    part > 0 && number > 0 && mixed(number + salt).is_multiple_of(part as u64)
}

impl World {
    fn new(plan: Plan) -> World {
        let total = plan.gibibytes * GIB;
        let alone = total / (plan.source * GIGABIT);
        let mut hosts: Vec<Host> = (0..plan.replicas)
            .map(|number| {
                let gigabits = plan.hosts[number % plan.hosts.len()];
                let slow = if is_one(number, plan.slow_part, 1000) { 0.1 } else { 1.0 };
                let late = if is_one(number, plan.late_part, 2000) { alone / 2.0 } else { 0.0 };
                let share = (mixed(number + 4000) % 1000) as f64 / 1000.0;
                Host {
                    session: number as u64 + 1,
                    // Static shapes go through the racks in order. The topology gets the joiners as they come.
                    rack: number * plan.racks / plan.replicas.max(1),
                    rate: gigabits * GIGABIT * slow,
                    joins: late,
                    dies: is_one(number, plan.dead_part, 3000).then_some(alone * (0.1 + 0.8 * share)),
                    from: None,
                    connects: 0.0,
                    has_joined: false,
                    is_dead: false,
                    held: 0.0,
                    done: None,
                    flow: 0.0,
                }
            })
            .collect();
        if matches!(plan.shape, Shape::Zones | Shape::NoZones) {
            hosts.sort_by_key(|host| mixed(host.session as usize));
            for (session, host) in (1..).zip(&mut hosts) {
                host.session = session;
            }
        }
        let outcome = Outcome { last: 0.0, regular: 0.0, from_source: 0.0, uplink: 0.0, depth: 0, moves: 0 };
        let uplinks = vec![[0.0; 2]; plan.racks + 1];
        let base = Instant::now();
        World { plan, hosts, topology: Topology::default(), base, now: 0.0, total, outcome, uplinks }
    }

    fn run(mut self) -> Outcome {
        while self.now < LIMIT && self.hosts.iter().any(|host| !host.is_dead && host.done.is_none()) {
            self.join();
            self.die();
            self.share();
            self.advance();
            self.now += STEP;
            self.tell();
        }
        self.outcome.last =
            self.hosts.iter().filter(|host| !host.is_dead).map(|host| host.done.unwrap_or(LIMIT)).fold(0.0, f64::max);
        let fast = self.plan.source * GIGABIT;
        let regular = self.hosts.iter().filter(|host| !host.is_dead && host.joins <= 0.0 && host.rate >= fast);
        self.outcome.regular = regular.map(|host| host.done.unwrap_or(LIMIT)).fold(0.0, f64::max);
        self.outcome.from_source /= self.total;
        self.outcome.uplink = self.uplinks.iter().flatten().fold(0.0, |most: f64, bytes| most.max(*bytes)) / self.total;
        self.outcome
    }

    fn time(&self) -> Instant {
        self.base + Duration::from_secs_f64(self.now)
    }

    fn at(&self, session: Option<Session>) -> Option<usize> {
        session.map(|session| session as usize - 1)
    }

    fn join(&mut self) {
        let time = self.time();
        for number in 0..self.hosts.len() {
            if self.hosts[number].has_joined || self.hosts[number].joins > self.now {
                continue;
            }
            self.hosts[number].has_joined = true;
            let (session, rack) = (self.hosts[number].session, self.hosts[number].rack);
            self.hosts[number].from = match self.plan.shape {
                Shape::Tree => number.checked_sub(1).map(|before| before / 2),
                Shape::Heads => {
                    let before = number.checked_sub(1);
                    let is_head = before.is_none_or(|before| self.hosts[before].rack != rack);
                    if is_head { self.hosts.iter().position(|host| host.rack + 1 == rack) } else { before }
                }
                Shape::NoZones | Shape::Zones => {
                    let zone = if self.plan.shape == Shape::Zones { rack.to_string() } else { String::new() };
                    let witness = Witness::new([10, 0, 0, 1].into(), "");
                    let joining = Joining { serves: true, zone, witness, first: 0 };
                    let from = self.topology.join(time, 1, session, joining);
                    let spliced = self.topology.spliced();
                    self.hosts[number].from = self.at(from);
                    self.assign(&spliced);
                    self.at(from)
                }
            };
        }
    }

    fn assign(&mut self, moved: &[Assignment]) {
        for assignment in moved {
            let from = self.at(assignment.from);
            let host = &mut self.hosts[assignment.reader as usize - 1];
            host.from = from;
            if self.now > 0.0 {
                host.connects = self.now + RECONNECT;
                self.outcome.moves += 1;
            }
        }
    }

    fn die(&mut self) {
        for number in 0..self.hosts.len() {
            let host = &mut self.hosts[number];
            if host.is_dead || host.dies.is_none_or(|dies| dies > self.now) {
                continue;
            }
            host.is_dead = true;
            // Half of them close their connections. The others fall silent, and the tick notices.
            if host.session.is_multiple_of(2) {
                let moved = self.topology.gone(host.session);
                self.assign(&moved);
            }
        }
    }

    /// The hosts in an order in which each follows its upstream.
    fn order(&self) -> Vec<usize> {
        let mut readers = vec![Vec::new(); self.hosts.len()];
        let mut order = Vec::new();
        for (number, host) in self.hosts.iter().enumerate() {
            match host.from {
                Some(from) => readers[from].push(number),
                None => order.push(number),
            }
        }
        let mut next = 0;
        while next < order.len() {
            order.extend(&readers[order[next]]);
            next += 1;
        }
        order
    }

    /// The most bytes that a reader can hold, given its upstream's.
    fn behind(&self, from: usize) -> f64 {
        let above = &self.hosts[from];
        if above.done.is_some() { self.total } else { above.held - SLOT - above.flow * DELAY }
    }

    fn is_active(&self, host: &Host) -> bool {
        let is_fed = host.from.is_none_or(|from| !self.hosts[from].is_dead);
        host.has_joined && !host.is_dead && host.done.is_none() && host.connects <= self.now && is_fed
    }

    /// The cables that a host's flow goes through. Numbers: the source's, the hosts' in and out, the uplinks' in and
    /// out.
    fn cables(&self, number: usize) -> Vec<usize> {
        let (host, hosts, racks) = (&self.hosts[number], self.hosts.len(), self.plan.racks + 1);
        let (out, rack) = match host.from {
            Some(from) => (1 + hosts + from, self.hosts[from].rack),
            None => (0, racks - 1),
        };
        let mut cables = vec![1 + number, out];
        if rack != host.rack {
            cables.push(1 + 2 * hosts + host.rack);
            // The source has a rack of its own.
            if rack < racks - 1 {
                cables.push(1 + 2 * hosts + racks + rack);
            }
        }
        cables
    }

    /// Max-min fair sharing: all flows grow alike until a cable is full. A flow that has all of its upstream grows no
    /// faster than that.
    fn share(&mut self) {
        let (hosts, racks) = (self.hosts.len(), self.plan.racks + 1);
        let mut room = vec![self.plan.source * GIGABIT];
        room.extend(self.hosts.iter().map(|host| host.rate));
        room.extend(self.hosts.iter().map(|host| host.rate));
        room.extend(vec![self.plan.uplink * GIGABIT; 2 * racks]);
        let mut flows = vec![0_usize; room.len()];
        let paths: Vec<Vec<usize>> = (0..hosts).map(|number| self.cables(number)).collect();
        let mut open: Vec<usize> =
            self.order().into_iter().filter(|&number| self.is_active(&self.hosts[number])).collect();
        let mut is_open = vec![false; hosts];
        for &number in &open {
            is_open[number] = true;
            paths[number].iter().for_each(|&cable| flows[cable] += 1);
        }
        let waits: Vec<bool> = self
            .hosts
            .iter()
            .map(|host| {
                host.from.is_some_and(|from| self.hosts[from].done.is_none() && host.held + SLOT >= self.behind(from))
            })
            .collect();
        self.hosts.iter_mut().for_each(|host| host.flow = 0.0);
        let mut level = 0.0;
        while !open.is_empty() {
            let shares = room.iter().zip(&flows).filter(|(_, flows)| **flows > 0);
            let more = shares.map(|(room, flows)| room / *flows as f64).fold(f64::INFINITY, f64::min);
            level += more;
            for (room, flows) in room.iter_mut().zip(&flows) {
                *room -= more * *flows as f64;
            }
            let full: Vec<bool> = room.iter().zip(&flows).map(|(room, flows)| *flows > 0 && *room < 1.0).collect();
            open.retain(|&number| {
                let follows = waits[number] && self.hosts[number].from.is_some_and(|from| !is_open[from]);
                let stays = !follows && !paths[number].iter().any(|&cable| full[cable]);
                if !stays {
                    is_open[number] = false;
                    self.hosts[number].flow = level;
                    paths[number].iter().for_each(|&cable| flows[cable] -= 1);
                }
                stays
            });
        }
    }

    fn advance(&mut self) {
        for number in self.order() {
            if !self.is_active(&self.hosts[number]) {
                continue;
            }
            let limit = self.hosts[number].from.map_or(self.total, |from| self.behind(from));
            let (before, flow) = (self.hosts[number].held, self.hosts[number].flow);
            let held = (before + flow * STEP).min(limit).max(before).min(self.total);
            let got = held - before;
            self.hosts[number].held = held;
            if self.hosts[number].from.is_none() {
                self.outcome.from_source += got;
            }
            let (hosts, racks) = (self.hosts.len(), self.plan.racks + 1);
            for cable in self.cables(number).into_iter().filter_map(|cable| cable.checked_sub(1 + 2 * hosts)) {
                self.uplinks[cable % racks][cable / racks] += got;
            }
            // One slot before the end the rest is on its way.
            let above = self.hosts[number].from.and_then(|from| self.hosts[from].done);
            let lag = (SLOT / flow.max(1.0)) + DELAY;
            let is_whole = held >= self.total - 1.0;
            if is_whole {
                let reached = self.now + got / flow.max(1.0);
                self.hosts[number].done = Some(reached.max(above.map_or(0.0, |above| above + lag)));
            }
        }
    }

    fn tell(&mut self) {
        let time = self.time();
        for host in self.hosts.iter().filter(|host| host.has_joined && !host.is_dead) {
            let at = Relaying { held: (host.held / SLOT) as u64, ..Relaying::default() };
            self.topology.progress(time, host.session, at, host.held as u64, host.done.is_some());
        }
        let moved = self.topology.tick(time, (self.total / SLOT) as u64);
        self.assign(&moved);
        let mut depth = vec![1; self.hosts.len()];
        for number in self.order() {
            if let Some(from) = self.hosts[number].from {
                depth[number] = depth[from] + 1;
            }
        }
        self.outcome.depth = self.outcome.depth.max(depth.into_iter().max().unwrap_or(0));
    }
}

fn alone(plan: &Plan) -> f64 {
    World::new(Plan { replicas: 1, slow_part: 0, late_part: 0, dead_part: 0, ..plan.clone() }).run().last
}

fn ratio(plan: &Plan) -> (f64, Outcome) {
    let outcome = World::new(plan.clone()).run();
    (outcome.last / alone(plan), outcome)
}

#[test]
#[ignore = "long: make test-all"]
fn a_thousand_replicas_in_racks_take_little_longer_than_one_and_each_cable_carries_one_copy() {
    let (ratio, outcome) = ratio(&Plan::of(Shape::Zones, 1000, 64.0));
    assert!(ratio <= 1.3, "{ratio}: {outcome}");
    assert!(outcome.from_source < 1.01 && outcome.uplink < 1.01, "{outcome}");
}

mod by_command {
    use super::*;

    #[test]
    #[ignore = "a table for docs/explanation/relay.md: cargo xtask scale"]
    fn table() {
        println!(
            "| data | network | shape | time of one | ratio | last of all | last regular | source | uplink | hops | moves |"
        );
        let shapes = [Shape::Tree, Shape::Heads, Shape::NoZones, Shape::Zones];
        for shape in shapes {
            row("64 GiB, 10 Gb/s", &Plan::of(shape, 1000, 64.0));
        }
        for shape in shapes {
            row("64 GiB, source 1", &Plan { source: 1.0, ..Plan::of(shape, 1000, 64.0) });
        }
        let zones = |gibibytes| Plan::of(Shape::Zones, 1000, gibibytes);
        row("64 GiB, all 1", &Plan { source: 1.0, hosts: vec![1.0], uplink: 10.0, ..zones(64.0) });
        row("64 GiB, all 25", &Plan { source: 25.0, hosts: vec![25.0], ..zones(64.0) });
        row("64 GiB, hosts 10 and 25", &Plan { hosts: vec![10.0, 25.0], ..zones(64.0) });
        row("64 GiB, hosts 1, 10, 25", &Plan { hosts: vec![10.0, 25.0, 1.0], ..zones(64.0) });
        row("8 GiB", &zones(8.0));
        row("1 GiB", &zones(1.0));
        row("64 GiB, 1 in 100 slow", &Plan { slow_part: 100, ..zones(64.0) });
        row("64 GiB, 1 in 10 late", &Plan { late_part: 10, ..zones(64.0) });
        row("64 GiB, 1 in 100 dies", &Plan { dead_part: 100, ..zones(64.0) });
    }
}

fn row(text: &str, plan: &Plan) {
    let (ratio, outcome) = ratio(plan);
    println!("| {text} | {:?} | {:.1} s | {ratio:.2} | {outcome} |", plan.shape, alone(plan));
}
