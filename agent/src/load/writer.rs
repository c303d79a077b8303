//! Sends commands to a server: one buffer, and a count of the replies that are still owed.

use std::fmt::Write as _;

use super::Content;
use crate::server::{Client, ServerError};

/// Bytes that are gathered before they are sent: large enough that the cost of system calls does not matter, small
/// enough to stay in the L2 cache.
const FLUSH_BYTES: usize = 512 * 1024;

/// Writes commands word by word, and reads their replies in between.
pub(super) struct Writer {
    client: Client,
    buffer: Vec<u8>,
    /// Holds numbers while they are formatted.
    digits: String,
    owed: u32,
    limit: u32,
}

impl Writer {
    /// Keeps at most `limit` commands in flight.
    pub(super) fn new(client: Client, limit: u32) -> Self {
        Self { client, buffer: Vec::with_capacity(FLUSH_BYTES), digits: String::new(), owed: 0, limit: limit.max(1) }
    }

    /// Begins a command of `words` words, including its name.
    pub(super) async fn begin(&mut self, words: usize) -> Result<(), ServerError> {
        if self.owed >= self.limit {
            self.flush().await?;
            // Down to half of the limit, so that the server has work while the next commands are generated.
            self.collect(self.limit / 2).await?;
        }
        self.owed += 1;
        self.header(b'*', words);
        Ok(())
    }

    /// Appends a short word of the command.
    pub(super) fn word(&mut self, word: &[u8]) {
        self.header(b'$', word.len());
        self.buffer.extend_from_slice(word);
        self.buffer.extend_from_slice(b"\r\n");
    }

    /// Appends a short word from a value that can be formatted.
    pub(super) fn text(&mut self, text: impl std::fmt::Display) {
        let mut digits = std::mem::take(&mut self.digits);
        digits.clear();
        // Writing to a string cannot fail.
        let _ = write!(digits, "{text}");
        self.word(digits.as_bytes());
        self.digits = digits;
    }

    /// Appends a word of `length` bytes: `head`, then content. It can have any size, as it is sent while it is
    /// generated.
    pub(super) async fn content(
        &mut self,
        head: &[u8],
        length: usize,
        content: &mut Content,
    ) -> Result<(), ServerError> {
        let head = head.get(..length).unwrap_or(head);
        self.header(b'$', length);
        self.buffer.extend_from_slice(head);
        let mut left = length - head.len();
        while left > 0 {
            let piece = left.min(FLUSH_BYTES.saturating_sub(self.buffer.len()).max(1));
            let begin = self.buffer.len();
            self.buffer.resize(begin + piece, 0);
            if let Some(fresh) = self.buffer.get_mut(begin..) {
                content.fill(fresh);
            }
            left -= piece;
            self.flush_if_full().await?;
        }
        self.buffer.extend_from_slice(b"\r\n");
        self.flush_if_full().await
    }

    /// Sends the remaining bytes and waits for all replies.
    pub(super) async fn finish(mut self) -> Result<(), ServerError> {
        self.flush().await?;
        self.collect(0).await
    }

    async fn flush_if_full(&mut self) -> Result<(), ServerError> {
        if self.buffer.len() >= FLUSH_BYTES { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<(), ServerError> {
        self.client.send(&self.buffer).await?;
        self.buffer.clear();
        Ok(())
    }

    /// Reads replies until at most `rest` are owed. The first refusal ends it: the others would be refused as well.
    async fn collect(&mut self, rest: u32) -> Result<(), ServerError> {
        while self.owed > rest {
            let frame = self.client.receive().await?;
            if let Some(text) = frame.as_error() {
                return Err(self.client.refused("a write", text));
            }
            self.owed -= 1;
        }
        Ok(())
    }

    fn header(&mut self, kind: u8, number: usize) {
        self.digits.clear();
        // Writing to a string cannot fail.
        let _ = write!(self.digits, "{number}\r\n");
        self.buffer.push(kind);
        self.buffer.extend_from_slice(self.digits.as_bytes());
    }
}
