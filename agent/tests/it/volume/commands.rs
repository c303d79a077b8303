//! `remora volume`: servers, a volume on them, its state, and its block device, as commands; also with a mistake, and
//! beside what must not be ended yet.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{Directory, LONG, Stage, ends, says, without_checksum};
use crate::security::protection::{options, words};
use crate::volume::volume_mount::mount;
use remora_lab::server::wait_until;
use remora_lab::server::{Authority, Tls, certificates};
use remora_lab::{Agent, Host, Kind, Net, Random, Server, require};

/// Three servers of a volume, and what its commands need.
pub(crate) struct Scene {
    pub(crate) stage: Stage,
    host: Option<Host>,
    pub(crate) servers: Vec<Agent>,
    pub(crate) addresses: Vec<String>,
    more: Vec<String>,
}

impl Scene {
    pub(crate) fn new(host: Option<&Host>, more: &[&str]) -> Scene {
        let (stage, host) = (Stage::new(), host.cloned());
        let more = more.iter().map(|option| (*option).to_owned()).collect();
        let mut scene = Scene { stage, host, servers: Vec::new(), addresses: Vec::new(), more };
        for _ in 0..3 {
            let ip = scene.host.as_ref().map_or("127.0.0.1".to_owned(), |host| host.address().to_string());
            let (server, address) = scene.serve(&format!("{ip}:0"));
            scene.servers.push(server);
            scene.addresses.push(address);
        }
        scene
    }

    fn args<'a>(&'a self, args: &[&'a str]) -> Vec<&'a str> {
        let token = self.stage.token.to_str().unwrap();
        let more = self.more.iter().map(String::as_str);
        ["volume"].into_iter().chain(args.iter().copied()).chain(["--token-file", token]).chain(more).collect()
    }

    pub(crate) fn start(&self, args: &[&str]) -> Agent {
        self.start_with(args, |_| {})
    }

    /// Starts a command of which something else is changed first.
    pub(crate) fn start_with(&self, args: &[&str], change: impl FnOnce(&mut Command)) -> Agent {
        let mut command = self.stage.remora(&self.args(args));
        change(&mut command);
        if let Some(host) = &self.host {
            host.enter(&mut command).unwrap();
        }
        Agent::run(command).unwrap()
    }

    pub(crate) fn end(&self, args: &[&str], code: i32) -> String {
        ends(&mut self.start(args), code)
    }

    pub(crate) fn serve(&self, listen: &str) -> (Agent, String) {
        self.serve_with(&["serve", "--listen", listen, "--memory", "64MiB"])
    }

    /// A server whose copies are in this folder, too.
    pub(crate) fn serve_kept(&self, listen: &str, store: &str) -> (Agent, String) {
        self.serve_with(&["serve", "--listen", listen, "--memory", "64MiB", "--store", store])
    }

    pub(crate) fn serve_with(&self, args: &[&str]) -> (Agent, String) {
        let mut server = self.start(args);
        let line = server.wait_for_event("volume_server_ready", LONG).unwrap();
        let address = line.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
        (server, address)
    }

    /// Makes a volume, and returns the path of its file.
    pub(crate) fn create(&self, name: &str) -> String {
        let (file, servers) = (self.stage.path(name), self.addresses.join(","));
        says(&self.end(&["create", &file, "--size", "16MiB", "--servers", &servers], 0), &["3 copies", "at 2"]);
        file
    }

    pub(crate) fn socket(&self, name: &str) -> String {
        self.stage.path(&format!("nbd/{name}"))
    }

    pub(crate) fn nbd(&self, file: &str, socket: &str) -> Agent {
        self.nbd_with(file, socket, &[])
    }

    pub(crate) fn nbd_with(&self, file: &str, socket: &str, more: &[&str]) -> Agent {
        let mut nbd = self.start(&[&["nbd", file, "--socket", socket, "--copy-timeout", "4s"], more].concat());
        nbd.wait_for_event("volume_open", LONG).unwrap();
        nbd
    }
}

/// Runs commands of qemu-io on the device. Returns what it says if it succeeds.
pub(crate) fn qemu_io(socket: &str, commands: &[&str]) -> Result<String, String> {
    let mut run = Command::new("timeout");
    run.args(["60", "qemu-io", "-f", "raw"]).args(commands.iter().flat_map(|command| ["-c", command]));
    let ran = run.arg(format!("nbd+unix:///?socket={socket}")).output().unwrap();
    let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    // A pattern that does not match is only printed.
    let is_well = ran.status.success() && !said.contains("failed");
    if is_well { Ok(said) } else { Err(said) }
}

#[test]
fn a_volume_is_made_written_taken_over_and_shown_by_commands() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    says(&scene.end(&["status", &file], 0), &["16 MiB, 3 copies", "whole ", "writer 0"]);

    let (one, two) = (scene.socket("one"), scene.socket("two"));
    let mut first = scene.nbd(&file, &one);
    qemu_io(&one, &["write -P 7 0 1M", "flush"]).unwrap();
    scene.servers[0].kill().unwrap();
    qemu_io(&one, &["write -P 8 1M 1M", "flush", "read -P 7 0 1M"]).unwrap();
    says(&scene.end(&["status", &file], 0), &["unknown ", &scene.addresses[0]]);

