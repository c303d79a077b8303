//! Properties that must hold for *any* bytes in shared memory, as functions that panic if one does not.
//!
//! Each body is used three times: by the fuzz target of the same name (`dev/fuzz/`), by a property test below, and by
//! the replay of the seeds in `tests/corpus/<target>/`. An input that made a fuzzer find a crash is kept there.
//!
//! The bodies compute the checksums that the layout wants, so that a fuzzer gets behind them.
//!
//! Not part of the crate's interface: compiled only for tests and with the feature `fuzzing`.
#![allow(clippy::missing_panics_doc, reason = "to panic is what these functions are for")]

use std::{
    os::fd::BorrowedFd,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use remora_fabric::{Completion, Error as FabricError, Memory, Pages, Peer, ReadError, ReadRequest, View, memory::crc};
use remora_redis::ReplId;

use crate::encoding::{Decoder, Encoder, decode_kept};
use crate::layout::{self, AT_HEAD_CHECK, Entry, HEAD_BYTES, Head, LINE_OFFSET, Line};
use crate::seal::SlotSeal;
use crate::server_pages::{CAPTURE_PAGE_BYTES, CapturePage, LOAD_PAGE_BYTES, LoadPage};
use crate::{
    Algorithm, Expectation, Geometry, Identity, JournalReader, Kind, MIN_SLOTS, Method, Origin, Seal, SealKey,
    SinkLayout, SnapshotReader,
};

/// A body: panics if a property does not hold.
pub type Body = fn(&[u8]);

/// All bodies, with the names of their fuzz targets and seed folders.
pub const TARGETS: [(&str, Body); 8] = [
    ("table_head", head),
    ("table_entries", entries),
    ("table_readers", readers),
    ("table_sealed_readers", sealed_readers),
    ("table_compressed_readers", compressed_readers),
    ("table_decode", decode),
    ("table_capture_page", capture_page),
    ("table_load_page", load_page),
];

/// A head survives encoding. If the first byte is odd, the checksum is made right.
pub fn head(data: &[u8]) {
    let Some((choice, rest)) = data.split_first() else { return };
    let mut bytes = [0; HEAD_BYTES];
    fill(&mut bytes, rest);
    if choice & 1 == 1 {
        let check = crc::crc32c(&bytes[..AT_HEAD_CHECK]);
        fill(&mut bytes[AT_HEAD_CHECK..], &check.to_le_bytes());
    }
    let Ok(head) = Head::parse(&bytes) else { return };
    assert_eq!(Head::parse(&head.to_bytes()).ok(), Some(head));
}

/// Lines and entries survive encoding.
pub fn entries(data: &[u8]) {
    let mut words = Words(data);
    while !words.0.is_empty() {
        let [sequence, position, packed, check] = checked([words.next(), words.next(), words.next(), 0]);
        let entry = [sequence, position, packed, check, 0, 0, 0, 0];
        if let Some(parsed) = Entry::from_words(entry, None) {
            assert_eq!(parsed.to_words(None), entry);
        }
        let line = checked([words.next(), words.next(), words.next(), words.next(), 0]);
        if let Some(parsed) = Line::from_words(line, None) {
            assert_eq!(parsed.to_words(None), line);
        }
    }
}

/// Readers of a table with any line, entries and bytes end with an error or wait; what they deliver has the bytes that
/// its checksum is of, and is in order. The first byte selects the reader and whether it reads in place.
pub fn readers(data: &[u8]) {
    read(data, false, false);
}

/// The same for readers of a table whose slots may be compressed.
pub fn compressed_readers(data: &[u8]) {
    read(data, false, true);
}

/// The same for readers of a sealed table. The attacker has the key, as every reader does: the MACs of line and entries
/// are right, and the tags of half of the slots.
pub fn sealed_readers(data: &[u8]) {
    read(data, true, false);
}

/// Any bytes are refused as the stored bytes of a slot, or decompress to as many bytes as the slot has.
pub fn decode(data: &[u8]) {
    let Some((&[choice, low, high], body)) = data.split_first_chunk() else { return };
    let length = u32::from(u16::from_le_bytes([low, high]));
    for method in Method::ALL {
        // Its header is right if the first byte is odd.
        let header = if choice & 1 == 1 { length.to_le_bytes() } else { [choice; 4] };
        let stored = [&header[..], body].concat();
        let mut decoder = Decoder::default();
        let decoded = decoder.decode(method, 1, &stored, length);
        assert!(decoder.plain.capacity() <= 2 * length as usize + 64);
        if decoded.is_ok() {
            assert_eq!(decoder.plain.len(), length as usize);
        }
        let mut encoder = Encoder::default();
        let Ok(Some(stored)) = encoder.encode(method, body, crc::crc32c(body)) else { continue };
        assert_eq!(decode_kept(method, 1, stored, body.len() as u32).ok().as_deref(), Some(body));
    }
}

fn read(data: &[u8], is_sealed: bool, is_compressed: bool) {
    let Some((choice, data)) = data.split_first() else { return };
    let kind = if choice & 1 == 0 || is_compressed { Kind::Snapshot } else { Kind::Journal };
    let expect = expectation(is_sealed.then_some(kind)).with_compressed_slots(is_compressed);
    let Some(region) = table(kind, data, &expect) else { return };
    let (Some(sink), Ok(view)) = (memory(LAYOUT.length(&GEOMETRY)), region.open_view()) else { return };
    let view = (choice & 2 != 0).then(|| Arc::new(view));
    let peer = PlainPeer { region, sink: Arc::clone(&sink), done: Vec::new() };
    match kind {
        Kind::Snapshot => read_snapshot(view, sink, peer, expect),
        Kind::Journal => read_journal(view, sink, peer, expect, u64::from(*choice >> 2)),
    }
}

fn read_snapshot(view: Option<Arc<View>>, sink: Arc<Memory>, mut peer: PlainPeer, expect: Expectation) {
    let Ok(mut reader) = SnapshotReader::new(view, sink, LAYOUT, expect, |_| false) else { return };
    let mut next = 0;
    for _ in 0..ROUNDS {
        if reader.pump(&mut peer).is_err() {
            return;
        }
        while let Some(slot) = reader.next_slot() {
            assert!(slot.number >= next, "slot {} after {next}", slot.number);
            next = slot.number + 1;
            let (memory, range) = slot.bytes();
            assert!(range.end - range.start <= u64::from(GEOMETRY.slot_size));
            assert_eq!(memory.crc32c(range).ok(), slot.crc().ok());
            if reader.release(slot).is_err() {
                return;
            }
        }
        let _ = (reader.progress(), reader.is_caught_up(), reader.is_complete());
    }
}

fn read_journal(view: Option<Arc<View>>, sink: Arc<Memory>, mut peer: PlainPeer, expect: Expectation, start: u64) {
    let Ok(mut reader) = JournalReader::new(view, sink, LAYOUT, expect, start) else { return };
    let mut next = start;
    for _ in 0..ROUNDS {
        if reader.pump(&mut peer).is_err() {
            return;
        }
        while let Some(chunk) = reader.next_chunk() {
            assert_eq!(chunk.offset, next);
            assert!(!chunk.bytes.is_empty());
            next += chunk.bytes.len() as u64;
        }
        let _ = (reader.position(), reader.is_caught_up());
    }
}

/// A capture page with any words is refused, or every question about it has an answer.
pub fn capture_page(data: &[u8]) {
    let Some(memory) = page(data, CAPTURE_PAGE_BYTES) else { return };
    let Ok(page) = CapturePage::adopt(memory) else { return };
    let order = page.order();
    assert_eq!(order.geometry.checked().ok(), Some(order.geometry));
    let _ = (page.stage(), page.fork_point(), page.writer_status(), page.writer_beat(), page.orderer_beat());
    assert!(page.status_text().len() <= CAPTURE_PAGE_BYTES as usize);
}

/// A load page with any words is refused, or every question about it has an answer.
pub fn load_page(data: &[u8]) {
    let Some(memory) = page(data, LOAD_PAGE_BYTES) else { return };
    let Ok(page) = LoadPage::adopt(memory) else { return };
    page.count();
    let _ = page.done();
    assert!(page.refusal().is_none_or(|text| text.len() <= LOAD_PAGE_BYTES as usize));
}

/// A small table.
const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: MIN_SLOTS };

