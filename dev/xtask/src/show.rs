//! The display while a demo runs: bars if stderr is a terminal, else a line for every change of phase.

use std::io::{IsTerminal, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use remora_bench::sync::{Program, Result, Sight};
use remora_lab::Kind;

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
    use super::*;

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
