//! What a command shows while it works: bars on a terminal, plain lines elsewhere, nothing with `--quiet`.
//!
//! Everything goes to stderr; stdout is for results, which [`print()`] writes. Plain lines are printed at most every
//! two seconds and once at the end, so that they do not fill the log of a service. Log events go through
//! [`LogWriter`], which moves the bars out of the way.
//!
//! Stderr may not be writable: its disk is full, or its reader has gone. That ends no command: what cannot be written
//! there is lost, and counted. A result that cannot be written to stdout fails the command.
//!
//! How far, how fast and how long is defined by a [`Tracker`], and its words are below. Both are used beyond this
//! process's terminal too.
//!
//! The state belongs to the process, as there is one terminal: [`configure`] is called once, before anything is shown.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use crate::exit::Failure;
use remora_base::units::{Size, counted, readable};
use remora_protocol::{Advance, Basis, Length};

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
            let words = if last { at_the_end(&look, self.unit) } else { in_progress(&look, self.unit) };
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
        let size = rustix::termios::tcgetwinsize(io::stderr()).ok().map(|size| (size.ws_col, size.ws_row));
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
    bar.set_message(in_progress(look, unit));
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

// Tracker: how far a piece of work is, how fast it goes, and how long the rest takes. The one definition of all three,
// for bars and lines of this process, for what a source reports of itself and its replicas, and for metrics.
//
// - **Rate:** what was added in the last [`RATE_SPAN`], per second. None in the first [`LEAST_SPAN`], and none at the
//   end: there is nothing left to be fast with.
// - **Percent:** of the length of the whole. While that is estimated it stays below 100, and it never becomes smaller:
//   an estimate may grow faster than the work.
// - **Time left:** the rest, at that rate.
//
// Pure: the caller hands the time in.

/// The time over which a rate is averaged: long enough to be steady beside slots that arrive whole, short enough to
/// follow a link that slows down.
pub const RATE_SPAN: Duration = Duration::from_secs(5);

/// A rate over less time is a matter of chance.
const LEAST_SPAN: Duration = Duration::from_millis(500);

/// Samples are this far apart, so that a tracker holds two dozen of them however often it is told something.
const SAMPLE_EVERY: Duration = Duration::from_millis(250);

/// All of the work, in thousandths.
const ALL: u16 = 1000;

/// Follows one piece of work. A position below the last one begins it anew.
#[derive(Clone, Debug, Default)]
pub struct Tracker {
    /// When the work began, and at which position: what a former attempt has left is not counted.
    begun: Option<(Instant, u64)>,
    /// Positions of the last [`RATE_SPAN`], and the last one before.
    samples: VecDeque<(Instant, u64)>,
    position: u64,
    /// When it was told last.
    told: Option<Instant>,
    length: Length,
    permille: Option<u16>,
    /// The highest of them so far.
    highest: u16,
    /// When all was there.
    ended: Option<Instant>,
}

/// What a tracker shows at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// What is there.
    pub position: u64,
    /// What is known of the whole.
    pub length: Length,
    /// Thousandths of the whole; `None` if its length is unknown.
    pub permille: Option<u16>,
    /// Per second; `None` if it cannot be told yet, or all is there.
    pub rate: Option<f64>,
    /// `None` if nothing moves, or the rest is unknown.
    pub left: Option<Duration>,
    /// Since the beginning, up to the end.
    pub took: Duration,
    /// Per second since the beginning.
    pub average: f64,
}

impl Tracker {
    /// The work is at `position` of `length`.
    pub fn reach(&mut self, now: Instant, position: u64, length: Length) {
        if position < self.position {
            *self = Tracker::default();
        }
        self.begun.get_or_insert((now, position));
        (self.position, self.length, self.told) = (position, length, Some(now));
        let is_whole = length.basis == Basis::Known && position >= length.bytes;
        self.ended = is_whole.then(|| self.ended.unwrap_or(now));
        self.permille = match share(position, length) {
            None => None,
            Some(_) if is_whole => Some(ALL),
            Some(share) => Some(share.max(self.highest).min(ALL - 1)),
        };
        self.highest = self.permille.unwrap_or(self.highest);
        if self.samples.back().is_none_or(|(last, _)| now.saturating_duration_since(*last) >= SAMPLE_EVERY) {
            self.samples.push_back((now, position));
        }
        let is_old = |sample: &(Instant, u64)| now.saturating_duration_since(sample.0) >= RATE_SPAN;
        while self.samples.get(1).is_some_and(is_old) {
            self.samples.pop_front();
        }
    }

