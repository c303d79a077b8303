//! Fast keys: runs of small values, loaded in the fast way by real servers and compared with servers that loaded the
//! same snapshot by themselves.
//!
//! So it is for builds that no list has and whose layout was found: they are tried, verified, refused and marked. Such
//! a build is a copy of the lab's server with some bytes behind its end: its SHA-256 is of no list, and its build id is
//! the same.

use std::cell::OnceCell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use remora_lab::server::{Builder, Program, wait_until};
use remora_lab::{Client, Kind, Random, Server, require};
use remora_layout::build::Names;
use remora_layout::search::{Layout, Wanted, find};
use remora_layout::{Build, folder};
use remora_redis::rdb::reference::{RUN_BYTES_MAX, Word};
use remora_redis::rdb::{Records, Writer};
use remora_redis::resp::Frame;
use sha2::{Digest, Sha256};

use crate::{END, LONG, Primary, Shown, fields, layout, library, wait_for_link, with_module};

/// Far from now, in milliseconds since 1970.
const FAR_MS: u64 = 4_102_444_800_000;

/// The magic of a snapshot, without a field.
pub(crate) fn magic(kind: Kind) -> Vec<u8> {
    let mut bytes = Writer::new(if kind == Kind::Redis7 { 10 } else { 11 }).finish();
    bytes.truncate(bytes.len() - END.len());
    bytes
}

/// Records of strings of all lengths, in a random order: short and long binary keys, keys and values that are numbers,
/// values on both sides of every border that servers draw, some with an expiry.
pub(crate) fn records(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut writer = Writer::new(11);
    let head = writer.clone().finish().len() - END.len();
    for number in 0..count {
        let expires = random.one_in(4).then_some(FAR_MS + number as u64);
        let mut key = format!("{number}:").into_bytes();
        match random.below(6) {
            0 => key = number.to_string().into_bytes(),
            1 => key.extend(random.bytes(number % 5)),
            2 => key.extend(random.bytes([20, 31, 32, 100, 127, 128, 255, 256, 4000][number % 9])),
            _ => key.extend(b"an ordinary key"),
        }
        let value = match random.below(8) {
            0 => random.below(20_000).to_string().into_bytes(),
            1 => format!("-{}", random.below(u64::MAX)).into_bytes(),
            2 => random.bytes(number % 4095),
            3 => Vec::new(),
            _ => random.bytes(number % 150),
        };
        writer.string(key, value, expires);
    }
    let mut bytes = writer.finish();
    bytes.truncate(bytes.len() - END.len());
    bytes.split_off(head)
}

/// Records of small collections of every type and encoding, as a server of that kind writes them. Some have an expiry.
fn collections(kind: Kind, seed: u64, count: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let server = Server::builder(kind).config("rdbcompression", "no").start().unwrap();
    let mut client = server.client().unwrap();
    let mut records = Vec::new();
    for number in 0..count {
        let name = format!("collection {number}");
        let word = [["HSET", "RPUSH", "SADD", "ZADD"][number as usize % 4].to_owned(), name.clone()];
        let mut command: Vec<Vec<u8>> = word.map(String::into_bytes).into();
        // Numbers only; short words; and words that are too long for the compact encodings.
        let style = random.below(3);
        for element in 0..random.between(1, if style == 2 { 6 } else { 40 }) {
            let text = |random: &mut Random, element: u64| match style {
                0 => (random.word() as i64 >> random.below(64)).to_string().into_bytes(),
                1 => [format!("{element} ").into_bytes(), random.bytes(number as usize % 40)].concat(),
                _ => [format!("{element} ").into_bytes(), random.bytes(60 + number as usize % 250)].concat(),
            };
            if word_of(&command) == b"ZADD" {
                let scores = ["-inf", "inf", "0", "1.5", "-3", "1e100", "12345678901"];
                command.push(scores[random.below(7) as usize].into());
            }
            command.push(text(&mut random, element));
            if word_of(&command) == b"HSET" {
                command.push(text(&mut random, element));
            }
        }
        client.int(&command).unwrap();
        let dump = client.bytes(&["DUMP", &name]).unwrap().unwrap();
        let (kind, value) = dump[..dump.len() - 10].split_first().unwrap();
        if random.one_in(3) {
            records.extend([&[0xFC][..], &(FAR_MS + number).to_le_bytes()].concat());
        }
        records.extend([*kind, u8::try_from(name.len()).unwrap()]);
        records.extend([name.as_bytes(), value].concat());
    }
    records
}

