//! Delivery: plays the primary towards the replica's own server, with bytes that it reads from the source's tables.
//!
//! ```text
//!   source's snapshot ══ READ ══▶ slots (in place, in the sink, or in the spool) ──┐
//!                                                                                  ├──▶ link ──▶ the replica's server
//!   source's journal  ══ READ ══▶ chunks of the stream ────────────────────────────┘     ◀── PSYNC, ACK
//!
//!   what the server's link is doing:
//!
//!     AUTH, PSYNC ──▶ Asked ── first slot is there ──▶ Payload ── last slot, mark, ACK ──▶ Streaming
//!                       │ ╰─ it has our module ─▶ Introducing ─▶ Mixed ── the same ──────────▶╯  ▲
//!                       └── PSYNC <our replid> <offset that the journal holds> ─────────────────┘
//! ```
//!
//! A connection is the server's link only from its `PSYNC` on, before which it had to log in; until then it is one of the
//! [`candidates`](super::candidates), and the present link stays.
//!
//! One thread, one loop, nothing in it blocks: [`Delivery::run`] takes orders, reads what has come, writes what there is
//! room for, and sleeps on all of its descriptors together. It ends at [`Order::Stop`], or when the other end of its orders
//! is gone.
//!
//! What must hold:
//! - A server is never given bytes of two snapshots in one payload: another generation drops the link first.
//! - The mark that completes a payload is sent only after every slot of it was checked *after* it was used. Slots that were
//!   lent to the socket are used until the server has read them.
//! - The stream follows the mark only after the server's first ACK, as real primaries have it. A server that loads from the
//!   link reads ahead and throws away what came with the mark; one that loads from a file looks for the mark at the end of
//!   what it has read, and would wait for it for ever.
//! - Nothing of ours is ever put into the stream: it would move the replication offset.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_redis::ReplId;
use remora_redis::psync::{
    Payload,
    server::{Event as ServerSays, Server as PrimaryRole},
};
use remora_table::{Chunk, Place, Slot};
use rustix::event::{PollFd, PollFlags, Timespec};
use tokio::sync::mpsc::UnboundedSender;

use super::candidates::{Candidates, Newcomer};
use super::feed::{Feed, Pumped, SnapshotFeed};
use super::introduction::{self, Answer, Introduction, Shown};
use super::link::Link;
use super::meter::Meter;
use super::mixed::{Mixed, Turn};
use super::pacer::Pacer;
use super::parts::FeedError;
use super::payload::{WRITE_PIECE, WriteTrouble};
use super::relayed::{Lost, ReadFrom, Relayed};
use super::spool::{self, Held, Spool};

/// What the delivery is told.
pub(super) enum Order {
    /// Read from here now.
    Attach(Box<Feed>),
    /// Take the snapshot's slots from there now.
    ReadFrom(ReadFrom),
    /// What the server is loading will never be whole: close its link. A server that loads from it answers nobody until then.
    GiveUp,
    /// Give the server nothing more of the stream, until it makes another link.
    Hold,
    /// Whether the server has our module: then show it memory, and refer to that. Must be ordered before the server is told to follow
    /// the link, since the server may ask for its payload at once.
    UseModule(bool),
    /// The server has been shown memory, or why not.
    Introduced {
        /// Which introduction is meant.
        number: u64,
        answer: Result<Answer, String>,
    },
    /// End, and take the spool away if the sync is done.
    Stop { done: bool },
}

/// What it tells.
#[derive(Debug)]
pub(super) enum News {
    /// The server has connected and asked to be synchronised.
    Asked,
    /// The server's module is to be shown memory; the answer is awaited.
    Introduce(Introduction),
    /// The whole snapshot has arrived here.
    Fetched,
    /// The server has been given the whole snapshot.
    PayloadSent,
    /// The server has loaded it: it acknowledged an offset.
    Loaded,
    /// The server's link ended.
    LinkLost { text: String, loading: bool },
    /// The feed ended; another is needed, beginning where [`Progress`] says.
    FeedLost { error: FeedError },
    /// A peer can't be read any more; nothing is read before it was said from whom else.
    PeerLost(Lost),
    /// The server asked for something that needs another feed.
    FeedWanted,
    /// This agent can't go on.
    Fatal { text: String },
}

/// Where the next feed must begin. Shared through the news' receiver by value.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// The snapshot that slots were taken of.
    pub(super) origin: Option<spool::Origin>,
    /// The first slot that is still needed.
    pub(super) next_slot: u64,
    /// The next byte of the stream that is needed; 0 before the first feed.
    pub(super) next_byte: u64,
    /// The server holds the whole snapshot: only the stream is needed.
    pub(super) loaded: bool,
    /// The memory of the copy that the next feed may go on with.
    pub(super) copy: Option<Arc<Memory>>,
}

/// The control's handle on the thread.
pub(super) struct Handle {
    orders: Sender<Order>,
    waker: Arc<OwnedFd>,
    thread: Option<std::thread::JoinHandle<()>>,
    pub(super) progress: Arc<std::sync::Mutex<Progress>>,
}

