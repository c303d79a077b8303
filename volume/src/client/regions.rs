//! Blocks that no message carries: the copies that this process can read, the reads that the caller's own thread
//! answers, and this process's outbox, out of which servers pull the blocks of large writes (`crate::link`).
//!
//! A place of the outbox is freed once every server that was told of it has applied the write, or was left out. A
//! server that was left out and reads late finds other blocks there, whose checksums are not the write's, or is cut
//! off: its grant is withdrawn with its connection.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use bytes::Bytes;
use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, Pages, Peer, RegionId, Regions, TransportKind};
use remora_messenger::{Address, Connection};

use super::{Bring, Event};
use crate::layout::Layout;
use crate::link::{self, LEAST_PULLED_BYTES, Laid, Lane, Places, REGION_BYTES, Rdma};
use crate::reader::{Found, InPlace, OneSided, ReaderError, Wanted};
use crate::rules::{Holder, ServerId, Version};
use crate::shape::BLOCK_BYTES;
use crate::wire::{MOST_BLOCKS, Run};
use crate::writer::{Seen, may_be_given_out};

// Reads: the ways in which blocks are read, and their names.

/// How blocks are read. A read that a faster way does not answer is always asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reads {
    /// By asking a server.
    Asked,
    /// In the memory of a server that runs on this host, if one does.
    #[default]
    Here,
    /// Also in the memory of servers on other hosts, if they permit it: by RDMA, or over TCP. The blocks are neither
    /// encrypted nor authenticated on their way.
    Anywhere,
    /// Only so, for measurements: not in the memory of this host.
    Far,
}

/// A text that is not a [`Reads`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a way to read: use asked, here, anywhere or far")]
pub struct NotAWayToRead;

const WAYS: [(Reads, &str); 4] =
    [(Reads::Asked, "asked"), (Reads::Here, "here"), (Reads::Anywhere, "anywhere"), (Reads::Far, "far")];

impl Reads {
    /// The transports, nearest first.
    pub(crate) fn transports(self) -> &'static [TransportKind] {
        match self {
            Reads::Asked => &[],
            Reads::Here => &[TransportKind::Shm],
            Reads::Anywhere => &[TransportKind::Shm, TransportKind::Verbs, TransportKind::Tcp],
            Reads::Far => &[TransportKind::Verbs, TransportKind::Tcp],
        }
    }

    /// Whether blocks cross the network without encryption if a server is on another host.
    pub fn is_plain(self) -> bool {
        matches!(self, Reads::Anywhere | Reads::Far)
    }
}

impl FromStr for Reads {
    type Err = NotAWayToRead;

    fn from_str(text: &str) -> Result<Reads, NotAWayToRead> {
        WAYS.iter().find(|(_, name)| *name == text).map(|(way, _)| *way).ok_or(NotAWayToRead)
    }
}

