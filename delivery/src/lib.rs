//! Delivery: plays the primary towards the replica's own server, with bytes that it reads from the source's tables.
//!
//! ```text
//!   source's snapshot ══ READ ══▶ slots (in place, in the sink, or in the spool) ──┐
//!                                 input                                            ├──▶ link ──▶ the replica's server
//!   source's journal  ══ READ ══▶ chunks of the stream ────────────────────────────┘     ◀── PSYNC, ACK
//! ```
//!
//! One thread runs one loop that never blocks. It carries out orders, reads what has arrived, writes as much as the
//! server's socket takes, and waits on all descriptors. It ends at [`Order::Stop`], or when the handle is dropped.
//!
//! It reads from the [`Input`] and writes to the [`ServerLink`]. Neither knows the other: each returns values, and this
//! loop decides. The [`Stream`] holds bytes that have arrived too early. A connection becomes the server's link when it
//! has logged in and sent `PSYNC`. Until then it is one of the [`candidates`](link::candidates).
//!
//! What must hold:
//! - A server is never given bytes of two snapshots in one payload: another generation drops the link first.
//! - The mark that completes a payload is sent only after every slot of it was checked *after* it was used. Slots that
//!   were lent to the socket are used until the server has read them.
//! - The stream follows the mark only after the server's first ACK. A server that loads from the link discards what
//!   came with the mark; one that loads from a file looks for the mark at the end of what it has read.
//! - Nothing of ours is ever put into the stream: it would move the replication offset.
//! - Progress is published before the notice that it explains: `Loaded` without it would look like a restart.
//!
//! [`link`] moves bytes, and keeps other processes from the server's link. `payload` has what a server
//! is given, also one of another family or version, and what a module in the server is told. At the end
//! of this file are the orders to the delivery.

#![forbid(unsafe_code)]
// The docs name private items: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]
// Larger than the bound: the loop, and what it does with what each side brings, stand in one place.

mod input;
pub mod link;
pub mod payload;
mod reference_plan;
mod server_link;
pub mod simulated;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use payload::{Answer, Conversion, Introduction};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use tokio::sync::mpsc::UnboundedSender;

use self::input::{Fetched, Input, InputError, Stream};
use self::payload::{Piece, PlainPayload, Used, WriteError, Wrote, random_mark};
use self::server_link::{LinkEvent, Reached, Read, ServerLink, Stage};
use crate::link::candidates::{Candidates, Newcomer};
use remora_process::exit::{Code, Failure};
use remora_reader::feed::{Feed, Position};
use remora_reader::parts::{FeedError, Meter};
use remora_reader::relay::reader::{Lost, ReadFrom};
use remora_reader::spool;
use remora_redis::ReplId;
use remora_redis::rdb::Converted;

/// Bytes written to the link in one turn. The bound keeps a fast server from delaying the loop's other work.
const TURN_BYTES: usize = 8 << 20;

/// Starts the thread.
pub fn spawn(setup: Setup) -> io::Result<Handle> {
    Handle::spawn(move |control| Delivery::new(Instant::now(), setup, control).run())
}

/// The delivery thread's loop and what it owns.
// Larger than the bound: a method for each thing that the input, the server or the driver can bring.
struct Delivery {
    control: Control,
    notices: UnboundedSender<Notice>,
    meter: Arc<Meter>,
    candidates: Candidates,
    at: Position,
    input: Input,
    stream: Stream,
    link: Option<ServerLink>,
    /// Whether the next payload refers to shared memory.
    by_module: bool,
    /// How the snapshot is converted for the server.
    conversion: Option<Conversion>,
    /// Whether the server was refused: it is sent nothing more.
    refused: bool,
    /// Number of introductions so far.
    introductions: u64,
    ready: Readiness,
    clock: Clock,
}

/// The time: the system's, unless a simulation has set it.
#[derive(Default)]
struct Clock {
    set: Option<Instant>,
}

impl Clock {
    fn now(&self) -> Instant {
        if let Some(now) = self.set {
            return now;
        }
        Instant::now()
    }
}

/// The result of one turn.
enum Turned {
    /// More work may be due now.
    Moved,
    /// Nothing is due until a descriptor is ready or a deadline comes.
    Idle,
    /// The delivery was ordered to end.
    Ended,
}

/// Why the server's link is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The delivery has no more use for it: there is another snapshot to load.
    Ours,
    /// The server closed it, or it cannot go on.
    Broken,
}

