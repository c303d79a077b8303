//! What a command does about its surroundings: what passes by itself is waited for, within one time limit, by every
//! command; what does not ends it at once. And outputs that cannot be written.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::kit::{
    Directory, LONG, Scene, Stage, assert_untouched, at_once, ends, fill_keys, load_slowly, number, primary, quick,
    says, succeeds, syncs, wait_until_loading,
};
use crate::sync::{attend, by_file};
use remora_lab::server::{Program, wait_until};
use remora_lab::{Agent, Client, Kind, Sentinels, Server, assert_same_data, require, scratch, sentinel};

/// Below the limit, a command is given this long.
const SOON: [&str; 2] = ["--retry-for", "2s"];

/// A user of this test alone, whose processes can be limited: the kernel counts those of all tests side by side.
fn limited_user() -> u32 {
    200_000 + std::process::id() % 100_000
}

/// A server that accepts no more clients until it is given back.
struct Full<'a> {
    server: &'a Server,
    client: Client,
}

impl Full<'_> {
    fn make(server: &Server) -> Full<'_> {
        let mut client = server.client().unwrap();
        let limit = number(server, "connected_clients").max(2);
        // Connections of this test that have just been closed are still counted.
        client.ok(&["CONFIG", "SET", "maxclients", &(limit - 1).to_string()]).unwrap();
        wait_until("the server to be full", LONG, || {
            Ok(if server.client().and_then(|mut client| client.ok(&["SELECT", "0"])).is_err() {
                Ok(())
            } else {
                let held: u64 = client.info("clients")?.number("connected_clients").unwrap_or(1);
                client.ok(&["CONFIG", "SET", "maxclients", &held.to_string()])?;
                Err("it accepts clients".to_owned())
            })
        })
        .unwrap();
        Full { server, client }
    }

    fn open(mut self) {
        self.client.ok(&["CONFIG", "SET", "maxclients", "1000"]).unwrap();
        self.server.client().unwrap().ok(&["SELECT", "0"]).unwrap();
    }
}

/// A server that a script keeps busy until it is killed.
struct Busy<'a> {
    server: &'a Server,
    _script: Client,
}

impl Busy<'_> {
    fn make(server: &Server) -> Busy<'_> {
        server.configure("lua-time-limit", "50").unwrap();
        let mut script = server.client().unwrap();
        script.send(&["EVAL", "while true do end", "0"]).unwrap();
        wait_until("the script to run", LONG, || {
            let answer = server.client()?.ok(&["GET", "x"]);
            Ok(answer.err().filter(|error| error.to_string().contains("BUSY")).map(drop).ok_or("not busy".to_owned()))
        })
        .unwrap();
        Busy { server, _script: script }
    }

    fn end(self) {
        self.server.client().unwrap().ok(&["SCRIPT", "KILL"]).unwrap();
    }
}

/// Starts a source that may have to wait.
fn source(stage: &Stage, more: &[&str]) -> Agent {
    let token = stage.token.display().to_string();
    let args = ["source", "--token-file", &token, "--listen", "127.0.0.1:0", "--memory", "128MiB"];
    stage.start(None, &[&args, more].concat())
}

