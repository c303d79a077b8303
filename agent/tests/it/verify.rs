//! `remora verify` on real servers: equal data is found to be equal, whatever its encoding, and every difference is
//! found.

use std::{
    process::{Command, Output},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use remora_lab::{Agent, Client, Kind, Server, Workload, fill_every_type, require};

use crate::kit::{LONG, Stage, built_module, fill, number};

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
