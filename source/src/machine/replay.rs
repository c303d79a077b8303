//! Random runs of the machine: the invariants hold after every event, and a seed replays.
//!
//! [`Play`] plays the replicas and the capture threads. It draws every choice from one seed, and performs the machine's
//! actions as the source's loop does.
#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use remora_protocol::Phase;
use remora_redis::ReplId;

use super::*;

const RULES: Rules = Rules {
    max_age: Duration::from_secs(300),
    max_replicas: 4,
    stall_limit: Duration::from_secs(20),
    fork_interval: Duration::from_secs(5),
    slot_bytes: 1 << 20,
    repeat_messages: Duration::ZERO,
    at_once: None,
    standby: None,
};

/// The number of events in one run.
const EVENTS: usize = 400;

/// The number of slots in a complete snapshot.
const SLOTS: u64 = 40;

/// Xorshift: random numbers that follow from the seed.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % bound.max(1)
    }
}

/// The capture that the machine has asked for.
#[derive(Clone, Copy)]
struct Running {
    generation: u64,
    with_stream: bool,
    is_open: bool,
}

struct Play {
    machine: Machine,
    draw: Draw,
    now: Instant,
    reading: Reading,
    running: Option<Running>,
    /// The generation whose thread follows the stream.
    stream: Option<u64>,
    history: u8,
    next_session: Session,
    /// The events and their actions, as text.
    told: String,
}

