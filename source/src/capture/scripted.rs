//! A capture for tests, and a scripted primary at the other end of its connection.
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use remora_fabric::shm::Place;
use remora_fabric::sim::{Faults, Network, SimExporter};
use remora_fabric::{Connector, Exporter, Memory, Pages, Peer, RegionId, Regions};
use remora_redis::ReplId;
use remora_table::layout::LINE_OFFSET;
use remora_table::{
    Algorithm, Expectation, Geometry, JournalReader, Kind, Origin, SealKey, SinkLayout, SnapshotReader, State,
};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::method::ModuleRules;
use super::psync_link::{Received, Socket};
use super::{Capture, CaptureError, CaptureEvent, Plan, TICK, Tried};
use crate::captured::Captured;
use crate::gauge::Gauge;
use crate::options::{Compress, ModuleCapture, TuningOptions};
use crate::server_settings::Tuning;
use crate::tables::{RemoteTable, SealedTable};
use remora_server::{Credentials, Server, Stream, Task, TlsOptions};

/// A time that only a broken machine exceeds.
pub(super) const LONG: Duration = Duration::from_secs(30);

/// Bytes of one slot, and how many slots the snapshot's table has.
pub(super) const SLOT_BYTES: u32 = 4096;
pub(super) const SLOTS: u32 = 8;

/// The history that the scripted primary names.
pub(super) const HISTORY: &str = "0123456789abcdef0123456789abcdef01234567";

/// The mark that ends its payload.
pub(super) const MARK: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// The handshake for a snapshot, up to `+FULLRESYNC` at offset 77.
pub(super) const FULL: [(&str, &str); 3] = [
    ("PING", "+PONG\r\n"),
    ("REPLCONF capa eof capa psync2", "+OK\r\n"),
    ("PSYNC ? -1", "\n\n+FULLRESYNC 0123456789abcdef0123456789abcdef01234567 77\r\n\n"),
];

pub(super) fn history() -> ReplId {
    ReplId::parse(HISTORY.as_bytes()).unwrap()
}

/// A table's memory, zeroed, with its shape.
fn table(name: &str) -> (Arc<Memory>, Geometry) {
    let geometry = Geometry { slot_size: SLOT_BYTES, slots: SLOTS }.checked().unwrap();
    (Arc::new(Memory::create(name, geometry.memory_len(), Pages::Small).unwrap()), geometry)
}

/// The memory of a sealed table, zeroed, with a key.
fn sealed(name: &str, secret: u8) -> SealedTable {
    let key = SealKey::new(Algorithm::best(), [secret; SealKey::SECRET_BYTES]);
    SealedTable { memory: table(name).0, key, compressed: true }
}

/// A table's memory as a replica reads it: who lends it as long as it lives, the peer, where its bytes arrive, and in
/// which buffers.
fn lent(memory: &Arc<Memory>, geometry: &Geometry) -> (SimExporter, Box<dyn Peer>, Arc<Memory>, SinkLayout) {
    const ID: RegionId = RegionId { generation: 5, region: 0 };
    let network = Network::new(1, Faults::honest());
    let (exporter, layout) = (network.exporter(), SinkLayout { offset: 0, buffers: 2 });
    exporter.export(ID, memory.clone()).unwrap();
    exporter.grant(1, [1; 32], Regions::All);
    let sink = Arc::new(Memory::create("test-sink", layout.length(geometry), Pages::Small).unwrap());
    let peer = network.connector().connect(&exporter.key(ID).unwrap(), 1, &[1; 32], sink.clone()).unwrap();
    (exporter, peer, sink, layout)
}

/// The first `length` bytes of a table's slots.
fn bytes_of((memory, geometry): &(Arc<Memory>, Geometry), length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for (number, slot) in (0..).zip(bytes.chunks_mut(SLOT_BYTES as usize)) {
        memory.read(geometry.slot_offset(number), slot).unwrap();
    }
    bytes
}

/// A capture and what it reports.
pub(super) struct Rig {
    pub(super) capture: Capture,
    pub(super) events: UnboundedReceiver<CaptureEvent>,
    runtime: Runtime,
}

