//! Interception: servers whose own connections to their primary come to `remora attend`, or to `remora replica` for one
//! full copy. Each test is a network namespace of its own, where the rules of `remora intercept` stand.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::kit::{
    LONG, Source, Stage, at_once, ends, fill, fill_keys, follows, id, load_slowly, load_small, number, primary, quick,
    says, start_cluster, steady_writer, succeeds, syncs, wait_until_loading,
};
use remora_lab::sentinel::wait_for_nodes;
use remora_lab::server::{self, Authority, Tls};
use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Agent, Host, Kind, Net, Server, Workload, assert_same_data, browser, random, require, scratch};

/// The user of the servers; the agents are root's.
pub(crate) const SERVER_USER: u32 = 65_534;

/// The port of the agent. Every test has a namespace of its own.
pub(crate) const PORT: &str = "7380";

/// Keys of half a kilobyte.
const KEYS: usize = 20_000;

/// One host with a primary, its source, and the rules for a replica.
pub(crate) struct Scene {
    pub(crate) stage: Stage,
    pub(crate) host: Host,
    pub(crate) primary: Server,
    pub(crate) source: Source,
    _net: Net,
}

impl Scene {
    pub(crate) fn new(kind: Kind) -> Option<Scene> {
        Scene::with(primary(kind), |primary| fill_keys(primary, KEYS, "value"))
    }

    pub(crate) fn with(builder: Builder, fill: impl FnOnce(&Server)) -> Option<Scene> {
        Scene::on_host(|_| builder, fill)
    }

    /// The builder is told on which host the primary will be.
    pub(crate) fn on_host(builder: impl FnOnce(&Host) -> Builder, fill: impl FnOnce(&Server)) -> Option<Scene> {
        Scene::with_options(builder, fill, &[])
    }

    /// `options`: of the source.
    pub(crate) fn with_options(
        builder: impl FnOnce(&Host) -> Builder,
        fill: impl FnOnce(&Server),
        options: &[&str],
    ) -> Option<Scene> {
        require::namespaces()?;
        let net = Net::new().unwrap();
        let host = net.host("pod").unwrap();
        let primary = builder(&host).on(&host).start().unwrap();
        fill(&primary);
        let stage = Stage::new();
        let source = stage.source_on(&host, &primary.url(), options);
        let scene = Scene { stage, host, primary, source, _net: net };
        scene.intercept(&["add", "--server-uid", &SERVER_USER.to_string(), "--agent-uid", "0"]);
        Some(scene)
    }

    /// Runs `remora intercept` there, and returns what it prints.
    #[track_caller]
    pub(crate) fn intercept(&self, args: &[&str]) -> String {
        let mut agent = self.stage.start(Some(&self.host), &[&["intercept"], args].concat());
        agent.wait_for_success(LONG).unwrap();
        agent.output()
    }

    /// A server of the user whose connections are meant.
    pub(crate) fn server(&self, builder: Builder) -> Server {
        builder.as_user(SERVER_USER).on(&self.host).start().unwrap()
    }

    fn attend(&self, server: &Server, ports: &[u16]) -> Agent {
        self.attend_with(server, ports, &[])
    }

    pub(crate) fn attend_with(&self, server: &Server, ports: &[u16], more: &[&str]) -> Agent {
        let (url, source) = (server.url(), self.source.address.to_string());
        let token = self.stage.token.display().to_string();
        let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
        let mut args = vec!["attend", "--server", &url, "--source", &source, "--token-file", &token];
        args.extend(["--listen-port", PORT, "--retry-for", "10s"]);
        ports.iter().for_each(|port| args.extend(["--primary-port", port]));
        args.extend(more);
        let mut agent = self.stage.start(Some(&self.host), &args);
        agent.wait_for_event("attending", LONG).unwrap();
        agent
    }

    fn attend_the_primary(&self, server: &Server) -> Agent {
        self.attend(server, &[self.primary.port()])
    }
}

/// Waits until the server's link is up, for this time at most.
#[track_caller]
pub(crate) fn in_step(server: &Server, within: Duration, agent: &Agent) {
    let up = wait_until("the link to be up", within, || {
        let status = server.fact("master_link_status")?;
        Ok(if status == "up" { Ok(()) } else { Err(status) })
    });
    assert!(up.is_ok(), "{up:?}\nthe agent:\n{}\nthe server:\n{}", agent.output(), server.log());
}

