//! A key by its content: a fingerprint that is equal on two servers exactly if the key is, whatever their versions and
//! encodings.
//!
//! A `DUMP` is not enough: it contains its version, and a set or hash in the order of a table with a random hash seed.
//! Here ordered types are hashed in their order, and unordered ones as a sum over their elements. Values are read in
//! pieces, so that a value of any size needs little memory.
//!
//! Differences between a primary and its own replica are left out: the shape of trees, idle times, and the number of
//! entries that a group has read where servers do not replicate it ([`Abilities::entries_read`]). A consumer without
//! pending entries may be at one of them alone: an `XREADGROUP` that finds nothing creates it at the primary, no server
//! replicates that, and that primary may be the replica since. Between servers that do not replicate, it is a
//! difference ([`Consumers`]).

use std::{
    collections::BTreeSet,
    time::{SystemTime, UNIX_EPOCH},
};

use remora_redis::resp::Frame;
use remora_wire::printable;
use sha2::{Digest, Sha256};

use super::pair::{Abilities, Side};
use remora_server::ServerError;

/// A key at one moment on one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// The key does not exist.
    Absent,
    /// The key changed its type while it was read.
    Changing,
    Present {
        /// The type, as `TYPE` returns it.
        kind: String,
        /// The fingerprint of the content.
        content: [u8; 32],
        consumers: Consumers,
        expiry: Expiry,
    },
}

/// The consumers of a stream's groups. Those that have pending entries are a part of the content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Consumers {
    /// Fingerprints of group and name.
    names: BTreeSet<[u8; 32]>,
    /// The other server may have others: it replicates this one, or this one it.
    may_differ: bool,
}

impl Consumers {
    /// Whether each server has the consumers that it must have.
    fn agree(&self, other: &Self) -> bool {
        self.may_differ || other.may_differ || self.names == other.names
    }
}

/// When a key expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expiry {
    /// There is no key.
    NoKey,
    Never,
    /// At this time in Unix milliseconds, as the server has it.
    At(i64),
    /// At about this time, computed from the remaining time to live and the local clock.
    About(i64),
}

/// The tolerance between two approximate times: two queries are milliseconds apart, or a slow command.
const ABOUT_MILLISECONDS: u64 = 2_000;

impl Expiry {
    /// The command that queries the expiry.
    pub(super) fn command(abilities: Abilities) -> &'static str {
        if abilities.absolute_expiry { "PEXPIRETIME" } else { "PTTL" }
    }

    /// Parses the answer; `None` if it is not a number.
    pub(super) fn of(frame: &Frame, abilities: Abilities) -> Option<Self> {
        Some(match frame.as_int()? {
            -2 => Self::NoKey,
            -1 => Self::Never,
            at if abilities.absolute_expiry => Self::At(at),
            left => Self::About(unix_milliseconds().saturating_add(left)),
        })
    }

    /// Whether both are the same, as precisely as they are known.
    pub(super) fn agrees(self, other: Self) -> bool {
        match (self, other) {
            (Self::About(one), Self::About(other)) => one.abs_diff(other) <= ABOUT_MILLISECONDS,
            (one, other) => one == other,
        }
    }
}

impl Look {
    /// Whether both are the same key. A key that was changing is not equal to any other.
    pub(super) fn agrees(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Absent, Self::Absent) => true,
            (Self::Present { kind, expiry, .. }, Self::Present { kind: other_kind, expiry: other_expiry, .. }) => {
                kind == other_kind && self.same_value(other) && expiry.agrees(*other_expiry)
            }
            _ => false,
        }
    }

    /// Whether both are keys with the same value.
    pub(super) fn same_value(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Present { content, consumers, .. },
                Self::Present { content: other_content, consumers: other_consumers, .. },
            ) => content == other_content && consumers.agree(other_consumers),
            _ => false,
        }
    }
}

