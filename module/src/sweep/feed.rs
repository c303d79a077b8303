//! The bytes of a sweep on their way to the agent: kept until its socket takes them. Nothing here waits.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use remora_protocol::sweep;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

/// Records that wait for the agent, in frames ([`sweep`]).
pub(super) struct Feed {
    socket: OwnedFd,
    /// Frames that are closed, and parts of such. They move, and are not copied: some have many MiB.
    closed: VecDeque<Part>,
    /// A frame that is open, or nothing.
    open: Vec<u8>,
    /// Frames behind a record of which a part is sent and the rest is not there yet.
    behind: VecDeque<Part>,
    /// Whether there is such a record.
    within: bool,
    /// Bytes that are closed and not sent, but for those behind.
    waiting: usize,
    /// Bytes behind.
    held: usize,
    /// Those among all of them that clients had no part in: of large values.
    large: usize,
    /// Bytes of the first part that are sent.
    sent: usize,
    /// When the agent took something last, or nothing waited.
    moved: Instant,
}

/// A closed frame, or a part of one.
struct Part {
    bytes: Vec<u8>,
    is_large: bool,
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
    #[error("{} MiB of what clients change wait behind a large string that is being sent", WAITING_BYTES_MAX >> 20)]
    Behind,
}

impl Feed {
    pub(super) fn new(socket: OwnedFd) -> Feed {
        let (closed, open, behind) = (VecDeque::new(), Vec::new(), VecDeque::new());
        let (within, waiting, held, large, sent, moved) = (false, 0, 0, 0, 0, Instant::now());
        Feed { socket, closed, open, behind, within, waiting, held, large, sent, moved }
    }

    /// Where records are appended.
    pub(super) fn records(&mut self) -> &mut Vec<u8> {
        if self.open.is_empty() {
            self.open.extend_from_slice(&sweep::frame_head(0));
        }
        &mut self.open
    }

    /// Appends parts of a large record.
    pub(super) fn large(&mut self, parts: Vec<Vec<u8>>) {
        self.close();
        let bytes = parts.iter().map(Vec::len).sum();
        if bytes == 0 {
            return;
        }
        self.push(sweep::frame_head(bytes).to_vec(), false);
        parts.into_iter().filter(|part| !part.is_empty()).for_each(|part| self.push(part, true));
    }

    /// Closes what was appended so far. The record at its end is not whole: [`Feed::part`] appends the rest, and what
    /// else is appended meanwhile waits behind it.
    pub(super) fn begin_parts(&mut self) {
        self.close();
        self.within = true;
    }

    /// Appends parts of the record that is not whole.
    pub(super) fn part(&mut self, parts: Vec<Vec<u8>>) {
        self.close();
        self.within = false;
        self.large(parts);
        self.within = true;
    }

    /// The record is whole now.
    pub(super) fn end_parts(&mut self) {
        self.close();
        self.within = false;
        self.waiting += std::mem::take(&mut self.held);
        self.closed.append(&mut self.behind);
    }

    /// Appends the mark of a whole snapshot.
    pub(super) fn end(&mut self, keys: u64) {
        self.close();
        self.push(sweep::end(keys).to_vec(), false);
    }

    /// Whether so much waits for the agent that the sweep had better stand still.
    pub(super) fn is_full(&self) -> bool {
        let open = if self.within { 0 } else { self.open.len() };
        self.waiting + open >= FULL_BYTES
    }

    /// Fails if more waits than the server should keep, besides large values, which have a bound of their own.
    pub(super) fn check(&self) -> Result<(), FeedError> {
        let too_much = if self.within { FeedError::Behind } else { FeedError::Slow };
        if self.waiting() - self.large > WAITING_BYTES_MAX { Err(too_much) } else { Ok(()) }
    }

    /// Bytes of large values that wait.
    pub(super) fn large_bytes(&self) -> usize {
        self.large
    }

    /// Sends what the socket takes at once, until then. True if nothing is left.
    pub(super) fn send(&mut self, until: Instant) -> Result<bool, FeedError> {
        self.close();
        let mut late = false;
        loop {
            let first = self.closed.front();
            let is_large = first.is_some_and(|first| first.is_large);
            let Some(left) = first.and_then(|first| first.bytes.get(self.sent..)) else {
                (self.sent, self.moved) = (0, Instant::now());
                return Ok(self.behind.is_empty());
            };
            if left.is_empty() {
                self.closed.pop_front();
                self.sent = 0;
                continue;
            }
            if late {
                return Ok(false);
            }
            match send(&self.socket, left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    self.sent += sent;
                    self.waiting = self.waiting.saturating_sub(sent);
                    self.large -= if is_large { sent } else { 0 };
                    self.moved = Instant::now();
                    late = self.moved >= until;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.moved.elapsed() > STUCK_AFTER => return Err(FeedError::Stuck),
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(FeedError::Gone(error)),
            }
        }
    }

    /// Writes the length of the open frame, which goes if it is empty.
    fn close(&mut self) {
        let mut frame = std::mem::take(&mut self.open);
        let Some(length) = frame.len().checked_sub(sweep::HEAD_BYTES).filter(|length| *length > 0) else {
            // A frame of nothing would be taken for the end.
            return;
        };
        if let Some(space) = frame.get_mut(..sweep::HEAD_BYTES) {
            space.copy_from_slice(&sweep::frame_head(length));
        }
        self.push(frame, false);
    }

