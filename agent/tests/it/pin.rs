//! The hand-off under writes that the primary's backlog could never hold: what a replica needs is pinned there, and no
//! replica costs a second full copy.

use std::iter;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, assert_same_data, require};

use crate::attend::{self, handed_over};
use crate::kit::{LONG, Stage, fill_keys, load_small, number, quick, says, succeeds, syncs};

/// The default of Redis.
const BACKLOG: &str = "1mb";

/// A journal that holds what is written in the time of a test, also on a busy machine.
const JOURNAL: [&str; 4] = ["--memory", "1GiB", "--journal-memory", "800MiB"];

/// What clients write, faster than any estimate allows.
#[derive(Clone, Copy, Debug)]
enum Writes {
    /// Values that are each longer than the backlog: up to 60 MB a second.
    Long,
    /// The same, three times a second: a server that is attended connects again by its own clock.
    LongAndSeldom,
    /// Many values of 4 KiB: some 50 MB a second. On a busy machine more than the backlog is written in one round trip:
    /// the primary then refuses a pin, which is asked for again.
    Many,
}

/// Ends the writes when it is dropped, also by a failed assertion.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Writes {
    /// Writes until told to stop.
    fn run(self, primary: &Server, stop: &AtomicBool) {
        let mut client = primary.client().unwrap();
        let mut count = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            count += 1;
            match self {
                Writes::Long | Writes::LongAndSeldom => {
                    let value = vec![b'a' + (count % 26) as u8; 3 << 20];
                    client.ok(&[b"SET".as_slice(), format!("long:{}", count % 5).as_bytes(), &value]).unwrap();
                    let pause = if matches!(self, Writes::Long) { 50 } else { 330 };
                    thread::sleep(Duration::from_millis(pause));
                }
                Writes::Many => {
                    let value = format!("{count:04096}");
                    let key = |n: u64| format!("many:{}", (count * 64 + n) % 2000);
                    for n in 0..64 {
                        client.ok(&["SET", &key(n), &value]).unwrap();
                    }
                    thread::sleep(Duration::from_millis(5));
                }
            }
        }
    }
}

fn pairs() -> impl Iterator<Item = (Kind, Writes)> {
    require::kinds().into_iter().flat_map(|kind| [(kind, Writes::Long), (kind, Writes::Many)])
}

/// The copies that a primary has sent to their end.
fn copies(primary: &Server) -> usize {
    primary.log().lines().filter(|line| line.contains("Streamed RDB transfer") && line.contains("succeeded")).count()
}

/// The pins that the primary has refused, as the agents that asked for them say. On a busy machine a value that is longer
/// than the backlog may come between an agent's question and its request.
fn refused_pins<'a>(askers: impl IntoIterator<Item = &'a Agent>) -> u64 {
    let is_refused = |line: &&str| line.contains("for the link that would have pinned it");
    askers.into_iter().map(|asker| asker.output().lines().filter(is_refused).count() as u64).sum()
}

/// Asserts that the primary has refused no server: only pins, after each of which the agents asked again.
fn refused_only_pins<'a>(primary: &Server, before: (u64, u64), askers: impl IntoIterator<Item = &'a Agent>) {
    let refused = refused_pins(askers);
    let (full, failed) = refusals(primary);
    assert_eq!((full - before.0, failed - before.1), (refused, refused), "{}", primary.log());
}

/// The copies that were asked for, and the continuations that were refused.
fn refusals(primary: &Server) -> (u64, u64) {
    (number(primary, "sync_full"), number(primary, "sync_partial_err"))
}

