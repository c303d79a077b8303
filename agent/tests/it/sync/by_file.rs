//! `remora replica --delivery file`: servers that are restarted on a snapshot, and those for which that would not work.
//! And dry runs of every way of delivery.

use std::io::copy;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::{fs, thread};

use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{
    LONG, Source, Stage, at_once, ends, fill, fill_cluster, fill_keys, follows, number, primary, quick, says,
    start_cluster, steady_writer, succeeds, syncs, write_past_the_backlog,
};
use crate::sync::primary::{ANOTHER, foreign, has_foreign_data, replaced};
use remora_fabric::verbs::DISABLE;
use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::fill_every_type;
use remora_lab::{Agent, Server, assert_same_data, require};

/// A primary with its source, and a restart command that the test carries out.
pub(crate) struct Scene {
    pub(crate) stage: Stage,
    pub(crate) primary: Server,
    pub(crate) source: Source,
}

impl Scene {
    fn new(primary: Server, options: &[&str]) -> Scene {
        let stage = Stage::new();
        let source = stage.source(&primary.url(), options);
        Scene { stage, primary, source }
    }

    pub(crate) fn with_data(builder: Builder) -> Scene {
        let primary = builder.start().unwrap();
        fill_keys(&primary, 5_000, "value");
        fill_every_type(&mut primary.client().unwrap(), 1).unwrap();
        Scene::new(primary, &[])
    }

    /// A server whose configuration includes a file that has no line yet.
    pub(crate) fn server(&self, builder: Builder) -> Server {
        fs::write(self.include(), "").unwrap();
        builder.config("include", self.include()).config("save", "3600 1").start().unwrap()
    }

    pub(crate) fn include(&self) -> String {
        self.stage.path("replicaof.conf")
    }

    /// The file that asks for a restart, and is removed after it.
    pub(crate) fn wanted(&self) -> PathBuf {
        self.stage.folder().join("wanted")
    }

    pub(crate) fn restart_command(&self) -> String {
        let wanted = self.wanted().display().to_string();
        format!("echo restarting; touch {wanted}; while [ -e {wanted} ]; do sleep 0.05; done")
    }

    fn deliver(&self, server: &str, more: &[&str]) -> Agent {
        let command = self.restart_command();
        let by_file = ["--delivery", "file", "--restart-command", &command];
        self.stage.replica(server, self.source.address, &[&by_file[..], more].concat())
    }

    /// A delivery to a server whose configuration has no primary yet.
    pub(crate) fn deliver_to_new(&self, server: &Server, more: &[&str]) -> Agent {
        self.deliver(&server.url(), &[&["--write-replicaof", &self.include()], more].concat())
    }

    #[track_caller]
    pub(crate) fn wait_for_the_command(&self, agent: &mut Agent) {
        let waited = wait_until("the restart command", LONG, || {
            assert!(agent.ended()?.is_none(), "{}", agent.output());
            Ok(if self.wanted().exists() { Ok(()) } else { Err(String::new()) })
        });
        assert!(waited.is_ok(), "{}", agent.output());
    }

    /// Does what the command asks for, as a service manager would: SIGTERM, at which a server saves, and a new start.
    #[track_caller]
    fn restart(&self, server: &mut Server, agent: &mut Agent) {
        self.wait_for_the_command(agent);
        server.stop(LONG).unwrap();
        server.restart().unwrap();
        fs::remove_file(self.wanted()).unwrap();
    }
}

fn dump(server: &Server) -> PathBuf {
    server.folder().join("dump.rdb")
}

fn former(server: &Server) -> PathBuf {
    server.folder().join("dump.rdb.before-remora")
}

