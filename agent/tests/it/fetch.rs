//! `remora fetch`: a file from which a server goes on by a partial resynchronisation, and files that the primary does
//! not continue any more.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::workload::fill_every_type;
use remora_lab::{Agent, Kind, Server, assert_same_data, require};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::kit::{
    Directory, LONG, Scene, Source, Stage, at_once, ends, fill, kinds_and_module, number, primary, quick, says,
    steady_writer, strs, syncs, with_or_without, write_past_the_backlog,
};
use crate::sync::primary::{ANOTHER, foreign, replaced};

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
#[ignore = "long: make test-all"]
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
            scene.source.wait_for_slots(&mut fetch, if signal == Signal::KILL { 40 } else { 80 });
            fetch.signal(Signal::STOP).unwrap(); // so that it cannot end before it gets the signal
            says(&scene.stage.end(&strs(&scene.args("fetch", &to, &[])), 3), &["another remora fetch"]);
            fetch.signal(signal).unwrap();
            fetch.signal(Signal::CONT).unwrap();
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
#[ignore = "long: make test-all"]
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

// `remora source --from-file`: a snapshot that some server has written, and the stream behind it.

/// The file that a server has just saved, in a place of its own.
fn saved(server: &Server, to: &str) {
    server.client().unwrap().ok(&["SAVE"]).unwrap();
    let file = Path::new(&server.configured("dir").unwrap()).join(server.configured("dbfilename").unwrap());
    fs::copy(file, to).unwrap();
}

/// What a source says that refuses this file.
fn refused(stage: &Stage, server: &Server, file: &str, words: &[&str]) {
    let (url, token) = (server.url(), stage.token.display().to_string());
    let args = ["source", "--server", &url, "--token-file", &token, "--listen", "127.0.0.1:0", "--from-file", file];
    let before = number(server, "sync_full");
    says(&stage.end(&args, 3), words);
    assert_eq!(number(server, "sync_full"), before, "{file}");
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_of_a_file_that_a_replica_has_saved_are_exact() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 4, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let replica = quick(kind).start().unwrap();
        replica.replicate(&server).unwrap();
        replica.wait_for_link(LONG).unwrap();
        let writer = steady_writer(&server);
        writer.wait_for(3_000);
        let stage = Stage::new();
        let file = stage.path("dump.rdb");
        saved(&replica, &file);
        writer.wait_for(6_000);
        let mut source = stage.source(&server.url(), &["--from-file", &file]);
        source.wait_for_snapshot();
        let joiners = [quick(kind).start().unwrap(), quick(kind).start().unwrap()];
        for joiner in &joiners {
            source.replicate(joiner, &[]);
            writer.wait_for(writer.commands() + 500);
        }
        writer.stop().unwrap();
        for joiner in &joiners {
            assert_same_data(&server, joiner);
        }
        assert_eq!(number(&server, "sync_full"), 1, "{kind}: the one of the server's own replica");
    }
}

