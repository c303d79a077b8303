//! State: how far the server is, and when to ask whether it can be handed to the primary.

use std::time::{Duration, Instant};

use remora_protocol::Phase;

use super::ending::Ending;
use super::event::Reading;
use super::hand_off::{HandOff, QUICK};
use crate::server::PinSizes;

/// Pauses between questions whether the primary would continue the server: the first, and the longest. Each is twice as
/// long as the one before. An answer that the primary keeps the stream from an offset on is out of date within
/// milliseconds; one that its backlog is too small stays true for long.
const QUESTION_PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(250)];

/// How long the primary is asked whether it would continue a server that gets no more of the stream. Longer than an
/// answer takes, and short for someone who waits for the agent to stop.
const PARTING_LIMIT: Duration = Duration::from_secs(5);

/// Pause after a failed hand-off before the next one.
const AFTER_A_FAILED_HAND_OFF: Duration = Duration::from_secs(2);

/// The part of the primary's backlog that the server may lag behind at the hand-off: one in this number.
const NEAR_ENOUGH_PART: u64 = 10;

/// How far the server is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum State {
    /// There are no tables to read yet.
    Waiting,
    /// Slots arrive and are written to the server.
    Transfer,
    /// All slots have arrived here, and the server loads them.
    Loading,
    /// The server applies the stream up to the present.
    CatchUp(CatchUp),
    /// The server is in step and is fed until the agent is stopped (`--stay`).
    Staying,
    HandingOff(HandOff),
    /// A hand-off has failed: the server is being pointed back at our link.
    Returning,
    Ending(Ending),
}

/// The progress of a server that has loaded the snapshot and applies the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CatchUp {
    /// When to ask for the server's offset next.
    ask_at: Instant,
    /// The pause after the next question.
    pause: Duration,
    /// Whether the hand-off was asked for and not answered.
    asked: bool,
    /// Set when the server gets no more of the stream, or is to leave the link.
    parting: Option<Parting>,
}

/// The end of the stream through the source. The primary is asked for a while whether it would continue the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parting {
    /// Why the stream ends, for the log.
    pub(super) why: &'static str,
    /// The signal that ends it, if any.
    pub(super) because: Option<&'static str>,
    /// What follows if the primary would not.
    pub(super) otherwise: Otherwise,
    /// Until when it is asked.
    pub(super) until: Instant,
}

/// What becomes of a server that the primary would not continue, and that gets no more of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Otherwise {
    /// It loads another snapshot of the source. The primary serves no full copy.
    LoadAgain,
    /// It is left to its own replication, which takes a full copy of the primary: there is no source, or no agent.
    FullCopy,
}

impl State {
    /// The phase that the source is sent; `None` after a failure, when nothing more is sent.
    pub(super) fn phase(&self) -> Option<Phase> {
        match self {
            State::Waiting => Some(Phase::Waiting),
            State::Transfer => Some(Phase::Transfer),
            State::Loading => Some(Phase::Load),
            State::CatchUp(_) => Some(Phase::CatchUp),
            State::Staying => Some(Phase::Stay),
            State::HandingOff(_) | State::Returning => Some(Phase::HandOff),
            State::Ending(ending) => ending.phase(),
        }
    }
}

impl CatchUp {
    /// The server has just loaded the snapshot.
    pub(super) fn begin(now: Instant) -> CatchUp {
        CatchUp { ask_at: now, pause: QUESTION_PAUSES[0], asked: false, parting: None }
    }

    /// The server did not get in step with the primary.
    pub(super) fn begin_again(now: Instant) -> CatchUp {
        CatchUp { ask_at: now + AFTER_A_FAILED_HAND_OFF, ..CatchUp::begin(now) }
    }

    /// The stream through the source ends.
    pub(super) fn part(
        now: Instant,
        why: &'static str,
        because: Option<&'static str>,
        otherwise: Otherwise,
    ) -> CatchUp {
        CatchUp {
            parting: Some(Parting { why, because, otherwise, until: now + PARTING_LIMIT }),
            ..CatchUp::begin(now)
        }
    }

    /// The stream is there again.
    pub(super) fn is_fed_again(&mut self) {
        self.parting = self.parting.filter(|parting| parting.because.is_some());
    }

    pub(super) fn parting(&self) -> Option<Parting> {
        self.parting
    }

    /// The parting whose time is over.
    pub(super) fn parted(&self, now: Instant) -> Option<Parting> {
        self.parting.filter(|parting| parting.until <= now)
    }

    /// When to ask for the server's offset. Not while the hand-off is being asked for.
    pub(super) fn question_at(&self) -> Option<Instant> {
        (!self.asked).then_some(self.ask_at)
    }

    /// When something is due without an event; `is_asking`: the server is being asked for its offset.
    pub(super) fn deadline(&self, is_asking: bool) -> Option<Instant> {
        let question = self.question_at().filter(|_| !is_asking);
        [question, self.parting.map(|parting| parting.until)].into_iter().flatten().min()
    }

    /// The server is not near enough yet.
    pub(super) fn is_behind(&mut self, now: Instant) {
        self.ask_at = now + QUICK;
    }

    /// The server did not answer.
    pub(super) fn pauses(&mut self, until: Instant) {
        self.ask_at = until;
    }

    /// The server is near enough; `asked`: so the hand-off was asked for.
    pub(super) fn is_near(&mut self, now: Instant, asked: bool) {
        (self.ask_at, self.asked) = (now + self.pause, asked);
        self.pause = (self.pause * 2).min(QUESTION_PAUSES[1]);
    }

    /// Notes the answer, or that none will come. Returns whether one was awaited.
    pub(super) fn answered(&mut self) -> bool {
        std::mem::take(&mut self.asked)
    }
}

/// Whether a server that has applied the stream up to this offset can go to the primary. Under writes the present runs
/// ahead of every question: near enough is where the primary's backlog reaches, or can be made to reach. While the
/// stream is not read its end may be anywhere.
pub(super) fn is_near_enough(reading: &Reading, applied: u64, backlog_bytes: u64, sizes: &PinSizes) -> bool {
    let part = backlog_bytes / NEAR_ENOUGH_PART;
    let slack = if backlog_bytes >= sizes.least_backlog { part.max(sizes.slack) } else { part };
    let fetched = reading.stream_fetched;
    !reading.stream_paused
        && applied.saturating_add(slack) >= fetched
        && reading.stream_delivered.saturating_add(slack) >= fetched
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_come_quickly_at_first_and_then_four_times_a_second() {
        let began = Instant::now();
        let (mut now, mut pauses, mut catch_up) = (began, Vec::new(), CatchUp::begin(began));
        for _ in 0..6 {
            catch_up.is_near(now, true);
            assert_eq!(catch_up.question_at(), None, "the answer is awaited");
            assert!(catch_up.answered());
            let next = catch_up.question_at().unwrap_or(now);
            pauses.push(next.duration_since(now).as_millis());
            now = next;
        }
        assert_eq!(pauses, [20, 40, 80, 160, 250, 250]);
    }
}
