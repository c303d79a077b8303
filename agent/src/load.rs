//! `remora load`: fills a server with test data, as fast as one connection allows.
//!
//! ```text
//!   Content ──bytes of key i──▶ Writer ──commands, flushed per half megabyte──▶ server
//!   seed, i                        ▲ └── owed replies, read when there are too many ──┘
//! ```
//!
//! The content of a key depends on the seed and the key's number only. So two runs, or two servers, get the same data
//! with any pipeline depth. No value is ever complete in memory: it is generated piece by piece in the buffer that is
//! sent.

use std::fmt::Write as _;
use std::ops::Range;
use std::time::Duration;

use crate::args::{LoadArgs, ValueType};
use crate::exit::{Code, Failure};
use crate::exit::{Patience, RETRY_FOR};
use crate::progress::{self, Meter, Unit};
use crate::server::{Client, Facts, Server, ServerError, Task};
use crate::units::{Size, counted, readable};

/// Runs `remora load`.
pub async fn run(args: LoadArgs) -> Result<(), Failure> {
    let server = args.server.open(Task::Load)?;
    let mut patience = Patience::new(args.retry_for, RETRY_FOR);
    let client = patience.keep_trying(async || ready(&server, args.db).await).await?;
    let bytes = args.keys.saturating_mul(args.value_size.get());
    let meter = Meter::start("load", Unit::Bytes, Some(bytes));
    let mut writer = Writer::new(client, args.pipeline);
    let keys = Keys::new(&args);
    for number in 0..args.keys {
        keys.write(number, &mut writer, &meter).await?;
    }
    writer.finish().await?;
    let (seconds, elapsed) = (meter.elapsed().as_secs_f64().max(f64::EPSILON), meter.elapsed());
    meter.finish();
    progress::print_line(&format!(
        "{}, {} in {}: {:.0} keys/s, {}/s",
        counted(args.keys, "key"),
        Size::bytes(bytes),
        readable(elapsed),
        args.keys as f64 / seconds,
        Size::bytes((bytes as f64 / seconds) as u64),
    ))
}

/// A connection to the server, which has loaded and accepts commands.
async fn ready(server: &Server, database: Option<u32>) -> Result<Client, Failure> {
    let mut client = server.connect().await?;
    // A user without the right to ask is not told of the state, and finds it out by the first write.
    match Facts::read(&mut client).await {
        Ok(facts) if facts.loading == Some(true) => {
            let text = format!("the server {} is loading its data set (-LOADING)", server.url());
            return Err(Failure::passing(Code::Server, text));
        }
        Err(error) if error.is_passing() => return Err(error.into()),
        _ => {}
    }
    if let Some(database) = database {
        client.select(database).await?;
    }
    Ok(client)
}

// Generates bytes that look like data, faster than any server stores them.
//
// xoshiro256++ (Blackman and Vigna), eight bytes per step, seeded through SplitMix64 as its authors advise. It is not
// for secrets.

/// What the bytes look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// Random: nothing makes them smaller.
    Random,
    /// Patterns that repeat: the servers' own compressor makes a quarter of them.
    Repeating,
    /// Records as applications store them, in JSON.
    Json,
}

/// The bytes of one key. The stream is the same for the same seed and key.
#[derive(Clone, Debug)]
struct Content {
    state: [u64; 4],
    look: Look,
    /// The record that is being written, and how much of it was.
    record: String,
    written: usize,
}

impl Content {
    /// The stream of key `number` for `seed`.
    fn of(seed: u64, number: u64, look: Look) -> Self {
        let mut mixer = seed ^ number.wrapping_mul(GOLDEN_RATIO).rotate_left(32);
        // Each word is from a step of its own, so they are never all zero: the generator cannot leave that state.
        let state = [(); 4].map(|()| split_mix(&mut mixer));
        Self { state, look, record: String::new(), written: 0 }
    }

