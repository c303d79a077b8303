//! `remora volume`: servers, a volume on them, its state, and its block device, as commands.

use std::process::Command;

use remora_lab::{Agent, Host, Net, require};
use rustix::process::Signal;

use crate::kit::{LONG, Stage, ends, says};

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
    says(&scene.end(&["status", &file], 10), &["1 servers that hold the volume answer, and 2 are needed"]);
    says(&scene.end(&["nbd", &file, "--socket", &two, "--copy-timeout", "4s"], 10), &[&file, "2 are needed"]);
}

#[test]
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
    says(&ends(&mut stranger, 10), &["unknown", "0 servers that hold the volume answer"]);
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
}
