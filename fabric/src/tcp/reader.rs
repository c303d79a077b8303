//! The reader's end: it connects the lanes of a region and shakes hands on each, distributes reads over them, and
//! limits their number and their time.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;

use super::socket::{self, Deadline};
use super::{Answer, HelloSent, Request, Status, TAG_LANE, TcpOptions};
use crate::admission::Hello;
use crate::transport::{self, Completion, Slots, StallTimer};
use crate::{
    Connector, Denial, Error, Memory, Peer, ReadError, ReadRequest, RegionId, RegionKey, Secret, TransportKind, View,
    admission, tcp,
};

// Connects the lanes and shakes hands on each. Reads are in `peer`.

/// Connects to sources over TCP.
pub struct TcpConnector {
    options: TcpOptions,
    fallback_host: Option<SocketAddr>,
    check: Box<Check>,
}

/// Refuses addresses that lanes may not be connected to.
type Check = dyn Fn(SocketAddr) -> Result<(), Error> + Send + Sync;

impl TcpConnector {
    /// A connector. `fallback_host` is the address by which the messenger reached the source; it replaces the host in
    /// keys that name none. Its port is not used.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options out of range.
    pub fn new(options: TcpOptions, fallback_host: Option<SocketAddr>) -> Result<TcpConnector, Error> {
        options.check()?;
        Ok(TcpConnector { options, fallback_host, check: Box::new(|_| Ok(())) })
    }

    /// Connects to addresses only that `check` does not refuse. The address comes from the region's key, so it can be
    /// another one than that of the conversation. An error is that of [`Connector::connect`].
    #[must_use]
    pub fn with_check(self, check: impl Fn(SocketAddr) -> Result<(), Error> + Send + Sync + 'static) -> TcpConnector {
        TcpConnector { check: Box::new(check), ..self }
    }

    /// As [`Connector::connect`], but returns the [`TcpPeer`] itself.
    ///
    /// # Errors
    /// Those of [`Connector::connect`].
    pub fn open(&self, key: &RegionKey, session: u64, secret: &Secret, sink: Arc<Memory>) -> Result<TcpPeer, Error> {
        let address = tcp::address_in(key, self.fallback_host)?;
        (self.check)(address)?;
        let streams = self.dial(address)?;
        self.shake_hands(&streams, key, session, secret)?;
        let lanes = streams.into_iter().map(Lane::new).collect::<io::Result<_>>();
        let lanes = lanes.map_err(Error::system("making a lane non-blocking"))?;
        TcpPeer::new(key.id(), sink, lanes, &self.options)
    }

    fn dial(&self, address: SocketAddr) -> Result<Vec<TcpStream>, Error> {
        let deadline = Deadline::after(self.options.connect_timeout);
        let mut streams = Vec::new();
        for _ in 0..self.options.lanes {
            let stream =
                TcpStream::connect_timeout(&address, deadline.left()?).map_err(|source| match source.kind() {
                    io::ErrorKind::TimedOut => {
                        Error::TimedOut { what: "the source's data port", after: self.options.connect_timeout }
                    }
                    _ => Error::Unreachable { what: format!("the source's data port at {address}"), source },
                })?;
            socket::prepare(&stream, &self.options)?;
            streams.push(stream);
        }
        Ok(streams)
    }

    /// Each step is done on all lanes before the next step, so that the round trips overlap.
    fn shake_hands(&self, streams: &[TcpStream], key: &RegionKey, session: u64, secret: &Secret) -> Result<(), Error> {
        let deadline = Deadline::after(self.options.handshake_timeout);
        let hello = |(lane, stream)| {
            HelloSent::hello(stream, deadline, &Hello { lane, session, id: key.id(), nonce: admission::nonce()? })
        };
        let greeted: Vec<_> = (0u8..).zip(streams).map(hello).collect::<Result<_, Error>>()?;
        let answered: Vec<_> = greeted.into_iter().map(|lane| lane.prove(secret)).collect::<Result<_, _>>()?;
        for lane in answered {
            if lane.finish()? != key.length() {
                return Err(Error::Protocol("the length of the region differs from its key"));
            }
        }
        Ok(())
    }
}