impl Handle {
    pub(super) fn order(&self, order: Order) {
        if self.orders.send(order).is_ok() {
            // An eventfd that can't be written to is one that has been woken already.
            let _ = rustix::io::write(&*self.waker, &1_u64.to_ne_bytes());
        }
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Ends the thread and waits for its end, which takes one turn of its loop.
    pub(super) fn stop(&mut self, done: bool) {
        self.order(Order::Stop { done });
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stop(false);
    }
}

/// What a delivery is made of.
pub(super) struct Setup {
    /// Where the server's link arrives.
    pub(super) candidates: Candidates,
    /// Where slots are kept for another life of this agent.
    pub(super) spool: Option<PathBuf>,
    /// Bytes of the stream that may wait here while the server loads.
    pub(super) backlog_limit: usize,
    /// How far it is.
    pub(super) meter: Arc<Meter>,
    /// What it tells.
    pub(super) news: UnboundedSender<News>,
}

/// Starts the thread.
pub(super) fn spawn(setup: Setup) -> io::Result<Handle> {
    use rustix::event::{EventfdFlags, eventfd};
    let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (orders, inbox) = channel();
    let progress = Arc::new(std::sync::Mutex::new(Progress::default()));
    let delivery = Delivery {
        setup,
        orders: inbox,
        waker: waker.clone(),
        shared: progress.clone(),
        at: Progress::default(),
        feed: None,
        spool: None,
        served: None,
        backlog: VecDeque::new(),
        backlog_bytes: 0,
        fetched: false,
        journal_due: Instant::now(),
        journal_pace: PACE_FIRST,
        snapshot_due: Instant::now(),
        lent_due: Instant::now(),
        heard: Heard::all(Instant::now()),
        by_module: false,
        introductions: 0,
        kept: None,
    };
    let thread = std::thread::Builder::new().name("delivery".into()).spawn(move || delivery.run())?;
    Ok(Handle { orders, waker, thread: Some(thread), progress })
}

/// The server's link and where it is in its conversation.
struct Served {
    link: Link,
    role: PrimaryRole,
    /// Bytes on their way, up to `written`.
    out: Vec<u8>,
    written: usize,
    stage: Stage,
    pacer: Pacer,
    kept_alive: Instant,
    loaded_told: bool,
    /// The stream is held back.
    held: bool,
}

enum Stage {
    Asked,
    /// The server's module is being shown memory; the slot is the snapshot's first.
    Introducing {
        number: u64,
        shown: Shown,
        slot: Slot,
    },
    Payload(Body),
    /// A payload that refers to shown memory.
    Mixed(Box<Mixed>),
    Streaming,
}

/// A payload under way.
struct Body {
    mark: [u8; 40],
    next_slot: u64,
    piece: Option<Piece>,
    /// Bytes of the piece that have been written.
    written: u32,
    /// Slots that the socket still reads.
    lent: VecDeque<Lent>,
    /// Since when the server has read none of them.
    lent_since: Instant,
}

/// A slot of which the server may not have read everything.
struct Lent {
    slot: Slot,
    /// [`Link::written`] behind it.
    end: u64,
    /// The feed that it came from is over.
    alone: bool,
}

impl Body {
    fn new(mark: [u8; 40], piece: Option<Piece>) -> Body {
        Body { mark, next_slot: 0, piece, written: 0, lent: VecDeque::new(), lent_since: Instant::now() }
    }

    /// Notes a slot that the socket reads until [`Link::taken`] is at `end`.
    fn lend(&mut self, slot: Slot, end: u64) {
        if let Place::View(_) = slot.place {
            // The socket has hold of the pages themselves: our mapping of them would only count as memory of ours.
            let (view, range) = slot.bytes();
            view.forget(range);
        }
        if self.lent.is_empty() {
            self.lent_since = Instant::now();
        }
        self.lent.push_back(Lent { slot, end, alone: false });
    }
}

/// A slot on its way to the server.
enum Piece {
    Fresh(Slot),
    Spooled(Held),
}

impl Piece {
    fn length(&self) -> u32 {
        match self {
            Piece::Fresh(slot) => slot.length,
            Piece::Spooled(held) => held.length,
        }
    }
}

/// Bytes written to the link in one turn, so that a fast server does not keep the loop from its other work.
const TURN_BYTES: usize = 8 << 20;

/// How long an idle journal is left alone at first, and at most: the bounds of the lag that polling adds. A longer pause
/// costs less of both ends' processors; the journal is looked at again at once while it brings something.
const PACE_FIRST: Duration = Duration::from_micros(100);
const PACE_LAST: Duration = Duration::from_millis(2);

/// How often a snapshot that is still being written is looked at.
const SNAPSHOT_PACE: Duration = Duration::from_micros(500);

/// How often it is asked how much the server has read of what it was lent: two questions to the system.
const LENT_PACE: Duration = Duration::from_micros(500);

/// How often the waker, the candidates and the link are tried while the loop has so much to do that it never waits on them.
const LOOK_PACE: Duration = Duration::from_millis(1);

/// How long a server may read nothing of what it was lent: as long as it would wait for us, `repl-timeout`.
const LENT_LIMIT: Duration = Duration::from_secs(60);

/// How often it is looked what a server's module has done.
const TALLY_PACE: Duration = Duration::from_micros(200);

/// Newlines towards a server that waits for its payload: it gives up after `repl-timeout`, 60 s by default.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(1);

/// The longest sleep, should every descriptor be silent.
const SLEEP_LIMIT: Duration = Duration::from_millis(500);

struct Delivery {
    setup: Setup,
    orders: Receiver<Order>,
    waker: Arc<OwnedFd>,
    shared: Arc<std::sync::Mutex<Progress>>,
    at: Progress,
    feed: Option<Box<Feed>>,
    spool: Option<Spool>,
    served: Option<Served>,
    /// Stream bytes that have arrived and not been written.
    backlog: VecDeque<Chunk>,
    backlog_bytes: usize,
    fetched: bool,
    journal_due: Instant,
    journal_pace: Duration,
    snapshot_due: Instant,
    lent_due: Instant,
    /// The next payload is to refer to shown memory.
    by_module: bool,
    introductions: u64,
    /// The copy of a feed that is over: others may still read it, and the next feed goes on with it.
    kept: Option<Box<Relayed>>,
    heard: Heard,
}

/// What may have something for us. A try that finds nothing is a system call, and one of accepting even makes a socket first: so only
/// those are tried that waiting has found ready, and all of them now and then.
struct Heard {
    waker: bool,
    candidates: bool,
    link: bool,
    looked: Instant,
}

impl Heard {
    fn all(now: Instant) -> Heard {
        Heard { waker: true, candidates: true, link: true, looked: now }
    }

