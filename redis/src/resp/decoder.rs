//! A decoder of frames that does not depend on how the bytes were cut on their way.
//!
//! Nothing is read twice: finished items of an unfinished array wait in `open`, and an announced bulk string only waits
//! until its bytes have arrived. So there is no recursion either, however deep the peer nests arrays.

use super::{Error, Frame, Limits, length, line_too_long, malformed, without_return};
use crate::buffer::Buffer;
use crate::text;

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
        Some(unsigned) => text::decimal_u64(unsigned).and_then(|number| number.try_into().ok()),
        None => text::decimal_i64(digits),
    };
    number.ok_or_else(|| malformed("an integer", digits))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::encode;
    use super::*;
    use proptest::prelude::*;

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
}
