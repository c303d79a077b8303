//! Interception: sources that are of no use to the server that is attended. Its primary serves it at once, or another
//! source does. The agents may wait five minutes for a source (`--retry-for`), and no test does.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, assert_same_data, browser, require};

use crate::kit::{
    LONG, Source, at_once, fill, fill_keys, follows, load_slowly, number, quick, says, syncs, wait_until_loading,
    write_past_the_backlog,
};
use crate::sync::attend::{PORT, SERVER_USER, Scene, handed_over, in_step};
use crate::sync::primary::ANOTHER;

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
    agent.wait_for_event("attending", LONG).unwrap();
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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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

/// The user by which a source's server follows the primary, until it is removed.
const FOLLOWER: [&str; 2] = ["follower", "pa55"];

/// A server that follows the primary as a user of its own, and its source.
fn beside_a_follower(scene: &Scene, kind: Kind) -> (Server, Source) {
    let [name, password] = FOLLOWER;
    let rules = ["ACL", "SETUSER", name, "on", &format!(">{password}"), "+psync", "+replconf", "+ping"];
    scene.primary.client().unwrap().ok(&rules).unwrap();
    let server = quick(kind).master_auth(Some(name), password).on(&scene.host).start().unwrap();
    follower(scene, &server);
    let source = scene.stage.source_on(&scene.host, &server.url(), &[]);
    (server, source)
}

/// The server's link to the primary breaks, and does not come back.
fn cut_off(scene: &Scene, server: &Server) {
    scene.primary.client().unwrap().int(&["ACL", "DELUSER", FOLLOWER[0]]).unwrap();
    wait_until("the link to be down", LONG, || {
        let status = server.fact("master_link_status")?;
        Ok(if status == "down" { Ok(()) } else { Err(status) })
    })
    .unwrap();
}

/// The source is fit when it is asked, and cut off later: before its snapshot has begun, or in the middle of it.
#[test]
#[ignore = "long: make test-all"]
fn a_source_whose_server_is_cut_off_after_the_attended_one_has_joined_is_given_up() {
    at_once(require::kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)]), |(kind, has_begun)| {
        let Some(scene) = scene(kind) else { return };
        let server = scene.server(quick(kind).config("repl-diskless-load", "swapdb"));
        load_slowly(&server, 1);
        let (beside, source) = beside_a_follower(&scene, kind);
        if has_begun {
            beside.configure("rdb-key-save-delay", "20000").unwrap();
        } else {
            beside.configure("repl-diskless-sync-delay", "3600").unwrap();
        }
        let mut agent = attend(&scene, &server, PORT, &[source.address]);
        server.replicate(&scene.primary).unwrap();
        agent.wait_for_event("copy_served", LONG).unwrap();
        wait_until("the follower to be asked for a snapshot", LONG, || {
            let asked = number(&beside, "connected_slaves");
            Ok(if asked > 0 { Ok(()) } else { Err("not yet".to_owned()) })
        })
        .unwrap();
        if has_begun {
            wait_until_loading(&server);
        }
        cut_off(&scene, &beside);
        beside.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
        handed_over(&agent, &server, 1);
        assert_same_data(&scene.primary, &server);
        says(&agent.output(), &["has had no snapshot to offer for 3 s", "has no link to its primary"]);
        assert_eq!(syncs(&scene.primary).0, 2, "{kind}: the follower's, and the server's own");
    });
}

