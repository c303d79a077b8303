//! What a command shows while it works: bars on a terminal, plain lines elsewhere, nothing with `--quiet`.
//!
//! Everything goes to stderr; stdout is for results, which [`print()`] writes. Plain lines are printed at most every
//! two seconds and once at the end, so that they do not fill the log of a service. Log events go through
//! [`LogWriter`], which moves the bars out of the way.
//!
//! Stderr may not be writable: its disk is full, or its reader has gone. That ends no command: what cannot be written
//! there is lost, and counted. A result that cannot be written to stdout fails the command.
//!
//! How far, how fast and how long is defined in [`tracker`], and its words in [`words`]. Both are used beyond this
//! process's terminal too.
//!
//! The state belongs to the process, as there is one terminal: [`configure`] is called once, before anything is shown.

pub mod tracker;
pub mod words;

use std::{
    io::{self, IsTerminal, Write},
    sync::{
        LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use remora_protocol::Length;

use self::tracker::{Look, Tracker, known};
pub use self::words::Unit;
use crate::exit::Failure;

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

/// Writes a result to stdout as one line of JSON.
///
/// # Errors
/// As [`print()`].
pub fn print_json(result: &(impl serde::Serialize + ?Sized)) -> Result<(), Failure> {
    print_line(&serde_json::to_string(result).map_err(|error| Failure::local(error.to_string()))?)
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

/// One piece of work in progress, with its rate and, if the total is known, percent and time left. Its bar disappears
/// when it is dropped.
#[derive(Debug)]
pub struct Meter {
    label: String,
    unit: Unit,
    begun: Instant,
    work: Mutex<Work>,
    shown: Display,
}

/// How far the work is.
#[derive(Debug, Default)]
struct Work {
    position: u64,
    length: Length,
    tracker: Tracker,
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
        Self::start_from(label, unit, 0, total.map_or_else(Length::default, known))
    }

    /// Begins to show work of which a former attempt has left a part.
    pub fn start_from(label: impl Into<String>, unit: Unit, position: u64, length: Length) -> Self {
        let (label, begun) = (label.into(), Instant::now());
        let shown = match () {
            () if QUIET.load(Ordering::Relaxed) => Display::Nothing,
            () if io::stderr().is_terminal() => Display::Bar(bar(&label)),
            () => Display::Lines(Mutex::new(Pace::default())),
        };
        let mut work = Work { position, length, tracker: Tracker::default() };
        work.tracker.reach(begun, position, length);
        Self { label, unit, begun, work: Mutex::new(work), shown }
    }

    /// Sets how much is done.
    pub fn set(&self, position: u64) {
        self.change(|work| work.position = position);
    }

    /// Adds to what is done.
    pub fn add(&self, amount: u64) {
        self.change(|work| work.position += amount);
    }

    /// Sets the total, once it is known or known better.
    pub fn set_total(&self, total: u64) {
        self.expect(known(total));
    }

    /// Sets what is known of the total.
    pub fn expect(&self, length: Length) {
        self.work().length = length;
    }

    /// How much is done.
    pub fn position(&self) -> u64 {
        self.work().position
    }

    /// Whether all is done, as far as the total is known.
    pub fn is_whole(&self) -> bool {
        self.work().tracker.is_whole()
    }

    /// The time since the work began.
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Ends the work: the bar disappears, and a line stays.
    pub fn finish(self) {
        self.show(true);
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Work)) {
        change(&mut self.work());
        self.show(false);
    }

    fn show(&self, last: bool) {
        let now = Instant::now();
        let mut work = self.work();
        let (position, length) = (work.position, work.length);
        work.tracker.reach(now, position, length);
        let look = work.tracker.look(now);
        drop(work);
        let is_due = match &self.shown {
            Display::Nothing => false,
            Display::Bar(bar) => {
                draw(bar, &look, self.unit);
                if last {
                    bar.finish_and_clear();
                }
                last
            }
            Display::Lines(pace) => pace.lock().unwrap_or_else(PoisonError::into_inner).is_due(self.elapsed(), last),
        };
        if is_due {
            let words = if last { words::at_the_end(&look, self.unit) } else { words::in_progress(&look, self.unit) };
            say(&format!("{}: {words}", self.label));
        }
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

fn bar(label: &str) -> ProgressBar {
    let bar = BARS.add(ProgressBar::no_length());
    bar.set_style(style(false));
    bar.set_prefix(label.to_owned());
    bar
}

/// Shows a look on a bar: a part of it is full if the total is known or estimated.
fn draw(bar: &ProgressBar, look: &Look, unit: Unit) {
    if let Some(permille) = look.permille {
        bar.set_length(1000);
        bar.set_position(permille.into());
    }
    bar.set_style(style(look.permille.is_some()));
    bar.set_message(words::in_progress(look, unit));
}

fn style(has_length: bool) -> ProgressStyle {
    let template = if has_length { "{prefix:10} [{bar:20}] {msg}" } else { "{prefix:10} {spinner} {msg}" };
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
    use remora_protocol::Basis;

    use super::*;

    #[test]
    fn plain_lines_come_every_two_seconds_and_at_the_end() {
        let mut pace = Pace::default();
        let due = [(500, false), (2000, false), (2100, false), (3999, false), (4000, false), (4001, true)];
        let due = due.map(|(millis, last)| pace.is_due(Duration::from_millis(millis), last));
        assert_eq!(due, [false, true, false, false, true, true]);
    }

    #[test]
    fn a_bar_says_in_the_words_of_the_lines_how_far_it_is() {
        let bar = ProgressBar::hidden();
        let look = |length| {
            let (start, mut tracker) = (Instant::now(), Tracker::default());
            tracker.reach(start, 0, length);
            tracker.reach(start + Duration::from_secs(2), 240 << 20, length);
            tracker.look(start + Duration::from_secs(2))
        };
        draw(&bar, &look(Length::default()), Unit::Bytes);
        assert_eq!((bar.message().as_str(), bar.length()), ("240 MiB, 120 MiB/s, 2.0 s so far", None));
        draw(&bar, &look(Length { bytes: 600 << 20, basis: Basis::Keys }), Unit::Bytes);
        assert_eq!(bar.message(), "240 MiB of about 600 MiB, 40.0 %, 120 MiB/s, 3.0 s left");
        assert_eq!((bar.position(), bar.length()), (400, Some(1000)));
    }

    #[test]
    fn the_templates_of_the_bars_are_understood() {
        for has_length in [false, true] {
            let _ = style(has_length);
        }
        assert!(ProgressStyle::with_template("{prefix:10} [{bar:20}] {msg}").is_ok());
    }
}