fn word_of(command: &[Vec<u8>]) -> &[u8] {
    &command[0]
}

/// Records in an order in which strings and collections are mixed.
pub(crate) fn mixed(kind: Kind, seed: u64, strings: usize) -> Vec<u8> {
    let (strings, collections) = (records(seed, strings), collections(kind, seed, strings as u64 / 4));
    let (mut strings, mut collections) = (whole(&strings).into_iter(), whole(&collections).into_iter());
    let mut random = Random::new(seed);
    let mut all = Vec::new();
    loop {
        let next = if random.one_in(4) { collections.next() } else { strings.next() };
        let Some(record) = next else { break };
        all.extend_from_slice(record);
    }
    all.extend(strings.chain(collections).flatten());
    all
}

/// Each record by itself.
fn whole(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut records, mut at, mut parts) = (Records::new(bytes, u64::MAX), 0, Vec::new());
    while records.next().is_some() {
        parts.push(&bytes[at..records.taken()]);
        at = records.taken();
    }
    assert_eq!(at, bytes.len(), "all of them are records of runs");
    parts
}

/// The words for these records, which are at that offset of the memory.
pub(crate) fn runs(database: u32, records: &[u8], offset: usize) -> Vec<Word<'static>> {
    let (mut words, mut at) = (Vec::new(), 0);
    while at < records.len() {
        let window = &records[at..records.len().min(at + RUN_BYTES_MAX as usize)];
        let mut whole = Records::new(window, u64::MAX);
        whole.by_ref().for_each(drop);
        words.push(Word::Run { database, offset: (offset + at) as u64, length: whole.taken() as u32 });
        at += whole.taken();
    }
    words
}

/// The server loads the parts, which belong to these databases, in the fast way.
fn load_fast(server: &Server, parts: &[(u32, Vec<u8>)]) {
    let all: Vec<u8> = parts.iter().flat_map(|(_, records)| records.clone()).collect();
    let shown = Shown::of(&all);
    let mut primary = Primary::of(server);
    let reply = shown.offered_to(server, &[]).unwrap();
    assert_eq!(answer(&reply, "fast_keys"), "yes", "{}", server.log());
    primary.send(&magic(server.kind()));
    primary.send(&shown.hello());
    shown.wait_for(1);
    let (mut offset, mut done) = (0, 1);
    for (database, records) in parts {
        let words = runs(*database, records, offset);
        for words in words.chunks(3) {
            primary.send(&fields(words));
            done += 1;
        }
        offset += records.len();
    }
    shown.wait_for(done);
    primary.end();
    wait_for_link(server, "up");
}

/// The server loads the parts by itself.
pub(crate) fn load_plainly(server: &Server, parts: &[(u32, Vec<u8>)]) {
    let mut primary = Primary::of(server);
    primary.send(&magic(server.kind()));
    for (database, records) in parts {
        primary.send(&[0xFE, u8::try_from(*database).unwrap()]);
        primary.send(records);
    }
    primary.end();
    wait_for_link(server, "up");
}

pub(crate) fn answer(reply: &Frame, name: &str) -> String {
    let Frame::Array(items) = reply else { panic!("{reply:?}") };
    let found = items.chunks(2).find(|pair| pair[0].as_bytes() == Some(name.as_bytes())).unwrap();
    String::from_utf8_lossy(found[1].as_bytes().unwrap()).into_owned()
}

