//! Strangers, who have no token, and holders of a token who ask for too much: other hosts at the source's port, and other
//! users at the sockets of shared memory. They cost the source and the primary little, and no replica waits for them.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::{FileExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::kit::{LONG, Source, Stage, at_once, fill, fill_keys, primary};
use remora_agent::conversation::{self, Connection, Options, Token, derive};
use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Denial, Error, Memory, Pages, Peer, RegionKey, TransportKind};
use remora_lab::{Agent, Host, Kind, Net, Server, assert_same_data, require};
use remora_protocol::{Join, Message, Offer, Resume, WaitCause};

/// The strangers' address, another one than the replicas'.
const STRANGERS: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// Connections that strangers hold open without a word. The source has 64 places.
const SILENT: usize = 100;

/// The greatest number of descriptors that strangers may cost: 32 places with two each, 16 connections that are being
/// turned away, and some on their way.
const DESCRIPTORS: usize = 100;

/// Connects to the source from the strangers' address.
fn call(source: SocketAddr) -> rustix::io::Result<TcpStream> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &SocketAddr::new(STRANGERS, 0))?;
    connect(&socket, &source)?;
    Ok(socket.into())
}

/// Connections of a flood in each [`BEAT`]: 1,500 a second.
const BURST: usize = 30;

const BEAT: Duration = Duration::from_millis(20);

/// How long a source takes to answer beside them at most, on a busy machine. It lets a silent connection wait for longer.
const PROMPTLY: Duration = Duration::from_secs(5);

/// Connects 1,500 times a second until dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    made: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(source: SocketAddr) -> Flood {
        let (stop, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, counted) = (stop.clone(), made.clone());
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let beat = Instant::now() + BEAT;
                for _ in 0..BURST {
                    // One byte of a greeting: the source cannot know yet what the peer wants.
                    if call(source).is_ok_and(|mut stream| stream.write_all(b"R").is_ok()) {
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                }
                thread::sleep(beat.saturating_duration_since(Instant::now()));
            }
        });
        Flood { stop, made, thread: Some(thread) }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn descriptors(source: &Source) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", source.agent.pid())).unwrap().count()
}

/// A source of a primary with some keys, and a server.
fn setting(kind: Kind) -> (Server, Source, Server) {
    let server = primary(kind).start().unwrap();
    fill_keys(&server, 1000, "value");
    let source = Stage::new().source(&server.url(), &["--eager"]);
    (server, source, Server::start(kind).unwrap())
}

#[test]
fn silent_connections_of_one_address_keep_no_replica_of_another_one_out() {
    for kind in require::kinds() {
        let (primary, source, replica) = setting(kind);
        for byte in [&b"R"[..], b"REMORALN"] {
            let silent: Vec<_> = (0..SILENT).map(|_| call(source.address)).collect();
            silent.iter().flatten().for_each(|mut stream| drop(stream.write_all(byte)));
            let began = Instant::now();
            source.status();
            assert!(began.elapsed() < PROMPTLY, "the status took {:?}", began.elapsed());
            source.replicate(&replica, &["--transport", "tcp", "--replace"]);
            assert_same_data(&primary, &replica);
        }
    }
}

/// The longest time from the start of a replica's agent to the end of the capture that it asks for, during a flood.
/// A stranger that says nothing has its place for five seconds, so an agent that waited for a place would need longer.
/// Without a flood both take some tenths of a second. On two busy cores a new process and its TLS handshake may take a
/// second, as for a status, and the capture and the preflight need further turns.
const JOIN_LIMIT: Duration = Duration::from_secs(4);

