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

use crate::info;

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
            other => info::decimal_i64(other.as_bytes()?),
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
    out.extend(info::one_line(text));
    out.extend_from_slice(b"\r\n");
}

/// The length after `$` or `*`. `None` for -1, which means "no value".
fn length(what: &'static str, digits: &[u8], limit: usize) -> Result<Option<usize>, Error> {
    if digits == b"-1" {
        return Ok(None);
    }
    let size = info::decimal_u64(digits).ok_or_else(|| malformed(what, digits))?;
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
    Error::Malformed { what, found: info::excerpt(found) }
}

// A decoder of commands: what a *server* reads.
//
// Replicas and people send three forms: arrays of bulk strings, inline commands (words on a line), and bare line
// feeds, which a replica sends while it loads a snapshot, to show that it is alive. Quotes in inline commands are not
// decoded: no real client of ours uses them.

/// An incremental decoder of client commands. At most one decoded command is kept.
///
/// ```
/// use remora_redis::resp::{CommandDecoder, Limits};
/// let mut decoder = CommandDecoder::new(Limits::HANDSHAKE);
/// decoder.feed(b"\n*1\r\n$4\r\nPING\r\nREPLCONF ACK 7\r\n");
/// assert_eq!(decoder.next_command()?, Some(vec![b"PING".to_vec()]));
/// assert_eq!(decoder.next_command()?.map(|words| words.len()), Some(3));
/// # Ok::<(), remora_redis::resp::Error>(())
/// ```
#[derive(Debug)]
pub struct CommandDecoder {
    limits: Limits,
    buffer: Buffer,
    /// Arguments that the current command still lacks; 0 between commands.
    missing: usize,
    args: Vec<Vec<u8>>,
    /// Length of the argument whose header was read.
    bulk: Option<usize>,
    failed: Option<Error>,
}

impl CommandDecoder {
    /// A decoder that has read nothing. It ignores the limit `depth`.
    pub fn new(limits: Limits) -> CommandDecoder {
        CommandDecoder { limits, buffer: Buffer::default(), missing: 0, args: Vec::new(), bulk: None, failed: None }
    }

    /// Takes bytes as they were read. Decodes nothing yet.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.feed(bytes);
    }

    /// The next complete command, never empty; `None` if more bytes are needed. After an error, every call returns the
    /// same error.
    pub fn next_command(&mut self) -> Result<Option<Vec<Vec<u8>>>, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let outcome = self.decode();
        self.failed = outcome.as_ref().err().cloned();
        outcome
    }

    /// Whether everything that was fed is decoded: the next byte begins a command.
    pub fn is_between_commands(&self) -> bool {
        self.missing == 0 && self.buffer.len() == 0
    }

    /// Bytes fed and not yet decoded.
    pub fn buffered(&self) -> usize {
        self.buffer.len()
    }

    fn decode(&mut self) -> Result<Option<Vec<Vec<u8>>>, Error> {
        loop {
            if self.missing == 0 {
                match self.begin()? {
                    Begin::Incomplete => return Ok(None),
                    Begin::Inline(words) => return Ok(Some(words)),
                    Begin::Nothing | Begin::Array => continue,
                }
            }
            let Some(arg) = self.argument()? else { return Ok(None) };
            self.args.push(arg);
            self.missing -= 1;
            if self.missing == 0 {
                return Ok(Some(std::mem::take(&mut self.args)));
            }
        }
    }

    fn begin(&mut self) -> Result<Begin, Error> {
        let limits = self.limits;
        let Some(line) = self.line()? else { return Ok(Begin::Incomplete) };
        let Some(count) = line.strip_prefix(b"*") else {
            let words = inline(line);
            check("inline command", words.len(), limits.array_items)?;
            return Ok(if words.is_empty() { Begin::Nothing } else { Begin::Inline(words) });
        };
        // Servers ignore commands with no or "minus one" arguments, and so does this decoder.
        self.missing = length("command", without_return(count)?, limits.array_items)?.unwrap_or(0);
        Ok(Begin::Array)
    }

    fn argument(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let length = match self.bulk {
            Some(length) => length,
            None => match self.argument_header()? {
                Some(length) => length,
                None => return Ok(None),
            },
        };
        if self.buffer.len() < length + 2 {
            return Ok(None);
        }
        self.bulk = None;
        let body = self.buffer.take(length).unwrap_or_default();
        let end = self.buffer.take(2).unwrap_or_default();
        if end != b"\r\n" {
            return Err(malformed("the end of an argument", &end));
        }
        Ok(Some(body))
    }

    fn argument_header(&mut self) -> Result<Option<usize>, Error> {
        let limit = self.limits.bulk_bytes;
        let Some(line) = self.line()? else { return Ok(None) };
        let line = without_return(line)?;
        let digits = line.strip_prefix(b"$").ok_or_else(|| malformed("an argument's length", line))?;
        let length = length("argument", digits, limit)?.ok_or_else(|| malformed("an argument's length", line))?;
        self.buffer.expect(length);
        self.bulk = Some(length);
        Ok(Some(length))
    }

    fn line(&mut self) -> Result<Option<&[u8]>, Error> {
        let limit = self.limits.line_bytes;
        self.buffer.line(limit).map_err(|_| line_too_long(limit))
    }
}

