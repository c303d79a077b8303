//! What an agent has of its host: a service manager and the units in `deploy/systemd`; memory, clock, signals,
//! environment and limits; and RDMA devices, or none.

use std::io::IoSliceMut;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::FdFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::Signal;

use crate::kit::{Directory, LONG, Stage, ends, fill, fill_keys, number, primary, quick, says, succeeds};
use crate::sync::attend;
use crate::volume::{commands, volume_mount};
use remora_lab::server::wait_until;
use remora_lab::{Agent, Host, Net, Server, Shape, assert_same_data, require};

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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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

// A source that is killed and started again by its service manager, which has kept its snapshot or its port.
//
// The manager is this test: it takes the descriptors that the source asks it to keep (`FDSTORE=1`) and passes them to
// the next process, as systemd does. `make try-dist` does the same under systemd itself.

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 16;

type Kept = Arc<Mutex<Vec<(String, OwnedFd)>>>;

/// A service manager with a descriptor store.
struct KeepingManager {
    path: PathBuf,
    kept: Kept,
    /// The port that the manager opens for the source.
    port: Option<TcpListener>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl KeepingManager {
    /// One that opens a port, as with a socket unit.
    fn with_port(stage: &Stage, at: &str) -> KeepingManager {
        let mut manager = KeepingManager::new(stage);
        manager.port = Some(TcpListener::bind(at).unwrap());
        manager
    }

    fn new(stage: &Stage) -> KeepingManager {
        let path = stage.folder().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let (kept, over) = (Kept::default(), Arc::new(AtomicBool::new(false)));
        let (store, stop) = (kept.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                hear(&socket, &store);
            }
        });
        KeepingManager { path, kept, port: None, over, thread: Some(thread) }
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.kept.lock().unwrap().iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    }

    /// Waits until these and no others are kept.
    #[track_caller]
    fn wait_for(&self, names: &[&str]) {
        let what = format!("the manager keeps {names:?}");
        wait_until(&what, LONG, || {
            let found = self.names();
            Ok(if found == names { Ok(()) } else { Err(format!("{found:?}")) })
        })
        .unwrap();
    }

    /// Starts a source with what is kept, as a service, and waits until it is ready.
    fn source(&self, stage: &Stage, host: Option<&Host>, primary: &Server, listen: &str) -> (Agent, String) {
        let mut agent = self.start(stage, host, primary, &["--listen", listen]);
        let ready = agent.wait_for_event("source_ready", LONG).unwrap();
        let address = ready.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        (agent, address.to_owned())
    }

    /// Starts a source with the port and with what is kept.
    fn start(&self, stage: &Stage, host: Option<&Host>, primary: &Server, listen: &[&str]) -> Agent {
        let kept = self.kept.lock().unwrap();
        let (mut redirects, mut names, mut passed) = (String::new(), Vec::new(), Vec::new());
        // systemd passes sockets first.
        let port = self.port.iter().map(|port| ("remora-listen", port.as_fd()));
        let kept = kept.iter().map(|(name, descriptor)| (name.as_str(), descriptor.as_fd()));
        for (at, (name, descriptor)) in port.chain(kept).enumerate() {
            // Above those that the shell uses, and open in the program.
            let copy = rustix::io::fcntl_dupfd_cloexec(descriptor, 100).unwrap();
            rustix::io::fcntl_setfd(&copy, FdFlags::empty()).unwrap();
            redirects.push_str(&format!(" {}<&{}", 3 + at, copy.as_raw_fd()));
            names.push(name);
            passed.push(copy);
        }
        // Not every sh passes descriptors above 9.
        let mut command = Command::new("bash");
        command.arg("-c").arg(format!("export LISTEN_PID=$$; exec \"$0\" \"$@\"{redirects}"));
        command.arg(env!("CARGO_BIN_EXE_remora"));
        let token = stage.token.display().to_string();
        command.args(["source", "--server", &primary.url(), "--token-file", &token]).args(listen);
        command.args(["--memory", "128MiB", "--slot-size", "64KiB"]);
        command.env("NOTIFY_SOCKET", &self.path).env("XDG_STATE_HOME", stage.folder());
        command.env("LISTEN_FDS", passed.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        command.env(
            "REMORA_LOG",
            "info,remora_agent=debug,remora_delivery=debug,remora_replica=debug,remora_server=debug",
        );
        if let Some(host) = host {
            host.enter(&mut command).unwrap();
        }
        Agent::run(command).unwrap()
    }
}

