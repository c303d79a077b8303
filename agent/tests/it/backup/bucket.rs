//! Backups in a bucket of an S3-compatible store, and sources that make a snapshot of what is stored (`--base`).

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::process::Signal;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;

use super::{ALWAYS_NEW, assert_holds, json, load, next_second, now, wait_for_lines};
use crate::kit::{
    LONG, Scene, Source, Stage, at_once, ends, fill, number, primary, quick, says, steady_writer, strs, syncs,
    write_past_the_backlog,
};
use remora_lab::compare::Contents;
use remora_lab::server::Tls;
use remora_lab::server::wait_until;
use remora_lab::workload::{Options, Workload, fill_every_type};
use remora_lab::{Agent, Kind, Server, assert_same_data, require, scratch};

/// A scene and a store, and the options that the commands have in common.
struct Place {
    scene: Scene,
    store: Store,
    options: Vec<String>,
}

impl Place {
    fn new(scene: Scene) -> Place {
        let store = Store::start();
        let options = store.options(&scene.stage);
        fs::create_dir(scene.stage.path("spool")).unwrap();
        Place { scene, store, options }
    }

    fn backup(&self, more: &[&str]) -> Agent {
        let spool = self.scene.stage.path("spool");
        let options = [&strs(&self.options), &["--spool", &spool][..], more].concat();
        self.scene.start("backup", &self.store.url(), &options)
    }

    /// Starts a backup with the commands since, and waits until it has its name.
    fn journal(&self, more: &[&str]) -> Agent {
        let mut agent = self.backup(&[&["--journal", "--segment-every", "1s"], more].concat());
        agent.wait_for_line("the commands since are recorded", LONG).unwrap();
        agent
    }

    /// Runs `remora restore`, which must end with this code.
    fn restore_of(&self, from: &str, more: &[&str], code: i32) -> String {
        let spool = self.scene.stage.path("spool");
        let options = [&["restore", from, "--spool", &spool][..], &strs(&self.options), more].concat();
        self.scene.stage.end(&options, code)
    }

    fn restore(&self, more: &[&str]) -> String {
        self.restore_of(&self.store.url(), more, 0)
    }

    /// Another value of one of the options that the commands have in common.
    fn option(&mut self, name: &str, value: &str) {
        let at = self.options.iter().position(|option| option == name).unwrap();
        self.options[at + 1] = value.to_owned();
    }

    /// What `commands.json` of the newest backup says.
    fn reached(&self) -> Value {
        let key = self.store.backups("/commands.json").pop().unwrap();
        json(&self.store.file(&key))
    }

    /// Waits until all that the primary has written is in the bucket.
    fn wait_until_stored(&self) {
        // What has no effect begins no segment, so a command that has one is the last.
        self.scene.set(0, "the last");
        let wanted = number(&self.scene.primary, "master_repl_offset");
        wait_until("the commands to be stored", LONG, || {
            let reached = self.reached();
            Ok(if reached["offset"].as_u64() >= Some(wanted) { Ok(()) } else { Err(reached.to_string()) })
        })
        .unwrap();
    }

    /// All that the primary holds, which writes nothing more by itself, once all of it is in the bucket.
    fn quiet_contents(&self) -> Contents {
        // What is set again when all is stored is there already.
        self.scene.set(0, "the last");
        let contents = self.scene.quiet_contents();
        self.wait_until_stored();
        contents
    }

    /// Nothing of a killed or ended command is left on this host.
    fn assert_no_data_in_spool(&self) {
        let spool = self.scene.stage.path("spool");
        for folder in fs::read_dir(&spool).unwrap().map(|entry| entry.unwrap().path()) {
            let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert!(left.is_empty(), "{left:?} in {}", folder.display());
        }
    }
}

