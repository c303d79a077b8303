//! One RDMA connection, as a worker sees it: a stream of bytes, cut into letters and offers.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use remora_rdma::duplex::{Completion as Done, Connection as Wire, Request, Step};
use rustix::event::{EventfdFlags, eventfd};

use super::flow::{Flow, OFFERS_AT_ONCE, WORD_ROOM};
use super::letter::{self, BULK_BYTES, Body, HEAD_BYTES, Hello, Kind, OFFER_BYTES, Offer, START_BYTES, Wrong};
use super::site::{Bell, Chunk, Grave, RECEIVE, Site, Sites};
use crate::stack::{Address, Link};

/// One connection by RDMA.
pub struct RdmaLink {
    /// Gone only while the link is dropped.
    wire: Option<Wire>,
    sites: Arc<Sites>,
    /// The device, once the call is routed.
    site: Option<Arc<Site>>,
    flow: Flow,
    /// What a letter to the peer may hold, head included.
    letter_bytes: usize,
    /// Rung when a pool has something again.
    bell: Bell,
    /// Requests on the queue, the oldest first: a card completes them in this order.
    posted: VecDeque<Posted>,
    next_name: u64,
    /// Requests posted since the last one that completes visibly.
    unshown: u32,
    /// What has come and was not yet received, in the stream's order.
    arrived: VecDeque<Item>,
    reads: u32,
    /// What the peer has not read yet, the oldest first.
    lent: VecDeque<Chunk>,
    may_be_read: bool,
    /// Receives that stand for this link's letters: posted, or holding what has arrived.
    window: u32,
    /// Of these and of the room for words, what was taken out of the queue and let go, as the link failed on it.
    missing: u32,
    /// We have slept since the descriptor was last looked at.
    slept: bool,
    /// Not everything could be sent.
    blocked: bool,
    /// ... a large one, which goes when the peer has read one of those before it.
    awaits_reads: bool,
    /// ... because a pool had nothing: the bell will ring.
    without_memory: bool,
    ended: bool,
    /// ... by the peer's fault.
    wrong: Option<Wrong>,
    done: Vec<Done>,
}

/// A request on the queue.
struct Posted {
    name: u64,
    /// The memory that it names.
    memory: Option<Chunk>,
    is_read: bool,
}

/// A piece of the stream.
enum Item {
    /// From `at` to `end` of a letter.
    Letter { chunk: Chunk, at: u32, end: u32 },
    /// Offered, and not yet asked for.
    Offered(Offer),
    /// A READ is on its way.
    Reading { length: u32 },
    /// From `at` to `end` of what was read.
    Read { chunk: Chunk, at: u32, end: u32 },
}

impl RdmaLink {
    /// Begins to call.
    pub(in crate::stack) fn call(sites: &Arc<Sites>, peer: SocketAddr) -> io::Result<RdmaLink> {
        let bell = bell()?;
        let wire = Wire::call(&sites.stations, sites.options.local, peer)?;
        wire.watch_also(bell.as_fd())?;
        Ok(RdmaLink::new(sites, wire, bell))
    }

    /// Takes a call, with receives posted before the caller can send.
    pub(super) fn accept(sites: &Arc<Sites>, request: Request, hello: Hello) -> io::Result<RdmaLink> {
        let bell = bell()?;
        let site = sites.of(request.station());
        let window = reserve(&site, sites)?;
        let ours = Hello { letter_bytes: sites.options.letter_bytes, credits: window };
        let wire = request.accept(&ours.encode()).inspect_err(|_| site.release(window + WORD_ROOM))?;
        let mut link = RdmaLink::new(sites, wire, bell);
        // From here on the caller may send: should the link be of no use, it goes as every other does.
        (link.site, link.window) = (Some(site), window);
        link.meet(hello);
        check_inline(link.wire()?.inline_bytes())?;
        link.wire()?.watch_also(link.bell.as_fd())?;
        Ok(link)
    }

