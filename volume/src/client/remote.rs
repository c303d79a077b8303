//! One server, as the driver sees it: what it was sent, since when it owes an answer, when it is tried again, and how
//! much may be under way there.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use remora_messenger::{Address, Connection, Message};

use super::regions::Region;
use crate::link::{LEAST_ROOM, MOST_ROOM};
use crate::rules::Version;
use crate::wire::Room;

/// See the module's text.
pub(super) struct Remote {
    address: Address,
    connection: Option<Connection>,
    /// Answers that it owes.
    owed: u64,
    /// When it was last heard of, or asked while it owed nothing.
    heard: Instant,
    /// Writes that it has not applied yet, with their bytes, and when they were sent.
    writes: VecDeque<(Version, u64, Instant)>,
    bytes: u64,
    size: WindowSize,
    window: Window,
    /// When it may be tried again.
    next_try: Instant,
    pause: Duration,
    /// When its connection was made.
    connected: Instant,
    /// Whether it was asked for the region of its copy.
    is_attached: bool,
    region: Option<Region>,
    size_of_copy: SizeOfCopy,
    pub(super) outbox: Outbox,
}

/// Whether the server's copy has the size of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizeOfCopy {
    Same,
    /// It has refused this writer for that.
    Other,
    /// It was asked to take it.
    Taking,
    /// It is about to take another one: it is asked again.
    Growing,
}

/// How the server stands to the outbox of this process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outbox {
    is_offered: bool,
    /// It takes the blocks of large writes from there.
    pub(super) pulls: bool,
    /// Other servers can take them from it.
    pub(super) lends: bool,
}