/// The meaning of the first line of a command.
enum Begin {
    Incomplete,
    /// A bare line feed.
    Nothing,
    Inline(Vec<Vec<u8>>),
    Array,
}

fn inline(line: &[u8]) -> Vec<Vec<u8>> {
    line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(<[u8]>::to_vec).collect()
}

fn check(what: &'static str, size: usize, limit: usize) -> Result<(), Error> {
    if size > limit {
        return Err(Error::TooLong { what, size: size as u64, limit: limit as u64 });
    }
    Ok(())
}

// A decoder of frames that does not depend on how the bytes were cut on their way.
//
// Nothing is read twice: finished items of an unfinished array wait in `open`, and an announced bulk string only waits
// until its bytes have arrived. So there is no recursion either, however deep the peer nests arrays.

/// An incremental decoder of server answers.
///
/// ```
/// use remora_redis::resp::{Decoder, Frame, Limits};
/// let mut decoder = Decoder::new(Limits::default());
/// decoder.feed(b"$5\r\nhel");
/// assert_eq!(decoder.next_frame()?, None);
/// decoder.feed(b"lo\r\n:7\r\n");
/// assert_eq!(decoder.next_frame()?, Some(Frame::Bulk(b"hello".to_vec())));
/// assert_eq!(decoder.next_frame()?, Some(Frame::Integer(7)));
/// # Ok::<(), remora_redis::resp::Error>(())
/// ```
#[derive(Debug)]
pub struct Decoder {
    limits: Limits,
    buffer: Buffer,
    /// Length of the bulk string whose header was read and whose bytes are incomplete.
    bulk: Option<usize>,
    /// Arrays that lack items, the outermost first.
    open: Vec<OpenArray>,
    failed: Option<Error>,
}

#[derive(Debug)]
struct OpenArray {
    missing: usize,
    items: Vec<Frame>,
}

impl Decoder {
    /// A decoder that has read nothing.
    pub fn new(limits: Limits) -> Decoder {
        Decoder { limits, buffer: Buffer::default(), bulk: None, open: Vec::new(), failed: None }
    }

