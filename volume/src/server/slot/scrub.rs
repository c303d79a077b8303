//! Scrub: the steps in which every block of a copy is read and checked. The keeper's thread calls them, with the lock
//! held for one step at a time.

use std::ops::Range;

use bytes::Bytes;
use remora_messenger::Connection;

use super::{Done, State};
use crate::disk::scrub::{self, Findings};
use crate::disk::superblock::Superblock;
use crate::server::answers;
use crate::server::kept::Kept;
use crate::wire::{Cause, Reply};

impl State {
    /// A client wants a scrub. It is answered by the keeper's thread.
    pub(in crate::server) fn ask_for_scrub(&mut self, connection: &Connection) -> Done {
        if self.store.is_none() {
            return Done::Refused(Cause::OutOfStep, "the server has no copy of this volume".into());
        }
        if !self.scrubbing.ask(connection) {
            return Done::Refused(Cause::OutOfStep, "another client waits for a scrub of this copy: try again".into());
        }
        Done::Later
    }

    pub(in crate::server) fn is_scrub_asked(&self) -> bool {
        self.scrubbing.is_asked()
    }

    /// The blocks that are to be read now.
    pub(in crate::server) fn next_piece(&mut self, now: u64) -> Option<Range<u64>> {
        let blocks = self.store.as_ref()?.layout().blocks();
        let is_due = self.kept.as_ref().map_or_else(|| self.scrubbing.is_due(), |kept| kept.is_scrub_due(now));
        self.scrubbing.next_piece(blocks, is_due)
    }

    /// Reads these blocks in memory. Returns those that the extents must have, too.
    pub(in crate::server) fn scrub_memory(&mut self, piece: Range<u64>, findings: &mut Findings) -> Vec<u64> {
        let (Some(store), kept) = (&self.store, &mut self.kept) else { return Vec::new() };
        let journal = kept.as_mut().map(Kept::journal);
        let is_moved = |block| journal.as_ref().is_some_and(|journal| journal.is_moved(block));
        let moved = scrub::in_memory(is_moved, store, piece, findings);
        if !findings.damaged.is_empty() {
            self.found_damaged(&findings.damaged);
        }
        moved
    }

    /// This was found. At the end, the superblock says when that was.
    pub(in crate::server) fn scrubbed(
        &mut self,
        piece: &Range<u64>,
        findings: &Findings,
        now: u64,
    ) -> Option<Superblock> {
        let found = (findings.repaired.len(), findings.damaged.len());
        let (is_complete, told) = self.scrubbing.read(piece, self.shape.blocks(), found);
        if let Some((asker, findings)) = told {
            answers::answer(&asker, &Reply::Scrubbing(findings), Bytes::new());
        }
        if !is_complete {
            return None;
        }
        tracing::info!(volume = %self.shape.volume(), "all blocks of a copy were read and checked");
        self.kept.as_mut().map(|kept| kept.scrubbed(now))
    }
}
