//! The messenger, asked and answering: the next request is sent from where the reply is dispatched, as an asynchronous owner
//! would, or from a thread that waits for it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy};

use super::histogram::Histogram;
use super::server::{self, Server};
use super::{Case, Outcome, content};
use crate::cpu;

/// Answers every request with so many bytes, until nobody asks any more.
///
/// # Errors
/// What the system says.
pub fn serve(address: &Address, reply: usize, options: &Options) -> io::Result<()> {
    let (_messenger, address) = listen(address, reply, options)?;
    server::serve(&address.to_string())
}

/// Answers every request with so many bytes, for as long as the messenger is held; and where.
///
/// # Errors
/// What the system says.
pub fn listen(address: &Address, reply: usize, options: &Options) -> io::Result<(Messenger, Address)> {
    let answerer = Arc::new(Answerer { reply: Bytes::from(content(reply)) });
    let messenger = Messenger::new(Policy::stateless_server(), options, answerer)?;
    let address = messenger.listen(address)?;
    Ok((messenger, address))
}

struct Answerer {
    reply: Bytes,
}

impl Dispatcher for Answerer {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        let reply = match delivery.kind {
            PROCESSOR_TIME => delivery.reply(nanos(cpu::of_self().unwrap_or_default()).to_le_bytes().to_vec()),
            _ => Message::new(delivery.transaction, delivery.kind, Bytes::new()).with_data(self.reply.clone()),
        };
        let _ = connection.send(reply); // a client that is gone misses nothing
    }
}

/// Asks for so long.
///
/// # Errors
/// The server cannot be reached, stops answering, or answers with another number of bytes.
pub fn measure(server: &mut Server, case: &Case, time: Duration, options: &Options) -> io::Result<Outcome> {
    let asker = Arc::new(Asker::new(case));
    let messenger = Messenger::new(Policy::lossy_client(), options, asker.clone())?;
    let address: Address = server.address.parse().map_err(io::Error::other)?;
    let connections: Vec<Connection> = (0..case.connections).map(|_| messenger.connect(&address)).collect();
    asker.wait("to connect", |asker| asker.connected.load(Ordering::SeqCst) == case.connections)?;
    // A server of our own says by a pipe what it has spent, at any time; one elsewhere says it in a reply, behind all others.
    let is_elsewhere = server.is_elsewhere();
    let mut server_cpu = || match connections.first() {
        Some(connection) if is_elsewhere => asker.ask_for_processor_time(connection),
        _ => server.cpu(),
    };
    let (server_before, before) = (server_cpu()?, cpu::of_self()?);
    let start = Instant::now();
    asker.begin(&connections, start);
    std::thread::sleep(time);
    asker.ending.store(true, Ordering::SeqCst);
    let took = start.elapsed();
    let spent = (cpu::of_self()? - before, server_cpu()?.saturating_sub(server_before));
    asker.wait("for the last replies", |asker| asker.under_way.load(Ordering::SeqCst) == 0)?;
    if asker.failed.load(Ordering::SeqCst) {
        return Err(io::Error::other("a connection broke during the measurement"));
    }
    let reply = asker.other_reply.load(Ordering::SeqCst);
    if reply != NO_OTHER {
        let text = format!("the server answers with {reply} bytes, not {}: give both the same --reply", case.reply);
        return Err(io::Error::other(text));
    }
    let mut histogram = Histogram::default();
    asker.lanes.iter().for_each(|lane| histogram.add(&lock(lane).histogram));
    Ok(Outcome::of(&histogram, took, spent.0, spent.1))
}

/// Opens that many connections that say nothing; the memory of both sides, in bytes.
///
/// # Errors
/// The server cannot be reached.
pub fn idle(server: &mut Server, connections: usize, options: &Options) -> io::Result<[u64; 2]> {
    let asker = Arc::new(Asker::new(&Case { connections, depth: 0, request: 0, reply: 0 }));
    let messenger = Messenger::new(Policy::lossy_client(), options, asker.clone())?;
    let address: Address = server.address.parse().map_err(io::Error::other)?;
    let _connections: Vec<Connection> = (0..connections).map(|_| messenger.connect(&address)).collect();
    asker.wait("to connect", |asker| asker.connected.load(Ordering::SeqCst) == connections)?;
    Ok([server::resident()?, server.resident()?])
}

