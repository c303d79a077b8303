//! The screen: `remora status --watch` on a terminal, drawn anew at each report.
//!
//! ```text
//!   source     remora 0.1.0 of redis://10.0.0.1:6379 (primary)
//!   snapshot   937 MiB, whole, by psync, 3 min 00 s old
//!   stream     2.10 MiB held, to offset 73322
//!   memory     ████████░░░░░░░░░░░░ 939.10 MiB of 2 GiB in use
//!   ┌ 2 replicas ───────────────────────────────────────────────────────────┐
//!   │ replica  phase     of the snapshot               rate         left     │
//!   │ db2      transfer  ████████████░░░░░░░░  61.0 %  110.20 MiB/s 3.0 s    │
//! ```
//!
//! What it says is decided in [`view`](remora_metrics::view). A build without the feature `screen` prints one table
//! after another instead.

use std::io;
use std::mem::ManuallyDrop;
use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table, Widget};

use super::Asked;
use crate::exit::Failure;
use crate::units::counted;
use remora_metrics::view::{Fact, HEADS, Level, Row as Replica, Share, View};
use remora_protocol::{Phase, StatusReport};

/// Shows the status on the terminal until a key ends it.
pub(super) async fn watch(source: &mut Asked, pause: Duration) -> Result<(), Failure> {
    // The first answer comes before the terminal is taken: an error is then an ordinary line.
    let mut report = source.report().await?;
    let mut screen = Screen::begin()?;
    loop {
        screen.show(&report)?;
        tokio::select! {
            wish = screen.wait(&report, pause) => {
                if wish? == Wish::Quit {
                    return Ok(());
                }
            }
            // A line about it would stand in the middle of the screen; without new files the old ones were right.
            () = source.files_changed() => { _ = source.connect_again().await }
        }
        report = source.report().await?;
    }
}

/// A terminal that shows reports. Dropping it gives the terminal back as it was.
struct Screen {
    /// Its own end would print an error by `eprintln!`, which panics if the terminal is gone.
    terminal: ManuallyDrop<ratatui::DefaultTerminal>,
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// The next report.
    Next,
    /// The end.
    Quit,
}

impl Screen {
    /// Takes the terminal.
    fn begin() -> Result<Screen, Failure> {
        let terminal = ratatui::try_init().map_err(unusable)?;
        Ok(Screen { terminal: ManuallyDrop::new(terminal) })
    }

    /// Draws a report.
    fn show(&mut self, report: &StatusReport) -> Result<(), Failure> {
        self.terminal.draw(|frame| draw(report, frame.area(), frame.buffer_mut())).map(drop).map_err(unusable)
    }

    /// Waits until the next report is due, or a key asks for something. Draws again if the terminal has changed its
    /// size.
    async fn wait(&mut self, report: &StatusReport, pause: Duration) -> Result<Wish, Failure> {
        let until = tokio::time::Instant::now() + pause;
        loop {
            while event::poll(Duration::ZERO).map_err(unusable)? {
                match event::read().map_err(unusable)? {
                    Event::Resize(..) => self.show(report)?,
                    other => {
                        if let Some(wish) = wish(&other) {
                            return Ok(wish);
                        }
                    }
                }
            }
            let now = tokio::time::Instant::now();
            if now >= until {
                return Ok(Wish::Next);
            }
            tokio::time::sleep_until(until.min(now + LOOK_EVERY)).await;
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that is gone.
        let _ = self.terminal.show_cursor();
        let _ = ratatui::try_restore();
    }
}

fn unusable(error: io::Error) -> Failure {
    Failure::local(format!("the terminal cannot be used: {error}; redirect the output to get text"))
}

/// What a key asks for; `None` if it means nothing.
fn wish(event: &Event) -> Option<Wish> {
    let Event::Key(key) = event else { return None };
    if key.kind != KeyEventKind::Press {
        return None;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        // The terminal sends no signal while it belongs to the screen.
        KeyCode::Char('c') if control => Some(Wish::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Wish::Quit),
        KeyCode::Char(' ') | KeyCode::Enter => Some(Wish::Next),
        _ => None,
    }
}

fn draw(report: &StatusReport, area: Rect, buffer: &mut Buffer) {
    let view = View::of(report);
    let head = head(&view);
    let rows = [Constraint::Length(head.len() as u16), Constraint::Min(3), Constraint::Length(1)];
    let [top, middle, bottom] = Layout::vertical(rows).areas(area);
    Paragraph::new(head).render(top, buffer);
    draw_replicas(&view.replicas, middle, buffer);
    let keys = Line::from("q: end   space: now").style(Style::new().add_modifier(Modifier::DIM));
    keys.render(bottom, buffer);
}

/// The lines about the source and its tables.
fn head(view: &View) -> Vec<Line<'static>> {
    let mut lines = vec![line("source", view.source.clone())];
    lines.extend(view.facts.iter().map(fact));
    if !view.failure.is_empty() {
        lines.push(line("failed", view.failure.clone()).style(Style::new().fg(Color::Red)));
    }
    lines
}

fn fact(fact: &Fact) -> Line<'static> {
    let text = match fact.more.as_str() {
        "" => fact.value.clone(),
        more => format!("{}, {more}", fact.value),
    };
    let Some(share) = fact.share else { return line(fact.name, text) };
    let mut line = line(fact.name, String::new());
    line.push_span(Span::styled(bar(share.of_one), Style::new().fg(level(share))));
    line.push_span(Span::raw(format!(" {text}")));
    line
}

