//! Reads without a message: the copies that this process can read, and the reads that the caller's own thread answers.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use bytes::Bytes;
use remora_fabric::{Memory, Peer, TransportKind};
use remora_messenger::Connection;

use super::outgoing::Buffers;
use super::{Bring, Event};
use crate::layout::Layout;
use crate::link::{Laid, Lane, Rdma};
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

/// The groups of a run's blocks.
fn groups(run: Run) -> impl Iterator<Item = u64> {
    let blocks = run.blocks();
    blocks.start / GROUP..blocks.end.div_ceil(GROUP)
}

/// Blocks of a group: a long request has at most 65 groups, or 1025 without bytes, and a short one disturbs few blocks.
const GROUP: u64 = 16;

/// Counters: 4096, so that as many writes as can be under way seldom meet a read of other blocks. 16 KiB.
const PLACES_BITS: u32 = 12;

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
}
