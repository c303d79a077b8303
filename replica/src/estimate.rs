//! Estimate: how long a sync will take, as far as that is known before it. Pure.
//!
//! `remora replica --dry-run` and `remora plan` use it. It is for people: what they do next depends on whether a sync
//! takes seconds, minutes or hours.

use std::time::Duration;

use serde::Serialize;

/// Bytes of a snapshot that a server saves, or loads, in a second: what one processor does with values of some hundred
/// bytes. Long values are several times faster, and tiny ones slower.
pub const SERVER_RATE: u64 = 200 << 20;

/// Seconds of writes that a primary's backlog should hold: a hand-off takes less than one.
pub const BACKLOG_SECONDS: u64 = 10;

/// The time from the last byte to the end: the server follows its primary at the next turn of its clock, and the agent
/// looks for that.
const HAND_OFF: Duration = Duration::from_secs(1);

/// What a sync waits for, and how fast it is then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Course {
    /// Bytes of the snapshot.
    pub snapshot_bytes: u64,
    /// How long the primary waits before it forks; zero if there is a snapshot.
    pub delay: Duration,
    /// Bytes per second of the way to the source, or of the slowest part of it that is known.
    pub rate: Option<u64>,
}

/// The times of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    /// Until the primary forks.
    pub delay_seconds: f64,
    /// For the snapshot: saved, read and loaded at the same time.
    pub copy_seconds: f64,
    /// For the hand-off.
    pub hand_off_seconds: f64,
}

impl Course {
    /// The times of such a sync.
    pub fn times(&self) -> Times {
        let rate = self.rate.map_or(SERVER_RATE, |rate| rate.clamp(1, SERVER_RATE));
        Times {
            delay_seconds: self.delay.as_secs_f64(),
            copy_seconds: self.snapshot_bytes as f64 / rate as f64,
            hand_off_seconds: HAND_OFF.as_secs_f64(),
        }
    }

    /// Whether the servers are slower than the way to the source.
    pub fn is_bound_by_servers(&self) -> bool {
        self.rate.is_none_or(|rate| rate >= SERVER_RATE)
    }
}

impl Times {
    /// All of them together.
    pub fn total(&self) -> Duration {
        let seconds = self.delay_seconds + self.copy_seconds + self.hand_off_seconds;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_the_way_and_the_servers_counts() {
        let course = |rate| Course { snapshot_bytes: 1 << 30, delay: Duration::from_secs(5), rate };
        let slow = course(Some(100 << 20)).times();
        assert_eq!((slow.delay_seconds, slow.copy_seconds), (5.0, 10.24));
        assert_eq!(slow.total(), Duration::from_millis(16_240));
        let fast = course(Some(10 << 30));
        assert!(fast.is_bound_by_servers() && !course(Some(1)).is_bound_by_servers());
        assert_eq!(fast.times(), course(None).times());
        assert!(course(Some(0)).times().total() > Duration::from_secs(1 << 29), "and no division by zero");
    }
}
