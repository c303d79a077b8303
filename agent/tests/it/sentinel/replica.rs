//! `remora replica --sentinel`: where the server is handed over to, and what Sentinel makes of it.

use remora_lab::{require, tls};
use rustix::process::Signal;

use super::*;
use crate::kit::{at_once, ends, follows, load_slowly, number, says, steady_writer, succeeds, wait_until_loading};

#[test]
#[ignore = "long: make test-all"]
fn a_new_server_is_handed_over_to_the_primary_of_that_moment_and_sentinel_leaves_it_there() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 3000", NEVER_DOWN]);
        let source = scene.source(&[]);
        let server = scene.new_server();
        load_slowly(&server, 2_000);
        let writer = steady_writer(&scene.servers[0]);
        let mut agent = scene.replica(&server, &source, &["--rewrite-config"]);
        wait_until_loading(&server);
        load_slowly(&server, 0);
        succeeds(&mut agent, &server);
        writer.stop().unwrap();
        assert_eq!(follows(&server), scene.servers[0].address().to_string());
        assert_same_data(&scene.servers[0], &server);
        let file = std::fs::read_to_string(server.folder().join("server.conf")).unwrap();
        assert!(file.contains(&format!("replicaof 127.0.0.1 {}", scene.servers[0].port())), "{file}");

        // Sentinel finds it, and has nothing to correct for longer than its fail-over time.
        scene.wait_for_replicas(3);
        std::thread::sleep(Duration::from_secs(5));
        for number in 0..3 {
            let log = scene.sentinels.log(number);
            let own = format!("127.0.0.1:{}", server.port());
            assert!(!log.lines().any(|line| line.contains("fix-slave") && line.contains(&own)), "{log}");
        }
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_signal_ends_the_stay_beside_a_server_that_sentinel_does_not_get_to_know() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &[NEVER_DOWN]);
        let source = scene.source(&[]);
        // The primary does not show it to Sentinel.
        let server = Server::builder(kind).config("replica-announced", "no").start().unwrap();
        let mut agent = scene.replica(&server, &source, &[]);
        agent.wait_for_event("sentinel_awaited", LONG).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, 7);
        // It did not end because its own limit was over, which it would name.
        says(&said, &["stopped before a Sentinel knows the server", "stopped by SIGTERM", "far enough to be finished"]);
        assert_eq!(follows(&server), scene.servers[0].address().to_string());
        assert_same_data(&scene.servers[0], &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_sentinel_that_has_not_heard_of_a_fail_over_does_not_count() {
    at_once(require::kinds(), |kind| {
        let mut scene = Scene::new(kind, &["sentinel failover-timeout mymaster 10000"]);
        let former = scene.servers[0].address().to_string();
        scene.servers[0].kill().unwrap();
        scene.sentinels.wait_for_another(&former, SOON).unwrap();
        // It knows the former primary alone, which tells it nothing of the others.
        let late = Sentinels::one(kind, &scene.servers[0], &[]).unwrap();
        assert_eq!(late.primary(0).unwrap(), former);
        let source = scene.source(&[]);
        let server = scene.new_server();
        let list = format!("{},{}", late.list(), scene.sentinels.list());
        let group = ["--sentinel", &list, "--sentinel-name", sentinel::NAME];
        let mut agent = scene.stage.replica(&server.url(), source.address, &group);
        let said = succeeds(&mut agent, &server);
        says(&said, &["the Sentinels disagree"]);
        assert_eq!(late.primary(0).unwrap(), former, "it has not heard of the others meanwhile");
        assert_eq!(follows(&server), scene.primary().address().to_string(), "{said}");
        assert_same_data(scene.primary(), &server);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_with_the_password_for_its_primary_may_follow_the_one_that_sentinel_names() {
    let Some(kind) = require::redis() else { return };
    let build = || primary(kind).require_pass("pa55").master_auth(None, "pa55");
    let servers = [build().start().unwrap(), build().start().unwrap()];
    servers[1].replicate(&servers[0]).unwrap();
    servers[1].wait_for_link(LONG).unwrap();
    let auth = ["sentinel auth-pass mymaster pa55", "requirepass s3cret", "sentinel sentinel-pass s3cret"];
    let sentinels = Sentinels::guarded(kind, &servers[0], &[&servers[1]], &auth, "s3cret").unwrap();
    let stage = Stage::new();
    let (pw, spw) = (stage.secret("pw", "pa55\n"), stage.secret("spw", "s3cret\n"));
    let login = ["--password-file", &pw, "--sentinel-password-file", &spw];
    let source = stage.source_of_group(None, &sentinels, &login);
    let server = build().start().unwrap();
    let list = sentinels.list();
    let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
    // Beside a replica the source announces another address than its own: without Sentinel that needs --expect-primary.
    let mut agent = stage.replica(&server.url(), source.address, &[&group[..], &login[..]].concat());
    succeeds(&mut agent, &server);
    assert_same_data(&servers[0], &server);

    let wrong = stage.secret("wrong", "nonsense\n");
    let login = ["--password-file", &pw, "--sentinel-password-file", &wrong, "--replace"];
    let mut agent = stage.replica(&server.url(), source.address, &[&group[..], &login[..]].concat());
    says(&ends(&mut agent, 4), &["--sentinel-password-file"]);
}

#[test]
fn sentinels_that_speak_tls_are_asked_by_it() {
    let Some(kind) = require::redis() else { return };
    let stage = Stage::new();
    let (files, _) = tls::certificates(stage.folder(), &["127.0.0.1".parse().unwrap()]).unwrap();
    let top = primary(kind).start().unwrap();
    let port = remora_lab::scratch::free_port().unwrap();
    let lines = [
        format!("tls-port {port}"),
        format!("tls-ca-cert-file {}", files.ca.display()),
        format!("tls-cert-file {}", files.certificate.display()),
        format!("tls-key-file {}", files.key.display()),
        "tls-auth-clients optional".to_owned(),
    ];
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let _sentinel = Sentinels::one(kind, &top, &lines).unwrap();
    let source = stage.source(&top.url(), &[]);
    let server = Server::start(kind).unwrap();
    let (ca, list) = (files.ca.display().to_string(), format!("rediss://127.0.0.1:{port}"));
    let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
    let mut agent = stage.replica(&server.url(), source.address, &[&group[..], &["--sentinel-tls-ca", &ca]].concat());
    succeeds(&mut agent, &server);
    let mut agent = stage.replica(&server.url(), source.address, &[&group[..], &["--replace"]].concat());
    let said = ends(&mut agent, 4);
    assert!(said.contains("--sentinel-tls-ca"), "{said}");
}

#[test]
fn a_server_without_a_configuration_file_is_refused_and_one_that_cannot_write_it_is_named() {
    let Some(kind) = require::redis() else { return };
    let top = primary(kind).start().unwrap();
    let source = Source::start(&top, &[]);
    // As a user that may not write its folder any more.
    let server = Server::start(kind).unwrap();
    let path = server.folder().join("server.conf");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let mut agent = source.replica(&server, &["--rewrite-config"]);
    let said = ends(&mut agent, 4);
    says(&said, &["CONFIG REWRITE", "its configuration file was not written", "follows the primary"]);
    assert_same_data(&top, &server);
}

#[test]
#[ignore = "long: make test-all"]
fn a_known_replica_whose_sync_sentinel_would_undo_is_refused_with_the_way_out() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 1000", NEVER_DOWN]);
        let source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), "found by the Sentinels", "server="));
        let known = &scene.servers[3 - sits];
        let said = ends(&mut scene.replica(known, &source, &["--replace"]), 3);
        says(&said, &["Sentinel knows it as a replica of mymaster", "remora attend", "failover-timeout"]);
        let said = ends(&mut scene.replica(known, &source, &["--replace", "--stay"]), 3);
        says(&said, &["--stay"]);
        let detached = ["--replace", "--on-failure", "detached"];
        says(&ends(&mut scene.replica(known, &source, &detached), 3), &["--on-failure detached"]);
        assert_eq!(follows(known), scene.servers[0].address().to_string(), "it was not touched");
        assert_eq!(number(known, "master_sync_in_progress"), 0);
    });
}

