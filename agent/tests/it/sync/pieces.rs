//! Pieces: the kernel delivers what was written in any pieces. Proxies do so on every link of a sync, and nothing of it
//! may be lost, doubled or taken for something else.
//!
//! ```text
//!   primary ◀── cut ── source ◀── cut ── replica agent ◀── cut ── its server
//!                                              └── commands, as they are ──▶
//! ```
//!
//! `make pieces` plays many rounds.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use remora_lab::random::{self, Random};
use remora_lab::server::wait_until;
use remora_lab::workload::Options;
use remora_lab::{Client, Host, Kind, Net, Server, Workload, assert_same_data, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{LONG, Scene, Source, Stage, ends, fill, load_slowly, number, primary, quick, with_or_without};
use crate::sync::attend::{self, handed_over};

/// The most bytes that a proxy waits with, and so the longest piece.
const PIECE_BYTES: usize = 64 << 10;

/// How long it waits with them for more, in milliseconds.
const WAIT_MILLIS: u64 = 30;

/// How a proxy passes on what one end sends to the other.
#[derive(Clone)]
enum Manner {
    /// In pieces that a seed chooses.
    Cut(u64),
    /// As it comes, but a full copy only when the test lets go, and then all of it at once.
    Held(Arc<Held>),
    /// As it comes, with the port of a link replaced by that of a proxy before it.
    Renamed(Arc<Renamed>),
}

/// What a server has sent since `+FULLRESYNC`.
#[derive(Default)]
struct Held {
    bytes: Mutex<Vec<u8>>,
    is_over: AtomicBool,
}

impl Held {
    /// Waits until these bytes have come.
    #[track_caller]
    fn wait_for(&self, part: &[u8]) {
        wait_until("the primary to have sent it", LONG, || {
            let bytes = self.bytes.lock().unwrap();
            Ok(if contains(&bytes, part) { Ok(()) } else { Err(format!("{} bytes", bytes.len())) })
        })
        .unwrap();
    }

    /// Delivers them. Returns how many there are.
    fn let_go(&self) -> usize {
        let count = self.bytes.lock().unwrap().len();
        self.is_over.store(true, Ordering::Relaxed);
        count
    }
}

/// The link to which an agent points its server, and the proxy before it.
struct Renamed {
    primary: u16,
    seed: u64,
    link: Mutex<Option<(String, String, Proxy)>>,
}

impl Renamed {
    /// What the agent says to its server. A link that it names gets a proxy.
    fn of_agent(&self, piece: &[u8]) -> Vec<u8> {
        let mut link = self.link.lock().unwrap();
        if let Some(port) = port_of(piece).filter(|port| *port != self.primary) {
            let is_new = link.as_ref().is_none_or(|(known, ..)| *known != port.to_string());
            if is_new {
                let target = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
                let proxy = Proxy::start(Ipv4Addr::LOCALHOST.into(), 0, target, Manner::Cut(self.seed));
                *link = Some((port.to_string(), proxy.address.port().to_string(), proxy));
            }
        }
        link.as_ref().map_or_else(|| piece.to_vec(), |(from, to, _)| replaced(piece, from, to))
    }

    /// What the server says.
    fn of_server(&self, piece: &[u8]) -> Vec<u8> {
        let link = self.link.lock().unwrap();
        link.as_ref().map_or_else(|| piece.to_vec(), |(to, from, _)| replaced(piece, from, to))
    }
}

/// The port in `REPLICAOF <address> <port>`.
fn port_of(piece: &[u8]) -> Option<u16> {
    let text = String::from_utf8_lossy(piece).to_ascii_uppercase();
    let (_, behind) = text.split_once("REPLICAOF\r\n")?;
    behind.split("\r\n").nth(3)?.parse().ok()
}

/// Ports of agents have five digits, so that no length changes.
fn replaced(piece: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len(), "the ports {from} and {to}");
    let mut piece = piece.to_vec();
    while let Some(at) = piece.windows(from.len()).position(|part| part == from.as_bytes()) {
        piece[at..at + from.len()].copy_from_slice(to.as_bytes());
    }
    piece
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|found| found == part)
}

