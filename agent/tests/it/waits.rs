//! What passes by itself is waited for, within one time limit, by every command; what does not ends it at once.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use remora_lab::server::{Program, wait_until};
use remora_lab::{Agent, Client, Kind, Sentinels, Server, assert_same_data, require, scratch, sentinel};

use crate::kit::{
    Directory, LONG, Stage, assert_untouched, at_once, ends, fill_keys, load_slowly, number, primary, quick, says,
    succeeds, wait_until_loading,
};

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
