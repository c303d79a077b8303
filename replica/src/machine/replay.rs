//! Random runs of the machine: what must hold does after every event, and a seed replays.
//!
//! [`World`] plays everything around the machine: it answers actions as the driver's tasks would, with successes and
//! failures drawn from one seed, and lets time pass.
#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::time::{Duration, Instant};

use remora_base::pace::Random;
use remora_protocol::WaitCause;

use super::tests::{failure, offer, rules, tables};
use super::*;
use remora_base::mutation::Mutation;

/// Events of one run before the agent is asked to stop.
const EVENTS: usize = 300;

/// Events that a run may take from the signal to its end.
const LAST_EVENTS: usize = 400;

/// Draws numbers that follow from a seed.
struct Draw(Random);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.draw() % bound
    }

    /// True once in `number` draws, on average.
    fn one_in(&mut self, number: u64) -> bool {
        self.below(number) == 0
    }
}

/// Everything around the machine.
struct World {
    machine: Replica,
    draw: Draw,
    began: Instant,
    now: Instant,
    reading: Reading,
    /// The job that the server's task is at.
    job: Option<Job>,
    /// Attempts to connect to tables that have not been answered, with their generations.
    attempts: Vec<(u64, u64)>,
    connecting: bool,
    has_session: bool,
    /// The source owes an answer to a question.
    asked: bool,
    /// The last answer was yes, and the server was not pointed at the primary since.
    covered: bool,
    /// Since when the source feeds no server that has loaded.
    parts_since: Option<Instant>,
    /// The delivery was ordered to load another snapshot.
    loads_again: bool,
    /// Signals that the agent was given.
    signals: u32,
    /// The source owes an offer.
    owes_an_offer: bool,
    uses_module: bool,
    delivery_ended: bool,
    /// Another client was reported to have taken the server over.
    taken_over: bool,
    /// It was left as it is for that reason.
    left_alone: bool,
    generation: u64,
    end: Option<Result<(), Failure>>,
    /// Events and actions, as text.
    log: String,
}

impl World {
    fn new(start: Instant, seed: u64) -> World {
        let rules = Rules { stay: seed.is_multiple_of(3), replace: seed.is_multiple_of(2), ..rules() };
        let machine = Replica::begin(start, rules, Backoff::seeded(seed));
        let mut world = World {
            machine,
            draw: Draw(Random::seeded(seed)),
            began: start,
            now: start,
            reading: Reading::default(),
            job: None,
            attempts: Vec::new(),
            connecting: false,
            has_session: true,
            asked: false,
            covered: false,
            parts_since: None,
            loads_again: false,
            signals: 0,
            owes_an_offer: false,
            uses_module: false,
            delivery_ended: false,
            taken_over: false,
            left_alone: false,
            generation: 1,
            end: None,
            log: String::new(),
        };
        world.perform();
        world
    }

    /// Hands one event in, carries out what follows, and checks what must hold.
    fn step(&mut self, event: Event) {
        writeln!(self.log, "{:?} {event:?}", self.now - self.began).unwrap();
        self.machine.handle(self.now, self.reading, event);
        self.perform();
        self.check();
    }

