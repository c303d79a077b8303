//! The source's memory in the hands of the server's child: who may write it, and whose memory it is.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use remora_lab::server::{module_library, wait_until};
use remora_lab::{Kind, Server, assert_same_data, fill_every_type, require};

use crate::kit::{LONG, Source, load, number, primary};
use crate::module::{method, with_module};

/// The user `nobody`, and its group.
const OTHER_USER: u32 = 65534;

/// Packages run the server as a user of its own. Its child must write the table of a source that runs as another user.
fn a_server_of_another_user_walks(kind: Kind) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let library = folder.path().join("libremora_module.so");
    fs::copy(module_library().unwrap(), &library).unwrap();
    fs::set_permissions(&library, Permissions::from_mode(0o755)).unwrap();

    let primary = primary(kind).config("loadmodule", library.display()).as_user(OTHER_USER).start().unwrap();
    let owner = fs::metadata(format!("/proc/{}", primary.pid())).unwrap().uid();
    assert_eq!(owner, OTHER_USER);
    fill_every_type(&mut primary.client().unwrap(), 41).unwrap();
    load(&primary, 50, 100_000);
    let replica = Server::start(kind).unwrap();
    let mut source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "walk"]);
    source.replicate(&replica, &[]);
    assert_eq!(method(&mut source), "the module", "{}", source.agent.output());
    assert_same_data(&primary, &replica);
}

#[test]
fn a_redis_of_another_user_walks() {
    let (Some(kind), Some(())) = (require::redis(), require::root()) else { return };
    a_server_of_another_user_walks(kind);
}

#[test]
fn a_valkey_of_another_user_walks() {
    let (Some(kind), Some(())) = (require::valkey(), require::root()) else { return };
    a_server_of_another_user_walks(kind);
}

/// Bytes that back each of the source's snapshot tables, by the file's number.
fn tables(source: &Source) -> BTreeMap<u64, u64> {
    let folder = format!("/proc/{}/fd", source.agent.pid());
    let entries = fs::read_dir(folder).unwrap().filter_map(Result::ok).map(|entry| entry.path());
    let is_table = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:remora-snapshot"))
    };
    let opened = entries.filter(is_table).filter_map(|path| fs::metadata(path).ok());
    opened.map(|file| (file.ino(), file.blocks() * 512)).collect()
}

/// Bytes of long strings in the primary.
const DATA_BYTES: u64 = 40 << 20;

/// A page of shared memory counts for the control group of the process that touches it first, and stays there when the
/// process has ended. A server in a container would pay for the source's table if its child touched it first.
fn the_source_touches_a_new_table_before_the_server_forks(kind: Kind) {
    // Time between the request for the snapshot and the fork.
    let primary = with_module(kind).config("repl-diskless-sync-delay", 3).start().unwrap();
    load(&primary, DATA_BYTES >> 20, 1 << 20);
    let args = ["--memory", "256MiB", "--module-capture", "walk"];
    let mut source = Source::start(&primary, &args);
    let first = tables(&source);
    assert_eq!(first.len(), 1, "{first:?}");

    // A replica that is lost while it reads leaves the table to its server, which may still read it.
    let lost = Server::start(kind).unwrap();
    let mut agent = source.replica(&lost, &["--download-limit", "1MiB", "--transport", "tcp"]);
    source.wait_for_snapshot();
    source.wait_for_slots(&mut agent, 1);
    agent.kill().unwrap();
    source.agent.wait_for_event("replica_disconnected", LONG).unwrap();
    // The next snapshot is another one: nothing continues this one, as the primary has another history now.
    let mut client = primary.client().unwrap();
    client.ok(&["DEBUG", "CHANGE-REPL-ID"]).unwrap();
    client.int(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    source.agent.wait_for_event("stream_lost", LONG).unwrap();
    source.wait_for_status("the snapshot to be given up", |status| status["generation"].is_null());

    let forks = number(&primary, "total_forks");
    let replica = Server::start(kind).unwrap();
    let mut agent = source.replica(&replica, &[]);
    wait_until("the source to touch its new table", LONG, || {
        let bytes = tables(&source)
            .into_iter()
            .filter(|(file, _)| !first.contains_key(file))
            .map(|(_, bytes)| bytes)
            .sum::<u64>();
        Ok(if bytes >= DATA_BYTES { Ok(()) } else { Err(format!("{bytes} bytes")) })
    })
    .unwrap();
    assert_eq!(number(&primary, "total_forks"), forks, "the server forked before the table was touched");
    agent.wait_for_success(LONG).unwrap();
    assert_eq!(source.agent.output().matches("method=the module").count(), 2, "{}", source.agent.output());
    assert_same_data(&primary, &replica);
}

#[test]
#[ignore = "long: make test-all"]
fn the_source_touches_a_new_table_before_redis_forks() {
    let Some(kind) = require::redis() else { return };
    the_source_touches_a_new_table_before_the_server_forks(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn the_source_touches_a_new_table_before_valkey_forks() {
    let Some(kind) = require::valkey() else { return };
    the_source_touches_a_new_table_before_the_server_forks(kind);
}
