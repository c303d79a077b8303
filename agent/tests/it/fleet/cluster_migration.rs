//! Clusters that move to the other family, shard by shard, under writes, and back (`remora cluster migrate`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_lab::compare::{Contents, differences_of};
use remora_lab::server::{Builder, Program, wait_until};
use remora_lab::{Agent, Client, Cluster, Host, Kind, Net, Server, require};
use remora_redis::resp::Frame;
use serde_json::Value;

use crate::fleet::versions::{builder, programs};
use crate::kit::{LONG, Source, Stage, ends, fill_cluster, id, number, primary, says, syncs};

const SHARDS: usize = 3;
const KEYS: usize = 1500;

/// The user of the first new node; the agents are root's, as the old nodes are.
const FIRST_USER: u32 = 60_101;

/// The port of the first agent.
const FIRST_PORT: u16 = 7480;

/// Keys of the writer.
const WRITTEN: u64 = 2000;

/// How long a writer tries one write.
const TRY_LIMIT: Duration = Duration::from_secs(20);

/// Writes that are waited for between two steps.
const WRITES: u64 = 500;

/// An old cluster with a source for each shard, and new nodes with an agent beside each.
struct Scene {
    stage: Stage,
    host: Host,
    cluster: Cluster,
    sources: Vec<Source>,
    nodes: Vec<Server>,
    _agents: Vec<Agent>,
    _net: Net,
}

impl Scene {
    fn new(old: impl Fn() -> Builder, new: impl Fn() -> Builder) -> Option<Scene> {
        require::namespaces()?;
        let net = Net::new().unwrap();
        let (stage, host) = (Stage::new(), net.host("hosts").unwrap());
        let cluster = Cluster::start(SHARDS, 0, |_, _| old().cluster().on(&host).start()).unwrap();
        fill_cluster(&cluster, KEYS, 1);
        let sources: Vec<Source> =
            cluster.shards.iter().map(|shard| stage.source_on(&host, &shard.primary.url(), &[])).collect();
        let node = |number: u32| new().cluster().as_user(FIRST_USER + number).on(&host).start().unwrap();
        let nodes: Vec<Server> = (0..).take(SHARDS).map(node).collect();
        let mut scene = Scene { stage, host, cluster, sources, nodes, _agents: Vec::new(), _net: net };
        scene._agents = (0..SHARDS).map(|number| scene.attend(number)).collect();
        scene.write_every_type();
        Some(scene)
    }

    fn of_kinds(old: Kind, new: Kind) -> Option<Scene> {
        Scene::new(|| primary(old), || primary(new))
    }

    /// An agent beside a new node, which knows the sources of all shards.
    fn attend(&self, number: usize) -> Agent {
        let number_of = |first: u32| (first + u32::try_from(number).unwrap()).to_string();
        let (user, port) = (number_of(FIRST_USER), number_of(FIRST_PORT.into()));
        let rules = ["intercept", "add", "--server-uid", &user, "--agent-uid", "0", "--listen-port", &port];
        self.stage.start(Some(&self.host), &rules).wait_for_success(LONG).unwrap();
        let (url, token) = (self.nodes[number].url(), self.stage.token.display().to_string());
        let sources: Vec<String> = self.sources.iter().map(|source| source.address.to_string()).collect();
        let ports: Vec<String> = self.servers().map(|node| node.port().to_string()).collect();
        let others = sources[1..].join(",");
        let mut args = vec!["attend", "--server", &url, "--source", &sources[0], "--sources", &others];
        args.extend(["--token-file", &token, "--listen-port", &port, "--retry-for", "10s", "--convert"]);
        ports.iter().for_each(|port| args.extend(["--primary-port", port]));
        let mut agent = self.stage.start(Some(&self.host), &args);
        agent.wait_for_event("attending", LONG).unwrap();
        agent
    }

    fn olds(&self) -> impl Iterator<Item = &Server> {
        self.cluster.shards.iter().map(|shard| &shard.primary)
    }

    fn servers(&self) -> impl Iterator<Item = &Server> {
        self.olds().chain(&self.nodes)
    }

