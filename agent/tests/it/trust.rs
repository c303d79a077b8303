//! Who is trusted: what each token permits, the source that proves its key, and the primary that gets the password of
//! the replica's server.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Kind, Server, Workload, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, assert_untouched, ends, fill_keys, follows, number, primary, quick, says, succeeds, syncs,
};

// What each token permits, and how tokens are replaced while the source runs.

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

// `remora source --identity` and `--source-key`: a holder of the token who poses as the source.

/// Makes a key of a source, and returns its file and its public half.
fn identity(stage: &Stage, name: &str) -> (String, String) {
    let file = stage.path(name);
    let made = stage.remora(&["token", "identity", &file]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    (file, String::from_utf8(made.stdout).unwrap().trim().to_owned())
}

#[test]
fn a_holder_of_the_token_cannot_pose_as_the_source_that_a_replica_knows() {
    let Some(kind) = require::redis() else { return };
    let (stage, server) = (Stage::new(), Server::start(kind).unwrap());
    let [primary, forged] = [(); 2].map(|()| primary(kind).start().unwrap());
    fill_keys(&primary, 1_000, "value");
    fill_keys(&forged, 10, "forged");
    let (file, key) = identity(&stage, "source.key");
    let (other_file, other_key) = identity(&stage, "other.key");
    assert_ne!(key, other_key);
    let replica = |source: &Source, key: &str| {
        source.replica(&server, &["--source-key", key, "--transport", "tcp", "--retry-for", "0"])
    };

    // An attacker with the token: without a key, and with a key of his own.
    for more in [&[][..], &["--identity", &other_file]] {
        let attacker = stage.source(&forged.url(), more);
        says(&ends(&mut replica(&attacker, &key), 5), &["is not the source of --source-key"]);
        let (address, token) = (attacker.address.to_string(), stage.token.display().to_string());
        let ask = ["--source", &address, "--token-file", &token, "--source-key", &key];
        for command in [&["status"][..], &["probe", "--transport", "tcp"]] {
            says(&stage.end(&[command, &ask].concat(), 5), &["is not the source of --source-key"]);
        }
        attacker.stop();
    }
    // One who has no TLS at all.
    let attacker = stage.source(&forged.url(), &["--security", "none"]);
    says(&ends(&mut replica(&attacker, &key), 5), &["does not speak TLS", "--security"]);
    attacker.stop();
    assert_untouched(&server);
    assert_eq!(number(&forged, "sync_full"), 0);

    // The true one, which is no other after a restart.
    let source = stage.source(&primary.url(), &["--identity", &file]);
    says(&source.agent.output(), &[&format!("--source-key {key}")]);
    source.stop();
    let source = stage.source(&primary.url(), &["--identity", &file]);
    let mut agent = replica(&source, &key);
    says(&ends(&mut agent, 0), &["protection=plaintext on loopback"]);
    assert_same_data(&primary, &server);
    // A command that expects no key is served too.
    source.status();
}

#[test]
fn a_key_that_cannot_be_used_is_named_before_anything_begins() {
    let Some(kind) = require::redis() else { return };
    let (stage, server) = (Stage::new(), Server::start(kind).unwrap());
    let (file, key) = identity(&stage, "source.key");
    says(&stage.end(&["token", "identity", &file], 3), &[&file, "left alone"]);
    let (url, token) = (server.url(), stage.token.display().to_string());
    let source = ["source", "--server", &url, "--token-file", &token, "--listen", "127.0.0.1:0"];
    for (option, code, texts) in [
        (&["--identity", "/nowhere/key"][..], 3, &["/nowhere/key (--identity)"][..]),
        (&["--identity", &token], 3, &["no private Ed25519 key", "remora token identity"]),
        (&["--identity", &file, "--security", "none"], 2, &["--identity needs TLS"]),
    ] {
        says(&stage.end(&[&source[..], option].concat(), code), texts);
    }
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o604)).unwrap();
    says(&stage.end(&[&source[..], &["--identity", &file]].concat(), 3), &["mode 0604", "chmod"]);
    let status = ["status", "--source", "127.0.0.1:1", "--token-file", &token];
    says(&stage.end(&[&status[..], &["--source-key", "12ab"]].concat(), 2), &["64 hexadecimal digits"]);
    says(&stage.end(&[&status[..], &["--source-key", &key, "--security", "none"]].concat(), 2), &["needs TLS"]);
}

// Who gets the password of the replica's server: a primary for which more than the source's word speaks.

/// The password of the true primary, which the replica's server has as `masterauth`.
const PASSWORD: &str = "s3cret-primary";

/// An attacker's address, which is neither the source's nor the primary's.
fn trap() -> TcpListener {
    TcpListener::bind("127.0.0.2:0").unwrap()
}

/// Whether a connection has arrived. Call it after the agent's end: what the kernel has accepted waits here.
fn has_a_visitor(trap: &TcpListener) -> bool {
    trap.set_nonblocking(true).unwrap();
    match trap.accept() {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::WouldBlock => false,
        Err(error) => panic!("{error}"),
    }
}

/// What the first visitor sends. It is told that it is not welcome.
fn sent_by_a_visitor(trap: &TcpListener) -> String {
    let (mut visitor, _) = trap.accept().unwrap();
    visitor.set_read_timeout(Some(LONG)).unwrap();
    let mut buffer = [0; 4096];
    let read = visitor.read(&mut buffer).unwrap();
    let _ = visitor.write_all(b"-ERR no\r\n"); // the visitor may have left
    String::from_utf8_lossy(&buffer[..read]).into_owned()
}