/// Reads `key` in the selected database of `side`.
pub(super) async fn look(side: &mut Side, abilities: Abilities, key: &[u8]) -> Result<Look, ServerError> {
    let kind = match side.client.command(&[b"TYPE", key]).await?.as_str() {
        Some("none") | None => return Ok(Look::Absent),
        // A module names its types, and the name is shown.
        Some(kind) => printable(kind).into_owned(),
    };
    let consumers = Consumers { names: BTreeSet::new(), may_differ: side.is_replicated };
    let mut reader = Reader { side, abilities, key, stride: Stride::default(), consumers };
    let content = match reader.content(&kind).await {
        Ok(content) => content,
        Err(ServerError::Refused { text, .. }) if GONE.iter().any(|words| text.starts_with(words)) => {
            return Ok(Look::Changing);
        }
        Err(error) => return Err(error),
    };
    let consumers = reader.consumers;
    let answer = side.client.command(&[Expiry::command(abilities).as_bytes(), key]).await?;
    match Expiry::of(&answer, abilities) {
        Some(Expiry::NoKey) => Ok(Look::Absent),
        Some(expiry) => Ok(Look::Present { kind, content, consumers, expiry }),
        None => Err(side.client.unexpected("PEXPIRETIME", &answer)),
    }
}

struct Reader<'a> {
    side: &'a mut Side,
    abilities: Abilities,
    key: &'a [u8],
    stride: Stride,
    /// The consumers of the groups that were read.
    consumers: Consumers,
}