    /// Whether all is there.
    pub fn is_whole(&self) -> bool {
        self.ended.is_some()
    }

    /// What is shown at this moment.
    pub fn look(&self, now: Instant) -> Look {
        let (begun, from) = self.begun.unwrap_or((now, self.position));
        let took = self.ended.unwrap_or(now).saturating_duration_since(begun);
        let rate = self.rate(now);
        let rest = self.length.bytes.saturating_sub(self.position);
        // A slower one is shown as zero.
        let left = rate.filter(|rate| *rate >= 1.0 && rest > 0);
        Look {
            position: self.position,
            length: self.length,
            permille: self.permille,
            rate,
            left: left.and_then(|rate| Duration::try_from_secs_f64(rest as f64 / rate).ok()),
            took,
            average: (self.position - from) as f64 / took.max(Duration::from_millis(1)).as_secs_f64(),
        }
    }

    /// What was added in the last [`RATE_SPAN`], per second.
    fn rate(&self, now: Instant) -> Option<f64> {
        let age = |sample: &(Instant, u64)| now.saturating_duration_since(sample.0);
        if !self.is_whole() && self.told.is_some_and(|told| now.saturating_duration_since(told) >= RATE_SPAN) {
            return Some(0.0);
        }
        let old = self.samples.iter().rev().find(|sample| age(sample) >= RATE_SPAN);
        let since = old.or_else(|| self.samples.front()).filter(|_| !self.is_whole())?;
        let span = age(since);
        (span >= LEAST_SPAN).then(|| self.position.saturating_sub(since.1) as f64 / span.as_secs_f64())
    }
}

impl Look {
    /// The same for another process.
    pub fn advance(&self) -> Advance {
        Advance {
            percent_permille: self.permille,
            rate_bytes_per_s: self.rate.unwrap_or(0.0) as u64,
            left_seconds: self.left.map(|left| left.as_secs_f64().ceil() as u64),
        }
    }
}

/// The end of a transfer.
pub const WHOLE: Advance = Advance { percent_permille: Some(ALL), rate_bytes_per_s: 0, left_seconds: None };

/// The length of something that is known.
pub fn known(length: u64) -> Length {
    Length { bytes: length, basis: Basis::Known }
}

/// Thousandths, rounded down. An estimate that was exceeded says nothing, except one that follows the work.
pub fn share(position: u64, length: Length) -> Option<u16> {
    match length.basis {
        Basis::Unknown => None,
        Basis::Memory | Basis::Former if position > length.bytes => None,
        Basis::Memory | Basis::Former | Basis::Keys | Basis::Known => {
            let share = (u128::from(position) * u128::from(ALL)).checked_div(u128::from(length.bytes));
            Some(share.map_or(0, |share| share.min(u128::from(ALL)) as u16))
        }
    }
}

// Words: how far a piece of work is, for people. Bars, plain lines, `remora status` and the page of `--metrics` say it
// in the same words.

/// The unit of a [`Meter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown as MiB and MiB/s.
    Bytes,
    /// Things with this name, in the singular.
    Count(&'static str),
}

impl Unit {
    fn amount(self, number: u64) -> String {
        match self {
            Unit::Bytes => Size::bytes(number).to_string(),
            Unit::Count(name) => counted(number, name),
        }
    }
}

/// `120 of 256 keys, 46.8 %, 60 keys/s, 2.3 s left`, or what is known of that.
pub fn in_progress(look: &Look, unit: Unit) -> String {
    let mut words = reached(look.position, look.length, unit);
    words.extend(look.permille.map(percent));
    words.extend(look.rate.map(|rate| format!("{}/s", unit.amount(rate as u64))));
    words.push(match look.left {
        Some(left) => time_left(left),
        None => format!("{} so far", readable(look.took)),
    });
    words.join(", ")
}

/// `256 of 256 keys, 100.0 %, 4.3 s in total, 60 keys/s on average`.
pub fn at_the_end(look: &Look, unit: Unit) -> String {
    let mut words = reached(look.position, look.length, unit);
    words.extend(look.permille.map(percent));
    words.push(format!("{} in total", readable(look.took)));
    words.push(format!("{}/s on average", unit.amount(look.average as u64)));
    words.join(", ")
}

