//! `remora volume format` and `mount`: files, a server whose files they are, a machine that boots from a volume, a volume
//! that is full for a while, and processes that are killed while they wait for it.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek, statvfs};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::Signal;

use crate::kit::{Directory, LONG, ends, says};
use crate::volume::commands::{Scene, qemu_io};
use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, require};

/// Mounts the files of a volume at a directory, which it makes if it is missing.
pub(crate) fn mount(scene: &Scene, file: &str, name: &str, more: &[&str]) -> (Agent, Directory) {
    mount_as(scene, file, name, more, "files_mounted")
}

/// The same, until its log has this event.
pub(crate) fn mount_as(scene: &Scene, file: &str, name: &str, more: &[&str], event: &str) -> (Agent, Directory) {
    let directory = Directory::new(scene.stage.path(name));
    let args = [&["mount", file, &directory.0, "--copy-timeout", "4s"], more].concat();
    let mut mounted = scene.start(&args);
    mounted.wait_for_event(event, LONG).unwrap();
    (mounted, directory)
}

#[test]
fn files_are_made_written_unmounted_and_found_again_by_commands() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("files.volume");
    let directory = scene.stage.path("mnt");
    fs::create_dir(&directory).unwrap();
    says(&scene.end(&["mount", &file, &directory], 10), &[&file, "no file system yet", "remora volume format"]);
    says(&scene.end(&["format", &file, "--take-over"], 0), &[&file, "an empty file system"]);
    says(&scene.end(&["format", &file, "--take-over"], 10), &[&file, "not empty", "--force"]);

    let (mut mounted, directory) = mount(&scene, &file, "mnt", &["--take-over"]);
    let at = |name: &str| directory.at(name);
    fs::create_dir(at("folder")).unwrap();
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at * 7 / 3) as u8).collect();
    fs::write(at("folder/large"), &bytes).unwrap();
    fs::write(at("small"), "a few bytes").unwrap();
    fs::rename(at("small"), at("folder/renamed")).unwrap();
    fs::hard_link(at("folder/renamed"), at("link")).unwrap();
    std::os::unix::fs::symlink("folder/large", at("symlink")).unwrap();
    let changed = fs::File::options().write(true).open(at("folder/large")).unwrap();
    changed.write_all_at(b"in the middle", 1_234_567).unwrap();
    changed.sync_all().unwrap();
    drop(changed);
    mounted.signal(Signal::TERM).unwrap();
    says(&ends(&mut mounted, 0), &["unmounting"]);
    assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0, "an ordinary directory again");

    // By /dev/fuse and without the page cache for writes. Another process unmounts it.
    let (mut mounted, directory) = mount(&scene, &file, "mnt", &["--take-over", "--no-ring", "--write-through"]);
    let at = |name: &str| directory.at(name);
    let mut expected = bytes;
    expected[1_234_567..1_234_567 + 13].copy_from_slice(b"in the middle");
    assert!(fs::read(at("symlink")).unwrap() == expected);
    assert_eq!(fs::read_to_string(at("link")).unwrap(), "a few bytes");
    assert_eq!(fs::metadata(at("folder/renamed")).unwrap().len(), 11);
    let mut names: Vec<_> = fs::read_dir(&directory.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["folder", "link", "symlink"]);
    directory.unmount();
    says(&ends(&mut mounted, 0), &["unmounted"]);
}

/// What a process has written is data for `SEEK_DATA`, also as long as only the page cache has it.
#[test]
fn what_was_written_is_not_taken_for_a_hole() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("holes.volume");
    scene.end(&["format", &file, "--take-over"], 0);
    let hole = 1 << 20;
    for (number, ways) in
        [&[][..], &["--no-ring"], &["--write-through"], &["--write-through", "--no-ring"]].iter().enumerate()
    {
        let (mut mounted, directory) =
            mount(&scene, &file, &format!("mnt-{number}"), &[&["--take-over"][..], ways].concat());
        let file = fs::File::create(directory.at("sparse")).unwrap();
        file.set_len(3 * hole).unwrap();
        file.write_all_at(b"written", hole).unwrap();
        let finds = |to| seek(&file, to).unwrap();
        let is_found = (finds(SeekFrom::Data(0)), finds(SeekFrom::Hole(hole)), finds(SeekFrom::Data(hole)));
        // Clusters of 64 KiB have data or not.
        let wanted = match ways.contains(&"--write-through") {
            true => (hole, hole + (64 << 10), hole),
            false => (0, 3 * hole, hole),
        };
        assert_eq!(is_found, wanted, "{ways:?}");
        assert_eq!(seek(&file, SeekFrom::Data(3 * hole)), Err(Errno::NXIO));
        drop(file);
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
    }
}

