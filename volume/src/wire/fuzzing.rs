//! The bodies of the fuzz targets, which `cargo test` runs on every seed: any bytes must end in a value or an error,
//! never in a panic or an endless loop.

use super::{Call, Reply};
use crate::shape::BLOCK_BYTES;

/// Decodes a message: two bytes are its kind, two say how many blocks its data are, the others are its front. What
/// decodes must encode to the same bytes.
pub fn message(bytes: &[u8]) {
    let Some((head, front)) = bytes.split_first_chunk::<4>() else { return };
    let kind = u16::from_le_bytes([head[0], head[1]]);
    let data = usize::from(u16::from_le_bytes([head[2], head[3]])) * BLOCK_BYTES;
    let mut again = Vec::new();
    if let Ok(call) = Call::decode(kind, front, data) {
        assert_eq!((call.encode(&mut again), again.as_slice()), (Ok(kind), front), "two encodings of {call:?}");
    }
    again.clear();
    if let Ok(reply) = Reply::decode(kind, front, data) {
        assert_eq!((reply.encode(&mut again), again.as_slice()), (Ok(kind), front), "two encodings of {reply:?}");
    }
}
