//! Fleet: sixty-four servers whose switch fails three times a minute, two sources of which one dies, and a bucket that
//! is slow.
//!
//! ```text
//!   primary ══ stream, once for each source ══▶ source, standby ══ slots ══▶ 64 agents ── behind one switch
//!      ║                                           ▲ bases from the bucket
//!      ╚══ partial resynchronisations ═════════════╬═══════════════════════▶ their servers
//! ```
//!
//! What decides is the product's: the machines of both sources with their turns, what a standby copies, the readers'
//! addresses and every pause. Servers are a few numbers each, so that minutes of a whole fleet are played in a second;
//! the schedules of [`super::plan`] have the servers' insides.
//!
//! What must hold: the primary forks never; it sends its stream once to each source; replicas take turns, at most
//! [`AT_ONCE`] of one zone at a time, in the order in which those of a zone asked; one that needs no turn never waits
//! for one; a free turn is given, whatever the servers of other zones do; each is told its place within its zone; no
//! crowd comes back at once; and all are in step soon after the last fault.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_base::mutation::Mutation;
use remora_base::pace::{Backoff, Random};
use remora_protocol::{Announce, Offer, Phase};
use remora_reader::addresses::Addresses;
use remora_redis::ReplId;
use remora_server::{Facts, HostPort};
use remora_source::machine::{Action, Event, Format, Machine, Report, Resume, Rules, Session};
use remora_source::parts::{CaptureError, CaptureEvent, Copies, Here, Reading, plan_of, reaches};

/// Servers behind the switch.
const SERVERS: usize = 64;

/// Replicas of a zone that load at the same time.
const AT_ONCE: u32 = 2;

/// The zones, in which the servers stand by turns; those of the second one load slowly, and the last one has no name.
const ZONES: [&str; 3] = ["east", "slow", ""];
const SLOWER: u64 = 4;

/// One step of the model.
const TICK: Duration = Duration::from_millis(100);

/// Bytes of stream in a step, and those that the primary's backlog holds: of eight seconds.
const BYTES: u64 = 100_000;
const BACKLOG: u64 = 80 * BYTES;

/// Slots of a snapshot, of which a reader takes one in a step; and the steps that a server loads after the last one.
const SLOTS: u64 = 60;
const SLOT: u32 = 1 << 20;
const LOAD_STEPS: u64 = 30;

/// How long the switch fails, from flap to flap, and how many times.
const FLAP_EVERY: Duration = Duration::from_secs(20);
const FLAPS: u32 = 9;

/// How old a snapshot is offered, and how long one that takes nothing keeps its turn.
const MAX_AGE: Duration = Duration::from_secs(60);
const STALL: Duration = Duration::from_secs(15);

/// How long an agent tries to reach a source before its server takes a full copy of its primary.
const RETRY_FOR: Duration = Duration::from_secs(60);

/// How long a standby waits for the first one, as by default.
const FORK_AFTER: Duration = Duration::from_secs(30);

/// How soon all are in step: as many turns as there are servers, each of a slow reader, after the slowest base.
const IN_STEP_WITHIN: Duration = Duration::from_secs(700);

/// The most agents that ask in one step, of those whose link was away for longer than this: a third.
const CROWD: usize = SERVERS / 3;
const SPREAD_AFTER: Duration = Duration::from_secs(6);

/// A free turn is given within this time.
const GIVEN_WITHIN: Duration = Duration::from_secs(1);

/// What came of a storm.
#[derive(Clone, Debug, Default)]
pub struct Storm {
    /// What did not hold.
    pub finding: Option<String>,
    /// Full copies that the primary has served.
    pub forks: u64,
    /// Snapshots that the sources have made of the bucket's base.
    pub bases: u64,
    /// Streams that the primary has sent, and their bytes; and those of partial resynchronisations.
    pub streams: u64,
    /// See `streams`.
    pub stream_bytes: u64,
    /// See `streams`.
    pub partial_bytes: u64,
    /// Servers that were continued by the primary, and by a source at their slot or their byte.
    pub partial: u64,
    /// See `partial`.
    pub resumed: u64,
    /// Turns that were taken.
    pub turns: u64,
    /// The longest time from a server's question to its turn, in seconds.
    pub longest_wait: u64,
    /// When all were in step, in seconds.
    pub in_step: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// It follows the primary.
    Follows,
    /// It has no link; the next attempt is due then.
    Away { next: Duration },
    /// Its agent has a session with this source.
    Joined { source: usize, session: Session },
}

