//! Failing: what becomes of a copy whose memory or store has failed, or that is removed, and what its clients are told.

use super::State;
use crate::copy::Copy;
use crate::disk::files::Failure;
use crate::server::answers;
use crate::server::exports::Exports;
use crate::wire::{Cause, Mode};

impl State {
    /// A scrub has found damage. The writers are told, and take the copy back.
    pub(in crate::server) fn found_damaged(&mut self, blocks: &[u64]) {
        tracing::error!(volume = %self.shape.volume(), ?blocks, "blocks are damaged in memory: the copy is behind");
        self.damaged();
        self.say();
        for session in self.sessions.iter().filter(|session| session.mode == Mode::Write) {
            let text = format!("a scrub has found {} damaged blocks in the memory of this host", blocks.len());
            answers::refuse(&session.connection, Cause::Damaged, &text);
        }
    }

    /// The store has failed, and the copy is lost with it: nothing of what it has promised can be kept. The server is
    /// one without a copy, until a writer gives it one.
    pub(in crate::server) fn lose(&mut self, failure: &Failure) {
        tracing::error!(volume = %self.shape.volume(), %failure, "the copy is lost");
        if let Some(kept) = &mut self.kept {
            kept.lose();
        }
        self.forget(&failure.to_string());
    }

    /// The copy is removed, because a client wants that. Its folder is the caller's. Returns whether there was a copy.
    pub(in crate::server) fn remove(&mut self, exports: &Exports) -> bool {
        let was_there = self.store.is_some();
        if let Some(region) = self.region {
            exports.revoke(region);
        }
        if let Some(kept) = &mut self.kept {
            kept.lose(); // what is left of it if the folder cannot be removed is not believed
        }
        if was_there {
            tracing::info!(volume = %self.shape.volume(), "a copy is removed: a client wants it");
            self.forget("the copy was removed");
        }
        was_there
    }

    /// This server has no copy any more. Its clients are told why.
    fn forget(&mut self, why: &str) {
        self.copy = Copy::default();
        self.say(); // its region may still be mapped
        (self.store, self.kept, self.grant, self.region) = (None, None, None, None);
        self.catch_ups += 1;
        self.compared = None;
        let asker = self.scrubbing.end();
        let connections = self.sessions.iter().map(|session| &session.connection).chain(&asker);
        connections.for_each(|connection| answers::refuse(connection, Cause::Lost, why));
    }
}