/// `--no-fork` is kept to the end: when the primary does not continue behind the file any more, replicas wait.
#[test]
fn a_source_of_a_file_has_the_primary_fork_at_no_time_with_no_fork() {
    for kind in require::kinds() {
        let server = quick(kind).config("repl-backlog-size", "16kb").start().unwrap();
        fill(&server, 1, 1);
        let writer = quick(kind).start().unwrap();
        writer.replicate(&server).unwrap();
        writer.wait_for_link(LONG).unwrap();
        let stage = Stage::new();
        let file = stage.path("dump.rdb");
        saved(&writer, &file);
        let copies = number(&server, "sync_full");
        // Servers that follow the primary would ask it for full copies of their own below.
        drop(writer);
        let mut source = stage.source(&server.url(), &["--from-file", &file, "--no-fork"]);
        source.wait_for_snapshot();
        let joiner = quick(kind).start().unwrap();
        source.replicate(&joiner, &[]);
        assert_same_data(&server, &joiner);
        drop(joiner);

        source.agent.signal(Signal::STOP).unwrap();
        let stat = format!("/proc/{}/stat", source.agent.pid());
        wait_until("the source to stand still", LONG, || {
            let stat = fs::read_to_string(&stat).unwrap();
            // The state follows the name, which is in parentheses (proc_pid_stat(5)).
            Ok(if stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")) { Ok(()) } else { Err(stat) })
        })
        .unwrap();
        server.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
        write_past_the_backlog(&server);
        source.agent.signal(Signal::CONT).unwrap();
        source.agent.wait_for_event("stream_lost", LONG).unwrap();
        let late = quick(kind).start().unwrap();
        let said = ends(&mut source.replica(&late, &["--retry-for", "2s"]), 5);
        says(&said, &["would not continue behind", &file]);
        assert_eq!(late.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
        let said = source.agent.output();
        assert_eq!(number(&server, "sync_full"), copies, "{kind}: {}\n{said}", server.log());
    }
}

#[test]
fn a_file_behind_which_the_primary_does_not_continue_is_refused_and_costs_it_nothing() {
    let server = quick(Kind::Redis7).config("repl-backlog-size", "16kb").start().unwrap();
    fill(&server, 1, 2);
    let replica = quick(Kind::Redis7).start().unwrap();
    replica.replicate(&server).unwrap();
    replica.wait_for_link(LONG).unwrap();
    let stage = Stage::new();
    let file = stage.path("dump.rdb");
    saved(&replica, &file);
    let other = primary(Kind::Redis7).start().unwrap();
    refused(&stage, &other, &file, &["would not continue", &file]);
    fill(&server, 4, 3);
    // The primary gives up what its replica has got when it writes more.
    wait_until("the primary to give up its first bytes", LONG, || {
        server.client()?.ok(&["SET", "one", "more"])?;
        let first = number(&server, "repl_backlog_first_byte_offset");
        Ok(if first > 3 << 20 { Ok(()) } else { Err(first.to_string()) })
    })
    .unwrap();
    refused(&stage, &server, &file, &["would not continue", &file, "repl-backlog-size"]);

    // Of a server without replicas, and parts of a file.
    let foreign = stage.path("foreign.rdb");
    saved(&other, &foreign);
    refused(&stage, &other, &foreign, &[&foreign, "repl-id"]);
    let bytes = fs::read(&file).unwrap();
    let torn = stage.path("torn.rdb");
    for length in [0, 5, 200, bytes.len() / 2, bytes.len() - 3] {
        fs::write(&torn, &bytes[..length]).unwrap();
        refused(&stage, &server, &torn, &[&torn, "damaged"]);
    }
    refused(&stage, &server, &stage.path("missing.rdb"), &["missing.rdb", "cannot be read"]);
}

// `remora snapshot mount`: a snapshot as a file that is copied while it arrives, checked, and loaded by another server.

/// A source that takes minutes for it.
const NEVER: [&str; 3] = ["--no-shm", "--upload-limit", "64KiB"];

struct MountScene {
    stage: Stage,
    primary: Server,
    source: Source,
    /// Where the bytes are kept.
    spool: String,
}

impl MountScene {
    fn new(primary: Server, options: &[&str]) -> MountScene {
        let stage = Stage::new();
        let source = stage.source(&primary.url(), options);
        let spool = stage.path("spool");
        fs::create_dir(&spool).unwrap();
        MountScene { stage, primary, source, spool }
    }

    /// Starts the command, and waits until the file is there.
    fn mount(&self, more: &[&str]) -> (Agent, Directory) {
        let directory = Directory::new(self.stage.path("mnt"));
        let (source, token) = (self.source.address.to_string(), self.source.token().display().to_string());
        let args = ["snapshot", "mount", "--source", &source, "--token-file", &token, "--spool", &self.spool];
        let mut mounted = self.stage.start(None, &[&args, &[directory.path()][..], more].concat());
        mounted.wait_for_event("snapshot_mounted", LONG).unwrap();
        (mounted, directory)
    }

    /// Nothing is left where the bytes were kept.
    fn assert_nothing_left(&self) {
        assert_eq!(fs::read_dir(&self.spool).unwrap().count(), 0);
    }
}

/// The server's own check of an RDB file.
fn assert_sound(kind: Kind, file: &Path) {
    let name = if kind == Kind::Redis7 { "redis-check-rdb" } else { "valkey-check-rdb" };
    let mut check = Command::new(kind.binary().unwrap());
    let checked = check.arg0(name).arg(file).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success() && said.contains("RDB looks OK"), "{}\n{said}", checked.status);
}

#[test]
#[ignore = "long: make test-all"]
fn a_snapshot_is_copied_while_it_arrives_checked_and_loaded_by_another_server() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    at_once(kinds_and_module(), |(kind, module)| {
        let server = with_or_without(primary(kind), module);
        fill(&server, MEBIBYTES, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let scene = MountScene::new(server, &SLOWLY);
        let (mut mounted, directory) = scene.mount(&[]);
        let file = directory.at("dump.rdb");
        let early = fs::metadata(&file).unwrap().len();
        assert!(early < (MEBIBYTES << 20) as u64, "{early} bytes are there already");
        assert_eq!(early % 4096, 0);
        let clone = scene.stage.path("clone");
        fs::create_dir(&clone).unwrap();
        let copied = Command::new("cp").arg(&file).arg(format!("{clone}/dump.rdb")).status().unwrap();
        assert!(copied.success(), "{kind}: {}", mounted.output());
        mounted.wait_for_event("snapshot_arrived", LONG).unwrap();
        let bytes = fs::read(&file).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().len(), bytes.len() as u64);
        assert!(bytes.len() > MEBIBYTES << 20);
        assert!(fs::read(format!("{clone}/dump.rdb")).unwrap() == bytes, "{kind}");
        assert_sound(kind, &file);
        let (names, error) =
            (fs::read_dir(&directory.0).unwrap().count(), fs::write(directory.at("x"), "").unwrap_err());
        assert_eq!((names, error.raw_os_error()), (1, Some(Errno::ROFS.raw_os_error())));

        let loaded = Server::builder(kind).config("dir", &clone).config("save", "\"\"").start().unwrap();
        assert_eq!(loaded.digest().unwrap(), scene.primary.digest().unwrap(), "{kind}, module: {module}");
        assert_eq!(number(&scene.primary, "sync_full"), 1);
        scene.source.wait_for_status("nothing to read", |status| status["replicas"].as_array().unwrap().is_empty());

        // What has arrived needs the source no more.
        let MountScene { source, spool, .. } = scene;
        source.stop();
        assert!(fs::read(&file).unwrap() == bytes);
        directory.unmount();
        says(&ends(&mut mounted, 0), &["unmounted"]);
        assert_eq!(fs::read_dir(&spool).unwrap().count(), 0);
    });
}

