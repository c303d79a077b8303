//! What the kernel is told, at the beginning and later.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::{Errno, FileSystem, MountOptions, ROOT, SessionOptions};
use remora_lab::require;

use crate::mounted::{Mounted, VALID, options};

#[test]
fn it_sees_what_has_changed_without_it_when_it_is_told() {
    let Some(()) = require::fuse() else { return };
    let files = Arc::new(MemoryFileSystem::new(VALID));
    let mounted = Mounted::with(Arc::clone(&files) as Arc<dyn FileSystem>, &options());
    let path = mounted.at().join("file");
    fs::write(&path, [1; 5000]).unwrap();
    let file = File::open(&path).unwrap();
    let content = || {
        let mut content = [0; 5000];
        file.read_exact_at(&mut content, 0).unwrap();
        (content[0], content[4999])
    };
    assert_eq!(content(), (1, 1));
    let node = files.change(b"file", 2).unwrap();
    assert_eq!(content(), (1, 1), "it is in the page cache");
    let notifier = mounted.session.notifier();
    assert_eq!(notifier.changed_attributes(node), Ok(true));
    assert_eq!(content(), (1, 1));
    assert_eq!(notifier.changed(node, 4096, 100), Ok(true));
    assert_eq!(content(), (1, 2), "a part");
    assert_eq!(notifier.changed(node, 0, 0), Ok(true));
    assert_eq!(content(), (2, 2));
    assert_eq!(notifier.changed(12_345, 0, 0), Ok(false));

    // A name that was not there is believed to be missing, until it is told.
    let late = mounted.at().join("late");
    assert!(!late.exists());
    files.add(b"late");
    assert!(!late.exists());
    assert_eq!(notifier.renamed(ROOT, b"late"), Ok(true));
    assert!(late.exists());
    assert_eq!(notifier.renamed(ROOT, b"never looked up"), Ok(false));
    drop(file);
    drop(mounted);
    assert_eq!(notifier.changed(node, 0, 0), Ok(false), "after the session");
}

#[test]
fn mount_options_are_as_asked() {
    let Some(()) = require::fuse() else { return };
    let mount =
        MountOptions { source: "vol one".into(), subtype: "remora-test".into(), read_only: true, other_users: false };
    let mounted = Mounted::with(Arc::new(MemoryFileSystem::new(VALID)), &SessionOptions { mount, ..options() });
    let refused = File::create(mounted.at().join("file")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let line = mounts.lines().find(|line| line.contains(mounted.at().to_str().unwrap())).unwrap();
    assert!(line.starts_with(r"vol\040one ") && line.contains(" fuse.remora-test ro,nosuid,nodev"), "{line}");
    assert!(line.contains("default_permissions") && !line.contains("allow_other"), "{line}");
    assert_eq!(mounted.session.most_bytes(), 1 << 20);
}
