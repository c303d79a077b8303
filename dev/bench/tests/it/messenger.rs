//! `remora-bench messenger`: both ends in one command, or either end alone. The tests check that figures exist and are
//! complete, not their values: other processes run on this machine.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remora-bench"));
    command.arg("messenger").args(arguments);
    command
}

fn ran(arguments: &[&str]) -> Output {
    bench(arguments).output().unwrap()
}

/// A server alone, until this is dropped, and its address.
struct Serving(Child, String);

impl Serving {
    fn start(place: &str) -> Serving {
        let mut child = bench(&["--serve", place, "--reply", "100"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Serving(child, line.trim().to_owned())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn figures(json: &Path) -> Vec<Value> {
    let text = std::fs::read(json).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["figures"].as_array().unwrap().clone()
}

#[test]
fn both_ends_are_measured_by_one_command() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    // A size without a target: this is a build with debug assertions.
    let short = [
        "--rounds",
        "1",
        "--millis",
        "50",
        "--connections",
        "1,4",
        "--request",
        "65",
        "--rivals",
        "raw",
        "--out",
        &out,
    ];
    let ran_well = ran(&short);
    assert!(ran_well.status.success(), "{}", String::from_utf8_lossy(&ran_well.stderr));
    let kept = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    assert!(kept.display().to_string().ends_with("-bench_messenger"), "{}", kept.display());
    let figures = figures(&kept.join("run.json"));
    let subjects: Vec<_> = figures.iter().map(|figure| figure["subject"].as_str().unwrap()).collect();
    assert_eq!(subjects, ["ours, tcp", "raw", "ours, tcp", "raw"]);
    assert!(figures.iter().all(|figure| figure["requests"].as_u64().unwrap() > 0));
    assert!(figures.iter().all(|figure| figure["server_cpu"].as_f64().unwrap() > 0.0));
}

#[test]
fn a_client_alone_measures_against_a_server_alone() {
    let folder = tempfile::tempdir().unwrap();
    let bell = format!("shm:{}", folder.path().join("bell").display());
    for (place, transport) in [("127.0.0.1:0", "tcp"), (&*bell, "shm")] {
        let server = Serving::start(place);
        assert!(server.1.starts_with(transport), "{}", server.1);
        let json = folder.path().join(format!("{transport}.json"));
        let json_argument = json.display().to_string();
        let ask = |reply: &str| {
            let ask = ["--ask", &server.1, "--reply", reply, "--rounds", "1", "--millis", "50"];
            ran(&[&ask[..], &["--connections", "1,4", "--request", "200", "--json", &json_argument]].concat())
        };
        let well = ask("100");
        assert!(well.status.success(), "{}", String::from_utf8_lossy(&well.stderr));
        let said = String::from_utf8_lossy(&well.stdout).into_owned();
        assert!(said.contains("its processor time is that of all its clients"), "{said}");
        let figures = figures(&json);
        assert_eq!(figures.len(), 2);
        for figure in figures {
            assert_eq!(figure["subject"], format!("ours, {transport}"));
            assert!(figure["requests"].as_u64().unwrap() > 0, "{figure}");
            let server_cpu = figure["server_cpu"].as_f64().unwrap();
            assert!(server_cpu > 0.0 && server_cpu < 10.0, "{figure}");
        }
        let ill = ask("99");
        let why = String::from_utf8_lossy(&ill.stderr).into_owned();
        assert!(!ill.status.success() && why.contains("answers with 100 bytes, not 99"), "{why}");
    }
}

#[test]
fn a_server_alone_ends_when_its_time_is_over() {
    let ran = ran(&["--serve", "127.0.0.1:0", "--millis", "50"]);
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success() && said.starts_with("tcp:127.0.0.1:") && said.contains("processor time"), "{said}");
}

#[test]
fn an_end_alone_refuses_what_only_both_can_do() {
    for wrong in [
        &["--serve", "127.0.0.1:0", "--ask", "127.0.0.1:1"][..],
        &["--ask", "127.0.0.1:1", "--rivals", "raw"],
        &["--ask", "tls:127.0.0.1:1"],
        &["--serve", "nowhere"],
    ] {
        assert_eq!(ran(wrong).status.code(), Some(2), "{wrong:?}");
    }
}
