//! `remora source --sentinel`: beside which server the source sits.

use remora_lab::require;

use super::*;
use crate::kit::{at_once, ends, follows, number, says, succeeds};

const FOUND: &str = "found by the Sentinels";

#[test]
#[ignore = "long: make test-all"]
fn a_source_sits_beside_a_replica_and_its_servers_go_to_the_primary_that_sentinel_names() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &[NEVER_DOWN]);
        let before = number(&scene.servers[0], "sync_full");
        let source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), FOUND, "server="));
        assert_ne!(sits, 0, "beside a replica");
        let server = scene.new_server();
        let mut agent = scene.stage.replica(&server.url(), source.address, &[]);
        succeeds(&mut agent, &server);
        assert_eq!(follows(&server), scene.servers[0].address().to_string());
        assert_same_data(&scene.servers[0], &server);
        assert_eq!(number(&scene.servers[0], "sync_full"), before, "{kind}: no fork of the primary");
        assert_eq!(number(&scene.servers[sits], "sync_full"), 1);
        let mut client = scene.sentinels.client(0).unwrap();
        let listed = texts(&client.list(&["SENTINEL", "REPLICAS", sentinel::NAME]).unwrap());
        assert!(listed.contains(&scene.servers[1].address().to_string()), "{listed}");
        assert!(!listed.contains("127.0.0.1:0"), "Sentinel does not see the source: {listed}");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_of_the_primary_follows_the_fail_over() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &[NEVER_DOWN]);
        let mut source = scene.source(&["--from", "primary"]);
        assert_eq!(scene.at(word(&source.agent.output(), FOUND, "server=")), 0);
        scene.fail_over();
        let line = source.agent.wait_for_event("source_moved", SOON).unwrap();
        assert_eq!(line.split("to=").nth(1).unwrap().split(' ').next().unwrap(), scene.primary().url());
        let server = scene.new_server();
        let mut agent = scene.stage.replica(&server.url(), source.address, &[]);
        succeeds(&mut agent, &server);
        assert_eq!(follows(&server), scene.primary().address().to_string());
        assert_same_data(scene.primary(), &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_whose_server_is_promoted_goes_to_another_replica() {
    at_once(require::kinds(), |kind| {
        // A primary that does not answer for a moment is not replaced a second time.
        let scene = Scene::new(kind, &["sentinel down-after-milliseconds mymaster 10000"]);
        let mut source = scene.source(&["--eager"]);
        source.wait_for_snapshot();
        let sits = scene.at(word(&source.agent.output(), FOUND, "server="));
        scene.servers[3 - sits].configure("replica-priority", "0").unwrap();
        scene.wait_for_priority(&scene.servers[3 - sits], "0");
        scene.fail_over();
        wait_until("every Sentinel to know the new primary", SOON, || {
            let known = (0..3).map(|number| scene.sentinels.primary(number));
            let known = known.collect::<Result<Vec<_>, _>>()?;
            let wanted = scene.servers[sits].address().to_string();
            Ok(if known.iter().all(|one| *one == wanted) { Ok(()) } else { Err(format!("{known:?}, not {wanted}")) })
        })
        .unwrap();
        let line = source.agent.wait_for_event("source_moved", SOON).unwrap();
        assert!(!line.contains(&format!("to={}", scene.servers[sits].url())), "{line}");
        let now = scene.at(line.split("to=").nth(1).unwrap().split(' ').next().unwrap());
        // Sentinels tell the other replica of the new primary in their own time.
        wait_until("the other replica to follow the new primary", SOON, || {
            let followed = follows(&scene.servers[now]);
            let is_new = followed == scene.primary().address().to_string();
            Ok(if is_new { Ok(()) } else { Err(followed) })
        })
        .unwrap();
        scene.servers[now].wait_for_link(SOON).unwrap();
        let before = number(&scene.servers[now], "sync_full");
        let server = scene.new_server();
        let mut agent = scene.stage.replica(&server.url(), source.address, &[]);
        succeeds(&mut agent, &server);
        assert_eq!(follows(&server), scene.primary().address().to_string());
        assert_same_data(scene.primary(), &server);
        assert_eq!(number(&scene.servers[now], "sync_full"), before + 1, "{kind}: the snapshot is a replica's");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_whose_server_dies_goes_on_with_the_stream_at_another_replica() {
    at_once(require::kinds(), |kind| {
        let mut scene = Scene::new(kind, &[]);
        let mut source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), FOUND, "server="));
        let server = scene.new_server();
        let mut agent = scene.stage.replica(&server.url(), source.address, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let generation = source.generation();
        scene.servers[sits].kill().unwrap();
        let mut client = scene.servers[0].client().unwrap();
        for number in 0..1000 {
            client.ok(&["SET", &format!("after {number}"), "1"]).unwrap();
        }
        source.agent.wait_for_event("source_moved", SOON).unwrap();
        source.agent.wait_for_event("stream_resumed", SOON).unwrap();
        assert_same_data(&scene.servers[0], &server);
        assert_eq!(source.generation(), generation, "{kind}: no other snapshot\n{}", source.agent.output());
        assert_eq!(number(&scene.servers[3 - sits], "sync_full"), 0, "{kind}");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_group_without_a_suitable_replica_is_waited_for_and_options_that_contradict_are_refused() {
    let Some(kind) = require::redis() else { return };
    let lone = primary(kind).start().unwrap();
    let sentinels = Sentinels::start(kind, &lone, &[], &[]).unwrap();
    let stage = Stage::new();
    let (list, token) = (sentinels.list(), stage.token.display().to_string());
    let refused = |more: &[&str], code| {
        let args = ["source", "--token-file", &token, "--listen", "127.0.0.1:0", "--wait-for-server", "1s"];
        ends(&mut stage.start(None, &[&args, more].concat()), code)
    };
    let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
    says(&refused(&group, 4), &["no replica that is up and in step", "--from primary"]);
    says(&refused(&["--sentinel", &list, "--sentinel-name", "nope"], 4), &["nope", "--sentinel-name"]);
    says(&refused(&["--sentinel", &list], 2), &["--sentinel-name"]);
    at_once([["--server", "redis://127.0.0.1:1"], ["--announce", "db1:6379"]], |other| {
        says(&refused(&[&group[..], &other[..]].concat(), 2), &[other[0]]);
    });
    says(&refused(&["--server", "redis://127.0.0.1:1", "--from", "primary"], 2), &["--sentinel"]);
    drop(sentinels);
    says(&refused(&group, 4), &["check --sentinel"]);
}
