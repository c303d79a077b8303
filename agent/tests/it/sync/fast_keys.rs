//! What the module does beyond long strings: fast keys, and sweeps instead of forks.
//!
//! With fast keys the primary's fork child writes small values out of its own tables, the replica's server adds them many
//! at a time, and the result is as exact as without.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use crate::kit::{LONG, Source, Stage, at_once, ends, load, number, primary, says, steady_writer, syncs};
use crate::sync::module::{exact_method, method, with_module, with_module_and};
use remora_lab::server::{Builder, Program, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Client, Kind, Server, Workload, assert_same_data, fill_every_type, require};

/// Far from now, in milliseconds since 1970.
const FAR_MS: u64 = 4_102_444_800_000;

/// A replica's server with the module.
fn loading(kind: Kind) -> Server {
    Server::builder(kind).module("").unwrap().start().unwrap()
}

/// Every type, many short strings of all encodings and lengths in several databases, small collections, some long
/// strings, and expiries.
fn fill(server: &Server) {
    let mut client = server.client().unwrap();
    fill_every_type(&mut client, 7).unwrap();
    for database in [0, 3, 15] {
        client.ok(&["SELECT", &database.to_string()]).unwrap();
        let mut commands = Vec::new();
        for number in 0..12_000_u64 {
            let name = match number % 7 {
                0 => number.to_string().into_bytes(),
                1 => [number.to_le_bytes().as_slice(), &[0, 13, 10, 255]].concat(),
                2 => format!("{number}{}", "k".repeat([30, 31, 32, 127, 128, 255, 256, 5000][number as usize % 8]))
                    .into(),
                _ => format!("key:{number}").into_bytes(),
            };
            let value = match number % 5 {
                0 => number.wrapping_mul(number).to_string().into_bytes(),
                1 => format!("-{number}").into_bytes(),
                _ => vec![number as u8; number as usize % 600],
            };
            let mut command = vec![b"SET".to_vec(), name, value];
            if number.is_multiple_of(4) {
                command.extend([b"PXAT".to_vec(), (FAR_MS + number).to_string().into_bytes()]);
            }
            commands.push(command);
            if number.is_multiple_of(3) {
                commands.extend(collection(number));
            }
        }
        for part in commands.chunks(500) {
            client.pipeline(part).unwrap();
        }
    }
    load(server, 10, 300_000);
}

/// A small hash, list, set or sorted set, in one of its encodings. Some have an expiry.
fn collection(number: u64) -> Vec<Vec<Vec<u8>>> {
    let name = format!("collection:{number}").into_bytes();
    let mut command = vec![["HSET", "RPUSH", "SADD", "ZADD"][number as usize / 3 % 4].into(), name.clone()];
    for element in 0..number % 19 + 1 {
        if command[0] == b"ZADD" {
            command.push(format!("{}.5", number * element % 1000).into_bytes());
        }
        let text = match number % 5 {
            0 => (number * element).to_string(),
            1 => format!("{element} {}", "long ".repeat(20)),
            _ => format!("element {element}"),
        };
        command.push(text.clone().into_bytes());
        if command[0] == b"HSET" {
            command.push(text.into_bytes());
        }
    }
    let expiry = (FAR_MS + number).to_string().into_bytes();
    let expires = number.is_multiple_of(7).then(|| vec![b"PEXPIREAT".to_vec(), name, expiry]);
    [command].into_iter().chain(expires).collect()
}

fn number_of(server: &Server, fact: &str) -> u64 {
    server.fact(fact).unwrap().parse().unwrap()
}

