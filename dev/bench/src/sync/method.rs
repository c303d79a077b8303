//! The methods of making a replica, and the server settings that each needs.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::Result;
use remora_lab::{Address, Agent, Client, Kind, Server};
use remora_redis::resp::{self, Frame};

/// One method of making replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The servers' own replication with default settings.
    OwnDefault,
    /// Own replication without disk at both ends, without delay, without compression.
    OwnBest,
    /// As [`Method::OwnBest`], with all replicas from one snapshot: the primary waits until all have connected. For one
    /// replica it is the same.
    OwnTogether,
    /// As [`Method::OwnTogether`], with two channels if the server has that (Valkey).
    OwnDual,
    /// As [`Method::OwnTogether`], and the primary compresses each value by LZF, as it does by default
    /// (`rdbcompression`).
    OwnCompressed,
    /// `GET` from the primary, `SET` at the replica, pipelined. Strings only, no point in time, and no stream
    /// afterwards.
    Copier,
    /// The copier one key after the other: it waits for each `GET` and each `SET`.
    CopierOneByOne,
    /// `redis-cli --rdb`, and a server that starts on the file as a replica of the primary. The result is an exact
    /// replica.
    RdbFile,
    /// RedisShake 4, which turns a snapshot into commands for a server of its own. No replica, and no stream
    /// afterwards.
    RedisShake,
    /// Remora beside a primary with default settings, over the first transport that works.
    RemoraDefault,
    /// As [`Method::RemoraDefault`], and the source changes two settings of the primary for the moment of the fork
    /// (`--tune-server`).
    RemoraTuned,
    /// Remora over shared memory, beside a primary with the settings of [`Method::OwnBest`].
    RemoraShm,
    /// Remora over TCP, each replica from the source.
    RemoraTcp,
    /// Remora over TCP, with replicas that feed each other.
    RemoraRelay,
    /// As [`Method::RemoraTcp`], with the default upload limit: a background transfer. The other methods over TCP have
    /// no limit unless they say so.
    RemoraTcpAuto,
    /// As [`Method::RemoraRelay`], with the default upload limit at the source and at the replicas.
    RemoraRelayAuto,
    /// As [`Method::RemoraRelay`], and the source leaves some of the cable free, with `--upload-limit`.
    RemoraRelayGentle,
    /// As [`Method::RemoraRelay`]; a replica that others read from is killed when it holds half of the snapshot.
    RemoraRelayKilled,
    /// Remora over shared memory, with our module in the primary and in the replicas' servers.
    RemoraModule,
    /// Remora over TCP, with replicas that feed each other and our module in the primary and in the replicas' servers.
    RemoraModuleRelay,
    /// As [`Method::RemoraModuleRelay`], and the source leaves some of the cable free, with `--upload-limit`.
    RemoraModuleRelayGentle,
    /// A replica that joins the snapshot which [`Method::RemoraShm`] has left at the source.
    RemoraLate,
    /// A replica with the module that joins the snapshot which [`Method::RemoraModule`] has left at the source.
    RemoraModuleLate,
    /// As [`Method::RemoraTcp`], and encrypted as it is between hosts by default: sealed tables, TLS for conversations.
    RemoraTcpSealed,
    /// As [`Method::RemoraRelay`], and encrypted and compressed as it is between hosts by default.
    RemoraRelaySealed,
    /// As [`Method::RemoraRelaySealed`], without compression.
    RemoraRelayUncompressed,
    /// As [`Method::RemoraRelaySealed`], with slots compressed by LZ4.
    RemoraRelayLz4,
    /// As [`Method::RemoraRelaySealed`], with slots compressed by Zstandard.
    RemoraRelayZstd,
}

