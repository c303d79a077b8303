//! World: a few servers, writers that open the volume one after the other or at once, and a network that delays and
//! breaks. Every message is a message of the product's machines; the blocks are versions instead of bytes. Writes
//! are of one or two runs of blocks, or zeros of one, and reads are of a run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use remora_lab::Random;

use crate::layout::{Entry, Need};
use crate::rules::{
    Answer, Copy, Generation, Holder, Mutant, Refusal, Request, ServerId, Standing, State, Tail, Version,
};
use crate::shape::Copies;
use crate::wire::{Run, last_write_of, newest, overlap};
use crate::writer::{Action, Nearness, Seen, Writer, may_be_given_out};

/// Blocks of the volume: few, so that writes meet.
const BLOCKS: u64 = 4;

/// Writers of one schedule.
const WRITERS: usize = 6;

/// What a copy has in each block.
type Content = BTreeMap<u64, Version>;

/// What a copy has in these blocks.
fn versions(content: &Content, run: Run) -> Vec<Version> {
    run.blocks().map(|block| content.get(&block).copied().unwrap_or_default()).collect()
}

struct Server {
    copy: Copy,
    blocks: Content,
    pull: Option<Pull>,
    /// Its device is full: it takes no write.
    is_full: bool,
    /// `None`: it has memory only.
    store: Option<Disk>,
}

/// A server's store.
struct Disk {
    tail: Tail<Waiting>,
    /// The copy before each event that is not durable, and after the last one.
    before: VecDeque<(Copy, Content)>,
    last: (Copy, Content),
}

/// An answer that waits until what it says is durable.
struct Waiting {
    writer: usize,
    link: u64,
    holder: Holder,
    is_promise: bool,
}

impl Server {
    fn new(copy: Copy, has_store: bool) -> Server {
        let tail = Tail::at(0, copy.standing());
        let store = has_store.then(|| Disk { tail, before: VecDeque::new(), last: (copy, Content::new()) });
        Server { copy, blocks: Content::new(), pull: None, is_full: false, store }
    }

    /// What the copy says is durable.
    fn durable(&self) -> Version {
        let applied = self.copy.standing().applied;
        let store = self.store.as_ref().filter(|_| !Mutant::AppliedIsDurable.is_active());
        store.map_or(applied, |store| store.tail.durable())
    }
}

/// A catch-up under way.
struct Pull {
    holder: Holder,
    lender: ServerId,
    since: Version,
    left: Vec<u64>,
    writer: usize,
    /// The link by which it was begun, and is answered.
    link: u64,
}

struct Process {
    writer: Writer,
    is_alive: bool,
    /// Servers to which it finds no way any more.
    cut: BTreeSet<ServerId>,
}

/// A read under way.
struct Read {
    run: Run,
    /// What it must return of each block at least: what its writer has written before, or found.
    floors: Vec<Version>,
    /// What the last server answered, or what was seen of it.
    answer: Vec<Version>,
    /// Whether the copy obeyed the reader's writer at each of these moments.
    obeyed: bool,
}

/// A read out of a region under way: first the blocks, in any order, then the line.
struct Look {
    writer: usize,
    number: u64,
    server: ServerId,
    run: Run,
    /// Of a read that is given out at once.
    at_once: Option<AtOnce>,
    /// The region of a server that has forgotten it, as it was: it may still be mapped.
    ghost: Option<(Standing, Content)>,
    /// The blocks that were read, and whether the server obeyed the reader's writer when each of them was.
    blocks: BTreeMap<u64, (Version, bool)>,
    line: Option<Standing>,
}

/// Of a read that a caller's thread gives out at once.
struct AtOnce {
    /// What it must return of each block at least.
    floors: Vec<Version>,
    acknowledged: Version,
    /// The line before the blocks.
    before: Option<Standing>,
}

impl Look {
    fn is_read(&self) -> bool {
        self.blocks.len() == self.run.count as usize
    }

    /// What was read, and whether the server obeyed at each moment.
    fn found(&self) -> (Vec<Version>, bool) {
        let versions = self.blocks.values().map(|&(version, _)| version).collect();
        (versions, self.blocks.values().all(|&(_, obeyed)| obeyed))
    }
}

#[derive(Default)]
struct Link {
    /// A number of its own. A writer's next link to the server has another one.
    number: u64,
    requests: VecDeque<Request>,
    /// With the blocks that were read, if that was asked.
    answers: VecDeque<(Answer, Vec<Version>)>,
}