fn reached(position: u64, length: Length, unit: Unit) -> Vec<String> {
    let position = match unit {
        Unit::Count(_) if length.basis != Basis::Unknown => position.to_string(),
        unit => unit.amount(position),
    };
    vec![match of_length(length, unit) {
        None => position,
        Some(of) => format!("{position} {of}"),
    }]
}

/// `of about 610 MiB`; `None` if the length is unknown.
pub fn of_length(length: Length, unit: Unit) -> Option<String> {
    let whole = unit.amount(length.bytes);
    match length.basis {
        Basis::Unknown => None,
        Basis::Memory => Some(format!("of at most {whole}")),
        Basis::Former | Basis::Keys => Some(format!("of about {whole}")),
        Basis::Known => Some(format!("of {whole}")),
    }
}

/// `46.8 %`, rounded down, so that 100 means everything.
pub fn percent(permille: u16) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

/// `22.75 MiB/s`.
pub fn rate(bytes_per_second: u64) -> String {
    format!("{}/s", Unit::Bytes.amount(bytes_per_second))
}

/// `2.3 s left`.
pub fn time_left(left: Duration) -> String {
    format!("{} left", readable(left))
}

#[cfg(test)]
mod tests {

    use proptest::prelude::*;

    use super::{known, *};
    use remora_protocol::Basis;

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

    const MIB: u64 = 1 << 20;

    fn estimated(bytes: u64) -> Length {
        Length { bytes, basis: Basis::Keys }
    }

    /// What is shown of work after `steps` steps, each of which takes 100 ms and adds a MiB.
    fn after(steps: u64, length: Length) -> Look {
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        let at = |step: u64| start + Duration::from_millis(100 * step);
        (0..=steps).for_each(|step| tracker.reach(at(step), step * MIB, length));
        tracker.look(at(steps))
    }

    fn rate(look: &Look) -> Option<u64> {
        look.rate.map(|rate| (rate / MIB as f64).round() as u64)
    }

    #[test]
    fn a_percentage_a_rate_and_the_time_left_follow_from_each_other() {
        let look = after(50, estimated(200 * MIB));
        assert_eq!((look.permille, rate(&look), look.left), (Some(250), Some(10), Some(Duration::from_secs(15))));
        let advance = Advance { percent_permille: Some(250), rate_bytes_per_s: 10 * MIB, left_seconds: Some(15) };
        assert_eq!(look.advance(), advance);
    }

