//! The whole job over RDMA, in the virtual machine that has devices: exact replicas, one-sided reads on the wire, a link
//! that fails, attackers on the wire, and volumes.
//!
//! Tests for the machine are ignored on the host. [`crate::fleet::service`] boots the machine once and runs them there.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{Directory, LONG, Source, Stage, ends, fill, load_slowly, says, succeeds};
use crate::volume::commands::qemu_io;
use remora_lab::server::wait_until;
use remora_lab::workload::Options;
use remora_lab::{Agent, Kind, Random, RdmaVm, Server, Workload, assert_same_data, fill_every_type, random};

/// Random data of a primary. The machine is emulated: each MiB costs some seconds of a processor until it is at a replica
/// and compared.
const MEBIBYTES: usize = 3;

/// The source is node 1; the replicas are the others.
const SOURCE_NODE: u8 = 1;

const REPLICA_NODES: [u8; 3] = [0, 2, 3];

fn source(stage: &Stage, primary: &Server, more: &[&str]) -> Source {
    // Replicas reach the primary at this address too; on one host they would prefer shared memory to RDMA.
    let announce = format!("127.0.0.1:{}", primary.port());
    let listen = format!("{}:0", RdmaVm::address(SOURCE_NODE));
    let more = [&["--no-shm", "--announce", &announce], more].concat();
    stage.source_at(&listen, None, &primary.url(), &more)
}

fn replica(stage: &Stage, server: &Server, source: &Source, node: u8, more: &[&str]) -> Agent {
    let address = RdmaVm::address(node).to_string();
    let more = [&["--rdma-address", &address], more].concat();
    stage.replica(&server.url(), source.address, &more)
}

fn primary() -> Server {
    primary_of(Kind::Redis7)
}

