//! Files against a real directory, after random changes and after every beginning of what was written.

#![allow(clippy::unwrap_used)]

mod following;
mod full;

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::{fs, thread};

use bytes::Bytes;
use proptest::prelude::*;
use remora_lab::Random;
use remora_volume::client::{Error, Request};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::Run;
use rustix::io::Errno;
use tempfile::TempDir;

use crate::names::layout::HeadError;
use crate::names::{Kind, New, NewKind, ROOT, Rename, SetAttributes};
use crate::{Allocate, Disk, DiskDone, Files, FilesError, Image};

const BLOCKS: u64 = 4096;

type Result<T> = std::result::Result<T, FilesError>;

/// Waits for an answer.
fn wait<T: Send + 'static>(ask: impl FnOnce(Box<dyn FnOnce(Result<T>) + Send>)) -> Result<T> {
    let (done, is_done) = mpsc::sync_channel(1);
    ask(Box::new(move |result| done.send(result).unwrap()));
    is_done.recv().unwrap()
}

fn new(kind: NewKind) -> New {
    New { kind, mode: 0o640, uid: 1, gid: 2, umask: 0 }
}

fn formatted(blocks: u64) -> Arc<Memory> {
    let disk = Memory::new(blocks);
    Files::format(&*disk, &New::default(), false).unwrap();
    disk
}

fn open(disk: &Arc<Memory>) -> Files {
    Files::open(Arc::clone(disk) as Arc<dyn Disk>).unwrap()
}

/// The files that a disk has after these changes.
fn reopened(blocks: u64, history: &[Request]) -> Files {
    open(&Memory::after(blocks, history, false))
}

impl Files {
    fn make(&self, parent: u64, name: &str) -> u64 {
        wait(|done| self.create(parent, name.as_bytes(), new(NewKind::File), false, done)).unwrap().ino
    }

    fn put(&self, ino: u64, offset: u64, data: &[u8]) {
        wait(|done| self.write(ino, offset, Bytes::copy_from_slice(data), done)).unwrap();
    }

    fn get(&self, ino: u64, offset: u64, length: u32) -> Vec<u8> {
        wait(|done| self.read(ino, offset, length, done)).unwrap().concat()
    }

    fn all(&self, ino: u64) -> Vec<u8> {
        self.get(ino, 0, self.getattr(ino).unwrap().size as u32)
    }

    fn cut(&self, ino: u64, size: u64) {
        wait(|done| self.setattr(ino, Some(size), SetAttributes::default(), done)).unwrap();
    }
}

#[test]
fn a_volume_that_holds_something_else_is_not_touched() {
    let disk = Memory::new(BLOCKS);
    let error = |disk: &Arc<Memory>| Files::open(Arc::clone(disk) as Arc<dyn Disk>).err().unwrap();
    assert!(matches!(error(&disk), FilesError::Head(HeadError::Empty)));
    disk.dirty(5);
    let refused = Files::format(&*disk, &New::default(), false);
    assert!(matches!(refused, Err(FilesError::Occupied(5))), "{refused:?}");
    assert!(disk.history().is_empty());
    disk.dirty(0);
    assert!(matches!(error(&disk), FilesError::Head(HeadError::Foreign)));
    Files::format(&*disk, &New::default(), true).unwrap();
    assert_eq!(open(&disk).getattr(ROOT).unwrap().kind, Kind::Directory);
    assert!(matches!(Files::format(&*disk, &New::default(), false), Err(FilesError::Occupied(0))));
    assert!(matches!(Files::format(&*Memory::new(1023), &New::default(), false), Err(FilesError::TooSmall)));
    let smaller = Memory::after(BLOCKS / 2, &[disk.history()[1].clone()], false);
    assert!(matches!(error(&smaller), FilesError::Shrunk { said: BLOCKS, .. }));
}

/// What a server that appends to a file waits for.
#[test]
fn an_append_of_less_than_a_block_is_one_write_of_two_blocks() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "appendonly.aof");
    files.put(ino, 0, b"first");
    let (before, reads) = (disk.history().len(), disk.reads());
    for number in 1..200_u64 {
        files.put(ino, number * 5, b"other");
    }
    let history = disk.history();
    assert_eq!((history.len() - before, disk.reads()), (199, reads), "one write each, and nothing is read");
    for request in &history[before..] {
        let Request::Write { runs, data } = request else { panic!("{request:?}") };
        let blocks: u32 = runs.iter().map(|run| run.count).sum();
        assert!(runs.len() == 2 && blocks <= 3 && data.len() == blocks as usize * BLOCK_BYTES, "{runs:?}");
    }
    assert_eq!(files.get(ino, 0, 12), b"firstotherot");
    assert_eq!(reopened(BLOCKS, &history).all(ino).len(), 1000);
}

