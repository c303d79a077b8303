//! Driver: has a volume open. It feeds [`Writer`] with requests, answers and the time, and carries out what it decides.
//! It decides nothing that the rules are about, and never waits. [`super::turns`] says which thread runs it.
//!
//! Requests are begun in the order in which they were submitted. If a server has no room for the next write, that write
//! waits, and everything behind it. `catching_up`: what is said of copies that are taken back; `looking`: reads that
//! are answered without a message; `pulling`: writes whose blocks are not in the message; `space`: servers without
//! space for a write; `turn`: what the thread that runs it does.

mod catching_up;
mod looking;
mod pulling;
mod space;
mod turn;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::{Address, Buffer, Connection, Delivery, Message, Messenger};

use super::outgoing::Outgoing;
use super::remote::Remote;
use super::request::{Completion, Done, Op, Request};
use super::window::Ask;
use super::{AT_WORK, Bring, ClientOptions, Error, Event, LEAST_SUBMITTED_BYTES, Reads, Shared, Writes};
use crate::layout::Entry;
use crate::link;
use crate::message::{self, Answer, ServerId};
use crate::overlap::newest;
use crate::rdma::Rdma;
use crate::shape::{BLOCK_BYTES, Shape};
use crate::store::sums;
use crate::version::Version;
use crate::wire::{Call, Cause, Mode, Reply, Run};
use crate::writer::{Action, End, Writer};

/// See the module's text.
// Larger than the bound: a method for each event and each action, in the files named after what they are about.
pub(super) struct Driver {
    shape: Shape,
    id: u64,
    copy_limit: Duration,
    reads_by: Reads,
    rdma: Rdma,
    writes_by: Writes,
    /// `None`: blocks are in the messages.
    outgoing: Option<Outgoing>,
    messenger: Messenger,
    /// For threads that read regions.
    bring: Bring,
    writer: Writer,
    remotes: Vec<Remote>,
    /// Threads that open or read regions.
    readers: Vec<JoinHandle<()>>,
    /// Submitted, and not begun.
    queue: VecDeque<Op>,
    /// The last write that was begun.
    last: Version,
    writes: BTreeMap<Version, Write>,
    /// The last write that each server was sent which gets writes.
    sent: Version,
    /// The writes that some server has not applied yet, in their order.
    unapplied: VecDeque<Unapplied>,
    reads: HashMap<u64, Read>,
    /// Flushes, with the write that must be durable and acknowledged.
    flushes: VecDeque<(Version, Completion)>,
    opened: Option<SyncSender<Result<(), Error>>>,
    /// Whether the volume is opened although another writer is at work.
    takes_over: bool,
    shared: Arc<Shared>,
    /// When the time was last looked at.
    looked: Instant,
    /// It should be looked at soon: something has changed that decides what the servers are asked.
    looks_soon: bool,
    /// A caller runs the driver, whose `done` must not be called now.
    is_for_a_caller: bool,
    /// What was completed meanwhile.
    handed: Vec<(Completion, Option<Bytes>)>,
    handed_failures: Vec<(Done, Error)>,
    is_over: bool,
}

/// A write under way.
struct Write {
    runs: Vec<Run>,
    /// `None`: zeros.
    blocks: Option<Blocks>,
    /// Where in the outbox its blocks are.
    place: Option<u64>,
    /// The message with its blocks, or of zeros, once a server was sent it.
    inline: Option<Message>,
    completion: Completion,
}

/// The blocks of a write.
struct Blocks {
    sums: Vec<u32>,
    data: Bytes,
}

/// A write that some server has not applied yet.
struct Unapplied {
    version: Version,
    runs: Vec<Run>,
    has_place: bool,
}

/// A read under way.
struct Read {
    run: Run,
    /// Only which of them are zeros is wanted.
    is_map: bool,
    data: Bytes,
    completion: Completion,
}

impl Driver {
    pub(super) fn new(
        shape: Shape,
        servers: &[Address],
        options: &ClientOptions,
        messenger: Messenger,
        bring: &Bring,
        opened: SyncSender<Result<(), Error>>,
        shared: &Arc<Shared>,
    ) -> Driver {
        let now = Instant::now();
        let id = getrandom::u64().unwrap_or_else(|_| std::process::id().into());
        Driver {
            shape,
            id,
            copy_limit: options.copy_limit,
            reads_by: options.reads,
            rdma: options.rdma.clone(),
            writes_by: options.writes,
            outgoing: Outgoing::open(options.writes, &options.rdma, servers),
            messenger,
            bring: Arc::clone(bring),
            writer: Writer::open(shape.copies(), id),
            remotes: servers.iter().map(|address| Remote::new(address.clone(), options.window, now)).collect(),
            readers: Vec::new(),
            queue: VecDeque::new(),
            last: Version::NONE,
            writes: BTreeMap::new(),
            sent: Version::NONE,
            unapplied: VecDeque::new(),
            reads: HashMap::new(),
            flushes: VecDeque::new(),
            opened: Some(opened),
            takes_over: options.take_over,
            shared: Arc::clone(shared),
            looked: now,
            looks_soon: false,
            is_for_a_caller: false,
            handed: Vec::new(),
            handed_failures: Vec::new(),
            is_over: false,
        }
    }

