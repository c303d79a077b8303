//! Log: frames one after the other in an area, as the blocks to be written; and the same when they are read.

use super::layout::{Area, Geometry, Head};
use super::record::{FRAME_HEAD_BYTES, Found, Malformed, Place, Record, encode_frame, find_frame};
use crate::shape::BLOCK_BYTES;

/// Blocks to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlocksToWrite {
    /// The first one.
    pub first: u64,
    /// Whole blocks.
    pub data: Vec<u8>,
}

/// Where a frame begins if what is before it ends at `at`.
fn next_place(at: u64) -> u64 {
    let left = BLOCK_BYTES as u64 - at % BLOCK_BYTES as u64;
    if left < FRAME_HEAD_BYTES as u64 { at + left } else { at }
}

/// The writing end.
#[derive(Clone, Debug)]
pub(super) struct Log {
    first: u64,
    length: u64,
    lap: u64,
    /// The number of the next frame.
    number: u64,
    /// The offset of `bytes` in the area, at the beginning of a block.
    base: u64,
    /// What is not written, behind the part of the last block that is.
    bytes: Vec<u8>,
}

impl Log {
    /// At the beginning of an area.
    pub(super) fn new(geometry: Geometry, area: Area, lap: u64) -> Log {
        let (first, length) = (geometry.area_at(area), geometry.area_bytes());
        Log { first, length, lap, number: 0, base: 0, bytes: Vec::new() }
    }

    /// Behind what was read.
    pub(super) fn behind(geometry: Geometry, area: Area, read: &LogReader) -> Log {
        let block = read.at - read.at % BLOCK_BYTES as u64;
        let tail = (block - read.base) as usize..(read.at - read.base) as usize;
        let bytes = read.bytes.get(tail).unwrap_or_default().to_vec();
        Log { number: read.number, base: block, bytes, ..Log::new(geometry, area, read.lap) }
    }

    /// Where the last frame ends.
    pub(super) fn at(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    /// Bytes that it has room for, in one frame.
    pub(super) fn room(&self) -> u64 {
        self.length.saturating_sub(next_place(self.at()))
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The next frame has this number.
    pub(super) fn continue_at(&mut self, number: u64) {
        self.number = number;
    }

    /// Appends a frame. Returns its bytes, with what is skipped before it.
    pub(super) fn append(&mut self, records: &[Record]) -> u64 {
        let before = self.at();
        let at = next_place(before);
        self.bytes.resize((at - self.base) as usize, 0);
        encode_frame(Place { lap: self.lap, at }, self.number, records, &mut self.bytes);
        self.number += 1;
        self.at() - before
    }

    /// Bytes in whole blocks that are not written.
    pub(super) fn whole_bytes(&self) -> usize {
        self.bytes.len() / BLOCK_BYTES * BLOCK_BYTES
    }

    /// The blocks in which something is new: whole ones only, or all. The rest of the last block is zeros.
    pub(super) fn take(&mut self, whole_only: bool) -> BlocksToWrite {
        let whole = self.whole_bytes();
        let end = if whole_only { whole } else { self.bytes.len() };
        let mut data = self.bytes[..end].to_vec();
        data.resize(end.next_multiple_of(BLOCK_BYTES), 0);
        let first = self.first + self.base / BLOCK_BYTES as u64;
        self.bytes.drain(..whole);
        self.base += whole as u64;
        BlocksToWrite { first, data }
    }
}

/// The reading end.
#[derive(Clone, Debug)]
pub(super) struct LogReader {
    length: u64,
    lap: u64,
    image_bytes: u64,
    /// The number of the first frame behind the image.
    first: u64,
    number: u64,
    at: u64,
    /// The offset of `bytes` in the area, at the beginning of a block.
    base: u64,
    bytes: Vec<u8>,
}

/// What follows in an area.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// A frame of these records.
    Records(Vec<Record>),
    /// More bytes are needed.
    More,
    /// Nothing more was written.
    End,
}

impl LogReader {
    /// From the beginning of the area that a head names.
    pub(super) fn new(head: &Head) -> LogReader {
        let Head { geometry, lap, image_bytes, first, .. } = *head;
        let (number, at) = (if image_bytes == 0 { first } else { 0 }, 0);
        LogReader { length: geometry.area_bytes(), lap, image_bytes, first, number, at, base: 0, bytes: Vec::new() }
    }

    /// Behind the image.
    pub(super) fn behind_image(head: &Head) -> LogReader {
        let base = head.image_bytes - head.image_bytes % BLOCK_BYTES as u64;
        LogReader { number: head.first, at: head.image_bytes, base, ..LogReader::new(head) }
    }

    /// The number of the next frame of the log; `None` within the image.
    pub(super) fn number(&self) -> Option<u64> {
        (self.at >= self.image_bytes).then_some(self.number)
    }

    /// Where the last frame ends.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// The blocks of the area that are needed next: the first one, and how many there are up to the area's end.
    pub(super) fn wants(&self) -> (u64, u64) {
        let first = (self.base + self.bytes.len() as u64) / BLOCK_BYTES as u64;
        (first, self.length / BLOCK_BYTES as u64 - first)
    }

    /// These blocks of the area follow.
    pub(super) fn push(&mut self, blocks: &[u8]) {
        self.bytes.extend_from_slice(blocks);
    }

    /// Forgets what was pushed and not read as a frame: it may have been read while it was written.
    pub(super) fn look_again(&mut self) {
        self.base = self.at - self.at % BLOCK_BYTES as u64;
        self.bytes.clear();
    }

    /// The next frame.
    ///
    /// # Errors
    /// [`Malformed`]: what is there was not written like that. A reader that is not the writer may have read it in the
    /// middle of a write.
    pub(super) fn next(&mut self) -> Result<Next, Malformed> {
        let is_image = self.at < self.image_bytes;
        let at = next_place(self.at);
        if at >= self.length {
            return if is_image { Err(CUT) } else { Ok(Next::End) };
        }
        let bytes = self.bytes.get((at - self.base) as usize..).unwrap_or_default();
        let (number, found, length) = match find_frame(Place { lap: self.lap, at }, bytes) {
            Found::Short(length) if at + length as u64 <= self.length => return Ok(Next::More),
            Found::Frame { number, records, length } => (number, records, length),
            _ if is_image => return Err(CUT),
            Found::Nothing => return Ok(Next::End),
            // The block is of an earlier use of the area.
            _ if at.is_multiple_of(BLOCK_BYTES as u64) => return Ok(Next::End),
            _ => return Err(Malformed("what follows a frame of the log")),
        };
        if number != self.number {
            // A frame of this lap that is not the next one was not written behind this one.
            return Err(Malformed("the number of a frame"));
        }
        let (mut rest, mut records) = (found, Vec::new());
        while !rest.is_empty() {
            records.push(Record::decode(&mut rest)?);
        }
        self.at = at + length as u64;
        self.number += 1;
        if is_image && self.at >= self.image_bytes {
            self.number = self.first;
            if self.at > self.image_bytes {
                return Err(CUT);
            }
        }
        let done = self.at - self.at % BLOCK_BYTES as u64 - self.base;
        if done >= KEPT_BYTES {
            self.bytes.drain(..done as usize);
            self.base += done;
        }
        Ok(Next::Records(records))
    }
}

/// Bytes that were read are dropped in steps of so many.
const KEPT_BYTES: u64 = 256 << 10;

const CUT: Malformed = Malformed("the image: it ends too soon");
