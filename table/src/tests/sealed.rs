//! Sealed tables: what an attacker may do to them on their way, and what other programs would compute.

use std::sync::Arc;

use proptest::prelude::*;
use remora_fabric::{Memory, memory::crc};

use super::{
    FIRST_OFFSET, Random, expect_sealed, identity, key, memory,
    peer::{Faults, TornPeer},
    sink,
};
use crate::layout::{Entry, LINE_OFFSET, Line};
use crate::seal::{DIGEST_BYTES, Seal, SlotSeal, digest};
use crate::{
    Algorithm, Error, Expectation, Geometry, JournalReader, JournalWriter, Kind, Loss, SealKey, SnapshotCopy,
    SnapshotReader, SnapshotSealer, SnapshotWriter, State, Turn,
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
