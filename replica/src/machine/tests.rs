//! Every state × event, and the sequences that matter by name.
#![allow(clippy::unwrap_used)]

use std::fmt::Write;
use std::time::{Duration, Instant};

use remora_fabric::TransportKind;
use remora_protocol::{Announce, Offer, TableOffer, WaitCause};

use super::*;
use remora_conversation::Protection;
use remora_server::PinSizes;

pub(super) fn rules() -> Rules {
    Rules {
        intercepted: false,
        retry_for: Duration::from_secs(300),
        linger: Duration::from_secs(30),
        stay: false,
        replace: false,
        server: "redis://replica:6379".into(),
        source: "source:7000".into(),
        primary: "primary:6379".into(),
        run_id: Some("first run".into()),
        sizes: PinSizes::SERVERS,
    }
}

pub(super) fn offer(generation: u64) -> Box<Offer> {
    let table = || TableOffer {
        generation,
        first_offset: 1,
        slot_size: 4096,
        slots: 8,
        retained: true,
        keys: Vec::new(),
        seal: Vec::new(),
        compressed: false,
    };
    Box::new(Offer {
        generation,
        replid: "a".repeat(40).parse().ok(),
        former: None,
        offset: 1000,
        snapshot: table(),
        journal: table(),
        primary: Announce { host: "primary".into(), port: 6379, tls: false, source_sees_as: String::new() },
        server: "redis 7.0.15".into(),
        run_id: String::new(),
        process: 1,
        backlog_bytes: 100,
        write_rate: 0,
        upstream: None,
        warning: String::new(),
        obstacle: String::new(),
        terms: None,
    })
}

pub(super) fn tables(generation: u64) -> Tables {
    let protection = Protection::Plaintext;
    Tables { offer: offer(generation), transport: TransportKind::Tcp, why: String::new(), protection }
}

pub(super) fn failure(text: &str) -> Failure {
    Failure::new(Code::Source, text)
}

fn loss(passes: bool, stalled: bool) -> Loss {
    Loss { passes, stalled, ..Loss::passing(failure("it is gone")) }
}

fn taken_over() -> Lapse {
    Lapse::TakenOver("was detached meanwhile".into())
}

fn look(follows: Follows) -> Look {
    Look { run_id: Some("first run".into()), follows, loading: false, keys: 5, trouble: "no connection".into() }
}

/// What a server in step with the primary brings about.
const IN_STEP_DOES: [Action; 2] = [Action::StopDelivery { done: true }, Action::Server(Job::Finish)];

const IN_STEP: PrimaryLink = PrimaryLink { is_followed: true, up: true, syncing: false, offset: 2000 };
const COPYING: PrimaryLink = PrimaryLink { is_followed: true, up: false, syncing: true, offset: 0 };
const NOT_FOLLOWED: PrimaryLink = PrimaryLink { is_followed: false, up: false, syncing: false, offset: 0 };

/// A machine, its clock, and what the delivery shows.
struct Play {
    machine: Replica,
    now: Instant,
    reading: Reading,
}