fn primary_of(kind: Kind) -> Server {
    // Diskless, for its answer to a replica: the machine's disk is memory that the tests need.
    let primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 4).unwrap();
    primary
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn three_replicas_of_a_redis_are_exact_and_their_bytes_are_fetched_by_read_alone() {
    replicas_fetch_by_read(
        Kind::Redis7,
        &[(REPLICA_NODES[0], "verbs"), (REPLICA_NODES[1], "auto"), (REPLICA_NODES[2], "verbs")],
    );
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_replica_of_a_valkey_is_exact_and_its_bytes_are_fetched_by_read_alone() {
    replicas_fetch_by_read(Kind::Valkey9, &[(REPLICA_NODES[0], "verbs")]);
}

/// Records the source's wire while replicas are made of it under writes: of each its node and its choice of a transport.
fn replicas_fetch_by_read(kind: Kind, replicas: &[(u8, &str)]) {
    let (stage, primary) = (Stage::new(), primary_of(kind));
    fill(&primary, MEBIBYTES, 1);
    let source = source(&stage, &primary, &[]);
    let capture = Capture::start(SOURCE_NODE, &stage.path("wire.pcap"));
    let options = Options { big_bytes: 0, ..Options::seeded(random::seed("workload")).rate(100) };
    let writer = Workload::start(primary.client().unwrap(), options).unwrap();
    let servers: Vec<Server> = replicas.iter().map(|_| Server::start(kind).unwrap()).collect();
    // All read from the source; the next test covers replicas that read from each other.
    let start = |(server, (node, choice)): (_, &(u8, &str))| {
        replica(&stage, server, &source, *node, &["--transport", choice, "--no-serve-peers"])
    };
    let mut agents: Vec<Agent> = servers.iter().zip(replicas).map(start).collect();
    for (agent, server) in agents.iter_mut().zip(&servers) {
        succeeds(agent, server);
        says(&agent.output(), &["transport=\"verbs\""]);
    }
    writer.stop().unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
    let wire = capture.stop();
    // Two tables, each with its own key; each reader is admitted to both.
    assert_eq!(wire.keys().len(), 2, "{:x?}", wire.keys());
    assert_eq!(wire.welcomes.len(), 2 * replicas.len());
    wire.assert_reads_lie_inside_what_was_welcomed();
    assert!(wire.foreign.is_empty(), "neither writes nor long messages: {:x?}", wire.foreign);
    // Everything that arrived was an answer to a READ: at least the random data for each.
    assert!(wire.read_bytes > ((replicas.len() * MEBIBYTES) << 20) as u64, "{} bytes", wire.read_bytes);
    assert!(wire.sent_bytes < 10_000, "{} bytes in messages", wire.sent_bytes);
    source.stop();
}

/// A replica that joins late reads over the wire of another replica, not over the source's.
#[test]
#[ignore = "runs in the RDMA machine"]
fn a_late_joiner_reads_from_another_replica_by_rdma_and_the_source_sends_it_next_to_nothing() {
    let (stage, primary) = (Stage::new(), primary());
    fill(&primary, MEBIBYTES, 3);
    let source = source(&stage, &primary, &[]);
    let servers: Vec<Server> = (0..2).map(|_| Server::start(Kind::Redis7).unwrap()).collect();
    let [lender_node, late_node, _] = REPLICA_NODES;
    let by_rdma = ["--transport", "verbs"];
    let staying = [&by_rdma[..], &["--stay"]].concat();
    let mut lender = replica(&stage, &servers[0], &source, lender_node, &staying);
    lender.wait_for_event("in_step", LONG).unwrap();
    let wires = [SOURCE_NODE, late_node].map(|node| Capture::start(node, &stage.path(&format!("{node}.pcap"))));
    let mut late = replica(&stage, &servers[1], &source, late_node, &by_rdma);
    succeeds(&mut late, &servers[1]);
    let [of_source, of_late] = wires.map(Capture::stop);
    let said = late.output();
    let line = said.lines().find(|line| line.contains("reading slots from another replica")).expect(&said);
    says(line, &["transport=\"verbs\""]);
    assert_same_data(&primary, &servers[1]);
    // The source's two tables, and the lender's copy of one of them.
    assert_eq!(of_late.keys().len(), 3, "{:x?}", of_late.keys());
    of_late.assert_reads_lie_inside_what_was_welcomed();
    assert!(of_late.foreign.is_empty(), "neither writes nor long messages: {:x?}", of_late.foreign);
    assert!(of_late.read_bytes > (MEBIBYTES << 20) as u64, "{} bytes came", of_late.read_bytes);
    assert!(of_source.read_bytes < 1 << 20, "{} bytes out of the source", of_source.read_bytes);
    lender.signal(Signal::TERM).unwrap();
    lender.wait_for_success(LONG).unwrap();
    source.stop();
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_link_that_fails_in_the_middle_is_reported_and_tcp_carries_the_rest() {
    let (stage, primary) = (Stage::new(), primary());
    fill(&primary, 20, 2);
    let source = source(&stage, &primary, &[]);
    let server = Server::start(Kind::Redis7).unwrap();
    // Slow enough that most of it is still to come when the cable is cut.
    load_slowly(&server, 20_000);
    let mut agent = replica(&stage, &server, &source, REPLICA_NODES[0], &["--memory", "16MiB"]);
    source.wait_for_slots(&mut agent, 20);
    assert_eq!(source.status()["replicas"][0]["transport"], "verbs", "{}", agent.output());
    cable(SOURCE_NODE, false);
    agent.wait_for_event("rdma_ended", LONG).unwrap();
    let status =
        source.wait_for_status("the replica to read by TCP", |status| status["replicas"][0]["transport"] == "tcp");
    let why = status["replicas"][0]["transport_why"].as_str().unwrap_or_default().to_owned();
    assert!(why.contains("verbs: "), "{why}");
    server.configure("key-load-delay", "0").unwrap();
    succeeds(&mut agent, &server);
    cable(SOURCE_NODE, true);
    says(&agent.output(), &["now=\"tcp\"", "verbs: "]);
    assert_same_data(&primary, &server);
    source.stop();
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn the_machine_has_devices_and_the_command_says_so() {
    let stage = Stage::new();
    let said = stage.end(&["devices"], 0);
    says(
        &said,
        &[
            "rxe0  InfiniBand",
            "port 1: ACTIVE, Ethernet on eth0",
            "address 10.77.0.1",
            "RoCE v2",
            "rdma   ready",
            "tcp    ready",
        ],
    );
    let stripped = Command::new(env!("CARGO_BIN_EXE_remora"))
        .args(["devices", "--json"])
        .env("REMORA_RDMA_DISABLE", "1")
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&stripped.stdout).unwrap();
    assert_eq!(report["rdma"]["ready"], false);
    assert!(report["rdma"]["trouble"].as_str().unwrap().contains("REMORA_RDMA_DISABLE"));
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_probe_measures_rdma_to_a_source_and_a_device_can_be_named() {
    let (stage, primary) = (Stage::new(), Server::start(Kind::Redis7).unwrap());
    let announce = format!("127.0.0.1:{}", primary.port());
    let more = ["--no-shm", "--announce", &announce, "--rdma-device", "rxe1", "--rdma-service-level", "3"];
    let source = stage.source_at(&format!("{}:0", RdmaVm::address(SOURCE_NODE)), None, &primary.url(), &more);
    let (address, token) = (source.address.to_string(), stage.token.display().to_string());
    let what = ["--transport", "verbs", "--rdma-device", "rxe0", "--rdma-port", "1", "--rdma-traffic-class", "104"];
    let small = ["--json", "--time", "50ms", "--sizes", "8,64KiB,4MiB", "--depths", "1,16"];
    let args = [&["probe", "--source", &address, "--token-file", &token][..], &what, &small].concat();
    let printed = stage.remora(&args).stderr(Stdio::inherit()).output().unwrap();
    assert!(printed.status.success());
    let report: serde_json::Value = serde_json::from_slice(&printed.stdout).unwrap();
    let verbs = &report["transports"][0];
    assert_eq!((&verbs["transport"], &verbs["trouble"]), (&"verbs".into(), &serde_json::Value::Null), "{report}");
    let figures = verbs["figures"].as_array().unwrap();
    assert_eq!(figures.len(), 3 * 2);
    for figure in figures {
        println!("{figure}");
        assert!(figure["median_micros"].as_f64().unwrap() > 1.0 && figure["reads"].as_u64().unwrap() >= 1, "{figure}");
    }
    // A missing device is an error if it was named in the options, and the error lists the devices that exist.
    let wrong = ["--transport", "verbs", "--rdma-device", "mlx5_0"];
    let args = [&["probe", "--source", &address, "--token-file", &token][..], &wrong].concat();
    let printed = stage.remora(&args).output().unwrap();
    assert_eq!(printed.status.code(), Some(5));
    says(&String::from_utf8_lossy(&printed.stdout), &["mlx5_0", "rxe0 port 1 (10.77.0.1)"]);
    source.stop();
}

/// Cuts a node's cable from the bridge, or connects it again. (The device itself stays on: in Soft-RoCE of Linux 6.1, a
/// device whose own messages cannot leave never connects again.)
fn cable(node: u8, plugged: bool) {
    let port = format!("port{node}");
    let to: &[&str] = if plugged { &["master", "br0"] } else { &["nomaster"] };
    let changed = Command::new("ip").args([&["link", "set", &port], to].concat()).status().unwrap();
    assert!(changed.success());
}

// The packets on a node's wire: tcpdump records them, and this module parses RoCE v2 from the recording.
//
// Layouts: the file as pcap-savefile(5) has it; the packets as the InfiniBand Architecture Specification, volume 1,
// has them (section 5.2.4 the base transport header, 5.2.7 the RDMA extended transport header), behind Ethernet, IPv4
// and UDP (annex A17).

/// A running recording.
pub(crate) struct Capture {
    tcpdump: Agent,
    file: PathBuf,
}

/// A region to which the source admitted a reader, parsed from the message that it sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Welcome {
    key: u32,
    base: u64,
    length: u64,
}

/// A READ request.
#[derive(Clone, Copy, Debug)]
struct Read {
    key: u32,
    address: u64,
    length: u32,
}

/// What the recording contains.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) welcomes: Vec<Welcome>,
    /// Bytes of answers to READs.
    pub(crate) read_bytes: u64,
    /// Bytes sent in messages.
    pub(crate) sent_bytes: u64,
    /// Operations that must not occur, by their code.
    pub(crate) foreign: BTreeSet<u8>,
    reads: Vec<Read>,
}

const PATIENCE: Duration = Duration::from_secs(30);

/// A recorder without packets to write for this long has written all of them.
const SETTLED: Duration = Duration::from_millis(500);

/// There may always be packets: a replica that stays reads all the time.
const SETTLE_LIMIT: Duration = Duration::from_secs(5);

impl Capture {
    /// Begins to record the node's wire.
    pub(crate) fn start(node: u8, file: &str) -> Capture {
        let mut tcpdump = Command::new("tcpdump");
        // The first bytes of each packet suffice; a large buffer, so that no packet is missed; as root, who alone can
        // write there.
        tcpdump.args(["-i", &format!("eth{node}"), "-s", "192", "-B", "65536", "-Z", "root", "-U", "-w", file]);
        tcpdump.args(["udp", "port", "4791"]).stdin(Stdio::null());
        let mut tcpdump = Agent::run(tcpdump).unwrap();
        tcpdump.wait_for_line("listening on", PATIENCE).unwrap();
        Capture { tcpdump, file: file.into() }
    }

    /// Ends the recording and parses it.
    pub(crate) fn stop(mut self) -> Wire {
        // What it has not read yet when it ends is missing, and is not counted as dropped.
        let written = || std::fs::metadata(&self.file).unwrap().len();
        let (mut before, began) = (written(), Instant::now());
        while began.elapsed() < SETTLE_LIMIT {
            thread::sleep(SETTLED);
            let now = written();
            if now == std::mem::replace(&mut before, now) {
                break;
            }
        }
        self.tcpdump.signal(Signal::INT).unwrap();
        self.tcpdump.wait_for_success(PATIENCE).unwrap();
        let said = self.tcpdump.output();
        assert!(said.contains("\n0 packets dropped by kernel"), "{said}");
        Wire::read(&self.file)
    }
}

impl Wire {
    fn read(file: &Path) -> Wire {
        let bytes = std::fs::read(file).unwrap();
        let mut wire = Wire::default();
        assert_eq!(&bytes[..4], 0xa1b2_c3d4_u32.to_le_bytes(), "a capture of this machine's byte order");
        let mut rest = &bytes[24..];
        while rest.len() >= 16 {
            let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap()) as usize;
            let (kept, whole) = (word(8), word(12));
            wire.packet(&rest[16..16 + kept], whole);
            rest = &rest[16 + kept..];
        }
        wire
    }

    /// Handles one packet, which had `whole` bytes on the wire.
    fn packet(&mut self, packet: &[u8], whole: usize) {
        let transport = &packet[ETHERNET_BYTES + IPV4_BYTES + UDP_BYTES..];
        let payload = whole - ETHERNET_BYTES - IPV4_BYTES - UDP_BYTES - BTH_BYTES - CHECKSUM_BYTES;
        let behind = &transport[BTH_BYTES..];
        match transport[0] {
            READ_REQUEST => self.reads.push(Read {
                address: u64::from_be_bytes(behind[..8].try_into().unwrap()),
                key: u32::from_be_bytes(behind[8..12].try_into().unwrap()),
                length: u32::from_be_bytes(behind[12..16].try_into().unwrap()),
            }),
            READ_RESPONSE_MIDDLE => self.read_bytes += payload as u64,
            READ_RESPONSE_FIRST | READ_RESPONSE_LAST | READ_RESPONSE_ONLY => {
                self.read_bytes += (payload - ACKNOWLEDGEMENT_BYTES) as u64;
            }
            SEND_ONLY => {
                self.sent_bytes += payload as u64;
                self.welcomes.extend(Welcome::read(&behind[..payload]));
            }
            // Acknowledgements, and the connection manager's datagrams.
            ACKNOWLEDGE | DATAGRAM_SEND_ONLY => {}
            foreign => drop(self.foreign.insert(foreign)),
        }
    }

    /// The keys that readers were sent.
    pub(crate) fn keys(&self) -> BTreeSet<u32> {
        self.welcomes.iter().map(|welcome| welcome.key).collect()
    }

    /// Fails unless each READ names a key and a range to which a reader was admitted.
    pub(crate) fn assert_reads_lie_inside_what_was_welcomed(&self) {
        assert!(self.reads.len() > 100, "only {} READs", self.reads.len());
        for read in &self.reads {
            let is_inside = self.welcomes.iter().any(|region| {
                let end = read.address + u64::from(read.length);
                read.key == region.key && read.address >= region.base && end <= region.base + region.length
            });
            assert!(is_inside, "{read:x?} is not in {:x?}", self.welcomes);
        }
    }
}

