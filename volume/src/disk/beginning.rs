//! Beginning: judges what is behind the end of a journal if its process has ended, and its system runs on.
//!
//! The page cache then has all that the process has written. A write that its end has interrupted left a beginning of
//! a record: whole sectors, and zeros behind them. Anything else was a whole record, whose bytes have changed since.

use super::files::{Failure, Files, Name};
use super::record::{CHANGE_BYTES, HEAD_BYTES, Head, MAX_RECORD_BYTES, UNIT};
use crate::shape::BLOCK_BYTES;

/// Whether at this place is nothing, or what an interrupted write behind event `last` can have left.
pub(super) fn is_beginning(files: &impl Files, segment: u64, at: u64, last: u64) -> Result<bool, Failure> {
    let mut bytes = vec![0; MAX_RECORD_BYTES];
    match files.read(Name::Segment(segment), at, &mut bytes) {
        Ok(has) => bytes.truncate(has),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(Failure::of(files, Name::Segment(segment), &error)),
    }
    Ok(can_be_torn(&bytes, last))
}

fn can_be_torn(bytes: &[u8], last: u64) -> bool {
    let Some(end) = bytes.iter().rposition(|&byte| byte != 0) else { return true };
    // At least this many bytes were written.
    let written = (end + 1).next_multiple_of(UNIT);
    // The lengths are in the first sector.
    let Some((head_bytes, record_bytes)) = Head::lengths(bytes) else { return false };
    let Some(head) = Head::parse(bytes) else {
        // Fewer changes than it says, and zeros behind them: it is the number that has changed.
        let is_missing = |change: &[u8]| change.iter().all(|&byte| byte == 0);
        let has = bytes.get(HEAD_BYTES..written).unwrap_or_default();
        return written < head_bytes && !has.chunks_exact(CHANGE_BYTES).skip(1).any(is_missing);
    };
    let mut blocks = (head_bytes..).step_by(BLOCK_BYTES);
    let mut is_whole = bytes.len() >= record_bytes;
    for (_, entry) in head.changes.iter().filter(|(_, entry)| entry.has_bytes()) {
        let from = blocks.next().unwrap_or(record_bytes);
        let is_right = bytes.get(from..from + BLOCK_BYTES).is_some_and(|block| entry.is_of(block));
        if !is_right && from + BLOCK_BYTES <= written {
            return false;
        }
        is_whole &= is_right;
    }
    // A whole record is a part of the journal, or one before it has gone.
    !is_whole && head.previous == last
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_fabric::memory::crc::crc32c;
    use remora_lab::Random;

    use super::*;
    use crate::layout::Entry;
    use crate::message::Standing;
    use crate::version::Generation;

    /// A record behind event 4, of some blocks, and zeros behind it.
    fn record(blocks: usize, zeros: usize) -> (Vec<u8>, usize) {
        let version = Generation::NONE.next().unwrap().start();
        let mut random = Random::new(7);
        let content: Vec<Vec<u8>> = (0..blocks).map(|_| random.bytes(BLOCK_BYTES)).collect();
        let entries = content.iter().map(|bytes| Entry::of(version, crc32c(bytes)));
        let zeros = (0..zeros).map(|_| Entry::zeros(version));
        let changes: Vec<_> = (0..).zip(entries.chain(zeros)).collect();
        let standing = Standing { applied: version, ..Standing::default() };
        let head = Head { store: 1, segment: 2, sequence: 5, previous: 4, synced: 3, standing, changes };
        let mut bytes = head.encode();
        bytes.extend(content.concat());
        let length = bytes.len();
        bytes.resize(length + 16 * UNIT, 0);
        (bytes, length)
    }

    #[test]
    fn every_beginning_of_whole_sectors_can_be_torn_and_a_whole_record_cannot() {
        assert!(can_be_torn(&[], 4) && can_be_torn(&[0; 9000], 4));
        for (blocks, zeros) in [(0, 0), (1, 0), (3, 2), (0, 100), (2, 60)] {
            let (whole, length) = record(blocks, zeros);
            assert!(!can_be_torn(&whole, 4), "it was there, and is not a part of the journal");
            for written in (0..length).step_by(UNIT) {
                let mut torn = whole.clone();
                torn[written..].fill(0);
                assert!(can_be_torn(&torn, 4), "{written} of {length}");
                assert!(written < 1024 + zeros * 24 || !can_be_torn(&torn, 3), "it follows another event");
            }
        }
    }

    #[test]
    fn a_record_with_a_changed_byte_is_not_taken_for_a_beginning() {
        for (blocks, zeros) in [(0, 0), (1, 0), (3, 2), (0, 100)] {
            let (whole, length) = record(blocks, zeros);
            for at in (0..length).filter(|at| *at < 1024 || at % 61 == 0) {
                let mut changed = whole.clone();
                changed[at] ^= 0x10;
                assert!(!can_be_torn(&changed, 4), "byte {at} of {length}");
            }
        }
    }
}