impl Play {
    fn with(rules: Rules) -> Play {
        let now = Instant::now();
        let mut play = Play {
            machine: Replica::begin(now, rules, Backoff::seeded(1)),
            now,
            reading: Reading { readers: 0, ..Reading::default() },
        };
        assert_eq!(play.actions(), [Action::Join]);
        play
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.machine.poll_action()).collect()
    }

    /// Hands one event in, and gives back what follows.
    fn on(&mut self, event: Event) -> Vec<Action> {
        self.machine.handle(self.now, self.reading, event);
        self.actions()
    }

    fn report(&mut self, report: Report) -> Vec<Action> {
        self.on(Event::Server(report))
    }

    fn delivery(&mut self, event: DeliveryEvent) -> Vec<Action> {
        self.on(Event::Delivery(event))
    }

    /// Lets time pass.
    fn after(&mut self, time: Duration) -> Vec<Action> {
        self.now += time;
        self.on(Event::Tick)
    }

    /// Goes to the next deadline.
    fn wait(&mut self) -> Vec<Action> {
        let at = self.machine.deadline().expect("something is due");
        self.now = self.now.max(at);
        self.on(Event::Tick)
    }

    // ---- the way through a sync without trouble ----

    fn offered(&mut self) -> Vec<Action> {
        let actions = self.on(Event::Source(SourceEvent::Offer(offer(1))));
        let Some(Action::ConnectTables { attempt, .. }) = actions.first() else { panic!("{actions:?}") };
        self.on(Event::Tables { attempt: *attempt, connected: Ok(tables(1)) })
    }

    fn transfer(rules: Rules) -> Play {
        let mut play = Play::with(rules);
        let actions = play.offered();
        assert_eq!(actions, [Action::Attach { attempt: 1 }, Action::Server(Job::Prepare { after_restart: false })]);
        let actions = play.report(Report::Prepared(Ok(false)));
        assert_eq!(actions, [Action::UseModule(false), Action::Server(Job::Follow { from_nothing: false })]);
        assert_eq!(play.report(Report::Followed(Ok(()))), []);
        assert_eq!(play.delivery(DeliveryEvent::Asked), []);
        play.reading.bytes_delivered = 10;
        play
    }

    fn loading(rules: Rules) -> Play {
        let mut play = Play::transfer(rules);
        assert_eq!(play.delivery(DeliveryEvent::Fetched), []);
        play
    }

    fn catch_up(rules: Rules) -> Play {
        let mut play = Play::loading(rules);
        play.reading = Reading { loaded: true, stream_fetched: 2000, stream_delivered: 2000, ..play.reading };
        let actions = play.delivery(DeliveryEvent::Loaded);
        assert_eq!(actions, [Action::TellProgress, Action::Server(Job::PutSettingsBack)]);
        assert_eq!(play.report(Report::SettingsPutBack(Ok(()))), [Action::Server(Job::AskOffset)]);
        play
    }

    fn asked(rules: Rules) -> Play {
        let mut play = Play::catch_up(rules);
        let actions = play.report(Report::Offset(Ok(2000)));
        assert_eq!(actions, [Action::AskHandOff { generation: 1, offset: 2000 }]);
        play
    }

    /// The stream through the source is over.
    fn parting(rules: Rules) -> Play {
        let mut play = Play::asked(rules);
        let gone = SourceEvent::GenerationGone { generation: 1, text: "the history changed".into() };
        assert_eq!(play.on(Event::Source(gone)), [Action::Server(Job::AskOffset)]);
        assert_eq!(play.report(Report::Offset(Ok(2000))), [Action::AskHandOff { generation: 1, offset: 2000 }]);
        play
    }

    fn stopping(rules: Rules) -> Play {
        let mut play = Play::asked(rules);
        assert_eq!(play.on(Event::Stop { signal: "SIGTERM" }), [Action::Server(Job::AskOffset)]);
        assert_eq!(play.report(Report::Offset(Ok(2000))), [Action::AskHandOff { generation: 1, offset: 2000 }]);
        play
    }

    /// On its way to the primary because of a signal.
    fn sent_away(mut self) -> Play {
        self.on(Event::Stop { signal: "SIGTERM" });
        self.report(Report::Offset(Ok(2000)));
        let answer = SourceEvent::HandOffAnswer { covered: true, text: String::new() };
        assert_eq!(self.on(Event::Source(answer)), [Action::HoldStream, Action::Server(Job::Settle)]);
        self
    }

    fn staying() -> Play {
        let mut play = Play::catch_up(Rules { stay: true, ..rules() });
        assert_eq!(play.report(Report::Offset(Ok(2000))), []);
        assert_eq!(play.machine.phase(), Some(Phase::Stay));
        play
    }

    fn settling(rules: Rules) -> Play {
        let mut play = Play::asked(rules);
        let answer = SourceEvent::HandOffAnswer { covered: true, text: String::new() };
        assert_eq!(play.on(Event::Source(answer)), [Action::HoldStream, Action::Server(Job::Settle)]);
        play
    }

    fn pointing(rules: Rules) -> Play {
        let mut play = Play::settling(rules);
        assert_eq!(play.report(Report::Settled(Ok(()))), [Action::Server(Job::PointAtPrimary)]);
        play
    }

    fn watching(rules: Rules) -> Play {
        let mut play = Play::pointing(rules);
        assert_eq!(play.report(Report::PointedAtPrimary(Ok(()))), []);
        assert_eq!(play.wait(), [Action::Server(Job::AskPrimaryLink)]);
        play
    }

    fn returning(rules: Rules) -> Play {
        let mut play = Play::watching(rules);
        play.now += Duration::from_secs(21);
        let nothing = PrimaryLink { syncing: false, ..COPYING };
        let actions = play.report(Report::PrimaryLink(Ok(nothing)));
        assert_eq!(actions, [Action::Server(Job::ReturnToLink)]);
        play
    }

    fn finishing(rules: Rules) -> Play {
        let mut play = Play::watching(rules);
        assert_eq!(play.report(Report::PrimaryLink(Ok(IN_STEP))), IN_STEP_DOES);
        play
    }

    fn lingering(rules: Rules) -> Play {
        let mut play = Play::finishing(rules);
        play.reading.readers = 2;
        let actions = play.report(Report::Finished(Ok(())));
        assert!(actions.contains(&Action::SayLingering { readers: 2 }), "{actions:?}");
        play
    }

    fn leaving(rules: Rules) -> Play {
        let mut play = Play::transfer(rules);
        let actions = play.on(Event::Stop { signal: "SIGTERM" });
        assert_eq!(actions, [Action::StopDelivery { done: false }, Action::Server(Job::Leave(Leaving::Detached))]);
        play
    }

    fn ended(rules: Rules) -> Play {
        let mut play = Play::leaving(rules);
        let actions = play.report(Report::Left(Left::in_order("the server was detached and emptied")));
        assert!(matches!(actions.as_slice(), [Action::End { outcome: Err(_), .. }]), "{actions:?}");
        play
    }

    /// Has the server's task at the job that this report answers.
    fn pretend_job_of(&mut self, report: &Report) {
        let jobs = [
            Job::Prepare { after_restart: false },
            Job::Follow { from_nothing: false },
            Job::Introduce { number: 1 },
            Job::PutSettingsBack,
            Job::AskOffset,
            Job::Look,
            Job::GiveLogin,
            Job::Verify(Followed::Link),
            Job::Settle,
            Job::PointAtPrimary,
            Job::AskPrimaryLink,
            Job::ReturnToLink,
            Job::Finish,
            Job::Leave(Leaving::AsItIs),
        ];
        if let Some(job) = jobs.into_iter().find(|&job| report.answers(job)) {
            self.machine.server.desk.pretend(job);
        }
    }

    fn state(&self) -> String {
        let text = format!("{:?}", self.machine.state);
        let end = text.find([' ', '(', '{']).unwrap_or(text.len());
        let name = &text[..end];
        match &self.machine.state {
            State::Ending(ending) => {
                let text = format!("{ending:?}");
                text[..text.find([' ', '(', '{']).unwrap_or(text.len())].to_string()
            }
            State::CatchUp(catch_up) if catch_up.parting().is_some() => format!("{name}, parting"),
            _ => name.to_string(),
        }
    }
}

/// Every state, with the way there.
fn states() -> Vec<(&'static str, Play)> {
    vec![
        ("Waiting", Play::with(rules())),
        ("Transfer", Play::transfer(rules())),
        ("Loading", Play::loading(rules())),
        ("CatchUp", Play::catch_up(rules())),
        ("CatchUp, asked", Play::asked(rules())),
        ("CatchUp, parting", Play::parting(rules())),
        ("CatchUp, stopping", Play::stopping(rules())),
        ("Staying", Play::staying()),
        ("HandingOff, settling", Play::settling(rules())),
        ("HandingOff, pointing", Play::pointing(rules())),
        ("HandingOff, watching", Play::watching(rules())),
        ("Returning", Play::returning(rules())),
        ("Finishing", Play::finishing(rules())),
        ("Lingering", Play::lingering(rules())),
        ("Leaving", Play::leaving(rules())),
        ("Ended", Play::ended(rules())),
    ]
}

