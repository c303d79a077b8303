//! What the tests set, wait for and look at on a server.

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Kind, Server, require};

use super::LONG;

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
