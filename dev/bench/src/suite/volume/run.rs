//! A run: every case with every subject in turn, round by round.

use std::ffi::OsStr;
use std::time::Duration;

use remora_lab::RdmaVm;
use remora_lab::ring_allowed::RingAllowed;

use super::cases::{Case, Figures, Point, Subject};
use super::memory_files::Transport;
use super::options::{NAME, Options, Part};
use super::place::Place;
use super::{connections, files, goals, set, tables};
use crate::suite::{Budget, Kept};
use crate::sync::{Program, Result, available_memory};

/// Runs the subcommand. Returns whether every target was met for which there are figures, and nothing has failed.
///
/// # Errors
/// The run could not be kept, or the command `remora` not be built. What cannot be measured is noted.
pub fn run(options: &Options) -> Result<bool> {
    if options.emulated {
        return emulated(options);
    }
    let mut bench = Bench { options, kept: Kept::begin(NAME, options.label.as_deref()), is_well: true };
    let budget = Budget::of(options.budget_minutes);
    let mib = options.file_mib(available_memory().unwrap_or(0));
    let needs_files = options.has(Part::Files) || options.has(Part::Set);
    let _allowed = if needs_files { bench.allow_ring() } else { None };
    let subjects = if needs_files { bench.mount(mib)? } else { Vec::new() };
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        bench.round(round, &subjects, mib, budget.part(options.rounds - round))?;
    }
    if options.has(Part::Connections) && !options.no_rdma && !RdmaVm::is_here() {
        bench.emulated();
    }
    bench.kept.keep(options.out.as_deref(), &tables::tables(&[&bench.kept]))?;
    print!("{}", tables::tables(&[&bench.kept]));
    Ok(bench.is_well && goals::are_kept(Figures(&bench.kept.points)))
}

/// Runs this command in an emulated machine, which keeps the run.
fn emulated(options: &Options) -> Result<bool> {
    let mut machine = RdmaVm::ready()?.nodes(EMULATED_NODES).limit(EMULATED_TIME);
    if let Some(out) = &options.out {
        std::fs::create_dir_all(out)?;
        machine = machine.writable(&out.canonicalize()?);
    }
    let program = std::env::current_exe()?.to_string_lossy().into_owned();
    let remora = format!("REMORA={}", Program::build()?.path().display()); // there is no cargo in the machine
    let typed = std::env::args().skip(1).filter(|word| word != "--emulated");
    let command: Vec<String> = ["env".to_owned(), remora, program].into_iter().chain(typed).collect();
    let ran = machine.run(&command.iter().map(String::as_str).collect::<Vec<_>>())?;
    print!("{}", String::from_utf8_lossy(&ran.stdout));
    match ran.status.code() {
        Some(0) => Ok(true),
        // It has printed its figures, and could not measure one.
        Some(1) if !ran.stdout.is_empty() => Ok(false),
        _ => Err(format!("the emulated machine: {}", String::from_utf8_lossy(&ran.stderr).trim()).into()),
    }
}

struct Bench<'a> {
    options: &'a Options,
    kept: Kept<Point>,
    /// Nothing has failed that could be tried.
    is_well: bool,
}