    // Another one opens it: the first is told, and ends with a code of its own.
    // But only if it is told to, since the first one is at work.
    let refused = scene.end(&["nbd", &file, "--socket", &two], 12);
    says(&refused, &[&file, "another writer is at work", "--take-over"]);
    qemu_io(&one, &["write -P 8 1M 4k", "flush"]).unwrap();
    let mut second = scene.nbd_with(&file, &two, &["--take-over"]);
    assert!(qemu_io(&one, &["write -P 9 0 4k", "flush"]).is_err());
    says(&ends(&mut first, 11), &["another writer has opened the volume, with generation 2"]);
    qemu_io(&two, &["read -P 7 0 1M", "read -P 8 1M 1M"]).unwrap();

    // The server comes back without its memory, and is given its copy again.
    let address = scene.addresses[0].clone();
    (scene.servers[0], _) = scene.serve(&address);
    let whole = || scene.end(&["status", &file, "--json"], 0).matches("\"state\":\"whole\"").count() == 3;
    remora_lab::server::wait_until("three whole copies", LONG, || {
        Ok(if whole() { Ok(()) } else { Err("fewer".to_owned()) })
    })
    .unwrap();
    second.signal(Signal::TERM).unwrap();
    says(&ends(&mut second, 0), &["what was acknowledged is in the volume"]);

    // A writer that was killed is not at work.
    let mut third = scene.nbd(&file, &one);
    third.kill().unwrap();
    drop(scene.nbd(&file, &two));

    // Two of three are gone, and one of them remembered everything: too few to open it.
    scene.servers[1].kill().unwrap();
    scene.servers[2].kill().unwrap();
    says(&scene.end(&["status", &file], 10), &["1 server answers and holds the volume, and 2 are needed"]);
    says(&scene.end(&["nbd", &file, "--socket", &two, "--copy-timeout", "4s"], 10), &[&file, "2 are needed"]);

    // All run again, without their memory: nothing is left, and that is said.
    scene.servers[0].kill().unwrap();
    let again: Vec<_> = scene.addresses.iter().map(|address| scene.serve(address)).collect();
    says(&scene.end(&["status", &file], 10), &["3 of 3 servers are empty", "what the volume held is gone"]);
    says(&scene.end(&["nbd", &file, "--socket", &two], 10), &["2 are needed", "remora volume status", "empty"]);
    drop(again);
}

#[test]
#[ignore = "long: make test-all"]
fn servers_with_stores_have_the_volume_again_after_all_of_them_were_killed() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    let addresses = scene.addresses.clone();
    let restart = |scene: &mut Scene| {
        for (number, address) in addresses.iter().enumerate() {
            scene.servers[number].kill().unwrap();
            let store = scene.stage.path(&format!("stores/{number}"));
            (scene.servers[number], _) = scene.serve_kept(address, &store);
            says(&scene.servers[number].output(), &[&format!("store=\"{store}\"")]);
        }
    };
    restart(&mut scene); // those of the scene have no stores
    let file = scene.create("kept.volume");
    let socket = scene.socket("kept");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush", "write -P 8 1M 1M"]).unwrap();
    nbd.kill().unwrap();
    restart(&mut scene);
    says(&scene.end(&["status", &file], 0), &["whole ", "writer 1"]);
    // The same folder is not for two servers.
    let store = scene.stage.path("stores/0");
    let refused = scene.end(&["serve", "--listen", "127.0.0.1:0", "--store", &store], 8);
    says(&refused, &["another server has its stores there", "--store"]);

    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["read -P 7 0 1M", "read -P 8 1M 1M"]).unwrap();
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
    scene.servers[0].signal(Signal::TERM).unwrap();
    says(&ends(&mut scene.servers[0], 0), &["the copies are in", &store]);
}

