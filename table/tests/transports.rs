//! Snapshot and journal over the real transports: a writer thread on one end, a reader on the other, a ring far smaller
//! than the stream. Not here: faults, which the models inside the crate draw from a seed.

#![allow(clippy::unwrap_used)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use remora_fabric::{
    Connector, Exporter, Memory, Pages, Peer, RegionId, Regions,
    memory::crc,
    shm::{ShmConnector, ShmExporter, ShmOptions},
    sim::{Faults, Network},
    tcp::{SendMode, TcpConnector, TcpExporter, TcpOptions},
};
use remora_redis::ReplId;
use remora_table::{
    Algorithm, Error, Expectation, Geometry, Identity, JournalReader, JournalWriter, Kind, Method, Origin, SealKey,
    SinkLayout, SnapshotReader, SnapshotSealer, SnapshotWriter, State,
};

const ID: RegionId = RegionId { generation: 1, region: 0 };
const SESSION: u64 = 1;
const SECRET: [u8; 32] = [3; 32];
const FIRST_OFFSET: u64 = 500;
const GEOMETRY: Geometry = Geometry { slot_size: 2 << 20, slots: 4 };
/// Content of the stream: several laps, and not a whole number of slots.
const STREAM_BYTES: u64 = (48 << 20) + 12_345;
/// After this time something hangs. Far above what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A transport with its two ends.
struct Ends {
    exporter: Box<dyn Exporter>,
    connector: Box<dyn Connector>,
    /// Whatever else must live as long as the ends.
    _network: Option<Network>,
}

fn shm() -> Ends {
    let exporter = ShmExporter::bind(ShmOptions::default()).unwrap();
    Ends { exporter: Box::new(exporter), connector: Box::new(ShmConnector::new()), _network: None }
}

fn tcp(send: SendMode, lanes: u8) -> Ends {
    let options = TcpOptions { send, lanes, ..TcpOptions::default() };
    let exporter = TcpExporter::new(options.clone(), None).unwrap();
    let address = exporter.listen("127.0.0.1:0").unwrap();
    let connector = TcpConnector::new(options, Some(address)).unwrap();
    Ends { exporter: Box::new(exporter), connector: Box::new(connector), _network: None }
}

fn sim() -> Ends {
    let network = Network::new(1, Faults::honest());
    let (exporter, connector) = (network.exporter(), network.connector());
    Ends { exporter: Box::new(exporter), connector: Box::new(connector), _network: Some(network) }
}

impl Ends {
    fn lend(&self, region: &Arc<Memory>) {
        self.exporter.export(ID, Arc::clone(region)).unwrap();
        self.exporter.grant(SESSION, SECRET, Regions::All);
    }

    fn connect(&self, sink: &Arc<Memory>) -> Box<dyn Peer> {
        let key = self.exporter.key(ID).unwrap();
        self.connector.connect(&key, SESSION, &SECRET, Arc::clone(sink)).unwrap()
    }
}

fn memory(length: u64) -> Arc<Memory> {
    Arc::new(Memory::create("transports-test", length, Pages::Small).unwrap())
}

fn identity(kind: Kind) -> Identity {
    Identity { kind, origin: origin() }
}

fn origin() -> Origin {
    Origin { generation: 1, history: ReplId::try_from([b'f'; 40]).unwrap(), offset: FIRST_OFFSET }
}

/// The key of a sealed table. Plain ones have none.
fn key(algorithm: Algorithm) -> Option<SealKey> {
    Some(SealKey::new(algorithm, [4; SealKey::SECRET_BYTES]))
}

fn expect(kind: Kind, key: Option<&SealKey>) -> Expectation {
    let sealed = |key| Expectation::sealed(kind, origin(), GEOMETRY, key).unwrap();
    key.map_or_else(|| Expectation::plain(origin(), GEOMETRY), sealed)
}

/// `length` bytes that differ from those at any other position.
fn content(position: u64, length: usize) -> Vec<u8> {
    let mut state = position.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = (0..length.div_ceil(8)).flat_map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()
    });
    words.take(length).collect()
}

/// The same of which compressors make something.
fn text(position: u64, length: usize) -> Vec<u8> {
    content(position, length).into_iter().map(|byte| b'a' + byte % 4).collect()
}

