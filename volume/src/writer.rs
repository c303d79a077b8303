//! Writer: the one process that changes a volume. It opens the volume, numbers the writes, acknowledges them, and takes
//! copies back that were away. It decides only: events go in, actions come out.
//!
//! ```text
//!   Asking ──▶ Promising ──▶ Levelling ──▶ Marking ──▶ Serving
//!     who holds   obey no      as many copies   the         writes, acknowledged at `hold` copies
//!     what?       older        as must hold     generation
//!                 writer       a write are the  begins
//!                              same
//! ```
//!
//! - `opening`: from the first question to the mark.
//! - `serving`: writes, acknowledgements, copies that come and go. `reading`: reads. `flushing`: what is durable.
//!   `space`: copies that refuse a write for lack of space.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[cfg(test)]
use crate::rules::Mutant;
use crate::rules::{Answer, Generation, Holder, Request, ServerId, Standing, State, Version};
use crate::shape::Copies;

/// What the writer wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this to that server, behind everything sent to it before.
    Send(ServerId, Request),
    /// Close the connection to that server: it is out of step, or has been given up.
    Disconnect(ServerId),
    /// The volume can be read and written. Until the first write, each of its blocks is as at this server.
    Serving {
        /// The copy from which all others were levelled.
        source: ServerId,
        /// Too many servers have lost power or did not answer: writes that were acknowledged and never flushed may be
        /// missing. What is there is what the volume held at one moment, at or after the last flush.
        may_lack_tail: bool,
    },
    /// Every write up to this one is held by as many copies as must hold it.
    Acknowledge(Version),
    /// Every write up to this one is durable at as many copies as must hold it.
    Flushed(Version),
    /// Read the blocks of this read out of the region of that server, and the line after them: [`Writer::looked`].
    Look(ServerId, u64),
    /// What was answered to this read, or seen, may be given to the reader.
    Read(u64),
    /// Nothing more can be done.
    End(End),
}

/// Why a writer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// Another writer has opened the volume.
    #[error("another writer has opened the volume, with generation {by}")]
    Fenced {
        /// Its generation.
        by: Generation,
    },
    /// Too few servers answered that remember the volume.
    #[error("{found} of the servers that hold the volume answered, and {needed} are needed")]
    TooFew {
        /// Servers that answered and remember.
        found: usize,
        /// Servers that are needed.
        needed: usize,
    },
    /// No copy that could be reached has every write that may have been acknowledged.
    #[error(
        "no copy within reach is whole up to {claim}, which another one once held; a server that holds it must come back"
    )]
    NoWholeCopy {
        /// The version up to which a copy is needed.
        claim: Version,
    },
    /// Every server was lost at once.
    #[error("no server of the volume can be reached any more; open the volume again")]
    NoCopyLeft,
    /// Generations have run out.
    #[error("the volume has had as many writers as it can have")]
    NoMoreGenerations,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Asking,
    Promising,
    Levelling { source: ServerId },
    Marking { source: ServerId },
    Serving,
    Ended,
}

/// See the module's text.
#[derive(Debug)]
pub struct Writer {
    copies: Copies,
    id: u64,
    holder: Option<Holder>,
    phase: Phase,
    parts: Parts,
    /// The last write.
    last: Version,
    /// The last write that was acknowledged.
    acknowledged: Version,
    /// The number of the last question for the others.
    questions: u64,
    /// The lenders that were given to a server which is not whole yet.
    tried: BTreeMap<ServerId, BTreeSet<ServerId>>,
    reads: Reads,
    flushing: Flushing,
    /// See [`Action::Serving`].
    may_lack_tail: bool,
    actions: VecDeque<Action>,
}

impl Writer {
    /// Begins to open a volume. `id` is a random number.
    pub fn open(copies: Copies, id: u64) -> Writer {
        let parts = Parts::asked(copies.number());
        let mut writer = Writer {
            copies,
            id,
            holder: None,
            phase: Phase::Asking,
            parts,
            last: Version::NONE,
            acknowledged: Version::NONE,
            questions: 0,
            tried: BTreeMap::new(),
            reads: Reads::default(),
            flushing: Flushing::default(),
            may_lack_tail: false,
            actions: VecDeque::new(),
        };
        for number in 0..copies.number() {
            writer.send(ServerId(number), Request::Ask);
        }
        writer
    }

    /// The next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether the volume can be written.
    pub fn is_serving(&self) -> bool {
        self.phase == Phase::Serving
    }

    /// Whether it does nothing more.
    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Its turn; `None` before it has one.
    pub fn generation(&self) -> Option<Generation> {
        self.holder.map(|holder| holder.generation)
    }

    /// The servers whose copies are whole: they get every write, or have refused one that is not acknowledged, for
    /// lack of space.
    pub fn members(&self) -> impl Iterator<Item = ServerId> {
        self.parts.whole().into_iter().map(|(_, server)| server)
    }

    /// Its turn, as servers know it; `None` before it has one.
    pub fn holder(&self) -> Option<Holder> {
        self.holder
    }

    /// An answer has arrived.
    pub fn answered(&mut self, server: ServerId, answer: Answer) {
        if self.has_ended() || self.parts.of(server) == Part::Out {
            return;
        }
        if let Answer::Fenced { by } = answer {
            return self.end(End::Fenced { by });
        }
        match self.phase {
            Phase::Serving => self.answered_serving(server, answer),
            _ => self.answered_opening(server, answer),
        }
    }

    /// A connection is lost, or a server takes too long: it is left out.
    pub fn lost(&mut self, server: ServerId) {
        if self.has_ended() || self.parts.of(server) == Part::Out {
            return;
        }
        self.parts.set(server, Part::Out);
        match self.phase {
            Phase::Serving => {
                if self.is_without_copies() {
                    return self.end(End::NoCopyLeft);
                }
                self.forget(server);
            }
            _ => self.go_on(),
        }
    }

    fn send(&mut self, server: ServerId, request: Request) {
        self.actions.push_back(Action::Send(server, request));
    }

    /// Whether no copy is left from which another one could be taken back.
    fn is_without_copies(&self) -> bool {
        let is_left = |part| matches!(part, Part::Member(_) | Part::Behind | Part::Refused(_) | Part::Full { .. });
        self.parts.which(is_left).is_empty()
    }

    /// What a server of a writer that serves was asked is not answered.
    fn forget(&mut self, server: ServerId) {
        self.reads.lost(server);
        self.flushing.lost(server);
        self.acknowledge();
        self.go_on_reading();
    }

    /// Gives a server up until it is taken back.
    fn leave_out(&mut self, server: ServerId) {
        self.parts.set(server, Part::Out);
        self.actions.push_back(Action::Disconnect(server));
    }

    fn end(&mut self, end: End) {
        self.phase = Phase::Ended;
        self.actions.push_back(Action::End(end));
    }