/// Two servers with the same data: loaded in the fast way, and by the server itself.
pub(crate) fn pair(kind: Kind, settings: &[(&str, &str)], parts: &[(u32, Vec<u8>)]) -> (Server, Server) {
    let start = || {
        let builder = with_module(kind).config("enable-debug-command", "yes");
        settings.iter().fold(builder, |builder, (name, value)| builder.config(name, value)).start().unwrap()
    };
    let (fast, own) = (start(), start());
    load_fast(&fast, parts);
    load_plainly(&own, parts);
    assert_eq!(fast.digest().unwrap(), own.digest().unwrap());
    (fast, own)
}

pub(crate) fn names(server: &Server) -> Vec<Vec<u8>> {
    let keys = server.client().unwrap().list(&["KEYS", "*"]).unwrap();
    keys.iter().map(|key| key.as_bytes().unwrap().to_vec()).collect()
}

#[test]
#[ignore = "long: make test-all"]
fn a_load_of_runs_is_like_a_load_by_the_server_itself() {
    for kind in require::kinds() {
        let parts = [(0, mixed(kind, 1, 20_000)), (9, mixed(kind, 2, 3_000)), (2, records(3, 500))];
        let (fast, own) = pair(kind, &[], &parts);
        assert_eq!(fast.fact("remora_fast_keys").unwrap(), "yes");
        for counter in ["rdb_last_load_keys_loaded", "dump_payload_sanitizations"] {
            assert_eq!(fast.fact(counter).unwrap(), own.fact(counter).unwrap(), "{counter}");
        }
        for database in ["db0", "db2", "db9"] {
            let facts = |server: &Server| server.fact(database).unwrap().rsplit_once(",avg_ttl").unwrap().0.to_owned();
            assert_eq!(facts(&fast), facts(&own));
        }
        let used = |server: &Server| server.fact("used_memory_dataset").unwrap().parse::<f64>().unwrap();
        let ratio = used(&fast) / used(&own);
        assert!((0.98..1.02).contains(&ratio), "{kind}: {ratio}");
        let (mut one, mut other) = (fast.client().unwrap(), own.client().unwrap());
        for name in names(&own).iter().step_by(7) {
            for question in ["ENCODING", "REFCOUNT"] {
                let command = [b"OBJECT", question.as_bytes(), name];
                assert_eq!(one.call(&command).unwrap(), other.call(&command).unwrap(), "{kind}: {question} {name:?}");
            }
            let encoding = one.bytes(&[b"OBJECT", b"ENCODING".as_slice(), name]).unwrap().unwrap();
            // The nodes of a skip list have random heights.
            if encoding == b"skiplist" {
                continue;
            }
            // The C library's allocator gives up to 16 bytes more than asked for. A key has two pieces, and so has each
            // element of a table; of those, all are counted, since each server has another order.
            let pieces = if encoding == b"hashtable" { 2 + 2 * elements(&mut one, name) } else { 2 };
            let command = [b"MEMORY", b"USAGE".as_slice(), name, b"SAMPLES", b"0"];
            let (fast, own) = (one.int(&command).unwrap(), other.int(&command).unwrap());
            assert!((fast - own).abs() <= 16 * pieces, "{kind}: {fast} {own} {name:?}");
        }
    }
}

