//! Source agent: the real machine of a source, and actors in the place of its captures.

mod cable;
mod standby;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use remora_protocol::{
    Announce, LossCause, Message as Said, Offer, Outcome, Phase, Progress, RefusalCode, Relays, TableOffer, Upstream,
};
use remora_redis::ReplId;

use self::cable::Cable;
use self::standby::{CALL, COPY, Copy, First};
use super::memory::{Journal, Snapshot};
use super::memory::{SLOT_BYTES, journal_geometry};
use super::oracle::Watched;
use super::pins::{Pinning, Pins};
use super::plan::{SourceOptions, UNREST};
use super::wire::{Address, Ask, Conn, End, Host, Keeper, Message};
use super::world::{Event, World, event_name, facts, shown};
use remora_base::pace::Backoff;
use remora_server::Facts;
use remora_server::Position;
use remora_server::pins::Travellers;
use remora_source::machine::{Action, Event as Input, Format, Machine, Report, Resume, Rules, Session};
use remora_source::parts::Reading;
use remora_source::parts::is_same_history;
use remora_source::parts::{CaptureError, CaptureEvent};
use remora_source::parts::{known_history, plan_of};
use remora_source::topology::{Assignment, Joining, Topology, Witness};

/// How often the machine is given the time: half as often as in the product, for twice the schedules.
const TICK: Duration = Duration::from_millis(100);

/// The room of a journal after the unrest: with less, a snapshot that takes long never succeeds.
const CALM_JOURNAL: usize = 100_000;

/// How long a broken stream is resumed, as in the product.
const RESUME_LIMIT: Duration = Duration::from_secs(60);

pub(super) struct Peer {
    conn: Conn,
    pub(super) done: bool,
    joined: Duration,
    /// When it asked for a snapshot.
    pub(super) asked: Option<Duration>,
    /// Where it serves, if it is a standby.
    pub(super) standby_at: Option<String>,
}

/// Where a capture is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// A copy, whose stream the server was not asked for yet, or is being asked for.
    Copying,
    Joining,
    Connecting,
    Asked,
    Snapshot,
    Following,
    /// The stream broke: the next attempt to resume it is due, or is being made.
    Pausing,
    Resuming,
}

pub(super) struct Capture {
    pub(super) generation: u64,
    pub(super) with_stream: bool,
    pub(super) stage: Stage,
    /// What is copied of another source, until it is whole; and what the server is asked for behind it.
    pub(super) copy: Option<Copy>,
    pub(super) asks: Option<(ReplId, u64)>,
    conn: Option<Conn>,
    /// What delivers the server's bytes on that connection.
    cable: Option<Cable>,
    /// Slots for which the table has no room.
    waiting: VecDeque<u64>,
    whole: bool,
    pub(super) replid: Option<ReplId>,
    backoff: Backoff,
    broke: Duration,
}

impl Capture {
    pub(super) fn new(generation: u64, with_stream: bool, backoff: Backoff) -> Capture {
        Capture {
            generation,
            with_stream,
            stage: Stage::Connecting,
            copy: None,
            asks: None,
            conn: None,
            cable: None,
            waiting: VecDeque::new(),
            whole: false,
            replid: None,
            backoff,
            broke: Duration::ZERO,
        }
    }
}

/// See the module's text.
pub(super) struct SourceAgent {
    pub(super) index: usize,
    pub(super) options: SourceOptions,
    pub(super) is_running: bool,
    pub(super) machine: Machine,
    pub(super) assignments: Assignments,
    /// What it knows of the source that it stands by for.
    pub(super) first: Option<First>,
    /// What a check has found.
    pub(super) finding: Option<String>,
    pub(super) sessions: BTreeMap<Session, Peer>,
    pub(super) facts: Facts,
    pub(super) captures: BTreeMap<u64, Capture>,
    pub(super) next_number: u64,
    pub(super) reading: Reading,
    retained: bool,
    pub(super) journal: Option<u64>,
    /// The bytes for which it has room.
    journal_room: usize,
    /// What it knows of the stream in the journal.
    pub(super) watched: Option<Watched>,
    /// What its server keeps for the replicas on their way to it, and who they are.
    pins: Pinning<Session>,
    travellers: Travellers<Session>,
}