/// Every event, in each of the ways in which it is different.
fn events() -> Vec<(&'static str, Event)> {
    use {DeliveryEvent as D, Report as R, SourceEvent as S};
    let refused = || Failure::new(Code::Server, "no");
    let source = |event| Event::Source(event);
    let offset = |offset| Event::Server(R::Offset(offset));
    let silent = |passes| Event::Server(R::PrimaryLink(Err(NoAnswer { passes, failure: refused() })));
    let link = |link| Event::Server(R::PrimaryLink(Ok(link)));
    let introduced = |outcome| Event::Server(R::Introduced { number: 1, outcome });
    let not_followed = |told| NotFollowed::Failed { lapse: Lapse::Failed(refused()), told };
    vec![
        ("Tick", Event::Tick),
        ("Stop", Event::Stop { signal: "SIGTERM" }),
        ("Source Connected", source(S::Connected)),
        ("Source Unreachable, passes", source(S::Unreachable(loss(true, false)))),
        ("Source Unreachable, for good", source(S::Unreachable(loss(false, false)))),
        ("Source Lost, passes", source(S::Lost(loss(true, false)))),
        ("Source Lost, stalled", source(S::Lost(loss(true, true)))),
        ("Source Lost, for good", source(S::Lost(loss(false, false)))),
        ("Source Waiting", source(S::Waiting { cause: WaitCause::Busy, text: "busy".into() })),
        ("Source Offer", source(S::Offer(offer(2)))),
        ("Source GenerationGone", source(S::GenerationGone { generation: 1, text: "too old".into() })),
        ("Source HandOffAnswer, covered", source(S::HandOffAnswer { covered: true, text: String::new() })),
        ("Source HandOffAnswer, not covered", source(S::HandOffAnswer { covered: false, text: "small".into() })),
        ("Tables of no attempt", Event::Tables { attempt: 99, connected: Ok(tables(2)) }),
        ("Delivery Asked", Event::Delivery(D::Asked)),
        ("Delivery Introduce", Event::Delivery(D::Introduce { number: 1 })),
        ("Delivery Fetched", Event::Delivery(D::Fetched)),
        ("Delivery PayloadSent", Event::Delivery(D::PayloadSent)),
        ("Delivery Loaded", Event::Delivery(D::Loaded)),
        ("Delivery LinkLost", Event::Delivery(D::LinkLost { text: "closed".into(), loading: false })),
        ("Delivery LinkLost, loading", Event::Delivery(D::LinkLost { text: "closed".into(), loading: true })),
        ("Delivery FeedLost", Event::Delivery(D::FeedLost { failure: failure("overrun") })),
        ("Delivery FeedWanted", Event::Delivery(D::FeedWanted)),
        ("Delivery Fatal", Event::Delivery(D::Fatal { failure: Failure::local("disk full") })),
        ("Prepared, by module", Event::Server(R::Prepared(Ok(true)))),
        ("Prepared, failed", Event::Server(R::Prepared(Err(Lapse::Failed(refused()))))),
        ("Followed", Event::Server(R::Followed(Ok(())))),
        ("Followed, no transaction", Event::Server(R::Followed(Err(NotFollowed::NoTransaction("no".into()))))),
        ("Followed, failed before", Event::Server(R::Followed(Err(not_followed(false))))),
        ("Followed, failed behind", Event::Server(R::Followed(Err(not_followed(true))))),
        ("Introduced", introduced(Introduced::Done { emptied: true })),
        ("Introduced, from nothing again", introduced(Introduced::AgainFromNothing)),
        ("Introduced, not used", introduced(Introduced::NotUsed)),
        ("Introduced, cancelled", introduced(Introduced::Cancelled)),
        ("Introduced, taken over", introduced(Introduced::Failed(taken_over()))),
        ("SettingsPutBack, failed", Event::Server(R::SettingsPutBack(Err(Lapse::Failed(refused()))))),
        ("SettingsPutBack, taken over", Event::Server(R::SettingsPutBack(Err(taken_over())))),
        ("Offset, near", offset(Ok(1990))),
        ("Offset, behind", offset(Ok(1900))),
        ("Offset, no answer", offset(Err(refused()))),
        ("Looked, follows link", Event::Server(R::Looked(Ok(look(Follows::Link))))),
        ("Looked, follows another", Event::Server(R::Looked(Ok(look(Follows::Another))))),
        ("Looked, no answer", Event::Server(R::Looked(Err(refused())))),
        ("LoginGiven", Event::Server(R::LoginGiven(Ok(())))),
        ("Verified", Event::Server(R::Verified(Ok(())))),
        ("Verified, taken over", Event::Server(R::Verified(Err(taken_over())))),
        ("Settled", Event::Server(R::Settled(Ok(())))),
        ("Settled, failed", Event::Server(R::Settled(Err(refused())))),
        ("PointedAtPrimary", Event::Server(R::PointedAtPrimary(Ok(())))),
        ("PointedAtPrimary, taken over", Event::Server(R::PointedAtPrimary(Err(taken_over())))),
        ("PrimaryLink, up", link(IN_STEP)),
        ("PrimaryLink, full copy", link(COPYING)),
        ("PrimaryLink, not followed", link(NOT_FOLLOWED)),
        ("PrimaryLink, no answer yet", silent(true)),
        ("PrimaryLink, no answer", silent(false)),
        ("ReturnedToLink", Event::Server(R::ReturnedToLink(Ok(())))),
        ("ReturnedToLink, taken over", Event::Server(R::ReturnedToLink(Err(taken_over())))),
        ("Finished", Event::Server(R::Finished(Ok(())))),
        ("Finished, failed", Event::Server(R::Finished(Err(refused())))),
        ("Left", Event::Server(R::Left(Left::in_order("left")))),
        ("Task ended", Event::Server(R::Ended)),
    ]
}

/// An action in a few words.
fn short(action: &Action) -> String {
    match action {
        Action::Server(job) => format!("{job:?}"),
        Action::ConnectTables { .. } => "ConnectTables".into(),
        Action::End { outcome: Ok(()), .. } => "End well".into(),
        Action::End { outcome: Err(failure), .. } => format!("End {:?}", failure.code),
        other => format!("{other:?}"),
    }
}

/// The table: what each event does in each state. A pair that is not listed does nothing.
///
/// A report comes while the server's task is at its job, also where no event sequence has that job under way in that
/// state. A job that an event asks for while the task is at another one is not seen: it comes with the next report.
#[test]
fn every_event_in_every_state_does_what_the_table_says() {
    let mut table = String::new();
    for (index, (state, _)) in states().iter().enumerate() {
        for (name, event) in events() {
            let mut play = states().swap_remove(index).1;
            play.reading.loaded |= matches!(event, Event::Delivery(DeliveryEvent::Loaded));
            if let Event::Server(report) = &event {
                play.pretend_job_of(report);
            }
            let before = play.state();
            let actions = play.on(event);
            let (after, actions) = (play.state(), actions.iter().map(short).collect::<Vec<_>>().join(", "));
            if after == before && actions.is_empty() {
                continue;
            }
            let moves = if after == before { String::new() } else { format!("-> {after} ") };
            let does = if actions.is_empty() { String::new() } else { format!("| {actions}") };
            let line = format!("{state:<22} {name:<34} {moves}{does}");
            writeln!(table, "{}", line.trim_end()).unwrap();
        }
        table.push('\n');
    }
    let expected = include_str!("table.txt");
    if table != expected {
        let path = std::env::temp_dir().join("remora-machine-table.txt");
        std::fs::write(&path, &table).unwrap();
        let differing = table.lines().zip(expected.lines()).find(|(is, should)| is != should);
        panic!("the table differs from table.txt, first at {differing:?}; what it is now: {}", path.display());
    }
}

// ---- sequences ----

#[test]
fn a_server_is_not_handed_over_while_the_end_of_the_stream_is_not_known() {
    let mut play = Play::catch_up(rules());
    play.reading.stream_paused = true;
    assert_eq!(play.report(Report::Offset(Ok(2000))), []);
    play.reading.stream_paused = false;
    assert_eq!(play.after(Duration::from_secs(1)), [Action::Server(Job::AskOffset)]);
    assert_eq!(play.report(Report::Offset(Ok(2000))), [Action::AskHandOff { generation: 1, offset: 2000 }]);
}

#[test]
fn the_delivery_is_ordered_to_use_the_module_before_the_server_is_pointed_at_the_link() {
    let mut play = Play::with(rules());
    play.offered();
    let actions = play.report(Report::Prepared(Ok(true)));
    assert_eq!(actions, [Action::UseModule(true), Action::Server(Job::Follow { from_nothing: true })]);
    // Where the server permits no transaction, the order is taken back before the server is told.
    let actions = play.report(Report::Followed(Err(NotFollowed::NoTransaction("no".into()))));
    assert_eq!(actions, [Action::UseModule(false), Action::Server(Job::Follow { from_nothing: false })]);
}

