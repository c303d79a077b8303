//! The source's data path: one lane, from its welcome to its end. `exporter` decides who may have a lane.
//!
//! ```text
//!   recv: a batch of requests ─▶ check each ─┬─ small: header and bytes into `outbox`, sent with the rest of the batch
//!                                            └─ large: header, then send(2) or sendfile(2) from the region, piece by piece
//! ```
//!
//! Bytes of a large read are not copied in user space. Those of small reads are: sixteen reads of 4 KiB are then sent
//! by one system call instead of thirty-two, which saves far more than the copy costs.

use std::{
    io::{self, Read},
    net::TcpStream,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::net::SendFlags;

use super::{
    SLOWEST_DRAIN_BYTES, SendMode,
    pacer::LanePace,
    socket,
    wire::{Answer, PIECE_BYTES, Request, Status, TAG_LANE},
};
use crate::{Denial, Memory, RegionId};

/// A region, as its lanes use it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) id: RegionId,
    pub(super) memory: Arc<Memory>,
    /// Set once, by `revoke`; checked before every piece.
    pub(super) revoked: AtomicBool,
}

/// Why a lane ended. For the log only: it is not an error of the source.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("the reader closed the connection")]
    HungUp,
    #[error("the region was revoked")]
    Revoked,
    #[error("the reader took less than {SLOWEST_DRAIN_BYTES} bytes within {0:?}")]
    Slow(Duration),
    #[error("the reader did not complete a request within {0:?}")]
    HalfRequest(Duration),
    #[error("the reader sent an invalid request")]
    Malformed,
    #[error("{0}")]
    Broken(#[from] io::Error),
}

/// Answers the requests of one lane until it ends.
pub(super) struct LaneServer<'a> {
    stream: &'a TcpStream,
    region: &'a Region,
    mode: SendMode,
    drain_timeout: Duration,
    pace: Option<LanePace<'a>>,
    served: &'a AtomicU64,
    outbox: Vec<u8>,
}

