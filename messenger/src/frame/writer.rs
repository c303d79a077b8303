//! Frames on their way out, in as few pieces as possible.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::Bytes;

use super::{BODIES, COPIED_UP_TO_BYTES, HEAD_BYTES, MAX_ALIGNMENT_LOG2, Preamble, checksum};
use crate::seal::{Seal, Seals};

/// Frames to be sent: small parts are copied one after the other, large ones are referred to, so that many frames go in
/// one vectored send.
pub struct Writer {
    summed: bool,
    seals: Option<Seals>,
    pieces: VecDeque<Piece>,
    /// Small parts, which pieces refer to by position. Emptied when everything is sent.
    scratch: Vec<u8>,
    /// Bytes of the first piece that are sent.
    gone: usize,
    bytes: usize,
}

enum Piece {
    Scratch { start: usize, end: usize },
    Shared(Bytes),
}

impl Writer {
    /// A writer that adds checksums of bodies if `summed`, and ends each frame with a seal if there are `seals`.
    pub fn new(summed: bool, seals: Option<Seals>) -> Writer {
        Writer { summed, seals, pieces: VecDeque::new(), scratch: Vec::new(), gone: 0, bytes: 0 }
    }

    /// Appends a frame. Its bodies are held until they are sent. `alignment` is the wanted alignment of the data in
    /// bytes, a power of two.
    ///
    /// # Panics
    /// If the head is longer than [`HEAD_BYTES`] or a body longer than [`super::MAX_SEGMENT_BYTES`]: the makers of
    /// messages check that.
    pub fn frame(&mut self, tag: u8, head: &[u8], bodies: [Bytes; BODIES], alignment: usize) {
        assert!(head.len() <= HEAD_BYTES, "heads are fixed records of at most HEAD_BYTES");
        let length = |body: &Bytes| u32::try_from(body.len()).expect("messages are checked against MAX_SEGMENT_BYTES");
        let preamble = Preamble {
            tag,
            summed: self.summed,
            sealed: self.seals.is_some(),
            head: head.len() as u16,
            bodies: bodies.each_ref().map(length),
            alignment: (alignment.max(1).ilog2() as u8).min(MAX_ALIGNMENT_LOG2),
            head_sum: checksum(head),
        };
        let bytes = preamble.encode();
        let seal: Option<Seal> =
            self.seals.as_mut().map(|seals| seals.next(&bytes, head, bodies.each_ref().map(|body| -> &[u8] { body })));
        let sums = preamble.has_sums().then(|| bodies.each_ref().map(|body| checksum(body).to_le_bytes()));
        self.copy([&bytes, head]);
        bodies.into_iter().for_each(|body| self.body(body));
        if let Some(sums) = sums {
            self.copy([sums.as_flattened()]);
        }
        if let Some(seal) = seal {
            self.copy([&seal]);
        }
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Number of bytes to be sent.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Fills `slices` with the next bytes to send. Returns the number of slices used.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut count = 0;
        for (piece, slice) in self.pieces.iter().zip(slices) {
            let bytes = self.piece(piece);
            let from = if count == 0 { self.gone } else { 0 };
            *slice = IoSlice::new(&bytes[from..]);
            count += 1;
        }
        count
    }

    /// The bytes to send, if they are in one piece: small messages are, and need no vector.
    pub fn only_piece(&self) -> Option<&[u8]> {
        match self.pieces.len() {
            1 => self.piece(&self.pieces[0]).get(self.gone..),
            _ => None,
        }
    }

    /// Notes that `count` bytes are sent.
    pub fn sent(&mut self, mut count: usize) {
        self.bytes -= count.min(self.bytes);
        while let Some(piece) = self.pieces.front() {
            let rest = self.piece(piece).len() - self.gone;
            if count < rest {
                self.gone += count;
                return;
            }
            count -= rest;
            self.gone = 0;
            self.pieces.pop_front();
        }
        self.scratch.clear();
        self.scratch.shrink_to(SCRATCH_KEPT_BYTES);
    }

    fn piece<'a>(&'a self, piece: &'a Piece) -> &'a [u8] {
        match piece {
            Piece::Scratch { start, end } => &self.scratch[*start..*end],
            Piece::Shared(bytes) => bytes,
        }
    }

    fn body(&mut self, body: Bytes) {
        if body.len() <= COPIED_UP_TO_BYTES {
            return self.copy([&body]);
        }
        self.bytes += body.len();
        self.pieces.push_back(Piece::Shared(body));
    }

    fn copy<const N: usize>(&mut self, parts: [&[u8]; N]) {
        let start = self.scratch.len();
        parts.into_iter().for_each(|part| self.scratch.extend_from_slice(part));
        let now = self.scratch.len();
        self.bytes += now - start;
        match self.pieces.back_mut() {
            Some(Piece::Scratch { end, .. }) => *end = now,
            _ if now == start => {}
            _ => self.pieces.push_back(Piece::Scratch { start, end: now }),
        }
    }
}

/// A connection keeps at most this much scratch memory: the heads of a hundred messages. Opening a session needs a few
/// hundred bytes.
const SCRATCH_KEPT_BYTES: usize = 16 * 1024;
