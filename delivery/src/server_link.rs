//! Server link: the conversation with the replica's server, towards which we play the primary.
//!
//! ```text
//!     PSYNC ──▶ Asked ── first slot is there ──▶ Plain ── last slot, mark, ACK ──▶ Streaming
//!                 │ ╰─ it has our module ─▶ Introducing ─▶ Referenced ── the same ─────▶╯  ▲
//!                 └── PSYNC <our replid> <offset that the journal holds> ──────────────────┘
//! ```
//!
//! It does not know where slots and stream come from. The caller hands them in, and polls for what the server said.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use remora_redis::ReplId;
use remora_redis::psync::Payload;
use remora_redis::psync::server::{Event, Server as PrimaryRole};
use remora_table::Slot;
use rustix::event::PollFlags;

use super::Notice;
use super::input::{self, Stream};
use super::payload::{Piece, PlainPayload, ReferencedPayload, Turn, Used, WriteError, Wrote, random_mark};
use super::{Cause, Delivery, Demand};
use crate::link::candidates::Newcomer;
use crate::link::{Link, Pacer};
use crate::payload::{self, Answer, GrantedMemory};
use remora_reader::parts::FeedError;
use remora_reader::spool::Spool;

/// Interval of newlines to a server that waits for its payload. It gives up after `repl-timeout`, 60 s by default.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(1);

/// Interval at which the page of the server's module is read.
const TALLY_PACE: Duration = Duration::from_micros(200);

/// Bytes of one read. Replicas send commands of some dozen bytes.
const READ_BYTES: usize = 4096;

/// The conversation with the replica's server on one connection.
pub(super) struct ServerLink {
    pub(super) socket: Link,
    role: PrimaryRole,
    /// Bytes to the server; those up to `written` have been sent.
    out: Vec<u8>,
    written: usize,
    pub(super) stage: Stage,
    pacer: Pacer,
    kept_alive: Instant,
    /// Whether the server has acknowledged the snapshot's offset or a later one.
    has_loaded: bool,
    /// Whether the stream is held back.
    held: bool,
}

/// The state of the conversation.
pub(super) enum Stage {
    Asked,
    /// The server's module receives memory; `slot` is the snapshot's first.
    Introducing {
        number: u64,
        shown: GrantedMemory,
        slot: Slot,
    },
    /// A payload whose bytes all go over the link.
    Plain(PlainPayload),
    /// A payload that refers to shared memory.
    Referenced(Box<ReferencedPayload>),
    Streaming,
}

/// What the server sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkEvent {
    /// It asks for the stream after this offset of this history; `None`: for a full copy.
    Psync { replid: Option<ReplId>, offset: i64 },
    /// It has applied the stream up to this offset.
    Ack { offset: u64 },
}

/// The result of a read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Read {
    Nothing,
    /// Events may wait in [`ServerLink::poll_event`].
    Something,
    /// The link has ended, with the reason.
    Ended(String),
}

/// How far the server had come when its link ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reached {
    /// It waited for its payload.
    Asked,
    /// Its module was receiving memory, and holds the first slot.
    Introduction,
    /// It was loading.
    Payload,
    /// It had the whole payload.
    Stream,
}

impl ServerLink {
    /// Takes over a connection that has logged in and sent `PSYNC`.
    pub(super) fn new(now: Instant, newcomer: Newcomer) -> ServerLink {
        let Newcomer { link, role, out, written, .. } = newcomer;
        ServerLink {
            socket: link,
            role,
            out,
            written,
            stage: Stage::Asked,
            pacer: Pacer::default(),
            kept_alive: now,
            has_loaded: false,
            held: false,
        }
    }

    // ---- what the server says ----

    pub(super) fn read(&mut self) -> Read {
        let mut buffer = [0; READ_BYTES];
        match self.socket.read(&mut buffer) {
            Ok(None) => Read::Nothing,
            Ok(Some(0)) => Read::Ended("the server closed it".into()),
            Ok(Some(n)) => match self.role.handle_input(&buffer[..n]) {
                Ok(()) => Read::Something,
                Err(error) => Read::Ended(format!("the server sent what no replica sends: {error}")),
            },
            Err(error) => Read::Ended(error.to_string()),
        }
    }

    pub(super) fn poll_event(&mut self) -> Option<LinkEvent> {
        Some(match self.role.poll_event()? {
            Event::Psync { replid, offset } => LinkEvent::Psync { replid, offset },
            Event::Ack { offset, .. } => LinkEvent::Ack { offset },
        })
    }

    /// Whether the server can load a snapshot of unknown length, up to an end mark (`capa eof`). Every server since
    /// Redis 2.8.18 can.
    pub(super) fn takes_a_mark(&self) -> bool {
        self.role.peer().eof
    }

    // ---- what it is answered ----

