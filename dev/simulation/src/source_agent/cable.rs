//! Cable: what a model server sends to a capture, in bytes, in the pieces that the seed decides.
//!
//! ```text
//!   World ── messages ──▶ bytes ── glued and cut ──▶ Socket, Client, Intake: the product's ── messages ──▶ actor
//! ```
//!
//! A kernel delivers what a server has written in any pieces. So does the cable: it waits with what was sent, up to the
//! next tick of its source, delivers all that waits as one piece or as several, and cuts wherever the seed says: in a
//! line, between a header and its payload, in the mark, in the middle of a command. Nothing comes behind a mark,
//! because the server waits for an acknowledgement there. Behind a snapshot of known length, the stream may be in the
//! same piece.

use std::sync::Arc;

use remora_fabric::sim::Random;
use remora_fabric::{Memory, Pages};
use remora_redis::ReplId;
use remora_redis::psync::client::{Client, Event, Options};
use remora_source::parts::{Intake, Pieces, Received, Socket};
use remora_table::{Geometry, Identity, Kind, Origin, SnapshotWriter};

use crate::oracle::mixed;
use crate::wire::Message;

/// Bytes that stand for one slot of the model: few, so that a whole snapshot and a part of the stream fit into one read
/// of a handshake.
const SLOT_BYTES: usize = 64;

/// Of this many messages, one is delivered at once, with all that wait before it.
const AT_ONCE_ONE_IN: u64 = 3;

/// Pieces of one delivery, at most.
const PIECES: u64 = 4;

/// The mark behind a snapshot of unknown length.
const MARK: &str = "b0a7f1e2d3c4b5a69788796a5b4c3d2e1f001122";

/// The table that a snapshot is received into, with room for more than the longest one.
const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 4 };

/// See the module's text.
pub(super) struct Cable {
    draw: Random,
    /// The server announces the length of a snapshot, which it has written to a file before.
    by_length: bool,
    /// Slots of a snapshot whose length is not known yet.
    unannounced: Vec<u64>,
    is_announced: bool,
    /// What was sent and not delivered.
    under_way: Vec<u8>,
    wire: Pieces,
    socket: Socket,
    reader: Reader,
    /// Snapshots behind which a part of the stream was read together with their header.
    pub(super) glued: u64,
}

/// Which part of the product reads next.
enum Reader {
    Handshake(Box<Client>),
    Payload(Box<Payload>),
    Stream,
    /// The server refused, or a table failed: nothing is read any more.
    Ended,
}

/// A snapshot that is being received.
struct Payload {
    intake: Intake,
    memory: Arc<Memory>,
    writer: SnapshotWriter,
    received: usize,
    /// Slots that were passed on.
    slots: usize,
}

impl Cable {
    /// A connection on which `history`, or a snapshot, was requested.
    pub(super) fn new(seed: u64, by_length: bool, history: Option<(ReplId, u64)>) -> Cable {
        let wire = Pieces::default();
        let client = Client::new(Options { resume: history, ..Options::default() });
        let mut cable = Cable {
            draw: Random::new(seed),
            by_length,
            unannounced: Vec::new(),
            is_announced: false,
            under_way: Vec::new(),
            socket: Socket::of_pieces(wire.clone()),
            wire,
            reader: Reader::Handshake(Box::new(client)),
            glued: 0,
        };
        // The answers to PING and REPLCONF.
        cable.write(b"+PONG\r\n+OK\r\n");
        cable
    }

    /// Takes what the server sends. Returns what the capture has read by then.
    pub(super) fn send(&mut self, message: Message) -> Vec<Message> {
        match message {
            Message::FullResync { replid, offset } => {
                self.write(format!("+FULLRESYNC {replid} {offset}\r\n").as_bytes())
            }
            Message::Continue { replid } => self.write(format!("+CONTINUE {replid}\r\n").as_bytes()),
            Message::Later => self.write(b"-NOMASTERLINK Can't SYNC while not connected with my master\r\n"),
            Message::Slot(slot) if self.by_length => self.unannounced.push(slot),
            Message::Slot(slot) => {
                self.announce(&format!("EOF:{MARK}"));
                self.write(&bytes_of(slot));
            }
            Message::End if self.by_length => {
                let slots = std::mem::take(&mut self.unannounced);
                self.announce(&(slots.len() * SLOT_BYTES).to_string());
                slots.into_iter().for_each(|slot| self.write(&bytes_of(slot)));
            }
            Message::End => {
                self.announce(&format!("EOF:{MARK}"));
                self.write(MARK.as_bytes());
            }
            Message::Stream(bytes) => self.write(&bytes),
            Message::Psync { .. } | Message::Ack { .. } | Message::Room | Message::Agents(_) => {}
        }
        if self.draw.below(AT_ONCE_ONE_IN) == 0 { self.deliver() } else { Vec::new() }
    }