#[test]
#[ignore = "long: make test-all"]
fn a_flood_of_connections_delays_neither_a_replica_nor_the_capture_and_costs_few_descriptors() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        fill_keys(&primary, 1000, "value");
        // It captures nothing before a replica joins.
        let mut source = Stage::new().source(&primary.url(), &[]);
        let replica = Server::start(kind).unwrap();
        source.status();
        let before = descriptors(&source);
        let flood = Flood::start(source.address);
        let (mut most, began) = (0, Instant::now());
        while began.elapsed() < Duration::from_secs(3) {
            most = most.max(descriptors(&source));
            let asked = Instant::now();
            source.status();
            assert!(asked.elapsed() < PROMPTLY, "a status took {:?}", asked.elapsed());
        }
        let rate = flood.made.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64();
        assert!(rate > 500.0, "the flood was {rate:.0} connections a second, which is no flood");
        assert!(most <= before + DESCRIPTORS, "{before} descriptors before, {most} during the flood");
        assert_eq!(source.snapshots_taken(), 0);
        let mut agent = source.replica(&replica, &["--transport", "tcp"]);
        source.agent.wait_for_event("snapshot_completed", JOIN_LIMIT).unwrap();
        agent.wait_for_success(LONG).unwrap();
        drop(flood);
        assert_same_data(&primary, &replica);
        let rejections = source.agent.output().matches("connection rejected").count();
        assert!(rejections <= 4, "{rejections} lines about rejected connections");
    }
}

/// A user other than the one that runs the agents, and its group.
const ANOTHER_USER: u32 = 65534;

/// Connects to the socket in its first argument and sends a descriptor whose last `close` waits for a minute: a TCP
/// connection that lingers, with bytes that its peer does not take. Prints one line about it. Holds the connection
/// open until stdin ends. It then exits without a `close`, which would linger.
const LINGERER: &str = "
import os, socket, struct, sys
to = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
step = 'connect'
try:
    to.connect(sys.argv[1])
    door = socket.create_server(('127.0.0.1', 0))
    full = socket.create_connection(door.getsockname())
    peer = door.accept()[0]
    full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 60))
    full.setblocking(False)
    try:
        while True:
            full.send(bytes(65536))
    except BlockingIOError:
        pass
    step = 'send'
    socket.send_fds(to, [b'x'], [full.fileno()])
    full.close()
    print('sent', flush=True)
except OSError as error:
    print(step + ': ' + type(error).__name__, flush=True)
sys.stdin.read()
os._exit(0)
";

/// A process that sends a lingering descriptor to a socket. It ends when this is dropped.
struct Lingerer {
    process: Child,
    /// The line that it printed: whether it has sent the descriptor, or which step failed.
    line: String,
}

impl Lingerer {
    fn start(socket: &str, user: Option<u32>) -> Lingerer {
        let mut command = Command::new("python3");
        command.args(["-c", LINGERER, socket]).stdin(Stdio::piped()).stdout(Stdio::piped()).current_dir("/");
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Lingerer { process, line: line.trim().to_owned() }
    }
}

impl Drop for Lingerer {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// The open descriptors of a process whose names contain a text, with the names.
fn opened(process: u32, part: &str) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(format!("/proc/{process}/fd")).unwrap().filter_map(Result::ok);
    let named = entries.filter_map(|entry| {
        let name = fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned();
        name.contains(part).then_some((entry.path(), name))
    });
    named.collect()
}

/// The files of the local sockets on which a process listens.
fn local_sockets(process: u32) -> Vec<String> {
    let inodes = opened(process, "socket:[");
    let is_ours = |inode: &str| inodes.iter().any(|(_, name)| *name == format!("socket:[{inode}]"));
    let table = fs::read_to_string(format!("/proc/{process}/net/unix")).unwrap();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<&str>>());
    let listening = rows.filter(|row| row.len() == 8 && row[3] == LISTENS && is_ours(row[6]));
    listening.map(|row| row[7].to_owned()).collect()
}

/// The flags of a listening socket in `/proc/net/unix`.
const LISTENS: &str = "00010000";

