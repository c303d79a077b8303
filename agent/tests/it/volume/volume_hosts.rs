//! A server's files in a volume, on hosts of their own in a test network: three that lend memory, some that mount.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::{Agent, Host, Kind, Net, Random, Server, require};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::kit::{Directory, LONG, Stage, ends, says};
use crate::volume::volume_mount::{Client, check};

/// What lets copies be read over this network.
const PLAIN: &[&str] = &["--security", "none", "--plaintext-network"];

/// Three hosts with a server of the volume each, and others.
struct Scene {
    stage: Stage,
    net: Net,
    lenders: Vec<Host>,
    servers: Vec<Agent>,
    file: String,
}

impl Scene {
    /// With a volume of that size, which has files.
    fn new(size: &str) -> Scene {
        let (stage, net) = (Stage::new(), Net::new().unwrap());
        let lenders = ["one", "two", "three"].map(|name| net.host(name).unwrap()).to_vec();
        let file = stage.path("redis.volume");
        let mut scene = Scene { stage, net, lenders, servers: Vec::new(), file: file.clone() };
        let mut addresses = Vec::new();
        for number in 0..3 {
            let host = scene.lenders[number].clone();
            let listen = format!("{}:0", host.address());
            let serve = ["serve", "--listen", &listen, "--memory", "4GiB", "--lanes", "0", "--no-shm"];
            let mut server = scene.start(&host, &serve);
            let line = server.wait_for_event("volume_server_ready", LONG).unwrap();
            let address = line.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
            addresses.push(address);
            scene.servers.push(server);
        }
        let first = scene.lenders[0].clone();
        let create = ["create", &file, "--size", size, "--servers", &addresses.join(",")];
        says(&ends(&mut scene.start(&first, &create), 0), &["3 copies", "at 2"]);
        says(&ends(&mut scene.start(&first, &["format", &file]), 0), &["an empty file system"]);
        scene
    }

    fn start(&self, host: &Host, args: &[&str]) -> Agent {
        let token = self.stage.token.to_str().unwrap();
        let mut command = self.stage.remora(&[&["volume"], args, &["--token-file", token], PLAIN].concat());
        host.enter(&mut command).unwrap();
        Agent::run(command).unwrap()
    }

    /// Mounts the files on a host, at a directory that it makes if it is missing.
    fn mount(&self, host: &Host, name: &str, more: &[&str]) -> (Agent, Directory) {
        self.try_mount(host, name, more).unwrap()
    }

    fn try_mount(&self, host: &Host, name: &str, more: &[&str]) -> Result<(Agent, Directory), remora_lab::Error> {
        let directory = Directory::new(self.stage.path(name));
        let args = [&["mount", &self.file, &directory.0, "--copy-timeout", "4s"], more].concat();
        let mut mounted = self.start(host, &args);
        mounted.wait_for_event("files_mounted", LONG)?;
        Ok((mounted, directory))
    }

    fn read_only(&self, host: &Host) -> (Agent, Directory) {
        self.mount(host, host.name(), &["--read-only", "--reads", "anywhere"])
    }
}

/// A server on a host, with its files at a directory. It rewrites its log when it is told to, and not by itself: that
/// would take the files away which a test is just reading.
fn server(kind: Kind, host: &Host, directory: &Directory) -> Server {
    let builder = Server::builder(kind).on(host).config("dir", &directory.0).config("appendonly", "yes");
    builder.config("appendfsync", "always").config("auto-aof-rewrite-percentage", 0).start().unwrap()
}

/// The file to which a server appends at present, below the directory of its files.
fn log_of(directory: &Directory) -> PathBuf {
    let folder = directory.at("appendonlydir");
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let number = |name: &String| name.split('.').rev().nth(2).and_then(|number| number.parse::<u64>().ok());
    let last = names.filter(|name| name.ends_with(".incr.aof") && !name.starts_with("temp")).max_by_key(number);
    Path::new("appendonlydir").join(last.unwrap())
}

