//! Parts: which blocks a range of a file is, and which of them a change must know before it changes a part of them.
//!
//! What is always true, and makes this short: every block of a file's clusters has been written, and the bytes behind
//! the end of a file are zeros. So a new cluster is written as zeros where its first write does not cover it, and a
//! file that is cut has zeros written up to the end of its last cluster.

use std::collections::HashMap;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire;

use crate::error::FilesError;
use crate::names::layout::{CLUSTER_BLOCKS, CLUSTER_BYTES, Geometry};
use crate::names::{self, Names, NamesError, SetAttributes};

#[cfg(test)]
use crate::mutant::Mutant;

pub(crate) const BLOCK: u64 = BLOCK_BYTES as u64;

/// A change of a file's contents.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// These bytes are at this offset. `is_cached`: a page cache has accepted them before.
    Write { ino: u64, offset: u64, data: Bytes, is_cached: bool },
    /// The file has this size, and the attributes are set.
    Resize { ino: u64, size: u64, set: SetAttributes },
    /// The file has these clusters, and at least this size.
    Allocate { ino: u64, clusters: Range<u64>, size: u64 },
    /// These bytes are zeros, and take no more space than they must.
    Punch { ino: u64, range: Range<u64> },
}

/// Neighbouring blocks of a file, which are neighbours in the volume too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The first one, in the file.
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// The first one, in the volume; `None`: a hole.
    pub(crate) at: Option<u64>,
}

/// The pieces of these blocks of a file with these runs.
pub(crate) fn pieces(geometry: Geometry, runs: &[names::Run], blocks: Range<u64>) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(2 * runs.len() + 1);
    let mut at = blocks.start;
    for run in runs {
        let clusters = run.clusters();
        let start = (clusters.start * CLUSTER_BLOCKS).max(blocks.start);
        let end = (clusters.end * CLUSTER_BLOCKS).min(blocks.end);
        if start >= end {
            continue;
        }
        if at < start {
            pieces.push(Piece { first: at, count: start - at, at: None });
        }
        let place = geometry.cluster_at(run.at) + (start - clusters.start * CLUSTER_BLOCKS);
        pieces.push(Piece { first: start, count: end - start, at: Some(place) });
        at = end;
    }
    if at < blocks.end {
        pieces.push(Piece { first: at, count: blocks.end - at, at: None });
    }
    pieces
}

/// The clusters of blocks.
pub(crate) fn clusters_of(blocks: &Range<u64>) -> Range<u64> {
    blocks.start / CLUSTER_BLOCKS..blocks.end.div_ceil(CLUSTER_BLOCKS)
}

/// The blocks of bytes.
pub(crate) fn blocks_of(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / BLOCK..bytes.end.div_ceil(BLOCK)
}

/// Where blocks of a file are.
pub(crate) fn find(names: &Names, ino: u64, blocks: Range<u64>) -> Result<Vec<Piece>, NamesError> {
    let (_, runs) = names.file(ino, clusters_of(&blocks))?;
    Ok(pieces(names.head().geometry, &runs, blocks))
}

impl Content {
    pub(crate) fn ino(&self) -> u64 {
        match self {
            Content::Write { ino, .. }
            | Content::Resize { ino, .. }
            | Content::Allocate { ino, .. }
            | Content::Punch { ino, .. } => *ino,
        }
    }

    /// The blocks of which it changes a part, and a part of what they hold stays: their numbers in the file, and where
    /// they are.
    pub(crate) fn needs(&self, names: &Names) -> Result<Vec<(u64, u64)>, NamesError> {
        let (size, _) = names.file(self.ino(), 0..0)?;
        // What stays of the bytes before `start`, and of those from `end`.
        let (start, end) = match self {
            Content::Write { offset, data, .. } => (*offset, offset + data.len() as u64),
            Content::Resize { size: new, .. } => (*new, u64::MAX),
            Content::Punch { range, .. } => (range.start, range.end),
            Content::Allocate { .. } => return Ok(Vec::new()),
        };
        let mut blocks = Vec::new();
        if !start.is_multiple_of(BLOCK) && start / BLOCK * BLOCK < size {
            blocks.push(start / BLOCK);
        }
        if !end.is_multiple_of(BLOCK) && end < size && !blocks.contains(&(end / BLOCK)) {
            blocks.push(end / BLOCK);
        }
        // Nothing is cut off if a file becomes longer.
        if matches!(self, Content::Resize { size: new, .. } if *new >= size) {
            blocks.clear();
        }
        let mut needs = Vec::new();
        for block in blocks {
            let found = find(names, self.ino(), block..block + 1)?;
            needs.extend(found.first().and_then(|piece| Some((block, piece.at?))));
        }
        Ok(needs)
    }
}

