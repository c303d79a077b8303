//! Backups in a folder.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use remora_lab::server::wait_until;
use remora_lab::workload::fill_every_type;
use remora_lab::{Agent, Kind, Random, require};
use rustix::process::Signal;
use serde_json::Value;

use super::{ALWAYS_NEW, assert_holds, json, load, next_second, now, wait_for_lines};
use crate::kit::{LONG, Scene, Stage, ends, fill, number, primary, quick, says, steady_writer, strs};

/// What the folder of the backups is called.
const SHELF: &str = "backups";

impl Scene {
    fn backup(&self, more: &[&str]) -> Agent {
        self.start("backup", &self.shelf(), more)
    }

    /// Starts a backup with the commands since, and waits until it has its name.
    fn journal(&self, more: &[&str]) -> Agent {
        let mut agent = self.backup(&[&["--journal"], more].concat());
        agent.wait_for_line("the commands since are recorded", LONG).unwrap();
        agent
    }

    fn shelf(&self) -> String {
        self.stage.path(SHELF)
    }

    /// The names in the folder of the backups, in order.
    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.shelf()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn backups(&self, end: &str) -> Vec<String> {
        self.names().into_iter().filter(|name| name.ends_with(end) && !name.starts_with('.')).collect()
    }

    /// The folders with commands.
    fn sets(&self) -> Vec<PathBuf> {
        let path = |name: String| Path::new(&self.shelf()).join(name);
        self.names().into_iter().map(path).filter(|path| path.join("backup.json").is_file()).collect()
    }
}

/// The checker of append-only files that a server's program has under another name.
fn check_aof(kind: Kind, args: &[&str]) -> String {
    let name = if kind == Kind::Redis7 { "redis-check-aof" } else { "valkey-check-aof" };
    let mut command = Command::new(kind.binary().unwrap());
    let output = command.arg0(name).args(args).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{name} {args:?}: {said}");
    said
}

