//! The rate of a background transfer over a cable that others use too: as much as others leave, with a short queue.
//! Pure: samples and the time go in, a rate comes out. [`Pacer`](super::pacer::Pacer) keeps the rate.
//!
//! As with LEDBAT (RFC 6817), the signal is the delay: the time that bytes wait in a queue, which is the present
//! round-trip time of a lane less its least one. LEDBAT aims at a queue of a constant length. Other traffic would
//! always wait behind that queue, so this transfer keeps the queue empty instead, and fills it for a moment only to
//! learn what the cable can carry:
//!
//! ```text
//!   climb ──────── the queue grows ────────▶ drain ── it is gone ──▶ cruise ── after a while ──▶ probe
//!   (doubles the rate)                       (below what             (a little below             (a little above,
//!      ▲                                      arrives)                what arrived)               ever faster)
//!      │                                     ▲  │  ▲                     │                           │
//!      └─── pause ◀── gone, after others ────┘  │  └── the queue grows ──┴── the queue grows ────────┘
//!                     have kept it filled ◀─────┘
//! ```
//!
//! - **The queue is the shared one.** All lanes of an exporter share the cable of their host. A queue in it delays each
//!   of them, so the least delay of any lane counts. A queue on the way of one replica does not slow down the others.
//! - **A delay that stays is the traffic of others.** The transfer then sends less and less, to a sixteenth of what
//!   it once had ([`LEAST_SHARE`]), and returns more slowly each time that the others return.
//! - **A longer way is not a queue.** The delay behind other traffic varies. A constant delay while the transfer sends
//!   next to nothing and no packet is lost is a changed route, and becomes part of the least round-trip time.
//! - **One late reader is not a queue.** A rate that was kept for a while without a queue is lowered slightly at first,
//!   and the first climb, which readers may see while they are starting, is done twice.
//! - **A transfer that others slow down keeps its rate.** The rate grows only while the transfer uses it.
//! - **Who receives may send as fast.** What this end receives delays the acknowledgements of what it sends
//!   ([`Reception`]).

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::TcpStream;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::UploadRate;
use super::background;
use super::socket;

/// What TCP says of one lane (`TCP_INFO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaneSample {
    /// The lane's number.
    pub(super) lane: u64,
    /// The least round-trip time of the last minutes.
    pub(super) least: Duration,
    /// The present round-trip time, smoothed by TCP.
    pub(super) present: Duration,
    /// Bytes that the reader has acknowledged since the lane began.
    pub(super) acknowledged: u64,
    /// Segments that were sent again since the lane began.
    pub(super) sent_again: u32,
}

/// Decides the rate of a background transfer.
#[derive(Debug)]
pub(super) struct Background {
    /// Bytes per second.
    rate: f64,
    phase: Phase,
    /// When the phase began.
    since: Instant,
    /// What the cable carries, as far as it is known; infinite at first.
    carries: f64,
    /// The most that it has carried, which fades.
    best: f64,
    /// How many climbs have found an end.
    climbs: u32,
    /// How long to cruise until the next probe, and how long to pause until the next climb.
    cruise: Duration,
    pause: Duration,
    lanes: HashMap<u64, Lane>,
    delays: VecDeque<Delay>,
    /// Bytes admitted and acknowledged so far, and their past values.
    admitted: u64,
    acknowledged: u64,
    past: VecDeque<Past>,
    reception: Reception,
    /// A part of all delays that is not a queue, in seconds.
    detour: f64,
    steady: Option<Steady>,
    /// The last queueing delay that was computed, in seconds.
    queueing: f64,
    ticked: Instant,
    used: Instant,
}

/// See the drawing above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Climb,
    /// `rounds`: how often the rate was lowered further.
    Drain {
        rounds: u32,
    },
    Pause,
    Cruise,
    Probe,
}

/// A lane's last sample.
#[derive(Clone, Copy, Debug)]
struct Lane {
    at: Instant,
    acknowledged: u64,
    sent_again: u32,
}

/// The queueing delay of a lane at a time, and its round-trip time, in seconds.
#[derive(Clone, Copy, Debug)]
struct Delay {
    at: Instant,
    queueing: f64,
    present: f64,
    least: f64,
}

/// How much had been admitted and acknowledged at a time.
#[derive(Clone, Copy, Debug)]
struct Past {
    at: Instant,
    admitted: u64,
    acknowledged: u64,
}

/// The range of delays since a time at which the transfer was already at its least rate.
#[derive(Clone, Copy, Debug)]
struct Steady {
    since: Instant,
    least: f64,
    most: f64,
}

