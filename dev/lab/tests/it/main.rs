//! The lab's own promises: real servers that belong to their test, networks that keep their shape, comparisons that see
//! a difference.
//!
//! Hosts of a test network reach each other until the cable is cut, and again once it is connected.
//!
//! The lab's servers are real, belong to the test, and end when they are dropped; their own replication is exact, and
//! the lab sees that; and what they save is read to its end.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use remora_lab::server::{self, wait_until};
use remora_lab::workload::{Options, Workload, key_count};
use remora_lab::{
    Address, BitRate, Client, Host, Kind, Loss, Net, Server, Shape, assert_same_data, compare, fill_every_type, net,
    process, random, require, scratch,
};
use remora_redis::rdb::{Found, Scanner, TAIL_BYTES, Text};

const SOON: Duration = Duration::from_secs(60);

/// The payload of a packet of 1514 bytes: 1448, after the headers of Ethernet, IP and TCP with its time stamps.
const PAYLOAD_SHARE: f64 = 1448.0 / 1514.0;

/// A rate that every machine reaches, however busy it is.
const SLOWEST: BitRate = BitRate(100_000_000);

/// How long a connection may take. On a machine that is busy, a packet within it can take some hundred milliseconds.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// How often a measurement is repeated until it is within its limits.
const TRIES: u32 = 4;

#[test]
#[ignore = "long: make test-all"]
fn a_cut_cable_takes_the_link_between_two_servers_down_and_a_mended_one_brings_it_back() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let fast = |host| Server::builder(kind).config("repl-timeout", 2).config("repl-ping-replica-period", 1).on(host);
    let primary = fast(&here).config("repl-diskless-sync-delay", 0).start().unwrap();
    let replica = fast(&there).start().unwrap();

    replica.replicate(&primary).unwrap();
    replica.wait_for_link(SOON).unwrap();
    there.cut().unwrap();
    assert!(here.within(|| std::net::TcpStream::connect_timeout(&replica.address(), CONNECT_LIMIT)).unwrap().is_err());
    primary.client().unwrap().ok(&["SET", "written", "meanwhile"]).unwrap();
    wait_until("the primary to miss its replica", SOON, || {
        let count = primary.fact("connected_slaves")?;
        Ok(if count == "0" { Ok(()) } else { Err(count) })
    })
    .unwrap();

    there.heal().unwrap();
    wait_until("the write to arrive", SOON, || {
        let value = replica.client()?.text(&["GET", "written"])?;
        Ok(if value == "meanwhile" { Ok(()) } else { Err(value) })
    })
    .unwrap();
    assert_eq!(primary.fact("sync_full").unwrap(), "1");
}

#[test]
#[ignore = "long: make test-all"]
fn two_hosts_can_be_cut_from_each_other_and_from_no_other_host() {
    let Some(()) = require::namespaces() else { return };
    let net = Net::new().unwrap();
    let [one, two, three] = ["one", "two", "three"].map(|name| net.host(name).unwrap());
    let listener = two.within(|| std::net::TcpListener::bind((two.address(), 0)).unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let reach = move || std::net::TcpStream::connect_timeout(&address, CONNECT_LIMIT).is_ok();
    let reached = || [&one, &three].map(|host| host.within(reach).unwrap());
    assert_eq!(reached(), [true, true]);
    one.cut_from(&two).unwrap();
    assert_eq!(reached(), [false, true]);
    one.heal_from(&two).unwrap();
    assert_eq!(reached(), [true, true]);
}

#[test]
fn hosts_are_isolated_from_this_machine_and_from_other_networks() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let (one, other) = (Net::new().unwrap(), Net::new().unwrap());
    let server = Server::builder(kind).on(&one.host("server").unwrap()).start().unwrap();
    let address = server.address();
    let reach = move || std::net::TcpStream::connect_timeout(&address, CONNECT_LIMIT).is_ok();
    assert!(one.host("neighbour").unwrap().within(reach).unwrap());
    // The second network's own host of that number has the same address, and no process listens there.
    assert!(!other.host("stranger").unwrap().within(reach).unwrap());
    assert!(!reach());
}

