//! The bytes of a sweep on their way to the agent: kept until its socket takes them. Nothing here waits.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use remora_protocol::sweep;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

/// Records that wait for the agent, in frames ([`sweep`]).
pub(super) struct Feed {
    socket: OwnedFd,
    /// Frames, of which the last one may be open.
    bytes: Vec<u8>,
    /// Where the open frame begins.
    open: Option<usize>,
    sent: usize,
    /// When the agent took something last, or nothing waited.
    moved: Instant,
}

/// Why nothing more can be sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum FeedError {
    #[error("its agent is gone: {0}")]
    Gone(Errno),
    #[error("its agent took nothing for {} s", STUCK_AFTER.as_secs())]
    Stuck,
    #[error("its agent is slower than the clients' writes: {} MiB wait for it", WAITING_BYTES_MAX >> 20)]
    Slow,
}

impl Feed {
    pub(super) fn new(socket: OwnedFd) -> Feed {
        Feed { socket, bytes: Vec::new(), open: None, sent: 0, moved: Instant::now() }
    }

    /// Where records are appended.
    pub(super) fn records(&mut self) -> &mut Vec<u8> {
        if self.open.is_none() {
            self.open = Some(self.bytes.len());
            self.bytes.extend_from_slice(&sweep::frame_head(0));
        }
        &mut self.bytes
    }

    /// Appends the mark of a whole snapshot.
    pub(super) fn end(&mut self, keys: u64) {
        self.close();
        self.bytes.extend_from_slice(&sweep::end(keys));
    }

    /// Whether so much waits for the agent that the sweep had better stand still.
    pub(super) fn is_full(&self) -> bool {
        self.waiting() >= FULL_BYTES
    }

    /// Fails if more waits than the server should keep.
    pub(super) fn check(&self) -> Result<(), FeedError> {
        if self.waiting() > WAITING_BYTES_MAX { Err(FeedError::Slow) } else { Ok(()) }
    }

    /// Sends what the socket takes at once. True if nothing is left.
    pub(super) fn send(&mut self) -> Result<bool, FeedError> {
        self.close();
        loop {
            let Some(left) = self.bytes.get(self.sent..).filter(|left| !left.is_empty()) else {
                self.bytes.clear();
                (self.sent, self.moved) = (0, Instant::now());
                return Ok(true);
            };
            match send(&self.socket, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    self.sent += sent;
                    self.moved = Instant::now();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.moved.elapsed() > STUCK_AFTER => return Err(FeedError::Stuck),
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(FeedError::Gone(error)),
            }
        }
        if self.sent > MOVED_BYTES {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
        Ok(false)
    }

    /// Writes the length of the open frame, which goes if it is empty.
    fn close(&mut self) {
        let Some(at) = self.open.take() else { return };
        if self.bytes.len() == at + sweep::HEAD_BYTES {
            // A frame of nothing would be taken for the end.
            self.bytes.truncate(at);
            return;
        }
        let head = sweep::frame_head(self.bytes.len() - at - sweep::HEAD_BYTES);
        if let Some(space) = self.bytes.get_mut(at..at + sweep::HEAD_BYTES) {
            space.copy_from_slice(&head);
        }
    }

    fn waiting(&self) -> usize {
        self.bytes.len() - self.sent
    }
}

/// Bytes that may wait before the sweep stands still: what an agent takes in a few milliseconds.
const FULL_BYTES: usize = 4 << 20;

/// Bytes that may wait at all: what clients change while the sweep stands still goes here.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// How long an agent may take nothing: it reads all the time, unless its readers are far too slow for its table.
const STUCK_AFTER: Duration = Duration::from_secs(10);

/// Sent bytes from which the rest is moved to the front: more than the socket takes at once, so that little is moved.
const MOVED_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_the_socket_does_not_take_is_kept_in_order_and_framed() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut feed = Feed::new(ours.into());
        let wanted: Vec<u8> = (0..5 << 20).map(|n: u32| (n / 7) as u8).collect();
        for piece in wanted.chunks(100_000) {
            feed.records().extend_from_slice(piece);
            let _ = feed.send().unwrap();
        }
        assert!(feed.is_full());
        feed.check().unwrap();
        feed.end(77);
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            theirs.read_to_end(&mut bytes).unwrap();
            bytes
        });
        while !feed.send().unwrap() {}
        drop(feed);
        let (mut frames, mut got, mut keys) = (sweep::Frames::default(), Vec::new(), None);
        for piece in reader.join().unwrap().chunks(1000) {
            frames.take(piece, |records| got.extend_from_slice(records)).unwrap().inspect(|end| keys = Some(*end));
        }
        assert!(got == wanted);
        assert_eq!(keys, Some(77));
    }

    #[test]
    fn an_empty_frame_is_not_taken_for_the_end() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut feed = Feed::new(ours.into());
        let _ = feed.records();
        assert!(feed.send().unwrap());
        drop(feed);
        let mut bytes = Vec::new();
        theirs.read_to_end(&mut bytes).unwrap();
        assert!(bytes.is_empty());
    }

    #[test]
    fn an_agent_that_is_gone_is_noticed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut feed = Feed::new(ours.into());
        drop(theirs);
        feed.records().push(1);
        assert!(matches!(feed.send(), Err(FeedError::Gone(_))));
    }
}