    /// They are tried again, if nobody has waited on them for long.
    fn look(&mut self, now: Instant) {
        if now.duration_since(self.looked) >= LOOK_PACE {
            *self = Heard::all(now);
        }
    }
}

impl Delivery {
    fn run(mut self) {
        loop {
            self.heard.look(Instant::now());
            match self.obey() {
                Ok(true) => {}
                Ok(false) => return,
                Err(fatal) => return self.die(fatal),
            }
            let mut moved = self.accept();
            moved |= self.hear();
            match self.fetch() {
                Ok(more) => moved |= more,
                Err(fatal) => return self.die(fatal),
            }
            moved |= self.write();
            self.publish();
            if !moved {
                self.sleep();
            }
        }
    }

    fn die(self, text: String) {
        let _ = self.setup.news.send(News::Fatal { text });
    }

    /// Whoever hears the news sees where we are with it: a `Loaded` without it would be taken for a server that has restarted.
    fn tell(&self, news: News) {
        self.publish();
        let _ = self.setup.news.send(news);
    }

    /// Lets the control see how far we are.
    fn publish(&self) {
        let copy = self.copy().map(|relayed| relayed.memory().clone());
        let at = Progress { copy, ..self.at.clone() };
        *self.shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = at;
    }

    /// The copy that there is.
    fn copy(&self) -> Option<&Relayed> {
        let of_feed = self.feed.as_ref().and_then(|feed| match &feed.snapshot {
            Some(SnapshotFeed::Relayed(relayed)) => Some(&**relayed),
            _ => None,
        });
        of_feed.or(self.kept.as_deref())
    }

    fn copy_mut(&mut self) -> Option<&mut Relayed> {
        let of_feed = self.feed.as_mut().and_then(|feed| feed.snapshot.as_mut()?.relayed());
        of_feed.or(self.kept.as_deref_mut())
    }

    /// Keeps the copy of the feed, which is over.
    fn keep_the_copy(&mut self) {
        let relayed = self.feed.as_mut().and_then(|feed| feed.snapshot.take()?.into_relayed());
        if relayed.is_some() {
            self.kept = relayed;
        }
    }

    /// Carries out what was ordered. `false`: to end.
    fn obey(&mut self) -> Result<bool, String> {
        if std::mem::take(&mut self.heard.waker) {
            let mut woken = [0; 8];
            let _ = rustix::io::read(&*self.waker, &mut woken);
        }
        loop {
            match self.orders.try_recv() {
                Ok(Order::Attach(feed)) => self.attach(feed)?,
                Ok(Order::ReadFrom(whom)) => {
                    if let Some(relayed) = self.copy_mut() {
                        relayed.read_from(Instant::now(), whom);
                    }
                }
                Ok(Order::GiveUp) if !self.at.loaded => self.drop_link("the source has put us out", false),
                Ok(Order::GiveUp) => {}
                Ok(Order::Hold) => {
                    if let Some(served) = &mut self.served {
                        served.held = true;
                    }
                }
                Ok(Order::UseModule(used)) => self.by_module = used,
                Ok(Order::Introduced { number, answer }) => self.introduced(number, answer),
                Ok(Order::Stop { done }) => {
                    if let Some(spool) = self.spool.take().filter(|_| done) {
                        let _ = spool.remove();
                    }
                    return Ok(false);
                }
                Err(TryRecvError::Empty) => return Ok(true),
                Err(TryRecvError::Disconnected) => return Ok(false),
            }
        }
    }

    /// Whether the server still has slots to read that were lent to its socket.
    fn lends(&self) -> bool {
        matches!(&self.served, Some(Served { stage: Stage::Payload(body), .. }) if !body.lent.is_empty())
    }

    /// Takes a new feed: goes on with it where the last one ended, or starts again with another snapshot.
    fn attach(&mut self, mut feed: Box<Feed>) -> Result<(), String> {
        self.abandon_shown_memory();
        let same = self.at.origin.as_ref() == Some(&feed.origin);
        if !same && !self.at.loaded {
            if matches!(
                &self.served,
                Some(Served { stage: Stage::Payload(_) | Stage::Mixed(_) | Stage::Streaming, .. })
            ) {
                self.drop_link("the snapshot that it was loading is gone", false);
            }
            self.begin_origin(&feed)?;
        }
        self.lay_down_the_slot();
        self.keep_the_copy();
        if !self.at.loaded {
            // Without a spool all slots below the next one have gone to the server; with one they may have to go again.
            let held = self.spool.as_ref().map(Spool::held).unwrap_or_default();
            let first = if self.spool.is_some() { 0 } else { self.at.next_slot };
            let have = move |number: u64| held.contains(&number);
            if let Err(error) = feed.begin_snapshot(first, have, self.kept.take()) {
                self.tell(News::FeedLost { error });
                return Ok(());
            }
        }
        if let Err(error) = feed.begin_journal(self.at.next_byte) {
            self.tell(News::FeedLost { error });
            return Ok(());
        }
        self.feed = Some(feed);
        self.journal_due = Instant::now();
        self.snapshot_due = Instant::now();
        Ok(())
    }

