//! Every test of the workspace, and those that failed once more, one after the other.
//!
//! Hundreds of tests start servers, agents and networks side by side on two processors. One of them may fail because
//! the machine gave it no time, not because the program is wrong. Such a test passes alone; a fault that is always
//! there fails again. What passed only at the second attempt is said at the end, and stands among the notes that
//! continuous integration prints: it is a fault of the test, to be mended.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use remora_bench::sync::Result;
use remora_lab::notes;

use crate::process::cargo;

/// More failed tests than this are not tried again: the program is broken, not the machine busy.
const MOST_AT_ONCE: usize = 8;

/// How many tests run side by side, as the tests' own programs read it.
const SIDE_BY_SIDE: &str = "RUST_TEST_THREADS";

/// At least this many: tests of whole runs wait for servers most of the time, and two at a time leave half of two
/// processors idle.
const LEAST_SIDE_BY_SIDE: usize = 4;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// What the tests are asked, such as a part of their names.
    #[arg(last = true)]
    asked: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let first = attempt(&options.asked)?;
    if first.is_good() {
        return Ok(());
    }
    let again = first.to_try_again()?;
    println!("\n=== once more, one after the other: {}", again.join(", "));
    let alone = ["--exact", "--test-threads=1"].map(str::to_owned);
    let second = attempt(&[&again[..], &alone].concat())?;
    if !second.is_good() || second.passed < again.len() {
        return Err(format!("failed twice: {}", second.failed_of(&again).join(", ")).into());
    }
    for name in &again {
        notes::note_of(name, "failed beside other tests and passed alone, at the second attempt");
    }
    Ok(())
}

/// Runs the tests of the whole workspace, shows what they print, and counts.
fn attempt(asked: &[String]) -> Result<Attempt> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--locked", "--no-fail-fast", "--"]).args(asked).stdout(Stdio::piped());
    if std::env::var_os(SIDE_BY_SIDE).is_none() {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        command.env(SIDE_BY_SIDE, processors.max(LEAST_SIDE_BY_SIDE).to_string());
    }
    let mut child = command.spawn().map_err(|error| format!("{command:?} could not be started: {error}"))?;
    let mut found = Attempt::default();
    let mut line = Vec::new();
    let mut output = BufReader::new(child.stdout.take().ok_or("the tests have no output")?);
    // Tests print bytes of any kind.
    while output.read_until(b'\n', &mut line)? > 0 {
        std::io::stdout().write_all(&line)?;
        found.read(String::from_utf8_lossy(&line).trim_end_matches('\n'));
        line.clear();
    }
    found.is_success = child.wait()?.success();
    Ok(found)
}

/// What the programs of one attempt have printed.
#[derive(Debug, Default, PartialEq)]
struct Attempt {
    /// Cargo said that all is well.
    is_success: bool,
    /// Programs that began.
    began: usize,
    /// Programs that printed their result. One that was killed prints none.
    ended: usize,
    passed: usize,
    failed: usize,
    /// The lists at the end of each program.
    names: BTreeSet<String>,
    is_list: bool,
}

impl Attempt {
    fn read(&mut self, line: &str) {
        // "running 479 tests"
        if line.strip_prefix("running ").is_some_and(|rest| rest.ends_with(" tests") || rest.ends_with(" test")) {
            self.began += 1;
        // "test result: FAILED. 464 passed; 2 failed; 13 ignored; 0 measured; 0 filtered out; finished in 1573.56s"
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.ended += 1;
            self.passed += before(result, " passed");
            self.failed += before(result, " failed");
            self.is_list = false;
        // Stands before what the failed tests have printed, and again before their names.
        } else if line == "failures:" {
            self.is_list = true;
        } else if self.is_list {
            match line.strip_prefix("    ") {
                Some(name) if !name.starts_with(' ') => {
                    self.names.insert(name.to_owned());
                }
                _ => self.is_list = line.is_empty() && self.names.is_empty(),
            }
        }
    }

    fn is_good(&self) -> bool {
        self.is_success && self.failed == 0
    }

    /// The names of the tests that failed, if a second attempt can tell more than the first.
    fn to_try_again(&self) -> Result<Vec<String>> {
        if self.began != self.ended {
            return Err("a program of tests was ended in the middle of them".into());
        }
        if self.failed == 0 {
            return Err("the tests could not be made or started".into());
        }
        if self.failed > MOST_AT_ONCE {
            return Err(format!("{} tests failed; up to {MOST_AT_ONCE} are tried again", self.failed).into());
        }
        // Two crates may have tests of the same name; a name that was not understood makes less.
        if self.names.is_empty() {
            return Err("the names of the failed tests were not found".into());
        }
        Ok(self.names.iter().cloned().collect())
    }

    fn failed_of(&self, tried: &[String]) -> Vec<String> {
        let known = tried.iter().filter(|name| self.names.contains(*name)).cloned().collect::<Vec<_>>();
        if known.is_empty() { tried.to_vec() } else { known }
    }
}

/// The number that stands before this word.
fn before(text: &str, word: &str) -> usize {
    let number = text.split(word).next().and_then(|text| text.rsplit(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(text: &str) -> Attempt {
        let mut attempt = Attempt::default();
        text.lines().for_each(|line| attempt.read(line));
        attempt
    }

    const TWO_FAILED: &str = "
running 4 tests
test a::one ... ok
test a::two ... FAILED
test b::three ... FAILED
test b::four ... ignored

failures:

---- a::two stdout ----
    indented by a test
thread 'a::two' panicked at a.rs:3:5:

---- b::three stdout ----
assertion failed

failures:
    a::two
    b::three

test result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

running 1 test
test src/lib.rs - c (line 7) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
";

    #[test]
    fn failed_tests_are_tried_again() {
        let attempt = read(TWO_FAILED);
        assert_eq!((attempt.began, attempt.ended, attempt.passed, attempt.failed), (2, 2, 2, 2));
        assert_eq!(attempt.to_try_again().unwrap(), ["a::two", "b::three"]);
        assert!(!attempt.is_good());
    }

    #[test]
    fn a_program_that_was_killed_is_not_tried_again() {
        let attempt = read(&format!("{TWO_FAILED}running 3 tests\ntest d::five ... ok\n"));
        assert!(attempt.to_try_again().unwrap_err().to_string().contains("in the middle"));
    }

    #[test]
    fn tests_that_were_not_made_and_very_many_failures_are_failures() {
        assert!(read("").to_try_again().unwrap_err().to_string().contains("could not be made"));
        let many = "running 12 tests\ntest result: FAILED. 3 passed; 9 failed; 0 ignored; 0 measured";
        assert!(read(many).to_try_again().unwrap_err().to_string().contains("9 tests failed"));
    }

    #[test]
    fn a_success_has_no_failed_test_and_cargos_word() {
        let mut attempt = read("running 1 test\ntest result: ok. 1 passed; 0 failed; 0 ignored");
        assert!(!attempt.is_good());
        attempt.is_success = true;
        assert!(attempt.is_good());
    }
}
