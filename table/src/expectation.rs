//! What a reader expects of a table, and whether the table agrees; and a reader's outstanding reads: what each is for,
//! which may be posted, which have completed.
//!
//! Both readers use this. Not here: which reads to queue, and what to do with the results.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fabric::{Completion, Peer, ReadError, ReadRequest};

use crate::error::Error;
use crate::identity::Origin;
use crate::layout::{Geometry, HEAD_BYTES, Head, Identity, Kind};
use crate::seal::{Seal, SealKey};

/// The content of the source's offer. A reader trusts nothing in the memory before it has found the same there.
#[derive(Debug, Clone)]
pub struct Expectation {
    /// Where the table offered begins.
    pub origin: Origin,
    /// The shape offered: all addresses are computed from it.
    pub geometry: Geometry,
    /// How the table is opened; `None`: it is plain.
    pub seal: Option<Arc<Seal>>,
    /// Whether slots of the snapshot may be compressed.
    pub compressed: bool,
}

impl Expectation {
    /// A plain table.
    pub fn plain(origin: Origin, geometry: Geometry) -> Expectation {
        Expectation { origin, geometry, seal: None, compressed: false }
    }

    /// A table of this kind that is sealed with this key.
    ///
    /// # Errors
    /// As for [`Seal::new`].
    pub fn sealed(kind: Kind, origin: Origin, geometry: Geometry, key: &SealKey) -> Result<Expectation, Error> {
        let seal = Arc::new(Seal::new(key, &Identity { kind, origin })?);
        Ok(Expectation { origin, geometry, seal: Some(seal), compressed: false })
    }

    /// The same table, with slots that may be compressed.
    pub fn with_compressed_slots(self, compressed: bool) -> Expectation {
        Expectation { compressed, ..self }
    }

    /// Whether slots must be opened before they are used, so that they cannot be used where they are.
    pub fn needs_opening(&self) -> bool {
        self.seal.is_some() || self.compressed
    }

    pub(crate) fn seal(&self) -> Option<&Seal> {
        self.seal.as_deref()
    }

    /// Whether these first bytes of a memory are those of the expected table.
    pub(crate) fn check(&self, bytes: &[u8; HEAD_BYTES], kind: Kind) -> Result<(), Error> {
        let found = Head::parse(bytes)?;
        let algorithm = self.seal().map(Seal::algorithm);
        let identity = Identity { kind, origin: self.origin };
        let want = Head { identity, geometry: self.geometry, algorithm, compressed: self.compressed };
        if found == want {
            return Ok(());
        }
        Err(Error::WrongGeneration { want: describe(&want), got: describe(&found) })
    }
}

fn describe(head: &Head) -> String {
    let Identity { kind, origin } = &head.identity;
    let Geometry { slot_size, slots } = head.geometry;
    let sealed = head.algorithm.map_or(String::new(), |algorithm| format!(", sealed by {algorithm:?}"));
    let compressed = if head.compressed { ", compressed" } else { "" };
    format!("{kind:?} {origin} ({slots} slots of {slot_size} bytes{sealed}{compressed})")
}

/// Bytes of the largest single read. Large enough that a read's fixed cost (some 20 µs of wake-ups on TCP) is small
/// beside its copy (some 150 µs). Small enough that a slot arrives in several pieces, whose CRC is computed while the
/// others are on their way and the piece is still in the second-level cache; and that 16 outstanding reads are 16 MiB
/// and not 64.
pub(crate) const READ_BYTES: u32 = 1 << 20;

/// How many times in a row a group of words may be caught in the middle of a change before the table is considered
/// broken. A change takes some 20 ns, but the writer may lose its processor in the middle of one, for as long as the
/// system likes. At 20 µs a round trip this is about 20 s.
const MAX_CAUGHT_IN_CHANGE: u32 = 1 << 20;

/// The purpose of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The constant part of the superblock.
    Head,
    /// The progress line.
    Line,
    /// The entry of a slot, to find an offset.
    Probe,
    /// Piece `piece` of the slot that lands in `buffer`.
    Piece { buffer: u8, piece: u8 },
    /// The entry of the slot in `buffer`, after all its pieces.
    Entry { buffer: u8 },
}

/// The outstanding reads of one reader at one peer.
#[derive(Default)]
pub(crate) struct Reads {
    waiting: VecDeque<ReadRequest>,
    completions: Vec<Completion>,
    /// Counts peers: completions of a former peer are ignored.
    epoch: u32,
}

impl Reads {
    /// Forgets everything outstanding: the peer is gone.
    pub(crate) fn reset(&mut self) {
        self.waiting.clear();
        self.completions.clear();
        self.epoch = self.epoch.wrapping_add(1);
    }

