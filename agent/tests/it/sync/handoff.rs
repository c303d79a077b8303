//! The hand-off finds the right primary and address, waits where it must, and restores every setting; also when another
//! client changes the server meanwhile, and under writes that the primary's backlog could never hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{iter, thread};

use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, Way, assert_untouched, at_once, ends, fill_keys, follows, kinds_and_module, load, load_slowly,
    load_small, number, primary, quick, says, succeeds, syncs, wait_until_loading, way_of_loading, with_or_without,
};
use crate::sync::attend::{self, handed_over};
use remora_lab::server::{Builder, wait_until};
use remora_lab::{
    Agent, Client, Host, Kind, Net, Server, Tls, assert_same_data, fill_every_type, require, scratch, server,
};
use remora_redis::resp::Frame;

const PASSWORD: &str = "correct-horse";

fn one_of(kind: Option<Kind>) -> Option<(Kind, Stage)> {
    kind.map(|kind| (kind, Stage::new()))
}

#[test]
fn an_announced_address_is_where_the_server_is_handed_to() {
    let Some((kind, stage)) = one_of(require::valkey()) else { return };
    let (primary, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 100, "x");
    let announced = format!("localhost:{}", primary.port());
    let source = stage.source(&primary.url(), &["--announce", &announced]);
    succeeds(&mut stage.replica(&replica.url(), source.address, &[]), &replica);
    assert_eq!(follows(&replica), announced);
    assert_same_data(&primary, &replica);
}

#[test]
#[ignore = "long: make test-all"]
fn a_wrong_announcement_is_found_out_before_anything_is_touched() {
    let Some((kind, stage)) = one_of(require::redis()) else { return };
    let (primary, replica, other) =
        (quick(kind).start().unwrap(), Server::start(kind).unwrap(), Server::start(kind).unwrap());
    // A server that is not there may come.
    let wrong: [(String, &[&str], i32); 3] = [
        (other.address().to_string(), &["is not the primary", "--announce"], 3),
        (replica.address().to_string(), &["is the replica's own server", "--announce"], 3),
        (format!("127.0.0.1:{}", scratch::free_port().unwrap()), &["can't be reached", "--announce"], 4),
    ];
    for (announced, words, code) in wrong {
        let source = stage.source(&primary.url(), &["--announce", &announced]);
        let said = ends(&mut stage.replica(&replica.url(), source.address, &["--retry-for", "1s"]), code);
        says(&said, &[&announced]);
        says(&said, words);
        assert_untouched(&replica);
        assert_eq!(number(&primary, "sync_full"), 0);
    }
}

/// A primary on a separate host, which its source knows by `url`, and a replica on another host.
fn across_hosts(kind: Kind, url: impl Fn(&Server) -> String, primary: impl Fn(Builder, &Host) -> Builder) {
    let (net, stage) = (Net::new().unwrap(), Stage::new());
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let primary = primary(quick(kind).on(&here), &here).start().unwrap();
    let replica = Server::builder(kind).on(&there).start().unwrap();
    fill_keys(&primary, 100, "x");
    let source = stage.source_on(&here, &url(&primary), &[]);
    succeeds(&mut stage.replica_on(&there, &replica.url(), source.address, &[]), &replica);
    assert_eq!(follows(&replica), format!("{}:{}", here.address(), primary.port()));
    assert_same_data(&primary, &replica);
    assert_eq!(syncs(&primary), (1, 1));
}

#[test]
fn a_primary_known_by_loopback_is_followed_at_the_host_by_which_the_source_was_reached() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let bind = |builder: Builder, host: &Host| builder.config("bind", format!("{} 127.0.0.1", host.address()));
    across_hosts(kind, |primary| format!("redis://127.0.0.1:{}", primary.port()), bind);
}

#[test]
fn a_primary_known_by_its_socket_is_followed_at_the_host_by_which_the_source_was_reached() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::valkey() else { return };
    across_hosts(kind, |primary| primary.unix_url().unwrap(), |builder, _| builder.unix_socket());
}

