//! Groups of servers that three real Sentinels watch: which server a source sits beside, where a replica is handed over to,
//! and what a fail-over or a switch in the middle comes to.

use std::time::Duration;

use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, at_once, ends, fill, fill_keys, follows, load_slowly, number, primary, quick, says,
    steady_writer, succeeds, syncs, wait_until_loading,
};
use remora_lab::compare::same_data;
use remora_lab::server::wait_until;
use remora_lab::workload::{PairWriter, assert_has_all};
use remora_lab::{
    Agent, Error, Host, Kind, Net, Sentinels, Server, assert_same_data, fill_every_type, require, sentinel, server,
};
use remora_redis::resp::Frame;

/// A fail-over is over within seconds.
const SOON: Duration = Duration::from_secs(120);

/// For Sentinels that replace a primary by order alone, however long it does not answer on a busy machine.
const NEVER_DOWN: &str = "sentinel down-after-milliseconds mymaster 60000";

/// A primary with two replicas, and three Sentinels.
struct Scene {
    stage: Stage,
    servers: Vec<Server>,
    sentinels: Sentinels,
    kind: Kind,
}

impl Scene {
    fn new(kind: Kind, lines: &[&str]) -> Scene {
        let start = || primary(kind).config("repl-ping-replica-period", 1).start().unwrap();
        let servers = vec![start(), start(), start()];
        fill_every_type(&mut servers[0].client().unwrap(), 31).unwrap();
        for replica in &servers[1..] {
            replica.replicate(&servers[0]).unwrap();
            replica.wait_for_link(LONG).unwrap();
        }
        let sentinels = Sentinels::start(kind, &servers[0], &[&servers[1], &servers[2]], lines).unwrap();
        Scene { stage: Stage::new(), servers, sentinels, kind }
    }

    /// The server at this address.
    fn at(&self, address: &str) -> usize {
        let address = address.trim_start_matches("redis://");
        let found = self.servers.iter().position(|server| server.address().to_string() == address);
        found.unwrap_or_else(|| panic!("{address} is not in the group:\n{}", self.sentinels.log(0)))
    }

    /// The present primary, as the first Sentinel that lives says.
    fn primary(&self) -> &Server {
        let address = (0..3).find_map(|number| self.sentinels.primary(number).ok()).unwrap();
        &self.servers[self.at(&address)]
    }

    /// Waits until every Sentinel has read this `replica-priority` in the server's INFO.
    fn wait_for_priority(&self, server: &Server, priority: &str) {
        let port = format!("\nport\n{}\n", server.port());
        let wanted = format!("\nslave-priority\n{priority}\n");
        for number in 0..3 {
            wait_until("the Sentinels to know the priority", LONG, || {
                let known = self.sentinels.client(number)?.list(&["SENTINEL", "REPLICAS", sentinel::NAME])?;
                let of_it = known.iter().map(|one| texts(std::slice::from_ref(one))).find(|one| one.contains(&port));
                let of_it = of_it.unwrap_or_default();
                Ok(if of_it.contains(&wanted) { Ok(()) } else { Err(of_it) })
            })
            .unwrap();
        }
    }

    /// A server that no Sentinel knows.
    fn new_server(&self) -> Server {
        Server::start(self.kind).unwrap()
    }

    /// Starts an agent that asks the Sentinels.
    fn replica(&self, server: &Server, source: &Source, more: &[&str]) -> Agent {
        let list = self.sentinels.list();
        let group = ["--sentinel", &list, "--sentinel-name", sentinel::NAME];
        self.stage.replica(&server.url(), source.address, &[&group[..], more].concat())
    }

    /// Waits until the first Sentinel knows this many replicas.
    fn wait_for_replicas(&self, count: usize) {
        wait_until("Sentinel to find the new replica", SOON, || {
            let info = self.sentinels.client(0)?.text(&["INFO", "sentinel"])?;
            Ok(if info.contains(&format!("slaves={count},")) { Ok(()) } else { Err(info) })
        })
        .unwrap();
    }

    fn source(&self, more: &[&str]) -> Source {
        self.stage.source_of_group(None, &self.sentinels, more)
    }

    /// Fails over, and waits until all Sentinels name another primary and the other servers follow it.
    fn fail_over(&self) {
        let former = self.sentinels.primary(0).unwrap();
        self.sentinels.fail_over().unwrap();
        self.sentinels.wait_for_another(&former, SOON).unwrap();
    }
}

/// All texts of an answer, one a line.
fn texts(answer: &[Frame]) -> String {
    let text = |frame: &Frame| match frame {
        Frame::Array(items) => texts(items),
        frame => frame.as_str().unwrap_or_default().to_owned() + "\n",
    };
    answer.iter().map(text).collect()
}

