//! Processes that are killed while a mounted volume waits for its servers: they end, what they held is free, and what
//! they had asked for is carried out.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use remora_lab::server::wait_until;
use remora_lab::{Agent, require};
use rustix::fs::statvfs;
use rustix::process::Signal;

use crate::kit::{Directory, LONG, ends};
use crate::volume::Scene;
use crate::volume_mount::{mount, mount_as};

/// Prepares, says so, and makes one call when it is told to.
const CALLS: &str = r"
import mmap, os, sys
at, call = sys.argv[1:3]
fd = os.open(at + '/f', os.O_RDWR)
sync = os.open(at + '/f', os.O_WRONLY | os.O_SYNC)
direct = os.open(at + '/f', os.O_RDONLY | os.O_DIRECT)
print('ready', flush=True)
sys.stdin.readline()
if call == 'fsync': os.pwrite(fd, b'y' * 5000, 0); os.fsync(fd)
if call == 'close': os.pwrite(fd, b'y' * 5000, 0); os.close(fd)
if call == 'write': os.pwrite(sync, b'y' * 5000, 0)
if call == 'cut': os.ftruncate(fd, 10)
if call == 'open': os.open(at + '/f', os.O_WRONLY | os.O_TRUNC)
if call == 'allocate': os.posix_fallocate(fd, 0, 300000)
if call == 'create': os.open(at + '/new', os.O_CREAT | os.O_EXCL | os.O_WRONLY)
if call == 'mkdir': os.mkdir(at + '/new')
if call == 'link': os.link(at + '/f', at + '/new')
if call == 'symlink': os.symlink('f', at + '/new')
if call == 'rename': os.rename(at + '/f', at + '/new')
if call == 'unlink': os.unlink(at + '/f')
if call == 'chmod': os.chmod(at + '/f', 0o600)
";

/// The calls that wait at the same time. By io_uring a processor has eight requests under way, and all processes may be
/// on one: what `close` asks for is not taken back by the kernel while it waits for one of these to end.
const TOGETHER: [&[&str]; 2] = [
    &["fsync", "close", "write", "cut", "open", "allocate"],
    &["create", "mkdir", "link", "symlink", "rename", "unlink", "chmod"],
];

/// A process that has prepared a call.
fn prepared(at: &str, call: &str) -> Child {
    let mut command = Command::new("python3");
    let process = command.args(["-c", CALLS, at, call]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut process = process.unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n", "{call}");
    process
}

fn go(process: &mut Child) {
    process.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
}

/// Waits until the kernel has asked for a process, and it waits for the answer.
fn until_it_waits(process: &Child, what: &str) {
    let stack = format!("/proc/{}/stack", process.id());
    wait_until(what, LONG, || {
        let stack = fs::read_to_string(&stack).unwrap_or_default();
        Ok(if stack.contains("request_wait_answer") { Ok(()) } else { Err(stack) })
    })
    .unwrap();
}

fn until_it_ends(process: &mut Child, what: &str) {
    wait_until(what, LONG, || Ok(process.try_wait().unwrap().map(drop).ok_or("it is there".to_owned()))).unwrap();
}

/// The state of each thread of a process, as /proc has it.
fn threads(process: u32) -> Vec<char> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("stat")).ok());
    stats.filter_map(|stat| stat.rsplit_once(") ")?.1.chars().next()).collect()
}

/// Servers that do nothing until it is dropped.
struct Stopped<'a>(&'a mut [Agent]);

impl Stopped<'_> {
    fn new(servers: &mut [Agent]) -> Stopped<'_> {
        for server in servers.iter_mut() {
            server.signal(Signal::STOP).unwrap();
            // It stops at its next moment on a processor, and may answer until then.
            wait_until("a server to stand still", LONG, || {
                let running = threads(server.pid()).into_iter().find(|state| *state != 'T');
                Ok(running.map_or(Ok(()), |state| Err(format!("a thread is {state}"))))
            })
            .unwrap();
        }
        Stopped(servers)
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(|server| server.signal(Signal::CONT).unwrap());
    }
}

/// Inodes that there are.
fn inodes(directory: &Directory) -> u64 {
    let found = statvfs(&*directory.0).unwrap();
    found.f_files - found.f_ffree
}

