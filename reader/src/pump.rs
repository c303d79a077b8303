//! Pump: measures how fast a region is read: a number of reads is kept in flight for a time, and each read is timed.
//!
//! The region is read from front to back again and again, each read from a page of its own, as the parts of a table
//! are.

use std::time::{Duration, Instant};

use remora_fabric::{Completion, Error, Peer, ReadError, ReadRequest};

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
