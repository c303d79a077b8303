//! Tables with compressed slots: what is stored, what readers get of it, and what they refuse.

use std::sync::Arc;

use remora_fabric::{Memory, memory::crc};

use super::{
    FIRST_OFFSET, Random, identity, key, memory, origin,
    peer::{Faults, TornPeer},
    seal_all, sink,
};
use crate::encoding::decode_kept;
use crate::layout::{Entry, Identity};
use crate::publish::{Publisher, load_entry};
use crate::seal::Seal;
use crate::snapshot::lay_out;
use crate::{
    Encoded, Error, Expectation, Geometry, JournalReader, JournalWriter, Kind, Method, SealKey, SnapshotCopy,
    SnapshotReader, SnapshotSealer, SnapshotWriter, State, StoredSlot, Turn,
};

const GEOMETRY: Geometry = Geometry { slot_size: 16 << 10, slots: 8 };

const SLOT: usize = GEOMETRY.slot_size as usize;

/// Turns after which a reader has read everything that it will.
const MANY: u32 = 1000;

fn expect(key: Option<&SealKey>) -> Expectation {
    let plain = || Expectation::plain(origin(), GEOMETRY);
    let sealed = |key| Expectation::sealed(Kind::Snapshot, origin(), GEOMETRY, key).unwrap();
    key.map_or_else(plain, sealed).with_compressed_slots(true)
}

