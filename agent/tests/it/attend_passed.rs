//! Interception: how connections end that are served by the source or by the primary through the agent.

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Kind, Server, assert_same_data, require};

use crate::attend::{Scene, handed_over};
use crate::kit::{LONG, at_once, fill, fill_keys, load_slowly, load_small, number, quick, syncs, wait_until_loading};

/// Seconds after which a server gives up a link on which it hears nothing. No test takes as long.
const NEVER: u32 = 600;

/// Keys of half a kilobyte.
const KEYS: usize = 20_000;

fn patient(kind: Kind) -> Builder {
    quick(kind).config("repl-timeout", NEVER)
}

#[test]
#[ignore = "long: make test-all"]
fn a_snapshot_that_is_aborted_ends_the_connection_of_the_server_that_receives_it() {
    let cases = require::kinds().into_iter().flat_map(|kind| [(kind, "disabled"), (kind, "swapdb")]);
    at_once(cases, |(kind, load)| {
        // A source of its own: one that has the snapshot would give it to the second server as it is.
        let Some(scene) = Scene::new(kind) else { return };
        let server = scene.server(patient(kind).config("repl-diskless-load", load));
        let mut agent = scene.attend_with(&server, &[scene.primary.port()], &["--no-serve-peers"]);
        // Ten seconds and more.
        scene.primary.configure("rdb-key-save-delay", "1000").unwrap();
        server.replicate(&scene.primary).unwrap();
        // Before its first bytes nothing would be aborted.
        wait_until("the server to receive", LONG, || {
            let (read, loading) = (server.fact("master_sync_read_bytes"), server.fact("loading")?);
            let receives = loading == "1" || read.is_ok_and(|bytes| bytes != "0");
            Ok(if receives { Ok(()) } else { Err(loading) })
        })
        .unwrap();
        scene.primary.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
        scene.primary.configure("rdb-key-save-delay", "0").unwrap();
        agent.wait_for_event("snapshot_given_up", LONG).unwrap();
        handed_over(&agent, &server, 1);
        assert_same_data(&scene.primary, &server);
    });
}

/// Whether bytes wait for the process that listens at this port, on an established connection.
fn has_unread_bytes(server: &Server) -> Result<(), String> {
    let table = std::fs::read_to_string(format!("/proc/{}/net/tcp", server.pid())).unwrap();
    let port = format!(":{:04X}", server.port());
    let waits = table.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields[1].ends_with(&port) && fields[3] == "01" && !fields[4].ends_with(":00000000")
    });
    if waits { Ok(()) } else { Err(table) }
}

/// A process that is killed while bytes wait for it resets its connections.
#[test]
fn a_reset_by_the_primary_reaches_a_server_whose_copy_is_passed_on() {
    for kind in require::kinds() {
        let Some(mut scene) = Scene::new(kind) else { return };
        scene.source.agent.kill().unwrap();
        let server = scene.server(patient(kind).config("repl-diskless-load", "swapdb"));
        let _agent = scene.attend_with(&server, &[scene.primary.port()], &[]);
        load_slowly(&server, 20_000);
        server.replicate(&scene.primary).unwrap();
        wait_until_loading(&server);
        scene.primary.pause().unwrap();
        // A server that loads sends a newline each second.
        wait_until("the server's newline", LONG, || Ok(has_unread_bytes(&scene.primary))).unwrap();
        scene.primary.kill().unwrap();
        load_slowly(&server, 0);
        wait_until("the server to notice the end of its copy", LONG, || {
            let syncing = server.fact("master_sync_in_progress")?;
            Ok(if syncing == "0" { Ok(()) } else { Err(syncing) })
        })
        .unwrap();
    }
}

/// A primary with this little backlog, whose clients write many times as much while the server loads.
fn a_copy_under_writes(kind: Kind, primary: Builder, server: Builder) {
    let primary = primary.config("repl-backlog-size", "1mb").config("client-output-buffer-limit", "replica 0 0 0");
    let Some(mut scene) = Scene::with(primary, |primary| fill_keys(primary, KEYS, "value")) else { return };
    scene.source.agent.kill().unwrap();
    let server = scene.server(server);
    let agent = scene.attend_with(&server, &[scene.primary.port()], &[]);
    load_slowly(&server, 1_000);
    server.replicate(&scene.primary).unwrap();
    wait_until_loading(&server);
    fill(&scene.primary, 48, 7);
    load_small(&scene.primary, 100_000, 16);
    assert_eq!(number(&server, "loading"), 1, "{kind}: it has loaded before the writes were done");
    load_slowly(&server, 0);
    handed_over(&agent, &server, 1);
    assert_eq!(syncs(&scene.primary).0, 1, "{kind}: one copy\n{}", agent.output());
    assert_same_data(&scene.primary, &server);
}

#[test]
fn a_copy_of_the_primary_under_writes_is_made_once() {
    at_once(require::kinds(), |kind| {
        a_copy_under_writes(kind, quick(kind), quick(kind));
    });
}

#[test]
fn a_server_that_logs_in_at_its_primary_is_let_go_when_the_primary_would_continue_it() {
    let Some(kind) = require::redis() else { return };
    let primary = quick(kind).user("copier", "pa55", "+psync +replconf +ping +info");
    a_copy_under_writes(kind, primary, quick(kind).master_auth(Some("copier"), "pa55"));
}

#[test]
fn a_copy_that_is_loaded_while_it_arrives_is_made_once() {
    let Some(kind) = require::valkey() else { return };
    a_copy_under_writes(kind, quick(kind), quick(kind).config("repl-diskless-load", "swapdb"));
}
