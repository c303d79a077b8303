//! Delivery: an actor in the place of the delivery thread. It reads tables, plays the primary towards the server, and
//! reports what the thread reports. It follows the crate `delivery`, in slots and commands instead of bytes.

use std::collections::VecDeque;
use std::io;

use remora_protocol::{Join, Message as Said, Offer, Relaying, Resume, Upstream};
use remora_redis::ReplId;

use super::memory::Lost;
use super::server::WINDOW;
use super::wire::{Conn, End, Message};
use super::world::World;
use remora_delivery::simulated::Connected;
use remora_process::exit::{Code, Failure};
use remora_replica::machine::{DeliveryEvent, Reading};

/// Slots that are read ahead of the server.
const AHEAD: usize = 8;

/// Bytes of the stream that one read takes, and that may wait for the server.
const STREAM_BYTES: usize = 2000;
const STREAM_LIMIT: usize = 20_000;

/// A delivery, as the agent around it sees one.
pub(super) trait Deliver {
    /// Opens the link's port, at which the server must log in with this password.
    fn start(&mut self, world: &mut World, secret: String) -> io::Result<()>;

    /// Whether its port is open.
    fn is_running(&self) -> bool;

    /// Whether [`Deliver::read`] is to be called now and then.
    fn is_awake(&self) -> bool;

    fn reading(&self) -> Reading;

    /// What a session is continued from.
    fn resume(&self) -> Option<Resume>;

    fn slots_below(&self) -> u64;

    fn slots_held(&self) -> u64;

    /// Bytes of the present snapshot that were given to the server.
    fn bytes(&self) -> u64;

    fn acknowledged(&self) -> u64;

    /// Bytes of payloads that the server was given since the sync began, and whether the end of one was among them.
    fn given(&self) -> (u64, bool);

    /// Whether it keeps to its memory. The model of a delivery keeps nothing.
    fn within_limits(&self) -> Result<(), String> {
        Ok(())
    }

    fn take_events(&mut self) -> Vec<DeliveryEvent>;

    // ---- orders ----

    fn stop(&mut self, world: &mut World);

    fn use_module(&mut self, used: bool);

    fn hold(&mut self, world: &mut World);

    fn give_up(&mut self, world: &mut World);

    fn load_again(&mut self, world: &mut World);

    /// Connects to the tables of an offer of this source.
    fn connect(&mut self, world: &mut World, source: usize, offer: &Offer) -> Option<AnyFeed>;

    fn attach(&mut self, world: &mut World, feed: AnyFeed);

    /// What came of an introduction.
    fn introduced(&mut self, world: &mut World, number: u64, refers: bool);

    // ---- what happens to it ----

    fn receive(&mut self, world: &mut World, conn: Conn, message: Message);

    fn closed(&mut self, world: &mut World, conn: Conn);

    /// The tables that it reads are gone, or the way to them.
    fn lose_feed(&mut self, world: &mut World);

    /// Reads what the source has. Whether there may be more at once.
    fn read(&mut self, world: &mut World) -> bool;

    // ---- slots that agents pass on to each other ----

    /// Adds to a request how it takes part, if it does.
    fn introduce(&self, request: Join) -> Join {
        request
    }

    /// What it reports of its part.
    fn relaying(&self) -> Option<Relaying> {
        None
    }

    /// The source has made this offer.
    fn offered(&mut self, _offer: &Offer) {}

    /// The source has assigned this lender for this generation; `None`: the source itself.
    fn assigned(&mut self, _world: &mut World, _generation: u64, _upstream: Option<Upstream>) {}

    /// What the source is to be told.
    fn take_words(&mut self) -> Vec<Said> {
        Vec::new()
    }
}

/// What a delivery reads.
pub(super) enum AnyFeed {
    Model(Feed),
    Bytes { feed: Box<Connected>, offer: Box<Offer>, source: usize, session: u64 },
}

/// Where the snapshot begins that the server is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) generation: u64,
    pub(super) replid: ReplId,
    pub(super) offset: u64,
}

/// What is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Feed {
    pub(super) source: usize,
    origin: Origin,
    journal: u64,
    reads_snapshot: bool,
    next_slot: u64,
}