impl SourceAgent {
    pub(super) fn start(world: &mut World, index: usize, options: SourceOptions) -> SourceAgent {
        let rules = Rules {
            max_age: options.max_age,
            max_replicas: 8,
            stall_limit: Duration::from_secs(20),
            fork_interval: Duration::from_secs(5),
            slot_bytes: 1 << 20,
            repeat_messages: Duration::ZERO,
            at_once: options.at_once,
            standby: options.standby,
        };
        world.places.push(options.place);
        let backoff = Backoff::seeded(world.draw.next());
        let first_generation = (index as u64 + 1) * 1000;
        let machine = Machine::new(world.instant(), rules, backoff, first_generation, options.eager);
        let facts = facts(world, options.captured);
        world.after(TICK, Event::Source(index, 0));
        let (retained, journal_room) = (options.retained, options.journal);
        let pins = Pinning::new(Keeper::Source(index), options.captured);
        let first = First::of(world, options.place, options.standby.is_some());
        if first.is_some() {
            world.after(Duration::from_millis(1), Event::Source(index, CALL));
        }
        SourceAgent {
            first,
            finding: None,
            index,
            options,
            is_running: true,
            machine,
            assignments: Assignments::default(),
            sessions: BTreeMap::new(),
            facts,
            captures: BTreeMap::new(),
            next_number: 1,
            reading: Reading::default(),
            retained,
            journal: None,
            journal_room,
            watched: None,
            pins,
            travellers: Travellers::default(),
        }
    }

    /// Ends the agent: by a signal, or killed.
    pub(super) fn stop(&mut self, world: &mut World, killed: bool) {
        if !self.is_running {
            return;
        }
        if !killed {
            let conns: Vec<Conn> = self.sessions.values().map(|peer| peer.conn).collect();
            for conn in conns {
                let text = "the source is being stopped".to_string();
                self.say_on(world, conn, Said::Refused { code: RefusalCode::Stopping, text });
            }
        }
        self.is_running = false;
        world.end_all(End::Source(self.index));
        world.end_all(End::Standby(self.index));
        let jobs: Vec<u64> = self.captures.keys().copied().collect();
        jobs.into_iter().for_each(|job| world.end_all(End::Capture(self.index, job)));
        self.captures.clear();
        self.pins.end(world);
        world.memories.revoke_all(self.index);
    }

    // ---- sessions ----

    pub(super) fn accept(&mut self, world: &World, conn: Conn) {
        self.next_number += 1;
        let peer = Peer { conn, done: false, joined: world.now, asked: None, standby_at: None };
        self.sessions.insert(self.next_number, peer);
    }

    fn session_of(&self, conn: Conn) -> Option<Session> {
        self.sessions.iter().find(|(_, peer)| peer.conn == conn).map(|(&session, _)| session)
    }

    fn say_on(&self, world: &mut World, conn: Conn, message: Said) {
        world.send(conn, End::Source(self.index), Message::Agents(Box::new(message)));
    }

    pub(super) fn say(&self, world: &mut World, session: Session, message: Said) {
        if let Some(peer) = self.sessions.get(&session) {
            self.say_on(world, peer.conn, message);
        }
    }