/// Sets one key after the other, and notes those that the server has acknowledged.
pub(crate) struct Client {
    acknowledged: Arc<AtomicU64>,
    error: Arc<Mutex<Option<String>>>,
    thread: JoinHandle<()>,
}

impl Client {
    pub(crate) fn start(server: &Server) -> Client {
        let mut client = server.client().unwrap();
        let (acknowledged, error) = (Arc::<AtomicU64>::default(), Arc::<Mutex<Option<String>>>::default());
        let (count, why) = (Arc::clone(&acknowledged), Arc::clone(&error));
        let thread = std::thread::spawn(move || {
            for number in 1..u64::MAX {
                let (key, value) =
                    (format!("key:{number}"), format!("value:{number}:{}", "x".repeat(number as usize % 300)));
                match client.ok(&["SET", &key, &value]) {
                    Ok(()) => count.store(number, Ordering::SeqCst),
                    Err(error) => {
                        *why.lock().unwrap() = Some(error.to_string());
                        return;
                    }
                }
            }
        });
        Client { acknowledged, error, thread }
    }

    pub(crate) fn wait_for(&self, number: u64) {
        wait_until("acknowledged writes", LONG, || {
            let acknowledged = self.acknowledged.load(Ordering::SeqCst);
            assert_eq!(*self.error.lock().unwrap(), None, "after {acknowledged} writes");
            Ok(if acknowledged >= number { Ok(()) } else { Err(format!("{acknowledged}")) })
        })
        .unwrap();
    }

    /// How many writes were acknowledged so far.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// The server has ended. Returns how many writes it had acknowledged.
    pub(crate) fn end(self) -> u64 {
        self.thread.join().unwrap();
        self.acknowledged.load(Ordering::SeqCst)
    }
}

fn server(kind: Kind, directory: &str) -> Server {
    let builder = Server::builder(kind).config("dir", directory).config("appendonly", "yes");
    builder.config("appendfsync", "always").start().unwrap()
}

/// Every write that was acknowledged is there: from the first to the last one.
pub(crate) fn check(server: &Server, acknowledged: u64) {
    let mut client = server.client().unwrap();
    for number in 1..=acknowledged {
        let value = client.bytes(&["GET".to_owned(), format!("key:{number}")]).unwrap();
        let expected = format!("value:{number}:{}", "x".repeat(number as usize % 300));
        assert!(value.as_deref() == Some(expected.as_bytes()), "key:{number} of {acknowledged}: {value:?}");
    }
}