#[test]
fn shared_memory_and_a_snapshot_that_the_source_has_already() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, MEBIBYTES, 2);
        let mut scene = MountScene::new(server, &["--eager"]);
        scene.source.wait_for_snapshot();
        let mut copies = Vec::new();
        for options in [&["--no-ring"][..], &["--transport", "tcp"]] {
            let (mut mounted, directory) = scene.mount(options);
            copies.push(fs::read(directory.at("dump.rdb")).unwrap());
            assert_sound(kind, &directory.at("dump.rdb"));
            mounted.signal(Signal::TERM).unwrap();
            says(&ends(&mut mounted, 0), &["unmounting"]);
            assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0, "an ordinary directory again");
        }
        assert!(copies[0] == copies[1] && copies[0].len() > MEBIBYTES << 20);
        assert_eq!(number(&scene.primary, "sync_full"), 1, "both have the snapshot that was there");
        scene.assert_nothing_left();
    }
}

/// A process that reads the file to its end.
fn reader(file: &Path) -> Child {
    Command::new("cat").arg(file).stdout(std::process::Stdio::null()).spawn().unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn what_does_not_arrive_is_an_error_and_never_the_end_and_a_waiting_reader_can_be_killed() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let server = primary(Kind::Redis7).start().unwrap();
    fill(&server, MEBIBYTES, 3);
    let mut scene = MountScene::new(server, &NEVER);
    let (mut mounted, directory) = scene.mount(&["--retry-for", "1s"]);
    let file = directory.at("dump.rdb");
    let (mut killed, mut waits) = (reader(&file), reader(&file));
    std::thread::sleep(Duration::from_millis(300));
    assert!(killed.try_wait().unwrap().is_none() && waits.try_wait().unwrap().is_none(), "they wait for bytes");
    let began = Instant::now();
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    scene.source.agent.kill().unwrap();
    assert_eq!(waits.wait().unwrap().code(), Some(1), "an error, after {:?}", began.elapsed());
    says(&ends(&mut mounted, 5), &["--retry-for"]);
    assert!(!file.exists());
    scene.assert_nothing_left();
}