/// A line of configuration: name and value.
pub type Setting = (&'static str, String);

impl Method {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Method::OwnDefault => "replication, defaults",
            Method::OwnBest => "replication, tuned",
            Method::OwnTogether => "replication, tuned, together",
            Method::OwnDual => "replication, tuned, dual channel",
            Method::OwnCompressed => "replication, tuned, LZF",
            Method::Copier => "GET/SET copier",
            Method::CopierOneByOne => "GET/SET copier, one by one",
            Method::RdbFile => "redis-cli --rdb, restart",
            Method::RedisShake => "RedisShake 4",
            Method::RemoraDefault => "Remora, defaults",
            Method::RemoraTuned => "Remora, defaults, tuned",
            Method::RemoraShm => "Remora shm, best",
            Method::RemoraTcp => "Remora tcp, best",
            Method::RemoraTcpAuto => "Remora tcp, best, upload auto",
            Method::RemoraRelayAuto => "Remora tcp, relay, upload auto",
            Method::RemoraTcpSealed => "Remora tcp, best, sealed",
            Method::RemoraRelay => "Remora tcp, relay",
            Method::RemoraRelaySealed => "Remora tcp, relay, sealed",
            Method::RemoraRelayUncompressed => "Remora tcp, relay, sealed, uncompressed",
            Method::RemoraRelayLz4 => "Remora tcp, relay, sealed, LZ4",
            Method::RemoraRelayZstd => "Remora tcp, relay, sealed, Zstandard",
            Method::RemoraRelayGentle => "Remora tcp, relay, upload limited",
            Method::RemoraRelayKilled => "Remora tcp, relay, one killed",
            Method::RemoraModule => "Remora shm, module",
            Method::RemoraModuleRelay => "Remora tcp, relay, module",
            Method::RemoraModuleRelayGentle => "Remora tcp, relay, module, upload limited",
            Method::RemoraLate => "Remora shm, late joiner",
            Method::RemoraModuleLate => "Remora shm, module, late joiner",
        }
    }

    /// Whether it is a method of Remora.
    pub fn is_ours(self) -> bool {
        self.transport().is_some()
    }

    /// Whether it is the servers' own replication.
    pub fn is_own(self) -> bool {
        use Method::{OwnBest, OwnCompressed, OwnDefault, OwnDual, OwnTogether};
        matches!(self, OwnDefault | OwnBest | OwnTogether | OwnDual | OwnCompressed)
    }

    /// Whether the servers load our module. For all other methods they run without it.
    pub fn has_module(self) -> bool {
        use Method::{RemoraModule, RemoraModuleLate, RemoraModuleRelay, RemoraModuleRelayGentle};
        matches!(self, RemoraModule | RemoraModuleLate | RemoraModuleRelay | RemoraModuleRelayGentle)
    }

    /// The method whose snapshot a late joiner joins.
    pub fn joins(self) -> Option<Method> {
        match self {
            Method::RemoraLate => Some(Method::RemoraShm),
            Method::RemoraModuleLate => Some(Method::RemoraModule),
            _ => None,
        }
    }

    /// The transport of `remora replica`.
    pub fn transport(self) -> Option<&'static str> {
        match self {
            Method::RemoraDefault | Method::RemoraTuned => Some("auto"),
            Method::RemoraShm | Method::RemoraLate | Method::RemoraModule => Some("shm"),
            Method::RemoraModuleLate => Some("shm"),
            Method::RemoraTcp | Method::RemoraModuleRelay | Method::RemoraModuleRelayGentle => Some("tcp"),
            Method::RemoraRelay | Method::RemoraRelayGentle | Method::RemoraRelayKilled => Some("tcp"),
            Method::RemoraTcpSealed | Method::RemoraRelaySealed => Some("tcp"),
            Method::RemoraTcpAuto | Method::RemoraRelayAuto => Some("tcp"),
            Method::RemoraRelayUncompressed | Method::RemoraRelayLz4 | Method::RemoraRelayZstd => Some("tcp"),
            Method::OwnDefault | Method::OwnBest | Method::OwnTogether | Method::OwnDual => None,
            Method::OwnCompressed => None,
            Method::Copier | Method::CopierOneByOne | Method::RdbFile | Method::RedisShake => None,
        }
    }

    /// Whether replicas feed each other, if the program has the option.
    pub fn serves_peers(self) -> Option<bool> {
        match self {
            Method::RemoraTcp | Method::RemoraTcpSealed | Method::RemoraTcpAuto => Some(false),
            Method::RemoraRelaySealed | Method::RemoraRelayUncompressed | Method::RemoraRelayAuto => Some(true),
            Method::RemoraRelayLz4 | Method::RemoraRelayZstd => Some(true),
            Method::RemoraRelay | Method::RemoraRelayGentle | Method::RemoraRelayKilled => Some(true),
            Method::RemoraModuleRelay | Method::RemoraModuleRelayGentle => Some(true),
            _ => None,
        }
    }

    /// Whether tables are sealed and conversations have TLS. The servers' own replication is measured without TLS, and
    /// so are all other methods.
    pub fn is_sealed(self) -> bool {
        matches!(self, Method::RemoraTcpSealed | Method::RemoraRelaySealed) || self.compress().is_some()
    }

    /// The source's `--compress`, if it is not the default.
    pub fn compress(self) -> Option<&'static str> {
        match self {
            Method::RemoraRelayUncompressed => Some("off"),
            Method::RemoraRelayLz4 => Some("lz4"),
            Method::RemoraRelayZstd => Some("zstd"),
            _ => None,
        }
    }

    /// Whether the source changes settings of the primary for the moment of the fork.
    pub fn tunes(self) -> bool {
        self == Method::RemoraTuned
    }

    /// The source's upload limit (`--upload-limit`), for a cable of `cable` bytes per second with all headers; `None`
    /// for the default. Replicas have the same, but a rate is the source's alone.
    pub fn upload_limit(self, cable: Option<u64>) -> Option<Upload> {
        match self {
            Method::RemoraDefault | Method::RemoraTuned | Method::RemoraTcpAuto | Method::RemoraRelayAuto => None,
            Method::RemoraRelayGentle | Method::RemoraModuleRelayGentle => {
                Some(cable.map_or(Upload::Unlimited, |cable| Upload::Rate(cable / 100 * GENTLE_PERCENT)))
            }
            _ => Some(Upload::Unlimited),
        }
    }

    /// Whether it has the default upload limit, over TCP.
    pub fn is_upload_auto(self) -> bool {
        matches!(self, Method::RemoraTcpAuto | Method::RemoraRelayAuto)
    }

    /// The method that differs from this one only in that it has no upload limit.
    pub fn unlimited(self) -> Option<Method> {
        match self {
            Method::RemoraTcpAuto => Some(Method::RemoraTcp),
            Method::RemoraRelayAuto | Method::RemoraRelayGentle => Some(Method::RemoraRelay),
            Method::RemoraModuleRelayGentle => Some(Method::RemoraModuleRelay),
            _ => None,
        }
    }

    /// Whether it works across hosts: it reads memory over a network, or needs none.
    pub fn crosses_hosts(self) -> bool {
        matches!(self.transport(), None | Some("tcp"))
    }

    /// Whether it differs from other methods for this number of replicas of that kind.
    pub fn applies(self, kind: Kind, replicas: usize) -> bool {
        match self {
            Method::OwnDual => kind == Kind::Valkey9,
            Method::OwnTogether => replicas > 1,
            // The relay, a replica that reads from it, and one from which that one can continue.
            Method::RemoraRelayKilled => replicas > 2,
            Method::RemoraLate | Method::RemoraModuleLate => replicas == 1,
            _ => true,
        }
    }

    /// Why it cannot be measured on this machine; `None` if it can.
    pub fn missing(self) -> Option<String> {
        match self {
            Method::RedisShake => shake_program().err(),
            _ => None,
        }
    }

    /// Whether the result is a server of its own that follows nothing: only its data are compared.
    pub(crate) fn only_copies(self) -> bool {
        matches!(self, Method::Copier | Method::CopierOneByOne | Method::RedisShake)
    }

    /// The primary's settings.
    pub fn primary_settings(self, kind: Kind, replicas: usize) -> Vec<Setting> {
        use Method::{Copier, CopierOneByOne, OwnDefault, RemoraDefault, RemoraTuned};
        if [OwnDefault, RemoraDefault, RemoraTuned, Copier, CopierOneByOne].contains(&self) {
            return Vec::new();
        }
        // The server begins as soon as that many replicas wait, and checks once a second; the delay is only the longest
        // wait.
        let own_waits = matches!(self, Method::OwnTogether | Method::OwnDual | Method::OwnCompressed);
        let together = (own_waits || matches!(self, Method::RdbFile | Method::RedisShake)) && replicas > 1;
        let compression = if self == Method::OwnCompressed { "yes" } else { "no" };
        let delay = if together { TOGETHER_SECONDS } else { "0" };
        let mut settings = vec![
            ("repl-diskless-sync", "yes".to_owned()),
            ("repl-diskless-sync-delay", delay.to_owned()),
            ("rdbcompression", compression.to_owned()),
        ];
        if together {
            settings.push(("repl-diskless-sync-max-replicas", replicas.to_string()));
        }
        settings.extend(self.primary_dual(kind));
        settings
    }

    /// The settings of the replicas' servers. With Remora they keep the defaults.
    pub fn replica_settings(self, kind: Kind) -> Vec<Setting> {
        let mut settings = Vec::new();
        if self.is_own() && self != Method::OwnDefault {
            settings.push(("repl-diskless-load", "on-empty-db".to_owned()));
        }
        settings.extend(self.dual(kind));
        settings
    }

    /// Whether the replica's server loads while the bytes arrive, so that transfer and load are one phase.
    pub(crate) fn loads_while_receiving(self) -> bool {
        !matches!(self, Method::OwnDefault | Method::RdbFile)
    }

    /// Remora asks for two channels if the primary has them switched on. Its replicas' servers need no setting.
    fn primary_dual(self, kind: Kind) -> Option<Setting> {
        if self.is_ours() { Method::OwnDual.dual(kind) } else { self.dual(kind) }
    }

    fn dual(self, kind: Kind) -> Option<Setting> {
        (self == Method::OwnDual && kind == Kind::Valkey9)
            .then(|| ("dual-channel-replication-enabled", "yes".to_owned()))
    }
}

