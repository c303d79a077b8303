//! What a file of a suite has printed: which tests passed, which failed.

use std::collections::BTreeMap;

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
pub(super) const TO_THE_END: &str = "(the file comes to its end)";

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

#[cfg(test)]
mod tests {
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
}
