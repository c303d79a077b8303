//! A delivery without its thread: a source's tables in a simulated network on one side, a server's socket on the other.
//! Each test turns the loop by hand.
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::Duration;

use remora_fabric::sim::{Faults, Network, SimExporter};
use remora_fabric::{Connector, Exporter, Memory, Pages, RegionId, Regions};
use remora_redis::psync::server::Access;
use remora_table::{Expectation, Geometry, Identity, JournalWriter, Kind, SinkLayout, SnapshotCopy, SnapshotWriter};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::link::candidates::Locality;
use remora_reader::parts::{CopyPlan, Part, Parts};
use remora_reader::spool::SnapshotId;

const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 8 };
const HISTORY: &str = "0123456789abcdef0123456789abcdef01234567";
const OFFSET: u64 = 1000;
const SECRET: [u8; 32] = [7; 32];
const PASSWORD: &str = "5ec4e7";

/// Turns without anything new, a millisecond apart, after which nothing more is expected of what was sent over
/// loopback.
const QUIET_TURNS: u32 = 30;

/// Time limit of each wait: far above what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of the mark that ends a payload.
const MARK: usize = 40;

/// A source: one generation's tables, exported.
struct Source {
    generation: u64,
    exporter: SimExporter,
    snapshot: SnapshotWriter,
    journal: JournalWriter,
}

impl Source {
    fn new(network: &Network, generation: u64) -> Source {
        let exporter = network.exporter();
        let table = |kind: Kind, region: u32| {
            let memory = memory(GEOMETRY.memory_len());
            exporter.export(RegionId { generation, region }, memory.clone()).unwrap();
            (memory, Identity { kind, origin: origin(generation) })
        };
        exporter.grant(1, SECRET, Regions::All);
        let (memory, identity) = table(Kind::Snapshot, 0);
        let snapshot = SnapshotWriter::create(memory, GEOMETRY, identity, 0).unwrap();
        let (memory, identity) = table(Kind::Journal, 1);
        let journal = JournalWriter::create(memory, GEOMETRY, identity).unwrap();
        Source { generation, exporter, snapshot, journal }
    }

    /// With a whole snapshot of these bytes.
    fn with(network: &Network, generation: u64, content: &[u8]) -> Source {
        let mut source = Source::new(network, generation);
        source.write(content);
        source.snapshot.finish(0).unwrap();
        source
    }

    fn write(&mut self, mut content: &[u8]) {
        while !content.is_empty() {
            let taken = self.snapshot.append(content).unwrap();
            assert!(taken > 0, "the ring is full");
            content = &content[taken..];
        }
    }

    /// A feed of these tables, as an offer of them brings it.
    fn feed(&self, network: &Network) -> Box<Feed> {
        let part = |region: u32| {
            let key = self.exporter.key(RegionId { generation: self.generation, region }).unwrap();
            let layout = SinkLayout { offset: 0, buffers: 4 };
            let sink = memory(layout.length(&GEOMETRY));
            let peer = network.connector().connect(&key, 1, &SECRET, sink.clone()).unwrap();
            let expect = Expectation::plain(origin(self.generation), GEOMETRY);
            Part { peer, sink, layout, expect, in_place: false, copy: None }
        };
        let id = SnapshotId { origin: origin(self.generation), slot_size: GEOMETRY.slot_size };
        Box::new(Feed::new(id, Parts { snapshot: Some(part(0)), journal: part(1), backlog: 0 }))
    }

    /// The same with a copy of the snapshot's slots, out of which others could read.
    fn feed_with_a_copy(&self, network: &Network) -> (Box<Feed>, Arc<Memory>) {
        let mut feed = self.feed(network);
        let key = self.exporter.key(RegionId { generation: self.generation, region: 0 }).unwrap();
        let sink = memory(SnapshotCopy::memory_len(&GEOMETRY));
        let part = feed.parts.as_mut().unwrap().snapshot.as_mut().unwrap();
        part.peer = network.connector().connect(&key, 1, &SECRET, sink.clone()).unwrap();
        part.layout = SinkLayout { offset: 0, buffers: 1 };
        part.sink = sink.clone();
        part.copy = Some(CopyPlan { own: GEOMETRY, download_rate: 0, retained: true });
        (feed, sink)
    }
}

fn origin(generation: u64) -> remora_table::Origin {
    remora_table::Origin { generation, history: HISTORY.parse().unwrap(), offset: OFFSET }
}

