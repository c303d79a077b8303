//! The tests that are known to fail with Remora, with their reasons, and what a run says against that list.
//!
//! ```text
//! # A comment.
//! integration/shutdown
//!   The primary waits at its end for the source's acknowledgement.
//!     Shutting down master waits for replica to catch up
//!     module: A test that fails only with the module
//!     sometimes: A test that fails in some runs
//!     A test that may fail in one way only | sync_partial_err
//! ```
//!
//! A file, a reason, the tests that it explains. A test that stands there and passes fails the run: its line is stale.
//! That the file comes to its end is a test too, [`TO_THE_END`].
//!
//! [`TO_THE_END`]: super::outcome::TO_THE_END

use std::collections::BTreeMap;

use remora_bench::sync::Result;

use super::With;
use super::outcome::Outcome;

/// A list of known differences.
#[derive(Debug, Default)]
pub(super) struct Differs {
    /// By file and test.
    known: BTreeMap<(String, String), Vec<Entry>>,
}

/// A line of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// Only with this.
    with: Option<With>,
    /// Whether it passes in some runs.
    sometimes: bool,
    /// What the suite must say of it. Of a test that compares data too, another failure is not known.
    words: Option<String>,
}

/// What a run of one file with Remora says, beside the same file without.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Tests that pass without Remora, fail with it, and stand in the list.
    pub(super) known: Vec<String>,
    /// The same, and they do not stand in the list: each with what the suite said.
    pub(super) unexpected: Vec<String>,
    /// Tests of the list that passed, or that are not in the file.
    pub(super) stale: Vec<String>,
}

impl Verdict {
    /// Whether the file is as it must be.
    pub(super) fn is_good(&self) -> bool {
        self.unexpected.is_empty() && self.stale.is_empty()
    }
}

impl Differs {
    /// Reads a list.
    pub(super) fn read(text: &str) -> Result<Differs> {
        let mut differs = Differs::default();
        let (mut file, mut has_reason) = (None, false);
        for (number, line) in (1..).zip(text.lines()) {
            let wrong = |what: &str| format!("line {number} of the list of differences: {what}: {line}");
            let rest = line.trim_start_matches(' ');
            match line.len() - rest.len() {
                _ if rest.is_empty() || rest.starts_with('#') => {}
                0 => (file, has_reason) = (Some(rest.to_owned()), false),
                2 if file.is_some() => has_reason = true,
                4 => {
                    let file =
                        file.clone().filter(|_| has_reason).ok_or_else(|| wrong("a test without file and reason"))?;
                    let (name, entry) = entry(rest);
                    differs.known.entry((file, name)).or_default().push(entry);
                }
                _ => return Err(wrong("neither a file, nor a reason (2 spaces), nor a test (4)").into()),
            }
        }
        Ok(differs)
    }

    /// The files of the list, for a check that each exists.
    pub(super) fn files(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(|(file, _)| file.as_str())
    }

    /// Compares a run with Remora with one without. How often tests of one name run may be drawn at random: a name
    /// passes if it ran, and never failed.
    pub(super) fn judge(&self, file: &str, with: With, plain: &Outcome, remora: &Outcome) -> Verdict {
        let (mut verdict, mut missing) = (Verdict::default(), Vec::new());
        for name in plain.names().filter(|name| plain.passes(name)) {
            let entry = self.entry(file, name, with);
            let why = remora.tests.get(name).map_or("", |count| count.why.as_str());
            match (remora.passes(name), entry) {
                (false, Some(entry)) if entry.words.as_ref().is_none_or(|words| why.contains(words)) => {
                    verdict.known.push(name.to_owned());
                }
                (false, _) => match remora.tests.get(name) {
                    Some(count) => verdict.unexpected.push(format!("{name}: {}", count.why)),
                    None => missing.push(name),
                },
                (true, Some(entry)) if !entry.sometimes => verdict.stale.push(format!("{name}: it passes")),
                (true, _) => {}
            }
        }
        if !missing.is_empty() {
            verdict.unexpected.push(format!("{} tests did not run: {}", missing.len(), missing.join("; ")));
        }
        for ((_, name), _) in self.known.iter().filter(|((of, _), _)| of == file) {
            if !plain.passes(name) && self.entry(file, name, with).is_some_and(|entry| !entry.sometimes) {
                verdict.stale.push(format!("{name}: no test of this name passes without Remora"));
            }
        }
        verdict
    }

    fn entry(&self, file: &str, name: &str, with: With) -> Option<&Entry> {
        let entries = self.known.get(&(file.to_owned(), name.to_owned()))?;
        entries.iter().find(|entry| entry.with.is_none_or(|only| only == with))
    }
}

