//! Sealed tables: what an attacker may do to them on their way, and what other programs would compute.
//!
//! And tables with compressed slots: what is stored, what readers get of it, and what they refuse.

use std::sync::Arc;

use proptest::prelude::*;
use remora_fabric::Memory;
use remora_fabric::memory::crc;

use super::peer::{Faults, TornPeer};
use super::{FIRST_OFFSET, Random, expect_sealed, identity, key, memory, origin, seal_all, sink};
use crate::encoding::decode_kept;
use crate::layout::{Entry, Identity, LINE_OFFSET, Line};
use crate::publish::{Publisher, load_entry};
use crate::seal::{DIGEST_BYTES, Seal, SlotSeal, digest};
use crate::snapshot::lay_out;
use crate::{
    Algorithm, Encoded, Error, Expectation, Geometry, JournalReader, JournalWriter, Kind, Loss, Method, SealKey,
    SnapshotCopy, SnapshotReader, SnapshotSealer, SnapshotWriter, State, StoredSlot, Turn,
};

const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 8 };

/// Turns after which a reader has read everything that it will.
const MANY: u32 = 100;

/// A sealed snapshot of a few slots, and its plain bytes.
fn snapshot(key: &SealKey, seed: u64) -> (Arc<Memory>, Vec<u8>) {
    let (plain, sealed) = (memory(GEOMETRY.memory_len()), memory(GEOMETRY.memory_len()));
    let mut writer = SnapshotWriter::create(Arc::clone(&plain), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
    let target = Arc::clone(&sealed);
    let mut sealer = SnapshotSealer::create(plain, target, GEOMETRY, identity(Kind::Snapshot), key).unwrap();
    let bytes = Random(seed).bytes(4 * 4096 - 100);
    writer.append(&bytes).unwrap();
    writer.finish(0).unwrap();
    while sealer.pump().unwrap() {}
    assert_eq!((sealer.state(), sealer.sealed_slots()), (State::Sealed, 4));
    (sealed, bytes)
}

/// A sealed journal of some records, and its plain bytes.
fn journal(key: &SealKey, seed: u64) -> (Arc<Memory>, Vec<u8>) {
    let region = memory(GEOMETRY.memory_len());
    let mut writer = JournalWriter::create_sealed(Arc::clone(&region), GEOMETRY, identity(Kind::Journal), key).unwrap();
    let bytes = Random(seed).bytes(10_000);
    bytes.chunks(700).for_each(|record| writer.append(record).unwrap());
    (region, bytes)
}

/// Everything that a reader delivers of this region, and the error that ended it.
fn read_snapshot(region: &Arc<Memory>, expect: Expectation) -> (Vec<u8>, Option<Error>) {
    let (sink, layout) = sink(GEOMETRY, 3);
    let mut peer = TornPeer::new(region, &sink, Faults::NONE, 1);
    let mut reader = SnapshotReader::new(None, sink, layout, expect, |_| false).unwrap();
    let mut taken = Vec::new();
    for _ in 0..MANY {
        // Words that are wrong are read again many times.
        let pumped = (0..1 << 17).try_for_each(|_| if reader.is_complete() { Ok(()) } else { reader.pump(&mut peer) });
        while let Some(slot) = reader.next_slot() {
            let (view, range) = slot.bytes();
            let mut bytes = vec![0; slot.length as usize];
            view.read(range.start, &mut bytes).unwrap();
            assert_eq!(crc::crc32c(&bytes), slot.crc().unwrap());
            taken.extend(bytes);
            reader.release(slot).unwrap();
        }
        if pumped.is_err() || reader.is_complete() {
            return (taken, pumped.err());
        }
    }
    (taken, None)
}

fn read_journal(region: &Arc<Memory>, expect: Expectation) -> (Vec<u8>, Option<Error>) {
    let (sink, layout) = sink(GEOMETRY, 3);
    let mut peer = TornPeer::new(region, &sink, Faults::NONE, 1);
    let mut reader = JournalReader::new(None, sink, layout, expect, FIRST_OFFSET + 1).unwrap();
    let mut taken = Vec::new();
    for _ in 0..1 << 18 {
        let pumped = reader.pump(&mut peer);
        while let Some(chunk) = reader.next_chunk() {
            taken.extend(chunk.bytes);
        }
        if pumped.is_err() || taken.len() == 10_000 {
            return (taken, pumped.err());
        }
    }
    (taken, None)
}

fn flip(region: &Memory, at: u64, by: u8) {
    let mut byte = [0];
    region.read(at, &mut byte).unwrap();
    region.write(at, &[byte[0] ^ by]).unwrap();
}

/// Copies a range of one table over the same range of another.
fn swap_in(to: &Memory, from: &Memory, at: u64, length: usize) {
    let mut bytes = vec![0; length];
    from.read(at, &mut bytes).unwrap();
    to.write(at, &bytes).unwrap();
}

#[track_caller]
fn is_forged(error: Option<Error>, expected: &str) {
    match error {
        Some(Error::Forged { what }) => assert_eq!(what, expected),
        other => panic!("{other:?} instead of an error about {expected}"),
    }
}

/// Changes some bytes at the end of the range so that it has the checksum that it had before. What an attacker can do
/// to a CRC, and not to a tag or a digest.
fn forge(region: &Memory, at: u64, length: u64) {
    let want = region.crc32c(at..at + length).unwrap();
    flip(region, at + 17, 1);
    let mut bytes = vec![0; length as usize];
    region.read(at, &mut bytes).unwrap();
    let tail = bytes.len() - 4;
    // A CRC is affine: which of the 32 bits of the tail to flip follows from 32 equations.
    let crc_of = |tail_bits: u32| {
        let mut bytes = bytes.clone();
        bytes[tail..].iter_mut().zip(tail_bits.to_le_bytes()).for_each(|(byte, bits)| *byte ^= bits);
        crc::crc32c(&bytes)
    };
    let base = crc_of(0);
    let mut rows: Vec<(u32, u32)> = (0..32).map(|bit| (crc_of(1 << bit) ^ base, 1 << bit)).collect();
    let (mut left, mut solution) = (base ^ want, 0);
    for bit in 0..32 {
        let Some(found) = rows.iter().position(|(effect, _)| effect >> bit & 1 == 1) else { continue };
        let (effect, bits) = rows.swap_remove(found);
        rows.iter_mut().filter(|row| row.0 >> bit & 1 == 1).for_each(|row| *row = (row.0 ^ effect, row.1 ^ bits));
        if left >> bit & 1 == 1 {
            (left, solution) = (left ^ effect, solution ^ bits);
        }
    }
    bytes[tail..].iter_mut().zip(u32::to_le_bytes(solution)).for_each(|(byte, bits)| *byte ^= bits);
    region.write(at, &bytes).unwrap();
    assert_eq!(region.crc32c(at..at + length).unwrap(), want);
}

#[test]
fn a_sealed_table_has_no_plain_byte_and_is_read_as_it_was_written() {
    let contains = |region: &Memory, bytes: &[u8]| {
        let mut all = vec![0; region.length() as usize];
        region.read(0, &mut all).unwrap();
        all.windows(16).any(|window| window == &bytes[1000..1016])
    };
    let (region, bytes) = snapshot(&key(), 1);
    assert!(!contains(&region, &bytes));
    let (taken, error) = read_snapshot(&region, expect_sealed(Kind::Snapshot, GEOMETRY));
    assert!(error.is_none() && taken == bytes, "{error:?}");

    let (region, bytes) = journal(&key(), 1);
    assert!(!contains(&region, &bytes));
    let (taken, error) = read_journal(&region, expect_sealed(Kind::Journal, GEOMETRY));
    assert!(error.is_none() && taken == bytes, "{error:?}");
}

#[test]
fn a_slot_changed_so_that_its_checksum_fits_is_named_and_not_delivered() {
    let (region, bytes) = snapshot(&key(), 1);
    forge(&region, GEOMETRY.slot_offset(2), 4096);
    let (taken, error) = read_snapshot(&region, expect_sealed(Kind::Snapshot, GEOMETRY));
    is_forged(error, "slot 2");
    assert!(taken == bytes[..2 * 4096], "the slots before it, and nothing of it");
}

#[test]
fn a_record_changed_so_that_its_checksum_fits_is_named_and_not_delivered() {
    let (region, bytes) = journal(&key(), 1);
    // The second record: behind the first one of 700 bytes and its header, and behind its own header.
    forge(&region, GEOMETRY.slot_offset(0) + 24 + 700 + 24, 700);
    let (taken, error) = read_journal(&region, expect_sealed(Kind::Journal, GEOMETRY));
    is_forged(error, &format!("the record at stream offset {}", FIRST_OFFSET + 1 + 700));
    assert!(bytes.starts_with(&taken) && taken.len() <= 700);
}

#[test]
fn a_line_or_an_entry_with_a_right_checksum_instead_of_a_right_mac_is_named() {
    // The line of the review's proxy: the stream ends earlier.
    let (region, _) = snapshot(&key(), 1);
    let line = Line { published: 4096, retired: 0, end: Some(4096), state: State::Sealed };
    let words = line.to_words(None).map(u64::to_le_bytes).concat();
    region.write(LINE_OFFSET, &words).unwrap();
    let (taken, error) = read_snapshot(&region, expect_sealed(Kind::Snapshot, GEOMETRY));
    is_forged(error, "the progress line");
    assert!(taken.is_empty());

    let (region, bytes) = snapshot(&key(), 1);
    let at = GEOMETRY.entry_offset(1);
    flip(&region, at + 20, 1);
    let (taken, error) = read_snapshot(&region, expect_sealed(Kind::Snapshot, GEOMETRY));
    is_forged(error, "the entry of slot 1");
    assert!(bytes.starts_with(&taken) && taken.len() <= 4096);

    let (region, _) = journal(&key(), 1);
    flip(&region, GEOMETRY.entry_offset(0) + 8, 1);
    let (taken, error) = read_journal(&region, expect_sealed(Kind::Journal, GEOMETRY));
    assert!(matches!(&error, Some(Error::Forged { what }) if what.starts_with("the entry of slot")), "{error:?}");
    assert!(taken.is_empty());
}

#[test]
fn slots_and_entries_of_another_generation_or_another_place_are_not_taken() {
    let other_key = SealKey::new(Algorithm::best(), [8; 32]);
    let expect = || expect_sealed(Kind::Snapshot, GEOMETRY);
    // The same bytes at the same place, sealed with the key of another generation.
    let (region, _) = snapshot(&key(), 1);
    let (other, _) = snapshot(&other_key, 1);
    swap_in(&region, &other, GEOMETRY.slot_offset(0), 4096);
    let (taken, error) = read_snapshot(&region, expect());
    assert!(matches!(error, Some(Error::Corrupt { slot: 0, .. })) && taken.is_empty(), "{error:?}");
    swap_in(&region, &other, GEOMETRY.entry_offset(0), 64);
    let (taken, error) = read_snapshot(&region, expect());
    is_forged(error, "the entry of slot 0");
    assert!(taken.is_empty());

    // Slot 1 of the same table at the place of slot 0, with its entry.
    let (region, _) = snapshot(&key(), 1);
    for (from, to, length) in [
        (GEOMETRY.slot_offset(1), GEOMETRY.slot_offset(0), 4096),
        (GEOMETRY.entry_offset(1), GEOMETRY.entry_offset(0), 64),
    ] {
        let mut bytes = vec![0; length];
        region.read(from, &mut bytes).unwrap();
        region.write(to, &bytes).unwrap();
    }
    let (taken, error) = read_snapshot(&region, expect());
    assert!(error.is_some() && taken.is_empty());

    // A whole table of another generation, or one that is not sealed.
    let (taken, error) = read_snapshot(&other, expect());
    assert!(error.is_some() && taken.is_empty());
    let plain = memory(GEOMETRY.memory_len());
    let mut writer = SnapshotWriter::create(Arc::clone(&plain), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
    writer.append(&[1; 5000]).unwrap();
    writer.finish(0).unwrap();
    let (taken, error) = read_snapshot(&plain, expect());
    assert!(matches!(error, Some(Error::WrongGeneration { .. })) && taken.is_empty(), "{error:?}");
    let (taken, error) = read_snapshot(&other, super::expect(GEOMETRY));
    assert!(matches!(error, Some(Error::WrongGeneration { .. })) && taken.is_empty(), "{error:?}");
}

#[test]
fn records_in_another_order_are_not_taken() {
    let (region, bytes) = journal(&key(), 1);
    let at = GEOMETRY.slot_offset(0);
    let (first, second) = (at, at + 724);
    let mut records = [vec![0; 724], vec![0; 724]];
    region.read(first, &mut records[0]).unwrap();
    region.read(second, &mut records[1]).unwrap();
    region.write(first, &records[1]).unwrap();
    region.write(second, &records[0]).unwrap();
    let (taken, error) = read_journal(&region, expect_sealed(Kind::Journal, GEOMETRY));
    is_forged(error, &format!("the record at stream offset {}", FIRST_OFFSET + 1));
    assert!(taken.is_empty() && !bytes.is_empty());
}

/// A lender knows the key, and so can seal what it likes. The digest in the source's entry is what stops it.
#[test]
fn a_lender_that_knows_the_key_cannot_forge_for_its_readers() {
    let (source, bytes) = snapshot(&key(), 1);
    let (forged, _) = snapshot(&key(), 2);
    // Bytes with the same checksum, well sealed, in the lender's own table.
    let (lender, _) = snapshot(&key(), 1);
    forge(&lender, GEOMETRY.slot_offset(1), 4096);
    for (region, slot) in [(&forged, 0), (&lender, 1)] {
        let sink = memory(SnapshotCopy::memory_len(&GEOMETRY));
        let expect = expect_sealed(Kind::Snapshot, GEOMETRY);
        let mut copy = SnapshotCopy::create(Arc::clone(&sink), GEOMETRY, expect, 0).unwrap();
        let mut from_source = TornPeer::new(&source, &sink, Faults::NONE, 1);
        let mut from_lender = TornPeer::new(region, &sink, Faults::NONE, 1);
        copy.read_from_peer(GEOMETRY.slots).unwrap();
        let mut turn = || copy.pump(&mut from_source, Some(&mut from_lender), &mut Turn::FREE.clone()).unwrap();
        let loss = (0..1000).find_map(|_| turn());
        assert!(matches!(loss, Some(Loss::Lied { slot: lied, .. }) if lied == slot), "{loss:?}");
        assert_eq!(copy.held(), slot, "nothing of it is lent on");
        copy.read_from_source();
        let mut taken = Vec::new();
        while taken.len() < bytes.len() {
            assert!(copy.pump(&mut from_source, None, &mut Turn::FREE.clone()).unwrap().is_none());
            while let Some(slot) = copy.next_slot() {
                let (view, range) = slot.bytes();
                let mut piece = vec![0; slot.length as usize];
                view.read(range.start, &mut piece).unwrap();
                taken.extend(piece);
                copy.release(slot);
            }
        }
        assert!(taken == bytes);
    }
}

#[test]
fn a_copy_that_reads_the_source_names_a_forged_slot() {
    let (region, _) = snapshot(&key(), 1);
    forge(&region, GEOMETRY.slot_offset(0), 4096);
    let sink = memory(SnapshotCopy::memory_len(&GEOMETRY));
    let mut copy =
        SnapshotCopy::create(Arc::clone(&sink), GEOMETRY, expect_sealed(Kind::Snapshot, GEOMETRY), 0).unwrap();
    let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 1);
    copy.read_from_source();
    let error = (0..1000).find_map(|_| copy.pump(&mut peer, None, &mut Turn::FREE.clone()).err());
    is_forged(error, "slot 0");
    assert!(copy.held() == 0 && copy.next_slot().is_none());
}

#[test]
fn a_slot_that_its_writer_did_not_write_is_not_sealed() {
    let (plain, sealed) = (memory(GEOMETRY.memory_len()), memory(GEOMETRY.memory_len()));
    let mut writer = SnapshotWriter::create(Arc::clone(&plain), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
    let (from, identity) = (Arc::clone(&plain), identity(Kind::Snapshot));
    let mut sealer = SnapshotSealer::create(from, sealed, GEOMETRY, identity, &key()).unwrap();
    writer.append(&[1; 5000]).unwrap();
    flip(&plain, GEOMETRY.slot_offset(0) + 5, 1);
    assert!(matches!(sealer.pump(), Err(Error::Corrupt { slot: 0, .. })));
    flip(&plain, GEOMETRY.slot_offset(0) + 5, 1);
    assert!(sealer.pump().unwrap() && !sealer.pump().unwrap());
    writer.abort();
    assert!(sealer.pump().unwrap());
    assert_eq!(sealer.state(), State::Aborted);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// An attacker may withhold, and may not forge: whatever byte is changed, what is delivered was written.
    #[test]
    fn no_changed_byte_is_ever_delivered(at: prop::sample::Index, by in 1u8.., of_journal: bool) {
        let (region, bytes) = if of_journal { journal(&key(), 3) } else { snapshot(&key(), 3) };
        let kind = if of_journal { Kind::Journal } else { Kind::Snapshot };
        flip(&region, at.index(region.length() as usize) as u64, by);
        let read = if of_journal { read_journal } else { read_snapshot };
        let (taken, error) = read(&region, expect_sealed(kind, GEOMETRY));
        prop_assert!(bytes.starts_with(&taken));
        prop_assert!(error.is_some() || taken == bytes);
    }

    #[test]
    fn what_was_sealed_is_opened_with_the_same_key_number_and_length_only(
        bytes in prop::collection::vec(any::<u8>(), 1..300),
        number in 0u64..1 << 40,
        bit: prop::sample::Index,
        chacha: bool,
    ) {
        let algorithm = if chacha { Algorithm::ChaCha20Poly1305 } else { Algorithm::Aes256Gcm };
        let key = SealKey::new(algorithm, [3; 32]);
        prop_assert_eq!(&SealKey::from_bytes(&key.to_bytes()).unwrap(), &key);
        let of = |key: &SealKey, kind| Seal::new(key, &identity(kind)).unwrap();
        let seal = of(&key, Kind::Snapshot);
        let mut sealed = bytes.clone();
        let slot_seal = seal.seal_slot(number, &mut sealed).unwrap();
        prop_assert_eq!(slot_seal.digest, digest(&sealed));
        let open = |seal: &Seal, number, slot_seal: &SlotSeal, sealed: &[u8]| {
            let mut opened = sealed.to_vec();
            seal.open_slot(number, slot_seal, &mut opened).ok().map(|()| opened)
        };
        prop_assert_eq!(open(&seal, number, &slot_seal, &sealed), Some(bytes.clone()));
        let mut changed = sealed.clone();
        let bit = bit.index(sealed.len() * 8);
        changed[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(open(&seal, number, &slot_seal, &changed), None);
        prop_assert_eq!(open(&seal, number + 1, &slot_seal, &sealed), None);
        prop_assert_eq!(open(&seal, number, &slot_seal, &sealed[1..]), None);
        prop_assert_eq!(open(&of(&key, Kind::Journal), number, &slot_seal, &sealed), None);
        let other = SealKey::new(algorithm, [4; 32]);
        prop_assert_eq!(open(&of(&other, Kind::Snapshot), number, &slot_seal, &sealed), None);
        // A record is not a slot, not even with the same number and the same key.
        let mut as_record = sealed.clone();
        prop_assert!(seal.open_record(number, 0, &slot_seal.tag, &mut as_record).is_err());
    }
}

/// The lines of `tests/vectors/sealed.txt`: a name, and bytes in hexadecimal.
fn vectors() -> Vec<(String, Vec<u8>)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/sealed.txt");
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let bytes = |hex: &str| -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    };
    lines.map(|line| line.split_once(' ').map(|(name, hex)| (name.to_owned(), bytes(hex))).unwrap()).collect()
}

/// The layout is in use: other bytes need another number of the algorithm, or another layout version.
#[test]
fn the_vectors_are_what_this_program_computes() {
    let vectors = vectors();
    let of = |name: &str| vectors.iter().find(|(found, _)| found == name).map(|(_, bytes)| bytes.clone()).unwrap();
    let secret: [u8; 32] = of("secret").try_into().unwrap();
    for (label, algorithm) in [("aes", Algorithm::Aes256Gcm), ("chacha", Algorithm::ChaCha20Poly1305)] {
        let key = SealKey::new(algorithm, secret);
        assert_eq!(key.to_bytes()[0], of(&format!("{label}.code"))[0]);
        let seal = Seal::new(&key, &identity(Kind::Snapshot)).unwrap();
        let mut slot = of("slot.plain");
        let slot_seal = seal.seal_slot(5, &mut slot).unwrap();
        assert_eq!(slot, of(&format!("{label}.slot.sealed")));
        assert_eq!(slot_seal.tag[..], of(&format!("{label}.slot.tag")));
        let line = Line { published: 0x5064, retired: 1, end: Some(0x5064), state: State::Sealed };
        assert_eq!(line.to_words(Some(&seal)).map(u64::to_le_bytes).concat(), of(&format!("{label}.line")));
        let (number, position) = (5, 5 * 4096);
        // The digest comes from the vectors: BLAKE3 has its own.
        let digest: [u8; DIGEST_BYTES] = of(&format!("{label}.slot.digest")).try_into().unwrap();
        assert_eq!(slot_seal.digest, digest);
        let entry = Entry { seal: slot_seal, ..Entry::plain(number, position, 100, 0x01020304) };
        assert_eq!(entry.to_words(Some(&seal)).map(u64::to_le_bytes).concat(), of(&format!("{label}.entry")));
        let journal = Seal::new(&key, &identity(Kind::Journal)).unwrap();
        let mut record = of("record.plain");
        let tag = journal.seal_record(1001, 0, &mut record).unwrap();
        assert_eq!(record, of(&format!("{label}.record.sealed")));
        assert_eq!(tag[..], of(&format!("{label}.record.tag")));
    }
}

#[test]
fn a_key_of_an_unknown_algorithm_is_refused_and_no_key_is_shown() {
    let mut bytes = key().to_bytes();
    bytes[0] = 9;
    let refused = SealKey::from_bytes(&bytes).unwrap_err().to_string();
    assert!(refused.contains("algorithm 9"), "{refused}");
    assert!(SealKey::from_bytes(&bytes[..10]).is_err() && SealKey::from_bytes(&[]).is_err());
    assert!(SealKey::from_bytes(&key().to_bytes()[..32]).is_err());
    let shown =
        format!("{:?} {:?}", SealKey::new(Algorithm::Aes256Gcm, [0xab; 32]), expect_sealed(Kind::Snapshot, GEOMETRY));
    assert!(!shown.contains("171") && !shown.contains("ab, "), "{shown}");
}

const COMPRESSED_GEOMETRY: Geometry = Geometry { slot_size: 16 << 10, slots: 8 };

const SLOT: usize = COMPRESSED_GEOMETRY.slot_size as usize;

/// Turns after which a reader has read everything that it will.
const MANY_SLOTS: u32 = 1000;

fn expect(key: Option<&SealKey>) -> Expectation {
    let plain = || Expectation::plain(origin(), COMPRESSED_GEOMETRY);
    let sealed = |key| Expectation::sealed(Kind::Snapshot, origin(), COMPRESSED_GEOMETRY, key).unwrap();
    key.map_or_else(plain, sealed).with_compressed_slots(true)
}

/// A snapshot with these bytes, its slots compressed by this method, and how each is stored.
fn compressed_snapshot(bytes: &[u8], method: Method, key: Option<&SealKey>) -> (Arc<Memory>, Vec<StoredSlot>) {
    let (plain, stored) = (memory(COMPRESSED_GEOMETRY.memory_len()), memory(COMPRESSED_GEOMETRY.memory_len()));
    let mut writer =
        SnapshotWriter::create(Arc::clone(&plain), COMPRESSED_GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
    let (target, identity) = (Arc::clone(&stored), identity(Kind::Snapshot));
    let mut sealer = SnapshotSealer::create_compressed(plain, target, COMPRESSED_GEOMETRY, identity, key).unwrap();
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
    let (sink, layout) = sink(COMPRESSED_GEOMETRY, 3);
    let mut peer = TornPeer::new(region, &sink, Faults::NONE, 1);
    let mut reader = SnapshotReader::new(None, sink, layout, expect, |_| false).unwrap().keeping_encoded(keeps);
    let mut found = Read { bytes: Vec::new(), read: 0, encoded: Vec::new(), error: None };
    for _ in 0..MANY_SLOTS {
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
    let memory = memory(SnapshotCopy::memory_len(&COMPRESSED_GEOMETRY));
    let mut copy = SnapshotCopy::create(Arc::clone(&memory), COMPRESSED_GEOMETRY, expect, 0).unwrap();
    let mut source = TornPeer::new(region, &memory, Faults::NONE, 1);
    copy.read_from_source();
    let mut taken = Vec::new();
    for _ in 0..MANY_SLOTS {
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
        let (plain, stored) = (memory(COMPRESSED_GEOMETRY.memory_len()), memory(COMPRESSED_GEOMETRY.memory_len()));
        let mut writer =
            SnapshotWriter::create(Arc::clone(&plain), COMPRESSED_GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
        let sealer = |plain, stored: &Arc<Memory>| {
            let identity = identity(Kind::Snapshot);
            SnapshotSealer::create_compressed(plain, Arc::clone(stored), COMPRESSED_GEOMETRY, identity, key.as_ref())
                .unwrap()
        };
        let mut first = sealer(Arc::clone(&plain), &stored);
        writer.append(&bytes).unwrap();
        writer.finish(0).unwrap();
        seal_all(&mut first);

        let found = read(&stored, expect(key.as_ref()), true);
        let (plain_copy, copy) = (memory(COMPRESSED_GEOMETRY.memory_len()), memory(COMPRESSED_GEOMETRY.memory_len()));
        let identity = identity(Kind::Snapshot);
        let mut writer = SnapshotWriter::create(Arc::clone(&plain_copy), COMPRESSED_GEOMETRY, identity, 0).unwrap();
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
        let (region, slots) = compressed_snapshot(&bytes, method, key.as_ref());
        assert!(slots.iter().all(|slot| slot.method == Some(method) && slot.stored < slot.plain / 2), "{slots:?}");
        let found = read(&region, expect(key.as_ref()), false);
        assert!(found.error.is_none() && found.bytes == bytes, "{:?}", found.error);
        assert!(found.read < bytes.len() as u64 / 2, "{} bytes crossed the wire", found.read);

        let (copied, taken, error) = copy(&region, expect(key.as_ref()));
        assert!(error.is_none() && taken == bytes, "{error:?}");
        let found = read(&copied, expect(key.as_ref()), false);
        assert!(found.bytes == bytes, "a copy is read as the source's table is: {:?}", found.error);
        for number in 0..5 {
            let at = COMPRESSED_GEOMETRY.slot_offset(number);
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
        let (region, slots) = compressed_snapshot(&bytes, method, None);
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
    let (region, slots) = compressed_snapshot(&bytes, Method::Zstd, Some(&key));
    let found = read(&region, expect(Some(&key)), true);
    let seal = Seal::new(&key, &identity(Kind::Snapshot)).unwrap();
    for (number, encoded) in (0..).zip(found.encoded) {
        let (method, mut stored) = encoded.unwrap();
        let plain = &bytes[number as usize * SLOT..][..SLOT];
        assert_eq!(decode_kept(method, number, &stored, SLOT as u32).unwrap(), plain);
        seal.seal_kept(number, &mut stored).unwrap();
        let mut in_table = vec![0; slots[number as usize].stored as usize];
        region.read(COMPRESSED_GEOMETRY.slot_offset(number), &mut in_table).unwrap();
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
    let aside = memory(COMPRESSED_GEOMETRY.memory_len());
    let publisher: Publisher<Arc<Memory>> = lay_out(&aside, COMPRESSED_GEOMETRY, identity, seal, true).unwrap();
    let entry = Entry {
        encoding,
        seal: slot_seal.unwrap_or_default(),
        ..Entry::plain(0, 0, bytes.len() as u32, crc::crc32c(&bytes))
    };
    publisher.complete(entry).unwrap();
    let mut words = [0; 64];
    aside.read(COMPRESSED_GEOMETRY.entry_offset(0), &mut words).unwrap();
    region.write(COMPRESSED_GEOMETRY.entry_offset(0), &words).unwrap();
    region.write(COMPRESSED_GEOMETRY.slot_offset(0), &bytes).unwrap();
}

#[test]
fn a_slot_whose_plain_bytes_are_not_those_that_were_compressed_is_refused() {
    let bytes = Random(6).text(3 * SLOT, true);
    for key in [None, Some(key())] {
        for method in Method::ALL {
            let (region, slots) = compressed_snapshot(&bytes, method, None);
            let mut stored = vec![0; slots[0].stored as usize];
            region.read(COMPRESSED_GEOMETRY.slot_offset(0), &mut stored).unwrap();
            let (region, _) = compressed_snapshot(&bytes, method, key.as_ref());
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
        let (region, _) = compressed_snapshot(&bytes, Method::Lz4, None);
        store_anew(&region, None, encoding, &vec![0; length]);
        for refused in [read(&region, expect(None), false).error, copy(&region, expect(None)).2] {
            assert!(matches!(refused, Some(Error::Layout(_))), "{encoding}, {length}: {refused:?}");
        }
    }
    let (region, _) = compressed_snapshot(&bytes, Method::Lz4, None);
    store_anew(&region, None, 9, &[0; 100]);
    let refused = read(&region, expect(None), false).error.unwrap().to_string();
    assert!(refused.contains("method 9"), "{refused}");
}

#[test]
fn a_table_with_compressed_slots_is_not_read_as_another_one() {
    let (region, _) = compressed_snapshot(&Random(8).text(SLOT, true), Method::Lz4, None);
    let refused = read(&region, crate::tests::expect(COMPRESSED_GEOMETRY), false).error;
    assert!(matches!(refused, Some(Error::WrongGeneration { .. })), "{refused:?}");
    let entry = load_entry(&region, &COMPRESSED_GEOMETRY, 0, None).unwrap().unwrap();
    assert_eq!(entry.method().unwrap(), Some(Method::Lz4));
}

/// A compressed journal with these bytes, appended at once, and its reader's result.
fn compressed_journal(bytes: &[u8], spoil: impl FnOnce(&Memory)) -> (Vec<u8>, u32, Option<Error>) {
    let region = memory(COMPRESSED_GEOMETRY.memory_len());
    let identity = identity(Kind::Journal);
    let mut writer =
        JournalWriter::create_compressed(Arc::clone(&region), COMPRESSED_GEOMETRY, identity, &key()).unwrap();
    writer.compress(true);
    writer.append(bytes).unwrap();
    assert_eq!(writer.end_offset(), FIRST_OFFSET + 1 + bytes.len() as u64);
    let mut header = [0; 4];
    region.read(COMPRESSED_GEOMETRY.slot_offset(0), &mut header).unwrap();
    spoil(&region);
    let (sink, layout) = sink(COMPRESSED_GEOMETRY, 3);
    let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 1);
    let expect =
        Expectation::sealed(Kind::Journal, origin(), COMPRESSED_GEOMETRY, &key()).unwrap().with_compressed_slots(true);
    let mut reader = JournalReader::new(None, sink, layout, expect, FIRST_OFFSET + 1).unwrap();
    let mut taken = Vec::new();
    for _ in 0..MANY_SLOTS {
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
    let (taken, header, error) = compressed_journal(&text, |_| {});
    assert!(error.is_none() && taken == text, "{error:?}");
    assert_eq!(header >> 28, u32::from(Method::Lz4.code()));
    assert!(header & 0xfff_ffff < 12_000, "{header:#x}");
    for plain in [Random(9).bytes(5000), Random(9).text(200, true)] {
        let (taken, header, error) = compressed_journal(&plain, |_| {});
        assert!(error.is_none() && taken == plain, "{error:?}");
        assert_eq!(header, plain.len() as u32);
    }
}

#[test]
fn a_record_whose_encoding_was_changed_on_its_way_is_a_forgery() {
    for (bytes, flip) in [(Random(9).text(5000, true), 1), (Random(9).bytes(5000), 1), (Random(9).bytes(5000), 9)] {
        let spoil = |region: &Memory| {
            let at = COMPRESSED_GEOMETRY.slot_offset(0) + 3;
            let mut byte = [0];
            region.read(at, &mut byte).unwrap();
            region.write(at, &[byte[0] ^ flip << 4]).unwrap();
        };
        let (taken, _, error) = compressed_journal(&bytes, spoil);
        assert!(taken.is_empty());
        assert!(matches!(error, Some(Error::Forged { .. })), "{error:?}");
    }
}
