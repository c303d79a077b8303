//! Shared by the programs under `bin/`: how figures are measured, summarised and kept. No figure is measured here.
//!
//! These rules hold for all programs:
//!
//! - **Ratios within one run.** The machine's speed changes by the hour. A figure is meaningful only beside its
//!   rival's, measured in turn with it, round by round. Claims are medians of the rounds' ratios.
//! - **Wall time and processor time.** If both ends share two cores, the wall clock says how long they waited for each
//!   other. The processor seconds of each side say what it cost.
//! - **Runs are kept** ([`Run`]): the command line, the machine, every single figure, and the summary.

#![deny(unsafe_code)] // but for one call in `cpu`

pub mod bars;
pub mod elsewhere;
pub mod mass;
pub mod messenger;
pub mod processors;
pub mod source;
pub mod suite;
pub mod sync;

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::Arc,
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, JoinHandle},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One measurement of one thing in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// The subject, e.g. `tcp` or its rival `iperf3`.
    pub subject: String,
    /// The circumstances, e.g. `1 MiB × 16`.
    pub case: String,
    /// The round, from 0.
    pub round: usize,
    /// The figure, in the unit of the run.
    pub value: f64,
    /// Processor seconds of the reading (or only) side.
    pub reader_cpu_seconds: f64,
    /// Processor seconds of the serving side, if there is one.
    pub source_cpu_seconds: f64,
    /// The data on which the processor seconds were spent, in GB (10⁹ bytes).
    pub gigabytes: f64,
}

impl Sample {
    /// A figure without processor time.
    pub fn new(subject: impl Into<String>, case: impl Into<String>, round: usize, value: f64) -> Sample {
        let (subject, case) = (subject.into(), case.into());
        Sample { subject, case, round, value, reader_cpu_seconds: 0.0, source_cpu_seconds: 0.0, gigabytes: 0.0 }
    }

    /// The same with processor seconds of both sides, spent on that many GB.
    pub fn cost(self, reader_cpu_seconds: f64, source_cpu_seconds: f64, gigabytes: f64) -> Sample {
        Sample { reader_cpu_seconds, source_cpu_seconds, gigabytes, ..self }
    }
}

/// The summary of several rounds of one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest.
    pub low: f64,
    /// The largest.
    pub high: f64,
}

impl Spread {
    /// The spread of `values`; `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut values: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        let (low, high) = (*values.first()?, *values.last()?);
        Some(Spread { median: quantile(&values, 0.5)?, low, high })
    }

    /// The ratios of the rounds that have both: each round with its value.
    pub fn of_ratios(
        ours: impl IntoIterator<Item = (usize, f64)>,
        rival: impl IntoIterator<Item = (usize, f64)>,
    ) -> Option<Spread> {
        let rival: HashMap<usize, f64> = rival.into_iter().collect();
        Spread::of(ours.into_iter().filter_map(|(round, value)| Some(value / rival.get(&round)?)))
    }

    /// The median with that many digits.
    pub fn median(self, digits: usize) -> String {
        format!("{:.digits$}", self.median)
    }

    /// The median, with the least and the greatest if they differ.
    pub fn range(self) -> String {
        let Spread { median, low, high } = self;
        if high - low < 0.005 { format!("{median:.2}") } else { format!("{median:.2} ({low:.2}–{high:.2})") }
    }

    /// A count, or the least and the greatest of the rounds.
    pub fn whole(self) -> String {
        if self.low == self.high { self.median(0) } else { format!("{:.0}–{:.0}", self.low, self.high) }
    }
}

/// A cell of a table: how the spread is written there, or that there is none.
pub fn cell(spread: Option<Spread>, write: impl Fn(Spread) -> String) -> String {
    spread.map_or("–".to_owned(), write)
}

/// The one with the least median.
pub fn least<T>(of: impl Iterator<Item = T>, spread: impl Fn(&T) -> Option<Spread>) -> Option<T> {
    let medians = of.filter_map(|one| Some((spread(&one)?.median, one)));
    medians.min_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, one)| one)
}

