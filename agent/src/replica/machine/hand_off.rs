//! Hand-off: the server goes from the link to the primary, or back if it does not get in step there.

use std::time::{Duration, Instant};

use super::event::{Followed, Job, PrimaryLink, Report, Rules};

/// How long a hand-off may take until the server is in step with the primary by itself.
pub(super) const HAND_OFF_LIMIT: Duration = Duration::from_secs(20);

/// Pause between two questions to a server that should be in step soon. Most hand-offs end within milliseconds.
pub(super) const QUICK: Duration = Duration::from_millis(5);

/// The longest pause. It costs a server that takes a full copy little.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// The pause is this part of the time that the hand-off has taken, so that it delays the end by this part at most.
const PAUSE_PART: u32 = 50;

/// After this time a server that has loaded, and that the primary would not continue, is worth a warning. A pin, and
/// the end of a burst of writes, come sooner.
const WARN_OF_UNCOVERED: Duration = Duration::from_secs(60);

/// What was logged of a server that has loaded, and that its primary would not continue yet.
#[derive(Debug, Default)]
pub(super) enum Uncovered {
    #[default]
    Untold,
    /// It was said then.
    Told(Instant),
    Warned,
}

impl Uncovered {
    /// Says once that the server stays on the link and why, and warns once if that lasts. A pin of the backlog, which
    /// needs no setting, ends it within moments.
    pub(super) fn tell(&mut self, now: Instant, text: &str) {
        let stays = "the primary would not take the server over without a full copy yet";
        match *self {
            Uncovered::Untold => {
                tracing::info!("{stays}: {text}; our link feeds the server until then");
                *self = Uncovered::Told(now);
            }
            Uncovered::Told(since) if now.saturating_duration_since(since) >= WARN_OF_UNCOVERED => {
                let seconds = WARN_OF_UNCOVERED.as_secs();
                tracing::warn!("{stays}, for {seconds} s now: {text}; our link feeds the server until then");
                *self = Uncovered::Warned;
            }
            Uncovered::Told(_) | Uncovered::Warned => {}
        }
    }
}

/// A hand-off under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HandOff {
    began: Instant,
    step: Step,
    /// Whether the server takes a full copy from the primary by itself, which may take long.
    takes_full_copy: bool,
    /// The signal that caused it, if any.
    pub(super) because: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The server applies what it was given.
    Settling,
    /// It is being pointed at the primary.
    Pointing,
    /// Its link is looked at when this time has come.
    Watching { next: Instant },
    /// Its link is being looked at.
    Asking,
    /// It does not follow the primary. The reason is being looked for.
    Verifying,
}

/// What follows from a look at the server's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing: it is looked at again.
    Watch,
    /// It is in step at this offset.
    InStep {
        offset: u64,
    },
    /// It takes a full copy, which is logged as a warning once.
    FullCopy,
    Do(Job),
}

impl HandOff {
    pub(super) fn begin(now: Instant, because: Option<&'static str>) -> HandOff {
        HandOff { began: now, step: Step::Settling, takes_full_copy: false, because }
    }

    /// Notes that a step was taken. Returns the next job.
    pub(super) fn done(&mut self, now: Instant, report: &Report) -> Option<Job> {
        match (self.step, report) {
            (Step::Settling, Report::Settled(_)) => {
                self.step = Step::Pointing;
                return Some(Job::PointAtPrimary);
            }
            (Step::Pointing, Report::PointedAtPrimary(_)) | (Step::Verifying, Report::Verified(_)) => {
                self.step = self.watching(now);
            }
            _ => {} // of a job that was ordered before the hand-off began
        }
        None
    }

    /// Notes that the server gave no answer.
    pub(super) fn watch(&mut self, now: Instant) {
        if self.step == Step::Asking {
            self.step = self.watching(now);
        }
    }

    fn watching(&self, now: Instant) -> Step {
        let pause = now.duration_since(self.began) / PAUSE_PART;
        Step::Watching { next: now + pause.clamp(QUICK, LONGEST_PAUSE) }
    }

    /// Handles the state of the server's link to the primary.
    pub(super) fn looked(&mut self, now: Instant, link: PrimaryLink) -> Next {
        if self.step != Step::Asking {
            return Next::Watch;
        }
        self.step = self.watching(now);
        match link {
            PrimaryLink { is_followed: false, .. } => {
                self.step = Step::Verifying;
                Next::Do(Job::Verify(Followed::Primary))
            }
            PrimaryLink { up: true, offset, .. } => Next::InStep { offset },
            PrimaryLink { syncing: true, .. } if !self.takes_full_copy => {
                self.takes_full_copy = true;
                Next::FullCopy
            }
            _ => Next::Watch,
        }
    }

    /// The question that is due.
    pub(super) fn question(&mut self, now: Instant) -> Option<Job> {
        match self.step {
            Step::Watching { next } if next <= now => {
                self.step = Step::Asking;
                Some(Job::AskPrimaryLink)
            }
            _ => None,
        }
    }

    /// The server is taking a full copy of the primary, or was. Its own replication is in charge of its data from then
    /// on: the agent must not point it anywhere else.
    pub(super) fn takes_full_copy(&self) -> bool {
        #[cfg(any(test, feature = "simulation"))]
        if crate::mutation::Mutation::FullCopyAborted.is_active() {
            return false;
        }
        self.takes_full_copy
    }

    /// Until when a server that does not answer is asked again.
    pub(super) fn bears_silence(&self, now: Instant) -> bool {
        now.duration_since(self.began) < HAND_OFF_LIMIT
    }

    /// The time is over. A full copy has as long as other trouble (`--retry-for`), unless the agent is to stop:
    /// `stopping` if a signal came during the hand-off; a signal that caused the hand-off counts as well.
    pub(super) fn is_late(&self, now: Instant, rules: &Rules, stopping: bool) -> bool {
        let is_watching = matches!(self.step, Step::Watching { .. });
        is_watching && now.duration_since(self.began) > self.limit(rules, stopping)
    }

    fn limit(&self, rules: &Rules, stopping: bool) -> Duration {
        #[cfg(any(test, feature = "simulation"))]
        if crate::mutation::Mutation::FullCopyAborted.is_active() {
            return HAND_OFF_LIMIT;
        }
        let is_to_stop = stopping || self.because.is_some();
        if self.takes_full_copy && !is_to_stop { rules.retry_for.max(HAND_OFF_LIMIT) } else { HAND_OFF_LIMIT }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.step {
            Step::Watching { next } => Some(next),
            _ => None,
        }
    }
}
