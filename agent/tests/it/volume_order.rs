//! Nothing is ended before all is ready, and an ended mount stays dead: commands that replace a writer, with each
//! mistake that can be seen before; and mounts whose volume or process ends under a program that is started again.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, require};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::kit::{Directory, LONG, ends, says, without_checksum};
use crate::volume::{Scene, qemu_io};
use crate::volume_mount::mount;

fn is_dead(error: &std::io::Error) -> bool {
    [Errno::NOTCONN, Errno::CONNABORTED, Errno::CANCELED]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// The healthy writer of files goes on, whichever mistake another host makes.
#[test]
fn a_mistake_that_can_be_seen_before_does_not_end_the_healthy_writer() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    scene.end(&["format", &file], 0);
    let (mut mounted, directory) = mount(&scene, &file, "one", &["--take-over"]);
    let mut written = 0;
    let mut lives = |what: &str| {
        written += 1;
        fs::write(directory.at("f"), format!("{written}")).unwrap_or_else(|error| panic!("after {what}: {error}"));
        fs::File::open(directory.at("f")).unwrap().sync_all().unwrap_or_else(|error| panic!("after {what}: {error}"));
    };
    let two = scene.stage.path("two");
    fs::create_dir(&two).unwrap();
    let nothing = scene.stage.path("typo");
    let long = scene.stage.path(&format!("{}/s", "x".repeat(150)));
    let other = scene.stage.path("other.volume");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&other, without_checksum(&text.replace("16777216", "8388608"))).unwrap();
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("a directory that is missing", &["mount", &file, &nothing], &[&nothing, "existing directory"]),
        ("a file for a directory", &["mount", &file, &file], &[&file, "existing directory"]),
        (
            "a directory where its files are mounted",
            &["mount", &file, &directory.0],
            &[&directory.0, "unmount it first"],
        ),
        ("an image over files", &["mount", &file, &two, "--image"], &["has files", "goes on"]),
        ("a metrics port in use", &["mount", &file, &two, "--metrics", &taken], &[&taken]),
        ("a port in use", &["nbd", &file, "--listen", &taken], &[&taken]),
        ("a socket that cannot be made", &["nbd", &file, "--socket", "/proc/nosuch/s"], &["/proc/nosuch"]),
        ("a path that is too long", &["nbd", &file, "--socket", &long], &["xxx"]),
        ("a device over files", &["nbd", &file, "--listen", "127.0.0.1:0"], &["has files", "goes on"]),
        ("a format over files", &["format", &file], &["not empty", "goes on"]),
        ("a size for which no server has memory", &["grow", &file, "--size", "100GiB"], &["no memory"]),
        ("a smaller size", &["grow", &file, "--size", "8MiB"], &["does not become smaller"]),
        ("the file of another size", &["mount", &other, &two], &["another size"]),
    ];
    for (what, args, expected) in cases {
        let mut failed = scene.start(&[*args, &["--take-over"]].concat());
        let status = failed.wait(LONG).unwrap();
        assert!(status.code().is_some_and(|code| code != 0 && code != 11), "{what}: {status}");
        says(&failed.output(), expected);
        lives(what);
    }
    // A second mount would hide the first one, also one for reading.
    says(&scene.end(&["mount", &file, &directory.0, "--read-only"], 8), &[&directory.0, "unmount it first"]);
    lives("another mount for reading");
    // Not root. It can read what it needs.
    for (path, mode) in [(scene.stage.folder(), 0o755), (Path::new(&file), 0o644)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let token = scene.stage.path("token-of-another-user");
    fs::copy(&scene.stage.token, &token).unwrap();
    std::os::unix::fs::chown(&token, Some(65534), Some(65534)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
    command.args(["volume", "mount", &file, "/tmp", "--take-over", "--token-file", &token]);
    command.uid(65534).gid(65534);
    let mut failed = Agent::run(command).unwrap();
    let status = failed.wait(LONG).unwrap();
    assert!(status.code().is_some_and(|code| code != 0 && code != 11), "{status}:\n{}", failed.output());
    says(&failed.output(), &["run as root"]);
    lives("a user who is not root");
    mounted.signal(Signal::TERM).unwrap();
    ends(&mut mounted, 0);
}

/// The healthy writer is a block device here.
#[test]
fn files_that_are_not_there_do_not_end_the_writer_of_a_device() {
    let (Some(()), Some(()), Some(())) = (require::root(), require::fuse(), require::nbd_clients()) else { return };
    let scene = Scene::new(None, &[]);
    let (file, socket) = (scene.create("data.volume"), scene.socket("device"));
    let mut nbd = scene.nbd(&file, &socket);
    qemu_io(&socket, &["write -P 7 0 1M", "flush"]).unwrap();
    let directory = Directory::new(scene.stage.path("mnt"));
    for args in [&["mount", &file, &directory.0][..], &["format", &file]] {
        says(&scene.end(&[args, &["--take-over"][..]].concat(), 10), &[&file, "goes on"]);
        qemu_io(&socket, &["read -P 7 0 1M", "write -P 7 0 4k", "flush"]).unwrap();
    }
    nbd.signal(Signal::TERM).unwrap();
    ends(&mut nbd, 0);
}

fn server(kind: Kind, directory: &Directory) -> Result<Server, remora_lab::Error> {
    let builder = Server::builder(kind).config("dir", &directory.0).config("appendonly", "yes");
    builder.config("appendfsync", "always").start()
}

/// The mount ends under a server, and the server is started again in its directory: it must not begin empty on the disk
/// below.
#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_started_again_does_not_write_below_a_mount_that_has_ended() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    for kind in require::kinds() {
        let mut scene = Scene::new(None, &[]);
        let file = scene.create("redis.volume");
        scene.end(&["format", &file], 0);
        let is_refused = |directory: &Directory, what: &str| {
            assert!(server(kind, directory).is_err(), "{what}: the server has started");
            let error = fs::write(directory.at("new"), "x").unwrap_err();
            assert!(is_dead(&error), "{what}: {error}");
        };
        let below = |directory: &Directory, what: &str| {
            directory.unmount();
            assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0, "{what}: nothing is below");
        };
        // Another host takes the volume.
        let (mut first, one) = mount(&scene, &file, "one", &["--take-over"]);
        let mut on_one = server(kind, &one).unwrap();
        on_one.client().unwrap().ok(&["SET", "key", "value"]).unwrap();
        let (mut second, two) = mount(&scene, &file, "two", &["--take-over"]);
        says(&ends(&mut first, 11), &["another writer has opened the volume", &one.0, "stays mounted"]);
        on_one.kill().unwrap();
        is_refused(&one, "a take-over");
        // It is stopped while its files are used.
        let mut on_two = server(kind, &two).unwrap();
        second.signal(Signal::TERM).unwrap();
        second.wait(LONG).unwrap();
        says(&second.output(), &[&two.0, "stays mounted"]);
        on_two.kill().unwrap();
        is_refused(&two, "a stop");
        below(&two, "a stop");
        // The command, started again, takes the place of what it has left.
        let (mut third, one) = mount(&scene, &file, "one", &["--take-over"]);
        let mut again = server(kind, &one).unwrap();
        assert_eq!(again.client().unwrap().text(&["GET", "key"]).unwrap(), "value");
        again.kill().unwrap();
        // No server of the volume is left.
        scene.servers.iter_mut().for_each(|server| server.kill().unwrap());
        wait_until("the mount notices", LONG, || {
            let _ = fs::write(one.at("new"), "x");
            Ok(if third.ended().unwrap().is_some() { Ok(()) } else { Err("it runs".to_owned()) })
        })
        .unwrap();
        says(&third.output(), &["stays mounted"]);
        is_refused(&one, "the loss of all servers");
        below(&one, "the loss of all servers");
    }
}

/// As before, for those who want it so; and a stop while nothing uses the files leaves an ordinary directory.
#[test]
fn a_mount_is_taken_away_if_nothing_uses_it_or_if_that_is_wanted() {
    let (Some(()), Some(())) = (require::root(), require::fuse()) else { return };
    let scene = Scene::new(None, &[]);
    let file = scene.create("data.volume");
    scene.end(&["format", &file], 0);
    let (mut first, one) = mount(&scene, &file, "one", &["--take-over", "--unmount-at-end"]);
    let used = fs::File::create(one.at("f")).unwrap();
    let (mut second, two) = mount(&scene, &file, "two", &["--take-over"]);
    ends(&mut first, 11);
    drop(used);
    assert_eq!(fs::read_dir(&one.0).unwrap().count(), 0);
    second.signal(Signal::TERM).unwrap();
    ends(&mut second, 0);
    assert_eq!(fs::read_dir(&two.0).unwrap().count(), 0);
}