    /// Ends its threads. What is under way is dropped, and so completed with the reason.
    pub(super) fn end(mut self) {
        self.remotes.clear(); // ends the threads below
        for reader in self.readers.drain(..) {
            let _ = reader.join(); // a panic was reported where it happened
        }
    }

    pub(super) fn happened(&mut self, event: Event) {
        match event {
            Event::Answered(connection, delivery) => self.answered(&connection, delivery),
            Event::Over(connection) => {
                if let Some(server) = self.server_at(&connection) {
                    self.lost(server, "the connection is over");
                }
            }
            Event::Region(connection, news) => self.region(&connection, news),
            Event::Close => self.is_over = true,
        }
    }

    // ---- requests ----

    /// Begins what was submitted, as far as the servers have room.
    fn begin(&mut self) {
        while self.writer.is_serving()
            && let Some(op) = self.queue.pop_front()
        {
            match &op.request {
                Request::Write { data, .. } if !self.has_room(data.len() as u64) => return self.queue.push_front(op),
                Request::Zero(_) if !self.has_room(0) => return self.queue.push_front(op),
                _ => self.begin_one(op),
            }
            self.carry_out();
        }
    }

    fn has_room(&mut self, bytes: u64) -> bool {
        // Each of them notes whether it is one that has none.
        let full = self.remotes.iter_mut().filter_map(|remote| (!remote.has_room(bytes)).then_some(()));
        full.count() == 0
    }

    fn begin_one(&mut self, Op { request, sums, completion }: Op) {
        match request {
            Request::Write { runs, data } => self.begin_write(runs, Some(Blocks { sums, data }), completion),
            Request::Zero(run) => self.begin_write(vec![run], None, completion),
            Request::Read(run) => self.begin_read(run, false, completion),
            Request::Map(run) => self.begin_read(run, true, completion),
            Request::Flush => {
                let through = self.writer.flush();
                match self.writer.flushed_through().min(self.writer.acknowledged()) >= through {
                    true => self.complete(completion, Some(Bytes::new())),
                    false => self.flushes.push_back((through, completion)),
                }
            }
        }
    }

    fn begin_write(&mut self, runs: Vec<Run>, blocks: Option<Blocks>, completion: Completion) {
        let Some(version) = self.writer.write() else {
            return self.complete(completion, None); // the generation has no more numbers
        };
        self.last = version;
        let is_pulled = self.remotes.iter().any(|remote| remote.outbox.pulls);
        let outgoing = self.outgoing.as_mut().filter(|_| is_pulled);
        let place = outgoing.zip(blocks.as_ref()).and_then(|(outgoing, blocks)| outgoing.put(&blocks.data));
        self.unapplied.push_back(Unapplied { version, runs: runs.clone(), has_place: place.is_some() });
        self.writes.insert(version, Write { runs, blocks, place, inline: None, completion });
    }

    fn begin_read(&mut self, run: Run, is_map: bool, completion: Completion) {
        match self.writer.read(self.last_write_of(run)) {
            Some(number) => _ = self.reads.insert(number, Read { run, is_map, data: Bytes::new(), completion }),
            None => self.complete(completion, None),
        }
    }

    // ---- what the rules decide ----