/// Blocks that are known, by their number in the file. Those that are not are zeros.
pub(crate) struct Known(pub(crate) Vec<(u64, Bytes)>);

impl Known {
    fn put(&self, block: u64, range: Range<usize>, into: &mut BytesMut) {
        match self.0.iter().find(|(number, _)| *number == block) {
            Some((_, data)) => into.extend_from_slice(&data[range]),
            None => into.extend_from_slice(&ZEROS[range]),
        }
    }

    /// Whole blocks of a file: these bytes, and what is known around them.
    pub(crate) fn around(&self, offset: u64, data: &Bytes) -> Bytes {
        let end = offset + data.len() as u64;
        // Less than a block.
        let (before, after) = ((offset % BLOCK) as usize, (end % BLOCK) as usize);
        if before == 0 && after == 0 {
            return data.clone();
        }
        let mut whole = BytesMut::with_capacity(data.len() + 2 * BLOCK_BYTES);
        self.put(offset / BLOCK, 0..before, &mut whole);
        whole.extend_from_slice(data);
        if after > 0 {
            self.put(end / BLOCK, after..BLOCK_BYTES, &mut whole);
        }
        whole.freeze()
    }

    /// A block of which these bytes are zeros.
    pub(crate) fn without(&self, block: u64, zeros: Range<usize>) -> Bytes {
        let mut whole = BytesMut::with_capacity(BLOCK_BYTES);
        self.put(block, 0..zeros.start, &mut whole);
        whole.extend_from_slice(&ZEROS[zeros.clone()]);
        self.put(block, zeros.end..BLOCK_BYTES, &mut whole);
        whole.freeze()
    }
}

static ZEROS: [u8; CLUSTER_BYTES as usize] = [0; CLUSTER_BYTES as usize];

/// Zeros, in pieces.
pub(crate) fn zeros(mut length: usize) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || {
        let part = length.min(ZEROS.len());
        length -= part;
        (part > 0).then(|| Bytes::from_static(&ZEROS[..part]))
    })
}

/// Blocks of clusters that are new, and that a write of these blocks does not cover.
pub(crate) fn uncovered(geometry: Geometry, new: &[names::Run], written: &Range<u64>) -> Vec<wire::Run> {
    let mut runs = Vec::new();
    for run in new {
        let blocks = run.clusters().start * CLUSTER_BLOCKS..run.clusters().end * CLUSTER_BLOCKS;
        let before = blocks.start..written.start.clamp(blocks.start, blocks.end);
        let after = written.end.clamp(blocks.start, blocks.end)..blocks.end;
        for part in [before, after] {
            if part.start < part.end {
                let first = geometry.cluster_at(run.at) + (part.start - blocks.start);
                runs.push(wire::Run { first, count: (part.end - part.start) as u32 }); // no more than a run has
            }
        }
    }
    runs
}

/// Blocks that become zeros where a range of bytes does, without the clusters that are freed for it, and without the
/// blocks of which only a part does: where they are.
pub(crate) fn cleared(names: &Names, ino: u64, bytes: &Range<u64>) -> Result<Vec<Piece>, NamesError> {
    let blocks = bytes.start.div_ceil(BLOCK)..bytes.end / BLOCK;
    if blocks.start >= blocks.end {
        return Ok(Vec::new());
    }
    let freed = blocks.start.div_ceil(CLUSTER_BLOCKS) * CLUSTER_BLOCKS..blocks.end / CLUSTER_BLOCKS * CLUSTER_BLOCKS;
    let parts = if freed.start < freed.end {
        [blocks.start..freed.start, freed.end..blocks.end]
    } else {
        [blocks.clone(), 0..0]
    };
    let mut cleared = Vec::new();
    for part in parts.into_iter().filter(|part| part.start < part.end) {
        cleared.extend(find(names, ino, part)?.into_iter().filter(|piece| piece.at.is_some()));
    }
    Ok(cleared)
}