/// An upload limit that is not the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upload {
    /// As fast as TCP does.
    Unlimited,
    /// Bytes per second.
    Rate(u64),
}

impl std::fmt::Display for Upload {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Upload::Unlimited => to.write_str(NO_LIMIT),
            Upload::Rate(rate) => rate.fmt(to),
        }
    }
}

/// No upload limit, on the command line.
pub(super) const NO_LIMIT: &str = "none";

/// Share of a cable's rate. TCP's payload is 95 % of it with packets of 1500 bytes; the rest is for other connections.
const GENTLE_PERCENT: u64 = 90;

/// Longer than it takes to start all replicas.
const TOGETHER_SECONDS: &str = "5";

// The rival without any snapshot: `GET` each key from the primary, `SET` it at the replica, both pipelined.
//
// ```text
//   SCAN ──keys──▶ GET GET GET … ──▶ primary ──▶ $len bytes ──▶ *3 SET key $len bytes ──▶ replica ──▶ +OK, counted on a thread
// ```
//
// This is as fast as such a copier can be: the answer to a GET is, byte for byte, the last argument of the SET, so
// values pass through without being decoded or collected. No such copier can do this: other types, expiries, a point
// in time, writes meanwhile.

/// What one replica received.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Copied {
    pub(crate) keys: u64,
    pub(crate) took: Duration,
}