    fn perform(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            writeln!(self.log, "    {action:?}").unwrap();
            assert!(self.end.is_none(), "{action:?} after the end");
            match action {
                Action::ConnectSource => {
                    assert!(!self.has_session && !self.connecting, "the source is connected to twice");
                    self.connecting = true;
                }
                Action::Join => {
                    assert!(self.has_session, "no session to ask over");
                    self.owes_an_offer = true;
                }
                Action::ConnectTables { attempt, offer } => self.attempts.push((attempt, offer.generation)),
                Action::Attach { .. } => assert!(!self.delivery_ended),
                Action::AskHandOff { .. } => {
                    assert!(self.reading.loaded);
                    self.asked = true;
                }
                Action::UseModule(used) => self.uses_module = used,
                Action::Server(job) => self.order(job),
                Action::Hurry => assert!(self.delivery_ended, "a sync that goes on waits for what it needs"),
                Action::CancelIntroduction => assert!(matches!(self.job, Some(Job::Introduce { .. }))),
                Action::StopDelivery { .. } => self.delivery_ended = true,
                Action::End { outcome, .. } => {
                    let code = outcome.as_ref().err().map(|failure| failure.code);
                    assert!(!self.left_alone || code == Some(Code::TakenOver), "{outcome:?} of a server taken over");
                    self.end = Some(outcome);
                }
                Action::LoadAgain => {
                    assert!(self.reading.loaded, "it has loaded nothing");
                    self.loads_again = true;
                }
                Action::EndIntroduction { .. }
                | Action::TellProgress
                | Action::GiveUpLoad
                | Action::HoldStream
                | Action::Publish
                | Action::SayLingering { .. } => {}
            }
        }
    }

    fn order(&mut self, job: Job) {
        assert_eq!(self.job, None, "one job at a time, and now {job:?}");
        match job {
            Job::Follow { from_nothing } => assert_eq!(self.uses_module, from_nothing),
            Job::PointAtPrimary => {
                assert!(self.reading.loaded, "a server with half a data set at the primary");
                let parting = self.parts_since.is_some_and(|since| self.now - since >= Duration::from_secs(5));
                assert!(self.covered || parting || self.signals > 0, "the primary was not asked");
                self.covered = false;
            }
            Job::Leave(how) => {
                assert!(self.delivery_ended, "the link is still served while the server is put in order");
                if self.taken_over {
                    assert!(matches!(how, Leaving::AsItIs | Leaving::Untouched), "{how:?} of a server taken over");
                }
                let is_whole = how == Leaving::ToPrimary;
                assert!(!is_whole || self.reading.loaded, "half a data set left as a replica");
            }
            _ => assert!(!self.taken_over, "{job:?} on a server that was taken over"),
        }
        self.job = Some(job);
    }

    /// What holds after every event.
    fn check(&self) {
        if self.end.is_some() {
            return;
        }
        let due = self.machine.deadline();
        let waits =
            self.loads_again || self.job.is_some() || self.has_session || self.connecting || !self.attempts.is_empty();
        assert!(due.is_some() || waits, "nothing gets this run on");
        match self.machine.supply.state {
            _ if self.machine.is_over() => {}
            SupplyState::Asked => assert!(self.owes_an_offer, "an offer is awaited, and the source owes none"),
            SupplyState::Connecting { attempt } => {
                let is_tried = self.attempts.iter().any(|(number, _)| *number == attempt);
                assert!(is_tried, "tables are awaited, and nothing connects to them");
            }
            SupplyState::Idle => {
                let parts = matches!(&self.machine.state, State::CatchUp(catch_up) if catch_up.parting().is_some());
                assert!(self.machine.is_on_its_way() || parts || self.loads_again, "nothing is asked for");
            }
            _ => {}
        }
        if let Some(due) = due {
            assert!(due > self.now || self.job.is_some(), "due, and nothing was done about it");
        }
    }

    /// What happens next.
    fn event(&mut self) -> Event {
        match self.draw.below(8) {
            0 | 1 => self.time(),
            2..=4 => match self.job {
                Some(job) => self.report(job),
                None => self.delivery(),
            },
            5 => self.delivery(),
            6 if self.connecting => {
                self.connecting = false;
                if self.draw.one_in(2) {
                    return Event::Source(SourceEvent::Unreachable(self.loss()));
                }
                self.has_session = true;
                Event::Source(SourceEvent::Connected)
            }
            6 if !self.attempts.is_empty() => {
                let at = self.draw.below(self.attempts.len() as u64) as usize;
                let (attempt, generation) = self.attempts.swap_remove(at);
                let works = !self.draw.one_in(4);
                let connected = if works { Ok(tables(generation)) } else { Err(failure("no table")) };
                Event::Tables { attempt, connected }
            }
            _ => self.source(),
        }
    }

    fn time(&mut self) -> Event {
        let pause = [0, 1, 40, 900, 5000][self.draw.below(5) as usize];
        let due = self.machine.deadline().filter(|_| self.draw.one_in(2));
        self.now = due.map_or(self.now + Duration::from_millis(pause), |due| due.max(self.now));
        Event::Tick
    }

    fn loss(&mut self) -> Loss {
        let passes = !self.draw.one_in(12);
        if !passes {
            self.parts_since.get_or_insert(self.now);
        }
        let (stalled, history_gone) = (self.draw.one_in(8), !passes && self.draw.one_in(2));
        Loss { passes, stalled, history_gone, failure: failure("the source is gone") }
    }

    fn source(&mut self) -> Event {
        if !self.has_session {
            // The primary itself answers.
            return if self.asked && self.draw.one_in(2) { self.answer() } else { self.time() };
        }
        Event::Source(match self.draw.below(12) {
            0 => {
                (self.has_session, self.asked, self.owes_an_offer) = (false, false, false);
                SourceEvent::Lost(self.loss())
            }
            1 => SourceEvent::Waiting { cause: WaitCause::Busy, text: "busy".into() },
            2 => {
                self.parts_since.get_or_insert(self.now);
                SourceEvent::GenerationGone { generation: self.generation, text: "too old".into() }
            }
            3..=5 if self.asked => return self.answer(),
            _ => {
                self.owes_an_offer = false;
                self.generation += u64::from(self.draw.one_in(3));
                SourceEvent::Offer(offer(self.generation))
            }
        })
    }

    fn answer(&mut self) -> Event {
        self.asked = false;
        self.covered = self.draw.one_in(2);
        Event::Source(SourceEvent::HandOffAnswer { covered: self.covered, text: String::new() })
    }

    fn delivery(&mut self) -> Event {
        if self.loads_again && !self.delivery_ended {
            (self.loads_again, self.reading.loaded) = (false, false);
            return Event::Delivery(DeliveryEvent::FeedWanted);
        }
        if self.delivery_ended || self.machine.tables().is_none() {
            return self.time();
        }
        let text = || "closed".to_string();
        self.reading.stream_fetched += self.draw.below(40);
        self.reading.stream_delivered = self.reading.stream_fetched;
        Event::Delivery(match self.draw.below(20) {
            0..=3 => DeliveryEvent::Asked,
            4 if self.uses_module => DeliveryEvent::Introduce { number: self.draw.below(3) },
            5 | 6 => DeliveryEvent::Fetched,
            7 => DeliveryEvent::PayloadSent,
            8..=12 if !self.reading.loaded => {
                self.reading.loaded = true;
                DeliveryEvent::Loaded
            }
            13 => DeliveryEvent::LinkLost { text: text(), loading: !self.reading.loaded && self.draw.one_in(3) },
            14 => DeliveryEvent::FeedLost { failure: failure("overrun") },
            15 => {
                self.reading.loaded &= !self.draw.one_in(4);
                DeliveryEvent::FeedWanted
            }
            16 if self.draw.one_in(30) => DeliveryEvent::Fatal { failure: Failure::local("disk full") },
            _ => {
                self.reading.bytes_delivered += 10;
                return Event::Tick;
            }
        })
    }

    fn lapse(&mut self) -> Lapse {
        if self.draw.one_in(2) {
            self.taken_over = true;
            return Lapse::TakenOver("was detached meanwhile".into());
        }
        Lapse::Failed(failure("no answer"))
    }

    /// What comes of a job; mostly a success.
    fn report(&mut self, job: Job) -> Event {
        self.job = None;
        let fails = self.draw.one_in(25);
        let outcome = |world: &mut World| if fails { Err(world.lapse()) } else { Ok(()) };
        let answer = |value: u64| if fails { Err(failure("no answer")) } else { Ok(value) };
        Event::Server(match job {
            Job::Prepare { .. } => Report::Prepared(outcome(self).map(|()| self.draw.one_in(2))),
            Job::Follow { from_nothing: true } if self.draw.one_in(3) => {
                Report::Followed(Err(NotFollowed::NoTransaction("no".into())))
            }
            Job::Follow { .. } => {
                let told = self.draw.one_in(2);
                Report::Followed(outcome(self).map_err(|lapse| NotFollowed::Failed { lapse, told }))
            }
            Job::Introduce { number } => {
                let outcome = match self.draw.below(5) {
                    0 => Introduced::AgainFromNothing,
                    1 => Introduced::NotUsed,
                    2 if fails => Introduced::Failed(self.lapse()),
                    _ => Introduced::Done { emptied: self.draw.one_in(2) },
                };
                Report::Introduced { number, outcome }
            }
            Job::PutSettingsBack => Report::SettingsPutBack(outcome(self)),
            Job::AskOffset => {
                let behind = self.draw.below(300);
                Report::Offset(answer(self.reading.stream_fetched.saturating_sub(behind)))
            }
            Job::Look => {
                let follows = [Follows::Nothing, Follows::Link, Follows::Another][self.draw.below(3) as usize];
                let run_id = Some(format!("run {}", self.draw.below(2)));
                let look = Look {
                    run_id,
                    follows,
                    loading: self.draw.one_in(4),
                    keys: self.draw.below(2),
                    trouble: String::new(),
                };
                // The machine takes a restart with keys for a take-over, unless they may go.
                Report::Looked(if fails { Err(failure("no answer")) } else { Ok(look) })
            }
            Job::GiveLogin => Report::LoginGiven(answer(0).map(drop)),
            Job::Verify(_) => Report::Verified(outcome(self)),
            Job::Settle => Report::Settled(answer(0).map(drop)),
            Job::PointAtPrimary => Report::PointedAtPrimary(outcome(self)),
            Job::AskPrimaryLink => Report::PrimaryLink(if self.draw.one_in(10) {
                Err(NoAnswer { passes: !self.draw.one_in(6), failure: failure("no answer") })
            } else {
                let (is_followed, up) = (!self.draw.one_in(10), self.draw.one_in(10));
                Ok(PrimaryLink { is_followed, up, syncing: self.draw.one_in(5), offset: 5 })
            }),
            Job::ReturnToLink => Report::ReturnedToLink(outcome(self)),
            Job::Finish => Report::Finished(answer(0).map(drop)),
            Job::Leave(how) => {
                // The task may find only now that another client was there.
                self.taken_over |= how != Leaving::Untouched && self.draw.one_in(8);
                let taken_over = self.taken_over && how != Leaving::Untouched;
                self.left_alone = taken_over;
                Report::Left(Left { text: "the server was left".into(), taken_over })
            }
        })
    }
}