    fn new(sites: &Arc<Sites>, wire: Wire, bell: Bell) -> RdmaLink {
        RdmaLink {
            wire: Some(wire),
            sites: sites.clone(),
            site: None,
            flow: Flow::new(0, 0),
            letter_bytes: 0,
            bell,
            posted: VecDeque::new(),
            next_name: 0,
            unshown: 0,
            arrived: VecDeque::new(),
            reads: 0,
            lent: VecDeque::new(),
            may_be_read: false,
            window: 0,
            missing: 0,
            slept: true,
            blocked: false,
            awaits_reads: false,
            without_memory: false,
            ended: false,
            wrong: None,
            done: Vec::new(),
        }
    }

    /// What the peer has said of itself.
    fn meet(&mut self, peer: Hello) {
        self.letter_bytes = peer.letter_bytes.min(self.sites.options.letter_bytes) as usize;
        self.flow = Flow::new(peer.credits, self.window);
    }

    /// Calls on, now that the device is known.
    fn connect(&mut self) -> io::Result<()> {
        let wire = self.wire.as_mut().ok_or_else(gone)?;
        let site = self.sites.of(&wire.station()?);
        self.window = reserve(&site, &self.sites)?;
        self.site = Some(site);
        let hello = Hello { letter_bytes: self.sites.options.letter_bytes, credits: self.window };
        wire.connect(&hello.encode())?;
        check_inline(wire.inline_bytes())
    }

    fn wire(&self) -> io::Result<&Wire> {
        self.wire.as_ref().ok_or_else(gone)
    }

    fn site(&self) -> io::Result<&Arc<Site>> {
        self.site.as_ref().ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    // ---- what has come ----

    /// Takes what the card has done, and does what follows from it.
    fn progress(&mut self) -> io::Result<()> {
        if self.ended || self.site.is_none() {
            return Ok(());
        }
        let mut done = std::mem::take(&mut self.done);
        let outcome = self.settle_all(&mut done);
        self.done = done;
        outcome?;
        self.begin_reads()?;
        self.say_words()
    }

    fn settle_all(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        loop {
            done.clear();
            let wire = self.wire.as_mut().ok_or_else(gone)?;
            if wire.poll(done)? == 0 {
                return Ok(());
            }
            let mut outcome = Ok(());
            for done in done.iter() {
                // Behind the first failure there is nothing to hear, but memory to be counted back.
                outcome = match outcome {
                    Ok(()) => self.settle(done),
                    failed => failed.inspect_err(|_| self.count_back(done)),
                };
            }
            outcome?;
        }
    }

    fn count_back(&mut self, done: &Done) {
        let chunk = self.site.as_ref().filter(|_| done.name & RECEIVE != 0).and_then(|site| site.received(done));
        self.missing += u32::from(chunk.is_some());
    }

    fn settle(&mut self, done: &Done) -> io::Result<()> {
        if done.name & RECEIVE != 0 {
            let chunk = self.site()?.received(done).ok_or_else(unknown)?;
            let heard = if done.well { self.hear(chunk, done.length) } else { Err(gone()) };
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
                self.has_read(posted.memory)?;
            }
        }
        Ok(())
    }

    /// A letter.
    fn hear(&mut self, chunk: Chunk, length: u32) -> io::Result<()> {
        let mut start = [0; START_BYTES];
        chunk.region().memory().read(chunk.offset(), &mut start)?;
        let opened = letter::open(&start, length);
        let heard = opened.and_then(|(head, body)| Ok((self.flow.hear(&head)?, body)));
        let (news, body) = heard.map_err(|wrong| self.blame(wrong))?;
        if news.read as usize > self.lent.len() {
            return Err(self.blame(Wrong::Read(news.read, self.lent.len() as u32)));
        }
        self.lent.drain(..news.read as usize);
        self.window -= news.freed.min(self.window);
        self.site()?.release(news.freed);
        self.flow.ease(false);
        match body {
            Body::Word => self.site()?.post_again(chunk)?,
            Body::Offer(offer) => {
                self.arrived.push_back(Item::Offered(offer));
                self.is_read(chunk)?;
            }
            Body::Bytes if length as usize == HEAD_BYTES => self.is_read(chunk)?,
            Body::Bytes => self.arrived.push_back(Item::Letter { chunk, at: HEAD_BYTES as u32, end: length }),
        }
        if news.short { self.widen() } else { Ok(()) }
    }