impl Feed {
    pub(super) fn new(source: usize, offer: &Offer) -> Option<Feed> {
        let origin = Origin { generation: offer.generation, replid: offer.replid?, offset: offer.offset };
        Some(Feed { source, origin, journal: offer.journal.generation, reads_snapshot: true, next_slot: 0 })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Asked,
    Introducing(u64),
    Payload { refers: bool },
    Streaming,
}

struct Link {
    conn: Conn,
    stage: Stage,
    room: u32,
    has_loaded: bool,
    is_held: bool,
}

/// See the module's text.
pub(super) struct Delivery {
    agent: End,
    secret: String,
    is_running: bool,
    origin: Option<Origin>,
    next_slot: u64,
    next_byte: u64,
    loaded: bool,
    feed: Option<Feed>,
    /// The source that was read last.
    read_from: Option<usize>,
    /// Slots that have arrived and were not given to the server.
    slots: VecDeque<u64>,
    fetched: bool,
    total: Option<u64>,
    stream: VecDeque<u8>,
    link: Option<Link>,
    by_module: bool,
    introductions: u64,
    /// Bytes of payloads that the server was given since the sync began, and whether the end of one was among them.
    given: u64,
    end_given: bool,
    bytes_delivered: u64,
    slots_below: u64,
    acknowledged: u64,
    stream_fetched: u64,
    /// The stream is full and is not read.
    stream_paused: bool,
    events: Vec<DeliveryEvent>,
}

impl Delivery {
    pub(super) fn new(agent: End) -> Delivery {
        Delivery {
            agent,
            secret: String::new(),
            is_running: false,
            origin: None,
            next_slot: 0,
            next_byte: 0,
            loaded: false,
            feed: None,
            read_from: None,
            slots: VecDeque::new(),
            fetched: false,
            total: None,
            stream: VecDeque::new(),
            link: None,
            by_module: false,
            introductions: 0,
            given: 0,
            end_given: false,
            bytes_delivered: 0,
            slots_below: 0,
            acknowledged: 0,
            stream_fetched: 0,
            stream_paused: false,
            events: Vec::new(),
        }
    }
}

impl Deliver for Delivery {
    fn start(&mut self, _world: &mut World, secret: String) -> io::Result<()> {
        (self.secret, self.is_running) = (secret, true);
        Ok(())
    }

    fn is_running(&self) -> bool {
        self.is_running
    }

    fn is_awake(&self) -> bool {
        self.feed.is_some()
    }

    fn reading(&self) -> Reading {
        Reading {
            loaded: self.loaded,
            bytes_delivered: self.given,
            slots_held: self.next_slot.saturating_add(self.slots.len() as u64),
            stream_fetched: self.stream_fetched,
            stream_paused: self.stream_paused,
            stream_delivered: self.next_byte.saturating_sub(1 + self.stream.len() as u64),
            readers: 0,
        }
    }

    fn resume(&self) -> Option<Resume> {
        self.origin.map(|origin| Resume {
            generation: origin.generation,
            held_slots: self.next_slot,
            loaded: self.loaded,
            replid: origin.replid,
            next_byte: self.next_byte,
        })
    }

    fn slots_below(&self) -> u64 {
        self.slots_below
    }

    fn slots_held(&self) -> u64 {
        self.slots_below
    }