    fn write(&mut self, bytes: &[u8]) {
        self.under_way.extend_from_slice(bytes);
    }

    /// The header of a snapshot, with keep-alives before it.
    fn announce(&mut self, form: &str) {
        if !std::mem::replace(&mut self.is_announced, true) {
            let newlines = "\n".repeat(self.draw.below(3) as usize);
            self.write(format!("{newlines}${form}\r\n").as_bytes());
        }
    }

    /// Delivers all that is under way. Returns what the capture reads.
    pub(super) fn deliver(&mut self) -> Vec<Message> {
        let mut rest = std::mem::take(&mut self.under_way);
        for _ in 1..=self.draw.below(PIECES) {
            let behind = rest.split_off(self.draw.below(rest.len() as u64 + 1) as usize);
            self.wire.add(&rest);
            rest = behind;
        }
        self.wire.add(&rest);
        let mut read = Vec::new();
        while self.read(&mut read) {}
        read
    }

    /// Lets the capture read once. Returns whether there was anything.
    fn read(&mut self, read: &mut Vec<Message>) -> bool {
        match &mut self.reader {
            Reader::Handshake(client) => {
                let has_more = !self.socket.ahead().is_empty();
                if !has_more && !matches!(self.socket.read_ahead(), Ok(Received::Bytes(_))) {
                    return false;
                }
                if self.socket.give(client).is_err() {
                    read.push(Message::Later);
                    self.reader = Reader::Ended;
                    return false;
                }
                while let Reader::Handshake(client) = &mut self.reader
                    && let Some(event) = client.poll_event()
                {
                    self.opened(event, read);
                }
                true
            }
            Reader::Payload(payload) => {
                let moved = payload.read(&mut self.socket, read);
                if payload.intake.is_over() {
                    self.glued += u64::from(!self.socket.ahead().is_empty());
                    self.reader = Reader::Stream;
                    read.push(Message::End);
                    return true;
                }
                moved
            }
            Reader::Stream => {
                let mut buffer = [0; 4096];
                let Ok(Received::Bytes(n)) = self.socket.read(&mut buffer) else { return false };
                read.push(Message::Stream(buffer[..n].to_vec()));
                true
            }
            Reader::Ended => false,
        }
    }

    /// A step of the handshake.
    fn opened(&mut self, event: Event, read: &mut Vec<Message>) {
        match event {
            Event::FullResync { replid, offset } => read.push(Message::FullResync { replid, offset }),
            Event::Continue { replid } => {
                read.push(Message::Continue { replid });
                self.reader = Reader::Stream;
            }
            Event::Payload(form) => {
                self.reader =
                    Payload::new(Intake::new(&form)).map_or(Reader::Ended, |it| Reader::Payload(Box::new(it)));
            }
            Event::Handshaken | Event::KeepAlive | Event::TwoChannels | Event::Channel { .. } => {}
        }
    }
}

impl Payload {
    fn new(intake: Intake) -> Option<Payload> {
        let memory = Arc::new(Memory::create("simulated-capture", GEOMETRY.memory_len(), Pages::Small).ok()?);
        let history = "0".repeat(40).parse().ok()?;
        let identity = Identity { kind: Kind::Snapshot, origin: Origin { generation: 1, history, offset: 0 } };
        let writer = SnapshotWriter::create(memory.clone(), GEOMETRY, identity, 0).ok()?;
        Some(Payload { intake, memory, writer, received: 0, slots: 0 })
    }

