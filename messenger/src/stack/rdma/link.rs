//! An RDMA connection, as a worker sees it: a stream of bytes, cut into messages and rendezvous.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use remora_rdma::duplex::{Completion, Connection as RdmaConnection, Request, Step};
use rustix::event::{EventfdFlags, eventfd};

use super::credits::{CONTROL_RECEIVES, Credits, MAX_RENDEZVOUS};
use super::device::{Chunk, Device, RECEIVE, RdmaContext, Retired, Waker};
use super::message::{
    self, Body, HEAD_BYTES, Hello, Kind, MAX_RENDEZVOUS_BYTES, RENDEZVOUS_BYTES, Rendezvous, START_BYTES, Violation,
};
use super::rest::Rest;
use crate::stack::{Address, Link};

/// A connection by RDMA.
pub struct RdmaLink {
    /// `None` only while the link is dropped.
    wire: Option<RdmaConnection>,
    context: Arc<RdmaContext>,
    /// The device, once the route is known.
    device: Option<Arc<Device>>,
    credits: Credits,
    /// Size of a message to the peer, head included.
    message_bytes: usize,
    /// Written to when a pool has a chunk again.
    waker: Waker,
    /// Requests on the queue, the oldest first: a card completes them in this order.
    posted: VecDeque<Posted>,
    next_name: u64,
    /// Requests posted since the last signaled one.
    unsignaled: u32,
    /// What has arrived and was not received by the owner, in the order of the stream.
    arrived: VecDeque<Item>,
    reads: u32,
    /// What the peer has not read yet, the oldest first.
    exported: VecDeque<Chunk>,
    may_be_read: bool,
    /// Receives for this link's messages: posted, or holding what has arrived.
    window: u32,
    /// Receives of the window and for control messages that the failing link has used up.
    missing: u32,
    /// This end has slept since the descriptor was last checked.
    slept: bool,
    /// Not everything could be sent.
    blocked: bool,
    /// Not everything could be sent: a large piece waits until the peer has read an earlier one.
    awaits_reads: bool,
    /// Not everything could be sent: a pool was empty, and will write to the waker.
    without_memory: bool,
    ended: bool,
    /// The link ended because of a violation by the peer.
    violation: Option<Violation>,
    done: Vec<Completion>,
}

/// A request on the queue.
struct Posted {
    name: u64,
    /// The memory that it uses.
    memory: Option<Chunk>,
    is_read: bool,
}

/// A piece of the stream.
enum Item {
    /// Bytes `at..end` of a message.
    Message { chunk: Chunk, at: u32, end: u32 },
    /// The peer has announced the bytes; the READ is not posted.
    Rendezvous(Rendezvous),
    /// The READ is under way.
    Reading { length: u32 },
    /// Bytes `at..end` of what was read.
    Read { chunk: Chunk, at: u32, end: u32 },
}

impl RdmaLink {
    /// Begins to connect.
    pub(in crate::stack) fn call(context: &Arc<RdmaContext>, peer: SocketAddr) -> io::Result<RdmaLink> {
        let waker = waker()?;
        let wire = RdmaConnection::call(&context.stations, context.options.local, peer)?;
        wire.watch_also(waker.as_fd())?;
        Ok(RdmaLink::new(context, wire, waker))
    }

    /// Accepts a connection, with receives posted before the peer can send.
    pub(super) fn accept(context: &Arc<RdmaContext>, request: Request, hello: Hello) -> io::Result<RdmaLink> {
        let waker = waker()?;
        let device = context.of(request.station());
        let window = reserve(&device, context)?;
        let ours = Hello { message_bytes: context.options.message_bytes, credits: window };
        let wire = request.accept(&ours.encode()).inspect_err(|_| device.release(window + CONTROL_RECEIVES))?;
        let mut link = RdmaLink::new(context, wire, waker);
        // From here on the peer may send: should an error follow, the link is retired like any other.
        (link.device, link.window) = (Some(device), window);
        link.set_peer(hello);
        check_inline(link.wire()?.inline_bytes())?;
        link.wire()?.watch_also(link.waker.as_fd())?;
        Ok(link)
    }

