//! `remora fetch`: a file from which a server goes on by a partial resynchronisation, and files that the primary does
//! not continue any more.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;

use remora_lab::workload::fill_every_type;
use remora_lab::{Kind, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{
    LONG, Scene, ends, fill, kinds_and_module, number, primary, quick, says, steady_writer, strs, syncs,
    with_or_without, write_past_the_backlog,
};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 16;

/// A source that takes four seconds for it.
const SLOWLY: [&str; 3] = ["--no-shm", "--upload-limit", "4MiB"];

impl Scene {
    fn fetch(&self, to: &str, more: &[&str]) -> remora_lab::Agent {
        self.start("fetch", to, more)
    }

    /// What is in the folder beside the token and what the test has put there.
    fn left(&self) -> Vec<String> {
        let names = fs::read_dir(self.stage.folder()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter_map(|name| name.into_string().ok()).filter(|name| name.contains("rdb")).collect()
    }
}

#[test]
fn a_server_that_starts_on_the_file_goes_on_by_a_partial_resynchronisation() {
    let Some(()) = require::root() else { return };
    for (kind, module) in kinds_and_module() {
        let server = with_or_without(primary(kind), module);
        fill(&server, MEBIBYTES, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let scene = Scene::new(server, &[]);
        let writer = steady_writer(&scene.primary);
        let folder = scene.stage.path("data");
        fs::create_dir(&folder).unwrap();
        let (to, include, json) =
            (format!("{folder}/dump.rdb"), scene.stage.path("replicaof.conf"), scene.stage.path("summary.json"));
        let options = ["--owner", "0:0", "--mode", "0640", "--write-replicaof", &include, "--json", &json];
        let said = ends(&mut scene.fetch(&to, &options), 0);
        says(&said, &[&to, "the primary continues from it"]);
        let summary: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        let file = fs::metadata(&to).unwrap();
        assert_eq!(summary["bytes"].as_u64(), Some(file.len()));
        assert_eq!((file.mode() & 0o777, file.uid()), (0o640, 0));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");

        let started = quick(kind).config("dir", &folder).config("include", &include);
        let replica = started.start().unwrap();
        replica.wait_for_link(LONG).unwrap();
        assert_eq!(number(&scene.primary, "sync_full"), 1, "{kind}, module: {module}: {}", replica.log());
        assert_eq!(syncs(&scene.primary).1, 1);
        writer.stop().unwrap();
        assert_same_data(&scene.primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_fetch_that_is_killed_goes_on_where_it_was() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, MEBIBYTES, 2);
        let scene = Scene::new(server, &SLOWLY);
        let to = scene.stage.path("dump.rdb");
        for signal in [Signal::KILL, Signal::TERM] {
            let mut fetch = scene.fetch(&to, &[]);
            scene.source.wait_for_slots(&mut fetch, if signal == Signal::KILL { 40 } else { 120 });
            says(&scene.stage.end(&strs(&scene.args("fetch", &to, &[])), 3), &["another remora fetch"]);
            fetch.signal(signal).unwrap();
            if signal == Signal::TERM {
                says(&ends(&mut fetch, 7), &[".dump.rdb.remora", "goes on there"]);
            } else {
                fetch.wait(LONG).unwrap();
            }
            assert_eq!(scene.left(), [".dump.rdb.remora"]);
        }
        ends(&mut scene.fetch(&to, &[]), 0);
        let served = scene.source.bytes_served() as f64;
        let snapshot = fs::metadata(&to).unwrap().len() as f64;
        assert!(snapshot >= (MEBIBYTES << 20) as f64 && served < 1.4 * snapshot, "{served} for {snapshot}");
        assert_eq!(number(&scene.primary, "sync_full"), 1);
        assert_eq!(scene.left(), ["dump.rdb"]);
        let loaded = quick(kind).config("dir", scene.stage.folder().display()).start().unwrap();
        assert_eq!(loaded.digest().unwrap(), scene.primary.digest().unwrap());
    }
}

#[test]
fn a_file_that_the_primary_does_not_continue_is_not_put_in_place_unless_it_is_a_backup() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let server = quick(kind).config("repl-backlog-size", "16kb").start().unwrap();
        fill(&server, 1, 3);
        let mut scene = Scene::new(server, &["--eager"]);
        scene.source.wait_for_snapshot();
        write_past_the_backlog(&scene.primary);
        let to = scene.stage.path("dump.rdb");
        says(&ends(&mut scene.fetch(&to, &[]), 16), &["full sync", "repl-backlog-size", "--allow-stale"]);
        assert_eq!(scene.left(), [".dump.rdb.remora"]);
        says(&ends(&mut scene.fetch(&to, &["--allow-stale"]), 0), &["takes a full sync"]);
        assert_eq!(scene.left(), ["dump.rdb"]);
        assert_eq!(number(&scene.primary, "sync_full"), 1);
    }
}

#[test]
fn standard_output_gets_the_same_bytes_however_slowly_it_takes_them() {
    let Some(()) = require::root() else { return };
    let server = primary(Kind::Valkey9).start().unwrap();
    fill(&server, MEBIBYTES, 5);
    let scene = Scene::new(server, &[]);
    let to = scene.stage.path("dump.rdb");
    ends(&mut scene.fetch(&to, &[]), 0);
    let spool = scene.stage.path("spool");
    fs::create_dir(&spool).unwrap();
    let args = scene.args("fetch", "-", &["--spool", &spool]);
    let mut fetch = scene.stage.remora(&strs(&args)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = fetch.stdout.take().unwrap();
    // The source is free before a byte has been taken.
    scene.source.wait_for_status("nothing to read", |status| status["totals"]["replicas_done"].as_u64() == Some(2));
    let mut bytes = Vec::new();
    out.read_to_end(&mut bytes).unwrap();
    assert!(fetch.wait().unwrap().success());
    assert!(bytes == fs::read(&to).unwrap(), "{} bytes", bytes.len());
    assert_eq!(fs::read_dir(&spool).unwrap().count(), 0);

    // A pipe that is closed is an error.
    let mut fetch = scene.stage.remora(&strs(&args)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(fetch.stdout.take());
    let mut said = String::new();
    fetch.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(fetch.wait().unwrap().code(), Some(8), "{said}");
    says(&said, &["standard output has not got the whole snapshot"]);
}

#[test]
fn what_cannot_work_is_refused_before_anything_is_asked_for() {
    let server = primary(Kind::Redis7).start().unwrap();
    let scene = Scene::new(server, &[]);
    let (to, config) = (scene.stage.path("dump.rdb"), scene.stage.path("redis.conf"));
    let refused = |more: &[&str], words: &[&str]| {
        says(&scene.stage.end(&strs(&scene.args("fetch", &to, more)), 3), words);
        assert_eq!(number(&scene.primary, "sync_full"), 0);
    };
    fs::write(&config, "appendonly yes\n").unwrap();
    refused(&["--server-config", &config], &[&config, "appendonly no"]);
    fs::write(&to, "precious").unwrap();
    refused(&[], &[&to, "--replace"]);
    assert_eq!(fs::read(&to).unwrap(), b"precious");
    says(&ends(&mut scene.fetch(&to, &["--replace"]), 0), &["the primary continues from it"]);
    assert!(fs::read(&to).unwrap().starts_with(b"REDIS"));
}