#[test]
fn a_server_with_the_right_masterauth_is_handed_over() {
    for kind in require::kinds() {
        let stage = Stage::new();
        // As the default user on one server and as a named user on the other, with the rules that replication needs.
        let (primary, user) = match kind {
            Kind::Redis7 => (quick(kind).require_pass(PASSWORD), None),
            Kind::Valkey9 => {
                let rules = "-@all +psync +replconf +ping";
                (quick(kind).without_default_user().user("follower", "pw", rules), Some("follower"))
            }
        };
        let primary = primary.user("remora", "pw", "+@all ~* &*").start().unwrap();
        let password = if user.is_some() { "pw".to_owned() } else { PASSWORD.to_owned() };
        let replica = Server::builder(kind).master_auth(user, &password).start().unwrap();
        fill_keys(&primary, 100, "x");
        let file = stage.secret("password", "pw");
        let source = stage.source(&primary.url(), &["--user", "remora", "--password-file", &file]);
        succeeds(&mut stage.replica(&replica.url(), source.address, &[]), &replica);
        assert_same_data(&primary, &replica);
        assert_eq!(number(&primary, "sync_full"), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_masterauth_that_is_missing_wrong_or_too_much_is_named_before_anything_is_touched() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let guarded = || quick(kind).require_pass("pw").user("known", "pw", "+@all ~* &*").start().unwrap();
        let plain = || Server::builder(kind);
        type Case = (Server, Builder, &'static [&'static str]);
        // As the link of another agent has it, which works on the server or was killed.
        let secret = "0123456789abcdef".repeat(4);
        let linked = || plain().master_auth(None, &secret);
        let cases: [Case; 6] = [
            (guarded(), linked(), &["another remora replica's link", "wait until it has ended", "--state-dir"]),
            (
                quick(kind).start().unwrap(),
                linked(),
                &["another remora replica's link", "puts the server's own masterauth back"],
            ),
            (guarded(), plain(), &["wants a password", "masterauth"]),
            (guarded(), plain().master_auth(None, "wrong"), &["does not accept masterauth"]),
            (
                guarded(),
                plain().master_auth(Some("known"), "wrong"),
                &["does not accept masterauth", "masteruser known"],
            ),
            (quick(kind).start().unwrap(), plain().master_auth(None, "pw"), &["has no password", "clear masterauth"]),
        ];
        for (primary, replica, words) in cases {
            let replica = replica.start().unwrap();
            let file = stage.secret("password", "pw");
            let is_open = primary.configured("requirepass").unwrap().is_empty();
            let way_in: &[&str] = if is_open { &[] } else { &["--password-file", &file] };
            let source = stage.source(&primary.url(), way_in);
            let said = ends(&mut stage.replica(&replica.url(), source.address, &[]), 3);
            says(&said, words);
            says(&said, &[&replica.address().to_string(), &primary.address().to_string()]);
            assert_untouched(&replica);
            assert_eq!(number(&primary, "sync_full"), 0);
        }
    }
}

#[test]
fn users_with_only_the_rules_that_the_help_names_suffice() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let rules = |command: &str| {
            let help = stage.end(&[command, "--help"], 0);
            let lines: Vec<&str> = help.lines().skip_while(|line| !line.contains("ACL rules")).collect();
            lines.iter().find(|line| line.trim().starts_with('+')).unwrap().trim().to_owned()
        };
        let primary = quick(kind).user("remora", "pw", &format!("-@all {}", rules("source"))).start().unwrap();
        let replica =
            Server::builder(kind).user("remora", "pw", &format!("-@all {}", rules("replica"))).start().unwrap();
        fill_keys(&primary, 100, "x");
        let file = stage.secret("password", "pw");
        let login = ["--user", "remora", "--password-file", &file];
        let source = stage.source(&primary.url(), &login);
        succeeds(&mut stage.replica(&replica.url(), source.address, &login), &replica);
        assert_same_data(&primary, &replica);
        for (server, rules) in [(&primary, "source"), (&replica, "replica")] {
            let denied = server.client().unwrap().list(&["ACL", "LOG"]).unwrap();
            assert!(denied.is_empty(), "{rules}: {denied:?}");
        }
    }
}

/// Certificates, and a server that replicates over TLS only.
fn with_tls(stage: &Stage) -> (Tls, impl Fn(Builder) -> Server) {
    let (server, _) = server::certificates(stage.folder(), &[]).unwrap();
    let files = server.clone();
    let start = move |builder: Builder| builder.tls(files.clone()).config("tls-replication", "yes").start().unwrap();
    (server, start)
}

#[test]
fn a_server_that_replicates_by_tls_is_served_and_handed_over_by_tls() {
    let Some((kind, stage)) = one_of(require::redis().filter(|kind| kind.speaks_tls())) else { return };
    let (files, start) = with_tls(&stage);
    let (primary, replica) = (start(quick(kind)), start(Server::builder(kind)));
    fill_keys(&primary, 2000, "x");
    let (ca, cert, key) = (path(&files.ca), path(&files.certificate), path(&files.key));
    let source = stage.source(&primary.tls_url().unwrap(), &["--tls-ca", &ca]);
    let link = ["--link-cert", &cert, "--link-key", &key];
    // Over TLS to the replica's server, and then over its plain port: the server itself says what it trusts.
    let by_tls = [&link[..], &["--tls-ca", &ca]].concat();
    succeeds(&mut stage.replica(&replica.tls_url().unwrap(), source.address, &by_tls), &replica);
    assert_eq!(follows(&replica), format!("127.0.0.1:{}", primary.tls_port().unwrap()));
    assert_same_data(&primary, &replica);

    let replica = start(Server::builder(kind));
    succeeds(&mut stage.replica(&replica.url(), source.address, &link), &replica);
    assert_same_data(&primary, &replica);
    assert_eq!(number(&primary, "sync_full"), 1);
}