    /// Reads once, and passes on the slots that are whole.
    fn read(&mut self, socket: &mut Socket, read: &mut Vec<Message>) -> bool {
        if self.intake.is_over() {
            return false;
        }
        let Ok(Some(Ok(Received::Bytes(n)))) = self.intake.read(socket, &self.memory, &mut self.writer) else {
            return false;
        };
        self.received += n;
        while (self.slots + 1) * SLOT_BYTES <= self.received {
            read.push(Message::Slot(self.slot(self.slots * SLOT_BYTES)));
            self.slots += 1;
        }
        let trim = self.intake.trim() as usize;
        if self.intake.is_over() && self.slots * SLOT_BYTES + trim != self.received {
            // A part of a slot: the snapshot is none of the server's.
            read.push(Message::Slot(mixed(self.received as u64)));
        }
        true
    }

    /// The slot whose bytes begin there in the snapshot.
    fn slot(&self, at: usize) -> u64 {
        let mut bytes = [0; SLOT_BYTES];
        let (slot, inner) = (at as u64 / u64::from(GEOMETRY.slot_size), at as u64 % u64::from(GEOMETRY.slot_size));
        // A read outside the memory leaves zeros, which no slot is made of.
        let _ = self.memory.read(GEOMETRY.slot_offset(slot) + inner, &mut bytes);
        slot_of(&bytes)
    }
}

/// The bytes of a slot: each word follows from the slot's number and its place.
fn bytes_of(slot: u64) -> [u8; SLOT_BYTES] {
    let mut bytes = [0; SLOT_BYTES];
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&slot.wrapping_add(at as u64).to_le_bytes());
    }
    bytes
}

/// The slot that these bytes are; a number that no model has if they are not one.
fn slot_of(bytes: &[u8; SLOT_BYTES]) -> u64 {
    let slot = bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    if bytes_of(slot) == *bytes { slot } else { bytes.iter().fold(0xBAD, |sum, &byte| mixed(sum ^ u64::from(byte))) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn history() -> ReplId {
        "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b".parse().unwrap()
    }

    /// The messages of a whole conversation.
    fn conversation() -> Vec<Message> {
        let slots = (1..=5).map(|slot| Message::Slot(slot * 1_000_003));
        let stream = [vec![3, 1, 2], vec![4, 9, 9, 9], vec![2, 7]].map(Message::Stream);
        let begin = Message::FullResync { replid: history(), offset: 77 };
        [begin].into_iter().chain(slots).chain([Message::End]).chain(stream).collect()
    }

    /// What a capture hears, with the bytes of the stream joined.
    fn joined(heard: Vec<Message>) -> (Vec<Message>, Vec<u8>) {
        let mut stream = Vec::new();
        let others = heard.into_iter().filter(|message| match message {
            Message::Stream(bytes) => {
                stream.extend_from_slice(bytes);
                false
            }
            _ => true,
        });
        (others.collect(), stream)
    }

    #[test]
    fn what_was_sent_is_heard_however_it_is_glued_and_cut() {
        let mut glued = [0, 0];
        for seed in 0..2_000 {
            let by_length = seed % 2 == 0;
            let mut cable = Cable::new(seed, by_length, None);
            let mut heard = Vec::new();
            for message in conversation() {
                // Behind a mark, the server waits until the capture has answered.
                let waits = message == Message::End && !by_length;
                heard.extend(cable.send(message));
                if waits {
                    heard.extend(cable.deliver());
                }
            }
            heard.extend(cable.deliver());
            assert_eq!(joined(heard), joined(conversation()), "seed {seed}");
            glued[usize::from(by_length)] += cable.glued;
        }
        assert!(glued[0] == 0 && glued[1] > 100, "glued: {glued:?}");
    }

    #[test]
    fn a_stream_that_goes_on_and_a_refusal_are_heard() {
        for seed in 0..200 {
            let mut cable = Cable::new(seed, false, Some((history(), 78)));
            let mut heard = cable.send(Message::Continue { replid: history() });
            heard.extend(cable.send(Message::Stream(vec![2, 5])));
            heard.extend(cable.deliver());
            assert_eq!(joined(heard), (vec![Message::Continue { replid: history() }], vec![2, 5]), "seed {seed}");

            let mut cable = Cable::new(seed, false, None);
            let mut heard = cable.send(Message::Later);
            heard.extend(cable.deliver());
            assert_eq!(heard, [Message::Later]);
        }
    }
}