#[test]
fn programs_of_a_host_run_on_its_processors_only() {
    let Some(()) = require::namespaces() else { return };
    let net = Net::new().unwrap();
    let processors = |host: &remora_lab::Host| {
        let mut nproc = std::process::Command::new("nproc");
        host.enter(&mut nproc).unwrap();
        String::from_utf8(nproc.output().unwrap().stdout).unwrap().trim().parse::<usize>().unwrap()
    };
    assert_eq!(processors(&net.host_on("one", 0..1).unwrap()), 1);
    let all = std::thread::available_parallelism().unwrap().get();
    assert_eq!(processors(&net.host("any").unwrap()), all);
}

#[test]
#[ignore = "long: make test-all"]
fn a_limited_cable_carries_its_rate_both_ways() {
    let Some(()) = require::shaping() else { return };
    let Some(()) = require::iperf3() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("here").unwrap(), net.host("there").unwrap());
    for rate in [SLOWEST, BitRate(1_000_000_000)] {
        let payload = rate.0 as f64 / 8.0 * PAYLOAD_SHARE;
        here.shape(Shape::bits(rate.0)).unwrap();
        for direction in [(&here, &there), (&there, &here)] {
            let share = carried(direction, payload) / payload;
            assert!(share < 1.07, "{rate}: {share} of its payload");
            // How much of a fast cable is used depends on what else this machine does.
            assert!(rate.0 > SLOWEST.0 || share > 0.5, "{rate}: {share} of its payload");
        }
    }
    here.shape(Shape::default()).unwrap();
    let freed = net::bandwidth(Some((&here, &there)), Duration::from_secs(1)).unwrap();
    let slowest = SLOWEST.0 as f64 / 8.0;
    assert!(freed > 1.5 * slowest, "without a limit it carries {freed} B/s, and {slowest} with one");
}

/// The nearest to `wanted` of a few measurements: on a busy machine a single one says little.
fn carried(direction: (&Host, &Host), wanted: f64) -> f64 {
    let mut best = 0.0_f64;
    for _ in 0..TRIES {
        let carried = net::bandwidth(Some(direction), Duration::from_secs(1)).unwrap();
        if (carried - wanted).abs() < (best - wanted).abs() {
            best = carried;
        }
        if (best / wanted - 1.0).abs() < 0.05 {
            break;
        }
    }
    best
}

#[test]
fn bytes_that_a_host_sends_are_counted_at_its_cable() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let net = Net::new().unwrap();
    let (client, server) = (net.host("client").unwrap(), net.host("server").unwrap());
    let redis = Server::builder(kind).on(&server).start().unwrap();
    let before = (client.traffic().unwrap(), server.traffic().unwrap());
    let address = remora_lab::Address::Tcp(redis.address());
    let mut connection = client.within(|| remora_lab::Client::connect(&address)).unwrap().unwrap();
    connection.ok(&["SET", "big", &"x".repeat(10_000_000)]).unwrap();
    let (sent, received) =
        (client.traffic().unwrap().since(before.0).sent, server.traffic().unwrap().since(before.1).received);
    assert!((10_000_000..10_600_000).contains(&sent), "{sent}");
    // Except for what the systems at both ends send by themselves (IPv6's neighbours and groups, about 90 bytes each).
    assert!(sent.abs_diff(received) < 2_000, "{sent} sent, {received} received");
    // What stays on the host does not cross its cable.
    let before = server.traffic().unwrap();
    redis.client().unwrap().ok(&["SET", "big", &"x".repeat(10_000_000)]).unwrap();
    assert!(server.traffic().unwrap().since(before).sent < 10_000);
}