/// What is known of the cable at a moment.
#[derive(Clone, Copy, Debug)]
struct View {
    /// The queueing delay, above which it is too long, in seconds.
    queueing: f64,
    target: f64,
    /// The queueing delay of the newest sample.
    newest: f64,
    /// The queueing delay that ends a climb: of less time during the first one, which a second one follows.
    climbing: f64,
    /// How long a change of the rate takes to show in the delays.
    lag: Duration,
}

/// What a background transfer does at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upload {
    /// The rate at which it may send, in bytes per second.
    pub bytes_per_second: u64,
    /// How long its bytes wait in the queue of the cable.
    pub queueing: Duration,
    /// Whether it sends less because others do.
    pub yields: bool,
}

impl Background {
    pub(super) fn new(now: Instant) -> Background {
        Background {
            rate: START_RATE,
            phase: Phase::Climb,
            since: now,
            carries: f64::INFINITY,
            best: 0.0,
            climbs: 0,
            cruise: FIRST_CRUISE,
            pause: FIRST_PAUSE,
            lanes: HashMap::new(),
            delays: VecDeque::new(),
            admitted: 0,
            acknowledged: 0,
            past: VecDeque::new(),
            reception: Reception::default(),
            detour: 0.0,
            steady: None,
            queueing: 0.0,
            ticked: now,
            used: now,
        }
    }

    /// Bytes per second.
    pub(super) fn rate(&self) -> u64 {
        self.rate as u64
    }

    /// What it does at present.
    pub(super) fn upload(&self) -> Upload {
        let yields = match self.phase {
            Phase::Drain { rounds } => rounds > 0,
            Phase::Pause => true,
            Phase::Climb => self.carries.is_finite() && self.rate < self.best / 2.0,
            Phase::Cruise | Phase::Probe => false,
        } && self.rate > self.reception.rate();
        Upload { bytes_per_second: self.rate(), queueing: Duration::from_secs_f64(self.queueing.max(0.0)), yields }
    }

    /// Notes bytes that are about to be sent. After a time without any, the next ones start as the first ones did:
    /// nothing is known of the cable any more.
    pub(super) fn admit(&mut self, now: Instant, bytes: usize) {
        if now.saturating_duration_since(self.used) > IDLE_TIME {
            let (admitted, acknowledged) = (self.admitted, self.acknowledged);
            let (lanes, best) = (std::mem::take(&mut self.lanes), self.best);
            let reception = std::mem::take(&mut self.reception);
            *self = Background { admitted, acknowledged, lanes, best, reception, ..Background::new(now) };
        }
        self.used = now;
        self.admitted += bytes as u64;
    }

    /// Takes what TCP says of a lane, and decides the rate.
    pub(super) fn sample(&mut self, now: Instant, sample: LaneSample) {
        let LaneSample { lane, acknowledged, sent_again, .. } = sample;
        let before = self.lanes.insert(lane, Lane { at: now, acknowledged, sent_again });
        let Some(before) = before else { return };
        let fresh = acknowledged.saturating_sub(before.acknowledged);
        if sent_again != before.sent_again {
            self.steady = None;
        }
        if fresh == 0 {
            return; // the round-trip time is that of the last sample
        }
        self.acknowledged += fresh;
        let (present, least) = (sample.present.as_secs_f64(), sample.least.as_secs_f64());
        self.delays.push_back(Delay { at: now, queueing: present - least, present, least });
        if self.delays.len() > MOST_DELAYS {
            self.delays.pop_front();
        }
        if now.saturating_duration_since(self.ticked) >= TICK {
            self.tick(now);
        }
    }

    /// Takes how many bytes this end has received over the same link.
    pub(super) fn received(&mut self, now: Instant, bytes: u64) {
        self.reception.note(now, bytes);
    }

    /// Forgets a lane that has ended.
    pub(super) fn leave(&mut self, lane: u64) {
        self.lanes.remove(&lane);
    }