#[test]
#[ignore = "long: make test-all"]
fn a_local_process_with_a_lingering_descriptor_delays_neither_the_source_nor_a_replica() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let (primary, source, replica) = setting(kind);
        let mut running = source.replica(&replica, &["--transport", "shm", "--stay"]);
        running.wait_for_event("in_step", LONG).unwrap();
        let sockets = local_sockets(source.agent.pid());
        assert!(!sockets.is_empty(), "the source listens on no local socket");
        let mut lingering = Vec::new();
        for socket in &sockets {
            let stranger = Lingerer::start(socket, Some(ANOTHER_USER));
            assert_eq!(stranger.line, "connect: PermissionError", "{socket}");
            // A process of the agents' own user can connect without the token.
            let own = Lingerer::start(socket, None);
            assert!(["sent", "send: PermissionError"].contains(&own.line.as_str()), "{socket}: {}", own.line);
            lingering.push(own);
        }
        let asked = Instant::now();
        source.status();
        assert!(asked.elapsed() < PROMPTLY, "the status took {:?}", asked.elapsed());
        let another = Server::start(kind).unwrap();
        source.replicate(&another, &["--transport", "shm"]);
        assert_same_data(&primary, &another);
        running.signal(Signal::TERM).unwrap();
        running.wait_for_success(LONG).unwrap();
        drop(lingering);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_descriptor_of_the_tables_that_is_kept_cannot_be_written() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill_keys(&server, 1000, "value");
        let source = Stage::new().source(&server.url(), &["--eager", "--module-capture", "off"]);
        let replica = Server::start(kind).unwrap();
        source.replicate(&replica, &["--transport", "shm"]);
        let tables = opened(source.agent.pid(), "memfd:remora-");
        assert!(tables.len() >= 2, "the source has a snapshot and a journal: {tables:?}");
        for (path, name) in tables {
            // Root can open the table for writing; other processes can only keep a descriptor. The kernel refuses the
            // write itself.
            let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
            let refused = file.write_at(b"forged", 0).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::PERM.raw_os_error()), "{name}: {refused}");
        }
        let another = Server::start(kind).unwrap();
        source.replicate(&another, &["--transport", "shm"]);
        assert_same_data(&server, &another);
    }
}

/// Opens the memory and lists the descriptors of the process in its first argument. Prints for each how that ended.
const READER: &str = "
import errno, os, sys
def attempt(action):
    try:
        action()
        return 'read'
    except OSError as error:
        return errno.errorcode[error.errno]
folder = '/proc/' + sys.argv[1]
print(attempt(lambda: open(folder + '/mem', 'rb')), attempt(lambda: os.listdir(folder + '/fd')))
";

/// What a process of [`ANOTHER_USER`] gets of another process: its memory, and its descriptors.
fn read_by_another_user(process: u32) -> String {
    let mut command = Command::new("python3");
    command.args(["-c", READER, &process.to_string()]).current_dir("/");
    let output = user(command).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
#[ignore = "long: make test-all"]
fn another_process_of_the_sources_user_reads_neither_its_memory_nor_its_descriptors() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill_keys(&server, 1000, "value");
        let stage = Stage::new();
        // That user must be able to run the program, wherever the repository is, and owns the token. Another process
        // copies it: a file that a child of this one, of another test, has open for writing cannot be run.
        let program = stage.folder().join("remora");
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_remora")).arg(&program).status().unwrap();
        assert!(copied.success(), "the program could not be copied: {copied}");
        for path in [stage.folder(), &stage.token, &program] {
            chown(path, Some(ANOTHER_USER), Some(ANOTHER_USER)).unwrap();
        }
        let token = stage.token.display().to_string();
        let mut command = Command::new(&program);
        command.args(["source", "--server", &server.url(), "--token-file", &token, "--listen", "127.0.0.1:0"]);
        command.args(["--eager", "--memory", "64MiB"]).env("XDG_RUNTIME_DIR", stage.folder()).current_dir("/");
        let mut source = Agent::run(user(command)).unwrap();
        source.wait_for_event("snapshot_completed", LONG).unwrap();
        assert_eq!(read_by_another_user(source.pid()), "EACCES EACCES");
        // The descriptors of another program of that user can be listed: the test is able to fail.
        let mut command = Command::new("sleep");
        command.arg("60").current_dir("/");
        let mut sleeper = Agent::run(user(command)).unwrap();
        let read = read_by_another_user(sleeper.pid());
        assert!(read.ends_with(" read"), "{read}");
        sleeper.kill().unwrap();
    }
}

/// The command, run by [`ANOTHER_USER`].
fn user(mut command: Command) -> Command {
    command.uid(ANOTHER_USER).gid(ANOTHER_USER);
    command
}

