//! [`Pins`]: the answer to a replica that wants to go to its primary, and what makes the answer stay true until it is
//! there.
//!
//! ```text
//!   Position ── the history is another ──────────────────▶ no
//!      ├────── a pin holds it ───────────────────────────▶ yes
//!      ├────── a new pin: firm ──────────────────────────▶ yes
//!      ├────── a new pin, not firm, or none is possible ─▶ what the estimate says: Facts::covers
//!      └────── the server may drop it at any moment ─────▶ no, but the server's end is pinned: the replica stays on its
//!                                                          link, passes that offset, asks again, and a pin holds it
//! ```

use std::time::{Duration, Instant};

use remora_redis::ReplId;

use super::pin::{At, Pin, PinError};
use super::{Facts, Server};

/// The pause after the first refused pin, and the longest after later ones: each refusal may start a fork.
const PAUSE: Duration = Duration::from_secs(5);
const PAUSE_LIMIT: Duration = Duration::from_secs(120);

/// Where a replica is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// The history that it has executed.
    pub(crate) history: ReplId,
    /// The offset up to which.
    pub(crate) offset: u64,
    /// Bytes that the primary's clients write per second, as far as is known.
    pub(crate) rate: u64,
}

/// Pins of one server, each for the replicas that go to it at about the same time.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    open: Vec<(ReplId, Pin)>,
    /// How often the server has refused a pin, and until when it is not asked for another one.
    refused: Option<(u32, Instant)>,
}

impl Pins {
    /// Whether the server would continue a replica at this position, for long enough that it can go there. The error
    /// says why not.
    pub(crate) async fn secure(&mut self, server: &Server, facts: &Facts, at: Position) -> Result<(), String> {
        self.open.retain(|(_, pin)| pin.lives());
        let estimate = facts.covers(at.history, at.offset, at.rate);
        if !facts.continues(at.history, at.offset.saturating_add(1)) {
            return estimate;
        }
        if self.open.iter().any(|(history, pin)| *history == at.history && pin.holds(at.offset)) {
            return Ok(());
        }
        if self.refused.is_some_and(|(_, until)| Instant::now() < until) {
            return estimate;
        }
        match Pin::open(server, facts, at.history, At::Offset(at.offset)).await {
            Ok(pin) => {
                let is_firm = pin.is_firm();
                self.open.push((at.history, pin));
                if is_firm { Ok(()) } else { estimate }
            }
            Err(PinError::Impossible(_)) => estimate,
            Err(PinError::NotKept(text)) => {
                self.pin_the_end(server, facts, at).await;
                Err(estimate.err().unwrap_or(text))
            }
            Err(error @ PinError::Refused { .. }) => {
                self.was_refused(&error);
                Err(error.to_string())
            }
            Err(PinError::Server(error)) => {
                tracing::debug!("the backlog cannot be pinned: {error}");
                estimate
            }
        }
    }

    /// Pins the server's newest byte for a replica that is behind what the server keeps. Clients may write faster than
    /// any position of a replica stays in the backlog, or longer values than it holds; but what is written from now on
    /// stays, and the replica gets there over its link.
    async fn pin_the_end(&mut self, server: &Server, facts: &Facts, at: Position) {
        let is_ahead = |(history, pin): &(ReplId, Pin)| *history == at.history && pin.lives();
        if facts.replid != Some(at.history) || self.open.iter().any(is_ahead) {
            return;
        }
        match Pin::open(server, facts, at.history, At::End).await {
            Ok(pin) => self.open.push((at.history, pin)),
            Err(error @ PinError::Refused { .. }) => self.was_refused(&error),
            Err(error) => tracing::debug!("the backlog's end cannot be pinned: {error}"),
        }
    }

    fn was_refused(&mut self, error: &PinError) {
        let count = self.refused.map_or(0, |(count, _)| count);
        let pause = (PAUSE * 2_u32.saturating_pow(count)).min(PAUSE_LIMIT);
        tracing::warn!(
            "{error}; more was written between question and request than the backlog holds; next try in {} s",
            pause.as_secs()
        );
        self.refused = Some((count + 1, Instant::now() + pause));
    }

    /// No replica is on its way any more.
    pub(crate) fn release(&mut self) {
        self.open.clear();
    }
}
