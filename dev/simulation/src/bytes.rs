//! Bytes: the real delivery, which reads real tables over a simulated network and speaks with the model server in
//! bytes.
//!
//! ```text
//!   Tables ══ torn, late and lost reads ══▶ Stepped (the real delivery) ◀── a socket of loopback ──▶ Line ◀── messages ──▶ World
//! ```
//!
//! A [`Line`] turns what a model server sends into the bytes of a real server, and back. Its socket's buffers stand for
//! the network between them, and it reads no slot for which the server has no room.
//!
//! A [`Relay`] is an agent's part in passing slots on: which lender it reads from, and what it lends itself. It follows
//! `reader/src/relay/`; the copy and its reader are the product's own.

use std::collections::BTreeMap;
use std::io;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use remora_delivery::simulated::{Copied, CopyWish, PeerLost, Stepped, Whence};
use remora_fabric::Memory;
use remora_process::exit::Failure;
use remora_protocol::{Join, LossCause, Message as Said, Offer, Relaying, Relays, Resume, Upstream};
use remora_reader::relay::Assignment;
use remora_redis::ReplId;
use remora_replica::machine::{DeliveryEvent, Reading};
use remora_replica::parts::driver;

use super::delivery::{AnyFeed, Deliver};
use super::memory::{Lent, SLOT_BYTES, slot_of};
use super::plan::RelayPlan;
use super::server::WINDOW;
use super::wire::{Conn, End, Host, Message};
use super::world::World;

/// Turns of the loop at one moment. A read of the simulated network takes up to twenty.
const TURNS: usize = 200;

/// Bytes of the mark that ends a payload.
const MARK: usize = 40;

/// See the module's text.
pub(super) struct ByteDelivery {
    agent: End,
    secret: String,
    spool: Option<PathBuf>,
    stepped: Option<Stepped>,
    lines: BTreeMap<Conn, Line>,
    /// Where it reads, for a fault that cuts it off.
    lane: Option<(usize, u64)>,
    relay: Option<Relay>,
    /// What the source is to be told.
    words: Vec<Said>,
    failure: Option<DeliveryEvent>,
}

impl ByteDelivery {
    pub(super) fn new(agent: End, spool: Option<PathBuf>, relay: Option<RelayPlan>) -> ByteDelivery {
        ByteDelivery {
            agent,
            secret: String::new(),
            spool,
            stepped: None,
            lines: BTreeMap::new(),
            lane: None,
            relay: relay.map(|plan| Relay::new(agent, plan)),
            words: Vec::new(),
            failure: None,
        }
    }

    fn read_from(&self, whence: Option<Whence>) {
        if let (Some(stepped), Some(whence)) = (&self.stepped, whence) {
            stepped.read_from(whence);
        }
    }

    /// Looks at the lender: it may have a copy to read, or be gone.
    fn relay_turn(&mut self, world: &mut World) {
        let Some(relay) = &mut self.relay else { return };
        let news = relay.look(world);
        self.words.extend(news.word);
        self.read_from(news.whence);
    }

    /// Turns the loop until nothing moves any more. Returns whether it stopped before that.
    fn turn(&mut self, world: &mut World) -> bool {
        for number in 0..TURNS {
            let Some(stepped) = &mut self.stepped else { return false };
            // Only what this agent was told can have written to the sockets.
            let moved = match stepped.turn(world.instant(), number == 0) {
                Ok(moved) => moved,
                Err(text) => {
                    self.failure = Some(DeliveryEvent::Fatal { failure: Failure::local(text) });
                    self.end(world);
                    return false;
                }
            };
            let is_reading = stepped.is_reading();
            if !self.hear(world) && !moved && !is_reading {
                return false;
            }
        }
        true
    }

    /// Takes what the delivery has written, as far as the servers have room. Returns whether there was anything.
    fn hear(&mut self, world: &mut World) -> bool {
        let mut heard = false;
        let agent = self.agent;
        self.lines.retain(|&conn, line| {
            let (messages, is_open) = line.read();
            heard |= !messages.is_empty() || !is_open;
            messages.into_iter().for_each(|message| world.send(conn, agent, message));
            if !is_open {
                world.log(|| format!("{conn:?} is closed: {}", line.why));
                world.close(conn, agent);
            }
            is_open
        });
        heard
    }

