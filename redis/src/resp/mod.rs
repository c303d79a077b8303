//! RESP2, the wire format: frames, how to write them, and protocol errors.
//!
//! ```text
//!   +OK\r\n                    Simple          :42\r\n      Integer          $-1\r\n  *-1\r\n   Null
//!   -ERR no such key\r\n       Error           $3\r\nabc\r\n  Bulk           *2\r\n…      Array of two frames
//! ```
//!
//! - [`Decoder`] reads frames that a server sends.
//! - [`CommandDecoder`] reads commands that a client sends.
//!
//! Not RESP3, and no attributes or pushes: without `HELLO 3` no server sends them.

mod command;
mod decoder;

pub use command::CommandDecoder;
pub use decoder::Decoder;

use crate::text;

/// One RESP value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// `+text`: a status.
    Simple(Vec<u8>),
    /// `-CODE text`: the server refused. [`crate::Refusal`] keeps it.
    Error(Vec<u8>),
    /// `:number`.
    Integer(i64),
    /// `$length` and that many arbitrary bytes.
    Bulk(Vec<u8>),
    /// `$-1` or `*-1`: no value.
    Null,
    /// `*count` and that many frames.
    Array(Vec<Frame>),
}

impl Frame {
    /// The bytes of a status or bulk.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Frame::Simple(bytes) | Frame::Bulk(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// A status or bulk that is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(self.as_bytes()?).ok()
    }

    /// An integer, or a status or bulk that parses as one (`CONFIG GET`, `SCAN` cursors).
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Frame::Integer(number) => Some(*number),
            other => text::decimal_i64(other.as_bytes()?),
        }
    }

    /// The items of an array.
    pub fn as_array(&self) -> Option<&[Frame]> {
        match self {
            Frame::Array(items) => Some(items),
            _ => None,
        }
    }

    /// The items of an array, by value; the frame itself if it is not an array.
    pub fn into_array(self) -> Result<Vec<Frame>, Frame> {
        match self {
            Frame::Array(items) => Ok(items),
            other => Err(other),
        }
    }

    /// The bytes of a status or bulk, by value; the frame itself if it is neither.
    pub fn into_bytes(self) -> Result<Vec<u8>, Frame> {
        match self {
            Frame::Simple(bytes) | Frame::Bulk(bytes) => Ok(bytes),
            other => Err(other),
        }
    }

    /// The text of an error reply, without its `-`.
    pub fn as_error(&self) -> Option<&[u8]> {
        match self {
            Frame::Error(text) => Some(text),
            _ => None,
        }
    }

    /// Whether this is the status `OK`.
    pub fn is_ok(&self) -> bool {
        matches!(self, Frame::Simple(text) if text == b"OK")
    }
}

/// What a decoder accepts. A peer that exceeds it is at fault, and the connection can't be used any more.
///
/// The limits stop nonsense of a confused peer early. They do not bound memory: memory grows with the bytes that have
/// arrived, however large a length was announced. A frame costs 32 bytes besides its content, so an array of the
/// shortest possible frames (four bytes each on the wire) takes eight times what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest bulk, in bytes.
    pub bulk_bytes: usize,
    /// Maximum number of items of one array (or arguments of one command).
    pub array_items: usize,
    /// Maximum depth of nested arrays.
    pub depth: usize,
    /// Longest line (status, error, number, length, inline command), in bytes without its `\n`.
    pub line_bytes: usize,
}

impl Limits {
    /// 512 MiB: the servers' default `proto-max-bulk-len`, hence the longest possible string value.
    pub const BULK_BYTES: usize = 512 * 1024 * 1024;
    /// 1 Mi: the servers' own limit for the arguments of a command (`multibulk length`) before version 7.
    pub const ARRAY_ITEMS: usize = 1024 * 1024;
    /// 32: `COMMAND DOCS`, the deepest answer that we know, reaches 12 on Redis 7.0 and Valkey 9.1. Commands of modules
    /// may go deeper, and a level costs next to nothing.
    pub const DEPTH: usize = 32;
    /// 64 KiB: the servers' own limit for an inline command (`PROTO_INLINE_MAX_SIZE`).
    pub const LINE_BYTES: usize = 64 * 1024;