impl<'a> LaneServer<'a> {
    pub(super) fn new(
        stream: &'a TcpStream,
        region: &'a Region,
        mode: SendMode,
        drain_timeout: Duration,
        pace: Option<LanePace<'a>>,
        served: &'a AtomicU64,
    ) -> LaneServer<'a> {
        LaneServer { stream, region, mode, drain_timeout, pace, served, outbox: Vec::with_capacity(OUTBOX_BYTES) }
    }

    /// Serves the lane, and returns why it ended.
    pub(super) fn run(mut self) -> Ended {
        let ended = match self.serve() {
            Ok(never) => match never {},
            Err(ended) => ended,
        };
        // `revoke` has woken this thread by closing the receiving side; the reader must still be notified.
        let last_word = match &ended {
            // In the middle of a piece the reader would take an answer for content.
            Ended::Slow(_) | Ended::Broken(_) => None,
            Ended::Malformed => Some(Status::Malformed),
            _ if self.is_revoked() => Some(Status::Denied(Denial::Revoked)),
            _ => None,
        };
        if let Some(status) = last_word {
            self.outbox.extend(Answer { tag: TAG_LANE, status, length: 0 }.encode());
            let _ = self.flush(SendFlags::empty());
            self.hang_up();
        }
        if self.is_revoked() { Ended::Revoked } else { ended }
    }

    /// Ends the lane so that sent bytes still arrive: closing a socket with unread requests resets the connection,
    /// which discards unsent bytes.
    fn hang_up(&self) {
        socket::cut(self.stream);
        let mut unread = [0; INBOX_BYTES];
        let mut stream = self.stream;
        while matches!(stream.read(&mut unread), Ok(1..)) {}
    }

    fn serve(&mut self) -> Result<std::convert::Infallible, Ended> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(Some(self.drain_timeout))?;
        let mut inbox = [0; INBOX_BYTES];
        let mut filled = 0;
        loop {
            filled += self.receive(inbox.get_mut(filled..).unwrap_or_default(), filled > 0)?;
            let received = inbox.get(..filled).unwrap_or_default();
            let (requests, _) = received.as_chunks::<{ Request::BYTES }>();
            for request in requests {
                self.answer(Request::decode(request))?;
            }
            self.flush(SendFlags::empty())?;
            let done = requests.len() * Request::BYTES;
            inbox.copy_within(done..filled, 0);
            filled -= done;
        }
    }

    /// Receives at least one byte of requests. A lane may be idle between two requests, but not in the middle of one.
    fn receive(&self, into: &mut [u8], inside_request: bool) -> Result<usize, Ended> {
        if inside_request {
            self.stream.set_read_timeout(Some(self.drain_timeout))?;
        }
        let received = loop {
            let mut stream = self.stream;
            match stream.read(into) {
                Ok(0) => return Err(Ended::HungUp),
                Ok(count) => break count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(Ended::HalfRequest(self.drain_timeout));
                }
                Err(error) => return Err(error.into()),
            }
        };
        if inside_request {
            self.stream.set_read_timeout(None)?;
        }
        Ok(received)
    }

    fn answer(&mut self, request: Request) -> Result<(), Ended> {
        if self.is_revoked() {
            return Err(Ended::Revoked);
        }
        match request.judge(self.region.id, self.region.memory.length()) {
            Status::Good if request.length as usize <= SMALL_BYTES => self.answer_small(request),
            Status::Good => self.answer_large(request),
            Status::Malformed => Err(Ended::Malformed),
            denied => self.put_header(Answer { tag: request.tag, status: denied, length: 0 }),
        }
    }

    /// Writes header and bytes to the outbox.
    fn answer_small(&mut self, request: Request) -> Result<(), Ended> {
        if self.outbox.len() + Answer::BYTES + SMALL_BYTES > OUTBOX_BYTES {
            self.flush(SendFlags::MORE)?;
        }
        self.put_header(Answer { tag: request.tag, status: Status::Good, length: request.length })?;
        let begin = self.outbox.len();
        self.outbox.resize(begin + request.length as usize, 0);
        let place = self.outbox.get_mut(begin..).unwrap_or_default();
        self.region.memory.read(request.offset, place).map_err(io::Error::from)?;
        self.served.fetch_add(request.length.into(), Ordering::Relaxed);
        Ok(())
    }

    /// Sends bytes from the region, each piece after its header.
    fn answer_large(&mut self, request: Request) -> Result<(), Ended> {
        let mut sent = 0;
        while sent < request.length {
            if self.is_revoked() {
                return Err(Ended::Revoked);
            }
            let length = (request.length - sent).min(PIECE_BYTES);
            self.put_header(Answer { tag: request.tag, status: Status::Good, length })?;
            self.flush(SendFlags::MORE)?;
            self.send_region(request.offset + u64::from(sent), length as usize)?;
            sent += length;
        }
        Ok(())
    }

    /// Sends one piece. `offset + length` was checked to be inside the region.
    fn send_region(&mut self, offset: u64, length: usize) -> Result<(), Ended> {
        let (region, mut sent) = (self.region, 0);
        while sent < length {
            let (at, mut left) = (offset + sent as u64, length - sent);
            if let Some(pace) = &mut self.pace {
                // The rest of the piece must be sent even if the region is revoked; a closed connection is found by
                // sending.
                left = pace.wait(left, || region.revoked.load(Ordering::Acquire));
            }
            let began = Instant::now();
            let result = match self.mode {
                SendMode::Copy => region.memory.send(self.stream, at, left),
                SendMode::File => region.memory.send_file(self.stream, at, left),
            };
            let count = self.drained(result, left, began)?;
            self.served.fetch_add(count as u64, Ordering::Relaxed);
            sent += count;
        }
        Ok(())
    }

    fn put_header(&mut self, answer: Answer) -> Result<(), Ended> {
        if self.outbox.len() + Answer::BYTES > OUTBOX_BYTES {
            self.flush(SendFlags::MORE)?;
        }
        self.outbox.extend(answer.encode());
        Ok(())
    }

    /// Sends the outbox. With `MORE` the kernel may wait for the bytes that follow immediately.
    fn flush(&mut self, flags: SendFlags) -> Result<(), Ended> {
        let mut sent = 0;
        while let Some(rest) = self.outbox.get(sent..).filter(|rest| !rest.is_empty()) {
            let began = Instant::now();
            let result = rustix::net::send(self.stream.as_fd(), rest, flags | SendFlags::NOSIGNAL);
            sent += self.drained(result.map_err(io::Error::from), rest.len(), began)?;
        }
        self.outbox.clear();
        Ok(())
    }

    /// Checks the result of a blocking send that started at `began`. It is short only after a signal or at the
    /// time-out. Then the count shows the reader's speed: a slow reader is kept, one that has almost stopped is
    /// disconnected.
    fn drained(&self, result: io::Result<usize>, wanted: usize, began: Instant) -> Result<usize, Ended> {
        let count = match result {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Ended::Slow(self.drain_timeout)),
            Err(error) => return Err(error.into()),
        };
        let is_short = count < wanted && count < SLOWEST_DRAIN_BYTES;
        match is_short && began.elapsed() >= self.drain_timeout {
            true => Err(Ended::Slow(self.drain_timeout)),
            false => Ok(count),
        }
    }

    fn is_revoked(&self) -> bool {
        self.region.revoked.load(Ordering::Acquire)
    }
}

/// Reads up to this size are gathered in the outbox. At 16 KiB the copy costs as much as the system call that it saves
/// (about 1.5 µs).
const SMALL_BYTES: usize = 16 << 10;

/// Room for sixteen reads of 4 KiB with their headers, and one more small one. Per lane.
const OUTBOX_BYTES: usize = 96 << 10;

/// Room for 64 requests, four times the usual depth; further ones wait in the kernel's buffer.
const INBOX_BYTES: usize = 64 * Request::BYTES;
