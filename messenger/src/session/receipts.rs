//! What was received of the peer's messages, and what the peer knows of that.

use std::time::{Duration, Instant};

use super::{Verdict, Violation};

/// The numbers of the messages received and acknowledged.
#[derive(Default)]
pub(super) struct Receipts {
    /// Number of the last message received.
    heard: u64,
    /// The last number that was acknowledged, and when the rest must be.
    told: u64,
    due: Option<Instant>,
}

impl Receipts {
    /// Number of the last message received.
    pub(super) fn heard(&self) -> u64 {
        self.heard
    }

    /// When the messages received must be acknowledged.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Takes only the next message. `lossy`: messages are not acknowledged.
    pub(super) fn receive(&mut self, number: u64, lossy: bool, now: Instant) -> Result<Verdict, Violation> {
        let wanted = self.heard + 1;
        if number < wanted {
            return Ok(Verdict::Known);
        }
        if number > wanted {
            return Err(Violation::Gap { found: number, wanted });
        }
        self.heard = wanted;
        if lossy {
            self.told = self.heard;
        } else if self.due.is_none() {
            self.due = Some(now + ACK_AFTER);
        }
        Ok(Verdict::Deliver)
    }

    /// Whether enough messages were received for an acknowledgement of their own.
    pub(super) fn are_many(&self) -> bool {
        self.heard - self.told >= ACK_AFTER_MESSAGES
    }

    /// The number to acknowledge: a frame that carries it is about to be written.
    pub(super) fn acknowledge(&mut self) -> u64 {
        self.told = self.heard;
        self.due = None;
        self.heard
    }

    /// The peer numbers its messages from 1 again.
    pub(super) fn restart(&mut self) {
        (self.heard, self.told) = (0, 0);
    }
}

/// Messages that may be received before they are acknowledged in a frame of their own: one small frame for this many.
const ACK_AFTER_MESSAGES: u64 = 64;

/// The longest delay of an acknowledgement. Short compared with what a sender can queue, and long enough that a reply
/// usually carries it.
const ACK_AFTER: Duration = Duration::from_millis(20);