    /// The delivery's process or thread is gone.
    fn end(&mut self, world: &mut World) {
        self.stepped.iter_mut().for_each(Stepped::end);
        self.lane = None;
        self.relay.iter_mut().for_each(|relay| relay.close(world));
        self.lines.clear();
        world.end_all(self.agent);
    }
}

impl Deliver for ByteDelivery {
    fn start(&mut self, world: &mut World, secret: String) -> io::Result<()> {
        self.stepped = Some(Stepped::start(world.instant(), &secret, self.spool.clone())?);
        self.secret = secret;
        self.relay.iter().for_each(|relay| relay.open(world));
        Ok(())
    }

    fn is_running(&self) -> bool {
        self.stepped.as_ref().is_some_and(Stepped::is_running)
    }

    fn is_awake(&self) -> bool {
        self.is_running()
    }

    fn reading(&self) -> Reading {
        self.stepped.as_ref().map_or_else(Reading::default, driver::reading)
    }

    fn resume(&self) -> Option<Resume> {
        self.stepped.as_ref()?.resume()
    }

    fn slots_below(&self) -> u64 {
        let Some(stepped) = &self.stepped else { return 0 };
        let (used, held) = (stepped.slots_below(), stepped.slots_held());
        self.relay.as_ref().map_or(used, |relay| relay.slots_below(used, held))
    }

    fn slots_held(&self) -> u64 {
        self.stepped.as_ref().map_or(0, Stepped::slots_held)
    }

    fn bytes(&self) -> u64 {
        self.stepped.as_ref().map_or(0, Stepped::bytes)
    }

    fn acknowledged(&self) -> u64 {
        self.stepped.as_ref().map_or(0, Stepped::acknowledged)
    }

    fn within_limits(&self) -> Result<(), String> {
        let Some(stepped) = &self.stepped else { return Ok(()) };
        self.relay.as_ref().map_or(Ok(()), |relay| relay.within_limits(&stepped.relaying()))
    }

    fn given(&self) -> (u64, bool) {
        self.stepped.as_ref().map_or((0, false), Stepped::given)
    }

    fn take_events(&mut self) -> Vec<DeliveryEvent> {
        let notices = self.stepped.as_mut().map(Stepped::notices).unwrap_or_default();
        let events: Vec<_> = notices.into_iter().filter_map(driver::event).collect();
        if let (Some(relay), Some(stepped)) = (&mut self.relay, &mut self.stepped) {
            self.words.extend(stepped.losses().into_iter().filter_map(|lost| relay.lost(lost)));
            if events.iter().any(|event| matches!(event, DeliveryEvent::Fetched)) {
                relay.leave_upstream();
            }
        }
        events.into_iter().chain(self.failure.take()).collect()
    }

    // ---- orders ----

    fn stop(&mut self, world: &mut World) {
        self.end(world);
    }

    /// A payload that refers to shared memory is not modelled: it goes by the link.
    fn use_module(&mut self, _used: bool) {}

    fn hold(&mut self, world: &mut World) {
        self.stepped.iter().for_each(Stepped::hold);
        self.turn(world);
    }

    fn give_up(&mut self, world: &mut World) {
        self.stepped.iter().for_each(Stepped::give_up);
        self.turn(world);
    }

    fn load_again(&mut self, world: &mut World) {
        self.stepped.iter().for_each(Stepped::load_again);
        self.turn(world);
    }

    fn connect(&mut self, world: &mut World, source: usize, offer: &Offer) -> Option<AnyFeed> {
        let loaded = self.reading().loaded;
        let kept = self.stepped.as_ref().and_then(|stepped| stepped.kept_copy(offer.generation));
        let copy = self.relay.as_ref().map(|relay| relay.wish(kept));
        let connected = world.memories.real.as_mut()?.connect(source, offer, loaded, copy);
        match connected {
            Ok((feed, session)) => {
                let (feed, offer) = (Box::new(feed), Box::new(offer.clone()));
                Some(AnyFeed::Bytes { feed, offer, source, session })
            }
            Err(text) => {
                world.log(|| format!("the tables cannot be connected: {text}"));
                None
            }
        }
    }

