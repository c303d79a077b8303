//! A background transfer on a modelled cable: a queue of a length in milliseconds, the transfer's lanes, and another
//! flow that fills the queue as cubic does.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;

use proptest::prelude::*;

use super::*;

/// Seconds per step of the model.
const STEP: f64 = 0.000_25;

/// Round-trip time of an empty cable, and how long its full queue is, in seconds.
const SHORT_WAY: f64 = 0.000_1;
const QUEUE: f64 = 0.02;

/// Received bytes count in slots.
const SLOT: u64 = 1 << 20;

/// Packets on a wire.
const PACKET: f64 = 1448.0;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Owner {
    Lane(usize),
    Other,
}

/// Bytes in the queue, or on their way.
#[derive(Clone, Copy, Debug)]
struct Parcel {
    owner: Owner,
    bytes: f64,
    sent: f64,
}

/// A lane of the transfer, as TCP sees it.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    present: f64,
    least: f64,
    acknowledged: f64,
    lost: u32,
    /// A delay behind the cable, for this lane only.
    beyond: f64,
}

/// A flow that grows until packets are lost.
#[derive(Clone, Copy, Debug)]
struct Greedy {
    window: f64,
    flying: f64,
    lowered: f64,
    is_steep: bool,
}

struct World {
    start: Instant,
    now: f64,
    capacity: f64,
    way: f64,
    queue: VecDeque<Parcel>,
    queued: f64,
    flying: VecDeque<(f64, Parcel)>,
    transfer: Background,
    /// The most that the transfer wants to send per second.
    wants: f64,
    budget: f64,
    turn: usize,
    lanes: Vec<Flow>,
    other: Option<Greedy>,
    /// Bytes per second that this end receives, and how many it has.
    receives: f64,
    received: f64,
    delivered: [f64; 2],
    /// The queueing delay at each step, in seconds.
    delays: Vec<f64>,
}

impl World {
    fn new(bits: f64, lanes: usize) -> World {
        let start = Instant::now();
        World {
            start,
            now: 0.0,
            capacity: bits / 8.0 * 0.96,
            way: SHORT_WAY,
            queue: VecDeque::new(),
            queued: 0.0,
            flying: VecDeque::new(),
            transfer: Background::new(start),
            wants: f64::INFINITY,
            budget: 0.0,
            turn: 0,
            lanes: vec![Flow { present: SHORT_WAY, least: SHORT_WAY, ..Flow::default() }; lanes],
            other: None,
            receives: 0.0,
            received: 0.0,
            delivered: [0.0; 2],
            delays: Vec::new(),
        }
    }

    fn other_comes(&mut self) {
        self.other = Some(Greedy { window: 10.0 * PACKET, flying: 0.0, lowered: 0.0, is_steep: true });
    }

    fn other_goes(&mut self) {
        self.other = None;
    }

    /// Plays `seconds` of time. Returns the shares of the cable that the transfer and the other flow had.
    fn play(&mut self, seconds: f64) -> [f64; 2] {
        let before = self.delivered;
        let steps = (seconds / STEP) as usize;
        for _ in 0..steps {
            self.step();
        }
        [0, 1].map(|flow| (self.delivered[flow] - before[flow]) / (self.capacity * seconds))
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_secs_f64(self.now)
    }

    fn step(&mut self) {
        self.now += STEP;
        self.send_transfer();
        self.send_other();
        self.delays.push(self.queued / self.capacity);
        self.drain();
        self.arrive();
        self.received += self.receives * STEP;
        self.transfer.received(self.instant(), self.received as u64 / SLOT * SLOT);
        for (number, lane) in self.lanes.iter().enumerate() {
            let sample = LaneSample {
                lane: number as u64,
                least: Duration::from_secs_f64(lane.least),
                present: Duration::from_secs_f64(lane.present),
                acknowledged: lane.acknowledged as u64,
                sent_again: lane.lost,
            };
            self.transfer.sample(self.start + Duration::from_secs_f64(self.now), sample);
        }
    }