    pub(super) fn said(&mut self, world: &mut World, conn: Conn, message: Said) {
        let Some(session) = self.session_of(conn) else { return };
        let event = match message {
            Said::Join(join) if join.plan_only => {
                if self.reaches_the_server(world) {
                    self.facts = facts(world, self.options.captured);
                }
                let plan = self.plan();
                return self.say(world, session, Said::Offer(plan));
            }
            Said::StandBy { serves_at } => {
                self.sessions.entry(session).and_modify(|peer| peer.standby_at = Some(serves_at));
                return;
            }
            Said::Join(join) if self.sessions.get(&session).is_some_and(|peer| peer.standby_at.is_some()) => {
                let (name, address) = (join.name, String::new());
                self.apply(world, Input::StandbyJoined { session, name, address });
                return self.tell_of_standbys(world, None);
            }
            Said::Join(join) => {
                let resume = join.resume.as_ref().map(Resume::of);
                let (name, address, zone) = (join.name, String::new(), join.zone);
                let now = world.now;
                self.sessions.entry(session).and_modify(|peer| (peer.joined, peer.asked) = (now, Some(now)));
                self.assignments.introduce(world, conn, session, join.relays);
                Input::Joined { session, name, address, zone, resume, reads: Format::Shared }
            }
            Said::Progress(progress) => {
                if self.machine.status().offered(session) != Some(progress.generation) {
                    return;
                }
                self.relaying(world, session, &progress);
                if self.travellers.is_in(&session, progress.phase) {
                    self.pins.release(world);
                }
                Input::Progress { session, at: Report::of(&progress) }
            }
            Said::PeerLost { generation, session: peer, cause, .. } => {
                return self.peer_lost(world, session, generation, peer, cause);
            }
            Said::HandOffQuery { offset, .. } => {
                self.travellers.asked(session);
                match known_history(self.machine.status().history_of(session)) {
                    Ok(history) => self.pins.ask(world, session, Position { history, offset, rate: 0 }),
                    Err(text) => self.say(world, session, Said::HandOffAnswer { covered: false, text }),
                }
                return self.answer(world);
            }
            Said::Leave { outcome, .. } => {
                self.arrived(world, session);
                if let Some(peer) = self.sessions.get_mut(&session) {
                    peer.done = true;
                }
                Input::Gone { session, done: outcome == Outcome::HandedOver }
            }
            _ => return,
        };
        self.apply(world, event);
    }

    /// A session's replica needs nothing of the server any more.
    fn arrived(&mut self, world: &mut World, session: Session) {
        if self.travellers.left(&session) {
            self.pins.release(world);
        }
    }

    pub(super) fn with_pins(&mut self, world: &mut World, tell: impl FnOnce(&mut dyn Pins, &mut World)) {
        tell(&mut self.pins, world);
        self.answer(world);
    }

    /// Whether its server is not the one that replicas are to follow.
    fn captured_is_another(&self, world: &World) -> bool {
        world.server_at(&self.options.announce).is_some_and(|primary| primary != self.options.captured)
    }

    /// Tells replicas whether they can go to the primary.
    fn answer(&mut self, world: &mut World) {
        for answer in self.pins.take_answers() {
            let (session, captured) = (answer.key, self.options.captured);
            let Some(conn) = self.sessions.get(&session).map(|peer| peer.conn) else { continue };
            let ends = (0..2).filter_map(|side| world.end(conn, side));
            let replica = ends.into_iter().find_map(|end| if let End::Replica(_, id) = end { Some(id) } else { None });
            if let (Ok(()), Some(replica)) = (&answer.outcome, replica) {
                let asks_of = world.server_at(&self.options.announce);
                if self.captured_is_another(world) {
                    self.finding = Some(format!(
                        "server {} is told to go to its primary, {asks_of:?}, by a source that has asked {captured:?}",
                        replica.0
                    ));
                }
                world.promised(replica, captured, answer.promise);
            }
            let (covered, text) = (answer.outcome.is_ok(), answer.outcome.err().unwrap_or_default());
            self.say(world, session, Said::HandOffAnswer { covered, text });
        }
    }

    pub(super) fn left(&mut self, world: &mut World, conn: Conn) {
        let Some(session) = self.session_of(conn) else { return };
        self.arrived(world, session);
        let peer = self.sessions.remove(&session);
        let done = peer.as_ref().is_some_and(|peer| peer.done);
        self.lends_no_more(world, session);
        if peer.is_some_and(|peer| peer.standby_at.is_some()) {
            self.tell_of_standbys(world, None);
        }
        if !done {
            self.apply(world, Input::Gone { session, done: false });
        }
    }

