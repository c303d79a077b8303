//! What a command shows while it works: bars on a terminal, plain lines elsewhere, nothing with `--quiet`.
//!
//! Everything goes to stderr; stdout is for results, which [`print()`] writes. Plain lines are printed at most every
//! two seconds and once at the end, so that they do not fill the log of a service. Log events go through
//! [`LogWriter`], which moves the bars out of the way.
//!
//! Stderr may not be writable: its disk is full, or its reader has gone. That ends no command: what cannot be written
//! there is lost, and counted. A result that cannot be written to stdout fails the command.
//!
//! The state belongs to the process, as there is one terminal: [`configure`] is called once, before anything is shown.

use std::{
    io::{self, IsTerminal, Write},
    sync::{
        LazyLock, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use crate::exit::Failure;
use crate::units::{Size, readable};

/// Sets for the process whether anything is shown.
pub fn configure(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// Prints a line on stderr, above the bars if there are any. One that cannot be written is lost.
pub fn say(line: &str) {
    BARS.suspend(|| tell(format!("{line}\n").as_bytes()));
}

/// Writes a result to stdout, all of it.
///
/// # Errors
/// It could not be written: the result is lost.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| Failure::local(format!("the result could not be written to stdout: {error}")))
}

/// As [`print()`], with the end of the line.
///
/// # Errors
/// As [`print()`].
pub fn print_line(line: &str) -> Result<(), Failure> {
    print(&format!("{line}\n"))
}

/// Writes to stderr. What cannot be written is counted, and the count is told when stderr can be written again.
fn tell(bytes: &[u8]) {
    let mut to = io::stderr().lock();
    let lost = LOST.swap(0, Ordering::Relaxed);
    let told = match lost {
        0 => Ok(()),
        lost => writeln!(to, "remora: {lost} lines before this one could not be written here"),
    };
    if told.and_then(|()| to.write_all(bytes)).is_err() {
        LOST.fetch_add(lost + 1, Ordering::Relaxed);
    }
}

/// The unit of a [`Meter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown as MiB and MiB/s.
    Bytes,
    /// Things with this name, in the plural.
    Count(&'static str),
}

/// One piece of work in progress, with its rate and, if the total is known, percent and time left. Its bar disappears
/// when it is dropped.
#[derive(Debug)]
pub struct Meter {
    label: String,
    unit: Unit,
    begun: Instant,
    position: AtomicU64,
    total: AtomicU64,
    shown: Display,
}

#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Lines(Mutex<Pace>),
    Nothing,
}

impl Meter {
    /// Begins to show work called `label`. The `total` can be set later by [`Meter::set_total`].
    pub fn start(label: impl Into<String>, unit: Unit, total: Option<u64>) -> Self {
        let (label, begun) = (label.into(), Instant::now());
        let shown = match () {
            () if QUIET.load(Ordering::Relaxed) => Display::Nothing,
            () if io::stderr().is_terminal() => Display::Bar(bar(&label, unit, total)),
            () => Display::Lines(Mutex::new(Pace::default())),
        };
        Self { label, unit, begun, position: AtomicU64::new(0), total: AtomicU64::new(total.unwrap_or(0)), shown }
    }

    /// Sets how much is done.
    pub fn set(&self, position: u64) {
        self.position.store(position, Ordering::Relaxed);
        self.show(false);
    }

    /// Adds to what is done.
    pub fn add(&self, amount: u64) {
        self.position.fetch_add(amount, Ordering::Relaxed);
        self.show(false);
    }

    /// Sets the total, once it is known or known better.
    pub fn set_total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        if let Display::Bar(bar) = &self.shown {
            bar.set_length(total);
            bar.set_style(style(self.unit, Some(total)));
        }
    }

    /// How much is done.
    pub fn position(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    /// The time since the work began.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Ends the work: the bar disappears, and a line stays.
    pub fn finish(self) {
        self.show(true);
    }

    fn show(&self, last: bool) {
        match &self.shown {
            Display::Nothing => {}
            Display::Bar(bar) => {
                bar.set_position(self.position());
                if last {
                    bar.finish_and_clear();
                    say(&self.line());
                }
            }
            Display::Lines(pace) => {
                let due = pace.lock().unwrap_or_else(PoisonError::into_inner).is_due(self.elapsed(), last);
                if due {
                    say(&self.line());
                }
            }
        }
    }

    fn line(&self) -> String {
        line(&self.label, self.unit, self.position(), self.total.load(Ordering::Relaxed), self.elapsed())
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Display::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

/// The destination of log events: stderr, with the bars out of the way.
#[derive(Clone, Copy, Debug)]
pub struct LogWriter;

impl Write for LogWriter {
    /// Always succeeds: a log that cannot be written must not stop the agent.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| tell(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The terminal at stderr, for bars. `indicatif`'s own panics when the terminal has gone, as after the end of the
/// session in which an agent was started.
#[derive(Debug)]
struct Terminal;

impl Terminal {
    fn write(text: &str) -> io::Result<()> {
        let _ = io::stderr().write_all(text.as_bytes()); // a bar that is not seen
        Ok(())
    }

    /// Moves the cursor `n` places; `n` of 0 would be taken for 1.
    fn step(n: usize, direction: char) -> io::Result<()> {
        if n == 0 { Ok(()) } else { Terminal::write(&format!("\x1b[{n}{direction}")) }
    }

    fn size() -> (u16, u16) {
        let size = ratatui::crossterm::terminal::size().ok();
        size.filter(|(columns, rows)| *columns > 0 && *rows > 0).unwrap_or((80, 24))
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        Terminal::size().0
    }

    fn height(&self) -> u16 {
        Terminal::size().1
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        Terminal::step(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        Terminal::step(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        Terminal::step(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        Terminal::step(n, 'D')
    }

    fn write_line(&self, line: &str) -> io::Result<()> {
        Terminal::write(&format!("{line}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        Terminal::write(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        Terminal::write("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Where bars are drawn: nowhere, if stderr is no terminal.
fn drawn_at() -> ProgressDrawTarget {
    match io::stderr().is_terminal() {
        true => ProgressDrawTarget::term_like_with_hz(Box::new(Terminal), FRAMES_PER_SECOND),
        false => ProgressDrawTarget::hidden(),
    }
}

/// Decides when the next plain line is due. It is given the time, so that a test need not wait.
#[derive(Debug, Default)]
struct Pace {
    last: Duration,
}

impl Pace {
    fn is_due(&mut self, elapsed: Duration, last: bool) -> bool {
        let due = last || elapsed.saturating_sub(self.last) >= LINE_EVERY;
        if due {
            self.last = elapsed;
        }
        due
    }
}

/// Formats a line such as `load: 120 of 256 keys, 47 %, 60 keys/s, 2.3 s left`. A `total` of 0 means unknown.
fn line(label: &str, unit: Unit, position: u64, total: u64, elapsed: Duration) -> String {
    let rate = position as f64 / elapsed.as_secs_f64().max(f64::EPSILON);
    let amount = |number: u64| match unit {
        Unit::Bytes => Size::bytes(number).to_string(),
        Unit::Count(_) => number.to_string(),
    };
    let name = match unit {
        Unit::Bytes => String::new(),
        Unit::Count(name) => format!(" {name}"),
    };
    let mut line = match total {
        0 => format!("{label}: {}{name}", amount(position)),
        total => format!("{label}: {} of {}{name}, {} %", amount(position), amount(total), percent(position, total)),
    };
    line.push_str(&format!(", {}{name}/s", amount(rate as u64)));
    match total.checked_sub(position) {
        Some(rest) if rest > 0 && rate >= 1.0 => {
            line.push_str(&format!(", {} left", readable(Duration::from_secs_f64(rest as f64 / rate))));
        }
        _ => line.push_str(&format!(", {} in total", readable(elapsed))),
    }
    line
}

/// The percentage, rounded down, so that 100 means everything.
fn percent(position: u64, total: u64) -> u64 {
    (u128::from(position) * 100)
        .checked_div(u128::from(total))
        .and_then(|percent| u64::try_from(percent).ok())
        .unwrap_or(0)
}

fn bar(label: &str, unit: Unit, total: Option<u64>) -> ProgressBar {
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::no_length(),
    };
    let bar = BARS.add(bar);
    bar.set_style(style(unit, total));
    bar.set_prefix(label.to_owned());
    bar
}

fn style(unit: Unit, total: Option<u64>) -> ProgressStyle {
    let template = match (unit, total) {
        (Unit::Bytes, Some(_)) => {
            "{prefix:10} [{bar:30}] {percent:>3} %  {binary_bytes} of {binary_total_bytes}  {binary_bytes_per_sec}  {eta} left"
        }
        (Unit::Bytes, None) => "{prefix:10} {spinner} {binary_bytes}  {binary_bytes_per_sec}  {elapsed}",
        (Unit::Count(_), Some(_)) => {
            "{prefix:10} [{bar:30}] {percent:>3} %  {human_pos} of {human_len}  {per_sec}  {eta} left"
        }
        (Unit::Count(_), None) => "{prefix:10} {spinner} {human_pos}  {per_sec}  {elapsed}",
    };
    // A template that does not parse is a bug that a test finds; a plain bar is shown instead.
    ProgressStyle::with_template(template)
        .map_or_else(|_| ProgressStyle::default_bar(), |style| style.progress_chars("█▌ "))
}

static QUIET: AtomicBool = AtomicBool::new(false);
static BARS: LazyLock<MultiProgress> = LazyLock::new(|| MultiProgress::with_draw_target(drawn_at()));

/// Writes to stderr that failed, since the last one that did not.
static LOST: AtomicU64 = AtomicU64::new(0);

/// How often bars are drawn, at most: as `indicatif` does.
const FRAMES_PER_SECOND: u8 = 20;

/// The pause between plain lines: short enough to see progress, long enough for a log.
const LINE_EVERY: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_lines_come_every_two_seconds_and_at_the_end() {
        let mut pace = Pace::default();
        let due = [(500, false), (2000, false), (2100, false), (3999, false), (4000, false), (4001, true)];
        let due = due.map(|(millis, last)| pace.is_due(Duration::from_millis(millis), last));
        assert_eq!(due, [false, true, false, false, true, true]);
    }

    #[test]
    fn a_line_says_how_far_how_fast_and_how_long() {
        let keys = Unit::Count("keys");
        assert_eq!(
            line("load", keys, 100, 400, Duration::from_secs(2)),
            "load: 100 of 400 keys, 25 %, 50 keys/s, 6.0 s left"
        );
        assert_eq!(
            line("load", keys, 400, 400, Duration::from_secs(8)),
            "load: 400 of 400 keys, 100 %, 50 keys/s, 8.0 s in total"
        );
        let bytes = line("fetch", Unit::Bytes, 3 << 20, 0, Duration::from_secs(3));
        assert_eq!(bytes, "fetch: 3 MiB, 1 MiB/s, 3.0 s in total");
    }

    #[test]
    fn a_hundred_percent_means_all() {
        assert_eq!(percent(999, 1000), 99);
        assert_eq!(percent(u64::MAX, u64::MAX), 100);
        assert_eq!(percent(1, 0), 0);
    }

    #[test]
    fn the_templates_of_the_bars_are_understood() {
        for unit in [Unit::Bytes, Unit::Count("keys")] {
            for total in [None, Some(1)] {
                let _ = style(unit, total);
            }
        }
        assert!(ProgressStyle::with_template("{prefix:10} [{bar:30}] {percent:>3} %").is_ok());
    }
}