    /// The server waits for its payload.
    pub(super) fn wait(&mut self, now: Instant) {
        self.stage = Stage::Asked;
        self.kept_alive = now;
    }

    /// Promises the server a payload that ends with a mark.
    pub(super) fn begin_payload(&mut self, replid: &ReplId, offset: u64, mark: [u8; 40], stage: Stage) {
        // A server that is filled again did not go to the primary.
        self.held = false;
        self.role.full_resync(replid, offset);
        self.role.payload(&Payload::Mark(mark));
        self.stage = stage;
    }

    /// Continues the stream at the server's offset.
    pub(super) fn resume(&mut self, replid: &ReplId) {
        self.role.resume(replid);
        self.stage = Stage::Streaming;
        self.has_loaded = true;
    }

    /// Writes the end of the payload. The stream follows after the server's first ACK.
    pub(super) fn end_payload(&mut self, end: &[u8]) {
        self.out.extend_from_slice(end);
        self.stage = Stage::Streaming;
    }

    /// Notes that the server has applied the stream up to this offset. Returns whether this is the first sign that it
    /// has loaded the snapshot at `snapshot`.
    pub(super) fn acknowledged(&mut self, offset: u64, snapshot: u64) -> bool {
        let loads = matches!(self.stage, Stage::Streaming) && !self.has_loaded && offset >= snapshot;
        self.has_loaded |= loads;
        loads
    }

    /// Sends no more of the stream over this link.
    pub(super) fn hold(&mut self) {
        self.held = true;
    }

    // ---- writing ----

    /// Writes the waiting bytes. Returns `false` if some still wait.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        let fresh = self.role.take_output();
        self.out.extend_from_slice(&fresh);
        self.socket.write_out(&mut self.out, &mut self.written)
    }

    /// Queues a newline when one is due.
    pub(super) fn keep_alive(&mut self, now: Instant) -> Option<usize> {
        if now.duration_since(self.kept_alive) < KEEP_ALIVE_EVERY {
            return None;
        }
        self.kept_alive = now;
        self.role.keep_alive();
        Some(1)
    }

    /// Whether the link is left alone for now, though there may be something to write.
    pub(super) fn is_paused(&self, now: Instant) -> bool {
        self.pacer.until(now).is_some()
    }

    /// The slots of a plain payload that the server has read.
    pub(super) fn settle(&mut self, now: Instant) -> io::Result<Vec<Used>> {
        match &mut self.stage {
            Stage::Plain(payload) => payload.settle(now, &mut self.socket),
            _ => Ok(Vec::new()),
        }
    }

    /// Writes some of a plain payload.
    pub(super) fn write_plain(&mut self, now: Instant, spool: Option<&Spool>) -> io::Result<Wrote> {
        match &mut self.stage {
            Stage::Plain(payload) => payload.write(now, &mut self.socket, &mut self.pacer, spool),
            _ => Ok(Wrote::Nothing),
        }
    }

    /// Writes some of the stream. `None` if the server does not take it now, or if nothing of it waits.
    pub(super) fn write_stream(&mut self, stream: &mut Stream) -> io::Result<Option<input::Wrote>> {
        if !self.takes_the_stream() {
            return Ok(None);
        }
        stream.write(|bytes| self.socket.write(bytes))
    }

    /// The server has loaded its payload, or needed none, and waits for the stream.
    fn takes_the_stream(&self) -> bool {
        if remora_base::mutation::Mutation::StreamBeforeTheAck.is_active() {
            return matches!(self.stage, Stage::Streaming) && !self.held;
        }
        matches!(self.stage, Stage::Streaming) && self.has_loaded && !self.held
    }

    // ---- the end of a feed, and of the link ----

    /// Notes that the feed of the slot under way has ended.
    pub(super) fn lay_down(&mut self, now: Instant) {
        if let Stage::Plain(payload) = &mut self.stage {
            payload.lay_down(now, self.socket.written());
        }
    }

    /// Whether the server reads, or is about to read, memory that it was given.
    pub(super) fn refers_to_memory(&self) -> bool {
        matches!(self.stage, Stage::Referenced(_) | Stage::Introducing { .. })
    }

    /// Whether the server was given a part of a snapshot, or all of it.
    pub(super) fn has_begun(&self) -> bool {
        matches!(self.stage, Stage::Plain(_) | Stage::Referenced(_) | Stage::Streaming)
    }

    /// Closes the link. Returns how far the server had come, and the slots to release.
    pub(super) fn close(self) -> (Reached, Vec<Slot>) {
        match self.stage {
            Stage::Asked => (Reached::Asked, Vec::new()),
            Stage::Introducing { slot, .. } => (Reached::Introduction, vec![slot]),
            Stage::Plain(payload) => (Reached::Payload, payload.into_slots().collect()),
            Stage::Referenced(payload) => (Reached::Payload, payload.into_slots().collect()),
            Stage::Streaming => (Reached::Stream, Vec::new()),
        }
    }

    // ---- waiting ----

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The events to poll for on the link, and what the input must know about it. `stream` says that a part of the
    /// stream waits.
    pub(super) fn interest(&self, now: Instant, stream: bool) -> (PollFlags, Demand) {
        let has_piece = matches!(&self.stage, Stage::Plain(payload) if payload.has_piece());
        let has_part = matches!(&self.stage, Stage::Referenced(payload) if payload.has_part());
        let has_stream = self.takes_the_stream() && stream;
        let has_rest = self.written < self.out.len() || self.socket.wants_write();
        let is_full = has_piece || has_part || has_stream || has_rest;
        let is_paused = has_piece && self.is_paused(now);
        let writes = if is_full && !is_paused { PollFlags::OUT } else { PollFlags::empty() };
        (PollFlags::IN | writes, Demand { is_full, is_paused, wants_slots: !has_piece })
    }

    /// When something is due.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        match &self.stage {
            Stage::Asked | Stage::Introducing { .. } => Some(self.kept_alive + KEEP_ALIVE_EVERY),
            Stage::Plain(payload) if payload.has_piece() => self.pacer.until(now),
            Stage::Plain(payload) => payload.lent_due(),
            Stage::Referenced(_) => Some(now + TALLY_PACE),
            Stage::Streaming => None,
        }
    }
}