    pub(super) fn reaches_the_server(&self, world: &World) -> bool {
        let (id, here) = (self.options.captured, Host::Source(self.options.place));
        world.server(id).alive && world.cut_until(here, Host::Server(id)).is_none()
    }

    fn plan(&self) -> Offer {
        let Address { host, port } = self.options.announce.clone();
        let primary = Announce { host, port, tls: false, source_sees_as: String::new() };
        plan_of(&self.facts, primary, 0, self.index as u64)
    }

    // ---- the machine ----

    pub(super) fn apply(&mut self, world: &mut World, event: Input) {
        if !matches!(event, Input::Progress { .. }) {
            world.log(|| format!("source {}: {}", self.index, shown(&event)));
        }
        let (now, reading) = (world.instant(), self.reading);
        let reading = self.with_tables(world, reading);
        for action in self.machine.apply(now, reading, event) {
            world.log(|| format!("source {}:     {action:?}", self.index));
            self.perform(world, action);
        }
        self.check_readers();
    }

    /// Slots that its snapshot table holds.
    pub(super) fn room(&self) -> u64 {
        if self.retained { self.options.room * 4 } else { self.options.room }
    }

    fn with_tables(&mut self, world: &World, mut reading: Reading) -> Reading {
        if let Some(generation) = self.machine.status().generation()
            && let Some(snapshot) = world.memories.snapshot((self.index, generation))
        {
            (reading.published, reading.retired) = (snapshot.published(), snapshot.retired);
        }
        if let Some(journal) = self.journal.and_then(|generation| world.memories.journal((self.index, generation))) {
            (reading.journal_first, reading.journal_end) = (journal.first, journal.end());
        }
        let origin = self.machine.status().snapshot.and_then(|snapshot| snapshot.origin());
        reading.first_state =
            self.watched.as_mut().zip(origin).and_then(|(watched, at)| watched.first_behind(at.offset));
        reading.is_windowed = !self.options.retained;
        self.reading = reading;
        reading
    }

    fn perform(&mut self, world: &mut World, action: Action) {
        let index = self.index;
        match action {
            Action::Capture { generation, with_stream, .. } => match self.to_copy(generation) {
                Some(offered) => self.copy(world, generation, with_stream, offered),
                None => {
                    self.check_fork(world);
                    self.capture(world, generation, with_stream);
                }
            },
            Action::Offer { session } => self.offer(world, session),
            Action::Wait { session, cause, text } => self.say(world, session, Said::Waiting { cause, text }),
            Action::Drop { session, code, text } => {
                self.say(world, session, Said::Refused { code, text });
                if let Some(peer) = self.sessions.get_mut(&session) {
                    peer.done = true;
                }
                self.lends_no_more(world, session);
            }
            Action::GenerationGone { session, generation, text } => {
                self.say(world, session, Said::GenerationGone { generation, text });
            }
            Action::RevokeSnapshot { generation } => {
                self.no_assignments();
                world.memories.revoke_snapshot((index, generation));
            }
            Action::EndStream { generation } => {
                world.memories.revoke_journal((index, generation));
                self.end_captures(world, |capture| capture.with_stream);
                self.journal = None;
            }
            Action::StopCapture { generation } => self.end_captures(world, |capture| capture.generation == generation),
            Action::AllowRetiring { below } => {
                if let Some(generation) = self.machine.status().generation() {
                    world.memories.retire((index, generation), below);
                    self.fill(world, generation);
                }
            }
        }
    }

    fn end_captures(&mut self, world: &mut World, which: impl Fn(&Capture) -> bool) {
        let ended: Vec<u64> = self.captures.iter().filter(|(_, capture)| which(capture)).map(|(&job, _)| job).collect();
        for job in ended {
            let capture = self.captures.remove(&job);
            world.end_all(End::Capture(self.index, job));
            if let Some(Capture { generation, copy: Some(_), .. }) = capture {
                self.copy_was_stopped(world, generation);
            }
        }
    }

