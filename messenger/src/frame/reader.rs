//! Finds frames in bytes that arrive in pieces. The [parent module](super) says when the reader stops.

use remora_memory::crc;

use super::{
    BODIES, DIRECT_FROM_BYTES, HEAD_BYTES, Limits, Malformed, NO_BODIES, PARTS, PREAMBLE_BYTES, Preamble, SEAL_BYTES,
    SUMS_BYTES, Seals, checksum,
};
use crate::buffer::Buffer;

/// The memory does not fit the bodies of the frame that is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the buffers do not have the lengths of the frame's bodies")]
pub struct Unfit;

/// What the reader has found.
#[derive(Debug)]
pub enum Step {
    /// A head with a valid checksum; see [`Reader::head`]. Call [`Reader::land`] before feeding more, also if all
    /// bodies are empty.
    Head(Preamble),
    /// The frame is complete and its checksums are valid. [`Reader::bodies`] returns its bodies.
    Whole,
    /// More bytes are needed.
    Incomplete,
}

/// Finds frames in bytes that arrive in pieces. The [module](super) says when it stops.
pub struct Reader {
    limits: Limits,
    seals: Option<Seals>,
    stage: Stage,
    /// Bytes of a fixed-size part that has not arrived completely.
    cut: [u8; HEAD_BYTES],
    have: usize,
    preamble: [u8; PREAMBLE_BYTES],
    head: [u8; HEAD_BYTES],
    head_length: usize,
    arriving: Arriving,
}

/// The next part. Arriving bodies are kept outside of it: they are too large to be moved from stage to stage.
#[derive(Clone, Copy)]
enum Stage {
    Preamble,
    Head(Preamble),
    /// The head was returned, and the caller has yet to give memory.
    Asked(Preamble),
    Bodies,
    Trailer,
    /// Malformed: no further frame can be found.
    Over(Malformed),
}

/// Bodies that are being received.
struct Arriving {
    /// Which trailers follow the bodies.
    summed: bool,
    sealed: bool,
    bodies: [Buffer; BODIES],
    /// The body that is being filled, and how far.
    at: usize,
    filled: usize,
    sums: [u32; BODIES],
    /// The running checksum of the body that is being filled, if it came in more than one piece.
    running: Option<u32>,
}

impl Reader {
    /// A reader that accepts nothing beyond the limits, and with `seals` only frames with a valid seal.
    pub fn new(limits: Limits, seals: Option<Seals>) -> Reader {
        Reader {
            limits,
            seals,
            stage: Stage::Preamble,
            cut: [0; HEAD_BYTES],
            have: 0,
            preamble: [0; PREAMBLE_BYTES],
            head: [0; HEAD_BYTES],
            head_length: 0,
            arriving: Arriving::NOTHING,
        }
    }

    /// Sets the limits from the next preamble on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Whether no frame has begun.
    pub fn is_between_frames(&self) -> bool {
        matches!(self.stage, Stage::Preamble) && self.have == 0
    }

    /// The head of the frame that is being read.
    pub fn head(&self) -> &[u8] {
        &self.head[..self.head_length]
    }

    /// Takes the bodies of the complete frame.
    pub fn bodies(&mut self) -> [Buffer; BODIES] {
        std::mem::replace(&mut self.arriving.bodies, NO_BODIES)
    }

    /// Reads from the front of `input` up to the next step.
    ///
    /// # Errors
    /// [`Malformed`], and the same error for every later call: close the connection.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Step, Malformed> {
        let outcome = self.advance(input);
        if let Err(malformed) = outcome {
            self.stage = Stage::Over(malformed);
        }
        outcome
    }

    /// Gives memory for the bodies of the frame whose head was returned. Each buffer has the length that the preamble
    /// says.
    ///
    /// # Errors
    /// [`Unfit`]: the lengths are others, or no head was returned. Other memory may be tried.
    pub fn land(&mut self, bodies: [Buffer; BODIES]) -> Result<(), Unfit> {
        let Stage::Asked(preamble) = self.stage else { return Err(Unfit) };
        if !bodies.iter().zip(preamble.bodies).all(|(buffer, length)| buffer.len() == length as usize) {
            return Err(Unfit);
        }
        self.arriving.begin(&preamble, bodies);
        self.stage = Stage::Bodies;
        Ok(())
    }

    /// The memory that the next bytes belong to, if it pays to receive straight into it, without a copy.
    pub fn landing(&mut self) -> Option<&mut [u8]> {
        let Stage::Bodies = self.stage else { return None };
        let arriving = &mut self.arriving;
        arriving.skip_full();
        let rest = arriving.bodies.get_mut(arriving.at)?.get_mut(arriving.filled..)?;
        Some(rest).filter(|rest| rest.len() >= DIRECT_FROM_BYTES)
    }

    /// Notes that `count` bytes were received into [`Reader::landing`].
    pub fn landed(&mut self, count: usize) {
        if let Stage::Bodies = self.stage {
            self.arriving.fill(count);
        }
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Step, Malformed> {
        loop {
            match self.stage {
                Stage::Preamble => {
                    let Some(bytes) = gather::<PREAMBLE_BYTES>(&mut self.cut, &mut self.have, input) else {
                        return Ok(Step::Incomplete);
                    };
                    let preamble = Preamble::decode(&bytes, &self.limits)?;
                    self.preamble = bytes;
                    self.stage = Stage::Head(preamble);
                }
                Stage::Head(preamble) => {
                    let length = usize::from(preamble.head);
                    if !gather_some(&mut self.head[..length], &mut self.have, input) {
                        return Ok(Step::Incomplete);
                    }
                    self.head_length = length;
                    if checksum(self.head()) != preamble.head_sum {
                        return Err(Malformed::Checksum { part: "head" });
                    }
                    self.stage = Stage::Asked(preamble);
                    return Ok(Step::Head(preamble));
                }
                Stage::Asked(_) => return Ok(Step::Incomplete),
                Stage::Bodies => {
                    if !self.arriving.take(input) {
                        return Ok(Step::Incomplete);
                    }
                    self.stage = Stage::Trailer;
                }
                Stage::Trailer => return self.finish(input),
                Stage::Over(malformed) => return Err(malformed),
            }
        }
    }

    fn finish(&mut self, input: &mut &[u8]) -> Result<Step, Malformed> {
        let Arriving { summed, sealed, sums, .. } = self.arriving;
        let sums_bytes = if summed { SUMS_BYTES } else { 0 };
        let length = sums_bytes + if sealed { SEAL_BYTES } else { 0 };
        if !gather_some(&mut self.cut[..length], &mut self.have, input) {
            return Ok(Step::Incomplete);
        }
        let (said, seal) = self.cut[..length].split_at(sums_bytes);
        for ((said, sum), part) in said.chunks_exact(4).zip(sums).zip(PARTS) {
            if said != sum.to_le_bytes() {
                return Err(Malformed::Checksum { part });
            }
        }
        let bodies = &self.arriving.bodies;
        if let Some(seals) = &mut self.seals {
            let head = &self.head[..self.head_length];
            seals.check(seal, &self.preamble, head, bodies.each_ref().map(|body| -> &[u8] { body }))?;
        } else if sealed {
            return Err(Malformed::Reserved);
        }
        self.stage = Stage::Preamble;
        Ok(Step::Whole)
    }
}

