//! `remora backup` and `remora restore`: whole files with manifests, the commands since, and moments between; in folders,
//! and encrypted.

pub(crate) mod bucket;

use std::fmt::Display;
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use age::secrecy::ExposeSecret;
use bucket::{Store, of_base};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{
    LONG, Scene, Stage, ends, fill, number, primary, quick, says, steady_writer, strs, write_past_the_backlog,
};
use remora_base::units::Moment;
use remora_lab::compare::{Contents, differences_of};
use remora_lab::server::wait_until;
use remora_lab::workload::fill_every_type;
use remora_lab::{Agent, Client, Kind, Random, Server, assert_same_data, require};
use remora_redis::resp::Frame;

/// A source that takes another snapshot each time, as often as asked.
const ALWAYS_NEW: [&str; 4] = ["--max-age", "1s", "--fork-interval", "0s"];

impl Scene {
    fn set(&self, number: u64, value: &str) {
        self.primary.client().unwrap().ok(&["SET", &format!("moment {number}"), value]).unwrap();
    }

    /// Waits until all that the primary has written is recorded.
    fn wait_until_recorded(&self) {
        let wanted = number(&self.primary, "master_repl_offset");
        self.source.wait_for_status("the commands to be recorded", |status| {
            let backups = status["replicas"].as_array().unwrap().iter().filter(|replica| replica["name"] == "backup");
            let offsets = backups.filter_map(|replica| replica["applied_offset"].as_u64());
            offsets.max().is_some_and(|offset| offset >= wanted)
        });
    }

    /// All that the primary holds, which writes nothing more by itself, once all of it is recorded.
    fn quiet_contents(&self) -> Contents {
        let client = &mut self.primary.client().unwrap();
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
        if self.primary.kind().expires_hash_fields() {
            keep_fields(client);
        }
        let contents = Contents::of(client).unwrap();
        self.wait_until_recorded();
        contents
    }

    fn restore(&self, from: &str, more: &[&str]) -> String {
        self.stage.end(&[&["restore", from], more].concat(), 0)
    }
}

/// Takes the expiry from all fields of hashes, so that all that live are compared later.
fn keep_fields(client: &mut Client) {
    let texts = |frames: Vec<Frame>| frames.into_iter().filter_map(|frame| frame.into_bytes().ok());
    for database in 0..16 {
        client.ok(&["SELECT", &database.to_string()]).unwrap();
        for key in texts(client.list(&["KEYS", "*hash*"]).unwrap()) {
            if client.call(&[&b"TYPE"[..], &key]).unwrap().as_str() != Some("hash") {
                continue;
            }
            let fields: Vec<Vec<u8>> = texts(client.list(&[&b"HKEYS"[..], &key]).unwrap()).collect();
            // All of them may be over, and the hash still there.
            if fields.is_empty() {
                continue;
            }
            let count = fields.len().to_string().into_bytes();
            let words = [b"HPERSIST".to_vec(), key, b"FIELDS".to_vec(), count];
            client.call(&[&words[..], &fields].concat()).unwrap();
        }
    }
}

/// A server on these data that deletes nothing by itself: it waits for a primary.
fn load(kind: Kind, folder: &str, aof: bool) -> Server {
    let server = quick(kind).config("dir", folder).config("replicaof", "127.0.0.1 1");
    server.config("appendonly", if aof { "yes" } else { "no" }).start().unwrap()
}

/// Fails unless a server that was restored holds this, key by key. A digest would not do: one of a hash whose fields have
/// all expired counts its key, which a server that loads it does not have.
fn assert_holds(restored: &Server, contents: &Contents, what: impl Display) {
    let found = Contents::of(&mut restored.client().unwrap()).unwrap();
    let differences = differences_of(contents, &found, 10);
    assert!(!contents.is_empty() && differences.is_empty(), "{what}: primary / restored: {differences:#?}");
}

