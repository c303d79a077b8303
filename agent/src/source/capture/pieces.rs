//! Pieces: the bytes of a connection in the pieces in which a capture reads them, for tests and the simulation.
//!
//! A kernel delivers what was written in any pieces: parts of one write, or several writes at once. Here the caller
//! decides where each piece ends.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::psync_link::Received;

/// The end of a connection whose pieces the other end chooses. A clone is the same connection.
#[derive(Clone, Default)]
pub(crate) struct Pieces(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    pieces: VecDeque<Vec<u8>>,
    is_ended: bool,
}

impl Pieces {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers one more piece. No read returns bytes of two pieces.
    pub(crate) fn add(&self, piece: &[u8]) {
        if !piece.is_empty() {
            self.inner().pieces.push_back(piece.to_vec());
        }
    }

    /// Closes the connection behind the last piece.
    pub(crate) fn end(&self) {
        self.inner().is_ended = true;
    }

    /// Reads once: the next piece, or as much of it as there is room for.
    pub(super) fn read(&self, buffer: &mut [u8]) -> Received {
        let mut inner = self.inner();
        let Some(mut piece) = inner.pieces.pop_front() else {
            return if inner.is_ended { Received::End } else { Received::Idle };
        };
        let n = piece.len().min(buffer.len());
        let rest = piece.split_off(n);
        buffer[..n].copy_from_slice(&piece);
        if !rest.is_empty() {
            inner.pieces.push_front(rest);
        }
        Received::Bytes(n)
    }
}
