//! What the kernel is told, at the beginning and later. The ring's own: payloads in the caller's memory, and what is done
//! without it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::{Arc, Mutex};

use remora_fuse::answer::{Answer, Created, Data, Entry, KnownAttributes, Written};
use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::request::{Create, GetAttributes, Lookup, Read, Write};
use remora_fuse::{Errno, FileSystem, MountOptions, ROOT, Session, SessionOptions, Transport};
use remora_lab::{require, scratch};
use remora_memory::{Memory, Pages};
use rustix::fs::OFlags;

use crate::options;
use crate::pattern;
use crate::{Mounted, VALID};

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

// The ring's own.

/// A file system that finds what is written in the memory that it has given, and lets reads land there.
struct InPlace {
    files: MemoryFileSystem,
    memory: Arc<Memory>,
    content: Mutex<Vec<u8>>,
}

impl FileSystem for InPlace {
    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        self.files.lookup(asked, answer);
    }

    fn get_attributes(&self, asked: GetAttributes, answer: Answer<'_, KnownAttributes>) {
        self.files.get_attributes(asked, answer);
    }

    fn create(&self, asked: Create<'_>, answer: Answer<'_, Created>) {
        self.files.create(asked, answer);
    }

    fn write(&self, asked: Write<'_>, answer: Answer<'_, Written>) {
        let place = asked.data.place().unwrap();
        assert_eq!(place.end - place.start, asked.data.length() as u64);
        let later = answer.later();
        let mut piece = vec![0; asked.data.length()];
        self.memory.read(place.start, &mut piece).unwrap();
        assert!(*asked.data.bytes() == *piece);
        let mut content = self.content.lock().unwrap();
        content.truncate(asked.offset as usize);
        content.extend_from_slice(&piece);
        later.give(Written(asked.data.length() as u32));
    }

    fn read(&self, asked: Read, answer: Answer<'_, Data>) {
        let later = answer.later();
        let content = self.content.lock().unwrap();
        let from = (asked.offset as usize).min(content.len());
        let piece = &content[from..(from + asked.size as usize).min(content.len())];
        let place = later.place().unwrap();
        self.memory.write(place.start, piece).unwrap();
        if asked.offset == u64::from(WRONG) {
            later.landed(asked.size as usize + 1);
        } else {
            later.landed(piece.len());
        }
    }
}

/// A read from here on lands with too many bytes.
const WRONG: u32 = 4096;

#[test]
fn payloads_lie_in_the_callers_memory() {
    let Some(_allowed) = require::fuse_ring() else { return };
    let memory = Arc::new(Memory::create("fuse-test", 8 << 20, Pages::Small).unwrap());
    let (files, content) = (MemoryFileSystem::new(VALID), Mutex::default());
    let file_system = Arc::new(InPlace { files, memory: Arc::clone(&memory), content });
    let options = SessionOptions { ring: true, memory: Some(memory), ..options() };
    let mounted = Mounted::with(file_system, &options);
    assert_eq!(mounted.session.transport(), Transport::Ring);
    let mut direct = OpenOptions::new();
    direct.read(true).write(true).create_new(true).custom_flags(OFlags::DIRECT.bits() as i32);
    let file = direct.open(mounted.at().join("file")).unwrap();
    for length in [1, 4096, 1 << 20] {
        let content = pattern(length, length as u64);
        assert_eq!(file.write_at(&content, 0).unwrap(), length);
        let mut read = vec![0; length];
        assert_eq!(file.read_at(&mut read, 0).unwrap(), length);
        assert!(read == content, "{length} bytes");
    }
    let refused = file.read_at(&mut [0; 100], WRONG.into()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::IO.raw_os_error()));
}

#[test]
fn without_room_for_a_ring_the_device_is_used() {
    let Some(_allowed) = require::fuse_ring() else { return };
    let folder = scratch::folder("fuse").unwrap();
    let memory = Some(Arc::new(Memory::create("fuse-test", 4096, Pages::Small).unwrap()));
    let options = SessionOptions { ring: true, memory, ..options() };
    let session = Session::start(folder.path(), Arc::new(MemoryFileSystem::new(VALID)), &options).unwrap();
    assert_eq!(session.transport(), Transport::Device);
    fs::write(folder.path().join("file"), "content").unwrap();
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"content");
    session.end().unwrap();
}
