//! What the tests took: a table of the crates, and the longest tests, from the report of cargo-nextest (JUnit).

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use remora_bench::sync::Result;
use serde_json::json;

/// Rows of the table of tests.
const LONGEST: usize = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The reports, such as target/nextest/default/junit.xml.
    #[arg(required = true)]
    reports: Vec<PathBuf>,

    /// A file to which a line of JSON is added: when, which commit, on how many processors, and the seconds of each
    /// step and of each program's tests.
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,

    /// A step of the whole run and its seconds, for that line.
    #[arg(long = "step", value_name = "NAME=SECONDS", value_parser = step)]
    steps: Vec<(String, u64)>,
}

fn step(text: &str) -> std::result::Result<(String, u64), String> {
    let (name, seconds) = text.rsplit_once('=').ok_or("a step is NAME=SECONDS")?;
    let seconds = seconds.parse().map_err(|_| format!("{seconds:?} is not a number of seconds"))?;
    Ok((name.to_owned(), seconds))
}

/// Prints the tables.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut report = Report(Vec::new());
    for path in &options.reports {
        let text = fs::read_to_string(path)
            .map_err(|error| format!("{}: {error}; `make test-all` writes it", path.display()))?;
        report.0.extend(Report::read(&text).map_err(|error| format!("{}: {error}", path.display()))?.0);
    }
    print!("{}", report.tables());
    let Some(keep) = &options.keep else { return Ok(()) };
    let told = |program: &str, args: &[&str]| -> Option<String> {
        let output = Command::new(program).args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let line = json!({
        "date": told("date", &["--utc", "+%FT%TZ"]),
        "commit": told("git", &["describe", "--always", "--dirty"]),
        "processors": std::thread::available_parallelism().map_or(1, usize::from),
        "steps": options.steps.iter().cloned().collect::<BTreeMap<_, _>>(),
        "tests": report.0.len(),
        "test_seconds": report.programs().into_iter().map(|(name, (_, seconds))| (name, seconds.round())).collect::<BTreeMap<_, _>>(),
    });
    let mut file = fs::OpenOptions::new().create(true).append(true).open(keep)?;
    writeln!(file, "{line}")?;
    Ok(())
}

/// One test.
#[derive(Debug, PartialEq)]
struct Test {
    /// The program that has it, such as `remora-agent::it`.
    program: String,
    name: String,
    seconds: f64,
}

#[derive(Debug, PartialEq)]
struct Report(Vec<Test>);

impl Report {
    fn read(text: &str) -> Result<Report> {
        let mut reader = Reader::from_str(text);
        let mut tests = Vec::new();
        loop {
            match reader.read_event()? {
                Event::Start(element) | Event::Empty(element) if element.name().as_ref() == b"testcase" => {
                    let seconds = attribute(&element, "time")?;
                    tests.push(Test {
                        program: attribute(&element, "classname")?,
                        name: attribute(&element, "name")?,
                        seconds: seconds.parse().map_err(|_| format!("a test took {seconds:?}"))?,
                    });
                }
                Event::Eof if tests.is_empty() => return Err("it has no tests".into()),
                Event::Eof => return Ok(Report(tests)),
                _ => {}
            }
        }
    }

    fn seconds(&self) -> f64 {
        self.0.iter().map(|test| test.seconds).sum()
    }

    /// The number of each program's tests, and their seconds together.
    fn programs(&self) -> BTreeMap<&str, (usize, f64)> {
        let mut programs: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
        for test in &self.0 {
            let of = programs.entry(&test.program).or_default();
            *of = (of.0 + 1, of.1 + test.seconds);
        }
        programs
    }

    fn tables(&self) -> String {
        let mut programs: Vec<_> = self.programs().into_iter().collect();
        programs.sort_by(|(_, (_, a)), (_, (_, b))| b.total_cmp(a));
        let mut longest: Vec<&Test> = self.0.iter().collect();
        longest.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let mut text = format!("{:>8}  {:>6}  tests of\n", "s", "tests");
        for (program, (count, seconds)) in programs {
            text += &format!("{seconds:8.1}  {count:6}  {program}\n");
        }
        text += &format!("{:8.1}  {:6}  all\n\n{:>8}  the longest\n", self.seconds(), self.0.len(), "s");
        for test in longest.into_iter().take(LONGEST) {
            text += &format!("{:8.1}  {} {}\n", test.seconds, test.program, test.name);
        }
        text
    }
}

fn attribute(element: &BytesStart<'_>, name: &str) -> Result<String> {
    let attribute = element.try_get_attribute(name)?.ok_or_else(|| format!("a test has no {name}"))?;
    Ok(String::from_utf8(attribute.value.into_owned())?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_longest_program_and_the_longest_test_come_first() {
        let report = r#"<?xml version="1.0"?><testsuites name="run" tests="3"><testsuite name="a::it">
            <testcase name="one" classname="a::it" timestamp="t" time="1.500"/>
            <testcase name="two" classname="a::it" time="0.250"><system-out>&lt;testcase</system-out></testcase>
            </testsuite><testsuite name="b"><testcase name="three" classname="b" time="3"/></testsuite></testsuites>"#;
        let report = Report::read(report).unwrap();
        assert_eq!(report.0.len(), 3);
        let tables = report.tables();
        let at = |text: &str| tables.find(text).unwrap_or_else(|| panic!("{text:?} is not in {tables}"));
        assert!(at("3.0       1  b\n") < at("1.8       2  a::it\n"));
        assert!(at("4.8       3  all\n") < at("3.0  b three\n"));
        assert!(at("3.0  b three\n") < at("1.5  a::it one\n") && at("a::it one") < at("0.2  a::it two\n"));
    }

    #[test]
    fn a_kept_line_says_what_each_step_and_each_program_took() {
        let folder = tempfile::tempdir().unwrap();
        let (report, keep) = (folder.path().join("junit.xml"), folder.path().join("times.jsonl"));
        fs::write(&report, r#"<testcase name="one" classname="a::it" time="1.5"/>"#).unwrap();
        for seconds in [7, 8] {
            let steps = vec![step(&format!("long tests={seconds}")).unwrap()];
            run(&Options { reports: vec![report.clone()], keep: Some(keep.clone()), steps }).unwrap();
        }
        let kept = fs::read_to_string(&keep).unwrap();
        let lines: Vec<serde_json::Value> = kept.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(
            lines.iter().map(|line| line["steps"]["long tests"].as_u64()).collect::<Vec<_>>(),
            [Some(7), Some(8)]
        );
        assert_eq!((&lines[0]["tests"], &lines[0]["test_seconds"]["a::it"]), (&json!(1), &json!(2.0)), "{kept}");
        assert!(step("tests").is_err() && step("tests=x").is_err());
    }

    #[test]
    fn what_is_no_report_is_refused() {
        for text in ["", "<testsuites/>", "<testcase name='a'/>", "<testcase name='a' classname='b' time='x'/>"] {
            assert!(Report::read(text).is_err(), "{text}");
        }
    }
}
