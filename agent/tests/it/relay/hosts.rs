//! Relays over cables of a known rate, which is their purpose. Needs root, for network namespaces.

use std::time::{Duration, Instant};

use remora_lab::{Agent, Host, Kind, Net, Server, Shape, assert_same_data, require};
use rustix::process::Signal;

use crate::attend::{PORT, SERVER_USER, handed_over};
use crate::kit::{LONG, Source, Stage, at_once, ends, fill, load_slowly, quick, succeeds, syncs};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 24;

/// Rate of every cable, in bytes per second each way: 100 Mb/s. The snapshot takes two seconds.
const CABLE: u64 = 100_000_000 / 8;

/// Number of replicas that are made at once.
const REPLICAS: usize = 3;

/// A host with a primary on it; `seed` chooses the data.
fn primary_behind_a_cable(net: &Net, kind: Kind, seed: u64) -> (Host, Server) {
    let host = net.host("primary").unwrap();
    let primary = Server::builder(kind).on(&host).config("repl-diskless-sync-delay", 0).start().unwrap();
    fill(&primary, MEBIBYTES, seed);
    host.shape(Shape::rate(CABLE)).unwrap();
    (host, primary)
}

/// A host with an empty server on it.
fn site(net: &Net, kind: Kind, number: usize) -> (Host, Server) {
    let host = net.host(&format!("replica {number}")).unwrap();
    host.shape(Shape::rate(CABLE)).unwrap();
    let server = Server::builder(kind).on(&host).start().unwrap();
    (host, server)
}

#[test]
#[ignore = "long: make test-all"]
fn three_replicas_behind_one_cable_take_about_one_copy_over_it() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::valkey() else { return };
    let net = Net::new().unwrap();
    let (here, primary) = primary_behind_a_cable(&net, kind, 1);
    let stage = Stage::new();
    let mut source = stage.source_on(&here, &primary.url(), &["--eager"]);
    source.wait_for_snapshot();

    let (host, server) = site(&net, kind, 0);
    let alone = time(vec![(stage.replica_on(&host, &server.url(), source.address, &[]), &server)]);
    let before = source.bytes_served();
    let sites: Vec<(Host, Server)> = (1..=REPLICAS).map(|number| site(&net, kind, number)).collect();
    let start = |(host, server): &(Host, Server)| stage.replica_on(host, &server.url(), source.address, &[]);
    let together = time(sites.iter().map(|site| (start(site), &site.1)).collect());

    let sent = source.bytes_served() - before;
    println!("alone {alone:?}, {REPLICAS} together {together:?}, {sent} bytes from the source");
    assert!(sent * 100 <= ((MEBIBYTES as u64) << 20) * super::ONCE, "{sent} bytes left the source");
    for (_, server) in &sites {
        assert_same_data(&primary, server);
    }
}

/// Rate of the lender's cable once it slows down, in bytes per second. Its messages still pass, and the rest of its own
/// copy takes a minute at least.
const SLOW_CABLE: u64 = CABLE / 60;

/// Slots that the lender holds when its reader joins, and that the reader holds when the lender slows down, of 384. The
/// source knows the reader's rate by then.
const SLOTS_BEFORE: [u64; 2] = [16, 160];

#[test]
#[ignore = "long: make test-all"]
fn a_reader_whose_lender_slows_down_in_the_middle_moves_and_finishes_in_time() {
    let Some(()) = require::namespaces() else { return };
    at_once(require::kinds(), a_lender_slows_down);
}

fn a_lender_slows_down(kind: Kind) {
    let net = Net::new().unwrap();
    let (here, primary) = primary_behind_a_cable(&net, kind, 2);
    let stage = Stage::new();
    let mut source = stage.source_on(&here, &primary.url(), &["--eager"]);
    source.wait_for_snapshot();
    let (lender, reader) = (site(&net, kind, 1), site(&net, kind, 2));
    let start = |site: &(Host, Server), name: &str, slots: u64| {
        // Slowly enough for both to be in the middle.
        let more = ["--download-limit", "6MiB", "--name", name];
        let agent = stage.replica_on(&site.0, &site.1.url(), source.address, &more);
        let status = source.wait_for_status("a replica to hold some slots", |status| {
            super::replica(status, name).is_some_and(|at| at["slots_held"].as_u64() >= Some(slots))
        });
        (agent, status)
    };
    let (mut lending, _) = start(&lender, "lender", SLOTS_BEFORE[0]);
    let (mut reading, status) = start(&reader, "reader", SLOTS_BEFORE[1]);
    let of = |name: &str, field: &str| super::replica(&status, name).unwrap()[field].clone();
    assert_eq!(of("reader", "reads_from"), of("lender", "session"), "{status}");
    lender.0.shape(Shape::rate(SLOW_CABLE)).unwrap();
    let began = Instant::now();
    succeeds(&mut reading, &reader.1);
    let took = began.elapsed();
    println!("{took:?} after the lender slowed down");
    // Behind it the reader would be done when it is, after another minute.
    assert!(lending.ended().unwrap().is_none(), "{took:?}; the source:\n{}", source.agent.output());
    source.agent.wait_for_event("upstream_assigned", LONG).unwrap();
    assert_same_data(&primary, &reader.1);
}