    /// Takes bytes as they were read. Decodes nothing yet.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.feed(bytes);
    }

    /// The next complete frame; `None` if more bytes are needed. After an error, every call returns the same error.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let outcome = self.decode();
        self.failed = outcome.as_ref().err().cloned();
        outcome
    }

    /// Bytes fed and not yet decoded. Items of an unfinished array count as decoded.
    pub fn buffered(&self) -> usize {
        self.buffer.len()
    }

    /// Takes the bytes that were not decoded, for a connection that switches to another protocol.
    pub fn take_rest(&mut self) -> Vec<u8> {
        self.buffer.take_rest()
    }

    /// Bytes allocated for what has not been returned yet, apart from the content of finished items.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn held_bytes(&self) -> usize {
        let items: usize = self.open.iter().map(|array| array.items.capacity()).sum();
        self.buffer.capacity() + items * size_of::<Frame>()
    }

    fn decode(&mut self) -> Result<Option<Frame>, Error> {
        loop {
            let frame = match self.bulk {
                Some(length) => self.bulk_body(length)?,
                None => match self.header()? {
                    Header::Incomplete => None,
                    Header::Whole(frame) => Some(frame),
                    Header::Opened => continue,
                },
            };
            let Some(frame) = frame else { return Ok(None) };
            if let Some(whole) = self.place(frame) {
                return Ok(Some(whole));
            }
        }
    }

    /// Reads one line: a complete frame, or the beginning of a bulk string or array.
    fn header(&mut self) -> Result<Header, Error> {
        let Some(byte) = self.buffer.peek() else { return Ok(Header::Incomplete) };
        if !b"+-:$*".contains(&byte) {
            return Err(Error::NotResp { byte });
        }
        let limit = self.limits.line_bytes;
        let line = self.buffer.line(limit).map_err(|_| line_too_long(limit))?;
        let Some(line) = line else { return Ok(Header::Incomplete) };
        let line = without_return(line)?;
        let (kind, rest) = line.split_first().ok_or_else(|| malformed("an empty line", line))?;
        match kind {
            b'+' => Ok(Header::Whole(Frame::Simple(rest.to_vec()))),
            b'-' => Ok(Header::Whole(Frame::Error(rest.to_vec()))),
            b':' => integer(rest).map(|number| Header::Whole(Frame::Integer(number))),
            b'$' => length("bulk", rest, self.limits.bulk_bytes).map(|length| self.open_bulk(length)),
            _ => length("array", rest, self.limits.array_items).and_then(|length| self.open_array(length)),
        }
    }

    fn open_bulk(&mut self, length: Option<usize>) -> Header {
        let Some(length) = length else { return Header::Whole(Frame::Null) };
        self.buffer.expect(length);
        self.bulk = Some(length);
        Header::Opened
    }

    fn open_array(&mut self, length: Option<usize>) -> Result<Header, Error> {
        match length {
            None => Ok(Header::Whole(Frame::Null)),
            Some(0) => Ok(Header::Whole(Frame::Array(Vec::new()))),
            Some(_) if self.open.len() >= self.limits.depth => Err(Error::TooLong {
                what: "nesting of arrays",
                size: self.open.len() as u64 + 1,
                limit: self.limits.depth as u64,
            }),
            // The vector starts empty: the announced length is only a claim, the items are the proof.
            Some(missing) => {
                self.open.push(OpenArray { missing, items: Vec::new() });
                Ok(Header::Opened)
            }
        }
    }

    /// The body is taken only together with the line end after it, so that no state is needed between them.
    fn bulk_body(&mut self, length: usize) -> Result<Option<Frame>, Error> {
        if self.buffer.len() < length + 2 {
            return Ok(None);
        }
        self.bulk = None;
        let body = self.buffer.take(length).unwrap_or_default();
        let end = self.buffer.take(2).unwrap_or_default();
        if end != b"\r\n" {
            return Err(malformed("the end of a bulk", &end));
        }
        Ok(Some(Frame::Bulk(body)))
    }

    /// Adds a finished frame to its array. Returns the frame if it belongs to no array, or the outermost array that it
    /// completed.
    fn place(&mut self, mut frame: Frame) -> Option<Frame> {
        while let Some(mut array) = self.open.pop() {
            array.items.push(frame);
            array.missing -= 1;
            if array.missing > 0 {
                self.open.push(array);
                return None;
            }
            frame = Frame::Array(array.items);
        }
        Some(frame)
    }
}

/// The meaning of one line.
enum Header {
    Incomplete,
    Whole(Frame),
    /// A bulk string or a non-empty array: its content follows.
    Opened,
}

fn integer(digits: &[u8]) -> Result<i64, Error> {
    let number = match digits.strip_prefix(b"+") {
        Some(unsigned) => info::decimal_u64(unsigned).and_then(|number| number.try_into().ok()),
        None => info::decimal_i64(digits),
    };
    number.ok_or_else(|| malformed("an integer", digits))
}

// The errors that servers answer with. What follows from each is decided by those who have sent the command.

/// Bytes of the server's error text that are kept. Servers' own errors stay below 200 bytes unless they quote a script;
/// a longer text is cut.
const TEXT_BYTES_MAX: usize = 512;

/// A server understood a command and refused to execute it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the server refused {command}: {text}")]
pub struct Refusal {
    /// The command that was sent.
    pub command: String,
    /// The server's error text, without its leading `-`.
    pub text: String,
}

impl Refusal {
    /// The text of an error reply (without its leading `-`) to `command`.
    ///
    /// ```
    /// use remora_redis::Refusal;
    /// assert_eq!(Refusal::new("PING", b"NOAUTH Authentication required.").code(), "NOAUTH");
    /// ```
    pub fn new(command: &str, line: &[u8]) -> Refusal {
        let line = line.get(..TEXT_BYTES_MAX).unwrap_or(line);
        Refusal { command: command.to_owned(), text: String::from_utf8_lossy(line).into_owned() }
    }