    fn new(context: &Arc<RdmaContext>, wire: RdmaConnection, waker: Waker) -> RdmaLink {
        RdmaLink {
            wire: Some(wire),
            context: context.clone(),
            device: None,
            credits: Credits::new(0, 0),
            message_bytes: 0,
            waker,
            posted: VecDeque::new(),
            next_name: 0,
            unsignaled: 0,
            arrived: VecDeque::new(),
            reads: 0,
            exported: VecDeque::new(),
            may_be_read: false,
            window: 0,
            missing: 0,
            slept: true,
            blocked: false,
            awaits_reads: false,
            without_memory: false,
            ended: false,
            violation: None,
            done: Vec::new(),
        }
    }

    /// Notes the peer's Hello.
    fn set_peer(&mut self, peer: Hello) {
        self.message_bytes = peer.message_bytes.min(self.context.options.message_bytes) as usize;
        self.credits = Credits::new(peer.credits, self.window);
    }

    /// Continues the connect once the device is known.
    fn connect(&mut self) -> io::Result<()> {
        let wire = self.wire.as_mut().ok_or_else(gone)?;
        let device = self.context.of(&wire.station()?);
        self.window = reserve(&device, &self.context)?;
        self.device = Some(device);
        let hello = Hello { message_bytes: self.context.options.message_bytes, credits: self.window };
        wire.connect(&hello.encode())?;
        check_inline(wire.inline_bytes())
    }

    fn wire(&self) -> io::Result<&RdmaConnection> {
        self.wire.as_ref().ok_or_else(gone)
    }

