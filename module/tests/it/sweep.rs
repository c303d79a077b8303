//! Sweeps by hand: what comes over the socket is what a twin of the server had at that moment, key by key, whatever
//! clients write meanwhile; and an agent that leaves leaves nothing behind.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use remora_fabric::{Handover, shm::Place};
use remora_lab::server::wait_until;
use remora_lab::workload::Options;
use remora_lab::{Kind, Server, Workload, fill_every_type, require};
use remora_protocol::sweep::Frames;
use remora_redis::resp::Frame;

use crate::load::age_slack;

const LONG: Duration = Duration::from_secs(120);

/// Offers a socket to the module, and returns our end when the sweep has begun.
fn begin(server: &Server) -> remora_lab::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let handover = Handover::bind(&Place::Abstract).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = handover.give(&[theirs.as_fd()], Duration::from_millis(500));
        });
        server.client()?.list(&["REMORA.SWEEP", &handover.address(), &handover.secret()])
    })?;
    Ok(ours)
}

/// The snapshot that comes over the socket.
fn snapshot(mut socket: UnixStream) -> Option<Vec<u8>> {
    let (mut frames, mut buffer, mut bytes) = (Frames::default(), vec![0; 1 << 16], Vec::new());
    loop {
        let read = socket.read(&mut buffer).unwrap();
        if read == 0 {
            return None;
        }
        if frames.take(&buffer[..read], |records| bytes.extend_from_slice(records)).unwrap().is_some() {
            return Some(bytes);
        }
    }
}

fn with_backlog(kind: Kind) -> (Server, Server) {
    // By default a primary waits five seconds for more replicas before it begins a copy.
    let quick = Server::builder(kind).config("repl-diskless-sync-delay", 0);
    let server = quick.module("").unwrap().start().unwrap();
    let replica = Server::start(kind).unwrap();
    replica.replicate(&server).unwrap();
    replica.wait_for_link(LONG).unwrap();
    (server, replica)
}

/// Every key of every database, with the digest of its value and its expiry.
fn contents(server: &Server) -> BTreeMap<(u32, Vec<u8>), (String, i64)> {
    let mut client = server.client().unwrap();
    client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
    let mut all = BTreeMap::new();
    for database in 0..16 {
        client.ok(&["SELECT", &database.to_string()]).unwrap();
        let names: Vec<_> =
            client.list(&["KEYS", "*"]).unwrap().iter().map(|name| name.as_bytes().unwrap().to_vec()).collect();
        for some in names.chunks(1000) {
            let about = |name: &Vec<u8>| {
                let words = |words: [&[u8]; 2]| {
                    [&words[..], &[name.as_slice()]].concat().iter().map(|word| word.to_vec()).collect()
                };
                [words([b"DEBUG", b"DIGEST-VALUE"]), vec![b"PEXPIRETIME".to_vec(), name.clone()]]
            };
            let commands: Vec<Vec<Vec<u8>>> = some.iter().flat_map(about).collect();
            let answers = client.pipeline(&commands).unwrap();
            for (name, answer) in some.iter().zip(answers.chunks(2)) {
                let Frame::Integer(expiry) = answer[1] else { panic!("{answer:?}") };
                all.insert((database, name.clone()), (format!("{:?}", answer[0]), expiry));
            }
        }
    }
    all
}

