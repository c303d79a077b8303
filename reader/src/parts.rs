//! Parts, the pump that measures how fast a region is read, and the meter of a transfer. Parts are the connections of
//! one offer, and why reading from them ends.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::{Completion, Error, Memory, Peer, ReadError, ReadRequest, View};
use remora_redis::ReplId;
use remora_table::{Expectation, Geometry, SinkLayout};

/// Why a feed ended.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    /// The table was overrun, aborted, is corrupt, or belongs to another generation.
    #[error(transparent)]
    Table(#[from] remora_table::Error),
    /// The server has loaded a snapshot of a history that this feed does not continue.
    #[error("its stream is of the history {feed}, and the server has loaded {loaded}")]
    OtherHistory {
        /// The replid of the server's data.
        loaded: ReplId,
        /// The replid of the feed's stream.
        feed: ReplId,
    },
}

/// The connections of one offer.
pub struct Parts {
    /// The snapshot, if it is still needed.
    pub snapshot: Option<Part>,
    /// The stream behind it.
    pub journal: Part,
    /// Bytes of the primary's backlog. A server that has loaded can get from there what the journal has lost.
    pub backlog: u64,
}

/// One connection and the table that is expected there.
pub struct Part {
    /// Reads the table.
    pub peer: Box<dyn Peer>,
    /// Where slots arrive.
    pub sink: Arc<Memory>,
    /// How the sink is divided.
    pub layout: SinkLayout,
    /// What the table must be.
    pub expect: Expectation,
    /// Slots of a snapshot can be used in the source's memory. (Records of a journal are always copied.)
    pub in_place: bool,
    /// Set if slots go into a copy from which other replicas read.
    pub copy: Option<CopyPlan>,
}

/// The copy in the part's sink.
#[derive(Clone, Copy)]
pub struct CopyPlan {
    /// Its shape.
    pub own: Geometry,
    /// Bytes per second, for all connections; 0: no limit.
    pub download_rate: u64,
    /// The source keeps all slots.
    pub retained: bool,
}

/// The memory behind a peer, if it is mapped here and slots are copied from it.
pub struct Mapped {
    view: Option<Arc<View>>,
    /// Bytes copied since its pages were last unmapped.
    copied: u64,
}

/// Limit of another process's memory that is mapped here at a time: it counts as memory of this process. Large, since a
/// page of a window that is read again must be mapped again.
const MAPPED_LIMIT: u64 = 16 << 20;

impl Mapped {
    /// Nothing of it has been copied.
    pub fn new(view: Option<Arc<View>>) -> Mapped {
        Mapped { view, copied: 0 }
    }

    /// Counts copied bytes.
    pub fn copied(&mut self, bytes: u64) {
        self.copied += bytes;
        if let Some(view) = self.view.as_ref().filter(|_| self.copied >= MAPPED_LIMIT) {
            view.forget(0..view.length());
            self.copied = 0;
        }
    }
}

// Pump: measures how fast a region is read: a number of reads is kept in flight for a time, and each read is timed.
//
// The region is read from front to back again and again, each read from a page of its own, as the parts of a table
// are.

/// The figures for one size at one depth.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Bytes of one read.
    pub size: u32,
    /// Reads in flight at once.
    pub depth: usize,
    /// Reads that completed.
    pub reads: u64,
    /// The time from the first request to the last byte.
    pub elapsed: Duration,
    /// The median time from a read's request to its last byte.
    pub median: Duration,
    /// The time within which 99 of 100 reads completed.
    pub p99: Duration,
}