    /// The link ends by this, which is said to whoever receives or sends next.
    fn blame(&mut self, wrong: Wrong) -> io::Error {
        self.wrong = Some(wrong);
        broken(wrong)
    }

    /// Why nothing goes any more.
    fn over(&self) -> io::Error {
        self.wrong.map_or_else(gone, broken)
    }

    /// The peer could use more: it gets twice as much, as far as there is memory.
    fn widen(&mut self) -> io::Result<()> {
        let wanted = self.window.max(1).min(self.sites.options.most_credits.saturating_sub(self.window));
        if wanted == 0 {
            return Ok(()); // to ask for nothing would say that nobody here lacks anything
        }
        let more = self.site()?.reserve(wanted)?;
        self.window += more;
        self.flow.give(more);
        Ok(())
    }

    /// A letter's memory is free again, and its credit with it.
    fn is_read(&mut self, chunk: Chunk) -> io::Result<()> {
        self.site()?.post_again(chunk)?;
        self.flow.give(1);
        Ok(())
    }

    /// Asks for what was offered, in order, as far as there is memory for it.
    fn begin_reads(&mut self) -> io::Result<()> {
        if self.reads >= READS_AT_ONCE || !self.arrived.iter().any(|item| matches!(item, Item::Offered(_))) {
            return Ok(());
        }
        let site = self.site()?.clone();
        let held = |item: &&Item| matches!(item, Item::Reading { .. } | Item::Read { .. });
        let mut held = self.arrived.iter().filter(held).count();
        for at in 0..self.arrived.len() {
            let Some(Item::Offered(offer)) = self.arrived.get(at) else { continue };
            let offer = *offer;
            if self.reads >= READS_AT_ONCE || held >= READS_HELD || !self.has_place() {
                break;
            }
            let Some(chunk) = site.landing.take_or_ring(&self.bell)? else { break };
            let name = self.name();
            let remote = (offer.key, offer.address);
            self.wire()?.read(name, remote, chunk.region(), chunk.offset(), offer.length)?;
            self.posted.push_back(Posted { name, memory: Some(chunk), is_read: true });
            self.unshown = 0;
            self.reads += 1;
            held += 1;
            self.arrived[at] = Item::Reading { length: offer.length };
        }
        Ok(())
    }

    /// The oldest READ is done.
    fn has_read(&mut self, memory: Option<Chunk>) -> io::Result<()> {
        self.reads -= 1;
        self.flow.has_read();
        let mut reading = self.arrived.iter_mut().filter(|item| matches!(item, Item::Reading { .. }));
        let (Some(item), Some(chunk)) = (reading.next(), memory) else { return Err(unknown()) };
        if let Item::Reading { length } = *item {
            *item = Item::Read { chunk, at: 0, end: length };
        }
        Ok(())
    }

    /// Copies out of the first piece; how much, and whether the piece is used up.
    fn copy(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let (chunk, at, end) = match self.arrived.front_mut() {
            Some(Item::Letter { chunk, at, end } | Item::Read { chunk, at, end }) => (chunk, at, end),
            _ => return Ok(0),
        };
        let count = into.len().min((*end - *at) as usize);
        chunk.region().memory().read(chunk.offset() + u64::from(*at), &mut into[..count])?;
        *at += count as u32;
        if *at == *end
            && let Some(Item::Letter { chunk, .. }) = self.arrived.pop_front()
        {
            self.is_read(chunk)?;
        }
        Ok(count)
    }

    fn has_something(&self) -> bool {
        let is_here = matches!(self.arrived.front(), Some(Item::Letter { .. } | Item::Read { .. }));
        let may_go_on = self.blocked && !self.without_memory && !(self.awaits_reads && self.waits_for_reads());
        let has_room = may_go_on && self.flow.available() > 0 && self.has_place();
        is_here || has_room || self.ended
    }