fn is_exact_by(transport: &str) {
    for kind in require::kinds() {
        let primary = with_module(kind).start().unwrap();
        fill(&primary);
        let replica = loading(kind);
        let before = syncs(&primary);
        let mut source = Source::start(&primary, &["--memory", "64MiB", "--slot-size", "1MiB"]);
        let writer = steady_writer(&primary);
        writer.wait_for(2000);
        let agent = source.replicate(&replica, &["--transport", transport]);
        writer.wait_for(2000);
        writer.stop().unwrap();
        assert!(exact_method(&mut source).starts_with("the module, fast keys"), "{}", source.agent.output());
        assert_same_data(&primary, &replica);
        let after = syncs(&primary);
        assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "one copy, and one continuation");
        assert_eq!(replica.fact("remora_fast_keys").unwrap(), "yes", "{}", agent.output());
        // All but those that lie across a border of two slots. (The writer may empty a database before the snapshot.)
        let (written, loaded) = (number_of(&primary, "remora_last_keys"), number_of(&replica, "remora_loaded_keys"));
        assert!(written > 20_000 && loaded > written / 100 * 95, "{kind}: {loaded} of {written} keys");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_is_exact_by_shared_memory() {
    is_exact_by("shm");
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_is_exact_by_tcp() {
    is_exact_by("tcp");
}

/// What the child has written is an ordinary snapshot: any server loads it.
#[test]
#[ignore = "long: make test-all"]
fn a_replica_without_the_module_is_exact() {
    for kind in require::kinds() {
        let primary = with_module(kind).start().unwrap();
        fill(&primary);
        let replica = Server::start(kind).unwrap();
        let mut source = Source::start(&primary, &["--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        assert!(exact_method(&mut source).starts_with("the module, fast keys"), "{}", source.agent.output());
        assert_same_data(&primary, &replica);
        // The child alone has taken keys out of its tables.
        assert_same_data(&primary, &replica);
        primary.client().unwrap().ok(&["SAVE"]).unwrap();
    }
}

/// What a server without the module saves is loaded in the fast way too.
#[test]
#[ignore = "long: make test-all"]
fn a_primary_without_the_module_is_copied_exactly() {
    for kind in require::kinds() {
        let primary = primary(kind).config("rdbcompression", "no").start().unwrap();
        fill(&primary);
        let replica = loading(kind);
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
        assert!(number_of(&replica, "remora_loaded_keys") > 35_000);
    }
}

#[test]
fn the_uses_of_keys_arrive() {
    for kind in require::kinds() {
        for (policy, question) in [("allkeys-lru", "IDLETIME"), ("allkeys-lfu", "FREQ")] {
            let primary = with_module(kind).config("maxmemory-policy", policy).start().unwrap();
            let mut client = primary.client().unwrap();
            for number in 0..300 {
                let (name, age) = (format!("key {number}"), (number % 200).to_string());
                client.ok(&["SET", "value", "a short value"]).unwrap();
                let payload = client.bytes(&["DUMP", "value"]).unwrap().unwrap();
                let command = [b"RESTORE".as_slice(), name.as_bytes(), b"0", &payload];
                let age = [if question == "FREQ" { b"FREQ".as_slice() } else { b"IDLETIME" }, age.as_bytes()];
                client.ok(&[&command[..], &age].concat()).unwrap();
            }
            let replica = Server::builder(kind).module("").unwrap().config("maxmemory-policy", policy).start().unwrap();
            let source = Source::start(&primary, &["--memory", "64MiB"]);
            source.replicate(&replica, &[]);
            assert_same_data(&primary, &replica);
            let mut copy = replica.client().unwrap();
            for number in 0..300 {
                let command = ["OBJECT", question, &format!("key {number}")];
                let (there, here) = (client.int(&command).unwrap(), copy.int(&command).unwrap());
                assert!((there - here).abs() <= 10, "{kind} {policy} {number}: {there} {here}");
            }
            assert_eq!(replica.fact("remora_fast_keys").unwrap(), "yes");
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn either_end_can_do_without() {
    for kind in require::kinds() {
        let primary = with_module(kind).start().unwrap();
        fill(&primary);
        let replica = loading(kind);
        let mut source = Source::start(&primary, &["--memory", "64MiB", "--fast-keys", "off"]);
        source.replicate(&replica, &["--fast-keys", "off"]);
        let line = source.agent.wait_for_event("snapshot_completed", LONG).unwrap();
        assert!(!line.contains("fast keys"), "{line}");
        assert_same_data(&primary, &replica);
        assert!(number_of(&replica, "remora_loaded_keys") < 10_000);
    }
}

/// The server refuses the fast walk when its child is asked, and saves everything itself.
#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_withdraws_its_offer_is_copied_exactly() {
    for kind in require::kinds() {
        let primary = with_module(kind).config("remora.fast-keys", "no").start().unwrap();
        fill(&primary);
        let replica = loading(kind);
        let mut source = Source::start(&primary, &["--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        assert!(!exact_method(&mut source).contains("fast keys"), "{}", source.agent.output());
        assert_same_data(&primary, &replica);
    }
}

/// What keeps an end from using fast keys is in the source's status, for itself and for each replica.
#[test]
#[ignore = "long: make test-all"]
fn a_status_says_why_there_are_no_fast_keys() {
    for kind in require::kinds() {
        let primary = with_module(kind).config("remora.fast-keys", "no").start().unwrap();
        fill(&primary);
        let forbidding = || Server::builder(kind).module("").unwrap().config("remora.fast-keys", "no").start().unwrap();
        let cases = [
            (forbidding(), "auto", "remora.fast-keys is no"),
            (loading(kind), "off", "--fast-keys is off"),
            (Server::start(kind).unwrap(), "auto", "the server does not have the module"),
        ];
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        let stays = |status: &serde_json::Value| status["replicas"][0]["phase"] == "stay";
        for (server, how, why) in &cases {
            let mut agent = source.replica(server, &["--stay", "--fast-keys", how]);
            let status = source.wait_for_status("the replica to stay", stays);
            assert_eq!(status["replicas"][0]["no_fast_keys"], *why, "{kind}: {status}");
            assert_eq!(status["generation"]["no_fast_keys"], "remora.fast-keys is no", "{kind}: {status}");
            let drawn = source.drawn_status();
            for line in ["without fast keys: remora.fast-keys is no".to_owned(), format!("without fast keys: {why}")] {
                assert!(drawn.contains(&line), "{kind}: {drawn}");
            }
            agent.kill().unwrap();
            source
                .wait_for_status("the replica to be gone", |status| status["replicas"].as_array().unwrap().is_empty());
        }
        let primary = with_module(kind).start().unwrap();
        fill(&primary);
        let (source, server) = (Source::start(&primary, &["--memory", "64MiB"]), loading(kind));
        let _agent = source.replica(&server, &["--stay"]);
        let status = source.wait_for_status("the replica to stay", stays);
        let none = (status["replicas"][0]["no_fast_keys"] == "", status["generation"]["no_fast_keys"] == "");
        assert_eq!(none, (true, true), "{kind}: {status}");
    }
}

/// A primary whose table of keys grows at this moment, and stays so: it has two parts.
fn growing(kind: Kind) -> Server {
    let primary = with_module(kind).config("activerehashing", "no").start().unwrap();
    let mut client = primary.client().unwrap();
    let mut number = 0_u32;
    loop {
        let value = "v".repeat(number as usize % 200);
        client.ok(&["SET", &format!("key:{number}"), &value]).unwrap();
        number += 1;
        let is_due = number > 20_000 && number.is_multiple_of(100);
        if is_due && client.text(&["DEBUG", "HTSTATS", "0"]).unwrap().contains("rehashing target") {
            return primary;
        }
        assert!(number < 200_000, "{kind}: the table does not grow");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_whose_table_grows_is_copied_exactly() {
    for kind in require::kinds() {
        // All keys are taken; and some are left to the server, in both parts of the table.
        for options in [&[][..], &["--module-walk-from", "100"]] {
            let (primary, replica) = (growing(kind), loading(kind));
            let mut source = Source::start(&primary, options);
            source.replicate(&replica, &[]);
            assert!(exact_method(&mut source).starts_with("the module, fast keys"), "{}", source.agent.output());
            assert_same_data(&primary, &replica);
            let copied = number_of(&primary, "rdb_last_cow_size");
            assert!(copied > 0, "{kind}: the server does not say what its child copied");
        }
    }
}

// Builds that are in no list: their layouts are found by `remora module layout`.

/// A copy of the kind's program with bytes behind its end: it has the same build id, and a SHA-256 that nobody knows.
fn unlisted(kind: Kind, folder: &Path) -> Program {
    let running = Server::start(kind).unwrap();
    let exe = Path::new("/proc").join(running.pid().to_string()).join("exe");
    let program = folder.join(kind.binary().unwrap().file_name().unwrap());
    let mut bytes = fs::read(exe).unwrap();
    bytes.extend_from_slice(b"a build that no list has");
    fs::write(&program, bytes).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    Program::at(program).unwrap()
}

fn remora_module_layout(layouts: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
    command.args(["module", "layout", "--layouts"]).arg(layouts).args(more);
    command.output().unwrap()
}

/// A whole sync with two servers of a build that is in no list: both ends find the layout that the command has kept.
#[test]
#[ignore = "long: make test-all"]
fn servers_whose_layout_was_found_are_copied_exactly() {
    for kind in require::kinds() {
        let folder = tempfile::tempdir().unwrap();
        let (program, layouts) = (unlisted(kind, folder.path()), folder.path().join("layouts"));
        let words = format!("layouts {}", layouts.display());
        let primary = with_module_and(kind, &words).program(&program).start().unwrap();
        let loading = || Server::builder(kind).program(&program).module(&words).unwrap().start().unwrap();
        fill(&primary);
        // Nobody has looked for it yet: the sync is exact, and the status says why it has no fast keys.
        {
            let replica = loading();
            let source = Source::start(&primary, &["--memory", "64MiB"]);
            let mut agent = source.replica(&replica, &["--stay"]);
            let status =
                source.wait_for_status("the replica to stay", |status| status["replicas"][0]["phase"] == "stay");
            for why in [&status["replicas"][0]["no_fast_keys"], &status["generation"]["no_fast_keys"]] {
                let why = why.as_str().unwrap();
                assert!(why.contains("this build of the server is not known"), "{kind}: {why}");
            }
            agent.kill().unwrap();
        }
        // By the running server, which needs no restart.
        let found = remora_module_layout(&layouts, &["--pid", &primary.pid().to_string()]);
        let said = String::from_utf8_lossy(&found.stdout).into_owned();
        assert!(found.status.success(), "{said}{}", String::from_utf8_lossy(&found.stderr));
        assert!(said.contains("the table of dynamic symbols") && said.contains("kept in"), "{said}");
        let replica = loading();
        let mut source = Source::start(&primary, &["--memory", "64MiB", "--slot-size", "1MiB"]);
        let writer = steady_writer(&primary);
        writer.wait_for(1000);
        let agent = source.replicate(&replica, &[]);
        writer.wait_for(1000);
        writer.stop().unwrap();
        assert!(exact_method(&mut source).starts_with("the module, fast keys"), "{}", source.agent.output());
        assert_same_data(&primary, &replica);
        let state = ["remora_fast_keys", "remora_fast_keys_layout"].map(|name| replica.fact(name).unwrap());
        assert_eq!(state, ["yes", "found, verified"], "{}", agent.output());
        assert!(number_of(&replica, "remora_loaded_keys") > 20_000);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_layout_of_what_is_no_server_or_of_an_unknown_version_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |more: &[&str], code: i32, why: &str| {
        let output = remora_module_layout(folder.path(), more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(why), "{said}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is kept");
    };
    refused(&["--program", "/bin/false"], 8, "/bin/false does not run as a server");
    refused(&["--program", "/proc/no-such-program"], 8, "No such file");
    refused(&["--pid", "4194305"], 8, "the program of process 4194305 cannot be found");
    refused(&[], 2, "--program");
    // In a folder that others can write.
    for kind in require::kinds() {
        let open = tempfile::tempdir().unwrap();
        fs::set_permissions(open.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let program = kind.binary().unwrap();
        let output = remora_module_layout(open.path(), &["--program", &program.display().to_string()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("others may write it (mode 0777)"), "{said}");
    }
}

mod by_command {
    use super::*;

    /// Folders with servers, or servers, with colons between.
    const SERVERS: &str = "REMORA_SERVERS";

    /// The table of docs/reference/versions.md: for each program, fast keys by a layout that is found, in a whole sync,
    /// or why there are none.
    #[test]
    #[ignore = "needs servers: make test-matrix"]
    fn layouts_of_many_versions() {
        let given = std::env::var(SERVERS).unwrap_or_else(|_| ".cache/servers/versions".into());
        let root = remora_lab::server::project_root();
        let mut programs: Vec<Program> = Vec::new();
        for place in given.split(':').map(|place| root.join(place)) {
            programs.extend(Program::all(&place).unwrap());
            // Programs whose names end with their version.
            for file in place.read_dir().into_iter().flatten().map(|file| file.unwrap().path()) {
                let is_program = file.metadata().unwrap().permissions().mode() & 0o111 != 0 && file.is_file();
                if is_program && !file.to_string_lossy().ends_with("-server") {
                    programs.extend(Program::at(file));
                }
            }
        }
        assert!(!programs.is_empty(), "{given} has no server");
        let mut differs = Vec::new();
        for program in &programs {
            let name = format!("{} {:?} {}", program.family(), program.version(), program.path().display());
            match row(program) {
                Ok(text) => println!("{name}: {text}"),
                Err(text) => {
                    println!("{name}: DIFFERS: {text}");
                    differs.push(name);
                }
            }
        }
        assert!(differs.is_empty(), "{differs:?}");
    }

    /// What the row says; an error if an end does not do what the command has said.
    fn row(program: &Program) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let layouts = folder.path().join("layouts");
        let found = remora_module_layout(&layouts, &["--program", &program.path().display().to_string()]);
        if !found.status.success() {
            let said = String::from_utf8_lossy(&found.stderr).into_owned();
            return Ok(format!("no layout: {}", said.trim().replace('\n', " ")));
        }
        let found = String::from_utf8_lossy(&found.stdout).lines().next().unwrap_or_default().to_owned();
        let (kind, words) = (program.kind(), format!("layouts {}", layouts.display()));
        let primary = match with_module_and(kind, &words).program(program).start() {
            Ok(primary) => primary,
            Err(error) => return Ok(format!("{found}; the server loads no module: {error}")),
        };
        let replica = Server::builder(kind).program(program).module(&words).unwrap().start().unwrap();
        fill(&primary);
        let mut source = Source::start(&primary, &["--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
        let took = exact_method(&mut source);
        let [state, from] = ["remora_fast_keys", "remora_fast_keys_layout"].map(|name| replica.fact(name).unwrap());
        let said = format!(
            "{found}; capture: {took}; load: {state} ({from}), {} keys",
            number_of(&replica, "remora_loaded_keys")
        );
        let works = took.starts_with("the module, fast keys") && state == "yes";
        if works { Ok(said) } else { Err(format!("{said}\n{}", replica.log())) }
    }
}

// Snapshots without a fork: the module sweeps its server. Whatever clients write meanwhile, the replica is exact; what
// stands in the way is named, and a fork takes the snapshot.

const SWEEP: [&str; 4] = ["--memory", "1GiB", "--module-capture", "sweep"];

const SWEPT: &str = "the module, without a fork";

/// A primary whose backlog can be made without a fork: servers wait for more replicas by default.
fn sweepable(kind: Kind) -> Builder {
    with_module(kind).config("repl-diskless-sync-delay", 5)
}

/// Keys of the first database, so many that a sweep takes a second or two.
const KEYS: u64 = 200_000;

/// Keys of the first database while its clients write as fast as they can: the sweep has a share of the server's time, and
/// a module without optimisation needs most of that.
const KEYS_BESIDE_WRITERS: u64 = 40_000;

fn populate(primary: &Server, keys: u64) {
    let mut client = primary.client().unwrap();
    client.ok(&["DEBUG", "POPULATE", &keys.to_string(), "key", "50"]).unwrap();
}

/// Values that are written in pieces.
const LARGE: [&str; 4] = ["large:list", "large:hash", "large:set", "large:sorted"];

fn populate_large(primary: &Server) {
    let script = "for i = 1, 12000 do redis.call('RPUSH', KEYS[1], i) redis.call('HSET', KEYS[2], i, i) \
                  redis.call('SADD', KEYS[3], 'e' .. i) redis.call('ZADD', KEYS[4], i / 3, i) end";
    primary.client().unwrap().call(&[&["EVAL", script, "4"][..], &LARGE].concat()).unwrap();
}

/// A write to a large value: most change a part of it, and some all of it.
fn write_to_large(client: &mut Client, number: u64) {
    let element = (number * 7919 % 14_000).to_string();
    let [list, hash, set, sorted] = LARGE;
    match number % 211 {
        0 => client.queue(&["RENAME", hash, "large:renamed"]),
        1 => client.queue(&["RENAME", "large:renamed", hash]),
        2 => client.queue(&["SPOP", set]),
        3 => client.queue(&["RPOPLPUSH", list, list]),
        4 => client.queue(&["ZUNIONSTORE", "large:union", "1", sorted]),
        _ => match number % 8 {
            0 => client.queue(&["LPUSH", list, &element]),
            1 => client.queue(&["RPOP", list]),
            2 => client.queue(&["HSET", hash, &element, "new"]),
            3 => client.queue(&["HDEL", hash, &element]),
            4 => client.queue(&["SADD", set, &element]),
            5 => client.queue(&["SREM", set, &format!("e{element}")]),
            6 => client.queue(&["ZADD", sorted, "7", &element]),
            _ => client.queue(&["ZREM", sorted, &element]),
        },
    }
}

/// Writes of each of two writers, per second. Beside them stands [`resize`], which is as fast as the server.
const RATE: u64 = 5_000;

/// Every kind of write that names its keys.
fn writer(primary: &Server, seed: u64) -> Workload {
    let options = Options { flush: false, big_bytes: 0, ..Options::seeded(seed) };
    Workload::start(primary.client().unwrap(), options.rate(RATE)).unwrap()
}

/// Makes and deletes keys by the ten thousand until `over` is set, so that tables grow and shrink, some in transactions
/// and by scripts.
fn resize(primary: &Server, over: &AtomicBool) {
    let mut client = primary.client().unwrap();
    let mut round = 0;
    while !over.load(Ordering::Relaxed) {
        for number in 0..KEYS_BESIDE_WRITERS / 2 {
            let (more, old) = (format!("more:{number}"), format!("key:{}", (number * 7 + round) % KEYS_BESIDE_WRITERS));
            client.queue(&["APPEND", &more, "x"]);
            write_to_large(&mut client, number + round);
            match number % 8 {
                0 => client.queue(&["RENAME", &old, &format!("renamed:{number}")]),
                1 => client.queue(&["COPY", &old, &more, "DB", "9", "REPLACE"]),
                2 => client.queue(&[
                    "EVAL",
                    "redis.call('APPEND', KEYS[1], 'y') return redis.call('DEL', KEYS[2])",
                    "2",
                    &old,
                    &more,
                ]),
                3 => {
                    client.queue(&["MULTI"]);
                    client.queue(&["APPEND", &old, "z"]);
                    client.queue(&["PEXPIRE", &more, "50"]);
                    client.queue(&["EXEC"]);
                }
                4 => client.queue(&["MOVE", &more, "9"]),
                5 => client.queue(&["SET", &old, "new", "PX", "30"]),
                _ => client.queue(&["APPEND", &old, "w"]),
            }
            if client.queued() > 500 {
                client.flush().unwrap();
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        }
        for number in 0..KEYS_BESIDE_WRITERS / 2 {
            client.queue(&["UNLINK", &format!("more:{number}"), &format!("renamed:{number}")]);
            if client.queued() > 500 {
                client.flush().unwrap();
            }
        }
        client.flush().unwrap();
        round += 1;
    }
}

fn is_exact_under_every_kind_of_write(kind: Kind) {
    let primary = sweepable(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 23).unwrap();
    load(&primary, 50, 100_000);
    populate(&primary, KEYS_BESIDE_WRITERS);
    populate_large(&primary);
    let forks = number(&primary, "total_forks");
    for round in 0..2 {
        let replica = Server::start(kind).unwrap();
        let mut source = Source::start(&primary, &SWEEP);
        let writers = [writer(&primary, 100 + round), writer(&primary, 200 + round)];
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| resize(&primary, &over));
            writers[0].wait_for(2_000);
            let mut agent = source.replica(&replica, &["--transport", if round % 2 == 1 { "tcp" } else { "shm" }]);
            let made = agent.wait_for_success(LONG);
            writers[1].wait_for(2_000);
            over.store(true, Ordering::Relaxed);
            if let Err(error) = made {
                panic!("{error}\n{}\n{}\n{}", agent.output(), source.agent.output(), primary.log());
            }
        });
        for writer in writers {
            writer.stop().unwrap();
        }
        assert_eq!(method(&mut source), SWEPT, "{}", source.agent.output());
        assert_same_data(&primary, &replica);
    }
    assert_eq!(number(&primary, "total_forks"), forks);
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_of_redis_swept_under_every_kind_of_write_are_exact() {
    let Some(kind) = require::redis() else { return };
    is_exact_under_every_kind_of_write(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_of_valkey_swept_under_every_kind_of_write_are_exact() {
    let Some(kind) = require::valkey() else { return };
    is_exact_under_every_kind_of_write(kind);
}

#[test]
fn a_primary_that_never_had_a_replica_is_swept_without_a_fork() {
    for kind in require::kinds() {
        let primary = sweepable(kind).start().unwrap();
        let keys = fill_every_type(&mut primary.client().unwrap(), 21).unwrap();
        let mut source = Source::start(&primary, &SWEEP);
        let replicas = [(); 2].map(|()| Server::start(kind).unwrap());
        for replica in &replicas {
            source.replicate(replica, &[]);
            assert_same_data(&primary, replica);
        }
        assert_eq!(method(&mut source), SWEPT);
        assert_eq!(number(&primary, "total_forks"), 0, "{kind}");
        assert_eq!(number(&primary, "latest_fork_usec"), 0, "{kind}");
        assert_eq!(number(&primary, "remora_sweep_keys"), keys, "{kind}");
        let libraries =
            |server: &Server| format!("{:?}", server.client().unwrap().list(&["FUNCTION", "LIST"]).unwrap());
        assert_eq!(libraries(&primary).len(), libraries(&replicas[0]).len());
    }
}

/// A replica is made of a primary that is not swept, or not to the end: by a fork, and the source says why.
#[track_caller]
fn is_forked_for(primary: &Server, why: &str) {
    let replica = Server::start(primary.kind()).unwrap();
    let mut source = Source::start(primary, &SWEEP);
    source.replicate(&replica, &[]);
    assert_ne!(method(&mut source), SWEPT, "{why}");
    let output = source.agent.output();
    assert!(output.contains(why), "{why} is not in:\n{output}");
    assert_same_data(primary, &replica);
}

#[test]
#[ignore = "long: make test-all"]
fn what_keeps_a_server_from_being_swept_is_named_and_its_fork_takes_the_snapshot() {
    at_once(require::kinds(), |kind| {
        let fill = |primary: &Server| assert!(fill_every_type(&mut primary.client().unwrap(), 24).unwrap() > 0);
        let primary = sweepable(kind).start().unwrap();
        fill(&primary);
        let mut client = primary.client().unwrap();
        client.ok(&["MULTI"]).unwrap();
        is_forked_for(&primary, "a client is in a transaction");
        client.ok(&["DISCARD"]).unwrap();
        client.send(&["BLMOVE", "nothing", "somewhere", "LEFT", "LEFT", "0"]).unwrap();
        is_forked_for(&primary, "a client waits in blmove");
        drop(client);

        let renamed = sweepable(kind).config("rename-command", "SWAPDB exchange").start().unwrap();
        fill(&renamed);
        is_forked_for(&renamed, "the command swapdb has been renamed or disabled");
        let hasty = with_module(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        fill(&hasty);
        is_forked_for(&hasty, "the server has no backlog, and would fork to get one");
    });
}

#[test]
fn a_primary_that_must_not_fork_does_not_and_replicas_wait_until_it_can_be_swept() {
    let Some(kind) = require::valkey() else { return };
    let primary = sweepable(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 26).unwrap();
    let mut client = primary.client().unwrap();
    client.ok(&["MULTI"]).unwrap();
    let mut source = Source::start(&primary, &[&SWEEP[..], &["--no-fork"]].concat());
    let replica = Server::start(kind).unwrap();
    let mut agent = source.replica(&replica, &[]);
    source.agent.wait_for_line("a client is in a transaction", LONG).unwrap();
    client.ok(&["DISCARD"]).unwrap();
    agent.wait_for_success(LONG).unwrap();
    assert_eq!(method(&mut source), SWEPT);
    assert_same_data(&primary, &replica);
    assert_eq!(number(&primary, "total_forks"), 0);
    // Without a way that needs no fork, nothing is begun.
    let stage = Stage::new();
    let url = primary.url();
    let token = stage.token.display().to_string();
    let words = ["source", "--server", &url, "--token-file", &token, "--no-fork"];
    says(&ends(&mut stage.start(None, &words), 2), &["--from-file", "--module-capture sweep"]);
}

/// Does something to a primary that is being swept. The replica that waits is made by a fork then.
fn interrupt(kind: Kind, what: &[&str], why: &str) {
    let primary = sweepable(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 25).unwrap();
    populate(&primary, KEYS);
    let replica = Server::start(kind).unwrap();
    let mut source = Source::start(&primary, &SWEEP);
    let mut agent = source.replica(&replica, &[]);
    source.agent.wait_for_event("snapshot_started", LONG).unwrap();
    primary.client().unwrap().call(what).unwrap();
    agent.wait_for_success(LONG).unwrap();
    assert_ne!(method(&mut source), SWEPT);
    let output = source.agent.output();
    assert!(output.contains(why), "{why} is not in:\n{output}");
    assert_same_data(&primary, &replica);
    wait_until("the sweep to have left", LONG, || {
        let state = primary.fact("remora_sweep")?;
        Ok(if state == "idle" { Ok(()) } else { Err(state) })
    })
    .unwrap();
}

#[test]
#[ignore = "long: make test-all"]
fn what_ends_a_sweep_is_named_and_a_fork_takes_the_next_snapshot() {
    at_once(require::kinds(), |kind| {
        interrupt(kind, &["FLUSHDB"], "a client sent FLUSHDB");
        interrupt(kind, &["SWAPDB", "0", "3"], "a client sent SWAPDB");
        interrupt(kind, &["EVAL", "redis.call('FLUSHALL')", "0"], "a client sent FLUSHALL");
        interrupt(kind, &["DEBUG", "RELOAD"], "a client sent DEBUG");
        interrupt(kind, &["SORT", "nothing", "BY", "w_*", "STORE", "sorted"], "a client sent SORT");
        interrupt(
            kind,
            &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"],
            "maxmemory-policy was changed meanwhile",
        );
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_value_that_is_too_large_for_one_moment_ends_a_sweep() {
    for kind in require::kinds() {
        let primary = sweepable(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        // A string of any length is taken in pieces.
        client.ok(&["SET", "large", &"x".repeat(40 << 20)]).unwrap();
        let replica = Server::start(kind).unwrap();
        let mut source = Source::start(&primary, &SWEEP);
        source.replicate(&replica, &[]);
        assert_eq!(method(&mut source), SWEPT, "{}", source.agent.output());
        assert_same_data(&primary, &replica);
        source.stop();
        let script = "for i = 1, 30000 do redis.call('XADD', KEYS[1], '*', 'field', i) end";
        client.call(&["EVAL", script, "1", "long"]).unwrap();
        is_forked_for(&primary, "the value of the key \"long\" of database 0 is too large");
    }
}

/// A key that has expired and is still there is removed by the command that names it, and not by the sweep in a way
/// that the server does not expect: also if the command is refused then.
#[test]
#[ignore = "long: make test-all"]
fn keys_that_have_expired_leave_a_server_that_is_swept_as_ever() {
    for kind in require::kinds() {
        let primary = sweepable(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
        populate(&primary, KEYS);
        for number in 0..1000 {
            client.ok(&["SET", &format!("gone:{number}"), "5", "PX", "1"]).unwrap();
            client.ok(&["SET", &format!("soon:{number}"), "5", "PX", &(1500 + number).to_string()]).unwrap();
        }
        let replica = Server::start(kind).unwrap();
        let mut source = Source::start(&primary, &SWEEP);
        let mut agent = source.replica(&replica, &[]);
        source.agent.wait_for_event("snapshot_started", LONG).unwrap();
        client.ok(&["CONFIG", "SET", "min-replicas-to-write", "7"]).unwrap();
        for number in 0..500 {
            assert!(client.int(&["INCR", &format!("gone:{number}")]).is_err(), "the server refuses writes");
        }
        client.ok(&["CONFIG", "SET", "min-replicas-to-write", "0"]).unwrap();
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "1"]).unwrap();
        for number in 0..2000 {
            for name in ["gone", "soon"] {
                client.int(&["INCR", &format!("{name}:{}", number % 1000)]).unwrap();
            }
            thread::sleep(Duration::from_micros(200));
        }
        agent.wait_for_success(LONG).unwrap();
        assert_eq!(method(&mut source), SWEPT, "{}", source.agent.output());
        assert_same_data(&primary, &replica);
    }
}