struct Server {
    zone: &'static str,
    way: Way,
    offset: u64,
    backoff: Backoff,
    addresses: Addresses,
    /// The snapshot of which it has slots, those slots, and the steps that it has loaded since the last one.
    generation: u64,
    slots: u64,
    load: u64,
    has_loaded: bool,
    /// It was offered a snapshot in this session.
    reads: bool,
    /// When it first asked this run of a source for data, as one that waits; and when it last moved.
    asked: Option<(u64, Duration)>,
    moved: Duration,
    /// When it lost its link or its session.
    left: Duration,
    /// It was offered a snapshot since it followed the primary last: its place may be that of an earlier question.
    was_offered: bool,
    unreached: Option<Duration>,
    /// It takes nothing, and keeps its connection, until then.
    hangs: Option<Duration>,
    has_turn: bool,
}

struct Capture {
    generation: u64,
    with_stream: bool,
    began: Duration,
    lasts: Duration,
    offset: u64,
    /// The generation is another source's, which is copied.
    copies: bool,
}

struct Source {
    machine: Machine,
    copies: Copies<Offered>,
    run: u64,
    is_alive: bool,
    capture: Option<Capture>,
    published: u64,
    is_sealed: bool,
    journal_first: u64,
    streams: u64,
    /// Whose session, and the place by its first question.
    sessions: BTreeMap<Session, usize>,
    /// The standby's own session here.
    standby: Option<Session>,
    next_session: Session,
    /// Since when a turn of a zone is free.
    free_since: BTreeMap<&'static str, Duration>,
}

struct Offered(Offer);

impl AsRef<Offer> for Offered {
    fn as_ref(&self) -> &Offer {
        &self.0
    }
}

struct Fleet {
    now: Duration,
    epoch: Instant,
    draw: Random,
    offset: u64,
    servers: Vec<Server>,
    sources: [Source; 2],
    runs: u64,
    bucket: Duration,
    is_down: bool,
    outcome: Storm,
    asked_in_step: usize,
}

const PORTS: [u16; 2] = [7379, 7380];

/// Plays a storm.
pub fn storm(seed: u64, mutation: Option<Mutation>) -> Storm {
    Mutation::set(mutation);
    let outcome = Fleet::new(seed).run();
    Mutation::set(None);
    outcome
}

impl Fleet {
    fn new(seed: u64) -> Fleet {
        let mut draw = Random::seeded(seed);
        let epoch = Instant::now() + Duration::from_secs(3600);
        let servers = (0..SERVERS)
            .map(|number| Server {
                zone: ZONES[number % ZONES.len()],
                way: Way::Follows,
                offset: 0,
                backoff: Backoff::seeded(draw.draw()),
                addresses: listed(),
                generation: 0,
                slots: 0,
                load: 0,
                has_loaded: false,
                reads: false,
                asked: None,
                moved: Duration::ZERO,
                left: Duration::ZERO,
                was_offered: false,
                unreached: None,
                hangs: None,
                has_turn: false,
            })
            .collect();
        let bucket = Duration::from_secs(20 + draw.draw() % 40);
        let sources = [0, 1].map(|place| Source::start(epoch, Duration::ZERO, place, place as u64 + 1, draw.draw()));
        let (now, offset) = (Duration::ZERO, BACKLOG);
        let outcome = Storm::default();
        Fleet { now, epoch, draw, offset, servers, sources, runs: 2, bucket, is_down: false, outcome, asked_in_step: 0 }
    }

