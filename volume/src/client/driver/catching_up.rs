//! Catching up: what is said of it, in the log and to callers. Once when it begins, at each tenth of the copy, and when
//! the copy is whole.

use std::sync::atomic::Ordering;

use super::Driver;
use crate::client::NO_CATCH_UP;
use crate::message::ServerId;

/// Parts of a copy after each of which the log says how far a catch-up is.
const PARTS: u64 = 10;

impl Driver {
    pub(super) fn catch_up_begins(&self, server: ServerId) {
        if let Some(remote) = self.remotes.get(server.0) {
            tracing::info!(server = %remote.address(), "a copy catches up");
        }
        self.set_compared(server, 0);
    }

    /// A server says how far it is.
    pub(super) fn catch_up_goes_on(&self, server: ServerId, compared: u64) {
        let (before, blocks) = (self.set_compared(server, compared), self.shape.blocks());
        let Some(remote) = self.remotes.get(server.0).filter(|_| before != NO_CATCH_UP) else { return };
        if let Some(percent) = part_reached(before, compared, blocks) {
            tracing::info!(server = %remote.address(), compared, blocks, "a copy catches up: {percent} %");
        }
    }

    pub(super) fn catch_up_is_complete(&self, server: ServerId) {
        self.set_compared(server, NO_CATCH_UP);
        if let Some(remote) = self.remotes.get(server.0) {
            tracing::info!(server = %remote.address(), "a copy is whole");
        }
    }

    /// The server was left out.
    pub(super) fn catch_up_ends(&self, server: ServerId) {
        self.set_compared(server, NO_CATCH_UP);
    }

    /// Returns what it was before.
    fn set_compared(&self, server: ServerId, compared: u64) -> u64 {
        let slot = self.shared.compared.get(server.0);
        slot.map_or(NO_CATCH_UP, |slot| slot.swap(compared, Ordering::Relaxed))
    }
}

/// The percentage that is to be said, if a part was completed between the two.
fn part_reached(before: u64, now: u64, blocks: u64) -> Option<u64> {
    let part = |compared: u64| compared.min(blocks).saturating_mul(PARTS).checked_div(blocks).unwrap_or(0);
    (part(now) > part(before)).then(|| part(now) * 100 / PARTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenth_is_said_once() {
        let said: Vec<u64> = (0..1000).filter_map(|at| part_reached(at, at + 1, 1000)).collect();
        assert_eq!(said, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
        assert_eq!(part_reached(0, 555, 1000), Some(50));
        assert_eq!(part_reached(555, 599, 1000), None);
        assert_eq!(part_reached(0, u64::MAX, 0), None);
    }
}
