//! A fail-over in the middle of each phase of a sync: the server ends as an exact replica of the new primary, or the
//! agent ends with the right code and a second run makes it one.

use remora_lab::compare::same_data;
use remora_lab::{Error, require};

use super::*;
use crate::kit::{at_once, fill, fill_keys, follows, load_slowly, number, wait_until_loading};

/// How the primary is replaced.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Replaced {
    /// By order: `SENTINEL FAILOVER`. The former primary lives on as a replica.
    ByOrder,
    /// It is killed.
    ByDeath,
}

impl Scene {
    fn replace(&mut self, how: Replaced) {
        let former = self.sentinels.primary(0).unwrap();
        match how {
            Replaced::ByOrder => self.sentinels.fail_over().unwrap(),
            Replaced::ByDeath => {
                let at = self.at(&former);
                self.servers[at].kill().unwrap();
            }
        }
        self.sentinels.wait_for_another(&former, SOON).unwrap();
    }

    /// Waits until no Sentinel is about to tell a server anything: with `SLAVEOF` it closes the server's connections.
    fn wait_for_the_end_of_the_fail_over(&self) {
        for number in 0..3 {
            wait_until("the end of the fail-over", SOON, || {
                let mut client = self.sentinels.client(number)?;
                let mut flags = Vec::new();
                for question in ["MASTER", "REPLICAS"] {
                    flags.push(texts(&client.list(&["SENTINEL", question, sentinel::NAME])?));
                }
                let busy = ["failover_in_progress", "reconf_", "promoted"];
                let is_busy = flags.iter().any(|text| busy.iter().any(|flag| text.contains(flag)));
                Ok(if is_busy { Err(flags.concat()) } else { Ok(()) })
            })
            .unwrap();
        }
    }

    /// Waits for the agent's end, runs it once more if it did not end well, and compares the server with the primary.
    fn must_become_a_replica(&self, what: &str, mut agent: Agent, server: &Server, source: &Source) {
        // One whose server was ahead of the new primary loads another snapshot, and may stay again as its feed.
        wait_until("the agent's end, or that it stays again", LONG, || {
            let stays = agent.output().matches("in step; staying").count() > 1;
            Ok(if stays || agent.ended()?.is_some() { Ok(()) } else { Err("it works".to_owned()) })
        })
        .unwrap();
        if agent.ended().unwrap().is_none() {
            agent.signal(rustix::process::Signal::TERM).unwrap();
        }
        let Ok(status) = agent.wait(LONG) else {
            panic!("{what}: it does not end\n{}\nthe source:\n{}", agent.output(), source.agent.output());
        };
        let first = agent.output();
        if !status.success() {
            assert!(matches!(status.code(), Some(4..=6 | 14)), "{what}: {status}\n{first}");
            let mut again = self.replica(server, source, &["--replace"]);
            if let Err(error) = again.wait_for_success(LONG) {
                panic!("{what}: {error}\nthe first run:\n{first}\nthe source:\n{}", source.agent.output());
            }
        }
        println!("{what}: {}", if status.success() { "one run" } else { "two runs" });
        self.wait_for_the_end_of_the_fail_over();
        // Sentinel closes the connections of a server that it tells something, ours too: the question is asked again. On
        // a busy machine the Sentinels may fail over once more, so the primary is asked for again, too.
        let compared = wait_until("an exact replica of the new primary", SOON, || {
            let primary = self.primary();
            // A write after everything: it arrives by the server's own link alone.
            let ready = primary.client()?.ok(&["SET", "after the fail-over", "1"]).and(server.wait_for_link(SOON));
            if let Err(error) = ready {
                return Ok(Err(error.to_string()));
            }
            match same_data(primary, server, SOON) {
                Err(error @ Error::Different(_)) => Err(error),
                Err(error) => Ok(Err(error.to_string())),
                Ok(_) => Ok(Ok(())),
            }
        });
        if let Err(error) = compared {
            panic!("{what}: {error}\nthe agent:\n{first}\nthe server:\n{}", server.log());
        }
        assert_eq!(follows(server), self.primary().address().to_string(), "{what}");
    }
}