/// The first answer of a source is compared with the primary's history, and so is each later one.
#[test]
#[ignore = "long: make test-all"]
fn a_source_that_is_replaced_by_that_of_another_data_set_gives_the_server_nothing() {
    for kind in require::kinds() {
        let Some(mut scene) = scene(kind) else { return };
        scene.primary.configure("rdb-key-save-delay", "3000").unwrap();
        let foreign = quick(kind).on(&scene.host).start().unwrap();
        foreign.client().unwrap().ok(&["SET", "foreign", "data"]).unwrap();
        let mut server = scene.server(quick(kind).config("repl-diskless-load", "swapdb"));
        load_slowly(&server, 1);
        let mut agent = attend(&scene, &server, PORT, &[scene.source.address]);
        server.replicate(&scene.primary).unwrap();
        wait_until_loading(&server);
        let at = scene.source.address.to_string();
        scene.source.agent.kill().unwrap();
        scene.primary.configure("rdb-key-save-delay", "0").unwrap();
        let mut other = scene.stage.source_at(&at, Some(&scene.host), &foreign.url(), &[]);
        agent.wait_for_line(ANOTHER, LONG).unwrap();
        handed_over(&agent, &server, 1);
        assert_same_data(&scene.primary, &server);
        // The next copy asks it anew.
        fall_behind(&scene.primary, &mut [&mut server]);
        agent.wait_for_line("it has another history", LONG).unwrap();
        handed_over(&agent, &server, 2);
        assert_same_data(&scene.primary, &server);
        assert_eq!(number(&foreign, "sync_full"), 0, "{kind}: the foreign primary has forked");
        other.agent.kill().unwrap();
        scene.source = scene.stage.source_at(&at, Some(&scene.host), &scene.primary.url(), &[]);
        let served = agent.output().matches("the source serves it").count();
        fall_behind(&scene.primary, &mut [&mut server]);
        handed_over(&agent, &server, 3);
        assert_eq!(agent.output().matches("the source serves it").count(), served + 1, "{kind}: {}", agent.output());
        assert_same_data(&scene.primary, &server);
    }
}

/// The backlog of the source's server says nothing of the primary's, where the server goes on.
#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_behind_the_primarys_backlog_is_fed_on_though_that_of_the_sources_server_reaches_it() {
    for kind in require::kinds() {
        let primary =
            quick(kind).config("repl-backlog-size", "1mb").config("client-output-buffer-limit", "replica 0 0 0");
        let Some(scene) = Scene::with(primary, |primary| fill_keys(primary, 2_000, "value")) else { return };
        let beside = quick(kind).config("repl-backlog-size", "256mb").on(&scene.host).start().unwrap();
        follower(&scene, &beside);
        let source = scene.stage.source_on(&scene.host, &beside.url(), &[]);
        let server = scene.server(quick(kind).config("repl-diskless-load", "swapdb"));
        load_slowly(&server, 2_000);
        let agent = attend(&scene, &server, PORT, &[source.address]);
        server.replicate(&scene.primary).unwrap();
        wait_until_loading(&server);
        fill(&scene.primary, 16, 7);
        assert_eq!(number(&server, "loading"), 1, "{kind}: it has loaded before the writes were done");
        load_slowly(&server, 0);
        handed_over(&agent, &server, 1);
        assert_same_data(&scene.primary, &server);
        assert_eq!(syncs(&scene.primary).0, 1, "{kind}: the follower's alone\n{}", agent.output());
    }
}

/// A source whose server is cut off brings the attended one no nearer to the primary, which has gone on meanwhile.
#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_fed_by_a_source_that_is_cut_off_goes_to_its_primary() {
    at_once(require::kinds(), |kind| {
        let Some(scene) = scene(kind) else { return };
        let (beside, source) = beside_a_follower(&scene, kind);
        let server = scene.server(quick(kind).config("repl-diskless-load", "swapdb"));
        load_slowly(&server, 2_000);
        let agent = attend(&scene, &server, PORT, &[source.address]);
        server.replicate(&scene.primary).unwrap();
        wait_until_loading(&server);
        cut_off(&scene, &beside);
        write_past_the_backlog(&scene.primary);
        load_slowly(&server, 0);
        handed_over(&agent, &server, 1);
        assert_same_data(&scene.primary, &server);
        says(&agent.output(), &["comes no nearer to its primary", "handing the server over: caught up"]);
        assert_eq!(syncs(&scene.primary).0, 2, "{kind}: the follower's, and the server's own");
    });
}

// Interception: servers that something happens to at the moment at which they are handed over. Whatever it is, each
// gets in step with the primary that it follows in the end, and its next full copy is the source's again.

/// Keys of the primary: a full copy takes some tenths of a second.
const KEYS: usize = 2_000;

/// How long after the hand-off has begun the server is disturbed: before it settles, while it does, and afterwards.
const MOMENTS_MS: [u64; 4] = [0, 5, 12, 40];

/// The port of the agent's metrics. Every test has a namespace of its own.
const METRICS: u16 = 9380;

/// A server that is attended, and another primary that it can be pointed at.
struct Disturbed {
    scene: Scene,
    other: Server,
    server: Server,
    agent: Agent,
}

