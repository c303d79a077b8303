//! The ring's own: payloads in the caller's memory, and what is done without it.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::{Arc, Mutex};

use remora_fuse::answer::Answer;
use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::reply::{Created, Data, Entry, KnownAttributes, Written};
use remora_fuse::request::{Create, GetAttributes, Lookup, Read, Write};
use remora_fuse::{Errno, FileSystem, Session, SessionOptions, Transport};
use remora_lab::{require, scratch};
use remora_memory::{Memory, Pages};
use rustix::fs::OFlags;

use crate::mounted::{Mounted, VALID, options, pattern};

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