impl fmt::Display for Reads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = WAYS.iter().find(|(way, _)| way == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

// The copies that this process can read without asking their servers.
//
// ```text
//   server: Attached ──▶ Opening, a thread: connects by the nearest transport
//                            │ on this host                     │ over a network
//                            ▼                                  ▼
//                     Region::Here, and it ends          Region::Far: it reads, several runs together,
//                     (the driver reads in place)        until the driver drops its end of the channel
// ```
//
// A thread waits for its server for [`CONNECT_LIMIT`] or [`READ_LIMIT`] at most, and so does the driver's end.

/// A region that can be read.
pub(super) enum Region {
    /// In place. The peer keeps the server's grant.
    Here(Arc<InPlace>, #[allow(dead_code)] Box<dyn Peer>),
    /// By the thread at the other end.
    Far(Sender<Job>),
}

/// Blocks that a thread is to read.
pub(super) struct Job {
    /// The number of the read.
    pub(super) number: u64,
    pub(super) run: Run,
}

/// What a thread has to say of its region.
pub(super) enum News {
    /// It can be read.
    Open(Region),
    /// The blocks of a read; `None`: they were being written each time, or the volume has no such blocks.
    Looked { number: u64, found: Option<(Vec<u8>, Found)> },
    /// It cannot be read any more. This is the last of its news: what is still to be read there must be asked for.
    Closed,
}

/// A region that is about to be opened.
pub(super) struct Opening {
    pub(super) layout: Layout,
    pub(super) reads: Reads,
    pub(super) rdma: Rdma,
    pub(super) session: u64,
    pub(super) keys: Vec<Vec<u8>>,
    /// The connection to its server.
    pub(super) connection: Connection,
    pub(super) bring: Bring,
}

impl Opening {
    /// The thread.
    pub(super) fn run(self) {
        let Some((Laid { peer, transport, .. }, sink)) = self.open() else { return };
        if let Some(view) = peer.view() {
            let reader = Arc::new(InPlace::new(view, self.layout));
            return self.say(News::Open(Region::Here(reader, peer)));
        }
        let (jobs, due) = mpsc::channel();
        self.say(News::Open(Region::Far(jobs)));
        self.read(OneSided::new(peer, transport, sink, self.layout), &due);
    }

    fn say(&self, news: News) {
        (self.bring)(Event::Region(self.connection.clone(), news));
    }

    /// Connects by the nearest transport that both ends have.
    fn open(&self) -> Option<(Laid, Arc<Memory>)> {
        let lane = Lane {
            transports: self.reads.transports(),
            rdma: &self.rdma,
            length: self.layout.length(),
            depth: DEPTH,
            connect_limit: CONNECT_LIMIT,
            read_limit: READ_LIMIT,
        };
        // A server that answers in place needs no sink, and a memory without touched pages costs nothing.
        let opened = OneSided::sink(MOST_BLOCKS as u64).map_err(|error| error.to_string()).and_then(|sink| {
            let laid = lane.connect(&self.connection, (self.session, &self.keys), &sink)?;
            Ok((laid, sink))
        });
        let server = self.connection.peer();
        match &opened {
            Ok((Laid { transport, why, took, .. }, _)) => {
                tracing::info!(%server, %transport, connected_in = ?took, why, "a copy is read without asking");
            }
            Err(error) => tracing::debug!(%server, error, "a copy cannot be read without asking"),
        }
        opened.ok()
    }

    /// Reads what the driver wants, until it wants no more or the region cannot be read.
    fn read(&self, mut reader: OneSided, due: &Receiver<Job>) {
        let mut next = None;
        while let Some(first) = next.take().or_else(|| due.recv().ok()) {
            let mut jobs = vec![first];
            let mut blocks = jobs.iter().map(|job: &Job| job.run.count as usize).sum::<usize>();
            while jobs.len() < AT_ONCE
                && let Ok(job) = due.try_recv()
            {
                blocks += job.run.count as usize;
                if blocks > MOST_BLOCKS_AT_ONCE {
                    next = Some(job);
                    break;
                }
                jobs.push(job);
            }
            if let Err(error) = self.read_several(&mut reader, &jobs) {
                tracing::info!(server = %self.connection.peer(), %error, "a copy cannot be read without asking any more");
                return self.say(News::Closed);
            }
        }
    }

    fn read_several(&self, reader: &mut OneSided, jobs: &[Job]) -> Result<(), ReaderError> {
        let mut data: Vec<Vec<u8>> = jobs.iter().map(|job| vec![0; job.run.count as usize * BLOCK_BYTES]).collect();
        let blocks = jobs.iter().zip(&mut data);
        let mut wanted: Vec<_> = blocks.map(|(job, into)| Wanted { first: job.run.first, into }).collect();
        let results = reader.several(&mut wanted, READ_LIMIT)?;
        for ((job, data), result) in jobs.iter().zip(data).zip(results) {
            let found = result.ok().map(|found| (data, found));
            self.say(News::Looked { number: job.number, found });
        }
        Ok(())
    }
}

/// Longest time for a connection to a server's exporter. Meanwhile the server is asked.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Longest time for a read without asking. Then its server is asked, and has the time that each answer has.
const READ_LIMIT: Duration = Duration::from_secs(1);

/// Runs that are read together. Each has two reads, blocks and entries, and all have the line.
const AT_ONCE: usize = 32;

/// Reads under way at a peer.
const DEPTH: usize = AT_ONCE * 2 + 1;

/// Blocks that are read together: what the sink takes, whose lines are as long as some entries.
const MOST_BLOCKS_AT_ONCE: usize = MOST_BLOCKS - AT_ONCE;

/// Local reads: the caller's own thread answers them, out of memory of this host. They wake no other thread.
///
/// The driver knows which writes are under way, and this thread does not. So it is stricter:
///
/// 1. None of the blocks has a write under way that is not acknowledged. Writes are counted where they are submitted,
///    by groups of blocks; two groups may share a counter.
/// 2. The copy has applied everything that is acknowledged: its line is read, and then the blocks. So it holds every
///    write of these blocks that was submitted before.
/// 3. The rest is as for the driver's own looks: the line is read again after the blocks, and says that the server
///    obeys this writer; and every write that is returned is acknowledged.
///
/// Otherwise the driver reads. It is the one who finds that a later writer has come.
pub(super) struct Here {
    /// Writes that are submitted and not acknowledged, by group of blocks.
    under_way: Box<[AtomicU32]>,
    /// The last write that is acknowledged, as a word. Set before any caller learns of it.
    acknowledged: AtomicU64,
    regions: RwLock<Vec<Open>>,
    buffers: Arc<Buffers>,
}

struct Open {
    server: ServerId,
    holder: Holder,
    reader: Arc<InPlace>,
}

impl Here {
    /// Blocks of `run`, if this thread can read them now.
    pub(super) fn read(&self, run: Run) -> Option<Bytes> {
        // Held until the end: what is closed is not read any more.
        let regions = self.regions();
        if regions.is_empty() || !self.is_quiet(run) {
            return None;
        }
        let acknowledged = Version::from_word(self.acknowledged.load(Ordering::SeqCst))?;
        let mut data = self.buffers.take(run.count as usize * BLOCK_BYTES);
        let is_read = |Open { reader, holder, .. }: &Open| {
            let Ok(before) = reader.line() else { return false };
            if before.applied < acknowledged {
                return false;
            }
            let found = reader.blocks(run.first, data.as_mut());
            let seen = found.map(|found| Seen { newest: found.newest(), line: found.line });
            seen.is_ok_and(|seen| may_be_given_out(*holder, acknowledged, before, seen))
        };
        let is_read = regions.iter().any(is_read);
        is_read.then(|| data.into_bytes())
    }

    /// Whether no write of these blocks is under way.
    fn is_quiet(&self, run: Run) -> bool {
        groups(run).all(|group| self.counter(group).is_some_and(|count| count.load(Ordering::SeqCst) == 0))
    }

    fn counter(&self, group: u64) -> Option<&AtomicU32> {
        // Multiplied, so that neighbours are spread, and neighbours of different files seldom meet.
        let place = group.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - PLACES_BITS);
        self.under_way.get(place as usize)
    }

    /// Everything up to this write is acknowledged. Call it before any caller learns of it.
    pub(super) fn acknowledged(&self, through: Version) {
        self.acknowledged.store(through.word(), Ordering::SeqCst);
    }

    /// A region can be read.
    pub(super) fn open(&self, server: ServerId, holder: Holder, reader: Arc<InPlace>) {
        self.regions_mut().push(Open { server, holder, reader });
    }

    /// The region of a server must not be read any more.
    pub(super) fn close(&self, server: ServerId) {
        self.regions_mut().retain(|open| open.server != server);
    }

    /// No region must be read any more.
    pub(super) fn close_all(&self) {
        self.regions_mut().clear();
    }

    fn regions(&self) -> RwLockReadGuard<'_, Vec<Open>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn regions_mut(&self) -> RwLockWriteGuard<'_, Vec<Open>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Here {
    fn default() -> Here {
        let under_way = (0..1 << PLACES_BITS).map(|_| AtomicU32::new(0)).collect();
        Here { under_way, acknowledged: AtomicU64::new(0), regions: RwLock::default(), buffers: Arc::default() }
    }
}

/// A write under way, until it is dropped.
pub(super) struct UnderWay {
    here: Arc<Here>,
    runs: Vec<Run>,
}

impl UnderWay {
    /// A write of these blocks is about to be submitted.
    pub(super) fn new(here: &Arc<Here>, runs: Vec<Run>) -> UnderWay {
        let write = UnderWay { here: Arc::clone(here), runs };
        write.counters().for_each(|count| _ = count.fetch_add(1, Ordering::SeqCst));
        write
    }

    fn counters(&self) -> impl Iterator<Item = &AtomicU32> {
        self.runs.iter().flat_map(|run| groups(*run)).filter_map(|group| self.here.counter(group))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.counters().for_each(|count| _ = count.fetch_sub(1, Ordering::SeqCst));
    }
}

/// How the blocks of large writes (64 KiB and more) get to the servers. Smaller ones are in the messages, and so is
/// what a server cannot pull.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Writes {
    /// In the messages.
    #[default]
    Inline,
    /// Servers on this host take them out of this process's memory.
    Here,
    /// Servers on other hosts as well, each for itself, by RDMA or over TCP. The blocks are neither encrypted nor
    /// authenticated on their way.
    Pulled,
    /// As `Pulled`, but each server takes them from the server before it, if that one permits it: they leave this host
    /// once.
    Chain,
}

/// A text that is not a [`Writes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a way to write: use inline, here, pulled or chain")]
pub struct NotAWay;

/// See the module's text.
pub(super) struct Outgoing {
    memory: Arc<Memory>,
    exporters: Vec<Box<dyn Exporter>>,
    places: Places,
}

// Memory for long reads, which is used again. New memory costs the system more than the copy into it: every
// page of it is mapped and filled with zeros first.

/// Buffers that no read has. See the module's text.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    free: Mutex<Vec<Vec<u8>>>,
}

