//! The server with clients that others wrote, and with one that says exactly what a test wants.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod usage;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use remora_lab::{Random, scratch};
use remora_nbd::device::{Answer, Later, Payload};
use remora_nbd::protocol::extent_flags::{HOLE, ZERO};
use remora_nbd::protocol::{
    Errno, Extent, Failure, OPTION_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, command, command_flags,
    option,
};
use remora_nbd::request::{Request, Zero};
use remora_nbd::{Address, Device, Geometry, Offer, Server, ServerOptions};

// Servers of these tests, devices that answer late, and a client that says exactly what a test wants.

/// A server at a unix socket in a folder of its own.
pub(crate) struct Serving {
    pub(crate) server: Server,
    pub(crate) socket: PathBuf,
    pub(crate) folder: tempfile::TempDir,
}

impl Serving {
    pub(crate) fn of(device: Arc<dyn Device>) -> Serving {
        Serving::with(vec![offer("disk", device)], |_| {})
    }

    pub(crate) fn with(offers: Vec<Offer>, set: impl FnOnce(&mut ServerOptions)) -> Serving {
        let folder = scratch::folder("nbd").unwrap();
        let socket = folder.path().join("sockets/nbd");
        let mut options = ServerOptions::new(Address::Unix(socket.clone()));
        set(&mut options);
        Serving { server: Server::start(offers, &options).unwrap(), socket, folder }
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

pub(crate) fn offer(name: &str, device: Arc<dyn Device>) -> Offer {
    Offer { name: name.into(), description: format!("the {name} of a test"), device }
}

/// Longer than anything here takes on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Waits for a condition.
pub(crate) fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + LONG;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

type Work = Box<dyn FnOnce(&mut Vec<u8>) + Send>;

/// A device of blocks of 4 KiB whose two threads do what was asked in any order, as a disk with a queue does. A flush
/// waits for everything that was asked before.
pub(crate) struct LateDevice {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

struct Queue {
    content: Mutex<Vec<u8>>,
    waiting: Mutex<(VecDeque<Work>, Random, bool)>,
    changed: Condvar,
    /// Requests that were not answered, and the most of them at a time.
    under_way: AtomicUsize,
    pub(crate) most: AtomicUsize,
    /// Nothing is done while this is set.
    held: Mutex<bool>,
}

impl LateDevice {
    pub(crate) fn new(size: usize) -> LateDevice {
        let random = Random::new(remora_lab::random::seed("late device"));
        let queue = Arc::new(Queue {
            content: Mutex::new(vec![0; size]),
            waiting: Mutex::new((VecDeque::new(), random, false)),
            changed: Condvar::new(),
            under_way: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            held: Mutex::new(false),
        });
        let threads = (0..2).map(|_| {
            let queue = Arc::clone(&queue);
            std::thread::spawn(move || queue.work())
        });
        LateDevice { threads: threads.collect(), queue }
    }

    /// The most requests that were under way at a time.
    pub(crate) fn most(&self) -> usize {
        self.queue.most.load(Ordering::Relaxed)
    }

    pub(crate) fn under_way(&self) -> usize {
        self.queue.under_way.load(Ordering::Relaxed)
    }

    /// From now on requests are kept; or they are done.
    pub(crate) fn hold(&self, held: bool) {
        *self.queue.held.lock().unwrap() = held;
        self.queue.changed.notify_all();
    }

    fn post(&self, later: Later, work: impl FnOnce(&mut Vec<u8>, Later) + Send + 'static) {
        let queue = Arc::clone(&self.queue);
        let now = queue.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        queue.most.fetch_max(now, Ordering::Relaxed);
        self.queue.waiting.lock().unwrap().0.push_back(Box::new(move |content| {
            queue.under_way.fetch_sub(1, Ordering::Relaxed);
            work(content, later);
        }));
        self.queue.changed.notify_one();
    }
}

impl Queue {
    fn work(&self) {
        loop {
            let mut waiting = self.waiting.lock().unwrap();
            while !waiting.2 && (waiting.0.is_empty() || *self.held.lock().unwrap()) {
                waiting = self.changed.wait_timeout(waiting, Duration::from_millis(20)).unwrap().0;
            }
            if waiting.2 {
                return;
            }
            let (queue, random, _) = &mut *waiting;
            let place = random.below(queue.len() as u64) as usize;
            let Some(work) = queue.remove(place) else { continue };
            drop(waiting);
            work(&mut self.content.lock().unwrap());
        }
    }
}

impl Drop for LateDevice {
    fn drop(&mut self) {
        self.queue.waiting.lock().unwrap().2 = true;
        self.queue.changed.notify_all();
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

impl Device for LateDevice {
    fn geometry(&self) -> Geometry {
        let size = self.queue.content.lock().unwrap().len() as u64;
        Geometry { has_status: true, ..Geometry::of_blocks(size, 4096) }
    }

    fn read(&self, at: u64, length: u32, answer: Answer<'_>) {
        let (at, length) = (at as usize, length as usize);
        self.post(answer.later(), move |content, later| {
            // In two pieces, as a device has them that asks two hosts.
            let (one, other) = content[at..at + length].split_at(length / 2);
            later.data(vec![Bytes::copy_from_slice(one), Bytes::copy_from_slice(other)]);
        });
    }

    fn write(&self, at: u64, data: Payload<'_>, _: bool, answer: Answer<'_>) {
        let (at, data) = (at as usize, data.into_bytes());
        self.post(answer.later(), move |content, later| {
            content[at..at + data.len()].copy_from_slice(&data);
            later.done();
        });
    }

    fn zero(&self, at: u64, length: u32, _: Zero, answer: Answer<'_>) {
        self.trim(at, length, false, answer);
    }

    fn trim(&self, at: u64, length: u32, _: bool, answer: Answer<'_>) {
        let (at, length) = (at as usize, length as usize);
        self.post(answer.later(), move |content, later| {
            content[at..at + length].fill(0);
            later.done();
        });
    }

    fn flush(&self, answer: Answer<'_>) {
        answer.done(); // what is done is in its memory
    }

    /// Blocks of zeros are holes.
    fn status(&self, at: u64, length: u32, answer: Answer<'_>) {
        let (at, length) = (at as usize, length as usize);
        self.post(answer.later(), move |content, later| {
            let blocks = content[at..at + length].chunks(4096);
            later.extents(blocks.map(|block| {
                let flags = if block.iter().all(|byte| *byte == 0) { HOLE | ZERO } else { 0 };
                Extent { length: block.len() as u32, flags }
            }));
        });
    }
}

/// A device that does not do what it should.
pub(crate) struct Broken;

impl Device for Broken {
    fn geometry(&self) -> Geometry {
        Geometry { has_status: true, ..Geometry::of_blocks(1 << 20, 512) }
    }

    fn read(&self, at: u64, _: u32, answer: Answer<'_>) {
        match at {
            0 => {}
            512 => drop(answer.later()),
            1024 => answer.data(|sink| sink.put(b"too little")),
            1536 => answer.later().data(vec![Bytes::from_static(b"too little")]),
            _ => answer.fail(&Failure::new(Errno::NoMemory, "no memory for this read")),
        }
    }

    fn write(&self, _: u64, _: Payload<'_>, _: bool, answer: Answer<'_>) {
        answer.later().fail(&Failure::new(Errno::Shutdown, "the volume has ended"));
    }

    fn zero(&self, _: u64, _: u32, _: Zero, _: Answer<'_>) {}

    fn trim(&self, _: u64, _: u32, _: bool, _: Answer<'_>) {}

    fn flush(&self, _: Answer<'_>) {}

    fn status(&self, at: u64, _: u32, answer: Answer<'_>) {
        if at == 0 { answer.extents([]) } else { answer.later().extents([]) }
    }
}

pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    structured: bool,
}

/// An answer: whose it is, what it says, and with which bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    pub(crate) says: Says,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Says {
    Done,
    Error(u32),
    ErrorWith(u32, String),
    Data(Vec<u8>),
    Hole(u32),
    Extents(Vec<(u32, u32)>),
}

impl Client {
    /// Connects, and chooses the first export.
    pub(crate) fn new(socket: &Path, structured: bool) -> Client {
        let mut client = Client::connect(socket);
        client.structured = structured;
        if structured {
            client.option(option::STRUCTURED_REPLY, b"");
            let base = [&[0; 4][..], &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"].concat();
            client.option(option::SET_META_CONTEXT, &base);
        }
        client.option(option::GO, &[0; 6]);
        client
    }

    /// Connects, and says what it can.
    pub(crate) fn connect(socket: &Path) -> Client {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        Client { stream, structured: false }
    }

    /// A connection that has said nothing.
    pub(crate) fn over(stream: UnixStream) -> Client {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Client { stream, structured: false }
    }

    /// Sends an option, and returns the kinds of its answers.
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        self.stream.write_all(&[&head.concat(), data].concat()).unwrap();
        let mut kinds = Vec::new();
        while !matches!(kinds.last(), Some(kind) if kind & 1 << 31 != 0 || *kind == 1) {
            let head: [u8; 20] = self.take();
            let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
            kinds.push(word(12));
            self.take_bytes(word(16) as usize);
        }
        kinds
    }

    pub(crate) fn ask(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, length: u32) {
        self.stream.write_all(&request(command, flags, cookie, offset, length)).unwrap();
    }

    pub(crate) fn write(&mut self, cookie: u64, offset: u64, data: &[u8]) {
        let head = request(command::WRITE, 0, cookie, offset, data.len() as u32);
        self.stream.write_all(&[&head, data].concat()).unwrap();
    }

    /// Sends a request, and returns what is said to it.
    pub(crate) fn says(&mut self, command: u16, offset: u64, length: u32) -> Says {
        let flags = if command == command::BLOCK_STATUS { command_flags::REQ_ONE } else { 0 };
        self.ask(command, flags, 77, offset, length);
        let reply = self.reply(if command == command::READ { length } else { 0 });
        assert_eq!(reply.cookie, 77);
        reply.says
    }

    /// The next answer. `read` says how many bytes follow it if it is a simple one to a read; 0: it is not to a read.
    pub(crate) fn reply(&mut self, read: u32) -> Reply {
        let magic = u32::from_be_bytes(self.take());
        if magic == SIMPLE_REPLY_MAGIC {
            let (error, cookie) = (u32::from_be_bytes(self.take()), u64::from_be_bytes(self.take()));
            let says = match error {
                0 if read > 0 && !self.structured => Says::Data(self.take_bytes(read as usize)),
                0 => Says::Done,
                error => Says::Error(error),
            };
            return Reply { cookie, says };
        }
        assert_eq!(magic, STRUCTURED_REPLY_MAGIC);
        let [done, kind] = [self.take(), self.take()].map(u16::from_be_bytes);
        assert_eq!(done, chunk::DONE);
        let cookie = u64::from_be_bytes(self.take());
        let length = u32::from_be_bytes(self.take()) as usize;
        let data = self.take_bytes(length);
        let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| data[at + byte]));
        let says = match kind {
            chunk::OFFSET_DATA => Says::Data(data[8..].to_vec()),
            chunk::OFFSET_HOLE => Says::Hole(word(8)),
            chunk::BLOCK_STATUS => Says::Extents((4..length).step_by(8).map(|at| (word(at), word(at + 4))).collect()),
            chunk::ERROR => Says::ErrorWith(word(0), String::from_utf8(data[6..].to_vec()).unwrap()),
            kind => panic!("a chunk of kind {kind}"),
        };
        Reply { cookie, says }
    }

    /// Whether the server has closed the connection.
    pub(crate) fn is_over(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0) | Err(_))
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn take_bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }
}

pub(crate) fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    Request { flags, command, cookie, offset, length }.encode(&mut bytes);
    bytes
}
