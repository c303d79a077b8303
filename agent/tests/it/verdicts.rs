//! Nothing that is wrong ends with 0: sources beside servers that do not hold what their primary holds, servers that do
//! not execute or keep what they get, and what `--explain` says of each condition.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Kind, Server, assert_same_data, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::attend::{Scene, in_step};
use crate::kit::{
    LONG, Source, Stage, assert_untouched, ends, fill, fill_keys, number, primary, quick, says, succeeds,
};

/// A server that does not know a command.
fn without(kind: Kind, command: &str) -> Builder {
    quick(kind).config("rename-command", format!("{command} \"\""))
}

/// A primary whose snapshot was taken before `command` ran there, which a late joiner gets in the stream.
fn with_a_late_command(kind: Kind, command: &[&str]) -> (Server, Source) {
    let server = primary(kind).start().unwrap();
    fill_keys(&server, 50, "kept");
    server.client().unwrap().ok(&["SET", "counter", "1"]).unwrap();
    let mut source = Source::start(&server, &["--memory", "64MiB", "--eager"]);
    source.wait_for_snapshot();
    let answer = server.client().unwrap().call(command).unwrap();
    assert!(answer.as_error().is_none(), "{answer:?}");
    (server, source)
}

#[test]
#[ignore = "long: make test-all"]
fn a_command_of_the_stream_that_the_server_does_not_know_fails_the_sync_and_is_named() {
    for kind in require::kinds() {
        for (name, command) in [("FLUSHALL", &["FLUSHALL"][..]), ("COPY", &["COPY", "counter", "other"][..])] {
            let (server, source) = with_a_late_command(kind, command);
            let replica = without(kind, name).start().unwrap();
            let said = ends(&mut source.replica(&replica, &["--explain", "--on-failure", "detached"]), 6);
            let lacks = format!("it lacks {name}");
            says(&said, &["is not an exact replica", "could not execute 1 command of", &lacks, "commands   broken"]);
            says(&said, &["lacks commands that the primary has", "the server follows the primary"]);
            assert_ne!(server.digest().unwrap(), replica.digest().unwrap(), "{kind}: it is as the verdict says");
            // A server that knows it, from the same source.
            let able = Server::start(kind).unwrap();
            source.replicate(&able, &[]);
            assert_same_data(&server, &able);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn keys_that_expire_at_the_primary_and_a_server_without_del_fail_the_sync() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["SET", "counter", "1"]).unwrap();
        let source = Source::start(&server, &["--memory", "64MiB"]);
        // Both names by which servers delete what has expired.
        let replica = without(kind, "DEL").config("rename-command", "UNLINK \"\"").start().unwrap();
        let mut agent = source.replica(&replica, &["--stay", "--on-failure", "detached"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        client.ok(&["SET", "short", "1", "PX", "1"]).unwrap();
        wait_until("the key to expire", LONG, || {
            let left = client.int(&["EXISTS", "short"])?;
            Ok(if left == 0 && number(&server, "expired_keys") == 1 { Ok(()) } else { Err(left.to_string()) })
        })
        .unwrap();
        agent.wait_for_event("commands_failed", LONG).unwrap();
        agent.signal(Signal::TERM).unwrap();
        says(&ends(&mut agent, 6), &["is not an exact replica", "could not execute 1 command"]);
    }
}

#[test]
fn a_command_that_fails_at_the_server_alone_is_named() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["SET", "counter", "1"]).unwrap();
        let source = Source::start(&server, &["--memory", "64MiB"]);
        let replica = quick(kind).config("replica-read-only", "no").start().unwrap();
        let mut agent = source.replica(&replica, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let mut other = replica.client().unwrap();
        other.int(&["DEL", "counter"]).unwrap();
        other.int(&["RPUSH", "counter", "a list"]).unwrap();
        client.int(&["INCR", "counter"]).unwrap();
        agent.wait_for_event("commands_failed", LONG).unwrap();
        agent.signal(Signal::TERM).unwrap();
        says(&ends(&mut agent, 6), &["could not execute 1 command", "(INCR)"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn errors_of_the_servers_own_clients_are_no_matter_of_the_sync() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 8, 1);
        let source = Source::start(&server, &["--memory", "64MiB"]);
        let replica = quick(kind).start().unwrap();
        let over = AtomicBool::new(false);
        let said = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut client = replica.client().unwrap();
                while !over.load(Ordering::Relaxed) {
                    for wrong in [&["NO-SUCH-COMMAND"][..], &["SET", "only one"], &["SET", "read", "only"]] {
                        _ = client.call(wrong); // the server loads now and then
                    }
                }
            });
            let mut agent = source.replica(&replica, &["--replace", "--explain"]);
            let ended = agent.wait(LONG);
            over.store(true, Ordering::Relaxed);
            assert!(ended.unwrap().success(), "{}", agent.output());
            agent.output()
        });
        says(&said, &["commands   holds"]);
        assert!(number(&replica, "total_error_replies") > 0);
        assert_same_data(&server, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_intercepted_copy_with_a_command_that_failed_is_a_failed_one() {
    for kind in require::kinds() {
        let Some(mut scene) = Scene::new(kind) else { return };
        scene.primary.client().unwrap().ok(&["SET", "counter", "1"]).unwrap();
        // Its snapshot is taken before the command, which is in the stream then.
        let mut source = scene.stage.source_on(&scene.host, &scene.primary.url(), &["--eager"]);
        source.wait_for_snapshot();
        scene.primary.client().unwrap().int(&["COPY", "counter", "other"]).unwrap();
        let server = scene.server(without(kind, "COPY"));
        scene.source = source;
        let mut attend = scene.attend_with(&server, &[scene.primary.port()], &[]);
        server.replicate(&scene.primary).unwrap();
        let said = attend.wait_for_line("is not an exact replica", LONG).unwrap();
        says(&said, &["could not execute 1 command"]);
        in_step(&server, LONG, &attend);
        attend.signal(Signal::TERM).unwrap();
        ends(&mut attend, 0);
    }
}

/// A replica by the servers' own replication.
fn replica_of(primary: &Server, builder: Builder) -> Server {
    let replica = builder.start().unwrap();
    replica.replicate(primary).unwrap();
    replica.wait_for_link(LONG).unwrap();
    replica
}

/// Runs a source of this server, which must be refused, and returns what it says.
#[track_caller]
fn refused_source(server: &Server) -> String {
    let stage = Stage::new();
    let token = stage.token.display().to_string();
    stage.end(&["source", "--server", &server.url(), "--listen", "127.0.0.1:0", "--token-file", &token], 3)
}

/// Starts a source beside a replica of `top`.
fn source_beside(replica: &Server, top: &Server, more: &[&str]) -> Source {
    let top = top.address().to_string();
    Source::start(replica, &[&["--memory", "64MiB", "--announce", &top], more].concat())
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_beside_a_replica_that_need_not_hold_what_its_primary_holds_is_refused() {
    for kind in require::kinds() {
        let top = primary(kind).start().unwrap();
        fill(&top, 10, 1);
        let evicting = |policy: &str| {
            let builder = quick(kind).config("replica-ignore-maxmemory", "no");
            builder.config("maxmemory", "6mb").config("maxmemory-policy", policy)
        };
        let replica = replica_of(&top, evicting("allkeys-lru"));
        says(
            &refused_source(&replica),
            &["removes keys by itself", "maxmemory-policy allkeys-lru", "beside the primary"],
        );
        let replica = replica_of(&top, quick(kind).config("replica-read-only", "no"));
        says(&refused_source(&replica), &["replica-read-only no", "beside the primary"]);
        // One that did not know a command of its primary.
        let replica = replica_of(&top, without(kind, "COPY"));
        top.client().unwrap().ok(&["SET", "counter", "1"]).unwrap();
        top.client().unwrap().int(&["COPY", "counter", "other"]).unwrap();
        wait_until("the replica to count it", LONG, || {
            let count = number(&replica, "unexpected_error_replies");
            Ok(if count == 1 { Ok(()) } else { Err(count.to_string()) })
        })
        .unwrap();
        says(&refused_source(&replica), &["could not execute 1 of its primary's commands"]);
        // The same limits at a primary are its own affair, and replicas get what it removes.
        let replica =
            replica_of(&top, quick(kind).config("maxmemory", "6mb").config("maxmemory-policy", "allkeys-lru"));
        source_beside(&replica, &top, &[]).stop();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_is_made_to_remove_keys_gives_no_further_snapshot() {
    for kind in require::kinds() {
        let top = primary(kind).start().unwrap();
        fill(&top, 10, 1);
        let captured = replica_of(&top, quick(kind));
        let source = source_beside(&captured, &top, &["--max-age", "1s", "--fork-interval", "0s"]);
        captured.configure("maxmemory-policy", "allkeys-lru").unwrap();
        captured.configure("maxmemory", "6mb").unwrap();
        captured.configure("replica-ignore-maxmemory", "no").unwrap();
        let replica = Server::start(kind).unwrap();
        let said = ends(&mut source.replica(&replica, &[]), 5);
        says(&said, &["removes keys by itself", &captured.url()]);
        assert_untouched(&replica);
        let mut fetch = Stage::new();
        fetch.token = source.token().to_owned();
        let (at, token, to) = (source.address.to_string(), fetch.token.display().to_string(), fetch.path("dump.rdb"));
        let said = fetch.end(&["fetch", "--source", &at, "--token-file", &token, "--to", &to], 5);
        says(&said, &["removes keys by itself"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_would_remove_what_it_gets_is_refused_also_by_a_dry_run() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 10, 1);
        let source = Source::start(&server, &["--memory", "64MiB"]);
        let small = quick(kind).config("replica-ignore-maxmemory", "no").config("maxmemory", "6mb");
        let replica = small.config("maxmemory-policy", "allkeys-lru").start().unwrap();
        for more in [&["--dry-run"][..], &[]] {
            says(
                &ends(&mut source.replica(&replica, more), 3),
                &["removes keys by itself", "would not stay an exact replica"],
            );
            assert_untouched(&replica);
        }
        // Without a policy it would refuse its primary's writes.
        replica.configure("maxmemory-policy", "noeviction").unwrap();
        says(&ends(&mut source.replica(&replica, &["--dry-run"]), 3), &["refuses its primary's writes"]);
        // Where the data fit, the operator is told.
        replica.configure("maxmemory", "100mb").unwrap();
        let said = succeeds(&mut source.replica(&replica, &["--explain"]), &replica);
        says(
            &said,
            &["WARN", "replica-ignore-maxmemory yes", "evictions  holds", "but it refuses its primary's writes"],
        );
        assert_same_data(&server, &replica);
    }
}

#[test]
fn keys_that_the_server_has_removed_by_itself_fail_the_sync() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill(&server, 4, 1);
        let source = Source::start(&server, &["--memory", "64MiB"]);
        let roomy = quick(kind).config("replica-ignore-maxmemory", "no").config("maxmemory", "100mb");
        let replica = roomy.config("maxmemory-policy", "allkeys-lru").start().unwrap();
        let mut agent = source.replica(&replica, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        replica.configure("maxmemory", "3mb").unwrap();
        wait_until("it to remove keys", LONG, || {
            let count = number(&replica, "evicted_keys");
            Ok(if count > 0 { Ok(()) } else { Err(count.to_string()) })
        })
        .unwrap();
        agent.signal(Signal::TERM).unwrap();
        says(&ends(&mut agent, 6), &["is not an exact replica", "by itself since the sync began", "evictions  broken"]);
    }
}

#[test]
fn keys_that_only_one_of_both_holds_at_one_offset_fail_the_sync() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill_keys(&server, 50, "kept");
        let source = Source::start(&server, &["--memory", "64MiB"]);
        let replica = quick(kind).config("replica-read-only", "no").start().unwrap();
        let mut agent = source.replica(&replica, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        replica.client().unwrap().ok(&["SET", "its own", "1"]).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, 6);
        says(
            &said,
            &["50 keys that do not expire in database 0, and it 51", "keys       broken", "writes     unknown"],
        );
    }
}

#[test]
#[ignore = "long: make test-all"]
fn keys_whose_time_is_over_are_no_difference() {
    for kind in require::kinds() {
        let top = primary(kind).config("repl-ping-replica-period", 3600).start().unwrap();
        let mut client = top.client().unwrap();
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
        for number in 0..100 {
            let time = if number % 2 == 0 { "1" } else { "100000" };
            client.ok(&["SET", &format!("key {number}"), "value", "PX", time]).unwrap();
        }
        let captured = replica_of(&top, quick(kind));
        let source = source_beside(&captured, &top, &[]);
        let replica = Server::start(kind).unwrap();
        let said = succeeds(&mut source.replica(&replica, &["--explain"]), &replica);
        says(&said, &["commands   holds", "keys       holds"]);
        assert_same_data(&top, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn each_condition_is_explained_and_in_the_summary() {
    const NAMES: [&str; 7] = ["history", "snapshot", "stream", "commands", "evictions", "writes", "keys"];
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill_keys(&server, 50, "kept");
        let stage = Stage::new();
        let source = stage.source(&server.url(), &[]);
        let replica = Server::start(kind).unwrap();
        let said = succeeds(&mut stage.replica(&replica.url(), source.address, &["--dry-run", "--explain"]), &replica);
        says(&said, &NAMES);
        assert_untouched(&replica);
        let json = stage.path("summary.json");
        let options = ["--explain", "--json", &json];
        let said = succeeds(&mut stage.replica(&replica.url(), source.address, &options), &replica);
        for name in NAMES {
            says(&said, &[&format!("  {name:<10} holds")]);
        }
        let summary: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let found: Vec<_> = summary["exact"]
            .as_array()
            .unwrap()
            .iter()
            .map(|found| {
                assert_eq!(found["verdict"], "holds", "{found}");
                found["condition"].as_str().unwrap().to_owned()
            })
            .collect();
        assert_eq!(found, NAMES);
    }
}

/// Bytes that are no text, and all that quoting and lines would change. A user that needs no password takes any.
const PASSWORDS: [&[u8]; 4] =
    [b"\xFF\x80\xFE", b"\xC3\x28 \"quoted\" 'twice' \\ # %s", b"two\r\nlines\n\t ", b"with\0zero\0\xFF"];

fn set(server: &Server, name: &str, value: &[u8]) {
    server.client().unwrap().ok(&[b"CONFIG".as_slice(), b"SET", name.as_bytes(), value]).unwrap();
}

fn get(server: &Server, name: &str) -> Vec<u8> {
    let mut pair = server.client().unwrap().list(&["CONFIG", "GET", name]).unwrap();
    pair.pop().unwrap().into_bytes().unwrap()
}

/// A user's name that is no text either.
const USER: &[u8] = b"r\xE9pl";

#[test]
#[ignore = "long: make test-all"]
fn passwords_of_any_bytes_are_used_and_put_back_unchanged() {
    for kind in require::kinds() {
        let server = primary(kind).start().unwrap();
        fill_keys(&server, 50, "kept");
        let source = Source::start(&server, &["--memory", "64MiB"]);
        let stage = Stage::new();
        for (round, needs_it) in [false, true, false].into_iter().enumerate() {
            for password in PASSWORDS {
                let rule = [b">".as_slice(), password].concat();
                let rule = if needs_it { &*rule } else { b"nopass" };
                let user: [&[u8]; 9] = [b"ACL", b"SETUSER", USER, b"on", b"resetpass", rule, b"~*", b"&*", b"+@all"];
                server.client().unwrap().ok(&user).unwrap();
                let replica = quick(kind).start().unwrap();
                set(&replica, "masteruser", USER);
                set(&replica, "masterauth", password);
                assert_eq!(get(&replica, "masterauth"), password, "{kind} takes these bytes");
                let state = stage.path("state");
                let mut agent = source.replica(&replica, &["--stay", "--state-dir", &state]);
                agent.wait_for_event("in_step", LONG).unwrap();
                assert_ne!(get(&replica, "masterauth"), password, "the link has a secret of its own");
                if round == 2 {
                    // What the next agent puts back, it has from the file.
                    agent.kill().unwrap();
                    agent = source.replica(&replica, &["--state-dir", &state]);
                } else {
                    agent.signal(Signal::TERM).unwrap();
                }
                succeeds(&mut agent, &replica);
                assert_eq!(get(&replica, "masterauth"), password, "{kind}, round {round}");
                assert_eq!(get(&replica, "masteruser"), USER);
                replica.wait_for_link(LONG).unwrap();
            }
        }
    }
}

#[test]
fn a_file_with_a_password_of_any_bytes_lets_agents_in() {
    let Some(kind) = require::redis() else { return };
    let password = b"\xFF\x80 \"'\\";
    let server = Server::start(kind).unwrap();
    let stage = Stage::new();
    let file = stage.secret("password", "");
    std::fs::write(&file, [&password[..], b"\n"].concat()).unwrap();
    let rule = [b">".as_slice(), password].concat();
    server
        .client()
        .unwrap()
        .ok(&[b"ACL".as_slice(), b"SETUSER", b"agent", b"on", &*rule, b"~*", b"&*", b"+@all"])
        .unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
    command.args(["ready", "--server", &server.url(), "--user", "agent", "--password-file", &file]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
