//! Mark: a note in a file of commands that says how far the stream is there, and has a checksum of what stands before.
//!
//! ```text
//!   head (128 bytes)   commands …   #REMORA:307366:8c1c6b2f307366aa   #TS:…   commands …   #REMORA:…
//!   has no checksum    ╰────────── the checksum is of all from the end of the head to here, and of the offset ───╯
//! ```
//!
//! Servers and their tools skip notes that they do not know. A backup that is started again goes on at the last mark.

use remora_redis::rdb::crc64;

/// The end of a note.
pub(super) const NOTE_END: &[u8] = b"\r\n";

/// How far the stream is: everything up to this offset is in front of the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) offset: u64,
    /// Checksum of all that stands before, behind the head, and of the mark's own offset. `None` in a head, and in
    /// files of older programs.
    pub(super) sum: Option<u64>,
}

/// What a mark begins with.
pub(super) const BEGIN: &str = "#REMORA:";

/// Digits of a checksum.
const SUM_DIGITS: usize = 16;

impl Mark {
    /// A mark without a checksum, as heads have it.
    pub(super) fn of_a_head(offset: u64) -> Mark {
        Mark { offset, sum: None }
    }

    /// A mark behind bytes with this checksum.
    pub(super) fn behind(offset: u64, before: u64) -> Mark {
        Mark { offset, sum: Some(crc64(before, format!("{BEGIN}{offset}:").as_bytes())) }
    }

    /// Reads a note; `None` if it is another one.
    pub(super) fn parse(note: &[u8]) -> Option<Mark> {
        let text = std::str::from_utf8(note).ok()?.strip_prefix(BEGIN)?;
        let (digits, sum) = match text.split_once(':') {
            Some((digits, sum)) if sum.len() == SUM_DIGITS => (digits, Some(u64::from_str_radix(sum, 16).ok()?)),
            Some(_) => return None,
            None => (text, None),
        };
        let offset = digits.parse().ok().filter(|offset| *offset <= remora_redis::MAX_OFFSET)?;
        Some(Mark { offset, sum })
    }

    /// Whether the checksum is that of bytes with this checksum before it. True if it has none.
    pub(super) fn fits(self, before: u64) -> bool {
        self.sum.is_none() || self == Mark::behind(self.offset, before)
    }

    /// Appends the note.
    pub(super) fn write(self, out: &mut Vec<u8>) {
        let sum = self.sum.map_or_else(String::new, |sum| format!(":{sum:016x}"));
        out.extend_from_slice(format!("{BEGIN}{}{sum}", self.offset).as_bytes());
        out.extend_from_slice(NOTE_END);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_other_notes_are_none() {
        for mark in [Mark::of_a_head(307_366), Mark::behind(307_366, 42)] {
            let mut out = Vec::new();
            mark.write(&mut out);
            assert_eq!(Mark::parse(out.strip_suffix(NOTE_END).unwrap()), Some(mark));
            assert!(mark.fits(42));
        }
        assert!(!Mark::behind(307_366, 42).fits(43));
        assert!(!Mark { offset: 307_367, ..Mark::behind(307_366, 42) }.fits(42));
        for other in [
            &b"#TS:1"[..],
            b"#REMORA:",
            b"#REMORA:x",
            b"#REMORA:99999999999999999999",
            b"#REMORA:-1",
            b"#REMORA:1:2",
            b"#REMORA:1:gggggggggggggggg",
            b"\xFF",
        ] {
            assert_eq!(Mark::parse(other), None, "{other:?}");
        }
    }
}