/// Whether all replicas that were compared are equal, in the word of a table.
pub fn equality(looked: impl IntoIterator<Item = Option<bool>>) -> &'static str {
    match looked.into_iter().flatten().reduce(|all, equal| all && equal) {
        None => "–",
        Some(true) => "yes",
        Some(false) => "**NO**",
    }
}

/// Each item once, in the order of their first.
pub fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut all = Vec::new();
    for item in items {
        if !all.contains(&item) {
            all.push(item);
        }
    }
    all
}

/// The value below which the share `q` of the `sorted` values is, interpolated between two values.
pub fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let place = q.clamp(0.0, 1.0) * sorted.len().checked_sub(1)? as f64;
    let below = sorted.get(place.floor() as usize)?;
    let above = sorted.get(place.ceil() as usize)?;
    Some(below + (above - below) * place.fract())
}

/// Processor time, of user and system together.
pub mod cpu {
    use std::{io, time::Duration};

    /// Processor time of this process so far, all threads together.
    pub fn of_self() -> io::Result<Duration> {
        usage(libc::RUSAGE_SELF)
    }

    /// Processor time of all children that have ended and were waited for, and of their children.
    pub fn of_ended_children() -> io::Result<Duration> {
        usage(libc::RUSAGE_CHILDREN)
    }

    #[allow(unsafe_code)]
    fn usage(who: libc::c_int) -> io::Result<Duration> {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
        // SAFETY: getrusage needs a valid pointer to a writable rusage; this one is of a local that outlives the call.
        if unsafe { libc::getrusage(who, usage.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a call that returned 0 has filled the whole struct.
        let usage = unsafe { usage.assume_init() };
        Ok(duration(usage.ru_utime) + duration(usage.ru_stime))
    }

    fn duration(time: libc::timeval) -> Duration {
        Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_micros(time.tv_usec.unsigned_abs())
    }
}

/// The machine, as a reader of a kept run needs it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The machine's name in kept runs: its size. Its host name is private.
    pub host: String,
    /// Model of the processor and number of processors.
    pub processor: String,
    /// Memory in GiB.
    pub memory: String,
    /// Kernel and distribution.
    pub system: String,
    /// TCP's default congestion control.
    pub congestion: String,
    /// Load average at the beginning.
    pub load: String,
}

impl Machine {
    /// This machine. Unknown facts are `?`.
    pub fn here() -> Machine {
        let file = |path: &str| fs::read_to_string(path).map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned());
        let field = |text: &str, name: &str, by: char| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_once(by)).map_or("?".to_owned(), |(_, value)| value.trim().replace('"', ""))
        };
        let processors = std::thread::available_parallelism().map_or(0, usize::from);
        let kilobytes: f64 =
            field(&file("/proc/meminfo"), "MemTotal", ':').trim_end_matches(" kB").parse().unwrap_or(0.0);
        // Figures of the emulated machine must not be mistaken for those of its host.
        let emulated = if std::env::var_os("RDMA_VM").is_some() { "-rdma-vm" } else { "" };
        Machine {
            host: format!("{processors}vcpu{emulated}"),
            processor: format!("{} × {}", processors, field(&file("/proc/cpuinfo"), "model name", ':')),
            memory: format!("{:.0} GiB", kilobytes / f64::from(1 << 20)),
            system: format!(
                "Linux {}, {}",
                file("/proc/sys/kernel/osrelease"),
                field(&file("/etc/os-release"), "PRETTY_NAME", '=')
            ),
            congestion: file("/proc/sys/net/ipv4/tcp_congestion_control"),
            load: file("/proc/loadavg"),
        }
    }
}

/// One run of a program: all of its figures, with the methods that print and keep them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The program.
    pub program: String,
    /// The unit of the values, e.g. `GB/s`.
    pub unit: String,
    /// The command line.
    pub command: String,
    /// The source's commit, `?` outside a repository.
    pub commit: String,
    /// Day of the run, UTC.
    pub date: String,
    /// The machine.
    pub machine: Machine,
    /// Notes for the reader, e.g. which rival was missing.
    pub notes: Vec<String>,
    /// Every figure.
    pub samples: Vec<Sample>,
    /// Subject and rival with their case, and the target of the ratio, if any.
    pub comparisons: Vec<Comparison>,
    /// Figures that have a target of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub goals: Vec<Goal>,
}

