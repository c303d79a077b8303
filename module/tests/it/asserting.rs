//! Servers that check themselves, by assertions and by AddressSanitizer, after a load in the fast way: `make asserting`.
//!
//! Such a server ends at the first fault, and says why in its log.

use remora_lab::server::wait_until;
use remora_lab::{Client, Kind, Server, require};

use crate::fast::{mixed, pair, records};
use crate::primary::LONG;

mod by_command {
    use super::*;

    #[test]
    #[ignore = "needs servers that check themselves: make asserting"]
    fn a_server_that_checks_itself_finds_nothing_to_object_to() {
        for kind in require::kinds() {
            let parts = [(0, mixed(kind, 31, 6_000)), (2, records(32, 3_000))];
            let (fast, own) = pair(kind, &[], &parts);
            for server in [&fast, &own] {
                let client = &mut server.client().unwrap();
                client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
                drive(kind, client, server);
            }
            assert_eq!(fast.digest().unwrap(), own.digest().unwrap(), "{kind}");
            for server in [fast, own] {
                server.client().unwrap().ok(&["FLUSHALL", "ASYNC"]).unwrap();
                let complaint = |log: &str| log.contains("AddressSanitizer") || log.contains("ASSERTION FAILED");
                assert!(!complaint(&server.log()), "{kind}: {}", server.log());
            }
        }
    }
}

/// What servers do with their tables, all of it.
fn drive(kind: Kind, client: &mut Client, server: &Server) {
    let before = server.digest().unwrap();
    for database in ["0", "2"] {
        let statistics = client.text(&["DEBUG", "HTSTATS", database]).unwrap();
        assert!(statistics.contains("number of e"), "{kind}: {statistics}");
    }
    client.ok(&["DEBUG", "RELOAD"]).unwrap();
    assert_eq!(server.digest().unwrap(), before, "{kind}");
    // Servers with another allocator than jemalloc refuse it.
    let _ = client.ok(&["CONFIG", "SET", "activedefrag", "yes"]);
    // Tables grow while keys are looked up, and shrink when most keys are gone. (Eviction and expiry are in `fast`.)
    for command in ["SET", "GET", "DEL"] {
        for number in 0..FILLERS {
            let name = format!("filler {number}");
            let words = if command == "SET" { vec![command, &name, "x"] } else { vec![command, &name] };
            client.queue(&words);
        }
        client.flush().unwrap();
        for _ in 0..FILLERS {
            client.receive().unwrap();
        }
    }
    wait_until("the table to shrink", LONG, || {
        let statistics = client.text(&["DEBUG", "HTSTATS", "0"])?;
        Ok(if statistics.contains("rehashing target") { Err(statistics) } else { Ok(()) })
    })
    .unwrap();
    assert_eq!(server.digest().unwrap(), before, "{kind}: the same keys");
    client.ok(&["SWAPDB", "0", "2"]).unwrap();
    client.ok(&["SWAPDB", "0", "2"]).unwrap();
}

/// Keys that only fill the tables.
const FILLERS: usize = 40_000;