impl Welcome {
    /// The fabric's message of 64 bytes that begins with its magic. The reader's proof, of 32 bytes, has no magic.
    fn read(message: &[u8]) -> Option<Welcome> {
        if message.len() != 64 || !message.starts_with(b"RMRV") {
            return None;
        }
        let word = |at: usize| u32::from_le_bytes(message[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().unwrap());
        Some(Welcome { key: word(12), base: long(16), length: long(24) }).filter(|_| word(8) == 0)
    }
}

const ETHERNET_BYTES: usize = 14;

const IPV4_BYTES: usize = 20;

const UDP_BYTES: usize = 8;

/// The base transport header.
const BTH_BYTES: usize = 12;

/// The invariant checksum at the end.
const CHECKSUM_BYTES: usize = 4;

/// The acknowledgement header of some answers.
const ACKNOWLEDGEMENT_BYTES: usize = 4;

/// Operation codes of reliable connections, and one of datagrams.
const SEND_ONLY: u8 = 0x04;

const READ_REQUEST: u8 = 0x0c;

const READ_RESPONSE_FIRST: u8 = 0x0d;

const READ_RESPONSE_MIDDLE: u8 = 0x0e;

const READ_RESPONSE_LAST: u8 = 0x0f;

const READ_RESPONSE_ONLY: u8 = 0x10;

const ACKNOWLEDGE: u8 = 0x11;

const DATAGRAM_SEND_ONLY: u8 = 0x64;

// An attacker who changes, swaps or replays what replicas read by RDMA. It would have to be on the wire; the test
// changes the source's sealed memory instead, from outside the process, so that each READ returns what such an
// attacker would put there.

/// A sealed table in the memory of a source.
struct Table {
    memory: File,
    base: u64,
}

/// Parts of a table that a reader reads (table/README.md).
#[derive(Clone, Copy, Debug)]
enum Part {
    Line,
    /// The entry of a slot, counted from the last one.
    Entry(u64),
    /// A byte in the middle of a slot, counted from the last one.
    Slot(u64),
    /// The last byte of the last record.
    Record,
}

impl Table {
    /// Finds the table by the name of its memory.
    fn of(pid: u32, name: &str) -> Table {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let wanted = format!("/memfd:{name} ");
        let line = maps.lines().find(|line| line.contains(&wanted) && line.contains(" rw-s ")).expect(&maps);
        let base = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
        Table { memory, base }
    }