impl Reader<'_> {
    async fn content(&mut self, kind: &str) -> Result<[u8; 32], ServerError> {
        match kind {
            "string" => self.string().await,
            "list" => self.list().await,
            "set" => self.set().await,
            "zset" => self.sorted_set().await,
            "hash" => self.hash().await,
            "stream" => self.stream().await,
            _ => self.foreign().await,
        }
    }

    async fn string(&mut self) -> Result<[u8; 32], ServerError> {
        let mut hash = Sha256::new();
        let mut begin = 0;
        loop {
            let end = begin + STRING_PIECE - 1;
            let piece = self.ask("GETRANGE", &[&begin.to_string(), &end.to_string()]).await?;
            let bytes = piece.as_bytes().unwrap_or_default();
            hash.update(bytes);
            if (bytes.len() as u64) < STRING_PIECE {
                return Ok(hash.finalize().into());
            }
            begin += STRING_PIECE;
        }
    }

    async fn list(&mut self) -> Result<[u8; 32], ServerError> {
        let mut hash = Sha256::new();
        let mut begin = 0;
        loop {
            let count = self.stride.count;
            let items = self.ask_list("LRANGE", &[&begin.to_string(), &(begin + count - 1).to_string()]).await?;
            items.iter().for_each(|item| absorb(&mut hash, item));
            if (items.len() as u64) < count {
                return Ok(hash.finalize().into());
            }
            begin += count;
        }
    }

    async fn sorted_set(&mut self) -> Result<[u8; 32], ServerError> {
        let mut hash = Sha256::new();
        let mut begin = 0;
        loop {
            let count = self.stride.count;
            let end = (begin + count - 1).to_string();
            let items = self.ask_list("ZRANGE", &[&begin.to_string(), &end, "WITHSCORES"]).await?;
            for pair in items.chunks_exact(2) {
                if let [member, score] = pair {
                    absorb(&mut hash, member);
                    absorb_score(&mut hash, score);
                }
            }
            if (items.len() as u64) < 2 * count {
                return Ok(hash.finalize().into());
            }
            begin += count;
        }
    }

    async fn set(&mut self) -> Result<[u8; 32], ServerError> {
        let mut sum = Sum::default();
        let mut cursor = START.to_vec();
        loop {
            let (next, members) = self.scan("SSCAN", &cursor).await?;
            for member in &members {
                sum.add(|hash| absorb(hash, member));
            }
            if next == START {
                return Ok(sum.finish());
            }
            cursor = next;
        }
    }

    async fn hash(&mut self) -> Result<[u8; 32], ServerError> {
        let mut sum = Sum::default();
        let mut cursor = START.to_vec();
        loop {
            let (next, items) = self.scan("HSCAN", &cursor).await?;
            let expiries = self.field_expiries(&items).await?;
            for (index, pair) in items.chunks_exact(2).enumerate() {
                sum.add(|hash| {
                    pair.iter().for_each(|item| absorb(hash, item));
                    hash.update(expiries.get(index).copied().unwrap_or(-1).to_le_bytes());
                });
            }
            if next == START {
                return Ok(sum.finish());
            }
            cursor = next;
        }
    }

    /// When each of the fields (every other one of `items`) expires; empty if the server knows no such thing: then none
    /// of them does.
    async fn field_expiries(&mut self, items: &[Frame]) -> Result<Vec<i64>, ServerError> {
        let fields: Vec<_> = items.iter().step_by(2).filter_map(Frame::as_bytes).collect();
        if !self.side.expires_fields || fields.is_empty() {
            return Ok(Vec::new());
        }
        let mut expiries = Vec::with_capacity(fields.len());
        for few in fields.chunks(FIELDS_AT_ONCE) {
            let count = few.len().to_string();
            let mut words: Vec<&[u8]> = vec![b"HPEXPIRETIME", self.key, b"FIELDS", count.as_bytes()];
            words.extend(few);
            let answer = self.command(&words).await?;
            let answers = answer.as_array().unwrap_or_default();
            // A hash that is gone by now has no answers; those of the other fields stay where they are.
            expiries.extend((0..few.len()).map(|at| answers.get(at).and_then(Frame::as_int).unwrap_or(-1)));
        }
        Ok(expiries)
    }

    async fn stream(&mut self) -> Result<[u8; 32], ServerError> {
        let mut hash = Sha256::new();
        let about = self.command(&[b"XINFO", b"STREAM", self.key]).await?;
        absorb_fields(&mut hash, &about, self.stream_fields());
        let mut begin = String::from("-");
        loop {
            let count = self.stride.count;
            let entries = self.ask_list("XRANGE", &[&begin, "+", "COUNT", &count.to_string()]).await?;
            entries.iter().for_each(|entry| absorb(&mut hash, entry));
            match next_id(&entries, 0) {
                Some(next) if entries.len() as u64 == count => begin = next,
                _ => break,
            }
        }
        self.groups(&mut hash).await?;
        Ok(hash.finalize().into())
    }

    async fn groups(&mut self, hash: &mut Sha256) -> Result<(), ServerError> {
        let groups = self.command(&[b"XINFO", b"GROUPS", self.key]).await?;
        for group in groups.as_array().unwrap_or_default() {
            absorb_fields(hash, group, GROUP_FIELDS);
            if self.abilities.entries_read {
                absorb_fields(hash, group, &["entries-read"]);
            }
            let Some(name) = field(group, "name").and_then(Frame::as_bytes) else {
                continue;
            };
            self.pending(name, hash).await?;
            self.consumers_of(name).await?;
        }
        Ok(())
    }

    /// The names of a group's consumers.
    async fn consumers_of(&mut self, group: &[u8]) -> Result<(), ServerError> {
        let consumers = self.command(&[b"XINFO", b"CONSUMERS", self.key, group]).await?;
        for consumer in consumers.as_array().unwrap_or_default() {
            let mut hash = Sha256::new();
            hash.update((group.len() as u64).to_le_bytes());
            hash.update(group);
            absorb_fields(&mut hash, consumer, &["name"]);
            self.consumers.names.insert(hash.finalize().into());
        }
        Ok(())
    }

    /// Entries that are delivered and not acknowledged: id, consumer and number of deliveries. Their idle time is left
    /// out, as it grows.
    async fn pending(&mut self, group: &[u8], hash: &mut Sha256) -> Result<(), ServerError> {
        let mut begin = String::from("-");
        loop {
            let count = PENDING_PIECE.to_string();
            let words: [&[u8]; 6] = [b"XPENDING", self.key, group, begin.as_bytes(), b"+", count.as_bytes()];
            let answer = self.command(&words).await?;
            let entries = answer.as_array().unwrap_or_default();
            for entry in entries {
                if let Some([id, consumer, _idle, deliveries]) = entry.as_array() {
                    [id, consumer, deliveries].into_iter().for_each(|part| absorb(hash, part));
                }
            }
            match next_id(entries, 0) {
                Some(next) if entries.len() == PENDING_PIECE => begin = next,
                _ => return Ok(()),
            }
        }
    }

    /// The content of a module's type: only its dump is known.
    async fn foreign(&mut self) -> Result<[u8; 32], ServerError> {
        let answer = self.ask("DUMP", &[]).await?;
        Ok(Sha256::digest(body_of_dump(answer.as_bytes().unwrap_or_default())).into())
    }

    fn stream_fields(&self) -> &'static [&'static str] {
        match self.abilities.stream_counters {
            true => &["length", "last-generated-id", "max-deleted-entry-id", "entries-added"],
            false => &["length", "last-generated-id"],
        }
    }

    async fn ask(&mut self, command: &str, rest: &[&str]) -> Result<Frame, ServerError> {
        let mut words: Vec<&[u8]> = vec![command.as_bytes(), self.key];
        words.extend(rest.iter().map(|word| word.as_bytes()));
        self.command(&words).await
    }

    async fn command(&mut self, words: &[&[u8]]) -> Result<Frame, ServerError> {
        self.side.client.command(words).await
    }

    async fn ask_list(&mut self, command: &str, rest: &[&str]) -> Result<Vec<Frame>, ServerError> {
        let answer = self.ask(command, rest).await?;
        let items = answer.into_array().map_err(|other| self.side.client.unexpected(command, &other))?;
        self.stride.learn(&items);
        Ok(items)
    }

    /// One step of `SSCAN` or `HSCAN`: returns the next cursor and the elements.
    async fn scan(&mut self, command: &str, cursor: &[u8]) -> Result<(Vec<u8>, Vec<Frame>), ServerError> {
        let count = self.stride.count.to_string();
        let words: [&[u8]; 5] = [command.as_bytes(), self.key, cursor, b"COUNT", count.as_bytes()];
        let answer = self.command(&words).await?;
        let (next, items) = scan_answer(answer).map_err(|other| self.side.client.unexpected(command, &other))?;
        self.stride.learn(&items);
        Ok((next, items))
    }
}