struct Asker {
    request: Bytes,
    /// Bytes that a reply should have, and those of one that had others.
    reply: usize,
    other_reply: AtomicUsize,
    lanes: Vec<Mutex<Lane>>,
    /// What the server has said of its processor time last.
    server_cpu: Mutex<Option<Duration>>,
    connected: AtomicUsize,
    under_way: AtomicU64,
    ending: AtomicBool,
    failed: AtomicBool,
    changed: (Mutex<()>, Condvar),
}

/// What one connection has under way, by place; only its worker touches it while it runs.
struct Lane {
    asked: Vec<Instant>,
    histogram: Histogram,
}

impl Asker {
    fn new(case: &Case) -> Asker {
        let lane = || Mutex::new(Lane { asked: vec![Instant::now(); case.depth], histogram: Histogram::default() });
        Asker {
            request: Bytes::from(content(case.request)),
            reply: case.reply,
            other_reply: AtomicUsize::new(NO_OTHER),
            lanes: (0..case.connections).filter(|_| case.depth > 0).map(|_| lane()).collect(),
            server_cpu: Mutex::default(),
            connected: AtomicUsize::new(0),
            under_way: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            changed: Default::default(),
        }
    }

    fn begin(&self, connections: &[Connection], now: Instant) {
        let depth = self.lanes.first().map_or(0, |lane| lock(lane).asked.len());
        self.under_way.store((connections.len() * depth) as u64, Ordering::SeqCst);
        for (at, connection) in connections.iter().enumerate() {
            for place in 0..depth {
                lock(&self.lanes[at]).asked[place] = now;
                self.ask(connection, ((at as u64) << 32) | place as u64);
            }
        }
    }

    fn ask(&self, connection: &Connection, transaction: u64) {
        let request = Message::new(transaction, REQUEST, Bytes::new()).with_data(self.request.clone());
        if connection.send(request).is_err() {
            self.failed.store(true, Ordering::SeqCst);
        }
    }

    /// What the server's process has spent so far, for whomever.
    fn ask_for_processor_time(&self, connection: &Connection) -> io::Result<Duration> {
        *lock(&self.server_cpu) = None;
        connection.send(Message::new(0, PROCESSOR_TIME, Bytes::new())).map_err(io::Error::other)?;
        self.wait("for the server's processor time", |asker| lock(&asker.server_cpu).is_some())?;
        Ok(lock(&self.server_cpu).unwrap_or_default())
    }

    fn wait(&self, what: &str, holds: impl Fn(&Asker) -> bool) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut guard = lock(&self.changed.0);
        while !holds(self) {
            if Instant::now() > deadline || self.failed.load(Ordering::SeqCst) {
                return Err(io::Error::other(format!("waited in vain {what}: is the server there, and free?")));
            }
            let waited = self.changed.1.wait_timeout(guard, Duration::from_millis(10));
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl Dispatcher for Asker {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        if delivery.kind == PROCESSOR_TIME {
            let nanos = delivery.front.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            *lock(&self.server_cpu) = Some(Duration::from_nanos(nanos));
            return;
        }
        let (at, place) = ((delivery.transaction >> 32) as usize, (delivery.transaction & 0xffff_ffff) as usize);
        if delivery.data.len() != self.reply {
            self.other_reply.store(delivery.data.len(), Ordering::SeqCst);
        }
        if self.ending.load(Ordering::Relaxed) {
            self.under_way.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let now = Instant::now();
        {
            let mut lane = lock(&self.lanes[at]);
            let asked = std::mem::replace(&mut lane.asked[place], now);
            lane.histogram.record(now - asked);
        }
        self.ask(connection, delivery.transaction);
    }

    fn connected(&self, _: &Connection) {
        self.connected.fetch_add(1, Ordering::SeqCst);
    }

    fn reset(&self, _: &Connection, _: usize, _: bool) {
        self.failed.store(true, Ordering::SeqCst);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Kinds of messages: to be answered with so many bytes, and with the nanoseconds of processor time that the process has spent.
const REQUEST: u16 = 1;
const PROCESSOR_TIME: u16 = 2;

/// A server that has not answered for so long does not.
const PATIENCE: Duration = Duration::from_secs(60);

/// No reply has had another length than it should.
const NO_OTHER: usize = usize::MAX;