/// See the module's text.
pub(super) struct World {
    random: Random,
    copies: Copies,
    servers: Vec<Server>,
    writers: Vec<Process>,
    links: BTreeMap<(usize, ServerId), Link>,
    /// Links that were made.
    made: u64,
    /// Which blocks each write changed.
    writes: BTreeMap<Version, Vec<Run>>,
    /// Those of them that are zeros.
    zeros: BTreeSet<Version>,
    /// What the volume held when a generation began.
    opened: BTreeMap<Generation, Content>,
    serving: BTreeSet<Generation>,
    /// Generations that began without what may have been acknowledged and never flushed.
    lossy: BTreeSet<Generation>,
    /// The last version of each block that was flushed.
    flushed: Content,
    /// The last version of each block that was acknowledged or read.
    seen: Content,
    /// The reads under way, by writer and number.
    reads: BTreeMap<(usize, u64), Read>,
    looks: Vec<Look>,
    /// What was reached, and how often.
    pub(super) counts: BTreeMap<&'static str, u64>,
}

impl World {
    pub(super) fn new(seed: u64, copies: Copies, stores: bool) -> World {
        let server = |_| Server::new(Copy::created(), stores);
        World {
            random: Random::new(seed),
            copies,
            servers: (0..copies.number()).map(server).collect(),
            writers: Vec::new(),
            links: BTreeMap::new(),
            made: 0,
            writes: BTreeMap::new(),
            zeros: BTreeSet::new(),
            opened: BTreeMap::new(),
            serving: BTreeSet::new(),
            lossy: BTreeSet::new(),
            flushed: Content::new(),
            seen: Content::new(),
            reads: BTreeMap::new(),
            looks: Vec::new(),
            counts: BTreeMap::new(),
        }
    }