    fn begin_origin(&mut self, feed: &Feed) -> Result<(), String> {
        self.backlog.clear();
        self.backlog_bytes = 0;
        self.fetched = false;
        self.at = Progress {
            origin: Some(feed.origin.clone()),
            next_slot: 0,
            next_byte: feed.origin.offset + 1,
            loaded: false,
            copy: None,
        };
        let meter = &self.setup.meter;
        meter.bytes_fetched.set(0);
        meter.bytes_delivered.set(0);
        meter.slots_total.set(0);
        meter.slots_held.set(0);
        meter.slots_below.set(0);
        meter.stream_fetched.set(feed.origin.offset);
        meter.stream_delivered.set(feed.origin.offset);
        if let Some(folder) = &self.setup.spool {
            let spool = Spool::open(folder, &feed.origin).map_err(|cause| spool_trouble(folder, &cause))?;
            for number in 0..spool.held_below() {
                self.setup.meter.bytes_fetched.add(spool.get(number).map_or(0, |held| u64::from(held.length)));
            }
            self.setup.meter.slots_held.set(spool.held_below());
            self.setup.meter.slots_below.set(spool.held_below());
            self.spool = Some(spool);
        }
        Ok(())
    }

    // ---- the server's link ----

    /// Goes on with those who connected. One that logged in and asked is the server's link, in the place of the one before.
    fn accept(&mut self) -> bool {
        if !self.heard.candidates {
            return false;
        }
        let now = Instant::now();
        let Some(newcomer) = self.setup.candidates.turn(now) else {
            self.heard.candidates = false;
            return false;
        };
        let Newcomer { peer, link, role, out, written, replid, offset } = newcomer;
        tracing::debug!(%peer, "the server's link came");
        if self.served.is_some() {
            self.drop_link("the server made another", true);
        }
        self.heard.link = true;
        self.served = Some(Served {
            link,
            role,
            out,
            written,
            stage: Stage::Asked,
            pacer: Pacer::default(),
            kept_alive: now,
            loaded_told: false,
            held: false,
        });
        self.asked(replid, offset);
        true
    }

    fn drop_link(&mut self, why: &str, tell: bool) {
        let Some(served) = self.served.take() else { return };
        let mut again = false;
        let loading = match served.stage {
            Stage::Introducing { slot, .. } => {
                self.give_back(slot);
                again = true;
                false
            }
            Stage::Mixed(mixed) => {
                mixed.into_slots().for_each(|slot| self.give_back(slot));
                true
            }
            Stage::Payload(body) => {
                for lent in body.lent.into_iter().filter(|lent| !lent.alone) {
                    self.give_back(lent.slot);
                }
                if let Some(Piece::Fresh(slot)) = body.piece {
                    self.give_back(slot);
                }
                true
            }
            Stage::Streaming => !self.at.loaded,
            Stage::Asked => false,
        };
        if again || (loading && self.spool.is_none()) {
            self.begin_again();
        }
        if tell {
            self.tell(News::LinkLost { text: why.to_string(), loading });
        }
    }

    /// The server will want the whole snapshot once more, and what went to it is kept nowhere.
    fn begin_again(&mut self) {
        self.at.next_slot = 0;
        self.keep_the_copy();
        // The server may still read what it was lent: only a copy that never writes a place twice can be used again.
        self.kept = self.kept.take().and_then(|mut kept| kept.rewind().then_some(kept));
        self.feed = None;
        self.fetched = false;
        let meter = &self.setup.meter;
        meter.slots_below.set(0);
        meter.slots_held.set(0);
        meter.bytes_fetched.set(0);
        meter.bytes_delivered.set(0);
    }

    /// A slot that is not used any further; whether it was overwritten meanwhile is of no interest now.
    fn give_back(&mut self, slot: Slot) {
        let _ = match self.feed.as_mut().and_then(|feed| feed.snapshot.as_mut()) {
            Some(snapshot) => snapshot.release(slot),
            None => slot.release_alone(),
        };
    }

    /// Reads what the server says.
    fn hear(&mut self) -> bool {
        let Some(served) = self.served.as_mut().filter(|_| self.heard.link) else { return false };
        let mut buffer = [0; 4096];
        match served.link.read(&mut buffer) {
            Ok(None) => {
                self.heard.link = false;
                return false;
            }
            Ok(Some(0)) => {
                self.drop_link("the server closed it", true);
                return true;
            }
            Ok(Some(n)) => {
                if let Err(error) = served.role.handle_input(&buffer[..n]) {
                    let text = format!("the server said something no replica says: {error}");
                    self.drop_link(&text, true);
                    return true;
                }
            }
            Err(error) => {
                self.drop_link(&error.to_string(), true);
                return true;
            }
        }
        while let Some(event) = self.served.as_mut().and_then(|served| served.role.poll_event()) {
            match event {
                ServerSays::Psync { replid, offset } => self.asked(replid, offset),
                ServerSays::Ack { offset, .. } => self.acknowledged(offset),
            }
        }
        true
    }

    fn asked(&mut self, replid: Option<ReplId>, offset: i64) {
        self.tell(News::Asked);
        let resumes = self.at.loaded
            && self.at.origin.as_ref().zip(replid).is_some_and(|(origin, replid)| origin.replid == replid.to_string());
        let offset = u64::try_from(offset).unwrap_or(0);
        if resumes && offset > 0 {
            self.resume_stream(offset);
            return;
        }
        if self.at.loaded {
            // It held the whole snapshot and lost it: it needs all of it again.
            self.at.loaded = false;
            self.at.origin = None;
            self.begin_again();
            self.tell(News::FeedWanted);
        } else if self.feed.is_none() && self.at.origin.is_some() {
            self.tell(News::FeedWanted);
        }
        let Some(served) = &mut self.served else { return };
        if !served.role.peer().eof {
            // Every server since Redis 2.8.18 takes a payload whose length is not known beforehand.
            self.drop_link("it can't load a snapshot whose length is not known yet (no capa eof): it is too old", true);
            return;
        }
        served.stage = Stage::Asked;
        served.kept_alive = Instant::now();
    }