    fn answered_opening(&mut self, server: ServerId, answer: Answer) {
        let part = match (self.parts.of(server), answer) {
            (Part::Asked, Answer::Standing(standing)) => Part::Answered(standing),
            (Part::Promising, Answer::Promised(standing)) => Part::Promised(standing),
            (Part::Levelling, Answer::Whole { .. }) => Part::Level,
            (Part::Marking, Answer::Written { applied, durable }) => {
                self.flushing.answered(server, applied, durable);
                Part::Member(applied)
            }
            _ => return,
        };
        self.parts.set(server, part);
        self.go_on();
    }

    /// Takes the next step once no answer is missing.
    fn go_on(&mut self) {
        let waits = |part| matches!(part, Part::Asked | Part::Promising | Part::Levelling | Part::Marking);
        if !self.parts.which(waits).is_empty() {
            return;
        }
        match self.phase {
            Phase::Asking => self.ask_for_promises(),
            Phase::Promising => self.choose(),
            Phase::Levelling { source } => self.begin_generation(source),
            Phase::Marking { source } => self.serve(source),
            Phase::Serving | Phase::Ended => {}
        }
    }

    fn ask_for_promises(&mut self) {
        let standings = self.parts.standings(|part| match part {
            Part::Answered(standing) => Some(standing),
            _ => None,
        });
        if self.lacks(standings.iter().filter(|(_, standing)| counts(standing)).count(), self.copies.promises()) {
            return;
        }
        let generations = standings.iter().map(|(_, standing)| {
            let promised = standing.promised.map_or(Generation::NONE, |holder| holder.generation);
            promised.max(standing.claim.generation()).max(standing.applied.generation())
        });
        let Some(generation) = generations.max().unwrap_or_default().next() else {
            return self.end(End::NoMoreGenerations);
        };
        let holder = Holder { generation, writer: self.id };
        self.holder = Some(holder);
        self.phase = Phase::Promising;
        for (server, standing) in standings {
            if counts(&standing) {
                self.parts.set(server, Part::Promising);
                self.send(server, Request::Promise(holder));
            } else {
                self.leave_out(server);
            }
        }
    }

    /// Chooses the copy that has every write which may have been acknowledged, or read.
    fn choose(&mut self) {
        let Some(holder) = self.holder else { return };
        let promised = self.parts.standings(|part| match part {
            Part::Promised(standing) => Some(standing),
            _ => None,
        });
        if self.lacks(promised.len(), self.copies.promises()) {
            return;
        }
        let claim = promised.iter().map(|(_, standing)| standing.claim).max().unwrap_or_default();
        let whole = promised.iter().filter(|(_, standing)| standing.state == State::Whole);
        let Some(&(source, best)) = whole.max_by_key(|(_, standing)| standing.applied) else {
            return self.end(End::NoWholeCopy { claim });
        };
        if best.applied < claim {
            return self.end(End::NoWholeCopy { claim });
        }
        // Of all servers that have it, one is then among these, or has lost it with its power.
        let certain = promised.iter().filter(|(_, standing)| !standing.is_cut).count();
        self.may_lack_tail = certain < self.copies.number() - self.copies.hold() + 1;
        self.phase = Phase::Levelling { source };
        self.parts.set(source, Part::Level);
        for (server, standing) in promised.into_iter().filter(|&(server, _)| server != source) {
            let is_same = standing.state == State::Whole && standing.applied == best.applied;
            if is_same {
                self.parts.set(server, Part::Level);
            } else {
                self.parts.set(server, Part::Levelling);
                self.send(server, Request::CatchUp { holder, lender: source, since: best.applied });
            }
        }
        self.go_on();
    }

    /// As many copies are the same as must hold a write: from here on they are this writer's.
    fn begin_generation(&mut self, source: ServerId) {
        let Some(holder) = self.holder else { return };
        let level = self.parts.which(|part| part == Part::Level);
        if self.lacks(level.len(), self.copies.hold()) {
            return;
        }
        self.phase = Phase::Marking { source };
        for server in level {
            #[cfg(test)]
            if Mutant::NotMarked.is_active() {
                self.parts.set(server, Part::Member(holder.generation.start()));
                continue;
            }
            self.parts.set(server, Part::Marking);
            self.send(server, Request::Mark { holder, may_lack_tail: self.may_lack_tail });
        }
        #[cfg(test)]
        self.go_on();
    }

    fn serve(&mut self, source: ServerId) {
        let Some(holder) = self.holder else { return };
        let members = self.parts.members().len();
        if self.lacks(members, self.copies.hold()) {
            return;
        }
        self.phase = Phase::Serving;
        (self.last, self.acknowledged) = (holder.generation.start(), holder.generation.start());
        self.actions.push_back(Action::Serving { source, may_lack_tail: self.may_lack_tail });
        self.flushed();
    }

    /// Ends if too few were found.
    fn lacks(&mut self, found: usize, needed: usize) -> bool {
        if found < needed {
            self.end(End::TooFew { found, needed });
        }
        found < needed
    }

    /// Begins the next write. Returns its version; `None` if the volume cannot be written, or the generation has no
    /// more numbers.
    pub fn write(&mut self) -> Option<Version> {
        let holder = self.holder.filter(|_| self.is_serving())?;
        let version = self.last.next()?;
        self.last = version;
        for server in self.parts.which(|part| matches!(part, Part::Member(_) | Part::Behind)) {
            self.send(server, Request::Write { holder, version });
        }
        Some(version)
    }

    /// The last write that was acknowledged.
    pub fn acknowledged(&self) -> Version {
        self.acknowledged
    }

    /// A server that was out can be reached again. Its copy is taken back.
    pub fn take_back(&mut self, server: ServerId) {
        match self.parts.of(server) {
            Part::Out if self.is_serving() => {
                self.parts.set(server, Part::Asked);
                self.send(server, Request::Ask);
            }
            Part::Refused(_) => self.send(server, Request::Ask),
            _ => {}
        }
    }

    fn answered_serving(&mut self, server: ServerId, answer: Answer) {
        match (self.parts.of(server), answer) {
            (Part::Refused(_), Answer::Standing(standing)) => self.returned(server, standing),
            (Part::Asked, Answer::Standing(standing)) => {
                let must_confirm = !standing.remembers();
                #[cfg(test)]
                let must_confirm = must_confirm && !Mutant::NotConfirmed.is_active();
                if must_confirm { self.ask_the_others(server) } else { self.begin_catch_up(server) }
            }
            (Part::Behind, Answer::Whole { applied }) => {
                self.tried.remove(&server);
                // Nothing is known to be durable here.
                let durable = Version::NONE;
                #[cfg(test)]
                let durable = if Mutant::BehindCounts.is_active() { applied } else { durable };
                self.flushing.answered(server, applied, durable);
                self.is_at(server, applied);
            }
            (Part::Member(_), Answer::Written { applied, durable }) => {
                self.flushing.answered(server, applied, durable);
                self.is_at(server, applied);
            }
            (Part::Full { applied: before, .. }, Answer::Written { applied, durable }) => {
                self.flushing.answered(server, applied, durable);
                if applied > before { self.has_applied_again(server, applied) } else { self.go_on_flushing() }
            }
            (_, Answer::Read { number, newest }) => {
                self.reads.answered(server, number, newest);
                self.go_on_reading();
            }
            (_, Answer::Confirmed { question }) => self.confirmed(server, question),
            _ => {}
        }
    }