#[test]
fn a_lossy_cable_loses_and_a_mended_one_does_not() {
    let Some(()) = require::loss() else { return };
    let Some(kind) = require::redis() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("here").unwrap(), net.host("there").unwrap());
    let server = Server::builder(kind).on(&there).start().unwrap();
    let reach = || {
        let connect = || std::net::TcpStream::connect_timeout(&server.address(), Duration::from_millis(300)).is_ok();
        here.within(connect).unwrap()
    };
    there.lossy(Loss::percent(100.0).unwrap()).unwrap();
    assert!(!reach());
    there.lossy(Loss::percent(5.0).unwrap()).unwrap();
    // TCP compensates: all bytes arrive, later.
    let address = remora_lab::Address::Tcp(server.address());
    let mut client = wait_until("a connection", SOON, || {
        Ok(here.within(|| remora_lab::Client::connect(&address))?.map_err(|error| error.to_string()))
    })
    .unwrap();
    // The system counts a megabyte as about thirty packets, so one attempt in five loses none.
    let lost = |_| {
        client.ok(&["SET", "big", &"x".repeat(1_000_000)]).unwrap();
        assert_eq!(server.client().unwrap().int(&["STRLEN", "big"]).unwrap(), 1_000_000);
        let counters = here.within(|| std::fs::read_to_string("/proc/thread-self/net/snmp")).unwrap().unwrap();
        retransmitted(&counters) > 0
    };
    assert!((0..40).any(lost), "nothing was retransmitted");

    there.lossy(Loss::default()).unwrap();
    wait_until("a connection over the mended cable", SOON, || Ok(reach().then_some(()).ok_or("none".into()))).unwrap();
}

/// `Tcp: … RetransSegs …` of /proc/net/snmp: a line of names, a line of figures.
fn retransmitted(snmp: &str) -> u64 {
    let mut lines = snmp.lines().filter(|line| line.starts_with("Tcp:")).map(str::split_whitespace);
    let (names, figures) = (lines.next().unwrap(), lines.next().unwrap());
    names.zip(figures).find(|(name, _)| *name == "RetransSegs").unwrap().1.parse().unwrap()
}

/// A cable with a delay.
const FAR: Shape = Shape { rate: None, delay: Some(Duration::from_millis(20)) };

/// On a kernel without `netem`, the delay is measured in the virtual machine, whose kernel has it.
#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn a_delay_holds_and_an_error_names_the_missing_netem() {
    let Some(()) = require::shaping() else { return };
    match Net::new().unwrap().host("probe").unwrap().shape(FAR) {
        Ok(()) => in_the_machine::a_delay_holds(),
        Err(error) => {
            assert!(error.to_string().contains("netem"), "{error}");
            let Some(machine) = require::rdma_vm() else { return };
            assert_eq!(machine.run_ignored_tests("in_the_machine", 1), 1);
        }
    }
}

mod in_the_machine {
    use super::*;

    #[test]
    #[ignore = "runs in the RDMA machine"]
    pub(super) fn a_delay_holds() {
        let Some(()) = require::delay() else { return };
        let net = Net::new().unwrap();
        let (here, there) = (net.host("here").unwrap(), net.host("there").unwrap());
        there.shape(FAR).unwrap();
        let listener = there.within(|| std::net::TcpListener::bind((there.address(), 0))).unwrap().unwrap();
        let address = listener.local_addr().unwrap();
        let begun = Instant::now();
        drop(here.within(|| std::net::TcpStream::connect(address)).unwrap().unwrap());
        assert!(begun.elapsed() >= Duration::from_millis(40), "the round trip took {:?}", begun.elapsed());
    }
}

#[test]
fn a_slow_cable_has_the_rate_that_was_set() {
    let Some(()) = require::shaping() else { return };
    let Some(kind) = require::redis() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("client").unwrap(), net.host("server").unwrap());
    let server = Server::builder(kind).on(&there).start().unwrap();
    there.shape(Shape::rate(4 << 20)).unwrap();
    let address = remora_lab::Address::Tcp(server.address());
    let mut client = here.within(|| remora_lab::Client::connect(&address)).unwrap().unwrap();
    let begun = Instant::now();
    client.ok(&["SET", "big", &"x".repeat(4 << 20)]).unwrap();
    let seconds = begun.elapsed().as_secs_f64();
    assert!((0.7..5.0).contains(&seconds), "4 MiB at 4 MiB/s took {seconds} s");
}

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
    let (files, _) = server::certificates(folder.path(), &[]).unwrap();
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

