//! What agents show: metrics, as a client of HTTP, a reader of files and a real Prometheus see them, and as
//! `docs/reference/metrics.md` lists them; progress in `remora status`; and what `plan`, `probe` and `ready` say.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{LONG, Source, Stage, at_once, ends, fill, fill_keys, primary, quick, says, succeeds};
use crate::volume::commands::Scene;
use remora_lab::browser::{self, Browser, Page, View, promtool};
use remora_lab::server::wait_until;
use remora_lab::{Prometheus, Server, require, scratch};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0";

const CLASSIC: &str = "text/plain; version=0.0.4";

/// An address for `--metrics`.
pub(crate) fn free_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], scratch::free_port().unwrap()))
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Page {
    browser::get(address, path, OPENMETRICS).unwrap()
}

/// A line of the manual's tables.
#[derive(Debug)]
pub(crate) struct Listed {
    labels: BTreeSet<String>,
    /// The agents that export it.
    of: String,
}

/// The families that `docs/reference/metrics.md` lists, by their names.
pub(crate) fn manual() -> BTreeMap<String, Listed> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/metrics.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (mut listed, mut of) = (BTreeMap::new(), String::new());
    for line in page.lines() {
        let cells: Vec<&str> = line.split(" | ").collect();
        let [first, what, _] = &cells[..] else { continue };
        let first = first.trim_start_matches("| ");
        if *what == "what it is" {
            of = first.to_owned();
        } else if let Some(name) = first.strip_prefix('`').and_then(|name| name.strip_suffix('`')) {
            let (name, labels) = name.split_once('{').unwrap_or((name, ""));
            let labels = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty());
            listed.insert(name.to_owned(), Listed { labels: labels.map(str::to_owned).collect(), of: of.clone() });
        }
    }
    listed.retain(|name, _| name.starts_with("remora_") || name.starts_with("process_"));
    assert!(listed.len() > 80, "{listed:?}");
    listed
}

/// The names and the label names of the values in a text of either form.
fn values(text: &str) -> Vec<(String, BTreeSet<String>)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parsed = lines.map(|line| {
        let (series, _) = line.rsplit_once(' ').unwrap();
        let Some((name, rest)) = series.split_once('{') else { return (series.to_owned(), BTreeSet::new()) };
        // Values of these tests contain no quotes.
        let labels = rest.split('"').step_by(2).filter_map(|part| part.trim_matches([',', '}']).strip_suffix('='));
        (name.to_owned(), labels.map(str::to_owned).collect())
    });
    parsed.collect()
}

/// Checks what an agent exports: promtool has no objection, each family is in the manual with its labels and has the
/// type that its name says, and all that the manual lists for the agent are there, but perhaps those in `absent`.
#[track_caller]
pub(crate) fn check(agent: &str, classic: &str, is_file: bool, absent: &[&str]) {
    let ran = browser::promtool(Path::new("."), &["check", "metrics"], classic).unwrap();
    let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    assert!(ran.status.success() && said.trim().is_empty(), "{agent}: promtool says:\n{said}\nof\n{classic}");
    let manual = manual();
    let mut seen = BTreeSet::new();
    for (name, mut labels) in values(classic) {
        let listed = manual.get(&name).unwrap_or_else(|| panic!("{agent}: {name} is not in docs/reference/metrics.md"));
        assert!(!is_file || labels.remove("run"), "{agent}: {name} in a file has no `run`");
        assert_eq!(labels, listed.labels, "{agent}: {name}");
        // What the manual says of names.
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        assert!(classic.contains(&format!("# TYPE {name} {kind}\n")), "{agent}: {name} is no {kind}:\n{classic}");
        seen.insert(name);
    }
    let belongs = |name: &str, of: &str| match of {
        "all" => true,
        of if of.starts_with("all but") => !is_file && agent != "fetch",
        of => of.split(", ").any(|one| one == agent) && (is_file || !name.starts_with("remora_run_")),
    };
    let wanted = manual.iter().filter(|(name, listed)| belongs(name, &listed.of)).map(|(name, _)| name.clone());
    let wanted: BTreeSet<String> = wanted.collect();
    let unlisted: Vec<_> = seen.difference(&wanted).collect();
    assert!(unlisted.is_empty(), "docs/reference/metrics.md does not say that {agent} exports {unlisted:?}");
    // Those of a standby are seen in its own tests.
    let may_lack = |name: &str| absent.contains(&name) || name.starts_with("remora_standby_");
    let missing: Vec<_> = wanted.difference(&seen).filter(|name| !may_lack(name)).collect();
    assert!(missing.is_empty(), "{agent} lacks {missing:?}:\n{classic}");
}

/// Checks a page in both forms.
#[track_caller]
fn check_page(agent: &str, address: SocketAddr, absent: &[&str]) -> String {
    let page = browser::get(address, "/metrics", CLASSIC).unwrap();
    assert!(page.status == 200 && page.head.contains("version=0.0.4"), "{page:?}");
    check(agent, &page.text, false, absent);
    let page = get(address, "/metrics");
    assert!(page.status == 200 && page.head.contains("openmetrics-text"), "{page:?}");
    assert!(page.text.ends_with("# EOF\n"), "{page:?}");
    page.text
}