    fn number<const N: usize>(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes[..N], self.base + at).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Where the part is.
    fn place(&self, part: Part) -> u64 {
        let (slot_size, slots, data) = (self.number::<4>(24), self.number::<4>(28), self.number::<8>(32));
        let published = self.number::<8>(128);
        let slot = |before_last| (published - 1) / slot_size - before_last;
        match part {
            Part::Line => 128,
            Part::Entry(before_last) => 4096 + 64 * (slot(before_last) % slots) + 8,
            Part::Slot(before_last) => data + slot_size * (slot(before_last) % slots) + slot_size / 2,
            Part::Record => data + slot_size * (slot(0) % slots) + (published - 1) % slot_size,
        }
    }

    /// Turns a bit. Done twice, nothing has changed.
    fn turn(&self, place: u64) {
        self.put(place, &[self.bytes(place, 1)[0] ^ 0x10]);
    }

    fn bytes(&self, place: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.memory.read_exact_at(&mut bytes, self.base + place).unwrap();
        bytes
    }

    fn put(&self, place: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, self.base + place).unwrap();
    }

    /// Where the whole part is that a deed moves, and how many bytes it has.
    fn whole(&self, part: Part) -> (u64, u64) {
        let slot_size = self.number::<4>(24);
        match part {
            Part::Line => (128, 64),
            Part::Entry(_) => (self.place(part) - 8, 64),
            Part::Slot(_) => (self.place(part) - slot_size / 2, slot_size),
            Part::Record => unreachable!("{part:?} is not moved"),
        }
    }
}

