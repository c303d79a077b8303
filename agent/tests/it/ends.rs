//! The ends of a sync that did not succeed: the server is left in the safest state that is still possible, and what the
//! agent says of that state is true.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use remora_lab::server::wait_until;
use remora_lab::{Address, Agent, Client, Kind, Net, Server, assert_same_data, require, tls};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, Way, at_once, ends, fill_keys, follows, load, load_slowly, number, primary, quick, says,
    succeeds, syncs, wait_until_loading, way_of_loading,
};

/// The exit code of a sync that failed after the server had been touched.
const SYNC_FAILED: i32 = 6;

/// The exit code of a sync that was stopped.
const INTERRUPTED: i32 = 7;

/// An address that no host answers at (RFC 5737).
const NOWHERE: (&str, &str) = ("192.0.2.1", "6379");

fn get(server: &Server, key: &str) -> String {
    server.client().unwrap().text(&["GET", key]).unwrap()
}

// ---- a link that never works ----

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_cannot_reach_the_link_is_given_back_and_the_cause_is_named() {
    at_once(require::kinds(), |kind| {
        let (net, stage) = (Net::new().unwrap(), Stage::new());
        let container = net.host("container").unwrap();
        let primary = primary(kind).start().unwrap();
        fill_keys(&primary, 100, "x");
        // The agent reaches it by a socket in the file system, and takes it for one on this host.
        let server = Server::builder(kind).on(&container).unix_socket().start().unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["SET", "old", "1"]).unwrap();
        client.ok(&["REPLICAOF", NOWHERE.0, NOWHERE.1]).unwrap();
        let source = stage.source(&primary.url(), &[]);
        let more = ["--replace", "--retry-for", "10s"];
        let mut agent = stage.replica(&server.unix_url().unwrap(), source.address, &more);
        agent.wait_for_line("has not completed its link", LONG).unwrap();
        let said = ends(&mut agent, SYNC_FAILED);
        says(&said, &["no connection has arrived", "--listen", "follows its former primary 192.0.2.1:6379 again"]);
        says(&said, &["holds what it held before"]);
        assert_eq!((follows(&server), get(&server, "old")), ("192.0.2.1:6379".into(), "1".into()));
        assert_eq!(server.configured("masterauth").unwrap(), "");
        assert_eq!(server.configured("repl-diskless-load").unwrap(), "disabled");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_does_not_accept_the_links_certificate_is_given_back_and_the_cause_is_named() {
    let Some(kind) = require::redis().filter(|kind| kind.speaks_tls()) else { return };
    let (stage, other) = (Stage::new(), Stage::new());
    let (files, _) = tls::certificates(stage.folder(), &[]).unwrap();
    let (foreign, _) = tls::certificates(other.folder(), &[]).unwrap();
    let path = |path: &std::path::Path| path.display().to_string();
    let primary = primary(kind).tls(files.clone()).start().unwrap();
    let server = Server::builder(kind).tls(files.clone()).config("tls-replication", "yes").start().unwrap();
    let source = stage.source(&primary.tls_url().unwrap(), &["--tls-ca", &path(&files.ca)]);
    let (cert, key) = (path(&foreign.certificate), path(&foreign.key));
    let link = ["--link-cert", &cert, "--link-key", &key, "--retry-for", "10s"];
    let said = ends(&mut stage.replica(&server.url(), source.address, &link), SYNC_FAILED);
    says(
        &said,
        &["has not completed its link", "connection from 127.0.0.1", "failed", "received fatal alert", "--link-cert"],
    );
    says(&said, &["was detached and holds what it held before"]);
    assert_eq!(server.fact("role").unwrap(), "master");
}

// ---- old data that are still whole ----

/// A slow sync of `server`, in the middle of its snapshot.
fn in_the_middle(source: &Source, server: &Server, more: &[&str]) -> (Agent, Way) {
    let slow = ["--replace", "--module-load", "off", "--download-limit", "4MiB", "--transport", "tcp"];
    let mut agent = source.replica(server, &[&slow, more].concat());
    agent.wait_for_event("link_followed", LONG).unwrap();
    let way = wait_until("the server to receive the snapshot", LONG, || Ok(way_of_loading(server))).unwrap();
    (agent, way)
}

/// A primary with 60 MB, and a source of it.
fn large_source(kind: Kind) -> (Server, Source) {
    let primary = primary(kind).start().unwrap();
    load(&primary, 60, 1_000_000);
    let source = Source::start(&primary, &[]);
    (primary, source)
}

/// Another primary with a few keys, and a replica of it by the servers' own replication.
fn replica_of_another(kind: Kind) -> (Server, Server) {
    let former = primary(kind).start().unwrap();
    fill_keys(&former, 50, "former");
    let server = Server::start(kind).unwrap();
    server.replicate(&former).unwrap();
    server.wait_for_link(LONG).unwrap();
    (former, server)
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_whose_sync_is_stopped_follows_its_former_primary_again() {
    for kind in require::kinds() {
        let (_primary, source) = large_source(kind);
        let (former, server) = replica_of_another(kind);
        let before = syncs(&former);
        let (mut agent, way) = in_the_middle(&source, &server, &[]);
        fill_keys(&former, 60, "later");
        agent.signal(Signal::INT).unwrap();
        let said = ends(&mut agent, INTERRUPTED);
        assert_eq!(follows(&server), former.address().to_string());
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&former, &server);
        assert_eq!(server.configured("masterauth").unwrap(), "");
        let after = syncs(&former);
        match way {
            // It goes on where it was: not even a full copy was needed.
            Way::File => {
                says(&said, &["follows its former primary", "again and holds what it held before"]);
                assert_eq!(after, (before.0, before.1 + 1), "{}", server.log());
            }
            Way::Link => {
                says(&said, &["emptied", "follows its former primary", "sends it a full copy"]);
                assert_eq!(after.0, before.0 + 1);
            }
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_former_primary_is_known_also_to_the_agent_after_one_that_was_killed() {
    for kind in require::kinds() {
        let (_primary, source) = large_source(kind);
        let (former, server) = replica_of_another(kind);
        let (mut killed, _) = in_the_middle(&source, &server, &[]);
        killed.kill().unwrap();
        let (mut agent, _) = in_the_middle(&source, &server, &[]);
        agent.signal(Signal::INT).unwrap();
        says(&ends(&mut agent, INTERRUPTED), &["follows its former primary", &former.address().to_string()]);
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&former, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_loads_beside_its_data_keeps_them_when_the_source_is_gone_for_good() {
    for kind in require::kinds() {
        let (_primary, mut source) = large_source(kind);
        let server = Server::builder(kind).config("repl-diskless-load", "swapdb").start().unwrap();
        fill_keys(&server, 30, "own");
        let digest = server.digest().unwrap();
        let (mut agent, _) = in_the_middle(&source, &server, &["--retry-for", "2s"]);
        source.agent.kill().unwrap();
        let said = ends(&mut agent, 5);
        says(&said, &["was detached and holds what it held before"]);
        assert_eq!(server.fact("role").unwrap(), "master");
        assert_eq!(server.digest().unwrap(), digest);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_cannot_be_emptied_is_said_to_be_detached_and_not_whole() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let primary = primary(kind).start().unwrap();
        load(&primary, 60, 1_000_000);
        let rules = "~* &* +@all -flushall";
        let server = Server::builder(kind).user("agent", "pw", rules).start().unwrap();
        let source = stage.source(&primary.url(), &[]);
        let password = stage.secret("password", "pw");
        let more = ["--user", "agent", "--password-file", &password, "--module-load", "off"];
        let slow = ["--download-limit", "4MiB", "--transport", "tcp"];
        let mut agent = stage.replica(&server.url(), source.address, &[&more[..], &slow].concat());
        wait_until("the server to load", LONG, || Ok(way_of_loading(&server))).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, INTERRUPTED);
        says(&said, &["was detached", "could not be emptied", "flushall"]);
        assert_eq!(server.fact("role").unwrap(), "master");
    }
}

// ---- the configuration file ----

#[test]
#[ignore = "long: make test-all"]
fn a_configuration_file_that_another_client_wrote_during_the_sync_is_written_again() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        fill_keys(&primary, 100, "x");
        let mut server = Server::start(kind).unwrap();
        let source = Source::start(&primary, &[]);
        let mut agent = source.replica(&server, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["CONFIG", "REWRITE"]).unwrap();
        let link = follows(&server);
        let file = || {
            let files = fs::read_dir(server.folder()).unwrap().map(|entry| entry.unwrap().path());
            let path = files.into_iter().find(|path| path.extension().is_some_and(|kind| kind == "conf")).unwrap();
            fs::read_to_string(path).unwrap()
        };
        let port = link.split(':').next_back().unwrap();
        assert!(file().contains(&format!("replicaof 127.0.0.1 {port}")) && file().contains("auth"), "{}", file());
        agent.signal(Signal::TERM).unwrap();
        succeeds(&mut agent, &server);
        let text = file();
        assert!(text.contains(&format!("replicaof 127.0.0.1 {}", primary.port())), "{text}");
        assert!(!text.contains("masterauth") && !text.contains("primaryauth"), "{text}");
        server.restart().unwrap();
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&primary, &server);
    }
}

// ---- a full copy at the hand-off ----

/// Has one client wait at the server at any time, so that a hand-off takes its longest pause before `REPLICAOF`.
fn keep_a_client_waiting(server: &Server) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, address) = (stop.clone(), Address::Tcp(server.address()));
    let mut client = server.client().unwrap();
    thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            // A server that loads, or changes its primary, answers with an error.
            if client.call(&["XREAD", "BLOCK", "1000", "STREAMS", "nothing", "$"]).is_err() {
                match Client::connect(&address) {
                    Ok(again) => client = again,
                    Err(_) => thread::sleep(Duration::from_millis(20)),
                }
            }
        }
    });
    stop
}