#[test]
fn a_server_whose_host_dies_goes_on_elsewhere_with_every_acknowledged_write() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let mut scene = Scene::new(None, &[]);
        let file = scene.create("redis.volume");
        says(&scene.end(&["format", &file], 0), &["an empty file system"]);
        let (mut mounted, directory) = mount(&scene, &file, "one", &["--take-over"]);
        let mut first = server(kind, &directory.0);
        let client = Client::start(&first);
        client.wait_for(200);
        // A server of the volume dies as well, and the log is rewritten meanwhile.
        scene.servers[0].kill().unwrap();
        first.client().unwrap().text(&["BGREWRITEAOF"]).unwrap();
        client.wait_for(600);
        // The host dies.
        mounted.kill().unwrap();
        first.kill().unwrap();
        let acknowledged = client.end();
        assert!(acknowledged >= 600);
        // What is left of its mount hangs no process.
        let left = fs::write(directory.at("new"), "").unwrap_err();
        let is_dead = [Errno::CONNABORTED, Errno::NOTCONN, Errno::CANCELED].map(|errno| Some(errno.raw_os_error()));
        assert!(is_dead.contains(&left.raw_os_error()), "{left}");

        // Another host has the files as soon as it asks for them. At the same directory, which it takes over.
        let (mut mounted, directory) = mount(&scene, &file, "one", &["--take-over"]);
        let mut second = server(kind, &directory.0);
        check(&second, acknowledged);

        // This time the host lives on. Its server can write no more, and ends by itself; nothing that it has said is
        // missing elsewhere.
        second.client().unwrap().ok(&["FLUSHALL"]).unwrap();
        let client = Client::start(&second);
        client.wait_for(300);
        let (mut third_mount, directory) = mount(&scene, &file, "two", &["--take-over"]);
        says(&ends(&mut mounted, 11), &["another writer has opened the volume"]);
        let acknowledged = client.end();
        wait_until("the fenced server ends", LONG, || {
            Ok(if second.ended()?.is_some() { Ok(()) } else { Err("it runs".to_owned()) })
        })
        .unwrap();
        let third = server(kind, &directory.0);
        check(&third, acknowledged);
        drop(third);
        third_mount.signal(Signal::TERM).unwrap();
        ends(&mut third_mount, 0);
    }
}

// `remora volume mount --image`: a file system of the kernel on a loop device on a volume.

/// Runs a program, which must end with one of these codes. Returns what it says.
#[track_caller]
fn run(program: &str, args: &[&str], codes: &[i32]) -> String {
    let ran = Command::new(program).args(args).output().unwrap();
    let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).trim().to_owned();
    assert!(
        ran.status.code().is_some_and(|code| codes.contains(&code)),
        "{program} {args:?}: {:?}: {said}",
        ran.status
    );
    said
}

/// A loop device on a file, until it is dropped.
struct Loop(String);

impl Loop {
    fn new(file: &Path) -> Loop {
        let file = file.to_str().unwrap();
        Loop(run("losetup", &["--find", "--show", "--direct-io=on", file], &[0]))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status(); // a test that fails leaves none behind
    }
}

/// What is mounted of a loop device, until it is dropped.
struct Tree(PathBuf);

impl Tree {
    fn new(device: &Loop, at: &str) -> Tree {
        let _ = fs::create_dir(at); // it may be there
        run("mount", &["-t", "ext4", &device.0, at], &[0]);
        Tree(at.into())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH); // its device may be gone
    }
}

/// ext4, written while its host is replaced. The next host replays its journal, and finds it in order, with everything
/// that was flushed.
#[test]
#[ignore = "long: make test-all"]
fn a_file_system_of_the_kernel_outlives_its_host() {
    let (Some(()), Some(()), Some(())) = (require::root(), require::fuse(), require::loop_devices()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("image.volume");
    let image = |name: &str, more: &[&str]| {
        let (mounted, directory) = mount_as(&scene, &file, name, &[&["--image"], more].concat(), "image_mounted");
        let image = directory.at("image");
        (mounted, directory, image)
    };
    let (mut first, _directory, at): (_, Directory, _) = image("one", &[]);
    assert_eq!(fs::metadata(&at).unwrap().len(), 16 << 20);
    let loop_device = Loop::new(&at);
    run("mkfs.ext4", &["-q", &loop_device.0], &[0]);
    let tree = Tree::new(&loop_device, &scene.stage.path("ext4-one"));
    let content = |number: u64| (0..number * 5000).map(|at| (at * 7 / 3 + number) as u8).collect::<Vec<_>>();
    let put = |tree: &Tree, number: u64| {
        let path = tree.0.join(format!("file-{number}"));
        fs::write(&path, content(number)).unwrap();
        fs::File::open(path).unwrap().sync_all().unwrap();
    };
    (1..20).for_each(|number| put(&tree, number));
    fs::remove_file(tree.0.join("file-7")).unwrap();
    run("fstrim", &[tree.0.to_str().unwrap()], &[0]);
    (20..30).for_each(|number| put(&tree, number));
    // Something that is not flushed when the next host comes.
    fs::write(tree.0.join("unflushed"), content(3)).unwrap();

    let (mut second, directory, at) = image("two", &["--take-over"]);
    says(&ends(&mut first, 11), &["another writer has opened the volume"]);
    drop(tree);
    drop(loop_device);
    let loop_device = Loop::new(&at);
    // It replays the journal.
    drop(Tree::new(&loop_device, &scene.stage.path("ext4-two")));
    run("e2fsck", &["-f", "-n", &loop_device.0], &[0]);
    let tree = Tree::new(&loop_device, &scene.stage.path("ext4-two"));
    for number in (1..30).filter(|number| *number != 7) {
        assert!(fs::read(tree.0.join(format!("file-{number}"))).unwrap() == content(number), "file-{number}");
    }
    assert!(!tree.0.join("file-7").exists());
    put(&tree, 7);
    run("umount", &[tree.0.to_str().unwrap()], &[0]);
    drop((tree, loop_device));
    second.signal(Signal::TERM).unwrap();
    ends(&mut second, 0);
    drop(directory);
    // It is not a volume with files, and says so.
    let directory = scene.stage.path("three");
    fs::create_dir(&directory).unwrap();
    says(&scene.end(&["mount", &file, &directory], 10), &[&file, "something other than files"]);
}

#[test]
fn a_volume_with_files_is_not_mounted_as_an_image() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("files.volume");
    says(&scene.end(&["format", &file], 0), &["an empty file system"]);
    let directory = scene.stage.path("mnt");
    fs::create_dir(&directory).unwrap();
    says(&scene.end(&["mount", &file, &directory, "--image", "--take-over"], 10), &[&file, "has files", "--image"]);
}