/// A sink with two buffers.
const LAYOUT: SinkLayout = SinkLayout { offset: 0, buffers: 2 };

/// How often a reader is called: more often than a table of that many slots has news.
const ROUNDS: usize = 64;

/// `sealed`: the kind of a table that is sealed.
fn expectation(sealed: Option<Kind>) -> Expectation {
    let history = ReplId::try_from([b'a'; 40]).unwrap_or_else(|error| panic!("{error}"));
    let origin = Origin { generation: 7, history, offset: 1000 };
    let Some(kind) = sealed else { return Expectation::plain(origin, GEOMETRY) };
    let key = SealKey::new(Algorithm::Aes256Gcm, [7; SealKey::SECRET_BYTES]);
    Expectation::sealed(kind, origin, GEOMETRY, &key).unwrap_or_else(|error| panic!("{error}"))
}

/// A table with the right head, and a line and entries of the input's words. The slots repeat the whole input.
fn table(kind: Kind, data: &[u8], expect: &Expectation) -> Option<Arc<Memory>> {
    let seal = expect.seal();
    let memory = memory(GEOMETRY.memory_len())?;
    let identity = Identity { kind, origin: expectation(None).origin };
    let algorithm = seal.map(Seal::algorithm);
    memory
        .write(0, &Head { identity, geometry: GEOMETRY, algorithm, compressed: expect.compressed }.to_bytes())
        .ok()?;
    let mut words = Words(data);
    let line = [words.next(), words.next(), words.next(), words.next(), 0];
    let line = seal.map_or_else(|| checked(line), |seal| with_mac(line, seal, b"line"));
    store(&memory, LINE_OFFSET, &line)?;
    for number in 0..u64::from(GEOMETRY.slots) {
        let slot: Vec<u8> = data.iter().copied().cycle().take(if data.is_empty() { 0 } else { 4096 }).collect();
        let mut slot = slot;
        let mut entry = [words.next(), words.next(), words.next(), 0];
        // Half of the entries have the checksum of their bytes.
        let encoding = if expect.compressed { entry[2] & 0xf000_0000 } else { 0 };
        let length = usize::try_from(entry[2] & 0xffff_ffff & !encoding).unwrap_or(usize::MAX);
        let mut sealed = SlotSeal::default();
        if let (0, Some(bytes)) = (entry[2] >> 63, slot.get_mut(..length)) {
            if let Some(seal) = seal {
                sealed = seal.seal_slot((entry[0] >> 1).wrapping_sub(1), bytes).ok()?;
            }
            entry[2] = length as u64 | encoding | u64::from(crc::crc32c(bytes)) << 32;
        }
        memory.write(GEOMETRY.slot_offset(number), &slot).ok()?;
        let at = GEOMETRY.entry_offset(number);
        match seal {
            None => store(&memory, at, &checked(entry))?,
            Some(seal) => {
                let [sequence, position, packed, _] = entry;
                let [tag, digest] = [sealed.tag, sealed.digest].map(u128::from_le_bytes);
                let [tag, digest] = [tag, digest].map(|number| [number as u64, (number >> 64) as u64]);
                let words = [sequence, position, packed, tag[0], tag[1], digest[0], digest[1], 0];
                store(&memory, at, &with_mac(words, seal, b"entry"))?;
            }
        }
    }
    Some(memory)
}