    fn run(mut self) -> Storm {
        let long = |draw: &mut Random| draw.draw().is_multiple_of(2);
        let mut flaps = Vec::new();
        for number in 0..FLAPS {
            let at = FLAP_EVERY * number + Duration::from_millis(self.draw.draw() % 5000) + Duration::from_secs(2);
            // A long one outlasts the backlog.
            let lasts = if number == 0 || long(&mut self.draw) {
                9000 + self.draw.draw() % 3000
            } else {
                1000 + self.draw.draw() % 3000
            };
            flaps.push((at, at + Duration::from_millis(lasts)));
        }
        let dies = Duration::from_secs(60 + self.draw.draw() % 100);
        let returns = dies + Duration::from_secs(30 + self.draw.draw() % 200);
        let last = FLAP_EVERY * FLAPS;
        let limit = last.max(returns) + IN_STEP_WITHIN;
        let (mut has_died, mut is_back) = (false, false);
        while self.outcome.finding.is_none() {
            self.now += TICK;
            self.offset += BYTES;
            let was_down = self.is_down;
            self.is_down = flaps.iter().any(|&(from, to)| (from..to).contains(&self.now));
            if self.is_down && !was_down {
                self.switch_fails();
            }
            if self.now >= dies && !std::mem::replace(&mut has_died, true) {
                self.source_dies(0);
            }
            if self.now >= returns && !std::mem::replace(&mut is_back, true) {
                self.runs += 1;
                self.sources[0] = Source::start(self.epoch, self.now, 0, self.runs, self.draw.draw());
            }
            self.asked_in_step = 0;
            for number in 0..SERVERS {
                self.step(number);
            }
            (0..2).for_each(|place| self.source(place));
            if self.asked_in_step > CROWD {
                self.found(format!("{} agents ask in {TICK:?}", self.asked_in_step));
            }
            let follows = |server: &Server| server.way == Way::Follows;
            if self.now > last && is_back && self.servers.iter().all(follows) {
                self.outcome.in_step = self.now.as_secs();
                break;
            }
            if self.now > limit {
                let away = self.servers.iter().filter(|server| !follows(server)).count();
                self.found(format!("{away} servers are not in step at {limit:?}"));
            }
        }
        self.account();
        self.outcome
    }

    /// What the storm has cost the primary.
    fn account(&mut self) {
        let (forks, bases) = (self.outcome.forks, self.outcome.bases);
        if forks > 0 {
            self.found(format!("the primary has served {forks} full copies"));
        }
        // One for each life of a source, and one for each time that a snapshot has grown too old.
        let most = 3 + self.now.as_secs() / MAX_AGE.as_secs() * 2;
        if bases > most {
            self.found(format!("the bucket's base was fetched {bases} times, and {most} are enough"));
        }
    }

    fn found(&mut self, text: String) {
        let now = self.now;
        self.outcome.finding.get_or_insert_with(|| format!("at {now:?}: {text}"));
    }

    // ---- faults ----

    fn switch_fails(&mut self) {
        for number in 0..SERVERS {
            match self.servers[number].way {
                Way::Follows => self.leave(number),
                Way::Away { .. } => {}
                Way::Joined { source, session } => {
                    self.sources[source].sessions.remove(&session);
                    self.leave(number);
                    self.tell(source, Event::Gone { session, done: false });
                }
            }
        }
    }

    /// It has lost its link, and tries again.
    fn leave(&mut self, number: usize) {
        let (now, server) = (self.now, &mut self.servers[number]);
        if server.reads && server.slots == 0 {
            // It has had its turn. With slots it keeps its place for the rest of them.
            server.asked = None;
        }
        (server.reads, server.has_turn, server.hangs) = (false, false, None);
        server.left = now;
        server.way = Way::Away { next: now + server.backoff.next() };
    }

    fn source_dies(&mut self, place: usize) {
        let sessions = std::mem::take(&mut self.sources[place].sessions);
        self.sources[place].is_alive = false;
        self.sources[place].streams = 0;
        let standby = self.sources[1 - place].copies.copying().map(|copying| copying.0.generation);
        self.sources[1 - place].copies.away("it has died".to_owned());
        sessions.into_values().for_each(|number| self.leave(number));
        if let Some(generation) = standby {
            self.sources[1 - place].capture = None;
            let error = CaptureError::First("its conversation has ended".into());
            self.captured(1 - place, CaptureEvent::Failed { generation, error });
        }
        // Its own session at the other one.
        if let Some(session) = self.sources[1 - place].standby.take() {
            self.tell(1 - place, Event::Gone { session, done: false });
        }
    }