#[test]
fn whole_blocks_in_place_are_written_alone_and_without_a_copy() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    files.put(ino, 0, &vec![1; 1 << 20]);
    let before = disk.history().len();
    let data = Bytes::from(vec![2; 64 << 10]);
    wait(|done| files.write(ino, 128 << 10, data.clone(), done)).unwrap();
    let history = disk.history();
    assert_eq!(history.len(), before + 1);
    let Request::Write { data: written, .. } = &history[before] else { panic!("not a write") };
    assert_eq!(written.as_ptr(), data.as_ptr());
    // The time is written with the next fsync.
    let modified = files.getattr(ino).unwrap().attributes.modified;
    assert_ne!(reopened(BLOCKS, &history).getattr(ino).unwrap().attributes.modified, modified);
    wait(|done| files.fsync(ino, false, done)).unwrap();
    let history = disk.history();
    assert!(matches!(history.last(), Some(Request::Flush)));
    assert_eq!(reopened(BLOCKS, &history).getattr(ino).unwrap().attributes.modified, modified);
    // Or when it is closed.
    files.hold(ino).unwrap();
    files.hold(ino).unwrap();
    files.put(ino, 0, &[3; 4096]);
    files.release(ino, 1);
    let modified = files.getattr(ino).unwrap().attributes.modified;
    assert_eq!(reopened(BLOCKS, &disk.history()).getattr(ino).unwrap().attributes.modified, modified);
    // Also if the kernel remembers it.
    files.put(ino, 0, &[4; 4096]);
    files.closed(ino);
    let modified = files.getattr(ino).unwrap().attributes.modified;
    assert_eq!(reopened(BLOCKS, &disk.history()).getattr(ino).unwrap().attributes.modified, modified);
    let before = disk.history().len();
    files.closed(ino);
    assert_eq!(disk.history().len(), before);
    // Space that is given to it changes its times, also if its size stays.
    wait(|done| files.fallocate(ino, 0, 4096, Allocate::Keep, done)).unwrap();
    assert!(files.getattr(ino).unwrap().attributes.modified > modified);
}

#[test]
fn a_file_that_is_open_without_a_name_stays_until_it_is_closed_or_the_writer_dies() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let free = files.statfs().free_blocks;
    let ino = files.make(ROOT, "f");
    files.put(ino, 0, &[7; 100_000]);
    files.hold(ino).unwrap();
    wait(|done| files.unlink(ROOT, b"f", done)).unwrap();
    assert_eq!(files.lookup(ROOT, b"f").unwrap_err().errno(), Errno::NOENT);
    assert_eq!((files.getattr(ino).unwrap().links, files.get(ino, 99_990, 100)), (0, vec![7; 10]));
    files.put(ino, 100_000, b"more");
    // The writer dies.
    let other = reopened(BLOCKS, &disk.history());
    assert_eq!((other.getattr(ino).unwrap_err().errno(), other.statfs().free_blocks), (Errno::STALE, free));
    files.release(ino, 1);
    assert_eq!((files.getattr(ino).unwrap_err().errno(), files.statfs().free_blocks), (Errno::STALE, free));
    assert_eq!(reopened(BLOCKS, &disk.history()).statfs(), files.statfs());
}

