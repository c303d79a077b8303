//! `remora verify` on real servers: equal data is found to be equal, whatever its encoding, and every difference is
//! found. And nothing that is wrong ends with 0.

use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{
    LONG, Source, Stage, assert_untouched, built_module, ends, fill, fill_keys, number, primary, quick, says, succeeds,
};
use crate::sync::attend::{Scene, in_step};
use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Client, Kind, Server, Workload, assert_same_data, fill_every_type, require};

fn verify(primary: &Server, replica: &Server, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
    command.args(["verify", "--quiet", "--primary", &primary.url(), "--replica", &replica.url()]);
    command.args(more).env_remove("REMORA_PASSWORD").output().unwrap()
}

/// Exit code and report.
fn found(output: &Output) -> (i32, serde_json::Value) {
    let text = String::from_utf8_lossy(&output.stdout);
    let report = serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text}\n{}", String::from_utf8_lossy(&output.stderr));
    });
    (output.status.code().unwrap(), report)
}

/// A primary that holds every type, and a replica of it by the servers' own replication.
fn replicated(kind: Kind) -> (Server, Server) {
    let primary = quick_primary(kind);
    fill_every_type(&mut primary.client().unwrap(), 7).unwrap();
    let replica = Server::builder(kind).config("replica-read-only", "no").start().unwrap();
    replica.replicate(&primary).unwrap();
    replica.wait_for_link(LONG).unwrap();
    (primary, replica)
}

fn quick_primary(kind: Kind) -> Server {
    Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap()
}

fn run(client: &mut Client, commands: &[&str]) {
    for command in commands {
        let words: Vec<_> = command.split(' ').collect();
        if let Some(error) = client.call(&words).unwrap().as_error() {
            panic!("{command}: {}", error.escape_ascii());
        }
    }
}

