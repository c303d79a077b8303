//! The reader's data path: one connection, on which answers come in the order of the requests. Which read goes to which lane,
//! and what a failure means for the others, is `peer`'s business.
//!
//! ```text
//!   expected:  │ 1 MiB, half of it here │ 4 KiB │ 4 KiB │ 1 MiB │        the order in which answers come
//!                └ large: recv(2) straight into the sink
//!                                         └───────┴───────┴ small: one recv(2) into `inbox` for all of them and the next
//!                                                           header, then a copy each
//! ```
//!
//! Never is more asked of the socket than belongs to small reads and headers when the bytes go through the inbox, so that no
//! byte of a large read is copied twice.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::TcpStream,
};

use super::{
    socket,
    wire::{Answer, Request, Status, TAG_LANE},
};
use crate::{Denial, Memory, ReadError};

/// One connection of a peer. Its socket does not block.
pub(super) struct Lane {
    stream: TcpStream,
    /// Requests that the socket has not taken yet; nearly always empty.
    outbox: Vec<u8>,
    /// Requests that wait for the window, in their order.
    held: VecDeque<Request>,
    /// Bytes that requests of the window have still to bring, and how many of them let no further request through.
    in_flight: u64,
    window: u64,
    was_clogged: bool,
    expected: VecDeque<Expected>,
    /// Bytes that are still to come for what is expected.
    outstanding: u64,
    /// Bytes still to come of the present piece; 0: a header comes next.
    piece_left: u32,
    inbox: Inbox,
}

/// An answer that will come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// The tag on the wire.
    pub(super) tag: u64,
    /// Which read of the peer it belongs to.
    pub(super) slot: usize,
    /// Bytes requested.
    pub(super) length: u32,
    /// Where the next byte lands; moves as bytes arrive.
    pub(super) sink_offset: u64,
    /// Bytes still to come.
    pub(super) left: u32,
}

impl Lane {
    /// A lane after its handshake.
    pub(super) fn new(stream: TcpStream) -> io::Result<Lane> {
        stream.set_nonblocking(true)?;
        let is_same_host = stream.local_addr()?.ip() == stream.peer_addr()?.ip();
        let window = if is_same_host { SAME_HOST_WINDOW_BYTES } else { u64::MAX };
        Ok(Lane {
            stream,
            outbox: Vec::new(),
            held: VecDeque::new(),
            in_flight: 0,
            window,
            was_clogged: false,
            expected: VecDeque::new(),
            outstanding: 0,
            piece_left: 0,
            inbox: Inbox::new(),
        })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Bytes that have been requested and are not here.
    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// Whether requests wait for room in the socket, where that is news since the last call.
    pub(super) fn became_clogged(&mut self) -> Option<bool> {
        let before = std::mem::replace(&mut self.was_clogged, !self.outbox.is_empty());
        (before != self.was_clogged).then_some(self.was_clogged)
    }

    /// Enters a request. [`Lane::flush`] sends it.
    pub(super) fn ask(&mut self, request: Request, slot: usize, sink_offset: u64) {
        let Request { tag, length, .. } = request;
        self.held.push_back(request);
        self.outstanding += u64::from(length);
        self.expected.push_back(Expected { tag, slot, length, sink_offset, left: length });
    }

    /// Sends requests as far as the window lets them through and the socket takes them.
    pub(super) fn flush(&mut self) {
        while self.in_flight < self.window
            && let Some(request) = self.held.pop_front()
        {
            self.in_flight += u64::from(request.length);
            self.outbox.extend(request.encode());
        }
        let mut sent = 0;
        while let Some(rest) = self.outbox.get(sent..).filter(|rest| !rest.is_empty()) {
            match self.stream.write(rest) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // What the source said last may still be in our buffer: let receive() find the end.
                Err(_) => sent = self.outbox.len(),
            }
        }
        self.outbox.drain(..sent);
    }