fn line(name: &'static str, text: String) -> Line<'static> {
    let name = Span::styled(format!("{name:<10} "), Style::new().add_modifier(Modifier::BOLD));
    Line::from(vec![name, Span::raw(text)])
}

/// A bar of [`BAR`] columns.
fn bar(share: f64) -> String {
    let full = (share.clamp(0.0, 1.0) * BAR as f64).round() as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(BAR - full))
}

fn draw_replicas(replicas: &[Replica], area: Rect, buffer: &mut Buffer) {
    let rows = replicas.iter().map(|replica| {
        let progress = Line::from(vec![
            Span::styled(bar(replica.share), Style::new().fg(colour(replica.phase))),
            Span::raw(format!(" {:>7}", replica.percent)),
        ]);
        let silent = if replica.is_silent { Style::new().fg(Color::Red) } else { Style::new() };
        Row::new([
            Cell::from(replica.name.clone()),
            Cell::from(replica.phase.to_string()).style(Style::new().fg(colour(replica.phase))),
            Cell::from(progress),
            Cell::from(replica.rate.clone()),
            Cell::from(replica.left.clone()),
            Cell::from(replica.lag.clone()),
            Cell::from(replica.by.clone()),
            Cell::from(replica.from.clone()),
            Cell::from(replica.joined.clone()),
            Cell::from(replica.silent.clone()).style(silent),
        ])
    });
    let widths = [
        Constraint::Fill(2),
        Constraint::Length(9),
        Constraint::Length(BAR as u16 + 8),
        Constraint::Length(13),
        Constraint::Length(11),
        Constraint::Length(11),
        Constraint::Length(5),
        Constraint::Fill(1),
        Constraint::Length(11),
        Constraint::Length(11),
    ];
    let table = Table::new(rows, widths)
        .header(Row::new(HEADS).style(Style::new().add_modifier(Modifier::BOLD)))
        .block(Block::bordered().title(format!(" {} ", counted(replicas.len(), "replica"))));
    Widget::render(table, area, buffer);
}

/// The colour of a part of a limit.
fn level(share: Share) -> Color {
    match share.level {
        Level::Low => Color::Green,
        Level::High => Color::Yellow,
        Level::Full => Color::Red,
    }
}

/// The colour of a phase.
fn colour(phase: Phase) -> Color {
    match phase {
        Phase::Waiting => Color::Yellow,
        Phase::Transfer => Color::Cyan,
        Phase::Load => Color::Blue,
        Phase::CatchUp | Phase::HandOff | Phase::Stay | Phase::Done => Color::Green,
    }
}

/// Columns of a bar.
const BAR: usize = 20;

/// How often keys are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::KeyEvent;

    use super::*;
    use crate::units::Size;
    use remora_metrics::sample::{replica, report};
    use remora_protocol::Advance;

    fn drawn(report: &StatusReport, width: u16, height: u16) -> String {
        let area = Rect::new(0, 0, width, height);
        let mut buffer = Buffer::empty(area);
        draw(report, area, &mut buffer);
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(row).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_report_is_drawn_with_its_bars() {
        let mut half = replica(2, "second", Some(1));
        half.advance = Advance { percent_permille: Some(500), rate_bytes_per_s: 110 << 20, left_seconds: Some(4) };
        half.journal_lag_bytes = 3 << 20;
        let mut whole = replica(1, "first", None);
        whole.advance.percent_permille = Some(1000);
        (half.applied_offset, whole.applied_offset) = (5 << 20, 8 << 20);
        let text = drawn(&report(vec![whole, half]), 130, 16);
        for words in ["of redis://10.0.0.1:6379 (primary)", "937 MiB, whole", " 2 replicas ", "q: end"] {
            assert!(text.contains(words), "no {words}:\n{text}");
        }
        let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap_or_default().to_owned();
        let (first, second) = (line("first  "), line("second"));
        assert!(first.contains(&"█".repeat(BAR)) && first.contains("100.0 %") && first.contains("source"), "{text}");
        assert!(
            second.contains(&bar(0.5))
                && second.contains(&format!("{}/s", Size::bytes(110 << 20)))
                && second.contains("4.0 s")
                && second.contains("first"),
            "{text}"
        );
        assert!(line("journal").contains(&format!("{} behind", Size::bytes(3 << 20))), "{text}");
    }

    #[test]
    fn nothing_and_much_fit_into_any_terminal() {
        let many = (0..200).map(|session| replica(session, "a name that is rather long for a table", None)).collect();
        let mut empty = report(Vec::new());
        empty.generation = None;
        for report in [empty, report(many)] {
            for (width, height) in [(1, 1), (20, 5), (80, 24), (300, 100)] {
                drawn(&report, width, height);
            }
        }
    }

    #[test]
    fn keys_end_it_or_ask_for_the_next_report() {
        let key = |code, modifiers| wish(&Event::Key(KeyEvent::new(code, modifiers)));
        assert_eq!(key(KeyCode::Char('q'), KeyModifiers::NONE), Some(Wish::Quit));
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Wish::Quit));
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::NONE), None);
        assert_eq!(key(KeyCode::Char(' '), KeyModifiers::NONE), Some(Wish::Next));
    }

    #[test]
    fn a_bar_is_never_longer_than_its_place() {
        for share in [-1.0, 0.0, 0.01, 0.5, 1.0, 7.0, f64::NAN] {
            assert_eq!(bar(share).chars().count(), BAR, "{share}");
        }
    }
}
