//! Servers of these tests, and devices that answer late.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use remora_lab::{Random, scratch};
use remora_nbd::device::{Answer, Later, Payload};
use remora_nbd::protocol::extent_flags::{HOLE, ZERO};
use remora_nbd::protocol::{Errno, Extent, Failure};
use remora_nbd::request::Zero;
use remora_nbd::{Address, Device, Geometry, Offer, Server, ServerOptions};

/// A server at a unix socket in a folder of its own.
pub struct Serving {
    pub server: Server,
    pub socket: PathBuf,
    pub folder: tempfile::TempDir,
}

impl Serving {
    pub fn of(device: Arc<dyn Device>) -> Serving {
        Serving::with(vec![offer("disk", device)], |_| {})
    }

    pub fn with(offers: Vec<Offer>, set: impl FnOnce(&mut ServerOptions)) -> Serving {
        let folder = scratch::folder("nbd").unwrap();
        let socket = folder.path().join("sockets/nbd");
        let mut options = ServerOptions::new(Address::Unix(socket.clone()));
        set(&mut options);
        Serving { server: Server::start(offers, &options).unwrap(), socket, folder }
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

pub fn offer(name: &str, device: Arc<dyn Device>) -> Offer {
    Offer { name: name.into(), description: format!("the {name} of a test"), device }
}

/// Longer than anything here takes on a busy machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Waits for a condition.
pub fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + LONG;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

type Work = Box<dyn FnOnce(&mut Vec<u8>) + Send>;

/// A device of blocks of 4 KiB whose two threads do what was asked in any order, as a disk with a queue does. A flush
/// waits for everything that was asked before.
pub struct LateDevice {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

struct Queue {
    content: Mutex<Vec<u8>>,
    waiting: Mutex<(VecDeque<Work>, Random, bool)>,
    changed: Condvar,
    /// Requests that were not answered, and the most of them at a time.
    under_way: AtomicUsize,
    pub most: AtomicUsize,
    /// Nothing is done while this is set.
    held: Mutex<bool>,
}

impl LateDevice {
    pub fn new(size: usize) -> LateDevice {
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
    pub fn most(&self) -> usize {
        self.queue.most.load(Ordering::Relaxed)
    }

    pub fn under_way(&self) -> usize {
        self.queue.under_way.load(Ordering::Relaxed)
    }

    /// From now on requests are kept; or they are done.
    pub fn hold(&self, held: bool) {
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
pub struct Broken;

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