/// The number of elements of a hash or a set.
fn elements(client: &mut Client, name: &[u8]) -> i64 {
    let kind = client.text(&[b"TYPE", name]).unwrap();
    client.int(&[if kind == "hash" { b"HLEN".as_slice() } else { b"SCARD" }, name]).unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn ages_are_set_as_the_server_sets_them() {
    for kind in require::kinds() {
        for (policy, question) in [("allkeys-lru", "IDLETIME"), ("volatile-lfu", "FREQ"), ("noeviction", "IDLETIME")] {
            let mut run = Vec::new();
            for number in 0..200_u8 {
                let age =
                    if policy.ends_with("lfu") { vec![0xF9, number] } else { vec![0xF8, 0x40 | number >> 6, number] };
                let expiry = [&[0xFC][..], &FAR_MS.to_le_bytes()].concat();
                run.extend([&expiry[..], &age, &[0, 2, b'k', number, 3], b"old"].concat());
                run.extend([0, 2, b'n', number, 1, number]);
                // A set of one number, and a hash of two fields.
                run.extend([&age[..], &[11, 2, b'i', number, 10], b"\x02\0\0\0\x01\0\0\0\x07\0"].concat());
                run.extend([&age[..], &[4, 2, b'h', number], b"\x02\x01a\x01b\x01c\x01d"].concat());
            }
            let (fast, own) = pair(kind, &[("maxmemory-policy", policy)], &[(0, run)]);
            let (mut one, mut other) = (fast.client().unwrap(), own.client().unwrap());
            for name in names(&own) {
                let command = [b"OBJECT".as_slice(), question.as_bytes(), &name];
                let (fast, own) = (one.int(&command).unwrap(), other.int(&command).unwrap());
                assert!((fast - own).abs() <= 5, "{kind} {policy}: {fast} {own}");
            }
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_loaded_server_evicts_and_expires_and_rehashes() {
    for kind in require::kinds() {
        let server = with_module(kind).config("maxmemory-policy", "allkeys-lru").start().unwrap();
        load_fast(&server, &[(0, records(7, 20_000))]);
        let mut client = server.client().unwrap();
        client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        // The tables grow, and shrink again.
        for number in 0..60_000_u32 {
            client.queue(&["SET".to_owned(), format!("more {number}"), "value".to_owned()]);
        }
        client.flush().unwrap();
        for _ in 0..60_000 {
            client.receive().unwrap();
        }
        assert_eq!(client.int(&["DBSIZE"]).unwrap(), 80_000);
        let soon = |client: &mut Client, name: &[u8]| client.int(&[b"PEXPIRE", name, b"1"]).unwrap();
        let expiring = names(&server).iter().take(30_000).map(|name| soon(&mut client, name)).sum::<i64>();
        wait_until("the keys to expire", LONG, || {
            let left = server.client()?.int(&["DBSIZE"])?;
            Ok(if left == 80_000 - expiring { Ok(()) } else { Err(format!("{left} are left")) })
        })
        .unwrap();
        let used: u64 = server.fact("used_memory").unwrap().parse().unwrap();
        server.configure("maxmemory", &(used - (1 << 20)).to_string()).unwrap();
        client.ok(&["SET", "one more", "value"]).unwrap();
        wait_until("keys to be evicted", LONG, || {
            let (used, most) = (server.fact("used_memory")?, server.fact("maxmemory")?);
            // INFO itself takes some memory when the server has evicted for it.
            let fits = used.parse::<u64>().unwrap() <= most.parse::<u64>().unwrap() + (64 << 10);
            Ok(if fits { Ok(()) } else { Err(format!("{used} of {most}")) })
        })
        .unwrap();
        assert_ne!(server.fact("evicted_keys").unwrap(), "0");
        client.ok(&["FLUSHALL", "ASYNC"]).unwrap();
        assert_eq!(client.int(&["DBSIZE"]).unwrap(), 0);
    }
}

/// Sends these words after the greeting; the load must fail for that reason.
fn assert_run_refused(server: &Server, memory: &[u8], words: &[Word<'_>], why: &str) {
    let shown = Shown::of(memory);
    let mut primary = Primary::of(server);
    shown.to(server, &[]).unwrap();
    primary.send(&magic(server.kind()));
    primary.send(&shown.hello());
    shown.wait_for(1);
    primary.send(&fields(words));
    primary.wait_for_the_end();
    assert!(shown.page.refusal().is_some_and(|text| text.contains(why)), "{why}: {:?}", shown.page.refusal());
    wait_until("the server to give up", LONG, || {
        let loading = server.fact("loading")?;
        Ok(if loading == "0" { Ok(()) } else { Err(loading) })
    })
    .unwrap();
    assert_eq!(server.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
}

#[test]
fn an_invalid_run_fails_the_load_and_does_not_harm_the_server() {
    for kind in require::kinds() {
        let server = with_module(kind).start().unwrap();
        let run = |database, offset, length| [Word::Run { database, offset, length }];
        let twice = b"\x00\x01a\x01b\x00\x01c\x01d\x00\x01a\x01e\x00\x01f\x01g";
        assert_run_refused(&server, twice, &run(0, 0, 20), "has the key \"a\" twice");
        assert_run_refused(&server, twice, &run(99, 0, 20), "no database 99");
        assert_run_refused(&server, twice, &run(0, 0, 9), "byte 5 of a run of 9 is not a record");
        assert_run_refused(&server, b"\x15\x01h\x01\x01f\x01v", &run(0, 0, 8), "byte 0 of a run of 8");
        assert_run_refused(&server, twice, &run(0, 5, 20), "memory outside what was handed over");
        load_fast(&server, &[(0, records(8, 100))]);
        assert_eq!(server.client().unwrap().int(&["DBSIZE"]).unwrap(), 100);
    }
}

/// A server by itself ends when its loader meets such a value. Memory that changes must not do that.
#[test]
fn a_damaged_collection_fails_the_load_and_does_not_harm_the_server() {
    for kind in require::kinds() {
        let server = with_module(kind).start().unwrap();
        for (value, why) in [
            (&b"\x10\x01h\x08\x0E\0\0\0\x01\0\x01\xFF"[..], "its listpack"),
            (b"\x14\x01s\x0B\x0B\0\0\0\x02\0\x01\x01\x01\x01\xFF", "an element is in it twice"),
            (b"\x10\x01h\x0F\x0F\0\0\0\x04\0\x01\x01\x02\x01\x01\x01\x02\x01\xFF", "an element is in it twice"),
            (b"\x11\x01z\x0E\x0E\0\0\0\x02\0\x01\x01\x83nan\x04\xFF", "a score is not a number"),
            (b"\x12\x01l\x01\x02\x07\x07\0\0\0\0\0\xFF", "it is empty"),
            (b"\x0B\x01i\x0C\x02\0\0\0\x02\0\0\0\x05\0\x05\0", "the order of its intset"),
            (b"\x02\x01s\x02\x01a\x01a", "an element is in it twice"),
            (b"\x04\x01h\x02\x01a\x01b\x01a\x01b", "an element is in it twice"),
        ] {
            let run = [b"\x00\x01a\x01b".as_slice(), value].concat();
            let words = [Word::Run { database: 0, offset: 0, length: run.len() as u32 }];
            assert_run_refused(&server, &run, &words, why);
        }
        load_fast(&server, &[(0, mixed(kind, 8, 100))]);
        assert_eq!(server.client().unwrap().int(&["DBSIZE"]).unwrap(), 125);
    }
}

/// What `REMORA.LOAD` answers, and the state that INFO then shows.
pub(crate) fn offered(server: &Server) -> (String, String) {
    let shown = Shown::of(b"any");
    let _primary = Primary::of(server);
    let reply = shown.offered_to(server, &[]).unwrap();
    (answer(&reply, "fast_keys"), server.fact("remora_fast_keys").unwrap())
}

#[test]
fn a_server_that_is_not_known_or_not_permitted_takes_no_runs() {
    for kind in require::kinds() {
        let server = with_module(kind).config("remora.fast-keys", "no").start().unwrap();
        let why = "no: remora.fast-keys is no";
        assert_eq!(offered(&server), (why.into(), why.into()));
        let folder = tempfile::tempdir().unwrap();
        let layout = folder.path().join("layout");
        let text = std::fs::read_to_string(layout_file(kind)).unwrap();
        // A build that is not this one, though it has the same version.
        std::fs::write(&layout, text.replace("table.exponents", "table.exponent")).unwrap();
        assert!(offered(&with_layout(kind, &layout)).1.contains("table.exponent"));
        let server = with_module(kind).config("activedefrag", "no").config("key-load-delay", "1").start().unwrap();
        assert!(offered(&server).0.starts_with("no: the server delays"));
        assert!(server.log().contains("without fast keys: the server delays"), "{}", server.log());
        assert_run_refused(
            &server,
            b"\x00\x01a\x01b",
            &[Word::Run { database: 0, offset: 0, length: 5 }],
            "fast_keys no",
        );
    }
}

#[test]
fn a_trial_finds_a_wrong_layout_and_the_server_lives_on() {
    for kind in require::kinds() {
        let text = std::fs::read_to_string(layout_file(kind)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let layout = folder.path().join("layout");
        for (from, to) in [
            ("server.keys_loaded = ", "server.keys_loaded = 1"),
            ("server.dbnum = ", "server.dbnum = 1"),
            ("server.db = ", "server.db = 8"),
            ("db.keys = 0", "db.keys = 24"),
        ] {
            assert!(text.contains(from));
            std::fs::write(&layout, text.replace(from, to)).unwrap();
            let server = with_layout(kind, &layout);
            let (answer, state) = offered(&server);
            assert_eq!(answer, state);
            assert!(state.starts_with("no: a trial in a forked child failed"), "{kind} {to}: {state}");
            assert_eq!(server.client().unwrap().text(&["PING"]).unwrap(), "PONG");
        }
    }
}

/// The layout of the server's own build: of what runs, since a script may have started it.
fn layout_file(kind: Kind) -> std::path::PathBuf {
    let server = Server::start(kind).unwrap();
    let program = std::fs::read(format!("/proc/{}/exe", server.pid())).unwrap();
    let sha256: String = Sha256::digest(program).iter().map(|byte| format!("{byte:02x}")).collect();
    let builds = std::fs::read_dir(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("builds")).unwrap();
    let mut files = builds.map(|file| file.unwrap().path()).chain(layout());
    files.find(|file| std::fs::read_to_string(file).unwrap().contains(&sha256)).unwrap()
}

fn with_layout(kind: Kind, layout: &std::path::Path) -> Server {
    let way = if kind == Kind::Redis7 { "on-empty-db" } else { "flush-before-load" };
    let words = format!("{} layout {}", library().display(), layout.display());
    Server::builder(kind).config("loadmodule", words).config("repl-diskless-load", way).start().unwrap()
}

/// A server's program that is in no list, and a folder for layouts.
struct Unlisted {
    kind: Kind,
    folder: tempfile::TempDir,
    program: PathBuf,
    found: OnceCell<Layout>,
}

impl Unlisted {
    fn of(kind: Kind) -> Unlisted {
        let folder = tempfile::tempdir().unwrap();
        let running = Server::start(kind).unwrap();
        // What runs: a script may have started it.
        let exe = PathBuf::from(format!("/proc/{}/exe", running.pid()));
        let name = kind.binary().unwrap().file_name().unwrap().to_owned();
        let mut bytes = fs::read(exe).unwrap();
        bytes.extend_from_slice(b"a build that no list has");
        let program = folder.path().join(name);
        fs::write(&program, bytes).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Unlisted { kind, folder, program, found: OnceCell::new() }
    }

    fn layouts(&self) -> PathBuf {
        self.folder.path().join("layouts")
    }

    fn search(&self) -> &Layout {
        let stop = AtomicBool::new(false);
        let wanted = Wanted { program: &self.program, called: None, debug_file: None, stop: &stop };
        self.found.get_or_init(|| find(&wanted).unwrap())
    }

    /// Finds the layout, and keeps it as `change` makes it.
    fn keep(&self, change: impl Fn(&str) -> String) -> Build {
        let found = self.search();
        folder::keep(&self.layouts(), &found.build, &change(&found.text)).unwrap();
        found.build.clone()
    }

    fn builder(&self) -> Builder {
        let way = if self.kind == Kind::Redis7 { "on-empty-db" } else { "flush-before-load" };
        let words = format!("{} layouts {}", library().display(), self.layouts().display());
        let program = Program::at(&self.program).unwrap();
        Server::builder(self.kind)
            .program(&program)
            .config("loadmodule", words)
            .config("repl-diskless-load", way)
            .config("enable-debug-command", "yes")
    }

    fn start(&self) -> Server {
        self.builder().start().unwrap()
    }
}

fn state(server: &Server) -> (String, String) {
    (server.fact("remora_fast_keys").unwrap(), server.fact("remora_fast_keys_layout").unwrap())
}

/// The server loads the records in the fast way, in a load that it wants to verify or not. `spoil`: words before its
/// look. Returns whether it took all of it.
fn load(server: &Server, all: &[u8], verify: bool, spoil: &[Word<'_>]) -> Result<(), String> {
    let shown = Shown::of(all);
    let mut primary = Primary::of(server);
    let reply = shown.offered_to(server, &[]).unwrap();
    assert_eq!(answer(&reply, "fast_keys"), "yes", "{}", server.log());
    assert_eq!(answer(&reply, "verify"), if verify { "yes" } else { "no" });
    primary.send(&magic(server.kind()));
    primary.send(&shown.hello());
    shown.wait_for(1);
    let mut done = 1;
    for words in runs(0, all, 0).chunks(3) {
        primary.send(&fields(words));
        done += 1;
    }
    shown.wait_for(done);
    if !spoil.is_empty() {
        primary.send(&fields(spoil));
        done += 1;
        shown.wait_for(done);
    }
    primary.send(&fields(&[Word::Verify]));
    wait_until("the module to look", LONG, || {
        let over = shown.page.done() > done || shown.page.refusal().is_some();
        Ok(if over { Ok(()) } else { Err(format!("{} of {done}", shown.page.done())) })
    })
    .unwrap();
    if let Some(why) = shown.page.refusal() {
        primary.wait_for_the_end();
        return Err(why);
    }
    primary.end();
    wait_for_link(server, "up");
    Ok(())
}

#[test]
fn a_found_layout_is_tried_and_its_first_load_is_verified() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let server = unlisted.start();
        let (why, from) = state(&server);
        assert!(why.contains("this build of the server is not known") && why.contains("remora module layout"), "{why}");
        assert_eq!(from, "none");
        // A server that runs finds the layout at its next load.
        let build = unlisted.keep(str::to_owned);
        assert_eq!(folder::marked(&unlisted.layouts(), &build), None);
        let all = mixed(kind, 11, 4000);
        load(&server, &all, true, &[]).unwrap();
        assert_eq!(state(&server), ("yes".into(), "found, verified".into()), "{}", server.log());
        let own = Server::builder(kind).config("enable-debug-command", "yes").start().unwrap();
        load_plainly(&own, &[(0, all)]);
        assert_eq!(server.digest().unwrap(), own.digest().unwrap(), "{kind}");
        server.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        server.client().unwrap().ok(&["FLUSHALL"]).unwrap();
        load(&server, &records(12, 500), false, &[]).unwrap();
    }
}

/// A program that does not show its functions: the layout says where they are.
#[test]
fn functions_are_used_where_the_layout_says_they_are() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let program = remora_layout::Program::read(&unlisted.program).unwrap();
        let names = Names::of(&program, None).unwrap();
        let family = unlisted.search().family;
        let places: Vec<(&str, u64)> =
            family.functions().into_iter().map(|name| (name, names.offset(name).unwrap())).collect();
        let lines: String = places.iter().map(|(name, offset)| format!("at.{name} = {offset}\n")).collect();
        unlisted.keep(|text| format!("{text}{lines}"));
        let server = unlisted.start();
        load(&server, &mixed(kind, 13, 500), true, &[]).unwrap();
        assert_eq!(state(&server).0, "yes");
        // A function in the place of another: refused by its name, whether the child crashes or not.
        for (name, other) in
            [("sdsnewlen", "sdsfree"), ("dbAddRDBLoad", "setExpire"), ("rdbLoadObject", "createStringObject")]
        {
            let offset = |wanted: &str| places.iter().find(|(name, _)| *name == wanted).unwrap().1;
            let (from, to) = (format!("at.{name} = {}\n", offset(name)), format!("at.{name} = {}\n", offset(other)));
            unlisted.keep(|text| format!("{text}{}", lines.replace(&from, &to)));
            let server = unlisted.start();
            let (reply, shown) = offered(&server);
            assert_eq!(reply, shown);
            assert!(shown.starts_with("no: a trial in a forked child failed"), "{kind} {name}: {shown}");
            assert!(shown.contains(name) && shown.contains("build-id-"), "{kind} {name}: {shown}");
            assert_eq!(server.client().unwrap().text(&["PING"]).unwrap(), "PONG");
        }
        // A place that is no code.
        unlisted.keep(|text| format!("{text}at.sdsnewlen = 1\n"));
        assert!(state(&unlisted.start()).0.contains("the layout has no place for sdsnewlen"));
    }
}

#[test]
fn a_wrong_layout_is_refused_by_the_trial_and_the_server_lives_on() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let found = unlisted.search();
        for name in ["server.dbnum", "server.keys_loaded", "server.db", "db.keys", "table.used", "table.exponents"] {
            let line = found.text.lines().find(|line| line.starts_with(&format!("{name} = "))).unwrap();
            let offset: usize = line.rsplit_once(' ').unwrap().1.parse().unwrap();
            let wrong = found.text.replace(&format!("{line}\n"), &format!("{name} = {}\n", offset + 16));
            folder::keep(&unlisted.layouts(), &found.build, &wrong).unwrap();
            let server = unlisted.start();
            let (reply, shown) = offered(&server);
            assert_eq!(reply, shown);
            assert!(shown.starts_with("no: a trial in a forked child failed"), "{kind} {name}: {shown}");
            assert_eq!(server.client().unwrap().text(&["PING"]).unwrap(), "PONG");
        }
    }
}

#[test]
fn a_file_that_others_can_write_is_refused_until_that_is_mended() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let build = unlisted.keep(str::to_owned);
        let file = folder::file(&unlisted.layouts(), &build);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        let server = unlisted.start();
        let (why, from) = state(&server);
        assert!(why.contains("others may write it (mode 0666)") && from == "none", "{why}");
        assert!(server.log().contains("others may write it"), "{}", server.log());
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(offered(&server), ("yes".into(), "yes".into()));
        // Of another build, or version.
        let text = fs::read_to_string(&file).unwrap();
        for (line, why) in [("build = ", "the layout is of the build"), ("version = ", "the layout is of version")] {
            fs::write(&file, text.replace(line, &format!("{line}x"))).unwrap();
            assert!(state(&unlisted.start()).0.contains(why));
        }
    }
}

