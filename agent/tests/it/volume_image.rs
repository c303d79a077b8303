//! `remora volume mount --image`: a file system of the kernel on a loop device on a volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use remora_lab::require;
use rustix::mount::UnmountFlags;
use rustix::process::Signal;

use crate::kit::{Directory, ends, says};
use crate::volume::Scene;
use crate::volume_mount::mount_as;

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