    // ---- what goes ----

    fn has_place(&self) -> bool {
        self.wire.as_ref().is_some_and(|wire| self.posted.len() < wire.queue_depth() as usize)
    }

    fn name(&mut self) -> u64 {
        self.next_name += 1;
        self.next_name
    }

    /// Says by words what no letter has said.
    fn say_words(&mut self) -> io::Result<()> {
        while self.letter_bytes > 0
            && self.has_place()
            && let Some(head) = self.flow.word()
        {
            self.post_short(&head.encode())?;
        }
        Ok(())
    }

    /// Posts a letter that the request carries itself.
    fn post_short(&mut self, letter: &[u8]) -> io::Result<()> {
        let (name, shown) = (self.name(), self.is_shown(false));
        self.wire()?.send_inline(name, letter, shown)?;
        self.posted.push_back(Posted { name, memory: None, is_read: false });
        Ok(())
    }

    /// Whether the next request completes visibly: if memory waits for it, and now and then, so that the queue empties.
    fn is_shown(&mut self, has_memory: bool) -> bool {
        let depth = self.wire.as_ref().map_or(0, Wire::queue_depth);
        let shown = has_memory || self.unshown + 1 >= depth / SHOWN_PER_QUEUE;
        self.unshown = if shown { 0 } else { self.unshown + 1 };
        shown
    }

    /// Sends one letter with the beginning of what is left; how much of it went.
    fn send_letter(&mut self, rest: &Rest<'_, '_>) -> io::Result<usize> {
        if self.flow.available() == 0 || !self.has_place() {
            return Ok(0);
        }
        let most = self.letter_bytes - HEAD_BYTES;
        let count = rest.small(most, self.sites.options.rendezvous_from_bytes);
        let inline = self.wire()?.inline_bytes() as usize;
        if HEAD_BYTES + count <= inline.min(INLINE_AT_MOST) {
            let mut letter = [0; INLINE_AT_MOST];
            rest.copy(&mut letter[HEAD_BYTES..HEAD_BYTES + count]);
            letter[..HEAD_BYTES].copy_from_slice(&self.flow.spend(Kind::Bytes).encode());
            self.post_short(&letter[..HEAD_BYTES + count])?;
            return Ok(count);
        }
        let Some(chunk) = self.site()?.sends.take_or_ring(&self.bell)? else {
            self.without_memory = true;
            return Ok(0);
        };
        let (memory, mut at) = (chunk.region().memory(), chunk.offset());
        memory.write(at, &self.flow.spend(Kind::Bytes).encode())?;
        at += HEAD_BYTES as u64;
        for piece in rest.pieces(count) {
            memory.write(at, piece)?;
            at += piece.len() as u64;
        }
        let (name, shown) = (self.name(), self.is_shown(true));
        self.wire()?.send(name, chunk.region(), chunk.offset(), (HEAD_BYTES + count) as u32, shown)?;
        self.posted.push_back(Posted { name, memory: Some(chunk), is_read: false });
        Ok(count)
    }

    /// Offers the beginning of a large piece; how much of it. None, if it had better go in letters, or wait.
    fn offer(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.flow.available() == 0 || !self.has_place() || self.flow.offers() >= OFFERS_AT_ONCE {
            return Ok(0);
        }
        let Some(chunk) = self.site()?.lent.take_or_ring(&self.bell)? else { return Ok(0) };
        let count = piece.len().min(BULK_BYTES as usize);
        chunk.region().memory().write(chunk.offset(), &piece[..count])?;
        if !self.may_be_read {
            self.wire()?.allow_reads()?;
            self.may_be_read = true;
        }
        let (key, base) = chunk.region().remote();
        let offer = Offer { key, length: count as u32, address: base.wrapping_add(chunk.offset()) };
        let mut letter = [0; HEAD_BYTES + OFFER_BYTES];
        letter[..HEAD_BYTES].copy_from_slice(&self.flow.spend(Kind::Offer).encode());
        letter[HEAD_BYTES..].copy_from_slice(&offer.encode());
        self.lent.push_back(chunk);
        self.post_short(&letter)?;
        Ok(count)
    }

