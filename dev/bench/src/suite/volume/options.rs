//! The command line.

use std::path::PathBuf;

use clap::ValueEnum;

use super::cases::{Case, Cell, Pattern, Subject};
use super::goals;
use super::memory_files::Transport;
use crate::suite::minutes;

/// The subcommand's name, and that of its kept runs.
pub const NAME: &str = "volume";

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Rounds; figures are medians over them. Each measures every case of every subject in turn.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Time limit in minutes. What does not fit is left out, cases without a target first, and the kept run lists it.
    #[arg(long, value_parser = minutes)]
    pub budget_minutes: Option<f64>,
    /// What to measure.
    #[arg(long, value_delimiter = ',', default_value = "set,files,connections")]
    pub parts: Vec<Part>,
    /// File systems to measure.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "remora-tcp,remora-shm,gluster,moosefs,bindfs,nbdfuse,memory,disk"
    )]
    pub subjects: Vec<Subject>,
    /// Files: past the kernel's page cache (1), or by it (0).
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u8).range(0..=1), default_value = "1,0")]
    pub direct: Vec<u8>,
    /// Files: what fio does.
    #[arg(long, value_delimiter = ',', default_value = "write,randwrite,read,randread")]
    pub patterns: Vec<Pattern>,
    /// Files: KiB of a request.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=16384), default_value = "4,64,128,1024")]
    pub blocks_kib: Vec<u64>,
    /// Files: threads, each with a file of its own.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=64), default_value = "1,8,32")]
    pub jobs: Vec<u32>,
    /// Only cases that have a target.
    #[arg(long)]
    pub goals_only: bool,
    /// Milliseconds for each measurement, at most. Writes to the page cache take longer, by the `fsync` at their end.
    #[arg(long, value_parser = clap::value_parser!(u64).range(50..=600_000), default_value_t = 1000)]
    pub millis: u64,
    /// MiB of the files of one cell, all jobs together. Default: what half of the free memory has room for, 32 to 1024.
    #[arg(long, value_parser = clap::value_parser!(u64).range(16..=65_536))]
    pub mib: Option<u64>,
    /// How the kernel asks Remora, and the floor of FUSE, for files. By io_uring it needs Linux 6.14; it is allowed for
    /// the time of the run.
    #[arg(long, default_value = "ring")]
    pub transport: Transport,
    /// Run the same, with these options, in an emulated machine (dev/lab/rdma-vm) that has RDMA devices: subjects
    /// `emulated-rdma` and `emulated-tcp`, `--transport device`.
    #[arg(long)]
    pub emulated: bool,
    /// Connections: leave out those by RDMA, which need an emulated machine (dev/lab/rdma-vm) and half a minute.
    #[arg(long)]
    pub no_rdma: bool,
    /// Keep the run in a new folder below this one.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// A label at the end of that folder's name, for runs that are shown beside each other.
    #[arg(long)]
    pub label: Option<String>,
}

/// A part of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// SETs of a Redis server with `appendfsync always`.
    Set,
    /// Reads and writes by fio.
    Files,
    /// New connections.
    Connections,
}

impl Options {
    pub(super) fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// What is measured of mounted file systems, what has a target first.
    pub(super) fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        if self.has(Part::Set) {
            cases.extend([Case::OneClient, Case::ManyClients]);
        }
        if self.has(Part::Files) {
            for direct in self.direct.iter().map(|direct| *direct == 1) {
                for &jobs in &self.jobs {
                    for block in self.blocks_kib.iter().map(|kib| kib << 10) {
                        let cell = |&pattern| Case::Files(Cell { direct, pattern, block, jobs });
                        cases.extend(self.patterns.iter().map(cell));
                    }
                }
            }
        }
        let (first, rest): (Vec<Case>, Vec<Case>) = cases.into_iter().partition(|case| goals::concern(*case));
        if self.goals_only { first } else { first.into_iter().chain(rest).collect() }
    }

    /// Megabytes of the files of one cell.
    pub(super) fn file_mib(&self, available: u64) -> u64 {
        let most_jobs = u64::from(self.jobs.iter().copied().max().unwrap_or(1));
        let copies: u64 = self.subjects.iter().map(|subject| subject.copies()).sum();
        // Each number of jobs has files of its own.
        let files = (self.jobs.len() as u64 * copies.max(1)).max(1);
        let mib = self.mib.unwrap_or_else(|| ((available >> 20) / 2 / files).clamp(32, 1024));
        (mib / most_jobs).max(1) * most_jobs
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn options(typed: &[&str]) -> Options {
        Cli::try_parse_from(["volume"].iter().chain(typed)).unwrap().options
    }

    #[test]
    fn every_cell_is_measured_and_those_with_a_target_first() {
        let cases = options(&[]).cases();
        assert_eq!(cases.len(), 2 + 2 * 4 * 4 * 3);
        let without = cases.iter().position(|case| !goals::concern(*case)).unwrap();
        assert!(cases[without..].iter().all(|case| !goals::concern(*case)));
        assert_eq!(options(&["--goals-only"]).cases().len(), without);
    }

    #[test]
    fn files_fit_into_half_of_the_memory_and_every_job_has_as_much() {
        let three = options(&["--subjects", "remora-tcp,bindfs", "--jobs", "1,8,32"]);
        assert_eq!(three.file_mib(6 << 30), 256);
        assert_eq!(three.file_mib(0), 32);
        assert_eq!(options(&["--mib", "50", "--jobs", "8"]).file_mib(0), 48);
    }
}