#[test]
fn a_snapshot_that_is_lost_after_its_last_slot_arrived_is_read_from_its_beginning() {
    let mut play = Play::with(rules());
    play.offered();
    play.delivery(DeliveryEvent::Fetched);
    assert_eq!(play.machine.phase(), Some(Phase::Load));
    play.delivery(DeliveryEvent::FeedLost { failure: failure("revoked") });
    play.on(Event::Source(SourceEvent::Offer(offer(2))));
    play.on(Event::Tables { attempt: 2, connected: Ok(tables(2)) });
    assert_eq!(play.machine.phase(), Some(Phase::Transfer), "the source keeps no slots for a replica that loads");
}

#[test]
fn tables_of_an_earlier_attempt_are_not_attached() {
    let mut play = Play::with(rules());
    play.on(Event::Source(SourceEvent::Offer(offer(1))));
    let actions = play.on(Event::Source(SourceEvent::Offer(offer(2))));
    assert_eq!(actions, [Action::ConnectTables { attempt: 2, offer: offer(2) }]);
    assert_eq!(play.on(Event::Tables { attempt: 1, connected: Ok(tables(1)) }), []);
    let actions = play.on(Event::Tables { attempt: 2, connected: Ok(tables(2)) });
    assert_eq!(actions.first(), Some(&Action::Attach { attempt: 2 }));
    assert_eq!(play.machine.tables().unwrap().offer.generation, 2);
}

#[test]
fn a_server_that_stays_away_is_looked_at_and_told_again_after_a_restart() {
    let mut play = Play::transfer(rules());
    play.delivery(DeliveryEvent::LinkLost { text: "closed".into(), loading: false });
    assert_eq!(play.after(Duration::from_millis(1900)), []);
    assert_eq!(play.wait(), [Action::Server(Job::Look)]);
    let restarted = Look { run_id: Some("second run".into()), keys: 0, ..look(Follows::Nothing) };
    let actions = play.report(Report::Looked(Ok(restarted.clone())));
    assert_eq!(actions, [Action::Server(Job::Prepare { after_restart: true })]);
    play.report(Report::Prepared(Ok(false)));
    assert_eq!(play.report(Report::Followed(Ok(()))), []);
    // It does not come again: the same look is no restart now.
    assert_eq!(play.wait(), [Action::Server(Job::Look)]);
    let actions = play.report(Report::Looked(Ok(restarted)));
    assert_eq!(actions, [Action::Server(Job::Verify(Followed::Link))]);
    let actions = play.report(Report::Verified(Err(taken_over())));
    assert_eq!(actions, [Action::StopDelivery { done: false }, Action::Server(Job::Leave(Leaving::AsItIs))]);
}

#[test]
fn a_server_that_restarted_with_keys_is_only_filled_again_with_replace() {
    for replace in [false, true] {
        let mut play = Play::transfer(Rules { replace, ..rules() });
        play.delivery(DeliveryEvent::LinkLost { text: "closed".into(), loading: false });
        play.after(Duration::from_secs(3));
        let restarted = Look { run_id: Some("second run".into()), ..look(Follows::Nothing) };
        let actions = play.report(Report::Looked(Ok(restarted)));
        let filled = actions == [Action::Server(Job::Prepare { after_restart: true })];
        assert_eq!(filled, replace, "{actions:?}");
        if !replace {
            assert!(actions.contains(&Action::Server(Job::Leave(Leaving::AsItIs))), "{actions:?}");
        }
    }
}

#[test]
fn a_server_that_came_while_it_was_looked_at_is_left_in_peace() {
    let mut play = Play::transfer(rules());
    play.delivery(DeliveryEvent::LinkLost { text: "closed".into(), loading: false });
    play.after(Duration::from_secs(3));
    play.delivery(DeliveryEvent::Asked);
    assert_eq!(play.report(Report::Looked(Ok(look(Follows::Nothing)))), []);
    assert_eq!(play.machine.deadline(), None, "nothing more is expected of it");
}

#[test]
fn a_source_that_is_lost_is_tried_again_until_retry_for_is_over() {
    let mut play = Play::transfer(Rules { retry_for: Duration::from_secs(10), ..rules() });
    let began = play.now;
    let mut actions = play.on(Event::Source(SourceEvent::Lost(loss(true, false))));
    while actions.is_empty() {
        actions = play.wait();
        assert_eq!(actions, [Action::ConnectSource]);
        actions = play.on(Event::Source(SourceEvent::Unreachable(loss(true, false))));
    }
    assert_eq!(actions.last(), Some(&Action::Server(Job::Leave(Leaving::Detached))));
    let took = play.now - began;
    assert!(took > Duration::from_secs(10) && took < Duration::from_secs(16), "{took:?}");
    let actions = play.report(Report::Left(Left::in_order("the server was detached and emptied")));
    let Some(Action::End { outcome: Err(failure), .. }) = actions.first() else { panic!("{actions:?}") };
    assert_eq!(failure.message, "it is gone; tried for 10 s (--retry-for); the server was detached and emptied");
}

/// A path that damages slots: every feed connects, and is lost after 100 ms. Gives back what followed the last loss,
/// and the time since the first one.
fn damaged(play: &mut Play, losses: u32, mut between: impl FnMut(&mut Play)) -> (Vec<Action>, Duration) {
    let began = play.now;
    let mut actions = Vec::new();
    for _ in 0..losses {
        play.now += Duration::from_millis(100);
        actions = play.delivery(DeliveryEvent::FeedLost { failure: failure("slot 0 is damaged") });
        if !actions.is_empty() {
            break;
        }
        while play.wait() != [Action::Join] {}
        play.offered();
        between(play);
    }
    (actions, play.now - began)
}

#[test]
fn damage_that_does_not_stop_ends_after_retry_for_though_every_feed_connects() {
    let mut play = Play::transfer(Rules { retry_for: Duration::from_secs(10), ..rules() });
    // The stream arrives: that brings the snapshot no further.
    let (actions, took) = damaged(&mut play, 1000, |play| play.reading.stream_fetched += 100);
    assert_eq!(actions.last(), Some(&Action::Server(Job::Leave(Leaving::Detached))));
    assert!(took > Duration::from_secs(10) && took < Duration::from_secs(16), "{took:?}");
    let actions = play.report(Report::Left(Left::in_order("the server was detached and emptied")));
    let Some(Action::End { outcome: Err(failure), .. }) = actions.first() else { panic!("{actions:?}") };
    let text = "slot 0 is damaged; tried for 10 s (--retry-for); the server was detached and emptied";
    assert_eq!((failure.code, failure.message.as_str()), (Code::Source, text));
}

#[test]
fn damage_that_lets_some_slots_through_is_outlasted() {
    let mut play = Play::transfer(Rules { retry_for: Duration::from_secs(10), ..rules() });
    let (actions, took) = damaged(&mut play, 100, |play| play.reading.slots_held += 1);
    assert_eq!(actions, []);
    assert!(took > Duration::from_secs(30), "{took:?}");
}

#[test]
fn a_loss_long_after_the_last_one_is_a_new_one() {
    let mut play = Play::transfer(Rules { retry_for: Duration::from_secs(10), ..rules() });
    let (actions, _) = damaged(&mut play, 10, |play| play.now += Duration::from_secs(61));
    assert_eq!(actions, []);
}

