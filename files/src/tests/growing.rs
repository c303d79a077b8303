//! Files in a volume that has grown: the names move to larger areas, at once or not at all.

use super::*;
use crate::mutant::Mutant;

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
