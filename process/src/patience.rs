//! Patience: how long a command waits for what passes by itself, before it gives up.
//!
//! A server that starts, loads or is busy, a source that is being restarted, Sentinels that do not answer yet: no
//! operator has to do anything, so the command tries again. It says what it waits for when that changes, and every half
//! minute. What does not pass ends it at once.

use std::time::{Duration, Instant};

use crate::events;
use crate::exit::Failure;
use remora_base::pace::Backoff;

/// The longest pause between two attempts: a server that is started beside the agent is not waited for much longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How often the same cause is said again.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// The option that limits most waits.
pub const RETRY_FOR: &str = "--retry-for";

/// Failures that follow each other.
pub struct Patience {
    limit: Duration,
    /// The option that gives the limit.
    option: &'static str,
    backoff: Backoff,
    since: Option<Instant>,
    said: Option<(Instant, String)>,
}

impl Patience {
    /// Waits for this long in all. `option`: by which the user has given the limit.
    pub fn new(limit: Duration, option: &'static str) -> Patience {
        Patience { limit, option, backoff: Backoff::from_system(), since: None, said: None }
    }

    /// The pause before the next attempt, after this failure at this time.
    ///
    /// # Errors
    /// The failure does not pass, or such failures have lasted for too long.
    pub fn after(&mut self, now: Instant, failure: Failure) -> Result<Duration, Failure> {
        let since = *self.since.get_or_insert(now);
        let waited = now.saturating_duration_since(since);
        if !failure.passes || self.limit.is_zero() {
            return Err(failure);
        }
        let Some(left) = self.limit.checked_sub(waited).filter(|left| !left.is_zero()) else {
            return Err(failure.and(&format!("tried for {} s ({})", waited.as_secs(), self.option)));
        };
        let is_news = self
            .said
            .as_ref()
            .is_none_or(|(at, text)| *text != failure.message || now.saturating_duration_since(*at) >= SAY_EVERY);
        if is_news {
            tracing::warn!(
                event = events::RETRYING,
                "{failure}; trying again for {} s at most ({})",
                left.as_secs().max(1),
                self.option
            );
            self.said = Some((now, failure.message));
        }
        Ok(self.backoff.next().min(LONGEST_PAUSE).min(left))
    }

    /// Tries until an attempt succeeds.
    ///
    /// # Errors
    /// As [`Patience::after`].
    pub async fn keep_trying<T>(&mut self, mut attempt: impl AsyncFnMut() -> Result<T, Failure>) -> Result<T, Failure> {
        loop {
            match attempt().await {
                Ok(done) => {
                    self.overcome();
                    return Ok(done);
                }
                Err(failure) => {
                    let pause = self.after(Instant::now(), failure)?;
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// An attempt has succeeded: the next failure begins a new wait.
    pub fn overcome(&mut self) {
        (self.since, self.said) = (None, None);
        self.backoff.reset();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::exit::Code;

    fn passing() -> Failure {
        Failure::passing(Code::Server, "the server loads")
    }

    #[test]
    fn what_passes_is_waited_for_as_long_as_the_option_says() {
        let (began, mut patience) = (Instant::now(), Patience::new(Duration::from_secs(10), RETRY_FOR));
        for second in 0..10 {
            let pause = patience.after(began + Duration::from_secs(second), passing()).unwrap();
            assert!(pause <= Duration::from_secs(10 - second) && pause <= LONGEST_PAUSE, "{pause:?}");
        }
        let over = patience.after(began + Duration::from_secs(10), passing()).unwrap_err();
        assert_eq!(over.message, "the server loads; tried for 10 s (--retry-for)");
        assert_eq!(over.code, Code::Server);
    }

    #[test]
    fn a_wait_begins_anew_after_a_success() {
        let (began, mut patience) = (Instant::now(), Patience::new(Duration::from_secs(10), RETRY_FOR));
        assert!(patience.after(began, passing()).is_ok());
        patience.overcome();
        assert!(patience.after(began + Duration::from_secs(15), passing()).is_ok());
        assert!(patience.after(began + Duration::from_secs(26), passing()).is_err());
    }

    #[test]
    fn what_does_not_pass_and_what_has_no_time_ends_at_once_in_its_own_words() {
        let now = Instant::now();
        let ends = Failure::new(Code::Server, "the password is wrong");
        assert_eq!(Patience::new(Duration::from_secs(10), RETRY_FOR).after(now, ends.clone()), Err(ends));
        assert_eq!(Patience::new(Duration::ZERO, RETRY_FOR).after(now, passing()), Err(passing()));
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_go_on_until_one_succeeds() {
        let mut left = 3;
        let mut patience = Patience::new(Duration::from_secs(10), RETRY_FOR);
        let done = patience.keep_trying(async || {
            left -= 1;
            if left == 0 { Ok(7) } else { Err(passing()) }
        });
        assert_eq!(done.await, Ok(7));
    }
}