// The servers' own replication is exact, and the lab can verify that: Remora has to pass the same comparison.

const LINK_TIME: Duration = Duration::from_secs(60);

fn primary(kind: Kind) -> Server {
    Server::builder(kind)
        .config("repl-diskless-sync", "yes")
        .config("repl-diskless-sync-delay", 0)
        .config("repl-backlog-size", "64mb")
        .config("client-output-buffer-limit", "replica 0 0 0")
        .start()
        .unwrap()
}

#[test]
fn a_native_replica_of_a_primary_under_every_kind_of_write_is_exact() {
    for kind in require::kinds() {
        let (primary, replica) = (primary(kind), Server::start(kind).unwrap());
        fill_every_type(&mut primary.client().unwrap(), random::seed("data")).unwrap();
        let writer = Workload::on(&primary).unwrap();
        replica.replicate(&primary).unwrap();
        replica.wait_for_link(LINK_TIME).unwrap();
        writer.wait_for(30_000);
        let counts = writer.stop().unwrap();
        assert!(counts.refused * 5 < counts.commands, "{counts:?}");
        let agreement = assert_same_data(&primary, &replica);
        assert_eq!(agreement.replid.len(), 40);
        assert_eq!(primary.fact("sync_full").unwrap(), "1");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_writer_runs_every_operation_and_is_refused_only_for_known_reasons() {
    for kind in require::kinds() {
        let server = Server::start(kind).unwrap();
        let writer = Workload::on(&server).unwrap();
        writer.wait_for(120_000);
        let counts = writer.stop().unwrap();
        let missing = ["flush", "swap", "big", "function", "stream-group", "transaction"]
            .into_iter()
            .find(|name| !counts.operations.contains_key(name));
        assert_eq!(missing, None, "{counts:?}");
        assert_eq!(counts.operations.contains_key("hash-field-expiry"), kind.expires_hash_fields());
        const KNOWN: [&str; 6] = [
            "ERR source and destination",
            "ERR no such key",
            "BUSYGROUP",
            "NOGROUP",
            "ERR Function not found",
            "ERR Library not",
        ];
        let strange: Vec<&String> =
            counts.refusals.keys().filter(|text| !KNOWN.iter().any(|known| text.starts_with(known))).collect();
        assert!(strange.is_empty(), "{:?}", counts.refusals);
    }
}

#[test]
fn a_writer_keeps_to_its_rate() {
    let Some(kind) = require::redis() else { return };
    let server = Server::start(kind).unwrap();
    let (rate, began) = (2000, Instant::now());
    let writer = Workload::start(server.client().unwrap(), Options::seeded(1).rate(rate)).unwrap();
    writer.wait_for(2 * rate);
    let (took, commands) = (began.elapsed(), writer.stop().unwrap().commands);
    // Its last commands were sent at once.
    assert!(took > Duration::from_millis(1500), "{commands} commands in {took:?}");
}

#[test]
fn the_data_set_has_every_encoding_and_is_the_same_for_the_same_seed() {
    for kind in require::kinds() {
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let keys = servers.each_ref().map(|server| fill_every_type(&mut server.client().unwrap(), 7).unwrap());
        assert!(keys[0] > 700 && keys[0] == keys[1], "{keys:?}");
        let mut client = servers[0].client().unwrap();
        let mut encoding = |key: &str| client.text(&["OBJECT", "ENCODING", key]).unwrap();
        for encoded in [
            "string:int",
            "string:embstr",
            "string:raw",
            "list:listpack",
            "list:quicklist",
            "set:hashtable",
            "zset:listpack",
            "zset:skiplist",
            "hash:listpack",
            "hash:hashtable",
        ] {
            // Redis 7.0 keeps short lists in a quicklist too.
            let old_list = kind == Kind::Redis7 && encoded == "list:listpack";
            let wanted = if old_list { "quicklist" } else { encoded.split(':').nth(1).unwrap() };
            assert_eq!(encoding(encoded), wanted, "{kind} {encoded}");
        }
        assert_eq!(encoding("set:intset:64"), "intset");
        assert_eq!(key_count(&mut client).unwrap(), keys[0]);
        let [one, other] = servers.each_ref().map(|server| server.digest().unwrap());
        // The pending entries' ids contain the time of delivery; the digest does not cover it.
        assert_eq!(one, other);
    }
}

#[test]
fn a_replica_that_was_written_to_is_found_and_the_keys_are_named() {
    for kind in require::kinds() {
        let (primary, replica) =
            (primary(kind), Server::builder(kind).config("replica-read-only", "no").start().unwrap());
        let mut client = primary.client().unwrap();
        for key in ["same", "changed", "lost"] {
            client.ok(&["SET", key, "value"]).unwrap();
        }
        replica.replicate(&primary).unwrap();
        replica.wait_for_link(LINK_TIME).unwrap();
        let mut other = replica.client().unwrap();
        other.ok(&["SET", "changed", "otherwise"]).unwrap();
        other.int(&["DEL", "lost"]).unwrap();
        other.ok(&["SELECT", "3"]).unwrap();
        other.ok(&["SET", "new", "here"]).unwrap();

        let error = compare::same_data(&primary, &replica, LINK_TIME).unwrap_err().to_string();
        for part in
            ["db 0, changed: string", "db 0, lost: string (embstr, pttl -1) at the primary, missing", "db 3, new: only"]
        {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
        assert!(!error.contains("same:"), "{error}");
    }
}

#[test]
fn a_replica_with_another_time_of_expiry_or_another_function_is_found() {
    for kind in require::kinds() {
        let (primary, replica) =
            (primary(kind), Server::builder(kind).config("replica-read-only", "no").start().unwrap());
        primary.client().unwrap().ok(&["SET", "brief", "life", "EX", "1000"]).unwrap();
        replica.replicate(&primary).unwrap();
        replica.wait_for_link(LINK_TIME).unwrap();
        assert_same_data(&primary, &replica);

        let mut other = replica.client().unwrap();
        other.int(&["EXPIRE", "brief", "2000"]).unwrap();
        let code = "#!lua name=own\nredis.register_function('own', function() return 1 end)";
        other.text(&["FUNCTION", "LOAD", code]).unwrap();
        let error = compare::same_data(&primary, &replica, LINK_TIME).unwrap_err().to_string();
        assert!(error.contains("brief: expires at") && error.contains("function library"), "{error}");
    }
}

// The RDB scanner finds the end of every value that real servers save.

/// Databases and keys of the long strings in a file, and the position of its end mark.
fn scan(file: &[u8], least: u64, piece: usize) -> (Vec<Text>, u64) {
    let (mut scanner, mut texts, mut at) = (Scanner::new(least), Vec::new(), 0);
    loop {
        at += scanner.skip((file.len() - at) as u64) as usize;
        let (taken, found) = scanner.feed(&file[at..file.len().min(at + piece)]).unwrap();
        at += taken;
        match found {
            Some(Found::Text(text)) => texts.push(text),
            Some(Found::Run(run)) => panic!("a run where none was asked for: {run:?}"),
            Some(Found::End { at }) => return (texts, at),
            None => assert!(at < file.len(), "the end was not found"),
        }
    }
}

fn saved(server: &Server) -> Vec<u8> {
    server.client().unwrap().ok(&["SAVE"]).unwrap();
    std::fs::read(server.folder().join(server.configured("dbfilename").unwrap())).unwrap()
}

/// Adds what the data set has only in small: a list in a separate node, hashes that are tables, a stream with groups.
fn grow(server: &Server) {
    let mut client = server.client().unwrap();
    client.ok(&["SELECT", "3"]).unwrap();
    for number in 0..600 {
        let number = number.to_string();
        client.int(&["HSET", "table", &number, "value"]).unwrap();
        client.int(&["SADD", "members", &format!("member {number}")]).unwrap();
        client.int(&["ZADD", "scores", &number, &format!("member {number}")]).unwrap();
        client.int(&["RPUSH", "list", &number, &"plain ".repeat(40)]).unwrap();
        client.bytes(&["XADD", "stream", "*", "field", &number]).unwrap();
    }
    client.ok(&["XGROUP", "CREATE", "stream", "group", "0"]).unwrap();
    client.list(&["XREADGROUP", "GROUP", "group", "consumer", "COUNT", "50", "STREAMS", "stream", ">"]).unwrap();
    if server.kind().expires_hash_fields() {
        client.list(&["HEXPIRE", "table", "1000", "FIELDS", "2", "1", "2"]).unwrap();
    }
}

fn every_type_ends_where_the_scanner_finds_it(kind: Kind, compressed: &str) {
    let server = Server::builder(kind).config("rdbcompression", compressed).start().unwrap();
    let mut client = server.client().unwrap();
    fill_every_type(&mut client, 5).unwrap();
    grow(&server);
    client.ok(&["SELECT", "5"]).unwrap();
    let noise = remora_lab::Random::new(1).bytes(70_000);
    client.ok(&[b"SET".as_slice(), b"long", &noise, b"PXAT", b"4102444800000"]).unwrap();
    let file = saved(&server);
    for piece in [1, 61, 4096, 1 << 20] {
        let (texts, end) = scan(&file, 60_000, piece);
        assert_eq!(end as usize, file.len() - TAIL_BYTES);
        let long = texts.iter().find(|text| text.key == b"long" && text.database == 5).unwrap();
        assert_eq!(long.expires_ms, Some(4_102_444_800_000));
        assert_eq!(&file[long.value.start as usize..long.value.end as usize], &noise[..]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn every_type_of_every_server_ends_where_the_scanner_finds_it() {
    for kind in require::kinds() {
        every_type_ends_where_the_scanner_finds_it(kind, "yes");
        every_type_ends_where_the_scanner_finds_it(kind, "no");
    }
}

#[test]
fn an_eviction_policy_by_usage_writes_the_usage_beside_each_key() {
    for kind in require::kinds() {
        for policy in ["allkeys-lfu", "allkeys-lru"] {
            let server = Server::builder(kind).config("maxmemory-policy", policy).start().unwrap();
            server.client().unwrap().ok(&["SET", "key", "some value"]).unwrap();
            let (texts, _) = scan(&saved(&server), 5, 64);
            assert!(texts[0].usage.is_some(), "{policy}: {texts:?}");
        }
    }
}

/// What `make test` and `make demo` install.
#[test]
fn a_second_set_up_needs_no_network() {
    let Some(()) = require::namespaces() else { return };
    for part in ["--demo", "--test"] {
        needs_no_network(&[part]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_second_set_up_of_everything_needs_no_network() {
    let Some(()) = require::namespaces() else { return };
    needs_no_network(&[]);
}

/// This machine is set up already; otherwise the tests would not run.
#[track_caller]
fn needs_no_network(parts: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = root.join("dev/lab/setup/setup");
    let mut set_up = Command::new("unshare");
    set_up.args(["--net", "--"]).arg(script).args(parts).env("CI", "true");
    set_up.stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = process::spawn(set_up).unwrap().wait_with_output().unwrap();
    let said = [run.stdout, run.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(run.status.success() && said.contains("set-up: ready"), "{}\n{said}", process::in_words(run.status));
    assert!(!said.contains("downloading") && !said.contains("installing"), "{said}");
}