/// Answers the question whether the primary would continue the server.
fn answer(play: &mut Play, covered: bool) -> Vec<Action> {
    play.on(Event::Source(SourceEvent::HandOffAnswer { covered, text: String::new() }))
}

/// Lets time pass until something follows. The primary says no to each question meanwhile, and the source cannot be
/// reached.
fn refused_until_something_follows(play: &mut Play) -> Vec<Action> {
    loop {
        let actions = play.wait();
        for action in &actions {
            let more = match action {
                Action::Server(Job::AskOffset) => play.report(Report::Offset(Ok(2000))),
                Action::AskHandOff { .. } => answer(play, false),
                Action::ConnectSource => play.on(Event::Source(SourceEvent::Unreachable(loss(true, false)))),
                _ => return actions,
            };
            for action in more {
                match action {
                    Action::AskHandOff { .. } => assert_eq!(answer(play, false), []),
                    other => return vec![other],
                }
            }
        }
    }
}

#[test]
fn a_server_whose_source_is_away_goes_to_the_primary_as_soon_as_that_would_continue_it() {
    let mut play = Play::catch_up(rules());
    let question = [Action::AskHandOff { generation: 1, offset: 1000 }];
    assert_eq!(play.on(Event::Source(SourceEvent::Lost(loss(true, false)))), []);
    assert_eq!(play.report(Report::Offset(Ok(1000))), question, "without a stream it need not be near its end");
    assert_eq!(answer(&mut play, false), [], "it would not");
    let mut actions = play.wait();
    while actions != [Action::Server(Job::AskOffset)] {
        assert_eq!(actions, [Action::ConnectSource], "the source is looked for meanwhile");
        actions = play.wait();
    }
    assert_eq!(play.report(Report::Offset(Ok(1000))), question);
    assert_eq!(answer(&mut play, true), [Action::HoldStream, Action::Server(Job::Settle)]);
}

#[test]
fn a_server_whose_source_comes_back_in_time_follows_it_again() {
    let mut play = Play::catch_up(rules());
    assert_eq!(play.on(Event::Source(SourceEvent::Lost(loss(true, false)))), []);
    assert_eq!(play.report(Report::Offset(Ok(1000))), [Action::AskHandOff { generation: 1, offset: 1000 }]);
    assert_eq!(answer(&mut play, false), []);
    while play.wait() != [Action::ConnectSource] {}
    assert_eq!(play.on(Event::Source(SourceEvent::Connected)), [Action::Join]);
    assert_eq!(play.offered(), [Action::Attach { attempt: 2 }]);
    assert_eq!(play.machine.phase(), Some(Phase::CatchUp));
}

#[test]
fn a_server_whose_source_stays_away_is_never_handed_over_unasked() {
    let mut play = Play::catch_up(Rules { retry_for: Duration::from_secs(60), ..rules() });
    assert_eq!(play.on(Event::Source(SourceEvent::Lost(loss(true, false)))), []);
    assert_eq!(play.report(Report::Offset(Ok(2000))), [Action::AskHandOff { generation: 1, offset: 2000 }]);
    let began = play.now;
    assert_eq!(answer(&mut play, false), []);
    let actions = refused_until_something_follows(&mut play);
    // The sync has failed. Its own replication is all that the server has left.
    assert_eq!(actions, [Action::StopDelivery { done: false }]);
    assert!(play.now - began > Duration::from_secs(60), "{:?}", play.now - began);
}

#[test]
fn a_server_that_is_fed_may_be_without_its_source_for_two_seconds() {
    let mut play = Play::staying();
    let began = play.now;
    assert_eq!(play.on(Event::Source(SourceEvent::Lost(loss(true, false)))), []);
    let mut actions = play.wait();
    while actions != [Action::Server(Job::AskOffset)] {
        assert_eq!(actions, [Action::ConnectSource]);
        actions = play.on(Event::Source(SourceEvent::Unreachable(loss(true, false))));
        if actions.is_empty() {
            actions = play.wait();
        }
    }
    let took = play.now - began;
    assert!(took > Duration::from_secs(2) && took < Duration::from_secs(5), "{took:?}");
    assert_eq!(play.report(Report::Offset(Ok(2000))), [Action::AskHandOff { generation: 1, offset: 2000 }]);
    assert_eq!(answer(&mut play, true), [Action::HoldStream, Action::Server(Job::Settle)]);
}

#[test]
fn a_server_whose_next_byte_the_source_has_lost_loads_another_snapshot_and_not_for_ever() {
    let mut play = Play::catch_up(rules());
    let mut loads = 0;
    loop {
        let gone = Loss { history_gone: true, ..loss(false, false) };
        let began = play.now;
        let lost = play.on(Event::Source(SourceEvent::Lost(gone)));
        if let [Action::Server(Job::AskOffset)] = lost[..] {
            assert_eq!(play.report(Report::Offset(Ok(2000))), [Action::AskHandOff { generation: 1, offset: 2000 }]);
        }
        answer(&mut play, false);
        let actions = refused_until_something_follows(&mut play);
        assert!(play.now - began >= Duration::from_secs(5), "the primary was not asked for long");
        if actions != [Action::LoadAgain] {
            assert_eq!(actions, [Action::HoldStream, Action::Server(Job::Settle)]);
            break;
        }
        loads += 1;
        assert_eq!(play.machine.deadline(), None, "the delivery answers");
        play.reading.loaded = false;
        assert_eq!(play.delivery(DeliveryEvent::FeedWanted), [Action::ConnectSource]);
        assert_eq!(play.on(Event::Source(SourceEvent::Connected)), [Action::Join]);
        play.offered();
        play.delivery(DeliveryEvent::Asked);
        play.delivery(DeliveryEvent::Fetched);
        play.reading.loaded = true;
        play.delivery(DeliveryEvent::Loaded);
        while play.machine.server.desk.doing().is_some() {
            play.report(Report::Offset(Ok(1)));
            play.report(Report::SettingsPutBack(Ok(())));
        }
    }
    assert_eq!(loads, 2);
}

#[test]
fn an_agent_that_is_stopped_asks_the_primary_first_and_a_second_signal_ends_the_question() {
    let stop = || Event::Stop { signal: "SIGTERM" };
    let hands_over = [Action::HoldStream, Action::Server(Job::Settle)];
    let mut play = Play::staying();
    assert_eq!(play.on(stop()), [Action::Server(Job::AskOffset)]);
    assert_eq!(play.report(Report::Offset(Ok(1))), [Action::AskHandOff { generation: 1, offset: 1 }]);
    assert_eq!(answer(&mut play, true), hands_over);

    let mut play = Play::staying();
    let began = play.now;
    play.on(stop());
    play.report(Report::Offset(Ok(1)));
    answer(&mut play, false);
    assert_eq!(refused_until_something_follows(&mut play), hands_over);
    assert_eq!((play.now - began).as_secs(), 5);

    let mut play = Play::staying();
    play.on(stop());
    assert_eq!(play.on(stop()), [Action::HoldStream], "the question is under way");
    assert_eq!(play.report(Report::Offset(Ok(1))), [Action::Server(Job::Settle)]);
}

