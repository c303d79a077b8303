//! Exchange: in which order two servers change their roles, and what is undone. No I/O and no clock:
//! [`super`] carries it out, and the simulation has modelled servers in the place of that. What both servers must be
//! before it stands at the end.
//!
//! ```text
//!   pausing ─▶ catching up ── both at one offset ──▶ stepping down ─▶ comparing ── it has all ──▶ promoting ─▶ following ─▶ Switched
//!      │           │ not in time, lost, a signal          │ refused      │ not in time, lost          │ refused
//!      ▼           ▼                                      ▼              ▼                            ▼
//!   Undone ◀────── writes are released ◀──────────────────┘◀──────── taking back ◀────────────────────┘
//!
//!   Open: an order got no answer in time, and may yet be carried out: the same command again finishes it. Or another run
//!   has taken over.
//! ```
//!
//! What must hold:
//! - The new server is promoted only after the old one has stepped down. So there are never two primaries.
//! - The old one says in the same transaction where it is and steps down: what it has acknowledged ends there. The new
//!   one is promoted only if it is at exactly that position. So no acknowledged write is lost, also where the pause of
//!   writes was over before.
//! - Once an order to promote was sent and not refused, nothing is taken back.
//! - A run that finds the two between their roles ([`Exchange::resume`]) goes on by the same rule. A server that is at
//!   the position where the other has stepped down may have been told already: it is promoted. One that is behind it
//!   cannot have been told.
//! - An order that got no answer dies with its connection: the next one of a switch to that server closes it there
//!   ([`closes_predecessors`]). An order that changes a role goes by the connection by which its server was looked at
//!   last, or not at all.
//! - Two runs do not work against each other. The old one bears the mark of the run that had it step down last, or
//!   that took over from that one. Only this run makes it the primary again, or has it follow. A connection to the new
//!   one that is younger than the mark carries an order to promote only if the mark is still there after it was made. A
//!   run that finds another mark ends. So a run that has slept changes nothing.

use std::time::{Duration, Instant};

use super::{Ready, TASK, Told};
use crate::args::{HostPort, SwitchArgs};
use crate::exit::{Code, Failure};
use crate::server::own_changes::{Counted, OwnChanges};
use crate::server::permission::{ALWAYS, Needed, Permission, TO_REPLICATE};
use crate::server::{Client, Credentials, Facts, Password, Role, Server, ServerError, Version};
use crate::units::{Size, counted};
use remora_base::mutation::Mutation;
use remora_redis::ReplId;
use remora_redis::info::{Info, Replica};

/// How often the servers are asked. `INFO replication` costs some tens of microseconds.
const POLL: Duration = Duration::from_millis(2);

/// The pause before a server that has not answered is asked again.
const RETRY: Duration = Duration::from_millis(50);

/// How long it is tried to learn whether the old primary has stepped down. Longer than a server's answer may take.
const STEP_DOWN_LIMIT: Duration = Duration::from_secs(5);

/// How long the promotion is tried. No server takes writes meanwhile, and nothing else can be done.
const PROMOTE_LIMIT: Duration = Duration::from_secs(30);

/// How long it is tried to make the old one the primary again.
const TAKE_BACK_LIMIT: Duration = Duration::from_secs(30);

/// Whom a server follows that has stepped down, before the other one is promoted: an address that documents use (RFC
/// 5737), and that no server has. A run that was ended is known by it; the port is its [`Mark`].
pub(crate) const NOWHERE: &str = "192.0.2.1";

/// By which a run is known: a drawn port. Two runs at the same time have the same one once in 65,535 times.
pub(crate) type Mark = u16;

/// How long the old primary may be away after the promotion. Clients are led only then.
const RESTART_LIMIT: Duration = Duration::from_secs(3);

/// How long the old primary may take to continue, after the new one was promoted.
pub(crate) const FOLLOW_LIMIT: Duration = Duration::from_secs(30);

/// Whether a connection of a switch closes those of former ones at its server. What they have sent and is still on its
/// way is not carried out then.
pub(crate) fn closes_predecessors() -> bool {
    !Mutation::PredecessorHeard.is_active()
}

/// Which of the two servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Old,
    New,
}

/// How far a server is in which history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) history: ReplId,
    pub(crate) offset: u64,
}

impl Position {
    fn is_before(self, other: Position) -> bool {
        self.history == other.history && self.offset < other.offset
    }
}

/// What a server says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) role: Option<Role>,
    pub(crate) at: Option<Position>,
    /// It is a replica in step.
    pub(crate) is_linked: bool,
    /// It has stepped down, in a run with this mark.
    pub(crate) mark: Option<Mark>,
    /// The connection by which it was seen: another number for each.
    pub(crate) by: u64,
}

/// What a server is told or asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The old one accepts no writes for `--max-pause`.
    Pause,
    Look(Side),
    /// The old one says what it is and where, and becomes a replica of [`NOWHERE`] with this mark: one transaction.
    /// It must not follow the new one before that is promoted: a replica in step serves full copies, and one that is
    /// behind would take writes away.
    StepDown(Mark),
    /// The old one follows the new one.
    Follow,
    /// The new one is to be the primary.
    Promote,
    /// The old one is to be the primary again.
    TakeBack,
    /// The pause of writes at the old one ends.
    Release,
}

impl Order {
    /// Who gets it.
    pub(crate) fn to(self) -> Side {
        match self {
            Order::Look(side) => side,
            Order::Promote => Side::New,
            Order::Pause | Order::StepDown(_) | Order::Follow | Order::TakeBack | Order::Release => Side::Old,
        }
    }

    /// Whether it changes a role. It goes by the connection by which the server was looked at last, or gets
    /// [`Answer::Lost`].
    pub(crate) fn changes_a_role(self) -> bool {
        matches!(self, Order::StepDown(_) | Order::Follow | Order::Promote | Order::TakeBack)
    }
}

/// What became of the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Waited,
    Done,
    Seen(Seen),
    /// The old one has stepped down, and was this before.
    SteppedDown(Seen),
    /// It was not carried out, and will not be.
    Refused,
    /// It may have been carried out, or may be yet.
    Lost,
}

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Do(Order),
    Wait(Duration),
    End(End),
}

/// Why the roles were not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    NotInTime,
    Refused(Order),
    /// This server did not answer.
    Lost(Side),
    /// Somebody has changed the servers meanwhile.
    Changed,
    Signal,
}

/// What is not known at the end, or not in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Open {
    /// Whether the old one has stepped down. The new one is not promoted.
    StepDown,
    /// Whether the new one is promoted. The old one has stepped down.
    Promotion,
    /// Whether the old one is the primary again. The new one is not promoted.
    TakeBack,
    /// Both are replicas, and neither holds what the other does.
    Apart,
    /// Another run has taken over, or somebody has changed a role by hand.
    Another,
}

