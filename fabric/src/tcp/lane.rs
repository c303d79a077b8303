//! The reader's data path: one connection, on which answers arrive in the order of the requests. `peer` distributes
//! reads over lanes and handles failures.
//!
//! ```text
//!   expected:  │ 1 MiB, half received │ 4 KiB │ 4 KiB │ 1 MiB │        the order in which answers arrive
//!                └ large: recv(2) directly into the sink
//!                                       └───────┴───────┴ small: one recv(2) into `inbox` for all of them and the next
//!                                                         header, then a copy each
//! ```
//!
//! While bytes go through the inbox, no more is received than headers and small reads, so that no byte of a large read
//! is copied twice.

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

/// A connection of a peer. Its socket is non-blocking.
pub(super) struct Lane {
    stream: TcpStream,
    /// Requests that the socket has not accepted yet; almost always empty.
    outbox: Vec<u8>,
    /// Requests that wait for the window, in order.
    held: VecDeque<Request>,
    /// Bytes still to arrive for requests in the window, and the limit above which no further request is sent.
    in_flight: u64,
    window: u64,
    was_clogged: bool,
    expected: VecDeque<Expected>,
    /// Bytes still to arrive for all expected answers.
    outstanding: u64,
    /// Bytes still to arrive of the present piece; 0: a header is next.
    piece_left: u32,
    inbox: Inbox,
}

/// An expected answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// The tag on the wire.
    pub(super) tag: u64,
    /// The read of the peer that it belongs to.
    pub(super) slot: usize,
    /// Bytes requested.
    pub(super) length: u32,
    /// Offset in the sink of the next byte; advances as bytes arrive.
    pub(super) sink_offset: u64,
    /// Bytes still to arrive.
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

    /// Bytes requested that have not arrived.
    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// Whether requests wait for room in the socket, if that has changed since the last call.
    pub(super) fn became_clogged(&mut self) -> Option<bool> {
        let before = std::mem::replace(&mut self.was_clogged, !self.outbox.is_empty());
        (before != self.was_clogged).then_some(self.was_clogged)
    }

    /// Queues a request. [`Lane::flush`] sends it.
    pub(super) fn ask(&mut self, request: Request, slot: usize, sink_offset: u64) {
        let Request { tag, length, .. } = request;
        self.held.push_back(request);
        self.outstanding += u64::from(length);
        self.expected.push_back(Expected { tag, slot, length, sink_offset, left: length });
    }

    /// Sends requests, as far as the window and the socket allow.
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
                // The source's last answers may still be in our buffer: receive() finds the end.
                Err(_) => sent = self.outbox.len(),
            }
        }
        self.outbox.drain(..sent);
    }

    /// Receives what has arrived, up to about `budget` bytes, and calls `done` for each complete answer. Returns
    /// whether bytes arrived.
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

    /// One system call: into the sink in the middle of a large piece, otherwise into the inbox.
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
        // Less than there was room for: the socket is empty, and another system call would return nothing.
        Ok(Received { count, was_all: count < wanted })
    }

    /// Bytes to receive into the inbox: the next header, and all small answers up to the next large one's header.
    fn inbox_demand(&self) -> usize {
        let mut bytes = self.piece_left as usize;
        let mut is_next = bytes == 0;
        for answer in &self.expected {
            // For a read in progress, what follows the present piece: nothing, or one more header.
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

    /// Processes headers and bytes in the inbox, until no whole header is left.
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
            // The place was checked when the read was posted, so this does not fail.
            sink.write(front.sink_offset, bytes).map_err(|_| ReadError::PeerGone)?;
            let count = bytes.len() as u32;
            self.received_bytes(count, done);
        }
    }

    /// Checks a header: it must belong to the next expected read, and announce no more bytes than are missing.
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
            (Status::Malformed, _) => Err(violation("it rejects a request as malformed")),
        }
    }

    /// Records that `count` bytes of the present piece are in the sink.
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

    /// Completes the next expected answer.
    fn finish(&mut self, result: Result<(), Denial>, done: &mut impl FnMut(usize, Result<(), Denial>)) {
        if let Some(front) = self.expected.pop_front() {
            self.outstanding -= u64::from(front.left);
            self.in_flight -= u64::from(front.left);
            done(front.slot, result);
        }
    }

    /// Ends the connection, which wakes its users.
    pub(super) fn cut(&self) {
        socket::cut(&self.stream);
    }
}

/// The result of one system call.
struct Received {
    count: usize,
    /// Whether the socket is empty.
    was_all: bool,
}

/// Bytes that were received together and belong to several answers.
struct Inbox {
    bytes: Box<[u8]>,
    begin: usize,
    end: usize,
}

impl Inbox {
    fn new() -> Inbox {
        Inbox { bytes: vec![0; INBOX_BYTES].into(), begin: 0, end: 0 }
    }

    /// Room for receiving, so that the inbox then holds `wanted` bytes. Bytes that it already holds, less than a
    /// header, move to the front.
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

    /// At most `most` bytes, fewer if there are fewer.
    fn take(&mut self, most: usize) -> &[u8] {
        let begin = self.begin;
        self.begin = self.end.min(begin + most);
        self.bytes.get(begin..self.begin).unwrap_or_default()
    }
}

/// Logs that the source violates the protocol. Nothing that it sends after that can be trusted.
fn violation(what: &str) -> ReadError {
    tracing::warn!(what, "the source violated the protocol of a data lane: closing it");
    ReadError::PeerGone
}

/// Bytes in flight on one host; between hosts only the depth is a limit. On one host there is no distance to fill, and
/// bytes that are requested too early leave the caches before they are read. A loopback with 16 MiB in flight took 0.16
/// processor seconds per GB at either end; with 0.3 to 1 MB it took 0.14 to 0.15 at the reader and 0.12 to 0.13 at the
/// source. This is between, a tenth of a millisecond's worth.
const SAME_HOST_WINDOW_BYTES: u64 = 512 << 10;

/// Answers up to this size go through the inbox. The source has a limit of the same name; the two need not agree.
const SMALL_BYTES: usize = 16 << 10;

/// Room for sixteen answers of 4 KiB with their headers, and one more small one. Per lane.
const INBOX_BYTES: usize = 96 << 10;
