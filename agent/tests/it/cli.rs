//! The command line as a process: output streams, exit codes and configuration files; and `remora load`.

use std::process::{Command, Output};

use crate::kit::{LONG, Stage, fill_keys, says};
use remora_lab::{Client, Server, assert_same_data, require};

fn remora(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_remora")).args(args).env_remove("REMORA_PASSWORD").output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_password_in_an_address_is_refused_and_not_repeated() {
    let commands = [
        vec!["load", "--keys", "1", "--value-size", "1", "--server", "redis://user:hunter2@db1"],
        vec!["verify", "--primary", "redis://:hunter2@db1", "--replica", "redis://db2"],
        vec!["source", "--token-file", "token", "--server", "rediss://hunter2@db1"],
        vec!["replica", "--token-file", "token", "--source", "db1:7379", "--server", "redis://user:hunter2@db1"],
    ];
    for command in commands {
        let output = remora(&command);
        let said = stdout(&output) + &stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("--password-file") && !said.contains("hunter2"), "{said}");
    }
}

#[test]
fn help_goes_to_stdout_and_ends_well_and_mistakes_go_to_stderr() {
    for command in ["source", "replica", "status", "verify", "load", "generate"] {
        let output = remora(&[command, "--help"]);
        assert_eq!(output.status.code(), Some(0), "{command}");
        assert!(stdout(&output).contains("Exit codes:") && output.stderr.is_empty(), "{command}");
    }
    let output = remora(&["replicate"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty() && stderr(&output).contains("replica"));
}

#[test]
fn a_name_that_could_change_what_a_terminal_shows_is_refused() {
    let args = ["replica", "--token-file", "token", "--source", "db1:7379", "--server", "redis://db2", "--name"];
    let output = remora(&[&args[..], &["evil\u{1b}[31m\nINFO forged"]].concat());
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("--name") && said.contains("printable"), "{said}");
}

#[test]
fn a_server_that_is_not_there_is_named_with_its_own_exit_code() {
    // Bound and closed again: no process listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("redis://127.0.0.1:{port}");
    let output = remora(&["load", "--keys", "1", "--value-size", "1", "--server", &url, "--retry-for", "0"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(stderr(&output).contains(&url) && output.stdout.is_empty(), "{}", stderr(&output));
}

/// A file with this text and mode, and the folder that it lies in.
fn secret_file(text: &str, mode: u32) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    (folder, file.to_string_lossy().into_owned())
}

#[test]
fn a_password_file_that_everybody_may_read_stops_it_before_anything_is_sent() {
    let (_folder, file) = secret_file("secret\n", 0o644);
    let output = remora(&[
        "load",
        "--keys",
        "1",
        "--value-size",
        "1",
        "--server",
        "redis://127.0.0.1:1",
        "--password-file",
        &file,
    ]);
    assert_eq!(output.status.code(), Some(3));
    assert!(stderr(&output).contains("chmod 600"), "{}", stderr(&output));
}

#[test]
fn completions_are_for_the_shell_asked_for() {
    let bash = stdout(&remora(&["generate", "completions", "bash"]));
    assert!(bash.contains("_remora()") && bash.contains("--token-file"));
    let fish = stdout(&remora(&["generate", "completions", "fish"]));
    assert!(fish.contains("complete -c remora"));
}

#[test]
fn a_new_token_is_in_a_file_for_its_owner_and_replaces_no_other() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    let path = file.to_string_lossy().into_owned();
    let output = remora(&["token", "new", &path]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o600);
    let token = std::fs::read_to_string(&file).unwrap();
    assert!(!(stdout(&output) + &stderr(&output)).contains(token.trim()), "the token is shown");

    let output = remora(&["token", "new", &path]);
    assert_eq!(output.status.code(), Some(3));
    assert!(stderr(&output).contains(&path), "{}", stderr(&output));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), token);

    let printed = remora(&["token", "new", "-"]);
    assert!(stdout(&printed).trim().len() == token.trim().len() && stdout(&printed) != token);
}

#[test]
fn a_token_that_can_be_guessed_is_refused_by_both_ends() {
    let (_folder, file) = secret_file("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n", 0o600);
    let common = ["--server", "redis://127.0.0.1:1", "--token-file", &file];
    for end in [&["source"][..], &["replica", "--source", "127.0.0.1:1"]] {
        let output = remora(&[end, &common].concat());
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        let said = stderr(&output);
        assert!(said.contains(&file) && said.contains("remora token new") && !said.contains("aaaa"), "{said}");
    }
}

