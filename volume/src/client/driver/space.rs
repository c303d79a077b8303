//! Space: servers that have no space for a write. If writes cannot be acknowledged without them, callers are told so at
//! once. What was accepted is kept, in its order, and is written when there is space again.

use std::sync::PoisonError;

use super::Driver;
use crate::client::Error;
use crate::message::ServerId;

impl Driver {
    /// A server has no space, or no memory, for what it was asked.
    pub(super) fn refused(&mut self, server: ServerId, why: &str) {
        let Some(remote) = self.remotes.get(server.0) else { return };
        tracing::debug!(server = %remote.address(), why, "a server refuses");
        self.disconnected(server, why);
        if self.writer.refused(server) {
            self.remote(server, |remote, now| {
                remote.is_tried_soon(now);
                true
            });
        }
    }

    /// Whether there is space enough has perhaps changed. Callers that wait for a write are told that it has to wait.
    pub(super) fn look_for_space(&mut self) {
        let servers = if self.is_over { Vec::new() } else { self.writer.lacks_space() };
        let was_short = self.shared.is_short();
        if servers.is_empty() {
            if was_short {
                self.shared.set_no_space(None);
            }
            if was_short && !self.is_over {
                tracing::info!(volume = %self.shape.volume(), "there is space again: writes are accepted");
            }
            return;
        }
        if !was_short {
            let why = self.reasons(&servers);
            tracing::warn!(volume = %self.shape.volume(), why, "writes are refused for lack of space, and reads go on");
            self.shared.set_no_space(Some(why));
        }
        let Some(why) = self.shared.no_space() else { return };
        let late = self.writes.values_mut().filter_map(|write| write.completion.split());
        let told: Vec<_> = late.collect();
        let flushes = self.flushes.drain(..).filter_map(|(_, mut flush)| flush.split());
        let told: Vec<_> = told.into_iter().chain(flushes).collect();
        told.into_iter().for_each(|done| self.tell(done, Error::NoSpace { why: why.clone() }));
    }

    /// Each server with its reason.
    fn reasons(&self, servers: &[ServerId]) -> String {
        let reason = |server: &ServerId| {
            let address = self.remotes.get(server.0).map(|remote| remote.address().to_string()).unwrap_or_default();
            let why = self.shared.left_out.get(server.0);
            let why = why.map(|why| why.lock().unwrap_or_else(PoisonError::into_inner).clone()).unwrap_or_default();
            format!("{address}: {why}")
        };
        servers.iter().map(reason).collect::<Vec<_>>().join("; ")
    }
}
