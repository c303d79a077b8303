//! Supply: whether the source feeds the delivery, and when to try again.

use std::time::{Duration, Instant};

use remora_protocol::WaitCause;

use super::event::{Reading, Rules};
use remora_base::pace::Backoff;
use remora_process::exit::Failure;
use remora_reader::loss::Loss;
use remora_reader::loss::{no_snapshot, wait_limit};

/// How long an attended server waits for a source whose own server is cut off from their primary: a link that broke
/// is back within a second or two, and the primary can serve the server meanwhile.
const CUT_OFF_LIMIT: Duration = Duration::from_secs(3);

/// How long a server that is fed (`--stay`) may be without its source until the primary is asked. Short: the server
/// gets nothing of the primary meanwhile, and a source that was started again does not know the old stream.
const STAY_WITHOUT_SOURCE: Duration = Duration::from_secs(2);

/// How long tables must be read without a loss, at least, before an earlier loss counts as overcome although nothing
/// new has arrived. Longer than it takes to find that a slot is damaged.
const QUIET: Duration = Duration::from_secs(60);

/// Whether the source feeds the delivery, and when to connect again.
pub(super) struct Supply {
    pub(super) state: SupplyState,
    pub(super) has_session: bool,
    /// Since when losses have followed each other without progress. Connecting again is no progress: a path that
    /// damages every slot lets each new connection begin.
    away_since: Option<Instant>,
    /// When the tables of the last offer were attached.
    attached_at: Option<Instant>,
    /// The furthest that the transfer has come.
    reached: Reached,
    waiting: Option<Waiting>,
    /// Whether the source ended the session because the server read nothing. The server must answer before the source
    /// is asked for another snapshot, which would cost the primary a fork.
    pub(super) stalled: bool,
    attempt: u64,
    backoff: Backoff,
    /// A loss that was noticed while the server was on its way to the primary.
    pub(super) deferred: Option<Loss>,
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

/// The furthest that the transfer has come. Each number only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reached {
    slots_held: u64,
    bytes_delivered: u64,
    stream_fetched: u64,
}

impl Reached {
    /// Notes how far the transfer is, and returns whether it has come further. Until the server holds the snapshot,
    /// only the snapshot counts: the stream may arrive while no slot does.
    fn has_grown(&mut self, reading: &Reading) -> bool {
        let before = *self;
        self.slots_held = self.slots_held.max(reading.slots_held);
        self.bytes_delivered = self.bytes_delivered.max(reading.bytes_delivered);
        self.stream_fetched = self.stream_fetched.max(reading.stream_fetched);
        if reading.loaded {
            return self.stream_fetched > before.stream_fetched;
        }
        self.slots_held > before.slots_held || self.bytes_delivered > before.bytes_delivered
    }
}

struct Waiting {
    since: Instant,
    /// Since when the source's server has been cut off. Attempts of the source to take a snapshot do not end that.
    cut_off_since: Option<Instant>,
    cause: WaitCause,
    text: String,
}

impl Waiting {
    /// How long the source may have nothing to offer, and since when that counts.
    fn limit(&self, rules: &Rules) -> (Instant, Duration) {
        match self.cause {
            WaitCause::CutOff if rules.intercepted => {
                (self.cut_off_since.unwrap_or(self.since), CUT_OFF_LIMIT.min(rules.retry_for))
            }
            cause => (self.since, wait_limit(cause, rules.retry_for)),
        }
    }
}

/// What follows from a loss.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Try again after this pause.
    Pause(Duration),
    /// The source feeds the server no more, which has all that the snapshot held.
    Part,
    Fail(Failure),
}

impl Supply {
    /// Begins with a new session.
    pub(super) fn new(backoff: Backoff) -> Supply {
        Supply {
            state: SupplyState::Idle,
            has_session: true,
            away_since: None,
            attached_at: None,
            reached: Reached::default(),
            waiting: None,
            stalled: false,
            attempt: 0,
            backoff,
            deferred: None,
        }
    }

    /// Notes that the source has nothing to offer yet.
    pub(super) fn waits(&mut self, now: Instant, cause: WaitCause, text: String) {
        let before = self.waiting.take().map(|waiting| (waiting.since, waiting.cut_off_since));
        let (since, mut cut_off_since) = before.unwrap_or((now, None));
        if cause == WaitCause::CutOff {
            cut_off_since.get_or_insert(now);
        }
        self.waiting = Some(Waiting { since, cut_off_since, cause, text });
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
    pub(super) fn attached(&mut self, now: Instant) {
        self.state = SupplyState::Attached;
        self.attached_at = Some(now);
        self.waiting = None;
        self.deferred = None;
    }

    /// Whether the delivery reads the tables of the last offer.
    pub(super) fn is_attached(&self) -> bool {
        self.state == SupplyState::Attached
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

    /// Handles a failure of the feed or the source.
    pub(super) fn lost(&mut self, now: Instant, rules: &Rules, reading: &Reading, loss: &Loss) -> Verdict {
        let quiet = if rules.stay && reading.loaded { STAY_WITHOUT_SOURCE } else { QUIET.max(rules.retry_for) };
        let was_quiet = self.attached_at.take().is_some_and(|at| now.duration_since(at) > quiet);
        if self.reached.has_grown(reading) || was_quiet {
            self.away_since = None;
        }
        let away = now.duration_since(*self.away_since.get_or_insert(now));
        if !loss.passes {
            return if reading.loaded { Verdict::Part } else { Verdict::Fail(loss.failure.clone()) };
        }
        if away > rules.retry_for {
            let text = format!("tried for {} s (--retry-for)", rules.retry_for.as_secs());
            return Verdict::Fail(loss.failure.clone().and(&text));
        }
        let pause = self.backoff.next();
        self.state = SupplyState::Pausing { until: now + pause };
        Verdict::Pause(pause)
    }

    /// Whether a server that is fed (`--stay`) has been without its source for long enough.
    pub(super) fn is_missed(&self, now: Instant) -> bool {
        self.away_since.is_some_and(|since| now.duration_since(since) > STAY_WITHOUT_SOURCE)
    }

    /// The pause is over.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        matches!(self.state, SupplyState::Pausing { until } if until <= now)
    }

    /// The source has had nothing to offer for too long.
    pub(super) fn gives_up(&self, now: Instant, rules: &Rules) -> Option<Failure> {
        let waiting = self.waiting.as_ref()?;
        let (since, limit) = waiting.limit(rules);
        let waited = now.duration_since(since);
        (waited > limit).then(|| no_snapshot(&rules.source, waited, &waiting.text))
    }

    /// When something is due without an event.
    pub(super) fn deadline(&self, rules: &Rules) -> Option<Instant> {
        let pause = match self.state {
            SupplyState::Pausing { until } => Some(until),
            _ => None,
        };
        // Behind the limit, and not at it.
        let waited = self.waiting.as_ref().map(|waiting| waiting.limit(rules));
        let waited = waited.map(|(since, limit)| since + limit + Duration::from_millis(1));
        [pause, waited].into_iter().flatten().min()
    }
}