fn verify(stage: &Stage, one: &Server, other: &Server) -> Agent {
    stage.start(None, &["verify", "--primary", &one.url(), "--replica", &other.url()])
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_full_or_busy_is_named_and_waited_for_by_every_command() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (top, target) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&top, 100, "x");
        let (max_clients, script) = ("has reached its maxclients", "SCRIPT KILL");

        // At its start.
        let full = Full::make(&top);
        let mut first = source(&stage, &["--server", &top.url()]);
        first.wait_for_line(max_clients, LONG).unwrap();
        full.open();
        first.wait_for_event("source_ready", LONG).unwrap();
        let busy = Busy::make(&top);
        let mut second = source(&stage, &["--server", &top.url()]);
        second.wait_for_line(script, LONG).unwrap();
        busy.end();
        second.wait_for_event("source_ready", LONG).unwrap();

        // The replica's own server, and the primary.
        let source = stage.source(&top.url(), &[]);
        let full = Full::make(&target);
        let mut agent = stage.replica(&target.url(), source.address, &[]);
        agent.wait_for_line(max_clients, LONG).unwrap();
        full.open();
        succeeds(&mut agent, &target);
        let busy = Busy::make(&target);
        let mut agent = stage.replica(&target.url(), source.address, &["--replace"]);
        agent.wait_for_line(script, LONG).unwrap();
        busy.end();
        succeeds(&mut agent, &target);
        let other = Server::start(kind).unwrap();
        let full = Full::make(&top);
        let mut agent = stage.replica(&other.url(), source.address, &[]);
        agent.wait_for_line(max_clients, LONG).unwrap();
        full.open();
        succeeds(&mut agent, &other);

        // Tools.
        let (full, busy) = (Full::make(&top), Busy::make(&other));
        let mut compared = verify(&stage, &top, &target);
        compared.wait_for_line(max_clients, LONG).unwrap();
        let mut loaded =
            stage.start(None, &["load", "--server", &other.url(), "--keys", "1", "--value-size", "1", "--prefix", "l"]);
        loaded.wait_for_line(script, LONG).unwrap();
        full.open();
        busy.end();
        ends(&mut compared, 0);
        loaded.wait(LONG).unwrap();
        assert_same_data(&top, &target);
    }
}

#[test]
fn a_limit_that_is_over_names_what_was_waited_for() {
    let Some(kind) = require::redis() else { return };
    let (stage, server) = (Stage::new(), Server::start(kind).unwrap());
    let _full = Full::make(&server);
    for (mut agent, words) in [
        (source(&stage, &["--server", &server.url(), "--wait-for-server", "1s"]), "(--wait-for-server)"),
        (stage.replica(&server.url(), server.address(), &SOON), "(--retry-for)"),
        (
            stage.start(None, &["verify", "--primary", &server.url(), "--replica", &server.url(), "--retry-for", "1s"]),
            "s (--retry-for)",
        ),
    ] {
        let said = ends(&mut agent, 4);
        says(said.lines().last().unwrap(), &["maxclients", "tried for", words]);
    }
}

#[test]
fn a_server_that_starts_after_the_source_is_waited_for_and_so_is_a_group_without_a_replica() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let mut server = primary(kind).start().unwrap();
        server.kill().unwrap();
        let mut agent = source(&stage, &["--server", &server.url()]);
        agent.wait_for_line("check that it is running", LONG).unwrap();
        server.restart().unwrap();
        agent.wait_for_event("source_ready", LONG).unwrap();

        let sentinels = Sentinels::start(kind, &server, &[], &[]).unwrap();
        let list = sentinels.list();
        let group = ["--sentinel", &list, "--sentinel-name", sentinel::NAME, "--wait-for-server", "3m"];
        let mut agent = source(&stage, &group);
        agent.wait_for_line("has no replica that is up and in step", LONG).unwrap();
        let replica = quick(kind).start().unwrap();
        replica.replicate(&server).unwrap();
        agent.wait_for_event("source_ready", LONG).unwrap();
    }
}

/// The commands that read a source, with a limit; each in a folder of its own.
fn readers(stage: &Stage, at: &str, server: &Server) -> Vec<(Agent, Option<Directory>)> {
    let token = stage.token.display().to_string();
    let start = |command: &[&str]| {
        let more = ["--source", at, "--token-file", &token];
        stage.start(None, &[command, &more, &SOON].concat())
    };
    let mut all = vec![
        (start(&["replica", "--server", &server.url()]), None),
        (start(&["fetch", "--to", &stage.path("fetched.rdb")]), None),
        (start(&["backup", "--to", &stage.path("backups")]), None),
        (start(&["backup", "--journal", "--to", &stage.path("journal")]), None),
    ];
    if require::root().is_some() && std::path::Path::new("/dev/fuse").exists() {
        let directory = Directory::new(stage.path("mnt"));
        let spool = stage.path("spool");
        std::fs::create_dir(&spool).unwrap();
        all.push((start(&["snapshot", "mount", "--spool", &spool, directory.path()]), Some(directory)));
    }
    all
}