#[test]
fn a_known_replica_whose_sync_is_short_is_made_anew() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 60000", NEVER_DOWN]);
        let before = number(&scene.servers[0], "sync_full");
        let source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), "found by the Sentinels", "server="));
        let known = &scene.servers[3 - sits];
        let mut agent = scene.replica(known, &source, &["--replace"]);
        succeeds(&mut agent, known);
        assert_same_data(&scene.servers[0], known);
        assert_eq!(number(&scene.servers[0], "sync_full"), before, "{kind}");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn the_failover_timeout_is_raised_for_a_sync_and_put_back_also_by_the_next_agent() {
    at_once(require::kinds(), |kind| {
        let scene = Scene::new(kind, &["sentinel failover-timeout mymaster 1000", NEVER_DOWN]);
        let source = scene.source(&[]);
        let sits = scene.at(word(&source.agent.output(), "found by the Sentinels", "server="));
        let known = &scene.servers[3 - sits];
        load_slowly(known, 50_000);
        let more = ["--replace", "--extend-failover-timeout"];
        let mut agent = scene.replica(known, &source, &more);
        wait_until_loading(known);
        let time = |number: usize| {
            let fields = scene.sentinels.client(number).unwrap().list(&["SENTINEL", "MASTER", "mymaster"]).unwrap();
            let at = fields.iter().position(|field| field.as_str() == Some("failover-timeout")).unwrap();
            fields[at + 1].as_str().unwrap().parse::<u64>().unwrap()
        };
        assert!((0..3).all(|number| time(number) > 1000), "{}", agent.output());
        agent.kill().unwrap();
        load_slowly(known, 0);
        let mut agent = scene.replica(known, &source, &more);
        succeeds(&mut agent, known);
        assert!((0..3).all(|number| time(number) == 1000), "{}", agent.output());
        assert_same_data(&scene.servers[0], known);
        let one = scene.sentinels.list().split(',').next().unwrap().to_owned();
        let group = ["--sentinel", &one, "--sentinel-name", "mymaster"];
        let said = ends(&mut scene.stage.replica(&known.url(), source.address, &[&group[..], &more].concat()), 3);
        says(&said, &["knows 3 Sentinels", "--sentinel names 1"]);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_file_names_the_primary_as_sentinel_writes_it() {
    let Some(kind) = require::redis() else { return };
    let scene = Scene::new(kind, &[]);
    let source = scene.source(&[]);
    scene.fail_over();
    let (to, line) = (scene.stage.path("dump.rdb"), scene.stage.path("replicaof.conf"));
    let (address, token, list) =
        (source.address.to_string(), scene.stage.token.display().to_string(), scene.sentinels.list());
    let fetch = ["fetch", "--source", &address, "--token-file", &token, "--to", &to, "--allow-stale"];
    let group = ["--sentinel", &list, "--sentinel-name", "mymaster"];
    scene.stage.end(&[&fetch[..], &group, &["--write-replicaof", &line]].concat(), 0);
    let written = std::fs::read_to_string(&line).unwrap();
    assert_eq!(written, format!("replicaof 127.0.0.1 {}\n", scene.primary().port()));
    says(&scene.stage.end(&[&fetch[..], &group].concat(), 2), &["--write-replicaof"]);
}
