//! What is measured, the file systems that are measured, and the figures.

use std::fmt;
use std::fmt::Write as _;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{Spread, Target, bytes};

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

/// What is measured of connections, in the tables.
pub const CONNECTION: &str = "new connection";

/// TCP on this host.
pub const TCP: &str = "TCP";
/// TCP in the emulated machine.
pub const EMULATED_TCP: &str = "TCP, emulated";
/// RDMA in the emulated machine.
pub const EMULATED_RDMA: &str = "RDMA, emulated";

// What must be reached: ratios within one run, as medians over its rounds.

/// A target: a figure of ours in multiples of another subject's, in the same round.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    case: Case,
    ours: Subject,
    rival: Subject,
    target: Target,
}

impl Goal {
    const fn new(case: Case, ours: Subject, rival: Subject, target: Target) -> Goal {
        Goal { case, ours, rival, target }
    }

    fn is_kept(&self, ratio: Spread) -> bool {
        self.target.is_met(Some(ratio))
    }
}

const fn cell(direct: bool, pattern: Pattern, block: u64, jobs: u32) -> Case {
    Case::Files(Cell { direct, pattern, block, jobs })
}

const SMALL: u64 = 4 << 10;
const LARGE: u64 = 1 << 20;

/// All targets. Ours is the volume by TCP, unless shared memory is what the target is about.
const GOALS: [Goal; 22] = {
    use Case::{ManyClients, OneClient};
    use Pattern::{Randread, Randwrite, Read, Write};
    use Subject::{Bindfs, Disk, Gluster, Memory, Moosefs, Nbdfuse, RemoraShm, RemoraTcp};
    [
        Goal::new(OneClient, RemoraTcp, Gluster, Target::most(0.15)),
        Goal::new(OneClient, RemoraTcp, Moosefs, Target::most(0.15)),
        Goal::new(OneClient, RemoraTcp, Disk, Target::most(0.35)),
        Goal::new(ManyClients, RemoraTcp, Gluster, Target::least(2.0)),
        Goal::new(ManyClients, RemoraTcp, Disk, Target::least(1.5)),
        Goal::new(cell(true, Randwrite, SMALL, 1), RemoraTcp, Gluster, Target::least(4.0)),
        Goal::new(cell(true, Randwrite, SMALL, 8), RemoraTcp, Gluster, Target::least(5.0)),
        Goal::new(cell(true, Randwrite, SMALL, 1), RemoraTcp, Moosefs, Target::least(1.5)),
        Goal::new(cell(true, Randwrite, SMALL, 8), RemoraTcp, Moosefs, Target::least(1.5)),
        Goal::new(cell(true, Randread, SMALL, 1), RemoraTcp, Gluster, Target::least(5.0)),
        Goal::new(cell(true, Randread, SMALL, 1), RemoraShm, Gluster, Target::least(12.0)),
        Goal::new(cell(true, Randread, SMALL, 1), RemoraShm, Memory, Target::least(0.8)),
        Goal::new(cell(true, Write, LARGE, 1), RemoraTcp, Gluster, Target::least(3.0)),
        Goal::new(cell(true, Write, LARGE, 8), RemoraTcp, Gluster, Target::least(3.0)),
        Goal::new(cell(true, Write, LARGE, 1), RemoraTcp, Moosefs, Target::least(0.6)),
        Goal::new(cell(true, Write, LARGE, 8), RemoraTcp, Moosefs, Target::least(1.3)),
        Goal::new(cell(false, Write, LARGE, 1), RemoraTcp, Gluster, Target::least(5.0)),
        Goal::new(cell(false, Write, LARGE, 1), RemoraTcp, Moosefs, Target::least(2.0)),
        Goal::new(cell(false, Write, LARGE, 1), RemoraTcp, Bindfs, Target::least(2.0)),
        Goal::new(cell(true, Read, LARGE, 1), RemoraTcp, Gluster, Target::least(2.0)),
        Goal::new(cell(true, Read, LARGE, 1), RemoraTcp, Moosefs, Target::least(2.0)),
        Goal::new(cell(true, Read, LARGE, 1), RemoraTcp, Nbdfuse, Target::least(1.3)),
    ]
};

/// Whether a target is about this case.
pub fn concern(case: Case) -> bool {
    GOALS.iter().any(|goal| goal.case == case)
}

/// All targets for which there are figures, as a table.
pub fn table(figures: Figures<'_>) -> String {
    let mut out =
        String::from("| case | ours | rival | bound | ratio: median (least–most) | |\n|---|---|---|---:|---:|---|\n");
    for (goal, ratio) in measured(figures) {
        let bound = goal.target;
        let verdict = if goal.is_kept(ratio) { "kept" } else { "**not kept**" };
        let Spread { median, low, high } = ratio;
        let (ours, rival) = (goal.ours.name(), goal.rival.name());
        let _ = writeln!(
            out,
            "| {} | {ours} | {rival} | {bound} | {median:.2} ({low:.2}–{high:.2}) | {verdict} |",
            goal.case
        );
    }
    out
}

/// Whether every target is met for which there are figures.
pub fn are_kept(figures: Figures<'_>) -> bool {
    measured(figures).all(|(goal, ratio)| goal.is_kept(ratio))
}