    fn offer(&mut self, world: &mut World, session: Session) {
        let Some(generation) = self.machine.status().generation() else { return };
        let upstream = self.place_for(world, generation, session);
        let (Some(snapshot), Some(stream)) = (self.machine.status().snapshot, self.machine.status().stream) else {
            return;
        };
        let Some(origin) = snapshot.origin() else { return };
        // Who has slots already, or all of the data, joined before.
        let is_new = self
            .machine
            .status()
            .replica(session)
            .is_some_and(|replica| replica.at.slots_below == 0 && !replica.is_loaded());
        if let (Some(watched), Some(peer), true) = (&self.watched, self.sessions.get(&session), is_new) {
            let range = (origin.offset, watched.offset());
            world.late.offered(self.options.captured, origin.history, range, peer.joined);
        }
        let table = |origin: remora_table::Origin, slots: u32| TableOffer {
            generation: origin.generation,
            first_offset: origin.offset,
            slot_size: SLOT_BYTES,
            slots,
            retained: self.retained,
            seal: Vec::new(),
            compressed: false,
            keys: Vec::new(),
        };
        let plan = self.plan();
        let offer = Offer {
            generation: origin.generation,
            replid: Some(origin.history),
            former: plan.former.filter(|_| plan.replid == Some(origin.history)),
            offset: origin.offset,
            snapshot: table(origin, self.room() as u32),
            journal: table(stream, journal_geometry(self.journal_room).slots),
            upstream,
            ..plan
        };
        self.say(world, session, Said::Offer(offer));
        self.tell_of_standbys(world, Some(session));
    }

    // ---- captures ----

    fn capture(&mut self, world: &mut World, generation: u64, with_stream: bool) {
        self.next_number += 1;
        let backoff = Backoff::seeded(world.draw.next());
        self.captures.insert(self.next_number, Capture::new(generation, with_stream, backoff));
        self.dial(world, self.next_number);
    }

    pub(super) fn dial(&self, world: &mut World, job: u64) {
        let to = world.server(self.options.captured).traits.address.clone();
        world.dial(End::Capture(self.index, job), to, job);
    }

    /// The connection of a capture is there, or could not be made.
    pub(super) fn dialed(&mut self, world: &mut World, job: u64, conn: Option<Conn>) {
        let me = End::Capture(self.index, job);
        let Some(capture) = self.captures.get_mut(&job) else {
            return conn.into_iter().for_each(|conn| world.close(conn, me));
        };
        let Some(conn) = conn else { return self.broke(world, job, "no connection") };
        capture.conn = Some(conn);
        let history = match (capture.stage, capture.replid) {
            (Stage::Resuming, Some(replid)) => {
                let journal = world.memories.journal((self.index, capture.generation));
                journal.map(|journal| (replid, journal.end() + 1))
            }
            (Stage::Joining, _) => capture.asks,
            _ => None,
        };
        if capture.stage == Stage::Connecting {
            capture.stage = Stage::Asked;
        }
        let ask = if capture.with_stream { Ask::Stream } else { Ask::SnapshotOnly };
        let by_length = world.server(self.options.captured).traits.saves_to_file;
        capture.cable = Some(Cable::new(world.draw.next(), by_length, history));
        world.send(conn, me, Message::Psync { history, login: String::new(), ask });
    }

    pub(super) fn event(&mut self, world: &mut World, event: CaptureEvent) {
        match &event {
            CaptureEvent::Started { .. } | CaptureEvent::HistoryChanged { .. } if self.reaches_the_server(world) => {
                self.facts = facts(world, self.options.captured);
            }
            CaptureEvent::Failed { error: CaptureError::Outgrown, .. } => self.retained = false,
            _ => {}
        }
        world.count(&format!("capture: {}", event_name(&event)));
        self.copy_says(world, &event);
        self.apply(world, Input::Capture(event));
    }

