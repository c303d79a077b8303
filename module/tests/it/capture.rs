//! Arming by hand: the replies of the commands, what the server keeps and for how long, and that no input harms the
//! server.
//!
//! Loads from an agent's memory into real servers, from a primary that is the test itself.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use remora_fabric::shm::Place;
use remora_fabric::{Handover, Memory, Pages};
use remora_lab::server::wait_until;
use remora_lab::{Kind, Random, Server, require};
use remora_redis::rdb::reference::Word;
use remora_redis::rdb::{Usage, Writer};
use remora_table::server_pages::{Order, Stage, Work};
use remora_table::{CapturePage, Geometry};

use crate::{END, LONG, OFFSET, Primary, REPLID, Shown, fields, noise, wait_for_link, with_module};

const GEOMETRY: Geometry = Geometry { slot_size: 64 << 10, slots: 32 };

fn with_words(kind: Kind, words: &str) -> Server {
    Server::builder(kind).module(words).unwrap().config("enable-module-command", "local").start().unwrap()
}

/// An agent's part: a page, and the table it describes.
struct Agent {
    page: CapturePage,
    table: Arc<Memory>,
}

impl Agent {
    fn new(work: Work, generation: u64) -> Agent {
        let page = CapturePage::create(Order { work, generation, geometry: GEOMETRY, least_bytes: 0 }).unwrap();
        let table = Arc::new(Memory::create("table", GEOMETRY.memory_len(), Pages::Small).unwrap());
        Agent { page, table }
    }

    /// Arms the server with both.
    fn arm(&self, server: &Server) -> remora_lab::Result<()> {
        offer(server, &[self.page.memory().as_fd(), self.table.as_fd()])
    }
}

/// Offers these descriptors and sends the server the address.
fn offer(server: &Server, descriptors: &[BorrowedFd<'_>]) -> remora_lab::Result<()> {
    let handover = Handover::bind(&Place::Abstract).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = handover.give(descriptors, Duration::from_secs(1));
        });
        server.client()?.ok(&["REMORA.ARM", &handover.address(), &handover.secret()])
    })
}

fn state(server: &Server) -> String {
    server.fact("remora_state").unwrap()
}

#[test]
fn a_status_has_names_and_values_and_help_names_every_command() {
    for kind in require::kinds() {
        let server = with_words(kind, "");
        let mut client = server.client().unwrap();
        let status = client.list(&["REMORA.STATUS"]).unwrap();
        let pairs: Vec<(&str, &str)> =
            status.chunks(2).map(|pair| (pair[0].as_str().unwrap(), pair[1].as_str().unwrap())).collect();
        assert!(pairs.contains(&("state", "idle")) && pairs.contains(&("protocol", "6")), "{pairs:?}");
        let help = client.list(&["REMORA.HELP"]).unwrap();
        let help: Vec<&str> = help.iter().filter_map(|line| line.as_str()).collect();
        for command in ["REMORA.ARM", "REMORA.DISARM", "REMORA.STATUS", "REMORA.HELP", "remora.capture"] {
            assert!(help.iter().any(|line| line.contains(command)), "{command}");
        }
    }
}

