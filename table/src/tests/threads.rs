//! Real threads on real shared memory: a writer that overwrites as fast as it can, and readers in place.

// Stands alone: it races real threads; its sisters play operations one after the other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    FIRST_OFFSET, expect, identity, memory,
    peer::{Faults, TornPeer},
    sink,
};
use crate::{Error, Geometry, JournalReader, JournalWriter, Kind};

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