    // ---- servers ----

    fn step(&mut self, number: usize) {
        match self.servers[number].way {
            Way::Follows => self.servers[number].offset = self.offset,
            Way::Away { next } if next <= self.now => self.attempt(number),
            Way::Away { .. } => {}
            Way::Joined { source, session } => self.reads(number, source, session),
        }
    }

    fn attempt(&mut self, number: usize) {
        let (now, first_kept) = (self.now, self.offset - BACKLOG);
        let server = &mut self.servers[number];
        if self.is_down {
            server.way = Way::Away { next: now + server.backoff.next() };
            return;
        }
        // What is in the middle of loading holds no data that a primary could continue.
        let has_data = server.has_loaded || server.slots == 0;
        if has_data && server.offset >= first_kept {
            self.outcome.partial += 1;
            return self.follows(number);
        }
        let mut round = server.addresses.round::<String>();
        let place = loop {
            let place = usize::from(round.at().port != PORTS[0]);
            let attempt = if self.sources[place].is_alive { Ok(place) } else { Err("away".to_owned()) };
            if let Some(done) = round.outcome(attempt, |_| true) {
                break done;
            }
        };
        let Ok(source) = place else {
            let since = *server.unreached.get_or_insert(now);
            if now - since > RETRY_FOR {
                self.outcome.forks += 1;
                return self.follows(number);
            }
            server.way = Way::Away { next: now + server.backoff.next() };
            return;
        };
        // Those that have lost a session only come at once.
        self.asked_in_step += usize::from(now - server.left > SPREAD_AFTER);
        server.unreached = None;
        server.backoff.reset();
        let run = self.sources[source].run;
        server.asked = server.asked.filter(|&(asked, _)| asked == run).or(Some((run, now)));
        server.moved = now;
        let next = server.offset + 1;
        let held = Resume {
            generation: server.generation,
            held_slots: server.slots,
            loaded: server.has_loaded.then(|| (replid(), next)),
        };
        let resume = (server.slots > 0).then_some(held);
        let to = &mut self.sources[source];
        to.next_session += 1;
        let session = to.next_session;
        to.sessions.insert(session, number);
        self.servers[number].way = Way::Joined { source, session };
        let (name, address, reads) = (format!("server {number}"), String::new(), Format::Own);
        let zone = self.servers[number].zone.to_owned();
        self.tell(source, Event::Joined { session, name, address, zone, resume, reads });
    }

    /// The primary continues it.
    fn follows(&mut self, number: usize) {
        let server = &mut self.servers[number];
        self.outcome.partial_bytes += self.offset.saturating_sub(server.offset);
        (server.way, server.offset) = (Way::Follows, self.offset);
        (server.slots, server.load, server.has_loaded, server.reads) = (0, 0, false, false);
        (server.asked, server.has_turn, server.hangs, server.unreached) = (None, false, None, None);
        server.was_offered = false;
        server.backoff.reset();
        server.addresses = server.addresses.from_the_first();
    }

