//! Window: how many writes, and how many bytes of them, may be under way at one server.
//!
//! ```text
//!   room = what the server has granted    the server's bound, from the memory that all writers share
//!   wish = what this end wants            grows while it is the limit, shrinks when less is used
//! ```
//!
//! A wish doubles if the window was the limit for a span of time. That was of use if the rate has risen, or if answers
//! are not much later than the soonest one: then it doubles again. Otherwise the server or the network is the limit,
//! and more writes under way only wait longer: the wish is as before, and tries again after a second.
//!
//! It decides only; time goes in.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::link::{LEAST_ROOM, MOST_ROOM};
use crate::wire::Room;

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

/// See the module's text.
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

    use super::*;

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