    fn device(&self) -> io::Result<&Arc<Device>> {
        self.device.as_ref().ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    // ---- receiving ----

    /// Handles completions and what follows from them.
    fn progress(&mut self) -> io::Result<()> {
        if self.ended || self.device.is_none() {
            return Ok(());
        }
        let mut done = std::mem::take(&mut self.done);
        let outcome = self.settle_all(&mut done);
        self.done = done;
        outcome?;
        self.begin_reads()?;
        self.send_controls()
    }

    fn settle_all(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        loop {
            done.clear();
            let wire = self.wire.as_mut().ok_or_else(gone)?;
            if wire.poll(done)? == 0 {
                return Ok(());
            }
            let mut outcome = Ok(());
            for done in done.iter() {
                // After the first failure nothing is handled, but memory is counted back.
                outcome = match outcome {
                    Ok(()) => self.settle(done),
                    failed => failed.inspect_err(|_| self.count_back(done)),
                };
            }
            outcome?;
        }
    }

    fn count_back(&mut self, done: &Completion) {
        let chunk = self.device.as_ref().filter(|_| done.name & RECEIVE != 0).and_then(|device| device.received(done));
        self.missing += u32::from(chunk.is_some());
    }

    fn settle(&mut self, done: &Completion) -> io::Result<()> {
        if done.name & RECEIVE != 0 {
            let chunk = self.device()?.received(done).ok_or_else(unknown)?;
            let heard = if done.well { self.receive_message(chunk, done.length) } else { Err(gone()) };
            return heard.inspect_err(|_| self.missing += 1);
        }
        if !done.well {
            return Err(gone());
        }
        while let Some(posted) = self.posted.front()
            && posted.name <= done.name
        {
            if let Some(posted) = self.posted.pop_front()
                && posted.is_read
            {
                self.finish_read(posted.memory)?;
            }
        }
        Ok(())
    }

    /// Handles a received message.
    fn receive_message(&mut self, chunk: Chunk, length: u32) -> io::Result<()> {
        let mut start = [0; START_BYTES];
        chunk.region().memory().read(chunk.offset(), &mut start)?;
        let opened = message::open(&start, length);
        let heard = opened.and_then(|(head, body)| Ok((self.credits.receive_message(&head)?, body)));
        let (update, body) = heard.map_err(|violation| self.violated(violation))?;
        if update.read as usize > self.exported.len() {
            return Err(self.violated(Violation::Read(update.read, self.exported.len() as u32)));
        }
        self.exported.drain(..update.read as usize);
        self.window -= update.freed.min(self.window);
        self.device()?.release(update.freed);
        self.credits.request_credits(false);
        match body {
            Body::Control => self.device()?.post_again(chunk)?,
            Body::Rendezvous(rendezvous) => {
                self.arrived.push_back(Item::Rendezvous(rendezvous));
                self.recycle(chunk)?;
            }
            Body::Bytes if length as usize == HEAD_BYTES => self.recycle(chunk)?,
            Body::Bytes => self.arrived.push_back(Item::Message { chunk, at: HEAD_BYTES as u32, end: length }),
        }
        if update.short { self.grow_window() } else { Ok(()) }
    }

    /// Ends the link because of a violation, which the next receive or send reports.
    fn violated(&mut self, violation: Violation) -> io::Error {
        self.violation = Some(violation);
        broken(violation)
    }

    /// Why the link has ended.
    fn end_error(&self) -> io::Error {
        self.violation.map_or_else(gone, broken)
    }

    /// Doubles the peer's credits, as far as there is memory.
    fn grow_window(&mut self) -> io::Result<()> {
        let wanted = self.window.max(1).min(self.context.options.max_credits.saturating_sub(self.window));
        if wanted == 0 {
            return Ok(()); // a reservation of 0 would reset the mark of starvation
        }
        let more = self.device()?.reserve(wanted)?;
        self.window += more;
        self.credits.give(more);
        Ok(())
    }

    /// Posts a message's memory again, and returns its credit.
    fn recycle(&mut self, chunk: Chunk) -> io::Result<()> {
        self.device()?.post_again(chunk)?;
        self.credits.give(1);
        Ok(())
    }

    /// Posts READs for announced rendezvous, in order, as far as there is memory.
    fn begin_reads(&mut self) -> io::Result<()> {
        if self.reads >= MAX_READS || !self.arrived.iter().any(|item| matches!(item, Item::Rendezvous(_))) {
            return Ok(());
        }
        let device = self.device()?.clone();
        let held = |item: &&Item| matches!(item, Item::Reading { .. } | Item::Read { .. });
        let mut held = self.arrived.iter().filter(held).count();
        for at in 0..self.arrived.len() {
            let Some(Item::Rendezvous(rendezvous)) = self.arrived.get(at) else { continue };
            let rendezvous = *rendezvous;
            if self.reads >= MAX_READS || held >= MAX_READ_PIECES || !self.has_queue_room() {
                break;
            }
            let Some(chunk) = device.landing.take_or_wake(&self.waker)? else { break };
            let name = self.name();
            let remote = (rendezvous.key, rendezvous.address);
            self.wire()?.read(name, remote, chunk.region(), chunk.offset(), rendezvous.length)?;
            self.posted.push_back(Posted { name, memory: Some(chunk), is_read: true });
            self.unsignaled = 0;
            self.reads += 1;
            held += 1;
            self.arrived[at] = Item::Reading { length: rendezvous.length };
        }
        Ok(())
    }

    /// Handles the completion of the oldest READ.
    fn finish_read(&mut self, memory: Option<Chunk>) -> io::Result<()> {
        self.reads -= 1;
        self.credits.finish_read();
        let mut reading = self.arrived.iter_mut().filter(|item| matches!(item, Item::Reading { .. }));
        let (Some(item), Some(chunk)) = (reading.next(), memory) else { return Err(unknown()) };
        if let Item::Reading { length } = *item {
            *item = Item::Read { chunk, at: 0, end: length };
        }
        Ok(())
    }

    /// Copies bytes out of the first item. Returns how many.
    fn copy(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let (chunk, at, end) = match self.arrived.front_mut() {
            Some(Item::Message { chunk, at, end } | Item::Read { chunk, at, end }) => (chunk, at, end),
            _ => return Ok(0),
        };
        let count = into.len().min((*end - *at) as usize);
        chunk.region().memory().read(chunk.offset() + u64::from(*at), &mut into[..count])?;
        *at += count as u32;
        if *at == *end
            && let Some(Item::Message { chunk, .. }) = self.arrived.pop_front()
        {
            self.recycle(chunk)?;
        }
        Ok(count)
    }

    fn has_something(&self) -> bool {
        let is_here = matches!(self.arrived.front(), Some(Item::Message { .. } | Item::Read { .. }));
        let may_go_on = self.blocked && !self.without_memory && !(self.awaits_reads && self.awaits_peer_reads());
        let has_room = may_go_on && self.credits.available() > 0 && self.has_queue_room();
        is_here || has_room || self.ended
    }

    // ---- sending ----

    fn has_queue_room(&self) -> bool {
        self.wire.as_ref().is_some_and(|wire| self.posted.len() < wire.queue_depth() as usize)
    }

    fn name(&mut self) -> u64 {
        self.next_name += 1;
        self.next_name
    }

    /// Sends control messages for what no other message has reported.
    fn send_controls(&mut self) -> io::Result<()> {
        while self.message_bytes > 0
            && self.has_queue_room()
            && let Some(head) = self.credits.control()
        {
            self.post_inline(&head.encode())?;
        }
        Ok(())
    }

    /// Posts a message that the request itself carries.
    fn post_inline(&mut self, message: &[u8]) -> io::Result<()> {
        let (name, signaled) = (self.name(), self.is_signaled(false));
        self.wire()?.send_inline(name, message, signaled)?;
        self.posted.push_back(Posted { name, memory: None, is_read: false });
        Ok(())
    }

    /// Whether the next request is signaled: if memory waits for its completion, and regularly, so that the queue
    /// empties.
    fn is_signaled(&mut self, has_memory: bool) -> bool {
        let depth = self.wire.as_ref().map_or(0, RdmaConnection::queue_depth);
        let signaled = has_memory || self.unsignaled + 1 >= depth / SIGNALED_PER_QUEUE;
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        signaled
    }

    /// Sends one message from the front of the rest. Returns how many of its bytes.
    fn send_message(&mut self, rest: &Rest<'_, '_>) -> io::Result<usize> {
        if self.credits.available() == 0 || !self.has_queue_room() {
            return Ok(0);
        }
        let most = self.message_bytes - HEAD_BYTES;
        let count = rest.small(most, self.context.options.rendezvous_from_bytes);
        let inline = self.wire()?.inline_bytes() as usize;
        if HEAD_BYTES + count <= inline.min(MAX_INLINE_BYTES) {
            let mut message = [0; MAX_INLINE_BYTES];
            rest.copy(&mut message[HEAD_BYTES..HEAD_BYTES + count]);
            message[..HEAD_BYTES].copy_from_slice(&self.credits.spend(Kind::Bytes).encode());
            self.post_inline(&message[..HEAD_BYTES + count])?;
            return Ok(count);
        }
        let Some(chunk) = self.device()?.sends.take_or_wake(&self.waker)? else {
            self.without_memory = true;
            return Ok(0);
        };
        let (memory, mut at) = (chunk.region().memory(), chunk.offset());
        memory.write(at, &self.credits.spend(Kind::Bytes).encode())?;
        at += HEAD_BYTES as u64;
        for piece in rest.pieces(count) {
            memory.write(at, piece)?;
            at += piece.len() as u64;
        }
        let (name, signaled) = (self.name(), self.is_signaled(true));
        self.wire()?.send(name, chunk.region(), chunk.offset(), (HEAD_BYTES + count) as u32, signaled)?;
        self.posted.push_back(Posted { name, memory: Some(chunk), is_read: false });
        Ok(count)
    }

    /// Announces the front of a large piece as a rendezvous. Returns how many bytes; 0 if it must go in messages, or
    /// wait.
    fn send_rendezvous(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.credits.available() == 0
            || !self.has_queue_room()
            || self.credits.pending_rendezvous() >= MAX_RENDEZVOUS
        {
            return Ok(0);
        }
        let Some(chunk) = self.device()?.exported.take_or_wake(&self.waker)? else { return Ok(0) };
        let count = piece.len().min(MAX_RENDEZVOUS_BYTES as usize);
        chunk.region().memory().write(chunk.offset(), &piece[..count])?;
        if !self.may_be_read {
            self.wire()?.allow_reads()?;
            self.may_be_read = true;
        }
        let (key, base) = chunk.region().remote();
        let rendezvous = Rendezvous { key, length: count as u32, address: base.wrapping_add(chunk.offset()) };
        let mut message = [0; HEAD_BYTES + RENDEZVOUS_BYTES];
        message[..HEAD_BYTES].copy_from_slice(&self.credits.spend(Kind::Rendezvous).encode());
        message[HEAD_BYTES..].copy_from_slice(&rendezvous.encode());
        self.exported.push_back(chunk);
        self.post_inline(&message)?;
        Ok(count)
    }

    /// Whether the rest waits for the peer to read earlier rendezvous. Messages would be slower.
    fn awaits_peer_reads(&self) -> bool {
        self.credits.pending_rendezvous() >= MAX_RENDEZVOUS
    }

    fn look(&mut self) {
        self.slept = false;
        let Some(wire) = self.wire.as_mut() else { return };
        match wire.look() {
            Ok(true) => {
                let _ = rustix::io::read(&*self.waker, &mut [0; 8]);
                self.without_memory = false;
            }
            Ok(false) => {}
            Err(error) => {
                tracing::debug!(peer = %wire.peer(), %error, "an RDMA link has ended");
                let _ = self.progress(); // what arrived before the end is still to be received
                self.ended = true;
            }
        }
    }

    /// Like [`RdmaLink::progress`]; a failure ends the link after what has arrived.
    fn progress_or_end(&mut self) {
        if let Err(error) = self.progress() {
            tracing::debug!(%error, "an RDMA link has failed");
            self.ended = true;
        }
    }
}

impl Link for RdmaLink {
    fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.wire {
            Some(wire) => wire.as_fd(),
            None => self.waker.as_fd(),
        }
    }