impl Delivery {
    fn new(now: Instant, setup: Setup, control: Control) -> Delivery {
        Delivery {
            control,
            notices: setup.notices,
            meter: setup.meter.clone(),
            candidates: setup.candidates,
            at: Position::default(),
            input: Input::new(now, setup.spool, setup.found, setup.meter),
            stream: Stream::new(setup.backlog_limit, setup.conversion.as_ref().map(|found| found.known.clone())),
            link: None,
            by_module: false,
            conversion: setup.conversion,
            refused: false,
            introductions: 0,
            ready: Readiness::all(now),
            clock: Clock::default(),
        }
    }

    fn run(mut self) {
        if let Err(text) = self.turns() {
            let _ = self.notices.send(Notice::Fatal { text });
        }
    }

    /// Runs until the delivery is ordered to end. The error says why it cannot continue.
    fn turns(&mut self) -> Result<(), String> {
        loop {
            match self.turn(self.clock.now())? {
                Turned::Moved => {}
                Turned::Idle => self.wait(),
                Turned::Ended => return Ok(()),
            }
        }
    }

    /// Runs one turn, without waiting.
    fn turn(&mut self, now: Instant) -> Result<Turned, String> {
        self.ready.look(now);
        if !self.obey(now)? {
            return Ok(Turned::Ended);
        }
        let mut moved = self.accept(now);
        moved |= self.hear(now);
        moved |= self.fetch(now)?;
        moved |= self.write();
        self.publish();
        Ok(if moved { Turned::Moved } else { Turned::Idle })
    }

    /// Publishes progress, and then sends the notice.
    fn tell(&self, notice: Notice) {
        self.publish();
        let _ = self.notices.send(notice);
    }

    fn publish(&self) {
        self.control.shared.publish(Position { copy: self.input.copy(), ..self.at.clone() });
    }

    // ---- orders ----

    /// Carries out the orders. Returns `false` if one of them ends the delivery.
    fn obey(&mut self, now: Instant) -> Result<bool, String> {
        if std::mem::take(&mut self.ready.waker) {
            self.control.rest();
        }
        loop {
            match self.control.orders.try_recv() {
                Ok(Order::Attach(feed)) => self.attach(now, feed)?,
                Ok(Order::ReadFrom(from)) => self.input.read_from(now, from),
                Ok(Order::GiveUp) if self.at.loaded => {}
                Ok(Order::GiveUp) => self.drop_link("the source has put us out", Cause::Ours),
                Ok(Order::LoadAgain) => self.load_again(now),
                Ok(Order::Adopt(newcomer)) => self.take_link(now, *newcomer),
                Ok(Order::Hold) => self.link.iter_mut().for_each(ServerLink::hold),
                Ok(Order::UseModule(used)) => {
                    self.candidates.opened();
                    self.by_module = used;
                }
                Ok(Order::Introduced { number, answer }) => self.introduced(now, number, answer),
                Ok(Order::Stop { done }) => {
                    self.input.remove_spool_if(done);
                    return Ok(false);
                }
                Err(TryRecvError::Empty) => return Ok(true),
                Err(TryRecvError::Disconnected) => return Ok(false),
            }
        }
    }

    /// Takes a new feed. Continues where the last one ended, or begins again with another snapshot.
    fn attach(&mut self, now: Instant, feed: Box<Feed>) -> Result<(), String> {
        self.abandon_memory();
        let is_same = self.at.snapshot == Some(feed.id);
        if !is_same && !self.at.loaded {
            if self.link.as_ref().is_some_and(ServerLink::has_begun) {
                self.drop_link("the snapshot that it was loading is gone", Cause::Ours);
            }
            self.begin_snapshot(&feed)?;
        }
        self.link.iter_mut().for_each(|link| link.lay_down(now));
        if let Err(error) = self.continued_by(&feed).and_then(|()| self.input.attach(now, feed, &self.at)) {
            self.tell(Notice::FeedLost { error });
        }
        Ok(())
    }

    /// A server that has loaded a snapshot gets the stream of that history only. The source may have offered another
    /// one before it knew that the server has loaded.
    fn continued_by(&self, feed: &Feed) -> Result<(), FeedError> {
        match self.history().filter(|_| self.at.loaded) {
            Some(loaded) if loaded != feed.id.origin.history => {
                Err(FeedError::OtherHistory { loaded, feed: feed.id.origin.history })
            }
            _ => Ok(()),
        }
    }