/// The comparison of two subjects that were measured in turn.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// Ours: subject and case.
    pub ours: (String, String),
    /// The rival: subject and case.
    pub rival: (String, String),
    /// The target of the ratio of ours to the rival's.
    #[serde(flatten)]
    pub target: Target,
    /// The ratios of the rounds.
    pub ratio: Option<Spread>,
}

impl Comparison {
    /// Whether the target is met. Without figures it is not.
    fn is_kept(&self) -> bool {
        self.target.is_met(self.ratio)
    }
}

/// A figure with a target of its own, without a rival.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Goal {
    /// The figure and its unit.
    pub what: String,
    /// Its target.
    #[serde(flatten)]
    pub target: Target,
    /// The values of the rounds.
    pub value: Option<Spread>,
}

impl Goal {
    /// Whether the target is met, by the median of the rounds. Without figures it is not.
    pub fn is_kept(&self) -> bool {
        self.target.is_met(self.value)
    }
}

/// The least or the greatest value that was promised of a figure or of a ratio, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Target {
    at_least: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    at_most: Option<f64>,
}

impl Target {
    /// Nothing was promised.
    pub const NONE: Target = Target { at_least: None, at_most: None };

    /// The least value, where more is better.
    pub const fn least(value: f64) -> Target {
        Target { at_least: Some(value), at_most: None }
    }

    /// The greatest value, where less is better.
    pub const fn most(value: f64) -> Target {
        Target { at_least: None, at_most: Some(value) }
    }

    /// Whether something was promised.
    pub fn is_some(self) -> bool {
        self != Target::NONE
    }

    /// Whether it is met, by the median of the rounds. Without figures it is not.
    pub fn is_met(self, value: Option<Spread>) -> bool {
        let Some(Spread { median, .. }) = value else { return !self.is_some() };
        self.at_least.is_none_or(|least| median >= least) && self.at_most.is_none_or(|most| median <= most)
    }

    /// The target and whether it is met, in the words of a table.
    fn verdict(self, value: Option<Spread>) -> String {
        match (self.is_some(), self.is_met(value)) {
            (false, _) => "–".to_owned(),
            (true, true) => format!("{self}: kept"),
            (true, false) => format!("{self}: **not kept**"),
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.at_least, self.at_most) {
            (Some(least), _) => write!(f, "≥ {least}"),
            (_, Some(most)) => write!(f, "≤ {most}"),
            (None, None) => f.write_str("–"),
        }
    }
}

impl Run {
    /// An empty run of `program`, whose values are in `unit`.
    pub fn new(program: &str, unit: &str) -> Run {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        Run {
            program: program.to_owned(),
            unit: unit.to_owned(),
            command: format!("{program} {}", arguments.join(" ")).trim_end().to_owned(),
            commit: said_by("git", &["describe", "--always", "--dirty"]),
            date: said_by("date", &["-u", "+%Y-%m-%d"]),
            machine: Machine::here(),
            notes: Vec::new(),
            samples: Vec::new(),
            comparisons: Vec::new(),
            goals: Vec::new(),
        }
    }

    /// Compares two things by the ratio in each round that has both.
    pub fn compare(&mut self, ours: (&str, &str), rival: (&str, &str), at_least: Option<f64>) {
        self.compare_within(ours, rival, at_least.map_or(Target::NONE, Target::least));
    }

    /// Compares two subjects where less is better.
    pub fn compare_less(&mut self, ours: (&str, &str), rival: (&str, &str), at_most: Option<f64>) {
        self.compare_within(ours, rival, at_most.map_or(Target::NONE, Target::most));
    }

    fn compare_within(&mut self, ours: (&str, &str), rival: (&str, &str), target: Target) {
        let owned = |(subject, case): (&str, &str)| (subject.to_owned(), case.to_owned());
        let ratio = Spread::of_ratios(self.rounds(ours), self.rounds(rival));
        self.comparisons.push(Comparison { ours: owned(ours), rival: owned(rival), target, ratio });
    }

