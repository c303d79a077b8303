//! Interception: sources that are of no use to the server that is attended. Its primary serves it at once, or another
//! source does. The agents may wait five minutes for a source (`--retry-for`), and no test does.

use std::net::SocketAddr;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, assert_same_data, require};

use crate::attend::{PORT, SERVER_USER, Scene, handed_over, in_step};
use crate::kit::{LONG, fill_keys, quick, syncs, way_of_loading, write_past_the_backlog};

/// The user and the port of a second attended server.
const SECOND_USER: u32 = SERVER_USER - 1;
const SECOND_PORT: &str = "7381";

/// A primary whose backlog holds next to nothing.
fn scene(kind: Kind) -> Option<Scene> {
    let builder = quick(kind).config("repl-backlog-size", "16kb");
    Scene::with(builder, |primary| fill_keys(primary, 2_000, "value"))
}

/// Rules for a second server.
fn second(scene: &Scene, kind: Kind) -> Server {
    let rules = ["--server-uid", &SECOND_USER.to_string(), "--agent-uid", "0", "--listen-port", SECOND_PORT];
    scene.intercept(&[&["add"], &rules[..]].concat());
    quick(kind).as_user(SECOND_USER).on(&scene.host).start().unwrap()
}

fn attend(scene: &Scene, server: &Server, port: &str, sources: &[SocketAddr]) -> Agent {
    let text = |address: &SocketAddr| address.to_string();
    let (url, first) = (server.url(), text(&sources[0]));
    let others = sources[1..].iter().map(text).collect::<Vec<_>>().join(",");
    let (token, primary) = (scene.stage.token.display().to_string(), scene.primary.port().to_string());
    let mut args = vec!["attend", "--server", &url, "--source", &first, "--token-file", &token, "--retry-for", "300s"];
    args.extend(["--listen-port", port, "--primary-port", &primary, "--no-serve-peers"]);
    if !others.is_empty() {
        args.extend(["--sources", &others]);
    }
    let mut agent = scene.stage.start(Some(&scene.host), &args);
    agent.wait_for_line("attending", LONG).unwrap();
    agent
}

/// A server that follows the primary, and was not attended when it began to.
fn follower(scene: &Scene, server: &Server) {
    server.replicate(&scene.primary).unwrap();
    server.wait_for_link(LONG).unwrap();
}

/// Breaks the links of these servers, for so long that each needs a full copy.
fn fall_behind(primary: &Server, servers: &mut [&mut Server]) {
    servers.iter_mut().for_each(|server| server.pause().unwrap());
    primary.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    write_past_the_backlog(primary);
    servers.iter_mut().for_each(|server| server.resume().unwrap());
}

#[test]
fn a_source_beside_the_attended_server_is_passed_over() {
    for kind in require::kinds() {
        let Some(scene) = scene(kind) else { return };
        let mut server = scene.server(quick(kind));
        follower(&scene, &server);
        let own = scene.stage.source_on(&scene.host, &server.url(), &[]);
        let mut agent = attend(&scene, &server, PORT, &[own.address]);
        fall_behind(&scene.primary, &mut [&mut server]);
        agent.wait_for_line("no source can serve a copy", LONG).unwrap();
        handed_over(&agent, &server, 1);
        assert_same_data(&scene.primary, &server);
        drop(agent);

        // Another source serves it, whichever answers first.
        let agent = attend(&scene, &server, PORT, &[own.address, scene.source.address]);
        fall_behind(&scene.primary, &mut [&mut server]);
        handed_over(&agent, &server, 1);
        assert!(agent.output().contains("the source serves it"), "{kind}: {}", agent.output());
        assert_eq!(syncs(&server).0, 0, "{kind}: the own source asks for no snapshot\n{}", agent.output());
        assert_same_data(&scene.primary, &server);
    }
}

#[test]
fn two_servers_that_lose_their_links_do_not_wait_for_the_source_beside_one_of_them() {
    for kind in require::kinds() {
        let Some(scene) = scene(kind) else { return };
        let (mut one, mut two) = (scene.server(quick(kind)), second(&scene, kind));
        [&one, &two].into_iter().for_each(|server| follower(&scene, server));
        let source = scene.stage.source_on(&scene.host, &two.url(), &[]);
        let agents =
            [attend(&scene, &one, PORT, &[source.address]), attend(&scene, &two, SECOND_PORT, &[source.address])];
        fall_behind(&scene.primary, &mut [&mut one, &mut two]);
        for (agent, server) in agents.iter().zip([&one, &two]) {
            handed_over(agent, server, 1);
            assert_same_data(&scene.primary, server);
        }
    }
}

