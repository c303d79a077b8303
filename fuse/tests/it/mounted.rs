//! Mounted file systems of these tests, in every way in which they can be served.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::{FileSystem, Session, SessionOptions, Transport};
use remora_lab::{require, scratch};
use remora_memory::{Memory, Pages};

use crate::late::Elsewhere;

/// A file system that is mounted at a folder of its own.
pub struct Mounted {
    pub session: Session,
    // Removed after the session has ended.
    pub folder: tempfile::TempDir,
}

impl Mounted {
    pub fn with(file_system: Arc<dyn FileSystem>, options: &SessionOptions) -> Mounted {
        let folder = scratch::folder("fuse").unwrap();
        let session = Session::start(folder.path(), file_system, options).unwrap();
        Mounted { session, folder }
    }

    /// Where it is.
    pub fn at(&self) -> &Path {
        self.folder.path()
    }
}

/// By the device, without a cache of writes.
pub fn options() -> SessionOptions {
    SessionOptions { ring: false, threads: 3, lists_attributes: true, ..SessionOptions::default() }
}

/// For how long the kernel may believe what it was told.
pub const VALID: Duration = Duration::from_secs(60);

/// Runs a test by the device, and by the ring where the kernel has it.
pub fn by_each_transport(test: impl Fn(&SessionOptions)) {
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
pub fn in_every_way(test: impl Fn(&Path, &Arc<MemoryFileSystem>)) {
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
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < deadline, "not within two minutes: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that differ from place to place.
pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}