/// Splits the answer of a scanning command.
pub(super) fn scan_answer(answer: Frame) -> Result<(Vec<u8>, Vec<Frame>), Frame> {
    match answer {
        Frame::Array(parts) => match <[Frame; 2]>::try_from(parts) {
            Ok([Frame::Bulk(cursor), Frame::Array(items)]) => Ok((cursor, items)),
            Ok(other) => Err(Frame::Array(other.into())),
            Err(parts) => Err(Frame::Array(parts)),
        },
        other => Err(other),
    }
}

/// A dump without its last ten bytes: two of version and eight of checksum, which differ between servers of different
/// versions.
pub(super) fn body_of_dump(dump: &[u8]) -> &[u8] {
    dump.len().checked_sub(DUMP_FOOT_BYTES).and_then(|end| dump.get(..end)).unwrap_or(dump)
}

/// How many elements to request at once: more if they are small, fewer if they are large.
#[derive(Debug)]
struct Stride {
    count: u64,
}

impl Default for Stride {
    fn default() -> Self {
        Self { count: 16 }
    }
}

impl Stride {
    fn learn(&mut self, items: &[Frame]) {
        match items.iter().map(bytes_in).sum::<usize>() {
            0..SMALL_PIECE => self.count = (self.count * 4).min(MOST_ELEMENTS),
            LARGE_PIECE.. => self.count = (self.count / 4).max(1),
            _ => {}
        }
    }
}