#[test]
#[ignore = "long: make test-all"]
fn a_full_copy_that_the_server_takes_by_itself_is_left_to_it() {
    at_once(require::kinds(), |kind| {
        let stage = Stage::new();
        let primary = primary(kind).config("repl-backlog-size", "16kb").start().unwrap();
        let server = Server::start(kind).unwrap();
        fill_keys(&primary, 400, "x");
        let mut source = stage.source(&primary.url(), &["--eager"]);
        source.wait_for_snapshot();
        // 400 keys: from here on a copy takes half a minute, which is longer than the agent waits.
        primary.configure("rdb-key-save-delay", "75000").unwrap();
        let stop = keep_a_client_waiting(&server);
        let mut agent = stage.replica(&server.url(), source.address, &["--retry-for", "1s"]);
        agent.wait_for_event("handing_over", LONG).unwrap();
        // The backlog no longer reaches back to where the server is.
        fill_keys(&primary, 300, "y");
        agent.wait_for_event("full_copy", LONG).unwrap();
        let said = ends(&mut agent, SYNC_FAILED);
        stop.store(true, Ordering::Relaxed);
        says(&said, &["is taking a full copy of the primary", "by itself"]);
        assert!(!said.contains("back to our link") && !said.contains("whole data set"), "{said}");
        assert_eq!(follows(&server), primary.address().to_string());
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&primary, &server);
        // The source's, and the server's own.
        assert_eq!(number(&primary, "sync_full"), 2);
    });
}

