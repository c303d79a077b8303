//! Whole captures of a scripted primary over TCP: one connection or two, a stream that breaks, a history that changes.
//! A capture for the tests of the other files, and the scripted primary at the other end of its connection ([`Rig`]).
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::shm::Place;
use remora_fabric::sim::{Faults, Network, SimExporter};
use remora_fabric::{Connector, Exporter, Memory, Pages, Peer, RegionId, Regions};
use remora_redis::ReplId;
use remora_redis::psync::client::{Channel, Options};
use remora_server::{Credentials, Server, Stream, Task, TlsOptions};
use remora_table::layout::LINE_OFFSET;
use remora_table::{
    Algorithm, Expectation, Geometry, JournalReader, Kind, Origin, SealKey, SinkLayout, SnapshotReader, State,
};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::method::ModuleRules;
use super::psync_link::{Opening, Pieces, Received, Socket};
use super::stream::{Follower, Following};
use super::{Capture, CaptureError, CaptureEvent, Plan, TICK, Tried};
use crate::captured::{Captured, Tuning};
use crate::gauge::Gauge;
use crate::options::{Compress, ModuleCapture, TuningOptions};
use crate::tables::{RemoteTable, SealedTable};

/// The handshake of a first capture: it accepts two connections.
const CAPABILITIES: (&str, &str) = ("REPLCONF capa eof capa psync2 capa dual-channel", "+OK\r\n");

/// Accepts the next connection, answers the login, and expects each command of `exchange`.
fn accept(listener: &TcpListener, exchange: &[(&str, &str)]) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    converse(&mut stream, &[FULL[0], FULL[0]]);
    converse(&mut stream, exchange);
    stream
}

fn converse(stream: &mut TcpStream, exchange: &[(&str, &str)]) {
    for (expected, answer) in exchange {
        assert_eq!(command(stream).unwrap(), *expected);
        stream.write_all(answer.as_bytes()).unwrap();
    }
}

/// Runs the capture to its end while `primary` plays the server.
fn run(rig: &mut Rig, primary: impl FnOnce(&Rig, &TcpListener) + Send) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rig.server(&format!("redis://{}", listener.local_addr().unwrap()));
    let (capture, rig) = (rig.capture.clone(), &*rig);
    thread::scope(|scope| {
        let running = thread::Builder::new().spawn_scoped(scope, || capture.run()).unwrap();
        primary(rig, &listener);
        running.join().unwrap();
    });
}