impl Connector for TcpConnector {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn connect(
        &self,
        key: &RegionKey,
        session: u64,
        secret: &Secret,
        sink: Arc<Memory>,
    ) -> Result<Box<dyn Peer>, Error> {
        Ok(Box::new(self.open(key, session, secret, sink)?))
    }
}

// The reader's connection to one region: distributes reads over its lanes, and limits their number and their time. It
// works on the caller's thread; `lane` moves the bytes.
//
// ```text
//            post_read                                                   poll
//   reads ──▶ slot ──▶ one part, or one per lane ──▶ lanes ══▶ parts ──▶ slot ──▶ completion
//             └─ as many as the depth                                      └─ free again
// ```
//
// The descriptor of [`Peer::arm`] is an epoll instance over the lanes' sockets and one timer, so that a caller that
// only sleeps on it also notices a source that has stopped answering. A retired peer keeps its sockets, shut down:
// they stay readable, and with them the descriptor, until the peer is dropped.

/// A [`Peer`] over TCP, made by [`TcpConnector`].
pub struct TcpPeer {
    id: RegionId,
    sink: Arc<Memory>,
    lanes: Vec<Lane>,
    slots: Slots,
    next_tag: u64,
    readiness: OwnedFd,
    stall: StallTimer,
    retired: Option<ReadError>,
}

impl TcpPeer {
    /// A peer over lanes whose handshake is complete.
    pub(super) fn new(
        id: RegionId,
        sink: Arc<Memory>,
        lanes: Vec<Lane>,
        options: &TcpOptions,
    ) -> Result<TcpPeer, Error> {
        let readiness =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("creating an epoll instance"))?;
        let stall = StallTimer::new(options.stall_timeout)?;
        let watch = |fd: BorrowedFd<'_>| {
            epoll::add(&readiness, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .map_err(Error::system("watching a data lane"))
        };
        watch(stall.as_fd())?;
        lanes.iter().try_for_each(|lane| watch(lane.stream().as_fd()))?;
        Ok(TcpPeer { id, sink, lanes, slots: Slots::new(options.depth), next_tag: 0, readiness, stall, retired: None })
    }

    /// The congestion control at this end of the lanes, by its kernel name. That of the source, which sends the bytes,
    /// may differ: [`TcpExporter::effective_congestion`](super::TcpExporter::effective_congestion).
    pub fn effective_congestion(&self) -> Option<String> {
        self.lanes.first().and_then(|lane| socket::congestion(lane.stream()).ok())
    }

    /// Splits a read into parts and queues them on lanes.
    fn ask(&mut self, slot: usize, read: &ReadRequest) -> u32 {
        let mut parts = 0;
        for (offset, length) in cut(read, self.lanes.len()) {
            let request = Request { tag: self.next_tag, id: self.id, offset: read.offset.wrapping_add(offset), length };
            self.next_tag += 1;
            let Some(lane) = self.lanes.iter_mut().min_by_key(|lane| lane.outstanding()) else { break };
            lane.ask(request, slot, read.sink_offset + offset);
            parts += 1;
        }
        parts
    }

    /// Sends queued requests. A lane whose socket is full, because the source does not read, is also watched for room.
    fn flush(&mut self) {
        for lane in &mut self.lanes {
            lane.flush();
            let Some(is_clogged) = lane.became_clogged() else { continue };
            let room = if is_clogged { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            // Fails only for a descriptor that is not watched; the stall timer would still expire.
            let flags = epoll::EventFlags::IN | room;
            let changed = epoll::modify(&self.readiness, lane.stream(), epoll::EventData::new_u64(0), flags);
            debug_assert!(changed.is_ok(), "each lane is watched from the beginning");
        }
    }

    /// Receives on each lane in turn, until one fails.
    fn receive(&mut self, completions: &mut Vec<Completion>) -> Result<(), ReadError> {
        let TcpPeer { sink, lanes, slots, stall, .. } = self;
        let budget = POLL_BYTES / lanes.len().max(1);
        for lane in lanes {
            let came = lane.receive(sink, budget, |slot, result| completions.extend(slots.part_done(slot, result)))?;
            if came {
                stall.progress();
            }
        }
        stall.check(!slots.is_empty())
    }

    /// Retires the peer with `error` and closes the lanes.
    fn retire(&mut self, error: ReadError) {
        if self.retired.is_none() {
            self.retired = Some(error);
            self.lanes.iter().for_each(Lane::cut);
        }
    }
}