    #[test]
    fn the_first_moment_has_no_rate_and_thus_no_time_left() {
        let look = after(4, known(200 * MIB));
        assert_eq!((look.permille, look.rate, look.left), (Some(20), None, None));
        assert_eq!(rate(&after(5, known(200 * MIB))), Some(10));
        assert_eq!(Tracker::default().look(Instant::now()).advance(), Advance::default());
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds_and_of_nothing_it_is_zero() {
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        let at = |step: u64| start + Duration::from_millis(100 * step);
        // Fast for a minute, then slow.
        (0..600).for_each(|step| tracker.reach(at(step), step * 10 * MIB, known(10_000 * MIB)));
        (600..660).for_each(|step| tracker.reach(at(step), (6000 + step - 600) * MIB, known(10_000 * MIB)));
        assert_eq!(rate(&tracker.look(at(659))), Some(10));
        // The tracker is told nothing for a while.
        let silent = tracker.look(at(659) + RATE_SPAN);
        assert_eq!((silent.rate, silent.left, silent.permille), (Some(0.0), None, Some(605)));
    }

    #[test]
    fn all_is_a_hundred_percent_only_once_the_end_is_known_and_the_end_has_no_rate() {
        assert_eq!(after(50, estimated(50 * MIB)).permille, Some(999));
        assert_eq!(after(50, estimated(10 * MIB)).permille, Some(999), "more keys are to come");
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        tracker.reach(start, 0, known(4 * MIB));
        tracker.reach(start + Duration::from_secs(2), 4 * MIB, known(4 * MIB));
        let later = tracker.look(start + Duration::from_secs(60));
        assert_eq!((later.permille, later.rate, later.left), (Some(1000), None, None));
        assert_eq!((later.took, later.average as u64), (Duration::from_secs(2), 2 * MIB));
    }

    #[test]
    fn an_unknown_length_has_no_percentage_and_a_refuted_one_neither() {
        assert_eq!(after(50, Length::default()).permille, None);
        let memory = |bytes| Length { bytes, basis: Basis::Memory };
        assert_eq!(after(50, memory(100 * MIB)).permille, Some(500));
        assert_eq!(after(50, memory(49 * MIB)).permille, None);
        assert_eq!(after(50, estimated(0)).permille, Some(0));
        assert_eq!(after(0, known(0)).permille, Some(1000), "nothing, and all of it");
    }

    #[test]
    fn an_attempt_that_begins_anew_begins_at_nothing() {
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        tracker.reach(start, 0, known(100));
        tracker.reach(start + Duration::from_secs(1), 90, known(100));
        tracker.reach(start + Duration::from_secs(2), 10, known(100));
        let look = tracker.look(start + Duration::from_secs(2));
        assert_eq!((look.permille, look.rate), (Some(100), None));
    }

    fn lengths() -> impl Strategy<Value = Length> {
        let bases = [Basis::Unknown, Basis::Memory, Basis::Former, Basis::Keys];
        (0..1u64 << 40, prop::sample::select(bases.to_vec())).prop_map(|(bytes, basis)| Length { bytes, basis })
    }

    proptest! {
        #[test]
        fn whatever_is_estimated_a_percentage_never_falls_and_is_a_hundred_at_the_end_only(
            steps in prop::collection::vec((0..1u64 << 36, lengths(), 0..3000u64), 1..60),
        ) {
            let (mut now, mut tracker, mut position, mut shown) = (Instant::now(), Tracker::default(), 0, 0);
            for (more, length, millis) in steps {
                now += Duration::from_millis(millis);
                position += more;
                tracker.reach(now, position, length);
                let look = tracker.look(now);
                if let Some(permille) = look.permille {
                    prop_assert!((shown..1000).contains(&permille));
                    shown = permille;
                }
                prop_assert!(look.rate.is_none_or(|rate| rate.is_finite() && rate >= 0.0));
                prop_assert!(look.left.is_none() || look.rate >= Some(1.0));
                prop_assert!(tracker.samples.len() <= 22);
            }
            tracker.reach(now, position, known(position));
            prop_assert_eq!(tracker.look(now).permille, Some(1000));
        }
    }

    fn look(position: u64, length: Length, rate: Option<f64>, left: Option<u64>) -> Look {
        let permille = (length.basis != Basis::Unknown).then(|| (position * 1000 / length.bytes) as u16);
        let (left, took) = (left.map(Duration::from_secs), Duration::from_secs(8));
        Look { position, length, permille, rate, left, took, average: 50.0 }
    }

    #[test]
    fn a_line_says_how_far_how_fast_and_how_long() {
        let keys = Unit::Count("key");
        let half = look(100, known(400), Some(50.4), Some(6));
        assert_eq!(in_progress(&half, keys), "100 of 400 keys, 25.0 %, 50 keys/s, 6.0 s left");
        let whole = look(400, known(400), None, None);
        assert_eq!(at_the_end(&whole, keys), "400 of 400 keys, 100.0 %, 8.0 s in total, 50 keys/s on average");
        let unknown = look(3 << 20, Length::default(), Some(1048576.0), None);
        assert_eq!(in_progress(&unknown, Unit::Bytes), "3 MiB, 1 MiB/s, 8.0 s so far");
        assert_eq!(in_progress(&look(7, Length::default(), None, None), keys), "7 keys, 8.0 s so far");
    }

    #[test]
    fn an_estimate_says_that_it_is_one() {
        let of = |basis| of_length(Length { bytes: 610 << 20, basis }, Unit::Bytes);
        assert_eq!(of(Basis::Unknown), None);
        assert_eq!(of(Basis::Memory).as_deref(), Some("of at most 610 MiB"));
        assert_eq!(of(Basis::Former).as_deref(), Some("of about 610 MiB"));
        assert_eq!(of(Basis::Keys).as_deref(), Some("of about 610 MiB"));
        assert_eq!(of(Basis::Known).as_deref(), Some("of 610 MiB"));
    }

    #[test]
    fn a_hundred_percent_means_all() {
        assert_eq!((percent(999), percent(1000), percent(7)), ("99.9 %".into(), "100.0 %".into(), "0.7 %".into()));
    }
}