impl Remote {
    pub(super) fn new(address: Address, size: WindowSize, now: Instant) -> Remote {
        Remote {
            address,
            connection: None,
            owed: 0,
            heard: now,
            writes: VecDeque::new(),
            bytes: 0,
            size,
            window: Window::new(size, now),
            next_try: now,
            pause: FIRST_PAUSE,
            connected: now,
            is_attached: false,
            region: None,
            size_of_copy: SizeOfCopy::Same,
            outbox: Outbox::default(),
        }
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// A new connection.
    pub(super) fn connected(&mut self, connection: Connection, now: Instant) {
        (self.connection, self.connected) = (Some(connection), now);
        (self.is_attached, self.region) = (false, None);
        self.outbox = Outbox::default();
        (self.owed, self.bytes) = (0, 0);
        self.writes.clear();
        self.window = Window::new(self.size, now);
    }

    /// Sends a question. Returns whether there was a way.
    pub(super) fn send(&mut self, message: Message, now: Instant) -> bool {
        if self.owed == 0 {
            self.heard = now;
        }
        self.owed += 1;
        self.connection.as_ref().is_some_and(|connection| connection.send(message).is_ok())
    }

    /// Sends a write. Its `bytes` are in the message, or are to be pulled.
    pub(super) fn write(&mut self, version: Version, (message, bytes): (Message, u64), now: Instant) -> bool {
        self.writes.push_back((version, bytes, now));
        self.bytes += bytes;
        self.window.sent(self.under_way());
        self.send(message, now)
    }

    /// Whether a write of this length can be sent; one that cannot is noted. A server that gets no writes has room.
    pub(super) fn has_room(&mut self, bytes: u64) -> bool {
        let out = self.under_way();
        self.connection.is_none() || self.window.has_room(out, bytes)
    }

    /// What it has not applied yet.
    fn under_way(&self) -> Room {
        Room { bytes: self.bytes, writes: u32::try_from(self.writes.len()).unwrap_or(u32::MAX) }
    }

    /// What it must be asked about its window.
    pub(super) fn ask(&mut self, now: Instant) -> Option<Ask> {
        let out = self.under_way();
        self.connection.as_ref().and_then(|_| self.window.poll(out, now))
    }

    /// Its window; `None` while it has no connection.
    pub(super) fn window(&mut self) -> Option<&mut Window> {
        self.connection.as_ref().map(|_| &mut self.window)
    }

    /// It has refused this writer: its copy has another size. One that was asked to take the size is not asked at once
    /// again.
    pub(super) fn has_other_size(&mut self) {
        let is_again = self.size_of_copy == SizeOfCopy::Taking;
        self.size_of_copy = if is_again { SizeOfCopy::Same } else { SizeOfCopy::Other };
    }

    /// Whether it is to be asked now to take the size of the volume.
    pub(super) fn takes_size(&mut self) -> bool {
        let is_next = self.size_of_copy == SizeOfCopy::Other;
        if is_next {
            self.size_of_copy = SizeOfCopy::Taking;
        }
        is_next
    }

    /// Whether it was asked on the present connection to take the size of the volume.
    pub(super) fn is_taking_size(&self) -> bool {
        self.size_of_copy == SizeOfCopy::Taking
    }

    /// It is about to take another size.
    pub(super) fn grows(&mut self, now: Instant) {
        self.size_of_copy = SizeOfCopy::Growing;
        self.is_tried_soon(now);
    }

    /// Whether it is to be asked again for the copy that was about to take another size.
    pub(super) fn asks_again(&self, now: Instant) -> bool {
        self.size_of_copy == SizeOfCopy::Growing && self.is_due(now)
    }

    /// It has the size of the volume now.
    pub(super) fn has_taken_size(&mut self) {
        self.size_of_copy = SizeOfCopy::Same;
    }

    /// It was heard of. `is_answer`: it owes one answer less.
    pub(super) fn heard(&mut self, is_answer: bool, now: Instant) {
        self.heard = now;
        if is_answer {
            self.owed = self.owed.saturating_sub(1);
        }
    }

    /// For so long until now this process could not hear it.
    pub(super) fn excuse(&mut self, time: Duration, now: Instant) {
        self.heard = (self.heard + time).min(now);
    }

    /// It has applied every write up to this one.
    pub(super) fn applied(&mut self, applied: Version, now: Instant) {
        while self.writes.front().is_some_and(|(version, ..)| *version <= applied)
            && let Some((_, bytes, sent)) = self.writes.pop_front()
        {
            self.bytes -= bytes;
            self.window.applied(bytes, now.saturating_duration_since(sent));
        }
    }

    /// Its copy is whole: if it is lost again, it is tried again soon.
    pub(super) fn is_whole(&mut self) {
        self.pause = FIRST_PAUSE;
    }

    /// It answers, and has no space: it is connected to again soon.
    pub(super) fn is_tried_soon(&mut self, now: Instant) {
        (self.pause, self.next_try) = (FIRST_PAUSE, now + FIRST_PAUSE);
    }

    /// Ends its connection. It is tried again after a pause, which grows each time. Returns whether there was one.
    pub(super) fn disconnect(&mut self, now: Instant) -> bool {
        let Some(connection) = self.connection.take() else { return false };
        connection.abort();
        (self.region, self.outbox) = (None, Outbox::default());
        (self.owed, self.bytes) = (0, 0);
        self.writes.clear();
        self.next_try = now + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        true
    }

    /// The first write that it has not applied yet.
    pub(super) fn first_unapplied(&self) -> Option<Version> {
        self.writes.front().map(|(version, ..)| *version)
    }

    /// Whether it must be asked for its region: once for each connection.
    pub(super) fn attach(&mut self) -> bool {
        !std::mem::replace(&mut self.is_attached, self.connection.is_some()) && self.connection.is_some()
    }

    /// Its connection, if it must be offered the outbox: once for each.
    pub(super) fn offer(&mut self) -> Option<Connection> {
        let connection = self.connection.clone().filter(|_| !self.outbox.is_offered)?;
        self.outbox.is_offered = true;
        Some(connection)
    }

    /// It can pull from the outbox, and others from it; or not.
    pub(super) fn reached(&mut self, pulls: bool, lends: bool) {
        self.outbox = Outbox { is_offered: true, pulls, lends };
    }

    /// Its present connection.
    pub(super) fn connection(&self) -> Option<&Connection> {
        self.connection.as_ref()
    }

    /// The last write that it was sent, if it has not applied it.
    pub(super) fn last_sent(&self) -> Option<Version> {
        self.writes.back().map(|(version, ..)| *version)
    }

    /// The region of its copy can be read, or cannot any more.
    pub(super) fn open_region(&mut self, region: Option<Region>) {
        self.region = region;
    }

    /// The region of its copy, if it can be read.
    pub(super) fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    /// Whether it owes nothing, and was not heard of for this long.
    pub(super) fn is_silent(&self, time: Duration, now: Instant) -> bool {
        self.connection.is_some() && self.owed == 0 && now.saturating_duration_since(self.heard) > time
    }

    /// Whether it should be sent again what it had no space for.
    pub(super) fn is_try_due(&self, now: Instant) -> bool {
        self.connection.is_some() && self.owed == 0 && now.saturating_duration_since(self.connected) >= SPACE_PAUSE
    }

    /// Whether it should be tried again.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.connection.is_none() && now >= self.next_try
    }