impl Peer for TcpPeer {
    fn depth(&self) -> usize {
        self.slots.depth()
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        transport::admit(reads, &self.sink, self.retired, &self.slots, &mut self.stall)?;
        let mut accepted = 0;
        for read in reads {
            let Some(slot) = self.slots.take(read) else { break };
            let parts = self.ask(slot, read);
            self.slots.set_parts(slot, parts);
            accepted += 1;
        }
        self.flush();
        Ok(accepted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        let before = completions.len();
        if self.retired.is_none() {
            self.flush();
            match self.receive(completions) {
                // Received bytes have made room for held requests.
                Ok(()) => self.flush(),
                Err(error) => self.retire(error),
            }
        }
        if let Some(error) = self.retired {
            completions.extend(self.slots.fail_all(error));
            if completions.len() == before {
                return Err(Error::Retired(error));
            }
        }
        Ok(completions.len() - before)
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        self.stall.settle();
        self.readiness.as_fd()
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {
        self.retire(ReadError::Cancelled);
    }
}

impl Drop for TcpPeer {
    fn drop(&mut self) {
        self.close();
    }
}

/// The parts of a read over `lanes` lanes, as offset in the read and length. A range that overflows is not split: the
/// source denies it.
fn cut(read: &ReadRequest, lanes: usize) -> impl Iterator<Item = (u64, u32)> + use<> {
    let whole = read.length;
    let overflows = read.offset.checked_add(whole.into()).is_none();
    let parts = if overflows { 1 } else { (whole / CUT_BYTES).clamp(1, lanes.max(1) as u32) };
    let length = whole.div_ceil(parts).next_multiple_of(if parts > 1 { PAGE_BYTES } else { 1 }).max(1);
    let begins = (0..parts).map(move |part| part * length).take_while(move |begin| *begin == 0 || *begin < whole);
    begins.map(move |begin| (begin.into(), (whole - begin).min(length)))
}

/// Maximum bytes received per poll: about a millisecond's worth.
const POLL_BYTES: usize = 8 << 20;

/// Minimum size of a part. Below it, the system calls and the wake-up of a second lane cost more than the copy that it
/// takes over.
const CUT_BYTES: u32 = 256 << 10;

/// Parts start at whole pages of the read.
const PAGE_BYTES: u32 = 4096;

// The reader's data path: one connection, on which answers arrive in the order of the requests. `peer` distributes
// reads over lanes and handles failures.
//
// ```text
//   expected:  │ 1 MiB, half received │ 4 KiB │ 4 KiB │ 1 MiB │        the order in which answers arrive
//                └ large: recv(2) directly into the sink
//                                       └───────┴───────┴ small: one recv(2) into `inbox` for all of them and the next
//                                                         header, then a copy each
// ```
//
// While bytes go through the inbox, no more is received than headers and small reads, so that no byte of a large read
// is copied twice.

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
    fn became_clogged(&mut self) -> Option<bool> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_follow_one_another_and_make_the_whole(offset: u64, length: u32, lanes in 1usize..=4) {
            let read = ReadRequest { tag: 0, offset, length, sink_offset: 0 };
            let parts: Vec<_> = cut(&read, lanes).collect();
            prop_assert!((1..=lanes).contains(&parts.len()));
            let mut next = 0;
            for (begin, part) in parts {
                prop_assert_eq!(begin, next);
                next += u64::from(part);
            }
            prop_assert_eq!(next, u64::from(length));
        }
    }

    #[test]
    fn a_range_that_overflows_is_left_whole() {
        let read = ReadRequest { tag: 0, offset: u64::MAX - 10, length: 1 << 20, sink_offset: 0 };
        assert_eq!(cut(&read, 4).collect::<Vec<_>>(), [(0, 1 << 20)]);
    }

    #[test]
    fn a_large_read_is_cut_over_all_lanes_and_a_small_one_is_not() {
        let read = |length| ReadRequest { tag: 0, offset: 0, length, sink_offset: 0 };
        assert_eq!(cut(&read(1 << 20), 4).count(), 4);
        assert_eq!(cut(&read(CUT_BYTES), 4).count(), 1);
        assert_eq!(cut(&read(0), 4).collect::<Vec<_>>(), [(0, 0)]);
    }
}
