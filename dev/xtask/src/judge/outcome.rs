//! What a file of a suite has printed: which tests passed, which failed.

use std::collections::BTreeMap;

use remora_bench::sync::Result;

use super::With;

/// The outcome of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// The tests by name. Several tests of a file may have the same name.
    pub(super) tests: BTreeMap<String, Count>,
    /// Why the file did not come to its end, in the suite's words.
    pub(super) broken: Vec<String>,
}

/// How often tests of one name passed and failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) passed: usize,
    pub(super) failed: usize,
    /// What the suite said of the last one that failed.
    pub(super) why: String,
}

impl Outcome {
    /// Reads the output of one file.
    pub(super) fn read(output: &str) -> Outcome {
        let mut outcome = Outcome::default();
        let plain = without_colours(output);
        let mut lines = plain.lines().peekable();
        while let Some(line) = lines.next() {
            if let Some(rest) = line.strip_prefix("[ok]: ") {
                outcome.count(rest).passed += 1;
            } else if let Some(rest) = line.strip_prefix("[err]: ") {
                let why = lines.peek().copied().unwrap_or_default().to_owned();
                let count = outcome.count(rest);
                count.failed += 1;
                count.why = why;
            } else if line.starts_with("[exception]: ") || line.starts_with("[TIMEOUT]") {
                let next = lines.peek().copied().unwrap_or_default();
                outcome.broken.push(format!("{line} {next}").trim_end().to_owned());
            }
        }
        outcome.has_ended();
        outcome
    }

    /// Says that the file did not come to its end.
    pub(super) fn breaks(&mut self, why: String) {
        self.broken.push(why);
        self.has_ended();
    }

    /// Counts the end of the file as a test.
    fn has_ended(&mut self) {
        let why = self.broken.first().cloned();
        let (passed, failed) = if why.is_some() { (0, 1) } else { (1, 0) };
        self.tests.insert(TO_THE_END.into(), Count { passed, failed, why: why.unwrap_or_default() });
    }

    fn count(&mut self, rest: &str) -> &mut Count {
        self.tests.entry(name(rest)).or_default()
    }

    /// How many tests passed.
    pub(super) fn passed(&self) -> usize {
        self.tests.iter().filter(|(name, _)| *name != TO_THE_END).map(|(_, count)| count.passed).sum()
    }

    /// Whether a test failed, or the file did not come to its end.
    pub(super) fn has_failed(&self) -> bool {
        self.tests.values().any(|count| count.failed > 0)
    }

    /// The names of its tests.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tests.keys().map(String::as_str)
    }

    /// Whether tests of this name ran, and all of them passed.
    pub(super) fn passes(&self, name: &str) -> bool {
        self.tests.get(name).is_some_and(|count| count.passed > 0 && count.failed == 0)
    }
}

/// The name under which the end of a file counts as a test.
const TO_THE_END: &str = "(the file comes to its end)";

/// A test's name: without the time that it took and the file that it is in. What the suite draws at random is left
/// out, such as in "Set #3 to replicate from #1".
fn name(rest: &str) -> String {
    let mut name = rest.trim_end();
    if let Some((before, last)) = name.rsplit_once(" (")
        && last.strip_suffix(" ms)").is_some_and(|time| time.parse::<u64>().is_ok())
    {
        name = before;
    }
    if let Some((before, file)) = name.rsplit_once(" in tests/")
        && file.ends_with(".tcl")
    {
        name = before;
    }
    let mut drawn = String::with_capacity(name.len());
    let mut letters = name.chars().peekable();
    while let Some(letter) = letters.next() {
        drawn.push(letter);
        let is_drawn = DRAWN_AFTER.iter().any(|mark| drawn.ends_with(mark));
        if is_drawn && letters.peek().is_some_and(char::is_ascii_digit) {
            drawn.push('N');
            while letters.next_if(char::is_ascii_digit).is_some() {}
        }
    }
    drawn
}

/// What stands before a number that a suite draws, or reaches in the time that it has.
const DRAWN_AFTER: [&str; 3] = ["#", "(x = ", "--- CYCLE "];

/// The text without the sequences that colour a terminal.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut parts = text.split("\u{1b}[");
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        // Digits and semicolons, and then the letter of the command.
        let rest = part.trim_start_matches(|letter: char| letter.is_ascii_digit() || letter == ';');
        plain.push_str(rest.get(1..).unwrap_or_default());
    }
    plain
}

// The tests that are known to fail with Remora, with their reasons, and what a run says against that list.
//
// ```text
// # A comment.
// integration/shutdown
//   The primary waits at its end for the source's acknowledgement.
//     Shutting down master waits for replica to catch up
//     module: A test that fails only with the module
//     sometimes: A test that fails in some runs
//     A test that may fail in one way only | sync_partial_err
// ```
//
// A file, a reason, the tests that it explains. A test that stands there and passes fails the run: its line is stale.
// That the file comes to its end is a test too, [`TO_THE_END`].

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

    const OUTPUT: &str = "\
[ready]: 7
Testing integration/x
[\u{1b}[0;32;49mok\u{1b}[0m]: First (2) of two (1004 ms)
[\u{1b}[0;32;49mok\u{1b}[0m]: PSYNC2: Set #3 to replicate from #12 (11 ms)
[ok]: PSYNC2: Set #1 to replicate from #0 (9 ms)
[ok]: PSYNC2: cluster is consistent after load (x = 100764) (3 ms)
[ok]: PSYNC2: --- CYCLE 6 --- (0 ms)
[\u{1b}[0;31;49merr\u{1b}[0m]: Counted in tests/integration/x.tcl
Expected '1' to be equal to '2' (context: …)
[ok]: Counted (3 ms)
[ignore]: large memory flag not provided
[exception]: Executing test client: assertion:x.
assertion:x
";

    #[test]
    fn tests_are_counted_by_their_names() {
        let outcome = Outcome::read(OUTPUT);
        assert_eq!(outcome.passed(), 6);
        assert!(outcome.has_failed() && outcome.passes("First (2) of two") && !outcome.passes("Counted"));
        assert!(outcome.passes("PSYNC2: cluster is consistent after load (x = N)"), "{outcome:?}");
        assert!(outcome.passes("PSYNC2: --- CYCLE N ---"), "{outcome:?}");
        assert_eq!(outcome.tests["PSYNC2: Set #N to replicate from #N"].passed, 2);
        let counted = &outcome.tests["Counted"];
        assert_eq!((counted.passed, counted.failed), (1, 1));
        assert!(counted.why.starts_with("Expected '1'"), "{counted:?}");
        assert_eq!(outcome.broken, ["[exception]: Executing test client: assertion:x. assertion:x"]);
    }

    #[test]
    fn an_output_of_nothing_has_no_test() {
        assert_eq!(Outcome::read("\u{1b}[").names().collect::<Vec<_>>(), [TO_THE_END]);
        let mut outcome = Outcome::read("");
        assert!(outcome.passes(TO_THE_END) && !outcome.has_failed());
        outcome.breaks("it took too long".into());
        assert!(outcome.has_failed());
    }

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