/// Copies database 0 from one server to others, each on a separate thread on the replica's host.
pub(crate) fn copy(primary: &Server, replicas: &[Server], pace: Pace) -> Result<Vec<Copied>> {
    let begun = Instant::now();
    let copy = |replica: &Server| -> Result<Copied> {
        let copy = || match pace {
            Pace::Pipelined => copy_to(primary, replica),
            Pace::OneByOne => copy_one_by_one(primary, replica),
        };
        let keys = match replica.host() {
            Some(host) => host.within(copy)?,
            None => copy(),
        }?;
        Ok(Copied { keys, took: begun.elapsed() })
    };
    thread::scope(|scope| {
        let threads: Vec<_> = replicas.iter().map(|replica| scope.spawn(move || copy(replica))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a copying thread panicked")?).collect()
    })
}

/// How it copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Many GETs and SETs in flight.
    Pipelined,
    /// One GET, one SET, then the next key.
    OneByOne,
}

/// Copies as the simplest script would.
fn copy_one_by_one(primary: &Server, replica: &Server) -> Result<u64> {
    let mut scan = Scan::new(primary)?;
    let (mut from, mut to) = (connect_client(primary)?, connect_client(replica)?);
    let mut keys = 0;
    while let Some(key) = scan.next()? {
        let Some(value) = from.bytes(&[b"GET".as_slice(), &key])? else { continue };
        to.ok(&[b"SET".as_slice(), &key, &value])?;
        keys += 1;
    }
    Ok(keys)
}

