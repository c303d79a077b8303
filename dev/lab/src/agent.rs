//! The program under test as a process: start it, read its output, wait, send signals, measure.
//!
//! This module does not know what the program does: its output and its exit status are the interface.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::net::Host;
use crate::process::{self, Process};
use crate::server::tail_of;
use crate::{Error, Result};

/// A running `remora`. Dropping it kills it.
#[derive(Debug)]
pub struct Agent {
    process: Process,
    output: Arc<Output>,
    watch: Arc<Mutex<Watch>>,
}

impl Agent {
    /// Starts the program with these arguments.
    pub fn start<A: AsRef<OsStr>>(program: impl AsRef<Path>, args: &[A]) -> Result<Agent> {
        let mut command = Command::new(program.as_ref());
        command.args(args);
        Agent::run(command)
    }

    /// Starts the program on a host of a test network.
    pub fn start_on<A: AsRef<OsStr>>(host: &Host, program: impl AsRef<Path>, args: &[A]) -> Result<Agent> {
        let mut command = Command::new(program.as_ref());
        command.args(args);
        host.enter(&mut command)?;
        Agent::run(command)
    }

    /// Starts a command that the caller has prepared (environment, folder). Its input is empty; its output is
    /// collected.
    pub fn run(mut command: Command) -> Result<Agent> {
        let name = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env(EVENT_NAMES, "yes");
        let (process, pipes) = Process::start(name, command)?;
        let output = Arc::new(Output::default());
        if let Some(stdout) = pipes.stdout {
            read_lines(stdout, Stream::Stdout, &output);
        }
        if let Some(stderr) = pipes.stderr {
            read_lines(stderr, Stream::Stderr, &output);
        }
        let watch = Arc::new(Mutex::new(Watch::default()));
        watch_over(process.pid(), &watch);
        Ok(Agent { process, output, watch })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Everything that the program has written so far, both streams, in the order in which they were read.
    pub fn output(&self) -> String {
        self.output.text(|_| true)
    }

    /// The program's standard output so far.
    pub fn stdout(&self) -> String {
        self.output.text(|stream| stream == Stream::Stdout)
    }

    /// The program's standard error so far.
    pub fn stderr(&self) -> String {
        self.output.text(|stream| stream == Stream::Stderr)
    }

    /// Waits for a line that contains `part`, on either stream, and returns it. Lines that were written before count.
    /// Fails at once if the program ends without such a line.
    pub fn wait_for_line(&mut self, part: &str, within: Duration) -> Result<String> {
        self.wait_for(|line| line.text.contains(part), within, || format!("a line with {part:?}"))
    }

    /// Waits until the log has this event (`docs/reference/log.md` lists them), and returns its line as a person reads
    /// it. Events that were logged before count. Fails at once if the program ends without it.
    pub fn wait_for_event(&mut self, event: &str, within: Duration) -> Result<String> {
        self.wait_for(|line| line.event.as_deref() == Some(event), within, || format!("the event {event:?}"))
    }

    /// How often the log has had this event so far.
    pub fn count_events(&self, event: &str) -> usize {
        lock(&self.output.state).lines.iter().filter(|line| line.event.as_deref() == Some(event)).count()
    }

    fn wait_for(
        &mut self,
        wanted: impl Fn(&Line) -> bool,
        within: Duration,
        what: impl Fn() -> String,
    ) -> Result<String> {
        let deadline = Instant::now() + within;
        loop {
            // Checked before the search, so that the last lines of a program that ends in between are not missed.
            let silent = self.output.is_over();
            if let Some(line) = self.output.find(&wanted) {
                return Ok(line);
            }
            if silent && let Some(status) = self.ended()? {
                return Err(self.ended_error(status));
            }
            if Instant::now() >= deadline {
                return Err(self.too_late(&what(), within));
            }
            self.output.wait(LOOK_TIME);
        }
    }

    /// Waits until the program ends by itself. All of its output has been read by then.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.ended()? {
                self.output.wait_until_over(LAST_OUTPUT_TIME);
                return Ok(status);
            }
            if Instant::now() >= deadline {
                return Err(self.too_late("its end", within));
            }
            thread::sleep(LOOK_TIME);
        }
    }

    /// Waits until the program ends, and fails with its last lines unless the exit status is 0.
    pub fn wait_for_success(&mut self, within: Duration) -> Result<()> {
        let status = self.wait(within)?;
        if status.success() { Ok(()) } else { Err(self.ended_error(status)) }
    }

    /// The exit status, if the program has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        // The sampler must not use this process id any more once the process is reaped.
        let mut watch = lock(&self.watch);
        let ended = self.process.ended()?;
        watch.over |= ended.is_some();
        Ok(ended)
    }

    /// Sends a signal (SIGTERM, SIGINT, SIGSTOP, SIGCONT …).
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        let _watch = lock(&self.watch);
        self.process.signal(signal)
    }

    /// `kill -9`.
    pub fn kill(&mut self) -> Result<()> {
        let mut watch = lock(&self.watch);
        watch.over = true;
        self.process.kill().map(drop)
    }

    /// CPU seconds that the program has used; also available after its end.
    pub fn cpu_seconds(&self) -> Result<f64> {
        self.process.cpu_seconds()
    }

    /// Peak resident memory in bytes, including shared mappings (VmHWM). After the end it is the last sample, which is
    /// at most [`Agent::SAMPLE_TIME`] old.
    pub fn peak_memory(&self) -> u64 {
        lock(&self.watch).now(self.pid()).memory
    }

    /// Peak of the bytes that have pages in the program's memfds, as sampled.
    pub fn peak_memfd(&self) -> u64 {
        lock(&self.watch).now(self.pid()).memfd
    }

    /// Interval between two samples of the peaks.
    pub const SAMPLE_TIME: Duration = Duration::from_millis(20);

    fn ended_error(&self, status: ExitStatus) -> Error {
        Error::Ended { who: self.process.who(), status: process::in_words(status), tail: self.tail() }
    }

    fn too_late(&self, what: &str, waited: Duration) -> Error {
        Error::TooLate { what: format!("{what} of {}", self.process.who()), waited, tail: self.tail() }
    }

    fn tail(&self) -> String {
        tail_of(&self.output(), TAIL_LINES)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Stdout,
    Stderr,
}