    fn tick(&mut self, now: Instant) {
        let step = now.saturating_duration_since(self.ticked).min(LONGEST_STEP).as_secs_f64();
        self.ticked = now;
        self.remember(now);
        let Some(view) = self.look(now) else { return };
        self.queueing = view.queueing;
        self.best *= 0.5_f64.powf(step / BEST_FADES.as_secs_f64());
        let is_long = view.queueing > view.target;
        let lasted = now.saturating_duration_since(self.since);
        match self.phase {
            Phase::Climb if view.climbing > view.target * CLIMB_ENDS => self.found(now, &view),
            Phase::Climb => self.climb(now, step, &view),
            Phase::Drain { rounds } => self.drain(now, rounds, lasted, &view),
            Phase::Pause if is_long => self.lower(now, 1),
            Phase::Pause if lasted >= self.pause => self.enter(now, Phase::Climb),
            Phase::Cruise if is_long => self.crowded(now, lasted, &view),
            Phase::Cruise if lasted >= self.cruise => {
                self.rate = self.rate.max(self.carries);
                self.pause = FIRST_PAUSE;
                self.enter(now, Phase::Probe);
            }
            Phase::Probe if is_long => self.confirmed(now, &view),
            Phase::Probe => self.probe(now, step, lasted, &view),
            Phase::Pause | Phase::Cruise => {}
        }
        self.rate = self.rate.clamp(self.least_rate(), MOST_RATE);
        self.watch_detour(now, &view);
    }

    /// Doubles the rate in a short time, up to what the cable is known to carry.
    fn climb(&mut self, now: Instant, step: f64, view: &View) {
        let goal = self.carries * CRUISE_SHARE;
        if self.rate >= goal {
            self.rate = goal;
            return self.enter(now, Phase::Cruise);
        }
        if !self.is_used(now, view) {
            return;
        }
        // A single delay is no reason to end the climb, but it is one to look closely.
        let is_near = view.newest > view.target - TARGET.as_secs_f64() * (1.0 - CLIMB_SLOWS);
        let step = match (is_near, self.climbs > 0 && goal.is_infinite()) {
            (true, _) => step / SLOW_CLIMB,
            (false, true) => step / SECOND_CLIMB,
            (false, false) => step,
        };
        self.rate = (self.rate * 2.0_f64.powf(step / doubling(view))).min(goal);
    }

