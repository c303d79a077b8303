//! What protects a sync between agents: the same sync over TLS and sealed tables (`--security`), with certificates on both
//! ends (`mtls`), and what tokens, keys of sources and the password of a server permit.
//!
//! The default is tested for each kind of address, and ends that differ in it.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, SystemTime};

use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, assert_untouched, ends, fill_keys, follows, load, number, primary, quick, says, steady_writer,
    succeeds, syncs,
};
use crate::sync::module::{method, with_module};
use remora_lab::server::{Authority, Tls};
use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Kind, Net, Server, Workload, assert_same_data, require};

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

// `--security mtls`: agents with certificates, alone and together with a token; what happens when a certificate is not
// good enough; and new files while a source runs.

/// The host by which the agents of these tests reach each other.
const HOST: &str = "127.0.0.1";

/// The options of an agent with these files.
pub(crate) fn options(files: &Tls) -> Vec<String> {
    let path = |path: &std::path::Path| path.display().to_string();
    ["--security", "mtls", "--cert", &path(&files.certificate), "--key", &path(&files.key), "--ca", &path(&files.ca)]
        .map(str::to_owned)
        .to_vec()
}

pub(crate) fn words(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

/// Starts a command that connects to the source with these files and without a token.
fn start(stage: &Stage, command: &[&str], source: &Source, files: &Tls) -> Agent {
    let (address, options) = (source.address.to_string(), options(files));
    stage.start(None, &[command, &["--source", &address], &words(&options)].concat())
}

/// Starts a source on loopback with these files and without a token. The kit's sources have one.
fn source_without_token(stage: &Stage, server: &Server, files: &Tls) -> (Agent, String) {
    let (url, options) = (server.url(), options(files));
    let args = ["source", "--server", &url, "--listen", "127.0.0.1:0", "--no-shm", "--slot-size", "64KiB"];
    let mut agent = stage.start(None, &[&args[..], &words(&options)].concat());
    let ready = agent.wait_for_event("source_ready", LONG).unwrap();
    let address = ready.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
    (agent, address)
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_with_certificates_need_no_token_and_feed_each_other() {
    let Some(kind) = require::redis() else { return };
    let (primary, stage) = (primary(kind).start().unwrap(), Stage::new());
    let servers = [(); 2].map(|()| Server::start(kind).unwrap());
    fill_keys(&primary, 20_000, &"a value ".repeat(100));
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let [of_source, of_replica] = ["source", "replica"].map(|name| authority.sign(name, &[HOST]).unwrap());
    let (mut source, address) = source_without_token(&stage, &primary, &of_source);
    says(&source.output(), &["security=\"TLS 1.3, certificates\""]);
    let given = options(&of_replica);
    let replica = |server: &Server, more: &[&str]| {
        let url = server.url();
        let args = ["replica", "--server", &url, "--source", &address, "--transport", "tcp"];
        stage.start(None, &[&args[..], &words(&given), more].concat())
    };
    let mut lender = replica(&servers[0], &["--stay"]);
    lender.wait_for_event("in_step", LONG).unwrap();
    says(&lender.output(), &["protection=sealed, TLS 1.3, certificates"]);
    let mut reader = replica(&servers[1], &[]);
    let read = reader.wait_for_event("upstream_read", LONG).unwrap();
    says(&read, &["transport=\"tcp\"", "protection=sealed, TLS 1.3, certificates"]);
    reader.wait_for_success(LONG).unwrap();

    let common = ["--source", &address];
    let status = [&["status"], &common[..], &words(&given)].concat();
    says(&stage.end(&status, 0), &["sealed, TLS 1.3, certificates"]);
    let probe = ["probe", "--transport", "tcp", "--sizes", "64KiB", "--depths", "4", "--time", "10ms"];
    says(&stage.end(&[&probe[..], &common, &words(&given)].concat(), 0), &["tcp"]);

    // The token that stands in for the missing one is not a secret: it is worth nothing without a certificate.
    let known = stage.secret("known", "remora: certificates prove who the ends are");
    for (security, line) in
        [("token", "presents no certificate"), ("none", "it does not speak TLS: start it with --security mtls")]
    {
        // A source of its own: rejections are logged at a bounded rate.
        let (mut source, address) = source_without_token(&stage, &primary, &of_source);
        let status = ["status", "--token-file", &known, "--source", &address, "--security", security];
        says(&stage.end(&status, 5), &["--security"]);
        source.wait_for_line(line, LONG).unwrap();
    }
    source.signal(Signal::TERM).unwrap();
    source.wait_for_success(LONG).unwrap();
    lender.signal(Signal::TERM).unwrap();
    lender.wait_for_success(LONG).unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
fn with_certificates_and_a_token_both_must_be_right() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let files = authority.sign("agent", &[HOST]).unwrap();
    let given = options(&files);
    let source = stage.source(&primary.url(), &words(&given));
    says(&ends(&mut start(&stage, &["status"], &source, &files), 5), &["does not hold the same token"]);
    let (url, other) = (server.url(), stage.secret("other", "not the token of the source"));
    let wrong = ["replica", "--server", &url, "--token-file", &other, "--retry-for", "0"];
    says(&ends(&mut start(&stage, &wrong, &source, &files), 5), &["does not hold the same token"]);
    source.replicate(&server, &words(&given));
    assert_same_data(&primary, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn a_certificate_that_is_not_accepted_is_explained_at_both_ends_and_nothing_is_touched() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    let [authority, foreign] = ["ca", "foreign"].map(|name| Authority::new(stage.folder(), name).unwrap());
    let good = authority.sign("good", &[HOST]).unwrap();
    let token = stage.token.display().to_string();
    let url = server.url();
    let replica = ["replica", "--server", &url, "--token-file", &token, "--retry-for", "0"];

    // A source for another name. The replica may be told the name.
    let elsewhere = authority.sign("elsewhere", &["db1.example"]).unwrap();
    let source = stage.source(&primary.url(), &words(&options(&elsewhere)));
    let said = ends(&mut start(&stage, &replica, &source, &good), 5);
    says(&said, &["certificate for another name", "db1.example", "--peer-name"]);
    let named = ["status", "--token-file", &token, "--peer-name", "db1.example"];
    ends(&mut start(&stage, &named, &source, &good), 0);
    source.stop();

    // An authority that one of the two ends does not know. Each has a source of its own, since rejections are logged at a
    // bounded rate.
    let mut source = stage.source(&primary.url(), &words(&options(&good)));
    let stranger = foreign.sign("stranger", &[HOST]).unwrap();
    let said = ends(&mut start(&stage, &replica, &source, &stranger), 5);
    says(&said, &["presents a certificate that no authority in --ca has signed"]);
    source.agent.wait_for_line("refuses the certificate of this end", LONG).unwrap();
    source.stop();
    let mut source = stage.source(&primary.url(), &words(&options(&good)));
    let trusting = Tls { ca: good.ca.clone(), ..stranger };
    let said = ends(&mut start(&stage, &replica, &source, &trusting), 5);
    assert!(said.contains("refuses the certificate of this end") || said.contains("see its log"), "{said}");
    source.agent.wait_for_line("presents a certificate that no authority in --ca has signed", LONG).unwrap();

    source.stop();

    // No certificates at all.
    let mut source = stage.source(&primary.url(), &words(&options(&good)));
    let plain = ["status", "--token-file", &token, "--source", &source.address.to_string(), "--security", "token"];
    let said = stage.end(&plain, 5);
    assert!(said.contains("requires a certificate") || said.contains("see its log"), "{said}");
    source.agent.wait_for_line("presents no certificate", LONG).unwrap();
    source.stop();

    // Certificates where the other end has none.
    let source = stage.source(&primary.url(), &["--security", "token"]);
    let said = ends(&mut start(&stage, &replica, &source, &good), 5);
    says(&said, &["presents a certificate that no authority in --ca has signed", "--security mtls"]);
    source.stop();

    // It expires while the source runs.
    let end = SystemTime::now() + Duration::from_secs(6);
    let brief = authority.sign_until("brief", &[HOST], end).unwrap();
    let mut source = stage.source(&primary.url(), &words(&options(&brief)));
    let said = ends(&mut start(&stage, &["status", "--token-file", &token], &source, &brief), 0);
    says(&said, &["snapshot"]);
    // Started before its own certificate ends, so that it is the source that notices.
    let watching = ["status", "--token-file", &token, "--watch", "1s"];
    let mut watching = start(&stage, &watching, &source, &good);
    std::thread::sleep(end.duration_since(SystemTime::now()).unwrap_or_default() + Duration::from_secs(2));
    let said = ends(&mut start(&stage, &replica, &source, &good), 5);
    says(&said, &["presents a certificate that is not valid now", "expired"]);
    assert!(watching.ended().unwrap().is_none(), "an open conversation goes on: {}", watching.output());
    watching.signal(Signal::TERM).unwrap();
    source.agent.signal(Signal::TERM).unwrap();
    source.agent.wait(LONG).unwrap();

    assert_untouched(&server);
    assert_eq!(number(&primary, "sync_full"), 0);
}

#[test]
fn the_names_in_certificates_say_who_may_read_the_data_who_may_measure_and_who_gets_the_status_only() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let [of_source, of_replica, of_prober, of_monitor, of_other] =
        [HOST, "replica.invalid", "prober.invalid", "monitor.invalid", "other.invalid"]
            .map(|name| authority.sign(name, &[name]).unwrap());
    let names = [
        ["--replica-name", "replica.invalid", "--replica-name", "10.1.2.3"],
        ["--monitor-name", "monitor.invalid", "--probe-name", "prober.invalid"],
    ]
    .concat();
    let given = options(&of_source);
    let mut source = stage.source(&primary.url(), &[&words(&given)[..], &names].concat());
    let token = stage.token.display().to_string();
    let (url, with_token) = (server.url(), ["--token-file", &token]);
    let replica = [&["replica", "--server", &url, "--retry-for", "0"][..], &with_token].concat();
    let probe = [&["probe", "--transport", "tcp"][..], &with_token].concat();
    let status = [&["status"][..], &with_token].concat();

    says(&ends(&mut start(&stage, &status, &source, &of_monitor), 0), &["snapshot   none"]);
    for command in [&replica, &probe] {
        let said = ends(&mut start(&stage, command, &source, &of_monitor), 5);
        says(&said, &["the token or the certificate permits the status only"]);
    }
    for command in [&status, &probe] {
        ends(&mut start(&stage, command, &source, &of_prober), 0);
    }
    let said = ends(&mut start(&stage, &replica, &source, &of_prober), 5);
    says(&said, &["the token or the certificate permits the status and measurements only"]);
    let said = ends(&mut start(&stage, &status, &source, &of_other), 5);
    assert!(said.contains("refuses the certificate of this end") || said.contains("see its log"), "{said}");
    source.agent.wait_for_line("it is for no name in --replica-name, --probe-name or --monitor-name", LONG).unwrap();
    assert_untouched(&server);
    assert_eq!(number(&primary, "sync_full"), 0);

    let mut agent = start(&stage, &replica, &source, &of_replica);
    agent.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
}

/// All agents share a name, as `--peer-name` is for. The attacker has the certificate of a replica that lends slots, which
/// is valid for servers.
#[test]
#[ignore = "long: make test-all"]
fn with_names_of_their_own_a_replicas_certificate_is_neither_the_sources_nor_another_lenders() {
    const SHARED: &str = "agents.invalid";
    let Some(kind) = require::redis() else { return };
    let [primary, forged] = [(); 2].map(|()| primary(kind).start().unwrap());
    let (servers, stage) = ([(); 3].map(|()| Server::start(kind).unwrap()), Stage::new());
    fill_keys(&primary, 20_000, &"a value ".repeat(100));
    fill_keys(&forged, 10, "forged");
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let [of_source, of_lender, of_replica] = ["source", "lender", "replica"]
        .map(|name| authority.sign(name, &[SHARED, &format!("{name}.invalid")]).unwrap());
    let shared = ["--peer-name", SHARED];
    let source_name = ["--source-name", "source.invalid"];

    let (mut impostor, address) = source_without_token(&stage, &forged, &of_replica);
    let given = options(&of_lender);
    let status =
        |more: &[&str], code| stage.end(&[&["status", "--source", &address], &words(&given)[..], more].concat(), code);
    status(&shared, 0); // who shares a name may stand in for another
    for more in [&source_name[..], &[&shared[..], &source_name].concat()] {
        says(&status(more, 5), &["certificate for another name", "source.invalid", "--source-name"]);
    }
    let (url, lent) = (servers[0].url(), ["replica", "--retry-for", "0", "--source", &address, "--server"]);
    let deceived = [&lent[..], &[&url], &words(&given), &shared, &source_name].concat();
    says(&stage.end(&deceived, 5), &["certificate for another name"]);
    assert_untouched(&servers[0]);
    impostor.signal(Signal::TERM).unwrap();
    impostor.wait_for_success(LONG).unwrap();

    let (mut source, address) = source_without_token(&stage, &primary, &of_source);
    let replica = |server: &Server, files: &Tls, more: &[&str]| {
        let (url, given) = (server.url(), options(files));
        let args = ["replica", "--server", &url, "--source", &address, "--transport", "tcp"];
        stage.start(None, &[&args[..], &words(&given), &shared, &source_name, more].concat())
    };
    let mut lender = replica(&servers[0], &of_lender, &["--stay"]);
    lender.wait_for_event("in_step", LONG).unwrap();
    // The lender's certificate is not for the name that this reader expects, so it reads from the source.
    let mut reader = replica(&servers[1], &of_replica, &["--lender-name", "other.invalid", "--no-serve-peers"]);
    reader.wait_for_success(LONG).unwrap();
    assert!(!reader.output().contains("reading slots from another replica"), "{}", reader.output());
    says(&source.output(), &["certificate for another name", "--lender-name"]);
    let mut reader = replica(&servers[2], &of_replica, &["--lender-name", "lender.invalid"]);
    reader.wait_for_event("upstream_read", LONG).unwrap();
    reader.wait_for_success(LONG).unwrap();
    for agent in [&mut lender, &mut source] {
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
    }
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
fn roles_of_certificates_need_certificates() {
    let stage = Stage::new();
    let token = stage.token.display().to_string();
    let common = ["--token-file", &token, "--server", "redis://127.0.0.1:1"];
    let source = ["source", "--listen", "127.0.0.1:0", "--monitor-name", "monitor.invalid"];
    says(&stage.end(&[&source[..], &common].concat(), 2), &["--monitor-name", "--security mtls"]);
    let replica = ["replica", "--source", "127.0.0.1:9", "--replica-name", "replica.invalid"];
    says(&stage.end(&[&replica[..], &common].concat(), 2), &["--replica-name", "--security mtls"]);
    for option in ["--source-name", "--lender-name"] {
        let replica = ["replica", "--source", "127.0.0.1:9", option, "name.invalid"];
        says(&stage.end(&[&replica[..], &common].concat(), 2), &[option, "--security mtls"]);
    }
    let no_name = ["source", "--listen", "127.0.0.1:0", "--replica-name", "no name"];
    says(&stage.end(&[&no_name[..], &common].concat(), 2), &["expected a DNS name or an IP address"]);
}

#[test]
fn files_that_cannot_be_used_are_named_before_anything_begins() {
    let Some(kind) = require::redis() else { return };
    let (primary, stage) = (Server::start(kind).unwrap(), Stage::new());
    let authority = Authority::new(stage.folder(), "ca").unwrap();
    let good = authority.sign("good", &[HOST]).unwrap();
    let other = authority.sign("other", &[HOST]).unwrap();
    let old = authority.sign_until("old", &[HOST], SystemTime::now() - Duration::from_secs(3600)).unwrap();
    let missing = Tls { ca: stage.folder().join("nowhere.pem"), ..good.clone() };
    let mixed = Tls { key: other.key.clone(), ..good.clone() };
    let swapped = Tls { certificate: good.key.clone(), ..good.clone() };
    let open_key = Tls { key: stage.folder().join("open.key"), ..good.clone() };
    fs::copy(&good.key, &open_key.key).unwrap();
    fs::set_permissions(&open_key.key, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let cases: [(&Tls, &[&str]); 5] = [
        (&missing, &["nowhere.pem (--ca)", "No such file"]),
        (&mixed, &["other.key (--key) is not that of the certificate", "good.pem (--cert)"]),
        (&swapped, &["good.key (--cert)", "no certificate"]),
        (&old, &["old.pem (--cert)", "expired"]),
        (&open_key, &["open.key (--key)", "mode 0644", "chmod"]),
    ];
    let (url, token) = (primary.url(), stage.token.display().to_string());
    for (files, texts) in cases {
        let given = options(files);
        for command in [
            &["source", "--server", &url, "--listen", "127.0.0.1:0"][..],
            &["replica", "--server", &url, "--source", "127.0.0.1:1"],
            &["status", "--source", "127.0.0.1:1"],
        ] {
            says(&stage.end(&[command, &["--token-file", &token], &words(&given)].concat(), 3), texts);
        }
    }
    let status = ["status", "--source", "127.0.0.1:1", "--token-file", &token];
    says(&stage.end(&[&status[..], &["--security", "mtls"]].concat(), 2), &["--cert, --key and --ca"]);
    let certificate = good.certificate.display().to_string();
    says(&stage.end(&[&status[..], &["--cert", &certificate]].concat(), 2), &["--security mtls"]);
    assert_eq!(number(&primary, "sync_full"), 0);
}

#[test]
fn authorities_are_replaced_without_a_gap_by_sighup() {
    let Some(kind) = require::redis() else { return };
    let (primary, server, stage) = (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Stage::new());
    fill_keys(&primary, 100, "value");
    let [old, new] = ["old-ca", "new-ca"].map(|name| Authority::new(stage.folder(), name).unwrap());
    let (bundle, both) = (stage.folder().join("bundle.pem"), stage.folder().join("both.pem"));
    fs::copy(&old.ca, &bundle).unwrap();
    fs::write(&both, fs::read_to_string(&old.ca).unwrap() + &fs::read_to_string(&new.ca).unwrap()).unwrap();
    let of_source = Tls { ca: bundle.clone(), ..old.sign("source", &[HOST]).unwrap() };
    let [of_old, of_new] = [(&old, "old"), (&new, "new")]
        .map(|(authority, name)| Tls { ca: both.clone(), ..authority.sign(name, &[HOST]).unwrap() });
    let mut source = stage.source(&primary.url(), &words(&options(&of_source)));
    let token = stage.token.display().to_string();
    let status = |source: &Source, files: &Tls, code| {
        ends(&mut start(&stage, &["status", "--token-file", &token], source, files), code)
    };
    status(&source, &of_old, 0);
    status(&source, &of_new, 5);
    // It stays through all of it.
    let mut staying = source.replica(&server, &[&words(&options(&of_old))[..], &["--stay"]].concat());
    staying.wait_for_event("in_step", LONG).unwrap();

    let hang_up = |source: &mut Source, event: &str| {
        source.agent.signal(Signal::HUP).unwrap();
        source.agent.wait_for_event(event, LONG).unwrap();
    };
    // A file that cannot be used changes nothing.
    fs::write(&bundle, "not a certificate").unwrap();
    hang_up(&mut source, "certificates_kept");
    status(&source, &of_old, 0);

    // Both authorities, then a certificate of the new one, then the new authority alone.
    fs::copy(&both, &bundle).unwrap();
    hang_up(&mut source, "certificates_reread");
    status(&source, &of_new, 0);
    let next = new.sign("next", &[HOST]).unwrap();
    fs::copy(&next.certificate, &of_source.certificate).unwrap();
    fs::copy(&next.key, &of_source.key).unwrap();
    fs::copy(&new.ca, &bundle).unwrap();
    source.agent.signal(Signal::HUP).unwrap();
    let only_new = Tls { ca: new.ca.clone(), ..of_new.clone() };
    remora_lab::server::wait_until("the new authority to be the only one", LONG, || {
        let refused = start(&stage, &["status", "--token-file", &token], &source, &of_old).wait(LONG)?;
        Ok(if refused.success() { Err("the old one is trusted".into()) } else { Ok(()) })
    })
    .unwrap();
    status(&source, &only_new, 0);

    staying.signal(Signal::HUP).unwrap();
    staying.wait_for_event("certificates_reread", LONG).unwrap();
    staying.signal(Signal::TERM).unwrap();
    staying.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
}

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