    fn finish_call(&mut self) -> io::Result<()> {
        loop {
            match self.wire.as_mut().ok_or_else(gone)?.advance()? {
                Step::Pending => return Err(io::ErrorKind::WouldBlock.into()),
                Step::Routed => self.connect()?,
                Step::Up => {
                    let peer = Hello::decode(self.wire()?.answer()).map_err(broken)?;
                    self.set_peer(peer);
                    return Ok(());
                }
            }
        }
    }

    fn send(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        if !self.wire()?.is_up() {
            self.look();
        }
        if self.ended {
            return Err(self.end_error());
        }
        self.progress_or_end();
        if !self.wire()?.is_up() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut rest = Rest::new(bytes);
        let mut sent = 0;
        while let Some(piece) = rest.front() {
            let is_large = piece.len() >= self.context.options.rendezvous_from_bytes;
            let mut count = if is_large { self.send_rendezvous(piece)? } else { 0 };
            if count == 0 && !(is_large && self.awaits_peer_reads()) {
                count = self.send_message(&rest)?;
            }
            if count == 0 {
                break;
            }
            rest.advance(count);
            sent += count;
        }
        self.blocked = rest.front().is_some();
        let large_from = self.context.options.rendezvous_from_bytes;
        self.awaits_reads = rest.front().is_some_and(|piece| piece.len() >= large_from) && self.awaits_peer_reads();
        if sent == 0 && self.blocked { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(sent) }
    }

    fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if self.slept {
            self.look();
        }
        self.progress_or_end();
        if !self.has_something() {
            self.look();
        }
        let mut received = 0;
        for piece in into {
            let mut filled = 0;
            while filled < piece.len() {
                match self.copy(&mut piece[filled..])? {
                    0 => break,
                    count => filled += count,
                }
            }
            received += filled;
            if filled < piece.len() {
                break;
            }
        }
        if received > 0 {
            self.progress_or_end(); // sends credits, and begins READs for which there is memory now
            return Ok(received);
        }
        match self.violation {
            Some(violation) => Err(broken(violation)),
            None if self.ended => Ok(0),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn peer(&self) -> Address {
        let nowhere = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);
        Address::Rdma(self.wire.as_ref().map_or(nowhere, RdmaConnection::peer))
    }

    fn poll_ready(&mut self) -> Option<bool> {
        self.progress_or_end();
        Some(self.has_something())
    }

    fn arm(&mut self) -> bool {
        self.slept = true;
        if self.device.as_ref().is_some_and(|device| device.is_starved())
            && self.credits.out() > self.context.options.initial_credits
        {
            self.credits.request_credits(true);
        }
        match self.wire.as_mut().map(|wire| wire.arm()) {
            Some(Ok(())) => {}
            // The descriptor cannot be slept on: the worker would poll for ever.
            Some(Err(error)) => {
                tracing::debug!(%error, "an RDMA link cannot be armed for a sleep");
                self.ended = true;
            }
            None => self.ended = true,
        }
        self.progress_or_end();
        self.has_something()
    }
}

