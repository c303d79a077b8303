//! Bad input: each error message names the thing, the exit code is right, and no data is lost.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use remora_lab::{Agent, Kind, Random, Server, assert_same_data, require, scratch};
use rustix::process::Signal;

use crate::kit::{
    LONG, Stage, assert_untouched, at_once, ends, fill, fill_keys, kinds_and_module, load_slowly, load_small, number,
    quick, says, succeeds, syncs, wait_until_loading, with_checksum, with_or_without,
};

/// A primary that takes a snapshot at once, and an empty server. Both have the module, or neither has.
fn primary_and_server(kind: Kind, module: bool) -> (Server, Server) {
    (with_or_without(quick(kind), module), with_or_without(Server::builder(kind), module))
}

/// A server that becomes a replica of `primary` by the servers' own replication, and loads for about three seconds.
fn busy_loading(kind: Kind, primary: &Server) -> Server {
    let server = quick(kind).start().unwrap();
    load_slowly(&server, 2000);
    server.replicate(primary).unwrap();
    wait_until_loading(&server);
    server
}

#[test]
fn a_wrong_token_is_reported_at_both_ends() {
    let Some(kind) = require::redis() else { return };
    let (stage, other) = (Stage::new(), Stage::new());
    let (primary, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
    let mut source = stage.source(&primary.url(), &[]);
    let said = ends(&mut other.replica(&replica.url(), source.address, &[]), 5);
    says(&said, &["does not hold the same token", "give both ends the same token file", &source.address.to_string()]);
    source.agent.wait_for_line("does not hold the same token", LONG).unwrap();
    assert_untouched(&replica);
    assert_eq!(number(&primary, "sync_full"), 0);
}

#[test]
fn a_token_file_that_others_may_read_is_refused_by_both_ends() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let server = Server::start(kind).unwrap();
    std::fs::set_permissions(&stage.token, std::fs::Permissions::from_mode(0o644)).unwrap();
    let token = stage.token.display().to_string();
    let common = ["--server", &server.url(), "--token-file", &token];
    for command in [&["source", "--listen", "127.0.0.1:0"][..], &["replica", "--source", "127.0.0.1:1"]] {
        says(&stage.end(&[command, &common].concat(), 3), &[&token, "chmod"]);
    }
}

/// A listener that answers each connection with these bytes.
fn something_that_says(words: &'static str) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut received = [0; 16];
            let _ = stream.read(&mut received);
            let _ = stream.write_all(words.as_bytes());
        }
    });
    address
}

const A_WEB_SERVER: &str = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";

fn closed_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, scratch::free_port().unwrap()).into()
}

#[test]
fn a_peer_that_is_not_a_source_is_recognised() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let (replica, other) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    let wrong: [(SocketAddr, &[&str]); 3] = [
        (something_that_says(A_WEB_SERVER), &["not a Remora agent", "an HTTP server"]),
        (other.address(), &["not a Remora agent", "Redis"]),
        (closed_port(), &["cannot be reached", "is the source running"]),
    ];
    for (address, words) in wrong {
        let said = ends(&mut stage.replica(&replica.url(), address, &["--retry-for", "0"]), 5);
        says(&said, words);
        says(&said, &[&address.to_string()]);
    }
    assert_untouched(&replica);
}

#[test]
fn a_peer_that_is_not_a_server_is_recognised_by_both_ends() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let primary = quick(kind).start().unwrap();
    let source = stage.source(&primary.url(), &[]);
    let wrong: [(SocketAddr, &str); 3] = [
        (something_that_says(A_WEB_SERVER), "is not a Redis or Valkey server"),
        (source.address, "redis://"),
        (closed_port(), "check that it is running, and on this port"),
    ];
    let token = stage.token.display().to_string();
    for (address, words) in wrong {
        let url = format!("redis://{address}");
        says(&ends(&mut stage.replica(&url, source.address, &["--retry-for", "0"]), 4), &[words, &url]);
        let args = ["source", "--server", &url, "--token-file", &token, "--listen", "127.0.0.1:0"];
        let args = [&args[..], &["--wait-for-server", "0"]].concat();
        says(&stage.end(&args, 4), &[words, &url]);
    }
}