impl Rig {
    /// A capture with a journal, whose snapshot may not reuse a slot. Both tables are also sealed, and the slots of the
    /// sealed snapshot are compressed.
    pub(super) fn new() -> Rig {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (sender, events) = unbounded_channel();
        let (load, place) = (None, Place::Abstract);
        let rules = ModuleRules { choice: ModuleCapture::Off, walk_from: None, load, fast_keys: false, place };
        let url = "redis://127.0.0.1:1".parse().unwrap();
        let server = Server::new(url, Credentials::default(), &TlsOptions::default(), Task::Source).unwrap();
        let SealedTable { memory, key, .. } = sealed("test-sealed", 1);
        let remote = RemoteTable { memory, key: Some(key), compress: Compress::Lz4 };
        let plan = Plan {
            generation: 5,
            captured: Captured::always(server.clone()),
            is_examined: false,
            server,
            file: None,
            stored: None,
            tried: Tried::default(),
            journal_bytes: 1 << 20,
            first: None,
            tuning: Arc::new(Tuning::new(&TuningOptions::default())),
            reader_version: None,
            may_import_slots: false,
            snapshot: table("test-snapshot"),
            retained: true,
            prepare: Arc::new(|| {}),
            journal: Some(table("test-journal")),
            remote: Some(remote),
            sealed_journal: Some(sealed("test-sealed-journal", 2)),
            module: Arc::new(rules),
            module_failed_lately: false,
            sweep_failed_lately: false,
            no_fork: false,
            gauge: Arc::new(Gauge::default()),
            events: sender,
            stop: Arc::new(AtomicBool::new(false)),
            presence: Arc::default(),
            runtime: runtime.handle().clone(),
        };
        let capture = Capture { silence_limit: LONG, ..Capture::new(plan) };
        Rig { capture, events, runtime }
    }

    /// Makes the capture ask the server at `url`.
    pub(super) fn server(&mut self, url: &str) {
        let (url, credentials) = (url.parse().unwrap(), Credentials::default());
        let server = Server::new(url, credentials, &TlsOptions::default(), Task::Source).unwrap();
        self.capture.plan.captured = Captured::always(server.clone());
        self.capture.plan.server = server;
    }

    /// Stops the capture, as the source's loop does.
    pub(super) fn stop(&self) {
        self.capture.plan.stop.store(true, Ordering::Relaxed);
    }

    /// A connection of the capture, and the primary's end of it.
    pub(super) fn connect(&self) -> (Socket, Primary) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let _entered = self.runtime.enter();
        ours.set_nonblocking(true).unwrap();
        let stream = Stream::Unix(tokio::net::UnixStream::from_std(ours).unwrap());
        (Socket::new((stream, Vec::new()), self.runtime.handle().clone(), TICK).unwrap(), Primary::over(theirs))
    }

    /// Runs `capture` on a connection while `primary` plays the other end of it, and returns what `capture` returned.
    pub(super) fn play<T>(
        &self,
        primary: impl FnOnce(Primary) + Send,
        capture: impl FnOnce(&Capture, Socket) -> T,
    ) -> T {
        let (socket, end) = self.connect();
        thread::scope(|scope| {
            let playing = scope.spawn(|| primary(end));
            let outcome = capture(&self.capture, socket);
            playing.join().unwrap();
            outcome
        })
    }

    /// The state that readers see in the snapshot's table, and the position of its end, if it has one. While the sealed
    /// table is still open, it is open.
    #[track_caller]
    pub(super) fn snapshot_state(&self) -> (State, Option<u64>) {
        // In this order: the sealed table is never ahead of the plain one.
        let sealed = self.capture.plan.remote.as_ref().map(|remote| self.state_of(&remote.memory));
        let plain = self.state_of(&self.capture.plan.snapshot.0);
        let Some(sealed) = sealed else { return plain };
        assert!(
            sealed == plain || sealed.0 == State::Open,
            "the sealed table says {sealed:?}, the plain one {plain:?}"
        );
        sealed
    }

    /// The bytes of the sealed snapshot, as a replica reads them.
    pub(super) fn sealed_bytes(&self) -> Vec<u8> {
        let sealed = self.capture.plan.remote.as_ref().unwrap();
        let geometry = self.capture.plan.snapshot.1;
        let (_exporter, mut peer, sink, layout) = lent(&sealed.memory, &geometry);
        let origin = Origin { generation: 5, history: history(), offset: 77 };
        let key = sealed.key.as_ref().unwrap();
        let expect = Expectation::sealed(Kind::Snapshot, origin, geometry, key).unwrap().with_compressed_slots(true);
        let mut reader = SnapshotReader::new(None, sink, layout, expect, |_| false).unwrap();
        let mut read = Vec::new();
        while !reader.is_complete() {
            reader.pump(&mut *peer).unwrap();
            while let Some(slot) = reader.next_slot() {
                let (view, range) = slot.bytes();
                let mut bytes = vec![0; slot.length as usize];
                view.read(range.start, &mut bytes).unwrap();
                read.extend(bytes);
                reader.release(slot).unwrap();
            }
        }
        read
    }

    fn state_of(&self, memory: &Memory) -> (State, Option<u64>) {
        let word = |number: u64| {
            let mut bytes = [0; 8];
            memory.read(LINE_OFFSET + number * 8, &mut bytes).unwrap();
            u64::from_le_bytes(bytes)
        };
        let state = match word(3) {
            // 0: the table has not been laid out yet.
            0 | 1 => State::Open,
            2 => State::Sealed,
            3 => State::Aborted,
            other => panic!("state {other}"),
        };
        (state, (word(2) != u64::MAX).then(|| word(2)))
    }

    /// Empties the tables and the gauge, for another snapshot. The sealed tables are left out: only what the capture
    /// itself reads is looked at.
    pub(super) fn renew(&mut self) {
        let plan = &mut self.capture.plan;
        (plan.snapshot, plan.journal) = (table("test-snapshot"), Some(table("test-journal")));
        (plan.remote, plan.sealed_journal) = (None, None);
        plan.gauge = Arc::new(Gauge::default());
    }

    /// What a connection still delivers, up to its end.
    pub(super) fn rest_of(&self, mut socket: Socket) -> Vec<u8> {
        let (mut rest, mut buffer) = (Vec::new(), [0; 4096]);
        while let Received::Bytes(n) = socket.read(&mut buffer).unwrap() {
            rest.extend_from_slice(&buffer[..n]);
        }
        rest
    }

    /// The first `length` bytes of the stream, as a replica reads them from the journal.
    pub(super) fn journal_bytes(&self, length: usize) -> Vec<u8> {
        let (memory, geometry) = self.capture.plan.journal.as_ref().unwrap();
        let (_exporter, mut peer, sink, layout) = lent(memory, geometry);
        let origin = Origin { generation: 5, history: history(), offset: 77 };
        let expect = Expectation::plain(origin, *geometry);
        let mut reader = JournalReader::new(None, sink, layout, expect, 78).unwrap();
        let mut read = Vec::new();
        while read.len() < length {
            reader.pump(&mut *peer).unwrap();
            while let Some(chunk) = reader.next_chunk() {
                read.extend(chunk.bytes);
            }
        }
        read
    }

    /// The first `length` bytes of the snapshot, none of whose slots was reused.
    pub(super) fn snapshot_bytes(&self, length: usize) -> Vec<u8> {
        bytes_of(&self.capture.plan.snapshot, length)
    }

    /// What the capture has reported since the last call, in short.
    pub(super) fn reported(&mut self) -> Vec<String> {
        let mut reported = Vec::new();
        while let Ok(event) = self.events.try_recv() {
            if matches!(event, CaptureEvent::Forked { .. }) {
                continue;
            }
            reported.push(match event {
                CaptureEvent::Started { generation: 5, offset, .. } => format!("started at {offset}"),
                CaptureEvent::Completed { generation: 5, bytes } => format!("completed with {bytes} bytes"),
                CaptureEvent::Failed { generation: 5, error } => format!("failed: {error}"),
                other => format!("{other:?}"),
            });
        }
        reported
    }
}

