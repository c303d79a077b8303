//! A server's files in a volume, on hosts of their own in a test network: three that lend memory, some that mount.
//!
//! Extended attributes, ACLs, files without a name, whiteouts and devices in a mounted volume, by system calls and by
//! programs.

use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, io};

use remora_lab::server::wait_until;
use remora_lab::{Agent, Host, Kind, Net, Random, Server, require};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;

use crate::kit::{Directory, LONG, Stage, ends, says};
use crate::volume::commands::Scene as OneHost;
use crate::volume::volume_mount::{Client, check, mount, mount_as};

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
/// the middle of the command that the server is writing, of which a server would load all before
/// (`aof-load-truncated`).
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

/// A volume whose files are mounted.
struct Mounted {
    directory: Directory,
    mounted: Agent,
    file: String,
    scene: OneHost,
}

impl Mounted {
    fn new(more: &[&str]) -> Mounted {
        let scene = OneHost::new(None, &[]);
        let file = scene.create("attributes.volume");
        scene.end(&["format", &file, "--take-over"], 0);
        let (mounted, directory) = mount(&scene, &file, "mnt", &[&["--take-over"][..], more].concat());
        Mounted { directory, mounted, file, scene }
    }

    fn at(&self, name: &str) -> String {
        self.directory.at(name).to_str().unwrap().to_owned()
    }

    /// The host dies, and another one has the files.
    fn again(&mut self) {
        self.mounted.kill().unwrap();
        let (mounted, same) = mount(&self.scene, &self.file, "mnt", &["--take-over"]);
        self.mounted = mounted;
        std::mem::forget(same); // it is unmounted once
    }

    fn end(mut self) {
        self.mounted.signal(Signal::TERM).unwrap();
        ends(&mut self.mounted, 0);
    }
}

fn get(path: &str, name: &str) -> Result<Vec<u8>, Errno> {
    let mut value = vec![0; 64 << 10];
    let length = rustix::fs::lgetxattr(path, name, value.as_mut_slice())?;
    value.truncate(length);
    Ok(value)
}

fn set(path: &str, name: &str, value: &[u8]) -> Result<(), Errno> {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
}

/// The names, in their order.
fn list(path: &str) -> Vec<String> {
    let mut list = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(path, list.as_mut_slice()).unwrap();
    let names = list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut names: Vec<_> = names.map(|name| String::from_utf8(name.to_vec()).unwrap()).collect();
    names.sort();
    names
}