/// The options of a store, as those of a source's base.
pub(super) fn of_base(options: &[String]) -> Vec<String> {
    options.iter().map(|option| option.replace("--s3", "--base-s3")).collect()
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_makes_its_snapshot_of_the_newest_backup_and_nothing_forks() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 4, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let place = Place::new(Scene::new(server, &ALWAYS_NEW));
        let primary = &place.scene.primary;
        ends(&mut place.backup(&[]), 0);
        place.scene.set(1, "behind the first one");
        next_second();
        next_second();
        // The second one is in a folder.
        let (folder, spool) = (place.scene.stage.path("backups"), place.scene.stage.path("spool"));
        ends(&mut place.scene.start("backup", &folder, &[]), 0);
        place.scene.set(2, "behind both");
        for at in [place.store.url(), folder] {
            let options = ["--base", &at, "--base-spool", &spool, "--no-fork", "--repeat-messages", "1h"];
            let before = number(primary, "total_forks");
            let store = of_base(&place.options);
            let more = [&strs(&store), &options[..]].concat();
            let source = place.scene.stage.source(&primary.url(), &more);
            let told = source.wait_for_status("a backup", |status| status["base"]["kind"] == "backup");
            says(told["base"]["place"].as_str().unwrap(), &[&at]);
            let joiner = quick(kind).start().unwrap();
            source.replicate(&joiner, &[]);
            assert_same_data(primary, &joiner);
            assert_eq!(number(primary, "total_forks"), before, "{kind}: {}", primary.log());
            source.stop();
        }
        place.assert_no_data_in_spool();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_backup_is_whole_and_replaces_the_oldest_once_it_is() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 4, 1);
        fill_every_type(&mut server.client().unwrap(), 1).unwrap();
        let place = Place::new(Scene::new(server, &ALWAYS_NEW));
        for round in 0..3 {
            place.scene.set(round, "there");
            says(&ends(&mut place.backup(&["--keep", "2"]), 0), &[&place.store.url(), "keys in", "taken"]);
            fs::write(place.store.file("20000101T000000Z-foreign.rdb"), "not ours").unwrap();
            // The source's snapshot is too old then.
            next_second();
            next_second();
        }
        let (snapshots, manifests) = (place.store.backups(".rdb"), place.store.backups(".json"));
        assert_eq!((snapshots.len(), manifests.len()), (3, 2), "{:?}", place.store.keys());
        assert_eq!(place.store.keys().iter().filter(|key| key.starts_with('.')).count(), 1, "{:?}", place.store.keys());
        place.assert_no_data_in_spool();
        let manifest = json(&place.store.file(&manifests[1]));
        let stored = fs::metadata(place.store.file(&snapshots[2])).unwrap().len();
        assert_eq!(manifest["stored"]["bytes"].as_u64(), Some(stored));
        let data = place.scene.stage.path("data");
        let said = place.restore(&["--to", &data]);
        says(&said, &[manifest["replid"].as_str().unwrap(), "dump.rdb", "appendonly no"]);
        assert_eq!(load(kind, &data, false).digest().unwrap(), place.scene.primary.digest().unwrap());
        let left = fs::read_dir(&data).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert!(left.into_iter().all(|name| !name.starts_with(".remora")));
        says(&place.restore_of(&place.store.url(), &["--to", &data], 3), &["--replace"]);
        // The older one, by its name.
        let older = format!("{}/{}", place.store.url(), manifests[0].trim_end_matches(".json"));
        says(&place.restore_of(&older, &["--to", &data, "--replace"], 0), &[&older]);
        assert_ne!(load(kind, &data, false).digest().unwrap(), place.scene.primary.digest().unwrap());
        // Objects that were copied into a folder are as good.
        let copied = place.store.file("").display().to_string();
        says(&place.scene.restore(&copied, &[]), &["history"]);
    }
}

/// As a source is by those who read it: for `--retry-for`.
#[test]
fn a_store_that_is_away_is_waited_for() {
    let Some(kind) = require::redis() else { return };
    let server = primary(kind).start().unwrap();
    fill(&server, 1, 1);
    let mut place = Place::new(Scene::new(server, &ALWAYS_NEW));
    place.store.stop();
    says(&place.restore_of(&place.store.url(), &["--retry-for", "0"], 17), &[&place.store.url()]);
    let mut backup = place.backup(&[]);
    place.store.wait_for_a_client();
    place.store.start_again();
    says(&ends(&mut backup, 0), &["taken"]);
    place.store.stop();
    let (url, spool) = (place.store.url(), place.scene.stage.path("spool"));
    let restore = [&["restore", &url, "--spool", &spool][..], &strs(&place.options)].concat();
    let mut restore = place.scene.stage.start(None, &restore);
    place.store.wait_for_a_client();
    place.store.start_again();
    says(&ends(&mut restore, 0), &["history"]);
}

