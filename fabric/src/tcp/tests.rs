//! Tests of this transport alone: its threads and limits, and other ends that misbehave. The conformance suite tests
//! what is true of every transport.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::socket::Deadline;
use super::source::UNPROVED;
use super::{Answer, Request, Responder, Status, TAG_LANE, Tcp, WELCOME_BYTES, decode_challenge, *};
use crate::admission::{Format, GRACE, Hello};
use crate::transport::wait_readable;
use crate::{
    Completion, Connector, Denial, Exporter, Memory, Pages, Peer, ReadError, ReadRequest, RegionId, RegionKey, Regions,
    Secret, tcp,
};

const ID: RegionId = RegionId { generation: 7, region: 1 };
const SESSION: u64 = 42;
const SECRET: Secret = [3; 32];
const REGION_BYTES: u64 = 8 << 20;

#[test]
fn bytes_arrive_unchanged_over_any_number_of_lanes_and_in_both_ways_of_sending() {
    // The second address differs from the reader's own: for the lanes it is another host.
    for (lanes, send, host) in [
        (1, SendMode::Copy, "127.0.0.1:0"),
        (1, SendMode::Copy, "127.0.0.2:0"),
        (1, SendMode::File, "127.0.0.1:0"),
        (3, SendMode::Copy, "127.0.0.2:0"),
        (4, SendMode::File, "127.0.0.1:0"),
    ] {
        let world = World::at(host, TcpOptions { lanes, send, ..quick() });
        let mut peer = world.connect().unwrap();
        let reads = [
            read(1, 5, 3 << 20, 0),
            read(2, 0, 4096, 4 << 20),
            read(3, 4095, 2, 5 << 20),
            read(4, REGION_BYTES - 1, 1, 6 << 20),
            read(5, REGION_BYTES, 0, 0),
            read(6, 1 << 20, 16 << 10, (6 << 20) + 8),
            read(7, 1 << 20, (16 << 10) + 1, 7 << 20),
        ];
        assert_eq!(peer.post_read(&reads).unwrap(), reads.len());
        let mut completions = drain(&mut peer, reads.len());
        completions.sort_by_key(|completion| completion.tag);
        for (completion, read) in completions.iter().zip(&reads) {
            assert_eq!(*completion, Completion { tag: read.tag, result: Ok(read.length) });
            world.assert_read(read);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Sizes around every limit, in any order and number, against the region itself as the oracle.
    #[test]
    fn whatever_is_read_is_what_lies_there(
        lanes in 1u8..=4,
        depth in 1usize..=24,
        sizes in prop::collection::vec(
            prop_oneof![0u32..64, 4000u32..5000, 16_000u32..17_000, 90_000u32..110_000, 1_000_000u32..1_200_000],
            1..24,
        ),
        seed: u64,
    ) {
        let world = World::new(TcpOptions { lanes, depth, ..quick() });
        let mut peer = world.connect().unwrap();
        let mut place = 0;
        let reads: Vec<ReadRequest> = (0u64..).zip(&sizes).map(|(tag, &length)| {
            let offset = seed.wrapping_mul(tag * 2 + 1) % (REGION_BYTES + 100_000);
            let read = read(tag, offset, length, place);
            place += u64::from(length);
            read
        }).take_while(|read| read.sink_offset + u64::from(read.length) <= REGION_BYTES).collect();

        let mut left = &reads[..];
        let mut completions = Vec::new();
        while completions.len() < reads.len() {
            let accepted = peer.post_read(left).unwrap();
            left = &left[accepted..];
            peer.wait(LONG).unwrap();
            peer.poll(&mut completions).unwrap();
        }
        for completion in completions {
            let read = &reads[completion.tag as usize];
            let inside = read.offset + u64::from(read.length) <= REGION_BYTES;
            if inside {
                prop_assert_eq!(completion.result, Ok(read.length));
                world.assert_read(read);
            } else {
                prop_assert_eq!(completion.result, Err(ReadError::Denied(Denial::OutOfBounds)));
            }
        }
    }
}

/// The key is the source's word: it may name any address.
#[test]
fn an_address_that_the_owner_refuses_is_not_connected_to() {
    let world = World::at("127.0.0.2:0", quick());
    let connect = |allowed: &'static str| {
        let connector = TcpConnector::new(quick(), None).unwrap().with_check(move |address| {
            let is_allowed = address.ip().to_string() == allowed;
            if is_allowed { Ok(()) } else { Err(Error::Misuse("not there")) }
        });
        connector.open(&world.key(), SESSION, &SECRET, world.sink.clone())
    };
    assert!(matches!(connect("127.0.0.1").err(), Some(Error::Misuse("not there"))));
    assert_eq!(world.exporter.lanes(), 0);
    connect("127.0.0.2").unwrap();
}

#[test]
fn a_wrong_secret_and_an_unknown_session_get_the_same_answer() {
    let world = World::new(quick());
    for (session, secret) in [(SESSION, [4; 32]), (SESSION + 1, SECRET)] {
        let refused = world.connector.connect(&world.key(), session, &secret, world.sink.clone());
        assert!(matches!(refused.err(), Some(Error::Refused(Denial::NotGranted))));
    }
    world.wait_for_lanes(0);
}

#[test]
fn a_source_that_cannot_prove_itself_is_an_impostor() {
    let source = FakeSource::new(|stream| {
        let responder = Responder::challenge(stream, soon()).unwrap();
        responder.examine(Some(&SECRET)).unwrap().unwrap();
        let welcome = Tcp::welcome(&REGION_BYTES, &[9; 32]);
        soon().write(stream, &welcome).unwrap();
    });
    assert!(matches!(source.connect().err(), Some(Error::Impostor)));
}

#[test]
fn something_else_at_the_port_is_named_as_such() {
    let source = FakeSource::new(|mut stream| {
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    assert!(matches!(source.connect().err(), Some(Error::Protocol(_))));
}

#[test]
fn a_source_that_never_answers_is_given_up() {
    let source = FakeSource::new(|mut stream| while stream.read(&mut [0; 64]).unwrap_or(0) > 0 {});
    let began = Instant::now();
    assert!(matches!(source.connect().err(), Some(Error::TimedOut { .. })));
    assert!(began.elapsed() < LONG);
}

#[test]
fn garbage_instead_of_a_hello_is_answered_once_and_closed() {
    let world = World::new(quick());
    let mut stream = TcpStream::connect(world.address).unwrap();
    stream.write_all(&[0xA5; Tcp::HELLO_BYTES]).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let (status, _) = decode_challenge(&answer[..].try_into().unwrap()).unwrap();
    assert_eq!(status, Status::Malformed);
    world.wait_for_lanes(0);
}

#[test]
fn a_slow_hello_is_closed_at_the_time_out() {
    let world = World::new(quick());
    let mut stream = TcpStream::connect(world.address).unwrap();
    // Each byte arrives well within the time-out; all of them together do not.
    let sent = LANE_MAGIC.iter().cycle().take_while(|byte| {
        thread::sleep(Duration::from_millis(50));
        stream.write_all(&[**byte]).is_ok()
    });
    assert!(sent.count() < Tcp::HELLO_BYTES);
    world.wait_for_lanes(0);
}

#[test]
fn silent_connections_have_a_part_of_the_places_and_do_not_keep_a_reader_out() {
    let world = World::new(TcpOptions { handshake_timeout: Duration::from_secs(60), ..quick() });
    let silent: Vec<_> = (0..2 * UNPROVED.per_address).map(|_| TcpStream::connect(world.address).unwrap()).collect();
    world.wait_for_lanes(UNPROVED.per_address);
    // The reader has the address of the silent ones, so one of them must have had its time first.
    thread::sleep(GRACE);
    assert!(world.connect().is_ok());
    drop(silent);
    world.wait_for_lanes(0);
}

#[test]
fn a_session_has_no_more_lanes_than_its_share() {
    let world = World::new(TcpOptions { lanes: 4, ..quick() });
    let peers: Vec<_> = (0..MAX_LANES_PER_SESSION / 4).map(|_| world.connect().unwrap()).collect();
    assert!(matches!(world.connect().err(), Some(Error::Refused(Denial::Busy))));
    drop(peers);
    world.wait_for_lanes(0);
    assert!(world.connect().is_ok());
}

#[test]
fn a_source_serves_as_many_lanes_as_its_options_say() {
    let world = World::new(TcpOptions { served_lanes: 3, ..quick() });
    let peers: Vec<_> = (0..3).map(|_| world.connect().unwrap()).collect();
    assert!(matches!(world.connect().err(), Some(Error::Refused(Denial::Busy))));
    drop(peers);
    world.wait_for_lanes(0);
    assert!(world.connect().is_ok());
}

#[test]
fn a_reader_that_does_not_read_is_cut_and_others_go_on() {
    let world = World::new(quick());
    let mut slow = world.connect().unwrap();
    assert_eq!(slow.post_read(&[read(1, 0, 8 << 20, 0); 8]).unwrap(), 8);
    let mut other = world.connect().unwrap();
    other.post_read(&[read(2, 0, 1 << 20, 0)]).unwrap();
    assert_eq!(drain(&mut other, 1), [Completion { tag: 2, result: Ok(1 << 20) }]);
    world.wait_for_lanes(1);
    let completions = drain(&mut slow, 8);
    assert_eq!(completions.last().unwrap().result, Err(ReadError::PeerGone));
}

#[test]
fn half_a_request_does_not_hold_a_lane_for_ever() {
    let world = World::new(quick());
    let mut stream = world.raw_lane();
    stream.write_all(&[0; Request::BYTES - 1]).unwrap();
    world.wait_for_lanes(0);
    assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0);
}

#[test]
fn a_request_with_the_tag_of_the_lane_ends_the_lane_with_an_answer() {
    let world = World::new(quick());
    let mut stream = world.raw_lane();
    let request = Request { tag: TAG_LANE, id: ID, offset: 0, length: 1 };
    stream.write_all(&request.encode()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, Answer { tag: TAG_LANE, status: Status::Malformed, length: 0 }.encode());
}

#[test]
fn each_request_is_judged_by_itself() {
    let world = World::new(quick());
    let mut stream = world.raw_lane();
    let requests = [
        (Request { tag: 1, id: ID, offset: u64::MAX, length: u32::MAX }, Status::Denied(Denial::OutOfBounds)),
        (Request { tag: 2, id: RegionId { generation: 8, ..ID }, offset: 0, length: 1 }, Status::Denied(Denial::Stale)),
        (Request { tag: 3, id: RegionId { region: 2, ..ID }, offset: 0, length: 1 }, Status::Denied(Denial::Unknown)),
    ];
    for (request, _) in &requests {
        stream.write_all(&request.encode()).unwrap();
    }
    for (request, status) in requests {
        let mut answer = [0; Answer::BYTES];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(Answer::decode(&answer).unwrap(), Answer { tag: request.tag, status, length: 0 });
    }
}

#[test]
fn a_revoked_region_is_told_to_an_idle_reader_and_to_a_busy_one() {
    let world = World::new(quick());
    let (mut idle, mut busy) = (world.connect().unwrap(), world.connect().unwrap());
    busy.post_read(&[read(1, 0, 8 << 20, 0); 16]).unwrap();
    world.exporter.revoke(ID);
    let completions = drain(&mut busy, 16);
    assert_eq!(completions.last().unwrap().result, Err(ReadError::Denied(Denial::Revoked)));
    assert!(wait_readable(idle.arm(), LONG).unwrap());
    assert!(matches!(idle.poll(&mut Vec::new()), Err(Error::Retired(ReadError::Denied(Denial::Revoked)))));
    world.wait_for_lanes(0);
}

#[test]
fn a_silent_source_is_detected_by_a_caller_that_only_sleeps_on_the_descriptor() {
    let source = FakeSource::welcoming(|mut stream| while stream.read(&mut [0; 64]).unwrap_or(0) > 0 {});
    let mut peer = source.connect().unwrap();
    peer.post_read(&[read(1, 0, 1, 0)]).unwrap();
    assert!(wait_readable(peer.arm(), LONG).unwrap());
    assert_eq!(drain(&mut peer, 1), [Completion { tag: 1, result: Err(ReadError::TimedOut) }]);
    assert!(matches!(peer.post_read(&[read(2, 0, 1, 0)]), Err(Error::Retired(ReadError::TimedOut))));
}

#[test]
fn a_timer_that_has_gone_off_in_peace_falls_silent_again() {
    let world = World::new(quick());
    let mut peer = world.connect().unwrap();
    peer.post_read(&[read(1, 0, 1, 0)]).unwrap();
    drain(&mut peer, 1);
    assert!(wait_readable(peer.arm(), LONG).unwrap(), "the stall timer of the read before");
    assert_eq!(peer.poll(&mut Vec::new()).unwrap(), 0);
    assert!(!wait_readable(peer.arm(), Duration::from_millis(10)).unwrap());
}

#[test]
fn a_source_that_sends_more_than_was_asked_for_writes_nothing_outside_its_place() {
    let answers = [
        Answer { tag: 0, status: Status::Good, length: 65 },
        Answer { tag: 1, status: Status::Good, length: 64 },
        Answer { tag: 0, status: Status::Good, length: 0 },
        Answer { tag: TAG_LANE, status: Status::Denied(Denial::OutOfBounds), length: 0 },
    ];
    for answer in answers {
        let source = FakeSource::welcoming(move |mut stream| {
            stream.read_exact(&mut [0; Request::BYTES]).unwrap();
            let _ = stream.write_all(&answer.encode());
            let _ = stream.write_all(&[0xFF; 4096]);
        });
        let mut peer = source.connect().unwrap();
        peer.post_read(&[read(1, 0, 64, 1000)]).unwrap();
        assert_eq!(drain(&mut peer, 1), [Completion { tag: 1, result: Err(ReadError::PeerGone) }], "{answer:?}");
        let mut sink = [0; 4096];
        source.sink.read(0, &mut sink).unwrap();
        assert_eq!(sink, [0; 4096]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Random answers of a source: each read completes once, and only its own place is written.
    #[test]
    fn any_bytes_from_a_source_end_every_read_once(noise in prop::collection::vec(any::<u8>(), 0..3000), good in 0usize..3) {
        let source = FakeSource::welcoming(move |mut stream| {
            stream.read_exact(&mut [0; 3 * Request::BYTES]).unwrap();
            for tag in 0..good as u64 {
                let _ = stream.write_all(&Answer { tag, status: Status::Good, length: 8 }.encode());
                let _ = stream.write_all(&[1; 8]);
            }
            let _ = stream.write_all(&noise);
        });
        let mut peer = source.connect().unwrap();
        peer.post_read(&[read(0, 0, 8, 0), read(1, 0, 8, 8), read(2, 0, 8, 16)]).unwrap();
        let mut completions = drain(&mut peer, 3);
        completions.sort_by_key(|completion| completion.tag);
        prop_assert_eq!(completions.iter().map(|completion| completion.tag).collect::<Vec<_>>(), [0, 1, 2]);
        let mut beyond = [0; 4096];
        source.sink.read(24, &mut beyond).unwrap();
        prop_assert_eq!(beyond, [0; 4096]);
    }
}

#[test]
fn dropping_the_exporter_does_not_wait_for_readers() {
    let world = World::new(TcpOptions { drain_timeout: Duration::from_secs(60), ..quick() });
    let mut stalled = world.connect().unwrap();
    stalled.post_read(&[read(1, 0, 8 << 20, 0); 8]).unwrap();
    let _silent = TcpStream::connect(world.address).unwrap();
    world.wait_for_lanes(2);
    thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    let World { exporter, .. } = world;
    drop(exporter);
    assert!(began.elapsed() < LONG);
}

#[test]
fn a_new_secret_for_a_session_cuts_the_lanes_of_the_old_one() {
    let world = World::new(quick());
    let mut peer = world.connect().unwrap();
    world.exporter.grant(SESSION, SECRET, Regions::All);
    assert_eq!(peer.poll(&mut Vec::new()).unwrap(), 0, "the same secret again changes nothing");
    world.exporter.grant(SESSION, [5; 32], Regions::All);
    world.wait_for_lanes(0);
    assert!(world.connect().is_err());
}

#[test]
fn the_congestion_control_in_use_is_reported() {
    let world = World::new(TcpOptions { congestion: Some("reno".into()), ..quick() });
    let peer = world.connector.open(&world.key(), SESSION, &SECRET, world.sink.clone()).unwrap();
    assert_eq!(peer.effective_congestion().as_deref(), Some("reno"));
    assert_eq!(world.exporter.effective_congestion().as_deref(), Some("reno"));
}

#[test]
fn all_lanes_together_get_no_more_than_the_rate() {
    let rate = 20 << 20;
    let world = World::new(TcpOptions { upload: fixed(rate), send: SendMode::File, ..quick() });
    let (mut one, mut other) = (world.connect().unwrap(), world.connect().unwrap());
    let began = Instant::now();
    let reads = [read(1, 0, 2 << 20, 0), read(2, 4 << 20, 2 << 20, 4 << 20)];
    one.post_read(&reads[..1]).unwrap();
    other.post_read(&reads[1..]).unwrap();
    drain(&mut one, 1);
    drain(&mut other, 1);
    let took = began.elapsed();
    assert!(took > Duration::from_millis(190), "4 MiB at 20 MiB a second in {took:?}");
    reads.iter().for_each(|read| world.assert_read(read));
}

#[test]
fn the_pacer_delays_neither_small_reads_nor_the_end_of_the_exporter() {
    // Each reservation takes a minute.
    let world = World::new(TcpOptions { upload: fixed(1 << 6), ..quick() });
    let (mut peer, mut other) = (world.connect().unwrap(), world.connect().unwrap());
    peer.post_read(&[read(1, 0, 1 << 20, 0)]).unwrap();
    thread::sleep(Duration::from_millis(20));
    let began = Instant::now();
    other.post_read(&[read(2, 77, 4096, 7 << 20), read(3, 99, 4096, 6 << 20)]).unwrap();
    drain(&mut other, 2);
    assert!(began.elapsed() < LONG, "small reads waited for a large one");
    let began = Instant::now();
    drop(world.exporter);
    assert!(began.elapsed() < LONG);
}

#[test]
fn an_unknown_congestion_control_is_no_reason_to_fail() {
    let world = World::new(TcpOptions { congestion: Some("no-such-thing".into()), ..quick() });
    let peer = world.connector.open(&world.key(), SESSION, &SECRET, world.sink.clone()).unwrap();
    assert_ne!(peer.effective_congestion().as_deref(), Some("no-such-thing"));
}

#[test]
fn options_outside_their_range_are_refused() {
    for options in [
        TcpOptions { lanes: 0, ..quick() },
        TcpOptions { lanes: 5, ..quick() },
        TcpOptions { depth: 0, ..quick() },
        TcpOptions { served_lanes: 0, ..quick() },
        TcpOptions { served_lanes: MAX_SERVED_LANES + 1, ..quick() },
        TcpOptions { depth: MAX_DEPTH + 1, ..quick() },
        TcpOptions { stall_timeout: Duration::ZERO, ..quick() },
        TcpOptions { stall_timeout: Duration::MAX, ..quick() },
    ] {
        assert!(TcpExporter::new(options.clone(), None).is_err());
        assert!(TcpConnector::new(options, None).is_err());
    }
}

fn fixed(rate: u64) -> UploadRate {
    UploadRate::Fixed(NonZeroU64::new(rate).unwrap())
}

/// Longer than anything here takes on a busy machine, and much shorter than what must not be waited for.
const LONG: Duration = Duration::from_secs(20);

/// Time-outs that are short enough for tests.
fn quick() -> TcpOptions {
    TcpOptions {
        connect_timeout: Duration::from_secs(2),
        handshake_timeout: Duration::from_millis(700),
        stall_timeout: Duration::from_secs(1),
        drain_timeout: Duration::from_millis(700),
        ..TcpOptions::default()
    }
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(2))
}

fn read(tag: u64, offset: u64, length: u32, sink_offset: u64) -> ReadRequest {
    ReadRequest { tag, offset, length, sink_offset }
}

/// Polls until `count` completions have come.
fn drain(peer: &mut dyn Peer, count: usize) -> Vec<Completion> {
    let deadline = Instant::now() + LONG;
    let mut completions = Vec::new();
    while completions.len() < count {
        assert!(Instant::now() < deadline, "only {} of {count} reads have completed", completions.len());
        peer.wait(Duration::from_secs(1)).unwrap();
        peer.poll(&mut completions).unwrap();
    }
    completions
}

/// An exporter with one region full of a pattern, a grant, and a connector.
struct World {
    exporter: TcpExporter,
    connector: TcpConnector,
    address: SocketAddr,
    region: Arc<Memory>,
    sink: Arc<Memory>,
}

impl World {
    fn new(options: TcpOptions) -> World {
        World::at("127.0.0.1:0", options)
    }

    fn at(address: &str, options: TcpOptions) -> World {
        let exporter = TcpExporter::new(options.clone(), None).unwrap();
        let address = exporter.listen(address).unwrap();
        let region = Arc::new(Memory::create("region", REGION_BYTES, Pages::Small).unwrap());
        for offset in (0..REGION_BYTES).step_by(8) {
            region.write(offset, &offset.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()).unwrap();
        }
        exporter.export(ID, region.clone()).unwrap();
        exporter.grant(SESSION, SECRET, Regions::All);
        let connector = TcpConnector::new(options, None).unwrap();
        let sink = Arc::new(Memory::create("sink", REGION_BYTES, Pages::Small).unwrap());
        World { exporter, connector, address, region, sink }
    }

    fn key(&self) -> RegionKey {
        self.exporter.key(ID).unwrap()
    }

    fn connect(&self) -> Result<TcpPeer, Error> {
        self.connector.open(&self.key(), SESSION, &SECRET, self.sink.clone())
    }

    /// A lane after the handshake, on which a test sends what it likes.
    fn raw_lane(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        let hello = Hello { lane: 0, session: SESSION, id: ID, nonce: [1; 32] };
        let lane = tcp::HelloSent::hello(&stream, soon(), &hello).unwrap();
        assert_eq!(lane.prove(&SECRET).unwrap().finish().unwrap(), REGION_BYTES);
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream
    }

    fn assert_read(&self, read: &ReadRequest) {
        let (mut want, mut got) = (vec![0; read.length as usize], vec![0; read.length as usize]);
        self.region.read(read.offset, &mut want).unwrap();
        self.sink.read(read.sink_offset, &mut got).unwrap();
        assert!(want == got, "the bytes of {read:?} are not those of the region");
    }

    fn wait_for_lanes(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.exporter.lanes() != count {
            assert!(Instant::now() < deadline, "{} lanes instead of {count}", self.exporter.lanes());
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A source made by the test, on one connection.
struct FakeSource {
    key: RegionKey,
    sink: Arc<Memory>,
    thread: Option<thread::JoinHandle<()>>,
}

impl FakeSource {
    fn new(play: impl FnOnce(&TcpStream) + Send + 'static) -> FakeSource {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let key = tcp::region_key(ID, REGION_BYTES, listener.local_addr().unwrap()).unwrap();
        let thread = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            play(&stream);
        });
        let sink = Arc::new(Memory::create("sink", REGION_BYTES, Pages::Small).unwrap());
        FakeSource { key, sink, thread: Some(thread) }
    }

    /// A source that completes the handshake and then calls `play`.
    fn welcoming(play: impl FnOnce(&TcpStream) + Send + 'static) -> FakeSource {
        FakeSource::new(|stream| {
            let responder = Responder::challenge(stream, soon()).unwrap();
            let proved = responder.examine(Some(&SECRET)).unwrap().unwrap();
            responder.welcome(&proved, REGION_BYTES).unwrap();
            stream.set_read_timeout(None).unwrap();
            play(stream);
        })
    }

    fn connect(&self) -> Result<TcpPeer, Error> {
        TcpConnector::new(quick(), None).unwrap().open(&self.key, SESSION, &SECRET, self.sink.clone())
    }
}

impl Drop for FakeSource {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take()
            && !thread::panicking()
        {
            thread.join().unwrap();
        }
    }
}

/// The sizes are those in the document.
const _: () = assert!(
    Tcp::HELLO_BYTES == 64
        && Tcp::CHALLENGE_BYTES == 48
        && WELCOME_BYTES == 48
        && Request::BYTES == 32
        && Answer::BYTES == 16
);