#[test]
#[ignore = "long: make test-all"]
fn another_snapshot_is_another_file_and_no_byte_of_it_is_in_the_one_before() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, MEBIBYTES, 4);
        let mut scene = MountScene::new(server, &NEVER);
        let (mut mounted, directory) = scene.mount(&[]);
        let file = directory.at("dump.rdb");
        let before = File::open(&file).unwrap();
        let mut begin = [0; 1000];
        before.read_exact_at(&mut begin, 0).unwrap();
        scene.primary.client().unwrap().ok(&["SET", "one", "more"]).unwrap();
        scene.source.restart(&scene.primary); // with all of its upload
        mounted.wait_for_event("snapshot_arrived", LONG).unwrap();

        let rest = (&before).read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(rest.raw_os_error(), Some(Errno::IO.raw_os_error()));
        let mut again = [0; 1000];
        before.read_exact_at(&mut again, 0).unwrap();
        assert!(begin == again, "what had arrived is still there");
        drop(before);
        let whole = fs::read(&file).unwrap();
        assert!(whole.len() > MEBIBYTES << 20);
        assert_sound(kind, &file);
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
        scene.assert_nothing_left();
    }
}

#[test]
fn stopped_while_it_arrives_it_leaves_nothing_behind_and_the_source_knows() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let server = primary(Kind::Valkey9).start().unwrap();
    fill(&server, MEBIBYTES, 5);
    let scene = MountScene::new(server, &NEVER);
    let (mut mounted, directory) = scene.mount(&["--name", "the backup"]);
    let mut waits = reader(&directory.at("dump.rdb"));
    scene.source.wait_for_status("its name", |status| status["replicas"][0]["name"] == "the backup");
    mounted.signal(Signal::INT).unwrap();
    assert_eq!(waits.wait().unwrap().code(), Some(1));
    says(&ends(&mut mounted, 0), &["SIGINT"]);
    scene
        .source
        .wait_for_status("the source to forget it", |status| status["replicas"].as_array().is_some_and(Vec::is_empty));
    assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0);
    scene.assert_nothing_left();
}