#[test]
#[ignore = "long: make test-all"]
fn an_upload_that_was_killed_is_invisible_and_is_broken_off_by_the_next() {
    let server = primary(Kind::Valkey9).start().unwrap();
    // Three parts.
    fill(&server, 20, 2);
    let place = Place::new(Scene::new(server, &[]));
    for signal in [Signal::KILL, Signal::TERM] {
        place.store.hold(Some("partNumber=2"));
        let mut backup = place.backup(&[]);
        place.store.wait_for_held();
        wait_until("the other parts to arrive", LONG, || {
            Ok(if place.store.parts() >= 2 { Ok(()) } else { Err(format!("{} parts", place.store.parts())) })
        })
        .unwrap();
        assert_eq!(place.store.backups(""), [""; 0]);
        says(&place.restore_of(&place.store.url(), &[], 3), &["there is no backup"]);
        if signal == Signal::KILL {
            says(&ends(&mut place.backup(&[]), 3), &["another remora backup"]);
            backup.kill().unwrap();
            // The notes of the upload and of the backup, and who wrote.
            assert_eq!(place.store.keys().len(), 3, "{:?}", place.store.keys());
            place.store.hold(None);
            let said = ends(&mut place.backup(&[]), 0);
            says(&said, &["is broken off", "was not ended, and is removed", "keys in"]);
            assert_eq!((place.store.parts(), place.store.backups("").len()), (0, 2), "{:?}", place.store.keys());
            place.restore(&[]);
            for key in place.store.backups("") {
                fs::remove_file(place.store.file(&key)).unwrap();
            }
        } else {
            backup.signal(signal).unwrap();
            place.store.hold(None);
            says(&ends(&mut backup, 7), &["no new backup in", &place.store.url()]);
            // The part that is held ends with its connection.
            assert_eq!((place.store.parts(), place.store.backups("")), (0, vec![]), "{:?}", place.store.keys());
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_commands_since_survive_the_deaths_of_the_agent_and_the_primary() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 12, 3);
        fill_every_type(&mut server.client().unwrap(), 3).unwrap();
        let mut place = Place::new(Scene::new(server, &[]));
        let writer = steady_writer(&place.scene.primary);
        let options = ["--segment-every", "1s", "--file-size", "256KiB"];
        let mut backup = place.journal(&options[2..]);
        for round in 1..=3 {
            writer.wait_for(round * 6_000);
            backup.kill().unwrap();
            writer.wait_for(round * 6_000 + 1_000);
            backup = place.backup(&[&["--journal"], &options[..]].concat());
            backup.wait_for_line("goes on at", LONG).unwrap();
            backup.wait_for_line("the journal is recorded", LONG).unwrap();
        }
        writer.wait_for(20_000);
        writer.stop().unwrap();
        let contents = place.quiet_contents();
        backup.kill().unwrap();
        assert_eq!(number(&place.scene.primary, "sync_full"), 1);
        place.scene.primary.kill().unwrap();
        let segments = place.store.backups(".aof").len() as u64;
        let counted = place.reached()["segments"].as_u64().unwrap();
        assert!(counted > 5 && segments - counted <= 1, "{counted} of {segments}");
        let data = place.scene.stage.path("data");
        let said = place.restore(&["--to", &data]);
        says(&said, &["transactions", "appendonly yes", &place.store.url()]);
        assert!(!said.contains("left out"), "{said}");
        assert_holds(&load(kind, &data, true), &contents, kind);
    }
}

