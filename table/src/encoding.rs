//! Encoding: how the bytes of one slot are stored: as they are, or compressed.
//!
//! ```text
//!   a plain slot         ├ bytes of the stream ┤
//!   a compressed slot    ├ length u32 ┼ CRC-32C u32 ┼ LZ4 block, or Zstandard frame ┤      both of the plain bytes
//! ```
//!
//! Records of a sealed journal may be compressed in the same way, by LZ4.
//!
//! A slot is compressed once, by its source, and only if that saves a tenth of it. A process that passes it on passes
//! on what is stored. A reader knows how many plain bytes a slot has before it reads it (from the progress line), so a
//! compressed slot never decides how much memory its reader uses. Not here: where the encoding of a slot stands
//! (`layout`), and when to compress (the source agent).

use remora_fabric::memory::crc;

use crate::error::Error;
pub use crate::method::Method;

/// Bytes before the compressed ones: the length and the CRC-32C of the plain bytes.
const HEADER_BYTES: usize = 8;

/// A slot is stored compressed only if it then has at most this share of its bytes, in tenths. Below a tenth, what is
/// saved on the link is not worth what every reader spends on decompressing.
const WORTH_TENTHS: u64 = 9;

/// Bytes of the longest record of a journal that is compressed, and of the shortest: below it, little is saved. A
/// reader takes records of some 256 KiB at a time, and LZ4 makes at most 255 times as much of them.
pub(crate) const MOST_RECORD_BYTES: u32 = 64 << 10;
pub(crate) const LEAST_RECORD_BYTES: usize = 256;

/// Zstandard's level: the fastest of its regular ones. A higher level halves the speed for some percent.
const ZSTD_LEVEL: i32 = 1;

/// The most bytes that a compressed slot with that many plain bytes may have. So it always fits the slot.
fn most_stored(plain: u32) -> usize {
    (u64::from(plain) * WORTH_TENTHS / 10) as usize
}

/// Whether a compressed slot with that many plain bytes may have that many stored ones.
pub(crate) fn is_worth(stored: u32, plain: u32) -> bool {
    (HEADER_BYTES + 1..=most_stored(plain)).contains(&(stored as usize))
}

/// Compresses slots, one after the other.
#[derive(Default)]
pub(crate) struct Encoder {
    /// Kept between slots, since it has tables of half a megabyte.
    zstd: Option<zstd::bulk::Compressor<'static>>,
    out: Vec<u8>,
}

impl Encoder {
    /// The compressed form of a slot with these bytes and this CRC-32C. `None`: it is not worth it.
    ///
    /// # Errors
    /// [`Error::Misuse`], which would be a bug: Zstandard refuses its own level.
    pub(crate) fn encode(&mut self, method: Method, plain: &[u8], sum: u32) -> Result<Option<&mut Vec<u8>>, Error> {
        let Ok(length) = u32::try_from(plain.len()) else { return Ok(None) };
        let most = most_stored(length);
        if most <= HEADER_BYTES {
            return Ok(None);
        }
        let room = match method {
            // LZ4 needs room for the worst case; Zstandard gives up without it.
            Method::Lz4 => lz4_flex::block::get_maximum_output_size(plain.len()),
            Method::Zstd => most - HEADER_BYTES,
        };
        self.out.resize(HEADER_BYTES + room, 0);
        self.out[..4].copy_from_slice(&length.to_le_bytes());
        self.out[4..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        let body = &mut self.out[HEADER_BYTES..];
        let written = match method {
            Method::Lz4 => lz4_flex::block::compress_into(plain, body).ok(),
            Method::Zstd => {
                let refused = |_| Error::Misuse("Zstandard does not accept its level");
                let compressor = match &mut self.zstd {
                    Some(compressor) => compressor,
                    none => none.insert(zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(refused)?),
                };
                compressor.compress_to_buffer(plain, body).ok()
            }
        };
        let Some(written) = written.filter(|written| HEADER_BYTES + written <= most) else { return Ok(None) };
        self.out.truncate(HEADER_BYTES + written);
        Ok(Some(&mut self.out))
    }
}

/// Where slots are decompressed: kept between them.
#[derive(Default)]
pub(crate) struct Decoder {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
    pub(crate) plain: Vec<u8>,
}

impl Decoder {
    /// Decompresses a record of a journal to [`plain`](Self::plain). Nothing else says how long it is, so it may not be
    /// longer than records that are compressed.
    ///
    /// # Errors
    /// As for [`decode`](Self::decode); `slot` is the slot that it is in.
    pub(crate) fn decode_record(&mut self, method: Method, slot: u64, stored: &[u8]) -> Result<(), Error> {
        let said = stored.first_chunk().map_or(0, |length| u32::from_le_bytes(*length));
        if said == 0 || said > MOST_RECORD_BYTES {
            let why = format!("a record says that it has {said} bytes, and has 1 to {MOST_RECORD_BYTES}");
            return Err(Error::Encoding { slot, method, why });
        }
        self.decode(method, slot, stored, said).map(drop)
    }