/// Waits until the last agent has made its server a replica, and returns how long that took.
fn time(agents: Vec<(Agent, &Server)>) -> Duration {
    let began = Instant::now();
    for (mut agent, server) in agents {
        succeeds(&mut agent, server);
    }
    began.elapsed()
}

// Agents that attend servers on hosts of their own lend slots to each other, also when their servers have gone on.

/// A primary behind a cable, with its source.
struct Scene {
    stage: Stage,
    net: Net,
    kind: Kind,
    primary: Server,
    source: Source,
}

impl Scene {
    fn new(kind: Kind) -> Scene {
        let net = Net::new().unwrap();
        let host = net.host("primary").unwrap();
        let primary = quick(kind).config("repl-backlog-size", "256mb").on(&host).start().unwrap();
        fill(&primary, MEBIBYTES, 1);
        host.shape(Shape::rate(CABLE)).unwrap();
        let stage = Stage::new();
        let mut source = stage.source_on(&host, &primary.url(), &["--eager"]);
        source.wait_for_snapshot();
        Scene { stage, net, kind, primary, source }
    }

    /// A host with an empty server, and rules for its connections.
    fn site(&self, name: &str) -> (Host, Server) {
        let host = self.net.host(name).unwrap();
        host.shape(Shape::rate(CABLE)).unwrap();
        let server = quick(self.kind).as_user(SERVER_USER).on(&host).start().unwrap();
        let rules = ["intercept", "add", "--server-uid", &SERVER_USER.to_string(), "--agent-uid", "0"];
        self.stage.start(Some(&host), &rules).wait_for_success(LONG).unwrap();
        (host, server)
    }

    fn attend(&self, (host, server): &(Host, Server), more: &[&str]) -> Agent {
        let (url, source, port) = (server.url(), self.source.address.to_string(), self.primary.port().to_string());
        let token = self.stage.token.display().to_string();
        let args = ["attend", "--server", &url, "--source", &source, "--token-file", &token, "--listen-port", PORT];
        let args = [&args[..], &["--primary-port", &port, "--name", host.name()], more].concat();
        let mut agent = self.stage.start(Some(host), &args);
        agent.wait_for_event("attending", LONG).unwrap();
        agent
    }