/// What is done to a table. Done twice, nothing has changed.
enum Deed {
    Turn(Part),
    /// Two parts of a kind change places.
    Swap(Vec<(Part, Part)>),
    /// Parts are replaced by those of another snapshot of the same data. Its key is another one.
    Replay(Vec<(Part, Vec<u8>)>),
}

impl Deed {
    fn replay(other: &Table, parts: &[Part]) -> Deed {
        let bytes = |part: &Part| {
            let (place, length) = other.whole(*part);
            (*part, other.bytes(place, length))
        };
        Deed::Replay(parts.iter().map(bytes).collect())
    }

    fn name(&self) -> String {
        match self {
            Deed::Turn(part) => format!("{part:?}"),
            Deed::Swap(pairs) => format!("a swap of {pairs:?}"),
            Deed::Replay(parts) => format!("a replay of {:?}", parts.iter().map(|(part, _)| *part).collect::<Vec<_>>()),
        }
    }

    fn happen(&mut self, table: &Table) {
        match self {
            Deed::Turn(part) => table.turn(table.place(*part)),
            Deed::Swap(pairs) => {
                for (one, other) in pairs {
                    let ((one, length), (other, _)) = (table.whole(*one), table.whole(*other));
                    let (of_one, of_other) = (table.bytes(one, length), table.bytes(other, length));
                    assert_ne!(of_one, of_other);
                    table.put(one, &of_other);
                    table.put(other, &of_one);
                }
            }
            Deed::Replay(parts) => {
                for (part, bytes) in parts {
                    let (place, length) = table.whole(*part);
                    let there = table.bytes(place, length);
                    assert_ne!(there, *bytes);
                    table.put(place, bytes);
                    *bytes = there;
                }
            }
        }
    }
}

/// Waits until the agent has named the damage `count` times or more.
fn wait_until_named(agent: &Agent, count: usize) {
    wait_until("the agent to name the damage", LONG, || {
        let said = agent.output();
        Ok(if times_named(&said) >= count { Ok(()) } else { Err(said) })
    })
    .unwrap();
}

