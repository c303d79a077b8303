//! Ending: the last part of a sync, done or failed. What is left to do does not depend on the source any more.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use remora_protocol::{Message, Outcome, Phase};

use super::event::{Action, Reading, Report, Rules};
use crate::exit::{Code, Failure};

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
                let text = "the server is a replica now, but its task ended unexpectedly; this is a bug of remora";
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
