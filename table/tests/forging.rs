//! A sealed table over TCP, through a proxy that changes bytes on their way, or sends what it has recorded of another
//! moment or another table in their place. The proxy knows neither the token nor the key, as an attacker on the
//! network.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
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
    identity_of(kind, 1)
}

fn identity_of(kind: Kind, generation: u64) -> Identity {
    let history = ReplId::try_from([b'f'; 40]).unwrap();
    Identity { kind, origin: Origin { generation, history, offset: FIRST_OFFSET } }
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
    sealed_as(kind, identity(kind))
}

fn sealed_as(kind: Kind, identity: Identity) -> Arc<Memory> {
    let (plain, sealed) = (memory(GEOMETRY.memory_len()), memory(GEOMETRY.memory_len()));
    match kind {
        Kind::Snapshot => {
            let mut writer = SnapshotWriter::create(Arc::clone(&plain), GEOMETRY, identity.clone(), 0).unwrap();
            let target = Arc::clone(&sealed);
            let mut sealer = SnapshotSealer::create(plain, target, GEOMETRY, identity, &key()).unwrap();
            writer.append(&content()).unwrap();
            writer.finish(0).unwrap();
            while sealer.pump().unwrap() {}
        }
        Kind::Journal => {
            let table = Arc::clone(&sealed);
            let mut writer = JournalWriter::create_sealed(table, GEOMETRY, identity, &key()).unwrap();
            content().chunks(5000).for_each(|record| writer.append(record).unwrap());
        }
    }
    sealed
}

/// What the proxy does to the bytes that the source sends after the handshake.
#[derive(Clone, Debug)]
enum Attack {
    /// One byte of the connection is changed.
    Byte { at: usize, by: u8 },
    /// Recorded bytes stand in the place of those at this offset of the region, whenever they are read.
    Replay(Vec<(u64, Vec<u8>)>),
}

impl Attack {
    const NONE: Attack = Attack::Replay(Vec::new());

    /// The bytes of those ranges in a recorded table, at the same place, or at that of another slot.
    fn replay(recorded: &Memory, ranges: impl IntoIterator<Item = (Range<u64>, u64)>) -> Attack {
        let record = |(range, at): (Range<u64>, u64)| {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            recorded.read(range.start, &mut bytes).unwrap();
            (at, bytes)
        };
        Attack::Replay(ranges.into_iter().map(record).collect())
    }
}

/// The progress line, and the entry and the bytes of a slot, as `table/README.md` has them.
const LINE: Range<u64> = 128..192;

fn entry(number: u64) -> Range<u64> {
    let at = 4096 + 64 * (number % u64::from(GEOMETRY.slots));
    at..at + 64
}

fn slot(number: u64) -> Range<u64> {
    let size = u64::from(GEOMETRY.slot_size);
    let at = GEOMETRY.memory_len() - size * u64::from(GEOMETRY.slots) + size * (number % u64::from(GEOMETRY.slots));
    at..at + size
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
            match attack.clone() {
                Attack::Byte { at, by } => {
                    thread::spawn(move || pass(&up, &down, None));
                    thread::spawn(move || pass(&source, &reader, Some((at, by))));
                }
                Attack::Replay(recorded) => {
                    let places = Arc::new(Mutex::new(HashMap::new()));
                    let noted = Arc::clone(&places);
                    thread::spawn(move || ended(note(&up, &down, &noted), &up, &down));
                    thread::spawn(move || ended(replay(&source, &reader, &places, &recorded), &source, &reader));
                }
            }
        }
    });
    listener
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, attack: Option<(usize, u8)>) {
    let (mut buffer, mut done) = (vec![0; 64 << 10], 0);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if let Some((at, by)) = attack
            && let Some(byte) = at.checked_sub(done).and_then(|at| buffer[..n].get_mut(at))
        {
            *byte ^= by;
        }
        done += n;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    ended(Ok(()), from, to);
}