    /// A member has applied every write up to this one.
    fn is_at(&mut self, server: ServerId, applied: Version) {
        self.parts.set(server, Part::Member(applied));
        self.acknowledge();
        self.go_on_reading();
        self.go_on_flushing();
    }

    /// A server has lost its memory, and does not know whether it has promised to obey another writer. That writer
    /// would have asked enough of the others.
    fn ask_the_others(&mut self, server: ServerId) {
        let Some(holder) = self.holder.filter(|_| !self.parts.whole().is_empty()) else {
            return self.leave_out(server);
        };
        self.questions += 1;
        let question = self.questions;
        self.parts.set(server, Part::Confirming { question, confirmed: [false; Copies::MOST] });
        for (_, other) in self.parts.whole() {
            self.send(other, Request::Confirm { holder, question });
        }
    }

    /// An answer to an earlier question does not count: another writer may have come since.
    fn confirmed(&mut self, by: ServerId, to: u64) {
        for server in self.parts.which(|part| matches!(part, Part::Confirming { .. })) {
            let Part::Confirming { question, mut confirmed } = self.parts.of(server) else { continue };
            let is_to_this = question == to;
            if let Some(yes) = confirmed.get_mut(by.0).filter(|_| is_to_this) {
                *yes = true;
            }
            self.parts.set(server, Part::Confirming { question, confirmed });
            if confirmed.iter().filter(|&&yes| yes).count() >= self.copies.hold() {
                self.begin_catch_up(server);
            }
        }
    }

    fn begin_catch_up(&mut self, server: ServerId) {
        let (Some(holder), Some(lender)) = (self.holder, self.lender_for(server)) else {
            return self.leave_out(server);
        };
        self.parts.set(server, Part::Behind);
        self.send(server, Request::CatchUp { holder, lender, since: self.last });
    }

    /// The member that is ahead can lend soonest. But the borrower may not reach it: each one is tried before one is
    /// tried again.
    fn lender_for(&mut self, server: ServerId) -> Option<ServerId> {
        let members = self.parts.members();
        let tried = self.tried.entry(server).or_default();
        if members.iter().all(|(_, member)| tried.contains(member)) {
            tried.clear();
        }
        let (_, lender) = members.into_iter().filter(|(_, member)| !tried.contains(member)).max()?;
        tried.insert(lender);
        Some(lender)
    }

    /// Acknowledges what enough copies have applied.
    fn acknowledge(&mut self) {
        let hold = self.copies.hold();
        #[cfg(test)]
        let hold = if Mutant::AcknowledgedEarly.is_active() { hold - 1 } else { hold };
        let mut applied: Vec<Version> = self.parts.whole().into_iter().map(|(applied, _)| applied).collect();
        applied.sort_unstable_by(|a, b| b.cmp(a));
        let held = hold.checked_sub(1).and_then(|last| applied.get(last)).copied();
        if let Some(held) = held.filter(|&held| held > self.acknowledged) {
            self.acknowledged = held;
            self.actions.push_back(Action::Acknowledge(held));
            self.give_up_full_copies();
        }
    }

    /// Begins a flush of every write so far. Returns the last one: [`Action::Flushed`] says when it is durable, unless
    /// [`Writer::flushed_through`] says so already.
    pub fn flush(&mut self) -> Version {
        if self.flushed_through() < self.last {
            self.flushing.wanted = self.last;
            self.go_on_flushing();
        }
        self.last
    }

    /// The last write that is durable at as many copies as must hold it.
    pub fn flushed_through(&self) -> Version {
        self.flushing.flushed
    }

    /// Asks those members whose stores lack what is wanted, and says what has become durable.
    fn go_on_flushing(&mut self) {
        self.flushed();
        let Some(holder) = self.holder else { return };
        if self.flushing.flushed >= self.flushing.wanted {
            return;
        }
        for (applied, server) in self.parts.whole() {
            // A copy that lacks space is sent what it has refused after this question.
            let sent = if self.is_short_of_space(server) { applied } else { self.last };
            if self.flushing.must_ask(server, applied, sent) {
                self.send(server, Request::Flush(holder));
            }
        }
    }

    fn flushed(&mut self) {
        let hold = self.copies.hold();
        #[cfg(test)]
        let hold = if Mutant::FlushedEarly.is_active() { hold - 1 } else { hold };
        let durable_at = |(_, server)| self.flushing.durable.get(&server).copied().unwrap_or_default();
        let mut durable: Vec<Version> = self.parts.whole().into_iter().map(durable_at).collect();
        durable.sort_unstable_by(|a, b| b.cmp(a));
        let held = hold.checked_sub(1).and_then(|last| durable.get(last)).copied();
        if let Some(held) = held.filter(|&held| held > self.flushing.flushed) {
            self.flushing.flushed = held;
            self.actions.push_back(Action::Flushed(held));
        }
    }

    /// Begins a read of any blocks, of which `after` is the last write; any version at or below the first write that
    /// is under way says that there is none. Returns the read's number; `None` if the volume cannot be read.
    /// [`Action::Read`] follows, unless the writer ends before.
    pub fn read(&mut self, after: Version) -> Option<u64> {
        if !self.is_serving() {
            return None;
        }
        let number = match self.region(after) {
            Some(server) => {
                let number = self.reads.begin(Read::Looking(server), after);
                self.actions.push_back(Action::Look(server, number));
                number
            }
            None => self.reads.begin(Read::Waiting, after),
        };
        self.go_on_reading();
        Some(number)
    }

    /// From now on the region of a server can be read, until the server is lost.
    pub fn region_opened(&mut self, server: ServerId, nearness: Nearness) {
        if matches!(self.parts.of(server), Part::Member(_) | Part::Full { .. }) {
            self.reads.regions.insert(server, nearness);
        }
    }

    /// The region of a server cannot be read any more. What was to be read there is asked for.
    pub fn region_closed(&mut self, server: ServerId) {
        self.reads.regions.remove(&server);
        self.reads.leave(Read::Looking(server));
        self.go_on_reading();
    }

    /// The nearest region whose copy has applied this write.
    fn region(&self, after: Version) -> Option<ServerId> {
        let has_it = |applied: Version| {
            let has_it = applied >= after;
            #[cfg(test)]
            let has_it = has_it || Mutant::LookTooEarly.is_active();
            has_it
        };
        let members = self.parts.whole().into_iter().filter(|&(applied, _)| has_it(applied));
        let regions = members.filter_map(|(applied, server)| {
            let nearness = self.reads.regions.get(&server)?;
            Some((*nearness, applied, server))
        });
        regions.max().map(|(_, _, server)| server)
    }

