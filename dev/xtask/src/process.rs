//! Other programs that a command runs to their end (cargo, `remora` in the folder of a demonstration, a model), how
//! they are stopped, and what is shown meanwhile.

use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, fs};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use tokio::signal::unix::{SignalKind, signal};

use remora_bench::sync::{Program, Result, Sight};
use remora_lab::{Agent, Kind};

/// The cargo that started this program.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs a command, whose output is shown.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|error| format!("{command:?} could not be started: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?} failed ({status})").into()) }
}

/// Runs a command, and returns what it has printed.
pub(crate) fn said(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|error| format!("{command:?} could not be started: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

// The command `remora` in the folder of a demonstration.

/// Starts a command.
pub(crate) fn started(program: &Program, folder: &Path, args: &[&str]) -> Result<Agent> {
    let mut command = Command::new(program.path());
    command.args(args).current_dir(folder);
    Ok(Agent::run(command)?)
}

/// Runs a command to its end, and returns what it says.
pub(crate) fn ended_well(program: &Program, folder: &Path, args: &[&str]) -> Result<String> {
    ended_within(START_LIMIT, program, folder, args)
}

/// The same for a command that takes as long as there are data.
pub(crate) fn ended_within(limit: Duration, program: &Program, folder: &Path, args: &[&str]) -> Result<String> {
    let mut agent = started(program, folder, args)?;
    agent.wait_for_success(limit)?;
    Ok(agent.stdout())
}

/// The option before the file with the secret.
pub(crate) const TOKEN: &str = "--token-file";

/// A command on a busy machine.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(60);

// Scale: prints the table of 1,000 replicas in racks that docs/explanation/relay.md shows. The model is a test of the
// source.

/// The test that prints the table.
const TABLE: &str = "topology::tests::by_command::table";

/// Runs the model and prints its table.
pub(crate) fn print_scale() -> Result<()> {
    let mut command = cargo();
    command.args(["test", "--locked", "--quiet", "--package", "remora-source", "--lib", "--", "--exact", TABLE]);
    let status = command.args(["--ignored", "--nocapture"]).status()?;
    if status.success() { Ok(()) } else { Err(format!("the model {TABLE} failed: {status}").into()) }
}

// Ctrl-C and SIGTERM: every started process is killed. The work then fails, because its processes are gone, and cleans
// up as after any other failure: folders are removed when their owner is dropped.
//
// `kill -9` cannot be handled: the kernel ends the processes, and their folders stay in the temporary folder.

/// The work was stopped by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped {
    signal: SignalKind,
}

impl Stopped {
    /// The exit code that shells expect.
    pub(crate) fn code(self) -> u8 {
        128 + u8::try_from(self.signal.as_raw_value()).unwrap_or(0)
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by signal {}; servers, agents and their folders are gone", self.signal.as_raw_value())
    }
}

impl std::error::Error for Stopped {}

/// Runs `work` to its end, or until a signal stops it.
pub(crate) fn or_run(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut work = tokio::task::spawn_blocking(work);
        let mut stopped: Option<Stopped> = None;
        loop {
            tokio::select! {
                outcome = &mut work => return match stopped {
                    Some(stopped) => Err(stopped.into()),
                    None => outcome?,
                },
                _ = interrupt.recv() => stopped = Some(Stopped { signal: SignalKind::interrupt() }),
                _ = terminate.recv() => stopped = Some(Stopped { signal: SignalKind::terminate() }),
                // Processes that the work starts before it notices are killed too.
                () = tokio::time::sleep(AGAIN_EVERY), if stopped.is_some() => {}
            }
            if stopped.is_some() {
                IS_STOPPED.store(true, Ordering::Relaxed);
                end_children_of(getpid());
            }
        }
    })
}

/// Fails if a signal has stopped the work, for work that could go on without its processes.
pub(crate) fn fail_if_stopped() -> Result<()> {
    if IS_STOPPED.load(Ordering::Relaxed) { Err("stopped by a signal".into()) } else { Ok(()) }
}

/// Whether a signal has stopped the work of this process.
static IS_STOPPED: AtomicBool = AtomicBool::new(false);

/// Kills all children of a process and their descendants (each of ours leads a process group).
fn end_children_of(parent: Pid) {
    for child in children_of(parent) {
        // A child that has just ended needs no signal. A child without its own group (cargo) is killed alone.
        if kill_process_group(child, Signal::KILL).is_err() {
            let _ = kill_process(child, Signal::KILL);
        }
    }
}

fn children_of(parent: Pid) -> Vec<Pid> {
    let parent = parent.as_raw_nonzero().get();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| parent_of(*pid) == Some(parent)).filter_map(Pid::from_raw).collect()
}

fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets can contain anything; state and parent follow it.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// How often children are searched for while the work ends.
const AGAIN_EVERY: Duration = Duration::from_millis(100);

// The display while a demo runs: bars if stderr is a terminal, else a line for every change of phase.

/// The screen.
pub(crate) struct Screen {
    bars: Option<MultiProgress>,
}

impl Screen {
    pub(crate) fn new() -> Screen {
        Screen { bars: stderr().is_terminal().then(MultiProgress::new) }
    }