    fn reads(&mut self, number: usize, source: usize, session: Session) {
        let (now, from) = (self.now, &self.sources[source]);
        let server = &mut self.servers[number];
        if !server.reads || server.hangs.is_some_and(|until| now < until) {
            return;
        }
        if server.hangs.is_some() {
            // Its machine was switched off, and the connection has ended at last.
            self.sources[source].sessions.remove(&session);
            self.leave(number);
            return self.tell(source, Event::Gone { session, done: false });
        }
        let phase = if server.has_loaded {
            server.offset = (server.offset + 20 * BYTES).min(self.offset);
            Phase::CatchUp
        } else if server.slots < SLOTS {
            if server.slots < from.published {
                (server.slots, server.moved) = (server.slots + 1, now);
            }
            Phase::Transfer
        } else {
            server.load += 1;
            server.has_loaded = server.load > LOAD_STEPS * if server.zone == "slow" { SLOWER } else { 1 };
            Phase::Load
        };
        if server.has_loaded {
            server.has_turn = false;
        }
        let report = Report {
            phase,
            transport: None,
            slots_below: server.slots,
            slots_held: server.slots,
            bytes: 0,
            applied_offset: server.offset,
        };
        let is_done = phase == Phase::CatchUp && server.offset + BACKLOG / 2 > self.offset;
        self.tell(source, Event::Progress { session, at: report });
        if is_done && !self.is_down && self.servers[number].reads {
            self.sources[source].sessions.remove(&session);
            self.follows(number);
            self.tell(source, Event::Gone { session, done: true });
        }
    }

    // ---- sources ----

    fn tell(&mut self, place: usize, event: Event) {
        let (now, source) = (self.epoch + self.now, &mut self.sources[place]);
        if !source.is_alive {
            return;
        }
        let reading = Reading {
            published: source.published,
            journal_first: source.journal_first,
            journal_end: self.offset,
            ..Reading::default()
        };
        for action in source.machine.apply(now, reading, event) {
            self.perform(place, action);
        }
    }

    fn perform(&mut self, place: usize, action: Action) {
        match action {
            Action::Capture { generation, with_stream, .. } => {
                let source = &mut self.sources[place];
                let copied = source.copies.copying().filter(|copying| copying.0.generation == generation);
                let (offset, lasts) = match copied {
                    Some(copying) => (copying.0.offset, Duration::from_secs(8)),
                    None => (self.offset, self.bucket),
                };
                let copies = copied.is_some();
                self.outcome.bases += u64::from(!copies);
                source.streams += u64::from(with_stream);
                self.outcome.streams += u64::from(with_stream);
                (source.published, source.is_sealed) = (0, false);
                source.capture = Some(Capture { generation, with_stream, began: self.now, lasts, offset, copies });
                if source.streams > 1 {
                    let streams = source.streams;
                    self.found(format!("the primary sends source {place} its stream {streams} times"));
                }
            }
            Action::Offer { session } => self.offered(place, session),
            Action::GenerationGone { session, .. } => {
                if let Some(&number) = self.sources[place].sessions.get(&session) {
                    let server = &mut self.servers[number];
                    (server.reads, server.has_turn) = (false, false);
                    (server.slots, server.load) = if server.has_loaded { (server.slots, server.load) } else { (0, 0) };
                }
            }
            Action::Drop { session, .. } => {
                if let Some(number) = self.sources[place].sessions.remove(&session) {
                    let server = &mut self.servers[number];
                    // What it has is of no use to any source.
                    (server.slots, server.load, server.has_loaded) = (0, 0, false);
                    self.leave(number);
                }
            }
            Action::EndStream { .. } => self.sources[place].streams = 0,
            Action::StopCapture { .. } => self.sources[place].capture = None,
            Action::Wait { .. } | Action::RevokeSnapshot { .. } | Action::AllowRetiring { .. } => {}
        }
    }

    fn offered(&mut self, place: usize, session: Session) {
        let now = self.now;
        if self.sources[place].standby == Some(session) {
            let status = self.sources[place].machine.status();
            let Some(origin) = status.snapshot.and_then(|snapshot| snapshot.origin()) else { return };
            let offered = Arc::new(Offered(self.offer(origin.generation, origin.offset)));
            return self.sources[1 - place].copies.offered(offered);
        }
        let Some(&number) = self.sources[place].sessions.get(&session) else { return };
        let generation = self.sources[place].machine.status().generation().unwrap_or_default();
        let is_fresh = {
            let server = &self.servers[number];
            !(server.has_loaded || server.slots > 0 && server.generation == generation)
        };
        if is_fresh {
            self.check_turn(place, number);
        } else {
            self.outcome.resumed += 1;
        }
        let server = &mut self.servers[number];
        if is_fresh {
            (server.slots, server.load, server.has_turn) = (0, 0, true);
            // One in a while is switched off in the middle.
            server.hangs = self.draw.draw().is_multiple_of(12).then_some(now + Duration::from_secs(40));
            self.outcome.turns += 1;
            let asked = server.asked.map_or(now, |(_, asked)| asked);
            self.outcome.longest_wait = self.outcome.longest_wait.max((now - asked).as_secs());
            let status = self.sources[place].machine.status();
            server.offset = status.snapshot.and_then(|snapshot| snapshot.origin()).map_or(0, |origin| origin.offset);
        }
        (server.generation, server.reads, server.moved) = (generation, true, now);
        server.was_offered = true;
        self.sources[place].free_since.remove(self.servers[number].zone);
    }

