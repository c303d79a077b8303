//! Forks that come to nothing, and snapshots that take longer than they may be old: the primary forks rarely, and those
//! who wait are served.

use std::fs;

use remora_lab::server::wait_until;
use remora_lab::{Server, assert_same_data, require};

use crate::kit::{LONG, Source, fill_keys, number, quick, succeeds};

/// A primary that saves to disk first answers `+FULLRESYNC` and forks, and sends nothing if the save fails.
#[test]
#[ignore = "long: make test-all"]
fn a_primary_whose_saves_to_disk_fail_forks_less_and_less_often() {
    for kind in require::kinds() {
        let primary = quick(kind).config("repl-diskless-sync", "no").start().unwrap();
        fill_keys(&primary, 100, "value");
        // The child cannot give its file this name.
        let in_the_way = primary.folder().join("dump.rdb");
        fs::create_dir(&in_the_way).unwrap();
        let source = Source::start(&primary, &["--fork-interval", "0s"]);
        let server = Server::start(kind).unwrap();
        let mut agent = source.replica(&server, &[]);
        agent.wait_for_line("4 snapshots in a row failed after the primary had forked", LONG).unwrap();
        let forks = number(&primary, "total_forks");
        assert!((4..=5).contains(&forks), "{kind}: {forks} forks");
        fs::remove_dir(&in_the_way).unwrap();
        succeeds(&mut agent, &server);
        assert_same_data(&primary, &server);
        let forks = number(&primary, "total_forks");
        assert!(forks <= 6, "{kind}: {forks} forks");
    }
}

#[test]
fn a_snapshot_that_takes_longer_than_max_age_serves_who_waited_and_who_joined_meanwhile() {
    for (kind, diskless) in require::kinds().into_iter().flat_map(|kind| [(kind, "no"), (kind, "yes")]) {
        let primary = quick(kind).config("repl-diskless-sync", diskless).start().unwrap();
        fill_keys(&primary, 100, "value");
        primary.configure("rdb-key-save-delay", "30000").unwrap();
        let source = Source::start(&primary, &["--max-age", "1s", "--fork-interval", "0s"]);
        let servers = [(); 2].map(|()| Server::start(kind).unwrap());
        let mut first = source.replica(&servers[0], &[]);
        wait_until("the primary to save", LONG, || {
            let saves = primary.fact("rdb_bgsave_in_progress")?;
            Ok(if saves == "1" { Ok(()) } else { Err(saves) })
        })
        .unwrap();
        let mut second = source.replica(&servers[1], &[]);
        for (agent, server) in [&mut first, &mut second].into_iter().zip(&servers) {
            succeeds(agent, server);
            assert_same_data(&primary, server);
        }
        assert_eq!(source.snapshots_taken(), 1, "{kind}, repl-diskless-sync {diskless}");
        assert_eq!(number(&primary, "sync_full"), 1, "{kind}, repl-diskless-sync {diskless}");
    }
}