impl Bench<'_> {
    fn allow_ring(&mut self) -> Option<RingAllowed> {
        if self.options.transport == Transport::Device {
            self.kept.note("The kernel asks Remora and the floor of FUSE by /dev/fuse.");
            return None;
        }
        match RingAllowed::new() {
            Ok(allowed) => {
                self.kept
                    .note("The kernel asks Remora and the floor of FUSE by io_uring, which was allowed for this run.");
                Some(allowed)
            }
            Err(why) => {
                self.kept.note(format!("FUSE has no io_uring here ({why}): the kernel asks by /dev/fuse."));
                None
            }
        }
    }

    /// Mounts all of them, and writes their files once.
    fn mount(&mut self, mib: u64) -> Result<Vec<(Subject, Place)>> {
        let program = Program::build()?;
        let own = std::env::current_exe()?;
        let settings: [(&str, &OsStr); 3] = [
            ("REMORA", program.path().as_os_str()),
            ("BENCH", own.as_os_str()),
            ("TRANSPORT", OsStr::new(self.options.transport.word())),
        ];
        // Each number of jobs has files of its own.
        let room = if self.options.has(Part::Files) { mib * self.options.jobs.len() as u64 } else { 0 };
        let mut places = Vec::new();
        for &subject in &self.options.subjects {
            let name = subject.name();
            let mounted = Place::start(subject, room, &settings).and_then(|place| {
                if self.options.has(Part::Files) {
                    files::fill(&place, subject, &self.options.jobs, mib)?;
                }
                Ok(place)
            });
            match mounted {
                Ok(place) => places.push((subject, place)),
                Err(error) => self.kept.note(format!(
                    "{name} is LEFT OUT: {error}. `dev/lab/setup/setup --rivals` installs all rivals; mounts need root"
                )),
            }
        }
        if places.iter().any(|(subject, _)| subject.is_emulated()) {
            self.kept.note(EMULATED);
        }
        if self.options.has(Part::Files) {
            let at_most = self.options.millis;
            self.kept.note(format!(
                "The files of a cell have {mib} MiB, shared among its jobs, not 500 MiB each: all subjects are in this \
                 machine's memory at a time. A measurement takes {at_most} ms at most."
            ));
        }
        Ok(places)
    }

    /// Every case that still fits, with each subject in turn. Another one is first in each round.
    fn round(&mut self, round: usize, subjects: &[(Subject, Place)], mib: u64, budget: Budget) -> Result<()> {
        let time = Duration::from_millis(self.options.millis);
        let mut left_out: Vec<String> = Vec::new();
        for case in self.options.cases() {
            if !budget.has((time + BESIDE) * subjects.len() as u32) {
                left_out.push(case.to_string());
                continue;
            }
            for turn in 0..subjects.len() {
                let (subject, place) = &subjects[(round + turn) % subjects.len()];
                if !subject.suits(case) {
                    continue;
                }
                match measure(*subject, place, case, (round, mib, time)) {
                    Ok(point) => {
                        eprintln!("{case}, {}: {:.1} {}", subject.name(), point.value, point.unit);
                        self.kept.points.push(point);
                    }
                    Err(error) => self.failed(&format!("round {}, {case}, {}", round + 1, subject.name()), &*error),
                }
            }
            self.kept.keep(self.options.out.as_deref(), &tables::tables(&[&self.kept]))?;
        }
        if self.options.has(Part::Connections) {
            let by_tcp = connections::tcp(round);
            self.note_or_add("new connections by TCP", by_tcp);
            if RdmaVm::is_here() {
                let by_rdma = connections::rdma(round);
                self.note_or_add("new connections by RDMA", by_rdma);
            }
        }
        if !left_out.is_empty() {
            self.kept.note(format!("Round {}: left out for lack of time: {}", round + 1, left_out.join("; ")));
        }
        self.kept.keep(self.options.out.as_deref(), &tables::tables(&[&self.kept]))
    }

    fn emulated(&mut self) {
        match connections::emulated(self.options.rounds) {
            Ok(points) => {
                self.kept
                    .note("RDMA is Soft-RoCE in an emulated machine: compare it only with TCP in the same machine.");
                self.kept.points.extend(points);
            }
            Err(error) => self.kept.note(format!("new connections by RDMA are LEFT OUT: {error}")),
        }
    }

    fn note_or_add(&mut self, what: &str, measured: Result<Point>) {
        match measured {
            Ok(point) => self.kept.points.push(point),
            Err(error) => self.failed(what, &*error),
        }
    }

    fn failed(&mut self, what: &str, error: &dyn std::error::Error) {
        self.is_well = false;
        self.kept.note(format!("{what}: failed: {error}"));
    }
}

/// One figure.
fn measure(subject: Subject, place: &Place, case: Case, (round, mib, time): (usize, u64, Duration)) -> Result<Point> {
    let point = Point {
        subject: subject.name().to_owned(),
        case: case.to_string(),
        round,
        value: 0.0,
        unit: case.unit().to_owned(),
        operations: 0.0,
        p99_us: None,
        seconds: 0.0,
        cpu_seconds: 0.0,
    };
    Ok(match case {
        Case::Files(cell) => {
            let measured = files::measure(place, subject, &cell, mib, time)?;
            Point {
                value: measured.megabytes_per_second,
                operations: measured.operations,
                p99_us: measured.p99_us,
                seconds: measured.seconds,
                cpu_seconds: measured.cpu_seconds,
                ..point
            }
        }
        Case::OneClient | Case::ManyClients => {
            let measured = set::Server::start(place, &round.to_string())?.measure(case, time)?;
            Point {
                value: if case == Case::OneClient { measured.median_us } else { measured.per_second },
                operations: measured.operations,
                p99_us: Some(measured.p99_us),
                seconds: measured.operations / measured.per_second,
                cpu_seconds: measured.cpu_seconds,
                ..point
            }
        }
    })
}

const EMULATED: &str = "RDMA is Soft-RoCE in an emulated machine, which shows that it works, and how the two ways compare there: no \
                        figure says how fast a network card is. Compare them only with each other.";

/// The mount and three servers.
const EMULATED_NODES: u8 = 4;

/// Time limit for booting an emulated machine and measuring in it: five rounds of 16 cells of two ways take ten minutes
/// where two processors emulate it.
const EMULATED_TIME: Duration = Duration::from_secs(30 * 60);

/// What a measurement takes besides its time: the start of fio or of a server, and a first look at the rate.
const BESIDE: Duration = Duration::from_millis(1200);
