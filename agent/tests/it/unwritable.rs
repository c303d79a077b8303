//! Outputs that cannot be written: the disk of the log is full, the reader of a pipe has gone, or the descriptor is
//! closed. A log ends no agent. A result that is lost is not success.

use std::fs::{File, OpenOptions};
use std::io;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use remora_lab::server::wait_until;
use remora_lab::{Server, assert_same_data, require};
use rustix::process::{Pid, Signal, kill_process};

use crate::kit::{Directory, LONG, Scene, Stage, fill_keys, primary, quick, syncs};
use crate::{attend, by_file};

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
