//! What each token permits, and how tokens are replaced while the source runs.

use remora_lab::{Server, Workload, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{LONG, Stage, fill_keys, primary, says, syncs};

const MONITOR: &str = "a token for the monitoring";

#[test]
fn a_token_for_monitoring_gets_the_status_and_nothing_else() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let monitor = stage.secret("monitor", MONITOR);
    let before = syncs(&primary);
    let source = stage.source(&primary.url(), &["--monitor-token-file", &monitor]);
    let address = source.address.to_string();
    let with_monitor = ["--source", &address, "--token-file", &monitor];
    let said = stage.end(&[&["status"][..], &with_monitor].concat(), 0);
    says(&said, &["snapshot   none"]);

    let said = stage.end(&[&["replica", "--server", &server.url()][..], &with_monitor].concat(), 5);
    says(&said, &["the token or the certificate permits the status only"]);
    let said = stage.end(&[&["probe", "--transport", "tcp"][..], &with_monitor].concat(), 5);
    says(&said, &["the token or the certificate permits the status only"]);
    assert_eq!(syncs(&primary), before, "no snapshot was taken");
    assert_eq!(server.fact("role").unwrap(), "master");
    assert!(source.status()["generation"].is_null());

    // The replicas' own token still permits everything.
    source.replicate(&server, &[]);
    assert_same_data(&primary, &server);
}

#[test]
fn a_token_for_measurements_probes_and_gets_the_status_and_nothing_else() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let prober = stage.secret("prober", "a token for measurements");
    let monitor = stage.secret("monitor", MONITOR);
    let before = syncs(&primary);
    let source = stage.source(&primary.url(), &["--probe-token-file", &prober, "--monitor-token-file", &monitor]);
    let address = source.address.to_string();
    let with = |token: &str| ["--source".to_owned(), address.clone(), "--token-file".to_owned(), token.to_owned()];
    let end = |command: &[&str], token: &str, code| {
        let given = with(token);
        stage.end(&[command, &given.each_ref().map(String::as_str)].concat(), code)
    };
    let probe = ["probe", "--transport", "tcp", "--sizes", "64KiB", "--depths", "4", "--time", "10ms"];
    says(&end(&probe, &prober, 0), &["tcp"]);
    says(&end(&["status"], &prober, 0), &["snapshot   none"]);
    says(&end(&probe, &monitor, 5), &["permits the status only"]);
    let said = end(&["replica", "--server", &server.url()], &prober, 5);
    says(&said, &["the token or the certificate permits the status and measurements only"]);
    assert_eq!(syncs(&primary), before, "no snapshot was taken");
    assert_eq!(server.fact("role").unwrap(), "master");
    source.replicate(&server, &[]);
    assert_same_data(&primary, &server);
}

#[test]
fn a_token_is_replaced_while_the_source_runs_and_conversations_go_on() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let (first, second) =
        (stage.secret("first", "the first of two tokens"), stage.secret("second", "the second of two"));
    let mut source = stage.source(&primary.url(), &["--token-file", &first, "--token-file", &second]);
    let address = source.address.to_string();
    let status = |token: &str, code| stage.end(&["status", "--source", &address, "--token-file", token], code);
    for token in [&first, &second] {
        status(token, 0);
    }
    let mut staying = source.replica(&server, &["--stay"]);
    staying.wait_for_event("in_step", LONG).unwrap();

    let former = stage.secret("former", "the first of two tokens");
    stage.secret("first", "a token of the next year");
    status(&first, 5); // the source has not read it yet
    source.agent.signal(Signal::HUP).unwrap();
    source.agent.wait_for_event("tokens_reread", LONG).unwrap();
    status(&first, 0);
    status(&second, 0);
    says(&status(&former, 5), &["token"]);

    // A file that cannot be used changes nothing.
    stage.secret("first", "short");
    source.agent.signal(Signal::HUP).unwrap();
    source.agent.wait_for_event("tokens_kept", LONG).unwrap();
    status(&second, 0);

    let writer = Workload::on(&primary).unwrap();
    writer.wait_for(500);
    writer.stop().unwrap();
    assert_same_data(&primary, &server);
    staying.signal(Signal::TERM).unwrap();
    staying.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
}

#[test]
fn a_replica_that_stays_reads_its_token_again_and_joins_a_source_that_knows_only_the_new_one() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let token = stage.secret("rotated", "the first of two tokens");
    let start = |listen: &str| {
        let args = ["source", "--server", &primary.url(), "--listen", listen, "--token-file", &token];
        let mut source = stage.start(None, &args);
        let ready = source.wait_for_event("source_ready", LONG).unwrap();
        let address = ready.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
        (source, address)
    };
    let (mut source, address) = start("127.0.0.1:0");
    let args = ["replica", "--server", &server.url(), "--source", &address, "--token-file", &token, "--stay"];
    let mut staying = stage.start(None, &args);
    staying.wait_for_event("in_step", LONG).unwrap();

    stage.secret("rotated", "a token of the next year");
    staying.signal(Signal::HUP).unwrap();
    staying.wait_for_event("tokens_reread", LONG).unwrap();
    source.signal(Signal::TERM).unwrap();
    source.wait_for_success(LONG).unwrap();
    let (source, _) = start(&address);
    staying.wait_for_event("in_step", LONG).unwrap();
    drop(source);
    staying.signal(Signal::TERM).unwrap();
    staying.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
}

#[test]
fn one_token_in_two_files_is_refused_by_the_names_of_the_files() {
    let Some(kind) = require::redis() else { return };
    let (server, stage) = (Server::start(kind).unwrap(), Stage::new());
    let (one, other) = (stage.secret("one", MONITOR), stage.secret("other", MONITOR));
    let args = ["source", "--listen", "127.0.0.1:0", "--server", &server.url(), "--token-file", &one];
    says(&stage.end(&[&args[..], &["--monitor-token-file", &other]].concat(), 3), &[&one, &other, "the same token"]);
    let many: Vec<String> =
        (0..9).map(|n| stage.secret(&format!("t{n}"), &format!("the token number {n:02}"))).collect();
    let many: Vec<&str> = many.iter().flat_map(|file| ["--token-file", file]).collect();
    says(&stage.end(&[&args[..5], &many[..]].concat(), 3), &["9 tokens", "at most 8"]);
}