    /// A climb has ended: the cable carries what has just arrived. The first one may have been ended by a reader that
    /// had hardly begun, so a second one follows it.
    fn found(&mut self, now: Instant, view: &View) {
        let arrives = self.arrives(now, view.lag);
        self.climbs += 1;
        if self.carries.is_finite() {
            // It carried more before. Others are back, and the next climb waits for longer.
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
        self.carried(arrives, view);
        self.cruise = FIRST_CRUISE;
        self.enter(now, Phase::Drain { rounds: 0 });
    }

    /// The queue grows below what the cable is known to carry: others send more, or it was overestimated. What arrived
    /// in a moment in which a reader was late is less than the cable carries. It is believed the second time: if the
    /// rate had not been kept for a while before.
    fn crowded(&mut self, now: Instant, lasted: Duration, view: &View) {
        let (arrives, less) = (self.arrives(now, view.lag * 4), self.carries * SLIGHTLY_LESS);
        let is_proven = lasted >= PROVEN_AFTER;
        if !is_proven && arrives < self.carries * NEARLY {
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
        self.carried(if is_proven { less } else { arrives.min(less) }, view);
        self.cruise = FIRST_CRUISE;
        self.enter(now, Phase::Drain { rounds: 0 });
    }

    /// A probe has found the end of the cable. If it is where it was before, the next probe can wait for longer. The
    /// cable does carry about what was sent before the probe without a queue.
    fn confirmed(&mut self, now: Instant, view: &View) {
        let arrives = self.arrives(now, view.lag * 4).max(self.carries * SLIGHTLY_LESS);
        let is_same = (self.carries * NEARLY..self.carries / NEARLY).contains(&arrives);
        self.cruise = if is_same { (self.cruise * 2).min(LONGEST_CRUISE) } else { FIRST_CRUISE };
        self.carried(arrives, view);
        self.enter(now, Phase::Drain { rounds: 0 });
    }

    /// Notes what the cable carries, and goes below it.
    fn carried(&mut self, arrives: f64, view: &View) {
        self.carries = arrives.min(self.rate).max(self.least_rate());
        self.best = self.best.max(self.carries);
        let drained = (view.queueing / EMPTY_AFTER.as_secs_f64()).clamp(LEAST_DRAINED, MOST_DRAINED);
        self.rate = self.carries * (1.0 - drained);
    }

    fn drain(&mut self, now: Instant, rounds: u32, lasted: Duration, view: &View) {
        // The first round takes as long as the transfer's own queue needs to drain.
        let is_gone = view.queueing <= view.target / 4.0;
        if lasted < view.lag || rounds == 0 && !is_gone && lasted < view.lag + DRAIN_TIME {
            return;
        }
        if view.queueing > view.target {
            return self.lower(now, rounds + 1);
        }
        if rounds > 0 {
            return self.enter(now, Phase::Pause);
        }
        self.rate = self.carries * CRUISE_SHARE;
        if self.climbs < FIRST_CLIMBS {
            self.carries = f64::INFINITY;
            return self.enter(now, Phase::Climb);
        }
        self.enter(now, Phase::Cruise);
    }

    /// Others keep the queue filled.
    fn lower(&mut self, now: Instant, rounds: u32) {
        self.rate *= YIELD_SHARE;
        self.enter(now, Phase::Drain { rounds });
    }

    /// Grows slowly at first, and faster and faster as the queue does not: the others have left.
    fn probe(&mut self, now: Instant, step: f64, lasted: Duration, view: &View) {
        if !self.is_used(now, view) {
            return;
        }
        let unit = PROBE_DOUBLES.max(view.lag * 4).as_secs_f64();
        let growth = PROBE_GROWTH / unit * 2.0_f64.powf(lasted.as_secs_f64() / unit);
        let fastest = std::f64::consts::LN_2 / doubling(view);
        self.rate *= (growth.min(fastest) * step).exp();
    }

    /// Looks for a constant delay while nearly nothing is sent: that is a longer way, and not a queue.
    fn watch_detour(&mut self, now: Instant, view: &View) {
        let is_least = self.rate <= next_to_nothing(self.best) * 1.01;
        if !is_least || view.queueing <= view.target {
            self.steady = None;
            return;
        }
        let queueing = view.queueing;
        let steady = self.steady.get_or_insert(Steady { since: now, least: queueing, most: queueing });
        (steady.least, steady.most) = (steady.least.min(queueing), steady.most.max(queueing));
        if steady.most - steady.least > STEADY_RANGE.as_secs_f64() + steady.least * STEADY_SHARE {
            *steady = Steady { since: now, least: queueing, most: queueing };
        }
        if now.saturating_duration_since(steady.since) >= STEADY_TIME {
            self.detour += steady.least;
            self.steady = None;
            self.delays.clear();
            self.carries = f64::INFINITY;
            self.enter(now, Phase::Climb);
        }
    }

    fn enter(&mut self, now: Instant, phase: Phase) {
        (self.phase, self.since) = (phase, now);
    }

    /// The present delay: the least of any lane in the last few milliseconds. A queue of the shared cable delays all of
    /// them; a late thread, or a late acknowledgement, only some.
    fn look(&mut self, now: Instant) -> Option<View> {
        let newest = *self.delays.back()?;
        let window = DELAY_WINDOW + Duration::from_secs_f64(newest.present.min(MOST_RTT));
        while self.delays.len() > FEWEST_DELAYS
            && self.delays.front().is_some_and(|delay| newest.at.saturating_duration_since(delay.at) > window)
        {
            self.delays.pop_front();
        }
        let least = self.delays.iter().copied().min_by(|one, other| one.queueing.total_cmp(&other.queueing))?;
        if least.queueing < self.detour {
            // The shorter way is back.
            self.detour = least.queueing.max(0.0);
        }
        self.lanes.retain(|_, lane| now.saturating_duration_since(lane.at) < IDLE_TIME);
        let target = TARGET.as_secs_f64() + self.own_delay() + (least.least + self.detour) / TARGET_OF_RTT;
        let lag = DELAY_WINDOW + Duration::from_secs_f64(2.0 * least.present.min(MOST_RTT));
        let soon = match self.climbs {
            0 => self
                .delays
                .iter()
                .rev()
                .take(FEWEST_DELAYS)
                .fold(f64::INFINITY, |least, delay| least.min(delay.queueing)),
            _ => least.queueing,
        };
        let [queueing, newest, climbing] = [least.queueing, newest.queueing, soon].map(|delay| delay - self.detour);
        Some(View { queueing, target, newest, climbing, lag })
    }

    /// The part of a delay that the transfer's own pieces make, in seconds: the time of one piece. At low rates a piece
    /// is a few packets, the last of which may be acknowledged with the next piece of the lane, and that comes after
    /// those of the other lanes.
    fn own_delay(&self) -> f64 {
        let bytes = piece(self.rate);
        let readers = if bytes > LEAST_PIECE_BYTES { 1 } else { self.lanes.len().clamp(1, MOST_READERS) };
        readers as f64 * bytes as f64 / self.rate
    }

    /// Bytes per second that readers have acknowledged in the last `time`.
    fn arrives(&self, now: Instant, time: Duration) -> f64 {
        self.mean(now, time, |past| past.acknowledged, self.acknowledged)
    }

    /// Whether the transfer sends about as much as it may. Otherwise something else limits it, and a higher rate would
    /// mean nothing.
    fn is_used(&self, now: Instant, view: &View) -> bool {
        self.mean(now, view.lag, |past| past.admitted, self.admitted) >= self.rate * USED_SHARE
    }

    /// The growth of a count per second, in the last `time` or slightly more.
    fn mean(&self, now: Instant, time: Duration, of: impl Fn(&Past) -> u64, present: u64) -> f64 {
        let is_old = |past: &&Past| now.saturating_duration_since(past.at) >= time;
        let Some(past) = self.past.iter().rev().find(is_old).or(self.past.front()) else { return self.rate };
        let seconds = now.saturating_duration_since(past.at).as_secs_f64();
        if seconds > 0.0 { present.saturating_sub(of(past)) as f64 / seconds } else { self.rate }
    }

    fn remember(&mut self, now: Instant) {
        self.past.push_back(Past { at: now, admitted: self.admitted, acknowledged: self.acknowledged });
        if self.past.len() > MOST_PAST {
            self.past.pop_front();
        }
    }

    fn least_rate(&self) -> f64 {
        next_to_nothing(self.best).max(self.reception.rate())
    }
}

/// The rate beside others that fill the link which carried `best` before.
fn next_to_nothing(best: f64) -> f64 {
    (best * LEAST_SHARE).max(LEAST_RATE)
}

/// Bytes per piece at this rate: so few that other traffic hardly waits behind a piece.
pub(super) fn piece(rate: f64) -> usize {
    ((rate * PIECE_TIME.as_secs_f64()) as usize).clamp(LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
}

/// How long a climb takes to double the rate, in seconds: so long that the queue shows before it is long.
fn doubling(view: &View) -> f64 {
    view.lag.as_secs_f64().max(DOUBLING.as_secs_f64())
}

// The numbers by which a background transfer decides, each with its reason.

/// The queueing delay above which the queue is too long, for a transfer whose pieces take no time and whose way is
/// short. A tenth of the 3 to 6 ms that clients were measured to wait beside the servers' own replication.
const TARGET: Duration = Duration::from_micros(500);

/// This part of the least round-trip time is added to the target: long ways vary more.
const TARGET_OF_RTT: f64 = 8.0;

/// A climb ends at this part of the target, because its queue grows quickly (LEDBAT++ has the same).
const CLIMB_ENDS: f64 = 0.75;

/// While the newest delay is above this part of the target, beyond what the transfer's own pieces make, a climb is
/// slower by [`SLOW_CLIMB`].
const CLIMB_SLOWS: f64 = 0.25;

const SLOW_CLIMB: f64 = 8.0;

/// The first rate: a third of a cable of 100 Mb/s. A climb to 1 Gb/s takes five doublings.
const START_RATE: f64 = (4 << 20) as f64;

/// The least rate. Readers of a snapshot that passes through the source's memory lose their place if they are slower
/// than half of it.
const LEAST_RATE: f64 = (1 << 20) as f64;

/// The least share of the best rate: a sync beside a cable that is always full takes sixteen times as long, and ends.
const LEAST_SHARE: f64 = 1.0 / 16.0;

/// The highest rate: beyond every network card. It keeps the arithmetic finite.
const MOST_RATE: f64 = (1_u64 << 40) as f64;

/// The best rate is halved in this time: a cable may have become slower for good.
const BEST_FADES: Duration = Duration::from_secs(120);

/// The share of what the cable carries that is sent while the queue is kept empty: 4 % less is its price.
const CRUISE_SHARE: f64 = 0.96;

/// A queue is gone after about this time, by sending that much less than the cable carries. If it is not gone after
/// [`DRAIN_TIME`], others fill it.
const EMPTY_AFTER: Duration = Duration::from_millis(4);

const DRAIN_TIME: Duration = Duration::from_millis(15);

const LEAST_DRAINED: f64 = 0.2;

const MOST_DRAINED: f64 = 0.5;

/// The rate is lowered to this share of itself each time that the queue is still long.
const YIELD_SHARE: f64 = 0.7;

/// What arrives is measured with an error of a few percent.
const NEARLY: f64 = 0.93;

/// A cable that was overestimated is estimated lower by this.
const SLIGHTLY_LESS: f64 = 0.98;

/// A rate of which at least this share is used is what limits the transfer.
const USED_SHARE: f64 = 0.7;

/// The time in which a climb doubles the rate, on a short way. Within the 5 ms that the delay takes to show, it grows
/// by two fifths, which makes a queue of 2 ms.
const DOUBLING: Duration = Duration::from_millis(10);

/// A probe begins to grow by this share in its first [`PROBE_DOUBLES`], and its growth doubles in that time. The queue
/// is then 0.5 ms long after 100 ms if the cable carries no more; if it carries ten times as much, that is found within
/// a second.
const PROBE_GROWTH: f64 = 0.01;

const PROBE_DOUBLES: Duration = Duration::from_millis(100);

/// Time between two probes: it doubles from the first to the last as long as they find the same. Probes then take less
/// than a hundredth of the time, so that a 99th percentile does not see them.
const FIRST_CRUISE: Duration = Duration::from_millis(250);

const LONGEST_CRUISE: Duration = Duration::from_secs(10);

/// This many climbs find what the cable carries at first: at the second, readers have started their threads. It is
/// slower by this, because mostly it begins near its end.
const FIRST_CLIMBS: u32 = 2;

const SECOND_CLIMB: f64 = 3.0;

/// A rate that was kept for this long without a queue is one that the cable carries.
const PROVEN_AFTER: Duration = Duration::from_millis(100);

/// Time between the end of other traffic and the next climb: it doubles each time that the climb fails.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The constant delay that is a longer way has lasted this long, and varies by no more than this.
const STEADY_TIME: Duration = Duration::from_secs(5);

const STEADY_RANGE: Duration = Duration::from_micros(500);

const STEADY_SHARE: f64 = 0.05;

/// After this time without bytes, nothing is known of the cable any more.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// Least time between two decisions, and the longest step of a growth.
const TICK: Duration = Duration::from_millis(2);

const LONGEST_STEP: Duration = Duration::from_millis(20);

/// Delays of this time count, and of one round trip: threads and packets that are late by chance are not late for all
/// of it.
const DELAY_WINDOW: Duration = Duration::from_millis(5);

/// At least this many delays count, if lanes report seldom.
const FEWEST_DELAYS: usize = 3;

/// Limits of what is remembered. Beyond them the oldest is forgotten: lanes report once in a millisecond, and the past
/// has an entry for each decision, so that it reaches back for half a second.
const MOST_DELAYS: usize = 1024;

const MOST_PAST: usize = 256;

/// Readers whose pieces count in the target.
const MOST_READERS: usize = 8;

/// Longer round-trip times than this, in seconds, make no decision slower.
const MOST_RTT: f64 = 1.0;

/// Time that one piece takes: half of that of a fixed limit, because the queue that it makes is part of the delay.
const PIECE_TIME: Duration = Duration::from_micros(250);

/// Least size of a piece: three packets, which are acknowledged at once.
const LEAST_PIECE_BYTES: usize = 4 << 10;

/// Maximum size of a piece: at 10 Gb/s and more, the system calls for smaller ones would cost too much.
const MOST_PIECE_BYTES: usize = 512 << 10;

// How fast this end receives over the link by which it sends.
//
// An end that passes on what it receives sends at least as fast. TCP tells round-trip times only, and the
// acknowledgements of what is sent wait behind what is received: a link that this end's own reception fills looks
// like one that others fill, and sending less would not shorten that queue.

/// The rate of a count of received bytes. The count grows in steps: a slot counts when all of it has arrived.
#[derive(Debug, Default)]
struct Reception {
    /// Bytes per second; 0 while nothing arrives.
    rate: f64,
    /// The count when its rate was last taken, and when that was.
    mark: Option<(Instant, u64)>,
    /// When it last grew, and to what.
    grew: Option<(Instant, u64)>,
}

impl Reception {
    /// Takes the present count. A lower one than before is that of a new transfer.
    fn note(&mut self, now: Instant, count: u64) {
        let (since, marked) = *self.mark.get_or_insert((now, count));
        let (grew, last) = *self.grew.get_or_insert((now, count));
        if count < last {
            *self = Reception { mark: Some((now, count)), grew: Some((now, count)), ..Reception::default() };
        } else if count > last {
            self.grew = Some((now, count));
            let lasted = now.saturating_duration_since(since);
            if lasted >= MEASURED_OVER {
                self.rate = count.saturating_sub(marked) as f64 / lasted.as_secs_f64();
                self.mark = self.grew;
            }
        } else if now.saturating_duration_since(grew) > OVER_AFTER {
            self.rate = 0.0;
            self.mark = Some((now, count));
        }
    }

    /// Bytes per second.
    fn rate(&self) -> f64 {
        self.rate
    }
}

/// A rate is that of at least this time: some slots at the rates where it matters.
const MEASURED_OVER: Duration = Duration::from_millis(300);

/// Nothing more is received if the count has not grown for this long.
const OVER_AFTER: Duration = Duration::from_secs(1);

// A rate limit for all lanes of an exporter together: it decides when the next bytes may be sent, in small pieces. A
// rate slightly below that of the link keeps its queue short for all other traffic. Pure except [`LanePace`]: the time
// is an argument.
//
// The rate is fixed, or that of a [`Background`] transfer, which the lanes keep informed.

/// Spaces pieces in time, so that their rate stays below a limit.
#[derive(Debug)]
pub(super) struct Pacer {
    state: Mutex<State>,
    /// How many bytes this end has received over the same link.
    received: Option<Received>,
    /// Set when the exporter ends: no lane waits after that.
    over: AtomicBool,
}

/// A count of bytes.
pub(super) struct Received(pub(super) Box<dyn Fn() -> u64 + Send + Sync>);

impl fmt::Debug for Received {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Received({})", self.0())
    }
}

#[derive(Debug)]
struct State {
    rate: Rate,
    /// When everything admitted so far has been sent at that rate; `None` if nothing was.
    free_at: Option<Instant>,
    told: Told,
}

#[derive(Debug)]
enum Rate {
    Fixed(NonZeroU64),
    Background(Box<Background>),
}

/// What the log was last told.
#[derive(Debug)]
struct Told {
    yields: bool,
    at: Option<Instant>,
}

/// A piece that may be sent after a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    bytes: usize,
    wait: Duration,
}

impl Pacer {
    /// A pacer for this rate; `None` if it is not limited. A background transfer sends at least as fast as `received`
    /// grows.
    pub(super) fn new(rate: UploadRate, now: Instant, received: Option<Received>) -> Option<Pacer> {
        let rate = match rate {
            UploadRate::Unlimited => return None,
            UploadRate::Fixed(rate) => Rate::Fixed(rate),
            UploadRate::Background => Rate::Background(Box::new(Background::new(now))),
        };
        let state = State { rate, free_at: None, told: Told { yields: false, at: None } };
        Some(Pacer { state: Mutex::new(state), received, over: AtomicBool::new(false) })
    }