/// What the old one does at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follower {
    InStep,
    /// Its link is not up in time.
    NotYet,
    /// It does not answer.
    Lost,
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The new one is the primary, and no server accepted writes for that long.
    Switched {
        pause: Duration,
        follower: Follower,
    },
    /// The old one is the primary. `stepped_down`: as a replica it has refused writes meanwhile.
    Undone {
        why: Why,
        stepped_down: bool,
    },
    Open(Open),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Pausing,
    /// A former run has ended: whether the old one is still a replica, now that nothing of that run is carried out any
    /// more.
    Resuming,
    /// `old`: where the old one was just now; the new one is looked at next.
    CatchingUp {
        old: Option<Position>,
    },
    SteppingDown {
        until: Instant,
        /// An order got no answer.
        is_uncertain: bool,
    },
    /// The old one has stepped down there.
    Comparing {
        held: Position,
        until: Instant,
    },
    /// The new one holds all, and was seen by this connection. Whether the old one still bears the mark.
    Owning {
        until: Instant,
        is_uncertain: bool,
        by: u64,
    },
    Promoting {
        until: Instant,
        is_uncertain: bool,
    },
    TakingBack {
        why: Why,
        until: Instant,
    },
    /// `end`: none if the new one is the primary.
    Releasing {
        end: Option<End>,
    },
    /// Whether the old one is the primary, as this says.
    Confirming {
        end: End,
    },
    Following {
        until: Instant,
    },
    /// The old one is a primary again. It has forgotten that it has stepped down if the new one is a primary, too.
    Forgotten {
        until: Instant,
    },
}

/// Two servers on their way to change their roles.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    phase: Phase,
    began: Instant,
    limit: Duration,
    mark: Mark,
    /// In which both were at the same offset.
    history: Option<ReplId>,
    /// The connection to the new one that may carry an order to promote.
    new_by: Option<u64>,
    /// Another run may have promoted the new one: it has had the old one step down, or that is not known.
    is_resumed: bool,
    is_signaled: bool,
    /// Between the last write of the old one and the promotion.
    pause: Duration,
}

impl Exchange {
    /// Begins with a primary and a replica that is in step. `limit`: how long writes may wait.
    pub(crate) fn begin(now: Instant, limit: Duration, mark: Mark) -> (Exchange, Step) {
        (Exchange::new(now, limit, mark, Phase::Pausing), Step::Do(Order::Pause))
    }

    /// Begins with an old one that has stepped down: a run has ended before the promotion, or before the old one
    /// followed.
    pub(crate) fn resume(now: Instant, limit: Duration, mark: Mark) -> (Exchange, Step) {
        (Exchange::new(now, limit, mark, Phase::Resuming), Step::Do(Order::Look(Side::Old)))
    }

    fn new(began: Instant, limit: Duration, mark: Mark, phase: Phase) -> Exchange {
        let is_resumed = phase == Phase::Resuming;
        Exchange {
            phase,
            began,
            limit,
            mark,
            history: None,
            new_by: None,
            is_resumed,
            is_signaled: false,
            pause: Duration::ZERO,
        }
    }

    /// The command was told to end. Until the old one steps down, that undoes the switch.
    pub(crate) fn signal(&mut self) {
        self.is_signaled = true;
    }

    pub(crate) fn next(&mut self, now: Instant, answer: Answer) -> Step {
        match self.phase {
            Phase::Pausing => self.pausing(answer),
            Phase::Resuming => self.resuming(now, answer),
            Phase::CatchingUp { old } => self.catching_up(now, old, answer),
            Phase::SteppingDown { until, is_uncertain } => self.stepping_down(now, until, is_uncertain, answer),
            Phase::Comparing { held, until } => self.comparing(now, held, until, answer),
            Phase::Owning { until, is_uncertain, by } => self.owning(now, (until, is_uncertain, by), answer),
            Phase::Promoting { until, is_uncertain } => self.promoting(now, until, is_uncertain, answer),
            Phase::TakingBack { why, until } => self.taking_back(now, why, until, answer),
            Phase::Releasing { end: Some(end) } => {
                self.phase = Phase::Confirming { end };
                Step::Do(Order::Look(Side::Old))
            }
            Phase::Releasing { end: None } => {
                self.phase = Phase::Following { until: now + FOLLOW_LIMIT };
                Step::Do(Order::Look(Side::Old))
            }
            Phase::Confirming { end } => match answer {
                Answer::Seen(Seen { role: Some(Role::Replica), .. }) => Step::End(End::Open(Open::Another)),
                _ => Step::End(end),
            },
            Phase::Following { until } => self.following(now, until, answer),
            Phase::Forgotten { until } => self.forgotten(now, until, answer),
        }
    }

    fn pausing(&mut self, answer: Answer) -> Step {
        match answer {
            Answer::Done => {
                self.phase = Phase::CatchingUp { old: None };
                Step::Do(Order::Look(Side::Old))
            }
            Answer::Refused => Step::End(End::Undone { why: Why::Refused(Order::Pause), stepped_down: false }),
            _ => self.releases(Why::Lost(Side::Old), false),
        }
    }

    fn resuming(&mut self, now: Instant, answer: Answer) -> Step {
        match answer {
            Answer::Seen(Seen { role: Some(Role::Replica), .. }) => self.steps_down(now),
            Answer::Seen(_) => Step::End(End::Undone { why: Why::Changed, stepped_down: false }),
            _ => Step::End(End::Open(Open::Promotion)),
        }
    }

    fn catching_up(&mut self, now: Instant, old: Option<Position>, answer: Answer) -> Step {
        let side = if old.is_none() { Side::Old } else { Side::New };
        let seen = match answer {
            _ if self.is_signaled => return self.releases(Why::Signal, false),
            Answer::Seen(seen) => seen,
            Answer::Waited => return Step::Do(Order::Look(Side::Old)),
            Answer::Refused => return self.releases(Why::Refused(Order::Look(side)), false),
            _ => return self.releases(Why::Lost(side), false),
        };
        match (old, seen.role, seen.at) {
            (None, Some(Role::Primary), Some(at)) => {
                self.phase = Phase::CatchingUp { old: Some(at) };
                Step::Do(Order::Look(Side::New))
            }
            (Some(old), Some(Role::Replica), Some(new)) if old == new => {
                (self.history, self.new_by) = (Some(old.history), Some(seen.by));
                self.steps_down(now)
            }
            (Some(old), Some(Role::Replica), Some(new)) if old.history == new.history => {
                if now >= self.began + self.limit {
                    return self.releases(Why::NotInTime, false);
                }
                self.phase = Phase::CatchingUp { old: None };
                Step::Wait(POLL)
            }
            _ => self.releases(Why::Changed, false),
        }
    }

    fn steps_down(&mut self, now: Instant) -> Step {
        if Mutation::PromotedFirst.is_active() {
            return self.tells_to_promote(now + PROMOTE_LIMIT, false);
        }
        self.phase = Phase::SteppingDown { until: now + STEP_DOWN_LIMIT, is_uncertain: false };
        Step::Do(Order::StepDown(self.mark))
    }