    /// The first word of the text: `ERR`, or a code of its own.
    pub fn code(&self) -> &str {
        self.text.split(' ').next().unwrap_or_default()
    }
}

/// The first line of what a peer sent that is not a Redis server, and a guess at the protocol it speaks.
pub(crate) fn guess(received: &[u8]) -> (String, &'static str) {
    let hint = match received {
        [0x15 | 0x16, 0x03, ..] | [0x15 | 0x16] => " (it speaks TLS: use rediss://)",
        [b'H', b'T', b'T', b'P', ..] => " (it is a web server)",
        [b'S', b'S', b'H', ..] => " (it is a secure shell server)",
        _ => "",
    };
    (info::excerpt(received), hint)
}

// Bytes that have arrived and are not decoded yet. Both decoders of [`crate::resp`] read from such a buffer.
//
// Two guarantees keep the decoders linear in the bytes that arrive: no line is scanned twice for its end, and a long
// bulk string that is complete is moved out of the buffer instead of copied.

/// A bulk string of at least this size takes the buffer's allocation with it instead of being copied. Below this size,
/// a copy is cheaper than losing the warm buffer.
const STEAL_BYTES: usize = 64 * 1024;

#[derive(Debug, Default)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    /// Bytes at the front that were already taken.
    start: usize,
    /// Bytes after `start` that are known to contain no line feed.
    scanned: usize,
}

/// A line exceeds the length limit. Its full length is unknown, since the buffer does not wait for its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LineTooLong;