/// Waits until the journal ends at this offset.
fn wait_for_journal(rig: &Rig, end: u64) {
    let gauge = &rig.capture.plan.gauge;
    let began = Instant::now();
    while gauge.journal().1 != end {
        assert!(began.elapsed() < LONG, "the journal ends at {}", gauge.journal().1);
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_broken_stream_is_resumed_at_the_next_byte_until_the_history_changes() {
    let (mut rig, bytes) = (Rig::new(), content(10_000));
    run(&mut rig, |rig, listener| {
        let mut stream = accept(listener, &[CAPABILITIES, FULL[2]]);
        let payload = [format!("$EOF:{MARK}\r\n").as_bytes(), &bytes, MARK.as_bytes()].concat();
        stream.write_all(&payload).unwrap();
        // The acknowledgement after which a server begins to send the stream.
        assert_eq!(command(&mut stream).unwrap(), "REPLCONF ACK 0");
        stream.write_all(b"*1\r\n$4\r\nPING\r\n").unwrap();
        wait_for_journal(rig, 91);
        drop(stream);

        let psync = format!("PSYNC {HISTORY} 92");
        let resume = [FULL[1], (psync.as_str(), "+CONTINUE\r\n*1\r\n$4\r\n")];
        let mut stream = accept(listener, &resume);
        stream.write_all(b"PING\r\n").unwrap();
        wait_for_journal(rig, 105);
        drop(stream);

        let (psync, changed) = (format!("PSYNC {HISTORY} 106"), format!("+CONTINUE {}\r\nnew bytes", "f".repeat(40)));
        drop(accept(listener, &[FULL[1], (&psync, &changed)]));
    });
    assert_eq!(rig.snapshot_state(), (State::Sealed, Some(10_000)));
    assert!(rig.snapshot_bytes(10_000) == bytes);
    let reported = rig.reported();
    assert_eq!(reported[..3], ["started at 77", "completed with 10000 bytes", "StreamResumed"]);
    assert!(reported[3].starts_with("HistoryChanged") && reported[3].contains("at: 105"), "{}", reported[3]);
    assert_eq!(rig.capture.plan.gauge.journal(), (78, 105));
}

/// Sends a snapshot, breaks the connection, and answers the attempt to continue with another full copy.
fn copied_again(listener: &TcpListener) -> TcpStream {
    let mut stream = accept(listener, &[CAPABILITIES, FULL[2]]);
    stream.write_all(b"$5\r\nREDIS").unwrap();
    drop(stream);
    let psync = format!("PSYNC {HISTORY} 78");
    accept(listener, &[FULL[1], (&psync, FULL[2].1)])
}

#[test]
fn a_stream_that_the_server_cannot_continue_is_lost() {
    let mut rig = Rig::new();
    run(&mut rig, |_, listener| {
        let mut stream = copied_again(listener);
        stream.write_all(b"$5\r\n").unwrap();
    });
    let reported = rig.reported();
    assert_eq!(reported[..2], ["started at 77", "completed with 5 bytes"]);
    assert!(reported[2].starts_with("StreamLost") && reported[2].contains("backlog"), "{}", reported[2]);
}

#[test]
fn a_stream_is_lost_as_soon_as_the_server_begins_a_snapshot_instead() {
    let mut rig = Rig::new();
    run(&mut rig, |_, listener| {
        let mut stream = copied_again(listener);
        // The server writes the snapshot to its disk meanwhile, or fails to write it.
        assert_eq!(command(&mut stream), None, "the source closes the connection and asks for nothing more");
    });
    let reported = rig.reported();
    assert!(reported[2].starts_with("StreamLost") && reported[2].contains("backlog"), "{}", reported[2]);
}

/// The source's loop waits for an event of each capture, and would wait without end for a thread that has panicked.
#[test]
fn a_panic_is_reported_as_a_failed_snapshot_or_a_lost_stream() {
    let mut rig = Rig::new();
    rig.capture.plan.prepare = Arc::new(|| panic!("the first bug"));
    rig.capture.clone().run();
    let reported = rig.reported();
    assert_eq!(reported.len(), 1, "{reported:?}");
    for part in ["failed: ", "panicked", "the first bug"] {
        assert!(reported[0].contains(part), "{part}: {}", reported[0]);
    }
    let number = 2;
    rig.capture.follow(|| panic!("bug number {number}"));
    let reported = rig.reported();
    assert!(reported[0].starts_with("StreamLost") && reported[0].contains("bug number 2"), "{reported:?}");
}

/// Answers the two handshakes of a snapshot and a stream side by side.
fn accept_two(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let mut stream = accept(listener, &[CAPABILITIES, ("PSYNC ? -1", "+DUALCHANNELSYNC\r\n")]);
    let end_offset = format!("$ENDOFF:77 {HISTORY} 0 12\r\n$EOF:{MARK}\r\n");
    let second = [("REPLCONF capa eof rdb-only 1 rdb-channel 1", "+OK\r\n"), ("SYNC", end_offset.as_str())];
    let snapshot = accept(listener, &second);
    let psync = format!("PSYNC {HISTORY} 78");
    converse(&mut stream, &[("REPLCONF set-rdb-client-id 12", "+OK\r\n"), (&psync, "+CONTINUE\r\n")]);
    (stream, snapshot)
}

#[test]
fn over_two_connections_the_stream_flows_beside_the_snapshot() {
    let (mut rig, bytes) = (Rig::new(), content(10_000));
    let mut stopped = Instant::now();
    run(&mut rig, |rig, listener| {
        let (mut stream, mut snapshot) = accept_two(listener);
        snapshot.write_all(&bytes).unwrap();
        stream.write_all(b"*1\r\n$4\r\nPING\r\n").unwrap();
        wait_for_journal(rig, 91);
        snapshot.write_all(MARK.as_bytes()).unwrap();
        while rig.snapshot_state().0 == State::Open {
            thread::sleep(Duration::from_millis(2));
        }
        stream.write_all(b"*1\r\n$4\r\nPING\r\n").unwrap();
        wait_for_journal(rig, 105);
        // A stream that is stopped while it is being resumed is not reported as lost, and does not wait for the server
        // to answer.
        drop(stream);
        let _silent = listener.accept().unwrap();
        rig.stop();
        stopped = Instant::now();
    });
    assert!(stopped.elapsed() < Duration::from_secs(20), "the capture ended {:?} after its stop", stopped.elapsed());
    assert_eq!(rig.snapshot_state(), (State::Sealed, Some(10_000)));
    assert!(rig.snapshot_bytes(10_000) == bytes);
    assert_eq!(rig.reported(), ["started at 77", "completed with 10000 bytes"]);
}

#[test]
fn a_snapshot_that_fails_beside_its_stream_ends_both() {
    let mut rig = Rig::new();
    run(&mut rig, |_, listener| {
        let (stream, mut snapshot) = accept_two(listener);
        snapshot.write_all(&content(5_000)).unwrap();
        drop(snapshot);
        // The stream's thread has ended when `run` has, although its connection stays open.
        std::mem::forget(stream);
    });
    assert_eq!(rig.snapshot_state(), (State::Aborted, None));
    let reported = rig.reported();
    assert_eq!(reported.len(), 2, "{reported:?}");
    assert!(reported[1].starts_with("failed: the link to the server broke during the snapshot"), "{}", reported[1]);
}

#[test]
fn a_second_channel_that_the_user_may_not_open_is_done_without() {
    let mut rig = Rig::new();
    run(&mut rig, |rig, listener| {
        let stream = accept(listener, &[CAPABILITIES, ("PSYNC ? -1", "+DUALCHANNELSYNC\r\n")]);
        let refused = "-NOPERM User source has no permissions to run the 'sync' command\r\n";
        let second = [("REPLCONF capa eof rdb-only 1 rdb-channel 1", "+OK\r\n"), ("SYNC", refused)];
        drop(accept(listener, &second));
        drop(stream);
        let mut third = accept(listener, &[FULL[1], FULL[2]]);
        third.write_all(b"$5\r\nREDIS").unwrap();
        while rig.snapshot_state().0 != State::Sealed {
            thread::sleep(Duration::from_millis(2));
        }
        rig.stop();
    });
    assert_eq!(rig.reported(), ["started at 77", "completed with 5 bytes"]);
}

/// A later capture, while another one follows the stream.
#[test]
fn without_a_journal_the_snapshot_alone_is_requested() {
    let mut rig = Rig::new();
    rig.capture.plan.journal = None;
    run(&mut rig, |_, listener| {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        converse(&mut stream, &[FULL[0], ("REPLCONF rdb-only 1", "+OK\r\n"), FULL[0], FULL[1], FULL[2]]);
        stream.write_all(b"$5\r\nREDIS").unwrap();
        assert_eq!(command(&mut stream), None);
    });
    assert_eq!(rig.reported(), ["started at 77", "completed with 5 bytes"]);
}

// Every way to cut a small conversation: whatever pieces the kernel delivers, the snapshot ends at its last byte, and
// the journal begins with the byte behind it.

/// What the server sends before its snapshot.
fn promise() -> Vec<u8> {
    format!("+PONG\r\n+OK\r\n\n+FULLRESYNC {HISTORY} 77\r\n\n\n").into_bytes()
}

/// The stream: commands of different lengths.
fn stream() -> Vec<u8> {
    b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n*2\r\n$4\r\nINCR\r\n$3\r\naaa\r\n*1\r\n$4\r\nPING\r\n".to_vec()
}

/// Plays the conversation in these pieces. The capture must hold this payload and this stream then, and nothing else.
#[track_caller]
fn plays(rig: &mut Rig, pieces: &[&[u8]], payload: &[u8], stream: &[u8]) {
    let wire = Pieces::default();
    pieces.iter().for_each(|piece| wire.add(piece));
    wire.end();
    rig.renew();
    let capture = &rig.capture;
    let mut link = capture.handshake_over(Socket::of_pieces(wire), Options::default());
    let Opening::Full { replid, offset, payload: form } = link.opening().unwrap() else { panic!("another opening") };
    assert_eq!((replid, offset), (history(), 77));
    let following = capture.take_announced(link.announced(replid, offset, form)).unwrap();
    let Following::ThisThread(follower) = following else { panic!("another thread follows") };
    is_exact(rig, follower, payload, stream);
}

/// Follows the stream to its end. The tables hold this payload and this stream then.
#[track_caller]
fn is_exact(rig: &mut Rig, mut follower: Box<Follower>, payload: &[u8], stream: &[u8]) {
    let Err(end) = follower.pour();
    assert!(matches!(end, CaptureError::Link { .. }), "{end}");
    let length = payload.len();
    assert_eq!(rig.snapshot_state(), (State::Sealed, Some(length as u64)));
    assert!(rig.snapshot_bytes(length) == payload, "the snapshot has other bytes");
    assert_eq!(rig.capture.plan.gauge.journal(), (78, 77 + stream.len() as u64), "the journal has another length");
    assert!(rig.journal_bytes(stream.len()) == stream, "the journal has other bytes");
    assert_eq!(rig.reported(), ["started at 77".to_owned(), format!("completed with {length} bytes")]);
}

/// The sizes of payloads to try: none, some, as many as a slot holds, and more.
const LENGTHS: [usize; 4] = [0, 9, 60, 4_100];

#[test]
fn a_snapshot_of_known_length_and_its_stream_are_exact_wherever_they_are_cut() {
    let mut rig = Rig::new();
    for length in LENGTHS {
        let (payload, stream) = (content(length), stream());
        let all = [&promise(), format!("${length}\r\n").as_bytes(), &payload, &stream].concat();
        // In one piece, byte by byte, and in two pieces at each place.
        plays(&mut rig, &[&all], &payload, &stream);
        let places = (0..all.len()).filter(|&at| at < 200 || all.len() - at < 200);
        for (first, second) in places.map(|at| all.split_at(at)) {
            plays(&mut rig, &[first, second], &payload, &stream);
        }
        if length < 100 {
            plays(&mut rig, &all.chunks(1).collect::<Vec<_>>(), &payload, &stream);
        }
    }
}

/// The server waits for an acknowledgement behind the mark, so a read that ends with the mark is followed by the stream
/// in another read. Everything before is cut everywhere.
#[test]
fn a_snapshot_that_ends_with_a_mark_and_its_stream_are_exact_wherever_they_are_cut() {
    let mut rig = Rig::new();
    for length in LENGTHS {
        let (payload, stream) = (content(length), stream());
        let all = [&promise(), format!("$EOF:{MARK}\r\n").as_bytes(), &payload, MARK.as_bytes()].concat();
        plays(&mut rig, &[&all, &stream], &payload, &stream);
        let places = (0..all.len()).filter(|&at| at < 250 || all.len() - at < 100);
        for (first, second) in places.map(|at| all.split_at(at)) {
            plays(&mut rig, &[first, second, &stream], &payload, &stream);
        }
        for (first, second) in (0..stream.len()).map(|at| stream.split_at(at)) {
            plays(&mut rig, &[&all, first, second], &payload, &stream);
        }
        if length < 100 {
            let pieces: Vec<&[u8]> = all.chunks(1).chain(stream.chunks(1)).collect();
            plays(&mut rig, &pieces, &payload, &stream);
        }
    }
}

/// What a server answers to `PSYNC <replid> <offset>`, and the bytes of the stream behind it.
#[test]
fn a_stream_that_is_resumed_is_exact_wherever_it_is_cut() {
    let mut rig = Rig::new();
    let (payload, stream) = (content(9), stream());
    let begun = [&promise(), b"$9\r\n".as_slice(), &payload, &stream].concat();
    let resumed = [b"+PONG\r\n+OK\r\n\n+CONTINUE\r\n".as_slice(), &stream].concat();
    let twice = stream.repeat(2);
    for (first, second) in (0..resumed.len()).map(|at| resumed.split_at(at)) {
        rig.renew();
        let [before, after] = [Pieces::default(), Pieces::default()];
        before.add(&begun);
        [first, second].into_iter().for_each(|piece| after.add(piece));
        [&before, &after].into_iter().for_each(Pieces::end);
        let capture = &rig.capture;
        let mut link = capture.handshake_over(Socket::of_pieces(before), Options::default());
        let Opening::Full { replid, offset, payload: form } = link.opening().unwrap() else {
            panic!("another opening")
        };
        let following = capture.take_announced(link.announced(replid, offset, form)).unwrap();
        let Following::ThisThread(mut follower) = following else { panic!("another thread follows") };
        let Err(_) = follower.pour();
        let link = capture.handshake_over(Socket::of_pieces(after), follower.options(history()));
        follower.resume_over(link, history()).unwrap();
        is_exact(&mut rig, follower, &payload, &twice);
    }
}

/// Two connections: the snapshot's ends with its mark, and the stream's goes on behind a first handshake.
#[test]
fn a_stream_beside_its_snapshot_is_exact_wherever_it_is_cut() {
    let mut rig = Rig::new();
    let stream = stream();
    let all = [b"+PONG\r\n+OK\r\n+DUALCHANNELSYNC\r\n+OK\r\n+CONTINUE\r\n".as_slice(), &stream].concat();
    for (first, second) in (0..all.len()).map(|at| all.split_at(at)) {
        rig.renew();
        let wire = Pieces::default();
        [first, second].into_iter().for_each(|piece| wire.add(piece));
        wire.end();
        let options = |channel| Options { channel, ..Options::default() };
        let mut link = rig.capture.handshake_over(Socket::of_pieces(wire), options(Channel::WholeOrStream));
        assert_eq!(link.opening().unwrap(), Opening::TwoChannels);
        let attach = Channel::Stream { snapshot_client: 12 };
        let mut link = link.again(Options { resume: Some((history(), 78)), ..options(attach) });
        assert_eq!(link.continued().unwrap(), Some(history()));
        assert_eq!(rig.rest_of(link.into_socket()), stream, "cut at {}", first.len());
    }
}

/// `repl-ping-replica-period` may be longer than the silence that a capture accepts.
#[test]
fn a_primary_that_has_written_nothing_more_may_be_silent() {
    let (stream, payload) = (stream(), content(9));
    let end = 77 + stream.len() as u64;
    for (said, is_kept) in [(None, false), (Some(end + 1), false), (Some(end), true)] {
        let mut rig = Rig::new();
        // Where the link is kept, the notes must come in time, also on a busy machine.
        rig.capture.silence_limit = Duration::from_millis(if is_kept { 800 } else { 100 });
        rig.renew();
        let wire = Pieces::default();
        wire.add(&[promise().as_slice(), b"$9\r\n", &payload, &stream].concat());
        let mut link = rig.capture.handshake_over(Socket::of_pieces(wire), Options::default());
        let Opening::Full { replid, offset, payload: form } = link.opening().unwrap() else {
            panic!("another opening")
        };
        let following = rig.capture.take_announced(link.announced(replid, offset, form)).unwrap();
        let Following::ThisThread(mut follower) = following else { panic!("another thread follows") };
        let note = || said.iter().for_each(|&offset| rig.capture.plan.presence.note_offset(Instant::now(), offset));
        note();
        let began = Instant::now();
        let why = std::thread::scope(|scope| {
            // The source's loop asks again and again, for more than twice the longest silence.
            scope.spawn(|| {
                while is_kept && began.elapsed() < rig.capture.silence_limit * 5 / 2 {
                    std::thread::sleep(rig.capture.silence_limit / 10);
                    note();
                }
                if is_kept {
                    rig.stop();
                }
            });
            let Err(why) = follower.pour();
            why
        });
        assert_eq!(matches!(why, CaptureError::Stopped), is_kept, "{said:?}: {why}");
    }
}

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