/// Watches for local sockets of Remora without a file, as every user can, and connects to each of them [`GUESTS`] times
/// as another user. The first two connections send a descriptor whose last `close` waits for a minute, and the others
/// stay silent. All stay open until stdin ends. Then prints how many sockets it has found, how many connections it has
/// made, and how many descriptors it has sent.
const HUNTER: &str = "
import os, re, select, socket, struct, sys
user, guests = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([])
os.setgid(user)
os.setuid(user)
door = socket.create_server(('127.0.0.1', 0), backlog=128)
peers = []
def lingering():
    full = socket.socket()
    full.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    full.connect(door.getsockname())
    peers.append(door.accept()[0])
    full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 60))
    full.setblocking(False)
    try:
        while True:
            full.send(bytes(65536))
    except BlockingIOError:
        return full
ready = [lingering() for _ in range(64)]
seen, held, sent = set(), [], 0
print('watching', flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    with open('/proc/net/unix', 'rb') as table:
        names = set(re.findall(rb'@(remora-[0-9a-f]+)', table.read()))
    for name in names - seen:
        for number in range(guests):
            guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            guest.setblocking(False)
            try:
                guest.connect(b'\\0' + name)
                held.append(guest)
                seen.add(name)
                if number < 2 and ready:
                    socket.send_fds(guest, [b'x'], [ready[-1].fileno()])
                    ready.pop().close()
                    sent += 1
            except OSError:
                pass
print(len(seen), len(held), sent, flush=True)
os._exit(0)
";

/// Connections of a [`Hunter`] to each socket: as many as wait for an answer there at the same time.
const GUESTS: u32 = 64;

/// A process of another user that connects to every socket without a file. It ends when this is dropped.
struct Hunter {
    process: Child,
    output: BufReader<std::process::ChildStdout>,
}

/// What a [`Hunter`] has done.
#[derive(Debug)]
struct Hunt {
    sockets: u32,
    connections: u32,
    descriptors: u32,
}

impl Hunter {
    /// Starts it on that host, and returns when it watches.
    fn start(host: &Host) -> Hunter {
        let mut command = Command::new("python3");
        command.args(["-c", HUNTER, &ANOTHER_USER.to_string(), &GUESTS.to_string()]).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        host.enter(&mut command).unwrap();
        let mut process = command.spawn().unwrap();
        let mut hunter = Hunter { output: BufReader::new(process.stdout.take().unwrap()), process };
        assert_eq!(hunter.line(), "watching");
        hunter
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Ends the hunt.
    fn end(mut self) -> Hunt {
        drop(self.process.stdin.take());
        let line = self.line();
        let numbers: Vec<u32> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        Hunt { sockets: numbers[0], connections: numbers[1], descriptors: numbers[2] }
    }
}

impl Drop for Hunter {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Syncs after which a hunter must have found a socket. A handover takes some milliseconds.
const SYNCS: usize = 8;

/// The longest time of a sync of 1,000 small keys while a hunter is at work, on any machine. A lingering descriptor alone
/// would hold it up for a minute.
const HUNTED_LIMIT: Duration = Duration::from_secs(50);

#[test]
#[ignore = "long: make test-all"]
fn a_local_process_at_the_sockets_of_the_module_keeps_it_neither_from_the_capture_nor_from_the_load() {
    let Some(()) = require::namespaces() else { return };
    for kind in require::kinds() {
        let net = Net::new().unwrap();
        let host = net.host("both").unwrap();
        let server = primary(kind).on(&host).module("").unwrap().start().unwrap();
        fill_keys(&server, 1000, &"value ".repeat(1000));
        let replica = Server::builder(kind).on(&host).module("").unwrap().start().unwrap();
        let stage = Stage::new();
        let hunter = Hunter::start(&host);
        for _ in 0..SYNCS {
            // A new source each time, so that there is a handover for the capture too.
            let mut source = stage.source_on(&host, &server.url(), &["--eager", "--module-capture", "walk"]);
            let began = Instant::now();
            let completed = source.agent.wait_for_event("snapshot_completed", LONG).unwrap();
            assert!(completed.contains("method=the module"), "{}", source.agent.output());
            let mut agent =
                stage.replica_on(&host, &replica.url(), source.address, &["--transport", "shm", "--replace"]);
            agent.wait_for_success(LONG).unwrap();
            assert!(agent.output().contains("out of shared memory"), "{}", agent.output());
            source.status();
            assert!(began.elapsed() < HUNTED_LIMIT, "capture and sync took {:?}", began.elapsed());
            assert_same_data(&server, &replica);
            source.stop();
        }
        let hunt = hunter.end();
        println!("{hunt:?}");
        assert!(hunt.sockets > 0 && hunt.connections > 0, "the stranger found no socket: {hunt:?}");
        assert!(hunt.descriptors <= hunt.connections);
    }
}

// Holders of the token that ask for too much, by intent or by bad luck. The primary pays little for it.

/// Questions that a holder asks in a row.
const QUESTIONS: u64 = 2000;

/// The most commands that these questions may cost the primary: those of a few batches, and the source's own.
const COMMANDS: u64 = 150;

/// How often a server has executed `INFO`.
fn infos(server: &Server) -> u64 {
    let info = server.info("commandstats").unwrap();
    let line = info.get("cmdstat_info").unwrap_or("calls=0,");
    line.strip_prefix("calls=").and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap()
}

/// A connection with the token of the replicas.
async fn authenticated(source: &Source) -> Connection {
    let token = Token::read_file(source.token()).unwrap();
    conversation::connect(&source.address.to_string(), &token, &Options::default()).await.unwrap()
}

/// Sends a question [`QUESTIONS`] times, and returns the number of answers, the last of which came a second ago.
async fn ask(source: &Source, question: &Message) -> usize {
    let (sender, mut receiver) = authenticated(source).await.split();
    let answers = tokio::spawn(async move {
        let mut answers = 0;
        while let Ok(Ok(_)) = tokio::time::timeout(Duration::from_secs(1), receiver.receive()).await {
            answers += 1;
        }
        answers
    });
    for _ in 0..QUESTIONS {
        // The source closes the connection of a peer that reads slower than it asks.
        if sender.send(question.clone()).await.is_err() {
            break;
        }
    }
    answers.await.unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn questions_without_end_cost_the_primary_few_commands_and_the_last_one_is_answered() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        fill_keys(&primary, 100, "value");
        let source = Source::start(&primary, &["--eager"]);
        let plan = Join {
            name: "plan".into(),
            server: "Valkey 9.1".into(),
            resume: None,
            plan_only: true,
            zone: String::new(),
            relays: None,
        };
        for question in [Message::HandOffQuery { generation: 0, offset: 7 }, Message::Join(plan)] {
            let before = infos(&primary);
            let answers = Runtime::new().unwrap().block_on(ask(&source, &question));
            assert!(answers > 0, "no answer to {}", question.name());
            let cost = infos(&primary) - before;
            println!("{QUESTIONS} times {} cost the primary {cost} times INFO", question.name());
            assert!(cost <= COMMANDS, "{QUESTIONS} times {} cost the primary {cost} times INFO", question.name());
        }
        let replica = Server::start(kind).unwrap();
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
    }
}

/// The report names every replica, so it is not made for each question.
#[test]
fn a_peer_that_asks_for_the_status_without_end_gets_twenty_reports_a_second() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    let source = Source::start(&primary, &[]);
    let began = Instant::now();
    let answers = Runtime::new().unwrap().block_on(ask(&source, &Message::StatusQuery));
    let most = began.elapsed().as_millis() / 50 + 2;
    assert!(answers >= 2, "the first question, and those that came after it");
    assert!(answers as u128 <= most, "{answers} answers, and {most} would be allowed");
    source.stop();
}

/// Connections that a lender serves at a time.
const SEATS: usize = 8;

#[test]
#[ignore = "long: make test-all"]
fn silent_holders_of_the_token_keep_the_seats_of_a_lender_for_ten_seconds_only() {
    let Some(kind) = require::redis() else { return };
    let (primary, server) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 100, "value");
    let source = Source::start(&primary, &["--no-shm"]);
    let mut lender = source.replica(&server, &["--stay", "--transport", "tcp"]);
    let line = lender.wait_for_event("serving", LONG).unwrap();
    let port = line.split("listening=").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap().to_owned();
    lender.wait_for_event("in_step", LONG).unwrap();
    let token = Token::read_file(source.token()).unwrap();
    let options = Options::default();
    Runtime::new().unwrap().block_on(async {
        let mut silent = Vec::new();
        for _ in 0..SEATS {
            silent.push(conversation::connect(&port, &token, &options).await.unwrap());
        }
        let hears = async |connection: &mut Connection| {
            tokio::time::timeout(Duration::from_secs(20), connection.receive()).await.expect("no answer in 20 s")
        };
        let began = Instant::now();
        let mut late = conversation::connect(&port, &token, &options).await.unwrap();
        let refused = hears(&mut late).await;
        assert!(refused.is_err_and(|error| error.to_string().contains("8 replicas read here")));
        for connection in &mut silent {
            let refused = hears(connection).await;
            assert!(refused.is_err_and(|error| error.to_string().contains("no request within 10 s")));
        }
        assert!(began.elapsed() > Duration::from_secs(8), "they were given {:?} only", began.elapsed());
        // The seats are free.
        let generation = source.generation();
        let mut reader = conversation::connect(&port, &token, &options).await.unwrap();
        reader.send(Message::ReadPeer { generation, name: "reader".into() }).await.unwrap();
        let offered = hears(&mut reader).await;
        assert!(matches!(offered, Ok(Message::PeerOffer { .. })), "{offered:?}");
    });
}