    /// Decompresses slot `number`, which must have `length` bytes, to [`plain`](Self::plain), and returns their
    /// CRC-32C. Uses `length` bytes of memory, whatever is stored.
    ///
    /// # Errors
    /// [`Error::Encoding`]: these are not the stored bytes of a slot of that length, or the plain bytes have another
    /// CRC-32C than those that the source compressed.
    pub(crate) fn decode(&mut self, method: Method, number: u64, stored: &[u8], length: u32) -> Result<u32, Error> {
        let wrong = |why: String| Error::Encoding { slot: number, method, why };
        let Some((header, body)) = stored.split_at_checked(HEADER_BYTES) else {
            return Err(wrong(format!("{} bytes are stored, fewer than its header has", stored.len())));
        };
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (said, want) = (word(0), word(4));
        if said != length {
            return Err(wrong(format!("it says that it has {said} bytes, and the table says {length}")));
        }
        self.plain.resize(length as usize, 0);
        let written = match method {
            Method::Lz4 => {
                lz4_flex::block::decompress_into(body, &mut self.plain).map_err(|error| wrong(error.to_string()))?
            }
            Method::Zstd => {
                let decompressor = match &mut self.zstd {
                    Some(decompressor) => decompressor,
                    none => none.insert(zstd::bulk::Decompressor::new().map_err(|error| wrong(error.to_string()))?),
                };
                let done = decompressor.decompress_to_buffer(body, &mut self.plain[..]);
                done.map_err(|error| wrong(error.to_string()))?
            }
        };
        if written != length as usize {
            return Err(wrong(format!("it has {written} bytes, and the table says {length}")));
        }
        let got = crc::crc32c(&self.plain);
        if got != want {
            return Err(wrong(format!("its plain bytes have the checksum {got:#010x}, expected {want:#010x}")));
        }
        Ok(got)
    }
}

/// Decompresses the stored bytes of slot `number`, which must have `length` plain bytes: for slots that were kept
/// elsewhere.
///
/// # Errors
/// [`Error::Encoding`]: these are not the stored bytes of such a slot.
pub fn decode_kept(method: Method, number: u64, stored: &[u8], length: u32) -> Result<Vec<u8>, Error> {
    let mut decoder = Decoder::default();
    decoder.decode(method, number, stored, length)?;
    Ok(decoder.plain)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn encoded(method: Method, plain: &[u8]) -> Option<Vec<u8>> {
        Encoder::default().encode(method, plain, crc::crc32c(plain)).unwrap().cloned()
    }

    /// Bytes that shrink: few words, many times.
    fn text() -> impl Strategy<Value = Vec<u8>> {
        let words = prop::collection::vec(0..40u32, 200..4000);
        words.prop_map(|words| {
            words.into_iter().flat_map(|word| format!("\"key{word}\":{word},").into_bytes()).collect()
        })
    }

    fn method() -> impl Strategy<Value = Method> {
        prop::sample::select(&Method::ALL[..])
    }

    proptest! {
        #[test]
        fn a_slot_comes_back_as_it_was_and_is_smaller_by_a_tenth(method in method(), plain in text()) {
            let stored = encoded(method, &plain).unwrap();
            prop_assert!(is_worth(stored.len() as u32, plain.len() as u32));
            let mut decoder = Decoder::default();
            let sum = decoder.decode(method, 7, &stored, plain.len() as u32).unwrap();
            prop_assert_eq!(sum, crc::crc32c(&plain));
            prop_assert_eq!(&decoder.plain, &plain);
        }

        #[test]
        fn any_bytes_come_back_or_are_left_alone(method in method(), plain: Vec<u8>) {
            if let Some(stored) = encoded(method, &plain) {
                prop_assert_eq!(decode_kept(method, 0, &stored, plain.len() as u32).unwrap(), plain);
            }
        }

        #[test]
        fn no_changed_byte_and_no_missing_one_gives_other_bytes(
            method in method(), plain in text(), at: prop::sample::Index, flip in 1u8.., cut: bool,
        ) {
            let mut stored = encoded(method, &plain).unwrap();
            let at = at.index(stored.len());
            if cut { stored.truncate(at) } else { stored[at] ^= flip }
            // A change that the format does not care about gives the same bytes; every other one is an error.
            match decode_kept(method, 3, &stored, plain.len() as u32) {
                Ok(bytes) => prop_assert_eq!(bytes, plain),
                Err(error) => prop_assert!(error.to_string().contains("slot 3"), "{}", error),
            }
        }

        #[test]
        fn hostile_bytes_are_refused_and_use_no_more_memory_than_the_slot(
            method in method(), body: Vec<u8>, claimed: u32, length in 0u32..100_000,
        ) {
            let stored = [&claimed.to_le_bytes()[..], &[0; 4], &body[..]].concat();
            let mut decoder = Decoder::default();
            let decoded = decoder.decode(method, 0, &stored, length);
            prop_assert!(decoder.plain.capacity() <= 2 * length as usize);
            prop_assert!(claimed == length || decoded.is_err());
        }
    }

    #[test]
    fn random_bytes_and_nearly_empty_slots_are_left_alone() {
        // xorshift: no compressor finds anything in it.
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let random: Vec<u8> = (0..20_000).flat_map(|_| next().to_le_bytes()).collect();
        for method in Method::ALL {
            assert_eq!(encoded(method, &random), None, "{method}");
            assert_eq!(encoded(method, &[]), None, "{method}");
            assert_eq!(encoded(method, &[0; 8]), None, "{method}");
        }
    }

    #[test]
    fn a_slot_that_would_become_larger_than_it_says_is_refused() {
        let plain = vec![b'x'; 1 << 20];
        for method in Method::ALL {
            let mut stored = encoded(method, &plain).unwrap();
            // A bomb: the header says a hundred bytes, and the table agrees.
            stored[..4].copy_from_slice(&100u32.to_le_bytes());
            let refused = decode_kept(method, 0, &stored, 100).unwrap_err();
            assert!(matches!(refused, Error::Encoding { slot: 0, .. }), "{refused}");
            let refused = decode_kept(method, 0, &stored, 1 << 20).unwrap_err().to_string();
            assert!(refused.contains("says that it has 100 bytes"), "{refused}");
            let refused = decode_kept(method, 0, &stored[..5], 1 << 20).unwrap_err().to_string();
            assert!(refused.contains("fewer than its header"), "{refused}");
        }
    }
}
