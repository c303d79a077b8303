//! The link's port gives data only to the agent's server, and what the agent leaves on the server and on disk is
//! useless to others.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Kind, Net, Server, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, ends, fill_keys, load_slowly, number, quick, says, succeeds, syncs, wait_until_loading,
};

/// The primary's password.
const PASSWORD: &str = "s3cret-primary";

/// A primary with a password and some keys, a source, and a server that knows the password.
struct Guarded {
    stage: Stage,
    primary: Server,
    replica: Server,
    source: Source,
}

impl Guarded {
    fn new(kind: Kind, keys: usize) -> Guarded {
        Guarded::with(keys, quick(kind).require_pass(PASSWORD), Server::builder(kind).master_auth(None, PASSWORD))
    }

    fn with(keys: usize, primary: Builder, replica: Builder) -> Guarded {
        let stage = Stage::new();
        let (primary, replica) = (primary.start().unwrap(), replica.start().unwrap());
        fill_keys(&primary, keys, "confidential");
        let file = stage.secret("password", PASSWORD);
        let source = stage.source(&primary.url(), &["--password-file", &file]);
        Guarded { stage, primary, replica, source }
    }

    fn agent(&self, more: &[&str]) -> Agent {
        self.stage.replica(&self.replica.url(), self.source.address, more)
    }

    fn login(&self) -> String {
        self.replica.configured("masterauth").unwrap()
    }

    /// Asserts that the sync was one copy and one continuation, and that the server's settings are as before, as a
    /// replica of the primary.
    fn assert_handed_over(&self) {
        assert_eq!(syncs(&self.primary), (1, 1));
        assert_same_data(&self.primary, &self.replica);
        assert_eq!(self.replica.fact("master_port").unwrap(), self.primary.port().to_string());
        assert_eq!(self.login(), PASSWORD);
    }
}

/// Where the agent listens for its server.
pub(crate) fn link_of(agent: &mut Agent) -> SocketAddr {
    let line = agent.wait_for_event("link_listening", LONG).unwrap();
    line.split("link=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap()
}

/// How long an unauthenticated client waits for more after the last answer.
const A_WHILE: Duration = Duration::from_millis(500);

/// Everything that the link answers to a client that sends `words` and then waits.
fn answers_to_a_stranger(link: SocketAddr, words: &str) -> String {
    let mut stream = TcpStream::connect(link).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let _ = stream.write_all(words.as_bytes());
    let (mut answers, mut buffer, mut until) = (Vec::new(), [0; 4096], Instant::now() + LONG);
    while Instant::now() < until {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                answers.extend_from_slice(&buffer[..n]);
                until = Instant::now() + A_WHILE;
            }
            Err(_) => {}
        }
    }
    String::from_utf8_lossy(&answers).into_owned()
}

/// Asks for the data set in every way that an unauthenticated client can.
#[track_caller]
fn assert_closed_to_strangers(link: SocketAddr) {
    for login in ["", "AUTH wrong\r\n", "AUTH default \r\n", "AUTH s3cret-primary\r\n", "AUTH repl s3cret-primary\r\n"]
    {
        let answers =
            answers_to_a_stranger(link, &format!("{login}PING\r\nREPLCONF capa eof capa psync2\r\nPSYNC ? -1\r\n"));
        assert!(answers.contains("-NOAUTH"), "{login:?}: {answers:?}");
        for part in ["FULLRESYNC", "CONTINUE", "$EOF", "REDIS0", "VALKEY", "confidential"] {
            assert!(!answers.contains(part), "{login:?}: {answers:?}");
        }
    }
}

/// Whether `text` is a sync's secret, as `masterauth` shows it.
fn is_a_secret(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[test]
#[ignore = "long: make test-all"]
fn strangers_at_the_link_get_nothing_of_a_load_and_do_not_break_it() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 4000);
        load_slowly(&guarded.replica, 2000);
        let mut agent = guarded.agent(&[]);
        let link = link_of(&mut agent);
        wait_until_loading(&guarded.replica);
        let mut held = Vec::new();
        for _ in 0..10 {
            held.push(TcpStream::connect(link).unwrap());
            std::thread::sleep(Duration::from_millis(100));
        }
        drop(held);
        assert_closed_to_strangers(link);
        assert!(agent.ended().unwrap().is_none(), "the load ended before all unauthenticated requests were sent");
        succeeds(&mut agent, &guarded.replica);
        assert!(!agent.output().contains("while it was loading"), "{}", agent.output());
        guarded.assert_handed_over();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn strangers_at_the_link_of_a_server_that_is_fed_change_nothing() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 500);
        let mut agent = guarded.agent(&["--stay"]);
        let link = link_of(&mut agent);
        agent.wait_for_event("in_step", LONG).unwrap();
        let synchronisations = || {
            let log = guarded.replica.log();
            log.matches("sync started").count() + log.matches("Full resync").count()
        };
        let before = synchronisations();
        assert_closed_to_strangers(link);
        guarded.primary.client().unwrap().ok(&["SET", "meanwhile", "1"]).unwrap();
        wait_until("a write to arrive", LONG, || {
            let value = guarded.replica.client()?.text(&["GET", "meanwhile"]);
            Ok(value.map(drop).map_err(|error| error.to_string()))
        })
        .unwrap();
        assert_eq!(synchronisations(), before, "{}", guarded.replica.log());
        assert_eq!(guarded.replica.fact("master_port").unwrap(), link.port().to_string());
        assert_eq!(guarded.replica.fact("master_link_status").unwrap(), "up");
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        guarded.assert_handed_over();
    }
}