    /// Queues one read.
    pub(crate) fn queue(&mut self, purpose: Purpose, offset: u64, length: u32, sink_offset: u64) {
        let tag = purpose.to_tag(self.epoch);
        self.waiting.push_back(ReadRequest { tag, offset, length, sink_offset });
    }

    /// Queues the reads of a range of at most `MAX_SLOT_BYTES`, cut at multiples of [`READ_BYTES`] from its start.
    /// Returns the number of reads.
    pub(crate) fn queue_pieces(&mut self, buffer: u8, offset: u64, length: u32, sink_offset: u64) -> u8 {
        let mut pieces = 0;
        let mut done = 0;
        while done < length {
            let bytes = (length - done).min(READ_BYTES);
            let purpose = Purpose::Piece { buffer, piece: pieces };
            self.queue(purpose, offset + u64::from(done), bytes, sink_offset + u64::from(done));
            done += bytes;
            pieces += 1;
        }
        pieces
    }

    /// Posts as many of the queued reads as the peer accepts.
    pub(crate) fn post(&mut self, peer: &mut dyn Peer) -> Result<(), Error> {
        while !self.waiting.is_empty() {
            let accepted = peer.post_read(self.waiting.make_contiguous()).map_err(from_peer)?;
            if accepted == 0 {
                break;
            }
            self.waiting.drain(..accepted.min(self.waiting.len()));
        }
        Ok(())
    }