    fn send_transfer(&mut self) {
        let rate = (self.transfer.rate() as f64).min(self.wants);
        let piece = piece(self.transfer.rate() as f64);
        self.budget = (self.budget + rate * STEP).min(piece as f64 + rate * 0.001);
        while self.budget >= piece as f64 {
            self.budget -= piece as f64;
            self.transfer.admit(self.instant(), piece);
            let lane = self.turn % self.lanes.len();
            self.turn += 1;
            self.send(Owner::Lane(lane), piece as f64);
        }
    }

    fn send_other(&mut self) {
        let Some(mut other) = self.other else { return };
        let mut room = 2.0 * self.capacity * STEP;
        while other.flying + PACKET <= other.window && room > 0.0 {
            room -= PACKET;
            if self.send(Owner::Other, PACKET) {
                other.flying += PACKET;
            } else {
                if self.now - other.lowered > self.way + QUEUE {
                    (other.window, other.lowered, other.is_steep) = (other.window * 0.7, self.now, false);
                }
                break;
            }
        }
        self.other = Some(other);
    }

    /// Whether it had room in the queue.
    fn send(&mut self, owner: Owner, bytes: f64) -> bool {
        let has_room = self.queued + bytes <= self.capacity * QUEUE + 65_536.0;
        if has_room {
            self.queued += bytes;
            self.queue.push_back(Parcel { owner, bytes, sent: self.now });
        } else if let Owner::Lane(lane) = owner {
            self.lanes[lane].lost += 1;
        }
        has_room
    }

    fn drain(&mut self) {
        let mut left = self.capacity * STEP;
        while left > 0.0
            && let Some(parcel) = self.queue.front_mut()
        {
            let bytes = parcel.bytes.min(left);
            left -= bytes;
            parcel.bytes -= bytes;
            self.queued -= bytes;
            let beyond = match parcel.owner {
                Owner::Lane(lane) => self.lanes[lane].beyond,
                Owner::Other => 0.0,
            };
            self.flying.push_back((self.now + self.way + beyond, Parcel { bytes, ..*parcel }));
            if parcel.bytes <= 0.0 {
                self.queue.pop_front();
            }
        }
    }

    fn arrive(&mut self) {
        let now = self.now;
        let arrived: VecDeque<(f64, Parcel)>;
        (arrived, self.flying) = self.flying.iter().copied().partition(|(at, _)| *at <= now);
        for (_, Parcel { owner, bytes, sent }) in arrived {
            match owner {
                Owner::Lane(number) => {
                    self.delivered[0] += bytes;
                    let (lane, took) = (&mut self.lanes[number], now - sent);
                    lane.acknowledged += bytes;
                    lane.present += (took - lane.present) / 8.0;
                    lane.least = lane.least.min(took);
                }
                Owner::Other => {
                    self.delivered[1] += bytes;
                    let Some(other) = &mut self.other else { continue };
                    other.flying -= bytes;
                    // As fast as cubic after a loss on such a queue: back within a tenth of a second.
                    let share = if other.is_steep { 1.0 } else { (self.capacity * 0.02 / other.window).min(0.1) };
                    other.window += bytes * share;
                }
            }
        }
    }

    /// The 99th percentile of the queueing delay since a time, in milliseconds.
    fn p99(&self, since: f64) -> f64 {
        let mut delays = self.delays[(since / STEP) as usize..].to_vec();
        delays.sort_by(f64::total_cmp);
        delays[delays.len() * 99 / 100] * 1e3
    }
}

/// 100 Mb/s, 1 Gb/s and 10 Gb/s.
const CABLES: [f64; 3] = [1e8, 1e9, 1e10];

