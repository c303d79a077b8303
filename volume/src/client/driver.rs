//! Driver: has a volume open. It feeds [`Writer`] with requests, answers and the time, and carries out what it decides.
//! It decides nothing that the rules are about, and never waits. [`Turns`] says which thread runs it.
//!
//! Requests are begun in the order in which they were submitted. If a server has no room for the next write, that write
//! waits, and everything behind it. `catching_up`: what is said of copies that are taken back; `looking`: reads that
//! are answered without a message; `pulling`: writes whose blocks are not in the message; `space`: servers without
//! space for a write; `turn`: what the thread that runs it does.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::{Address, Buffer, Connection, Delivery, Message, Messenger};

use super::regions::{Job, News, Opening, Outgoing, Region};
use super::remote::{Ask, Remote};
use super::{
    AT_WORK, Bring, ClientOptions, Completion, Done, Error, Event, LEAST_SUBMITTED_BYTES, NO_CATCH_UP, Op, Reads,
    Request, Shared, Writes, why_over,
};
use crate::layout::{Entry, Layout, sums};
use crate::link::{self, Rdma};
use crate::reader::Found;
use crate::rules::{self, Answer, Holder, ServerId, Version};
use crate::shape::{BLOCK_BYTES, Shape};
use crate::wire::{Call, Cause, Mode, Reply, Run, last_write_of, newest};
use crate::writer::{Action, End, Nearness, Seen, Writer};