fn measured(figures: Figures<'_>) -> impl Iterator<Item = (&'static Goal, Spread)> {
    let ratio = move |goal: &Goal| figures.ratio(goal.ours.name(), goal.rival.name(), &goal.case.to_string());
    GOALS.iter().filter_map(move |goal| Some((goal, ratio(goal)?)))
}

// The measurement to stand beside: CubeFS over RDMA and over TCP, by ConnectX-5, three copies.
//
// ```text
// fio --directory=MOUNT --direct=1 -iodepth 1 --thread --rw=read --ioengine=libaio --bs=4k --size=500M --numjobs=32
//     -group_reporting -name=testfile10
// ```
//
// MB/s, as they were published, for each block size in order. `None`: not published.

/// MB/s by RDMA, by TCP.
type Pair = Option<(f64, f64)>;

/// Past the page cache or not, threads, what was done, and the four block sizes.
type Row = (bool, u32, Pattern, [Pair; 4]);

/// What they reached in this cell, by RDMA and by TCP.
pub fn published(cell: &Cell) -> Pair {
    let column = BLOCKS_KIB.iter().position(|kib| kib << 10 == cell.block)?;
    let is_it = |row: &&Row| (row.0, row.1, row.2) == (cell.direct, cell.jobs, cell.pattern);
    TABLE.iter().find(is_it)?.3[column]
}

/// Their block sizes.
pub const BLOCKS_KIB: [u64; 4] = [4, 64, 128, 1024];

const TABLE: [Row; 16] = {
    use Pattern::{Randread, Randwrite, Read, Write};
    const fn both(rdma: f64, tcp: f64) -> Pair {
        Some((rdma, tcp))
    }
    [
        (true, 1, Write, [both(16.5, 15.3), None, both(202.0, 140.0), both(153.0, 136.0)]),
        (true, 1, Randwrite, [both(4.67, 4.53), None, both(116.0, 123.0), both(156.0, 153.0)]),
        (true, 32, Write, [both(216.0, 173.0), both(1548.0, 1592.0), both(2469.0, 2449.0), both(2611.0, 2432.0)]),
        (true, 32, Randwrite, [both(97.2, 102.0), both(1054.0, 982.0), both(1818.0, 1939.0), both(2449.0, 2004.0)]),
        (true, 1, Read, [both(35.8, 29.5), None, both(519.0, 395.0), both(581.0, 396.0)]),
        (true, 1, Randread, [both(32.8, 28.5), None, both(504.0, 406.0), both(542.0, 404.0)]),
        (true, 32, Read, [both(595.0, 604.0), both(4048.0, 3108.0), both(3808.0, 2815.0), both(3394.0, 2820.0)]),
        (true, 32, Randread, [both(526.0, 591.0), both(3029.0, 3099.0), both(3421.0, 3784.0), both(3678.0, 3697.0)]),
        (false, 1, Write, [both(74.1, 88.9), None, both(618.0, 841.0), both(567.0, 1000.0)]),
        (false, 1, Randwrite, [both(16.2, 14.3), None, None, both(144.0, 127.0)]),
        (false, 32, Write, [both(675.0, 956.0), None, both(1444.0, 3068.0), both(1289.0, 3072.0)]),
        (false, 32, Randwrite, [both(271.0, 251.0), None, None, both(1133.0, 1148.0)]),
        (false, 1, Read, [both(1039.0, 889.0), None, both(1387.0, 915.0), both(1263.0, 899.0)]),
        (false, 1, Randread, [both(37.1, 29.2), None, None, both(435.0, 332.0)]),
        (false, 32, Read, [both(2601.0, 2592.0), None, both(2971.0, 2446.0), both(2827.0, 2566.0)]),
        (false, 32, Randread, [both(346.0, 283.0), None, None, both(2985.0, 2362.0)]),
    ]
};

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

    #[test]
    fn a_target_is_met_by_the_median_of_the_rounds() {
        let case = Case::OneClient.to_string();
        let with = |ours: f64| {
            let rounds = [(0, ours), (1, 10.0), (2, 11.0)];
            let ours = rounds.map(|(round, value)| point(Subject::RemoraTcp.name(), &case, round, value));
            let rival = [0, 1, 2].map(|round| point(Subject::Gluster.name(), &case, round, 100.0));
            [ours, rival].concat()
        };
        assert!(are_kept(Figures(&with(90.0))));
        assert!(table(Figures(&with(90.0))).contains("| ≤ 0.15 | 0.11 (0.10–0.90) | kept |"));
        let mut slow = with(90.0);
        slow[1].value = 95.0;
        assert!(!are_kept(Figures(&slow)) && table(Figures(&slow)).contains("**not kept**"));
        assert!(are_kept(Figures(&[])), "nothing was measured");
    }

    #[test]
    fn a_cell_has_what_was_published_of_it() {
        let cell = Cell { direct: true, pattern: Pattern::Read, block: 128 << 10, jobs: 1 };
        assert_eq!(published(&cell), Some((519.0, 395.0)));
        assert_eq!(published(&Cell { block: 64 << 10, ..cell }), None);
        assert_eq!(published(&Cell { jobs: 8, ..cell }), None);
    }
}
