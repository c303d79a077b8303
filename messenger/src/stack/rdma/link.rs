//! An RDMA connection, as a worker sees it: a stream of bytes, cut into messages and rendezvous.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use remora_rdma::duplex::{Completion, Connection as RdmaConnection, Listener as ConnectionListener, Request, Step};
use rustix::event::{EventfdFlags, eventfd};

use super::credits::{
    self, Arrivals, Body, CONTROL_RECEIVES, Credits, HEAD_BYTES, Hello, Kind, MAX_RENDEZVOUS_BYTES, RENDEZVOUS_BYTES,
    Rendezvous, START_BYTES, Violation,
};
use super::{Chunk, Device, RECEIVE, RdmaContext, Requests, Retired, Waker};
use crate::stack::{Address, Link, Listener};

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
    requests: Requests,
    arrivals: Arrivals,
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
            requests: Requests::default(),
            arrivals: Arrivals::default(),
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
        while let Some(posted) = self.requests.pop_completed(done.name) {
            if posted.is_read {
                self.credits.finish_read();
                let read = posted.memory.is_some_and(|chunk| self.arrivals.finish_read(chunk));
                read.then_some(()).ok_or_else(unknown)?;
            }
        }
        Ok(())
    }

    /// Handles a received message.
    fn receive_message(&mut self, chunk: Chunk, length: u32) -> io::Result<()> {
        let mut start = [0; START_BYTES];
        chunk.region().memory().read(chunk.offset(), &mut start)?;
        let opened = credits::open(&start, length);
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
                self.arrivals.announce(rendezvous);
                self.recycle(chunk)?;
            }
            Body::Bytes if length as usize == HEAD_BYTES => self.recycle(chunk)?,
            Body::Bytes => self.arrivals.push_message(chunk, HEAD_BYTES as u32, length),
        }
        if update.short { self.grow_window() } else { Ok(()) }
    }

    /// Ends the link because of a violation, which the next receive or send reports.
    fn violated(&mut self, violation: Violation) -> io::Error {
        self.violation = Some(violation);
        broken(violation)
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
        while let Some((place, rendezvous)) = self.arrivals.next_announced() {
            if !self.has_queue_room() {
                break;
            }
            let Some(chunk) = self.device()?.landing.take_or_wake(&self.waker)? else { break };
            let name = self.requests.name();
            let remote = (rendezvous.key, rendezvous.address);
            self.wire()?.read(name, remote, chunk.region(), chunk.offset(), rendezvous.length)?;
            self.requests.post_read(name, chunk);
            self.arrivals.begin_read(place);
        }
        Ok(())
    }

    fn has_something(&self) -> bool {
        let may_go_on = self.blocked && !self.without_memory && !(self.awaits_reads && self.credits.awaits_reads());
        let has_room = may_go_on && self.credits.available() > 0 && self.has_queue_room();
        self.arrivals.are_here() || has_room || self.ended
    }

    // ---- sending ----

    fn has_queue_room(&self) -> bool {
        self.wire.as_ref().is_some_and(|wire| self.requests.has_room(wire.queue_depth()))
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
        let (name, signaled) = self.next_send(false);
        self.wire()?.send_inline(name, message, signaled)?;
        self.requests.post_send(name, None);
        Ok(())
    }

    /// The name of the next message, and whether it is signaled.
    fn next_send(&mut self, has_memory: bool) -> (u64, bool) {
        let depth = self.wire.as_ref().map_or(0, RdmaConnection::queue_depth);
        (self.requests.name(), self.requests.is_signaled(has_memory, depth))
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
        let (name, signaled) = self.next_send(true);
        self.wire()?.send(name, chunk.region(), chunk.offset(), (HEAD_BYTES + count) as u32, signaled)?;
        self.requests.post_send(name, Some(chunk));
        Ok(count)
    }

    /// Announces the front of a large piece as a rendezvous. Returns how many bytes; 0 if it must go in messages, or
    /// wait.
    fn send_rendezvous(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.credits.available() == 0 || !self.has_queue_room() || self.credits.awaits_reads() {
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
    // To find out what was sent, it takes what has arrived from the same queue.
    fn sends_now(&self) -> bool {
        false
    }

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
            return Err(self.violation.map_or_else(gone, broken));
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
            if count == 0 && !(is_large && self.credits.awaits_reads()) {
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
        self.awaits_reads = rest.front().is_some_and(|piece| piece.len() >= large_from) && self.credits.awaits_reads();
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
                let (count, received) = self.arrivals.copy(&mut piece[filled..])?;
                if let Some(chunk) = received {
                    self.recycle(chunk)?;
                }
                if count == 0 {
                    break;
                }
                filled += count;
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
        let receives = (self.window + CONTROL_RECEIVES).saturating_sub(self.arrivals.messages() + self.missing);
        self.arrivals.clear();
        let memory = self.requests.take_memory().chain(self.exported.drain(..)).collect();
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

/// Larger messages in the request itself are not worth it on any card.
const MAX_INLINE_BYTES: usize = 1024;

// Slices that are yet to be sent, cut into messages and large pieces. Pure.

/// Slices that are yet to be sent.
pub(super) struct Rest<'a, 'b> {
    slices: &'a [IoSlice<'b>],
    /// Bytes of the first slice that are sent.
    gone: usize,
}

impl<'a, 'b> Rest<'a, 'b> {
    pub(super) fn new(slices: &'a [IoSlice<'b>]) -> Rest<'a, 'b> {
        let mut rest = Rest { slices, gone: 0 };
        rest.advance(0);
        rest
    }

    /// The first piece, if anything is left.
    pub(super) fn front(&self) -> Option<&'a [u8]> {
        self.slices.first().map(|slice| &slice[self.gone..])
    }

    pub(super) fn advance(&mut self, mut count: usize) {
        while let Some(slice) = self.slices.first() {
            let left = slice.len() - self.gone;
            if count < left {
                self.gone += count;
                return;
            }
            count -= left;
            self.gone = 0;
            self.slices = &self.slices[1..];
        }
    }

    /// Number of bytes, at most `most`, before the next large piece. At least one, and so part of a large piece if it
    /// is the first.
    pub(super) fn small(&self, most: usize, large_from: usize) -> usize {
        let mut count = 0;
        for (at, piece) in self.all().enumerate() {
            if at > 0 && piece.len() >= large_from {
                break;
            }
            count += piece.len();
            if count >= most {
                return most;
            }
        }
        count
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &'a [u8]> {
        let gone = self.gone;
        self.slices.iter().enumerate().map(move |(at, slice)| &slice[if at == 0 { gone } else { 0 }..])
    }

    /// The first `count` bytes, in pieces.
    pub(super) fn pieces(&self, count: usize) -> impl Iterator<Item = &'a [u8]> {
        let mut left = count;
        self.all().map_while(move |piece| {
            let piece = &piece[..piece.len().min(left)];
            left -= piece.len();
            (!piece.is_empty() || left > 0).then_some(piece)
        })
    }

    /// Copies as many bytes from the front as `into` has.
    pub(super) fn copy(&self, into: &mut [u8]) {
        let mut at = 0;
        for piece in self.pieces(into.len()) {
            into[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
    }
}

// Accepts RDMA links.

/// A listener of the connection manager.
pub struct RdmaListener {
    door: ConnectionListener,
    context: Arc<RdmaContext>,
}

impl RdmaListener {
    pub(in crate::stack) fn bind(context: &Arc<RdmaContext>, address: SocketAddr) -> io::Result<RdmaListener> {
        Ok(RdmaListener { door: ConnectionListener::listen(&context.stations, address)?, context: context.clone() })
    }
}

impl Listener for RdmaListener {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.door.as_fd()
    }

    fn accept(&mut self) -> io::Result<Box<dyn Link>> {
        while let Some(request) = self.door.next_call()? {
            match Hello::decode(request.hello()) {
                Ok(hello) => return take(&self.context, request, hello),
                Err(violation) => {
                    tracing::debug!(%violation, "an RDMA connection of another protocol");
                    request.refuse(b"");
                }
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn address(&self) -> Address {
        Address::Rdma(self.door.address())
    }
}

fn take(context: &Arc<RdmaContext>, request: Request, hello: Hello) -> io::Result<Box<dyn Link>> {
    Ok(Box::new(RdmaLink::accept(context, request, hello)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_rest_is_cut_without_losing_a_byte(
            slices in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..8),
            most in 1usize..50,
            large_from in 1usize..50,
        ) {
            let whole: Vec<u8> = slices.concat();
            let slices: Vec<IoSlice<'_>> = slices.iter().map(|slice| IoSlice::new(slice)).collect();
            let (mut rest, mut cut) = (Rest::new(&slices), Vec::new());
            while let Some(front) = rest.front() {
                prop_assert!(!front.is_empty());
                let count = rest.small(most, large_from);
                prop_assert!((1..=most).contains(&count));
                let mut message = vec![0; count];
                rest.copy(&mut message);
                cut.extend(message);
                rest.advance(count);
            }
            prop_assert_eq!(cut, whole);
        }
    }
}
