//! What is kept of a run: the history of a group with its times, and the counts of all groups.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use remora_bench::sync::Result;

use crate::show::Screen;
use crate::table;

/// The history of a group: each line is printed, and written to a file.
pub(super) struct History<'a> {
    screen: &'a Screen,
    begun: Instant,
    file: File,
    folder: PathBuf,
}

impl<'a> History<'a> {
    /// An empty history in `folder`. Times count from `begun`, the start of the run.
    pub(super) fn new(screen: &'a Screen, begun: Instant, folder: &Path) -> Result<History<'a>> {
        fs::create_dir_all(folder)?;
        let file = OpenOptions::new().create(true).append(true).open(folder.join("history.log"))?;
        Ok(History { screen, begun, file, folder: folder.to_owned() })
    }

    /// Prints a line and keeps it.
    pub(super) fn note(&mut self, line: &str) {
        let line = format!("[{}] {line}", clock(self.begun.elapsed()));
        self.screen.say(&line);
        // The line was printed; a full disk does not end the run.
        let _ = writeln!(self.file, "{line}");
    }

    /// Keeps the output of a process, or a server's log, under this name.
    pub(super) fn keep(&self, name: &str, text: &str) {
        // As above: what is missing then is a file, not the finding.
        let _ = fs::write(self.folder.join(name), text);
    }

    /// A path in the folder of the group.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Minutes, seconds and tenths.
fn clock(time: Duration) -> String {
    format!("{:>3}:{:02}.{}", time.as_secs() / 60, time.as_secs() % 60, time.subsec_millis() / 100)
}

/// The counts of a run.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// Events by kind.
    pub(super) events: BTreeMap<&'static str, u64>,
    /// Moments at which everything was compared.
    pub(super) rests: u64,
    /// Servers compared with their primary.
    pub(super) comparisons: u64,
    /// Runs of `remora verify`.
    pub(super) verified: u64,
    /// Replicas that an agent brought in step, by method.
    pub(super) syncs: BTreeMap<String, u64>,
    /// How agents ended, by program and exit code or signal.
    pub(super) ends: BTreeMap<String, u64>,
    /// Commands of the writer.
    pub(super) commands: u64,
    /// What must not happen and did.
    pub(super) findings: Vec<Finding>,
}

/// Something that must not happen.
#[derive(Debug)]
pub(super) struct Finding {
    /// The arguments that play the group again.
    pub(super) again: String,
    /// What happened.
    pub(super) what: String,
    /// Where the logs are.
    pub(super) logs: PathBuf,
}

impl Totals {
    /// Counts one more.
    pub(super) fn count<K: Ord>(counts: &mut BTreeMap<K, u64>, what: K) {
        *counts.entry(what).or_default() += 1;
    }

    /// The number of findings, in words.
    pub(super) fn found(&self) -> String {
        match self.findings.len() {
            1 => "1 finding".to_owned(),
            count => format!("{count} findings"),
        }
    }

    /// The summary that is printed at the end.
    pub(super) fn text(&self) -> String {
        let rows = |counts: Vec<(String, u64)>| -> Vec<Vec<String>> {
            counts.into_iter().map(|(what, count)| vec![what, count.to_string()]).collect()
        };
        let named =
            |counts: &BTreeMap<String, u64>| counts.iter().map(|(what, count)| (what.clone(), *count)).collect();
        let events = self.events.iter().map(|(what, count)| ((*what).to_owned(), *count)).collect();
        let mut text = String::from("\n");
        for (head, counts) in
            [("event", events), ("sync completed", named(&self.syncs)), ("end of an agent", named(&self.ends))]
        {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}", table::lay_out(&[head, "count"], 1, &rows(counts)));
        }
        let events: u64 = self.events.values().sum();
        let _ = writeln!(
            text,
            "{events} events, {} rests, {} comparisons of all data, {} runs of remora verify, {} commands written, {}",
            self.rests,
            self.comparisons,
            self.verified,
            self.commands,
            self.found()
        );
        for Finding { again, what, logs } in &self.findings {
            let _ = writeln!(text, "\nFINDING: {what}\n  again: {again}\n  logs: {}", logs.display());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_counts_and_findings() {
        let mut totals = Totals { rests: 3, ..Totals::default() };
        Totals::count(&mut totals.events, "FLUSHALL");
        Totals::count(&mut totals.events, "FLUSHALL");
        Totals::count(&mut totals.ends, "replica: exit code 6".to_owned());
        let (again, what, logs) = ("--seed 7".to_owned(), "C differs".to_owned(), PathBuf::from("/tmp/x"));
        totals.findings.push(Finding { again, what, logs });
        let text = totals.text();
        for part in [
            "FLUSHALL",
            "2 events, 3 rests",
            "written, 1 finding\n",
            "replica: exit code 6",
            "C differs",
            "--seed 7",
            "/tmp/x",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }

    #[test]
    fn a_time_is_shown_in_minutes() {
        assert_eq!(clock(Duration::from_millis(125_340)), "  2:05.3");
    }
}
