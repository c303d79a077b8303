//! Standby: a source that copies the snapshots of another one, which listens at the other place. What is copied, when,
//! and where the stream goes on, the product decides (`source/src/standby.rs`); the conversation and the copying are
//! this world's.
//!
//! ```text
//!   the first ── Offer ──▶ Copies::look ── Copied ──▶ the machine ── Capture ──▶ Begin ▶ Records ▶ Joining ▶ Slots
//!                                                                    its own server ◀── continues, PSYNC ──┘
//! ```
//!
//! Both may be the other one's standby, and each believes that readers come to it. So the checks know no first one:
//!
//! - a source takes a snapshot of its server only for replicas that wait, and a standby only when one has waited long;
//! - nothing is copied whose history the server does not have, and the server is asked only for bytes that it has;
//! - replicas are told before a snapshot goes that they still read.
//!
//! Two tables of one number have the same bytes: see `memory.rs`.

use std::sync::Arc;
use std::time::Duration;

use remora_protocol::{Join, Message as Said, Offer, Phase, Progress};
use remora_table::{Geometry, Origin};

use super::{Capture, SourceAgent, Stage};
use crate::memory::Lost;
use crate::memory::SLOT_BYTES;
use crate::oracle::Watched;
use crate::wire::{Address, Conn, End, Host, Message, SOURCES, TRANSPORT};
use crate::world::{Event, World, facts};
use remora_base::pace::Backoff;
use remora_server::HostPort;
use remora_source::machine::Event as Input;
use remora_source::parts::{
    CaptureError, CaptureEvent, Copies, End as Ended, Here, continues, is_same_history, reaches,
};

/// How often the first one is told how far the copy is.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// The number of the event by which a source calls the first one.
pub(crate) const CALL: u64 = u64::MAX;

/// Added to a capture's number: the event by which a copy goes on.
pub(crate) const COPY: u64 = 1 << 32;

/// Slots and bytes that one step copies.
const STEP_SLOTS: usize = 4;
const STEP_BYTES: usize = 2000;

/// How long a step takes at most, in milliseconds, and how long one over a slow way, or one that waits.
const STEP: u64 = 12;
const SLOW_STEP: Duration = Duration::from_millis(400);

/// What the first one offers.
#[derive(Debug)]
pub(crate) struct Offered {
    offer: Offer,
    /// The source that offers it, and the conversation.
    source: usize,
    conn: Conn,
}

impl AsRef<Offer> for Offered {
    fn as_ref(&self) -> &Offer {
        &self.offer
    }
}

/// What a standby knows of the first one.
pub(crate) struct First {
    copies: Copies<Offered>,
    attempt: u64,
    conn: Option<Conn>,
    source: usize,
    is_greeted: bool,
    /// What it has offered in this conversation.
    generation: Option<u64>,
    report: Duration,
    backoff: Backoff,
}

/// A copy that is not whole yet.
pub(crate) struct Copy {
    offered: Arc<Offered>,
    step: Step,
    next_slot: u64,
}

/// What of a copy comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Begin,
    Records,
    /// The server is asked to continue.
    Link,
    Slots,
}

impl First {
    /// `None`: the source is no standby.
    pub(crate) fn of(world: &mut World, place: usize, is_standby: bool) -> Option<First> {
        let (host, port) = SOURCES[1 - place];
        is_standby.then(|| First {
            copies: Copies::of(HostPort { host: host.into(), port }),
            attempt: 0,
            conn: None,
            source: 0,
            is_greeted: false,
            generation: None,
            report: Duration::ZERO,
            backoff: Backoff::seeded(world.draw.next()),
        })
    }
}

impl SourceAgent {
    // ---- the conversation with the first one ----

    pub(crate) fn call_the_first(&mut self, world: &mut World) {
        let (index, (host, port)) = (self.index, SOURCES[1 - self.options.place]);
        let Some(first) = &mut self.first else { return };
        first.attempt += 1;
        world.dial(End::Standby(index), Address { host: host.into(), port }, first.attempt);
    }