    /// The samples of one thing.
    pub fn of(&self, subject: &str, case: &str) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(move |sample| sample.subject == subject && sample.case == case)
    }

    fn rounds(&self, (subject, case): (&str, &str)) -> impl Iterator<Item = (usize, f64)> {
        self.of(subject, case).map(|sample| (sample.round, sample.value))
    }

    /// Whether every target is met. A comparison or goal without figures meets none.
    pub fn keeps_promises(&self) -> bool {
        self.comparisons.iter().all(Comparison::is_kept) && self.goals.iter().all(Goal::is_kept)
    }

    /// The summary, as Markdown.
    pub fn summary(&self) -> String {
        let mut out = format!("# {} ({})\n\n", self.program, self.unit);
        let _ = writeln!(out, "| subject | case | median | low | high | reader CPU s/GB | source CPU s/GB |");
        let _ = writeln!(out, "|---|---|---:|---:|---:|---:|---:|");
        let cells = distinct(self.samples.iter().map(|sample| (sample.subject.as_str(), sample.case.as_str())));
        for (subject, case) in cells {
            let Some(value) = Spread::of(self.of(subject, case).map(|sample| sample.value)) else { continue };
            let per_gigabyte = |seconds: fn(&Sample) -> f64| {
                let each = self.of(subject, case).map(|sample| seconds(sample) / sample.gigabytes);
                cell(Spread::of(each), |spread| spread.median(3))
            };
            let _ = writeln!(
                out,
                "| {subject} | {case} | {:.2} | {:.2} | {:.2} | {} | {} |",
                value.median,
                value.low,
                value.high,
                per_gigabyte(|sample| sample.reader_cpu_seconds),
                per_gigabyte(|sample| sample.source_cpu_seconds),
            );
        }
        self.conclude(&mut out);
        out
    }

    /// Appends the comparisons, the goals and the notes to `out`, as Markdown.
    pub fn conclude(&self, out: &mut String) {
        let figures = |spread: Option<Spread>| {
            let three = |spread: Spread| format!("{:.2} | {:.2} | {:.2}", spread.median, spread.low, spread.high);
            spread.map_or("– | – | –".to_owned(), three)
        };
        if !self.goals.is_empty() {
            *out += "\n| figure | median | low | high | promised |\n|---|---:|---:|---:|---|\n";
        }
        for Goal { what, target, value } in &self.goals {
            let _ = writeln!(out, "| {what} | {} | {} |", figures(*value), target.verdict(*value));
        }
        if !self.comparisons.is_empty() {
            *out += "\n| ours | rival | ratio: median | low | high | promised |\n|---|---|---:|---:|---:|---|\n";
        }
        for Comparison { ours, rival, target, ratio } in &self.comparisons {
            let (ours, rival) = (format!("{} {}", ours.0, ours.1), format!("{} {}", rival.0, rival.1));
            let _ = writeln!(out, "| {ours} | {rival} | {} | {} |", figures(*ratio), target.verdict(*ratio));
        }
        *out += &self.quoted_notes();
    }

    /// The notes, as Markdown.
    pub fn quoted_notes(&self) -> String {
        self.notes.iter().map(|note| format!("\n> {note}\n")).collect()
    }

    /// Writes `<folder>/<date>-<host>-<program>/` with these files and a README.md that describes machine and command:
    /// for programs whose figures do not fit into a [`Sample`].
    pub fn keep_files(&self, folder: &Path, files: &[(&str, String)]) -> io::Result<PathBuf> {
        let folder = folder.join(format!("{}-{}-{}", self.date, self.machine.host, self.program));
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("README.md"), self.readme())?;
        for (name, content) in files {
            fs::write(folder.join(name), content)?;
        }
        Ok(folder)
    }

    fn readme(&self) -> String {
        let Machine { processor, memory, system, congestion, load, .. } = &self.machine;
        format!(
            "# {} on {}, {}\n\n- command: `{}`\n- commit: {}\n- processor: {processor}\n- memory: {memory}\n- system: {system}\n\
             - TCP's own congestion control: {congestion}\n- load at the beginning: {load}\n\n`raw.csv` has every figure, \
             `summary.md` their medians and ratios, `run.json` both.\n",
            self.program, self.machine.host, self.date, self.command, self.commit,
        )
    }
}

