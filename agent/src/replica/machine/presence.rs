//! Presence: whether the server connects to the link, and when to look at it.

use std::time::{Duration, Instant};

use super::event::{Follows, Look, Rules};
use crate::exit::Failure;

/// How long a server may stay away from our link before it is looked at. Servers try again each second.
const MISSED_LIMIT: Duration = Duration::from_secs(2);

/// Whether the server connects to the link, and when to look at it next.
pub(super) struct Presence {
    /// Since when the server should have connected to the link and has not.
    missed: Option<Instant>,
    /// Since when it has not answered.
    silent_since: Option<Instant>,
    /// The run id of the server that was pointed at the link.
    run_id: Option<String>,
}

/// What follows from a look at the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing. It is looked at again, or has connected meanwhile.
    Wait,
    /// It follows the link and does not connect: its login may be wrong.
    GiveLogin,
    /// It restarted and follows no primary: it is pointed at the link again.
    Redirect,
    /// Another client has changed it; the text continues a sentence that begins with the server's name.
    TakenOver(String),
    /// It follows something else. The present connection verifies that, since it may just have changed.
    Verify,
    Fail(Failure),
}

impl Presence {
    pub(super) fn new(run_id: Option<String>) -> Presence {
        Presence { missed: None, silent_since: None, run_id }
    }

    /// Expects the server at the link from now on.
    pub(super) fn expect(&mut self, now: Instant) {
        self.missed = Some(now);
    }

    /// Notes that the server's link ended.
    pub(super) fn gone(&mut self, now: Instant) {
        self.missed.get_or_insert(now);
    }

    /// Notes that the server has connected.
    pub(super) fn came(&mut self) {
        self.missed = None;
    }

    /// Notes that the server has answered.
    pub(super) fn answered(&mut self) {
        self.silent_since = None;
    }

    /// Notes that the server did not answer. Returns whether it has been silent for longer than the limit.
    pub(super) fn silent(&mut self, now: Instant, limit: Duration) -> bool {
        now.duration_since(*self.silent_since.get_or_insert(now)) > limit
    }

    /// When to look at the server.
    pub(super) fn deadline(&self) -> Option<Instant> {
        Some(self.missed? + MISSED_LIMIT)
    }

    /// Handles what was seen over a new connection.
    pub(super) fn looked(&mut self, now: Instant, rules: &Rules, looked: Result<Look, Failure>) -> Seen {
        if self.missed.is_none() {
            return Seen::Wait;
        }
        self.missed = Some(now);
        let look = match looked {
            Ok(look) => look,
            Err(failure) if self.silent(now, rules.retry_for) => return Seen::Fail(failure),
            Err(failure) => {
                tracing::debug!("{failure}; looking again");
                return Seen::Wait;
            }
        };
        self.answered();
        match look.follows {
            _ if look.loading => Seen::Wait,
            Follows::Link => Seen::GiveLogin,
            Follows::Nothing if look.run_id != self.run_id => {
                if look.keys > 0 && !rules.replace {
                    let keys = look.keys;
                    return Seen::TakenOver(format!(
                        "restarted and holds {keys} keys now; give --replace if they may go"
                    ));
                }
                self.run_id = look.run_id;
                Seen::Redirect
            }
            Follows::Nothing | Follows::Another => Seen::Verify,
        }
    }
}