    /// Forgets what the server has loaded: the stream behind it is lost. The server comes back for the next snapshot.
    fn load_again(&mut self, now: Instant) {
        if !self.at.loaded {
            return; // it has lost the snapshot by itself, and has asked for another feed
        }
        self.abandon_memory();
        self.input.lose_feed(now);
        self.stream.clear();
        self.forget_snapshot();
        self.drop_link("the stream behind its snapshot is lost", Cause::Ours);
        self.tell(Notice::FeedWanted);
    }

    fn forget_snapshot(&mut self) {
        self.at.loaded = false;
        self.at.snapshot = None;
        self.begin_again();
    }

    fn begin_snapshot(&mut self, feed: &Feed) -> Result<(), String> {
        self.stream.clear();
        let next_byte = feed.id.origin.offset + 1;
        self.at = Position { snapshot: Some(feed.id), next_byte, ..Position::default() };
        self.input.begin_snapshot(&feed.id, feed.seal())
    }

    // ---- the server's link ----

    /// Serves the candidates. One that has logged in and sent `PSYNC` becomes the server's link and replaces the one
    /// before.
    fn accept(&mut self, now: Instant) -> bool {
        if !self.ready.candidates {
            return false;
        }
        let newcomer = self.candidates.turn(now);
        self.meter.strangers.set(self.candidates.strangers());
        let Some(newcomer) = newcomer else {
            self.ready.candidates = false;
            return false;
        };
        self.take_link(now, newcomer);
        true
    }

    /// Makes this connection the server's link, and handles its `PSYNC`.
    fn take_link(&mut self, now: Instant, newcomer: Newcomer) {
        tracing::debug!(peer = %newcomer.peer, "the server's link came");
        if self.link.is_some() {
            self.drop_link("the server made another", Cause::Broken);
        }
        self.ready.link = true;
        let (replid, offset) = (newcomer.replid, newcomer.offset);
        self.link = Some(ServerLink::new(now, newcomer));
        self.asked(now, replid, offset);
    }

    /// Closes the server's link and reports that, so that a server that does not come back is looked at.
    fn drop_link(&mut self, why: &str, cause: Cause) {
        let Some(link) = self.link.take() else { return };
        let (reached, slots) = link.close();
        slots.into_iter().for_each(|slot| self.input.give_back(slot));
        let loading = match reached {
            Reached::Asked | Reached::Introduction => false,
            Reached::Payload => true,
            Reached::Stream => !self.at.loaded,
        };
        if reached == Reached::Introduction || (loading && self.input.spool().is_none()) {
            self.begin_again();
        }
        let loading = loading && cause == Cause::Broken;
        self.tell(Notice::LinkLost { text: why.to_string(), loading });
    }

    /// Starts over: the server needs the whole snapshot again, and the slots it had are not kept.
    fn begin_again(&mut self) {
        self.at.next_slot = 0;
        self.input.begin_again(self.clock.now());
    }

    /// Reads what the server sent.
    fn hear(&mut self, now: Instant) -> bool {
        let Some(link) = self.link.as_mut().filter(|_| self.ready.link) else { return false };
        match link.read() {
            Read::Nothing => {
                self.ready.link = false;
                return false;
            }
            Read::Ended(why) => {
                self.drop_link(&why, Cause::Broken);
                return true;
            }
            Read::Something => {}
        }
        while let Some(event) = self.link.as_mut().and_then(ServerLink::poll_event) {
            match event {
                LinkEvent::Psync { replid, offset } => self.asked(now, replid, offset),
                LinkEvent::Ack { offset } => self.acknowledged(offset),
            }
        }
        true
    }

    fn asked(&mut self, now: Instant, replid: Option<ReplId>, offset: i64) {
        self.tell(Notice::Asked);
        let history = self.history();
        let offset = u64::try_from(offset).unwrap_or(0);
        if let Some(history) = history.filter(|_| self.at.loaded && replid == history && offset > 0) {
            return self.resume(&history, offset);
        }
        if self.at.loaded {
            // The server has lost the snapshot that it had loaded, and needs all of it again.
            self.forget_snapshot();
            self.tell(Notice::FeedWanted);
        } else if !self.input.has_feed() && self.at.snapshot.is_some() {
            self.tell(Notice::FeedWanted);
        }
        let Some(link) = &mut self.link else { return };
        if !link.takes_a_mark() {
            let why = "it can't load a snapshot whose length is not known yet (no capa eof): it is too old";
            return self.drop_link(why, Cause::Broken);
        }
        link.wait(now);
    }