    /// A capture ends with this error.
    fn fail(&mut self, world: &mut World, job: u64, error: CaptureError) {
        let Some(capture) = self.captures.remove(&job) else { return };
        world.end_all(End::Capture(self.index, job));
        let (generation, copies) = (capture.generation, capture.copy.is_some());
        let event = match (capture.stage, error) {
            (Stage::Following | Stage::Pausing | Stage::Resuming, CaptureError::HistoryChanged { from, to, at }) => {
                CaptureEvent::HistoryChanged { generation, from, to, at }
            }
            (Stage::Following | Stage::Pausing | Stage::Resuming, error) => {
                CaptureEvent::StreamLost { text: error.to_string() }
            }
            (_, error) => CaptureEvent::Failed { generation, error },
        };
        self.event(world, event);
        if copies {
            self.copy_was_stopped(world, generation);
        }
    }

    pub(super) fn begin_journal(&mut self, world: &mut World, origin: remora_table::Origin) {
        let room = self.options.journal;
        self.journal_room = if world.now < UNREST { room } else { room.max(CALM_JOURNAL) };
        world.memories.begin_journal((self.index, origin.generation), origin, self.journal_room);
        self.journal = Some(origin.generation);
    }

    pub(super) fn nothing_published(&mut self) {
        self.reading = Reading { published: 0, retired: 0, writer_waits: 0, ..self.reading };
    }

    /// The connection of a capture broke, or could not be made.
    fn broke(&mut self, world: &mut World, job: u64, cause: &str) {
        let now = world.now;
        let Some(capture) = self.captures.get_mut(&job) else { return };
        capture.conn = None;
        match capture.stage {
            Stage::Following => {
                capture.broke = now;
                capture.stage = Stage::Resuming;
                self.dial(world, job);
            }
            Stage::Resuming if now < capture.broke + RESUME_LIMIT => {
                capture.stage = Stage::Pausing;
                let pause = capture.backoff.next();
                world.after(pause, Event::Source(self.index, job));
            }
            _ => self.fail(world, job, CaptureError::Link { during: "snapshot", cause: cause.to_string() }),
        }
    }

    pub(super) fn closed(&mut self, world: &mut World, job: u64, conn: Conn) {
        self.deliver(world, job);
        if self.captures.get(&job).is_some_and(|capture| capture.conn == Some(conn)) {
            let whole = self.captures.get(&job).is_some_and(|capture| capture.whole);
            // The server closes the connection behind a snapshot without a stream.
            if !whole || self.captures.get(&job).is_some_and(|capture| capture.with_stream) {
                self.broke(world, job, "closed");
            }
        }
    }

    pub(super) fn receive(&mut self, world: &mut World, job: u64, conn: Conn, message: Message) {
        let capture = self.captures.get_mut(&job).filter(|capture| capture.conn == Some(conn));
        let read = capture.and_then(|capture| capture.cable.as_mut()).map(|cable| cable.send(message));
        read.into_iter().flatten().for_each(|message| self.hear(world, job, conn, message));
    }

    /// Delivers what the server of a capture has sent.
    fn deliver(&mut self, world: &mut World, job: u64) {
        let capture = self.captures.get_mut(&job);
        let Some((Some(conn), Some(cable))) = capture.map(|capture| (capture.conn, &mut capture.cable)) else { return };
        let read = cable.deliver();
        if std::mem::take(&mut cable.glued) > 0 {
            world.count("capture: the stream began in the read of a header");
        }
        read.into_iter().for_each(|message| self.hear(world, job, conn, message));
    }

