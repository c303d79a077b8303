//! Hand-off: the server goes from the link to the primary, or back if it does not get in step there.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use remora_protocol::{Message, Outcome, Phase};

use super::event::{Action, Followed, Job, PrimaryLink, Reading, Report, Rules};
use remora_process::exit::{Code, Failure};

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
        if remora_base::mutation::Mutation::FullCopyAborted.is_active() {
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
        if remora_base::mutation::Mutation::FullCopyAborted.is_active() {
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

// Ending: the last part of a sync, done or failed. What is left to do does not depend on the source any more.

/// Interval at which the agent checks whether other replicas still read here.
const LINGER_LOOK: Duration = Duration::from_millis(50);

/// The last part of a sync.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The server follows the primary, and its settings are being restored.
    Finishing(HandedOver),
    /// The sync is done, and other replicas still read here.
    Lingering {
        until: Instant,
        next: Instant,
        done: HandedOver,
    },
    /// The sync has failed: the server is being put in order.
    Leaving {
        failure: Failure,
        loaded: bool,
    },
    Ended,
}

/// A server that follows the primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HandedOver {
    /// The signal that caused the hand-off, or came before its end.
    pub(super) because: Option<&'static str>,
    /// The offset at which it was found in step.
    pub(super) offset: u64,
}

impl HandedOver {
    fn outcome(self, rules: &Rules) -> Result<(), Failure> {
        match self.because {
            // A stay ordinarily ends with a signal.
            Some(signal) if !rules.stay => {
                let text = format!("stopped by {signal}; the sync was far enough to be finished first");
                Err(Failure::new(Code::Interrupted, text))
            }
            _ => Ok(()),
        }
    }
}

impl Ending {
    /// The phase that the source is sent; `None` if nothing more is sent.
    pub(super) fn phase(&self) -> Option<Phase> {
        match self {
            Ending::Finishing(_) => Some(Phase::HandOff),
            Ending::Lingering { .. } | Ending::Ended => Some(Phase::Done),
            Ending::Leaving { .. } => None,
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Ending::Lingering { until, next, .. } => Some((*until).min(*next)),
            _ => None,
        }
    }

    /// Handles a signal.
    pub(super) fn stop(&mut self, now: Instant, signal: &'static str, actions: &mut VecDeque<Action>) {
        match self {
            Ending::Lingering { until, .. } => *until = now,
            Ending::Finishing(done) => {
                done.because = Some(signal);
                actions.push_back(Action::Hurry);
            }
            Ending::Leaving { .. } | Ending::Ended => {}
        }
    }

    /// Handles a report of the server's task.
    pub(super) fn server(
        &mut self,
        now: Instant,
        rules: &Rules,
        reading: &Reading,
        report: Report,
        actions: &mut VecDeque<Action>,
    ) {
        match (&*self, report) {
            (Ending::Leaving { failure, .. }, Report::Left(left)) => {
                let mut told = failure.clone().and(&left.text);
                if left.taken_over {
                    // Whatever ended the sync: a service manager must not set an agent on this server again.
                    told.code = Code::TakenOver;
                }
                self.fail(failure.clone(), Err(told), actions);
            }
            (Ending::Leaving { failure, .. }, Report::Ended) => {
                self.fail(failure.clone(), Err(failure.clone()), actions);
            }
            (Ending::Finishing(done), Report::Finished(Ok(()))) => {
                let done = *done;
                actions.extend([Action::TellProgress, Action::Publish]);
                let readers = reading.readers;
                if readers == 0 {
                    return self.end_well(done, done.outcome(rules), rules, actions);
                }
                actions.push_back(Action::SayLingering { readers });
                *self = Ending::Lingering { until: now + rules.linger, next: now + LINGER_LOOK, done };
            }
            (Ending::Finishing(done), Report::Finished(Err(failure))) => {
                let failure = failure.and("the server follows the primary");
                self.end_well(*done, Err(failure), rules, actions);
            }
            (Ending::Finishing(done), Report::Ended) => {
                let text = "the server is a replica now, but its task ended unexpectedly; this is a bug of remora, please report it";
                self.end_well(*done, Err(Failure::local(text)), rules, actions);
            }
            _ => {}
        }
    }

    /// Handles the passing of time.
    pub(super) fn tick(&mut self, now: Instant, rules: &Rules, reading: &Reading, actions: &mut VecDeque<Action>) {
        let Ending::Lingering { until, next, done } = self else { return };
        if reading.readers == 0 || *until <= now {
            let done = *done;
            tracing::info!(left = reading.readers, "no more slots are lent to other replicas");
            self.end_well(done, done.outcome(rules), rules, actions);
        } else if *next <= now {
            *next = now + LINGER_LOOK;
        }
    }

    fn fail(&mut self, failure: Failure, outcome: Result<(), Failure>, actions: &mut VecDeque<Action>) {
        let said = if failure.code == Code::Interrupted { Outcome::Stopped } else { Outcome::Failed };
        let last = Box::new(Message::Leave { outcome: said, text: failure.message });
        actions.push_back(Action::End { outcome, last });
        *self = Ending::Ended;
    }

    fn end_well(
        &mut self,
        done: HandedOver,
        outcome: Result<(), Failure>,
        rules: &Rules,
        actions: &mut VecDeque<Action>,
    ) {
        let text = format!("{} follows the primary at offset {}", rules.server, done.offset);
        let last = Box::new(Message::Leave { outcome: Outcome::HandedOver, text });
        actions.push_back(Action::End { outcome, last });
        *self = Ending::Ended;
    }
}