/// Memory of one read. It is free again when the last of its bytes is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    data: Vec<u8>,
    length: usize,
    buffers: Arc<Buffers>,
}

impl Buffer {
    /// What is read goes here.
    pub(super) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.data[..self.length]
    }

    /// It is read.
    pub(super) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.data[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.buffers.give_back(std::mem::take(&mut self.data));
    }
}

/// The groups of a run's blocks.
fn groups(run: Run) -> impl Iterator<Item = u64> {
    let blocks = run.blocks();
    blocks.start / GROUP..blocks.end.div_ceil(GROUP)
}

/// Blocks of a group: a long request has at most 65 groups, or 1025 without bytes, and a short one disturbs few blocks.
const GROUP: u64 = 16;

/// Counters: 4096, so that as many writes as can be under way seldom meet a read of other blocks. 16 KiB.
const PLACES_BITS: u32 = 12;

const WRITE_WAYS: [(Writes, &str); 4] =
    [(Writes::Inline, "inline"), (Writes::Here, "here"), (Writes::Pulled, "pulled"), (Writes::Chain, "chain")];

impl Writes {
    /// Whether blocks cross the network without encryption if a server is on another host.
    pub fn is_plain(self) -> bool {
        matches!(self, Writes::Pulled | Writes::Chain)
    }
}