    /// The next random number.
    fn next(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// Fills `buffer` with the next bytes.
    fn fill(&mut self, buffer: &mut [u8]) {
        match self.look {
            Look::Random => self.fill_random(buffer),
            Look::Repeating => self.fill_repeating(buffer),
            Look::Json => self.fill_json(buffer),
        }
    }

    fn fill_json(&mut self, mut buffer: &mut [u8]) {
        while !buffer.is_empty() {
            if self.written == self.record.len() {
                self.next_record();
            }
            let rest = self.record.as_bytes().get(self.written..).unwrap_or_default();
            let length = rest.len().min(buffer.len());
            let (now, later) = buffer.split_at_mut(length);
            now.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            self.written += length;
            buffer = later;
        }
    }

    /// A record of some 250 bytes, a third of them as random as in an application: numbers, times, names, a session.
    fn next_record(&mut self) {
        let (id, session, when, amounts, words) = (self.next(), self.next(), self.next(), self.next(), self.next());
        let word = |at: u32| WORDS[(words >> (8 * at)) as usize % WORDS.len()];
        let part = |at: u32, below: u64| (when >> (8 * at) & 0xff) % below;
        self.record.clear();
        self.written = 0;
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.record,
            "{{\"id\":{},\"session\":\"{session:016x}\",\"name\":\"{} {}\",\"email\":\"{}.{}@example.org\",\"country\":\"{}\",\
             \"created\":\"2026-{:02}-{:02}T{:02}:{:02}:{:02}Z\",\"balance\":{}.{:02},\"visits\":{},\"active\":{},\
             \"tags\":[\"{}\",\"{}\"],\"address\":{{\"street\":\"{} street\",\"number\":{}}}}}",
            id % 10_000_000_000,
            word(0),
            word(1),
            word(0),
            word(1),
            COUNTRIES[(amounts >> 40) as usize % COUNTRIES.len()],
            1 + part(0, 12),
            1 + part(1, 28),
            part(2, 24),
            part(3, 60),
            part(4, 60),
            amounts % 100_000,
            (amounts >> 20) % 100,
            (amounts >> 30) % 1000,
            amounts >> 63 == 1,
            word(2),
            word(3),
            word(4),
            1 + part(5, 200),
        );
    }

    fn fill_random(&mut self, buffer: &mut [u8]) {
        let mut words = buffer.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        let rest = words.into_remainder();
        let last = self.next().to_le_bytes();
        rest.iter_mut().zip(last).for_each(|(to, from)| *to = from);
    }