    /// The history of the present snapshot.
    fn history(&self) -> Option<ReplId> {
        Some(self.at.snapshot?.origin.history)
    }

    /// Continues the stream at `offset`. That can be before the last byte that was written, since a link loses bytes on
    /// link, or behind it, after some time with the primary itself.
    fn resume(&mut self, history: &ReplId, offset: u64) {
        let Some(link) = &mut self.link else { return };
        link.resume(history);
        self.meter.stream_delivered.set(offset - 1);
        let is_elsewhere = self.stream.first().unwrap_or(self.at.next_byte) != offset;
        let is_elsewhere = is_elsewhere && !remora_base::mutation::Mutation::OffsetIgnored.is_active();
        if is_elsewhere {
            self.stream.clear();
            self.at.next_byte = offset;
            self.input.lose_feed(self.clock.now());
            self.tell(Notice::FeedWanted);
        }
    }

    fn acknowledged(&mut self, offset: u64) {
        self.meter.acknowledged.set(offset);
        let snapshot = self.at.snapshot.map_or(u64::MAX, |id| id.origin.offset);
        if self.link.as_mut().is_some_and(|link| link.acknowledged(offset, snapshot)) {
            self.at.loaded = true;
            self.tell(Notice::Loaded);
        }
    }

    // ---- the input ----

    /// Reads what has arrived from the source. An error ends the delivery.
    fn fetch(&mut self, now: Instant) -> Result<bool, String> {
        let Fetched { mut moved, lost, all } = match self.input.fetch_snapshot(now) {
            Ok(fetched) => fetched,
            Err(InputError::Spool(text)) => return Err(text),
            Err(InputError::Feed(error)) => {
                self.lose_feed(now, error);
                return Ok(true);
            }
        };
        if let Some(lost) = lost {
            self.tell(Notice::PeerLost(lost));
        }
        if all {
            self.tell(Notice::Fetched);
        }
        match self.input.fetch_journal(now, &mut self.stream) {
            Ok(Some(next_byte)) => {
                self.at.next_byte = next_byte;
                moved = true;
            }
            Ok(None) => {}
            Err(error) => {
                self.lose_feed(now, error);
                moved = true;
            }
        }
        Ok(moved)
    }

    fn lose_feed(&mut self, now: Instant, error: FeedError) {
        self.abandon_memory();
        self.input.lose_feed(now);
        self.link.iter_mut().for_each(|link| link.lay_down(now));
        self.tell(Notice::FeedLost { error });
    }

    /// The memory that the server was given is not what the next feed reads into. The snapshot then goes by the link,
    /// which can go on in its middle should that feed be lost too.
    fn abandon_memory(&mut self) {
        if self.link.as_ref().is_some_and(ServerLink::refers_to_memory) {
            self.by_module = false;
            self.meter.by_module.set(0);
            self.drop_link("the memory that it was loading from is gone", Cause::Broken);
        }
    }

    // ---- writing ----

    /// Writes to the server as much as its socket takes.
    fn write(&mut self) -> bool {
        if let Some(unfit) = self.stream.unfit().filter(|_| !self.refused) {
            let text = format!(
                "the primary's stream has {unfit}: the sync stops before it, and the server applies nothing of it"
            );
            self.refuse(Failure::refused(text));
        }
        match self.try_write() {
            Ok(moved) => moved,
            Err(error) => {
                self.unwritten(error);
                true
            }
        }
    }

    /// Takes back what could not be written.
    fn unwritten(&mut self, error: WriteError) {
        match error {
            WriteError::Link(error) => self.drop_link(&error.to_string(), Cause::Broken),
            WriteError::Feed(error) => {
                // The payload may contain overwritten bytes. Without the mark the server discards it.
                self.drop_link("a slot was overwritten while it was being used", Cause::Broken);
                self.lose_feed(self.clock.now(), error);
            }
            WriteError::Damaged(error) => self.damaged(error),
            WriteError::Refused(failure) => {
                self.refuse(failure);
                self.drop_link("it can't be given this snapshot", Cause::Ours);
            }
            WriteError::Module(text) => {
                self.by_module = false;
                self.meter.by_module.set(0);
                tracing::warn!("loading out of shared memory failed: {text}; the snapshot goes by the link");
                self.drop_link("the module could not load it", Cause::Broken);
            }
        }
    }