/// Runs a program, which must succeed. Returns what it has said.
fn run(program: &str, args: &[&str]) -> String {
    let ran = Command::new(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{program} {args:?}: {said} {}", String::from_utf8_lossy(&ran.stderr));
    said
}

/// Asks without room how long a value is, and the list.
const LENGTHS: &str = r"
import ctypes, os, sys
libc, path = ctypes.CDLL(None), os.fsencode(sys.argv[1])
print(libc.getxattr(path, b'user.a', None, 0), libc.listxattr(path, None, 0))
";

#[test]
fn extended_attributes_are_set_listed_removed_and_outlive_their_host() {
    let (Some(()), Some(_allowed)) = (require::root(), require::fuse_ring()) else { return };
    // By io_uring, and by the device.
    for ways in [&[][..], &["--no-ring"]] {
        let mut mounted = Mounted::new(ways);
        let file = mounted.at("file");
        fs::write(&file, "content").unwrap();
        assert_eq!((get(&file, "user.a"), list(&file)), (Err(Errno::NODATA), vec![]));
        let with = |name: &str, flags| rustix::fs::setxattr(&file, name, b"first", flags);
        assert_eq!(with("user.a", XattrFlags::REPLACE), Err(Errno::NODATA));
        assert_eq!(with("user.a", XattrFlags::CREATE), Ok(()));
        assert_eq!(with("user.a", XattrFlags::CREATE), Err(Errno::EXIST));
        assert_eq!(with("user.a", XattrFlags::REPLACE), Ok(()));
        let changed = fs::metadata(&file).unwrap();
        set(&file, "user.a", b"second\0 value").unwrap();
        let now = fs::metadata(&file).unwrap();
        assert!((now.ctime(), now.ctime_nsec()) > (changed.ctime(), changed.ctime_nsec()));
        assert_eq!((now.mtime(), now.mtime_nsec()), (changed.mtime(), changed.mtime_nsec()));
        for (name, value) in [("trusted.t", &b"t"[..]), ("security.s", b""), ("user.long", &[7; 7000])] {
            set(&file, name, value).unwrap();
            assert_eq!(get(&file, name).as_deref(), Ok(value));
        }
        // How long they are, and too little room.
        let all = "security.s\0trusted.t\0user.a\0user.long\0".len();
        assert_eq!(run("python3", &["-c", LENGTHS, &file]).trim(), format!("13 {all}"));
        assert_eq!(rustix::fs::getxattr(&file, "user.a", &mut [0; 12][..]), Err(Errno::RANGE));
        assert_eq!(rustix::fs::listxattr(&file, &mut vec![0; all - 1][..]), Err(Errno::RANGE));
        let names = ["security.s", "trusted.t", "user.a", "user.long"];
        assert_eq!(list(&file), names);
        // Limits: the kernel's, and the bound of an inode, as a file system of blocks says it.
        assert_eq!(set(&file, "user.more", &[1; 7000]), Err(Errno::NOSPC));
        assert_eq!(set(&file, "user.more", &vec![1; (64 << 10) + 1]), Err(Errno::TOOBIG));
        assert_eq!(set(&file, &format!("user.{}", "x".repeat(251)), b""), Err(Errno::RANGE));
        assert_eq!(set(&file, &format!("user.{}", "x".repeat(250)), b""), Ok(()));
        assert_eq!(set(&file, "user.", b""), Err(Errno::INVAL));
        assert_eq!(set(&file, "system.other", b""), Err(Errno::OPNOTSUPP));
        assert_eq!(rustix::fs::removexattr(&file, format!("user.{}", "x".repeat(250))), Ok(()));
        assert_eq!(rustix::fs::removexattr(&file, "user.more"), Err(Errno::NODATA));
        // Of links themselves, and of directories.
        std::os::unix::fs::symlink("file", mounted.at("link")).unwrap();
        assert_eq!(set(&mounted.at("link"), "user.a", b""), Err(Errno::PERM), "the kernel's rule");
        set(&mounted.at("link"), "trusted.l", b"link").unwrap();
        fs::create_dir(mounted.at("folder")).unwrap();
        set(&mounted.at("folder"), "user.f", b"folder").unwrap();
        // A name more, another name, another content.
        fs::hard_link(&file, mounted.at("other")).unwrap();
        fs::rename(&file, mounted.at("renamed")).unwrap();
        fs::write(mounted.at("other"), "new").unwrap();
        assert_eq!(list(&mounted.at("renamed")), names);

        mounted.again();
        assert_eq!(list(&mounted.at("other")), names);
        assert_eq!(get(&mounted.at("renamed"), "user.a").as_deref(), Ok(&b"second\0 value"[..]));
        assert_eq!(get(&mounted.at("link"), "trusted.l").as_deref(), Ok(&b"link"[..]));
        assert_eq!(get(&mounted.at("folder"), "user.f").as_deref(), Ok(&b"folder"[..]));
        // A host that only reads sees them, and what is changed.
        let more = ["--read-only", "--reads", "anywhere", "--security", "none", "--plaintext-network"];
        let (mut reader, copy) = mount_as(&mounted.scene, &mounted.file, "copy", &more, "files_mounted");
        let copied = format!("{}/renamed", copy.0);
        assert_eq!(list(&copied), names);
        assert_eq!(set(&copied, "user.a", b"x"), Err(Errno::ROFS));
        set(&mounted.at("other"), "user.a", b"third").unwrap();
        wait_until("the change", LONG, || {
            let found = get(&copied, "user.a");
            Ok(if found.as_deref() == Ok(&b"third"[..]) { Ok(()) } else { Err(format!("{found:?}")) })
        })
        .unwrap();
        reader.signal(Signal::TERM).unwrap();
        ends(&mut reader, 0);
        mounted.end();
    }
}

/// The names' room is bounded, and attributes are in it.
#[test]
fn attributes_that_fill_the_names_room_are_refused_and_nothing_else_is_lost() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut mounted = Mounted::new(&[]);
    let path = |mounted: &Mounted, number: usize| mounted.at(&format!("file-{number}"));
    let mut count = 0;
    let refused = loop {
        let made = fs::write(path(&mounted, count), "").map_err(|error| Errno::from_io_error(&error).unwrap());
        match made.and_then(|()| set(&path(&mounted, count), "user.a", &[7; 7000])) {
            Ok(()) => count += 1,
            Err(errno) => break errno,
        }
    };
    assert_eq!(refused, Errno::NOSPC);
    assert!((10..100).contains(&count), "{count} attributes of 7,000 bytes");
    mounted.again();
    for number in 0..count {
        assert_eq!(get(&path(&mounted, number), "user.a").as_deref(), Ok(&[7; 7000][..]), "{number}");
    }
    rustix::fs::removexattr(path(&mounted, 0), "user.a").unwrap();
    set(&path(&mounted, 1), "user.a", b"shorter").unwrap();
    set(&path(&mounted, 0), "user.b", &[8; 7000]).unwrap();
    mounted.end();
}

