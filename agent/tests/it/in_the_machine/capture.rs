//! The packets on a node's wire: tcpdump records them, and this module parses RoCE v2 from the recording.
//!
//! Layouts: the file as pcap-savefile(5) has it; the packets as the InfiniBand Architecture Specification, volume 1,
//! has them (section 5.2.4 the base transport header, 5.2.7 the RDMA extended transport header), behind Ethernet, IPv4
//! and UDP (annex A17).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::Agent;
use rustix::process::Signal;

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
