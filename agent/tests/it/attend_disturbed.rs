//! Interception: servers that something happens to at the moment at which they are handed over. Whatever it is, each
//! gets in step with the primary that it follows in the end, and its next full copy is the source's again.

use std::thread;
use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::{Agent, Server, assert_same_data, http, require};

use crate::attend::{Scene, handed_over, in_step};
use crate::kit::{LONG, fill_keys, follows, number, quick};

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
            let page = || http::get(([127, 0, 0, 1], METRICS).into(), "/metrics", "");
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
        handed_over(&at.agent, &at.server, 1);
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
        handed_over(&at.agent, &at.server, 2);
        assert_same_data(&at.scene.primary, &at.server);
        assert_eq!(number(&at.scene.primary, "sync_full"), 1, "{kind}: the source's\n{}", at.agent.output());
    }
}