    fn attach(&mut self, world: &mut World, feed: AnyFeed) {
        let AnyFeed::Bytes { mut feed, offer, source, session } = feed else { return };
        let Some(stepped) = &self.stepped else { return };
        self.lane = Some((source, session));
        let (loaded, copied) = (stepped.position().loaded, feed.copy.take());
        stepped.attach(*feed);
        let relay = self.relay.as_mut();
        let whence = relay.and_then(|relay| relay.attached(world, &offer, copied, loaded));
        self.read_from(whence);
        self.turn(world);
    }

    fn introduced(&mut self, _world: &mut World, _number: u64, _refers: bool) {}

    // ---- what happens to it ----

    fn receive(&mut self, world: &mut World, conn: Conn, message: Message) {
        match message {
            Message::Psync { history, login, .. } => {
                if login != self.secret {
                    world.count("a stranger at the link");
                }
                let Some(stepped) = self.stepped.as_ref().filter(|stepped| stepped.is_running()) else {
                    return world.close(conn, self.agent);
                };
                match Line::open(stepped, &login, history) {
                    Ok(line) => drop(self.lines.insert(conn, line)),
                    Err(_) => return world.close(conn, self.agent),
                }
            }
            Message::Ack { offset } => self.lines.get_mut(&conn).into_iter().for_each(|line| line.ack(offset)),
            Message::Room => self.lines.get_mut(&conn).into_iter().for_each(|line| line.room += 1),
            _ => {}
        }
        self.turn(world);
    }

    fn closed(&mut self, world: &mut World, conn: Conn) {
        world.log(|| format!("{conn:?} is closed by the server"));
        self.lines.remove(&conn);
        self.turn(world);
    }

    fn lose_feed(&mut self, world: &mut World) {
        if let (Some((source, session)), Some(real)) = (self.lane.take(), &mut world.memories.real) {
            real.cut(source, session);
        }
        self.turn(world);
    }

    fn read(&mut self, world: &mut World) -> bool {
        self.relay_turn(world);
        self.turn(world)
    }

    // ---- slots that agents pass on to each other ----

    fn introduce(&self, request: Join) -> Join {
        match &self.relay {
            Some(relay) => relay.introduce(request),
            None => request,
        }
    }

    fn relaying(&self) -> Option<Relaying> {
        let relay = self.relay.as_ref().filter(|relay| relay.has_a_copy());
        relay.and(self.stepped.as_ref()).map(Stepped::relaying)
    }

    fn offered(&mut self, offer: &Offer) {
        self.relay.iter_mut().for_each(|relay| relay.offered(offer));
    }

    fn assigned(&mut self, world: &mut World, generation: u64, upstream: Option<Upstream>) {
        let relay = self.relay.as_mut();
        let whence = relay.and_then(|relay| relay.assigned(world, generation, upstream));
        self.read_from(whence);
        self.turn(world);
    }

    fn take_words(&mut self) -> Vec<Said> {
        std::mem::take(&mut self.words)
    }
}

/// What a line reads next.
enum Stage {
    /// Lines of answers, up to the one that answers `PSYNC`.
    Answers,
    /// The line that announces the mark.
    Announcement,
    Payload {
        mark: [u8; MARK],
    },
    Streaming,
}

/// The server's end of one connection.
struct Line {
    socket: TcpStream,
    stage: Stage,
    buffer: Vec<u8>,
    /// Slots that the server has room for.
    room: u32,
    /// Why it is closed.
    why: String,
}