fn copy_to(primary: &Server, replica: &Server) -> Result<u64> {
    let set = connect(replica.address())?;
    let answers = set.try_clone()?;
    thread::scope(|scope| {
        let counter = scope.spawn(move || count_answers(answers));
        let pumped = Pump::new(primary, set).and_then(Pump::run);
        let counted = counter.join().map_err(|_| "a counting thread panicked")?;
        let (asked, set) = (pumped?, counted?);
        if asked == set { Ok(set) } else { Err(format!("{asked} keys were sent, {set} were set").into()) }
    })
}

struct Pump {
    scan: Scan,
    get: TcpStream,
    set: Option<TcpStream>,
    /// Keys whose values have not begun to arrive.
    asked: VecDeque<Vec<u8>>,
    /// GETs and SETs that are encoded and not sent yet.
    questions: Vec<u8>,
    output: Vec<u8>,
    /// The part of the line before a value that has arrived.
    line: Vec<u8>,
    /// Bytes of the present value that are still to arrive, including its line end.
    left: usize,
    keys: u64,
    bytes: u64,
}

impl Pump {
    fn new(primary: &Server, set: TcpStream) -> Result<Pump> {
        Ok(Pump {
            scan: Scan::new(primary)?,
            get: connect(primary.address())?,
            set: Some(set),
            asked: VecDeque::new(),
            questions: Vec::new(),
            output: Vec::new(),
            line: Vec::new(),
            left: 0,
            keys: 0,
            bytes: 0,
        })
    }

    fn run(mut self) -> Result<u64> {
        let done = self.pump();
        if done.is_err() {
            // Otherwise the thread that counts the answers would wait for more of them.
            if let Some(set) = self.set.take() {
                let _ = set.shutdown(std::net::Shutdown::Both);
            }
        }
        done
    }

    fn pump(&mut self) -> Result<u64> {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            self.ask()?;
            if self.asked.is_empty() && self.left == 0 {
                break;
            }
            let read = self.get.read(&mut chunk)?;
            if read == 0 {
                return Err("the primary closed the connection".into());
            }
            self.pass_on(chunk.get(..read).unwrap_or_default())?;
        }
        resp::command(&mut self.output, &["PING"]);
        self.flush()?;
        Ok(self.keys)
    }

    /// Keeps as many GETs in flight as a few MiB of values need.
    fn ask(&mut self) -> Result<()> {
        let mean = self.bytes.checked_div(self.keys).unwrap_or(FIRST_GUESS_BYTES).max(1);
        let window = usize::try_from(WINDOW_BYTES / mean)?.clamp(WINDOW_KEYS_LEAST, WINDOW_KEYS_MOST);
        // Not one by one: each request costs the primary a system call.
        if self.asked.len() > window / 2 {
            return Ok(());
        }
        while self.asked.len() < window {
            let Some(key) = self.scan.next()? else { break };
            resp::command(&mut self.questions, &[b"GET".as_slice(), &key]);
            self.asked.push_back(key);
        }
        self.get.write_all(&self.questions)?;
        self.questions.clear();
        Ok(())
    }

    fn pass_on(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if self.left == 0 {
                bytes = self.read_line(bytes)?;
                continue;
            }
            let (value, rest) = bytes.split_at(self.left.min(bytes.len()));
            self.left -= value.len();
            bytes = rest;
            if value.len() < DIRECT_BYTES {
                self.output.extend_from_slice(value);
            } else {
                self.flush()?;
                self.send(value)?;
            }
        }
        if self.output.len() >= CHUNK_BYTES || self.asked.is_empty() {
            self.flush()?;
        }
        Ok(())
    }

    /// Takes the line before a value, or a part of it, off the front. Begins the SET when the line is complete.
    fn read_line<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8]> {
        let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
            self.line.extend_from_slice(bytes);
            return Ok(&[]);
        };
        let (line, rest) = bytes.split_at(end + 1);
        self.line.extend_from_slice(line);
        let line = std::mem::take(&mut self.line);
        let key = self.asked.pop_front().ok_or("more answers than requests")?;
        let text = String::from_utf8_lossy(&line);
        if text.starts_with("$-1") {
            return Ok(rest); // it has expired since the SCAN
        }
        let length: usize = text
            .strip_prefix('$')
            .unwrap_or_default()
            .trim_end()
            .parse()
            .map_err(|_| format!("GET {} was answered with {}", key.escape_ascii(), text.trim_end()))?;
        write!(self.output, "*3\r\n$3\r\nSET\r\n${}\r\n", key.len())?;
        self.output.extend_from_slice(&key);
        self.output.extend_from_slice(b"\r\n");
        self.output.extend_from_slice(&line);
        self.left = length + b"\r\n".len();
        self.keys += 1;
        self.bytes += length as u64;
        Ok(rest)
    }

    fn flush(&mut self) -> Result<()> {
        let output = std::mem::take(&mut self.output);
        self.send(&output)?;
        self.output = output;
        self.output.clear();
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.set.as_mut().ok_or("the connection to the replica is closed")?.write_all(bytes)?)
    }
}