fn ended(_why: std::io::Result<()>, from: &TcpStream, to: &TcpStream) {
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// The offset in the region of what the requests with these tags have yet to get. See `fabric/README.md`.
type Places = Mutex<HashMap<u64, u64>>;

/// Passes the reader's requests on, and notes their places.
fn note(mut from: &TcpStream, mut to: &TcpStream, places: &Places) -> std::io::Result<()> {
    // Hello and proof.
    let mut opening = [0; 64 + 32];
    from.read_exact(&mut opening[..64])?;
    to.write_all(&opening[..64])?;
    from.read_exact(&mut opening[64..])?;
    to.write_all(&opening[64..])?;
    let mut request = [0; 32];
    loop {
        from.read_exact(&mut request)?;
        places.lock().unwrap().insert(word(&request, 0), word(&request, 16));
        to.write_all(&request)?;
    }
}

/// Passes the source's answers on, with recorded bytes where there are some.
fn replay(
    mut from: &TcpStream,
    mut to: &TcpStream,
    places: &Places,
    recorded: &[(u64, Vec<u8>)],
) -> std::io::Result<()> {
    // Challenge and welcome, each of 48 bytes.
    let mut opening = [0; 48];
    for _ in 0..2 {
        from.read_exact(&mut opening)?;
        to.write_all(&opening)?;
    }
    let mut head = [0; 16];
    loop {
        from.read_exact(&mut head)?;
        let mut bytes = vec![0; (word(&head, 8) >> 32) as usize];
        from.read_exact(&mut bytes)?;
        let at = match places.lock().unwrap().get_mut(&word(&head, 0)) {
            Some(place) => {
                *place += bytes.len() as u64;
                *place - bytes.len() as u64
            }
            None => u64::MAX,
        };
        for (start, instead) in recorded {
            let end = (start + instead.len() as u64).min(at.saturating_add(bytes.len() as u64));
            for offset in at.max(*start)..end {
                bytes[(offset - at) as usize] = instead[(offset - start) as usize];
            }
        }
        to.write_all(&head)?;
        to.write_all(&bytes)?;
    }
}

/// Eight bytes of a message as a number.
fn word(message: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(message[at..at + 8].try_into().unwrap())
}

/// What a reader behind the proxy delivers, and the error that ended it.
fn read(kind: Kind, region: &Arc<Memory>, attack: Attack) -> (Vec<u8>, Option<Error>) {
    read_from(kind, region, attack, 0)
}

/// The same of a reader that holds the slots below `first`.
fn read_from(kind: Kind, region: &Arc<Memory>, attack: Attack, first: u64) -> (Vec<u8>, Option<Error>) {
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
            let is_held = move |number: u64| number < first;
            let mut snapshot = SnapshotReader::new(None, Arc::clone(&sink), layout, expect(kind), is_held).unwrap();
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
                let is_whole = taken.len() == STREAM_BYTES || snapshot.is_complete();
                if pumped.is_err() || is_whole || begun.elapsed() > PATIENCE {
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
    let (taken, error) = read(kind, &region, Attack::NONE);
    assert!(error.is_none() && taken == content, "without an attack: {error:?}");
    let (mut named, mut whole) = (0, 0);
    for round in 0..40 {
        // The first bytes are head, line and the first entries; the others are mostly slots.
        let at = HANDSHAKE_BYTES + if round < 15 { round * 37 } else { round * 14_983 };
        let attack = Attack::Byte { at, by: 1 << (round % 8) };
        let (taken, error) = read(kind, &region, attack.clone());
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

/// A sealed snapshot that is written slot by slot.
struct Growing {
    writer: SnapshotWriter,
    sealer: SnapshotSealer,
    sealed: Arc<Memory>,
}

impl Growing {
    fn new() -> Growing {
        let (plain, sealed) = (memory(GEOMETRY.memory_len()), memory(GEOMETRY.memory_len()));
        let writer = SnapshotWriter::create(Arc::clone(&plain), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
        let target = Arc::clone(&sealed);
        let sealer = SnapshotSealer::create(plain, target, GEOMETRY, identity(Kind::Snapshot), &key()).unwrap();
        Growing { writer, sealer, sealed }
    }

    fn append(&mut self, bytes: &[u8]) {
        for slot in bytes.chunks(GEOMETRY.slot_size as usize) {
            self.writer.retire(self.sealer.sealed_slots());
            self.writer.append(slot).unwrap();
            while self.sealer.pump().unwrap() {}
        }
    }

    fn finish(&mut self) {
        self.writer.finish(0).unwrap();
        while self.sealer.pump().unwrap() {}
    }

    /// What an attacker may have recorded of it until now.
    fn recorded(&self) -> Memory {
        let copy = Memory::create("forging-test", GEOMETRY.memory_len(), Pages::Small).unwrap();
        let mut bytes = vec![0; GEOMETRY.memory_len() as usize];
        self.sealed.read(0, &mut bytes).unwrap();
        copy.write(0, &bytes).unwrap();
        copy
    }
}

#[test]
fn an_older_progress_line_withholds_slots_and_forges_none() {
    let (mut growing, content) = (Growing::new(), content());
    let half = 5 * GEOMETRY.slot_size as usize;
    growing.append(&content[..half]);
    let recorded = growing.recorded();
    growing.append(&content[half..]);
    growing.finish();
    let (taken, error) = read(Kind::Snapshot, &growing.sealed, Attack::replay(&recorded, [(LINE, LINE.start)]));
    assert!(error.is_none() && taken == content[..half], "{error:?}, {} bytes", taken.len());
}

#[test]
fn an_entry_and_a_slot_of_an_earlier_lap_are_not_used() {
    let slots = GEOMETRY.slots as usize;
    let content: Vec<u8> = content().into_iter().cycle().take((slots + 3) * GEOMETRY.slot_size as usize).collect();
    let mut growing = Growing::new();
    growing.append(&content[..slots * GEOMETRY.slot_size as usize]);
    let recorded = growing.recorded();
    growing.append(&content[slots * GEOMETRY.slot_size as usize..]);
    growing.finish();
    let first = u64::from(GEOMETRY.slots) - 2;
    let right = &content[first as usize * GEOMETRY.slot_size as usize..];
    let (taken, error) = read_from(Kind::Snapshot, &growing.sealed, Attack::NONE, first);
    assert!(error.is_none() && taken == right, "without an attack: {error:?}");
    for range in [entry(0), slot(0)] {
        let attack = Attack::replay(&recorded, [(range.clone(), range.start)]);
        let (taken, _) = read_from(Kind::Snapshot, &growing.sealed, attack, first);
        assert!(taken.len() <= 2 * GEOMETRY.slot_size as usize && right.starts_with(&taken), "{range:?}");
    }
    let both = [entry(0), slot(0)].map(|range| (range.clone(), range.start));
    let (taken, _) = read_from(Kind::Snapshot, &growing.sealed, Attack::replay(&recorded, both), first);
    assert!(taken.len() <= 2 * GEOMETRY.slot_size as usize && right.starts_with(&taken));
}

#[test]
fn slots_that_change_places_are_not_used() {
    let (region, content) = (sealed(Kind::Snapshot), content());
    let swapped = |place: fn(u64) -> Range<u64>| [(place(2), place(3).start), (place(3), place(2).start)];
    for ranges in [swapped(slot).to_vec(), swapped(entry).to_vec(), [swapped(slot), swapped(entry)].concat()] {
        let (taken, error) = read(Kind::Snapshot, &region, Attack::replay(&region, ranges.clone()));
        // An entry of another place is read again and again: longer than this test waits. It is not taken for one of a
        // later lap, after which the reader would begin again.
        let is_named = matches!(error, None | Some(Error::Forged { .. } | Error::Corrupt { .. }));
        assert!(is_named && (error.is_some() || ranges != swapped(slot)), "{ranges:?}: {error:?}");
        assert!(taken.len() <= 2 * GEOMETRY.slot_size as usize && content.starts_with(&taken), "{ranges:?}");
    }
}

/// The same secret, so that only what names the generation differs.
#[test]
fn what_belongs_to_another_generation_is_not_used() {
    for kind in [Kind::Snapshot, Kind::Journal] {
        let (region, other) = (sealed(kind), sealed_as(kind, identity_of(kind, 2)));
        for ranges in [vec![LINE], vec![slot(1)], vec![entry(1), slot(1)]] {
            let instead = ranges.iter().map(|range| (range.clone(), range.start));
            let (taken, error) = read(kind, &region, Attack::replay(&other, instead));
            // A line or an entry with a wrong MAC is read again and again: longer than this test waits.
            let is_named = matches!(error, None | Some(Error::Forged { .. } | Error::Corrupt { .. }));
            assert!(is_named && (error.is_some() || ranges != [slot(1)]), "{kind:?} {ranges:?}: {error:?}");
            assert!(taken.len() <= GEOMETRY.slot_size as usize && content().starts_with(&taken), "{kind:?} {ranges:?}");
        }
    }
}