    /// What a background transfer does at present; `None` for a fixed rate.
    pub(super) fn upload(&self) -> Option<Upload> {
        match &self.state().rate {
            Rate::Fixed(_) => None,
            Rate::Background(background) => Some(background.upload()),
        }
    }

    /// Ends all waits soon, and makes further ones return immediately.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Reserves the time to send a piece of at most `left` bytes. Reservations are served in order.
    fn reserve(&self, now: Instant, left: usize) -> Turn {
        let mut state = self.state();
        let (rate, piece) = match &state.rate {
            Rate::Fixed(rate) => (rate.get(), fixed_piece(*rate)),
            Rate::Background(background) => (background.rate(), background::piece(background.rate() as f64)),
        };
        let bytes = left.min(piece);
        if let Rate::Background(background) = &mut state.rate {
            background.admit(now, bytes);
        }
        let earliest = now.checked_sub(SAVED).unwrap_or(now);
        let begins = state.free_at.map_or(now, |free_at| free_at.max(earliest));
        state.free_at = Some(begins + Duration::from_secs_f64(bytes as f64 / rate as f64));
        Turn { bytes, wait: begins.saturating_duration_since(now) }
    }

    /// Takes what TCP says of a lane. Returns the present rate.
    fn sample(&self, now: Instant, sample: LaneSample) -> u64 {
        let received = self.received.as_ref().map(|received| received.0());
        let mut state = self.state();
        let Rate::Background(background) = &mut state.rate else { return u64::MAX };
        if let Some(received) = received {
            background.received(now, received);
        }
        background.sample(now, sample);
        let (rate, upload) = (background.rate(), background.upload());
        if state.told.is_news(now, upload) {
            drop(state);
            log(upload);
        }
        rate
    }

