//! Single cases, each named by a sentence. At the end real threads race on real shared memory: a writer that overwrites
//! as fast as it can, and readers in place.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use remora_fabric::memory::crc;
use remora_fabric::{Memory, Peer};
use remora_redis::ReplId;

use super::FIRST_OFFSET;
use super::expect;
use super::identity;
use super::memory;
use super::peer::{Faults, TornPeer};
use super::sink;
use crate::error::Error;
use crate::expectation::Expectation;
use crate::identity::{Kind, Origin};
use crate::journal::{JournalReader, JournalWriter};
use crate::layout::{Geometry, LINE_OFFSET, State};
use crate::snapshot::{SnapshotReader, SnapshotWriter};

const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 4 };

fn snapshot(hold_back: u32) -> (Arc<Memory>, SnapshotWriter) {
    let region = memory(GEOMETRY.memory_len());
    let writer = SnapshotWriter::create(Arc::clone(&region), GEOMETRY, identity(Kind::Snapshot), hold_back);
    (region, writer.unwrap())
}

/// Writes all of it; the ring must have space.
fn fill(region: &Memory, writer: &mut SnapshotWriter, mut bytes: &[u8], step: usize) {
    while !bytes.is_empty() {
        let space = writer.space().unwrap();
        let (now, rest) = bytes.split_at(bytes.len().min((space.end - space.start) as usize).min(step));
        region.write(space.start, now).unwrap();
        writer.advance(now.len() as u64).unwrap();
        bytes = rest;
    }
}

fn reader(region: &Arc<Memory>, in_place: bool, expect: Expectation) -> (SnapshotReader, TornPeer) {
    let (sink, layout) = sink(GEOMETRY, 2);
    let peer = TornPeer::new(region, &sink, Faults::NONE, 0);
    let view = in_place.then(|| Arc::new(region.open_view().unwrap()));
    (SnapshotReader::new(view, sink, layout, expect, |_| false).unwrap(), peer)
}

/// Reads to the end; the snapshot must be sealed.
fn read_all(reader: &mut SnapshotReader, peer: &mut dyn Peer) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    while !reader.is_complete() {
        reader.pump(peer)?;
        while let Some(slot) = reader.next_slot() {
            let (memory, range) = slot.bytes();
            let mut content = vec![0; slot.length as usize];
            memory.read(range.start, &mut content)?;
            assert_eq!(crc::crc32c(&content), slot.crc().unwrap());
            bytes.extend(content);
            reader.release(slot)?;
        }
    }
    Ok(bytes)
}

