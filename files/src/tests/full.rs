//! A volume that is full for a while: what a process was told is true, whether it writes or maps.
//!
//! The schedules are random. Two rules are taken out, one at a time, and must be found missing.

use std::collections::HashMap;

use remora_lab::Random;

use super::*;
use crate::mutant::Mutant;

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