    fn try_write(&mut self) -> Result<bool, WriteError> {
        let (mut moved, mut left) = (false, TURN_BYTES);
        loop {
            let Some(link) = self.link.as_mut().filter(|_| !self.refused) else { return Ok(moved) };
            if !link.flush()? {
                return Ok(moved);
            }
            let now = self.clock.now();
            let wrote = match &link.stage {
                Stage::Asked => self.begin_payload(now),
                Stage::Introducing { .. } => link.keep_alive(now),
                Stage::Plain(_) => self.write_plain(now)?,
                Stage::Referenced(_) => self.write_referenced(now)?,
                Stage::Streaming => self.write_stream()?,
            };
            let Some(wrote) = wrote else { return Ok(moved) };
            moved = true;
            left = left.saturating_sub(wrote);
            if left == 0 {
                return Ok(true);
            }
        }
    }

    /// Answers a `PSYNC` as soon as the first slot has arrived, and sends newlines until then.
    fn begin_payload(&mut self, now: Instant) -> Option<usize> {
        let piece = if self.at.snapshot.is_some() { self.input.next_piece(0) } else { None };
        let is_ready = piece.is_some() || (self.at.snapshot.is_some() && self.input.is_empty());
        match piece {
            _ if !is_ready => self.link.as_mut()?.keep_alive(now),
            Some(Piece::Fresh(slot)) if self.by_module => self.introduce(now, slot),
            piece => self.begin_plain(now, piece),
        }
    }

    fn begin_plain(&mut self, now: Instant, piece: Option<Piece>) -> Option<usize> {
        let mark = random_mark();
        let converter = self.conversion.as_ref().map(|conversion| Box::new(conversion.converter()));
        self.promise(mark, Stage::Plain(PlainPayload::new(now, mark, converter)))?;
        match piece.map(|piece| self.give(piece)) {
            Some(Err(error)) => {
                // As if it had been found in the writing.
                self.unwritten(error);
                None
            }
            _ => Some(0),
        }
    }

    /// Gives the payload its next piece, converted if need be.
    fn give(&mut self, piece: Piece) -> Result<(), WriteError> {
        let Some(Stage::Plain(payload)) = self.link.as_mut().map(|link| &mut link.stage) else { return Ok(()) };
        let (piece, slot, converted) = payload.convert(piece, self.input.spool());
        payload.give(piece);
        // What was read of a slot that the source has overwritten says nothing.
        if let Some(slot) = slot {
            self.input.used(Used { slot, alone: false }).map_err(WriteError::Feed)?;
        }
        converted
    }

    /// The server cannot be given this data set, or what follows in its stream.
    fn refuse(&mut self, failure: Failure) {
        self.refused = true;
        self.tell(Notice::Refused { failure });
    }

    /// Announces to the server a payload that ends with a mark.
    fn promise(&mut self, mark: [u8; 40], stage: Stage) -> Option<usize> {
        let history = self.history()?;
        let origin = self.at.snapshot?.origin;
        self.meter.give(mark.len());
        self.link.as_mut()?.begin_payload(&history, origin.offset, mark, stage);
        self.meter.bytes_delivered.set(0);
        Some(0)
    }

    /// Writes once from a plain payload. `None` if there is nothing to write, or no room.
    fn write_plain(&mut self, now: Instant) -> Result<Option<usize>, WriteError> {
        let Some(link) = &mut self.link else { return Ok(None) };
        if link.is_paused(now) {
            return Ok(None);
        }
        let Stage::Plain(payload) = &link.stage else { return Ok(None) };
        if !payload.has_piece() {
            for used in link.settle(now)? {
                self.input.used(used).map_err(WriteError::Feed)?;
            }
            let Stage::Plain(payload) = &mut link.stage else { return Ok(None) };
            let number = payload.next_slot();
            let is_whole = self.input.is_whole_at(number);
            let is_whole = is_whole || (number > 0 && remora_base::mutation::Mutation::PayloadEndedEarly.is_active());
            if is_whole && !payload.lends() {
                if let Some(converter) = payload.converter() {
                    let is_over = converter.is_over();
                    report(converter.done());
                    if !is_over {
                        let why = "the snapshot ends in the middle of a value";
                        return Err(WriteError::Refused(Failure::new(Code::SyncFailed, why)));
                    }
                }
                let mark = *payload.mark();
                return Ok(Some(self.end_payload(&mark)));
            }
            let Some(piece) = self.input.next_piece(number) else { return Ok(None) };
            self.give(piece)?;
        }
        let Some(link) = &mut self.link else { return Ok(None) };
        let Wrote::Bytes { bytes, next_slot, used } = link.write_plain(now, self.input.spool())? else {
            return Ok(None);
        };
        self.meter.bytes_delivered.add(self.meter.give(bytes) as u64);
        if self.input.spool().is_none() {
            self.at.next_slot = next_slot;
        }
        if let Some(slot) = used {
            self.input.used(Used { slot, alone: false }).map_err(WriteError::Feed)?;
        }
        Ok(Some(bytes))
    }