/// The keys of a server, one after the other.
struct Scan {
    client: Client,
    cursor: Option<Vec<u8>>,
    keys: VecDeque<Vec<u8>>,
}

impl Scan {
    fn new(primary: &Server) -> Result<Scan> {
        Ok(Scan { client: connect_client(primary)?, cursor: Some(b"0".to_vec()), keys: VecDeque::new() })
    }

    fn next(&mut self) -> Result<Option<Vec<u8>>> {
        while self.keys.is_empty() {
            let Some(cursor) = self.cursor.take() else { return Ok(None) };
            let answer = self.client.list(&[b"SCAN".as_slice(), &cursor, b"COUNT", b"1000"])?;
            let [Frame::Bulk(cursor), Frame::Array(keys)] = answer.as_slice() else {
                return Err("SCAN was not answered with a cursor and keys".into());
            };
            self.cursor = (cursor != b"0").then(|| cursor.clone());
            self.keys = keys
                .iter()
                .filter_map(|key| if let Frame::Bulk(key) = key { Some(key.clone()) } else { None })
                .collect();
        }
        Ok(self.keys.pop_front())
    }
}

/// Reads the replica's answers up to the one to the last PING. Returns the number of keys set.
fn count_answers(mut answers: TcpStream) -> Result<u64> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let (mut line, mut count) = (Vec::new(), 0);
    loop {
        let read = answers.read(&mut chunk)?;
        if read == 0 {
            return Err("the replica closed the connection".into());
        }
        for byte in chunk.iter().take(read) {
            line.push(*byte);
            if *byte != b'\n' {
                continue;
            }
            match line.as_slice() {
                b"+OK\r\n" => count += 1,
                b"+PONG\r\n" => return Ok(count),
                other => return Err(format!("the replica answered SET with {}", other.escape_ascii()).into()),
            }
            line.clear();
        }
    }
}

/// Connects from this thread's host: [`Server::client`] would connect from the server's.
fn connect_client(server: &Server) -> Result<Client> {
    Ok(Client::connect(&Address::Tcp(server.address()))?)
}

fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    Ok(stream)
}

/// A server that is silent for this long is taken for failed.
const SILENCE: Duration = Duration::from_secs(60);

/// One read, and one write of small values.
const CHUNK_BYTES: usize = 256 << 10;

/// Parts of a value from this length on are sent directly from the receive buffer.
const DIRECT_BYTES: usize = 16 << 10;

/// Bytes of values in flight: enough to keep both servers busy, and few enough to stay in their buffers.
const WINDOW_BYTES: u64 = 8 << 20;

const WINDOW_KEYS_LEAST: usize = 2;

const WINDOW_KEYS_MOST: usize = 4096;

/// The assumed length of a value before the first one is seen.
const FIRST_GUESS_BYTES: u64 = 256 << 10;