/// An ACL as the kernel has it: tag, permissions, ID.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    value
}

const NOBODY: u32 = u32::MAX;

const ACCESS: &str = "system.posix_acl_access";

const DEFAULT: &str = "system.posix_acl_default";

/// Opens a file of a directory as another user. Returns the error's number, or 0.
fn open_as(user: u32, directory: &str, name: &str, how: &str) -> i32 {
    const SCRIPT: &str = r#"
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
user = int(sys.argv[2])
os.setgroups([]); os.setgid(user); os.setuid(user)
try: os.open(sys.argv[3], getattr(os, sys.argv[4]), dir_fd=folder); print(0)
except OSError as error: print(error.errno)
"#;

    let said = run("python3", &["-c", SCRIPT, directory, &user.to_string(), name, how]);

    said.trim().parse().unwrap()
}

#[test]
fn access_control_lists_permit_and_forbid_as_they_say() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut mounted = Mounted::new(&[]);
    let (directory, file) = (mounted.directory.0.clone(), mounted.at("file"));
    fs::write(&file, "content").unwrap();
    let mode = |path: &str| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let chmod = |path: &str, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    chmod(&file, 0o600);
    let denied = Errno::ACCESS.raw_os_error();
    let (reads, writes) = ("O_RDONLY", "O_WRONLY");
    assert_eq!(open_as(1001, &directory, "file", reads), denied);
    let of_one =
        acl(&[(1, 6, NOBODY), (2, 6, 1001), (2, 0, 1002), (4, 0, NOBODY), (0x10, 6, NOBODY), (0x20, 4, NOBODY)]);
    set(&file, ACCESS, &of_one).unwrap();
    assert_eq!((mode(&file), get(&file, ACCESS)), (0o664, Ok(of_one)));
    assert_eq!(open_as(1001, &directory, "file", writes), 0);
    assert_eq!(open_as(1002, &directory, "file", reads), denied, "although all others may");
    assert_eq!((open_as(1003, &directory, "file", reads), open_as(1003, &directory, "file", writes)), (0, denied));
    // chmod changes the mask.
    chmod(&file, 0o644);
    let masked =
        acl(&[(1, 6, NOBODY), (2, 6, 1001), (2, 0, 1002), (4, 0, NOBODY), (0x10, 4, NOBODY), (0x20, 4, NOBODY)]);
    assert_eq!(get(&file, ACCESS).as_ref(), Ok(&masked));
    assert_eq!((open_as(1001, &directory, "file", reads), open_as(1001, &directory, "file", writes)), (0, denied));
    assert_eq!(list(&file), [ACCESS]);
    mounted.again();
    assert_eq!((get(&file, ACCESS), mode(&file)), (Ok(masked), 0o644));
    assert_eq!((open_as(1001, &directory, "file", reads), open_as(1002, &directory, "file", reads)), (0, denied));
    rustix::fs::removexattr(&file, ACCESS).unwrap();
    assert_eq!(open_as(1002, &directory, "file", reads), 0);
    // What is made in a directory with a default list has it, whatever the umask is.
    let folder = mounted.at("folder");
    fs::create_dir(&folder).unwrap();
    assert_eq!(set(&file, DEFAULT, &acl(&[(1, 7, NOBODY), (4, 5, NOBODY), (0x20, 0, NOBODY)])), Err(Errno::ACCESS));
    let default = acl(&[(1, 7, NOBODY), (2, 7, 1001), (4, 5, NOBODY), (0x10, 7, NOBODY), (0x20, 0, NOBODY)]);
    set(&folder, DEFAULT, &default).unwrap();
    const SCRIPT: &str = r#"