// `remora volume`: a machine whose only disk is a volume.

/// A machine that is emulated boots in ten seconds on an idle host.
const BOOT: Duration = Duration::from_secs(180);

/// The last round that the guest has said to be on its disk.
fn kept(guest: &Agent) -> u32 {
    let said = guest.stdout();
    let rounds =
        said.lines().filter_map(|line| line.split("guest: round ").nth(1)?.strip_suffix(" is kept")?.parse().ok());
    rounds.max().unwrap_or(0)
}

/// Waits for three more rounds, and returns the last one.
#[track_caller]
fn goes_on(guest: &Agent) -> u32 {
    let before = kept(guest);
    wait_until("three more rounds of the guest", BOOT, || {
        Ok(if kept(guest) >= before + 3 { Ok(()) } else { Err(guest.output()) })
    })
    .unwrap();
    kept(guest)
}

/// The first line of a guest after its boot.
#[track_caller]
fn boots(guest: &mut Agent) -> String {
    guest.wait_for_line("guest: booted", BOOT).unwrap().trim().to_owned()
}

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn a_machine_boots_from_a_volume_lives_through_deaths_of_servers_and_boots_elsewhere() {
    let Some(()) = require::nbd_clients() else { return };
    let Some(machine) = require::rdma_vm() else { return };
    let mut scene = Scene::new(None, &[]);
    let (file, servers) = (scene.stage.path("system.volume"), scene.addresses.join(","));
    says(&scene.end(&["create", &file, "--size", "32MiB", "--servers", &servers], 0), &["3 copies"]);
    let (disk, socket) = (scene.stage.path("disk"), scene.socket("here"));
    let url = |socket: &str| format!("nbd+unix:///?socket={socket}");
    machine.make_disk(Path::new(&disk)).unwrap();
    let mut nbd = scene.nbd(&file, &socket);
    let copied = Command::new("nbdcopy").args(["--flush", &disk, &url(&socket)]).output().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));

    let mut guest = Agent::run(machine.boot(&url(&socket))).unwrap();
    assert_eq!(boots(&mut guest), "guest: booted, 0 rounds are there, the last is 0, broken: none");
    goes_on(&guest);
    scene.servers[0].kill().unwrap();
    goes_on(&guest);
    let address = scene.addresses[0].clone();
    (scene.servers[0], _) = scene.serve(&address);
    wait_until("three whole copies", LONG, || {
        let status = scene.end(&["status", &file, "--json"], 0);
        Ok(if status.matches("\"state\":\"whole\"").count() == 3 { Ok(()) } else { Err(status) })
    })
    .unwrap();
    scene.servers[1].kill().unwrap();
    let last = goes_on(&guest);

    // The host loses its power, with the machine and the door to the volume.
    guest.kill().unwrap();
    nbd.kill().unwrap();
    let last = last.max(kept(&guest));
    let elsewhere = scene.socket("elsewhere");
    let _nbd = scene.nbd_with(&file, &elsewhere, &["--take-over"]);
    let mut guest = Agent::run(machine.boot(&url(&elsewhere))).unwrap();
    let line = boots(&mut guest);
    let found = line.split("the last is ").nth(1).and_then(|rest| rest.split(',').next()?.parse::<u32>().ok());
    assert!(found.is_some_and(|found| found >= last), "round {last} was synced: {line}");
    let broken = line.split("broken:").nth(1).unwrap().split_whitespace().filter_map(|word| word.parse::<u32>().ok());
    let synced: Vec<u32> = broken.filter(|round| *round <= last).collect();
    assert!(synced.is_empty(), "rounds {synced:?} were synced: {line}");
    goes_on(&guest);
}