/// Writes the whole stream, as slowly as its readers need; the CRC-32C of all of it is the oracle.
fn write_snapshot(
    region: &Arc<Memory>,
    mut writer: SnapshotWriter,
    mut sealer: Option<SnapshotSealer>,
    passed: &AtomicU64,
    content: fn(u64, usize) -> Vec<u8>,
) -> u32 {
    let mut crc = 0;
    let mark = [b'#'; 40];
    while writer.received() < STREAM_BYTES + mark.len() as u64 {
        let passed = passed.load(Ordering::Acquire);
        let sealed = sealer.as_mut().map(|sealer| {
            while sealer.pump().unwrap() {}
            sealer.sealed_slots()
        });
        // Slots that are not sealed yet must not be overwritten either.
        writer.retire(sealed.map_or(passed, |sealed| sealed.min(passed)));
        let Some(space) = writer.space() else {
            std::thread::yield_now();
            continue;
        };
        let room = (space.end - space.start).min(100_000) as usize;
        let left = STREAM_BYTES.saturating_sub(writer.received()) as usize;
        let bytes = if left > 0 {
            let bytes = content(writer.received(), room.min(left));
            crc = crc::crc32c_append(crc, &bytes);
            bytes
        } else {
            let sent = (writer.received() - STREAM_BYTES) as usize;
            mark[sent..].iter().copied().take(room).collect()
        };
        region.write(space.start, &bytes).unwrap();
        writer.advance(bytes.len() as u64).unwrap();
    }
    assert_eq!(writer.finish(mark.len() as u64).unwrap(), STREAM_BYTES);
    if let Some(sealer) = &mut sealer {
        // The place of a slot in the sealed table is reused when the plain one has reused it, so none has to wait.
        while sealer.pump().unwrap() {}
        assert_eq!(sealer.state(), State::Sealed);
    }
    crc
}

fn snapshot_over(ends: Ends, in_place: bool, key: Option<SealKey>) {
    snapshot_by(ends, in_place, key, None);
}

/// `method`: the slots are compressed.
fn snapshot_by(ends: Ends, in_place: bool, key: Option<SealKey>, method: Option<Method>) {
    let region = memory(GEOMETRY.memory_len());
    let writer = SnapshotWriter::create(Arc::clone(&region), GEOMETRY, identity(Kind::Snapshot), 40).unwrap();
    let sealer = (key.is_some() || method.is_some()).then(|| {
        let (plain, sealed) = (Arc::clone(&region), memory(GEOMETRY.memory_len()));
        let identity = identity(Kind::Snapshot);
        ends.lend(&sealed);
        let sealer = match (&key, method) {
            (Some(key), None) => SnapshotSealer::create(plain, sealed, GEOMETRY, identity, key),
            (key, _) => SnapshotSealer::create_compressed(plain, sealed, GEOMETRY, identity, key.as_ref()),
        };
        let mut sealer = sealer.unwrap();
        sealer.compress_with(method);
        sealer
    });
    if sealer.is_none() {
        ends.lend(&region);
    }
    let layout = SinkLayout { offset: 0, buffers: 4 };
    let sink = memory(layout.length(&GEOMETRY));
    let mut peer = ends.connect(&sink);
    let view = peer.view().filter(|_| in_place);
    assert_eq!(view.is_some(), in_place);
    let passed = Arc::new(AtomicU64::new(0));
    let (shown, written) = (Arc::clone(&passed), Arc::clone(&region));
    let content = if method.is_some() { text } else { content };
    let writing = std::thread::spawn(move || write_snapshot(&written, writer, sealer, &shown, content));

    let expect = expect(Kind::Snapshot, key.as_ref()).with_compressed_slots(method.is_some());
    let mut reader = SnapshotReader::new(view, sink, layout, expect, |_| false).unwrap();
    let (mut crc, mut bytes) = (0, 0);
    let begun = Instant::now();
    while !reader.is_complete() {
        reader.pump(&mut *peer).unwrap();
        let mut idle = true;
        while let Some(slot) = reader.next_slot() {
            idle = false;
            let (memory, range) = slot.bytes();
            crc = memory.crc32c_append(crc, range).unwrap();
            bytes += u64::from(slot.length);
            let number = slot.number;
            reader.release(slot).unwrap();
            passed.store(number + 1, Ordering::Release);
        }
        if idle {
            peer.wait(Duration::from_millis(1)).unwrap();
        }
        assert!(begun.elapsed() < PATIENCE, "{:?}", reader.progress());
    }
    assert_eq!((bytes, crc), (STREAM_BYTES, writing.join().unwrap()));
}

fn journal_over(ends: Ends, in_place: bool, key: Option<SealKey>) {
    journal_by(ends, in_place, key, false);
}