    /// The server goes on at `offset`. It may lie before what we gave it, since bytes on their way are lost with a link, or
    /// behind it, after some time with the primary itself.
    fn resume_stream(&mut self, offset: u64) {
        let Some(served) = &mut self.served else { return };
        let Some(replid) = self.at.origin.as_ref().and_then(|origin| origin.replid.parse().ok()) else { return };
        served.role.resume(&replid);
        served.stage = Stage::Streaming;
        served.loaded_told = true;
        self.setup.meter.stream_delivered.set(offset - 1);
        if self.backlog.front().map_or(self.at.next_byte, |chunk| chunk.offset) != offset {
            self.backlog.clear();
            self.backlog_bytes = 0;
            self.at.next_byte = offset;
            self.feed = None;
            self.tell(News::FeedWanted);
        }
    }

    fn acknowledged(&mut self, offset: u64) {
        self.setup.meter.acknowledged.set(offset);
        let Some(served) = &mut self.served else { return };
        let origin = self.at.origin.as_ref().map_or(u64::MAX, |origin| origin.offset);
        if matches!(served.stage, Stage::Streaming) && !served.loaded_told && offset >= origin {
            served.loaded_told = true;
            self.at.loaded = true;
            self.tell(News::Loaded);
        }
    }

    // ---- the feed ----

    /// Takes what has come from the source. The error is one that ends this agent's work.
    fn fetch(&mut self) -> Result<bool, String> {
        let moved = match self.fetch_snapshot() {
            Ok(moved) => moved,
            Err(Trouble::Feed(error)) => {
                self.lose_feed(error);
                return Ok(true);
            }
            Err(Trouble::Spool(text)) => return Err(text),
        };
        match self.fetch_journal() {
            Ok(more) => Ok(moved || more),
            Err(error) => {
                self.lose_feed(error);
                Ok(true)
            }
        }
    }

    fn lose_feed(&mut self, error: FeedError) {
        self.abandon_shown_memory();
        self.keep_the_copy();
        self.feed = None;
        self.lay_down_the_slot();
        self.tell(News::FeedLost { error });
    }

    /// The feed that the slot under way came from is over. The next feed brings it again, and the link goes on in the middle
    /// of it; what of it has been written is checked after use with the others.
    fn lay_down_the_slot(&mut self) {
        let Some(Served { stage: Stage::Payload(body), link, .. }) = &mut self.served else { return };
        match body.piece.take() {
            Some(Piece::Fresh(slot)) => body.lend(slot, link.written()),
            spooled => body.piece = spooled,
        }
        body.lent.iter_mut().for_each(|lent| lent.alone = true);
    }

    fn fetch_snapshot(&mut self) -> Result<bool, Trouble> {
        let Some(feed) = &mut self.feed else { return Ok(false) };
        let Some(snapshot) = &mut feed.snapshot else { return Ok(false) };
        let now = Instant::now();
        if snapshot.is_idle() && now < self.snapshot_due {
            return Ok(false);
        }
        self.snapshot_due = now + SNAPSHOT_PACE;
        let Pumped { moved: news, lost } = snapshot.pump(now).map_err(Trouble::Feed)?;
        let progress = snapshot.progress();
        let meter = &self.setup.meter;
        if let Some(relayed) = snapshot.relayed() {
            relayed.show(meter);
        }
        meter.bytes_known.set(progress.bytes_known);
        meter.slots_total.set(progress.end.unwrap_or(0));

        let mut moved = news;
        if let Some(spool) = &mut self.spool {
            while let Some(slot) = snapshot.next_slot() {
                meter.bytes_fetched.add(u64::from(slot.length));
                spool_slot(spool, snapshot, slot, self.setup.spool.as_ref())?;
                meter.slots_held.add(1);
                meter.slots_below.set(spool.held_below());
                moved = true;
            }
        }
        let fetched = snapshot.is_fetched();
        if let Some(lost) = lost {
            moved = true;
            self.tell(News::PeerLost(lost));
        }
        if !self.fetched && fetched {
            self.fetched = true;
            self.tell(News::Fetched);
        }
        Ok(moved)
    }

    fn fetch_journal(&mut self) -> Result<bool, FeedError> {
        let Some(feed) = &mut self.feed else { return Ok(false) };
        let Some(journal) = &mut feed.journal else { return Ok(false) };
        let now = Instant::now();
        if self.backlog_bytes >= self.setup.backlog_limit || (journal.is_idle() && now < self.journal_due) {
            return Ok(false);
        }
        journal.pump()?;
        let (mut moved, mut took) = (false, 0);
        while let Some(chunk) = journal.reader.next_chunk() {
            self.at.next_byte = chunk.offset + chunk.bytes.len() as u64;
            self.setup.meter.stream_fetched.set(self.at.next_byte - 1);
            self.backlog_bytes += chunk.bytes.len();
            took += chunk.bytes.len() as u64;
            self.backlog.push_back(chunk);
            moved = true;
        }
        if let Some(relayed) = feed.snapshot.as_mut().and_then(SnapshotFeed::relayed) {
            relayed.stream_took(took);
        }
        self.journal_pace = if moved { PACE_FIRST } else { (self.journal_pace * 2).min(PACE_LAST) };
        self.journal_due = now + self.journal_pace;
        Ok(moved)
    }

    // ---- writing ----

    /// Writes to the server what there is and what it has room for.
    fn write(&mut self) -> bool {
        match self.try_write() {
            Ok(moved) => moved,
            Err(WriteTrouble::Link(error)) => {
                self.drop_link(&error.to_string(), true);
                true
            }
            Err(WriteTrouble::Feed(error)) => {
                // What the server was given can't be trusted: without the mark it will throw it away.
                self.drop_link("a slot was overwritten while it was being used", true);
                self.lose_feed(error);
                true
            }
            Err(WriteTrouble::Module(text)) => {
                self.by_module = false;
                self.setup.meter.by_module.set(0);
                tracing::warn!("loading out of shared memory failed: {text}; the snapshot goes by the link");
                self.drop_link("the module could not load it", true);
                true
            }
        }
    }

