//! The bodies of the fuzz targets, which `cargo test` runs on every seed: any bytes must end in names or an error,
//! never in a panic, an endless loop, or names that contradict themselves.

use remora_volume::shape::BLOCK_BYTES;

use super::layout::{Geometry, Head};
use super::log::{FRAME_HEAD_BYTES, MOST_FRAME_BYTES, Place, Record, encode_frame};
use super::{Kind, Names, ROOT, View};

/// A body, and the folder of its seeds.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 2] = [("names_area", area), ("names_raw_area", raw_area)];

/// The least areas: an input is short.
fn geometry() -> Option<Geometry> {
    Geometry::with_area(4096, 32)
}

/// An area, as it could be in a volume. Two bytes are where the image ends; the others are the area from its beginning.
/// What is wrong with a checksum is seldom of interest, so the bytes are records only: each frame is a length, whose
/// two bytes are followed by so many bytes of records.
pub fn area(bytes: &[u8]) {
    let _ = loads(bytes); // a refusal is as good
}

/// Whether these are names.
fn loads(bytes: &[u8]) -> bool {
    let (Some(geometry), Some((end, mut rest))) = (geometry(), bytes.split_first_chunk::<2>()) else { return false };
    let (image_frames, mut area, mut image_bytes, mut number) = (end[0], Vec::new(), 0, 0);
    for frame in 0_u32.. {
        let Some((length, after)) = rest.split_first_chunk::<2>() else { break };
        let length = usize::from(u16::from_le_bytes(*length)).min(after.len()).min(MOST_FRAME_BYTES - FRAME_HEAD_BYTES);
        let (records, after) = after.split_at(length);
        rest = after;
        put_frame(&mut area, number, records);
        number += 1;
        if frame == u32::from(image_frames) {
            (image_bytes, number) = (area.len() as u64, FIRST);
        }
    }
    area.resize(geometry.area_bytes() as usize, 0);
    let head = Head { lap: 1, last_lap: 1, image_bytes, first: FIRST, geometry, area: super::layout::Area::FIRST };
    load(head, &area)
}

const FIRST: u64 = 1000;

/// The area's bytes as they are, with a head that names all of it as image or as log.
pub fn raw_area(bytes: &[u8]) {
    let (Some(geometry), Some((end, rest))) = (geometry(), bytes.split_first_chunk::<2>()) else { return };
    let mut area = rest.to_vec();
    area.resize(geometry.area_bytes() as usize, 0);
    let image_bytes = u64::from(u16::from_le_bytes(*end)).min(geometry.area_bytes());
    let head = Head { lap: 1, last_lap: 1, image_bytes, first: FIRST, geometry, area: super::layout::Area::FIRST };
    load(head, &area);
    let mut block = rest.to_vec();
    block.resize(BLOCK_BYTES, 0);
    if let Ok(head) = Head::parse(&block) {
        assert_eq!(head.to_block()[..72], block[..72], "two encodings of {head:?}");
    }
}

fn put_frame(area: &mut Vec<u8>, number: u64, records: &[u8]) {
    let left = BLOCK_BYTES - area.len() % BLOCK_BYTES;
    if left < FRAME_HEAD_BYTES {
        area.resize(area.len() + left, 0);
    }
    let place = Place { lap: 1, at: area.len() as u64 };
    super::log::encode_frame_of(place, number, |into| into.extend_from_slice(records), area);
    let mut rest = records;
    while let Ok(record) = Record::decode(&mut rest) {
        let mut again = Vec::new();
        record.encode(&mut again);
        assert_eq!(
            (again.len(), record.clone()),
            (record.bytes(), Record::decode(&mut again.as_slice()).unwrap_or(record))
        );
    }
}