fn times_named(said: &str) -> usize {
    let names = ["was changed on its way", "is damaged", "its checksum", "their checksum"];
    said.lines().filter(|line| names.iter().any(|name| line.contains(name))).count()
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_snapshot_that_is_changed_on_its_way_by_rdma_is_refused_and_read_again() {
    let (stage, primary) = (Stage::new(), primary());
    fill(&primary, 6, 5);
    let [mut source, mut another] = [(); 2].map(|()| source(&stage, &primary, &[]));
    // The first replica has the snapshot made.
    let first = Server::start(Kind::Redis7).unwrap();
    succeeds(&mut replica(&stage, &first, &source, REPLICA_NODES[0], &["--transport", "verbs"]), &first);
    source.wait_for_snapshot();
    let table = Table::of(source.agent.pid(), "remora-sealed");

    // The same data, sealed again.
    let second = Server::start(Kind::Redis7).unwrap();
    succeeds(&mut replica(&stage, &second, &another, REPLICA_NODES[0], &["--transport", "verbs"]), &second);
    another.wait_for_snapshot();
    let sealed_again = Table::of(another.agent.pid(), "remora-sealed");
    assert_eq!(table.place(Part::Slot(1)), sealed_again.place(Part::Slot(1)), "both have as many slots");

    // Each part of a table by itself is tried without a network, in `remora-table`.
    let deeds = [
        Deed::Turn(Part::Line),
        Deed::Turn(Part::Slot(1)),
        Deed::Swap(vec![(Part::Slot(1), Part::Slot(2)), (Part::Entry(1), Part::Entry(2))]),
        Deed::replay(&sealed_again, &[Part::Entry(3), Part::Slot(3)]),
    ];
    another.stop();
    for mut deed in deeds {
        let server = Server::start(Kind::Redis7).unwrap();
        deed.happen(&table);
        let options = ["--transport", "auto", "--no-serve-peers", "--memory", "16MiB"];
        let mut agent = replica(&stage, &server, &source, REPLICA_NODES[1], &options);
        wait_until_named(&agent, 1);
        deed.happen(&table);
        succeeds(&mut agent, &server);
        says(&agent.output(), &["transport=\"verbs\""]);
        assert_same_data(&primary, &server);
        println!("{}: named {} times", deed.name(), times_named(&agent.output()));
    }
    source.stop();
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_record_that_is_changed_on_its_way_by_rdma_never_reaches_the_server() {
    let (stage, primary) = (Stage::new(), primary());
    let source = source(&stage, &primary, &[]);
    let server = Server::start(Kind::Redis7).unwrap();
    let mut agent = replica(&stage, &server, &source, REPLICA_NODES[0], &["--transport", "verbs", "--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    let table = Table::of(source.agent.pid(), "remora-sealed-journal");
    let published = table.number::<8>(128);
    // The agent does not read while the record is written and changed.
    agent.signal(Signal::STOP).unwrap();
    primary.client().unwrap().ok(&["SET", "changed on its way", "no"]).unwrap();
    wait_until("the record", LONG, || {
        let now = table.number::<8>(128);
        Ok(if now > published + 40 { Ok(()) } else { Err(format!("published {now}")) })
    })
    .unwrap();
    let place = table.place(Part::Record);
    table.turn(place);
    agent.signal(Signal::CONT).unwrap();
    wait_until_named(&agent, 1);
    assert_eq!(server.client().unwrap().int(&["EXISTS", "changed on its way"]).unwrap(), 0);
    table.turn(place);
    wait_until("the command to arrive", LONG, || {
        let there = server.client()?.int(&["EXISTS", "changed on its way"])?;
        Ok(if there == 1 { Ok(()) } else { Err(agent.output()) })
    })
    .unwrap();
    agent.signal(Signal::TERM).unwrap();
    agent.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
    source.stop();
}

// A volume over RDMA: what `remora volume` reads and writes by it, and how it goes on without a server.

/// The writer is node 0; the servers are the others.
const WRITER_NODE: u8 = 0;

/// Servers at nodes 1, 2 and 3, and a volume on them.
struct Scene {
    stage: Stage,
    servers: Vec<Agent>,
    addresses: Vec<String>,
    file: String,
    socket: String,
}

impl Scene {
    fn new() -> Scene {
        Scene::with(&[])
    }

    /// Servers with these options too.
    fn with(more: &[&str]) -> Scene {
        let stage = Stage::new();
        let (file, socket) = (stage.path("data.volume"), stage.path("nbd/device"));
        let mut scene = Scene { stage, servers: Vec::new(), addresses: Vec::new(), file, socket };
        for node in 1..=3 {
            let (server, address) = scene.serve_with(node, 0, more);
            scene.servers.push(server);
            scene.addresses.push(address);
        }
        let servers = scene.addresses.join(",");
        scene.end(&["create", &scene.file, "--size", "16MiB", "--servers", &servers], 0);
        scene.servers.iter_mut().for_each(registered);
        scene
    }

    fn start(&self, args: &[&str]) -> Agent {
        Agent::run(self.command(args)).unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let token = self.stage.token.to_str().unwrap();
        let protection = ["--token-file", token, "--security", "none", "--plaintext-network"];
        self.stage.remora(&[&["volume"], args, &protection].concat())
    }

    fn end(&self, args: &[&str], code: i32) -> String {
        ends(&mut self.start(args), code)
    }

    /// A server whose copies can be read by RDMA only: it has neither shared memory nor lanes.
    fn serve(&self, node: u8, port: u16) -> (Agent, String) {
        self.serve_with(node, port, &[])
    }

    fn serve_with(&self, node: u8, port: u16, more: &[&str]) -> (Agent, String) {
        let (ip, listen) = (RdmaVm::address(node).to_string(), format!("{}:{port}", RdmaVm::address(node)));
        let args = ["serve", "--listen", &listen, "--memory", "128MiB", "--no-shm", "--rdma-address", &ip];
        let mut server = self.start(&[&args, more].concat());
        let line = server.wait_for_event("volume_server_ready", LONG).unwrap();
        let address = line.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
        (server, address)
    }

    fn nbd(&self, more: &[&str]) -> Agent {
        let ip = RdmaVm::address(WRITER_NODE).to_string();
        let nbd = ["nbd", &self.file, "--socket", &self.socket, "--copy-timeout", "20s", "--rdma-address", &ip];
        let mut nbd = self.start(&[&nbd[..], more].concat());
        nbd.wait_for_event("volume_open", LONG).unwrap();
        nbd
    }

    /// Waits until all copies are whole and have every write. A write is answered when two of three have it, and with
    /// two of three the volume cannot go on without a further one.
    fn wait_until_level(&self) {
        wait_until("all copies to have every write", LONG, || {
            let mut status = self.start(&["status", &self.file, "--json"]);
            ends(&mut status, 0);
            let said: Value = serde_json::from_str(&status.stdout()).unwrap();
            let copies = said["copies"].as_array().unwrap();
            let is_level =
                copies.iter().all(|copy| copy["state"] == "whole" && copy["applied"] == copies[0]["applied"]);
            Ok(if is_level { Ok(()) } else { Err(said.to_string()) })
        })
        .unwrap();
    }

    /// Ends the writer. Returns what it has logged, and how it read and wrote.
    fn stop(&self, mut nbd: Agent) -> (String, String) {
        nbd.signal(Signal::TERM).unwrap();
        let output = ends(&mut nbd, 0);
        let line = output.lines().find(|line| line.contains("how blocks were read and written")).unwrap().to_owned();
        (output, line)
    }
}

/// A server's copy can be read by RDMA.
fn registered(server: &mut Agent) {
    server.wait_for_line("memory is registered for RDMA", LONG).unwrap();
}

/// The number that a log line gives for this field.
#[track_caller]
fn field(line: &str, name: &str) -> u64 {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no number {name} in: {line}"))
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn blocks_are_read_by_rdma_and_a_server_that_is_killed_is_replaced_by_another_one() {
    let mut scene = Scene::new();
    let wires: Vec<Capture> =
        (1..=3).map(|node| Capture::start(node, &scene.stage.path(&format!("{node}.pcap")))).collect();
    let mut nbd = scene.nbd(&["--reads", "anywhere"]);
    (0..3).for_each(|_| drop(nbd.wait_for_line("a copy is read without asking", LONG).unwrap()));
    qemu_io(&scene.socket, &["write -P 7 0 1M", "write -P 8 1M 1M", "flush"]).unwrap();
    // Until the last server has applied a write, its blocks are asked for.
    for _ in 0..4 {
        qemu_io(&scene.socket, &["read -P 7 0 1M", "read -P 8 1M 1M"]).unwrap();
    }
    let wires: Vec<_> = wires.into_iter().map(Capture::stop).collect();
    for wire in &wires {
        assert!(wire.foreign.is_empty(), "neither writes nor long messages: {:x?}", wire.foreign);
    }
    // The blocks themselves were answers to READs.
    let bytes: u64 = wires.iter().map(|wire| wire.read_bytes).sum();
    assert!(bytes >= 2 << 20, "{bytes} bytes; {}", nbd.output());
    // Whichever server is read: two are killed in turn, and come back.
    for number in 0..2 {
        scene.servers[number].kill().unwrap();
        let write = format!("write -P {} 2M 256k", 20 + number);
        let read = format!("read -P {} 2M 256k", 20 + number);
        qemu_io(&scene.socket, &[&write, "flush", &read, "read -P 7 0 1M", "read -P 8 1M 1M"]).unwrap();
        let port = scene.addresses[number].rsplit(':').next().unwrap().parse().unwrap();
        (scene.servers[number], _) = scene.serve(number as u8 + 1, port);
        nbd.wait_for_line("a copy is read without asking", LONG).unwrap();
        scene.wait_until_level();
        qemu_io(&scene.socket, &[&read, "read -P 8 1M 1M"]).unwrap();
    }
    let (output, line) = scene.stop(nbd);
    for opened in output.lines().filter(|line| line.contains("a copy is read without asking")) {
        says(opened, &["transport=verbs", "shm: "]);
    }
    assert!(field(&line, "far") >= 6 && field(&line, "here") == 0, "{line}");
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn large_writes_are_pulled_by_rdma_by_each_server_and_along_a_chain_that_loses_one() {
    let mut scene = Scene::new();
    let write = |number: u64| format!("write -P {} {}k 256k", number % 250 + 1, number * 256);
    let read = |number: u64| format!("read -P {} {}k 256k", number % 250 + 1, number * 256);
    let commands = |numbers: std::ops::Range<u64>| {
        let all = numbers.clone().map(write).chain(["flush".to_owned()]).chain(numbers.map(read));
        let all: Vec<String> = all.collect();
        qemu_io(&scene.socket, &all.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    };
    // What leaves the writer's host by READs while 2 MiB are written.
    let leaves = |scene: &Scene, numbers: std::ops::Range<u64>| {
        let capture = Capture::start(WRITER_NODE, &scene.stage.path("wire.pcap"));
        commands(numbers);
        scene.wait_until_level();
        let wire = capture.stop();
        assert!(wire.foreign.is_empty(), "neither writes nor long messages: {:x?}", wire.foreign);
        wire.read_bytes
    };
    let by_rdma = |servers: &mut [Agent], what: &str| {
        for server in servers {
            says(&server.wait_for_line(what, LONG).unwrap(), &["transport=verbs"]);
        }
    };

    let nbd = scene.nbd(&["--reads", "asked", "--writes", "pulled"]);
    by_rdma(&mut scene.servers, "large writes are pulled");
    let star = leaves(&scene, 0..8);
    let (_, line) = scene.stop(nbd);
    assert!(star >= 3 * (2 << 20), "{star} bytes for three servers; {line}");
    assert!(field(&line, "pulled") >= 3 * 8, "{line}");

    let mut nbd = scene.nbd(&["--reads", "asked", "--writes", "chain"]);
    by_rdma(&mut scene.servers, "large writes are pulled");
    commands(8..9); // the chain begins with a write
    by_rdma(&mut scene.servers[1..], "writes are pulled along a chain");
    let chain = leaves(&scene, 16..24);
    assert!((2 << 20..4 << 20).contains(&chain), "{chain} bytes along a chain; {star} for three servers");

    // The first of the chain ends, and comes back without its memory.
    scene.servers[0].kill().unwrap();
    commands(24..32);
    let port = scene.addresses[0].rsplit(':').next().unwrap().parse().unwrap();
    (scene.servers[0], _) = scene.serve(1, port);
    by_rdma(&mut scene.servers[..1], "large writes are pulled");
    commands(32..40);
    let all: Vec<String> = (0..9).chain(16..40).map(read).collect();
    qemu_io(&scene.socket, &all.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    says(&nbd.output(), &["RDMA is offered"]);
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

/// A volume with files, and the transport by which its blocks are read and taken.
struct Way {
    transport: &'static str,
    file: String,
    directory: String,
    content: Vec<u8>,
}

impl Way {
    fn mount(&self, scene: &Scene, more: &[&str]) -> (Agent, Directory) {
        let (ip, directory) = (RdmaVm::address(WRITER_NODE).to_string(), Directory::new(self.directory.clone()));
        let mount = ["mount", &self.file, &directory.0, "--copy-timeout", "20s", "--reads", "anywhere"];
        let mut command = match self.transport {
            "verbs" => scene.command(&[&mount, more, &["--rdma-address", &ip]].concat()),
            _ => scene.command(&[&mount[..], more].concat()),
        };
        if self.transport != "verbs" {
            command.env("REMORA_RDMA_DISABLE", "1");
        }
        let mut mounted = Agent::run(command).unwrap();
        let says_how = if more.contains(&"--read-only") { "a copy can be read" } else { "without asking" };
        let opened = mounted.wait_for_line(says_how, LONG).unwrap();
        says(&opened, &[&format!("transport={}", self.transport)]);
        mounted.wait_for_event("files_mounted", LONG).unwrap();
        println!("{}: {}", self.transport, opened.split("connected_in=").nth(1).unwrap());
        (mounted, directory)
    }
}

/// Two mounts of one host, one by RDMA and one over TCP, on the same servers. What is written by each is read by the
/// same way after a new mount, and by a mount that only reads, also after a server was killed. The figures that it
/// prints are of an emulated machine: they say something of each other at most.
#[test]
#[ignore = "runs in the RDMA machine"]
fn files_are_written_and_read_by_rdma_beside_others_over_tcp() {
    let mut scene = Scene::with(&["--lanes", "0"]);
    let mut random = Random::new(random::seed("files by RDMA"));
    let servers = scene.addresses.join(",");
    let ways = ["verbs", "tcp"].map(|transport| {
        let (file, directory) = (scene.stage.path(&format!("{transport}.volume")), scene.stage.path(transport));
        scene.end(&["create", &file, "--size", "16MiB", "--servers", &servers], 0);
        scene.end(&["format", &file, "--take-over"], 0);
        Way { transport, file, directory, content: random.bytes(2 << 20) }
    });
    let mut mounts: Vec<_> = ways
        .iter()
        .map(|way| {
            // The copies' memory is registered some time after they are made.
            let (mounted, directory) = way.mount(&scene, &["--take-over", "--writes", "pulled"]);
            let file = fs::File::create_new(directory.at("large")).unwrap();
            let began = Instant::now();
            file.write_all_at(&way.content, 0).unwrap();
            file.sync_all().unwrap();
            let large = began.elapsed();
            let small = fs::File::create_new(directory.at("small")).unwrap();
            let began = Instant::now();
            for number in 0..50 {
                small.write_all_at(&way.content[number * 4096..][..4096], number as u64 * 4096).unwrap();
                small.sync_data().unwrap();
            }
            println!(
                "{}: 2 MiB with fsync {large:?}, 50 times 4 KiB with fdatasync {:?}",
                way.transport,
                began.elapsed()
            );
            (mounted, directory)
        })
        .collect();
    let is_there = |way: &Way, directory: &Directory, what: &str| {
        let began = Instant::now();
        assert!(fs::read(directory.at("large")).unwrap() == way.content, "{}, {what}: large", way.transport);
        let took = began.elapsed();
        assert!(
            fs::read(directory.at("small")).unwrap() == way.content[..50 * 4096],
            "{}, {what}: small",
            way.transport
        );
        println!("{}, {what}: 2 MiB were read in {took:?}", way.transport);
    };
    for server in &scene.servers {
        let output = server.output();
        let pulled: Vec<_> = output.lines().filter(|line| line.contains("large writes are pulled")).collect();
        for way in &ways {
            let by = format!("transport={}", way.transport);
            assert!(pulled.iter().any(|line| line.contains(&by)), "{by}: {pulled:?}");
        }
    }
    for (mounted, _) in &mut mounts {
        mounted.signal(Signal::TERM).unwrap();
        ends(mounted, 0);
    }
    drop(mounts);
    let mut mounts: Vec<_> = ways.iter().map(|way| way.mount(&scene, &["--take-over"])).collect();
    for (way, (_, directory)) in ways.iter().zip(&mounts) {
        is_there(way, directory, "a new mount");
    }
    scene.servers[0].kill().unwrap();
    for (way, (mounted, directory)) in ways.iter().zip(&mut mounts) {
        fs::write(directory.at("later"), &way.content[..100_000]).unwrap();
        mounted.signal(Signal::TERM).unwrap();
        ends(mounted, 0);
    }
    drop(mounts);
    for way in &ways {
        let (mut mounted, directory) = way.mount(&scene, &["--read-only"]);
        is_there(way, &directory, "only for reading");
        assert!(fs::read(directory.at("later")).unwrap() == way.content[..100_000]);
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
    }
}