impl Drop for KeepingManager {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Takes one message, and does what it says about descriptors.
fn hear(socket: &UnixDatagram, kept: &Kept) {
    let (mut bytes, mut space) = ([0; 4096], [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let Ok(received) = received else { return };
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let text = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
    let has = |line: &str| text.lines().any(|found| found == line);
    let Some(name) = text.lines().find_map(|line| line.strip_prefix("FDNAME=")) else { return };
    let mut kept = kept.lock().unwrap();
    if has("FDSTOREREMOVE=1") {
        kept.retain(|(found, _)| found != name);
    }
    if has("FDSTORE=1") {
        kept.extend(descriptors.into_iter().map(|descriptor| (name.to_owned(), descriptor)));
    }
}

const PLAIN: [&str; 3] = ["remora-journal", "remora-record", "remora-snapshot"];

const SEALED: [&str; 4] = ["remora-journal", "remora-record", "remora-sealed", "remora-snapshot"];

#[test]
#[ignore = "long: make test-all"]
fn a_source_that_was_killed_goes_on_with_its_snapshot_and_with_what_was_written_meanwhile() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let (early, late) = (quick(kind).start().unwrap(), quick(kind).start().unwrap());
        fill(&primary, MEBIBYTES, 1);
        let stage = Stage::new();
        let manager = KeepingManager::new(&stage);
        let (mut source, address) = manager.source(&stage, None, &primary, "127.0.0.1:0");
        succeeds(&mut stage.replica(&early.url(), address.parse().unwrap(), &[]), &early);
        fill_keys(&primary, 1000, "before");
        manager.wait_for(&PLAIN);

        source.kill().unwrap();
        fill_keys(&primary, 1000, "meanwhile");
        let (mut source, again) = manager.source(&stage, None, &primary, &address);
        assert_eq!(again, address);
        source.wait_for_event("snapshot_kept", LONG).unwrap();
        fill_keys(&primary, 1000, "after");
        succeeds(&mut stage.replica(&late.url(), address.parse().unwrap(), &[]), &late);

        assert_eq!(number(&primary, "sync_full"), 1, "the primary says:\n{}", primary.log());
        assert_same_data(&primary, &late);
        manager.wait_for(&PLAIN);
    }
}

#[test]
fn a_replica_whose_source_is_killed_in_the_middle_of_the_transfer_goes_on_where_it_was() {
    let Some(kind) = require::redis() else { return };
    let Some(()) = require::namespaces() else { return };
    let net = Net::new().unwrap();
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let server = |host| Server::builder(kind).on(host).config("repl-diskless-sync-delay", 0).start().unwrap();
    let (primary, replica) = (server(&here), server(&there));
    fill(&primary, MEBIBYTES, 1);
    there.shape(Shape::rate(6 << 20)).unwrap();
    let stage = Stage::new();
    let manager = KeepingManager::new(&stage);
    let listen = format!("{}:0", here.address());
    let (mut source, address) = manager.source(&stage, Some(&here), &primary, &listen);
    let mut agent = stage.replica_on(&there, &replica.url(), address.parse().unwrap(), &[]);
    manager.wait_for(&SEALED);
    // About a third of the snapshot, which takes three seconds.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(agent.ended().unwrap(), None, "{}", agent.output());

    source.kill().unwrap();
    fill_keys(&primary, 100, "meanwhile");
    let (mut source, _) = manager.source(&stage, Some(&here), &primary, &address);
    source.wait_for_event("snapshot_kept", LONG).unwrap();
    let joined = source.wait_for_event("replica_joined", LONG).unwrap();
    assert!(joined.contains("resumes=true"), "{joined}");
    succeeds(&mut agent, &replica);
    assert_eq!(number(&primary, "sync_full"), 1, "the primary says:\n{}", primary.log());
    assert_same_data(&primary, &replica);
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_whose_server_has_gone_too_far_drops_what_was_kept_and_says_so() {
    let Some(kind) = require::redis() else { return };
    let primary = quick(kind).config("repl-backlog-size", "16kb").start().unwrap();
    let (early, late) = (quick(kind).start().unwrap(), quick(kind).start().unwrap());
    fill_keys(&primary, 100, "x");
    let stage = Stage::new();
    let manager = KeepingManager::new(&stage);
    let (mut source, address) = manager.source(&stage, None, &primary, "127.0.0.1:0");
    succeeds(&mut stage.replica(&early.url(), address.parse().unwrap(), &[]), &early);
    manager.wait_for(&PLAIN);
    source.kill().unwrap();
    fill(&primary, 1, 2);
    let (mut source, _) = manager.source(&stage, None, &primary, &address);
    let line = source.wait_for_event("snapshot_unusable", LONG).unwrap();
    assert!(line.contains("backlog"), "{line}");
    manager.wait_for(&[]);
    succeeds(&mut stage.replica(&late.url(), address.parse().unwrap(), &[]), &late);
    assert_same_data(&primary, &late);
    manager.wait_for(&PLAIN);
}

#[test]
fn a_snapshot_that_is_over_is_kept_no_longer() {
    let Some(kind) = require::redis() else { return };
    let (primary, replica) = (primary(kind).start().unwrap(), quick(kind).start().unwrap());
    fill_keys(&primary, 100, "x");
    let stage = Stage::new();
    let manager = KeepingManager::new(&stage);
    let (_source, address) = manager.source(&stage, None, &primary, "127.0.0.1:0");
    succeeds(&mut stage.replica(&replica.url(), address.parse().unwrap(), &[]), &replica);
    manager.wait_for(&PLAIN);
    // Another history: nothing of the former one is offered any more.
    primary.client().unwrap().ok(&["DEBUG", "CHANGE-REPL-ID"]).unwrap();
    primary.client().unwrap().call(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    manager.wait_for(&[]);
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_comes_while_its_source_is_started_again_waits_at_the_port_of_the_manager() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let [first, second, third] = [(); 3].map(|()| quick(kind).start().unwrap());
        fill_keys(&primary, 1000, "before");
        let stage = Stage::new();
        // As `ListenStream=7379` is opened: at all addresses of both kinds.
        let manager = KeepingManager::with_port(&stage, "[::]:0");
        let port = manager.port.as_ref().unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}").parse().unwrap();
        // A source that was never started before is waited for, too.
        let mut early = stage.replica(&first.url(), address, &[]);
        std::thread::sleep(Duration::from_millis(500));
        let mut source = manager.start(&stage, None, &primary, &[]);
        succeeds(&mut early, &first);
        assert_same_data(&primary, &first);
        manager.wait_for(&SEALED);

        for (signal, replica) in [(Signal::TERM, &second), (Signal::KILL, &third)] {
            source.signal(signal).unwrap();
            source.wait(LONG).unwrap();
            fill_keys(&primary, 1000, &format!("while {signal:?}"));
            let mut late = stage.replica(&replica.url(), address, &[]);
            std::thread::sleep(Duration::from_millis(500));
            assert_eq!(late.ended().unwrap(), None, "{}", late.output());
            source = manager.start(&stage, None, &primary, &[]);
            succeeds(&mut late, replica);
            assert!(!late.output().contains("trying again"), "{}", late.output());
            assert_same_data(&primary, replica);
        }
        assert_eq!(number(&primary, "sync_full"), 1, "the primary says:\n{}", primary.log());
    }
}

#[test]
fn a_source_refuses_a_port_of_the_manager_that_is_not_the_one_of_its_options() {
    let Some(kind) = require::redis() else { return };
    let primary = quick(kind).start().unwrap();
    let stage = Stage::new();
    let manager = KeepingManager::with_port(&stage, "127.0.0.1:0");
    let mut source = manager.start(&stage, None, &primary, &["--listen", "127.0.0.1:1"]);
    let status = source.wait(LONG).unwrap();
    assert_eq!(status.code(), Some(3), "{}", source.output());
    let port = manager.port.as_ref().unwrap().local_addr().unwrap().to_string();
    assert!(source.output().contains(&port) && source.output().contains("127.0.0.1:1"), "{}", source.output());
}

// The host as it is: its memory, clock, signals, environment and limits.

/// Sets keys with values of 100 KB, at the server itself.
fn populate(server: &Server, keys: u32) {
    let mut client = server.client().unwrap();
    client.ok(&["DEBUG", "POPULATE", &keys.to_string(), "populated", "100000"]).unwrap();
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_opens_its_port_before_it_prepares_its_memory_and_replicas_wait_for_it() {
    for kind in require::kinds() {
        let (top, target) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        populate(&top, 1500);
        // Sealed too, so that there is twice as much to prepare.
        let source = Stage::new().source(&top.url(), &["--memory", "1GiB", "--security", "token"]);
        let status = source.status();
        let mut agent = source.replica(&target, &["--security", "token"]);
        let prepared = source.wait_for_status("the memory", |status| status["preparing"] == "");
        succeeds(&mut agent, &target);
        assert_same_data(&top, &target);
        let output = source.agent.output();
        let at = |words: &str| output.find(words).unwrap_or_else(|| panic!("no {words:?} in:\n{output}"));
        assert!(at("source ready") < at("the memory is prepared"), "{output}");
        assert!(at("the memory is prepared") < at("requesting a snapshot"), "{output}");
        let said = status["preparing"].as_str().unwrap();
        assert!(said.is_empty() || said.starts_with("preparing "), "{status}");
        assert_eq!(prepared["totals"]["snapshots_failed"], 0, "{prepared}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_snapshot_that_will_not_fit_is_said_at_the_start_with_the_memory_that_would_do() {
    for kind in require::kinds() {
        let (top, target) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        fill(&top, 60, 1);
        for (security, twice) in [(&[][..], false), (&["--security", "token"][..], true)] {
            let stage = Stage::new();
            let few = stage.source(&top.url(), &[&["--memory", "64MiB"], security].concat());
            let output = few.agent.output();
            let said = output.lines().find(|line| line.contains("a window moves over it"));
            let said = said.unwrap_or_else(|| panic!("no warning before it is ready:\n{output}"));
            assert!(said.contains("WARN") && said.contains("--memory 64 MiB has room for"), "{said}");
            assert_eq!(said.contains("held twice"), twice, "{said}");
            let enough = said.split("; --memory ").nth(1).and_then(|rest| rest.split(" keeps").next()).unwrap();
            let enough = enough.replace(' ', "");
            drop(few);

            let source = stage.source(&top.url(), &[&["--memory", &enough], security].concat());
            succeeds(&mut source.replica(&target, &[security, &["--replace"]].concat()), &target);
            let status = source.wait_for_status("the snapshot", |status| status["generation"]["state"] == "complete");
            assert_eq!(status["generation"]["windowed"], false, "{status}");
            let output = source.agent.output();
            assert!(!output.contains("a window moves"), "{enough}:\n{output}");
        }
    }
}

/// An address at which nothing listens.
fn closed() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn a_hangup_ends_no_command_that_stays_and_has_it_read_its_files_again() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let (top, target, other) =
        (primary(kind).start().unwrap(), Server::start(kind).unwrap(), Server::start(kind).unwrap());
    let served = stage.source(&top.url(), &[]);
    let (address, nowhere) = (served.address.to_string(), closed());
    let (url, lost) = (top.url(), format!("redis://{nowhere}"));
    let (backups, empty) = (stage.path("backups"), stage.path("empty"));
    let mount = Directory::new(stage.path("mount"));
    let waits = "trying again";
    let tokens = "tokens_reread";
    // What each command says once it is at work, and the event once it has read its files
    // again; empty: it has none that count.
    let table: &[(&[&str], &str, &str)] = &[
        (&["source", "--listen", "127.0.0.1:0", "--server", &lost], waits, ""),
        (&["source", "--listen", "127.0.0.1:0", "--server", &url], "source ready", tokens),
        (&["replica", "--server", &other.url(), "--source", &nowhere], waits, tokens),
        (&["replica", "--server", &target.url(), "--source", &address, "--stay"], "in step; staying", tokens),
        (&["fetch", "--to", &stage.path("dump.rdb"), "--source", &nowhere], waits, tokens),
        (&["backup", "--source", &nowhere, "--to", &empty], waits, tokens),
        (&["backup", "--source", &nowhere, "--to", &empty, "--journal"], waits, tokens),
        (&["backup", "--source", &address, "--to", &backups, "--journal"], "the commands since are recorded", tokens),
        (&["snapshot", "mount", "--source", &nowhere, mount.path()], waits, tokens),
        (&["status", "--watch", "1s", "--source", &address], "source     remora", tokens),
        (&["volume", "serve", "--listen", "127.0.0.1:0", "--memory", "64MiB"], "volume server ready", tokens),
    ];
    let token = stage.token.display().to_string();
    let mut commands: Vec<(Vec<&str>, &str, &str)> = table
        .iter()
        .map(|(args, at_work, again)| ([args, &["--token-file", &token][..]].concat(), *at_work, *again))
        .collect();
    commands.push((vec!["ready", "--watch", "1s", "--server", &url], "is ready", "certificates_reread"));
    for (args, at_work, again) in commands {
        let mut agent = stage.start(None, &args);
        agent.wait_for_line(at_work, LONG).unwrap_or_else(|error| panic!("{args:?}: {error}\n{}", agent.output()));
        stays(&mut agent, again);
    }
}

/// Sends the agent a SIGHUP, which it survives and after which its log has this event, and then a SIGTERM.
#[track_caller]
fn stays(agent: &mut Agent, event: &str) {
    agent.signal(Signal::HUP).unwrap();
    if !event.is_empty() {
        agent.wait_for_event(event, LONG).unwrap_or_else(|error| panic!("{error}\n{}", agent.output()));
    }
    // Signals are delivered in the order of their numbers: the first one would have ended it.
    agent.signal(Signal::TERM).unwrap();
    let ended = agent.wait(LONG).unwrap();
    assert!(matches!(ended.code(), Some(0 | 7)), "{ended}\n{}", agent.output());
}

#[test]
fn a_hangup_does_not_end_attend() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = attend::Scene::with(primary(kind), |_| ()) else { return };
    let server = scene.server(Server::builder(kind));
    let mut agent = scene.attend_with(&server, &[scene.primary.port()], &[]);
    stays(&mut agent, "tokens_reread");
}

#[test]
fn a_hangup_ends_nothing_that_serves_a_volume() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = commands::Scene::new(None, &[]);
    let file = scene.create("files.volume");
    scene.end(&["format", &file], 0);
    let (mut mounted, _directory) = volume_mount::mount(&scene, &file, "mnt", &[]);
    stays(&mut mounted, "tokens_reread");
    let device = scene.create("device.volume");
    stays(&mut scene.nbd(&device, &scene.socket("one")), "tokens_reread");
}

#[test]
fn a_socket_that_is_passed_to_a_command_that_takes_none_is_refused() {
    let stage = Stage::new();
    let token = stage.token.display().to_string();
    let (nowhere, to) = (closed(), stage.path("dump.rdb"));
    let table: &[&[&str]] = &[
        &["volume", "serve", "--listen", "127.0.0.1:0", "--memory", "64MiB", "--token-file", &token],
        &["replica", "--server", "redis://127.0.0.1:1", "--source", &nowhere, "--token-file", &token],
        &["fetch", "--to", &to, "--source", &nowhere, "--token-file", &token],
    ];
    for args in table {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$0\" \"$@\" 3</dev/null"]);
        command.arg(env!("CARGO_BIN_EXE_remora")).args(*args).env("XDG_STATE_HOME", stage.folder());
        says(&ends(&mut Agent::run(command).unwrap(), 3), &["passed 1 descriptors", "socket unit"]);
    }
}