    /// Whether the rest waits for offers that are being read: then letters would only be slower.
    fn waits_for_reads(&self) -> bool {
        self.flow.offers() >= OFFERS_AT_ONCE
    }

    fn look(&mut self) {
        self.slept = false;
        let Some(wire) = self.wire.as_mut() else { return };
        match wire.look() {
            Ok(true) => {
                let _ = rustix::io::read(&*self.bell, &mut [0; 8]);
                self.without_memory = false;
            }
            Ok(false) => {}
            Err(error) => {
                tracing::debug!(peer = %wire.peer(), %error, "an RDMA link is over");
                let _ = self.progress(); // what came before the end is still to be received
                self.ended = true;
            }
        }
    }

    /// As [`RdmaLink::progress`]; a failure is the end, behind what has come.
    fn progress_or_end(&mut self) {
        if let Err(error) = self.progress() {
            tracing::debug!(%error, "an RDMA link fails");
            self.ended = true;
        }
    }
}

impl Link for RdmaLink {
    fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.wire {
            Some(wire) => wire.as_fd(),
            None => self.bell.as_fd(),
        }
    }

    fn finish_call(&mut self) -> io::Result<()> {
        loop {
            match self.wire.as_mut().ok_or_else(gone)?.advance()? {
                Step::Pending => return Err(io::ErrorKind::WouldBlock.into()),
                Step::Routed => self.connect()?,
                Step::Up => {
                    let peer = Hello::decode(self.wire()?.answer()).map_err(broken)?;
                    self.meet(peer);
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
            return Err(self.over());
        }
        self.progress_or_end();
        if !self.wire()?.is_up() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut rest = Rest::new(bytes);
        let mut sent = 0;
        while let Some(piece) = rest.front() {
            let is_large = piece.len() >= self.sites.options.rendezvous_from_bytes;
            let mut count = if is_large { self.offer(piece)? } else { 0 };
            if count == 0 && !(is_large && self.waits_for_reads()) {
                count = self.send_letter(&rest)?;
            }
            if count == 0 {
                break;
            }
            rest.advance(count);
            sent += count;
        }
        self.blocked = rest.front().is_some();
        let large_from = self.sites.options.rendezvous_from_bytes;
        self.awaits_reads = rest.front().is_some_and(|piece| piece.len() >= large_from) && self.waits_for_reads();
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
            self.progress_or_end(); // credits, and what may be read now that there is memory
            return Ok(received);
        }
        match self.wrong {
            Some(wrong) => Err(broken(wrong)),
            None if self.ended => Ok(0),
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn peer(&self) -> Address {
        let nowhere = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);
        Address::Rdma(self.wire.as_ref().map_or(nowhere, Wire::peer))
    }

    fn glance(&mut self) -> Option<bool> {
        self.progress_or_end();
        Some(self.has_something())
    }

    fn arm(&mut self) -> bool {
        self.slept = true;
        if self.site.as_ref().is_some_and(|site| site.is_hungry()) && self.flow.out() > self.sites.options.first_credits
        {
            self.flow.ease(true);
        }
        match self.wire.as_mut().map(|wire| wire.arm()) {
            Some(Ok(())) => {}
            // Not to be slept on: the worker would ask for ever.
            Some(Err(error)) => {
                tracing::debug!(%error, "an RDMA link can't be slept on");
                self.ended = true;
            }
            None => self.ended = true,
        }
        self.progress_or_end();
        self.has_something()
    }
}

impl Drop for RdmaLink {
    /// Whatever the card may still touch goes to the grave; see `site`.
    fn drop(&mut self) {
        let (Some(wire), Some(site)) = (self.wire.take(), self.site.take()) else { return };
        let held = self.arrived.iter().filter(|item| matches!(item, Item::Letter { .. })).count() as u32;
        let receives = (self.window + WORD_ROOM).saturating_sub(held + self.missing);
        self.arrived.clear();
        let memory = self.posted.drain(..).filter_map(|posted| posted.memory).chain(self.lent.drain(..)).collect();
        site.bury(Grave { wire, memory, receives });
    }
}

/// Receives for a new link: the first credits, or fewer where memory is short, and room for words.
fn reserve(site: &Site, sites: &Sites) -> io::Result<u32> {
    let wanted = sites.options.first_credits + WORD_ROOM;
    let got = site.reserve(wanted)?;
    if got > WORD_ROOM {
        return Ok(got - WORD_ROOM);
    }
    site.release(got);
    let text = "no memory is left to receive into: raise RdmaOptions::receive_bytes, or hold fewer links";
    Err(io::Error::new(io::ErrorKind::OutOfMemory, text))
}

/// Words and offers go in the request itself.
fn bell() -> io::Result<Bell> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

fn check_inline(bytes: u32) -> io::Result<()> {
    if bytes as usize >= START_BYTES {
        return Ok(());
    }
    let text = format!(
        "the RDMA device carries {bytes} bytes in a request itself, where words and offers take {START_BYTES}: use another device"
    );
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

/// What is left of slices to be sent.
struct Rest<'a, 'b> {
    slices: &'a [IoSlice<'b>],
    /// Of the first of them, what is gone.
    gone: usize,
}

impl<'a, 'b> Rest<'a, 'b> {
    fn new(slices: &'a [IoSlice<'b>]) -> Rest<'a, 'b> {
        let mut rest = Rest { slices, gone: 0 };
        rest.advance(0);
        rest
    }

    /// The first piece, if anything is left.
    fn front(&self) -> Option<&'a [u8]> {
        self.slices.first().map(|slice| &slice[self.gone..])
    }

    fn advance(&mut self, mut count: usize) {
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

    /// How many bytes, at most `most`, come before the next large piece; at least one, and so of a large one if it is the first.
    fn small(&self, most: usize, large_from: usize) -> usize {
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

    fn all(&self) -> impl Iterator<Item = &'a [u8]> {
        let gone = self.gone;
        self.slices.iter().enumerate().map(move |(at, slice)| &slice[if at == 0 { gone } else { 0 }..])
    }

    /// The first `count` bytes, in pieces.
    fn pieces(&self, count: usize) -> impl Iterator<Item = &'a [u8]> {
        let mut left = count;
        self.all().map_while(move |piece| {
            let piece = &piece[..piece.len().min(left)];
            left -= piece.len();
            (!piece.is_empty() || left > 0).then_some(piece)
        })
    }

    /// The first bytes, as many as `into` has.
    fn copy(&self, into: &mut [u8]) {
        let mut at = 0;
        for piece in self.pieces(into.len()) {
            into[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the RDMA connection is over")
}

fn broken(wrong: Wrong) -> io::Error {
    let rules = "the peer does not keep to the rules of RDMA links, or is of another version";
    io::Error::new(io::ErrorKind::InvalidData, format!("{rules}: {wrong}"))
}

/// The device's fault, or ours.
fn unknown() -> io::Error {
    io::Error::other("the RDMA device tells of a request that nobody has made")
}

/// READs of one link at once: enough that one is under way while another is copied out.
const READS_AT_ONCE: u32 = 4;

/// Pieces that one link may hold, read or being read, and not yet received by its owner: 2 MiB. An owner that receives nothing must not take
/// the memory that other links read into.
const READS_HELD: usize = 8;

/// Visible completions per turn of a queue of letters that need none.
const SHOWN_PER_QUEUE: u32 = 4;

/// No card carries more in a request that is worth it.
const INLINE_AT_MOST: usize = 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_left_is_cut_without_losing_a_byte(
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
                let mut letter = vec![0; count];
                rest.copy(&mut letter);
                cut.extend(letter);
                rest.advance(count);
            }
            prop_assert_eq!(cut, whole);
        }
    }
}
