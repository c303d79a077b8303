//! A disk that is full for a while, or takes its time: what a process was told is true, whether it writes or maps, and
//! callers that come meanwhile get theirs.
//!
//! The schedules are random. Two rules are taken out, one at a time, and must be found missing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, Weak};
use std::thread;

use remora_lab::Random;

use super::*;
use crate::disk::MOST_EARLY;
use crate::{DiskDone, Mutant};

/// Bytes of a record: most lie in two clusters.
const RECORD: u64 = 40_000;

/// Room for some 50 records beside the areas.
const SMALL: u64 = 1024;

/// A process that appends records to a file, one after the other, and goes on whatever it is told.
struct Appender {
    ino: u64,
    /// Bytes that it has written or skipped: where a process is that maps its file, or that ignores errors.
    at: u64,
    /// Bytes of the file that it was told are safe.
    safe: u64,
    /// It was told of an error since the file was last cut or closed.
    is_told: bool,
    /// It writes to mapped memory: it is told of errors by `fsync` alone.
    maps: bool,
}

fn record(at: u64) -> Bytes {
    Bytes::from(vec![(at / RECORD % 250 + 1) as u8; RECORD as usize])
}

impl Appender {
    fn new(files: &Files, name: &str, maps: bool) -> Appender {
        let ino = files.make(ROOT, name);
        files.hold(ino).unwrap();
        Appender { ino, at: 0, safe: 0, is_told: false, maps }
    }

    fn append(&mut self, files: &Files) {
        let (ino, at) = (self.ino, self.at);
        let written = match self.maps {
            true => wait(|done| files.write_back(ino, at, record(at), done)),
            false => wait(|done| files.write_ahead(ino, at, record(at), done)),
        };
        match written {
            Ok(()) => self.at += RECORD,
            // A process that maps does not see it, and fills the next page.
            Err(_) if self.maps => self.at += RECORD,
            Err(error) => assert_eq!(error.errno(), Errno::NOSPC),
        }
    }

    /// Returns what is wrong.
    fn sync(&mut self, files: &Files) -> std::result::Result<(), String> {
        match wait(|done| files.fsync(self.ino, true, done)) {
            Ok(()) => {
                self.is_told = false;
                self.safe = self.at;
            }
            Err(_) => self.is_told = true,
        }
        self.check(files)
    }

    /// What is there is a beginning of what was written, and all that was said to be safe.
    fn check(&self, files: &Files) -> std::result::Result<(), String> {
        let data = files.all(self.ino);
        for (number, part) in (0..).zip(data.chunks(RECORD as usize)) {
            let at = number * RECORD;
            if part != &record(at)[..part.len()] {
                return Err(format!(
                    "the record at {at} of {} is not there, and {} bytes are safe",
                    self.at, self.safe
                ));
            }
        }
        if (data.len() as u64) < self.safe {
            return Err(format!("{} bytes are there, and {} were said to be safe", data.len(), self.safe));
        }
        Ok(())
    }

    /// It learns where the file ends, and goes on from there: by a truncation, or by closing and opening it.
    fn repair(&mut self, files: &Files, by_cut: bool) {
        let end = files.getattr(self.ino).unwrap().size / RECORD * RECORD;
        if by_cut {
            files.cut(self.ino, end);
        } else {
            files.closed(self.ino);
            files.cut(self.ino, end);
        }
        (self.at, self.is_told) = (end, false);
        self.safe = self.safe.min(end);
    }
}

/// Plays a schedule. Returns what is wrong.
fn play(seed: u64) -> std::result::Result<(), String> {
    let mut random = Random::new(seed);
    let disk = formatted(SMALL);
    let files = Files::open_ahead(Arc::clone(&disk) as Arc<dyn Disk>, 1 << 20).unwrap();
    let ballast = files.make(ROOT, "ballast");
    let mut all: Vec<_> = (0..3).map(|number| Appender::new(&files, &format!("log{number}"), number > 0)).collect();
    for _ in 0..120 {
        let one = &mut all[random.below(3) as usize];
        match random.below(12) {
            0 => files.cut(ballast, 0),
            1 => {
                // All that is left, or nearly.
                let left = files.statfs().free_blocks * BLOCK_BYTES as u64;
                let size = files.getattr(ballast).unwrap().size;
                let more = left.saturating_sub(random.below(3) * (64 << 10));
                if more > 0 {
                    let _ = wait(|done| files.fallocate(ballast, size, more, Allocate::Grow, done));
                }
            }
            2 | 3 => one.sync(&files)?,
            4 if one.is_told => one.repair(&files, random.below(2) == 0),
            _ => one.append(&files),
        }
        one.check(&files)?;
    }
    for one in &mut all {
        one.sync(&files)?;
        if one.is_told {
            one.repair(&files, true);
            one.sync(&files)?;
        }
    }
    // The next host finds the same.
    let (inodes, again) = (all.iter().map(|one| (one.ino, files.all(one.ino))), reopened(SMALL, &disk.history()));
    for (ino, data) in inodes.collect::<HashMap<_, _>>() {
        if again.all(ino) != data {
            return Err("the next host finds other bytes".into());
        }
    }
    Ok(())
}

