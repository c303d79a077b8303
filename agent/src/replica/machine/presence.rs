//! Presence: whether the server comes to our link, and when to look what it is doing.

use std::time::{Duration, Instant};

use super::event::{Follows, Look, Rules};
use crate::exit::Failure;

/// How long a server may stay away from our link before it is looked at. Servers try again each second.
const MISSED_LIMIT: Duration = Duration::from_secs(2);

/// Whether the server connects to the link, and when to look at it next.
pub(super) struct Presence {
    /// Since when the server should have come to our link and has not.
    missed: Option<Instant>,
    /// Since when it has not answered.
    silent_since: Option<Instant>,
    /// The run of the server that was told to follow the link.
    run_id: Option<String>,
}

/// What follows from a look at the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing: it is looked at again, or it has come meanwhile.
    Wait,
    /// It follows the link and does not come: its login may be wrong.
    GiveLogin,
    /// It restarted and follows no primary: it is pointed at the link again.
    Redirect,
    /// Another client has changed it; the text goes on behind the server's name.
    TakenOver(String),
    /// It follows something else: to be verified over the present connection, since it may just have changed.
    Verify,
    Fail(Failure),
}

impl Presence {
    pub(super) fn new(run_id: Option<String>) -> Presence {
        Presence { missed: None, silent_since: None, run_id }
    }

    /// The server is expected at the link from now on.
    pub(super) fn expect(&mut self, now: Instant) {
        self.missed = Some(now);
    }

    /// The server's link ended.
    pub(super) fn gone(&mut self, now: Instant) {
        self.missed.get_or_insert(now);
    }

    /// The server has come.
    pub(super) fn came(&mut self) {
        self.missed = None;
    }

    /// The server has answered.
    pub(super) fn answered(&mut self) {
        self.silent_since = None;
    }

    /// The server did not answer. Whether it has been silent for longer than the limit.
    pub(super) fn silent(&mut self, now: Instant, limit: Duration) -> bool {
        now.duration_since(*self.silent_since.get_or_insert(now)) > limit
    }

    /// When the server is to be looked at.
    pub(super) fn deadline(&self) -> Option<Instant> {
        Some(self.missed? + MISSED_LIMIT)
    }

    /// What was seen over a new connection.
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