/// Snapshots that a source takes without a pause.
const AT_ONCE: u64 = 5;

#[test]
#[ignore = "long: make test-all"]
fn replicas_that_need_one_snapshot_after_the_other_wait_after_the_first_few_and_are_told_why() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).start().unwrap();
        fill(&primary, 20, 1);
        // Windowed: each replica that comes after the last one needs a snapshot of its own. The interval is longer than
        // five of them take on a busy machine.
        let source = Source::start(&primary, &["--memory", "16MiB", "--fork-interval", "40s"]);
        let server = Server::start(kind).unwrap();
        for _ in 0..AT_ONCE {
            source.replicate(&server, &["--replace"]);
        }
        assert_eq!(source.snapshots_taken(), AT_ONCE);

        let began = Instant::now();
        let mut waiting = source.replica(&server, &["--replace", "--name", "sixth"]);
        let why = "5 snapshots in a short time";
        let status = source.wait_for_status("the replica to wait", |status| status["replicas"][0]["name"] == "sixth");
        assert!(status["replicas"][0]["transport_why"].as_str().unwrap().contains(why), "{status}");
        let drawn = source.drawn_status();
        assert!(drawn.contains("waits: the primary has forked"), "{drawn}");
        waiting.wait_for_success(LONG).unwrap();
        assert!(waiting.output().contains(why), "{}", waiting.output());
        assert!(began.elapsed() > Duration::from_secs(2), "it waited {:?} only", began.elapsed());
        assert_eq!(source.snapshots_taken(), AT_ONCE + 1);
        assert_same_data(&primary, &server);
    });
}

