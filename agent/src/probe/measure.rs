//! Measures one transport: a number of reads is kept in flight for a time, and each read is timed.
//!
//! The region is read from front to back again and again, each read from a page of its own, as the parts of a table
//! are. Before the first figure the region is read once (for no longer than some figures take), so that no figure
//! includes first-time costs.

use std::time::{Duration, Instant};

use remora_fabric::{Completion, Error, Peer, ReadError, ReadRequest};

use super::Outcome;
use crate::args::ProbeArgs;

/// What to measure.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Bytes of one read, ascending.
    pub(super) sizes: Vec<u32>,
    /// Reads in flight at once, ascending.
    pub(super) depths: Vec<usize>,
    /// How long each size is read at each depth.
    pub(super) time: Duration,
    /// The time limit of the whole measurement.
    pub(super) limit: Duration,
}

/// The figures for one size at one depth.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    /// Bytes of one read.
    pub(super) size: u32,
    /// Reads in flight at once.
    pub(super) depth: usize,
    /// Reads that completed.
    pub(super) reads: u64,
    /// The time from the first request to the last byte.
    pub(super) elapsed: Duration,
    /// The median time from a read's request to its last byte.
    pub(super) median: Duration,
    /// The time within which 99 of 100 reads completed.
    pub(super) p99: Duration,
}

impl Plan {
    pub(super) fn new(args: &ProbeArgs) -> Plan {
        let mut sizes: Vec<u32> = args.sizes.iter().map(|size| u32::try_from(size.get()).unwrap_or(u32::MAX)).collect();
        let mut depths: Vec<usize> = args.depths.iter().map(|depth| usize::from(*depth)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        depths.sort_unstable();
        depths.dedup();
        Plan { sizes, depths, time: args.time, limit: args.limit }
    }

    /// Bytes of memory that all reads in flight at once need.
    pub(super) fn sink_bytes(&self) -> u64 {
        let largest = self.sizes.last().copied().unwrap_or(1).max(WARM_BYTES);
        place_bytes(largest) * self.depths.last().copied().unwrap_or(1).max(WARM_DEPTH) as u64
    }

    /// The number of figures per transport.
    pub(super) fn cells(&self) -> usize {
        self.sizes.len() * self.depths.len()
    }
}

impl Cell {
    pub(super) fn bytes_per_second(&self) -> f64 {
        self.reads as f64 * f64::from(self.size) / self.elapsed.as_secs_f64().max(1e-9)
    }