    fn try_write(&mut self) -> Result<bool, WriteTrouble> {
        let mut moved = false;
        let mut left = TURN_BYTES;
        loop {
            let Some(served) = &mut self.served else { return Ok(moved) };
            let fresh = served.role.take_output();
            served.out.extend_from_slice(&fresh);
            if !served.flush_out()? {
                return Ok(moved);
            }
            let wrote = match &mut served.stage {
                Stage::Asked => self.begin_payload(),
                Stage::Introducing { .. } => self.keep_alive(),
                Stage::Payload(_) => self.write_payload()?,
                Stage::Mixed(_) => self.write_mixed()?,
                Stage::Streaming => self.write_stream()?,
            };
            let Some(wrote) = wrote else { return Ok(moved) };
            moved = true;
            left = left.saturating_sub(wrote);
            if left == 0 {
                return Ok(true);
            }
        }
    }

    /// Answers a PSYNC, as soon as the first slot is there; newlines until then.
    fn begin_payload(&mut self) -> Option<usize> {
        let piece = if self.at.origin.is_some() { self.next_piece(0) } else { None };
        let ready = piece.is_some() || (self.at.origin.is_some() && self.fetched && self.is_empty());
        if !ready {
            return self.keep_alive();
        }
        match piece {
            Some(Piece::Fresh(slot)) if self.by_module => self.introduce(slot),
            piece => self.answer_psync(|mark| Stage::Payload(Body::new(mark, piece))),
        }
    }

    /// A newline, when it is time for one.
    fn keep_alive(&mut self) -> Option<usize> {
        let served = self.served.as_mut()?;
        if served.kept_alive.elapsed() < KEEP_ALIVE_EVERY {
            return None;
        }
        served.kept_alive = Instant::now();
        served.role.keep_alive();
        Some(1)
    }

    /// Promises the server a payload that ends with a mark.
    fn answer_psync(&mut self, stage: impl FnOnce([u8; 40]) -> Stage) -> Option<usize> {
        let served = self.served.as_mut()?;
        let origin = self.at.origin.as_ref()?;
        let replid = origin.replid.parse().ok()?;
        let mark = random_mark();
        served.role.full_resync(&replid, origin.offset);
        served.role.payload(&Payload::Mark(mark));
        served.stage = stage(mark);
        self.setup.meter.bytes_delivered.set(0);
        Some(0)
    }

    // ---- by the server's module ----

    /// Has the control show the server the memory in which this slot lies, and all that follow.
    fn introduce(&mut self, slot: Slot) -> Option<usize> {
        self.introductions += 1;
        let number = self.introductions;
        match introduction::prepare(slot.bytes().0, number) {
            Ok((shown, introduction)) => {
                self.served.as_mut()?.stage = Stage::Introducing { number, shown, slot };
                self.tell(News::Introduce(introduction));
            }
            Err(text) => self.go_by_the_link(slot, &text),
        }
        Some(0)
    }

    fn introduced(&mut self, number: u64, answer: Result<Answer, String>) {
        let Some(served) = &mut self.served else { return };
        if !matches!(&served.stage, Stage::Introducing { number: awaited, .. } if *awaited == number) {
            return;
        }
        let Stage::Introducing { shown, slot, .. } = std::mem::replace(&mut served.stage, Stage::Asked) else { return };
        let answer = match answer {
            Ok(answer) => answer,
            Err(text) => return self.go_by_the_link(slot, &text),
        };
        tracing::info!("the server's module loads long strings out of shared memory");
        self.setup.meter.by_module.set(1);
        let mut failed = None;
        self.answer_psync(|mark| match Mixed::new(mark, shown, answer, slot) {
            Ok(mixed) => Stage::Mixed(Box::new(mixed)),
            Err(trouble) => {
                failed = Some(trouble);
                Stage::Asked
            }
        });
        if failed.is_some() {
            self.by_module = false;
            self.drop_link("the snapshot could not be looked into", true);
            self.begin_again();
        }
    }

    fn go_by_the_link(&mut self, slot: Slot, why: &str) {
        tracing::warn!("the server's module is not used: {why}");
        self.by_module = false;
        let piece = Some(Piece::Fresh(slot));
        self.answer_psync(|mark| Stage::Payload(Body::new(mark, piece)));
    }

    /// One turn of a payload that refers to memory.
    fn write_mixed(&mut self) -> Result<Option<usize>, WriteTrouble> {
        let Some(Served { stage: Stage::Mixed(mixed), link, .. }) = &mut self.served else { return Ok(None) };
        let meter = &self.setup.meter;
        let snapshot = self.feed.as_mut().and_then(|feed| feed.snapshot.as_mut());
        let turn = mixed.turn(link, snapshot, meter, self.fetched)?;
        self.at.next_slot = meter.slots_below.get();
        match turn {
            Turn::Nothing => Ok(None),
            Turn::Moved(bytes) => Ok(Some(bytes)),
            Turn::Whole(end) => {
                meter.referred.set(mixed.referred());
                Ok(Some(self.end_payload(&end)))
            }
        }
    }

    /// The memory that the server was shown is not what the next feed reads into. The snapshot then goes by the link, which can go on
    /// in its middle should that feed be lost too.
    fn abandon_shown_memory(&mut self) {
        if matches!(&self.served, Some(Served { stage: Stage::Mixed(_) | Stage::Introducing { .. }, .. })) {
            self.by_module = false;
            self.setup.meter.by_module.set(0);
            self.drop_link("the memory that it was loading from is gone", true);
        }
    }