impl Arriving {
    const NOTHING: Arriving = Arriving {
        summed: false,
        sealed: false,
        bodies: NO_BODIES,
        at: 0,
        filled: 0,
        sums: [0; BODIES],
        running: None,
    };

    /// Begins with the bodies of another frame. In place: a running checksum has half a kilobyte.
    fn begin(&mut self, preamble: &Preamble, bodies: [Buffer; BODIES]) {
        (self.summed, self.sealed, self.bodies) = (preamble.has_sums(), preamble.sealed, bodies);
        (self.at, self.filled, self.sums) = (0, 0, [0; BODIES]);
        self.running = None;
    }

    /// Moves bytes from the input into the bodies. Returns whether all are full.
    fn take(&mut self, input: &mut &[u8]) -> bool {
        loop {
            self.skip_full();
            let Some(rest) = self.bodies.get_mut(self.at).and_then(|body| body.get_mut(self.filled..)) else {
                return true;
            };
            let count = rest.len().min(input.len());
            if count == 0 {
                return false;
            }
            let (piece, left) = input.split_at(count);
            rest[..count].copy_from_slice(piece);
            *input = left;
            self.fill(count);
        }
    }

    /// Notes `count` more bytes of the current body: updates the checksum, and goes on to the next body when this one
    /// is full.
    fn fill(&mut self, count: usize) {
        let Some(body) = self.bodies.get(self.at) else { return };
        let end = (self.filled + count).min(body.len());
        let piece = &body[self.filled..end];
        let is_last = end == body.len();
        if self.summed {
            match (&mut self.running, is_last) {
                (None, true) => self.sums[self.at] = checksum(piece),
                (Some(running), last) => {
                    *running = crc::crc32c_append(*running, piece);
                    if last {
                        self.sums[self.at] = *running;
                    }
                }
                (None, false) => self.running = Some(checksum(piece)),
            }
        }
        self.filled = end;
        self.skip_full();
    }

    fn skip_full(&mut self) {
        while self.bodies.get(self.at).is_some_and(|body| body.len() == self.filled) {
            self.at += 1;
            self.filled = 0;
            self.running = None;
        }
    }
}

/// Returns `N` bytes of the input, pieced together if necessary; `None` while some are missing.
fn gather<const N: usize>(cut: &mut [u8; HEAD_BYTES], have: &mut usize, input: &mut &[u8]) -> Option<[u8; N]> {
    if *have == 0
        && let Some((bytes, rest)) = input.split_first_chunk::<N>()
    {
        *input = rest;
        return Some(*bytes);
    }
    gather_some(&mut cut[..N], have, input).then(|| std::array::from_fn(|at| cut[at]))
}

/// Fills `into` from the input, after the `have` bytes of the last call. Returns whether it is full, which resets
/// `have`.
fn gather_some(into: &mut [u8], have: &mut usize, input: &mut &[u8]) -> bool {
    let count = (into.len() - *have).min(input.len());
    let (piece, rest) = input.split_at(count);
    into[*have..*have + count].copy_from_slice(piece);
    *input = rest;
    *have += count;
    let full = *have == into.len();
    if full {
        *have = 0;
    }
    full
}

// A trailer is pieced together in the same memory as an incomplete preamble.
const _: () = assert!(SUMS_BYTES + SEAL_BYTES <= HEAD_BYTES && PREAMBLE_BYTES <= HEAD_BYTES);