#[test]
#[ignore = "long: make test-all"]
fn a_backup_is_whole_says_what_it_is_and_replaces_the_oldest() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 4, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let scene = Scene::new(server, &ALWAYS_NEW);
        for round in 0..3 {
            scene.set(round, "there");
            says(&ends(&mut scene.backup(&["--keep", "2"]), 0), &["keys in", "taken"]);
            if round == 0 {
                fs::write(format!("{}/20000101T000000Z-foreign.rdb", scene.shelf()), "not ours").unwrap();
            }
            // The source's snapshot is too old then.
            next_second();
            next_second();
        }
        let (files, manifests) = (scene.backups(".rdb"), scene.backups(".json"));
        assert_eq!((files.len(), manifests.len()), (3, 2), "{:?}", scene.names());
        assert_eq!(files[0], "20000101T000000Z-foreign.rdb");
        let newest = Path::new(&scene.shelf()).join(&files[2]);
        let manifest = json(&newest.with_extension("json"));
        assert_eq!(manifest["replid"].as_str().unwrap(), scene.primary.fact("master_replid").unwrap());
        assert_eq!(manifest["bytes"].as_u64(), Some(fs::metadata(&newest).unwrap().len()));
        assert_eq!(manifest["name"].as_str(), Some(&*files[2]));
        let client = &mut scene.primary.client().unwrap();
        assert_eq!(manifest["keys"]["0"].as_i64(), Some(client.int(&["DBSIZE"]).unwrap()));
        // The second one from the folder is laid out for a server.
        let data = scene.stage.path("data");
        let said = scene.restore(&scene.shelf(), &["--to", &data]);
        says(&said, &[&files[2], manifest["replid"].as_str().unwrap(), "dump.rdb", "appendonly no"]);
        assert_eq!(load(kind, &data, false).digest().unwrap(), scene.primary.digest().unwrap());
        says(&scene.stage.end(&["restore", &scene.shelf(), "--to", &data], 3), &["--replace"]);
        scene.restore(&scene.shelf(), &["--to", &data, "--replace"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_backup_that_is_killed_leaves_the_earlier_ones_and_goes_on() {
    let server = primary(Kind::Valkey9).start().unwrap();
    fill(&server, 16, 2);
    let scene = Scene::new(server, &["--no-shm", "--upload-limit", "4MiB"]);
    let mut backup = scene.backup(&[]);
    scene.source.wait_for_slots(&mut backup, 40);
    says(&ends(&mut scene.backup(&[]), 3), &["another remora backup"]);
    backup.kill().unwrap();
    assert!(scene.names().iter().all(|name| name.starts_with('.')), "{:?}", scene.names());
    ends(&mut scene.backup(&[]), 0);
    let (first, before) = (scene.names(), scene.source.bytes_served());
    assert!(before < 24 << 20, "{before} bytes: it began anew");
    assert_eq!((first.len(), scene.backups(".rdb").len()), (2, 1), "{first:?}");
    // The source has the same snapshot still.
    says(&ends(&mut scene.backup(&["--keep", "1"]), 0), &["it was there already"]);
    assert_eq!(scene.names(), first);
    assert_eq!(number(&scene.primary, "sync_full"), 1);

    let args = scene.args("backup", "-", &["--spool", &scene.stage.folder().display().to_string()]);
    let output = scene.stage.remora(&strs(&args)).output().unwrap();
    let file = Path::new(&scene.shelf()).join(&scene.backups(".rdb")[0]);
    assert!(output.status.success() && output.stdout == fs::read(file).unwrap());
    let args = scene.args("backup", "-", &["--journal"]);
    says(&scene.stage.end(&strs(&args), 3), &["--to -"]);
}

#[test]
#[ignore = "long: make test-all"]
fn all_that_was_written_until_the_primary_and_the_agent_were_killed_is_there() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 8, 3);
        fill_every_type(&mut server.client().unwrap(), 3).unwrap();
        let mut scene = Scene::new(server, &[]);
        let writer = steady_writer(&scene.primary);
        let mut backup = scene.journal(&["--file-size", "256KiB"]);
        writer.wait_for(20_000);
        writer.stop().unwrap();
        // A transaction over databases.
        let client = &mut scene.primary.client().unwrap();
        for words in [&["SELECT", "2"][..], &["SET", "two", "2"], &["SELECT", "3"], &["SET", "three", "3"]] {
            client.ok(words).unwrap();
        }
        let contents = scene.quiet_contents();
        backup.kill().unwrap();
        scene.primary.kill().unwrap();
        assert_eq!(scene.sets().len(), 1);
        let (set, data) = (scene.sets()[0].clone(), scene.stage.path("data"));
        let said = scene.restore(&scene.shelf(), &["--to", &data]);
        says(&said, &[set.to_str().unwrap(), "transactions", "appendonly yes"]);
        let files = fs::read_dir(set.join("appendonlydir")).unwrap().count();
        assert!(files > 5, "{files} files");
        if kind == Kind::Redis7 {
            // The checker of Valkey 9.1 does not know the snapshots of Valkey 9.1.
            let list = format!("{data}/appendonlydir/appendonly.aof.manifest");
            says(&check_aof(kind, &[&list]), &["All AOF files and manifest are valid"]);
        }
        assert_holds(&load(kind, &data, true), &contents, kind);
        // The folder itself is what a server loads too.
        assert_holds(&load(kind, set.to_str().unwrap(), true), &contents, kind);
    }
}