    /// Receives what is there, about `budget` bytes at most, and tells `done` of each answer that is complete. Says whether
    /// anything came.
    pub(super) fn receive(
        &mut self,
        sink: &Memory,
        budget: usize,
        mut done: impl FnMut(usize, Result<(), Denial>),
    ) -> Result<bool, ReadError> {
        let mut received = 0;
        loop {
            self.empty_inbox(sink, &mut done)?;
            let nothing_more_to_come = received > 0 && self.expected.is_empty();
            if received >= budget || nothing_more_to_come {
                return Ok(received > 0);
            }
            match self.receive_once(sink, &mut done) {
                Ok(Received { count, was_all: false }) => {
                    received += count;
                    self.flush();
                }
                Ok(_) => {
                    self.empty_inbox(sink, &mut done)?;
                    self.flush();
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(received > 0),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::debug!(%error, "a data lane has ended");
                    return Err(ReadError::PeerGone);
                }
            }
        }
    }

    /// One system call: into the sink in the middle of a large piece, else into the inbox.
    fn receive_once(
        &mut self,
        sink: &Memory,
        done: &mut impl FnMut(usize, Result<(), Denial>),
    ) -> io::Result<Received> {
        let (wanted, count) = match self.expected.front() {
            Some(front) if self.piece_left as usize > SMALL_BYTES => {
                let wanted = self.piece_left as usize;
                let count = sink.receive(&self.stream, front.sink_offset, wanted)?;
                self.received_bytes(count as u32, done);
                (wanted, count)
            }
            _ => {
                let room = self.inbox.room(self.inbox_demand());
                (room.len(), self.stream.read(room).inspect(|count| self.inbox.end += count)?)
            }
        };
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // Less than there was room for: the socket is empty, and asking it again would only cost a system call.
        Ok(Received { count, was_all: count < wanted })
    }

    /// How many bytes to have in the inbox: the next header, and all small answers up to the next large one's header.
    fn inbox_demand(&self) -> usize {
        let mut bytes = self.piece_left as usize;
        let mut is_next = bytes == 0;
        for answer in &self.expected {
            // Of a read that is under way what follows the present piece: nothing, or one more header.
            let left = (answer.left as usize).saturating_sub(if is_next { 0 } else { self.piece_left as usize });
            if is_next || left > 0 {
                bytes += Answer::BYTES;
            }
            if left > SMALL_BYTES {
                return bytes.min(INBOX_BYTES);
            }
            if is_next {
                bytes += left;
            }
            is_next = true;
        }
        bytes.clamp(Answer::BYTES, INBOX_BYTES)
    }

    /// Takes headers and bytes out of the inbox, until no whole header is left in it.
    fn empty_inbox(
        &mut self,
        sink: &Memory,
        done: &mut impl FnMut(usize, Result<(), Denial>),
    ) -> Result<(), ReadError> {
        loop {
            if self.piece_left == 0 {
                let Some(header) = self.inbox.take_header() else { return Ok(()) };
                let answer = Answer::decode(&header).map_err(|malformed| violation(&malformed.to_string()))?;
                self.begin_piece(answer, done)?;
                continue;
            }
            let Some(front) = self.expected.front() else { return Err(violation("bytes that belong to no read")) };
            let bytes = self.inbox.take(self.piece_left as usize);
            if bytes.is_empty() {
                return Ok(());
            }
            // The place was checked when the read was posted, so that this cannot fail.
            sink.write(front.sink_offset, bytes).map_err(|_| ReadError::PeerGone)?;
            let count = bytes.len() as u32;
            self.received_bytes(count, done);
        }
    }

    /// Judges a header: it must be about the read whose turn it is, and announce no more than is missing.
    fn begin_piece(
        &mut self,
        answer: Answer,
        done: &mut impl FnMut(usize, Result<(), Denial>),
    ) -> Result<(), ReadError> {
        let front = self.expected.front().filter(|front| front.tag == answer.tag).copied();
        match (answer.status, front) {
            (Status::Good, Some(front)) if answer.length == 0 && front.left == 0 => {
                self.finish(Ok(()), done);
                Ok(())
            }
            (Status::Good, Some(front)) if answer.length > 0 && answer.length <= front.left => {
                self.piece_left = answer.length;
                Ok(())
            }
            (Status::Good, Some(_)) => Err(violation("an answer of a length that was not requested for")),
            (Status::Good, None) => Err(violation("an answer to something that was not requested")),
            (Status::Denied(Denial::OutOfBounds), Some(front)) if front.left == front.length => {
                self.finish(Err(Denial::OutOfBounds), done);
                Ok(())
            }
            (Status::Denied(Denial::OutOfBounds), _) => Err(violation("a denial of something that was not requested")),
            (Status::Denied(denial), Some(_)) => Err(ReadError::Denied(denial)),
            (Status::Denied(denial), None) if answer.tag == TAG_LANE => Err(ReadError::Denied(denial)),
            (Status::Denied(_), None) => Err(violation("a denial of something that was not requested")),
            (Status::Malformed, _) => Err(violation("it finds our requests malformed")),
        }
    }