/// The word behind `key` in the first line of `output` that has `line` in it.
#[track_caller]
fn word<'a>(output: &'a str, line: &str, key: &str) -> &'a str {
    let found = output.lines().find(|text| text.contains(line)).and_then(|text| text.split(key).nth(1));
    found.and_then(|rest| rest.split(' ').next()).unwrap_or_else(|| panic!("no {line:?} with {key:?} in:\n{output}"))
}

// Interception under Sentinel: a replica that Sentinel knows, whose full copies come from a source, by `remora attend
// --sentinel` and by `remora replica --delivery auto`.

/// The user of the attended server; the agents are root's.
const SERVER_USER: u32 = 65_534;

/// One host with a primary, two replicas, and the source of one of them. Sentinel knows all three servers.
struct Watched {
    stage: Stage,
    host: Host,
    servers: [Server; 2],
    known: Server,
    sentinels: Sentinels,
    source: Source,
    _net: Net,
}

impl Watched {
    fn new(kind: Kind) -> Option<Watched> {
        require::namespaces()?;
        let net = Net::new().unwrap();
        let host = net.host("pod").unwrap();
        let start = || primary(kind).on(&host).start().unwrap();
        let servers = [start(), start()];
        let known = quick(kind).as_user(SERVER_USER).on(&host).start().unwrap();
        fill_every_type(&mut servers[0].client().unwrap(), 31).unwrap();
        for replica in [&servers[1], &known] {
            replica.replicate(&servers[0]).unwrap();
            replica.wait_for_link(LONG).unwrap();
        }
        let lines = ["sentinel failover-timeout mymaster 3000"];
        let sentinels = Sentinels::start(kind, &servers[0], &[&servers[1], &known], &lines).unwrap();
        let stage = Stage::new();
        // The other replica: the attended one must not be the source's.
        let source = stage.source_on(&host, &servers[1].url(), &[]);
        Some(Watched { stage, host, servers, known, sentinels, source, _net: net })
    }

    fn nothing_was_corrected(&self) {
        for number in 0..3 {
            let log = self.sentinels.log(number);
            assert!(!log.contains("+fix-slave-config"), "{log}");
        }
    }