    /// Prints a line that stays.
    pub(crate) fn say(&self, line: &str) {
        match &self.bars {
            Some(bars) => bars.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    /// Builds `remora`, and fails early if a server of these kinds is not installed: the work after it takes minutes.
    pub(crate) fn build_for(&self, kinds: &[Kind]) -> Result<Program> {
        let _busy = self.busy("building the command remora");
        let program = Program::build()?;
        for kind in kinds {
            kind.binary()?;
        }
        Ok(program)
    }

    /// Shows a spinner until it is dropped.
    pub(crate) fn busy(&self, what: &str) -> Busy {
        let Some(bars) = &self.bars else {
            self.say(&format!("  {what}"));
            return Busy { bar: None };
        };
        let bar = bars.add(ProgressBar::new_spinner());
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(SPIN_EVERY);
        Busy { bar: Some(bar) }
    }

    /// A bar per replica, each as long as `bytes`.
    pub(crate) fn replicas(&self, count: usize, bytes: u64) -> Replicas {
        let bar = |bars: &MultiProgress, number| {
            let bar = bars.add(ProgressBar::new(bytes));
            bar.set_style(style());
            bar.set_prefix(format!("replica {number}"));
            bar
        };
        let bars = self.bars.as_ref().map(|bars| (1..=count).map(|number| bar(bars, number)).collect());
        Replicas { bars, bytes, phases: Mutex::new(vec![""; count]) }
    }
}

/// A spinner; see [`Screen::busy`].
pub(crate) struct Busy {
    bar: Option<ProgressBar>,
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Bars of replicas; see [`Screen::replicas`].
pub(crate) struct Replicas {
    bars: Option<Vec<ProgressBar>>,
    bytes: u64,
    phases: Mutex<Vec<&'static str>>,
}

impl Replicas {
    /// Updates the display of a replica.
    pub(crate) fn saw(&self, number: usize, sight: Sight) {
        if let Some(bar) = self.bars.as_ref().and_then(|bars| bars.get(number)) {
            bar.set_position(sight.bytes.min(self.bytes));
            bar.set_message(sight.phase);
        } else if self.is_news(number, sight.phase) {
            eprintln!("  replica {}: {}", number + 1, sight.phase);
        }
    }

    fn is_news(&self, number: usize, phase: &'static str) -> bool {
        let mut phases = self.phases.lock().unwrap_or_else(PoisonError::into_inner);
        phases.get_mut(number).is_some_and(|known| std::mem::replace(known, phase) != phase)
    }
}

impl Drop for Replicas {
    fn drop(&mut self) {
        self.bars.iter().flatten().for_each(ProgressBar::finish_and_clear);
    }
}

fn style() -> ProgressStyle {
    // The test would find a template that does not parse; a plain bar is the fallback.
    ProgressStyle::with_template(TEMPLATE)
        .map_or_else(|_| ProgressStyle::default_bar(), |style| style.progress_chars("█▌ "))
}

const TEMPLATE: &str = "  {prefix} [{bar:40}] {percent:>3} %  {elapsed_precise}  {msg}";

/// Interval between two frames of a spinner.
const SPIN_EVERY: Duration = Duration::from_millis(100);

// Text tables: columns as wide as their widest cell, numbers right-aligned.

/// Formats `rows` under `head`. The first `left` columns are text and are left-aligned.
pub(crate) fn lay_out(head: &[&str], left: usize, rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(head.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &[String]| {
        let cell = |(column, (cell, width)): (usize, (&String, &usize))| {
            if column < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        };
        let cells: Vec<String> = cells.iter().zip(&widths).enumerate().map(cell).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let rule: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
    [line(&head), line(&rule)].into_iter().chain(rows.iter().map(|row| line(row))).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::Command;
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn children_are_found_and_ended() {
        // Children of a shell, not of this process: other tests have children here.
        let mut shell = Command::new("sh").args(["-c", "sleep 60 & sleep 60; wait"]).spawn().unwrap();
        let parent = Pid::from_child(&shell);
        let began = Instant::now();
        while children_of(parent).len() < 2 {
            assert!(began.elapsed() < Duration::from_secs(20), "the shell started no child");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(children_of(getpid()).contains(&parent));
        end_children_of(parent);
        shell.wait().unwrap();
        assert!(began.elapsed() < Duration::from_secs(60), "they ran to their end");
    }

    #[test]
    fn a_stopped_run_ends_with_the_code_that_shells_expect() {
        assert_eq!(Stopped { signal: SignalKind::interrupt() }.code(), 130);
    }

    #[test]
    fn the_template_of_the_bars_is_one() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }

    #[test]
    fn without_a_terminal_a_phase_is_said_once() {
        let replicas = Replicas { bars: None, bytes: 1, phases: Mutex::new(vec![""; 2]) };
        assert!(replicas.is_news(1, "loading") && !replicas.is_news(1, "loading") && replicas.is_news(1, "in step"));
        assert!(!replicas.is_news(2, "absent"));
    }

    #[test]
    fn text_goes_to_the_left_and_numbers_to_the_right() {
        let rows = [vec!["one".to_owned(), "1.25".to_owned()], vec!["twelve".to_owned(), "12.00".to_owned()]];
        let expected = "what    seconds\n──────  ───────\none        1.25\ntwelve    12.00\n";
        assert_eq!(lay_out(&["what", "seconds"], 1, &rows), expected);
    }
}