    fn hear(&mut self, world: &mut World, job: u64, conn: Conn, message: Message) {
        let key = |generation| (self.index, generation);
        let Some(capture) = self.captures.get_mut(&job).filter(|capture| capture.conn == Some(conn)) else { return };
        let generation = capture.generation;
        match message {
            Message::FullResync { .. } if capture.stage == Stage::Resuming => {
                self.fail(world, job, CaptureError::HistoryGone);
            }
            Message::FullResync { .. } if capture.stage == Stage::Joining => {
                self.fail_copy(world, job, "the server here does not continue");
            }
            Message::FullResync { replid, offset } => {
                (capture.stage, capture.replid) = (Stage::Snapshot, Some(replid));
                let with_stream = capture.with_stream;
                let origin = remora_table::Origin { generation, history: replid, offset };
                world.memories.begin_snapshot(key(generation), origin, self.room());
                self.nothing_published();
                if with_stream {
                    self.begin_journal(world, origin);
                    self.watched = Some(Watched::new(world.instant(), offset));
                }
                self.event(world, CaptureEvent::Forked { generation });
                self.event(world, CaptureEvent::Started { generation, replid, offset });
            }
            Message::Slot(slot) => {
                capture.waiting.push_back(slot);
                self.fill(world, generation);
            }
            Message::End => {
                capture.whole = true;
                self.fill(world, generation);
            }
            Message::Continue { replid } if capture.stage == Stage::Joining => self.copy_is_linked(world, job, replid),
            Message::Continue { replid } if capture.stage == Stage::Resuming => {
                let Some(asked) = capture.replid else { return };
                let at = world.memories.journal(key(generation)).map_or(0, Journal::end);
                match is_same_history(asked, replid, at) {
                    Ok(()) => {
                        capture.stage = Stage::Following;
                        capture.backoff.reset();
                        self.watched.iter_mut().for_each(Watched::resumed);
                        self.event(world, CaptureEvent::StreamResumed);
                    }
                    Err(error) => self.fail(world, job, error),
                }
            }
            Message::Stream(bytes) => {
                let now = world.instant();
                self.watched.iter_mut().for_each(|watched| watched.stream(now, &bytes));
                world.memories.append(key(generation), &bytes);
            }
            Message::Later => {
                world.close(conn, End::Capture(self.index, job));
                self.broke(world, job, "not now");
            }
            _ => {}
        }
    }

    /// Writes slots that have come into the table, as far as it has room.
    fn fill(&mut self, world: &mut World, generation: u64) {
        let index = self.index;
        let running = self.captures.iter_mut();
        let Some((&job, capture)) = running
            .into_iter()
            .find(|(_, capture)| capture.generation == generation && capture.stage == Stage::Snapshot)
        else {
            return;
        };
        let mut took = 0;
        while let Some(&slot) = capture.waiting.front() {
            match world.memories.push((index, generation), slot) {
                None => return,
                Some(true) => {}
                Some(false) if self.retained => return self.fail(world, job, CaptureError::Outgrown),
                Some(false) => {
                    self.reading.writer_waits += 1;
                    break;
                }
            }
            capture.waiting.pop_front();
            took += 1;
        }
        let is_done = capture.whole && capture.waiting.is_empty();
        let (conn, with_stream) = (capture.conn, capture.with_stream);
        if is_done {
            world.memories.finish((index, generation));
            capture.stage = Stage::Following;
        }
        if let Some(conn) = conn {
            for _ in 0..took {
                world.send(conn, End::Capture(index, job), Message::Room);
            }
        }
        if !is_done {
            return;
        }
        match (conn, with_stream) {
            (Some(conn), true) => world.send(conn, End::Capture(index, job), Message::Ack { offset: 0 }),
            _ => {
                self.captures.remove(&job);
                world.end_all(End::Capture(index, job));
            }
        }
        let bytes = world.memories.snapshot((index, generation)).map_or(0, Snapshot::published);
        self.event(world, CaptureEvent::Completed { generation, bytes });
    }

    // ---- time ----

    pub(super) fn wake(&mut self, world: &mut World, number: u64) {
        if !self.is_running {
            return;
        }
        if number == CALL {
            return self.call_the_first(world);
        }
        if number >= COPY {
            return self.copy_step(world, number - COPY);
        }
        if number == 0 {
            self.tick(world);
            return world.after(TICK * world.calm_factor(), Event::Source(self.index, 0));
        }
        if let Some(capture) = self.captures.get_mut(&number)
            && capture.stage == Stage::Pausing
        {
            capture.stage = Stage::Resuming;
            self.dial(world, number);
        }
    }