// RDMA: the tests of [`crate::in_the_machine`] in the virtual machine that has devices, and a machine that has none.

/// Four times what the tests take in an emulated machine that has two processors for itself.
const LIMIT: Duration = Duration::from_secs(1_500);

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn the_job_is_done_over_rdma_in_the_virtual_machine() {
    // The machine has this host's files, and so its servers.
    let (Some(_), Some(_)) = (require::redis(), require::valkey()) else { return };
    let Some(machine) = require::rdma_vm() else { return };
    let passed = machine.nodes(4).limit(LIMIT).run_ignored_tests("in_the_machine::", 1);
    assert_eq!(passed, 11);
}

#[test]
fn a_machine_without_devices_reports_what_is_missing_and_continues() {
    let stage = Stage::new();
    let said = Command::new(env!("CARGO_BIN_EXE_remora"))
        .args(["devices", "--json"])
        .env("REMORA_RDMA_DISABLE", "1")
        .output()
        .unwrap();
    assert!(said.status.success());
    let report: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert!(report["rdma"]["trouble"].as_str().unwrap().contains("unset that variable"));
    assert_eq!(report["shm"]["ready"], true);
    assert_eq!(report["tcp"]["ready"], true);
    says(&stage.end(&["devices"], 0), &["rdma   ", "shm    ready", "tcp    ready"]);
}