#[test]
fn between_hosts_a_volume_has_tls_and_a_stranger_gets_nothing() {
    let Some(()) = require::namespaces() else { return };
    let Some(()) = require::nbd_clients() else { return };
    let net = Net::new().unwrap();
    let host = net.host("volume").unwrap();
    let scene = Scene::new(Some(&host), &[]);
    says(&scene.servers[0].output(), &["protection=\"TLS 1.3, token; plaintext on loopback\""]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush", "read -P 7 0 1M"]).unwrap();
    // A process with another token.
    let other = Stage::new();
    let token = other.token.display().to_string();
    let mut stranger = other.start(Some(&host), &["volume", "status", &file, "--token-file", &token]);
    says(&ends(&mut stranger, 10), &["unknown", "0 servers answer and hold the volume"]);
    let mut plain = scene.stage.start(
        Some(&host),
        &["volume", "serve", "--listen", "0.0.0.0:0", "--security", "none", "--token-file", &token],
    );
    says(&ends(&mut plain, 3), &["without encryption", "--plaintext-network"]);
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

#[test]
fn what_cannot_be_a_volume_is_refused_before_anything_is_made() {
    let scene = Scene::new(None, &[]);
    let (file, servers) = (scene.stage.path("data.volume"), scene.addresses.join(","));
    let create = ["create", &file, "--servers", &servers, "--size"];
    says(&scene.end(&[&create[..], &["1000"]].concat(), 2), &["not a multiple of 4096"]);
    says(&scene.end(&[&create[..], &["1MiB", "--acknowledge", "4"]].concat(), 2), &["4 of 3 copies"]);
    let twice = format!("{0},{0}", scene.addresses[0]);
    says(&scene.end(&["create", &file, "--servers", &twice, "--size", "1MiB"], 2), &["twice", &scene.addresses[0]]);
    says(&scene.end(&[&create[..], &["1GiB"]].concat(), 10), &["the volume was not made", &scene.addresses[0]]);
    assert!(!std::path::Path::new(&file).exists());
    scene.create("data.volume");
    says(&scene.end(&[&create[..], &["1MiB"]].concat(), 3), &["exists"]);
    let nothing = scene.stage.path("nothing.volume");
    says(&scene.end(&["status", &nothing], 3), &[&nothing]);
    let token = scene.stage.token.display().to_string();
    says(&scene.end(&["status", &token], 3), &["does not describe a volume"]);
    says(&scene.end(&["nbd", &file, "--listen", "0.0.0.0:0"], 3), &["0.0.0.0:0 is not loopback"]);
    says(&scene.end(&["nbd", &file, "--copy-timeout", "0s"], 2), &["--copy-timeout", "at least 100ms"]);
    says(&scene.end(&["repair", &file, "--copy-timeout", "99ms"], 2), &["--copy-timeout", "at least 100ms"]);
}

// `remora volume`: scrub, repair, grow, remove, and what status shows of them.

const BLOCK: usize = 4096;

/// Changes a byte of a block in the memory of a process that consists of this byte only.
#[track_caller]
fn damage(pid: u32, byte: u8) {
    let maps = BufReader::new(File::open(format!("/proc/{pid}/maps")).unwrap());
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem")).unwrap();
    for line in maps.lines().map(Result::unwrap).filter(|line| line.contains("/memfd:remora-volume")) {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
        let mut block = [0; BLOCK];
        for at in (from..to).step_by(BLOCK) {
            memory.read_exact_at(&mut block, at).unwrap();
            if block == [byte; BLOCK] {
                return memory.write_all_at(&[byte + 1], at + 7).unwrap();
            }
        }
    }
    panic!("no block of {byte} in the memory of process {pid}");
}

fn status(scene: &Scene, file: &str) -> Value {
    let mut status = scene.start(&["status", file, "--json"]);
    ends(&mut status, 0);
    serde_json::from_str(&status.stdout()).unwrap()
}

fn states(scene: &Scene, file: &str) -> Vec<String> {
    let copies = status(scene, file)["copies"].as_array().unwrap().clone();
    copies.iter().map(|copy| copy["state"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn damage_is_found_by_a_scrub_and_repaired_by_the_open_volume_or_by_repair() {
    let Some(()) = require::nbd_clients() else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    let well = scene.end(&["scrub", &file], 0);
    assert_eq!(well.matches("4096 blocks read, 0 repaired in its store, 0 damaged in memory").count(), 3, "{well}");
    // A writer is at work.
    damage(scene.servers[1].pid(), 7);
    says(&scene.end(&["scrub", &file], 0), &["1 damaged in memory"]);
    assert_eq!(states(&scene, &file), ["whole"; 3]);
    says(&scene.end(&["repair", &file], 12), &["another writer is at work", "--take-over"]);
    nbd.kill().unwrap();
    says(&nbd.output(), &["a copy catches up", "a copy is whole"]);

    // No writer is.
    damage(scene.servers[2].pid(), 7);
    let found = scene.end(&["scrub", &file], 15);
    says(&found, &["1 damaged in memory", &scene.addresses[2], "remora volume repair"]);
    assert_eq!(states(&scene, &file), ["whole", "whole", "behind"]);
    says(&scene.end(&["repair", &file, "--take-over"], 0), &["all 3 copies are whole"]);
    assert_eq!(states(&scene, &file), ["whole"; 3]);
    scene.end(&["scrub", &file], 0);
}

#[test]
#[ignore = "long: make test-all"]
fn repair_levels_servers_that_came_back_and_names_one_that_does_not_answer() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    nbd.kill().unwrap();
    let address = scene.addresses[0].clone();
    scene.servers[0].kill().unwrap();
    let stuck = scene.end(&["repair", &file, "--take-over", "--copy-timeout", "1s", "--wait", "2s"], 10);
    says(&stuck, &[&format!("the copy at {address} cannot be taken back"), "--wait"]);
    (scene.servers[0], _) = scene.serve(&address);
    assert_eq!(states(&scene, &file), ["empty", "whole", "whole"]);
    says(&scene.end(&["repair", &file, "--take-over"], 0), &["all 3 copies are whole"]);
    let copies = status(&scene, &file)["copies"].clone();
    for copy in copies.as_array().unwrap() {
        assert_eq!(copy["state"], "whole", "{copy}");
        assert_eq!(copy["has_store"], false, "{copy}");
        assert_eq!(copy["is_cut"], false, "{copy}");
        assert_eq!(copy["memory"], 64 << 20, "{copy}");
        assert!(copy["memory_used"].as_u64().unwrap() > 16 << 20 && copy["catch_up_blocks"].is_null(), "{copy}");
        assert_eq!(copy["durable"], copy["applied"], "{copy}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_volume_grows_with_its_file_but_not_under_a_writer_that_is_at_work() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 16M", "flush"]).unwrap();
    qemu_io(&socket, &["write -P 7 16M 4k"]).unwrap_err();
    says(&scene.end(&["grow", &file, "--size", "20MiB"], 12), &["another writer is at work", "--take-over"]);
    says(&scene.end(&["grow", &file, "--size", "8MiB"], 2), &["does not become smaller"]);
    says(&scene.end(&["grow", &file, "--size", "20000001"], 2), &["--size", "multiple of 4096"]);
    qemu_io(&socket, &["read -P 7 0 16M"]).unwrap();

    // One server does not answer: the others and the file get the new size, and its name is said.
    let (address, before) = (scene.addresses[2].clone(), fs::read_to_string(&file).unwrap());
    scene.servers[2].kill().unwrap();
    let left = scene.end(&["grow", &file, "--size", "20MiB", "--take-over"], 10);
    says(&left, &["has 20971520 bytes now", "has not grown everywhere", &address, "run the command again"]);
    ends(&mut nbd, 11);
    (scene.servers[2], _) = scene.serve(&address);
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["read -P 7 0 16M", "read -P 0 16M 4M", "write -P 8 16M 4M", "flush"]).unwrap();
    // It had its copy in memory only, and the writer gives it one of the new size.
    says(&scene.end(&["grow", &file, "--size", "20MiB"], 0), &["the copy has the new size"]);
    qemu_io(&socket, &["read -P 7 0 16M", "read -P 8 16M 4M"]).unwrap();
    nbd.kill().unwrap();

    // The file of before describes a volume that is no more.
    let earlier = scene.socket("earlier.volume");
    fs::write(&earlier, before).unwrap();
    says(&scene.end(&["status", &earlier], 10), &["another size", "take its file from the host where it was"]);
}

#[test]
#[ignore = "long: make test-all"]
fn a_volume_is_removed_with_its_file_but_not_from_a_writer_that_is_at_work() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    says(&scene.end(&["remove", &file], 12), &["another writer is at work", "--take-over"]);
    qemu_io(&socket, &["read -P 7 0 1M", "write -P 8 0 4k", "flush"]).unwrap();
    says(&scene.end(&["status", &file], 0), &["whole ", "writer heard", "server's memory"]);
    // A server that does not answer may still have its copy.
    let address = scene.addresses[2].clone();
    scene.servers[2].kill().unwrap();
    let left = scene.end(&["remove", &file, "--take-over"], 10);
    says(
        &left,
        &[&format!("{}: the copy is removed", scene.addresses[0]), &format!("{address} may still have"), "kept"],
    );
    let ended = nbd.wait(crate::kit::LONG).unwrap();
    assert!([Some(10), Some(11)].contains(&ended.code()), "{ended}:\n{}", nbd.output());
    (scene.servers[2], _) = scene.serve(&address);
    says(&scene.end(&["remove", &file], 0), &["there was no copy", "the volume and its file are removed"]);
    assert!(!Path::new(&file).exists());
    // Their memory is free again: it has no room for two of these.
    let servers = scene.addresses.join(",");
    for name in ["one.volume", "two.volume"] {
        let file = scene.stage.path(name);
        scene.end(&["create", &file, "--size", "40MiB", "--servers", &servers], 0);
        scene.end(&["remove", &file], 0);
    }
}

#[test]
fn a_volume_that_was_not_made_leaves_nothing_behind() {
    let mut scene = Scene::new(None, &[]);
    let address = scene.addresses[2].clone();
    scene.servers[2].kill().unwrap();
    (scene.servers[2], _) = scene.serve_with(&["serve", "--listen", &address, "--memory", "8MiB"]);
    let (file, servers) = (scene.stage.path("data.volume"), scene.addresses.join(","));
    for _ in 0..2 {
        // The second one has memory at the first two servers, because the first one was removed there.
        let failed = scene.end(&["create", &file, "--size", "40MiB", "--servers", &servers], 10);
        says(&failed, &["the volume was not made", &address, "no memory left"]);
        assert!(!failed.contains("may keep a copy"), "{failed}");
        assert!(fs::metadata(&file).is_err());
    }
}

// `remora volume`: the ways of blocks between servers, writer and NBD clients, as options.

/// The number that a log line gives for this field.
#[track_caller]
fn field(line: &str, name: &str) -> u64 {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no number {name} in: {line}"))
}

#[test]
fn blocks_go_the_ways_that_the_options_say() {
    let Some(()) = require::nbd_clients() else { return };
    let mut scene = Scene::new(None, &[]);
    for number in 0..3 {
        scene.servers[number].kill().unwrap();
        let listen = scene.addresses[number].clone();
        let serve = ["serve", "--listen", &listen, "--memory", "128MiB", "--lanes", "0", "--no-shm"];
        (scene.servers[number], _) = scene.serve_with(&serve);
    }
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let played = |more: &[&str], takes_over: bool| {
        let more = [more, if takes_over { &["--take-over"] } else { &[] }].concat();
        let mut nbd = scene.nbd_with(&file, &socket, &more);
        qemu_io(&socket, &["write -P 7 0 4M", "flush", "read -P 7 0 1M"]).unwrap();
        nbd.signal(Signal::TERM).unwrap();
        let output = ends(&mut nbd, 0);
        output.lines().find(|line| line.contains("how blocks were read and written")).unwrap().to_owned()
    };
    let plain = played(&[], false);
    assert!(field(&plain, "asked") > 0 && field(&plain, "inline") > 0, "{plain}");
    assert_eq!((field(&plain, "far"), field(&plain, "pulled")), (0, 0), "{plain}");
    // The region of a copy and the outbox are asked for when the volume is open: some time later.
    for attempt in 0..20 {
        let line = played(&["--reads", "far", "--writes", "chain", "--window", "fixed:8"], true);
        if field(&line, "far") > 0 && field(&line, "pulled") > 0 {
            break;
        }
        assert!(attempt < 19, "neither read nor pulled without asking: {line}");
    }
    says(&scene.end(&["nbd", &file, "--socket", &socket, "--window", "fixed:0"], 2), &["fixed:0", "adaptive"]);
    says(&scene.end(&["nbd", &file, "--socket", &socket, "--reads", "near"], 2), &["near", "anywhere"]);
}

#[test]
fn ways_that_are_not_encrypted_are_refused_between_hosts() {
    let scene = Scene::new(None, &[]);
    let serve = ["serve", "--listen", "0.0.0.0:0", "--lanes", "0"];
    says(&scene.end(&serve, 3), &["--lanes", "without encryption", "--plaintext-network"]);
    // RDMA leaves the host, although the server listens at loopback.
    let serve = ["serve", "--listen", "127.0.0.1:0", "--rdma-address", "192.0.2.1"];
    says(&scene.end(&serve, 3), &["--rdma-address", "without encryption", "--plaintext-network"]);
    let file = scene.create("data.volume");
    let elsewhere = fs::read_to_string(&file).unwrap().replacen(&scene.addresses[0], "192.0.2.1:7480", 1);
    let elsewhere = without_checksum(&elsewhere);
    fs::write(&file, elsewhere).unwrap();
    let socket = scene.socket("device");
    for (option, ways) in [("--reads", ["anywhere", "far"]), ("--writes", ["pulled", "chain"])] {
        for way in ways {
            let refused = scene.end(&["nbd", &file, "--socket", &socket, option, way], 3);
            says(&refused, &[option, "192.0.2.1:7480", "--plaintext-network"]);
        }
    }
}

#[test]
fn a_device_without_a_socket_of_its_own_has_one_in_the_folder_of_its_user() {
    let Some(()) = require::nbd_clients() else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let mut nbd = scene.start_with(&["nbd", &file], |command| {
        command.env("XDG_RUNTIME_DIR", scene.stage.folder());
    });
    let line = nbd.wait_for_event("volume_open", LONG).unwrap();
    let socket = scene.stage.path("remora/data.nbd");
    says(&line, &[&socket]);
    qemu_io(&socket, &["write -P 7 0 1M", "flush", "read -P 7 0 1M"]).unwrap();
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
    assert!(!Path::new(&socket).exists());
}

/// The port of `remora volume nbd`, when the volume is open.
fn listening(nbd: &mut Agent) -> String {
    let line = nbd.wait_for_event("volume_open", LONG).unwrap();
    line.split("listening=\"tcp:").nth(1).and_then(|rest| rest.split('"').next()).unwrap().to_owned()
}

/// Runs a client of libnbd on a host. Returns what it says, and whether it succeeds.
fn client(host: &Host, program: &str, args: &[&str]) -> (bool, String) {
    let mut command = Command::new("timeout");
    command.arg("60").arg(program).args(args);
    host.enter(&mut command).unwrap();
    let ran = command.output().unwrap();
    (ran.status.success(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
}

#[test]
fn certificates_for_nbd_clients_are_replaced_by_sighup_and_a_broken_file_changes_nothing() {
    let Some(()) = require::nbd_clients() else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    let folder = scene.stage.folder();
    let [old, new] = ["old-ca", "new-ca"].map(|name| Authority::new(folder, name).unwrap());
    let (bundle, both) = (folder.join("bundle.pem"), folder.join("both.pem"));
    fs::copy(&old.ca, &bundle).unwrap();
    fs::write(&both, fs::read_to_string(&old.ca).unwrap() + &fs::read_to_string(&new.ca).unwrap()).unwrap();
    let server = old.sign("server", &["127.0.0.1"]).unwrap();
    // A client of each authority, and one that trusts only a server of the new one.
    let client = |authority: &Authority, trusts: &Path, name: &str| {
        let tls = Tls { ca: trusts.to_owned(), ..authority.sign(name, &["client.invalid"]).unwrap() };
        tls.libnbd_folder(folder, &format!("{name}-client"), true).unwrap()
    };
    let (of_old, of_new, of_new_only) =
        (client(&old, &both, "old"), client(&new, &both, "new"), client(&new, &new.ca, "new-only"));

    let [cert, key, ca] = [&server.certificate, &server.key, &bundle].map(|path| path.to_str().unwrap());
    let tls = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca];
    let mut nbd = scene.start(&[&["nbd", &file, "--listen", "127.0.0.1:0"], &tls[..]].concat());
    let address = listening(&mut nbd);
    let is_served = |folder: &str| {
        let mut command = Command::new("timeout");
        command.args(["60", "nbdinfo", "--size", &format!("nbds://{address}/?tls-certificates={folder}")]);
        command.output().unwrap().status.success()
    };
    assert_eq!([&of_old, &of_new, &of_new_only].map(|folder| is_served(folder)), [true, false, false]);
    let hang_up = |nbd: &mut Agent, event: &str| {
        nbd.signal(Signal::HUP).unwrap();
        nbd.wait_for_event(event, LONG).unwrap()
    };
    fs::write(&bundle, "not a certificate").unwrap();
    says(&hang_up(&mut nbd, "certificates_kept"), &["ERROR", ca, "--tls-ca", "no certificate"]);
    assert_eq!([&of_old, &of_new, &of_new_only].map(|folder| is_served(folder)), [true, false, false]);

    let next = new.sign("next", &["127.0.0.1"]).unwrap();
    for (from, to) in [(&next.certificate, &server.certificate), (&next.key, &server.key), (&new.ca, &bundle)] {
        fs::copy(from, to).unwrap();
    }
    hang_up(&mut nbd, "certificates_reread");
    assert_eq!([&of_old, &of_new, &of_new_only].map(|folder| is_served(folder)), [false, true, true]);
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

#[test]
#[ignore = "long: make test-all"]
fn nbd_clients_on_other_hosts_need_tls_and_a_certificate() {
    let Some(()) = require::namespaces() else { return };
    let Some(()) = require::nbd_clients() else { return };
    let net = Net::new().unwrap();
    let (host, other) = (net.host("volume").unwrap(), net.host("client").unwrap());
    let scene = Scene::new(Some(&host), &[]);
    let file = scene.create("data.volume");
    let folder = scene.stage.folder();
    let (server_tls, client_tls) = certificates(folder, &[host.address()]).unwrap();
    let [with, without] = [("with", true), ("without", false)]
        .map(|(name, has_one)| client_tls.libnbd_folder(folder, name, has_one).unwrap());
    let [cert, key, ca] = [&server_tls.certificate, &server_tls.key, &server_tls.ca].map(|path| path.to_str().unwrap());
    let listen = format!("{}:0", host.address());
    says(&scene.end(&["nbd", &file, "--listen", &listen], 3), &["not loopback", "--tls-cert"]);
    let tls = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca];
    let misused = scene.end(&[&["nbd", &file, "--socket", &scene.socket("device")], &tls[..]].concat(), 2);
    says(&misused, &["--socket", "--tls-cert"]);
    says(&scene.end(&[&["nbd", &file], &tls[..]].concat(), 2), &["--listen"]);
    says(&scene.end(&["nbd", &file, "--listen", &listen, "--tls-cert", cert], 2), &["--tls-key", "--tls-ca"]);
    let swapped = ["--tls-cert", cert, "--tls-key", client_tls.key.to_str().unwrap(), "--tls-ca", ca];
    let refused = scene.end(&[&["nbd", &file, "--listen", &listen], &swapped[..]].concat(), 3);
    says(&refused, &["--tls-key", "is not that of the certificate"]);

    let mut nbd = scene.start(&[&["nbd", &file, "--listen", &listen], &tls[..]].concat());
    let address = listening(&mut nbd);
    let content = Random::new(remora_lab::random::seed("volume tls")).bytes(16 << 20);
    let (there, back) = (scene.stage.path("there"), scene.stage.path("back"));
    fs::write(&there, &content).unwrap();
    let uri = |folder: &str| format!("nbds://{address}/?tls-certificates={folder}");
    let (is_well, said) = client(&other, "nbdinfo", &[&uri(&with)]);
    assert!(is_well && said.contains("protocol: newstyle-fixed with TLS"), "{said}");
    for args in [[&there, &uri(&with)], [&uri(&with), &back]] {
        let (is_well, said) = client(&other, "nbdcopy", &args.map(String::as_str));
        assert!(is_well, "{said}");
    }
    assert!(fs::read(&back).unwrap() == content);
    let (is_well, said) = client(&other, "nbdinfo", &[&uri(&without)]);
    assert!(!is_well, "a client without a certificate was served: {said}");
    let (is_well, said) = client(&other, "nbdinfo", &[&format!("nbd://{address}/")]);
    assert!(!is_well && said.contains("TLS"), "{said}");
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

// `remora volume` with `--security mtls`: new certificates while servers and a writer run.

/// The state of the volume, asked by a command with these files.
fn status_text(scene: &Scene, file: &str, files: &Tls, code: i32) -> String {
    let (token, options) = (scene.stage.token.display().to_string(), options(files));
    let status = ["volume", "status", file, "--json", "--token-file", &token];
    scene.stage.end(&[&status[..], &words(&options)].concat(), code)
}

fn whole_copies(status: &str) -> usize {
    status.matches("\"state\":\"whole\"").count()
}

#[track_caller]
fn unreached(scene: &Scene, file: &str, files: &Tls) {
    let status = status_text(scene, file, files, 10);
    assert_eq!(whole_copies(&status), 0, "{status}");
}

fn hang_up(agent: &mut Agent, event: &str) -> String {
    agent.signal(Signal::HUP).unwrap();
    agent.wait_for_event(event, LONG).unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn servers_and_a_writer_use_new_certificates_from_sighup_on() {
    let Some(()) = require::nbd_clients() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = ["old-ca", "new-ca"].map(|name| Authority::new(folder.path(), name).unwrap());
    let of_old = old.sign("old", &["127.0.0.1"]).unwrap();
    let of_new = new.sign("new", &["127.0.0.1"]).unwrap();
    // The servers and the writer read these.
    let files = Tls { ca: folder.path().join("bundle.pem"), ..old.sign("agent", &["127.0.0.1"]).unwrap() };
    fs::copy(&old.ca, &files.ca).unwrap();
    let mut scene = Scene::new(None, &words(&options(&files)));
    let file = scene.create("data.volume");
    let socket = scene.socket("device");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    assert_eq!(whole_copies(&status_text(&scene, &file, &of_old, 0)), 3);
    unreached(&scene, &file, &of_new);

    let replace = || {
        for (from, to) in [(&of_new.certificate, &files.certificate), (&of_new.key, &files.key), (&new.ca, &files.ca)] {
            fs::copy(from, to).unwrap();
        }
    };
    replace();
    unreached(&scene, &file, &of_new);
    for server in &mut scene.servers {
        hang_up(server, "certificates_reread");
    }
    assert_eq!(whole_copies(&status_text(&scene, &file, &of_new, 0)), 3);
    unreached(&scene, &file, &of_old);
    // The writer's connections are older, and go on.
    qemu_io(&socket, &["write -P 8 0 1M", "flush"]).unwrap();

    // A file that cannot be used changes nothing.
    fs::write(&files.ca, "not a certificate").unwrap();
    for agent in scene.servers.iter_mut().chain([&mut nbd]) {
        let line = hang_up(agent, "certificates_kept");
        says(&line, &["ERROR", files.ca.to_str().unwrap(), "--ca", "no certificate"]);
    }
    replace();
    assert_eq!(whole_copies(&status_text(&scene, &file, &of_new, 0)), 3);
    unreached(&scene, &file, &of_old);

    // A server that comes back takes no connection of the writer before that has read its files again. The copy is lent
    // by a server that has.
    scene.servers[0].kill().unwrap();
    qemu_io(&socket, &["write -P 9 1M 1M", "flush"]).unwrap();
    let address = scene.addresses[0].clone();
    (scene.servers[0], _) = scene.serve(&address);
    scene.servers[0].wait_for_line("a connection was rejected", LONG).unwrap();
    assert_eq!(whole_copies(&status_text(&scene, &file, &of_new, 0)), 2);
    hang_up(&mut nbd, "certificates_reread");
    wait_until("three whole copies", LONG, || {
        let status = status_text(&scene, &file, &of_new, 0);
        Ok(if whole_copies(&status) == 3 { Ok(()) } else { Err(status) })
    })
    .unwrap();
    qemu_io(&socket, &["read -P 8 0 1M", "read -P 9 1M 1M"]).unwrap();
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

// Nothing is ended before all is ready, and an ended mount stays dead: commands that replace a writer, with each
// mistake that can be seen before; and mounts whose volume or process ends under a program that is started again.

fn is_dead(error: &std::io::Error) -> bool {
    [Errno::NOTCONN, Errno::CONNABORTED, Errno::CANCELED]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// The healthy writer of files goes on, whichever mistake another host makes.
#[test]
fn a_mistake_that_can_be_seen_before_does_not_end_the_healthy_writer() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    scene.end(&["format", &file], 0);
    let (mut mounted, directory) = mount(&scene, &file, "one", &["--take-over"]);
    let mut written = 0;
    let mut lives = |what: &str| {
        written += 1;
        fs::write(directory.at("f"), format!("{written}")).unwrap_or_else(|error| panic!("after {what}: {error}"));
        fs::File::open(directory.at("f")).unwrap().sync_all().unwrap_or_else(|error| panic!("after {what}: {error}"));
    };
    let two = scene.stage.path("two");
    fs::create_dir(&two).unwrap();
    let nothing = scene.stage.path("typo");
    let long = scene.stage.path(&format!("{}/s", "x".repeat(150)));
    let other = scene.stage.path("other.volume");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&other, without_checksum(&text.replace("16777216", "8388608"))).unwrap();
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("a directory that is missing", &["mount", &file, &nothing], &[&nothing, "existing directory"]),
        ("a file for a directory", &["mount", &file, &file], &[&file, "existing directory"]),
        (
            "a directory where its files are mounted",
            &["mount", &file, &directory.0],
            &[&directory.0, "unmount it first"],
        ),
        ("an image over files", &["mount", &file, &two, "--image"], &["has files", "goes on"]),
        ("a metrics port in use", &["mount", &file, &two, "--metrics", &taken], &[&taken]),
        ("a port in use", &["nbd", &file, "--listen", &taken], &[&taken]),
        ("a socket that cannot be made", &["nbd", &file, "--socket", "/proc/nosuch/s"], &["/proc/nosuch"]),
        ("a path that is too long", &["nbd", &file, "--socket", &long], &["xxx"]),
        ("a device over files", &["nbd", &file, "--listen", "127.0.0.1:0"], &["has files", "goes on"]),
        ("a format over files", &["format", &file], &["not empty", "goes on"]),
        ("a size for which no server has memory", &["grow", &file, "--size", "100GiB"], &["no memory"]),
        ("a smaller size", &["grow", &file, "--size", "8MiB"], &["does not become smaller"]),
        ("the file of another size", &["mount", &other, &two], &["another size"]),
    ];
    for (what, args, expected) in cases {
        let mut failed = scene.start(&[*args, &["--take-over"]].concat());
        let status = failed.wait(LONG).unwrap();
        assert!(status.code().is_some_and(|code| code != 0 && code != 11), "{what}: {status}");
        says(&failed.output(), expected);
        lives(what);
    }
    // A second mount would hide the first one, also one for reading.
    says(&scene.end(&["mount", &file, &directory.0, "--read-only"], 8), &[&directory.0, "unmount it first"]);
    lives("another mount for reading");
    // Not root. It can read what it needs.
    for (path, mode) in [(scene.stage.folder(), 0o755), (Path::new(&file), 0o644)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let token = scene.stage.path("token-of-another-user");
    fs::copy(&scene.stage.token, &token).unwrap();
    std::os::unix::fs::chown(&token, Some(65534), Some(65534)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
    command.args(["volume", "mount", &file, "/tmp", "--take-over", "--token-file", &token]);
    command.uid(65534).gid(65534);
    let mut failed = Agent::run(command).unwrap();
    let status = failed.wait(LONG).unwrap();
    assert!(status.code().is_some_and(|code| code != 0 && code != 11), "{status}:\n{}", failed.output());
    says(&failed.output(), &["run as root"]);
    lives("a user who is not root");
    mounted.signal(Signal::TERM).unwrap();
    ends(&mut mounted, 0);
}

/// The healthy writer is a block device here.
#[test]
fn files_that_are_not_there_do_not_end_the_writer_of_a_device() {
    let (Some(()), Some(()), Some(())) = (require::root(), require::fuse(), require::nbd_clients()) else { return };
    let scene = Scene::new(None, &[]);
    let (file, socket) = (scene.create("data.volume"), scene.socket("device"));
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    let directory = Directory::new(scene.stage.path("mnt"));
    for args in [&["mount", &file, &directory.0][..], &["format", &file]] {
        says(&scene.end(&[args, &["--take-over"][..]].concat(), 10), &[&file, "goes on"]);
        qemu_io(&socket, &["read -P 7 0 1M", "write -P 7 0 4k", "flush"]).unwrap();
    }
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

fn server(kind: Kind, directory: &Directory) -> Result<Server, remora_lab::Error> {
    let builder = Server::builder(kind).config("dir", &directory.0).config("appendonly", "yes");
    builder.config("appendfsync", "always").start()
}

/// The mount ends under a server, and the server is started again in its directory: it must not begin empty on the disk
/// below.
#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_started_again_does_not_write_below_a_mount_that_has_ended() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let mut scene = Scene::new(None, &[]);
        let file = scene.create("redis.volume");
        scene.end(&["format", &file], 0);
        let is_refused = |directory: &Directory, what: &str| {
            assert!(server(kind, directory).is_err(), "{what}: the server has started");
            let error = fs::write(directory.at("new"), "x").unwrap_err();
            assert!(is_dead(&error), "{what}: {error}");
        };
        let below = |directory: &Directory, what: &str| {
            directory.unmount();
            assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0, "{what}: nothing is below");
        };
        // Another host takes the volume.
        let (mut first, one) = mount(&scene, &file, "one", &["--take-over"]);
        let mut on_one = server(kind, &one).unwrap();
        on_one.client().unwrap().ok(&["SET", "key", "value"]).unwrap();
        let (mut second, two) = mount(&scene, &file, "two", &["--take-over"]);
        says(&ends(&mut first, 11), &["another writer has opened the volume", &one.0, "stays mounted"]);
        on_one.kill().unwrap();
        is_refused(&one, "a take-over");
        // It is stopped while its files are used.
        let mut on_two = server(kind, &two).unwrap();
        second.signal(Signal::TERM).unwrap();
        second.wait(LONG).unwrap();
        says(&second.output(), &[&two.0, "stays mounted"]);
        on_two.kill().unwrap();
        is_refused(&two, "a stop");
        below(&two, "a stop");
        // The command, started again, takes the place of what it has left.
        let (mut third, one) = mount(&scene, &file, "one", &["--take-over"]);
        let mut again = server(kind, &one).unwrap();
        assert_eq!(again.client().unwrap().text(&["GET", "key"]).unwrap(), "value");
        again.kill().unwrap();
        // No server of the volume is left.
        scene.servers.iter_mut().for_each(|server| server.kill().unwrap());
        wait_until("the mount notices", LONG, || {
            let _ = fs::write(one.at("new"), "x");
            Ok(if third.ended().unwrap().is_some() { Ok(()) } else { Err("it runs".to_owned()) })
        })
        .unwrap();
        says(&third.output(), &["stays mounted"]);
        is_refused(&one, "the loss of all servers");
        below(&one, "the loss of all servers");
    }
}

/// As before, for those who want it so; and a stop while nothing uses the files leaves an ordinary directory.
#[test]
fn a_mount_is_taken_away_if_nothing_uses_it_or_if_that_is_wanted() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    scene.end(&["format", &file], 0);
    let (mut first, one) = mount(&scene, &file, "one", &["--take-over", "--unmount-at-end"]);
    let used = fs::File::create(one.at("f")).unwrap();
    let (mut second, two) = mount(&scene, &file, "two", &["--take-over"]);
    ends(&mut first, 11);
    drop(used);
    assert_eq!(fs::read_dir(&one.0).unwrap().count(), 0);
    second.signal(Signal::TERM).unwrap();
    ends(&mut second, 0);
    assert_eq!(fs::read_dir(&two.0).unwrap().count(), 0);
}