// A mounted volume that is full for a while: what processes are told, and what is there afterwards.

/// The ways to mount files for writing.
const WAYS: [&[&str]; 4] = [&[], &["--no-ring"], &["--ahead", "0"], &["--write-through"]];

/// Takes all space of the volume but for this much.
fn fill(directory: &Directory, but: u64) {
    let free = statvfs(&*directory.0).unwrap();
    let ballast = fs::File::create(directory.at("ballast")).unwrap();
    let bytes = (free.f_bavail * free.f_frsize).checked_sub(but).unwrap();
    fallocate(&ballast, FallocateFlags::empty(), 0, bytes).unwrap();
}

fn errno(error: &std::io::Error) -> Option<i32> {
    error.raw_os_error()
}

fn no_space() -> Option<i32> {
    Some(Errno::NOSPC.raw_os_error())
}

fn shell(directory: &Directory, script: &str) -> Output {
    Command::new("sh").args(["-c", script]).current_dir(&directory.0).output().unwrap()
}

/// Removes what [`fill`] has made, and waits for its space: by io_uring the kernel says a little later that it has
/// forgotten the file.
fn free(directory: &Directory) {
    fs::remove_file(directory.at("ballast")).unwrap();
    wait_until("the space of a removed file", LONG, || {
        let free = statvfs(&*directory.0).unwrap().f_bavail;
        Ok(if free > 100 { Ok(()) } else { Err(format!("{free} blocks are free")) })
    })
    .unwrap();
}

fn formatted(scene: &Scene, name: &str) -> String {
    let file = scene.create(name);
    scene.end(&["format", &file], 0);
    file
}

/// As a local disk does: the call that writes fails, and what was answered is there, from the first to the last record,
/// by the page cache, without it, and on the next host.
#[test]
fn a_write_that_a_full_volume_cannot_keep_fails_and_no_hole_is_left_behind() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = formatted(&scene, "full.volume");
    for (number, ways) in WAYS.iter().enumerate() {
        let name = format!("mnt-{number}");
        let more = [&["--take-over"][..], ways].concat();
        let (mut mounted, directory) = mount(&scene, &file, &name, &more);
        let record = |number: u64| format!("{number:08}").repeat(5000);
        let mut log = fs::File::options().append(true).create(true).open(directory.at("log")).unwrap();
        let mut written = Vec::new();
        let mut append = |log: &mut fs::File, number: u64| match log.write(record(number).as_bytes()) {
            Ok(length) => written.extend_from_slice(&record(number).as_bytes()[..length]),
            Err(error) => assert_eq!(errno(&error), no_space()),
        };
        (0..5).for_each(|number| append(&mut log, number));
        fill(&directory, 300_000);
        (5..40).for_each(|number| append(&mut log, number));
        log.sync_all().unwrap();
        // Nothing that is told of no error has lost anything.
        for script in ["echo hello > small", "echo hello >> log2", "cp /proc/self/maps copied && sync copied"] {
            let ran = shell(&directory, script);
            assert!(!ran.status.success(), "{ways:?}: {script}: {ran:?}");
        }
        assert_eq!(errno(&fs::write(directory.at("new"), [1; 9000]).unwrap_err()), no_space());
        free(&directory);
        (40..60).for_each(|number| append(&mut log, number));
        log.sync_all().unwrap();
        drop(log);
        assert!(written.len() > 25 * 40_000, "there was space again");
        let is_all = |at: &Path| fs::read(at).unwrap() == written;
        assert!(is_all(&directory.at("log")), "{ways:?}: by the page cache");
        fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        assert!(is_all(&directory.at("log")), "{ways:?}: without it");
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
        let (mut mounted, directory) = mount(&scene, &file, &name, &more);
        assert!(is_all(&directory.at("log")), "{ways:?}: on the next host");
        fs::remove_file(directory.at("log")).unwrap();
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
    }
}