    fn stepping_down(&mut self, now: Instant, until: Instant, is_uncertain: bool, answer: Answer) -> Step {
        match answer {
            Answer::SteppedDown(_) if Mutation::OldOffsetBelieved.is_active() => {
                self.tells_to_promote(now + PROMOTE_LIMIT, false)
            }
            Answer::SteppedDown(before) => {
                let was_replica = before.role != Some(Role::Primary);
                self.is_resumed = was_replica && (self.is_resumed || !Mutation::MarkIgnored.is_active());
                self.compares(now, before.at)
            }
            // What it was before is not known.
            Answer::Seen(Seen { role: Some(Role::Replica), at, mark, .. }) if mark == Some(self.mark) => {
                self.is_resumed = true;
                self.compares(now, at)
            }
            Answer::Refused if !is_uncertain && self.is_resumed => Step::End(End::Open(Open::Promotion)),
            Answer::Refused if !is_uncertain => self.releases(Why::Refused(Order::StepDown(self.mark)), false),
            _ if now >= until => Step::End(End::Open(Open::StepDown)),
            // What was sent before has died with its connection. Writes flow again, or another run has taken it back.
            Answer::Seen(Seen { role: Some(Role::Primary), .. }) if self.is_resumed => {
                self.releases(Why::Changed, false)
            }
            Answer::Seen(Seen { role: Some(Role::Primary), at, .. })
                if now >= self.began + self.limit || at.map(|at| at.history) != self.history =>
            {
                self.releases(Why::NotInTime, false)
            }
            Answer::Seen(_) => Step::Do(Order::StepDown(self.mark)),
            Answer::Waited => Step::Do(Order::Look(Side::Old)),
            Answer::Done | Answer::Refused | Answer::Lost => {
                self.phase = Phase::SteppingDown { until, is_uncertain: true };
                Step::Wait(RETRY)
            }
        }
    }

    fn compares(&mut self, now: Instant, held: Option<Position>) -> Step {
        match held {
            Some(held) => {
                self.phase = Phase::Comparing { held, until: self.began + self.limit };
                Step::Do(Order::Look(Side::New))
            }
            None if self.is_resumed => Step::End(End::Open(Open::Promotion)),
            None => self.takes_back(now, Why::Changed),
        }
    }

    fn comparing(&mut self, now: Instant, held: Position, until: Instant, answer: Answer) -> Step {
        let seen = match answer {
            Answer::Seen(seen) => seen,
            Answer::Waited => return Step::Do(Order::Look(Side::New)),
            _ if now < until => return Step::Wait(RETRY),
            // It may be the primary already, and have been for long.
            _ if self.is_resumed => return Step::End(End::Open(Open::Promotion)),
            _ => return self.takes_back(now, Why::Lost(Side::New)),
        };
        match seen.at {
            _ if seen.role == Some(Role::Primary) => self.promoted(now),
            Some(at) if at == held => self.promotes(now + PROMOTE_LIMIT, false, seen.by),
            Some(at) if at.is_before(held) && Mutation::BehindPromoted.is_active() => {
                self.tells_to_promote(now + PROMOTE_LIMIT, false)
            }
            Some(at) if at.is_before(held) && now < until => Step::Wait(POLL),
            Some(at) if at.is_before(held) => self.takes_back(now, Why::NotInTime),
            _ if self.is_resumed && !Mutation::AheadTakenBack.is_active() => Step::End(End::Open(Open::Apart)),
            _ => self.takes_back(now, Why::Changed),
        }
    }

    fn promotes(&mut self, until: Instant, is_uncertain: bool, by: u64) -> Step {
        if self.new_by == Some(by) {
            return self.tells_to_promote(until, is_uncertain);
        }
        self.phase = Phase::Owning { until, is_uncertain, by };
        Step::Do(Order::Look(Side::Old))
    }

    fn owning(&mut self, now: Instant, (until, is_uncertain, by): (Instant, bool, u64), answer: Answer) -> Step {
        match answer {
            Answer::Seen(Seen { mark, .. }) if mark == Some(self.mark) => {
                self.new_by = Some(by);
                self.tells_to_promote(until, is_uncertain)
            }
            Answer::Seen(_) => Step::End(End::Open(Open::Another)),
            _ if now >= until => Step::End(End::Open(Open::Promotion)),
            Answer::Waited => Step::Do(Order::Look(Side::Old)),
            _ => Step::Wait(RETRY),
        }
    }

    fn tells_to_promote(&mut self, until: Instant, is_uncertain: bool) -> Step {
        self.phase = Phase::Promoting { until, is_uncertain };
        Step::Do(Order::Promote)
    }

    fn promoting(&mut self, now: Instant, until: Instant, is_uncertain: bool, answer: Answer) -> Step {
        match answer {
            Answer::Done | Answer::Seen(Seen { role: Some(Role::Primary), .. }) => self.promoted(now),
            Answer::Refused if !is_uncertain => self.takes_back(now, Why::Refused(Order::Promote)),
            Answer::Lost if Mutation::TakenBackAfterPromotion.is_active() => self.takes_back(now, Why::Lost(Side::New)),
            _ if now >= until => Step::End(End::Open(Open::Promotion)),
            Answer::Seen(seen) => self.promotes(until, is_uncertain, seen.by),
            Answer::Waited => Step::Do(Order::Look(Side::New)),
            Answer::SteppedDown(_) | Answer::Refused | Answer::Lost => {
                self.phase = Phase::Promoting { until, is_uncertain: true };
                Step::Wait(RETRY)
            }
        }
    }

    fn promoted(&mut self, now: Instant) -> Step {
        self.pause = now.saturating_duration_since(self.began);
        self.phase = Phase::Releasing { end: None };
        Step::Do(Order::Release)
    }

    fn takes_back(&mut self, now: Instant, why: Why) -> Step {
        if Mutation::TakeBackForgotten.is_active() {
            return self.releases(why, true);
        }
        self.phase = Phase::TakingBack { why, until: now + TAKE_BACK_LIMIT };
        Step::Do(Order::Look(Side::Old))
    }

    fn taking_back(&mut self, now: Instant, why: Why, until: Instant, answer: Answer) -> Step {
        match answer {
            Answer::Done | Answer::Seen(Seen { role: Some(Role::Primary), .. }) => self.releases(why, true),
            Answer::Seen(Seen { mark, .. }) if mark != Some(self.mark) && !Mutation::MarkIgnored.is_active() => {
                Step::End(End::Open(Open::Another))
            }
            _ if now >= until => Step::End(End::Open(Open::TakeBack)),
            Answer::Seen(_) => Step::Do(Order::TakeBack),
            Answer::Waited => Step::Do(Order::Look(Side::Old)),
            Answer::SteppedDown(_) | Answer::Refused | Answer::Lost => Step::Wait(RETRY),
        }
    }

    fn releases(&mut self, why: Why, stepped_down: bool) -> Step {
        let end = End::Undone { why, stepped_down };
        if Mutation::ReleaseForgotten.is_active() {
            return Step::End(end);
        }
        self.phase = Phase::Releasing { end: Some(end) };
        Step::Do(Order::Release)
    }

