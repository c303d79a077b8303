//! What a service manager is told, and the units in `deploy/systemd`.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use remora_lab::{Agent, Server, require};
use rustix::process::Signal;

use crate::kit::{LONG, Stage, fill_keys, succeeds};

/// The socket of a service manager.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    heard: Vec<String>,
}

impl Manager {
    fn new(stage: &Stage) -> Manager {
        let path = stage.folder().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        Manager { socket, path, heard: Vec::new() }
    }

    /// Starts `remora` as a service from which something must be heard within that time.
    fn start(&self, stage: &Stage, args: &[&str], watchdog: Duration) -> Agent {
        let mut command = stage.remora(args);
        command.env("NOTIFY_SOCKET", &self.path).env("WATCHDOG_USEC", watchdog.as_micros().to_string());
        Agent::run(command).unwrap()
    }

    /// Waits for a line that begins with these words.
    #[track_caller]
    fn wait_for(&mut self, words: &str) -> String {
        let began = Instant::now();
        while began.elapsed() < LONG {
            if let Some(line) = self.hear().into_iter().find(|line| line.starts_with(words)) {
                return line;
            }
        }
        panic!("no {words} among {:?}", self.heard);
    }

    /// The lines of the next message.
    fn hear(&mut self) -> Vec<String> {
        let mut bytes = [0; 4096];
        let Ok(length) = self.socket.recv(&mut bytes) else { return Vec::new() };
        let lines: Vec<String> = String::from_utf8_lossy(&bytes[..length]).lines().map(str::to_owned).collect();
        self.heard.extend(lines.clone());
        lines
    }
}

#[test]
fn a_source_is_ready_lives_says_what_it_does_and_stops() {
    let Some(kind) = require::redis() else { return };
    let (primary, replica) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    primary.configure("repl-diskless-sync-delay", "0").unwrap();
    fill_keys(&primary, 100, "x");
    let stage = Stage::new();
    let mut manager = Manager::new(&stage);
    let token = stage.token.display().to_string();
    let args = ["source", "--server", &primary.url(), "--listen", "127.0.0.1:0", "--token-file", &token];
    let mut source = manager.start(&stage, &args, Duration::from_secs(1));
    manager.wait_for("READY=1");
    assert_eq!(manager.wait_for("STATUS=no snapshot"), "STATUS=no snapshot; no replica has joined; 0 made so far");
    manager.wait_for("WATCHDOG=1");
    manager.wait_for("WATCHDOG=1");

    let line = source.wait_for_event("source_ready", LONG).unwrap();
    let address = line.split_whitespace().find_map(|word| word.strip_prefix("listening=")).unwrap();
    succeeds(&mut stage.replica(&replica.url(), address.parse().unwrap(), &[]), &replica);
    while !manager.wait_for("STATUS=a snapshot of ").ends_with("; 1 made so far") {}

    source.signal(Signal::TERM).unwrap();
    manager.wait_for("STOPPING=1");
    source.wait_for_success(LONG).unwrap();
}

#[test]
fn a_source_that_is_stopped_in_the_middle_of_its_work_is_not_counted_as_alive() {
    let Some(kind) = require::redis() else { return };
    let primary = Server::start(kind).unwrap();
    let stage = Stage::new();
    let mut manager = Manager::new(&stage);
    let token = stage.token.display().to_string();
    let args = ["source", "--server", &primary.url(), "--listen", "127.0.0.1:0", "--token-file", &token];
    let mut source = manager.start(&stage, &args, Duration::from_secs(1));
    manager.wait_for("WATCHDOG=1");
    source.signal(Signal::STOP).unwrap();
    while !manager.hear().is_empty() {}
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        assert_eq!(manager.hear(), [""; 0]);
    }
    source.signal(Signal::CONT).unwrap();
    manager.wait_for("WATCHDOG=1");
}

#[test]
fn a_volume_server_is_ready_when_it_serves() {
    let stage = Stage::new();
    let mut manager = Manager::new(&stage);
    let token = stage.token.display().to_string();
    let args = ["volume", "serve", "--listen", "127.0.0.1:0", "--memory", "64MiB", "--token-file", &token];
    let mut server = manager.start(&stage, &args, Duration::from_secs(1));
    manager.wait_for("READY=1");
    manager.wait_for("WATCHDOG=1");
    server.signal(Signal::TERM).unwrap();
    manager.wait_for("STOPPING=1");
    server.wait_for_success(LONG).unwrap();
}

#[test]
fn systemd_finds_nothing_to_object_to_in_the_units() {
    let Some(()) = require::systemd_analyze() else { return };
    let stage = Stage::new();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd");
    let mut copies = Vec::new();
    for entry in std::fs::read_dir(units).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let Some((stem, kind)) = name.split_once("@.") else { continue };
        let text = std::fs::read_to_string(entry.path()).unwrap();
        assert!(kind == "socket" || text.contains("/usr/bin/remora "), "{name}");
        // As an instance, and with a program that exists here.
        let copy = stage.folder().join(format!("{stem}@6379.{kind}"));
        std::fs::write(&copy, text.replace("/usr/bin/remora ", concat!(env!("CARGO_BIN_EXE_remora"), " "))).unwrap();
        copies.push(copy);
    }
    assert_eq!(copies.len(), 6);
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(&copies).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let about_ours: Vec<&str> = said.lines().filter(|line| line.contains("remora-")).collect();
    assert!(output.status.success() && about_ours.is_empty(), "{said}");
}