    fn bytes(&self) -> u64 {
        self.bytes_delivered
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    fn given(&self) -> (u64, bool) {
        (self.given, self.end_given)
    }

    fn take_events(&mut self) -> Vec<DeliveryEvent> {
        std::mem::take(&mut self.events)
    }

    // ---- orders ----

    fn stop(&mut self, world: &mut World) {
        self.is_running = false;
        (self.feed, self.link) = (None, None);
        world.end_all(self.agent);
    }

    fn use_module(&mut self, used: bool) {
        self.by_module = used;
    }

    fn hold(&mut self, _world: &mut World) {
        self.link.iter_mut().for_each(|link| link.is_held = true);
    }

    fn give_up(&mut self, world: &mut World) {
        if !self.loaded {
            self.drop_link(world, "the source has put us out", true);
        }
    }

    fn load_again(&mut self, world: &mut World) {
        if self.loaded {
            self.stream.clear();
            self.forget_snapshot();
            self.drop_link(world, "the stream behind its snapshot is lost", true);
            self.tell(DeliveryEvent::FeedWanted);
        }
    }

    fn attach(&mut self, world: &mut World, feed: AnyFeed) {
        let AnyFeed::Model(mut feed) = feed else { return };
        self.abandon_memory(world);
        if self.loaded && self.origin.is_some_and(|origin| origin.replid != feed.origin.replid) {
            self.feed = None;
            let failure = Failure::new(Code::Source, "its stream is of another history");
            return self.tell(DeliveryEvent::FeedLost { failure });
        }
        if self.origin != Some(feed.origin) && !self.loaded {
            let has_begun = matches!(&self.link, Some(Link { stage: Stage::Payload { .. } | Stage::Streaming, .. }));
            if has_begun {
                self.drop_link(world, "the snapshot that it was loading is gone", true);
            }
            self.stream.clear();
            self.begin_again();
            self.origin = Some(feed.origin);
            self.next_byte = feed.origin.offset + 1;
            self.stream_fetched = feed.origin.offset;
            self.total = None;
        }
        if self.feed.is_none()
            && self.origin == Some(feed.origin)
            && self.read_from.is_some_and(|from| from != feed.source)
        {
            world.count("a reader goes on with another source");
            if self.next_slot > 0 && !self.loaded {
                world.count("a reader goes on at its slot with another source");
            }
        }
        self.read_from = Some(feed.source);
        let wants_slots = !self.loaded && !self.link.as_ref().is_some_and(|link| link.stage == Stage::Streaming);
        (feed.reads_snapshot, feed.next_slot) = (wants_slots, self.next_slot);
        self.slots.clear();
        self.feed = Some(feed);
        self.turn(world);
    }

    /// What came of an introduction.
    fn introduced(&mut self, world: &mut World, number: u64, refers: bool) {
        match &mut self.link {
            Some(link) if link.stage == Stage::Introducing(number) => self.promise(world, refers),
            _ => {}
        }
        self.turn(world);
    }

    fn connect(&mut self, world: &mut World, source: usize, offer: &Offer) -> Option<AnyFeed> {
        world.memories.journal((source, offer.journal.generation))?;
        Feed::new(source, offer).map(AnyFeed::Model)
    }

    // ---- what happens to it ----

    fn receive(&mut self, world: &mut World, conn: Conn, message: Message) {
        match message {
            Message::Psync { history, login, .. } => {
                if login != self.secret || !self.is_running {
                    world.count("a stranger at the link");
                    return world.close(conn, self.agent);
                }
                if self.link.is_some() {
                    self.drop_link(world, "the server made another", false);
                }
                self.link = Some(Link { conn, stage: Stage::Asked, room: WINDOW, has_loaded: false, is_held: false });
                self.asked(world, history);
            }
            Message::Ack { offset } if self.is_present(conn) => self.acknowledge(offset),
            Message::Room if self.is_present(conn) => {
                self.slots_below = self.slots_below.saturating_add(1);
                self.link.iter_mut().for_each(|link| link.room += 1);
            }
            _ => {}
        }
        self.turn(world);
    }

    fn closed(&mut self, world: &mut World, conn: Conn) {
        if self.is_present(conn) {
            self.drop_link(world, "the server closed it", false);
        }
    }

    fn lose_feed(&mut self, world: &mut World) {
        self.end_feed(world, "the lane broke");
    }

    /// Reads what the source has. Whether there may be more at once.
    fn read(&mut self, world: &mut World) -> bool {
        let before = (self.next_byte, self.slots.len());
        match self.try_read(world) {
            Ok(()) => {}
            Err(Lost(why)) => self.end_feed(world, why),
        }
        let moved = before != (self.next_byte, self.slots.len());
        self.turn(world);
        moved
    }
}

impl Delivery {
    fn tell(&mut self, event: DeliveryEvent) {
        self.events.push(event);
    }

    // ---- the server's link ----

    fn is_present(&self, conn: Conn) -> bool {
        self.link.as_ref().is_some_and(|link| link.conn == conn)
    }

    fn drop_link(&mut self, world: &mut World, why: &str, is_ours: bool) {
        let Some(link) = self.link.take() else { return };
        world.close(link.conn, self.agent);
        let loading = match link.stage {
            Stage::Asked | Stage::Introducing(_) => false,
            Stage::Payload { .. } => true,
            Stage::Streaming => !self.loaded,
        };
        if loading || matches!(link.stage, Stage::Introducing(_)) {
            self.begin_again();
        }
        self.tell(DeliveryEvent::LinkLost { text: why.to_string(), loading: loading && !is_ours });
    }

    fn begin_again(&mut self) {
        self.next_slot = 0;
        self.slots.clear();
        self.feed = None;
        self.fetched = false;
        (self.slots_below, self.bytes_delivered) = (0, 0);
    }

    fn forget_snapshot(&mut self) {
        (self.loaded, self.origin) = (false, None);
        self.begin_again();
    }

    fn asked(&mut self, world: &mut World, history: Option<(ReplId, u64)>) {
        self.tell(DeliveryEvent::Asked);
        if let (Some(origin), Some((replid, next)), true) = (self.origin, history, self.loaded)
            && origin.replid == replid
        {
            return self.resume(world, replid, next);
        }
        if self.loaded {
            self.forget_snapshot();
            self.tell(DeliveryEvent::FeedWanted);
        } else if self.feed.is_none() && self.origin.is_some() {
            self.tell(DeliveryEvent::FeedWanted);
        }
    }

