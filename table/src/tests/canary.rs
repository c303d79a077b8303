//! Readers that make the mistakes that the protocol avoids, on the same torn peer: they must accept wrong bytes. If
//! they did not, the tests beside this one would prove nothing.

use std::sync::Arc;

use remora_fabric::{Memory, Peer, ReadRequest, memory::crc};

use super::{
    Random, identity, memory,
    peer::{Faults, TornPeer},
};
use crate::{
    Geometry, JournalWriter, Kind,
    layout::{ENTRY_BYTES, Entry, RECORD_HEADER_BYTES},
};

const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 2 };
const RECORD: usize = GEOMETRY.slot_size as usize - RECORD_HEADER_BYTES as usize;

/// What a reader checks before it accepts a slot.
#[derive(Debug, Clone, Copy)]
struct Trust {
    /// The entry, by a read that is posted after the bytes have arrived (instead of before them).
    entry_after: bool,
    checksum: bool,
}

/// Reads random slots while they are overwritten. Returns how many it accepted, and how many of those were wrong.
fn accepted_and_wrong(trust: Trust) -> (u64, u64) {
    let region = memory(GEOMETRY.memory_len());
    let sink = memory(2 * 4096);
    let mut writer = JournalWriter::create(Arc::clone(&region), GEOMETRY, identity(Kind::Journal)).unwrap();
    let mut peer = TornPeer::new(&region, &sink, Faults::TORN, 1);
    let mut random = Random(2);
    let mut truth: Vec<Vec<u8>> = Vec::new();
    let (mut accepted, mut wrong) = (0, 0);
    for _ in 0..4000 {
        let mut between = |random: &mut Random| {
            if truth.is_empty() || random.one_in(4) {
                truth.push(random.bytes(RECORD));
                writer.append(truth.last().unwrap()).unwrap();
            }
            truth.len() as u64 - 1
        };
        let slot = between(&mut random);
        let entry = ReadRequest { tag: 0, offset: GEOMETRY.entry_offset(slot), length: 64, sink_offset: 0 };
        let bytes = ReadRequest { tag: 0, offset: GEOMETRY.slot_offset(slot), length: 4096, sink_offset: 4096 };
        let order = if trust.entry_after { [bytes, entry] } else { [entry, bytes] };
        for request in order {
            peer.post_read(&[request]).unwrap();
            let mut arrived = Vec::new();
            while arrived.is_empty() {
                peer.poll(&mut arrived).unwrap();
                between(&mut random);
            }
        }
        let (right_slot, right_sum, content) = judge(&sink, slot);
        if right_slot && (right_sum || !trust.checksum) {
            accepted += 1;
            wrong += u64::from(content != truth[slot as usize]);
        }
    }
    (accepted, wrong)
}

fn judge(sink: &Memory, slot: u64) -> (bool, bool, Vec<u8>) {
    let mut entry = [0; ENTRY_BYTES];
    sink.read(0, &mut entry).unwrap();
    let right_slot = Entry::from_bytes(&entry, None).is_some_and(|entry| entry.number == slot && !entry.writing);
    let mut bytes = vec![0; 4096];
    sink.read(4096, &mut bytes).unwrap();
    let content = bytes.split_off(RECORD_HEADER_BYTES as usize);
    let right_sum = bytes[4..] == crc::crc32c(&content).to_le_bytes();
    (right_slot, right_sum, content)
}

#[test]
fn an_entry_read_before_the_bytes_accepts_torn_ones() {
    let (accepted, wrong) = accepted_and_wrong(Trust { entry_after: false, checksum: false });
    assert!(wrong > 100, "{wrong} of {accepted}: this peer tears too little to test anything");
}

/// A checksum alone detects torn bytes, but not the bytes of the next lap, which are complete and wrong.
#[test]
fn a_checksum_without_a_later_entry_accepts_another_lap() {
    let (accepted, wrong) = accepted_and_wrong(Trust { entry_after: false, checksum: true });
    assert!(wrong > 10, "{wrong} of {accepted}");
}

#[test]
fn an_entry_read_after_the_bytes_is_never_fooled() {
    let (accepted, wrong) = accepted_and_wrong(Trust { entry_after: true, checksum: false });
    assert!(accepted > 100);
    assert_eq!(wrong, 0);
}