#[test]
fn two_servers_with_a_source_beside_the_other_one_each_do_not_wait_for_each_other() {
    for kind in require::kinds() {
        let Some(scene) = scene(kind) else { return };
        let (mut one, mut two) = (scene.server(quick(kind)), second(&scene, kind));
        [&one, &two].into_iter().for_each(|server| follower(&scene, server));
        let [beside_one, beside_two] =
            [&one, &two].map(|server| scene.stage.source_on(&scene.host, &server.url(), &[]));
        let agents = [
            attend(&scene, &one, PORT, &[beside_two.address]),
            attend(&scene, &two, SECOND_PORT, &[beside_one.address]),
        ];
        fall_behind(&scene.primary, &mut [&mut one, &mut two]);
        for (agent, server) in agents.iter().zip([&one, &two]) {
            handed_over(agent, server, 1);
            assert_same_data(&scene.primary, server);
        }
    }
}

#[test]
fn a_source_beside_a_replica_of_the_attended_server_is_passed_over() {
    for kind in require::kinds() {
        let Some(scene) = scene(kind) else { return };
        let mut server = scene.server(quick(kind));
        follower(&scene, &server);
        // Its link is up all the time, and it stands still with the server that it follows.
        let chained = quick(kind).on(&scene.host).start().unwrap();
        chained.replicate(&server).unwrap();
        chained.wait_for_link(LONG).unwrap();
        let source = scene.stage.source_on(&scene.host, &chained.url(), &[]);
        let mut agent = attend(&scene, &server, PORT, &[source.address]);
        fall_behind(&scene.primary, &mut [&mut server]);
        agent.wait_for_line("no source can serve a copy", LONG).unwrap();
        handed_over(&agent, &server, 1);
        assert_same_data(&scene.primary, &server);
    }
}

#[test]
fn a_source_whose_server_does_not_answer_is_passed_over() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = scene(kind) else { return };
    let (mut server, mut hung) = (scene.server(quick(kind)), quick(kind).on(&scene.host).start().unwrap());
    [&server, &hung].into_iter().for_each(|server| follower(&scene, server));
    let source = scene.stage.source_on(&scene.host, &hung.url(), &[]);
    let mut agent = attend(&scene, &server, PORT, &[source.address]);
    hung.pause().unwrap();
    fall_behind(&scene.primary, &mut [&mut server]);
    agent.wait_for_line("does not answer", LONG).unwrap();
    handed_over(&agent, &server, 1);
    assert_same_data(&scene.primary, &server);
}

#[test]
fn a_source_whose_server_loses_its_primary_before_the_snapshot_is_given_up() {
    for kind in require::kinds() {
        let Some(scene) = scene(kind) else { return };
        let (mut server, mut other) = (scene.server(quick(kind)), quick(kind).on(&scene.host).start().unwrap());
        [&server, &other].into_iter().for_each(|server| follower(&scene, server));
        let source = scene.stage.source_on(&scene.host, &other.url(), &[]);
        let mut agent = attend(&scene, &server, PORT, &[source.address]);
        // The snapshot takes minutes, and the server loads it while it arrives.
        other.configure("rdb-key-save-delay", "200000").unwrap();
        server.configure("repl-diskless-load", "swapdb").unwrap();
        fall_behind(&scene.primary, &mut [&mut server]);
        agent.wait_for_line("the source serves it", LONG).unwrap();
        wait_until("the server to receive", LONG, || Ok(way_of_loading(&server).map(drop))).unwrap();
        // Its primary refuses it from now on, and its replicas are cut off.
        let nowhere = scene.host.address().to_string();
        other.client().unwrap().ok(&["REPLICAOF", &nowhere, "1"]).unwrap();
        other.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
        agent.wait_for_line("has no link to its primary", LONG).unwrap();
        in_step(&server, LONG, &agent);
        assert_same_data(&scene.primary, &server);
        other.pause().unwrap();
    }
}