    /// Plays this many steps.
    ///
    /// # Errors
    /// What does not hold.
    pub(super) fn play(&mut self, steps: usize) -> Result<(), String> {
        for _ in 0..steps {
            self.step()?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        if self.writers.is_empty() {
            self.open();
        }
        match self.random.below(1000) {
            0..=11 => self.open(),
            12..=19 => self.kill(),
            20..=25 => self.forget(),
            26..=27 => self.damage(),
            28..=33 => self.break_link(),
            34..=35 => self.cut_power(),
            36..=39 => self.flush(),
            40..=45 => self.cut(),
            46..=75 => self.take_back(),
            76..=79 => self.fill(),
            80..=193 => self.write(),
            194..=199 => self.try_again(),
            200..=249 => self.read(),
            250..=269 => self.open_region(),
            270..=279 => self.look_at_once(),
            280..=339 => self.look()?,
            340..=419 => self.pull()?,
            420..=449 => self.sync(),
            450..=729 => self.deliver_request()?,
            _ => self.deliver_answer(),
        }
        self.carry_out()?;
        self.note_events();
        self.check_copies()
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn any<T: std::marker::Copy>(&mut self, things: &[T]) -> Option<T> {
        things.get(self.random.below(things.len() as u64) as usize).copied()
    }

    fn any_writer(&mut self) -> Option<usize> {
        let alive: Vec<usize> = (0..self.writers.len()).filter(|&number| self.writers[number].is_alive).collect();
        self.any(&alive)
    }

    fn any_server(&mut self) -> ServerId {
        ServerId(self.random.below(self.servers.len() as u64) as usize)
    }

    // ---- writers ----

    fn open(&mut self) {
        if self.writers.len() >= WRITERS {
            return;
        }
        let writer = Writer::open(self.copies, self.random.word());
        let mut cut = BTreeSet::new();
        for number in 0..self.servers.len() {
            if self.random.one_in(4) {
                cut.insert(ServerId(number));
            }
        }
        self.writers.push(Process { writer, is_alive: true, cut });
    }

    /// A process ends. What it has sent may arrive, or not.
    fn kill(&mut self) {
        let Some(number) = self.any_writer() else { return };
        self.writers[number].is_alive = false;
        let drops = self.random.one_in(2);
        for (_, link) in self.links.range_mut((number, ServerId(0))..(number + 1, ServerId(0))) {
            link.answers.clear();
            if drops {
                link.requests.clear();
            }
        }
    }

    fn write(&mut self) {
        let Some(number) = self.any_writer() else { return };
        let mut runs = vec![self.any_run()];
        let is_zero = self.random.one_in(4);
        // Another run behind it, if there is room.
        let rest = runs.iter().map(|run| run.blocks().end).sum::<u64>();
        if !is_zero && rest < BLOCKS && self.random.one_in(3) {
            let first = self.random.between(rest, BLOCKS - 1);
            runs.push(Run { first, count: self.random.between(1, BLOCKS - first) as u32 });
            let turned = self.random.one_in(2);
            runs.rotate_left(turned.into());
        }
        if let Some(version) = self.writers[number].writer.write() {
            self.writes.insert(version, runs);
            if is_zero {
                self.zeros.insert(version);
            }
        }
    }

    /// The entry of a block of this write.
    fn entry(&self, version: Version) -> Entry {
        match version {
            Version::NONE => Entry::NONE,
            version if self.zeros.contains(&version) => Entry::zeros(version),
            version => Entry::of(version, 0),
        }
    }

    /// Some neighbouring blocks; often one.
    fn any_run(&mut self) -> Run {
        let first = self.random.below(BLOCKS);
        let most = if self.random.one_in(2) { 1 } else { BLOCKS - first };
        Run { first, count: self.random.between(1, most) as u32 }
    }

    fn flush(&mut self) {
        let Some(number) = self.any_writer() else { return };
        if self.writers[number].writer.is_serving() {
            self.writers[number].writer.flush();
        }
    }

    fn read(&mut self) {
        let Some(writer) = self.any_writer() else { return };
        let run = self.any_run();
        let Some(generation) = self.writers[writer].writer.generation() else { return };
        let (floors, after) = (self.floors(generation, run), last_write_of(run, self.writes_of(generation)));
        let Some(number) = self.writers[writer].writer.read(after.unwrap_or_default()) else { return };
        let read = Read { run, floors, answer: Vec::new(), obeyed: true };
        self.reads.insert((writer, number), read);
    }

    /// The writes of a generation, in their order.
    fn writes_of(&self, generation: Generation) -> impl DoubleEndedIterator<Item = (Version, &[Run])> {
        let end = generation.next().map_or(Bound::Unbounded, |next| Bound::Excluded(next.start()));
        let writes = self.writes.range((Bound::Included(generation.start()), end));
        writes.map(|(&version, runs)| (version, &runs[..]))
    }

    /// The blocks that writes up to this one have changed in its generation, each with the write.
    fn changes(&self, through: Version) -> impl Iterator<Item = (u64, Version)> {
        let writes = self.writes_of(through.generation()).take_while(move |&(version, _)| version <= through);
        writes.flat_map(|(version, runs)| runs.iter().flat_map(|run| run.blocks()).map(move |block| (block, version)))
    }

    /// The last write of each block that the writer of a generation has made or found.
    fn floors(&self, generation: Generation, run: Run) -> Vec<Version> {
        let mut content = self.opened.get(&generation).cloned().unwrap_or_default();
        if let Some((last, _)) = self.writes_of(generation).next_back() {
            content.extend(self.changes(last));
        }
        versions(&content, run)
    }

    /// A writer can read the region of a server from now on.
    fn open_region(&mut self) {
        let Some(writer) = self.any_writer() else { return };
        let server = self.any_server();
        let nearness = if self.random.one_in(2) { Nearness::Here } else { Nearness::Far };
        self.writers[writer].writer.region_opened(server, nearness);
    }

    /// A read out of a region takes its next step.
    fn look(&mut self) -> Result<(), String> {
        let number = self.random.below(self.looks.len().max(1) as u64) as usize;
        let Some(look) = self.looks.get_mut(number) else { return Ok(()) };
        let at = &self.servers[look.server.0];
        let (standing, blocks) =
            look.ghost.as_ref().map_or((at.copy.standing(), &at.blocks), |(standing, blocks)| (*standing, blocks));
        if let Some(AtOnce { before: before @ None, .. }) = &mut look.at_once {
            *before = Some(standing);
        } else if look.line.is_none() && (look.is_read() || Mutant::LineFirst.is_active()) {
            look.line = Some(standing);
        } else if !look.is_read() {
            let left: Vec<u64> = look.run.blocks().filter(|block| !look.blocks.contains_key(block)).collect();
            let block = left[self.random.below(left.len() as u64) as usize];
            let obeyed = standing.promised == self.writers[look.writer].writer.holder();
            look.blocks.insert(block, (blocks.get(&block).copied().unwrap_or_default(), obeyed));
        } else {
            let look = self.looks.swap_remove(number);
            if look.at_once.is_some() { self.seen_at_once(look)? } else { self.seen(&look) }
        }
        Ok(())
    }

    /// A caller's thread begins to read blocks out of a region: if they have no write under way.
    fn look_at_once(&mut self) {
        let Some(writer) = self.any_writer() else { return };
        let (server, run) = (self.any_server(), self.any_run());
        let Process { writer: rules, .. } = &self.writers[writer];
        let Some(generation) = rules.generation().filter(|_| rules.is_serving()) else { return };
        let (acknowledged, is_member) = (rules.acknowledged(), rules.members().any(|member| member == server));
        let touches = |(version, runs): (Version, &[Run])| {
            version > acknowledged && runs.iter().any(|&other| overlap(run, other))
        };
        let is_quiet = !self.writes_of(generation).any(touches);
        if is_member && is_quiet {
            let at_once = Some(AtOnce { floors: self.floors(generation, run), acknowledged, before: None });
            let blocks = BTreeMap::new();
            self.looks.push(Look { writer, number: 0, server, run, at_once, ghost: None, blocks, line: None });
        }
    }

    /// What a caller's thread has seen is given out, or not.
    fn seen_at_once(&mut self, look: Look) -> Result<(), String> {
        let (answer, obeyed) = look.found();
        let (Some(AtOnce { floors, acknowledged, before: Some(before) }), Some(line)) = (look.at_once, look.line)
        else {
            return Ok(());
        };
        let Process { writer, is_alive, .. } = &self.writers[look.writer];
        // What has ended, or left the server out, reads there no more.
        let is_open = *is_alive && writer.members().any(|member| member == look.server);
        let Some(holder) = writer.holder().filter(|_| is_open) else { return Ok(()) };
        let seen = Seen { newest: newest(answer.iter().copied()), line };
        if !may_be_given_out(holder, acknowledged, before, seen) {
            return Ok(());
        }
        self.count("a look at once");
        self.is_right(&Read { run: look.run, floors, answer, obeyed })
    }

    fn take_back(&mut self) {
        let Some(number) = self.any_writer() else { return };
        let server = self.any_server();
        if !self.writers[number].cut.contains(&server) {
            self.writers[number].writer.take_back(server);
        }
    }

    /// A server's device is full from now on, or has space again. Sometimes that of all.
    fn fill(&mut self) {
        let (one, all, is_full) = (self.any_server(), self.random.one_in(3), self.random.one_in(2));
        for (number, server) in self.servers.iter_mut().enumerate() {
            if all || ServerId(number) == one {
                server.is_full = is_full;
            }
        }
    }

    fn try_again(&mut self) {
        let Some(number) = self.any_writer() else { return };
        for server in (0..self.servers.len()).map(ServerId) {
            if self.writers[number].writer.is_waiting_for_space(server) {
                self.count("a full copy was tried again");
                self.writers[number].writer.try_again(server);
            }
        }
    }

    /// What was seen in a region, if its reader lives.
    fn seen(&mut self, look: &Look) {
        let Look { writer, number, server, line, .. } = *look;
        if !self.writers[writer].is_alive {
            return;
        }
        let (answer, obeyed) = look.found();
        let seen = line.filter(|_| look.is_read()).map(|line| Seen { newest: newest(answer.iter().copied()), line });
        let counts = self.writers[writer].writer.looked(server, number, seen);
        if let (true, Some(_), Some(read)) = (counts, seen, self.reads.get_mut(&(writer, number))) {
            (read.answer, read.obeyed) = (answer, obeyed);
        }
        self.count(if counts { "a look" } else { "a look in vain" });
    }

    // ---- the network ----

    fn break_link(&mut self) {
        let Some(number) = self.any_writer() else { return };
        let server = self.any_server();
        self.lose(number, server);
    }

    /// From now on a writer does not reach some servers.
    fn cut(&mut self) {
        let Some(number) = self.any_writer() else { return };
        for server in (0..self.servers.len()).map(ServerId) {
            if self.random.one_in(2) {
                self.writers[number].cut.insert(server);
                self.lose(number, server);
            }
        }
    }

    pub(super) fn lose(&mut self, number: usize, server: ServerId) {
        self.drop_link(number, server);
        self.writers[number].writer.lost(server);
    }

    fn drop_link(&mut self, number: usize, server: ServerId) {
        self.links.remove(&(number, server));
        if !self.random.one_in(3) {
            let server = &mut self.servers[server.0];
            server.pull.take_if(|pull| pull.writer == number);
        }
    }

    fn deliver_request(&mut self) -> Result<(), String> {
        let waiting: Vec<_> =
            self.links.iter().filter(|(_, link)| !link.requests.is_empty()).map(|(&way, _)| way).collect();
        let Some((number, server)) = self.any(&waiting) else { return Ok(()) };
        let request = self.links.get_mut(&(number, server)).and_then(|link| link.requests.pop_front());
        let Some(request) = request else { return Ok(()) };
        if matches!(request, Request::Write { .. }) && self.servers[server.0].is_full {
            // The server refuses it, and closes the connection.
            self.count("a write was refused");
            self.drop_link(number, server);
            self.writers[number].writer.refused(server);
            return Ok(());
        }
        let blocks = self.blocks_of(number, server, request);
        match self.execute(number, server, request)? {
            Ok(Some(answer)) => self.answer_with(number, server, answer, blocks),
            Ok(None) => {}
            Err(Refusal::Fenced { by }) => self.answer(number, server, Answer::Fenced { by }),
            // The server closes the connection.
            Err(Refusal::OutOfStep) => self.lose(number, server),
        }
        Ok(())
    }

    fn answer(&mut self, number: usize, server: ServerId, answer: Answer) {
        self.answer_with(number, server, answer, Vec::new());
    }

    fn answer_with(&mut self, number: usize, server: ServerId, answer: Answer, blocks: Vec<Version>) {
        if let Some(link) = self.links.get_mut(&(number, server)) {
            link.answers.push_back((answer, blocks));
        }
    }

    /// What a server has in the blocks that a request asks for.
    fn blocks_of(&self, number: usize, server: ServerId, request: Request) -> Vec<Version> {
        let Request::Read { number: read, .. } = request else { return Vec::new() };
        let run = self.reads.get(&(number, read)).map(|read| read.run);
        run.map(|run| versions(&self.servers[server.0].blocks, run)).unwrap_or_default()
    }

    /// Tells the writer of a catch-up, if the link is still the one by which it was begun.
    fn answer_pull(&mut self, pull: &Pull, server: ServerId, answer: Answer) {
        if self.links.get(&(pull.writer, server)).is_some_and(|link| link.number == pull.link) {
            self.answer(pull.writer, server, answer);
        }
    }

    fn deliver_answer(&mut self) {
        let waiting: Vec<_> =
            self.links.iter().filter(|(_, link)| !link.answers.is_empty()).map(|(&way, _)| way).collect();
        let Some((number, server)) = self.any(&waiting) else { return };
        let answer = self.links.get_mut(&(number, server)).and_then(|link| link.answers.pop_front());
        if let Some((answer, blocks)) = answer.filter(|_| self.writers[number].is_alive) {
            if let Answer::Read { number: read, .. } = answer
                && let Some(read) = self.reads.get_mut(&(number, read))
            {
                (read.answer, read.obeyed) = (blocks, true);
            }
            self.writers[number].writer.answered(server, answer);
        }
    }

    /// Does what the writers want done.
    fn carry_out(&mut self) -> Result<(), String> {
        for number in 0..self.writers.len() {
            while let Some(action) = self.writers[number].writer.poll_action() {
                if !self.writers[number].is_alive {
                    continue;
                }
                match action {
                    Action::Send(server, _) if self.writers[number].cut.contains(&server) => self.lose(number, server),
                    Action::Send(server, request) => {
                        let made = &mut self.made;
                        let link = self.links.entry((number, server)).or_insert_with(|| {
                            *made += 1;
                            Link { number: *made, ..Link::default() }
                        });
                        link.requests.push_back(request);
                    }
                    Action::Disconnect(server) => self.drop_link(number, server),
                    Action::Serving { may_lack_tail, .. } => self.serving(number, may_lack_tail)?,
                    Action::Acknowledge(version) => self.acknowledged(version)?,
                    Action::Flushed(version) => self.flushed(version)?,
                    Action::Look(server, read) => {
                        let run = self.reads.get(&(number, read)).map_or(Run { first: 0, count: 1 }, |read| read.run);
                        let (at_once, ghost, blocks, line) = (None, None, BTreeMap::new(), None);
                        let look = Look { writer: number, number: read, server, run, at_once, ghost, blocks, line };
                        self.looks.push(look);
                    }
                    Action::Read(read) => self.given_out(number, read)?,
                    Action::End(_) => {
                        self.count("a writer ended");
                        self.writers[number].is_alive = false;
                    }
                }
            }
        }
        Ok(())
    }

    // ---- servers ----

    /// The process of a server is gone. Its region may still be mapped, as it was.
    fn leave_ghosts(&mut self, number: usize) {
        let Server { copy, blocks, .. } = &self.servers[number];
        let ghost = (copy.standing(), blocks.clone());
        let (ghosts, others) = self.looks.drain(..).partition(|look| look.server.0 == number && look.ghost.is_none());
        self.looks = others;
        for look in Vec::<Look>::into_iter(ghosts) {
            if self.random.one_in(2) || look.at_once.is_some() {
                self.looks.push(Look { ghost: Some(ghost.clone()), ..look });
            } else {
                self.seen(&Look { blocks: BTreeMap::new(), ..look });
            }
        }
    }

    /// A memory server starts without its memory. A volume lives through that as long as fewer servers forget than must
    /// hold a write, and enough whole copies are left for the next write.
    fn forget(&mut self) {
        let whole =
            (0..self.servers.len()).filter(|&number| self.servers[number].copy.standing().state == State::Whole);
        let whole: Vec<usize> = whole.collect();
        let (number, hold) = (self.copies.number(), self.copies.hold());
        if whole.len() <= hold.max(number - hold + 1) {
            return;
        }
        let Some(number) = self.any(&whole) else { return };
        // A disk is replaced when what the others hold is safe.
        (0..self.servers.len()).for_each(|other| self.sync_one(other));
        self.count("a server forgot");
        self.leave_ghosts(number);
        let has_store = self.servers[number].store.is_some();
        self.servers[number] = Server::new(Copy::default(), has_store);
        for writer in 0..self.writers.len() {
            self.lose(writer, ServerId(number));
        }
    }

    /// What has changed at a server is the next event of its store.
    fn note_event(&mut self, number: usize) {
        let Server { copy, blocks, store, .. } = &mut self.servers[number];
        let Some(Disk { tail, before, last }) = store else { return };
        if (&last.0, &last.1) != (copy, blocks) {
            tail.append(tail.appended() + 1, copy.standing());
            before.push_back(std::mem::replace(last, (*copy, blocks.clone())));
        }
    }

    fn note_events(&mut self) {
        (0..self.servers.len()).for_each(|number| self.note_event(number));
    }

    /// The answer, unless it must wait until what it says is durable.
    fn once_durable(&mut self, number: usize, waiting: Waiting, answer: Answer, is_early: bool) -> Option<Answer> {
        match &mut self.servers[number].store {
            Some(store) if !is_early => store.tail.wait(waiting).map(|_| answer),
            _ => Some(answer),
        }
    }

    /// What a server has done becomes durable.
    fn sync(&mut self) {
        let number = self.any_server().0;
        self.sync_one(number);
        // Often all of them: else hardly any writer gets as far as to serve.
        if self.servers[number].store.is_some() && self.random.one_in(2) {
            (0..self.servers.len()).for_each(|number| self.sync_one(number));
        }
    }

    pub(super) fn sync_one(&mut self, number: usize) {
        let Some(Disk { tail, before, .. }) = &mut self.servers[number].store else { return };
        before.clear();
        for Waiting { writer, link, holder, is_promise } in tail.sync(tail.appended()) {
            let server = &self.servers[number];
            let standing = server.copy.standing();
            let answer = match server.copy.confirm(holder) {
                Ok(()) if is_promise => Answer::Promised(standing),
                Ok(()) => Answer::Written { applied: standing.applied, durable: server.durable() },
                Err(Refusal::Fenced { by }) => Answer::Fenced { by },
                Err(Refusal::OutOfStep) => continue,
            };
            if self.links.get(&(writer, ServerId(number))).is_some_and(|at| at.number == link) {
                self.answer(writer, ServerId(number), answer);
            }
        }
    }

    /// Some servers lose power, or their processes end: then their system keeps what they have written.
    fn cut_power(&mut self) {
        let is_process = self.random.one_in(4);
        for number in 0..self.servers.len() {
            let Some(store) = self.servers[number].store.as_ref().filter(|_| self.random.one_in(2)) else { continue };
            let kept = self.random.below(store.before.len() as u64 + 1) as usize;
            self.end_server(number, Some(kept), is_process);
        }
    }

    /// A server loses its power, and is as it was after this event of those that are not durable; or its process ends.
    fn end_server(&mut self, number: usize, kept: Option<usize>, is_process: bool) {
        if let Some(store) = &self.servers[number].store {
            let kept = kept.filter(|_| !is_process).and_then(|kept| store.before.get(kept));
            let (mut copy, blocks) = match kept {
                Some((copy, blocks)) => (*copy, blocks.clone()),
                None => store.last.clone(),
            };
            if Mutant::WholeBeforeBlocks.is_active() {
                copy = store.last.0;
            }
            self.count(if is_process { "a process ended" } else { "a power cut" });
            self.leave_ghosts(number);
            // A server without a copy has no folder either.
            let copy = match copy.standing().state {
                State::Empty => copy,
                State::Behind if !is_process && Mutant::ClaimNotDurable.is_active() => {
                    Copy::recovered(Standing { claim: Version::NONE, ..copy.standing() }, true)
                }
                _ => Copy::recovered(copy.standing(), !is_process),
            };
            let tail = Tail::at(0, copy.standing());
            let store = Disk { tail, before: VecDeque::new(), last: (copy, blocks.clone()) };
            self.servers[number] = Server { copy, blocks, pull: None, is_full: false, store: Some(store) };
            for writer in 0..self.writers.len() {
                self.lose(writer, ServerId(number));
            }
        }
    }

    /// A block is found damaged.
    fn damage(&mut self) {
        let number = self.any_server().0;
        let block = self.random.below(BLOCKS);
        let Server { copy, blocks, .. } = &mut self.servers[number];
        if copy.standing().state == State::Whole {
            copy.damaged();
            blocks.remove(&block);
            self.count("a block was damaged");
        }
    }

    fn execute(
        &mut self,
        number: usize,
        server: ServerId,
        request: Request,
    ) -> Result<Result<Option<Answer>, Refusal>, String> {
        let link = self.links.get(&(number, server)).map_or(0, |link| link.number);
        let at = &mut self.servers[server.0];
        Ok(match request {
            Request::Ask => {
                // A newer link of a writer ends the earlier one, and what was begun by it.
                at.pull.take_if(|pull| pull.writer == number);
                Ok(Some(Answer::Standing(at.copy.standing())))
            }
            Request::Promise(holder) => at.copy.promise(holder).map(|standing| {
                self.note_event(server.0);
                let waiting = Waiting { writer: number, link, holder, is_promise: true };
                let is_early = Mutant::PromiseNotDurable.is_active();
                self.once_durable(server.0, waiting, Answer::Promised(standing), is_early)
            }),
            Request::Flush(holder) => {
                let applied = at.copy.standing().applied;
                at.copy.confirm(holder).map(|()| {
                    let waiting = Waiting { writer: number, link, holder, is_promise: false };
                    self.once_durable(server.0, waiting, Answer::Written { applied, durable: applied }, false)
                })
            }
            Request::Confirm { holder, question } => {
                at.copy.confirm(holder).map(|()| Some(Answer::Confirmed { question }))
            }
            Request::CatchUp { holder, lender, since } => at.copy.begin_catch_up(holder, since).map(|()| {
                at.pull = Some(Pull { holder, lender, since, left: (0..BLOCKS).collect(), writer: number, link });
                None
            }),
            Request::Mark { holder, may_lack_tail } => match at.copy.mark(holder, may_lack_tail) {
                Ok(applied) => {
                    let content = at.blocks.clone();
                    let first = self.opened.entry(holder.generation).or_insert_with(|| content.clone());
                    if *first != content {
                        return Err(format!("generation {} begins with {first:?} and {content:?}", holder.generation));
                    }
                    self.note_event(server.0);
                    let waiting = Waiting { writer: number, link, holder, is_promise: false };
                    let answer = Answer::Written { applied, durable: applied };
                    Ok(self.once_durable(server.0, waiting, answer, Mutant::MarkNotDurable.is_active()))
                }
                Err(refusal) => Err(refusal),
            },
            Request::Read { holder, number: read } => at.copy.read(holder).map(|()| {
                let run = self.reads.get(&(number, read)).map(|read| read.run);
                let newest = newest(run.map(|run| versions(&at.blocks, run)).unwrap_or_default());
                Some(Answer::Read { number: read, newest })
            }),
            Request::Write { holder, version } => match at.copy.write(holder, version) {
                Ok(()) => {
                    let runs = self.writes.get(&version).into_iter().flatten();
                    at.blocks.extend(runs.flat_map(|run| run.blocks()).map(|block| (block, version)));
                    self.note_event(server.0);
                    Ok(Some(Answer::Written { applied: version, durable: self.servers[server.0].durable() }))
                }
                Err(refusal) => Err(refusal),
            },
        })
    }

    /// A copy that is behind takes the next block.
    fn pull(&mut self) -> Result<(), String> {
        let pulling: Vec<usize> =
            (0..self.servers.len()).filter(|&number| self.servers[number].pull.is_some()).collect();
        let Some(number) = self.any(&pulling) else { return Ok(()) };
        let Some(mut pull) = self.servers[number].pull.take() else { return Ok(()) };
        let lender = &self.servers[pull.lender.0];
        if let Some(block) = pull.left.last().copied() {
            match lender.copy.lend(pull.holder, pull.since) {
                Ok(applied) => {
                    let theirs = lender.blocks.get(&block).copied();
                    let ours = self.servers[number].blocks.get(&block).copied().unwrap_or_default();
                    let need = self.entry(theirs.unwrap_or_default()).need(Some(self.entry(ours)));
                    let borrower = &mut self.servers[number];
                    let is_taken = match borrower.copy.takes(ours, theirs.unwrap_or_default(), applied) {
                        Ok(is_taken) => is_taken && need != Need::Nothing,
                        Err(_) => return Ok(()),
                    };
                    if is_taken {
                        borrower.blocks.remove(&block);
                        borrower.blocks.extend(theirs.map(|theirs| (block, theirs)));
                        self.count(if need == Need::Block { "a block was taken" } else { "zeros were taken" });
                    }
                    pull.left.pop();
                }
                Err(Refusal::Fenced { by }) => {
                    self.answer_pull(&pull, ServerId(number), Answer::Fenced { by });
                    return Ok(());
                }
                Err(Refusal::OutOfStep) => {}
            }
        } else if self.servers[number].copy.try_complete() {
            self.count("a copy caught up");
            let applied = self.servers[number].copy.standing().applied;
            self.answer_pull(&pull, ServerId(number), Answer::Whole { applied });
            return Ok(());
        }
        self.servers[number].pull = Some(pull);
        Ok(())
    }

    // ---- schedules that were thought of ----

    /// A writer opens the volume, without these servers.
    pub(super) fn begin(&mut self, cut: &[usize]) {
        let writer = Writer::open(self.copies, self.random.word());
        let cut = cut.iter().map(|&number| ServerId(number)).collect();
        self.writers.push(Process { writer, is_alive: true, cut });
    }

    /// All that is under way arrives. What these servers do becomes durable; copies that are behind catch up or wait.
    pub(super) fn go_on(&mut self, syncing: &[usize], pulls: bool) -> Result<(), String> {
        for _ in 0..100 {
            self.carry_out()?;
            self.deliver_request()?;
            self.deliver_answer();
            if pulls {
                self.pull()?;
            }
            self.note_events();
            self.check_copies()?;
            syncing.iter().for_each(|&number| self.sync_one(number));
        }
        self.carry_out()
    }

    pub(super) fn write_block(&mut self, writer: usize, block: u64) {
        if let Some(version) = self.writers[writer].writer.write() {
            self.writes.insert(version, vec![Run { first: block, count: 1 }]);
        }
    }

    pub(super) fn flush_of(&mut self, writer: usize) {
        self.writers[writer].writer.flush();
    }

    pub(super) fn reach_again(&mut self, writer: usize, server: usize) {
        let Process { writer, cut, .. } = &mut self.writers[writer];
        cut.remove(&ServerId(server));
        writer.take_back(ServerId(server));
    }

    /// A writer ends, and what it has sent does not arrive.
    pub(super) fn die(&mut self, writer: usize) {
        self.writers[writer].is_alive = false;
        self.links.retain(|(number, _), _| *number != writer);
    }

    /// A server is as it was after this event of those that are not durable; `None`: after the last one.
    pub(super) fn lose_power(&mut self, server: usize, kept: Option<usize>) {
        self.end_server(server, kept, false);
    }

    // ---- what must hold ----

    fn serving(&mut self, number: usize, may_lack_tail: bool) -> Result<(), String> {
        self.count("a writer serves");
        let Some(generation) = self.writers[number].writer.generation() else { return Ok(()) };
        if !self.serving.insert(generation) {
            return Err(format!("two writers serve with generation {generation}"));
        }
        if may_lack_tail {
            self.count("an opening that may lack a tail");
            self.lossy.insert(generation);
        }
        self.check_openings()?;
        // It reads everything. What was read once must not go back.
        let content = self.opened.get(&generation).cloned().unwrap_or_default();
        for (block, version) in content {
            let seen = self.seen.entry(block).or_default();
            *seen = version.max(*seen);
        }
        Ok(())
    }

    fn acknowledged(&mut self, version: Version) -> Result<(), String> {
        self.count("an acknowledgement");
        let changes: Vec<_> = self.changes(version).collect();
        for (block, write) in changes {
            let seen = self.seen.entry(block).or_default();
            *seen = write.max(*seen);
        }
        // An answer can arrive after a later writer has begun. The write itself was before that.
        self.check_openings()
    }

    fn flushed(&mut self, version: Version) -> Result<(), String> {
        self.count("a flush");
        let generation = version.generation();
        let mut content = self.opened.get(&generation).cloned().unwrap_or_default();
        content.extend(self.changes(version));
        for (block, write) in content {
            let flushed = self.flushed.entry(block).or_default();
            *flushed = write.max(*flushed);
        }
        self.check_openings()
    }

    /// A read returns every write that was sent before it, and nothing that can be lost.
    fn given_out(&mut self, writer: usize, number: u64) -> Result<(), String> {
        let Some(read) = self.reads.remove(&(writer, number)) else {
            return Err(format!("a read was given out twice: {number} of writer {writer}"));
        };
        self.count("a read");
        self.is_right(&read)
    }

    fn is_right(&mut self, read: &Read) -> Result<(), String> {
        let Read { run, floors, answer, obeyed } = read;
        if !obeyed || answer.len() != run.count as usize {
            return Err(format!("{run:?} was read as {answer:?} at a copy that obeyed another writer"));
        }
        for ((block, &answer), &floor) in run.blocks().zip(answer).zip(floors) {
            if answer < floor {
                return Err(format!("block {block} was read at {answer}, and {floor} was written before"));
            }
            let seen = self.seen.entry(block).or_default();
            *seen = answer.max(*seen);
        }
        self.check_openings()
    }

    /// No later writer lacks a write that was acknowledged or read.
    fn check_openings(&self) -> Result<(), String> {
        for generation in &self.serving {
            let Some(content) = self.opened.get(generation) else { continue };
            for (block, &flushed) in self.flushed.iter().filter(|(_, flushed)| flushed.generation() < *generation) {
                let has = content.get(block).copied().unwrap_or_default();
                if has < flushed {
                    return Err(format!("block {block} was flushed at {flushed}, and {generation} opened {has}"));
                }
            }
            // What was there before a loss that was said may be missing from then on.
            let since = self.lossy.range(..=generation).last().copied().unwrap_or_default();
            let expected = self.seen.iter().filter(|(_, seen)| (since..*generation).contains(&seen.generation()));
            for (block, &seen) in expected {
                let has = content.get(block).copied().unwrap_or_default();
                if has < seen {
                    return Err(format!("block {block} was seen at {seen}, and generation {generation} opened {has}"));
                }
            }
        }
        Ok(())
    }

    /// Each whole copy is a prefix of its history.
    fn check_copies(&self) -> Result<(), String> {
        for (number, server) in self.servers.iter().enumerate() {
            let standing = server.copy.standing();
            let generation = standing.applied.generation();
            if standing.state != State::Whole || generation == Generation::NONE {
                continue;
            }
            let mut expected = self.opened.get(&generation).cloned().unwrap_or_default();
            expected.extend(self.changes(standing.applied));
            if expected != server.blocks {
                let (applied, blocks) = (standing.applied, &server.blocks);
                return Err(format!("server {number} is whole at {applied} with {blocks:?} instead of {expected:?}"));
            }
        }
        Ok(())
    }
}