#[test]
fn what_a_full_volume_has_is_a_beginning_of_what_was_written() {
    for seed in 0..60 {
        play(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
}

#[test]
fn each_rule_about_a_full_volume_is_missed_when_it_is_taken_out() {
    for mutant in [Mutant::RefusedOnce, Mutant::AnsweredWithoutSpace] {
        Mutant::set(Some(mutant));
        let found = (0..200).find_map(|seed| play(seed).err().map(|why| (seed, why)));
        Mutant::set(None);
        let (seed, why) = found.unwrap_or_else(|| panic!("{mutant:?} was not found"));
        println!("{mutant:?}: seed {seed}: {why}");
    }
}

/// Refused for the size of a file, or for the room for names, or for clusters: all the same.
#[test]
fn every_refusal_of_mapped_bytes_stays_until_the_file_is_cut_before_them_or_closed() {
    let refused = |files: &Files, ino: u64, offset: u64, errno: Errno| {
        let data = Bytes::from(vec![7; 4096]);
        let told = wait(|done| files.write_back(ino, offset, data, done)).unwrap_err();
        assert_eq!(told.errno(), errno);
        for _ in 0..3 {
            let stays = [
                wait(|done| files.fsync(ino, true, done)),
                wait(|done| files.fsync(ino, false, done)),
                wait(|done| files.acknowledged(ino, done)),
                wait(|done| files.write(ino, 0, Bytes::from_static(b"x"), done)),
                wait(|done| files.write_ahead(ino, 0, Bytes::from_static(b"x"), done)),
            ];
            assert!(stays.iter().all(|told| told.as_ref().unwrap_err().errno() == errno), "{stays:?}");
        }
    };
    // The size of a file.
    let disk = formatted(SMALL);
    let files = open(&disk);
    let (ino, other) = (files.make(ROOT, "f"), files.make(ROOT, "other"));
    files.put(ino, 0, &[1; 10_000]);
    refused(&files, ino, crate::names::MOST_FILE_BYTES, Errno::FBIG);
    files.put(other, 0, b"another file is not affected");
    wait(|done| files.fsync(other, false, done)).unwrap();
    // Cut, but behind what was lost: nothing has changed.
    files.closed(ino);
    files.put(ino, 0, &[1; 10_000]);
    // Space.
    let left = files.statfs().free_blocks * BLOCK_BYTES as u64;
    wait(|done| files.fallocate(other, 64 << 10, left, Allocate::Grow, done)).unwrap();
    refused(&files, ino, 20 << 16, Errno::NOSPC);
    refused(&files, ino, 10 << 16, Errno::NOSPC);
    files.cut(ino, 15 << 16);
    assert!(wait(|done| files.fsync(ino, true, done)).is_err(), "a part of what was lost is before this size");
    files.cut(other, 0);
    assert!(
        wait(|done| files.write(ino, 0, Bytes::from_static(b"x"), done)).is_err(),
        "also when there is space again"
    );
    files.cut(ino, 10 << 16);
    wait(|done| files.fsync(ino, true, done)).unwrap();
    files.put(ino, 10 << 16, b"again");
    assert_eq!(&files.all(ino)[..4], [1; 4]);
}

/// Zeros over more than there is room for are refused before anything has changed.
#[test]
fn zeros_that_do_not_fit_leave_the_data_and_the_space() {
    for how in [Allocate::ZeroKeep, Allocate::ZeroGrow, Allocate::Keep, Allocate::Grow] {
        let files = open(&formatted(SMALL));
        let ino = files.make(ROOT, "f");
        let data: Vec<u8> = (0..500_000_u32).map(|at| (at / 100) as u8 | 1).collect();
        files.put(ino, 0, &data);
        let free = files.statfs().free_blocks;
        let refused = wait(|done| files.fallocate(ino, 1000, 1 << 30, how, done)).unwrap_err();
        assert_eq!(refused.errno(), Errno::NOSPC, "{how:?}");
        assert!(files.all(ino) == data, "{how:?}");
        assert_eq!(files.statfs().free_blocks, free, "{how:?}");
        // What fits is done, also if nothing but the clusters of the range itself is free.
        let other = files.make(ROOT, "other");
        wait(|done| files.fallocate(other, 0, free * BLOCK_BYTES as u64, Allocate::Keep, done)).unwrap();
        wait(|done| files.fallocate(ino, 0, 500_000, how, done)).unwrap();
    }
}

// Files in a volume that has grown: the names move to larger areas, at once or not at all.

/// The sizes of the volume, one after the other.
const SIZES: [u64; 3] = [1024, 8192, 32_768];

/// How many inodes there can be, about.
fn inodes(files: &Files) -> u64 {
    let usage = files.statfs();
    usage.inodes + usage.free_inodes
}

/// As many files as there is room for, up to so many, each with its number in it.
fn make_files(files: &Files, first: u64, most: u64) -> u64 {
    let mut made = 0;
    while made < most {
        let name = format!("file-{}", first + made);
        let Ok(ino) = wait(|done| files.create(ROOT, name.as_bytes(), new(NewKind::File), false, done)) else { break };
        let data = Bytes::from((first + made).to_le_bytes().to_vec());
        if wait(|done| files.write(ino.ino, 0, data, done)).is_err() {
            wait(|done| files.unlink(ROOT, name.as_bytes(), done)).unwrap();
            break;
        }
        made += 1;
    }
    made
}

/// Whether the files of these numbers have what they should.
fn has_files(files: &Files, count: u64) -> bool {
    (0..count).all(|number| {
        let found = files.lookup(ROOT, format!("file-{number}").as_bytes());
        found.is_ok_and(|found| files.get(found.ino, 0, 8) == number.to_le_bytes())
    })
}

/// Grows twice. What is found wrong, after each block that was written meanwhile and at the end.
fn grow() -> Option<String> {
    let disk = formatted(SIZES[0]);
    let files = open(&disk);
    let (mut count, mut most) = (make_files(&files, 0, 100), inodes(&files));
    drop(files);
    let mut history = disk.history();
    for blocks in &SIZES[1..] {
        let disk = Memory::after(*blocks, &history, false);
        let Ok(files) = Files::open(Arc::clone(&disk) as Arc<dyn Disk>) else { return Some("it does not open".into()) };
        if inodes(&files) < most * 7 / 4 {
            return Some(format!("{most} inodes before, {} then", inodes(&files)));
        }
        most = inodes(&files);
        // Each beginning of what has moved the names.
        let moved = disk.history();
        for end in history.len()..moved.len() {
            let Ok(files) = Files::open(Memory::after(*blocks, &moved[..end], false) as Arc<dyn Disk>) else {
                return Some(format!("after {} blocks of the move it does not open", end - history.len()));
            };
            if !has_files(&files, count) {
                return Some(format!("after {} blocks of the move files are missing", end - history.len()));
            }
        }
        count += make_files(&files, count, 300);
        // All that is free, with what would be no names.
        let ino = files.make(ROOT, &format!("ballast-{blocks}"));
        let ballast = Bytes::from(vec![0xdd; 64 << 10]);
        let mut at = 0;
        while wait(|done| files.write(ino, at, ballast.clone(), done)).is_ok() {
            at += ballast.len() as u64;
        }
        drop(files);
        history = disk.history();
        let again = Memory::after(*blocks, &history, false);
        let Ok(files) = Files::open(Arc::clone(&again) as Arc<dyn Disk>) else {
            return Some("the full volume does not open".into());
        };
        if !has_files(&files, count) {
            return Some("files of the full volume are missing".into());
        }
        wait(|done| files.unlink(ROOT, format!("ballast-{blocks}").as_bytes(), done)).unwrap();
        drop(files);
        history = again.history();
    }
    None
}

#[test]
fn the_room_for_names_grows_with_the_volume_and_every_beginning_of_the_move_has_all_files() {
    assert_eq!(grow(), None);
}

#[test]
fn the_rules_of_the_move_are_missed_if_they_are_taken_out() {
    for mutant in [Mutant::HeadBeforeItsAreas, Mutant::AreasAreFree] {
        Mutant::set(Some(mutant));
        let found = std::panic::catch_unwind(grow);
        Mutant::set(None);
        assert!(found.map_or(true, |found| found.is_some()), "{mutant:?}");
    }
}

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

/// While the servers are out of reach, short writes that are answered early do not take all the room: others are
/// accepted, by the thread that the kernel's questions come by.
#[test]
fn short_writes_that_were_answered_early_leave_room_for_what_others_ask() {
    const OTHERS: u64 = 300;
    let (disk, files, ino) = waiting_with(&[], 64 << 20);
    let (done, files_too) = (Arc::<AtomicUsize>::default(), Arc::clone(&files));
    let told = Arc::clone(&done);
    let asking = thread::spawn(move || {
        for number in 0..MOST_EARLY + OTHERS {
            files_too.write_ahead(ino, number * 4096, Bytes::from(vec![1; 4096]), counted(&told));
        }
    });
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !asking.is_finished() && std::time::Instant::now() < until {
        thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(asking.is_finished(), "a thread waits for room");
    assert_eq!(done.load(Ordering::SeqCst) as u64, MOST_EARLY);
    while disk.finish() {}
    assert_eq!(done.load(Ordering::SeqCst) as u64, MOST_EARLY + OTHERS);
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