#[test]
#[ignore = "long: make test-all"]
fn every_reader_of_a_source_gives_up_after_the_same_time_with_the_same_code() {
    at_once(require::kinds(), |kind| {
        // A source that is not there.
        let (stage, server) = (Stage::new(), Server::start(kind).unwrap());
        let absent = format!("127.0.0.1:{}", scratch::free_port().unwrap());
        for (mut agent, _mounted) in readers(&stage, &absent, &server) {
            says(ends(&mut agent, 5).lines().last().unwrap(), &["cannot be reached", "tried for 2 s (--retry-for)"]);
        }
        // A server that cannot write its snapshot, since its folder is gone.
        let stage = Stage::new();
        let lost = primary(kind).config("repl-diskless-sync", "no").start().unwrap();
        fill_keys(&lost, 10, "x");
        let source = stage.source(&lost.url(), &[]);
        std::fs::remove_dir_all(lost.folder()).unwrap();
        for (mut agent, _mounted) in readers(&stage, &source.address.to_string(), &server) {
            says(ends(&mut agent, 5).lines().last().unwrap(), &["has had no snapshot to offer for"]);
        }
        // A server that loads.
        let (stage, first) = (Stage::new(), primary(kind).start().unwrap());
        fill_keys(&first, 1500, "x");
        let loads = quick(kind).start().unwrap();
        load_slowly(&loads, 20_000);
        loads.replicate(&first).unwrap();
        wait_until_loading(&loads);
        let source = stage.source(&loads.url(), &[]);
        for (mut agent, _mounted) in readers(&stage, &source.address.to_string(), &server) {
            let said = ends(&mut agent, 5);
            says(said.lines().last().unwrap(), &["has had no snapshot to offer for", "loading"]);
        }
        assert_untouched(&server);
    });
}

#[test]
fn a_source_that_comes_late_is_read() {
    let Some(kind) = require::valkey() else { return };
    let (stage, top, server) = (Stage::new(), primary(kind).start().unwrap(), Server::start(kind).unwrap());
    fill_keys(&top, 100, "x");
    let at = format!("127.0.0.1:{}", scratch::free_port().unwrap());
    let (token, to) = (stage.token.display().to_string(), stage.path("dump.rdb"));
    let mut fetch = stage.start(None, &["fetch", "--source", &at, "--token-file", &token, "--to", &to]);
    let mut agent = stage.replica(&server.url(), at.parse().unwrap(), &[]);
    for waiting in [&mut fetch, &mut agent] {
        waiting.wait_for_event("retrying", LONG).unwrap();
    }
    let _source = stage.source_at(&at, None, &top.url(), &[]);
    ends(&mut fetch, 0);
    succeeds(&mut agent, &server);
    assert_same_data(&top, &server);
}

/// The most processes of the limited user, threads included: a server has five.
const LIMIT: usize = 12;

/// A program that runs the server with this limit.
fn limited(stage: &Stage, kind: Kind) -> Program {
    use std::os::unix::fs::PermissionsExt;
    let path = stage.folder().join("limited-server");
    let line = format!("#!/bin/bash\nulimit -u {LIMIT} && exec {} \"$@\"\n", kind.binary().unwrap().display());
    std::fs::write(&path, line).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(stage.folder(), std::fs::Permissions::from_mode(0o755)).unwrap();
    Program::at(path).unwrap()
}

/// Processes of the limited user that leave the server no further one.
struct Crowd(Vec<Child>);

impl Crowd {
    fn gather() -> Crowd {
        let sleep = || Command::new("sleep").arg("600").uid(limited_user()).gid(limited_user()).spawn().unwrap();
        Crowd((0..LIMIT).map(|_| sleep()).collect())
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // All at once: a server that can start one process, and not the next one, may end.
        self.0.iter_mut().for_each(|process| process.kill().unwrap());
        self.0.iter_mut().for_each(|process| _ = process.wait().unwrap());
    }
}