/// A proxy before a server or an agent. Its connections end with their ends.
struct Proxy {
    address: SocketAddr,
    host: Option<Host>,
    is_over: Arc<AtomicBool>,
    /// Connections that have passed through it.
    count: Arc<AtomicU64>,
}

impl Proxy {
    fn start(ip: IpAddr, port: u16, target: SocketAddr, manner: Manner) -> Proxy {
        Proxy::listen(TcpListener::bind((ip, port)).unwrap(), None, target, manner)
    }

    /// On a host of a test network.
    fn start_on(host: &Host, target: SocketAddr, manner: Manner) -> Proxy {
        let listener = host.within(|| TcpListener::bind((host.address(), 0))).unwrap().unwrap();
        Proxy::listen(listener, Some(host.clone()), target, manner)
    }

    fn listen(listener: TcpListener, host: Option<Host>, target: SocketAddr, manner: Manner) -> Proxy {
        let (address, is_over) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let (over, there, count) = (is_over.clone(), host.clone(), Arc::new(AtomicU64::new(0)));
        let counted = count.clone();
        thread::spawn(move || {
            for (number, near) in (0..).zip(listener.incoming().flatten()) {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let connect = || TcpStream::connect(target);
                let far = there.as_ref().map_or_else(connect, |host| host.within(connect).unwrap());
                let Ok(far) = far else { continue };
                counted.fetch_add(1, Ordering::Relaxed);
                join(near, far, &manner, number);
            }
        });
        Proxy { address, host, is_over, count }
    }

    /// How many connections have passed through it.
    fn joined(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn url(&self) -> String {
        format!("redis://{}", self.address)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let wake = || drop(TcpStream::connect(self.address));
        self.host.as_ref().map_or_else(wake, |host| host.within(wake).unwrap());
    }
}

/// Passes on both ways what one connection carries. `near` was accepted, `far` leads to the target.
fn join(near: TcpStream, far: TcpStream, manner: &Manner, number: u64) {
    let ends = |stream: &TcpStream| {
        stream.set_nodelay(true).unwrap();
        stream.try_clone().unwrap()
    };
    let (near_too, far_too) = (ends(&near), ends(&far));
    let (there, back) = (manner.clone(), manner.clone());
    thread::spawn(move || match there {
        Manner::Cut(seed) => cut(&near, &far, Random::new(seed ^ (number * 2))),
        Manner::Renamed(renamed) => pass(&near, &far, |piece| renamed.of_agent(piece)),
        Manner::Held(_) => pass(&near, &far, <[u8]>::to_vec),
    });
    thread::spawn(move || match back {
        Manner::Cut(seed) => cut(&far_too, &near_too, Random::new(seed ^ (number * 2 + 1))),
        Manner::Renamed(renamed) => pass(&far_too, &near_too, |piece| renamed.of_server(piece)),
        Manner::Held(held) => hold(&far_too, &near_too, &held),
    });
}

fn end(from: &TcpStream, to: &TcpStream) {
    let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, change: impl Fn(&[u8]) -> Vec<u8>) {
    let mut buffer = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&change(&buffer[..count])).is_err() {
            break;
        }
    }
    end(from, to);
}

