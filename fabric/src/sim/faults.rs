//! The faults of a simulated network, as data.

use std::ops::RangeInclusive;

/// A probability, in parts per million.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Chance(pub u32);

impl Chance {
    /// It never happens.
    pub const NEVER: Chance = Chance(0);
    /// It always happens.
    pub const ALWAYS: Chance = Chance(1_000_000);

    /// `percent` in a hundred.
    pub const fn percent(percent: u32) -> Chance {
        Chance(percent * 10_000)
    }
}

/// The faults that a simulated network injects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Steps (polls) until a read completes.
    pub delay_steps: RangeInclusive<u32>,
    /// Whether reads that are due at the same step complete in random order.
    pub shuffle: bool,
    /// Per read: one part of the bytes is taken when it is posted, the other when it completes.
    pub torn_read: Chance,
    /// Per read: the answer is lost. After [`Faults::TIMEOUT_STEPS`] the read fails with `TimedOut` and retires the
    /// peer.
    pub lost_answer: Chance,
    /// Per step with reads outstanding: the source disconnects this peer.
    pub lost_peer: Chance,
    /// Per step with reads outstanding: the region is revoked for this peer.
    pub revoked_region: Chance,
    /// Per connect: the source is unreachable.
    pub failed_connect: Chance,
}

impl Faults {
    /// Steps after which a read without an answer fails: above any delay in use, and few enough to poll through.
    pub const TIMEOUT_STEPS: u64 = 1000;

    /// A network without faults, on which every read completes at the next step.
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

    /// A network that delays, reorders and tears reads, as real ones do, but loses nothing.
    pub fn honest() -> Faults {
        Faults { delay_steps: 1..=20, shuffle: true, torn_read: Chance::percent(50), ..Faults::none() }
    }

    /// The same, and nothing is lost.
    pub(super) fn lossless(&self) -> Faults {
        Faults {
            lost_answer: Chance::NEVER,
            lost_peer: Chance::NEVER,
            revoked_region: Chance::NEVER,
            failed_connect: Chance::NEVER,
            ..self.clone()
        }
    }

    /// A network on which a peer rarely survives a few hundred reads.
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

/// No faults.
impl Default for Faults {
    fn default() -> Self {
        Faults::none()
    }
}