#[test]
fn strangers_at_the_link_are_named_in_the_log_and_counted_in_the_summary() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 100);
        let summary = guarded.stage.path("summary.json");
        let mut agent = guarded.agent(&["--stay", "--json", &summary]);
        let link = link_of(&mut agent);
        agent.wait_for_event("in_step", LONG).unwrap();
        let is_first = !agent.output().contains("before it had logged in");
        let stranger = TcpStream::connect(link).unwrap();
        let name = stranger.local_addr().unwrap();
        drop(stranger);
        if is_first {
            let line = agent.wait_for_line("before it had logged in", LONG).unwrap();
            says(&line, &["INFO", &format!("peer={name}")]);
        }
        for _ in 0..2 {
            drop(TcpStream::connect(link).unwrap());
        }
        // The server's next connection comes behind theirs.
        guarded.replica.client().unwrap().call(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
        guarded.primary.client().unwrap().ok(&["SET", "meanwhile", "1"]).unwrap();
        wait_until("a write to arrive", LONG, || {
            let value = guarded.replica.client()?.text(&["GET", "meanwhile"]);
            Ok(value.map(drop).map_err(|error| error.to_string()))
        })
        .unwrap();
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        says(&agent.output(), &["connections to the link's port were closed before they had logged in"]);
        let summary: serde_json::Value = serde_json::from_slice(&std::fs::read(&summary).unwrap()).unwrap();
        assert!(summary["strangers"].as_u64().is_some_and(|count| count >= 3), "{summary}");
        guarded.assert_handed_over();
    }
}

/// How many of a process's sockets listen for TCP connections.
fn listening_sockets(pid: u32) -> usize {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.ok()?.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let of_host = ["tcp", "tcp6"].map(|name| std::fs::read_to_string(format!("/proc/net/{name}")).unwrap_or_default());
    let listening = of_host.iter().flat_map(|table| table.lines()).filter(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let inode = fields.get(9).map(|inode| format!("socket:[{inode}]"));
        fields.get(3) == Some(&"0A") && inode.is_some_and(|inode| sockets.contains(&inode))
    });
    listening.count()
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_waits_for_a_snapshot_does_not_listen_for_its_server_yet() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let guarded = Guarded::with(
            100,
            quick(kind).require_pass(PASSWORD).config("repl-diskless-sync-delay", 2),
            Server::builder(kind).master_auth(None, PASSWORD),
        );
        let mut agent = guarded.agent(&["--no-serve-peers"]);
        guarded.source.wait_for_status("the replica to wait", |status| {
            status["replicas"].as_array().is_some_and(|replicas| replicas.len() == 1)
        });
        assert_eq!(listening_sockets(agent.pid()), 0, "{}", agent.output());
        let link = link_of(&mut agent);
        assert!(TcpStream::connect(link).is_ok());
        assert_eq!(listening_sockets(agent.pid()), 1, "{}", agent.output());
        succeeds(&mut agent, &guarded.replica);
        guarded.assert_handed_over();
    }
}

/// A user other than the one that runs the tests' servers and agents.
const ANOTHER_USER: u32 = 65534;