#[test]
fn an_idle_cable_is_used_and_its_queue_is_short() {
    for bits in CABLES {
        let mut world = World::new(bits, 1);
        let [share, _] = world.play(5.0);
        println!("{bits:e}: {share:.3}, p99 {:.2} ms", world.p99(0.0));
        assert!(share > 0.92, "{bits:e} bit/s: {share} of the cable");
        assert!(world.p99(0.0) < 1.5, "{bits:e} bit/s: {} ms", world.p99(0.0));
        assert!(!world.transfer.upload().yields);
    }
}

#[test]
fn another_flow_gets_nearly_all_and_what_it_leaves_is_used_again() {
    for bits in CABLES {
        let mut world = World::new(bits, 2);
        world.play(2.0);
        world.other_comes();
        world.play(0.5);
        let [ours, theirs] = world.play(5.0);
        let yields = world.transfer.upload().yields;
        world.other_goes();
        world.play(1.5);
        let [after, _] = world.play(3.0);
        println!("{bits:e}: {ours:.3} beside {theirs:.3}, then {after:.3}");
        assert!(ours < 0.16 && theirs > 0.8, "{bits:e} bit/s: {ours} beside {theirs}");
        assert!(yields, "{bits:e} bit/s");
        assert!(after > 0.9, "{bits:e} bit/s: {after} after the other flow");
    }
}

#[test]
fn a_longer_way_is_not_taken_for_a_queue_forever() {
    for bits in CABLES {
        let mut world = World::new(bits, 1);
        world.play(2.0);
        world.way = 0.008;
        world.play(STEADY_TIME.as_secs_f64() + 2.0);
        let since = world.now;
        let [share, _] = world.play(4.0);
        println!("{bits:e}: {share:.3}, p99 {:.2} ms", world.p99(since));
        assert!(share > 0.85, "{bits:e} bit/s: {share} on the longer way");
        assert!(world.p99(since) < 5.0, "{bits:e} bit/s: {} ms", world.p99(since));
        world.way = SHORT_WAY;
        let [share, _] = world.play(4.0);
        assert!(share > 0.85 && world.transfer.detour < 0.001, "{bits:e} bit/s: {share} back on the short way");
    }
}

#[test]
fn a_long_way_is_used_as_well() {
    for bits in CABLES {
        let mut world = World::new(bits, 1);
        world.way = 0.03;
        world.lanes[0] = Flow { present: 0.03, least: 0.03, ..Flow::default() };
        world.play(5.0);
        let [share, _] = world.play(10.0);
        println!("{bits:e}: {share:.3}, p99 {:.2} ms", world.p99(5.0));
        assert!(share > 0.88, "{bits:e} bit/s: {share}");
        assert!(world.p99(5.0) < 10.0, "{bits:e} bit/s: {} ms", world.p99(5.0));
    }
}

#[test]
fn a_queue_on_the_way_of_one_reader_does_not_slow_down_the_others() {
    let mut world = World::new(1e9, 3);
    world.play(1.0);
    world.lanes[1].beyond = 0.04;
    world.play(0.5);
    let [share, _] = world.play(4.0);
    assert!(share > 0.92, "{share}");
}

#[test]
fn a_transfer_that_its_reader_slows_down_is_not_slowed_down_further() {
    let mut world = World::new(1e9, 1);
    world.wants = 30e6;
    let since = world.now;
    let [share, _] = world.play(5.0);
    assert!((share * world.capacity - 30e6).abs() < 1e6, "{} of 30 MB/s", share * world.capacity);
    assert!(world.transfer.rate() < 100_000_000, "{}: a rate that was never used", world.transfer.rate());
    assert!(world.p99(since) < 1.0);
}