    /// Whether it owes an answer for longer than this.
    pub(super) fn is_overdue(&self, limit: Duration, now: Instant) -> bool {
        self.connection.is_some() && self.owed > 0 && now.saturating_duration_since(self.heard) > limit
    }
}

/// A process that was restarted is back after a few of these.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// A server without space for a write is sent it again after this time: while it refuses, it is not read for a moment.
const SPACE_PAUSE: Duration = Duration::from_secs(1);

/// A host that boots is taken back within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How many writes may be under way at each server, as far as the server permits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WindowSize {
    /// As many as are of use.
    #[default]
    Adaptive,
    /// Always up to this number, of any length.
    Fixed(u32),
}

/// A text that is not a [`WindowSize`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a window: use adaptive, or fixed:N with a number of writes from 1 to {}", MOST_ROOM.writes)]
pub struct NotAWindow;

impl FromStr for WindowSize {
    type Err = NotAWindow;

    fn from_str(text: &str) -> Result<WindowSize, NotAWindow> {
        if text == "adaptive" {
            return Ok(WindowSize::Adaptive);
        }
        let writes = text.strip_prefix("fixed:").and_then(|writes| writes.parse().ok()).ok_or(NotAWindow)?;
        if (1..=MOST_ROOM.writes).contains(&writes) { Ok(WindowSize::Fixed(writes)) } else { Err(NotAWindow) }
    }
}

impl fmt::Display for WindowSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WindowSize::Adaptive => f.write_str("adaptive"),
            WindowSize::Fixed(writes) => write!(f, "fixed:{writes}"),
        }
    }
}

/// A question to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    /// What would be of use.
    pub(super) wants: Room,
    /// What this end does not exceed until it is answered.
    pub(super) obeys: Room,
}

/// How many writes, and how many bytes of them, may be under way at one server.
///
/// ```text
///   room = what the server has granted    the server's bound, from the memory that all writers share
///   wish = what this end wants            grows while it is the limit, shrinks when less is used
/// ```
///
/// A wish doubles if the window was the limit for a span of time. That was of use if the rate has risen, or if answers
/// are not much later than the soonest one: then it doubles again. Otherwise the server or the network is the limit,
/// and more writes under way only wait longer: the wish is as before, and tries again after a second.
///
/// It decides only; time goes in.
#[derive(Debug)]
pub(super) struct Window {
    size: WindowSize,
    /// What the server has granted, or less: what this end obeys.
    room: Room,
    wish: Room,
    /// Bytes that the server would leave to this end. Less than granted: another writer is short.
    told: u64,
    is_asking: bool,
    span: Span,
    grown: Option<Growth>,
    /// The soonest answer to a write so far.
    soonest: Duration,
    /// The most that was under way for some time, and when that time began.
    used: Room,
    used_since: Instant,
}