import os, sys
os.umask(0o77)
os.chdir(sys.argv[1])
os.close(os.open('made', os.O_CREAT | os.O_WRONLY, 0o666))
os.mkdir('inside', 0o777)
os.mkfifo('pipe', 0o666)
fd = os.open('.', os.O_TMPFILE | os.O_WRONLY, 0o666)
os.link(f'/proc/self/fd/{fd}', 'linked', dst_dir_fd=os.open('.', os.O_RDONLY), follow_symlinks=True)
"#;

    run("python3", &["-c", SCRIPT, &folder]);

    let of_file = acl(&[(1, 6, NOBODY), (2, 7, 1001), (4, 5, NOBODY), (0x10, 6, NOBODY), (0x20, 0, NOBODY)]);

    for name in ["made", "pipe", "linked"] {
        let path = format!("{folder}/{name}");
        assert_eq!((mode(&path), get(&path, ACCESS)), (0o660, Ok(of_file.clone())), "{name}");
        assert_eq!(get(&path, DEFAULT), Err(Errno::NODATA));
    }
    let inside = format!("{folder}/inside");
    assert_eq!((mode(&inside), get(&inside, DEFAULT)), (0o770, Ok(default)));
    chmod(&folder, 0o755);
    assert_eq!((open_as(1001, &folder, "made", writes), open_as(1002, &folder, "made", reads)), (0, denied));
    // Without one, the umask counts.
    const PLAIN: &str = "import os, sys\nos.umask(0o27)\nos.close(os.open(sys.argv[1], os.O_CREAT, 0o666))";
    run("python3", &["-c", PLAIN, &mounted.at("plain")]);
    assert_eq!(mode(&mounted.at("plain")), 0o640);
    mounted.end();
}

/// A write by one who is not trusted takes what the file was trusted with. The mount is `nosuid`, but a copy of the
/// file is not.
#[test]
fn writes_take_capabilities_and_set_id_bits() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mounted = Mounted::new(&[]);
    let file = mounted.at("program");
    fs::write(&file, "program").unwrap();
    let mode = || fs::metadata(&file).unwrap().permissions().mode() & 0o7777;
    let trust = || fs::set_permissions(&file, fs::Permissions::from_mode(0o6777)).unwrap();
    let capability: Vec<u8> = [0x0200_0001_u32, 1 << 10, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    trust();
    set(&file, "security.capability", &capability).unwrap();
    assert_eq!(get(&file, "security.capability").as_ref(), Ok(&capability));
    // Root may leave the bits, and not the capabilities.
    fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(3).unwrap();
    assert_eq!((mode(), get(&file, "security.capability")), (0o6777, Err(Errno::NODATA)));
    const SCRIPT: &str = r#"
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
os.setgroups([]); os.setgid(1001); os.setuid(1001)
fd = os.open('program', os.O_WRONLY | (os.O_TRUNC if sys.argv[2] == 'cut' else 0), dir_fd=folder)
if sys.argv[2] == 'write': os.write(fd, b'other')
if sys.argv[2] == 'size': os.ftruncate(fd, 1)
print(oct(os.fstat(fd).st_mode))
"#;

    for way in ["write", "size", "cut"] {
        trust();
        set(&file, "security.capability", &capability).unwrap();
        assert_eq!(run("python3", &["-c", SCRIPT, &mounted.directory.0, way]).trim(), "0o100777", "{way}");
        assert_eq!((mode(), get(&file, "security.capability")), (0o777, Err(Errno::NODATA)), "{way}");
    }
    trust();
    set(&file, "security.capability", &capability).unwrap();
    std::os::unix::fs::chown(&file, Some(7), Some(7)).unwrap();
    assert_eq!((mode(), get(&file, "security.capability")), (0o777, Err(Errno::NODATA)), "chown");
    mounted.end();
}