    fn resume(&mut self, world: &mut World, replid: ReplId, next: u64) {
        let Some(link) = &mut self.link else { return };
        world.send(link.conn, self.agent, Message::Continue { replid });
        (link.stage, link.has_loaded) = (Stage::Streaming, true);
        if self.next_byte - self.stream.len() as u64 != next {
            self.stream.clear();
            self.next_byte = next;
            self.feed = None;
            self.tell(DeliveryEvent::FeedWanted);
        }
    }

    fn acknowledge(&mut self, offset: u64) {
        self.acknowledged = offset;
        let snapshot = self.origin.map_or(u64::MAX, |origin| origin.offset);
        let Some(link) = &mut self.link else { return };
        if link.stage == Stage::Streaming && !link.has_loaded && offset >= snapshot {
            link.has_loaded = true;
            self.loaded = true;
            self.tell(DeliveryEvent::Loaded);
        }
    }

    // ---- the input ----

    fn try_read(&mut self, world: &World) -> Result<(), Lost> {
        let Some(mut feed) = self.feed else { return Ok(()) };
        if feed.reads_snapshot && self.slots.len() < AHEAD {
            let key = (feed.source, feed.origin.generation);
            let (slots, end) = world.memories.slots(key, feed.next_slot, AHEAD - self.slots.len())?;
            feed.next_slot += slots.len() as u64;
            self.slots.extend(slots);
            self.total = end;
            if !self.fetched && end == Some(feed.next_slot) {
                self.fetched = true;
                self.tell(DeliveryEvent::Fetched);
            }
        }
        self.feed = Some(feed);
        self.stream_paused = self.stream.len() >= STREAM_LIMIT;
        if !self.stream_paused {
            let bytes = world.memories.stream((feed.source, feed.journal), self.next_byte, STREAM_BYTES)?;
            self.next_byte += bytes.len() as u64;
            self.stream_fetched = self.next_byte - 1;
            self.stream.extend(bytes);
        }
        Ok(())
    }

    /// The feed cannot be read any more.
    fn end_feed(&mut self, world: &mut World, why: &str) {
        if self.feed.is_none() {
            return;
        }
        self.abandon_memory(world);
        self.feed = None;
        self.tell(DeliveryEvent::FeedLost { failure: Failure::new(Code::Source, why) });
    }

    fn abandon_memory(&mut self, world: &mut World) {
        let refers =
            matches!(&self.link, Some(Link { stage: Stage::Introducing(_) | Stage::Payload { refers: true }, .. }));
        if refers {
            self.by_module = false;
            self.drop_link(world, "the memory that it was loading from is gone", false);
        }
    }

    // ---- writing ----

    fn promise(&mut self, world: &mut World, refers: bool) {
        let (Some(origin), Some(link)) = (self.origin, &mut self.link) else { return };
        let Origin { replid, offset, .. } = origin;
        world.send(link.conn, self.agent, Message::FullResync { replid, offset });
        (link.stage, link.is_held) = (Stage::Payload { refers }, false);
        self.given += 10;
        self.bytes_delivered = 0;
    }

    /// Writes what there is and what the server has room for.
    fn turn(&mut self, world: &mut World) {
        loop {
            let Some(link) = &mut self.link else { return };
            match link.stage {
                Stage::Asked if self.origin.is_some() && self.next_slot == 0 && !self.slots.is_empty() => {
                    if self.by_module {
                        self.introductions += 1;
                        link.stage = Stage::Introducing(self.introductions);
                        let number = self.introductions;
                        return self.tell(DeliveryEvent::Introduce { number });
                    }
                    self.promise(world, false);
                }
                Stage::Payload { .. } if self.fetched && self.total == Some(self.next_slot) => {
                    world.send(link.conn, self.agent, Message::End);
                    link.stage = Stage::Streaming;
                    self.feed.iter_mut().for_each(|feed| feed.reads_snapshot = false);
                    self.slots_below = u64::MAX;
                    self.end_given = true;
                    self.tell(DeliveryEvent::PayloadSent);
                }
                Stage::Payload { .. } if link.room > 0 => {
                    let Some(slot) = self.slots.pop_front() else { return };
                    link.room -= 1;
                    world.send(link.conn, self.agent, Message::Slot(slot));
                    self.next_slot += 1;
                    self.bytes_delivered += 100;
                    self.given += 100;
                }
                Stage::Streaming if link.has_loaded && !link.is_held && !self.stream.is_empty() => {
                    let bytes = self.stream.drain(..).collect();
                    world.send(link.conn, self.agent, Message::Stream(bytes));
                }
                _ => return,
            }
        }
    }
}