#[test]
fn a_fork_that_fails_is_tried_again_and_its_causes_are_named() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        // Valkey 9.1.2 ends by itself at the next diskless copy after a fork that failed, whichever replica asks for it
        // (an assertion in rdb.c): docs/reference/versions.md.
        let modes: &[&str] = if kind == Kind::Valkey9 { &["no"] } else { &["yes", "no"] };
        for diskless in modes {
            let stage = Stage::new();
            let server = primary(kind).program(&limited(&stage, kind)).as_user(limited_user());
            let top = server.config("repl-diskless-sync", diskless).start().unwrap();
            let replica = Server::start(kind).unwrap();
            fill_keys(&top, 100, "x");
            let mut source = stage.source(&top.url(), &[]);
            let crowd = Crowd::gather();
            let mut agent = stage.replica(&replica.url(), source.address, &[]);
            for end in [&mut source.agent, &mut agent] {
                let line = end.wait_for_line("could not start the process that writes the snapshot", LONG).unwrap();
                says(&line, &["vm.overcommit_memory", "pids.max", "Can't save in background: fork"]);
            }
            drop(crowd);
            succeeds(&mut agent, &replica);
            assert_same_data(&top, &replica);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_snapshot_that_does_not_begin_says_since_when_the_server_saves() {
    at_once(require::kinds(), |kind| {
        let (stage, replica) = (Stage::new(), Server::start(kind).unwrap());
        let slow = primary(kind).config("repl-diskless-sync", "no").config("rdb-key-save-delay", 10_000_000);
        let top = slow.start().unwrap();
        fill_keys(&top, 100, "x");
        let mut source = stage.source(&top.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        for end in [&mut source.agent, &mut agent] {
            end.wait_for_line("its BGSAVE has run for", LONG + Duration::from_secs(10)).unwrap();
        }
        top.configure("rdb-key-save-delay", "0").unwrap();
    });
}

// Outputs that cannot be written: the disk of the log is full, the reader of a pipe has gone, or the descriptor is
// closed. A log ends no agent. A result that is lost is not success.

/// What is wrong with an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    /// Each write fails with "no space left on device".
    Full,
    /// The reader of the pipe has gone.
    Gone,
    /// It was closed before the program began. The standard library opens `/dev/null` in its place.
    Closed,
}

const ALL: [Wrong; 3] = [Wrong::Full, Wrong::Gone, Wrong::Closed];

impl Wrong {
    fn output(self) -> Stdio {
        match self {
            Wrong::Full => OpenOptions::new().write(true).open("/dev/full").unwrap().into(),
            Wrong::Gone => {
                let (_gone, writer) = io::pipe().unwrap();
                writer.into()
            }
            Wrong::Closed => Stdio::null(),
        }
    }
}

/// A command whose stdout or stderr is wrong.
fn with(stage: &Stage, args: &[&str], wrong: Wrong, closes: &str) -> Command {
    if wrong != Wrong::Closed {
        return stage.remora(args);
    }
    let plain = stage.remora(&[]);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec \"$0\" \"$@\" {closes}")]).arg(plain.get_program()).args(args);
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
}

