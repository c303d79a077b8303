//! The numbers by which a background transfer decides, each with its reason.

use std::time::Duration;

/// The queueing delay above which the queue is too long, for a transfer whose pieces take no time and whose way is
/// short. A tenth of the 3 to 6 ms that clients were measured to wait beside the servers' own replication.
pub(super) const TARGET: Duration = Duration::from_micros(500);

/// This part of the least round-trip time is added to the target: long ways vary more.
pub(super) const TARGET_OF_RTT: f64 = 8.0;

/// A climb ends at this part of the target, because its queue grows quickly (LEDBAT++ has the same).
pub(super) const CLIMB_ENDS: f64 = 0.75;

/// While the newest delay is above this part of the target, beyond what the transfer's own pieces make, a climb is
/// slower by [`SLOW_CLIMB`].
pub(super) const CLIMB_SLOWS: f64 = 0.25;
pub(super) const SLOW_CLIMB: f64 = 8.0;

/// The first rate: a third of a cable of 100 Mb/s. A climb to 1 Gb/s takes five doublings.
pub(super) const START_RATE: f64 = (4 << 20) as f64;

/// The least rate. Readers of a snapshot that passes through the source's memory lose their place if they are slower
/// than half of it.
pub(super) const LEAST_RATE: f64 = (1 << 20) as f64;

/// The least share of the best rate: a sync beside a cable that is always full takes sixteen times as long, and ends.
pub(super) const LEAST_SHARE: f64 = 1.0 / 16.0;

/// The highest rate: beyond every network card. It keeps the arithmetic finite.
pub(super) const MOST_RATE: f64 = (1_u64 << 40) as f64;

/// The best rate is halved in this time: a cable may have become slower for good.
pub(super) const BEST_FADES: Duration = Duration::from_secs(120);

/// The share of what the cable carries that is sent while the queue is kept empty: 4 % less is its price.
pub(super) const CRUISE_SHARE: f64 = 0.96;

/// A queue is gone after about this time, by sending that much less than the cable carries. If it is not gone after
/// [`DRAIN_TIME`], others fill it.
pub(super) const EMPTY_AFTER: Duration = Duration::from_millis(4);
pub(super) const DRAIN_TIME: Duration = Duration::from_millis(15);
pub(super) const LEAST_DRAINED: f64 = 0.2;
pub(super) const MOST_DRAINED: f64 = 0.5;

/// The rate is lowered to this share of itself each time that the queue is still long.
pub(super) const YIELD_SHARE: f64 = 0.7;

/// What arrives is measured with an error of a few percent.
pub(super) const NEARLY: f64 = 0.93;

/// A cable that was overestimated is estimated lower by this.
pub(super) const SLIGHTLY_LESS: f64 = 0.98;

/// A rate of which at least this share is used is what limits the transfer.
pub(super) const USED_SHARE: f64 = 0.7;

/// The time in which a climb doubles the rate, on a short way. Within the 5 ms that the delay takes to show, it grows
/// by two fifths, which makes a queue of 2 ms.
pub(super) const DOUBLING: Duration = Duration::from_millis(10);

/// A probe begins to grow by this share in its first [`PROBE_DOUBLES`], and its growth doubles in that time. The queue
/// is then 0.5 ms long after 100 ms if the cable carries no more; if it carries ten times as much, that is found within
/// a second.
pub(super) const PROBE_GROWTH: f64 = 0.01;
pub(super) const PROBE_DOUBLES: Duration = Duration::from_millis(100);

/// Time between two probes: it doubles from the first to the last as long as they find the same. Probes then take less
/// than a hundredth of the time, so that a 99th percentile does not see them.
pub(super) const FIRST_CRUISE: Duration = Duration::from_millis(250);
pub(super) const LONGEST_CRUISE: Duration = Duration::from_secs(10);

/// This many climbs find what the cable carries at first: at the second, readers have started their threads. It is
/// slower by this, because mostly it begins near its end.
pub(super) const FIRST_CLIMBS: u32 = 2;
pub(super) const SECOND_CLIMB: f64 = 3.0;

/// A rate that was kept for this long without a queue is one that the cable carries.
pub(super) const PROVEN_AFTER: Duration = Duration::from_millis(100);

/// Time between the end of other traffic and the next climb: it doubles each time that the climb fails.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The constant delay that is a longer way has lasted this long, and varies by no more than this.
pub(super) const STEADY_TIME: Duration = Duration::from_secs(5);
pub(super) const STEADY_RANGE: Duration = Duration::from_micros(500);
pub(super) const STEADY_SHARE: f64 = 0.05;

/// After this time without bytes, nothing is known of the cable any more.
pub(super) const IDLE_TIME: Duration = Duration::from_secs(2);

/// Least time between two decisions, and the longest step of a growth.
pub(super) const TICK: Duration = Duration::from_millis(2);
pub(super) const LONGEST_STEP: Duration = Duration::from_millis(20);

/// Delays of this time count, and of one round trip: threads and packets that are late by chance are not late for all
/// of it.
pub(super) const DELAY_WINDOW: Duration = Duration::from_millis(5);

/// At least this many delays count, if lanes report seldom.
pub(super) const FEWEST_DELAYS: usize = 3;

/// Limits of what is remembered. Beyond them the oldest is forgotten: lanes report once in a millisecond, and the past
/// has an entry for each decision, so that it reaches back for half a second.
pub(super) const MOST_DELAYS: usize = 1024;
pub(super) const MOST_PAST: usize = 256;

/// Readers whose pieces count in the target.
pub(super) const MOST_READERS: usize = 8;

/// Longer round-trip times than this, in seconds, make no decision slower.
pub(super) const MOST_RTT: f64 = 1.0;

/// Time that one piece takes: half of that of a fixed limit, because the queue that it makes is part of the delay.
pub(super) const PIECE_TIME: Duration = Duration::from_micros(250);

/// Least size of a piece: three packets, which are acknowledged at once.
pub(super) const LEAST_PIECE_BYTES: usize = 4 << 10;

/// Maximum size of a piece: at 10 Gb/s and more, the system calls for smaller ones would cost too much.
pub(super) const MOST_PIECE_BYTES: usize = 512 << 10;
