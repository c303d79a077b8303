//! Kept runs: all figures, with the facts that a reader needs.

use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Link;
use crate::Run;
use crate::sync::Result;

/// One run of one subcommand.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kept<P> {
    /// Machine, time and command line.
    pub run: Run,
    /// A label that distinguishes it from other runs of the same kind.
    #[serde(default)]
    pub label: String,
    /// The speed of the networks, measured just before.
    pub links: Vec<Link>,
    /// Every figure.
    pub points: Vec<P>,
}

impl<P: Serialize + DeserializeOwned> Kept<P> {
    /// An empty run of `remora-bench NAME`.
    pub fn begin(name: &str, label: Option<&str>) -> Kept<P> {
        let run = Run::new(&format!("bench_{name}"), "see the columns");
        let run = Run { command: format!("remora-bench {}", arguments(std::env::args().skip(1))), ..run };
        Kept { run, label: label.unwrap_or_default().to_owned(), links: Vec::new(), points: Vec::new() }
    }

    /// Adds a note for the reader of the run, and prints it.
    pub fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        eprintln!("note: {text}");
        self.run.notes.push(text);
    }

    /// Writes the run into a new folder below `out`, with this summary. Called after each figure, so that an
    /// interrupted run leaves the figures that it has.
    ///
    /// # Errors
    /// A folder or file could not be written.
    pub fn keep(&self, out: Option<&Path>, summary: &str) -> Result<()> {
        let Some(out) = out else { return Ok(()) };
        let mut run = self.run.clone();
        if !self.label.is_empty() {
            run.program = format!("{}-{}", run.program, self.label);
        }
        let notes: String = self.run.notes.iter().map(|note| format!("\n> {note}\n")).collect();
        let files = [
            ("run.json", serde_json::to_string_pretty(self)?),
            ("raw.csv", self.csv()?),
            ("summary.md", format!("{summary}{notes}")),
        ];
        run.keep_files(out, &files)?;
        Ok(())
    }

    /// All points as a table: the fields are the columns.
    fn csv(&self) -> Result<String> {
        let mut text = String::new();
        for (number, point) in self.points.iter().enumerate() {
            let Value::Object(fields) = serde_json::to_value(point)? else { continue };
            if number == 0 {
                text += &(fields.keys().cloned().collect::<Vec<_>>().join(",") + "\n");
            }
            text += &(fields.values().map(cell).collect::<Vec<_>>().join(",") + "\n");
        }
        Ok(text)
    }
}

/// The command line without the folder in which the run is kept.
pub(crate) fn arguments(typed: impl Iterator<Item = String>) -> String {
    let mut typed = typed;
    let mut words = Vec::new();
    while let Some(word) = typed.next() {
        match word.as_str() {
            "--out" => drop(typed.next()),
            _ if word.starts_with("--out=") => {}
            _ => words.push(word),
        }
    }
    words.join(" ")
}

/// A value between commas.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.replace(',', ""),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(" "),
        Value::Object(fields) => {
            let named = fields.iter().map(|(name, value)| format!("{name}={}", cell(value)));
            named.collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}

/// The kept runs of `remora-bench NAME`, the newest of each label, with their folders.
///
/// # Errors
/// A run exists and cannot be read.
pub fn newest<P: DeserializeOwned>(runs: &Path, name: &str) -> Result<Vec<(PathBuf, Kept<P>)>> {
    newest_of(runs, &format!("bench_{name}"))
}

/// The kept runs of a program, the newest of each label, with their folders.
///
/// # Errors
/// A run exists and cannot be read.
pub fn newest_of<R: DeserializeOwned>(runs: &Path, program: &str) -> Result<Vec<(PathBuf, R)>> {
    let mut folders: Vec<PathBuf> = fs::read_dir(runs)
        .map_err(|error| format!("could not read {}: {error}", runs.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|folder| is_of(folder, program))
        .collect();
    // The name begins with the date; what follows it is the same for all of one label.
    folders.sort();
    let last = |folder: &PathBuf| {
        let same = folders.iter().rev().find(|other| label(other, program) == label(folder, program));
        same == Some(folder)
    };
    let folders: Vec<PathBuf> = folders.iter().filter(|folder| last(folder)).cloned().collect();
    let read = |folder: PathBuf| {
        let path = folder.join("run.json");
        let kept = fs::read(&path).map_err(|error| error.to_string());
        let kept = kept.and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()));
        Ok((folder, kept.map_err(|error| format!("could not read {}: {error}", path.display()))?))
    };
    folders.into_iter().map(read).collect()
}

/// The label in the name of a run's folder; empty without one.
pub(super) fn label(folder: &Path, program: &str) -> String {
    after(folder, program).unwrap_or_default().trim_start_matches('-').to_owned()
}

/// Whether a folder's name is `…-PROGRAM` or `…-PROGRAM-LABEL`.
fn is_of(folder: &Path, program: &str) -> bool {
    after(folder, program).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// What follows the program in the name of a run's folder.
fn after(folder: &Path, program: &str) -> Option<String> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.split_once(&format!("-{program}")).map(|(_, rest)| rest.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Point {
        name: String,
        value: f64,
        more: Option<Vec<u32>>,
    }

    #[test]
    fn the_folder_of_a_run_is_not_in_its_command_line() {
        let typed = ["sync", "--out", "/home/me/runs", "--rounds", "2", "--out=elsewhere"].map(str::to_owned);
        assert_eq!(arguments(typed.into_iter()), "sync --rounds 2");
    }

    #[test]
    fn the_newest_run_of_each_label_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut kept = Kept::begin("sync", Some("label"));
        kept.points.push(Point { name: "a, b".into(), value: 1.5, more: Some(vec![1, 2]) });
        let runs = [("2026-01-02", "label", 2.0), ("2026-01-01", "label", 1.0), ("2026-01-01", "other", 3.0)];
        for (date, label, value) in runs {
            kept.run.date = date.into();
            kept.label = label.into();
            kept.points[0].value = value;
            kept.keep(Some(folder.path()), "# words\n").unwrap();
        }
        let read = newest::<Point>(folder.path(), "sync").unwrap();
        assert_eq!(read.iter().map(|(_, kept)| kept.points[0].value).collect::<Vec<_>>(), [3.0, 2.0]);
        assert_eq!(fs::read_to_string(read[1].0.join("raw.csv")).unwrap(), "more,name,value\n1 2,a b,2.0\n");
        assert!(newest::<Point>(folder.path(), "syn").unwrap().is_empty());
    }
}
