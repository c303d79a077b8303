//! Server side: what the agent has changed on the replica's server, and the jobs for the task that changes it.
//!
//! ```text
//!   Not ── Prepare ──▶ UnderWay ── Follow ──▶ Done ── the server restarted ──▶ UnderWay ── ...
//! ```

use std::collections::VecDeque;
use std::time::Instant;

use super::desk::Desk;
use super::event::{Action, Followed, Introduced, Job, Lapse, Leaving, Look, NotFollowed, Report, Rules};
use super::presence::{Presence, Seen};
use crate::events;
use crate::exit::Failure;

/// The state of the replica's server as far as this agent has changed it.
pub(super) struct ServerSide {
    pub(super) desk: Desk,
    pub(super) presence: Presence,
    redirect: Redirect,
    /// Another client has taken the server over.
    taken_over: bool,
    /// It does not know what the primary's stream has next.
    unfit: bool,
    /// It comes by itself, and has come before the sync began ([`Rules::intercepted`]).
    intercepted: bool,
}

/// Whether the server was pointed at the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Redirect {
    /// Nothing.
    Not,
    /// It is under way; `again` if the server had followed the link before it restarted.
    UnderWay { again: bool },
    /// The server was pointed at the link.
    Done,
}

impl ServerSide {
    pub(super) fn new(run_id: Option<String>, intercepted: bool) -> ServerSide {
        ServerSide {
            desk: Desk::default(),
            presence: Presence::new(run_id),
            redirect: Redirect::Not,
            taken_over: false,
            unfit: false,
            intercepted,
        }
    }

    /// Whether the server was pointed at the link.
    pub(super) fn follows_link(&self) -> bool {
        self.redirect == Redirect::Done
    }

    /// Begins to point the server at our link, unless that was done.
    pub(super) fn begin(&mut self) {
        if self.redirect == Redirect::Not {
            self.redirect = Redirect::UnderWay { again: false };
            self.desk.add(Job::Prepare { after_restart: false });
        }
    }

    /// Notes what a report says about the server, in any state of the sync. Returns `false` if it answers no job.
    pub(super) fn note(&mut self, report: &Report) -> bool {
        if !self.desk.done(report) {
            return false;
        }
        self.taken_over |= report.is_take_over();
        match report {
            Report::Followed(Ok(()) | Err(NotFollowed::Failed { told: true, .. })) => self.redirect = Redirect::Done,
            Report::Prepared(Err(_)) | Report::Followed(Err(NotFollowed::Failed { told: false, .. })) => {
                // A server that followed the link before it restarted holds what it was given.
                if self.redirect == (Redirect::UnderWay { again: false }) {
                    self.redirect = Redirect::Not;
                } else {
                    self.redirect = Redirect::Done;
                }
            }
            _ => {}
        }
        true
    }

    /// Notes that another client has taken the server over.
    pub(super) fn give_up(&mut self) {
        self.taken_over = true;
    }

    /// The server's settings are ready; `by_module`: its module can load the snapshot.
    pub(super) fn prepared(&mut self, now: Instant, by_module: bool, actions: &mut VecDeque<Action>) {
        // The delivery is ordered first: the server may ask for its payload before its answer to the command arrives.
        actions.push_back(Action::UseModule(by_module));
        self.follow(now, by_module);
    }

    /// The server permits no transaction, so that its position cannot be made worthless.
    pub(super) fn without_transaction(&mut self, now: Instant, text: &str, actions: &mut VecDeque<Action>) {
        tracing::info!(
            "the server has the module, but it is not used: REPLICAOF in a transaction was refused: {text}; its user \
             needs +multi +exec +discard"
        );
        actions.push_back(Action::UseModule(false));
        self.follow(now, false);
    }

    fn follow(&mut self, now: Instant, from_nothing: bool) {
        if !self.intercepted {
            self.presence.expect(now);
        }
        self.desk.add(Job::Follow { from_nothing });
    }

    /// The introduction of this number has ended.
    pub(super) fn introduced(
        &mut self,
        number: u64,
        outcome: Introduced,
        actions: &mut VecDeque<Action>,
    ) -> Result<(), Lapse> {
        match outcome {
            Introduced::Done { .. } => actions.push_back(Action::EndIntroduction { number }),
            Introduced::NotUsed => actions.extend([Action::UseModule(false), Action::EndIntroduction { number }]),
            // This ends the server's link. The server connects again.
            Introduced::AgainFromNothing | Introduced::Cancelled => {}
            Introduced::Failed(lapse) => return Err(lapse),
        }
        Ok(())
    }

    /// The server was looked at because it stays away.
    pub(super) fn looked(&mut self, now: Instant, rules: &Rules, looked: Result<Look, Failure>) -> Result<(), Lapse> {
        if self.redirect != Redirect::Done {
            return Ok(());
        }
        match self.presence.looked(now, rules, looked) {
            Seen::Wait => {}
            Seen::GiveLogin => self.desk.add(Job::GiveLogin),
            Seen::Verify => self.desk.add(Job::Verify(Followed::Link)),
            Seen::Redirect => {
                let server = &rules.server;
                tracing::warn!(
                    event = events::SERVER_RESTARTED,
                    "the server {server} restarted and follows no primary: it is redirected again"
                );
                self.redirect = Redirect::UnderWay { again: true };
                self.desk.add(Job::Prepare { after_restart: true });
            }
            Seen::TakenOver(how) => return Err(Lapse::TakenOver(how)),
            Seen::Fail(failure) => return Err(Lapse::Failed(failure)),
        }
        Ok(())
    }

    /// When to look at the server if it stays away.
    pub(super) fn look_at(&self) -> Option<Instant> {
        let looks = |job| matches!(job, Job::Look | Job::GiveLogin | Job::Verify(Followed::Link));
        let may_look = self.redirect == Redirect::Done && !self.desk.has(looks);
        self.presence.deadline().filter(|_| may_look)
    }

    /// Whether such a job waits or is being done.
    pub(super) fn has(&self, job: Job) -> bool {
        self.desk.has(|other| other == job)
    }

    /// Notes that the server does not know what comes next in the primary's stream.
    pub(super) fn note_unfit(&mut self) {
        self.unfit = true;
    }

    /// The state in which to leave the server.
    pub(super) fn leaving(&self, loaded: bool) -> Leaving {
        match self.redirect {
            Redirect::Not | Redirect::UnderWay { again: false } => Leaving::Untouched,
            _ if self.taken_over => Leaving::AsItIs,
            _ if loaded && self.unfit => Leaving::Alone,
            _ if loaded => Leaving::ToPrimary,
            _ => Leaving::Detached,
        }
    }
}