#[test]
fn tls_that_does_not_fit_is_refused_before_anything_is_touched() {
    let Some((kind, stage)) = one_of(require::redis().filter(|kind| kind.speaks_tls())) else { return };
    let (files, start) = with_tls(&stage);
    let ca = path(&files.ca);
    let primary = quick(kind).tls(files.clone()).start().unwrap();

    let source = stage.source(&primary.tls_url().unwrap(), &["--tls-ca", &ca]);
    let replica = start(Server::builder(kind));
    let said = ends(&mut stage.replica(&replica.url(), source.address, &[]), 3);
    says(&said, &["tls-replication yes", "--link-cert", &replica.address().to_string()]);
    assert_untouched(&replica);
    assert_eq!(number(&primary, "sync_full"), 0);

    // The primary is known by its TLS port, and this server would connect to it without TLS.
    let plain = Server::start(kind).unwrap();
    let said = ends(&mut stage.replica(&plain.url(), source.address, &[]), 3);
    says(&said, &["tls-replication", "--announce", &format!("127.0.0.1:{}", primary.tls_port().unwrap())]);
    assert_untouched(&plain);
    assert_eq!(number(&primary, "sync_full"), 0);
}

#[test]
#[ignore = "long: make test-all"]
fn a_plain_port_is_refused_for_a_server_that_replicates_by_tls() {
    let Some((kind, stage)) = one_of(require::redis().filter(|kind| kind.speaks_tls())) else { return };
    let (files, start) = with_tls(&stage);
    let (cert, key) = (path(&files.certificate), path(&files.key));
    let link = ["--link-cert", &cert, "--link-key", &key];
    let (primary, replica) = (quick(kind).start().unwrap(), start(Server::builder(kind)));
    let source = stage.source(&primary.url(), &[]);
    let said = ends(&mut stage.replica(&replica.url(), source.address, &link), 3);
    says(&said, &["tls-replication", "--announce", &primary.address().to_string()]);
    assert_untouched(&replica);
    assert_eq!(number(&primary, "sync_full"), 0);
}

fn path(path: &std::path::Path) -> String {
    path.display().to_string()
}

/// Writes some hundred KiB a second until stopped.
fn steady_writer(server: &Server) -> (Arc<AtomicBool>, thread::JoinHandle<()>) {
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, mut client) = (stop.clone(), server.client().unwrap());
    let value = "v".repeat(4096);
    let writer = thread::spawn(move || {
        // Its server may end while it writes.
        while !stopped.load(Ordering::Relaxed) && client.ok(&["SET", "written", &value]).is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
    });
    (stop, writer)
}

#[test]
#[ignore = "long: make test-all"]
fn a_backlog_too_small_for_the_writes_is_warned_of_and_the_hand_off_waits_for_calm() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) =
            (quick(kind).config("repl-backlog-size", "16kb").start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 1000, "x");
        let source = stage.source(&primary.url(), &["--eager"]);
        let (stop, writer) = steady_writer(&primary);
        let mut agent = held_up(&stage, &source, &replica);
        // Still following, through the agent: a write arrives.
        primary.client().unwrap().ok(&["SET", "meanwhile", "1"]).unwrap();
        wait_until("a write to arrive", LONG, || {
            let value = replica.client()?.text(&["GET", "meanwhile"])?;
            Ok(if value == "1" { Ok(()) } else { Err(value) })
        })
        .unwrap();
        assert!(agent.ended().unwrap().is_none());
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
        assert_eq!(number(&primary, "sync_full"), 1);
    }
}

/// An agent that keeps following because the primary's backlog is too small for the write rate.
fn held_up(stage: &Stage, source: &Source, replica: &Server) -> Agent {
    wait_for_growth(source);
    let mut agent = stage.replica(&replica.url(), source.address, &[]);
    let line = agent.wait_for_line("would not take the server over", LONG).unwrap();
    says(&line, &["INFO", "backlog", "repl-backlog-size", "our link feeds the server until then"]);
    agent
}