fn json(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Waits until the clock shows a later second, and returns it.
fn next_second() -> u64 {
    let before = now();
    wait_until("the next second", LONG, || Ok(if now() > before { Ok(()) } else { Err(String::new()) })).unwrap();
    now()
}

/// Waits until the agent has said this so often.
fn wait_for_lines(agent: &mut Agent, part: &str, times: usize) {
    wait_until("the agent to say it again", LONG, || {
        let (output, ended) = (agent.output(), agent.ended()?);
        assert!(ended.is_none(), "it has ended: {output}");
        Ok(if output.matches(part).count() >= times { Ok(()) } else { Err(output) })
    })
    .unwrap();
}

// Backups in a folder.

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
    // A ping in the last second before the restart would be recorded.
    let server = primary(Kind::Redis7).config("repl-ping-replica-period", 3600).start().unwrap();
    fill(&server, 2, 7);
    let mut scene = Scene::new(server, &[]);
    let mut backup = scene.journal(&[]);
    scene.set(1, "recorded");
    scene.wait_until_recorded();
    // The gap has a second of its own.
    std::thread::sleep(Duration::from_secs(2));
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
    let newer = newer.unwrap();
    let gap = newer["gap"].clone();
    let before = Moment::seconds(newer["taken_seconds"].as_u64().unwrap() - 1).to_string();
    let said = scene.stage.end(&["restore", &scene.shelf(), "--until", &before], 3);
    says(&said, &["nothing is known of the moment", gap["after"].as_str().unwrap(), "for the data before that gap"]);
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
fn files(folder: &Path) -> Vec<PathBuf> {
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
fn each_change_is_refused(stage: &Stage, files: &[PathBuf], args: &[&str]) {
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
    let scene = Scene::new(primary(kind).start().unwrap(), &ALWAYS_NEW);
    let shelf = scene.stage.path("shelf");
    for round in 0..2 {
        scene.set(round, "there");
        ends(&mut scene.start("backup", &shelf, &[]), 0);
        next_second();
        next_second();
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

// Encrypted backups, in a folder and in a bucket.

/// Text that is in the data, and nowhere in what is stored.
const SECRET: &str = "a secret that is in the primary alone";

/// An identity in a file, and its recipient.
struct Keys {
    identity: String,
    recipient: String,
    key: age::x25519::Identity,
}

impl Keys {
    fn new(stage: &Stage, name: &str) -> Keys {
        let key = age::x25519::Identity::generate();
        let identity = stage.secret(name, key.to_string().expose_secret());
        Keys { identity, recipient: key.to_public().to_string(), key }
    }
}

/// Where the backups of a test go, and the scene and keys.
struct Place {
    scene: Scene,
    keys: Keys,
    store: Option<Store>,
    options: Vec<String>,
}

impl Place {
    fn new(scene: Scene, in_bucket: bool) -> Place {
        let store = in_bucket.then(Store::start);
        let options = store.as_ref().map_or_else(Vec::new, |store| store.options(&scene.stage));
        let keys = Keys::new(&scene.stage, "identity");
        Place { scene, keys, store, options }
    }

    fn url(&self) -> String {
        self.store.as_ref().map_or_else(|| self.scene.stage.path("backups"), Store::url)
    }

    fn backup(&self, more: &[&str]) -> Agent {
        let spool = self.scene.stage.path("spool");
        let options = ["--spool", &spool, "--encrypt-to", &self.keys.recipient];
        self.scene.start("backup", &self.url(), &[&strs(&self.options), &options[..], more].concat())
    }

    fn restore(&self, more: &[&str], code: i32) -> String {
        let (url, spool) = (self.url(), self.scene.stage.path("spool"));
        let options = [&["restore", &url, "--spool", &spool][..], &strs(&self.options), more].concat();
        self.scene.stage.end(&options, code)
    }

    /// The files of the objects, or of the folder.
    fn files(&self) -> Vec<PathBuf> {
        fn add(folder: &Path, files: &mut Vec<PathBuf>) {
            for path in fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()) {
                if path.is_dir() { add(&path, files) } else { files.push(path) }
            }
        }
        let mut files = Vec::new();
        match &self.store {
            Some(store) => add(&store.file(""), &mut files),
            None => add(Path::new(&self.url()), &mut files),
        }
        files.sort();
        files
    }

    fn file(&self, end: &str) -> PathBuf {
        self.files().into_iter().find(|file| file.to_str().unwrap().ends_with(end)).unwrap()
    }

    /// The secret is in no object.
    fn assert_sealed(&self) {
        for file in self.files() {
            let bytes = fs::read(&file).unwrap();
            let has_secret = bytes.windows(SECRET.len()).any(|part| part == SECRET.as_bytes());
            assert!(!has_secret, "{} has it in plain", file.display());
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_makes_its_snapshot_of_an_encrypted_backup_if_it_can_open_it() {
    for (kind, in_bucket) in require::kinds().into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let server = primary(kind).start().unwrap();
        fill(&server, 4, 1);
        let place = Place::new(Scene::new(server, &[]), in_bucket);
        let primary = &place.scene.primary;
        let mut backup = place.backup(&["--journal", "--segment-every", "1s"]);
        backup.wait_for_line("the commands since are recorded", LONG).unwrap();
        place.scene.set(1, "behind it");
        let before = number(primary, "total_forks");
        let (at, spool) = (place.url(), place.scene.stage.path("spool"));
        let options = ["--base", &at, "--base-spool", &spool, "--no-fork", "--repeat-messages", "1h"];
        let store = of_base(&place.options);
        let open = [&strs(&store), &options[..], &["--base-identity", &place.keys.identity]].concat();
        let source = place.scene.stage.source(&primary.url(), &open);
        let joiner = quick(kind).start().unwrap();
        source.replicate(&joiner, &[]);
        assert_same_data(primary, &joiner);
        source.stop();
        // Without the identity it is passed over, and the primary does not fork.
        let mut source = place.scene.stage.source(&primary.url(), &[&strs(&store), &options[..]].concat());
        let late = quick(kind).start().unwrap();
        let mut agent = source.replica(&late, &["--retry-for", "30s"]);
        source.agent.wait_for_line("no snapshot without a fork (--no-fork)", LONG).unwrap();
        says(&source.agent.output(), &["no snapshot comes from", "is encrypted"]);
        agent.signal(Signal::TERM).unwrap();
        agent.wait(LONG).unwrap();
        assert_eq!(number(primary, "total_forks"), before, "{kind}: {}", primary.log());
        backup.signal(Signal::TERM).unwrap();
        ends(&mut backup, 0);
    }
}

/// The backlog of the primary begins behind the snapshot of the backup: the recorded commands are between them, with
/// every byte of the stream.
#[test]
#[ignore = "long: make test-all"]
fn the_commands_of_a_backup_are_the_stream_that_the_primary_no_longer_has() {
    let places = [None, Some(false), Some(true)];
    for (kind, place_of) in require::kinds().into_iter().flat_map(|kind| places.map(|place| (kind, place))) {
        let server = quick(kind).config("repl-backlog-size", "16kb").start().unwrap();
        fill(&server, 1, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let place = Place::new(Scene::new(server, &[]), place_of == Some(true));
        let primary = &place.scene.primary;
        let recording = ["--journal", "--segment-every", "1s", "--file-size", "1MiB"];
        let mut backup = match place_of {
            Some(_) => place.backup(&recording),
            None => place.scene.start("backup", &place.url(), &["--journal", "--file-size", "1MiB"]),
        };
        backup.wait_for_line("the commands since are recorded", LONG).unwrap();
        primary.client().unwrap().call(&["PUBLISH", "news", &"x".repeat(5_000)]).unwrap();
        write_past_the_backlog(primary);
        place.scene.wait_until_recorded();
        backup.signal(Signal::TERM).unwrap();
        ends(&mut backup, 0);
        place.scene.set(1, "behind the commands");
        let before = [number(primary, "total_forks"), number(primary, "sync_full")];
        let (at, spool) = (place.url(), place.scene.stage.path("base-spool"));
        fs::create_dir_all(&spool).unwrap();
        let store = of_base(&place.options);
        let options = ["--base", &at, "--base-spool", &spool, "--base-identity", &place.keys.identity];
        let options = [&strs(&store), &options[..], &["--no-fork", "--repeat-messages", "1h"]].concat();
        let source = place.scene.stage.source(&primary.url(), &options);
        let told = source.wait_for_status("a backup", |status| status["base"]["kind"] == "backup")["base"].clone();
        assert!(told["stream_bytes"].as_u64() > Some(1 << 20), "{kind}: {told}");
        let joiners = [0, 1].map(|_| quick(kind).start().unwrap());
        for joiner in &joiners {
            source.replicate(joiner, &[]);
            assert_same_data(primary, joiner);
        }
        says(&source.agent.output(), &["the stream behind it from there and the server"]);
        let after = [number(primary, "total_forks"), number(primary, "sync_full")];
        assert_eq!(after, before, "{kind}, {place_of:?}: {}", primary.log());
        assert_eq!(fs::read_dir(&spool).unwrap().count(), 0, "nothing is left there");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_snapshot_is_opened_by_its_identity_only() {
    for in_bucket in [false, true] {
        let server = primary(Kind::Valkey9).start().unwrap();
        // Several parts in the bucket.
        fill(&server, 18, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        server.client().unwrap().ok(&["SET", "secret", SECRET]).unwrap();
        let place = Place::new(Scene::new(server, &ALWAYS_NEW), in_bucket);
        for _ in 0..2 {
            says(&ends(&mut place.backup(&["--keep", "1"]), 0), &["keys in", &place.url()]);
            next_second();
            next_second();
        }
        let ours = |file: &&PathBuf| !file.file_name().unwrap().to_str().unwrap().starts_with('.');
        assert_eq!(place.files().iter().filter(ours).count(), 2, "{:?}", place.files());
        place.assert_sealed();
        let object = place.file(".rdb.age");
        let manifest = json(&place.file(".json"));
        assert_eq!(manifest["stored"]["bytes"].as_u64(), Some(fs::metadata(&object).unwrap().len()));
        let data = place.scene.stage.path("data");
        says(&place.restore(&["--to", &data], 3), &["is encrypted (age)", "--identity"]);
        let other = Keys::new(&place.scene.stage, "other");
        says(
            &place.restore(&["--to", &data, "--identity", &other.identity], 3),
            &["other recipients", &other.identity],
        );
        let said = place.restore(&["--to", &data, "--identity", &place.keys.identity], 0);
        says(&said, &["dump.rdb", &place.url()]);
        assert_eq!(load(Kind::Valkey9, &data, false).digest().unwrap(), place.scene.primary.digest().unwrap());
        // The object is an age file of which other programs make the same bytes.
        let file = fs::File::open(&object).unwrap();
        let keys = std::iter::once(&place.keys.key as &dyn age::Identity);
        let mut plain = Vec::new();
        age::Decryptor::new(file).unwrap().decrypt(keys).unwrap().read_to_end(&mut plain).unwrap();
        assert_eq!(plain, fs::read(format!("{data}/dump.rdb")).unwrap());
        // Damage is found, and named.
        let mut bytes = fs::read(&object).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&object, bytes).unwrap();
        let name = object.file_name().unwrap().to_str().unwrap();
        says(&place.restore(&["--identity", &place.keys.identity], 3), &[name, "is damaged"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_commands_since_are_sealed_and_go_on_without_the_identity() {
    for in_bucket in [false, true] {
        for kind in require::kinds() {
            let server = primary(kind).start().unwrap();
            fill(&server, 2, 2);
            let place = Place::new(Scene::new(server, &[]), in_bucket);
            let writer = steady_writer(&place.scene.primary);
            let options = ["--journal", "--segment-every", "1s", "--file-size", "256KiB"];
            let mut backup = place.backup(&options);
            backup.wait_for_line("the commands since are recorded", LONG).unwrap();
            writer.wait_for(5_000);
            backup.kill().unwrap();
            writer.wait_for(6_000);
            backup = place.backup(&options);
            backup.wait_for_line("goes on at", LONG).unwrap();
            backup.wait_for_line("the journal is recorded", LONG).unwrap();
            writer.wait_for(10_000);
            writer.stop().unwrap();
            place.scene.primary.client().unwrap().ok(&["SET", "secret", SECRET]).unwrap();
            let contents = place.scene.quiet_contents();
            let wanted = number(&place.scene.primary, "master_repl_offset");
            wait_until("the commands to be stored", LONG, || {
                let reached = json(&place.file("/commands.json"));
                Ok(if reached["offset"].as_u64() >= Some(wanted) { Ok(()) } else { Err(reached.to_string()) })
            })
            .unwrap();
            backup.signal(Signal::TERM).unwrap();
            says(&ends(&mut backup, 0), &["ends at"]);
            place.assert_sealed();
            assert!(place.files().iter().filter(|file| file.to_str().unwrap().ends_with(".aof.age")).count() > 2);
            assert_eq!(number(&place.scene.primary, "sync_full"), 1);
            let data = place.scene.stage.path("data");
            says(&place.restore(&[], 3), &["is encrypted (age)", "--identity"]);
            place.restore(&["--to", &data, "--identity", &place.keys.identity], 0);
            assert_holds(&load(kind, &data, true), &contents, format_args!("{kind}, bucket: {in_bucket}"));
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_changed_byte_of_any_encrypted_object_is_refused_and_the_object_named() {
    let server = primary(Kind::Valkey9).config("rdbchecksum", "no").start().unwrap();
    fill_every_type(&mut server.client().unwrap(), 1).unwrap();
    let place = Place::new(Scene::new(server, &[]), false);
    let mut backup = place.backup(&["--journal"]);
    backup.wait_for_line("the commands since are recorded", LONG).unwrap();
    place.scene.set(1, "the last one");
    place.scene.wait_until_recorded();
    backup.signal(Signal::TERM).unwrap();
    ends(&mut backup, 0);
    let (url, spool) = (place.url(), place.scene.stage.path("spool"));
    let args = ["restore", &url, "--spool", &spool, "--identity", &place.keys.identity];
    let files = files(Path::new(&url));
    assert!(files.len() >= 4, "the manifest, the snapshot, the commands and how far they reach: {files:?}");
    each_change_is_refused(&place.scene.stage, &files, &args);
}