    pub(crate) fn dialed_the_first(&mut self, world: &mut World, attempt: u64, source: usize, conn: Option<Conn>) {
        let index = self.index;
        let is_running = self.is_running;
        let Some(first) = self.first.as_mut().filter(|first| first.attempt == attempt && is_running) else {
            return conn.into_iter().for_each(|conn| world.close(conn, End::Standby(index)));
        };
        let Some(conn) = conn else { return self.away(world, "it is not there") };
        (first.conn, first.source, first.is_greeted, first.generation) = (Some(conn), source, false, None);
        self.tell_the_first(world, Said::Join(join(true)));
    }

    fn tell_the_first(&self, world: &mut World, said: Said) {
        if let Some(conn) = self.first.as_ref().and_then(|first| first.conn) {
            world.send(conn, End::Standby(self.index), Message::Agents(Box::new(said)));
        }
    }

    pub(crate) fn the_first_says(&mut self, world: &mut World, conn: Conn, said: Said) {
        let Some(first) = self.first.as_mut().filter(|first| first.conn == Some(conn)) else { return };
        match said {
            Said::Offer(_) if !first.is_greeted => {
                first.is_greeted = true;
                let (host, port) = SOURCES[self.options.place];
                self.tell_the_first(world, Said::StandBy { serves_at: format!("{host}:{port}") });
                self.tell_the_first(world, Said::Join(join(false)));
            }
            Said::Offer(offer) => {
                first.backoff.reset();
                first.generation = Some(offer.generation);
                world.log(|| format!("source {}: the first one offers {}", self.index, offer.generation));
                first.copies.offered(Arc::new(Offered { offer, source: first.source, conn }));
            }
            Said::Refused { code, .. } => {
                world.count(&format!("standby: refused: {code:?}"));
                self.end_conversation(world, "it refuses");
            }
            _ => {}
        }
    }

    pub(crate) fn lost_the_first(&mut self, world: &mut World, conn: Conn, why: &str) {
        if self.first.as_ref().is_some_and(|first| first.conn == Some(conn)) {
            self.end_conversation(world, why);
        }
    }

    fn end_conversation(&mut self, world: &mut World, why: &str) {
        world.end_all(End::Standby(self.index));
        self.away(world, why);
    }

    fn away(&mut self, world: &mut World, why: &str) {
        let index = self.index;
        let Some(first) = &mut self.first else { return };
        world.log(|| format!("source {index}: no conversation with the first one: {why}"));
        (first.conn, first.generation) = (None, None);
        first.copies.away(why.to_owned());
        let pause = first.backoff.next();
        world.after(pause, Event::Source(index, CALL));
    }

    // ---- what is copied, and when ----

    pub(crate) fn look_at_the_first(&mut self, world: &mut World) {
        self.report_to_the_first(world);
        if !self.first.as_ref().is_some_and(|first| first.copies.has_an_offer()) {
            return;
        }
        if self.reaches_the_server(world) {
            self.facts = facts(world, self.options.captured);
        }
        let geometry = Geometry { slot_size: SLOT_BYTES, slots: self.room() as u32 };
        let here = Here {
            server: String::new(),
            replid: self.facts.replid,
            is_sealed: false,
            compresses: false,
            room: Ok(geometry.memory_len()),
            is_preparing: false,
        };
        let Some(first) = &mut self.first else { return };
        if let Some(generation) = first.copies.look(&self.machine, &here) {
            self.apply(world, Input::Copied { generation });
        }
    }

    /// Reports as `Task::progress` does.
    fn report_to_the_first(&mut self, world: &mut World) {
        let Some(first) = &mut self.first else { return };
        let Some(generation) = first.generation.filter(|_| world.now >= first.report) else { return };
        first.report = world.now + REPORT_EVERY;
        let copies = first.copies.copying().is_some_and(|copying| copying.offer.generation == generation);
        let present = self.machine.status().generation();
        let snapshot = present.and_then(|present| world.memories.snapshot((self.index, present)));
        let slots = snapshot.map_or(0, |snapshot| snapshot.published());
        let progress = Progress {
            generation,
            phase: if copies { Phase::Transfer } else { Phase::Stay },
            transport: Some(TRANSPORT.code()),
            transport_why: String::new(),
            no_fast_keys: String::new(),
            slots_below: slots,
            slots_held: slots,
            bytes: 0,
            applied_offset: self.reading.journal_end,
            relaying: None,
        };
        self.tell_the_first(world, Said::Progress(progress));
    }