/// Waits until the source knows how fast the stream grows.
fn wait_for_growth(source: &Source) {
    source.wait_for_status("the stream to grow", |status| {
        let at = |name: &str| status["generation"][name].as_u64().unwrap_or(0);
        at("offset_now").saturating_sub(at("offset_start")) > 1 << 20
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_has_loaded_when_the_primary_restarts_is_left_to_its_own_replication() {
    at_once(kinds_and_module(), |(kind, module)| {
        let stage = Stage::new();
        let mut primary = with_or_without(quick(kind).config("repl-backlog-size", "16kb"), module);
        let replica = with_or_without(Server::builder(kind), module);
        fill_keys(&primary, 1000, "old");
        let source = stage.source(&primary.url(), &["--eager"]);
        let (_, writer) = steady_writer(&primary);
        let mut agent = held_up(&stage, &source, &replica);
        primary.restart().unwrap();
        writer.join().unwrap();
        fill_keys(&primary, 50, "new");
        agent.wait_for_event("handing_over", LONG).unwrap();
        succeeds(&mut agent, &replica);
        // The other history has nothing of the first: only its own 50 keys.
        assert_same_data(&primary, &replica);
        assert_eq!(replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 50);
    });
}

/// Time limit for three hand-offs that fail, of which each has 20 s.
const THREE_HAND_OFFS: Duration = Duration::from_secs(150);

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_its_primary_refuses_three_times_keeps_its_data_and_is_continued_later() {
    // Both at once, since each waits for a minute.
    thread::scope(|scope| {
        for (kind, module) in require::kinds().into_iter().zip([false, true]) {
            scope.spawn(move || is_refused_three_times(kind, module));
        }
    });
}

fn is_refused_three_times(kind: Kind, module: bool) {
    let stage = Stage::new();
    let primary = with_or_without(quick(kind).user("follower", "pw", "-@all +psync +replconf +ping"), module);
    let replica = with_or_without(Server::builder(kind).master_auth(Some("follower"), "pw"), module);
    fill_keys(&primary, 1000, "x");
    load_small(&primary, 2000, 100);
    load_slowly(&replica, 1000);
    let source = stage.source(&primary.url(), &[]);
    let mut agent = stage.replica(&replica.url(), source.address, &[]);
    wait_until_loading(&replica);
    // The agent has made sure before that the primary accepts the server.
    primary.client().unwrap().ok(&["ACL", "SETUSER", "follower", "off"]).unwrap();
    let status = agent.wait(THREE_HAND_OFFS).unwrap();
    let said = agent.output();
    assert_eq!(status.code(), Some(6), "{said}");
    let count = |words: &str| said.matches(words).count();
    assert_eq!(count("handing the server over"), 3, "{said}");
    assert_eq!(count("back to our link, to try again"), 2, "{said}");
    says(said.lines().last().unwrap(), &["holds the whole data set", &primary.address().to_string()]);

    // As docs/reference/exit-codes.md says: it follows the primary by itself, with its own settings.
    assert_eq!(follows(&replica), primary.address().to_string());
    assert_eq!(replica.configured("masterauth").unwrap(), "pw");
    assert_eq!(replica.configured("repl-diskless-load").unwrap(), "disabled");
    let mut client = primary.client().unwrap();
    client.ok(&["SET", "after", "all"]).unwrap();
    client.ok(&["ACL", "SETUSER", "follower", "on"]).unwrap();
    replica.wait_for_link(LONG).unwrap();
    assert_same_data(&primary, &replica);
    assert_eq!(syncs(&primary), (1, 1));
}

/// A primary and a replica of it, made by the servers' own replication.
fn pair(kind: Kind) -> (Server, Server) {
    let (primary, middle) = (quick(kind).start().unwrap(), quick(kind).start().unwrap());
    fill_keys(&primary, 500, "x");
    middle.replicate(&primary).unwrap();
    middle.wait_for_link(LONG).unwrap();
    (primary, middle)
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_beside_a_replica_makes_replicas_of_the_same_history() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, middle) = pair(kind);
        let (chained, direct) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());

        let source = stage.source(&middle.url(), &[]);
        succeeds(&mut stage.replica(&chained.url(), source.address, &[]), &chained);
        assert_eq!(follows(&chained), middle.address().to_string());
        assert_same_data(&primary, &chained);

        let source = stage.source(&middle.url(), &["--announce", &primary.address().to_string()]);
        succeeds(&mut stage.replica(&direct.url(), source.address, &[]), &direct);
        assert_eq!(follows(&direct), primary.address().to_string());
        assert_same_data(&primary, &direct);
        // One is the middle server's own; the direct server was handed over without another.
        assert_eq!(number(&primary, "sync_full"), 1);
    }
}

/// A primary and a replica of it with backlogs of these sizes, a source of the replica that announces the primary, and
/// a writer at the primary.
struct BesideAReplica {
    stage: Stage,
    primary: Server,
    _middle: Server,
    source: Source,
    writer: (Arc<AtomicBool>, thread::JoinHandle<()>),
}

impl BesideAReplica {
    fn start(kind: Kind, backlog_of_the_primary: &str, backlog_of_the_replica: &str) -> BesideAReplica {
        let stage = Stage::new();
        let with_backlog = |size: &str| quick(kind).config("repl-backlog-size", size).start().unwrap();
        let (primary, middle) = (with_backlog(backlog_of_the_primary), with_backlog(backlog_of_the_replica));
        fill_keys(&primary, 1000, "x");
        middle.replicate(&primary).unwrap();
        middle.wait_for_link(LONG).unwrap();
        let source = stage.source(&middle.url(), &["--eager", "--announce", &primary.address().to_string()]);
        let writer = steady_writer(&primary);
        BesideAReplica { stage, primary, _middle: middle, source, writer }
    }