#[test]
fn a_folder_without_room_ends_it_with_a_sentence() {
    let Some(()) = require::root() else { return };
    let server = primary(Kind::Redis7).start().unwrap();
    let scene = MountScene::new(server, &[]);
    let (source, token) = (scene.source.address.to_string(), scene.source.token().display().to_string());
    let (missing, directory) = (scene.stage.path("missing"), scene.stage.path("spool"));
    let args = ["snapshot", "mount", "--source", &source, "--token-file", &token, "--retry-for", "0s"];
    says(&scene.stage.end(&[&args[..], &["--spool", &missing, &directory]].concat(), 8), &[&missing, "--spool"]);
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_that_is_replaced_by_that_of_another_data_set_gives_the_file_nothing() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, MEBIBYTES, 6);
        let scene = MountScene::new(server, &NEVER);
        let (mut mounted, directory) = scene.mount(&[]);
        let MountScene { stage, primary, source, spool } = scene;
        let other = foreign(kind);
        let source = replaced(&stage, source, &other, &[]);
        mounted.wait_for_line(ANOTHER, LONG).unwrap();
        assert_eq!(number(&other, "sync_full"), 0, "{kind}: the foreign primary has forked");
        let source = replaced(&stage, source, &primary, &[]); // with all of its upload
        mounted.wait_for_event("snapshot_arrived", LONG).unwrap();
        let file = directory.at("dump.rdb");
        assert!(fs::metadata(&file).unwrap().len() > (MEBIBYTES << 20) as u64);
        assert_sound(kind, &file);
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
        MountScene { stage, primary, source, spool }.assert_nothing_left();
    }
}

/// RDB files as a parser reads them that other people wrote (`dev/judge/reader`).
mod by_command {
    use std::collections::{BTreeMap, BTreeSet};
    use std::time::{SystemTime, UNIX_EPOCH};

    use remora_lab::Client;
    use remora_redis::rdb::{Converter, Format, Options};
    use remora_redis::resp::Frame;

    use super::*;

    /// Names the program.
    const READER: &str = "REMORA_RDB_READER";

    const FORMATS: [(&str, Format); 5] = [
        ("redis 6.2", Format::REDIS_6),
        ("redis 7.0", Format::REDIS_7_0),
        ("redis 7.2", Format::COMMON),
        ("redis 7.4", Format::REDIS_7_4),
        ("valkey 9.1", Format::VALKEY_9),
    ];

    /// Before the elements of a line: database, type, name, time of expiry.
    const HEAD_WORDS: usize = 4;

    /// Less than an element that has a node of its own.
    const LARGE_BYTES: usize = 4000;