#[test]
fn after_a_stall_the_server_must_answer_before_the_source_is_asked() {
    let mut play = Play::transfer(rules());
    assert_eq!(play.on(Event::Source(SourceEvent::Lost(loss(true, true)))), [Action::GiveUpLoad]);
    assert_eq!(play.wait(), [Action::Server(Job::Look)]);
    assert_eq!(play.report(Report::Looked(Err(failure("no answer")))), [], "another pause");
    assert_eq!(play.wait(), [Action::Server(Job::Look)]);
    assert_eq!(play.report(Report::Looked(Ok(look(Follows::Link)))), [Action::ConnectSource]);
    assert_eq!(play.on(Event::Source(SourceEvent::Connected)), [Action::Join]);
}

#[test]
fn a_source_with_nothing_to_offer_is_waited_for_as_long_as_its_reason_deserves() {
    let causes = [
        (WaitCause::LastAttemptFailed, false, 10),
        (WaitCause::Busy, false, 60),
        (WaitCause::CutOff, false, 10),
        // The primary of an attended server can serve it at once.
        (WaitCause::CutOff, true, 3),
        (WaitCause::Busy, true, 60),
    ];
    for (cause, intercepted, seconds) in causes {
        let mut play = Play::with(Rules { retry_for: Duration::from_secs(10), intercepted, ..rules() });
        let began = play.now;
        play.on(Event::Source(SourceEvent::Waiting { cause, text: "a reason".into() }));
        let actions = play.wait();
        assert_eq!(actions.last(), Some(&Action::Server(Job::Leave(Leaving::Untouched))));
        assert_eq!((play.now - began).as_secs(), seconds);
    }
}

/// A link that breaks for a moment while the source has nothing yet for another reason.
#[test]
fn the_time_in_which_the_source_was_not_cut_off_does_not_count_as_such() {
    let mut play = Play::with(Rules { intercepted: true, ..rules() });
    let waits = |play: &mut Play, cause| {
        let actions = play.on(Event::Source(SourceEvent::Waiting { cause, text: "a reason".into() }));
        assert_eq!(actions, [], "{cause:?}");
    };
    waits(&mut play, WaitCause::NotYet);
    assert_eq!(play.after(Duration::from_secs(30)), []);
    waits(&mut play, WaitCause::CutOff);
    assert_eq!(play.after(Duration::from_secs(2)), []);
    // The source tries again, and is refused again.
    waits(&mut play, WaitCause::NotYet);
    waits(&mut play, WaitCause::CutOff);
    assert_eq!(play.after(Duration::from_secs(1)), []);
    let actions = play.wait();
    assert!(actions.contains(&Action::StopDelivery { done: false }), "{actions:?}");
}

#[test]
fn a_load_that_the_server_breaks_off_three_times_fails() {
    let mut play = Play::loading(rules());
    let lost = || DeliveryEvent::LinkLost { text: "closed".into(), loading: true };
    assert_eq!(play.delivery(lost()), []);
    assert_eq!(play.delivery(lost()), []);
    let actions = play.delivery(lost());
    assert!(actions.contains(&Action::Server(Job::Leave(Leaving::Detached))), "{actions:?}");
}

#[test]
fn a_server_that_lost_what_it_had_loaded_is_filled_again() {
    let mut play = Play::staying();
    play.reading.loaded = false;
    assert_eq!(play.delivery(DeliveryEvent::FeedWanted), [Action::Join]);
    assert_eq!(play.machine.phase(), Some(Phase::Waiting));
    play.offered();
    assert_eq!(play.machine.phase(), Some(Phase::Transfer));
}

#[test]
fn a_server_that_loses_its_data_while_it_settles_is_not_handed_over() {
    let mut play = Play::settling(rules());
    play.reading.loaded = false;
    assert_eq!(play.delivery(DeliveryEvent::FeedWanted), [Action::Join]);
    assert_eq!(play.report(Report::Settled(Ok(()))), []);
    assert_eq!(play.machine.phase(), Some(Phase::Transfer));
}

/// A server that is detached and comes back while it settles: what it is offered then cannot be used yet.
#[test]
fn an_offer_that_comes_while_a_server_without_data_settles_is_asked_for_again() {
    for is_connected in [false, true] {
        let mut play = Play::settling(rules());
        play.reading.loaded = false;
        assert_eq!(play.delivery(DeliveryEvent::FeedWanted), [Action::Join]);
        if is_connected {
            // An earlier attempt: its tables are of no use by now either.
            play.on(Event::Tables { attempt: 1, connected: Ok(tables(1)) });
        }
        assert_eq!(play.on(Event::Source(SourceEvent::Offer(offer(2)))), []);
        assert_eq!(play.report(Report::Settled(Ok(()))), [Action::Join], "once more");
        assert_eq!(play.machine.phase(), Some(Phase::Transfer));
        let actions = play.on(Event::Source(SourceEvent::Offer(offer(2))));
        assert!(matches!(actions[..], [Action::ConnectTables { .. }]), "{actions:?}");
    }
}

#[test]
fn an_offer_that_comes_while_a_server_is_pointed_back_at_the_link_is_asked_for_again() {
    let mut play = Play::returning(rules());
    play.reading.loaded = false;
    assert_eq!(play.delivery(DeliveryEvent::FeedWanted), [Action::Join]);
    assert_eq!(play.on(Event::Source(SourceEvent::Offer(offer(2)))), []);
    assert_eq!(play.report(Report::ReturnedToLink(Ok(()))), [Action::Join]);
    assert_eq!(play.machine.phase(), Some(Phase::Waiting));
}

#[test]
fn a_server_that_loses_its_data_on_its_way_to_the_primary_gets_the_source_back() {
    let mut play = Play::staying();
    play.on(Event::Source(SourceEvent::Lost(loss(true, false))));
    play.wait();
    play.now += Duration::from_secs(3);
    let actions = play.on(Event::Source(SourceEvent::Unreachable(loss(true, false))));
    assert_eq!(actions, [Action::Server(Job::AskOffset)]);
    play.report(Report::Offset(Ok(2000)));
    assert_eq!(answer(&mut play, true), [Action::HoldStream, Action::Server(Job::Settle)]);
    play.reading.loaded = false;
    assert_eq!(play.delivery(DeliveryEvent::FeedWanted), []);
    assert_eq!(play.report(Report::Settled(Ok(()))), []);
    assert_eq!(play.machine.phase(), Some(Phase::Transfer));
    assert_eq!(play.wait(), [Action::ConnectSource]);
}

#[test]
fn a_server_that_loses_its_data_after_a_signal_is_left() {
    let left = [Action::StopDelivery { done: false }, Action::Server(Job::Leave(Leaving::Detached))];
    let mut play = Play::staying().sent_away();
    play.reading.loaded = false;
    play.delivery(DeliveryEvent::FeedWanted);
    assert_eq!(play.report(Report::Settled(Ok(()))), left);

    let mut play = Play::stopping(rules());
    play.reading.loaded = false;
    assert_eq!(play.delivery(DeliveryEvent::FeedWanted), left, "the primary is being asked");

    let mut play = Play::stopping(rules());
    play.reading.loaded = false;
    assert_eq!(play.on(Event::Tick), left, "and it has not been said yet");
}