    fn fill_repeating(&mut self, buffer: &mut [u8]) {
        for block in buffer.chunks_mut(PATTERN_BYTES * PATTERN_REPEATS) {
            let mut pattern = [0; PATTERN_BYTES];
            self.fill_random(&mut pattern);
            block.iter_mut().zip(pattern.iter().cycle()).for_each(|(to, from)| *to = *from);
        }
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(GOLDEN_RATIO);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Words of names and tags.
const WORDS: [&str; 32] = [
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "hazel", "inlet", "jasper", "kestrel", "lagoon",
    "maple", "north", "ocean", "pepper", "quartz", "river", "summit", "tundra", "umber", "valley", "willow", "yarrow",
    "zephyr", "anchor", "beacon", "canyon", "drift", "estuary", "falcon", "glacier",
];

const COUNTRIES: [&str; 8] = ["AT", "BR", "CA", "DE", "FR", "IN", "JP", "ZA"];

const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// The servers' compressor (LZF) writes a pattern of 16 bytes as 17 bytes and each run of repetitions as 3: 20 of 80
/// bytes, a quarter.
const PATTERN_BYTES: usize = 16;
const PATTERN_REPEATS: usize = 5;

// The commands that create a key of each type with an exact number of bytes.
//
// Collections are deleted first, because their commands add; `SET` replaces a string. Elements have about 64 bytes, so
// that both compact and full encodings occur as sizes grow. They begin with their number, so that no two are the same.

/// Elements in one command: enough that the cost of commands does not matter, few enough that no server stalls on one.
const ELEMENTS_PER_COMMAND: usize = 512;

/// Bytes of an element. The remaining bytes of a key are spread over all of its elements.
const ELEMENT_BYTES: usize = 64;

/// The types that `mixed` takes in turn.
const TURN: [ValueType; 6] =
    [ValueType::String, ValueType::List, ValueType::Set, ValueType::Zset, ValueType::Hash, ValueType::Stream];

/// The keys to create.
struct Keys {
    prefix: String,
    seed: u64,
    size: usize,
    value_type: ValueType,
    expire: Option<Duration>,
    look: Look,
}

impl Keys {
    fn new(args: &LoadArgs) -> Self {
        Self {
            prefix: args.prefix.clone(),
            seed: args.seed,
            // The command line accepts at most 512 MiB.
            size: usize::try_from(args.value_size.get()).unwrap_or(usize::MAX),
            value_type: args.value_type,
            expire: args.expire,
            look: match (args.compressible, args.json) {
                (true, _) => Look::Repeating,
                (_, true) => Look::Json,
                _ => Look::Random,
            },
        }
    }

    /// Writes key `number`.
    async fn write(&self, number: u64, writer: &mut Writer, meter: &Meter) -> Result<(), ServerError> {
        let key = format!("{}:{number}", self.prefix);
        let mut content = Content::of(self.seed, number, self.look);
        match type_of(self.value_type, number) {
            ValueType::String => self.string(&key, &mut content, writer).await?,
            collection => self.collection(&key, collection, &mut content, writer).await?,
        }
        meter.add(self.size as u64);
        Ok(())
    }

    async fn string(&self, key: &str, content: &mut Content, writer: &mut Writer) -> Result<(), ServerError> {
        writer.begin(if self.expire.is_some() { 5 } else { 3 }).await?;
        writer.word(b"SET");
        writer.word(key.as_bytes());
        writer.content(b"", self.size, content).await?;
        if let Some(expire) = self.expire {
            writer.word(b"PX");
            writer.text(expire.as_millis());
        }
        Ok(())
    }

    async fn collection(
        &self,
        key: &str,
        kind: ValueType,
        content: &mut Content,
        writer: &mut Writer,
    ) -> Result<(), ServerError> {
        writer.begin(2).await?;
        writer.word(b"DEL");
        writer.word(key.as_bytes());
        let elements = elements_of(self.size);
        let step = if kind == ValueType::Stream { 1 } else { ELEMENTS_PER_COMMAND };
        for first in (0..elements).step_by(step) {
            let some = first..elements.min(first + step);
            self.add(key, kind, some, elements, content, writer).await?;
        }
        if let Some(expire) = self.expire {
            writer.begin(3).await?;
            writer.word(b"PEXPIRE");
            writer.word(key.as_bytes());
            writer.text(expire.as_millis());
        }
        Ok(())
    }

    /// Sends one command that adds some of the elements.
    async fn add(
        &self,
        key: &str,
        kind: ValueType,
        some: Range<usize>,
        elements: usize,
        content: &mut Content,
        writer: &mut Writer,
    ) -> Result<(), ServerError> {
        let (name, words_each): (&[u8], _) = match kind {
            ValueType::List => (b"RPUSH", 1),
            ValueType::Set => (b"SADD", 1),
            ValueType::Zset => (b"ZADD", 2),
            ValueType::Hash => (b"HSET", 2),
            // The entry's id is a word besides field and value.
            _ => (b"XADD", 3),
        };
        writer.begin(2 + words_each * some.len()).await?;
        writer.word(name);
        writer.word(key.as_bytes());
        for element in some {
            match kind {
                ValueType::Zset => writer.text(format_args!("{}.{:03}", content.next() % 1_000_000, element % 1000)),
                ValueType::Hash => writer.text(format_args!("field:{element}")),
                ValueType::Stream | ValueType::Mixed | ValueType::String => {
                    // Explicit ids, so that the same seed gives the same stream.
                    writer.text(format_args!("1-{}", element + 1));
                    writer.word(b"value");
                }
                ValueType::List | ValueType::Set => {}
            }
            let number = u32::try_from(element).unwrap_or(u32::MAX).to_le_bytes();
            writer.content(&number, length_of(element, elements, self.size), content).await?;
        }
        Ok(())
    }
}

fn type_of(wanted: ValueType, number: u64) -> ValueType {
    let turn = usize::try_from(number % TURN.len() as u64).unwrap_or_default();
    match wanted {
        ValueType::Mixed => TURN.get(turn).copied().unwrap_or(ValueType::String),
        single => single,
    }
}

fn elements_of(size: usize) -> usize {
    size.div_ceil(ELEMENT_BYTES).max(1)
}

/// The bytes of one element. All elements together have exactly `size` bytes.
fn length_of(element: usize, elements: usize, size: usize) -> usize {
    size / elements + usize::from(element < size % elements)
}

// Sends commands to a server: one buffer, and a count of the replies that are still owed.

/// Bytes that are gathered before they are sent: large enough that the cost of system calls does not matter, small
/// enough to stay in the L2 cache.
const FLUSH_BYTES: usize = 512 * 1024;

/// Writes commands word by word, and reads their replies in between.
struct Writer {
    client: Client,
    buffer: Vec<u8>,
    /// Holds numbers while they are formatted.
    digits: String,
    owed: u32,
    limit: u32,
}

impl Writer {
    /// Keeps at most `limit` commands in flight.
    fn new(client: Client, limit: u32) -> Self {
        Self { client, buffer: Vec::with_capacity(FLUSH_BYTES), digits: String::new(), owed: 0, limit: limit.max(1) }
    }

    /// Begins a command of `words` words, including its name.
    async fn begin(&mut self, words: usize) -> Result<(), ServerError> {
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
    fn word(&mut self, word: &[u8]) {
        self.header(b'$', word.len());
        self.buffer.extend_from_slice(word);
        self.buffer.extend_from_slice(b"\r\n");
    }

    /// Appends a short word from a value that can be formatted.
    fn text(&mut self, text: impl std::fmt::Display) {
        let mut digits = std::mem::take(&mut self.digits);
        digits.clear();
        // Writing to a string cannot fail.
        let _ = write!(digits, "{text}");
        self.word(digits.as_bytes());
        self.digits = digits;
    }

    /// Appends a word of `length` bytes: `head`, then content. It can have any size, as it is sent while it is
    /// generated.
    async fn content(&mut self, head: &[u8], length: usize, content: &mut Content) -> Result<(), ServerError> {
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
    async fn finish(mut self) -> Result<(), ServerError> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(seed: u64, number: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        Content::of(seed, number, Look::Random).fill(&mut bytes);
        bytes
    }

    #[test]
    fn the_same_seed_and_key_give_the_same_bytes_and_others_give_others() {
        assert_eq!(bytes(1, 7, 100), bytes(1, 7, 100));
        assert_ne!(bytes(1, 7, 100), bytes(1, 8, 100));
        assert_ne!(bytes(1, 7, 100), bytes(2, 7, 100));
    }

    #[test]
    fn the_generator_is_the_published_one() {
        // First outputs of the authors' C code for the state 1, 2, 3, 4.
        let mut content = Content { state: [1, 2, 3, 4], ..Content::of(0, 0, Look::Random) };
        let numbers = [(); 3].map(|()| content.next());
        assert_eq!(numbers, [41_943_041, 58_720_359, 3_588_806_011_781_223]);
    }

    #[test]
    fn random_bytes_take_every_value_about_equally() {
        let mut counts = [0u32; 256];
        bytes(3, 3, 256 * 1000).into_iter().for_each(|byte| counts[usize::from(byte)] += 1);
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }

    #[test]
    fn records_are_json_and_the_same_however_they_are_cut() {
        let mut whole = vec![0; 3000];
        Content::of(1, 1, Look::Json).fill(&mut whole);
        let (mut content, mut cut) = (Content::of(1, 1, Look::Json), vec![0; 3000]);
        cut.chunks_mut(7).for_each(|piece| content.fill(piece));
        assert_eq!(whole, cut);
        let text = String::from_utf8(whole).expect("text");
        let records: Vec<&str> = text.lines().collect();
        assert!(records.len() > 8, "{text}");
        for record in &records[..records.len() - 1] {
            let read: serde_json::Value = serde_json::from_str(record).expect("a record");
            assert!(read["address"]["number"].as_u64() > Some(0), "{record}");
        }
    }

    #[test]
    fn compressible_bytes_repeat_and_differ_from_block_to_block() {
        let mut bytes = [0; 160];
        Content::of(1, 1, Look::Repeating).fill(&mut bytes);
        assert_eq!(bytes[..16], bytes[64..80]);
        assert_ne!(bytes[..16], bytes[80..96]);
    }

    #[test]
    fn mixed_takes_the_types_in_turn() {
        let turn = [0, 1, 5, 6].map(|number| type_of(ValueType::Mixed, number));
        assert_eq!(turn, [ValueType::String, ValueType::List, ValueType::Stream, ValueType::String]);
        assert_eq!(type_of(ValueType::Hash, 3), ValueType::Hash);
    }

    proptest! {
        #[test]
        fn the_elements_of_a_key_have_exactly_its_bytes_and_room_for_their_number(size in 1usize..100_000) {
            let elements = elements_of(size);
            let lengths: Vec<_> = (0..elements).map(|element| length_of(element, elements, size)).collect();
            prop_assert_eq!(lengths.iter().sum::<usize>(), size);
            prop_assert!(lengths.iter().all(|length| *length <= ELEMENT_BYTES));
            prop_assert!(elements == 1 || lengths.iter().all(|length| *length >= 4));
        }
    }
}
