//! Attendance: what becomes of each connection of an attended server, and when its connections come here. No I/O and no
//! clock: [`mod`](super) stays beside a server by it, [`once`](super::once) serves one copy, and the simulation has
//! others in their place.
//!
//! ```text
//!                      asks for a copy, and a source serves it
//!        ┌──────────────────────────────────────────────────────▶ syncing ── asks another primary, stuck ──▶ ending
//!        │                                                            │ done, or failed                        │
//!     attending ── passed on ──▶ passed ── up, and covered ──▶ direct ◀────────────────────────────────────────┘
//!        ▲                          │ its connection ends        │  the connection that waited is decided on
//!        └──────────────────────────┴────────────────────────────┘  the link moves, or DIRECT_LIMIT is over
//!
//!     once:  asking ── can be continued ──▶ through ── up ──▶ end
//!               └──── a copy ──▶ syncing ── done, or failed ─▶ end
//! ```
//!
//! What must hold:
//! - A server whose connections go past the agent is looked at until they come here again, within [`DIRECT_LIMIT`].
//! - A connection that its primary serves through the agent is ended only when the primary would continue the server
//!   over another one.
//! - A sync gets the connections that ask for its data set, and no others.

use std::fmt;
use std::time::{Duration, Instant};

/// How long the gate stays closed for a server that does not reach its primary. Later its connections come here again.
pub(super) const DIRECT_LIMIT: Duration = Duration::from_secs(30);

/// How long a server may take to connect again. It does so each second.
pub(super) const ASK_LIMIT: Duration = Duration::from_secs(60);

/// How long an attendance lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rules {
    /// Until it is stopped.
    Stay,
    /// Until the server is in step, or the reason is known why it is not.
    Once {
        /// The server takes a full copy although its primary could continue it.
        anew: bool,
        /// How long a full copy may last that the server took by itself before.
        copy_limit: Duration,
    },
}

/// What a connection asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asks {
    /// It goes on where it is: the primary can continue it.
    Continues,
    /// It needs a full copy, or goes on in the sync that is under way.
    Copy,
    /// Something of another primary than the one whose sync is under way.
    Another,
    /// What the primary would answer is not known, and why.
    Unknown(String),
}

/// How far the server's link to its primary is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkState {
    Down,
    Copying,
    Up,
    /// It follows no primary.
    Nothing,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A connection has asked for a sync. `is_open`: new connections come here, which a sync may have changed.
    Arrived { asks: Asks, is_of_another_server: bool, is_open: bool },
    /// A source serves the connection for which [`Action::Begin`] looked for one.
    Begun,
    /// No source does.
    NotBegun,
    /// The sync that was under way has ended.
    SyncEnded,
    /// The source of the sync gives nothing, and the server asks another primary by now.
    Stuck,
    /// The server was looked at. `is_covered`: its primary would continue it over another connection.
    Looked { link: LinkState, is_covered: bool },
    /// A connection with [`Action::Pass`] and `is_noted` has ended.
    PassageEnded { is_open: bool },
    /// The server was pointed at another primary, since no Sentinel does that.
    Guided,
    /// The agent was told to end.
    Signal,
}

/// Why a connection is passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// New connections do not come here: this one was on its way when that was changed.
    OnItsWay,
    Continues,
    Unknown(String),
    NoSource,
    AnotherServer,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::OnItsWay => "the server is on its way to its primary",
            Why::Continues => "the primary can continue it",
            Why::Unknown(why) => why,
            Why::NoSource => "the source cannot serve it",
            Why::AnotherServer => "it is of another server of this user",
        })
    }
}

/// How an attendance ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// By a signal.
    Stopped,
    /// As the sync did, which has just ended.
    AsTheSync,
    /// The server is in step without a copy through the agent.
    InStep,
    /// What the primary would answer is not known.
    Unknown(String),
    /// The server asks another primary.
    Another,
    NoSource,
    /// The server follows no primary any more.
    Detached,
    /// The primary had said that it can continue the server, and sends it a full copy.
    CopiedAfterAll,
    /// The server has not asked, or is not in step, in time.
    TooLate {
        was_let_through: bool,
        link: LinkState,
    },
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// A source is looked for that serves the connection, and a sync begun: [`Event::Begun`] or [`Event::NotBegun`].
    Begin,
    /// The connection is the sync's.
    Give,
    /// The connection goes to the primary. `is_noted`: the gate notes it, and hands it back later.
    Pass {
        why: Why,
        is_noted: bool,
    },
    /// The connection ends. The server connects again.
    Drop,
    /// The connection waits for the end of the sync, in the place of one that waits already.
    Keep,
    /// The connection that has waited is decided on, after the primary was asked again.
    TakeKept,
    /// The sync that is under way is told to end.
    EndSync,
    /// New connections of the server come here.
    Open,
    /// They go to its primary.
    Close,
    /// They go to its primary, and the one that has come is ended.
    HandBack,
    End(End),
}