/// One whole run, as text.
fn run(start: Instant, seed: u64) -> String {
    let mut world = World::new(start, seed);
    for _ in 0..EVENTS {
        if world.end.is_some() {
            return world.log;
        }
        let event = world.event();
        world.step(event);
    }
    // A signal ends every run: at once, or when the hand-off is done.
    world.signals += 1;
    world.step(Event::Stop { signal: "SIGTERM" });
    for _ in 0..LAST_EVENTS {
        if world.end.is_some() {
            return world.log;
        }
        let event = match world.job {
            Some(job) => world.report(job),
            None => world.time(),
        };
        world.step(event);
    }
    panic!("the run of seed {seed} does not end:\n{}", world.log);
}

#[test]
fn what_must_hold_does_after_every_event_of_random_runs_and_each_ends_after_a_signal() {
    let start = Instant::now();
    let mut logs = String::new();
    for seed in 0..2000 {
        match std::panic::catch_unwind(|| run(start, seed)) {
            Ok(log) => logs.push_str(&log),
            Err(_) => panic!("seed {seed}"),
        }
    }
    // The runs come everywhere.
    for job in [
        "Prepare { after_restart: true }",
        "Follow { from_nothing: true }",
        "Introduce",
        "GiveLogin",
        "Verify(Link)",
        "Verify(Primary)",
        "ReturnToLink",
        "Finish",
        "Leave(Untouched)",
        "Leave(AsItIs)",
        "Leave(ToPrimary)",
        "Leave(Detached)",
    ] {
        assert!(logs.contains(&format!("Server({job}")), "{job} was never ordered");
    }
    assert!(logs.contains("End { outcome: Ok(())"), "no run ended well");
}

#[test]
fn an_offer_that_is_awaited_for_ever_is_found() {
    let start = Instant::now();
    Mutation::set(Some(Mutation::OfferForgotten));
    let found = (0..200).find(|&seed| std::panic::catch_unwind(|| run(start, seed)).is_err());
    Mutation::set(None);
    assert!(found.is_some());
}

#[test]
fn a_seed_replays() {
    let start = Instant::now();
    for seed in 0..50 {
        assert_eq!(run(start, seed), run(start, seed), "seed {seed}");
    }
    assert_ne!(run(start, 1), run(start, 2));
}