impl Line {
    fn open(stepped: &Stepped, login: &str, history: Option<(ReplId, u64)>) -> io::Result<Line> {
        let mut socket = TcpStream::connect(stepped.address())?;
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        // Its end ends the connection at once, and leaves no socket behind in the kernel.
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
        let (replid, offset) = history.map_or(("?".to_string(), -1), |(id, next)| (id.to_string(), next as i64));
        let login = if login.is_empty() { "none" } else { login };
        write!(socket, "AUTH {login}\r\nREPLCONF capa eof capa psync2\r\nPSYNC {replid} {offset}\r\n")?;
        Ok(Line {
            socket,
            stage: Stage::Answers,
            buffer: Vec::new(),
            room: WINDOW,
            why: "the agent has closed it".into(),
        })
    }

    fn ack(&mut self, offset: u64) {
        let digits = offset.to_string();
        let command = format!("*3\r\n$8\r\nREPLCONF\r\n$3\r\nACK\r\n${}\r\n{digits}\r\n", digits.len());
        // A connection that is closed is noticed when it is read.
        let _ = self.socket.write_all(command.as_bytes());
    }

    /// What the delivery says, and whether the connection is open.
    fn read(&mut self) -> (Vec<Message>, bool) {
        let mut messages = Vec::new();
        loop {
            if !self.parse(&mut messages) {
                return (messages, false);
            }
            if matches!(self.stage, Stage::Payload { .. }) && self.room == 0 {
                return (messages, true);
            }
            let mut piece = [0; SLOT_BYTES as usize];
            match self.socket.read(&mut piece) {
                Ok(0) => return (messages, false),
                Ok(count) => self.buffer.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return (messages, true),
                Err(_) => return (messages, false),
            }
        }
    }

    /// Turns bytes into messages. Returns `false` if the server closes the connection because of them.
    fn parse(&mut self, messages: &mut Vec<Message>) -> bool {
        loop {
            match self.stage {
                Stage::Answers => {
                    let Some(line) = self.line() else { return true };
                    let mut words = line.split(' ');
                    match (words.next(), words.next(), words.next()) {
                        (Some("+FULLRESYNC"), Some(replid), Some(offset)) => {
                            let (Ok(replid), Ok(offset)) = (replid.parse(), offset.parse()) else { return false };
                            messages.push(Message::FullResync { replid, offset });
                            self.stage = Stage::Announcement;
                        }
                        (Some("+CONTINUE"), Some(replid), None) => {
                            let Ok(replid) = replid.parse() else { return false };
                            messages.push(Message::Continue { replid });
                            self.stage = Stage::Streaming;
                        }
                        // The answers to AUTH and REPLCONF, and newlines while the payload is not ready.
                        (Some("" | "+OK"), None, None) => {}
                        _ => {
                            self.why = format!("the server does not expect {line:?}");
                            return false;
                        }
                    }
                }
                Stage::Announcement => {
                    let Some(line) = self.line() else { return true };
                    match line.strip_prefix("$EOF:").and_then(|mark| mark.as_bytes().try_into().ok()) {
                        Some(mark) => self.stage = Stage::Payload { mark },
                        None if line.is_empty() => {}
                        None => return false,
                    }
                }
                Stage::Payload { mark } => {
                    if self.buffer.starts_with(&mark) {
                        self.buffer.drain(..MARK);
                        messages.push(Message::End);
                        self.stage = Stage::Streaming;
                        continue;
                    }
                    if self.room == 0 || self.buffer.len() < SLOT_BYTES as usize {
                        return true;
                    }
                    let slot: Vec<u8> = self.buffer.drain(..SLOT_BYTES as usize).collect();
                    messages.push(Message::Slot(slot_of(&slot)));
                    self.room -= 1;
                }
                Stage::Streaming => {
                    if !self.buffer.is_empty() {
                        messages.push(Message::Stream(std::mem::take(&mut self.buffer)));
                    }
                    return true;
                }
            }
        }
    }

    /// A line, without its end.
    fn line(&mut self) -> Option<String> {
        let at = self.buffer.iter().position(|&byte| byte == b'\n')?;
        let line: Vec<u8> = self.buffer.drain(..=at).collect();
        Some(String::from_utf8_lossy(&line).trim_end().to_string())
    }
}

/// How long a lender that cannot be reached is tried, and how long one may take to offer its copy: as in the product.
const REACH_LIMIT: Duration = Duration::from_secs(3);
const OFFER_LIMIT: Duration = Duration::from_secs(4);