    /// `count` bytes of the present piece are in the sink.
    fn received_bytes(&mut self, count: u32, done: &mut impl FnMut(usize, Result<(), Denial>)) {
        self.piece_left -= count;
        self.outstanding -= u64::from(count);
        self.in_flight -= u64::from(count);
        if let Some(front) = self.expected.front_mut() {
            front.left -= count;
            front.sink_offset += u64::from(count);
            if front.left == 0 {
                self.finish(Ok(()), done);
            }
        }
    }

    /// The answer whose turn it was is over.
    fn finish(&mut self, result: Result<(), Denial>, done: &mut impl FnMut(usize, Result<(), Denial>)) {
        if let Some(front) = self.expected.pop_front() {
            self.outstanding -= u64::from(front.left);
            self.in_flight -= u64::from(front.left);
            done(front.slot, result);
        }
    }

    /// Ends the connection, so that whoever waits on it wakes.
    pub(super) fn cut(&self) {
        socket::cut(&self.stream);
    }
}

/// What one system call brought.
struct Received {
    count: usize,
    /// The socket is empty now.
    was_all: bool,
}

/// Bytes that came together and belong to several answers.
struct Inbox {
    bytes: Box<[u8]>,
    begin: usize,
    end: usize,
}

impl Inbox {
    fn new() -> Inbox {
        Inbox { bytes: vec![0; INBOX_BYTES].into(), begin: 0, end: 0 }
    }

    /// Room for so many bytes that there will be `wanted`, those that are here included. They are moved to the front: less than
    /// a header.
    fn room(&mut self, wanted: usize) -> &mut [u8] {
        self.bytes.copy_within(self.begin..self.end, 0);
        self.end -= self.begin;
        self.begin = 0;
        self.bytes.get_mut(self.end..wanted.min(INBOX_BYTES)).unwrap_or_default()
    }

    fn take_header(&mut self) -> Option<[u8; Answer::BYTES]> {
        let header = *self.bytes.get(self.begin..self.end)?.first_chunk()?;
        self.begin += Answer::BYTES;
        Some(header)
    }

    /// At most `most` bytes; fewer if there are fewer.
    fn take(&mut self, most: usize) -> &[u8] {
        let begin = self.begin;
        self.begin = self.end.min(begin + most);
        self.bytes.get(begin..self.begin).unwrap_or_default()
    }
}

/// The source does not keep to the protocol: nothing that it sends from now on can be trusted to be what it seems.
fn violation(what: &str) -> ReadError {
    tracing::warn!(what, "the source of a data lane broke the protocol: hanging up");
    ReadError::PeerGone
}

/// Between hosts the depth alone bounds what is under way. On one host there is no distance to fill: what is asked for further
/// ahead only lies in the kernel's buffers until the caches have forgotten it. With 16 MiB ahead a loopback was measured to cost
/// 0.16 processor seconds per GB at either end, with 0.3 to 1 MB ahead 0.14 to 0.15 at the reader and 0.12 to 0.13 at the source;
/// this lies between, and is a tenth of a millisecond's lead.
const SAME_HOST_WINDOW_BYTES: u64 = 512 << 10;

/// Answers of up to this many bytes go through the inbox; see the source's limit of the same name. The two need not agree.
const SMALL_BYTES: usize = 16 << 10;

/// Room for sixteen answers of 4 KiB with their headers, and one small one more. Per lane.
const INBOX_BYTES: usize = 96 << 10;
