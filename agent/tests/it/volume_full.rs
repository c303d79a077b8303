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

use crate::kit::{Directory, LONG, ends};
use crate::volume::Scene;
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