/// Waits until the server has gone from the agent to its primary so often, and its new connections come to the agent
/// again.
#[track_caller]
pub(crate) fn handed_over(agent: &Agent, server: &Server, times: usize) {
    let waited = wait_until("the server to be handed over", LONG, || {
        let seen = agent.output().matches("new connections come here again").count();
        Ok(if seen >= times { Ok(()) } else { Err(format!("{seen} times")) })
    });
    assert!(waited.is_ok(), "{waited:?}\n{}\nthe server:\n{}", agent.output(), server.log());
    in_step(server, LONG, agent);
}

#[test]
fn the_rules_have_room_for_the_ports_of_a_large_cluster() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = Scene::with(primary(kind), |_| ()) else { return };
    let server = scene.server(quick(kind));
    let ports: Vec<u16> = (20_000..20_150).collect();
    let agent = scene.attend(&server, &ports);
    // Several times: entries are renewed each second, and must not end meanwhile.
    for time in 0..5 {
        let listed = wait_until("an entry for each port", LONG, || {
            let mut nft = Command::new("nft");
            scene.host.enter(nft.args(["list", "set", "inet", &format!("remora_{PORT}"), "wanted"])).unwrap();
            let listed = String::from_utf8(nft.output().unwrap().stdout).unwrap();
            let words: BTreeSet<&str> = listed.split(|letter: char| !letter.is_ascii_digit()).collect();
            let there = ports.iter().filter(|port| words.contains(&*port.to_string())).count();
            Ok(if there == ports.len() { Ok(()) } else { Err(format!("{there} of {}", ports.len())) })
        });
        assert!(listed.is_ok(), "{time}: {listed:?}\n{}", agent.output());
    }
}

#[test]
fn a_full_copy_comes_from_the_source_and_the_server_goes_on_at_its_primary() {
    for kind in require::kinds() {
        let Some(scene) = Scene::new(kind) else { return };
        let server = scene.server(quick(kind));
        let agent = scene.attend_the_primary(&server);
        let writer = steady_writer(&scene.primary);
        server.replicate(&scene.primary).unwrap();
        handed_over(&agent, &server, 1);
        let (full, partial) = syncs(&scene.primary);
        assert_eq!((full, partial), (1, 1), "the source's full copy, the server's hand-off\n{}", agent.output());
        writer.stop().unwrap();
        assert_same_data(&scene.primary, &server);
        assert!(!server.log().contains("CONFIG"), "no setting is touched");

        // A second full copy of the same server costs the primary nothing either.
        server.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        server.client().unwrap().ok(&["FLUSHALL"]).unwrap();
        server.replicate(&scene.primary).unwrap();
        handed_over(&agent, &server, 2);
        assert_eq!(syncs(&scene.primary).0, 1, "{}", agent.output());
        assert_same_data(&scene.primary, &server);
    }
}

#[test]
#[ignore = "long: needs Prometheus"]
fn those_who_watch_see_what_became_of_the_servers_requests() {
    let (Some(kind), Some(())) = (require::valkey(), require::prometheus()) else { return };
    let Some(scene) = Scene::new(kind) else { return };
    let server = scene.server(quick(kind));
    let agent = scene.attend_with(&server, &[scene.primary.port()], &["--metrics", "127.0.0.1:9380"]);
    let page = |path: &str, accept: &str| {
        let got = scene.host.within(|| browser::get(([127, 0, 0, 1], 9380).into(), path, accept)).unwrap();
        got.unwrap()
    };
    let shows = |what: &str, lines: &[&str]| {
        wait_until(what, LONG, || {
            let text = page("/metrics", "").text;
            Ok(if lines.iter().all(|line| text.contains(line)) { Ok(()) } else { Err(text) })
        })
        .unwrap();
    };
    shows("the agent to attend", &["remora_attend_rules 1.0", "remora_attend_open 1.0", "remora_attend_syncing 0.0"]);
    load_slowly(&server, 200);
    server.replicate(&scene.primary).unwrap();
    // The sync answers together with the agent around it.
    shows("the sync", &["remora_attend_syncing 1.0", "remora_sync_phase{phase=\"", "remora_sync_source_up 1.0"]);
    handed_over(&agent, &server, 1);
    shows("its end", &["remora_attend_syncs_total{result=\"done\"} 1", "remora_attend_syncing 0.0"]);
    server.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
    handed_over(&agent, &server, 2);
    assert!(!page("/metrics", "").text.contains("remora_attend_passed_total 0"), "{}", agent.output());
    assert_eq!(page("/readyz", "").status, 200);
    let classic = page("/metrics", "text/plain").text;
    // No sync is under way.
    let manual = crate::metrics::manual();
    let absent: Vec<&str> = manual.keys().map(String::as_str).filter(|name| name.starts_with("remora_sync_")).collect();
    crate::metrics::check("attend", &classic, false, &absent);
    scene.intercept(&["remove"]);
    shows("the rules to be missed", &["remora_attend_rules 0.0"]);
    let ready = page("/readyz", "");
    assert!(ready.status == 503 && ready.text.contains("remora intercept"), "{ready:?}");
}