    fn carry_out(&mut self) {
        while let Some(action) = self.writer.poll_action() {
            match action {
                Action::Send(server, request) => self.send(server, request),
                Action::Disconnect(server) => {
                    self.shared.regions.close(server);
                    self.catch_up_ends(server);
                    self.withdraw(server);
                    self.remote(server, |remote, now| remote.disconnect(now));
                    self.forget_applied();
                }
                Action::Serving { may_lack_tail, .. } => {
                    tracing::info!(volume = %self.shape.volume(), "the volume is open");
                    if may_lack_tail {
                        tracing::warn!(volume = %self.shape.volume(), "{LACKS_TAIL}");
                    }
                    self.shared.regions.acknowledged(self.writer.acknowledged());
                    self.looks_soon = true;
                    if let Some(opened) = self.opened.take() {
                        let _ = opened.send(Ok(())); // the caller waits for it
                    }
                }
                Action::Acknowledge(version) => self.acknowledged(version),
                Action::Flushed(_) => self.complete_flushes(),
                Action::Look(server, number) => self.look(server, number),
                Action::Read(number) => {
                    if let Some(read) = self.reads.remove(&number) {
                        self.complete(read.completion, Some(read.data));
                    }
                }
                Action::End(end) => self.ended(end),
            }
        }
        self.sent = self.last;
        let takes_writes = |server: &ServerId| !self.writer.is_short_of_space(*server);
        let members = self.writer.members().filter(takes_writes).fold(0, |bits, server| bits | 1 << server.0);
        self.shared.members.store(members, Ordering::Relaxed);
        self.look_for_space();
    }

    fn acknowledged(&mut self, through: Version) {
        self.shared.regions.acknowledged(through);
        while let Some(first) = self.writes.first_entry().filter(|write| *write.key() <= through) {
            let completion = first.remove().completion;
            self.complete(completion, Some(Bytes::new()));
        }
        self.complete_flushes();
    }

    fn complete_flushes(&mut self) {
        let through = self.writer.flushed_through().min(self.writer.acknowledged());
        while self.flushes.front().is_some_and(|(version, _)| *version <= through)
            && let Some((_, flush)) = self.flushes.pop_front()
        {
            self.complete(flush, Some(Bytes::new()));
        }
    }

    fn ended(&mut self, end: End) {
        tracing::warn!(volume = %self.shape.volume(), %end, under_way = self.writes.len(), "the volume has ended");
        self.shared.regions.close_all();
        let _ = self.shared.end.set(end); // ends once
        self.is_over = true;
        if let Some(opened) = self.opened.take() {
            let _ = opened.send(Err(Error::Ended(end))); // the caller waits for it
        }
    }

    fn send(&mut self, server: ServerId, request: message::Request) {
        let call = match request {
            message::Request::Ask => {
                self.connect(server);
                Call::Open { shape: self.shape, mode: Mode::Write, writer: self.id }
            }
            message::Request::Promise(holder) => Call::Promise(holder),
            message::Request::CatchUp { holder, lender, since } => {
                self.catch_up_begins(server);
                let lender = self.remotes.get(lender.0).map(|remote| remote.address().to_string());
                Call::CatchUp { holder, since, lender: lender.unwrap_or_default() }
            }
            message::Request::Mark { holder, may_lack_tail } => Call::Mark { holder, may_lack_tail },
            message::Request::Flush(holder) => Call::Flush(holder),
            message::Request::Confirm { holder, question } => Call::Confirm { holder, question },
            message::Request::Read { holder, number } => {
                let Some(read) = self.reads.get(&number) else { return };
                self.shared.counts.asked.fetch_add(1, Ordering::Relaxed);
                let run = read.run;
                if read.is_map { Call::Map { holder, number, run } } else { Call::Read { holder, number, run } }
            }
            message::Request::Write { version, holder } => {
                let Some(message) = self.message_of(server, holder, version) else { return };
                let is_sent = self.remote(server, |remote, now| remote.write(version, message, now));
                return self.unless(is_sent, server);
            }
        };
        let message = link::call(&call, Bytes::new()).ok();
        let is_sent = message.is_some_and(|message| self.remote(server, |remote, now| remote.send(message, now)));
        self.unless(is_sent, server);
    }

    fn unless(&mut self, is_sent: bool, server: ServerId) {
        if !is_sent {
            self.lost(server, "it cannot be sent to");
        }
    }

    // ---- servers ----

    fn connect(&mut self, server: ServerId) {
        let Some(remote) = self.remotes.get_mut(server.0) else { return };
        remote.connected(self.messenger.connect(remote.address()), Instant::now());
    }

    /// Does something with a server. `false` if there is no such server.
    fn remote(&mut self, server: ServerId, does: impl FnOnce(&mut Remote, Instant) -> bool) -> bool {
        self.remotes.get_mut(server.0).is_some_and(|remote| does(remote, Instant::now()))
    }

    /// The server of a connection; `None` if it was given up.
    fn server_at(&self, connection: &Connection) -> Option<ServerId> {
        self.remotes.iter().position(|remote| remote.connection() == Some(connection)).map(ServerId)
    }

    fn lost(&mut self, server: ServerId, why: &str) {
        let Some(remote) = self.remotes.get(server.0) else { return };
        tracing::info!(server = %remote.address(), why, "a copy is left out");
        self.disconnected(server, why);
        self.writer.lost(server);
    }

