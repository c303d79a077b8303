//! A server whose replication history changes while a source captures it: it is shut down and started again, or
//! promoted. Replicas must get nothing of the new history under the replid of the old one, and must not need a full
//! copy.

use std::net::SocketAddr;
use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, assert_same_data, fill_every_type, require};
use rustix::process::Signal;

use crate::kit::{
    LONG, Scene, Source, Stage, at_once, ends, fill, fill_keys, number, primary, quick, says, steady_writer, strs,
    succeeds, syncs,
};

/// A server that follows `source`'s stream through an agent that stays.
fn staying(source: &Source, kind: Kind) -> (Server, Agent) {
    let server = Server::start(kind).unwrap();
    let mut agent = source.replica(&server, &["--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    (server, agent)
}

/// A primary with every type in it.
fn filled(kind: Kind) -> Server {
    let server = primary(kind).config("repl-ping-replica-period", 3600).start().unwrap();
    fill_every_type(&mut server.client().unwrap(), 31).unwrap();
    server
}

/// A replica of `primary`, by the servers' own replication.
fn native_replica(primary: &Server, name: &str, value: &str) -> Server {
    let plan = crate::kit::primary(primary.kind()).config("repl-ping-replica-period", 3600).config(name, value);
    let server = plan.start().unwrap();
    server.replicate(primary).unwrap();
    server.wait_for_link(LONG).unwrap();
    server
}

/// Waits until the agent has handed its server over. If the agent feeds its server instead, so that `fed` is true,
/// stops the agent as an operator would.
fn handed_over(agent: &mut Agent, fed: impl Fn() -> bool) {
    let look = || {
        let done = agent.ended()?.is_some() || fed();
        Ok(if done { Ok(()) } else { Err("neither handed over nor fed".to_owned()) })
    };
    wait_until("the server to be handed over", LONG, look).unwrap();
    agent.signal(Signal::TERM).unwrap();
    agent.wait_for_success(LONG).unwrap();
}

fn set(server: &Server, database: &str, key: &str) {
    let mut client = server.client().unwrap();
    client.ok(&["SELECT", database]).unwrap();
    client.ok(&["SET", key, "1"]).unwrap();
}

fn exists(server: &Server, database: &str, key: &str) -> bool {
    let mut client = server.client().unwrap();
    client.ok(&["SELECT", database]).unwrap();
    client.int(&["EXISTS", key]).unwrap() == 1
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_is_shut_down_and_started_again_continues_its_replicas() {
    for kind in require::kinds() {
        let mut primary = filled(kind);
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&primary, "0", "before");
        // A primary that starts again has no backlog: it continues only replicas that had received everything.
        assert_same_data(&primary, &server);
        primary.restart_saved(LONG).unwrap();
        for number in 0..100 {
            set(&primary, "3", &format!("after {number}"));
        }
        handed_over(&mut agent, || exists(&server, "3", "after 99"));
        assert_same_data(&primary, &server);
        assert_eq!(number(&primary, "sync_full"), 0, "{kind}: a full copy since the restart");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), primary.port().to_string());
    }
}