/// Whatever beginning of the writes is left, also in the middle of images and where the other area comes into use: a
/// file has every append that was answered, and no size without its data.
#[test]
#[ignore = "long: make test-all"]
fn appends_are_there_at_every_cut_while_images_are_written() {
    let disk = formatted(1024);
    let files = open(&disk);
    let ino = files.make(ROOT, "log");
    let part = |number: usize| vec![(number % 251 + 1) as u8; 100];
    let start = disk.history().len();
    let mut answered = Vec::new();
    for number in 0..3500 {
        files.put(ino, number as u64 * 100, &part(number));
        let name = format!("temp-{}-{}", number % 60, "x".repeat(200)).into_bytes();
        let _ = match files.lookup(ROOT, &name) {
            Ok(_) => wait(|done| files.unlink(ROOT, &name, done)),
            Err(_) => wait(|done| files.create(ROOT, &name, new(NewKind::File), false, done)).map(drop),
        };
        answered.push(disk.history().len());
    }
    let history = disk.history();
    let is_head = |request: &Request| matches!(request, Request::Write { runs, .. } if runs[0].first == 0);
    let heads: Vec<usize> = (start..history.len()).filter(|at| is_head(&history[*at])).collect();
    assert!(heads.len() >= 8, "{} heads", heads.len());
    let near_heads = heads.iter().flat_map(|at| at.saturating_sub(3)..at + 4);
    for cut in
        near_heads.chain((start..=history.len()).step_by(101)).filter(|cut| (start..=history.len()).contains(cut))
    {
        let data = reopened(1024, &history[..cut]).all(ino);
        let count = answered.partition_point(|at| *at <= cut);
        assert!(
            [count * 100, count * 100 + 100].contains(&data.len()),
            "{} bytes, {count} answered, cut at {cut}",
            data.len()
        );
        assert!(data.chunks(100).enumerate().all(|(number, found)| found == part(number)), "cut at {cut}");
    }
}

#[test]
fn a_full_volume_refuses_writes_and_loses_nothing() {
    let disk = formatted(1024);
    let files = open(&disk);
    let (ino, other) = (files.make(ROOT, "f"), files.make(ROOT, "g"));
    let mut size = 0;
    let error = loop {
        let data = Bytes::from(vec![(size >> 16) as u8; 50_000]);
        match wait(|done| files.write(ino, size, data, done)) {
            Ok(()) => size += 50_000,
            Err(error) => break error,
        }
    };
    assert_eq!(error.errno(), Errno::NOSPC);
    assert!(size > 3_000_000, "{size}");
    let refused = [
        wait(|done| files.write(other, 0, Bytes::from_static(&[1; 200_000]), done)),
        wait(|done| files.fallocate(other, 0, 1 << 30, Allocate::Keep, done)),
    ];
    assert!(refused.into_iter().all(|result| result.unwrap_err().errno() == Errno::NOSPC));
    let check = |files: &Files| {
        let data = files.all(ino);
        assert_eq!((data.len() as u64, files.getattr(other).unwrap().size), (size, 0));
        assert!(
            data.chunks(50_000)
                .zip((0..).step_by(50_000))
                .all(|(part, at)| part.iter().all(|byte| *byte == (at >> 16) as u8))
        );
    };
    check(&files);
    check(&reopened(1024, &disk.history()));
    // In place there is room, and after something was removed too, at once.
    files.put(ino, 10, &[9; 100]);
    files.cut(ino, 1_000_000);
    files.put(other, 0, &[3; 2_000_000]);
    assert!(files.all(other).iter().all(|byte| *byte == 3));
}

#[test]
fn what_a_file_had_before_is_not_seen_again() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    files.put(ino, 0, &[0xee; 200_000]);
    files.cut(ino, 70_001);
    files.cut(ino, 200_000);
    assert!(files.get(ino, 70_001, 200_000).iter().all(|byte| *byte == 0));
    assert!(files.get(ino, 0, 70_001).iter().all(|byte| *byte == 0xee));
    // Clusters of a file that is gone.
    wait(|done| files.unlink(ROOT, b"f", done)).unwrap();
    let disk = Memory::after(BLOCKS, &disk.history(), false);
    let files = open(&disk);
    let ino = files.make(ROOT, "g");
    files.put(ino, 5000, b"x");
    files.put(ino, 150_000, b"x");
    wait(|done| files.fallocate(ino, 300_000, 100_000, Allocate::Grow, done)).unwrap();
    let data = files.all(ino);
    assert_eq!((data.len(), data.iter().filter(|byte| **byte != 0).count()), (400_000, 2));
}