/// A sum of fingerprints, so that the order of the elements has no effect.
#[derive(Default)]
struct Sum {
    total: [u64; 4],
    count: u64,
}

impl Sum {
    fn add(&mut self, element: impl FnOnce(&mut Sha256)) {
        let mut hash = Sha256::new();
        element(&mut hash);
        let digest: [u8; 32] = hash.finalize().into();
        for (lane, bytes) in self.total.iter_mut().zip(digest.as_chunks::<8>().0) {
            *lane = lane.wrapping_add(u64::from_le_bytes(*bytes));
        }
        self.count += 1;
    }

    fn finish(self) -> [u8; 32] {
        let mut hash = Sha256::new();
        self.total.into_iter().chain([self.count]).for_each(|lane| hash.update(lane.to_le_bytes()));
        hash.finalize().into()
    }
}

/// Hashes a frame so that different frames never hash the same bytes: kind, length, content.
fn absorb(hash: &mut Sha256, frame: &Frame) {
    let mut tagged = |kind: u8, bytes: &[u8]| {
        hash.update([kind]);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    match frame {
        Frame::Simple(bytes) | Frame::Bulk(bytes) => tagged(b'$', bytes),
        Frame::Error(bytes) => tagged(b'-', bytes),
        Frame::Integer(number) => tagged(b':', &number.to_le_bytes()),
        Frame::Null => tagged(b'_', b""),
        Frame::Array(items) => {
            tagged(b'*', &(items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| absorb(hash, item));
        }
    }
}

/// Hashes a score by its value: servers of different versions print the same score with different digits.
fn absorb_score(hash: &mut Sha256, score: &Frame) {
    match score.as_str().and_then(|text| text.parse::<f64>().ok()) {
        Some(value) => hash.update(value.to_le_bytes()),
        None => absorb(hash, score),
    }
}

fn absorb_fields(hash: &mut Sha256, frame: &Frame, names: &[&str]) {
    for name in names {
        absorb(hash, field(frame, name).unwrap_or(&Frame::Null));
    }
}

/// The value of a field in a flat list of names and values.
fn field<'a>(frame: &'a Frame, name: &str) -> Option<&'a Frame> {
    let mut pairs = frame.as_array()?.chunks_exact(2);
    pairs.find(|pair| pair.first().and_then(Frame::as_str) == Some(name)).and_then(|pair| pair.get(1))
}

/// The id at which the next page begins: the one after that of the last entry.
fn next_id(entries: &[Frame], place: usize) -> Option<String> {
    let id = entries.last()?.as_array()?.get(place)?.as_str()?;
    Some(format!("({id}"))
}

fn bytes_in(frame: &Frame) -> usize {
    match frame {
        Frame::Simple(bytes) | Frame::Error(bytes) | Frame::Bulk(bytes) => bytes.len(),
        Frame::Integer(_) | Frame::Null => 0,
        Frame::Array(items) => items.iter().map(bytes_in).sum(),
    }
}

