//! A sealed table over TCP, through a proxy that changes bytes on their way. The proxy knows neither the token nor the
//! key, as an attacker on the network.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::tcp::{TcpConnector, TcpExporter, TcpOptions};
use remora_fabric::{Connector, Exporter, Memory, Pages, RegionId, Regions};
use remora_redis::ReplId;
use remora_table::{
    Algorithm, Error, Expectation, Geometry, Identity, JournalReader, JournalWriter, Kind, Origin, SealKey, SinkLayout,
    SnapshotReader, SnapshotSealer, SnapshotWriter,
};

const ID: RegionId = RegionId { generation: 1, region: 0 };
const SESSION: u64 = 1;
const SECRET: [u8; 32] = [3; 32];
const GEOMETRY: Geometry = Geometry { slot_size: 64 << 10, slots: 16 };
const STREAM_BYTES: usize = 600_000;
const FIRST_OFFSET: u64 = 500;
/// A reader that has not ended after this time waits for bytes that the proxy withholds, which it may.
const PATIENCE: Duration = Duration::from_secs(2);

fn memory(length: u64) -> Arc<Memory> {
    Arc::new(Memory::create("forging-test", length, Pages::Small).unwrap())
}

fn identity(kind: Kind) -> Identity {
    let history = ReplId::try_from([b'f'; 40]).unwrap();
    Identity { kind, origin: Origin { generation: 1, history, offset: FIRST_OFFSET } }
}

fn key() -> SealKey {
    SealKey::new(Algorithm::best(), [5; SealKey::SECRET_BYTES])
}

