//! A standby (`remora source --standby-of`): a second source that copies the first one's snapshots, so that readers go on
//! with it at the slot or the byte where they are, and the primary forks once.

use std::net::SocketAddr;
use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::workload::{Options, Workload, fill_every_type};
use remora_lab::{Agent, Kind, Server, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, Stage, at_once, fill, number, primary, quick, says, succeeds, syncs, with_or_without};
use crate::metrics::{free_address, get};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 16;

/// A source that takes four seconds for it, also where slots are compressed.
const SLOWLY: [&str; 3] = ["--no-shm", "--upload-limit", "4MiB"];

/// Slots after which the first source is killed, of 256.
const A_QUARTER: u64 = 64;

/// What protects the tables: nothing, as on one host, and compressed ciphertext.
const SECURITIES: [&[&str]; 3] = [&[], &["--security", "token"], &["--security", "token", "--compress", "lz4"]];

/// Writes every kind of change, at a rate that two sources and two servers follow on a busy machine too.
fn calm_writer(primary: &Server) -> Workload {
    let options = Options { big_bytes: 1 << 16, ..Options::seeded(remora_lab::random::seed("workload")) };
    Workload::start(primary.client().unwrap(), options.rate(500)).unwrap()
}

fn filled(kind: Kind, module: bool) -> Server {
    let server = with_or_without(primary(kind), module);
    fill(&server, MEBIBYTES, 1);
    fill_every_type(&mut server.client().unwrap(), 1).unwrap();
    server
}

fn standby(stage: &Stage, primary: &Server, of: SocketAddr, more: &[&str]) -> Source {
    let of = of.to_string();
    stage.source(&primary.url(), &[&SLOWLY[..], &["--standby-of", &of, "--no-fork"], more].concat())
}

/// A source that has a snapshot, and a standby that has copied all of it.
fn two(stage: &Stage, primary: &Server, security: &[&str]) -> (Source, Source) {
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

fn replica(source: &Source, server: &Server, security: &[&str]) -> Agent {
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
            let (mut first, _second) = two(&stage, &primary, security);
            let writer = calm_writer(&primary);
            let mut agent = replica(&first, &server, security);
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
        let (mut first, second) = two(&stage, &primary, &[]);
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
        let (mut first, mut second) = two(&stage, &primary, &[]);
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