/// What has been written so far, by which stream, and how many streams have ended.
#[derive(Debug, Default)]
struct Output {
    state: Mutex<OutputState>,
    news: Condvar,
}

/// A line of output.
#[derive(Debug)]
struct Line {
    from: Stream,
    /// As a person reads it, without the name of the event.
    text: String,
    /// The event of the log that it tells of.
    event: Option<String>,
}

impl Line {
    fn new(from: Stream, mut text: String) -> Line {
        let is_name =
            |name: &str| !name.is_empty() && name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase());
        let named = text.rsplit_once(EVENT_MARK).filter(|(_, name)| from == Stream::Stderr && is_name(name));
        let event = named.map(|(rest, name)| (rest.len(), name.to_owned()));
        let event = event.map(|(length, name)| {
            text.truncate(length);
            name
        });
        Line { from, text, event }
    }
}

#[derive(Debug, Default)]
struct OutputState {
    lines: Vec<Line>,
    streams_ended: usize,
}

impl Output {
    fn text(&self, wanted: impl Fn(Stream) -> bool) -> String {
        let state = lock(&self.state);
        let lines: Vec<&str> =
            state.lines.iter().filter(|line| wanted(line.from)).map(|line| line.text.as_str()).collect();
        lines.join("\n")
    }

    fn find(&self, wanted: impl Fn(&Line) -> bool) -> Option<String> {
        lock(&self.state).lines.iter().find(|line| wanted(line)).map(|line| line.text.clone())
    }

    fn is_over(&self) -> bool {
        lock(&self.state).streams_ended == 2
    }

    fn wait(&self, time: Duration) {
        // A spurious wake-up only makes the caller check once more.
        drop(self.news.wait_timeout(lock(&self.state), time));
    }

    /// Waits for the end of both streams. Bounded: a grandchild that inherited the streams may hold them open.
    fn wait_until_over(&self, time: Duration) {
        drop(self.news.wait_timeout_while(lock(&self.state), time, |state| state.streams_ended < 2));
    }

    fn update(&self, change: impl FnOnce(&mut OutputState)) {
        change(&mut lock(&self.state));
        self.news.notify_all();
    }
}

/// Reads one stream to its end, line by line, on a separate thread.
fn read_lines(from: impl Read + Send + 'static, stream: Stream, output: &Arc<Output>) {
    let output = Arc::clone(output);
    thread::spawn(move || {
        let mut reader = BufReader::new(from);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
            line.clear();
            output.update(|state| state.lines.push(Line::new(stream, text)));
        }
        output.update(|state| state.streams_ended += 1);
    });
}