/// Runs a command whose stdout is wrong. Returns its exit code, and what it said on stderr.
fn without_stdout(stage: &Stage, args: &[&str], wrong: Wrong) -> (Option<i32>, String) {
    let mut command = with(stage, args, wrong, ">&-");
    let output = command.stdout(wrong.output()).stderr(Stdio::piped()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Starts a command whose stderr is wrong.
fn without_stderr(stage: &Stage, args: &[&str], wrong: Wrong) -> Running {
    let mut command = with(stage, args, wrong, "2>&-");
    // Everything is logged.
    command.env("REMORA_LOG", "debug");
    Running(command.stderr(wrong.output()).stdout(Stdio::null()).spawn().unwrap())
}

/// A command, which ends with the test.
struct Running(Child);

impl Running {
    fn assert_runs(&mut self) {
        assert_eq!(self.0.try_wait().unwrap(), None, "it has ended");
    }

    fn stop(&mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
    }

    fn code(&mut self) -> Option<i32> {
        let until = Instant::now() + LONG;
        loop {
            match self.0.try_wait().unwrap() {
                Some(status) => return status.code(),
                None if Instant::now() > until => panic!("it has not ended"),
                None => std::thread::sleep(std::time::Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A result went to an output that is wrong: the command fails without a panic. With a closed one it went where the
/// user has sent it.
fn assert_lost(stage: &Stage, args: &[&str]) {
    for wrong in ALL {
        let (code, said) = without_stdout(stage, args, wrong);
        assert!(!said.contains("panicked"), "{args:?} {wrong:?}: {said}");
        if wrong == Wrong::Closed {
            assert_eq!(code, Some(0), "{args:?} {wrong:?}: {said}");
            continue;
        }
        assert_eq!(code, Some(8), "{args:?} {wrong:?}: {said}");
        if !args.contains(&"--help") {
            assert!(said.contains("the result could not be written to stdout"), "{args:?} {wrong:?}: {said}");
        }
    }
}

#[test]
fn a_lost_result_of_a_command_without_a_server_is_code_8() {
    let stage = Stage::new();
    let config = stage.path("remora.toml");
    std::fs::write(&config, "[status]\nsource = \"127.0.0.1:1\"\n").unwrap();
    let identity = |number: usize| stage.path(&format!("identity {number}"));
    assert_lost(&stage, &["devices"]);
    assert_lost(&stage, &["devices", "--json"]);
    assert_lost(&stage, &["token", "new", "-"]);
    assert_lost(&stage, &["generate", "completions", "bash"]);
    assert_lost(&stage, &["source", "--help"]);
    for (number, wrong) in [Wrong::Full, Wrong::Gone].into_iter().enumerate() {
        let (code, said) = without_stdout(&stage, &["token", "identity", &identity(number)], wrong);
        assert_eq!(code, Some(8), "{said}");
        let (code, said) = without_stdout(&stage, &["config", "check", &config], wrong);
        assert!(code != Some(0) && code != Some(101), "{code:?}: {said}");
    }
}

#[test]
fn a_lost_result_of_a_command_with_servers_is_code_8_and_a_verdict_is_said_before() {
    let Some(kind) = require::redis() else { return };
    let right = primary(kind).start().unwrap();
    fill_keys(&right, 10, "right");
    let scene = Scene::new(right, &[]);
    let (stage, url) = (&scene.stage, scene.primary.url());
    let replica = Server::start(kind).unwrap();
    scene.source.replicate(&replica, &[]);
    let (address, token) = (scene.source.address.to_string(), scene.source.token().display().to_string());
    let of_source = ["--source", &address, "--token-file", &token];
    for json in [&[][..], &["--json"]] {
        assert_lost(stage, &[&["status"], &of_source[..], json].concat());
        assert_lost(stage, &[&["verify", "--primary", &url, "--replica", &replica.url()], json].concat());
    }
    let folder = stage.path("backups");
    stage.end(&[&["backup", "--to", &folder], &of_source[..]].concat(), 0);
    assert_lost(stage, &["restore", &folder, "--json"]);
    let another = Server::start(kind).unwrap();
    assert_lost(stage, &["load", "--server", &another.url(), "--keys", "1", "--value-size", "8"]);
    // That the servers differ is what a script asks for.
    let (code, said) = without_stdout(stage, &["verify", "--primary", &url, "--replica", &another.url()], Wrong::Full);
    assert_eq!(code, Some(1), "{said}");
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_and_a_replica_agent_whose_log_cannot_be_written_do_their_work() {
    for kind in require::kinds() {
        let (stage, right, server) = (Stage::new(), primary(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&right, 100, "right");
        let (address, token, url) = (free_address(), stage.token.display().to_string(), right.url());
        for wrong in ALL {
            let args = ["source", "--server", &url, "--listen", &address, "--token-file", &token];
            let mut source = without_stderr(&stage, &args, wrong);
            wait_until_it_answers(&stage, &address, &token);
            let args = stage.replica_args(&server.url(), address.parse().unwrap(), &["--replace", "--stay"]);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let mut agent = without_stderr(&stage, &args, wrong);
            wait_until("the agent to stay", LONG, || {
                let status = status(&stage, &address, &token);
                Ok(if status.contains("\"stay\"") { Ok(()) } else { Err(status) })
            })
            .unwrap();
            right.client().unwrap().ok(&["SET", "after", &format!("{wrong:?}")]).unwrap();
            assert_same_data(&right, &server);
            source.assert_runs();
            agent.assert_runs();
            agent.stop();
            assert_eq!(agent.code(), Some(0), "{wrong:?}");
            source.stop();
            assert_eq!(source.code(), Some(0), "{wrong:?}");
            assert_eq!(server.configured("masterauth").unwrap(), "", "the link's secret is left at the server");
        }
    }
}

#[test]
fn a_backup_with_its_journal_and_a_fetch_whose_log_cannot_be_written_do_their_work() {
    let Some(kind) = require::redis() else { return };
    let right = primary(kind).start().unwrap();
    fill_keys(&right, 100, "right");
    let scene = Scene::new(right, &[]);
    for wrong in ALL {
        let to = scene.stage.path(&format!("{wrong:?}"));
        let args = scene.args("backup", &to, &["--journal", "--name", &format!("{wrong:?}")]);
        let mut backup = without_stderr(&scene.stage, &args.iter().map(String::as_str).collect::<Vec<_>>(), wrong);
        scene.source.wait_for_status("the backup to record", |status| {
            let replicas = status["replicas"].as_array().unwrap();
            replicas.iter().any(|replica| replica["name"] == format!("{wrong:?}") && replica["phase"] == "stay")
        });
        backup.assert_runs();
        // A signal in the moment in which the folder gets its name would find no backup.
        wait_until("the folder of the backup", LONG, || {
            let names = std::fs::read_dir(&to).map(|folder| folder.flatten().collect::<Vec<_>>()).unwrap_or_default();
            let named = names.iter().any(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
            Ok(if named { Ok(()) } else { Err(format!("{names:?}")) })
        })
        .unwrap();
        backup.stop();
        assert_eq!(backup.code(), Some(0), "{wrong:?}");
        let file = scene.stage.path(&format!("{wrong:?}.rdb"));
        let args = scene.args("fetch", &file, &[]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        assert_eq!(without_stderr(&scene.stage, &args, wrong).code(), Some(0), "{wrong:?}");
        assert!(File::open(&file).is_ok(), "{wrong:?}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_attends_a_server_and_whose_log_cannot_be_written_does_its_work() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = attend::Scene::new(kind) else { return };
    let (address, token) = (scene.source.address.to_string(), scene.stage.token.display().to_string());
    let port = scene.primary.port().to_string();
    for (times, wrong) in (1..).zip(ALL) {
        let server = scene.server(quick(kind));
        let url = server.url();
        let args = ["attend", "--server", &url, "--source", &address, "--token-file", &token, "--primary-port", &port];
        let mut command = with(&scene.stage, &args, wrong, "2>&-");
        scene.host.enter(command.env("REMORA_LOG", "debug")).unwrap();
        let mut agent = Running(command.stderr(wrong.output()).stdout(Stdio::null()).spawn().unwrap());
        wait_until("the agent to attend", LONG, || {
            let rules = scene.intercept(&["show"]);
            Ok(if rules.contains("expires") { Ok(()) } else { Err(rules) })
        })
        .unwrap();
        server.replicate(&scene.primary).unwrap();
        wait_until("the server to be handed over", LONG, || {
            let counts = syncs(&scene.primary);
            Ok(if counts == (1, times) { Ok(()) } else { Err(format!("{counts:?}")) })
        })
        .unwrap();
        assert_same_data(&scene.primary, &server);
        agent.assert_runs();
        agent.stop();
        assert_eq!(agent.code(), Some(0), "{wrong:?}");
    }
}

#[test]
fn a_mounted_snapshot_whose_log_cannot_be_written_is_served() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let Some(kind) = require::redis() else { return };
    let right = primary(kind).start().unwrap();
    fill_keys(&right, 100, "right");
    let scene = Scene::new(right, &[]);
    let (address, token) = (scene.source.address.to_string(), scene.source.token().display().to_string());
    let spool = scene.stage.path("spool");
    std::fs::create_dir(&spool).unwrap();
    for wrong in ALL {
        let directory = Directory::new(scene.stage.path(&format!("{wrong:?}")));
        let args = ["snapshot", "mount", "--source", &address, "--token-file", &token, "--spool", &spool];
        let mut mounted = without_stderr(&scene.stage, &[&args[..], &[directory.path()]].concat(), wrong);
        let file = directory.at("dump.rdb");
        wait_until("the file", LONG, || Ok(if file.exists() { Ok(()) } else { Err("not there".to_owned()) })).unwrap();
        // A read waits for what has not arrived.
        let bytes = std::fs::read(&file).unwrap();
        assert!(bytes.starts_with(b"REDIS"), "{wrong:?}: {} bytes", bytes.len());
        mounted.assert_runs();
        directory.unmount();
        assert_eq!(mounted.code(), Some(0), "{wrong:?}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_delivery_by_a_file_whose_log_cannot_be_written_does_its_work() {
    let Some(kind) = require::redis() else { return };
    for wrong in ALL {
        let scene = by_file::Scene::with_data(primary(kind));
        let mut server = scene.server(quick(kind));
        let (command, include) = (scene.restart_command(), scene.include());
        let more = ["--delivery", "file", "--restart-command", &command, "--write-replicaof", &include];
        let args = scene.stage.replica_args(&server.url(), scene.source.address, &more);
        let mut agent = without_stderr(&scene.stage, &args.iter().map(String::as_str).collect::<Vec<_>>(), wrong);
        wait_until("the restart command", LONG, || {
            agent.assert_runs();
            Ok(if scene.wanted().exists() { Ok(()) } else { Err("not called".to_owned()) })
        })
        .unwrap();
        server.stop(LONG).unwrap();
        server.restart().unwrap();
        std::fs::remove_file(scene.wanted()).unwrap();
        assert_eq!(agent.code(), Some(0), "{wrong:?}\n{}", server.log());
        assert_same_data(&scene.primary, &server);
    }
}

#[test]
fn a_failure_that_cannot_be_told_has_its_code() {
    let stage = Stage::new();
    let token = stage.token.display().to_string();
    for wrong in ALL {
        let args = ["replica", "--server", "redis://127.0.0.1:1", "--source", "127.0.0.1:1", "--token-file", &token];
        let args = [&args[..], &["--retry-for", "0"]].concat();
        assert_eq!(without_stderr(&stage, &args, wrong).code(), Some(4), "{wrong:?}");
        assert_eq!(without_stderr(&stage, &["replica", "--no-such-option"], wrong).code(), Some(2), "{wrong:?}");
    }
}

fn free_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn status(stage: &Stage, address: &str, token: &str) -> String {
    let printed = stage.remora(&["status", "--json", "--source", address, "--token-file", token]).output().unwrap();
    String::from_utf8_lossy(&printed.stdout).into_owned()
}

fn wait_until_it_answers(stage: &Stage, address: &str, token: &str) {
    wait_until("the source to answer", LONG, || {
        let status = status(stage, address, token);
        Ok(if status.is_empty() { Err("no answer".to_owned()) } else { Ok(()) })
    })
    .unwrap();
}