    /// The blocks of a read were read out of a server's region; `None`: they could not be, so a server is asked.
    /// Returns whether this is what the read returns.
    pub fn looked(&mut self, server: ServerId, number: u64, seen: Option<Seen>) -> bool {
        let is_due = self.reads.under_way.get(&number).is_some_and(|(read, _)| *read == Read::Looking(server));
        let (Some(holder), true) = (self.holder, is_due && !self.has_ended()) else { return false };
        let mut found = Read::Waiting;
        if let Some(Seen { newest, line }) = seen {
            let obeys = line.promised == Some(holder);
            let later = line.promised.filter(|other| *other != holder && other.generation >= holder.generation);
            #[cfg(test)]
            let (obeys, later) = if Mutant::LineIgnored.is_active() { (true, None) } else { (obeys, later) };
            if let Some(other) = later {
                self.end(End::Fenced { by: other.generation });
                return false;
            }
            if obeys && line.state == State::Whole {
                found = Read::Answered(newest);
            }
        }
        self.reads.proceed(number, Read::Looking(server), found);
        self.go_on_reading();
        found != Read::Waiting
    }

    /// Asks for the reads that wait, and gives out those that are ready. After everything that can change either.
    fn go_on_reading(&mut self) {
        let acknowledged = self.acknowledged;
        let ready = self.reads.take_ready(acknowledged);
        self.actions.extend(ready.into_iter().map(Action::Read));
        // The one that is ahead answers soonest. It has applied what was sent before the read when it answers.
        let member = self.parts.members().into_iter().max().map(|(_, server)| server);
        #[cfg(test)]
        let member =
            self.parts.which(|part| part == Part::Behind).pop().filter(|_| Mutant::ReadBehind.is_active()).or(member);
        if let Some(server) = member {
            return self.ask(server, self.last);
        }
        for (server, through) in self.full_copies_to_read() {
            self.ask(server, through);
        }
    }

    /// Asks a server for the reads that wait, of blocks that no write behind `through` changes.
    fn ask(&mut self, server: ServerId, through: Version) {
        let Some(holder) = self.holder else { return };
        for number in self.reads.ask(server, through) {
            self.send(server, Request::Read { holder, number });
        }
    }

    /// A server has refused what it was sent because it has no space for it, and its connection is over.
    /// Returns whether it is to be connected to again soon.
    pub fn refused(&mut self, server: ServerId) -> bool {
        let applied = match self.parts.of(server) {
            Part::Member(applied) | Part::Full { applied, .. } | Part::Refused(applied) => applied,
            _ => Version::NONE,
        };
        let is_kept = self.is_serving() && applied != Version::NONE && applied >= self.acknowledged;
        if is_kept {
            self.parts.set(server, Part::Refused(applied));
            self.forget(server);
            // What this one was asked about them is not answered.
            for empty in self.parts.which(|part| matches!(part, Part::Confirming { .. })) {
                self.leave_out(empty);
            }
        } else {
            self.lost(server);
        }
        is_kept
    }

    /// Sends a server that has refused a write the same one again: there may be space.
    pub fn try_again(&mut self, server: ServerId) {
        let (Part::Full { applied, is_tried: false }, Some(holder)) = (self.parts.of(server), self.holder) else {
            return;
        };
        if let Some(version) = applied.next() {
            self.parts.set(server, Part::Full { applied, is_tried: true });
            self.send(server, Request::Write { holder, version });
        }
    }

    /// A server that had no space has applied the writes up to this one. It gets the next one, as each may be the
    /// one for which there is no space, and is a member again when it has all.
    fn has_applied_again(&mut self, server: ServerId, applied: Version) {
        if applied >= self.last {
            return self.is_at(server, applied);
        }
        self.is_full(server, applied);
        self.try_again(server);
    }

    /// Whether a server has refused a write and gets none at present.
    pub fn is_waiting_for_space(&self, server: ServerId) -> bool {
        matches!(self.parts.of(server), Part::Full { is_tried: false, .. })
    }

    /// Whether a server has refused a write, and has not applied all since.
    pub fn is_short_of_space(&self, server: ServerId) -> bool {
        matches!(self.parts.of(server), Part::Refused(_) | Part::Full { .. })
    }

    /// The servers that lack space, if writes cannot be acknowledged without one of them.
    pub fn lacks_space(&self) -> Vec<ServerId> {
        let short = self.parts.which(|part| matches!(part, Part::Refused(_) | Part::Full { .. }));
        let is_enough = short.is_empty() || self.has_ended() || self.parts.members().len() >= self.copies.hold();
        if is_enough { Vec::new() } else { short }
    }

    /// Whether a copy that has refused a write is still whole up to all that was acknowledged.
    fn has_what_is_acknowledged(&self, standing: Standing) -> bool {
        let has_it = standing.applied >= self.acknowledged;
        standing.state == State::Whole && standing.promised == self.holder && has_it
    }

    /// A server that has refused a write can be reached again, and says how its copy stands.
    fn returned(&mut self, server: ServerId, standing: Standing) {
        if !self.has_what_is_acknowledged(standing) {
            self.parts.set(server, Part::Out);
            if self.is_without_copies() {
                return self.end(End::NoCopyLeft);
            }
            self.parts.set(server, Part::Asked);
            return self.answered_serving(server, Answer::Standing(standing));
        }
        self.is_full(server, standing.applied);
    }

    fn is_full(&mut self, server: ServerId, applied: Version) {
        self.parts.set(server, Part::Full { applied, is_tried: false });
        self.acknowledge();
        self.go_on_reading();
        self.go_on_flushing();
    }

    /// What was acknowledged is not kept, so it cannot be sent again.
    fn give_up_full_copies(&mut self) {
        let acknowledged = self.acknowledged;
        let is_late = |part| matches!(part, Part::Full { applied, .. } if applied < acknowledged);
        for server in self.parts.which(is_late) {
            self.parts.set(server, Part::Out);
            self.actions.push_back(Action::Disconnect(server));
            self.reads.lost(server);
            self.flushing.lost(server);
        }
    }

    /// The copies that lack space, each with the last write that a read there can be of.
    fn full_copies_to_read(&self) -> Vec<(ServerId, Version)> {
        let full = |part| if let Part::Full { applied, .. } = part { Some(applied) } else { None };
        let mut copies = self.parts.applied(full);
        copies.sort_unstable_by(|a, b| b.cmp(a));
        let through = |applied| {
            #[cfg(test)]
            let applied = if Mutant::FullCopyIsRead.is_active() { self.last } else { applied };
            applied
        };
        copies.into_iter().map(|(applied, server)| (server, through(applied))).collect()
    }
}

// What each server is to the writer.