    fn offer(&self, generation: u64, offset: u64) -> Offer {
        let primary = Announce { host: String::new(), port: 0, tls: false, source_sees_as: String::new() };
        let plan = plan_of(&facts(), primary, 0, 0);
        let mut snapshot = plan.snapshot.clone();
        (snapshot.generation, snapshot.slot_size) = (generation, SLOT);
        (snapshot.slots, snapshot.retained) = (SLOTS as u32, true);
        Offer { generation, offset, snapshot, ..plan }
    }

    /// The servers of a zone at this source whose turn runs.
    fn loading(&self, place: usize, zone: &'static str) -> impl Iterator<Item = &Server> {
        let of_it = self.sources[place].sessions.values().map(|&number| &self.servers[number]);
        of_it.filter(move |server| {
            server.zone == zone
                && server.reads
                && !server.has_loaded
                && (server.slots == SLOTS || self.now.saturating_sub(server.moved) <= STALL)
        })
    }

    /// The servers at this source that wait for a turn.
    fn waiting(&self, place: usize) -> impl Iterator<Item = (usize, &Server)> {
        let of_it = self.sources[place].sessions.values().map(|&number| (number, &self.servers[number]));
        of_it.filter(|(_, server)| !server.reads)
    }

    /// A server is offered a snapshot from its beginning.
    fn check_turn(&mut self, place: usize, number: usize) {
        let zone = self.servers[number].zone;
        let others = self.loading(place, zone).count();
        if others >= AT_ONCE as usize {
            return self.found(format!("{others} replicas of {zone:?} load at source {place} when another begins"));
        }
        // The same switch has put them back together, in another order: that of a moment counts for nothing.
        let Server { asked: Some((_, asked)), was_offered: false, .. } = self.servers[number] else { return };
        let earlier = |(_, server): &(usize, &Server)| {
            server.zone == zone
                && !server.was_offered
                && server.asked.is_some_and(|(_, first)| first + FLAP_EVERY < asked)
        };
        let before =
            self.waiting(place).find(earlier).map(|(other, server)| (other, server.asked.map(|(_, first)| first)));
        if let Some((other, first)) = before {
            self.found(format!(
                "server {number}, which asked at {asked:?}, is served before {other}, which asked at {first:?}"
            ));
        }
    }

    fn source(&mut self, place: usize) {
        if !self.sources[place].is_alive {
            return;
        }
        if self.sources[place].streams > 0 {
            self.outcome.stream_bytes += BYTES * self.sources[place].streams;
        }
        self.go_on_with_the_capture(place);
        if self.now.as_millis().is_multiple_of(500) {
            self.tell(place, Event::Tick);
            self.stand_by(place);
        }
        self.check_waiting(place);
    }