    fn push(&mut self, bytes: Vec<u8>, is_large: bool) {
        let length = bytes.len();
        self.large += if is_large { length } else { 0 };
        let (parts, count) = match self.within {
            true => (&mut self.behind, &mut self.held),
            false => (&mut self.closed, &mut self.waiting),
        };
        parts.push_back(Part { bytes, is_large });
        *count += length;
    }

    fn waiting(&self) -> usize {
        self.waiting + self.held + self.open.len()
    }
}

/// Bytes that may wait before the sweep stands still: what an agent takes in a few milliseconds.
const FULL_BYTES: usize = 4 << 20;

/// Bytes that may wait at all, besides large values: what clients change while the sweep stands still goes here.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// How long an agent may take nothing: it reads all the time, unless its readers are far too slow for its table.
const STUCK_AFTER: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn what_the_socket_does_not_take_is_kept_in_order_and_framed() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut feed = Feed::new(ours.into());
        let wanted: Vec<u8> = (0..5 << 20).map(|n: u32| (n / 7) as u8).collect();
        for piece in wanted.chunks(100_000) {
            feed.records().extend_from_slice(piece);
            let _ = feed.send(soon()).unwrap();
        }
        assert!(feed.is_full());
        feed.check().unwrap();
        feed.end(77);
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            theirs.read_to_end(&mut bytes).unwrap();
            bytes
        });
        while !feed.send(soon()).unwrap() {}
        drop(feed);
        let (mut frames, mut got, mut keys) = (sweep::Frames::default(), Vec::new(), None);
        for piece in reader.join().unwrap().chunks(1000) {
            frames.take(piece, |records| got.extend_from_slice(records)).unwrap().inspect(|end| keys = Some(*end));
        }
        assert!(got == wanted);
        assert_eq!(keys, Some(77));
    }

    #[test]
    fn parts_of_a_large_record_are_one_frame_between_the_others_and_are_not_the_clients() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut feed = Feed::new(ours.into());
        feed.records().extend_from_slice(b"before ");
        feed.large(vec![b"large ".to_vec(), vec![], vec![b'x'; 40_000]]);
        feed.large(vec![vec![]]);
        feed.records().extend_from_slice(b" behind");
        assert_eq!((feed.large_bytes(), feed.is_full()), (40_006, false));
        assert!(feed.send(soon()).unwrap());
        assert_eq!(feed.large_bytes(), 0);
        feed.large(vec![vec![0; WAITING_BYTES_MAX]]);
        feed.records().extend_from_slice(b"a client's");
        feed.check().unwrap();
        feed.records().extend_from_slice(&vec![0; WAITING_BYTES_MAX]);
        assert!(matches!(feed.check(), Err(FeedError::Slow)));
        drop(feed);
        let mut bytes = Vec::new();
        theirs.read_to_end(&mut bytes).unwrap();
        let (mut frames, mut got) = (sweep::Frames::default(), Vec::new());
        frames.take(&bytes, |records| got.extend_from_slice(records)).unwrap();
        assert!(got.starts_with(b"before large xxx") && got.ends_with(b"x behind"));
    }

    #[test]
    fn what_is_appended_while_a_record_is_sent_in_parts_waits_behind_it() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut feed = Feed::new(ours.into());
        feed.records().extend_from_slice(b"before [");
        feed.begin_parts();
        for part in 0..6_u8 {
            feed.records().extend_from_slice(format!(" client's {part}").as_bytes());
            feed.part(vec![vec![b'0' + part; 10_000], vec![]]);
            assert!(!feed.send(soon()).unwrap(), "what is behind it waits");
            assert_eq!(feed.large_bytes(), 0);
        }
        feed.large(vec![b" another".to_vec()]);
        feed.records().extend_from_slice(&vec![b'x'; FULL_BYTES]);
        assert!(!feed.is_full(), "the record must go on");
        feed.check().unwrap();
        feed.records().extend_from_slice(&vec![b'x'; WAITING_BYTES_MAX]);
        assert!(matches!(feed.check(), Err(FeedError::Behind)));
        feed.part(vec![b"]".to_vec()]);
        feed.end_parts();
        assert!(feed.is_full());
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            theirs.read_to_end(&mut bytes).unwrap();
            bytes
        });
        while !feed.send(Instant::now()).unwrap() {}
        drop(feed);
        let (mut frames, mut got) = (sweep::Frames::default(), Vec::new());
        frames.take(&reader.join().unwrap(), |records| got.extend_from_slice(records)).unwrap();
        let digits: Vec<u8> = (0..6_u8).flat_map(|part| vec![b'0' + part; 10_000]).collect();
        let clients: String = (0..6).map(|part| format!(" client's {part}")).collect();
        let wanted = [b"before [", &digits[..], b"]", clients.as_bytes(), b" another"].concat();
        assert!(got.starts_with(&wanted) && got[wanted.len()..].iter().all(|byte| *byte == b'x'));
    }

    #[test]
    fn an_empty_frame_is_not_taken_for_the_end() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut feed = Feed::new(ours.into());
        let _ = feed.records();
        assert!(feed.send(soon()).unwrap());
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
        assert!(matches!(feed.send(soon()), Err(FeedError::Gone(_))));
    }
}