/// A reader sees what the writer had in its log, within some seconds on a busy machine.
fn sees_the_log_of(reader: &Directory, writer: &Directory) {
    let log = log_of(writer);
    let wanted = fs::read(writer.at(log.to_str().unwrap())).unwrap();
    let (path, began) = (reader.at(log.to_str().unwrap()), Instant::now());
    let mut seen = 0;
    while seen < wanted.len() as u64 {
        let now = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        assert!(now >= seen, "{log:?} has become shorter: {now}, and {seen} before");
        seen = now;
        assert!(began.elapsed() < LONG, "{log:?}: {seen} of {} bytes", wanted.len());
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{} bytes of {log:?} were seen after {:?}", wanted.len(), began.elapsed());
    let mut found = vec![0; wanted.len()];
    fs::File::open(&path).unwrap().read_exact_at(&mut found, 0).unwrap();
    assert!(found == wanted, "{log:?} is not what was written");
    println!("and read after {:?}", began.elapsed());
}

/// What `cp -r` takes out of a mount is a log that a server could start with. A server removes the files of its former
/// log a moment after a rewrite: a copy that begins before that misses them, and is made anew. So is one that ends in
/// the middle of the command that the server is writing, of which a server would load all before (`aof-load-truncated`).
fn is_a_good_log(stage: &Stage, kind: Kind, reader: &Directory, name: &str) {
    let copy = stage.path(name);
    let program = kind.binary().unwrap().with_file_name(match kind {
        Kind::Redis7 => "redis-check-aof",
        Kind::Valkey9 => "valkey-check-aof",
    });
    wait_until("a copy of the log", LONG, || {
        let _ = fs::remove_dir_all(&copy);
        let from = reader.at("appendonlydir").display().to_string();
        let copied = Command::new("cp").args(["-r", &from, &copy]).output().unwrap();
        let said = String::from_utf8_lossy(&copied.stderr).into_owned();
        assert!(copied.status.success() || said.contains("No such file or directory"), "{said}");
        if !copied.status.success() {
            return Ok(Err(said));
        }
        let checked = Command::new(&program).arg(Path::new(&copy).join("appendonly.aof.manifest")).output().unwrap();
        let said = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
        if said.contains("Expected to read ") {
            return Ok(Err(said));
        }
        assert!(checked.status.success() && said.contains("All AOF files and manifest are valid"), "{said}");
        Ok(Ok(()))
    })
    .unwrap();
}

fn is_read_only(directory: &Directory) {
    let is = |result: io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    };
    is(fs::write(directory.at("new"), "x"));
    is(fs::create_dir(directory.at("new")));
    is(fs::rename(directory.at("appendonlydir"), directory.at("other")));
    is(fs::remove_dir(directory.at("appendonlydir")));
    is(std::os::unix::fs::symlink("a", directory.at("link")));
    let log = directory.at(log_of(directory).to_str().unwrap());
    is(fs::File::options().append(true).open(&log).map(drop));
    is(fs::File::open(&log)
        .and_then(|file| file.set_times(fs::FileTimes::new().set_modified(std::time::SystemTime::now()))));
}

/// Two hosts read the log of a server while it grows and is rewritten, while a host that lends memory dies, and while
/// the writer's host dies and another one takes the files over.
#[test]
#[ignore = "long: make test-all"]
fn other_hosts_read_the_log_of_a_server_as_it_grows() {
    let (Some(()), Some(()), Some(())) = (require::root(), require::fuse(), require::namespaces()) else { return };
    let Some(kind) = require::redis() else { return };
    let mut scene = Scene::new("512MiB");
    let [writer, next] = ["writer", "next"].map(|name| scene.net.host(name).unwrap());
    let (mut mounted, directory) = scene.mount(&writer, "writer", &[]);
    let mut first = server(kind, &writer, &directory);
    let client = Client::start(&first);
    client.wait_for(100);
    let readers = ["left", "right"].map(|name| scene.read_only(&scene.net.host(name).unwrap()));
    let see = |directory: &Directory| readers.iter().for_each(|(_, reader)| sees_the_log_of(reader, directory));
    readers.iter().for_each(|(_, reader)| is_read_only(reader));
    for number in 1..4 {
        client.wait_for(100 + number * 200);
        see(&directory);
    }
    is_a_good_log(&scene.stage, kind, &readers[0].1, "first");
    // A mount of the same files is not a reason for a writer to end, nor a writer for a mount.
    scene.servers[1].kill().unwrap();
    client.wait_for(1200);
    see(&directory);
    first.client().unwrap().text(&["BGREWRITEAOF"]).unwrap();
    wait_until("the log is rewritten", LONG, || {
        let is_over = first.fact("aof_rewrite_in_progress")? == "0" && first.fact("aof_last_bgrewrite_status")? == "ok";
        let is_new = !log_of(&directory).ends_with("appendonly.aof.1.incr.aof");
        Ok(if is_over && is_new { Ok(()) } else { Err("not yet".to_owned()) })
    })
    .unwrap();
    client.wait_for(1500);
    see(&directory);
    is_a_good_log(&scene.stage, kind, &readers[1].1, "second");
    // The host dies, and another one goes on.
    mounted.kill().unwrap();
    first.kill().unwrap();
    let acknowledged = client.end();
    let held = fs::File::open(readers[0].1.at(log_of(&readers[0].1).to_str().unwrap())).unwrap();
    let (mut mounted, directory) = scene.mount(&next, "next", &["--take-over"]);
    let second = server(kind, &next, &directory);
    check(&second, acknowledged);
    see(&directory);
    let client = Client::start(&second);
    client.wait_for(300);
    see(&directory);
    assert!(held.metadata().unwrap().len() > 0, "a file that is open goes on, too");
    drop(held);
    for (mut reader, _directory) in readers {
        reader.signal(Signal::TERM).unwrap();
        says(&ends(&mut reader, 0), &["unmounting"]);
    }
    drop(second);
    client.end();
    mounted.signal(Signal::TERM).unwrap();
    ends(&mut mounted, 0);
}

