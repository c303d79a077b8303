//! Mark: a note in a file of commands that says how far the stream is there.
//!
//! Servers and their tools skip notes that they do not know. A backup that is started again goes on at the last mark.

/// The end of a note.
pub(super) const NOTE_END: &[u8] = b"\r\n";

/// How far the stream is: everything up to this offset is in front of the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) offset: u64,
}

/// What a mark begins with.
const BEGIN: &str = "#REMORA:";

impl Mark {
    /// Reads a note; `None` if it is another one.
    pub(super) fn parse(note: &[u8]) -> Option<Mark> {
        let digits = std::str::from_utf8(note).ok()?.strip_prefix(BEGIN)?;
        let offset = digits.parse().ok().filter(|offset| *offset <= remora_redis::MAX_OFFSET)?;
        Some(Mark { offset })
    }

    /// Appends the note.
    pub(super) fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(format!("{BEGIN}{}", self.offset).as_bytes());
        out.extend_from_slice(NOTE_END);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_other_notes_are_none() {
        let mut out = Vec::new();
        Mark { offset: 307_366 }.write(&mut out);
        assert_eq!(Mark::parse(out.strip_suffix(NOTE_END).unwrap()), Some(Mark { offset: 307_366 }));
        for other in [&b"#TS:1"[..], b"#REMORA:", b"#REMORA:x", b"#REMORA:99999999999999999999", b"#REMORA:-1", b"\xFF"]
        {
            assert_eq!(Mark::parse(other), None, "{other:?}");
        }
    }
}
