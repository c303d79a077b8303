//! Loads from an agent's memory into real servers, from a primary that is the test itself.

use std::time::{Duration, Instant};

use crate::fields;
use crate::noise;
use crate::wait_for_link;
use crate::with_module;
use crate::{END, LONG, OFFSET, Primary, REPLID, Shown};
use remora_lab::server::wait_until;
use remora_lab::{Kind, Random, Server, require};
use remora_redis::rdb::reference::Word;
use remora_redis::rdb::{Usage, Writer};

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
