//! Migration: a server of the other family, or of an older version, becomes an exact replica (`--convert`), and the way
//! back is a partial resynchronisation.
//!
//! And clusters that move to the other family, shard by shard, under writes, and back (`remora cluster migrate`).

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_lab::compare::{Contents, differences_of};
use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::{Abilities, Options, Workload, fill_with};
use remora_lab::{Agent, Client, Cluster, Host, Kind, Net, Server, require};
use remora_redis::resp::Frame;
use serde_json::Value;

use crate::kit::{BACKLOG, LONG, Source, Stage, built_module, ends, fill_cluster, id, number, primary, says, syncs};
use crate::sync::exact::assert_same_content;

/// Commands that the writer sends before and after a switch.
const WRITES: u64 = 2_000;

/// Names another number of thousands, for a long run (`make test-matrix THOUSANDS=700`).
const THOUSANDS: &str = "REMORA_THOUSANDS";

/// Commands a second. The writer adds data as long as a sync lasts, which lasts longer the more data there are.
const RATE: u64 = 1_000;

const LONG_RATE: u64 = 10_000;

/// By then the keys that the writer lets expire soon are gone.
const SHORT_LIVED: Duration = Duration::from_secs(6);

/// What both servers know.
pub(crate) fn of_both(one: &Server, other: &Server) -> Abilities {
    let of = |server: &Server| Abilities::of(&mut server.client().unwrap()).unwrap();
    of(one).and(of(other))
}

/// Thousands of commands in a long run.
fn thousands() -> Option<u64> {
    std::env::var(THOUSANDS).ok().map(|number| number.parse().unwrap())
}

/// Waits until the writer has sent its share.
fn wait_for_writes(writing: &Workload) {
    match thousands() {
        None => writing.wait_for(WRITES),
        Some(number) => (0..number).for_each(|_| writing.wait_for(1_000)),
    }
}

/// Writes every kind of change that both servers know.
pub(crate) fn writer(to: &Server, abilities: Abilities) -> Workload {
    let options = Options {
        big_bytes: 1 << 20,
        abilities: Some(abilities),
        ..Options::seeded(remora_lab::random::seed("workload"))
    };
    Workload::start(to.client().unwrap(), options.rate(if thousands().is_some() { LONG_RATE } else { RATE })).unwrap()
}

/// Makes `new` a replica of `old` under every kind of write, promotes it, lets the old one follow it, and goes back.
/// Full copies: one, for the source.
pub(crate) fn there_and_back(old: &Server, new: &Server) {
    let abilities = of_both(old, new);
    fill_with(&mut old.client().unwrap(), 7, abilities).unwrap();
    let writing = writer(old, abilities);
    wait_for_writes(&writing);
    let source = Source::start(old, &[]);
    let agent = source.replicate(new, &["--convert"]);
    drop(agent);
    wait_for_writes(&writing);
    writing.stop().unwrap();
    assert_same(old, new);
    assert_eq!(number(new, "unexpected_error_replies"), 0);
    source.stop();

    let copies = syncs(old).0;
    switch(old, new);
    let writing = writer(new, abilities);
    wait_for_writes(&writing);
    writing.stop().unwrap();
    assert_same(new, old);
    assert_eq!(syncs(new).0, 0, "the old primary follows without a full copy");
    switch(new, old);
    old.client().unwrap().ok(&["SET", "written last", "at the old primary"]).unwrap();
    assert_same(old, new);
    assert_eq!((syncs(old).0, syncs(new).0), (copies, 0), "the way back needs no full copy");
}

/// Promotes a replica, and has its primary follow it.
fn switch(primary: &Server, replica: &Server) {
    assert_same(primary, replica);
    let said = Stage::new().end(&["switch", "--from", &primary.url(), "--to", &replica.url()], 0);
    says(&said, &["without a full copy"]);
}

/// As [`assert_same_content`]; says what differs.
fn assert_same(primary: &Server, replica: &Server) {
    let compare = || catch_unwind(AssertUnwindSafe(|| assert_same_content(primary, replica)));
    let mut compared = compare();
    // A key that expires while it is read, or a moment apart (Redis 6.2 writes times that count from the command), is
    // gone when they are compared again.
    if compared.is_err() {
        std::thread::sleep(SHORT_LIVED);
        compared = compare();
    }
    if let Err(panic) = compared {
        let of = |server: &Server| Contents::of(&mut server.client().unwrap()).unwrap();
        eprintln!("primary / replica: {:#?}", differences_of(&of(primary), &of(replica), 20));
        resume_unwind(panic);
    }
}