#[test]
fn holes_take_no_space_and_are_found() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    files.put(ino, 10 << 20, &[1; 10]);
    assert_eq!(files.getattr(ino).unwrap().blocks, 128);
    let found = |offset, hole| files.seek(ino, offset, hole).unwrap();
    assert_eq!((found(0, false), found(0, true), found(11 << 20, false)), (Some(10 << 20), Some(0), None));
    assert_eq!(found((10 << 20) + 3, true), Some((10 << 20) + 10));
    files.put(ino, 0, &[1; 200_000]);
    wait(|done| files.fallocate(ino, 1000, 150_000, Allocate::Punch, done)).unwrap();
    assert_eq!(files.getattr(ino).unwrap().blocks, 4 * 128);
    let data = files.get(ino, 0, 200_000);
    assert!(data[..1000].iter().chain(&data[151_000..]).all(|byte| *byte == 1));
    assert!(data[1000..151_000].iter().all(|byte| *byte == 0));
    assert_eq!(found(0, true), Some(65_536));
}

/// Every place of both ends, in a block, a cluster and the file.
#[test]
fn what_is_punched_is_zeros_and_nothing_else_is() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    let size = 3 * 65_536 + 5000;
    let ends = [
        0,
        1,
        4095,
        4096,
        4097,
        8192,
        61_440,
        65_535,
        65_536,
        65_537,
        69_632,
        131_072,
        139_264,
        196_608,
        200_000,
        size,
        size + 1,
        300_000,
    ];
    for (start, end) in
        ends.iter().flat_map(|start| ends.iter().map(move |end| (*start, *end))).filter(|(start, end)| start < end)
    {
        files.put(ino, 0, &vec![1; size as usize]);
        wait(|done| files.fallocate(ino, start, end - start, Allocate::Punch, done)).unwrap();
        let data = files.all(ino);
        let is_right = |(at, byte): (u64, &u8)| *byte == u8::from(!(start..end).contains(&at));
        assert!(data.len() as u64 == size && (0..).zip(&data).all(is_right), "{start} to {end}");
        if start % 3 == 0 {
            assert_eq!(reopened(BLOCKS, &disk.history()).all(ino), data);
        }
    }
}

#[test]
fn a_disk_that_fails_ends_every_change_after_it() {
    let disk = formatted(BLOCKS);
    let files = open(&disk);
    let ino = files.make(ROOT, "f");
    disk.break_down();
    let errors = [
        wait(|done| files.write(ino, 0, Bytes::from_static(b"x"), done)),
        wait(|done| files.write(ino, 3, Bytes::from_static(b"y"), done)),
        wait(|done| files.fsync(ino, false, done)),
        wait(|done| files.unlink(ROOT, b"f", done)),
        wait(|done| files.read(ino, 0, 10, done)).map(drop),
    ];
    assert!(errors.into_iter().all(|result| result.unwrap_err().errno() == Errno::IO));
}

// A disk in memory, whose history is kept: what is left of it after a failure is any beginning of that.

pub(super) struct Memory {
    inner: Mutex<Inner>,
    /// Requests wait for [`Memory::finish`].
    is_later: bool,
}

struct Inner {
    blocks: Vec<u8>,
    /// Of each block, which of the changes it is of.
    changes: Vec<u64>,
    /// Every change and flush.
    history: Vec<Request>,
    waiting: VecDeque<(Request, DiskDone)>,
    reads: usize,
    is_broken: bool,
}

impl Inner {
    fn apply(&mut self, request: &Request) -> Bytes {
        let place = |run: &Run| {
            let at = run.first as usize * BLOCK_BYTES;
            at..at + run.count as usize * BLOCK_BYTES
        };
        match request {
            Request::Write { runs, data } => {
                assert!(runs.len() <= remora_volume::wire::MOST_RUNS, "{} runs", runs.len());
                assert!((1..=remora_volume::wire::MOST_BLOCKS * BLOCK_BYTES).contains(&data.len()));
                let mut data = data.clone();
                for run in runs {
                    self.note(run);
                    let part = data.split_to(run.count as usize * BLOCK_BYTES);
                    self.blocks[place(run)].copy_from_slice(&part);
                }
                assert!(data.is_empty(), "bytes without a block");
            }
            Request::Zero(run) => {
                assert!((1..=remora_volume::wire::MOST_ENTRIES).contains(&(run.count as usize)));
                self.note(run);
                self.blocks[place(run)].fill(0);
            }
            Request::Read(run) => {
                self.reads += 1;
                return Bytes::copy_from_slice(&self.blocks[place(run)]);
            }
            Request::Flush => {}
            Request::Map(_) => unreachable!("not asked for"),
        }
        self.history.push(request.clone());
        Bytes::new()
    }
}