fn journal_by(ends: Ends, in_place: bool, key: Option<SealKey>, compressed: bool) {
    const JOURNAL_BYTES: u64 = 3 << 20;
    let region = memory(GEOMETRY.memory_len());
    let (table, identity) = (Arc::clone(&region), identity(Kind::Journal));
    let writer = match &key {
        Some(key) if compressed => JournalWriter::create_compressed(table, GEOMETRY, identity, key),
        Some(key) => JournalWriter::create_sealed(table, GEOMETRY, identity, key),
        None => JournalWriter::create(table, GEOMETRY, identity),
    };
    let mut writer = writer.unwrap();
    writer.compress(compressed);
    ends.lend(&region);
    let layout = SinkLayout { offset: 0, buffers: 2 };
    let sink = memory(layout.length(&GEOMETRY));
    let mut peer = ends.connect(&sink);
    let view = peer.view().filter(|_| in_place);
    // As many bytes as the ring certainly holds, so that the reader is not overrun however slow the machine is.
    let content = if compressed { text } else { content };
    let writing = std::thread::spawn(move || {
        let mut crc = 0;
        let mut position = 0;
        while position < JOURNAL_BYTES {
            let bytes = content(position, (1 + position % 777).min(JOURNAL_BYTES - position) as usize);
            crc = crc::crc32c_append(crc, &bytes);
            writer.append(&bytes).unwrap();
            position += bytes.len() as u64;
        }
        crc
    });

    let expect = expect(Kind::Journal, key.as_ref()).with_compressed_slots(compressed);
    let mut reader = JournalReader::new(view, sink, layout, expect, FIRST_OFFSET + 1).unwrap();
    let (mut crc, mut next) = (0, FIRST_OFFSET + 1);
    let begun = Instant::now();
    while next < FIRST_OFFSET + 1 + JOURNAL_BYTES {
        reader.pump(&mut *peer).unwrap();
        while let Some(chunk) = reader.next_chunk() {
            assert_eq!(chunk.offset, next);
            crc = crc::crc32c_append(crc, &chunk.bytes);
            next += chunk.bytes.len() as u64;
        }
        if reader.is_caught_up() {
            peer.wait(Duration::from_millis(1)).unwrap();
        }
        assert!(begun.elapsed() < PATIENCE, "at {}", reader.position());
    }
    assert_eq!(crc, writing.join().unwrap());
}

#[test]
fn a_snapshot_many_times_the_ring_crosses_shared_memory_without_a_copy() {
    snapshot_over(shm(), true, None);
}

#[test]
fn a_snapshot_many_times_the_ring_crosses_shared_memory_by_reads() {
    snapshot_over(shm(), false, None);
}

#[test]
fn a_snapshot_many_times_the_ring_crosses_tcp() {
    snapshot_over(tcp(SendMode::Copy, 1), false, None);
}

#[test]
fn a_snapshot_many_times_the_ring_crosses_tcp_by_sendfile_and_two_lanes() {
    snapshot_over(tcp(SendMode::File, 2), false, None);
}

#[test]
fn a_snapshot_many_times_the_ring_crosses_the_simulated_network() {
    snapshot_over(sim(), false, None);
}

#[test]
fn a_journal_is_followed_in_shared_memory() {
    journal_over(shm(), true, None);
}

#[test]
fn a_journal_is_followed_over_tcp() {
    journal_over(tcp(SendMode::Copy, 1), false, None);
}

#[test]
fn a_journal_is_followed_over_tcp_by_sendfile() {
    journal_over(tcp(SendMode::File, 1), false, None);
}

#[test]
fn a_sealed_snapshot_many_times_the_ring_crosses_tcp() {
    snapshot_over(tcp(SendMode::Copy, 1), false, key(Algorithm::Aes256Gcm));
}

#[test]
fn a_sealed_snapshot_many_times_the_ring_crosses_tcp_by_sendfile_and_two_lanes() {
    snapshot_over(tcp(SendMode::File, 2), false, key(Algorithm::ChaCha20Poly1305));
}

#[test]
fn a_sealed_snapshot_many_times_the_ring_crosses_the_simulated_network() {
    snapshot_over(sim(), false, key(Algorithm::best()));
}

#[test]
fn a_compressed_snapshot_many_times_the_ring_crosses_tcp_by_sendfile_and_two_lanes() {
    snapshot_by(tcp(SendMode::File, 2), false, None, Some(Method::Lz4));
}

#[test]
fn a_compressed_snapshot_many_times_the_ring_crosses_the_simulated_network() {
    snapshot_by(sim(), false, None, Some(Method::Zstd));
}

#[test]
fn a_snapshot_that_is_compressed_and_sealed_crosses_tcp() {
    snapshot_by(tcp(SendMode::Copy, 1), false, key(Algorithm::best()), Some(Method::Zstd));
}

#[test]
fn a_sealed_journal_is_followed_over_tcp() {
    journal_over(tcp(SendMode::Copy, 1), false, key(Algorithm::ChaCha20Poly1305));
}

#[test]
fn a_sealed_journal_is_followed_over_tcp_by_sendfile() {
    journal_over(tcp(SendMode::File, 1), false, key(Algorithm::Aes256Gcm));
}

#[test]
fn a_sealed_journal_is_followed_over_the_simulated_network() {
    journal_over(sim(), false, key(Algorithm::best()));
}

#[test]
fn a_journal_that_is_compressed_and_sealed_is_followed_over_tcp() {
    journal_by(tcp(SendMode::File, 1), false, key(Algorithm::best()), true);
}

#[test]
fn a_region_smaller_than_the_table_offered_is_called_so() {
    let ends = sim();
    let small = memory(64);
    ends.lend(&small);
    let layout = SinkLayout { offset: 0, buffers: 1 };
    let sink = memory(layout.length(&GEOMETRY));
    let mut peer = ends.connect(&sink);
    let mut reader = SnapshotReader::new(None, sink, layout, expect(Kind::Snapshot, None), |_| false).unwrap();
    let error = (0..100).find_map(|_| reader.pump(&mut *peer).err());
    assert!(matches!(error, Some(Error::Layout(_))), "{error:?}");
}