/// Maps a file, writes a page of it, and prints what each call says: an errno, or 0.
const MAPS: &str = r#"
import mmap, os, sys
said = []
def tell(call, *args):
    try: call(*args); said.append(0)
    except OSError as error: said.append(error.errno)
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, 1 << 20)
memory[600000:600005] = b'bytes'
tell(memory.flush)
tell(os.fsync, fd)
tell(os.fsync, fd)
tell(os.pwrite, fd, b'x', 0)
other = os.open(sys.argv[1], os.O_RDONLY)
import time
for _ in range(1200):
    if os.pread(other, 5, 600000) == b'\0' * 5: break
    time.sleep(.1)
said.append(os.pread(other, 5, 600000).count(0))
os.ftruncate(fd, 1 << 20)
tell(os.fsync, fd)
os.unlink(sys.argv[2])
for _ in range(1200):
    if os.statvfs(sys.argv[1]).f_bavail > 100: break
    time.sleep(.1)
tell(os.pwrite, fd, b'x', 0)
os.ftruncate(fd, 0)
tell(os.fsync, fd)
tell(os.pwrite, fd, b'again', 0)
tell(os.fsync, fd)
print(*said)
"#;

/// What was written to mapped memory is refused when the kernel writes it back.
#[test]
#[ignore = "long: make test-all"]
fn mapped_bytes_that_the_volume_refuses_fail_everything_until_they_are_cut_off() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = formatted(&scene, "mapped.volume");
    for (number, ways) in [&[][..], &["--write-through"]].iter().enumerate() {
        let more = [&["--take-over"][..], ways].concat();
        let (mut mounted, directory) = mount(&scene, &file, &format!("mnt-{number}"), &more);
        let sparse = directory.at("sparse");
        fs::File::create(&sparse).unwrap().set_len(1 << 20).unwrap();
        fill(&directory, 0);
        let mut command = Command::new("python3");
        let ran = command.args(["-c", MAPS]).args([&sparse, &directory.at("ballast")]).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout).into_owned();
        let full = Errno::NOSPC.raw_os_error();
        // The kernel says `EIO` or `ENOSPC` of pages that it could not write back.
        let told: Vec<i32> = said.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let [flushed, synced, again, written, zeros, cut, space, cut_off, more, safe] = told[..] else {
            panic!("{said}, {}", String::from_utf8_lossy(&ran.stderr))
        };
        assert!(flushed != 0 && synced != 0, "{said}");
        assert_eq!([again, written], [full, full], "{said}");
        assert_eq!(zeros, 5, "the page cache shows what the volume has: {said}");
        assert_eq!([cut, space], [full, full], "cut behind what was lost, and space again: {said}");
        assert_eq!([cut_off, more, safe], [0, 0, 0], "{said}");
        assert_eq!(fs::read(&sparse).unwrap(), b"again");
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
    }
}