    /// Writes the end of the payload.
    fn end_payload(&mut self, end: &[u8]) -> usize {
        let Some(link) = &mut self.link else { return 0 };
        self.meter.end_given.set(1);
        link.end_payload(end);
        self.input.end_snapshot(self.clock.now());
        self.tell(Notice::PayloadSent);
        end.len()
    }

    fn write_stream(&mut self) -> Result<Option<usize>, WriteError> {
        let Some(wrote) = self.link.as_mut().map(|link| link.write_stream(&mut self.stream)).transpose()?.flatten()
        else {
            return Ok(None);
        };
        self.meter.stream_delivered.set(wrote.last);
        Ok(Some(wrote.bytes))
    }

    // ---- waiting ----

    /// Waits until something may have changed.
    fn wait(&mut self) {
        let now = Instant::now();
        let mut wait = Wait::new(now);
        let waker = wait.add(self.control.waker.as_fd(), PollFlags::IN);
        let candidates: Vec<_> = self.candidates.fds().map(|(fd, events)| wait.add(fd, events)).collect();
        let due = self.candidates.due();
        due.into_iter().for_each(|at| wait.until(at));
        let mut demand = Demand::default();
        let link = self.link.as_ref().map(|link| {
            let (events, wants) = link.interest(now, !self.stream.is_empty());
            link.deadline(now).into_iter().for_each(|at| wait.until(at));
            demand = wants;
            wait.add(link.as_fd(), events)
        });
        self.input.wait(&mut wait, demand, self.stream.is_full());
        let ready = wait.poll();
        let waited = Instant::now();
        let a_candidate = candidates.iter().any(|&at| ready.has(at)) || due.is_some_and(|due| due <= waited);
        let the_link = link.is_some_and(|at| ready.has(at));
        self.ready = Readiness::after(waited, ready.has(waker), a_candidate, the_link);
    }
}

/// Says what a conversion has changed and left out.
fn report(done: &Converted) {
    let changed: u64 = done.changed.values().sum();
    tracing::info!(keys = done.keys, changed, "the snapshot was converted for the server");
    for (what, found) in &done.obstacles {
        let keys: Vec<_> = found.keys.iter().map(|(_, key)| String::from_utf8_lossy(key)).collect();
        tracing::warn!(count = found.count, "left out: {what}; the first: {}", keys.join(", "));
    }
}

// Poller: the descriptors that the delivery's thread waits on, and which of them are tried afterwards.

/// Interval at which all descriptors are tried while the loop is too busy to wait on them.
const LOOK_PACE: Duration = Duration::from_millis(1);

/// The longest sleep, should every descriptor be silent.
const SLEEP_LIMIT: Duration = Duration::from_millis(500);

/// The shortest sleep: less than the system needs to wake a thread.
const SLEEP_LEAST: Duration = Duration::from_micros(20);

/// Descriptors that may have something to read. A try that finds nothing costs a system call, and `accept` even creates
/// a socket first: so only those are tried that poll(2) has found ready, and all of them now and then.
#[derive(Debug, PartialEq, Eq)]
struct Readiness {
    waker: bool,
    candidates: bool,
    link: bool,
    looked: Instant,
}

impl Readiness {
    fn all(now: Instant) -> Readiness {
        Readiness { waker: true, candidates: true, link: true, looked: now }
    }

    /// Marks all descriptors as ready if none was waited on for long.
    fn look(&mut self, now: Instant) {
        if now.duration_since(self.looked) >= LOOK_PACE {
            *self = Readiness::all(now);
        }
    }

