//! The rival without any snapshot: `GET` each key from the primary, `SET` it at the replica, both pipelined.
//!
//! ```text
//!   SCAN ──keys──▶ GET GET GET … ──▶ primary ──▶ $len bytes ──▶ *3 SET key $len bytes ──▶ replica ──▶ +OK, counted on a thread
//! ```
//!
//! This is as fast as such a copier can be: the answer to a GET is, byte for byte, the last argument of the SET, so
//! values pass through without being decoded or collected. No such copier can do this: other types, expiries, a point
//! in time, writes meanwhile.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::{Address, Client, Server};
use remora_redis::resp::{self, Frame};

use super::Result;

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use remora_lab::{Random, require};

    use super::*;

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