#[test]
fn a_new_server_is_restarted_on_the_file_and_goes_on_at_its_primary() {
    for kind in require::kinds() {
        let scene = Scene::with_data(primary(kind));
        let mut server = scene.server(quick(kind));
        let writer = steady_writer(&scene.primary);
        let json = scene.stage.path("summary.json");
        let mut agent = scene.deliver_to_new(&server, &["--json", &json]);
        scene.restart(&mut server, &mut agent);
        let said = succeeds(&mut agent, &server);
        says(&said, &["restart: restarting", "is a replica of", "partial resynchronisation"]);
        assert_eq!(syncs(&scene.primary), (1, 1), "{kind}: the source's copy, the server's start\n{said}");
        writer.stop().unwrap();
        assert_same_data(&scene.primary, &server);
        for fact in ["master_replid", "master_repl_offset"] {
            wait_until("the same position", LONG, || {
                let both = (server.fact(fact)?, scene.primary.fact(fact)?);
                Ok(if both.0 == both.1 { Ok(()) } else { Err(format!("{both:?}")) })
            })
            .unwrap();
        }
        assert_eq!(follows(&server), scene.primary.address().to_string());
        assert_eq!(server.configured("save").unwrap(), "3600 1");
        assert!(dump(&server).exists() && !former(&server).exists());
        let summary: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        assert_eq!((summary["delivery"].as_str(), summary["full_copies_before"].as_u64()), (Some("file"), Some(1)));
        assert_eq!(fs::metadata(dump(&server)).unwrap().len(), summary["snapshot_bytes"].as_u64().unwrap());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_in_step_is_renewed_with_replace_and_its_saves_do_not_overwrite_the_file() {
    for kind in require::kinds() {
        let scene = Scene::with_data(primary(kind));
        let mut server = scene.server(quick(kind));
        server.replicate(&scene.primary).unwrap();
        server.wait_for_link(LONG).unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["SAVE"]).unwrap();
        let (old, url) = (fs::read(dump(&server)).unwrap(), server.url());
        says(
            &ends(&mut scene.deliver(&url, &["--rewrite-config"]), 3),
            &["keys, which a sync would replace", "--replace"],
        );
        // What only this server has is gone afterwards.
        server.configure("replica-read-only", "no").unwrap();
        client.ok(&["SET", "its own", "1"]).unwrap();
        let mut agent = scene.deliver(&url, &["--replace", "--rewrite-config"]);
        scene.wait_for_the_command(&mut agent);
        assert_eq!(server.configured("save").unwrap(), "");
        assert_eq!(fs::read(former(&server)).unwrap(), old);
        assert_ne!(fs::read(dump(&server)).unwrap(), old);
        scene.restart(&mut server, &mut agent);
        let said = succeeds(&mut agent, &server);
        assert!(!said.contains("another file is in its place"), "{said}");
        assert_eq!(syncs(&scene.primary), (2, 1), "{kind}: its own first one, the source's\n{said}");
        assert_same_data(&scene.primary, &server);
        assert_eq!(server.configured("save").unwrap(), "3600 1");
        assert!(!former(&server).exists());
        let conf = fs::read_to_string(server.folder().join("server.conf")).unwrap();
        assert!(conf.contains("replicaof 127.0.0.1") && conf.contains("save 3600 1"), "{conf}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn after_a_restart_that_failed_the_former_file_is_beside_and_the_same_command_takes_it_up() {
    for kind in require::kinds() {
        let scene = Scene::with_data(primary(kind));
        let mut server = scene.server(quick(kind));
        server.client().unwrap().ok(&["SET", "old", "1"]).unwrap();
        server.client().unwrap().ok(&["SAVE"]).unwrap();
        let old = fs::read(dump(&server)).unwrap();
        let (include, failing) = (scene.include(), "echo no such unit >&2; exit 3");
        let options = ["--replace", "--delivery", "file", "--restart-command", failing, "--write-replicaof", &include];
        let said = ends(&mut scene.stage.replica(&server.url(), scene.source.address, &options), 6);
        says(&said, &["restart: no such unit", "exit status: 3", "dump.rdb.before-remora", "the same command again"]);
        assert_eq!(fs::read(former(&server)).unwrap(), old);
        assert_eq!(server.configured("save").unwrap(), "3600 1", "its saves are as before");
        assert_eq!(server.client().unwrap().text(&["GET", "old"]).unwrap(), "1", "it runs on");

        let mut agent = scene.deliver_to_new(&server, &[]);
        scene.wait_for_the_command(&mut agent);
        assert_eq!(fs::read(former(&server)).unwrap(), old, "ours is not taken for the former one");
        scene.restart(&mut server, &mut agent);
        let said = succeeds(&mut agent, &server);
        assert_eq!(syncs(&scene.primary), (1, 1), "{said}");
        assert_same_data(&scene.primary, &server);
        assert!(!former(&server).exists());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_is_killed_leaves_a_server_that_the_next_run_brings_in_step() {
    at_once(require::kinds(), |kind| {
        let start = primary(kind).start().unwrap();
        fill(&start, 16, 2);
        // Four seconds for the snapshot.
        let scene = Scene::new(start, &["--no-shm", "--upload-limit", "4MiB"]);
        let mut server = scene.server(quick(kind));
        let mut agent = scene.deliver_to_new(&server, &[]);
        scene.source.wait_for_slots(&mut agent, 40);
        agent.kill().unwrap();
        assert_eq!(
            (server.fact("role").unwrap(), server.configured("save").unwrap()),
            ("master".into(), "3600 1".into())
        );

        // In the middle of the restart, which goes on without the agent: the server has ended, and does not come back.
        let mut agent = scene.deliver_to_new(&server, &[]);
        scene.wait_for_the_command(&mut agent);
        agent.kill().unwrap();
        server.stop(LONG).unwrap();
        fs::remove_file(scene.wanted()).unwrap();
        let mut agent = scene.deliver_to_new(&server, &[]);
        scene.restart(&mut server, &mut agent);
        let said = succeeds(&mut agent, &server);
        says(&said, &["the file of an earlier run", "is in step with"]);
        assert_eq!(syncs(&scene.primary), (1, 1), "{said}");
        assert_same_data(&scene.primary, &server);
        assert_eq!(server.configured("save").unwrap(), "3600 1");
        let served = scene.source.bytes_served() as f64;
        assert!(served < 1.4 * fs::metadata(dump(&server)).unwrap().len() as f64, "{served} bytes: the rest only");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_stopped_agent_says_how_it_left_the_server() {
    let Some(kind) = require::redis() else { return };
    let scene = Scene::with_data(primary(kind));
    let mut server = scene.server(quick(kind));
    let mut agent = scene.deliver_to_new(&server, &[]);
    scene.wait_for_the_command(&mut agent);
    agent.signal(Signal::TERM).unwrap();
    says(&ends(&mut agent, 7), &["stopped by SIGTERM", "the restart command goes on", "the same command again"]);
    assert_eq!(server.configured("save").unwrap(), "", "it must not write over the file at its end");
    server.stop(LONG).unwrap();
    server.restart().unwrap();
    fs::remove_file(scene.wanted()).unwrap();
    let said = ends(&mut scene.deliver_to_new(&server, &[]), 0);
    says(&said, &["the file of an earlier run", "is in step with"]);
    assert_eq!(syncs(&scene.primary), (1, 1), "{said}");
    assert_same_data(&scene.primary, &server);
}

/// Passes connections on: their other end is not the server's.
fn proxy(to: SocketAddr) -> SocketAddr {
    gate(to, |_| true)
}

/// Passes on the connections from these addresses, and closes others.
pub(crate) fn gate(to: SocketAddr, is_let_in: fn(IpAddr) -> bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for near in listener.incoming() {
            let near = near.unwrap();
            if !near.peer_addr().is_ok_and(|peer| is_let_in(peer.ip())) {
                continue;
            }
            let far = TcpStream::connect(to).unwrap();
            let (mut near_out, mut far_out) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            let (mut near, mut far) = (near, far);
            thread::spawn(move || copy(&mut near, &mut far_out));
            thread::spawn(move || copy(&mut far, &mut near_out));
        }
    });
    address
}

#[test]
#[ignore = "long: make test-all"]
fn what_would_not_work_is_refused_before_the_server_is_touched() {
    for kind in require::kinds() {
        let scene = Scene::with_data(primary(kind).user("follower", "pw", "~* &* +@all"));
        let server = scene.server(quick(kind));
        let include = scene.include();
        let refused = |url: &str, more: &[&str], words: &[&str]| {
            let said = ends(&mut scene.deliver(url, more), 3);
            says(&said, words);
            assert!(!scene.wanted().exists(), "{said}");
        };
        refused(&server.url(), &[], &["server.conf has no replicaof", "--write-replicaof", "--rewrite-config"]);
        refused(&server.url(), &["--rewrite-config"], &["which the server does not follow"]);
        fs::write(&include, "replicaof 127.0.0.1 1\n").unwrap();
        refused(&server.url(), &[], &["replicaof 127.0.0.1 1", "the source's primary is"]);
        fs::write(&include, "appendonly yes\n").unwrap();
        refused(&server.url(), &["--write-replicaof", &include], &["server.conf has appendonly yes"]);
        fs::write(&include, "dbfilename other.rdb\n").unwrap();
        refused(&server.url(), &["--write-replicaof", &include], &["dbfilename dump.rdb", "other.rdb"]);
        fs::write(&include, "").unwrap();
        server.configure("appendonly", "yes").unwrap();
        refused(&server.url(), &["--write-replicaof", &include], &[&server.url(), "appendonly yes", "--delivery link"]);
        server.configure("appendonly", "no").unwrap();
        let through = format!("redis://{}", proxy(server.address()));
        refused(&through, &["--write-replicaof", &include], &["it cannot be shown", "a proxy", "remora fetch"]);
        let node = quick(kind).cluster().start().unwrap();
        refused(&node.url(), &[], &["does not follow the source's primary", "CLUSTER REPLICATE"]);
        refused(&node.url(), &["--write-replicaof", &include], &["cluster mode", "omit --write-replicaof"]);

        let tied = quick(kind).user("tied", "pw", "~* &* -@all +ping +info +config|get");
        let tied = scene.server(tied.master_auth(Some("follower"), "pw"));
        let file = scene.stage.secret("pw", "pw");
        let as_tied = ["--user", "tied", "--password-file", &file, "--write-replicaof", &include, "--dry-run"];
        for options in [&as_tied[..], &as_tied[..6]] {
            refused(&tied.url(), options, &["does not let its saves be turned off", "+config|set"]);
        }

        let said = ends(&mut scene.deliver_to_new(&server, &["--dry-run"]), 0);
        says(&said, &["can be restarted on", "nothing was touched"]);
        let usage = |args: &[&str]| ends(&mut scene.stage.replica(&server.url(), scene.source.address, args), 2);
        says(&usage(&["--delivery", "file"]), &["--restart-command"]);
        says(&usage(&["--restart-command", "true"]), &["--delivery file"]);
        says(&usage(&["--delivery", "file", "--restart-command", "true", "--stay"]), &["--stay"]);
        assert_eq!(
            (server.fact("role").unwrap(), server.configured("save").unwrap()),
            ("master".into(), "3600 1".into())
        );
        assert!(!dump(&server).exists() && fs::read(&include).unwrap().is_empty());
        assert_eq!(number(&scene.primary, "sync_full"), 0, "not even a snapshot");
    }
}

#[test]
fn a_file_from_which_the_primary_would_not_continue_is_not_put_in_place() {
    for kind in require::kinds() {
        let start = quick(kind).config("repl-backlog-size", "16kb").start().unwrap();
        fill(&start, 1, 3);
        let mut scene = Scene::new(start, &["--eager"]);
        scene.source.wait_for_snapshot();
        write_past_the_backlog(&scene.primary);
        let server = scene.server(quick(kind));
        let said = ends(&mut scene.deliver_to_new(&server, &[]), 16);
        says(&said, &["cannot be pinned: the server's backlog is too small", "full sync", "repl-backlog-size"]);
        says(&said, &["not put in place"]);
        assert!(!said.contains("--allow-stale") && !dump(&server).exists() && !scene.wanted().exists(), "{said}");
        assert_eq!(
            (server.fact("role").unwrap(), server.configured("save").unwrap()),
            ("master".into(), "3600 1".into())
        );
    }
}

/// Bytes of values that are each longer than the primary's backlog.
const LONG_VALUE: usize = 3 << 20;

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_away_goes_on_although_clients_write_more_than_the_backlog_holds() {
    for kind in require::kinds() {
        let start = quick(kind).config("repl-backlog-size", "1mb").start().unwrap();
        let mut client = start.client().unwrap();
        // A history with bytes before the snapshot: of a replica that was there before.
        let before = Server::start(kind).unwrap();
        before.replicate(&start).unwrap();
        before.wait_for_link(LONG).unwrap();
        client.ok(&[b"SET".as_slice(), b"before", &vec![b'b'; 400 << 10]]).unwrap();
        drop(before);
        let scene = Scene::new(start, &[]);
        let ((copies, _), refused) = (syncs(&scene.primary), number(&scene.primary, "sync_partial_err"));
        let mut server = scene.server(quick(kind));
        let mut agent = scene.deliver_to_new(&server, &[]);
        scene.wait_for_the_command(&mut agent);
        for n in 0..5 {
            let value = vec![b'a' + n; LONG_VALUE];
            client.ok(&[b"SET".as_slice(), format!("long:{n}").as_bytes(), &value]).unwrap();
        }
        scene.restart(&mut server, &mut agent);
        let said = succeeds(&mut agent, &server);
        says(&said, &["keeps its stream from the snapshot on", "partial resynchronisation"]);
        assert_eq!(syncs(&scene.primary).0 - copies, 1, "{kind}: the source's copy\n{said}");
        assert_eq!(number(&scene.primary, "sync_partial_err"), refused, "{}", scene.primary.log());
        assert_same_data(&scene.primary, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_node_of_a_cluster_is_restarted_on_the_file_of_its_shard() {
    at_once(require::kinds(), |kind| {
        let mut cluster = start_cluster(None, kind, 3, 1);
        fill_cluster(&cluster, 2_000, 1);
        let stage = Stage::new();
        let source = stage.source(&cluster.shards[0].primary.url(), &[]);
        let (wanted, server) = (stage.folder().join("wanted"), &mut cluster.shards[0].replicas[0]);
        let command = format!("touch {0}; while [ -e {0} ]; do sleep 0.05; done", wanted.display());
        let options = ["--replace", "--delivery", "file", "--restart-command", &command];
        let mut agent = stage.replica(&server.url(), source.address, &options);
        wait_until("the restart command", LONG, || {
            assert!(agent.ended()?.is_none(), "{}", agent.output());
            Ok(if wanted.exists() { Ok(()) } else { Err(String::new()) })
        })
        .unwrap();
        server.stop(LONG).unwrap();
        server.restart().unwrap();
        fs::remove_file(&wanted).unwrap();
        let said = succeeds(&mut agent, server);
        let shard = &cluster.shards[0];
        assert_eq!(syncs(&shard.primary), (2, 1), "{kind}: its own first one, the source's\n{said}");
        cluster.wait_for_nodes(6).unwrap();
        wait_until("the same data", LONG, || {
            let (one, other) = (shard.primary.digest()?, shard.replicas[0].digest()?);
            Ok(if one == other { Ok(()) } else { Err(format!("{one} {other}")) })
        })
        .unwrap();
    });
}

/// The server is not restarted on the file of another data set, and the run goes on when the right source is back.
#[test]
#[ignore = "long: make test-all"]
fn a_source_that_is_replaced_by_that_of_another_data_set_gives_the_file_nothing() {
    for kind in require::kinds() {
        let scene = Scene::with_data(primary(kind));
        scene.primary.configure("rdb-key-save-delay", "2000").unwrap();
        let mut server = scene.server(quick(kind));
        let mut agent = scene.deliver_to_new(&server, &[]);
        agent.wait_for_event("snapshot_arrives", LONG).unwrap();
        let other = foreign(kind);
        let Scene { stage, primary, source } = scene;
        let source = replaced(&stage, source, &other, &[]);
        agent.wait_for_line(ANOTHER, LONG).unwrap();
        assert_eq!(number(&other, "sync_full"), 0, "{kind}: the foreign primary has forked");
        primary.configure("rdb-key-save-delay", "0").unwrap();
        let source = replaced(&stage, source, &primary, &[]);
        let scene = Scene { stage, primary, source };
        scene.restart(&mut server, &mut agent);
        succeeds(&mut agent, &server);
        assert_same_data(&scene.primary, &server);
        assert!(!has_foreign_data(&server), "{kind}");
    }
}

// A dry run says yes to what works and no to what fails, with the exit code of the sync, and changes nothing.

/// All that a run could change of a server: its settings, its users, its replication.
fn standing(server: &Server) -> String {
    let mut client = server.client().unwrap();
    let settings = client.call(&["CONFIG", "GET", "*"]).unwrap();
    let users = client.call(&["ACL", "LIST"]).unwrap();
    let replication = ["role", "master_replid", "master_repl_offset", "connected_slaves", "sync_full"];
    let replication = replication.map(|name| server.fact(name).unwrap());
    format!("{settings:?}\n{users:?}\n{replication:?} {}", client.int(&["DBSIZE"]).unwrap())
}

/// A stage, and options that both runs get.
struct Runs {
    stage: Stage,
    /// The login at the replica's server.
    more: Vec<String>,
}

impl Runs {
    fn new() -> Runs {
        Runs { stage: Stage::new(), more: Vec::new() }
    }

    /// Logs in at the replica's server as this user, whose password is `pw`.
    fn as_user(name: &str) -> Runs {
        let stage = Stage::new();
        let file = stage.secret("pw", "pw\n");
        Runs { more: ["--user", name, "--password-file", &file].map(str::to_owned).to_vec(), stage }
    }

    /// Runs with these options: dry, and then in earnest. Both end with this code. The dry run leaves the servers as
    /// they were. Returns what it said.
    #[track_caller]
    fn both(&self, at: std::net::SocketAddr, server: &Server, top: &Server, more: &[&str], code: i32) -> String {
        let before = [standing(server), standing(top)];
        let said = self.run(at, server, &[more, &["--dry-run"]].concat(), code);
        assert_eq!([standing(server), standing(top)], before, "the dry run has changed a server: {said}");
        self.run(at, server, more, code);
        said
    }

    #[track_caller]
    fn run(&self, at: std::net::SocketAddr, server: &Server, more: &[&str], code: i32) -> String {
        ends(&mut self.start(at, server, more), code)
    }

    fn start(&self, at: std::net::SocketAddr, server: &Server, more: &[&str]) -> Agent {
        let own: Vec<_> = self.more.iter().map(String::as_str).collect();
        let args = self.stage.replica_args(&server.url(), at, &[&own[..], &["--retry-for", "2s"], more].concat());
        let mut command = self.stage.remora(&args.iter().map(String::as_str).collect::<Vec<_>>());
        command.env(DISABLE, "1");
        Agent::run(command).unwrap()
    }

    /// Waits until a dry run is told what has just changed: facts of some 100 ms are fresh enough for a source.
    #[track_caller]
    fn until_it_is_seen(&self, at: std::net::SocketAddr, server: &Server, code: i32) {
        let seen = wait_until("a dry run with this code", LONG, || {
            let mut agent = self.start(at, server, &["--dry-run"]);
            let status = agent.wait(LONG)?;
            Ok(if status.code() == Some(code) { Ok(()) } else { Err(agent.output()) })
        });
        seen.unwrap();
    }
}

/// The rules of a user that makes its server a replica, without one of them.
fn without(rule: &str) -> String {
    let rules = "~* &* -@all +ping +info +replicaof +config|get +config|set +flushall +multi +exec +discard";
    rules.replace(&format!(" {rule}"), "")
}

#[test]
#[ignore = "long: make test-all"]
fn what_will_happen_is_said_and_is_in_the_json() {
    for kind in require::kinds() {
        let top = Server::builder(kind).config("repl-diskless-sync-delay", 3).start().unwrap();
        fill(&top, 8, 1);
        let runs = Runs::new();
        let source = runs.stage.source(&top.url(), &[]);
        let server = Server::start(kind).unwrap();
        let json = runs.stage.path("forecast.json");
        let said = runs.run(source.address, &server, &["--dry-run", "--json", &json], 0);
        says(&said, &["can become a replica of", "transport   shm", "protection  local: shared memory"]);
        says(
            &said,
            &[
                "whole in the source's memory",
                "fork        one, after 3 s",
                "--tune-server",
                "(a pin)",
                "time        about",
            ],
        );
        let forecast: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(forecast["transport"], "shm");
        assert_eq!(forecast["times"]["delay_seconds"], 3.0);
        assert!(forecast["bytes_per_second"].as_u64().unwrap() > 0);
        let bytes = forecast["snapshot"]["bytes"].as_u64().unwrap();
        assert!((8 << 20..16 << 20).contains(&bytes), "{bytes}");
        assert_eq!(forecast["no_pin_because"], Value::Null);
        assert_eq!(forecast["not_checked"], Value::Array(Vec::new()));
        // The transport that is asked for is the one that is told of.
        let said = runs.run(source.address, &server, &["--dry-run", "--transport", "tcp"], 0);
        says(&said, &["transport   tcp", "protection  plaintext on loopback"]);

        succeeds(&mut runs.stage.replica(&server.url(), source.address, &[]), &server);
        let other = Server::start(kind).unwrap();
        let said = runs.run(source.address, &other, &["--dry-run"], 0);
        says(&said, &["fork        none: the source has the snapshot", "0.0 s until the fork"]);
        assert_eq!(syncs(&top).0, 1, "a dry run costs no copy");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_window_and_a_backlog_that_cannot_be_pinned_are_told() {
    for kind in require::kinds() {
        let top = quick(kind).config("repl-backlog-size", "64kb").start().unwrap();
        fill(&top, 20, 1);
        let runs = Runs::new();
        let source = runs.stage.source(&top.url(), &["--memory", "16MiB", "--tune-server"]);
        let server = Server::start(kind).unwrap();
        let said = runs.run(source.address, &server, &["--dry-run"], 0);
        says(
            &said,
            &["through a window of", "fork        one, at once", "there is no pin: the server's backlog is too small"],
        );
    }
}

#[test]
fn a_transport_that_is_not_there_is_refused_by_both_runs() {
    let Some(kind) = require::kinds().into_iter().next() else { return };
    let (top, server) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
    let runs = Runs::new();
    let source = runs.stage.source(&top.url(), &["--no-shm"]);
    let said = runs.both(source.address, &server, &top, &["--transport", "verbs"], 3);
    says(&said, &["as --transport asks", "verbs: ", DISABLE]);
    let said = runs.both(source.address, &server, &top, &["--transport", "shm"], 5);
    says(&said, &["the source does not offer it: it was started with --no-shm"]);
    assert_eq!(number(&top, "sync_full"), 0);
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_whose_user_may_not_take_a_snapshot_says_so_before() {
    for kind in require::kinds() {
        for (acl, lacks) in [("", "+psync"), ("+acl|dryrun +acl|whoami", "+psync"), ("", "+replconf")] {
            let rules =
                format!("-@all +ping +info +replconf +psync +config|get {acl}").replace(&format!("{lacks} "), "");
            let top = quick(kind).user("remora", "pw", &rules).start().unwrap();
            fill_keys(&top, 10, "x");
            let runs = Runs::new();
            let file = runs.stage.secret("pw", "pw\n");
            let source = runs.stage.source(&top.url(), &["--user", "remora", "--password-file", &file]);
            let name = lacks.trim_start_matches('+').to_ascii_uppercase();
            says(&source.agent.output(), &["no replica can be served until this is changed", &name]);
            let server = Server::start(kind).unwrap();
            let said = runs.both(source.address, &server, &top, &[], 5);
            says(&said, &["cannot take a snapshot", &name, "NOPERM", "+replconf +psync"]);
            assert_eq!(syncs(&top), (0, 0), "the question costs no copy");
            // It is seen at once when it is granted.
            top.client().unwrap().ok(&["ACL", "SETUSER", "remora", lacks]).unwrap();
            says(&runs.both(source.address, &server, &top, &[], 0), &["can become a replica of"]);
            assert_same_data(&top, &server);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_beside_a_replica_that_has_begun_to_evict_says_so_before() {
    for kind in require::kinds() {
        let top = primary(kind).start().unwrap();
        fill_keys(&top, 10, "x");
        let captured = quick(kind).start().unwrap();
        captured.replicate(&top).unwrap();
        captured.wait_for_link(LONG).unwrap();
        let runs = Runs::new();
        let announced = top.address().to_string();
        let source = runs.stage.source(&captured.url(), &["--announce", &announced]);
        captured.configure("replica-ignore-maxmemory", "no").unwrap();
        captured.configure("maxmemory", "100mb").unwrap();
        let server = Server::start(kind).unwrap();
        runs.until_it_is_seen(source.address, &server, 5);
        let said = runs.both(source.address, &server, &top, &[], 5);
        says(&said, &["cannot take a snapshot", "replica-ignore-maxmemory yes"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_would_not_follow_is_refused_by_both_runs() {
    for kind in require::kinds() {
        let top = quick(kind).start().unwrap();
        fill_keys(&top, 10, "x");
        let source = Stage::new().source(&top.url(), &[]);
        let users: [(Builder, &str); 3] = [
            (quick(kind).user("remora", "pw", &without("+replicaof")), "NOPERM"),
            (quick(kind).user("remora", "pw", &format!("{} +acl", without("+replicaof"))), "NOPERM"),
            (
                quick(kind).config("rename-command", "REPLICAOF \"\"").user("remora", "pw", "~* &* +@all"),
                "unknown command",
            ),
        ];
        for (builder, why) in users {
            let server = builder.start().unwrap();
            let mut runs = Runs::as_user("remora");
            runs.stage.token = source.token().to_owned();
            let said = runs.both(source.address, &server, &top, &[], 4);
            says(&said, &["REPLICAOF", why, "was not touched"]);
            crate::kit::assert_untouched(&server);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_without_flushall_or_a_configuration_to_write_is_told_of() {
    for kind in require::kinds() {
        let top = quick(kind).start().unwrap();
        fill_keys(&top, 10, "x");
        let source = Stage::new().source(&top.url(), &[]);
        let runs = |server: &Server, more: &[&str], code| {
            let mut runs = Runs::as_user("remora");
            runs.stage.token = source.token().to_owned();
            runs.both(source.address, server, &top, more, code)
        };
        let server = quick(kind).user("remora", "pw", &format!("{} +acl", without("+flushall"))).start().unwrap();
        let said = runs(&server, &["--rewrite-config"], 4);
        says(&said, &["CONFIG REWRITE", "NOPERM", "+config|rewrite"]);
        let said = runs(&server, &[], 0);
        says(&said, &["WARN", "--on-failure empty", "FLUSHALL", "can become a replica of"]);
        assert_same_data(&top, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_does_not_permit_the_server_to_replicate_is_found_before() {
    for kind in require::kinds() {
        let top = quick(kind).user("follower", "pw", "-@all +ping +info +replconf").start().unwrap();
        fill_keys(&top, 10, "x");
        let runs = Runs::new();
        let source = runs.stage.source(&top.url(), &[]);
        let server = quick(kind).master_auth(Some("follower"), "pw").start().unwrap();
        let said = runs.both(source.address, &server, &top, &[], 3);
        says(&said, &["does not permit the user of", "+psync +replconf +ping", "psync"]);
        // Without INFO, the version is not known, and the question is not asked.
        top.client().unwrap().ok(&["ACL", "SETUSER", "follower", "-info", "+psync"]).unwrap();
        let said = runs.both(source.address, &server, &top, &[], 0);
        says(&said, &["not checked whether", "permits PSYNC to the server's user", "what the primary says of itself"]);
        assert_same_data(&top, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_primary_is_tried_from_the_address_that_the_server_connects_from() {
    for kind in require::kinds() {
        let top = quick(kind).start().unwrap();
        fill_keys(&top, 10, "x");
        let runs = Runs::new();
        // As a firewall that lets this host's usual address in, and not the server's.
        let gate = gate(top.address(), |from| from == IpAddr::V4(Ipv4Addr::LOCALHOST)).to_string();
        let source = runs.stage.source(&top.url(), &["--announce", &gate]);
        let server = quick(kind).config("bind-source-addr", "127.0.0.77").start().unwrap();
        let said = runs.both(source.address, &server, &top, &[], 4);
        says(&said, &["(bind-source-addr)", "from 127.0.0.77", &gate]);
        crate::kit::assert_untouched(&server);
        // A server connects without a source address that it cannot use, such as one of another family.
        for usable in ["127.0.0.1", "::1"] {
            let server = quick(kind).config("bind-source-addr", usable).start().unwrap();
            runs.both(source.address, &server, &top, &[], 0);
            assert_same_data(&top, &server);
        }
    }
}

#[test]
fn a_server_of_another_kind_is_taken_or_refused_by_both_runs() {
    let kinds = require::kinds();
    for (of_primary, of_server) in kinds.iter().flat_map(|one| kinds.iter().map(move |other| (*one, *other))) {
        let (top, server) = (quick(of_primary).start().unwrap(), quick(of_server).start().unwrap());
        fill_keys(&top, 10, "x");
        let mut client = top.client().unwrap();
        client.call(&["HSET", "hash", "field", "value"]).unwrap();
        // Answered with an error by servers whose fields do not expire.
        let expires = client.call(&["HEXPIRE", "hash", "1000", "FIELDS", "1", "field"]).is_ok();
        let is_older = expires && of_primary != of_server;
        let runs = Runs::new();
        let source = runs.stage.source(&top.url(), &[]);
        let said = runs.both(source.address, &server, &top, &[], if is_older { 3 } else { 0 });
        assert_eq!(said.contains("can become a replica of"), !is_older, "{said}");
        if !is_older {
            assert_same_data(&top, &server);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn both_runs_end_with_the_same_code_for_what_was_refused_before() {
    for kind in require::kinds() {
        let top = quick(kind).config("databases", 20).start().unwrap();
        fill(&top, 10, 1);
        let runs = Runs::new();
        let source = runs.stage.source(&top.url(), &[]);
        let large = || quick(kind).config("databases", 20);
        let cases: [(Builder, &[&str], i32); 6] = [
            (large(), &[], 0),
            (quick(kind), &[], 3),
            (quick(kind).cluster(), &["--delivery", "link"], 3),
            (large().config("replica-ignore-maxmemory", "no").config("maxmemory", "4mb"), &[], 3),
            (large().master_auth(None, "wrong"), &[], 3),
            (large().config("rename-command", "CONFIG \"\""), &[], 4),
        ];
        for (builder, more, code) in cases {
            let server = builder.start().unwrap();
            let said = runs.run(source.address, &server, &[more, &["--dry-run"]].concat(), code);
            let done = runs.run(source.address, &server, more, code);
            assert_eq!(said.contains("can become"), code == 0, "{said}\n{done}");
        }
        let server = large().start().unwrap();
        fill_keys(&server, 1, "own");
        runs.both(source.address, &server, &top, &[], 3);
        runs.both(source.address, &server, &top, &["--replace"], 0);
    }
}