fn memory(length: u64) -> Arc<Memory> {
    Arc::new(Memory::create("delivery-test", length, Pages::Small).unwrap())
}

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + at / 251) as u8).collect()
}

/// A delivery, its handle's ends, and the port of its link.
struct World {
    delivery: Delivery,
    handle: Handle,
    notices: UnboundedReceiver<Notice>,
    port: u16,
    network: Network,
}

impl World {
    fn new(spool: Option<&Path>) -> World {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let listener = TcpListener::bind((address, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let locality = Locality { link_host: address, server: None, uid: None };
        let (tell, notices) = unbounded_channel();
        let setup = Setup {
            candidates: Candidates::new(listener, None, Access::Secret(PASSWORD.into()), locality),
            spool: spool.map(Path::to_path_buf),
            found: None,
            conversion: None,
            backlog_limit: 1 << 20,
            meter: Arc::default(),
            notices: tell,
        };
        let (handle, control) = crate::ends().unwrap();
        let delivery = Delivery::new(Instant::now(), setup, control);
        World { delivery, handle, notices, port, network: Network::new(1, Faults::honest()) }
    }

    fn order(&mut self, order: Order) {
        self.handle.order(order);
        self.delivery.ready = Readiness::all(Instant::now());
    }

    /// Turns until nothing more moves for a moment, nothing is on its way here, and the server has read what it was
    /// lent.
    fn settle(&mut self) {
        let began = Instant::now();
        let mut quiet = 0;
        while quiet < QUIET_TURNS {
            assert!(began.elapsed() < PATIENCE, "the delivery does not come to rest");
            match self.turn() {
                Turned::Idle if !self.is_under_way() => quiet += 1,
                Turned::Moved | Turned::Idle => quiet = 0,
                Turned::Ended => return,
            }
        }
    }

    /// One turn, after which there is time for others.
    fn turn(&mut self) -> Turned {
        self.delivery.ready = Readiness::all(Instant::now());
        let turned = self.delivery.turn(Instant::now()).unwrap();
        if !matches!(turned, Turned::Moved) {
            std::thread::sleep(Duration::from_millis(1));
        }
        turned
    }

    fn is_under_way(&self) -> bool {
        let lends = self.delivery.link.as_ref().is_some_and(|link| match &link.stage {
            Stage::Plain(payload) => payload.lends(),
            _ => false,
        });
        // Without a server, slots are taken by a spool only.
        let takes = self.delivery.link.is_some() || self.delivery.input.spool().is_some();
        lends || (takes && self.delivery.input.is_reading())
    }

    /// Turns until the server has received this much, and gives back all of it.
    fn receive(&mut self, server: &Server, done: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        let began = Instant::now();
        while !done(&server.received.lock().unwrap()) {
            assert!(began.elapsed() < PATIENCE, "received only {:?}", server.received.lock().unwrap().len());
            self.turn();
        }
        server.read()
    }

    /// Turns until the server has received a whole payload, and gives it back.
    fn payload(&mut self, server: &Server) -> Vec<u8> {
        let received = self.receive(server, |bytes| payload(bytes).is_some());
        payload(&received).unwrap().to_vec()
    }

    /// What was reported since the last time, by name.
    fn reported(&mut self) -> Vec<String> {
        let mut names = Vec::new();
        while let Ok(notice) = self.notices.try_recv() {
            let text = format!("{notice:?}");
            names.push(text[..text.find([' ', '(', '{']).unwrap_or(text.len())].to_string());
        }
        names
    }

    fn server(&self, psync: &str) -> Server {
        let mut server = Server::connect(self.port);
        server.send(&format!("AUTH {PASSWORD}\r\nREPLCONF capa eof\r\nPSYNC {psync}\r\n"));
        server
    }
}

/// The replica's server, as far as its socket goes. A thread reads, as servers do: the delivery waits for that before
/// it sends the mark. The thread ends with the connection.
struct Server {
    socket: TcpStream,
    received: Arc<Mutex<Vec<u8>>>,
    reading: JoinHandle<()>,
}

impl Server {
    fn connect(port: u16) -> Server {
        let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (mut reader, received) = (socket.try_clone().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let into = received.clone();
        let reading = std::thread::spawn(move || {
            let mut buffer = [0; 64 << 10];
            while let Ok(n @ 1..) = reader.read(&mut buffer) {
                into.lock().unwrap().extend_from_slice(&buffer[..n]);
            }
        });
        Server { socket, received, reading }
    }

    fn send(&mut self, text: &str) {
        self.socket.write_all(text.as_bytes()).unwrap();
    }

    fn ack(&mut self, offset: u64) {
        let digits = offset.to_string();
        self.send(&format!("*3\r\n$8\r\nREPLCONF\r\n$3\r\nACK\r\n${}\r\n{digits}\r\n", digits.len()));
    }

    /// All that has come since the last time.
    fn read(&self) -> Vec<u8> {
        std::mem::take(&mut self.received.lock().unwrap())
    }

    /// The delivery closes the link.
    fn wait_for_the_end(&self) {
        let began = Instant::now();
        while !self.reading.is_finished() {
            assert!(began.elapsed() < PATIENCE, "the link was not closed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The server goes away.
    fn leave(self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        self.reading.join().unwrap();
    }
}

/// The payload in what a server has read, without its mark, if the mark that was announced is at the end.
fn payload(received: &[u8]) -> Option<&[u8]> {
    let announced = format!("+FULLRESYNC {HISTORY} {OFFSET}\r\n");
    let rest = &received[find(received, announced.as_bytes())? + announced.len()..];
    let rest = &rest[find(rest, b"$EOF:")? + 5..];
    let (mark, bytes) = rest.split_at_checked(MARK)?;
    let bytes = bytes.strip_prefix(b"\r\n")?;
    bytes.strip_suffix(mark)
}

fn find(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    bytes.windows(pattern.len()).position(|window| window == pattern)
}

#[test]
fn a_server_gets_the_snapshot_its_mark_and_the_stream_only_after_its_ack() {
    let mut world = World::new(None);
    let bytes = content(20_000);
    let mut source = Source::with(&world.network, 5, &bytes);
    let mut server = world.server("? -1");
    world.settle();
    assert_eq!(world.reported(), ["Asked"]);
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    source.journal.append(b"*1\r\n$4\r\nPING\r\n").unwrap();
    world.settle();
    assert_eq!(world.payload(&server), bytes);
    assert_eq!(world.reported(), ["Fetched", "PayloadSent"]);
    assert!(!world.handle.progress().loaded);
    world.settle();
    assert_eq!(server.read(), b"", "the stream waits for the first ACK");
    server.ack(OFFSET);
    world.settle();
    assert_eq!(world.reported(), ["Loaded"]);
    assert!(world.handle.progress().loaded);
    let stream = b"*1\r\n$4\r\nPING\r\n";
    assert_eq!(world.receive(&server, |bytes| bytes.len() >= stream.len()), stream);
    source.journal.append(b"more").unwrap();
    assert_eq!(world.receive(&server, |bytes| bytes.len() >= 4), b"more");
    assert_eq!(world.delivery.meter.stream_delivered.get(), OFFSET + 18);
}

#[test]
fn progress_is_published_before_the_notice_that_it_explains() {
    let mut world = World::new(None);
    let source = Source::with(&world.network, 5, &content(100));
    let mut server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    server.ack(OFFSET);
    world.reported();
    for _ in 0..1000 {
        if world.reported().contains(&"Loaded".to_string()) {
            break;
        }
        // One step of the loop, without the publication at the end of a turn.
        std::thread::sleep(Duration::from_millis(1));
        world.delivery.ready = Readiness::all(Instant::now());
        world.delivery.hear(Instant::now());
    }
    assert!(world.handle.progress().loaded);
}

#[test]
fn a_held_stream_waits_until_the_server_makes_another_link() {
    let mut world = World::new(None);
    let mut source = Source::with(&world.network, 5, &content(100));
    let mut server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    server.ack(OFFSET);
    world.settle();
    world.order(Order::Hold);
    source.journal.append(b"0123456789").unwrap();
    server.read();
    world.settle();
    assert_eq!(server.read(), b"");
    // Another link goes on where the server is, in the middle of what waits.
    let again = world.server(&format!("{HISTORY} {}", OFFSET + 1));
    world.settle();
    let received = world.receive(&again, |bytes| bytes.ends_with(b"0123456789"));
    assert!(String::from_utf8(received).unwrap().contains("+CONTINUE"));
    server.wait_for_the_end();
    assert!(!world.reported().contains(&"FeedWanted".to_string()), "the stream was all here");
}

#[test]
fn a_server_that_goes_on_elsewhere_in_the_stream_needs_another_feed() {
    let mut world = World::new(None);
    let mut source = Source::with(&world.network, 5, &content(100));
    let mut server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    server.ack(OFFSET);
    source.journal.append(b"0123456789").unwrap();
    world.settle();
    world.reported();
    // It lost the last four bytes with its link.
    let again = world.server(&format!("{HISTORY} {}", OFFSET + 7));
    world.settle();
    assert_eq!(world.reported(), ["LinkLost", "Asked", "FeedWanted"]);
    assert_eq!(world.handle.progress().next_byte, OFFSET + 7);
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    world.receive(&again, |bytes| bytes.ends_with(b"6789"));
}

#[test]
fn a_server_that_has_loaded_gets_nothing_of_another_history() {
    let mut world = World::new(None);
    let source = Source::with(&world.network, 5, &content(100));
    let mut server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    server.ack(OFFSET);
    world.settle();
    world.reported();
    server.read();
    // The offer was made before the source knew that the server has loaded.
    let mut other = Source::with(&world.network, 6, &content(100));
    other.journal.append(b"0123456789").unwrap();
    let mut feed = other.feed(&world.network);
    feed.id.origin.history = "f".repeat(40).parse().unwrap();
    world.order(Order::Attach(feed));
    world.settle();
    assert_eq!(world.reported(), ["FeedLost"]);
    assert_eq!(server.read(), b"");
    assert!(world.handle.progress().loaded);
}

#[test]
fn a_link_that_is_closed_for_another_snapshot_is_reported() {
    let mut world = World::new(None);
    let source = Source::with(&world.network, 5, &content(9000));
    let server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    world.reported();
    // The server has the payload and has acknowledged nothing: it loads.
    let other = Source::with(&world.network, 6, &content(9000));
    let feed = other.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    assert_eq!(world.reported()[0], "LinkLost", "otherwise a server that does not come back is never looked at");
    server.wait_for_the_end();
}

#[test]
fn a_server_that_asks_for_everything_again_is_no_longer_loaded() {
    let mut world = World::new(None);
    let bytes = content(9000);
    let source = Source::with(&world.network, 5, &bytes);
    let mut server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    server.ack(OFFSET);
    world.settle();
    world.reported();
    let again = world.server("? -1");
    world.settle();
    assert_eq!(world.reported(), ["LinkLost", "Asked", "FeedWanted"]);
    let progress = world.handle.progress();
    assert!(!progress.loaded && progress.snapshot.is_none() && progress.next_slot == 0);
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    assert_eq!(world.payload(&again), bytes);
}

#[test]
fn the_link_goes_on_in_the_middle_with_another_feed_of_the_same_snapshot() {
    let mut world = World::new(None);
    let bytes = content(24_000);
    let mut source = Source::new(&world.network, 5);
    source.write(&bytes[..10_000]);
    let server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    assert!(world.delivery.at.next_slot > 0, "some slots have gone");
    world.delivery.lose_feed(Instant::now(), FeedError::Table(remora_table::Error::Misuse("lost")));
    source.write(&bytes[10_000..]);
    source.snapshot.finish(0).unwrap();
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    assert_eq!(world.payload(&server), bytes, "each byte once");
}

#[test]
fn a_server_never_gets_bytes_of_two_snapshots_in_one_payload() {
    let mut world = World::new(None);
    let mut first = Source::new(&world.network, 5);
    first.write(&content(10_000));
    let server = world.server("? -1");
    let feed = first.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    world.receive(&server, |bytes| bytes.len() > 4096);
    let second = Source::with(&world.network, 6, &content(5000));
    let feed = second.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    server.wait_for_the_end();
    let again = world.server("? -1");
    world.settle();
    assert_eq!(world.payload(&again), content(5000));
}

#[test]
fn a_link_that_breaks_while_it_loads_makes_the_snapshot_begin_again() {
    let mut world = World::new(None);
    let mut source = Source::new(&world.network, 5);
    source.write(&content(10_000));
    let server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    world.reported();
    server.leave();
    world.settle();
    assert_eq!(world.reported(), ["LinkLost"]);
    assert_eq!((world.handle.progress().next_slot, world.delivery.input.has_feed()), (0, false));
    world.server("? -1");
    world.settle();
    assert_eq!(world.reported().first().map(String::as_str), Some("Asked"));
}

#[test]
fn with_a_spool_a_broken_link_gets_its_slots_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(Some(folder.path()));
    let bytes = content(20_000);
    let source = Source::with(&world.network, 5, &bytes);
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    assert_eq!(world.delivery.meter.slots_held.get(), 5, "slots are stored before a server asks");
    let server = world.server("? -1");
    world.settle();
    server.leave();
    world.settle();
    source.exporter.revoke(RegionId { generation: 5, region: 0 });
    let again = world.server("? -1");
    world.settle();
    assert_eq!(world.payload(&again), bytes, "the source's snapshot is gone");
}

#[test]
fn a_spool_is_removed_when_the_sync_is_done_and_kept_otherwise() {
    for done in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let mut world = World::new(Some(folder.path()));
        let source = Source::with(&world.network, 5, &content(100));
        let feed = source.feed(&world.network);
        world.order(Order::Attach(feed));
        world.settle();
        world.order(Order::Stop { done });
        world.settle();
        assert_eq!(folder.path().join("slots").exists(), !done);
    }
}

#[test]
fn the_copy_outlives_its_feed_and_the_next_feed_goes_on_with_it() {
    let mut world = World::new(None);
    let source = Source::with(&world.network, 5, &content(20_000));
    let (feed, copy) = source.feed_with_a_copy(&world.network);
    world.order(Order::Attach(feed));
    world.order(Order::ReadFrom(remora_reader::relay::reader::ReadFrom::Source));
    world.settle();
    assert!(Arc::ptr_eq(world.handle.progress().copy.as_ref().unwrap(), &copy));
    world.delivery.lose_feed(Instant::now(), FeedError::Table(remora_table::Error::Misuse("lost")));
    assert!(Arc::ptr_eq(world.handle.progress().copy.as_ref().unwrap(), &copy));
    let server = world.server("? -1");
    let (mut feed, _) = source.feed_with_a_copy(&world.network);
    let key = source.exporter.key(RegionId { generation: 5, region: 0 }).unwrap();
    let part = feed.parts.as_mut().unwrap().snapshot.as_mut().unwrap();
    part.peer = world.network.connector().connect(&key, 1, &SECRET, copy.clone()).unwrap();
    part.sink = copy.clone();
    world.order(Order::Attach(feed));
    world.settle();
    assert_eq!(world.payload(&server), content(20_000));
}

#[test]
fn a_server_that_waits_is_kept_alive_by_newlines() {
    let mut world = World::new(None);
    let server = world.server("? -1");
    world.settle();
    server.read();
    let link = world.delivery.link.as_mut().unwrap();
    let now = Instant::now();
    assert_eq!(link.keep_alive(now), None);
    assert_eq!(link.keep_alive(now + Duration::from_secs(2)), Some(1));
    world.settle();
    assert_eq!(world.receive(&server, |bytes| !bytes.is_empty()), b"\n");
}

#[test]
fn only_the_first_ack_at_the_snapshot_says_that_it_is_loaded() {
    let mut world = World::new(None);
    let source = Source::with(&world.network, 5, &content(100));
    let mut server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    for (offset, loaded) in [(OFFSET - 1, false), (OFFSET, true), (OFFSET + 5, false)] {
        world.reported();
        server.ack(offset);
        world.settle();
        assert_eq!(world.reported() == ["Loaded"], loaded, "ACK {offset}");
        assert_eq!(world.delivery.meter.acknowledged.get(), offset);
    }
}

#[test]
fn bytes_that_no_replica_sends_end_the_link() {
    let mut world = World::new(None);
    let source = Source::with(&world.network, 5, &content(100));
    let mut server = world.server("? -1");
    let feed = source.feed(&world.network);
    world.order(Order::Attach(feed));
    world.settle();
    world.reported();
    server.send("*1\r\n$-7\r\n");
    world.settle();
    assert_eq!(world.reported(), ["LinkLost"]);
    server.wait_for_the_end();
}

#[test]
fn a_server_that_cannot_load_a_snapshot_of_unknown_length_is_refused() {
    let mut world = World::new(None);
    let mut old = Server::connect(world.port);
    old.send(&format!("AUTH {PASSWORD}\r\nPSYNC ? -1\r\n"));
    world.settle();
    assert_eq!(world.reported(), ["Asked", "LinkLost"]);
    old.wait_for_the_end();
}