#[test]
fn a_moment_is_restored_without_the_segments_of_later_ones() {
    let server = primary(Kind::Redis7).start().unwrap();
    fill(&server, 1, 4);
    let place = Place::new(Scene::new(server, &[]));
    let mut backup = place.journal(&[]);
    place.scene.set(1, "before");
    place.wait_until_stored();
    let moment = now();
    next_second();
    next_second();
    place.scene.set(2, "after");
    place.wait_until_stored();
    backup.signal(Signal::TERM).unwrap();
    says(&ends(&mut backup, 0), &["ends at"]);
    place.assert_no_data_in_spool();
    let has = |data: &str, number: u64| {
        let server = load(Kind::Redis7, data, true);
        server.client().unwrap().bytes(&["GET", &format!("moment {number}")]).unwrap().is_some()
    };
    let (all, cut, until) = (place.scene.stage.path("all"), place.scene.stage.path("cut"), moment.to_string());
    place.restore(&["--to", &all]);
    place.restore(&["--to", &cut, "--until", &until]);
    for (data, is_whole) in [(&all, true), (&cut, false)] {
        assert!(has(data, 1), "{data}");
        assert_eq!(has(data, 2), is_whole, "{data}");
    }
    let files = |data: &str| fs::read_dir(Path::new(data).join("appendonlydir")).unwrap().count();
    assert!(files(&cut) < files(&all), "{} and {}", files(&cut), files(&all));
    let early = place.restore_of(&place.store.url(), &["--until", "2020-01-01T00:00:00Z"], 3);
    says(&early, &["later moment", &place.store.url()]);
}

#[test]
#[ignore = "long: make test-all"]
fn a_new_beginning_leaves_no_gap_and_the_oldest_go_as_a_whole() {
    let server = primary(Kind::Valkey9).start().unwrap();
    fill(&server, 2, 6);
    let place = Place::new(Scene::new(server, &ALWAYS_NEW));
    let writer = steady_writer(&place.scene.primary);
    let mut backup = place.journal(&["--base-every", "1s", "--keep", "2", "--file-size", "256KiB"]);
    wait_for_lines(&mut backup, "ends at", 3);
    writer.stop().unwrap();
    let contents = place.scene.quiet_contents();
    // Until no backup begins or ends any more.
    backup.signal(Signal::TERM).unwrap();
    ends(&mut backup, 0);
    let manifests: Vec<String> =
        place.store.backups(".json").into_iter().filter(|key| !key.ends_with("/commands.json")).collect();
    // A third one if the signal came when it was whole, and before the oldest one's turn to go.
    assert!((2..=3).contains(&manifests.len()), "{:?}", place.store.keys());
    let names: Vec<&str> = manifests.iter().map(|key| key.trim_end_matches(".json")).collect();
    for key in place.store.backups("") {
        assert!(names.iter().any(|name| key.starts_with(name)), "{key} is of no backup");
    }
    for manifest in &manifests {
        assert_eq!(json(&place.store.file(manifest)).get("gap"), None);
    }
    let data = place.scene.stage.path("data");
    place.restore(&["--to", &data]);
    assert_holds(&load(Kind::Valkey9, &data, true), &contents, Kind::Valkey9);
}