    /// What is to be copied under this number; `None`: a snapshot of the server is to be taken.
    pub(crate) fn to_copy(&self, generation: u64) -> Option<Arc<Offered>> {
        let copying = self.first.as_ref()?.copies.copying()?;
        (copying.offer.generation == generation).then(|| copying.clone())
    }

    /// A capture reports.
    pub(crate) fn copy_says(&mut self, world: &mut World, event: &CaptureEvent) {
        let Some(ended) = self.first.as_mut().and_then(|first| first.copies.ended(event)) else { return };
        world.count(match ended {
            Ended::Whole => "standby: a copy is whole",
            Ended::Failed => "standby: a copy fails",
        });
        match ended {
            Ended::Whole => world.jobs.push((self.options.captured, "CopyWhole".to_owned())),
            Ended::Failed => self.end_conversation(world, "the copy has failed, and begins again"),
        }
    }

    // ---- the copying ----

    pub(crate) fn copy(&mut self, world: &mut World, generation: u64, with_stream: bool, offered: Arc<Offered>) {
        if self.reaches_the_server(world) && Some(world.server(self.options.captured).replid) != offered.offer.replid {
            self.finding = Some(format!(
                "source {} copies the snapshot {generation}, whose history its server does not have",
                self.index
            ));
        }
        world.jobs.push((self.options.captured, "Copy".to_owned()));
        let copy = Copy { offered, step: Step::Begin, next_slot: 0 };
        let backoff = Backoff::seeded(world.draw.next());
        self.next_number += 1;
        let mut capture = Capture::new(generation, with_stream, backoff);
        (capture.stage, capture.copy) = (Stage::Copying, Some(copy));
        self.captures.insert(self.next_number, capture);
        self.next_step(world, self.next_number);
    }

    fn next_step(&self, world: &mut World, job: u64) {
        let (here, there) = (Host::Source(self.options.place), Host::Source(1 - self.options.place));
        let waits = world.is_slow(here, there) || world.cut_until(here, there).is_some();
        let pause = if waits { SLOW_STEP } else { world.millis(STEP) + Duration::from_millis(1) };
        world.after(pause, Event::Source(self.index, COPY + job));
    }

    pub(crate) fn copy_step(&mut self, world: &mut World, job: u64) {
        let Some((step, offered)) = self
            .captures
            .get(&job)
            .and_then(|capture| capture.copy.as_ref())
            .map(|copy| (copy.step, copy.offered.clone()))
        else {
            return;
        };
        let (here, there) = (Host::Source(self.options.place), Host::Source(1 - self.options.place));
        if self.first.as_ref().is_none_or(|first| first.conn != Some(offered.conn)) {
            return self.fail_copy(world, job, "its conversation has ended");
        }
        if world.cut_until(here, there).is_some() {
            return self.next_step(world, job);
        }
        let done = match step {
            Step::Begin => self.begin_copy(world, job, &offered),
            Step::Records => self.copy_records(world, job, &offered),
            Step::Link => return,
            Step::Slots => self.copy_slots(world, job, &offered),
        };
        match done {
            Ok(()) if self.captures.get(&job).is_some_and(|capture| capture.copy.is_some()) => {
                self.next_step(world, job);
            }
            Ok(()) => {}
            Err(Lost(why)) => self.fail_copy(world, job, why),
        }
    }

    fn goes_on_with(&mut self, job: u64, step: Step) {
        let capture = self.captures.get_mut(&job);
        capture.and_then(|capture| capture.copy.as_mut()).into_iter().for_each(|copy| copy.step = step);
    }

