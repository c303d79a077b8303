//! `remora volume format` and `mount`: files, and a server whose files they are.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, require};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::Signal;

use crate::kit::{Directory, LONG, ends, says};
use crate::volume::Scene;

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