/// What the server's link must show before the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Nothing,
    /// The link through the agent is up, and the primary would continue the server without it.
    Passed,
    /// The server's own connection to its primary, or this moment.
    Direct(Instant),
    /// The server asks for a sync until this moment.
    Asking(Instant),
    /// The server was let through, and is in step by this moment.
    Through(Instant),
}

/// The sync that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sync {
    Begins,
    Runs,
    /// It was told to end.
    Ends,
}

/// Decides what becomes of each connection of one server.
#[derive(Clone, Debug)]
pub(crate) struct Attendance {
    rules: Rules,
    awaited: Awaited,
    sync: Option<Sync>,
    /// A connection waits for the end of the sync.
    keeps: bool,
    /// The server takes a full copy that began before the agent.
    saw_a_copy: bool,
    is_stopping: bool,
}

impl Attendance {
    pub(crate) fn new(now: Instant, rules: Rules) -> Attendance {
        let awaited = match rules {
            Rules::Stay => Awaited::Nothing,
            Rules::Once { .. } => Awaited::Asking(now + ASK_LIMIT),
        };
        Attendance { rules, awaited, sync: None, keeps: false, saw_a_copy: false, is_stopping: false }
    }

    pub(crate) fn is_syncing(&self) -> bool {
        self.sync.is_some()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    /// Whether the server is to be looked at from time to time.
    pub(crate) fn looks(&self) -> bool {
        self.sync.is_none() && self.awaited != Awaited::Nothing
    }

    /// Whether a look includes a question to the primary: whether it would continue the server.
    pub(crate) fn needs_cover(&self) -> bool {
        self.awaited == Awaited::Passed
    }

    pub(crate) fn handle(&mut self, now: Instant, event: Event) -> Vec<Action> {
        match event {
            Event::Arrived { asks, is_of_another_server, is_open } => {
                self.arrived(now, asks, is_of_another_server, is_open)
            }
            Event::Begun => {
                (self.sync, self.awaited) = (Some(Sync::Runs), Awaited::Nothing);
                vec![Action::Give]
            }
            Event::NotBegun => {
                self.sync = None;
                match self.rules {
                    Rules::Stay => self.passes(Why::NoSource),
                    Rules::Once { .. } => vec![Action::Close, Action::End(End::NoSource)],
                }
            }
            Event::SyncEnded => self.sync_ended(now),
            Event::Stuck if self.sync == Some(Sync::Runs) => {
                self.sync = Some(Sync::Ends);
                vec![Action::EndSync]
            }
            Event::Stuck => Vec::new(),
            Event::Looked { link, is_covered } => match self.rules {
                Rules::Stay => self.looked(now, link, is_covered),
                Rules::Once { anew, copy_limit } => self.looked_once(now, link, anew, copy_limit),
            },
            Event::PassageEnded { is_open } if self.awaited == Awaited::Passed => {
                self.awaited = Awaited::Nothing;
                if is_open { Vec::new() } else { vec![Action::Open] }
            }
            Event::PassageEnded { .. } => Vec::new(),
            Event::Guided if matches!(self.awaited, Awaited::Direct(_)) => {
                self.awaited = Awaited::Nothing;
                vec![Action::Open]
            }
            Event::Guided => Vec::new(),
            Event::Signal if self.sync.is_none() => vec![Action::End(End::Stopped)],
            // The sync hears of the signal too, and leaves the server with its primary.
            Event::Signal => {
                self.is_stopping = true;
                Vec::new()
            }
        }
    }

    fn arrived(&mut self, now: Instant, asks: Asks, is_of_another_server: bool, is_open: bool) -> Vec<Action> {
        let stays = self.rules == Rules::Stay;
        if self.sync == Some(Sync::Ends) {
            // The server's latest connection counts.
            self.keeps = true;
            return vec![Action::Keep];
        }
        if !is_open {
            return if stays { self.passes(Why::OnItsWay) } else { vec![Action::Drop] };
        }
        if is_of_another_server {
            return vec![Action::Pass { why: Why::AnotherServer, is_noted: false }];
        }
        let asks = match asks {
            Asks::Another if remora_base::mutation::Mutation::AnotherPrimaryGiven.is_active() => Asks::Copy,
            asks => asks,
        };
        match (asks, self.rules) {
            (Asks::Continues, Rules::Stay) => self.passes(Why::Continues),
            (Asks::Continues, Rules::Once { anew: false, .. }) => {
                self.awaited = Awaited::Through(now + DIRECT_LIMIT);
                vec![Action::Close, Action::Drop]
            }
            (Asks::Unknown(why), Rules::Stay) => self.passes(Why::Unknown(why)),
            (Asks::Unknown(why), Rules::Once { .. }) => vec![Action::Close, Action::End(End::Unknown(why))],
            (Asks::Another, Rules::Stay) => {
                (self.sync, self.keeps) = (Some(Sync::Ends), true);
                vec![Action::EndSync, Action::Keep]
            }
            (Asks::Another, Rules::Once { .. }) => vec![Action::Close, Action::End(End::Another)],
            (Asks::Continues | Asks::Copy, _) if self.sync.is_some() => vec![Action::Give],
            (Asks::Continues | Asks::Copy, _) => {
                self.sync = Some(Sync::Begins);
                vec![Action::Begin]
            }
        }
    }

    fn passes(&mut self, why: Why) -> Vec<Action> {
        // A connection beside a sync is not the server's link: the sync has that.
        let is_noted = self.sync.is_none();
        if is_noted {
            self.awaited = Awaited::Passed;
        }
        vec![Action::Pass { why, is_noted }]
    }

    fn sync_ended(&mut self, now: Instant) -> Vec<Action> {
        self.sync = None;
        if self.is_stopping || self.rules != Rules::Stay {
            return vec![Action::End(End::AsTheSync)];
        }
        if std::mem::take(&mut self.keeps) {
            self.awaited = Awaited::Nothing;
            return vec![Action::HandBack, Action::Open, Action::TakeKept];
        }
        self.goes_by_itself(now)
    }

    fn goes_by_itself(&mut self, now: Instant) -> Vec<Action> {
        self.awaited = Awaited::Direct(now + DIRECT_LIMIT);
        vec![Action::HandBack]
    }

    fn looked(&mut self, now: Instant, link: LinkState, is_covered: bool) -> Vec<Action> {
        let is_covered = is_covered || remora_base::mutation::Mutation::HandedBackUncovered.is_active();
        let is_late = |until| now >= until;
        let is_late = |until| is_late(until) && !remora_base::mutation::Mutation::DirectForEver.is_active();
        match self.awaited {
            // The stream through the agent began: the server goes on where it is, without it.
            Awaited::Passed if link == LinkState::Up && is_covered => self.goes_by_itself(now),
            Awaited::Direct(until) if link != LinkState::Down || is_late(until) => {
                self.awaited = Awaited::Nothing;
                vec![Action::Open]
            }
            _ => Vec::new(),
        }
    }

    fn looked_once(&mut self, now: Instant, link: LinkState, anew: bool, copy_limit: Duration) -> Vec<Action> {
        let was_let_through = matches!(self.awaited, Awaited::Through(_));
        let too_late = || vec![Action::End(End::TooLate { was_let_through, link })];
        match (self.awaited, link) {
            (Awaited::Asking(_), LinkState::Up) if anew && !self.saw_a_copy => too_late(),
            (_, LinkState::Up) => vec![Action::End(End::InStep)],
            (_, LinkState::Nothing) => vec![Action::End(End::Detached)],
            (Awaited::Asking(_), LinkState::Copying) if !self.saw_a_copy => {
                // One that began before the agent, and that nothing but its end lets go.
                self.saw_a_copy = true;
                self.awaited = Awaited::Asking(now + copy_limit.max(ASK_LIMIT));
                Vec::new()
            }
            (Awaited::Through(_), LinkState::Copying) => vec![Action::End(End::CopiedAfterAll)],
            (Awaited::Asking(until) | Awaited::Through(until), _) if now >= until => too_late(),
            _ => Vec::new(),
        }
    }

    /// Whether the server was found in the middle of a copy of its own.
    pub(crate) fn saw_a_copy(&self) -> bool {
        self.saw_a_copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONCE: Rules = Rules::Once { anew: false, copy_limit: Duration::from_secs(300) };

    fn arrived(asks: Asks) -> Event {
        Event::Arrived { asks, is_of_another_server: false, is_open: true }
    }

    fn late(asks: Asks) -> Event {
        Event::Arrived { asks, is_of_another_server: false, is_open: false }
    }

    fn looked(link: LinkState, is_covered: bool) -> Event {
        Event::Looked { link, is_covered }
    }

    fn passes(why: Why) -> Vec<Action> {
        vec![Action::Pass { why, is_noted: true }]
    }

    /// An attendance, and the time that it is told.
    struct Played {
        attendance: Attendance,
        now: Instant,
    }

    impl Played {
        fn new(rules: Rules) -> Played {
            let now = Instant::now();
            Played { attendance: Attendance::new(now, rules), now }
        }

        #[track_caller]
        fn does(&mut self, event: Event, actions: impl Into<Vec<Action>>) -> &mut Played {
            assert_eq!(self.attendance.handle(self.now, event), actions.into());
            self
        }

        fn after(&mut self, time: Duration) -> &mut Played {
            self.now += time;
            self
        }
    }

    #[test]
    fn a_server_goes_on_by_itself_after_a_sync_and_its_connections_come_here_again() {
        let mut played = Played::new(Rules::Stay);
        assert!(!played.attendance.looks());
        played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
        played.does(arrived(Asks::Copy), [Action::Give]);
        assert!(played.attendance.is_syncing() && !played.attendance.looks());
        played.does(Event::SyncEnded, [Action::HandBack]).does(looked(LinkState::Down, false), []);
        assert!(played.attendance.looks());
        played.does(looked(LinkState::Up, false), [Action::Open]);
        assert!(!played.attendance.looks());
    }

    #[test]
    fn a_server_that_does_not_reach_its_primary_comes_here_again_in_time() {
        for seen in [LinkState::Copying, LinkState::Nothing] {
            let mut played = Played::new(Rules::Stay);
            played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
            played.does(Event::SyncEnded, [Action::HandBack]).does(looked(seen, false), [Action::Open]);
        }
        let mut played = Played::new(Rules::Stay);
        played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
        played.does(Event::SyncEnded, [Action::HandBack]);
        played.after(DIRECT_LIMIT / 2).does(looked(LinkState::Down, false), []);
        played.after(DIRECT_LIMIT / 2).does(looked(LinkState::Down, false), [Action::Open]);
        played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
        played.does(Event::SyncEnded, [Action::HandBack]).does(Event::Guided, [Action::Open]);
        played.does(Event::Guided, []);
    }

    #[test]
    fn a_server_that_its_primary_serves_is_let_go_when_the_primary_would_continue_it() {
        for (asks, why) in
            [(Asks::Continues, Why::Continues), (Asks::Unknown("why".into()), Why::Unknown("why".into()))]
        {
            let mut played = Played::new(Rules::Stay);
            played.does(arrived(asks), passes(why));
            assert!(played.attendance.needs_cover());
            played.does(looked(LinkState::Copying, true), []).does(looked(LinkState::Up, false), []);
            played.after(DIRECT_LIMIT * 9).does(looked(LinkState::Up, false), []);
            played.does(looked(LinkState::Up, true), [Action::HandBack]);
            assert!(!played.attendance.needs_cover());
            played.does(looked(LinkState::Up, false), [Action::Open]);
        }
        let mut played = Played::new(Rules::Stay);
        played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::NotBegun, passes(Why::NoSource));
    }

    #[test]
    fn a_connection_that_was_on_its_way_is_passed_on_and_its_end_opens_the_gate() {
        let mut played = Played::new(Rules::Stay);
        played.does(late(Asks::Copy), passes(Why::OnItsWay));
        played.does(Event::PassageEnded { is_open: false }, [Action::Open]);
        played.does(Event::PassageEnded { is_open: false }, []);
        played.does(arrived(Asks::Continues), passes(Why::Continues));
        played.does(Event::PassageEnded { is_open: true }, []);
        assert!(!played.attendance.looks());
        let beside = Event::Arrived { asks: Asks::Copy, is_of_another_server: true, is_open: true };
        played.does(beside, [Action::Pass { why: Why::AnotherServer, is_noted: false }]);
        assert!(!played.attendance.looks());
    }

    #[test]
    fn a_connection_to_another_primary_waits_for_the_end_of_the_sync() {
        let mut played = Played::new(Rules::Stay);
        played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
        played.does(arrived(Asks::Another), [Action::EndSync, Action::Keep]);
        played.does(arrived(Asks::Another), [Action::Keep]).does(late(Asks::Copy), [Action::Keep]);
        played.does(Event::Stuck, []);
        played.does(Event::SyncEnded, [Action::HandBack, Action::Open, Action::TakeKept]);
        played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
        played.does(Event::Stuck, [Action::EndSync]).does(Event::SyncEnded, [Action::HandBack]);
        assert!(played.attendance.looks());
    }

    #[test]
    fn a_connection_that_comes_late_while_a_sync_runs_is_not_noted_for_it() {
        let mut played = Played::new(Rules::Stay);
        played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
        played.does(late(Asks::Copy), [Action::Pass { why: Why::OnItsWay, is_noted: false }]);
        assert!(!played.attendance.needs_cover());
    }

    #[test]
    fn a_signal_ends_it_at_once_or_with_the_sync() {
        for rules in [Rules::Stay, ONCE] {
            Played::new(rules).does(Event::Signal, [Action::End(End::Stopped)]);
            let mut played = Played::new(rules);
            played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
            played.does(Event::Signal, []);
            assert!(played.attendance.is_stopping());
            played.does(Event::SyncEnded, [Action::End(End::AsTheSync)]);
        }
    }

    #[test]
    fn once_serves_one_copy_or_lets_the_server_through() {
        let mut played = Played::new(ONCE);
        assert!(played.attendance.looks());
        played.does(arrived(Asks::Copy), [Action::Begin]).does(Event::Begun, [Action::Give]);
        played.does(Event::SyncEnded, [Action::End(End::AsTheSync)]);

        let mut played = Played::new(ONCE);
        played.does(late(Asks::Copy), [Action::Drop]);
        played.does(arrived(Asks::Continues), [Action::Close, Action::Drop]);
        played.does(looked(LinkState::Down, false), []).does(looked(LinkState::Up, false), [Action::End(End::InStep)]);
        played.does(looked(LinkState::Copying, false), [Action::End(End::CopiedAfterAll)]);
        let too_late = |was_let_through, link| [Action::End(End::TooLate { was_let_through, link })];
        played.after(DIRECT_LIMIT).does(looked(LinkState::Down, false), too_late(true, LinkState::Down));

        let mut played = Played::new(ONCE);
        played.after(ASK_LIMIT / 2).does(looked(LinkState::Copying, false), []);
        played.after(ASK_LIMIT).does(looked(LinkState::Copying, false), []);
        played.after(ONCE_COPY).does(looked(LinkState::Copying, false), too_late(false, LinkState::Copying));
        played.does(looked(LinkState::Nothing, false), [Action::End(End::Detached)]);
    }

    const ONCE_COPY: Duration = Duration::from_secs(300);

    #[test]
    fn once_ends_for_what_a_server_that_stays_would_wait_for() {
        let why = "why".to_owned();
        let ends = |event, end| _ = Played::new(ONCE).does(event, [Action::Close, Action::End(end)]);
        ends(arrived(Asks::Unknown(why.clone())), End::Unknown(why));
        ends(arrived(Asks::Another), End::Another);
        Played::new(ONCE)
            .does(arrived(Asks::Copy), [Action::Begin])
            .does(Event::NotBegun, [Action::Close, Action::End(End::NoSource)]);
        let anew = Rules::Once { anew: true, copy_limit: ONCE_COPY };
        let end = End::TooLate { was_let_through: false, link: LinkState::Up };
        Played::new(anew).does(looked(LinkState::Up, false), [Action::End(end)]);
        Played::new(anew).does(arrived(Asks::Continues), [Action::Begin]);
    }
}