/// How the wish last grew.
#[derive(Clone, Copy, Debug)]
struct Growth {
    /// The wish before.
    from: Room,
    /// Bytes a second before.
    rate: f64,
    at: Instant,
    /// It was of no use, and was undone.
    is_undone: bool,
}

/// Which of the two bounds was reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Full {
    bytes: bool,
    writes: bool,
}

/// What happened since the window was last looked at.
#[derive(Debug)]
struct Span {
    began: Instant,
    /// Whether a write had to wait, for bytes and for its number.
    full: Full,
    applied: u64,
    /// The soonest answer in this span.
    soonest: Duration,
}

impl Span {
    fn new(began: Instant) -> Span {
        Span { began, full: Full::default(), applied: 0, soonest: Duration::MAX }
    }
}

impl Window {
    pub(super) fn new(size: WindowSize, now: Instant) -> Window {
        let wish = match size {
            WindowSize::Adaptive => LEAST_ROOM,
            WindowSize::Fixed(writes) => Room { bytes: MOST_ROOM.bytes, writes },
        };
        let room = Room { bytes: LEAST_ROOM.bytes, writes: LEAST_ROOM.writes.min(wish.writes) };
        Window {
            size,
            room,
            wish,
            told: LEAST_ROOM.bytes,
            is_asking: false,
            span: Span::new(now),
            grown: None,
            soonest: Duration::MAX,
            used: Room { bytes: 0, writes: 0 },
            used_since: now,
        }
    }

    /// Bytes that this end may have under way.
    pub(super) fn bytes(&self) -> u64 {
        self.room.bytes
    }

    /// Whether a write can be sent while so much is under way; one that cannot is noted. One can if nothing is.
    pub(super) fn has_room(&mut self, out: Room, bytes: u64) -> bool {
        let most = self.room.bytes.min(self.wish.bytes).min(self.told.max(LEAST_ROOM.bytes));
        let full =
            Full { bytes: out.bytes + bytes > most, writes: out.writes >= self.room.writes.min(self.wish.writes) };
        if out.writes == 0 || full == Full::default() {
            return true;
        }
        self.span.full = Full { bytes: self.span.full.bytes | full.bytes, writes: self.span.full.writes | full.writes };
        false
    }

    /// A write was sent: so much is under way now.
    pub(super) fn sent(&mut self, out: Room) {
        self.used = Room { bytes: self.used.bytes.max(out.bytes), writes: self.used.writes.max(out.writes) };
    }

    /// A write was answered, after `took`.
    pub(super) fn applied(&mut self, bytes: u64, took: Duration) {
        self.span.applied += bytes;
        self.span.soonest = self.span.soonest.min(took);
        self.soonest = self.soonest.min(took);
    }

    /// The server says with an answer how many bytes it would leave to this end.
    pub(super) fn told(&mut self, bytes: u64) {
        self.told = bytes;
    }

    /// The server has answered the question.
    pub(super) fn granted(&mut self, room: Room) {
        self.is_asking = false;
        self.room = Room { bytes: room.bytes, writes: room.writes.min(self.wish.writes) };
        self.told = room.bytes;
    }

    /// What to ask the server now, while so much is under way.
    pub(super) fn poll(&mut self, out: Room, now: Instant) -> Option<Ask> {
        let time = now.saturating_duration_since(self.span.began);
        // Two round trips, so that what the last change did is seen.
        let round_trip = if self.soonest == Duration::MAX { Duration::ZERO } else { self.soonest.min(LONGEST_SPAN) };
        let is_over = time >= SPAN.max(round_trip * 2);
        if is_over && self.size == WindowSize::Adaptive {
            self.adapt(time, now);
        }
        let gives_back = self.told < self.room.bytes && out.bytes <= self.told;
        let shrinks = self.wish.bytes < self.room.bytes || self.wish.writes < self.room.writes;
        let fits = out.bytes <= self.wish.bytes && out.writes <= self.wish.writes;
        // One that lacks something asks again as long as it is the limit: another writer may have given some back.
        let lacks = (self.wish.bytes > self.room.bytes && self.span.full.bytes)
            || (self.wish.writes > self.room.writes && self.span.full.writes);
        if is_over {
            self.span = Span::new(now);
        }
        if self.is_asking || !(gives_back || (shrinks && fits) || (lacks && is_over)) {
            return None;
        }
        self.is_asking = true;
        self.room.bytes = self.room.bytes.min(self.told.max(LEAST_ROOM.bytes)).min(self.wish.bytes);
        self.room.writes = self.room.writes.min(self.wish.writes);
        Some(Ask { wants: self.wish, obeys: self.room })
    }