fn equals_its_twin(kind: Kind, seed: u64) {
    let (server, twin) = with_backlog(kind);
    let mut client = server.client().unwrap();
    fill_every_type(&mut client, seed).unwrap();
    client.ok(&["DEBUG", "POPULATE", "50000", "key", "20"]).unwrap();
    client.int(&["DEL", "key:0"]).unwrap();
    let has_vectors = !client.list(&["COMMAND", "LIST", "FILTERBY", "PATTERN", "vadd"]).unwrap().is_empty();
    for number in 0..if has_vectors { 300 } else { 0 } {
        client.int(&["VADD", &format!("vectors:{number}"), "VALUES", "3", "1", "2", "3", "element"]).unwrap();
    }
    wait_until("the twin to have everything", LONG, || {
        let offsets = (server.fact("master_repl_offset")?, twin.fact("slave_repl_offset")?);
        Ok(if offsets.0 == offsets.1 { Ok(()) } else { Err(format!("{offsets:?}")) })
    })
    .unwrap();
    // `DEBUG POPULATE` is not replicated.
    twin.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
    twin.client().unwrap().ok(&["DEBUG", "POPULATE", "50000", "key", "20"]).unwrap();
    twin.client().unwrap().int(&["DEL", "key:0"]).unwrap();

    let socket = begin(&server).unwrap();
    let writers = [1, 2].map(|number| {
        let options = Options { flush: false, big_bytes: 0, ..Options::seeded(seed + number) };
        Workload::start(server.client().unwrap(), options).unwrap()
    });
    let over = AtomicBool::new(false);
    let bytes = thread::scope(|scope| {
        let (server, stop) = (&server, &over);
        scope.spawn(move || {
            let mut client = server.client().unwrap();
            for number in (1..50_000).cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let key = format!("key:{number}");
                match number % 5 {
                    0 => client.queue(&["DEL", &key]),
                    1 => client.queue(&["RENAME", &key, &format!("key:{}", number + 10)]),
                    2 => client.queue(&["COPY", &key, &key, "DB", "1"]),
                    3 if has_vectors && number % 50 == 3 => {
                        let (key, element) = (format!("vectors:{}", number % 300), number.to_string());
                        client.queue(&["VADD", &key, "VALUES", "3", "3", "2", "1", &element, "CAS"]);
                    }
                    3 => client.queue(&["SET", &key, "other"]),
                    _ => client.queue(&["SETRANGE", &format!("new:{number}"), "3", "x"]),
                }
                if client.queued() > 100 {
                    client.flush().unwrap();
                }
            }
        });
        let bytes = snapshot(socket);
        over.store(true, Ordering::Relaxed);
        bytes
    });
    for writer in writers {
        assert!(writer.stop().unwrap().commands > 0);
    }
    let why = server.fact("remora_sweep_error").unwrap();
    let bytes = bytes.unwrap_or_else(|| panic!("{kind}: {why}"));

    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("swept.rdb"), bytes).unwrap();
    let loaded = Server::builder(kind).config("dir", folder.path().display()).config("dbfilename", "swept.rdb").start();
    let (wanted, found) = (contents(&twin), contents(&loaded.unwrap()));
    for (key, value) in &found {
        assert_eq!(wanted.get(key), Some(value), "{kind}: {} of {}", String::from_utf8_lossy(&key.1), key.0);
    }
    // What has expired since is missing in one or the other.
    let stays = |(_, (_, expiry)): &(&_, &(String, i64))| *expiry < 0;
    let missing: Vec<_> = wanted.iter().filter(stays).filter(|(key, _)| !found.contains_key(*key)).take(3).collect();
    assert!(missing.is_empty(), "{kind}: {missing:?}");
    assert!(found.len() > 50_000);
}

#[test]
fn what_is_swept_is_what_a_twin_had_at_that_moment() {
    require::kinds().into_iter().for_each(|kind| equals_its_twin(kind, 41));
}

#[test]
#[ignore = "long: make test-all"]
fn what_is_swept_of_other_data_is_what_a_twin_had_at_that_moment() {
    require::kinds().into_iter().for_each(|kind| equals_its_twin(kind, 42));
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_leaves_ends_its_sweep_and_another_one_may_begin() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut client = server.client().unwrap();
        client.ok(&["DEBUG", "POPULATE", "300000", "key", "100"]).unwrap();
        let first = begin(&server).unwrap();
        let busy = begin(&server).unwrap_err().to_string();
        assert!(busy.contains("BUSY"), "{busy}");
        drop(first);
        wait_until("the sweep to end", LONG, || {
            let state = server.fact("remora_sweep")?;
            Ok(if state == "idle" { Ok(()) } else { Err(state) })
        })
        .unwrap();
        assert!(server.fact("remora_sweep_error").unwrap().contains("its agent is gone"));
        assert!(snapshot(begin(&server).unwrap()).is_some());
        assert_eq!(server.fact("remora_sweeps_done").unwrap(), "1");
    }
}

