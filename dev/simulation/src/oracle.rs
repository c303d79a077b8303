//! Oracle: what is true whatever the agents believe. The data that a server must hold at an offset of a history, as the
//! primaries that wrote it recorded; and when a command was written that must not be applied late, so that no agent
//! gets it that joined after.
//!
//! The source's side of the latter has the product's own arithmetic: when the server may have written what arrives, and
//! when the first command behind a snapshot arrived ([`Watched`]). The check knows when the server has written it in
//! truth.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use remora_redis::ReplId;
use remora_source::parts::{Arrivals, Written};

use super::wire::ServerId;

/// A data set, as a number that depends on every write that led to it and on their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Content(pub(super) u64);

/// The first byte of a command in the stream is its length. This second byte makes it a `FLUSHALL`.
pub(super) const FLUSH: u8 = 0xFF;

/// The same of a command that must not be applied late. To the data it is one like any other.
pub(super) const LATE: u8 = 0xFE;

impl Content {
    /// No keys.
    pub(super) const EMPTY: Content = Content(0);

    /// The data set after one command of the stream.
    pub(super) fn after(self, command: &[u8]) -> Content {
        if command.get(1) == Some(&FLUSH) {
            return Content::EMPTY;
        }
        let mut sum = self.0 ^ 0x9E37_79B9_7F4A_7C15;
        for chunk in command.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            sum = mixed(sum ^ u64::from_le_bytes(word));
        }
        // Never the number of the empty data set.
        Content(sum | 1)
    }

    /// The content of one slot of a snapshot of this data set. The first slot says what the snapshot holds.
    pub(super) fn slot(self, number: u64) -> u64 {
        if number == 0 { self.0 } else { mixed(self.0 ^ number.wrapping_mul(0x2545_F491_4F6C_DD1D)) }
    }

    /// The data set of a server that has loaded these slots: the snapshot's if all of them are of one snapshot, in
    /// order and `total` in number, and else one that no server may have.
    pub(super) fn of_slots(slots: &[u64], total: u64) -> Content {
        let whole = Content(slots.first().copied().unwrap_or(0));
        let is_whole = slots.len() as u64 == total;
        if is_whole && slots.iter().zip(0..).all(|(&slot, number)| slot == whole.slot(number)) {
            return whole;
        }
        Content::broken(slots)
    }

    /// A data set that no server may report as a replica.
    pub(super) fn broken(slots: &[u64]) -> Content {
        Content(slots.iter().fold(0xBAD, |sum, &slot| mixed(sum ^ slot)) | 1)
    }
}

pub(super) fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Oracle {
    contents: BTreeMap<ReplId, BTreeMap<u64, Content>>,
    /// The history before each one, and the last offset that both share.
    before: BTreeMap<ReplId, (ReplId, u64)>,
}

impl Oracle {
    /// A history begins at `offset` with this data set; `before`: it goes on behind that offset of another one.
    pub(super) fn begin(&mut self, replid: ReplId, before: Option<(ReplId, u64)>, offset: u64, content: Content) {
        if let Some(before) = before {
            self.before.insert(replid, before);
        }
        self.wrote(replid, offset, content);
    }

    /// A primary has executed a write that ends at `offset`.
    pub(super) fn wrote(&mut self, replid: ReplId, offset: u64, content: Content) {
        self.contents.entry(replid).or_default().insert(offset, content);
    }

    /// What a server at this offset of this history holds. `None`: no primary has written it.
    pub(super) fn expected(&self, mut replid: ReplId, offset: u64) -> Option<Content> {
        let at = |replid: &ReplId| self.contents.get(replid).and_then(|written| written.get(&offset)).copied();
        // As many steps as there are histories, so that the search ends whatever was recorded.
        for _ in 0..=self.before.len() {
            if let Some(content) = at(&replid) {
                return Some(content);
            }
            match self.before.get(&replid) {
                Some(&(before, last)) if offset <= last => replid = before,
                _ => return None,
            }
        }
        None
    }
}

/// From the fork to the moment at which the source has its answer. What is written in between is taken to be written at
/// the end of that time.
const ANSWER_TAKES: Duration = Duration::from_secs(1);

/// What a source knows of the stream in its journal.
#[derive(Debug)]
pub(super) struct Watched {
    arrivals: Arrivals,
    written: Written,
    /// The beginning of a command.
    rest: Vec<u8>,
    /// Offset of the last byte that has arrived.
    offset: u64,
    /// When something arrived last.
    last: Instant,
}

impl Watched {
    /// The journal begins behind this offset.
    pub(super) fn new(now: Instant, offset: u64) -> Watched {
        Watched { arrivals: Arrivals::default(), written: Written::new(now), rest: Vec::new(), offset, last: now }
    }

    pub(super) fn stream(&mut self, now: Instant, bytes: &[u8]) {
        self.last = now;
        let at = self.written.read(now, Some(bytes.len()), usize::MAX);
        for byte in bytes {
            self.offset += 1;
            self.rest.push(*byte);
            if self.rest.len() >= 2 && self.rest.len() == usize::from(self.rest[0].max(2)) {
                if self.rest[1] == LATE {
                    self.arrivals.note(self.offset, at);
                }
                self.rest.clear();
            }
        }
    }