impl Play {
    fn new(start: Instant, seed: u64) -> Play {
        let rules = Rules { at_once: NonZeroU32::new(u32::from(seed.is_multiple_of(3))), ..RULES };
        let machine = Machine::new(start, rules, Backoff::seeded(seed), 100, seed.is_multiple_of(2));
        let draw = Draw(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let (reading, told) = (Reading::default(), String::new());
        Play { machine, draw, now: start, reading, running: None, stream: None, history: 1, next_session: 1, told }
    }

    fn step(&mut self) {
        let pause = [0, 1, 50, 900, 4000, 30_000];
        self.now += Duration::from_millis(pause[self.draw.below(6) as usize]);
        let event = self.event();
        let is_report = matches!(event, Event::Progress { .. });
        let _ = write!(self.told, "{event:?} ");
        let actions = self.machine.apply(self.now, self.reading, event);
        let _ = writeln!(self.told, "{actions:?}");
        self.perform(&actions);
        self.check(is_report);
    }

    fn event(&mut self) -> Event {
        match self.draw.below(10) {
            0 => self.join(),
            1 => match self.some_session() {
                Some(session) => Event::Gone { session, done: self.draw.below(2) == 0 },
                None => Event::Tick,
            },
            2..=5 => match self.some_session() {
                Some(session) => self.progress(session),
                None => self.join(),
            },
            6..=8 => self.capture(),
            _ => Event::Tick,
        }
    }

    fn join(&mut self) -> Event {
        let session = self.next_session;
        self.next_session += 1;
        let generation = self.machine.status().generation().unwrap_or(100);
        let resume = match self.draw.below(4) {
            0 => Some(Resume { generation, held_slots: self.draw.below(SLOTS), loaded: None }),
            1 => {
                let loaded = Some((replid(self.history), self.reading.journal_end + 1));
                Some(Resume { generation, held_slots: 0, loaded })
            }
            _ => None,
        };
        let reads = if self.draw.below(4) == 0 { Format::Shared } else { Format::Own };
        let zone = ["", "east", "west"][self.draw.below(3) as usize].to_owned();
        Event::Joined { session, name: String::new(), address: String::new(), zone, resume, reads }
    }

    fn progress(&mut self, session: Session) -> Event {
        let phase = [Phase::Transfer, Phase::Load, Phase::CatchUp, Phase::Stay][self.draw.below(4) as usize];
        // A replica that loads has all its slots and reads no slot again. The loop drops reports of replicas that were
        // offered nothing.
        let Some(replica) = self.machine.status().replica(session).filter(|replica| replica.generation.is_some())
        else {
            return Event::Tick;
        };
        let phase = phase.max(replica.at.phase);
        let slots_below = self.draw.below(SLOTS);
        let applied_offset = self.draw.below(self.reading.journal_end + 1);
        let at = Report { phase, slots_below, slots_held: slots_below, applied_offset, ..Report::NOTHING };
        Event::Progress { session, at }
    }

    /// The next event of a capture thread or the stream's thread.
    fn capture(&mut self) -> Event {
        let choice = self.draw.below(12);
        match self.running {
            Some(running) if !running.is_open && choice > 9 => {
                Event::Capture(CaptureEvent::Forked { generation: running.generation })
            }
            Some(running) if !running.is_open && choice > 1 => {
                self.reading = Reading { published: 0, retired: 0, writer_waits: 0, ..self.reading };
                let offset = self.reading.journal_end + self.draw.below(50);
                if running.with_stream {
                    (self.reading.journal_first, self.reading.journal_end) = (offset + 1, offset);
                    self.stream = Some(running.generation);
                }
                self.running = Some(Running { is_open: true, ..running });
                let (generation, replid) = (running.generation, replid(self.history));
                Event::Capture(CaptureEvent::Started { generation, replid, offset })
            }
            Some(running) if running.is_open && choice > 4 => {
                // The writer fills slots that it may reuse, or waits.
                self.reading.published = (self.reading.published + 1 + self.draw.below(8)).min(SLOTS);
                self.reading.writer_waits += u64::from(choice > 8);
                self.reading.retired = self.machine.retire_below.min(self.reading.published);
                self.stream_grows();
                Event::Tick
            }
            Some(running) if running.is_open && choice > 1 => {
                self.running = None;
                Event::Capture(CaptureEvent::Completed { generation: running.generation, bytes: 1 })
            }
            Some(running) => {
                self.running = None;
                self.stream = self.stream.filter(|&generation| generation != running.generation);
                let cause = String::new();
                let error = if choice == 0 {
                    CaptureError::HistoryGone
                } else {
                    CaptureError::Link { during: "snapshot", cause }
                };
                Event::Capture(CaptureEvent::Failed { generation: running.generation, error })
            }
            None => match (self.stream, choice) {
                (Some(generation), 0) => {
                    let (from, to) = (replid(self.history), replid(self.history % 8 + 1));
                    (self.history, self.stream) = (self.history % 8 + 1, None);
                    let at = self.reading.journal_end;
                    Event::Capture(CaptureEvent::HistoryChanged { generation, from, to, at })
                }
                (Some(_), 1) => {
                    self.stream = None;
                    Event::Capture(CaptureEvent::StreamLost { text: String::new() })
                }
                (Some(_), 2) => Event::Capture(CaptureEvent::StreamResumed),
                (Some(_), _) => {
                    self.stream_grows();
                    Event::Tick
                }
                (None, _) => Event::Tick,
            },
        }
    }

    /// The stream grows, and the journal may lose its oldest bytes.
    fn stream_grows(&mut self) {
        if self.stream.is_some() {
            self.reading.journal_end += self.draw.below(100);
            let lost = if self.draw.below(10) == 0 { 60 } else { 0 };
            self.reading.journal_first = (self.reading.journal_first + lost).min(self.reading.journal_end + 1);
        }
    }

    fn some_session(&mut self) -> Option<Session> {
        let replicas = self.machine.status().replicas;
        let index = self.draw.below(replicas.len() as u64) as usize;
        replicas.keys().nth(index).copied()
    }

    fn perform(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Capture { generation, with_stream, .. } => {
                    assert!(!with_stream || self.stream.is_none(), "a second stream beside a running one");
                    self.running = Some(Running { generation: *generation, with_stream: *with_stream, is_open: false });
                }
                Action::StopCapture { generation } => {
                    self.running = self.running.filter(|running| running.generation != *generation);
                }
                Action::EndStream { generation } if self.stream == Some(*generation) => self.stream = None,
                _ => {}
            }
        }
    }

    /// Checks the invariants that the machine's docs state. After a report, time may not have taken effect.
    fn check(&self, is_report: bool) {
        let machine = &self.machine;
        let waiting = machine.waiting();
        let is_queued = |session: &Session| {
            let told = machine.replicas[session].told.as_ref();
            told.is_some_and(|(cause, _)| *cause == WaitCause::Turn)
        };
        let (queued, unserved): (Vec<_>, Vec<_>) = waiting.iter().copied().partition(is_queued);
        for &session in &unserved {
            assert!(!machine.can_serve(self.now, session), "{session} waits and could be served\n{}", self.told);
        }
        // That a reader takes nothing, or that a snapshot is too old, is seen at the next look at all replicas.
        let left = machine.turns_left(self.now, Duration::MAX);
        for session in queued {
            let has_none = left.as_ref().is_some_and(|left| left.is_none(&machine.replicas[&session].zone));
            let is_in_turn = has_none && machine.needs_turn(session);
            let waits = is_in_turn || !machine.can_serve(self.now, session);
            assert!(waits, "{session} waits for a turn that it could have\n{}", self.told);
        }
        let begins = machine.why_not_begin(self.now).is_none();
        assert!(
            unserved.is_empty() || !begins || is_report,
            "{unserved:?} wait and a snapshot could begin\n{}",
            self.told
        );
        for (session, replica) in machine.status().replicas {
            let has_passed = !replica.is_reading() || replica.at.slots_below >= machine.retire_below;
            assert!(has_passed, "{session} still needs a slot that may be reused\n{}", self.told);
        }
        assert!(machine.status().replicas.len() <= RULES.max_replicas, "{}", self.told);
        let all = &machine.replicas;
        assert_eq!(machine.slowest, Slowest::of(all), "the slowest readers are not up to date\n{}", self.told);
        assert_eq!(machine.has_waiting, !waiting.is_empty(), "{}", self.told);
    }
}

fn replid(byte: u8) -> ReplId {
    String::from_utf8(vec![b'0' + byte; 40]).unwrap().parse().unwrap()
}

fn run(start: Instant, seed: u64) -> String {
    let mut play = Play::new(start, seed);
    for _ in 0..EVENTS {
        play.step();
    }
    play.told
}

#[test]
fn the_invariants_hold_after_every_event_and_a_seed_replays() {
    let start = Instant::now();
    let mut all = String::new();
    for seed in 0..200 {
        let told = run(start, seed);
        assert_eq!(told, run(start, seed), "seed {seed} does not replay");
        all.push_str(&told);
    }
    let reached = [
        "Offer {",
        "AllowRetiring",
        "Stalled",
        "GenerationGone",
        "EndStream",
        "StopCapture",
        "LastAttemptFailed",
        "Turn",
    ];
    for wanted in reached {
        assert!(all.contains(wanted), "no run has reached {wanted}");
    }
}