    /// No Sentinel has corrected this server, unless it had known it before the fail-over: to take that one along is
    /// its own part.
    fn was_not_corrected(&self, server: &Server) {
        let slave = format!(" slave {} ", server.address());
        let has = |log: &str, word: &str| log.lines().any(|line| line.contains(word) && line.contains(&slave));
        for number in 0..3 {
            let log = self.sentinels.log(number);
            let is_known = has(log.split("+switch-master").next().unwrap_or_default(), "+slave");
            assert!(is_known || !has(&log, "+fix-slave-config"), "{log}");
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_known_replica_is_served_and_sentinel_sees_its_primary_all_the_time() {
    at_once(require::kinds(), |kind| {
        let Some(scene) = Watched::new(kind) else { return };
        let Watched { stage, host, servers, known, sentinels, source, .. } = &scene;
        let rules = ["intercept", "add", "--server-uid", &SERVER_USER.to_string(), "--agent-uid", "0"];
        stage.start(Some(host), &rules).wait_for_success(LONG).unwrap();
        let list = sentinels.list();
        let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
        let (url, address, token) = (known.url(), source.address.to_string(), stage.token.display().to_string());
        let args = ["attend", "--server", &url, "--source", &address, "--token-file", &token];
        let mut agent = stage.start(Some(host), &[&args[..], &group].concat());
        agent.wait_for_event("attending", LONG).unwrap();

        // A full copy: it has lost its position and its data.
        let before = syncs(&servers[0]).0;
        let mut client = known.client().unwrap();
        client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        client.ok(&["FLUSHALL"]).unwrap();
        known.replicate(&servers[0]).unwrap();
        agent.wait_for_line("new connections come here again", LONG).unwrap();
        known.wait_for_link(LONG).unwrap();
        assert_same_data(&servers[0], known);
        assert_eq!(syncs(&servers[0]).0, before, "{kind}: no full copy of the primary\n{}", agent.output());
        assert_eq!(number(&servers[1], "sync_full"), 1, "{kind}: the source's");

        // It follows a fail-over by Sentinel's own hand, to a server at another port.
        let former = sentinels.primary(0).unwrap();
        sentinels.fail_over().unwrap();
        let now = sentinels.wait_for_another(&former, SOON).unwrap();
        let (promoted, follower) =
            if now == known.address().to_string() { (known, &servers[1]) } else { (&servers[1], known) };
        wait_until("the follower to follow", SOON, || {
            let port = follower.fact("master_port")?;
            Ok(if port == promoted.port().to_string() { Ok(()) } else { Err(port) })
        })
        .unwrap();
        follower.wait_for_link(LONG).unwrap();
        promoted.client().unwrap().ok(&["SET", "after", "1"]).unwrap();
        assert_same_data(promoted, follower);
        scene.nothing_was_corrected();
    });
}

/// The user of a server that no Sentinel knows.
const NEW_USER: u32 = SERVER_USER - 1;

impl Watched {
    /// A server that no Sentinel knows, which loads so slowly that a fail-over comes before its end, and rules for it.
    fn new_server(&self, kind: Kind) -> Server {
        let user = NEW_USER.to_string();
        let rules = ["intercept", "add", "--server-uid", &user, "--agent-uid", "0"];
        self.stage.start(Some(&self.host), &rules).wait_for_success(LONG).unwrap();
        let server = quick(kind).as_user(NEW_USER).config("repl-diskless-load", "swapdb");
        let server = server.on(&self.host).start().unwrap();
        load_slowly(&server, 20_000);
        server
    }

    fn attend(&self, server: &Server) -> Agent {
        let list = self.sentinels.list();
        let (url, address, token) =
            (server.url(), self.source.address.to_string(), self.stage.token.display().to_string());
        let args = ["attend", "--server", &url, "--source", &address, "--token-file", &token];
        let group = ["--sentinel", &list, "--sentinel-name", "mymaster", "--retry-for", "10s"];
        let mut agent = self.stage.start(Some(&self.host), &[&args[..], &group].concat());
        agent.wait_for_event("attending", LONG).unwrap();
        agent
    }

    /// Kills the primary, and waits until another one takes its place.
    fn lose_the_primary(&mut self) {
        self.servers[0].kill().unwrap();
        self.sentinels.wait_for_another(&self.servers[0].address().to_string(), SOON).unwrap();
    }
}

/// The server follows this primary and is in step, and Sentinel knows it then.
#[track_caller]
fn taken_along(scene: &Watched, server: &Server, agent: &Agent) {
    // On a busy machine Sentinel may replace the new primary too.
    let followed = wait_until("the server to be in step with the new primary", LONG, || {
        let (now, follows, link) = (scene.sentinels.primary(0)?, follows(server), server.fact("master_link_status")?);
        let primary = [&scene.servers[1], &scene.known].into_iter().find(|at| at.address().to_string() == now);
        Ok(match primary {
            Some(primary) if follows == now && link == "up" => Ok(primary),
            _ => Err(format!("{follows} {link}, and {now} is the primary")),
        })
    });
    let primary = followed.unwrap_or_else(|error| panic!("{error}\n{}", agent.output()));
    assert_same_data(primary, server);
    wait_until("Sentinel to know the server", SOON, || {
        let known = texts(&scene.sentinels.client(0)?.list(&["SENTINEL", "REPLICAS", "mymaster"])?);
        let own = format!("{}\n", server.port());
        Ok(if known.contains(&own) { Ok(()) } else { Err(known) })
    })
    .unwrap();
}

#[test]
#[ignore = "long: make test-all"]
fn a_new_server_whose_primary_dies_before_sentinel_knows_it_is_taken_along() {
    at_once(require::kinds(), |kind| {
        let Some(mut scene) = Watched::new(kind) else { return };
        let server = scene.new_server(kind);
        let mut agent = scene.attend(&server);
        server.replicate(&scene.servers[0]).unwrap();
        agent.wait_for_event("copy_served", LONG).unwrap();
        wait_until_loading(&server);
        scene.lose_the_primary();
        load_slowly(&server, 0);
        taken_along(&scene, &server, &agent);
        says(&agent.output(), &["it was pointed at the new primary"]);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_waits_for_a_primary_that_was_replaced_is_taken_along() {
    let Some(kind) = require::redis() else { return };
    let Some(mut scene) = Watched::new(kind) else { return };
    scene.source.agent.kill().unwrap();
    let server = scene.new_server(kind);
    let mut agent = scene.attend(&server);
    // The primary itself serves the copy.
    server.replicate(&scene.servers[0]).unwrap();
    agent.wait_for_line("the source cannot serve it", LONG).unwrap();
    wait_until_loading(&server);
    scene.lose_the_primary();
    load_slowly(&server, 0);
    taken_along(&scene, &server, &agent);
    drop(agent);

    // One that was told of the dead primary, by an agent that never saw it alive.
    let late = quick(kind).as_user(NEW_USER).on(&scene.host).start().unwrap();
    let agent = scene.attend(&late);
    late.replicate(&scene.servers[0]).unwrap();
    taken_along(&scene, &late, &agent);
    // The other one is Sentinel's by now, or was before: the primary, which served it, lists it.
    [&server, &late].into_iter().for_each(|server| scene.was_not_corrected(server));
}

#[test]
#[ignore = "long: make test-all"]
fn a_known_replica_is_renewed_by_interception_without_rules_and_longer_than_sentinel_waits() {
    at_once(require::kinds(), |kind| {
        let Some(scene) = Watched::new(kind) else { return };
        let list = scene.sentinels.list();
        let options = ["--sentinel", &list, "--sentinel-name", "mymaster", "--delivery", "auto", "--replace"];
        let before = syncs(&scene.servers[0]);
        // Some hundred keys.
        crate::kit::load_slowly(&scene.known, 20_000);
        let began = std::time::Instant::now();
        let known = &scene.known;
        let mut agent = scene.stage.replica_on(&scene.host, &known.url(), scene.source.address, &options);
        succeeds(&mut agent, known);
        let (took, said) = (began.elapsed(), agent.output());
        says(&said, &["delivery by interception: Sentinel knows the server as a replica of mymaster"]);
        println!("{kind}: {:.1} s, with a failover-timeout of 3 s", took.as_secs_f64());
        assert!(took > Duration::from_secs(4), "{took:?}: too quick to show anything");
        assert_eq!(syncs(&scene.servers[0]).0, before.0, "{kind}: no full copy of the primary\n{said}");
        assert_eq!(syncs(&scene.servers[0]).1, before.1 + 1, "{kind}: the hand-off\n{said}");
        assert_eq!(number(&scene.servers[1], "sync_full"), 1, "{kind}: the source's");
        assert_same_data(&scene.servers[0], known);
        scene.nothing_was_corrected();

        // A server that no Sentinel knows.
        let new = quick(kind).as_user(SERVER_USER).on(&scene.host).start().unwrap();
        let mut agent = scene.stage.replica_on(&scene.host, &new.url(), scene.source.address, &options);
        succeeds(&mut agent, &new);
        says(&agent.output(), &["delivery by the link", "no Sentinel that is named here knows it"]);
        assert_same_data(&scene.servers[0], &new);
    });
}

// A fail-over in the middle of each phase of a sync: the server ends as an exact replica of the new primary, or the
// agent ends with the right code and a second run makes it one.

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

// `remora replica --sentinel`: where the server is handed over to, and what Sentinel makes of it.

#[test]
#[ignore = "long: make test-all"]
fn a_new_server_is_handed_over_to_the_primary_of_that_moment_and_sentinel_leaves_it_there() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 3000", NEVER_DOWN]);
        let source = scene.source(&[]);
        let server = scene.new_server();
        load_slowly(&server, 2_000);
        let writer = steady_writer(&scene.servers[0]);
        let mut agent = scene.replica(&server, &source, &["--rewrite-config"]);
        wait_until_loading(&server);
        load_slowly(&server, 0);
        succeeds(&mut agent, &server);
        writer.stop().unwrap();
        assert_eq!(follows(&server), scene.servers[0].address().to_string());
        assert_same_data(&scene.servers[0], &server);
        let file = std::fs::read_to_string(server.folder().join("server.conf")).unwrap();
        assert!(file.contains(&format!("replicaof 127.0.0.1 {}", scene.servers[0].port())), "{file}");

        // Sentinel finds it, and has nothing to correct for longer than its fail-over time.
        scene.wait_for_replicas(3);
        std::thread::sleep(Duration::from_secs(5));
        for number in 0..3 {
            let log = scene.sentinels.log(number);
            let own = format!("127.0.0.1:{}", server.port());
            assert!(!log.lines().any(|line| line.contains("fix-slave") && line.contains(&own)), "{log}");
        }
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_signal_ends_the_stay_beside_a_server_that_sentinel_does_not_get_to_know() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &[NEVER_DOWN]);
        let source = scene.source(&[]);
        // The primary does not show it to Sentinel.
        let server = Server::builder(kind).config("replica-announced", "no").start().unwrap();
        let mut agent = scene.replica(&server, &source, &[]);
        agent.wait_for_event("sentinel_awaited", LONG).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, 7);
        // It did not end because its own limit was over, which it would name.
        says(&said, &["stopped before a Sentinel knows the server", "stopped by SIGTERM", "far enough to be finished"]);
        assert_eq!(follows(&server), scene.servers[0].address().to_string());
        assert_same_data(&scene.servers[0], &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_sentinel_that_has_not_heard_of_a_fail_over_does_not_count() {
    at_once(require::kinds(), |kind| {
        let mut scene = Scene::new(kind, &["sentinel failover-timeout mymaster 10000"]);
        let former = scene.servers[0].address().to_string();
        scene.servers[0].kill().unwrap();
        scene.sentinels.wait_for_another(&former, SOON).unwrap();
        // It knows the former primary alone, which tells it nothing of the others.
        let late = Sentinels::one(kind, &scene.servers[0], &[]).unwrap();
        assert_eq!(late.primary(0).unwrap(), former);
        let source = scene.source(&[]);
        let server = scene.new_server();
        let list = format!("{},{}", late.list(), scene.sentinels.list());
        let group = ["--sentinel", &list, "--sentinel-name", sentinel::NAME];
        let mut agent = scene.stage.replica(&server.url(), source.address, &group);
        let said = succeeds(&mut agent, &server);
        says(&said, &["the Sentinels disagree"]);
        assert_eq!(late.primary(0).unwrap(), former, "it has not heard of the others meanwhile");
        assert_eq!(follows(&server), scene.primary().address().to_string(), "{said}");
        assert_same_data(scene.primary(), &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_with_the_password_for_its_primary_may_follow_the_one_that_sentinel_names() {
    let Some(kind) = require::redis() else { return };
    let build = || primary(kind).require_pass("pa55").master_auth(None, "pa55");
    let servers = [build().start().unwrap(), build().start().unwrap()];
    servers[1].replicate(&servers[0]).unwrap();
    servers[1].wait_for_link(LONG).unwrap();
    let auth = ["sentinel auth-pass mymaster pa55", "requirepass s3cret", "sentinel sentinel-pass s3cret"];
    let sentinels = Sentinels::guarded(kind, &servers[0], &[&servers[1]], &auth, "s3cret").unwrap();
    let stage = Stage::new();
    let (pw, spw) = (stage.secret("pw", "pa55\n"), stage.secret("spw", "s3cret\n"));
    let login = ["--password-file", &pw, "--sentinel-password-file", &spw];
    let source = stage.source_of_group(None, &sentinels, &login);
    let server = build().start().unwrap();
    let list = sentinels.list();
    let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
    // Beside a replica the source announces another address than its own: without Sentinel that needs --expect-primary.
    let mut agent = stage.replica(&server.url(), source.address, &[&group[..], &login[..]].concat());
    succeeds(&mut agent, &server);
    assert_same_data(&servers[0], &server);

    let wrong = stage.secret("wrong", "nonsense\n");
    let login = ["--password-file", &pw, "--sentinel-password-file", &wrong, "--replace"];
    let mut agent = stage.replica(&server.url(), source.address, &[&group[..], &login[..]].concat());
    says(&ends(&mut agent, 4), &["--sentinel-password-file"]);
}

#[test]
fn sentinels_that_speak_tls_are_asked_by_it() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let (files, _) = server::certificates(stage.folder(), &["127.0.0.1".parse().unwrap()]).unwrap();
    let top = primary(kind).start().unwrap();
    let port = remora_lab::scratch::free_port().unwrap();
    let lines = [
        format!("tls-port {port}"),
        format!("tls-ca-cert-file {}", files.ca.display()),
        format!("tls-cert-file {}", files.certificate.display()),
        format!("tls-key-file {}", files.key.display()),
        "tls-auth-clients optional".to_owned(),
    ];
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let _sentinel = Sentinels::one(kind, &top, &lines).unwrap();
    let source = stage.source(&top.url(), &[]);
    let server = Server::start(kind).unwrap();
    let (ca, list) = (files.ca.display().to_string(), format!("rediss://127.0.0.1:{port}"));
    let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
    let mut agent = stage.replica(&server.url(), source.address, &[&group[..], &["--sentinel-tls-ca", &ca]].concat());
    succeeds(&mut agent, &server);
    let mut agent = stage.replica(&server.url(), source.address, &[&group[..], &["--replace"]].concat());
    let said = ends(&mut agent, 4);
    assert!(said.contains("--sentinel-tls-ca"), "{said}");
}

#[test]
fn a_server_without_a_configuration_file_is_refused_and_one_that_cannot_write_it_is_named() {
    let Some(kind) = require::redis() else { return };
    let top = primary(kind).start().unwrap();
    let source = Source::start(&top, &[]);
    // As a user that may not write its folder any more.
    let server = Server::start(kind).unwrap();
    let path = server.folder().join("server.conf");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let mut agent = source.replica(&server, &["--rewrite-config"]);
    let said = ends(&mut agent, 4);
    says(&said, &["CONFIG REWRITE", "its configuration file was not written", "follows the primary"]);
    assert_same_data(&top, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn a_known_replica_whose_sync_sentinel_would_undo_is_refused_with_the_way_out() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 1000", NEVER_DOWN]);
        let source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), "found by the Sentinels", "server="));
        let known = &scene.servers[3 - sits];
        let said = ends(&mut scene.replica(known, &source, &["--replace"]), 3);
        says(&said, &["Sentinel knows it as a replica of mymaster", "remora attend", "failover-timeout"]);
        let said = ends(&mut scene.replica(known, &source, &["--replace", "--stay"]), 3);
        says(&said, &["--stay"]);
        let detached = ["--replace", "--on-failure", "detached"];
        says(&ends(&mut scene.replica(known, &source, &detached), 3), &["--on-failure detached"]);
        assert_eq!(follows(known), scene.servers[0].address().to_string(), "it was not touched");
        assert_eq!(number(known, "master_sync_in_progress"), 0);
    });
}

#[test]
fn a_known_replica_whose_sync_is_short_is_made_anew() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 60000", NEVER_DOWN]);
        let before = number(&scene.servers[0], "sync_full");
        let source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), "found by the Sentinels", "server="));
        let known = &scene.servers[3 - sits];
        let mut agent = scene.replica(known, &source, &["--replace"]);
        succeeds(&mut agent, known);
        assert_same_data(&scene.servers[0], known);
        assert_eq!(number(&scene.servers[0], "sync_full"), before, "{kind}");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn the_failover_timeout_is_raised_for_a_sync_and_put_back_also_by_the_next_agent() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 1000", NEVER_DOWN]);
        let source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), "found by the Sentinels", "server="));
        let known = &scene.servers[3 - sits];
        load_slowly(known, 50_000);
        let more = ["--replace", "--extend-failover-timeout"];
        let mut agent = scene.replica(known, &source, &more);
        wait_until_loading(known);
        let time = |number: usize| {
            let fields = scene.sentinels.client(number).unwrap().list(&["SENTINEL", "MASTER", "mymaster"]).unwrap();
            let at = fields.iter().position(|field| field.as_str() == Some("failover-timeout")).unwrap();
            fields[at + 1].as_str().unwrap().parse::<u64>().unwrap()
        };
        assert!((0..3).all(|number| time(number) > 1000), "{}", agent.output());
        agent.kill().unwrap();
        load_slowly(known, 0);
        let mut agent = scene.replica(known, &source, &more);
        succeeds(&mut agent, known);
        assert!((0..3).all(|number| time(number) == 1000), "{}", agent.output());
        assert_same_data(&scene.servers[0], known);
        let one = scene.sentinels.list().split(',').next().unwrap().to_owned();
        let group = ["--sentinel", &one, "--sentinel-name", "mymaster"];
        let said = ends(&mut scene.stage.replica(&known.url(), source.address, &[&group[..], &more].concat()), 3);
        says(&said, &["knows 3 Sentinels", "--sentinel names 1"]);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_file_names_the_primary_as_sentinel_writes_it() {
    let Some(kind) = require::redis() else { return };
    let scene = Scene::new(kind, &[]);
    let source = scene.source(&[]);
    scene.fail_over();
    let (to, line) = (scene.stage.path("dump.rdb"), scene.stage.path("replicaof.conf"));
    let (address, token, list) =
        (source.address.to_string(), scene.stage.token.display().to_string(), scene.sentinels.list());
    let fetch = ["fetch", "--source", &address, "--token-file", &token, "--to", &to, "--allow-stale"];
    let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
    scene.stage.end(&[&fetch[..], &group, &["--write-replicaof", &line]].concat(), 0);
    let written = std::fs::read_to_string(&line).unwrap();
    assert_eq!(written, format!("replicaof 127.0.0.1 {}\n", scene.primary().port()));
    says(&scene.stage.end(&[&fetch[..], &group].concat(), 2), &["--write-replicaof"]);
}