#[test]
fn files_without_a_name_get_one_or_are_gone() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut mounted = Mounted::new(&[]);
    let directory = mounted.directory.0.clone();
    let open = |flags| {
        let flags = OFlags::TMPFILE | OFlags::RDWR | flags;
        rustix::fs::open(&directory, flags, Mode::from_raw_mode(0o640)).unwrap()
    };
    let link = |file: &std::os::fd::OwnedFd, name: &str| {
        rustix::fs::linkat(file.as_fd(), "", CWD, format!("{directory}/{name}"), AtFlags::EMPTY_PATH)
    };
    let (named, unnamed, exclusive) = (open(OFlags::empty()), open(OFlags::empty()), open(OFlags::EXCL));
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    for file in [&named, &unnamed, &exclusive] {
        rustix::io::write(file, b"content").unwrap();
        assert_eq!(rustix::fs::fstat(file).unwrap().st_nlink, 0);
    }
    assert_eq!(link(&exclusive, "exclusive"), Err(Errno::NOENT));
    link(&named, "named").unwrap();
    assert_eq!(link(&unnamed, "named"), Err(Errno::EXIST));
    link(&named, "twice").unwrap();
    assert_eq!(rustix::fs::fstat(&named).unwrap().st_nlink, 2);
    drop((named, unnamed, exclusive));
    mounted.again();
    let mut names: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["named", "twice"]);
    assert_eq!(fs::read(mounted.at("twice")).unwrap(), b"content");
    mounted.end();
}

fn is_whiteout(path: &str) -> bool {
    let found = fs::symlink_metadata(path).unwrap();
    found.file_type().is_char_device() && found.rdev() == 0
}

#[test]
fn devices_and_whiteouts_have_names() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut mounted = Mounted::new(&[]);
    let make = |path: &str, kind, device| rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(0o600), device);
    make(&mounted.at("whiteout"), FileType::CharacterDevice, 0).unwrap();
    let device = rustix::fs::makedev(259, 70_000);
    make(&mounted.at("disk"), FileType::BlockDevice, device).unwrap();
    fs::write(mounted.at("moved"), "moved").unwrap();
    fs::write(mounted.at("replaced"), "replaced").unwrap();
    let rename = |mounted: &Mounted, from: &str, to: &str, flags| {
        rustix::fs::renameat_with(CWD, mounted.at(from), CWD, mounted.at(to), flags)
    };
    let (noreplace, exchange) = (RenameFlags::NOREPLACE, RenameFlags::EXCHANGE);
    assert_eq!(rename(&mounted, "moved", "replaced", RenameFlags::WHITEOUT | noreplace), Err(Errno::EXIST));
    assert_eq!(rename(&mounted, "moved", "replaced", RenameFlags::WHITEOUT | exchange), Err(Errno::INVAL));
    rename(&mounted, "moved", "replaced", RenameFlags::WHITEOUT).unwrap();
    for is_again in [false, true] {
        if is_again {
            mounted.again();
        }
        assert!(is_whiteout(&mounted.at("whiteout")) && is_whiteout(&mounted.at("moved")), "{is_again}");
        let disk = fs::metadata(mounted.at("disk")).unwrap();
        assert!(disk.file_type().is_block_device() && disk.rdev() == device);
        assert_eq!(fs::read(mounted.at("replaced")).unwrap(), b"moved");
    }
    // The mount is `nodev`.
    let opened = fs::File::open(mounted.at("disk")).unwrap_err();
    assert_eq!(opened.raw_os_error(), Some(Errno::ACCESS.raw_os_error()));
    fs::remove_file(mounted.at("moved")).unwrap();
    mounted.end();
}

