//! The bytes of a sweep on their way to the agent: kept until its socket takes them; and where a sweep is. Nothing here
//! waits.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
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

// Where a sweep is, and which keys need nothing more. Pure: places and names in, decisions out.
//
// A server's scan goes through a table in the order of the keys' hashes *with their bits reversed*: the key's
// **place**. So one number says which keys of a database the sweep has passed, however the table grows and shrinks
// meanwhile. Before a command changes a key that lies ahead, the key is *settled*: if it exists, its record is written
// at once, as it was at the beginning; if not, it was not there at the beginning either. The sweep leaves settled keys
// out.
//
// ```text
//   database 0            database 3                     database 5
//   ███████████████████   ███████████████▌ · · s · s ·   · · s · · · · · s · ·      s: settled
//        passed                          └ position               ahead
// ```
//
// A name is settled in all databases ahead at once: a filter of commands does not know in which one a client is.

/// Where a key is in the order of the sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64);

impl Place {
    pub(super) fn of_hash(hash: u64) -> Place {
        Place(hash.reverse_bits())
    }

    /// Where the step after this one begins, by the cursor of the scan. `None` if there is no such step.
    pub(super) fn of_cursor(cursor: u64) -> Option<Place> {
        (cursor != 0).then(|| Place(cursor.reverse_bits()))
    }
}

/// A database that had keys at the beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Database {
    pub(super) number: u32,
    /// Keys at the beginning.
    pub(super) keys: u64,
    /// Keys whose records are written.
    pub(super) recorded: u64,
}

/// A sweep's way through the databases.
#[derive(Clone, Debug)]
pub(super) struct Course {
    databases: Vec<Database>,
    /// The database that is being swept. Beyond the last one at the end.
    at: usize,
    /// Keys of that database before this place are passed.
    position: Place,
    /// Names whose keys are settled in every database ahead.
    settled: BTreeSet<(Place, Box<[u8]>)>,
    settled_bytes: usize,
}

/// Why the sweep cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Astray {
    #[error("a step of the scan showed a key beyond its end: this server scans in another order")]
    Beyond,
    #[error("a step of the scan did not go forward")]
    Backward,
    #[error("clients have written to more keys ahead of the sweep than it keeps the names of ({} MiB)", SETTLED_BYTES_MAX >> 20)]
    TooManySettled,
    #[error("of {keys} keys {recorded} were recorded, and no more than {gone} can have expired")]
    Miscounted { keys: u64, recorded: u64, gone: u64 },
}

impl Course {
    /// A sweep through these databases, and the keys that they have now.
    pub(super) fn new(databases: impl IntoIterator<Item = (u32, u64)>) -> Course {
        let databases = databases.into_iter().filter(|(_, keys)| *keys > 0);
        let databases = databases.map(|(number, keys)| Database { number, keys, recorded: 0 }).collect();
        Course { databases, at: 0, position: Place(0), settled: BTreeSet::new(), settled_bytes: 0 }
    }

    pub(super) fn databases(&self) -> &[Database] {
        &self.databases
    }

    /// The database to take the next step in, by its index and its number. `None` at the end.
    pub(super) fn current(&self) -> Option<(usize, u32)> {
        self.databases.get(self.at).map(|database| (self.at, database.number))
    }

    /// A command is about to change this key: the databases, by their index, in which it must be recorded now if it
    /// exists there. The key is settled from now on.
    pub(super) fn settle(&mut self, place: Place, name: &[u8]) -> Result<Range<usize>, Astray> {
        let ahead = if place < self.position { self.at + 1 } else { self.at };
        if ahead >= self.databases.len() {
            return Ok(0..0);
        }
        if !self.settled.insert((place, name.into())) {
            return Ok(0..0);
        }
        self.settled_bytes += name.len() + ENTRY_BYTES;
        if self.settled_bytes > SETTLED_BYTES_MAX {
            return Err(Astray::TooManySettled);
        }
        Ok(ahead..self.databases.len())
    }

    /// Whether a key that a step has shown is to be recorded. `next`: where the step after it begins. A key that is
    /// already passed is shown again after its table has shrunk.
    pub(super) fn shown(&self, place: Place, name: &[u8], next: Option<Place>) -> Result<bool, Astray> {
        if next.is_some_and(|next| place >= next) {
            return Err(Astray::Beyond);
        }
        Ok(place >= self.position && (self.settled.is_empty() || !self.settled.contains(&(place, name.into()))))
    }

    /// The key of that database has been recorded.
    pub(super) fn recorded(&mut self, index: usize) {
        if let Some(database) = self.databases.get_mut(index) {
            database.recorded += 1;
        }
    }