impl Cell {
    /// The rate in bytes.
    pub fn bytes_per_second(&self) -> f64 {
        self.reads as f64 * f64::from(self.size) / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// The rate in reads.
    pub fn reads_per_second(&self) -> f64 {
        self.reads as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Bytes per second of a transport that is read in large pieces, measured for a moment; `None` if it could not be
/// measured. The peer's sink must have [`MOMENT_SINK`] bytes.
pub fn in_a_moment(peer: &mut dyn Peer, region: u64) -> Option<u64> {
    let deadline = Instant::now() + MOMENT_LIMIT;
    let cell = Pump::new(WARM_BYTES, WARM_DEPTH, region, MOMENT, deadline).run(peer).ok()?;
    Some(cell.bytes_per_second() as u64).filter(|rate| *rate > 0)
}

/// How long a transport is read for that.
const MOMENT: Duration = Duration::from_millis(300);

/// How long that may take: what is in flight at the end may be late on a slow link.
const MOMENT_LIMIT: Duration = Duration::from_secs(10);

/// Bytes of memory for that.
pub const MOMENT_SINK: u64 = WARM_BYTES as u64 * WARM_DEPTH as u64;

/// Why a measurement ended early.
#[derive(Debug, thiserror::Error)]
pub enum Stopped {
    /// The deadline has come.
    #[error("the time of --limit was over")]
    Late,
    /// The peer cannot go on.
    #[error("{0}")]
    Peer(#[from] Error),
    /// A read was answered by an error.
    #[error("a read failed: {0}")]
    Read(#[from] ReadError),
}

/// Keeps reads in flight.
pub struct Pump {
    size: u32,
    depth: usize,
    region: u64,
    time: Duration,
    deadline: Instant,
    /// The number of bytes after which it ends before its time.
    most: u64,
    /// The offset of the next read in the region.
    offset: u64,
    /// When the read into each place was requested.
    asked: Vec<Instant>,
    nanos: Vec<u64>,
}

impl Pump {
    /// For reads of this size, so many in flight, of a region of so many bytes. It ends at the deadline.
    pub fn new(size: u32, depth: usize, region: u64, time: Duration, deadline: Instant) -> Pump {
        let asked = vec![Instant::now(); depth];
        Pump {
            size,
            depth,
            region,
            time,
            deadline,
            most: u64::MAX,
            offset: 0,
            asked,
            nanos: Vec::with_capacity(FIRST_SAMPLES),
        }
    }

    /// The same, but it ends when it has read the region once.
    pub fn once_around(self) -> Pump {
        Pump { most: self.region, ..self }
    }

    /// Reads until the time is over, and then waits for what is in flight.
    ///
    /// # Errors
    /// A read failed, or the deadline came.
    pub fn run(mut self, peer: &mut dyn Peer) -> Result<Cell, Stopped> {
        let began = Instant::now();
        let (mut now, mut reads, mut under_way) = (began, 0_u64, 0);
        let mut free: Vec<u64> = (0..self.depth as u64).rev().collect();
        let mut requests = Vec::with_capacity(self.depth);
        let mut completions: Vec<Completion> = Vec::with_capacity(self.depth);
        loop {
            let is_over = now - began >= self.time || reads * u64::from(self.size) >= self.most;
            if is_over && under_way == 0 {
                return Ok(self.cell(reads, now - began));
            }
            let left = self.deadline.saturating_duration_since(now);
            if left.is_zero() {
                return Err(Stopped::Late);
            }
            if !is_over {
                requests.clear();
                requests.extend(free.drain(..).map(|place| self.next(place, now)));
                let accepted = peer.post_read(&requests)?;
                free.extend(requests.iter().skip(accepted).map(|request| request.tag));
                under_way += accepted;
            }
            completions.clear();
            if peer.poll(&mut completions)? == 0 {
                peer.wait(left.min(PATIENCE))?;
            }
            now = Instant::now();
            for done in &completions {
                done.result?;
                self.took(done.tag, now);
            }
            free.extend(completions.iter().map(|done| done.tag));
            reads += completions.len() as u64;
            under_way -= completions.len();
        }
    }

    /// The next read, into this place.
    fn next(&mut self, place: u64, now: Instant) -> ReadRequest {
        if self.offset + u64::from(self.size) > self.region {
            self.offset = 0;
        }
        let request = ReadRequest {
            tag: place,
            offset: self.offset,
            length: self.size,
            sink_offset: place * place_bytes(self.size),
        };
        self.offset += place_bytes(self.size);
        if let Some(asked) = self.asked.get_mut(place as usize) {
            *asked = now;
        }
        request
    }

    fn took(&mut self, place: u64, now: Instant) {
        let Some(asked) = self.asked.get(place as usize).filter(|_| self.nanos.len() < MOST_SAMPLES) else { return };
        self.nanos.push(u64::try_from((now - *asked).as_nanos()).unwrap_or(u64::MAX));
    }

    fn cell(mut self, reads: u64, elapsed: Duration) -> Cell {
        self.nanos.sort_unstable();
        let at = |hundredths: usize| {
            let index = (self.nanos.len() * hundredths / 100).min(self.nanos.len().saturating_sub(1));
            Duration::from_nanos(self.nanos.get(index).copied().unwrap_or(0))
        };
        Cell { size: self.size, depth: self.depth, reads, elapsed, median: at(50), p99: at(99) }
    }
}

/// Bytes of a place in the sink. Reads are at least a page apart.
pub fn place_bytes(size: u32) -> u64 {
    u64::from(size).next_multiple_of(PAGE_BYTES)
}

const PAGE_BYTES: u64 = 4096;

/// The size of large reads, as those that read a region once beforehand.
pub const WARM_BYTES: u32 = 1 << 20;

/// How many of them are in flight.
pub const WARM_DEPTH: usize = 4;

/// The longest sleep: then the clock is read again.
const PATIENCE: Duration = Duration::from_millis(100);

/// The most times that are kept for one figure: enough for its percentiles, and at most 8 MiB. Later reads are counted
/// and not timed.
const MOST_SAMPLES: usize = 1 << 20;

/// Room for this many times from the beginning, so that reads do not pay for allocations.
const FIRST_SAMPLES: usize = 1 << 16;

// Meter: how far a transfer is, for the progress bar, the source and the hand-off.

/// Counters that the thread which reads writes, and other tasks read. Bytes and slots count the snapshot; offsets are
/// replication offsets.
#[derive(Default)]
pub struct Meter {
    /// Slots that have arrived and match their checksums.
    pub slots_held: Count,
    /// The first slot that is still needed from the source.
    pub slots_below: Count,
    /// Bytes of the snapshot that have arrived.
    pub bytes_fetched: Count,
    /// Bytes of the snapshot given to the server.
    pub bytes_delivered: Count,
    /// Bytes of all payloads that the server was given, their headers included. Never set back.
    pub bytes_given: Count,
    /// 1 once the server was given the end of a payload. Never set back.
    pub end_given: Count,
    /// Bytes that the source has published so far.
    pub bytes_known: Count,
    /// Slots of the whole snapshot; 0 while unknown.
    pub slots_total: Count,
    /// 1 once the server's module was given memory.
    pub by_module: Count,
    /// Bytes that it loaded from there.
    pub referred: Count,
    /// Why the server does not load in the fast way; empty if it does, or if that is not decided yet.
    no_fast_keys: Mutex<String>,
    /// The oldest slot of a copy that others may read.
    pub copy_oldest: Count,
    /// 1 while a copy waits for its own server.
    pub copy_full: Count,
    /// The session of the replica that slots come from; 0: from the source.
    pub reads_from: Count,
    /// The last byte of the stream that has arrived.
    pub stream_fetched: Count,
    /// 1 while the stream is not read, because too much of it waits for the server: its end is not known then.
    pub stream_paused: Count,
    /// Bytes that the source can write to its journal until it overwrites what is needed next. As of the last look
    /// while the stream was not read; 0 before.
    pub journal_left: Count,
    /// What it has written by then since the journal began.
    pub journal_written: Count,
    /// The last byte of the stream given to the server.
    pub stream_delivered: Count,
    /// The last byte of the stream that the server acknowledged.
    pub acknowledged: Count,
    /// Connections to the link's port that were closed before they had logged in.
    pub strangers: Count,
}

impl Meter {
    /// Why the server does not load in the fast way; empty if it does.
    pub fn set_no_fast_keys(&self, why: &str) {
        why.clone_into(&mut self.no_fast_keys.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Why the server does not load in the fast way; empty if it does, or if that is not decided yet.
    pub fn no_fast_keys(&self) -> String {
        self.no_fast_keys.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts bytes of a payload that the server was given, and returns their number.
    pub fn give(&self, bytes: usize) -> usize {
        self.bytes_given.add(bytes as u64);
        bytes
    }
}

/// A number with one writer.
#[derive(Default)]
pub struct Count(AtomicU64);

impl Count {
    /// The number.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Sets the number.
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// Adds to the number.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }
}
