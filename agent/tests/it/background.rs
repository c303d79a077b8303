//! The default upload limit: a sync of a distant replica stays in the background of the primary's cable. What its clients
//! notice is measured by `remora-bench feel`. Needs root, for network namespaces.

use remora_lab::{Net, Server, Shape, assert_same_data, require};

use crate::kit::{Stage, fill, says, succeeds};

/// Random data in the primary, in MiB, and the rate of every cable in bytes per second: 100 Mb/s. A sync takes three
/// seconds.
const MEBIBYTES: usize = 32;
const CABLE: u64 = 100_000_000 / 8;

#[test]
fn a_sync_without_options_is_in_the_background_and_one_without_a_limit_is_not() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::valkey() else { return };
    let net = Net::new().unwrap();
    let here = net.host("primary").unwrap();
    here.shape(Shape::rate(CABLE)).unwrap();
    let primary = Server::builder(kind).on(&here).config("repl-diskless-sync-delay", 0).start().unwrap();
    fill(&primary, MEBIBYTES, 1);
    for limit in [&["--upload-limit", "none"][..], &[]] {
        let stage = Stage::new();
        let mut source = stage.source_on(&here, &primary.url(), &[&["--eager"], limit].concat());
        source.wait_for_snapshot();
        let there = net.host("replica").unwrap();
        there.shape(Shape::rate(CABLE)).unwrap();
        let replica = Server::builder(kind).on(&there).start().unwrap();
        let mut agent = stage.replica_on(&there, &replica.url(), source.address, &["--no-serve-peers"]);
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
        let status = source.status();
        assert_eq!(status["upload"].is_object(), limit.is_empty(), "{status}");
        if limit.is_empty() {
            says(&source.drawn_status(), &["upload", "up to", "in the background", "of queue"]);
            assert!(status["upload"]["bytes_per_second"].as_u64() >= Some(1 << 20), "{status}");
        }
    }
}