/// What the Sentinels are told. A primary that does not answer for some seconds is not dead on a busy machine, and one
/// that lives is replaced by order alone.
fn times(how: Replaced) -> [&'static str; 2] {
    let down = match how {
        Replaced::ByOrder => "sentinel down-after-milliseconds mymaster 60000",
        Replaced::ByDeath => "sentinel down-after-milliseconds mymaster 5000",
    };
    ["sentinel failover-timeout mymaster 10000", down]
}

/// Plays one phase with each kind of server and each way to replace the primary. `reach` gives the agent that is in
/// that phase.
fn in_the_middle(what: &str, reach: impl Fn(&Scene, &mut Source, &Server) -> Agent + Sync) {
    for how in [Replaced::ByOrder, Replaced::ByDeath] {
        at_once(require::kinds(), |kind| {
            let mut scene = Scene::new(kind, &times(how));
            fill_keys(&scene.servers[0], 20_000, "value");
            let mut source = scene.source(&[]);
            let server = scene.new_server();
            // On a busy machine the Sentinels may fail over a second time. They must not promote the server under test.
            server.configure("replica-priority", "0").unwrap();
            let agent = reach(&scene, &mut source, &server);
            scene.replace(how);
            load_slowly(&server, 0);
            for number in 1..3 {
                let _ = scene.servers[number].configure("rdb-key-save-delay", "0");
            }
            scene.must_become_a_replica(&format!("{kind}, {what}, {how:?}"), agent, &server, &source);
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn while_the_snapshot_is_taken() {
    in_the_middle("snapshot", |scene, source, server| {
        for replica in &scene.servers[1..] {
            replica.configure("rdb-key-save-delay", "300").unwrap();
        }
        let agent = scene.replica(server, source, &[]);
        source.agent.wait_for_event("snapshot_started", LONG).unwrap();
        agent
    });
}

#[test]
#[ignore = "long: make test-all"]
fn while_the_slots_are_read() {
    in_the_middle("transfer", |scene, source, server| {
        fill(&scene.servers[0], 32, 7);
        let slow = ["--transport", "tcp", "--download-limit", "4MiB"];
        let mut agent = scene.replica(server, source, &slow);
        source.wait_for_slots(&mut agent, 20);
        agent
    });
}

#[test]
#[ignore = "long: make test-all"]
fn while_the_server_loads() {
    in_the_middle("load", |scene, source, server| {
        load_slowly(server, 200);
        let agent = scene.replica(server, source, &[]);
        wait_until_loading(server);
        agent
    });
}

#[test]
#[ignore = "long: make test-all"]
fn while_the_server_catches_up() {
    in_the_middle("catch-up", |scene, source, server| {
        // It stays on the link: it is in step there, and not handed over.
        let mut agent = scene.replica(server, source, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        fill_keys(&scene.servers[0], 2_000, "more");
        agent
    });
}

#[test]
#[ignore = "long: make test-all"]
fn while_the_server_is_handed_over() {
    in_the_middle("hand-off", |scene, source, server| {
        let mut agent = scene.replica(server, source, &[]);
        agent.wait_for_event("handing_over", LONG).unwrap();
        agent
    });
}

#[test]
#[ignore = "long: make test-all"]
fn before_the_hand_off_the_sentinels_are_asked_again() {
    at_once(require::kinds(), |kind| {
        let mut scene = Scene::new(kind, &["sentinel failover-timeout mymaster 10000"]);
        let source = scene.source(&[]);
        let server = scene.new_server();
        // The old primary stands still: nothing tells the agent but the Sentinels.
        let mut agent = scene.replica(&server, &source, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let forks = number(&scene.servers[0], "total_forks");
        scene.servers[0].pause().unwrap();
        let former = scene.servers[0].address().to_string();
        scene.sentinels.wait_for_another(&former, SOON).unwrap();
        scene.must_become_a_replica(&format!("{kind}, paused"), agent, &server, &source);
        scene.servers[0].resume().unwrap();
        assert_eq!(number(&scene.servers[0], "total_forks"), forks);
    });
}
