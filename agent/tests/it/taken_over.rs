//! Servers that another client changes while an agent works on them, or that close the agent's connection: the agent
//! never undoes what the other client did, and never removes keys behind a replication position that some primary would
//! continue.

use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Client, Kind, Server, assert_same_data, fill_every_type, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, Way, at_once, ends, load, number, primary, syncs, way_of_loading};

/// The exit code of a sync whose server another client has taken over, whatever else happened.
const TAKEN_OVER: i32 = 14;

/// The exit code of a refusal before anything was touched.
const REFUSED: i32 = 3;

/// Sets `keys` small keys.
fn fill(server: &Server, keys: u64) {
    let mut client = server.client().unwrap();
    client.ok(&["DEBUG", "POPULATE", &keys.to_string(), "key", "32"]).unwrap();
}

/// A primary, a source beside it, and a server that an agent feeds (`--stay`) and that has caught up.
fn staying(kind: Kind, server: Server) -> (Server, Source, Server, Agent) {
    let primary = primary(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 5).unwrap();
    let source = Source::start(&primary, &["--memory", "128MiB"]);
    let mut agent = source.replica(&server, &["--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    (primary, source, server, agent)
}

/// The first word of ROLE.
fn role(server: &Server) -> String {
    server.fact("role").unwrap()
}

#[test]
fn a_promotion_is_not_undone_when_the_agent_is_stopped_at_once() {
    for kind in require::kinds() {
        let (_primary, _source, server, mut agent) = staying(kind, Server::start(kind).unwrap());
        let mut client = server.client().unwrap();
        client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        client.ok(&["SET", "only-here", "1"]).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, TAKEN_OVER);
        assert!(said.contains("was detached meanwhile") && said.contains("left as it is"), "{said}");
        assert_eq!(role(&server), "master");
        assert_eq!(client.text(&["GET", "only-here"]).unwrap(), "1");
    }
}

#[test]
fn a_promotion_is_not_undone_when_the_source_is_lost_at_once() {
    for kind in require::kinds() {
        let (_primary, mut source, server, mut agent) = staying(kind, Server::start(kind).unwrap());
        let mut client = server.client().unwrap();
        client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        client.ok(&["SET", "only-here", "1"]).unwrap();
        source.agent.kill().unwrap();
        ends(&mut agent, TAKEN_OVER);
        assert_eq!(role(&server), "master");
        assert_eq!(client.text(&["GET", "only-here"]).unwrap(), "1");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_was_pointed_at_another_primary_stays_with_it_when_the_agent_is_stopped_at_once() {
    for kind in require::kinds() {
        let other = primary(kind).start().unwrap();
        fill(&other, 10);
        let (_primary, _source, server, mut agent) = staying(kind, Server::start(kind).unwrap());
        server.replicate(&other).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, TAKEN_OVER);
        assert!(said.contains(&format!("was told to follow 127.0.0.1:{}", other.port())), "{said}");
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&other, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_was_pointed_elsewhere_during_its_load_by_file_is_not_emptied() {
    for kind in require::kinds() {
        let (primary, other) = (primary(kind).start().unwrap(), primary(kind).start().unwrap());
        load(&primary, 60, 1_000_000);
        fill(&other, 10);
        // A server with keys loads from a file, unless it knows `flush-before-load`, which the agent then sets.
        let server = Server::builder(kind).config("repl-diskless-load", "disabled").start().unwrap();
        fill(&server, 3);
        let source = Source::start(&primary, &["--memory", "128MiB"]);
        let limits = ["--replace", "--module-load", "off", "--download-limit", "8MiB", "--transport", "tcp"];
        let mut agent = source.replica(&server, &limits);
        agent.wait_for_event("link_followed", LONG).unwrap();
        let way = wait_until("the server to receive the snapshot", LONG, || Ok(way_of_loading(&server))).unwrap();
        if way == Way::Link {
            assert!(matches!(kind, Kind::Valkey9), "{}", agent.output());
            continue;
        }
        server.replicate(&other).unwrap();
        agent.signal(Signal::INT).unwrap();
        let said = ends(&mut agent, TAKEN_OVER);
        assert!(said.contains("stopped by SIGINT") && said.contains("was told to follow"), "{said}");
        server.wait_for_link(LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), other.port().to_string());
        assert_same_data(&other, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_was_written_to_while_the_agent_waited_is_not_overwritten() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).config("rdb-key-save-delay", 20_000).start().unwrap();
        fill(&primary, 200);
        let server = Server::start(kind).unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        // The primary runs a child for another purpose: the source has no snapshot to offer before it ends.
        primary.client().unwrap().ok(&["BGSAVE"]).unwrap();
        let mut agent = source.replica(&server, &[]);
        agent.wait_for_event("snapshot_awaited", LONG).unwrap();
        server.client().unwrap().ok(&["SET", "fresh", "1"]).unwrap();
        let said = ends(&mut agent, REFUSED);
        assert!(said.contains("--replace") && said.contains("not touched"), "{said}");
        assert_eq!(server.client().unwrap().text(&["GET", "fresh"]).unwrap(), "1");
        assert_eq!(
            (role(&server), server.configured("repl-diskless-load").unwrap()),
            ("master".into(), "disabled".into())
        );
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_was_pointed_elsewhere_while_the_agent_waited_is_not_touched() {
    at_once(require::kinds(), |kind| {
        let other = primary(kind).start().unwrap();
        fill(&other, 10);
        let primary = primary(kind).config("rdb-key-save-delay", 20_000).start().unwrap();
        fill(&primary, 200);
        let server = Server::start(kind).unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        // The primary runs a child for another purpose: the source has no snapshot to offer before it ends.
        primary.client().unwrap().ok(&["BGSAVE"]).unwrap();
        let mut agent = source.replica(&server, &["--replace"]);
        agent.wait_for_event("snapshot_awaited", LONG).unwrap();
        server.replicate(&other).unwrap();
        server.wait_for_link(LONG).unwrap();
        let said = ends(&mut agent, TAKEN_OVER);
        assert!(said.contains("was told to follow") && said.contains("not touched"), "{said}");
        assert_eq!(server.fact("master_port").unwrap(), other.port().to_string());
        assert_eq!(server.configured("repl-diskless-load").unwrap(), "disabled");
        assert_same_data(&other, &server);
    });
}

/// Longer than the `timeout` of one second that these tests give their servers; servers look for idle clients once a
/// second.
const IDLE: Duration = Duration::from_secs(4);

#[test]
#[ignore = "long: make test-all"]
fn a_control_connection_that_the_server_closed_for_idleness_is_made_anew_when_a_stay_is_stopped() {
    at_once(require::kinds(), |kind| {
        let server = Server::builder(kind).config("timeout", 1).start().unwrap();
        let (primary, _source, server, mut agent) = staying(kind, server);
        let before = syncs(&primary);
        std::thread::sleep(IDLE);
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), primary.port().to_string());
        assert_same_data(&primary, &server);
        assert_eq!(syncs(&primary), (before.0, before.1 + 1));
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_control_connection_that_the_server_closed_for_idleness_is_made_anew_when_the_source_is_lost() {
    at_once(require::kinds(), |kind| {
        let server = Server::builder(kind).config("timeout", 1).start().unwrap();
        let (primary, mut source, server, mut agent) = staying(kind, server);
        std::thread::sleep(IDLE);
        source.agent.kill().unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), primary.port().to_string());
        assert_same_data(&primary, &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_control_connection_that_the_server_closed_while_the_agent_waited_for_an_offer_is_made_anew() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).config("repl-diskless-sync-delay", IDLE.as_secs()).start().unwrap();
        fill(&primary, 100);
        let server = Server::builder(kind).config("timeout", 1).start().unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        source.replicate(&server, &[]);
        assert_same_data(&primary, &server);
    });
}

/// Emptying a server of this many keys takes long enough for a test to interfere.
const MANY_KEYS: u64 = 1_200_000;

/// An idle server answers within this time.
const BLINK: Duration = Duration::from_millis(60);

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_the_module_emptied_is_not_continued_on_nothing_when_the_agent_is_killed() {
    for kind in require::kinds() {
        let library = match remora_lab::server::module_library() {
            Ok(path) => path,
            Err(error) => return require::skip(&error.to_string()).unwrap_or_default(),
        };
        // The digests of this many keys take seconds: the offset must not move meanwhile.
        let quiet = primary(kind).config("repl-ping-replica-period", 3600);
        let primary = quiet.config("rdbcompression", "no").start().unwrap();
        fill(&primary, MANY_KEYS);
        primary.client().unwrap().ok(&[b"SET".as_slice(), b"long", &[b'x'; 600_000]]).unwrap();
        let server = remora_lab::Server::builder(kind)
            .config("loadmodule", library.display())
            .config("replica-lazy-flush", "no")
            .start()
            .unwrap();
        server.replicate(&primary).unwrap();
        server.wait_for_link(LONG).unwrap();
        let source = Source::start(&primary, &["--memory", "1GiB", "--module-capture", "off"]);
        let mut agent = source.replica(&server, &["--replace"]);
        agent.wait_for_event("link_followed", LONG).unwrap();
        // The module empties Redis, which answers no client meanwhile: the agent is killed just then. Valkey empties
        // itself after it has dropped its replication position (flush-before-load).
        let mut client = server.client().unwrap();
        client.timeout(BLINK).unwrap();
        wait_until("the server to be emptied", LONG, || Ok(is_emptied(&mut client))).unwrap();
        agent.kill().unwrap();
        wait_until("the server to answer again", LONG, || {
            Ok(server.client()?.int(&["DBSIZE"]).map_err(|error| error.to_string()))
        })
        .unwrap();

        // A killed agent leaves the secret of its link behind, which this primary would refuse.
        server.configure("masterauth", "").unwrap();
        let before = syncs(&primary).0;
        server.replicate(&primary).unwrap();
        server.wait_for_link(LONG).unwrap();
        assert_eq!(syncs(&primary).0, before + 1, "the server's old position must no longer be valid");
        assert_same_data(&primary, &server);
        assert_eq!(number(&server, "loading"), 0);
    }
}

/// Whether keys have been removed, or no answer comes: a server that removes its keys or loads others answers nothing
/// else.
fn is_emptied(client: &mut Client) -> Result<(), String> {
    match client.int(&["DBSIZE"]) {
        Ok(keys) if keys > MANY_KEYS as i64 => Err(format!("{keys} keys")),
        _ => Ok(()),
    }
}