// Tools: programs of others that people copy servers with, each with the settings that suit it best.
//
// ```text
//   redis-cli --rdb   SYNC ───▶ a file in the replica's folder ──▶ the server starts on it as a replica
//                                                                └─▶ PSYNC, +CONTINUE
//   RedisShake 4      PSYNC ──▶ a file ──▶ commands, 1024 under way ──▶ a server of its own, not a replica
// ```
//
// RedisShake is in no package registry of Debian, Rust or Python, and the Go module proxy does not serve it (its
// module is named `RedisShake`, which is not its address), so the set-up does not bring it: `REMORA_REDIS_SHAKE` names
// the program.

/// What one replica received, and how long the parts took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Made {
    /// Until the file had arrived; for a tool without a file of ours, until the end.
    pub(crate) arrived: Duration,
    /// Until the server had started on it.
    pub(crate) loaded: Duration,
    /// Processor seconds of the tool.
    pub(crate) cpu: f64,
}

/// How long a tool may take.
const LONGEST: Duration = Duration::from_secs(30 * 60);

/// How long a server may take to start on a file.
pub(crate) const LONGEST_START: Duration = Duration::from_secs(30 * 60);

/// What names RedisShake's program.
const SHAKE_VARIABLE: &str = "REMORA_REDIS_SHAKE";

/// RedisShake's program.
pub(crate) fn shake_program() -> std::result::Result<PathBuf, String> {
    let named = std::env::var_os(SHAKE_VARIABLE).map(PathBuf::from);
    match named {
        None => Err(format!("{SHAKE_VARIABLE} names no program, and no package registry that the set-up uses has it")),
        Some(path) if !path.is_file() => Err(format!("{SHAKE_VARIABLE}: {} is not a file", path.display())),
        Some(path) => Ok(path),
    }
}

/// Fetches a snapshot for each of these servers by `redis-cli --rdb`, and starts each on its file as a replica, all at
/// once. Its default settings are its best: it has none that matters here.
pub(crate) fn by_rdb_file(primary: &Server, replicas: &mut [Server], begun: Instant) -> Result<Vec<Made>> {
    at_once(replicas, |replica| {
        let address = primary.address();
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let folder = replica.folder().to_owned();
        let file = folder.join(RDB_FILE);
        let mut command = Command::new("redis-cli");
        command.args(["-h", &host, "-p", &port, "--rdb"]).arg(&file);
        let cpu = run(command, replica)?;
        let arrived = begun.elapsed();
        // The replication id and offset in the file let the server continue from there, if it starts as a replica.
        replica.configure_file(&format!("replicaof {host} {port}\ndbfilename {RDB_FILE}"))?;
        replica.restart()?;
        Ok(Made { arrived, loaded: begun.elapsed(), cpu })
    })
}

/// The name of the file in the folder of a replica's server.
const RDB_FILE: &str = "fetched.rdb";

/// Has RedisShake copy to each of these servers, all at once, and waits until all commands are answered.
pub(crate) fn by_shake(primary: &Server, replicas: &mut [Server], begun: Instant) -> Result<Vec<Made>> {
    let program = shake_program()?;
    at_once(replicas, |replica| {
        let folder = replica.folder().join("shake");
        std::fs::create_dir_all(&folder)?;
        let file = folder.join("shake.toml");
        std::fs::write(&file, shake_settings(primary, replica, &folder))?;
        let mut command = Command::new(&program);
        command.arg(&file).current_dir(&folder);
        let cpu = run(command, replica)?;
        let took = begun.elapsed();
        Ok(Made { arrived: took, loaded: took, cpu })
    })
}

/// Its best settings where nothing is written meanwhile; the names are those of its `shake.toml`. `try_diskless` takes
/// the snapshot from the primary's child without a file at the primary; without `sync_aof` it ends when all is copied,
/// and otherwise never. Answers are not turned off (`off_reply`): without them nothing says that the commands were
/// carried out.
fn shake_settings(primary: &Server, replica: &Server, folder: &Path) -> String {
    format!(
        "[sync_reader]\naddress = \"{}\"\nsync_rdb = true\nsync_aof = false\ntry_diskless = true\n\n\
         [redis_writer]\naddress = \"{}\"\noff_reply = false\n\n\
         [advanced]\ndir = \"{}\"\nncpu = 0\nlog_level = \"warn\"\npipeline_count_limit = 1024\n",
        primary.address(),
        replica.address(),
        folder.join("data").display(),
    )
}

