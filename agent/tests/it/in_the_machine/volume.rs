//! A volume over RDMA: what `remora volume` reads and writes by it, and how it goes on without a server.

use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Instant;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Random, RdmaVm, random};
use rustix::process::Signal;
use serde_json::Value;

use super::capture::Capture;
use crate::kit::{Directory, LONG, Stage, ends, says};
use crate::volume::qemu_io;

/// The writer is node 0; the servers are the others.
const WRITER_NODE: u8 = 0;

/// Servers at nodes 1, 2 and 3, and a volume on them.
struct Scene {
    stage: Stage,
    servers: Vec<Agent>,
    addresses: Vec<String>,
    file: String,
    socket: String,
}

impl Scene {
    fn new() -> Scene {
        Scene::with(&[])
    }

    /// Servers with these options too.
    fn with(more: &[&str]) -> Scene {
        let stage = Stage::new();
        let (file, socket) = (stage.path("data.volume"), stage.path("nbd/device"));
        let mut scene = Scene { stage, servers: Vec::new(), addresses: Vec::new(), file, socket };
        for node in 1..=3 {
            let (server, address) = scene.serve_with(node, 0, more);
            scene.servers.push(server);
            scene.addresses.push(address);
        }
        let servers = scene.addresses.join(",");
        scene.end(&["create", &scene.file, "--size", "16MiB", "--servers", &servers], 0);
        scene.servers.iter_mut().for_each(registered);
        scene
    }

    fn start(&self, args: &[&str]) -> Agent {
        Agent::run(self.command(args)).unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let token = self.stage.token.to_str().unwrap();
        let protection = ["--token-file", token, "--security", "none", "--plaintext-network"];
        self.stage.remora(&[&["volume"], args, &protection].concat())
    }

    fn end(&self, args: &[&str], code: i32) -> String {
        ends(&mut self.start(args), code)
    }

    /// A server whose copies can be read by RDMA only: it has neither shared memory nor lanes.
    fn serve(&self, node: u8, port: u16) -> (Agent, String) {
        self.serve_with(node, port, &[])
    }

    fn serve_with(&self, node: u8, port: u16, more: &[&str]) -> (Agent, String) {
        let (ip, listen) = (RdmaVm::address(node).to_string(), format!("{}:{port}", RdmaVm::address(node)));
        let args = ["serve", "--listen", &listen, "--memory", "128MiB", "--no-shm", "--rdma-address", &ip];
        let mut server = self.start(&[&args, more].concat());
        let line = server.wait_for_event("volume_server_ready", LONG).unwrap();
        let address = line.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
        (server, address)
    }

    fn nbd(&self, more: &[&str]) -> Agent {
        let ip = RdmaVm::address(WRITER_NODE).to_string();
        let nbd = ["nbd", &self.file, "--socket", &self.socket, "--copy-timeout", "20s", "--rdma-address", &ip];
        let mut nbd = self.start(&[&nbd[..], more].concat());
        nbd.wait_for_event("volume_open", LONG).unwrap();
        nbd
    }

    /// Waits until all copies are whole and have every write. A write is answered when two of three have it, and with
    /// two of three the volume cannot go on without a further one.
    fn wait_until_level(&self) {
        wait_until("all copies to have every write", LONG, || {
            let mut status = self.start(&["status", &self.file, "--json"]);
            ends(&mut status, 0);
            let said: Value = serde_json::from_str(&status.stdout()).unwrap();
            let copies = said["copies"].as_array().unwrap();
            let is_level =
                copies.iter().all(|copy| copy["state"] == "whole" && copy["applied"] == copies[0]["applied"]);
            Ok(if is_level { Ok(()) } else { Err(said.to_string()) })
        })
        .unwrap();
    }

    /// Ends the writer. Returns what it has logged, and how it read and wrote.
    fn stop(&self, mut nbd: Agent) -> (String, String) {
        nbd.signal(Signal::TERM).unwrap();
        let output = ends(&mut nbd, 0);
        let line = output.lines().find(|line| line.contains("how blocks were read and written")).unwrap().to_owned();
        (output, line)
    }
}

/// A server's copy can be read by RDMA.
fn registered(server: &mut Agent) {
    server.wait_for_line("memory is registered for RDMA", LONG).unwrap();
}

