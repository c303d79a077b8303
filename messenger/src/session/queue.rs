//! Messages on their way to the peer, by their numbers.

use std::collections::VecDeque;

/// Messages that are queued and not acknowledged (lossy: not written), in order. They are numbered from 1.
pub(super) struct SendQueue<T> {
    messages: VecDeque<T>,
    /// The number of the first message.
    first: u64,
    /// How many of the messages are written on the current link.
    written: usize,
    /// The last message that the peer says to have received.
    heard: u64,
}

impl<T> SendQueue<T> {
    pub(super) fn new() -> SendQueue<T> {
        SendQueue { messages: VecDeque::new(), first: 1, written: 0, heard: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// The messages.
    #[cfg(test)]
    pub(super) fn messages(&self) -> &VecDeque<T> {
        &self.messages
    }

    /// Queues messages, and empties `messages`.
    pub(super) fn append(&mut self, messages: &mut VecDeque<T>) {
        match self.messages.is_empty() {
            true => std::mem::swap(&mut self.messages, messages), // the usual case, in which nothing is moved
            false => self.messages.append(messages),
        }
    }

    /// Whether a message is to be written on the current link.
    pub(super) fn has_unwritten(&self) -> bool {
        self.written < self.messages.len()
    }

    /// Number of the last message queued.
    pub(super) fn last(&self) -> u64 {
        self.first - 1 + self.messages.len() as u64
    }

    /// Number of the last message written on the current link.
    pub(super) fn last_written(&self) -> u64 {
        self.first - 1 + self.written as u64
    }

    /// Whether a peer of this session can have received messages up to that number, and no more.
    pub(super) fn may_be_heard(&self, heard: u64) -> bool {
        (self.first - 1..=self.last()).contains(&heard)
    }

    /// Takes the next message out, for a session that writes each message once.
    pub(super) fn take_next(&mut self) -> Option<(u64, T)> {
        let message = self.messages.pop_front()?;
        let number = self.first;
        self.first += 1;
        Some((number, message))
    }

    /// The next message to write. It is kept until it is acknowledged.
    pub(super) fn write_next(&mut self) -> Option<(u64, &T)> {
        let number = self.first + self.written as u64;
        let message = self.messages.get(self.written)?;
        self.written += 1;
        Some((number, message))
    }

    /// The peer says that it has received messages up to that number.
    pub(super) fn note_heard(&mut self, heard: u64) {
        self.heard = heard;
    }

    /// Whether the peer has received every message.
    pub(super) fn is_heard(&self) -> bool {
        self.heard == self.last()
    }

    /// Drops messages up to that number.
    pub(super) fn release(&mut self, heard: u64) {
        while self.first <= heard && self.messages.pop_front().is_some() {
            self.first += 1;
            self.written = self.written.saturating_sub(1);
        }
    }

    /// Nothing is written on the current link.
    pub(super) fn rewind(&mut self) {
        self.written = 0;
    }

    /// Drops all messages. Later ones keep counting.
    pub(super) fn clear(&mut self) {
        self.messages.clear();
        self.written = 0;
    }

    /// Drops all messages, and numbers later ones from 1 again.
    pub(super) fn restart(&mut self) {
        self.clear();
        (self.first, self.heard) = (1, 0);
    }
}