fn content() -> Vec<u8> {
    (0..STREAM_BYTES as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn expect(kind: Kind) -> Expectation {
    Expectation::sealed(kind, identity(kind).origin, GEOMETRY, &key()).unwrap()
}

fn sealed(kind: Kind) -> Arc<Memory> {
    let (plain, sealed) = (memory(GEOMETRY.memory_len()), memory(GEOMETRY.memory_len()));
    match kind {
        Kind::Snapshot => {
            let mut writer = SnapshotWriter::create(Arc::clone(&plain), GEOMETRY, identity(kind), 0).unwrap();
            let target = Arc::clone(&sealed);
            let mut sealer = SnapshotSealer::create(plain, target, GEOMETRY, identity(kind), &key()).unwrap();
            writer.append(&content()).unwrap();
            writer.finish(0).unwrap();
            while sealer.pump().unwrap() {}
        }
        Kind::Journal => {
            let table = Arc::clone(&sealed);
            let mut writer = JournalWriter::create_sealed(table, GEOMETRY, identity(kind), &key()).unwrap();
            content().chunks(5000).for_each(|record| writer.append(record).unwrap());
        }
    }
    sealed
}

/// What the proxy does to one byte of those that the source sends after the handshake.
#[derive(Clone, Copy, Debug)]
struct Attack {
    at: usize,
    by: u8,
}

/// Bytes of challenge and welcome, at least: the handshake of a lane has its own protection.
const HANDSHAKE_BYTES: usize = 200;

/// A port whose connections go to the source, with the attack on what comes back. Ends when `over` is set.
fn proxy(attack: Attack, source: std::net::SocketAddr, over: &Arc<AtomicBool>) -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (accepting, over) = (listener.try_clone().unwrap(), Arc::clone(over));
    accepting.set_nonblocking(true).unwrap();
    thread::spawn(move || {
        while !over.load(Ordering::Relaxed) {
            let Ok((reader, _)) = accepting.accept() else {
                thread::sleep(Duration::from_millis(1));
                continue;
            };
            reader.set_nonblocking(false).unwrap();
            let source = TcpStream::connect(source).unwrap();
            let (up, down) = (reader.try_clone().unwrap(), source.try_clone().unwrap());
            thread::spawn(move || pass(&up, &down, None));
            thread::spawn(move || pass(&source, &reader, Some(attack)));
        }
    });
    listener
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, attack: Option<Attack>) {
    let (mut buffer, mut done) = (vec![0; 64 << 10], 0);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if let Some(byte) = attack.and_then(|attack| buffer[..n].get_mut(attack.at.checked_sub(done)?)) {
            *byte ^= attack.map_or(0, |attack| attack.by);
        }
        done += n;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// What a reader behind the proxy delivers, and the error that ended it.
fn read(kind: Kind, region: &Arc<Memory>, attack: Attack) -> (Vec<u8>, Option<Error>) {
    let options = TcpOptions { lanes: 1, ..TcpOptions::default() };
    let over = Arc::new(AtomicBool::new(false));
    let hidden = TcpExporter::new(options.clone(), None).unwrap();
    let source = hidden.listen("127.0.0.1:0").unwrap();
    hidden.export(ID, Arc::clone(region)).unwrap();
    hidden.grant(SESSION, SECRET, Regions::All);
    let proxy = proxy(attack, source, &over);
    // Its key differs from the source's in the address only: it leads to the proxy.
    let shown = TcpExporter::new(options.clone(), Some(proxy.local_addr().unwrap())).unwrap();
    shown.export(ID, Arc::clone(region)).unwrap();
    let connector = TcpConnector::new(options, None).unwrap();
    let layout = SinkLayout { offset: 0, buffers: 4 };
    let sink = memory(layout.length(&GEOMETRY));
    let mut taken = Vec::new();
    let connected = connector.connect(&shown.key(ID).unwrap(), SESSION, &SECRET, Arc::clone(&sink));
    let error = match connected {
        Err(error) => Some(error.into()),
        Ok(mut peer) => {
            let begun = Instant::now();
            let mut snapshot = SnapshotReader::new(None, Arc::clone(&sink), layout, expect(kind), |_| false).unwrap();
            let mut journal = JournalReader::new(None, sink, layout, expect(kind), FIRST_OFFSET + 1).unwrap();
            loop {
                let pumped = match kind {
                    Kind::Snapshot => snapshot.pump(&mut *peer),
                    Kind::Journal => journal.pump(&mut *peer),
                };
                while let Some(slot) = snapshot.next_slot() {
                    let (view, range) = slot.bytes();
                    let mut bytes = vec![0; slot.length as usize];
                    view.read(range.start, &mut bytes).unwrap();
                    taken.extend(bytes);
                    snapshot.release(slot).unwrap();
                }
                while let Some(chunk) = journal.next_chunk() {
                    taken.extend(chunk.bytes);
                }
                if pumped.is_err() || taken.len() == STREAM_BYTES || begun.elapsed() > PATIENCE {
                    break pumped.err();
                }
                let _ = peer.wait(Duration::from_millis(1));
            }
        }
    };
    over.store(true, Ordering::Relaxed);
    (taken, error)
}

/// One byte in many places, of head, line, entries, slots and records alike.
fn attacked_everywhere(kind: Kind) {
    let (region, content) = (sealed(kind), content());
    let (taken, error) = read(kind, &region, Attack { at: usize::MAX, by: 0 });
    assert!(error.is_none() && taken == content, "without an attack: {error:?}");
    let (mut named, mut whole) = (0, 0);
    for round in 0..40 {
        // The first bytes are head, line and the first entries; the others are mostly slots.
        let at = HANDSHAKE_BYTES + if round < 15 { round * 37 } else { round * 14_983 };
        let attack = Attack { at, by: 1 << (round % 8) };
        let (taken, error) = read(kind, &region, attack);
        assert!(content.starts_with(&taken), "{attack:?} changed what was delivered");
        named += usize::from(matches!(error, Some(Error::Forged { .. } | Error::Corrupt { .. })));
        whole += usize::from(error.is_none() && taken == content);
    }
    // A byte that was changed once is right when it is read again, so most readers deliver everything.
    assert!(named + whole > 10, "{named} named, {whole} whole of 40");
}

#[test]
fn a_proxy_that_changes_a_byte_of_a_snapshot_changes_nothing_that_is_delivered() {
    attacked_everywhere(Kind::Snapshot);
}

#[test]
fn a_proxy_that_changes_a_byte_of_a_journal_changes_nothing_that_is_delivered() {
    attacked_everywhere(Kind::Journal);
}