/// Files of which a page cache has accepted bytes that the volume has refused.
///
/// The process that wrote them was answered before: it wrote to mapped memory. If what it writes next went on, the file
/// would have a hole among what it has written, and a later `fsync` would say that all is well. So nothing more of the
/// file is written or flushed until what was lost no longer matters: the file is cut before it, or no process has the
/// file open. One entry for each such file that is open.
#[derive(Default)]
pub(crate) struct Refused(HashMap<u64, Lost>);

/// What a file lacks.
struct Lost {
    /// The first byte of it.
    first: u64,
    /// Why it was refused.
    error: FilesError,
}

impl Refused {
    /// A page cache is told that it cannot keep what it has accepted of a file, from this byte on.
    pub(crate) fn note(&mut self, ino: u64, offset: u64, error: &FilesError) {
        let lost = self.0.entry(ino).or_insert_with(|| Lost { first: offset, error: error.clone() });
        lost.first = lost.first.min(offset);
    }

    /// The same, if this change is of such bytes.
    pub(crate) fn note_write(&mut self, content: &Content, error: &FilesError) {
        if let Content::Write { ino, offset, is_cached: true, .. } = content {
            self.note(*ino, *offset, error);
        }
    }

    /// Whether a file can be written and flushed.
    ///
    /// # Errors
    /// Why its bytes were refused.
    pub(crate) fn check(&self, ino: u64) -> Result<(), FilesError> {
        #[cfg(test)]
        if Mutant::RefusedOnce.is_active() {
            return Ok(());
        }
        self.0.get(&ino).map_or(Ok(()), |lost| Err(lost.error.clone()))
    }

    /// A file was cut to this size.
    pub(crate) fn cut(&mut self, ino: u64, size: u64) {
        if self.0.get(&ino).is_some_and(|lost| size <= lost.first) {
            self.0.remove(&ino);
        }
    }

    /// No process has the file open.
    pub(crate) fn forget(&mut self, ino: u64) {
        self.0.remove(&ino);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn pieces_are_runs_and_holes_in_their_order() {
        let geometry = Geometry::of(4096).unwrap();
        let runs = [names::Run { first: 1, at: 7, count: 2 }, names::Run { first: 5, at: 3, count: 1 }];
        let at = |cluster, block| Some(geometry.cluster_at(cluster) + block);
        let found = pieces(geometry, &runs, 20..90);
        let expected = [(20, 28, at(7, 4)), (48, 32, None), (80, 10, at(3, 0))];
        assert_eq!(found, expected.map(|(first, count, at)| Piece { first, count, at }));
        assert!(found.windows(2).all(|pair| pair[0].first + pair[0].count == pair[1].first));
        assert_eq!(pieces(geometry, &[], 3..5), [Piece { first: 3, count: 2, at: None }]);
    }

    #[test]
    fn what_a_write_does_not_cover_of_new_clusters_is_zeros() {
        let geometry = Geometry::of(4096).unwrap();
        let new = [names::Run { first: 0, at: 9, count: 2 }];
        let at = |block, count| wire::Run { first: geometry.cluster_at(9) + block, count };
        assert_eq!(uncovered(geometry, &new, &(3..5)), [at(0, 3), at(5, 27)]);
        assert_eq!(uncovered(geometry, &new, &(0..32)), []);
        assert_eq!(uncovered(geometry, &new, &(40..50)), [at(0, 32)]);
        assert_eq!(uncovered(geometry, &new, &(0..0)), [at(0, 32)]);
    }

    #[test]
    fn bytes_around_a_write_are_kept() {
        let known = Known(vec![(1, Bytes::from(vec![7; BLOCK_BYTES]))]);
        let whole = known.around(BLOCK + 10, &Bytes::from_static(b"abc"));
        assert_eq!((whole.len(), &whole[8..15]), (BLOCK_BYTES, &b"\x07\x07abc\x07\x07"[..]));
        let whole = known.around(BLOCK + 4090, &Bytes::from(vec![1; 10]));
        assert_eq!((whole.len(), &whole[4089..4102]), (2 * BLOCK_BYTES, &[7, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0][..]));
        let cut = known.without(1, 5..BLOCK_BYTES);
        assert_eq!((cut.len(), &cut[..6]), (BLOCK_BYTES, &[7, 7, 7, 7, 7, 0][..]));
    }
}