/// What `cp --archive` copies is all there: attributes, lists, links, pipes, devices, times.
#[test]
fn copies_by_cp_have_everything() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mounted = Mounted::new(&[]);
    let from = mounted.at("from");
    fs::create_dir(&from).unwrap();
    let at = |name: &str| format!("{from}/{name}");
    fs::write(at("file"), "content").unwrap();
    set(&at("file"), "user.a", b"value").unwrap();
    set(&at("file"), "trusted.b", b"").unwrap();
    let of_one = acl(&[(1, 6, NOBODY), (2, 6, 1001), (4, 4, NOBODY), (0x10, 6, NOBODY), (0x20, 0, NOBODY)]);
    set(&at("file"), ACCESS, &of_one).unwrap();
    set(&from, DEFAULT, &of_one).unwrap();
    fs::hard_link(at("file"), at("link")).unwrap();
    std::os::unix::fs::symlink("file", at("symlink")).unwrap();
    run("mkfifo", &[&at("pipe")]);
    run("mknod", &[&at("whiteout"), "c", "0", "0"]);
    run("touch", &["--date", "2001-02-03 04:05:06.7", &at("file")]);
    run("cp", &["--archive", &from, &mounted.at("to")]);
    let to = |name: &str| format!("{}/{name}", mounted.at("to"));
    assert_eq!(list(&to("file")), [ACCESS, "trusted.b", "user.a"]);
    assert_eq!((get(&to("file"), ACCESS), get(&mounted.at("to"), DEFAULT)), (Ok(of_one.clone()), Ok(of_one)));
    assert!(is_whiteout(&to("whiteout")));
    let metadata = |path: String| fs::symlink_metadata(path).unwrap();
    assert!(metadata(to("pipe")).file_type().is_fifo() && metadata(to("symlink")).file_type().is_symlink());
    assert_eq!(metadata(to("file")).nlink(), 2);
    assert_eq!(metadata(to("file")).mtime_nsec(), 700_000_000);
    mounted.end();
}

/// A mount of an overlay, which is taken away at the end.
struct Overlay(String);

impl Overlay {
    fn new(lower: &str, upper: &str, work: &str, at: &str) -> Overlay {
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        let options = std::ffi::CString::new(options).unwrap();
        rustix::mount::mount("overlay", at, "overlay", MountFlags::empty(), &*options).unwrap();
        Overlay(at.to_owned())
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&*self.0, UnmountFlags::DETACH); // the test may have failed before
    }
}

#[test]
fn an_overlay_has_its_upper_layer_in_the_mount() {
    let (Some(()), Some(()), Some(())) = (require::root(), require::fuse(), require::overlay()) else { return };
    let mut mounted = Mounted::new(&[]);
    let (lower, merged) = (mounted.scene.stage.path("lower"), mounted.scene.stage.path("merged"));
    for directory in [&lower, &merged, &mounted.at("upper"), &mounted.at("work")] {
        fs::create_dir(directory).unwrap();
    }
    for name in ["kept", "removed", "changed", "moved", "folder/inside"] {
        let path = Path::new(&lower).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    let start = |mounted: &Mounted| Overlay::new(&lower, &mounted.at("upper"), &mounted.at("work"), &merged);
    let at = |name: &str| format!("{merged}/{name}");
    let overlay = start(&mounted);
    fs::remove_file(at("removed")).unwrap();
    fs::write(at("changed"), "by the upper layer").unwrap();
    fs::rename(at("moved"), at("elsewhere")).unwrap();
    fs::remove_dir_all(at("folder")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("folder/new"), "new").unwrap();
    set(&at("kept"), "user.a", b"value").unwrap();
    drop(overlay);
    for name in ["removed", "moved"] {
        assert!(is_whiteout(&mounted.at(&format!("upper/{name}"))), "{name}");
    }
    assert_eq!(get(&mounted.at("upper/folder"), "trusted.overlay.opaque").as_deref(), Ok(&b"y"[..]));
    mounted.again();
    let overlay = start(&mounted);
    let mut names: Vec<_> = fs::read_dir(&merged).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["changed", "elsewhere", "folder", "kept"]);
    assert_eq!(fs::read_to_string(at("changed")).unwrap(), "by the upper layer");
    assert_eq!(fs::read_to_string(at("elsewhere")).unwrap(), "moved");
    assert_eq!(fs::read_dir(at("folder")).unwrap().count(), 1);
    assert_eq!(get(&at("kept"), "user.a").as_deref(), Ok(&b"value"[..]));
    assert_eq!(fs::read_to_string(at("kept")).unwrap(), "kept");
    drop(overlay);
    mounted.end();
}