impl Drop for RdmaLink {
    /// Retires whatever the card may still use; see `device`.
    fn drop(&mut self) {
        let (Some(wire), Some(device)) = (self.wire.take(), self.device.take()) else { return };
        let held = self.arrived.iter().filter(|item| matches!(item, Item::Message { .. })).count() as u32;
        let receives = (self.window + CONTROL_RECEIVES).saturating_sub(held + self.missing);
        self.arrived.clear();
        let memory = self.posted.drain(..).filter_map(|posted| posted.memory).chain(self.exported.drain(..)).collect();
        device.retire(Retired { wire, memory, receives });
    }
}

/// Reserves receives for a new link: the first credits, or fewer where memory is short, and those for control messages.
fn reserve(device: &Device, context: &RdmaContext) -> io::Result<u32> {
    let wanted = context.options.initial_credits + CONTROL_RECEIVES;
    let got = device.reserve(wanted)?;
    if got > CONTROL_RECEIVES {
        return Ok(got - CONTROL_RECEIVES);
    }
    device.release(got);
    let text = "no memory left for receives: raise RdmaOptions::receive_bytes, or use fewer links";
    Err(io::Error::new(io::ErrorKind::OutOfMemory, text))
}

/// The eventfd of a link.
fn waker() -> io::Result<Waker> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

fn check_inline(bytes: u32) -> io::Result<()> {
    if bytes as usize >= START_BYTES {
        return Ok(());
    }
    let text = format!(
        "the RDMA device supports {bytes} inline bytes; control messages and rendezvous need {START_BYTES}: use another device"
    );
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the RDMA connection has ended")
}

fn broken(violation: Violation) -> io::Error {
    let rules = "the peer violates the protocol of RDMA links, or has another version";
    io::Error::new(io::ErrorKind::InvalidData, format!("{rules}: {violation}"))
}

/// A completion without a request: a fault of the device, or of this code.
fn unknown() -> io::Error {
    io::Error::other("the RDMA device completed a request that was not posted")
}

/// READs under way per link: enough that one is under way while another is copied out.
const MAX_READS: u32 = 4;

/// Pieces per link that are read or being read, and not yet received by the owner: 2 MiB. An owner that receives
/// nothing must not take the memory that other links read into.
const MAX_READ_PIECES: usize = 8;

/// Signaled requests per turn of a queue, among messages that need no signal.
const SIGNALED_PER_QUEUE: u32 = 4;

/// Larger messages in the request itself are not worth it on any card.
const MAX_INLINE_BYTES: usize = 1024;
