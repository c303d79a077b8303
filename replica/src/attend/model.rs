//! Attended: a server that `remora attend` stays beside, through two minutes of faults, in the model's time.
//!
//! ```text
//!   seed ──▶ World: two primaries, the server, the gate, sources ◀── actions ── Attendance: the product's
//!                └── arrivals, looks, ends of syncs and of passages ── events ─────▶┘
//! ```
//!
//! The product's parts are what decides: [`Attendance`], which source is fit, and whether a primary covers the server.
//! Connections are events with delays, a data set is a history and an offset, and a primary writes at a steady rate.
//!
//! What must hold: see [`World::check`] and [`World::at_the_end`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use remora_fabric::sim::Random;
use remora_protocol::Announce;
use remora_redis::ReplId;

use crate::attend::attendance::{Action, Asks, Attendance, End, Event, LinkState, Rules, Why};
use crate::attend::guide::{ASTRAY_LIMIT, Group};
use crate::attend::syncs::{Fit, Needs};
use remora_server::{Backlog, Facts, HostPort, Link, ServerUrl};
use remora_source::parts::plan_of;

/// The faults end then, and the run a while later. In milliseconds of the model, as all times here.
const FAULTS_UNTIL: u64 = 120_000;
const RUNS_UNTIL: u64 = FAULTS_UNTIL + 180_000;

/// How often the agent looks at the server.
const LOOK_EVERY: u64 = 200;
/// How often it looks for a primary that was replaced.
const GUIDE_EVERY: u64 = 1000;
/// The server connects again so often.
const CONNECT_EVERY: u64 = 1000;
/// A connection to a primary that is away ends after that.
const SILENCE: u64 = 5000;
/// A sync whose server does not come to its primary in time has failed.
const HAND_OFF_LIMIT: u64 = 30_000;
/// A connection's end, a changed rate and a fail-over excuse a full copy for so long.
const EXCUSED_FOR: u64 = 5000;
/// How long the server's connections may go past an agent that serves no sync: the product's limit, and a few looks.
const DIRECT_FOR: u64 = 35_000;
/// A sync from a source that stands still gives up.
const STILL_LIMIT: u64 = 40_000;

/// A way from the server to a primary.
#[derive(Clone, Copy, Debug)]
struct Connection {
    id: u64,
    /// Which primary the server has asked.
    to: usize,
    through_the_agent: bool,
    stage: Stage,
    /// A full copy by this connection is nobody's fault, since the agent has said why.
    is_excused: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It has asked, or is about to.
    Asks,
    /// The primary sends a full copy.
    Copies,
    /// Up since then, when the server had executed this offset.
    Up { since: u64, offset: u64 },
    /// A sync of the agent has it.
    Given,
}

struct Primary {
    history: u8,
    former: Option<(u8, u64)>,
    /// The offset at this time, and what is written since.
    offset: (u64, u64),
    rate: u64,
    backlog: u64,
    is_there: bool,
    /// The stream behind this offset is kept for a server on its way.
    pinned: Option<u64>,
}

impl Primary {
    fn offset(&self, now: u64) -> u64 {
        self.offset.1 + self.rate * now.saturating_sub(self.offset.0) / 1000
    }

    fn first(&self, now: u64) -> u64 {
        let first = (self.offset(now) + 1).saturating_sub(self.backlog).max(1);
        self.pinned.map_or(first, |pinned| first.min(pinned))
    }

    fn facts(&self, now: u64) -> Facts {
        let (offset, first) = (self.offset(now), self.first(now));
        let backlog = Backlog { active: true, size: self.backlog, first, held: offset + 1 - first };
        Facts {
            replid: Some(replid(self.history)),
            former: self.former.map(|(history, end)| (replid(history), end)),
            offset: Some(offset),
            backlog: Some(backlog),
            ..Facts::default()
        }
    }

    fn continues(&self, now: u64, (history, offset): (u8, u64)) -> bool {
        let is_known = history == self.history || self.former.is_some_and(|(was, end)| was == history && offset < end);
        is_known && offset + 1 >= self.first(now) && offset <= self.offset(now)
    }
}

fn replid(history: u8) -> ReplId {
    // The digits of a history that is not zero are always a replid.
    format!("{history:040x}").parse().unwrap_or_else(|_| unreachable!())
}

