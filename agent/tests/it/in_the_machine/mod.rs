//! The whole job over RDMA, in the virtual machine that has devices: exact replicas, one-sided reads on the wire, and a
//! link that fails.
//!
//! Tests for the machine are ignored on the host. [`crate::rdma`] boots the machine once and runs them there.

mod capture;
mod forging;
mod volume;

use std::process::{Command, Stdio};

use capture::Capture;
use remora_lab::workload::Options;
use remora_lab::{Agent, Kind, RdmaVm, Server, Workload, assert_same_data, fill_every_type, random};
use rustix::process::Signal;

use crate::kit::{LONG, Source, Stage, fill, load_slowly, says, succeeds};

/// Random data of a primary. The machine is emulated: each MiB costs some seconds of a processor until it is at a replica
/// and compared.
const MEBIBYTES: usize = 3;

/// The source is node 1; the replicas are the others.
const SOURCE_NODE: u8 = 1;
const REPLICA_NODES: [u8; 3] = [0, 2, 3];

fn source(stage: &Stage, primary: &Server, more: &[&str]) -> Source {
    // Replicas reach the primary at this address too; on one host they would prefer shared memory to RDMA.
    let announce = format!("127.0.0.1:{}", primary.port());
    let listen = format!("{}:0", RdmaVm::address(SOURCE_NODE));
    let more = [&["--no-shm", "--announce", &announce], more].concat();
    stage.source_at(&listen, None, &primary.url(), &more)
}

fn replica(stage: &Stage, server: &Server, source: &Source, node: u8, more: &[&str]) -> Agent {
    let address = RdmaVm::address(node).to_string();
    let more = [&["--rdma-address", &address], more].concat();
    stage.replica(&server.url(), source.address, &more)
}

fn primary() -> Server {
    primary_of(Kind::Redis7)
}

