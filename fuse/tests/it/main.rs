//! File systems that are mounted, and used by system calls, by programs, and by processes that are killed.
//!
//! What the kernel is told, at the beginning and later. What only the ring has: payloads in the caller's memory, and
//! what is done without it.

#![allow(clippy::unwrap_used, unreachable_pub)]

mod ends;
mod files;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use remora_fuse::answer::{Answer, Created, Data, Entry, KnownAttributes, Written, *};
use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::request::{Create, GetAttributes, Lookup, Read, Write, *};
use remora_fuse::{Errno, FileSystem, MountOptions, Payload, ROOT, Session, SessionOptions, Transport};
use remora_lab::{require, scratch};
use remora_memory::{Memory, Pages};
use rustix::fs::OFlags;

// Mounted file systems of these tests, in every way in which they can be served, and one that answers in threads of its
// own, in any order.

/// A file system that is mounted at a folder of its own.
pub(crate) struct Mounted {
    pub(crate) session: Session,
    // Removed after the session has ended.
    pub(crate) folder: tempfile::TempDir,
}

impl Mounted {
    pub(crate) fn with(file_system: Arc<dyn FileSystem>, options: &SessionOptions) -> Mounted {
        let folder = scratch::folder("fuse").unwrap();
        let session = Session::start(folder.path(), file_system, options).unwrap();
        Mounted { session, folder }
    }

    /// Where it is.
    pub(crate) fn at(&self) -> &Path {
        self.folder.path()
    }
}

/// By the device, without a cache of writes.
pub(crate) fn options() -> SessionOptions {
    SessionOptions { ring: false, threads: 3, lists_attributes: true, ..SessionOptions::default() }
}

/// For how long the kernel may believe what it was told.
pub(crate) const VALID: Duration = Duration::from_secs(60);

/// Runs a test by the device, and by the ring where the kernel has it.
pub(crate) fn by_each_transport(test: impl Fn(&SessionOptions)) {
    if require::fuse().is_none() {
        return;
    }
    test(&options());
    let Some(_allowed) = require::fuse_ring() else { return };
    println!("by the ring"); // shown only when the test panics
    test(&SessionOptions { ring: true, ..options() });
}

/// Runs a test with every transport, with and without the kernel's cache of writes, with a file system that
/// answers at once and one that answers in other threads, and with payloads in the session's memory and in the
/// test's.
pub(crate) fn in_every_way(test: impl Fn(&Path, &Arc<MemoryFileSystem>)) {
    by_each_transport(|options| {
        for (write_back, is_late, is_shared) in [
            (false, false, false),
            (true, false, false),
            (false, true, false),
            (true, true, true),
            (false, false, true),
        ] {
            println!("write back: {write_back}, late: {is_late}, memory given: {is_shared}");
            let files = Arc::new(MemoryFileSystem::new(VALID));
            let served: Arc<dyn FileSystem> = if is_late {
                Arc::new(Elsewhere::new(Arc::clone(&files) as Arc<dyn FileSystem>, 2))
            } else {
                Arc::clone(&files) as Arc<dyn FileSystem>
            };
            let memory = is_shared.then(|| Arc::new(Memory::create("fuse-test", 16 << 20, Pages::Small).unwrap()));
            let mounted = Mounted::with(served, &SessionOptions { write_back, memory, ..options.clone() });
            let expected = if options.ring { Transport::Ring } else { Transport::Device };
            assert_eq!(mounted.session.transport(), expected);
            test(mounted.at(), &files);
            mounted.session.end().unwrap();
        }
    });
}

/// Waits for a condition.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < deadline, "not within two minutes: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

type Work = Box<dyn FnOnce() + Send>;

/// Another file system, whose calls are made by other threads.
pub(crate) struct Elsewhere {
    inner: Arc<dyn FileSystem>,
    work: Mutex<Sender<Work>>,
    /// How long a write takes.
    delay: Duration,
}

impl Elsewhere {
    pub(crate) fn new(inner: Arc<dyn FileSystem>, threads: usize) -> Elsewhere {
        let (work, todo) = channel::<Work>();
        let todo = Arc::new(Mutex::new(todo));
        for _ in 0..threads {
            let todo: Arc<Mutex<Receiver<Work>>> = Arc::clone(&todo);
            std::thread::spawn(move || {
                loop {
                    let work = todo.lock().unwrap().recv();
                    let Ok(work) = work else { return };
                    work();
                }
            });
        }
        Elsewhere { inner, work: Mutex::new(work), delay: Duration::ZERO }
    }

    pub(crate) fn with_slow_writes(self, delay: Duration) -> Elsewhere {
        Elsewhere { delay, ..self }
    }

    fn send(&self, work: impl FnOnce(&dyn FileSystem) + Send + 'static) {
        let inner = Arc::clone(&self.inner);
        self.work.lock().unwrap().send(Box::new(move || work(&*inner))).unwrap();
    }
}

