//! A dry run says yes to what works and no to what fails, with the exit code of the sync, and changes nothing.

use std::net::{IpAddr, Ipv4Addr};

use remora_fabric::verbs::DISABLE;
use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Server, assert_same_data, require};
use serde_json::Value;

use crate::by_file::gate;
use crate::kit::{LONG, Stage, ends, fill, fill_keys, number, primary, quick, says, succeeds, syncs};

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
        let cases: [(Builder, &[&str], i32); 5] = [
            (quick(kind), &[], 0),
            (quick(kind).cluster(), &["--delivery", "link"], 3),
            (quick(kind).config("replica-ignore-maxmemory", "no").config("maxmemory", "4mb"), &[], 3),
            (quick(kind).master_auth(None, "wrong"), &[], 3),
            (quick(kind).config("rename-command", "CONFIG \"\""), &[], 4),
        ];
        for (builder, more, code) in cases {
            let server = builder.start().unwrap();
            let said = runs.run(source.address, &server, &[more, &["--dry-run"]].concat(), code);
            let done = runs.run(source.address, &server, more, code);
            assert_eq!(said.contains("can become"), code == 0, "{said}\n{done}");
        }
        let server = quick(kind).start().unwrap();
        fill_keys(&server, 1, "own");
        runs.both(source.address, &server, &top, &[], 3);
        runs.both(source.address, &server, &top, &["--replace"], 0);
    }
}
