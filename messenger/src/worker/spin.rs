//! How long to poll before sleeping. Polling avoids the delay of the scheduler, and costs processor time that other
//! processes may need. So it is off by default, and the adaptive kind stops where it rarely finds something.

use std::time::{Duration, Instant};

use crate::config::Polling;

/// The polling of one worker.
pub(crate) struct Spin {
    polling: Polling,
    until: Option<Instant>,
    /// Polls in this round.
    looks: u32,
    /// Share of recent rounds that found something, as a decaying average in 256ths.
    paying: u32,
    rounds: u32,
}

impl Spin {
    pub(crate) fn new(polling: Polling) -> Spin {
        Spin { polling, until: None, looks: 0, paying: 256, rounds: 0 }
    }

    /// Begins a round.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.looks = 0;
        self.rounds = self.rounds.wrapping_add(1);
        self.until = match self.polling {
            Polling::Adaptive(limit) if self.is_worth_it() => Some(now + limit.min(LONGEST)),
            _ => None,
        };
    }

    /// Whether to poll once more.
    pub(crate) fn goes_on(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        match (self.polling, self.until) {
            (Polling::Spin, _) => true,
            (_, None) => false,
            // Reading the clock costs as much as several polls.
            (_, Some(until)) if self.looks.is_multiple_of(LOOKS_PER_CLOCK) && Instant::now() >= until => {
                self.paying -= self.paying / 8;
                self.until = None;
                false
            }
            _ => true,
        }
    }

    /// Whether this poll should ask epoll, which is a system call. `only_way`: there is nothing else to poll.
    pub(crate) fn asks_the_system(&self, only_way: bool) -> bool {
        only_way || self.looks.is_multiple_of(LOOKS_PER_CALL)
    }

    /// Notes that the round found something.
    pub(crate) fn paid(&mut self) {
        if self.looks > 0 {
            self.paying += (256 - self.paying) / 8;
        }
    }

    /// Whether at least every fourth round found something. Sometimes a round is tried anyway.
    fn is_worth_it(&self) -> bool {
        self.paying >= 64 || self.rounds.is_multiple_of(ROUNDS_PER_TRIAL)
    }
}

/// The longest round. A worker that sleeps for longer gains nothing by waking faster.
const LONGEST: Duration = Duration::from_millis(10);
const LOOKS_PER_CLOCK: u32 = 16;
/// Sockets are polled once in this many polls of memory.
const LOOKS_PER_CALL: u32 = 256;
const ROUNDS_PER_TRIAL: u32 = 64;
