//! Presence: whether the server connects to the link, and when to look at it.

use std::time::{Duration, Instant};

use super::event::{Follows, Look, Reading, Rules};
use crate::exit::{Code, Failure};

/// How long a server may stay away from our link before it is looked at. Servers try again each second.
const MISSED_LIMIT: Duration = Duration::from_secs(2);

/// How long a server may follow the link without ever coming to it, should `--retry-for` be longer. Servers try again
/// each second: one that did not come in this time cannot reach the link, or does not accept it.
const FIRST_LINK_LIMIT: Duration = Duration::from_secs(60);

/// How long a server may stay away from the link, should `--retry-for` be shorter: some of its tries.
const LEAST_LINK_LIMIT: Duration = Duration::from_secs(10);

/// Links in a row that may end before the server is given anything. Servers make a new one each second.
const UNUSED_LINKS_LIMIT: u32 = 30;

/// Whether the server connects to the link, and when to look at it next.
pub(super) struct Presence {
    /// Since when the server should have connected to the link and has not; set anew by each look.
    missed: Option<Instant>,
    /// Since when the server could have come to our link and has not.
    away_since: Option<Instant>,
    /// The server has come once.
    has_come: bool,
    /// The cause of its absence was logged.
    is_told: bool,
    /// Links that ended in a row before the server was given anything.
    unused_links: u32,
    /// Bytes that the server had been given when its last link ended.
    given: u64,
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
        Presence {
            missed: None,
            away_since: None,
            has_come: false,
            is_told: false,
            unused_links: 0,
            given: 0,
            silent_since: None,
            run_id,
        }
    }

    /// Expects the server at the link from now on.
    pub(super) fn expect(&mut self, now: Instant) {
        self.missed = Some(now);
        self.away_since = Some(now);
    }

    /// Notes that the server's link ended.
    pub(super) fn gone(&mut self, now: Instant) {
        self.missed.get_or_insert(now);
        self.away_since.get_or_insert(now);
    }

    /// Notes that the server has connected.
    pub(super) fn came(&mut self) {
        self.missed = None;
        self.away_since = None;
        self.is_told = false;
        self.has_come = true;
    }

    /// A link ended for this reason, not in the middle of a snapshot. Fails if too many of them were of no use.
    pub(super) fn link_ended(&mut self, rules: &Rules, reading: &Reading, text: &str) -> Result<(), Failure> {
        let is_used = reading.loaded || reading.bytes_delivered > self.given;
        self.given = reading.bytes_delivered;
        self.unused_links = if is_used { 0 } else { self.unused_links + 1 };
        if self.unused_links < UNUSED_LINKS_LIMIT {
            return Ok(());
        }
        let text = format!(
            "the link of the server {} ended {UNUSED_LINKS_LIMIT} times in a row before it was given anything ({text}); its log \
             says why",
            rules.server
        );
        Err(Failure::new(Code::SyncFailed, text))
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
                // It could not have come.
                self.away_since = Some(now);
                return Seen::Wait;
            }
        };
        self.answered();
        match look.follows {
            _ if look.loading => {
                self.away_since = Some(now);
                Seen::Wait
            }
            Follows::Link => self.stays_away(now, rules, &look.trouble),
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

    /// The server follows the link, answers, and has not come.
    fn stays_away(&mut self, now: Instant, rules: &Rules, trouble: &str) -> Seen {
        let away = now.duration_since(*self.away_since.get_or_insert(now));
        let (server, seconds) = (&rules.server, away.as_secs());
        let text = format!("the server {server} has not completed its link to us for {seconds} s: {trouble}");
        let longest = if self.has_come { rules.retry_for } else { rules.retry_for.min(FIRST_LINK_LIMIT) };
        if away > longest.max(LEAST_LINK_LIMIT) {
            return Seen::Fail(Failure::new(Code::SyncFailed, text));
        }
        // Not at the first look: a server whose login was wrong comes after it was given the right one.
        if away >= 2 * MISSED_LIMIT && !std::mem::replace(&mut self.is_told, true) {
            tracing::warn!("{text}");
        }
        Seen::GiveLogin
    }
}