impl Inner {
    fn note(&mut self, run: &Run) {
        let number = self.history.len() as u64 + 1;
        run.blocks().for_each(|block| self.changes[block as usize] = number);
    }
}

impl Memory {
    pub(super) fn new(blocks: u64) -> Arc<Memory> {
        Memory::after(blocks, &[], false)
    }

    /// Requests are not done until [`Memory::finish`].
    pub(super) fn later(blocks: u64, history: &[Request]) -> Arc<Memory> {
        Memory::after(blocks, history, true)
    }

    /// What is left after these changes.
    pub(super) fn after(blocks: u64, history: &[Request], is_later: bool) -> Arc<Memory> {
        let (blocks, changes) = (vec![0; blocks as usize * BLOCK_BYTES], vec![0; blocks as usize]);
        let mut inner =
            Inner { blocks, changes, history: Vec::new(), waiting: VecDeque::new(), reads: 0, is_broken: false };
        history.iter().for_each(|request| _ = inner.apply(request));
        Arc::new(Memory { inner: Mutex::new(inner), is_later })
    }

    pub(super) fn history(&self) -> Vec<Request> {
        self.inner.lock().unwrap().history.clone()
    }

    pub(super) fn reads(&self) -> usize {
        self.inner.lock().unwrap().reads
    }

    /// Puts garbage into blocks, as another program would have left it.
    pub(super) fn dirty(&self, block: u64) {
        self.inner.lock().unwrap().blocks[block as usize * BLOCK_BYTES..][..BLOCK_BYTES].fill(0xdd);
    }

    /// Reads a block as another host does, without a request. Returns which of the changes it is of.
    pub(super) fn peek(&self, block: u64, into: &mut [u8]) -> u64 {
        let (at, inner) = (block as usize * BLOCK_BYTES, self.inner.lock().unwrap());
        into.copy_from_slice(&inner.blocks[at..at + into.len()]);
        inner.changes[block as usize]
    }

    /// How many changes there were.
    pub(super) fn changes(&self) -> u64 {
        self.inner.lock().unwrap().history.len() as u64
    }

    pub(super) fn break_down(&self) {
        self.inner.lock().unwrap().is_broken = true;
    }

    pub(super) fn waiting(&self) -> usize {
        self.inner.lock().unwrap().waiting.len()
    }

    /// The first of the requests that wait fails, and all after it.
    pub(super) fn fail(&self) {
        self.break_down();
        let waiting = std::mem::take(&mut self.inner.lock().unwrap().waiting);
        waiting.into_iter().for_each(|(_, done)| done(Err(Error::Closed)));
    }

    /// Does the first of the requests that wait. Returns whether there was one.
    pub(super) fn finish(&self) -> bool {
        let mut inner = self.inner.lock().unwrap();
        let Some((request, done)) = inner.waiting.pop_front() else { return false };
        let data = inner.apply(&request);
        drop(inner);
        done(Ok(data));
        true
    }
}

impl Disk for Memory {
    fn blocks(&self) -> u64 {
        (self.inner.lock().unwrap().blocks.len() / BLOCK_BYTES) as u64
    }

    fn submit(&self, request: Request, done: DiskDone) {
        let mut inner = self.inner.lock().unwrap();
        if inner.is_broken {
            drop(inner);
            return done(Err(Error::Closed));
        }
        if self.is_later {
            return inner.waiting.push_back((request, done));
        }
        let data = inner.apply(&request);
        drop(inner);
        done(Ok(data));
    }

    fn try_read(&self, run: Run) -> Option<Bytes> {
        (!self.is_later).then(|| self.inner.lock().unwrap().apply(&Request::Read(run)))
    }
}

// A disk as one file.

fn opened(blocks: u64) -> (Arc<Memory>, Image) {
    let disk = Memory::new(blocks);
    let image = Image::open(Arc::clone(&disk) as Arc<dyn Disk>).unwrap();
    (disk, image)
}

fn bytes(image: &Image, at: u64, length: u32) -> Vec<u8> {
    wait(|done| image.read(at, length, done)).unwrap().concat()
}

