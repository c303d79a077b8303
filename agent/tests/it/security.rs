//! `--security token`: the same sync over TLS, and ends that differ in it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use remora_lab::{Server, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, Stage, assert_untouched, fill_keys, number, primary, says};

const TLS: [&str; 2] = ["--security", "token"];

#[test]
fn a_replica_over_tls_is_exact_and_status_and_probe_use_tls_too() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 20_000, &"a value ".repeat(100));
    let mut source = stage.source(&primary.url(), &[&TLS[..], &["--no-shm"]].concat());
    let address = source.address.to_string();
    let token = stage.token.display().to_string();
    source.replicate(&server, &[&TLS[..], &["--transport", "tcp", "--lanes", "2"]].concat());
    assert_same_data(&primary, &server);
    source.agent.wait_for_line("TLS 1.3, authenticated by the token", LONG).unwrap();
    let common = ["--source", &address, "--token-file", &token, "--security", "token"];
    says(&stage.end(&[&["status"][..], &common].concat(), 0), &["snapshot"]);
    let probe = ["probe", "--transport", "tcp", "--sizes", "64KiB", "--depths", "4", "--time", "10ms"];
    says(&stage.end(&[&probe[..], &common].concat(), 0), &["tcp"]);
    let rdma = ["probe", "--transport", "verbs"];
    says(&stage.end(&[&rdma[..], &common].concat(), 5), &["RDMA is not encrypted"]);
}

#[test]
fn replicas_feed_each_other_over_tls() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
    fill_keys(&primary, 20_000, &"a value ".repeat(100));
    let source = Source::start(&primary, &[&TLS[..], &["--memory", "128MiB", "--slot-size", "128KiB"]].concat());
    let far = [&TLS[..], &["--transport", "tcp"]].concat();
    let mut lender = source.replica(&servers[0], &[&far[..], &["--stay"]].concat());
    lender.wait_for_line("in step; staying", LONG).unwrap();
    let mut reader = source.replica(&servers[1], &far);
    reader.wait_for_success(LONG).unwrap();
    assert!(reader.output().contains("reading slots from another replica"), "{}", reader.output());
    lender.signal(Signal::TERM).unwrap();
    lender.wait_for_success(LONG).unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
fn shared_memory_stays_the_best_transport_on_one_host() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let source = stage.source(&primary.url(), &TLS);
    source.replicate(&server, &[&TLS[..], &["--transport", "shm"]].concat());
    assert_same_data(&primary, &server);
}

#[test]
fn ends_that_differ_name_the_option_at_both() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    let token = stage.token.display().to_string();
    let mut encrypted = stage.source(&primary.url(), &TLS);
    let mut plain = stage.source(&primary.url(), &[]);
    let ask = |source: &str, security: &str| {
        let server = server.url();
        let common = ["--source", source, "--token-file", &token, "--security", security];
        let said = stage.end(&[&["status"][..], &common].concat(), 5);
        says(&said, &["--security", source]);
        let replica = ["replica", "--server", &server, "--retry-for", "0"];
        says(&stage.end(&[&replica[..], &common].concat(), 5), &["--security", source]);
    };
    // As an agent of an earlier version: it shows the source's text.
    ask(&encrypted.address.to_string(), "none");
    encrypted.agent.wait_for_line("it does not speak TLS: start it with --security token", LONG).unwrap();
    ask(&plain.address.to_string(), "token");
    plain.agent.wait_for_line("it speaks TLS: start this agent with --security token", LONG).unwrap();
    assert_untouched(&server);
    assert_eq!(number(&primary, "sync_full"), 0);
}

#[test]
fn a_stranger_at_the_port_of_tls_gets_no_answer_and_delays_no_replica() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let source = stage.source(&primary.url(), &TLS);
    // Half a greeting, a greeting that never ends, and another protocol.
    let endless = [&[0x16, 0x03, 0x01, 0x40, 0x00, 0x01, 0x00, 0x3f, 0xfc][..], &[0; 8000]].concat();
    let strangers: Vec<TcpStream> = [&[0x16, 0x03][..], &endless, b"GET / HTTP/1.1\r\n\r\n"]
        .into_iter()
        .map(|bytes| {
            let mut stream = TcpStream::connect(source.address).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        })
        .collect();
    source.replicate(&server, &[&TLS[..], &["--transport", "tcp"]].concat());
    assert_same_data(&primary, &server);
    for mut stream in strangers {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer); // closed, or reset because of bytes that were not read
        assert!(answer.is_empty(), "{answer:?}");
    }
}
