//! Coverage: whether a primary would continue a replica where it is.

use std::time::Duration;

use remora_redis::ReplId;

use super::Facts;
use crate::units::Size;

/// An estimate of the time from the question to the primary's `+CONTINUE`: a few round trips, and a busy server.
const HAND_OFF_TIME: Duration = Duration::from_millis(250);

impl Facts {
    /// Whether the server would continue a replica that has executed `history` up to `offset`, with room in its backlog
    /// for the bytes that clients write during the hand-off, `rate` of them per second. The error says why not.
    pub fn covers(&self, history: ReplId, offset: u64, rate: u64) -> Result<(), String> {
        let next = offset.saturating_add(1);
        if !self.continues(history, next) {
            return Err(self.other_history(history, offset));
        }
        let Some(backlog) = self.backlog else {
            return Err("the primary's INFO replication does not describe its backlog".into());
        };
        let end = backlog.end().saturating_sub(1);
        // The bytes that the primary can still write before it may drop the byte that the replica needs next. What it
        // holds beyond the size of its backlog it drops within milliseconds.
        let room = backlog.room(next);
        let needed = (rate as f64 * HAND_OFF_TIME.as_secs_f64()) as u64;
        if backlog.covers(next) && next >= backlog.kept() && room >= needed {
            return Ok(());
        }
        let advised = needed.max(end.saturating_sub(offset)).saturating_mul(2);
        let advised = advised.checked_next_power_of_two().unwrap_or(u64::MAX);
        Err(format!(
            "the primary's backlog of {} keeps offsets {} to {}, the replica is at {offset}, and clients write {}/s: set \
             repl-backlog-size to {} or more on the primary",
            Size::bytes(backlog.size),
            backlog.kept(),
            end,
            Size::bytes(rate),
            Size::bytes(advised)
        ))
    }

    /// Why the server does not continue `history` after `offset`.
    fn other_history(&self, history: ReplId, offset: u64) -> String {
        let Some(now) = self.replid else {
            return "the primary's INFO replication does not name its replication history".into();
        };
        match self.former {
            Some((former, end)) if former == history => format!(
                "the primary's history is {now} since offset {end}, and the replica is at offset {offset} of the former one, \
                 {history}"
            ),
            _ => format!("the primary's history is {now}, and the replica has another one, {history}"),
        }
    }
}
