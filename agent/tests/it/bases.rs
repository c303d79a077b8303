//! `remora source --base`: a snapshot from what is stored, in the order of bases, and a fork of the server last or never.

use std::fs;
use std::path::Path;

use remora_lab::workload::{Options, Workload, fill_every_type};
use remora_lab::{Kind, Server, assert_same_data, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{
    LONG, Source, Stage, at_once, ends, fill, number, primary, quick, says, syncs, write_past_the_backlog,
};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 4;

/// A primary with data of every type, and a replica that follows it: its files say where in the history they were taken.
fn two(kind: Kind) -> (Server, Server) {
    let server = primary(kind).start().unwrap();
    fill(&server, MEBIBYTES, 1);
    fill_every_type(&mut server.client().unwrap(), 1).unwrap();
    (followed(kind, &server), server)
}

fn followed(kind: Kind, server: &Server) -> Server {
    let replica = quick(kind).start().unwrap();
    replica.replicate(server).unwrap();
    replica.wait_for_link(LONG).unwrap();
    replica
}

/// Writes without messages to subscribers, which would not be delivered twice.
fn writer(server: &Server) -> Workload {
    let options = Options { big_bytes: 1 << 16, ..Options::seeded(remora_lab::random::seed("workload")) };
    Workload::start(server.client().unwrap(), options.rate(500)).unwrap()
}

/// The folder in which the server has just saved its data.
fn saved(server: &Server) -> String {
    server.client().unwrap().ok(&["SAVE"]).unwrap();
    server.configured("dir").unwrap()
}

/// Full copies and forks.
fn cost(server: &Server) -> [u64; 2] {
    [syncs(server).0, number(server, "total_forks")]
}

fn base(source: &Source, kind: &str) -> Value {
    source.wait_for_status(kind, |status| status["base"]["kind"] == kind)["base"].clone()
}

fn joiner(kind: Kind, source: &Source) -> Server {
    let joiner = quick(kind).start().unwrap();
    source.replicate(&joiner, &[]);
    joiner
}

#[test]
fn a_file_that_a_replicas_server_has_saved_is_the_base_and_nothing_forks() {
    at_once(require::kinds(), |kind| {
        let (replica, server) = two(kind);
        let folder = saved(&replica);
        let (writer, before, stage) = (writer(&server), cost(&server), Stage::new());
        writer.wait_for(1_000);
        // The file by its name, and the folder of the server.
        for place in [format!("{folder}/dump.rdb"), folder.clone()] {
            let source = stage.source(&server.url(), &["--base", &place, "--no-fork", "--repeat-messages", "1h"]);
            let told = base(&source, "file");
            says(told["place"].as_str().unwrap(), &[&folder, "dump.rdb"]);
            assert!(told["stream_bytes"].as_u64() > Some(0), "{told}");
            says(&source.drawn_status(), &["base       ", &folder, "of stream behind it"]);
            let dry = ends(&mut source.replica(&quick(kind).start().unwrap(), &["--dry-run"]), 0);
            says(&dry, &["base        ", &folder, "of stream behind it", "fork        none"]);
            let joiners = [joiner(kind, &source), joiner(kind, &source)];
            let told = base(&source, "snapshot");
            says(told["place"].as_str().unwrap(), &["the source's snapshot, from ", &folder]);
            says(source.status()["generation"]["capture"].as_str().unwrap(), &["stored"]);
            writer.wait_for(writer.commands() + 300);
            for joiner in &joiners {
                joiner.wait_for_link(LONG).unwrap();
            }
            assert_eq!(source.snapshots_taken(), 1);
            source.stop();
        }
        writer.stop().unwrap();
        assert_same_data(&server, &replica);
        assert_eq!(cost(&server), before, "{kind}: {}", server.log());
    });
}

#[test]
fn a_server_that_must_not_fork_does_not_while_no_base_serves_and_a_newer_file_ends_the_wait() {
    at_once(require::kinds(), |kind| {
        let server = quick(kind).config("repl-backlog-size", "16kb").start().unwrap();
        fill(&server, 1, 1);
        let replica = followed(kind, &server);
        let (stage, folder) = (Stage::new(), saved(&replica));
        let place = stage.path("base.rdb");
        fs::copy(format!("{folder}/dump.rdb"), &place).unwrap();
        write_past_the_backlog(&server);
        let before = cost(&server);
        let mut source = stage.source(&server.url(), &["--base", &place, "--no-fork"]);
        let late = quick(kind).start().unwrap();
        let mut agent = source.replica(&late, &[]);
        source.agent.wait_for_line("no snapshot without a fork (--no-fork)", LONG).unwrap();
        let told = base(&source, "none");
        says(told["passed_over"].as_str().unwrap(), &[&place, "backlog", "--no-fork"]);
        says(&source.drawn_status(), &["base       none, replicas that join wait"]);
        assert_eq!(cost(&server), before, "{kind}: it waits");
        assert_eq!(late.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
        // The replica has followed all the time: what it saves now reaches to the present.
        assert_eq!(saved(&replica), folder);
        fs::copy(format!("{folder}/dump.rdb"), stage.path("new.rdb")).unwrap();
        fs::rename(stage.path("new.rdb"), &place).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_same_data(&server, &late);
        assert_eq!(cost(&server), before, "{kind}: {}", server.log());
    });
}

#[test]
fn of_what_serves_the_newest_is_taken_and_the_server_forks_where_nothing_does() {
    at_once(require::kinds(), |kind| {
        let (replica, server) = two(kind);
        let (stage, folder) = (Stage::new(), saved(&replica));
        let places = ["old.rdb", "new.rdb", "broken.rdb", "missing.rdb"].map(|name| stage.path(name));
        let [old, new, broken, missing] = &places;
        fs::copy(format!("{folder}/dump.rdb"), old).unwrap();
        server.client().unwrap().ok(&["SET", "one", "more"]).unwrap();
        remora_lab::server::wait_until("the replica to follow", LONG, || {
            let [here, there] = [&replica, &server].map(|server| number(server, "master_repl_offset"));
            Ok(if here == there { Ok(()) } else { Err(format!("{here} of {there}")) })
        })
        .unwrap();
        saved(&replica);
        fs::copy(format!("{folder}/dump.rdb"), new).unwrap();
        // Its head is right, and its end is missing: it is newer than all, and found out when it is read.
        server.client().unwrap().ok(&["SET", "two", "more"]).unwrap();
        saved(&replica);
        let bytes = fs::read(format!("{folder}/dump.rdb")).unwrap();
        fs::write(broken, &bytes[..bytes.len() - 20]).unwrap();
        let before = cost(&server);
        let named: Vec<&str> = places.iter().flat_map(|place| ["--base", place]).collect();
        let source = stage.source(&server.url(), &[&named[..], &["--no-fork"]].concat());
        let told = base(&source, "file");
        says(told["passed_over"].as_str().unwrap(), &[missing, "cannot be read"]);
        let server_of = joiner(kind, &source);
        assert_same_data(&server, &server_of);
        says(&source.agent.output(), &["no snapshot comes from", broken, "damaged", &format!("comes from {new}")]);
        assert_eq!(cost(&server), before, "{kind}");
        source.stop();

        // Files of another history do not serve.
        let other = primary(kind).start().unwrap();
        fill(&other, 1, 2);
        let source = stage.source(&other.url(), &["--base", old]);
        says(base(&source, "fork")["passed_over"].as_str().unwrap(), &[old]);
        let before = cost(&other);
        assert_same_data(&other, &joiner(kind, &source));
        assert_eq!(cost(&other), before.map(|count| count + 1), "{kind}");
    });
}

/// A standby whose first source dies before it has a snapshot takes the next base, and the primary never forks.
#[test]
fn a_standby_without_a_copy_goes_on_with_the_next_base() {
    at_once(require::kinds(), |kind| {
        let (replica, server) = two(kind);
        let (stage, folder) = (Stage::new(), saved(&replica));
        let before = cost(&server);
        let mut first = stage.source(&server.url(), &[]);
        let of = first.address.to_string();
        let more = ["--standby-of", &of, "--base", &folder, "--no-fork", "--fork-after", "1s"];
        let second = stage.source(&server.url(), &more);
        base(&second, "copy");
        first.agent.signal(Signal::KILL).unwrap();
        assert_same_data(&server, &joiner(kind, &second));
        says(base(&second, "snapshot")["place"].as_str().unwrap(), &[&folder]);
        assert_eq!(cost(&server), before, "{kind}");
        assert!(Path::new(&folder).is_dir());
    });
}
