//! `--security`: the same sync over TLS and sealed tables, what the default is for each address, and ends that differ in
//! it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Net, Server, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, assert_untouched, ends, fill_keys, load, number, primary, says, steady_writer, succeeds,
};
use crate::module::{method, with_module};

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
    source.agent.wait_for_line("security=\"TLS 1.3, token\"", LONG).unwrap();
    let common = ["--source", &address, "--token-file", &token, "--security", "token"];
    says(&stage.end(&[&["status"][..], &common].concat(), 0), &["snapshot"]);
    let probe = ["probe", "--transport", "tcp", "--sizes", "64KiB", "--depths", "4", "--time", "10ms"];
    says(&stage.end(&[&probe[..], &common].concat(), 0), &["tcp"]);
}

/// The snapshot is larger than the source's memory, so slots of both tables are reused while others are sealed, and the
/// stream is read from the sealed journal while clients write.
#[test]
#[ignore = "long: make test-all"]
fn a_window_of_sealed_slots_and_a_sealed_journal_carry_every_byte() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    fill_keys(&primary, 40_000, &"a value ".repeat(100));
    let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
    let small = ["--memory", "48MiB", "--journal-memory", "32MiB", "--slot-size", "64KiB", "--no-shm"];
    let source = Source::start(&primary, &[&TLS[..], &small].concat());
    let workload = steady_writer(&primary);
    let mut agents =
        servers.each_ref().map(|server| source.replica(server, &[&TLS[..], &["--transport", "tcp"]].concat()));
    for (agent, server) in agents.iter_mut().zip(&servers) {
        crate::kit::succeeds(agent, server);
    }
    workload.stop().unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
    let said = source.agent.output();
    assert!(!said.contains("cannot be sealed"), "{said}");
}

/// The server's child writes the plain table in its own process. A thread of the source follows it.
#[test]
#[ignore = "long: make test-all"]
fn what_the_servers_child_writes_into_a_window_is_sealed_behind_it() {
    let Some(kind) = require::redis() else { return };
    let (primary, server) = (with_module(kind).start().unwrap(), Server::start(kind).unwrap());
    load(&primary, 300, 300_000);
    let walk = ["--memory", "32MiB", "--slot-size", "256KiB", "--module-capture", "walk"];
    let mut source = Source::start(&primary, &[&TLS[..], &walk].concat());
    source.replicate(&server, &[&TLS[..], &["--transport", "tcp", "--memory", "16MiB"]].concat());
    assert_eq!(method(&mut source), "the module");
    assert_same_data(&primary, &server);
}