fn both() -> Option<(Kind, Kind)> {
    Some((require::redis()?, require::valkey()?))
}

#[test]
#[ignore = "long: make test-all"]
fn valkey_becomes_redis_and_goes_back_without_another_copy() {
    let Some((redis, valkey)) = both() else { return };
    let (old, new) = (primary(valkey).start().unwrap(), primary(redis).start().unwrap());
    there_and_back(&old, &new);
}

#[test]
#[ignore = "long: make test-all"]
fn redis_becomes_valkey_and_goes_back_without_another_copy() {
    let Some((redis, valkey)) = both() else { return };
    let (old, new) = (primary(redis).start().unwrap(), primary(valkey).start().unwrap());
    there_and_back(&old, &new);
}

/// One command for the sync and the comparison, and one for each switch, as docs/how-to/migrate.md has them.
#[test]
fn one_command_migrates_and_another_one_switches_there_and_back() {
    let Some((redis, valkey)) = both() else { return };
    migrates_and_switches(redis, valkey);
}

#[test]
#[ignore = "long: make test-all"]
fn one_command_migrates_from_valkey_and_another_one_switches_there_and_back() {
    let Some((redis, valkey)) = both() else { return };
    migrates_and_switches(valkey, redis);
}

fn migrates_and_switches(from: Kind, to: Kind) {
    let stage = Stage::new();
    let (old, new) = (primary(from).start().unwrap(), primary(to).start().unwrap());
    let abilities = of_both(&old, &new);
    fill_with(&mut old.client().unwrap(), 3, abilities).unwrap();
    old.configure("timeout", "77").unwrap();
    old.client().unwrap().ok(&["ACL", "SETUSER", "of-the-old-one"]).unwrap();
    let writing = writer(&old, abilities);
    wait_for_writes(&writing);
    let (one, other) = (old.url(), new.url());
    let said = stage.end(&["migrate", "--dry-run", "--from", &one, "--to", &other], 0);
    says(&said, &["of-the-old-one", "timeout \"77\" and \"0\"", "nothing was touched"]);
    assert_eq!(new.fact("role").unwrap(), "master");
    let mut migrates = stage.start(None, &["migrate", "--log-json", "--from", &one, "--to", &other]);
    // The comparison of what is written meanwhile has no end on a busy machine.
    migrates.wait_for_line(r#""event":"handing_over""#, LONG).unwrap();
    writing.stop().unwrap();
    says(&ends(&mut migrates, 0), &["is an exact replica of", "next: remora switch --from"]);
    // Again: there is nothing to copy.
    says(&stage.end(&["migrate", "--from", &one, "--to", &other], 0), &["no sync is needed", "exact replica"]);
    let copies = syncs(&old).0;
    stage.end(&["switch", "--from", &one, "--to", &other], 0);
    let writing = writer(&new, abilities);
    wait_for_writes(&writing);
    writing.stop().unwrap();
    stage.end(&["switch", "--from", &other, "--to", &one], 0);
    assert_same(&old, &new);
    assert_eq!((syncs(&old).0, syncs(&new).0), (copies, 0));
}

#[test]
#[ignore = "long: make test-all"]
fn a_migration_reads_from_a_source_that_runs_already() {
    let Some((redis, valkey)) = both() else { return };
    let (old, new) = (primary(redis).start().unwrap(), primary(valkey).start().unwrap());
    fill_with(&mut old.client().unwrap(), 5, of_both(&old, &new)).unwrap();
    let source = Source::start(&old, &[]);
    let (address, token) = (source.address.to_string(), source.token().display().to_string());
    let ends = ["--from", &old.url(), "--to", &new.url()].map(String::from);
    let words = ["migrate", &ends[0], &ends[1], &ends[2], &ends[3], "--source", &address, "--token-file", &token];
    says(&Stage::new().end(&words, 0), &["is an exact replica of"]);
    assert_eq!(syncs(&old).0, 1);
    assert_same(&old, &new);
    source.stop();
}

#[test]
fn a_migration_that_is_refused_ends_with_the_agents_code_and_leaves_no_process() {
    let Some((redis, valkey)) = both() else { return };
    let stage = Stage::new();
    let (old, new) = (primary(valkey).start().unwrap(), primary(redis).start().unwrap());
    new.client().unwrap().ok(&["SET", "own", "data"]).unwrap();
    let said = stage.end(&["migrate", "--from", &old.url(), "--to", &new.url()], 3);
    says(&said, &["--replace", "the replica agent has failed"]);
    says(&stage.end(&["migrate", "--from", &old.url(), "--to", &old.url()], 3), &["the same server"]);
    // Killed, it leaves no source behind.
    let mut agent = stage.start(None, &["migrate", "--replace", "--from", &old.url(), "--to", &new.url()]);
    let connected = |server: &Server| server.client()?.text(&["CLIENT", "LIST"]).map(|list| list.lines().count());
    wait_until("the agents at work", LONG, || {
        let count = connected(&old)?;
        Ok(if count > 1 { Ok(()) } else { Err(format!("{count} connections")) })
    })
    .unwrap();
    agent.kill().unwrap();
    wait_until("the source to end", LONG, || {
        let count = connected(&old)?;
        Ok(if count == 1 { Ok(()) } else { Err(format!("{count} connections")) })
    })
    .unwrap();
}

#[test]
fn what_the_server_cannot_hold_is_refused_before_it_is_touched_or_left_out_if_asked() {
    let Some((redis, valkey)) = both() else { return };
    let (old, new) = (primary(valkey).start().unwrap(), primary(redis).start().unwrap());
    let client = &mut old.client().unwrap();
    client.ok(&["SET", "string", "value"]).unwrap();
    client.int(&["HSET", "hash", "field", "value", "other", "value"]).unwrap();
    let source = Source::start(&old, &[]);
    new.client().unwrap().ok(&["SET", "own", "data"]).unwrap();
    // Without the option, the versions alone are a reason.
    says(&ends(&mut source.replica(&new, &["--replace"]), 3), &["RDB version", "--convert"]);
    client.call(&["HPEXPIREAT", "hash", "4102444800000", "FIELDS", "1", "field"]).unwrap();
    for more in [&["--convert", "--replace"][..], &["--convert", "--replace", "--dry-run"]] {
        says(&ends(&mut source.replica(&new, more), 3), &["fields that expire", "1 hash"]);
    }
    // The command that made them is known to the primary's counters.
    let more = ["--convert", "--replace", "--leave-out", "field-expiry"];
    says(&ends(&mut source.replica(&new, &more), 3), &["HPEXPIREAT", "CONFIG RESETSTAT"]);
    assert_eq!(new.client().unwrap().bytes(&["GET", "own"]).unwrap(), Some(b"data".to_vec()));
    client.ok(&["CONFIG", "RESETSTAT"]).unwrap();
    says(&ends(&mut source.replica(&new, &more), 0), &["left out: a hash whose fields expire", "hash"]);
    let read = |name: &str| new.client().unwrap().list(&["HVALS", name]).unwrap().len();
    assert_eq!((read("hash"), new.client().unwrap().bytes(&["GET", "own"]).unwrap()), (2, None));
}

/// A key of a module's type is found in the middle of the snapshot only. The server loads from a file then.
#[test]
fn a_refusal_in_the_middle_of_the_snapshot_costs_the_server_nothing() {
    let Some((redis, valkey)) = both() else { return };
    let stage = Stage::new();
    let old = primary(valkey).config("loadmodule", built_module(&stage, "typed")).start().unwrap();
    let client = &mut old.client().unwrap();
    client.ok(&["SET", "string", "value"]).unwrap();
    client.ok(&["TYPED.SET", "typed", "1"]).unwrap();
    let new = primary(redis).start().unwrap();
    new.client().unwrap().ok(&["SET", "own", "data"]).unwrap();
    let source = Source::start(&old, &[]);
    says(
        &ends(&mut source.replica(&new, &["--convert", "--replace"]), 3),
        &["module type", "typed", "--leave-out module-keys"],
    );
    let read = |name: &str| new.client().unwrap().bytes(&["GET", name]).unwrap();
    assert_eq!((read("own"), read("string")), (Some(b"data".to_vec()), None));
    assert_eq!(new.fact("role").unwrap(), "master");
    let more = ["--convert", "--replace", "--leave-out", "module-keys"];
    // It is no exact replica then, and the sync says so.
    let said = ends(&mut source.replica(&new, &more), 6);
    says(
        &said,
        &["left out: a value of the module type", "not an exact replica", "the primary holds 2 keys", "and it 1"],
    );
    assert_eq!((read("own"), read("string")), (None, Some(b"value".to_vec())));
}

#[test]
fn a_command_that_the_server_does_not_know_ends_the_sync_before_it() {
    let Some((redis, valkey)) = both() else { return };
    for words in
        [&["SET", "conditional", "new", "IFEQ", "old"][..], &["HSETEX", "hash", "EX", "100", "FIELDS", "1", "f", "v"]]
    {
        let (old, new) = (primary(valkey).start().unwrap(), primary(redis).start().unwrap());
        let client = &mut old.client().unwrap();
        client.ok(&["SET", "conditional", "old"]).unwrap();
        let source = Source::start(&old, &[]);
        let mut agent = source.replica(&new, &["--convert", "--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        client.ok(&["SET", "before", "it"]).unwrap();
        client.call(words).unwrap();
        client.ok(&["SET", "after", "it"]).unwrap();
        says(&ends(&mut agent, 3), &[words[0], "which the server does not know", "offset"]);
        let read = |name: &str| new.client().unwrap().bytes(&["GET", name]).unwrap();
        assert_eq!((read("before"), read("after")), (Some(b"it".to_vec()), None), "{words:?}");
        assert_eq!(new.fact("role").unwrap(), "master", "it is detached");
        assert_eq!(number(&new, "unexpected_error_replies"), 0);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_older_redis_follows_a_newer_valkey_over_tcp_and_from_a_state_directory() {
    let Some((redis, valkey)) = both() else { return };
    let old = primary(valkey).config("repl-backlog-size", BACKLOG).start().unwrap();
    let plain = [Server::builder(redis).start().unwrap(), Server::builder(redis).start().unwrap()];
    let abilities = of_both(&old, &plain[0]);
    fill_with(&mut old.client().unwrap(), 11, abilities).unwrap();
    let source = Source::start(&old, &[]);
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state").display().to_string();
    let mut agents = [
        source.replica(&plain[0], &["--convert", "--transport", "tcp"]),
        source.replica(&plain[1], &["--convert", "--state-dir", &state]),
    ];
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    for replica in &plain {
        replica.wait_for_link(LONG).unwrap();
        assert_same(&old, replica);
    }
    assert_eq!(syncs(&old).0, 1, "one snapshot for both");
}

mod by_command {
    use std::collections::BTreeMap;
    use std::fmt::Write as _;

    use remora_lab::server::{Program, project_root};

    use super::*;
    use crate::fleet::versions::{builder, programs};

    /// Where the table is written. It is kept as COMPAT.md.
    const TABLE: &str = "target/COMPAT.md";

    /// What stands above it.
    const HEAD: &str = "\
# Which server becomes which

Written by `make test-matrix`, which plays each pair that this machine has servers for. Each cell is one run: the server of the row is filled with all types and encodings that both know, and the
tests' random writer (`dev/lab/src/workload/`) writes to it, as far as both know its commands. The server of the column becomes its replica by `remora replica --convert`, follows it by its own replication, and takes its place by `remora
switch`. It is written to, and the first one takes its place back. After each step all data of both are compared by `remora verify`, and no server may have served a full copy but the one for the
source, nor have failed to execute a command.

**yes**: all of that. What the server of a column cannot hold at all is refused before anything is changed: [docs/how-to/migrate.md](docs/how-to/migrate.md#what-is-refused).

";

    /// A family and the first two numbers of a version.
    fn release(program: &Program) -> String {
        let [major, minor, _] = program.version();
        format!("{} {major}.{minor}", program.family())
    }

    fn dotted(program: &Program) -> String {
        program.version().map(|number| number.to_string()).join(".")
    }

    #[test]
    #[ignore = "a quarter of an hour for a dozen of releases: make test-matrix"]
    fn every_release_becomes_every_other_and_goes_back() {
        // The newest of each release.
        let releases: BTreeMap<String, Program> =
            programs().into_iter().map(|program| (release(&program), program)).collect();
        let names: Vec<&String> = releases.keys().collect();
        let columns = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" | ");
        let versions = releases.values().map(|program| format!("{} {}", program.family(), dotted(program)));
        let versions = versions.collect::<Vec<_>>().join(", ");
        let mut table =
            format!("{HEAD}Servers: {versions}.\n\n| from \\ to | {columns} |\n|---|{}\n", "---|".repeat(names.len()));
        let mut bad = Vec::new();
        for (from, old) in &releases {
            let _ = write!(table, "| {from} |");
            for (to, new) in &releases {
                if from == to {
                    table.push_str(" |");
                    continue;
                }
                let played = catch_unwind(AssertUnwindSafe(|| {
                    there_and_back(&builder(old).start().unwrap(), &builder(new).start().unwrap());
                }));
                println!("{from} to {to} and back: {}", if played.is_ok() { "exact" } else { "NOT exact" });
                table.push_str(if played.is_ok() { " yes |" } else { " **no** |" });
                if played.is_err() {
                    bad.push(format!("{from} to {to}"));
                }
            }
            table.push('\n');
        }
        let path = project_root().join(TABLE);
        std::fs::write(&path, &table).unwrap();
        println!("{table}\nwritten to {}", path.display());
        assert!(bad.is_empty(), "{bad:?}");
    }

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
        a_cluster_there_and_back(&scene);
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
const CLUSTER_WRITES: u64 = 500;

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
        writer.wait_for(CLUSTER_WRITES);
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
fn a_cluster_there_and_back(scene: &Scene) {
    let writer = Writer::start(scene);
    writer.wait_for(CLUSTER_WRITES);
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
    writer.wait_for(CLUSTER_WRITES);
    says(&scene.end(&[], 0), &["the new nodes serve all 3 shards", "--back"]);

    let done = json(&scene.end(&["--back", "--yes", "--json"], 0));
    assert_eq!((&done["old_serve"], done["fail_overs"].as_array().map(Vec::len)), (&Value::from(SHARDS), Some(SHARDS)));
    scene.assert_served_by_new(false);
    writer.wait_for(CLUSTER_WRITES);
    assert_eq!(scene.full_copies(), copied, "the way back needs no full copy");
    let troubles = writer.stop();
    assert!(troubles.is_empty(), "{:?}", &troubles[..troubles.len().min(5)]);
}

fn both_clusters() -> Option<(Kind, Kind)> {
    Some((require::redis()?, require::valkey()?))
}

#[test]
fn a_cluster_of_redis_becomes_valkey_under_writes_and_goes_back() {
    let Some((redis, valkey)) = both_clusters() else { return };
    let Some(scene) = Scene::of_kinds(redis, valkey) else { return };
    a_cluster_there_and_back(&scene);
}

#[test]
#[ignore = "long: make test-all"]
fn a_cluster_of_valkey_becomes_redis_under_writes_and_goes_back() {
    let Some((redis, valkey)) = both_clusters() else { return };
    let Some(scene) = Scene::of_kinds(valkey, redis) else { return };
    a_cluster_there_and_back(&scene);
}

#[test]
#[ignore = "long: make test-all"]
fn a_migration_that_cannot_work_is_refused_and_changes_nothing() {
    let Some((redis, valkey)) = both_clusters() else { return };
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
    let Some((redis, valkey)) = both_clusters() else { return };
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

/// While both_clusters families serve, a primary dies twice: an old one, in whose place its new node is voted, and then
/// a new one, in whose place its old node is.
#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_dies_between_the_families_is_replaced_by_a_vote() {
    let Some((redis, valkey)) = both_clusters() else { return };
    let Some(mut scene) = Scene::of_kinds(redis, valkey) else { return };
    let writer = Writer::start(&scene);
    let mut run = scene.start(&["--yes"]);
    // The first shard is served by its new node, and the others by the old ones.
    run.wait_for_line("serves", LONG).unwrap();
    run.kill().unwrap();
    writer.wait_for(CLUSTER_WRITES);
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