/// The cause of a broken link.
pub(super) fn link_cause(error: &CaptureError) -> &str {
    match error {
        CaptureError::Link { cause, .. } => cause,
        other => panic!("{other:?}"),
    }
}

/// Content without repetition, so that misplaced bytes are found.
pub(super) fn content(length: usize) -> Vec<u8> {
    (0..length as u64).flat_map(|number| (number * 0x9E37_79B9).to_le_bytes()).take(length).collect()
}

/// The primary's end of a connection. It closes when this is dropped.
pub(super) struct Primary {
    stream: UnixStream,
}

impl Primary {
    fn over(stream: UnixStream) -> Primary {
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
        Primary { stream }
    }

    /// Reads exactly one command.
    pub(super) fn command(&mut self) -> String {
        command(&mut self.stream).unwrap()
    }

    /// Expects each command and sends its answer.
    pub(super) fn converse(&mut self, exchange: &[(&str, &str)]) {
        for (expected, answer) in exchange {
            assert_eq!(self.command(), *expected);
            self.send(answer.as_bytes());
        }
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends `bytes`, unless the capture closes the connection before it has read them all.
    pub(super) fn try_send(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Waits until the capture closes the connection.
    pub(super) fn wait_for_end(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
        self.drain();
    }

    /// Reads until the capture closes the connection.
    pub(super) fn drain(&mut self) {
        let mut buffer = [0; 4096];
        while self.stream.read(&mut buffer).is_ok_and(|n| n > 0) {}
    }
}

/// Reads exactly one command. `None` at the end of the connection.
pub(super) fn command(stream: &mut impl Read) -> Option<String> {
    let mut words = Vec::new();
    for _ in 0..number(stream, b'*')? {
        let mut word = vec![0; number(stream, b'$')? + 2];
        stream.read_exact(&mut word).ok()?;
        words.push(String::from_utf8(word[..word.len() - 2].to_vec()).unwrap());
    }
    Some(words.join(" "))
}

/// Reads a line of `prefix` and a number.
fn number(stream: &mut impl Read, prefix: u8) -> Option<usize> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while !line.ends_with(b"\r\n") {
        stream.read_exact(&mut byte).ok()?;
        line.push(byte[0]);
    }
    assert_eq!(line[0], prefix, "{line:?}");
    Some(std::str::from_utf8(&line[1..line.len() - 2]).unwrap().parse().unwrap())
}