/// Where a run is kept.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Keep {
    /// Keep the run in a new folder below this one.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Write everything as JSON to this file.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

impl Keep {
    /// Writes a run: its summary, every figure as a line of a table, and both as JSON. Returns the folder.
    pub fn write<S: Serialize>(
        &self,
        run: &Run,
        summary: String,
        rows: &[S],
        all: &impl Serialize,
    ) -> io::Result<Option<PathBuf>> {
        let json = serde_json::to_string_pretty(all)?;
        if let Some(path) = &self.json {
            fs::write(path, &json)?;
        }
        let Some(folder) = &self.out else { return Ok(None) };
        run.keep_files(folder, &[("raw.csv", csv(rows)?), ("summary.md", summary), ("run.json", json)]).map(Some)
    }

    /// The same of a run that has samples only.
    pub fn keep(&self, run: &Run) -> io::Result<Option<PathBuf>> {
        self.write(run, run.summary(), &run.samples, run)
    }

    /// Ends a program with such a run: prints its summary and keeps it.
    pub fn finish(&self, run: &Run) -> io::Result<ExitCode> {
        print!("{}", run.summary());
        self.said(self.keep(run)?);
        Ok(if run.keeps_promises() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Says where a run was kept.
    pub fn said(&self, folder: Option<PathBuf>) {
        folder.iter().for_each(|folder| println!("\nkept in {}", folder.display()));
    }
}

/// Rows as a table between commas: the fields are the columns.
pub fn csv<S: Serialize>(rows: &[S]) -> io::Result<String> {
    let mut text = String::new();
    for row in rows {
        let Value::Object(fields) = serde_json::to_value(row)? else { continue };
        if text.is_empty() {
            text += &(fields.keys().cloned().collect::<Vec<_>>().join(",") + "\n");
        }
        text += &(fields.values().map(between_commas).collect::<Vec<_>>().join(",") + "\n");
    }
    Ok(text)
}

fn between_commas(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.replace(',', ""),
        Value::Array(items) => items.iter().map(between_commas).collect::<Vec<_>>().join(" "),
        Value::Object(fields) => {
            let named = fields.iter().map(|(name, value)| format!("{name}={}", between_commas(value)));
            named.collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}

/// A thread that goes on until it is ended; dropping it ends it.
#[derive(Debug)]
pub struct Background<T> {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Background<T> {
    /// Starts one. `work` returns when the flag is set.
    pub fn start(work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> Background<T> {
        let is_over = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&is_over);
        Background { is_over, thread: Some(thread::spawn(move || work(&flag))) }
    }

    /// Whether it has ended by itself.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl<T> Background<T> {
    /// Ends it, and returns what it has found; `None` if it panicked or was ended before.
    pub fn end(&mut self) -> Option<T> {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        self.end();
    }
}

/// A number of bytes with its unit, if it is a whole number of the unit.
pub fn bytes(count: u64) -> String {
    match count {
        count if count >= 1 << 20 && count % (1 << 20) == 0 => format!("{} MiB", count >> 20),
        count if count >= 1 << 10 && count % (1 << 10) == 0 => format!("{} KiB", count >> 10),
        count => format!("{count} B"),
    }
}

/// Memory of several agents in MiB, as a column of a table has it: of the round in which they had most together. Each
/// is listed, in ascending order; of more than four there are the least, the greatest and the sum. `–` without any.
pub fn memory_of_each<'a>(rounds: impl IntoIterator<Item = &'a Vec<u64>>) -> String {
    let most = rounds.into_iter().filter(|agents| !agents.is_empty()).max_by_key(|agents| agents.iter().sum::<u64>());
    let mut agents = most.cloned().unwrap_or_default();
    agents.sort_unstable();
    let mib = |bytes: u64| format!("{:.0}", bytes as f64 / f64::from(1 << 20));
    match agents.as_slice() {
        [] => "–".to_owned(),
        [least, .., greatest] if agents.len() > 4 => {
            format!("{}–{}, sum {}", mib(*least), mib(*greatest), mib(agents.iter().sum()))
        }
        each => each.iter().map(|bytes| mib(*bytes)).collect::<Vec<_>>().join(", "),
    }
}

/// The first line that a command prints, or `?`.
fn said_by(command: &str, arguments: &[&str]) -> String {
    let output = Command::new(command).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("?").to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    fn sample(subject: &str, round: usize, value: f64) -> Sample {
        Sample::new(subject, "case", round, value).cost(0.5, 0.25, 2.0)
    }

    #[test]
    fn a_median_is_the_middle_and_quantiles_are_between_their_neighbours() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, low: 1.0, high: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of([]), None);
        assert_eq!(quantile(&[0.0, 10.0], 0.99), Some(9.9));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn ratios_are_computed_round_by_round_and_targets_checked_by_their_median() {
        let mut run = Run::new("test", "GB/s");
        for (round, (ours, rival)) in [(9.0, 10.0), (1.0, 1.0), (5.0, 10.0)].into_iter().enumerate() {
            run.samples.extend([sample("ours", round, ours), sample("rival", round, rival)]);
        }
        run.compare(("ours", "case"), ("rival", "case"), Some(0.9));
        assert_eq!(run.comparisons[0].ratio, Some(Spread { median: 0.9, low: 0.5, high: 1.0 }));
        assert!(run.keeps_promises());
        run.compare_less(("ours", "case"), ("rival", "case"), Some(0.9));
        assert!(run.keeps_promises() && run.summary().contains("≤ 0.9: kept"));
        run.compare_less(("ours", "case"), ("rival", "case"), Some(0.89));
        assert!(!run.keeps_promises());
        run.comparisons.pop();
        run.compare(("ours", "case"), ("rival", "case"), Some(0.91));
        assert!(!run.keeps_promises());
        assert!(run.summary().contains("| ours | case | 5.00 | 1.00 | 9.00 | 0.250 | 0.125 |"));
    }

    #[test]
    fn a_target_without_figures_is_not_met() {
        let mut run = Run::new("test", "GB/s");
        run.compare(("ours", "case"), ("missing", "case"), Some(0.5));
        assert!(!run.keeps_promises());
    }

    #[test]
    fn a_goal_is_judged_by_its_median_and_without_figures_not_met() {
        let mut run = Run::new("test", "k/s");
        let goal = |target, values: &[f64]| Goal {
            what: "rate, k/s".into(),
            target,
            value: Spread::of(values.iter().copied()),
        };
        run.goals = vec![goal(Target::least(600.0), &[1.0, 600.0, 700.0]), goal(Target::most(3.0), &[3.0])];
        assert!(run.keeps_promises() && run.summary().contains("| rate, k/s | 600.00 | 1.00 | 700.00 | ≥ 600: kept |"));
        for missed in
            [goal(Target::least(600.0), &[599.0]), goal(Target::most(3.0), &[3.1]), goal(Target::most(3.0), &[])]
        {
            run.goals = vec![missed];
            assert!(!run.keeps_promises() && run.summary().contains("**not kept**"), "{}", run.summary());
        }
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = cpu::of_self().unwrap();
        let mut number = 1u64;
        while cpu::of_self().unwrap() < before + Duration::from_millis(2) {
            number = std::hint::black_box(number.wrapping_mul(3));
        }
        assert!(cpu::of_ended_children().is_ok());
    }

    #[test]
    fn the_memory_of_every_agent_is_in_its_column() {
        let mib = |agents: &[u64]| agents.iter().map(|agent| agent << 20).collect::<Vec<u64>>();
        let rounds = [mib(&[75, 71, 70]), mib(&[99, 1, 2]), Vec::new()];
        assert_eq!(memory_of_each(&rounds), "70, 71, 75");
        assert_eq!(memory_of_each(&[mib(&[70])]), "70");
        assert_eq!(memory_of_each(&[mib(&[75, 71, 70, 70, 70, 70, 70, 74])]), "70–75, sum 570");
        assert_eq!(memory_of_each(&[]), "–");
        assert_eq!(memory_of_each(&[Vec::new()]), "–");
    }

    #[test]
    fn sizes_are_written_with_their_unit() {
        assert_eq!([bytes(512), bytes(4096), bytes(1 << 20), bytes(1 << 30)], ["512 B", "4 KiB", "1 MiB", "1024 MiB"]);
    }
}
