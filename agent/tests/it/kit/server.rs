//! What the tests set, wait for and look at on a server.

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Cluster, Host, Kind, Random, Server, cluster, require};

use super::{LONG, Stage, primary};

/// A server that takes a snapshot at once when asked.
pub(crate) fn quick(kind: Kind) -> Builder {
    Server::builder(kind).config("repl-diskless-sync-delay", 0)
}

/// Each kind of server, without the module and with it.
pub(crate) fn kinds_and_module() -> impl Iterator<Item = (Kind, bool)> {
    require::kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)])
}

/// Starts the server, with the module or without.
pub(crate) fn with_or_without(builder: Builder, module: bool) -> Server {
    if module { builder.module("").unwrap().start() } else { builder.start() }.unwrap()
}

/// A number from a server's `INFO`.
pub(crate) fn number(server: &Server, name: &str) -> u64 {
    server.fact(name).unwrap().parse().unwrap()
}

/// How many full copies the primary has made, and how many servers it has continued. Agents, which name no port of their
/// own, are not counted: a source that resumes its stream, and links that keep the backlog for a hand-off.
pub(crate) fn syncs(primary: &Server) -> (u64, u64) {
    let is_server = |line: &&str| {
        line.contains("Partial resynchronization request from")
            && line.contains("accepted")
            && !line.contains("<unknown")
    };
    (number(primary, "sync_full"), primary.log().lines().filter(is_server).count() as u64)
}

/// `host:port` of the primary that a server follows.
pub(crate) fn follows(server: &Server) -> String {
    format!("{}:{}", server.fact("master_host").unwrap(), server.fact("master_port").unwrap())
}

/// Asserts that the server is unchanged: a primary that never got the command to follow another server.
pub(crate) fn assert_untouched(server: &Server) {
    assert_eq!(server.fact("role").unwrap(), "master");
    assert_eq!(server.configured("repl-diskless-load").unwrap(), "disabled");
    assert!(!server.log().contains("REPLICAOF"), "{}", server.log());
}

/// Makes loading so slow on this server that a test can interfere: `microseconds` for each key.
pub(crate) fn load_slowly(server: &Server, microseconds: u32) {
    server.configure("loading-process-events-interval-bytes", "1024").unwrap();
    server.configure("key-load-delay", &microseconds.to_string()).unwrap();
}

/// Waits until the server loads a snapshot.
pub(crate) fn wait_until_loading(server: &Server) {
    wait_until("the server to load", LONG, || {
        let loading = server.info("persistence")?.get("loading").unwrap_or_default().to_owned();
        Ok(if loading == "1" { Ok(()) } else { Err(loading) })
    })
    .unwrap();
}

/// How a server takes its snapshot.
#[derive(Debug, PartialEq)]
pub(crate) enum Way {
    /// Into a file first: its old data are whole until the file is, and it accepts REPLICAOF meanwhile.
    File,
    /// Directly from the link: it refuses every command meanwhile.
    Link,
}

/// How the server takes the snapshot that it receives now. The error is its state if it receives none.
pub(crate) fn way_of_loading(server: &Server) -> Result<Way, String> {
    let (syncing, loading) = (server.fact("master_sync_in_progress"), server.fact("loading"));
    match (syncing.as_deref(), loading.as_deref()) {
        (Ok("1"), Ok("0")) => Ok(Way::File),
        (_, Ok("1")) => Ok(Way::Link),
        state => Err(format!("{state:?}")),
    }
}

// Clusters whose nodes take snapshots at once.

/// Bytes of a key's value.
const VALUE_IN_CLUSTERS: usize = 512;

/// Starts a cluster on this machine's loopback, or on that host.
pub(crate) fn start_cluster(host: Option<&Host>, kind: Kind, shards: usize, replicas: usize) -> Cluster {
    let builder = || match host {
        Some(host) => primary(kind).cluster().on(host),
        None => primary(kind).cluster(),
    };
    Cluster::start(shards, replicas, |_, _| builder().start()).unwrap()
}

/// Sets keys of half a KiB of random data.
pub(crate) fn fill_cluster(cluster: &Cluster, keys: usize, seed: u64) {
    cluster.fill(keys, VALUE_IN_CLUSTERS, seed).unwrap();
}

/// A node's name in its cluster.
pub(crate) fn id(server: &Server) -> String {
    cluster::id(server).unwrap()
}

// Data sets of a known size, which no server compresses.

/// Bytes of one value of [`fill`].
const VALUE: usize = 128 << 10;

/// Bytes of unsent commands at which they are flushed.
const QUEUE: usize = 4 << 20;

/// Fills a server with `keys` values of `bytes` incompressible bytes each, by `remora load`.
pub(crate) fn load(server: &Server, keys: u64, bytes: u64) {
    let (url, keys, bytes) = (server.url(), keys.to_string(), bytes.to_string());
    Stage::new().end(&["load", "--server", &url, "--keys", &keys, "--value-size", &bytes], 0);
}

/// Adds keys of another name.
pub(crate) fn load_small(server: &Server, keys: u64, bytes: usize) {
    let mut random = Random::new(keys);
    set_all(server, (0..keys).map(|number| (format!("small {number}"), random.bytes(bytes))));
}

/// Fills database 0 with `mebibytes` MiB of random data in values of 128 KiB.
pub(crate) fn fill(server: &Server, mebibytes: usize, seed: u64) {
    let mut random = Random::new(seed);
    let keys = mebibytes * (1 << 20) / VALUE;
    set_all(server, (0..keys).map(|number| (format!("noise {number}"), random.bytes(VALUE))));
}

/// Fills database 0 with `keys` keys of half a KiB of random data, each with `word` at its beginning.
pub(crate) fn fill_keys(server: &Server, keys: usize, word: &str) {
    let mut random = Random::new(keys as u64);
    let mut value = || [word.as_bytes(), b" ", &random.bytes(512)].concat();
    set_all(server, (0..keys).map(|number| (format!("key {number}"), value())));
}

fn set_all(server: &Server, pairs: impl Iterator<Item = (String, Vec<u8>)>) {
    let mut client = server.client().unwrap();
    let mut sent = 0;
    for (key, value) in pairs {
        client.queue(&[b"SET".to_vec(), key.into_bytes(), value]);
        sent += 1;
        if client.queued() > QUEUE {
            client.flush().unwrap();
        }
    }
    for _ in 0..sent {
        let answer = client.receive().unwrap();
        assert!(answer.as_error().is_none(), "{answer:?}");
    }
}

/// Writes until the primary's backlog of 16 KiB no longer holds its first MiB. It gives up what its replicas have got
/// when it writes more.
pub(crate) fn write_past_the_backlog(primary: &Server) {
    fill(primary, 4, 4);
    wait_until("the primary to give up its first bytes", LONG, || {
        primary.client()?.ok(&["SET", "one", "more"])?;
        let first = number(primary, "repl_backlog_first_byte_offset");
        Ok(if first > 1 << 20 { Ok(()) } else { Err(first.to_string()) })
    })
    .unwrap();
}