fn primary_of(kind: Kind) -> Server {
    // Diskless, for its answer to a replica: the machine's disk is memory that the tests need.
    let primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 4).unwrap();
    primary
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn three_replicas_of_a_redis_are_exact_and_their_bytes_are_fetched_by_read_alone() {
    replicas_fetch_by_read(
        Kind::Redis7,
        &[(REPLICA_NODES[0], "verbs"), (REPLICA_NODES[1], "auto"), (REPLICA_NODES[2], "verbs")],
    );
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_replica_of_a_valkey_is_exact_and_its_bytes_are_fetched_by_read_alone() {
    replicas_fetch_by_read(Kind::Valkey9, &[(REPLICA_NODES[0], "verbs")]);
}

/// Records the source's wire while replicas are made of it under writes: of each its node and its choice of a transport.
fn replicas_fetch_by_read(kind: Kind, replicas: &[(u8, &str)]) {
    let (stage, primary) = (Stage::new(), primary_of(kind));
    fill(&primary, MEBIBYTES, 1);
    let source = source(&stage, &primary, &[]);
    let capture = Capture::start(SOURCE_NODE, &stage.path("wire.pcap"));
    let options = Options { big_bytes: 0, ..Options::seeded(random::seed("workload")).rate(100) };
    let writer = Workload::start(primary.client().unwrap(), options).unwrap();
    let servers: Vec<Server> = replicas.iter().map(|_| Server::start(kind).unwrap()).collect();
    // All read from the source; the next test covers replicas that read from each other.
    let start = |(server, (node, choice)): (_, &(u8, &str))| {
        replica(&stage, server, &source, *node, &["--transport", choice, "--no-serve-peers"])
    };
    let mut agents: Vec<Agent> = servers.iter().zip(replicas).map(start).collect();
    for (agent, server) in agents.iter_mut().zip(&servers) {
        succeeds(agent, server);
        says(&agent.output(), &["transport=\"verbs\""]);
    }
    writer.stop().unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
    let wire = capture.stop();
    // Two tables, each with its own key; each reader is admitted to both.
    assert_eq!(wire.keys().len(), 2, "{:x?}", wire.keys());
    assert_eq!(wire.welcomes.len(), 2 * replicas.len());
    wire.assert_reads_lie_inside_what_was_welcomed();
    assert!(wire.foreign.is_empty(), "neither writes nor long messages: {:x?}", wire.foreign);
    // Everything that arrived was an answer to a READ: at least the random data for each.
    assert!(wire.read_bytes > ((replicas.len() * MEBIBYTES) << 20) as u64, "{} bytes", wire.read_bytes);
    assert!(wire.sent_bytes < 10_000, "{} bytes in messages", wire.sent_bytes);
    source.stop();
}

/// A replica that joins late reads over the wire of another replica, not over the source's.
#[test]
#[ignore = "runs in the RDMA machine"]
fn a_late_joiner_reads_from_another_replica_by_rdma_and_the_source_sends_it_next_to_nothing() {
    let (stage, primary) = (Stage::new(), primary());
    fill(&primary, MEBIBYTES, 3);
    let source = source(&stage, &primary, &[]);
    let servers: Vec<Server> = (0..2).map(|_| Server::start(Kind::Redis7).unwrap()).collect();
    let [lender_node, late_node, _] = REPLICA_NODES;
    let by_rdma = ["--transport", "verbs"];
    let staying = [&by_rdma[..], &["--stay"]].concat();
    let mut lender = replica(&stage, &servers[0], &source, lender_node, &staying);
    lender.wait_for_event("in_step", LONG).unwrap();
    let wires = [SOURCE_NODE, late_node].map(|node| Capture::start(node, &stage.path(&format!("{node}.pcap"))));
    let mut late = replica(&stage, &servers[1], &source, late_node, &by_rdma);
    succeeds(&mut late, &servers[1]);
    let [of_source, of_late] = wires.map(Capture::stop);
    let said = late.output();
    let line = said.lines().find(|line| line.contains("reading slots from another replica")).expect(&said);
    says(line, &["transport=\"verbs\""]);
    assert_same_data(&primary, &servers[1]);
    // The source's two tables, and the lender's copy of one of them.
    assert_eq!(of_late.keys().len(), 3, "{:x?}", of_late.keys());
    of_late.assert_reads_lie_inside_what_was_welcomed();
    assert!(of_late.foreign.is_empty(), "neither writes nor long messages: {:x?}", of_late.foreign);
    assert!(of_late.read_bytes > (MEBIBYTES << 20) as u64, "{} bytes came", of_late.read_bytes);
    assert!(of_source.read_bytes < 1 << 20, "{} bytes out of the source", of_source.read_bytes);
    lender.signal(Signal::TERM).unwrap();
    lender.wait_for_success(LONG).unwrap();
    source.stop();
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_link_that_fails_in_the_middle_is_reported_and_tcp_carries_the_rest() {
    let (stage, primary) = (Stage::new(), primary());
    fill(&primary, 20, 2);
    let source = source(&stage, &primary, &[]);
    let server = Server::start(Kind::Redis7).unwrap();
    // Slow enough that most of it is still to come when the cable is cut.
    load_slowly(&server, 20_000);
    let mut agent = replica(&stage, &server, &source, REPLICA_NODES[0], &["--memory", "16MiB"]);
    source.wait_for_slots(&mut agent, 20);
    assert_eq!(source.status()["replicas"][0]["transport"], "verbs", "{}", agent.output());
    cable(SOURCE_NODE, false);
    agent.wait_for_event("rdma_ended", LONG).unwrap();
    let status =
        source.wait_for_status("the replica to read by TCP", |status| status["replicas"][0]["transport"] == "tcp");
    let why = status["replicas"][0]["transport_why"].as_str().unwrap_or_default().to_owned();
    assert!(why.contains("verbs: "), "{why}");
    server.configure("key-load-delay", "0").unwrap();
    succeeds(&mut agent, &server);
    cable(SOURCE_NODE, true);
    says(&agent.output(), &["now=\"tcp\"", "verbs: "]);
    assert_same_data(&primary, &server);
    source.stop();
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn the_machine_has_devices_and_the_command_says_so() {
    let stage = Stage::new();
    let said = stage.end(&["devices"], 0);
    says(
        &said,
        &[
            "rxe0  InfiniBand",
            "port 1: ACTIVE, Ethernet on eth0",
            "address 10.77.0.1",
            "RoCE v2",
            "rdma   ready",
            "tcp    ready",
        ],
    );
    let stripped = Command::new(env!("CARGO_BIN_EXE_remora"))
        .args(["devices", "--json"])
        .env("REMORA_RDMA_DISABLE", "1")
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&stripped.stdout).unwrap();
    assert_eq!(report["rdma"]["ready"], false);
    assert!(report["rdma"]["trouble"].as_str().unwrap().contains("REMORA_RDMA_DISABLE"));
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn a_probe_measures_rdma_to_a_source_and_a_device_can_be_named() {
    let (stage, primary) = (Stage::new(), Server::start(Kind::Redis7).unwrap());
    let announce = format!("127.0.0.1:{}", primary.port());
    let more = ["--no-shm", "--announce", &announce, "--rdma-device", "rxe1", "--rdma-service-level", "3"];
    let source = stage.source_at(&format!("{}:0", RdmaVm::address(SOURCE_NODE)), None, &primary.url(), &more);
    let (address, token) = (source.address.to_string(), stage.token.display().to_string());
    let what = ["--transport", "verbs", "--rdma-device", "rxe0", "--rdma-port", "1", "--rdma-traffic-class", "104"];
    let small = ["--json", "--time", "50ms", "--sizes", "8,64KiB,4MiB", "--depths", "1,16"];
    let args = [&["probe", "--source", &address, "--token-file", &token][..], &what, &small].concat();
    let printed = stage.remora(&args).stderr(Stdio::inherit()).output().unwrap();
    assert!(printed.status.success());
    let report: serde_json::Value = serde_json::from_slice(&printed.stdout).unwrap();
    let verbs = &report["transports"][0];
    assert_eq!((&verbs["transport"], &verbs["trouble"]), (&"verbs".into(), &serde_json::Value::Null), "{report}");
    let figures = verbs["figures"].as_array().unwrap();
    assert_eq!(figures.len(), 3 * 2);
    for figure in figures {
        println!("{figure}");
        assert!(figure["median_micros"].as_f64().unwrap() > 1.0 && figure["reads"].as_u64().unwrap() >= 1, "{figure}");
    }
    // A missing device is an error if it was named in the options, and the error lists the devices that exist.
    let wrong = ["--transport", "verbs", "--rdma-device", "mlx5_0"];
    let args = [&["probe", "--source", &address, "--token-file", &token][..], &wrong].concat();
    let printed = stage.remora(&args).output().unwrap();
    assert_eq!(printed.status.code(), Some(5));
    says(&String::from_utf8_lossy(&printed.stdout), &["mlx5_0", "rxe0 port 1 (10.77.0.1)"]);
    source.stop();
}

/// Cuts a node's cable from the bridge, or connects it again. (The device itself stays on: in Soft-RoCE of Linux 6.1, a
/// device whose own messages cannot leave never connects again.)
fn cable(node: u8, plugged: bool) {
    let port = format!("port{node}");
    let to: &[&str] = if plugged { &["master", "br0"] } else { &["nomaster"] };
    let changed = Command::new("ip").args([&["link", "set", &port], to].concat()).status().unwrap();
    assert!(changed.success());
}
