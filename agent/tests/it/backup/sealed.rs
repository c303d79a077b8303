//! Encrypted backups, in a folder and in a bucket.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use age::secrecy::ExposeSecret;
use remora_lab::server::wait_until;
use remora_lab::workload::fill_every_type;
use remora_lab::{Agent, Kind, assert_same_data, require};
use rustix::process::Signal;

use super::bucket::{Store, of_base};
use super::{ALWAYS_NEW, assert_holds, json, load, next_second};
use crate::kit::{LONG, Scene, Stage, ends, fill, number, primary, quick, says, steady_writer, strs};

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
    let files = super::folder::files(Path::new(&url));
    assert!(files.len() >= 4, "the manifest, the snapshot, the commands and how far they reach: {files:?}");
    super::folder::each_change_is_refused(&place.scene.stage, &files, &args);
}