    /// The snapshot has no bytes at all. No server makes such a one, but then it is the end that is at hand.
    fn is_empty(&self) -> bool {
        self.setup.meter.slots_total.get() == 0
    }

    fn next_piece(&mut self, number: u64) -> Option<Piece> {
        if let Some(spool) = &self.spool {
            return spool.get(number).map(Piece::Spooled);
        }
        let snapshot = self.feed.as_mut()?.snapshot.as_mut()?;
        let slot = snapshot.next_slot()?;
        assert_eq!(slot.number, number, "the reader gives slots in order, from the first that was asked for");
        snapshot.count(&slot, &self.setup.meter);
        Some(Piece::Fresh(slot))
    }

    /// One write of the payload. `None`: nothing to write, or no room.
    fn write_payload(&mut self) -> Result<Option<usize>, WriteTrouble> {
        let Some(Served { stage: Stage::Payload(body), pacer, .. }) = &self.served else { return Ok(None) };
        if pacer.until(Instant::now()).is_some() {
            return Ok(None);
        }
        let (number, mark) = (body.next_slot, body.mark);
        if body.piece.is_none() {
            self.settle_lent()?;
            let total = self.setup.meter.slots_total.get();
            let whole = self.fetched && number >= total && !self.lends();
            if whole {
                return Ok(Some(self.end_payload(&mark)));
            }
            let Some(piece) = self.next_piece(number) else { return Ok(None) };
            if let Some(Served { stage: Stage::Payload(body), .. }) = &mut self.served {
                body.piece = Some(piece);
            }
        }
        let Some(Served { stage: Stage::Payload(body), link, pacer, .. }) = &mut self.served else { return Ok(None) };
        let Some(piece) = &body.piece else { return Ok(None) };
        let length = (piece.length() - body.written).min(WRITE_PIECE as u32) as usize;
        let wrote = match piece {
            Piece::Fresh(slot) => {
                let (view, range) = slot.bytes();
                let start = range.start + u64::from(body.written);
                if link.borrows() {
                    link.lend_view(view, start, length)?
                } else {
                    link.write_view(view, start, length)?
                }
            }
            Piece::Spooled(held) => {
                let Some(spool) = &self.spool else { return Ok(None) };
                link.write_file(spool.file(), spool.place(held.number) + u64::from(body.written), length)?
            }
        };
        let Some(wrote) = wrote else {
            if let Some(held) = link.held() {
                pacer.full(Instant::now(), link.written(), held);
            }
            return Ok(None);
        };
        body.written += wrote as u32;
        self.setup.meter.bytes_delivered.add(wrote as u64);
        if body.written == piece.length() {
            body.written = 0;
            body.next_slot += 1;
            if let Some(Piece::Fresh(slot)) = body.piece.take() {
                self.at.next_slot = body.next_slot;
                if link.borrows() {
                    body.lend(slot, link.written());
                } else {
                    self.slot_used(slot)?;
                }
            }
        }
        Ok(Some(wrote))
    }

    /// Checks and gives back the slots that the server has read.
    fn settle_lent(&mut self) -> Result<(), WriteTrouble> {
        let now = Instant::now();
        if !self.lends() || now < self.lent_due {
            return Ok(());
        }
        self.lent_due = now + LENT_PACE;
        let Some(Served { stage: Stage::Payload(body), link, .. }) = &mut self.served else { return Ok(()) };
        let taken = link.taken()?;
        let mut read = Vec::new();
        while body.lent.front().is_some_and(|lent| lent.end <= taken) {
            read.extend(body.lent.pop_front());
            body.lent_since = Instant::now();
        }
        if !body.lent.is_empty() && body.lent_since.elapsed() > LENT_LIMIT {
            let text = format!("the server has read nothing for {} s", LENT_LIMIT.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text).into());
        }
        for Lent { slot, alone, .. } in read {
            match alone {
                true => slot.release_alone().map_err(|error| WriteTrouble::Feed(error.into()))?,
                false => self.slot_used(slot)?,
            }
        }
        Ok(())
    }

    /// A slot has been used: check that it was not overwritten meanwhile, and give it back.
    fn slot_used(&mut self, slot: Slot) -> Result<(), WriteTrouble> {
        let number = slot.number;
        if let Some(snapshot) = self.feed.as_mut().and_then(|feed| feed.snapshot.as_mut()) {
            snapshot.release(slot).map_err(|error| WriteTrouble::Feed(error.into()))?;
        }
        let below = &self.setup.meter.slots_below;
        below.set(below.get().max(number + 1));
        Ok(())
    }

    /// Writes what makes the payload whole.
    fn end_payload(&mut self, end: &[u8]) -> usize {
        let Some(served) = &mut self.served else { return 0 };
        served.out.extend_from_slice(end);
        served.stage = Stage::Streaming;
        self.keep_the_copy();
        if let Some(feed) = &mut self.feed {
            feed.snapshot = None;
        }
        self.setup.meter.slots_below.set(u64::MAX);
        self.tell(News::PayloadSent);
        end.len()
    }

    fn write_stream(&mut self) -> Result<Option<usize>, WriteTrouble> {
        let Some(served) = self.served.as_mut().filter(|served| served.takes_the_stream()) else { return Ok(None) };
        let Some(chunk) = self.backlog.front_mut() else { return Ok(None) };
        let Some(wrote) = served.link.write(&chunk.bytes)? else { return Ok(None) };
        self.backlog_bytes -= wrote;
        self.setup.meter.stream_delivered.set(chunk.offset + wrote as u64 - 1);
        if wrote == chunk.bytes.len() {
            self.backlog.pop_front();
        } else {
            chunk.bytes.drain(..wrote);
            chunk.offset += wrote as u64;
        }
        Ok(Some(wrote))
    }

    // ---- sleeping ----