#[test]
#[ignore = "long: make test-all"]
fn what_is_damaged_or_missing_is_named() {
    let server = primary(Kind::Redis7).start().unwrap();
    fill(&server, 1, 8);
    let place = Place::new(Scene::new(server, &[]));
    let mut backup = place.journal(&[]);
    for round in 1..=3 {
        place.scene.set(round, "recorded");
        place.wait_until_stored();
    }
    backup.signal(Signal::TERM).unwrap();
    ends(&mut backup, 0);
    let refused = |key: &str, change: &dyn Fn(&Path), words: &[&str]| {
        let file = place.store.file(key);
        let before = fs::read(&file).unwrap();
        change(&file);
        says(&place.restore_of(&place.store.url(), &[], 3), words);
        fs::write(&file, before).unwrap();
    };
    let flip = |file: &Path| {
        let mut bytes = fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    let shorten = |file: &Path| fs::write(file, &fs::read(file).unwrap()[1..]).unwrap();
    let remove = |file: &Path| fs::remove_file(file).unwrap();
    let base = place.store.backups("/base.rdb").pop().unwrap();
    let segments = place.store.backups(".aof");
    refused(&base, &flip, &[&base, "is damaged", "checksum"]);
    refused(&base, &shorten, &[&base, "is damaged", "bytes"]);
    refused(&base, &remove, &[&base, "is missing"]);
    refused(&segments[1], &flip, &[&segments[1], "is damaged", "checksum"]);
    refused(&segments[1], &remove, &["/commands/00000002-", "is missing"]);
    refused(segments.last().unwrap(), &remove, &[&format!("/commands/{:08}-", segments.len()), "is missing"]);
    refused(&place.store.backups("/commands.json")[0], &remove, &["commands.json", "is missing"]);
    place.restore(&[]);
}

#[test]
fn what_cannot_work_is_refused_and_says_which_option() {
    let server = primary(Kind::Redis7).start().unwrap();
    let mut place = Place::new(Scene::new(server, &[]));
    let right = place.options.clone();
    let stage = place.scene.stage.clone();
    let wrong = stage.secret("wrong", "[default]\naws_access_key_id = the-id\naws_secret_access_key = other");
    place.option("--s3-credentials-file", &wrong);
    says(&ends(&mut place.backup(&[]), 17), &[&place.store.url(), "does not accept the keys", "--s3-credentials-file"]);
    let open = stage.secret("open", "[default]\naws_access_key_id = the-id\naws_secret_access_key = the-secret");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).unwrap();
    place.option("--s3-credentials-file", &open);
    says(&ends(&mut place.backup(&[]), 3), &[&open, "chmod 600"]);
    place.options = right;
    says(&place.restore_of("s3://nowhere/orders", &[], 17), &["s3://nowhere/orders"]);
    let other = "http://192.0.2.1:9000";
    place.option("--s3-endpoint", other);
    says(&ends(&mut place.backup(&[]), 3), &["--s3-endpoint", other, "--s3-allow-http"]);
    assert_eq!(number(&place.scene.primary, "sync_full"), 0);
}

// An S3 server in the test's process: objects are files, and a request can be held.

/// The bucket, and what keys begin with.
const BUCKET: &str = "backups";

const PREFIX: &str = "some/orders";

/// A server with one bucket. Dropping it ends it.
pub(crate) struct Store {
    folder: TempDir,
    address: SocketAddr,
    held: Arc<Held>,
    service: Arc<S3Service>,
    /// `None` while it is stopped.
    runtime: Option<Runtime>,
}

/// Requests that are not answered.
#[derive(Default)]
struct Held {
    /// What their addresses contain.
    part: Mutex<Option<String>>,
    count: Mutex<usize>,
}

impl Held {
    fn takes<T>(&self, request: &Request<T>) -> bool {
        let part = self.part.lock().unwrap();
        let is_held = part.as_ref().is_some_and(|part| request.uri().to_string().contains(part));
        *self.count.lock().unwrap() += usize::from(is_held);
        is_held
    }
}

impl Store {
    pub(crate) fn start() -> Store {
        let folder = scratch::folder("store").unwrap();
        fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let mut service = S3ServiceBuilder::new(FileSystem::new(folder.path()).unwrap());
        service.set_auth(SimpleAuth::from_single("the-id", "the-secret"));
        let (service, held) = (Arc::new(service.build()), Arc::new(Held::default()));
        let mut store = Store { folder, address: ([127, 0, 0, 1], 0).into(), held, service, runtime: None };
        store.start_again();
        store
    }

