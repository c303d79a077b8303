//! `remora load` on real servers: exactly the given number of keys and bytes, and the same data for the same seed.

use std::process::{Command, Output};

use remora_lab::{Client, Server, require};

fn load(server: &Server, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
    command.args(["load", "--quiet", "--server", &server.url()]).args(more);
    command.env_remove("REMORA_PASSWORD").output().unwrap()
}

fn loaded(server: &Server, more: &[&str]) {
    let output = load(server, more);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Total length of every `step`-th item, from `first` on, of an answer that is a list.
fn bytes_in(client: &mut Client, command: &[&str], first: usize, step: usize) -> usize {
    let items = client.list(command).unwrap();
    items.iter().skip(first).step_by(step).map(|item| item.as_bytes().unwrap().len()).sum()
}

#[test]
fn keys_of_every_type_hold_exactly_the_bytes_asked_for() {
    for kind in require::kinds() {
        let server = Server::start(kind).unwrap();
        loaded(&server, &["--keys", "12", "--value-size", "100001", "--type", "mixed", "--prefix", "k"]);
        let mut client = server.client().unwrap();
        assert_eq!(client.int(&["DBSIZE"]).unwrap(), 12);
        assert_eq!(client.int(&["STRLEN", "k:0"]).unwrap(), 100_001);
        assert_eq!(bytes_in(&mut client, &["LRANGE", "k:1", "0", "-1"], 0, 1), 100_001);
        assert_eq!(bytes_in(&mut client, &["SMEMBERS", "k:2"], 0, 1), 100_001);
        assert_eq!(bytes_in(&mut client, &["ZRANGE", "k:3", "0", "-1"], 0, 1), 100_001);
        assert_eq!(bytes_in(&mut client, &["HGETALL", "k:4"], 1, 2), 100_001);
        let entries = client.list(&["XRANGE", "k:5", "-", "+"]).unwrap();
        let values =
            entries.iter().map(|entry| entry.as_array().unwrap()[1].as_array().unwrap()[1].as_bytes().unwrap().len());
        assert_eq!(values.sum::<usize>(), 100_001);
    }
}

#[test]
fn the_same_seed_gives_the_same_data_whatever_the_pipeline_and_another_seed_other_data() {
    let Some(kind) = require::redis() else { return };
    let server = Server::start(kind).unwrap();
    let common = ["--keys", "60", "--value-size", "5000", "--type", "mixed"];
    let mut digests = Vec::new();
    for (seed, pipeline) in [("1", "1"), ("1", "500"), ("2", "500")] {
        // Over the existing data: keys of the same names are replaced.
        loaded(&server, &[&common[..], &["--seed", seed, "--pipeline", pipeline]].concat());
        digests.push(server.digest().unwrap());
    }
    assert_eq!(digests[0], digests[1]);
    assert_ne!(digests[0], digests[2]);
    assert_eq!(server.client().unwrap().int(&["DBSIZE"]).unwrap(), 60);
}

#[test]
fn a_value_far_larger_than_the_buffer_arrives_whole() {
    let Some(kind) = require::redis() else { return };
    let server = Server::start(kind).unwrap();
    loaded(&server, &["--keys", "2", "--value-size", "40MiB"]);
    let mut client = server.client().unwrap();
    let values = ["key:0", "key:1"].map(|key| client.bytes(&["GET", key]).unwrap().unwrap());
    assert_eq!(values.each_ref().map(Vec::len), [40 << 20; 2]);
    assert_ne!(values[0], values[1]);
    // Random to its end: no part of the buffer was sent twice.
    assert_ne!(values[0][..4096], values[0][512 * 1024..][..4096]);
}

#[test]
fn database_and_expiry_are_as_given() {
    let Some(kind) = require::redis() else { return };
    let server = Server::start(kind).unwrap();
    loaded(&server, &["--keys", "7", "--value-size", "10", "--type", "mixed", "--db", "9", "--expire", "1h"]);
    let mut client = server.client().unwrap();
    assert_eq!(client.int(&["DBSIZE"]).unwrap(), 0);
    client.ok(&["SELECT", "9"]).unwrap();
    for number in 0..7 {
        let left = client.int(&["PTTL".to_owned(), format!("key:{number}")]).unwrap();
        assert!((3_500_000..=3_600_000).contains(&left), "key:{number} has {left} ms left");
    }
}

#[test]
fn compressible_values_compress_to_about_a_quarter() {
    let Some(kind) = require::redis() else { return };
    let server = Server::start(kind).unwrap();
    let mut client = server.client().unwrap();
    let mut dumped = |flag: &str| {
        loaded(&server, &["--keys", "1", "--value-size", "100000", flag]);
        client.bytes(&["DUMP", "key:0"]).unwrap().unwrap().len()
    };
    assert!((100_000..101_000).contains(&dumped("--random")));
    assert!((20_000..30_000).contains(&dumped("--compressible")));
}

#[test]
fn a_full_server_ends_the_load_with_the_servers_reason() {
    let Some(kind) = require::redis() else { return };
    let server = Server::builder(kind).max_memory(8 << 20).start().unwrap();
    let output = load(&server, &["--keys", "1000", "--value-size", "100KiB"]);
    let sentence = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{sentence}");
    assert!(sentence.contains("OOM") && sentence.contains("maxmemory"), "{sentence}");
}

#[test]
fn the_acl_rules_of_the_help_page_suffice() {
    let rules = remora_agent::server::Task::Load.rules();
    for kind in require::kinds() {
        let server = Server::builder(kind).user("filler", "secret", rules).start().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        std::fs::write(&file, "secret\n").unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let file = file.to_string_lossy();
        let as_user = ["--user", "filler", "--password-file", &file];
        loaded(
            &server,
            &[&as_user[..], &["--keys", "12", "--value-size", "99", "--type", "mixed", "--expire", "1d"]].concat(),
        );
    }
}