/// A server with `appendfsync everysec` on a volume that is full for a while: it says so to its clients, and its log
/// can be loaded with everything that it has said when it says that all is well again.
#[test]
#[ignore = "long: make test-all"]
fn the_log_of_a_server_whose_volume_was_full_can_be_loaded_with_all_it_has_said() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let scene = Scene::new(None, &[]);
        let file = formatted(&scene, "redis.volume");
        let (mut mounted, directory) = mount(&scene, &file, "mnt", &["--take-over"]);
        let start = |directory: &Directory| {
            let builder = Server::builder(kind).config("dir", &directory.0).config("appendonly", "yes");
            builder.config("appendfsync", "everysec").config("auto-aof-rewrite-percentage", "0").start().unwrap()
        };
        let mut server = start(&directory);
        let mut client = server.client().unwrap();
        let value = "v".repeat(20_000);
        let mut set = |number: u64| client.ok(&["SET", &format!("key:{number}"), &value]).map_err(|e| e.to_string());
        set(0).unwrap();
        fill(&directory, 500_000);
        let (mut acknowledged, mut refused) = (1, String::new());
        while refused.is_empty() && acknowledged < 500 {
            match set(acknowledged) {
                Ok(()) => acknowledged += 1,
                Err(error) => refused = error,
            }
        }
        assert!(refused.contains("MISCONF") && refused.contains("space"), "{kind:?}: {refused}");
        free(&directory);
        wait_until("the server takes writes again", LONG, || Ok(set(acknowledged))).unwrap();
        acknowledged += 1;
        (0..20).for_each(|more| set(acknowledged + more).unwrap());
        acknowledged += 20;
        server.kill().unwrap();
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
        let (mut mounted, directory) = mount(&scene, &file, "mnt", &["--take-over"]);
        let mut server = start(&directory);
        let mut client = server.client().unwrap();
        // A command that was refused in between may have been carried out.
        let found = client.int(&["DBSIZE"]).unwrap() as u64;
        assert!((acknowledged..=acknowledged + 1).contains(&found), "{kind:?}: {found} of {acknowledged}");
        for number in 0..acknowledged {
            let length = client.int(&["STRLEN", &format!("key:{number}")]).unwrap();
            assert_eq!(length, 20_000, "{kind:?}: key:{number} of {acknowledged}");
        }
        server.kill().unwrap();
        mounted.signal(Signal::TERM).unwrap();
        ends(&mut mounted, 0);
    }
}

/// Zeros over more than there is room for: refused before anything has changed.
#[test]
#[ignore = "long: make test-all"]
fn fallocate_that_does_not_fit_changes_nothing() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = formatted(&scene, "zeros.volume");
    let (mut mounted, directory) = mount(&scene, &file, "mnt", &["--take-over"]);
    let content: Vec<u8> = (0..1_000_000_u32).map(|at| (at / 1000) as u8 | 1).collect();
    fs::write(directory.at("f"), &content).unwrap();
    let opened = fs::File::options().read(true).write(true).open(directory.at("f")).unwrap();
    opened.sync_all().unwrap();
    let free = || statvfs(&*directory.0).unwrap().f_bavail;
    let before = free();
    let zero = FallocateFlags::ZERO_RANGE;
    for flags in [zero, zero | FallocateFlags::KEEP_SIZE, FallocateFlags::KEEP_SIZE, FallocateFlags::empty()] {
        assert_eq!(fallocate(&opened, flags, 0, 1 << 30), Err(Errno::NOSPC), "{flags:?}");
        assert_eq!(free(), before, "{flags:?}");
        fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
        let mut found = vec![0; content.len()];
        opened.read_exact_at(&mut found, 0).unwrap();
        assert!(found == content, "{flags:?}");
    }
    drop(opened);
    mounted.signal(Signal::TERM).unwrap();
    ends(&mut mounted, 0);
}

// Servers of a volume whose stores have no space for a write: what processes are told, what goes on, and what is there
// when there is space again.

/// A small file system for the store of one server, until dropped.
struct Device(String);

impl Device {
    fn new(path: String) -> Device {
        fs::create_dir_all(&path).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=40m,mode=0700", "none", &path]);
        assert!(mount.status().unwrap().success());
        Device(path)
    }

    fn ballast(&self) -> String {
        format!("{}/ballast", self.0)
    }

    /// Takes all space that is left.
    fn fill(&self) {
        let mut dd = Command::new("dd");
        let ballast = format!("of={}", self.ballast());
        dd.args(["if=/dev/zero", &ballast, "bs=4k", "oflag=append", "conv=notrunc"]);
        assert!(!dd.output().unwrap().status.success(), "it is full");
    }

