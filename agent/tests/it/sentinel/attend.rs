//! `remora attend --sentinel`: a replica that Sentinel knows, whose full copies come from a source.

use remora_lab::{Net, require};

use super::*;
use crate::kit::{number, quick, syncs};

/// The user of the attended server; the agents are root's.
const SERVER_USER: u32 = 65_534;

#[test]
fn a_known_replica_is_served_and_sentinel_sees_its_primary_all_the_time() {
    for kind in require::kinds() {
        let Some(()) = require::namespaces() else { return };
        let net = Net::new().unwrap();
        let host = net.host("pod").unwrap();
        let start = || primary(kind).on(&host).start().unwrap();
        let servers = [start(), start()];
        let known = quick(kind).as_user(SERVER_USER).on(&host).start().unwrap();
        fill_every_type(&mut servers[0].client().unwrap(), 31).unwrap();
        for replica in [&servers[1], &known] {
            replica.replicate(&servers[0]).unwrap();
            replica.wait_for_link(LONG).unwrap();
        }
        let lines = ["sentinel failover-timeout mymaster 3000"];
        let sentinels = Sentinels::start(kind, &servers[0], &[&servers[1], &known], &lines).unwrap();
        let stage = Stage::new();
        let rules = ["intercept", "add", "--server-uid", &SERVER_USER.to_string(), "--agent-uid", "0"];
        stage.start(Some(&host), &rules).wait_for_success(LONG).unwrap();
        let list = sentinels.list();
        let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
        // The other replica: the attended one must not be the source's.
        let source = stage.source_on(&host, &servers[1].url(), &[]);
        let (url, address, token) = (known.url(), source.address.to_string(), stage.token.display().to_string());
        let args = ["attend", "--server", &url, "--source", &address, "--token-file", &token];
        let mut agent = stage.start(Some(&host), &[&args[..], &group].concat());
        agent.wait_for_line("attending", LONG).unwrap();

        // A full copy: it has lost its position and its data.
        let before = syncs(&servers[0]).0;
        let mut client = known.client().unwrap();
        client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        client.ok(&["FLUSHALL"]).unwrap();
        known.replicate(&servers[0]).unwrap();
        agent.wait_for_line("new connections come here again", LONG).unwrap();
        known.wait_for_link(LONG).unwrap();
        assert_same_data(&servers[0], &known);
        assert_eq!(syncs(&servers[0]).0, before, "{kind}: no full copy of the primary\n{}", agent.output());
        assert_eq!(number(&servers[1], "sync_full"), 1, "{kind}: the source's");

        // It follows a fail-over by Sentinel's own hand, to a server at another port.
        let former = sentinels.primary(0).unwrap();
        sentinels.fail_over().unwrap();
        let now = sentinels.wait_for_another(&former, SOON).unwrap();
        let (promoted, follower) =
            if now == known.address().to_string() { (&known, &servers[1]) } else { (&servers[1], &known) };
        wait_until("the follower to follow", SOON, || {
            let port = follower.fact("master_port")?;
            Ok(if port == promoted.port().to_string() { Ok(()) } else { Err(port) })
        })
        .unwrap();
        follower.wait_for_link(LONG).unwrap();
        promoted.client().unwrap().ok(&["SET", "after", "1"]).unwrap();
        assert_same_data(promoted, follower);
        for number in 0..3 {
            assert!(!sentinels.log(number).contains("+fix-slave-config"), "{}", sentinels.log(number));
        }
    }
}