impl FromStr for Writes {
    type Err = NotAWay;

    fn from_str(text: &str) -> Result<Writes, NotAWay> {
        WRITE_WAYS.iter().find(|(_, name)| *name == text).map(|(way, _)| *way).ok_or(NotAWay)
    }
}

impl fmt::Display for Writes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = WRITE_WAYS.iter().find(|(way, _)| way == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

/// The name of the outbox, which is the only region of its exporters.
const OUTBOX: RegionId = RegionId { generation: 0, region: 0 };

impl Outgoing {
    /// Makes an outbox. `None`: blocks go inline.
    pub(super) fn open(writes: Writes, rdma: &Rdma, servers: &[Address]) -> Option<Outgoing> {
        let [rdma, tcp] = match writes {
            Writes::Inline => return None,
            Writes::Here => [None, None],
            Writes::Pulled | Writes::Chain => [rdma.exporter().transpose(), Some(exporter_at(near(servers)))],
        };
        let shm = ShmExporter::bind(ShmOptions::default());
        let shm = shm.map(|shm| Box::new(shm) as Box<dyn Exporter>).map_err(|error| error.to_string());
        let memory = Memory::create("remora-volume-outbox", REGION_BYTES, Pages::Small);
        let memory = memory.map(Arc::new).map_err(|error| error.to_string()).or_warn()?;
        let opened = [Some(shm), rdma, tcp].into_iter().flatten();
        let exporters = opened.filter_map(|exporter| {
            let exporter = exporter.or_warn()?;
            exporter.export(OUTBOX, Arc::clone(&memory)).map_err(|error| error.to_string()).or_warn()?;
            Some(exporter)
        });
        let exporters: Vec<_> = exporters.collect();
        (!exporters.is_empty()).then(|| Outgoing { memory, exporters, places: Places::default() })
    }

    /// Lets a server read it. Returns the keys.
    pub(super) fn grant(&self, connection: &Connection) -> Option<Vec<Vec<u8>>> {
        let secret = link::region_secret(connection)?;
        self.exporters.iter().for_each(|exporter| exporter.grant(connection.id(), secret, Regions::only([OUTBOX])));
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(OUTBOX).ok());
        Some(keys.map(|key| key.as_bytes().to_vec()).collect())
    }

    /// A server must not read it any more. It may never have been permitted.
    pub(super) fn withdraw(&self, connection: &Connection) {
        self.exporters.iter().for_each(|exporter| exporter.withdraw(connection.id()));
    }

    /// Puts the blocks of a write there, if it is large and there is a place. Returns where.
    pub(super) fn put(&mut self, blocks: &[u8]) -> Option<u64> {
        if blocks.len() < LEAST_PULLED_BYTES {
            return None;
        }
        let at = self.places.take(blocks.len() as u64)?;
        let written = self.memory.write(at, blocks);
        debug_assert!(written.is_ok(), "a place in the outbox: {written:?}");
        Some(at)
    }

    /// The oldest write there is not needed any more.
    pub(super) fn free(&mut self) {
        self.places.free();
    }

    /// Bytes that have left over a network, except by RDMA: nothing here notices them.
    pub(super) fn served(&self) -> u64 {
        self.exporters.iter().map(|exporter| exporter.bytes_served()).sum()
    }
}