    pub(super) fn reads_per_second(&self) -> f64 {
        self.reads as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Measures all sizes at all depths, small sizes first, until `deadline`.
pub(super) fn transport(peer: &mut dyn Peer, region: u64, plan: &Plan, deadline: Instant) -> Outcome {
    let mut cells = Vec::new();
    let measured = (|| {
        let warm = Pump::new(WARM_BYTES, WARM_DEPTH, region, WARM_TIMES * plan.time, deadline);
        warm.once_around().run(peer)?;
        for (size, depth) in plan.sizes.iter().flat_map(|size| plan.depths.iter().map(move |depth| (*size, *depth))) {
            cells.push(Pump::new(size, depth, region, plan.time, deadline).run(peer)?);
        }
        Ok(())
    })();
    let trouble = measured.err().map(|why: Stopped| why.to_string());
    Outcome::Measured { cells, trouble }
}

/// Bytes per second of a transport that is read in large pieces, measured for a moment; `None` if it could not be
/// measured. The peer's sink must have [`MOMENT_SINK`] bytes.
pub(crate) fn in_a_moment(peer: &mut dyn Peer, region: u64) -> Option<u64> {
    let deadline = Instant::now() + MOMENT_LIMIT;
    let cell = Pump::new(WARM_BYTES, WARM_DEPTH, region, MOMENT, deadline).run(peer).ok()?;
    Some(cell.bytes_per_second() as u64).filter(|rate| *rate > 0)
}

/// How long a transport is read for that.
const MOMENT: Duration = Duration::from_millis(300);

/// How long that may take: what is in flight at the end may be late on a slow link.
const MOMENT_LIMIT: Duration = Duration::from_secs(10);

/// Bytes of memory for that.
pub(crate) const MOMENT_SINK: u64 = WARM_BYTES as u64 * WARM_DEPTH as u64;

/// Why a measurement ended early.
#[derive(Debug, thiserror::Error)]
enum Stopped {
    #[error("the time of --limit was over")]
    Late,
    #[error("{0}")]
    Peer(#[from] Error),
    #[error("a read failed: {0}")]
    Read(#[from] ReadError),
}

/// Keeps reads in flight.
struct Pump {
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
    fn new(size: u32, depth: usize, region: u64, time: Duration, deadline: Instant) -> Pump {
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

    fn once_around(self) -> Pump {
        Pump { most: self.region, ..self }
    }

    fn run(mut self, peer: &mut dyn Peer) -> Result<Cell, Stopped> {
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

/// Bytes of a place. Reads are at least a page apart.
fn place_bytes(size: u32) -> u64 {
    u64::from(size).next_multiple_of(PAGE_BYTES)
}

const PAGE_BYTES: u64 = 4096;

/// The size of the reads that read the region once beforehand, and for how many times the time of a figure they may
/// take.
const WARM_BYTES: u32 = 1 << 20;
const WARM_DEPTH: usize = 4;
const WARM_TIMES: u32 = 5;

/// The longest sleep: then the clock is read again.
const PATIENCE: Duration = Duration::from_millis(100);

/// The most times that are kept for one figure: enough for its percentiles, and at most 8 MiB. Later reads are counted
/// and not timed.
const MOST_SAMPLES: usize = 1 << 20;
/// Room for this many times from the beginning, so that reads do not pay for allocations.
const FIRST_SAMPLES: usize = 1 << 16;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use remora_fabric::shm::{ShmConnector, ShmExporter, ShmOptions};
    use remora_fabric::{Connector, Exporter, Memory, Pages, RegionId, Regions};

    use super::*;

    const REGION: u64 = 4 << 20;

    fn plan(time: Duration) -> Plan {
        Plan { sizes: vec![8, 5000], depths: vec![1, 3], time, limit: Duration::from_secs(60) }
    }

    fn peer() -> (ShmExporter, Box<dyn Peer>) {
        let exporter = ShmExporter::bind(ShmOptions::default()).unwrap();
        let id = RegionId { generation: 1, region: 2 };
        exporter.export(id, Arc::new(Memory::create("region", REGION, Pages::Small).unwrap())).unwrap();
        exporter.grant(1, [1; 32], Regions::All);
        let sink = Memory::create("sink", plan(Duration::ZERO).sink_bytes(), Pages::Small).unwrap();
        let peer = ShmConnector::new().connect(&exporter.key(id).unwrap(), 1, &[1; 32], Arc::new(sink)).unwrap();
        (exporter, peer)
    }

    #[test]
    fn each_size_is_measured_at_each_depth_and_the_figures_fit_one_another() {
        let (_exporter, mut peer) = peer();
        let plan = plan(Duration::from_millis(5));
        let Outcome::Measured { cells, trouble } = transport(&mut *peer, REGION, &plan, Instant::now() + plan.limit)
        else {
            panic!("not measured")
        };
        assert!(trouble.is_none(), "{trouble:?}");
        let shapes: Vec<(u32, usize)> = cells.iter().map(|cell| (cell.size, cell.depth)).collect();
        assert_eq!(shapes, [(8, 1), (8, 3), (5000, 1), (5000, 3)]);
        for cell in &cells {
            assert!(cell.reads > 0 && cell.elapsed >= plan.time, "{cell:?}");
            assert!(cell.median > Duration::ZERO && cell.median <= cell.p99 && cell.p99 <= cell.elapsed, "{cell:?}");
        }
    }

    #[test]
    fn when_the_time_is_over_the_rest_is_left_out_and_said_to_be() {
        let (_exporter, mut peer) = peer();
        let Outcome::Measured { cells, trouble } =
            transport(&mut *peer, REGION, &plan(Duration::from_secs(5)), Instant::now())
        else {
            panic!("not measured")
        };
        assert!(cells.is_empty(), "{cells:?}");
        assert!(trouble.unwrap().contains("--limit"));
    }
}