/// What a server is to the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// It was not asked, or its connection is lost.
    Out,
    /// It was asked how it stands.
    Asked,
    /// It has answered.
    Answered(Standing),
    /// It was asked to promise.
    Promising,
    /// It has promised.
    Promised(Standing),
    /// It takes what differs from the source.
    Levelling,
    /// Its copy is the source's.
    Level,
    /// It was asked to mark the generation.
    Marking,
    /// It has lost its memory, and the others are asked whether this writer is still the one.
    Confirming { question: u64, confirmed: [bool; Copies::MOST] },
    /// It gets every write, and takes older blocks from another copy.
    Behind,
    /// It is whole, and has applied every write up to this version.
    Member(Version),
    /// It was whole up to this version and refused the next write, which is not acknowledged: its server has no space.
    /// Its connection is over and is made again.
    Refused(Version),
    /// It has refused a write, and its connection is there again. It is whole up to this version and can be read.
    Full {
        /// The last write that it has applied.
        applied: Version,
        /// Whether it was sent the next write again. It gets no other one.
        is_tried: bool,
    },
}

/// The part of each server.
#[derive(Debug)]
struct Parts(BTreeMap<ServerId, Part>);

impl Parts {
    /// All servers were asked how they stand.
    fn asked(number: usize) -> Parts {
        Parts((0..number).map(|number| (ServerId(number), Part::Asked)).collect())
    }

    fn of(&self, server: ServerId) -> Part {
        self.0.get(&server).copied().unwrap_or(Part::Out)
    }

    fn set(&mut self, server: ServerId, part: Part) {
        self.0.insert(server, part);
    }

    /// The servers of which this holds.
    fn which(&self, holds: impl Fn(Part) -> bool) -> Vec<ServerId> {
        self.0.iter().filter(|&(_, &part)| holds(part)).map(|(&server, _)| server).collect()
    }

    /// The servers that have answered so, and what they said.
    fn standings(&self, of: impl Fn(Part) -> Option<Standing>) -> Vec<(ServerId, Standing)> {
        self.0.iter().filter_map(|(&server, &part)| Some((server, of(part)?))).collect()
    }

    /// The whole copies, and what they have applied: the members, and those that lack space.
    fn whole(&self) -> Vec<(Version, ServerId)> {
        self.applied(|part| match part {
            Part::Member(applied) | Part::Full { applied, .. } => Some(applied),
            _ => None,
        })
    }

    /// The members, and what they have applied.
    fn members(&self) -> Vec<(Version, ServerId)> {
        self.applied(|part| if let Part::Member(applied) = part { Some(applied) } else { None })
    }

    /// Servers of a kind, and what they have applied.
    fn applied(&self, of: impl Fn(Part) -> Option<Version>) -> Vec<(Version, ServerId)> {
        self.0.iter().filter_map(|(&server, &part)| Some((of(part)?, server))).collect()
    }
}

// Finds what must not be lost, makes sure that no other writer changes it, and makes enough copies the same.

/// Whether the promise of this server counts.
fn counts(standing: &Standing) -> bool {
    #[cfg(test)]
    if Mutant::EmptyCounts.is_active() {
        return true;
    }
    standing.remembers()
}

// What is durable. A flush is complete when as many whole copies as must hold a write say that everything up
// to the last write before it is durable there.
//
// A copy without a store says that what it has applied is durable. It is not asked: its answers to writes say it.

/// What is known of the copies' durability.
#[derive(Debug, Default)]
struct Flushing {
    /// What is durable at each member.
    durable: BTreeMap<ServerId, Version>,
    /// The last write before the last flush that each was asked for.
    asked: BTreeMap<ServerId, Version>,
    /// Servers that have a store: they once had applied what was not durable.
    stores: BTreeSet<ServerId>,
    /// The last write before the last flush.
    wanted: Version,
    /// The last write that is durable at enough copies.
    flushed: Version,
}

impl Flushing {
    /// A member has answered.
    fn answered(&mut self, server: ServerId, applied: Version, durable: Version) {
        if durable < applied {
            self.stores.insert(server);
        }
        self.durable.insert(server, durable);
    }

    /// A server is out, and what it was asked is not answered.
    fn lost(&mut self, server: ServerId) {
        self.durable.remove(&server);
        self.asked.remove(&server);
    }

    /// Whether a copy that was sent the writes up to `sent` must be asked: it has not all of them that is wanted, and
    /// its answers to writes will not say it.
    fn must_ask(&mut self, server: ServerId, applied: Version, sent: Version) -> bool {
        let wanted = self.wanted.min(sent);
        let durable = self.durable.get(&server).copied().unwrap_or_default();
        let is_store = self.stores.contains(&server) || (applied >= wanted && durable < applied);
        let is_asked = self.asked.get(&server).is_some_and(|&asked| asked >= wanted);
        let must = is_store && !is_asked && durable < wanted;
        if must {
            self.asked.insert(server, wanted);
        }
        must
    }
}

// Any member can answer, as it has applied every write that was sent before the read when it answers. What it
// answers is given out once every write that it returns is acknowledged. So nothing that was read is ever lost, and a
// read of blocks that are not being written waits for no write.
//
// ```text
//   begin ─▶ Looking ─────────── what was seen ────────▶ Answered ── acknowledged ──▶ given out
//     │         │ in vain                                    ▲
//     ╰─────────┴──────▶ Waiting ──▶ Asked ── the answer ────╯
// ```
//
// A member whose region can be read is not asked: the blocks are *looked at*, by rules of their own.
//
// - Only if the member is known to have applied the last write of these blocks. A look does not wait behind writes.
// - The line is read after the blocks. It must say that the server obeys this writer: then it did so when the blocks
//   were read, as a promise is not taken back. If it obeys a later writer, this one has ended.
// - What was seen of a server that was out meanwhile does not count.

/// Where a read is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    /// There is no member that could answer it.
    Waiting,
    /// Its blocks are being read out of this server's region.
    Looking(ServerId),
    /// A server was asked.
    Asked(ServerId),
    /// It was answered, and this write is not acknowledged yet.
    Answered(Version),
}

/// The reads under way, by number.
#[derive(Debug, Default)]
struct Reads {
    last: u64,
    /// Each with the last write of its blocks.
    under_way: BTreeMap<u64, (Read, Version)>,
    /// The servers whose regions can be read, and how near they are.
    regions: BTreeMap<ServerId, Nearness>,
}

/// How near a region is. The nearest one is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// It is read over a network.
    Far,
    /// It is mapped into this process.
    Here,
}

/// What was read out of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The last write of any of the blocks.
    pub newest: Version,
    /// How the copy stood, read after the blocks.
    pub line: Standing,
}