/// The marks before a test's name, and the name.
fn entry(mut rest: &str) -> (String, Entry) {
    let mut entry = Entry { with: None, sometimes: false, words: None };
    if let Some((before, words)) = rest.rsplit_once(" | ") {
        (rest, entry.words) = (before, Some(words.to_owned()));
    }
    loop {
        if let Some(after) = rest.strip_prefix("sometimes: ") {
            (entry.sometimes, rest) = (true, after);
        } else if let Some(after) = rest.strip_prefix("attend: ") {
            (entry.with, rest) = (Some(With::Attend), after);
        } else if let Some(after) = rest.strip_prefix("module: ") {
            (entry.with, rest) = (Some(With::Module), after);
        } else {
            return (rest.to_owned(), entry);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::judge::outcome::TO_THE_END;

    const LIST: &str = "\
# Known.
integration/a
  It counts copies.
    counts
    module: counts memory
    sometimes: races
    sometimes: compares | count
";

    fn outcome(passed: &[&str], failed: &[&str]) -> Outcome {
        let ok = passed.iter().map(|name| format!("[ok]: {name} (1 ms)\n"));
        let err = failed.iter().map(|name| format!("[err]: {name} in tests/integration/a.tcl\nno\n"));
        Outcome::read(&ok.chain(err).collect::<String>())
    }

    const ALL: [&str; 5] = ["counts", "counts memory", "races", "works", "compares"];

    fn judged(with: With, passed: &[&str], failed: &[&str]) -> Verdict {
        Differs::read(LIST).unwrap().judge("integration/a", with, &outcome(&ALL, &[]), &outcome(passed, failed))
    }

    #[test]
    fn a_failure_that_is_in_the_list_is_known() {
        let verdict = judged(With::Attend, &["counts memory", "races", "works", "compares"], &["counts"]);
        assert_eq!(verdict.known, ["counts"]);
        assert!(verdict.is_good());
    }

    #[test]
    fn a_failure_that_is_not_in_the_list_is_a_finding() {
        let verdict = judged(With::Attend, &["counts memory", "races", "compares"], &["counts", "works"]);
        assert_eq!(verdict.unexpected, ["works: no"]);
        // With the module only.
        let verdict = judged(With::Attend, &["races", "works", "compares"], &["counts", "counts memory"]);
        assert_eq!(verdict.unexpected, ["counts memory: no"]);
        assert!(judged(With::Module, &["works", "compares"], &["counts", "counts memory", "races"]).is_good());
    }

    #[test]
    fn a_test_that_may_fail_in_one_way_may_fail_in_no_other() {
        let fails = |why: &str| {
            let mut remora = outcome(&["counts memory", "races", "works"], &["counts", "compares"]);
            remora.tests.get_mut("compares").unwrap().why = why.into();
            Differs::read(LIST).unwrap().judge("integration/a", With::Attend, &outcome(&ALL, &[]), &remora)
        };
        assert!(fails("Expected count > 0").is_good());
        assert_eq!(fails("the data differ").unexpected, ["compares: the data differ"]);
    }

    #[test]
    fn a_test_that_did_not_run_failed() {
        let plain = outcome(&ALL, &[]);
        let broken = Outcome::read("[ok]: counts memory (1 ms)\n[exception]: Executing test client: refused.\n");
        let verdict = Differs::read(LIST).unwrap().judge("integration/a", With::Attend, &plain, &broken);
        let why = "[exception]: Executing test client: refused.";
        assert_eq!(verdict.unexpected, [format!("{TO_THE_END}: {why}"), "2 tests did not run: compares; works".into()]);
        assert_eq!(verdict.known, ["counts", "races"]);
    }

    #[test]
    fn a_known_test_that_passes_is_stale() {
        let verdict = judged(With::Attend, &ALL, &[]);
        assert_eq!(verdict.stale, ["counts: it passes"]);
        let plain = outcome(&["works", "races", "counts memory"], &["counts"]);
        let verdict = Differs::read(LIST).unwrap().judge("integration/a", With::Attend, &plain, &plain);
        assert_eq!(verdict.stale, ["counts: no test of this name passes without Remora"]);
    }

    #[test]
    fn a_name_passes_if_none_of_its_tests_fails() {
        let judge =
            |plain: &Outcome, remora: &Outcome| Differs::default().judge("integration/a", With::Attend, plain, remora);
        let (once, twice, mixed) = (outcome(&["x"], &[]), outcome(&["x", "x"], &[]), outcome(&["x"], &["x"]));
        assert!(judge(&twice, &once).is_good() && judge(&mixed, &outcome(&[], &["x"])).is_good());
        assert_eq!(judge(&twice, &mixed).unexpected, ["x: no"]);
        assert_eq!(judge(&once, &outcome(&[], &[])).unexpected, ["1 tests did not run: x"]);
    }

    #[test]
    fn a_test_without_a_reason_is_refused() {
        assert!(Differs::read("integration/a\n    test\n").unwrap_err().to_string().contains("line 2"));
        assert!(Differs::read("   test\n").is_err());
    }
}
