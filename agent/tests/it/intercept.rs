//! `remora replica --delivery intercept` and `--delivery auto`: one full copy of a server whose own connection to its
//! primary is intercepted, after which the agent has ended.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use remora_lab::server::wait_until;
use remora_lab::tls::{self, Authority, Tls};
use remora_lab::{Agent, Server, assert_same_data, require, scratch};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::attend::{PORT, SERVER_USER, Scene, handed_over, in_step};
use crate::kit::{
    LONG, at_once, ends, fill_keys, follows, id, load_slowly, number, primary, quick, says, start_cluster,
    steady_writer, succeeds, syncs, wait_until_loading,
};

impl Scene {
    fn deliver(&self, server: &Server, way: &str, more: &[&str]) -> Agent {
        let options = ["--delivery", way, "--listen-port", PORT];
        self.stage.replica_on(&self.host, &server.url(), self.source.address, &[&options[..], more].concat())
    }

    /// A replica in step, by the servers' own replication.
    fn follower(&self, server: Server) -> Server {
        server.replicate(&self.primary).unwrap();
        server.wait_for_link(LONG).unwrap();
        server
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_in_step_is_left_alone_and_with_replace_it_takes_a_full_copy_from_the_source() {
    for kind in require::kinds() {
        let Some(scene) = Scene::new(kind) else { return };
        let server = scene.follower(scene.server(quick(kind)));
        let said = succeeds(&mut scene.deliver(&server, "intercept", &[]), &server);
        says(&said, &["is in step with its primary", "nothing was touched"]);
        assert_eq!(syncs(&scene.primary), (1, 0), "no copy was taken for it");

        // What only this server has is gone afterwards.
        server.configure("replica-read-only", "no").unwrap();
        server.client().unwrap().ok(&["SET", "its own", "1"]).unwrap();
        let writer = steady_writer(&scene.primary);
        let json = scene.stage.path("summary.json");
        let mut agent = scene.deliver(&server, "intercept", &["--replace", "--json", &json]);
        let said = succeeds(&mut agent, &server);
        says(&said, &["was ended", "the source serves it"]);
        assert_eq!(syncs(&scene.primary), (2, 1), "{kind}: its own first one, the source's; the hand-off\n{said}");
        assert_eq!(follows(&server), scene.primary.address().to_string());
        writer.stop().unwrap();
        assert_same_data(&scene.primary, &server);
        for fact in ["master_replid", "master_repl_offset"] {
            wait_until("the same position", LONG, || {
                let both = (server.fact(fact)?, scene.primary.fact(fact)?);
                Ok(if both.0 == both.1 { Ok(()) } else { Err(format!("{both:?}")) })
            })
            .unwrap();
        }
        let summary: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(summary["delivery"].as_str(), Some("intercept"));
        let shown = scene.intercept(&["show"]);
        assert!(shown.contains("remora_7380") && !shown.contains("expires"), "the rules stay, no entry does: {shown}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_link_is_down_comes_by_itself_and_a_copy_that_it_does_not_need_is_not_taken() {
    for kind in require::kinds() {
        let builder = primary(kind).user("copier", "pa55", "+psync +replconf +ping +info");
        let fill = |primary: &Server| crate::kit::fill_keys(primary, 5_000, "value");
        let Some(scene) = Scene::with(builder, fill) else { return };
        let server = scene.server(quick(kind).master_auth(Some("copier"), "wrong"));
        server.replicate(&scene.primary).unwrap();
        let mut agent = scene.deliver(&server, "intercept", &[]);
        wait_until("the server to be refused through the agent", LONG, || {
            let entries = scene.intercept(&["show"]).contains("expires");
            Ok(if entries && server.log().contains("WRONGPASS") { Ok(()) } else { Err(server.log()) })
        })
        .unwrap();
        // Another server of this user, whose first copy is passed through the agent.
        let other = scene.follower(scene.server(quick(kind).master_auth(Some("copier"), "pa55")));
        assert_eq!(syncs(&scene.primary), (1, 0), "its own");
        server.configure("masterauth", "pa55").unwrap();
        let said = succeeds(&mut agent, &server);
        says(&said, &["a connection of another server of this user is passed on"]);
        assert_eq!(syncs(&scene.primary).0, 2, "{kind}: the other one's, and the source's\n{said}");
        for server in [&server, &other] {
            in_step(server, LONG, &agent);
            assert_same_data(&scene.primary, server);
        }
        let partial = syncs(&scene.primary).1;

        // Down again, with a position that the primary can continue.
        server.configure("masterauth", "wrong").unwrap();
        server.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
        let mut agent = scene.deliver(&server, "intercept", &[]);
        wait_until("an entry", LONG, || {
            let shown = scene.intercept(&["show"]);
            Ok(if shown.contains("expires") { Ok(()) } else { Err(shown) })
        })
        .unwrap();
        server.configure("masterauth", "pa55").unwrap();
        let said = succeeds(&mut agent, &server);
        says(&said, &["the primary can continue the server", "without a full copy"]);
        assert_eq!(syncs(&scene.primary), (2, partial + 1), "{kind}\n{said}");
        assert_same_data(&scene.primary, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn rules_that_are_missing_are_made_for_the_run_and_go_with_it() {
    for kind in require::kinds() {
        let Some(scene) = Scene::new(kind) else { return };
        let server = scene.follower(scene.server(quick(kind)));
        scene.intercept(&["remove"]);
        let said = succeeds(&mut scene.deliver(&server, "intercept", &["--replace", "--dry-run"]), &server);
        says(&said, &["can take a full copy by interception", "nothing was touched"]);
        assert_eq!(syncs(&scene.primary), (1, 0));
        let said = succeeds(&mut scene.deliver(&server, "intercept", &["--replace"]), &server);
        says(&said, &[&format!("rules for the connections of user {SERVER_USER} were made")]);
        assert_eq!(syncs(&scene.primary), (2, 1), "{kind}\n{said}");
        assert_same_data(&scene.primary, &server);
        assert!(scene.intercept(&["show"]).contains("no connections are intercepted"));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_is_killed_or_stopped_leaves_the_server_to_its_primary_and_the_next_one_serves_it() {
    at_once(require::kinds(), |kind| {
        let Some(scene) = Scene::new(kind) else { return };
        let server = scene.follower(scene.server(quick(kind)));
        scene.intercept(&["remove"]);
        for signal in [Signal::KILL, Signal::TERM] {
            load_slowly(&server, 500);
            let mut agent = scene.deliver(&server, "intercept", &["--replace"]);
            wait_until_loading(&server);
            agent.signal(signal).unwrap();
            if signal == Signal::TERM {
                says(&ends(&mut agent, 7), &["stopped by SIGTERM", "by itself"]);
            } else {
                agent.wait(LONG).unwrap();
            }
            load_slowly(&server, 0);
            in_step(&server, LONG, &agent);
            assert_same_data(&scene.primary, &server);
        }
        let full = number(&scene.primary, "sync_full");
        let said = succeeds(&mut scene.deliver(&server, "intercept", &["--replace"]), &server);
        assert_eq!(number(&scene.primary, "sync_full"), full, "{kind}: the source has its snapshot\n{said}");
        assert_same_data(&scene.primary, &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn what_cannot_be_intercepted_is_refused_and_not_touched() {
    for kind in require::kinds() {
        let Some(mut scene) = Scene::new(kind) else { return };
        let server = scene.server(quick(kind));
        says(&ends(&mut scene.deliver(&server, "intercept", &[]), 3), &["follows no primary", "--delivery link"]);
        says(&ends(&mut scene.deliver(&server, "intercept", &["--stay"]), 2), &["--stay"]);
        scene.intercept(&["remove"]);
        // A server of the agent's own user.
        let ours = scene.follower(quick(kind).on(&scene.host).start().unwrap());
        let said = ends(&mut scene.deliver(&ours, "intercept", &["--replace"]), 3);
        says(&said, &["no rules send connections to port 7380", "are both 0", "as another user"]);
        let server = scene.follower(server);
        let before = syncs(&scene.primary);
        scene.source.agent.kill().unwrap();
        ends(&mut scene.deliver(&server, "intercept", &["--replace", "--retry-for", "0"]), 5);
        assert_eq!(syncs(&scene.primary), before, "no connection was cut");
        assert_eq!(server.fact("master_link_status").unwrap(), "up");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn auto_is_by_the_link_for_a_server_that_nothing_watches() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = Scene::new(kind) else { return };
    let server = scene.server(quick(kind));
    let said = succeeds(&mut scene.deliver(&server, "auto", &[]), &server);
    says(&said, &["delivery by the link: the server is not in cluster mode"]);
    assert_same_data(&scene.primary, &server);
}

/// Gives a node all slots and some keys.
fn fill_all_slots(primary: &Server) {
    let mut client = primary.client().unwrap();
    client.ok(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).unwrap();
    wait_until("the node to serve its slots", LONG, || {
        let set = primary.client()?.ok(&["SET", "first", "value"]);
        Ok(set.map_err(|error| error.to_string()))
    })
    .unwrap();
    crate::kit::fill_keys(primary, 5_000, "value");
}

#[test]
#[ignore = "long: make test-all"]
fn auto_is_by_interception_in_cluster_mode_and_refused_where_that_is_not_possible() {
    for kind in require::kinds() {
        let builder = || primary(kind).cluster();
        let Some(scene) = Scene::with(builder(), fill_all_slots) else { return };
        let server = scene.server(builder());
        let mut client = scene.primary.client().unwrap();
        let (host, port) = (server.address().ip().to_string(), server.port().to_string());
        client.ok(&["CLUSTER", "MEET", &host, &port, &server.configured("cluster-port").unwrap()]).unwrap();
        wait_until("the nodes to know each other", LONG, || {
            let done = server.client()?.ok(&["CLUSTER", "REPLICATE", &id(&scene.primary)]);
            Ok(done.map_err(|error| error.to_string()))
        })
        .unwrap();
        server.wait_for_link(LONG).unwrap();
        let said = succeeds(&mut scene.deliver(&server, "auto", &["--replace"]), &server);
        says(&said, &["delivery by interception: the server runs in cluster mode"]);
        assert_eq!(syncs(&scene.primary), (2, 1), "{kind}: its own first one, the source's\n{said}");
        wait_until("the same data", LONG, || {
            let (one, other) = (scene.primary.digest()?, server.digest()?);
            Ok(if one == other { Ok(()) } else { Err(format!("{one} {other}")) })
        })
        .unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn auto_says_why_a_node_of_the_agents_own_user_is_refused() {
    let Some(kind) = require::redis() else { return };
    let cluster = start_cluster(None, kind, 3, 1);
    let stage = crate::kit::Stage::new();
    let source = stage.source(&cluster.shards[0].primary.url(), &[]);
    let options = ["--replace", "--delivery", "auto"];
    let said = ends(&mut stage.replica(&cluster.shards[0].replicas[0].url(), source.address, &options), 3);
    says(&said, &["delivery by the link, although the server runs in cluster mode", "REPLICAOF", "remora attend"]);
}

// Interception of servers that speak TLS to their primary.

/// Certificates in a folder that the servers' user can read.
struct Certificates {
    folder: TempDir,
    server: Tls,
}

fn readable(folder: &Path) {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    for file in fs::read_dir(folder).unwrap() {
        fs::set_permissions(file.unwrap().path(), fs::Permissions::from_mode(0o644)).unwrap();
    }
}

/// A primary with a TLS port, and a source by its plain one.
fn scene() -> Option<(Scene, Certificates)> {
    let kind = require::redis().filter(|kind| kind.speaks_tls())?;
    let folder = scratch::folder("tls").unwrap();
    let mut files = None;
    let scene = Scene::on_host(
        |host| {
            let (server, _) = tls::certificates(folder.path(), &[host.address()]).unwrap();
            readable(folder.path());
            files = Some(server.clone());
            primary(kind).tls(server)
        },
        |primary| fill_keys(primary, 5_000, "value"),
    )?;
    let server = files?;
    Some((scene, Certificates { folder, server }))
}

impl Certificates {
    /// A server that replicates by TLS.
    fn follower(&self, scene: &Scene) -> Server {
        scene.server(quick(scene.primary.kind()).tls(self.server.clone()).config("tls-replication", "yes"))
    }

    /// Makes it a replica by the primary's TLS port.
    fn replicate(&self, scene: &Scene, server: &Server) {
        let (host, port) = (scene.primary.address().ip().to_string(), scene.primary.tls_port().unwrap().to_string());
        server.client().unwrap().ok(&["REPLICAOF", &host, &port]).unwrap();
    }

    fn options(&self) -> [String; 4] {
        let [cert, key] = [&self.server.certificate, &self.server.key].map(|path| path.display().to_string());
        ["--link-cert".to_owned(), cert, "--link-key".to_owned(), key]
    }
}

fn strs(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

#[test]
fn a_full_copy_and_a_partial_one_are_served_over_tls() {
    let Some((scene, certificates)) = scene() else { return };
    let server = certificates.follower(&scene);
    let options = certificates.options();
    let mut agent = scene.attend_with(&server, &[scene.primary.tls_port().unwrap()], &strs(&options));
    let writer = steady_writer(&scene.primary);
    certificates.replicate(&scene, &server);
    handed_over(&agent, &server, 1);
    assert_eq!(syncs(&scene.primary), (1, 1), "the source's full copy, the server's hand-off\n{}", agent.output());
    server.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
    agent.wait_for_line("the primary can continue it", LONG).unwrap();
    handed_over(&agent, &server, 2);
    assert_eq!(syncs(&scene.primary), (1, 3), "through the agent, and without it\n{}", agent.output());
    writer.stop().unwrap();
    assert_same_data(&scene.primary, &server);
    agent.kill().unwrap();

    // Once more, by a run that ends.
    let link = strs(&options);
    let once = [&["--delivery", "intercept", "--replace"][..], &link].concat();
    let mut agent = scene.stage.replica_on(&scene.host, &server.url(), scene.source.address, &once);
    let ended = agent.wait_for_success(LONG);
    assert!(ended.is_ok(), "{ended:?}\n{}\nthe server:\n{}", agent.output(), server.log());
    assert_eq!(syncs(&scene.primary), (1, 4), "{}", agent.output());
    assert_same_data(&scene.primary, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_refuses_the_certificate_goes_to_its_primary_unread() {
    let Some((scene, certificates)) = scene() else { return };
    let server = certificates.follower(&scene);
    let other = Authority::new(certificates.folder.path(), "other").unwrap();
    let wrong = other.sign("wrong", &[&scene.host.address().to_string()]).unwrap();
    let [cert, key] = [&wrong.certificate, &wrong.key].map(|path| path.display().to_string());
    let link = ["--link-cert", &cert, "--link-key", &key];
    let agent = scene.attend_with(&server, &[scene.primary.tls_port().unwrap()], &link);
    certificates.replicate(&scene, &server);
    in_step(&server, LONG, &agent);
    says(&agent.output(), &["the server does not take us for its primary", "--link-cert", "passed on unread"]);
    assert_same_data(&scene.primary, &server);
    assert_eq!(syncs(&scene.primary).0, 1, "the server's own");
}
