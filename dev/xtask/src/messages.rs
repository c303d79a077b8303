//! Commands that write tables for a review: `xtask messages`, `test-times` and `bindings`.
//!
//! `xtask messages` writes every sentence that `remora` can say to a person into one file. A sentence is a string
//! literal of the agent's sources with at least three words; tests and help texts are left out. `{…}` stands for what
//! is only known when it is said.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write;
use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::Chars;

use clap::Args;
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use serde_json::json;

use remora_bench::sync::Result;
use remora_lab::server::project_root;

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The file to write.
    #[arg(default_value = "target/messages.md")]
    to: PathBuf,
}

/// Folders and files that say nothing to a person.
const LEFT_OUT: [&str; 8] = [
    "simulated.rs",
    "tests",
    "tests.rs",
    "question_tests.rs",
    "fuzzing.rs",
    "mutation.rs",
    "replay.rs",
    // The layouts of C structures, which bindgen writes.
    "types.rs",
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = project_root();
    let mut files = Vec::new();
    for folder in folders(&root)? {
        collect(&folder, &mut files)?;
    }
    files.sort();
    let (mut page, mut count) = ("# Messages\n".to_owned(), 0);
    for file in files {
        let text = fs::read_to_string(&file)?;
        let found = sentences(&text);
        if found.is_empty() {
            continue;
        }
        write!(page, "\n## {}\n\n", file.strip_prefix(&root)?.display())?;
        for (line, sentence) in found {
            writeln!(page, "- {line}: {sentence}")?;
            count += 1;
        }
    }
    fs::write(root.join(&options.to), page)?;
    println!("{}: {count} sentences", options.to.display());
    Ok(())
}

/// The sources of each crate beside this one's folder: what they say, a person can meet.
fn folders(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root)? {
        let crate_folder = entry?.path();
        let sources = crate_folder.join("src");
        if crate_folder.join("Cargo.toml").is_file() && sources.is_dir() {
            found.push(sources);
        }
    }
    Ok(found)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if LEFT_OUT.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            collect(&path, files)?;
        } else if name.ends_with(".rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// The sentences of a file, with their lines.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let (mut found, mut line, mut bytes) = (Vec::new(), 1, product.chars().peekable());
    let mut begin_of_line = true;
    while let Some(char) = bytes.next() {
        match char {
            '\n' => {
                (line, begin_of_line) = (line + 1, true);
                continue;
            }
            // A comment, or the help of an option.
            '/' if bytes.peek() == Some(&'/') => while bytes.next_if(|next| *next != '\n').is_some() {},
            '\'' => skip_character(&mut bytes),
            '"' => {
                let (begin, mut sentence) = (line, String::new());
                while let Some(next) = bytes.next_if(|next| *next != '"') {
                    line += usize::from(next == '\n');
                    match next {
                        '\\' => match bytes.next() {
                            // The sentence goes on in the next line.
                            Some('\n') => {
                                line += 1;
                                while bytes.next_if(|next| next.is_whitespace() && *next != '\n').is_some() {}
                            }
                            Some('n') => sentence.push(' '),
                            Some(other) => sentence.push(other),
                            None => {}
                        },
                        '\n' => sentence.push(' '),
                        next => sentence.push(next),
                    }
                }
                bytes.next();
                if sentence.split_whitespace().count() >= 3 {
                    found.push((begin, sentence));
                }
            }
            char if begin_of_line && char.is_whitespace() => continue,
            _ => {}
        }
        begin_of_line = false;
    }
    found
}

/// Skips a character behind its first quote, which may be a quote too; a lifetime stays.
fn skip_character(bytes: &mut Peekable<Chars>) {
    if bytes.next_if_eq(&'\\').is_some() || bytes.peek() == Some(&'"') {
        bytes.next();
        bytes.next_if_eq(&'\'');
    }
}

// What the tests took: a table of the crates, and the longest tests, from the report of cargo-nextest (JUnit).