fn memory(length: u64) -> Option<Arc<Memory>> {
    // A system without memory for it is not a finding.
    Memory::create("remora-fuzz", length, Pages::Small).ok().map(Arc::new)
}

/// A page that begins with the input.
fn page(data: &[u8], length: u64) -> Option<Memory> {
    let memory = Memory::create("remora-fuzz", length, Pages::Small).ok()?;
    memory.write(0, data.get(..length as usize).unwrap_or(data)).ok()?;
    Some(memory)
}

fn store(memory: &Memory, at: u64, words: &[u64]) -> Option<()> {
    (at..).step_by(8).zip(words).try_for_each(|(at, word)| memory.store_u64(at, *word, Relaxed)).ok()
}

/// The words with the checksum in the last one.
fn checked<const N: usize>(mut words: [u64; N]) -> [u64; N] {
    if let Some((last, others)) = words.split_last_mut() {
        *last = layout::check(others);
    }
    words
}

/// The words with the MAC in the last one.
fn with_mac<const N: usize>(mut words: [u64; N], seal: &Seal, label: &[u8]) -> [u64; N] {
    if let Some((last, others)) = words.split_last_mut() {
        *last = seal.mac(label, others);
    }
    words
}

fn fill(bytes: &mut [u8], from: &[u8]) {
    bytes.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
}

/// Reads an input word by word, with zeros after its end.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next(&mut self) -> u64 {
        let mut word = [0; 8];
        fill(&mut word, self.0);
        self.0 = self.0.get(8..).unwrap_or_default();
        u64::from_le_bytes(word)
    }
}

/// A peer whose reads complete at the next poll.
struct PlainPeer {
    region: Arc<Memory>,
    sink: Arc<Memory>,
    done: Vec<Completion>,
}