    /// Sleeps until something may have changed.
    fn sleep(&mut self) {
        let now = Instant::now();
        let mut until = now + SLEEP_LIMIT;
        let backlog_full = self.backlog_bytes >= self.setup.backlog_limit;
        let mut fds: Vec<(BorrowedFd<'_>, PollFlags)> = vec![(self.waker.as_fd(), PollFlags::IN)];
        fds.extend(self.setup.candidates.fds());
        let link_at = fds.len();
        until = until.min(self.setup.candidates.due().unwrap_or(until));
        let (mut wants_slots, mut link_full, mut link_paused) = (false, false, false);
        if let Some(served) = &self.served {
            let has_piece = matches!(&served.stage, Stage::Payload(body) if body.piece.is_some());
            let has_stream = served.takes_the_stream() && !self.backlog.is_empty();
            link_full = has_piece || has_stream || served.written < served.out.len() || served.link.wants_write();
            let paused = if has_piece { served.pacer.until(now) } else { None };
            until = until.min(paused.unwrap_or(until));
            link_paused = paused.is_some();
            if let Stage::Mixed(mixed) = &served.stage {
                link_full |= mixed.has_part();
                until = until.min(now + TALLY_PACE);
            }
            let write = if link_full && paused.is_none() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push((served.link.as_fd(), PollFlags::IN | write));
            wants_slots = !has_piece;
            if !has_piece && self.lends() {
                until = until.min(self.lent_due);
            }
            if matches!(served.stage, Stage::Asked | Stage::Introducing { .. }) {
                until = until.min(served.kept_alive + KEEP_ALIVE_EVERY);
            }
        }
        if let Some(feed) = &mut self.feed {
            let Feed { snapshot, journal, .. } = &mut **feed;
            if let Some(snapshot) = snapshot.as_mut().filter(|snapshot| !snapshot.is_fetched()) {
                match snapshot {
                    // During a pause, what arrives can wait as well: whoever reads us waits two milliseconds at most.
                    SnapshotFeed::Direct(_) | SnapshotFeed::Relayed(_) if link_paused => {}
                    SnapshotFeed::Relayed(relayed) => {
                        // Others wait for what comes, though our own server may take nothing.
                        let due = if relayed.is_idle() { Some(self.snapshot_due) } else { relayed.due(now) };
                        until = until.min(due.unwrap_or(until));
                        fds.extend(relayed.arms().map(|fd| (fd, PollFlags::IN)));
                    }
                    SnapshotFeed::Direct(_) if snapshot.is_idle() => {
                        until = until.min(if wants_slots || self.spool.is_some() { self.snapshot_due } else { until });
                    }
                    SnapshotFeed::Direct(direct) => fds.push((direct.arm(), PollFlags::IN)),
                }
            }
            if let Some(journal) = journal.as_mut().filter(|_| !backlog_full) {
                if journal.is_idle() {
                    // While the server's socket is full the stream can wait: what matters is the payload.
                    until = until.min(if link_full { now + PACE_LAST } else { self.journal_due });
                } else {
                    fds.push((journal.arm(), PollFlags::IN));
                }
            }
        }
        let timeout = until.saturating_duration_since(now).max(Duration::from_micros(20));
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
        let mut fds: Vec<PollFd<'_>> = fds.iter().map(|(fd, flags)| PollFd::new(fd, *flags)).collect();
        // Interrupted or not: the loop looks at everything again.
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let link = self.served.is_some() && is_ready(link_at);
        let looked = Instant::now();
        let candidates = (1..link_at).any(is_ready) || self.setup.candidates.due().is_some_and(|due| due <= looked);
        self.heard = Heard { waker: is_ready(0), candidates, link, looked };
    }
}

impl Served {
    /// It has loaded its payload, or needed none, and waits for the stream.
    fn takes_the_stream(&self) -> bool {
        matches!(self.stage, Stage::Streaming) && self.loaded_told && !self.held
    }

    /// Writes what waits. `false`: some still does.
    fn flush_out(&mut self) -> io::Result<bool> {
        self.link.write_out(&mut self.out, &mut self.written)
    }
}

enum Trouble {
    Feed(FeedError),
    Spool(String),
}

/// Stores one slot; it counts as held only after it was checked once more that it was not overwritten meanwhile.
fn spool_slot(
    spool: &mut Spool,
    snapshot: &mut SnapshotFeed,
    slot: Slot,
    folder: Option<&PathBuf>,
) -> Result<(), Trouble> {
    let held = Held { number: slot.number, length: slot.length, crc: slot.crc };
    let trouble = |cause: io::Error| {
        Trouble::Spool(folder.map_or_else(|| cause.to_string(), |folder| spool_trouble(folder, &cause)))
    };
    let (view, range) = slot.bytes();
    spool.store(held, view, range.start).map_err(trouble)?;
    snapshot.release(slot).map_err(|error| Trouble::Feed(error.into()))?;
    spool.remember(held).map_err(trouble)
}

fn spool_trouble(folder: &std::path::Path, cause: &io::Error) -> String {
    let cure = match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room there for the whole snapshot, name another --state-dir, or leave it out"
        }
        _ => "check the folder and its file system",
    };
    format!("the state directory {} can't be used: {cause}; {cure}", folder.display())
}

/// Forty characters that no RDB contains by chance, as the servers make them.
fn random_mark() -> [u8; 40] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut random = [0; 20];
    if getrandom::fill(&mut random).is_err() {
        // No random numbers: the address of a fresh value and the time will do; the mark is no secret.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        random[..16].copy_from_slice(&now.to_le_bytes());
    }
    let mut mark = [0; 40];
    for (pair, byte) in mark.chunks_exact_mut(2).zip(random) {
        pair[0] = HEX[usize::from(byte >> 4)];
        pair[1] = HEX[usize::from(byte & 15)];
    }
    mark
}