    /// Serves over TLS at this socket besides.
    pub(crate) fn serve_at(&self, listener: std::net::TcpListener, tls: &Tls) {
        let chain = CertificateDer::pem_file_iter(&tls.certificate).unwrap().map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_file(&tls.key).unwrap();
        let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        listener.set_nonblocking(true).unwrap();
        let (service, runtime) = (Arc::clone(&self.service), self.runtime.as_ref().unwrap());
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            while let Ok((socket, _)) = listener.accept().await {
                let (acceptor, service) = (acceptor.clone(), Arc::clone(&service));
                tokio::spawn(async move {
                    // A client that ends in the middle is not a fault of the store.
                    let Ok(socket) = acceptor.accept(socket).await else { return };
                    let answer = service_fn(move |request: Request<Incoming>| {
                        let service = Arc::clone(&service);
                        async move { Ok::<_, Infallible>(service.call(request.map(s3s::Body::from)).await.unwrap()) }
                    });
                    _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), answer).await;
                });
            }
        });
    }

    /// Ends the server. Its objects and its address stay.
    pub(super) fn stop(&mut self) {
        self.runtime = None;
    }

    /// Starts the server at its address.
    pub(super) fn start_again(&mut self) {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        runtime.spawn(serve(listener, Arc::clone(&self.service), Arc::clone(&self.held)));
        self.runtime = Some(runtime);
    }

    /// Waits in the place of the stopped server until a client has connected, and closes that connection.
    pub(super) fn wait_for_a_client(&self) {
        drop(std::net::TcpListener::bind(self.address).unwrap().accept().unwrap());
    }

    pub(super) fn url(&self) -> String {
        format!("s3://{BUCKET}/{PREFIX}")
    }

    /// The options by which it is reached.
    pub(super) fn options(&self, stage: &Stage) -> Vec<String> {
        let keys = stage.secret("keys", "[default]\naws_access_key_id = the-id\naws_secret_access_key = the-secret");
        let endpoint = format!("http://{}", self.address);
        ["--s3-endpoint", &endpoint, "--s3-credentials-file", &keys].map(str::to_owned).to_vec()
    }

    /// Holds all requests whose address contains this.
    pub(super) fn hold(&self, part: Option<&str>) {
        *self.held.part.lock().unwrap() = part.map(str::to_owned);
    }

    /// Waits until a request is held.
    pub(super) fn wait_for_held(&self) {
        wait_until("a request to be held", LONG, || {
            Ok(if *self.held.count.lock().unwrap() > 0 { Ok(()) } else { Err("none".to_owned()) })
        })
        .unwrap();
    }

    /// The file of an object.
    pub(super) fn file(&self, key: &str) -> PathBuf {
        self.folder.path().join(BUCKET).join(PREFIX).join(key)
    }

    /// The keys of all objects, in order.
    pub(super) fn keys(&self) -> Vec<String> {
        fn add(folder: &Path, root: &Path, keys: &mut Vec<String>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.path() {
                    path if path.is_dir() => add(&path, root, keys),
                    path => keys.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()),
                }
            }
        }
        let (root, mut keys) = (self.file(""), Vec::new());
        add(&root, &root, &mut keys);
        keys.sort();
        keys
    }

    /// The keys without the notes of the command.
    pub(super) fn backups(&self, end: &str) -> Vec<String> {
        self.keys().into_iter().filter(|key| !key.starts_with('.') && key.ends_with(end)).collect()
    }

    /// Parts of uploads that have not been completed.
    pub(super) fn parts(&self) -> usize {
        let names = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().contains(".part-")).count()
    }
}

async fn serve(listener: TcpListener, service: Arc<S3Service>, held: Arc<Held>) {
    while let Ok((socket, _)) = listener.accept().await {
        let (service, held) = (Arc::clone(&service), Arc::clone(&held));
        tokio::spawn(async move {
            let answer = service_fn(move |request: Request<Incoming>| {
                let (service, is_held) = (Arc::clone(&service), held.takes(&request));
                async move {
                    if is_held {
                        std::future::pending::<()>().await;
                    }
                    Ok::<_, Infallible>(service.call(request.map(s3s::Body::from)).await.unwrap())
                }
            });
            let connection = hyper::server::conn::http1::Builder::new();
            _ = connection.serve_connection(TokioIo::new(socket), answer).await; // a killed client ends it in the middle
        });
    }
}

// `remora source --base`: a snapshot from what is stored, in the order of bases, and a fork of the server last or
// never.

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 4;

/// A primary with data of every type, and a replica that follows it: its files say where in the history they were
/// taken.
fn two(kind: Kind) -> (Server, Server) {
    let server = primary(kind).start().unwrap();
    fill(&server, MEBIBYTES, 1);
    fill_every_type(&mut server.client().unwrap(), 1).unwrap();
    (followed(kind, &server), server)
}

