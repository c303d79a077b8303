//! The encodings of a replication id: 40 digits in lower case, and nothing else.

use remora_redis::ReplId;
use remora_wire::codec::{Codec, Malformed, Name, Reader, TooLarge};

/// The 40 digits.
pub(crate) struct Digits;

impl Codec for Digits {
    type Value = ReplId;
    const MAX_BYTES: usize = DIGITS;

    fn put(value: &ReplId, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        <[u8; DIGITS]>::put(value.as_bytes(), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<ReplId, Malformed> {
        exact(<[u8; DIGITS]>::take(from)?)
    }
}

/// The 40 digits, or 40 zeros where the replication id is unknown. Servers generate their ids at random, and use the
/// zeros for "none" themselves.
pub(crate) struct DigitsIfKnown;

impl Codec for DigitsIfKnown {
    type Value = Option<ReplId>;
    const MAX_BYTES: usize = DIGITS;

    fn put(value: &Option<ReplId>, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        <[u8; DIGITS]>::put(value.as_ref().map_or(&UNKNOWN, ReplId::as_bytes), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<Option<ReplId>, Malformed> {
        let digits = <[u8; DIGITS]>::take(from)?;
        if digits == UNKNOWN { Ok(None) } else { exact(digits).map(Some) }
    }
}

/// The 40 digits as a name, with its count.
pub(crate) struct Text;

impl Codec for Text {
    type Value = ReplId;
    const MAX_BYTES: usize = Name::<DIGITS>::MAX_BYTES;

    fn put(value: &ReplId, out: &mut Vec<u8>) -> Result<(), TooLarge> {
        Name::<DIGITS>::put(&value.to_string(), out)
    }

    fn take(from: &mut Reader<'_>) -> Result<ReplId, Malformed> {
        let text = Name::<DIGITS>::take(from)?;
        text.as_bytes().try_into().map_err(|_| INVALID).and_then(exact)
    }
}

fn exact(digits: [u8; DIGITS]) -> Result<ReplId, Malformed> {
    ReplId::try_from(digits).map_err(|_| INVALID)
}

const INVALID: Malformed = Malformed::Invalid { what: "replid" };

/// Digits of a replication id.
const DIGITS: usize = 40;

const UNKNOWN: [u8; DIGITS] = [b'0'; DIGITS];