/// What was loaded is not what the module finds: the load fails, and no process tries that build again.
#[test]
fn a_load_that_is_different_marks_its_build() {
    for kind in require::kinds() {
        let unlisted = Unlisted::of(kind);
        let build = unlisted.keep(str::to_owned);
        let server = unlisted.start();
        let all = b"\x00\x01a\x01b\x00\x01c\x01d";
        // Another value for a key of a run.
        let spoil = [
            Word::Text { database: 0, key: b"a", length: 1, expires_ms: None, usage: None },
            Word::Piece { offset: 9, length: 1 },
        ];
        let why = load(&server, all, true, &spoil).unwrap_err();
        assert!(why.contains("the key \"a\" has another value"), "{why}");
        let (shown, _) = state(&server);
        assert!(shown.starts_with("no: a load in this build was not as it should be"), "{shown}");
        let mark = folder::marked(&unlisted.layouts(), &build).unwrap();
        assert!(mark.contains("the key \"a\" has another value"), "{mark}");
        assert_eq!(server.client().unwrap().text(&["PING"]).unwrap(), "PONG");
        // Another process, and one that ran before the mark was made.
        let running = unlisted.start();
        assert!(state(&running).0.contains("is marked as one that failed"), "{}", state(&running).0);
        unlisted.keep(str::to_owned);
        assert_eq!(offered(&running), ("yes".into(), "yes".into()));
        folder::mark(&unlisted.layouts(), &build, "another server has found it wrong").unwrap();
        assert!(offered(&running).0.contains("another server has found it wrong"));
    }
}