fn followed(kind: Kind, server: &Server) -> Server {
    let replica = quick(kind).start().unwrap();
    replica.replicate(server).unwrap();
    replica.wait_for_link(LONG).unwrap();
    replica
}

/// Writes without messages to subscribers, which would not be delivered twice.
fn writer(server: &Server) -> Workload {
    let options = Options { big_bytes: 1 << 16, ..Options::seeded(remora_lab::random::seed("workload")) };
    Workload::start(server.client().unwrap(), options.rate(500)).unwrap()
}

/// The folder in which the server has just saved its data.
fn saved(server: &Server) -> String {
    server.client().unwrap().ok(&["SAVE"]).unwrap();
    server.configured("dir").unwrap()
}

/// Full copies and forks.
fn cost(server: &Server) -> [u64; 2] {
    [syncs(server).0, number(server, "total_forks")]
}

fn base(source: &Source, kind: &str) -> Value {
    source.wait_for_status(kind, |status| status["base"]["kind"] == kind)["base"].clone()
}

fn joiner(kind: Kind, source: &Source) -> Server {
    let joiner = quick(kind).start().unwrap();
    source.replicate(&joiner, &[]);
    joiner
}

#[test]
#[ignore = "long: make test-all"]
fn a_file_that_a_replicas_server_has_saved_is_the_base_and_nothing_forks() {
    at_once(require::kinds(), |kind| {
        let (replica, server) = two(kind);
        let folder = saved(&replica);
        let (writer, before, stage) = (writer(&server), cost(&server), Stage::new());
        writer.wait_for(1_000);
        // The file by its name, and the folder of the server.
        for place in [format!("{folder}/dump.rdb"), folder.clone()] {
            let source = stage.source(&server.url(), &["--base", &place, "--no-fork", "--repeat-messages", "1h"]);
            let told = base(&source, "file");
            says(told["place"].as_str().unwrap(), &[&folder, "dump.rdb"]);
            assert!(told["stream_bytes"].as_u64() > Some(0), "{told}");
            says(&source.drawn_status(), &["base       ", &folder, "of stream behind it"]);
            let dry = ends(&mut source.replica(&quick(kind).start().unwrap(), &["--dry-run"]), 0);
            says(&dry, &["base        ", &folder, "of stream behind it", "fork        none"]);
            let joiners = [joiner(kind, &source), joiner(kind, &source)];
            let told = base(&source, "snapshot");
            says(told["place"].as_str().unwrap(), &["the source's snapshot, from ", &folder]);
            says(source.status()["generation"]["capture"].as_str().unwrap(), &["stored"]);
            writer.wait_for(writer.commands() + 300);
            for joiner in &joiners {
                joiner.wait_for_link(LONG).unwrap();
            }
            assert_eq!(source.snapshots_taken(), 1);
            source.stop();
        }
        writer.stop().unwrap();
        assert_same_data(&server, &replica);
        assert_eq!(cost(&server), before, "{kind}: {}", server.log());
    });
}