/// The ages of keys are as before in the server, and in the snapshot where the server goes by them.
#[test]
fn keys_stay_as_old_as_they_were() {
    for kind in require::kinds() {
        for (policy, option, question, is_saved) in [
            ("allkeys-lru", "IDLETIME", "IDLETIME", true),
            ("volatile-lfu", "FREQ", "FREQ", true),
            ("noeviction", "IDLETIME", "IDLETIME", false),
            ("allkeys-random", "IDLETIME", "IDLETIME", false),
        ] {
            let (server, _replica) = with_backlog(kind);
            server.configure("maxmemory-policy", policy).unwrap();
            let mut client = server.client().unwrap();
            client.ok(&["SET", "template", "a value"]).unwrap();
            let dumped = client.call(&["DUMP", "template"]).unwrap();
            let dumped = dumped.as_bytes().unwrap();
            let steps = if question == "FREQ" { 1 } else { 50 };
            for number in 0..200_u32 {
                let (key, age) = (format!("key:{number}"), (steps * number).to_string());
                let words = [b"RESTORE".as_slice(), key.as_bytes(), b"0", dumped, option.as_bytes(), age.as_bytes()];
                client.call(&words).unwrap();
            }
            let bytes = snapshot(begin(&server).unwrap());
            let why = server.fact("remora_sweep_error").unwrap();
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("swept.rdb"), bytes.unwrap_or_else(|| panic!("{kind}: {why}"))).unwrap();
            let loaded = Server::builder(kind)
                .config("dir", folder.path().display())
                .config("dbfilename", "swept.rdb")
                .config("maxmemory-policy", policy);
            let loaded = loaded.start().unwrap();
            for (who, server) in [("the server", &server), ("the snapshot", &loaded)] {
                if who == "the snapshot" && !is_saved {
                    continue;
                }
                let mut client = server.client().unwrap();
                for number in 0..200_i64 {
                    let age = client.int(&["OBJECT", question, &format!("key:{number}")]).unwrap();
                    let wanted = i64::from(steps) * number;
                    // Ages grow with time, and frequencies sink with it.
                    let slack = if question == "IDLETIME" && who == "the server" { age_slack(kind) } else { 60 };
                    assert!((age - wanted).abs() <= slack, "{kind} {policy} {who}: {age} for {wanted}");
                }
            }
        }
    }
}

#[test]
fn an_eviction_ends_the_sweep() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut client = server.client().unwrap();
        client.ok(&["DEBUG", "POPULATE", "300000", "key", "100"]).unwrap();
        server.configure("maxmemory-policy", "allkeys-lru").unwrap();
        let socket = begin(&server).unwrap();
        server.configure("maxmemory", "20mb").unwrap();
        client.ok(&["SET", "one", "more"]).unwrap();
        assert!(snapshot(socket).is_none(), "{kind}");
        let why = server.fact("remora_sweep_error").unwrap();
        assert!(why.contains("evicted"), "{kind}: {why}");
        server.configure("maxmemory", "0").unwrap();
        assert!(snapshot(begin(&server).unwrap()).is_some(), "{kind}");
    }
}

#[test]
fn a_sweep_is_not_begun_within_a_transaction_or_a_script() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut client = server.client().unwrap();
        client.ok(&["MULTI"]).unwrap();
        client.call(&["REMORA.SWEEP", "@nowhere", "secret"]).unwrap();
        let answer = client.list(&["EXEC"]).unwrap();
        let answer = match &answer[..] {
            [Frame::Error(text)] => String::from_utf8_lossy(text).into_owned(),
            other => panic!("{other:?}"),
        };
        assert!(answer.contains("a script or a transaction calls it"), "{answer}");
        assert!(client.call(&["EVAL", "return redis.call('REMORA.SWEEP', 'a', 'b')", "0"]).is_err());
        assert_eq!(server.fact("remora_sweep").unwrap(), "idle");
    }
}