    /// For commands of a replication handshake. The longest argument is a password (512 bytes is the longest that
    /// `AUTH` of a server takes from its own configuration), the most numerous are `REPLCONF` pairs. One command takes
    /// at most 64 × 4 KiB = 256 KiB.
    pub const HANDSHAKE: Limits = Limits { bulk_bytes: 4 * 1024, array_items: 64, depth: 1, line_bytes: 4 * 1024 };
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            bulk_bytes: Limits::BULK_BYTES,
            array_items: Limits::ARRAY_ITEMS,
            depth: Limits::DEPTH,
            line_bytes: Limits::LINE_BYTES,
        }
    }
}

/// The peer broke the protocol or does not speak it. A decoder that has returned an error returns the same error for
/// ever.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No frame begins with this byte.
    #[error("the peer does not speak RESP: a frame cannot begin with {:?}", char::from(*.byte))]
    NotResp {
        /// The byte in place of the beginning of a frame.
        byte: u8,
    },
    /// A frame begins correctly and continues wrongly.
    #[error("the peer broke the protocol: {what} reads {found:?}")]
    Malformed {
        /// Which part.
        what: &'static str,
        /// Its beginning.
        found: String,
    },
    /// Something is longer, larger or deeper than [`Limits`] allows.
    #[error("the peer sent a {what} of {size}, the limit is {limit}")]
    TooLong {
        /// Which part.
        what: &'static str,
        /// Its size: bytes, items or levels. For a line: the first size that is too large.
        size: u64,
        /// The limit.
        limit: u64,
    },
}

/// Appends a command: an array of bulk strings.
///
/// ```
/// let mut out = Vec::new();
/// remora_redis::resp::command(&mut out, &["GET", "k"]);
/// assert_eq!(out, b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n");
/// ```
pub fn command<A: AsRef<[u8]>>(out: &mut Vec<u8>, args: &[A]) {
    header(out, b'*', args.len());
    for arg in args {
        bulk(out, arg.as_ref());
    }
}

/// Appends a frame. Line breaks inside a status or error would end it early and are written as spaces, as servers do.
pub fn encode(out: &mut Vec<u8>, frame: &Frame) {
    match frame {
        Frame::Simple(text) => line(out, b'+', text),
        Frame::Error(text) => line(out, b'-', text),
        Frame::Integer(number) => line(out, b':', number.to_string().as_bytes()),
        Frame::Bulk(bytes) => bulk(out, bytes),
        Frame::Null => out.extend_from_slice(b"$-1\r\n"),
        Frame::Array(items) => {
            header(out, b'*', items.len());
            items.iter().for_each(|item| encode(out, item));
        }
    }
}

fn bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    header(out, b'$', bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

fn header(out: &mut Vec<u8>, kind: u8, length: usize) {
    line(out, kind, length.to_string().as_bytes());
}

fn line(out: &mut Vec<u8>, kind: u8, text: &[u8]) {
    out.push(kind);
    out.extend(text::one_line(text));
    out.extend_from_slice(b"\r\n");
}

/// The length after `$` or `*`. `None` for -1, which means "no value".
fn length(what: &'static str, digits: &[u8], limit: usize) -> Result<Option<usize>, Error> {
    if digits == b"-1" {
        return Ok(None);
    }
    let size = text::decimal_u64(digits).ok_or_else(|| malformed(what, digits))?;
    match usize::try_from(size) {
        Ok(length) if length <= limit => Ok(Some(length)),
        _ => Err(Error::TooLong { what, size, limit: limit as u64 }),
    }
}

fn line_too_long(limit: usize) -> Error {
    Error::TooLong { what: "line", size: limit as u64 + 1, limit: limit as u64 }
}

/// A line without the `\r` that must come before the `\n`, which the buffer has removed.
fn without_return(line: &[u8]) -> Result<&[u8], Error> {
    line.strip_suffix(b"\r").ok_or_else(|| malformed("a line's end", line))
}

fn malformed(what: &'static str, found: &[u8]) -> Error {
    Error::Malformed { what, found: text::excerpt(found) }
}