/// Runs a tool on the replica's host to its end. Returns its processor seconds.
fn run(mut command: Command, replica: &Server) -> Result<f64> {
    if let Some(host) = replica.host() {
        host.enter(&mut command)?;
    }
    let mut tool = Agent::run(command)?;
    tool.wait_for_success(LONGEST)?;
    Ok(tool.cpu_seconds()?)
}

/// Does this for all servers at once.
fn at_once(replicas: &mut [Server], make: impl Fn(&mut Server) -> Result<Made> + Sync) -> Result<Vec<Made>> {
    let make = &make;
    thread::scope(|scope| {
        let threads: Vec<_> = replicas.iter_mut().map(|replica| scope.spawn(move || make(replica))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread that runs a tool panicked")?).collect()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remora_lab::{Random, require};

    #[test]
    fn no_rival_has_worse_settings_than_ours() {
        let ours = Method::RemoraShm.primary_settings(Kind::Valkey9, 1);
        let theirs = Method::OwnDual.primary_settings(Kind::Valkey9, 1);
        assert!(ours.iter().all(|setting| theirs.contains(setting)), "{theirs:?}");
        let (ours, theirs) = (Method::RemoraShm, Method::OwnBest);
        assert_eq!(ours.primary_settings(Kind::Redis7, 1), theirs.primary_settings(Kind::Redis7, 1));
        for as_it_comes in [Method::RemoraDefault, Method::RemoraTuned] {
            assert!(as_it_comes.primary_settings(Kind::Redis7, 3).is_empty());
        }
        assert!(Method::OwnDefault.replica_settings(Kind::Redis7).is_empty());
    }

    #[test]
    fn only_valkey_has_two_channels() {
        let dual = ("dual-channel-replication-enabled", "yes".to_owned());
        assert!(Method::OwnDual.primary_settings(Kind::Valkey9, 3).contains(&dual));
        assert!(Method::OwnDual.replica_settings(Kind::Valkey9).contains(&dual));
        assert!(!Method::OwnDual.applies(Kind::Redis7, 3));
    }

    #[test]
    fn values_of_every_length_and_content_are_copied() {
        let Some(kind) = require::redis() else { return };
        let (primary, replicas) =
            (Server::start(kind).unwrap(), [Server::start(kind).unwrap(), Server::start(kind).unwrap()]);
        let mut client = primary.client().unwrap();
        let mut random = Random::new(1);
        // Around the lengths at which values are sent differently, and with the protocol's own words in them.
        let lengths = [0, 1, DIRECT_BYTES - 1, DIRECT_BYTES, CHUNK_BYTES - 9, CHUNK_BYTES, CHUNK_BYTES + 1, 3_000_000];
        for (number, length) in lengths.into_iter().cycle().take(40).enumerate() {
            let value = [random.bytes(length), b"\r\n$3\r\n".to_vec()].concat();
            client.ok(&[b"SET".as_slice(), format!("key {number}\r\n").as_bytes(), &value]).unwrap();
        }
        client.ok(&["SET", "empty", ""]).unwrap();
        let keys = |pace| copy(&primary, &replicas, pace).unwrap().iter().map(|copied| copied.keys).collect::<Vec<_>>();
        assert_eq!(keys(Pace::Pipelined), [41, 41]);
        for replica in &replicas {
            assert_eq!(replica.digest().unwrap(), primary.digest().unwrap());
            replica.client().unwrap().ok(&["FLUSHALL"]).unwrap();
        }
        assert_eq!(keys(Pace::OneByOne), [41, 41]);
        for replica in &replicas {
            assert_eq!(replica.digest().unwrap(), primary.digest().unwrap());
        }
    }

    #[test]
    fn a_value_that_is_not_a_string_is_an_error_and_not_a_hang() {
        let Some(kind) = require::redis() else { return };
        let (primary, replica) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
        primary.client().unwrap().int(&["RPUSH", "list", "a"]).unwrap();
        let error = copy(&primary, &[replica], Pace::Pipelined).unwrap_err().to_string();
        assert!(error.contains("WRONGTYPE"), "{error}");
    }
}