/// The peaks, sampled until the process has ended.
#[derive(Debug, Default)]
struct Watch {
    over: bool,
    memory: u64,
    memfd: u64,
}

impl Watch {
    /// Takes a sample, unless the process has ended.
    fn now(&mut self, pid: u32) -> &Watch {
        if !self.over {
            // A zombie has no memory to read: the last sample stays.
            self.memory = process::peak_memory(pid).unwrap_or_default().max(self.memory);
            let resident = process::memfds(pid).unwrap_or_default().iter().map(|memfd| memfd.resident).sum::<u64>();
            self.memfd = self.memfd.max(resident);
        }
        self
    }
}

fn watch_over(pid: u32, watch: &Arc<Mutex<Watch>>) {
    let watch = Arc::downgrade(watch);
    thread::spawn(move || {
        while let Some(watch) = watch.upgrade() {
            if lock(&watch).now(pid).over {
                return;
            }
            drop(watch);
            thread::sleep(Agent::SAMPLE_TIME);
        }
    });
}

/// A thread that panicked while it held one of these locks left consistent data: they guard plain counts and lines.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The variable that has the agents' log name the event of each line, at the line's end.
const EVENT_NAMES: &str = "REMORA_LOG_EVENTS";

/// What stands before such a name.
const EVENT_MARK: &str = " event=";

/// Interval between two checks of a process.
const LOOK_TIME: Duration = Duration::from_millis(10);

/// How long the pipes of an ended process may stay open.
const LAST_OUTPUT_TIME: Duration = Duration::from_secs(2);

/// Number of output lines in a message.
const TAIL_LINES: usize = 30;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Agent {
        Agent::start("/bin/sh", &["-c", script]).unwrap()
    }

    #[test]
    fn lines_of_both_streams_are_read_and_the_exit_status_is_known() {
        let mut agent = shell("echo one; echo two >&2; sleep 0.1; echo three; exit 4");
        assert_eq!(agent.wait_for_line("thr", SOON).unwrap(), "three");
        assert_eq!(agent.wait(SOON).unwrap().code(), Some(4));
        assert_eq!((agent.stdout(), agent.stderr()), ("one\nthree".into(), "two".into()));
        let error = agent.wait_for_success(SOON).unwrap_err().to_string();
        assert!(error.contains("exit status 4") && error.contains("three"), "{error}");
    }

    #[test]
    fn an_event_is_awaited_by_its_name_and_the_line_is_without_it() {
        let mut agent = shell("echo \"INFO in step a=$REMORA_LOG_EVENTS event=in_step\" >&2; echo else event=else");
        assert_eq!(agent.wait_for_event("in_step", SOON).unwrap(), "INFO in step a=yes");
        agent.wait_for_success(SOON).unwrap();
        assert_eq!((agent.stderr(), agent.stdout()), ("INFO in step a=yes".into(), "else event=else".into()));
        assert_eq!((agent.count_events("in_step"), agent.count_events("else")), (1, 0));
        let error = agent.wait_for_event("else", SOON).unwrap_err().to_string();
        assert!(error.contains("exit status 0"), "{error}");
    }

    #[test]
    fn waiting_for_a_line_ends_when_the_program_ends_without_it() {
        let begun = Instant::now();
        let error = shell("echo last words").wait_for_line("never", SOON).unwrap_err().to_string();
        assert!(error.contains("last words") && begun.elapsed() < SOON, "{error}");
    }

    #[test]
    fn a_wait_that_times_out_reports_the_output() {
        let mut agent = shell("echo stuck; exec sleep 60");
        let error = agent.wait_for_line("never", Duration::from_millis(200)).unwrap_err().to_string();
        assert!(error.contains("stuck"), "{error}");
        agent.signal(Signal::TERM).unwrap();
        assert_eq!(process::in_words(agent.wait(SOON).unwrap()), "killed by signal 15");
    }

    #[test]
    fn the_peak_of_memory_is_known_after_the_end() {
        let mut agent = shell("sleep 0.1");
        agent.wait_for_success(SOON).unwrap();
        assert!(agent.peak_memory() > 100_000, "{}", agent.peak_memory());
        assert_eq!(agent.peak_memfd(), 0);
    }
}
