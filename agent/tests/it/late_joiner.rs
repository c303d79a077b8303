//! Late joiners: a snapshot serves every replica that joins while the journal reaches back to it, at no cost to the
//! primary. When it no longer does, the source takes another snapshot by itself.

use remora_lab::compare::same_data;
use remora_lab::server::wait_until;
use remora_lab::{Client, Server, assert_same_data, fill_every_type, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{LONG, Source, number, primary, syncs};

/// What a fork or a copy for a replica leaves behind in a primary's INFO.
fn traces_of_a_snapshot(primary: &Server) -> Vec<(&'static str, String)> {
    let names = ["sync_full", "total_forks", "latest_fork_usec", "rdb_last_save_time", "rdb_last_bgsave_time_sec"];
    names.into_iter().map(|name| (name, primary.fact(name).unwrap())).collect()
}

/// Writes `bytes` bytes to the primary, in values of 64 KiB.
fn write(client: &mut Client, bytes: usize) {
    const VALUE: usize = 64 << 10;
    let value = vec![b'v'; VALUE];
    for number in 0..bytes.div_ceil(VALUE) {
        client.ok(&[b"SET".as_slice(), format!("written:{}", number % 16).as_bytes(), &value]).unwrap();
    }
}

/// Whether the journal no longer reaches back to the snapshot, or the source has already dropped the snapshot.
fn is_overrun(status: &Value) -> bool {
    let generation = &status["generation"];
    generation.is_null()
        || generation["journal_first"].as_u64() > generation["offset_start"].as_u64().map(|start| start + 1)
}

#[test]
fn a_late_joiner_is_made_from_the_old_snapshot_without_a_fork() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        fill_every_type(&mut client, 3).unwrap();
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let source = Source::start(&primary, &["--memory", "64MiB"]);

        source.replicate(&servers[0], &["--transport", "tcp"]);
        let generation = source.generation();
        wait_until("the primary to be done with its child", LONG, || {
            let busy = primary.fact("rdb_bgsave_in_progress")?;
            Ok(if busy == "0" { Ok(()) } else { Err(busy) })
        })
        .unwrap();
        let before = traces_of_a_snapshot(&primary);
        write(&mut client, 2 << 20);
        source.replicate(&servers[1], &["--transport", "shm"]);

        assert_eq!(traces_of_a_snapshot(&primary), before, "the late joiner cost the primary a snapshot");
        assert_eq!((source.generation(), source.snapshots_taken()), (generation, 1));
        assert_eq!(syncs(&primary).1, 2);
        for server in &servers {
            assert_same_data(&primary, server);
        }
    }
}

#[test]
fn after_the_journal_was_overrun_the_next_joiner_has_a_new_snapshot_taken() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        fill_every_type(&mut client, 4).unwrap();
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let source = Source::start(&primary, &["--memory", "64MiB", "--journal-memory", "2MiB"]);

        source.replicate(&servers[0], &[]);
        let generation = source.generation();
        write(&mut client, 8 << 20);
        source.wait_for_status("the journal to be overrun", is_overrun);
        source.replicate(&servers[1], &[]);

        assert!(source.generation() > generation);
        assert_eq!((source.snapshots_taken(), syncs(&primary)), (2, (2, 2)));
        for server in &servers {
            assert_same_data(&primary, server);
        }
    }
}

#[test]
fn a_snapshot_older_than_the_limit_is_not_offered() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    primary.client().unwrap().ok(&["SET", "a", "1"]).unwrap();
    let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
    let source = Source::start(&primary, &["--memory", "32MiB", "--max-age", "1s", "--eager"]);
    let first = source.wait_for_status("the eager snapshot", |status| status["generation"].is_object());
    let is_gone = |status: &Value| status["generation"].is_null();
    source.wait_for_status("the snapshot to be given up", is_gone);

    source.replicate(&servers[0], &[]);
    assert_eq!(source.snapshots_taken(), 2);
    source.wait_for_status("the second to be given up", is_gone);
    source.replicate(&servers[1], &[]);
    assert_eq!(source.snapshots_taken(), 3);
    assert!(first["generation"]["generation"].as_u64().unwrap() > 0);
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
fn a_new_snapshot_joins_the_stream_that_a_staying_replica_reads() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        fill_every_type(&mut client, 5).unwrap();
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let source = Source::start(&primary, &["--memory", "64MiB", "--journal-memory", "2MiB"]);

        let mut staying = source.replica(&servers[0], &["--stay"]);
        staying.wait_for_event("in_step", LONG).unwrap();
        let generation = source.generation();
        for _ in 0..16 {
            // The writer never writes more than the journal holds beyond what its reader has read.
            write(&mut client, 512 << 10);
            same_data(&primary, &servers[0], LONG).unwrap();
        }
        source.wait_for_status("the journal to be overrun", is_overrun);
        source.replicate(&servers[1], &[]);
        assert!(source.generation() > generation);

        // The staying replica has lost nothing, and has not needed the primary.
        assert_same_data(&primary, &servers[0]);
        assert_eq!(syncs(&primary), (2, 1));
        assert_eq!(
            number(&primary, "connected_slaves"),
            2,
            "the source's stream, and the replica that was handed over"
        );
        staying.signal(Signal::TERM).unwrap();
        staying.wait_for_success(LONG).unwrap();
        assert_eq!(syncs(&primary), (2, 2));
        for server in &servers {
            assert_same_data(&primary, server);
        }
    }
}

#[test]
fn after_the_primary_restarted_the_next_joiner_follows_its_new_history() {
    for kind in require::kinds() {
        let mut primary = primary(kind).start().unwrap();
        primary.client().unwrap().ok(&["SET", "before", "the restart"]).unwrap();
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let source = Source::start(&primary, &["--memory", "32MiB"]);
        source.replicate(&servers[0], &[]);
        let generation = source.generation();

        primary.restart().unwrap();
        primary.client().unwrap().ok(&["SET", "after", "the restart"]).unwrap();
        source.wait_for_status("the old history to be given up", |status| status["generation"].is_null());
        source.replicate(&servers[1], &[]);
        assert!(source.generation() > generation);
        for server in &servers {
            // The first was handed over to the primary, and has followed it since.
            assert_same_data(&primary, server);
        }
    }
}
