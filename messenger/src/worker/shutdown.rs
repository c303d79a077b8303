//! How links end in good order: what is written is sent, then the peer closes first.

use std::io::{self, IoSliceMut};
use std::time::{Duration, Instant};

use super::link::LinkState;
use crate::error::LinkError;

impl LinkState {
    /// Sends the last bytes, then reads and drops what comes until the peer closes.
    ///
    /// A socket that is closed with unread bytes in it takes back what it has yet to deliver. So the peer closes first.
    pub(super) fn leave(&mut self, now: Instant) -> Result<(), LinkError> {
        if !self.flush(now)? {
            return Ok(());
        }
        let mut rest = [0; PIECE_BYTES];
        loop {
            match self.link.receive(&mut [IoSliceMut::new(&mut rest)]) {
                Ok(0) => return Err(LinkError::Ended),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(LinkError::Io(error)),
            }
        }
    }
}

/// How long the last bytes of a link may take to be sent.
pub(super) const LEAVING_LIMIT: Duration = Duration::from_secs(1);

/// How often links that are leaving are looked at while the worker stops.
pub(super) const LEAVING_PACE: Duration = Duration::from_millis(5);

/// One read of what a peer sends to an end that no longer reads it.
const PIECE_BYTES: usize = 4096;
