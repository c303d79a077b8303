//! Small parsers that several modules need: decimal numbers, and excerpts for error messages. Not a parser library:
//! each function parses one line of some protocol.

// Stands alone: every other module of this crate reads numbers and excerpts by it.

use crate::MAX_OFFSET;

/// Bytes of a peer's data that an error message quotes: enough to recognise an HTTP status line, short enough for a
/// log.
pub(crate) const EXCERPT_BYTES: usize = 60;

/// A whole number as servers print it: digits only, no sign, no space.
pub(crate) fn decimal_u64(digits: &[u8]) -> Option<u64> {
    let all_digits = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    all_digits.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// A replication offset, at most [`MAX_OFFSET`].
pub(crate) fn offset(digits: &[u8]) -> Option<u64> {
    decimal_u64(digits).filter(|offset| *offset <= MAX_OFFSET)
}

/// As [`decimal_u64`], with an optional minus sign.
pub(crate) fn decimal_i64(digits: &[u8]) -> Option<i64> {
    let unsigned = digits.strip_prefix(b"-").unwrap_or(digits);
    let all_digits = !unsigned.is_empty() && unsigned.iter().all(u8::is_ascii_digit);
    all_digits.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// The beginning of `bytes` as printable text, at most [`EXCERPT_BYTES`] of them.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    let head = bytes.get(..EXCERPT_BYTES).unwrap_or(bytes);
    let ellipsis = if head.len() < bytes.len() { "…" } else { "" };
    format!("{}{ellipsis}", head.escape_ascii())
}

/// `text` without line breaks, which would end a RESP line early.
pub(crate) fn one_line(text: &[u8]) -> impl Iterator<Item = u8> + '_ {
    text.iter().map(|byte| match byte {
        b'\r' | b'\n' => b' ',
        other => *other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_digits_and_nothing_else() {
        assert_eq!(decimal_u64(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(decimal_i64(b"-9223372036854775808"), Some(i64::MIN));
        for wrong in [&b""[..], b"+1", b" 1", b"1 ", b"-1", b"0x1", b"18446744073709551616"] {
            assert_eq!(decimal_u64(wrong), None, "{wrong:?}");
        }
        for wrong in [&b""[..], b"-", b"--1", b"+1", b"9223372036854775808"] {
            assert_eq!(decimal_i64(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn an_excerpt_is_printable_and_short() {
        assert_eq!(excerpt(b"\x15\x03\x01ok"), "\\x15\\x03\\x01ok");
        assert_eq!(excerpt(&[b'a'; 1000]), format!("{}…", "a".repeat(EXCERPT_BYTES)));
    }
}
