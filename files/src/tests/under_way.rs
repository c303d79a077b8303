//! Several callers at a time, and a disk that takes its time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, Weak};
use std::thread;

use super::*;
use crate::DiskDone;

/// A disk whose requests wait, with a file of these bytes.
fn waiting(data: &[u8]) -> (Arc<Memory>, Arc<Files>, u64) {
    waiting_with(data, 0)
}

/// The same, with such a window for what is answered early.
fn waiting_with(data: &[u8], ahead: usize) -> (Arc<Memory>, Arc<Files>, u64) {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    if !data.is_empty() {
        files.put(ino, 0, data);
    }
    let later = Memory::later(BLOCKS, &disk.history());
    let dyn_disk = Arc::clone(&later) as Arc<dyn Disk>;
    let opening = thread::spawn(move || Files::open_ahead(dyn_disk, ahead).unwrap());
    while !opening.is_finished() {
        later.finish();
    }
    (later, Arc::new(opening.join().unwrap()), ino)
}

/// Counts answers.
fn counted(count: &Arc<AtomicUsize>) -> impl FnOnce(Result<()>) + Send + 'static {
    let count = Arc::clone(count);
    move |result| {
        result.unwrap();
        count.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn changes_of_one_block_take_place_in_their_order() {
    let (disk, files, ino) = waiting(&[1; 10_000]);
    let done = Arc::new(AtomicUsize::new(0));
    files.write(ino, 100, Bytes::from_static(b"aaaa"), counted(&done));
    files.write(ino, 102, Bytes::from_static(b"bbbb"), counted(&done));
    files.setattr(ino, Some(104), SetAttributes::default(), counted(&done));
    files.write(ino, 106, Bytes::from_static(b"cc"), counted(&done));
    assert_eq!((disk.waiting(), files.getattr(ino).unwrap().size), (1, 10_000), "the block is read first");
    disk.finish();
    assert_eq!((disk.waiting(), files.getattr(ino).unwrap().size, done.load(Ordering::SeqCst)), (4, 108, 0));
    while disk.finish() {}
    assert_eq!(done.load(Ordering::SeqCst), 4);
    let files = reopened(BLOCKS, &disk.history());
    assert_eq!(files.get(ino, 98, 100), b"\x01\x01aabb\0\0cc");
}

#[test]
fn a_read_is_not_of_what_its_clusters_become_meanwhile() {
    let (disk, files, ino) = waiting(&[1; 3_000_000]);
    let (done, is_done) = mpsc::sync_channel(1);
    files.read(ino, 0, 2_000_000, move |result| done.send(result).unwrap());
    let count = Arc::new(AtomicUsize::new(0));
    files.setattr(ino, Some(0), SetAttributes::default(), counted(&count));
    // As much as fits: some of it is what is being read.
    let bytes = files.statfs().free_blocks * BLOCK_BYTES as u64;
    files.fallocate(ino, 0, bytes, Allocate::Grow, counted(&count));
    files.write(ino, 5, Bytes::from_static(b"x"), counted(&count));
    while disk.finish() {}
    assert!(is_done.recv().unwrap().unwrap().concat().iter().all(|byte| *byte == 1));
    assert_eq!((count.load(Ordering::SeqCst), files.statfs().free_blocks), (3, 0), "they wait for the read");
    let other = wait(|done| files.fallocate(ino, bytes, 1, Allocate::Keep, done));
    assert_eq!(other.unwrap_err().errno(), Errno::NOSPC);
}

/// Parts of blocks, by several threads: none undoes what another one has written.
#[test]
fn writers_of_the_same_blocks_lose_nothing() {
    const THREADS: u64 = 6;
    const PART: u64 = 700;
    let (disk, files, ino) = waiting(&[]);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                if !disk.finish() {
                    thread::yield_now();
                }
            }
        });
        let writers: Vec<_> = (0..THREADS)
            .map(|number| {
                let files = &files;
                scope.spawn(move || {
                    for part in (number..300).step_by(THREADS as usize) {
                        let data = Bytes::from(vec![(part % 250 + 1) as u8; PART as usize]);
                        wait(|done| files.write(ino, part * PART, data, done)).unwrap();
                        let read = files.get(ino, part * PART, PART as u32);
                        assert!(read.iter().all(|byte| u64::from(*byte) == part % 250 + 1), "part {part}");
                    }
                })
            })
            .collect();
        let readers = scope.spawn(|| {
            // A reader sees a part or zeros, and nothing beyond the end.
            for _ in 0..300 {
                let size = files.getattr(ino).unwrap().size;
                let read = files.get(ino, 0, size as u32);
                for (part, bytes) in (0..).zip(read.chunks(PART as usize)) {
                    assert!(bytes.iter().all(|byte| *byte == 0 || u64::from(*byte) == part % 250 + 1), "part {part}");
                }
            }
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        readers.join().unwrap();
        is_over.store(true, Ordering::SeqCst);
    });
    let files = reopened(BLOCKS, &disk.history());
    let data = files.all(ino);
    assert_eq!(data.len() as u64, 300 * PART);
    for (part, bytes) in (0..).zip(data.chunks(PART as usize)) {
        assert!(bytes.iter().all(|byte| u64::from(*byte) == part % 250 + 1), "part {part}");
    }
}