    fn following(&mut self, now: Instant, until: Instant, answer: Answer) -> Step {
        let ends = |follower| Step::End(End::Switched { pause: self.pause, follower });
        match answer {
            Answer::Seen(Seen { role: Some(Role::Replica), is_linked: true, .. }) => ends(Follower::InStep),
            Answer::Waited => Step::Do(Order::Look(Side::Old)),
            Answer::Refused | Answer::Lost if now + FOLLOW_LIMIT >= until + RESTART_LIMIT => ends(Follower::Lost),
            Answer::Refused | Answer::Lost => Step::Wait(RETRY),
            _ if now >= until => ends(Follower::NotYet),
            // The run that bears another mark has it follow.
            Answer::Seen(Seen { mark, .. }) if mark == Some(self.mark) => Step::Do(Order::Follow),
            Answer::Seen(Seen { role: Some(Role::Primary), .. }) if Mutation::SuccessorDemoted.is_active() => {
                Step::Do(Order::Follow)
            }
            Answer::Seen(Seen { role: Some(Role::Primary), .. }) if !Mutation::ForgottenRoleLeft.is_active() => {
                self.phase = Phase::Forgotten { until };
                Step::Do(Order::Look(Side::New))
            }
            Answer::Seen(_) | Answer::SteppedDown(_) | Answer::Done => Step::Wait(RETRY),
        }
    }

    /// The old one says that it is a primary. It was restarted and has forgotten that it has stepped down, or a switch
    /// back has made it one. If it followed the new one then, there would be no primary.
    fn forgotten(&mut self, now: Instant, until: Instant, answer: Answer) -> Step {
        match answer {
            Answer::Seen(Seen { role: Some(Role::Primary), .. }) => {
                self.phase = Phase::Following { until };
                Step::Do(Order::Follow)
            }
            Answer::Seen(_) => Step::End(End::Open(Open::Another)),
            _ if now >= until => Step::End(End::Switched { pause: self.pause, follower: Follower::NotYet }),
            Answer::Waited => Step::Do(Order::Look(Side::New)),
            Answer::SteppedDown(_) | Answer::Done | Answer::Refused | Answer::Lost => Step::Wait(RETRY),
        }
    }
}

// Look: what both servers must be before a switch. Nothing is changed here.

/// The first version with a pause of writes alone.
const FIRST: Version = Version { major: 6, minor: 2, patch: 0 };

/// The channel by which Sentinels find each other: each of them subscribes to it at each server that it watches.
const SENTINELS: &str = "__sentinel__:hello";

/// What a look at both servers has found.
pub(super) enum Found {
    /// They stand as after a switch.
    Switched(Box<Ready>),
    Ready(Box<Ready>),
}

/// Looks at both servers.
///
/// # Errors
/// A server cannot be asked, or they cannot change their roles: [`Code::Refused`], with what to do.
pub(super) async fn look(args: &SwitchArgs) -> Result<Found, Failure> {
    let (from, to) = (args.ends.open_from(TASK)?, args.ends.open_to(TASK)?);
    let (mut old, mut new) = tokio::try_join!(from.connect(), to.connect())?;
    let before = old.info("").await?;
    let (of_old, of_new) = (Facts::from_info(&before), Facts::read(&mut new).await?);
    let old_follows = of_old.role == Some(Role::Replica) && follows_directly(&to, &of_new, &of_old).await;
    let standing = judge(&of_old, &of_new, old_follows);
    match &standing {
        Standing::Switched | Standing::Ready | Standing::Between => {}
        Standing::Refused(why) => {
            let text = format!("{} cannot take the place of {}: {why}", to.url(), from.url());
            return Err(Failure::refused(text));
        }
        Standing::Later(why) => {
            let text = format!("{} cannot take the place of {} now: {why}; nothing was changed", to.url(), from.url());
            return Err(Failure::new(Code::NotSwitched, text));
        }
    }
    // An old one that has stepped down need not list the new one any more.
    let named = args.to_address.clone().map(|named| (named.host, named.port));
    let direct = args.ends.to.host_and_port().map(|(host, port)| (host.to_owned(), port));
    let mut listed = named.or(direct).unwrap_or_default();
    if standing == Standing::Ready {
        if !args.sentinel.is_given() {
            refuse_sentinels(&mut old).await?;
        }
        refuse_an_inexact_replica(&mut new).await?;
        refuse_what_would_change_its_data(&mut old).await?;
        if args.rewrite_config {
            for (client, facts) in [(&mut old, &of_old), (&mut new, &of_new)] {
                refuse_what_notes_no_role(client, facts).await?;
            }
        }
        if let Some(why) = lacks_room(&of_old, &new.info("memory").await?) {
            return Err(Failure::refused(format!("{} {why}; raise maxmemory there first", to.url())));
        }
        // Sentinels have the other replicas of the old one follow the new one.
        let moved = if args.sentinel.is_given() { of_old.connected_replicas.unwrap_or(1) } else { 1 };
        refuse_what_would_take_no_writes(&mut new, of_new.connected_replicas.unwrap_or(0).saturating_add(moved))
            .await?;
        warn_of_databases(&mut old, &mut new).await?;
        let ports = ports_of(&mut new, &of_new).await?;
        listed = match &args.to_address {
            Some(named) => named_in(&before, named),
            None => {
                let is_direct = follows_directly(&from, &of_old, &of_new).await;
                listed_in(&before, &ports, &addresses(args.ends.to.host_and_port()).await, is_direct)
            }
        }
        .map_err(|why| Failure::refused(format!("{} {why}", from.url())))?;
    }
    let others = others_in(&before, &listed);
    let own = (addresses(args.ends.from.host_and_port()).await, of_old.tcp_port);
    if let Some(given) = args.ends.to.host_and_port().filter(|_| leads_to(&listed, &own)) {
        listed = (given.0.to_owned(), given.1);
    }
    if standing == Standing::Ready {
        check_login(&mut old, &to, &of_new, &listed).await?;
    }
    let ready = Ready {
        full_copies: full_copies(new.info("stats").await),
        old: Told::new(old),
        new: Told::new(new),
        others,
        listed,
        is_between: standing == Standing::Between,
        notes_roles: args.rewrite_config,
        behind: of_old.offset.unwrap_or(0).saturating_sub(of_new.offset.unwrap_or(0)),
    };
    Ok(if standing == Standing::Switched { Found::Switched(ready.into()) } else { Found::Ready(ready.into()) })
}

/// Full copies that a server has served since its start, by its `INFO stats`.
pub(super) fn full_copies(stats: Result<Info, ServerError>) -> Option<u64> {
    stats.ok()?.number("sync_full")
}

/// How two servers stand to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Ready,
    /// As after a switch.
    Switched,
    /// The old one has stepped down, and a run has ended there.
    Between,
    /// Not without a change by someone.
    Refused(String),
    /// Not now.
    Later(String),
}