    /// Each copies the other one's snapshots.
    fn stand_by(&mut self, place: usize) {
        if self.sources[1 - place].is_alive && self.sources[1 - place].standby.is_none() {
            let other = &mut self.sources[1 - place];
            other.next_session += 1;
            let session = other.next_session;
            other.standby = Some(session);
            let (name, address) = (format!("standby {place}"), String::new());
            self.tell(1 - place, Event::StandbyJoined { session, name, address });
        }
        let here = Here {
            server: String::new(),
            replid: Some(replid()),
            is_sealed: false,
            compresses: false,
            room: Ok(u64::from(SLOT) * SLOTS * 2),
            is_preparing: false,
        };
        let source = &mut self.sources[place];
        let begins = source.copies.look(&source.machine, &here);
        let copies = source.copies.copying().map(|copying| copying.0.generation);
        if let Some(generation) = begins {
            self.tell(place, Event::Copied { generation });
        }
        // Reports as the standby's task does.
        if let Some(session) = self.sources[1 - place].standby {
            let (status, published) = (self.sources[1 - place].machine.status(), self.sources[place].published);
            let Some(generation) = status.offered(session) else { return };
            let phase = if copies == Some(generation) { Phase::Transfer } else { Phase::Stay };
            let at = Report {
                phase,
                transport: None,
                slots_below: published,
                slots_held: published,
                bytes: 0,
                applied_offset: 0,
            };
            self.tell(1 - place, Event::Progress { session, at });
        }
    }

    fn captured(&mut self, place: usize, event: CaptureEvent) {
        let _ = self.sources[place].copies.ended(&event);
        self.tell(place, Event::Capture(event));
    }

    fn go_on_with_the_capture(&mut self, place: usize) {
        let Some(capture) = &self.sources[place].capture else { return };
        let (generation, offset, copies) = (capture.generation, capture.offset, capture.copies);
        let passed = self.now - capture.began;
        if passed == TICK {
            if capture.with_stream {
                self.sources[place].journal_first = offset + 1;
            } else if copies && let Err(why) = reaches(self.sources[place].journal_first, offset) {
                self.sources[place].capture = None;
                let error = CaptureError::First(why);
                return self.captured(place, CaptureEvent::Failed { generation, error });
            }
            return self.captured(place, CaptureEvent::Started { generation, replid: replid(), offset });
        }
        let there = if copies { self.sources[1 - place].published } else { SLOTS };
        let slots = (SLOTS as f64 * passed.as_secs_f64() / capture.lasts.as_secs_f64()) as u64;
        let published = slots.min(there).min(SLOTS);
        self.sources[place].published = published;
        if published == SLOTS {
            (self.sources[place].capture, self.sources[place].is_sealed) = (None, true);
            self.captured(place, CaptureEvent::Completed { generation, bytes: SLOTS });
        }
    }

    /// Nobody waits for a turn without need.
    fn check_waiting(&mut self, place: usize) {
        let now = self.now;
        let status = self.sources[place].machine.status();
        let Some(snapshot) = status.snapshot.filter(|snapshot| snapshot.is_sealed() && status.stream.is_some()) else {
            self.sources[place].free_since.clear();
            return;
        };
        let (generation, is_young) = (snapshot.generation, self.epoch + now - MAX_AGE < snapshot.taken());
        let needs_none =
            |(_, server): &(usize, &Server)| server.has_loaded || (server.slots > 0 && server.generation == generation);
        let is_late = |(_, server): &(usize, &Server)| now - server.moved > GIVEN_WITHIN;
        let late = self.waiting(place).find(|waits| needs_none(waits) && is_late(waits)).map(|(number, _)| number);
        if let Some(number) = late {
            return self.found(format!("server {number} waits at source {place}, though it needs no turn"));
        }
        for zone in ZONES {
            let (waiting, next) = self.told_in(place, zone);
            if waiting > 0 && next != 1 {
                return self.found(format!("{next} of {waiting} that wait in {zone:?} are told that they are next"));
            }
            let waits = self.waiting(place).any(|(_, server)| server.zone == zone);
            let has_free = waits && self.loading(place, zone).count() < AT_ONCE as usize && is_young;
            let since = &mut self.sources[place].free_since;
            if !has_free {
                since.remove(zone);
            } else if now - *since.entry(zone).or_insert(now) > GIVEN_WITHIN {
                self.found(format!(
                    "a turn of {zone:?} at source {place} is free for {GIVEN_WITHIN:?}, and servers wait"
                ));
            }
        }
    }
}