// What a session may read: what the source has offered to it, and nothing else. The keys of regions protect nothing:
// each attacker here has the token, a session of its own, and the keys that another session was offered.

/// A session of the test, with the token of the replicas.
struct Session {
    runtime: Runtime,
    connection: Connection,
    source: std::net::SocketAddr,
}

impl Session {
    fn new(source: &Source) -> Session {
        let (runtime, token) = (Runtime::new().unwrap(), Token::read_file(source.token()).unwrap());
        let connection =
            runtime.block_on(conversation::connect(&source.address.to_string(), &token, &Options::default())).unwrap();
        Session { runtime, connection, source: source.address }
    }

    fn send(&mut self, message: Message) {
        self.runtime.block_on(self.connection.send(message)).unwrap();
    }

    /// The next message that `wanted` accepts.
    fn receive<T>(&mut self, wanted: impl Fn(Message) -> Option<T>) -> T {
        let connection = &mut self.connection;
        let received = async {
            loop {
                if let Some(found) = wanted(connection.receive().await.unwrap()) {
                    return found;
                }
            }
        };
        self.runtime.block_on(async { tokio::time::timeout(LONG, received).await.unwrap() })
    }

    fn join(&mut self, resume: Option<Resume>) {
        let (name, server) = ("test".into(), "Redis 7.0".into());
        self.send(Message::Join(Join { name, server, resume, plan_only: false, zone: String::new(), relays: None }));
    }

    fn offer(&mut self) -> Offer {
        self.receive(|message| match message {
            Message::Offer(offer) => Some(offer),
            _ => None,
        })
    }

