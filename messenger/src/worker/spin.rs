//! How long to look around before sleeping. Looking saves the way through the scheduler, and costs a processor that somebody
//! else may need: so it is asked for by name, and the adaptive kind stops where it has not paid.

use std::time::{Duration, Instant};

use crate::messenger::Polling;

/// The looking of one worker.
pub(crate) struct Spin {
    polling: Polling,
    until: Option<Instant>,
    /// Looks in this round.
    looks: u32,
    /// Of the last rounds, how many ended with something found, as a sinking average in 256ths.
    paying: u32,
    rounds: u32,
}

impl Spin {
    pub(crate) fn new(polling: Polling) -> Spin {
        Spin { polling, until: None, looks: 0, paying: 256, rounds: 0 }
    }

    /// A round begins.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.looks = 0;
        self.rounds = self.rounds.wrapping_add(1);
        self.until = match self.polling {
            Polling::Adaptive(limit) if self.is_worth_it() => Some(now + limit.min(LONGEST)),
            _ => None,
        };
    }

    /// Whether to look once more.
    pub(crate) fn goes_on(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        match (self.polling, self.until) {
            (Polling::Spin, _) => true,
            (_, None) => false,
            // The clock costs as much as some looks do.
            (_, Some(until)) if self.looks.is_multiple_of(LOOKS_PER_CLOCK) && Instant::now() >= until => {
                self.paying -= self.paying / 8;
                self.until = None;
                false
            }
            _ => true,
        }
    }

    /// Whether this look should ask epoll, which is a system call; `only_way`: there is nothing else to look at.
    pub(crate) fn asks_the_system(&self, only_way: bool) -> bool {
        only_way || self.looks.is_multiple_of(LOOKS_PER_CALL)
    }

    /// Something was found.
    pub(crate) fn paid(&mut self) {
        if self.looks > 0 {
            self.paying += (256 - self.paying) / 8;
        }
    }

    /// Looking has paid at least every fourth time; and now and then it is tried again.
    fn is_worth_it(&self) -> bool {
        self.paying >= 64 || self.rounds.is_multiple_of(ROUNDS_PER_TRIAL)
    }
}

/// Whoever sleeps for longer gains nothing by waking faster.
const LONGEST: Duration = Duration::from_millis(10);
const LOOKS_PER_CLOCK: u32 = 16;
/// Sockets are looked at after so many looks at memory.
const LOOKS_PER_CALL: u32 = 256;
const ROUNDS_PER_TRIAL: u32 = 64;