fn guarded(kind: Kind) -> Server {
    let primary = quick(kind).require_pass(PASSWORD).start().unwrap();
    fill_keys(&primary, 100, "confidential");
    primary
}

fn with_the_password(kind: Kind) -> Builder {
    Server::builder(kind).master_auth(None, PASSWORD)
}

/// The attacker holds the token, and runs a source of a server of its own.
#[test]
fn a_source_that_lies_about_the_primary_gets_no_connection_and_so_no_password() {
    for kind in require::kinds() {
        let (stage, forged) = (Stage::new(), quick(kind).start().unwrap());
        let (trap, replica) = (trap(), with_the_password(kind).start().unwrap());
        let address = trap.local_addr().unwrap().to_string();
        let liar = stage.source(&forged.url(), &["--announce", &address]);
        let expected = ["--expect-primary", "127.0.0.1:6379", "--expect-primary", "db1:6379"];
        for more in [&[][..], &["--dry-run"], &["--replace", "--stay"]] {
            let said = ends(&mut stage.replica(&replica.url(), liar.address, more), 3);
            says(&said, &[&format!("--expect-primary {address}"), "masterauth", "--source-key"]);
        }
        let said = ends(&mut stage.replica(&replica.url(), liar.address, &expected), 3);
        says(&said, &[&address, "--expect-primary names 127.0.0.1:6379, db1:6379"]);
        assert!(!has_a_visitor(&trap), "a connection arrived at {address}");
        assert_untouched(&replica);
        assert_eq!(number(&forged, "sync_full"), 0);

        // What the attack would get: the same replica agent, told to trust that address.
        trap.set_nonblocking(false).unwrap();
        let mut deceived = stage.replica(&replica.url(), liar.address, &["--expect-primary", &address]);
        let sent = sent_by_a_visitor(&trap);
        assert!(sent.contains(PASSWORD), "{sent}");
        ends(&mut deceived, 3);
        assert_untouched(&replica);
    }
}

/// The source's address is that of the attacker: only the option can tell the ports apart.
#[test]
fn with_expect_primary_another_port_of_the_sources_host_gets_no_password_either() {
    let Some(kind) = require::redis() else { return };
    let (stage, forged) = (Stage::new(), quick(kind).start().unwrap());
    let replica = with_the_password(kind).start().unwrap();
    let trap = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = trap.local_addr().unwrap().to_string();
    let liar = stage.source(&forged.url(), &["--announce", &address]);
    let said = ends(&mut stage.replica(&replica.url(), liar.address, &["--expect-primary", "127.0.0.1:6379"]), 3);
    says(&said, &[&address]);
    assert!(!has_a_visitor(&trap), "a connection arrived at {address}");
    assert_untouched(&replica);
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_elsewhere_is_followed_if_it_is_expected_or_was_followed_before_or_the_source_proves_its_key() {
    for kind in require::kinds() {
        let (stage, primary) = (Stage::new(), guarded(kind));
        let file = stage.secret("password", PASSWORD);
        let key_file = stage.path("source.key");
        let made = stage.remora(&["token", "identity", &key_file]).output().unwrap();
        let key = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        let announced = format!("localhost:{}", primary.port());
        let options = ["--password-file", &file, "--announce", &announced, "--identity", &key_file];
        let source = stage.source(&primary.url(), &options);

        let follower = with_the_password(kind).start().unwrap();
        follower.client().unwrap().call(&["REPLICAOF", "localhost", &primary.port().to_string()]).unwrap();
        wait_until("the server to be in step with its primary", LONG, || {
            let status = follower.fact("master_link_status")?;
            Ok(if status == "up" { Ok(()) } else { Err(status) })
        })
        .unwrap();
        let stranger = || with_the_password(kind).start().unwrap();
        let cases: [(Server, &[&str]); 3] = [
            (follower, &["--replace"]),
            (stranger(), &["--source-key", &key]),
            (stranger(), &["--expect-primary", "127.0.0.2:6379", "--expect-primary", &announced]),
        ];
        for (replica, more) in cases {
            succeeds(&mut stage.replica(&replica.url(), source.address, more), &replica);
            assert_eq!(follows(&replica), announced);
            assert_eq!(replica.configured("masterauth").unwrap(), PASSWORD);
            assert_same_data(&primary, &replica);
        }
        let without = stranger();
        says(&ends(&mut stage.replica(&without.url(), source.address, &[]), 3), &["--expect-primary"]);
        assert_untouched(&without);
    }
}

/// A server without a password may follow any primary. One that gets it during the sync must not send it there.
#[test]
fn a_password_that_the_server_gets_during_the_sync_is_not_for_an_unknown_primary_either() {
    for kind in require::kinds() {
        let (stage, primary) = (Stage::new(), quick(kind).start().unwrap());
        fill_keys(&primary, 100, "value");
        let replica = Server::start(kind).unwrap();
        let announced = format!("localhost:{}", primary.port());
        let source = stage.source(&primary.url(), &["--announce", &announced]);
        let mut agent = stage.replica(&replica.url(), source.address, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let link = follows(&replica);
        replica.configure("masterauth", PASSWORD).unwrap();
        agent.signal(Signal::TERM).unwrap();
        says(
            &ends(&mut agent, 6),
            &["masterauth", &format!("--expect-primary {announced}"), "still follows our closed link"],
        );
        assert_eq!(follows(&replica), link);
        assert_eq!(replica.configured("masterauth").unwrap(), PASSWORD);
        assert!(!replica.log().contains(&announced), "{}", replica.log());
    }
}