/// A volume may wait for its servers for ever. An end does not.
#[test]
fn a_call_that_waits_for_room_is_ended() {
    let (disk, files, ino) = waiting(&[]);
    let failed = Arc::new(AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..20 {
                let failed = Arc::clone(&failed);
                files.write(ino, (number % 2) << 22, Bytes::from(vec![1; 4 << 20]), move |result| {
                    failed.fetch_add(result.is_err().into(), Ordering::SeqCst);
                });
            }
        });
        while disk.waiting() < 5 {
            thread::yield_now();
        }
        thread::sleep(std::time::Duration::from_millis(50));
        assert!(disk.waiting() < 200 && failed.load(Ordering::SeqCst) == 0, "no more than there is room for");
        files.close();
    });
    assert!(failed.load(Ordering::SeqCst) > 10);
}

/// What is not answered when the files are dropped is answered then.
#[test]
fn every_caller_is_told_something() {
    let (disk, files, ino) = waiting(&[1; 10_000]);
    let told = Arc::new(AtomicUsize::new(0));
    for offset in [100, 5000, 101, 5001] {
        let told = Arc::clone(&told);
        files.write(ino, offset, Bytes::from_static(b"x"), move |_| _ = told.fetch_add(1, Ordering::SeqCst));
    }
    drop(files);
    while disk.finish() {}
    assert_eq!(told.load(Ordering::SeqCst), 4);
}

/// A disk that reads a hole of a file while it is given a request.
struct Reads {
    memory: Arc<Memory>,
    files: OnceLock<(Weak<Files>, u64)>,
    read: Arc<Mutex<Vec<Result<Vec<Bytes>>>>>,
}

impl Disk for Reads {
    fn blocks(&self) -> u64 {
        self.memory.blocks()
    }

    fn submit(&self, request: Request, done: DiskDone) {
        if let Some((files, ino)) = self.files.get()
            && let Some(files) = files.upgrade()
        {
            let read = Arc::clone(&self.read);
            files.read(*ino, 5000, 100, move |result| read.lock().unwrap().push(result));
        }
        self.memory.submit(request, done);
    }
}

#[test]
fn a_hole_is_read_while_a_write_is_on_its_way() {
    let memory = formatted(BLOCKS);
    let disk = Arc::new(Reads { memory, files: OnceLock::new(), read: Arc::default() });
    let files = Arc::new(Files::open(Arc::clone(&disk) as Arc<dyn Disk>).unwrap());
    let ino = files.make(ROOT, "f");
    files.cut(ino, 10_000);
    disk.files.set((Arc::downgrade(&files), ino)).unwrap();
    let other = files.make(ROOT, "other");
    files.put(other, 0, b"bytes");
    let read = std::mem::take(&mut *disk.read.lock().unwrap());
    assert!(!read.is_empty());
    for read in read {
        assert_eq!(read.unwrap().concat(), [0; 100]);
    }
}

