//! The benchmark programs as processes: figures exist and are complete, and the report's charts can be read.
//!
//! Every benchmark runs once, with a little data, and every replica that it makes is compared with its primary. The
//! figures say nothing: this is a build with debug assertions, beside other tests.
//!
//! The charts are looked at as a browser draws them: one that cannot be read is found by where its parts are and by
//! their colours, and not by comparing pictures, which differ with each machine's fonts.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use remora_bench::Spread;
use remora_bench::bars::{Bar, Chart, Family, Group};
use remora_lab::browser::{Browser, View};
use remora_lab::{RdmaVm, require, server};
use serde_json::Value;

/// Runs a benchmark to its end. `codes`: the exit codes that are accepted.
#[track_caller]
fn run(program: &str, arguments: &[&str], codes: &[i32]) {
    let mut command = Command::new(program);
    command.args(arguments);
    // The tests of the agents have built it, in the same run of cargo; if not, the benchmark builds it.
    if let Some(remora) = built() {
        command.env("REMORA", remora);
    }
    let ran = command.output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.code().is_some_and(|code| codes.contains(&code)), "{}: {said}", ran.status);
    for word in ["NOT EQUAL", "failed", "left out"] {
        assert!(!said.contains(word), "{said}");
    }
}

/// The command `remora` of this build, beside the folder of this program.
fn built() -> Option<PathBuf> {
    let program = std::env::current_exe().unwrap();
    Some(program.parent()?.parent()?.join("remora")).filter(|remora| remora.exists())
}

/// The content of the only file of that name below the folder.
fn kept(folder: &Path) -> Value {
    let run = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    serde_json::from_slice(&std::fs::read(run.join("run.json")).unwrap()).unwrap()
}