#[test]
fn a_slot_that_changes_in_spite_of_the_promise_is_found_when_it_is_given_back() {
    let (region, mut writer) = snapshot(0);
    fill(&region, &mut writer, &[1; 4 * 4096], 4096);
    let (reader, mut peer) = reader(&region, true, expect(GEOMETRY));
    let mut reader = reader.unchanging();
    reader.pump(&mut peer).unwrap();
    let (first, alone) = (reader.next_slot().unwrap(), {
        reader.pump(&mut peer).unwrap();
        reader.next_slot().unwrap()
    });
    writer.retire(2);
    fill(&region, &mut writer, &[2; 2 * 4096], 4096);
    assert!(matches!(reader.release(first), Err(Error::Overrun { .. })));
    assert!(matches!(alone.release_alone(), Err(Error::Overrun { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_is_written_in_any_steps_is_read_but_for_the_trimmed_end(
        length in prop_oneof![0usize..4 * 4096, Just(4096), Just(8192), Just(4096 + 40), Just(4 * 4096)],
        step in 1usize..5000,
        hold_back in 0u32..60,
        trim in 0u64..60,
        in_place: bool,
        unchanging: bool,
    ) {
        let (region, mut writer) = snapshot(hold_back);
        let truth: Vec<u8> = (0..length).map(|i| (i * 7 + i / 256) as u8).collect();
        fill(&region, &mut writer, &truth, step);
        let trim = trim.min(u64::from(hold_back)).min(length as u64);
        prop_assert_eq!(writer.finish(trim).unwrap(), length as u64 - trim);
        prop_assert_eq!(writer.published_slots(), (length as u64 - trim).div_ceil(4096));
        let (reader, mut peer) = reader(&region, in_place, expect(GEOMETRY));
        let mut reader = if unchanging { reader.unchanging() } else { reader };
        let found = read_all(&mut reader, &mut peer).unwrap();
        prop_assert_eq!(&found[..], &truth[..length - trim as usize]);
    }
}

#[test]
fn an_empty_snapshot_is_complete_without_a_slot() {
    let (region, mut writer) = snapshot(40);
    assert_eq!(writer.finish(0).unwrap(), 0);
    let (mut reader, mut peer) = reader(&region, false, expect(GEOMETRY));
    assert_eq!(read_all(&mut reader, &mut peer).unwrap(), []);
    assert_eq!(reader.progress().end, Some(0));
}

#[test]
fn bytes_that_may_be_the_mark_are_not_published() {
    let (region, mut writer) = snapshot(40);
    fill(&region, &mut writer, &[1; 4096 + 39], 4096);
    assert_eq!(writer.published_slots(), 0);
    fill(&region, &mut writer, &[1; 1], 1);
    assert_eq!(writer.published_slots(), 1);
}

#[test]
fn a_full_ring_waits_until_slots_are_retired_and_is_retained_until_then() {
    let (region, mut writer) = snapshot(0);
    fill(&region, &mut writer, &[1; 4 * 4096], 4096);
    assert_eq!(writer.space(), None);
    assert!(writer.is_retained());
    writer.retire(1);
    assert!(writer.is_retained(), "nothing was overwritten yet");
    assert!(writer.space().is_some());
    assert!(!writer.is_retained());
    assert_eq!(writer.retired(), 1);
    fill(&region, &mut writer, &[2; 4096], 4096);
    assert_eq!(writer.space(), None);
    let (mut late, mut peer) = reader(&region, false, expect(GEOMETRY));
    writer.finish(0).unwrap();
    assert!(matches!(read_all(&mut late, &mut peer), Err(Error::Overrun { wanted: 0, .. })));
}

#[test]
fn wrong_use_of_a_writer_is_refused() {
    let (_, mut writer) = snapshot(8);
    assert!(matches!(writer.advance(1), Err(Error::Misuse(_))), "without space");
    let space = writer.space().unwrap();
    assert!(matches!(writer.advance(space.end - space.start + 1), Err(Error::Misuse(_))));
    assert!(matches!(writer.finish(9), Err(Error::Misuse(_))));
    writer.finish(0).unwrap();
    assert_eq!(writer.space(), None);
    assert!(matches!(writer.finish(0), Err(Error::Misuse(_))));
}

#[test]
fn a_damaged_slot_is_named_after_a_second_look() {
    for in_place in [false, true] {
        let (region, mut writer) = snapshot(0);
        fill(&region, &mut writer, &[1; 2 * 4096], 4096);
        writer.finish(0).unwrap();
        region.write(GEOMETRY.slot_offset(1) + 100, &[2]).unwrap();
        let (mut reader, mut peer) = reader(&region, in_place, expect(GEOMETRY));
        let error = read_all(&mut reader, &mut peer).unwrap_err();
        let want = crc::crc32c(&[1; 4096]);
        assert!(matches!(error, Error::Corrupt { slot: 1, want: w, got } if w == want && got != want), "{error}");
    }
}

#[test]
fn a_slot_used_in_place_while_it_was_overwritten_is_reported_at_release() {
    let (region, mut writer) = snapshot(0);
    fill(&region, &mut writer, &[1; 4 * 4096], 4096);
    let (mut reader, mut peer) = reader(&region, true, expect(GEOMETRY));
    reader.pump(&mut peer).unwrap();
    let slot = reader.next_slot().unwrap();
    writer.retire(1);
    writer.space().unwrap();
    assert!(matches!(reader.release(slot), Err(Error::Overrun { wanted: 0, .. })));
}

#[test]
fn an_aborted_snapshot_says_so() {
    for in_place in [false, true] {
        let (region, mut writer) = snapshot(0);
        fill(&region, &mut writer, &[1; 4096], 4096);
        writer.abort();
        assert_eq!(writer.state(), State::Aborted);
        let (mut reader, mut peer) = reader(&region, in_place, expect(GEOMETRY));
        assert!(matches!(read_all(&mut reader, &mut peer), Err(Error::Aborted { generation: 7 })));
    }
}

#[test]
fn a_table_of_another_generation_replid_offset_or_kind_is_refused() {
    let (region, mut writer) = snapshot(0);
    writer.finish(0).unwrap();
    let right = expect(GEOMETRY);
    let wrong = [
        Origin { generation: 8, ..right.origin },
        Origin { history: ReplId::try_from([b'b'; 40]).unwrap(), ..right.origin },
        Origin { offset: 1, ..right.origin },
    ];
    for origin in wrong {
        let expect = Expectation { origin, ..right.clone() };
        for in_place in [false, true] {
            let (mut reader, mut peer) = reader(&region, in_place, expect.clone());
            assert!(matches!(read_all(&mut reader, &mut peer), Err(Error::WrongGeneration { .. })));
        }
    }
    let (sink, layout) = sink(GEOMETRY, 2);
    let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 0);
    let mut journal = JournalReader::new(None, sink, layout, right, FIRST_OFFSET + 1).unwrap();
    let refused = (0..10).find_map(|_| journal.pump(&mut peer).err());
    assert!(matches!(refused, Some(Error::WrongGeneration { .. })));
}

#[test]
fn memory_that_is_not_a_table_is_refused() {
    let region = memory(GEOMETRY.memory_len());
    let (mut reader, mut peer) = reader(&region, false, expect(GEOMETRY));
    let error = read_all(&mut reader, &mut peer).unwrap_err();
    assert!(matches!(error, Error::Layout(_)), "{error}");
}

#[test]
fn a_line_caught_in_the_middle_of_a_change_is_read_again() {
    let (region, mut writer) = snapshot(0);
    fill(&region, &mut writer, &[1; 4096], 4096);
    writer.finish(0).unwrap();
    let right = region.load_u64(LINE_OFFSET, std::sync::atomic::Ordering::Relaxed).unwrap();
    region.store_u64(LINE_OFFSET, 1 << 40, std::sync::atomic::Ordering::Relaxed).unwrap();
    let (mut reader, mut peer) = reader(&region, false, expect(GEOMETRY));
    for _ in 0..10 {
        reader.pump(&mut peer).unwrap();
        assert_eq!(reader.progress().published, 0);
    }
    region.store_u64(LINE_OFFSET, right, std::sync::atomic::Ordering::Relaxed).unwrap();
    assert_eq!(read_all(&mut reader, &mut peer).unwrap(), [1; 4096]);
}

#[test]
fn an_idle_pump_looks_at_the_line_once_and_at_nothing_else() {
    let (region, mut writer) = snapshot(0);
    fill(&region, &mut writer, &[1; 100], 100);
    let (mut reader, mut peer) = reader(&region, false, expect(GEOMETRY));
    for _ in 0..5 {
        reader.pump(&mut peer).unwrap();
    }
    assert!(reader.is_caught_up());
    let before = peer.completed;
    for _ in 0..10 {
        reader.pump(&mut peer).unwrap();
    }
    assert_eq!(peer.completed - before, 10);
}

#[test]
fn each_slot_costs_its_pieces_and_one_small_read() {
    let (region, mut writer) = snapshot(0);
    fill(&region, &mut writer, &[1; 3 * 4096], 4096);
    writer.finish(0).unwrap();
    let (mut reader, mut peer) = reader(&region, false, expect(GEOMETRY));
    read_all(&mut reader, &mut peer).unwrap();
    assert_eq!(peer.completed, 2 + 3 * 2, "head and line, then data and entry of three slots");
}

#[test]
fn a_journal_that_was_given_up_is_read_to_its_end_first() {
    for in_place in [false, true] {
        let region = memory(GEOMETRY.memory_len());
        let mut writer = JournalWriter::create(Arc::clone(&region), GEOMETRY, identity(Kind::Journal)).unwrap();
        writer.append(b"last words").unwrap();
        writer.abort();
        assert!(matches!(writer.append(b"more"), Err(Error::Misuse(_))));
        let (sink, layout) = sink(GEOMETRY, 2);
        let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 0);
        let view = in_place.then(|| Arc::new(region.open_view().unwrap()));
        let start = FIRST_OFFSET + 6;
        let mut reader = JournalReader::new(view, sink, layout, expect(GEOMETRY), start).unwrap();
        let chunk = loop {
            reader.pump(&mut peer).unwrap();
            if let Some(chunk) = reader.next_chunk() {
                break chunk;
            }
        };
        assert_eq!((chunk.offset, &chunk.bytes[..]), (start, &b"words"[..]));
        let end = (0..10).find_map(|_| reader.pump(&mut peer).err());
        assert!(matches!(end, Some(Error::Aborted { generation: 7 })));
    }
}

#[test]
fn an_offset_that_is_no_longer_held_is_refused_with_the_oldest_that_is() {
    for in_place in [false, true] {
        let region = memory(GEOMETRY.memory_len());
        let mut writer = JournalWriter::create(Arc::clone(&region), GEOMETRY, identity(Kind::Journal)).unwrap();
        writer.append(&[7; 40_000]).unwrap();
        let (sink, layout) = sink(GEOMETRY, 2);
        let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 0);
        let view = in_place.then(|| Arc::new(region.open_view().unwrap()));
        let start = FIRST_OFFSET + 1;
        let mut reader = JournalReader::new(view, sink, layout, expect(GEOMETRY), start).unwrap();
        let error = (0..50).find_map(|_| reader.pump(&mut peer).err()).unwrap();
        let first = writer.first_offset();
        assert!(
            matches!(error, Error::Overrun { wanted, oldest, .. } if wanted == start && oldest == first),
            "{error}"
        );
    }
}

#[test]
fn a_reader_that_takes_nothing_is_told_how_far_the_writer_is_and_when_it_has_passed() {
    for in_place in [false, true] {
        let region = memory(GEOMETRY.memory_len());
        let mut writer = JournalWriter::create(Arc::clone(&region), GEOMETRY, identity(Kind::Journal)).unwrap();
        writer.append(b"hello").unwrap();
        let (sink, layout) = sink(GEOMETRY, 2);
        let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 0);
        let view = in_place.then(|| Arc::new(region.open_view().unwrap()));
        let mut reader = JournalReader::new(view, sink, layout, expect(GEOMETRY), FIRST_OFFSET + 1).unwrap();
        assert_eq!(reader.look(&mut peer, 0).unwrap(), None, "it has read nothing");
        while reader.next_chunk().is_none() {
            reader.pump(&mut peer).unwrap();
        }
        let mut looks = |elsewhere| (0..50).map(|_| reader.look(&mut peer, elsewhere)).last().unwrap();
        let before = looks(0).unwrap().unwrap();
        writer.append(&[7; 100]).unwrap();
        let after = looks(0).unwrap().unwrap();
        assert_eq!(after.written - before.written, before.left - after.left);
        assert!(after.written > before.written + 100, "a record has a header: {after:?}");
        assert!(after.left < GEOMETRY.memory_len());

        writer.append(&[7; 40_000]).unwrap();
        let behind = writer.first_offset() - FIRST_OFFSET;
        assert!(matches!(looks(0), Err(Error::Overrun { .. })), "{behind} bytes behind");
        let room = looks(1 << 20).unwrap().unwrap();
        assert_eq!(room.left, (1 << 20) - room.written, "someone else has the last MiB");
    }
}

