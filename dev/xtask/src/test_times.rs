//! What the tests took: a table of the crates, and the longest tests, from the report of cargo-nextest (JUnit).

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use remora_bench::sync::Result;

/// Rows of the table of tests.
const LONGEST: usize = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The reports, such as target/nextest/default/junit.xml.
    #[arg(required = true)]
    reports: Vec<PathBuf>,

    /// A file to which a line is added: the time in seconds since 1970, processors, tests, and the seconds of all.
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
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
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut file = fs::OpenOptions::new().create(true).append(true).open(keep)?;
    writeln!(file, "{now}\t{processors}\t{}\t{:.0}", report.0.len(), report.seconds())?;
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

    fn tables(&self) -> String {
        let mut programs: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
        for test in &self.0 {
            let of = programs.entry(&test.program).or_default();
            *of = (of.0 + 1, of.1 + test.seconds);
        }
        let mut programs: Vec<_> = programs.into_iter().collect();
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
    fn what_is_no_report_is_refused() {
        for text in ["", "<testsuites/>", "<testcase name='a'/>", "<testcase name='a' classname='b' time='x'/>"] {
            assert!(Report::read(text).is_err(), "{text}");
        }
    }
}