    /// At the end of a span.
    fn adapt(&mut self, time: Duration, now: Instant) {
        let rate = self.span.applied as f64 / time.as_secs_f64().max(f64::EPSILON);
        let has_all = self.room.bytes >= self.wish.bytes && self.room.writes >= self.wish.writes;
        if self.span.full != Full::default() && self.span.applied > 0 && has_all {
            let is_soon = self.span.soonest <= self.soonest * LATE;
            match self.grown {
                Some(growth) if growth.is_undone => {
                    if now.saturating_duration_since(growth.at) >= TRY_AGAIN {
                        self.grow(rate, now);
                    }
                }
                Some(growth) if !is_soon && rate <= growth.rate * RISE => {
                    self.wish = growth.from;
                    self.grown = Some(Growth { at: now, is_undone: true, ..growth });
                }
                _ => self.grow(rate, now),
            }
        }
        if now.saturating_duration_since(self.used_since) >= IDLE {
            let enough = |used: u64, least: u64, wish: u64| if used * 4 <= wish { (used * 2).max(least) } else { wish };
            if self.span.full == Full::default() {
                let writes = enough(self.used.writes.into(), LEAST_ROOM.writes.into(), self.wish.writes.into());
                self.wish = Room {
                    bytes: enough(self.used.bytes, LEAST_ROOM.bytes, self.wish.bytes),
                    writes: u32::try_from(writes).unwrap_or(self.wish.writes),
                };
            }
            (self.used, self.used_since) = (Room { bytes: 0, writes: 0 }, now);
        }
    }

    fn grow(&mut self, rate: f64, now: Instant) {
        let (from, full) = (self.wish, self.span.full);
        if full.bytes {
            self.wish.bytes = (from.bytes * 2).min(MOST_ROOM.bytes);
        }
        if full.writes {
            self.wish.writes = from.writes.saturating_mul(2).min(MOST_ROOM.writes);
        }
        if self.wish != from {
            self.grown = Some(Growth { from, rate, at: now, is_undone: false });
        }
    }
}

/// The shortest span after which a window changes: long against what disturbs a single round trip.
const SPAN: Duration = Duration::from_millis(20);

/// Answers later than this do not make spans longer.
const LONGEST_SPAN: Duration = Duration::from_millis(500);

/// A rate that has risen by a tenth shows that a larger window was of use.
const RISE: f64 = 1.1;

/// The soonest answers of a span may be this many times as late as the soonest one ever. Later ones wait in a queue,
/// which a larger window makes longer.
const LATE: u32 = 2;

