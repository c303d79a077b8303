//! Readers that hold up a snapshot: those that take nothing for a while, and those that take too little for long.
//!
//! A reader is in the way if the writer of a windowed snapshot waits for the slot that it needs next, or if it still
//! reads a complete snapshot that replicas which wait cannot use. The primary's fork, and what the primary holds back
//! for the source, last as long as that. So a reader loses its place
//!
//! - if it passes no slot for the stall limit, or
//! - if it is late: while it is in the way, its lateness grows with the time, and shrinks by what [`LEAST_RATE`] would
//!   take for the slots that it passes. A reader that keeps this rate is never late. One that takes a slot just before
//!   each stall limit is late after a few of them.

use std::collections::BTreeMap;
use std::time::Instant;

use super::pace::LEAST_RATE;
use super::record::Replica;
use super::{Reading, Rules, Session};

/// How late a reader may be, in stall limits: with the default of 15 s, a minute. Less would drop a reader whose link
/// or server pauses now and then.
const LATE_LIMITS: u32 = 4;

/// Finds the replicas that have to make room, each with what it is told. `others_wait`: replicas wait for the next
/// snapshot, which cannot begin before the readers of this one are done.
pub(super) fn find(
    now: Instant,
    (rules, reading): (&Rules, Reading),
    (is_sealed, others_wait): (bool, bool),
    replicas: &mut BTreeMap<Session, Replica>,
) -> Vec<(Session, String)> {
    let writer_waits = reading.writer_waits > 0 && !is_sealed;
    let mut stalled = Vec::new();
    for (&session, replica) in replicas {
        let below = replica.at.slots_below;
        let is_in_the_way = replica.is_reading()
            && below < reading.published
            && (others_wait || (writer_waits && below <= reading.retired));
        replica.pace.look(now, below, rules.slot_bytes, is_in_the_way);
        if below >= reading.published {
            // It has all that there is. A server that saves to disk publishes nothing for as long as that takes.
            replica.moved = now;
        }
        if !is_in_the_way {
            continue;
        }
        let limit = rules.stall_limit;
        let what = if now.duration_since(replica.moved) > limit {
            format!("no slot for {} s", limit.as_secs())
        } else if replica.pace.late > limit * LATE_LIMITS {
            format!("less than {} KiB/s for more than {} s", LEAST_RATE >> 10, (limit * LATE_LIMITS).as_secs())
        } else {
            continue;
        };
        let text = format!(
            "the replica took {what} while the source's table was full or others waited for the next snapshot; give \
             the source more --memory or the replica a faster server, or raise --stall-timeout on the source"
        );
        stalled.push((session, text));
    }
    stalled
}