#[test]
#[ignore = "long: make test-all"]
fn under_fifty_thousand_writes_a_second_the_server_goes_on_at_its_primary() {
    for kind in require::kinds() {
        let Some(scene) = Scene::new(kind) else { return };
        let server = scene.server(quick(kind));
        let agent = scene.attend_the_primary(&server);
        let options = Options { big_bytes: 1 << 10, ..Options::seeded(random::seed("attend")) };
        let (began, client) = (Instant::now(), scene.primary.client().unwrap());
        let writer = Workload::start(client, options.rate(50_000)).unwrap();
        server.replicate(&scene.primary).unwrap();
        handed_over(&agent, &server, 1);
        let rate = writer.commands() as f64 / began.elapsed().as_secs_f64();
        println!("{kind}: {rate:.0} writes a second");
        assert_eq!(syncs(&scene.primary), (1, 1), "{}", agent.output());
        writer.stop().unwrap();
        assert_same_data(&scene.primary, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_partial_resynchronisation_that_the_primary_can_serve_is_the_primarys() {
    for kind in require::kinds() {
        let Some(scene) = Scene::new(kind) else { return };
        let server = scene.server(quick(kind));
        let mut agent = scene.attend_the_primary(&server);
        server.replicate(&scene.primary).unwrap();
        handed_over(&agent, &server, 1);
        let (full, partial) = syncs(&scene.primary);
        server.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
        agent.wait_for_line("the primary can continue it", LONG).unwrap();
        handed_over(&agent, &server, 2);
        let now = syncs(&scene.primary);
        assert_eq!(now, (full, partial + 2), "through the agent, and without it\n{}", agent.output());
        assert_same_data(&scene.primary, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_agent_is_killed_takes_a_native_sync_within_seconds() {
    at_once(require::kinds(), |kind| {
        let Some(scene) = Scene::new(kind) else { return };
        for phase in ["attending", "copy_served", "loading", "handing_over"] {
            let server = scene.server(quick(kind));
            let mut agent = scene.attend_the_primary(&server);
            if phase == "loading" {
                load_slowly(&server, 500);
            }
            if phase != "attending" {
                server.replicate(&scene.primary).unwrap();
            }
            match phase {
                "attending" => {}
                "loading" => wait_until_loading(&server),
                event => _ = agent.wait_for_event(event, LONG).unwrap(),
            }
            agent.kill().unwrap();
            let killed = Instant::now();
            if phase == "loading" {
                load_slowly(&server, 0);
            } else if phase == "attending" {
                server.replicate(&scene.primary).unwrap();
            }
            in_step(&server, LONG, &agent);
            println!("{kind}, {phase}: in step {:.1} s after the kill", killed.elapsed().as_secs_f64());
            assert_same_data(&scene.primary, &server);
        }
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_stopped_agent_leaves_the_server_to_its_primary() {
    at_once(require::kinds(), |kind| {
        let Some(scene) = Scene::new(kind) else { return };
        let server = scene.server(quick(kind));
        let mut agent = scene.attend_the_primary(&server);
        assert!(scene.intercept(&["show"]).contains("expires"), "an entry stands");
        agent.signal(Signal::TERM).unwrap();
        ends(&mut agent, 0);
        assert!(!scene.intercept(&["show"]).contains("expires"), "it was removed");

        let mut agent = scene.attend_the_primary(&server);
        // Directly from the link: a file that is whole would be loaded, and the primary would continue from it.
        server.configure("repl-diskless-load", "on-empty-db").unwrap();
        load_slowly(&server, 500);
        server.replicate(&scene.primary).unwrap();
        wait_until_loading(&server);
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, 7);
        assert!(said.contains("by itself, which sends it what it lacks"), "{said}");
        in_step(&server, LONG, &agent);
        assert_eq!(syncs(&scene.primary).0, 2, "the source's, and the server's own");
        assert_same_data(&scene.primary, &server);
    });
}

#[test]
fn a_full_copy_that_the_source_cannot_serve_is_the_primarys() {
    let Some(kind) = require::redis() else { return };
    let Some(mut scene) = Scene::new(kind) else { return };
    let server = scene.server(quick(kind));
    let mut agent = scene.attend_the_primary(&server);
    scene.source.agent.kill().unwrap();
    server.replicate(&scene.primary).unwrap();
    agent.wait_for_line("the source cannot serve it", LONG).unwrap();
    handed_over(&agent, &server, 1);
    assert_eq!(syncs(&scene.primary).0, 1, "the server's own");
    assert_same_data(&scene.primary, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn the_source_is_killed_while_the_server_loads_and_the_primary_serves_it() {
    let Some(kind) = require::redis() else { return };
    let Some(mut scene) = Scene::new(kind) else { return };
    let server = scene.server(quick(kind));
    let mut agent = scene.attend_the_primary(&server);
    load_slowly(&server, 500);
    server.replicate(&scene.primary).unwrap();
    wait_until_loading(&server);
    scene.source.agent.kill().unwrap();
    agent.wait_for_line("by itself", LONG).unwrap();
    in_step(&server, LONG, &agent);
    assert_same_data(&scene.primary, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_at_an_ipv6_address_is_intercepted_too() {
    let Some(kind) = require::redis() else { return };
    let builder = primary(kind).config("bind", "* -::*");
    let Some(scene) = Scene::with(builder, |primary| fill_keys(primary, KEYS, "value")) else { return };
    let server = scene.server(quick(kind));
    let agent = scene.attend_the_primary(&server);
    let port = scene.primary.port().to_string();
    server.client().unwrap().ok(&["REPLICAOF", "::1", &port]).unwrap();
    handed_over(&agent, &server, 1);
    assert_eq!(syncs(&scene.primary), (1, 1), "{}", agent.output());
    assert_same_data(&scene.primary, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn the_login_of_the_server_is_the_primarys_to_judge() {
    let Some(kind) = require::redis() else { return };
    let rules = "+psync +replconf +ping +info";
    let builder = primary(kind).user("copier", "pa55", rules);
    let Some(scene) = Scene::with(builder, |primary| fill_keys(primary, KEYS, "value")) else { return };
    let server = scene.server(quick(kind).master_auth(Some("copier"), "wrong"));
    let agent = scene.attend_the_primary(&server);
    server.replicate(&scene.primary).unwrap();
    wait_until("the server to be refused", LONG, || {
        let log = server.log();
        Ok(if log.contains("WRONGPASS") { Ok(()) } else { Err(log) })
    })
    .unwrap();
    server.configure("masterauth", "pa55").unwrap();
    handed_over(&agent, &server, 1);
    assert_eq!(syncs(&scene.primary), (1, 1), "{}", agent.output());
    assert_same_data(&scene.primary, &server);
}

#[test]
fn rules_that_would_not_work_are_refused_and_an_agent_without_rules_too() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = Scene::new(kind) else { return };
    let said = ends(
        &mut scene.stage.start(Some(&scene.host), &["intercept", "add", "--server-uid", "0", "--agent-uid", "0"]),
        3,
    );
    assert!(said.contains("as another user than the server"), "{said}");
    assert!(scene.intercept(&["show"]).contains("table inet remora_7380"));
    scene.intercept(&["remove"]);
    scene.intercept(&["remove"]);
    assert!(scene.intercept(&["show"]).contains("no connections are intercepted"));
    let (url, source) = (scene.primary.url(), scene.source.address.to_string());
    let token = scene.stage.token.display().to_string();
    let args = ["attend", "--server", &url, "--source", &source, "--token-file", &token];
    let said = ends(&mut scene.stage.start(Some(&scene.host), &args), 3);
    assert!(said.contains("remora intercept add"), "{said}");
}

#[test]
#[ignore = "long: make test-all"]
fn of_several_sources_the_one_with_the_history_of_the_servers_primary_serves_it() {
    for kind in require::kinds() {
        let Some(scene) = Scene::new(kind) else { return };
        let other = primary(kind).on(&scene.host).start().unwrap();
        fill_keys(&other, KEYS, "other");
        let second = scene.stage.source_on(&scene.host, &other.url(), &[]);
        let server = scene.server(quick(kind));
        let nowhere = format!("{}:1,{}", scene.host.address(), second.address);
        let agent = scene.attend_with(&server, &[scene.primary.port(), other.port()], &["--sources", &nowhere]);
        for (times, primary) in [(1, &scene.primary), (2, &other), (3, &scene.primary)] {
            server.replicate(primary).unwrap();
            handed_over(&agent, &server, times);
            assert_eq!(syncs(primary).0, 1, "{kind}: the source's alone\n{}", agent.output());
            assert_same_data(primary, &server);
        }
    }
}

/// Runs a shell's script where the hierarchy of control groups is mounted, whatever this machine has there.
fn with_groups(script: &str) -> bool {
    let script = format!("mount -t cgroup2 none /sys/fs/cgroup && {script}");
    let run = std::process::Command::new("unshare").args(["-m", "sh", "-c", &script]).status();
    run.is_ok_and(|status| status.success())
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_is_intercepted_by_its_control_group() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = Scene::new(kind) else { return };
    let group = format!("remora-test-{}", std::process::id());
    if !with_groups(&format!("mkdir -p /sys/fs/cgroup/{group}")) {
        println!("skipped: this kernel has no control groups of version 2, or they cannot be mounted");
        return;
    }
    scene.intercept(&["remove"]);
    let server = scene.server(quick(kind));
    assert!(with_groups(&format!("echo {} > /sys/fs/cgroup/{group}/cgroup.procs", server.pid())));
    let remora = env!("CARGO_BIN_EXE_remora");
    let add = format!(
        "mount -t cgroup2 none /sys/fs/cgroup && exec {remora} intercept add --server-cgroup {group} --agent-uid 0"
    );
    let mut command = std::process::Command::new("unshare");
    command.args(["-m", "sh", "-c", &add]);
    scene.host.enter(&mut command).unwrap();
    assert!(command.status().unwrap().success());
    let agent = scene.attend_the_primary(&server);
    server.replicate(&scene.primary).unwrap();
    handed_over(&agent, &server, 1);
    assert_eq!(syncs(&scene.primary), (1, 1), "{}", agent.output());
    assert_same_data(&scene.primary, &server);
    drop((agent, server));
    assert!(with_groups(&format!("rmdir /sys/fs/cgroup/{group}")));
}

/// Keys of the first shard: their part in braces is what the cluster computes the slot from.
fn fill_the_first_shard(primary: &Server) {
    let mut client = primary.client().unwrap();
    client.ok(&["CLUSTER", "ADDSLOTSRANGE", "0", "5460"]).unwrap();
    let slot = |tag: &u32| primary.client().unwrap().int(&["CLUSTER", "KEYSLOT", &tag.to_string()]).unwrap();
    let tag = (0..).find(|tag| slot(tag) <= 5460).unwrap();
    wait_until("the node to serve its slots", LONG, || {
        let set = primary.client()?.ok(&["SET", &format!("{{{tag}}}"), "value"]);
        Ok(set.map_err(|error| error.to_string()))
    })
    .unwrap();
    let set = |number| ["SET".to_owned(), format!("{{{tag}}}{number}"), "value".repeat(100)].to_vec();
    for first in (0..KEYS).step_by(500) {
        let commands: Vec<Vec<String>> = (first..first + 500).map(set).collect();
        assert!(client.pipeline(&commands).unwrap().iter().all(remora_redis::resp::Frame::is_ok));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_node_of_a_cluster_becomes_a_replica_by_cluster_replicate_as_ever() {
    at_once(require::kinds(), |kind| {
        let builder =
            || quick(kind).cluster().config("cluster-require-full-coverage", "no").config("repl-backlog-size", "256mb");
        let Some(scene) = Scene::with(builder(), fill_the_first_shard) else { return };
        let others = [("5461", "10922"), ("10923", "16383")].map(|(first, last)| {
            let server = scene.server(builder());
            server.client().unwrap().ok(&["CLUSTER", "ADDSLOTSRANGE", first, last]).unwrap();
            server
        });
        let server = scene.server(builder());
        let mut client = scene.primary.client().unwrap();
        for other in others.iter().chain([&server]) {
            let (host, port) = (other.address().ip().to_string(), other.port().to_string());
            let bus = other.configured("cluster-port").unwrap();
            client.ok(&["CLUSTER", "MEET", &host, &port, &bus]).unwrap();
        }
        wait_for_nodes(&server, 4).unwrap();
        let ports: Vec<u16> = others.iter().chain([&scene.primary]).map(Server::port).collect();
        let agent = scene.attend(&server, &ports);
        let id = client.text(&["CLUSTER", "MYID"]).unwrap();
        server.client().unwrap().ok(&["CLUSTER", "REPLICATE", &id]).unwrap();
        handed_over(&agent, &server, 1);
        wait_until("one full copy, and the hand-off", LONG, || {
            let counted = syncs(&scene.primary);
            Ok(if counted == (1, 1) { Ok(()) } else { Err(format!("{counted:?}\n{}", agent.output())) })
        })
        .unwrap();
        wait_until("the other nodes to see a replica", LONG, || {
            let nodes = client.text(&["CLUSTER", "NODES"])?;
            let replica = nodes.lines().find(|line| line.contains(&format!(":{}@", server.port())));
            Ok(if replica.is_some_and(|line| line.contains(&format!("slave {id}"))) { Ok(()) } else { Err(nodes) })
        })
        .unwrap();
        let has_data_of = |primary: &Server| {
            wait_until("the same data", LONG, || {
                let (one, other) = (primary.digest()?, server.digest()?);
                Ok(if one == other { Ok(()) } else { Err(format!("{one} {other}")) })
            })
            .unwrap();
        };
        has_data_of(&scene.primary);

        // To another shard, back, and to the other one again in the moment of the hand-off.
        let [other, _] = &others;
        let other_id = other.client().unwrap().text(&["CLUSTER", "MYID"]).unwrap();
        let follow = |id: &str| server.client().unwrap().ok(&["CLUSTER", "REPLICATE", id]).unwrap();
        follow(&other_id);
        handed_over(&agent, &server, 2);
        follow(&id);
        let until = Instant::now() + LONG;
        while agent.output().matches("handing the server over").count() < 2 {
            assert!(Instant::now() < until, "{}", agent.output());
            std::thread::sleep(Duration::from_millis(1));
        }
        follow(&other_id);
        wait_until("the server to be in step with the other shard's primary", LONG, || {
            let (at, link) = (follows(&server), server.fact("master_link_status")?);
            let is_there = at == other.address().to_string() && link == "up";
            Ok(if is_there { Ok(()) } else { Err(format!("{at} {link}")) })
        })
        .unwrap();
        has_data_of(other);
    });
}

// Interception: how connections end that are served by the source or by the primary through the agent.

/// Seconds after which a server gives up a link on which it hears nothing. No test takes as long.
const NEVER: u32 = 600;

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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
fn a_copy_of_the_primary_under_writes_is_made_once() {
    at_once(require::kinds(), |kind| {
        a_copy_under_writes(kind, quick(kind), quick(kind));
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_logs_in_at_its_primary_is_let_go_when_the_primary_would_continue_it() {
    let Some(kind) = require::redis() else { return };
    let primary = quick(kind).user("copier", "pa55", "+psync +replconf +ping +info");
    a_copy_under_writes(kind, primary, quick(kind).master_auth(Some("copier"), "pa55"));
}

#[test]
#[ignore = "long: make test-all"]
fn a_copy_that_is_loaded_while_it_arrives_is_made_once() {
    let Some(kind) = require::valkey() else { return };
    a_copy_under_writes(kind, quick(kind), quick(kind).config("repl-diskless-load", "swapdb"));
}

// `remora replica --delivery intercept` and `--delivery auto`: one full copy of a server whose own connection to its
// primary is intercepted, after which the agent has ended.

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
            let (server, _) = server::certificates(folder.path(), &[host.address()]).unwrap();
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