impl Disturbed {
    fn new(kind: remora_lab::Kind) -> Option<Disturbed> {
        let builder = quick(kind).config("repl-backlog-size", "1mb");
        let scene = Scene::with(builder, |primary| fill_keys(primary, KEYS, "value"))?;
        let other = quick(kind).on(&scene.host).start().unwrap();
        fill_keys(&other, KEYS / 2, "other");
        let server = scene.server(quick(kind).config("repl-diskless-load", "swapdb"));
        let ports = [scene.primary.port(), other.port()];
        let metrics = format!("127.0.0.1:{METRICS}");
        let agent = scene.attend_with(&server, &ports, &["--no-serve-peers", "--metrics", &metrics]);
        Some(Disturbed { scene, other, server, agent })
    }

    /// The server needs a full copy, and the hand-off that follows it has just begun.
    fn handing_over(&mut self) {
        let begun = |agent: &Agent| agent.output().matches("handing the server over").count();
        let before = begun(&self.agent);
        let mut client = self.server.client().unwrap();
        client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        client.ok(&["FLUSHALL"]).unwrap();
        self.server.replicate(&self.scene.primary).unwrap();
        let until = Instant::now() + LONG;
        while begun(&self.agent) == before {
            assert!(Instant::now() < until, "no hand-off\n{}\n{}", self.agent.output(), self.server.log());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// No sync is under way, and the server's connections come to the agent.
    #[track_caller]
    fn at_rest(&self) {
        let rests = wait_until("the agent to rest", LONG, || {
            let page = || browser::get(([127, 0, 0, 1], METRICS).into(), "/metrics", "");
            let text = self.scene.host.within(page)??.text;
            let rests = ["remora_attend_open 1.0", "remora_attend_syncing 0.0"].iter().all(|line| text.contains(line));
            Ok(if rests { Ok(()) } else { Err(text) })
        });
        assert!(rests.is_ok(), "{rests:?}\n{}\nthe server:\n{}", self.agent.output(), self.server.log());
    }

    /// Disturbs the server at each of these moments, and waits until all is well with the primary that it follows then.
    fn at_each(&mut self, moments: &[u64], what: &str, mut disturb: impl FnMut(&mut Disturbed)) {
        for moment in moments {
            self.handing_over();
            thread::sleep(Duration::from_millis(*moment));
            disturb(self);
            let began = Instant::now();
            in_step(&self.server, LONG, &self.agent);
            self.at_rest();
            // It may have been in step with the agent before.
            in_step(&self.server, LONG, &self.agent);
            println!("{what} after {moment} ms: in step {:.1} s later", began.elapsed().as_secs_f64());
            assert_same_data(self.followed(), &self.server);
        }
    }

    /// The primary that the server follows.
    fn followed(&self) -> &Server {
        let at = follows(&self.server);
        if at.ends_with(&format!(":{}", self.other.port())) { &self.other } else { &self.scene.primary }
    }

    fn command(&self, server: &Server, command: &[&str]) {
        server.client().unwrap().call(command).unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_detached_and_comes_back_while_it_is_handed_over_gets_in_step() {
    for kind in require::kinds() {
        let Some(mut scene) = Disturbed::new(kind) else { return };
        scene.at_each(&MOMENTS_MS, "detached and back", |at| {
            at.command(&at.server, &["REPLICAOF", "NO", "ONE"]);
            at.server.replicate(&at.scene.primary).unwrap();
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_pointed_elsewhere_while_it_is_handed_over_gets_in_step_there() {
    for (kind, moment) in require::kinds().into_iter().zip([0, 15]) {
        let Some(mut scene) = Disturbed::new(kind) else { return };
        scene.at_each(&[moment], "pointed at another primary", |at| at.server.replicate(&at.other).unwrap());
        assert!(std::ptr::eq(scene.followed(), &scene.other));
        scene.at_each(&[moment], "pointed at another primary and back", |at| {
            at.server.replicate(&at.other).unwrap();
            at.server.replicate(&at.scene.primary).unwrap();
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_links_break_while_it_is_handed_over_gets_in_step() {
    for (kind, moment) in require::kinds().into_iter().zip([0, 15]) {
        let Some(mut scene) = Disturbed::new(kind) else { return };
        scene.at_each(&[moment], "its link killed", |at| {
            at.command(&at.server, &["CLIENT", "KILL", "TYPE", "master"]);
        });
        scene.at_each(&[moment], "the primary's links killed", |at| {
            at.command(&at.scene.primary, &["CLIENT", "KILL", "TYPE", "replica"]);
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_stands_still_or_restarts_while_it_is_handed_over_gets_in_step() {
    for (kind, moment) in require::kinds().into_iter().zip([0, 15]) {
        let Some(mut scene) = Disturbed::new(kind) else { return };
        scene.at_each(&[moment], "standing still", |at| at.command(&at.server, &["DEBUG", "SLEEP", "1.5"]));
        scene.at_each(&[moment], "the primary standing still", |at| {
            at.command(&at.scene.primary, &["DEBUG", "SLEEP", "1.5"]);
        });
        scene.at_each(&[moment], "restarted without its data", |at| {
            at.server.restart().unwrap();
            at.server.replicate(&at.scene.primary).unwrap();
        });
        scene.at_each(&[moment], "restarted with its data", |at| {
            at.server.restart_saved(LONG).unwrap();
            at.server.replicate(&at.scene.primary).unwrap();
        });
    }
}

/// The primary's snapshot is not for a server that follows another one by now.
/// A fail-over: the new primary has the old one's history, so what the server has got is of use there. But its source
/// hangs with the old primary.
#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_primary_stands_still_in_the_copy_gets_in_step_with_the_one_that_a_fail_over_gives_it() {
    for kind in require::kinds() {
        let builder = quick(kind).config("repl-backlog-size", "1mb");
        let Some(mut scene) = Scene::with(builder, |primary| fill_keys(primary, KEYS, "value")) else { return };
        let promoted = quick(kind).on(&scene.host).start().unwrap();
        promoted.replicate(&scene.primary).unwrap();
        promoted.wait_for_link(LONG).unwrap();
        // The snapshot takes ten seconds.
        scene.primary.configure("rdb-key-save-delay", "5000").unwrap();
        let server = scene.server(quick(kind));
        let ports = [scene.primary.port(), promoted.port()];
        let mut agent = scene.attend_with(&server, &ports, &["--no-serve-peers"]);
        server.replicate(&scene.primary).unwrap();
        agent.wait_for_event("source_read", LONG).unwrap();
        scene.primary.pause().unwrap();
        promoted.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        promoted.client().unwrap().ok(&["SET", "after", "the fail-over"]).unwrap();
        server.replicate(&promoted).unwrap();
        in_step(&server, LONG, &agent);
        assert!(follows(&server).ends_with(&format!(":{}", promoted.port())), "{}", agent.output());
        assert_same_data(&promoted, &server);
        scene.primary.resume().unwrap();
    }
}

#[test]
fn a_server_that_is_pointed_elsewhere_before_it_loads_is_given_nothing_of_its_former_primary() {
    for kind in require::kinds() {
        let Some(mut at) = Disturbed::new(kind) else { return };
        // The source has no snapshot before the test lets go.
        at.scene.primary.configure("repl-diskless-sync-delay", "3600").unwrap();
        at.server.replicate(&at.scene.primary).unwrap();
        at.agent.wait_for_event("copy_served", LONG).unwrap();
        at.server.replicate(&at.other).unwrap();
        at.agent.wait_for_event("primary_changed", LONG).unwrap();
        at.scene.primary.configure("repl-diskless-sync-delay", "0").unwrap();
        // Once when the sync ends, and once when the other primary has served it.
        handed_over(&at.agent, &at.server, 2);
        assert_same_data(&at.other, &at.server);
        let history = at.scene.primary.fact("master_replid").unwrap();
        let said = at.server.log();
        assert!(
            !said.contains(&format!("Full resync from master: {history}")),
            "{kind}: {}\n{said}",
            at.agent.output()
        );
        // And the way back is the source's to serve.
        at.server.replicate(&at.scene.primary).unwrap();
        handed_over(&at.agent, &at.server, 3);
        assert_same_data(&at.scene.primary, &at.server);
        assert_eq!(number(&at.scene.primary, "sync_full"), 1, "{kind}: the source's\n{}", at.agent.output());
    }
}