/// A snapshot with these bytes, its slots compressed by this method, and how each is stored.
fn snapshot(bytes: &[u8], method: Method, key: Option<&SealKey>) -> (Arc<Memory>, Vec<StoredSlot>) {
    let (plain, stored) = (memory(GEOMETRY.memory_len()), memory(GEOMETRY.memory_len()));
    let mut writer = SnapshotWriter::create(Arc::clone(&plain), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
    let (target, identity) = (Arc::clone(&stored), identity(Kind::Snapshot));
    let mut sealer = SnapshotSealer::create_compressed(plain, target, GEOMETRY, identity, key).unwrap();
    sealer.compress_with(Some(method));
    writer.append(bytes).unwrap();
    writer.finish(0).unwrap();
    let mut slots = Vec::new();
    while sealer.pump().unwrap() {
        slots.extend(sealer.take_stored());
    }
    assert_eq!(sealer.state(), State::Sealed);
    (stored, slots)
}

/// What a reader delivers, how many bytes it has read for that, what was stored, and the error that ended it.
struct Read {
    bytes: Vec<u8>,
    read: u64,
    encoded: Vec<Option<(Method, Vec<u8>)>>,
    error: Option<Error>,
}

fn read(region: &Arc<Memory>, expect: Expectation, keeps: bool) -> Read {
    let (sink, layout) = sink(GEOMETRY, 3);
    let mut peer = TornPeer::new(region, &sink, Faults::NONE, 1);
    let mut reader = SnapshotReader::new(None, sink, layout, expect, |_| false).unwrap().keeping_encoded(keeps);
    let mut found = Read { bytes: Vec::new(), read: 0, encoded: Vec::new(), error: None };
    for _ in 0..MANY {
        found.error = reader.pump(&mut peer).err();
        while let Some(slot) = reader.next_slot() {
            let (view, range) = slot.bytes();
            let mut bytes = vec![0; slot.length as usize];
            view.read(range.start, &mut bytes).unwrap();
            assert_eq!(crc::crc32c(&bytes), slot.crc().unwrap());
            found.bytes.extend(bytes);
            let encoded = slot.encoded().map(|encoded| (encoded.method, encoded.bytes.clone().unwrap_or_default()));
            found.encoded.push(encoded);
            reader.release(slot).unwrap();
        }
        if found.error.is_some() || reader.is_complete() {
            break;
        }
    }
    found.read = peer.bytes;
    found
}

fn copy(region: &Arc<Memory>, expect: Expectation) -> (Arc<Memory>, Vec<u8>, Option<Error>) {
    let memory = memory(SnapshotCopy::memory_len(&GEOMETRY));
    let mut copy = SnapshotCopy::create(Arc::clone(&memory), GEOMETRY, expect, 0).unwrap();
    let mut source = TornPeer::new(region, &memory, Faults::NONE, 1);
    copy.read_from_source();
    let mut taken = Vec::new();
    for _ in 0..MANY {
        if let Err(error) = copy.pump(&mut source, None, &mut Turn::FREE.clone()) {
            return (memory, taken, Some(error));
        }
        while let Some(slot) = copy.next_slot() {
            let (view, range) = slot.bytes();
            let mut bytes = vec![0; slot.length as usize];
            view.read(range.start, &mut bytes).unwrap();
            taken.extend(bytes);
            copy.release(slot);
        }
        if let Err(error) = copy.check() {
            return (memory, taken, Some(error));
        }
    }
    (memory, taken, None)
}

fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.length() as usize];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// Another source's table, copied by a reader of it: byte for byte the same, so that readers can go from one to the
/// other at any slot.
#[test]
fn a_copy_under_the_same_key_is_the_same_bytes() {
    for (seed, key) in [(1, None), (2, Some(key())), (3, Some(key()))] {
        let bytes = Random(seed).text(7 * SLOT - 5, seed < 3);
        let (plain, stored) = (memory(GEOMETRY.memory_len()), memory(GEOMETRY.memory_len()));
        let mut writer = SnapshotWriter::create(Arc::clone(&plain), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
        let sealer = |plain, stored: &Arc<Memory>| {
            let identity = identity(Kind::Snapshot);
            SnapshotSealer::create_compressed(plain, Arc::clone(stored), GEOMETRY, identity, key.as_ref()).unwrap()
        };
        let mut first = sealer(Arc::clone(&plain), &stored);
        writer.append(&bytes).unwrap();
        writer.finish(0).unwrap();
        seal_all(&mut first);

        let found = read(&stored, expect(key.as_ref()), true);
        let (plain_copy, copy) = (memory(GEOMETRY.memory_len()), memory(GEOMETRY.memory_len()));
        let identity = identity(Kind::Snapshot);
        let mut writer = SnapshotWriter::create(Arc::clone(&plain_copy), GEOMETRY, identity, 0).unwrap();
        let mut second = sealer(Arc::clone(&plain_copy), &copy).as_a_copy();
        writer.append(&found.bytes).unwrap();
        writer.finish(0).unwrap();
        assert!(matches!(second.pump(), Err(Error::Misuse(_))), "it was not said how the first slot is stored");
        for encoded in found.encoded {
            second.store_as(encoded.map(|(method, bytes)| Encoded { method, bytes: Some(bytes) }));
        }
        while second.pump().unwrap() {}
        assert_eq!((second.state(), contents(&plain_copy) == contents(&plain)), (State::Sealed, true));
        assert!(contents(&copy) == contents(&stored), "seed {seed}");
    }
}

#[test]
fn readers_read_what_is_stored_and_deliver_what_was_written() {
    let bytes = Random(3).text(5 * SLOT - 100, true);
    for (method, key) in
        [(Method::Lz4, None), (Method::Zstd, None), (Method::Lz4, Some(key())), (Method::Zstd, Some(key()))]
    {
        let (region, slots) = snapshot(&bytes, method, key.as_ref());
        assert!(slots.iter().all(|slot| slot.method == Some(method) && slot.stored < slot.plain / 2), "{slots:?}");
        let found = read(&region, expect(key.as_ref()), false);
        assert!(found.error.is_none() && found.bytes == bytes, "{:?}", found.error);
        assert!(found.read < bytes.len() as u64 / 2, "{} bytes crossed the wire", found.read);

        let (copied, taken, error) = copy(&region, expect(key.as_ref()));
        assert!(error.is_none() && taken == bytes, "{error:?}");
        let found = read(&copied, expect(key.as_ref()), false);
        assert!(found.bytes == bytes, "a copy is read as the source's table is: {:?}", found.error);
        for number in 0..5 {
            let at = GEOMETRY.slot_offset(number);
            let range = at..at + u64::from(slots[number as usize].stored);
            assert_eq!(copied.crc32c(range.clone()).unwrap(), region.crc32c(range).unwrap(), "passed on as it is");
        }
    }
}

#[test]
fn slots_that_do_not_shrink_are_stored_as_they_are() {
    let mut bytes = Random(4).text(2 * SLOT, true);
    bytes.extend(Random(4).bytes(2 * SLOT));
    for method in Method::ALL {
        let (region, slots) = snapshot(&bytes, method, None);
        let how: Vec<_> = slots.iter().map(|slot| slot.method).collect();
        assert_eq!(how, [Some(method), Some(method), None, None]);
        assert_eq!(slots[3].stored, slots[3].plain);
        let found = read(&region, expect(None), true);
        assert!(found.bytes == bytes);
        assert_eq!(found.encoded.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false, false]);
    }
}

