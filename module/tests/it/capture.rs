//! Arming by hand: the replies of the commands, what the server keeps and for how long, and that no input harms the
//! server.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use remora_fabric::{Handover, Memory, Pages, shm::Place};
use remora_lab::server::wait_until;
use remora_lab::{Kind, Server, require};
use remora_table::server_pages::{Order, Stage, Work};
use remora_table::{CapturePage, Geometry};

const LONG: Duration = Duration::from_secs(30);

const GEOMETRY: Geometry = Geometry { slot_size: 64 << 10, slots: 32 };

fn with_module(kind: Kind, words: &str) -> Server {
    Server::builder(kind).module(words).unwrap().config("enable-module-command", "local").start().unwrap()
}

/// An agent's part: a page, and the table it describes.
struct Agent {
    page: CapturePage,
    table: Arc<Memory>,
}

impl Agent {
    fn new(work: Work, generation: u64) -> Agent {
        let page = CapturePage::create(Order { work, generation, geometry: GEOMETRY, least_bytes: 0 }).unwrap();
        let table = Arc::new(Memory::create("table", GEOMETRY.memory_len(), Pages::Small).unwrap());
        Agent { page, table }
    }

    /// Arms the server with both.
    fn arm(&self, server: &Server) -> remora_lab::Result<()> {
        offer(server, &[self.page.memory().as_fd(), self.table.as_fd()])
    }
}

/// Offers these descriptors and sends the server the address.
fn offer(server: &Server, descriptors: &[BorrowedFd<'_>]) -> remora_lab::Result<()> {
    let handover = Handover::bind(&Place::Abstract).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = handover.give(descriptors, Duration::from_secs(1));
        });
        server.client()?.ok(&["REMORA.ARM", &handover.address(), &handover.secret()])
    })
}

fn state(server: &Server) -> String {
    server.fact("remora_state").unwrap()
}

#[test]
fn a_status_has_names_and_values_and_help_names_every_command() {
    for kind in require::kinds() {
        let server = with_module(kind, "");
        let mut client = server.client().unwrap();
        let status = client.list(&["REMORA.STATUS"]).unwrap();
        let pairs: Vec<(&str, &str)> =
            status.chunks(2).map(|pair| (pair[0].as_str().unwrap(), pair[1].as_str().unwrap())).collect();
        assert!(pairs.contains(&("state", "idle")) && pairs.contains(&("protocol", "6")), "{pairs:?}");
        let help = client.list(&["REMORA.HELP"]).unwrap();
        let help: Vec<&str> = help.iter().filter_map(|line| line.as_str()).collect();
        for command in ["REMORA.ARM", "REMORA.DISARM", "REMORA.STATUS", "REMORA.HELP", "remora.capture"] {
            assert!(help.iter().any(|line| line.contains(command)), "{command}");
        }
    }
}