#[test]
fn a_damaged_record_is_named_after_a_second_look() {
    for in_place in [false, true] {
        let region = memory(GEOMETRY.memory_len());
        let mut writer = JournalWriter::create(Arc::clone(&region), GEOMETRY, identity(Kind::Journal)).unwrap();
        writer.append(b"hello").unwrap();
        region.write(GEOMETRY.slot_offset(0) + 8, b"j").unwrap();
        let (sink, layout) = sink(GEOMETRY, 2);
        let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 0);
        let view = in_place.then(|| Arc::new(region.open_view().unwrap()));
        let mut reader = JournalReader::new(view, sink, layout, expect(GEOMETRY), FIRST_OFFSET + 1).unwrap();
        let error = (0..50).find_map(|_| reader.pump(&mut peer).err()).unwrap();
        let got = crc::crc32c(b"jello");
        assert!(matches!(error, Error::Corrupt { slot: 0, got: g, .. } if g == got), "{error}");
    }
}

/// Byte `k` of the stream: computable without keeping the stream.
fn byte(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

#[test]
fn a_reader_in_place_is_passed_but_never_fooled() {
    let geometry = Geometry { slot_size: 4096, slots: 2 };
    let region = memory(geometry.memory_len());
    let mut writer = JournalWriter::create(Arc::clone(&region), geometry, identity(Kind::Journal)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let writing = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            let start = writer.end_offset();
            let bytes: Vec<u8> = (start..start + 50 + start % 500).map(byte).collect();
            writer.append(&bytes).unwrap();
        }
    });
    let view = Arc::new(region.open_view().unwrap());
    let (sink, layout) = sink(geometry, 1);
    let mut peer = TornPeer::new(&region, &sink, Faults::NONE, 0);
    let mut start = FIRST_OFFSET + 1;
    let (mut taken, mut passed) = (0, 0);
    let begun = Instant::now();
    // On a busy machine the reader may hardly run in the shortest time.
    let is_over = |taken: usize, passed: u32| {
        let time = begun.elapsed();
        time > LONGEST || (time > SHORTEST && is_enough(taken, passed))
    };
    while !is_over(taken, passed) {
        let view = Some(Arc::clone(&view));
        let mut reader = JournalReader::new(view, Arc::clone(&sink), layout, expect(geometry), start).unwrap();
        let error = loop {
            if let Err(error) = reader.pump(&mut peer) {
                break Some(error);
            }
            while let Some(chunk) = reader.next_chunk() {
                let wrong = (chunk.offset..).zip(&chunk.bytes).find(|&(offset, &found)| found != byte(offset));
                assert_eq!(wrong, None, "wrong byte");
                taken += chunk.bytes.len();
            }
            if is_over(taken, passed) {
                break None;
            }
        };
        match error {
            // Somewhere in what is held now, or will be.
            Some(Error::Overrun { .. }) => (passed, start) = (passed + 1, newest(&region, geometry)),
            Some(other) => panic!("{other}"),
            None => {}
        }
    }
    stop.store(true, Ordering::Relaxed);
    writing.join().unwrap();
    assert!(is_enough(taken, passed), "{taken} bytes taken, passed {passed} times");
}

/// How long the reader reads, and how long it has at the most for what is enough.
const SHORTEST: Duration = Duration::from_millis(300);
const LONGEST: Duration = Duration::from_secs(30);

fn is_enough(taken: usize, passed: u32) -> bool {
    taken > 10_000 && passed > 0
}

/// Where the newest slot begins, as far as visible from outside.
fn newest(region: &Arc<remora_fabric::Memory>, geometry: Geometry) -> u64 {
    loop {
        let entries = [0, 1].map(|slot| crate::publish::load_entry(region, &geometry, slot, None).unwrap());
        let newest = entries.into_iter().flatten().filter(|entry| !entry.writing).map(|entry| entry.position).max();
        if let Some(newest) = newest {
            return newest;
        }
    }
}
