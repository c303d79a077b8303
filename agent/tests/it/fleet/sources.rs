//! Several sources of one data set. A reader goes to the next source when the first is lost, refuses, or was never there.
//!
//! With `--source A,B` the sources know nothing of each other: what they have in common is the server. A standby
//! (`--standby-of`) copies the first one's snapshots.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;
use std::{fs, thread};

use rustix::process::Signal;

use crate::kit::{
    LONG, Source, Stage, at_once, ends, fill, kinds_and_module, number, primary, quick, says, steady_writer, succeeds,
    syncs, with_or_without,
};
use crate::metrics::{free_address, get};
use remora_lab::server::wait_until;
use remora_lab::workload::{Options, Workload, fill_every_type};
use remora_lab::{Agent, Kind, Server, assert_same_data, require};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 16;

/// A source that takes four seconds for it.
const SLOWLY: [&str; 3] = ["--no-shm", "--upload-limit", "4MiB"];

/// Slots after which the first source is killed, of 256.
const A_QUARTER: u64 = 64;

/// An address at which nobody listens.
fn nobody() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn list(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn replica(stage: &Stage, server: &Server, sources: &[SocketAddr], more: &[&str]) -> Agent {
    let (url, sources, token) = (server.url(), list(sources), stage.token.display().to_string());
    let args = ["replica", "--server", &url, "--source", &sources, "--token-file", &token];
    stage.start(None, &[&args[..], more].concat())
}

fn fetch(stage: &Stage, sources: &[SocketAddr], to: &str) -> Agent {
    let (sources, token) = (list(sources), stage.token.display().to_string());
    stage.start(None, &["fetch", "--source", &sources, "--token-file", &token, "--to", to])
}

fn filled(kind: Kind, module: bool) -> Server {
    let server = with_or_without(primary(kind), module);
    fill(&server, MEBIBYTES, 1);
    fill_every_type(&mut server.client().unwrap(), 1).unwrap();
    server
}

/// Two sources of this server, of which the first is slow.
fn two(stage: &Stage, primary: &Server) -> (Source, Source) {
    (stage.source(&primary.url(), &SLOWLY), stage.source(&primary.url(), &["--no-shm"]))
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_whose_source_is_killed_in_the_middle_begins_again_with_the_next_one_and_is_exact() {
    at_once(kinds_and_module(), |(kind, module)| {
        let (primary, stage) = (filled(kind, module), Stage::new());
        let server = with_or_without(quick(kind), module);
        let (mut first, second) = two(&stage, &primary);
        let writer = steady_writer(&primary);
        let folder = stage.path("state");
        // What was kept of the first one's snapshot is no part of the second one's.
        let more: &[&str] = if module { &[] } else { &["--state-dir", &folder] };
        let addresses = [first.address, second.address];
        let mut agent = replica(&stage, &server, &addresses, more);
        first.wait_for_slots(&mut agent, A_QUARTER);
        assert_eq!(second.snapshots_taken(), 0, "nobody has asked it");
        first.agent.kill().unwrap();
        let warning = agent.wait_for_event("source_changed", LONG).unwrap();
        says(&warning, &["WARN", &format!("to={}", second.address), &first.address.to_string()]);
        succeeds(&mut agent, &server);
        writer.stop().unwrap();
        assert_same_data(&primary, &server);
        assert_eq!(syncs(&primary), (2, 1), "one snapshot of each source, and the hand-off is partial");
        assert_eq!(second.snapshots_taken(), 1);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_has_loaded_goes_to_the_primary_if_no_other_source_has_its_stream() {
    at_once(require::kinds(), |kind| {
        let (primary, stage) = (filled(kind, false), Stage::new());
        let server = quick(kind).start().unwrap();
        let mut first = stage.source(&primary.url(), &[]);
        let second = stage.source(&primary.url(), &[]);
        let writer = steady_writer(&primary);
        let mut agent = replica(&stage, &server, &[first.address, second.address], &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        first.agent.kill().unwrap();
        says(&succeeds(&mut agent, &server), &["going to the next source"]);
        writer.stop().unwrap();
        assert_same_data(&primary, &server);
        assert_eq!((syncs(&primary), second.snapshots_taken()), ((1, 1), 0), "{kind}");
    });
}

/// The second source's base is the first one's snapshot: it costs the primary nothing, before or after.
#[test]
#[ignore = "long: make test-all"]
fn a_second_source_with_the_first_ones_snapshot_takes_over_without_a_fork() {
    let Some(()) = require::root() else { return };
    at_once(require::kinds(), |kind| {
        let (primary, stage) = (filled(kind, false), Stage::new());
        let [loaded, half] = [(); 2].map(|()| quick(kind).start().unwrap());
        let mut first = stage.source(&primary.url(), &SLOWLY);
        let base = stage.path("base.rdb");
        ends(&mut fetch(&stage, &[first.address], &base), 0);
        let mut second = stage.source(&primary.url(), &["--no-shm", "--from-file", &base, "--no-fork"]);
        second.wait_for_snapshot();
        let writer = steady_writer(&primary);
        let addresses = [first.address, second.address];
        let mut staying = replica(&stage, &loaded, &addresses, &["--stay"]);
        staying.wait_for_event("in_step", LONG).unwrap();
        let mut agent = replica(&stage, &half, &addresses, &[]);
        first.wait_for_status("a replica in the middle", |status| {
            let replicas = status["replicas"].as_array().unwrap().iter();
            let is_in_the_middle = |replica: &&serde_json::Value| {
                replica["phase"] != "stay" && replica["slots_held"].as_u64() >= Some(A_QUARTER)
            };
            replicas.filter(is_in_the_middle).count() == 1
        });
        first.agent.kill().unwrap();
        // The one that has loaded goes on at its byte, the other one begins again.
        second.wait_for_status("the server that has loaded", |status| {
            let replicas = status["replicas"].as_array().unwrap().iter();
            replicas.filter(|replica| replica["phase"] == "stay").count() == 1
        });
        succeeds(&mut agent, &half);
        staying.signal(rustix::process::Signal::TERM).unwrap();
        says(&succeeds(&mut staying, &loaded), &["going to the next source"]);
        writer.stop().unwrap();
        for server in [&loaded, &half] {
            assert_same_data(&primary, server);
        }
        assert_eq!(syncs(&primary), (1, 2), "{kind}: one fork in all, and both hand-offs are partial");
    });
}

#[test]
fn a_source_that_is_not_there_is_passed_over_by_replica_and_fetch() {
    for kind in require::kinds() {
        let (primary, stage) = (primary(kind).start().unwrap(), Stage::new());
        fill(&primary, 1, 1);
        let server = quick(kind).start().unwrap();
        let source = stage.source(&primary.url(), &[]);
        let addresses = [nobody(), source.address];
        succeeds(&mut replica(&stage, &server, &addresses, &["--retry-for", "0s"]), &server);
        assert_same_data(&primary, &server);
        let to = stage.path("dump.rdb");
        ends(&mut fetch(&stage, &addresses, &to), 0);
        assert_eq!(source.snapshots_taken(), 1, "{kind}: both got the same one");

        // The second is not asked while the first serves.
        let other = stage.source(&primary.url(), &[]);
        fs::remove_file(&to).unwrap();
        ends(&mut fetch(&stage, &[source.address, other.address], &to), 0);
        assert_eq!((source.snapshots_taken(), other.snapshots_taken()), (1, 0), "{kind}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_of_another_data_set_is_not_gone_to() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let [one, other] = [1, 2].map(|seed| {
            let server = primary(kind).start().unwrap();
            fill(&server, 24, seed);
            server
        });
        let (mut first, second) = (
            stage.source(&one.url(), &["--no-shm", "--upload-limit", "1MiB"]),
            stage.source(&other.url(), &["--no-shm"]),
        );
        let server = quick(kind).start().unwrap();
        let mut agent = replica(&stage, &server, &[first.address, second.address], &["--retry-for", "3s"]);
        agent.wait_for_line("the server follows our link", LONG).unwrap(); // and waits for some 20 s of data
        first.agent.kill().unwrap();
        // Nothing passes between the server and the second source's.
        let said = ends(&mut agent, 5);
        says(&said, &["tried for 3 s"]);
        assert_eq!((second.snapshots_taken(), number(&other, "sync_full")), (0, 0), "{said}");
        assert_eq!(server.client().unwrap().int(&["DBSIZE"]).unwrap(), 0, "{said}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_fetch_whose_source_is_killed_begins_a_new_file_with_the_next_one() {
    let Some(()) = require::root() else { return };
    at_once(require::kinds(), |kind| {
        let (primary, stage) = (filled(kind, false), Stage::new());
        let (mut first, second) = two(&stage, &primary);
        let folder = stage.path("data");
        fs::create_dir(&folder).unwrap();
        let to = format!("{folder}/dump.rdb");
        let mut agent = fetch(&stage, &[first.address, second.address], &to);
        first.wait_for_slots(&mut agent, A_QUARTER);
        first.agent.kill().unwrap();
        says(&ends(&mut agent, 0), &["going to the next source", "the primary continues from it"]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
        let loaded = quick(kind).config("dir", &folder).start().unwrap();
        assert_eq!(loaded.digest().unwrap(), primary.digest().unwrap());
        assert_eq!(second.snapshots_taken(), 1);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_backup_with_its_journal_goes_on_with_the_next_source() {
    let Some(()) = require::root() else { return };
    at_once(require::kinds(), |kind| {
        let (primary, stage) = (primary(kind).start().unwrap(), Stage::new());
        fill(&primary, 1, 1);
        let mut first = stage.source(&primary.url(), &[]);
        let second = stage.source(&primary.url(), &[]);
        let (sources, token) = (list(&[first.address, second.address]), stage.token.display().to_string());
        let to = stage.path("backups");
        fs::create_dir(&to).unwrap();
        let args = ["backup", "--source", &sources, "--token-file", &token, "--to", &to, "--keep", "2", "--journal"];
        let mut agent = stage.start(None, &args);
        agent.wait_for_line("the journal is recorded", LONG).unwrap();
        first.agent.kill().unwrap();
        // The second has no journal until the backup asks it for a snapshot.
        wait_until("a snapshot of the second source", LONG, || {
            primary.client()?.ok(&["SET", "still", "written"])?;
            thread::sleep(Duration::from_millis(50));
            let taken = second.snapshots_taken();
            Ok(if taken == 1 && agent.ended()?.is_none() { Ok(()) } else { Err(agent.output()) })
        })
        .unwrap();
        agent.wait_for_line("the journal is recorded", LONG).unwrap();
        agent.signal(rustix::process::Signal::TERM).unwrap();
        agent.wait(LONG).unwrap();
    });
}

// A standby (`remora source --standby-of`): a second source that copies the first one's snapshots, so that readers go on
// with it at the slot or the byte where they are, and the primary forks once.

/// What protects the tables: nothing, as on one host, and compressed ciphertext.
const SECURITIES: [&[&str]; 3] = [&[], &["--security", "token"], &["--security", "token", "--compress", "lz4"]];

/// Writes every kind of change, at a rate that two sources and two servers follow on a busy machine too.
fn calm_writer(primary: &Server) -> Workload {
    let options = Options { big_bytes: 1 << 16, ..Options::seeded(remora_lab::random::seed("workload")) };
    Workload::start(primary.client().unwrap(), options.rate(500)).unwrap()
}

fn standby(stage: &Stage, primary: &Server, of: SocketAddr, more: &[&str]) -> Source {
    let of = of.to_string();
    stage.source(&primary.url(), &[&SLOWLY[..], &["--standby-of", &of, "--no-fork"], more].concat())
}

/// A source that has a snapshot, and a standby that has copied all of it.
fn source_and_standby(stage: &Stage, primary: &Server, security: &[&str]) -> (Source, Source) {
    let mut first = stage.source(&primary.url(), &[&SLOWLY[..], &["--eager"], security].concat());
    first.wait_for_snapshot();
    let second = standby(stage, primary, first.address, security);
    has_a_copy(&second, &first);
    (first, second)
}

/// Waits until the standby has all of the snapshot.
fn has_a_copy(standby: &Source, first: &Source) {
    let generation = first.generation();
    standby.wait_for_status("a copy of the snapshot", |status| {
        let snapshot = &status["generation"];
        snapshot["state"] == "complete" && snapshot["generation"].as_u64() == Some(generation)
    });
    let [of_first, of_standby] = [first, standby].map(|source| source.status()["generation"].clone());
    for same in ["replid", "offset_start", "slots", "published_slots"] {
        assert_eq!(of_first[same], of_standby[same], "{same}");
    }
    says(of_standby["capture"].as_str().unwrap(), &["a copy of another source's"]);
}

/// Waits until the replica that reads from this source, beside a standby, has a quarter of its slots.
fn wait_for_slots(source: &Source) {
    source.wait_for_status("a replica in the middle", |status| {
        let replicas = status["replicas"].as_array().unwrap().iter();
        let is_in_the_middle = |replica: &serde_json::Value| {
            let is_standby = replica["name"].as_str().is_some_and(|name| name.starts_with("standby "));
            !is_standby && replica["slots_held"].as_u64() >= Some(A_QUARTER)
        };
        replicas.filter(|replica| is_in_the_middle(replica)).count() == 1
    });
}

/// Each server is exactly the primary, which has forked and copied once.
fn are_exact(primary: &Server, servers: &[&Server]) {
    for server in servers {
        assert_same_data(primary, server);
        assert_eq!(server.fact("master_replid").unwrap(), primary.fact("master_replid").unwrap());
        wait_until("the same offset", LONG, || {
            let [here, there] = [server, &primary].map(|server| number(server, "master_repl_offset"));
            Ok(if here == there { Ok(()) } else { Err(format!("{here}, and the primary is at {there}")) })
        })
        .unwrap();
    }
    assert_eq!((number(primary, "total_forks"), syncs(primary).0), (1, 1), "one fork and one full copy in all");
}

fn reader(source: &Source, server: &Server, security: &[&str]) -> Agent {
    let security: &[&str] = if security.is_empty() { &[] } else { &security[..2] };
    source.replica(server, security)
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_that_read_slots_go_on_at_theirs_with_the_standby_of_which_the_first_source_has_told() {
    // One after the other: each has two sources, two servers and a writer for each kind of server.
    for (security, module) in [(0, false), (0, true), (1, false), (2, false)] {
        let security = SECURITIES[security];
        at_once(require::kinds(), |kind| {
            let (primary, stage) = (filled(kind, module), Stage::new());
            let server = with_or_without(quick(kind), module);
            let (mut first, _second) = source_and_standby(&stage, &primary, security);
            let writer = calm_writer(&primary);
            let mut agent = reader(&first, &server, security);
            wait_for_slots(&first);
            first.agent.kill().unwrap();
            let said = succeeds(&mut agent, &server);
            says(&said, &["serves too if this source is lost", "going to the next source"]);
            writer.stop().unwrap();
            are_exact(&primary, &[&server]);
            let log = server.log();
            let begun = log.lines().filter(|line| line.contains("Full resync from")).count();
            // A server that loads by the module begins again after every broken transfer, here with the copy.
            assert!(begun == 1 || module, "{kind} {module} {security:?}: it has begun again\n{said}\n{log}");
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_that_follow_the_journal_go_on_at_their_byte_and_are_handed_over() {
    at_once(require::kinds(), |kind| {
        let (primary, stage) = (filled(kind, false), Stage::new());
        let [staying, done] = [(); 2].map(|()| quick(kind).start().unwrap());
        let (mut first, second) = source_and_standby(&stage, &primary, &[]);
        let writer = calm_writer(&primary);
        let mut agent = first.replica(&staying, &["--stay"]);
        succeeds(&mut first.replica(&done, &[]), &done);
        agent.wait_for_event("in_step", LONG).unwrap();
        first.agent.kill().unwrap();
        second.wait_for_status("the server that has loaded", |status| status["replicas"][0]["phase"] == "stay");
        let at = number(&primary, "master_repl_offset");
        wait_until("the stream to go on", LONG, || {
            let reached = number(&staying, "master_repl_offset");
            Ok(if reached > at { Ok(()) } else { Err(format!("{reached} of {at}")) })
        })
        .unwrap();
        agent.signal(Signal::TERM).unwrap();
        succeeds(&mut agent, &staying);
        writer.stop().unwrap();
        are_exact(&primary, &[&staying, &done]);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_first_source_that_comes_back_as_the_standby_of_the_second_has_its_snapshot_and_serves_when_that_dies() {
    at_once(require::kinds(), |kind| {
        let (primary, stage) = (filled(kind, false), Stage::new());
        let server = quick(kind).start().unwrap();
        let (mut first, mut second) = source_and_standby(&stage, &primary, &[]);
        let writer = calm_writer(&primary);
        first.agent.kill().unwrap();
        let address = first.address.to_string();
        let of = second.address.to_string();
        let args = ["--no-shm", "--standby-of", &of, "--no-fork"];
        let first = stage.source_at(&address, None, &primary.url(), &args);
        has_a_copy(&first, &second);
        let mut agent = second.replica(&server, &[]);
        wait_for_slots(&second);
        second.agent.kill().unwrap();
        says(&succeeds(&mut agent, &server), &["going to the next source"]);
        writer.stop().unwrap();
        are_exact(&primary, &[&server]);
    });
}

#[test]
fn a_standby_takes_no_snapshot_until_the_first_source_is_asked_for_one() {
    for kind in require::kinds() {
        let (primary, stage) = (primary(kind).start().unwrap(), Stage::new());
        fill(&primary, 1, 1);
        let first = stage.source(&primary.url(), &["--no-shm"]);
        let scraped = free_address();
        let mut second = standby(&stage, &primary, first.address, &["--metrics", &scraped.to_string()]);
        first.wait_for_status("the standby", |status| status["replicas"][0]["name"].as_str().is_some());
        let page = || get(scraped, "/metrics").text;
        says(&page(), &["remora_standby_copy 0.0"]);
        assert_eq!((first.snapshots_taken(), number(&primary, "sync_full")), (0, 0), "{kind}");
        let server = quick(kind).start().unwrap();
        succeeds(&mut first.replica(&server, &[]), &server);
        second.agent.wait_for_event("standby_copies", LONG).unwrap();
        has_a_copy(&second, &first);
        says(&page(), &["remora_standby_copy 1.0", "remora_standby_lag_bytes "]);
        are_exact(&primary, &[&server]);
    }
}

#[test]
fn a_first_source_of_another_primary_and_the_standby_itself_are_refused_by_name() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let [one, other] = [(); 2].map(|()| primary(kind).start().unwrap());
        let mut first = stage.source(&one.url(), &["--no-shm", "--eager"]);
        first.wait_for_snapshot();
        let mut second = standby(&stage, &other, first.address, &[]);
        let waits = second.agent.wait_for_line("both must have the same primary", LONG).unwrap();
        says(&waits, &[&first.address.to_string(), &other.url(), &one.fact("master_replid").unwrap()]);
        assert_eq!((second.snapshots_taken(), number(&other, "sync_full")), (0, 0), "{kind}");

        let address = second.address.to_string();
        second.stop();
        let args = ["--standby-of", &address];
        let mut alone = stage.source_at(&address, None, &other.url(), &args);
        alone.agent.wait_for_line("that is this source itself", LONG).unwrap();
    }
}

#[test]
fn a_standby_whose_first_source_is_not_there_asks_its_server_after_a_while() {
    for kind in require::kinds() {
        let (primary, stage) = (primary(kind).start().unwrap(), Stage::new());
        fill(&primary, 1, 1);
        let first = stage.source(&primary.url(), &[]);
        let address = first.address.to_string();
        first.stop();
        let mut second = stage.source(&primary.url(), &["--standby-of", &address, "--fork-after", "2s"]);
        second.agent.wait_for_event("standby_waits", Duration::from_secs(30)).unwrap();
        let server = quick(kind).start().unwrap();
        let mut agent = second.replica(&server, &[]);
        agent.wait_for_line("this source is a standby without a snapshot", LONG).unwrap();
        succeeds(&mut agent, &server);
        are_exact(&primary, &[&server]);
    }
}
