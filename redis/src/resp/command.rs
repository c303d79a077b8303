//! A decoder of commands: what a *server* reads.
//!
//! Replicas and people send three forms: arrays of bulk strings, inline commands (words on a line), and bare line
//! feeds, which a replica sends while it loads a snapshot, to show that it is alive. Quotes in inline commands are not
//! decoded: no real client of ours uses them.

use super::{Error, Limits, length, line_too_long, malformed, without_return};
use crate::buffer::Buffer;

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::command;
    use super::*;
    use proptest::prelude::*;

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
        fn what_is_encoded_is_decoded_wherever_it_is_cut(
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
}
