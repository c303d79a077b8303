//! The servers' own replication is exact, and the lab can verify that: Remora has to pass the same comparison.

use std::time::{Duration, Instant};

use remora_lab::workload::{Options, Workload, fill_every_type, key_count};
use remora_lab::{Kind, Server, assert_same_data, compare, random, require};

const SOON: Duration = Duration::from_secs(60);

fn primary(kind: Kind) -> Server {
    Server::builder(kind)
        .config("repl-diskless-sync", "yes")
        .config("repl-diskless-sync-delay", 0)
        .config("repl-backlog-size", "64mb")
        .config("client-output-buffer-limit", "replica 0 0 0")
        .start()
        .unwrap()
}

#[test]
fn a_native_replica_of_a_primary_under_every_kind_of_write_is_exact() {
    for kind in require::kinds() {
        let (primary, replica) = (primary(kind), Server::start(kind).unwrap());
        fill_every_type(&mut primary.client().unwrap(), random::seed("data")).unwrap();
        let writer = Workload::on(&primary).unwrap();
        replica.replicate(&primary).unwrap();
        replica.wait_for_link(SOON).unwrap();
        writer.wait_for(30_000);
        let counts = writer.stop().unwrap();
        assert!(counts.refused * 5 < counts.commands, "{counts:?}");
        let agreement = assert_same_data(&primary, &replica);
        assert_eq!(agreement.replid.len(), 40);
        assert_eq!(primary.fact("sync_full").unwrap(), "1");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_writer_runs_every_operation_and_is_refused_only_for_known_reasons() {
    for kind in require::kinds() {
        let server = Server::start(kind).unwrap();
        let writer = Workload::on(&server).unwrap();
        writer.wait_for(120_000);
        let counts = writer.stop().unwrap();
        let missing = ["flush", "swap", "big", "function", "stream-group", "transaction"]
            .into_iter()
            .find(|name| !counts.operations.contains_key(name));
        assert_eq!(missing, None, "{counts:?}");
        assert_eq!(counts.operations.contains_key("hash-field-expiry"), kind.expires_hash_fields());
        const KNOWN: [&str; 6] = [
            "ERR source and destination",
            "ERR no such key",
            "BUSYGROUP",
            "NOGROUP",
            "ERR Function not found",
            "ERR Library not",
        ];
        let strange: Vec<&String> =
            counts.refusals.keys().filter(|text| !KNOWN.iter().any(|known| text.starts_with(known))).collect();
        assert!(strange.is_empty(), "{:?}", counts.refusals);
    }
}

#[test]
fn a_writer_keeps_to_its_rate() {
    let Some(kind) = require::redis() else { return };
    let server = Server::start(kind).unwrap();
    let (rate, began) = (2000, Instant::now());
    let writer = Workload::start(server.client().unwrap(), Options::seeded(1).rate(rate)).unwrap();
    writer.wait_for(2 * rate);
    let (took, commands) = (began.elapsed(), writer.stop().unwrap().commands);
    // Its last commands were sent at once.
    assert!(took > Duration::from_millis(1500), "{commands} commands in {took:?}");
}

#[test]
fn the_data_set_has_every_encoding_and_is_the_same_for_the_same_seed() {
    for kind in require::kinds() {
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let keys = servers.each_ref().map(|server| fill_every_type(&mut server.client().unwrap(), 7).unwrap());
        assert!(keys[0] > 700 && keys[0] == keys[1], "{keys:?}");
        let mut client = servers[0].client().unwrap();
        let mut encoding = |key: &str| client.text(&["OBJECT", "ENCODING", key]).unwrap();
        for encoded in [
            "string:int",
            "string:embstr",
            "string:raw",
            "list:listpack",
            "list:quicklist",
            "set:hashtable",
            "zset:listpack",
            "zset:skiplist",
            "hash:listpack",
            "hash:hashtable",
        ] {
            // Redis 7.0 keeps short lists in a quicklist too.
            let old_list = kind == Kind::Redis7 && encoded == "list:listpack";
            let wanted = if old_list { "quicklist" } else { encoded.split(':').nth(1).unwrap() };
            assert_eq!(encoding(encoded), wanted, "{kind} {encoded}");
        }
        assert_eq!(encoding("set:intset:64"), "intset");
        assert_eq!(key_count(&mut client).unwrap(), keys[0]);
        let [one, other] = servers.each_ref().map(|server| server.digest().unwrap());
        // The pending entries' ids contain the time of delivery; the digest does not cover it.
        assert_eq!(one, other);
    }
}

#[test]
fn a_replica_that_was_written_to_is_found_and_the_keys_are_named() {
    for kind in require::kinds() {
        let (primary, replica) =
            (primary(kind), Server::builder(kind).config("replica-read-only", "no").start().unwrap());
        let mut client = primary.client().unwrap();
        for key in ["same", "changed", "lost"] {
            client.ok(&["SET", key, "value"]).unwrap();
        }
        replica.replicate(&primary).unwrap();
        replica.wait_for_link(SOON).unwrap();
        let mut other = replica.client().unwrap();
        other.ok(&["SET", "changed", "otherwise"]).unwrap();
        other.int(&["DEL", "lost"]).unwrap();
        other.ok(&["SELECT", "3"]).unwrap();
        other.ok(&["SET", "new", "here"]).unwrap();

        let error = compare::same_data(&primary, &replica, SOON).unwrap_err().to_string();
        for part in
            ["db 0, changed: string", "db 0, lost: string (embstr, pttl -1) at the primary, missing", "db 3, new: only"]
        {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
        assert!(!error.contains("same:"), "{error}");
    }
}

#[test]
fn a_replica_with_another_time_of_expiry_or_another_function_is_found() {
    for kind in require::kinds() {
        let (primary, replica) =
            (primary(kind), Server::builder(kind).config("replica-read-only", "no").start().unwrap());
        primary.client().unwrap().ok(&["SET", "brief", "life", "EX", "1000"]).unwrap();
        replica.replicate(&primary).unwrap();
        replica.wait_for_link(SOON).unwrap();
        assert_same_data(&primary, &replica);

        let mut other = replica.client().unwrap();
        other.int(&["EXPIRE", "brief", "2000"]).unwrap();
        let code = "#!lua name=own\nredis.register_function('own', function() return 1 end)";
        other.text(&["FUNCTION", "LOAD", code]).unwrap();
        let error = compare::same_data(&primary, &replica, SOON).unwrap_err().to_string();
        assert!(error.contains("brief: expires at") && error.contains("function library"), "{error}");
    }
}
