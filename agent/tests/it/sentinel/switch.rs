//! `remora switch` at a primary that Sentinels watch: it refuses unless they are named, and the name moves with it.

use super::*;
use remora_lab::pair_writer::{PairWriter, assert_has_all};
use remora_lab::require;

use crate::kit::{at_once, ends, says, syncs};

/// The words of a switch that the Sentinels learn of.
fn switch(scene: &Scene, from: &Server, to: &Server, more: &[&str], code: i32) -> String {
    let (from, to, list) = (from.url(), to.url(), scene.sentinels.list());
    let group = ["switch", "--from", &from, "--to", &to, "--sentinel", &list, "--sentinel-name", sentinel::NAME];
    ends(&mut scene.stage.start(None, &[&group[..], more].concat()), code)
}

fn wait_until_all_name(scene: &Scene, primary: &Server) {
    for number in 0..3 {
        assert_eq!(
            scene.sentinels.primary(number).unwrap(),
            primary.address().to_string(),
            "{}",
            scene.sentinels.log(0)
        );
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_name_moves_with_the_switch_and_back_and_no_write_is_lost() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 20000", NEVER_DOWN]);
        let [old, new, other] = &scene.servers[..] else { panic!("three servers") };
        let plain = ["switch", "--from", &old.url(), "--to", &new.url()];
        says(&ends(&mut scene.stage.start(None, &plain), 3), &["Sentinels watch", "--sentinel-name"]);
        says(&switch(&scene, old, new, &["--dry-run"], 0), &["mymaster would move with it", "nothing was changed"]);
        assert_eq!(old.fact("role").unwrap(), "master");

        let copies = syncs(old).0;
        let writer = PairWriter::start([old, new], 500);
        for (from, to) in [(old, new), (new, old)] {
            writer.wait_for_more(200, LONG).unwrap();
            let said = switch(&scene, from, to, &[], 0);
            says(
                &said,
                &[
                    "is the primary since a pause of",
                    "it is mymaster at the Sentinels",
                    "make the other replicas follow it",
                ],
            );
            wait_until_all_name(&scene, to);
            assert_eq!(to.configured("replica-priority").unwrap(), "100");
            for replica in [from, other] {
                wait_until("the replicas to follow the new primary", SOON, || {
                    let port = replica.fact("master_port").unwrap_or_default();
                    Ok(if port == to.port().to_string() { Ok(()) } else { Err(port) })
                })
                .unwrap();
                replica.wait_for_link(LONG).unwrap();
            }
            says(&switch(&scene, from, to, &[], 0), &["is the primary already"]);
        }
        let acknowledged = writer.stop();
        assert_has_all(old, acknowledged).unwrap();
        wait_until("the replica to have all", LONG, || {
            let offsets = (old.fact("master_repl_offset")?, new.fact("master_repl_offset")?);
            Ok(if offsets.0 == offsets.1 { Ok(()) } else { Err(format!("{offsets:?}")) })
        })
        .unwrap();
        assert_same_data(old, new);
        assert_eq!((syncs(old).0, syncs(new).0, syncs(other).0), (copies, 0, 0), "no full copy but the first");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_the_sentinels_would_rather_promote_keeps_the_switch_from_beginning() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 20000", NEVER_DOWN]);
        let [old, new, other] = &scene.servers[..] else { panic!("three servers") };
        other.configure("replica-priority", "1").unwrap();
        scene.wait_for_priority(other, "1");
        let said = switch(&scene, old, new, &[], 3);
        says(&said, &[&other.address().to_string(), "has replica-priority 1"]);
        assert_eq!(
            (old.fact("role").unwrap(), new.configured("replica-priority").unwrap()),
            ("master".into(), "100".into())
        );
        // One that is never promoted may stay so.
        other.configure("replica-priority", "0").unwrap();
        scene.wait_for_priority(other, "0");
        switch(&scene, old, new, &[], 0);
        wait_until_all_name(&scene, new);
    });
}

/// A switch whose command ends in the middle: the Sentinels promote the server that holds all writes.
#[test]
#[ignore = "long: make test-all"]
fn sentinels_finish_a_switch_whose_command_did_not_tell_them() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 20000"]);
        let [old, new, other] = &scene.servers[..] else { panic!("three servers") };
        new.configure("replica-priority", "1").unwrap();
        scene.wait_for_priority(new, "1");
        old.client().unwrap().int(&["INCR", "a number"]).unwrap();
        wait_until("the replica to have all", LONG, || {
            let offsets = (old.fact("master_repl_offset")?, new.fact("slave_repl_offset")?);
            Ok(if offsets.0 == offsets.1 { Ok(()) } else { Err(format!("{offsets:?}")) })
        })
        .unwrap();
        // Where a killed command leaves them: the old one follows nobody's address, and the new one was not promoted.
        old.client().unwrap().ok(&["REPLICAOF", "192.0.2.1", "1"]).unwrap();
        scene.sentinels.wait_for_another(&old.address().to_string(), SOON).unwrap();
        assert_eq!(scene.sentinels.primary(0).unwrap(), new.address().to_string(), "{}", scene.sentinels.log(0));
        assert_eq!(new.client().unwrap().text(&["GET", "a number"]).unwrap(), "1");
        for replica in [old, other] {
            wait_until("the replicas to follow the new primary", SOON, || {
                let port = replica.fact("master_port").unwrap_or_default();
                Ok(if port == new.port().to_string() { Ok(()) } else { Err(port) })
            })
            .unwrap();
        }
    });
}