#[test]
fn one_agent_is_armed_at_a_time_and_a_disarmed_one_is_forgotten() {
    for kind in require::kinds() {
        let server = with_module(kind, "");
        let (first, second) = (Agent::new(Work::Walk, 11), Agent::new(Work::Ease, 12));
        first.arm(&server).unwrap();
        assert_eq!((state(&server).as_str(), server.fact("remora_generation").unwrap().as_str()), ("armed", "11"));
        let busy = second.arm(&server).unwrap_err().to_string();
        assert!(busy.contains("BUSY") && busy.contains("11"), "{busy}");
        let mut client = server.client().unwrap();
        assert_eq!(client.int(&["REMORA.DISARM", "12"]).unwrap(), 0, "another generation");
        assert_eq!(client.int(&["REMORA.DISARM", "11"]).unwrap(), 1);
        assert_eq!(state(&server), "idle");
        second.arm(&server).unwrap();
        assert_eq!(client.int(&["REMORA.DISARM"]).unwrap(), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_with_a_heart_beat_stays_armed_and_a_silent_one_is_forgotten() {
    for kind in require::kinds() {
        let server = with_module(kind, "");
        server.configure("remora.agent-timeout", "1").unwrap();
        let agent = Agent::new(Work::Walk, 13);
        agent.arm(&server).unwrap();
        for _ in 0..30 {
            agent.page.beat();
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(state(&server), "armed");
        let silent = || Ok(if state(&server) == "idle" { Ok(()) } else { Err(state(&server)) });
        wait_until("the silent agent to be forgotten", LONG, silent).unwrap();
        assert!(agent.page.is_cancelled());
        assert!(server.log().contains("the agent of generation 13 is gone"));
    }
}

#[test]
fn a_save_to_disk_does_not_use_what_was_armed_for_a_sync() {
    for kind in require::kinds() {
        let server = with_module(kind, "");
        server.client().unwrap().ok(&["SET", "key", "value"]).unwrap();
        let agent = Agent::new(Work::Walk, 14);
        agent.arm(&server).unwrap();
        server.client().unwrap().text(&["BGSAVE"]).unwrap();
        wait_until("the save to be over", LONG, || {
            agent.page.beat();
            let running = server.fact("rdb_bgsave_in_progress")?;
            Ok(if running == "0" { Ok(()) } else { Err(running) })
        })
        .unwrap();
        server.client().unwrap().ok(&["SAVE"]).unwrap();
        assert_eq!((agent.page.stage(), state(&server).as_str()), (Stage::Armed, "armed"));
    }
}

#[test]
fn invalid_arguments_are_refused_with_a_reason() {
    for kind in require::kinds() {
        let server = with_module(kind, "");
        let blank = Memory::create("blank", 4096, Pages::Small).unwrap();
        let refused = |descriptors: &[BorrowedFd<'_>]| offer(&server, descriptors).unwrap_err().to_string();
        assert!(refused(&[blank.as_fd()]).contains("not a capture page"));
        let walk = Agent::new(Work::Walk, 15);
        assert!(refused(&[walk.page.memory().as_fd()]).contains("1 descriptors, this work needs 2"));
        let read_only = walk.page.memory().reopen_read_only().unwrap();
        assert!(refused(&[std::os::fd::AsFd::as_fd(&read_only)]).contains("could not be taken"));

        let mut client = server.client().unwrap();
        for wrong in [&["REMORA.ARM"][..], &["REMORA.ARM", "@absent", "00"], &["REMORA.DISARM", "x"], &["REMORA.WALK"]]
        {
            let text = client.ok(wrong).unwrap_err().to_string();
            assert!(text.contains("ERR remora:"), "{text}");
        }
        let began = std::time::Instant::now();
        client.ok(&["REMORA.ARM", "@no-listener-here", &"00".repeat(16)]).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(20), "the command does not wait long for a missing agent");
        assert_eq!(state(&server), "idle");
    }
}

#[test]
fn a_silent_giver_delays_the_server_for_at_most_a_quarter_of_a_second() {
    let Some(kind) = require::redis() else { return };
    let server = with_module(kind, "");
    let handover = Handover::bind(&Place::Abstract).unwrap();
    let began = std::time::Instant::now();
    let refused = server.client().unwrap().ok(&["REMORA.ARM", &handover.address(), &handover.secret()]);
    assert!(refused.unwrap_err().to_string().contains("could not be taken"));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn a_table_smaller_than_announced_fails_the_snapshot_and_not_the_server() {
    for kind in require::kinds() {
        let server = with_module(kind, "");
        server.configure("repl-diskless-sync-delay", "0").unwrap();
        let agent = Agent::new(Work::Walk, 16);
        let small = Memory::create("small", 4096, Pages::Small).unwrap();
        offer(&server, &[agent.page.memory().as_fd(), small.as_fd()]).unwrap();
        let replica = Server::start(kind).unwrap();
        replica.replicate(&server).unwrap();
        replica.wait_for_link(LONG).unwrap();
        assert_eq!(agent.page.stage(), Stage::Declined);
        assert!(agent.page.status_text().contains("shorter"), "{}", agent.page.status_text());
    }
}

/// A primary with some strings, armed; a replica that follows it gets a snapshot at once.
fn armed_primary(kind: Kind, agent: &Agent) -> Server {
    let server = with_module(kind, "");
    server.configure("repl-diskless-sync-delay", "0").unwrap();
    let mut client = server.client().unwrap();
    for number in 0..STRINGS {
        client.ok(&["SET", &format!("string {number}"), &"x".repeat(100)]).unwrap();
    }
    client.int(&["RPUSH", "list", "x"]).unwrap();
    agent.arm(&server).unwrap();
    server
}

const STRINGS: i64 = 200;

fn keys(server: &Server) -> i64 {
    server.client().unwrap().int(&["DBSIZE"]).unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn without_permission_a_replica_gets_everything() {
    for kind in require::kinds() {
        let agent = Agent::new(Work::Walk, 18);
        let server = armed_primary(kind, &agent);
        let replica = Server::start(kind).unwrap();
        replica.replicate(&server).unwrap();
        replica.wait_for_link(LONG).unwrap();
        assert_eq!((agent.page.stage(), keys(&replica)), (Stage::Declined, STRINGS + 1));
        assert!(agent.page.status_text().contains("did not say"), "{}", agent.page.status_text());
    }
}

#[test]
fn with_permission_strings_are_deleted_and_are_in_the_table() {
    for kind in require::kinds() {
        let agent = Agent::new(Work::Walk, 19);
        let server = armed_primary(kind, &agent);
        agent.page.permit();
        let replica = Server::start(kind).unwrap();
        replica.replicate(&server).unwrap();
        replica.wait_for_link(LONG).unwrap();
        assert_eq!((agent.page.stage(), agent.page.writer_status().keys), (Stage::Done, STRINGS as u64));
        assert_eq!(
            (keys(&replica), keys(&server)),
            (1, STRINGS + 1),
            "the replica has the list only, the primary has all keys"
        );
    }
}

#[test]
#[ignore = "long: make test-all"]
fn two_replicas_of_one_child_get_everything_even_with_permission() {
    for kind in require::kinds() {
        let agent = Agent::new(Work::Walk, 20);
        let server = armed_primary(kind, &agent);
        agent.page.permit();
        server.configure("repl-diskless-sync-delay", "2").unwrap();
        let replicas = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        for replica in &replicas {
            replica.replicate(&server).unwrap();
        }
        for replica in &replicas {
            replica.wait_for_link(LONG).unwrap();
            assert_eq!(keys(replica), STRINGS + 1);
        }
        assert_eq!(agent.page.stage(), Stage::Declined);
        assert!(agent.page.status_text().contains("2 replicas are waiting"), "{}", agent.page.status_text());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_walk_that_fails_ends_its_child_and_no_replica_gets_the_rest() {
    for kind in require::kinds() {
        let agent = Agent::new(Work::Walk, 21);
        let server = armed_primary(kind, &agent);
        // More than the table holds, and no slot is released.
        server.client().unwrap().ok(&["SET", "long", &"y".repeat(4 << 20)]).unwrap();
        agent.page.permit();
        let replica = Server::start(kind).unwrap();
        replica.replicate(&server).unwrap();
        wait_until("the child to wait for room", LONG, || {
            agent.page.beat();
            Ok(if agent.page.writer_status().waits > 0 { Ok(()) } else { Err(format!("{:?}", agent.page.stage())) })
        })
        .unwrap();
        agent.page.cancel();
        // The replica connects again, and nothing is armed any more.
        replica.wait_for_link(LONG).unwrap();
        assert_eq!((agent.page.stage(), keys(&replica)), (Stage::Failed, STRINGS + 2));
        assert!(server.log().contains("this child ends, and with it the sync"), "{}", server.log());
    }
}

#[test]
fn a_capture_only_module_can_be_unloaded_when_idle_and_not_while_armed() {
    for kind in require::kinds() {
        let server = with_module(kind, "capture-only");
        let agent = Agent::new(Work::Walk, 17);
        agent.arm(&server).unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["MODULE", "UNLOAD", "remora"]).unwrap_err();
        assert_eq!(client.int(&["REMORA.DISARM"]).unwrap(), 1);
        client.ok(&["MODULE", "UNLOAD", "remora"]).unwrap();
        client.ok(&["MODULE", "LOAD", "/nonexistent"]).unwrap_err();
        assert_eq!(client.text(&["PING"]).unwrap(), "PONG");
    }
}

#[test]
fn no_argument_of_the_commands_ends_the_server() {
    let Some(kind) = require::redis() else { return };
    let server = with_module(kind, "");
    let pid = server.pid();
    let command =
        prop::sample::select(vec!["REMORA.ARM", "REMORA.DISARM", "REMORA.STATUS", "REMORA.HELP", "REMORA.WALK"]);
    let word = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..80),
        "@[a-z]{0,120}".prop_map(String::into_bytes),
        "/[a-z/]{0,120}".prop_map(String::into_bytes),
        "[0-9a-f]{32}".prop_map(String::into_bytes),
    ];
    let said = (command, prop::collection::vec(word, 0..4));
    let mut runner = TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&said, |(command, words)| {
        let mut client = server.client().unwrap();
        let arguments: Vec<Vec<u8>> = std::iter::once(command.as_bytes().to_vec()).chain(words).collect();
        client.queue(&arguments);
        client.flush().unwrap();
        prop_assert!(client.receive().is_ok());
        Ok(())
    });
    outcome.unwrap();
    assert_eq!((server.pid(), state(&server).as_str()), (pid, "idle"));
    assert!(!server.log().contains("a bug of remora") && !server.log().contains("panicked"));
}