#[test]
fn a_moment_is_found_by_restore_and_by_the_servers_own_checker() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 1, 4);
        let scene = Scene::new(server, &[]);
        let mut backup = scene.journal(&[]);
        scene.set(1, "before");
        scene.wait_until_recorded();
        let moment = now();
        next_second();
        scene.set(2, "after");
        scene.wait_until_recorded();
        backup.kill().unwrap();
        let has = |data: &str, number: u64| {
            let server = load(kind, data, true);
            server.client().unwrap().bytes(&["GET", &format!("moment {number}")]).unwrap().is_some()
        };
        let (all, cut, checked) = (scene.stage.path("all"), scene.stage.path("cut"), scene.stage.path("checked"));
        let until = moment.to_string();
        scene.restore(&scene.shelf(), &["--to", &all]);
        says(&scene.restore(&scene.shelf(), &["--to", &cut, "--until", &until]), &["left out", "--until"]);
        scene.restore(&scene.shelf(), &["--to", &checked]);
        // The checker of Valkey 9.1 does not know the snapshots of Valkey 9.1: it gets the file of commands.
        let name = if kind == Kind::Redis7 { "appendonly.aof.manifest" } else { "appendonly.aof.1.incr.aof" };
        check_aof(kind, &["--truncate-to-timestamp", &until, &format!("{checked}/appendonlydir/{name}")]);
        for (data, is_whole) in [(&all, true), (&cut, false), (&checked, false)] {
            assert!(has(data, 1), "{kind} {data}");
            assert_eq!(has(data, 2), is_whole, "{kind} {data}");
        }
        says(&scene.stage.end(&["restore", &scene.shelf(), "--until", "2020-01-01T00:00:00Z"], 3), &["later moment"]);
        let set = scene.sets()[0].display().to_string();
        says(&scene.stage.end(&["restore", &set, "--until", "2020-01-01T00:00:00Z"], 3), &["which is after --until"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_backup_that_was_killed_goes_on_where_it_was() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 2, 5);
        let scene = Scene::new(server, &[]);
        let writer = steady_writer(&scene.primary);
        let mut backup = scene.journal(&["--file-size", "256KiB"]);
        for round in 1..=3 {
            writer.wait_for(round * 5_000);
            backup.kill().unwrap();
            writer.wait_for(round * 5_000 + 1_000);
            backup = scene.backup(&["--journal", "--file-size", "256KiB"]);
            backup.wait_for_line("goes on at", LONG).unwrap();
            backup.wait_for_line("the journal is recorded", LONG).unwrap();
        }
        writer.wait_for(18_000);
        writer.stop().unwrap();
        let contents = scene.quiet_contents();
        backup.signal(Signal::TERM).unwrap();
        says(&ends(&mut backup, 0), &["ends at"]);
        assert_eq!((scene.sets().len(), number(&scene.primary, "sync_full")), (1, 1));
        let data = scene.stage.path("data");
        let said = scene.restore(&scene.shelf(), &["--to", &data]);
        assert!(!said.contains("left out"), "ended in order: {said}");
        assert_holds(&load(kind, &data, true), &contents, kind);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_new_beginning_leaves_no_gap_and_the_oldest_go_as_a_whole() {
    let server = primary(Kind::Valkey9).start().unwrap();
    fill(&server, 2, 6);
    let scene = Scene::new(server, &ALWAYS_NEW);
    let writer = steady_writer(&scene.primary);
    let mut backup = scene.journal(&["--base-every", "1s", "--keep", "2", "--file-size", "256KiB"]);
    wait_for_lines(&mut backup, "ends at", 3);
    writer.stop().unwrap();
    let contents = scene.quiet_contents();
    // Until no folder begins or ends any more.
    backup.signal(Signal::TERM).unwrap();
    ends(&mut backup, 0);
    let sets = scene.sets();
    assert_eq!(sets.len(), 2, "{:?}", scene.names());
    for set in &sets {
        assert_eq!(json(&set.join("backup.json")).get("gap"), None);
    }
    let first = scene.stage.end(&["restore", &sets[0].display().to_string(), "--json"], 0);
    let first: Value = serde_json::from_str(&first[first.find('{').unwrap()..]).unwrap();
    let second = json(&sets[1].join("backup.json"));
    assert!(first["offset"].as_u64() >= second["offset"].as_u64(), "{first} {second}");
    let data = scene.stage.path("data");
    scene.restore(&scene.shelf(), &["--to", &data]);
    assert_holds(&load(Kind::Valkey9, &data, true), &contents, Kind::Valkey9);
}

#[test]
fn a_source_that_has_lost_what_comes_next_makes_a_gap_that_is_said() {
    let server = primary(Kind::Redis7).start().unwrap();
    fill(&server, 2, 7);
    let mut scene = Scene::new(server, &[]);
    let mut backup = scene.journal(&[]);
    scene.set(1, "recorded");
    scene.wait_until_recorded();
    scene.source.restart(&scene.primary);
    scene.set(2, "in the gap");
    backup.wait_for_line("no moment between", LONG).unwrap();
    wait_for_lines(&mut backup, "the commands since are recorded", 2);
    scene.set(3, "recorded again");
    let contents = scene.quiet_contents();
    backup.kill().unwrap();
    let sets = scene.sets();
    assert_eq!(sets.len(), 2);
    let newer = sets.iter().map(|set| json(&set.join("backup.json"))).find(|manifest| manifest.get("gap").is_some());
    let gap = newer.unwrap()["gap"].clone();
    assert!(sets.iter().any(|set| set.ends_with(gap["after"].as_str().unwrap())), "{gap}");
    let data = scene.stage.path("data");
    scene.restore(&scene.shelf(), &["--to", &data]);
    assert_holds(&load(Kind::Redis7, &data, true), &contents, Kind::Redis7);
}

#[test]
fn what_is_damaged_or_foreign_is_refused_with_its_place() {
    let server = primary(Kind::Redis7).start().unwrap();
    fill(&server, 1, 8);
    let scene = Scene::new(server, &[]);
    let mut backup = scene.journal(&[]);
    scene.set(1, "recorded");
    scene.wait_until_recorded();
    backup.signal(Signal::TERM).unwrap();
    ends(&mut backup, 0);
    let folder = scene.sets()[0].join("appendonlydir");
    let set = folder.display().to_string();
    let refused = |words: &[&str]| says(&scene.stage.end(&["restore", &set], 3), words);
    let changed = |name: &str, change: &dyn Fn(&mut Vec<u8>), words: &[&str]| {
        let path = folder.join(name);
        let before = fs::read(&path).unwrap();
        let mut after = before.clone();
        change(&mut after);
        fs::write(&path, after).unwrap();
        refused(words);
        fs::write(&path, before).unwrap();
    };
    let (base, commands, list) = ("appendonly.aof.1.base.rdb", "appendonly.aof.1.incr.aof", "appendonly.aof.manifest");
    changed(base, &|bytes| bytes[500_000] ^= 1, &[base, "checksum"]);
    changed(base, &|bytes| bytes.truncate(500_000), &[base, "no end"]);
    changed(commands, &|bytes| bytes[0] = b'+', &[commands, "byte 0"]);
    changed(
        list,
        &|bytes| *bytes = b"file ../../secret seq 1 type i\n".to_vec(),
        &[list, "appendonly.aof.manifest", "is damaged"],
    );
    changed(list, &|bytes| bytes.extend(b"file missing seq 9 type i\n"), &[list, "is damaged"]);
    scene.restore(&set, &[]);
    let empty = scene.stage.path("empty");
    fs::create_dir(&empty).unwrap();
    says(&scene.stage.end(&["restore", &empty], 3), &["there is no backup"]);
    says(&scene.stage.end(&["restore", &scene.source.token().display().to_string()], 3), &["no RDB file"]);
    // A torn end is no damage.
    let path = folder.join(commands);
    let mut torn = fs::read(&path).unwrap();
    torn.extend(b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSE");
    fs::write(&path, torn).unwrap();
    says(&scene.restore(&set, &[]), &["left out", "the last 25 bytes"]);
}

/// A server writes its own data over a file that is laid into its folder, and loads nothing that has another name than
/// its settings say.
#[test]
fn a_running_servers_folder_is_refused_and_the_settings_that_load_a_backup_are_named() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let [own, other] = ["own", "other"].map(|name| stage.path(name));
        fs::create_dir(&own).unwrap();
        let names = [("appendonly", "yes"), ("appenddirname", "journal"), ("appendfilename", "orders.aof")];
        let builder =
            names.iter().fold(quick(kind).config("dir", &own), |builder, (name, value)| builder.config(name, value));
        let server = builder.start().unwrap();
        let client = &mut server.client().unwrap();
        client.ok(&["SET", "kept", "value"]).unwrap();
        let digest = server.digest().unwrap();

        let said = stage.end(&["restore", &own, "--to", &other], 0);
        says(&said, &["appendonly yes", "appenddirname appendonlydir", "appendfilename orders.aof"]);
        for more in [&[][..], &["--replace"]] {
            says(&stage.end(&[&["restore", &other, "--to", &own], more].concat(), 3), &["runs in", &own, "stop it"]);
        }
        drop(server);
        says(&stage.end(&["restore", &other, "--to", &own], 3), &["journal", "whose appenddirname is not"]);
        let loaded = quick(kind).config("dir", &other).config("appendonly", "yes");
        let loaded = loaded.config("appendfilename", "orders.aof").start().unwrap();
        assert_eq!(loaded.digest().unwrap(), digest, "{kind}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn keys_whose_time_has_ended_since_the_snapshot_are_counted() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let own = stage.path("own");
        fs::create_dir(&own).unwrap();
        let server = quick(kind).config("dir", &own).start().unwrap();
        let client = &mut server.client().unwrap();
        for number in 0..5 {
            client.ok(&["SET", &format!("short {number}"), "value", "PX", "3000"]).unwrap();
            client.ok(&["SET", &format!("long {number}"), "value", "EX", "10000"]).unwrap();
        }
        client.ok(&["SAVE"]).unwrap();
        let file = format!("{own}/dump.rdb");
        wait_until("five keys that have expired", LONG, || {
            let said = stage.end(&["restore", &file], 0);
            Ok(if said.contains("expired    5 keys of the snapshot") { Ok(()) } else { Err(said) })
        })
        .unwrap();
    }
}

// Each byte that a backup has on the disk is covered by a checksum, and `remora restore` compares them all.

/// Bytes of each file that are changed, besides the first and the last ones.
const SOMEWHERE: usize = 6;

/// All files below a folder, but for hidden ones, which hold no backup.
pub(super) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        match path.file_name().unwrap().to_str().unwrap() {
            hidden if hidden.starts_with('.') => {}
            _ if path.is_dir() => all.extend(files(&path)),
            _ => all.push(path),
        }
    }
    all.sort();
    all
}