/// Where a primary is.
fn address(number: usize) -> HostPort {
    HostPort { host: format!("127.0.0.{}", 1 + number), port: 6379 }
}

/// What a source gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceKind {
    Good,
    /// It is beside a server that waits for the attended one.
    StandsStill,
    Away,
}

#[derive(Clone, Copy, Debug)]
struct Sync {
    id: u64,
    of: u8,
    stands_still: bool,
    is_told_to_end: bool,
    /// The server was sent to its primary at this time.
    handed_over: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
enum Happens {
    Connects,
    /// A server does not wait once its link has ended.
    ConnectsAtOnce,
    Asks(u64),
    AsksThePrimary(u64),
    CopyEnds(u64),
    Cut(u64),
    Looks,
    Guides,
    SyncCatchesUp(u64),
    SyncFails(u64),
    SyncEnds(u64, bool),
    Fault,
    HandsOver(u64),
}

/// A run, and what it found.
pub(super) struct World {
    draw: Random,
    began: Instant,
    /// Where the server is.
    url: Option<ServerUrl>,
    now: u64,
    next: u64,
    queue: BTreeMap<(u64, u64), Happens>,
    primaries: [Primary; 2],
    follows: usize,
    /// What the Sentinels say.
    group: Group,
    /// The server was seen by its primary itself, which lists it in its `INFO`.
    is_known: bool,
    astray_since: Option<u64>,
    /// The history and the offset that the server holds, without what its link has brought since.
    holds: (u8, u64),
    connection: Option<Connection>,
    gate_is_open: bool,
    closed_since: Option<u64>,
    attendance: Attendance,
    sync: Option<Sync>,
    kept: Option<u64>,
    noted: Option<u64>,
    /// Passed on, and not ended yet.
    passages: BTreeSet<u64>,
    sources: Vec<SourceKind>,
    excused_until: u64,
    pub(super) counts: BTreeMap<&'static str, u64>,
    pub(super) finding: Option<String>,
    pub(super) log: Vec<String>,
}

/// Plays the schedule of a seed.
pub(super) fn play(seed: u64) -> World {
    let mut world = World::new(seed);
    while world.finding.is_none() {
        let Some((&at, &happens)) = world.queue.first_key_value() else { break };
        world.queue.remove(&at);
        if at.0 > RUNS_UNTIL {
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
        let began = Instant::now();
        let mut primary = |history| Primary {
            history,
            former: None,
            offset: (0, 1 + draw.below(1_000_000)),
            rate: draw.below(20_000),
            backlog: 16_384 << draw.below(4),
            is_there: true,
            pinned: None,
        };
        let primaries = [primary(1), primary(2)];
        let sources = (0..1 + draw.below(3)).map(|_| source(&mut draw)).collect();
        let mut world = World {
            draw,
            began,
            url: "redis://127.0.0.3:6379".parse().ok(),
            now: 0,
            next: 0,
            queue: BTreeMap::new(),
            primaries,
            follows: 0,
            group: Group { primary: address(0), replicas: Vec::new(), former: Vec::new() },
            is_known: false,
            astray_since: None,
            holds: (3, 0),
            connection: None,
            gate_is_open: true,
            closed_since: None,
            attendance: Attendance::new(began, Rules::Stay),
            sync: None,
            kept: None,
            noted: None,
            passages: BTreeSet::new(),
            sources,
            excused_until: 0,
            counts: BTreeMap::new(),
            finding: None,
            log: Vec::new(),
        };
        world.after(0, Happens::Connects);
        world.after(LOOK_EVERY, Happens::Looks);
        world.after(GUIDE_EVERY, Happens::Guides);
        world.after(1000, Happens::Fault);
        world
    }

    fn after(&mut self, delay: u64, happens: Happens) {
        self.next += 1;
        self.queue.insert((self.now + delay, self.next), happens);
    }

    fn instant(&self) -> Instant {
        self.began + Duration::from_millis(self.now)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
        self.log.push(format!("{:>7} {what}", self.now));
    }

    fn finds(&mut self, what: &str) {
        self.finding.get_or_insert_with(|| format!("at {} ms: {what}", self.now));
    }

    fn is_now(&self, id: u64) -> bool {
        self.connection.is_some_and(|connection| connection.id == id)
    }

    /// What the server has executed.
    fn executed(&self) -> (u8, u64) {
        let Some(Connection { to, stage: Stage::Up { since, offset }, .. }) = self.connection else {
            return self.holds;
        };
        let primary = &self.primaries[to];
        // A server takes what waits for it three times as fast as clients write.
        let brought = (primary.rate * 3 + 1000) * (self.now - since) / 1000;
        (primary.history, (offset + brought).min(primary.offset(self.now)))
    }

    fn happens(&mut self, happens: Happens) {
        match happens {
            Happens::Connects => {
                self.after(CONNECT_EVERY, Happens::Connects);
                self.connects();
            }
            Happens::ConnectsAtOnce => self.connects(),
            Happens::Asks(id) if self.is_now(id) => self.arrives(id, None),
            Happens::AsksThePrimary(id) => self.asks_the_primary(id),
            Happens::CopyEnds(id) => self.copy_ends(id),
            Happens::Cut(id) => self.ends(id),
            Happens::Looks => self.looks(),
            Happens::Guides => self.guides(),
            Happens::SyncCatchesUp(id) => self.catches_up(id),
            Happens::HandsOver(id) => self.hands_over(id),
            Happens::SyncFails(id) => self.sync_fails(id),
            Happens::SyncEnds(id, is_well) => self.sync_ends(id, is_well),
            Happens::Fault => self.fault(),
            Happens::Asks(_) => {}
        }
    }

    fn connects(&mut self) {
        if self.connection.is_some() {
            return;
        }
        self.next += 1;
        let id = self.next;
        let through_the_agent = self.gate_is_open;
        let stage = Stage::Asks;
        self.connection = Some(Connection { id, to: self.follows, through_the_agent, stage, is_excused: false });
        let delay = 1 + self.draw.below(50);
        if !self.primaries[self.follows].is_there {
            self.goes_unanswered(id);
        } else if through_the_agent {
            self.after(delay, Happens::Asks(id));
        } else {
            self.after(delay, Happens::AsksThePrimary(id));
        }
    }

    /// The agent decides on a connection. `asked`: the primary's facts, where it was asked before.
    fn arrives(&mut self, id: u64, asked: Option<Facts>) {
        let Some(connection) = self.connection.filter(|connection| connection.id == id) else { return };
        let primary = &self.primaries[connection.to];
        let facts = asked.unwrap_or_else(|| primary.facts(self.now));
        let (history, offset) = self.holds;
        let asks = match self.sync {
            _ if self.draw.below(50) == 0 => Asks::Unknown("the primary answers something else".into()),
            Some(sync) if facts.replid == Some(replid(sync.of)) => Asks::Copy,
            Some(_) => Asks::Another,
            None if facts.covers(replid(history), offset, 0).is_ok() => Asks::Continues,
            None => Asks::Copy,
        };
        let is_open = self.gate_is_open;
        self.handle(Event::Arrived { asks, is_of_another_server: false, is_open }, Some(id));
    }

    fn handle(&mut self, event: Event, id: Option<u64>) {
        let now = self.instant();
        for action in self.attendance.handle(now, event) {
            self.act(action, id);
        }
    }

    fn act(&mut self, action: Action, id: Option<u64>) {
        match action {
            Action::Begin => self.begins(id),
            Action::Give => self.gives(id),
            Action::Pass { why, is_noted } => self.passes(id, &why, is_noted),
            Action::Keep => self.kept = id,
            Action::TakeKept => {
                if let Some(kept) = self.kept.take() {
                    self.arrives(kept, None);
                }
            }
            Action::EndSync => {
                if let Some(sync) = &mut self.sync {
                    sync.is_told_to_end = true;
                    let id = sync.id;
                    let delay = 1 + self.draw.below(200);
                    self.after(delay, Happens::SyncEnds(id, false));
                    self.count("a sync is told to end");
                }
            }
            Action::Open => self.gate_is_open = true,
            Action::HandBack => self.hand_back(),
            Action::Drop | Action::Close | Action::End(End::Stopped) => {}
            Action::End(end) => self.finds(&format!("the attendance ends by itself: {end:?}")),
        }
    }

    fn hand_back(&mut self) {
        self.gate_is_open = false;
        if let Some(noted) = self.noted.take() {
            self.count("a passage is handed back");
            self.ends(noted);
        }
        let given = self.connection.filter(|connection| connection.stage == Stage::Given);
        if let Some(connection) = given {
            self.ends(connection.id);
        }
    }

    fn begins(&mut self, id: Option<u64>) {
        let Some(connection) = self.connection.filter(|connection| Some(connection.id) == id) else {
            return self.handle(Event::NotBegun, id);
        };
        let primary = &self.primaries[connection.to];
        let attended = Facts { run_id: Some("attended".into()), ..Facts::default() };
        let needs = Needs { primary: primary.facts(self.now), attended };
        let behind = primary.offset(self.now).saturating_sub(primary.backlog * 2);
        let announce = Announce { host: String::new(), port: 1, tls: false, source_sees_as: String::new() };
        // Sources answer in the order of their number, and the first that is fit serves.
        let found = self.sources.iter().copied().find(|kind| {
            let offset = match kind {
                SourceKind::Away => return false,
                SourceKind::Good => primary.offset(self.now),
                SourceKind::StandsStill => behind,
            };
            let server = Facts { offset: Some(offset), ..primary.facts(self.now) };
            let offer = plan_of(&server, announce.clone(), 0, 1);
            match needs.fit(&offer) {
                Fit::Yes => true,
                Fit::IfItMoves => *kind == SourceKind::Good,
                Fit::No(_) => false,
            }
        });
        // What its server holds is of use as long as the primary's backlog goes on from there.
        let (history, is_behind) = (primary.history, behind + 1 < primary.first(self.now));
        let Some(kind) = found else {
            self.count("no source serves");
            return self.handle(Event::NotBegun, id);
        };
        self.next += 1;
        let sync = Sync {
            id: self.next,
            of: history,
            stands_still: kind == SourceKind::StandsStill && is_behind,
            is_told_to_end: false,
            handed_over: None,
        };
        if sync.stands_still && self.sources.contains(&SourceKind::Good) {
            self.finds("a source that stands still serves, and another one would");
        }
        self.count("a sync begins");
        let takes = 500 + self.draw.below(5000);
        let happens = match self.draw.below(8) {
            0 => Happens::SyncFails(sync.id),
            _ if sync.stands_still => Happens::SyncFails(sync.id),
            _ => Happens::SyncCatchesUp(sync.id),
        };
        self.after(if sync.stands_still { STILL_LIMIT } else { takes }, happens);
        self.sync = Some(sync);
        self.handle(Event::Begun, id);
    }

    fn gives(&mut self, id: Option<u64>) {
        let (Some(connection), Some(sync)) = (&mut self.connection, &self.sync) else { return };
        if Some(connection.id) != id {
            return;
        }
        connection.stage = Stage::Given;
        let primary = &self.primaries[connection.to];
        if sync.of != primary.history && primary.former.is_none_or(|(former, _)| former != sync.of) {
            self.finds("a server gets the data of another primary than it asks");
        }
    }

    fn passes(&mut self, id: Option<u64>, why: &Why, is_noted: bool) {
        let Some(id) = id else { return };
        self.passages.insert(id);
        if is_noted {
            self.noted = Some(id);
        }
        if let Some(connection) = self.connection.as_mut().filter(|connection| connection.id == id) {
            connection.is_excused = *why != Why::Continues;
            self.count(if *why == Why::OnItsWay { "a connection was on its way" } else { "a connection is passed on" });
        }
        self.asks_the_primary(id);
    }

    fn asks_the_primary(&mut self, id: u64) {
        let Some(mut connection) = self.connection.filter(|connection| connection.id == id) else { return };
        let primary = &self.primaries[connection.to];
        if !primary.is_there {
            return self.goes_unanswered(id);
        }
        let (history, offset) = (primary.history, primary.offset(self.now));
        if primary.continues(self.now, self.holds) {
            connection.stage = Stage::Up { since: self.now, offset: self.holds.1 };
            self.holds.0 = history;
        } else {
            if !connection.is_excused && self.now >= self.excused_until {
                self.finds("a server that goes to its primary takes a full copy there");
            }
            connection.stage = Stage::Copies;
            self.holds = (history, offset);
            self.count("a full copy of the primary");
            let takes = 300 + self.draw.below(5000);
            self.after(takes, Happens::CopyEnds(id));
        }
        self.connection = Some(connection);
    }

    /// Clients may write what they like meanwhile.
    fn goes_unanswered(&mut self, id: u64) {
        self.after(SILENCE, Happens::Cut(id));
        self.excused_until = self.excused_until.max(self.now + SILENCE + EXCUSED_FOR);
    }

    fn copy_ends(&mut self, id: u64) {
        let (now, offset) = (self.now, self.holds.1);
        if let Some(connection) = self.connection.as_mut().filter(|connection| connection.id == id) {
            connection.stage = Stage::Up { since: now, offset };
        }
    }

    /// A connection ends, from wherever.
    fn ends(&mut self, id: u64) {
        let was_copying = self.connection.is_some_and(|connection| connection.stage == Stage::Copies);
        if self.is_now(id) {
            self.holds = if was_copying { (3, 0) } else { self.executed() };
            self.connection = None;
            let delay = 1 + self.draw.below(50);
            self.after(delay, Happens::ConnectsAtOnce);
        }
        if self.passages.remove(&id) && self.noted == Some(id) {
            self.noted = None;
            let is_open = self.gate_is_open;
            self.handle(Event::PassageEnded { is_open }, None);
        }
    }

    fn looks(&mut self) {
        self.after(LOOK_EVERY, Happens::Looks);
        if !self.attendance.looks() {
            return;
        }
        let link = match self.connection.map(|connection| connection.stage) {
            Some(Stage::Up { .. }) => LinkState::Up,
            Some(Stage::Copies) => LinkState::Copying,
            _ => LinkState::Down,
        };
        let (history, offset) = self.executed();
        let primary = &self.primaries[self.follows];
        let is_covered = primary.facts(self.now).covers(replid(history), offset, primary.rate).is_ok();
        self.handle(Event::Looked { link, is_covered: is_covered && self.attendance.needs_cover() }, None);
    }

    /// The server has loaded: it is sent to its primary, which keeps what it needs.
    fn catches_up(&mut self, id: u64) {
        let Some(sync) = self.sync.filter(|sync| sync.id == id && !sync.is_told_to_end) else { return };
        if matches!(self.connection, Some(Connection { stage: Stage::Up { .. }, .. })) {
            // Its primary serves it, by a connection that the agent could not judge.
            return self.sync_ends(id, true);
        }
        let given = self.connection.filter(|connection| connection.stage == Stage::Given);
        let Some(connection) = given.filter(|connection| self.primaries[connection.to].is_there) else {
            return self.after(200, Happens::SyncCatchesUp(id));
        };
        let primary = &mut self.primaries[connection.to];
        let offset = primary.offset(self.now);
        primary.pinned = Some(offset);
        self.holds = (sync.of, offset);
        self.sync = Some(Sync { handed_over: Some(self.now), ..sync });
        self.hand_back();
        self.after(100, Happens::HandsOver(id));
    }

    fn hands_over(&mut self, id: u64) {
        let Some(sync) = self.sync.filter(|sync| sync.id == id && !sync.is_told_to_end) else { return };
        let is_up = matches!(self.connection, Some(Connection { stage: Stage::Up { .. }, .. }));
        let is_late = sync.handed_over.is_some_and(|since| self.now > since + HAND_OFF_LIMIT);
        match (is_up, is_late) {
            (true, _) => self.sync_ends(id, true),
            (false, true) => self.sync_ends(id, false),
            (false, false) => self.after(100, Happens::HandsOver(id)),
        }
    }

    fn sync_fails(&mut self, id: u64) {
        if self.sync.is_some_and(|sync| sync.id == id) {
            self.count("a sync fails");
            // Its connection ends first, and the server comes again.
            if let Some(given) = self.connection.filter(|connection| connection.stage == Stage::Given) {
                self.ends(given.id);
            }
            let delay = 1 + self.draw.below(100);
            self.after(delay, Happens::SyncEnds(id, false));
        }
    }

    fn sync_ends(&mut self, id: u64, is_well: bool) {
        if self.sync.is_none_or(|sync| sync.id != id) {
            return;
        }
        self.sync = None;
        self.primaries.iter_mut().for_each(|primary| primary.pinned = None);
        if is_well {
            self.count("a sync is done");
        } else {
            // A failure leaves the server with its primary.
            self.excused_until = self.now + DIRECT_FOR;
        }
        self.handle(Event::SyncEnded, None);
    }

    fn fault(&mut self) {
        let primary = usize::from(self.group.primary == address(1));
        if self.now > FAULTS_UNTIL {
            self.primaries[primary].is_there = true;
            return;
        }
        let delay = 500 + self.draw.below(12_000);
        self.after(delay, Happens::Fault);
        self.excused_until = self.excused_until.max(self.now + EXCUSED_FOR);
        let now = self.now;
        match self.draw.below(7) {
            0 => {
                let primary = &mut self.primaries[primary];
                (primary.offset, primary.rate) = ((now, primary.offset(now)), 0);
                primary.rate = self.draw.below(20_000);
            }
            1 => self.fails_over(),
            2 => self.primaries[primary].is_there = false,
            3 => {
                // Another history: the primary was restarted.
                let primary = &mut self.primaries[primary];
                primary.is_there = true;
                (primary.history, primary.former) = (primary.history.wrapping_add(2).max(4), None);
                self.restarts();
            }
            4 => self.sources.iter_mut().for_each(|kind| *kind = source(&mut self.draw)),
            5 => {
                let is_stuck = self.sync.is_some_and(|sync| sync.stands_still);
                if is_stuck {
                    self.handle(Event::Stuck, None);
                }
            }
            _ => self.restarts(),
        }
        self.primaries[primary].is_there |= self.draw.below(3) == 0;
    }

    /// The server's connection breaks.
    fn restarts(&mut self) {
        if let Some(connection) = self.connection {
            self.ends(connection.id);
        }
    }

    /// The other primary takes over: it goes on with the history of the first, under a name of its own.
    fn fails_over(&mut self) {
        self.count("a fail-over");
        let old = usize::from(self.group.primary == address(1));
        let new = 1 - old;
        let (history, end) = (self.primaries[old].history, self.primaries[old].offset(self.now));
        let is_a_replica = self.draw.below(2) == 0;
        let primary = &mut self.primaries[new];
        primary.history = primary.history.wrapping_add(2).max(5);
        primary.is_there = true;
        primary.former = is_a_replica.then_some((history, end + 1));
        if is_a_replica {
            primary.offset = (self.now, end);
        }
        self.primaries[old].is_there = false;
        let now = Group { primary: address(new), replicas: Vec::new(), former: Vec::new() };
        self.group = now.follows(&self.group);
        // A Sentinel takes along the replicas that it has seen in the former primary's INFO.
        if self.is_known && self.follows == old {
            self.follows = new;
        } else {
            self.count("a server that no Sentinel knows");
        }
        self.is_known = false;
        self.restarts();
    }

    /// The agent looks for a primary that was replaced, as [`Guide`](crate::attend::guide::Guide) does.
    fn guides(&mut self) {
        self.after(GUIDE_EVERY, Happens::Guides);
        let up = matches!(self.connection, Some(Connection { stage: Stage::Up { .. }, .. }));
        self.is_known |= up;
        let HostPort { host, port } = address(self.follows);
        let is_served = self.connection.is_some_and(|way| matches!(way.stage, Stage::Copies | Stage::Given));
        let link = Link { host, port, up: Some(up), syncing: Some(is_served) };
        let server = Facts { link: Some(link), ..Facts::default() };
        let is_astray = self.url.as_ref().is_some_and(|url| self.group.is_astray(&server, url, &[]));
        if !is_astray {
            self.astray_since = None;
            return;
        }
        let since = *self.astray_since.get_or_insert(self.now);
        if let Some(sync) = self.sync {
            // The sync looks at the server too, and ends.
            return self.after(1, Happens::SyncEnds(sync.id, false));
        }
        if Duration::from_millis(self.now - since) >= ASTRAY_LIMIT {
            self.count("a server is taken along");
            self.astray_since = None;
            self.follows = usize::from(self.group.primary == address(1));
            self.restarts();
            self.excused_until = self.excused_until.max(self.now + EXCUSED_FOR);
            self.handle(Event::Guided, None);
        }
    }

    /// What must hold after each event.
    fn check(&mut self) {
        if self.gate_is_open || self.sync.is_some() {
            self.closed_since = None;
            return;
        }
        let since = *self.closed_since.get_or_insert(self.now);
        if self.now - since > DIRECT_FOR && !self.attendance.needs_cover() {
            self.finds("the server's connections go past the agent for ever");
        }
    }

    /// What must hold when the faults are over.
    fn at_the_end(&mut self) {
        if self.finding.is_some() {
            return;
        }
        let is_up = matches!(self.connection, Some(Connection { stage: Stage::Up { .. }, .. }));
        if !is_up {
            self.finds(&format!("the server is not in step in the end: {:?}", self.connection));
        } else if !self.gate_is_open || self.sync.is_some() {
            self.finds("the agent does not attend the server in the end");
        } else if self.connection.is_some_and(|connection| connection.through_the_agent) && self.noted.is_some() {
            self.finds("the server's link stays with the agent, though its primary would continue it");
        }
    }
}

fn source(draw: &mut Random) -> SourceKind {
    match draw.below(5) {
        0 => SourceKind::Away,
        1 => SourceKind::StandsStill,
        _ => SourceKind::Good,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remora_base::mutation::Mutation;
    use remora_base::pace;

    /// Schedules that `make test` plays, and `make test-all`: an idle machine plays more than two thousand in a second
    /// as a release, and some two hundred without optimisation.
    const SCHEDULES: usize = 1_000;
    const MORE_SCHEDULES: usize = 5_000;

    /// How long the search for a fault may take. The schedules of half a minute's work last many minutes beside builds.
    const FOUND_WITHIN: Duration = Duration::from_secs(300);

    #[test]
    fn what_must_hold_of_an_attended_server_does_in_schedules_of_many_seeds() {
        what_must_hold_does(11, SCHEDULES);
    }

    #[test]
    #[ignore = "long: make test-all"]
    fn what_must_hold_of_an_attended_server_does_in_schedules_of_many_more_seeds() {
        what_must_hold_does(12, MORE_SCHEDULES);
    }

    fn what_must_hold_does(first: u64, schedules: usize) {
        let mut reached = BTreeMap::new();
        for seed in pace::Random::seeded(first).draws().take(schedules) {
            let world = play(seed);
            let last = world.log.len().saturating_sub(40);
            assert_eq!(world.finding, None, "seed {seed}:\n{}", world.log[last..].join("\n"));
            world.counts.iter().for_each(|(what, count)| *reached.entry(*what).or_insert(0) += count);
        }
        println!("{reached:#?}");
        let all = [
            "a sync begins",
            "a sync is done",
            "a sync fails",
            "a sync is told to end",
            "a connection was on its way",
            "a passage is handed back",
            "a full copy of the primary",
            "no source serves",
            "a fail-over",
            "a server is taken along",
        ];
        all.iter().for_each(|what| assert!(reached.contains_key(what), "{what} was not reached"));
    }

    #[track_caller]
    fn is_found(mutation: Mutation, as_what: &str) {
        let began = Instant::now();
        for (number, seed) in pace::Random::seeded(12).draws().enumerate() {
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
    fn a_passage_that_is_ended_before_the_primary_covers_its_server_is_found() {
        is_found(Mutation::HandedBackUncovered, "takes a full copy there");
    }

    #[test]
    fn a_sync_that_gets_a_connection_to_another_primary_is_found() {
        is_found(Mutation::AnotherPrimaryGiven, "the data of another primary");
    }

    #[test]
    fn a_server_that_is_waited_for_without_a_limit_is_found() {
        is_found(Mutation::DirectForEver, "past the agent for ever");
    }

    #[test]
    fn a_server_that_is_left_waiting_for_a_former_primary_is_found() {
        is_found(Mutation::AstrayLeft, "not in step in the end");
    }

    #[test]
    fn a_source_that_stands_still_and_is_taken_is_found() {
        is_found(Mutation::FirstSourceKept, "a source that stands still serves");
    }
}