    fn begin_copy(&mut self, world: &mut World, job: u64, offered: &Offered) -> Result<(), Lost> {
        let offer = &offered.offer;
        let (generation, offset) = (offer.generation, offer.offset);
        world.memories.slots((offered.source, generation), 0, 0)?;
        let Some(replid) = offer.replid else { return Err(Lost("it has no history")) };
        let Some(capture) = self.captures.get_mut(&job) else { return Ok(()) };
        let with_stream = capture.with_stream;
        if !with_stream {
            let journal = self.journal.and_then(|stream| world.memories.journal((self.index, stream)));
            let first = journal.map_or(0, |journal| journal.first);
            reaches(first, offset).map_err(|_| Lost("the journal here does not reach back"))?;
        }
        capture.replid = Some(replid);
        let origin = Origin { generation, history: replid, offset };
        world.memories.begin_snapshot((self.index, generation), origin, u64::from(offer.snapshot.slots));
        if with_stream {
            self.begin_journal(world, origin);
            self.watched = Some(Watched::new(world.instant(), offset));
        }
        self.nothing_published();
        self.goes_on_with(job, if with_stream { Step::Records } else { Step::Slots });
        self.event(world, CaptureEvent::Started { generation, replid, offset });
        Ok(())
    }

    /// Copies what the first one has of the stream, and then asks the server for the rest.
    fn copy_records(&mut self, world: &mut World, job: u64, offered: &Offered) -> Result<(), Lost> {
        let (offer, key) = (&offered.offer, (self.index, offered.offer.generation));
        let (Some(end), Some(replid)) = (world.memories.journal(key).map(|journal| journal.end()), offer.replid) else {
            return Err(Lost("the journal here was revoked"));
        };
        let bytes = world.memories.stream((offered.source, offer.journal.generation), end + 1, STEP_BYTES)?;
        if !bytes.is_empty() {
            let now = world.instant();
            self.watched.iter_mut().for_each(|watched| watched.stream(now, &bytes));
            world.memories.append(key, &bytes);
            return Ok(());
        }
        world.jobs.push((self.options.captured, "CopyRecords".to_owned()));
        if !self.reaches_the_server(world) {
            return Err(Lost("the server here is not reached"));
        }
        let said = facts(world, self.options.captured);
        let asks = continues(&said, replid, end).map_err(|_| Lost("the server here does not continue there"))?;
        if let Err(why) = said.covers(asks.0, asks.1 - 1, 0) {
            let index = self.index;
            self.finding =
                Some(format!("source {index} asks its server for what it does not have, which is a fork: {why}"));
        }
        let Some(capture) = self.captures.get_mut(&job) else { return Ok(()) };
        (capture.asks, capture.stage) = (Some(asks), Stage::Joining);
        self.goes_on_with(job, Step::Link);
        self.dial(world, job);
        Ok(())
    }

    /// The server continues the stream behind the copied part, under this replid.
    pub(crate) fn copy_is_linked(&mut self, world: &mut World, job: u64, replid: remora_redis::ReplId) {
        let Some(capture) = self.captures.get_mut(&job) else { return };
        let (Some(asked), generation) = (capture.replid, capture.generation) else { return };
        let end = world.memories.journal((self.index, generation)).map_or(0, |journal| journal.end());
        if is_same_history(asked, replid, end).is_err() {
            return self.fail_copy(world, job, "the server here has another history");
        }
        capture.stage = Stage::Following;
        self.watched.iter_mut().for_each(Watched::resumed);
        world.count("standby: the server continues a copy");
        world.jobs.push((self.options.captured, "CopyLinked".to_owned()));
        self.goes_on_with(job, Step::Slots);
        self.next_step(world, job);
    }