    fn leave(&self, lane: u64) {
        if let Rate::Background(background) = &mut self.state().rate {
            background.leave(lane);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The value is valid after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Told {
    /// Whether to log a change; notes it.
    fn is_news(&mut self, now: Instant, upload: Upload) -> bool {
        let is_late = self.at.is_none_or(|at| now.saturating_duration_since(at) >= LOG_TIME);
        let is_news = upload.yields != self.yields && is_late;
        if is_news {
            (self.yields, self.at) = (upload.yields, Some(now));
        }
        is_news
    }
}

fn log(upload: Upload) {
    let Upload { bytes_per_second, queueing, yields } = upload;
    let queueing_ms = queueing.as_secs_f64() * 1e3;
    match yields {
        true => tracing::info!(bytes_per_second, queueing_ms, "other traffic fills the network link: sending less"),
        false => tracing::info!(bytes_per_second, queueing_ms, "the network link has room again: sending more"),
    }
}

/// A lane at the pacer.
pub(super) struct LanePace<'a> {
    pacer: &'a Pacer,
    stream: &'a TcpStream,
    lane: u64,
    /// Whether TCP is asked how the lane is: not for a fixed rate.
    asks: bool,
    asked: Option<Instant>,
    /// The rate by which the system spaces the lane's packets.
    spaced: u64,
}

impl<'a> LanePace<'a> {
    /// `None` if nothing limits this lane: there is no pacer, or both of its ends are on this host, so that it takes no
    /// network from others.
    pub(super) fn new(pacer: Option<&'a Pacer>, stream: &'a TcpStream, lane: u64) -> Option<LanePace<'a>> {
        let pacer = pacer?;
        let asks = pacer.upload().is_some();
        if asks && socket::is_within_host(stream) {
            return None;
        }
        Some(LanePace { pacer, stream, lane, asks, asked: None, spaced: 0 })
    }

    /// Waits until the next piece of at most `left` bytes may be sent, or `cancelled` returns true. Returns the size of
    /// the piece.
    pub(super) fn wait(&mut self, left: usize, cancelled: impl Fn() -> bool) -> usize {
        let now = Instant::now();
        if self.asks {
            self.ask(now);
        }
        let Turn { bytes, wait } = self.pacer.reserve(now, left);
        let until = now + wait;
        loop {
            if cancelled() || self.pacer.over.load(Ordering::Relaxed) {
                return bytes;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return bytes;
            }
            std::thread::sleep(left.min(LOOK_TIME));
        }
    }

    /// Asks TCP how the lane is, if that was a while ago.
    fn ask(&mut self, now: Instant) {
        if self.asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_TIME) {
            return;
        }
        self.asked = Some(now);
        let told = match socket::told(self.stream) {
            Ok(told) => told,
            Err(error) => {
                // The lane keeps the rate that it has; sending finds a connection that has failed.
                tracing::debug!(lane = self.lane, %error, "cannot read TCP_INFO of a lane");
                return;
            }
        };
        let socket::Told { least, present, acknowledged, sent_again } = told;
        let rate = self.pacer.sample(now, LaneSample { lane: self.lane, least, present, acknowledged, sent_again });
        self.space(rate);
    }