/// The value of this series, of which only the first part may be given.
#[track_caller]
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(series)).unwrap_or_else(|| panic!("no {series} in\n{text}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[test]
#[ignore = "long: needs Prometheus"]
fn a_source_and_a_replica_show_the_sync_and_whether_they_are_ready() {
    let (Some(kind), Some(())) = (require::valkey(), require::prometheus()) else { return };
    let mut server = primary(kind).start().unwrap();
    fill(&server, 8, 1);
    let address = free_address();
    let source = Source::start(&server, &["--metrics", &address.to_string()]);
    let before = get(address, "/metrics").text;
    says(&before, &["remora_source_server_up 1.0", "remora_snapshot_state{state=\"none\"} 1.0", "# EOF"]);
    let (replica, beside) = (Server::start(kind).unwrap(), free_address());
    let mut stays = source.replica(&replica, &["--stay", "--name", "a-replica", "--metrics", &beside.to_string()]);
    stays.wait_for_event("in_step", LONG).unwrap();
    // Before the first write of its life, the server's offset is 0.
    server.client().unwrap().ok(&["SET", "a", "1"]).unwrap();
    wait_until("the replica to be shown as staying", LONG, || {
        let text = get(address, "/metrics").text;
        let shown = text.contains("remora_replicas{phase=\"stay\"} 1.0") && text.contains("remora_replica_lag_bytes{");
        Ok(if shown { Ok(()) } else { Err(text) })
    })
    .unwrap();
    // The server pings its replicas, and nothing else is written: that is a rate above zero or not.
    let text = check_page("source", address, &["remora_primary_backlog_headroom_seconds"]);
    says(
        &text,
        &[
            "remora_snapshot_state{state=\"complete\"} 1.0",
            "remora_snapshots_total{result=\"taken\"} 1",
            "remora_replica_progress_ratio{replica=\"a-replica\"} 1.0",
            "remora_replica_info{replica=\"a-replica\",address=\"127.0.0.1:",
        ],
    );
    let bytes = value(&text, "remora_snapshot_bytes ");
    assert!(bytes > 8e6 && value(&text, "remora_memory_used_bytes ") > 8e6, "{text}");

    let text = check_page("replica", beside, &["remora_sync_left_seconds"]);
    says(
        &text,
        &["remora_sync_phase{phase=\"stay\"} 1.0", "remora_sync_progress_ratio 1.0", "remora_sync_source_up 1.0"],
    );
    says(&text, &[&format!("remora_sync_info{{server=\"{}\",primary=\"", replica.url())]);
    // The mark at the end of a payload without a length is in one of the two.
    for family in ["remora_sync_snapshot_bytes ", "remora_sync_delivered_bytes "] {
        assert!((value(&text, family) - bytes).abs() < 100.0, "{family}, {bytes}: {text}");
    }
    let cpu = value(&text, "process_cpu_seconds_total ");
    assert!((0.01..60.0).contains(&cpu) && value(&text, "process_open_fds ") > 5.0, "{text}");
    assert_eq!(get(beside, "/readyz").status, 200);

    assert_eq!(get(address, "/readyz").status, 200);
    // The server is gone: the source lives, and is not ready.
    server.kill().unwrap();
    assert_eq!(get(address, "/healthz").status, 200);
    let page = get(address, "/readyz");
    assert!(page.status == 503 && page.text.contains(&server.address().to_string()), "{page:?}");
    assert!(get(address, "/metrics").text.contains("remora_source_server_up 0.0"));
    drop(stays);
}

#[test]
fn a_replica_is_not_ready_before_it_is_in_step_and_its_port_is_named_if_it_is_taken() {
    let Some(kind) = require::valkey() else { return };
    let server = primary(kind).start().unwrap();
    fill(&server, 8, 1);
    // Four seconds for the snapshot.
    let source = Source::start(&server, &["--no-shm", "--upload-limit", "2MiB"]);
    let (replica, beside) = (Server::start(kind).unwrap(), free_address());
    let mut agent = source.replica(&replica, &["--metrics", &beside.to_string()]);
    let page = wait_until("the transfer to be seen", LONG, || {
        let ended = agent.ended()?;
        assert!(ended.is_none(), "{}", agent.output());
        // It listens before it asks for anything, but not at once.
        Ok(match browser::get(beside, "/metrics", OPENMETRICS) {
            Ok(page) if page.text.contains("remora_sync_phase{phase=\"transfer\"} 1.0") => Ok(page),
            Ok(page) => Err(page.text),
            Err(error) => Err(error.to_string()),
        })
    })
    .unwrap();
    let progress = value(&page.text, "remora_sync_progress_ratio ");
    assert!(progress < 1.0 && !page.text.contains("remora_sync_lag_bytes"), "{}", page.text);
    let ready = get(beside, "/readyz");
    assert!(ready.status == 503 && ready.text.contains("in phase transfer"), "{ready:?}");
    assert_eq!(get(beside, "/healthz").status, 200);
    let other = Server::start(kind).unwrap();
    let mut second = source.replica(&other, &["--metrics", &beside.to_string()]);
    says(&ends(&mut second, 8), &["--metrics", &beside.to_string()]);
    agent.wait_for_success(LONG).unwrap();
}

/// Names of keys that no page may show.
const SECRET: &str = "a-key-that-is-nobodys-business";

#[test]
#[ignore = "long: make test-all"]
fn the_page_of_a_source_shows_its_replicas_and_no_key() {
    let Some(kind) = require::valkey() else { return };
    let server = primary(kind).start().unwrap();
    fill(&server, 8, 1);
    server.client().unwrap().ok(&["SET", SECRET, SECRET]).unwrap();
    let address = free_address();
    let source = Source::start(&server, &["--metrics", &address.to_string()]);
    let ask = || -> serde_json::Value { serde_json::from_str(&get(address, "/status.json").text).unwrap() };
    // Its port is open before its memory is prepared.
    let before = wait_until("the source to be ready", LONG, || {
        let shown = ask();
        Ok(if shown["why"] == "" { Ok(shown) } else { Err(shown.to_string()) })
    })
    .unwrap();
    assert_eq!(
        (&before["agent"], &before["why"], &before["replicas"]),
        (&"source".into(), &"".into(), &serde_json::json!([]))
    );
    says(&before["facts"][0].to_string(), &["none", "takes one when a replica joins"]);
    let replica = Server::start(kind).unwrap();
    let mut stays = source.replica(&replica, &["--stay", "--name", "db <2>"]);
    stays.wait_for_event("in_step", LONG).unwrap();
    let shown = wait_until("the replica to stay", LONG, || {
        let shown = ask();
        Ok(if shown["replicas"][0]["phase"] == "stay" { Ok(shown) } else { Err(shown.to_string()) })
    })
    .unwrap();
    let row = &shown["replicas"][0];
    assert_eq!((&row["name"], &row["percent"], &row["from"]), (&"db <2>".into(), &"100.0 %".into(), &"source".into()));
    says(&shown["of"].to_string(), &[&server.url(), "(primary)"]);
    for path in ["/", "/status.json", "/metrics", "/readyz"] {
        let page = get(address, path);
        assert!(page.status == 200 && !page.text.contains(SECRET), "{path}: {page:?}");
    }
    let page = get(address, "/");
    says(&page.head, &["content-security-policy: default-src 'none'", "nosniff", "no-store", "text/html"]);
    drop(stays);
}

#[test]
#[ignore = "long: needs a browser"]
fn a_browser_draws_the_page_in_light_and_dark_and_has_no_complaint() {
    let (Some(kind), Some(())) = (require::valkey(), require::browser()) else { return };
    let mut server = primary(kind).start().unwrap();
    fill(&server, 8, 1);
    let address = free_address();
    let source = Source::start(&server, &["--metrics", &address.to_string()]);
    let replica = Server::start(kind).unwrap();
    let mut stays = source.replica(&replica, &["--stay", "--name", "db <2>"]);
    stays.wait_for_event("in_step", LONG).unwrap();
    let view = View { width: 1100, height: 800, is_dark: false };
    let mut browser = Browser::open(&format!("http://{address}/"), view).unwrap();
    let drawn = browser
        .wait_for_text("the replica on the page", LONG, |text| text.contains("db <2>") && text.contains("100.0 %"))
        .unwrap();
    says(&drawn, &["Remora source", &server.url(), "1 replica", "stay", "ready", "read by all replicas"]);
    let colour = "getComputedStyle(document.body).backgroundColor";
    let light = browser.evaluate(colour).unwrap();
    browser.resize(View { is_dark: true, ..view }).unwrap();
    assert_ne!(browser.evaluate(colour).unwrap(), light);
    // Nothing lies beyond the right edge of a telephone, but what can be scrolled there.
    browser.resize(View { width: 390, ..view }).unwrap();
    let width = browser.evaluate("document.documentElement.scrollWidth").unwrap();
    assert_eq!(width.as_u64(), Some(390));
    // The bar has the width of its share, which a style attribute in the document could not have set.
    let share =
        "[...document.querySelectorAll('#rows .bar i')].map((bar) => bar.offsetWidth / bar.parentNode.offsetWidth)";
    let shares = wait_until("the bar to be full", LONG, || {
        let shares = browser.evaluate(share)?;
        Ok(if shares[0].as_f64() > Some(0.99) { Ok(shares) } else { Err(shares.to_string()) })
    });
    assert_eq!(shares.unwrap().as_array().map(Vec::len), Some(1));
    browser.evaluate("document.getElementById('all').open = true").unwrap();
    let all = |text: &str| text.contains("remora_replica_progress_ratio") && text.contains("replica db <2>: 100.0 %");
    browser.wait_for_text("all values", LONG, all).unwrap();
    assert_eq!(browser.complaints().unwrap(), Vec::<String>::new());
    // The server ends: the page says why the source is not ready. The source ends: the page says that too.
    server.kill().unwrap();
    let gone = server.address().to_string();
    browser.wait_for_text("the reason", LONG, |text| text.contains("not ready") && text.contains(&gone)).unwrap();
    drop(source);
    browser.wait_for_text("the silence", LONG, |text| text.contains("no answer, last seen")).unwrap();
}

/// What is in a file, and whether other users can read it.
#[track_caller]
fn read(path: &str) -> String {
    let mode = std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o644, "{path}");
    std::fs::read_to_string(path).unwrap()
}

#[test]
#[ignore = "long: needs Prometheus"]
fn agents_that_end_leave_a_file_with_their_exit_code() {
    let (Some(kind), Some(())) = (require::valkey(), require::prometheus()) else { return };
    let server = primary(kind).start().unwrap();
    fill(&server, 8, 1);
    let stage = Stage::new();
    let source = stage.source(&server.url(), &[]);
    let file = |name: &str| stage.path(&format!("{name}.prom"));
    let replica = Server::start(kind).unwrap();
    source.replicate(&replica, &["--metrics-file", &file("replica")]);
    let text = read(&file("replica"));
    // Nothing was written: the server has acknowledged the offset 0.
    check("replica", &text, true, &["remora_sync_lag_bytes", "remora_sync_left_seconds"]);
    assert_eq!(value(&text, "remora_run_exit_code{run=\"replica\"}"), 0.0);
    assert_eq!(value(&text, "remora_sync_phase{run=\"replica\",phase=\"done\"}"), 1.0);
    assert!(value(&text, "remora_sync_phase_duration_seconds{run=\"replica\",phase=\"transfer\"}") > 0.0, "{text}");
    assert!(value(&text, "remora_run_ended") >= value(&text, "remora_run_started"), "{text}");

    let (at, token) = (source.address.to_string(), source.token().display().to_string());
    let from = ["--source", &at, "--token-file", &token];
    let run = |args: &[&str], code: i32| stage.end(&[args, &from].concat(), code);
    let (dump, shelf) = (stage.path("dump.rdb"), stage.path("backups"));
    run(&["fetch", "--to", &dump, "--metrics-file", &file("fetch")], 0);
    let text = read(&file("fetch"));
    let bytes = std::fs::metadata(&dump).unwrap().len();
    assert_eq!(value(&text, "remora_fetch_received_bytes{run=\"fetch\"}"), bytes as f64);
    // Nothing is written, so no time runs out; and slots are shown only while they arrive.
    check("fetch", &text, true, &["remora_fetch_headroom_seconds", "remora_fetch_received_slots"]);

    run(&["backup", "--to", &shelf, "--metrics-file", &file("backup")], 0);
    let text = read(&file("backup"));
    let others = [
        "remora_backup_recorded_offset",
        "remora_backup_recorded_timestamp_seconds",
        "remora_backup_source_up",
        "remora_fetch_received_bytes",
        "remora_fetch_received_slots",
    ];
    check("backup", &text, true, &others);
    let taken = value(&text, "remora_backup_newest_taken_timestamp_seconds");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((now - 600.0..=now + 1.0).contains(&taken), "{text}");

    // A failure keeps what is known, and names its code.
    drop(source);
    run(&["backup", "--to", &shelf, "--retry-for", "0s", "--metrics-file", &file("backup")], 5);
    let text = read(&file("backup"));
    assert_eq!(value(&text, "remora_run_exit_code"), 5.0);
    assert_eq!(value(&text, "remora_backup_newest_taken_timestamp_seconds"), taken);
    let said = run(&["fetch", "--to", &dump, "--metrics-file", "/nowhere/fetch.prom"], 8);
    says(&said, &["/nowhere/fetch.prom", "--metrics-file"]);
    let said = run(&["fetch", "--to", &dump, "--metrics-file", &stage.path("metrics.txt")], 2);
    says(&said, &[".prom"]);
    let left = std::fs::read_dir(stage.folder()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with(".remora")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
#[ignore = "long: needs Prometheus"]
fn a_backup_with_commands_shows_that_it_follows_its_source() {
    let (Some(kind), Some(())) = (require::valkey(), require::prometheus()) else { return };
    let server = primary(kind).start().unwrap();
    fill(&server, 2, 1);
    let stage = Stage::new();
    let mut source = stage.source(&server.url(), &[]);
    let (at, token, beside) = (source.address.to_string(), source.token().display().to_string(), free_address());
    let metrics = beside.to_string();
    let shelf = stage.path("backups");
    let args = ["backup", "--journal", "--to", &shelf, "--source", &at, "--token-file", &token, "--metrics", &metrics];
    let mut backup = stage.start(None, &args);
    backup.wait_for_line("the commands since are recorded", LONG).unwrap();
    server.client().unwrap().ok(&["SET", "a", "1"]).unwrap();
    let shows = |what: &str, wanted: &dyn Fn(&str) -> bool| {
        wait_until(what, LONG, || {
            let text = get(beside, "/metrics").text;
            Ok(if wanted(&text) { Ok(text) } else { Err(text) })
        })
        .unwrap()
    };
    shows("the command to be recorded", &|text| {
        text.contains("remora_backup_source_up 1.0")
            && text.contains("remora_backup_beginning 0.0")
            && value(text, "remora_backup_recorded_timestamp_seconds ") > 1e9
    });
    check_page("backup", beside, &["remora_fetch_received_bytes", "remora_fetch_received_slots"]);
    assert_eq!(get(beside, "/readyz").status, 200);
    source.agent.kill().unwrap();
    shows("the source to be missed", &|text| text.contains("remora_backup_source_up 0.0"));
    backup.signal(Signal::TERM).unwrap();
    ends(&mut backup, 0);
}

#[test]
#[ignore = "long: needs Prometheus"]
fn servers_and_writers_of_a_volume_show_its_copies() {
    let (Some(()), Some(())) = (require::nbd_clients(), require::prometheus()) else { return };
    let mut scene = Scene::new(None, &[]);
    let (at_server, at_writer) = (free_address(), free_address());
    let metrics = at_server.to_string();
    // The first server is another one, with a page.
    scene.servers[0].kill().unwrap();
    let address = scene.addresses[0].clone();
    let args = ["serve", "--listen", &address, "--memory", "64MiB", "--metrics", &metrics];
    (scene.servers[0], _) = scene.serve_with(&args);
    let file = scene.create("data.volume");
    let socket = scene.socket("one");
    let mut nbd = scene.nbd_with(&file, &socket, &["--metrics", &at_writer.to_string()]);
    crate::volume::commands::qemu_io(&socket, &["write -P 7 0 1M", "flush", "read -P 7 0 1M"]).unwrap();
    let text = check_page("volume nbd", at_writer, &["remora_volume_compared_blocks"]);
    assert_eq!((value(&text, "remora_volume_members "), value(&text, "remora_volume_copies ")), (3.0, 3.0));
    assert_eq!(value(&text, "remora_volume_size_blocks "), 4096.0);
    assert!(value(&text, "remora_volume_written_bytes_total ") >= 1048576.0, "{text}");
    let rare = ["remora_volume_copy_compared_blocks", "remora_volume_copy_scrubbed_blocks"];
    let text = check_page("volume serve", at_server, &rare);
    says(&text, &["remora_volume_server_copies 1.0", "state=\"whole\"} 1.0", "state=\"behind\"} 0.0"]);
    assert!(value(&text, "remora_volume_server_memory_used_bytes ") > 16e6, "{text}");
    assert_eq!(value(&text, "remora_volume_server_memory_limit_bytes "), 67108864.0);
    // A server fails: the writer shows which.
    scene.servers[1].kill().unwrap();
    crate::volume::commands::qemu_io(&socket, &["write -P 8 0 1M", "flush"]).unwrap();
    let gone = format!("remora_volume_member{{server=\"{}\"}} 0.0", scene.addresses[1]);
    wait_until("the volume to be degraded", LONG, || {
        let text = get(at_writer, "/metrics").text;
        Ok(if text.contains(&gone) && text.contains("remora_volume_members 2.0") { Ok(()) } else { Err(text) })
    })
    .unwrap();
    assert_eq!(get(at_writer, "/readyz").status, 200);
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

#[test]
#[ignore = "long: needs Prometheus"]
fn mounts_of_a_volume_show_how_it_is_read() {
    let (Some(()), Some(())) = (require::fuse(), require::prometheus()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("files.volume");
    says(&scene.end(&["format", &file], 0), &["an empty file system"]);
    let (at_writer, at_reader) = (free_address(), free_address());
    let more = ["--take-over", "--metrics", &at_writer.to_string()];
    let (mut writer, directory) = crate::volume::volume_mount::mount_as(&scene, &file, "mnt", &more, "files_mounted");
    std::fs::write(directory.at("small"), "a few bytes").unwrap();
    std::fs::File::open(directory.at("small")).unwrap().sync_all().unwrap();
    let absent = ["remora_volume_compared_blocks", "remora_volume_questions_total"];
    check_page("volume mount", at_writer, &absent);
    let more = ["--read-only", "--metrics", &at_reader.to_string()];
    let (mut reader, copy) = crate::volume::volume_mount::mount_as(&scene, &file, "copy", &more, "files_mounted");
    wait_until("the file to be there", LONG, || {
        let read = std::fs::read_to_string(copy.at("small")).unwrap_or_default();
        Ok(if read == "a few bytes" { Ok(()) } else { Err(read) })
    })
    .unwrap();
    let absent = [
        "remora_volume_compared_blocks",
        "remora_volume_member",
        "remora_volume_members",
        "remora_volume_writes_total",
        "remora_volume_written_bytes_total",
    ];
    let text = check_page("volume mount", at_reader, &absent);
    assert!(value(&text, "remora_volume_reads_total{way=\"memory\"}") > 0.0, "{text}");
    for agent in [&mut reader, &mut writer] {
        agent.signal(Signal::TERM).unwrap();
        ends(agent, 0);
    }
}

// A real Prometheus beside agents: it scrapes them, evaluates the alerts that are shipped, and accepts each expression of
// the dashboard.

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name)
}

#[test]
#[ignore = "long: make test-all"]
fn the_alerts_fire_when_they_should_and_only_then() {
    let Some(()) = require::prometheus() else { return };
    let folder = shipped("prometheus");
    for args in [["check", "rules", "remora.rules.yml"], ["test", "rules", "remora_test.yml"]] {
        let ran = promtool(&folder, &args, "").unwrap();
        let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
        assert!(ran.status.success() && said.contains("SUCCESS"), "{args:?}: {said}");
    }
    // A rule that is spoilt is found: the tests test something.
    let other = tempfile::tempdir().unwrap();
    let rules = std::fs::read_to_string(folder.join("remora.rules.yml")).unwrap();
    let spoilt = rules.replace("remora_attend_rules == 0", "remora_attend_rules == 1");
    assert_ne!(spoilt, rules);
    std::fs::write(other.path().join("remora.rules.yml"), spoilt).unwrap();
    std::fs::copy(folder.join("remora_test.yml"), other.path().join("remora_test.yml")).unwrap();
    let ran = promtool(other.path(), &["test", "rules", "remora_test.yml"], "").unwrap();
    assert!(!ran.status.success(), "{ran:?}");
}

#[test]
#[ignore = "long: needs Prometheus"]
fn prometheus_scrapes_a_source_and_a_replica_and_accepts_the_alerts_and_the_dashboard() {
    let (Some(kind), Some(())) = (require::valkey(), require::prometheus()) else { return };
    let server = primary(kind).start().unwrap();
    fill(&server, 8, 1);
    let (at_source, at_replica) = (free_address(), free_address());
    let source = Source::start(&server, &["--metrics", &at_source.to_string()]);
    let replica = Server::start(kind).unwrap();
    let mut stays = source.replica(&replica, &["--stay", "--name", "db2", "--metrics", &at_replica.to_string()]);
    stays.wait_for_event("in_step", LONG).unwrap();
    let rules = shipped("prometheus/remora.rules.yml").canonicalize().unwrap();
    let prometheus = Prometheus::start("remora", &[at_source, at_replica], &rules).unwrap();
    // Its answers are of the past: at most a scrape and an evaluation.
    let becomes = |expression: &str, wanted: f64| {
        wait_until(expression, LONG, || {
            Ok(match prometheus.value(expression) {
                Ok(value) if value == wanted => Ok(()),
                Ok(value) => Err(value.to_string()),
                Err(error) => Err(error.to_string()),
            })
        })
        .unwrap();
    };
    becomes("count(up{job=\"remora\"} == 1)", 2.0);
    becomes("count(remora_build_info{agent=\"source\"})", 1.0);
    becomes("remora_sync_phase{phase=\"stay\"}", 1.0);
    becomes("remora_replica_progress_ratio{replica=\"db2\"}", 1.0);
    becomes("sum(remora_replicas{phase=\"stay\"})", 1.0);
    becomes("remora_snapshots_total{result=\"taken\"}", 1.0);
    // But for the mark at the end of a payload without a length.
    becomes("abs(remora_snapshot_bytes - on () remora_sync_snapshot_bytes) < bool 100", 1.0);
    // Metadata: the types are those of the text.
    let metadata = prometheus.ask("/api/v1/targets/metadata?metric=remora_sync_interruptions").unwrap();
    assert_eq!(metadata[0]["type"], "counter", "{metadata}");

    // Every rule was evaluated, without an error.
    wait_until("the rules to be evaluated", LONG, || {
        let groups = prometheus.ask("/api/v1/rules")?;
        let groups = groups["groups"].as_array().cloned().unwrap_or_default();
        let rules: Vec<_> = groups.iter().filter_map(|group| group["rules"].as_array()).flatten().collect();
        let healths: Vec<String> = rules.iter().map(|rule| format!("{}: {}", rule["name"], rule["health"])).collect();
        let are_well = rules.len() > 15 && rules.iter().all(|rule| rule["health"] == "ok");
        Ok(if are_well { Ok(()) } else { Err(healths.join("\n")) })
    })
    .unwrap();
    let firing = prometheus.query("ALERTS").unwrap();
    assert!(firing.is_empty(), "{firing:?}");

    // Every expression of the dashboard, as Grafana would ask it for all instances.
    let dashboard = std::fs::read_to_string(shipped("grafana/remora.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let (mut asked, mut with_values) = (0, 0);
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        let filled = expression.replace("$__rate_interval", "1m").replace("$instance", ".*");
        assert!(!filled.contains('$'), "{expression}: a variable that this test does not know");
        let found = prometheus.query(&filled).unwrap_or_else(|error| panic!("{expression}: {error}"));
        (asked, with_values) = (asked + 1, with_values + usize::from(!found.is_empty()));
    }
    println!("{asked} expressions of the dashboard, {with_values} of them with values here");
    assert!(asked > 40 && with_values > 15, "{asked}, {with_values}");
    assert!(prometheus.query("rate(remora_sync_lag_bytes[").is_err(), "what is no expression is refused");

    // The server ends: the alert is pending, which takes it a minute to fire.
    drop(server);
    becomes("ALERTS{alertname=\"RemoraSourceServerDown\", alertstate=\"pending\"}", 1.0);
    let log = prometheus.log();
    assert!(!log.contains("level=error"), "{log}");
}

// How far a sync is, how fast, and how long it takes: as `remora status` and the lines of `remora replica` say it.

/// Bytes per second that the replica reads at, as its `--download-limit`.
const RATE: u64 = 4 << 20;

fn number(replica: &Value, name: &str) -> u64 {
    replica[name].as_u64().unwrap_or_else(|| panic!("no {name} in {replica}"))
}

/// The number before the first `%` of a status for people.
fn drawn_percent(drawn: &str) -> f64 {
    let before = drawn.split('%').next().unwrap();
    before.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no percent: {drawn}"))
}

#[test]
#[ignore = "long: make test-all"]
fn a_status_says_how_far_a_replica_is_and_how_fast_it_reads() {
    at_once(require::kinds(), |kind| {
        let (primary, server) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        fill(&primary, 32, 1);
        let mut source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "64KiB", "--eager"]);
        source.wait_for_snapshot();
        let limit = RATE.to_string();
        let mut agent = source.replica(&server, &["--stay", "--transport", "tcp", "--download-limit", &limit]);

        let is_reading = |replica: &Value| {
            let percent = replica["percent_permille"].as_u64().unwrap_or(0);
            (1..900).contains(&percent) && replica["rate_bytes_per_s"].as_u64() > Some(0)
        };
        let status = source.wait_for_status("the replica to read", |status| is_reading(&status["replicas"][0]));
        let (replica, slots) = (&status["replicas"][0], number(&status["generation"], "published_slots"));
        let (held, permille) = (number(replica, "slots_held"), number(replica, "percent_permille"));
        // Of a slot that is on its way to the server, not all bytes are there.
        assert!(permille.abs_diff(held * 1000 / slots) <= 1 + 1000 / slots, "{kind}: {status}");
        // It may have been allowed to read some more at once.
        let rate = number(replica, "rate_bytes_per_s");
        assert!(rate < 3 * RATE, "{kind}: {rate} bytes/s with a limit of {RATE}");
        let drawn = source.drawn_status();
        assert!(drawn_percent(&drawn) >= permille as f64 / 10.0 && drawn.contains("/s"), "{kind}: {drawn}");

        agent.wait_for_event("in_step", LONG).unwrap();
        source.wait_for_status("the replica to be whole", |status| status["replicas"][0]["percent_permille"] == 1000);
        assert_eq!(drawn_percent(&source.drawn_status()), 100.0);
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
    });
}

/// Microseconds that the server waits behind each key that it saves: of these keys, some seconds.
const SAVE_DELAY: &str = "250";

/// As [`SAVE_DELAY`], where two reports of `INFO` must lie within one save: the source asks once a second, and later on
/// a busy machine.
const FILE_DELAY: &str = "750";

const KEYS: usize = 20_000;

/// The percentages of lines that begin with `label`.
fn percentages(output: &str, label: &str) -> Vec<f64> {
    let lines = output.lines().filter(|line| line.starts_with(label) && line.contains(" %"));
    lines.map(drawn_percent).collect()
}

#[test]
#[ignore = "long: make test-all"]
fn percent_and_time_left_are_of_the_whole_data_set_while_its_snapshot_is_taken() {
    at_once(require::kinds(), |kind| {
        let (primary, server) = (primary(kind).config("rdb-key-save-delay", SAVE_DELAY), Server::start(kind).unwrap());
        let primary = primary.start().unwrap();
        fill_keys(&primary, KEYS, "value");
        let source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "64KiB"]);
        let mut agent = source.replica(&server, &["--stay", "--transport", "tcp"]);

        // Until the snapshot is whole, both percentages grow and stay below 100.
        let seen = RefCell::new(Vec::new());
        let last = source.wait_for_status("the snapshot to be whole", |status| {
            let (generation, replica) = (&status["generation"], &status["replicas"][0]);
            if generation["state"] == "complete" {
                return true;
            }
            let is_by_keys = generation["length"]["basis"] == "keys";
            if let (true, Some(taken), Some(held)) =
                (is_by_keys, generation["percent_permille"].as_u64(), replica["percent_permille"].as_u64())
            {
                assert_eq!(status["saving"]["keys_total"], KEYS, "{kind}: {status}");
                seen.borrow_mut().push((taken, held));
            }
            false
        });
        let seen: Vec<(u64, u64)> = seen.into_inner();
        assert!(seen.len() > 2, "{kind}: {seen:?}");
        assert!(seen.is_sorted_by(|one, next| one.0 <= next.0 && one.1 <= next.1), "{kind}: {seen:?}");
        assert!(seen.iter().all(|(taken, held)| (10..1000).contains(taken) && *held < 1000), "{kind}: {seen:?}");
        let (first, end) = (seen[0], seen[seen.len() - 1]);
        assert!(first.0 < 900 && end.0 > first.0 && end.1 > first.1, "{kind}: {seen:?}");
        assert_eq!(last["generation"]["percent_permille"], 1000, "{kind}: {last}");

        agent.wait_for_event("in_step", LONG).unwrap();
        let status = source
            .wait_for_status("the replica to be whole", |status| status["replicas"][0]["percent_permille"] == 1000);
        assert_eq!(status["replicas"][0]["left_seconds"], Value::Null);
        assert_eq!(status["generation"]["length"]["basis"], "known");
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        let (output, label) = (agent.output(), format!("transfer to {}: ", server.url()));
        let shown = percentages(&output, &label);
        assert!(shown.is_sorted() && shown.last() == Some(&100.0), "{kind}: {shown:?}\n{output}");
        let line = output.lines().find(|line| line.starts_with(&label) && line.contains(" of about "));
        let line = line.unwrap_or_else(|| panic!("{kind}: no estimate in\n{output}"));
        says(line, &["MiB of about ", " %, ", "/s, ", " s left"]);
        says(&output, &[" in total, ", "/s on average"]);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn while_a_server_saves_to_a_file_first_both_ends_say_how_far_it_is() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).config("rdb-key-save-delay", FILE_DELAY).config("repl-diskless-sync", "no");
        let (primary, server) = (primary.start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, KEYS, "value");
        let source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "64KiB"]);
        let mut agent = source.replica(&server, &["--transport", "tcp"]);
        let saved = |status: &Value| status["saving"]["keys"].as_u64().unwrap_or(0);
        let first = source.wait_for_status("the server to save", |status| saved(status) > 1000);
        assert!(first["generation"].is_null(), "{kind}: {first}");
        let more = source.wait_for_status("the server to save more", |status| saved(status) > saved(&first));
        assert!(saved(&more) < KEYS as u64, "{kind}: {more}");
        agent.wait_for_success(LONG).unwrap();
        let output = agent.output();
        says(&output, &[&format!("{} saves: ", primary.address()), &format!(" of {KEYS} keys, "), " keys/s, "]);
        // The rest may take less time than there is between two reports.
        says(&output, &["  transfer  ", "is a replica of"]);
    });
}

