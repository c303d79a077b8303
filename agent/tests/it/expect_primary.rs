//! Who gets the password of the replica's server: a primary for which more than the source's word speaks.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Kind, Server, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{LONG, Stage, assert_untouched, ends, fill_keys, follows, number, quick, says, succeeds};

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