/// Whether blocks that were seen may be given out at once, by a reader who knows that every write of them is among
/// those which are `acknowledged`. `before` is the line before the blocks were read.
pub fn may_be_given_out(holder: Holder, acknowledged: Version, before: Standing, seen: Seen) -> bool {
    let obeys = |line: Standing| line.promised == Some(holder) && line.state == State::Whole;
    let has_all = before.applied >= acknowledged;
    #[cfg(test)]
    let has_all = has_all || Mutant::LookTooEarly.is_active();
    obeys(before) && has_all && obeys(seen.line) && seen.newest <= acknowledged
}

impl Reads {
    fn begin(&mut self, read: Read, after: Version) -> u64 {
        self.last += 1;
        self.under_way.insert(self.last, (read, after));
        self.last
    }

    /// A server has answered, or was looked at. What comes of another one than the last does not count.
    fn proceed(&mut self, number: u64, from: Read, to: Read) {
        if let Some((read, _)) = self.under_way.get_mut(&number).filter(|(read, _)| *read == from) {
            *read = to;
        }
    }

    /// A server has answered.
    fn answered(&mut self, server: ServerId, number: u64, newest: Version) {
        self.proceed(number, Read::Asked(server), Read::Answered(newest));
    }

    /// A server is out: what it was asked is asked elsewhere.
    fn lost(&mut self, server: ServerId) {
        self.regions.remove(&server);
        self.leave(Read::Asked(server));
        self.leave(Read::Looking(server));
    }

    /// Reads that are there wait for another way.
    fn leave(&mut self, there: Read) {
        for (read, _) in self.under_way.values_mut().filter(|(read, _)| *read == there) {
            *read = Read::Waiting;
        }
    }

    /// The reads that wait for a copy, of blocks that no write behind `through` changes. This server is asked now.
    fn ask(&mut self, server: ServerId, through: Version) -> Vec<u64> {
        let waiting = self.under_way.iter_mut();
        let waiting = waiting.filter(|(_, (read, after))| *read == Read::Waiting && *after <= through);
        let asked = waiting.map(|(&number, (read, _))| {
            *read = Read::Asked(server);
            number
        });
        asked.collect()
    }

    /// Takes out the reads whose writes are all acknowledged.
    fn take_ready(&mut self, acknowledged: Version) -> Vec<u64> {
        let is_ready = |read: &Read| match read {
            Read::Answered(newest) => {
                let is_ready = *newest <= acknowledged;
                #[cfg(test)]
                let is_ready = is_ready || Mutant::ReadUnacknowledged.is_active();
                is_ready
            }
            _ => false,
        };
        let ready: Vec<u64> =
            self.under_way.iter().filter(|(_, (read, _))| is_ready(read)).map(|(&number, _)| number).collect();
        ready.iter().for_each(|number| _ = self.under_way.remove(number));
        ready
    }
}

