//! The hand-off finds the right primary and address, waits where it must, and restores every setting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Host, Kind, Net, Server, Tls, assert_same_data, require, scratch, tls};
use remora_redis::resp::Frame;

use crate::kit::{
    LONG, Source, Stage, assert_untouched, at_once, ends, fill_keys, follows, kinds_and_module, load_slowly,
    load_small, number, quick, says, succeeds, syncs, wait_until_loading, with_or_without,
};

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
    let (server, _) = tls::certificates(stage.folder(), &[]).unwrap();
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
