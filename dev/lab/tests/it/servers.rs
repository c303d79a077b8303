//! The lab's servers are real, belong to the test, and end when they are dropped.

use std::path::Path;
use std::time::Duration;

use remora_lab::{Address, Client, Kind, Server, assert_same_data, require, scratch, tls};

const SOON: Duration = Duration::from_secs(30);

#[test]
fn a_server_of_each_kind_starts_answers_and_leaves_nothing_behind() {
    for kind in require::kinds() {
        let server = Server::start(kind).unwrap();
        assert!(server.version().unwrap().starts_with(if kind == Kind::Redis7 { "7." } else { "9.1." }));
        assert_eq!(server.digest().unwrap(), "0".repeat(40));
        assert!(server.cpu_seconds().unwrap() >= 0.0 && server.peak_memory().unwrap() > 1 << 20);
        let (pid, folder) = (server.pid(), server.folder().to_owned());
        drop(server);
        assert!(!Path::new(&format!("/proc/{pid}")).exists() && !folder.exists());
    }
}

#[test]
fn an_unknown_configuration_line_gives_an_error_with_the_servers_text() {
    let Some(kind) = require::redis() else { return };
    let error = Server::builder(kind).config("no-such-option", "yes").start().unwrap_err().to_string();
    assert!(error.contains("no-such-option") && error.contains("exit status 1"), "{error}");
}

#[test]
fn a_server_with_users_and_passwords_accepts_the_lab_and_refuses_other_clients() {
    for kind in require::kinds() {
        let builder = Server::builder(kind).user("alice", "wonder", "~* &* +@all").without_default_user();
        let server = builder.start().unwrap();
        let mut stranger = Client::connect(&Address::Tcp(server.address())).unwrap();
        assert!(stranger.text(&["PING"]).unwrap_err().to_string().contains("NOAUTH"));
        let wrong = stranger.auth(Some("alice"), "wrong").unwrap_err().to_string();
        assert!(wrong.contains("WRONGPASS") && !wrong.contains("alice"), "{wrong}");
        stranger.auth(Some("alice"), "wonder").unwrap();
        assert_eq!(stranger.text(&["PING"]).unwrap(), "PONG");
        assert_eq!(server.client().unwrap().text(&["ACL", "WHOAMI"]).unwrap(), "lab");
    }
}

#[test]
fn a_server_with_a_password_and_a_socket_is_reached_both_ways() {
    for kind in require::kinds() {
        let server = Server::builder(kind).require_pass("open sesame".split(' ').next_back().unwrap()).unix_socket();
        let server = server.databases(4).max_memory(1 << 30).log_level("verbose").start().unwrap();
        let mut client = Client::connect(&Address::Unix(server.socket().unwrap())).unwrap();
        client.auth(None, "sesame").unwrap();
        assert_eq!(server.configured("databases").unwrap(), "4");
        assert_eq!(server.configured("maxmemory").unwrap(), (1_u64 << 30).to_string());
        assert!(server.unix_url().unwrap().starts_with("unix:///"));
    }
}

#[test]
fn a_restarted_server_loads_its_file_and_a_paused_one_is_silent() {
    for kind in require::kinds() {
        let mut server = Server::start(kind).unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["SET", "kept", "yes"]).unwrap();
        client.ok(&["SAVE"]).unwrap();
        client.ok(&["SET", "lost", "yes"]).unwrap();
        server.restart().unwrap();
        let mut client = server.client().unwrap();
        assert_eq!(client.text(&["GET", "kept"]).unwrap(), "yes");
        assert_eq!(client.int(&["DBSIZE"]).unwrap(), 1);

        server.pause().unwrap();
        client.timeout(Duration::from_millis(200)).unwrap();
        assert!(client.text(&["PING"]).is_err());
        server.resume().unwrap();
        server.client().unwrap().text(&["PING"]).unwrap();
        server.stop(SOON).unwrap();
        assert!(server.client().is_err());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_with_certificates_replicates_over_tls() {
    let Some(kind) = require::redis().filter(|kind| kind.speaks_tls()) else { return };
    let folder = scratch::folder("tls").unwrap();
    let (files, _) = tls::certificates(folder.path(), &[]).unwrap();
    let secure = || Server::builder(kind).tls(files.clone()).config("tls-replication", "yes");
    let (primary, replica) = (secure().start().unwrap(), secure().start().unwrap());
    assert!(primary.tls_url().unwrap().starts_with("rediss://127.0.0.1:"));
    primary.client().unwrap().ok(&["SET", "sealed", "letter"]).unwrap();
    let port = primary.tls_port().unwrap().to_string();
    replica.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", &port]).unwrap();
    replica.wait_for_link(SOON).unwrap();
    assert_same_data(&primary, &replica);
}

#[test]
fn a_cluster_node_refuses_to_become_a_replica_by_address() {
    for kind in require::kinds() {
        let server = Server::builder(kind).cluster().start().unwrap();
        let refusal = server.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", "1"]).unwrap_err().to_string();
        assert!(refusal.contains("cluster mode"), "{refusal}");
    }
}

#[test]
fn a_server_keeps_the_processor_time_of_its_fork_children() {
    let Some(kind) = require::redis() else { return };
    let server = Server::start(kind).unwrap();
    let mut client = server.client().unwrap();
    client.ok(&["DEBUG", "POPULATE", "200000", "key", "100"]).unwrap();
    let before = server.cpu_seconds().unwrap();
    client.ok(&["BGSAVE"]).unwrap();
    remora_lab::server::wait_until("the end of BGSAVE", SOON, || {
        let info = server.info("persistence")?;
        let running = info.get("rdb_bgsave_in_progress").unwrap_or("?").to_owned();
        Ok(if running == "0" { Ok(()) } else { Err(running) })
    })
    .unwrap();
    assert!(server.cpu_seconds().unwrap() - before > 0.05);
}