trait OrWarn<T> {
    /// The value; without one the log says why.
    fn or_warn(self) -> Option<T>;
}

impl<T> OrWarn<T> for Result<T, String> {
    fn or_warn(self) -> Option<T> {
        self.map_err(|error| tracing::warn!(error, "large writes cannot be pulled over each transport")).ok()
    }
}

/// An exporter at a port that the system chooses. Keys name no host: servers know where the writer is.
fn exporter_at(host: IpAddr) -> Result<Box<dyn Exporter>, String> {
    let exporter = TcpExporter::new(TcpOptions::default(), None).map_err(|error| error.to_string())?;
    exporter.listen(SocketAddr::new(host, 0)).map_err(|error| error.to_string())?;
    Ok(Box::new(exporter))
}

/// The address by which this host reaches all of the servers; unspecified if there are several. Nothing is sent.
fn near(servers: &[Address]) -> IpAddr {
    let local = |server: &Address| {
        let server = link::socket_address(server)?;
        let any = if server.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
        let socket = UdpSocket::bind((any, 0)).and_then(|socket| socket.connect(server).map(|()| socket));
        socket.and_then(|socket| socket.local_addr()).ok().map(|address| address.ip())
    };
    let mut found: Vec<IpAddr> = servers.iter().filter_map(local).collect();
    found.sort_unstable();
    found.dedup();
    match found[..] {
        [] => Ipv4Addr::LOCALHOST.into(),
        [one] => one,
        _ if found.iter().all(IpAddr::is_ipv4) => Ipv4Addr::UNSPECIFIED.into(),
        _ => IpAddr::from([0; 16]), // of both families
    }
}

/// Shorter reads get new memory, which the allocator has at hand.
const LEAST_BYTES: usize = 64 << 10;

/// Bytes that are kept: a few of the longest reads.
const MOST_KEPT_BYTES: usize = 16 << 20;