#[test]
fn what_is_stored_is_kept_for_a_caller_that_wants_it_and_is_what_the_source_sealed() {
    let bytes = Random(5).text(2 * SLOT, true);
    let key = key();
    let (region, slots) = snapshot(&bytes, Method::Zstd, Some(&key));
    let found = read(&region, expect(Some(&key)), true);
    let seal = Seal::new(&key, &identity(Kind::Snapshot)).unwrap();
    for (number, encoded) in (0..).zip(found.encoded) {
        let (method, mut stored) = encoded.unwrap();
        let plain = &bytes[number as usize * SLOT..][..SLOT];
        assert_eq!(decode_kept(method, number, &stored, SLOT as u32).unwrap(), plain);
        seal.seal_kept(number, &mut stored).unwrap();
        let mut in_table = vec![0; slots[number as usize].stored as usize];
        region.read(GEOMETRY.slot_offset(number), &mut in_table).unwrap();
        assert!(stored == in_table, "the same ciphertext, so no nonce has two plaintexts");
    }
}

/// Writes slot 0 anew with these bytes and this encoding, as a source that is wrong: checksums, tag and MACs fit.
fn store_anew(region: &Arc<Memory>, key: Option<&SealKey>, encoding: u8, stored: &[u8]) {
    let identity: Identity = identity(Kind::Snapshot);
    let seal = key.map(|key| Arc::new(Seal::new(key, &identity).unwrap()));
    let mut bytes = stored.to_vec();
    let slot_seal = seal.as_ref().map(|seal| seal.seal_slot(0, &mut bytes).unwrap());
    // Only the entry is stored: the line of this publisher goes to other memory.
    let aside = memory(GEOMETRY.memory_len());
    let publisher: Publisher<Arc<Memory>> = lay_out(&aside, GEOMETRY, identity, seal, true).unwrap();
    let entry = Entry {
        encoding,
        seal: slot_seal.unwrap_or_default(),
        ..Entry::plain(0, 0, bytes.len() as u32, crc::crc32c(&bytes))
    };
    publisher.complete(entry).unwrap();
    let mut words = [0; 64];
    aside.read(GEOMETRY.entry_offset(0), &mut words).unwrap();
    region.write(GEOMETRY.entry_offset(0), &words).unwrap();
    region.write(GEOMETRY.slot_offset(0), &bytes).unwrap();
}

#[test]
fn a_slot_whose_plain_bytes_are_not_those_that_were_compressed_is_refused() {
    let bytes = Random(6).text(3 * SLOT, true);
    for key in [None, Some(key())] {
        for method in Method::ALL {
            let (region, slots) = snapshot(&bytes, method, None);
            let mut stored = vec![0; slots[0].stored as usize];
            region.read(GEOMETRY.slot_offset(0), &mut stored).unwrap();
            let (region, _) = snapshot(&bytes, method, key.as_ref());
            let larger = |by: u32| (SLOT as u32 + by).to_le_bytes();
            let wrong: [(&str, Vec<u8>); 4] = [
                ("checksum", [&stored[..4], &[1, 2, 3, 4], &stored[8..]].concat()),
                ("says that it has", [&larger(1)[..], &stored[4..]].concat()),
                ("says that it has", [&larger(1 << 30)[..], &stored[4..]].concat()),
                ("slot 0", stored[..stored.len() / 2].to_vec()),
            ];
            for (why, stored) in wrong {
                store_anew(&region, key.as_ref(), method.code(), &stored);
                let found = read(&region, expect(key.as_ref()), false);
                let refused = found.error.unwrap();
                assert!(matches!(refused, Error::Encoding { slot: 0, .. }), "{refused:?}");
                assert!(refused.to_string().contains(why), "{refused}");
                assert!(found.bytes.is_empty());
                let (_, taken, refused) = copy(&region, expect(key.as_ref()));
                assert!(matches!(refused, Some(Error::Encoding { slot: 0, .. })), "{refused:?}");
                assert!(taken.is_empty());
            }
        }
    }
}