/// Methods whose request is all numbers.
macro_rules! sent {
    ($($method:ident($asked:ty) -> $reply:ty;)*) => {$(
        fn $method(&self, asked: $asked, answer: Answer<'_, $reply>) {
            let later = answer.later();
            self.send(move |inner| later.answer_by(|answer| inner.$method(asked, answer)));
        }
    )*};
}

impl FileSystem for Elsewhere {
    sent! {
        get_attributes(GetAttributes) -> KnownAttributes;
        set_attributes(SetAttributes) -> KnownAttributes;
        read_link(u64) -> Target;
        open(Open) -> Opened;
        read(Read) -> Data;
        flush(Close) -> Done;
        release(Close) -> Done;
        fsync(Fsync) -> Done;
        open_directory(Open) -> Opened;
        read_directory(ReadDirectory) -> Listing;
        read_directory_plus(ReadDirectory) -> ListingPlus;
        release_directory(Close) -> Done;
        fsync_directory(Fsync) -> Done;
        statistics(u64) -> Statistics;
        allocate(Allocate) -> Done;
        seek(Seek) -> Position;
    }

    fn lookup(&self, asked: Lookup<'_>, answer: Answer<'_, Entry>) {
        let (later, parent, name) = (answer.later(), asked.parent, asked.name.to_vec());
        self.send(move |inner| later.answer_by(|answer| inner.lookup(Lookup { parent, name: &name }, answer)));
    }

    fn forget(&self, node: u64, lookups: u64) {
        self.inner.forget(node, lookups);
    }

    fn symlink(&self, asked: Symlink<'_>, answer: Answer<'_, Entry>) {
        let (later, name, target) = (answer.later(), asked.name.to_vec(), asked.target.to_vec());
        let (parent, caller) = (asked.parent, asked.caller);
        self.send(move |inner| {
            let asked = Symlink { parent, name: &name, target: &target, caller };
            later.answer_by(|answer| inner.symlink(asked, answer));
        });
    }

    fn make_node(&self, asked: MakeNode<'_>, answer: Answer<'_, Entry>) {
        let (later, name) = (answer.later(), asked.name.to_vec());
        let MakeNode { parent, caller, kind, permissions, device, umask, .. } = asked;
        self.send(move |inner| {
            let asked = MakeNode { parent, name: &name, caller, kind, permissions, device, umask };
            later.answer_by(|answer| inner.make_node(asked, answer));
        });
    }

    fn make_directory(&self, asked: MakeDirectory<'_>, answer: Answer<'_, Entry>) {
        let (later, name) = (answer.later(), asked.name.to_vec());
        let MakeDirectory { parent, caller, permissions, umask, .. } = asked;
        self.send(move |inner| {
            let asked = MakeDirectory { parent, name: &name, caller, permissions, umask };
            later.answer_by(|answer| inner.make_directory(asked, answer));
        });
    }

    fn unlink(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        let (later, parent, name) = (answer.later(), asked.parent, asked.name.to_vec());
        self.send(move |inner| later.answer_by(|answer| inner.unlink(Remove { parent, name: &name }, answer)));
    }

    fn remove_directory(&self, asked: Remove<'_>, answer: Answer<'_, Done>) {
        let (later, parent, name) = (answer.later(), asked.parent, asked.name.to_vec());
        self.send(move |inner| {
            later.answer_by(|answer| inner.remove_directory(Remove { parent, name: &name }, answer))
        });
    }

    fn rename(&self, asked: Rename<'_>, answer: Answer<'_, Done>) {
        let (later, name, new_name) = (answer.later(), asked.name.to_vec(), asked.new_name.to_vec());
        let Rename { parent, new_parent, caller, how, leaves_whiteout, .. } = asked;
        self.send(move |inner| {
            let asked = Rename { parent, name: &name, new_parent, new_name: &new_name, caller, how, leaves_whiteout };
            later.answer_by(|answer| inner.rename(asked, answer));
        });
    }

    fn link(&self, asked: Link<'_>, answer: Answer<'_, Entry>) {
        let (later, name, Link { node, parent, .. }) = (answer.later(), asked.name.to_vec(), asked);
        self.send(move |inner| later.answer_by(|answer| inner.link(Link { node, parent, name: &name }, answer)));
    }

    fn create(&self, asked: Create<'_>, answer: Answer<'_, Created>) {
        let (later, name) = (answer.later(), asked.name.to_vec());
        let Create { parent, caller, permissions, umask, flags, drops_set_id, .. } = asked;
        self.send(move |inner| {
            let asked = Create { parent, name: &name, caller, permissions, umask, flags, drops_set_id };
            later.answer_by(|answer| inner.create(asked, answer));
        });
    }

    fn write(&self, asked: Write<'_>, answer: Answer<'_, Written>) {
        let Write { node, handle, offset, data, is_from_cache, flags, drops_set_id } = asked;
        let (later, data, delay) = (answer.later(), data.into_bytes(), self.delay);
        self.send(move |inner| {
            std::thread::sleep(delay);
            let asked =
                Write { node, handle, offset, data: Payload::borrowed(&data), is_from_cache, flags, drops_set_id };
            later.answer_by(|answer| inner.write(asked, answer));
        });
    }
}

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