    fn tick(&mut self, world: &mut World) {
        let jobs: Vec<u64> = self.captures.keys().copied().collect();
        jobs.into_iter().for_each(|job| self.deliver(world, job));
        let now = world.instant();
        let is_connected =
            |capture: &Capture| capture.with_stream && capture.stage == Stage::Following && capture.conn.is_some();
        if self.captures.values().any(is_connected) {
            self.watched.iter_mut().for_each(|watched| watched.reads(now, TICK));
        }
        let reading = self.with_tables(world, self.reading);
        for action in self.machine.apply(now, reading, Input::Tick) {
            world.log(|| format!("source {}:     {action:?}", self.index));
            self.perform(world, action);
        }
        self.look_at_assignments(world);
        self.look_at_the_first(world);
        self.check_readers();
    }
}

// Which agent reads from which other one, as the product's topology decides it: it follows `source/src/lib.rs`.

/// The topology, and what the agents have said of themselves.
#[derive(Default)]
pub(super) struct Assignments {
    topology: Topology,
    relays: BTreeMap<Session, (Relays, Witness)>,
}

impl Assignments {
    /// An agent joins, which passes slots on or does not.
    pub(super) fn introduce(&mut self, world: &World, conn: Conn, session: Session, relays: Option<Relays>) {
        self.relays.remove(&session);
        let number = match world.end(conn, 0) {
            Some(End::Replica(_, server)) => server.0 as u8,
            _ => 0,
        };
        let witness = Witness::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number + 1)), "");
        self.relays.extend(relays.map(|relays| (session, (relays, witness))));
    }
}

impl SourceAgent {
    /// The agent from which one is to read the snapshot's slots; `None`: the source.
    pub(super) fn place_for(&mut self, world: &mut World, generation: u64, session: Session) -> Option<Upstream> {
        let replica = self.machine.status().replica(session)?;
        let (relays, witness) = self.assignments.relays.get(&session)?.clone();
        if replica.is_loaded() {
            return None;
        }
        let first = replica.held_slots(generation);
        let joining = Joining { serves: !relays.serves_at.is_empty(), zone: replica.zone.clone(), witness, first };
        let from = self.assignments.topology.join(world.instant(), generation, session, joining);
        let spliced = self.assignments.topology.spliced();
        self.assign(world, &spliced);
        self.upstream(from?)
    }

    fn upstream(&self, session: Session) -> Option<Upstream> {
        let (relays, _) = self.assignments.relays.get(&session)?;
        let name = self.machine.status().replica(session)?.name.clone();
        Some(Upstream { session, name, address: relays.serves_at.clone() })
    }

    fn assign(&mut self, world: &mut World, assignments: &[Assignment]) {
        let Some(generation) = self.machine.status().generation() else { return };
        for &Assignment { reader, from } in assignments {
            let upstream = from.and_then(|from| self.upstream(from));
            world.count("relay: another upstream");
            self.say(world, reader, Said::ReadFrom { generation, upstream });
        }
    }

    pub(super) fn relaying(&mut self, world: &World, session: Session, progress: &Progress) {
        if let Some(at) = progress.relaying {
            let is_done = progress.phase > Phase::Transfer;
            self.assignments.topology.progress(world.instant(), session, at, progress.bytes, is_done);
        }
    }

    pub(super) fn peer_lost(
        &mut self,
        world: &mut World,
        reader: Session,
        generation: u64,
        peer: Session,
        cause: LossCause,
    ) {
        world.count(&format!("relay: {cause:?}"));
        if self.machine.status().offered(reader) == Some(generation) {
            let moved = self.assignments.topology.lost(reader, peer, cause);
            self.assign(world, &moved);
        }
    }

    /// A session has ended, or is to end.
    pub(super) fn lends_no_more(&mut self, world: &mut World, session: Session) {
        let moved = self.assignments.topology.gone(session);
        self.assign(world, &moved);
    }

    pub(super) fn no_assignments(&mut self) {
        self.assignments.topology.clear();
    }

    pub(super) fn look_at_assignments(&mut self, world: &mut World) {
        let generation = self.machine.status().generation();
        let snapshot = generation.and_then(|generation| world.memories.snapshot((self.index, generation)));
        let published = snapshot.map_or(0, |snapshot| snapshot.published());
        let moved = self.assignments.topology.tick(world.instant(), published);
        self.assign(world, &moved);
    }
}