/// Asserts that each of these measurements compared its replicas, and found them equal.
#[track_caller]
fn all_equal<'v>(points: impl IntoIterator<Item = &'v Value>, count: usize) {
    let points: Vec<&Value> = points.into_iter().collect();
    assert_eq!(points.len(), count, "{points:?}");
    for point in points {
        assert_eq!(point["equal"], true, "{point}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn full_sync_compares_what_every_method_makes() {
    let Some(_) = require::valkey() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let small = ["--rounds", "1", "--divide", "64", "--servers", "valkey", "--shapes", "large", "--replicas", "1"];
    // A target that is missed is the code 1.
    run(env!("CARGO_BIN_EXE_full_sync"), &[&small[..], &["--out", &out]].concat(), &[0, 1]);
    let report = kept(folder.path());
    // All but the one that waits for further replicas, and the one whose program only some machines have.
    let has_shake = std::env::var_os("REMORA_REDIS_SHAKE").is_some();
    all_equal(report["samples"].as_array().unwrap(), if has_shake { 13 } else { 12 });
    let notes = report["run"]["notes"].to_string();
    assert_eq!(notes.contains("NOT MEASURED: RedisShake 4"), !has_shake, "{notes}");
    // The one that started on a file continued from there.
    let of_file = report["samples"].as_array().unwrap().iter().find(|sample| sample["method"] == "rdb-file").unwrap();
    assert_eq!(of_file["full_copies"], 1, "{of_file}");
    assert!(!notes.contains("SECOND FULL COPY"), "{notes}");
}

#[test]
#[ignore = "long: make test-all"]
fn volume_requests_measures_every_scene() {
    let Some(()) = require::shaping() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    run(env!("CARGO_BIN_EXE_volume_requests"), &["--rounds", "1", "--millis", "100", "--out", &out], &[0, 1]);
    let comparisons = kept(folder.path())["comparisons"].as_array().unwrap().clone();
    assert_eq!(comparisons.len(), 11, "{comparisons:?}");
    for comparison in comparisons {
        assert!(comparison["ratio"]["median"].as_f64().unwrap() > 0.0, "{comparison}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn name_changes_are_measured_in_a_mount_and_beside_it() {
    let Some(()) = require::fuse() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    run(env!("CARGO_BIN_EXE_name_changes"), &["--rounds", "1", "--files", "200", "--out", &out], &[0]);
    let samples = kept(folder.path())["samples"].as_array().unwrap().clone();
    assert_eq!(samples.len(), 3 * 2 * 4, "three subjects, two numbers of directories, four figures: {samples:?}");
}

#[test]
#[ignore = "long: make test-all"]
fn mass_replacement_takes_one_full_copy_of_each_primary_with_remora() {
    let Some(()) = require::shaping() else { return };
    let Some(_) = require::valkey() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let small = ["--rounds", "1", "--mebibytes", "8", "--rate", "1gbit", "--servers", "valkey"];
    run(env!("CARGO_BIN_EXE_mass_replacement"), &[&small[..], &["--out", &out]].concat(), &[0, 1]);
    let samples = kept(folder.path())["samples"].as_array().unwrap().clone();
    let copies: Vec<_> =
        samples.iter().filter(|sample| sample["case"].as_str().unwrap().contains("sync_full")).collect();
    assert_eq!(copies.len(), 6, "{samples:?}");
    for sample in copies {
        let is_ours = sample["subject"].as_str().unwrap().starts_with("Remora");
        let count = sample["value"].as_f64().unwrap();
        assert!(if is_ours { count == 1.0 } else { count >= 2.0 }, "{sample}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn hand_offs_beside_writes_take_one_full_copy_with_default_settings() {
    let Some(_) = require::valkey() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let small = ["--rounds", "1", "--values", "16", "--replicas", "2", "--loads", "paced,large"];
    run(env!("CARGO_BIN_EXE_hand_offs"), &[&small[..], &["--out", &out]].concat(), &[0]);
    let goals = kept(folder.path())["goals"].as_array().unwrap().clone();
    assert_eq!(goals.len(), 2 * 2 * 4, "two servers, two loads, four promises: {goals:?}");
    assert!(goals.iter().all(|goal| goal["value"]["median"].is_number()), "{goals:?}");
}

#[test]
#[ignore = "long: make test-all"]
fn remora_bench_compares_its_syncs_over_a_network_and_under_load() {
    let Some(()) = require::shaping() else { return };
    let Some(_) = require::valkey() else { return };
    let suite = |name: &str, more: &[&str], count: usize| {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().display().to_string();
        let always = [name, "--rounds", "1", "--out", &out];
        run(env!("CARGO_BIN_EXE_remora-bench"), &[&always, more].concat(), &[0]);
        let report = kept(folder.path());
        let with_replicas = |point: &&Value| point["replicas"] != 0;
        all_equal(report["points"].as_array().unwrap().iter().filter(with_replicas), count);
        report
    };
    let few = ["--servers", "valkey", "--networks", "1gbit", "--values", "8"];
    let methods = ["--methods", "own-best,remora-tcp,remora-relay", "--replicas", "2"];
    let report = suite("sync", &[&few[..], &methods].concat(), 3);
    let relay = report["points"].as_array().unwrap().iter().find(|point| point["method"] == "remora-relay").unwrap();
    let memory = relay["agent_memory"].as_array().unwrap();
    assert!(memory.len() == 2 && memory.iter().all(|bytes| bytes.as_u64() > Some(1 << 20)), "{relay}");
    // Near clients and far clients.
    suite("feel", &[&few[..], &["--methods", "remora-relay", "--replicas", "2", "--rate", "200"]].concat(), 2);
}

#[test]
fn reads_are_measured_beside_their_rivals() {
    let Some(()) = require::iperf3() else { return };
    let small = ["--rounds", "1", "--millis", "50", "--region-mib", "16"];
    let bandwidth = [&small[..], &["--sizes-kib", "64", "--depths", "4"]].concat();
    run(env!("CARGO_BIN_EXE_read_bandwidth"), &bandwidth, &[0, 1]);
    run(env!("CARGO_BIN_EXE_read_latency"), &[&small[..], &["--sizes", "4096"]].concat(), &[0, 1]);
}

#[test]
#[ignore = "long: make test-all"]
fn nbd_requests_are_measured_beside_nbdkit() {
    let Some(()) = require::nbd_clients() else { return };
    let small = ["--rounds", "1", "--millis", "100", "--device-mib", "16", "--depths", "4"];
    run(env!("CARGO_BIN_EXE_nbd_requests"), &small, &[0, 1]);
}

#[test]
#[ignore = "long: make test-all"]
fn files_of_a_volume_are_measured_beside_fuse_alone() {
    let Some(()) = require::fuse().and_then(|()| require::fio()).and_then(|()| require::redis_benchmark()) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let few = [
        "volume",
        "--rounds",
        "1",
        "--millis",
        "100",
        "--mib",
        "16",
        "--no-rdma",
        "--subjects",
        "remora-tcp,remora-shm,memory",
    ];
    let cells =
        ["--blocks-kib", "4", "--jobs", "2", "--patterns", "randwrite,read", "--transport", "device", "--out", &out];
    run(env!("CARGO_BIN_EXE_remora-bench"), &[&few[..], &cells].concat(), &[0, 1]);
    let report = kept(folder.path());
    let points = report["points"].as_array().unwrap();
    let of = |subject: &str| points.iter().filter(|point| point["subject"] == subject).collect::<Vec<_>>();
    for subject in ["Remora, TCP", "Remora, shm", "FUSE floor"] {
        // Two of Redis, and four of fio.
        assert_eq!(of(subject).len(), 6, "{subject}: {report}");
        for point in of(subject) {
            assert!(point["value"].as_f64() > Some(0.0) && point["cpu_seconds"].as_f64() > Some(0.0), "{point}");
        }
    }
    assert_eq!(of("TCP").len(), 1, "new connections: {report}");
}

// `remora-bench messenger`: both ends in one command, or either end alone. The tests check that figures exist and are
// complete, not their values: other processes run on this machine.

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

// Reads over RDMA beside perftest's, in the virtual machine that has devices: the cost of the transport's own code.
//
// The targets of a release build on a quiet machine (0.9 of `ib_read_bw`, 1.15 times `ib_read_lat`) are judged by
// `bench/runs`. Here both programs are run and compared, whatever the figures are.

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn reads_are_measured_beside_perftest_in_the_virtual_machine() {
    let Some(machine) = require::rdma_vm() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (bandwidth, latency) = (file("bandwidth.json"), file("latency.json"));
    let ends = format!("--transports verbs --rdma-source {} --rdma-reader {}", RdmaVm::address(1), RdmaVm::address(0));
    // Both exit with 1 if a target of a release build is missed, which is not checked here.
    let script = format!(
        "{} {ends} --rounds 5 --millis 300 --region-mib 32 --sizes-kib 64,1024 --depths 16 --json {bandwidth}; \
         {} {ends} --rounds 5 --millis 300 --region-mib 32 --sizes 8,4096 --json {latency}; true",
        env!("CARGO_BIN_EXE_read_bandwidth"),
        env!("CARGO_BIN_EXE_read_latency"),
    );
    let machine = machine.nodes(2).writable(folder.path());
    let ran = machine.run(&["bash", "-c", &script]).unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}");
    println!("{said}");
    for (case, ratio) in [ratios(&bandwidth, &said), ratios(&latency, &said)].concat() {
        assert!(ratio > 0.0 && ratio.is_finite(), "{case}: {ratio}\n{said}");
    }
}

/// The median ratio of each of the two cases.
fn ratios(file: &str, said: &str) -> Vec<(String, f64)> {
    let text = std::fs::read(file).unwrap_or_else(|error| panic!("{file}: {error}\n{said}"));
    let run: Value = serde_json::from_slice(&text).unwrap();
    let comparisons = run["comparisons"].as_array().unwrap();
    assert_eq!(comparisons.len(), 2, "{said}");
    let of = |one: &Value| (one["ours"][1].as_str().unwrap().to_owned(), one["ratio"]["median"].as_f64().unwrap());
    comparisons.iter().map(of).collect()
}

/// The size of a window; the page is as long as its charts are, and what is measured does not depend on it.
const LIGHT: View = View { width: 1000, height: 800, is_dark: false };

/// How long a browser may take to lay out the page.
const LONG: Duration = Duration::from_secs(60);

/// What ends the page, so that all charts are there when it is.
const END: &str = "all charts are above";

/// What is wrong with the charts of the page: `[name of the file, fault]`. A chart is a shadow tree of its own, so that
/// its style is for its own parts.
const FAULTS: &str = r#"(() => {
    const faults = [];
    // From WCAG 2: the luminance of a colour, and the contrast of two.
    const light = (colour) => {
        const parts = colour.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (one, other) => {
        const [less, more] = [light(one), light(other)].sort((a, b) => a - b);
        return (more + 0.05) / (less + 0.05);
    };
    for (const host of document.querySelectorAll('div[data-name]')) {
        const svg = host.shadowRoot.querySelector('svg');
        const say = (fault) => faults.push([host.dataset.name, fault]);
        const frame = svg.getBoundingClientRect();
        const all = (what) => [...svg.querySelectorAll(what)].map((node) => ({
            node, is: node.textContent.trim() || node.getAttribute('class'), box: node.getBoundingClientRect(),
        }));
        // Labels that an axis leaves out have no words.
        const [texts, bars, whiskers] = [all('text').filter((text) => text.is), all('.own, .ours, .other'), all('line.whisker')];
        if (texts.length < 3) say('fewer than three texts');
        for (const { is, box } of [...texts, ...bars]) {
            if (box.width <= 0 || box.height <= 0) say(`not drawn: ${is}`);
            const across = box.left >= frame.left && box.right <= frame.right;
            if (!across || box.top < frame.top || box.bottom > frame.bottom) say(`beyond the frame: ${is}`);
        }
        // A pixel at each side belongs to no letter.
        const meet = (one, other) => one.left + 1 < other.right - 1 && other.left + 1 < one.right - 1
            && one.top + 1 < other.bottom - 1 && other.top + 1 < one.bottom - 1;
        texts.forEach((one, place) => {
            for (const other of texts.slice(place + 1)) {
                const same = one.is === other.is && one.box.x === other.box.x && one.box.y === other.box.y;
                if (!same && meet(one.box, other.box)) say(`over one another: ${one.is} | ${other.is}`);
            }
            for (const other of [...bars, ...whiskers]) {
                if (meet(one.box, other.box)) say(`over a bar: ${one.is}`);
            }
        });
        const page = svg.querySelector('.page');
        const ground = page ? getComputedStyle(page).fill : 'rgb(255, 255, 255)';
        for (const [parts, least] of [[texts, 4.5], [bars, 3]]) {
            for (const { node, is } of parts) {
                const colour = getComputedStyle(node).fill;
                if (contrast(colour, ground) < least) say(`${colour} on ${ground}: ${is}`);
            }
        }
    }
    return faults;
})()"#;

/// The faults of these charts, `name: fault`, in the order of light and dark.
fn faults(charts: &[(String, String)]) -> [Vec<String>; 2] {
    let folder = tempfile::tempdir().unwrap();
    let mut page = String::from("<!DOCTYPE html><meta charset=\"utf-8\"><title>charts</title>");
    for (name, svg) in charts {
        let svg = svg.trim_start_matches(|letter| letter != '<');
        let _ = write!(page, "<div data-name=\"{name}\"><template shadowrootmode=\"open\">{svg}</template></div>");
    }
    let path = folder.path().join("charts.html");
    fs::write(&path, format!("{page}<p>{END}</p>")).unwrap();
    let mut browser = Browser::open(&format!("file://{}", path.display()), LIGHT).unwrap();
    browser.wait_for_text("the charts", LONG, |text| text.contains(END)).unwrap();
    let mut found = [false, true].map(|is_dark| {
        browser.resize(View { is_dark, ..LIGHT }).unwrap();
        let found: Vec<(String, String)> = serde_json::from_value(browser.evaluate(FAULTS).unwrap()).unwrap();
        found.into_iter().map(|(name, fault)| format!("{name}: {fault}")).collect::<Vec<_>>()
    });
    let drawn = browser.evaluate("document.querySelectorAll('div[data-name]').length").unwrap();
    assert_eq!(drawn, Value::from(charts.len()));
    let complaints = browser.complaints().unwrap();
    found[0].extend(complaints.into_iter().map(|complaint| format!("the browser: {complaint}")));
    found
}

/// The charts that `remora-bench report` draws from the kept runs.
fn of_the_report(folder: &Path) -> Vec<(String, String)> {
    let root = server::project_root();
    let copy = |from: &str| {
        let to = folder.join(Path::new(from).file_name().unwrap());
        fs::copy(root.join(from), &to).unwrap();
        to
    };
    let (page, measured, plots) = (copy("bench/report.md"), copy("docs/measured.md"), folder.join("plots"));
    let mut report = Command::new(env!("CARGO_BIN_EXE_remora-bench"));
    report.arg("report").arg("--runs").arg(root.join("bench/runs"));
    report.arg("--page").arg(page).arg("--measured").arg(measured).arg("--plots").arg(&plots);
    let ran = report.output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let mut paths: Vec<PathBuf> = fs::read_dir(&plots).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read_to_string(path).unwrap())
    };
    paths.iter().map(read).collect()
}

#[test]
#[ignore = "long: needs a browser"]
fn every_chart_of_the_report_can_be_read_in_light_and_dark() {
    let Some(()) = require::browser() else { return };
    let folder = tempfile::tempdir().unwrap();
    let charts = of_the_report(folder.path());
    for kind in ["sync-", "feel-", "volume-", "headline"] {
        assert!(charts.iter().any(|(name, _)| name.starts_with(kind)), "no chart is named {kind}…");
    }
    let none: [Vec<String>; 2] = [Vec::new(), Vec::new()];
    assert_eq!(faults(&charts), none);
}

fn chart(name: &str, note: &str) -> (String, String) {
    let bar = |name: &str, family, median: f64, note: &str| {
        let figure = Spread { median, low: median * 0.9, high: median * 1.1 };
        Bar { name: name.to_owned(), family, figure, note: note.to_owned() }
    };
    let bars = vec![bar("replication, tuned", Family::Own, 8.0, "1.00"), bar(name, Family::Ours, 7.9, note)];
    let groups = vec![Group { title: "3 replicas".into(), bars }];
    let chart = Chart { title: "Seconds".into(), unit: "s", notes: "ratio", groups };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chart.svg");
    chart.draw(&path).unwrap();
    (name.to_owned(), fs::read_to_string(path).unwrap())
}

#[test]
#[ignore = "long: needs a browser"]
fn a_broken_chart_is_found() {
    let Some(()) = require::browser() else { return };
    let (long, wide) = ("n".repeat(160), "W".repeat(40));
    let long = long.as_str();
    let whole = chart("whole", "0.99");
    assert_eq!(faults(std::slice::from_ref(&whole)), [Vec::<String>::new(), Vec::new()]);
    // Black letters in the dark, as if that half of the style were missing.
    let dim = ("dim".to_owned(), whole.1.replace("text{fill:#e6edf3}", ""));
    assert_ne!(dim.1, whole.1);
    let charts = [chart(long, "0.99"), chart("wide", &wide), dim, ("none".to_owned(), "<svg><rect/></svg>".to_owned())];
    let [light, dark] = faults(&charts);
    let has = |faults: &[String], name: &str, fault: &str| {
        faults.iter().any(|found| found.starts_with(&format!("{name}: {fault}")))
    };
    for found in [&light, &dark] {
        assert!(has(found, long, "beyond the frame: "), "{found:?}");
        assert!(has(found, "wide", "over one another: ") && has(found, "wide", "over a bar: "), "{found:?}");
        assert!(has(found, "none", "fewer than three texts"), "{found:?}");
    }
    assert!(!has(&light, "dim", "") && has(&dark, "dim", "rgb(31, 35, 40) on rgb(13, 17, 23)"), "{light:?} {dark:?}");
}