/// Loads names, uses them, and checks that they are the same once they were written as an image.
fn load(head: Head, area: &[u8]) -> bool {
    let mut view = View::new(head);
    for blocks in area.chunks(3 * BLOCK_BYTES) {
        match view.push(blocks) {
            Err(_) => return false,
            Ok(true) => {}
            Ok(false) => break,
        }
    }
    let Ok(mut names) = Names::of(view, head.geometry.blocks()) else { return false };
    let mut entries = 0;
    check(&names, ROOT, 0, &mut entries);
    // All names as an image, and read again.
    if names.usage().free_inodes == 0 {
        return true;
    }
    let mut blocks = vec![0; (1 + 2 * head.geometry.area()) as usize * BLOCK_BYTES];
    let at = head.geometry.area_at(head.area) as usize * BLOCK_BYTES;
    blocks[at..at + area.len()].copy_from_slice(area);
    for write in names.write_whole_image() {
        let at = write.first as usize * BLOCK_BYTES;
        blocks[at..at + write.data.len()].copy_from_slice(&write.data);
    }
    let again = Head::parse(&blocks[..BLOCK_BYTES]).ok().map(View::new);
    let Some(mut again) = again else { panic!("the head of an image is not read") };
    let at = again.wants().0 as usize * BLOCK_BYTES;
    let pushed = again.push(&blocks[at..at + area.len()]);
    assert_eq!(pushed, Ok(false), "an image is not read");
    assert!(again.tree == *names.tree(), "an image is not what was written");
    true
}

/// Walks all directories. A circle would not end.
fn check(names: &Names, ino: u64, depth: usize, entries: &mut usize) {
    let mut found = Vec::new();
    let listed = names.list(ino, 2, |entry| {
        found.push((entry.name.to_vec(), entry.ino, entry.kind));
        true
    });
    assert_eq!(listed, Ok(()));
    for (name, child, kind) in found {
        *entries += 1;
        assert!(*entries < 100_000 && depth < 10_000, "a circle");
        assert_eq!(names.lookup(ino, &name).map(|attr| (attr.ino, attr.kind)), Ok((child, kind)));
        if kind == Kind::Directory {
            check(names, child, depth + 1, entries);
        }
    }
}

/// Seeds and inputs as [`area`] takes them.
pub fn encode_area(image: &[Vec<Record>], log: &[Vec<Record>]) -> Vec<u8> {
    let mut bytes = (image.len().max(1) as u16 - 1).to_le_bytes().to_vec();
    for records in image.iter().chain(log) {
        let mut frame = Vec::new();
        encode_frame(Place { lap: 0, at: 0 }, 0, records, &mut frame);
        let records = &frame[FRAME_HEAD_BYTES..];
        bytes.extend_from_slice(&(records.len() as u16).to_le_bytes());
        bytes.extend_from_slice(records);
    }
    bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// The seeds by name, in a fixed order.
    fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
        let seed = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
        let mut seeds: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| seed(entry.unwrap())).collect();
        seeds.sort();
        seeds
    }

    #[test]
    fn every_seed_holds() {
        for (target, body) in TARGETS {
            assert!(seeds(target).len() >= 3);
            for (name, bytes) in seeds(target) {
                println!("{target} {name}"); // shown only when the body panics
                body(&bytes);
            }
        }
    }

    /// Seeds that are refused at once would exercise little: those whose names say nothing else are names, and they
    /// have every kind of record.
    #[test]
    fn the_seeds_are_names_of_every_kind() {
        let mut kinds = BTreeSet::new();
        for (name, bytes) in seeds("names_area") {
            assert_eq!(loads(&bytes), !name.starts_with("bad-"), "{name}");
            let mut rest = &bytes[2..];
            while let Some((length, after)) = rest.split_first_chunk::<2>() {
                let (mut records, after) = after.split_at(usize::from(u16::from_le_bytes(*length)));
                rest = after;
                while !records.is_empty() {
                    kinds.insert(records[0]);
                    Record::decode(&mut records).unwrap();
                }
            }
        }
        assert_eq!(kinds, (1..=11).collect());
    }

    proptest! {
        #[test]
        fn a_damaged_seed_holds(
            pick in any::<prop::sample::Index>(),
            damage in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8),
        ) {
            for (target, body) in TARGETS {
                let seeds = seeds(target);
                let mut bytes = pick.get(&seeds).1.clone();
                for (at, byte) in &damage {
                    let at = at.index(bytes.len());
                    bytes[at] ^= byte;
                }
                body(&bytes);
            }
        }

        #[test]
        fn any_bytes_hold(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            TARGETS.iter().for_each(|(_, body)| body(&bytes));
        }
    }
}