    /// A server's connection is given up, for this reason.
    fn disconnected(&mut self, server: ServerId, why: &str) {
        if let Some(left_out) = self.shared.left_out.get(server.0) {
            *left_out.lock().unwrap_or_else(PoisonError::into_inner) = why.to_owned();
        }
        self.withdraw(server);
        self.remote(server, |remote, now| remote.disconnect(now));
        self.shared.regions.close(server);
        self.catch_up_ends(server);
        self.forget_applied();
    }

    fn answered(&mut self, connection: &Connection, delivery: Delivery) {
        let Some(server) = self.server_at(connection) else { return };
        let reply = match link::decode_reply(&delivery) {
            Ok(reply) => reply,
            Err(error) => return self.lost(server, &error.to_string()),
        };
        let is_answer = !matches!(reply, Reply::Progress { .. });
        self.remote(server, |remote, now| {
            remote.heard(is_answer, now);
            true
        });
        if let Some(window) = self.remotes.get_mut(server.0).and_then(Remote::window) {
            match reply {
                Reply::Written { room, .. } => window.told(room.bytes),
                Reply::Granted(room) => window.granted(room),
                _ => {}
            }
        }
        match reply {
            Reply::Standing { standing, writer_silent, .. } => match self.other_writer(writer_silent) {
                Some(silent) => self.give_way(server, silent),
                None => self.writer.answered(server, Answer::Standing(standing)),
            },
            Reply::Promised(standing) => self.writer.answered(server, Answer::Promised(standing)),
            Reply::Fenced { by } => self.writer.answered(server, Answer::Fenced { by }),
            Reply::Confirmed { question } => self.writer.answered(server, Answer::Confirmed { question }),
            Reply::Granted(_) => self.resize(),
            Reply::Reached { pulls, lends } => {
                self.remotes[server.0].reached(pulls, lends);
            }
            Reply::Progress { compared } => self.catch_up_goes_on(server, compared),
            Reply::Whole { applied } => {
                self.applied(server, applied);
                self.remote(server, |remote, _| {
                    remote.is_whole();
                    true
                });
                self.catch_up_is_complete(server);
                self.looks_soon = true;
                self.writer.answered(server, Answer::Whole { applied });
            }
            Reply::Written { applied, durable, .. } => {
                self.applied(server, applied);
                self.writer.answered(server, Answer::Written { applied, durable });
            }
            Reply::Data { number, entries } => self.read(server, number, &entries, delivery.data),
            Reply::Mapped { number, newest, zeros } => self.mapped(server, number, newest, zeros),
            Reply::Attached { session, keys } => self.open_region(connection, session, keys),
            Reply::Refused { cause: Cause::NoMemory, text } => self.refused(server, &text),
            Reply::Refused { text, .. } => self.lost(server, &text),
            Reply::Created
            | Reply::Lent { .. }
            | Reply::Status(_)
            | Reply::Scrubbing(_)
            | Reply::Removed { .. }
            | Reply::Grown { .. } => self.lost(server, "it answers what it was not asked"),
        }
    }

    /// How long another writer has been silent that is at work, and which this one respects: until it has asked for a
    /// turn of its own.
    fn other_writer(&self, silent: Option<u32>) -> Option<Duration> {
        let silent = Duration::from_millis(silent?.into());
        (!self.takes_over && self.writer.holder().is_none() && silent < AT_WORK).then_some(silent)
    }

    /// Ends before anything was asked of the servers.
    fn give_way(&mut self, server: ServerId, silent: Duration) {
        self.is_over = true;
        let server = self.remotes.get(server.0).map(|remote| remote.address().to_string()).unwrap_or_default();
        if let Some(opened) = self.opened.take() {
            let _ = opened.send(Err(Error::InUse { server, silent })); // the caller waits for it
        }
    }

    fn applied(&mut self, server: ServerId, applied: Version) {
        self.remote(server, |remote, now| {
            remote.applied(applied, now);
            true
        });
        self.forget_applied();
    }

    /// Forgets the writes that are acknowledged, and that every server has applied which gets writes.
    fn forget_applied(&mut self) {
        let first = self.remotes.iter().filter_map(Remote::first_unapplied).min();
        let mut freed = 0;
        // Not one that is still being sent, or that is sent again once there is space.
        let kept = self.sent.min(self.writer.acknowledged());
        let is_over = |version: Version| version <= kept && first.is_none_or(|first| version < first);
        while self.unapplied.front().is_some_and(|write| is_over(write.version)) {
            if self.unapplied.pop_front().is_some_and(|write| write.has_place) {
                freed += 1;
            }
        }
        (0..freed).for_each(|_| self.free_place());
    }