#[test]
fn a_password_that_is_missing_or_wrong_is_asked_for_by_both_ends() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (guarded, open) = (quick(kind).require_pass("pw").start().unwrap(), quick(kind).start().unwrap());
        let source = stage.source(&open.url(), &[]);
        let wrong = stage.secret("wrong", "wrong");
        let token = stage.token.display().to_string();
        let cases: [(&[&str], &str); 2] =
            [(&[], "--password-file"), (&["--password-file", &wrong], "check --user and the password file")];
        for (way_in, words) in cases {
            let said = ends(&mut stage.replica(&guarded.url(), source.address, way_in), 4);
            says(&said, &[words, &guarded.url()]);
            let args = ["source", "--server", &guarded.url(), "--token-file", &token, "--listen", "127.0.0.1:0"];
            let said = stage.end(&[&args[..], way_in].concat(), 4);
            says(&said, &[words, &guarded.url()]);
        }
        assert_untouched(&guarded);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn permissions_that_are_missing_are_named_as_rules() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let primary = quick(kind)
            .user("blind", "pw", "-@all +ping")
            .user("mute", "pw", "-@all +ping +info +replconf +config|get")
            .start()
            .unwrap();
        let replica = Server::builder(kind)
            .user("tied", "pw", "-@all +ping +info +config|get +config|set +flushall")
            .start()
            .unwrap();
        let (file, token) = (stage.secret("password", "pw"), stage.token.display().to_string());
        let as_user = |user| ["--user", user, "--password-file", &file];
        let source_rules = "+ping +info +replconf +psync";

        let args = ["source", "--server", &primary.url(), "--token-file", &token, "--listen", "127.0.0.1:0"];
        says(&stage.end(&[&args[..], &as_user("blind")].concat(), 4), &["NOPERM", source_rules]);

        // This agent finds out when the first replica joins, and continues to run for the next.
        let source = stage.source(&primary.url(), &as_user("mute"));
        for _ in 0..2 {
            let said = ends(&mut stage.replica(&replica.url(), source.address, &[]), 5);
            says(&said, &["psync", source_rules]);
        }
        assert_untouched(&replica);

        let source = stage.source(&primary.url(), &[]);
        let said = ends(&mut stage.replica(&replica.url(), source.address, &as_user("tied")), 4);
        says(&said, &["NOPERM", "+replicaof", "not touched"]);
        assert_untouched(&replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_loading_is_waited_for_as_a_replica_and_as_a_primary() {
    at_once(require::kinds(), |kind| {
        let stage = Stage::new();
        let (first, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&first, 1500, "x");
        let busy = busy_loading(kind, &first);
        let mut source = stage.source(&busy.url(), &[]);
        let said = ends(&mut stage.replica(&busy.url(), source.address, &["--retry-for", "1s"]), 4);
        says(&said, &["-LOADING", "--retry-for", &busy.url()]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        for end in [&mut source.agent, &mut agent] {
            end.wait_for_line("loading its data set", LONG).unwrap();
        }
        succeeds(&mut agent, &replica);
        assert_same_data(&first, &replica);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_whose_own_link_is_down_is_waited_for_as_a_primary() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (first, middle) = (quick(kind).start().unwrap(), quick(kind).start().unwrap());
        let (replica, other) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
        fill_keys(&first, 100, "x");
        let absent = closed_port();
        middle.client().unwrap().ok(&["REPLICAOF", &absent.ip().to_string(), &absent.port().to_string()]).unwrap();
        let mut source = stage.source(&middle.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        source.agent.wait_for_line("is a replica whose link to its own primary is down", LONG).unwrap();
        agent.wait_for_line("has no link to its primary", LONG).unwrap();
        // An agent with a shorter limit reports what it waited for, and has changed nothing.
        let said = ends(&mut stage.replica(&other.url(), source.address, &["--retry-for", "1s"]), 5);
        says(said.lines().last().unwrap(), &["no link to its primary", "not touched"]);
        assert_untouched(&other);
        assert_untouched(&replica);
        middle.replicate(&first).unwrap();
        succeeds(&mut agent, &replica);
        assert_same_data(&first, &replica);
    }
}

#[test]
fn the_primary_itself_is_refused_as_a_replica_with_or_without_data() {
    let Some(kind) = require::valkey() else { return };
    let stage = Stage::new();
    let primary = quick(kind).unix_socket().start().unwrap();
    fill_keys(&primary, 10, "x");
    let source = stage.source(&primary.url(), &[]);
    for (url, more) in [(primary.url(), &[][..]), (primary.unix_url().unwrap(), &["--replace"])] {
        let said = ends(&mut stage.replica(&url, source.address, more), 3);
        says(&said, &["is the very server that the source takes its snapshot of", "--server"]);
    }
    assert_untouched(&primary);
    assert_eq!(primary.client().unwrap().int(&["DBSIZE"]).unwrap(), 10);
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_with_data_is_replaced_only_with_the_option_for_it() {
    for (kind, module) in kinds_and_module() {
        let stage = Stage::new();
        let (primary, replica) = primary_and_server(kind, module);
        fill_keys(&primary, 100, "x");
        replica.client().unwrap().ok(&["SET", "old", "1"]).unwrap();
        let source = stage.source(&primary.url(), &[]);
        let said = ends(&mut stage.replica(&replica.url(), source.address, &[]), 3);
        says(&said, &["holds 1 key,", "--replace", &replica.url()]);
        assert_untouched(&replica);
        assert_eq!(replica.client().unwrap().text(&["GET", "old"]).unwrap(), "1");

        succeeds(&mut stage.replica(&replica.url(), source.address, &["--replace"]), &replica);
        assert_same_data(&primary, &replica);
        let said = ends(&mut stage.replica(&replica.url(), source.address, &[]), 3);
        says(&said, &["--replace"]);
        assert_same_data(&primary, &replica);
    }
}

#[test]
fn a_server_that_cannot_read_the_primarys_snapshots_keeps_what_it_has() {
    let (Some(older), Some(newer)) = (require::redis(), require::valkey()) else { return };
    let stage = Stage::new();
    let (primary, replica) = (quick(newer).start().unwrap(), Server::start(older).unwrap());
    fill_keys(&primary, 10, "x");
    replica.client().unwrap().ok(&["SET", "old", "1"]).unwrap();
    let source = stage.source(&primary.url(), &[]);
    let said = ends(&mut stage.replica(&replica.url(), source.address, &["--replace"]), 3);
    says(&said, &[&replica.url(), "RDB version 11", "up to version 10"]);
    assert_untouched(&replica);
    assert_eq!(replica.client().unwrap().text(&["GET", "old"]).unwrap(), "1");
}

#[test]
fn a_server_in_cluster_mode_is_not_made_a_replica_and_the_reason_is_said() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (cluster, primary) = (quick(kind).cluster().start().unwrap(), quick(kind).start().unwrap());
        let source = stage.source(&primary.url(), &[]);
        let words = ["cluster mode", "refuse REPLICAOF", &cluster.url()];
        says(&ends(&mut stage.replica(&cluster.url(), source.address, &[]), 3), &words);
    }
}

/// Open connections that have sent nothing, or an incomplete message.
fn strangers(at: SocketAddr) -> Vec<TcpStream> {
    let connect = || TcpStream::connect(at).unwrap();
    let mut held: Vec<TcpStream> = (0..100).map(|_| connect()).collect();
    let half_words = [&remora_messenger::handshake::MAGIC[..3], &remora_fabric::tcp::LANE_MAGIC[..7], b"\0", b"*1"];
    for word in half_words {
        let mut stream = connect();
        let _ = stream.write_all(word);
        held.push(stream);
    }
    held
}

/// Unauthenticated clients that reconnect as soon as they are disconnected, so that the listener stays full on a slow
/// machine too.
struct Crowd {
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Crowd {
    fn gather(at: SocketAddr) -> Crowd {
        let over = Arc::new(AtomicBool::new(false));
        let first = strangers(at);
        let ended = over.clone();
        let thread = thread::spawn(move || {
            let mut held = VecDeque::from([first]);
            while !ended.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(250));
                held.push_back(strangers(at));
                // Connections that are a second old have been closed by now, or soon will be.
                if held.len() == 5 {
                    held.pop_front();
                }
            }
        });
        Crowd { over, thread }
    }

    fn disperse(self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

/// Sends garbage of every kind, each on a separate connection.
fn garbage(at: SocketAddr, random: &mut Random) {
    let noise = random.bytes(1 << 16);
    let huge = [0xff; 64];
    let begun = |magic: &[u8], rest: &[u8]| [magic, rest].concat();
    let words = [
        noise.clone(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"*1\r\n$4\r\nPING\r\n".to_vec(),
        begun(&remora_messenger::handshake::MAGIC, &noise),
        begun(&remora_messenger::handshake::MAGIC, &huge),
        begun(&remora_fabric::tcp::LANE_MAGIC, &noise),
        begun(&remora_fabric::tcp::LANE_MAGIC, &huge),
    ];
    for word in words {
        // The listener refuses a connection when it is full, or closes it early: both are right.
        if let Ok(mut stream) = TcpStream::connect(at) {
            let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
            let _ = stream.write_all(&word);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn unauthenticated_connections_do_not_harm_a_sync() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let (primary, replica, next) =
        (quick(kind).start().unwrap(), Server::start(kind).unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 3000, "x");
    load_slowly(&replica, 1000);
    let mut source = stage.source(&primary.url(), &[]);
    let mut agent = stage.replica(&replica.url(), source.address, &["--transport", "tcp"]);
    wait_until_loading(&replica);
    let mut random = Random::new(7);
    garbage(source.address, &mut random);
    let crowd = Crowd::gather(source.address);
    let mut late = stage.replica(&next.url(), source.address, &["--transport", "tcp"]);
    garbage(source.address, &mut random);
    assert!(agent.ended().unwrap().is_none(), "the sync ended before all garbage was sent");
    succeeds(&mut agent, &replica);
    assert!(!agent.output().contains("trying again"), "{}", agent.output());
    assert_same_data(&primary, &replica);
    source.agent.wait_for_event("connection_rejected", LONG).unwrap();
    assert!(source.agent.peak_memory() < 400 << 20, "{}", source.agent.peak_memory());

    // A replica that joins while the listener is crowded is accepted between the others, or retries until it is.
    crowd.disperse();
    succeeds(&mut late, &next);
    assert_same_data(&primary, &next);
    assert_eq!(number(&primary, "sync_full"), 1);
}

/// Runs `remora` with a state directory on a file system of `bytes` bytes, which disappears with the process.
fn on_a_small_disk(stage: &Stage, folder: &str, bytes: u32, args: &[String]) -> Agent {
    let script = format!("mount -t tmpfs -o size={bytes},mode=0700 none {folder:?} && exec \"$0\" \"$@\"");
    let mut command = std::process::Command::new("unshare");
    let remora = stage.remora(&[]);
    command.args(["--mount", "sh", "-c", &script]).arg(remora.get_program()).args(args);
    command.env("XDG_STATE_HOME", stage.folder());
    Agent::run(command).unwrap()
}

#[test]
fn a_full_state_directory_ends_the_sync_and_nothing_else() {
    let Some(()) = require::root() else { return };
    let Some(kind) = require::valkey() else { return };
    let stage = Stage::new();
    let (primary, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
    fill(&primary, 16, 1);
    let source = stage.source(&primary.url(), &[]);
    let folder = stage.path("state");
    std::fs::create_dir(&folder).unwrap();
    let args = stage.replica_args(&replica.url(), source.address, &["--state-dir", &folder]);
    let said = ends(&mut on_a_small_disk(&stage, &folder, 3 << 20, &args), 8);
    says(&said, &["the state directory", &folder, "No space left", "--state-dir", "the server was"]);
    assert_eq!(replica.fact("role").unwrap(), "master");
    assert_eq!(replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
    assert_eq!(replica.configured("repl-diskless-load").unwrap(), "disabled");

    succeeds(&mut stage.replica(&replica.url(), source.address, &[]), &replica);
    assert_same_data(&primary, &replica);
    assert_eq!(number(&primary, "sync_full"), 1);
}

#[test]
#[ignore = "long: make test-all"]
fn a_file_that_does_not_fit_is_refused_with_figures_and_a_full_disk_ends_it_at_once() {
    let Some(()) = require::root() else { return };
    let Some(kind) = require::valkey() else { return };
    let stage = Stage::new();
    let primary = quick(kind).start().unwrap();
    fill(&primary, 16, 1);
    let mut source = stage.source(&primary.url(), &[]);
    let (small, large) = (stage.path("small"), stage.path("large"));
    std::fs::create_dir(&small).unwrap();
    let (address, token) = (source.address.to_string(), stage.token.display().to_string());
    let from = ["--source", &address, "--token-file", &token, "--to"];
    let at =
        |command: &str, to: &str| [&[command][..], &from, &[to]].concat().iter().map(|&word| word.into()).collect();
    let file = format!("{small}/dump.rdb");
    let (fetch, backup): (Vec<String>, Vec<String>) = (at("fetch", &file), at("backup", &small));
    // How long the snapshot will be is not known before it is there.
    let full = ends(&mut on_a_small_disk(&stage, &small, 3 << 20, &fetch), 8);
    says(&full, &[&small]);
    source.wait_for_snapshot();
    for args in [&fetch, &backup] {
        let said = ends(&mut on_a_small_disk(&stage, &small, 3 << 20, args), 8);
        says(&said, &["the rest of the snapshot needs ", &small, "left: make room"]);
        assert!(![said, full.clone()].iter().any(|said| said.contains("trying again")), "{full}");
    }

    let whole: Vec<String> = at("backup", &large);
    stage.end(&whole.iter().map(String::as_str).collect::<Vec<_>>(), 0);
    let restore = ["restore", &large, "--to", &small].map(str::to_owned);
    let said = ends(&mut on_a_small_disk(&stage, &small, 3 << 20, &restore), 8);
    says(&said, &["dump.rdb needs 16", &small, "left: make room"]);
}

/// Runs `remora` within this limit of the shell's `ulimit`.
fn within(stage: &Stage, limit: &str, args: &[&str]) -> Agent {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]);
    command.arg(stage.remora(&[]).get_program()).args(args).env("XDG_STATE_HOME", stage.folder());
    Agent::run(command).unwrap()
}

#[test]
fn missing_memory_is_reported_before_anything_is_touched() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let server = Server::start(kind).unwrap();
    let token = stage.token.display().to_string();
    let url = server.url();
    let args =
        ["source", "--server", &url, "--token-file", &token, "--listen", "127.0.0.1:0", "--memory", "8GiB", "--eager"];
    let said = ends(&mut within(&stage, "-v 2097152", &args), 8);
    says(&said, &["memory", "give a smaller --memory", "may map 2 GiB in all (ulimit -v"]);
    assert_eq!(number(&server, "sync_full"), 0);
}

#[test]
fn a_limit_of_descriptors_that_is_too_low_for_the_replicas_is_named() {
    let Some(kind) = require::valkey() else { return };
    let stage = Stage::new();
    let server = Server::start(kind).unwrap();
    let (url, token) = (server.url(), stage.token.display().to_string());
    let args = ["source", "--server", &url, "--token-file", &token, "--listen", "127.0.0.1:0"];
    let many = [&args[..], &["--max-replicas", "1024"]].concat();
    let said = ends(&mut within(&stage, "-n 1024", &many), 8);
    says(&said, &["--max-replicas 1024", "4352", "1024 (RLIMIT_NOFILE)", "at most 192"]);
    assert_eq!(number(&server, "sync_full"), 0);
    // The default number fits into the usual limit.
    within(&stage, "-n 1024", &args).wait_for_event("source_ready", LONG).unwrap();
}

#[test]
fn threads_that_cannot_be_started_are_an_error_and_no_panic() {
    let Some(()) = require::root() else { return };
    for most in [1, 2, 5] {
        // Root has no such limit. No other process is of this user.
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid", "54321", "--regid", "54321", "--clear-groups", "--bounding-set", "-all"]);
        command.args(["prlimit", &format!("--nproc={most}"), env!("CARGO_BIN_EXE_remora"), "devices"]);
        let said = ends(&mut Agent::run(command).unwrap(), 8);
        says(&said, &["cannot start 8 threads", "ulimit -u", "TasksMax="]);
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_is_stopped_while_its_server_loads_leaves_it_as_was_chosen() {
    at_once(kinds_and_module(), |(kind, module)| {
        let stage = Stage::new();
        let (primary, replica) = primary_and_server(kind, module);
        fill_keys(&primary, 3000, "x");
        if module {
            // The module loads long strings without a pause; the server loads the short ones.
            load_small(&primary, 3000, 100);
        }
        load_slowly(&replica, 1000);
        let source = stage.source(&primary.url(), &[]);
        let cases: [(Signal, &str, &[&str], &str); 2] = [
            (Signal::INT, "stopped by SIGINT", &[], "detached and emptied"),
            (Signal::TERM, "stopped by SIGTERM", &["--on-failure", "detached"], "the server was detached and"),
        ];
        for (signal, why, chosen, left) in cases {
            let mut agent = stage.replica(&replica.url(), source.address, chosen);
            agent.wait_for_event("link_followed", LONG).unwrap();
            wait_until_loading(&replica);
            agent.signal(signal).unwrap();
            let said = ends(&mut agent, 7);
            says(&said, &[why, left]);
            assert_eq!(replica.fact("role").unwrap(), "master");
            let keys = replica.client().unwrap().int(&["DBSIZE"]).unwrap();
            let content = if keys == 0 { "emp".to_owned() } else { format!("holds {keys} keys") };
            says(said.lines().last().unwrap(), &[&content]);
            assert_eq!(replica.configured("repl-diskless-load").unwrap(), "disabled");
            replica.client().unwrap().ok(&["FLUSHALL"]).unwrap();
        }
        assert_eq!(number(&primary, "sync_full"), 1);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_dry_run_touches_nothing_and_finds_what_would_be_in_the_way() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, replica) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 10, "x");
        let source = stage.source(&primary.url(), &[]);
        let said = ends(&mut stage.replica(&replica.url(), source.address, &["--dry-run"]), 0);
        says(&said, &["can become a replica of", "nothing was touched", &primary.address().to_string()]);
        assert_untouched(&replica);
        assert_eq!(syncs(&primary), (0, 0));
        assert_eq!(number(&primary, "connected_slaves"), 0);
        assert!(source.status()["generation"].is_null());

        replica.client().unwrap().ok(&["SET", "a", "1"]).unwrap();
        let said = ends(&mut stage.replica(&replica.url(), source.address, &["--dry-run"]), 3);
        says(&said, &["--replace"]);
        assert_untouched(&replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn functions_of_a_server_without_keys_are_not_replaced_without_being_asked_to() {
    for (kind, module) in kinds_and_module() {
        let stage = Stage::new();
        let (primary, server) = primary_and_server(kind, module);
        fill_keys(&primary, 10, "x");
        let code = "#!lua name=mine\nredis.register_function('mine', function() return 1 end)";
        server.client().unwrap().text(&["FUNCTION", "LOAD", code]).unwrap();
        let source = stage.source(&primary.url(), &[]);
        let output = ends(&mut stage.replica(&server.url(), source.address, &[]), 3);
        says(&output, &["1 function library", "--replace"]);
        assert_eq!(server.client().unwrap().int(&["FCALL", "mine", "0"]).unwrap(), 1);
        succeeds(&mut stage.replica(&server.url(), source.address, &["--replace"]), &server);
        assert_same_data(&primary, &server);
    }
}

#[test]
fn a_server_with_fewer_databases_than_the_primary_uses_is_refused_before_anything_is_touched() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (primary, server) = (quick(kind).start().unwrap(), Server::builder(kind).databases(4).start().unwrap());
        let mut client = primary.client().unwrap();
        client.ok(&["SELECT", "4"]).unwrap();
        client.ok(&["SET", "a", "1"]).unwrap();
        server.client().unwrap().ok(&["SET", "own", "1"]).unwrap();
        let source = stage.source(&primary.url(), &[]);
        let output = ends(&mut stage.replica(&server.url(), source.address, &["--replace"]), 3);
        says(&output, &["4 databases", "database 4", "databases 5 or more"]);
        // What it holds now is no measure: later writes there would be carried out in another database.
        client.ok(&["FLUSHALL"]).unwrap();
        let output = ends(&mut stage.replica(&server.url(), source.address, &["--replace"]), 3);
        says(&output, &["4 databases", "the primary has 16", "start the server with databases 16"]);
        assert_eq!(server.client().unwrap().text(&["GET", "own"]).unwrap(), "1");
        assert_eq!(server.fact("role").unwrap(), "master");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_database_that_the_primary_uses_only_while_the_agent_waits_is_found_before_anything_is_touched() {
    for kind in require::kinds() {
        let stage = Stage::new();
        // It does not tell how many databases it has.
        let primary = quick(kind).config("rdb-key-save-delay", 15_000).config("rename-command", "CONFIG \"\"");
        let primary = primary.start().unwrap();
        fill_keys(&primary, 200, "x");
        let server = Server::builder(kind).databases(4).start().unwrap();
        let source = stage.source(&primary.url(), &[]);
        // The primary runs a child for another purpose: the source has no snapshot to offer before it ends.
        let mut client = primary.client().unwrap();
        client.ok(&["BGSAVE"]).unwrap();
        let mut agent = stage.replica(&server.url(), source.address, &[]);
        agent.wait_for_event("snapshot_awaited", LONG).unwrap();
        client.ok(&["SELECT", "4"]).unwrap();
        client.ok(&["SET", "a", "1"]).unwrap();
        says(&ends(&mut agent, 3), &["databases 5 or more", "not touched"]);
        assert_untouched(&server);
    }
}

/// The names are mixed up: the source's server is a replica of the server that is to become one.
#[test]
fn a_server_that_the_primary_itself_follows_is_refused_before_anything_is_touched() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let (top, middle, last) =
            (quick(kind).start().unwrap(), quick(kind).start().unwrap(), quick(kind).start().unwrap());
        fill_keys(&top, 10, "x");
        middle.replicate(&top).unwrap();
        middle.wait_for_link(LONG).unwrap();
        last.replicate(&middle).unwrap();
        last.wait_for_link(LONG).unwrap();
        for from in [&middle, &last] {
            let more = ["migrate", "--from", &from.url(), "--to", &top.url(), "--replace"];
            says(&stage.end(&more, 3), &["follows the replica's own server", "no server of theirs would take writes"]);
            assert_eq!(top.fact("role").unwrap(), "master");
        }
    }
}

/// Slots of 8 GiB of zeros, which take no room on the disk and seconds to verify.
fn large_spool(folder: &std::path::Path) {
    const SLOT: u32 = 4 << 20;
    const SLOTS: u64 = 2048;
    std::fs::create_dir_all(folder).unwrap();
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o700)).unwrap();
    let origin = format!(r#"{{"generation":1,"replid":"{}","offset":0,"slot_size":{SLOT}}}"#, "a".repeat(40));
    std::fs::write(folder.join("origin.json"), with_checksum(&origin)).unwrap();
    std::fs::File::create(folder.join("slots")).unwrap().set_len(SLOTS * u64::from(SLOT)).unwrap();
    let crc = |bytes: &[u8]| remora_fabric::memory::crc::crc32c_append(0, bytes);
    let of_a_slot = crc(&vec![0; SLOT as usize]);
    let mut records = Vec::new();
    for number in 0..SLOTS {
        let mut record =
            [number.to_le_bytes().as_slice(), &SLOT.to_le_bytes(), &of_a_slot.to_le_bytes(), &[0; 12]].concat();
        let sum = crc(&record);
        record.extend(sum.to_le_bytes());
        records.extend(record);
    }
    std::fs::write(folder.join("held"), records).unwrap();
}

#[test]
fn an_agent_that_verifies_a_large_state_folder_can_be_stopped_meanwhile() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let (primary, server) = (quick(kind).start().unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 10, "x");
    let source = stage.source(&primary.url(), &[]);
    let state = stage.path("state");
    large_spool(std::path::Path::new(&state));
    let mut agent = stage.replica(&server.url(), source.address, &["--state-dir", &state]);
    agent.wait_for_line("verifying the slots", LONG).unwrap();
    agent.signal(Signal::TERM).unwrap();
    let output = ends(&mut agent, 7);
    says(&output, &["stopped by SIGTERM", "nothing was touched"]);
    assert!(!output.contains("listening for the link of"), "it was not stopped before it had verified all:\n{output}");
    assert_untouched(&server);
}

#[test]
#[ignore = "long: make test-all"]
fn two_agents_never_work_on_one_server_or_with_one_state_folder() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let (primary, one, other) =
        (quick(kind).start().unwrap(), Server::start(kind).unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 10, "x");
    let source = stage.source(&primary.url(), &[]);
    let state = stage.path("state");
    let mut first = stage.replica(&one.url(), source.address, &["--stay"]);
    let mut second = stage.replica(&other.url(), source.address, &["--stay", "--state-dir", &state]);
    for agent in [&mut first, &mut second] {
        agent.wait_for_event("in_step", LONG).unwrap();
    }
    let output = ends(&mut stage.replica(&one.url(), source.address, &["--replace"]), 3);
    says(&output, &["another remora replica works on the server", &one.address().to_string()]);
    let third = Server::start(kind).unwrap();
    let output = ends(&mut stage.replica(&third.url(), source.address, &["--state-dir", &state]), 3);
    says(&output, &["another remora replica works with the state folder", &state, "--state-dir"]);
    // A dry run changes nothing.
    stage.replica(&one.url(), source.address, &["--dry-run", "--replace"]).wait_for_success(LONG).unwrap();
    for mut agent in [first, second] {
        agent.signal(rustix::process::Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
    }
    succeeds(&mut stage.replica(&third.url(), source.address, &["--state-dir", &state]), &third);
}