#[test]
fn a_server_that_must_not_fork_does_not_while_no_base_serves_and_a_newer_file_ends_the_wait() {
    at_once(require::kinds(), |kind| {
        let server = quick(kind).config("repl-backlog-size", "16kb").start().unwrap();
        fill(&server, 1, 1);
        let replica = followed(kind, &server);
        let (stage, folder) = (Stage::new(), saved(&replica));
        let place = stage.path("base.rdb");
        fs::copy(format!("{folder}/dump.rdb"), &place).unwrap();
        write_past_the_backlog(&server);
        let before = cost(&server);
        let mut source = stage.source(&server.url(), &["--base", &place, "--no-fork"]);
        let late = quick(kind).start().unwrap();
        let mut agent = source.replica(&late, &[]);
        source.agent.wait_for_line("no snapshot without a fork (--no-fork)", LONG).unwrap();
        let told = base(&source, "none");
        says(told["passed_over"].as_str().unwrap(), &[&place, "backlog", "--no-fork"]);
        wait_until("status to say so", LONG, || {
            let status = source.drawn_status();
            Ok(status.contains("base       none, replicas that join wait").then_some(()).ok_or(status))
        })
        .unwrap();
        assert_eq!(cost(&server), before, "{kind}: it waits");
        assert_eq!(late.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
        // The replica has followed all the time: what it saves now reaches to the present.
        assert_eq!(saved(&replica), folder);
        fs::copy(format!("{folder}/dump.rdb"), stage.path("new.rdb")).unwrap();
        fs::rename(stage.path("new.rdb"), &place).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_same_data(&server, &late);
        assert_eq!(cost(&server), before, "{kind}: {}", server.log());
    });
}

#[test]
fn of_what_serves_the_newest_is_taken_and_the_server_forks_where_nothing_does() {
    at_once(require::kinds(), |kind| {
        let (replica, server) = two(kind);
        let (stage, folder) = (Stage::new(), saved(&replica));
        let places = ["old.rdb", "new.rdb", "broken.rdb", "missing.rdb"].map(|name| stage.path(name));
        let [old, new, broken, missing] = &places;
        fs::copy(format!("{folder}/dump.rdb"), old).unwrap();
        server.client().unwrap().ok(&["SET", "one", "more"]).unwrap();
        remora_lab::server::wait_until("the replica to follow", LONG, || {
            let [here, there] = [&replica, &server].map(|server| number(server, "master_repl_offset"));
            Ok(if here == there { Ok(()) } else { Err(format!("{here} of {there}")) })
        })
        .unwrap();
        saved(&replica);
        fs::copy(format!("{folder}/dump.rdb"), new).unwrap();
        // Its head is right, and its end is missing: it is newer than all, and found out when it is read.
        server.client().unwrap().ok(&["SET", "two", "more"]).unwrap();
        saved(&replica);
        let bytes = fs::read(format!("{folder}/dump.rdb")).unwrap();
        fs::write(broken, &bytes[..bytes.len() - 20]).unwrap();
        let before = cost(&server);
        let named: Vec<&str> = places.iter().flat_map(|place| ["--base", place]).collect();
        let source = stage.source(&server.url(), &[&named[..], &["--no-fork"]].concat());
        let told = base(&source, "file");
        says(told["passed_over"].as_str().unwrap(), &[missing, "cannot be read"]);
        let server_of = joiner(kind, &source);
        assert_same_data(&server, &server_of);
        says(&source.agent.output(), &["no snapshot comes from", broken, "damaged", &format!("comes from {new}")]);
        assert_eq!(cost(&server), before, "{kind}");
        source.stop();

        // Files of another history do not serve.
        let other = primary(kind).start().unwrap();
        fill(&other, 1, 2);
        let source = stage.source(&other.url(), &["--base", old]);
        says(base(&source, "fork")["passed_over"].as_str().unwrap(), &[old]);
        let before = cost(&other);
        assert_same_data(&other, &joiner(kind, &source));
        assert_eq!(cost(&other), before.map(|count| count + 1), "{kind}");
    });
}

/// A standby whose first source dies before it has a snapshot takes the next base, and the primary never forks.
#[test]
#[ignore = "long: make test-all"]
fn a_standby_without_a_copy_goes_on_with_the_next_base() {
    at_once(require::kinds(), |kind| {
        let (replica, server) = two(kind);
        let (stage, folder) = (Stage::new(), saved(&replica));
        let before = cost(&server);
        let mut first = stage.source(&server.url(), &[]);
        let of = first.address.to_string();
        let more = ["--standby-of", &of, "--base", &folder, "--no-fork", "--fork-after", "1s"];
        let second = stage.source(&server.url(), &more);
        base(&second, "copy");
        first.agent.signal(Signal::KILL).unwrap();
        assert_same_data(&server, &joiner(kind, &second));
        says(base(&second, "snapshot")["place"].as_str().unwrap(), &[&folder]);
        assert_eq!(cost(&server), before, "{kind}");
        assert!(Path::new(&folder).is_dir());
    });
}
