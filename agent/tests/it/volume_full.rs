//! A mounted volume that is full for a while: what processes are told, and what is there afterwards.

use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use remora_lab::server::wait_until;
use remora_lab::{Server, require};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::kit::{Directory, LONG, ends, says};
use crate::volume::{Scene, qemu_io};
use crate::volume_mount::mount;

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