/// The first agent is killed while slots arrive. The second one finds ciphertext, and opens it with the key of its offer.
#[test]
#[ignore = "long: make test-all"]
fn slots_in_the_state_folder_are_ciphertext_and_the_next_agent_goes_on_with_them() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    let value = "a value ".repeat(100);
    fill_keys(&primary, 20_000, &value);
    let source = stage.source(&primary.url(), &[&TLS[..], &["--no-shm", "--upload-limit", "4MiB"]].concat());
    let folder = stage.path("state");
    let args = [&TLS[..], &["--transport", "tcp", "--state-dir", &folder]].concat();
    let slots = std::path::Path::new(&folder).join("slots");
    let mut first = source.replica(&server, &args);
    wait_until("some slots on disk", LONG, || {
        let length = std::fs::metadata(&slots).map_or(0, |about| about.len());
        Ok(if length > 2 << 20 { Ok(()) } else { Err(format!("{length} bytes")) })
    })
    .unwrap();
    first.kill().unwrap();
    let on_disk = std::fs::read(&slots).unwrap();
    assert!(!on_disk.windows(16).any(|bytes| bytes == &value.as_bytes()[..16]), "plain bytes are on disk");
    let mut second = source.replica(&server, &args);
    crate::kit::succeeds(&mut second, &server);
    says(&second.output(), &["verifying the slots in the state folder"]);
    assert_same_data(&primary, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_feed_each_other_over_tls() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
    fill_keys(&primary, 20_000, &"a value ".repeat(100));
    let source = Source::start(&primary, &[&TLS[..], &["--memory", "128MiB", "--slot-size", "128KiB"]].concat());
    let far = [&TLS[..], &["--transport", "tcp"]].concat();
    let mut lender = source.replica(&servers[0], &[&far[..], &["--stay"]].concat());
    lender.wait_for_event("in_step", LONG).unwrap();
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
#[ignore = "long: make test-all"]
fn the_status_and_the_logs_of_both_ends_name_what_protects_the_data() {
    let Some(kind) = require::redis() else { return };
    let (primary, stage) = (primary(kind).start().unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let cases = [
        (&[][..], "tcp", "plaintext on loopback"),
        (&TLS[..], "tcp", "sealed, TLS 1.3, token"),
        (&TLS[..], "shm", "local: shared memory"),
    ];
    for (security, transport, text) in cases {
        let server = Server::start(kind).unwrap();
        let mut source = stage.source(&primary.url(), security);
        let mut replica = source.replica(&server, &[security, &["--transport", transport, "--stay"]].concat());
        replica.wait_for_event("in_step", LONG).unwrap();
        let quoted = format!("protection={text}");
        let read = replica.wait_for_event("source_read", LONG).unwrap();
        says(&read, &[&quoted]);
        says(&source.agent.wait_for_event("replica_reads", LONG).unwrap(), &[&quoted]);
        says(&source.drawn_status(), &[text]);
        assert_eq!(source.status()["replicas"][0]["protection"], text);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn shared_memory_stays_the_best_transport_on_one_host() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let source = stage.source(&primary.url(), &TLS);
    source.replicate(&server, &[&TLS[..], &["--transport", "shm"]].concat());
    assert_same_data(&primary, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn the_default_is_tls_for_every_address_but_loopback() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let (stage, net) = (Stage::new(), Net::new().unwrap());
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let primary = primary(kind).on(&here).start().unwrap();
    let [far, second] = [(); 2].map(|()| Server::builder(kind).on(&there).start().unwrap());
    fill_keys(&primary, 10_000, &"a value ".repeat(100));
    let port = stage.source_on(&here, &primary.url(), &["--eager"]).address.port();
    let (own, everywhere) = (SocketAddr::new(here.address(), port), format!("0.0.0.0:{port}"));
    let mut source = stage.source_at(&everywhere, Some(&here), &primary.url(), &["--no-shm"]);
    says(&source.agent.output(), &["security=\"TLS 1.3, token; plaintext on loopback\""]);

    // Another host, and a third that reads from that one.
    let mut lender = stage.replica_on(&there, &far.url(), own, &["--stay"]);
    says(&lender.wait_for_event("source_read", LONG).unwrap(), &["protection=sealed, TLS 1.3, token"]);
    lender.wait_for_event("in_step", LONG).unwrap();
    let mut reader = stage.replica_on(&there, &second.url(), own, &["--transport", "tcp"]);
    let read = reader.wait_for_event("upstream_read", LONG).unwrap();
    says(&read, &["transport=\"tcp\"", "protection=sealed, TLS 1.3, token"]);
    succeeds(&mut reader, &second);

    // The same host, by loopback: neither end needs an option.
    let (loopback, token) = (format!("127.0.0.1:{port}"), stage.token.display().to_string());
    let mut status = stage.start(Some(&here), &["status", "--source", &loopback, "--token-file", &token]);
    says(&ends(&mut status, 0), &["TLS 1.3, token"]);

    // A replica that is meant to speak plaintext is told to use TLS.
    let plain = ["--security", "none", "--plaintext-network", "--retry-for", "0", "--replace"];
    says(&ends(&mut stage.replica_on(&there, &second.url(), own, &plain), 5), &["accepts TLS only", "--security"]);
    source.agent.wait_for_line("it does not speak TLS", LONG).unwrap();
    lender.signal(Signal::TERM).unwrap();
    lender.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &far);
    assert_same_data(&primary, &second);
}

#[test]
fn plaintext_on_a_network_is_refused_unless_it_is_said_to_be_meant() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let (stage, net) = (Stage::new(), Net::new().unwrap());
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let primary = primary(kind).on(&here).start().unwrap();
    let replica = Server::builder(kind).on(&there).start().unwrap();
    fill_keys(&primary, 100, "value");
    let (listen, token) = (format!("{}:0", here.address()), stage.token.display().to_string());
    let (absent, url) = (format!("{}:9", here.address()), replica.url());
    let none = ["--security", "none"];
    let source = ["source", "--server", &primary.url(), "--token-file", &token, "--listen"];
    for listen in [&listen, "0.0.0.0:0", "[::]:0"] {
        let said = ends(&mut stage.start(Some(&here), &[&source[..], &[listen], &none].concat()), 3);
        says(&said, &[listen, "--security none", "--plaintext-network", "omit"]);
    }
    let common = ["--token-file", &token, "--source", &absent];
    for command in [&["status"][..], &["probe"], &["replica", "--server", &url]] {
        let said = ends(&mut stage.start(Some(&there), &[command, &common, &none].concat()), 3);
        says(&said, &[&absent, "--security none", "--plaintext-network"]);
    }
    // A port for other replicas that they could reach by the network.
    let lending = ["replica", "--server", &url, "--token-file", &token, "--source", "127.0.0.1:9", "--peer-listen"];
    let said = ends(&mut stage.start(Some(&there), &[&lending[..], &["0.0.0.0:0"], &none].concat()), 3);
    says(&said, &["--peer-listen 0.0.0.0:0", "--plaintext-network"]);
    // RDMA, whatever its address is.
    let rdma = ["--listen", "127.0.0.1:0", "--rdma-address", "10.0.0.1"];
    let said = ends(&mut stage.start(Some(&here), &[&source[..5], &rdma].concat()), 3);
    says(&said, &["RDMA would not be encrypted", "--plaintext-network"]);
    // The option means nothing without the other one.
    let alone = ["status", "--source", &absent, "--token-file", &token, "--plaintext-network"];
    says(&stage.end(&alone, 2), &["--security none"]);

    let meant = [&none[..], &["--plaintext-network"]].concat();
    let source = stage.source_on(&here, &primary.url(), &meant);
    let mut agent = stage.replica_on(&there, &url, source.address, &[&meant[..], &["--stay"]].concat());
    agent.wait_for_event("in_step", LONG).unwrap();
    says(&agent.output(), &["protection=plaintext"]);
    assert_eq!(source.status()["replicas"][0]["protection"], "plaintext");
    assert_same_data(&primary, &replica);
}

/// Who has the token can ask the port. Only `--security` says that an end must not.
#[test]
fn without_an_option_each_command_finds_out_that_a_port_on_loopback_speaks_tls() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let source = stage.source(&primary.url(), &TLS);
    let (address, token) = (source.address.to_string(), stage.token.display().to_string());
    let common = ["--source", &address, "--token-file", &token];
    says(&stage.end(&[&["status"][..], &common].concat(), 0), &["snapshot"]);
    let probe = ["probe", "--transport", "tcp", "--sizes", "64KiB", "--depths", "4", "--time", "10ms"];
    says(&stage.end(&[&probe[..], &common].concat(), 0), &["tcp"]);
    let mut agent = stage.replica(&server.url(), source.address, &["--stay", "--transport", "tcp"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    assert_eq!(source.status()["replicas"][0]["protection"], "sealed, TLS 1.3, token");
    assert_same_data(&primary, &server);
    says(&stage.end(&[&["status", "--security", "none"][..], &common].concat(), 5), &["accepts TLS only"]);
}

#[test]
fn ends_that_differ_name_the_option_at_both() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    let token = stage.token.display().to_string();
    let mut encrypted = stage.source(&primary.url(), &TLS);
    let mut plain = stage.source(&primary.url(), &["--security", "none"]);
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
    plain.agent.wait_for_line("it speaks TLS: start this agent without --security none", LONG).unwrap();
    assert_untouched(&server);
    assert_eq!(number(&primary, "sync_full"), 0);
}

#[test]
#[ignore = "long: make test-all"]
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
