//! Supply: whether the source feeds the delivery, and when to try again.

use std::time::{Duration, Instant};

use remora_protocol::WaitCause;

use super::event::Rules;
use crate::backoff::Backoff;
use crate::exit::{Code, Failure};

/// How long the source may have nothing to offer if `--retry-for` is shorter. A primary may be busy with another
/// snapshot of its own first. One whose snapshots fail is waited for during `--retry-for` only.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// How long a server that is fed (`--stay`) may be without its source. Short: the server gets nothing of the primary
/// meanwhile, and a source that was started again does not know the old stream.
const STAY_WITHOUT_SOURCE: Duration = Duration::from_secs(2);

/// Whether the source feeds the delivery, and when to connect again.
pub(super) struct Supply {
    pub(super) state: SupplyState,
    pub(super) has_session: bool,
    /// Since when the source could not be reached.
    away_since: Option<Instant>,
    waiting: Option<Waiting>,
    /// Whether the source ended the session because the server read nothing. The server must answer before the source
    /// is asked for another snapshot, which would cost the primary a fork.
    pub(super) stalled: bool,
    attempt: u64,
    backoff: Backoff,
    /// A loss that was noticed while the server was on its way to the primary.
    pub(super) deferred: Option<(bool, Failure)>,
}

/// The state of the supply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SupplyState {
    /// Nothing was asked for.
    Idle,
    /// The source was asked for a snapshot.
    Asked,
    /// The tables of an offer are being connected.
    Connecting { attempt: u64 },
    /// The delivery reads them.
    Attached,
    /// The next attempt is due at this time.
    Pausing { until: Instant },
    /// Before the next attempt the server is asked whether it answers.
    CheckingServer,
    /// A new session is being begun.
    Reconnecting,
}

struct Waiting {
    since: Instant,
    cause: WaitCause,
    text: String,
}

/// What follows from a loss.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Try again after this pause.
    Pause(Duration),
    /// The server has all that the snapshot held: the primary can make good the rest.
    GoToPrimary,
    Fail(Failure),
}

impl Supply {
    /// Begins with a new session.
    pub(super) fn new(backoff: Backoff) -> Supply {
        Supply {
            state: SupplyState::Idle,
            has_session: true,
            away_since: None,
            waiting: None,
            stalled: false,
            attempt: 0,
            backoff,
            deferred: None,
        }
    }

    /// Notes that the source has nothing to offer yet.
    pub(super) fn waits(&mut self, now: Instant, cause: WaitCause, text: String) {
        let since = self.waiting.take().map_or(now, |waiting| waiting.since);
        self.waiting = Some(Waiting { since, cause, text });
    }

    /// Begins to connect to the tables of an offer. Earlier attempts become void.
    pub(super) fn connecting(&mut self) -> u64 {
        self.attempt += 1;
        self.state = SupplyState::Connecting { attempt: self.attempt };
        self.attempt
    }

    pub(super) fn is_connecting(&self, attempt: u64) -> bool {
        self.state == SupplyState::Connecting { attempt }
    }

    /// Notes that the delivery reads the tables of the last offer.
    pub(super) fn attached(&mut self) {
        self.state = SupplyState::Attached;
        self.waiting = None;
        self.away_since = None;
        self.deferred = None;
    }

    /// A new session has begun.
    pub(super) fn connected(&mut self) {
        self.has_session = true;
        self.backoff.reset();
        self.state = SupplyState::Idle;
    }

    /// The pause before the next attempt.
    pub(super) fn pause(&mut self) -> Duration {
        self.backoff.next()
    }

    /// Handles a failure of the feed or the source; `passes` if another attempt may succeed.
    pub(super) fn lost(
        &mut self,
        now: Instant,
        rules: &Rules,
        loaded: bool,
        passes: bool,
        failure: &Failure,
    ) -> Verdict {
        let away = now.duration_since(*self.away_since.get_or_insert(now));
        let enough = !passes || (rules.stay && away > STAY_WITHOUT_SOURCE);
        if enough && loaded {
            return Verdict::GoToPrimary;
        }
        if !passes {
            return Verdict::Fail(failure.clone());
        }
        if away > rules.retry_for {
            let text = format!("tried for {} s (--retry-for)", rules.retry_for.as_secs());
            return Verdict::Fail(failure.clone().and(&text));
        }
        let pause = self.backoff.next();
        self.state = SupplyState::Pausing { until: now + pause };
        Verdict::Pause(pause)
    }

    /// The pause is over.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        matches!(self.state, SupplyState::Pausing { until } if until <= now)
    }

    /// The source has had nothing to offer for too long.
    pub(super) fn gives_up(&self, now: Instant, rules: &Rules) -> Option<Failure> {
        let Waiting { since, text, .. } = self.waiting.as_ref()?;
        let waited = now.duration_since(*since);
        (waited > self.wait_limit(rules)).then(|| {
            let seconds = waited.as_secs();
            let text = format!("the source {} has had no snapshot to offer for {seconds} s: {text}", rules.source);
            Failure::new(Code::Source, text)
        })
    }

    fn wait_limit(&self, rules: &Rules) -> Duration {
        match self.waiting.as_ref().map(|waiting| waiting.cause) {
            Some(WaitCause::LastAttemptFailed) => rules.retry_for,
            _ => rules.retry_for.max(WAIT_LIMIT),
        }
    }

    /// When something is due without an event.
    pub(super) fn deadline(&self, rules: &Rules) -> Option<Instant> {
        let pause = match self.state {
            SupplyState::Pausing { until } => Some(until),
            _ => None,
        };
        // Behind the limit, and not at it.
        let waited = self.waiting.as_ref();
        let waited = waited.map(|waiting| waiting.since + self.wait_limit(rules) + Duration::from_millis(1));
        [pause, waited].into_iter().flatten().min()
    }
}
