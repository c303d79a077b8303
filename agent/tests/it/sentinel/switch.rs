//! `remora switch` at a primary that Sentinels watch: it refuses, and what it says to do moves the name.

use super::*;
use remora_lab::require;

use crate::kit::{at_once, ends, says};

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_sentinels_watch_is_refused_and_the_name_moves_as_the_message_says() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 3000", NEVER_DOWN]);
        let [old, new, other] = &scene.servers[..] else { panic!("three servers") };
        let switch = ["switch", "--from", &old.url(), "--to", &new.url()];
        let said = ends(&mut scene.stage.start(None, &switch), 3);
        says(&said, &["Sentinels watch", "replica-priority 0", "SENTINEL FAILOVER"]);
        assert_eq!(old.fact("role").unwrap(), "master");

        other.configure("replica-priority", "0").unwrap();
        scene.wait_for_priority(other, "0");
        scene.fail_over();
        assert_eq!(scene.sentinels.primary(0).unwrap(), new.address().to_string());
        for replica in [old, other] {
            wait_until("the replicas to follow the new primary", SOON, || {
                let port = replica.fact("master_port").unwrap_or_default();
                Ok(if port == new.port().to_string() { Ok(()) } else { Err(port) })
            })
            .unwrap();
            replica.wait_for_link(LONG).unwrap();
        }
        says(&ends(&mut scene.stage.start(None, &switch), 0), &["is the primary already"]);
    });
}