#[test]
fn the_stream_of_another_history_is_not_given_to_a_server_that_has_loaded() {
    let mut play = Play::catch_up(rules());
    let other = |generation| Box::new(Offer { replid: "b".repeat(40).parse().ok(), ..*offer(generation) });
    let actions = play.on(Event::Source(SourceEvent::Offer(other(2))));
    let Some(&Action::ConnectTables { attempt, .. }) = actions.first() else { panic!("{actions:?}") };
    let connected = Ok(Tables { offer: other(2), ..tables(2) });
    let actions = play.on(Event::Tables { attempt, connected });
    assert_eq!(actions, [], "the server is being asked for its offset already");
    play.report(Report::Offset(Ok(2000)));
    answer(&mut play, false);
    assert_eq!(refused_until_something_follows(&mut play), [Action::LoadAgain]);
}

#[test]
fn a_full_copy_by_the_server_itself_may_take_as_long_as_other_trouble() {
    let mut play = Play::watching(rules());
    let mut actions = play.report(Report::PrimaryLink(Ok(COPYING)));
    for _ in 0..100 {
        assert_eq!(actions, []);
        assert_eq!(play.after(Duration::from_secs(2)), [Action::Server(Job::AskPrimaryLink)]);
        actions = play.report(Report::PrimaryLink(Ok(COPYING)));
    }
    // But it does not keep an agent that is to stop: the server follows the primary already.
    let actions = play.on(Event::Stop { signal: "SIGTERM" });
    assert_eq!(actions, [Action::StopDelivery { done: false }, Action::Server(Job::Leave(Leaving::ToPrimary))]);
}

#[test]
fn a_full_copy_does_not_keep_an_agent_whose_signal_caused_the_hand_off() {
    let mut play = Play::asked(Rules { retry_for: Duration::from_secs(600), ..rules() }).sent_away();
    play.report(Report::Settled(Ok(())));
    play.report(Report::PointedAtPrimary(Ok(())));
    play.wait();
    assert_eq!(play.report(Report::PrimaryLink(Ok(COPYING))), []);
    let actions = play.after(Duration::from_secs(21));
    assert_eq!(actions, [Action::StopDelivery { done: false }, Action::Server(Job::Leave(Leaving::ToPrimary))]);
}

#[test]
fn a_server_that_copies_for_long_is_asked_less_often() {
    let mut play = Play::watching(rules());
    let mut questions = 1;
    let began = play.now;
    while play.now.duration_since(began) < Duration::from_secs(15) {
        assert_eq!(play.report(Report::PrimaryLink(Ok(COPYING))), []);
        assert_eq!(play.wait(), [Action::Server(Job::AskPrimaryLink)]);
        questions += 1;
    }
    assert!((100..400).contains(&questions), "{questions} questions in 15 s");
}

#[test]
fn a_full_copy_that_takes_too_long_is_left_to_the_server_and_never_aborted() {
    let mut play = Play::watching(Rules { retry_for: Duration::from_secs(60), ..rules() });
    assert_eq!(play.report(Report::PrimaryLink(Ok(COPYING))), []);
    // The copy failed at the primary: the server begins another one by itself.
    play.now += Duration::from_secs(59);
    assert_eq!(play.on(Event::Tick), [Action::Server(Job::AskPrimaryLink)]);
    assert_eq!(play.report(Report::PrimaryLink(Ok(PrimaryLink { syncing: false, ..COPYING }))), []);
    play.now += Duration::from_secs(2);
    let actions = play.on(Event::Tick);
    assert_eq!(actions, [Action::StopDelivery { done: false }, Action::Server(Job::Leave(Leaving::ToPrimary))]);
    let actions = play.report(Report::Left(Left::in_order("it copies")));
    let Some(Action::End { outcome: Err(failure), .. }) = actions.last() else { panic!("{actions:?}") };
    assert_eq!(failure.code, Code::SyncFailed);
    assert!(failure.message.contains("is taking a full copy"), "{failure}");
}

/// A server that was told to follow the link, answers, and does not come to it. Gives back the failure, and after how
/// many seconds it came.
fn never_comes(mut play: Play) -> (Failure, u64) {
    let began = play.now;
    loop {
        let mut actions = play.wait();
        while let Some(Action::Server(job)) = actions.last() {
            let report = match job {
                Job::Look => Report::Looked(Ok(look(Follows::Link))),
                Job::GiveLogin => Report::LoginGiven(Ok(())),
                Job::Leave(Leaving::Detached) => Report::Left(Left::in_order("given back")),
                other => panic!("{other:?}"),
            };
            actions = play.report(report);
        }
        if let Some(Action::End { outcome: Err(failure), .. }) = actions.last() {
            return (failure.clone(), (play.now - began).as_secs());
        }
        assert!((play.now - began).as_secs() < 1000, "it waits without a bound");
    }
}

#[test]
fn a_server_that_never_completes_its_link_is_given_up_in_time_and_the_cause_is_named() {
    for (retry_for, limit) in [(0, 10), (30, 30), (300, 60)] {
        let mut play = Play::with(Rules { retry_for: Duration::from_secs(retry_for), ..rules() });
        play.offered();
        play.report(Report::Prepared(Ok(false)));
        play.report(Report::Followed(Ok(())));
        let (failure, after) = never_comes(play);
        assert_eq!(failure.code, Code::SyncFailed);
        assert!(failure.message.contains("has not completed its link") && failure.message.contains("no connection"));
        assert!((limit..limit + 4).contains(&after), "{after} s");
    }
}

#[test]
fn a_server_that_has_come_once_may_stay_away_for_as_long_as_other_trouble() {
    let mut play = Play::transfer(rules());
    play.delivery(DeliveryEvent::LinkLost { text: "closed".into(), loading: false });
    let (_, after) = never_comes(play);
    assert!((300..304).contains(&after), "{after} s");
}

#[test]
fn the_time_in_which_a_server_could_not_come_does_not_count() {
    let mut play = Play::transfer(Rules { retry_for: Duration::from_secs(30), ..rules() });
    play.delivery(DeliveryEvent::LinkLost { text: "closed".into(), loading: false });
    for _ in 0..100 {
        assert_eq!(play.wait(), [Action::Server(Job::Look)]);
        let loading = Look { loading: true, ..look(Follows::Link) };
        assert_eq!(play.report(Report::Looked(Ok(loading))), []);
    }
    let (_, after) = never_comes(play);
    assert!((30..36).contains(&after), "{after} s");
}

#[test]
fn links_that_end_before_the_server_is_given_anything_have_a_limit() {
    let mut play = Play::transfer(rules());
    let come_and_go = |play: &mut Play| {
        assert_eq!(play.delivery(DeliveryEvent::Asked), []);
        play.delivery(DeliveryEvent::LinkLost { text: "it is too old".into(), loading: false })
    };
    for round in 0..100 {
        // Each use begins the count anew.
        play.reading.bytes_delivered += u64::from(round < 50);
        let actions = come_and_go(&mut play);
        if !actions.is_empty() {
            assert_eq!(round, 49 + 30);
            assert!(actions.contains(&Action::Server(Job::Leave(Leaving::Detached))), "{actions:?}");
            return;
        }
    }
    panic!("no limit");
}