/// Decides by what the servers say of themselves. `old_follows`: the old one follows the new one, whatever its link
/// says.
pub(crate) fn judge(old: &Facts, new: &Facts, old_follows: bool) -> Standing {
    let refused = |why: &str| Standing::Refused(why.to_owned());
    let [is_nowhere, is_turned] = [old, new].map(|facts| facts.link.as_ref().is_some_and(|link| link.host == NOWHERE));
    let same_history = old.replid.is_some() && old.replid == new.replid;
    if old.run_id.is_some() && old.run_id == new.run_id {
        return refused("both addresses lead to the same server");
    }
    if old.cluster_enabled == Some(true) || new.cluster_enabled == Some(true) {
        return refused("they are in cluster mode: send CLUSTER FAILOVER to the new one");
    }
    match (old.role, new.role) {
        (_, Some(Role::Replica)) if is_turned => {
            return refused(
                "it has stepped down in a switch the other way that has ended there: call that one again, which finishes or undoes \
                 it",
            );
        }
        (Some(Role::Primary), Some(Role::Replica)) => {}
        (Some(Role::Replica), Some(_)) if is_nowhere => return Standing::Between,
        (Some(Role::Replica), Some(Role::Primary)) if same_history || old_follows => return Standing::Switched,
        (Some(Role::Replica), _) => return refused("the old one is no primary"),
        _ => return refused("it is not its replica: make it one (remora migrate, remora replica)"),
    }
    if [old, new].into_iter().any(|facts| facts.version.is_some() && !facts.has_redis(FIRST)) {
        return refused("both must be Redis 6.2 or later, or Valkey, which can pause writes alone");
    }
    let link = new.link.as_ref();
    if new.loading == Some(true) || link.is_some_and(|link| link.syncing == Some(true)) {
        return Standing::Later("it is taking a full copy".into());
    }
    if link.is_none_or(|link| link.up != Some(true)) {
        return Standing::Later("its link to its primary is down".into());
    }
    if !same_history {
        return refused("it follows another primary");
    }
    if !new.backlog.is_some_and(|backlog| backlog.active) {
        return refused("it keeps no backlog, so the old one could not follow it without a full copy");
    }
    Standing::Ready
}