// `remora plan` against what a sync then takes.

/// Whether two figures are the same within this share of the greater one.
#[track_caller]
fn assert_near(what: &str, planned: &Value, found: u64, share: f64) {
    let planned = planned.as_f64().unwrap();
    let differs = (planned - found as f64).abs() / planned.max(found as f64);
    assert!(differs <= share, "{what}: planned {planned}, found {found}");
}

/// Memory may differ by this share.
const MEMORY: f64 = 0.15;

#[test]
#[ignore = "long: make test-all"]
fn what_was_planned_is_what_a_sync_then_takes() {
    for kind in require::kinds() {
        let top = primary(kind).config("rdbcompression", "no").config("repl-backlog-size", "4mb").start().unwrap();
        fill(&top, 64, 1);
        let stage = Stage::new();
        let planned = stage.end(&["plan", "--server", &top.url(), "--measure", "1s", "--json"], 0);
        let plan: Value = serde_json::from_str(&planned[planned.find('{').unwrap()..]).unwrap();
        assert_eq!(plan["source"]["sealed"], true);
        assert_eq!(plan["fork"]["count"], 1);

        // Exactly what was said to be needed, and of the same security.
        let memory = plan["source"]["whole_memory_bytes"].to_string();
        let options = ["--memory", &memory, "--security", "token"];
        let source = Source::start(&top, &options);
        let began = Instant::now();
        let server = Server::start(kind).unwrap();
        let transport = ["--security", "token", "--transport", "tcp", "--no-serve-peers"];
        succeeds(&mut source.replica(&server, &transport), &server);
        let took = began.elapsed().as_secs_f64();
        let status = source.status();
        let generation = &status["generation"];
        assert_eq!(generation["windowed"], false, "{status}");
        let bytes = |value: &Value| value.as_u64().unwrap();
        assert_near("the snapshot", &plan["snapshot_bytes"], bytes(&generation["snapshot_bytes"]), MEMORY);
        assert_near(
            "the source's memory",
            &plan["source"]["whole_in_use_bytes"],
            bytes(&generation["memory_bytes"]),
            MEMORY,
        );
        let used = server.fact("used_memory").unwrap().parse().unwrap();
        assert_near("the server's memory", &plan["replicas"]["server_bytes"], used, MEMORY);
        let served = source.bytes_served();
        assert_near("what left the source", &plan["snapshot_bytes"], served, MEMORY);
        // The machine may be busy.
        let seconds = plan["total_seconds"].as_f64().unwrap();
        assert!(took < 20.0 * seconds && took > seconds / 20.0, "planned {seconds} s, took {took} s");

        // Two mebibytes less, and the snapshot does not fit. What the server needs for its replica is counted by now.
        let planned = stage.end(&["plan", "--server", &top.url(), "--write-rate", "1MiB", "--json"], 0);
        let plan: Value = serde_json::from_str(&planned[planned.find('{').unwrap()..]).unwrap();
        let memory = plan["source"]["whole_memory_bytes"].to_string();
        let less = (memory.parse::<u64>().unwrap() - (2 << 20)).to_string();
        let said = stage.end(&["plan", "--server", &top.url(), "--write-rate", "1MiB", "--memory", &less], 0);
        says(&said, &["holds the snapshot", "is a window of", "makes the primary fork and send its data again"]);
        let said = stage.end(&["plan", "--server", &top.url(), "--write-rate", "1MiB", "--memory", &memory], 0);
        says(&said, &["is enough", "costs the primary nothing", "set repl-backlog-size to 16 MiB or more"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_cannot_be_asked_is_an_error_and_nothing_is_changed() {
    for kind in require::kinds() {
        let top = primary(kind).user("planner", "pw", "-@all +ping +info").start().unwrap();
        let stage = Stage::new();
        let file = stage.secret("pw", "pw");
        let login = ["--user", "planner", "--password-file", &file, "--measure", "1s"];
        let said = stage.end(&[&["plan", "--server", &top.url(), "--replicas", "3"][..], &login].concat(), 0);
        says(&said, &["replicas  3, each with about", "the primary has no backlog yet"]);
        let said = stage.end(&["plan", "--server", &top.url(), "--memory", "1MiB"], 3);
        says(&said, &["--memory is too small"]);
        stage.end(&["plan", "--server", "redis://127.0.0.1:1", "--measure", "1s"], 4);
        assert_eq!(top.fact("sync_full").unwrap(), "0");
        // A snapshot compresses such strings, and the allocator rounds their memory up: a user that may not look at keys
        // knows neither.
        fill_keys(&top, 5_000, &"0123456789".repeat(100));
        let planned = |login: &[&str]| {
            let url = top.url();
            let args = [&["plan", "--server", &url, "--write-rate", "1MiB", "--json"][..], login].concat();
            let said = stage.end(&args, 0);
            let plan: Value = serde_json::from_str(&said[said.find('{').unwrap()..]).unwrap();
            assert!(plan["snapshot_bytes"].as_u64() <= plan["snapshot_at_most_bytes"].as_u64(), "{plan}");
            plan["snapshot_bytes"].as_u64().unwrap()
        };
        let (with, without) = (planned(&[]), planned(&login[..4]));
        assert!(with < without * 4 / 5, "{with} {without}");
    }
}

// `remora probe` against a source of a server without data: figures for the transports that work, reasons for those
// that do not, and nothing left behind. `rdma/` tests it over RDMA.

/// Runs a probe to its end, which must have this exit code, and returns what it printed.
fn probe(stage: &Stage, source: &Source, more: &[&str], code: i32) -> String {
    let (address, token) = (source.address.to_string(), stage.token.display().to_string());
    let mut command = stage.remora(&["probe", "--source", &address, "--token-file", &token]);
    command.args(more).env("REMORA_RDMA_DISABLE", "1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    String::from_utf8(output.stdout).unwrap() + if code == 0 { "" } else { &said }
}

/// Whether the source has a probe region mapped.
fn exports_a_probe_region(source: &Source) -> bool {
    std::fs::read_to_string(format!("/proc/{}/maps", source.agent.pid())).unwrap().contains("remora-probe")
}

#[test]
fn a_source_without_data_is_measured_by_each_transport_and_takes_no_snapshot() {
    let Some(kind) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(kind).unwrap());
    let source = stage.source(&primary.url(), &[]);
    let printed = probe(&stage, &source, &["--json", "--time", "3ms"], 0);
    let report: Value = serde_json::from_str(&printed).unwrap();
    let transports = report["transports"].as_array().unwrap();
    let names: Vec<&str> = transports.iter().map(|one| one["transport"].as_str().unwrap()).collect();
    assert_eq!(names, ["shm", "verbs", "tcp"]);
    for one in transports.iter().filter(|one| one["transport"] != "verbs") {
        assert_eq!((&one["usable"], &one["trouble"]), (&Value::Bool(true), &Value::Null), "{one}");
        let figures = one["figures"].as_array().unwrap();
        assert_eq!(figures.len(), 8 * 3, "8 sizes at 3 depths");
        for figure in figures {
            let number = |name: &str| figure[name].as_f64().unwrap();
            assert!(number("median_micros") > 0.0 && number("median_micros") <= number("p99_micros"), "{figure}");
            assert!(number("reads") >= 1.0 && number("bytes_per_second") >= number("read_bytes"), "{figure}");
        }
    }
    assert_eq!(transports[1]["usable"], false);
    says(transports[1]["trouble"].as_str().unwrap(), &["REMORA_RDMA_DISABLE"]);
    assert_eq!(source.status()["totals"]["snapshots_taken"], 0);
    wait_until("the probe region to be revoked", LONG, || {
        Ok(if exports_a_probe_region(&source) { Err("it is mapped".into()) } else { Ok(()) })
    })
    .unwrap();
    source.stop();
}

#[test]
#[ignore = "long: make test-all"]
fn the_tables_say_which_transports_are_unusable_and_why_and_the_time_limit_holds() {
    let Some(kind) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(kind).unwrap());
    let source = stage.source(&primary.url(), &["--no-shm"]);
    let printed = probe(&stage, &source, &["--time", "3ms", "--sizes", "64,4KiB", "--depths", "1,16"], 0);
    says(
        &printed,
        &["shm: cannot be used: the source does not offer it", "verbs: cannot be used: RDMA", "64 B", "4 KiB"],
    );
    let begun = Instant::now();
    let late = ["--transport", "tcp", "--time", "10s", "--limit", "300ms"];
    let said = probe(&stage, &source, &late, 5);
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    says(&said, &["24 of 24 figures are missing", "--limit", "could be measured"]);
    source.stop();
}

#[test]
#[ignore = "long: make test-all"]
fn two_probes_at_once_share_the_region_and_a_wrong_token_gets_none() {
    let Some(kind) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(kind).unwrap());
    let source = stage.source(&primary.url(), &[]);
    let token = stage.token.display().to_string();
    let address = source.address.to_string();
    let args = ["probe", "--source", &address, "--token-file", &token, "--transport", "tcp", "--time", "20ms"];
    let mut both = [stage.start(None, &args), stage.start(None, &args)];
    for one in &mut both {
        says(&ends(one, 0), &["4 MiB"]);
    }
    let wrong = stage.secret("wrong", "another secret altogether");
    let mut stranger = stage.start(None, &["probe", "--source", &address, "--token-file", &wrong]);
    ends(&mut stranger, 5);
    source.stop();
}

// `remora ready`: the exit code tells a probe whether a server can be given work.

fn ready(stage: &Stage, server: &Server, more: &[&str], code: i32) -> String {
    stage.end(&[&["ready", "--server", &server.url()], more].concat(), code)
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_is_ready_once_it_is_in_step_with_its_primary() {
    for kind in require::kinds() {
        let (stage, first) = (Stage::new(), primary(kind).start().unwrap());
        fill_keys(&first, 100, "x");
        says(&ready(&stage, &first, &[], 0), &["is ready: a primary"]);
        let server = Server::start(kind).unwrap();
        Source::start(&first, &[]).replicate(&server, &[]);
        let (host, port) = (first.address().ip().to_string(), first.port().to_string());
        let at = format!("{host}:{port}");
        says(&ready(&stage, &server, &["--max-lag", "1MiB", "--timeout", "20s"], 0), &["a replica of", &at]);

        // Nothing listens where it is sent: it waits as long as it is told to.
        server.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
        let began = Instant::now();
        let said = ready(&stage, &server, &["--timeout", "1s", "--link-only"], 13);
        says(&said, &["is not ready", "link to 127.0.0.1:1 is down"]);
        assert!(began.elapsed() > Duration::from_millis(700) && began.elapsed() < LONG);
        says(&ready(&stage, &server, &[], 13), &["its primary cannot be asked"]);

        // Its primary follows another server meanwhile, and it goes along.
        let other = quick(kind).start().unwrap();
        server.client().unwrap().ok(&["REPLICAOF", &host, &port]).unwrap();
        ready(&stage, &server, &["--timeout", "60s"], 0);
        first.client().unwrap().ok(&["REPLICAOF", &host, &other.port().to_string()]).unwrap();
        ready(&stage, &first, &["--timeout", "60s"], 0);
        ready(&stage, &server, &["--timeout", "60s"], 0);
    }
}

#[test]
fn each_change_is_said_while_it_is_watched() {
    let Some(kind) = require::redis() else { return };
    let (stage, first, server) = (Stage::new(), primary(kind).start().unwrap(), quick(kind).start().unwrap());
    let mut watch = stage.start(None, &["ready", "--server", &server.url(), "--watch", "100ms"]);
    watch.wait_for_line("is ready: a primary", LONG).unwrap();
    server.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
    watch.wait_for_line("is not ready", LONG).unwrap();
    let (host, port) = (first.address().ip().to_string(), first.port().to_string());
    server.client().unwrap().ok(&["REPLICAOF", &host, &port]).unwrap();
    watch.wait_for_line("is ready: a replica of", LONG).unwrap();
    assert_eq!(watch.output().matches("is ready: a primary").count(), 1, "{}", watch.output());
    watch.signal(rustix::process::Signal::TERM).unwrap();
    ends(&mut watch, 7);
}

#[test]
fn a_server_that_is_gone_is_an_error_of_its_own() {
    let Some(kind) = require::redis() else { return };
    let (stage, mut server) = (Stage::new(), quick(kind).start().unwrap());
    server.kill().unwrap();
    says(&ready(&stage, &server, &[], 4), &[&server.url()]);
}
