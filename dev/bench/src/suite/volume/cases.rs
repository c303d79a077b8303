//! What is measured, the file systems that are measured, and the figures.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{Spread, bytes};

/// A file system that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Subject {
    /// A volume with three copies, by messages over TCP.
    RemoraTcp,
    /// The same; blocks are read and taken by shared memory.
    RemoraShm,
    /// GlusterFS, three replicas.
    Gluster,
    /// MooseFS, the goal of three copies.
    Moosefs,
    /// A directory once more, by FUSE.
    Bindfs,
    /// A file in the memory of nbdkit, by FUSE and NBD.
    Nbdfuse,
    /// A file system in memory of one process, by our own FUSE: the floor.
    Memory,
    /// A directory of this machine's disk.
    Disk,
    /// In the emulated machine: a volume with three copies; blocks are read, and large writes taken, by RDMA.
    EmulatedRdma,
    /// There: the same by messages over TCP.
    EmulatedTcp,
}

impl Subject {
    /// The word by which the command line and the script know it.
    pub fn word(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Subject::RemoraTcp => "Remora, TCP",
            Subject::RemoraShm => "Remora, shm",
            Subject::Gluster => "GlusterFS",
            Subject::Moosefs => "MooseFS",
            Subject::Bindfs => "bindfs",
            Subject::Nbdfuse => "nbdfuse",
            Subject::Memory => "FUSE floor",
            Subject::Disk => "local disk",
            Subject::EmulatedRdma => "Remora, RDMA, emulated",
            Subject::EmulatedTcp => "Remora, TCP, emulated",
        }
    }

    /// How many times it holds a file.
    pub fn copies(self) -> u64 {
        match self {
            Subject::RemoraTcp | Subject::RemoraShm | Subject::Gluster | Subject::Moosefs => 3,
            Subject::EmulatedRdma | Subject::EmulatedTcp => 3,
            Subject::Bindfs | Subject::Nbdfuse | Subject::Memory => 1,
            Subject::Disk => 0, // not in memory
        }
    }

    /// Whether it runs in the emulated machine, whose figures are compared with each other only.
    pub fn is_emulated(self) -> bool {
        matches!(self, Subject::EmulatedRdma | Subject::EmulatedTcp)
    }

    /// Whether it can be asked for this. nbdfuse has a single file, and no directory for a server's files.
    pub fn suits(self, case: Case) -> bool {
        self != Subject::Nbdfuse || matches!(case, Case::Files(_))
    }
}

/// What fio does: its `--rw`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// One block after the other.
    Write,
    /// Any block.
    Randwrite,
    /// One block after the other.
    Read,
    /// Any block.
    Randread,
}

impl Pattern {
    /// fio's name of it.
    pub fn word(self) -> &'static str {
        match self {
            Pattern::Write => "write",
            Pattern::Randwrite => "randwrite",
            Pattern::Read => "read",
            Pattern::Randread => "randread",
        }
    }

    /// Whether it writes.
    pub fn writes(self) -> bool {
        matches!(self, Pattern::Write | Pattern::Randwrite)
    }
}

/// One cell of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Past the kernel's page cache.
    pub direct: bool,
    /// What is done.
    pub pattern: Pattern,
    /// Bytes of a request.
    pub block: u64,
    /// Threads, each with a file of its own and one request under way.
    pub jobs: u32,
}

impl fmt::Display for Cell {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { direct, pattern, block, jobs } = self;
        let (jobs_word, how) = (if *jobs == 1 { "job" } else { "jobs" }, if *direct { "direct" } else { "buffered" });
        write!(to, "{} {}, {jobs} {jobs_word}, {how}", pattern.word(), bytes(*block))
    }
}

/// One thing that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// By fio, in MB/s.
    Files(Cell),
    /// By redis-benchmark: the median latency of one client's SETs in µs.
    OneClient,
    /// The same: SETs a second of [`MANY_CLIENTS`].
    ManyClients,
}

impl fmt::Display for Case {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Files(cell) => cell.fmt(to),
            Case::OneClient => to.write_str("SET, 1 client"),
            Case::ManyClients => write!(to, "SET, {MANY_CLIENTS} clients"),
        }
    }
}

impl Case {
    /// The unit of its figures.
    pub fn unit(self) -> &'static str {
        match self {
            Case::Files(_) => "MB/s",
            Case::OneClient => "µs",
            Case::ManyClients => "requests/s",
        }
    }
}

/// Clients that write at a time, as in redis-benchmark's default.
pub const MANY_CLIENTS: u32 = 50;

/// One figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// The name of the file system, or of the transport of a connection.
    pub subject: String,
    /// What was done.
    pub case: String,
    /// The round, from 0.
    pub round: usize,
    /// The figure.
    pub value: f64,
    /// Its unit.
    pub unit: String,
    /// Requests, SETs or connections in the time.
    pub operations: f64,
    /// Their 99th percentile in µs, if the tool says it.
    pub p99_us: Option<f64>,
    /// Wall seconds.
    pub seconds: f64,
    /// Processor seconds of all processes: servers, mount, and client.
    pub cpu_seconds: f64,
}

/// The figures of one run.
#[derive(Clone, Copy)]
pub struct Figures<'a>(pub &'a [Point]);

impl<'a> Figures<'a> {
    /// All rounds of one thing.
    pub fn of(self, subject: &str, case: &str) -> impl Iterator<Item = &'a Point> {
        self.0.iter().filter(move |point| point.subject == subject && point.case == case)
    }

    /// The summary of its rounds.
    pub fn spread(self, subject: &str, case: &str) -> Option<Spread> {
        Spread::of(self.of(subject, case).map(|point| point.value))
    }

    /// One subject in multiples of another, in the rounds that have both.
    pub fn ratio(self, ours: &str, rival: &str, case: &str) -> Option<Spread> {
        let in_round = |round| self.of(rival, case).find(|point| point.round == round);
        Spread::of(self.of(ours, case).filter_map(|point| Some(point.value / in_round(point.round)?.value)))
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    pub(in super::super) fn point(subject: &str, case: &str, round: usize, value: f64) -> Point {
        Point {
            subject: subject.to_owned(),
            case: case.to_owned(),
            round,
            value,
            unit: "MB/s".to_owned(),
            operations: 1000.0,
            p99_us: None,
            seconds: 1.0,
            cpu_seconds: 0.5,
        }
    }

    #[test]
    fn a_ratio_is_of_the_rounds_that_have_both() {
        let points = [("a", 0, 2.0), ("a", 1, 9.0), ("a", 2, 4.0), ("b", 0, 1.0), ("b", 2, 4.0)];
        let points = points.map(|(subject, round, value)| point(subject, "case", round, value));
        let ratio = Figures(&points).ratio("a", "b", "case").unwrap();
        assert_eq!((ratio.low, ratio.high), (1.0, 2.0));
        assert_eq!(Figures(&points).ratio("a", "b", "other"), None);
    }

    #[test]
    fn a_case_says_what_fio_is_told() {
        let cell = Cell { direct: true, pattern: Pattern::Randwrite, block: 4096, jobs: 8 };
        assert_eq!(Case::Files(cell).to_string(), "randwrite 4 KiB, 8 jobs, direct");
        assert_eq!(Cell { direct: false, jobs: 1, ..cell }.to_string(), "randwrite 4 KiB, 1 job, buffered");
    }
}