/// A page cache writes back through a window: what fits is answered at once, and nothing is out of order. Of whatever
/// beginning is left, no write is there without all of those before it.
#[test]
fn what_is_answered_early_is_a_beginning_at_every_cut_and_a_flush_waits_for_all() {
    const WRITES: u64 = 40;
    const PART: u64 = 8192; // whole blocks: nothing is read first
    const LONG: u64 = 11 * PART; // more than what goes together with the log, and than the window has
    let (disk, files, ino) = waiting_with(&[], 8 * PART as usize);
    let (done, flushed, closed) = (Arc::default(), Arc::default(), Arc::default());
    let before = disk.history().len();
    for number in 0..WRITES {
        let length = if number % 5 == 4 { LONG } else { PART };
        let data = Bytes::from(vec![number as u8 + 1; length as usize]);
        files.write_ahead(ino, number * PART, data, counted(&done));
        if number == 3 {
            files.acknowledged(ino, counted(&closed));
        }
        if number == 20 {
            files.fsync(ino, true, counted(&flushed));
        }
    }
    assert_eq!(done.load(Ordering::SeqCst), 8, "as many as the window holds; the longer ones wait");
    assert_eq!([&flushed, &closed].map(|count: &Arc<AtomicUsize>| count.load(Ordering::SeqCst)), [0, 0]);
    let mut early = Vec::new();
    while disk.finish() {
        early.push((disk.history().len(), done.load(Ordering::SeqCst), flushed.load(Ordering::SeqCst)));
    }
    assert_eq!(done.load(Ordering::SeqCst) as u64, WRITES);
    assert_eq!([&flushed, &closed].map(|count| count.load(Ordering::SeqCst)), [1, 1]);
    let history = disk.history();
    let flush = (before..history.len()).find(|at| matches!(history[*at], Request::Flush)).unwrap();
    assert!(early.iter().all(|(length, _, flushed)| (*flushed == 1) == (*length > flush)), "with its own request");
    for cut in before..=history.len() {
        let data = reopened(BLOCKS, &history[..cut]).all(ino);
        // The last write that is there: those before it are, too.
        let last = data.iter().copied().max().unwrap_or_default();
        for (part, bytes) in (1..).zip(data.chunks(PART as usize)).take(usize::from(last).saturating_sub(1)) {
            assert!(bytes.iter().all(|byte| *byte == part), "cut {cut}, part {part} of {last}");
        }
        assert!(cut <= flush || last >= 21, "cut {cut}: {last} writes are there, and 21 were flushed");
    }
}

#[test]
fn what_fails_after_it_was_answered_fails_every_flush_and_close() {
    let (disk, files, ino) = waiting_with(&[], 1 << 20);
    let answered = Arc::default();
    files.write_ahead(ino, 0, Bytes::from(vec![1; 5000]), counted(&answered));
    assert_eq!(answered.load(Ordering::SeqCst), 1);
    let (told, is_told) = mpsc::channel();
    let tell = |told: &mpsc::Sender<Result<()>>| {
        let told = told.clone();
        move |result| told.send(result).unwrap()
    };
    files.acknowledged(ino, tell(&told));
    disk.fail();
    assert!(is_told.recv().unwrap().is_err(), "a close that has waited");
    files.acknowledged(ino, tell(&told));
    files.fsync(ino, true, tell(&told));
    files.write_ahead(ino, 0, Bytes::from(vec![2; 5000]), tell(&told));
    assert_eq!((0..3).filter(|_| is_told.recv().unwrap().is_err()).count(), 3);
}
