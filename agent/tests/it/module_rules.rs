//! The module beside a server's own work: what an idle one costs, which rules a user needs for it, and what clients see
//! while it loads.

use std::thread;
use std::time::Duration;

use remora_agent::server::Task;
use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Kind, Server, assert_same_data, fill_every_type, require};

use crate::kit::{LONG, Source, Stage, fill, load_small, number, primary, succeeds};

/// Used memory that an idle module may add: its commands and its type.
const IDLE_BYTES: u64 = 128 << 10;

/// Processor time that an idle module may add in [`IDLE_TIME`], in seconds: less than one tick of the kernel's clock.
const IDLE_CPU: f64 = 0.015;

/// How long servers are watched. A server by itself uses about three milliseconds of processor time a second.
const IDLE_TIME: Duration = Duration::from_secs(3);

/// How often they are watched: what a module costs it costs each time.
const IDLE_WATCHES: usize = 3;

#[test]
#[ignore = "long: make test-all"]
fn an_idle_module_costs_neither_memory_nor_time() {
    for kind in require::kinds() {
        let start = |builder: Builder| {
            let server = builder.start().unwrap();
            fill_every_type(&mut server.client().unwrap(), 3).unwrap();
            server
        };
        let without = start(Server::builder(kind));
        let with = start(Server::builder(kind).module("").unwrap());
        let (bytes, more) = (number(&without, "used_memory"), number(&with, "used_memory"));
        assert!(more < bytes + IDLE_BYTES, "{kind}: {more} bytes with the module, {bytes} without");
        let watch = || {
            let before = [&without, &with].map(|server| server.cpu_seconds().unwrap());
            thread::sleep(IDLE_TIME);
            let after = [&without, &with].map(|server| server.cpu_seconds().unwrap());
            [after[0] - before[0], after[1] - before[1]]
        };
        // The kernel counts in ticks, and on a busy machine one more may hit either server.
        let watched: Vec<[f64; 2]> = std::iter::repeat_with(watch).take(IDLE_WATCHES).collect();
        let is_idle = watched.iter().any(|[alone, with_it]| with_it <= &(alone + IDLE_CPU));
        assert!(is_idle, "{kind}: seconds without a module, and with an idle one: {watched:?}");
    }
}

/// Rules without which the module is not used.
const SOURCE_RULES: &str = "+remora.status +remora.arm +remora.disarm";
const REPLICA_RULES: &str = "+remora.status +remora.load +multi +exec +discard";

/// Makes a replica with users that have `source` and `replica` besides the rules that are always needed. Returns the
/// outputs of both agents.
fn with_rules(kind: Kind, source: &str, replica: &str) -> [String; 2] {
    let stage = Stage::new();
    let (source, replica) =
        (format!("{} {source}", Task::Source.rules()), format!("{} {replica}", Task::Replica.rules()));
    let primary = primary(kind).module("").unwrap().user("agent", "secret", &source).start().unwrap();
    let server = Server::builder(kind).module("").unwrap().user("agent", "secret", &replica).start().unwrap();
    fill(&primary, 8, 1);
    let file = stage.secret("password", "secret");
    let login = ["--user", "agent", "--password-file", &file];
    let source = stage.source(&primary.url(), &[&login[..], &["--module-capture", "walk"]].concat());
    let mut agent = stage.replica(&server.url(), source.address, &login);
    succeeds(&mut agent, &server);
    assert_same_data(&primary, &server);
    [source.agent.output(), agent.output()]
}

fn is_loaded_by_module(agent: &str) -> bool {
    agent.contains("out of shared memory")
}

#[test]
fn a_user_with_the_rules_of_the_help_page_uses_the_module_and_one_without_them_works_without_it() {
    // The rules are those that the help pages and docs/reference/acl.md name.
    for (task, rules) in [(Task::Source, SOURCE_RULES), (Task::Replica, REPLICA_RULES)] {
        assert!(task.optional().contains(rules), "{}", task.optional());
    }
    for kind in require::kinds() {
        let [source, replica] = with_rules(kind, SOURCE_RULES, REPLICA_RULES);
        assert!(source.contains("method=the module") && is_loaded_by_module(&replica), "{source}\n{replica}");
        let [source, replica] = with_rules(kind, "", "");
        assert!(source.contains("method=psync") && !is_loaded_by_module(&replica), "{source}\n{replica}");
    }
}

#[test]
fn clients_are_told_that_the_server_is_loading_while_the_module_loads() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let replica = Server::builder(kind).module("").unwrap().start().unwrap();
        fill(&primary, 8, 1);
        // Too short for the module: the server loads them itself, at a fifth of a millisecond each.
        load_small(&primary, 10_000, 100);
        replica.configure("loading-process-events-interval-bytes", "1024").unwrap();
        replica.configure("key-load-delay", "200").unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        let mut agent: Agent = source.replica(&replica, &[]);
        wait_until("the module to load", LONG, || {
            let state = replica.fact("remora_load_state")?;
            Ok(if state == "loading" { Ok(()) } else { Err(format!("{state}: {}", agent.output())) })
        })
        .unwrap();
        let mut client = replica.client().unwrap();
        let refused = client.call(&["GET", "small 1"]).unwrap_err().to_string();
        assert!(refused.contains("LOADING"), "{refused}");
        assert_eq!(number(&replica, "loading"), 1);
        replica.configure("key-load-delay", "0").unwrap();
        succeeds(&mut agent, &replica);
        assert!(is_loaded_by_module(&agent.output()), "{}", agent.output());
        assert_same_data(&primary, &replica);
    }
}