/// The number that a log line gives for this field.
#[track_caller]
fn field(line: &str, name: &str) -> u64 {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no number {name} in: {line}"))
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn blocks_are_read_by_rdma_and_a_server_that_is_killed_is_replaced_by_another_one() {
    let mut scene = Scene::new();
    let wires: Vec<Capture> =
        (1..=3).map(|node| Capture::start(node, &scene.stage.path(&format!("{node}.pcap")))).collect();
    let mut nbd = scene.nbd(&["--reads", "anywhere"]);
    (0..3).for_each(|_| drop(nbd.wait_for_line("a copy is read without asking", LONG).unwrap()));
    qemu_io(&scene.socket, &["write -P 7 0 1M", "write -P 8 1M 1M", "flush"]).unwrap();
    // Until the last server has applied a write, its blocks are asked for.
    for _ in 0..4 {
        qemu_io(&scene.socket, &["read -P 7 0 1M", "read -P 8 1M 1M"]).unwrap();
    }
    let wires: Vec<_> = wires.into_iter().map(Capture::stop).collect();
    for wire in &wires {
        assert!(wire.foreign.is_empty(), "neither writes nor long messages: {:x?}", wire.foreign);
    }
    // The blocks themselves were answers to READs.
    let bytes: u64 = wires.iter().map(|wire| wire.read_bytes).sum();
    assert!(bytes >= 2 << 20, "{bytes} bytes; {}", nbd.output());
    // Whichever server is read: two are killed in turn, and come back.
    for number in 0..2 {
        scene.servers[number].kill().unwrap();
        let write = format!("write -P {} 2M 256k", 20 + number);
        let read = format!("read -P {} 2M 256k", 20 + number);
        qemu_io(&scene.socket, &[&write, "flush", &read, "read -P 7 0 1M", "read -P 8 1M 1M"]).unwrap();
        let port = scene.addresses[number].rsplit(':').next().unwrap().parse().unwrap();
        (scene.servers[number], _) = scene.serve(number as u8 + 1, port);
        nbd.wait_for_line("a copy is read without asking", LONG).unwrap();
        scene.wait_until_level();
        qemu_io(&scene.socket, &[&read, "read -P 8 1M 1M"]).unwrap();
    }
    let (output, line) = scene.stop(nbd);
    for opened in output.lines().filter(|line| line.contains("a copy is read without asking")) {
        says(opened, &["transport=verbs", "shm: "]);
    }
    assert!(field(&line, "far") >= 6 && field(&line, "here") == 0, "{line}");
}

#[test]
#[ignore = "runs in the RDMA machine"]
fn large_writes_are_pulled_by_rdma_by_each_server_and_along_a_chain_that_loses_one() {
    let mut scene = Scene::new();
    let write = |number: u64| format!("write -P {} {}k 256k", number % 250 + 1, number * 256);
    let read = |number: u64| format!("read -P {} {}k 256k", number % 250 + 1, number * 256);
    let commands = |numbers: std::ops::Range<u64>| {
        let all = numbers.clone().map(write).chain(["flush".to_owned()]).chain(numbers.map(read));
        let all: Vec<String> = all.collect();
        qemu_io(&scene.socket, &all.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    };
    // What leaves the writer's host by READs while 2 MiB are written.
    let leaves = |scene: &Scene, numbers: std::ops::Range<u64>| {
        let capture = Capture::start(WRITER_NODE, &scene.stage.path("wire.pcap"));
        commands(numbers);
        scene.wait_until_level();
        let wire = capture.stop();
        assert!(wire.foreign.is_empty(), "neither writes nor long messages: {:x?}", wire.foreign);
        wire.read_bytes
    };
    let by_rdma = |servers: &mut [Agent], what: &str| {
        for server in servers {
            says(&server.wait_for_line(what, LONG).unwrap(), &["transport=verbs"]);
        }
    };

    let nbd = scene.nbd(&["--reads", "asked", "--writes", "pulled"]);
    by_rdma(&mut scene.servers, "large writes are pulled");
    let star = leaves(&scene, 0..8);
    let (_, line) = scene.stop(nbd);
    assert!(star >= 3 * (2 << 20), "{star} bytes for three servers; {line}");
    assert!(field(&line, "pulled") >= 3 * 8, "{line}");

    let mut nbd = scene.nbd(&["--reads", "asked", "--writes", "chain"]);
    by_rdma(&mut scene.servers, "large writes are pulled");
    commands(8..9); // the chain begins with a write
    by_rdma(&mut scene.servers[1..], "writes are pulled along a chain");
    let chain = leaves(&scene, 16..24);
    assert!((2 << 20..4 << 20).contains(&chain), "{chain} bytes along a chain; {star} for three servers");

    // The first of the chain ends, and comes back without its memory.
    scene.servers[0].kill().unwrap();
    commands(24..32);
    let port = scene.addresses[0].rsplit(':').next().unwrap().parse().unwrap();
    (scene.servers[0], _) = scene.serve(1, port);
    by_rdma(&mut scene.servers[..1], "large writes are pulled");
    commands(32..40);
    let all: Vec<String> = (0..9).chain(16..40).map(read).collect();
    qemu_io(&scene.socket, &all.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    says(&nbd.output(), &["RDMA is offered"]);
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

/// A volume with files, and the transport by which its blocks are read and taken.
struct Way {
    transport: &'static str,
    file: String,
    directory: String,
    content: Vec<u8>,
}

impl Way {
    fn mount(&self, scene: &Scene, more: &[&str]) -> (Agent, Directory) {
        let (ip, directory) = (RdmaVm::address(WRITER_NODE).to_string(), Directory::new(self.directory.clone()));
        let mount = ["mount", &self.file, &directory.0, "--copy-timeout", "20s", "--reads", "anywhere"];
        let mut command = match self.transport {
            "verbs" => scene.command(&[&mount, more, &["--rdma-address", &ip]].concat()),
            _ => scene.command(&[&mount[..], more].concat()),
        };
        if self.transport != "verbs" {
            command.env("REMORA_RDMA_DISABLE", "1");
        }
        let mut mounted = Agent::run(command).unwrap();
        let says_how = if more.contains(&"--read-only") { "a copy can be read" } else { "without asking" };
        let opened = mounted.wait_for_line(says_how, LONG).unwrap();
        says(&opened, &[&format!("transport={}", self.transport)]);
        mounted.wait_for_event("files_mounted", LONG).unwrap();
        println!("{}: {}", self.transport, opened.split("connected_in=").nth(1).unwrap());
        (mounted, directory)
    }
}

/// Two mounts of one host, one by RDMA and one over TCP, on the same servers. What is written by each is read by the
/// same way after a new mount, and by a mount that only reads, also after a server was killed. The figures that it
/// prints are of an emulated machine: they say something of each other at most.
#[test]
#[ignore = "runs in the RDMA machine"]
fn files_are_written_and_read_by_rdma_beside_others_over_tcp() {
    let mut scene = Scene::with(&["--lanes", "0"]);
    let mut random = Random::new(random::seed("files by RDMA"));
    let servers = scene.addresses.join(",");
    let ways = ["verbs", "tcp"].map(|transport| {
        let (file, directory) = (scene.stage.path(&format!("{transport}.volume")), scene.stage.path(transport));
        scene.end(&["create", &file, "--size", "16MiB", "--servers", &servers], 0);
        scene.end(&["format", &file, "--take-over"], 0);
        Way { transport, file, directory, content: random.bytes(2 << 20) }
    });
    let mut mounts: Vec<_> = ways
        .iter()
        .map(|way| {
            // The copies' memory is registered some time after they are made.
            let (mounted, directory) = way.mount(&scene, &["--take-over", "--writes", "pulled"]);
            let file = fs::File::create_new(directory.at("large")).unwrap();
            let began = Instant::now();
            file.write_all_at(&way.content, 0).unwrap();
            file.sync_all().unwrap();
            let large = began.elapsed();
            let small = fs::File::create_new(directory.at("small")).unwrap();
            let began = Instant::now();
            for number in 0..50 {
                small.write_all_at(&way.content[number * 4096..][..4096], number as u64 * 4096).unwrap();
                small.sync_data().unwrap();
            }
            println!(
                "{}: 2 MiB with fsync {large:?}, 50 times 4 KiB with fdatasync {:?}",
                way.transport,
                began.elapsed()
            );
            (mounted, directory)
        })
        .collect();
    let is_there = |way: &Way, directory: &Directory, what: &str| {
        let began = Instant::now();
        assert!(fs::read(directory.at("large")).unwrap() == way.content, "{}, {what}: large", way.transport);
        let took = began.elapsed();
        assert!(
            fs::read(directory.at("small")).unwrap() == way.content[..50 * 4096],
            "{}, {what}: small",
            way.transport
        );
        println!("{}, {what}: 2 MiB were read in {took:?}", way.transport);
    };
    for server in &scene.servers {
        let output = server.output();
        let pulled: Vec<_> = output.lines().filter(|line| line.contains("large writes are pulled")).collect();
        for way in &ways {
            let by = format!("transport={}", way.transport);
            assert!(pulled.iter().any(|line| line.contains(&by)), "{by}: {pulled:?}");
        }
    }
    for (mounted, _) in &mut mounts {
        mounted.signal(Signal::TERM).unwrap();
        ends(mounted, 0);
    }
    drop(mounts);
    let mut mounts: Vec<_> = ways.iter().map(|way| way.mount(&scene, &["--take-over"])).collect();
    for (way, (_, directory)) in ways.iter().zip(&mounts) {
        is_there(way, directory, "a new mount");
    }
    scene.servers[0].kill().unwrap();
    for (way, (mounted, directory)) in ways.iter().zip(&mut mounts) {
        fs::write(directory.at("later"), &way.content[..100_000]).unwrap();
        mounted.signal(Signal::TERM).unwrap();
        ends(mounted, 0);
    }
    drop(mounts);
    for way in &ways {
        let (mut mounted, directory) = way.mount(&scene, &["--read-only"]);
        is_there(way, &directory, "only for reading");
        assert!(fs::read(directory.at("later")).unwrap() == way.content[..100_000]);
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
    }
}