// `remora source --sentinel`: beside which server the source sits.

const FOUND: &str = "found by the Sentinels";

#[test]
#[ignore = "long: make test-all"]
fn a_source_sits_beside_a_replica_and_its_servers_go_to_the_primary_that_sentinel_names() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &[NEVER_DOWN]);
        let before = number(&scene.servers[0], "sync_full");
        let source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), FOUND, "server="));
        assert_ne!(sits, 0, "beside a replica");
        let server = scene.new_server();
        let mut agent = scene.stage.replica(&server.url(), source.address, &[]);
        succeeds(&mut agent, &server);
        assert_eq!(follows(&server), scene.servers[0].address().to_string());
        assert_same_data(&scene.servers[0], &server);
        assert_eq!(number(&scene.servers[0], "sync_full"), before, "{kind}: no fork of the primary");
        assert_eq!(number(&scene.servers[sits], "sync_full"), 1);
        let mut client = scene.sentinels.client(0).unwrap();
        let listed = texts(&client.list(&["SENTINEL", "REPLICAS", sentinel::NAME]).unwrap());
        assert!(listed.contains(&scene.servers[1].address().to_string()), "{listed}");
        assert!(!listed.contains("127.0.0.1:0"), "Sentinel does not see the source: {listed}");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_of_the_primary_follows_the_fail_over() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &[NEVER_DOWN]);
        let mut source = scene.source(&["--from", "primary"]);
        assert_eq!(scene.at(word(&source.agent.output(), FOUND, "server=")), 0);
        scene.fail_over();
        let line = source.agent.wait_for_event("source_moved", SOON).unwrap();
        assert_eq!(line.split("to=").nth(1).unwrap().split(' ').next().unwrap(), scene.primary().url());
        let server = scene.new_server();
        let mut agent = scene.stage.replica(&server.url(), source.address, &[]);
        succeeds(&mut agent, &server);
        assert_eq!(follows(&server), scene.primary().address().to_string());
        assert_same_data(scene.primary(), &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_whose_server_is_promoted_goes_to_another_replica() {
    at_once(require::kinds(), |kind| {
        // A primary that does not answer for a moment is not replaced a second time.
        let scene = Scene::new(kind, &["sentinel down-after-milliseconds mymaster 10000"]);
        let mut source = scene.source(&["--eager"]);
        source.wait_for_snapshot();
        let sits = scene.at(word(&source.agent.output(), FOUND, "server="));
        scene.servers[3 - sits].configure("replica-priority", "0").unwrap();
        scene.wait_for_priority(&scene.servers[3 - sits], "0");
        scene.fail_over();
        wait_until("every Sentinel to know the new primary", SOON, || {
            let known = (0..3).map(|number| scene.sentinels.primary(number));
            let known = known.collect::<Result<Vec<_>, _>>()?;
            let wanted = scene.servers[sits].address().to_string();
            Ok(if known.iter().all(|one| *one == wanted) { Ok(()) } else { Err(format!("{known:?}, not {wanted}")) })
        })
        .unwrap();
        let line = source.agent.wait_for_event("source_moved", SOON).unwrap();
        assert!(!line.contains(&format!("to={}", scene.servers[sits].url())), "{line}");
        let now = scene.at(line.split("to=").nth(1).unwrap().split(' ').next().unwrap());
        // Sentinels tell the other replica of the new primary in their own time.
        wait_until("the other replica to follow the new primary", SOON, || {
            let followed = follows(&scene.servers[now]);
            let is_new = followed == scene.primary().address().to_string();
            Ok(if is_new { Ok(()) } else { Err(followed) })
        })
        .unwrap();
        scene.servers[now].wait_for_link(SOON).unwrap();
        let before = number(&scene.servers[now], "sync_full");
        let server = scene.new_server();
        let mut agent = scene.stage.replica(&server.url(), source.address, &[]);
        succeeds(&mut agent, &server);
        assert_eq!(follows(&server), scene.primary().address().to_string());
        assert_same_data(scene.primary(), &server);
        assert_eq!(number(&scene.servers[now], "sync_full"), before + 1, "{kind}: the snapshot is a replica's");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_whose_server_dies_goes_on_with_the_stream_at_another_replica() {
    at_once(require::kinds(), |kind| {
        let mut scene = Scene::new(kind, &[]);
        let mut source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), FOUND, "server="));
        let server = scene.new_server();
        let mut agent = scene.stage.replica(&server.url(), source.address, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let generation = source.generation();
        scene.servers[sits].kill().unwrap();
        let mut client = scene.servers[0].client().unwrap();
        for number in 0..1000 {
            client.ok(&["SET", &format!("after {number}"), "1"]).unwrap();
        }
        source.agent.wait_for_event("source_moved", SOON).unwrap();
        source.agent.wait_for_event("stream_resumed", SOON).unwrap();
        assert_same_data(&scene.servers[0], &server);
        assert_eq!(source.generation(), generation, "{kind}: no other snapshot\n{}", source.agent.output());
        assert_eq!(number(&scene.servers[3 - sits], "sync_full"), 0, "{kind}");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_group_without_a_suitable_replica_is_waited_for_and_options_that_contradict_are_refused() {
    let Some(kind) = require::redis() else { return };
    let lone = primary(kind).start().unwrap();
    let sentinels = Sentinels::start(kind, &lone, &[], &[]).unwrap();
    let stage = Stage::new();
    let (list, token) = (sentinels.list(), stage.token.display().to_string());
    let refused = |more: &[&str], code| {
        let args = ["source", "--token-file", &token, "--listen", "127.0.0.1:0", "--wait-for-server", "1s"];
        ends(&mut stage.start(None, &[&args, more].concat()), code)
    };
    let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
    says(&refused(&group, 4), &["no replica that is up and in step", "--from primary"]);
    says(&refused(&["--sentinel", &list, "--sentinel-name", "nope"], 4), &["nope", "--sentinel-name"]);
    says(&refused(&["--sentinel", &list], 2), &["--sentinel-name"]);
    at_once([["--server", "redis://127.0.0.1:1"], ["--announce", "db1:6379"]], |other| {
        says(&refused(&[&group[..], &other[..]].concat(), 2), &[other[0]]);
    });
    says(&refused(&["--server", "redis://127.0.0.1:1", "--from", "primary"], 2), &["--sentinel"]);
    drop(sentinels);
    says(&refused(&group, 4), &["check --sentinel"]);
}

// `remora switch` at a primary that Sentinels watch: it refuses unless they are named, and the name moves with it.

/// The words of a switch that the Sentinels learn of.
fn switch(scene: &Scene, from: &Server, to: &Server, more: &[&str], code: i32) -> String {
    let (from, to, list) = (from.url(), to.url(), scene.sentinels.list());
    let group = ["switch", "--from", &from, "--to", &to, "--sentinel", &list, "--sentinel-name", sentinel::NAME];
    ends(&mut scene.stage.start(None, &[&group[..], more].concat()), code)
}

fn wait_until_all_name(scene: &Scene, primary: &Server) {
    for number in 0..3 {
        assert_eq!(
            scene.sentinels.primary(number).unwrap(),
            primary.address().to_string(),
            "{}",
            scene.sentinels.log(0)
        );
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_name_moves_with_the_switch_and_back_and_no_write_is_lost() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 20000", NEVER_DOWN]);
        let [old, new, other] = &scene.servers[..] else { panic!("three servers") };
        let plain = ["switch", "--from", &old.url(), "--to", &new.url()];
        says(&ends(&mut scene.stage.start(None, &plain), 3), &["Sentinels watch", "--sentinel-name"]);
        says(&switch(&scene, old, new, &["--dry-run"], 0), &["mymaster would move with it", "nothing was changed"]);
        assert_eq!(old.fact("role").unwrap(), "master");

        let copies = syncs(old).0;
        let writer = PairWriter::start([old, new], 500);
        for (from, to) in [(old, new), (new, old)] {
            writer.wait_for_more(200, LONG).unwrap();
            let said = switch(&scene, from, to, &[], 0);
            says(
                &said,
                &[
                    "is the primary since a pause of",
                    "it is mymaster at the Sentinels",
                    "make the other replicas follow it",
                ],
            );
            wait_until_all_name(&scene, to);
            assert_eq!(to.configured("replica-priority").unwrap(), "100");
            for replica in [from, other] {
                wait_until("the replicas to follow the new primary", SOON, || {
                    let port = replica.fact("master_port").unwrap_or_default();
                    Ok(if port == to.port().to_string() { Ok(()) } else { Err(port) })
                })
                .unwrap();
                replica.wait_for_link(LONG).unwrap();
            }
            says(&switch(&scene, from, to, &[], 0), &["is the primary already"]);
        }
        let acknowledged = writer.stop();
        assert_has_all(old, acknowledged).unwrap();
        wait_until("the replica to have all", LONG, || {
            let offsets = (old.fact("master_repl_offset")?, new.fact("master_repl_offset")?);
            Ok(if offsets.0 == offsets.1 { Ok(()) } else { Err(format!("{offsets:?}")) })
        })
        .unwrap();
        assert_same_data(old, new);
        assert_eq!((syncs(old).0, syncs(new).0, syncs(other).0), (copies, 0, 0), "no full copy but the first");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_the_sentinels_would_rather_promote_keeps_the_switch_from_beginning() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 20000", NEVER_DOWN]);
        let [old, new, other] = &scene.servers[..] else { panic!("three servers") };
        other.configure("replica-priority", "1").unwrap();
        scene.wait_for_priority(other, "1");
        let said = switch(&scene, old, new, &[], 3);
        says(&said, &[&other.address().to_string(), "has replica-priority 1"]);
        assert_eq!(
            (old.fact("role").unwrap(), new.configured("replica-priority").unwrap()),
            ("master".into(), "100".into())
        );
        // One that is never promoted may stay so.
        other.configure("replica-priority", "0").unwrap();
        scene.wait_for_priority(other, "0");
        switch(&scene, old, new, &[], 0);
        wait_until_all_name(&scene, new);
    });
}

/// A switch whose command ends in the middle: the Sentinels promote the server that holds all writes.
#[test]
#[ignore = "long: make test-all"]
fn sentinels_finish_a_switch_whose_command_did_not_tell_them() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 20000"]);
        let [old, new, other] = &scene.servers[..] else { panic!("three servers") };
        new.configure("replica-priority", "1").unwrap();
        scene.wait_for_priority(new, "1");
        old.client().unwrap().int(&["INCR", "a number"]).unwrap();
        wait_until("the replica to have all", LONG, || {
            let offsets = (old.fact("master_repl_offset")?, new.fact("slave_repl_offset")?);
            Ok(if offsets.0 == offsets.1 { Ok(()) } else { Err(format!("{offsets:?}")) })
        })
        .unwrap();
        // Where a killed command leaves them: the old one follows nobody's address, and the new one was not promoted.
        old.client().unwrap().ok(&["REPLICAOF", "192.0.2.1", "1"]).unwrap();
        scene.sentinels.wait_for_another(&old.address().to_string(), SOON).unwrap();
        assert_eq!(scene.sentinels.primary(0).unwrap(), new.address().to_string(), "{}", scene.sentinels.log(0));
        assert_eq!(new.client().unwrap().text(&["GET", "a number"]).unwrap(), "1");
        for replica in [old, other] {
            wait_until("the replicas to follow the new primary", SOON, || {
                let port = replica.fact("master_port").unwrap_or_default();
                Ok(if port == new.port().to_string() { Ok(()) } else { Err(port) })
            })
            .unwrap();
        }
    });
}