    /// Opens a lane of this session to a region.
    fn lane(&self, key: &RegionKey) -> Result<Box<dyn Peer>, Error> {
        let secret = derive(&self.connection.session_key(), b"remora data lanes");
        let sink = Arc::new(Memory::create("test-sink", 1 << 20, Pages::Small).unwrap());
        let connector: Box<dyn Connector> = match key.transport() {
            TransportKind::Shm => Box::new(ShmConnector::new()),
            _ => Box::new(TcpConnector::new(TcpOptions::default(), Some(self.source)).unwrap()),
        };
        connector.connect(key, self.connection.session(), &secret, sink)
    }

    #[track_caller]
    fn is_not_granted(&self, keys: &[RegionKey]) {
        for key in keys {
            match self.lane(key) {
                Err(Error::Refused(Denial::NotGranted)) => {}
                Err(error) => panic!("{key}: {error}"),
                Ok(_) => panic!("{key}: a lane is open"),
            }
        }
    }
}

/// The keys for shared memory and TCP.
fn decoded(keys: &[Vec<u8>]) -> Vec<RegionKey> {
    let keys = keys.iter().map(|key| RegionKey::from_bytes(key.clone()).unwrap());
    let keys: Vec<RegionKey> = keys.filter(|key| key.transport() != TransportKind::Verbs).collect();
    assert_eq!(keys.len(), 2, "{keys:?}");
    keys
}

#[test]
#[ignore = "long: make test-all"]
fn neither_a_prober_nor_a_joiner_that_waits_opens_a_lane_to_a_table() {
    let Some(kind) = require::redis() else { return };
    let (primary, server) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 1_000, "confidential");
    let age = Duration::from_secs(2);
    let source = Source::start(&primary, &["--max-age", &format!("{}s", age.as_secs())]);

    // A reader of the snapshot, which keeps it there and reads nothing.
    let mut reader = Session::new(&source);
    reader.join(None);
    let offer = reader.offer();
    let (snapshot, journal) = (decoded(&offer.snapshot.keys), decoded(&offer.journal.keys));
    let tables = [&snapshot[..], &journal].concat();
    let lanes: Vec<Box<dyn Peer>> = tables.iter().map(|key| reader.lane(key).unwrap()).collect();

    let mut prober = Session::new(&source);
    prober.is_not_granted(&tables);
    prober.send(Message::ProbeQuery);
    let keys = prober.receive(|message| match message {
        Message::ProbeOffer { keys } => Some(keys),
        _ => None,
    });
    for key in &decoded(&keys) {
        drop(prober.lane(key).unwrap());
    }
    prober.is_not_granted(&tables);
    reader.is_not_granted(&decoded(&keys));

    // The snapshot is too old now for a joiner, and there is no other one while it is read.
    thread::sleep(age);
    let mut waiting = Session::new(&source);
    waiting.join(None);
    let cause = waiting.receive(|message| match message {
        Message::Waiting { cause, .. } => Some(cause),
        Message::Offer(_) => panic!("an offer"),
        _ => None,
    });
    assert_eq!(cause, WaitCause::Busy);
    waiting.is_not_granted(&tables);

    // With its offer, it may read the next snapshot, and the journal that it shares with the reader before it.
    drop((lanes, reader));
    let offer = waiting.offer();
    for key in decoded(&offer.snapshot.keys).iter().chain(&decoded(&offer.journal.keys)) {
        drop(waiting.lane(key).unwrap());
    }
    drop(waiting);
    source.replicate(&server, &[]);
    assert_same_data(&primary, &server);
}

#[test]
fn a_joiner_that_is_refused_opens_no_lane() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    fill_keys(&primary, 1_000, "confidential");
    let source = Source::start(&primary, &["--max-replicas", "1"]);
    let mut reader = Session::new(&source);
    reader.join(None);
    let tables = decoded(&reader.offer().snapshot.keys);
    let mut refused = Session::new(&source);
    refused.join(None);
    let error = refused.runtime.block_on(async { tokio::time::timeout(LONG, refused.connection.receive()).await });
    assert!(error.unwrap().unwrap_err().to_string().contains("--max-replicas"));
    refused.is_not_granted(&tables);
}
