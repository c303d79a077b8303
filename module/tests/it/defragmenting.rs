//! Active defragmentation of keys that were loaded in the fast way: `make asserting`, with `--defragment`.
//!
//! The server moves keys, values and tables to other memory, one after the other, while the keys stay. It needs a server
//! with a jemalloc of its own, which no package of a distribution has.

use remora_lab::server::wait_until;
use remora_lab::{Random, Server, require};

use crate::fast::{mixed, names, pair};
use crate::primary::LONG;

/// Strings in the data set, of which most are deleted.
const STRINGS: usize = 60_000;

fn number(server: &Server, name: &str) -> u64 {
    server.fact(name).unwrap().parse().unwrap()
}

mod by_command {
    use super::*;

    #[test]
    #[ignore = "needs servers with a jemalloc of their own: make asserting, with --defragment"]
    fn keys_of_a_fast_load_outlive_defragmentation() {
        let mut tried = 0;
        for kind in require::kinds() {
            let settings = [
                ("active-defrag-ignore-bytes", "1"),
                ("active-defrag-threshold-lower", "1"),
                ("active-defrag-cycle-min", "20"),
                ("active-defrag-cycle-max", "60"),
            ];
            let can = Server::start(kind).unwrap().configure("activedefrag", "yes").is_ok();
            if !can {
                continue;
            }
            tried += 1;
            let (fast, own) = pair(kind, &settings, &[(0, mixed(kind, 41, STRINGS))]);
            let mut random = Random::new(42);
            let mut all = names(&own);
            all.sort_unstable();
            for server in [&fast, &own] {
                server.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
            }
            // Three quarters of the keys go, and leave holes everywhere.
            let gone: Vec<Vec<u8>> = all.into_iter().filter(|_| !random.one_in(4)).collect();
            for server in [&fast, &own] {
                let mut client = server.client().unwrap();
                for name in &gone {
                    assert_eq!(client.int(&[b"DEL".as_slice(), name]).unwrap(), 1);
                }
            }
            let before = own.digest().unwrap();
            assert_eq!(fast.digest().unwrap(), before, "{kind}");
            for server in [&fast, &own] {
                server.configure("activedefrag", "yes").unwrap();
                wait_until("keys to be moved", LONG, || {
                    let moved = number(server, "active_defrag_hits");
                    Ok(if moved > 1000 { Ok(()) } else { Err(format!("{moved} were moved")) })
                })
                .unwrap();
                // With a threshold of one percent it never ends: every key has its turn twice.
                let keys = server.client().unwrap().int(&["DBSIZE"]).unwrap().unsigned_abs();
                wait_until("two turns of all keys", LONG, || {
                    let turns = number(server, "active_defrag_key_hits") + number(server, "active_defrag_key_misses");
                    Ok(if turns >= 2 * keys { Ok(()) } else { Err(format!("{turns} turns of {keys} keys")) })
                })
                .unwrap();
                server.configure("activedefrag", "no").unwrap();
                let moved = number(server, "active_defrag_key_hits");
                println!("{kind}: {moved} of {keys} keys were moved");
                assert!(moved > 100, "{kind}: {moved}");
                assert_eq!(server.digest().unwrap(), before, "{kind}: the same keys");
                let mut client = server.client().unwrap();
                client.ok(&["DEBUG", "RELOAD"]).unwrap();
                assert_eq!(server.digest().unwrap(), before, "{kind}: the same keys");
                client.ok(&["FLUSHALL", "ASYNC"]).unwrap();
                assert!(!server.log().contains("ASSERTION FAILED"), "{kind}: {}", server.log());
            }
        }
        assert!(tried > 0, "no server here can defragment");
    }
}