    /// All keys of a step are recorded, and the next one begins there.
    pub(super) fn passed(&mut self, next: Option<Place>) -> Result<(), Astray> {
        match next {
            Some(next) if next <= self.position => return Err(Astray::Backward),
            Some(next) => self.position = next,
            None => {
                self.at += 1;
                self.position = Place(0);
            }
        }
        self.forget();
        Ok(())
    }

    /// Forgets settled names that the sweep has passed in the last database.
    fn forget(&mut self) {
        if self.at >= self.databases.len() {
            self.settled.clear();
            self.settled_bytes = 0;
        } else if self.at + 1 == self.databases.len() {
            while let Some(first) = self.settled.first()
                && first.0 < self.position
            {
                let gone = self.settled.pop_first();
                self.settled_bytes -= gone.map_or(0, |(_, name)| name.len() + ENTRY_BYTES);
            }
        }
    }

    /// Checks at the end that every key of the beginning was recorded, but for the `gone` that the server has removed
    /// since because they had expired. Databases are checked together: a server counts them together.
    pub(super) fn check(&self, gone: u64) -> Result<(), Astray> {
        let keys = self.databases.iter().map(|database| database.keys).sum();
        let recorded: u64 = self.databases.iter().map(|database| database.recorded).sum();
        let too_many = self.databases.iter().any(|database| database.recorded > database.keys);
        if too_many || recorded.saturating_add(gone) < keys {
            return Err(Astray::Miscounted { keys, recorded, gone });
        }
        Ok(())
    }
}

/// Bytes of one settled name besides its own: the place, the slice, the allocation and its part of the tree.
const ENTRY_BYTES: usize = 64;

/// The most bytes of settled names: half a million keys of some 60 bytes. Beyond that the server's memory would grow by
/// more than the fork's way costs that servers of this size fear.
const SETTLED_BYTES_MAX: usize = 64 << 20;

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

    const MIDDLE: Place = Place(1 << 63);

    #[test]
    fn a_key_behind_the_sweep_needs_nothing_and_one_ahead_is_settled_once() {
        let mut course = Course::new([(0, 1), (1, 0), (2, 1)]);
        course.passed(Some(MIDDLE)).unwrap();
        assert_eq!(course.settle(Place(5), b"behind").unwrap(), 1..2, "it may be in the database ahead");
        assert_eq!(course.settle(MIDDLE, b"ahead").unwrap(), 0..2);
        assert_eq!(course.settle(MIDDLE, b"ahead").unwrap(), 0..0);
        assert!(!course.shown(MIDDLE, b"ahead", None).unwrap());
        assert!(course.shown(MIDDLE, b"another", None).unwrap());
        assert!(!course.shown(Place(5), b"shown again", None).unwrap());
        course.passed(None).unwrap();
        assert_eq!(course.current(), Some((1, 2)));
        assert!(!course.shown(Place(5), b"behind", Some(MIDDLE)).unwrap(), "it is settled here too");
        course.passed(Some(MIDDLE)).unwrap();
        assert_eq!(course.settled.len(), 1, "what the sweep has passed is forgotten");
        course.passed(None).unwrap();
        assert_eq!((course.current(), course.settled_bytes), (None, 0));
        assert_eq!(course.settle(MIDDLE, b"after the end").unwrap(), 0..0);
    }

    #[test]
    fn a_scan_in_another_order_is_noticed() {
        let mut course = Course::new([(0, 10)]);
        assert_eq!(course.shown(MIDDLE, b"key", Some(MIDDLE)), Err(Astray::Beyond));
        course.passed(Some(MIDDLE)).unwrap();
        assert_eq!(course.passed(Some(MIDDLE)), Err(Astray::Backward));
    }

    #[test]
    fn a_key_that_is_missing_or_recorded_twice_is_noticed() {
        let mut course = Course::new([(0, 2), (1, 1)]);
        course.recorded(0);
        course.recorded(1);
        assert_eq!(course.check(0), Err(Astray::Miscounted { keys: 3, recorded: 2, gone: 0 }));
        course.check(1).unwrap();
        course.recorded(1);
        assert!(course.check(1).is_err(), "twice in the second database");
    }

    #[test]
    fn names_that_are_kept_have_a_bound() {
        let mut course = Course::new([(0, 1)]);
        let name = vec![0; SETTLED_BYTES_MAX];
        assert_eq!(course.settle(MIDDLE, &name), Err(Astray::TooManySettled));
    }
}