#[test]
fn any_bytes_are_written_zeroed_and_read_as_in_a_plain_file() {
    let (disk, image) = opened(100);
    let mut plain = vec![0_u8; 100 * BLOCK_BYTES];
    let mut random = Random::new(remora_lab::random::seed("image"));
    for round in 0..2000 {
        let at = random.below(plain.len() as u64 - 1);
        let at = if random.one_in(3) { at / 4096 * 4096 } else { at / 512 * 512 };
        let length = random.between(1, 20_000).min(plain.len() as u64 - at);
        let part = at as usize..(at + length) as usize;
        if random.one_in(4) {
            plain[part].fill(0);
            wait(|done| image.zero(at, length, done)).unwrap();
        } else {
            let data = random.bytes(length as usize);
            plain[part].copy_from_slice(&data);
            wait(|done| image.write(at, data.into(), done)).unwrap();
        }
        let at = random.below(plain.len() as u64);
        let length = random.between(1, 30_000);
        let end = (at + length).min(plain.len() as u64);
        assert_eq!(bytes(&image, at, length as u32), plain[at as usize..end as usize], "round {round}");
    }
    assert!(
        disk.history().iter().any(|request| matches!(request, Request::Zero(_))),
        "whole blocks of zeros are not sent"
    );
    assert_eq!(bytes(&image, 100 << 12, 5), b"");
    assert!(wait(|done| image.write((100 << 12) - 1, Bytes::from_static(b"xy"), done)).is_err());
}

/// Sectors of the same blocks, as the kernel has them under way together.
#[test]
fn sectors_of_one_block_undo_nothing_of_each_other() {
    let disk = Memory::later(16, &[]);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                if !disk.finish() {
                    thread::yield_now();
                }
            }
        });
        let image = Image::open(Arc::clone(&disk) as Arc<dyn Disk>).unwrap();
        thread::scope(|scope| {
            for writer in 0..4_u64 {
                let image = &image;
                scope.spawn(move || {
                    for round in 1..60_u8 {
                        for sector in (writer..64).step_by(4) {
                            wait(|done| image.write(sector * 512, Bytes::from(vec![round; 512]), done)).unwrap();
                        }
                    }
                });
            }
        });
        assert!(bytes(&image, 0, 64 * 512).iter().all(|byte| *byte == 59));
        is_over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_volume_with_files_is_not_an_image() {
    let disk = formatted(BLOCKS);
    let opened = Image::open(Arc::clone(&disk) as Arc<dyn Disk>);
    assert!(matches!(opened.err(), Some(FilesError::HasFiles)));
}

#[derive(Clone, Debug)]
enum Step {
    Write { file: usize, offset: u64, length: usize },
    Append { file: usize, length: usize },
    Cut { file: usize, size: u64 },
    Punch { file: usize, offset: u64, length: u64, how: Allocate },
    Allocate { file: usize, offset: u64, length: u64, how: Allocate },
    Rename { file: usize, to: usize, how: Rename },
    Unlink { file: usize },
    Link { file: usize, to: usize },
    Fsync { file: usize },
    Reopen,
}

const FILES: usize = 4;

/// Offsets near the ends of blocks and clusters, and anywhere.
fn offsets() -> impl Strategy<Value = u64> {
    let near = (0..6_u64, prop::sample::select(vec![4096_u64, 65_536]), 0..5_u64)
        .prop_map(|(number, unit, around)| (number * unit + around).saturating_sub(2));
    prop_oneof![near, 0..300_000_u64]
}

fn steps() -> impl Strategy<Value = Step> {
    let file = 0..FILES;
    let length = prop_oneof![1..100_usize, 4000..4200_usize, 1..150_000_usize];
    let bytes = offsets().prop_map(|length| length.max(1)).boxed();
    let renames = prop::sample::select(vec![Rename::Replace, Rename::NoReplace, Rename::Exchange]);
    let punches = prop::sample::select(vec![Allocate::Punch, Allocate::ZeroKeep, Allocate::ZeroGrow]);
    let allocates = prop::sample::select(vec![Allocate::Keep, Allocate::Grow]);
    prop_oneof![
        4 => (file.clone(), offsets(), length.clone()).prop_map(|(file, offset, length)| Step::Write { file, offset, length }),
        4 => (file.clone(), length).prop_map(|(file, length)| Step::Append { file, length }),
        2 => (file.clone(), offsets()).prop_map(|(file, size)| Step::Cut { file, size }),
        2 => (file.clone(), offsets(), bytes.clone(), punches)
            .prop_map(|(file, offset, length, how)| Step::Punch { file, offset, length, how }),
        1 => (file.clone(), offsets(), bytes, allocates)
            .prop_map(|(file, offset, length, how)| Step::Allocate { file, offset, length, how }),
        1 => (file.clone(), file.clone(), renames).prop_map(|(file, to, how)| Step::Rename { file, to, how }),
        1 => file.clone().prop_map(|file| Step::Unlink { file }),
        1 => (file.clone(), file.clone()).prop_map(|(file, to)| Step::Link { file, to }),
        1 => file.prop_map(|file| Step::Fsync { file }),
        1 => Just(Step::Reopen),
    ]
}