// A copy that refuses a write because its server has no space for it. It answers, it is whole, and it can be
// read. It is not lost.
//
// ```text
//   Member ── refuses a write that is not acknowledged ──▶ Refused ── connected again ──▶ Full
//     ▲                                                       ▲                            │ is sent that write again
//     │                                                       ╰──────── refuses again ─────┤
//     ╰──────────────────────── has applied all of them ───────────────────────────────────╯
// ```
//
// - **What it refused is kept and sent again**, in the same order and with the same versions, until it has applied it.
//   No write behind it is applied before. So nothing is half there: a write is acknowledged once as many whole copies
//   as must hold it have applied it, as ever.
// - That is possible only while nobody was told that these writes are safe. Once others have acknowledged the write
//   that was refused, the copy is behind, and is taken back as any other.
// - A copy that gets no writes is read only where no later write has changed the blocks.

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Answer, Holder, Standing, State};
    use crate::shape::Copies;

    /// An answer of a server without a store.
    fn written(applied: Version) -> Answer {
        Answer::Written { applied, durable: applied }
    }

    fn sent(writer: &mut Writer) -> Vec<(usize, Request)> {
        std::iter::from_fn(|| writer.poll_action())
            .filter_map(|action| match action {
                Action::Send(server, request) => Some((server.0, request)),
                _ => None,
            })
            .collect()
    }

    /// A writer that serves with servers 0 and 1, and its holder. Server 2 is empty.
    fn serving() -> (Writer, Holder) {
        let copies = Copies::new(3, 2).unwrap_or_else(|| unreachable!("three copies, two hold"));
        let mut writer = Writer::open(copies, 77);
        let whole = Standing { state: State::Whole, ..Standing::default() };
        for (server, standing) in [(0, whole), (1, whole), (2, Standing::default())] {
            writer.answered(ServerId(server), Answer::Standing(standing));
        }
        for server in [0, 1] {
            writer.answered(ServerId(server), Answer::Promised(whole));
        }
        let generation = writer.generation().unwrap_or_default();
        for server in [0, 1] {
            writer.answered(ServerId(server), written(generation.start()));
        }
        assert!(writer.is_serving());
        sent(&mut writer);
        (writer, Holder { generation, writer: 77 })
    }

    #[test]
    fn a_copy_is_taken_from_each_member_before_one_is_tried_again() {
        let (mut writer, holder) = serving();
        let since = holder.generation.start();
        let behind = Standing { state: State::Behind, ..Standing::default() };
        for lender in [1, 0, 1, 0] {
            writer.take_back(ServerId(2));
            writer.answered(ServerId(2), Answer::Standing(behind));
            let catch_up = Request::CatchUp { holder, lender: ServerId(lender), since };
            assert_eq!(sent(&mut writer), [(2, Request::Ask), (2, catch_up)]);
            writer.lost(ServerId(2));
        }
    }

    #[test]
    fn a_write_is_acknowledged_once_two_of_three_have_applied_it() {
        let (mut writer, holder) = serving();
        let [one, two] = [writer.write(), writer.write()].map(Option::unwrap_or_default);
        let to = |version| [0, 1].map(|server| (server, Request::Write { holder, version }));
        assert_eq!(sent(&mut writer), [to(one), to(two)].concat());
        writer.answered(ServerId(0), written(two));
        assert_eq!(writer.poll_action(), None);
        writer.answered(ServerId(1), written(one));
        assert_eq!((writer.poll_action(), writer.acknowledged()), (Some(Action::Acknowledge(one)), one));
        assert_eq!(writer.poll_action(), Some(Action::Flushed(one)));
        // The other one is not heard of any more, and what it had applied does not count any more.
        writer.lost(ServerId(0));
        writer.answered(ServerId(1), written(two));
        assert_eq!((writer.poll_action(), writer.acknowledged()), (None, one));
    }

    #[test]
    fn an_answer_to_an_earlier_question_does_not_let_an_empty_server_in() {
        let (mut writer, holder) = serving();
        let empty = Answer::Standing(Standing::default());
        for question in [1, 2] {
            writer.take_back(ServerId(2));
            assert_eq!(sent(&mut writer), [(2, Request::Ask)]);
            writer.answered(ServerId(2), empty);
            assert_eq!(sent(&mut writer), [0, 1].map(|server| (server, Request::Confirm { holder, question })));
            if question == 1 {
                writer.lost(ServerId(2));
            }
        }
        for server in [0, 1] {
            writer.answered(ServerId(server), Answer::Confirmed { question: 1 });
        }
        assert_eq!(sent(&mut writer), []);
        writer.answered(ServerId(0), Answer::Confirmed { question: 2 });
        assert_eq!(sent(&mut writer), []);
        writer.answered(ServerId(1), Answer::Confirmed { question: 2 });
        let [(2, Request::CatchUp { since, .. })] = sent(&mut writer)[..] else { unreachable!("it is taken in") };
        assert_eq!(since, holder.generation.start());
    }

    /// A writer that serves with two copies, which have stores.
    fn flushing_serving() -> Writer {
        let copies = Copies::new(2, 2).unwrap_or_else(|| unreachable!("two copies"));
        let mut writer = Writer::open(copies, 5);
        let whole = Standing { state: State::Whole, ..Standing::default() };
        let servers = [0, 1].map(ServerId);
        servers.iter().for_each(|&server| writer.answered(server, Answer::Standing(whole)));
        servers.iter().for_each(|&server| writer.answered(server, Answer::Promised(whole)));
        let start = writer.generation().unwrap_or_default().start();
        let marked = Answer::Written { applied: start, durable: start };
        servers.iter().for_each(|&server| writer.answered(server, marked));
        assert!(writer.is_serving() && writer.flushed_through() == start);
        writer
    }

    #[test]
    fn a_flush_asks_stores_once_and_is_complete_when_enough_copies_are_durable() {
        let mut writer = flushing_serving();
        let (before, holder) = (writer.flushed_through(), writer.holder());
        let Some((write, holder)) = writer.write().zip(holder) else { unreachable!("it serves") };
        assert_eq!(writer.flush(), write);
        let sent = |writer: &mut Writer| {
            let actions: Vec<_> = std::iter::from_fn(|| writer.poll_action()).collect();
            let of = |action| match action {
                Action::Send(server, Request::Flush(by)) if by == holder => Some(server.0),
                _ => None,
            };
            (actions.iter().filter_map(|&action| of(action)).collect::<Vec<_>>(), actions.last().copied())
        };
        assert_eq!(sent(&mut writer).0, [0_usize; 0], "a copy may have no store");
        writer.answered(ServerId(0), Answer::Written { applied: write, durable: before });
        assert_eq!(sent(&mut writer).0, [0], "this one has");
        writer.answered(ServerId(0), Answer::Written { applied: write, durable: before });
        writer.answered(ServerId(0), Answer::Written { applied: write, durable: write });
        assert_eq!(sent(&mut writer).0, [0_usize; 0], "once");
        writer.answered(ServerId(1), Answer::Written { applied: write, durable: write });
        assert_eq!(sent(&mut writer).1, Some(Action::Flushed(write)));
        assert_eq!((writer.flush(), writer.flushed_through()), (write, write));
        assert_eq!(sent(&mut writer), (vec![], None));
    }

    /// A writer with one copy, whose region can be read.
    fn looking() -> (Writer, Holder) {
        let copies = Copies::new(1, 1).unwrap_or_else(|| unreachable!("one copy"));
        let mut writer = Writer::open(copies, 5);
        let (server, whole) = (ServerId(0), Standing { state: State::Whole, ..Standing::default() });
        writer.answered(server, Answer::Standing(whole));
        writer.answered(server, Answer::Promised(whole));
        let holder = writer.holder().unwrap_or_else(|| unreachable!("it has promised"));
        writer.answered(server, written(holder.generation.start()));
        writer.region_opened(server, Nearness::Here);
        while writer.poll_action().is_some() {}
        (writer, holder)
    }

    fn line(promised: Option<Holder>, state: State) -> Standing {
        Standing { state, promised, ..Standing::default() }
    }

    #[test]
    fn blocks_with_a_write_under_way_are_asked_for_and_others_are_looked_at() {
        let (mut writer, holder) = looking();
        let (server, start) = (ServerId(0), holder.generation.start());
        let write = writer.write().unwrap_or_default();
        writer.poll_action();
        let asked = writer.read(write);
        let number = asked.unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Send(server, Request::Read { holder, number })));
        let number = writer.read(start).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
        // A later write was seen: it must be acknowledged first.
        writer.looked(server, number, Some(Seen { newest: write, line: line(Some(holder), State::Whole) }));
        assert_eq!(writer.poll_action(), None);
        writer.answered(server, written(write));
        assert_eq!(writer.poll_action(), Some(Action::Acknowledge(write)));
        assert_eq!(writer.poll_action(), Some(Action::Read(number)));
        assert_eq!(writer.poll_action(), Some(Action::Flushed(write)));
        let number = writer.read(write).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
    }

    #[test]
    fn a_look_in_vain_becomes_a_question_and_a_later_holder_ends_the_writer() {
        let (mut writer, holder) = looking();
        let server = ServerId(0);
        let behind = Seen { newest: Version::NONE, line: line(Some(holder), State::Behind) };
        for seen in [None, Some(behind)] {
            let number = writer.read(Version::NONE).unwrap_or_default();
            assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
            writer.looked(server, number, seen);
            assert_eq!(writer.poll_action(), Some(Action::Send(server, Request::Read { holder, number })));
            writer.looked(server, number, None); // twice is once
            assert_eq!(writer.poll_action(), None);
        }
        let number = writer.read(Version::NONE).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
        writer.region_closed(server);
        assert_eq!(writer.poll_action(), Some(Action::Send(server, Request::Read { holder, number })));
        let number = writer.read(Version::NONE).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Send(server, Request::Read { holder, number })));
        writer.region_opened(server, Nearness::Far);
        let number = writer.read(Version::NONE).unwrap_or_default();
        assert_eq!(writer.poll_action(), Some(Action::Look(server, number)));
        let by = holder.generation.next().unwrap_or_default();
        let later = line(Some(Holder { generation: by, writer: 6 }), State::Whole);
        writer.looked(server, number, Some(Seen { newest: Version::NONE, line: later }));
        assert_eq!(writer.poll_action(), Some(Action::End(End::Fenced { by })));
        assert!(writer.has_ended());
    }

    const WHOLE: Standing =
        Standing { state: State::Whole, promised: None, claim: Version::NONE, applied: Version::NONE, is_cut: false };

    /// A writer that serves with three copies, of which two must hold a write.
    fn space_serving() -> (Writer, Holder) {
        let copies = Copies::new(3, 2).unwrap_or_else(|| unreachable!("three copies, two hold"));
        let mut writer = Writer::open(copies, 77);
        let servers = [0, 1, 2].map(ServerId);
        servers.iter().for_each(|&server| writer.answered(server, Answer::Standing(WHOLE)));
        servers.iter().for_each(|&server| writer.answered(server, Answer::Promised(WHOLE)));
        let holder = writer.holder().unwrap_or_else(|| unreachable!("it has promised"));
        servers.iter().for_each(|&server| writer.answered(server, written(holder.generation.start())));
        assert_eq!((writer.is_serving(), writer.members().count()), (true, 3));
        actions(&mut writer);
        (writer, holder)
    }

    fn actions(writer: &mut Writer) -> Vec<Action> {
        std::iter::from_fn(|| writer.poll_action()).collect()
    }

    /// A server is connected to again, and says that its copy stands like this.
    fn returns(writer: &mut Writer, server: usize, standing: Standing) {
        writer.take_back(ServerId(server));
        writer.answered(ServerId(server), Answer::Standing(standing));
    }

    #[test]
    fn a_write_that_all_copies_refuse_is_kept_and_written_when_there_is_space() {
        let (mut writer, holder) = space_serving();
        let start = holder.generation.start();
        let [one, two] = [writer.write(), writer.write()].map(Option::unwrap_or_default);
        actions(&mut writer);
        assert!(writer.lacks_space().is_empty());
        for server in [0, 1, 2] {
            assert!(writer.refused(ServerId(server)));
        }
        assert_eq!((writer.lacks_space().len(), writer.has_ended()), (3, false));
        // No server is connected: a read waits.
        let [before, of_it] = [writer.read(start), writer.read(two)].map(Option::unwrap_or_default);
        assert_eq!(actions(&mut writer), []);
        let standing = Standing { promised: Some(holder), applied: start, ..WHOLE };
        returns(&mut writer, 0, standing);
        let read = Action::Send(ServerId(0), Request::Read { holder, number: before });
        assert_eq!(actions(&mut writer), [Action::Send(ServerId(0), Request::Ask), read]);
        returns(&mut writer, 1, standing);
        writer.try_again(ServerId(0));
        writer.try_again(ServerId(1));
        writer.try_again(ServerId(1)); // once at a time
        let sent = |server, version| Action::Send(ServerId(server), Request::Write { holder, version });
        assert_eq!(actions(&mut writer), [Action::Send(ServerId(1), Request::Ask), sent(0, one), sent(1, one)]);
        writer.answered(ServerId(0), written(one));
        assert_eq!(actions(&mut writer), [sent(0, two)]);
        writer.answered(ServerId(0), written(two));
        // It is a member again, and the read of what was refused is asked there. The other one still refuses.
        assert_eq!(actions(&mut writer), [Action::Send(ServerId(0), Request::Read { holder, number: of_it })]);
        assert!(writer.refused(ServerId(1)) && writer.lacks_space().len() == 2);
        returns(&mut writer, 1, standing);
        writer.try_again(ServerId(1));
        writer.answered(ServerId(1), written(one));
        assert!(actions(&mut writer).contains(&Action::Acknowledge(one)));
        writer.answered(ServerId(1), written(two));
        assert!(actions(&mut writer).contains(&Action::Acknowledge(two)) && writer.lacks_space().is_empty());
        // What the last one has refused is acknowledged: it is behind.
        returns(&mut writer, 2, standing);
        let catch_up = |action: &Action| matches!(action, Action::Send(ServerId(2), Request::CatchUp { .. }));
        assert!(actions(&mut writer).iter().any(catch_up));
    }

    #[test]
    fn a_copy_that_has_refused_counts_again_only_if_it_is_what_it_was() {
        let (_, holder) = space_serving();
        let start = holder.generation.start();
        let is = Standing { promised: Some(holder), applied: start, ..WHOLE };
        let other = Holder { writer: 78, ..holder };
        let not = [
            Standing { state: State::Behind, ..is },
            Standing { state: State::Empty, promised: None, ..is },
            Standing { promised: Some(other), ..is },
            Standing { applied: Version::NONE, ..is },
        ];
        for standing in not {
            let (mut writer, _) = space_serving();
            writer.write();
            (0..3).for_each(|server| assert!(writer.refused(ServerId(server))));
            (0..2).for_each(|server| returns(&mut writer, server, standing));
            assert_eq!((writer.members().count(), writer.has_ended()), (0, false), "{standing:?}");
            returns(&mut writer, 2, standing);
            assert!(actions(&mut writer).contains(&Action::End(End::NoCopyLeft)), "nothing is left: {standing:?}");
        }
        let (mut writer, _) = space_serving();
        writer.write();
        writer.answered(ServerId(0), written(start));
        assert!(writer.refused(ServerId(0)));
        returns(&mut writer, 0, is);
        assert_eq!(writer.members().count(), 3);
        // Others acknowledge what it has refused.
        let write = start.next().unwrap_or_default();
        writer.answered(ServerId(1), written(write));
        writer.answered(ServerId(2), written(write));
        assert!(actions(&mut writer).contains(&Action::Disconnect(ServerId(0))) && writer.members().count() == 2);
    }

    #[test]
    fn a_flush_that_began_while_all_lack_space_asks_again_once_what_was_refused_is_applied() {
        let (mut writer, holder) = space_serving();
        let start = holder.generation.start();
        let first = writer.write().unwrap_or_default();
        let is = |applied, durable| Answer::Written { applied, durable };
        (0..3).for_each(|server| writer.answered(ServerId(server), is(first, start))); // they have stores
        let refused = writer.write().unwrap_or_default();
        (0..3).for_each(|server| assert!(writer.refused(ServerId(server))));
        let standing = Standing { promised: Some(holder), applied: first, ..WHOLE };
        (0..3).for_each(|server| returns(&mut writer, server, standing));
        actions(&mut writer);
        assert_eq!(writer.flush(), refused);
        let asked = |writer: &mut Writer| {
            let sent = actions(writer).into_iter();
            sent.filter(|action| matches!(action, Action::Send(_, Request::Flush(_)))).count()
        };
        assert_eq!(asked(&mut writer), 3);
        (0..3).for_each(|server| writer.answered(ServerId(server), is(first, first)));
        (0..3).for_each(|server| writer.try_again(ServerId(server)));
        assert_eq!((asked(&mut writer), writer.flushed_through()), (0, first));
        writer.answered(ServerId(0), is(refused, first));
        writer.answered(ServerId(1), is(refused, first));
        assert_eq!(asked(&mut writer), 2);
        writer.answered(ServerId(0), is(refused, refused));
        writer.answered(ServerId(1), is(refused, refused));
        assert!(actions(&mut writer).contains(&Action::Flushed(refused)));
    }

    #[test]
    fn a_server_that_is_lost_while_all_lack_space_is_lost_and_the_last_one_ends_the_writer() {
        let (mut writer, _) = space_serving();
        writer.write();
        (0..3).for_each(|server| assert!(writer.refused(ServerId(server))));
        writer.lost(ServerId(0));
        writer.lost(ServerId(1));
        assert_eq!((writer.has_ended(), writer.lacks_space()), (false, vec![ServerId(2)]));
        writer.lost(ServerId(2));
        assert!(actions(&mut writer).contains(&Action::End(End::NoCopyLeft)));
    }
}