#[test]
fn entries_with_impossible_encodings_are_refused() {
    let bytes = Random(7).text(3 * SLOT, true);
    for (encoding, length) in [(1, 0), (1, 8), (2, SLOT), (0, SLOT - 1)] {
        let (region, _) = snapshot(&bytes, Method::Lz4, None);
        store_anew(&region, None, encoding, &vec![0; length]);
        for refused in [read(&region, expect(None), false).error, copy(&region, expect(None)).2] {
            assert!(matches!(refused, Some(Error::Layout(_))), "{encoding}, {length}: {refused:?}");
        }
    }
    let (region, _) = snapshot(&bytes, Method::Lz4, None);
    store_anew(&region, None, 9, &[0; 100]);
    let refused = read(&region, expect(None), false).error.unwrap().to_string();
    assert!(refused.contains("method 9"), "{refused}");
}

#[test]
fn a_table_with_compressed_slots_is_not_read_as_another_one() {
    let (region, _) = snapshot(&Random(8).text(SLOT, true), Method::Lz4, None);
    let refused = read(&region, super::expect(GEOMETRY), false).error;
    assert!(matches!(refused, Some(Error::WrongGeneration { .. })), "{refused:?}");
    let entry = load_entry(&region, &GEOMETRY, 0, None).unwrap().unwrap();
    assert_eq!(entry.method().unwrap(), Some(Method::Lz4));
}

/// A compressed journal with these bytes, appended at once, and its reader's result.
fn journal(bytes: &[u8], spoil: impl FnOnce(&Memory)) -> (Vec<u8>, u32, Option<Error>) {
    let region = memory(GEOMETRY.memory_len());
    let identity = identity(Kind::Journal);
    let mut writer = JournalWriter::create_compressed(Arc::clone(&region), GEOMETRY, identity, &key()).unwrap();
    writer.compress(true);
    writer.append(bytes).unwrap();
    assert_eq!(writer.end_offset(), FIRST_OFFSET + 1 + bytes.len() as u64);
    let mut header = [0; 4];
    region.read(GEOMETRY.slot_offset(0), &mut header).unwrap();
    spoil(&region);
    let (sink, layout) = sink(GEOMETRY, 3);
    let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 1);
    let expect = Expectation::sealed(Kind::Journal, origin(), GEOMETRY, &key()).unwrap().with_compressed_slots(true);
    let mut reader = JournalReader::new(None, sink, layout, expect, FIRST_OFFSET + 1).unwrap();
    let mut taken = Vec::new();
    for _ in 0..MANY {
        let error = reader.pump(&mut peer).err();
        while let Some(chunk) = reader.next_chunk() {
            assert_eq!(chunk.offset, FIRST_OFFSET + 1 + taken.len() as u64);
            taken.extend(chunk.bytes);
        }
        if error.is_some() {
            return (taken, u32::from_le_bytes(header), error);
        }
    }
    (taken, u32::from_le_bytes(header), None)
}

#[test]
fn long_records_of_a_journal_are_compressed_and_short_or_random_ones_are_not() {
    let text = Random(9).text(100_000, true);
    let (taken, header, error) = journal(&text, |_| {});
    assert!(error.is_none() && taken == text, "{error:?}");
    assert_eq!(header >> 28, u32::from(Method::Lz4.code()));
    assert!(header & 0xfff_ffff < 12_000, "{header:#x}");
    for plain in [Random(9).bytes(5000), Random(9).text(200, true)] {
        let (taken, header, error) = journal(&plain, |_| {});
        assert!(error.is_none() && taken == plain, "{error:?}");
        assert_eq!(header, plain.len() as u32);
    }
}

#[test]
fn a_record_whose_encoding_was_changed_on_its_way_is_a_forgery() {
    for (bytes, flip) in [(Random(9).text(5000, true), 1), (Random(9).bytes(5000), 1), (Random(9).bytes(5000), 9)] {
        let spoil = |region: &Memory| {
            let at = GEOMETRY.slot_offset(0) + 3;
            let mut byte = [0];
            region.read(at, &mut byte).unwrap();
            region.write(at, &[byte[0] ^ flip << 4]).unwrap();
        };
        let (taken, _, error) = journal(&bytes, spoil);
        assert!(taken.is_empty());
        assert!(matches!(error, Some(Error::Forged { .. })), "{error:?}");
    }
}