    /// Waits until the second reads slots from the first.
    fn wait_until_it_reads_from(&self, reader: &str, lender: &str) {
        self.source.wait_for_status("a replica to read from another one", |status| {
            let of = |name: &str| super::replica(status, name);
            match (of(reader), of(lender)) {
                (Some(reader), Some(lender)) => reader["reads_from"] == lender["session"],
                _ => false,
            }
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn servers_that_lose_their_data_at_once_take_about_one_copy_out_of_the_primarys_host() {
    let Some(()) = require::namespaces() else { return };
    for kind in require::kinds() {
        let scene = Scene::new(kind);
        let sites: Vec<(Host, Server)> = (0..REPLICAS).map(|number| scene.site(&format!("replica {number}"))).collect();
        let agents: Vec<Agent> = sites.iter().map(|site| scene.attend(site, &[])).collect();
        let before = scene.source.bytes_served();
        for (_, server) in &sites {
            server.replicate(&scene.primary).unwrap();
        }
        for (agent, (_, server)) in agents.iter().zip(&sites) {
            handed_over(agent, server, 1);
        }
        let sent = scene.source.bytes_served() - before;
        println!("{kind}: {sent} bytes from the source for {REPLICAS} replicas");
        // On a busy machine some of them read from the source for a while before another one has anything to give.
        assert!(sent < 2 * ((MEBIBYTES as u64) << 20), "{sent} bytes left the source");
        assert_eq!(syncs(&scene.primary), (1, REPLICAS as u64), "the source's, and the hand-offs");
        for (_, server) in &sites {
            assert_same_data(&scene.primary, server);
        }
    }
}

/// What becomes of a lender whose server has gone on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    /// Its server needs another full copy.
    AnotherCopy,
    /// It is stopped.
    Stopped,
}

#[test]
#[ignore = "long: make test-all"]
fn a_lender_goes_on_when_its_server_has_and_its_next_sync_or_a_signal_ends_that() {
    let Some(()) = require::namespaces() else { return };
    for (kind, then) in require::kinds().into_iter().flat_map(|kind| [(kind, Then::AnotherCopy), (kind, Then::Stopped)])
    {
        let scene = Scene::new(kind);
        let (lender, reader) = (scene.site("lender"), scene.site("reader"));
        let mut lending = scene.attend(&lender, &[]);
        load_slowly(&lender.1, 20_000);
        lender.1.replicate(&scene.primary).unwrap();
        super::wait_for_slots(&scene.source, "lender", 16);
        let reading = scene.attend(&reader, &["--download-limit", "2MiB"]);
        reader.1.replicate(&scene.primary).unwrap();
        scene.wait_until_it_reads_from("reader", "lender");
        load_slowly(&lender.1, 0);
        // Its server is on its own, and its new connections come to the agent again, while the reader still reads.
        lending.wait_for_line("replica reads slots from here still", LONG).unwrap();
        handed_over(&lending, &lender.1, 1);
        scene.wait_until_it_reads_from("reader", "lender");
        match then {
            Then::AnotherCopy => {
                let mut client = lender.1.client().unwrap();
                client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
                client.ok(&["FLUSHALL"]).unwrap();
                lender.1.replicate(&scene.primary).unwrap();
                handed_over(&lending, &lender.1, 2);
            }
            Then::Stopped => {
                lending.signal(Signal::TERM).unwrap();
                ends(&mut lending, 0);
            }
        }
        handed_over(&reading, &reader.1, 1);
        assert_eq!(syncs(&scene.primary).0, 1, "{kind}, {then:?}: the source's alone\n{}", lending.output());
        for (_, server) in [&lender, &reader] {
            assert_same_data(&scene.primary, server);
        }
    }
}

/// The arguments of a fetch that shows itself under this name.
fn fetch(scene: &Scene, name: &str, to: &str) -> Vec<String> {
    let (source, token) = (scene.source.address.to_string(), scene.stage.token.display().to_string());
    ["fetch", "--source", &source, "--token-file", &token, "--to", to, "--name", name].map(str::to_owned).to_vec()
}

#[test]
#[ignore = "long: make test-all"]
fn a_file_is_read_from_an_agent_that_attends_and_lent_while_it_arrives() {
    let Some(()) = require::namespaces() else { return };
    for kind in require::kinds() {
        let scene = Scene::new(kind);
        let before = scene.source.bytes_served();
        let (lender, reader) = (scene.site("lender"), scene.site("reader"));
        let host = scene.net.host("file").unwrap();
        host.shape(Shape::rate(CABLE)).unwrap();
        let lending = scene.attend(&lender, &[]);
        load_slowly(&lender.1, 20_000);
        lender.1.replicate(&scene.primary).unwrap();
        super::wait_for_slots(&scene.source, "lender", 16);
        let to = scene.stage.path("dump.rdb");
        let limited = ["--download-limit".to_owned(), "4MiB".to_owned()];
        let args = [fetch(&scene, "file", &to), limited.to_vec()].concat();
        let mut fetching = scene.stage.start(Some(&host), &args.iter().map(String::as_str).collect::<Vec<_>>());
        scene.wait_until_it_reads_from("file", "lender");
        // The chain's third: it reads what the file's command has got, and goes on elsewhere when that has ended.
        let reading = scene.attend(&reader, &[]);
        reader.1.replicate(&scene.primary).unwrap();
        scene.wait_until_it_reads_from("reader", "file");
        fetching.wait_for_success(LONG).unwrap();
        load_slowly(&lender.1, 0);
        handed_over(&lending, &lender.1, 1);
        handed_over(&reading, &reader.1, 1);
        let sent = scene.source.bytes_served() - before;
        assert!(sent * 100 <= ((MEBIBYTES as u64) << 20) * super::ONCE, "{kind}: {sent} bytes left the source");
        assert_eq!(syncs(&scene.primary).0, 1, "{kind}: the source's alone");
        for (_, server) in [&lender, &reader] {
            assert_same_data(&scene.primary, server);
        }
        let loaded = quick(kind).config("dir", scene.stage.folder().display()).start().unwrap();
        assert_eq!(loaded.digest().unwrap(), scene.primary.digest().unwrap(), "{kind}: {}", fetching.output());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_agent_reads_from_one_that_attends() {
    let (Some(kind), Some(())) = (require::redis(), require::namespaces()) else { return };
    let scene = Scene::new(kind);
    let (lender, reader) = (scene.site("lender"), scene.site("reader"));
    let lending = scene.attend(&lender, &["--peer-listen", &format!("{}:7390", lender.0.address())]);
    load_slowly(&lender.1, 20_000);
    lender.1.replicate(&scene.primary).unwrap();
    super::wait_for_slots(&scene.source, "lender", 16);
    let more = ["--name", "reader", "--download-limit", "4MiB"];
    let mut reading = scene.stage.replica_on(&reader.0, &reader.1.url(), scene.source.address, &more);
    scene.wait_until_it_reads_from("reader", "lender");
    load_slowly(&lender.1, 0);
    succeeds(&mut reading, &reader.1);
    assert!(reading.output().contains(&format!("address={}:7390", lender.0.address())), "{}", reading.output());
    handed_over(&lending, &lender.1, 1);
    for (_, server) in [&lender, &reader] {
        assert_same_data(&scene.primary, server);
    }
}