impl Fleet {
    /// How many replicas of a zone were told that they wait for a turn, and how many of them that they are next.
    fn told_in(&self, place: usize, zone: &str) -> (usize, usize) {
        let replicas = self.sources[place].machine.status().replicas.values().filter(|replica| replica.zone == zone);
        let told = replicas.filter_map(|replica| replica.waits_because()).filter(|why| why.contains("(--at-once)"));
        told.fold((0, 0), |(waiting, next), why| (waiting + 1, next + usize::from(why.contains("this one is next"))))
    }
}

impl Source {
    fn start(epoch: Instant, now: Duration, place: usize, run: u64, seed: u64) -> Source {
        let rules = Rules {
            max_age: MAX_AGE,
            max_replicas: 2 * SERVERS,
            stall_limit: STALL,
            fork_interval: Duration::ZERO,
            slot_bytes: u64::from(SLOT),
            repeat_messages: Duration::ZERO,
            at_once: NonZeroU32::new(AT_ONCE),
            standby: (place == 1 || run > 2).then_some(FORK_AFTER),
        };
        Source {
            machine: Machine::new(epoch + now, rules, Backoff::seeded(seed), run * 100_000, false),
            copies: Copies::of(HostPort { host: "source".into(), port: PORTS[1 - place] }),
            run,
            is_alive: true,
            capture: None,
            published: 0,
            is_sealed: false,
            journal_first: u64::MAX,
            streams: 0,
            sessions: BTreeMap::new(),
            standby: None,
            next_session: 0,
            free_since: BTreeMap::new(),
        }
    }
}

fn listed() -> Addresses {
    let [first, second] = PORTS;
    format!("source:{first},source:{second}").parse().unwrap_or_else(|_| unreachable!("they are addresses"))
}

fn replid() -> ReplId {
    "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b".parse().unwrap_or_else(|_| unreachable!("it has forty digits"))
}

fn facts() -> Facts {
    Facts { replid: Some(replid()), ..Facts::from_info(&remora_redis::info::Info::parse(b"")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Storms that are played by `make test`, and by `make test-all`.
    const STORMS: u64 = 8;
    const MORE_STORMS: u64 = 200;

    fn play(storms: u64) {
        for seed in 0..storms {
            let storm = storm(seed, None);
            println!("{seed}: {storm:?}");
            assert_eq!(storm.finding, None, "seed {seed}: {storm:?}");
        }
    }

    #[test]
    fn a_storm_costs_the_primary_no_fork_and_one_stream_for_each_source() {
        play(STORMS);
    }

    #[test]
    #[ignore = "long: make test-all"]
    fn many_more_storms_cost_no_more() {
        play(MORE_STORMS);
    }

    /// A storm finds a fault that is put back.
    fn is_found(mutation: Mutation, as_what: &str) {
        let findings = (0..STORMS).filter_map(|seed| storm(seed, Some(mutation)).finding);
        let findings: Vec<String> = findings.collect();
        assert!(findings.iter().any(|finding| finding.contains(as_what)), "{mutation:?}: {findings:#?}");
    }

    #[test]
    fn faults_of_turns_are_found() {
        is_found(Mutation::TurnsUncounted, "when another begins");
        is_found(Mutation::TurnForAll, "though it needs no turn");
        is_found(Mutation::StalledTurnKept, "is free for");
        is_found(Mutation::TurnKept, "is free for");
        is_found(Mutation::PlaceLost, "is served before");
        is_found(Mutation::StandbyTakesTurn, "is free for");
    }

    #[test]
    fn faults_of_zones_are_found() {
        is_found(Mutation::ZonesShareTurns, "are told that they are next");
        is_found(Mutation::ZoneHeldUp, "is free for");
        is_found(Mutation::ZonelessTakeNoTurn, "replicas of \"\" load");
        is_found(Mutation::LastComesFirst, "is served before");
    }

    #[test]
    fn faults_of_a_storm_are_found() {
        is_found(Mutation::NoJitter, "agents ask in");
        is_found(Mutation::SnapshotNotShared, "");
        is_found(Mutation::StreamForEach, "its stream");
        is_found(Mutation::OneSourceTried, "full copies");
    }
}