    fn free(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Three servers with a store each on a device of its own.
fn scene() -> (Vec<Device>, Scene) {
    let mut scene = Scene::new(None, &[]);
    (scene.servers, scene.addresses) = (Vec::new(), Vec::new());
    let mut devices = Vec::new();
    for number in 0..3 {
        let device = Device::new(scene.stage.path(&format!("device-{number}")));
        let (server, address) = scene.serve_kept("127.0.0.1:0", &format!("{}/store", device.0));
        scene.servers.push(server);
        scene.addresses.push(address);
        devices.push(device);
    }
    (devices, scene)
}

fn is_no_space<T>(result: std::io::Result<T>) -> bool {
    result.is_err_and(|error| error.raw_os_error() == Some(Errno::NOSPC.raw_os_error()))
}

/// Waits until this holds.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_until(what, LONG, || Ok(if holds() { Ok(()) } else { Err(String::new()) })).unwrap();
}

/// Writes a file that is safe then.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let file = fs::File::create(path)?;
    std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0)?;
    file.sync_all()
}

fn all_are_whole(scene: &Scene, file: &str) {
    until("all copies are whole", || {
        scene.end(&["status", file], 0).lines().filter(|line| line.starts_with("whole")).count() == 3
    });
}

#[test]
#[ignore = "long: make test-all"]
fn without_space_at_the_servers_a_mount_lives_refuses_changes_and_goes_on_reading() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let (devices, scene) = scene();
    let file = scene.create("space.volume");
    scene.end(&["format", &file], 0);
    let (mut mounted, directory) = mount(&scene, &file, "mnt", &["--take-over"]);
    let kept = vec![7; 200_000];
    write(&directory.at("kept"), &kept).unwrap();
    // One full device is a copy that is behind, and two or three are no space. Each time all is well afterwards.
    for full in [1, 2, 3] {
        devices[..full].iter().for_each(Device::fill);
        // The same file each time: it is the devices that are to be full, and not the volume.
        let refused = || {
            // A checkpoint frees space: it is taken, too.
            devices[..full].iter().for_each(Device::fill);
            is_no_space(write(&directory.at("late"), &vec![3; 300_000]))
        };
        match full {
            1 => assert!((0..3).all(|_| !refused()), "two copies have space"),
            _ => (0..2).for_each(|_| until("a change is refused", refused)),
        }
        assert_eq!(fs::read(directory.at("kept")).unwrap(), kept);
        fs::read_dir(&*directory.0).unwrap().for_each(|entry| drop(entry.unwrap()));
        if full > 1 {
            says(&mounted.output(), &["for lack of space", &scene.addresses[1], "device-1/store"]);
        }
        devices[..full].iter().for_each(Device::free);
        let after = directory.at("after");
        until("changes are accepted", || write(&after, &kept).is_ok());
        all_are_whole(&scene, &file);
        assert_eq!((fs::read(&after).unwrap(), fs::read(directory.at("kept")).unwrap()), (kept.clone(), kept.clone()));
    }
    assert!(mounted.ended().unwrap().is_none());
}

#[test]
#[ignore = "long: make test-all"]
fn without_space_at_the_servers_nbd_clients_are_told_so_and_read_on() {
    let (Some(()), Some(())) = (require::root(), require::nbd_clients()) else { return };
    let (devices, scene) = scene();
    let file = scene.create("space.volume");
    let socket = scene.socket("space");
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 1 0 1M", "flush"]).unwrap();
    devices.iter().for_each(Device::fill);
    let refused = || {
        // A checkpoint frees space: it is taken, too.
        devices.iter().for_each(Device::fill);
        qemu_io(&socket, &["write -P 2 8M 1M", "flush"]).is_err_and(|said| said.contains("No space left"))
    };
    until("a write is refused", refused);
    qemu_io(&socket, &["read -P 1 0 1M"]).unwrap();
    devices.iter().for_each(Device::free);
    let written = || qemu_io(&socket, &["write -P 3 8M 64k", "flush", "read -P 3 8M 64k"]).is_ok();
    until("writes are accepted", written);
    all_are_whole(&scene, &file);
    assert!(nbd.ended().unwrap().is_none());
}

// Processes that are killed while a mounted volume waits for its servers: they end, what they held is free, and what
// they had asked for is carried out.

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
#[ignore = "long: make test-all"]
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