#[test]
fn a_hand_off_that_fails_goes_back_to_the_link_twice_and_then_gives_up() {
    let mut play = Play::settling(rules());
    for attempt in 1..=3 {
        assert_eq!(play.report(Report::Settled(Ok(()))), [Action::Server(Job::PointAtPrimary)]);
        assert_eq!(play.report(Report::PointedAtPrimary(Ok(()))), []);
        play.now += Duration::from_secs(21);
        let actions = play.on(Event::Tick);
        if attempt == 3 {
            assert!(actions.contains(&Action::Server(Job::Leave(Leaving::ToPrimary))), "{actions:?}");
            return;
        }
        assert_eq!(actions, [Action::Server(Job::ReturnToLink)]);
        assert_eq!(play.report(Report::ReturnedToLink(Ok(()))), []);
        play.delivery(DeliveryEvent::Asked);
        assert_eq!(play.wait(), [Action::Server(Job::AskOffset)]);
        play.report(Report::Offset(Ok(2000)));
        let answer = SourceEvent::HandOffAnswer { covered: true, text: String::new() };
        assert_eq!(play.on(Event::Source(answer)), [Action::HoldStream, Action::Server(Job::Settle)]);
    }
}

#[test]
fn a_source_that_is_lost_during_a_hand_off_is_missed_only_if_that_fails() {
    let mut play = Play::watching(rules());
    assert_eq!(play.on(Event::Source(SourceEvent::Lost(loss(true, false)))), []);
    assert_eq!(play.report(Report::PrimaryLink(Ok(IN_STEP))), IN_STEP_DOES);
    let actions = play.report(Report::Finished(Ok(())));
    assert!(matches!(actions.last(), Some(Action::End { outcome: Ok(()), .. })), "{actions:?}");
}

#[test]
fn a_stay_that_is_stopped_ends_well_and_another_sync_says_that_it_was_stopped() {
    for stay in [true, false] {
        let mut play = if stay { Play::staying() } else { Play::asked(rules()) }.sent_away();
        play.report(Report::Settled(Ok(())));
        play.report(Report::PointedAtPrimary(Ok(())));
        play.wait();
        play.report(Report::PrimaryLink(Ok(IN_STEP)));
        let actions = play.report(Report::Finished(Ok(())));
        let Some(Action::End { outcome, .. }) = actions.last() else { panic!("{actions:?}") };
        assert_eq!(outcome.is_ok(), stay, "{outcome:?}");
    }
}

#[test]
fn a_signal_before_the_end_has_the_servers_task_wait_for_nothing_more() {
    let mut play = Play::finishing(rules());
    assert_eq!(play.on(Event::Stop { signal: "SIGTERM" }), [Action::Hurry]);
    let actions = play.report(Report::Finished(Ok(())));
    let Some(Action::End { outcome: Err(failure), .. }) = actions.last() else { panic!("{actions:?}") };
    assert_eq!(failure.code, Code::Interrupted);

    let mut play = Play::watching(rules());
    assert_eq!(play.on(Event::Stop { signal: "SIGTERM" }), [], "the server is on its way");
    let actions = play.report(Report::PrimaryLink(Ok(IN_STEP)));
    assert_eq!(actions, [Action::StopDelivery { done: true }, Action::Hurry, Action::Server(Job::Finish)]);
}

#[test]
fn an_introduction_is_cancelled_when_the_sync_fails_and_the_server_is_left_after_its_end() {
    let mut play = Play::transfer(rules());
    play.reading.bytes_delivered = 0;
    assert_eq!(play.delivery(DeliveryEvent::Introduce { number: 7 }), [Action::Server(Job::Introduce { number: 7 })]);
    let actions = play.on(Event::Stop { signal: "SIGINT" });
    assert_eq!(actions, [Action::CancelIntroduction, Action::StopDelivery { done: false }]);
    let actions = play.report(Report::Introduced { number: 7, outcome: Introduced::Cancelled });
    assert_eq!(actions, [Action::Server(Job::Leave(Leaving::Detached))]);
}

#[test]
fn a_server_that_was_given_nothing_is_given_back() {
    let mut play = Play::transfer(rules());
    play.reading.bytes_delivered = 0;
    let actions = play.on(Event::Stop { signal: "SIGINT" });
    assert!(actions.contains(&Action::Server(Job::Leave(Leaving::Detached))), "{actions:?}");
}

#[test]
fn a_server_that_was_seen_taken_over_while_the_sync_failed_is_left_as_it_is() {
    let mut play = Play::catch_up(rules());
    play.report(Report::Offset(Ok(1000)));
    play.delivery(DeliveryEvent::LinkLost { text: "closed".into(), loading: false });
    play.now += Duration::from_secs(3);
    play.on(Event::Tick);
    assert_eq!(play.report(Report::Looked(Ok(look(Follows::Another)))), [Action::Server(Job::AskOffset)]);
    assert_eq!(play.report(Report::Offset(Ok(1000))), [Action::Server(Job::Verify(Followed::Link))]);
    let actions = play.delivery(DeliveryEvent::Fatal { failure: Failure::local("disk full") });
    assert_eq!(actions, [Action::StopDelivery { done: false }]);
    let actions = play.report(Report::Verified(Err(taken_over())));
    assert_eq!(actions, [Action::Server(Job::Leave(Leaving::AsItIs))]);
    let actions = play.report(Report::Left(Left::as_it_is("it is left as it is")));
    let Some(Action::End { outcome: Err(failure), .. }) = actions.first() else { panic!("{actions:?}") };
    assert_eq!((failure.code, failure.message.as_str()), (Code::TakenOver, "disk full; it is left as it is"));
}

#[test]
fn a_take_over_that_is_found_after_a_signal_has_the_code_of_a_take_over() {
    let mut play = Play::leaving(rules());
    let actions = play.report(Report::Left(Left::as_it_is("it was promoted and is left as it is")));
    let Some(Action::End { outcome: Err(failure), .. }) = actions.first() else { panic!("{actions:?}") };
    assert_eq!(failure.code, Code::TakenOver);
    assert_eq!(failure.message, "stopped by SIGTERM; it was promoted and is left as it is");
}

#[test]
fn replicas_that_still_read_are_waited_for_up_to_the_limit_or_a_signal() {
    let mut play = Play::lingering(rules());
    let began = play.now;
    let mut actions = Vec::new();
    while actions.is_empty() {
        actions = play.wait();
    }
    assert!(matches!(actions.as_slice(), [Action::End { outcome: Ok(()), .. }]), "{actions:?}");
    assert_eq!((play.now - began).as_secs(), 30);

    let mut play = Play::lingering(rules());
    play.reading.readers = 0;
    assert!(matches!(play.wait().as_slice(), [Action::End { outcome: Ok(()), .. }]));
}