/// See the module's text.
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
    /// When the opening began.
    began: Instant,
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
            began: now,
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
                    self.lost(server, &why_over(&connection));
                }
            }
            Event::Refused(connection, why) => {
                if let Some(server) = self.server_at(&connection) {
                    self.lost(server, &why.to_string());
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
            let is_lost = |server: &ServerId| self.left_out(*server).is_some_and(|why| !why.is_empty());
            let lost: Vec<_> = (0..self.remotes.len()).map(ServerId).filter(is_lost).collect();
            let why = self.reasons(&lost).into();
            let _ = opened.send(Err(Error::NotOpened { end, why })); // the caller waits for it
        }
    }

    fn send(&mut self, server: ServerId, request: rules::Request) {
        let call = match request {
            rules::Request::Ask => {
                self.connect(server);
                self.first_call(server)
            }
            rules::Request::Promise(holder) => Call::Promise(holder),
            rules::Request::CatchUp { holder, lender, since } => {
                self.catch_up_begins(server);
                let lender = self.remotes.get(lender.0).map(|remote| remote.address().to_string());
                Call::CatchUp { holder, since, lender: lender.unwrap_or_default() }
            }
            rules::Request::Mark { holder, may_lack_tail } => Call::Mark { holder, may_lack_tail },
            rules::Request::Flush(holder) => Call::Flush(holder),
            rules::Request::Confirm { holder, question } => Call::Confirm { holder, question },
            rules::Request::Read { holder, number } => {
                let Some(read) = self.reads.get(&number) else { return };
                self.shared.counts.asked.fetch_add(1, Ordering::Relaxed);
                let run = read.run;
                if read.is_map { Call::Map { holder, number, run } } else { Call::Read { holder, number, run } }
            }
            rules::Request::Write { version, holder } => {
                let Some(message) = self.message_of(server, holder, version) else { return };
                let is_sent = self.remote(server, |remote, now| remote.write(version, message, now));
                return self.unless(is_sent, server);
            }
        };
        let message = link::call(&call, Bytes::new()).ok();
        let is_sent = message.is_some_and(|message| self.remote(server, |remote, now| remote.send(message, now)));
        self.unless(is_sent, server);
    }

    /// What a new connection begins with. A server whose copy has another size than the volume takes that first. So
    /// many have promised to obey this writer that no writer of the other size can serve.
    fn first_call(&mut self, server: ServerId) -> Call {
        if self.writer.is_serving() && self.remotes.get_mut(server.0).is_some_and(Remote::takes_size) {
            return Call::Grow { shape: self.shape, takes_over: false };
        }
        self.open_call()
    }

    fn open_call(&self) -> Call {
        Call::Open { shape: self.shape, mode: Mode::Write, writer: self.id }
    }

    /// Its copy is about to have another size, for a command that may have gone: it is asked again before the opening
    /// says that too few servers answer.
    fn grows(&mut self, server: ServerId, why: &str) {
        self.disconnected(server, why);
        self.remote(server, |remote, now| {
            remote.grows(now);
            true
        });
    }

    /// The copy of a server has the size of the volume now, or may have.
    fn open_at(&mut self, server: ServerId) {
        self.remote(server, |remote, _| {
            remote.has_taken_size();
            true
        });
        let message = link::call(&self.open_call(), Bytes::new()).ok();
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
            Reply::Refused { cause: Cause::InUse, text }
                if self.opened.is_some() && self.began.elapsed() < self.copy_limit =>
            {
                self.grows(server, &text);
            }
            Reply::Refused { cause, text } => {
                if cause == Cause::Shape
                    && let Some(remote) = self.remotes.get_mut(server.0)
                {
                    remote.has_other_size();
                }
                self.lost(server, &text);
            }
            Reply::Grown { .. } if self.remotes.get(server.0).is_some_and(Remote::is_taking_size) => {
                self.open_at(server);
            }
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

    fn look_at_the_time(&mut self) {
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
            } else if remote.asks_again(now) {
                self.connect(ServerId(number));
                self.open_at(ServerId(number));
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
            self.send(server, rules::Request::Confirm { holder, question: NO_QUESTION });
        }
    }

    /// Whether nothing is done any more, and the volume's thread should end the driver.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// A turn has panicked: what the driver has in mind may be half done.
    pub(super) fn give_up(&mut self) {
        self.is_over = true;
    }

    /// Whether the volume's thread has something to do now.
    fn needs_keeper(&self) -> bool {
        self.is_over || self.looks_soon || !self.handed.is_empty() || !self.handed_failures.is_empty()
    }

    /// Requests were submitted.
    pub(super) fn submitted(&mut self, mut ops: VecDeque<Op>) {
        self.queue.append(&mut ops);
    }

    /// Begins requests and carries out what is decided, without calling a caller's `done`.
    fn go_on_for_a_caller(&mut self) {
        self.is_for_a_caller = true;
        self.begin();
        self.carry_out();
        self.is_for_a_caller = false;
    }

    /// Begins requests, carries out what is decided, and completes what is done.
    pub(super) fn go_on(&mut self) {
        self.begin();
        self.carry_out();
        for (completion, data) in self.handed.drain(..) {
            completion.end(data);
        }
        for (done, error) in self.handed_failures.drain(..) {
            done(Err(error));
        }
    }

    /// A caller is told that its request waits.
    pub(super) fn tell(&mut self, done: Done, error: Error) {
        if self.is_for_a_caller { self.handed_failures.push((done, error)) } else { done(Err(error)) }
    }

    pub(super) fn complete(&mut self, completion: Completion, data: Option<Bytes>) {
        if self.is_for_a_caller { self.handed.push((completion, data)) } else { completion.end(data) }
    }

    fn catch_up_begins(&self, server: ServerId) {
        if let Some(remote) = self.remotes.get(server.0) {
            tracing::info!(server = %remote.address(), "a copy catches up");
        }
        self.set_compared(server, 0);
    }

    /// A server says how far it is.
    fn catch_up_goes_on(&self, server: ServerId, compared: u64) {
        let (before, blocks) = (self.set_compared(server, compared), self.shape.blocks());
        let Some(remote) = self.remotes.get(server.0).filter(|_| before != NO_CATCH_UP) else { return };
        if let Some(percent) = part_reached(before, compared, blocks) {
            tracing::info!(server = %remote.address(), compared, blocks, "a copy catches up: {percent} %");
        }
    }

    fn catch_up_is_complete(&self, server: ServerId) {
        self.set_compared(server, NO_CATCH_UP);
        if let Some(remote) = self.remotes.get(server.0) {
            tracing::info!(server = %remote.address(), "a copy is whole");
        }
    }

    /// The server was left out.
    fn catch_up_ends(&self, server: ServerId) {
        self.set_compared(server, NO_CATCH_UP);
    }

    /// Returns what it was before.
    fn set_compared(&self, server: ServerId, compared: u64) -> u64 {
        let slot = self.shared.compared.get(server.0);
        slot.map_or(NO_CATCH_UP, |slot| slot.swap(compared, Ordering::Relaxed))
    }

    /// Asks the members for their regions, each connection once.
    fn attach(&mut self) {
        let Some(holder) = self.writer.holder().filter(|_| self.reads_by != Reads::Asked && self.writer.is_serving())
        else {
            return;
        };
        let members: Vec<ServerId> = self.writer.members().collect();
        for server in members {
            let is_due = self.remotes.get_mut(server.0).is_some_and(|remote| remote.attach());
            if let (true, Ok(message)) = (is_due, link::call(&Call::Attach(holder), bytes::Bytes::new())) {
                let is_sent = self.remote(server, |remote, now| remote.send(message, now));
                self.unless(is_sent, server);
            }
        }
    }

    /// A server permits to read its copy.
    fn open_region(&mut self, connection: &Connection, session: u64, keys: Vec<Vec<u8>>) {
        self.readers.retain(|reader| !reader.is_finished());
        let (layout, reads, bring) = (Layout::of(self.shape), self.reads_by, Arc::clone(&self.bring));
        let rdma = self.rdma.clone();
        let opening = Opening { layout, reads, rdma, session, keys, connection: connection.clone(), bring };
        match std::thread::Builder::new().name("volume-reader".into()).spawn(|| opening.run()) {
            Ok(thread) => self.readers.push(thread),
            Err(error) => tracing::warn!(%error, "no thread to read a copy: its server is asked"),
        }
    }

    /// A thread has something to say of its region. It does not count if the connection was given up meanwhile.
    fn region(&mut self, connection: &Connection, news: News) {
        let Some(server) = self.server_at(connection) else { return };
        match news {
            News::Open(region) => {
                let nearness = match (&region, self.writer.holder()) {
                    (Region::Here(reader, _), Some(holder)) => {
                        self.shared.regions.open(server, holder, Arc::clone(reader));
                        Nearness::Here
                    }
                    _ => Nearness::Far,
                };
                self.remotes[server.0].open_region(Some(region));
                self.writer.region_opened(server, nearness);
            }
            News::Looked { number, found } => {
                self.shared.counts.far.fetch_add(found.is_some().into(), Ordering::Relaxed);
                self.looked(server, number, found);
            }
            News::Closed => {
                self.remotes[server.0].open_region(None);
                self.writer.region_closed(server);
            }
        }
    }

    /// Reads blocks out of a region: now if it is here, or by its thread.
    fn look(&mut self, server: ServerId, number: u64) {
        let Some(&Read { run, is_map, .. }) = self.reads.get(&number) else { return };
        if is_map {
            return self.looked(server, number, None); // few ask for it: the server answers
        }
        match self.remotes.get(server.0).and_then(|remote| remote.region()) {
            Some(Region::Here(reader, _)) => {
                let mut data = vec![0; run.count as usize * BLOCK_BYTES];
                let found = reader.blocks(run.first, &mut data).ok().map(|found| (data, found));
                self.shared.counts.here.fetch_add(found.is_some().into(), Ordering::Relaxed);
                self.looked(server, number, found);
            }
            Some(Region::Far(jobs)) if jobs.send(Job { number, run }).is_ok() => {}
            _ => self.looked(server, number, None),
        }
    }

    fn looked(&mut self, server: ServerId, number: u64, found: Option<(Vec<u8>, Found)>) {
        let seen = found.as_ref().map(|(_, found)| Seen { newest: found.newest(), line: found.line });
        let counts = self.writer.looked(server, number, seen);
        if let (true, Some((data, _)), Some(read)) = (counts, found, self.reads.get_mut(&number)) {
            read.data = data.into();
        }
    }

    /// The last write of any of these blocks that some server has not applied yet.
    fn last_write_of(&self, run: Run) -> Version {
        let writes = self.unapplied.iter().map(|write| (write.version, &write.runs[..]));
        last_write_of(run, writes).unwrap_or_default()
    }

    /// Offers the outbox to the members, each connection once.
    fn offer(&mut self) {
        if self.outgoing.is_none() || !self.writer.is_serving() {
            return;
        }
        let members: Vec<ServerId> = self.writer.members().collect();
        for server in members {
            let connection = self.remotes.get_mut(server.0).and_then(|remote| remote.offer());
            let Some((connection, outgoing)) = connection.zip(self.outgoing.as_ref()) else { continue };
            let Some(keys) = outgoing.grant(&connection) else { continue };
            let call = Call::Offer { session: connection.id(), keys };
            if let Ok(message) = link::call(&call, Bytes::new()) {
                let is_sent = self.remote(server, |remote, now| remote.send(message, now));
                self.unless(is_sent, server);
            }
        }
    }

    /// A server's connection is about to be given up.
    fn withdraw(&self, server: ServerId) {
        let connection = self.remotes.get(server.0).and_then(|remote| remote.connection());
        if let (Some(connection), Some(outgoing)) = (connection, &self.outgoing) {
            outgoing.withdraw(connection);
        }
    }

    /// The message by which a server gets a write, and the bytes of its blocks.
    fn message_of(&mut self, server: ServerId, holder: Holder, version: Version) -> Option<(Message, u64)> {
        let pulls = self.remotes.get(server.0).is_some_and(|remote| remote.outbox.pulls);
        let source = self.source_of(server, version);
        let write = self.writes.get_mut(&version)?;
        let runs = write.runs.clone();
        let place = write.place.filter(|_| pulls);
        let message = match (&write.blocks, place) {
            (Some(blocks), Some(at)) => {
                let call = Call::Pull { holder, version, runs, sums: blocks.sums.clone(), at, source };
                link::call(&call, Bytes::new()).ok()?
            }
            // The same for each server.
            _ if write.inline.is_some() => write.inline.clone()?,
            (Some(blocks), None) => {
                let call = Call::Write { holder, version, runs, sums: blocks.sums.clone() };
                let message = link::call(&call, blocks.data.clone()).ok()?;
                write.inline.insert(message).clone()
            }
            (None, _) => {
                let call = Call::Zero { holder, version, run: *runs.first()? };
                write.inline.insert(link::call(&call, Bytes::new()).ok()?).clone()
            }
        };
        let bytes = write.blocks.as_ref().map_or(0, |blocks| blocks.data.len() as u64);
        let counts = &self.shared.counts;
        let count = if place.is_some() { &counts.pulled } else { &counts.inline };
        count.fetch_add(1, Ordering::Relaxed);
        counts.sent.fetch_add((message.front.len() + message.data.len()) as u64, Ordering::Relaxed);
        Some((message, bytes))
    }

    /// The server before this one that pulls this write as well; empty if there is none, or it shall pull from here.
    fn source_of(&self, server: ServerId, version: Version) -> String {
        if self.writes_by != Writes::Chain {
            return String::new();
        }
        let mut before = self.remotes.iter().take(server.0).rev();
        let source = before.find(|remote| remote.outbox.lends && remote.last_sent() == Some(version));
        source.map(|source| source.address().to_string()).unwrap_or_default()
    }

    /// Frees a place of the outbox.
    fn free_place(&mut self) {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.free();
        }
    }

    fn count_served(&self) {
        if let Some(outgoing) = &self.outgoing {
            self.shared.counts.served.store(outgoing.served(), Ordering::Relaxed);
        }
    }

    /// A server has no space, or no memory, for what it was asked.
    fn refused(&mut self, server: ServerId, why: &str) {
        let Some(remote) = self.remotes.get(server.0) else { return };
        tracing::debug!(server = %remote.address(), why, "a server refuses");
        self.disconnected(server, why);
        if self.writer.refused(server) {
            self.remote(server, |remote, now| {
                remote.is_tried_soon(now);
                true
            });
        }
    }

    /// Whether there is space enough has perhaps changed. Callers that wait for a write are told that it has to wait.
    fn look_for_space(&mut self) {
        let servers = if self.is_over { Vec::new() } else { self.writer.lacks_space() };
        let was_short = self.shared.is_short();
        if servers.is_empty() {
            if was_short {
                self.shared.set_no_space(None);
            }
            if was_short && !self.is_over {
                tracing::info!(volume = %self.shape.volume(), "there is space again: writes are accepted");
            }
            return;
        }
        if !was_short {
            let why = self.reasons(&servers);
            tracing::warn!(volume = %self.shape.volume(), why, "writes are refused for lack of space, and reads go on");
            self.shared.set_no_space(Some(why));
        }
        let Some(why) = self.shared.no_space() else { return };
        let late = self.writes.values_mut().filter_map(|write| write.completion.split());
        let told: Vec<_> = late.collect();
        let flushes = self.flushes.drain(..).filter_map(|(_, mut flush)| flush.split());
        let told: Vec<_> = told.into_iter().chain(flushes).collect();
        told.into_iter().for_each(|done| self.tell(done, Error::NoSpace { why: why.clone() }));
    }

    /// Each server with its reason.
    fn reasons(&self, servers: &[ServerId]) -> String {
        let reason = |server: &ServerId| {
            let address = self.remotes.get(server.0).map(|remote| remote.address().to_string()).unwrap_or_default();
            format!("{address}: {}", self.left_out(*server).unwrap_or_default())
        };
        servers.iter().map(reason).collect::<Vec<_>>().join("; ")
    }

    /// Why a server was left out last.
    fn left_out(&self, server: ServerId) -> Option<String> {
        Some(self.shared.left_out.get(server.0)?.lock().unwrap_or_else(PoisonError::into_inner).clone())
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

/// Parts of a copy after each of which the log says how far a catch-up is. It also says when one begins, and when the
/// copy is whole.
const PARTS: u64 = 10;

/// The percentage that is to be said, if a part was completed between the two.
fn part_reached(before: u64, now: u64, blocks: u64) -> Option<u64> {
    let part = |compared: u64| compared.min(blocks).saturating_mul(PARTS).checked_div(blocks).unwrap_or(0);
    (part(now) > part(before)).then(|| part(now) * 100 / PARTS)
}

/// Turns: which thread runs the driver. The one that brings an event does, so that no other thread has to be woken for
/// it: with a write of 4 KiB, to wake a thread takes longer than everything else.
///
/// ```text
///   a caller ─────────────── submits ────▶ queue ─╮
///   the messenger's worker ─ an answer ───────────┤  one at a time has the driver, for one turn
///   a reader of a region ─── news ────────────────┤─▶ Driver
///   the volume's thread ──── the time ────────────╯
/// ```
///
/// - **A caller never waits for the driver.** If another thread has it, that one begins the request: it looks into the
///   queue again after it has given the driver back.
/// - **`done` is not called by a thread that submits**, so callers may hold locks which `done` takes. What a caller's
///   turn completes is handed to the volume's thread. This is rare: a read in place that had to wait, and a flush of
///   what is flushed already.
/// - The other threads wait for the driver, which is busy for microseconds.
pub(super) struct Turns {
    submitted: Mutex<Submitted>,
    /// `None`: before the volume is opened, and after its end.
    driver: Mutex<Option<Driver>>,
    /// The thread that looks at the time.
    keeper: OnceLock<Thread>,
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Submitted {
    queue: VecDeque<Op>,
    /// The volume has ended: nothing is begun any more.
    is_over: bool,
}

impl Turns {
    pub(super) fn new() -> Arc<Turns> {
        Arc::new(Turns { submitted: Mutex::default(), driver: Mutex::new(None), keeper: OnceLock::new() })
    }

    /// Submits a request. It is given back if the volume has ended.
    pub(super) fn submit(&self, op: Op) -> Option<Op> {
        let mut submitted = self.submitted();
        if submitted.is_over {
            return Some(op);
        }
        submitted.queue.push_back(op);
        drop(submitted);
        self.begin_submitted();
        None
    }

    /// Begins what is submitted, unless another thread has the driver: that one looks into the queue again after it has
    /// given it back.
    fn begin_submitted(&self) {
        while self.is_waiting() {
            let mut driver = match self.driver.try_lock() {
                Ok(driver) => driver,
                Err(TryLockError::Poisoned(poisoned)) => given_up(poisoned),
                Err(TryLockError::WouldBlock) => return,
            };
            let Some(running) = driver.as_mut().filter(|running| !running.is_over()) else { return };
            self.take_submitted(running);
            running.go_on_for_a_caller();
            let needs_keeper = running.needs_keeper();
            drop(driver);
            if needs_keeper {
                self.wake_keeper();
            }
        }
    }

    /// Something has happened: the calling thread carries it out, and what follows from it.
    pub(super) fn happened(&self, event: Event) {
        self.turn(|driver| driver.happened(event));
    }

    /// The volume's thread: until the volume is closed, or ends. What is then under way is dropped, and so completed
    /// with the reason.
    pub(super) fn keep(&self, driver: Driver) {
        let _ = self.keeper.set(std::thread::current()); // there is one
        *self.driver() = Some(driver);
        while self.turn(Driver::look_at_the_time) {
            std::thread::park_timeout(LOOK_AGAIN);
        }
        let driver = self.driver().take();
        let mut submitted = self.submitted();
        submitted.is_over = true;
        let queue = std::mem::take(&mut submitted.queue);
        drop(submitted);
        // Without a lock: their completions are the callers' own code, and the messenger's threads are waited for.
        drop(queue);
        if let Some(driver) = driver {
            driver.end();
        }
    }

    /// The volume is to end.
    pub(super) fn close(&self) {
        self.happened(Event::Close);
        self.wake_keeper();
    }

    /// A turn of a thread that may call callers' own code. Returns whether the volume goes on.
    fn turn(&self, does: impl FnOnce(&mut Driver)) -> bool {
        let mut does = Some(does);
        loop {
            let mut driver = self.driver();
            let Some(running) = driver.as_mut().filter(|running| !running.is_over()) else { return false };
            if let Some(does) = does.take() {
                does(running);
            }
            self.take_submitted(running);
            running.go_on();
            let (goes_on, needs_keeper) = (!running.is_over(), running.needs_keeper());
            drop(driver);
            if needs_keeper {
                self.wake_keeper();
            }
            if !goes_on || !self.is_waiting() {
                return goes_on;
            }
        }
    }

    /// The driver gets what is submitted.
    fn take_submitted(&self, driver: &mut Driver) {
        driver.submitted(std::mem::take(&mut self.submitted().queue));
    }

    fn is_waiting(&self) -> bool {
        !self.submitted().queue.is_empty()
    }

    fn wake_keeper(&self) {
        // It wakes itself if that was the one.
        if let Some(keeper) = self.keeper.get() {
            keeper.unpark();
        }
    }

    fn submitted(&self) -> MutexGuard<'_, Submitted> {
        self.submitted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn driver(&self) -> MutexGuard<'_, Option<Driver>> {
        self.driver.lock().unwrap_or_else(given_up)
    }
}

/// The driver of a thread that has panicked. It does nothing more.
fn given_up<'a>(poisoned: PoisonError<MutexGuard<'a, Option<Driver>>>) -> MutexGuard<'a, Option<Driver>> {
    let mut driver = poisoned.into_inner();
    if let Some(driver) = driver.as_mut() {
        driver.give_up();
    }
    driver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenth_is_said_once() {
        let said: Vec<u64> = (0..1000).filter_map(|at| part_reached(at, at + 1, 1000)).collect();
        assert_eq!(said, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
        assert_eq!(part_reached(0, 555, 1000), Some(50));
        assert_eq!(part_reached(555, 599, 1000), None);
        assert_eq!(part_reached(0, u64::MAX, 0), None);
    }
}