    /// A few keys of each type in each shard.
    fn write_every_type(&self) {
        let mut client = Follower::new(self.servers());
        for number in 0..60 {
            let name = |kind: &str| format!("{kind}-{number}");
            let long = "long ".repeat(40);
            for words in [
                vec!["HSET", &name("hash"), "field", "value", "other", &long],
                vec!["RPUSH", &name("list"), "one", "two", &long],
                vec!["SADD", &name("set"), "1", "2", "three"],
                vec!["ZADD", &name("zset"), "1", "one", "2.5", "two"],
                vec!["XADD", &name("stream"), "*", "field", &long],
                vec!["SET", &name("expires"), "soon", "EX", "86400"],
            ] {
                client.send(&words).unwrap();
            }
        }
    }

    fn args(&self, to: &[&Server], more: &[&str]) -> Vec<String> {
        let (server, token) = (self.cluster.shards[0].primary.url(), self.stage.token.display().to_string());
        let join = |addresses: Vec<String>| addresses.join(",");
        let sources = join(self.sources.iter().map(|source| source.address.to_string()).collect());
        let to = join(to.iter().map(|node| node.address().to_string()).collect());
        let args =
            ["cluster", "migrate", "--server", &server, "--sources", &sources, "--token-file", &token, "--to", &to];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    fn start(&self, more: &[&str]) -> Agent {
        self.start_to(&self.nodes.iter().collect::<Vec<_>>(), more)
    }

    fn start_to(&self, to: &[&Server], more: &[&str]) -> Agent {
        let args = self.args(to, more);
        self.stage.start(Some(&self.host), &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[track_caller]
    fn end(&self, more: &[&str], code: i32) -> String {
        ends(&mut self.start(more), code)
    }

    fn full_copies(&self) -> Vec<u64> {
        self.servers().map(|server| syncs(server).0).collect()
    }

    /// Asserts that these serve, and that the others follow them.
    #[track_caller]
    fn assert_served_by_new(&self, is_new: bool) {
        let role = |server: &Server| server.fact("role").unwrap();
        let (new, old) = if is_new { ("master", "slave") } else { ("slave", "master") };
        assert_eq!(self.nodes.iter().map(role).collect::<Vec<_>>(), [new; SHARDS]);
        assert_eq!(self.olds().map(role).collect::<Vec<_>>(), [old; SHARDS]);
        self.servers().for_each(|server| assert_eq!(number(server, "unexpected_error_replies"), 0));
    }

    fn server(&mut self, number: usize) -> &mut Server {
        match number.checked_sub(SHARDS) {
            None => &mut self.cluster.shards[number].primary,
            Some(node) => &mut self.nodes[node],
        }
    }

    /// The one that follows this one, by their numbers.
    fn replica_of(&self, primary: usize) -> usize {
        let port = self.servers().nth(primary).unwrap().port().to_string();
        self.servers().position(|server| server.fact("master_port").is_ok_and(|at| at == port)).unwrap()
    }

    /// Kills a primary. Its replica takes its place with all its data, and the cluster takes writes.
    #[track_caller]
    fn replaces_by_a_vote(&mut self, primary: usize) {
        let replica = self.replica_of(primary);
        let of = |server: &Server| {
            let mut client = server.client()?;
            client.ok(&["READONLY"])?;
            Contents::of(&mut client)
        };
        let before = wait_until("the replica to have all", LONG, || {
            let (before, its) = (of(self.servers().nth(primary).unwrap())?, of(self.servers().nth(replica).unwrap())?);
            Ok(if differences_of(&before, &its, 1).is_empty() {
                Ok(before)
            } else {
                Err(format!("{} keys", its.len()))
            })
        })
        .unwrap();
        self.server(primary).kill().unwrap();
        let next = self.servers().nth(replica).unwrap();
        wait_until("the vote", LONG, || {
            let role = next.fact("role")?;
            Ok(if role == "master" { Ok(()) } else { Err(format!("it is a {role}")) })
        })
        .unwrap();
        let after = of(next).unwrap();
        assert!(before.len() > 100, "{} keys", before.len());
        assert_eq!(differences_of(&before, &after, 20), Vec::<String>::new());
        let writer = Writer::beside(self.servers().filter(|server| server.client().is_ok()));
        writer.wait_for(WRITES);
        writer.stop();
    }

    fn is_alone(node: &Server) -> bool {
        node.client().unwrap().text(&["CLUSTER", "NODES"]).unwrap().lines().count() == 1
    }
}

/// A client that follows `MOVED`.
struct Follower {
    clients: BTreeMap<u16, Client>,
    at: u16,
    /// What it saw besides.
    troubles: Vec<String>,
}

impl Follower {
    /// Begins at the first one, which must be in the cluster.
    fn new<'a>(servers: impl Iterator<Item = &'a Server>) -> Follower {
        let clients: Vec<(u16, Client)> = servers.map(|server| (server.port(), server.client().unwrap())).collect();
        let at = clients[0].0;
        Follower { clients: clients.into_iter().collect(), at, troubles: Vec::new() }
    }

    fn send(&mut self, words: &[&str]) -> Result<Frame, String> {
        let until = Instant::now() + TRY_LIMIT;
        loop {
            let client = self.clients.get_mut(&self.at).unwrap();
            client.send(words).map_err(|error| error.to_string())?;
            let text = match client.receive().map_err(|error| error.to_string())? {
                Frame::Error(text) => String::from_utf8_lossy(&text).into_owned(),
                answer => return Ok(answer),
            };
            match text.strip_prefix("MOVED ").and_then(|rest| rest.rsplit_once(':')) {
                Some((where_to, port)) if self.clients.contains_key(&port.parse().unwrap()) => {
                    self.at = port.parse().unwrap();
                    // An address, or a name that is one.
                    let is_address =
                        where_to.split(' ').nth(1).is_some_and(|host| host.parse::<std::net::IpAddr>().is_ok());
                    if !is_address {
                        self.troubles.push(text.clone());
                    }
                }
                // On a busy machine, for moments: a node is behind in what it knows of the slots. Clients ask again.
                _ if text.starts_with("CLUSTERDOWN") => std::thread::sleep(Duration::from_millis(100)),
                _ => {
                    self.troubles.push(text.clone());
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            if Instant::now() >= until {
                let nodes = self.clients.get_mut(&self.at).unwrap().text(&["CLUSTER", "NODES"]);
                return Err(format!("{text} by {}, after {:?}: {nodes:?}", self.at, self.troubles.first()));
            }
        }
    }
}

/// Writes without a pause, and counts what was acknowledged.
struct Writer {
    thread: JoinHandle<(BTreeMap<String, u64>, Follower)>,
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
}

impl Writer {
    fn start(scene: &Scene) -> Writer {
        Writer::beside(scene.servers())
    }

    fn beside<'a>(servers: impl Iterator<Item = &'a Server>) -> Writer {
        let mut follower = Follower::new(servers);
        let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (told, counts) = (Arc::clone(&stop), Arc::clone(&count));
        let thread = std::thread::spawn(move || {
            let mut acknowledged = BTreeMap::new();
            while !told.load(Ordering::Relaxed) {
                let number = counts.load(Ordering::Relaxed) + 1;
                let key = format!("written-{}", number * 7919 % WRITTEN);
                follower.send(&["SET", &key, &number.to_string()]).unwrap();
                acknowledged.insert(key, number);
                counts.store(number, Ordering::Relaxed);
            }
            (acknowledged, follower)
        });
        Writer { thread, stop, count }
    }

    fn wait_for(&self, more: u64) {
        let until = self.count.load(Ordering::Relaxed) + more;
        wait_until("writes", LONG, || {
            let count = self.count.load(Ordering::Relaxed);
            Ok(if count >= until { Ok(()) } else { Err(format!("{count} of {until}")) })
        })
        .unwrap();
    }

    /// Stops, and asserts that the cluster has each key as it was acknowledged last. Returns what it saw besides.
    #[track_caller]
    fn stop(self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        let (acknowledged, mut follower) = self.thread.join().unwrap();
        let mut lost = Vec::new();
        for (key, number) in &acknowledged {
            let found = follower.send(&["GET", key]).unwrap();
            if found.as_str() != Some(&number.to_string()) {
                lost.push(format!("{key}: {number} was acknowledged, and it is {found:?}"));
            }
        }
        assert!(lost.is_empty(), "{} of {}: {:?}", lost.len(), acknowledged.len(), &lost[..lost.len().min(5)]);
        follower.troubles
    }
}

#[track_caller]
fn json(said: &str) -> Value {
    serde_json::from_str(said.lines().find(|line| line.starts_with('{')).unwrap()).unwrap()
}

/// There and back under writes, with one full copy of each old primary: the source's.
#[track_caller]
fn there_and_back(scene: &Scene) {
    let writer = Writer::start(scene);
    writer.wait_for(WRITES);
    let before = scene.full_copies();
    // A dry run changes nothing, and neither does a run that the operator has not agreed to.
    let planned = json(&scene.end(&["--dry-run", "--json"], 0));
    assert_eq!(planned["shards"].as_array().map(Vec::len), Some(SHARDS), "{planned}");
    says(&scene.end(&[], 3), &["a copy from", "--yes"]);
    assert!(scene.nodes.iter().all(Scene::is_alone));
    assert!(scene.servers().all(|server| server.configured("cluster-announce-hostname").unwrap().is_empty()));

    let done = json(&scene.end(&["--yes", "--json"], 0));
    for what in ["copies", "compared", "fail_overs"] {
        assert_eq!(done[what].as_array().map(Vec::len), Some(SHARDS), "{what}: {done}");
    }
    assert_eq!((&done["new_serve"], &done["is_done"]), (&Value::from(SHARDS), &Value::from(true)), "{done}");
    scene.assert_served_by_new(true);
    let copied = scene.full_copies();
    for (number, (now, before)) in copied.iter().zip(&before).enumerate() {
        assert_eq!(now - before, u64::from(number < SHARDS), "server {number}: the source's, and no other");
    }
    println!("fail-overs: {}", done["fail_overs"]);
    let (url, token) = (scene.nodes[0].url(), scene.stage.token.display().to_string());
    let source = scene.sources[0].address.to_string();
    let words = ["cluster", "status", "--server", &url, "--token-file", &token, "--sources", &source];
    let status = ends(&mut scene.stage.start(Some(&scene.host), &words), 0);
    says(&status, &[&format!("{SHARDS} shards are served by {SHARDS} "), &format!("replicas: {SHARDS} ")]);
    writer.wait_for(WRITES);
    says(&scene.end(&[], 0), &["the new nodes serve all 3 shards", "--back"]);

    let done = json(&scene.end(&["--back", "--yes", "--json"], 0));
    assert_eq!((&done["old_serve"], done["fail_overs"].as_array().map(Vec::len)), (&Value::from(SHARDS), Some(SHARDS)));
    scene.assert_served_by_new(false);
    writer.wait_for(WRITES);
    assert_eq!(scene.full_copies(), copied, "the way back needs no full copy");
    let troubles = writer.stop();
    assert!(troubles.is_empty(), "{:?}", &troubles[..troubles.len().min(5)]);
}

fn both() -> Option<(Kind, Kind)> {
    Some((require::redis()?, require::valkey()?))
}

#[test]
fn a_cluster_of_redis_becomes_valkey_under_writes_and_goes_back() {
    let Some((redis, valkey)) = both() else { return };
    let Some(scene) = Scene::of_kinds(redis, valkey) else { return };
    there_and_back(&scene);
}

#[test]
#[ignore = "long: make test-all"]
fn a_cluster_of_valkey_becomes_redis_under_writes_and_goes_back() {
    let Some((redis, valkey)) = both() else { return };
    let Some(scene) = Scene::of_kinds(valkey, redis) else { return };
    there_and_back(&scene);
}

#[test]
#[ignore = "long: make test-all"]
fn a_migration_that_cannot_work_is_refused_and_changes_nothing() {
    let Some((redis, valkey)) = both() else { return };
    let Some(scene) = Scene::of_kinds(redis, valkey) else { return };
    let all: Vec<&Server> = scene.nodes.iter().collect();
    let refused = |to: &[&Server], more: &[&str], words: &[&str]| {
        let options = [&["--yes"], more].concat();
        says(&ends(&mut scene.start_to(to, &options), 3), words);
        assert!(scene.nodes.iter().all(Scene::is_alone));
    };
    refused(&all[..2], &[], &["no new node is left for"]);
    let old = &scene.cluster.shards[0].primary;
    let alone = primary(valkey).on(&scene.host).start().unwrap();
    refused(&[all[0], all[1], &alone], &[], &["not in cluster mode"]);
    let more = primary(valkey).cluster().on(&scene.host).start().unwrap();
    refused(&[all[0], all[1], all[2], &more], &[], &["one too many"]);
    // What may pass is waited for. The bound is shorter here: nothing of it passes.
    let at_once = ["--well-within", "1s"];
    refused(&all, &["--forget", at_once[0], at_once[1]], &["cluster"]);
    // A node that is not empty.
    let mut client = scene.nodes[1].client().unwrap();
    client.ok(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).unwrap();
    wait_until("the node to take writes", LONG, || {
        Ok(client.ok(&["SET", "own", "data"]).map_err(|error| error.to_string()))
    })
    .unwrap();
    client.ok(&["CLUSTER", "DELSLOTSRANGE", "0", "16383"]).unwrap();
    refused(&all, &[], &["holds 1 key:"]);
    client.ok(&["FLUSHALL"]).unwrap();
    // A slot is on its way.
    let to = id(&scene.cluster.shards[1].primary);
    old.client().unwrap().ok(&["CLUSTER", "SETSLOT", "7", "MIGRATING", &to]).unwrap();
    refused(&all, &at_once, &["not well", "slot 7"]);
    old.client().unwrap().ok(&["CLUSTER", "SETSLOT", "7", "STABLE"]).unwrap();
    says(&ends(&mut scene.start_to(&all, &["--dry-run"]), 0), &["a copy from"]);
}

#[test]
#[ignore = "long: make test-all"]
fn a_run_that_is_killed_anywhere_goes_on_when_it_is_started_again() {
    let Some((redis, valkey)) = both() else { return };
    let Some(scene) = Scene::of_kinds(redis, valkey) else { return };
    let writer = Writer::start(&scene);
    let before = scene.full_copies();
    // While the first node takes its data, after it has, when data were compared, and after the first fail-over.
    for words in ["becomes known", "follows", "the same", "serves"] {
        let mut run = scene.start(&["--yes"]);
        match words {
            "becomes known" => wait_until("a node to join", LONG, || {
                let is_alone = scene.nodes.iter().all(Scene::is_alone);
                Ok(if is_alone { Err("all are alone".to_owned()) } else { Ok(()) })
            })
            .unwrap(),
            words => _ = run.wait_for_line(words, LONG).unwrap(),
        }
        run.kill().unwrap();
    }
    scene.end(&["--yes"], 0);
    scene.assert_served_by_new(true);
    for words in ["serves", "serves"] {
        let mut run = scene.start(&["--back", "--yes"]);
        run.wait_for_line(words, LONG).unwrap();
        run.kill().unwrap();
    }
    scene.end(&["--back", "--yes"], 0);
    scene.assert_served_by_new(false);
    for (number, (now, before)) in scene.full_copies().iter().zip(&before).enumerate() {
        assert_eq!(now - before, u64::from(number < SHARDS), "server {number}");
    }
    let troubles = writer.stop();
    assert!(troubles.is_empty(), "{:?}", &troubles[..troubles.len().min(5)]);
}

/// While both families serve, a primary dies twice: an old one, in whose place its new node is voted, and then a new one,
/// in whose place its old node is.
#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_dies_between_the_families_is_replaced_by_a_vote() {
    let Some((redis, valkey)) = both() else { return };
    let Some(mut scene) = Scene::of_kinds(redis, valkey) else { return };
    let writer = Writer::start(&scene);
    let mut run = scene.start(&["--yes"]);
    // The first shard is served by its new node, and the others by the old ones.
    run.wait_for_line("serves", LONG).unwrap();
    run.kill().unwrap();
    writer.wait_for(WRITES);
    // What no replica has when its primary dies is lost by any vote, so nothing is written then.
    let troubles = writer.stop();
    assert!(troubles.is_empty(), "{troubles:?}");
    let serves = |scene: &Scene, number: usize| scene.servers().nth(number).unwrap().fact("role").unwrap() == "master";
    let new = (SHARDS..2 * SHARDS).find(|number| serves(&scene, *number)).unwrap();
    let old = (0..SHARDS).find(|number| serves(&scene, *number)).unwrap();
    scene.replaces_by_a_vote(old);
    // Started again without its data, it asks the new primary for a full copy that it cannot read.
    scene.server(old).restart().unwrap();
    let place = scene.server(old).address().to_string();
    wait_until("the plan to name it", LONG, || {
        let said = scene.end(&["--dry-run"], 0);
        Ok(if said.contains(&format!("{place} does not follow")) { Ok(()) } else { Err(said) })
    })
    .unwrap();
    scene.server(old).kill().unwrap();
    scene.end(&["--yes"], 0);
    let roles: Vec<String> = scene.nodes.iter().map(|node| node.fact("role").unwrap()).collect();
    assert_eq!(roles, ["master"; SHARDS]);
    scene.replaces_by_a_vote(new);
}

/// With servers that the set-up of the other tests does not have.
mod by_command {
    use super::*;

    /// The newest program of a family whose version begins with these numbers.
    fn program(family: &str, beginning: &[u32]) -> Option<Program> {
        let found = programs()
            .into_iter()
            .rfind(|program| program.family().eq_ignore_ascii_case(family) && program.version().starts_with(beginning));
        found.or_else(|| require::skip(&format!("no {family} {beginning:?}")))
    }

    /// Between Redis from 8.0 on and Valkey from 8.1 on nodes go by names, which are taken back at the end.
    fn with_names(old: &Program, new: &Program) {
        let Some(scene) = Scene::new(|| builder(old), || builder(new)) else { return };
        there_and_back(&scene);
        let name = |server: &Server| server.configured("cluster-announce-hostname").unwrap();
        let own = scene.host.address().to_string();
        assert!(scene.servers().all(|server| name(server) == own));
        // Nodes vote for a new primary in the place of the same one once in twice this time, each by its own clock.
        let timeout = scene.nodes[0].configured("cluster-node-timeout").unwrap().parse().unwrap();
        std::thread::sleep(3 * Duration::from_millis(timeout));
        scene.end(&["--yes"], 0);
        let forgets = scene.end(&["--forget", "--yes"], 0);
        says(&forgets, &["leave the cluster", "forgotten"]);
        for node in &scene.nodes {
            assert_eq!(
                (name(node).as_str(), node.configured("cluster-preferred-endpoint-type").unwrap().as_str()),
                ("", "ip")
            );
            assert_eq!(node.client().unwrap().text(&["CLUSTER", "NODES"]).unwrap().lines().count(), SHARDS);
        }
        assert!(scene.olds().all(Scene::is_alone));
        says(&scene.end(&["--forget"], 0), &["have left the cluster"]);
    }

    #[test]
    #[ignore = "by make test-matrix, with the servers of dev/lab/setup/versions"]
    fn redis_8_becomes_valkey_9_by_names() {
        let (Some(redis), Some(valkey)) = (program("Redis", &[8, 2]), program("Valkey", &[9, 1])) else { return };
        with_names(&redis, &valkey);
    }

    #[test]
    #[ignore = "by make test-matrix, with the servers of dev/lab/setup/versions"]
    fn valkey_9_becomes_redis_8_by_names() {
        let (Some(redis), Some(valkey)) = (program("Redis", &[8, 2]), program("Valkey", &[9, 1])) else { return };
        with_names(&valkey, &redis);
    }
}