/// Each says which option is meant, and what it takes.
#[test]
fn a_value_that_an_option_does_not_take_is_refused_with_what_it_takes() {
    let replica = ["replica", "--server", "redis://db2", "--source", "db1:7379", "--token-file", "token"];
    let source = ["source", "--server", "redis://db1", "--token-file", "token"];
    let load = ["load", "--server", "redis://db1", "--keys", "1", "--value-size", "1"];
    let plan = ["plan", "--server", "redis://db1"];
    for (command, option, value, words) in [
        (&source[..], "--memory", "10x", "KiB, MiB, GiB"),
        (&source, "--memory", "1.5GiB", "whole number"),
        (&source, "--max-age", "10x", "ms, s, m, h, d"),
        (&source, "--max-replicas", "many", "expected a whole number"),
        (&source, "--max-replicas", "0", "expected a number from 1 to"),
        (&source, "--listen", "7379", "ADDR:PORT, as in 10.0.0.5:7379"),
        (&source, "--listen", "localhost:7379", "a name is not an address"),
        (&source, "--metrics", "9100", "ADDR:PORT"),
        (&source, "--replica-name", "a b", "expected a DNS name or an IP address"),
        (&source, "--upload-limit", "fast", "auto"),
        (&replica, "--rdma-address", "mlx5_0", "expected an IP address"),
        (&replica, "--listen", "127.0.0.1:80", "without a port"),
        (&replica, "--source-key", "12", "64 hexadecimal digits"),
        (&replica, "--zone", "a zone with a name of more than 32 bytes", "at most 32 bytes"),
        (&load, "--db", "first", "expected a whole number"),
        (&plan, "--rate", "10x", "Gbit"),
    ] {
        let output = remora(&[command, &[option, value]].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(option) && said.contains(words), "{option} {value}: {said}");
    }
}

#[test]
fn what_is_not_there_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing").to_string_lossy().into_owned();
    let (_folder, token) = secret_file("a token of sufficient length\n", 0o600);
    for (command, code, words) in [
        (&["status", "--source", "127.0.0.1:1", "--token-file", &missing][..], 3, "remora token new"),
        (&["status", "--source", "nowhere.invalid:7379", "--token-file", &token], 5, "the source nowhere.invalid:7379"),
        (&["restore", &missing], 3, "No such file"),
        (&["restore", &folder.path().to_string_lossy()], 3, "name what remora backup --to named"),
        (&["module", "layout", "--program", "/bin/true"], 8, "give the program of a Redis or Valkey server"),
    ] {
        let output = remora(command);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{command:?}: {said}");
        assert!(said.contains(words), "{command:?}: {said}");
    }
}

// Configuration files, read by the program itself.

#[test]
fn a_source_and_a_replica_with_all_options_in_one_file_make_an_exact_replica() {
    let Some(kind) = require::redis() else { return };
    let (primary, replica) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    primary.configure("repl-diskless-sync-delay", "0").unwrap();
    fill_keys(&primary, 100, "x");
    let stage = Stage::new();
    let token = stage.secret("secret", "a token of sufficient length");
    let file = stage.secret("remora.toml", "");
    let write = |source: &str| {
        let text = format!(
            "log-level = 'debug'\n[source]\nserver = '{}'\nlisten = '127.0.0.1:0'\ntoken-file = ['{token}']\n\
             [replica]\nserver = '{}'\nsource = '{source}'\ntoken-file = '{token}'\n",
            primary.url(),
            replica.url()
        );
        std::fs::write(&file, text).unwrap();
    };
    write("127.0.0.1:1");
    let mut source = stage.start(None, &["source", "--config", &file]);
    let line = source.wait_for_event("source_ready", LONG).unwrap();
    let address = line.split_whitespace().find_map(|word| word.strip_prefix("listening=")).unwrap().to_owned();
    write(&address);
    stage.end(&["replica", "--config", &file], 0);
    assert_same_data(&primary, &replica);

    let said = stage.end(&["config", "check", &file], 0);
    says(&said, &["remora source: 4 options, complete", "remora replica: 4 options, complete"]);
}

#[test]
fn mistakes_in_a_file_are_named_with_their_line() {
    let stage = Stage::new();
    let check = |text: &str, code: i32, words: &[&str]| {
        let file = stage.path("remora.toml");
        std::fs::write(&file, text).unwrap();
        let said = stage.end(&["config", "check", &file], code);
        says(&said, words);
        file
    };
    check("[source]\nserver = 'redis://h:1'\n", 0, &["remora source: 1 option; the command line", "--token-file"]);
    check(
        "[source]\nmax-replica = 3\n",
        2,
        &["remora.toml:2: max-replica is not an option", "did you mean max-replicas"],
    );
    check(
        "[source]\nmemory = '1 elephant'\n",
        2,
        &["'--memory", "--memory comes from", "remora.toml:2", "is not valid"],
    );
    check("log-level = 'info'\n", 2, &["options of no command"]);
    check("[sorce]\nmemory = '1GiB'\n", 2, &["remora.toml:1: sorce is neither a command", "did you mean source"]);
    let file = check("[source]\nmemory = '1MiB'\n", 2, &["remora.toml:2"]);
    says(&stage.end(&["source", "--config", &file], 2), &["--memory comes from", "remora.toml:2"]);
    says(&stage.end(&["source", "--config", "/nowhere"], 2), &["/nowhere cannot be read"]);
}

// `remora load` on real servers: exactly the given number of keys and bytes, and the same data for the same seed.

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
