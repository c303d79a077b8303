//! Late: commands of the model's stream that must not be applied late, and whether a source gives such a command to an
//! agent that joined after it was written.
//!
//! The source's side has the product's own arithmetic: when the server may have written what arrives, and when the
//! first command behind a snapshot arrived. The check knows when the server has written it in truth.

use std::time::{Duration, Instant};

use remora_redis::ReplId;

use super::oracle::LATE;
use super::wire::ServerId;
use remora_source::parts::Arrivals;
use remora_source::parts::Written;

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