/// How long a window is the limit before it grows although that was of no use the last time.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// For how long a window must not have been used before it shrinks.
const IDLE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use remora_messenger::{Delivery, Dispatcher, Messenger};

    use super::*;
    use crate::link::{self, Security};
    use crate::rules::Generation;

    struct Silent;

    impl Dispatcher for Silent {
        fn message(&self, _: &Connection, _: Delivery) {}
    }

    /// A server at an address where none is, with a connection.
    fn remote() -> (Messenger, Remote, Instant) {
        let options = link::options(&Security::default(), 1, 1);
        let messenger = Messenger::new(link::client_policy(), &options, Arc::new(Silent)).unwrap();
        let address: Address = "tcp:127.0.0.1:1".parse().unwrap();
        let now = Instant::now();
        let mut remote = Remote::new(address.clone(), WindowSize::Fixed(3), now);
        remote.connected(messenger.connect(&address), now);
        (messenger, remote, now)
    }

    #[test]
    fn what_is_under_way_stays_within_the_room() {
        let (_messenger, mut remote, now) = remote();
        let grant = |remote: &mut Remote, bytes| remote.window().unwrap().granted(Room { bytes, writes: 3 });
        let (all, some) = (10 << 20, 6 << 20);
        grant(&mut remote, all);
        let mut version = Generation::NONE.next().unwrap().start();
        let mut write = |remote: &mut Remote, bytes: usize| {
            version = version.next().unwrap();
            remote.write(version, (Message::default(), bytes as u64), now);
            version
        };
        assert!(remote.has_room(1 << 30), "one write always has room");
        let first = write(&mut remote, 6 << 20);
        assert!(remote.has_room(4 << 20) && !remote.has_room((4 << 20) + 1));
        let second = write(&mut remote, 3 << 20);
        write(&mut remote, 1 << 20);
        assert!(!remote.has_room(1), "as many writes as may be under way");
        remote.applied(first, now);
        assert!(remote.has_room(some) && !remote.has_room(some + 1));
        grant(&mut remote, 4 << 20);
        assert!(!remote.has_room(1), "no more room than is under way");
        remote.applied(second, now);
        remote.disconnect(now);
        assert!(remote.has_room(u64::MAX), "a server that gets no writes holds up no writer");
    }

    #[test]
    fn a_server_that_owes_nothing_is_never_late_and_pauses_grow_until_its_copy_is_whole() {
        let (messenger, mut remote, now) = remote();
        let limit = Duration::from_secs(5);
        let later = now + Duration::from_secs(60);
        assert!(!remote.is_overdue(limit, later));
        remote.send(Message::default(), now);
        assert!(!remote.is_overdue(limit, now + limit) && remote.is_overdue(limit, now + limit * 2));
        remote.heard(false, now + limit); // progress
        assert!(!remote.is_overdue(limit, now + limit * 2) && remote.is_overdue(limit, later));
        remote.excuse(Duration::from_secs(50), later);
        assert!(!remote.is_overdue(limit, later), "this process was stopped for 50 s of 55");
        assert!(remote.is_overdue(limit, later + Duration::from_millis(1)));
        remote.heard(true, later);
        remote.excuse(limit, later);
        assert!(!remote.is_overdue(limit, later + limit * 2) && remote.heard == later, "it was answered");
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert!(remote.disconnect(now) && !remote.is_due(now));
            assert!(!remote.disconnect(now), "it has no connection");
            pauses.push((remote.next_try - now).as_millis());
            assert!(remote.is_due(remote.next_try));
            remote.connected(messenger.connect(&remote.address().clone()), now);
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000]);
        remote.is_whole();
        remote.disconnect(now);
        assert_eq!(remote.next_try - now, FIRST_PAUSE);
    }

    const NOTHING: Room = Room { bytes: 0, writes: 0 };

    /// A server behind a link of a delay and a rate, which grants what it is asked for; and a client that always has
    /// a write of this length to send. Returns the writes that were applied in the last second.
    fn play(window: &mut Window, began: Instant, link: (Duration, f64), bytes: u64, time: u64) -> usize {
        let (delay, rate) = link;
        let mut under_way: std::collections::VecDeque<(Instant, Instant)> = Default::default();
        let (mut free, mut count) = (began, 0);
        for step in 0..time * 10 {
            let now = began + Duration::from_micros(step * 100);
            while under_way.front().is_some_and(|(_, answered)| *answered <= now) {
                let (sent, answered) = under_way.pop_front().unwrap();
                window.applied(bytes, answered - sent);
                count += usize::from(step >= (time - 1000) * 10);
            }
            let out = |under_way: &std::collections::VecDeque<_>| {
                let writes = under_way.len() as u32;
                Room { bytes: u64::from(writes) * bytes, writes }
            };
            // Faster than any link here.
            for _ in 0..20 {
                if !window.has_room(out(&under_way), bytes) {
                    break;
                }
                free = free.max(now) + Duration::from_secs_f64(bytes as f64 / rate);
                under_way.push_back((now, free + delay));
                window.sent(out(&under_way));
            }
            if let Some(Ask { wants, obeys }) = window.poll(out(&under_way), now) {
                assert!(out(&under_way).bytes <= obeys.bytes.max(LEAST_ROOM.bytes));
                window.granted(wants);
            }
        }
        count
    }

    #[test]
    fn a_window_grows_until_the_link_is_full_and_no_further() {
        let link = (Duration::from_millis(5), 100e6); // 500 kB, 122 writes
        let began = Instant::now();
        let played = |size| {
            let mut window = Window::new(size, began);
            let count = play(&mut window, began, link, 4096, 3000);
            (count, window.room)
        };
        let (few, _) = played(WindowSize::Fixed(32));
        let (many, _) = played(WindowSize::Fixed(1024));
        let (adaptive, room) = played(WindowSize::Adaptive);
        assert!(few * 10 <= many * 4, "{few} and {many}");
        assert!(adaptive * 100 >= many * 97, "{adaptive} and {many}");
        assert!((122..=512).contains(&room.writes) && room.bytes == LEAST_ROOM.bytes, "{room:?}");
        // 2 GB/s: 10 MB, ten writes of 1 MiB.
        let mut window = Window::new(WindowSize::Adaptive, began);
        let count = play(&mut window, began, (Duration::from_millis(5), 2e9), 1 << 20, 3000);
        assert!(count >= 1850, "{count}");
        assert!((10 << 20..=MOST_ROOM.bytes).contains(&window.room.bytes), "{:?}", window.room);
        assert_eq!(window.room.writes, LEAST_ROOM.writes);
    }

    #[test]
    fn a_window_that_is_not_used_shrinks() {
        let began = Instant::now();
        let mut window = Window::new(WindowSize::Adaptive, began);
        play(&mut window, began, (Duration::from_millis(20), 100e6), 4096, 2000);
        let large = window.room;
        assert!(large.writes > 100, "{large:?}");
        let mut now = began + Duration::from_secs(2);
        for _ in 0..300 {
            now += Duration::from_millis(20);
            if let Some(Ask { wants, .. }) = window.poll(NOTHING, now) {
                window.granted(wants);
            }
        }
        assert_eq!(window.room, LEAST_ROOM);
    }

    #[test]
    fn what_a_server_wants_back_is_given_back_once_it_is_not_under_way() {
        let now = Instant::now();
        let mut window = Window::new(WindowSize::Fixed(1000), now);
        assert!(!window.has_room(LEAST_ROOM, 1));
        let later = now + SPAN;
        let Some(Ask { wants, obeys }) = window.poll(NOTHING, later) else { unreachable!("it lacks room") };
        assert_eq!((wants, obeys), (Room { bytes: MOST_ROOM.bytes, writes: 1000 }, LEAST_ROOM));
        assert_eq!(window.poll(NOTHING, later + SPAN), None, "one question at a time");
        let (large, small) = (20 << 20, 8 << 20);
        window.granted(Room { bytes: large, writes: 2000 });
        assert_eq!(window.room, Room { bytes: large, writes: 1000 });
        window.told(small);
        let out = Room { bytes: 10 << 20, writes: 500 };
        assert!(!window.has_room(out, 1));
        assert_eq!(window.poll(out, later), None);
        let out = Room { bytes: small, ..out };
        assert_eq!(window.poll(out, later).map(|ask| ask.obeys), Some(Room { bytes: small, writes: 1000 }));
    }

    #[test]
    fn sizes_are_read_and_shown() {
        for text in ["adaptive", "fixed:1", "fixed:1024"] {
            assert_eq!(text.parse::<WindowSize>().unwrap().to_string(), text);
        }
        for text in ["", "fixed", "fixed:0", "fixed:9999999", "fixed:x", "Adaptive"] {
            assert_eq!(text.parse::<WindowSize>(), Err(NotAWindow));
        }
    }
}