#[test]
fn an_exact_replica_with_every_type_is_the_same_by_digest_and_by_value() {
    for kind in require::kinds() {
        let (primary, replica) = replicated(kind);
        for digest in ["auto", "never"] {
            let (code, report) = found(&verify(&primary, &replica, &["--json", "--digest", digest]));
            assert_eq!((code, &report["same"]), (0, &true.into()), "{kind} {digest}: {report}");
            assert_eq!(report["functions"]["compared"]["same"], true, "{kind}: {report}");
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn servers_of_both_families_with_the_same_data_are_the_same_however_they_encode_it() {
    let (Some(redis), Some(valkey)) = (require::redis(), require::valkey()) else { return };
    let (one, other) = (Server::start(redis).unwrap(), Server::start(valkey).unwrap());
    // Large enough for tables instead of compact lists, and with different limits between the two encodings.
    other.configure("hash-max-listpack-entries", "16").unwrap();
    for (server, pipeline) in [(&one, "7"), (&other, "100")] {
        for (size, prefix) in [("200", "small"), ("60000", "large")] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
            command.args(["load", "--quiet", "--server", &server.url(), "--keys", "60", "--type", "mixed"]);
            command.args(["--value-size", size, "--prefix", prefix, "--pipeline", pipeline]);
            assert!(command.output().unwrap().status.success());
        }
    }
    let (code, report) = found(&verify(&one, &other, &["--json", "--digest", "never"]));
    assert_eq!((code, &report["keys"]), (0, &120.into()), "{report}");
}

#[test]
fn every_kind_of_difference_is_found_and_named() {
    let Some(kind) = require::redis() else { return };
    let (primary, replica) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    let (mut one, mut other) = (primary.client().unwrap(), replica.client().unwrap());
    let stream = ["XADD stream 1-1 a b", "XGROUP CREATE stream g 0", "XREADGROUP GROUP g c COUNT 1 STREAMS stream >"];
    for client in [&mut one, &mut other] {
        run(client, &["SET same 1", "SET value a", "SADD set a b c", "HSET hash f 1"]);
        run(client, &["RPUSH list a b", "ZADD zset 1 a", "SET becomes 1", "SELECT 5", "SET far 1", "SELECT 0"]);
        run(client, &stream);
    }
    run(&mut one, &["SET only-here 1", "SET deadline 1 PXAT 9000000000000", "SELECT 5", "SET farther 1"]);
    run(
        &mut other,
        &["SET only-there 1", "SET deadline 1 PXAT 9000000000001", "SET value b", "SREM set c", "SADD set d"],
    );
    run(&mut other, &["HSET hash f 2", "LSET list 1 c", "ZADD zset 2 a", "DEL becomes", "RPUSH becomes 1"]);
    run(&mut other, &["XACK stream g 1-1"]);
    other.call(&["FUNCTION", "LOAD", "#!lua name=l\nredis.register_function('f', function() return 1 end)"]).unwrap();

    let output = verify(&primary, &replica, &["--json", "--limit", "100", "--recheck", "2"]);
    let (code, report) = found(&output);
    assert_eq!(code, 1, "{report}");
    let mut names: Vec<_> = report["shown"]
        .as_array()
        .unwrap()
        .iter()
        .map(|difference| {
            let text = |field: &str| difference[field].as_str().unwrap().to_owned();
            format!("{} {} {}", difference["database"], text("key"), text("kind"))
        })
        .collect();
    names.sort();
    let expected = [
        "0 becomes type",
        "0 deadline expiry",
        "0 hash value",
        "0 list value",
        "0 only-here missing",
        "0 only-there extra",
        "0 set value",
        "0 stream value",
        "0 value value",
        "0 zset value",
        "5 farther missing",
    ];
    assert_eq!(names, expected);
    assert_eq!(report["functions"]["compared"]["same"], false);
    let sentence = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(sentence.contains("2 missing on the replica") && sentence.contains("other functions"), "{sentence}");
}

#[test]
fn the_expiry_of_a_single_field_counts() {
    let Some(kind) = require::valkey() else { return };
    let (primary, replica) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    for (server, at) in [(&primary, "9000000000000"), (&replica, "9000000000001")] {
        let mut client = server.client().unwrap();
        run(&mut client, &["HSET hash f 1 g 2", &format!("HPEXPIREAT hash {at} FIELDS 1 f")]);
    }
    let (code, report) = found(&verify(&primary, &replica, &["--json"]));
    assert_eq!((code, &report["other_value"]), (1, &1.into()), "{report}");
}

/// Two servers with one stream, in which a group has read; and what is done at one of them, so that the digests stay
/// equal.
const BEYOND_DIGESTS: [&[&str]; 9] = [
    &["XGROUP CREATE s other 0"],
    &["XREADGROUP GROUP g c COUNT 1 STREAMS s >"],
    &["XACK s g 1-1"],
    &["XGROUP DESTROY s g"],
    &["XGROUP SETID s g 0"],
    &["XSETID s 9-9"],
    &["XADD s 8-8 a b", "XDEL s 8-8"],
    &["XCLAIM s g heir 0 1-1"],
    &["XGROUP CREATECONSUMER s g idle"],
];

#[test]
#[ignore = "long: make test-all"]
fn what_digests_say_nothing_of_is_compared_by_itself() {
    for kind in require::kinds() {
        for at_the_primary in [true, false] {
            let (one, other) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
            let changed = if at_the_primary { &one } else { &other };
            for number in 0..BEYOND_DIGESTS.len() {
                for server in [&one, &other] {
                    let select = format!("SELECT {number}");
                    let script = ["XADD s 1-1 a b", "XADD s 2-1 a b", "XADD s 3-1 a b", "XGROUP CREATE s g 0"];
                    let client = &mut server.client().unwrap();
                    run(client, &[&select]);
                    run(client, &script);
                    run(client, &["XREADGROUP GROUP g c COUNT 2 STREAMS s >"]);
                }
            }
            let (code, report) = found(&verify(&one, &other, &["--json"]));
            assert_eq!((code, &report["method"]), (0, &"digest".into()), "{kind}: {report}");
            assert_eq!(report["beyond_digests"], BEYOND_DIGESTS.len(), "{kind}: {report}");
            for (number, commands) in BEYOND_DIGESTS.iter().enumerate() {
                let client = &mut changed.client().unwrap();
                run(client, &[&format!("SELECT {number}")]);
                run(client, commands);
            }
            let (code, report) = found(&verify(&one, &other, &["--json", "--recheck", "1"]));
            assert_eq!((code, &report["method"]), (1, &"digest".into()), "{kind}: {report}");
            let shown = report["shown"].as_array().unwrap().iter();
            let databases: Vec<_> = shown.map(|difference| difference["database"].as_u64().unwrap()).collect();
            assert_eq!(databases, (0..BEYOND_DIGESTS.len() as u64).collect::<Vec<_>>(), "{kind}: {report}");
            assert_eq!(report["other_value"], BEYOND_DIGESTS.len(), "{kind}: {report}");
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_consumer_that_has_read_nothing_is_not_replicated_and_no_difference() {
    for kind in require::kinds() {
        let (primary, replica) = replicated(kind);
        let mut one = primary.client().unwrap();
        run(&mut one, &["XGROUP CREATE idle:stream g $ MKSTREAM", "XREADGROUP GROUP g idle STREAMS idle:stream >"]);
        for digest in ["auto", "never"] {
            let (code, report) = found(&verify(&primary, &replica, &["--json", "--digest", digest]));
            assert_eq!((code, &report["same"]), (0, &true.into()), "{kind} {digest}: {report}");
        }
        // The primary becomes the replica, and keeps its consumer.
        replica.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        one.ok(&["REPLICAOF", "127.0.0.1", &replica.port().to_string()]).unwrap();
        primary.wait_for_link(LONG).unwrap();
        assert_eq!(number(&replica, "sync_full"), 0, "{kind}");
        let (code, report) = found(&verify(&replica, &primary, &["--json"]));
        assert_eq!((code, &report["same"]), (0, &true.into()), "{kind}: {report}");
        // What the consumer has not acknowledged is compared.
        one.ok(&["CONFIG", "SET", "replica-read-only", "no"]).unwrap();
        let mut other = replica.client().unwrap();
        run(&mut other, &["XADD idle:stream 1-1 a b"]);
        assert_eq!(other.int(&["WAIT", "1", "30000"]).unwrap(), 1, "{kind}");
        run(&mut one, &["XREADGROUP GROUP g idle STREAMS idle:stream >"]);
        let (code, report) = found(&verify(&replica, &primary, &["--json"]));
        assert_eq!((code, &report["shown"][0]["key"]), (1, &"idle:stream".into()), "{kind}: {report}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_values_of_a_modules_type_are_compared() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let library = built_module(&stage, "typed");
        let servers = [0, 1].map(|_| Server::builder(kind).config("loadmodule", &library).start().unwrap());
        for server in &servers {
            run(&mut server.client().unwrap(), &["SET plain 1", "TYPED.SET key 7"]);
        }
        let [one, other] = &servers;
        let (code, report) = found(&verify(one, other, &["--json"]));
        assert_eq!((code, &report["method"], &report["beyond_digests"]), (0, &"digest".into(), &1.into()), "{report}");
        run(&mut other.client().unwrap(), &["TYPED.SET key 8"]);
        let (code, report) = found(&verify(one, other, &["--json"]));
        assert_eq!((code, &report["method"], &report["other_value"]), (1, &"digest".into(), &1.into()), "{report}");
    }
}

#[test]
fn fields_that_expire_are_a_difference_from_a_server_that_knows_no_such_thing() {
    let (Some(redis), Some(valkey)) = (require::redis(), require::valkey()) else { return };
    let (one, other) = (Server::start(valkey).unwrap(), Server::start(redis).unwrap());
    for server in [&one, &other] {
        run(&mut server.client().unwrap(), &["HSET hash f 1 g 2"]);
    }
    let (code, report) = found(&verify(&one, &other, &["--json"]));
    assert_eq!((code, &report["same"]), (0, &true.into()), "{report}");
    run(&mut one.client().unwrap(), &["HPEXPIREAT hash 9000000000000 FIELDS 1 f"]);
    for (one, other) in [(&one, &other), (&other, &one)] {
        let (code, report) = found(&verify(one, other, &["--json"]));
        assert_eq!((code, &report["other_value"]), (1, &1.into()), "{report}");
    }
}

#[test]
fn the_keys_of_a_database_that_only_one_of_them_has_are_a_difference() {
    for kind in require::kinds() {
        let (one, other) = (Server::builder(kind).databases(20).start().unwrap(), Server::start(kind).unwrap());
        run(&mut one.client().unwrap(), &["SET a 1", "SELECT 19", "SET b 1", "SET c 1"]);
        run(&mut other.client().unwrap(), &["SET a 1"]);
        for (primary, replica, which) in [(&one, &other, "missing"), (&other, &one, "extra")] {
            let (code, report) = found(&verify(primary, replica, &["--json"]));
            assert_eq!((code, &report[which], &report["databases"]), (1, &2.into(), &2.into()), "{report}");
        }
    }
}

#[test]
fn functions_that_may_not_be_read_are_not_taken_for_equal_ones() {
    for kind in require::kinds() {
        let rules = "~* +@read +ping +info +select +scan +debug";
        let guarded = || Server::builder(kind).user("check", "secret", rules).start().unwrap();
        let (one, other) = (guarded(), guarded());
        let code = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
            command.args(["verify", "--quiet", "--primary", &one.url(), "--replica", &other.url()]);
            command.args(["--primary-user", "check", "--replica-user", "check"]).env("REMORA_PASSWORD", "secret");
            let output = command.output().unwrap();
            (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        assert_eq!(code().0, 0, "{kind}: there is none");
        let library = "#!lua name=l\nredis.register_function('f', function() return 1 end)";
        one.client().unwrap().call(&["FUNCTION", "LOAD", library]).unwrap();
        let (code, said) = code();
        assert!(code == 4 && said.contains("FUNCTION LIST"), "{kind}: {code} {said}");
    }
}

#[test]
fn equal_digests_do_not_hide_another_expiry() {
    let Some(kind) = require::redis() else { return };
    let (primary, replica) = replicated(kind);
    run(&mut primary.client().unwrap(), &["SET deadline 1 PXAT 9000000000000"]);
    let mut copy = replica.client().unwrap();
    wait_for(|| copy.int(&["EXISTS", "deadline"]).unwrap() == 1);
    run(&mut copy, &["PEXPIREAT deadline 9000000000001"]);
    let (code, report) = found(&verify(&primary, &replica, &["--json"]));
    assert_eq!((code, &report["method"], &report["other_expiry"]), (1, &"digest".into(), &1.into()), "{report}");
}

#[test]
#[ignore = "long: make test-all"]
fn under_a_writer_at_full_speed_nothing_is_called_different_but_what_is() {
    for kind in require::kinds() {
        let (primary, replica) = replicated(kind);
        let writer = Workload::on(&primary).unwrap();
        writer.wait_for(2000);
        let (code, report) = found(&verify(&primary, &replica, &["--json"]));
        let count = |name: &str| report[name].as_u64().unwrap();
        // Only keys that the writer changes all the time may remain undecided.
        let decided = count("keys") - count("undecided");
        assert!(code == 0 || code == 9 && count("undecided") > 0, "{kind}: {code} {report}");
        assert!(decided * 10 >= count("keys") * 9, "{kind}: {report}");
        // In a database without other writers, so that the difference stays.
        run(&mut replica.client().unwrap(), &["SELECT 0", "SET strange:key 1"]);
        let (code, report) = found(&verify(&primary, &replica, &["--json"]));
        assert_eq!(
            (code, &report["shown"][0]["key"], &report["extra"]),
            (1, &"strange:key".into(), &1.into()),
            "{kind}: {report}"
        );
        writer.stop().unwrap();
        // Everything is decided once the writer rests.
        run(&mut replica.client().unwrap(), &["SELECT 0", "DEL strange:key"]);
        let (code, report) = found(&verify(&primary, &replica, &["--json"]));
        assert_eq!((code, &report["undecided"]), (0, &0.into()), "{kind}: {report}");
    }
}

#[test]
fn a_key_that_never_stands_still_is_undecided_and_all_others_are_the_same() {
    for kind in require::kinds() {
        let (one, other) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
        for server in [&one, &other] {
            run(&mut server.client().unwrap(), &["SET same 1", "RPUSH list a b", "SET busy never"]);
        }
        // It has another value at every moment, and never the other server's. The server finds more of these commands
        // between any two others, since the writer is always ahead of it and takes no answers.
        run(&mut one.client().unwrap(), &["SET busy 1"]);
        let over = AtomicBool::new(false);
        let (code, report) = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut client = one.client().unwrap();
                client.send(&["CLIENT", "REPLY", "OFF"]).unwrap();
                while !over.load(Ordering::Relaxed) {
                    (0..1000).for_each(|_| client.queue(&["INCR", "busy"]));
                    client.flush().unwrap();
                }
            });
            wait_for(|| one.client().unwrap().text(&["GET", "busy"]).unwrap() != "1");
            let output = verify(&one, &other, &["--json", "--recheck", "2"]);
            over.store(true, Ordering::Relaxed);
            found(&output)
        });
        assert_eq!((code, &report["undecided"], &report["keys"]), (9, &1.into(), &3.into()), "{kind}: {report}");
        assert_eq!(report["shown"], serde_json::json!([]), "{kind}: {report}");
    }
}

/// The most memory that a comparison may use. It holds a value of each side, and each server sends a group of values of
/// 8 MiB at a time.
const MOST_MEMORY: u64 = 48 << 20;

#[test]
#[ignore = "long: make test-all"]
fn the_memory_of_a_comparison_does_not_grow_with_the_data() {
    let Some(kind) = require::redis() else { return };
    let (one, other) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    for server in [&one, &other] {
        fill(server, 128, 3);
        // One value alone is larger than the bound, too.
        run(&mut server.client().unwrap(), &[&format!("SETRANGE long {} x", 2 * MOST_MEMORY)]);
    }
    let args = ["verify", "--quiet", "--json", "--digest", "never", "--primary", &one.url(), "--replica", &other.url()];
    let mut agent = Agent::start(env!("CARGO_BIN_EXE_remora"), &args).unwrap();
    agent.wait_for_success(LONG).unwrap();
    let report: serde_json::Value = serde_json::from_str(&agent.stdout()).unwrap();
    assert_eq!((&report["same"], &report["method"]), (&true.into(), &"values".into()), "{report}");
    let most = agent.peak_memory();
    assert!(most < MOST_MEMORY, "{} MiB for a data set of 224 MiB on each side", most >> 20);
}

#[test]
fn a_user_without_debug_and_memory_rules_gets_the_same_answer() {
    let Some(kind) = require::redis() else { return };
    let guarded = || {
        Server::builder(kind).user("check", "secret", "~* +@read +ping +info +select +scan -memory").start().unwrap()
    };
    let (primary, replica) = (guarded(), guarded());
    for server in [&primary, &replica] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
        command.args([
            "load",
            "--quiet",
            "--server",
            &server.url(),
            "--keys",
            "60",
            "--value-size",
            "20000",
            "--type",
            "mixed",
        ]);
        assert!(command.output().unwrap().status.success());
    }
    run(&mut replica.client().unwrap(), &["SET key:0 other"]);
    let output = Command::new(env!("CARGO_BIN_EXE_remora"))
        .args(["verify", "--quiet", "--json", "--primary", &primary.url(), "--replica", &replica.url()])
        .args(["--primary-user", "check", "--replica-user", "check"])
        .env("REMORA_PASSWORD", "secret")
        .output()
        .unwrap();
    let (code, report) = found(&output);
    assert_eq!((code, &report["method"], &report["keys"]), (1, &"values".into(), &60.into()), "{report}");
    assert_eq!((&report["shown"][0]["key"], &report["other_value"]), (&"key:0".into(), &1.into()), "{report}");
}

#[test]
#[ignore = "long: make test-all"]
fn the_acl_rules_of_the_help_page_suffice() {
    let rules = remora_agent::server::Task::Verify.rules();
    for kind in require::kinds() {
        let quick = || Server::builder(kind).config("repl-diskless-sync-delay", 0);
        let guarded = || quick().user("check", "secret", rules).start().unwrap();
        let (primary, replica) = (guarded(), guarded());
        let mut one = primary.client().unwrap();
        fill_every_type(&mut one, 3).unwrap();
        replica.replicate(&primary).unwrap();
        replica.wait_for_link(LONG).unwrap();
        for digest in ["auto", "never"] {
            let output = Command::new(env!("CARGO_BIN_EXE_remora"))
                .args(["verify", "--quiet", "--json", "--primary", &primary.url(), "--replica", &replica.url()])
                .args(["--primary-user", "check", "--replica-user", "check", "--digest", digest])
                .env("REMORA_PASSWORD", "secret")
                .output()
                .unwrap();
            let (code, report) = found(&output);
            let functions = &report["functions"]["compared"]["same"];
            assert_eq!((code, functions), (0, &true.into()), "{kind}: {report}");
            // Hashes with expiring fields: a digest does not cover them.
            let method = if digest == "auto" && !kind.expires_hash_fields() { "digest" } else { "values" };
            assert_eq!(report["method"], method, "{kind}");
        }
    }
}

#[test]
fn a_server_is_not_compared_with_itself() {
    let Some(kind) = require::redis() else { return };
    let server = Server::start(kind).unwrap();
    let output = verify(&server, &server, &[]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("same server"));
}

fn wait_for(mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LONG, "waited too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

// Verdicts: sources beside servers that do not hold what their primary holds, servers that do
// not execute or keep what they get, and what `--explain` says of each condition.

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