#[test]
fn a_process_that_is_killed_while_the_volume_waits_for_servers_ends_and_its_directory_is_free() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for ways in [&[][..], &["--no-ring"]] {
        let mut scene = Scene::new(None, &[]);
        let file = scene.create("killed.volume");
        scene.end(&["format", &file], 0);
        let (mut mounted, directory) = mount(&scene, &file, "mnt", &[&["--take-over"][..], ways].concat());
        let before = inodes(&directory);
        for calls in TOGETHER {
            let mut waiting = Vec::new();
            for call in calls {
                let at = format!("{}/{call}", directory.0);
                fs::create_dir(&at).unwrap();
                fs::write(format!("{at}/f"), [7; 200_000]).unwrap();
                waiting.push((*call, prepared(&at, call)));
            }
            rustix::fs::sync();
            let stopped = Stopped::new(&mut scene.servers[1..]);
            waiting.iter_mut().for_each(|(_, process)| go(process));
            waiting.iter().for_each(|(call, process)| until_it_waits(process, call));
            for (call, process) in &mut waiting {
                process.kill().unwrap();
                until_it_ends(process, &format!("{call} by {ways:?}"));
                // Nothing waits behind what it held. Its change is on its way.
                let mut names: Vec<_> = fs::read_dir(format!("{}/{call}", directory.0)).unwrap().collect();
                let names = names.drain(..).map(|entry| entry.unwrap().file_name().into_string().unwrap());
                let mut names: Vec<_> = names.collect();
                names.sort();
                let expected: &[&str] = match *call {
                    "create" | "mkdir" | "link" | "symlink" => &["f", "new"],
                    "rename" => &["new"],
                    "unlink" => &[],
                    _ => &["f"],
                };
                assert_eq!(names, expected, "{call}");
            }
            drop(stopped);
        }
        let check = |directory: &Directory| {
            let at = |name: &str| directory.at(name);
            // The kernel is told of what it did not hear of.
            for (file, size) in [("cut/f", 10), ("open/f", 0), ("allocate/f", 300_000)] {
                wait_until("the size is known", LONG, || {
                    let found = fs::metadata(at(file)).unwrap().len();
                    Ok(if found == size { Ok(()) } else { Err(format!("{file} has {found} bytes")) })
                })
                .unwrap();
            }
            assert_eq!(std::os::unix::fs::MetadataExt::nlink(&fs::metadata(at("link/f")).unwrap()), 2);
            for call in ["fsync", "close", "write"] {
                let data = fs::read(at(&format!("{call}/f"))).unwrap();
                assert!(data.len() == 200_000 && data[..5000].iter().all(|byte| *byte == b'y'), "{call}");
            }
        };
        check(&directory);
        // A new file, which was made for a process that is gone, can be used and is not held.
        fs::write(directory.at("create/new"), "x").unwrap();
        for call in TOGETHER.concat() {
            fs::remove_dir_all(directory.at(call)).unwrap();
        }
        wait_until("no inode is held", LONG, || {
            let now = inodes(&directory);
            Ok(if now == before { Ok(()) } else { Err(format!("{now} inodes, and {before} before")) })
        })
        .unwrap();
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
    }
}

/// The image has no names, and its reads and writes pass the page cache.
#[test]
#[ignore = "long: make test-all"]
fn a_process_that_is_killed_while_an_image_waits_for_servers_ends() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let mut scene = Scene::new(None, &[]);
    let file = scene.create("image.volume");
    let (mut mounted, directory) = mount_as(&scene, &file, "mnt", &["--image", "--take-over"], "image_mounted");
    let image = directory.at("image");
    let stopped = Stopped::new(&mut scene.servers[1..]);
    for call in ["conv=notrunc", "conv=notrunc,fsync"] {
        let mut command = Command::new("dd");
        command.args(["if=/dev/zero", "bs=4k", "count=1", call, "status=none"]).arg(format!("of={}", image.display()));
        let mut process = command.spawn().unwrap();
        until_it_waits(&process, call);
        process.kill().unwrap();
        until_it_ends(&mut process, call);
    }
    drop(stopped);
    let refused = fs::remove_file(&image).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::PERM.raw_os_error()));
    mounted.signal(Signal::TERM).unwrap();
    ends(&mut mounted, 0);
}
