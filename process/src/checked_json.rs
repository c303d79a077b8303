//! Checked JSON: files of ours that carry a checksum of their own, so that a changed byte is found.
//!
//! The checksum is the last field of the object, and the CRC-64 of all bytes of the file with zeros in its place.
//! Programs that do not know it read the file as ever.
// Stands alone: files of several rooms have this form.

use remora_redis::rdb::crc64;
use serde::Serialize;

/// What stands before the sixteen digits.
const FIELD: &[u8] = b"\"checksum\": \"";

/// Digits of the checksum.
const DIGITS: usize = 16;

/// What a checksum says of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// The file is whole.
    Right,
    /// The file is damaged.
    Wrong,
    /// The file has none: an older program wrote it.
    Missing,
}

/// The text of an object, with its checksum.
///
/// # Errors
/// It is not an object; that would be a bug.
pub fn to_json(value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.pop(); // its last brace
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    let separator: &[u8] = if text.last() == Some(&b'{') { b"\n  " } else { b",\n  " };
    text.extend_from_slice(separator);
    text.extend_from_slice(FIELD);
    let at = text.len();
    text.extend_from_slice(&[b'0'; DIGITS]);
    text.extend_from_slice(b"\"\n}\n");
    let digits = format!("{:016x}", crc64(0, &text));
    if let Some(place) = text.get_mut(at..at + DIGITS) {
        place.copy_from_slice(digits.as_bytes());
    }
    Ok(text)
}

/// Compares the checksum of such a text.
pub fn check(text: &[u8]) -> Checksum {
    let Some(at) = text.windows(FIELD.len()).rposition(|window| window == FIELD) else { return Checksum::Missing };
    let (before, rest) = text.split_at(at + FIELD.len());
    let Some((digits, after)) = rest.split_at_checked(DIGITS) else { return Checksum::Wrong };
    let crc = [before, &[b'0'; DIGITS], after].iter().fold(0, |crc, part| crc64(crc, part));
    if digits == format!("{crc:016x}").as_bytes() { Checksum::Right } else { Checksum::Wrong }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_changed_byte_is_found_and_other_programs_read_the_rest() {
        let nested = BTreeMap::from([("in", 1), ("side", 2)]);
        for value in [BTreeMap::from([("a", nested.clone()), ("checksum of", nested)]), BTreeMap::new()] {
            let text = to_json(&value).unwrap();
            assert_eq!(check(&text), Checksum::Right, "{}", String::from_utf8_lossy(&text));
            let read: serde_json::Value = serde_json::from_slice(&text).unwrap();
            assert_eq!(read.as_object().unwrap().len(), value.len() + 1);
            for at in 0..text.len() {
                for bit in 0..8 {
                    let mut changed = text.clone();
                    changed[at] ^= 1 << bit;
                    assert_ne!(check(&changed), Checksum::Right, "byte {at}, bit {bit}");
                }
            }
        }
        assert_eq!((check(b"{}"), check(b"\"checksum\": \"12")), (Checksum::Missing, Checksum::Wrong));
    }
}
