//! Interception under Sentinel: a replica that Sentinel knows, whose full copies come from a source, by `remora attend
//! --sentinel` and by `remora replica --delivery auto`.

use remora_lab::{Host, Net, require};

use super::*;
use crate::kit::{at_once, follows, load_slowly, number, quick, says, succeeds, syncs, wait_until_loading};

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
