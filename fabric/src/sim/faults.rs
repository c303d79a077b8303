//! What may go wrong, as data: how often, and how far. Nothing happens here.

use std::ops::RangeInclusive;

/// A probability, in parts per million.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Chance(pub u32);

impl Chance {
    /// It never happens.
    pub const NEVER: Chance = Chance(0);
    /// It always happens.
    pub const ALWAYS: Chance = Chance(1_000_000);

    /// So many in a hundred.
    pub const fn percent(percent: u32) -> Chance {
        Chance(percent * 10_000)
    }
}

/// All that a simulated network may do to a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Steps (polls) until a read completes.
    pub delay_steps: RangeInclusive<u32>,
    /// Whether reads that are due at the same step complete in any order.
    pub shuffle: bool,
    /// Per read: one part of the bytes is taken when it is posted, the other when it completes.
    pub torn_read: Chance,
    /// Per read: no answer comes; after [`Faults::TIMEOUT_STEPS`] it fails with `TimedOut` and retires the peer.
    pub lost_answer: Chance,
    /// Per step with reads outstanding: the source is gone for this peer.
    pub lost_peer: Chance,
    /// Per step with reads outstanding: the region is revoked for this peer.
    pub revoked_region: Chance,
    /// Per connect: nobody there.
    pub failed_connect: Chance,
}

impl Faults {
    /// Steps after which a read without answer fails. Above any sensible delay, and few enough to be polled through.
    pub const TIMEOUT_STEPS: u64 = 1000;

    /// A network on which nothing goes wrong and everything is at once.
    pub fn none() -> Faults {
        Faults {
            delay_steps: 1..=1,
            shuffle: false,
            torn_read: Chance::NEVER,
            lost_answer: Chance::NEVER,
            lost_peer: Chance::NEVER,
            revoked_region: Chance::NEVER,
            failed_connect: Chance::NEVER,
        }
    }

    /// An honest network: it delays, shuffles and tears, as each real one does, but loses nothing.
    pub fn honest() -> Faults {
        Faults { delay_steps: 1..=20, shuffle: true, torn_read: Chance::percent(50), ..Faults::none() }
    }

    /// A network on which a peer rarely lives through a few hundred reads.
    pub fn hostile() -> Faults {
        Faults {
            lost_answer: Chance(1_000),
            lost_peer: Chance(2_000),
            revoked_region: Chance(500),
            failed_connect: Chance::percent(10),
            ..Faults::honest()
        }
    }
}

/// Nothing goes wrong.
impl Default for Faults {
    fn default() -> Self {
        Faults::none()
    }
}