/// Sentinels would undo the switch, or promote a third server.
async fn refuse_sentinels(old: &mut Client) -> Result<(), Failure> {
    let url = old.server().url().to_string();
    match old.command(&["PUBSUB", "NUMSUB", SENTINELS]).await {
        Ok(answer) => match answer.as_array().and_then(|words| words.get(1)?.as_int()) {
            Some(count) if count > 0 => Err(Failure::refused(format!(
                "Sentinels watch {url} ({} of {SENTINELS}), and would undo the switch: name all of them with \
                 --sentinel, and the primary's name there with --sentinel-name",
                counted(count, "subscriber")
            ))),
            _ => Ok(()),
        },
        Err(error) if error.refusal().is_some() => {
            tracing::warn!("whether Sentinels watch {url} is not known ({error}); they would undo the switch");
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// Refuses a replica that does not hold what its primary holds.
async fn refuse_an_inexact_replica(new: &mut Client) -> Result<(), Failure> {
    let (since_start, own) = (Counted::read(new).await?, OwnChanges::read(new).await?);
    let url = new.server().url();
    if let Some(errors) = since_start.unexpected.filter(|errors| *errors > 0) {
        return Err(Failure::refused(format!(
            "{url} could not execute {errors} of its primary's commands (unexpected_error_replies; its log names them): compare the \
             two with remora verify; if they are the same, send it CONFIG RESETSTAT, else make it a replica again"
        )));
    }
    if own.as_ref().is_some_and(|own| own.is_writable) {
        return Err(Failure::refused(format!(
            "clients may write to {url} although it is a replica (replica-read-only no): set it to yes there, and compare the two \
             with remora verify"
        )));
    }
    if let Some(keys) = since_start.evicted.filter(|keys| *keys > 0) {
        let keys = counted(keys, "key");
        if let Some(what) = own.and_then(|own| own.of_the_limit()) {
            return Err(Failure::refused(format!(
                "{url} is a replica that {what}, and has removed {keys} since its start: set replica-ignore-maxmemory yes there, and \
                 compare the two with remora verify; if they are not the same, make it a replica again"
            )));
        }
        tracing::warn!("{url} has removed {keys} since its start because its memory was full");
    }
    Ok(())
}

/// Refuses an old primary whose clients could write to it as a replica: what they write would be acknowledged and lost.
/// Warns of one that would remove keys by itself.
async fn refuse_what_would_change_its_data(old: &mut Client) -> Result<(), Failure> {
    let Some(own) = OwnChanges::read(old).await? else { return Ok(()) };
    let url = old.server().url();
    if own.is_writable {
        return Err(Failure::refused(format!(
            "clients could write to {url} when it is a replica (replica-read-only no), and what they write would be lost: set it to \
             yes there first"
        )));
    }
    if let Some(what) = own.of_the_limit() {
        tracing::warn!(
            "{url} will be a replica that {what}: set replica-ignore-maxmemory yes there, if it is to be the primary again"
        );
    }
    Ok(())
}

/// Writes the configuration file of a server.
const NOTE_THE_ROLE: Needed = Needed { command: &["CONFIG", "REWRITE"], refused_by_itself: &[], since: ALWAYS };

/// Refuses a server that could not note its role (`--rewrite-config`).
async fn refuse_what_notes_no_role(client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    let url = client.server().url().to_string();
    if let Permission::Refused(error) = NOTE_THE_ROLE.ask(client, facts).await? {
        return Err(Failure::refused(format!("{error}; --rewrite-config needs it")));
    }
    match client.info("server").await?.get("config_file") {
        Some("") => Err(Failure::refused(format!(
            "{url} was started without a configuration file, so it cannot note its role (--rewrite-config): start it with a file, or \
             omit the option"
        ))),
        _ => Ok(()),
    }
}

/// Why a replica would not keep what it holds as a primary, which heeds its `maxmemory`. A limit that the old primary
/// has too is no reason.
fn lacks_room(old: &Facts, memory: &Info) -> Option<String> {
    let limit: u64 = memory.number("maxmemory").filter(|limit| *limit > 0)?;
    let uncounted: u64 = memory.number("mem_not_counted_for_evict").unwrap_or(0);
    let used = memory.number::<u64>("used_memory")?.saturating_sub(uncounted);
    if used <= limit || old.maxmemory.is_some_and(|limit_of_old| (1..=limit).contains(&limit_of_old)) {
        return None;
    }
    let policy = memory.get("maxmemory_policy").unwrap_or("noeviction");
    let would = if policy == "noeviction" { "refuse writes" } else { "remove keys" };
    let (used, limit) = (Size::bytes(used), Size::bytes(limit));
    Some(format!("uses {used}, and its maxmemory is {limit} ({policy}): it would {would} as soon as it is the primary"))
}

/// Refuses a replica that would take no writes as a primary that `has` replicas.
async fn refuse_what_would_take_no_writes(new: &mut Client, has: u32) -> Result<(), Failure> {
    let url = new.server().url().to_string();
    let needed = new.config_number("min-replicas-to-write").await?.unwrap_or(0);
    if needed > has {
        return Err(Failure::refused(format!(
            "{url} would take no writes: its min-replicas-to-write is {needed}, and it would have {}; lower it there first",
            counted(has, "replica")
        )));
    }
    Ok(())
}

/// Warns of an old primary with fewer databases than the new one. It will follow that one, and carry out in another
/// database what clients write in one that it lacks.
async fn warn_of_databases(old: &mut Client, new: &mut Client) -> Result<(), Failure> {
    let counts: [Option<u32>; 2] = [old.config_number("databases").await?, new.config_number("databases").await?];
    if let [Some(has), Some(wants)] = counts
        && has < wants
    {
        let url = old.server().url();
        tracing::warn!(
            "{url} has {}, and the new primary {wants}: what clients write in one that {url} lacks, it will carry out in another one; \
             start it with databases {wants} before you switch back",
            counted(has, "database")
        );
    }
    Ok(())
}

/// Whether a replica is known to follow the old primary itself, and not another one of its replicas: the address that
/// it follows leads there.
async fn follows_directly(from: &Server, old: &Facts, new: &Facts) -> bool {
    let Some(link) = &new.link else { return false };
    if from.url().host_and_port() == Some((link.host.as_str(), link.port)) {
        return true;
    }
    let asked = async { Facts::read(&mut from.at(&link.host, link.port).connect().await?).await };
    let asked: Result<Facts, ServerError> = asked.await;
    // An address that leads nowhere from here proves nothing.
    asked.is_ok_and(|facts| facts.run_id.is_some() && facts.run_id == old.run_id)
}

/// The ports under which a primary may list this server.
async fn ports_of(new: &mut Client, facts: &Facts) -> Result<Vec<u16>, Failure> {
    let announced = new.config_number("replica-announce-port").await?.filter(|port| *port != 0);
    Ok([announced, facts.tcp_port, facts.tls_port].into_iter().flatten().collect())
}

/// A host's name, and the addresses that it leads to.
async fn addresses(place: Option<(&str, u16)>) -> Vec<String> {
    let Some((host, port)) = place else { return Vec::new() };
    let found = tokio::net::lookup_host((host, port)).await.into_iter().flatten();
    found.map(|address| address.ip().to_string()).chain([host.to_owned()]).collect()
}

/// The replica with one of these ports and addresses, as its primary lists it. One that is listed with another address
/// is it if `is_direct` and there is no other: its primary may see it behind a translation of addresses.
fn listed_in(info: &Info, ports: &[u16], hosts: &[String], is_direct: bool) -> Result<(String, u16), String> {
    let with_port: Vec<Replica> = info.replicas().filter(|replica| ports.contains(&replica.port)).collect();
    let here: Vec<&Replica> = with_port.iter().filter(|replica| hosts.contains(&replica.ip)).collect();
    match (&here[..], &with_port[..]) {
        ([one], _) => Ok((one.ip.clone(), one.port)),
        ([], [one]) if is_direct => Ok((one.ip.clone(), one.port)),
        ([], [] | [_]) => Err(format!(
            "lists no replica at {hosts:?} with the port {ports:?} (INFO replication): the new one may follow another replica; if \
             it follows this one, name it with --to-address as it is listed"
        )),
        _ => Err("lists several replicas with that port: name the new one with --to-address as it is listed".into()),
    }
}

/// Whether a server that followed this address would follow itself. Two servers with one port on two addresses of one
/// host are listed so, as the kernel gives both ends of a connection on one host the same address.
fn leads_to(listed: &(String, u16), (hosts, port): &(Vec<String>, Option<u16>)) -> bool {
    hosts.contains(&listed.0) && *port == Some(listed.1)
}

/// The replicas beside that one, with what follows from that. A link without a port is no server: a source has one.
fn others_in(info: &Info, listed: &(String, u16)) -> Vec<String> {
    let is_other =
        |replica: &Replica| replica.port != 0 && (replica.ip.as_str(), replica.port) != (listed.0.as_str(), listed.1);
    let named = |replica: Replica| HostPort { host: replica.ip, port: replica.port }.to_string();
    info.replicas().filter(is_other).map(named).collect()
}

/// The replica of that address, if it is one.
fn named_in(info: &Info, named: &HostPort) -> Result<(String, u16), String> {
    let is_it = |replica: &Replica| (replica.ip.as_str(), replica.port) == (named.host.as_str(), named.port);
    match info.replicas().find(is_it) {
        Some(replica) => Ok((replica.ip, replica.port)),
        None => Err(format!("lists no replica {named} (INFO replication)")),
    }
}

/// Checks that the old primary's login for replication (`masteruser`, `masterauth`) is valid at the new one. Without it
/// the old primary could not follow.
async fn check_login(old: &mut Client, to: &Server, new: &Facts, listed: &(String, u16)) -> Result<(), Failure> {
    let (user, password) = match (old.config_bytes("masteruser").await, old.config_bytes("masterauth").await) {
        (Ok(user), Ok(password)) => (user, password),
        (Err(error), _) | (_, Err(error)) if error.refusal().is_some() => {
            tracing::warn!(
                "whether {} may log in at {} to follow it is not known: it does not tell its masterauth (CONFIG GET)",
                old.server().url(),
                to.url()
            );
            return Ok(());
        }
        (Err(error), _) | (_, Err(error)) => return Err(error.into()),
    };
    let given = |value: Option<Vec<u8>>| value.filter(|value| !value.is_empty());
    let password = given(password).map(Password::new);
    let credentials = Credentials { user: given(user).filter(|_| password.is_some()), password };
    let refused = |why: String| {
        Failure::refused(format!(
            "{} could not follow {}:{}: {why}; set masteruser and masterauth there first",
            old.server().url(),
            listed.0,
            listed.1
        ))
    };
    let mut client = match to.with_login(credentials).connect().await {
        Ok(client) => client,
        Err(error) if error.refusal().is_some() => return Err(refused(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    for needed in TO_REPLICATE {
        if let Permission::Refused(error) = needed.ask(&mut client, new).await? {
            return Err(refused(error.to_string()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::server::{Backlog, Link};

    const LIMIT: Duration = Duration::from_secs(2);

    fn at(offset: u64) -> Option<Position> {
        let history = "dc4a64ca756501f822cac70337e6c3488b20932f".parse().ok();
        history.map(|history| Position { history, offset })
    }

    /// The mark of the runs here, and of another one.
    const MARK: Mark = 7;

    const OTHER: Mark = 8;

    fn seen(role: Role, offset: u64) -> Seen {
        Seen { role: Some(role), at: at(offset), is_linked: role == Role::Replica, mark: None, by: 1 }
    }

    fn primary(offset: u64) -> Answer {
        Answer::Seen(seen(Role::Primary, offset))
    }

    fn replica(offset: u64) -> Answer {
        Answer::Seen(seen(Role::Replica, offset))
    }

    /// By a connection that was not there when the old one stepped down.
    fn replica_anew(offset: u64) -> Answer {
        Answer::Seen(Seen { by: 2, ..seen(Role::Replica, offset) })
    }

    /// The old one, which has stepped down in a run with this mark.
    fn marked(mark: Mark) -> Answer {
        Answer::Seen(Seen { mark: Some(mark), is_linked: false, ..seen(Role::Replica, 7) })
    }

    /// The old one was this when it got the order.
    fn stepped(role: Role, offset: u64) -> Answer {
        Answer::SteppedDown(seen(role, offset))
    }

    const fn undone(why: Why, stepped_down: bool) -> Step {
        Step::End(End::Undone { why, stepped_down })
    }

    /// An exchange, the time that it is told, and its last step.
    struct Played {
        exchange: Exchange,
        now: Instant,
    }

    impl Played {
        fn new() -> Played {
            let now = Instant::now();
            let (exchange, step) = Exchange::begin(now, LIMIT, MARK);
            assert_eq!(step, Step::Do(Order::Pause));
            Played { exchange, now }
        }

        /// The old one has stepped down at offset 7.
        fn stepped_down() -> Played {
            let mut played = Played::new();
            played.does(Answer::Done, Step::Do(Order::Look(Side::Old)));
            played.does(primary(7), Step::Do(Order::Look(Side::New))).does(replica(7), Step::Do(Order::StepDown(MARK)));
            played.does(stepped(Role::Primary, 7), Step::Do(Order::Look(Side::New)));
            played
        }

        #[track_caller]
        fn does(&mut self, answer: Answer, step: Step) -> &mut Played {
            assert_eq!(self.exchange.next(self.now, answer), step);
            self
        }

        fn after(&mut self, time: Duration) -> &mut Played {
            self.now += time;
            self
        }
    }

    #[test]
    fn the_new_one_is_promoted_where_the_old_one_has_stepped_down() {
        let mut played = Played::stepped_down();
        played.after(Duration::from_millis(3)).does(replica(7), Step::Do(Order::Promote));
        played.does(Answer::Done, Step::Do(Order::Release)).does(Answer::Done, Step::Do(Order::Look(Side::Old)));
        played.does(marked(MARK), Step::Do(Order::Follow));
        played.does(Answer::Done, Step::Wait(RETRY)).does(Answer::Waited, Step::Do(Order::Look(Side::Old)));
        let pause = Duration::from_millis(3);
        played.does(replica(7), Step::End(End::Switched { pause, follower: Follower::InStep }));
    }

    #[test]
    fn an_old_one_that_is_a_primary_again_follows_only_while_the_new_one_is_one_too() {
        let promoted = || {
            let mut played = Played::stepped_down();
            played.does(replica(7), Step::Do(Order::Promote)).does(Answer::Done, Step::Do(Order::Release));
            played.does(Answer::Done, Step::Do(Order::Look(Side::Old)));
            played.does(primary(7), Step::Do(Order::Look(Side::New)));
            played
        };
        // It was restarted.
        promoted().does(primary(9), Step::Do(Order::Follow)).does(Answer::Done, Step::Wait(RETRY));
        // A switch back has promoted it.
        promoted().does(replica(9), Step::End(End::Open(Open::Another)));
        let mut lost = promoted();
        lost.does(Answer::Lost, Step::Wait(RETRY)).does(Answer::Waited, Step::Do(Order::Look(Side::New)));
        let not_yet = End::Switched { pause: Duration::ZERO, follower: Follower::NotYet };
        lost.after(FOLLOW_LIMIT).does(Answer::Lost, Step::End(not_yet));
    }

    #[test]
    fn a_replica_that_is_behind_in_the_end_leaves_the_old_one_the_primary() {
        let mut played = Played::new();
        played.does(Answer::Done, Step::Do(Order::Look(Side::Old))).does(primary(7), Step::Do(Order::Look(Side::New)));
        played.does(replica(6), Step::Wait(POLL)).does(Answer::Waited, Step::Do(Order::Look(Side::Old)));
        played.does(primary(7), Step::Do(Order::Look(Side::New))).after(LIMIT);
        played.does(replica(6), Step::Do(Order::Release)).does(Answer::Done, Step::Do(Order::Look(Side::Old)));
        played.does(primary(7), undone(Why::NotInTime, false));

        // The pause was over, and a write came before it stepped down.
        let mut played = Played::new();
        played.does(Answer::Done, Step::Do(Order::Look(Side::Old))).does(primary(7), Step::Do(Order::Look(Side::New)));
        played.does(replica(7), Step::Do(Order::StepDown(MARK))).after(LIMIT);
        played.does(stepped(Role::Primary, 8), Step::Do(Order::Look(Side::New)));
        played.does(replica(7), Step::Do(Order::Look(Side::Old))).does(marked(MARK), Step::Do(Order::TakeBack));
        played.does(Answer::Done, Step::Do(Order::Release)).does(Answer::Lost, Step::Do(Order::Look(Side::Old)));
        played.does(Answer::Lost, undone(Why::NotInTime, true));
    }

    #[test]
    fn a_signal_undoes_what_is_not_stepped_down() {
        let mut played = Played::new();
        played.exchange.signal();
        played.does(Answer::Done, Step::Do(Order::Look(Side::Old))).does(primary(7), Step::Do(Order::Release));
        played.does(Answer::Done, Step::Do(Order::Look(Side::Old))).does(primary(7), undone(Why::Signal, false));
        let mut played = Played::stepped_down();
        played.exchange.signal();
        played.does(replica(7), Step::Do(Order::Promote));
    }

    #[test]
    fn a_replica_that_a_primary_could_not_be_lacks_room() {
        let memory = |used: u64, limit: u64, policy: &str| {
            let text = format!(
                "used_memory:{used}\r\nmem_not_counted_for_evict:5\r\nmaxmemory:{limit}\r\nmaxmemory_policy:{policy}\r\n"
            );
            Info::parse(text.as_bytes())
        };
        let old = |limit| Facts { maxmemory: Some(limit), ..Facts::default() };
        let why = lacks_room(&old(0), &memory(3 << 20, 1 << 20, "allkeys-lru")).unwrap();
        assert!(why.contains("maxmemory is 1 MiB (allkeys-lru): it would remove keys"), "{why}");
        assert!(lacks_room(&old(2 << 20), &memory(3 << 20, 1 << 20, "noeviction")).unwrap().contains("refuse writes"));
        // A limit that the old one has too, none, one that is not reached, and one that is reached by buffers only.
        let fits = [
            (old(1 << 20), memory(3 << 20, 1 << 20, "allkeys-lru")),
            (old(0), memory(3 << 20, 0, "allkeys-lru")),
            (old(0), memory(1 << 20, 3 << 20, "allkeys-lru")),
            (old(0), memory(1005, 1000, "allkeys-lru")),
            (old(0), Info::parse(b"")),
        ];
        assert!(fits.iter().all(|(old, memory)| lacks_room(old, memory).is_none()));
    }

    #[test]
    fn an_order_that_got_no_answer_is_looked_after() {
        let mut played = Played::stepped_down();
        played.does(replica(7), Step::Do(Order::Promote)).does(Answer::Lost, Step::Wait(RETRY));
        played.does(Answer::Waited, Step::Do(Order::Look(Side::New))).does(replica(7), Step::Do(Order::Promote));
        // The first one may have arrived: nothing is taken back.
        played.does(Answer::Refused, Step::Wait(RETRY)).after(PROMOTE_LIMIT);
        played.does(Answer::Lost, Step::End(End::Open(Open::Promotion)));

        let mut played = Played::stepped_down();
        played.does(replica(7), Step::Do(Order::Promote)).does(Answer::Refused, Step::Do(Order::Look(Side::Old)));
        played.does(marked(MARK), Step::Do(Order::TakeBack)).does(Answer::Lost, Step::Wait(RETRY));
        played.does(Answer::Waited, Step::Do(Order::Look(Side::Old))).does(primary(7), Step::Do(Order::Release));
        played.does(Answer::Done, Step::Do(Order::Look(Side::Old)));
        played.does(primary(7), undone(Why::Refused(Order::Promote), true));
    }

    #[test]
    fn a_run_that_was_ended_is_gone_on_with() {
        let resumed = || {
            let now = Instant::now();
            let (exchange, step) = Exchange::resume(now, LIMIT, MARK);
            assert_eq!(step, Step::Do(Order::Look(Side::Old)));
            let mut played = Played { exchange, now };
            played.does(marked(OTHER), Step::Do(Order::StepDown(MARK)));
            played.does(stepped(Role::Replica, 7), Step::Do(Order::Look(Side::New)));
            played
        };
        resumed().does(replica(7), Step::Do(Order::Look(Side::Old))).does(marked(MARK), Step::Do(Order::Promote));
        resumed().does(primary(9), Step::Do(Order::Release));
        let mut behind = resumed();
        behind.after(LIMIT).does(replica(6), Step::Do(Order::Look(Side::Old)));
        behind.does(marked(MARK), Step::Do(Order::TakeBack));
        resumed().does(replica(9), Step::End(End::Open(Open::Apart)));
        resumed().after(LIMIT).does(Answer::Lost, Step::End(End::Open(Open::Promotion)));
    }

    #[test]
    fn a_run_that_another_one_has_taken_over_changes_nothing() {
        let another = Step::End(End::Open(Open::Another));
        // It lost its connection to the new one, and the mark has changed.
        let mut played = Played::stepped_down();
        played.does(Answer::Lost, Step::Wait(RETRY)).does(Answer::Waited, Step::Do(Order::Look(Side::New)));
        played.does(replica_anew(7), Step::Do(Order::Look(Side::Old))).does(marked(OTHER), another);
        let mut played = Played::stepped_down();
        played.does(replica_anew(7), Step::Do(Order::Look(Side::Old))).does(marked(MARK), Step::Do(Order::Promote));
        let mut played = Played::stepped_down();
        played.after(LIMIT).does(replica(6), Step::Do(Order::Look(Side::Old))).does(marked(OTHER), another);
        // The old one had stepped down in another run, which may have told the new one.
        let mut played = Played::new();
        played.does(Answer::Done, Step::Do(Order::Look(Side::Old))).does(primary(7), Step::Do(Order::Look(Side::New)));
        played.does(replica(7), Step::Do(Order::StepDown(MARK)));
        played.does(stepped(Role::Replica, 7), Step::Do(Order::Look(Side::New))).after(LIMIT);
        played.does(Answer::Lost, Step::End(End::Open(Open::Promotion)));
        // What it undoes was done meanwhile.
        let mut played = Played::new();
        played.does(Answer::Refused, undone(Why::Refused(Order::Pause), false));
        let mut played = Played::new();
        played.does(Answer::Lost, Step::Do(Order::Release)).does(Answer::Done, Step::Do(Order::Look(Side::Old)));
        played.does(replica(7), another);
    }

    fn pair() -> (Facts, Facts) {
        let replid = "dc4a64ca756501f822cac70337e6c3488b20932f".parse().ok();
        let of =
            |role, run_id: &str| Facts { role: Some(role), run_id: Some(run_id.into()), replid, ..Facts::default() };
        let link = Link { host: "a".into(), port: 1, up: Some(true), syncing: Some(false) };
        let backlog = Backlog { active: true, size: 1 << 20, first: 1, held: 0 };
        let new = Facts { link: Some(link), backlog: Some(backlog), ..of(Role::Replica, "new") };
        (of(Role::Primary, "old"), new)
    }

    #[test]
    fn two_servers_that_can_change_their_roles_are_told_from_others() {
        let (old, new) = pair();
        assert_eq!(judge(&old, &new, false), Standing::Ready);
        assert_eq!(judge(&new, &old, false), Standing::Switched);
        assert!(matches!(judge(&old, &old, false), Standing::Refused(why) if why.contains("same server")));
        type Change = fn(&mut Facts, &mut Facts);
        let turned = |new: &mut Facts| new.link.iter_mut().for_each(|link| link.host = NOWHERE.into());
        let (mut old, mut new) = pair();
        turned(&mut new);
        for role in [Role::Primary, Role::Replica] {
            old.role = Some(role);
            assert!(matches!(judge(&old, &new, false), Standing::Refused(why) if why.contains("the other way")));
        }
        let changed: [(Change, &str); 6] = [
            (|old, _| old.cluster_enabled = Some(true), "CLUSTER FAILOVER"),
            (|_, new| new.role = Some(Role::Primary), "not its replica"),
            (|old, _| old.role = Some(Role::Replica), "no primary"),
            (|_, new| new.replid = None, "another primary"),
            (|_, new| new.backlog = None, "no backlog"),
            (|old, _| old.version = "6.0.16".parse().ok(), "6.2 or later"),
        ];
        for (change, words) in changed {
            let (mut old, mut new) = pair();
            change(&mut old, &mut new);
            assert!(matches!(judge(&old, &new, false), Standing::Refused(why) if why.contains(words)), "{words}");
        }
        for change in [|link: &mut Link| link.up = Some(false), |link: &mut Link| link.syncing = Some(true)] {
            let (old, mut new) = pair();
            change(new.link.as_mut().unwrap());
            assert!(matches!(judge(&old, &new, false), Standing::Later(_)));
        }
    }

    #[test]
    fn the_new_primary_is_found_among_the_replicas_by_its_port_and_address() {
        let info = Info::parse(
            b"slave0:ip=10.0.0.1,port=6379,state=online,offset=1,lag=0\r\nslave1:ip=10.0.0.2,port=6379,state=online,offset=1,lag=0\r\n\
              slave2:ip=10.0.0.3,port=6380,state=online,offset=1,lag=0\r\n",
        );
        let hosts = |hosts: &[&str]| hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>();
        assert_eq!(listed_in(&info, &[6379], &hosts(&["10.0.0.2"]), false).unwrap(), ("10.0.0.2".into(), 6379));
        assert_eq!(listed_in(&info, &[6380, 6390], &hosts(&["127.0.0.1"]), true).unwrap(), ("10.0.0.3".into(), 6380));
        assert!(listed_in(&info, &[6380], &hosts(&["127.0.0.1"]), false).unwrap_err().contains("another replica"));
        assert!(listed_in(&info, &[6379], &hosts(&["127.0.0.1"]), true).unwrap_err().contains("several"));
        assert!(listed_in(&info, &[7000], &hosts(&["10.0.0.1"]), true).unwrap_err().contains("lists no replica"));
        assert_eq!(others_in(&info, &("10.0.0.2".into(), 6379)), ["10.0.0.1:6379", "10.0.0.3:6380"]);
        let own = (hosts(&["10.0.0.1"]), Some(6379));
        assert!(leads_to(&("10.0.0.1".into(), 6379), &own));
        assert!(!leads_to(&("10.0.0.1".into(), 6380), &own) && !leads_to(&("10.0.0.2".into(), 6379), &own));
    }
}