// The delivery to a server with the module: the introduction, and the payload that refers to shared memory.

impl Delivery {
    /// Orders the memory of this slot, and of all that follow, to be given to the server's module.
    pub(super) fn introduce(&mut self, now: Instant, slot: Slot) -> Option<usize> {
        self.introductions += 1;
        let number = self.introductions;
        match payload::prepare(slot.bytes().0, number) {
            Ok((shown, introduction)) => {
                self.link.as_mut()?.stage = Stage::Introducing { number, shown, slot };
                self.tell(Notice::Introduce(introduction));
            }
            Err(text) => self.go_by_the_link(now, slot, &text),
        }
        Some(0)
    }

    pub(super) fn introduced(&mut self, now: Instant, number: u64, answer: Result<Answer, String>) {
        let Some(link) = &mut self.link else { return };
        if !matches!(&link.stage, Stage::Introducing { number: awaited, .. } if *awaited == number) {
            return;
        }
        let Stage::Introducing { shown, slot, .. } = std::mem::replace(&mut link.stage, Stage::Asked) else { return };
        let answer = match answer {
            Ok(answer) => answer,
            Err(text) => return self.go_by_the_link(now, slot, &text),
        };
        let fast_keys = answer.fast_keys.is_ok();
        tracing::info!(fast_keys, "the server's module loads values out of shared memory");
        self.meter.by_module.set(1);
        let mark = random_mark();
        match ReferencedPayload::new(now, mark, shown, answer, slot) {
            Ok(payload) => drop(self.promise(mark, Stage::Referenced(Box::new(payload)))),
            Err(WriteError::Damaged(error)) => self.damaged(error),
            Err(_) => {
                self.by_module = false;
                self.drop_link("the first slot of the snapshot could not be parsed", Cause::Broken);
                self.begin_again();
            }
        }
    }

    /// Ends the delivery: the source's memory has other bytes than the source wrote.
    pub(super) fn damaged(&mut self, error: FeedError) {
        self.drop_link("a slot of the source's memory is damaged", Cause::Ours);
        self.tell(Notice::Damaged { error });
    }

    fn go_by_the_link(&mut self, now: Instant, slot: Slot, why: &str) {
        tracing::warn!("the server's module is not used: {why}");
        self.by_module = false;
        self.begin_plain(now, Some(Piece::Fresh(slot)));
    }

    /// Runs one turn of a payload that refers to memory.
    pub(super) fn write_referenced(&mut self, now: Instant) -> Result<Option<usize>, WriteError> {
        let Some(ServerLink { stage: Stage::Referenced(payload), socket, .. }) = &mut self.link else {
            return Ok(None);
        };
        let mut moved = false;
        for used in payload.settle()? {
            let length = u64::from(used.slot.length);
            self.input.used(used).map_err(WriteError::Feed)?;
            self.meter.bytes_delivered.add(length);
            moved = true;
        }
        if payload.wants_slot()
            && let Some(slot) = self.input.next_slot()
        {
            payload.take(slot)?;
            moved = true;
        }
        self.at.next_slot = self.meter.slots_below.get();
        match payload.write(now, socket, self.input.is_fetched())? {
            Turn::Nothing => Ok(moved.then_some(0)),
            Turn::Wrote(bytes) => {
                self.meter.bytes_given.add(bytes as u64);
                Ok(Some(bytes))
            }
            Turn::Whole(end) => {
                self.meter.referred.set(payload.referred());
                Ok(Some(self.end_payload(&end)))
            }
        }
    }
}