fn name(file: usize) -> String {
    format!("file-{file}")
}

/// Files and what is in them.
fn contents(files: &Files) -> BTreeMap<String, Vec<u8>> {
    let mut found = Vec::new();
    files
        .readdir(ROOT, 2, |entry| {
            found.push((String::from_utf8(entry.name.to_vec()).unwrap(), entry.ino));
            true
        })
        .unwrap();
    found.into_iter().map(|(name, ino)| (name, files.all(ino))).collect()
}

fn contents_of(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

struct Both {
    disk: Arc<Memory>,
    files: Files,
    directory: TempDir,
    /// Makes the bytes of each write different.
    seed: u8,
}

impl Both {
    fn new() -> Both {
        let disk = formatted(BLOCKS);
        Both { files: open(&disk), disk, directory: tempfile::tempdir().unwrap(), seed: 0 }
    }

    fn inode(&self, file: usize) -> u64 {
        let found = self.files.lookup(ROOT, name(file).as_bytes());
        found.map_or_else(|_| self.files.make(ROOT, &name(file)), |attr| attr.ino)
    }

    fn file(&self, file: usize) -> fs::File {
        let path = self.directory.path().join(name(file));
        fs::File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        self.seed = self.seed.wrapping_add(7) | 1;
        (0..length).map(|at| self.seed.wrapping_add((at / 251) as u8)).collect()
    }

    fn carry_out(&mut self, step: &Step) {
        match *step {
            Step::Write { file, offset, length } => {
                let data = self.bytes(length);
                self.file(file).write_all_at(&data, offset).unwrap();
                self.files.put(self.inode(file), offset, &data);
            }
            Step::Append { file, length } => {
                let (data, real) = (self.bytes(length), self.file(file));
                real.write_all_at(&data, real.metadata().unwrap().len()).unwrap();
                let ino = self.inode(file);
                self.files.put(ino, self.files.getattr(ino).unwrap().size, &data);
            }
            Step::Cut { file, size } => {
                self.file(file).set_len(size).unwrap();
                self.files.cut(self.inode(file), size);
            }
            Step::Punch { file, offset, length, how } => {
                let real = self.file(file);
                if how == Allocate::ZeroGrow {
                    real.set_len(real.metadata().unwrap().len().max(offset + length)).unwrap();
                }
                let end = real.metadata().unwrap().len().min(offset + length);
                real.write_all_at(&vec![0; end.saturating_sub(offset) as usize], offset).unwrap();
                let ino = self.inode(file);
                wait(|done| self.files.fallocate(ino, offset, length, how, done)).unwrap();
            }
            Step::Allocate { file, offset, length, how } => {
                let real = self.file(file);
                if how == Allocate::Grow {
                    real.set_len(real.metadata().unwrap().len().max(offset + length)).unwrap();
                }
                let ino = self.inode(file);
                wait(|done| self.files.fallocate(ino, offset, length, how, done)).unwrap();
            }
            Step::Rename { file, to, how } => {
                let [from, to] = [name(file), name(to)];
                let paths = [&from, &to].map(|name| self.directory.path().join(name));
                let flags = match how {
                    Rename::Replace => rustix::fs::RenameFlags::empty(),
                    Rename::NoReplace => rustix::fs::RenameFlags::NOREPLACE,
                    Rename::Exchange => rustix::fs::RenameFlags::EXCHANGE,
                };
                let real = rustix::fs::renameat_with(rustix::fs::CWD, &paths[0], rustix::fs::CWD, &paths[1], flags);
                let ours = wait(|done| self.files.rename((ROOT, from.as_bytes()), (ROOT, to.as_bytes()), how, done));
                assert_eq!(ours.map_err(|error| error.errno()), real);
            }
            Step::Unlink { file } => {
                let real = rustix::fs::unlink(self.directory.path().join(name(file)));
                let ours = wait(|done| self.files.unlink(ROOT, name(file).as_bytes(), done));
                assert_eq!(ours.map_err(|error| error.errno()), real);
            }
            Step::Link { file, to } => {
                let ino = self.inode(file);
                drop(self.file(file));
                let real =
                    rustix::fs::link(self.directory.path().join(name(file)), self.directory.path().join(name(to)));
                let ours = wait(|done| self.files.link(ino, ROOT, name(to).as_bytes(), done));
                assert_eq!(ours.map(drop).map_err(|error| error.errno()), real);
            }
            Step::Fsync { file } => {
                drop(self.file(file));
                let ino = self.inode(file);
                wait(|done| self.files.fsync(ino, false, done)).unwrap();
            }
            Step::Reopen => {
                self.disk = Memory::after(BLOCKS, &self.disk.history(), false);
                self.files = open(&self.disk);
            }
        }
    }

    /// Whatever beginning of a step's writes is left, each byte is the one of before or of after it; and a file that is
    /// longer than before has all bytes of after.
    fn check_beginnings(
        &self,
        start: usize,
        before: &BTreeMap<String, Vec<u8>>,
        after: &BTreeMap<String, Vec<u8>>,
        step: &Step,
    ) {
        let history = self.disk.history();
        for end in start..=history.len() {
            let found = contents(&reopened(BLOCKS, &history[..end]));
            for (name, data) in &found {
                let empty = Vec::new();
                let [old, new] = [before, after].map(|contents| contents.get(name).unwrap_or(&empty));
                assert!(
                    [old.len(), new.len(), 0].contains(&data.len()),
                    "{name} after {end} of {}: {step:?}",
                    history.len()
                );
                if data.len() > old.len() && matches!(step, Step::Write { .. } | Step::Append { .. }) {
                    assert!(data == new, "{name} is longer after {end} of {}: {step:?}", history.len());
                }
                let byte = |data: &[u8], at| data.get(at).copied().unwrap_or(0);
                let is_either = (0..data.len()).all(|at| [byte(old, at), byte(new, at)].contains(&data[at]));
                // A rename changes which file it is, at once.
                let is_swapped = matches!(step, Step::Rename { .. } | Step::Link { .. } | Step::Unlink { .. });
                assert!(is_either || (is_swapped && (data == old || data == new)), "{name} after {end}: {step:?}");
            }
            let names: Vec<_> = found.keys().collect();
            let is_known = names == before.keys().collect::<Vec<_>>() || names == after.keys().collect::<Vec<_>>();
            assert!(is_known, "{names:?} after {end}: {step:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn files_are_what_those_of_this_machine_are(steps in prop::collection::vec(steps(), 1..60)) {
        let mut both = Both::new();
        for step in &steps {
            both.carry_out(step);
            prop_assert!(contents(&both.files) == contents_of(both.directory.path()), "{:?}", step);
        }
        let again = reopened(BLOCKS, &both.disk.history());
        prop_assert!(contents(&again) == contents_of(both.directory.path()), "opened again");
        prop_assert_eq!(again.statfs(), both.files.statfs());
    }

    #[test]
    #[ignore = "long: make test-all"]
    fn every_beginning_of_what_was_written_is_files_of_before_or_after_a_step(steps in prop::collection::vec(steps(), 1..12)) {
        let mut both = Both::new();
        for step in &steps {
            // A file that a step needs is made before.
            if let Step::Write { file, .. } | Step::Append { file, .. } | Step::Cut { file, .. } | Step::Punch { file, .. }
                | Step::Allocate { file, .. } | Step::Link { file, .. } | Step::Fsync { file } = step
            {
                drop(both.file(*file));
                both.inode(*file);
            }
            let before = contents(&both.files);
            let start = both.disk.history().len();
            both.carry_out(step);
            let after = contents(&both.files);
            if !matches!(step, Step::Reopen) {
                both.check_beginnings(start, &before, &after, step);
            }
        }
    }
}