    /// As [`post`](Self::post), but posts pieces of slots only while `allowance` is above 0, and subtracts their bytes;
    /// the last piece may exceed what was left. Small reads (lines, entries) are not counted.
    pub(crate) fn post_within(&mut self, peer: &mut dyn Peer, allowance: &mut i64) -> Result<(), Error> {
        while let Some(request) = self.waiting.front() {
            let is_piece = matches!(Purpose::from_tag(request.tag, self.epoch), Some(Purpose::Piece { .. }));
            if is_piece && *allowance <= 0 {
                break;
            }
            let cost = if is_piece { i64::from(request.length) } else { 0 };
            if peer.post_read(std::slice::from_ref(request)).map_err(from_peer)? == 0 {
                break;
            }
            *allowance = allowance.saturating_sub(cost);
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Whether no read waits to be posted.
    pub(crate) fn is_posted(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The reads that have completed since the last call, in order of arrival.
    pub(crate) fn collect(&mut self, peer: &mut dyn Peer) -> Result<Vec<Purpose>, Error> {
        peer.poll(&mut self.completions).map_err(from_peer)?;
        let mut arrived = Vec::with_capacity(self.completions.len());
        for completion in self.completions.drain(..) {
            let Some(purpose) = Purpose::from_tag(completion.tag, self.epoch) else {
                continue;
            };
            completion.result.map_err(from_read)?;
            arrived.push(purpose);
        }
        Ok(arrived)
    }
}

/// The same for a sealed table, where wrong words are more likely a forgery: some seconds at 20 µs a round trip.
const MAX_CAUGHT_SEALED: u32 = 1 << 16;

/// Round trips of a slower transport that are enough, after [`FORGED_AFTER`]: a writer that runs is in the middle of a
/// change for a millionth of the time.
const LEAST_CAUGHT_SEALED: u32 = 1 << 7;

/// A writer that has lost its processor in the middle of a change gets it back sooner, unless it was stopped.
const FORGED_AFTER: Duration = Duration::from_secs(10);

/// How often in a row a group of words was caught in the middle of a change.
#[derive(Debug, Default)]
pub(crate) struct Caught {
    times: u32,
    since: Option<Instant>,
}

impl Caught {
    /// Counts one more; too many in a row can't be a coincidence. `what` the words are: "the progress line".
    pub(crate) fn again(&mut self, seal: Option<&Seal>, what: impl Fn() -> String) -> Result<(), Error> {
        self.times += 1;
        if seal.is_none() {
            if self.times < MAX_CAUGHT_IN_CHANGE {
                return Ok(());
            }
            let text = "the table's words never match their checksum: its memory or the transport is damaged";
            return Err(Error::Layout(text.into()));
        }
        // The clock is asked now and then only: most changes are over at the next look.
        let is_long = self.times.is_multiple_of(LEAST_CAUGHT_SEALED)
            && self.since.get_or_insert_with(Instant::now).elapsed() >= FORGED_AFTER;
        if is_long || self.times >= MAX_CAUGHT_SEALED { Err(Error::Forged { what: what() }) } else { Ok(()) }
    }

    /// The words were whole.
    pub(crate) fn over(&mut self) {
        *self = Caught::default();
    }
}

/// What a progress line is called in errors.
pub(crate) fn the_line() -> String {
    "the progress line".into()
}

/// What an entry is called in errors.
pub(crate) fn the_entry(number: u64) -> String {
    format!("the entry of slot {number}")
}

/// The retirement of a peer is the same failure as the read that retired it.
pub(crate) fn from_peer(error: remora_fabric::Error) -> Error {
    match error {
        remora_fabric::Error::Retired(why) => Error::Peer(why),
        other => Error::Fabric(other),
    }
}

/// All addresses come from the geometry in the offer, so a denied range is an error in the offer.
fn from_read(error: ReadError) -> Error {
    if error.is_survivable() {
        return Error::Layout("the source's region is smaller than the table it offered".into());
    }
    Error::Peer(error)
}

impl Purpose {
    /// epoch (32 bits) | kind (8) | buffer (8) | piece (8) | 0 (8)
    fn to_tag(self, epoch: u32) -> u64 {
        let [kind, buffer, piece] = match self {
            Purpose::Head => [1, 0, 0],
            Purpose::Line => [2, 0, 0],
            Purpose::Probe => [3, 0, 0],
            Purpose::Piece { buffer, piece } => [4, buffer, piece],
            Purpose::Entry { buffer } => [5, buffer, 0],
        };
        u64::from(epoch) << 32 | u64::from(u32::from_be_bytes([kind, buffer, piece, 0]))
    }

    fn from_tag(tag: u64, epoch: u32) -> Option<Purpose> {
        if (tag >> 32) as u32 != epoch {
            return None;
        }
        let [kind, buffer, piece, _] = (tag as u32).to_be_bytes();
        match kind {
            1 => Some(Purpose::Head),
            2 => Some(Purpose::Line),
            3 => Some(Purpose::Probe),
            4 => Some(Purpose::Piece { buffer, piece }),
            5 => Some(Purpose::Entry { buffer }),
            _ => None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{Algorithm, Identity, Origin, SealKey, layout::Kind};

    #[test]
    fn a_tag_says_what_it_was_for_and_on_which_peer() {
        let all = [
            Purpose::Head,
            Purpose::Line,
            Purpose::Probe,
            Purpose::Piece { buffer: 62, piece: 63 },
            Purpose::Entry { buffer: 7 },
        ];
        for purpose in all {
            let tag = purpose.to_tag(9);
            assert_eq!(Purpose::from_tag(tag, 9), Some(purpose));
            assert_eq!(Purpose::from_tag(tag, 10), None);
        }
    }

    #[test]
    fn a_range_is_cut_into_reads_that_cover_it_once() {
        let mut reads = Reads::default();
        let pieces = reads.queue_pieces(3, 1000, 2 * READ_BYTES + 5, 50);
        assert_eq!(pieces, 3);
        let reads: Vec<_> = reads.waiting.iter().map(|r| (r.offset, r.length, r.sink_offset)).collect();
        let step = u64::from(READ_BYTES);
        assert_eq!(
            reads,
            [(1000, READ_BYTES, 50), (1000 + step, READ_BYTES, 50 + step), (1000 + 2 * step, 5, 50 + 2 * step)]
        );
    }

    fn seal() -> Seal {
        let origin = Origin { generation: 1, history: [b'a'; 40].try_into().unwrap(), offset: 0 };
        let key = SealKey::new(Algorithm::Aes256Gcm, [7; SealKey::SECRET_BYTES]);
        Seal::new(&key, &Identity { kind: Kind::Snapshot, origin }).unwrap()
    }

    /// How many times words are caught until that is an error, which is `Forged` with a seal.
    fn until_error(mut caught: Caught, seal: Option<&Seal>) -> u32 {
        let error = loop {
            if let Err(error) = caught.again(seal, the_line) {
                break error;
            }
        };
        assert_eq!(matches!(error, Error::Forged { .. }), seal.is_some(), "{error}");
        caught.times
    }

    #[test]
    fn a_change_without_an_end_is_found_by_its_count_or_on_a_slow_transport_by_its_time() {
        let seal = seal();
        assert_eq!(until_error(Caught::default(), Some(&seal)), MAX_CAUGHT_SEALED);
        assert_eq!(until_error(Caught::default(), None), MAX_CAUGHT_IN_CHANGE);
        let long = Instant::now().checked_sub(FORGED_AFTER).unwrap();
        assert_eq!(until_error(Caught { times: 0, since: Some(long) }, Some(&seal)), LEAST_CAUGHT_SEALED);
        // A reader without a key has no forgery to fear, and waits for the writer.
        assert_eq!(until_error(Caught { times: 0, since: Some(long) }, None), MAX_CAUGHT_IN_CHANGE);
    }

    #[test]
    fn whole_words_end_the_count() {
        let seal = seal();
        let mut caught = Caught { times: MAX_CAUGHT_SEALED - 1, since: None };
        caught.over();
        assert!(caught.again(Some(&seal), the_line).is_ok());
    }
}
