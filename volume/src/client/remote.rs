//! Remote: one server, as the driver sees it. What it was sent, since when it owes an answer, and when it is tried
//! again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use remora_messenger::{Address, Connection, Message};

use super::regions::Region;
use super::window::{Ask, Window, WindowSize};
use crate::version::Version;
use crate::wire::Room;

/// See the module's text.
// Larger than the bound: a question for each thing that the driver must know of a server at a moment.
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
    pub(super) outbox: Outbox,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use remora_messenger::{Delivery, Dispatcher, Messenger};

    use super::*;
    use crate::link::{self, Security};
    use crate::version::Generation;

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
}