    /// The connection is there. A read that waits for bytes returns without, if nothing has arrived in that time.
    pub(super) fn reads(&mut self, now: Instant, waits: Duration) {
        if now.saturating_duration_since(self.last) >= waits {
            self.written.read(now, None, usize::MAX);
        }
    }

    /// Another connection goes on with the stream.
    pub(super) fn resumed(&mut self) {
        self.written.resumed();
    }

    pub(super) fn first_behind(&mut self, offset: u64) -> Option<Instant> {
        self.arrivals.first_behind(offset)
    }

    /// Offset of the last byte that has arrived.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }
}

/// Every command that must not be applied late, as it was written.
#[derive(Default)]
pub(super) struct Truth {
    written: Vec<(ServerId, ReplId, u64, Duration)>,
    /// Times in which bytes were under way to the source for long. What is written then is not known to be written.
    cuts: Vec<(Duration, Duration)>,
    /// The first fault.
    pub(super) finding: Option<String>,
}

impl Truth {
    pub(super) fn wrote(&mut self, server: ServerId, replid: ReplId, offset: u64, now: Duration) {
        self.written.push((server, replid, offset, now));
    }

    /// Nothing gets from a server to the source until then.
    pub(super) fn cut(&mut self, now: Duration, until: Duration) {
        self.cuts.push((now, until));
    }

    /// A snapshot of this server is given to an agent that joined then. `range`: the offset of the snapshot, and the
    /// last one that the source has.
    pub(super) fn offered(&mut self, server: ServerId, replid: ReplId, range: (u64, u64), joined: Duration) {
        let is_under_way = |at: Duration| {
            self.cuts.iter().any(|(from, until)| (*from..*until + ANSWER_TAKES).contains(&(at + ANSWER_TAKES)))
        };
        let is_late = |&&(of, history, offset, at): &&(ServerId, ReplId, u64, Duration)| {
            of == server
                && history == replid
                && range.0 < offset
                && offset <= range.1
                && at + ANSWER_TAKES < joined
                && !is_under_way(at)
        };
        if let Some((_, _, offset, at)) = self.written.iter().find(is_late) {
            self.finding.get_or_insert(format!(
                "an agent that joined at {joined:?} is given a command that must not be applied late: it ends at {offset}, and \
                 was written at {at:?}"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(digit: &str) -> Option<ReplId> {
        digit.repeat(40).parse().ok()
    }

    #[test]
    fn the_order_of_writes_decides_and_slots_of_two_snapshots_make_no_data_set() {
        let (one, two) = ([4, 1, 2, 3], [4, 9, 9, 9]);
        let content = Content::EMPTY.after(&one).after(&two);
        assert_ne!(content, Content::EMPTY.after(&two).after(&one));
        assert_eq!(content.after(&[4, FLUSH, 0, 0]), Content::EMPTY);
        let slots: Vec<u64> = (0..5).map(|number| content.slot(number)).collect();
        assert_eq!(Content::of_slots(&slots, 5), content);
        assert_ne!(Content::of_slots(&slots[..4], 5), content);
        assert_ne!(Content::of_slots(&[slots[0], slots[2], slots[1]], 3), content);
        let other = content.after(&one);
        assert_ne!(Content::of_slots(&[slots[0], other.slot(1)], 2), content);
    }

    #[test]
    fn a_history_holds_what_the_one_before_held_up_to_its_beginning() {
        let mut oracle = Oracle::default();
        let (Some(a), Some(b)) = (id("a"), id("b")) else { return };
        oracle.begin(a, None, 0, Content(1));
        oracle.wrote(a, 10, Content(3));
        oracle.wrote(a, 20, Content(5));
        oracle.begin(b, Some((a, 10)), 10, Content(3));
        oracle.wrote(b, 20, Content(7));
        assert_eq!(oracle.expected(b, 0), Some(Content(1)));
        assert_eq!(oracle.expected(b, 10), Some(Content(3)));
        assert_eq!(oracle.expected(b, 20), Some(Content(7)));
        assert_eq!(oracle.expected(a, 20), Some(Content(5)));
        assert_eq!(oracle.expected(b, 15), None);
    }
}

#[cfg(test)]
mod late_tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_command_from_before_an_agent_joined_is_a_finding_and_one_that_the_snapshot_has_is_not() {
        let replid = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b".parse().unwrap();
        let (server, second) = (ServerId(0), Duration::from_secs(1));
        let mut truth = Truth::default();
        truth.wrote(server, replid, 100, second * 10);
        for (range, joined) in [((100, 200), 20), ((50, 99), 20), ((50, 200), 10)] {
            truth.offered(server, replid, range, second * joined);
            assert_eq!(truth.finding, None);
        }
        truth.offered(server, replid, (99, 100), second * 20);
        assert!(truth.finding.unwrap().contains("ends at 100"));
    }

    #[test]
    fn commands_are_found_however_they_arrive() {
        let now = Instant::now();
        let bytes =
            [&[8, 1, 0, 0, 0, 0, 0, 0][..], &[9, LATE, 0, 0, 0, 0, 0, 0, 0], &[8, 1, 0, 0, 0, 0, 0, 0]].concat();
        for piece in 1..bytes.len() {
            let mut watched = Watched::new(now, 100);
            bytes.chunks(piece).for_each(|piece| watched.stream(now, piece));
            assert_eq!((watched.first_behind(116).is_some(), watched.first_behind(117)), (true, None));
        }
    }
}