    /// What `fetch` and `backup` write, and the former converted for every server, is what clients read.
    #[test]
    #[ignore = "needs Go; make judge-files runs it"]
    fn another_parser_finds_what_the_server_holds() {
        for kind in require::kinds() {
            let server = primary(kind).start().unwrap();
            let mut client = server.client().unwrap();
            client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
            fill_every_type(&mut client, 1).unwrap();
            let writer = steady_writer(&server);
            writer.wait_for(20_000);
            writer.stop().unwrap();
            remove_lists_with_large_elements(&mut client);
            let scene = Scene::new(server, &[]);
            let (to, shelf) = (scene.stage.path("dump.rdb"), scene.stage.path("shelf"));
            ends(&mut scene.fetch(&to, &[]), 0);
            ends(&mut scene.start("backup", &shelf, &[]), 0);
            let expected = of_server(&mut scene.primary.client().unwrap());
            assert!(expected.len() > 200, "{} keys", expected.len());
            same(&expected, Path::new(&to), &format!("{kind}, fetch"));
            for entry in fs::read_dir(&shelf).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "rdb") {
                    same(&expected, &path, &format!("{kind}, backup"));
                }
            }
            for (name, format) in FORMATS {
                let has_field_times = matches!(format, Format::REDIS_7_4 | Format::VALKEY_9);
                let path = scene.stage.path("converted.rdb");
                convert(&to, format, &path);
                // Fields that have expired stay where their times are left out, and the server does not show them.
                let lasting = || parsed(Path::new(&to), name).iter().map(|line| lasting(line)).collect();
                let expected = if has_field_times { expected.clone() } else { lasting() };
                same(&expected, Path::new(&path), &format!("{kind}, converted for {name}"));
            }
        }
    }

    /// The parser computes how much memory a value needs, and fails there for a list with a node of one large element,
    /// as Valkey makes them.
    fn remove_lists_with_large_elements(client: &mut Client) {
        for database in 0..16 {
            client.ok(&["SELECT", &database.to_string()]).unwrap();
            for key in client.list(&["KEYS", "*"]).unwrap() {
                let key = key.as_bytes().unwrap();
                let Ok(elements) = client.list(&[&b"LRANGE"[..], key, b"0", b"-1"]) else { continue };
                if elements.iter().any(|element| element.as_bytes().is_some_and(|bytes| bytes.len() > LARGE_BYTES)) {
                    client.int(&[&b"DEL"[..], key]).unwrap();
                }
            }
        }
    }

    fn convert(from: &str, format: Format, to: &str) {
        let options = Options { drop_field_expiry: true, skip_modules: false, skip_functions: true };
        let (mut converter, mut out) = (Converter::new(format, options), Vec::new());
        for piece in fs::read(from).unwrap().chunks(1000) {
            converter.convert(piece, &mut out).unwrap();
        }
        assert!(converter.is_over());
        fs::write(to, out).unwrap();
    }

    /// The same without the times at which fields of hashes expire.
    fn lasting(line: &str) -> String {
        let of_a_field = |word: &str| word.split_once('@').map_or(word.to_owned(), |(field, _)| format!("{field}@-1"));
        line.split(' ').map(of_a_field).collect::<Vec<_>>().join(" ")
    }

    /// The lines of the program.
    fn parsed(file: &Path, what: &str) -> BTreeSet<String> {
        let program = std::env::var(READER).unwrap_or_else(|_| panic!("{READER} names the program"));
        let read = Command::new(program).arg(file).output().unwrap();
        assert!(read.status.success(), "{what}: {}", String::from_utf8_lossy(&read.stderr));
        String::from_utf8(read.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    fn same(expected: &BTreeSet<String>, file: &Path, what: &str) {
        let found = parsed(file, what);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
        let left =
            |lines: &BTreeSet<String>| lines.iter().filter_map(|line| left(line, now)).collect::<BTreeSet<String>>();
        let (expected, found) = (left(expected), left(&found));
        let start = |line: &String| line.chars().take(400).collect::<String>();
        let missing: Vec<String> = expected.difference(&found).take(3).map(start).collect();
        let more: Vec<String> = found.difference(&expected).take(3).map(start).collect();
        assert!(missing.is_empty() && more.is_empty(), "{what}: not in the file {missing:#?}, only there {more:#?}");
        println!("{what}: {} keys", found.len());
    }

    /// What of a key has not expired by now.
    fn left(line: &str, now: i64) -> Option<String> {
        let is_left = |expires: &str| expires.parse().is_ok_and(|expires: i64| expires < 0 || expires > now);
        let words: Vec<&str> = line.split(' ').collect();
        let of_a_field = |word: &&str| word.split_once('@').is_none_or(|(_, expires)| is_left(expires));
        let words_left: Vec<&str> = words.iter().copied().filter(of_a_field).collect();
        // Where all fields of a hash have expired, the server still names the key.
        let has_elements = words[1] != "hash" || words_left.iter().skip(HEAD_WORDS).any(|word| !word.is_empty());
        (is_left(words[3]) && has_elements).then(|| words_left.join(" "))
    }

    /// The lines that the program would print.
    fn of_server(client: &mut Client) -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        for database in 0..16 {
            client.ok(&["SELECT", &database.to_string()]).unwrap();
            for key in client.list(&["KEYS", "*"]).unwrap() {
                let Frame::Bulk(key) = key else { panic!("{key:?}") };
                let mut ask = |command: &str, field: &[u8]| {
                    let words = command.split(' ').map(|word| match word {
                        "KEY" => &key[..],
                        "FIELD" => field,
                        word => word.as_bytes(),
                    });
                    client
                        .call(&words.collect::<Vec<_>>())
                        .unwrap_or_else(|refused| Frame::Error(refused.to_string().into()))
                };
                let kind = ask("TYPE KEY", b"").as_str().unwrap().to_owned();
                if kind == "none" {
                    continue; // it has expired meanwhile
                }
                let expires = ask("PEXPIRETIME KEY", b"").as_int().unwrap();
                let elements = elements(&kind, &mut ask);
                lines.insert(format!("{database} {kind} {} {expires} {}", hex(&key), elements.join(" ")));
            }
        }
        lines
    }

    fn elements(kind: &str, ask: &mut dyn FnMut(&str, &[u8]) -> Frame) -> Vec<String> {
        let mut found: Vec<String> = match kind {
            "string" => return vec![text(&ask("GET KEY", b""))],
            "list" => return list(ask("LRANGE KEY 0 -1", b"")).iter().map(text).collect(),
            "stream" => return stream(ask),
            "set" => list(ask("SMEMBERS KEY", b"")).iter().map(text).collect(),
            "zset" => list(ask("ZRANGE KEY 0 -1 WITHSCORES", b"")).chunks(2).map(scored).collect(),
            "hash" => {
                let all = list(ask("HGETALL KEY", b""));
                let mut time = |field: &[u8]| match ask("HPEXPIRETIME KEY FIELDS 1 FIELD", field) {
                    Frame::Array(times) => times[0].as_int().unwrap(),
                    _ => -1, // the server has no such command
                };
                let pair = |pair: &[Frame]| {
                    let expires = time(pair[0].as_bytes().unwrap());
                    format!("{}={}@{expires}", text(&pair[0]), text(&pair[1]))
                };
                all.chunks(2).map(pair).collect()
            }
            other => panic!("{other}"),
        };
        found.sort();
        found
    }

    fn scored(pair: &[Frame]) -> String {
        let score: f64 = pair[1].as_str().unwrap().parse().unwrap();
        format!("{}={:016x}", text(&pair[0]), score.to_bits())
    }

    fn stream(ask: &mut dyn FnMut(&str, &[u8]) -> Frame) -> Vec<String> {
        let entry = |entry: Frame| {
            let [id, fields] = &list(entry)[..] else { panic!("an entry has two parts") };
            // Of fields with one name the parser keeps the last.
            let fields = list(fields.clone());
            let fields = fields.chunks(2).map(|pair| (text(&pair[0]), text(&pair[1])));
            let fields: BTreeMap<String, String> = fields.collect();
            let fields: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
            format!("{}:{}", id.as_str().unwrap(), fields.join(","))
        };
        let mut found: Vec<String> = list(ask("XRANGE KEY - +", b"")).into_iter().map(entry).collect();
        let full = pairs(ask("XINFO STREAM KEY FULL COUNT 0", b""));
        found.push(format!("last:{}", full["last-generated-id"].as_str().unwrap()));
        let group = |group: Frame| {
            let group = pairs(group);
            let pending = list(group["pending"].clone()).into_iter().map(|entry| list(entry)[0].clone());
            let pending: Vec<String> = pending.map(|id| id.as_str().unwrap().to_owned()).collect();
            let last = group["last-delivered-id"].as_str().unwrap();
            format!("group:{}:{last}:{}", text(&group["name"]), pending.join(","))
        };
        let mut groups: Vec<String> = list(full["groups"].clone()).into_iter().map(group).collect();
        groups.sort();
        found.extend(groups);
        found
    }

    fn pairs(frame: Frame) -> BTreeMap<String, Frame> {
        list(frame).chunks(2).map(|pair| (pair[0].as_str().unwrap().to_owned(), pair[1].clone())).collect()
    }

    fn list(frame: Frame) -> Vec<Frame> {
        match frame {
            Frame::Array(frames) => frames,
            other => panic!("{other:?}"),
        }
    }

    fn text(frame: &Frame) -> String {
        match frame {
            Frame::Integer(number) => hex(number.to_string().as_bytes()),
            other => hex(other.as_bytes().unwrap()),
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