#[test]
fn a_process_of_another_user_is_disconnected_before_it_sends_anything() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 100);
        let mut agent = guarded.agent(&["--stay"]);
        let link = link_of(&mut agent);
        agent.wait_for_event("in_step", LONG).unwrap();
        let script = format!("exec 3<>/dev/tcp/{}/{} && cat <&3", link.ip(), link.port());
        let mut stranger = Command::new("bash");
        stranger.args(["-c", &script]).uid(ANOTHER_USER).gid(ANOTHER_USER);
        let answers = stranger.output().unwrap();
        assert!(answers.stdout.is_empty());
        let line = agent.wait_for_line("another user's than the server's", LONG).unwrap();
        says(&line, &["peer=127.0.0.1:", &format!("uid {ANOTHER_USER}")]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_servers_login_is_a_secret_during_the_sync_and_its_own_at_the_primary() {
    for kind in require::kinds() {
        for user in [None, Some("repl")] {
            let primary = quick(kind).require_pass(PASSWORD).user("repl", PASSWORD, "-@all +psync +replconf +ping");
            let guarded = Guarded::with(1000, primary, Server::builder(kind).master_auth(user, PASSWORD));
            load_slowly(&guarded.replica, 500);
            let mut agent = guarded.agent(&[]);
            wait_until_loading(&guarded.replica);
            assert!(is_a_secret(&guarded.login()), "{}", guarded.login());
            succeeds(&mut agent, &guarded.replica);
            guarded.assert_handed_over();
            assert!(!agent.output().contains(PASSWORD), "{}", agent.output());
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_without_a_login_still_has_no_login_afterwards() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 1000, "x");
        load_slowly(&replica, 500);
        let source = stage.source(&primary.url(), &[]);
        let login = || replica.configured("masterauth").unwrap();
        let mut stopped = stage.replica(&replica.url(), source.address, &[]);
        wait_until_loading(&replica);
        assert!(is_a_secret(&login()));
        stopped.signal(Signal::INT).unwrap();
        says(&ends(&mut stopped, 7), &["detached and emptied"]);
        assert_eq!(login(), "");
        succeeds(&mut stage.replica(&replica.url(), source.address, &[]), &replica);
        assert_eq!(login(), "");
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_process_on_the_port_of_a_killed_agent_reads_only_an_expired_secret() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 500);
        let mut agent = guarded.agent(&["--stay"]);
        let link = link_of(&mut agent);
        agent.wait_for_event("in_step", LONG).unwrap();
        // A connection that was closed in the usual way would keep the port for another minute. One with unread bytes,
        // the server's next ACK, is reset.
        agent.signal(Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(2500));
        agent.kill().unwrap();
        let secret = guarded.login();
        assert!(is_a_secret(&secret), "{secret}");

        let thief = TcpListener::bind(link).unwrap();
        let (mut stream, _) = thief.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let (mut received, mut buffer) = (String::new(), [0; 4096]);
        while !received.contains(&secret) {
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0, "the server left after {received:?}");
            received += &String::from_utf8_lossy(&buffer[..n]);
            stream.write_all(b"+PONG\r\n").unwrap();
        }
        assert!(!received.contains(PASSWORD), "{received}");
        drop((stream, thief));

        // A server that follows a closed link is used again as it is.
        succeeds(&mut guarded.agent(&[]), &guarded.replica);
        assert_eq!(guarded.login(), PASSWORD);
        assert_same_data(&guarded.primary, &guarded.replica);
        assert_eq!(number(&guarded.primary, "sync_full"), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_login_that_an_operator_sets_meanwhile_is_restored() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 500);
        let mut agent = guarded.agent(&["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        guarded.primary.configure("requirepass", "rotated").unwrap();
        guarded.replica.configure("masterauth", "rotated").unwrap();
        // The server logs in again with it, and gets the secret once more.
        guarded.replica.client().unwrap().call(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
        wait_until("the server to be back at the link", LONG, || {
            let status = guarded.replica.fact("master_link_status")?;
            Ok(if status == "up" { Ok(()) } else { Err(status) })
        })
        .unwrap();
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_eq!(guarded.login(), "rotated");
        assert_same_data(&guarded.primary, &guarded.replica);
        assert_eq!(number(&guarded.primary, "sync_full"), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_without_permission_for_config_set_needs_a_login_of_its_own() {
    for kind in require::kinds() {
        let rules = "-@all +ping +info +replicaof +config|get +flushall";
        let replica = || Server::builder(kind).user("tied", "pw", rules);
        let primary = || quick(kind).require_pass(PASSWORD);
        let guarded = Guarded::with(500, primary(), replica().master_auth(None, PASSWORD));
        let file = guarded.stage.secret("tied", "pw");
        let tied = ["--user", "tied", "--password-file", &file];
        load_slowly(&guarded.replica, 1000);
        let mut agent = guarded.agent(&tied);
        let link = link_of(&mut agent);
        wait_until_loading(&guarded.replica);
        assert_eq!(guarded.login(), PASSWORD);
        let answers = answers_to_a_stranger(link, "AUTH wrong\r\nPSYNC ? -1\r\n");
        assert!(answers.contains("-WRONGPASS") && answers.contains("-NOAUTH"), "{answers}");
        succeeds(&mut agent, &guarded.replica);
        guarded.assert_handed_over();

        let (open, bare) = (quick(kind).start().unwrap(), replica().start().unwrap());
        let source = guarded.stage.source(&open.url(), &[]);
        let said = ends(&mut guarded.stage.replica(&bare.url(), source.address, &tied), 3);
        says(&said, &[&bare.url(), "no masterauth", "+config|set"]);
        assert_eq!(bare.fact("role").unwrap(), "master");
        assert!(!bare.log().contains("REPLICAOF"), "{}", bare.log());
    }
}

#[test]
fn a_server_on_this_host_is_served_on_loopback_whatever_its_address() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::redis() else { return };
    let (stage, net) = (Stage::new(), Net::new().unwrap());
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let primary = quick(kind).on(&here).start().unwrap();
    let replica = Server::builder(kind).on(&there).start().unwrap();
    fill_keys(&primary, 100, "x");
    let source = stage.source_on(&here, &primary.url(), &[]);
    assert!(!replica.address().ip().is_loopback());
    let mut beside = stage.replica_on(&there, &replica.url(), source.address, &["--stay"]);
    assert!(link_of(&mut beside).ip().is_loopback());
    beside.wait_for_event("in_step", LONG).unwrap();
    assert_eq!(replica.fact("master_host").unwrap(), "127.0.0.1");
    beside.signal(Signal::TERM).unwrap();
    beside.wait_for_success(LONG).unwrap();

    // From another host it is reached by its address.
    let mut afar = stage.replica_on(&here, &replica.url(), source.address, &["--replace"]);
    assert_eq!(link_of(&mut afar).ip(), primary.address().ip());
    succeeds(&mut afar, &replica);
    assert_same_data(&primary, &replica);
}

/// Writes a record for that server in the format of older agents.
fn old_record(folder: &Path, server: &Server, settings: &str) {
    let name: String = server.url().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    std::fs::write(
        folder.join(format!("server-{name}.json")),
        format!(r#"{{"settings": [{settings}], "link": null}}"#),
    )
    .unwrap();
}

#[test]
fn a_record_restores_only_settings_that_agents_change_and_that_are_unchanged_since() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 100, "x");
        replica.configure("repl-diskless-load", "swapdb").unwrap();
        let before = replica.configured("maxmemory-policy").unwrap();
        let folder = stage.path("state");
        std::fs::create_dir(&folder).unwrap();
        let settings = r#"["maxmemory-policy", "allkeys-random"], ["repl-diskless-load", "disabled"],
            {"name": "masterauth", "before": "other", "set": ["not what it is"]}"#;
        old_record(Path::new(&folder), &replica, settings);
        let source = stage.source(&primary.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &["--state-dir", &folder]);
        succeeds(&mut agent, &replica);
        says(&agent.output(), &["maxmemory-policy", "not put back"]);
        assert_eq!(replica.configured("maxmemory-policy").unwrap(), before);
        assert_eq!(replica.configured("repl-diskless-load").unwrap(), "swapdb");
        assert_eq!(replica.configured("masterauth").unwrap(), "");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a finished sync leaves no file");
    }
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn files_of_a_killed_agent_are_readable_by_their_owner_only() {
    for kind in require::kinds() {
        let guarded = Guarded::new(kind, 3000);
        load_slowly(&guarded.replica, 1000);
        let folder = guarded.stage.path("new/state");
        let mut agent = guarded.agent(&["--state-dir", &folder, "--transport", "tcp"]);
        wait_until_loading(&guarded.replica);
        agent.kill().unwrap();
        assert_eq!(mode(Path::new(&folder)), 0o700);
        let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(files.len() >= 4, "slots, index, origin and record: {files:?}");
        for file in files {
            assert_eq!(mode(&file), 0o600, "{}", file.display());
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_symlink_in_the_place_of_a_file_is_not_followed_and_a_shared_folder_is_refused() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 100, "x");
        let source = stage.source(&primary.url(), &[]);
        let (folder, target) = (stage.path("state"), stage.path("precious"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&target, "precious").unwrap();
        for name in ["slots", "held", "origin.json"] {
            symlink(&target, Path::new(&folder).join(name)).unwrap();
        }
        let run = |folder: &str| {
            stage.replica(&replica.url(), source.address, &["--state-dir", folder, "--transport", "tcp"])
        };
        for wide in [0o775, 0o777] {
            std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(wide)).unwrap();
            says(&ends(&mut run(&folder), 3), &[&folder, &format!("{wide:04o}"), "chmod go-w"]);
        }
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let link = stage.path("link");
        symlink(&folder, &link).unwrap();
        says(&ends(&mut run(&link), 3), &[&link, "symbolic link"]);
        assert_eq!(replica.fact("role").unwrap(), "master");

        succeeds(&mut run(&folder), &replica);
        assert_same_data(&primary, &replica);
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
    }
}