/// Reads once, and waits for at most this long. `None` at the end.
fn read_within(mut from: &TcpStream, millis: u64, buffer: &mut [u8]) -> Option<usize> {
    from.set_read_timeout(Some(Duration::from_millis(millis))).ok()?;
    match from.read(buffer) {
        Ok(0) => None,
        Ok(count) => Some(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Some(0),
        Err(_) => None,
    }
}

/// Passes bytes on in other pieces: some wait for those that follow, and all are cut anywhere.
fn cut(from: &TcpStream, mut to: &TcpStream, mut draw: Random) {
    let (mut buffer, mut waiting) = (vec![0; PIECE_BYTES], Vec::new());
    loop {
        let read = read_within(from, draw.between(1, WAIT_MILLIS), &mut buffer);
        waiting.extend_from_slice(&buffer[..read.unwrap_or(0)]);
        let may_wait = read.is_some_and(|count| count > 0) && waiting.len() < PIECE_BYTES;
        if may_wait && !draw.one_in(3) {
            continue;
        }
        while !waiting.is_empty() {
            let most = if draw.one_in(2) { 80 } else { waiting.len() as u64 };
            let length = draw.between(1, most).min(waiting.len() as u64) as usize;
            // Whole pieces go on at once when many wait: a cut every few bytes would take minutes.
            let length = if waiting.len() > 4096 && !draw.one_in(8) { waiting.len() } else { length };
            if to.write_all(&waiting[..length]).is_err() {
                return end(from, to);
            }
            waiting.drain(..length);
            if draw.one_in(4) {
                thread::sleep(Duration::from_micros(draw.below(2_000)));
            }
        }
        if read.is_none() {
            return end(from, to);
        }
    }
}

/// Passes bytes on, but those from `+FULLRESYNC` on only when they are let go.
fn hold(from: &TcpStream, mut to: &TcpStream, held: &Held) {
    let mut buffer = vec![0; PIECE_BYTES];
    let mut is_copy = false;
    while let Some(count) = read_within(from, 5, &mut buffer) {
        let piece = &buffer[..count];
        is_copy |= contains(piece, b"+FULLRESYNC");
        let ready = match (is_copy, held.is_over.load(Ordering::Relaxed)) {
            (false, _) => piece.to_vec(),
            (true, false) => {
                held.bytes.lock().unwrap().extend_from_slice(piece);
                continue;
            }
            (true, true) => {
                let mut bytes = std::mem::take(&mut *held.bytes.lock().unwrap());
                bytes.extend_from_slice(piece);
                bytes
            }
        };
        if to.write_all(&ready).is_err() {
            break;
        }
    }
    end(from, to);
}

/// A primary with a small data set, which sends a PING to its replicas once an hour.
fn small_primary(kind: Kind, saves_to_file: bool, module: bool) -> Server {
    let sockets = if saves_to_file { "no" } else { "yes" };
    let builder = primary(kind).config("repl-diskless-sync", sockets).config("repl-ping-replica-period", 3600);
    let primary = with_or_without(builder, module);
    let mut client = primary.client().unwrap();
    for number in 0..20 {
        client.ok(&["SET", &format!("before {number}"), &"value ".repeat(50)]).unwrap();
    }
    primary
}

fn count(client: &mut Client, key: &str, times: u64) {
    for _ in 0..times {
        client.int(&["INCR", key]).unwrap();
    }
}

/// How often the first counter is written before the source reads, and the second one later.
const FIRST: u64 = 100;
const LATER: u64 = 500;

/// A source of the primary that has read header, snapshot and the first writes behind it at once, if the server sends
/// them without waiting for an acknowledgement.
fn glued(stage: &Stage, primary: &Server, host: Option<&Host>) -> (Source, Proxy) {
    let held = Arc::new(Held::default());
    let manner = Manner::Held(held.clone());
    let proxy = match host {
        Some(host) => Proxy::start_on(host, primary.address(), manner),
        None => Proxy::start(Ipv4Addr::LOCALHOST.into(), 0, primary.address(), manner),
    };
    let announce = primary.address().to_string();
    let options = ["--announce", &announce, "--eager", "--no-rdma"];
    let source = match host {
        Some(host) => stage.source_on(host, &proxy.url(), &options),
        None => stage.source(&proxy.url(), &options),
    };
    // The first field of a snapshot, `redis-ver` or `valkey-ver`.
    held.wait_for(b"-ver");
    let mut client = primary.client().unwrap();
    count(&mut client, "aaa", FIRST);
    if primary.configured("repl-diskless-sync").unwrap() == "no" {
        held.wait_for(&"*2\r\n$4\r\nINCR\r\n$3\r\naaa\r\n".repeat(FIRST as usize).into_bytes());
    }
    let bytes = held.let_go();
    assert!(bytes < 16 << 10, "{bytes} bytes are more than one read of a handshake takes");
    count(&mut client, "bbb", LATER);
    (source, proxy)
}

fn has_both_counters(server: &Server) {
    let mut client = server.client().unwrap();
    for (key, wanted) in [("aaa", FIRST), ("bbb", LATER)] {
        assert_eq!(client.text(&["GET", key]).unwrap(), wanted.to_string(), "{key}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_first_writes_behind_a_small_snapshot_are_not_lost_when_they_come_with_it() {
    for kind in require::kinds() {
        for (saves_to_file, module) in [(true, false), (true, true), (false, false), (false, true)] {
            let (stage, primary) = (Stage::new(), small_primary(kind, saves_to_file, module));
            let (mut source, _proxy) = glued(&stage, &primary, None);
            source.wait_for_snapshot();
            let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
            for (server, transport) in servers.iter().zip(["shm", "tcp"]) {
                source.replicate(server, &["--transport", transport]);
                has_both_counters(server);
                assert_same_data(&primary, server);
            }
            assert_eq!(number(&primary, "sync_full"), 1, "{kind} {saves_to_file} {module}");
            let said = source.agent.output();
            assert!(!said.contains("did not report within the limit"), "{said}");
            if module && saves_to_file {
                assert!(said.contains("repl-diskless-sync no"), "{said}");
            }
        }
    }
}

/// The setting changes between the question to the module and the fork: the child says so.
#[test]
fn a_primary_that_begins_to_save_to_disk_after_the_module_was_armed_is_noticed_at_once() {
    for kind in require::kinds() {
        let (stage, primary) = (Stage::new(), small_primary(kind, false, true));
        let armed = || {
            wait_until("the module to be armed", LONG, || {
                let status = primary.client()?.list(&["REMORA.STATUS"])?;
                let words = status.into_iter().filter_map(|frame| frame.into_bytes().ok());
                let status = String::from_utf8_lossy(&words.collect::<Vec<_>>().join(&b' ')).into_owned();
                Ok(if status.contains("armed") { Ok(()) } else { Err(status) })
            })
            .unwrap();
        };
        // The server waits this long before it forks, so that the setting can be changed meanwhile.
        primary.configure("repl-diskless-sync-delay", "4").unwrap();
        let mut source = stage.source(&primary.url(), &["--eager", "--module-capture", "walk"]);
        armed();
        primary.configure("repl-diskless-sync", "no").unwrap();
        source.wait_for_snapshot();
        let said = source.agent.output();
        assert!(!said.contains("did not report within the limit"), "{said}");
        let server = Server::start(kind).unwrap();
        source.replicate(&server, &[]);
        assert_same_data(&primary, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_that_was_stopped_while_the_primary_saved_serves_an_exact_replica() {
    for kind in require::kinds() {
        for module in [false, true] {
            let (stage, primary) = (Stage::new(), small_primary(kind, true, module));
            primary.configure("rdb-key-save-delay", "50000").unwrap();
            let mut source = stage.source(&primary.url(), &["--eager"]);
            wait_until("the primary to save", LONG, || {
                let state = primary.info("persistence")?.get("rdb_bgsave_in_progress").unwrap_or_default().to_owned();
                Ok(if state == "1" { Ok(()) } else { Err(state) })
            })
            .unwrap();
            source.agent.signal(Signal::STOP).unwrap();
            count(&mut primary.client().unwrap(), "aaa", FIRST);
            wait_until("the snapshot to be sent", LONG, || {
                let replica = primary.fact("slave0")?;
                Ok(if replica.contains("state=online") { Ok(()) } else { Err(replica) })
            })
            .unwrap();
            source.agent.signal(Signal::CONT).unwrap();
            source.wait_for_snapshot();
            count(&mut primary.client().unwrap(), "bbb", LATER);
            let server = Server::start(kind).unwrap();
            source.replicate(&server, &[]);
            has_both_counters(&server);
            assert_same_data(&primary, &server);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_backup_with_a_journal_and_a_fetched_file_have_the_first_writes_too() {
    for kind in require::kinds() {
        let (stage, primary) = (Stage::new(), small_primary(kind, true, false));
        let (source, _proxy) = glued(&stage, &primary, None);
        let scene = Scene { stage, primary, source };
        let (shelf, data, folder) = (scene.stage.path("shelf"), scene.stage.path("data"), scene.stage.path("fetched"));
        let mut backup = scene.start("backup", &shelf, &["--journal"]);
        backup.wait_for_line("the commands since are recorded", LONG).unwrap();
        let wanted = number(&scene.primary, "master_repl_offset");
        scene.source.wait_for_status("the commands to be recorded", |status| {
            let replicas = status["replicas"].as_array().unwrap().iter();
            replicas.filter_map(|replica| replica["applied_offset"].as_u64()).any(|offset| offset >= wanted)
        });
        let digest = scene.primary.digest().unwrap();
        backup.kill().unwrap();
        scene.stage.end(&["restore", &shelf, "--to", &data], 0);
        let restored = quick(kind).config("dir", &data).config("appendonly", "yes").start().unwrap();
        has_both_counters(&restored);
        assert_eq!(restored.digest().unwrap(), digest, "{kind}");

        std::fs::create_dir(&folder).unwrap();
        ends(&mut scene.start("fetch", &format!("{folder}/dump.rdb"), &[]), 0);
        let follows = format!("127.0.0.1 {}", scene.primary.port());
        let fetched = quick(kind).config("dir", &folder).config("replicaof", follows).start().unwrap();
        fetched.wait_for_link(LONG).unwrap();
        has_both_counters(&fetched);
        assert_same_data(&scene.primary, &fetched);
        assert_eq!(number(&scene.primary, "sync_full"), 1, "{kind}");
    }
}

#[test]
fn a_server_that_is_attended_gets_the_first_writes_too() {
    for kind in require::kinds() {
        let builder = primary(kind).config("repl-diskless-sync", "no").config("repl-ping-replica-period", 3600);
        let Some(mut scene) = attend::Scene::with(builder, |_| ()) else { return };
        let (source, _proxy) = glued(&scene.stage, &scene.primary, Some(&scene.host));
        scene.source = source;
        let server = scene.server(quick(kind));
        let agent = scene.attend_with(&server, &[scene.primary.port()], &[]);
        server.replicate(&scene.primary).unwrap();
        handed_over(&agent, &server, 1);
        has_both_counters(&server);
        assert_same_data(&scene.primary, &server);
    }
}

/// One sync whose links all deliver in other pieces than were written.
fn round(kind: Kind, seed: u64) {
    let mut draw = Random::new(seed);
    let saves_to_file = seed.is_multiple_of(2);
    println!("pieces: {kind}, saves to a file: {saves_to_file}, REMORA_SEED={seed}");
    let primary = small_primary(kind, saves_to_file, draw.one_in(3));
    if draw.one_in(3) {
        fill(&primary, draw.between(1, 3) as usize, seed);
    }
    let (loopback, other) = (IpAddr::from([127, 0, 0, 1]), IpAddr::from([127, 0, 0, 2]));
    let (stage, server) = (Stage::new(), Server::start(kind).unwrap());
    if draw.one_in(2) {
        server.configure("repl-diskless-load", "on-empty-db").unwrap();
    }
    let options = Options { big_bytes: 0, ..Options::seeded(seed) };
    let writer = Workload::start(primary.client().unwrap(), options.rate(draw.between(50, 2_000))).unwrap();
    let before_primary = Proxy::start(loopback, 0, primary.address(), Manner::Cut(draw.word()));
    let announce = primary.address().to_string();
    let source = stage.source(&before_primary.url(), &["--announce", &announce, "--no-rdma"]);
    // Lanes lead to the port of the source, on the host where the conversation is.
    let before_source = Proxy::start(other, source.address.port(), source.address, Manner::Cut(draw.word()));
    let renamed = Renamed { primary: primary.port(), seed: draw.word(), link: Mutex::default() };
    let before_server = Proxy::start(loopback, 0, server.address(), Manner::Renamed(Arc::new(renamed)));
    let transport = if draw.one_in(3) { "shm" } else { "tcp" };
    let mut agent = stage.replica(&before_server.url(), before_source.address, &["--transport", transport]);
    if let Err(error) = agent.wait_for_success(LONG) {
        panic!("{error}\n{}\n{}\nthe server:\n{}", agent.output(), source.agent.output(), server.log());
    }
    writer.stop().unwrap();
    assert_same_data(&primary, &server);
    assert!(!server.log().contains("Protocol error"), "{}", server.log());
}

/// The same seeds for each kind of server, an even and an odd one in turn. A seed that a round has printed makes that
/// round the first one.
fn rounds(count: u64) {
    let mut seed = random::seed("pieces");
    for _ in 0..count {
        require::kinds().into_iter().for_each(|kind| round(kind, seed));
        seed = Random::new(seed).word() & !1 | !seed & 1;
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_sync_is_exact_whatever_pieces_its_links_deliver() {
    rounds(2);
}

mod by_command {
    use super::*;

    /// As many rounds as `REMORA_PIECES_ROUNDS` says, half of them with each server.
    #[test]
    #[ignore = "runs for long; make pieces runs it"]
    fn many_syncs_are_exact_whatever_pieces_their_links_deliver() {
        let count = std::env::var("REMORA_PIECES_ROUNDS").ok().and_then(|count| count.parse().ok());
        rounds(count.unwrap_or(1_000_u64).div_ceil(2));
    }
}

/// Sends what a host says to one address elsewhere instead.
fn lead(from: &Host, to: SocketAddr, instead: SocketAddr) {
    let rule = format!("ip daddr {} tcp dport {} dnat to {instead}", to.ip(), to.port());
    let table = format!("table ip pieces {{ chain output {{ type nat hook output priority -100; {rule}; }}; }}");
    let mut nft = Command::new("nft");
    from.enter(nft.arg(table)).unwrap();
    assert!(nft.status().unwrap().success());
}

/// Slots that pass from replica to replica in other pieces, as the conversations about them do.
#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_reads_from_another_one_is_exact_whatever_pieces_their_links_deliver() {
    let Some(()) = require::namespaces() else { return };
    let seed = random::seed("relayed pieces");
    for kind in require::kinds() {
        let mut draw = Random::new(seed);
        let net = Net::new().unwrap();
        let [near, lends, reads, between] =
            ["primary", "lender", "reader", "between"].map(|name| net.host(name).unwrap());
        let primary = primary(kind).on(&near).start().unwrap();
        fill(&primary, 8, seed);
        let stage = Stage::new();
        let mut source = stage.source_on(&near, &primary.url(), &["--no-rdma", "--eager"]);
        source.wait_for_snapshot();
        let writer = Workload::start(
            primary.client().unwrap(),
            Options { big_bytes: 0, ..Options::seeded(draw.word()) }.rate(200),
        )
        .unwrap();
        let cut = |to: SocketAddr, draw: &mut Random| Proxy::start_on(&between, to, Manner::Cut(draw.word()));
        let lending = SocketAddr::new(lends.address(), 7444);
        let (to_source, to_lender) = (cut(source.address, &mut draw), cut(lending, &mut draw));
        lead(&lends, source.address, to_source.address);
        lead(&reads, source.address, to_source.address);
        lead(&reads, lending, to_lender.address);
        let start = |host: &Host, name: &str, more: &[&str]| {
            let server = quick(kind).on(host).start().unwrap();
            let options = [&["--transport", "tcp", "--name", name], more].concat();
            (stage.replica_on(host, &server.url(), source.address, &options), server)
        };
        let (mut lender, first) = start(&lends, "lender", &["--serve-peers", "--peer-listen", &lending.to_string()]);
        load_slowly(&first, 50_000);
        source.wait_for_status("the lender to hold slots", |status| held(status, "lender") >= 16);
        let (mut reader, second) = start(&reads, "reader", &["--no-serve-peers"]);
        reader.wait_for_event("upstream_read", LONG).unwrap();
        load_slowly(&first, 0);
        for (agent, server) in [(&mut reader, &second), (&mut lender, &first)] {
            if let Err(error) = agent.wait_for_success(LONG) {
                panic!("{error}\n{}\n{}\nthe server:\n{}", agent.output(), source.agent.output(), server.log());
            }
        }
        writer.stop().unwrap();
        for server in [&first, &second] {
            assert_same_data(&primary, server);
        }
        assert!(to_lender.joined() > 0, "{kind}: nothing passed the proxy before the lender\n{}", reader.output());
        assert_eq!(number(&primary, "sync_full"), 1, "{kind}");
    }
}

fn held(status: &Value, name: &str) -> u64 {
    let replicas = status["replicas"].as_array().into_iter().flatten();
    let of = |replica: &Value| replica["slots_held"].as_u64().filter(|_| replica["name"] == name);
    replicas.filter_map(of).max().unwrap_or_default()
}