// An agent that is killed leaves a server that can follow any primary again: its `masterauth` is what it was.

/// The primary's password.
const PASSWORD: &str = "s3cret-primary";

struct Scene {
    stage: Stage,
    primary: Server,
    replica: Server,
    source: Source,
}

impl Scene {
    fn new(kind: Kind, password: &str) -> Scene {
        let stage = Stage::new();
        let (primary, replica) = match password {
            "" => (quick(kind), Server::builder(kind)),
            password => (quick(kind).require_pass(password), Server::builder(kind).master_auth(None, password)),
        };
        let (primary, replica) = (primary.start().unwrap(), replica.start().unwrap());
        fill_keys(&primary, 2000, "x");
        let file = stage.secret("password", PASSWORD);
        let options = ["--password-file", &file];
        let source = stage.source(&primary.url(), if password.is_empty() { &[] } else { &options });
        Scene { stage, primary, replica, source }
    }

    fn agent(&self, more: &[&str]) -> Agent {
        self.stage.replica(&self.replica.url(), self.source.address, more)
    }

    /// An operator points the server at the primary, and does nothing else.
    fn assert_follows_by_hand(&self, password: &str) {
        self.replica.replicate(&self.primary).unwrap();
        self.replica.wait_for_link(LONG).unwrap();
        assert_eq!(self.replica.configured("masterauth").unwrap(), password);
        assert_same_data(&self.primary, &self.replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_agent_was_killed_while_it_loaded_follows_its_primary_by_hand() {
    for kind in require::kinds() {
        for password in ["", PASSWORD] {
            let scene = Scene::new(kind, password);
            load_slowly(&scene.replica, 1000);
            let mut agent = scene.agent(&[]);
            wait_until_loading(&scene.replica);
            agent.kill().unwrap();
            scene.replica.configure("key-load-delay", "0").unwrap();
            wait_until_it_has_loaded(&scene.replica);
            scene.assert_follows_by_hand(password);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_agent_was_killed_when_it_was_in_step_follows_its_primary_by_hand() {
    for kind in require::kinds() {
        for password in ["", PASSWORD] {
            let scene = Scene::new(kind, password);
            let mut agent = scene.agent(&["--stay"]);
            agent.wait_for_event("in_step", LONG).unwrap();
            agent.kill().unwrap();
            scene.assert_follows_by_hand(password);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_guard_leaves_the_server_to_the_next_agent_and_ends() {
    let Some(()) = require::root() else { return }; // other processes cannot look at the guard
    for kind in require::kinds() {
        let scene = Scene::new(kind, PASSWORD);
        let mut agent = scene.agent(&["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let guards = || guards_of(&scene.replica);
        assert_eq!(guards().len(), 1, "one guard beside the agent");
        agent.kill().unwrap();
        succeeds(&mut scene.agent(&[]), &scene.replica);
        assert_eq!(scene.replica.configured("masterauth").unwrap(), PASSWORD);
        wait_until("the guards to end", LONG, || {
            let left = guards();
            Ok(if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) })
        })
        .unwrap();
    }
}

/// An agent that `remora migrate` has started ends with it. Its guard must not.
#[test]
fn an_agent_that_migrate_has_started_has_a_guard_too() {
    let Some(()) = require::root() else { return }; // other processes cannot look at the guard
    for kind in require::kinds() {
        let scene = Scene::new(kind, "");
        load_slowly(&scene.replica, 1000);
        let (from, to) = (scene.primary.url(), scene.replica.url());
        let mut agent = scene.stage.start(None, &["migrate", "--from", &from, "--to", &to]);
        wait_until_loading(&scene.replica);
        assert_eq!(guards_of(&scene.replica).len(), 1, "{}", agent.output());
        agent.kill().unwrap();
        scene.replica.configure("key-load-delay", "0").unwrap();
        wait_until_it_has_loaded(&scene.replica);
        scene.assert_follows_by_hand("");
    }
}

/// The kernel closes the files of a killed agent one by one: its pipe to the guard may end well before its lock does.
#[test]
fn a_guard_waits_for_the_lock_of_the_agent_that_was_killed() {
    for kind in require::kinds() {
        // A guard that is quicker than this test finds no lock, and nothing is shown then.
        let shown = (0..10).any(|_| a_guard_waits_for_a_lock(kind));
        assert!(shown, "the guard was quicker ten times");
    }
}

/// Whether it was shown: `false` if the guard has come to the lock before this process.
fn a_guard_waits_for_a_lock(kind: Kind) -> bool {
    let scene = Scene::new(kind, "");
    let mut agent = scene.agent(&["--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    let lock = fs::File::open(lock_of(&scene)).unwrap();
    let held = thread::spawn(move || flock(&lock, FlockOperation::LockExclusive).map(|()| lock));
    wait_until("a process that waits for the lock", LONG, || waits_for_a_lock(std::process::id())).unwrap();
    agent.kill().unwrap();
    let held = held.join().unwrap().unwrap();
    if scene.replica.configured("masterauth").unwrap().is_empty() {
        return false;
    }
    let mut client = scene.replica.client().unwrap();
    let mut looks = || {
        let stats = client.info("stats").unwrap();
        stats.get("total_connections_received").unwrap().parse::<u64>().unwrap()
    };
    let before = looks();
    // Each look of the guard is one connection, and no other program connects.
    wait_until("the guard to look again", LONG, || match looks() {
        connections if connections >= before + 3 => Ok(Ok(())),
        connections => Ok(Err(format!("{connections} connections after {before}"))),
    })
    .unwrap();
    assert_ne!(scene.replica.configured("masterauth").unwrap(), "", "nothing is changed while the lock is held");
    drop(held);
    scene.assert_follows_by_hand("");
    true
}

/// The file that the replica's agent has locked.
fn lock_of(scene: &Scene) -> PathBuf {
    let folder = scene.stage.folder().join("remora");
    let is_lock = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.ends_with(".lock") && name.contains(&scene.replica.address().port().to_string())
    };
    let mut found = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).filter(is_lock);
    found.next().unwrap_or_else(|| panic!("no lock of the replica in {}", folder.display()))
}

/// Whether a thread of this process waits for a lock that another one holds (proc_locks(5)).
fn waits_for_a_lock(process: u32) -> remora_lab::Result<Result<(), String>> {
    let locks = fs::read_to_string("/proc/locks").unwrap();
    let waits =
        |line: &str| line.contains("-> FLOCK") && line.split_whitespace().any(|word| word == process.to_string());
    Ok(if locks.lines().any(waits) { Ok(()) } else { Err(locks) })
}

/// A server that loads from a link that has ended notices that soon, and takes no command before.
fn wait_until_it_has_loaded(server: &Server) {
    wait_until("the server to load no more", LONG, || {
        let info = server.client()?.info("persistence")?;
        Ok(if info.get("loading") == Some("0") { Ok(()) } else { Err("it loads".to_owned()) })
    })
    .unwrap();
}

/// The processes that guard this server.
fn guards_of(server: &Server) -> Vec<u32> {
    let (url, mut found) = (server.url(), Vec::new());
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        let has = |text: Vec<u8>, part: &str| String::from_utf8_lossy(&text).contains(part);
        if has(read("cmdline"), &url) && has(read("environ"), "REMORA_GUARD_OF=") {
            found.push(id);
        }
    }
    found
}