/// Acknowledgements wait behind what this end receives: a queue that does not get shorter by sending less.
#[test]
fn what_this_end_receives_does_not_slow_down_what_it_sends() {
    for (receives, least, most) in [(0.95, 0.85, 1.0), (0.0, 0.0, 0.5)] {
        let mut world = World::new(1e9, 1);
        world.play(1.0);
        world.receives = world.capacity * receives;
        let mut shares = Vec::new();
        for moment in 0..600 {
            world.lanes[0].beyond = 0.002 + 0.001 * (f64::from(moment) * 0.7).sin();
            let [share, _] = world.play(0.01);
            shares.push(share);
        }
        let share = shares[100..].iter().sum::<f64>() / 500.0;
        assert!((least..=most).contains(&share), "{share} while it receives {receives}");
        assert_eq!(world.transfer.upload().yields, receives == 0.0);
        (world.receives, world.lanes[0].beyond) = (0.0, 0.0);
        world.play(2.0);
        assert_eq!(world.transfer.reception.rate(), 0.0);
        let [share, _] = world.play(2.0);
        assert!(share > 0.9, "{share} after that");
    }
}

/// A thread that does not run for a moment looks like a queue.
#[test]
fn a_reader_that_is_late_now_and_then_costs_little() {
    for bits in CABLES {
        let mut world = World::new(bits, 1);
        for turn in 0..16 {
            // At first, when the threads begin, and about each second.
            world.lanes[0].beyond = 0.003;
            world.play(0.01);
            world.lanes[0].beyond = 0.0;
            world.play(0.6 + 0.06 * f64::from(turn));
        }
        let share = world.delivered[0] / (world.capacity * world.now);
        println!("{bits:e}: {share:.3}, p99 {:.2} ms", world.p99(0.0));
        assert!(share > 0.92, "{bits:e} bit/s: {share} of the cable");
    }
}

#[test]
fn a_transfer_after_a_pause_begins_anew() {
    let mut world = World::new(1e9, 1);
    world.play(2.0);
    assert!(world.transfer.carries.is_finite());
    let later = world.instant() + IDLE_TIME * 2;
    world.transfer.admit(later, 1);
    assert_eq!((world.transfer.rate, world.transfer.phase), (START_RATE, Phase::Climb));
}

proptest! {
    /// Whatever lanes say, the rate stays within its limits, and what is remembered too.
    #[test]
    fn no_sample_leads_out_of_the_limits(
        samples in proptest::collection::vec(
            (0u64..5_000, 0u64..4, 0u64..2_000_000, 0u64..2_000_000, 0u64..1 << 40, 0u32..3, 0usize..1 << 20),
            1..400,
        ),
    ) {
        let mut now = Instant::now();
        let mut transfer = Background::new(now);
        for (later, lane, least, present, acknowledged, sent_again, bytes) in samples {
            now += Duration::from_millis(later / 10);
            transfer.admit(now, bytes);
            let (least, present) = (Duration::from_micros(least), Duration::from_micros(present));
            transfer.sample(now, LaneSample { lane, least, present, acknowledged, sent_again });
            if later % 7 == 0 {
                transfer.leave(lane);
            }
            prop_assert!((LEAST_RATE..=MOST_RATE).contains(&transfer.rate), "{}", transfer.rate);
            prop_assert!(transfer.carries >= LEAST_RATE && transfer.detour >= 0.0);
            prop_assert!(transfer.delays.len() <= MOST_DELAYS && transfer.past.len() <= MOST_PAST);
            let _ = transfer.upload();
        }
    }
}

#[test]
fn the_rate_is_that_of_whole_slots_and_ends_with_them() {
    let (mut reception, start) = (Reception::default(), Instant::now());
    let slot = 4 << 20;
    for milliseconds in 0..3_000 {
        // A slot each 160 ms: 26 MB/s.
        reception.note(start + Duration::from_millis(milliseconds), milliseconds / 160 * slot);
        if milliseconds > 500 {
            let rate = reception.rate() / (slot as f64 / 0.16);
            assert!((0.95..1.05).contains(&rate), "{rate} at {milliseconds} ms");
        }
    }
    reception.note(start + Duration::from_millis(4_500), 2_999 / 160 * slot);
    assert!(reception.rate() == 0.0);
    reception.note(start + Duration::from_millis(5_000), slot);
    assert!(reception.rate() == 0.0, "a new copy begins");
    reception.note(start + Duration::from_millis(5_500), 3 * slot);
    assert!((reception.rate() - 4.0 * slot as f64).abs() < 1.0);
}