/// Well below the minute for which a source tries to resume a broken stream.
const SOON: Duration = Duration::from_secs(30);

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_starts_again_with_older_data_is_not_asked_again_and_again_for_the_old_stream() {
    at_once(require::kinds(), |kind| {
        let mut primary = filled(kind);
        primary.client().unwrap().ok(&["SAVE"]).unwrap();
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&primary, "0", "not saved");
        assert_same_data(&primary, &server);
        // Valkey cannot write the data for a replica that does not say its version, since fields of hashes expire: it
        // answers +FULLRESYNC and closes the connection.
        primary.restart().unwrap();
        source.agent.wait_for_line("no longer reaches back", SOON).unwrap();
        // The primary would not continue the server, which loads another snapshot of the source.
        agent.wait_for_event("loading_again", LONG).unwrap();
        wait_until("the server to be fed again", LONG, || {
            let times = agent.output().matches("in step; staying").count();
            Ok(if times == 2 { Ok(()) } else { Err(agent.output()) })
        })
        .unwrap();
        assert_same_data(&primary, &server);
        assert!(!exists(&server, "0", "not saved"), "{kind}");
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_same_data(&primary, &server);
        // The answer to the source, and its snapshot.
        assert!(number(&primary, "sync_full") <= 2, "{kind}: {}", primary.log());
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_joins_after_the_change_gets_a_snapshot_of_the_new_history() {
    for kind in require::kinds() {
        let mut primary = filled(kind);
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (_server, mut agent) = staying(&source, kind);
        primary.restart_saved(LONG).unwrap();
        set(&primary, "0", "after");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        agent.wait_for_success(LONG).unwrap();

        let late = Server::start(kind).unwrap();
        source.replicate(&late, &[]);
        let agreement = assert_same_data(&primary, &late);
        assert_eq!(source.snapshots_taken(), 2, "{kind}");
        assert_eq!(source.status()["generation"]["replid"], agreement.replid, "{kind}");
        assert_eq!(number(&primary, "sync_full"), 1, "{kind}: the second snapshot's alone");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_captured_replica_that_is_promoted_does_not_give_its_new_writes_to_replicas_of_its_former_primary() {
    for kind in require::kinds() {
        let top = filled(kind);
        let captured = native_replica(&top, "repl-diskless-sync", "yes");
        let announced = top.address().to_string();
        let mut source = Source::start(&captured, &["--memory", "128MiB", "--announce", &announced]);
        let (server, mut agent) = staying(&source, kind);
        set(&top, "0", "before");
        assert_same_data(&top, &captured);
        let before = syncs(&top);

        // From here on the two servers have separate histories, with different bytes at the same offsets.
        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "0", "b-only-key");
        set(&top, "1", "a-only-key");
        set(&top, "1", "one more");
        handed_over(&mut agent, || exists(&server, "0", "b-only-key"));

        assert_same_data(&top, &server);
        assert!(exists(&server, "1", "a-only-key") && !exists(&server, "0", "b-only-key"), "{kind}");
        assert_eq!(server.fact("master_port").unwrap(), top.port().to_string());
        assert_eq!(syncs(&top), (before.0, before.1 + 1), "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_captured_replica_that_is_promoted_takes_over_the_servers_that_were_fed_from_it() {
    for (kind, two_channels) in [(require::redis(), "no"), (require::valkey(), "no"), (require::valkey(), "yes")] {
        let Some(kind) = kind else { continue };
        let top = filled(kind);
        let option = if kind == Kind::Valkey9 { "dual-channel-replication-enabled" } else { "repl-diskless-sync" };
        let captured = native_replica(&top, option, if kind == Kind::Valkey9 { two_channels } else { "yes" });
        let mut source = Source::start(&captured, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&top, "0", "before");
        assert_same_data(&top, &captured);
        let before = syncs(&captured);

        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "2", "after");
        handed_over(&mut agent, || exists(&server, "2", "after"));

        assert_same_data(&captured, &server);
        assert!(exists(&server, "2", "after"), "{kind}");
        assert_eq!(number(&captured, "sync_full"), before.0, "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), captured.port().to_string());
    }
}

#[test]
fn a_promotion_in_the_middle_of_writes_loses_none_of_them() {
    for kind in require::kinds() {
        let top = filled(kind);
        let captured = native_replica(&top, "repl-diskless-sync", "yes");
        let mut source = Source::start(&captured, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        let before = syncs(&captured);
        let writer = steady_writer(&top);
        writer.wait_for(2_000);
        // The stream may be cut in the middle of a command or of a transaction.
        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "2", "after");
        handed_over(&mut agent, || exists(&server, "2", "after"));
        writer.stop().unwrap();

        assert_same_data(&captured, &server);
        assert_eq!(number(&captured, "sync_full"), before.0, "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
    }
}

// The source's name leads to the source of another data set in the middle of a run: its address was given to another
// host, or the name stands for two sources. Nothing of it is taken, its primary does not fork, and the run goes on
// when the name leads to the right source again.

/// What a source of another data set is refused with.
pub(crate) const ANOTHER: &str = "is the source of another data set";

/// Random data in the right primary, in MiB: 32 keys.
const MEBIBYTES: usize = 4;

/// How long the right primary takes for each key of its snapshot, in microseconds: three seconds in all.
const KEY_TIME: &str = "100000";

/// Slots after which a test interferes: a quarter of the snapshot.
const A_QUARTER: u64 = 16;

/// A primary whose snapshots take seconds.
fn slow(kind: Kind) -> Server {
    let right = primary(kind).start().unwrap();
    fill(&right, MEBIBYTES, 1);
    right.configure("rdb-key-save-delay", KEY_TIME).unwrap();
    right
}

/// A primary with other data.
pub(crate) fn foreign(kind: Kind) -> Server {
    let server = quick(kind).start().unwrap();
    server.client().unwrap().ok(&["SET", "foreign", "data"]).unwrap();
    server
}

pub(crate) fn has_foreign_data(server: &Server) -> bool {
    server.client().unwrap().int(&["EXISTS", "foreign"]).is_ok_and(|count| count > 0)
}

fn history(server: &Server) -> String {
    server.fact("master_replid").unwrap()
}

/// Kills a source, and starts one of another server at its address.
pub(crate) fn replaced(stage: &Stage, mut source: Source, by: &Server, more: &[&str]) -> Source {
    let address: SocketAddr = source.address;
    source.agent.kill().unwrap();
    stage.source_at(&address.to_string(), None, &by.url(), more)
}

/// An agent whose server has got a part of the snapshot.
fn in_the_middle(source: &Source, server: &Server, more: &[&str]) -> Agent {
    let mut agent = source.replica(server, more);
    source.wait_for_slots(&mut agent, A_QUARTER);
    agent
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_in_the_middle_of_its_load_gets_nothing_of_it_and_is_in_step_once_the_right_source_is_back() {
    for (kind, stay) in require::kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let (stage, right, other) = (Stage::new(), slow(kind), foreign(kind));
        let server = Server::start(kind).unwrap();
        let source = stage.source(&right.url(), &[]);
        let more: &[&str] = if stay { &["--stay"] } else { &[] };
        let mut agent = in_the_middle(&source, &server, more);
        let before = history(&right);
        let source = replaced(&stage, source, &other, &[]);
        let line = agent.wait_for_line(ANOTHER, LONG).unwrap();
        says(&line, &[&before, &history(&other), &other.url(), &right.url(), &source.address.to_string()]);
        assert_eq!(number(&other, "sync_full"), 0, "the foreign primary has forked");
        right.configure("rdb-key-save-delay", "0").unwrap();
        let _source = replaced(&stage, source, &right, &[]);
        if stay {
            agent.wait_for_event("in_step", LONG).unwrap();
            assert!(!has_foreign_data(&server), "{kind}");
            agent.signal(Signal::TERM).unwrap();
        }
        succeeds(&mut agent, &server);
        assert_same_data(&right, &server);
        assert!(!has_foreign_data(&server), "{kind}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_sync_whose_right_source_does_not_come_back_fails_by_its_name_and_the_server_has_nothing_foreign() {
    at_once(require::kinds(), |kind| {
        let (stage, right, other) = (Stage::new(), slow(kind), foreign(kind));
        let server = Server::start(kind).unwrap();
        let source = stage.source(&right.url(), &[]);
        let mut agent = in_the_middle(&source, &server, &["--stay", "--retry-for", "3s"]);
        let _foreign = replaced(&stage, source, &other, &[]);
        let said = ends(&mut agent, 5);
        says(&said, &[ANOTHER, "--retry-for", &history(&other)]);
        wait_until("the server to answer", LONG, || {
            let loading = server.info("persistence")?.get("loading").unwrap_or_default().to_owned();
            Ok(if loading == "0" { Ok(()) } else { Err(loading) })
        })
        .unwrap();
        assert!(!has_foreign_data(&server), "{kind}");
        assert_eq!(number(&other, "sync_full"), 0, "the foreign primary has forked");
    });
}

/// `--expect-primary` is for every conversation: the address that a later source names counts as that of the first.
#[test]
#[ignore = "long: make test-all"]
fn a_later_source_that_names_an_unexpected_primary_is_refused_though_its_history_is_right() {
    let Some(kind) = require::redis() else { return };
    let (stage, right) = (Stage::new(), slow(kind));
    let server = Server::start(kind).unwrap();
    let source = stage.source(&right.url(), &[]);
    let expected = format!("127.0.0.1:{}", right.port());
    let mut agent = in_the_middle(&source, &server, &["--expect-primary", &expected, "--retry-for", "3s"]);
    let elsewhere = format!("127.0.0.3:{}", right.port());
    let _other = replaced(&stage, source, &right, &["--announce", &elsewhere]);
    says(&ends(&mut agent, 5), &[&elsewhere, &format!("--expect-primary names {expected}")]);
}

/// The primary may begin a history that has nothing in common with the former one. It says so itself.
#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_lost_its_data_is_still_the_primary() {
    for kind in require::kinds() {
        let (stage, mut right) = (Stage::new(), slow(kind));
        let server = Server::start(kind).unwrap();
        let source = stage.source(&right.url(), &[]);
        let mut agent = in_the_middle(&source, &server, &[]);
        let before = history(&right);
        right.restart().unwrap();
        fill_keys(&right, 10, "new");
        assert_ne!(history(&right), before);
        succeeds(&mut agent, &server);
        assert_same_data(&right, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_fetch_and_a_backup_in_the_middle_take_nothing_of_it_and_go_on_when_the_right_source_is_back() {
    at_once(require::kinds(), |kind| {
        for command in ["fetch", "backup"] {
            let scene = Scene::new(slow(kind), &[]);
            let to = scene.stage.path(if command == "fetch" { "dump.rdb" } else { "backups" });
            let mut agent = scene.start(command, &to, &[]);
            agent.wait_for_event("snapshot_arrives", LONG).unwrap();
            let args = strs_of(&scene, command, &to);
            let Scene { stage, primary, source } = scene;
            let other = foreign(kind);
            let source = replaced(&stage, source, &other, &[]);
            says(&agent.wait_for_line(ANOTHER, LONG).unwrap(), &[&history(&other), &primary.url()]);
            assert_eq!(number(&other, "sync_full"), 0, "{command}: the foreign primary has forked");
            primary.configure("rdb-key-save-delay", "0").unwrap();
            let source = replaced(&stage, source, &primary, &[]);
            agent.wait_for_success(LONG).unwrap();
            // And one whose right source does not come back.
            primary.configure("rdb-key-save-delay", KEY_TIME).unwrap();
            source.stop();
            let source = stage.source_at(&args.1, None, &primary.url(), &[]);
            let to = stage.path("another");
            let mut again = args.0.clone();
            let at = again.iter().position(|arg| arg == "--to").unwrap();
            again[at + 1].clone_from(&to);
            again.extend(["--retry-for".to_owned(), "2s".to_owned()]);
            let mut agent = stage.start(None, &strs(&again));
            agent.wait_for_event("snapshot_arrives", LONG).unwrap();
            let _foreign = replaced(&stage, source, &other, &[]);
            says(&ends(&mut agent, 5), &[ANOTHER]);
            let rdb = std::fs::read_dir(&to).map_or(0, |folder| {
                folder.filter(|entry| entry.as_ref().is_ok_and(|entry| is_a_snapshot(&entry.path()))).count()
            });
            assert_eq!((rdb, std::path::Path::new(&to).is_file()), (0, false), "{command}");
        }
    });
}

fn is_a_snapshot(path: &std::path::Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.ends_with(".rdb") && !name.starts_with('.')
}

/// The arguments of such a command, and the source's address.
fn strs_of(scene: &Scene, command: &str, to: &str) -> (Vec<String>, String) {
    (scene.args(command, to, &[]), scene.source.address.to_string())
}

#[test]
fn a_backup_with_its_journal_records_nothing_of_it_and_goes_on_with_the_right_one() {
    for kind in require::kinds() {
        let right = primary(kind).start().unwrap();
        fill_keys(&right, 100, "right");
        let scene = Scene::new(right, &[]);
        let to = scene.stage.path("backups");
        let mut agent = scene.start("backup", &to, &["--journal"]);
        agent.wait_for_line("the commands since are recorded", LONG).unwrap();
        let Scene { stage, primary, source } = scene;
        let other = foreign(kind);
        let source = replaced(&stage, source, &other, &[]);
        says(&agent.wait_for_line(ANOTHER, LONG).unwrap(), &[&history(&other), &history(&primary)]);
        assert_eq!(number(&other, "sync_full"), 0, "the foreign primary has forked");
        let source = replaced(&stage, source, &primary, &["--eager"]);
        primary.client().unwrap().ok(&["SET", "after", "1"]).unwrap();
        source.wait_for_status("the backup to record again", |status| {
            status["replicas"].as_array().is_some_and(|replicas| replicas.iter().any(|one| one["phase"] == "stay"))
        });
        // A signal before a new folder has its name would find a snapshot that is not whole.
        wait_until("the folders to be begun", LONG, || {
            let said = agent.output();
            let count = |text: &str| said.matches(text).count();
            let is_done = count("the commands since are recorded") > count("a new folder begins");
            Ok(if is_done { Ok(()) } else { Err(said) })
        })
        .unwrap();
        agent.signal(Signal::TERM).unwrap();
        ends(&mut agent, 0);
        let names = std::fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        for name in names.filter(|name| !name.starts_with('.')) {
            assert!(!name.contains(&history(&other)[..8]), "{name} is of the foreign data set");
        }
    }
}