fn unix_milliseconds() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Error replies if a key, or a group in it, was deleted or changed its type between two queries.
const GONE: [&str; 3] = ["WRONGTYPE", "NOGROUP", "ERR no such key"];
/// Without the lag, which follows from what else is compared.
const GROUP_FIELDS: &[&str] = &["name", "pending", "last-delivered-id"];
/// The cursor at which a scan begins, and which the server returns at its end.
const START: &[u8] = b"0";
/// Bytes at the end of a dump: version and CRC-64.
const DUMP_FOOT_BYTES: usize = 10;
/// Bytes of a string that one query requests.
const STRING_PIECE: u64 = 4 << 20;
/// Fields whose expiry one query requests. In a listpack the server looks for each of them from its beginning: all
/// those of a hash of tens of thousands at once would keep it busy for a minute.
const FIELDS_AT_ONCE: usize = 256;
/// Pending entries that one query requests; each has some hundred bytes.
const PENDING_PIECE: usize = 1000;
/// An answer with fewer bytes is hardly worth its round trip.
const SMALL_PIECE: usize = 256 << 10;
/// An answer with more bytes delays the server's other clients noticeably.
const LARGE_PIECE: usize = 4 << 20;
/// The most elements that one query requests: a server returns them without a noticeable pause for its other clients.
const MOST_ELEMENTS: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn word(text: &str) -> Frame {
        Frame::Bulk(text.into())
    }

    fn digest(frames: &[Frame]) -> Vec<u8> {
        let mut hash = Sha256::new();
        frames.iter().for_each(|frame| absorb(&mut hash, frame));
        hash.finalize().to_vec()
    }

    fn sum(words: &[&str]) -> [u8; 32] {
        let mut sum = Sum::default();
        words.iter().for_each(|text| sum.add(|hash| absorb(hash, &word(text))));
        sum.finish()
    }

    #[test]
    fn where_one_element_ends_and_the_next_begins_matters() {
        assert_ne!(digest(&[word("ab"), word("c")]), digest(&[word("a"), word("bc")]));
        assert_ne!(digest(&[word("")]), digest(&[Frame::Null]));
        assert_ne!(digest(&[Frame::Array(vec![word("a")])]), digest(&[word("a")]));
    }

    #[test]
    fn a_sum_knows_no_order_but_every_element() {
        assert_eq!(sum(&["a", "b", "c"]), sum(&["c", "a", "b"]));
        assert_ne!(sum(&["a", "b"]), sum(&["a", "c"]));
        assert_ne!(sum(&["a"]), sum(&["a", "a"]));
        assert_ne!(sum(&[]), sum(&[""]));
    }

    #[test]
    fn scores_count_by_value_and_not_by_digits() {
        let score = |text: &str| {
            let mut hash = Sha256::new();
            absorb_score(&mut hash, &word(text));
            hash.finalize()
        };
        assert_eq!(score("0.1"), score("0.10000000000000001"));
        assert_eq!(score("inf"), score("Infinity"));
        assert_ne!(score("0.1"), score("0.2"));
    }

    #[test]
    fn lives_left_agree_within_seconds_and_times_exactly() {
        assert!(Expiry::About(10_000).agrees(Expiry::About(11_999)));
        assert!(!Expiry::About(10_000).agrees(Expiry::About(12_001)));
        assert!(!Expiry::At(10_000).agrees(Expiry::At(10_001)));
        assert!(!Expiry::Never.agrees(Expiry::At(1)));
    }

    #[test]
    fn the_stride_grows_with_small_elements_and_shrinks_with_large_ones() {
        let mut stride = Stride::default();
        for _ in 0..9 {
            stride.learn(&[word("x")]);
        }
        assert_eq!(stride.count, MOST_ELEMENTS);
        for _ in 0..9 {
            stride.learn(&[Frame::Bulk(vec![0; LARGE_PIECE])]);
        }
        assert_eq!(stride.count, 1);
    }

    #[test]
    fn a_changing_key_agrees_with_nothing() {
        assert!(!Look::Changing.agrees(&Look::Changing));
        assert!(Look::Absent.agrees(&Look::Absent));
    }

    #[test]
    fn servers_that_replicate_may_have_other_consumers() {
        let consumers =
            |names: &[u8], may_differ| Consumers { names: names.iter().map(|name| [*name; 32]).collect(), may_differ };
        for (one, other) in [(&[1, 2][..], &[1][..]), (&[1], &[1, 2]), (&[1], &[2])] {
            assert!(consumers(one, true).agree(&consumers(other, false)));
            assert!(consumers(one, false).agree(&consumers(other, true)));
            assert!(!consumers(one, false).agree(&consumers(other, false)), "the servers do not replicate");
        }
        assert!(consumers(&[], false).agree(&Consumers::default()));
    }

    #[test]
    fn a_dump_too_short_for_a_foot_is_all_body() {
        assert_eq!(body_of_dump(b"abcdefghijk"), b"a");
        assert_eq!(body_of_dump(b"abc"), b"abc");
    }
}