fn pacer(rate: u64) -> Pacer {
    Pacer::new(UploadRate::Fixed(NonZeroU64::new(rate).unwrap()), Instant::now(), None).unwrap()
}

proptest! {
    /// However late a sender wakes: in no stretch of time is more sent than the rate, one piece and the saved time
    /// allow.
    #[test]
    fn no_more_leaves_than_the_rate(
        rate in 100_000u64..1_000_000_000,
        late in proptest::collection::vec(0u64..5_000, 2..200),
    ) {
        let pacer = pacer(rate);
        let mut now = Instant::now();
        let (mut left, mut piece) = (Vec::new(), 0);
        for late in late {
            let turn = pacer.reserve(now, usize::MAX);
            now += turn.wait + Duration::from_micros(late);
            piece = turn.bytes;
            left.push(now);
        }
        for first in 0..left.len() {
            for last in first..left.len() {
                let bytes = (last - first) * piece;
                let time = left[last] - left[first] + SAVED + Duration::from_millis(5);
                prop_assert!(bytes as f64 <= rate as f64 * time.as_secs_f64() + 1.0);
            }
        }
    }
}

#[test]
fn a_sender_that_is_always_slightly_late_still_gets_the_rate() {
    let pacer = pacer(100_000_000);
    let (start, mut sent) = (Instant::now(), 0);
    let mut now = start;
    for _ in 0..1000 {
        let Turn { bytes, wait } = pacer.reserve(now, usize::MAX);
        now += if wait.is_zero() { Duration::ZERO } else { wait + Duration::from_micros(80) };
        sent += bytes;
    }
    let rate = sent as f64 / (now - start).as_secs_f64();
    assert!((0.99e8..1.01e8).contains(&rate), "{rate}");
}

#[test]
fn pieces_are_short_in_time() {
    let piece = |rate| pacer(rate).reserve(Instant::now(), usize::MAX).bytes;
    assert_eq!(piece(64 << 10), LEAST_FIXED_PIECE_BYTES);
    assert_eq!(piece(100_000_000), 50_000);
    assert_eq!(piece(u64::MAX), MOST_FIXED_PIECE_BYTES);
    assert_eq!(pacer(u64::MAX).reserve(Instant::now(), 77).bytes, 77, "no more than is left");
}

#[test]
fn a_cancelled_wait_returns_immediately() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let pacer = pacer(1);
    let mut lane = LanePace::new(Some(&pacer), &stream, 0).unwrap();
    let began = Instant::now();
    lane.wait(1 << 20, || false); // the first may go at once
    lane.wait(1, || true);
    pacer.end();
    lane.wait(1, || false);
    assert!(began.elapsed() < Duration::from_secs(60), "4096 s were reserved");
}

#[test]
fn lanes_within_this_host_are_not_limited_in_the_background() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let pacer = Pacer::new(UploadRate::Background, Instant::now(), None).unwrap();
    assert!(LanePace::new(Some(&pacer), &stream, 0).is_none());
    assert!(Pacer::new(UploadRate::Unlimited, Instant::now(), None).is_none());
}

#[test]
fn the_log_is_not_told_of_every_change() {
    let (mut told, start) = (Told { yields: false, at: None }, Instant::now());
    let upload = |yields| Upload { bytes_per_second: 1, queueing: Duration::ZERO, yields };
    assert!(!told.is_news(start, upload(false)));
    assert!(told.is_news(start, upload(true)));
    assert!(!told.is_news(start + LOG_TIME / 2, upload(false)));
    assert!(told.is_news(start + LOG_TIME, upload(false)));
}