/// Rows of the table of tests.
const LONGEST: usize = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct TestTimesOptions {
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
pub(crate) fn run_test_times(options: &TestTimesOptions) -> Result<()> {
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

// `xtask bindings`: generates the types of libibverbs and librdmacm from the installed headers, or compares them.
//
// Needs the headers (Debian: libibverbs-dev librdmacm-dev libclang1-14) and the bindgen program in the version below,
// since another version writes the same types differently: `cargo install bindgen-cli --version 0.72.1 --locked`. A
// build of Remora needs neither.

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct BindingsOptions {
    /// Change nothing; fail if the checked-in file differs from the headers.
    #[arg(long)]
    check: bool,
}

/// The version that wrote the checked-in file.
const VERSION: &str = "bindgen 0.72.1";

const FOLDER: &str = "rdma/src/bindings";

/// The types that are used. Bindgen adds the types they contain.
const TYPES: &str = "ibv_device|ibv_context|ibv_device_attr|ibv_pd|ibv_mr|ibv_cq|ibv_comp_channel|ibv_qp|ibv_qp_init_attr|\
    ibv_qp_attr|ibv_qp_attr_mask|ibv_access_flags|ibv_sge|ibv_send_wr|ibv_recv_wr|ibv_wc|ibv_wc_status|ibv_wc_opcode|\
    ibv_send_flags|ibv_srq_init_attr|ibv_async_event|ibv_fork_status|rdma_cm_id|rdma_cm_event|rdma_conn_param|rdma_event_channel|rdma_port_space";

/// Types of which only the size matters.
const OPAQUE: &str = "sockaddr.*|ibv_srq|ibv_mw|ibv_ah|ibv_wq|ibv_xrcd|_ibv_device_ops|_compat_ibv_port_attr|ibv_mw_bind|\
    ibv_sa_path_rec|rdma_ud_param";

/// The head of the checks of a type's layout.
const CHECK: &str = "\nconst _: () = {";

pub(crate) fn run_bindings(options: &BindingsOptions) -> Result<()> {
    let found = Command::new("bindgen").arg("--version").output();
    let found = found.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if found != VERSION {
        let found = if found.is_empty() { "no bindgen".to_owned() } else { found };
        return Err(format!(
            "needs {VERSION}, found {found}; see the text about bindings in dev/xtask/src/messages.rs"
        )
        .into());
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(FOLDER);
    let made = generate(&folder)?;
    let file = folder.join("types.rs");
    if !options.check {
        return Ok(fs::write(file, made)?);
    }
    if fs::read_to_string(&file)? != made {
        let text =
            format!("{FOLDER}/types.rs differs from the headers: run this without --check and review the change");
        return Err(text.into());
    }
    println!("{FOLDER}/types.rs matches the headers");
    Ok(())
}

fn generate(folder: &Path) -> Result<String> {
    let made = Command::new("bindgen")
        // In that folder, so that rustfmt finds the project's settings.
        .current_dir(folder)
        .arg("wrapper.h")
        .args(["--allowlist-type", TYPES, "--allowlist-var", "RDMA_OPTION_ID_TOS|RDMA_OPTION_ID"])
        .args(["--blocklist-type", "pthread_mutex_t|pthread_cond_t|__pthread.*"])
        .args(["--raw-line", "use libc::{pthread_cond_t, pthread_mutex_t};", "--opaque-type", OPAQUE])
        .args(["--no-doc-comments", "--no-prepend-enum-name", "--use-core"])
        .args(["--rust-target", "1.85", "--rust-edition", "2024"])
        .output()?;
    match made.status.success() {
        // The checks of sizes hold where they were made: the locks of the C library have other sizes elsewhere.
        true => {
            Ok(String::from_utf8(made.stdout)?.replace(CHECK, &format!("\n#[cfg(target_arch = \"x86_64\")]{CHECK}")))
        }
        false => Err(format!("bindgen: {}", String::from_utf8_lossy(&made.stderr)).into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn sentences_are_found_and_comments_names_and_tests_are_not() {
        let source = r#"
/// A comment with "quoted words in it".
fn f(a: &'static str) -> char {
    #[error("the server {0} is away: \
             it may come")]
    let x = ('"', '\'', "name", "one \"two\" three");
}
#[cfg(test)]
mod tests { const X: &str = "not one of them"; }
"#;
        let expected = [(4, "the server {0} is away: it may come".to_owned()), (6, "one \"two\" three".to_owned())];
        assert_eq!(sentences(source), expected);
    }

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
            run_test_times(&TestTimesOptions { reports: vec![report.clone()], keep: Some(keep.clone()), steps })
                .unwrap();
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
