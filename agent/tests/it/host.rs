//! The host as it is: its memory, clock, signals, environment and limits.

use std::net::TcpListener;

use remora_lab::{Agent, Server, assert_same_data, require};
use rustix::process::Signal;

use crate::attend;
use crate::kit::{Directory, LONG, Stage, ends, fill, primary, says, succeeds};
use crate::volume;
use crate::volume_mount;

/// Sets keys with values of 100 KB, at the server itself.
fn populate(server: &Server, keys: u32) {
    let mut client = server.client().unwrap();
    client.ok(&["DEBUG", "POPULATE", &keys.to_string(), "populated", "100000"]).unwrap();
}

#[test]
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
    let scene = volume::Scene::new(None, &[]);
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