/// Changes bytes of each file, one at a time: the command must refuse each change, and name the file.
pub(super) fn each_change_is_refused(stage: &Stage, files: &[PathBuf], args: &[&str]) {
    stage.end(args, 0);
    let mut random = Random::new(files.len() as u64);
    for file in files {
        let whole = fs::read(file).unwrap();
        let somewhere = (0..SOMEWHERE).map(|_| random.below(whole.len() as u64) as usize);
        let ends = [0, 5, whole.len().saturating_sub(20), whole.len() - 1];
        for at in somewhere.chain(ends).filter(|at| *at < whole.len()).collect::<Vec<_>>() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(file, &changed).unwrap();
            let mut agent = stage.start(None, args);
            let status = agent.wait(crate::kit::LONG).unwrap();
            let said = agent.output();
            assert_eq!(status.code(), Some(3), "byte {at} of {}:\n{said}", file.display());
            says(&said, &[file.file_name().unwrap().to_str().unwrap()]);
        }
        fs::write(file, &whole).unwrap();
    }
    stage.end(args, 0);
}

#[test]
#[ignore = "long: make test-all"]
fn a_changed_byte_of_any_file_of_a_backup_is_refused_and_the_file_named() {
    for kind in require::kinds() {
        // Without a checksum of the server's, only ours can tell.
        let server = primary(kind).config("rdbchecksum", "no").config("rdbcompression", "no").start().unwrap();
        fill(&server, 1, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let scene = Scene::new(server, &[]);
        let (snapshots, sets) = (scene.stage.path("snapshots"), scene.stage.path("sets"));
        ends(&mut scene.start("backup", &snapshots, &[]), 0);
        let options = ["--journal", "--file-size", "64KiB"];
        let mut backup = scene.start("backup", &sets, &options);
        backup.wait_for_line("the commands since are recorded", crate::kit::LONG).unwrap();
        fill(&scene.primary, 1, 2);
        scene.set(1, "the last one");
        scene.wait_until_recorded();
        backup.signal(Signal::TERM).unwrap();
        ends(&mut backup, 0);
        for (folder, least) in [(&snapshots, 2), (&sets, 5)] {
            let files = files(Path::new(folder));
            assert!(files.len() >= least, "{files:?}");
            // Of the many files of commands, the first and the last ones.
            let few: Vec<_> = files.iter().take(3).chain(files.iter().rev().take(4).rev()).cloned().collect();
            each_change_is_refused(&scene.stage, &few, &["restore", folder]);
        }
        // A source that begins with the file reads it in the same way.
        let rdb =
            files(Path::new(&snapshots)).into_iter().find(|file| file.extension().is_some_and(|end| end == "rdb"));
        let (rdb, url) = (rdb.unwrap(), scene.primary.url());
        let mut bytes = fs::read(&rdb).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&rdb, bytes).unwrap();
        let (token, path) = (scene.stage.token.display().to_string(), rdb.display().to_string());
        let args =
            ["source", "--server", &url, "--listen", "127.0.0.1:0", "--token-file", &token, "--from-file", &path];
        says(&scene.stage.end(&args, 3), &[&path, "is damaged"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_damaged_manifest_is_in_no_new_backups_way_and_never_taken_for_none() {
    let Some(kind) = require::redis() else { return };
    let scene = Scene::new(primary(kind).start().unwrap(), &super::ALWAYS_NEW);
    let shelf = scene.stage.path("shelf");
    for round in 0..2 {
        scene.set(round, "there");
        ends(&mut scene.start("backup", &shelf, &[]), 0);
        super::next_second();
        super::next_second();
    }
    let manifest = files(Path::new(&shelf)).into_iter().rfind(|file| file.extension().is_some_and(|end| end == "json"));
    let manifest = manifest.unwrap();
    fs::write(&manifest, "").unwrap();
    // The older backup is not taken for the newest one.
    says(&scene.stage.end(&["restore", &shelf], 3), &[manifest.to_str().unwrap(), "is damaged"]);
    scene.set(2, "there");
    let said = ends(&mut scene.start("backup", &shelf, &["--keep", "1"]), 0);
    says(&said, &["WARN", manifest.to_str().unwrap()]);
    assert!(manifest.exists());
    fs::remove_file(&manifest).unwrap();
    fs::remove_file(manifest.with_extension("rdb")).unwrap();
    scene.stage.end(&["restore", &shelf], 0);
}