    /// Blocks have arrived. They are checked against what their writer said of them.
    fn read(&mut self, server: ServerId, number: u64, entries: &[Entry], mut data: Buffer) {
        let Some(read) = self.reads.get_mut(&number).filter(|read| !read.is_map) else { return };
        let is_right = |(entry, crc): (&Entry, u32)| !entry.is_written() || entry.crc == crc;
        if entries.len() != read.run.count as usize || !entries.iter().zip(sums(&data)).all(is_right) {
            return self.lost(server, "the blocks that it sent are not those of their entries");
        }
        for (entry, block) in entries.iter().zip(data.chunks_exact_mut(BLOCK_BYTES)) {
            if !entry.is_written() {
                block.fill(0);
            }
        }
        read.data = data.into();
        let newest = newest(entries.iter().map(|entry| entry.version));
        self.writer.answered(server, Answer::Read { number, newest });
    }

    /// A server has said which blocks are zeros.
    fn mapped(&mut self, server: ServerId, number: u64, newest: Version, zeros: Vec<u8>) {
        let Some(read) = self.reads.get_mut(&number).filter(|read| read.is_map) else { return };
        if zeros.len() != (read.run.count as usize).div_ceil(8) {
            return self.lost(server, "it says of other blocks than was asked which are zeros");
        }
        read.data = zeros.into();
        self.writer.answered(server, Answer::Read { number, newest });
    }

    pub(super) fn look_at_the_time(&mut self) {
        let now = Instant::now();
        self.looks_soon = false;
        let since = now.saturating_duration_since(std::mem::replace(&mut self.looked, now));
        if since > STOPPED {
            // This process did not run: it has heard no server, and their answers are there or on their way.
            self.remotes.iter_mut().for_each(|remote| remote.excuse(since, now));
        }
        for number in 0..self.remotes.len() {
            let Some(remote) = self.remotes.get(number) else { continue };
            if remote.is_overdue(self.copy_limit, now) {
                self.lost(ServerId(number), "it did not answer in time");
            } else if self.writer.is_serving() && remote.is_due(now) {
                self.writer.take_back(ServerId(number));
            } else if self.writer.is_waiting_for_space(ServerId(number)) && remote.is_try_due(now) {
                self.writer.try_again(ServerId(number));
            } else if remote.is_silent(BEAT, now) {
                self.beat(ServerId(number));
            }
        }
        self.attach();
        self.offer();
        self.count_served();
        if self.writer.is_serving() {
            self.ask_for_room(now);
        }
    }

    /// Asks the servers for larger windows, or gives some of them back.
    fn ask_for_room(&mut self, now: Instant) {
        for number in 0..self.remotes.len() {
            let ask = self.remotes.get_mut(number).and_then(|remote| remote.ask(now));
            let call = ask.map(|Ask { wants, obeys }| link::call(&Call::Window { wants, obeys }, Bytes::new()));
            if let Some(Ok(message)) = call {
                let is_sent = self.remote(ServerId(number), |remote, now| remote.send(message, now));
                self.unless(is_sent, ServerId(number));
            }
        }
    }

    /// Callers may submit as much as the windows take, and as much again.
    fn resize(&mut self) {
        let windows = self.remotes.iter_mut().filter_map(Remote::window);
        let bytes = windows.map(|window| window.bytes()).max().unwrap_or_default();
        self.shared.submitted.resize(LEAST_SUBMITTED_BYTES.max(bytes as usize * 2));
    }

    /// Asks a server that owes nothing whether it still obeys this writer. So a server that hangs is noticed, and a
    /// later writer, although only regions are read.
    fn beat(&mut self, server: ServerId) {
        if let Some(holder) = self.writer.holder().filter(|_| self.writer.is_serving()) {
            self.send(server, message::Request::Confirm { holder, question: NO_QUESTION });
        }
    }
}

/// How long a server may be silent before it is asked something: together with the limit for answers, this is how long
/// blocks of a server that hangs are read in its memory.
const BEAT: Duration = Duration::from_secs(1);

const LACKS_TAIL: &str = "servers have lost power, or do not answer: writes that were acknowledged and never flushed may be missing; what \
is there is what the volume held at one moment, at or after the last flush";

/// A question whose answer changes nothing. Those of the rules have numbers from 1.
const NO_QUESTION: u64 = 0;

/// How often time limits are looked at. Much shorter than any of them.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A process that has not looked at the time for so long was stopped, or its host was. Much longer than the events
/// between two looks take on a busy host, and shorter than any time limit for servers.
const STOPPED: Duration = Duration::from_millis(500);