impl Buffer {
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        // The rest is moved to the front only after at least as many bytes were taken. This bounds the cost of all
        // moves.
        if self.start >= self.bytes.len() / 2 {
            self.compact();
        }
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// The number of bytes allocated. Tests use it to show that it follows the bytes that arrived.
    #[cfg(any(test, feature = "fuzzing"))]
    fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    pub(crate) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.start).copied()
    }

    /// The next line without its line feed; `None` until the line is complete.
    pub(crate) fn line(&mut self, limit: usize) -> Result<Option<&[u8]>, LineTooLong> {
        let fresh = self.bytes.get(self.start + self.scanned..).unwrap_or_default();
        let found = fresh.iter().position(|byte| *byte == b'\n');
        let length = self.scanned + found.unwrap_or(fresh.len());
        if length > limit {
            return Err(LineTooLong);
        }
        if found.is_none() {
            self.scanned = length;
            return Ok(None);
        }
        let line = self.start..self.start + length;
        self.consume(length + 1);
        Ok(self.bytes.get(line))
    }

    /// Announces that the next `count` bytes will be taken at once: a long bulk string then begins at the front, where
    /// it can be moved out.
    pub(crate) fn expect(&mut self, count: usize) {
        if count >= STEAL_BYTES {
            self.compact();
        }
    }

    /// The next `count` bytes; `None` until all have arrived.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        if self.len() < count {
            return None;
        }
        if count >= STEAL_BYTES {
            self.compact();
            let rest = self.bytes.split_off(count);
            return Some(std::mem::replace(&mut self.bytes, rest));
        }
        let taken = self.bytes.get(self.start..self.start + count)?.to_vec();
        self.consume(count);
        Some(taken)
    }

    fn take_rest(&mut self) -> Vec<u8> {
        self.compact();
        self.scanned = 0;
        std::mem::take(&mut self.bytes)
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        self.scanned = 0;
    }

    fn compact(&mut self) {
        self.bytes.drain(..self.start);
        self.start = 0;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn all(bytes: &[u8], limits: Limits) -> Result<Vec<Vec<Vec<u8>>>, Error> {
        let mut decoder = CommandDecoder::new(limits);
        decoder.feed(bytes);
        let mut commands = Vec::new();
        while let Some(command) = decoder.next_command()? {
            commands.push(command);
        }
        Ok(commands)
    }

    fn words(text: &str) -> Vec<Vec<u8>> {
        text.split(' ').map(Into::into).collect()
    }

    #[test]
    fn arrays_inline_commands_and_bare_newlines_may_be_mixed() {
        let wire = b"\n\r\n*3\r\n$8\r\nREPLCONF\r\n$3\r\nACK\r\n$1\r\n7\r\n\n PING  x \r\nPING\n*0\r\n*-1\r\n";
        assert_eq!(all(wire, Limits::HANDSHAKE).unwrap(), [words("REPLCONF ACK 7"), words("PING x"), words("PING")]);
    }

    #[test]
    fn broken_commands_are_errors_and_not_panics() {
        for broken in [&b"*x\r\n"[..], b"*1\n", b"*1\r\n:1\r\n", b"*1\r\n$-1\r\n", b"*1\r\n$1\r\nabc", b"*1\r\n\n"] {
            assert!(matches!(all(broken, Limits::HANDSHAKE), Err(Error::Malformed { .. })), "{broken:?}");
        }
    }

    #[test]
    fn a_handshake_cannot_be_made_large() {
        for large in [&b"*65\r\n"[..], b"*1\r\n$4097\r\n", &[b'x'; 5000], &b"x ".repeat(70)] {
            let mut inline = large.to_vec();
            inline.push(b'\n');
            assert!(matches!(all(&inline, Limits::HANDSHAKE), Err(Error::TooLong { .. })), "{large:?}");
        }
    }

    proptest! {
        #[test]
        fn commands_are_decoded_wherever_they_are_cut(
            sent in proptest::collection::vec(proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..30), 1..6), 1..5),
            piece in 1_usize..9,
        ) {
            let mut wire = Vec::new();
            sent.iter().for_each(|args| command(&mut wire, args));
            let mut decoder = CommandDecoder::new(Limits::default());
            let mut received = Vec::new();
            for part in wire.chunks(piece) {
                decoder.feed(part);
                while let Some(args) = decoder.next_command().unwrap() {
                    received.push(args);
                }
            }
            prop_assert_eq!(received, sent);
            prop_assert_eq!(decoder.buffered(), 0);
        }
    }

    fn decoder() -> Decoder {
        Decoder::new(Limits::default())
    }

    fn only(bytes: &[u8]) -> Result<Option<Frame>, Error> {
        let mut decoder = decoder();
        decoder.feed(bytes);
        decoder.next_frame()
    }

    #[test]
    fn every_kind_of_frame_is_read() {
        let bulk = |text: &str| Frame::Bulk(text.into());
        assert_eq!(only(b"+OK\r\n").unwrap(), Some(Frame::Simple(b"OK".to_vec())));
        assert_eq!(only(b"-ERR no\r\n").unwrap(), Some(Frame::Error(b"ERR no".to_vec())));
        assert_eq!(only(b":-7\r\n").unwrap(), Some(Frame::Integer(-7)));
        assert_eq!(only(b"$0\r\n\r\n").unwrap(), Some(bulk("")));
        assert_eq!(only(b"$-1\r\n").unwrap(), Some(Frame::Null));
        assert_eq!(only(b"*-1\r\n").unwrap(), Some(Frame::Null));
        assert_eq!(only(b"*0\r\n").unwrap(), Some(Frame::Array(vec![])));
        assert_eq!(
            only(b"*2\r\n*1\r\n$2\r\n\r\n\r\n:1\r\n").unwrap(),
            Some(Frame::Array(vec![Frame::Array(vec![bulk("\r\n")]), Frame::Integer(1)]))
        );
    }

    #[test]
    fn what_breaks_the_protocol_is_named_and_stays_an_error() {
        assert_eq!(only(b"HTTP/1.1 400\r\n"), Err(Error::NotResp { byte: b'H' }));
        for broken in
            [&b"+OK\n"[..], b":\r\n", b":1x\r\n", b":+-1\r\n", b"$x\r\n", b"$-2\r\n", b"*-7\r\n", b"$1\r\nabc"]
        {
            assert!(matches!(only(broken), Err(Error::Malformed { .. })), "{broken:?}");
        }
        let mut decoder = decoder();
        decoder.feed(b"!");
        let first = decoder.next_frame();
        decoder.feed(b"+OK\r\n");
        assert_eq!(decoder.next_frame(), first);
    }

    #[test]
    fn beyond_a_limit_the_error_says_which() {
        let limits = Limits { bulk_bytes: 4, array_items: 2, depth: 2, line_bytes: 16 };
        let refused = |bytes: &[u8]| {
            let mut decoder = Decoder::new(limits);
            decoder.feed(bytes);
            match decoder.next_frame() {
                Err(Error::TooLong { what, .. }) => what,
                other => panic!("{bytes:?} gave {other:?}"),
            }
        };
        assert_eq!(refused(b"$5\r\n"), "bulk");
        assert_eq!(refused(b"$99999999999999999\r\n"), "line");
        assert_eq!(refused(b"*3\r\n"), "array");
        assert_eq!(refused(b"*1\r\n*1\r\n*1\r\n"), "nesting of arrays");
        assert_eq!(refused(b"+12345678901234567"), "line");
    }

    #[test]
    fn an_announced_length_costs_no_memory() {
        let mut decoder = decoder();
        decoder.feed(b"*1048576\r\n$536870912\r\nabc");
        assert_eq!(decoder.next_frame(), Ok(None));
        assert!(decoder.held_bytes() < 1024);
    }

    #[test]
    fn a_large_bulk_in_many_pieces_is_read_in_linear_time() {
        // Scanning from the start at each of 64 Ki pieces would be 2^31 steps of a debug build: minutes.
        let length = 64 * 1024 * 64;
        let mut decoder = decoder();
        decoder.feed(format!("${length}\r\n").as_bytes());
        for _ in 0..64 * 1024 {
            decoder.feed(&[b'\n'; 64]);
            assert_eq!(decoder.next_frame(), Ok(None));
        }
        decoder.feed(b"\r\n");
        assert_eq!(decoder.next_frame(), Ok(Some(Frame::Bulk(vec![b'\n'; length]))));
        assert_eq!(decoder.buffered(), 0);
    }

    #[test]
    fn what_was_not_decoded_can_be_taken_back() {
        let mut decoder = decoder();
        decoder.feed(b"+OK\r\nnot RESP");
        assert!(decoder.next_frame().unwrap().unwrap().is_ok());
        assert_eq!(decoder.take_rest(), b"not RESP");
        assert_eq!(decoder.buffered(), 0);
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let line = || "[^\r\n]{0,20}".prop_map(String::into_bytes);
        let leaf = prop_oneof![
            line().prop_map(Frame::Simple),
            line().prop_map(Frame::Error),
            any::<i64>().prop_map(Frame::Integer),
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(Frame::Bulk),
            Just(Frame::Null),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| proptest::collection::vec(inner, 0..6).prop_map(Frame::Array))
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded_wherever_it_is_cut(sent in proptest::collection::vec(frames(), 1..4), piece in 1_usize..9) {
            let mut wire = Vec::new();
            sent.iter().for_each(|frame| encode(&mut wire, frame));
            let mut decoder = decoder();
            let mut received = Vec::new();
            for part in wire.chunks(piece) {
                decoder.feed(part);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    received.push(frame);
                }
            }
            prop_assert_eq!(received, sent);
            prop_assert_eq!(decoder.buffered(), 0);
        }
    }

    #[test]
    fn a_refusal_keeps_the_command_and_the_servers_words() {
        let text = "NOPERM User remora has no permissions to run the 'psync' command";
        let refusal = Refusal::new("PSYNC", text.as_bytes());
        assert_eq!(refusal.code(), "NOPERM");
        assert_eq!(refusal.to_string(), format!("the server refused PSYNC: {text}"));
        assert_eq!(Refusal::new("PSYNC", b"").code(), "");
    }

    #[test]
    fn an_endless_error_text_is_clipped() {
        assert_eq!(Refusal::new("PING", &[b'x'; 100_000]).text.len(), TEXT_BYTES_MAX);
    }

    #[test]
    fn a_long_bulk_is_moved_out_and_not_copied() {
        let mut buffer = Buffer::default();
        buffer.feed(b"$65536\r\n");
        assert_eq!(buffer.line(100).unwrap().unwrap(), b"$65536\r");
        buffer.expect(STEAL_BYTES);
        buffer.feed(&[7; STEAL_BYTES]);
        buffer.feed(b"\r\n+next");
        let before = buffer.bytes.as_ptr();
        let bulk = buffer.take(STEAL_BYTES).unwrap();
        assert_eq!(bulk.as_ptr(), before);
        assert_eq!(bulk, vec![7; STEAL_BYTES]);
        assert_eq!(buffer.take_rest(), b"\r\n+next");
    }

    #[test]
    fn a_line_without_an_end_is_refused_wherever_it_was_cut() {
        for cut in 0..=11 {
            let mut buffer = Buffer::default();
            let text = b"abcdefghijk";
            let mut outcome = Ok(());
            for part in [&text[..cut], &text[cut..]] {
                buffer.feed(part);
                outcome = outcome.and(buffer.line(10).map(|line| assert_eq!(line, None)));
            }
            assert_eq!(outcome, Err(LineTooLong), "cut at {cut}");
        }
    }
}
