//! What has arrived on a link and was not received by its owner, in the order of the stream.

use std::collections::VecDeque;
use std::io;

use super::device::Chunk;
use super::message::Rendezvous;

/// The pieces of the stream that the owner has not received.
#[derive(Default)]
pub(super) struct Arrivals {
    pieces: VecDeque<Piece>,
    /// READs under way.
    reads: u32,
}

/// A piece of the stream.
enum Piece {
    /// Bytes `at..end` of a message.
    Message { chunk: Chunk, at: u32, end: u32 },
    /// The peer has announced the bytes; the READ is not posted.
    Rendezvous(Rendezvous),
    /// The READ is under way.
    Reading { length: u32 },
    /// Bytes `at..end` of what was read.
    Read { chunk: Chunk, at: u32, end: u32 },
}

/// The place of an announced piece.
pub(super) struct Place(usize);

impl Arrivals {
    /// Bytes `at..end` of a message have arrived.
    pub(super) fn push_message(&mut self, chunk: Chunk, at: u32, end: u32) {
        self.pieces.push_back(Piece::Message { chunk, at, end });
    }

    /// The peer has announced a piece.
    pub(super) fn announce(&mut self, rendezvous: Rendezvous) {
        self.pieces.push_back(Piece::Rendezvous(rendezvous));
    }

    /// The next announced piece; `None` if there is none, or if the link has reached its limits of READs and of memory.
    pub(super) fn next_announced(&self) -> Option<(Place, Rendezvous)> {
        if self.reads >= MAX_READS {
            return None;
        }
        let announced = |(at, piece): (usize, &Piece)| match piece {
            Piece::Rendezvous(rendezvous) => Some((Place(at), *rendezvous)),
            _ => None,
        };
        let found = self.pieces.iter().enumerate().find_map(announced)?;
        let held = |piece: &&Piece| matches!(piece, Piece::Reading { .. } | Piece::Read { .. });
        (self.pieces.iter().filter(held).count() < MAX_READ_PIECES).then_some(found)
    }

    /// The READ of the piece at that place was posted.
    pub(super) fn begin_read(&mut self, Place(at): Place) {
        if let Some(piece) = self.pieces.get_mut(at)
            && let Piece::Rendezvous(rendezvous) = *piece
        {
            *piece = Piece::Reading { length: rendezvous.length };
            self.reads += 1;
        }
    }

    /// The oldest READ is complete. Returns whether one was under way.
    pub(super) fn finish_read(&mut self, chunk: Chunk) -> bool {
        let mut reading = self.pieces.iter_mut().filter(|piece| matches!(piece, Piece::Reading { .. }));
        let Some(piece) = reading.next() else { return false };
        if let Piece::Reading { length } = *piece {
            *piece = Piece::Read { chunk, at: 0, end: length };
            self.reads -= 1;
        }
        true
    }

    /// Copies bytes out of the first piece. Returns how many, and the memory of a message that is received whole.
    pub(super) fn copy(&mut self, into: &mut [u8]) -> io::Result<(usize, Option<Chunk>)> {
        let (chunk, at, end) = match self.pieces.front_mut() {
            Some(Piece::Message { chunk, at, end } | Piece::Read { chunk, at, end }) => (chunk, at, end),
            _ => return Ok((0, None)),
        };
        let count = into.len().min((*end - *at) as usize);
        chunk.region().memory().read(chunk.offset() + u64::from(*at), &mut into[..count])?;
        *at += count as u32;
        if *at == *end
            && let Some(Piece::Message { chunk, .. }) = self.pieces.pop_front()
        {
            return Ok((count, Some(chunk)));
        }
        Ok((count, None))
    }

    /// Whether there are bytes to receive.
    pub(super) fn are_here(&self) -> bool {
        matches!(self.pieces.front(), Some(Piece::Message { .. } | Piece::Read { .. }))
    }

    /// Number of messages whose memory is held.
    pub(super) fn messages(&self) -> u32 {
        self.pieces.iter().filter(|piece| matches!(piece, Piece::Message { .. })).count() as u32
    }

    /// Gives all memory back.
    pub(super) fn clear(&mut self) {
        self.pieces.clear();
    }
}

/// READs under way per link: enough that one is under way while another is copied out.
const MAX_READS: u32 = 4;

/// Pieces per link that are read or being read, and not yet received by the owner: 2 MiB. An owner that receives
/// nothing must not take the memory that other links read into.
const MAX_READ_PIECES: usize = 8;