impl Buffers {
    /// A buffer of this length. What is in it is left from an earlier read, or zeros.
    pub(super) fn take(self: &Arc<Buffers>, length: usize) -> Buffer {
        let mut free = self.free();
        let found = if length < LEAST_BYTES { None } else { free.iter().position(|data| data.len() >= length) };
        let found = found.map(|place| free.swap_remove(place));
        drop(free);
        Buffer { data: found.unwrap_or_else(|| vec![0; length]), length, buffers: Arc::clone(self) }
    }

    fn give_back(&self, data: Vec<u8>) {
        let mut free = self.free();
        let kept: usize = free.iter().map(Vec::len).sum();
        if data.len() >= LEAST_BYTES && kept + data.len() <= MOST_KEPT_BYTES {
            free.push(data);
        }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_quiet_while_no_write_of_their_group_is_under_way() {
        let here = Arc::new(Here::default());
        let run = |first, count| Run { first, count };
        let writes = [vec![run(100, 1), run(1000, 17)], vec![run(100, 1)]].map(|runs| UnderWay::new(&here, runs));
        assert!(!here.is_quiet(run(100, 1)) && !here.is_quiet(run(0, 1024)) && !here.is_quiet(run(1016, 1)));
        assert!(here.is_quiet(run(5000, 1)));
        let [first, second] = writes;
        drop(first);
        assert!(!here.is_quiet(run(100, 1)) && here.is_quiet(run(1000, 17)));
        drop(second);
        assert!(here.is_quiet(run(0, 1024)) && here.is_quiet(run(u64::MAX - 1, 1)));
        assert!(here.under_way.iter().all(|count| count.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn ways_are_read_and_shown() {
        for (way, name) in WAYS {
            assert_eq!((name.parse(), way.to_string().as_str()), (Ok(way), name));
        }
        assert_eq!("Here".parse::<Reads>(), Err(NotAWayToRead));
    }

    #[test]
    fn ways_to_write_are_read_and_shown() {
        for (way, name) in WRITE_WAYS {
            assert_eq!((name.parse(), way.to_string().as_str()), (Ok(way), name));
        }
        assert_eq!("Chain".parse::<Writes>(), Err(NotAWay));
    }

    #[test]
    fn an_outbox_listens_where_its_servers_are() {
        let near_of =
            |servers: &[&str]| near(&servers.iter().filter_map(|server| server.parse().ok()).collect::<Vec<Address>>());
        assert_eq!(near_of(&["tcp:127.0.0.1:7480", "tcp:127.0.0.1:7481"]), IpAddr::from([127, 0, 0, 1]));
        assert_eq!(near_of(&["shm:/run/a"]), IpAddr::from([127, 0, 0, 1]));
    }

    #[test]
    fn long_buffers_are_used_again_once_their_last_byte_is_dropped() {
        let buffers = Arc::new(Buffers::default());
        let mut first = buffers.take(1 << 20);
        first.as_mut().fill(7);
        let at = first.as_ref().as_ptr();
        let bytes = first.into_bytes();
        let part = bytes.slice(5..9);
        drop(bytes);
        assert_ne!(buffers.take(1 << 20).as_ref().as_ptr(), at, "a part of it is still used");
        assert_eq!(part, [7; 4].as_slice());
        drop(part);
        // Two are free now; each is long enough for a shorter read.
        let again = [buffers.take(1 << 20), buffers.take(LEAST_BYTES)];
        assert!(again.iter().any(|buffer| buffer.as_ref().as_ptr() == at));
        assert_eq!(again.each_ref().map(|buffer| buffer.as_ref().len()), [1 << 20, LEAST_BYTES]);
    }

    #[test]
    fn what_is_kept_has_a_bound_and_short_buffers_are_not() {
        let buffers = Arc::new(Buffers::default());
        let many: Vec<Buffer> = (0..20).map(|_| buffers.take(1 << 20)).collect();
        drop(many);
        assert_eq!(buffers.free().iter().map(Vec::len).sum::<usize>(), MOST_KEPT_BYTES);
        let short = Arc::new(Buffers::default());
        drop(short.take(4096));
        assert!(short.free().is_empty());
    }
}