/// The longest time that a conversation with a lender takes to begin, in milliseconds.
const BEGIN: u64 = 30;

/// See the module's text.
pub(super) struct Relay {
    agent: usize,
    host: Host,
    plan: RelayPlan,
    copy: Option<Copying>,
    /// The product's memory of what the source has said, and what it has said last in truth: the session to read from.
    assignment: Assignment,
    last_word: Option<(u64, Option<u64>)>,
    /// A lender that the source had taken away before it was read.
    withdrawn: Option<u64>,
    upstream: Option<Conversation>,
}

/// The copy that slots go into.
struct Copying {
    generation: u64,
    memory: Arc<Memory>,
    in_window: bool,
}

/// The conversation with the lender that the source has assigned.
struct Conversation {
    session: u64,
    /// The lending agent.
    lender: usize,
    began: Duration,
    /// When the lender is asked.
    due: Duration,
    is_read: bool,
}

/// What a look at the lender brings.
#[derive(Default)]
pub(super) struct News {
    pub(super) whence: Option<Whence>,
    /// For the source.
    pub(super) word: Option<Said>,
}

impl Relay {
    /// `link`: the agent's end of its server's link.
    pub(super) fn new(link: End, plan: RelayPlan) -> Relay {
        let agent = if let End::Link(agent, _) = link { agent } else { usize::MAX };
        Relay {
            agent,
            host: link.host(&[]),
            plan,
            copy: None,
            assignment: Assignment::default(),
            last_word: None,
            withdrawn: None,
            upstream: None,
        }
    }

    /// Opens the port for other agents, if slots are lent.
    pub(super) fn open(&self, world: &mut World) {
        if let Some(real) = world.memories.real.as_mut().filter(|_| self.plan.lends) {
            real.open_lender(self.agent, self.host, self.plan.lies);
        }
    }

    pub(super) fn close(&mut self, world: &mut World) {
        (self.copy, self.upstream) = (None, None);
        world.memories.real.iter_mut().for_each(|real| real.close_lender(self.agent));
    }

    /// Adds to a request what the source needs to know. A lender's port stands for its agent.
    pub(super) fn introduce(&self, request: Join) -> Join {
        let serves_at = if self.plan.lends { format!("10.9.0.0:{}", self.agent) } else { String::new() };
        Join { zone: self.plan.zone.to_owned(), relays: Some(Relays { serves_at }), ..request }
    }

    pub(super) fn wish(&self, kept: Option<Arc<Memory>>) -> CopyWish {
        CopyWish { slots: self.plan.slots, kept }
    }

    /// An offer has come, whose tables are connected next.
    pub(super) fn offered(&mut self, offer: &Offer) {
        self.assignment.offered();
        let session = offer.upstream.as_ref().map(|upstream| upstream.session);
        self.last_word = Some((offer.snapshot.generation, session));
    }

    /// Tables were connected: lends their copy, and reads from where the source has said last.
    pub(super) fn attached(
        &mut self,
        world: &mut World,
        offer: &Offer,
        copied: Option<Copied>,
        loaded: bool,
    ) -> Option<Whence> {
        let Some(Copied { memory, own, is_new }) = copied else {
            if !loaded {
                (self.copy, self.upstream) = (None, None);
            }
            return None;
        };
        let generation = offer.snapshot.generation;
        if is_new {
            self.upstream = None;
            if let Some(real) = &mut world.memories.real {
                real.lend(self.agent, generation, memory.clone(), own.slots);
            }
        }
        self.copy = Some(Copying { generation, memory, in_window: !offer.snapshot.retained });
        let upstream = self.assignment.of(offer);
        let session = upstream.as_ref().map(|upstream| upstream.session);
        if session.is_some() && self.last_word.is_some_and(|(of, word)| of == generation && word != session) {
            self.withdrawn = session;
        }
        self.read_from(world, upstream)
    }

