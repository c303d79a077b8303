//! Pins: a server keeps the part of its stream that a replica needs next, until the replica is there.
//!
//! ```text
//!   Pins ── ask ──▶ rules (no I/O, no clock) ── open ──▶ link: a connection that is not read
//! ```
//!
//! - [`Pins`]: the answer to a replica that wants to go to its primary, and what makes the answer stay true until it is
//!   there. [`Kept`]: the same for a server that is away for a while.
//! - [`rules`] decides; `link` holds the connections.

mod link;
pub mod rules;

use std::time::{Duration, Instant};

use remora_redis::ReplId;

use self::link::Holder;
use self::rules::{At, Book, KEEP_LIMIT, Next, NoPin, Pin};
pub use self::rules::{PinSizes, Position};
use crate::{Facts, Server};

/// Pins of one server.
#[derive(Debug)]
pub struct Pins(Book<Holder>);

impl Default for Pins {
    fn default() -> Self {
        Pins(Book::new(PinSizes::SERVERS))
    }
}

impl Pins {
    /// Whether the server would continue a replica at this position, for long enough that it can go there. The error
    /// says why not.
    pub async fn secure(&mut self, server: &Server, facts: &Facts, at: Position) -> Result<(), String> {
        let mut next = self.0.ask(Instant::now(), facts, &at);
        loop {
            match next {
                Next::Answer(answer) => return answer,
                Next::Open(request) => {
                    let how = (KEEP_LIMIT, self.0.sizes());
                    let outcome = link::open(server, facts, at.history, request.at, how).await;
                    next = self.0.opened(Instant::now(), facts, &at, request, outcome);
                }
            }
        }
    }

    /// No replica is on its way any more.
    pub fn release(&mut self) {
        self.0.release();
    }
}

/// What a server keeps of its stream, from an offset on, for one that is away.
#[derive(Debug)]
pub struct Kept(#[allow(dead_code, reason = "ends the link")] Pin<Holder>);

impl Kept {
    /// Has the server keep what comes after this offset, for this time at most. The error says why it does not.
    pub async fn after(
        server: &Server,
        history: ReplId,
        offset: u64,
        time: Duration,
    ) -> Result<Kept, Box<dyn std::error::Error + Send + Sync>> {
        let facts = Facts::from_info(&server.connect().await?.info("").await?);
        let pin = link::open(server, &facts, history, At::Offset(offset), (time, &PinSizes::SERVERS)).await?;
        if !pin.is_firm() {
            return Err(NoPin::Impossible("its history has too few bytes before that offset").into());
        }
        Ok(Kept(pin))
    }
}