    /// The result of a wait.
    fn after(now: Instant, waker: bool, candidates: bool, link: bool) -> Readiness {
        Readiness { waker, candidates, link, looked: now }
    }
}

/// What the link needs from the input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Demand {
    /// The link has something to write.
    is_full: bool,
    /// The link pauses although there is something to write.
    is_paused: bool,
    /// The link has no slot to write.
    wants_slots: bool,
}

/// Descriptors to wait on, up to a time.
struct Wait<'a> {
    now: Instant,
    until: Instant,
    fds: Vec<(BorrowedFd<'a>, PollFlags)>,
}

/// A descriptor among those that are waited on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place(usize);

impl<'a> Wait<'a> {
    fn new(now: Instant) -> Wait<'a> {
        Wait { now, until: now + SLEEP_LIMIT, fds: Vec::new() }
    }

    fn now(&self) -> Instant {
        self.now
    }

    /// Ends the wait at this time.
    fn until(&mut self, at: Instant) {
        self.until = self.until.min(at);
    }

    fn add(&mut self, fd: BorrowedFd<'a>, events: PollFlags) -> Place {
        self.fds.push((fd, events));
        Place(self.fds.len() - 1)
    }

    /// Waits. After an interruption the loop checks everything again, as after any wait.
    fn poll(self) -> Ready {
        let timeout = self.timeout();
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
        let mut fds: Vec<PollFd<'_>> = self.fds.iter().map(|(fd, events)| PollFd::new(fd, *events)).collect();
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        Ready(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    fn timeout(&self) -> Duration {
        self.until.saturating_duration_since(self.now).max(SLEEP_LEAST)
    }
}

/// The descriptors that a wait found ready.
struct Ready(Vec<bool>);

impl Ready {
    fn has(&self, place: Place) -> bool {
        self.0.get(place.0).is_some_and(|ready| *ready)
    }
}

#[cfg(test)]
mod poller_tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_earliest_deadline_bounds_the_wait_and_a_past_one_does_not_spin() {
        let now = Instant::now();
        let mut wait = Wait::new(now);
        assert_eq!(wait.timeout(), SLEEP_LIMIT);
        wait.until(now + Duration::from_millis(7));
        wait.until(now + Duration::from_millis(9));
        assert_eq!(wait.timeout(), Duration::from_millis(7));
        wait.until(now);
        assert_eq!(wait.timeout(), SLEEP_LEAST);
    }

    #[test]
    fn only_what_has_something_is_ready() {
        let ((one, mut far), (other, _kept)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        far.write_all(b"x").unwrap();
        let mut wait = Wait::new(Instant::now());
        let (with, without) = (wait.add(one.as_fd(), PollFlags::IN), wait.add(other.as_fd(), PollFlags::IN));
        let ready = wait.poll();
        assert!(ready.has(with) && !ready.has(without));
    }

    #[test]
    fn everything_is_tried_again_after_a_while_without_a_wait() {
        let now = Instant::now();
        let mut readiness = Readiness::after(now, false, false, false);
        readiness.look(now + LOOK_PACE / 2);
        assert_eq!(readiness, Readiness::after(now, false, false, false));
        readiness.look(now + LOOK_PACE);
        assert_eq!(readiness, Readiness::all(now + LOOK_PACE));
    }
}

// Orders to the delivery, its notices, and the driver's handle on its thread.

/// An order of the driver to the delivery.
pub enum Order {
    /// Read from this feed from now on.
    Attach(Box<Feed>),
    /// Read the snapshot's slots from this source or peer from now on.
    ReadFrom(ReadFrom),
    /// Close the link of a server whose snapshot will never be whole. A server that loads from its link answers no
    /// command until then.
    GiveUp,
    /// End the link of a server that has loaded, and give it another snapshot when it comes back. Answered by
    /// [`Notice::FeedWanted`].
    LoadAgain,
    /// Take this connection of the server, which was intercepted on its way to the primary, as its link.
    Adopt(Box<Newcomer>),
    /// Send the server no more of the stream until it connects again.
    Hold,
    /// Whether to give memory to the server's module, and to refer to it in the payload. Order this when the link's
    /// port is open, and before the server is pointed at it: the server may ask for its payload at once.
    UseModule(bool),
    /// The result of an introduction.
    Introduced {
        /// The introduction's number.
        number: u64,
        /// What the module has answered, or why it is not used.
        answer: Result<Answer, String>,
    },
    /// End.
    Stop {
        /// Remove the spool: the sync is done.
        done: bool,
    },
}

/// What the delivery reports.
#[derive(Debug)]
pub enum Notice {
    /// The server has connected and sent `PSYNC`.
    Asked,
    /// The server's module must be given memory. The delivery waits for [`Order::Introduced`].
    Introduce(Introduction),
    /// The whole snapshot has arrived.
    Fetched,
    /// The whole snapshot was written to the server.
    PayloadSent,
    /// The server has loaded the snapshot: it acknowledged an offset.
    Loaded,
    /// The server's link ended.
    LinkLost {
        /// Why.
        text: String,
        /// It broke in the middle of the snapshot.
        loading: bool,
    },
    /// The feed ended. Another one is needed that begins where [`Position`] says.
    FeedLost {
        /// Why.
        error: FeedError,
    },
    /// An upstream replica cannot be read any more. Nothing is read until [`Order::ReadFrom`] names another.
    PeerLost(Lost),
    /// The server's request needs another feed.
    FeedWanted,
    /// A slot in the source's memory is damaged.
    Damaged {
        /// Which one, and how.
        error: FeedError,
    },
    /// The server cannot be given this data set, or what follows in its stream.
    Refused {
        /// Why.
        failure: Failure,
    },
    /// The delivery cannot continue.
    Fatal {
        /// Why.
        text: String,
    },
}

/// The position, as the thread publishes it and the handle reads it.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Position>>);

impl Shared {
    fn publish(&self, progress: Position) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    }

    fn read(&self) -> Position {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The thread's end of a [`Handle`].
struct Control {
    orders: Receiver<Order>,
    /// Readable when an order has arrived.
    waker: Arc<OwnedFd>,
    shared: Shared,
}

impl Control {
    /// Clears the wake-up before the orders are read.
    fn rest(&self) {
        let mut woken = [0; 8];
        let _ = rustix::io::read(&*self.waker, &mut woken);
    }
}

/// Both ends, without a thread.
fn ends() -> io::Result<(Handle, Control)> {
    let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (orders, inbox) = channel();
    let shared = Shared::default();
    let control = Control { orders: inbox, waker: waker.clone(), shared: shared.clone() };
    Ok((Handle { orders, waker, thread: None, shared }, control))
}

/// The driver's handle on the thread. Dropping it ends the thread.
pub struct Handle {
    orders: Sender<Order>,
    waker: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    shared: Shared,
}

impl Handle {
    /// Starts the thread. It ends at [`Order::Stop`], or when the orders have no sender any more.
    fn spawn(run: impl FnOnce(Control) + Send + 'static) -> io::Result<Handle> {
        let (mut handle, control) = ends()?;
        handle.thread = Some(std::thread::Builder::new().name("delivery".into()).spawn(move || run(control))?);
        Ok(handle)
    }

    /// Gives an order, and wakes the thread.
    pub fn order(&self, order: Order) {
        if self.orders.send(order).is_ok() {
            // If the eventfd cannot be written to, it has been woken already.
            let _ = rustix::io::write(&*self.waker, &1_u64.to_ne_bytes());
        }
    }

    /// Where the delivery is.
    pub fn progress(&self) -> Position {
        self.shared.read()
    }

    /// Whether the delivery was not stopped.
    pub fn is_running(&self) -> bool {
        self.thread.is_some()
    }

    /// Ends the thread and waits for its end, which takes one turn of its loop.
    pub fn stop(&mut self, done: bool) {
        self.order(Order::Stop { done });
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stop(false);
    }
}

/// The parts of a delivery.
pub struct Setup {
    /// The listener for the server's link.
    pub candidates: Candidates,
    /// The folder of the slots that survive the agent (`--state-dir`).
    pub spool: Option<PathBuf>,
    /// The slots that were found there.
    pub found: Option<spool::Spool>,
    /// How the snapshot is converted; `None`: the server gets the primary's own.
    pub conversion: Option<Conversion>,
    /// Bytes of the stream that may wait here while the server loads.
    pub backlog_limit: usize,
    /// What it counts.
    pub meter: Arc<Meter>,
    /// Where its notices go.
    pub notices: UnboundedSender<Notice>,
}
