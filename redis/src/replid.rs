//! The name of a replication history.

use std::fmt;
use std::str::FromStr;

/// Number of hexadecimal digits in the name of a history (`CONFIG_RUN_ID_SIZE` in the servers).
const DIGITS: usize = 40;

/// A replication id: 40 hexadecimal digits in lower case, as the servers print it.
///
/// A primary generates a new one when it begins a history that no replica can continue. Two servers with the same
/// replication id and the same offset hold the same data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplId([u8; DIGITS]);

impl ReplId {
    /// Parses 40 hexadecimal digits; upper case is converted to lower case.
    pub fn parse(digits: &[u8]) -> Result<ReplId, InvalidReplId> {
        let digits: [u8; DIGITS] = digits.try_into().map_err(|_| InvalidReplId { length: digits.len() })?;
        if !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(InvalidReplId { length: DIGITS });
        }
        Ok(ReplId(digits.map(|digit| digit.to_ascii_lowercase())))
    }

    /// The 40 digits, in lower case.
    pub fn as_bytes(&self) -> &[u8; DIGITS] {
        &self.0
    }
}

/// The exact form of binary formats: 40 digits in lower case. What is converted has the same bytes again.
impl TryFrom<[u8; DIGITS]> for ReplId {
    type Error = InvalidReplId;

    fn try_from(digits: [u8; DIGITS]) -> Result<ReplId, InvalidReplId> {
        ReplId::parse(&digits).ok().filter(|replid| replid.0 == digits).ok_or(InvalidReplId { length: DIGITS })
    }
}

impl FromStr for ReplId {
    type Err = InvalidReplId;

    fn from_str(text: &str) -> Result<ReplId, InvalidReplId> {
        ReplId::parse(text.as_bytes())
    }
}

impl fmt::Display for ReplId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|digit| fmt::Write::write_char(f, char::from(*digit)))
    }
}

impl fmt::Debug for ReplId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReplId({self})")
    }
}

/// The parsed text is not a replication id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a replid has {DIGITS} hexadecimal digits; this has {length} bytes or other characters")]
pub struct InvalidReplId {
    /// Length of the text, in bytes.
    pub length: usize,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_replid_prints_as_it_was_read() {
        let text = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        assert_eq!(text.parse::<ReplId>().unwrap().to_string(), text);
        assert_eq!(text.to_uppercase().parse::<ReplId>().unwrap().to_string(), text);
    }

    #[test]
    fn anything_but_forty_hexadecimal_digits_is_refused() {
        for wrong in ["", "?", &"a".repeat(39), &"a".repeat(41), &"g".repeat(40)] {
            assert!(wrong.parse::<ReplId>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn bytes_are_converted_only_if_they_come_back_the_same() {
        let digits = *b"8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        assert_eq!(ReplId::try_from(digits).unwrap().as_bytes(), &digits);
        for wrong in [digits.map(|digit| digit.to_ascii_uppercase()), [0; 40], [b'g'; 40]] {
            assert!(ReplId::try_from(wrong).is_err(), "{wrong:?}");
        }
    }
}