    fn copy_slots(&mut self, world: &mut World, job: u64, offered: &Offered) -> Result<(), Lost> {
        let Some(copy) = self.captures.get_mut(&job).and_then(|capture| capture.copy.as_mut()) else { return Ok(()) };
        let generation = offered.offer.generation;
        let key = (self.index, generation);
        let (slots, end) = world.memories.slots((offered.source, generation), copy.next_slot, STEP_SLOTS)?;
        copy.next_slot += slots.len() as u64;
        let is_whole = end == Some(copy.next_slot);
        for slot in slots {
            if world.memories.push(key, slot) != Some(true) {
                return Err(Lost("there is no room here"));
            }
        }
        if !is_whole {
            return Ok(());
        }
        world.memories.finish(key);
        if let Some(capture) = self.captures.get_mut(&job) {
            capture.copy = None;
            if !capture.with_stream {
                self.captures.remove(&job);
            }
        }
        let bytes = world.memories.snapshot(key).map_or(0, |snapshot| snapshot.published());
        self.event(world, CaptureEvent::Completed { generation, bytes });
        Ok(())
    }

    pub(crate) fn fail_copy(&mut self, world: &mut World, job: u64, why: &'static str) {
        let Some(capture) = self.captures.remove(&job) else { return };
        world.end_all(End::Capture(self.index, job));
        world.count(&format!("standby: no copy: {why}"));
        let (generation, error) = (capture.generation, CaptureError::First(why.to_owned()));
        self.event(world, CaptureEvent::Failed { generation, error });
    }

    /// A capture was stopped by the source itself. If it was a copy, its thread says so.
    pub(crate) fn copy_was_stopped(&mut self, world: &mut World, generation: u64) {
        let stopped = CaptureEvent::Failed { generation, error: CaptureError::Stopped };
        self.copy_says(world, &stopped);
    }

    // ---- the first one's side ----

    /// Where the standbys that have joined serve.
    fn standbys(&self) -> Vec<String> {
        self.sessions.values().filter(|peer| !peer.done).filter_map(|peer| peer.standby_at.clone()).collect()
    }

    /// Tells a replica that has an offer, or all such, where the standbys serve.
    pub(crate) fn tell_of_standbys(&self, world: &mut World, to: Option<u64>) {
        let addresses = self.standbys();
        if addresses.is_empty() && to.is_some() {
            return;
        }
        let replicas = self.machine.status().replicas.iter();
        let told = replicas.filter(|(session, replica)| {
            replica.generation.is_some() && !replica.is_standby && to.is_none_or(|to| to == **session)
        });
        for (&session, _) in told {
            self.say(world, session, Said::Standbys { addresses: addresses.clone() });
        }
    }

    // ---- checks ----

    /// The source takes a snapshot of its server, which forks.
    pub(crate) fn check_fork(&mut self, world: &World) {
        let is_agent = |joined: &Option<Duration>| joined.map(|joined| world.now - joined);
        let waits = self.sessions.values().filter(|peer| peer.standby_at.is_none() && !peer.done);
        let longest = waits.filter_map(|peer| is_agent(&peer.asked)).max();
        let index = self.index;
        let finding = match (longest, self.options.standby) {
            (None, _) if !self.options.eager => {
                format!("source {index} takes a snapshot, and no replica waits for one")
            }
            (Some(waited), Some(limit)) if waited < limit => {
                format!("source {index} is a standby, and takes a snapshot for a replica that has waited {waited:?}")
            }
            _ => return,
        };
        self.finding.get_or_insert(finding);
    }

    /// Nobody reads what is gone.
    pub(crate) fn check_readers(&mut self) {
        let status = self.machine.status();
        let present = status.generation();
        let reads = |(_, replica): &(&u64, &remora_source::machine::Replica)| {
            replica.is_reading() && replica.generation != present
        };
        if let Some((session, replica)) = status.replicas.iter().find(reads) {
            let (index, name) = (self.index, &replica.name);
            self.finding = Some(format!(
                "source {index} has ended a snapshot that {name} (session {session}) still reads, and has not told it"
            ));
        }
    }
}

fn join(plan_only: bool) -> Join {
    let (name, server, zone) = ("standby".to_owned(), String::new(), String::new());
    Join { name, server, resume: None, plan_only, zone, relays: None }
}