    /// Makes the system space the lane's packets, so that bytes which the reader has delayed do not leave in a burst.
    fn space(&mut self, rate: u64) {
        let spaced = rate.saturating_add(rate / SPACING_ABOVE);
        if spaced.abs_diff(self.spaced) <= self.spaced / SPACING_ABOVE / 2 {
            return;
        }
        self.spaced = spaced;
        if let Some(spaced) = NonZeroU64::new(spaced)
            && let Err(error) = socket::smooth(self.stream, spaced)
        {
            // The rate is still kept, but with bursts.
            tracing::debug!(lane = self.lane, %error, "cannot set SO_MAX_PACING_RATE on a lane");
        }
    }
}

impl Drop for LanePace<'_> {
    fn drop(&mut self) {
        self.pacer.leave(self.lane);
    }
}

/// Bytes per piece at a fixed rate.
fn fixed_piece(rate: NonZeroU64) -> usize {
    let bytes = u128::from(rate.get()) * FIXED_PIECE_TIME.as_micros() / 1_000_000;
    (bytes as usize).clamp(LEAST_FIXED_PIECE_BYTES, MOST_FIXED_PIECE_BYTES)
}

/// Time that one piece takes at a fixed rate: no other sender waits longer behind it.
const FIXED_PIECE_TIME: Duration = Duration::from_micros(500);

/// Minimum size of a piece: two packets, which network cards send more efficiently together.
const LEAST_FIXED_PIECE_BYTES: usize = 4 << 10;

/// Maximum size of a piece: that of an answer, after which a revoked region is noticed.
const MOST_FIXED_PIECE_BYTES: usize = 1 << 20;

/// Time that may be caught up on, because threads wake slightly late. More would be a burst.
const SAVED: Duration = Duration::from_millis(1);

/// Interval at which a waiting lane checks whether to give up.
const LOOK_TIME: Duration = Duration::from_millis(50);

/// Interval at which a lane asks TCP: a few times within the delays that count together. It takes about a microsecond.
const ASK_TIME: Duration = Duration::from_millis(1);

/// The system spaces packets by a rate that is above the pacer's by one part in this many: it counts headers too, and
/// must not be what limits the lane.
const SPACING_ABOVE: u64 = 4;

/// The log is told of no more than one change in this time.
const LOG_TIME: Duration = Duration::from_secs(10);
