//! Configuration files, read by the program itself.

use remora_lab::{Server, assert_same_data, require};

use crate::kit::{LONG, Stage, fill_keys, says};

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
    let file = check("[source]\nmemory = '1MiB'\n", 2, &["remora.toml:2"]);
    says(&stage.end(&["source", "--config", &file], 2), &["--memory comes from", "remora.toml:2"]);
    says(&stage.end(&["source", "--config", "/nowhere"], 2), &["/nowhere cannot be read"]);
}