impl Peer for PlainPeer {
    fn depth(&self) -> usize {
        4
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, FabricError> {
        let room = self.depth().saturating_sub(self.done.len()).min(reads.len());
        for read in reads.iter().take(room) {
            let range = read.offset..read.offset.saturating_add(u64::from(read.length));
            let copied = self.region.copy_to(range, &self.sink, read.sink_offset);
            let result = copied.map(|()| read.length).map_err(|_| ReadError::PeerGone);
            self.done.push(Completion { tag: read.tag, result });
        }
        Ok(room)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, FabricError> {
        let count = self.done.len();
        completions.append(&mut self.done);
        Ok(count)
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        View::as_fd(&self.sink)
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {}
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// The seeds of one target, with their names.
    fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
        let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let paths = files.map(|file| file.unwrap().path());
        let mut seeds: Vec<_> = paths.map(|path| (path.display().to_string(), std::fs::read(&path).unwrap())).collect();
        seeds.sort();
        seeds
    }

    #[test]
    fn every_seed_of_every_target_holds() {
        for (target, body) in TARGETS {
            let seeds = seeds(target);
            assert!(!seeds.is_empty(), "{target} has no seeds");
            for (name, data) in seeds {
                println!("{name}"); // shown only if the body panics
                body(&data);
            }
        }
    }

    /// Most inputs are seeds with a few changed words, because readers refuse random words at once.
    fn inputs() -> impl Strategy<Value = (usize, Vec<u8>)> {
        let word = prop_oneof![0..20_u64, Just(u64::MAX), Just(1 << 63), any::<u64>()];
        let edits = prop::collection::vec((any::<prop::sample::Index>(), word), 0..4);
        let at_random = (0..TARGETS.len(), prop::collection::vec(any::<u8>(), 0..400));
        let seeded = (0..TARGETS.len(), any::<prop::sample::Index>(), any::<u8>(), edits);
        let damaged = seeded.prop_map(|(target, seed, choice, edits)| {
            let seeds = seeds(TARGETS[target].0);
            let mut data = seed.get(&seeds).1.clone();
            for (place, word) in edits {
                let place = place.index(data.len());
                fill(&mut data[place..], &word.to_le_bytes());
            }
            if TARGETS[target].0.ends_with("readers") {
                data[0] = choice;
            }
            (target, data)
        });
        prop_oneof![1 => at_random, 5 => damaged]
    }

    proptest! {
        #[test]
        fn any_bytes_may_be_in_shared_memory((target, data) in inputs()) {
            TARGETS[target].1(&data);
        }
    }

    #[test]
    fn the_seeds_of_slots_decompress() {
        for (name, method) in [("lz4", Method::Lz4), ("zstd", Method::Zstd)] {
            let data = seeds("table_decode").into_iter().find(|(path, _)| path.ends_with(name)).unwrap().1;
            let stored = [&100u32.to_le_bytes()[..], &data[3..]].concat();
            assert_eq!(decode_kept(method, 1, &stored, 100).unwrap(), [b'a'; 100], "{name}");
        }
    }

    /// A seed that the readers refuse at its first word would exercise little.
    #[test]
    fn the_seeds_of_the_readers_deliver() {
        let deliver = |target: &str, name: &str| {
            let data = seeds(target).into_iter().find(|(path, _)| path.ends_with(name)).unwrap().1;
            let kind = if data[0] & 1 == 0 { Kind::Snapshot } else { Kind::Journal };
            let expect = expectation(target.contains("sealed").then_some(kind));
            let expect = expect.with_compressed_slots(target.contains("compressed"));
            let region = table(kind, &data[1..], &expect).unwrap();
            let sink = memory(LAYOUT.length(&GEOMETRY)).unwrap();
            let mut peer = PlainPeer { region, sink: Arc::clone(&sink), done: Vec::new() };
            let mut reader = SnapshotReader::new(None, sink, LAYOUT, expect, |_| false).unwrap();
            let mut delivered = 0;
            for _ in 0..ROUNDS {
                reader.pump(&mut peer).unwrap();
                while let Some(slot) = reader.next_slot() {
                    delivered += 1;
                    reader.release(slot).unwrap();
                }
            }
            delivered
        };
        assert_eq!(deliver("table_readers", "two-slots"), 2);
        assert_eq!(deliver("table_sealed_readers", "two-slots"), 2);
        assert_eq!(deliver("table_compressed_readers", "two-slots"), 2);
    }
}