/// Hands replicas over while clients write, and asserts that each was continued.
fn hands_over(primary: &Server, source: &Agent, writes: Writes, agents: impl FnOnce() -> Vec<(Agent, Server)>) {
    let (stop, full) = (AtomicBool::new(false), number(primary, "sync_full"));
    let replicas = thread::scope(|scope| {
        let writer = scope.spawn(|| writes.run(primary, &stop));
        let stops = Stop(&stop);
        let mut agents = agents();
        for (agent, replica) in &mut agents {
            let said = succeeds(agent, replica);
            assert!(!writer.is_finished(), "the hand-off must not wait for the writes to end: {said}");
            says(&said, &["handing the server over: caught up"]);
        }
        drop(stops);
        writer.join().unwrap();
        agents
    });
    let (now, continued) = syncs(primary);
    assert_eq!(copies(primary), 1, "one copy, the source's: {}", primary.log());
    assert!(continued as usize >= replicas.len());
    assert_eq!(number(primary, "sync_full"), now);
    refused_only_pins(primary, (full + 1, 0), iter::once(source).chain(replicas.iter().map(|(agent, _)| agent)));
    for (_, replica) in &replicas {
        replica.wait_for_link(LONG).unwrap();
        assert_same_data(primary, replica);
    }
    // The source, and the servers: no link that pins is left.
    wait_until("the pins to be released", LONG, || {
        let connected = number(primary, "connected_slaves") as usize;
        Ok(if connected <= replicas.len() + 1 { Ok(()) } else { Err(format!("{connected} replicas")) })
    })
    .unwrap();
}

#[test]
fn replicas_are_handed_over_while_clients_write_more_than_the_backlog_holds() {
    for (kind, writes) in pairs() {
        let stage = Stage::new();
        let primary = quick(kind).config("repl-backlog-size", BACKLOG).start().unwrap();
        fill_keys(&primary, 100, "x");
        load_small(&primary, 2000, 1000);
        let source = stage.source(&primary.url(), &JOURNAL);
        hands_over(&primary, &source.agent, writes, || {
            let start = |_| {
                let replica = Server::start(kind).unwrap();
                (stage.replica(&replica.url(), source.address, &[]), replica)
            };
            (0..2).map(start).collect()
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_announced_primary_is_pinned_where_the_source_captures_a_replica() {
    for (kind, writes) in pairs() {
        let stage = Stage::new();
        let [primary, middle] = [(); 2].map(|()| quick(kind).config("repl-backlog-size", BACKLOG).start().unwrap());
        fill_keys(&primary, 100, "x");
        middle.replicate(&primary).unwrap();
        middle.wait_for_link(LONG).unwrap();
        // The primary hears a moment later that the copy has arrived, and notes it.
        assert_eq!(primary.client().unwrap().int(&["WAIT", "1", "60000"]).unwrap(), 1);
        // The captured replica's own copy, for which it asks first with a history of its own.
        let before = (copies(&primary), refusals(&primary));
        let announced = primary.address().to_string();
        let source = stage.source(&middle.url(), &[&JOURNAL[..], &["--announce", &announced]].concat());
        let stop = AtomicBool::new(false);
        let replica = Server::start(kind).unwrap();
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        thread::scope(|scope| {
            let writer = scope.spawn(|| writes.run(&primary, &stop));
            let stops = Stop(&stop);
            let said = succeeds(&mut agent, &replica);
            assert!(!writer.is_finished(), "{said}");
            drop(stops);
            writer.join().unwrap();
        });
        assert_eq!(copies(&primary), before.0, "{kind} {writes:?}: {}", primary.log());
        refused_only_pins(&primary, before.1, [&agent, &source.agent]);
        replica.wait_for_link(LONG).unwrap();
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_attended_server_goes_to_its_primary_while_clients_write_more_than_the_backlog_holds() {
    for kind in require::kinds() {
        let builder = quick(kind).config("repl-backlog-size", BACKLOG);
        let filled = attend::Scene::with_options(|_| builder, |primary| load_small(primary, 2000, 1000), &JOURNAL);
        let Some(scene) = filled else { return };
        let (server, stop) = (scene.server(quick(kind)), AtomicBool::new(false));
        let agent = scene.attend_with(&server, &[scene.primary.port()], &[]);
        thread::scope(|scope| {
            let writer = scope.spawn(|| Writes::LongAndSeldom.run(&scene.primary, &stop));
            let stops = Stop(&stop);
            server.replicate(&scene.primary).unwrap();
            handed_over(&agent, &server, 1);
            assert!(!writer.is_finished(), "{}", agent.output());
            drop(stops);
            writer.join().unwrap();
        });
        assert_eq!(copies(&scene.primary), 1, "one copy, the source's: {}\n{}", agent.output(), scene.primary.log());
        refused_only_pins(&scene.primary, (1, 0), [&scene.source.agent, &agent]);
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&scene.primary, &server);
    }
}
