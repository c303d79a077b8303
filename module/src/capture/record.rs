//! Records of a snapshot as the servers write them: header, databases, keys, strings. Pure: appends bytes to a buffer.
//!
//! A long value is not put into the buffer: only the bytes before it are, and the caller writes the value from its own
//! place.
//!
//! ```text
//!   REDIS0011  FA name value …   FE db  FB keys expires   [FC expiry]  [F8 idle | F9 freq]  0 key length   value   …
//!   ╰── header ──────────────╯   ╰──── database ───────╯  ╰──── head of a string ───────────────────────╯
//! ```

use remora_redis::rdb::{
    OPCODE_AUX, OPCODE_EOF, OPCODE_EXPIRETIME_MS, OPCODE_FREQ, OPCODE_IDLE, OPCODE_RESIZEDB, OPCODE_SELECTDB, magic,
    put_length,
};

/// The age of a key, if the server keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Age {
    /// The server keeps none.
    Unknown,
    /// Milliseconds since the last use.
    Idle(u64),
    /// Frequency of use, on the server's scale.
    Frequency(u8),
}

/// The first nine bytes. `None`: no snapshot has this version.
pub(crate) fn put_magic(out: &mut Vec<u8>, version: u16) -> Option<()> {
    out.extend_from_slice(magic(u32::from(version))?.as_bytes());
    Some(())
}

/// One field of the header.
pub(crate) fn put_field(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.push(OPCODE_AUX);
    put_string(out, name.as_bytes());
    put_string(out, value);
}

/// The keys that follow belong to this database; it has `keys` keys, of which `expires` expire.
pub(crate) fn put_database(out: &mut Vec<u8>, number: u32, keys: u64, expires: u64) {
    put_selected(out, number);
    out.push(OPCODE_RESIZEDB);
    put_length(out, keys);
    put_length(out, expires);
}

/// The keys that follow belong to this database, which the snapshot may have mentioned before.
pub(crate) fn put_selected(out: &mut Vec<u8>, number: u32) {
    out.push(OPCODE_SELECTDB);
    put_length(out, u64::from(number));
}

/// The end of a snapshot, with zeros for the checksum: it has none.
pub(crate) fn put_end(out: &mut Vec<u8>) {
    out.push(OPCODE_EOF);
    out.extend_from_slice(&[0; CHECKSUM_BYTES]);
}

/// Bytes of a snapshot's checksum.
const CHECKSUM_BYTES: usize = 8;

/// A key up to its value: expiry (milliseconds since 1970), age, type, and name.
pub(crate) fn put_key(out: &mut Vec<u8>, expires_at: Option<u64>, age: Age, kind: u8, name: &[u8]) {
    if let Some(milliseconds) = expires_at {
        out.push(OPCODE_EXPIRETIME_MS);
        out.extend_from_slice(&milliseconds.to_le_bytes());
    }
    match age {
        Age::Unknown => {}
        Age::Idle(milliseconds) => {
            out.push(OPCODE_IDLE);
            put_length(out, milliseconds / 1000);
        }
        Age::Frequency(frequency) => out.extend_from_slice(&[OPCODE_FREQ, frequency]),
    }
    out.push(kind);
    put_string(out, name);
}

/// The value of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// This number of bytes, which follow.
    Bytes(usize),
    /// This number, which stands for its decimal digits.
    Number(i64),
}

/// A string up to its bytes. A number is written as a whole.
pub(super) fn put_head(out: &mut Vec<u8>, expires_at: Option<u64>, age: Age, name: &[u8], value: Value) {
    put_key(out, expires_at, age, TYPE_STRING, name);
    match value {
        Value::Bytes(length) => put_length(out, length as u64),
        Value::Number(number) => put_number(out, number),
    }
}