#[test]
fn one_agent_is_armed_at_a_time_and_a_disarmed_one_is_forgotten() {
    for kind in require::kinds() {
        let server = with_words(kind, "");
        let (first, second) = (Agent::new(Work::Walk, 11), Agent::new(Work::Ease, 12));
        first.arm(&server).unwrap();
        assert_eq!((state(&server).as_str(), server.fact("remora_generation").unwrap().as_str()), ("armed", "11"));
        let busy = second.arm(&server).unwrap_err().to_string();
        assert!(busy.contains("BUSY") && busy.contains("11"), "{busy}");
        let mut client = server.client().unwrap();
        assert_eq!(client.int(&["REMORA.DISARM", "12"]).unwrap(), 0, "another generation");
        assert_eq!(client.int(&["REMORA.DISARM", "11"]).unwrap(), 1);
        assert_eq!(state(&server), "idle");
        second.arm(&server).unwrap();
        assert_eq!(client.int(&["REMORA.DISARM"]).unwrap(), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_with_a_heart_beat_stays_armed_and_a_silent_one_is_forgotten() {
    for kind in require::kinds() {
        let server = with_words(kind, "");
        server.configure("remora.agent-timeout", "1").unwrap();
        let agent = Agent::new(Work::Walk, 13);
        agent.arm(&server).unwrap();
        for _ in 0..30 {
            agent.page.beat();
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(state(&server), "armed");
        let silent = || Ok(if state(&server) == "idle" { Ok(()) } else { Err(state(&server)) });
        wait_until("the silent agent to be forgotten", LONG, silent).unwrap();
        assert!(agent.page.is_cancelled());
        assert!(server.log().contains("the agent of generation 13 is gone"));
    }
}

#[test]
fn a_save_to_disk_does_not_use_what_was_armed_for_a_sync() {
    for kind in require::kinds() {
        let server = with_words(kind, "");
        server.client().unwrap().ok(&["SET", "key", "value"]).unwrap();
        let agent = Agent::new(Work::Walk, 14);
        agent.arm(&server).unwrap();
        server.client().unwrap().text(&["BGSAVE"]).unwrap();
        wait_until("the save to be over", LONG, || {
            agent.page.beat();
            let running = server.fact("rdb_bgsave_in_progress")?;
            Ok(if running == "0" { Ok(()) } else { Err(running) })
        })
        .unwrap();
        server.client().unwrap().ok(&["SAVE"]).unwrap();
        assert_eq!((agent.page.stage(), state(&server).as_str()), (Stage::Armed, "armed"));
    }
}

#[test]
fn invalid_arguments_are_refused_with_a_reason() {
    for kind in require::kinds() {
        let server = with_words(kind, "");
        let blank = Memory::create("blank", 4096, Pages::Small).unwrap();
        let refused = |descriptors: &[BorrowedFd<'_>]| offer(&server, descriptors).unwrap_err().to_string();
        assert!(refused(&[blank.as_fd()]).contains("not a capture page"));
        let walk = Agent::new(Work::Walk, 15);
        assert!(refused(&[walk.page.memory().as_fd()]).contains("1 descriptors, this work needs 2"));
        let read_only = walk.page.memory().reopen_read_only().unwrap();
        assert!(refused(&[std::os::fd::AsFd::as_fd(&read_only)]).contains("could not be taken"));

        let mut client = server.client().unwrap();
        for wrong in [&["REMORA.ARM"][..], &["REMORA.ARM", "@absent", "00"], &["REMORA.DISARM", "x"], &["REMORA.WALK"]]
        {
            let text = client.ok(wrong).unwrap_err().to_string();
            assert!(text.contains("ERR remora:"), "{text}");
        }
        let began = std::time::Instant::now();
        client.ok(&["REMORA.ARM", "@no-listener-here", &"00".repeat(16)]).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(20), "the command does not wait long for a missing agent");
        assert_eq!(state(&server), "idle");
    }
}

#[test]
fn a_silent_giver_delays_the_server_for_at_most_a_quarter_of_a_second() {
    let Some(kind) = require::redis() else { return };
    let server = with_words(kind, "");
    let handover = Handover::bind(&Place::Abstract).unwrap();
    let began = std::time::Instant::now();
    let refused = server.client().unwrap().ok(&["REMORA.ARM", &handover.address(), &handover.secret()]);
    assert!(refused.unwrap_err().to_string().contains("could not be taken"));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn a_table_smaller_than_announced_fails_the_snapshot_and_not_the_server() {
    for kind in require::kinds() {
        let server = with_words(kind, "");
        server.configure("repl-diskless-sync-delay", "0").unwrap();
        let agent = Agent::new(Work::Walk, 16);
        let small = Memory::create("small", 4096, Pages::Small).unwrap();
        offer(&server, &[agent.page.memory().as_fd(), small.as_fd()]).unwrap();
        let replica = Server::start(kind).unwrap();
        replica.replicate(&server).unwrap();
        replica.wait_for_link(LONG).unwrap();
        assert_eq!(agent.page.stage(), Stage::Declined);
        assert!(agent.page.status_text().contains("shorter"), "{}", agent.page.status_text());
    }
}

/// A primary with some strings, armed; a replica that follows it gets a snapshot at once.
fn armed_primary(kind: Kind, agent: &Agent) -> Server {
    let server = with_words(kind, "");
    server.configure("repl-diskless-sync-delay", "0").unwrap();
    let mut client = server.client().unwrap();
    for number in 0..STRINGS {
        client.ok(&["SET", &format!("string {number}"), &"x".repeat(100)]).unwrap();
    }
    client.int(&["RPUSH", "list", "x"]).unwrap();
    agent.arm(&server).unwrap();
    server
}

const STRINGS: i64 = 200;

fn keys(server: &Server) -> i64 {
    server.client().unwrap().int(&["DBSIZE"]).unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn without_permission_a_replica_gets_everything() {
    for kind in require::kinds() {
        let agent = Agent::new(Work::Walk, 18);
        let server = armed_primary(kind, &agent);
        let replica = Server::start(kind).unwrap();
        replica.replicate(&server).unwrap();
        replica.wait_for_link(LONG).unwrap();
        assert_eq!((agent.page.stage(), keys(&replica)), (Stage::Declined, STRINGS + 1));
        assert!(agent.page.status_text().contains("did not say"), "{}", agent.page.status_text());
    }
}

#[test]
fn with_permission_strings_are_deleted_and_are_in_the_table() {
    for kind in require::kinds() {
        let agent = Agent::new(Work::Walk, 19);
        let server = armed_primary(kind, &agent);
        agent.page.permit();
        let replica = Server::start(kind).unwrap();
        replica.replicate(&server).unwrap();
        replica.wait_for_link(LONG).unwrap();
        assert_eq!((agent.page.stage(), agent.page.writer_status().keys), (Stage::Done, STRINGS as u64));
        assert_eq!(
            (keys(&replica), keys(&server)),
            (1, STRINGS + 1),
            "the replica has the list only, the primary has all keys"
        );
    }
}

#[test]
#[ignore = "long: make test-all"]
fn two_replicas_of_one_child_get_everything_even_with_permission() {
    for kind in require::kinds() {
        let agent = Agent::new(Work::Walk, 20);
        let server = armed_primary(kind, &agent);
        agent.page.permit();
        server.configure("repl-diskless-sync-delay", "2").unwrap();
        let replicas = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        for replica in &replicas {
            replica.replicate(&server).unwrap();
        }
        for replica in &replicas {
            replica.wait_for_link(LONG).unwrap();
            assert_eq!(keys(replica), STRINGS + 1);
        }
        assert_eq!(agent.page.stage(), Stage::Declined);
        assert!(agent.page.status_text().contains("2 replicas are waiting"), "{}", agent.page.status_text());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_walk_that_fails_ends_its_child_and_no_replica_gets_the_rest() {
    for kind in require::kinds() {
        let agent = Agent::new(Work::Walk, 21);
        let server = armed_primary(kind, &agent);
        // More than the table holds, and no slot is released.
        server.client().unwrap().ok(&["SET", "long", &"y".repeat(4 << 20)]).unwrap();
        agent.page.permit();
        let replica = Server::start(kind).unwrap();
        replica.replicate(&server).unwrap();
        wait_until("the child to wait for room", LONG, || {
            agent.page.beat();
            Ok(if agent.page.writer_status().waits > 0 { Ok(()) } else { Err(format!("{:?}", agent.page.stage())) })
        })
        .unwrap();
        agent.page.cancel();
        // The replica connects again, and nothing is armed any more.
        replica.wait_for_link(LONG).unwrap();
        assert_eq!((agent.page.stage(), keys(&replica)), (Stage::Failed, STRINGS + 2));
        assert!(server.log().contains("this child ends, and with it the sync"), "{}", server.log());
    }
}

#[test]
fn a_capture_only_module_can_be_unloaded_when_idle_and_not_while_armed() {
    for kind in require::kinds() {
        let server = with_words(kind, "capture-only");
        let agent = Agent::new(Work::Walk, 17);
        agent.arm(&server).unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["MODULE", "UNLOAD", "remora"]).unwrap_err();
        assert_eq!(client.int(&["REMORA.DISARM"]).unwrap(), 1);
        client.ok(&["MODULE", "UNLOAD", "remora"]).unwrap();
        client.ok(&["MODULE", "LOAD", "/nonexistent"]).unwrap_err();
        assert_eq!(client.text(&["PING"]).unwrap(), "PONG");
    }
}

#[test]
fn no_argument_of_the_commands_ends_the_server() {
    let Some(kind) = require::redis() else { return };
    let server = with_words(kind, "");
    let pid = server.pid();
    let command =
        prop::sample::select(vec!["REMORA.ARM", "REMORA.DISARM", "REMORA.STATUS", "REMORA.HELP", "REMORA.WALK"]);
    let word = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..80),
        "@[a-z]{0,120}".prop_map(String::into_bytes),
        "/[a-z/]{0,120}".prop_map(String::into_bytes),
        "[0-9a-f]{32}".prop_map(String::into_bytes),
    ];
    let said = (command, prop::collection::vec(word, 0..4));
    let mut runner = TestRunner::new(Config { cases: 2000, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&said, |(command, words)| {
        let mut client = server.client().unwrap();
        let arguments: Vec<Vec<u8>> = std::iter::once(command.as_bytes().to_vec()).chain(words).collect();
        client.queue(&arguments);
        client.flush().unwrap();
        prop_assert!(client.receive().is_ok());
        Ok(())
    });
    outcome.unwrap();
    assert_eq!((server.pid(), state(&server).as_str()), (pid, "idle"));
    assert!(!server.log().contains("a bug of remora") && !server.log().contains("panicked"));
}

/// The head of a snapshot, and a few ordinary keys.
fn beginning(kind: Kind) -> Vec<u8> {
    let mut writer = Writer::new(if kind == Kind::Redis7 { 10 } else { 11 });
    writer.aux("repl-stream-db", "0").select_db(0).string("ordinary", "one", None);
    let mut bytes = writer.finish();
    bytes.truncate(bytes.len() - END.len());
    bytes
}

/// Seconds by which an age may be another one that was set by the module's API: Valkey 9.1's has steps of 1000 seconds.
pub(crate) fn age_slack(kind: Kind) -> i64 {
    if kind == Kind::Redis7 { 60 } else { 560 }
}

fn text(key: &[u8], length: u64) -> Word<'_> {
    Word::Text { database: 0, key, length, expires_ms: None, usage: None }
}

#[test]
fn strings_from_memory_and_keys_from_the_link_arrive_in_one_load() {
    for kind in require::kinds() {
        let replica = with_module(kind).config("maxmemory-policy", "allkeys-lru").start().unwrap();
        let bytes = noise(3, 300_000);
        let shown = Shown::of(&bytes);
        let mut primary = Primary::of(&replica);
        shown.to(&replica, &[]).unwrap();

        primary.send(&beginning(kind));
        primary.send(&shown.hello());
        shown.wait_for(1);
        let usage = Some(Usage::Idle(5300));
        let far = 4_102_444_800_000;
        primary.send(&fields(&[
            Word::Text { database: 9, key: b"pieces", length: 250_000, expires_ms: Some(far), usage },
            Word::Piece { offset: 10, length: 100_000 },
        ]));
        primary.send(b"\xFE\x02\x00\x05other\x03two");
        primary
            .send(&fields(&[Word::Piece { offset: 150_000, length: 149_999 }, Word::Piece { offset: 0, length: 1 }]));
        primary.send(&fields(&[text(b"one byte", 1), Word::Piece { offset: 5, length: 1 }]));
        shown.wait_for(4);
        primary.end();
        wait_for_link(&replica, "up");

        assert_eq!(replica.fact("master_replid").unwrap(), REPLID);
        assert_eq!(replica.fact("master_repl_offset").unwrap(), OFFSET.to_string());
        let mut client = replica.client().unwrap();
        assert_eq!(client.text(&["GET", "ordinary"]).unwrap(), "one");
        assert_eq!(client.bytes(&["GET", "one byte"]).unwrap().unwrap(), [bytes[5]]);
        client.ok(&["SELECT", "2"]).unwrap();
        assert_eq!(client.text(&["GET", "other"]).unwrap(), "two");
        client.ok(&["SELECT", "9"]).unwrap();
        let idle = client.int(&["OBJECT", "IDLETIME", "pieces"]).unwrap();
        assert!((idle - 5300).abs() <= age_slack(kind), "{kind}: {idle}");
        assert_eq!(client.int(&["PEXPIRETIME", "pieces"]).unwrap(), far as i64);
        let whole = [&bytes[10..100_010], &bytes[150_000..299_999], &bytes[..1]].concat();
        assert!(client.bytes(&["GET", "pieces"]).unwrap().unwrap() == whole);
    }
}

/// Waits until the server has ended the load, and is in the state after any failed sync: running, empty, its link down.
fn assert_empty_and_unharmed(server: &Server) {
    wait_until("the server to give up", LONG, || {
        let (loading, state) = (server.fact("loading")?, server.fact("remora_load_state")?);
        Ok(if loading == "0" && state != "loading" { Ok(()) } else { Err(format!("{loading} {state}")) })
    })
    .unwrap();
    assert_eq!(server.fact("master_link_status").unwrap(), "down");
    assert_eq!(server.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
}

/// Sends this field to the server, which must refuse it with this text.
fn assert_refused(kind: Kind, replica: &Server, words: &[u8], why: &str) {
    let shown = Shown::of(&noise(3, 100_000));
    let mut primary = Primary::of(replica);
    shown.to(replica, &[]).unwrap();
    primary.send(&beginning(kind));
    primary.send(words);
    primary.wait_for_the_end();
    assert!(shown.page.refusal().is_some_and(|text| text.contains(why)), "{why}: {:?}", shown.page.refusal());
    assert_empty_and_unharmed(replica);
}

#[test]
fn an_invalid_field_fails_the_load_and_does_not_harm_the_server() {
    for kind in require::kinds() {
        let replica = with_module(kind).start().unwrap();
        let hello = || Word::Hello { ticket: [7; 16] };
        let long = Word::Text { database: 99, key: b"k", length: 10, expires_ms: None, usage: None };
        let piece = |offset, length| Word::Piece { offset, length };
        for (words, why) in [
            (fields(&[Word::Hello { ticket: [8; 16] }]), "other memory"),
            (fields(&[text(b"k", 5)]), "lacks its first word"),
            (fields(&[hello(), piece(0, 5)]), "a piece comes before its string"),
            (fields(&[hello(), text(b"k", 5), piece(0, 6)]), "a piece has 6 bytes, the string lacks only 5"),
            (fields(&[hello(), text(b"k", 5), piece(0, 4), text(b"l", 5)]), "while 1 bytes of the one before it"),
            (fields(&[hello(), text(b"k", 5), piece(99_996, 5)]), "memory outside what was handed over"),
            (fields(&[hello(), text(b"k", 5), piece(u64::MAX, 5)]), "memory outside what was handed over"),
            (fields(&[hello(), long, piece(0, 10)]), "no database 99"),
            (remora_redis::rdb::reference::field(b"\x09nonsense"), "unknown kind"),
            (remora_redis::rdb::reference::field(b"\x01\x09\x00"), "version 9"),
        ] {
            assert_refused(kind, &replica, &words, why);
        }
    }
}

#[test]
fn a_primary_that_ends_in_the_middle_leaves_no_partial_data() {
    for kind in require::kinds() {
        let replica = with_module(kind).start().unwrap();
        let shown = Shown::of(&noise(3, 100_000));
        let mut primary = Primary::of(&replica);
        shown.to(&replica, &[]).unwrap();
        primary.send(&beginning(kind));
        primary.send(&fields(&[
            Word::Hello { ticket: shown.ticket },
            text(b"whole", 9),
            Word::Piece { offset: 0, length: 9 },
        ]));
        primary.send(&fields(&[text(b"half", 50_000), Word::Piece { offset: 0, length: 20_000 }]));
        shown.wait_for(2);
        primary.hang_up();
        assert_empty_and_unharmed(&replica);
    }
}

#[test]
fn memory_is_accepted_only_by_a_server_that_loads_from_its_link_and_is_empty() {
    for kind in require::kinds() {
        let replica = with_module(kind).start().unwrap();
        let shown = Shown::of(b"some bytes");
        for (way, why) in [("disabled", "repl-diskless-load is disabled"), ("swapdb", "repl-diskless-load is swapdb")] {
            replica.configure("repl-diskless-load", way).unwrap();
            let refused = shown.to(&replica, &["FLUSH"]).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
        replica.configure("repl-diskless-load", "on-empty-db").unwrap();
        let mut client = replica.client().unwrap();
        for database in ["0", "5"] {
            client.ok(&["SELECT", database]).unwrap();
            client.ok(&["SET", "old", "data"]).unwrap();
        }
        assert!(shown.to(&replica, &[]).unwrap_err().contains("there are 1 keys"));
        assert_eq!(client.int(&["DBSIZE"]).unwrap(), 1);
        shown.to(&replica, &["flush"]).unwrap();
        assert_eq!(client.int(&["DBSIZE"]).unwrap(), 0);
        assert_eq!(replica.fact("remora_load_state").unwrap(), "armed");
        for nonsense in [
            &["REMORA.LOAD"][..],
            &["REMORA.LOAD", "@x", "00", "11", "5"],
            &["REMORA.LOAD", "@x", "y", "z", "1", "NOW"],
        ] {
            let refused = client.ok(nonsense).unwrap_err().to_string();
            assert!(refused.contains("ERR"), "{refused}");
        }
    }
}

/// Random damage, besides the systematic damage of each byte: this many fields for each server.
const ROUNDS: usize = 1500;

/// The least number of rounds on the slowest machine: with fewer, the test proves nothing.
const LEAST_ROUNDS: usize = 300;

/// Maximum time for which a server is given damaged fields, so that a slow machine does not hold up a test run.
/// `REMORA_DAMAGE_SECONDS` makes it longer, and then as many rounds as fit.
const DAMAGE_TIME: Duration = Duration::from_secs(15);

/// Every length to which a field can be cut, every bit of it flipped, every byte set to the maximum; then random
/// combinations, without end.
fn damages(sound: Vec<u8>) -> impl Iterator<Item = Vec<u8>> {
    let changed = |sound: &[u8], place: usize, change: &dyn Fn(u8) -> u8| {
        let mut damaged = sound.to_vec();
        damaged[place] = change(damaged[place]);
        damaged
    };
    let length = sound.len();
    let mut sweep: Vec<Vec<u8>> = (1..length).map(|end| sound[..end].to_vec()).collect();
    for place in 0..length {
        sweep.push(changed(&sound, place, &|_| u8::MAX));
        sweep.extend((0..8).map(|bit| changed(&sound, place, &|byte| byte ^ 1 << bit)));
    }
    let mut random = Random::new(5);
    sweep.into_iter().chain(std::iter::repeat_with(move || {
        let mut damaged = sound.clone();
        for _ in 0..1 + random.below(3) {
            let place = random.below(damaged.len() as u64) as usize;
            match random.below(4) {
                0 => damaged.truncate(place.max(1)),
                1 => damaged.insert(place, random.below(256) as u8),
                2 => damaged[place] = 0xFF,
                _ => damaged[place] ^= 1 << random.below(8),
            }
        }
        damaged
    }))
}

#[test]
#[ignore = "long: make test-all"]
fn no_damaged_field_ends_the_server() {
    for kind in require::kinds() {
        let replica = with_module(kind).start().unwrap();
        let pid = replica.pid();
        let sound = [
            Word::Hello { ticket: [7; 16] },
            text(b"first", 700),
            Word::Piece { offset: 0, length: 300 },
            Word::Piece { offset: 90_000, length: 400 },
            Word::Text {
                database: 3,
                key: b"second",
                length: 10,
                expires_ms: Some(4_102_444_800_000),
                usage: Some(Usage::Frequency(9)),
            },
            Word::Piece { offset: 5, length: 10 },
        ];
        let mut bytes = Vec::new();
        sound.iter().for_each(|word| word.encode(&mut bytes));
        let asked = std::env::var("REMORA_DAMAGE_SECONDS").ok().and_then(|text| text.parse().ok());
        let (began, time) = (Instant::now(), asked.map_or(DAMAGE_TIME, Duration::from_secs));
        let rounds = if asked.is_some() { usize::MAX } else { 10 * bytes.len() + ROUNDS };
        let mut done = 0;
        // One primary for all rounds: the server reconnects by itself as soon as a load is over. A new address in each
        // round would work too, but a REPLICAOF that meets the server's own attempt sometimes costs a second or five of
        // waiting.
        let mut primary = Primary::asked_by(&replica);
        for damaged in damages(bytes.clone()).take(rounds).take_while(|_| began.elapsed() < time) {
            done += 1;
            let shown = Shown::of(&noise(3, 100_000));
            // In the order of the agents: memory is handed over before the load begins, since a loading server does
            // nothing else.
            shown.to(&replica, &["FLUSH"]).unwrap();
            primary.answer();
            primary.send(&beginning(kind));
            primary.send(&remora_redis::rdb::reference::field(&damaged));
            primary.end();
            primary.hang_up();
            primary.wait_to_be_asked();
        }
        println!("{kind}: {done} damaged fields");
        assert!(done >= LEAST_ROUNDS, "only {done} in {time:?}");
        let server = replica.client().unwrap().info("server").unwrap();
        assert_eq!(server.number::<u32>("process_id"), Some(pid));
        // And it loads a valid field.
        let shown = Shown::of(&noise(3, 100_000));
        shown.to(&replica, &["FLUSH"]).unwrap();
        primary.answer();
        primary.send(&beginning(kind));
        primary.send(&remora_redis::rdb::reference::field(&bytes));
        shown.wait_for(1);
        primary.end();
        wait_for_link(&replica, "up");
        assert_eq!(replica.client().unwrap().int(&["STRLEN", "first"]).unwrap(), 700);
    }
}