    fn end_the_writes(self) -> Server {
        self.writer.0.store(true, Ordering::Relaxed);
        self.writer.1.join().unwrap();
        self.primary
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_hand_off_waits_for_the_backlog_of_the_announced_primary_where_the_source_captures_a_replica() {
    for kind in require::kinds() {
        let replica = Server::start(kind).unwrap();
        let all = BesideAReplica::start(kind, "16kb", "64mb");
        let mut agent = held_up(&all.stage, &all.source, &replica);
        let primary = all.end_the_writes();
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
        // The captured replica's own copy, and no other.
        assert_eq!(number(&primary, "sync_full"), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_small_backlog_of_a_captured_replica_does_not_hold_up_the_hand_off_to_the_announced_primary() {
    for kind in require::kinds() {
        let replica = Server::start(kind).unwrap();
        let all = BesideAReplica::start(kind, "64mb", "16kb");
        wait_for_growth(&all.source);
        // The writes go on: only the primary's backlog is large enough for them.
        succeeds(&mut all.stage.replica(&replica.url(), all.source.address, &[]), &replica);
        let primary = all.end_the_writes();
        assert_same_data(&primary, &replica);
        assert_eq!(number(&primary, "sync_full"), 1);
    }
}

#[test]
fn a_setting_changed_for_the_sync_is_put_back_after_success_failure_and_crash() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 3000, "x");
        load_slowly(&replica, 1000);
        let source = stage.source(&primary.url(), &[]);
        let setting = || replica.configured("repl-diskless-load").unwrap();
        assert_eq!(setting(), "disabled");

        let mut crashes = loading(&stage, &replica, &source);
        assert_eq!(setting(), "on-empty-db");
        crashes.kill().unwrap();

        let mut fails = loading(&stage, &replica, &source);
        assert_eq!(setting(), "on-empty-db");
        fails.signal(rustix::process::Signal::INT).unwrap();
        says(&ends(&mut fails, 7), &["SIGINT", "detached and emptied"]);
        assert_eq!(setting(), "disabled");

        replica.configure("key-load-delay", "0").unwrap();
        succeeds(&mut stage.replica(&replica.url(), source.address, &[]), &replica);
        assert_eq!(setting(), "disabled");
        assert_same_data(&primary, &replica);
        assert_eq!(number(&primary, "sync_full"), 1);
    }
}

/// An agent whose server is in the middle of loading.
fn loading(stage: &Stage, replica: &Server, source: &Source) -> Agent {
    let mut agent = stage.replica(&replica.url(), source.address, &[]);
    agent.wait_for_event("link_followed", LONG).unwrap();
    wait_until("the server to load", LONG, || {
        let info = replica.client()?.call(&["INFO", "persistence"])?;
        let is_loading = matches!(&info, Frame::Bulk(text) if String::from_utf8_lossy(text).contains("\nloading:1"));
        Ok(if is_loading { Ok(()) } else { Err("not loading".to_owned()) })
    })
    .unwrap();
    agent
}

// Servers that another client changes while an agent works on them, or that close the agent's connection: the agent
// never undoes what the other client did, and never removes keys behind a replication position that some primary would
// continue.

/// The exit code of a sync whose server another client has taken over, whatever else happened.
const TAKEN_OVER: i32 = 14;

/// The exit code of a refusal before anything was touched.
const REFUSED: i32 = 3;

/// Sets `keys` small keys.
fn fill(server: &Server, keys: u64) {
    let mut client = server.client().unwrap();
    client.ok(&["DEBUG", "POPULATE", &keys.to_string(), "key", "32"]).unwrap();
}

/// A primary, a source beside it, and a server that an agent feeds (`--stay`) and that has caught up.
fn staying(kind: Kind, server: Server) -> (Server, Source, Server, Agent) {
    let primary = primary(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 5).unwrap();
    let source = Source::start(&primary, &["--memory", "128MiB"]);
    let mut agent = source.replica(&server, &["--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    (primary, source, server, agent)
}

/// The first word of ROLE.
fn role(server: &Server) -> String {
    server.fact("role").unwrap()
}

#[test]
fn a_promotion_is_not_undone_when_the_agent_is_stopped_at_once() {
    for kind in require::kinds() {
        let (_primary, _source, server, mut agent) = staying(kind, Server::start(kind).unwrap());
        let mut client = server.client().unwrap();
        client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        client.ok(&["SET", "only-here", "1"]).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, TAKEN_OVER);
        assert!(said.contains("was detached meanwhile") && said.contains("left as it is"), "{said}");
        assert_eq!(role(&server), "master");
        assert_eq!(client.text(&["GET", "only-here"]).unwrap(), "1");
    }
}

#[test]
fn a_promotion_is_not_undone_when_the_source_is_lost_at_once() {
    for kind in require::kinds() {
        let (_primary, mut source, server, mut agent) = staying(kind, Server::start(kind).unwrap());
        let mut client = server.client().unwrap();
        client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        client.ok(&["SET", "only-here", "1"]).unwrap();
        source.agent.kill().unwrap();
        ends(&mut agent, TAKEN_OVER);
        assert_eq!(role(&server), "master");
        assert_eq!(client.text(&["GET", "only-here"]).unwrap(), "1");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_was_pointed_at_another_primary_stays_with_it_when_the_agent_is_stopped_at_once() {
    for kind in require::kinds() {
        let other = primary(kind).start().unwrap();
        fill(&other, 10);
        let (_primary, _source, server, mut agent) = staying(kind, Server::start(kind).unwrap());
        server.replicate(&other).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, TAKEN_OVER);
        assert!(said.contains(&format!("was told to follow 127.0.0.1:{}", other.port())), "{said}");
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&other, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_was_pointed_elsewhere_during_its_load_by_file_is_not_emptied() {
    for kind in require::kinds() {
        let (primary, other) = (primary(kind).start().unwrap(), primary(kind).start().unwrap());
        load(&primary, 60, 1_000_000);
        fill(&other, 10);
        // A server with keys loads from a file, unless it knows `flush-before-load`, which the agent then sets.
        let server = Server::builder(kind).config("repl-diskless-load", "disabled").start().unwrap();
        fill(&server, 3);
        let source = Source::start(&primary, &["--memory", "128MiB"]);
        let limits = ["--replace", "--module-load", "off", "--download-limit", "8MiB", "--transport", "tcp"];
        let mut agent = source.replica(&server, &limits);
        agent.wait_for_event("link_followed", LONG).unwrap();
        let way = wait_until("the server to receive the snapshot", LONG, || Ok(way_of_loading(&server))).unwrap();
        if way == Way::Link {
            assert!(matches!(kind, Kind::Valkey9), "{}", agent.output());
            continue;
        }
        server.replicate(&other).unwrap();
        agent.signal(Signal::INT).unwrap();
        let said = ends(&mut agent, TAKEN_OVER);
        assert!(said.contains("stopped by SIGINT") && said.contains("was told to follow"), "{said}");
        server.wait_for_link(LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), other.port().to_string());
        assert_same_data(&other, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_was_written_to_while_the_agent_waited_is_not_overwritten() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).config("rdb-key-save-delay", 20_000).start().unwrap();
        fill(&primary, 200);
        let server = Server::start(kind).unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        // The primary runs a child for another purpose: the source has no snapshot to offer before it ends.
        primary.client().unwrap().ok(&["BGSAVE"]).unwrap();
        let mut agent = source.replica(&server, &[]);
        agent.wait_for_event("snapshot_awaited", LONG).unwrap();
        server.client().unwrap().ok(&["SET", "fresh", "1"]).unwrap();
        let said = ends(&mut agent, REFUSED);
        assert!(said.contains("--replace") && said.contains("not touched"), "{said}");
        assert_eq!(server.client().unwrap().text(&["GET", "fresh"]).unwrap(), "1");
        assert_eq!(
            (role(&server), server.configured("repl-diskless-load").unwrap()),
            ("master".into(), "disabled".into())
        );
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_was_pointed_elsewhere_while_the_agent_waited_is_not_touched() {
    at_once(require::kinds(), |kind| {
        let other = primary(kind).start().unwrap();
        fill(&other, 10);
        let primary = primary(kind).config("rdb-key-save-delay", 20_000).start().unwrap();
        fill(&primary, 200);
        let server = Server::start(kind).unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        // The primary runs a child for another purpose: the source has no snapshot to offer before it ends.
        primary.client().unwrap().ok(&["BGSAVE"]).unwrap();
        let mut agent = source.replica(&server, &["--replace"]);
        agent.wait_for_event("snapshot_awaited", LONG).unwrap();
        server.replicate(&other).unwrap();
        server.wait_for_link(LONG).unwrap();
        let said = ends(&mut agent, TAKEN_OVER);
        assert!(said.contains("was told to follow") && said.contains("not touched"), "{said}");
        assert_eq!(server.fact("master_port").unwrap(), other.port().to_string());
        assert_eq!(server.configured("repl-diskless-load").unwrap(), "disabled");
        assert_same_data(&other, &server);
    });
}

/// Longer than the `timeout` of one second that these tests give their servers; servers look for idle clients once a
/// second.
const IDLE: Duration = Duration::from_secs(4);

#[test]
#[ignore = "long: make test-all"]
fn a_control_connection_that_the_server_closed_for_idleness_is_made_anew_when_a_stay_is_stopped() {
    at_once(require::kinds(), |kind| {
        let server = Server::builder(kind).config("timeout", 1).start().unwrap();
        let (primary, _source, server, mut agent) = staying(kind, server);
        let before = syncs(&primary);
        std::thread::sleep(IDLE);
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), primary.port().to_string());
        assert_same_data(&primary, &server);
        assert_eq!(syncs(&primary), (before.0, before.1 + 1));
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_control_connection_that_the_server_closed_for_idleness_is_made_anew_when_the_source_is_lost() {
    at_once(require::kinds(), |kind| {
        let server = Server::builder(kind).config("timeout", 1).start().unwrap();
        let (primary, mut source, server, mut agent) = staying(kind, server);
        std::thread::sleep(IDLE);
        source.agent.kill().unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), primary.port().to_string());
        assert_same_data(&primary, &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_control_connection_that_the_server_closed_while_the_agent_waited_for_an_offer_is_made_anew() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).config("repl-diskless-sync-delay", IDLE.as_secs()).start().unwrap();
        fill(&primary, 100);
        let server = Server::builder(kind).config("timeout", 1).start().unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        source.replicate(&server, &[]);
        assert_same_data(&primary, &server);
    });
}

/// Emptying a server of this many keys takes long enough for a test to interfere.
const MANY_KEYS: u64 = 1_200_000;

/// An idle server answers within this time.
const BLINK: Duration = Duration::from_millis(60);

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_the_module_emptied_is_not_continued_on_nothing_when_the_agent_is_killed() {
    for kind in require::kinds() {
        let library = match remora_lab::server::module_library() {
            Ok(path) => path,
            Err(error) => return require::skip(&error.to_string()).unwrap_or_default(),
        };
        // The digests of this many keys take seconds: the offset must not move meanwhile.
        let quiet = primary(kind).config("repl-ping-replica-period", 3600);
        let primary = quiet.config("rdbcompression", "no").start().unwrap();
        fill(&primary, MANY_KEYS);
        primary.client().unwrap().ok(&[b"SET".as_slice(), b"long", &[b'x'; 600_000]]).unwrap();
        let server = remora_lab::Server::builder(kind)
            .config("loadmodule", library.display())
            .config("replica-lazy-flush", "no")
            .start()
            .unwrap();
        server.replicate(&primary).unwrap();
        server.wait_for_link(LONG).unwrap();
        let source = Source::start(&primary, &["--memory", "1GiB", "--module-capture", "off"]);
        let mut agent = source.replica(&server, &["--replace"]);
        agent.wait_for_event("link_followed", LONG).unwrap();
        // The module empties Redis, which answers no client meanwhile: the agent is killed just then. Valkey empties
        // itself after it has dropped its replication position (flush-before-load).
        let mut client = server.client().unwrap();
        client.timeout(BLINK).unwrap();
        wait_until("the server to be emptied", LONG, || Ok(is_emptied(&mut client))).unwrap();
        agent.kill().unwrap();
        wait_until("the server to answer again", LONG, || {
            Ok(server.client()?.int(&["DBSIZE"]).map_err(|error| error.to_string()))
        })
        .unwrap();

        // A killed agent leaves the secret of its link behind, which this primary would refuse.
        server.configure("masterauth", "").unwrap();
        let before = syncs(&primary).0;
        server.replicate(&primary).unwrap();
        server.wait_for_link(LONG).unwrap();
        assert_eq!(syncs(&primary).0, before + 1, "the server's old position must no longer be valid");
        assert_same_data(&primary, &server);
        assert_eq!(number(&server, "loading"), 0);
    }
}

/// Whether keys have been removed, or no answer comes: a server that removes its keys or loads others answers nothing
/// else.
fn is_emptied(client: &mut Client) -> Result<(), String> {
    match client.int(&["DBSIZE"]) {
        Ok(keys) if keys > MANY_KEYS as i64 => Err(format!("{keys} keys")),
        _ => Ok(()),
    }
}

// The hand-off under writes that the primary's backlog could never hold: what a replica needs is pinned there, and no
// replica costs a second full copy.

/// The default of Redis.
const BACKLOG: &str = "1mb";

/// A journal that holds what is written in the time of a test, also on a busy machine.
const JOURNAL: [&str; 4] = ["--memory", "1GiB", "--journal-memory", "800MiB"];

/// What clients write, faster than any estimate allows.
#[derive(Clone, Copy, Debug)]
enum Writes {
    /// Values that are each longer than the backlog: up to 60 MB a second.
    Long,
    /// The same, three times a second: a server that is attended connects again by its own clock.
    LongAndSeldom,
    /// Many values of 4 KiB: some 50 MB a second. On a busy machine more than the backlog is written in one round trip:
    /// the primary then refuses a pin, which is asked for again.
    Many,
}

/// Ends the writes when it is dropped, also by a failed assertion.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Writes {
    /// Writes until told to stop.
    fn run(self, primary: &Server, stop: &AtomicBool) {
        let mut client = primary.client().unwrap();
        let mut count = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            count += 1;
            match self {
                Writes::Long | Writes::LongAndSeldom => {
                    let value = vec![b'a' + (count % 26) as u8; 3 << 20];
                    client.ok(&[b"SET".as_slice(), format!("long:{}", count % 5).as_bytes(), &value]).unwrap();
                    let pause = if matches!(self, Writes::Long) { 50 } else { 330 };
                    thread::sleep(Duration::from_millis(pause));
                }
                Writes::Many => {
                    let value = format!("{count:04096}");
                    let key = |n: u64| format!("many:{}", (count * 64 + n) % 2000);
                    for n in 0..64 {
                        client.ok(&["SET", &key(n), &value]).unwrap();
                    }
                    thread::sleep(Duration::from_millis(5));
                }
            }
        }
    }
}

fn pairs() -> impl Iterator<Item = (Kind, Writes)> {
    require::kinds().into_iter().flat_map(|kind| [(kind, Writes::Long), (kind, Writes::Many)])
}

/// The copies that a primary has sent to their end.
fn copies(primary: &Server) -> usize {
    primary.log().lines().filter(|line| line.contains("Streamed RDB transfer") && line.contains("succeeded")).count()
}

/// The pins that the primary has refused, as the agents that asked for them say. On a busy machine a value that is longer
/// than the backlog may come between an agent's question and its request.
fn refused_pins<'a>(askers: impl IntoIterator<Item = &'a Agent>) -> u64 {
    let is_refused = |line: &&str| line.contains("for the link that would have pinned it");
    askers.into_iter().map(|asker| asker.output().lines().filter(is_refused).count() as u64).sum()
}

/// Asserts that the primary has refused no server: only pins, after each of which the agents asked again.
fn refused_only_pins<'a>(primary: &Server, before: (u64, u64), askers: impl IntoIterator<Item = &'a Agent>) {
    let refused = refused_pins(askers);
    let (full, failed) = refusals(primary);
    assert_eq!((full - before.0, failed - before.1), (refused, refused), "{}", primary.log());
}

/// The copies that were asked for, and the continuations that were refused.
fn refusals(primary: &Server) -> (u64, u64) {
    (number(primary, "sync_full"), number(primary, "sync_partial_err"))
}

/// Hands replicas over while clients write, and asserts that each was continued.
fn hands_over(primary: &Server, source: &Agent, writes: Writes, agents: impl FnOnce() -> Vec<(Agent, Server)>) {
    let (stop, full) = (AtomicBool::new(false), number(primary, "sync_full"));
    let replicas = thread::scope(|scope| {
        let writer = scope.spawn(|| writes.run(primary, &stop));
        let stops = Stop(&stop);
        let mut agents = agents();
        for (agent, replica) in &mut agents {
            let said = succeeds(agent, replica);
            assert!(!writer.is_finished(), "the hand-off must not wait for the writes to end: {said}");
            says(&said, &["handing the server over: caught up"]);
        }
        drop(stops);
        writer.join().unwrap();
        agents
    });
    let (now, continued) = syncs(primary);
    assert_eq!(copies(primary), 1, "one copy, the source's: {}", primary.log());
    assert!(continued as usize >= replicas.len());
    assert_eq!(number(primary, "sync_full"), now);
    refused_only_pins(primary, (full + 1, 0), iter::once(source).chain(replicas.iter().map(|(agent, _)| agent)));
    for (_, replica) in &replicas {
        replica.wait_for_link(LONG).unwrap();
        assert_same_data(primary, replica);
    }
    // The source, and the servers: no link that pins is left.
    wait_until("the pins to be released", LONG, || {
        let connected = number(primary, "connected_slaves") as usize;
        Ok(if connected <= replicas.len() + 1 { Ok(()) } else { Err(format!("{connected} replicas")) })
    })
    .unwrap();
}

#[test]
fn replicas_are_handed_over_while_clients_write_more_than_the_backlog_holds() {
    for (kind, writes) in pairs() {
        let stage = Stage::new();
        let primary = quick(kind).config("repl-backlog-size", BACKLOG).start().unwrap();
        fill_keys(&primary, 100, "x");
        load_small(&primary, 2000, 1000);
        let source = stage.source(&primary.url(), &JOURNAL);
        hands_over(&primary, &source.agent, writes, || {
            let start = |_| {
                let replica = Server::start(kind).unwrap();
                (stage.replica(&replica.url(), source.address, &[]), replica)
            };
            (0..2).map(start).collect()
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_announced_primary_is_pinned_where_the_source_captures_a_replica() {
    for (kind, writes) in pairs() {
        let stage = Stage::new();
        let [primary, middle] = [(); 2].map(|()| quick(kind).config("repl-backlog-size", BACKLOG).start().unwrap());
        fill_keys(&primary, 100, "x");
        middle.replicate(&primary).unwrap();
        middle.wait_for_link(LONG).unwrap();
        // The primary hears a moment later that the copy has arrived, and notes it.
        assert_eq!(primary.client().unwrap().int(&["WAIT", "1", "60000"]).unwrap(), 1);
        // The captured replica's own copy, for which it asks first with a history of its own.
        let before = (copies(&primary), refusals(&primary));
        let announced = primary.address().to_string();
        let source = stage.source(&middle.url(), &[&JOURNAL[..], &["--announce", &announced]].concat());
        let stop = AtomicBool::new(false);
        let replica = Server::start(kind).unwrap();
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        thread::scope(|scope| {
            let writer = scope.spawn(|| writes.run(&primary, &stop));
            let stops = Stop(&stop);
            let said = succeeds(&mut agent, &replica);
            assert!(!writer.is_finished(), "{said}");
            drop(stops);
            writer.join().unwrap();
        });
        assert_eq!(copies(&primary), before.0, "{kind} {writes:?}: {}", primary.log());
        refused_only_pins(&primary, before.1, [&agent, &source.agent]);
        replica.wait_for_link(LONG).unwrap();
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_attended_server_goes_to_its_primary_while_clients_write_more_than_the_backlog_holds() {
    for kind in require::kinds() {
        let builder = quick(kind).config("repl-backlog-size", BACKLOG);
        let filled = attend::Scene::with_options(|_| builder, |primary| load_small(primary, 2000, 1000), &JOURNAL);
        let Some(scene) = filled else { return };
        let (server, stop) = (scene.server(quick(kind)), AtomicBool::new(false));
        // A pin needs bytes of the stream before its offset, and a primary without a replica has no stream.
        let first = scene.server(quick(kind));
        first.replicate(&scene.primary).unwrap();
        first.wait_for_link(LONG).unwrap();
        load_small(&scene.primary, 2000, 1000);
        drop(first);
        let before = (copies(&scene.primary), refusals(&scene.primary));
        let agent = scene.attend_with(&server, &[scene.primary.port()], &[]);
        thread::scope(|scope| {
            let writer = scope.spawn(|| Writes::LongAndSeldom.run(&scene.primary, &stop));
            let stops = Stop(&stop);
            server.replicate(&scene.primary).unwrap();
            handed_over(&agent, &server, 1);
            assert!(!writer.is_finished(), "{}", agent.output());
            drop(stops);
            writer.join().unwrap();
        });
        assert_eq!(
            copies(&scene.primary),
            before.0 + 1,
            "one copy, the source's: {}\n{}",
            agent.output(),
            scene.primary.log()
        );
        refused_only_pins(&scene.primary, (before.1.0 + 1, before.1.1), [&scene.source.agent, &agent]);
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&scene.primary, &server);
    }
}
