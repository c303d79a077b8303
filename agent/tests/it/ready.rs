//! `remora ready`: the exit code tells a probe whether a server can be given work.

use std::time::{Duration, Instant};

use remora_lab::{Server, require};

use crate::kit::{LONG, Source, Stage, ends, fill_keys, primary, quick, says};

fn ready(stage: &Stage, server: &Server, more: &[&str], code: i32) -> String {
    stage.end(&[&["ready", "--server", &server.url()], more].concat(), code)
}

#[test]
fn a_replica_is_ready_once_it_is_in_step_with_its_primary() {
    for kind in require::kinds() {
        let (stage, first) = (Stage::new(), primary(kind).start().unwrap());
        fill_keys(&first, 100, "x");
        says(&ready(&stage, &first, &[], 0), &["is ready: a primary"]);
        let server = Server::start(kind).unwrap();
        Source::start(&first, &[]).replicate(&server, &[]);
        let (host, port) = (first.address().ip().to_string(), first.port().to_string());
        let at = format!("{host}:{port}");
        says(&ready(&stage, &server, &["--max-lag", "1MiB", "--timeout", "20s"], 0), &["a replica of", &at]);

        // Nothing listens where it is sent: it waits as long as it is told to.
        server.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
        let began = Instant::now();
        let said = ready(&stage, &server, &["--timeout", "1s", "--link-only"], 13);
        says(&said, &["is not ready", "link to 127.0.0.1:1 is down"]);
        assert!(began.elapsed() > Duration::from_millis(700) && began.elapsed() < LONG);
        says(&ready(&stage, &server, &[], 13), &["its primary cannot be asked"]);

        // Its primary follows another server meanwhile, and it goes along.
        let other = quick(kind).start().unwrap();
        server.client().unwrap().ok(&["REPLICAOF", &host, &port]).unwrap();
        ready(&stage, &server, &["--timeout", "60s"], 0);
        first.client().unwrap().ok(&["REPLICAOF", &host, &other.port().to_string()]).unwrap();
        ready(&stage, &first, &["--timeout", "60s"], 0);
        ready(&stage, &server, &["--timeout", "60s"], 0);
    }
}

#[test]
fn each_change_is_said_while_it_is_watched() {
    let Some(kind) = require::redis() else { return };
    let (stage, first, server) = (Stage::new(), primary(kind).start().unwrap(), quick(kind).start().unwrap());
    let mut watch = stage.start(None, &["ready", "--server", &server.url(), "--watch", "100ms"]);
    watch.wait_for_line("is ready: a primary", LONG).unwrap();
    server.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
    watch.wait_for_line("is not ready", LONG).unwrap();
    let (host, port) = (first.address().ip().to_string(), first.port().to_string());
    server.client().unwrap().ok(&["REPLICAOF", &host, &port]).unwrap();
    watch.wait_for_line("is ready: a replica of", LONG).unwrap();
    assert_eq!(watch.output().matches("is ready: a primary").count(), 1, "{}", watch.output());
    watch.signal(rustix::process::Signal::TERM).unwrap();
    ends(&mut watch, 7);
}

#[test]
fn a_server_that_is_gone_is_an_error_of_its_own() {
    let Some(kind) = require::redis() else { return };
    let (stage, mut server) = (Stage::new(), quick(kind).start().unwrap());
    server.kill().unwrap();
    says(&ready(&stage, &server, &[], 4), &[&server.url()]);
}