/// A host is cut off from everything while its server writes, and lives on. Another one takes the files over. The
/// server of the first one ends by itself, and nothing that it has acknowledged is missing. In each round a rewrite of
/// the log is under way. More rounds: `make cut-volume`.
#[test]
#[ignore = "long: make test-all"]
fn a_host_whose_cable_is_cut_is_replaced_without_losing_an_acknowledged_write() {
    let (Some(()), Some(()), Some(())) = (require::root(), require::fuse(), require::namespaces()) else { return };
    let rounds = number_of("REMORA_CABLE_ROUNDS").unwrap_or(2);
    for kind in require::kinds() {
        let scene = Scene::new("256MiB");
        let hosts = ["left", "right"].map(|name| scene.net.host(name).unwrap());
        let mut random = Random::new(remora_lab::random::seed("cables"));
        let (mut mounted, mut directory) = scene.mount(&hosts[0], "round-0", &[]);
        let mut holder = server(kind, &hosts[0], &directory);
        for round in 1..=rounds {
            let (host, next) = (&hosts[(round as usize + 1) % 2], &hosts[round as usize % 2]);
            holder.client().unwrap().ok(&["FLUSHALL"]).unwrap();
            let client = Client::start(&holder);
            client.wait_for(random.between(50, 300));
            holder.client().unwrap().text(&["BGREWRITEAOF"]).unwrap();
            client.wait_for(client.acknowledged() + random.between(0, 60));
            host.cut().unwrap();
            let began = Instant::now();
            // Its own cable was mended a moment ago: until it has found the servers' hosts again, it reaches none.
            let name = format!("round-{round}");
            let mount = || Ok(scene.try_mount(next, &name, &["--take-over"]).map_err(|error| error.to_string()));
            let (next_mount, next_directory) = wait_until("a mount on the next host", LONG, mount).unwrap();
            let is_mounted = began.elapsed();
            let next_server = server(kind, next, &next_directory);
            let is_answered = began.elapsed();
            wait_until("the server that was cut off ends", LONG, || {
                Ok(if holder.ended()?.is_some() { Ok(()) } else { Err("it runs".to_owned()) })
            })
            .unwrap();
            let is_ended = began.elapsed();
            let acknowledged = client.end();
            check(&next_server, acknowledged);
            host.heal().unwrap();
            // It has lost all servers, or was told that another writer has come.
            let code = wait_until("the mount that was cut off ends", LONG, || {
                Ok(mounted.ended()?.and_then(|status| status.code()).ok_or_else(|| "it runs".to_owned()))
            });
            let code = code.unwrap();
            assert!([10, 11].contains(&code), "round {round}: code {code}: {}", mounted.output());
            println!(
                "{kind:?}, round {round}: {acknowledged} writes; mounted after {is_mounted:?}, answered after \
                 {is_answered:?}; the former server ended after {is_ended:?}, its mount with code {code}"
            );
            (mounted, directory, holder) = (next_mount, next_directory, next_server);
        }
        holder.kill().unwrap();
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
        drop(directory);
    }
}

/// How long it takes until another host answers. With as many bytes of data as `REMORA_TAKE_OVER_BYTES` says: `make
/// cut-volume` has a gigabyte.
#[test]
fn a_host_that_dies_is_replaced_within_seconds_and_the_time_that_its_server_loads() {
    let (Some(()), Some(()), Some(())) = (require::root(), require::fuse(), require::namespaces()) else { return };
    let bytes = number_of("REMORA_TAKE_OVER_BYTES").unwrap_or(32 << 20);
    for kind in require::kinds() {
        let scene = Scene::new(&format!("{}MiB", (bytes >> 20) * 3 / 2 + 64));
        let [host, next] = ["left", "right"].map(|name| scene.net.host(name).unwrap());
        let (mut mounted, directory) = scene.mount(&host, "first", &[]);
        let mut first = server(kind, &host, &directory);
        let mut client = first.client().unwrap();
        let value = "v".repeat(VALUE_BYTES);
        for number in 0..bytes / VALUE_BYTES as u64 {
            client.ok(&["SET", &format!("key:{number}"), &value]).unwrap();
        }
        let files = fs::read_dir(directory.at("appendonlydir")).unwrap();
        let log: u64 = files.map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        mounted.kill().unwrap();
        first.kill().unwrap();
        let began = Instant::now();
        let (mut mounted, directory) = scene.mount(&next, "second", &["--take-over"]);
        let is_mounted = began.elapsed();
        let second = server(kind, &next, &directory);
        let is_answered = began.elapsed();
        assert_eq!(second.client().unwrap().int(&["DBSIZE"]).unwrap() as u64, bytes / VALUE_BYTES as u64);
        let load = second.log().lines().find_map(|line| {
            line.split("DB loaded from append only file: ").nth(1)?.split(' ').next()?.parse::<f64>().ok()
        });
        let load = Duration::from_secs_f64(load.unwrap());
        println!(
            "{kind:?}, a log of {log} bytes: mounted after {is_mounted:?}, answered after {is_answered:?}, of which the \
             load took {load:?}; {:?} beside it",
            is_answered.saturating_sub(load)
        );
        assert!(is_mounted < Duration::from_secs(10), "{is_mounted:?}: two seconds are the goal");
        drop(second);
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
    }
}

const VALUE_BYTES: usize = 256 << 10;

/// The number in a variable of the environment.
fn number_of(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}