/// A number as servers write it: in binary, if it has at most 32 bits.
fn put_number(out: &mut Vec<u8>, number: i64) {
    if let Ok(number) = i8::try_from(number) {
        out.push(0xC0);
        out.extend_from_slice(&number.to_le_bytes());
    } else if let Ok(number) = i16::try_from(number) {
        out.push(0xC1);
        out.extend_from_slice(&number.to_le_bytes());
    } else if let Ok(number) = i32::try_from(number) {
        out.push(0xC2);
        out.extend_from_slice(&number.to_le_bytes());
    } else {
        put_string(out, number.to_string().as_bytes());
    }
}

/// The type of a plain string.
const TYPE_STRING: u8 = 0;

/// A string: length and bytes.
pub(crate) fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    put_length(out, string.len() as u64);
    out.extend_from_slice(string);
}

/// The version of the format that the server writes, from the reply to `FUNCTION DUMP`. `None` if the reply is too
/// short.
pub(crate) fn dump_version(answer: &[u8]) -> Option<u16> {
    let (_, footer) = answer.split_at_checked(answer.len().checked_sub(DUMP_FOOTER_BYTES)?)?;
    let [low, high, ..] = *footer else { return None };
    Some(u16::from_le_bytes([low, high]))
}

/// Type and value in the reply to `DUMP key`.
pub(crate) fn dumped_value(answer: &[u8]) -> Option<&[u8]> {
    answer.get(..answer.len().checked_sub(DUMP_FOOTER_BYTES)?)
}

/// Version and checksum at the end of a `DUMP`.
const DUMP_FOOTER_BYTES: usize = 10;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::rdb::Head;

    use super::*;

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out);
        out
    }

    #[test]
    fn a_header_is_read_back_as_the_servers_own() {
        for (version, begins) in [(10, b"REDIS0010"), (80, b"VALKEY080")] {
            let mut out = Vec::new();
            put_magic(&mut out, version).unwrap();
            put_field(&mut out, "repl-id", &[b'a'; 40]);
            put_field(&mut out, "repl-offset", b"77");
            put_field(&mut out, "repl-stream-db", b"3");
            put_database(&mut out, 0, 1, 0);
            let (head, _) = Head::parse(&out).unwrap().unwrap();
            assert!(out.starts_with(begins));
            assert_eq!((head.version, head.offset(), head.stream_db()), (u32::from(version), Some(77), Some(3)));
        }
    }

    #[test]
    fn a_string_has_its_expiry_and_its_age_before_type_name_and_length() {
        let bytes = written(|out| put_head(out, Some(258), Age::Idle(61_999), b"k", Value::Bytes(3)));
        assert_eq!(bytes, b"\xFC\x02\x01\0\0\0\0\0\0\xF8\x3D\0\x01k\x03");
        let bytes = written(|out| put_head(out, None, Age::Frequency(7), b"key", Value::Bytes(64)));
        assert_eq!(bytes, b"\xF9\x07\x00\x03key\x40\x40");
    }

    #[test]
    fn a_number_is_as_short_as_servers_write_it() {
        for (number, bytes) in [
            (-128, &b"\xC0\x80"[..]),
            (300, b"\xC1\x2C\x01"),
            (-2_147_483_648, b"\xC2\0\0\0\x80"),
            (2_147_483_648, b"\x0A2147483648"),
        ] {
            let written = written(|out| put_head(out, None, Age::Unknown, b"k", Value::Number(number)));
            assert_eq!(written, [b"\0\x01k", bytes].concat());
        }
    }

    #[test]
    fn a_database_says_how_many_keys_to_expect() {
        assert_eq!(written(|out| put_database(out, 15, 64, 3)), b"\xFE\x0F\xFB\x40\x40\x03");
    }

    #[test]
    fn the_version_stands_before_the_checksum_at_the_end_of_a_dump() {
        assert_eq!(dump_version(b"functions\x50\x0012345678"), Some(80));
        assert_eq!(dump_version(b"\x0b\x0012345678"), Some(11), "no functions at all");
        assert_eq!(dump_version(b"123456789"), None);
    }
}
