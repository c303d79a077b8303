//! Servers of a volume whose stores have no space for a write: what processes are told, what goes on, and what is there
//! when there is space again.

use std::fs;
use std::path::Path;
use std::process::Command;

use remora_lab::require;
use remora_lab::server::wait_until;
use rustix::io::Errno;

use crate::kit::{LONG, says};
use crate::volume::{Scene, qemu_io};
use crate::volume_mount::mount;

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
