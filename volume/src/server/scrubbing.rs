//! Scrubbing: how far the scrub of a copy is, and which client waits for it.
//!
//! A copy is scrubbed once a day, slowly. A client that asks for it begins it anew, and it goes on as fast as the host
//! permits: one client at a time.

use std::ops::Range;
use std::time::{Duration, Instant};

use remora_messenger::Connection;

use crate::wire::Findings;

/// See the module's text.
pub(super) struct Scrubbing {
    /// The block at which it goes on. `None`: none is under way.
    next: Option<u64>,
    findings: Findings,
    /// The client that waits for it, and when it was last told.
    asker: Option<(Connection, Instant)>,
    /// When the last one was complete, or the copy was made.
    ended: Instant,
}

impl Scrubbing {
    pub(super) fn new() -> Scrubbing {
        Scrubbing { next: None, findings: Findings::default(), asker: None, ended: Instant::now() }
    }

    /// A client wants to know what a scrub finds from now on. `false`: another one waits for its own.
    pub(super) fn ask(&mut self, connection: &Connection) -> bool {
        if self.asker.is_some() {
            return false;
        }
        self.asker = Some((connection.clone(), Instant::now()));
        (self.next, self.findings) = (Some(0), Findings::default());
        true
    }

    /// Whether a client waits.
    pub(super) fn is_asked(&self) -> bool {
        self.asker.is_some()
    }

    /// A connection is over.
    pub(super) fn leave(&mut self, connection: &Connection) {
        if self.asker.as_ref().is_some_and(|(asker, _)| asker == connection) {
            self.asker = None;
        }
    }

    /// The copy is gone. Returns the client that waits.
    pub(super) fn end(&mut self) -> Option<Connection> {
        self.next = None;
        self.asker.take().map(|(asker, _)| asker)
    }

    /// How many blocks were read. `None`: no scrub is under way.
    pub(super) fn under_way(&self) -> Option<u64> {
        self.next
    }

    /// Whether a copy that keeps no time of its own is to be scrubbed: the process has not ended since the last one.
    pub(super) fn is_due(&self) -> bool {
        self.ended.elapsed() >= SCRUB_EVERY
    }

    /// The blocks that are to be read now, of all blocks of the copy.
    pub(super) fn next_piece(&mut self, blocks: u64, is_due: bool) -> Option<Range<u64>> {
        if self.next.is_none() && is_due {
            (self.next, self.findings) = (Some(0), Findings::default());
        }
        self.next.map(|next| next..blocks.min(next + READ_AT_ONCE))
    }

    /// The blocks of `piece` were read, and this was found. Returns whether all blocks of the copy were read, and the
    /// client that is to be told.
    pub(super) fn read(
        &mut self,
        piece: &Range<u64>,
        blocks: u64,
        (repaired, damaged): (usize, usize),
    ) -> (bool, Option<(Connection, Findings)>) {
        if self.next != Some(piece.start) {
            return (false, None); // it was begun anew meanwhile
        }
        let is_complete = piece.end >= blocks;
        let Findings { repaired: were_repaired, damaged: were_damaged, .. } = self.findings;
        self.findings = Findings {
            read: piece.end,
            repaired: were_repaired + repaired as u64,
            damaged: were_damaged + damaged as u64,
            is_complete,
        };
        self.next = (!is_complete).then_some(piece.end);
        if is_complete {
            self.ended = Instant::now();
            return (true, self.asker.take().map(|(asker, _)| (asker, self.findings)));
        }
        let due = self.asker.as_mut().filter(|(_, told)| told.elapsed() >= TELL_EVERY);
        let told = due.map(|(asker, told)| {
            *told = Instant::now();
            asker.clone()
        });
        (false, told.map(|asker| (asker, self.findings)))
    }
}

/// A copy is scrubbed once a day.
pub(super) const SCRUB_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// 1 MiB, ten times a second if no client waits: a copy of 1 GiB in 100 seconds.
const READ_AT_ONCE: u64 = 256;

/// How often a client that waits is told how far it is.
const TELL_EVERY: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::link::Caller;
    use crate::link::Security;

    #[test]
    fn a_scrub_reads_every_block_once_and_then_waits_for_its_day() {
        let mut scrubbing = Scrubbing::new();
        assert_eq!(scrubbing.next_piece(600, false), None);
        let mut pieces = Vec::new();
        while let Some(piece) = scrubbing.next_piece(600, pieces.is_empty()) {
            let (is_complete, told) = scrubbing.read(&piece, 600, (1, 2));
            assert!(told.is_none() && is_complete == (piece.end == 600));
            pieces.push(piece);
        }
        assert_eq!(pieces, [0..256, 256..512, 512..600]);
        assert_eq!(scrubbing.findings, Findings { read: 600, repaired: 3, damaged: 6, is_complete: true });
        assert!(!scrubbing.is_due() && scrubbing.under_way().is_none());
    }

    #[test]
    fn a_scrub_is_for_one_client_at_a_time_and_goes_on_without_one_that_has_gone() {
        let client = || Caller::connect(&"tcp:127.0.0.1:1".parse().unwrap(), &Security::default()).unwrap();
        let (one, other) = (client(), client());
        let mut scrubbing = Scrubbing::new();
        assert!(scrubbing.ask(one.connection()) && !scrubbing.ask(other.connection()));
        let piece = scrubbing.next_piece(600, false).unwrap();
        assert!(!scrubbing.read(&piece, 600, (0, 1)).0);
        scrubbing.leave(other.connection());
        assert!(scrubbing.is_asked());
        scrubbing.leave(one.connection());
        let begun = scrubbing.next_piece(600, false).unwrap();
        assert!(!scrubbing.is_asked() && begun == (256..512));
        // The next client's begins anew. A piece of the former one does not count for it.
        assert!(scrubbing.ask(other.connection()));
        assert_eq!(scrubbing.read(&begun, 600, (0, 5)), (false, None));
        let mut last = (false, None);
        while let Some(piece) = scrubbing.next_piece(600, false) {
            last = scrubbing.read(&piece, 600, (0, 0));
        }
        let found = Findings { read: 600, is_complete: true, ..Findings::default() };
        assert_eq!(last, (true, Some((other.connection().clone(), found))));
    }
}