    /// The source has assigned this lender for this generation.
    pub(super) fn assigned(
        &mut self,
        world: &mut World,
        generation: u64,
        upstream: Option<Upstream>,
    ) -> Option<Whence> {
        let is_ours = self.copy.as_ref().is_some_and(|copy| copy.generation == generation);
        self.assignment.assigned(generation, upstream.clone());
        self.last_word = Some((generation, upstream.as_ref().map(|upstream| upstream.session)));
        if is_ours { self.read_from(world, upstream) } else { None }
    }

    fn read_from(&mut self, world: &mut World, upstream: Option<Upstream>) -> Option<Whence> {
        let Some(Upstream { session, address, .. }) = upstream else {
            self.upstream = None;
            return Some(Whence::Source);
        };
        if self.upstream.as_ref().is_some_and(|present| present.session == session) {
            return None;
        }
        let lender = address.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(usize::MAX);
        let due = world.now + world.millis(BEGIN);
        self.upstream = Some(Conversation { session, lender, began: world.now, due, is_read: false });
        Some(Whence::Awaited)
    }

    /// Looks at the lender: asks for its copy, and notices its end.
    pub(super) fn look(&mut self, world: &mut World) -> News {
        let (Some(copy), Some(conversation)) = (&self.copy, &mut self.upstream) else { return News::default() };
        let Conversation { session, lender, began, due, is_read } = *conversation;
        let Some(real) = world.memories.real.as_mut().filter(|_| world.now >= due) else { return News::default() };
        let lost = |cause, text: &str| PeerLost { session, cause, text: text.to_string() };
        let Some(host) = real.host_of_lender(lender) else { return self.leave(lost(LossCause::Gone, "it is gone")) };
        if is_read {
            return News::default();
        }
        let (waited, is_cut) = (world.now - began, world.cut_until(self.host, host).is_some());
        let Some(real) = world.memories.real.as_mut().filter(|_| !is_cut) else {
            let gives_up = waited > REACH_LIMIT;
            return if gives_up { self.leave(lost(LossCause::Gone, "no way")) } else { News::default() };
        };
        match real.borrow(lender, copy.generation, &copy.memory) {
            Lent::Gone => self.leave(lost(LossCause::Gone, "its copy is gone")),
            Lent::NotYet if waited > OFFER_LIMIT => self.leave(lost(LossCause::Refused, "it offers nothing")),
            Lent::NotYet => News::default(),
            Lent::Copy(peer, slots) => {
                conversation.is_read = true;
                world.count("relay: a lender is read");
                News { whence: Some(Whence::Peer { session, peer, slots }), word: None }
            }
        }
    }

    fn leave(&mut self, lost: PeerLost) -> News {
        News { whence: Some(Whence::Left { session: lost.session }), word: self.lost(lost) }
    }

    /// The lender cannot be read any more. Returns the message for the source.
    pub(super) fn lost(&mut self, lost: PeerLost) -> Option<Said> {
        let PeerLost { session, cause, text } = lost;
        self.upstream.take_if(|present| present.session == session)?;
        let generation = self.copy.as_ref()?.generation;
        Some(Said::PeerLost { generation, session, cause, text })
    }

    /// All slots have arrived.
    pub(super) fn leave_upstream(&mut self) {
        self.upstream = None;
    }

    /// The copy has no more slots than the agent's memory has room for, and no lender is asked that was taken away.
    pub(super) fn within_limits(&self, relaying: &Relaying) -> Result<(), String> {
        if let Some(session) = self.withdrawn {
            return Err(format!("it asks a lender that the source had taken away (session {session})"));
        }
        let (slots, room) = (relaying.held.saturating_sub(relaying.oldest), self.plan.slots);
        if self.copy.is_some() && slots > u64::from(room) {
            return Err(format!("its copy holds {slots} slots and has room for {room}"));
        }
        Ok(())
    }

    /// Whether it has a copy.
    pub(super) fn has_a_copy(&self) -> bool {
        self.copy.is_some()
    }

    /// The first slot that the source must keep for this agent.
    pub(super) fn slots_below(&self, used: u64, held: u64) -> u64 {
        if self.copy.as_ref().is_some_and(|copy| copy.in_window) { used.max(held) } else { used }
    }
}
