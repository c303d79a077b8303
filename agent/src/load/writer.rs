//! Commands on their way to a server: one buffer, and a count of the replies that are still owed.

use std::fmt::Write as _;

use super::Content;
use crate::server::{Client, ServerError};

/// What is gathered before it is sent: large enough that system calls don't count, small enough to stay in the L2 cache.
const FLUSH_BYTES: usize = 512 * 1024;

/// Writes commands word by word and reads their replies in between.
pub(super) struct Writer {
    client: Client,
    buffer: Vec<u8>,
    /// For numbers on their way into a word.
    digits: String,
    owed: u32,
    limit: u32,
}

impl Writer {
    /// Keeps at most `limit` commands under way.
    pub(super) fn new(client: Client, limit: u32) -> Self {
        Self { client, buffer: Vec::with_capacity(FLUSH_BYTES), digits: String::new(), owed: 0, limit: limit.max(1) }
    }

    /// Begins a command of so many words, its name among them.
    pub(super) async fn begin(&mut self, words: usize) -> Result<(), ServerError> {
        if self.owed >= self.limit {
            self.flush().await?;
            // Down to half, so that the server has work while we make more.
            self.collect(self.limit / 2).await?;
        }
        self.owed += 1;
        self.header(b'*', words);
        Ok(())
    }

    /// A short word of the command.
    pub(super) fn word(&mut self, word: &[u8]) {
        self.header(b'$', word.len());
        self.buffer.extend_from_slice(word);
        self.buffer.extend_from_slice(b"\r\n");
    }

    /// A short word made of something that prints.
    pub(super) fn text(&mut self, text: impl std::fmt::Display) {
        let mut digits = std::mem::take(&mut self.digits);
        digits.clear();
        // Writing to a string cannot fail.
        let _ = write!(digits, "{text}");
        self.word(digits.as_bytes());
        self.digits = digits;
    }

    /// A word of `length` bytes: `head`, then content. It may be any size: it is sent as it is made.
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

    /// Sends what is left and waits for every reply.
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

    /// Reads replies until only so many are owed. The first refusal ends it: the rest would be refused as well.
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
