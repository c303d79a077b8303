//! Head: the beginning of a file of commands, always of the same length: each file is loaded by itself, from database 0
//! on.

use remora_redis::rdb::crc64;
use remora_redis::resp;

use super::mark::{Mark, NOTE_END};

/// Bytes at the beginning of each file of commands: which database, how far the stream is, and a note with a checksum
/// of both that fills the rest. Enough for both with their longest numbers, so that the database can be put in later.
pub(super) const HEAD_BYTES: usize = 128;

/// The head of a file that begins in this database, behind this offset of the stream.
pub(super) fn head(database: u64, offset: u64) -> Vec<u8> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    resp::command(&mut head, &["SELECT", &database.to_string()]);
    Mark::of_a_head(offset).write(&mut head);
    let sum = format!("# {:016x}", crc64(0, &head));
    head.extend_from_slice(sum.as_bytes());
    let fill = HEAD_BYTES.saturating_sub(head.len() + NOTE_END.len());
    head.extend(std::iter::repeat_n(b' ', fill));
    head.extend_from_slice(NOTE_END);
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_has_the_same_length_whatever_its_numbers() {
        for (database, offset) in [(0, 0), (i32::MAX as u64, remora_redis::MAX_OFFSET)] {
            assert_eq!(head(database, offset).len(), HEAD_BYTES);
        }
    }
}
